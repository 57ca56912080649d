//! Records of live servers.

use std::collections::HashSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::server::{FAST, Server, run};

/// One worker whose cache holds everything.
const ONE: &[&str] = &[
    "--set=pool.main.workers=1",
    "--set=engine.num_gpu_blocks=16000",
];

/// Prompts as tokens: beginnings that several share, and ends of their own; 1 to 560 tokens.
fn prompts() -> Vec<Vec<u32>> {
    let text = |name: u32| move |n: u32| 300 + (n * 7919 + name * 104_729) % 5_000;
    let shared: Vec<Vec<u32>> = (0..4)
        .map(|name| (0..480).map(text(name)).collect())
        .collect();
    (0..40u32)
        .map(|n| {
            let shared = &shared[(n * n % 4) as usize];
            let begin = &shared[..(n as usize * 53) % 481];
            let end = (0..=n * 2).map(text(1_000 + n));
            begin.iter().copied().chain(end).collect()
        })
        .collect()
}

/// Tokens of leading blocks of 16 that an earlier prompt had, and the number of distinct blocks, by
/// comparing tokens.
fn ideal_hits(prompts: &[Vec<u32>]) -> (u64, usize) {
    let mut seen = HashSet::new();
    let mut hits = 0;
    for prompt in prompts {
        let ends = (16..=prompt.len()).step_by(16);
        hits += 16
            * ends
                .clone()
                .take_while(|&end| seen.contains(&prompt[..end]))
                .count() as u64;
        seen.extend(ends.map(|end| &prompt[..end]));
    }
    (hits, seen.len())
}

