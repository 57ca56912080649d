//! `slipstream simulate`, and its agreement with the live cluster.

use std::path::Path;

use serde_json::Value;
use slipstream_base::Stage;

use crate::server::{Server, run};

/// Two workers with little memory, so that cached blocks are evicted too.
const SMALL: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.main.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=1000000",
    "--set=engine.num_gpu_blocks=220",
    "--set=engine.max_model_len=3000",
    "--set=router.policy=round_robin",
];

const WORKLOAD: &str = r#"
seed = 5
requests = 120
[arrival]
kind = "closed"
concurrency = 1
[[class]]
isl = { kind = "uniform", min = 350, max = 700 }
osl = { kind = "uniform", min = 1, max = 90 }
[[class.prefix]]
tokens = 330
branches = 3
[class.session]
turns = 4
user_tokens = 50
"#;

/// Same workload, same cluster: the same hits, block for block, although one side sends words over
/// HTTP and the other uses numbered texts.
#[test]
fn the_twin_hits_what_the_live_cluster_hits() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(&file, WORKLOAD).unwrap();
    let file = file.to_str().unwrap();

    let server = Server::start(&[SMALL, &["--speedup=0"]]);
    let url = format!("http://{}", server.address());
    let live = run(&["bench", &url, "--workload", file, "--json", "--quiet"]);
    assert_eq!(live.0, Some(0), "{live:?}");
    let mut args = vec!["simulate", "--workload", file, "--json", "--quiet"];
    args.extend(SMALL);
    let twin = run(&args);
    assert_eq!(twin.0, Some(0), "{twin:?}");

    let live: Value = serde_json::from_str(&live.1).unwrap();
    let twin: Value = serde_json::from_str(&twin.1).unwrap();
    let count = |run: &Value, key: &str| run["tokens"][key].as_u64().unwrap();
    for key in ["input", "output", "cached"] {
        assert_eq!(count(&live, key), count(&twin, key), "{key}");
    }
    assert_eq!(live["requests"]["succeeded"], 120);
    let cached = count(&twin, "cached");
    assert!(
        cached > 0 && cached < count(&twin, "input") * 3 / 4,
        "some are hit and some are evicted: {cached}"
    );
}

#[test]
fn rates_that_no_clock_can_tell_apart_are_refused() {
    for rate in ["1e300", "5e-324", "inf", "NaN", "-1", "0"] {
        let (code, _, err) = run(&["simulate", &format!("--rate={rate}"), "--requests=5"]);
        assert_eq!(code, Some(2), "{rate}: {err}");
        assert!(err.contains("from 1e-8 to 1e9 requests/s"), "{rate}: {err}");
    }
}

/// Sixty times what a worker serves: text and JSON say so. A closed loop waits for its answers, so that none is overloaded.
#[test]
fn an_overload_is_said_in_text_and_json() {
    let worker = [
        "--set=pool.main.workers=1",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=10000000",
        "--set=engine.max_num_seqs=1",
        "--quiet",
    ];
    let simulate = |load: &[&str]| {
        let (code, out, err) = run(&[&["simulate"], load, &worker].concat());
        assert_eq!(code, Some(0), "{load:?}: {err}");
        out
    };
    // A request takes about 100 ms: ten tokens, one per step.
    let load = |rate| [rate, "--isl=64", "--osl=10", "--requests=600"];
    let line = |text: &str| {
        text.lines()
            .find(|line| line.starts_with("overloaded"))
            .map(str::to_owned)
    };
    let said = line(&simulate(&load("--rate=600"))).expect("a line");
    assert!(said.contains("requests/s offered"), "{said}");
    assert!(said.contains("a queue that grows"), "{said}");
    assert_eq!(line(&simulate(&load("--rate=3"))), None);

    let json = |load: &[&str]| -> Value {
        serde_json::from_str(&simulate(&[load, &["--json"]].concat())).unwrap()
    };
    let over = &json(&load("--rate=600"))["overloaded"];
    let number = |key: &str| over[key].as_f64().expect("a number");
    assert!((400.0..900.0).contains(&number("offered_per_s")), "{over}");
    assert!((9.0..12.0).contains(&number("served_per_s")), "{over}");
    assert!((0.0..0.5).contains(&number("since_s")), "{over}");
    assert!(json(&load("--rate=3")).get("overloaded").is_none());

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.toml");
    std::fs::write(
        &file,
        "requests = 600\nisl = 64\nosl = 10\n[arrival]\nkind = \"closed\"\nconcurrency = 100\n",
    )
    .unwrap();
    let closed = ["--workload", file.to_str().unwrap()];
    assert_eq!(line(&simulate(&closed)), None);
    assert!(json(&closed).get("overloaded").is_none());
}

