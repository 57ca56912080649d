//! Limits per API key, the access log and traces, as an operator sees them.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use crate::engines::{
    EVENTS, Engine, PATIENCE, STREAM, WHOLE, answer, chunk, front, say, say_text, stream_texts,
    text_event,
};
use crate::planes::completion;
use crate::server::{Answer, FAST, Server, slipstream};

/// A folder with a file of keys, and the flag that names it.
fn keys(lines: &str) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    std::fs::write(&path, lines).unwrap();
    let flag = format!("--set=live.api_keys_file={}", path.display());
    (dir, flag)
}

fn post(server: &Server, key: &str, body: &str) -> Answer {
    let header = format!("Authorization: Bearer {key}");
    let body = body.as_bytes();
    server
        .connect()
        .send("POST", "/v1/completions", &[&header], body)
}

fn assert_limited(got: &Answer, what: &str) {
    assert_eq!(got.status, 429, "{}", got.text());
    let seconds: u64 = got.header("retry-after").unwrap().parse().unwrap();
    assert!(seconds >= 1);
    let error = &got.json()["error"];
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert_eq!(error["type"], what);
    assert!(!got.text().contains("sk-"), "a key: {}", got.text());
}

/// An access log in a folder of its own.
struct Log {
    dir: tempfile::TempDir,
}

