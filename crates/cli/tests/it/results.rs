//! Output files of a run: records, traces, pages.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::server::{Server, run};

/// Simulates two small workers with additional flags; returns the JSON report.
fn simulate(more: &[&str]) -> Value {
    let mut args = vec![
        "simulate",
        "--rate=30",
        "--requests=150",
        "--isl=700",
        "--osl=20",
        "--set=pool.main.workers=2",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=10000000",
        "--json",
        "--quiet",
    ];
    args.extend(more);
    let (code, out, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

/// The rows of a CSV file without quotes, by column.
fn rows(path: &Path) -> Vec<std::collections::HashMap<String, String>> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap().split(',').collect();
    lines
        .map(|line| {
            let fields: Vec<&str> = line.split(',').collect();
            assert_eq!(fields.len(), header.len(), "{line}");
            header
                .iter()
                .zip(fields)
                .map(|(name, field)| ((*name).to_owned(), field.to_owned()))
                .collect()
        })
        .collect()
}

#[test]
fn passes_beyond_a_table_of_step_times_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("steps.csv");
    // A table for up to so many sequences in decode.
    let simulate = |sequences: u32| {
        let table = format!("decode_sequences,step_us\n0,5000\n{sequences},9000\n");
        std::fs::write(&path, table).unwrap();
        let (code, out, err) = run(&[
            "simulate",
            "--rate=30",
            "--requests=60",
            "--isl=700",
            "--osl=20",
            "--set=pool.main.workers=1",
            "--set=engine.timing.kind=table",
            &format!("--set=engine.timing.path={}", path.display()),
            "--json",
            "--quiet",
        ]);
        assert_eq!(code, Some(0), "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        let of = |key: &str| report["simulation"][key].as_u64().unwrap();
        (of("extrapolated"), of("passes"), err)
    };
    let (extrapolated, _, err) = simulate(256);
    assert_eq!(extrapolated, 0);
    assert!(!err.contains("table of step times"), "{err}");
    let (extrapolated, passes, err) = simulate(1);
    assert!(
        0 < extrapolated && extrapolated < passes,
        "{extrapolated} of {passes}"
    );
    assert!(
        err.contains(&format!("note: {extrapolated} of {passes} passes"))
            && err.contains("are outside the table of step times"),
        "{err}"
    );
}

#[test]
fn records_of_passes_requests_and_time_add_up_to_the_report() {
    let dir = tempfile::tempdir().unwrap();
    let [passes, drag, series] = ["p.csv", "d.csv", "s.csv"].map(|name| dir.path().join(name));
    let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let report = simulate(&[
        &flag("passes", &passes),
        &flag("drag", &drag),
        &flag("series", &series),
    ]);
    let sum = |rows: &[std::collections::HashMap<String, String>], column: &str| {
        rows.iter()
            .map(|row| row[column].parse::<u64>().unwrap())
            .sum::<u64>()
    };
    let output = report["tokens"]["output"].as_u64().unwrap();
    let (passes, drag, series) = (rows(&passes), rows(&drag), rows(&series));
    assert_eq!(output, 150 * 20);
    let simulation = &report["simulation"];
    assert_eq!(simulation["digest"].as_str().map(str::len), Some(16));
    assert_eq!(simulation["cut"], Value::Null);
    assert_eq!(sum(&passes, "output_tokens"), output);
    assert_eq!(sum(&drag, "osl"), output);
    assert_eq!(sum(&series, "output_tokens"), output);
    assert_eq!((sum(&series, "due"), sum(&series, "ended")), (150, 150));
    assert_eq!(drag.len(), 150);
    assert_eq!(simulation["passes"], passes.len());
    // Every pass takes 10 ms, and time in passes matches the bins.
    assert!(passes.iter().all(|pass| {
        let at = |column: &str| pass[column].parse::<u64>().unwrap();
        at("end") - at("start") == 10_000_000
    }));
    let busy: f64 = series
        .iter()
        .map(|bin| {
            let at = |column: &str| bin[column].parse::<f64>().unwrap();
            at("busy_share") * at("width_s") * 2.0
        })
        .sum();
    assert!((busy - passes.len() as f64 * 0.01).abs() < 1e-6, "{busy}");
}

#[test]
fn a_perfetto_trace_parses_and_holds_every_pass_and_request() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    simulate(&[&format!("--perfetto={}", file.display())]);
    let events: Vec<Value> = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let named = |name: &str| events.iter().filter(|e| e["name"] == name).count();
    assert_eq!(named("process_name"), 3); // two engines and the network
    // Each request begins and ends once.
    for request in 0..150 {
        let name = format!("{request}.0");
        let own = events
            .iter()
            .filter(|e| e["cat"] == "request" && e["name"] == name.as_str());
        let phases: Vec<&str> = own.map(|e| e["ph"].as_str().unwrap()).collect();
        assert_eq!(phases, ["b", "e"], "{name}");
    }
    let mut before = [0u64; 3];
    for pass in events.iter().filter(|e| e["ph"] == "X") {
        let at = |key: &str| (pass[key].as_f64().unwrap() * 1e3).round() as u64; // ns
        let engine = pass["pid"].as_u64().unwrap() as usize;
        assert!(at("ts") >= before[engine], "passes of an engine overlap");
        before[engine] = at("ts") + at("dur");
    }
    assert!(before[1] > 0 && before[2] > 0);
}

