//! Requests that wait: for an engine that only keeps its connections open, and for one that is silent as the server stops.
//! And requests that must not be sent twice. Scripted engines, on loopback.

use std::net::TcpStream;
use std::sync::{Arc, Mutex, mpsc};

use serde_json::Value;

use crate::engines::{
    EVENTS, Engine, Seen, WHOLE, answer, chunk, front, say, stream_texts, text_event,
};
use crate::server::Server;

const COMPLETION: &str = r#"{"model":"m","prompt":"x","temperature":0,"max_tokens":9}"#;
const STREAMED: &str = r#"{"model":"m","prompt":"x","temperature":0,"max_tokens":9,"stream":true}"#;

/// Sends `piece` until the router hangs up.
fn keep_open(stream: &mut TcpStream, piece: &str) {
    use std::io::Write;
    while write!(stream, "{:x}\r\n{piece}\r\n", piece.len()).is_ok() {
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
}

#[test]
fn what_keeps_a_connection_open_does_not_keep_a_request_waiting() {
    let pieces = [
        ": keep-alive\n\n",
        "\n",
        "data:\n\n",
        "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        ": k",
    ];
    for piece in pieces {
        // Before an answer begins, a comment without an end is nothing yet.
        for events in if piece == ": k" { 1..3 } else { 0..3 } {
            let engine = Engine::start(move |_, to| {
                say(to, EVENTS);
                for number in 0..events {
                    chunk(to, &text_event("a", &format!(" t{number}")));
                }
                keep_open(to, piece);
            });
            let limits = [
                "--set=upstream.idle_timeout_s=0.2",
                "--set=upstream.resume=\"off\"",
            ];
            let server = front(&[&engine], &limits);
            let got = server.post("/v1/completions", STREAMED).text();
            let shown = format!("{piece:?} {got:?}");
            assert!(got.contains("nothing for 200ms"), "{shown}");
            assert!(got.ends_with("data: [DONE]\n\n"), "{shown}");
        }
    }
    // The answer may come after any number of comments, each within the limit of the answer.
    let engine = Engine::start(move |_, to| {
        say(to, EVENTS);
        for _ in 0..500 {
            chunk(to, ": keep-alive\n\n");
        }
        chunk(to, &text_event("a", " t"));
        chunk(to, "data: [DONE]\n\n");
        say(to, b"0\r\n\r\n");
    });
    let server = front(&[&engine], &[]);
    let got = server.post("/v1/completions", STREAMED).text();
    assert!(got.starts_with(": keep-alive\n\n") && got.ends_with("data: [DONE]\n\n"));
}

#[test]
fn a_continuation_without_an_answer_is_given_up_after_the_idle_limit() {
    // Several tokens in one event: the other engine's first token must show whether they end with a whole character.
    const SOME: &str = "data: {\"id\":\"a\",\"choices\":[{\"index\":0,\"text\":\" ab\",\"finish_reason\":null,\
                        \"prompt_token_ids\":[1,2],\"token_ids\":[8,9]}]}\n\n";
    let body = STREAMED.replace("\"x\"", "[1,2]").replace("0,", "1,");
    for piece in [": keep-alive\n\n", "\r\n", "event: ping\n\n"] {
        let first = Engine::start(|_, to| {
            say(to, EVENTS);
            chunk(to, SOME);
        });
        let second = Engine::start(move |_, to| {
            say(to, EVENTS);
            keep_open(to, piece);
        });
        let limit = ["--set=upstream.idle_timeout_s=0.2"];
        let server = front(&[&first, &second], &limit);
        let to = ["x-slipstream-worker: w0"];
        let got = server
            .connect()
            .send("POST", "/v1/completions", &to, body.as_bytes());
        let got = got.text();
        assert!(got.starts_with("data: {\"id\":\"a\""), "{piece:?} {got:?}");
        assert!(got.contains("nothing for 200ms"), "{piece:?} {got:?}");
        assert!(got.ends_with("data: [DONE]\n\n"), "{piece:?} {got:?}");
        assert!(!second.seen().is_empty(), "{piece:?}");
    }
}

/// A script that says `begun` as a request arrives, and nothing to the router until it hangs up.
fn silent(begun: mpsc::Sender<()>) -> impl Fn(&Seen, &mut TcpStream) + Send + Sync + 'static {
    let begun = Mutex::new(begun);
    move |_, to| {
        let _ = begun.lock().unwrap().send(());
        let _ = std::io::Read::read(to, &mut [0]);
    }
}

