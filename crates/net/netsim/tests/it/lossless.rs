//! PFC, shared buffers, RoCE and DCQCN.

use crate::common::{config, error, run, run_on};
use slipstream_netsim::topology::End;

/// A fast host link into a slow link between two switches: 1,250 bytes take 10 ns, then 10 us.
fn funnel(host_rate: &str, switch: &str, flow: &str) -> String {
    format!(
        "edges = [[0, 1]]\nhosts = [0, 1]\nduration = 1.0\n[link.host]\nrate = {host_rate}\n\
         [switch]\nport_rate = 1e9\n{switch}\n{flow}\n"
    )
}

const BURST: &str = "[[flow]]\nflow_id = 1\nflow_type = \"PacketDistribution\"\n\
    graph = [[0, 1]]\ntraffic = { size = 15000, arr_dist = 0.0, pkt_size_dist = 1250 }\n";

fn queue_pair(size: u32, roce: &str) -> String {
    format!(
        "[[flow]]\nflow_id = 1\nflow_type = \"RoCE\"\ngraph = [[0, 1]]\n\
         traffic = {{ size = {size}, pkt_size_dist = 1250, roce = {{ {roce} }} }}\n"
    )
}

#[test]
fn a_link_pauses_at_its_threshold_and_resumes_below_it() {
    // Twelve packets arrive 10 ns apart. One is in service, and four fit below the threshold of
    // 5,000 bytes. The sixth, at 60 ns, starts the headroom and the pause, which takes 1 ns (64
    // bytes at 1 Tb/s); the host has begun the seventh. Both are in the headroom until the second
    // and third are in service (10,010 and 20,010 ns). Then the link resumes for the eighth and
    // ninth, and so on. The twelfth is alone in the headroom, so its pause ends one service
    // earlier.
    let switch = "[switch.pfc]\nxoff = 5000";
    let result = run(&funnel("1e12", switch, BURST));
    assert_eq!(result.flows[0].packets_received, 12);
    assert_eq!(result.flows[0].last_ns, 10 + 12 * 10_000 + 10);
    assert_eq!(result.totals.data_drops, 0);
    assert_eq!(result.totals.pauses, 4);
    let memory = &result.memories[0];
    assert_eq!((memory.node, memory.pauses), (0, 4));
    assert_eq!(
        (memory.bytes_max, memory.headroom_bytes_max),
        (5_000, 2_500)
    );
    let topology = config(&funnel("1e12", switch, BURST)).scenario.topology;
    let host = result
        .ports
        .iter()
        .find(|p| topology.port_ends(p.port).0 == End::Host(0))
        .unwrap();
    assert_eq!(host.pauses, 4);
    let paused = (20_011 - 61) + 2 * (20_011 - 22) + (10_011 - 22);
    assert_eq!(host.paused_ns, paused);
}

#[test]
fn a_pause_with_quanta_holds_while_it_is_refreshed() {
    // As above: three pauses of 20 us and one of 10. A quantum is 512 bits, 0.512 ns here, so
    // 16,000 last 8.2 us. They are refreshed each 4.1 us (rounded up: 4,096 ns): at 60 + 4,096 n ns
    // up to 20,010, and so on. A refreshed pause holds like one without a limit.
    let lasting = run(&funnel("1e12", "[switch.pfc]\nxoff = 5000", BURST));
    let again = run(&funnel(
        "1e12",
        "[switch.pfc]\nxoff = 5000\nquanta = 16000",
        BURST,
    ));
    assert_eq!(again.totals.pause_refreshes, 4 + 4 + 4 + 2);
    assert_eq!(again.flows, lasting.flows);
    assert_eq!(again.ports, lasting.ports);
    assert_eq!(again.totals.data_drops, 0);
    // One frame of 65,535 quanta (33.6 us) is enough for each pause.
    let one = run(&funnel(
        "1e12",
        "[switch.pfc]\nxoff = 5000\nquanta = 65535\nrefresh = 65535",
        BURST,
    ));
    assert_eq!(one.totals.pause_refreshes, 0);
    assert_eq!(one.flows, lasting.flows);
}

