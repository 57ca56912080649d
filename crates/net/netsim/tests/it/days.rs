//! Files in the dialect of Days: the effect of each of its features.

use slipstream_netsim::aqm::Aqm;
use slipstream_netsim::config::Dialect;
use slipstream_netsim::scenario::{Demand, Transport};
use slipstream_netsim::topology::End;

use crate::common::{config, error, run, run_on};
use crate::conservation::check_balance;

/// Packets of 1,250 bytes, 10 us each at 1 Gb/s.
const DISTS: &str = "arr_dist = { type = \"Uniform\", low = 1e-9, high = 1e-9 }\n\
    pkt_size_dist = { type = \"DiscreteUniform\", low = 1250, high = 1250 }\n";

/// A switch with hosts 0 to 3; packets leave for host 3.
fn star(switch: &str, flows: &str) -> String {
    format!(
        "seed = 1\nduration = 1.0\nedges = [[0, 4], [1, 4], [2, 4], [3, 4]]\nhosts = [0, 1, 2, 3]\n\
         threading = \"single\"\n[switch]\nport_rate = 1_000_000_000\n{switch}\n{flows}\n"
    )
}

fn fifo(capacity: u32) -> String {
    format!("capacity = {capacity}\ndiscipline = \"FIFO\"\ndrop = \"TailDrop\"")
}

/// A flow of packets without a flow number.
fn packets(src: u32, dst: u32, bytes: u32, more: &str) -> String {
    format!(
        "[[flow]]\nflow_type = \"PacketDistribution\"\ngraph = [[{src}, {dst}]]\n{more}\n\
         [flow.traffic]\ninitial_delay = 0.0\nsize = {bytes}\n{DISTS}"
    )
}

fn queue_pair(src: u32, dst: u32, bytes: u32, tables: &str) -> String {
    format!(
        "[[flow]]\nflow_type = \"RoCE\"\ngraph = [[{src}, {dst}]]\n[flow.traffic]\nsize = {bytes}\n\
         {DISTS}{tables}\n"
    )
}

fn tree(top: &str, flows: &str) -> String {
    format!(
        "seed = 1\nduration = 1.0\n{top}\n[topology]\ncategory = \"FatTree\"\n[topology.fat_tree]\n\
         k = 4\nhosts_per_edge = 2\n[switch]\nport_rate = 1e9\n{}\n[link]\npropagation_ns = 1000\n{flows}",
        fifo(100)
    )
}

#[test]
fn the_dialect_decides_the_numbers_of_hosts_in_a_fat_tree() {
    let flow = packets(0, 8, 1250, "");
    // Eight edge switches: in Days, hosts 0 and 8 share the first of them.
    for (top, hops) in [
        ("threading = \"single\"", 2),
        ("dialect = \"days\"", 2),
        ("dialect = \"slipstream\"", 6),
        ("threading = \"single\"\ndialect = \"slipstream\"", 6),
    ] {
        let toml = tree(top, &flow);
        let result = run(&toml);
        assert_eq!(result.totals.packet_hops, hops, "{top}");
        assert_eq!(result.flows[0].delivered_ns, Some(hops * 11_000), "{top}");
        assert_eq!(
            (result.flows[0].src, result.flows[0].dst),
            (0, 8),
            "as in the file"
        );
        check_balance(&toml);
    }
    // Every host of a switch has a port there, by its number in the file.
    let toml = tree("dialect = \"days\"", &flow);
    let topology = config(&toml).scenario.topology;
    for host in 0..16 {
        let ends = topology.port_ends(topology.host_down(host));
        assert_eq!(ends, (End::Node(host % 8), End::Host(host)));
        assert_eq!(topology.part_of_host(host), host % 8 / 2);
    }
    let used = run(&toml);
    assert_eq!(used.ports.iter().filter(|p| p.packets > 0).count(), 2);
}

#[test]
fn patterns_by_switch_use_the_numbers_of_days() {
    let set = |pairing: &str| {
        format!(
            "[[flow_set]]\nflow_type = \"TCP\"\nflow_count = 8\npairing = \"{pairing}\"\n\
             [flow_set.traffic]\nsize = 14600\narr_dist = {{ type = \"Uniform\", low = 1, high = 1 }}\n\
             pkt_size_dist = {{ type = \"Uniform\", low = 1460, high = 1460 }}\n\
             tcp = {{ cc_algorithm = \"TCPReno\" }}\n"
        )
    };
    let pairs = |dialect: &str, pairing: &str| -> Vec<(u32, u32)> {
        let toml = tree(&format!("dialect = \"{dialect}\""), &set(pairing));
        let result = run(&toml);
        assert!(result.flows.iter().all(|f| f.acked_ns.is_some()));
        result.flows.iter().map(|f| (f.src, f.dst)).collect()
    };
    // The first eight flows start from eight switches, or from four.
    let days: Vec<_> = (0..8).map(|h| (h, (h + 4) % 8)).collect();
    assert_eq!(pairs("days", "SwitchOffsetHalf"), days);
    let ours: Vec<_> = (0..8).map(|h| (h, h + 8)).collect();
    assert_eq!(pairs("slipstream", "SwitchOffsetHalf"), ours);
    let days: Vec<_> = (0..8).map(|h| (h, h + 8)).collect();
    assert_eq!(pairs("days", "SameSwitchNext"), days);
    // Threads change nothing if partitions are counted by ordinals.
    let toml = tree("dialect = \"days\"", &set("SwitchOffsetHalf"))
        .replace("flow_count = 8", "flow_count = 16")
        .replace("port_rate = 1e9", "port_rate = 1e11")
        .replace("size = 14600", "size = 1460000");
    let one = run(&toml);
    for threads in [2, 4] {
        assert_eq!(run_on(&toml, threads), one);
    }
}

