//! A twin that runs beside a fleet of engines, here of modelled ones: they agree if it is their twin.

use std::path::PathBuf;

use crate::engines::{EVENTS, Engine, answer, chunk, say, text_event};
use crate::server::{Server, run};

/// Engines in real time, with steps of 10 ms.
fn engine() -> Server {
    Server::start(&[&["--speedup=1", "--set=model.name=m"], MODEL])
}

const MODEL: &[&str] = &[
    "--set=pool.main.workers=1",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=10000000",
    "--set=engine.num_gpu_blocks=1024",
    "--set=engine.max_model_len=4096",
];

/// A cluster file of `workers` whose steps take `step_ms`.
fn twin(workers: u32, step_ms: u32) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("twin.toml");
    let text = format!(
        "[model]\nname = \"m\"\n[pool.main]\nworkers = {workers}\n[engine]\nnum_gpu_blocks = 1024\n\
         max_model_len = 4096\n[engine.timing]\nkind = \"constant\"\nstep_ns = {step_ms}000000\n"
    );
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

fn router(engines: &[&Server], path: &std::path::Path, ratio: u32) -> Server {
    let mut flags: Vec<String> = engines
        .iter()
        .map(|engine| format!("--engine=http://{}", engine.address()))
        .collect();
    flags.push(format!("--shadow={}", path.display()));
    flags.push(format!("--shadow-ratio={ratio}"));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Server::start(&[&flags, &["--set=router.policy=\"round_robin\""]])
}

const BODY: &str = r#"{"model":"m","prompt":"one two three four","max_tokens":4,"ignore_eos":true,"stream":true,
    "stream_options":{"include_usage":true}}"#;

/// The gauge of `name` for the engine and a further label.
fn gauge(server: &Server, name: &str, engine: &Server, label: &str) -> f64 {
    let engine = format!("http://{}", engine.address());
    server.metric(&format!(
        "slipstream_shadow_{name}{{engine=\"{engine}\",{label}}}"
    ))
}

/// Both engines get requests, and the twin's counts and times appear. Its steps take `step_ms`.
#[track_caller]
fn check_parted(step_ms: u32, ratio: u32, parted: f64) {
    const REQUESTS: usize = 44;
    let engines = [engine(), engine()];
    let (_dir, path) = twin(2, step_ms);
    let server = router(&[&engines[0], &engines[1]], &path, ratio);
    let clients = (0..4).map(|_| server.connect());
    std::thread::scope(|scope| {
        for mut client in clients {
            scope.spawn(move || {
                for _ in 0..REQUESTS / 4 {
                    let got = client.send("POST", "/v1/completions", &[], BODY.as_bytes());
                    assert_eq!(got.status, 200, "{}", got.text());
                }
            });
        }
    });
    server.await_metric("slipstream_shadow_requests_total", |count| {
        count == REQUESTS as f64
    });
    for engine in &engines {
        let side = |side: &str| gauge(&server, "ttft_mean_seconds", engine, side);
        let predicted = side("side=\"predicted\"");
        // A request waits for the two steps before it at most: one under way, and one that was scheduled behind it.
        let step_s = f64::from(step_ms) / 1e3;
        assert!(
            predicted >= step_s && predicted <= 3.0 * step_s,
            "{predicted}"
        );
        assert!(side("side=\"measured\"") >= 0.01);
        for of in ["ttft", "itl", "e2e"] {
            let label = format!("of=\"{of}\"");
            assert_eq!(gauge(&server, "parted", engine, &label), parted, "{of}");
        }
        let hits = |side: &str| gauge(&server, "hit_ratio", engine, side);
        assert_eq!(
            hits("side=\"measured\""),
            hits("side=\"predicted\""),
            "no block is full"
        );
    }
    let figures = server.get("/ui.json").json();
    let twin = &figures["engines"][0]["twin"];
    assert_eq!(twin["parted"]["ttft"], parted > 0.0, "{figures}");
    assert!(twin["itl"]["predicted"].as_f64().unwrap() > 0.0);
    assert_eq!(server.metric("slipstream_shadow_dropped_total"), 0.0);
    assert_eq!(server.metric("slipstream_shadow_skipped_total"), 0.0);
    assert!(
        server.terminate().success(),
        "the twin ends with the server"
    );
}

#[test]
fn the_twin_of_the_engines_agrees_with_them() {
    // The host may be busy: 30 times as slow is not.
    check_parted(10, 30, 0.0);
}

#[test]
fn the_twin_of_other_engines_parts_from_them() {
    check_parted(1000, 2, 1.0);
}

#[test]
fn requests_that_have_no_twin_are_counted() {
    let engine = Engine::start(|_, stream| answer(stream, "400 Bad", "", b"{}"));
    let (_dir, path) = twin(1, 10);
    let flag = engine.flag();
    let shadow = format!("--shadow={}", path.display());
    let server = Server::start(&[&[&flag, &shadow]]);
    for _ in 0..3 {
        assert_eq!(server.post("/v1/completions", BODY).status, 400);
    }
    let unanswered = "slipstream_shadow_skipped_total{reason=\"unanswered\"}";
    server.await_metric(unanswered, |count| count == 3.0);
    assert_eq!(server.metric("slipstream_shadow_requests_total"), 0.0);
}