#[test]
fn an_expired_pause_costs_packets() {
    // 9,765 quanta are 5 us. Paused from 61 to 5,061 ns, the host sends the eighth packet, which
    // arrives at full headroom (2,564 bytes) and is lost, and the ninth before the new pause
    // arrives (5,072). At 10,010 the second packet is in service, which frees one of the two in the
    // headroom. So the tenth (10,072) is accepted; the eleventh (10,082) and the twelfth (15,083)
    // are not.
    let switch = "[switch.pfc]\nxoff = 5000\nquanta = 9765\nrefresh = 0";
    let result = run(&funnel("1e12", switch, BURST));
    assert_eq!(result.totals.data_drops, 4);
    assert_eq!(result.flows[0].packets_received, 8);
    assert_eq!(result.totals.pauses, 1);
    assert!(error(&funnel("1e9", "[switch.pfc]\nxoff = 1\nrefresh = 5", BURST)).contains("quanta"));
    assert!(
        error(&funnel(
            "1e9",
            "[switch.pfc]\nxoff = 1\nquanta = 65536",
            BURST
        ))
        .contains("65535")
    );
}

#[test]
fn insufficient_headroom_drops() {
    // Room for one packet above the threshold, but two arrive before the pause takes effect.
    let result = run(&funnel(
        "1e12",
        "[switch.pfc]\nxoff = 5000\nheadroom = 1250",
        BURST,
    ));
    assert!(result.totals.data_drops > 0);
    assert_eq!(result.memories[0].drops, result.totals.data_drops);
    assert_eq!(result.memories[0].headroom_bytes_max, 1_250);
}

#[test]
fn a_dynamic_threshold_is_alpha_times_the_free_bytes() {
    // Choudhury and Hahne: one overloaded queue settles at B · α / (1 + α). 10,000 bytes and α = 1:
    // four packets of 1,250 (5,000 bytes held, 5,000 free). α = 3: six (7,500 held, the threshold
    // 7,500). The packet in service does not count.
    for (alpha, waiting) in [(1, 4), (3, 6), (7, 7)] {
        let switch = format!("[switch.shared]\nbytes = 10000\nalpha = {alpha}");
        let result = run(&funnel("1e12", &switch, BURST));
        assert_eq!(result.flows[0].packets_received, 1 + waiting, "{alpha}");
        assert_eq!(result.totals.data_drops, 11 - waiting);
        assert_eq!(result.memories[0].bytes_max, 1_250 * waiting);
    }
}

#[test]
fn byte_limits_count_waiting_bytes() {
    for (bytes, waiting) in [(1_250, 1), (4_999, 3), (5_000, 4), (20_000, 11)] {
        let result = run(&funnel("1e12", &format!("capacity_bytes = {bytes}"), BURST));
        assert_eq!(result.flows[0].packets_received, 1 + waiting, "{bytes}");
        let most = result.ports.iter().map(|p| p.waiting_bytes_max).max();
        assert_eq!(most, Some(1_250 * waiting));
    }
    assert!(
        error(&funnel("1e12", "capacity_bytes = 1249", BURST)).contains("less than one packet")
    );
}

#[test]
fn a_queue_pair_goes_back_to_the_first_lost_packet() {
    // Room for three. Of twelve sent at once, four arrive and all later ones are dropped, so only
    // the timer detects the loss. Then eight, four, and again: 12 + 8 + 4.
    let flow = queue_pair(15_000, "dcqcn = false, rto = 0.001");
    let result = run(&funnel("1e12", "capacity = 3", &flow));
    let f = &result.flows[0];
    assert_eq!((f.packets_sent, f.timeouts, f.nacks), (24, 2, 0));
    assert_eq!(f.retransmitted, 12);
    assert_eq!(f.bytes_acked, 15_000);
    // At 1.5 Gb/s into 1 Gb/s a later packet arrives and reveals the gap. The timer is needed only
    // if the requested packet is lost again.
    let flow = queue_pair(150_000, "dcqcn = false, rto = 0.001");
    let result = run(&funnel("1.5e9", "capacity = 3", &flow));
    let f = &result.flows[0];
    assert!(f.nacks > 0 && f.retransmitted > 0);
    assert_eq!(f.bytes_acked, 150_000);
    assert_eq!(
        f.packets_received + result.totals.data_drops,
        f.packets_sent
    );
}

