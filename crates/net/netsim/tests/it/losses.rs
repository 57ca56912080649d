//! Congestion controls under losses: small buffers, random loss, timeouts.

use proptest::prelude::*;

use crate::common::{error, run, run_on};

/// A link of `rate` bit/s and `delay_ns` between two hosts with links ten times as fast.
fn link(rate: u64, delay_ns: u64, capacity: u32, loss: f64, seconds: f64) -> String {
    format!(
        "seed = 5\nduration = {seconds}\nedges = [[0, 1]]\nhosts = [0, 1]\n[link]\n\
         propagation_ns = {delay_ns}\nhost_links = true\n\
         host = {{ rate = {}, propagation_ns = 1000 }}\n[switch]\nport_rate = {rate}\n\
         capacity = {capacity}\nloss = {loss}\n",
        10 * rate
    )
}

fn flow(id: u32, control: &str, more: &str) -> String {
    format!(
        "[[flow]]\nflow_id = {id}\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = {{ \
         size = 100_000_000_000, pkt_size_dist = 1460, tcp = {{ cc_algorithm = \"{control}\"{more} }} }}\n"
    )
}

/// Bytes in order over the capacity of the link, by flow.
fn shares(toml: &str, rate: u64, seconds: f64) -> Vec<f64> {
    let result = run(toml);
    assert_eq!(result.broken_law(), None);
    let capacity = rate as f64 * seconds / 8.0;
    let share = |f: &slipstream_netsim::flow::FlowResult| f.bytes_in_order as f64 / capacity;
    result.flows.iter().map(share).collect()
}

/// ns-3 3.44 with SACK fills 93 to 95 % of such a link over a minute. Start-up costs a second of ten.
#[test]
fn bbr_fills_a_link_whatever_its_buffer() {
    for capacity in [43, 85, 171, 342, 684] {
        let toml =
            link(100_000_000, 10_000_000, capacity, 0.0, 10.0) + &flow(0, "BBR", ", rto_min = 0.2");
        let share = shares(&toml, 100_000_000, 10.0)[0];
        assert!(share > 0.88, "{capacity} packets: {share}");
    }
}

/// A loss is no sign of congestion to BBR. NewReno and CUBIC reach a fifth here (Mathis et al. 1997:
/// 1.22 MSS / (RTT √p) is 22 Mb/s).
#[test]
fn bbr_keeps_its_rate_when_one_packet_in_a_thousand_is_lost() {
    let toml = link(100_000_000, 10_000_000, 1_000, 0.001, 10.0);
    let toml = |control: &str| toml.clone() + &flow(0, control, ", rto_min = 0.2");
    let share = |control: &str| shares(&toml(control), 100_000_000, 10.0)[0];
    assert!(share("BBR") > 0.9, "{}", share("BBR"));
    assert!(share("NewReno") < 0.3);
}

/// As in ns-3, where BBR leaves CUBIC 7 Mb/s of 100 in a buffer of half a product, and 63 in one of four.
#[test]
fn bbr_beside_cubic_takes_a_small_buffer_and_leaves_a_large_one() {
    let pair = |capacity: u32| {
        let toml = link(50_000_000, 22_000_000, capacity, 0.0, 20.0)
            + &flow(0, "BBR", ", rto_min = 0.2")
            + &flow(1, "CUBIC", ", rto_min = 0.2");
        let shares = shares(&toml, 50_000_000, 20.0);
        assert!(shares[0] + shares[1] > 0.65, "{capacity}: {shares:?}");
        shares
    };
    let (small, large) = (pair(94), pair(753));
    assert!(small[0] > 3.0 * small[1], "{small:?}");
    assert!(large[1] > 0.35 && large[0] > 0.2, "{large:?}");
}