#[test]
fn the_dialect_is_derived_from_keys_and_reported() {
    let ours = tree(
        "",
        "[[flow]]\ngraph = [[0, 8]]\ntraffic = { size = 1000 }\n",
    );
    let days = tree("", &packets(0, 8, 1250, ""));
    for (toml, dialect, because, note) in [
        (
            tree("num_threads = 4", ""),
            Dialect::Days,
            "`num_threads`",
            false,
        ),
        (
            days.replace(
                "propagation_ns = 1000",
                "propagation_tiers = { host_to_edge_ns = 5 }",
            ),
            Dialect::Days,
            "`link.propagation_tiers`",
            false,
        ),
        (
            days.replace("[flow.traffic]", "priority = 3\n[flow.traffic]"),
            Dialect::Days,
            "`flow.priority`",
            false,
        ),
        // All keys that Days requires, and no others: its numbers apply, and a note reports it.
        (
            days.clone(),
            Dialect::Days,
            "all keys that Days requires",
            true,
        ),
        (
            days.replace("hosts_per_edge = 2", "hosts_per_edge = 1")
                .replace("[0, 8]", "[0, 7]")
                .replace("[[0, 8]]", "[[0, 7]]"),
            Dialect::Days,
            "all keys that Days requires",
            false,
        ),
        (ours.clone(), Dialect::Slipstream, "lacks keys", true),
        (
            ours.replace("graph = [[0, 8]]", "graph = [[0, 8]]\nclass = 1"),
            Dialect::Slipstream,
            "`flow.class`",
            false,
        ),
    ] {
        let toml = if toml.contains("[[flow]]") {
            toml
        } else {
            toml + &packets(0, 8, 1250, "")
        };
        let config = config(&toml);
        assert_eq!(config.dialect, dialect, "{toml}");
        assert!(
            config.dialect_because.contains(because),
            "{}",
            config.dialect_because
        );
        assert_eq!(config.dialect_note.is_some(), note, "{toml}");
    }
    // Keys of both, and hosts that the two number differently.
    let both = days.replace("[switch]", "[switch]\nloss = 0.1") + "\n[app_source]\n";
    let message = error(&both);
    assert!(
        message.contains("`app_source` is a key of Days and `switch.loss` one of ours"),
        "{message}"
    );
    assert!(message.contains("--dialect"), "{message}");
    let settled = format!("dialect = \"days\"\n{both}");
    assert_eq!(config(&settled).dialect, Dialect::Days);
    // If no result depends on it, both kinds of keys may be present.
    let graph =
        star(&fifo(10), &packets(0, 3, 1250, "")).replace("[switch]", "[switch]\nloss = 0.5");
    assert_eq!(config(&graph).dialect, Dialect::Days);
    assert!(error("dialect = \"nonsense\"\n").contains("\"slipstream\", \"days\""));
}

#[test]
fn flows_without_a_number_get_the_next() {
    let flow = |more: &str| packets(0, 3, 1250, more);
    let set = |first: &str| {
        format!(
            "[[flow_set]]\n{first}\nflow_type = \"TCP\"\nflow_count = 3\n[flow_set.traffic]\nsize = 100\n\
             arr_dist = {{ type = \"Uniform\", low = 1, high = 1 }}\npkt_size_dist = {{ type = \
             \"Uniform\", low = 100, high = 100 }}\ntcp = {{ cc_algorithm = \"CUBIC\" }}\n"
        )
    };
    let ids = |toml: &str| -> Vec<u64> { run(toml).flows.iter().map(|f| f.id).collect() };
    let all = flow("") + &flow("") + &set("") + &set("") + &set("first_flow_id = 20") + &set("");
    let expected = [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23, 24, 25];
    assert_eq!(ids(&star(&fifo(100), &all)), expected);
    // Numbers in the file stay reserved.
    let some = flow("") + &flow("flow_id = 1") + &flow("") + &set("");
    assert_eq!(ids(&star(&fifo(100), &some)), [0, 1, 2, 3, 4, 5]);
    let later = flow("") + &flow("") + &flow("flow_id = 1");
    assert_eq!(ids(&star(&fifo(100), &later)), [0, 2, 1]);
    // A set waits as a whole.
    let after = set("") + &set("starts_after = [0, 1, 2]");
    let result = run(&star(&fifo(100), &after));
    let end = result.flows[..3]
        .iter()
        .map(|f| f.acked_ns.unwrap())
        .max()
        .unwrap();
    assert!(
        result.flows[3..].iter().all(|f| f.start_ns == end),
        "{result:?}"
    );
}

#[test]
fn ports_may_be_as_slow_as_the_first_examples() {
    // 1,000 bytes at 8,000 bit/s take 1 s; ten at once wait for up to 9 s, beyond 2^32 ns.
    let flow = "[[flow]]\nflow_type = \"PacketDistribution\"\ngraph = [[0, 1]]\n[flow.traffic]\n\
        initial_delay = 0.0\nsize = 10000\narr_dist = { type = \"Uniform\", low = 1e-9, high = 1e-9 }\n\
        pkt_size_dist = { type = \"Uniform\", low = 1000, high = 1000 }\n";
    let toml = |capacity: u32| {
        format!(
            "seed = 1\nduration = 100.0\nedges = [[0, 1]]\nhosts = [0, 1]\n[switch]\nport_rate = 8000\n\
             weights = [1]\n{}\n{flow}",
            fifo(capacity)
        )
    };
    for capacity in [100, 0] {
        let result = run(&toml(capacity));
        assert_eq!(result.flows[0].last_ns, 10_000_000_000);
        assert_eq!(result.ports[0].wait_ns_max, 9_000_000_000 - 9);
    }
    assert_eq!(run(&toml(3)).totals.data_drops, 6);
    check_balance(&toml(3));
    assert!(error(&toml(1).replace("8000", "0.5")).contains("from 1 to 1e15"));
    assert!(error(&toml(1).replace("TailDrop", "Trim")).contains("below 1 Mb/s"));
}

/// The shares of two flows at the port to host 3 while both have packets, in the first millisecond.
fn shares(switch: &str) -> (f64, f64) {
    let flows = packets(0, 3, 2_500_000, "") + &packets(1, 3, 2_500_000, "");
    let toml = star(
        &format!("capacity = 0\ndrop = \"TailDrop\"\n{switch}"),
        &flows,
    );
    let toml = toml.replace("duration = 1.0", "duration = 0.01");
    check_balance(&toml);
    let result = run(&toml);
    let total = (result.flows[0].bytes_received + result.flows[1].bytes_received) as f64;
    (
        result.flows[0].bytes_received as f64 / total,
        result.flows[1].bytes_received as f64 / total,
    )
}