#[test]
fn notifications_are_at_least_50_us_apart_and_cut_the_rate() {
    // Every packet that waits is marked; 1.25 MB at 1 Gb/s take 10 ms: at most 200 notifications.
    let switch = "drop = \"ECN_RAMP\"\necn_ramp = { kmin = 0, kmax = 1, pmax = 1.0 }\n\
                  [switch.pfc]\nxoff = 100000";
    let result = run(&funnel("2e9", switch, &queue_pair(1_250_000, "")));
    let f = &result.flows[0];
    assert!(result.totals.marks > 100);
    let time = f.delivered_ns.unwrap();
    assert!(f.notifications >= 10 && f.notifications <= time / 50_000 + 1);
    assert!(f.rate_bits_per_s.unwrap() < 2e9);
    assert_eq!(f.retransmitted, 0);
}

fn incast(hosts: u32) -> String {
    let flows: Vec<String> = (1..hosts)
        .map(|h| {
            format!(
                "[[flow]]\nflow_id = {h}\nflow_type = \"RoCE\"\ngraph = [[{h}, 0]]\n\
                 routing = \"ECMP\"\ntraffic = {{ size = 4000000, pkt_size_dist = 1000 }}\n"
            )
        })
        .collect();
    format!(
        "duration = 1.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = {{ k = 4, hosts_per_edge \
         = 2 }}\n[link]\npropagation_ns = 1000\n[switch]\nport_rate = 4e10\ndrop = \"ECN_RAMP\"\n\
         ecn_ramp = {{ kmin = 5000, kmax = 200000, pmax = 0.01 }}\n\
         [switch.shared]\nbytes = 2000000\n[switch.pfc]\nalpha = 0.125\n{}",
        flows.concat()
    )
}

#[test]
fn an_incast_loses_nothing_and_is_the_same_on_any_number_of_threads() {
    let toml = incast(16);
    let result = run(&toml);
    assert_eq!(result.totals.data_drops + result.totals.control_drops, 0);
    assert!(result.totals.pauses > 0 && result.totals.marks > 0);
    assert!(result.flows.iter().all(|f| f.acked_ns.is_some()));
    assert!(result.flows.iter().all(|f| f.retransmitted == 0));
    assert_eq!(result.deadlock, None);
    assert_eq!(result.in_flight(), 0);
    // All data crosses one host link of 40 Gb/s; recovery adds the rest.
    let bytes = 15.0 * 4e6;
    let last = result.flows.iter().filter_map(|f| f.delivered_ns).max();
    let share = bytes * 8.0 / 40.0 / last.unwrap() as f64;
    assert!(share > 0.7, "{share}");
    for threads in [2, 3, 4] {
        assert_eq!(run_on(&toml, threads), result, "{threads} threads");
    }
}