impl Log {
    fn new() -> Log {
        Log {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("access.log")
    }

    fn flag(&self) -> String {
        format!("--set=live.access_log={}", self.path().display())
    }

    /// The first `count` lines for `path` in `file`, once they are there.
    fn await_lines(file: &Path, path: &str, count: usize) -> Vec<Value> {
        let begun = Instant::now();
        loop {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            let lines = text
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            let lines = lines.map(|line| serde_json::from_str::<Value>(line).expect(line));
            let lines: Vec<Value> = lines.filter(|line| line["path"] == path).collect();
            if lines.len() >= count {
                return lines;
            }
            assert!(begun.elapsed() < PATIENCE, "{count} lines in {text}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_key_gets_its_rate_of_requests_and_others_theirs() {
    let (_dir, flag) = keys("sk-a name=slow requests_per_s=0.0001 request_burst=2\nsk-b\n");
    let server = Server::start(&[FAST, &[&flag]]);
    const BODY: &str = r#"{"prompt":"hello","max_tokens":3,"ignore_eos":true}"#;
    for _ in 0..2 {
        assert_eq!(post(&server, "sk-a", BODY).status, 200);
    }
    let third = post(&server, "sk-a", BODY);
    assert_limited(&third, "requests");
    assert!(third.text().contains("`slow`"));
    for _ in 0..4 {
        assert_eq!(post(&server, "sk-b", BODY).status, 200);
    }
    // What costs nothing is not counted.
    let header = "Authorization: Bearer sk-a";
    let models = server.connect().send("GET", "/v1/models", &[header], b"");
    assert_eq!(models.status, 200);
    assert_eq!(post(&server, "sk-c", BODY).status, 401);
    let metric = |name: &str| server.metric(name);
    let limited = "slipstream_key_limited_total{key=\"slow\",rate=\"requests\"}";
    assert_eq!(metric(limited), 1.0);
    assert_eq!(metric("slipstream_key_requests_total{key=\"slow\"}"), 3.0);
    assert_eq!(metric("slipstream_key_requests_total{key=\"key-2\"}"), 4.0);
}

#[test]
fn a_key_is_charged_the_tokens_that_it_used() {
    let (_dir, flag) = keys("sk-a name=a tokens_per_s=0.0001 token_burst=60\n");
    let ends = [
        "--set=engine.output_len.kind=constant",
        "--set=engine.output_len.tokens=20",
    ];
    let server = Server::start(&[FAST, &ends, &[&flag]]);
    // Asks for far more than the burst each time, and uses 20 and a prompt of a few tokens.
    const BODY: &str = r#"{"prompt":"hello","max_tokens":2000}"#;
    let mut used = 0;
    while used < 60 {
        let got = post(&server, "sk-a", BODY);
        assert_eq!(got.status, 200, "{used}: {}", got.text());
        let usage = &got.json()["usage"];
        assert_eq!(usage["completion_tokens"], 20);
        used += usage["total_tokens"].as_u64().unwrap();
    }
    assert_limited(&post(&server, "sk-a", BODY), "tokens");
    // Refused requests cost nothing.
    let wrong = post(&server, "sk-a", r#"{"prompt":1.5}"#);
    assert_eq!(wrong.status, 400);
}

#[test]
fn tokens_of_real_engines_are_charged_by_their_usage() {
    let (_dir, flag) = keys("sk-a name=a tokens_per_s=0.0001 token_burst=100\n");
    let engine = Engine::start(|_, stream| {
        let body = br#"{"choices":[{"text":"x"}],"usage":{"prompt_tokens":30,"completion_tokens":25,"prompt_tokens_details":{"cached_tokens":16}}}"#;
        answer(stream, "200 OK", "content-type: application/json\r\n", body);
    });
    let log = Log::new();
    let server = front(&[&engine], &[&flag, &log.flag()]);
    const BODY: &str = r#"{"model":"m","prompt":"x","max_tokens":5000}"#;
    for _ in 0..2 {
        assert_eq!(post(&server, "sk-a", BODY).status, 200);
        server.await_metric("slipstream_streams_open", |open| open == 0.0);
    }
    assert_limited(&post(&server, "sk-a", BODY), "tokens");
    assert_eq!(engine.seen().len(), 2, "the third was not sent");
    let lines = Log::await_lines(&log.path(), "/v1/completions", 3);
    assert_eq!(lines[0]["prompt_tokens"], 30);
    assert_eq!(lines[0]["cached_tokens"], 16);
    assert_eq!(lines[0]["completion_tokens"], 25);
    assert_eq!(lines[2]["status"], 429);
    assert_eq!(lines[2]["engine"], Value::Null);
}

#[test]
fn what_a_body_asks_for_is_charged_in_advance_whatever_type_it_is_announced_as() {
    let (_dir, flag) = keys("sk-a name=a tokens_per_s=0.0001 token_burst=100\n");
    let engine = Engine::start(|_, stream| {
        // It answers once the second request was refused.
        let mut byte = [0];
        let _ = std::io::Read::read(stream, &mut byte);
    });
    let server = front(&[&engine], &[&flag]);
    const BODY: &[u8] = br#"{"model":"m","prompt":"x","max_tokens":5000}"#;
    let mut first = server.connect();
    let length = format!("Content-Length: {}", BODY.len());
    let headers = [
        "Authorization: Bearer sk-a",
        "Content-Type: text/plain",
        &length,
    ];
    first.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n");
    first.write(format!("{}\r\n\r\n", headers.join("\r\n")).as_bytes());
    first.write(BODY);
    server.await_metric("slipstream_engine_in_flight", |open| open == 1.0);
    let second = post(&server, "sk-a", r#"{"model":"m","prompt":"x"}"#);
    assert_limited(&second, "tokens");
}

#[test]
fn requests_have_a_line_with_their_trace() {
    let (_dir, flag) = keys("sk-a name=web\n");
    let engine = Engine::start(|_, stream| stream_texts(stream, "a", &["one", "two"]));
    let log = Log::new();
    let server = front(&[&engine], &[&flag, &log.flag()]);
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let huge = format!("traceparent: {TRACE}-{}", "a".repeat(8000));
    let known = format!("traceparent: {TRACE}");
    for header in [&known, &huge] {
        let headers = ["Authorization: Bearer sk-a", header, "X-Request-Id: mine"];
        let got = server.connect().send(
            "POST",
            "/v1/completions?secret=1",
            &headers,
            STREAM.as_bytes(),
        );
        assert_eq!(got.status, 200, "{}", got.text());
    }
    let lines = Log::await_lines(&log.path(), "/v1/completions", 2);
    let line = &lines[0];
    assert_eq!(line["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(line["key"], "web");
    assert_eq!(line["request_id"], "mine");
    assert_eq!(line["method"], "POST");
    assert_eq!(line["status"], 200);
    assert_eq!(line["model"], "m");
    assert_eq!(line["engine"], format!("http://{}", engine.address));
    assert_eq!(line["completion_tokens"], 2);
    assert!(line["ttft_s"].as_f64().unwrap() <= line["duration_s"].as_f64().unwrap());
    let seen = engine.seen();
    assert_eq!(seen[0].header("traceparent"), Some(TRACE));
    // One that is not valid is replaced, and engine and log agree on the new one.
    let made = seen[1].header("traceparent").unwrap();
    assert_eq!(made.len(), 55);
    assert!(made.ends_with("-00"), "not sampled: {made}");
    assert_eq!(lines[1]["trace_id"], made[3..35]);
    let text = std::fs::read_to_string(log.path()).unwrap();
    assert!(!text.contains("sk-a") && !text.contains("secret") && !text.contains("Once upon"));
}

#[test]
fn the_log_says_how_each_answer_ended() {
    let engine = Engine::start(|request, stream| {
        let body = request.json();
        match body["prompt"].as_str().unwrap() {
            "whole" => answer(stream, "200 OK", "", WHOLE),
            "long" => say_text(stream, &" ".repeat(400 << 10)),
            "wrong" => answer(stream, "422 Unprocessable", "", b"{}"),
            "events" => stream_texts(stream, "a", &["one", "two"]),
            // The answer never ends, or breaks off behind its first event.
            kind => {
                say(stream, EVENTS);
                chunk(stream, &text_event("a", "one"));
                if kind == "endless" {
                    let _ = stream.read(&mut [0]);
                }
            }
        }
    });
    let log = Log::new();
    let server = front(&[&engine], &[&log.flag(), "--set=upstream.resume=\"off\""]);
    let body = |prompt: &str| {
        serde_json::json!({"model": "m", "prompt": prompt, "stream": true}).to_string()
    };
    for (prompt, end) in [
        ("whole", "complete"),
        ("long", "complete"),
        ("events", "complete"),
        ("wrong", "refused"),
        ("broken", "broken"),
        ("endless", "client_left"),
    ] {
        let mut client = server.connect();
        let body = body(prompt);
        client.write_head("POST", "/v1/completions", &[], body.len());
        client.write(body.as_bytes());
        if prompt == "endless" {
            assert_eq!(client.head().status, 200);
            assert!(client.chunk().is_some());
            drop(client);
        } else {
            client.answer();
        }
        let lines = Log::await_lines(&log.path(), "/v1/completions", 1);
        let line = lines.last().unwrap();
        let known = lines.len();
        assert_eq!(line["end"], end, "{prompt}: {line}");
        std::fs::write(log.path(), "").unwrap();
        assert_eq!(known, 1);
    }
    // An answer of a known length was counted as a client's disconnect.
    assert_eq!(server.metric("slipstream_client_disconnects_total"), 1.0);
    let mut client = server.connect();
    client.write_head("HEAD", "/v1/models", &[], 0);
    assert_eq!(client.head().status, 200);
    assert_eq!(server.get("/nothing").status, 404);
    let head = Log::await_lines(&log.path(), "/v1/models", 1);
    assert_eq!(head[0]["end"], "complete");
    let refused = Log::await_lines(&log.path(), "/nothing", 1);
    assert_eq!(refused[0]["end"], "refused");
}

#[test]
fn modelled_engines_have_lines_too_and_the_file_is_rotated() {
    let log = Log::new();
    let server = Server::start(&[FAST, &[&log.flag()]]);
    let body = r#"{"prompt":"hello","max_tokens":7,"stream":true,"ignore_eos":true}"#;
    assert_eq!(server.post("/v1/completions", body).status, 200);
    assert_eq!(server.post("/v1/chat/completions", "{").status, 400);
    let lines = Log::await_lines(&log.path(), "/v1/completions", 1);
    assert_eq!(lines[0]["completion_tokens"], 7);
    assert_eq!(lines[0]["end"], "complete");
    assert_eq!(lines[0]["model"], "test-model");
    assert_eq!(lines[0]["key"], Value::Null);
    assert!(lines[0]["engine"].as_str().unwrap().starts_with('w'));
    assert!(lines[0]["prompt_tokens"].as_u64().unwrap() > 0);
    let refused = Log::await_lines(&log.path(), "/v1/chat/completions", 1);
    assert_eq!(refused[0]["status"], 400);
    assert_eq!(refused[0]["end"], "refused");
    assert_eq!(refused[0]["completion_tokens"], Value::Null);

    let old = log.dir.path().join("access.log.1");
    std::fs::rename(log.path(), &old).unwrap();
    server.signal("-HUP");
    let begun = Instant::now();
    while !log.path().exists() {
        assert!(begun.elapsed() < PATIENCE, "the file is not opened anew");
        std::thread::yield_now();
    }
    assert_eq!(server.post("/v1/completions", body).status, 200);
    Log::await_lines(&log.path(), "/v1/completions", 1);
    // All that is handed over is written before the process ends.
    for _ in 0..20 {
        assert_eq!(server.get("/version").status, 200);
    }
    assert!(server.terminate().success());
    let text = std::fs::read_to_string(log.path()).unwrap();
    assert_eq!(text.matches("\"/version\"").count(), 20, "{text}");
}

#[test]
fn a_server_outlives_the_reader_of_its_stderr() {
    let mut command = slipstream();
    let (reader, stderr) = std::io::pipe().unwrap();
    command.args(["serve", "--listen=127.0.0.1:0"]).args(FAST);
    command.env("RUST_LOG", "trace").stderr(stderr);
    let server = Server::spawn_with_stderr(command);
    drop(reader);
    let got = server.post("/v1/completions", &completion("one", 2, false));
    assert_eq!(got.status, 200, "{}", got.text());
    // It says there that it finishes open requests.
    let ended = server.terminate();
    assert_eq!(ended.code(), Some(0), "{ended}");
}

#[test]
fn a_full_disk_costs_lines_and_no_requests() {
    let server = Server::start(&[FAST, &["--set=live.access_log=/dev/full"]]);
    for _ in 0..10 {
        server.assert_alive();
    }
    let failed = "slipstream_access_log_dropped_total{reason=\"write\"}";
    server.await_metric(failed, |lines| lines >= 10.0);
    assert_eq!(server.metric("slipstream_access_log_lines_total"), 0.0);
    assert!(server.terminate().success());
}

#[test]
fn a_fifo_without_a_reader_is_refused_and_a_stalled_one_stalls_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let flag = format!("--set=live.access_log={}", fifo.display());
    let (code, _, errors) = crate::server::run(&["serve", "--listen=127.0.0.1:0", &flag]);
    assert_ne!(code, Some(0));
    assert!(errors.contains("a FIFO needs a reader"), "{errors}");
    // A reader that never reads: 64 KiB fit into the pipe, and the writer gives up on the rest.
    let reader = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&fifo);
    let reader = reader.unwrap();
    let server = Server::start(&[FAST, &[&flag]]);
    let mut client = server.connect();
    for _ in 0..1000 {
        assert_eq!(client.send("GET", "/version", &[], b"").status, 200);
    }
    let failed = "slipstream_access_log_dropped_total{reason=\"write\"}";
    server.await_metric(failed, |lines| lines > 0.0);
    drop(client);
    assert!(server.terminate().success());
    drop(reader);
}

#[test]
fn a_router_does_not_take_its_own_address_as_an_engine() {
    let admin = tempfile::tempdir().unwrap();
    let path = admin.path().join("admin.key");
    std::fs::write(&path, "opensesame\n").unwrap();
    let flag = format!("--set=upstream.admin_key_file={}", path.display());
    let engine = Engine::start(|_, stream| stream_texts(stream, "a", &["there"]));
    let server = front(&[&engine], &[&flag]);
    let own = format!("http://{}", server.address());
    let body = serde_json::json!({ "url": own }).to_string();
    let header = "Authorization: Bearer opensesame";
    let added = server
        .connect()
        .send("POST", "/admin/engines", &[header], body.as_bytes());
    assert_eq!(added.status, 201, "{}", added.text());
    let begun = Instant::now();
    loop {
        let engines = server.get("/health").json()["engines"].clone();
        let its = engines
            .as_array()
            .unwrap()
            .iter()
            .find(|of| of["url"] == own.as_str());
        let its = its.unwrap();
        assert_eq!(its["state"], "down");
        if let Some(why) = its["last_failure"].as_str() {
            assert!(why.contains("is the router itself"), "{why}");
            break;
        }
        assert!(begun.elapsed() < PATIENCE);
    }
    for _ in 0..5 {
        assert!(
            server
                .post("/v1/completions", STREAM)
                .text()
                .contains("there")
        );
    }
}

#[test]
fn the_description_of_the_api_needs_no_key_in_front_of_engines_either() {
    let (_dir, flag) = keys("sk-a\n");
    let engine = Engine::start(|_, stream| answer(stream, "200 OK", "", b"{\"openapi\":\"3\"}"));
    let server = front(&[&engine], &[&flag]);
    let got = server.get("/openapi.json");
    assert_eq!(
        (got.status, got.text().as_str()),
        (200, "{\"openapi\":\"3\"}")
    );
    assert_eq!(server.get("/v1/models").status, 401);
    assert_eq!(server.post("/openapi.json", "{}").status, 401);
}

#[test]
fn top_shows_workers_and_engines_in_a_pipe() {
    let server = Server::start(&[FAST]);
    server.assert_alive();
    let url = format!("http://{}", server.address());
    let (code, text, errors) = crate::server::run(&["top", &url, "--interval=10ms"]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(!text.contains('\u{1b}'), "no terminal: {text:?}");
    let row = |name: &str| text.lines().find(|line| line.starts_with(name));
    assert!(row("w0").unwrap().contains(" up "), "{text}");
    let rates = row("requests/s").unwrap();
    assert!(rates.starts_with("requests/s 0.0  tokens/s 0.0"), "{text}");
    assert!(row("w1").is_some() && text.contains("test-model"), "{text}");

    let gone = Engine::start(|_, _| {});
    let dead = gone.flag();
    let dead_url = dead.trim_start_matches("--engine=").to_owned();
    drop(gone);
    let engine = Engine::start(|_, stream| stream_texts(stream, "a", &["there"]));
    let router = front(&[&engine], &[&dead]);
    let url = format!("http://{}", router.address());
    let once = ["top", &*url, "--once", "--interval=10ms"];
    let (code, text, errors) = crate::server::run(&once);
    assert_eq!(code, Some(0), "{errors}");
    let why = format!("{dead_url}: ");
    assert!(text.contains(&why) && text.contains("down"), "{text}");
    let columns = text
        .lines()
        .find(|line| line.starts_with("engine "))
        .unwrap();
    assert!(
        columns.contains("role") && !columns.contains("prefills"),
        "{text}"
    );
    let (code, json, errors) = crate::server::run(&["top", &url, "--json"]);
    assert_eq!(code, Some(0), "{errors}");
    let figures: Value = serde_json::from_str(&json).unwrap();
    let states = figures["engines"].as_array().unwrap().iter();
    let mut states: Vec<&str> = states.map(|of| of["state"].as_str().unwrap()).collect();
    states.sort_unstable();
    assert_eq!(states, ["down", "up"]);
    // What is no server of this kind is an error, not a table.
    let engine = format!("http://{}", engine.address);
    let (code, _, errors) = crate::server::run(&["top", &engine, "--once"]);
    assert_ne!(code, Some(0), "{errors}");
    assert!(errors.contains("no Slipstream server"), "{errors}");
}
