//! What people and programs read: series, reports, traces, tables.

use slipstream_netsim::output::{self, Cost};

use crate::common::{config, example, pair, run, run_on};

fn packets(rest: &str) -> String {
    format!(
        "[[flow]]\nflow_id = 1\nflow_type = \"PacketDistribution\"\ngraph = [[0, 1]]\n\
         traffic = {{ {rest}, pkt_size_dist = 1250 }}\n"
    )
}

#[test]
fn samples_show_what_a_link_did() {
    // 10 us of every 20: half of the link, sampled each 100 us for 1 ms. The last packet leaves at
    // 990 us; its arrival at 991 us is the last event; the tenth sample is that of its interval.
    let toml = pair("1e9", "", &packets("size = 62500, arr_dist = 0.00002"));
    let result = run(&format!("report_interval = 1e-4\n{toml}"));
    let series = result.series.expect("asked for");
    assert_eq!(series.ports.len(), 2, "there and back");
    assert_eq!(
        series.times_ns[..9],
        [1, 2, 3, 4, 5, 6, 7, 8, 9].map(|i| i * 100_000)
    );
    for i in 0..9 {
        assert!((series.at(i)[0].utilization - 0.5).abs() < 1e-6, "{i}");
        assert_eq!(
            series.tiers[i][1].utilization_max,
            series.at(i)[0].utilization
        );
    }
    assert_eq!(series.times_ns.last(), Some(&1_000_000));
}

#[test]
fn samples_show_what_waits_and_what_was_dropped() {
    // Ten packets at once, room for eight: a drop; after 50 us five of nine are sent.
    let toml = pair(
        "1e9",
        "capacity = 8",
        &packets("size = 12500, arr_dist = 0.0"),
    );
    for toml in [
        toml.clone(),
        // The same through a port with classes.
        toml.replace("capacity = 8", "capacity = 8\ncapacity_bytes = 1000000"),
    ] {
        let result = run(&format!("report_interval = 5e-5\n{toml}"));
        let series = result.series.expect("asked for");
        let first = series.at(0)[0];
        assert_eq!((first.backlog_bytes, first.drops), (4 * 1250, 1));
        assert!((first.utilization - 1.0).abs() < 1e-6);
        assert_eq!(series.at(1)[0].drops, 0);
    }
}

#[test]
fn samples_are_the_same_on_any_number_of_threads() {
    let toml = format!(
        "report_interval = 2e-5\n{}",
        example("e5.toml")
            .replace("k = 32", "k = 8")
            .replace("hosts_per_edge = 16", "hosts_per_edge = 4")
            .replace("flow_count = 8192", "flow_count = 128")
            .replace("capacity = 200", "capacity = 20")
    );
    let one = run(&toml);
    let series = one.series.as_ref().unwrap();
    assert!(
        series
            .tiers
            .iter()
            .map(|t| t[2].drops + t[1].drops)
            .sum::<u64>()
            > 0
    );
    assert_eq!(
        series.tiers.iter().flatten().map(|t| t.drops).sum::<u64>(),
        one.totals.data_drops + one.totals.control_drops,
        "every drop is in a sample"
    );
    for threads in [2, 4] {
        assert_eq!(run_on(&toml, threads), one);
    }
}

#[test]
fn reports_hold_the_run() {
    let toml = format!(
        "report_interval = 1e-5\n{}",
        example("roce-incast.toml").replace("size = 4_000_000", "size = 40_000")
    );
    let (config, result) = (config(&toml), run(&toml));
    let cost = Cost::default();
    let html = output::html("a <run>", &config, &result, &cost);
    assert!(html.contains("a &lt;run&gt;") && html.contains(&format!("{:016x}", result.digest)));
    assert!(html.matches("<svg").count() >= 5);
    assert!(
        !html.contains("<script") && !html.contains("http"),
        "one file, nothing loaded"
    );
    let trace: serde_json::Value =
        serde_json::from_str(&output::perfetto(&config, &result)).expect("JSON");
    let spans = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "X");
    assert_eq!(spans.count(), 15);
    let counters = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "C");
    assert_eq!(
        counters.count(),
        4 * result.series.as_ref().unwrap().times_ns.len()
    );
    let csv = output::series_csv(&config, &result).unwrap();
    assert!(csv.lines().all(|l| l.split(',').count() == 7));
    let json = output::json("x", &config, &result, &cost);
    assert_eq!(json["series"]["hosts"][0]["drops"], 0);
    assert_eq!(
        json["switches"].as_array().unwrap().len(),
        result.memories.len()
    );
}