/// Output of `trace stats`.
fn stats(folder: &Path) -> String {
    let (code, out, err) = run(&["trace", "stats", folder.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{err}");
    out
}

#[test]
fn a_record_replays_with_the_same_requests_lengths_and_hits() {
    let folder = tempfile::tempdir().unwrap();
    let record = format!("--record={}", folder.path().display());
    let server = Server::start(&[FAST, ONE, &[&record]]);
    let prompts = prompts();
    let (mut input, mut output, mut live_hits) = (0, 0, 0);
    for (n, prompt) in prompts.iter().enumerate() {
        let body = json!({"prompt": prompt, "max_tokens": 3 + n, "ignore_eos": true}).to_string();
        let usage = server.post("/v1/completions", &body).json()["usage"].clone();
        input += usage["prompt_tokens"].as_u64().unwrap();
        output += usage["completion_tokens"].as_u64().unwrap();
        live_hits += usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap_or(0);
    }
    // Refused: no engine computed anything for it.
    assert_eq!(
        server
            .post("/v1/completions", r#"{"prompt": "", "max_tokens": 0}"#)
            .status,
        400
    );
    server.await_metric("slipstream_record_written_total", |n| {
        n == prompts.len() as f64
    });
    assert_eq!(server.metric("slipstream_record_dropped_total"), 0.0);
    assert!(server.terminate().success());

    let trace = format!("--trace={}", folder.path().display());
    let simulate = |more: &[&str]| -> Value {
        let fixed = ["simulate", &trace, "--json", "--quiet"];
        let (code, out, err) = run(&[&fixed, &FAST[1..], ONE, more].concat());
        assert_eq!(code, Some(0), "{err}");
        serde_json::from_str(&out).unwrap()
    };
    let report = simulate(&["--concurrency=1"]);
    let requests = prompts.len() as u64;
    assert_eq!(report["requests"]["succeeded"], requests);
    assert_eq!(
        (&report["tokens"]["input"], &report["tokens"]["output"]),
        (&json!(input), &json!(output))
    );
    // The engine computes the last token of a prompt in any case, so a whole hit is a block less.
    let hits = report["engine"]["prefix_hit_tokens"].as_f64().unwrap();
    assert_eq!((hits, live_hits), (live_hits as f64, live_hits));
    assert!(
        live_hits > input / 4,
        "prompts share beginnings: {live_hits} of {input}"
    );
    // At the recorded times too.
    assert_eq!(simulate(&[])["requests"]["succeeded"], requests);
    let (ideal, blocks) = ideal_hits(&prompts);
    let share = 100.0 * ideal as f64 / input as f64;
    let stats = stats(folder.path());
    for part in [
        format!("ideal prefix hits {share:.1} %"),
        format!("{blocks} distinct blocks"),
    ] {
        assert!(stats.contains(&part), "{part} in {stats}");
    }
}

/// The lines of a record but the first of each file.
fn lines(folder: &Path) -> Vec<Value> {
    let mut lines = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        lines.extend(
            text.lines()
                .skip(1)
                .map(|line| serde_json::from_str(line).unwrap()),
        );
    }
    lines
}

/// The same requests at one server and, through a router, at the same engine give one record, but for the key.
#[test]
fn requests_to_real_engines_are_recorded_as_those_to_modelled_ones() {
    let folder = tempfile::tempdir().unwrap();
    let (direct, routed) = (folder.path().join("direct"), folder.path().join("routed"));
    let flag = |folder: &Path| format!("--record={}", folder.display());
    let engine = Server::start(&[FAST, ONE, &[&flag(&direct)]]);
    let url = format!("--engine=http://{}", engine.address());
    let (dir, tokenizer) = crate::engines::tokenizer();
    let more = [
        "--set=engine.block_size=16",
        "--set=model.name=test-model",
        &tokenizer,
    ];
    let router = Server::start(&[&[&url, &flag(&routed)], &more]);
    let prompts = prompts();
    for (n, prompt) in prompts.iter().enumerate() {
        // Whole answers, streams that are counted by their events, and streams with usage.
        let body = json!({"model": "test-model", "prompt": prompt, "max_tokens": 3 + n, "ignore_eos": true,
            "stream": n % 3 > 0, "stream_options": {"include_usage": n % 3 == 2}, "priority": n % 2});
        let mut body = body;
        if n % 3 != 2 {
            body.as_object_mut().unwrap().remove("stream_options");
        }
        let session = format!("x-session-id: s{}", n % 5);
        let got = router.connect().send(
            "POST",
            "/v1/completions",
            &[&session],
            body.to_string().as_bytes(),
        );
        assert_eq!(got.status, 200, "{}", got.text());
    }
    // Without an answer, or without generated text: no line.
    assert_eq!(
        router
            .post("/v1/completions", r#"{"prompt": "", "max_tokens": 0}"#)
            .status,
        400
    );
    assert_eq!(router.post("/tokenize", r#"{"prompt": "a b"}"#).status, 200);
    let count = prompts.len() as f64;
    router.await_metric("slipstream_record_written_total", |n| n == count);
    engine.await_metric("slipstream_record_written_total", |n| n == count);
    assert_eq!(router.metric("slipstream_record_unanswered_total"), 1.0);
    assert!(router.terminate().success() && engine.terminate().success());
    drop(dir);
    let all = [lines(&direct), lines(&routed)];
    for lines in &all {
        assert_eq!(lines.len(), prompts.len());
    }
    for (of, through) in all[0].iter().zip(&all[1]) {
        for field in ["input_length", "output_length", "priority"] {
            assert_eq!(of[field], through[field], "{field} of {through}");
        }
        assert!(through["session_id"].is_i64() && through["timestamp"].is_f64());
    }
    // Which requests share a session, and how many full blocks are distinct.
    let sessions: HashSet<i64> = all[1]
        .iter()
        .filter_map(|of| of["session_id"].as_i64())
        .collect();
    assert_eq!(sessions.len(), 5);
    let input: usize = prompts.iter().map(Vec::len).sum();
    let (ideal, blocks) = ideal_hits(&prompts);
    let share = 100.0 * ideal as f64 / input as f64;
    for part in [
        format!("ideal prefix hits {share:.1} %"),
        format!("{blocks} distinct blocks"),
    ] {
        let stats = stats(&routed);
        assert!(stats.contains(&part), "{part} in {stats}");
    }
    let (code, out, err) = run(&[
        &[
            "simulate",
            "--trace",
            routed.to_str().unwrap(),
            "--json",
            "--quiet",
        ],
        &FAST[1..],
        ONE,
    ]
    .concat());
    assert_eq!(code, Some(0), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["requests"]["succeeded"], prompts.len());
    assert_eq!(report["tokens"]["input"], input);
}

#[test]
fn a_record_has_sessions_and_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let record = format!("--record={}", folder.path().display());
    let server = Server::start(&[FAST, ONE, &[&record]]);
    let secret = "the quick brown fox jumps over the lazy dog and runs away from it all";
    for turn in 0..3 {
        let body = json!({"model": "test-model", "prompt": secret.repeat(turn + 1), "max_tokens": 5,
            "priority": 4, "ignore_eos": true, "user": "somebody"});
        let body = body.to_string();
        let answer = server.connect().send(
            "POST",
            "/v1/completions",
            &["x-session-id: alice"],
            body.as_bytes(),
        );
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert!(server.terminate().success());
    let mut files = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().path());
    let text = std::fs::read_to_string(files.next().unwrap()).unwrap();
    for word in ["quick", "alice", "somebody", "test-model"] {
        assert!(!text.contains(word), "{word} in {text}");
    }
    let lines: Vec<Value> = text
        .lines()
        .skip(1)
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(lines.len(), 3);
    assert!(
        lines
            .iter()
            .all(|line| line["session_id"] == lines[0]["session_id"])
    );
    assert!(lines.iter().all(|line| line["priority"] == 4));
    assert!(lines[0]["session_id"].is_u64());
    let trace = format!("--trace={}", folder.path().display());
    let fixed = ["simulate", &trace, "--json", "--quiet"];
    let (code, out, err) = run(&[&fixed, &FAST[1..], ONE].concat());
    assert_eq!(code, Some(0), "{err}");
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["requests"]["succeeded"], 3);
}

#[test]
fn a_folder_that_cannot_be_recorded_to_stops_the_server_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("taken");
    std::fs::write(&file, "").unwrap();
    let record = format!("--record={}", file.display());
    let (code, _, err) = run(&["serve", "--listen=127.0.0.1:0", &record]);
    assert_eq!(code, Some(2), "{err}");
    assert!(
        err.contains("cannot record to") && err.contains("taken"),
        "{err}"
    );
}
