//! Loss recovery of TCP: known answers for chosen losses, and properties for any.

use std::fmt::Write as _;

use proptest::prelude::*;
use slipstream_netsim::RunResult;
use slipstream_netsim::flow::FlowResult;

use crate::common::{run, run_on};

/// Time of a packet of 1,500 bytes on the slow link, µs.
const PACKET_US: u64 = 120;
/// Round trip of the path without its queues, µs: the fast links, and the answer.
const ROUND_TRIP_US: u64 = 10_000;

/// A flow of 100 packets over a slow link of 100 Mb/s, with a window of 60. The link fails for some µs at each time, and
/// so loses the packets that it is sending: number `n` from `120 n` µs on, after 12 µs on the host's link.
fn flow(lost: &[(u64, u64)], tcp: &str) -> String {
    let mut failures = String::new();
    for (from, packets) in lost {
        let at_us = 12 + from * PACKET_US + 20;
        let until_us = at_us + (packets - 1) * PACKET_US + 1;
        let (at, until) = (at_us as f64 / 1e6, until_us as f64 / 1e6);
        // Writing to a String cannot fail.
        let _ = writeln!(
            failures,
            "[[failure]]\nlink = [0, 1]\nat = {at:?}\nrepair = {until:?}"
        );
    }
    format!(
        "duration = 30.0\nedges = [[0, 1], [1, 2, 1e9, {}]]\nhosts = [0, 2]\n[link]\npropagation_ns = 0\n\
         host_links = true\nhost = {{ rate = 1e9, propagation_ns = 0 }}\n[routing]\nconvergence = 1e6\n[switch]\nport_rate = 1e8\n\
         [[flow]]\nflow_type = \"TCP\"\nheader_bytes = 40\ngraph = [[0, 2]]\n\
         traffic = {{ size = 146_000, tcp = {{ cc_algorithm = \"NewReno\", initial_window = 60, rto_min = 1.0{tcp} }} }}\n{failures}",
        ROUND_TRIP_US * 1_000 / 2
    )
}

fn lost(packets: &[(u64, u64)], tcp: &str) -> (FlowResult, u64) {
    let result = run(&flow(packets, tcp));
    assert_eq!(result.broken_law(), None);
    (result.flows[0].clone(), result.totals.data_drops)
}

fn us(flow: &FlowResult) -> u64 {
    flow.delivered_ns.expect("delivered") / 1_000
}

/// Time without a loss: two windows, the second of which is not limited by the window.
fn ideal_us() -> u64 {
    let (flow, drops) = lost(&[], "");
    assert_eq!((drops, flow.retransmitted), (0, 0));
    us(&flow)
}

#[test]
fn a_single_loss_is_one_retransmission_and_no_timeout() {
    for tcp in ["", ", rack = false"] {
        let (flow, drops) = lost(&[(10, 1)], tcp);
        assert_eq!(
            (drops, flow.retransmitted, flow.timeouts),
            (1, 1, 0),
            "{tcp}"
        );
        assert_eq!(flow.fast_retransmits, 1);
        assert_eq!(flow.packets_received, 100, "nothing arrived twice");
        assert!(us(&flow) < ideal_us() + 2 * ROUND_TRIP_US, "{}", us(&flow));
    }
}

/// The first window is 60 packets; the flow here has 60, so nothing follows the loss.
#[test]
fn a_lost_tail_is_probed_instead_of_timed_out() {
    let tail = |packets: &[(u64, u64)], tcp: &str| {
        let toml = flow(packets, tcp).replace("146_000", "87_600");
        run(&toml).flows[0].clone()
    };
    let probed = tail(&[(59, 1)], "");
    assert_eq!((probed.retransmitted, probed.timeouts), (1, 0));
    // Two round trips after the last ACK, and one more.
    assert!(us(&probed) < 80_000, "{}", us(&probed));
    let waited = tail(&[(59, 1)], ", rack = false");
    assert_eq!((waited.retransmitted, waited.timeouts), (1, 1));
    assert!(us(&waited) > 1_000_000);
    // Of several, the probe shows the others.
    let probed = tail(&[(56, 4)], "");
    assert_eq!(
        (
            probed.retransmitted,
            probed.timeouts,
            probed.fast_retransmits
        ),
        (4, 0, 1)
    );
    assert!(us(&probed) < 80_000, "{}", us(&probed));
}