#[test]
fn classes_are_numbers_of_flows_modulo_classes() {
    // Flow 0 is in class 0, flow 1 in class 1; 1,000 packets leave in 10 ms.
    for (switch, first) in [
        ("discipline = \"WFQ\"\nweights = [3, 1]", 0.75),
        (
            "discipline = \"DRR\"\nweights = [1, 3]\npriorities = [1, 2]",
            0.25,
        ),
        ("discipline = \"WRR\"\nweights = [1, 1]", 0.5),
        // One class: equal shares.
        ("discipline = \"WFQ\"\nweights = [7]", 0.5),
        // Seconds per bit: 3 and 1 of 4.
        ("discipline = \"VirtualClock\"\nvticks = [1e-9, 3e-9]", 0.75),
        ("discipline = \"VC\"\nvticks = [1e-9, 3e-9]", 0.75),
        ("discipline = \"VirtualClock\"\nweights = [1]", 0.5),
        // The larger number goes first.
        ("discipline = \"SP\"\npriorities = [1, 2]", 0.0),
        ("discipline = \"SP\"\npriorities = [[0, 2], [1, 1]]", 1.0),
        ("discipline = \"SP\"\nweights = [1]", 0.5),
    ] {
        let (a, _) = shares(switch);
        assert!((a - first).abs() < 0.005, "{switch}: {a}");
    }
    let config = config(&star(
        "capacity = 9\ndrop = \"TailDrop\"\ndiscipline = \"DRR\"\n\
        weights = [1, 3]\npriorities = [1, 2]",
        &packets(0, 3, 1250, ""),
    ));
    assert!(
        config.notes.iter().any(|n| n.contains("switch.priorities")),
        "{:?}",
        config.notes
    );
    for (switch, part) in [
        (
            "discipline = \"SP\"\npriorities = [[0, 1], [0, 2]]",
            "each class once",
        ),
        ("discipline = \"SP\"\npriorities = [-1]", "whole numbers"),
        ("discipline = \"WFQ\"", "weights"),
        ("discipline = \"VirtualClock\"\nvticks = [0.0]", "s per bit"),
    ] {
        let message = error(&star(
            &format!("capacity = 9\ndrop = \"TailDrop\"\n{switch}"),
            "",
        ));
        assert!(message.contains(part), "{switch}: {message}");
    }
}

#[test]
fn keys_of_its_executor_change_nothing_and_are_noted() {
    let flows = packets(0, 3, 12_500, "") + &packets(1, 3, 12_500, "");
    let plain = star(&fifo(5), &flows);
    let more = format!("legacy_e5_metrics = true\ncsv_logging = false\n{plain}")
        .replace("[switch]", "[switch]\nrun_batch_size = 64");
    assert_eq!(run(&plain), run(&more));
    let notes = config(&more).notes.join("\n");
    for key in [
        "threading",
        "legacy_e5_metrics",
        "csv_logging",
        "run_batch_size",
    ] {
        assert!(notes.contains(&format!("{key}`")), "{key}: {notes}");
    }
}

#[test]
fn ecn_threshold_is_a_share_of_the_capacity() {
    let switch = |share: &str| {
        format!("capacity = 10\ndiscipline = \"FIFO\"\ndrop = \"ECN_THRESHOLD\"\n{share}")
    };
    // Twelve packets at once: one is in service and floor(share · 10) wait. The rest cannot be
    // marked, so they are dropped.
    for (share, waiting) in [
        ("ecn_threshold = 0.5", 5),
        ("ecn_threshold = 0.29", 2),
        ("ecn_threshold = 1.0", 10),
        ("", 8),
    ] {
        let toml = star(&switch(share), &packets(0, 3, 15_000, ""));
        let toml = format!("dialect = \"days\"\n{toml}");
        let result = run(&toml);
        assert_eq!(result.flows[0].packets_received, 1 + waiting, "{share}");
        assert_eq!(result.totals.marks, 0);
        check_balance(&toml);
    }
    // ECN-capable packets are marked instead: three queue pairs fill the queue together.
    let pairs: String = (0..3).map(|src| queue_pair(src, 3, 15_000, "")).collect();
    let result =
        run(&star(&switch("ecn_threshold = 0.2"), &pairs)
            .replace("capacity = 10", "capacity = 100"));
    assert!(result.totals.marks > 0);
    assert_eq!(result.totals.data_drops, 0);
    // A whole number means packets in our own dialect, but not in that of Days.
    let toml = star(&switch("ecn_threshold = 5"), &packets(0, 3, 15_000, ""));
    let ours = toml.replace("threading = \"single\"", "dialect = \"slipstream\"");
    assert_eq!(run(&ours).flows[0].packets_received, 11);
    assert!(error(&star(&switch("ecn_threshold = 1.5"), "")).contains("share of the capacity"));
    let none = star(&switch("ecn_threshold = 0.5"), "").replace("capacity = 10", "capacity = 0");
    assert!(
        error(&none).contains("share of the capacity"),
        "{}",
        error(&none)
    );
}

#[test]
fn red_ecn_marks_instead_of_dropping() {
    let switch = |drop: &str| format!("capacity = 20\ndiscipline = \"FIFO\"\ndrop = \"{drop}\"");
    let flow = |src: u32| {
        format!(
            "[[flow]]\nflow_type = \"TCP\"\ngraph = [[{src}, 3]]\n[flow.traffic]\nsize = 2_000_000\n{DISTS}\
             tcp = {{ cc_algorithm = \"TCPReno\", ecn = true }}\n"
        )
    };
    let flows = flow(0) + &flow(1) + &flow(2);
    let toml = |drop: &str| star(&switch(drop), &flows);
    let (red, marks) = (run(&toml("RED")), run(&toml("RED_ECN")));
    assert!(red.totals.data_drops > 0 && red.totals.marks == 0);
    assert!(marks.totals.marks > 0);
    assert!(marks.totals.data_drops < red.totals.data_drops);
    check_balance(&toml("RED_ECN"));
    let aqm = config(&toml("RED_ECN")).scenario.queue.aqm;
    assert!(format!("{aqm:?}").contains("ecn_above: true"), "{aqm:?}");
}