#[test]
fn a_page_loads_nothing_and_says_what_the_report_says() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("page.html");
    let report = simulate(&[
        &format!("--html={}", file.display()),
        "--slo=ttft=30ms",
        "--label=<b>&\"mine\"",
    ]);
    let page = std::fs::read_to_string(&file).unwrap();
    for reference in ["src=", "href=", "@import", "url(", "fetch(", "<b>&\"mine"] {
        assert!(!page.contains(reference), "the page has {reference}");
    }
    assert!(page.contains("&lt;b&gt;&amp;&quot;mine&quot;"));
    let tile = format!("<b>{}</b>", report["requests"]["succeeded"]);
    assert!(page.contains(&tile), "no {tile}");
    for title in [
        "TTFT: share that took no longer",
        "ITL, by when the token came",
        "Prefix hits",
        "KV blocks held",
        "Sequences per pass",
        "Running sequences",
        "max_num_seqs",
    ] {
        assert!(page.contains(title), "the page lacks {title}");
    }
    // Each chart has a drawing, and none has a NaN coordinate.
    assert_eq!(
        page.matches("<figure class=\"chart\">").count(),
        page.matches("<svg ").count()
    );
    assert!(!page.contains("NaN"));
}

/// A full disk loses the file, not the figures; the written part keeps another name.
#[test]
fn a_full_disk_is_told_and_the_figures_are_kept() {
    if !Path::new("/dev/full").exists() {
        eprintln!("skipped: there is no /dev/full");
        return;
    }
    for flag in ["drag", "passes", "series", "perfetto", "html", "out"] {
        let (code, out, err) = run(&[
            "simulate",
            "--rate=30",
            "--requests=400",
            "--osl=40",
            "--quiet",
            &format!("--{flag}=/dev/full"),
        ]);
        assert_eq!(code, Some(1), "{flag}: {err}");
        assert!(
            err.contains("error: /dev/full: ") && err.contains("No space"),
            "{flag}: {err}"
        );
        assert!(
            out.contains("400 of 400 requests answered"),
            "{flag}: {out}"
        );
    }
}

#[test]
fn a_run_without_a_request_says_why_it_fails() {
    let (code, out, err) = run(&["simulate", "--rate=1", "--duration=1us"]);
    assert_eq!(code, Some(1), "{err}");
    assert!(out.contains("0 of 0 requests"), "{out}");
    assert!(err.contains("note: no request was sent"), "{err}");
}

