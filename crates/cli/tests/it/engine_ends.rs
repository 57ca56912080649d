//! How answers of engines end: by what they say, not by what their connection does. Scripted engines, on loopback.

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::engines::{
    EVENTS, Engine, PATIENCE, STREAM, Seen, WHOLE, answer, chunk, front, say, text_event, text_of,
};
use crate::server::Server;

/// An event of a completion with a finish reason.
fn last_event(id: &str, text: &str, reason: &str) -> String {
    text_event(id, text).replace(":null}", &format!(":\"{reason}\"}}"))
}

/// Ends a stream whose chunks have come.
fn end(stream: &mut TcpStream) {
    say(stream, b"0\r\n\r\n");
}

/// Closes the connection by a reset, so that what was not read is lost.
fn reset(stream: &mut TcpStream) {
    let _ = socket2::SockRef::from(&*stream).set_linger(Some(Duration::ZERO));
}

/// Streams `pieces`, and ends cleanly.
fn stream(stream: &mut TcpStream, pieces: &[&str]) {
    say(stream, EVENTS);
    for piece in pieces {
        chunk(stream, piece);
    }
    end(stream);
}

const DEAD: &str = "data: {\"error\": {\"message\": \"EngineCore died\", \"type\": \"InternalServerError\", \"param\": null, \
                    \"code\": 500}}\n\n";
const DONE: &str = "data: [DONE]\n\n";

struct Log(tempfile::TempDir);