#[test]
fn a_twin_that_does_not_fit_the_fleet_is_refused() {
    let refused = |text: &str, more: &[&str]| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("twin.toml");
        std::fs::write(&path, text).unwrap();
        let shadow = format!("--shadow={}", path.display());
        let args = [&["serve", "--listen=127.0.0.1:0", &shadow], more].concat();
        let (code, _, errors) = run(&args);
        assert_ne!(code, Some(0), "{errors}");
        errors
    };
    let engines = ["--engine=http://127.0.0.1:1", "--engine=http://127.0.0.1:2"];
    let errors = refused("[pool.main]\nworkers = 1\n", &engines);
    assert!(
        errors.contains("1 worker") && errors.contains("2 engines"),
        "{errors}"
    );
    let errors = refused(
        "[pool.main]\nengines = [\"http://a:1\", \"http://a:2\"]\n",
        &engines,
    );
    assert!(errors.contains("modelled"), "{errors}");
    assert!(refused("[pool.main\n", &engines).contains("twin.toml"));
    let errors = refused("", &["--set=pool.main.workers=1"]);
    assert!(errors.contains("drag"), "{errors}");
    let (code, _, errors) = run(&["serve", engines[0], "--shadow-ratio=2"]);
    assert_eq!(code, Some(2), "{errors}");
}

#[test]
fn drag_compares_an_engine_with_its_twin() {
    let engine = engine();
    let url = format!("--engine=http://{}", engine.address());
    let (_dir, path) = twin(1, 10);
    let load = ["--requests=6", "--rate=20", "--isl=40", "--osl=5"];
    let args = [&["drag", path.to_str().unwrap(), &url, "--json"], &load[..]].concat();
    let (code, out, errors) = run(&args);
    assert_eq!(code, Some(0), "{errors}");
    let both: serde_json::Value = serde_json::from_str(&out).expect(&out);
    for side in ["engine", "twin"] {
        assert_eq!(both[side]["requests"]["succeeded"], 6, "{side}: {out}");
        assert_eq!(
            both[side]["tokens"]["input"], 240,
            "{side}: prompts have the exact length"
        );
        assert_eq!(both[side]["tokens"]["output"], 30, "{side}");
    }
    assert_eq!(both["twin"]["latency"]["itl_ms"]["p50"], 10.0);
    assert!(both["engine"]["latency"]["itl_ms"]["p50"].as_f64().unwrap() > 5.0);
    // Without a file the engine is asked, which knows its blocks and not its step times.
    let args = [&["drag", &*url], &load[..]].concat();
    let (code, out, errors) = run(&args);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("default GPU"), "{errors}");
    let head = out
        .lines()
        .find(|line| line.contains("engine") && line.contains("twin"));
    assert!(head.is_some() && out.contains("ITL"), "{out}");
}

/// An engine whose answers have `given` tokens whatever is asked for, and which says so in `usage`.
fn of_length(given: usize) -> Engine {
    Engine::start(move |request, stream| {
        if request.line.starts_with("GET ") {
            return answer(stream, "404 Not Found", "", b"");
        }
        let prompt = request.json()["prompt"].as_array().map_or(0, Vec::len);
        say(stream, EVENTS);
        for _ in 0..given {
            chunk(stream, &text_event("a", "x"));
        }
        let usage = serde_json::json!({
            "id": "a", "choices": [],
            "usage": {"prompt_tokens": prompt, "completion_tokens": given, "total_tokens": prompt + given},
        });
        chunk(stream, &format!("data: {usage}\n\ndata: [DONE]\n\n"));
        say(stream, b"0\r\n\r\n");
    })
}

/// Regression: an engine that ended its answers early looked faster than its twin, without a word.
#[test]
fn drag_does_not_compare_answers_of_other_lengths() {
    let (_dir, path) = twin(1, 10);
    let load = ["--requests=6", "--rate=50", "--isl=40", "--osl=50"];
    let drag = |given: usize, more: &[&str]| {
        let engine = of_length(given);
        let flag = engine.flag();
        run(&[&["drag", path.to_str().unwrap(), &flag], &load[..], more].concat())
    };
    for (given, what) in [(20, "fewer"), (70, "more")] {
        let (code, out, errors) = drag(given, &[]);
        assert_eq!(code, Some(1), "{errors}");
        assert_eq!(out, "", "no table");
        let total = 6 * given;
        for part in [
            format!("6 of 6 requests with {what} tokens than asked"),
            format!("{total} tokens instead of 300"),
            "ignore_eos".to_owned(),
        ] {
            assert!(errors.contains(&part), "{part}: {errors}");
        }
    }
    let (code, out, errors) = drag(20, &["--json"]);
    assert_eq!(code, Some(1), "{errors}");
    let both: serde_json::Value = serde_json::from_str(&out).expect(&out);
    assert_eq!(both["lengths"]["shorter"], 6);
    assert_eq!(both["lengths"]["tokens_missing"], 180);
    let (code, out, errors) = drag(50, &[]);
    assert_eq!(
        (code, errors.contains("not compared")),
        (Some(0), false),
        "{errors}"
    );
    assert!(out.contains("ITL"), "{out}");
}