/// Hours of work are not begun for a file that cannot be written at their end.
#[test]
fn files_that_cannot_be_written_are_refused_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], part: &str| {
        let (code, out, err) = run(args);
        assert_eq!(code, Some(2), "{args:?}: {err}");
        assert!(out.is_empty() && err.contains(part), "{args:?}: {err}");
    };
    let folder = dir.path().display().to_string();
    for flag in ["drag", "passes", "series", "perfetto", "html", "out"] {
        for (file, part) in [
            ("/nowhere/file", "there is no folder /nowhere"),
            (folder.as_str(), "that is a folder"),
            ("-", "stdout has the figures"),
        ] {
            refused(
                &["simulate", "--requests=5", &format!("--{flag}={file}")],
                part,
            );
        }
    }
    let file = format!("{folder}/x.csv");
    refused(
        &[
            "simulate",
            "--requests=5",
            "--drag",
            &file,
            "--series",
            &file,
        ],
        "--drag and --series name the same file",
    );
    for flag in ["html", "out"] {
        let (flag, vary) = (format!("--{flag}=/nowhere/file"), "--vary=load=1,2");
        refused(
            &["sweep", "--requests=5", vary, &flag],
            "there is no folder",
        );
    }
    // No request is sent to the server, which does not exist.
    for flag in ["drag", "series", "html", "out"] {
        let flag = format!("--{flag}=/nowhere/file");
        refused(
            &["bench", "http://127.0.0.1:9", &flag],
            "there is no folder",
        );
    }
    let none: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert!(none.is_empty(), "{none:?}");
    let (code, _, err) = run(&[
        "simulate",
        "--requests=5",
        "--out=/dev/null",
        "--html=/dev/null",
    ]);
    assert_eq!(code, Some(0), "{err}");
}

/// Sessions of a trace run live as in the twin: the same turns, and the same hits. A live run has a
/// page and a series too, and a full disk does not end it.
#[test]
fn a_trace_with_sessions_runs_live_as_in_the_twin() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let (workload, trace) = (file("w.toml"), file("t.jsonl"));
    std::fs::write(
        &workload,
        "requests = 60\nisl = 300\nosl = 20\n[arrival]\nkind = \"constant\"\nrate_per_s = 40\n\
         [[prefix]]\nbranches = 2\ntokens = 128\n[session]\nturns = 3\n",
    )
    .unwrap();
    let text = |path: &Path| path.display().to_string();
    let (code, _, err) = run(&["trace", "convert", &text(&workload), "--out", &text(&trace)]);
    assert_eq!(code, Some(0), "{err}");

    const CLUSTER: &[&str] = &[
        "--set=model.name=test-model",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=1000000",
        "--set=pool.main.workers=1",
    ];
    let (page, series) = (file("live.html"), file("live.csv"));
    let server = Server::start(&[CLUSTER, &["--speedup=0"]]);
    let url = format!("http://{}", server.address());
    let (code, live, err) = run(&[
        "bench",
        &url,
        "--trace",
        &text(&trace),
        // One session at a time, so that hits depend on nothing else.
        "--concurrency=1",
        "--json",
        "--quiet",
        "--drag=/dev/full",
        &format!("--html={}", text(&page)),
        &format!("--series={}", text(&series)),
    ]);
    if Path::new("/dev/full").exists() {
        assert_eq!(code, Some(1), "{err}");
        assert!(err.contains("error: /dev/full: No space"), "{err}");
    }
    let trace = text(&trace);
    let mut args = vec![
        "simulate",
        "--trace",
        &trace,
        "--concurrency=1",
        "--json",
        "--quiet",
    ];
    args.extend(CLUSTER);
    let (code, twin, err) = run(&args);
    assert_eq!(code, Some(0), "{err}");
    let [live, twin]: [Value; 2] = [live, twin].map(|json| serde_json::from_str(&json).unwrap());
    assert_eq!(live["requests"]["succeeded"], 60);
    for count in ["input", "output", "cached"] {
        assert_eq!(live["tokens"][count], twin["tokens"][count], "{count}");
    }
    assert!(live["tokens"]["cached"].as_u64() > Some(60 * 128));
    assert_eq!(
        live["engine"]["prefix_hit_tokens"],
        twin["engine"]["prefix_hit_tokens"]
    );

    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("Live run") && page.contains("ITL, by when the token came"));
    let ended: u64 = rows(&series)
        .iter()
        .map(|row| row["ended"].parse::<u64>().unwrap())
        .sum();
    assert_eq!(ended, 60);
}