/// The first packet is lost on a failed link; the second one is sent when the timer expires.
#[test]
fn the_first_timeout_follows_from_the_path_or_its_key() {
    // (propagation ns, keys, timeout ns)
    type Case = (u64, &'static str, fn(u64) -> u64);
    let cases: [Case; 6] = [
        // RFC 6298 section 2.2: R + max(G, 4 · R/2), with G of 1 ms.
        (1_000, "rto_min = 0.0001", |r| r + 1_000_000),
        (10_000_000, "rto_min = 0.0001", |r| 3 * r),
        (1_000, "rto_min = 0.25", |_| 250_000_000),
        (1_000, "initial_window = 1", |_| 1_000_000_000),
        (500_000_000, "initial_window = 1", |r| 3 * r),
        (1_000, "rto_min = 0.001, rto_initial = 0.007", |_| 7_000_000),
    ];
    for (delay_ns, keys, timeout) in cases {
        let toml = crate::common::pair(
            "1e9",
            "[[failure]]\nat = 0.0\nrepair = 0.00008\nlink = [0, 1]",
            &format!(
                "[[flow]]\ngraph = [[0, 1]]\ntraffic = {{ size = 1000, pkt_size_dist = 1000, \
                 tcp = {{ {keys} }} }}\n"
            ),
        )
        .replace(
            "propagation_ns = 1000",
            &format!("propagation_ns = {delay_ns}"),
        );
        let result = run(&toml);
        // Two packets of 40 bytes on an idle link of 1 Gb/s.
        let handshake_ns = 2 * (delay_ns + 320);
        let expected = timeout(handshake_ns) + delay_ns + 8_000;
        assert_eq!(result.flows[0].timeouts, 1, "{toml}");
        assert_eq!(result.flows[0].delivered_ns, Some(expected), "{toml}");
    }
}

/// 64 flows of 256 kB lose half of their first windows. In ns-3 3.44 they take 11.4 ms in the mean and
/// 21.5 ms at most; 13.5 ms is the time of all bytes on the link.
#[test]
fn an_incast_takes_as_long_as_its_least_timeout_lets_it() {
    let toml = "duration = 30.0\n[topology]\ncategory = \"LeafSpine\"\n\
                leaf_spine = { leaves = 1, spines = 1, hosts_per_leaf = 65 }\n[link]\n\
                propagation_ns = 1000\n[switch]\nport_rate = 1e10\ncapacity = 256\n\
                [[flow_set]]\npairing = \"Incast\"\nheader_bytes = 42\nack_bytes = 42\n\
                traffic = { size = 256000, pkt_size_dist = 1448, tcp = { rto_min = 0.01, \
                initial_window = 10 } }\n";
    for control in ["NewReno", "CUBIC", "DCTCP", "BBR"] {
        let toml = toml.replace("rto_min", &format!("cc_algorithm = \"{control}\", rto_min"));
        let result = run(&toml);
        let last = result.flows.iter().map(|f| f.delivered_ns).max().flatten();
        let done = result.flows.iter().all(|f| f.delivered_ns.is_some());
        assert!(done && last < Some(60_000_000), "{control}: {last:?}");
    }
}

#[test]
fn timeouts_out_of_range_are_refused() {
    for (keys, part) in [
        ("rto_min = 60.1", "from 0 to 60 s"),
        ("rto_initial = 61.0", "from 1e-6 to 60 s"),
        ("rto_min = -0.1", "from 0 to 60 s"),
        ("rto_initial = 0.5", "below `rto_min`, which is 1 s"),
        ("rto_min = 0.2, rto_initial = 0.1", "below `rto_min`"),
    ] {
        let toml = link(1_000_000, 0, 9, 0.0, 1.0) + &flow(0, "NewReno", &format!(", {keys}"));
        let message = error(&toml);
        assert!(message.contains(part), "{keys}: {message}");
    }
}

/// Throughput that TCP reaches at a loss rate `p` of packets (Padhye et al., "Modeling TCP
/// throughput: a simple model and its empirical validation", SIGCOMM 1998, equation 30 with one
/// ACK per packet), bytes/s.
fn padhye(p: f64, rtt: f64, rto: f64, segment: f64) -> f64 {
    let timeouts = rto * (3.0 * (3.0 * p / 8.0).sqrt()).min(1.0) * p * (1.0 + 32.0 * p * p);
    segment / (rtt * (2.0 * p / 3.0).sqrt() + timeouts)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// No algorithm stops, or sends the same data forever, whatever buffer, loss and round trip.
    #[test]
    fn every_control_makes_progress_under_any_loss(
        control in prop::sample::select(vec!["NewReno", "CUBIC", "DCTCP", "BBR"]),
        capacity in prop_oneof![1u32..20, 20u32..400],
        loss in prop_oneof![Just(0.0), 1e-4f64..1e-2, 1e-2f64..0.03],
        delay_us in prop_oneof![1u64..1_000, 1_000u64..60_000],
        rate in prop::sample::select(vec![1_000_000u64, 10_000_000, 40_000_000]),
        rto_min in prop::sample::select(vec![0.001, 0.01, 0.2, 1.0]),
        window in 1u32..40,
        flows in 1u32..4,
        packet in prop::sample::select(vec![200u32, 1460, 9000]),
        seed in 0u64..1_000_000,
    ) {
        let rtt = delay_us as f64 * 2e-6 + f64::from(packet) * f64::from(capacity + 2) * 8.0 / rate as f64;
        let rto = (3.0 * rtt).max(rto_min);
        let seconds = (60.0 * rto).clamp(3.0, 60.0).min(2e9 / rate as f64 * f64::from(packet) / 1460.0);
        let more = format!(", rto_min = {rto_min}, initial_window = {window}, ssthresh = 1_000_000_000");
        let flows: String = (0..flows).map(|i| flow(i, control, &more)).collect();
        let flows = flows.replace("1460", &packet.to_string());
        let toml = link(rate, delay_us * 1_000, capacity, loss, seconds) + &flows;
        let toml = toml.replace("seed = 5", &format!("seed = {seed}"));
        let result = run(&toml);
        prop_assert_eq!(result.broken_law(), None);
        // Several flows may lock one of them out of a queue of a packet or two, so any arrival counts.
        let (mut bytes, mut stuck) = (0, f64::INFINITY);
        for f in &result.flows {
            bytes += f.bytes_in_order;
            stuck = stuck.min((result.totals.last_event_ns - f.last_ns) as f64 / 1e9);
        }
        // Data and ACKs are lost, and a queue of a few packets loses some of every window.
        let p = 2.0 * loss + 1e-3 + 0.1 / f64::from(capacity);
        let floor = padhye(p, rtt, rto, f64::from(packet)).min(rate as f64 / 8.0) * seconds / 20.0;
        prop_assert!(bytes as f64 >= floor, "{bytes} bytes, floor {floor}\n{toml}");
        // Something arrives at least every few timeouts, doubled when they repeat.
        prop_assert!(stuck <= 63.0 * rto + 1.0, "nothing arrived for {stuck} s\n{toml}");
        if seed % 8 == 0 {
            prop_assert_eq!(run_on(&toml, 2), result);
        }
    }
}