#[test]
fn an_ecn_ramp_counts_and_limits_bytes() {
    // A step: kmin = kmax. Queue pairs of one packet each, eight at once into a port: the first is
    // in service, then 1,250, 2,500, ... bytes wait. Packets are marked from 3,750 on, and 7,500
    // fit.
    let switch = "capacity = 1\ndiscipline = \"FIFO\"\ndrop = \"TailDrop\"\necn_capacity_bytes = 7500\n\
        ecn = { kmin_bytes = 3750, kmax_bytes = 3750, pmax = 1.0 }";
    let flows: String = (0..9).map(|i| queue_pair(i % 3, 3, 1250, "")).collect();
    let toml = star(switch, &flows)
        .replace("duration = 1.0", "duration = 0.0005")
        .replace(
            "[[0, 4], [1, 4], [2, 4]",
            "[[0, 4, 1e13], [1, 4, 1e13], [2, 4, 1e13]",
        );
    let result = run(&toml);
    assert_eq!(result.totals.marks, 4);
    assert_eq!(result.totals.data_drops, 9 - 1 - 6);
    check_balance(&toml);
    for (from, to, part) in [
        ("kmin_bytes = 3750", "kmin_bytes = 0", "must rise"),
        ("kmax_bytes = 3750", "kmax_bytes = 9000", "must rise"),
        ("ecn_capacity_bytes = 7500", "", "ecn_capacity_bytes"),
        ("pmax = 1.0", "pmax = 0.0", "above 0"),
        ("\"TailDrop\"", "\"RED\"", "both mark packets"),
        (
            "ecn = {",
            "ecn_by_rate = [{ rate_bps = 1 }]\necn = {",
            "ecn_by_rate",
        ),
    ] {
        let message = error(&toml.replace(from, to));
        assert!(message.contains(part), "{to}: {message}");
    }
}

#[test]
fn tiers_of_a_fat_tree_have_their_own_delays() {
    let tiers = "propagation_tiers = { host_to_edge_ns = 100, edge_to_aggregation_ns = 2000, \
        aggregation_to_core_ns = 30000 }";
    let toml = tree("", &packets(0, 7, 1250, "")).replace("propagation_ns = 1000", tiers);
    // Six links, two of each tier.
    let result = run(&toml);
    assert_eq!(
        result.flows[0].delivered_ns,
        Some(6 * 10_000 + 2 * (100 + 2_000 + 30_000))
    );
    check_balance(&toml);
    let both = toml.replace("[link]", "[link]\npropagation_ns = 5");
    assert!(error(&both).contains("both give delays"));
    let torus = toml
        .replace("category = \"FatTree\"", "category = \"Torus\"")
        .replace(
            "[topology.fat_tree]\nk = 4\nhosts_per_edge = 2",
            "[topology.torus]\ndim = 1\nn = 9",
        );
    assert!(
        error(&torus).contains("only for fat-trees"),
        "{}",
        error(&torus)
    );
}

/// Hosts 0 and 1 at switch 4, 2 and 3 at switch 5; the bottleneck is the link to host 2.
fn pfc(link: &str, flows: &str) -> String {
    format!(
        "seed = 1\nduration = 0.01\nedges = [[0, 4], [1, 4], [4, 5], [3, 5], [2, 5]]\n\
         hosts = [0, 1, 2, 3]\n[switch]\nport_rate = 1e9\n{}\n[link]\nmode = \"Pfc\"\n[link.pfc]\n{link}\n\
         {flows}\n",
        fifo(1000)
    )
}

#[test]
fn pfc_pauses_a_priority_between_its_two_thresholds() {
    let thresholds = "xoff = [0, 0, 0, 5000, 0, 0, 0, 0]\nxon = [0, 0, 0, 2500, 0, 0, 0, 0]\n\
        buffer_capacity = [0, 0, 0, 100000, 0, 0, 0, 0]\npause_quanta = [0, 0, 0, 1, 0, 0, 0, 0]";
    let flow =
        |src, priority: u32, bytes| packets(src, 2, bytes, &format!("priority = {priority}"));
    // Two senders share one link: switch 5 pauses switch 4.
    let toml = pfc(thresholds, &(flow(0, 3, 50_000) + &flow(3, 3, 50_000)));
    let result = run(&toml);
    assert!(result.totals.pauses > 2, "{:?}", result.totals);
    assert_eq!(result.totals.data_drops, 0);
    assert_eq!(result.flows[0].packets_received, 40);
    assert_eq!(result.flows[1].packets_received, 40);
    let topology = config(&toml).scenario.topology;
    let paused: Vec<_> = result
        .ports
        .iter()
        .filter(|p| p.pauses > 0)
        .map(|p| topology.port_ends(p.port))
        .collect();
    assert!(paused.contains(&(End::Node(4), End::Node(5))), "{paused:?}");
    // Links of hosts are not paused by default.
    assert!(
        paused.iter().all(|(from, _)| matches!(from, End::Node(_))),
        "{paused:?}"
    );
    let hosts = run(&toml.replace("[link.pfc]", "[link.pfc]\nhost_links = true"));
    assert!(hosts.totals.pauses > result.totals.pauses);
    check_balance(&toml);

    // Without the pause, all packets wait at switch 5. With it, at most the threshold, the packets
    // in flight, and those of host 3 wait there.
    let none = run(&toml.replace("xoff = [0, 0, 0, 5000", "xoff = [0, 0, 0, 0"));
    assert_eq!(none.totals.pauses, 0);

    // A priority that is not paused overtakes one that is.
    let mixed = pfc(
        thresholds,
        &(flow(0, 3, 50_000) + &flow(3, 3, 50_000) + &packets(1, 2, 12_500, "priority = 0")),
    );
    let result = run(&mixed);
    assert!(result.totals.pauses > 0);
    assert!(result.flows[2].last_ns < result.flows[0].last_ns);
    assert_eq!(result.in_flight(), 0);
    check_balance(&mixed);
    let alike = run(&mixed.replace("priority = 0", "priority = 3"));
    assert!(alike.flows[2].last_ns > result.flows[2].last_ns);

    // The buffer behind a link has the configured size: two packets over the threshold are lost.
    let small = toml.replace("100000", "5000");
    assert!(run(&small).totals.data_drops > 0);
    for (from, to, part) in [
        ("xon = [0, 0, 0, 2500", "xon = [0, 0, 0, 5000", "must rise"),
        ("100000", "4000", "must rise"),
        (
            "xoff = [0, 0, 0, 5000, 0, 0, 0, 0]",
            "xoff = [5000]",
            "eight numbers",
        ),
        ("[link.pfc]", "[link.pfc]\nby_tier = []", "by_tier"),
        ("mode = \"Pfc\"", "mode = \"None\"", "no effect without"),
        ("priority = 3", "priority = 8", "0 to 7"),
    ] {
        let message = error(&toml.replace(from, to));
        assert!(message.contains(part), "{to}: {message}");
    }
    let noted = config(&toml).notes.join("\n");
    assert!(noted.contains("pause_quanta"), "{noted}");
}