#[test]
fn a_pfc_deadlock_is_detected_with_its_cycle() {
    // Three switches in a ring. Each flow goes over two links, so that the packets of each link
    // wait for the next one.
    let flow = |i: u32| {
        let (a, b, c) = (i % 3, (i + 1) % 3, (i + 2) % 3);
        format!(
            "[[flow]]\nflow_id = {i}\nflow_type = \"RoCE\"\ngraph = [[{a}, {c}]]\n\
             path = [{a}, {b}, {c}]\nanswer_class = 1\n\
             traffic = {{ size = 1000000, pkt_size_dist = 1000, roce = {{ dcqcn = false }} }}\n"
        )
    };
    let toml = |xoff: u32| {
        format!(
            "edges = [[0, 1], [1, 2], [2, 0]]\nhosts = [0, 1, 2]\nduration = 1.0\n\
             [link]\nhost_links = true\npropagation_ns = 500\n[switch]\nport_rate = 1e10\n\
             discipline = \"SP\"\npriorities = [[0, 0], [1, 1]]\n\
             [switch.pfc]\nxoff = {xoff}\nclasses = [0]\n{}{}{}",
            flow(0),
            flow(1),
            flow(2)
        )
    };
    let result = run(&toml(10_000));
    let deadlock = result.deadlock.expect("a cycle of paused links");
    let topology = config(&toml(10_000)).scenario.topology;
    let mut ends: Vec<_> = deadlock
        .cycle
        .iter()
        .map(|&(port, class)| (topology.port_ends(port).0, class))
        .collect();
    ends.sort_by_key(|e| e.0.to_string());
    assert_eq!(
        ends,
        [0, 1, 2].map(|n| (End::Node(n), 0)),
        "all three links of the ring"
    );
    assert!(
        result.totals.last_event_ns < 10_000_000,
        "the run ended early"
    );
    // Refreshed pauses keep the deadlock; pauses that expire end it, and packets are lost.
    let timed =
        |more: &str| toml(10_000).replace("classes = [0]", &format!("classes = [0]\n{more}"));
    assert!(run(&timed("quanta = 1000")).deadlock.is_some());
    let freed = run(&timed("quanta = 1000\nrefresh = 0"));
    assert_eq!(freed.deadlock, None);
    assert!(freed.totals.data_drops > 0);
    assert!(freed.flows.iter().all(|f| f.acked_ns.is_some()));
    // With room for all packets, no link is paused, and no deadlock is reported.
    let roomy = run(&toml(4_000_000));
    assert_eq!(roomy.deadlock, None);
    assert!(roomy.flows.iter().all(|f| f.acked_ns.is_some()));
}

#[test]
fn pfc_requires_its_keys() {
    let no_links = funnel("1e9", "[switch.pfc]\nxoff = 5000", BURST)
        .replace("[link.host]\nrate = 1e9", "[link]\nhost_links = false");
    assert!(error(&no_links).contains("host_links"));
    assert!(error(&funnel("1e9", "[switch.pfc]\nalpha = 1.0", BURST)).contains("xoff"));
    assert!(
        error(&funnel(
            "1e9",
            "[switch.pfc]\nxoff = 1\nclasses = [9]",
            BURST
        ))
        .contains("0 to 7")
    );
}

/// Flows of hosts 1 to `senders` to host 0.
fn to_one(senders: u32, size: u32, roce: &str) -> String {
    let flows = (1..=senders).map(|h| {
        format!(
            "[[flow]]\nflow_id = {h}\nflow_type = \"RoCE\"\ngraph = [[{h}, 0]]\n\
             routing = \"ECMP\"\ntraffic = {{ size = {size}, pkt_size_dist = 1000, \
             roce = {{ {roce} }} }}\n"
        )
    });
    flows.collect()
}

#[test]
fn the_default_timeout_follows_from_the_path_and_its_buffers() {
    // All packets are lost, so each timeout retransmits one and counts. 1,250 bytes take 10 us on
    // each of three links. Bytes before a packet: at its host's port one in service and one of its
    // own, 20 us; at each switch one in service and four that wait, 50 us. So 30 + 2 · 60 us in one
    // direction, and the same back. With 10 us for the packet that an answer covers: 310 us, and
    // InfiniBand's next timeout is 4.096 us · 2^7.
    let flow = queue_pair(12_500, "dcqcn = false").replace("[[flow]]", "[[flow]]\nclass = 0");
    let toml = |rate: &str, switch: &str| {
        funnel(rate, &format!("loss = 1.0\n{switch}"), &flow)
            .replace("duration = 1.0", "duration = 0.01")
    };
    let timeouts = |toml: &str| u64::from(run(toml).flows[0].timeouts);
    assert_eq!(
        timeouts(&toml("1e9", "capacity = 4")),
        10_000_000 / (4_096 << 7)
    );
    // The flow can fill ten of 100 slots, with answers: 10 · (1,250 + 40) bytes are 103.2 us, in
    // total 30 + 2 · 123.2 us per direction: 2^8.
    assert_eq!(
        timeouts(&toml("1e9", "capacity = 100")),
        10_000_000 / (4_096 << 8)
    );
    // A timeout in the file takes precedence.
    let own = toml("1e9", "capacity = 4").replace("dcqcn = false", "dcqcn = false, rto = 0.0021");
    assert_eq!(timeouts(&own), 4);
}

