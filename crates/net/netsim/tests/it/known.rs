//! Answers computed by hand.

use crate::common::{error, pair, run};

const TCP: &str = "[[flow]]\nflow_id = 1\nflow_type = \"TCP\"\ngraph = [[0, 1]]\n";
const PACKETS: &str =
    "[[flow]]\nflow_id = 1\nflow_type = \"PacketDistribution\"\ngraph = [[0, 1]]\n";

#[test]
fn one_packet_takes_its_serialization_and_the_delay() {
    // 1,250 bytes at 1 Gb/s: 10,000 ns, and a propagation delay of 1,000 ns. 40 bytes back: 320 +
    // 1,000.
    let flow = format!("{TCP}traffic = {{ size = 1250, pkt_size_dist = 1250 }}");
    let result = run(&pair("1e9", "", &flow));
    assert_eq!(result.flows[0].delivered_ns, Some(11_000));
    assert_eq!(result.flows[0].acked_ns, Some(12_320));
}

#[test]
fn serialization_rounds_up_to_whole_ns() {
    // 1 byte at 3 Gb/s: 2.67 ns.
    let flow = format!("{PACKETS}traffic = {{ size = 1, arr_dist = 1.0, pkt_size_dist = 1 }}");
    let result = run(&pair("3e9", "", &flow));
    assert_eq!(result.flows[0].delivered_ns, Some(1003));
}

#[test]
fn a_train_leaves_back_to_back() {
    // Ten packets of 1,250 bytes at once: the last bit arrives after 100 us and the delay.
    let flow =
        format!("{PACKETS}traffic = {{ size = 12500, arr_dist = 0.0, pkt_size_dist = 1250 }}");
    let result = run(&pair("1e9", "", &flow));
    assert_eq!(result.flows[0].last_ns, 101_000);
    // Gaps of 0 are 1 ns each, so the waits are 10,000 − 1, 20,000 − 2, …: the ninth is the
    // longest.
    assert_eq!(result.ports[0].wait_ns_max, 9 * 10_000 - 9);
}

#[test]
fn a_packet_that_arrives_at_a_full_queue_is_dropped() {
    for (capacity, dropped) in [(0, 0), (3, 6), (8, 1), (9, 0)] {
        let flow =
            format!("{PACKETS}traffic = {{ size = 12500, arr_dist = 0.0, pkt_size_dist = 1250 }}");
        // Ten arrive within one service time: one is served, `capacity` wait.
        let result = run(&pair("1e9", &format!("capacity = {capacity}"), &flow));
        assert_eq!(result.totals.data_drops, dropped, "capacity {capacity}");
        assert_eq!(result.flows[0].packets_received, 10 - dropped);
        assert_eq!(result.ports[0].drops, dropped);
    }
}

#[test]
fn an_old_queue_does_not_count() {
    // Five packets at once fill a queue of four, twice. Times at a port have 32 bits, and 3 s
    // exceed half of their range.
    let burst = |id: u32, at: f64| {
        format!(
            "[[flow]]\nflow_id = {id}\nflow_type = \"PacketDistribution\"\ngraph = [[0, 1]]\n\
             traffic = {{ initial_delay = {at}, size = 6250, arr_dist = 0.0, pkt_size_dist = 1250 \
             }}\n"
        )
    };
    for gap in [0.001, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0] {
        let flows = burst(1, 0.0) + &burst(2, gap);
        let result = run(&pair("1e9", "capacity = 4", &flows));
        assert_eq!(result.totals.data_drops, 0, "{gap} s apart");
    }
}

#[test]
fn slow_start_doubles_each_round_trip() {
    // 1,000-byte segments at 100 Gb/s (80 ns) and 1 us in each direction: far below the
    // bandwidth-delay product, so rounds are separate. Windows 2, 4, 8: 14 segments take three
    // rounds.
    let flow = format!("{TCP}traffic = {{ size = 14000, pkt_size_dist = 1000 }}");
    let result = run(&pair("1e11", "", &flow));
    // Data 1,080 ns, ACK of 40 bytes (4 ns) 1,004 ns: 2,084 ns per round. After two rounds come the
    // eight segments of the last one, whose first is sent upon the first ACK of the second round.
    let last_round = 2 * 2_084;
    assert_eq!(
        result.flows[0].delivered_ns,
        Some(last_round + 8 * 80 + 1_000)
    );
    assert_eq!(result.flows[0].cwnd, 16_000);
}