#[test]
fn pfc_with_classes_needs_one_priority_per_class() {
    let thresholds = "xoff = [0, 0, 0, 3000, 0, 0, 0, 0]\nxon = [0, 0, 0, 1000, 0, 0, 0, 0]";
    let wfq = |flows: &str| {
        pfc(thresholds, flows).replace(
            "discipline = \"FIFO\"",
            "discipline = \"WFQ\"\nweights = [1, 3]",
        )
    };
    let flow = |src, priority: u32| packets(src, 2, 50_000, &format!("priority = {priority}"));
    // Flows 0 and 2 are in class 0, flow 1 in class 1.
    let toml = wfq(&(flow(0, 3) + &flow(1, 0) + &flow(3, 3)));
    let result = run(&toml);
    assert!(result.totals.pauses > 0);
    assert_eq!(result.in_flight(), 0);
    check_balance(&toml);
    let message = error(&wfq(&(flow(0, 3) + &flow(1, 0) + &flow(3, 0))));
    assert!(
        message.contains("class 0") && message.contains("3 and 0"),
        "{message}"
    );
}

#[test]
fn a_priority_without_pfc_is_noted() {
    let toml = star(&fifo(5), &packets(0, 3, 12_500, "priority = 5"));
    assert_eq!(
        run(&toml).digest,
        run(&toml.replace("priority = 5", "")).digest
    );
    assert!(config(&toml).notes.iter().any(|n| n.contains("`priority`")));
}

#[test]
fn dcqcn_and_roce_use_their_tables() {
    let dcqcn = |table: &str| {
        let flow = queue_pair(0, 3, 1_250_000, &format!("[flow.traffic.dcqcn]\n{table}"));
        star(&fifo(0), &flow.replace("\"RoCE\"", "\"DCQCN\"")).replace("1_000_000_000", "10e9")
    };
    let end = |toml: &str| run(toml).flows[0].delivered_ns.unwrap() as f64 / 1e6;
    // 10 Mbit without congestion at the initial rate, limited by the maximum or the link's rate.
    for (table, ms) in [
        ("max_rate_gbps = 1.0\npacing_interval_ns = 1000", 10.0),
        (
            "rate_gbps = 2.0\nmin_rate_gbps = 1.0\nmax_rate_gbps = 10.0\ng = 0.5",
            5.0,
        ),
        ("rate_gbps = 20.0\nmax_rate_gbps = 40.0", 1.0),
    ] {
        let took = end(&dcqcn(table));
        assert!((took / ms - 1.0).abs() < 0.01, "{table}: {took} ms");
        check_balance(&dcqcn(table));
    }
    for (table, part) in [
        ("rate_gbps = 2.0\nmax_rate_gbps = 1.0", "do not rise"),
        ("mi_factor = 0.7", "mi_factor"),
        ("rate_gbps = 0", "above 0"),
        ("speed = 1", "speed"),
    ] {
        let message = error(&dcqcn(table));
        assert!(message.contains(part), "{table}: {message}");
    }
    // The minimum rate: marks from the first packet on cut the rate down to it.
    let switch = "capacity = 100\ndiscipline = \"FIFO\"\ndrop = \"TailDrop\"\necn_capacity_bytes = 1000000\n\
        ecn = { kmin_bytes = 1, kmax_bytes = 1, pmax = 1.0 }";
    let two = |min: &str| {
        let table =
            format!("[flow.traffic.dcqcn]\n{min}max_rate_gbps = 1.0\ncnp_interval_ns = 1000");
        let flows = queue_pair(0, 3, 2_500_000, &table) + &queue_pair(1, 3, 2_500_000, &table);
        run(&star(switch, &flows))
            .flows
            .iter()
            .map(|f| f.rate_bits_per_s.unwrap())
            .fold(0.0, f64::max)
    };
    assert!(two("min_rate_gbps = 0.4\n") >= 4e8);
    let roce = |table: &str| {
        let flow = queue_pair(0, 3, 125_000, &format!("[flow.traffic.roce]\n{table}"));
        star(&fifo(3), &flow).replace("[3, 4]]", "[3, 4, 1e8]]")
    };
    // Ten times as fast, into a queue of three: only a timer recovers the last lost packets.
    let slow = run(&roce("retransmit_timeout_ns = 50000000"));
    let fast = run(&roce("retransmit_timeout_ns = 1000000"));
    assert!(fast.flows[0].timeouts > 0 && slow.flows[0].timeouts > 0);
    assert!(fast.flows[0].acked_ns.unwrap() < slow.flows[0].acked_ns.unwrap());
    let never = run(&roce("retransmit_timeout_ns = 0"));
    assert_eq!(
        (never.flows[0].timeouts, never.flows[0].acked_ns),
        (0, None)
    );
    check_balance(&roce("retransmit_timeout_ns = 0"));
    // A window of two packets: two per round trip.
    let windowed = run(&roce("window_bytes = 2500"));
    assert_eq!(windowed.totals.data_drops, 0);
    let sizes = run(&roce("window_bytes = 2500\nack_size_bytes = 60"));
    assert!(sizes.flows[0].acked_ns > windowed.flows[0].acked_ns);
    assert!(error(&roce("variable_window = true")).contains("variable_window"));
    let tcp = star(
        &fifo(3),
        &queue_pair(0, 3, 10, "[flow.traffic.dcqcn]\ng = 0.5"),
    );
    assert!(error(&tcp.replace("\"RoCE\"", "\"TCP\"")).contains("no effect on this type"));
}

