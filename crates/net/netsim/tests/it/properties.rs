//! Properties of queues of every kind: limits, conservation, work conservation.

use proptest::prelude::*;
use slipstream_netsim::queueing::headroom_bytes;
use slipstream_netsim::topology::End;

use crate::common::{config, run, run_on};

/// Several sources overload a link from time zero; its queue is unlimited. A work-conserving link
/// finishes exactly when all bytes are sent.
#[test]
fn a_link_is_never_idle_while_packets_wait() {
    for discipline in [
        "discipline = \"FIFO\"",
        "discipline = \"FIFO\"\ncapacity_bytes = 100000000",
        "discipline = \"SP\"\npriorities = [[0, 1], [1, 2], [2, 0]]",
        "discipline = \"DRR\"\nweights = [1, 3, 2]",
        "discipline = \"WRR\"\nweights = [1, 3, 2]",
        "discipline = \"WFQ\"\nweights = [1, 3, 2]",
        "discipline = \"VC\"\nvticks = [[0, 4000], [1, 9000], [2, 1000]]",
        "discipline = \"FIFO\"\n[switch.pfc]\nxoff = 3000",
    ] {
        let flows: Vec<String> = (0..3)
            .map(|i| {
                format!(
                    "[[flow]]\nflow_id = {i}\nclass = {i}\ngraph = [[{i}, 4]]\n\
                     flow_type = \"PacketDistribution\"\ntraffic = {{ size = {}, arr_dist = 0.0, \
                     pkt_size_dist = {} }}\n",
                    60_000 + 1_000 * i,
                    700 + 400 * i
                )
            })
            .collect();
        let toml = format!(
            "duration = 1.0\nedges = [[0, 3], [1, 3], [2, 3], [3, 4]]\nhosts = [0, 1, 2, 4]\n\
             [link]\nhost_links = true\n[link.host]\nrate = 1e13\n[switch]\nport_rate = 1e9\n\
             {discipline}\n{}",
            flows.concat()
        );
        let result = run(&toml);
        // Each source's own link feeds the shared one. The first packet to arrive is that of 700
        // bytes, 5,600 ns after the start, and from then on packets always wait.
        let bytes = 60_000 + 61_000 + 62_000;
        let end = result.flows.iter().map(|f| f.last_ns).max().unwrap();
        let expected = 5_600 + bytes * 8;
        // Serialization on host links at 10 Tb/s: below 1 ns per packet, rounded up.
        assert!(
            (expected..expected + 10).contains(&end),
            "{discipline}: {end}, not {expected}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn no_queue_grows_above_its_limit(
        seed in 0u64..1000,
        flows in 1u32..40,
        size in 1u64..80_000,
        bytes in 4_000u64..60_000,
        xoff in 1_000u64..30_000,
        alpha in prop::sample::select(vec![0.125, 0.5, 1.0, 4.0]),
        kind in prop::sample::select(vec!["TCP", "RoCE", "NDP"]),
        queue in prop::sample::select(vec!["bytes", "shared", "pfc", "both", "trim"]),
        loss in prop::sample::select(vec![0.0, 0.01]),
    ) {
        let switch = match queue {
            "bytes" => format!("capacity_bytes = {bytes}"),
            "shared" => format!("[switch.shared]\nbytes = {bytes}\nalpha = {alpha}"),
            "pfc" => format!("[switch.pfc]\nxoff = {xoff}"),
            "both" => format!("[switch.shared]\nbytes = {bytes}\n[switch.pfc]\nalpha = {alpha}"),
            _ => "drop = \"Trim\"".to_owned(),
        };
        let tcp = if kind == "TCP" { ", tcp = { rto_min = 0.005 }" } else { "" };
        let toml = format!(
            "seed = {seed}\nduration = 2.0\n[topology]\ncategory = \"FatTree\"\n\
             fat_tree = {{ k = 4, hosts_per_edge = 2 }}\n[link]\npropagation_ns = 700\n\
             [switch]\nport_rate = 1e9\nloss = {loss}\n{switch}\n\
             [[flow_set]]\nflow_count = {flows}\nflow_type = \"{kind}\"\nrouting = \"ECMP\"\n\
             traffic = {{ size = {size}, pkt_size_dist = 1000{tcp} }}\n"
        );
        let result = run(&toml);
        let t = &result.totals;
        prop_assert_eq!(
            t.sent,
            t.delivered + t.data_drops + t.control_drops + result.in_flight()
        );
        let topology = config(&toml).scenario.topology;
        let from_switch = |p: &&slipstream_netsim::result::PortResult| {
            matches!(topology.port_ends(p.port).0, End::Node(_))
        };
        let most = result.ports.iter().filter(from_switch).map(|p| p.waiting_bytes_max).max();
        match queue {
            "bytes" => prop_assert!(most <= Some(bytes)),
            "trim" => prop_assert!(most <= Some(8 * 1000 + 1125 * 64)),
            _ => {}
        }
        for m in &result.memories {
            if queue == "shared" || queue == "both" {
                prop_assert!(m.bytes_max <= bytes, "{} above {bytes}", m.bytes_max);
            }
            prop_assert!(m.headroom_bytes_max <= headroom_bytes(1_000_000_000, 700, 1_000));
            if queue == "pfc" || queue == "both" {
                prop_assert_eq!(m.drops, 0, "lossless");
            }
        }
        // Fat-trees have no cycles, so no deadlock is possible.
        prop_assert_eq!(&result.deadlock, &None);
        // Flows with repeated losses may take longer than the run.
        if t.data_drops == 0 && t.control_drops == 0 {
            prop_assert!(result.flows.iter().all(|f| f.acked_ns.is_some()), "all done");
        }
        prop_assert_eq!(run_on(&toml, 3), result);
    }
}