/// One round trip for each loss without SACK, one for all with it.
#[test]
fn a_burst_of_losses_is_repaired_in_a_round_trip() {
    for tcp in ["", ", rack = false"] {
        let (flow, drops) = lost(&[(10, 25)], tcp);
        assert_eq!(
            (drops, flow.retransmitted, flow.timeouts),
            (25, 25, 0),
            "{tcp}"
        );
        assert_eq!(flow.packets_received, 100, "nothing arrived twice");
        assert!(us(&flow) < ideal_us() + 3 * ROUND_TRIP_US, "{}", us(&flow));
    }
    let (flow, _) = lost(&[(10, 25)], ", sack = false");
    assert!(us(&flow) > ideal_us() + 20 * ROUND_TRIP_US, "{}", us(&flow));
}

#[test]
fn a_lost_retransmission_is_found_by_what_was_sent_after_it() {
    // The ACKs of packets 11 to 13 return a round trip later, and packet 10 is sent again; what the link sends
    // at that time is lost for a few packets.
    let again = (14 * PACKET_US + ROUND_TRIP_US) / PACKET_US;
    for shift in 0..4 {
        let losses = [(10, 1), (again - 1 + shift, 3)];
        let (flow, drops) = lost(&losses, "");
        assert_eq!((flow.timeouts, drops), (0, flow.retransmitted), "{shift}");
        assert!(
            us(&flow) < ideal_us() + 5 * ROUND_TRIP_US,
            "{shift}: {}",
            us(&flow)
        );
    }
}

/// Packets alternate between two paths of different length.
fn two_paths(difference_us: u64, tcp: &str) -> RunResult {
    let delay = 2_000_000;
    run(&format!(
        "duration = 30.0\nedges = [[0, 1], [0, 2], [1, 3, 1e9, {delay}], [2, 3, 1e9, {}]]\nhosts = [0, 3]\n\
         [link]\npropagation_ns = 0\nhost_links = true\nhost = {{ rate = 1e9, propagation_ns = 0 }}\n[switch]\nport_rate = 1e8\n\
         [[flow]]\nflow_type = \"TCP\"\nrouting = \"Spray\"\nheader_bytes = 40\ngraph = [[0, 3]]\n\
         traffic = {{ size = 5_000_000, tcp = {{ initial_window = 10, ssthresh = 60_000{tcp} }} }}\n",
        delay + difference_us * 1_000
    ))
}

#[test]
fn reordering_within_the_window_is_no_loss() {
    // Two packets at most overtake; a quarter of the round trip is 1 ms.
    let flow = &two_paths(100, "").flows[0];
    assert_eq!((flow.retransmitted, flow.fast_retransmits), (0, 0));
    // Many overtake: counting takes them as lost again and again. RACK learns.
    let (rack, counted) = (two_paths(700, ""), two_paths(700, ", rack = false"));
    let (rack, counted) = (&rack.flows[0], &counted.flows[0]);
    assert!(rack.fast_retransmits <= 2, "{rack:?}");
    assert!(counted.fast_retransmits > 10, "{counted:?}");
    assert!(2 * us(rack) < us(counted), "{rack:?} {counted:?}");
}

