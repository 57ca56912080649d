//! The receiver-driven transport and trimming ports.

use slipstream_netsim::{Execution, Simulation};

use crate::common::{config, error, example, pair, run, run_on};

/// Two switches with a host each; every link `rate`, no delay.
fn line(rate: &str, switch: &str, size: u32, ndp: &str) -> String {
    format!(
        "edges = [[0, 1]]\nhosts = [0, 1]\nduration = 1.0\n[link.host]\nrate = {rate}\n\
         [switch]\nport_rate = 1e9\ndrop = \"Trim\"\n{switch}\n[[flow]]\nflow_id = 1\n\
         flow_type = \"NDP\"\ngraph = [[0, 1]]\nack_bytes = 64\n\
         traffic = {{ size = {size}, pkt_size_dist = 1250, ndp = {{ {ndp} }} }}\n"
    )
}

#[test]
fn a_single_packet_and_its_ack_take_the_expected_time() {
    let result = run(&line("1e9", "", 1250, ""));
    // Three links of 10 us; 64 bytes back take 512 ns per link.
    assert_eq!(result.flows[0].delivered_ns, Some(30_000));
    assert_eq!(result.flows[0].acked_ns, Some(30_000 + 3 * 512));
    // No pull is sent.
    assert_eq!(result.totals.sent, 2);
}

#[test]
fn a_short_last_packet_that_overtakes_others_counts_its_own_bytes() {
    // Two packets of three are trimmed at the first switch now and then, and the last one of 10 bytes is not.
    let mut partly = 0;
    for seed in 0..20 {
        for us in (20..80).step_by(4) {
            let line = line("1e13", "trim = { data = 1 }", 5_010, "window = 8");
            let duration = format!("duration = {us}e-6\nseed = {seed}");
            let flow = &run(&line.replace("duration = 1.0", &duration)).flows[0];
            assert!(flow.bytes_acked <= flow.bytes_in_order);
            assert!(flow.bytes_in_order <= flow.bytes_received.min(5_010));
            partly += u32::from(flow.bytes_in_order % 1_250 == 10 && flow.bytes_in_order < 5_010);
        }
    }
    assert!(partly > 0);
}

#[test]
fn pulls_keep_the_link_busy_and_request_only_missing_packets() {
    // 100 packets, a window of 8: the window covers the round trip (30 us and three control
    // packets), so the last byte arrives as if all had been sent at once.
    let result = run(&line("1e9", "", 125_000, "window = 8"));
    let f = &result.flows[0];
    assert_eq!(f.delivered_ns, Some(20_000 + 100 * 10_000));
    assert_eq!(f.packets_sent, 100);
    // Data, ACKs and 92 pulls.
    assert_eq!(result.totals.sent, 100 + 100 + 92);
    // A window of one waits for each pull: 30 us for the packet, 3 x 512 ns for the pull behind the
    // ACK (512 ns).
    let result = run(&line("1e9", "", 12_500, "window = 1"));
    assert_eq!(
        result.flows[0].delivered_ns,
        Some(10 * 30_000 + 9 * 4 * 512)
    );
}

#[test]
fn a_packet_that_arrives_at_a_full_queue_is_trimmed_and_retransmitted() {
    // Twelve packets 10 ns apart into a link where each takes 10 us: one in service, four wait,
    // seven are trimmed.
    let result = run(&line(
        "1e12",
        "[switch.trim]\ndata = 4",
        15_000,
        "window = 12",
    ));
    let f = &result.flows[0];
    assert!(result.totals.trims >= 7);
    assert_eq!(f.nacks, result.totals.trims);
    assert_eq!(f.packets_sent, 12 + result.totals.trims);
    assert_eq!(f.retransmitted, result.totals.trims);
    assert_eq!(result.totals.data_drops, 0);
    assert_eq!((f.bytes_acked, f.timeouts), (15_000, 0));
    // At most four data packets and seven headers wait at once, before any pull is answered.
    let most = result.ports.iter().map(|p| p.waiting_bytes_max).max();
    assert!(most >= Some(4 * 1250 + 7 * 64), "{most:?}");
    // Without room for headers, packets are lost, and the timer recovers them.
    let result = run(&line(
        "1e12",
        "[switch.trim]\ndata = 4\nheaders = 2",
        15_000,
        "window = 12",
    ));
    assert!(result.totals.data_drops > 0);
    assert!(result.flows[0].timeouts > 0);
    assert_eq!(result.flows[0].bytes_acked, 15_000);
}