#[test]
fn requests_that_wait_as_the_server_stops_are_told_so() {
    // Whole answers, streams without a byte, and streams that continue elsewhere.
    let cases = [(COMPLETION, false), (STREAMED, false), (STREAMED, true)];
    for (body, breaks) in cases {
        let (send, begun) = mpsc::channel();
        let first = Engine::start(move |_, to| {
            say(to, EVENTS);
            chunk(to, &text_event("a", " one"));
            let _ = socket2::SockRef::from(&*to).set_linger(Some(std::time::Duration::ZERO));
        });
        let second = Engine::start(silent(send));
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("access.log");
        let flags = [
            "--set=live.drain_timeout_s=0.5".to_owned(),
            format!("--set=live.access_log={}", log.display()),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let engines = if breaks {
            vec![&first, &second]
        } else {
            vec![&second]
        };
        let server: Server = front(&engines, &flags);
        let address = server.address();
        let client = std::thread::spawn(move || {
            let mut client = crate::server::Client::connect(address);
            let to = ["x-slipstream-worker: w0"];
            client.send("POST", "/v1/completions", &to, body.as_bytes())
        });
        begun.recv().unwrap();
        assert!(server.terminate().success());
        let got = client.join().unwrap();
        let line: Value =
            serde_json::from_str(std::fs::read_to_string(&log).unwrap().trim()).unwrap();
        if breaks {
            let events = got.events();
            assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
            assert!(events[events.len() - 2].contains("stopping"), "{events:?}");
            assert_eq!(line["end"], "broken");
        } else {
            assert_eq!(
                (got.status, got.json()["error"]["code"].as_str()),
                (503, Some("stopping"))
            );
            assert_eq!(
                (&line["end"], &line["status"]),
                (&"refused".into(), &503.into())
            );
        }
    }
}

#[test]
fn requests_with_effects_reach_one_engine_once() {
    let cases = [
        ("POST", "/v1/files", false),
        ("POST", "/v1/batches", false),
        ("POST", "/v1/fine_tuning/jobs", false),
        ("POST", "/v1/responses", true),
        ("DELETE", "/v1/files/file-1", false),
        ("PUT", "/v1/unheard_of", false),
        ("GET", "/v1/files", true),
        ("POST", "/v1/embeddings", true),
        ("POST", "/rerank", true),
    ];
    for (method, path, repeats) in cases {
        // It is lost after it has read the request, also on a connection that was used before.
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let (at_lost, at_good) = (lines.clone(), lines.clone());
        let lost = Engine::reused(move |number, seen: &Seen, to| {
            at_lost.lock().unwrap().push(seen.line.clone());
            let is_first = number == 0 && seen.line.contains("/v1/score");
            if is_first {
                answer(to, "200 OK", "", WHOLE);
            }
            is_first
        });
        let good = Engine::start(move |seen, to| {
            at_good.lock().unwrap().push(seen.line.clone());
            answer(to, "200 OK", "", WHOLE);
        });
        let server = front(&[&lost, &good], &[]);
        let to = ["x-slipstream-worker: w0"];
        let send = |path: &str, method: &str| {
            let body: &[u8] = if method == "GET" {
                b""
            } else {
                b"{\"model\":\"m\",\"input\":\"x\"}"
            };
            server.connect().send(method, path, &to, body)
        };
        assert_eq!(send("/v1/score", "POST").status, 200);
        let got = send(path, method);
        let line = format!("{method} {path} ");
        let seen = lines.lock().unwrap().clone();
        let all = seen.iter().filter(|of| of.starts_with(&line)).count();
        if repeats {
            assert_eq!(
                (got.status, all > 1),
                (200, true),
                "{method} {path}: {seen:?}"
            );
        } else {
            assert_eq!(
                (got.status, all),
                (502, 1),
                "{method} {path}: {}",
                got.text()
            );
        }
    }
    // Without a connection nothing was sent, so another engine gets it.
    let good = Engine::start(|_, to| stream_texts(to, "a", &["x"]));
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = Engine::serving("m", closed, |_, _| {});
    let server = front(&[&dead, &good], &["--set=upstream.health_interval_s=60"]);
    drop(dead);
    let got = server
        .connect()
        .send("POST", "/v1/files", &["x-slipstream-worker: w0"], b"x");
    assert_eq!((got.status, good.seen().len()), (200, 1), "{}", got.text());
}