/// Prompts of eight beginnings, of which the GPU holds two: `/metrics` counts what host memory has of them, and the
/// twin counts the same.
#[test]
fn host_memory_is_counted_live_as_in_the_twin() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (workload, trace) = (path("w.toml"), path("t.jsonl"));
    std::fs::write(
        &workload,
        "requests = 40\nisl = 1200\nosl = 10\n[arrival]\nkind = \"constant\"\nrate_per_s = 40\n\
         [[prefix]]\nbranches = 8\ntokens = 1024\n",
    )
    .unwrap();
    let (code, _, err) = run(&["trace", "convert", &workload, "--out", &trace]);
    assert_eq!(code, Some(0), "{err}");
    const CLUSTER: &[&str] = &[
        "--set=model.name=test-model",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=1000000",
        "--set=engine.num_gpu_blocks=160",
        "--set=engine.host_tier.gib=4",
        "--set=engine.host_tier.bytes_per_s=50e9",
        "--set=pool.main.workers=1",
    ];
    let server = Server::start(&[CLUSTER, &["--speedup=0"]]);
    let url = format!("http://{}", server.address());
    let flags = ["--trace", &trace, "--concurrency=1", "--json", "--quiet"];
    let reports = [&["bench", &url][..], &[&["simulate"], CLUSTER].concat()].map(|args| {
        let (code, report, err) = run(&[args, &flags].concat());
        assert_eq!(code, Some(0), "{err}");
        serde_json::from_str::<Value>(&report).unwrap()
    });
    let [live, twin] = reports.each_ref().map(|report| {
        let counts = [
            "host_hit_tokens",
            "prefix_hit_tokens",
            "prefix_query_tokens",
        ];
        counts.map(|count| report["engine"][count].as_f64())
    });
    assert_eq!(live, twin);
    // Each of the eight is computed once.
    assert!(live[0] > Some(15.0 * 1024.0), "{live:?}");
    let metric = |name: &str| server.metric(&format!("vllm:{name}_total"));
    assert_eq!(Some(metric("external_prefix_cache_hits")), live[0]);
    let behind = metric("prefix_cache_queries") - metric("prefix_cache_hits");
    assert_eq!(metric("external_prefix_cache_queries"), behind);
}

/// Requests have other seeds live, so other drafts are accepted: as many on average.
#[test]
fn drafts_are_verified_live_as_in_the_twin() {
    const CLUSTER: &[&str] = &[
        "--set=model.name=test-model",
        "--set=engine.timing.kind=constant",
        "--set=engine.timing.step_ns=1000000",
        "--set=engine.speculation.num_speculative_tokens=3",
        "--set=engine.speculation.method=mtp",
        "--set=engine.speculation.acceptance=[0.8, 0.6, 0.4]",
        "--set=pool.main.workers=1",
    ];
    let server = Server::start(&[CLUSTER, &["--speedup=0"]]);
    let url = format!("http://{}", server.address());
    let flags = [
        "--requests=20",
        "--isl=50",
        "--osl=90",
        "--concurrency=1",
        "--json",
        "--quiet",
    ];
    let reports = [&["bench", &url][..], &[&["simulate"], CLUSTER].concat()].map(|args| {
        let (code, report, err) = run(&[args, &flags].concat());
        assert_eq!(code, Some(0), "{err}");
        serde_json::from_str::<Value>(&report).unwrap()
    });
    for report in &reports {
        assert_eq!(report["requests"]["succeeded"], 20);
        assert_eq!(report["tokens"]["output"], 20 * 90);
        // 2.8 tokens per step on average.
        let count = |name: &str| report["engine"][name].as_f64().unwrap();
        let mean = 1.0 + count("accepted_tokens") / count("drafts");
        assert!((2.5..3.1).contains(&mean), "{mean}");
        assert_eq!(count("draft_tokens"), 3.0 * count("drafts"));
    }
    // Tokens of one step share an event.
    let events = reports[0]["tokens"]["events"].as_u64().unwrap();
    assert!((500..900).contains(&events), "{events}");
    let metric = |name: &str| server.metric(&format!("vllm:spec_decode_num_{name}_total"));
    assert_eq!(
        Some(metric("drafts")),
        reports[0]["engine"]["drafts"].as_f64()
    );
    assert!(metric("accepted_tokens") > 0.0 && metric("draft_tokens") > 0.0);
}

