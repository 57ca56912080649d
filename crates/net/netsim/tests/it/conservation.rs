//! Conservation laws, which hold in every run.

use proptest::prelude::*;
use slipstream_netsim::{Execution, RunResult, Simulation};

use crate::common::{config, run};

/// Runs in steps of simulated time, and checks the balance after each.
pub(crate) fn check_balance(toml: &str) {
    let mut scenario = config(toml).scenario;
    let end = scenario.duration_ns;
    for part in 1..=8 {
        scenario.duration_ns = end / 8 * part;
        let execution = Execution::default();
        let mut simulation = Simulation::new(scenario.clone(), execution).expect("valid");
        let mut last = 0;
        simulation.run(execution, end / 64, &mut |now, _| {
            assert!(now >= last, "time went backwards from {last} to {now}");
            last = now;
        });
        let result = simulation.result();
        let t = &result.totals;
        assert!(t.sent >= t.delivered + t.data_drops + t.control_drops);
        for f in &result.flows {
            assert!(f.bytes_in_order <= f.bytes);
            assert!(f.bytes_acked <= f.bytes_in_order.max(f.bytes_received));
            assert!(f.packets_received <= f.packets_sent);
        }
        if t.last_event_ns < scenario.duration_ns
            && result.flows.iter().all(|f| f.acked_ns.is_some())
        {
            assert_eq!(
                result.in_flight(),
                0,
                "no events are left, but packets are in flight"
            );
        }
        let sent: u64 = result.flows.iter().map(|f| f.packets_sent).sum();
        let received: u64 = result.flows.iter().map(|f| f.packets_received).sum();
        assert!(sent >= received + t.data_drops);
    }
}

/// A change of a result, and a part of the law that it violates.
type Fault = (fn(&mut RunResult), &'static str);

#[test]
fn one_packet_or_byte_too_many_or_too_few_violates_a_law() {
    // Losses in a queue, so that no counter is 0.
    let result = run(&crate::common::pair(
        "1e9",
        "capacity = 3",
        "[[flow]]\nflow_id = 1\nflow_type = \"TCP\"\ngraph = [[0, 1]]\n\
         traffic = { size = 60000, pkt_size_dist = 1000 }\n",
    ));
    assert!(result.totals.data_drops > 0);
    assert_eq!(result.broken_law(), None);
    let faults: [Fault; 12] = [
        (|r| r.totals.delivered += 1, "more packets were delivered"),
        (|r| r.totals.data_drops += 1, "more packets were delivered"),
        (|r| r.totals.data_drops -= 1, "ports dropped other packets"),
        (|r| r.totals.packet_hops -= 1, "ports carried other packets"),
        (|r| r.ports[0].packets += 1, "ports carried other packets"),
        (|r| r.ports[0].drops += 1, "ports dropped other packets"),
        (
            |r| r.flows[0].packets_sent += 1000,
            "flows sent more packets",
        ),
        (
            |r| r.flows[0].packets_sent -= 1,
            "more data packets arrived",
        ),
        (
            |r| r.flows[0].packets_received -= 1,
            "neither arrived nor was dropped",
        ),
        (|r| r.flows[0].bytes_received = 59_999, "bytes in order"),
        (|r| r.flows[0].bytes_in_order -= 1, "bytes acknowledged"),
        (|r| r.flows[0].bytes_acked -= 1, "end without every byte"),
    ];
    for (i, (fault, law)) in faults.iter().enumerate() {
        let mut wrong = result.clone();
        fault(&mut wrong);
        let broken = wrong.broken_law();
        assert!(
            broken.as_ref().is_some_and(|b| b.contains(law)),
            "fault {i}: {broken:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn packets_are_conserved(
        seed in 0u64..1000,
        flows in 1u32..24,
        capacity in 0u32..12,
        size in 1u64..60_000,
        drop in prop::sample::select(vec!["TailDrop", "RED", "RED_ECN"]),
        algorithm in prop::sample::select(vec!["Reno", "CUBIC", "DCTCP", "BBR"]),
        routing in prop::sample::select(vec!["ShortestPath", "ECMP", "Spray"]),
        loss in prop::sample::select(vec![0.0, 0.01]),
    ) {
        let capacity = if drop == "TailDrop" { capacity } else { capacity + 4 };
        check_balance(&format!(
            "seed = {seed}\nduration = 4.0\n[topology]\ncategory = \"FatTree\"\n\
             fat_tree = {{ k = 4, hosts_per_edge = 2 }}\n[link]\npropagation_ns = 500\n\
             [switch]\nport_rate = 1e9\ncapacity = {capacity}\ndrop = \"{drop}\"\nloss = {loss}\n\
             [[flow_set]]\nflow_count = {flows}\nflow_type = \"TCP\"\nrouting = \"{routing}\"\n\
             traffic = {{ size = {size}, pkt_size_dist = 1000, tcp = {{ cc_algorithm = \"{algorithm}\", rto_min = 0.01 }} }}\n"
        ));
    }
}
