//! Flows that send nothing, and the notes about them.

use crate::common::{config, json, pair, run};

const BOUNDED: &str = "traffic = { duration = 0.001, arr_dist = 0.0001, pkt_size_dist = 1000 }\n";

fn collective(flow_type: &str, more: &str, traffic: &str) -> String {
    format!(
        "[[collective]]\ncollective_type = \"Broadcast\"\nsources = [0]\nsinks = [1]\n\
         flow_type = \"{flow_type}\"\n{more}\n{traffic}"
    )
}

#[test]
fn dependents_of_a_collective_bounded_by_time_start_when_its_sender_finishes() {
    for first in ["TCP", "PacketDistribution"] {
        let both = collective(first, "name = \"first\"", BOUNDED)
            + &collective("TCP", "after = \"first\"", "traffic = { size = 1000 }");
        let toml = pair("1e9", "", &both);
        let result = run(&format!("dialect = \"slipstream\"\n{toml}"));
        let [sent, next] = &result.flows[..] else {
            panic!("{:?}", result.flows)
        };
        // Ten packets, 100 us apart; the last one at 900 us.
        assert_eq!(sent.packets_sent, 10, "{first}");
        assert!(
            next.started && next.start_ns >= 900_000,
            "{first}: {next:?}"
        );
        assert!(next.delivered_ns.is_some(), "{first}");
    }
}

#[test]
fn flows_that_send_nothing_are_noted_with_the_reason() {
    let flow = |id: u32, more: &str, traffic: &str| {
        format!(
            "[[flow]]\nflow_id = {id}\nflow_type = \"TCP\"\ngraph = [[0, 1]]\n{more}\n\
             traffic = {{ {traffic} }}\n"
        )
    };
    let flows = [
        flow(5, "", "size = 1000"),
        flow(6, "", "size = 1000, initial_delay = 200.0"),
        flow(7, "", "size = 0, initial_delay = 0.5"),
        flow(8, "starts_after = 6", "size = 1000"),
    ];
    let toml = pair("1e9", "", &flows.concat());
    let (config, result) = (config(&toml), run(&toml));
    let started: Vec<bool> = result.flows.iter().map(|f| f.started).collect();
    assert_eq!(started, [true, false, true, false]);
    let value = json("test", &config, &result);
    assert_eq!(value["totals"]["flows_not_started"], 2);
    assert!(value["flows"][1]["start_ns"].is_null());
    assert_eq!(value["flows"][0]["start_ns"], 0);
    let notes = value["notes"].to_string();
    for part in [
        "flow 6 never starts: its start at 200.000 s is after the end of the run",
        "flow 7 has a size of 0",
        "flow 8 did not start: it waits for flow 6",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    assert!(!notes.contains("flow 5 "), "{notes}");
}

/// Known answers: a single flow, whose window never limits it, takes its ideal time to the ns. Link
/// rates differ, any link may be the slowest, and the last packet has any size.
#[test]
fn a_single_flow_takes_its_ideal_time() {
    for rates in [
        [1e9, 1e9, 1e9],
        [1e8, 1e9, 4e8],
        [1e9, 1e8, 3e8],
        [1e9, 5e8, 1e8],
    ] {
        for bytes in [1u64, 999, 1000, 1001, 1999, 2000, 2001, 50_001, 50_999] {
            let [a, b, c] = rates;
            let toml = format!(
                "seed = 1\nduration = 10.0\nedges = [[0, 1, {a}, 700], [1, 2, {b}, 50], [2, 3, {c}, 0]]\n\
                 host_nodes = [0, 3]\n[link]\nhost_links = false\n[switch]\nport_rate = 1e9\n\
                 [[flow]]\nflow_type = \"TCP\"\ngraph = [[0, 1]]\nheader_bytes = 40\n\
                 [flow.traffic]\nsize = {bytes}\npkt_size_dist = 1000\n\
                 tcp = {{ initial_window = 1000 }}\n"
            );
            let result = run(&toml);
            assert_eq!(
                result.flows[0].delivered_ns,
                Some(result.ideal_ns[0]),
                "{bytes} bytes over {rates:?}"
            );
        }
    }
}

#[test]
fn keys_of_another_kind_of_drop_are_noted() {
    let flow = "[[flow]]\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = { size = 1000 }\n";
    let keys = [
        ("red", "red = { min = 5, max = 10 }"),
        ("ecn_threshold", "ecn_threshold = 65"),
        ("ecn_ramp", "ecn_ramp = { kmin = 5000, kmax = 9000 }"),
        ("trim", "trim = { data = 8 }"),
    ];
    for (key, text) in keys {
        let switch = format!("capacity = 100\ndrop = \"TailDrop\"\n{text}");
        let notes = config(&pair("1e9", &switch, flow)).notes.join("\n");
        assert!(
            notes.contains(&format!("`switch.{key}` has no effect")),
            "{notes}"
        );
    }
}

#[test]
fn slow_ports_show_their_rate() {
    let flow = "[[flow]]\nflow_type = \"TCP\"\ngraph = [[0, 1]]\ntraffic = { size = 1000 }\n";
    let toml = pair("8000.0", "", flow);
    let cost = slipstream_netsim::output::Cost::default();
    let text = slipstream_netsim::output::text("slow", &config(&toml), &run(&toml), &cost);
    // 1,000 bytes take 1 s and 1 us.
    assert!(text.contains("mean 8.000 kb/s"), "{text}");
}
