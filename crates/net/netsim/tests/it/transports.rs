//! Properties of every transport: no more packets than its bytes fill, and no endless wait.

use proptest::prelude::*;
use slipstream_netsim::RunResult;
use slipstream_netsim::scenario::{Congestion, Transport};

use crate::common::{config, pair, run};

/// Every congestion control by its name in a file, so that one that is added is tested here.
fn controls() -> impl Iterator<Item = &'static str> {
    Congestion::names().map(|(name, _)| name)
}

fn tcp(size: u64, mss: u32, tcp: &str) -> String {
    format!(
        "[[flow]]\nflow_id = 1\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = {{ size = {size}, \
         pkt_size_dist = {mss}, tcp = {{ {tcp} }} }}\n"
    )
}

/// One flow from a fast host link into a slow link: only the sender's window limits it.
fn narrow(switch: &str, flow: &str) -> String {
    format!(
        "edges = [[0, 1]]\nhosts = [0, 1]\nduration = 1000.0\n[link]\npropagation_ns = 100000\n\
         [link.host]\nrate = 1e9\n[switch]\nport_rate = 1e8\n{switch}\n{flow}"
    )
}

fn check_packets(result: &RunResult, size: u64, mss: u32, what: &str) {
    let f = &result.flows[0];
    assert_eq!(result.totals.data_drops, 0, "{what}");
    assert_eq!(f.bytes_acked, size, "{what}");
    assert_eq!((f.retransmitted, f.timeouts), (0, 0), "{what}");
    assert_eq!(f.bytes_sent, size, "{what}");
    assert_eq!(f.packets_sent, size.div_ceil(u64::from(mss)), "{what}");
    assert_eq!(f.acks, f.packets_sent, "{what}");
}

#[test]
fn without_loss_every_congestion_control_sends_full_segments() {
    for (control, label) in Congestion::names() {
        let toml = narrow("", &tcp(1, 1, &format!("cc_algorithm = \"{control}\"")));
        let Transport::Tcp(made) = config(&toml).scenario.flows[0].transport else {
            panic!("{control} is not TCP");
        };
        assert_eq!(made.congestion.label(), label);
        for (size, mss, more) in [
            (20_000_000, 1460, "ssthresh = 100_000"),
            (1_048_576, 1460, "ssthresh = 65_535"),
            (1_000_000, 1000, "ssthresh = 1"),
            (1_000_001, 1000, "ssthresh = 2_001"),
            (3_000_000, 1448, "ssthresh = 1_000_000_000"),
            (300_000, 9000, "ssthresh = 8_999, initial_window = 1"),
            (999, 1000, "initial_window = 10"),
        ] {
            let flow = tcp(size, mss, &format!("cc_algorithm = \"{control}\", {more}"));
            let result = run(&narrow("", &flow));
            check_packets(&result, size, mss, &format!("{control}, {size} B, {more}"));
        }
    }
}

#[test]
fn windows_cut_by_marks_send_full_segments_too() {
    // Marks repeatedly cut windows to fractions of a segment, without any loss.
    let switch = "drop = \"ECN_THRESHOLD\"\necn_threshold = 8\ncapacity = 0";
    for control in controls() {
        let flow = tcp(
            5_000_000,
            1460,
            &format!("cc_algorithm = \"{control}\", ecn = true, ssthresh = 100_000"),
        );
        let result = run(&narrow(switch, &flow));
        assert!(result.totals.marks > 10, "{control}");
        check_packets(&result, 5_000_000, 1460, control);
    }
}

#[test]
fn the_other_transports_send_full_packets() {
    for (kind, more) in [
        ("RoCE", "roce = { dcqcn = false }"),
        ("RoCE", "roce = { window = 2500 }"),
        ("RoCE", "roce = { ack_every = 7 }"),
        ("NDP", "ndp = { window = 7 }"),
    ] {
        let flow = format!(
            "[[flow]]\nflow_id = 1\nflow_type = \"{kind}\"\ngraph = [[0, 1]]\n\
             traffic = {{ size = 1000001, pkt_size_dist = 1000, {more} }}\n"
        );
        let result = run(&narrow("", &flow));
        let f = &result.flows[0];
        let sent = (f.packets_sent, f.bytes_sent, f.retransmitted, f.bytes_acked);
        assert_eq!(sent, (1_001, 1_000_001, 0, 1_000_001), "{kind}, {more}");
    }
}

#[test]
fn data_of_the_application_is_sent_at_once() {
    // Chunks of 300 bytes 100 us apart into an open window: no Nagle delay, one packet each.
    for control in controls() {
        let flow = format!(
            "[[flow]]\nflow_id = 1\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = {{ \
             duration = 0.01, arr_dist = 0.0001, pkt_size_dist = 300, \
             tcp = {{ cc_algorithm = \"{control}\" }} }}\n"
        );
        let result = run(&pair("1e9", "", &flow));
        assert_eq!(result.flows[0].packets_sent, 100, "{control}");
        assert_eq!(result.flows[0].bytes_acked, 30_000, "{control}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Windows of every odd size, losses in both directions, data all at once or in chunks: no
    /// sender may wait forever for an ACK.
    #[test]
    fn no_sender_waits_forever(
        seed in 0u64..1000,
        size in 1u64..200_000,
        mss in 1u32..3000,
        ssthresh in 1u64..40_000,
        window in 1u32..20,
        capacity in 1u32..40,
        control in prop::sample::select(controls().collect::<Vec<_>>()),
        ecn in prop::sample::select(vec![false, true]),
        loss in prop::sample::select(vec![0.0, 0.02, 0.2]),
        pieces in prop::sample::select(vec![false, true]),
    ) {
        let size = size.min(u64::from(mss) * 2_000);
        let arrivals = if pieces {
            let piece = (size / 20).max(1);
            format!("size = {size}, arr_dist = 0.0005, pkt_size_dist = {piece}")
        } else {
            format!("size = {size}, pkt_size_dist = {mss}")
        };
        let result = run(&format!(
            "seed = {seed}\nedges = [[0, 1]]\nhosts = [0, 1]\nduration = 3000.0\n\
             [link]\npropagation_ns = 100000\n[link.host]\nrate = 1e9\n\
             [switch]\nport_rate = 1e8\ncapacity = {capacity}\nloss = {loss}\n\
             drop = \"ECN_THRESHOLD\"\necn_threshold = {}\n\
             [[flow]]\nflow_id = 1\nflow_type = \"TCP\"\ngraph = [[0, 1]]\n\
             traffic = {{ {arrivals}, tcp = {{ cc_algorithm = \"{control}\", ecn = {ecn}, \
             ssthresh = {ssthresh}, initial_window = {window}, rto_min = 0.005 }} }}\n",
            capacity.div_ceil(3)
        ));
        let f = &result.flows[0];
        prop_assert_eq!(f.bytes_acked, size, "{:?}", f);
        prop_assert_eq!(result.in_flight(), 0);
    }
}