impl Log {
    fn new() -> Log {
        Log(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("access.log")
    }

    fn flag(&self) -> String {
        format!("--set=live.access_log={}", self.path().display())
    }

    /// Its lines, once there are `count`.
    fn lines(&self, count: usize) -> Vec<Value> {
        let begun = Instant::now();
        loop {
            let text = std::fs::read_to_string(self.path()).unwrap_or_default();
            let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let lines = whole
                .lines()
                .map(|line| serde_json::from_str::<Value>(line).unwrap());
            let lines: Vec<Value> = lines.filter(|line| line["method"] == "POST").collect();
            if lines.len() >= count {
                return lines;
            }
            assert!(begun.elapsed() < PATIENCE, "{count} lines in {text}");
            std::thread::yield_now();
        }
    }
}

/// A router before `first`, which gets each request first, and `second`.
fn pair(
    first: impl Fn(&Seen, &mut TcpStream) + Send + Sync + 'static,
    second: impl Fn(&Seen, &mut TcpStream) + Send + Sync + 'static,
    flags: &[&str],
) -> (Server, Engine, Engine, Log) {
    let (one, two, log) = (Engine::start(first), Engine::start(second), Log::new());
    let flag = log.flag();
    let server = front(&[&one, &two], &[flags, &[flag.as_str()]].concat());
    (server, one, two, log)
}

/// To the first of two engines.
const FIRST: &[&str] = &["x-slipstream-worker: w0"];

fn post(server: &Server, path: &str, body: &str) -> crate::server::Answer {
    server.connect().send("POST", path, FIRST, body.as_bytes())
}

fn completions(server: &Server, body: &str) -> Vec<String> {
    post(server, "/v1/completions", body).events()
}

#[test]
fn an_error_before_the_first_token_is_retried_and_ejects_its_engine() {
    let errors: [&[&str]; 14] = [
        &[DEAD, DONE],
        // Of web frameworks and gateways.
        &["data: {\"detail\":\"Internal Server Error\"}\n\n", DONE],
        &["data: {\"message\":\"worker died\",\"code\":500}\n\n"],
        &["data: {\"errors\":[{\"message\":\"m\"}]}\r\n\r\n", DONE],
        &["data: {\"error_message\":\"out of memory\"}\n\n"],
        // Of vLLM before 0.10, TGI, llama.cpp before 2025, OpenRouter.
        &[
            "data: {\"object\":\"error\",\"message\":\"m\",\"type\":\"InternalServerError\",\"code\":500}\n\n",
            DONE,
        ],
        &[
            "data: {\"error\":\"Request failed during generation\",\"error_type\":\"generation\"}\n\n",
        ],
        &["error: {\"code\":500,\"message\":\"m\",\"type\":\"server_error\"}\n\n"],
        &[
            "data: {\"id\":\"a\",\"choices\":[],\"error\":{\"code\":502,\"message\":\"provider_unavailable\"}}\n\n",
            DONE,
        ],
        // A finish reason as an object, and in the words of gateways.
        &[
            "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":{\"type\":\"abort\",\"message\":\"m\"}}]}\n\n",
            DONE,
        ],
        &[": waiting\n\n", DEAD],
        &["data: {\"error\":\ndata: {\"message\":\"m\",\"code\":503}}\n\n"],
        &["event: error\ndata: gone\n\n"],
        &[
            "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n",
            DONE,
        ],
    ];
    let good = || {
        |_: &Seen, to: &mut TcpStream| {
            stream(
                to,
                &[&text_event("b", "good"), &last_event("b", "", "stop"), DONE],
            );
        }
    };
    for pieces in errors {
        let (server, bad, _two, log) = pair(
            move |_, to| stream(to, pieces),
            good(),
            &[
                "--set=upstream.failures_max=3",
                "--set=router.policy=\"round_robin\"",
            ],
        );
        for turn in 0..8 {
            let events = server.post("/v1/completions", STREAM).events();
            assert_eq!(text_of(&events), "good", "{pieces:?}, {turn}");
            assert_eq!(events.len(), 3);
        }
        assert_eq!(
            bad.seen().len(),
            3,
            "{pieces:?}: ejected after the usual number"
        );
        let reported = format!(
            "slipstream_engine_failures_total{{engine=\"http://{}\",cause=\"reported\"}}",
            bad.address
        );
        assert_eq!(server.metric(&reported), 3.0);
        assert_eq!(server.metric("slipstream_engine_ejections_total"), 1.0);
        let lines = log.lines(8);
        assert!(
            lines.iter().all(|line| line["end"] == "complete"),
            "{lines:?}"
        );
        let moved: u64 = lines
            .iter()
            .map(|line| line["retries"].as_u64().unwrap() + line["resumes"].as_u64().unwrap())
            .sum();
        assert_eq!(moved, 3);
    }
}

#[test]
fn an_error_within_a_stream_is_a_lost_engine() {
    for pieces in [
        vec![text_event("a", " a"), DEAD.to_owned(), DONE.to_owned()],
        vec![text_event("a", " a") + DEAD + DONE],
        vec![text_event("a", " a"), last_event("a", "x", "abort")],
        vec![text_event("a", " a"), last_event("a", "x", "error") + DONE],
        // A clean end that is none.
        vec![text_event("a", " a")],
    ] {
        let bad = pieces.clone();
        let (server, _one, two, log) = pair(
            move |_, to| stream(to, &bad.iter().map(String::as_str).collect::<Vec<_>>()),
            |request, to| {
                assert_eq!(request.json()["prompt"], "Once upon a");
                stream(to, &[&last_event("b", " time", "stop"), DONE]);
            },
            &["--set=upstream.resume=\"text\""],
        );
        for _ in 0..2 {
            let events = completions(&server, STREAM);
            assert_eq!(text_of(&events), " a time", "{pieces:?}");
            assert_eq!(events.len(), 3, "{events:?}");
        }
        assert_eq!(two.seen().len(), 2);
        assert_eq!(log.lines(2)[1]["resumes"], 1);
        // Streams that begin do not clear an engine of streams that break off.
        completions(&server, STREAM);
        server.await_metric("slipstream_engine_ejections_total", |of| of == 1.0);
        // What cannot continue ends with an error, and is not complete.
        let (server, _one, _two, log) = pair(
            {
                let bad = pieces.clone();
                move |_, to| stream(to, &bad.iter().map(String::as_str).collect::<Vec<_>>())
            },
            |_, _| {},
            &["--set=upstream.resume=\"off\""],
        );
        let events = completions(&server, STREAM);
        let [begin, error, done] = &events[..] else {
            panic!("{events:?}")
        };
        assert!(begin.contains("\" a\""), "{events:?}");
        let error: Value = serde_json::from_str(error).unwrap();
        assert_eq!(
            (&error["error"]["code"], done.as_str()),
            (&json!("stream_lost"), "[DONE]")
        );
        assert_eq!(log.lines(1)[0]["end"], "broken");
    }
}

#[test]
fn whatever_kind_of_request_has_nothing_yet_is_sent_again() {
    let role = |id: &str| {
        format!(
            "data: {{\"id\":\"{id}\",\"choices\":[{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}}}}]}}\n\n"
        )
    };
    let (first, second) = (role("a"), role("b"));
    let (server, _one, two, _log) = pair(
        move |_, to| stream(to, &[&first, DEAD, DONE]),
        move |_, to| {
            let call = "data: {\"id\":\"b\",\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0}]},\
                        \"finish_reason\":\"tool_calls\"}]}\n\n";
            stream(to, &[&second, call, DONE]);
        },
        &[],
    );
    let body = r#"{"model":"m","messages":[{"role":"user","content":"q"}],"stream":true,"tools":[{"type":"function"}]}"#;
    let events = post(&server, "/v1/chat/completions", body).events();
    assert_eq!(two.seen().len(), 1);
    assert_eq!(events.len(), 3, "{events:?}");
    assert!(
        events[..2]
            .iter()
            .all(|event| event.contains("\"id\":\"a\"")),
        "{events:?}"
    );
    assert!(events[1].contains("tool_calls"));
}

#[test]
fn a_finished_answer_gets_its_last_events() {
    let finished = || text_event("a", " a") + &last_event("a", " time", "length");
    let counted = finished().replace(
        "]}\n\n",
        "],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":2,\"total_tokens\":4}}\n\n",
    );
    let token = |text: &str| text_event("a", text).replace("}]", ",\"token_ids\":[7]}]");
    let all_tokens = token(" a") + &token(" time");
    let wants = |more: &str| {
        format!(r#"{{"model":"m","prompt":"Once upon","max_tokens":2,"stream":true{more}}}"#)
    };
    let usage = r#","stream_options":{"include_usage":true}"#;
    for (sent, more, expected) in [
        (finished(), "", 3),
        (finished(), usage, 3), // nobody counted
        (counted, usage, 4),
        (all_tokens, "", 4),
    ] {
        for cut in [false, true] {
            let sent = sent.clone();
            let (server, _one, two, log) = pair(
                move |_, to| {
                    say(to, EVENTS);
                    chunk(to, &sent);
                    if cut {
                        // The router has read it before.
                        std::thread::yield_now();
                        return;
                    }
                    end(to);
                },
                |_, _| {},
                &[],
            );
            let events = completions(&server, &wants(more));
            assert_eq!(text_of(&events[..2]), " a time");
            assert_eq!(events.len(), expected, "{events:?}");
            assert_eq!(events.last().unwrap(), "[DONE]");
            if expected == 4 && more == usage {
                assert!(events[2].contains("\"total_tokens\":4"), "{events:?}");
            }
            if expected == 4 && more.is_empty() {
                assert!(
                    events[2].contains("\"finish_reason\":\"length\""),
                    "{events:?}"
                );
            }
            assert_eq!(two.seen().len(), 0);
            assert_eq!(log.lines(1)[0]["end"], "complete");
            assert_eq!(server.metric("slipstream_engine_answers_broken_total"), 0.0);
        }
    }
}

#[test]
fn what_follows_the_last_event_is_nobodys() {
    let tail = text_event("a", "behind");
    let events = last_event("a", "x", "stop") + DONE + &tail;
    let (server, _one, _two, log) = pair(
        move |_, to| {
            say(to, EVENTS);
            chunk(to, &events);
            chunk(to, &tail);
            reset(to);
        },
        |_, _| {},
        &[],
    );
    let events = completions(&server, STREAM);
    assert_eq!(events.len(), 2, "{events:?}");
    assert_eq!(log.lines(1)[0]["end"], "complete");
    // `[DONE]` without a finish reason is the engine's word, and a blank line may be missing behind it.
    let (server, _one, _two, _log) = pair(
        |_, to| stream(to, &[&text_event("a", "x"), "data: [DONE]\n"]),
        |_, _| {},
        &[],
    );
    let events = completions(&server, STREAM);
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert_eq!(events.len(), 2);
}

#[test]
fn an_error_of_the_client_is_passed_on_and_counts_for_nothing() {
    let refusal = "data: {\"error\":{\"message\":\"too long\",\"type\":\"BadRequestError\",\"code\":400}}\n\n";
    let (server, one, two, log) = pair(
        move |request, to| {
            if request.json()["stream"] == true {
                stream(to, &[refusal, DONE]);
            } else {
                answer(
                    to,
                    "200 OK",
                    "content-type: application/json\r\n",
                    b"{\"error\":{\"message\":\"no\",\"code\":422}}",
                );
            }
        },
        |_, _| {},
        &["--set=upstream.failures_max=1"],
    );
    for _ in 0..3 {
        assert_eq!(
            post(&server, "/v1/completions", STREAM).text(),
            format!("{refusal}{DONE}")
        );
    }
    let got = post(&server, "/v1/completions", r#"{"model":"m","prompt":"x"}"#);
    assert_eq!(
        (got.status, got.json()["error"]["code"].clone()),
        (200, json!(422))
    );
    assert_eq!((one.seen().len(), two.seen().len()), (4, 0));
    assert_eq!(server.metric("slipstream_engine_failures_total"), 0.0);
    let lines = log.lines(4);
    assert!(
        lines[..3].iter().all(|line| line["end"] == "refused"),
        "{lines:?}"
    );
}

#[test]
fn streams_of_other_apis_end_by_their_own_events() {
    let event =
        |kind: &str, more: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{more}}}\n\n");
    let responses = |end: &str| event("response.output_text.delta", ",\"delta\":\"a\"") + end;
    let messages = |end: &str| event("content_block_delta", ",\"delta\":{\"text\":\"a\"}") + end;
    let failed = event(
        "response.failed",
        ",\"response\":{\"error\":{\"code\":\"server_error\",\"message\":\"dead\"}}",
    );
    let overloaded = event(
        "error",
        ",\"error\":{\"type\":\"overloaded_error\",\"message\":\"dead\"}",
    );
    let stop_reason = event("message_delta", ",\"delta\":{\"stop_reason\":\"end_turn\"}");
    let cases = [
        (
            "/v1/responses",
            responses(&event("response.completed", "")),
            "complete",
            "response.completed",
        ),
        ("/v1/responses", responses(&failed), "broken", "dead"),
        ("/v1/responses", responses(""), "broken", "stream_lost"),
        (
            "/v1/messages",
            messages(&event("message_stop", "")),
            "complete",
            "message_stop",
        ),
        (
            "/v1/messages",
            messages(&stop_reason),
            "complete",
            "message_stop",
        ),
        ("/v1/messages", messages(&overloaded), "broken", "dead"),
        ("/v1/messages", messages(""), "broken", "api_error"),
    ];
    for (path, sent, how, last) in cases {
        let copy = sent.clone();
        let (server, one, _two, log) = pair(move |_, to| stream(to, &[&copy]), |_, _| {}, &[]);
        let body = r#"{"model":"m","input":"x","messages":[],"max_tokens":1,"stream":true}"#;
        let got = post(&server, path, body).text();
        assert!(got.starts_with(&sent), "{path}: {got}");
        let end = got.rsplit("event: ").next().unwrap();
        assert!(end.contains(last), "{path}: {got}");
        assert_eq!(log.lines(1)[0]["end"], how, "{got}");
        let failures = server.metric("slipstream_engine_failures_total");
        assert_eq!(failures, f64::from(u8::from(how == "broken")), "{got}");
        assert_eq!(one.seen().len(), 1);
    }
}

#[test]
fn whole_answers_are_read_before_they_are_believed() {
    let body =
        b"{\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"stop\"}]}";
    let chunked = |of: &[u8], ends: bool| {
        let mut all = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
        for piece in of.chunks(9) {
            all.extend(format!("{:x}\r\n", piece.len()).bytes());
            all.extend(piece);
            all.extend(b"\r\n");
        }
        if ends {
            all.extend(b"0\r\n\r\n");
        }
        all
    };
    let until_close = |kind: &str, of: &[u8]| {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n");
        [head.as_bytes(), of].concat()
    };
    let bad: Vec<Vec<u8>> = vec![
        until_close(
            "application/json",
            b"{\"error\":{\"message\":\"dead\",\"code\":500}}",
        ),
        until_close(
            "application/json",
            b"{\"object\":\"error\",\"message\":\"dead\",\"code\":503}",
        ),
        until_close("application/json", &body[..40]),
        until_close("application/json", b""),
        until_close("text/html", b"<html>log in</html>"),
        chunked(&body[..40], false),
        chunked(&body[..40], true),
        chunked(
            b"{\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"abort\"}]}",
            true,
        ),
        until_close(
            "text/event-stream",
            b"{\"error\":{\"message\":\"dead\",\"code\":500}}",
        ),
        until_close(
            "text/plain",
            b"data: {\"error\":{\"message\":\"dead\",\"code\":500}}\n\n",
        ),
    ];
    for bad in bad {
        let shown = String::from_utf8_lossy(&bad).into_owned();
        let (server, one, _two, _log) = pair(
            {
                let bad = bad.clone();
                move |_, to| say(to, &bad)
            },
            |_, to| {
                answer(to, "200 OK", "content-type: application/json\r\n", WHOLE);
            },
            &["--set=router.policy=\"round_robin\""],
        );
        for _ in 0..2 {
            let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
            assert_eq!(
                (got.status, got.text()),
                (200, String::from_utf8_lossy(WHOLE).into_owned()),
                "{shown}"
            );
        }
        assert!(!one.seen().is_empty(), "{shown}");
        let retries = server.metric("slipstream_engine_retries_total");
        assert_eq!(retries as usize, one.seen().len(), "{shown}");
        // No other engine: an error, not a 200.
        let alone = Engine::start(move |_, to| say(to, &bad));
        let server = front(&[&alone], &[]);
        let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
        assert!(matches!(got.status, 502 | 503), "{shown}: {}", got.status);
    }
    // A good one passes however it is framed.
    for good in [chunked(body, true), until_close("application/json", body)] {
        let engine = Engine::start(move |_, to| say(to, &good));
        let server = front(&[&engine], &[]);
        let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
        assert_eq!((got.status, got.text().as_bytes()), (200, &body[..]));
    }
}

#[test]
fn redirects_stay_between_router_and_engine() {
    for status in [
        "301 Moved",
        "302 Found",
        "307 Temporary Redirect",
        "308 Permanent Redirect",
    ] {
        let engine = Engine::start(move |_, to| {
            let location = "location: http://10.1.2.3:8000/v1/completions\r\n";
            answer(to, status, location, b"");
        });
        let server = front(&[&engine], &["--set=upstream.failures_max=1"]);
        let got = server.post("/v1/completions/", r#"{"model":"m","prompt":"x"}"#);
        assert_eq!(
            (got.status, got.header("location")),
            (502, None),
            "{status}"
        );
        assert_eq!(got.json()["error"]["code"], "engine_redirects");
        assert!(!got.text().contains("10.1.2.3"), "{}", got.text());
        assert_eq!(engine.seen().len(), 1, "not retried");
        assert_eq!(server.metric("slipstream_engine_failures_total"), 0.0);
    }
}

#[test]
fn a_clients_base_url_is_an_engine() {
    let engine = Engine::start(|_, to| answer(to, "200 OK", "", WHOLE));
    for suffix in ["/v1", "/v1/"] {
        let flag = format!("{}{suffix}", engine.flag());
        let server = Server::start(&[&[flag.as_str(), "--set=live.shards=1"]]);
        assert_eq!(server.post("/v1/completions", "{}").status, 200, "{suffix}");
        assert_eq!(
            engine.seen().last().unwrap().line,
            "POST /v1/completions HTTP/1.1"
        );
    }
}

/// An engine that wants a key for everything below `/v1`, as `vllm serve --api-key`.
fn keyed(key: &'static str) -> Engine {
    Engine::keyed(key, |_, to| answer(to, "200 OK", "", WHOLE))
}

#[test]
fn an_engine_that_wants_a_key_is_alive_and_gets_that_of_the_client() {
    let engine = keyed("Bearer theirs");
    let server = front(&[&engine], &[]);
    let health = || server.get("/health").json()["engines"][0].clone();
    let begun = Instant::now();
    while health()["state"] != "up" {
        assert!(begun.elapsed() < PATIENCE, "{}", health());
        std::thread::yield_now();
    }
    let hint = health()["hint"].as_str().unwrap_or_default().to_owned();
    assert!(
        hint.contains("401") && hint.contains("api_key_file"),
        "{hint}"
    );
    let body = r#"{"model":"m","prompt":"x"}"#;
    let keys = ["authorization: Bearer theirs"];
    let got = server
        .connect()
        .send("POST", "/v1/completions", &keys, body.as_bytes());
    assert_eq!(got.status, 200);
    assert_eq!(
        server.post("/v1/completions", body).status,
        401,
        "the engine's answer"
    );
    // With keys of its own the router keeps those of clients, so no request could be answered.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    std::fs::write(&path, "mine\n").unwrap();
    let flag = format!("--set=live.api_keys_file={}", path.display());
    let server = front(&[&engine], &[flag.as_str()]);
    let health = server.get("/health").json()["engines"][0].clone();
    assert_eq!(health["state"], "down");
    let failure = health["last_failure"].as_str().unwrap();
    assert!(
        failure.contains("401") && failure.contains("api_key_file"),
        "{failure}"
    );
}

#[test]
fn a_connection_that_breaks_on_reuse_is_replaced() {
    // It closes, or resets, each connection at its second request: before a byte of the answer.
    for resets in [false, true] {
        let engine = Engine::reused(move |number, _, to| {
            if number == 0 {
                answer(to, "200 OK", "", WHOLE);
                return true;
            }
            if resets {
                reset(to);
            }
            false
        });
        let server = front(
            &[&engine],
            &[
                "--set=upstream.retry_budget=0",
                "--set=upstream.retries_max=0",
            ],
        );
        for turn in 0..6 {
            let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
            assert_eq!(got.status, 200, "{resets}, {turn}: {}", got.text());
        }
        assert!(engine.seen().len() > 6, "connections were used again");
        assert_eq!(server.metric("slipstream_engine_failures_total"), 0.0);
    }
}

/// A sequence of numbers from a seed.
struct Draws(u64);

impl Draws {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = slipstream_base::mix::mix64(self.0.wrapping_add(0x9E37_79B9_7F4A_7C15));
        self.0 % below
    }
}

/// Half of an answer of several choices is no answer, however the number of choices is written.
#[test]
fn an_answer_has_as_many_choices_as_vllm_reads() {
    for (more, is_whole) in [
        ("", true),
        (r#","n":1.0"#, true),
        (r#","n":"1""#, true),
        (r#","n":2"#, false),
        (r#","n":2.0"#, false),
        (r#","n":"2""#, false),
        (r#","n":" +2 ""#, false),
        (r#","n":1,"n":"2""#, false),
        (r#","n":"2","top_p":NaN"#, false), // Python reads it
    ] {
        for cut in [false, true] {
            let answer = text_event("a", " a") + &last_event("a", " time", "stop");
            let (server, _one, _two, log) = pair(
                move |_, to| {
                    say(to, EVENTS);
                    chunk(to, &answer);
                    if !cut {
                        end(to);
                    }
                },
                |_, _| {},
                &[],
            );
            let body = format!(r#"{{"model":"m","prompt":"x","stream":true{more}}}"#);
            let events = completions(&server, &body);
            let lost = events.iter().any(|event| event.contains("stream_lost"));
            assert_eq!(
                (lost, events.last().unwrap().as_str()),
                (!is_whole, "[DONE]"),
                "{more} {events:?}"
            );
            let ends = if is_whole { "complete" } else { "broken" };
            assert_eq!(log.lines(1)[0]["end"], ends, "{more}");
        }
    }
}

/// Answers that the router judges come uncompressed.
#[test]
fn engines_do_not_compress_what_must_be_judged() {
    let (server, one, _two, _log) = pair(
        |_, to| answer(to, "200 OK", "content-type: application/json\r\n", WHOLE),
        |_, _| {},
        &[],
    );
    for (path, is_judged) in [
        ("/v1/completions", true),
        ("/v1/chat/completions", true),
        ("/v1/responses", true),
        ("/v1/messages", true),
        ("/v1/embeddings", false),
    ] {
        let headers = [FIRST, &["accept-encoding: gzip, br"]].concat();
        server.connect().send(
            "POST",
            path,
            &headers,
            br#"{"model":"m","prompt":"x","input":"x"}"#,
        );
        let seen = one.seen();
        assert_eq!(
            seen.last().unwrap().header("accept-encoding") == Some("identity"),
            is_judged,
            "{path}"
        );
    }
}

/// Engines that end in ways drawn from a seed, cut into chunks that are drawn, before one that answers: the client gets
/// the whole text and one `[DONE]`, or, as the request allows no continuation, the text so far and an error.
#[test]
fn drawn_endings_reach_the_client_as_one_answer() {
    let seed = std::env::var("PROPTEST_RNG_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let cases: u64 = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|of| of.parse().ok())
        .unwrap_or(60);
    const WORDS: [&str; 6] = [" one", " zwö", " 三", " четыре", " five", " 🙂"];
    let known = Arc::new(Mutex::new(BTreeSet::new()));
    let script = move |request: &Seen, to: &mut TcpStream| {
        let body = request.json();
        let prompt = body["prompt"].as_str().unwrap().to_owned();
        let seed = body["seed"].as_u64().unwrap();
        let mut draws = Draws(seed);
        // Later requests of an answer are answered well.
        let fails = known.lock().unwrap().insert(seed);
        let done = prompt.split(' ').count() - 1;
        let line = ["\n", "\r\n", "\r"][draws.next(3) as usize];
        let (ending, cut) = (draws.next(12), draws.next(WORDS.len() as u64 + 1) as usize);
        let mut text = String::new();
        for (number, word) in WORDS.iter().enumerate().skip(done) {
            if fails && number == cut {
                break;
            }
            let reason = if number + 1 == WORDS.len() {
                "\"stop\""
            } else {
                "null"
            };
            let json = format!(
                r#"{{"id":"{prompt}","created":1,"choices":[{{"index":0,"text":"{word}","finish_reason":{reason}}}]}}"#
            );
            let event = match draws.next(4) {
                0 => format!(": comment\nid: {number}\ndata: {json}\n\n"),
                1 => format!("data:{}\n\n", json.replacen(',', ",\ndata:", 2)),
                2 => format!(": comment\n\nretry: 5\nevent: m\ndata: {json}\n: c\n\n"),
                _ => format!("data: {json}\n\n"),
            };
            text.push_str(&event);
        }
        if !fails {
            text += DONE;
        } else if cut < WORDS.len() {
            text += match ending {
                0 => DEAD,
                1 => "event: error\ndata: {\"message\":\"dead\",\"code\":\"internal\"}\n\n",
                2 => {
                    "data: {\"choices\":[{\"index\":0,\"text\":\"no\",\"finish_reason\":\"abort\"}]}\n\n"
                }
                3 => "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"te",
                6 => "data: {\"detail\":\"Internal Server Error\"}\n\n",
                7 => "data: {\"message\": \"dead\", \"status\": 500}\n\ndata: [DONE]\n\n",
                8 => "data: Internal Server Error\n\ndata: [DONE]\n\n",
                9 => "{\"error\":{\"message\":\"dead\",\"code\":502}}\n\ndata: [DONE]\n\n",
                10 => {
                    "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"tedata: {\"error\":{\"code\":502}}\n\ndata: [DONE]\n\n"
                }
                11 => {
                    "data: {\"error\":{\"message\":\"x\",\"type\":\"invalid_response_error\"}}\n\ndata: [DONE]\n\n"
                }
                _ => "",
            };
        } else if ending % 2 == 0 {
            text += "data: [DONE]\n\ndata: behind\n\n";
        }
        let text = text.replace('\n', line);
        let framing = draws.next(4);
        match framing {
            0 => say(
                to,
                b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
            ),
            1 => {
                say(to, b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n");
                say(to, EVENTS);
            }
            _ => say(to, EVENTS),
        }
        // Within characters, within CR LF, and within anything else.
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let most = [3, 40, 4_000][draws.next(3) as usize];
            let (piece, after) = rest.split_at(rest.len().min(1 + draws.next(most) as usize));
            if framing == 0 {
                say(to, piece);
            } else {
                say(
                    to,
                    &[
                        format!("{:X};x=y\r\n", piece.len()).as_bytes(),
                        piece,
                        b"\r\n",
                    ]
                    .concat(),
                );
            }
            rest = after;
        }
        let is_clean = !fails || !matches!(ending, 4 | 5);
        match framing {
            0 => to.shutdown(std::net::Shutdown::Both).unwrap_or_default(),
            2 if is_clean => say(to, b"0\r\nX-Trailer: 1\r\n\r\n"),
            _ if is_clean => end(to),
            _ => {}
        }
    };
    let (one, two) = (Engine::start(script.clone()), Engine::start(script));
    let flags = [
        "--set=upstream.failures_max=1000000",
        "--set=upstream.resume=\"text\"",
    ];
    let server = front(&[&one, &two], &flags);
    let mut draws = Draws(seed.unwrap_or(1));
    for _ in 0..cases {
        let (seed, continues) = (draws.next(1 << 40), draws.next(4) > 0);
        let more = if continues { "" } else { ",\"logprobs\":1" };
        let body = format!(
            r#"{{"model":"m","prompt":"go","seed":{seed},"max_tokens":99,"stream":true{more}}}"#
        );
        let got = server.post("/v1/completions", &body).text();
        let plain = got.replace("\r\n", "\n").replace('\r', "\n");
        let (mut texts, mut done, mut lost) = (String::new(), 0, 0);
        for event in plain.split("\n\n") {
            let data: Vec<&str> = event
                .lines()
                .filter_map(|line| line.strip_prefix("data:"))
                .collect();
            let data = data.join("\n");
            match data.trim() {
                "" => {}
                "[DONE]" => done += 1,
                data => {
                    let event: Value = serde_json::from_str(data)
                        .unwrap_or_else(|e| panic!("{e}: {data}, {seed}"));
                    lost += usize::from(event["error"]["code"] == "stream_lost");
                    texts += event["choices"][0]["text"].as_str().unwrap_or_default();
                }
            }
        }
        let whole = WORDS.concat();
        assert_eq!(done, 1, "seed {seed}: {got}");
        if lost == 0 {
            assert_eq!(texts, whole, "seed {seed}: {got}");
        } else {
            assert!(
                !continues && whole.starts_with(&texts),
                "seed {seed}: {got}"
            );
        }
    }
}

/// Every API: its path, a body for a stream, and the events of a complete answer.
fn apis() -> [(&'static str, &'static str, String); 4] {
    let event =
        |kind: &str, more: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{more}}}\n\n");
    [
        (
            "/v1/completions",
            STREAM,
            text_event("b", "good") + &last_event("b", "", "stop") + DONE,
        ),
        (
            "/v1/chat/completions",
            r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}"#,
            (text_event("b", "good") + &last_event("b", "", "stop"))
                .replace("\"text\":\"good\"", "\"delta\":{\"content\":\"good\"}")
                .replace("\"text\":\"\"", "\"delta\":{}")
                + DONE,
        ),
        (
            "/v1/responses",
            r#"{"model":"m","input":"x","stream":true,"store":false}"#,
            event("response.output_text.delta", ",\"delta\":\"good\"")
                + &event("response.completed", ""),
        ),
        (
            "/v1/messages",
            r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":1,"stream":true}"#,
            event("content_block_delta", ",\"delta\":{\"text\":\"good\"}")
                + &event("message_delta", ",\"delta\":{\"stop_reason\":\"end_turn\"}")
                + &event("message_stop", ""),
        ),
    ]
}

/// Of each API, whatever keeps its connection open before: an engine's failure before the first token is another engine's
/// request. The shapes are drawn in `upstream/tests/errors.rs`.
#[test]
fn failures_of_any_shape_before_the_first_token_are_retried() {
    const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
    const PROBLEM: &str =
        "data: {\"type\":\"about:blank\",\"title\":\"Bad Gateway\",\"status\":502}\n\n";
    const OVERLOADED: &str = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"x\"}}\n\n";
    let failures: [&[&str]; 12] = [
        &[PING, OVERLOADED],
        &[": waiting\n\n", PING, PROBLEM],
        &[PING, "data: {\"conversation_id\":1}\n\n"],
        &[PING],
        &[": waiting\n\n"],
        &[DONE],
        &["data: {\"Error\":\"x\"}\n\n", DONE],
        &["data: {\"error_code\":500,\"error_msg\":\"x\"}\n\n", DONE],
        &["data: {\"internalServerException\":{\"message\":\"x\"}}\n\n"],
        &["{\"error\":\"x\"}\n", DONE],
        &["data: {\"error\":{\"message\":\"x\"}}\n", DONE],
        &["data: {\"type\":\"x\"}\n\n", DONE],
    ];
    for (path, body, good) in apis() {
        let turn = Arc::new(Mutex::new(0));
        let at_bad = turn.clone();
        let (server, bad, two, log) = pair(
            move |_, to| stream(to, failures[*at_bad.lock().unwrap()]),
            {
                let good = good.clone();
                move |_, to| stream(to, &[&good])
            },
            &[
                "--set=upstream.failures_max=1000",
                "--set=upstream.retry_budget=1",
            ],
        );
        for (number, failure) in failures.iter().enumerate() {
            *turn.lock().unwrap() = number;
            let got = post(&server, path, body).text();
            assert!(got.ends_with(&good), "{path} {failure:?}: {got}");
            let before = got.strip_suffix(&good).unwrap();
            let waits: String = failure
                .iter()
                .copied()
                .filter(|of| !is_failure(of))
                .collect();
            assert!(waits.starts_with(before), "{path} {failure:?}: {got}");
            let failed = server.metric("slipstream_engine_failures_total");
            assert_eq!(failed, (number + 1) as f64, "{path} {failure:?}");
        }
        assert_eq!(
            (bad.seen().len(), two.seen().len()),
            (failures.len(), failures.len())
        );
        for line in log.lines(failures.len()) {
            assert_eq!(line["end"], "complete", "{path}: {line}");
            let moved = line["retries"].as_u64().unwrap() + line["resumes"].as_u64().unwrap();
            assert_eq!(moved, 1, "{path}: {line}");
        }
    }
}

/// Whether an event is none that may pass: a comment, a ping, or what no API has.
fn is_failure(event: &str) -> bool {
    event.contains("rror") || event.contains("title") || event.contains("xception") || event == DONE
}

#[test]
fn whole_answers_that_are_none_are_retried() {
    let json = |body: &str| {
        format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let bad = [
        "HTTP/1.1 204 No Content\r\n\r\n".to_owned(),
        "HTTP/1.1 205 Reset Content\r\ncontent-length: 0\r\n\r\n".to_owned(),
        "HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\n{}".to_owned(),
        json("{\"choices\":[]}"),
        json("{\"choices\":null}"),
        json("{\"choices\":[{\"text\":\"a\",\"finish_reason\":null}]}"),
        json("{\"choices\":[{\"text\":\"\",\"finish_reason\":null,\"error\":{\"code\":502,\"message\":\"x\"}}]}"),
        json("{\"type\":\"about:blank\",\"title\":\"Bad Gateway\",\"status\":502}"),
        json("Internal Server Error"),
        "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\n\x1f\x08\0".to_owned(),
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: br\r\ncontent-length: 3\r\n\r\nxyz"
            .to_owned(),
    ];
    for bad in bad {
        let shown = bad.clone();
        let (server, one, _two, log) = pair(
            move |_, to| say(to, bad.as_bytes()),
            |seen, to| {
                assert_eq!(seen.header("accept-encoding"), Some("identity"));
                answer(to, "200 OK", "", WHOLE);
            },
            &[],
        );
        let headers = [FIRST[0], "accept-encoding: gzip, br"];
        let body = br#"{"model":"m","prompt":"x"}"#;
        let got = server
            .connect()
            .send("POST", "/v1/completions", &headers, body);
        assert_eq!((got.status, got.text().as_bytes()), (200, WHOLE), "{shown}");
        assert_eq!(one.seen().len(), 1, "{shown}");
        assert_eq!(
            server.metric("slipstream_engine_failures_total"),
            1.0,
            "{shown}"
        );
        assert_eq!(log.lines(1)[0]["retries"], 1, "{shown}");
    }
    // What the router does not read may be compressed, and what is named as not compressed is read.
    let engine = Engine::start(|seen, to| {
        if seen.line.contains("/v1/score") {
            assert_eq!(seen.header("accept-encoding"), Some("gzip"));
            return answer(to, "200 OK", "content-encoding: gzip\r\n", b"\x1f\x08\0");
        }
        answer(to, "200 OK", "content-encoding: identity\r\n", WHOLE);
    });
    let server = front(&[&engine], &[]);
    for path in ["/v1/score", "/v1/completions"] {
        let headers = ["accept-encoding: gzip"];
        let got = server
            .connect()
            .send("POST", path, &headers, b"{\"model\":\"m\"}");
        assert_eq!(got.status, 200, "{path}: {}", got.text());
    }
}