#[test]
fn a_run_is_repeated_by_its_seed() {
    let digest = |seed: &str| {
        let mut args = vec!["simulate", "--rate=50", "--requests=200", "--quiet", seed];
        args.extend(SMALL);
        let (code, out, err) = run(&args);
        assert_eq!(code, Some(0), "{err}");
        out.split("digest ").nth(1).unwrap().to_owned()
    };
    assert_eq!(digest("--seed=1"), digest("--seed=1"));
    assert_ne!(digest("--seed=1"), digest("--seed=2"));
}

#[test]
fn what_cannot_be_served_says_so() {
    let (code, out, err) = run(&[
        "simulate",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=1000000000",
        "--rate=1000",
        "--requests=3000",
        "--max-sim-time=2s",
        "--quiet",
    ]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("reached its limit of 2"), "{err}");
    assert!(out.contains("requests answered"), "{out}");
    let (code, _, err) = run(&["simulate", "--trace=/no/such/trace"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("/no/such/trace"), "{err}");
}

#[test]
fn drag_names_each_hand_over_of_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let keep = dir.path().join("kept");
    let keep_flag = format!("--keep={}", keep.display());
    let mut args = vec![
        "drag",
        "--rate=100",
        "--requests=40",
        "--isl=300",
        "--osl=4",
    ];
    // The test waits for engines with a start-up time.
    args.extend(["--speedup=20", "--set=engine.startup_s=0.3", &keep_flag]);
    args.extend(SMALL);
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    let row = |out: &str, name: &str| {
        let line = out.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("no row {name} in\n{out}"));
        let cells = line[name.len()..].split_ascii_whitespace();
        cells.map(str::to_owned).collect::<Vec<_>>()
    };
    for name in [
        "client to frontend",
        "tokenize and hash",
        "frontend to worker",
    ] {
        let cells = row(&out, name);
        assert_eq!(cells[0], "40");
        assert!(
            cells[1].parse::<f64>().unwrap() > 0.0,
            "live took time: {cells:?}"
        );
        assert_eq!(cells[3], "0.000", "the twin took none");
    }
    // A pass of 1 ms at speed-up 20, on both sides.
    let pass = row(&out, "step of the first token");
    assert_eq!((pass[1].as_str(), pass[3].as_str()), ("0.0500", "0.0500"));
    assert!(out.contains("ITL p50"), "{out}");

    let (live, twin) = (keep.join("live.csv"), keep.join("twin.csv"));
    // Both sides had the same arrivals.
    let span = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        let mut lines = text.lines();
        let due = lines
            .next()
            .unwrap()
            .split(',')
            .position(|name| name == "due");
        let due = due.expect("a column of due times");
        let dues: Vec<f64> = lines
            .map(|line| line.split(',').nth(due).unwrap().parse().unwrap())
            .collect();
        let first = dues.iter().copied().fold(f64::INFINITY, f64::min);
        dues.iter().copied().fold(0.0, f64::max) - first
    };
    let ratio = span(&live) / span(&twin);
    assert!((0.999..1.001).contains(&ratio), "arrivals differ: {ratio}");
    let files = [live.to_str().unwrap(), twin.to_str().unwrap()];
    let (code, again, err) = run(&["drag", "--compare", files[0], files[1]]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(row(&again, "TTFT"), row(&out, "TTFT"));
    let (code, _, err) = run(&["drag", "--compare", files[0], "/no/such.csv"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("/no/such.csv"), "{err}");
}

#[test]
fn drag_says_how_busy_the_host_was() {
    let mut args = vec!["drag", "--requests=5", "--isl=300", "--osl=4", "--json"];
    args.extend(SMALL);
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    let output: serde_json::Value = serde_json::from_str(&out).unwrap();
    let host = &output["host"];
    assert_eq!(output["speedup"], 1.0);
    assert_eq!(host["step_ms"], 1.0, "a pass of 1 ms");
    if let (Some(wait), Some(step)) = (host["mean_wait_ms"].as_f64(), host["step_ms"].as_f64()) {
        assert_eq!(host["is_quiet"], wait <= 0.05 * step);
        assert_eq!(host["is_quiet"] == false, err.contains("too busy"), "{err}");
    }
    let gaps = output["gaps"].as_array().unwrap();
    let ttft = gaps.iter().find(|gap| gap["name"] == "TTFT").unwrap();
    assert_eq!(ttft["count"], serde_json::json!([5, 5]));
    assert_eq!(
        ttft["p99_ms"],
        serde_json::json!([null, null]),
        "of 5 requests"
    );
    assert_eq!(output["live"]["requests"]["succeeded"], 5);

    // Answers of one token without step time: there is no step to be late for, on any host.
    let (code, out, err) = run(&[
        "drag",
        "--speedup=auto:7",
        "--print-speedup",
        "--requests=3",
        "--isl=20",
        "--osl=1",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=0",
    ]);
    assert_eq!((code, out.trim()), (Some(0), "7"), "{err}");
    // A step of 10 ns cannot be met on any host: the run is made all the same, at the modelled pace.
    let (code, out, err) = run(&[
        "drag",
        "--speedup=auto",
        "--print-speedup",
        "--requests=3",
        "--isl=20",
        "--osl=4",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=10",
    ]);
    assert_eq!((code, out.trim()), (Some(0), "1"), "{err}");
    assert!(err.contains("too busy to measure on"), "{err}");
}

#[test]
fn a_sweep_runs_every_combination_and_marks_the_front() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sweep.csv");
    let out_flag = format!("--out={}", file.display());
    let sweep = |jobs: &str| {
        let mut args = vec![
            "sweep",
            "--rate=400",
            "--requests=400",
            "--isl=200",
            "--osl=20",
        ];
        args.extend(SMALL);
        args.extend([
            "--set=engine.max_num_seqs=4",
            "--vary=pool.main.workers=1..3",
            "--vary=router.policy=round_robin,least_requests",
            "--slo=e2e=60ms",
            &out_flag,
            jobs,
        ]);
        let (code, table, err) = run(&args);
        assert_eq!(code, Some(0), "{err}");
        (table, std::fs::read_to_string(&file).unwrap())
    };
    let (table, csv) = sweep("--jobs=1");
    assert_eq!(sweep("--jobs=3"), (table.clone(), csv.clone()));
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows.len(), 1 + 6, "{csv}");
    let column = |name: &str| rows[0].iter().position(|h| *h == name).unwrap();
    let keys: Vec<_> = rows[1..].iter().map(|row| (row[0], row[1])).collect();
    assert_eq!(keys[0], ("1", "round_robin"));
    assert_eq!(keys[5], ("3", "least_requests"));
    for row in &rows[1..] {
        assert_eq!(row[column("gpus")], row[0], "one GPU per worker");
        assert_eq!(row[column("succeeded")], "400");
    }
    // One worker cannot keep up, so three are worth their hours; both are on the Pareto front.
    let goodput = |row: usize| rows[row][column("goodput_per_s")].parse::<f64>().unwrap();
    assert!(goodput(5) > 2.0 * goodput(1), "{csv}");
    assert_eq!(rows[1][column("front")], "1");
    assert!(rows[5..].iter().any(|row| row[column("front")] == "1"));
    assert!(table.contains("within e2e=60ms"), "{table}");
    assert!(table.contains("tolerance 1 %"), "{table}");

    let (code, _, err) = run(&["sweep", "--rate=5", "--vary=engine.max_num_seqz=1,2"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("did you mean `max_num_seqs`"), "{err}");
    for percent in ["-1", "51", "NaN"] {
        let tolerance = format!("--tolerance={percent}");
        let (code, _, err) = run(&["sweep", "--vary=pool.main.workers=1,2", &tolerance]);
        assert_eq!(code, Some(2));
        assert!(err.contains("must be 0 to 50 (percent)"), "{err}");
    }
}