#[test]
fn headers_without_room_are_returned_to_their_sender() {
    // As above with room for four headers: the other three are returned. The sender, which expects
    // no pulls for them, retransmits their packets one by one. No packet is lost, and no timer is
    // needed.
    let switch = "[switch.trim]\ndata = 4\nheaders = 4\nreturn_to_sender = true";
    let result = run(&line("1e12", switch, 15_000, "window = 12"));
    let (f, t) = (&result.flows[0], &result.totals);
    assert!(t.returns >= 3);
    assert_eq!(
        t.trims,
        f.nacks + t.returns,
        "each header arrives at one of the ends"
    );
    assert_eq!((f.packets_sent, f.retransmitted), (12 + t.trims, t.trims));
    // (Some pulls find no room either; the next one includes them.)
    assert_eq!((t.data_drops, f.timeouts), (0, 0));
    assert_eq!((f.bytes_acked, result.in_flight()), (15_000, 0));
    // An excessive incast on several switches and paths, on any number of threads.
    let toml = example("ndp-permutation.toml")
        .replace("k = 16, hosts_per_edge = 8", "k = 4, hosts_per_edge = 2")
        .replace(
            "pairing = \"Permutation\"",
            "pairing = \"Incast\"\nsink = 5",
        )
        .replace("size = 2_000_000", "size = 200_000");
    let plain = toml.replace("data = 8", "data = 2, headers = 4");
    let returning = toml.replace("data = 8", "data = 2, headers = 4, return_to_sender = true");
    let (plain, result) = (run(&plain), run(&returning));
    assert!(plain.totals.data_drops > 100);
    assert!(result.totals.returns > 100);
    assert_eq!(result.totals.data_drops, 0);
    assert!(result.flows.iter().all(|f| f.acked_ns.is_some()));
    assert_eq!(result.in_flight(), 0);
    for threads in [2, 4] {
        assert_eq!(run_on(&returning, threads), result, "{threads} threads");
    }
    let no_links = line("1e12", switch, 15_000, "")
        .replace("[link.host]\nrate = 1e12", "[link]\nhost_links = false");
    assert!(error(&no_links).contains("host_links"));
}

#[test]
fn trimmed_packets_of_a_short_flow_are_pulled() {
    // Twelve packets of a window of thirty, of which seven are trimmed at first: the receiver pulls
    // them, although the flow is shorter than its window.
    let result = run(&line(
        "1e12",
        "[switch.trim]\ndata = 4",
        15_000,
        "window = 30",
    ));
    let f = &result.flows[0];
    assert!(f.nacks >= 7);
    assert_eq!((f.bytes_acked, f.timeouts), (15_000, 0));
}

#[test]
fn headers_go_first_but_leave_every_eleventh_turn_to_data() {
    // Two headers per data packet: in a burst of 12 with 4 waiting, the seven headers do not delay
    // all data.
    let few = run(&line(
        "1e12",
        "[switch.trim]\ndata = 4\nheaders_per_data = 2",
        15_000,
        "window = 12",
    ));
    let many = run(&line(
        "1e12",
        "[switch.trim]\ndata = 4",
        15_000,
        "window = 12",
    ));
    assert!(few.flows[0].delivered_ns.is_some() && many.flows[0].delivered_ns.is_some());
    assert_ne!(few.digest, many.digest);
}