#[test]
fn no_timer_fires_without_loss() {
    let fat_tree = |switch: &str, flows: &str| {
        format!(
            "duration = 10.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = {{ k = 8, \
             hosts_per_edge = 7 }}\n[link]\npropagation_ns = 1000\n[switch]\nport_rate = 4e10\n\
             {switch}\n{flows}"
        )
    };
    // One sender at each of six switches in a row; farther ones get smaller shares of the last
    // link.
    let row = |switch: &str, flows: &str| {
        format!(
            "edges = [[0,1],[1,2],[2,3],[3,4],[4,5],[5,6]]\nhosts = [0,1,2,3,4,5,6]\n\
             duration = 10.0\n[link]\npropagation_ns = 1000\n[switch]\nport_rate = 1e10\n\
             {switch}\n{flows}"
        )
    };
    let cases = [
        fat_tree("[switch.pfc]\nxoff = 20000", &to_one(200, 100_000, "")),
        fat_tree(
            "[switch.pfc]\nxoff = 2000",
            &to_one(200, 100_000, "dcqcn = false"),
        ),
        fat_tree(
            "shared = { bytes = 2_000_000 }\npfc = { alpha = 0.125 }",
            &to_one(200, 100_000, "dcqcn = false, ack_every = 16"),
        ),
        // Without PFC, in a queue that holds all packets.
        fat_tree("capacity = 0", &to_one(200, 100_000, "dcqcn = false")),
        fat_tree(
            "capacity = 0",
            &to_one(50, 400_000, "window = 3000, ack_every = 64"),
        ),
        row(
            "[switch.pfc]\nxoff = 3000",
            &to_one(6, 2_000_000, "dcqcn = false"),
        ),
        row("capacity = 0", &to_one(6, 2_000_000, "ack_every = 100")),
        // A packet takes 8 ms per link.
        row("capacity = 0", &to_one(3, 20_000, "dcqcn = false")).replace("1e10", "1e6"),
        row("[switch.pfc]\nxoff = 3000", &to_one(3, 20_000, "")).replace("1e10", "1e6"),
    ];
    for toml in cases {
        let result = run(&toml);
        let t = &result.totals;
        assert_eq!((t.data_drops, t.control_drops), (0, 0), "{toml}");
        for f in &result.flows {
            let fired = (f.timeouts, f.retransmitted, f.nacks);
            assert_eq!(fired, (0, 0, 0), "flow {} of {toml}", f.id);
            assert_eq!(f.bytes_acked, f.bytes, "flow {} of {toml}", f.id);
        }
    }
}

/// A host's answer can take the room that a queue pair was just offered; then the queue pair waits, and time goes on.
#[test]
fn a_queue_pair_whose_turn_an_answer_takes_is_next() {
    let result = run(
        "duration = 1e-3\nedges = [[1, 0, 8e11, 0], [2, 1, 4e10, 50000]]\nhosts = [0, 1, 2]\n[link]\nhost_links = true\n\
         [switch]\nport_rate = 4e11\npfc = { xoff = 1500, xon_gap = 1000 }\n\
         [[flow_set]]\nflow_type = \"RoCE\"\npairing = \"Permutation\"\n\
         traffic = { size = 999, pkt_size_dist = 64 }\n",
    );
    assert_eq!(result.flows.len(), 3);
    for flow in &result.flows {
        assert_eq!((flow.packets_sent, flow.retransmitted), (16, 0));
        assert!(flow.acked_ns.is_some());
    }
}