#[test]
fn a_lost_segment_is_retransmitted_after_three_duplicates() {
    // Room for 3 waiting packets: the window outgrows it in slow start.
    let flow = format!("{TCP}traffic = {{ size = 60000, pkt_size_dist = 1000 }}");
    let result = run(&pair("1e9", "capacity = 3", &flow));
    let f = &result.flows[0];
    assert!(result.totals.data_drops > 0);
    assert!(f.fast_retransmits > 0);
    assert_eq!(f.bytes_acked, 60_000);
    assert_eq!(
        f.packets_received + result.totals.data_drops,
        f.packets_sent
    );
}

#[test]
fn timeouts_back_off_exponentially() {
    // Every packet is lost: the first timeout after 1 s, then 2, 4, 8, 16, 32 s (RFC 6298 5.5), in
    // 100 s: at 1, 3, 7, 15, 31, 63 s.
    let flow = format!("{TCP}traffic = {{ size = 1000, pkt_size_dist = 1000 }}");
    let result = run(&pair("1e9", "loss = 1.0", &flow));
    assert_eq!(result.flows[0].timeouts, 6);
    assert_eq!(result.flows[0].packets_sent, 7);
    assert_eq!(result.totals.fault_drops, 7);
    assert_eq!(result.flows[0].cwnd, 1000);
}

#[test]
fn an_ack_ends_the_back_off() {
    // Twenty segments are sent at once and lost, as the link is down. After 1 s the first is
    // retransmitted, and its ACK arrives 10,320 ns later. The link fails again, and the two segments
    // released by this ACK are lost. They are retransmitted after 1 s, not 2, as the ACK was a
    // measurement.
    let outage = |at: f64, repair: f64| {
        format!("[[failure]]\nat = {at}\nrepair = {repair}\nlink = [0, 1]\n")
    };
    let flow = format!(
        "{TCP}traffic = {{ size = 20000, pkt_size_dist = 1000, tcp = {{ initial_window = 20 }} }}\n\
         {}{}",
        outage(0.0, 0.5),
        outage(1.000_011, 1.5)
    );
    let result = run(&pair("1e9", "", &flow));
    let f = &result.flows[0];
    assert_eq!((f.timeouts, f.bytes_acked), (2, 20_000));
    let delivered = f.delivered_ns.unwrap();
    assert!(
        (2_000_010_320..2_001_000_000).contains(&delivered),
        "{delivered}"
    );
}

#[test]
fn ecmp_spreads_flows_evenly() {
    // 512 hosts of a k = 8 fat-tree send to other pods: each of the 16 uplinks of a pod's
    // aggregation layer expects 1/16 of its pod's flows. Chi-squared with 15 degrees of freedom
    // over the 64 flows of each pod: the 99.9th percentile is 37.7.
    let toml = "seed = 3\nduration = 1.0\n[topology]\ncategory = \"FatTree\"\n\
        fat_tree = { k = 8, hosts_per_edge = 16 }\n[routing]\npolicy = \"FatTreeEcmp\"\n\
        [switch]\nport_rate = 1e11\n[[flow_set]]\nflow_count = 512\npairing = \"SwitchOffsetHalf\"\n\
        flow_type = \"TCP\"\ntraffic = { size = 1000, pkt_size_dist = 1000 }\n";
    let config = crate::common::config(toml);
    let result = run(toml);
    use slipstream_netsim::topology::{End, Tier};
    let topology = &config.scenario.topology;
    let up: Vec<u64> = (0..topology.port_count())
        .filter(|&p| {
            let core = matches!(topology.port_ends(p), (End::Node(a), End::Node(b)) if a < b);
            topology.tier(p) == Tier::Core && core
        })
        .map(|p| {
            let used = result.ports.iter().find(|r| r.port == p);
            used.map_or(0, |r| r.packets)
        })
        .collect();
    assert_eq!(up.len(), 8 * 16);
    // Data of 64 flows and ACKs of 64 more leave each pod.
    for pod in up.chunks(16) {
        let total: u64 = pod.iter().sum();
        assert_eq!(total, 128);
        let mean = total as f64 / 16.0;
        let chi: f64 = pod.iter().map(|&n| (n as f64 - mean).powi(2) / mean).sum();
        assert!(chi < 37.7, "{chi}: {pod:?}");
    }
}