/// The remains of a killed run have the name `.partial`.
#[test]
fn a_killed_run_leaves_a_partial_file() {
    let dir = tempfile::tempdir().unwrap();
    let (file, partial) = (dir.path().join("d.csv"), dir.path().join("d.csv.partial"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_slipstream"))
        .args([
            "simulate",
            "--concurrency=4",
            "--requests=100000000",
            "--quiet",
            "--drag",
        ])
        .arg(&file)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while std::fs::metadata(&partial).map_or(0, |meta| meta.len()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it runs for long");
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(partial.exists() && !file.exists());
}

/// A workload file and a trace made from it give the same requests, block for block; Mooncake's
/// format gives the same hits.
#[test]
fn a_converted_workload_runs_as_the_workload_does() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let (workload, own, mooncake) = (file("w.toml"), file("own.jsonl"), file("mooncake.jsonl"));
    std::fs::write(
        &workload,
        "requests = 90\nisl = 700\nosl = 30\n[arrival]\nkind = \"poisson\"\nrate_per_s = 20\n\
         [[prefix]]\nbranches = 3\ntokens = 512\n[session]\nturns = 3\nthink_time_s = 0.5\n",
    )
    .unwrap();
    for (form, to) in [("slipstream", &own), ("mooncake", &mooncake)] {
        let (code, _, err) = run(&["trace", "convert", &workload, "--to", form, "--out", to]);
        assert_eq!(code, Some(0), "{err}");
        assert!(err.contains("90 requests in 30 sessions"), "{err}");
    }
    let digest = |input: [&str; 2]| {
        let mut args = vec!["simulate", "--quiet", "--set=pool.main.workers=2"];
        args.extend(input);
        let (code, out, err) = run(&args);
        assert_eq!(code, Some(0), "{err}");
        out.split("digest ").nth(1).unwrap().to_owned()
    };
    assert_eq!(digest(["--workload", &workload]), digest(["--trace", &own]));
    // Converting again changes nothing.
    let again = file("again.jsonl");
    run(&["trace", "convert", &own, "--out", &again]);
    assert_eq!(std::fs::read(&own).unwrap(), std::fs::read(&again).unwrap());
    let stats = |trace: &str| {
        let (code, out, err) = run(&["trace", "stats", trace, "--block-size=512"]);
        assert_eq!(code, Some(0), "{err}");
        out.lines().next().unwrap().to_owned()
    };
    assert_eq!(stats(&own), stats(&mooncake));
    let (code, _, err) = run(&["trace", "convert", &own, "--out", "/dev/full"]);
    assert_eq!(code, Some(2));
    assert!(
        err.contains("/dev/full after") && err.contains("No space"),
        "{err}"
    );
}

/// The page's script runs in a browser without an error. Skipped without Chromium.
#[test]
fn a_page_works_in_a_browser() {
    let browsers = ["chromium", "chromium-browser", "google-chrome"];
    let found = browsers.into_iter().find(|name| {
        let version = Command::new(name).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    });
    let Some(browser) = found else {
        eprintln!("skipped: no Chromium (Debian: apt-get install chromium)");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (page, sweep) = (dir.path().join("page.html"), dir.path().join("sweep.html"));
    simulate(&[&format!("--html={}", page.display())]);
    let html = format!("--html={}", sweep.display());
    let (code, _, err) = run(&[
        "sweep",
        "--requests=40",
        "--vary=pool.main.workers=1..3",
        &html,
    ]);
    assert_eq!(code, Some(0), "{err}");
    let open = |file: &Path| {
        let output = Command::new(browser)
            .args(["--headless=new", "--no-sandbox", "--disable-gpu"])
            .arg("--enable-logging=stderr")
            .arg(format!(
                "--user-data-dir={}",
                dir.path().join("profile").display()
            ))
            .arg("--dump-dom")
            .arg(format!("file://{}", file.display()))
            .output()
            .unwrap();
        let [dom, log] =
            [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
        if !output.status.success() || dom.is_empty() {
            eprintln!("skipped: the browser does not start here: {log}");
            return None;
        }
        assert!(!log.contains("CONSOLE"), "{log}");
        // The script has shown its button.
        assert!(
            dom.contains("<button id=\"theme\" type=\"button\">"),
            "the script did not run"
        );
        Some(dom)
    };
    let (Some(dom), Some(swept)) = (open(&page), open(&sweep)) else {
        return;
    };
    assert_eq!(swept.matches("<figure class=\"chart\">").count(), 3);
    assert!(swept.contains("pool.main.workers=3"));
    // Each heat map has as many pixels as it has engines.
    let canvases: Vec<&str> = dom
        .split("<canvas ")
        .skip(1)
        .map(|rest| rest.split('>').next().unwrap())
        .collect();
    assert!(canvases.len() >= 3, "{canvases:?}");
    assert!(
        canvases.iter().all(|c| c.contains("height=\"2\"")),
        "{canvases:?}"
    );
}