#[test]
fn every_byte_arrives_when_packets_are_lost() {
    let toml = example("ndp-permutation.toml")
        .replace("k = 16, hosts_per_edge = 8", "k = 4, hosts_per_edge = 2")
        .replace("size = 2_000_000", "size = 300_000")
        .replace("drop = \"Trim\"", "drop = \"Trim\"\nloss = 0.01");
    let result = run(&toml);
    assert!(result.totals.fault_drops > 50);
    assert!(result.flows.iter().all(|f| f.acked_ns.is_some()));
    assert_eq!(result.in_flight(), 0);
}

#[test]
fn a_permutation_finishes_near_line_rate_on_any_number_of_threads() {
    let toml = example("ndp-permutation.toml")
        .replace("k = 16, hosts_per_edge = 8", "k = 8, hosts_per_edge = 4");
    let result = run(&toml);
    assert_eq!(result.flows.len(), 128);
    assert_eq!(result.totals.data_drops + result.totals.control_drops, 0);
    for (f, ideal) in result.flows.iter().zip(&result.ideal_ns) {
        // The paper's Figure 14: at least 92 % of the link, with headers not counted here.
        let slowdown = f.delivered_ns.unwrap() as f64 / *ideal as f64;
        assert!(slowdown < 1.25, "flow {}: {slowdown}", f.id);
    }
    for threads in [2, 3, 4] {
        assert_eq!(run_on(&toml, threads), result, "{threads} threads");
    }
}

#[test]
fn a_network_that_drops_instead_of_trimming_is_noted() {
    let incast = |drop: &str| {
        example("ndp-permutation.toml")
            .replace("k = 16, hosts_per_edge = 8", "k = 4, hosts_per_edge = 2")
            .replace("pairing = \"Permutation\"", "pairing = \"Incast\"")
            .replace("size = 2_000_000", "size = 200_000")
            .replace("trim = { data = 8 }\n", "")
            .replace("drop = \"Trim\"", drop)
    };
    let notes_of = |toml: &str| config(toml).notes.join("\n");
    let dropping = incast("drop = \"TailDrop\"\ncapacity = 8");
    assert!(run(&dropping).totals.data_drops > 100);
    assert!(
        notes_of(&dropping).contains("15 NDP flows"),
        "{}",
        notes_of(&dropping)
    );
    assert!(notes_of(&dropping).contains("drop = \"Trim\""));
    // No packet is dropped, or packets are trimmed.
    assert_eq!(notes_of(&incast("drop = \"TailDrop\"\ncapacity = 0")), "");
    assert_eq!(notes_of(&incast("drop = \"Trim\"")), "");
}

#[test]
fn no_timer_fires_on_slow_links() {
    // 1,250 bytes take 10 ms on each of three links, ten times the usual timer.
    let slow = line("1e6", "", 12_500, "window = 4").replace("port_rate = 1e9", "port_rate = 1e6");
    let result = run(&slow);
    let f = &result.flows[0];
    assert_eq!((f.packets_sent, f.retransmitted, f.timeouts), (10, 0, 0));
    assert_eq!(f.delivered_ns, Some(20_000_000 + 10 * 10_000_000));
}

#[test]
fn flows_of_too_many_packets_are_refused() {
    let flow = |bytes: u64| {
        format!(
            "[[flow]]\ngraph = [[0, 1]]\nflow_type = \"NDP\"\n\
             traffic = {{ size = {bytes}, pkt_size_dist = 1000 }}\n"
        )
    };
    let message = error(&pair("1e9", "", &flow(4_294_967_296_000)));
    assert!(message.contains("4294967296 packets"), "{message}");
    // Both ends have a bit for each of 8,000,000 packets.
    let small = Execution {
        memory_bytes_max: 1_000_000,
        ..Execution::default()
    };
    let scenario = config(&pair("1e9", "", &flow(8_000_000_000))).scenario;
    let message = Simulation::new(scenario, small)
        .err()
        .map(|e| e.to_string());
    assert!(message.is_some_and(|m| m.contains("a bit per packet")));
}