#[test]
fn a_ring_all_reduce_takes_its_closed_form() {
    // Four hosts around a ring of switches with links of 10 Gb/s and 1 us; no host links. Chunks of
    // 250 bytes are one packet: each of 2(n − 1) = 6 steps takes 200 ns + 1,000 ns.
    let toml = "duration = 1.0\nedges = [[0,1],[1,2],[2,3],[3,0]]\nhosts = [0,1,2,3]\n\
        [link]\nhost_links = false\npropagation_ns = 1000\n[switch]\nport_rate = 1e10\n\
        [[collective]]\ncollective_type = \"RingAllReduce\"\nfirst_flow_id = 0\nflow_type = \"TCP\"\n\
        sources = [0,1,2,3]\ntraffic = { size = 1000, pkt_size_dist = 1000 }\n";
    let result = run(toml);
    let end = result.flows.iter().filter_map(|f| f.delivered_ns).max();
    // ACKs of 40 bytes (32 ns) travel in the other direction, on other ports.
    assert_eq!(end, Some(6 * (200 + 1_000)));
}

#[test]
fn dependencies_start_flows_in_order() {
    let flows = "[[flow]]\nflow_id = 1\ngraph = [[0, 1]]\nstarts_after = 2\n\
        traffic = { size = 1250, pkt_size_dist = 1250 }\n\
        [[flow]]\nflow_id = 2\ngraph = [[0, 1]]\ntraffic = { size = 1250, pkt_size_dist = 1250 }\n\
        [[flow]]\nflow_id = 3\ngraph = [[1, 0]]\nstarts_before = [2]\n\
        traffic = { size = 1250, pkt_size_dist = 1250, initial_delay = 0.001 }\n";
    let result = run(&pair("1e9", "", flows));
    let starts: Vec<u64> = result.flows.iter().map(|f| f.start_ns).collect();
    let one = 12_320;
    assert_eq!(starts, [1_000_000 + 2 * one, 1_000_000 + one, 1_000_000]);
}

