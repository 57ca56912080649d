//! Outputs for people and programs: series, reports, traces, tables.

use slipstream_netsim::output::{self, Cost};

use crate::common::{config, example, json, pair, run, run_on};

fn packets(rest: &str) -> String {
    format!(
        "[[flow]]\nflow_id = 1\nflow_type = \"PacketDistribution\"\ngraph = [[0, 1]]\n\
         traffic = {{ {rest}, pkt_size_dist = 1250 }}\n"
    )
}

#[test]
fn samples_show_the_utilization_of_a_link() {
    // 10 us of every 20: half of the link, sampled each 100 us for 1 ms. The last packet leaves at
    // 990 us, and its arrival at 991 us is the last event. The tenth sample is that of its
    // interval.
    let toml = pair("1e9", "", &packets("size = 62500, arr_dist = 0.00002"));
    let result = run(&format!("report_interval = 1e-4\n{toml}"));
    let series = result.series.expect("samples were requested");
    assert_eq!(series.ports.len(), 2, "both directions");
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
fn samples_show_backlog_and_drops() {
    // Ten packets at once, room for eight: one drop; after 50 us five of nine are sent.
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
        let series = result.series.expect("samples were requested");
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

/// A straggler makes the total goodput small; that per flow shows how the others did.
#[test]
fn goodput_is_reported_per_flow_and_over_active_time() {
    let flow = |id: u32| {
        format!(
            "[[flow]]\nflow_id = {id}\nflow_type = \"TCP\"\ngraph = [[0, 1]]\n\
             traffic = {{ size = 1000, initial_delay = 0.0, tcp = {{ cc_algorithm = \"Reno\" }} }}\n"
        )
    };
    let toml = pair("1e9", "", &(1..=4).map(flow).collect::<String>());
    let (config, mut result) = (config(&toml), run(&toml));
    // Start, end and bytes of each: two at 8 Gb/s in sequence with a pause between them, one at 4
    // Gb/s in parallel with the first, and one that stalls and is active to the end of the run.
    let ends = [
        (0, Some(1_000), 1_000),
        (2_000, Some(3_000), 1_000),
        (500, Some(1_500), 500),
        (2_500, None, 125),
    ];
    for (f, (start, end, bytes)) in result.flows.iter_mut().zip(ends) {
        (f.start_ns, f.delivered_ns, f.bytes_in_order) = (start, end, bytes);
        f.packets_sent = 1;
    }
    result.totals.last_event_ns = 12_500;
    let g = output::goodput(&config, &result).unwrap();
    assert_eq!((g.flows, g.active_ns), (4, 1_500 + 10_500));
    assert_eq!(g.flow_p50, 4e9);
    assert_eq!(g.flow_min, 125.0 * 8e9 / 10_000.0);
    assert_eq!(g.flow_mean, (8e9 + 8e9 + 4e9 + 1e8) / 4.0);
    assert_eq!(g.all, 2_625.0 * 8e9 / 12_000.0);
    let text = output::text("x", &config, &result, &Cost::default());
    assert!(
        text.contains("per flow: mean 5.025 Gb/s, p50 4.000 Gb/s, min 100.000 Mb/s; total: 1.750 Gb/s over the 12.00 us"),
        "{text}"
    );
    // No packets were sent: goodput is absent, not 0.
    result.flows.iter_mut().for_each(|f| f.packets_sent = 0);
    assert_eq!(output::goodput(&config, &result), None);
}

/// With fewer than a hundred flows, a p99 would be the maximum.
#[test]
fn completion_times_of_few_flows_have_no_p99() {
    let toml = example("roce-incast.toml").replace("size = 4_000_000", "size = 40_000");
    let (config, result) = (config(&toml), run(&toml));
    let text = output::text("x", &config, &result, &Cost::default());
    let class = text
        .lines()
        .find(|l| l.contains("completion mean"))
        .unwrap();
    assert!(
        class.contains("15 of 15 flows;") && class.contains(", p99 -, max "),
        "{text}"
    );
    assert!(text.contains("-: too few samples"), "{text}");
    let json = json("x", &config, &result);
    assert!(json["size_classes"][0]["fct_ns"]["p99"].is_number());
    assert!(json["goodput"]["flow_bits_per_s_p50"].as_f64().unwrap() > 0.0);
}

/// Threads that start and stop as windows fill and empty give the result of one thread. The windows
/// of this run have from none to some hundred events, so each limit starts threads at other times.
#[test]
fn threads_that_start_when_they_pay_off_do_not_change_results() {
    use slipstream_netsim::{Execution, Simulation};

    let toml = example("web-search.toml").replace("span = 0.02", "span = 0.001");
    for toml in [toml.clone(), toml.replace("report_interval", "#")] {
        let one = run(&toml);
        let mut ran = Vec::new();
        for window_events_min in [1, 50, 100, 150, 1_000_000] {
            let execution = Execution {
                threads: 3,
                window_events_min,
                ..Execution::default()
            };
            let mut simulation = Simulation::new(config(&toml).scenario, execution).unwrap();
            let mut seen = 0;
            simulation.run(execution, 1_000, &mut |_, events| {
                assert!(events >= seen, "progress goes backwards");
                seen = events;
            });
            assert_eq!(simulation.result(), one, "{window_events_min}");
            ran.push(simulation.threads());
        }
        assert_eq!((ran[0], ran[4]), (3, 1), "{ran:?}");
    }
}

#[test]
fn reports_contain_the_run() {
    let toml = format!(
        "report_interval = 1e-5\n{}",
        example("roce-incast.toml").replace("size = 4_000_000", "size = 40_000")
    );
    let (config, result) = (config(&toml), run(&toml));
    let cost = Cost::default();
    let html = output::html("a <run>", &config, &result, &cost);
    assert!(html.contains("a &lt;run&gt;") && html.contains(&format!("{:016x}", result.digest)));
    assert!(html.matches("<svg").count() >= 5);
    // One file without external resources: its policy forbids them, and it refers to none.
    assert!(html.contains("content=\"default-src 'none'; style-src 'unsafe-inline';"));
    assert!(!html.contains(" src=") && !html.contains("href=") && !html.contains("url("));
    // Light and dark, as the other pages; axes have labels.
    assert!(html.contains("prefers-color-scheme: dark") && html.contains("id=\"theme\""));
    assert!(html.contains("completion time, us (log scale)"));
    let trace: serde_json::Value =
        serde_json::from_str(&output::perfetto(&config, &result)).expect("JSON");
    let spans = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "X");
    assert_eq!(spans.count(), 15);
    let counters = trace.as_array().unwrap().iter().filter(|e| e["ph"] == "C");
    assert_eq!(
        counters.count(),
        4 * result.series.as_ref().unwrap().times_ns.len()
    );
    let mut csv = Vec::new();
    output::write_series_csv(&mut csv, &config, &result).unwrap();
    let csv = String::from_utf8(csv).unwrap();
    assert!(csv.lines().count() > 1);
    assert!(csv.lines().all(|l| l.split(',').count() == 7));
    let json = json("x", &config, &result);
    assert_eq!(json["series"]["hosts"][0]["drops"], 0);
    assert_eq!(
        json["switches"].as_array().unwrap().len(),
        result.memories.len()
    );
}

/// A sink that accepts some bytes and then fails.
struct Full {
    left: usize,
    largest: usize,
}

impl std::io::Write for Full {
    fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
        self.largest = self.largest.max(piece.len());
        if piece.len() > self.left {
            return Err(std::io::Error::other("full"));
        }
        self.left -= piece.len();
        Ok(piece.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Flows and ports are never serialized as one string, and `totals` omits them.
#[test]
fn json_is_written_in_small_writes() {
    let toml = example("collectives.toml");
    let (config, result) = (config(&toml), run(&toml));
    let cost = Cost::default();
    let mut whole = Vec::new();
    output::write_json(&mut whole, "x", &config, &result, &cost, false).unwrap();
    let mut sink = Full {
        left: usize::MAX,
        largest: 0,
    };
    output::write_json(&mut sink, "x", &config, &result, &cost, false).unwrap();
    assert!(result.flows.len() > 200 && whole.len() > 100_000);
    assert!(sink.largest < 4_096, "{} of {}", sink.largest, whole.len());
    let value: serde_json::Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!(value["flows"].as_array().unwrap().len(), result.flows.len());
    assert_eq!(value["ports"].as_array().unwrap().len(), result.ports.len());
    assert_eq!(
        whole.iter().position(|b| *b == b'\n'),
        Some(whole.len() - 1)
    );
    let mut totals = Vec::new();
    output::write_json(&mut totals, "x", &config, &result, &cost, true).unwrap();
    let short: serde_json::Value = serde_json::from_slice(&totals).unwrap();
    assert!(short.get("flows").is_none() && short.get("ports").is_none());
    assert_eq!(short["totals"], value["totals"]);
    // A full disk is an error at any point.
    for left in [0, 10, whole.len() / 2, whole.len() - 1] {
        let mut sink = Full { left, largest: 0 };
        assert!(output::write_json(&mut sink, "x", &config, &result, &cost, false).is_err());
    }
}