/// NewReno and CUBIC: slow start without a limit loses half a window. With SACK that costs no timeout.
#[test]
fn the_overshoot_of_slow_start_needs_no_timeout() {
    for control in ["NewReno", "CUBIC", "BBR"] {
        for capacity in [85, 171, 342] {
            let toml = format!(
                "duration = 5.0\nedges = [[0, 1]]\nhosts = [0, 1]\n[link]\npropagation_ns = 10000000\nhost_links = true\n\
                 host = {{ rate = 1e9, propagation_ns = 1000 }}\n[switch]\nport_rate = 1e8\ncapacity = {capacity}\n\
                 [[flow]]\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = {{ size = 1_000_000_000, tcp = {{ \
                 cc_algorithm = \"{control}\", rto_min = 0.2, ssthresh = 1_000_000_000 }} }}\n"
            );
            let result = run(&toml);
            let flow = &result.flows[0];
            assert_eq!(
                (flow.timeouts, result.broken_law()),
                (0, None),
                "{control} {capacity}"
            );
            assert_eq!(
                flow.retransmitted, result.totals.data_drops,
                "{control} {capacity}"
            );
            let share = flow.bytes_in_order as f64 * 8.0 / 5e8;
            assert!(share > 0.85, "{control} {capacity}: {share}");
        }
    }
}

/// `usual` cases, unless PROPTEST_CASES gives their number.
fn cases(usual: u32) -> ProptestConfig {
    match std::env::var("PROPTEST_CASES") {
        Ok(_) => ProptestConfig::default(),
        Err(_) => ProptestConfig::with_cases(usual),
    }
}

proptest! {
    #![proptest_config(cases(24))]

    /// Every byte arrives, and nothing is sent again but what was lost, on a path that keeps the order. (Probes and
    /// timeouts may repeat more.)
    #[test]
    fn only_lost_packets_are_sent_again(
        seed in 0u64..1000,
        control in prop::sample::select(vec!["NewReno", "CUBIC", "DCTCP", "BBR"]),
        size in 1u64..400_000,
        packet in 100u32..3_000,
        capacity in 2u32..60,
        loss in prop::sample::select(vec![0.0, 0.001, 0.02, 0.2]),
        rack in any::<bool>(),
    ) {
        let result = run(&format!(
            "seed = {seed}\nduration = 4000.0\nedges = [[0, 1]]\nhosts = [0, 1]\n[link]\npropagation_ns = 1000000\n\
             host_links = true\nhost = {{ rate = 1e9, propagation_ns = 1000 }}\n[switch]\nport_rate = 1e8\n\
             capacity = {capacity}\nloss = {loss}\ndrop = \"ECN_THRESHOLD\"\necn_threshold = {}\n\
             [[flow]]\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = {{ size = {size}, pkt_size_dist = {packet}, \
             tcp = {{ cc_algorithm = \"{control}\", rto_min = 0.01, rack = {rack}, ssthresh = 1_000_000 }} }}\n",
            capacity.div_ceil(2)
        ));
        let f = &result.flows[0];
        prop_assert_eq!(result.broken_law(), None);
        prop_assert_eq!((f.bytes_acked, f.bytes_in_order, result.in_flight()), (size, size, 0), "{:?}", f);
        let twice = f.packets_received - size.div_ceil(u64::from(packet));
        prop_assert_eq!(f.retransmitted, result.totals.data_drops + twice);
        if f.timeouts == 0 && !rack {
            prop_assert_eq!(twice, 0, "{:?}", f);
        }
    }

    /// Losses in several parts of a network, whose options cross parts.
    #[test]
    fn options_move_between_parts(seed in 0u64..1000, capacity in 4u32..30, loss in 0.0..0.05, rack in any::<bool>()) {
        let toml = format!(
            "seed = {seed}\nduration = 300.0\n[topology]\ncategory = \"LeafSpine\"\nleaf_spine = {{ leaves = 4, spines = 2, hosts_per_leaf = 2 }}\n\
             [link]\npropagation_ns = 1000\n[routing]\npolicy = \"ECMP\"\n[switch]\nport_rate = 1e9\ncapacity = {capacity}\nloss = {loss}\n\
             [[flow_set]]\nflow_type = \"TCP\"\npairing = \"Permutation\"\n\
             traffic = {{ size = 200_000, tcp = {{ rto_min = 0.01, rack = {rack} }} }}\n"
        );
        let one = run(&toml);
        prop_assert_eq!(one.broken_law(), None);
        prop_assert!(one.flows.iter().all(|f| f.bytes_in_order == 200_000));
        for threads in [2, 4] {
            prop_assert_eq!(&run_on(&toml, threads), &one);
        }
    }
}
