//! Figures that Days publishes of its benchmarks.

use crate::common::{example, run, run_on};

/// A smaller E5: the same per-flow figures hold, as they do not depend on k.
fn e5(k: u32, flows: u32) -> String {
    example("e5.toml")
        .replace("k = 32", &format!("k = {k}"))
        .replace(
            "hosts_per_edge = 16",
            &format!("hosts_per_edge = {}", k / 2),
        )
        .replace("flow_count = 8192", &format!("flow_count = {flows}"))
}

#[test]
fn a_single_flow_over_six_links_ends_at_234_984_ns() {
    let result = run(&e5(8, 1));
    let flow = &result.flows[0];
    assert_eq!(flow.acked_ns, Some(234_984));
    assert_eq!(
        (flow.packets_sent, flow.cwnd, flow.ssthresh),
        (720, 84_515, 65_535)
    );
    assert_eq!(result.totals.packet_hops, 720 * 12);
}

#[test]
fn with_silly_window_avoidance_a_flow_sends_719_packets() {
    // 1 MiB over 1,460 bytes: 718.2.
    let result = run(&e5(8, 1).replace("sws_avoidance = false", ""));
    let flow = &result.flows[0];
    assert_eq!((flow.packets_sent, flow.retransmitted), (719, 0));
}

#[test]
fn flows_without_loss_send_720_packets_and_end_with_84_515_bytes() {
    let result = run(&e5(8, 128));
    let lost = result.totals.data_drops;
    let clean: Vec<_> = result
        .flows
        .iter()
        .filter(|f| f.retransmitted == 0)
        .collect();
    assert!(clean.len() >= 120, "{} of 128", clean.len());
    for flow in clean {
        assert_eq!(
            (flow.packets_sent, flow.cwnd),
            (720, 84_515),
            "flow {}",
            flow.id
        );
    }
    let sum = |f: fn(&slipstream_netsim::flow::FlowResult) -> u64| -> u64 {
        result.flows.iter().map(f).sum()
    };
    // Originals and retransmissions = ACKs sent + data dropped; missing ACKs were dropped.
    assert_eq!(
        sum(|f| f.packets_sent),
        sum(|f| f.acks) + result.totals.control_drops + lost
    );
}

#[test]
fn threads_do_not_change_the_result() {
    let small = e5(8, 128).replace("capacity = 200", "capacity = 20");
    let one = run_on(&small, 1);
    assert!(
        one.totals.data_drops > 0,
        "the queues must overflow to matter"
    );
    for threads in [2, 3, 4, 64] {
        assert_eq!(run_on(&small, threads), one, "{threads} threads");
    }
}

#[test]
fn f32_sends_and_acknowledges_400_000_packets_without_loss() {
    let result = run(&example("f32.toml"));
    let sent: u64 = result.flows.iter().map(|f| f.packets_sent).sum();
    let acks: u64 = result.flows.iter().map(|f| f.acks).sum();
    assert_eq!((sent, acks), (400_000, 400_000));
    assert_eq!(result.totals.data_drops + result.totals.control_drops, 0);
}

#[test]
fn every_byte_of_broadcast_and_ring_is_emitted_below_the_mss() {
    let traffic = |size| {
        format!(
            "traffic = {{ size = {size}, arr_dist = {{ type = \"Exp\", lambda = 10.0 }}, \
             pkt_size_dist = {{ type = \"DiscreteUniform\", low = 2000, high = 2500 }}, \
             tcp = {{ cc_algorithm = \"TCPReno\" }} }}"
        )
    };
    let toml = format!(
        "seed = 1\nduration = 2.0\nhosts = [0, 1, 2, 3, 4]\n\
         edges = [[0,2],[0,3],[1,2],[1,3],[0,4],[3,4]]\n\
         [switch]\nport_rate = 1_000_000\ncapacity = 100\ndiscipline = \"FIFO\"\ndrop = \"RED\"\n\
         [[collective]]\ncollective_type = \"Broadcast\"\nfirst_flow_id = 0\nflow_type = \"TCP\"\n\
         flow_count = 4\nsources = [0]\nsinks = [1, 2, 3, 4]\n{}\n\
         [[collective]]\ncollective_type = \"RingAllReduce\"\nfirst_flow_id = 4\n\
         flow_type = \"TCP\"\nflow_count = 24\nsources = [0, 1, 2, 3]\nsinks = [1, 2, 3, 0]\n{}\n",
        traffic(3072),
        traffic(512)
    );
    let result = run(&toml);
    assert_eq!(result.flows.len(), 28);
    for flow in &result.flows {
        let expected = if flow.id < 4 { 3072 } else { 128 };
        assert_eq!(flow.bytes_sent, expected, "flow {}", flow.id);
        assert!(flow.delivered_ns.is_some(), "flow {}", flow.id);
    }
}