#[test]
fn the_file_decides_whether_host_links_are_modeled() {
    let flow = packets(0, 7, 1250, "");
    let toml = |top: &str| {
        tree(top, &flow)
            .replace("hosts_per_edge = 2\n", "")
            .replace("[link]\npropagation_ns = 1000\n", "")
    };
    // Four links between switches; six with those of hosts.
    for (top, links) in [
        ("num_threads = 1", 4),
        ("model_host_attachment = true", 6),
        ("model_host_attachment = false", 4),
    ] {
        assert_eq!(run(&toml(top)).totals.packet_hops, links, "{top}");
    }
}

#[test]
fn a_dragonfly_by_its_keys() {
    let toml = |table: &str| {
        format!(
            "seed = 3\nduration = 1.0\n[topology]\ncategory = \"Dragonfly\"\n[topology.dragonfly]\n{table}\n\
             [switch]\nport_rate = 1e9\n{}\n{}",
            fifo(100),
            packets(0, 5, 12_500, "")
        )
    };
    let days = "routers_per_group = 4\nglobal_ports_per_router = 2\nhosts_per_router = 1";
    let result = run(&toml(days));
    assert_eq!(result.digest, run(&toml("p = 1\na = 4\nh = 2")).digest);
    assert_eq!(result.flows[0].packets_received, 10);
    let scenario = config(&toml(days)).scenario;
    assert_eq!(
        (
            scenario.topology.node_count(),
            scenario.topology.host_count()
        ),
        (36, 36)
    );
    check_balance(&toml(days));
    // Two hosts per router, in ordinal order, as in a fat-tree.
    let two = config(&toml(
        &days.replace("hosts_per_router = 1", "hosts_per_router = 2"),
    ));
    let topology = two.scenario.topology;
    assert_eq!(
        (topology.attachment(5), topology.attachment(36 + 5)),
        (5, 5)
    );
    let both = format!("{days}\np = 1");
    assert!(error(&toml(&both)).contains("`topology.dragonfly.p`"));
    assert!(error(&toml("routers_per_group = 4")).contains("global_ports_per_router"));
}

fn rails(flows: &str) -> String {
    format!(
        "seed = 1\nduration = 1.0\n[topology]\ncategory = \"SpectrumX\"\n[topology.spectrum_x]\ngpus = 16\n\
         gpus_per_server = 2\nnics_per_asw = 4\npsws = 2\ngpu_type = \"A100\"\nnic_rate_bps = 1e9\n\
         uplink_rate_bps = 4e9\nnvlink_rate_bps = 1e12\nlink_delay_ns = 500\nnvlink_delay_ns = 25\n\
         [routing]\npolicy = \"SimAiEcmp\"\n[switch]\n{}\n{flows}",
        fifo(100)
    )
}

#[test]
fn a_rail_fabric_has_two_links_on_a_rail_and_four_between_rails() {
    // Segments of 8 GPUs: 0 and 2 share a segment and a rail, 0 and 3 a segment, 0 and 8 a rail.
    // 1,250 bytes: 10 us at 1 Gb/s, 2.5 us at 4 Gb/s.
    for (dst, ns) in [
        (2, 2 * 10_500),
        (3, 2 * 10_500 + 2 * 3_000),
        (8, 2 * 10_500 + 2 * 3_000),
        (15, 2 * 10_500 + 2 * 3_000),
    ] {
        let toml = rails(&packets(0, dst, 1250, ""));
        assert_eq!(run(&toml).flows[0].delivered_ns, Some(ns), "{dst}");
        check_balance(&toml);
    }
    let config = config(&rails(&packets(0, 2, 1250, "")));
    assert_eq!(config.scenario.topology.node_count(), 4 + 2);
    assert!(config.notes.iter().any(|n| n.contains("SimAiEcmp")));
    let collective = |hosts: &str| {
        rails(&format!(
            "[[collective]]\ncollective_type = \"AllGather\"\nflow_type = \"TCP\"\nflow_count = 3\n{hosts}\n\
             [collective.traffic]\nsize = 3000\n{DISTS}tcp = {{ cc_algorithm = \"TCPReno\" }}\n"
        ))
    };
    assert_eq!(
        run(&collective("sources = [0, 2, 4]\nsinks = [2, 4, 0]"))
            .flows
            .len(),
        6
    );
    let message = error(&collective("sources = [0, 1, 4]\nsinks = [1, 4, 0]"));
    assert!(message.contains("NVLink"), "{message}");
    for (from, to, part) in [
        ("[switch]", "[switch]\nport_rate = 1e9", "port_rate"),
        (
            "[switch]",
            "[link]\npropagation_ns = 5\n[switch]",
            "propagation_ns",
        ),
        ("gpus = 16", "gpus = 12", "whole number of segments"),
        ("nic_rate_bps = 1e9", "", "nic_rate_bps"),
    ] {
        let message = error(&rails(&packets(0, 2, 1250, "")).replace(from, to));
        assert!(message.contains(part), "{to}: {message}");
    }
}

#[test]
fn traces_of_training_are_refused_by_name() {
    let message = error(&star(&fifo(5), "[workload.aicb]\ntrace = \"x.txt\"\n"));
    assert!(message.contains("`workload` is not read"), "{message}");
    assert!(message.contains("[[compute]]"), "{message}");
    assert!(!message.contains("no traffic"), "{message}");
}

fn collective(kind: &str, count: u32, more: &str, traffic: &str) -> String {
    format!(
        "[[collective]]\ncollective_type = \"{kind}\"\nflow_type = \"TCP\"\nflow_count = {count}\n{more}\n\
         [collective.traffic]\n{traffic}\n{DISTS}tcp = {{ cc_algorithm = \"TCPReno\" }}\n"
    )
}