#[test]
fn a_sweep_varies_the_load_and_states_cost_and_chance() {
    let dir = tempfile::tempdir().unwrap();
    let (out, workload) = (dir.path().join("sweep.csv"), dir.path().join("w.toml"));
    std::fs::write(
        &workload,
        "requests = 200\nisl = 500\nosl = 20\n[arrival]\nkind = \"poisson\"\nrate_per_s = 10\n",
    )
    .unwrap();
    let out_flag = format!("--out={}", out.display());
    let workload = format!("--workload={}", workload.display());
    let sweep = |more: &[&str]| {
        let mut args = vec![
            "sweep",
            &workload,
            "--set=model.preset=llama-3.1-8b",
            "--set=engine.timing.gpu=l40s",
            "--slo=ttft=200ms",
            &out_flag,
        ];
        args.extend(more);
        run(&args)
    };
    let csv = || -> Vec<Vec<String>> {
        let text = std::fs::read_to_string(&out).unwrap();
        let lines = text.lines();
        lines
            .map(|line| line.split(',').map(str::to_owned).collect())
            .collect()
    };
    let number = |rows: &[Vec<String>], row: usize, name: &str| -> f64 {
        let column = rows[0].iter().position(|h| h == name).unwrap();
        rows[row][column].parse().unwrap()
    };
    // Twice the load is twice the rate, with as many more requests.
    let (code, table, err) = sweep(&["--vary=load=1,2,40", "--price=l40s=0.5", "--attain=90%"]);
    assert_eq!(code, Some(0), "{err}");
    let by_load = csv();
    let (code, _, err) = sweep(&["--vary=arrival.rate_per_s=10,20", "--vary=requests=200,400"]);
    assert_eq!(code, Some(0), "{err}");
    let by_key = csv();
    for (load, key) in [(1, 1), (2, 4)] {
        let digest = by_load[0].iter().position(|h| h == "digest").unwrap();
        let other = by_key[0].iter().position(|h| h == "digest").unwrap();
        assert_eq!(by_load[load][digest], by_key[key][other]);
    }
    assert_eq!(number(&by_load, 2, "sent"), 400.0);
    let attained = |row| number(&by_load, row, "attained");
    assert!(attained(1) > 0.9 && attained(3) < 0.5, "{table}");
    assert_eq!(number(&by_load, 1, "cost_per_hour"), 0.5);
    let tokens_per_s = number(&by_load, 1, "output_tokens") / number(&by_load, 1, "duration_s");
    let per_million = 0.5 / (tokens_per_s * 3600.0) * 1e6;
    let stated = number(&by_load, 1, "cost_per_million_output_tokens");
    assert!((stated - per_million).abs() < 1e-6 * per_million);
    assert!(
        table.contains("cheapest that attains 90.0 % at load=1: the cluster (0.50 per hour)\n")
            && table.contains("no configuration attains 90.0 % at load=40\n"),
        "{table}"
    );
    // Seeds: the mean of single runs.
    let seeded = |seed: &str| {
        let (code, _, err) = sweep(&["--vary=pool.main.workers=1", seed]);
        assert_eq!(code, Some(0), "{err}");
        number(&csv(), 1, "attained")
    };
    let mean = [0, 1, 2]
        .map(|n| seeded(&format!("--seed={n}")))
        .iter()
        .sum::<f64>()
        / 3.0;
    let (code, table, err) = sweep(&["--vary=pool.main.workers=1", "--seeds=3"]);
    assert_eq!(code, Some(0), "{err}");
    let rows = csv();
    assert!((number(&rows, 1, "attained") - mean).abs() < 1e-9);
    assert_eq!(number(&rows, 1, "sent"), 600.0);
    assert!(number(&rows, 1, "goodput_half_per_s") > 0.0, "{table}");

    for (args, part) in [
        (&["--vary=load=0,1"][..], "not a factor"),
        (
            &["--vary=load=1", "--price=h100-sxm=1"],
            "l40s has no price",
        ),
        (&["--vary=arrival.rate_per_z=1,2"], "rate_per_z"),
    ] {
        let (code, _, err) = sweep(args);
        assert_eq!(code, Some(2), "{args:?}");
        assert!(err.contains(part), "{args:?}: {err}");
    }
    let (code, _, err) = run(&["sweep", "--rate=5", "--vary=arrival.rate_per_s=1,2"]);
    assert_eq!(code, Some(2));
    assert!(err.contains("--workload"), "{err}");
}

