//! Failures and repairs, and BBR.

use crate::common::{error, pair, run, run_on};

#[test]
fn only_packets_on_a_failed_link_are_lost() {
    // One packet per 20 us on a link of 1 Gb/s and 1 us: number i is on it from 20 i to 20 i + 11
    // us. The outage from 45 to 85 us drops 2, 3 and 4; one that ends at 80 us spares 4.
    let flow = "[[flow]]\nflow_id = 1\nflow_type = \"PacketDistribution\"\ngraph = [[0, 1]]\n\
        traffic = { size = 12500, arr_dist = 0.00002, pkt_size_dist = 1250 }\n";
    for (at, repair, lost) in [
        (45, 85, 3),
        (45, 80, 2),
        (51, 60, 0),
        (50, 60, 1),
        (0, 1000, 10),
    ] {
        let failure = format!("[[failure]]\nat = {at}e-6\nrepair = {repair}e-6\nlink = [0, 1]\n");
        let result = run(&pair("1e9", "", &format!("{flow}{failure}")));
        assert_eq!(result.totals.fault_drops, lost, "from {at} to {repair} us");
        assert_eq!(result.totals.data_drops, lost);
        assert_eq!(result.flows[0].packets_received, 10 - lost);
    }
}

fn fabric(rest: &str) -> String {
    format!(
        "seed = 3\nduration = 5.0\n[topology]\ncategory = \"FatTree\"\nfat_tree = {{ k = 4, \
         hosts_per_edge = 2 }}\n[link]\npropagation_ns = 1000\n[routing]\npolicy = \
         \"FatTreeEcmp\"\nconvergence = 50e-6\n[switch]\nport_rate = 1e10\ncapacity = 100\n\
         [[flow_set]]\npairing = \"SwitchOffsetHalf\"\nflow_count = 16\nflow_type = \"TCP\"\n\
         traffic = {{ size = 2000000, tcp = {{ rto_min = 0.001 }} }}\n{rest}"
    )
}

#[test]
fn flows_move_to_other_paths_and_back() {
    let calm = run(&fabric(""));
    assert_eq!(calm.totals.fault_drops, 0);
    // Aggregation switch 8 of pod 0 fails permanently: half of the pod's paths.
    let toml = fabric("[[failure]]\nat = 200e-6\nswitch = 8\n");
    let result = run(&toml);
    assert!(result.totals.fault_drops > 0);
    assert!(
        result.flows.iter().all(|f| f.acked_ns.is_some()),
        "all flows complete"
    );
    assert_eq!(result.in_flight(), 0);
    for threads in [2, 4] {
        assert_eq!(run_on(&toml, threads), result, "{threads} threads");
    }
    // No packet passes the failed switch after 200 us, so its ports carried less.
    let carried = |r: &slipstream_netsim::RunResult| -> u64 {
        let topology = crate::common::config(&toml).scenario.topology;
        let of = |p: &&slipstream_netsim::result::PortResult| {
            topology.port_ends(p.port).0 == slipstream_netsim::topology::End::Node(8)
        };
        r.ports.iter().filter(of).map(|p| p.packets).sum()
    };
    assert!(carried(&result) * 2 < carried(&calm));
    // Repaired after 100 us: flows move back, and more packets pass it again.
    let repaired = run(&fabric(
        "[[failure]]\nat = 200e-6\nrepair = 300e-6\nswitch = 8\n",
    ));
    assert!(carried(&repaired) > carried(&result));
}

#[test]
fn an_unreachable_host_waits_for_the_repair() {
    let result = run(&fabric(
        "[[failure]]\nat = 100e-6\nrepair = 0.5\nhost = 0\n",
    ));
    let cut = &result.flows[0];
    assert!(cut.acked_ns.unwrap() > 500_000_000, "{:?}", cut.acked_ns);
    assert!(cut.timeouts > 0);
    // Host 8 sends to host 0; the other flows are not affected.
    let others = result.flows.iter().filter(|f| f.src != 0 && f.dst != 0);
    assert!(others.map(|f| f.acked_ns.unwrap()).max() < Some(500_000_000));
}

#[test]
fn invalid_failures_are_refused() {
    for (failure, part) in [
        ("at = 0.1\nlink = [0, 1]", "does not exist"),
        ("at = 0.1\nswitch = 99", "20 switches"),
        ("at = 0.1\nrepair = 0.05\nswitch = 1", "repaired"),
        ("at = 0.1", "one link, one switch"),
        ("at = 0.1\nhost = 99", "99"),
        ("switch = 1", "at = 0.001"),
    ] {
        let message = error(&fabric(&format!("[[failure]]\n{failure}\n")));
        assert!(message.contains(part), "{failure}: {message}");
    }
}

#[test]
fn bbr_keeps_the_queue_short_where_cubic_fills_it() {
    // One flow over a link of 100 Mb/s and 5 ms in each direction: a product of 125 kB.
    let toml = |algorithm: &str| {
        format!(
            "duration = 5.0\nedges = [[0, 1]]\nhosts = [0, 1]\n[link]\nhost_links = false\n\
             propagation_ns = 5000000\n[switch]\nport_rate = 1e8\ncapacity = 1000\n{}\n\
             [[flow]]\nflow_id = 1\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = {{ size = \
             50000000, pkt_size_dist = 1250, tcp = {{ cc_algorithm = \"{algorithm}\", ssthresh = \
             1000000000 }} }}\n",
            ""
        )
    };
    let (bbr, cubic) = (run(&toml("BBR")), run(&toml("CUBIC")));
    let rate = |r: &slipstream_netsim::RunResult| {
        r.flows[0].bytes_in_order as f64 * 8.0 / r.flows[0].last_ns as f64 * 1e9
    };
    assert!(rate(&bbr) > 0.93e8, "{}", rate(&bbr));
    // CUBIC's slow start reaches the limit of 1,000 packets. BBR's window reaches 2/ln 2 of the
    // product and three quanta of 1 ms: 361 + 3 · 36 − 125 kB wait, 27.5 ms, and then they drain.
    assert!(cubic.totals.data_drops > 0);
    assert_eq!(bbr.totals.data_drops, 0);
    assert!(
        bbr.ports[0].wait_ns_max < 28_500_000,
        "{}",
        bbr.ports[0].wait_ns_max
    );
    assert!(cubic.ports[0].wait_ns_max > 90_000_000);
}

#[test]
fn bbr_delivers_every_byte_despite_loss() {
    let flow = "[[flow]]\nflow_id = 1\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = { size = \
        3000000, pkt_size_dist = 1250, tcp = { cc_algorithm = \"BBR\", rto_min = 0.01 } }\n";
    let result = run(&pair("1e9", "loss = 0.01", flow));
    assert_eq!(result.flows[0].bytes_acked, 3_000_000);
    assert!(result.flows[0].fast_retransmits > 3);
}