#[test]
fn computation_delays_items_that_refer_to_it() {
    let ring = "sources = [0, 1, 2, 3]\nsinks = [1, 2, 3, 0]";
    let compute = |name: &str, ns: u32, after: &str| {
        format!(
            "[[compute]]\nname = \"{name}\"\nhosts = [0, 1, 2, 3]\nduration_ns = {ns}\n{after}\n"
        )
    };
    let gather = |more: &str| collective("AllGather", 4, &format!("{ring}\n{more}"), "size = 5000");
    let time = |flows: &str| -> Vec<(u64, u64)> {
        let toml = star(&fifo(0), flows);
        check_balance(&toml);
        let result = run(&toml);
        assert!(result.flows.iter().all(|f| f.acked_ns.is_some()));
        result
            .flows
            .chunks(12)
            .map(|c| {
                let start = c.iter().map(|f| f.start_ns).min().unwrap();
                let end = c.iter().filter_map(|f| f.delivered_ns).max().unwrap();
                (start, end)
            })
            .collect()
    };
    let alone = time(&gather(""))[0];
    assert_eq!(alone.0, 0);
    // Computation first: all flows are delayed by it.
    let later = time(&(compute("fwd", 7_000, "") + &gather("after = \"fwd\"")))[0];
    assert_eq!(later, (7_000, alone.1 + 7_000));
    // Two sequential computations.
    let chained = compute("a", 7_000, "") + &compute("b", 500, "after = [\"a\"]");
    assert_eq!(time(&(chained + &gather("after = \"b\"")))[0].0, 7_500);
    // Collective, computation, collective: with equal hosts the second is the first, shifted.
    let first = gather("name = \"one\"");
    let bridge = compute("mid", 9_000, "after = \"one\"");
    let both = time(&(first.clone() + &gather("after = \"mid\"") + &bridge));
    assert_eq!(both[0], alone);
    assert_eq!(both[1], (alone.1 + 9_000, 2 * alone.1 + 9_000));
    // A host waits only for its own part, not for other hosts.
    let lone = packets(0, 1, 1250, "name = \"lone\"") + &packets(2, 3, 1250, "after = \"lone\"");
    let result = run(&star(&fifo(0), &lone));
    assert_eq!(
        result.flows[1].start_ns,
        result.flows[0].delivered_ns.unwrap()
    );

    for (flows, part) in [
        (
            gather("after = \"missing\""),
            "no table has the name `missing`",
        ),
        (
            compute("a", 1, "after = \"b\"")
                + &compute("b", 1, "after = \"a\"")
                + &gather("after = \"a\""),
            "waits for itself",
        ),
        (
            compute("a", 1, "") + &compute("a", 1, "") + &gather("after = \"a\""),
            "given twice",
        ),
        (
            compute("a", 1, "").replace("[0, 1, 2, 3]", "[0, 1]") + &gather("after = \"a\""),
            "is not in it",
        ),
        (
            compute("a", 1, "after = \"none\"") + &gather(""),
            "no table has the name `none`",
        ),
        (
            "[[compute]]\nhosts = [0]\nduration_ns = 1\n".to_owned() + &gather(""),
            "has no name",
        ),
        (
            gather("name = \"x\"\nafter = \"y\"") + &gather("name = \"y\"\nafter = \"x\""),
            "circle",
        ),
    ] {
        let message = error(&star(&fifo(0), &flows));
        assert!(message.contains(part), "{flows}: {message}");
    }
    let idle = compute("end", 5, "after = \"one\"") + &first;
    assert!(
        config(&star(&fifo(0), &idle))
            .notes
            .iter()
            .any(|n| n.contains("has no effect"))
    );
}

#[test]
fn collectives_pair_sources_and_sinks_by_index() {
    let flows = |text: &str| -> Vec<(u64, u32, u32, Option<u64>)> {
        let scenario = config(&star(&fifo(0), text)).scenario;
        let flow = |f: &slipstream_netsim::scenario::Flow| (f.id, f.src, f.dst, f.demand.bytes());
        scenario.flows.iter().map(flow).collect()
    };
    let broadcast = collective(
        "Broadcast",
        2,
        "sources = [0, 0]\nsinks = [1, 2]",
        "size = 100",
    );
    assert_eq!(
        flows(&broadcast),
        [(0, 0, 1, Some(100)), (1, 0, 2, Some(100))]
    );
    // An all-reduce of Days is its fan-in; numbers continue in the second collective.
    let reduce = collective(
        "AllReduce",
        2,
        "sources = [0, 2]\nsinks = [3, 3]",
        "size = 50",
    );
    assert_eq!(
        flows(&(broadcast.clone() + &reduce)),
        [
            (0, 0, 1, Some(100)),
            (1, 0, 2, Some(100)),
            (2, 0, 3, Some(50)),
            (3, 2, 3, Some(50))
        ]
    );
    // Our dialect pairs every source with every sink, and reduces and sends back.
    let ours = star(
        &fifo(0),
        &collective("AllReduce", 2, "sources = [0, 2]\nsinks = [3]", "size = 50"),
    )
    .replace("threading = \"single\"", "dialect = \"slipstream\"");
    assert_eq!(config(&ours).scenario.flows.len(), 4);
    // Bounded by time: every flow sends for the same duration.
    let timed = collective(
        "Gather",
        2,
        "sources = [0, 1]\nsinks = [3, 3]",
        "duration = 0.001",
    )
    .replace("1e-9", "1e-4");
    let toml = star(&fifo(0), &timed);
    for flow in &config(&toml).scenario.flows {
        let Demand::Paced(arrivals) = flow.demand else {
            panic!("{flow:?}");
        };
        assert_eq!(
            (arrivals.bytes, arrivals.duration_ns),
            (None, Some(1_000_000))
        );
    }
    let result = run(&toml);
    assert!(
        result
            .flows
            .iter()
            .all(|f| (9..=11).contains(&f.packets_received)),
        "{result:?}"
    );
    check_balance(&toml);
    // Without a list, hosts are random: one source, three different sinks.
    let drawn = flows(&collective("Broadcast", 3, "", "size = 10"));
    let mut sinks: Vec<u32> = drawn.iter().map(|f| f.2).chain([drawn[0].1]).collect();
    sinks.sort_unstable();
    assert_eq!(sinks, [0, 1, 2, 3]);
    assert_eq!(
        flows(&collective("RingAllReduce", 4, "", "size = 40")).len(),
        24
    );
    let pairs = "sources = [0, 2]\nsinks = [1, 3]";
    assert_eq!(
        flows(&collective("SendRecv", 2, pairs, "size = 10"))[1],
        (1, 2, 3, Some(10))
    );

    for (text, part) in [
        (
            collective("RingAllReduce", 4, "", "duration = 1.0"),
            "needs `traffic.size`",
        ),
        (
            collective("RingAllReduce", 3, "", "size = 40"),
            "not the number of hosts, 4",
        ),
        (
            collective(
                "RingAllReduce",
                2,
                "sources = [0, 1]\nsinks = [1, 2]",
                "size = 40",
            ),
            "not form a ring",
        ),
        (
            collective("Broadcast", 3, "sources = [0]\nsinks = [1, 2]", "size = 1"),
            "number of flows, 2",
        ),
        (
            collective(
                "Broadcast",
                2,
                "sources = [0, 1]\nsinks = [2, 3]",
                "size = 1",
            ),
            "one source",
        ),
        (collective("Gather", 9, "", "size = 1"), "has no hosts"),
        (
            collective(
                "Gather",
                2,
                "sources = [0, 1, 2]\nsinks = [3, 3]",
                "size = 1",
            ),
            "its source and its sink",
        ),
    ] {
        let message = error(&star(&fifo(0), &text));
        assert!(message.contains(part), "{text}: {message}");
    }
}