/// Eight workers complete the same requests as four if four are enough, at slightly different
/// times.
#[test]
fn a_sweep_takes_no_noise_for_a_gain() {
    let example = |name: &str| {
        format!(
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/{}"),
            name
        )
    };
    let front = |tolerance: &str| {
        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join("sweep.html");
        let (code, table, err) = run(&[
            "sweep",
            &example("cluster.toml"),
            "--workload",
            &example("chat.workload.toml"),
            "--requests=600",
            "--vary=pool.main.workers=4..8",
            "--slo=ttft=500ms,itl=30ms",
            tolerance,
            &format!("--html={}", page.display()),
        ]);
        assert_eq!(code, Some(0), "{err}");
        let marked = table.lines().filter(|line| line.contains(" * ")).count();
        (marked, std::fs::read_to_string(page).unwrap())
    };
    assert!(front("--tolerance=0").0 > 1);
    let (marked, page) = front("--tolerance=2");
    assert_eq!(marked, 1);
    assert!(page.contains("tolerance 2 %"));
    // The page lists the varied keys and their values.
    assert!(page.contains("<td class=\"text\">pool.main.workers=4,5,6,7,8</td>"));
    assert!(page.contains("examples/cluster.toml</td>"));
    assert!(page.contains("Cluster, every value") && page.contains("max_num_seqs"));
    assert_eq!(
        page.matches("class=\"tag\"").count(),
        3 * 5,
        "a name at every dot"
    );
}