#[test]
fn bad_input_gets_an_error() {
    let tcp = |rest: &str| format!("{TCP}traffic = {{ size = 1000 }}\n{rest}");
    for (toml, part) in [
        (
            "edges = [[0, 1], [2, 3]]\nhosts = [0, 2]\n[switch]\nport_rate = 1e9\n[[flow]]\n\
             flow_id = 1\ngraph = [[0, 2]]\ntraffic = { size = 1 }"
                .to_owned(),
            "no path leads from host 0 to host 2",
        ),
        (
            "[topology]\ncategory = \"FatTree\"\nfat_tree = { k = 5 }\n[switch]\nport_rate = 1e9\n"
                .to_owned(),
            "even k",
        ),
        (pair("0", "", &tcp("")), "must be a rate in bit/s from 1 "),
        (
            pair("1e9", "capasity = 3", &tcp("")),
            "did you mean `capacity`?",
        ),
        (
            pair(
                "1e9",
                "",
                &tcp(
                    "[[flow]]\nflow_id = 2\ngraph = [[0, 1]]\npath = [0, 2, 1]\ntraffic = { size = 1 }",
                ),
            ),
            "path goes from node 0 to node 2, which have no link",
        ),
        (
            pair(
                "1e9",
                "",
                "[[flow]]\nflow_id = 1\ngraph = [[0, 1]]\nstarts_after = 2\ntraffic = { size = 1 }\n\
                 [[flow]]\nflow_id = 2\ngraph = [[0, 1]]\nstarts_after = 1\ntraffic = { size = 1 }\n",
            ),
            "1 waits for 2 waits for 1",
        ),
        (
            pair(
                "1e9",
                "",
                "[[flow]]\nflow_id = 1\ngraph = [[0, 1]]\nstarts_after = 9\ntraffic = { size = 1 }\n",
            ),
            "flow 9, which does not exist",
        ),
        (
            pair(
                "1e9",
                "",
                "[[flow]]\nflow_id = 1\ngraph = [[0, 7]]\ntraffic = { size = 1 }",
            ),
            "node 7",
        ),
        (
            pair("1e9", "", &format!("{TCP}traffic = {{ duration = 1.0 }}")),
            "arr_dist",
        ),
    ] {
        let message = error(&toml);
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn classes_of_numbers_by_class_are_whole() {
    let flow = format!("{TCP}traffic = {{ size = 1000 }}");
    for pairs in [
        "[[0.5, 1], [1, 2]]",
        "[[-1, 1], [1, 2]]",
        "[[0, 1], [0, 2]]",
    ] {
        let switch = format!("discipline = \"SP\"\npriorities = {pairs}");
        let message = error(&pair("1e9", &switch, &flow));
        assert!(
            message.contains("with each class once"),
            "{pairs}: {message}"
        );
    }
}

#[test]
fn a_run_too_large_for_memory_is_refused() {
    use slipstream_netsim::{Execution, Simulation};
    let flow = format!("{TCP}traffic = {{ size = 1000 }}");
    let config = crate::common::config(&pair("1e9", "", &flow));
    let small = Execution {
        memory_bytes_max: 100,
        ..Execution::default()
    };
    let error = Simulation::new(config.scenario, small)
        .err()
        .map(|e| e.to_string());
    assert!(error.is_some_and(|e| e.contains("MiB")));
}

/// Two sources overload a shared link of 1 Gb/s: checks the packets of each class by the end.
fn check_shares(discipline: &str, sizes: [u32; 2], expected: f64) {
    let flow = |id: u32, src: u32| {
        format!(
            "[[flow]]\nflow_id = {id}\nclass = {src}\ngraph = [[{src}, 3]]\n\
             flow_type = \"PacketDistribution\"\ntraffic = {{ duration = 0.02, \
             arr_dist = 0.000008, pkt_size_dist = {} }}\n",
            sizes[src as usize]
        )
    };
    let toml = format!(
        "duration = 0.02\nedges = [[0, 2], [1, 2], [2, 3]]\nhosts = [0, 1, 3]\n\
         [switch]\nport_rate = 1e9\ncapacity = 0\n{discipline}\n{}{}",
        flow(0, 0),
        flow(1, 1)
    );
    let result = run(&toml);
    let bytes: Vec<u64> = result.flows.iter().map(|f| f.bytes_received).collect();
    let share = bytes[1] as f64 / (bytes[0] + bytes[1]) as f64;
    // Within one round of the discipline over 2,500,000 bytes.
    assert!((share - expected).abs() < 0.01, "{discipline}: {share}");
}

#[test]
fn the_discipline_decides_the_shares_of_a_link() {
    check_shares("discipline = \"DRR\"\nweights = [1, 3]", [1000, 1000], 0.75);
    check_shares("discipline = \"WFQ\"\nweights = [1, 3]", [1000, 1000], 0.75);
    check_shares("discipline = \"WRR\"\nweights = [1, 3]", [1000, 1000], 0.75);
    // Byte shares hold for packets of different sizes with WFQ and DRR; WRR counts packets.
    check_shares("discipline = \"WFQ\"\nweights = [1, 1]", [1500, 1000], 0.5);
    check_shares("discipline = \"DRR\"\nweights = [1, 1]", [1500, 1000], 0.5);
    check_shares("discipline = \"WRR\"\nweights = [1, 1]", [1500, 1000], 0.4);
    check_shares(
        "discipline = \"SP\"\npriorities = [[0, 1], [1, 2]]",
        [1000, 1000],
        1.0,
    );
    check_shares(
        "discipline = \"VC\"\nvticks = [[0, 40000], [1, 10000]]",
        [1000, 1000],
        0.8,
    );
}

#[test]
fn a_run_ends_at_its_duration_with_packets_in_flight() {
    // The end splits buckets that have events before and after it: at many times, in one shard and
    // in several.
    for end_ns in (20_000..20_600).step_by(97) {
        let small = crate::common::example("e5.toml")
            .replace("k = 32", "k = 4")
            .replace("hosts_per_edge = 16", "hosts_per_edge = 2")
            .replace("flow_count = 8192", "flow_count = 16")
            .replace("duration = 10.0", &format!("duration = {end_ns}e-9"));
        let result = run(&small);
        assert!(result.in_flight() > 0);
        assert!(result.totals.last_event_ns <= end_ns);
        assert_eq!(crate::common::run_on(&small, 3), result);
        let one = small.replace("flow_count = 16", "flow_count = 1");
        assert!(run(&one).totals.last_event_ns <= end_ns);
    }
}