/// The shipped examples leave no doubt about their dialect.
#[test]
fn examples_settle_their_dialect() {
    let folder = format!("{}/../../../examples/net", env!("CARGO_MANIFEST_DIR"));
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let note = config(&text).dialect_note;
        assert_eq!(note, None, "{}", path.display());
        seen += 1;
    }
    assert!(seen >= 10);
}

#[test]
fn reno_fills_its_window_with_short_segments_by_default() {
    let sent = |algorithm: &str, more: &str| {
        let flow = format!(
            "[[flow]]\nflow_type = \"TCP\"\ngraph = [[0, 3]]\n[flow.traffic]\ninitial_delay = 0.0\n\
             size = 1_048_576\narr_dist = {{ type = \"Uniform\", low = 1e-9, high = 1e-9 }}\n\
             pkt_size_dist = {{ type = \"Uniform\", low = 1460, high = 1460 }}\n\
             [flow.traffic.tcp]\ncc_algorithm = \"{algorithm}\"\n{more}\n"
        );
        let result = run(&star(&fifo(10_000), &flow));
        assert_eq!(result.flows[0].retransmitted, 0);
        result.flows[0].packets_sent
    };
    // ceil(1,048,576 / 1,460) = 719 full segments.
    let full = 719;
    assert!(sent("TCPReno", "") > full, "short segments are additional");
    assert_eq!(sent("TCPReno", "sws_avoidance = true"), full);
    assert_eq!(sent("CUBIC", ""), full);
}

/// Queue pairs in both directions share their ports with ACKs, NACKs and notifications. A threshold
/// marks data; in files for Days' newer engine, which have such flows, it drops nothing.
#[test]
fn a_threshold_drops_no_control_of_queue_pairs() {
    let switch =
        "capacity = 400\ndiscipline = \"FIFO\"\ndrop = \"ECN_THRESHOLD\"\necn_threshold = 0.05";
    let pfc = "[link]\nmode = \"Pfc\"\n[link.pfc]\nhost_links = true\nxoff = [200000, 200000, 200000, \
               200000, 200000, 200000, 200000, 200000]\nxon = [100000, 100000, 100000, 100000, 100000, \
               100000, 100000, 100000]\n";
    let pairs: String = [(0, 3), (1, 3), (2, 3), (3, 0), (3, 1)]
        .iter()
        .map(|&(src, dst)| queue_pair(src, dst, 1_000_000, ""))
        .collect();
    let dcqcn = pairs.replace("\"RoCE\"", "\"DCQCN\"");
    let tcp = format!(
        "[[flow]]\nflow_type = \"TCP\"\ngraph = [[1, 2]]\n[flow.traffic]\nsize = 200_000\n{DISTS}\
         [flow.traffic.tcp]\ncc_algorithm = \"TCPReno\"\n"
    );
    for (flows, link) in [
        (pairs.clone(), ""),
        (pairs.clone(), pfc),
        (dcqcn, pfc),
        (pairs + &tcp, pfc),
    ] {
        let toml = star(switch, &format!("{link}{flows}"));
        let result = run(&toml);
        let t = &result.totals;
        assert_eq!((t.data_drops, t.control_drops), (0, 0), "{toml}");
        assert!(t.marks > 0, "{toml}");
        assert!(
            result
                .flows
                .iter()
                .all(|f| f.timeouts == 0 && f.acked_ns.is_some())
        );
        check_balance(&toml);
    }
    // Files of its older engine have packets and TCP only.
    let older = config(&star(switch, &packets(0, 3, 15_000, ""))).scenario;
    assert_eq!(older.queue.aqm, Aqm::EcnLimit { packets: 20 });
}

#[test]
fn keys_of_days_present_version_are_mapped_or_refused_by_name() {
    let read = |roce: &str, dcqcn: &str| {
        let tables = format!("[flow.traffic.roce]\n{roce}\n[flow.traffic.dcqcn]\n{dcqcn}\n");
        star(&fifo(100), &queue_pair(0, 3, 15_000, &tables))
    };
    let toml = read(
        "ack_every_packets = 4\nduplicate_ack = true",
        "fast_recovery_times = 3\nclamp_target_rate = true",
    );
    let Transport::Roce(roce) = config(&toml).scenario.flows[0].transport else {
        panic!("a queue pair");
    };
    assert_eq!(roce.ack_every, 4);
    assert_eq!(roce.dcqcn.map(|dcqcn| dcqcn.fast_steps), Some(3));
    for (roce, dcqcn, part) in [
        (
            "duplicate_ack = false",
            "",
            "roce.duplicate_ack` is not modeled",
        ),
        ("ack_every_packets = 4\nack_every = 4", "", "conflicts"),
        ("ack_every_packets = 0", "", "ack_every_packets"),
        (
            "",
            "alpha_resume_interval_ns = 55000",
            "alpha_resume_interval_ns` is not modeled",
        ),
        (
            "",
            "rate_decrease_interval_ns = 4000",
            "rate_decrease_interval_ns` is not modeled",
        ),
        (
            "",
            "clamp_target_rate = false",
            "clamp_target_rate` is not modeled",
        ),
    ] {
        let message = error(&read(roce, dcqcn));
        assert!(message.contains(part), "{part}: {message}");
    }
}