#[test]
fn a_trace_is_told_and_simulated_in_any_form() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("azure.csv");
    let rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                2023-11-16 18:15:46.6805900,300,7\n2023-11-16 18:15:50.9951690,200,3\n";
    std::fs::write(&file, rows).unwrap();
    let path = file.to_str().unwrap();
    let (code, out, err) = run(&["trace", "stats", path]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("2 requests in 4.31 s"), "{out}");
    assert!(out.contains("ideal prefix hits 0.000 %"), "{out}");
    let mut args = vec!["simulate", "--trace", path, "--json", "--quiet"];
    args.extend(SMALL);
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["tokens"]["input"], 500);
    assert_eq!(json["tokens"]["output"], 10);

    std::fs::write(&file, format!("{rows}2023-11-16 18:15:40,200,3\n")).unwrap();
    let (code, _, err) = run(&["trace", "stats", path]);
    assert_eq!(code, Some(2));
    assert!(
        err.contains("line 4") && err.contains("sorted by time"),
        "{err}"
    );
    let (code, _, err) = run(&["trace", "stats", path, "--on-bad-line=skip"]);
    assert_eq!(code, Some(0));
    assert!(err.contains("note: 1 line skipped"), "{err}");
}

/// Three chats in 61 s, of which the last continues the first.
#[test]
fn a_trace_of_qwen_bailian_has_seconds_and_sessions() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bailian.jsonl");
    let row = |chat: u32, parent: i32, time: &str, isl: u32, ids: &str| {
        format!(
            "{{\"chat_id\": {chat}, \"parent_chat_id\": {parent}, \"timestamp\": {time}, \"input_length\": {isl}, \
             \"output_length\": 12, \"type\": \"text\", \"turn\": 1, \"hash_ids\": [{ids}]}}\n"
        )
    };
    let rows = row(0, -1, "0.0", 40, "0, 1, 2")
        + &row(1, -1, "30.0", 40, "3, 4, 5")
        + &row(2, 0, "61.114", 70, "0, 1, 2, 6, 7");
    std::fs::write(&file, rows).unwrap();
    let path = file.to_str().unwrap();
    let mut args = vec!["simulate", "--trace", path, "--json", "--quiet"];
    args.extend(SMALL);
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["tokens"]["input"], 150);
    assert!(json["duration_s"].as_f64() > Some(61.0), "{out}");
    let (code, out, err) = run(&["trace", "stats", path]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("3 requests"), "{out}");
}

/// A trace in no known format is refused with the flags that mend it; a wrong unit gets a note.
#[test]
fn a_trace_in_another_format_is_read_by_its_columns() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("own.csv");
    let rows: Vec<String> = (0..20).map(|at| format!("{},30,4", at * 200)).collect();
    std::fs::write(&file, format!("at,in,out\n{}\n", rows.join("\n"))).unwrap();
    let path = file.to_str().unwrap();
    let simulate = |more: &[&str]| {
        let mut args = vec!["simulate", "--trace", path, "--json", "--quiet"];
        args.extend(SMALL);
        args.extend(more);
        run(&args)
    };
    let (code, _, err) = simulate(&[]);
    assert_eq!(code, Some(2));
    assert!(err.contains("--trace-columns"), "{err}");
    let columns = "--trace-columns=arrival=at,isl=in,osl=out";
    let (code, _, err) = simulate(&[columns]);
    assert_eq!(code, Some(2));
    assert!(err.contains("`at` is 0, whose unit is not known"), "{err}");
    let (code, out, err) = simulate(&[columns, "--trace-unit=ms"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(!err.contains("on average"), "{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["tokens"]["input"], 600);
    let (code, _, err) = simulate(&[columns, "--trace-unit=us"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("5000 requests per second on average"), "{err}");
    let (code, _, err) = run(&["simulate", "--rate=5", "--requests=5", "--trace-unit=ms"]);
    assert_eq!(code, Some(2));
    assert!(
        err.contains("--trace-unit says how a trace is read"),
        "{err}"
    );
}

#[test]
fn prefill_and_decode_pools_are_simulated() {
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/cluster-prefill-decode.toml"
    );
    let simulated = run(&[
        "simulate",
        example,
        "--rate=20",
        "--isl=1024",
        "--osl=20",
        "--requests=100",
        "--quiet",
    ]);
    assert_eq!(simulated.0, Some(0), "{simulated:?}");
    assert!(simulated.1.contains("100 prompts,"), "{simulated:?}");
}

#[test]
fn faults_lose_requests_and_retries_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    let text = "[[event]]\nkind = \"crash\"\nat_s = 1\nuntil_s = 2\nworker = 0\n";
    std::fs::write(&file, text).unwrap();
    let records = dir.path().join("d.csv");
    let run = run(&[
        "simulate",
        file.to_str().unwrap(),
        "--rate=20",
        "--isl=128",
        "--osl=20",
        "--requests=100",
        "--retries=3",
        &format!("--drag={}", records.display()),
        "--json",
        "--quiet",
    ]);
    assert_eq!(run.0, Some(1), "requests failed: {run:?}");
    let report: Value = serde_json::from_str(&run.1).unwrap();
    assert!(report["errors"]["worker lost"]["count"].as_u64() > Some(0));
    assert!(report["requests"]["retries"].as_u64() > Some(0));
    assert!(report["requests"]["succeeded"].as_u64() > Some(90));

    // Their records have the time of the loss, and the tokens that clients had received.
    let mut lost = 0;
    for record in slipstream_report::drag::read(&records).unwrap() {
        let record = record.unwrap();
        if record.status != slipstream_twin::WORKER_LOST {
            assert_eq!(record.status, "ok");
            continue;
        }
        lost += 1;
        assert_eq!((record.worker, record.isl), (Some(0), Some(128)));
        assert!((1..20).contains(&record.osl.unwrap()), "{record:?}");
        assert!(record.times.at(Stage::ClientRecv).is_some());
        assert_eq!(record.times.at(Stage::LastClientRecv), None);
    }
    assert_eq!(
        report["errors"]["worker lost"]["count"].as_u64(),
        Some(lost)
    );
}

/// The example of autoscaling: workers come and go, and only those that exist cost GPU time.
#[test]
fn the_example_of_autoscaling_runs_and_counts_its_workers() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let cluster = format!("{root}/examples/cluster-autoscale.toml");
    let simulate = |flags: &[&str]| {
        let base = ["simulate", &cluster, "--isl=600", "--osl=200", "--quiet"];
        let (code, out, err) = run(&[&base[..], flags].concat());
        assert_eq!(code, Some(0), "{err}");
        out
    };
    let load = ["--rate=80", "--requests=8000"];
    let json = simulate(&[&load[..], &["--json"]].concat());
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let pool = &json["autoscale"]["pools"][0];
    let (mean, most) = (
        pool["workers_mean"].as_f64().unwrap(),
        pool["workers_max"].as_u64().unwrap(),
    );
    assert_eq!(
        (&pool["name"], &pool["workers_min"]),
        (&"main".into(), &2.into())
    );
    assert!(
        most > 2 && most <= 12 && mean > 2.0 && mean < most as f64,
        "{pool}"
    );
    let changes = json["autoscale"]["changes"].as_array().unwrap();
    assert_eq!(changes[0]["before"], 2, "{changes:?}");
    assert_eq!(changes[0]["at_s"].as_f64().unwrap() % 15.0, 0.0);
    let seconds = json["simulation"]["simulated_s"].as_f64().unwrap();
    let hours = json["gpu"]["hours"].as_f64().unwrap();
    assert!((hours - mean * seconds / 3600.0).abs() < 1e-6, "{hours}");
    // As text, and not at all if it is off.
    let text = simulate(&load);
    assert!(text.contains("autoscale  main: 2 to "), "{text}");
    let off = simulate(&[
        "--rate=5",
        "--requests=50",
        "--set=autoscale.policy=none",
        "--json",
    ]);
    assert!(!off.contains("\"autoscale\""), "{off}");
}

/// The first line of the example says how many workers there are over the day that its command runs.
#[test]
fn the_example_of_autoscaling_has_the_workers_that_it_states() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let cluster = format!("{root}/examples/cluster-autoscale.toml");
    let text = std::fs::read_to_string(&cluster).unwrap();
    assert!(
        text.contains("2 at night, up to 8 at the peak")
            && text.contains("--workload examples/day.workload.toml"),
        "{text}"
    );
    let (code, out, err) = run(&[
        "simulate",
        &cluster,
        &format!("--workload={root}/examples/day.workload.toml"),
        "--workload-set=duration_s=86400", // one of its two equal days
        "--json",
        "--quiet",
    ]);
    assert_eq!(code, Some(0), "{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    let pool = &json["autoscale"]["pools"][0];
    assert_eq!(
        (&pool["workers_min"], &pool["workers_max"]),
        (&2.into(), &8.into())
    );
    // An hour of the day takes 150 s: fewest before dawn, most around 15:00.
    let changes = json["autoscale"]["changes"].as_array().unwrap();
    let at = |change: &Value| change["at_s"].as_f64().unwrap() / 150.0;
    let wanted = |hour: f64| {
        let last = changes.iter().rfind(|change| at(change) <= hour);
        last.map_or(2, |change| change["wanted"].as_u64().unwrap())
    };
    assert!(wanted(4.0) <= 3, "{changes:?}");
    let most: Vec<f64> = (changes.iter())
        .filter(|change| change["wanted"] == 8)
        .map(at)
        .collect();
    assert!(
        most.iter().all(|hour| (11.0..20.0).contains(hour)),
        "{most:?}"
    );
}

/// The example of several models has the figures of docs/twin.md, and its page shows them.
#[test]
fn the_example_of_several_models_shares_gpus() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.html");
    let (code, out, err) = run(&[
        "simulate",
        &format!("{root}/examples/cluster-models.toml"),
        &format!("--workload={root}/examples/models.workload.toml"),
        &format!("--html={}", page.display()),
        "--json",
        "--quiet",
    ]);
    assert_eq!(code, Some(0), "{err}");
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["gpu"]["gpus"], 8);
    let models = json["models"].as_array().unwrap();
    let names: Vec<&str> = models.iter().map(|m| m["name"].as_str().unwrap()).collect();
    let expected = ["qwen3-32b", "llama-3.1-70b", "qwen3-30b-a3b", "llama-tuned"];
    assert_eq!(names, expected);
    let p50 = models[1]["ttft_ms"]["p50"].as_f64().unwrap() / 1e3;
    assert_eq!(format!("{p50:.1}"), "3.1");
    let share = &json["shares"][0];
    assert_eq!(share["swaps"], 203);
    let spent = share["swapping_share"].as_f64().unwrap();
    assert_eq!(format!("{:.0}", 100.0 * spent), "17");
    let awake = |pool: &Value| pool["awake_share"].as_f64().unwrap();
    let pools = share["pools"].as_array().unwrap();
    let all = pools.iter().map(awake).sum::<f64>() + spent;
    assert!((all - 1.0).abs() < 1e-9, "{all}");
    let page = std::fs::read_to_string(page).unwrap();
    for text in [">model</th>", "awake, %", "llama-tuned"] {
        assert!(page.contains(text), "the page lacks {text}");
    }
}

/// The live side has all workers, so the twin that it is compared with has them too.
#[test]
fn drag_compares_clusters_of_as_many_workers() {
    let dir = tempfile::tempdir().unwrap();
    let keep = dir.path().join("kept");
    let keep_flag = format!("--keep={}", keep.display());
    let mut args = vec![
        "drag",
        "--rate=100",
        "--requests=40",
        "--isl=300",
        "--osl=4",
        "--speedup=20",
        "--set=router.policy=round_robin",
        "--set=autoscale.policy=utilization",
        "--set=autoscale.target=0.5",
        &keep_flag,
    ];
    args.extend(SMALL);
    let (code, _, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    let note =
        "note: `autoscale.policy` has an effect in simulation and in `slipstream serve` only";
    assert!(err.contains(note), "{err}");
    for side in ["live", "twin"] {
        let records = keep.join(format!("{side}.csv"));
        let mut workers: Vec<Option<u32>> = slipstream_report::drag::read(&records)
            .unwrap()
            .map(|record| record.unwrap().worker)
            .collect();
        workers.sort_unstable();
        workers.dedup();
        assert_eq!(workers, [Some(0), Some(1)], "{side}");
    }
}
