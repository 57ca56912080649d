//! `slipstream serve` in front of engines that answer by a script, on loopback.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use slipstream_events::kv::ExternalHash;
use slipstream_events::{BlockStored, KvEvent, KvEventBatch};
use slipstream_frontend::text::{ChatOptions, Message, TextModel};

use crate::attacks::Http2;
use crate::server::{FAST, Server, run, slipstream};

/// Time limit, longer than any operation here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A request as an engine got it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) line: String,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }
}

/// An engine's treatment of a request that is neither a health check nor a question for models. Its return
/// closes the connection.
type Script = Box<dyn Fn(&Seen, &mut TcpStream) + Send + Sync>;

/// An engine that answers by a script.
pub(crate) struct Engine {
    pub(crate) address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    over: Arc<AtomicBool>,
}

impl Engine {
    pub(crate) fn start(script: impl Fn(&Seen, &mut TcpStream) + Send + Sync + 'static) -> Engine {
        Engine::serving("m", TcpListener::bind("127.0.0.1:0").unwrap(), script)
    }

    pub(crate) fn serving(
        model: &'static str,
        listener: TcpListener,
        script: impl Fn(&Seen, &mut TcpStream) + Send + Sync + 'static,
    ) -> Engine {
        let address = listener.local_addr().unwrap();
        let engine = Engine {
            address,
            seen: Arc::default(),
            over: Arc::default(),
        };
        let (seen, over) = (engine.seen.clone(), engine.over.clone());
        let script: Arc<Script> = Arc::new(Box::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Relaxed) {
                    return;
                }
                let (seen, script) = (seen.clone(), script.clone());
                let stream = stream.expect("a connection");
                std::thread::spawn(move || converse(model, stream, &seen, &script));
            }
        });
        engine
    }

    /// An engine that wants `key` for all that is below `/v1`.
    pub(crate) fn keyed(
        key: &'static str,
        script: impl Fn(&Seen, &mut TcpStream) + Send + Sync + 'static,
    ) -> Engine {
        Engine::custom(move |_, request, stream| {
            if request.line.starts_with("GET /health ") {
                answer(stream, "200 OK", "", b"");
            } else if request.header("authorization") == Some(key) {
                script(request, stream);
            } else {
                answer(
                    stream,
                    "401 Unauthorized",
                    "",
                    b"{\"error\":\"Unauthorized\"}",
                );
            }
            true
        })
    }

    /// An engine whose connections carry several requests: `script` gets the number of each, and false closes.
    pub(crate) fn reused(
        script: impl Fn(usize, &Seen, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Engine {
        Engine::custom(move |number, request, stream| {
            if request.line.starts_with("GET /health ") {
                answer(stream, "200 OK", "", b"");
            } else if request.line.starts_with("GET /v1/models ") {
                let list = br#"{"object":"list","data":[{"id":"m","owned_by":"vllm"}]}"#;
                answer(stream, "200 OK", "", list);
            } else {
                return script(number, request, stream);
            }
            true
        })
    }

    /// An engine that treats each request of each connection by `script`.
    fn custom(
        script: impl Fn(usize, &Seen, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Engine {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let engine = Engine {
            address,
            seen: Arc::default(),
            over: Arc::default(),
        };
        let (seen, over) = (engine.seen.clone(), engine.over.clone());
        let script = Arc::new(script);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Relaxed) {
                    return;
                }
                let (seen, script) = (seen.clone(), script.clone());
                let mut stream = stream.expect("a connection");
                std::thread::spawn(move || {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    let mut number = 0;
                    while let Some(request) = read_request(&mut reader) {
                        if request.line.starts_with("POST ") {
                            seen.lock().unwrap().push(request.clone());
                        }
                        if !script(number, &request, &mut stream) {
                            return;
                        }
                        number += 1;
                    }
                });
            }
        });
        engine
    }

    pub(crate) fn flag(&self) -> String {
        format!("--engine=http://{}", self.address)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

/// Serves one connection until its client closes it or a script was run.
fn converse(model: &str, mut stream: TcpStream, seen: &Mutex<Vec<Seen>>, script: &Script) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(request) = read_request(&mut reader) {
        if request.line.starts_with("GET /health ") {
            answer(&mut stream, "200 OK", "", b"");
        } else if request.line.starts_with("GET /v1/models ") {
            let list =
                format!(r#"{{"object":"list","data":[{{"id":"{model}","owned_by":"vllm"}}]}}"#);
            answer(&mut stream, "200 OK", "", list.as_bytes());
        } else {
            seen.lock().unwrap().push(request.clone());
            script(&request, &mut stream);
            return;
        }
    }
}

pub(crate) fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Seen> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|&read| read > 0)?;
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let Some((name, value)) = header.trim_end().split_once(": ") else {
            break;
        };
        headers.push((name.to_lowercase(), value.to_owned()));
    }
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length = length.map_or(0, |(_, value)| value.parse().expect("a length"));
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Seen {
        line: line.trim_end().to_owned(),
        headers,
        body,
    })
}

/// Writes what the router may have hung up on.
pub(crate) fn say(stream: &mut TcpStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
}

pub(crate) fn answer(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let head = format!(
        "HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    say(stream, &[head.as_bytes(), body].concat());
}

/// A complete answer that is not streamed, of whichever API.
pub(crate) const WHOLE: &[u8] =
    b"{\"object\":\"response\",\"type\":\"message\",\"choices\":[{\"text\":\"\",\"finish_reason\":\"stop\"}]}";

/// Answers with `text`, not streamed.
pub(crate) fn say_text(stream: &mut TcpStream, text: &str) {
    let choice = serde_json::json!({"index": 0, "text": text, "finish_reason": "stop"});
    let body = serde_json::json!({"choices": [choice]}).to_string();
    answer(stream, "200 OK", "", body.as_bytes());
}

pub(crate) const EVENTS: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

pub(crate) fn chunk(stream: &mut TcpStream, data: &str) {
    say(stream, format!("{:x}\r\n{data}\r\n", data.len()).as_bytes());
}

pub(crate) fn text_event(id: &str, text: &str) -> String {
    format!(
        "data: {{\"id\":\"{id}\",\"created\":1,\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":null}}]}}\n\n"
    )
}

/// A stream with the whole of `texts`, and its end.
pub(crate) fn stream_texts(stream: &mut TcpStream, id: &str, texts: &[&str]) {
    say(stream, EVENTS);
    for text in texts {
        chunk(stream, &text_event(id, text));
    }
    chunk(stream, "data: [DONE]\n\n");
    say(stream, b"0\r\n\r\n");
}

pub(crate) fn front(engines: &[&Engine], more: &[&str]) -> Server {
    let flags: Vec<String> = engines.iter().map(|engine| engine.flag()).collect();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Server::start(&[&flags, more, &["--set=live.shards=1"]])
}

/// Texts of the events of an answer, joined.
pub(crate) fn text_of(events: &[String]) -> String {
    let parsed = events.iter().filter(|event| *event != "[DONE]");
    let texts = parsed.map(|event| {
        let event: serde_json::Value = serde_json::from_str(event).expect("JSON");
        let choice = &event["choices"][0];
        let text = choice["text"]
            .as_str()
            .or(choice["delta"]["content"].as_str());
        text.unwrap_or_default().to_owned()
    });
    texts.collect()
}

pub(crate) const STREAM: &str =
    r#"{"model":"m","prompt":"Once upon","max_tokens":9,"stream":true}"#;

#[test]
fn requests_and_answers_pass_byte_for_byte() {
    let engine = Engine::start(|_, stream| {
        let headers =
            "content-type: application/json\r\nx-engine: 7\r\nconnection: x-hop\r\nx-hop: 1\r\n";
        answer(
            stream,
            "418 I'm a teapot",
            headers,
            b"{ \"error\" : \"\\u00e9\" }\n",
        );
    });
    let server = front(&[&engine], &[]);
    let body = r#" { "odd":[1.50,1E2,null,{"a":{}}], "model":"m", "prompt" : "caf\u00e9 日本","prompt":"twice",
        "tools":[{"x":"\ud83d\ude00"}],"max_tokens":"seven"} "#;
    let headers = [
        "X-Custom: a b",
        "Authorization: Bearer theirs",
        "Connection: keep-alive, x-mine",
        "X-Mine: 1",
    ];
    let got = server
        .connect()
        .send("POST", "/v1/completions?a=b%20c", &headers, body.as_bytes());
    assert_eq!(got.status, 418);
    assert_eq!(got.text(), "{ \"error\" : \"\\u00e9\" }\n");
    assert_eq!(got.header("x-engine"), Some("7"));
    assert_eq!(got.header("x-hop"), None);
    let seen = &engine.seen()[0];
    assert_eq!(seen.line, "POST /v1/completions?a=b%20c HTTP/1.1");
    assert_eq!(seen.body, body.as_bytes());
    assert_eq!(seen.header("x-custom"), Some("a b"));
    assert_eq!(seen.header("x-mine"), None);
    assert_eq!(
        seen.header("host"),
        Some(engine.address.to_string().as_str())
    );
    // The router checks no keys, so it is the engine's.
    assert_eq!(seen.header("authorization"), Some("Bearer theirs"));
    // A body that is no JSON is the engine's to refuse, and any path under /v1 is passed on.
    for (path, body) in [
        ("/v1/audio/speech", "not json"),
        ("/pooling", "{"),
        ("/v2/rerank", ""),
    ] {
        assert_eq!(server.post(path, body).status, 418, "{path}");
        assert_eq!(engine.seen().last().unwrap().body, body.as_bytes());
    }
    for path in ["/sleep", "/v1/load_lora_adapter", "/v2/x", "/shutdown"] {
        assert_eq!(server.post(path, "{}").status, 404, "{path}");
    }
    assert_eq!(engine.seen().len(), 4);
}

#[test]
fn events_arrive_whole_however_the_engine_cuts_them() {
    let engine = Engine::start(|_, stream| {
        say(stream, EVENTS);
        let events = [
            text_event("a", "one"),
            ": comment\r\n\r\n".into(),
            text_event("a", "two"),
        ]
        .concat();
        for piece in events.as_bytes().chunks(7) {
            chunk(stream, std::str::from_utf8(piece).unwrap());
        }
        chunk(stream, "data: [DONE]\n\n");
        say(stream, b"0\r\n\r\n");
    });
    let server = front(&[&engine], &[]);
    let got = server.post("/v1/completions", STREAM);
    let expected = [
        text_event("a", "one"),
        ": comment\r\n\r\n".into(),
        text_event("a", "two"),
        "data: [DONE]\n\n".into(),
    ];
    assert_eq!(got.text(), expected.concat());
    assert_eq!(
        got.header("content-type"),
        Some("text/event-stream; charset=utf-8")
    );
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn a_client_that_leaves_takes_its_request_off_the_engine() {
    let (say_begun, begun) = mpsc::channel();
    let (say_closed, closed) = mpsc::channel();
    let senders = Mutex::new((say_begun, say_closed));
    let engine = Engine::start(move |request, stream| {
        if request.json()["stream"] == true {
            say(stream, EVENTS);
            chunk(stream, &text_event("a", "one"));
        }
        senders.lock().unwrap().0.send(()).unwrap();
        // The end of the connection is the only thing that comes.
        let end = stream.read(&mut [0]).map_err(|error| error.kind());
        senders.lock().unwrap().1.send(end).unwrap();
    });
    let server = front(&[&engine], &[]);
    for body in [STREAM, r#"{"model":"m","prompt":"x"}"#] {
        let mut client = server.connect();
        client.write_head("POST", "/v1/completions", &[], body.len());
        client.write(body.as_bytes());
        begun.recv_timeout(PATIENCE).expect("the engine has it");
        if body == STREAM {
            assert_eq!(client.head().status, 200);
            assert!(client.chunk().is_some());
        }
        drop(client);
        let end = closed.recv_timeout(PATIENCE).expect("the connection ends");
        assert_ne!(end, Err(std::io::ErrorKind::WouldBlock));
        server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
    }
}

#[test]
fn a_client_that_does_not_read_stops_the_engine() {
    const TOTAL: usize = 256 << 20;
    let (wrote, engine_wrote) = mpsc::channel();
    let wrote = Mutex::new(wrote);
    let engine = Engine::start(move |_, stream| {
        stream
            .set_write_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        say(stream, EVENTS);
        let event = text_event("a", &"x".repeat(60_000));
        let framed = format!("{:x}\r\n{event}\r\n", event.len());
        let mut sum = 0;
        while sum < TOTAL && stream.write_all(framed.as_bytes()).is_ok() {
            sum += framed.len();
        }
        wrote.lock().unwrap().send(sum).unwrap();
    });
    let server = front(&[&engine], &[]);
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], STREAM.len());
    client.write(STREAM.as_bytes());
    assert_eq!(client.head().status, 200);
    let wrote = engine_wrote
        .recv_timeout(PATIENCE)
        .expect("the engine stops");
    assert!(wrote < TOTAL / 2, "{wrote} bytes are buffered somewhere");
}

/// Two engines: one that does `broken` with each request, and one that answers.
#[track_caller]
fn check_retried(name: &str, broken: impl Fn(&mut TcpStream) + Send + Sync + 'static) {
    let bad = Engine::start(move |_, stream| broken(stream));
    let good = Engine::start(|_, stream| answer(stream, "200 OK", "", WHOLE));
    let server = front(&[&bad, &good], &["--set=router.policy=\"round_robin\""]);
    for turn in 0..4 {
        let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
        assert_eq!(
            (got.status, got.text()),
            (200, String::from_utf8_lossy(WHOLE).into_owned()),
            "{name}, {turn}"
        );
    }
    assert!(!bad.seen().is_empty(), "{name}: it was asked");
    assert_eq!(
        good.seen().len(),
        4,
        "{name}: each request is answered once"
    );
    assert_eq!(
        server.metric("slipstream_engine_retries_total") as usize,
        bad.seen().len(),
        "{name}"
    );
}

#[test]
fn requests_without_a_byte_of_an_answer_go_to_another_engine() {
    check_retried("closes", |_| {});
    check_retried("garbage", |stream| {
        say(stream, b"SSH-2.0-OpenSSH_9\r\n\r\n");
    });
    check_retried("huge head", |stream| {
        say(stream, b"HTTP/1.1 200 OK\r\nx: ");
        say(stream, &vec![b'a'; 200_000]);
    });
    check_retried("half a head", |stream| {
        say(stream, b"HTTP/1.1 200 OK\r\ncontent-");
    });
    check_retried("no event", |stream| say(stream, EVENTS));
    check_retried("half a body", |stream| {
        say(stream, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"ok");
    });
    check_retried("bad chunk", |stream| {
        say(
            stream,
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        );
    });
    check_retried("busy", |stream| {
        answer(stream, "503 Service Unavailable", "", b"full");
    });
}

#[test]
fn what_all_engines_say_reaches_the_client() {
    let busy =
        || Engine::start(|_, stream| answer(stream, "503 Busy", "retry-after: 9\r\n", b"all full"));
    let (one, two) = (busy(), busy());
    let server = front(&[&one, &two], &[]);
    let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
    assert_eq!(got.status, 503);
    assert!(got.error().contains("all full"), "{}", got.text());
    assert_eq!(got.header("retry-after"), Some("9"));
    assert_eq!((one.seen().len(), two.seen().len()), (1, 1));
}

#[test]
fn an_engine_that_never_answers_meets_the_time_limit() {
    let (hold, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let engine = Engine::start(move |_, _| {
        let _ = held.lock().unwrap().recv_timeout(PATIENCE);
    });
    let server = front(&[&engine], &["--set=upstream.first_byte_timeout_s=0.05"]);
    let got = server.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#);
    assert_eq!(got.status, 504);
    assert!(
        got.error().contains("first_byte_timeout_s"),
        "{}",
        got.text()
    );
    drop(hold);
}

#[test]
fn a_stream_continues_on_another_engine() {
    let script = |request: &Seen, stream: &mut TcpStream| {
        let prompt = request.json()["prompt"].as_str().unwrap().to_owned();
        if prompt == "Once upon" {
            say(stream, EVENTS);
            chunk(stream, &text_event("first", " a"));
            chunk(stream, &text_event("first", " time"));
            // Half an event, which the client must not see.
            chunk(stream, "data: {\"id\":\"first\",\"choices\":[{\"te");
        } else {
            assert_eq!(prompt, "Once upon a time");
            assert_eq!(request.json()["max_tokens"], 7);
            stream_texts(stream, "second", &[" there", " was"]);
        }
    };
    let (one, two) = (Engine::start(script), Engine::start(script));
    let server = front(&[&one, &two], &[]);
    // Also if the client named the engine that is lost.
    let named = ["x-slipstream-worker: w1"];
    let got = server
        .connect()
        .send("POST", "/v1/completions", &named, STREAM.as_bytes());
    let events = got.events();
    assert_eq!(two.seen()[0].json()["prompt"], "Once upon");
    assert_eq!(text_of(&events), " a time there was");
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    assert_eq!(events.len(), 5);
    assert!(
        events[..4].iter().all(|event| event.contains("\"first\"")),
        "{events:?}"
    );
    assert_eq!(
        server.metric("slipstream_engine_streams_resumed_total"),
        1.0
    );
    assert_eq!(server.metric("slipstream_engine_answers_broken_total"), 0.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn a_chat_continues_its_message_on_another_engine() {
    let delta = |id: &str, delta: &str| {
        format!(
            "data: {{\"id\":\"{id}\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":null}}]}}\n\n"
        )
    };
    let script = move |request: &Seen, stream: &mut TcpStream| {
        let body = request.json();
        say(stream, EVENTS);
        if body["messages"].as_array().unwrap().len() == 1 {
            chunk(
                stream,
                &delta("first", r#"{"role":"assistant","content":""}"#),
            );
            chunk(stream, &delta("first", r#"{"content":"Hel"}"#));
        } else {
            assert_eq!(body["messages"][1]["content"], "Hel");
            assert_eq!(body["continue_final_message"], true);
            assert_eq!(body["add_generation_prompt"], false);
            assert_eq!(body["odd"], 7);
            chunk(
                stream,
                &delta("second", r#"{"role":"assistant","content":""}"#),
            );
            chunk(stream, &delta("second", r#"{"content":"lo"}"#));
            chunk(stream, "data: [DONE]\n\n");
            say(stream, b"0\r\n\r\n");
        }
    };
    let (one, two) = (Engine::start(script), Engine::start(script));
    let server = front(&[&one, &two], &[]);
    let body = r#"{"model":"m","messages":[{"role":"user","content":"q"}],"stream":true,"odd":7}"#;
    let events = server.post("/v1/chat/completions", body).events();
    assert_eq!(text_of(&events), "Hello");
    let roles = events
        .iter()
        .filter(|event| event.contains("\"role\""))
        .count();
    assert_eq!(roles, 1, "{events:?}");
}

#[test]
fn a_stream_that_cannot_continue_ends_with_an_error_event() {
    let engine = || {
        Engine::start(|_, stream| {
            say(stream, EVENTS);
            chunk(stream, &text_event("a", "x"));
        })
    };
    let cases: [(&str, &[&str]); 4] = [
        (
            r#"{"model":"m","prompt":"p","stream":true,"logprobs":1}"#,
            &[],
        ),
        (r#"{"model":"m","prompt":"p","stream":true,"n":2}"#, &[]),
        (STREAM, &["--set=upstream.resume=\"off\""]),
        (
            STREAM,
            &[
                "--set=upstream.retry_budget=0",
                "--set=upstream.retries_max=0",
            ],
        ),
    ];
    for (body, flags) in cases {
        let (one, two) = (engine(), engine());
        let server = front(&[&one, &two], flags);
        let events = server.post("/v1/completions", body).events();
        assert_eq!(
            events.last().map(String::as_str),
            Some("[DONE]"),
            "{events:?}"
        );
        let error: serde_json::Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
        assert_eq!(error["error"]["code"], "stream_lost", "{body}");
        server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
        assert!(server.metric("slipstream_engine_answers_broken_total") >= 1.0);
    }
    // An answer that is no stream of events is cut, so that the client sees that it is not whole.
    let engine = Engine::start(|_, stream| {
        say(
            stream,
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        );
        chunk(stream, "half");
    });
    let server = front(&[&engine], &[]);
    let mut client = server.connect();
    let body = r#"{"model":"m","input":"x"}"#;
    client.write_head("POST", "/v1/embeddings", &[], body.len());
    client.write(body.as_bytes());
    assert_eq!(client.head().status, 200);
    assert_eq!(client.chunk().as_deref(), Some(&b"half"[..]));
    assert!(client.is_closed());
}

#[test]
fn models_are_merged_and_decide_who_is_asked() {
    let bind = || TcpListener::bind("127.0.0.1:0").unwrap();
    let ok = |_: &Seen, stream: &mut TcpStream| answer(stream, "200 OK", "", WHOLE);
    let small = Engine::serving("small", bind(), ok);
    let large = Engine::serving("large/1", bind(), ok);
    let server = front(&[&small, &large], &[]);
    let listed = server.get("/v1/models").json();
    let ids = listed["data"].as_array().unwrap().iter();
    let ids: BTreeSet<&str> = ids.map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, BTreeSet::from(["large/1", "small"]));
    assert_eq!(server.get("/v1/models/large%2F1").json()["id"], "large/1");
    for _ in 0..5 {
        let got = server.post("/v1/completions", r#"{"model":"large/1","prompt":"x"}"#);
        assert_eq!(got.status, 200);
    }
    assert_eq!((small.seen().len(), large.seen().len()), (0, 5));
    let unknown = server.post("/v1/completions", r#"{"model":"other","prompt":"x"}"#);
    assert_eq!(unknown.status, 404);
    assert!(unknown.error().contains("`small`"), "{}", unknown.text());
    let health = server.get("/health").json();
    assert_eq!(health["engines"][1]["models"][0], "large/1");
    assert_eq!(health["engines"][1]["kind"], "vllm");
}

#[test]
fn an_engine_that_comes_later_is_found_and_one_that_goes_is_left_out() {
    let reserved = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = reserved.local_addr().unwrap();
    drop(reserved);
    let flag = format!("--engine=http://{address}");
    let server = Server::start(&[&[&flag, "--set=upstream.health_interval_s=0.01"]]);
    assert_eq!(server.get("/health").status, 503);
    assert_eq!(server.get("/ready").status, 503);
    assert_eq!(server.post("/v1/completions", STREAM).status, 503);
    let listener = TcpListener::bind(address).unwrap();
    let engine = Engine::serving("m", listener, |_, stream| stream_texts(stream, "a", &["x"]));
    server.await_metric("slipstream_engine_up", |up| up == 1.0);
    assert_eq!(server.get("/ready").status, 200);
    assert_eq!(
        text_of(&server.post("/v1/completions", STREAM).events()),
        "x"
    );
    drop(engine);
    server.await_metric("slipstream_engine_up", |up| up == 0.0);
    assert_eq!(server.post("/v1/completions", STREAM).status, 503);
}

#[test]
fn keys_of_the_router_stay_there_and_engines_get_their_own() {
    let engine = Engine::start(|_, stream| answer(stream, "200 OK", "", WHOLE));
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let key = file("engine.key", "engine-key\n".into());
    let keys = file("keys", "router-key\n".into());
    let cluster = format!(
        "[pool.gpu]\nengines = [\"http://{}\"]\nkind = \"vllm\"\napi_key_file = {key:?}\n[live]\napi_keys_file = {keys:?}\n",
        engine.address
    );
    let cluster = file("fleet.toml", cluster);
    let server = Server::start(&[&[&cluster]]);
    let body = br#"{"model":"m","prompt":"x"}"#;
    let send = |headers: &[&str]| {
        server
            .connect()
            .send("POST", "/v1/completions", headers, body)
    };
    assert_eq!(send(&[]).status, 401);
    assert_eq!(send(&["Authorization: Bearer router-key"]).status, 200);
    let seen = engine.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].header("authorization"), Some("Bearer engine-key"));
}

#[test]
fn an_engine_with_a_key_does_not_get_that_of_the_client() {
    let engine = Engine::start(|_, stream| answer(stream, "200 OK", "", WHOLE));
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("engine.key");
    std::fs::write(&key, "engine-key\n").unwrap();
    let cluster = folder.path().join("fleet.toml");
    let text = format!(
        "[pool.gpu]\nengines = [\"http://{}\"]\nkind = \"vllm\"\napi_key_file = {key:?}\n",
        engine.address
    );
    std::fs::write(&cluster, text).unwrap();
    let bare = Engine::start(|_, stream| answer(stream, "200 OK", "", WHOLE));
    let body = br#"{"model":"m","prompt":"x"}"#;
    let headers = ["Authorization: Bearer client"];
    for (server, engine, wanted) in [
        (
            Server::start(&[&[cluster.to_str().unwrap()]]),
            &engine,
            "Bearer engine-key",
        ),
        (front(&[&bare], &[]), &bare, "Bearer client"),
    ] {
        let got = server
            .connect()
            .send("POST", "/v1/completions", &headers, body);
        assert_eq!(got.status, 200);
        let seen = engine.seen();
        let keys = seen[0].headers.iter();
        let keys: Vec<&str> = keys
            .filter(|(name, _)| name == "authorization")
            .map(|(_, value)| value.as_str())
            .collect();
        assert_eq!(keys, [wanted]);
    }
}

/// A body of 7 MiB, whose text is compared with that of others.
#[test]
fn a_long_body_holds_nobody_up() {
    let engines = [0, 1].map(|_| Engine::start(|_, stream| answer(stream, "200 OK", "", WHOLE)));
    let server = front(
        &[&engines[0], &engines[1]],
        &["--set=engine.block_size=128"],
    );
    // Blocks are large because a decision takes ten times as long for each without optimization.
    let text = "Measure twice, then cut. \\n".repeat(270_000);
    for turn in 0..3 {
        let body =
            format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{text}{turn}"}}]}}"#);
        assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
    }
    // Those with one beginning met at one engine: the text was read.
    let got = [0, 1].map(|at| engines[at].seen().len());
    assert!(got.contains(&3), "{got:?}");
    let longest = server.metric("slipstream_shard_poll_max_seconds");
    assert!(
        longest <= 0.010,
        "a shard worked on one thing for {longest} s of CPU time"
    );
}

#[test]
fn forwarded_answers_keep_to_the_limits_of_clients_that_read_nothing() {
    let engine = Engine::start(|request, stream| {
        if request.json()["stream"] == true {
            say(stream, EVENTS);
            chunk(stream, &text_event("a", " text"));
            // It says no more; the router hangs up.
            let _ = stream.read(&mut [0]);
        } else {
            say_text(stream, &" ".repeat(200_000));
        }
    });
    let limits = [
        "--set=live.write_timeout_s=0.5",
        "--set=live.memory_max=67108864",
    ];
    let server = front(&[&engine], &limits);
    let mut client = Http2::connect(&server, 0);
    for request in 0..4 {
        client.post(2 * request + 1, "/v1/completions", STREAM);
    }
    client.post(9, "/v1/completions", r#"{"model":"m","prompt":"x"}"#);
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes > 200_000.0);
    server.await_metric(
        "slipstream_streams_cut_total{reason=\"slow_reader\"}",
        |cut| cut == 4.0,
    );
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
    client.until_closed();
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes < 100_000.0);
}

#[test]
fn the_time_of_a_forwarded_request_is_limited_before_its_first_byte_too() {
    let engine = Engine::start(|_, stream| {
        let _ = stream.read(&mut [0]);
    });
    let server = front(&[&engine], &["--set=live.request_timeout_s=0.3"]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(got.status, 504);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn a_connection_ends_with_a_refusal_that_may_have_left_its_body_unread() {
    let (read, reads) = mpsc::channel();
    let read = Mutex::new(read);
    let engine = Engine::start(move |_, stream| {
        answer(stream, "413 Payload Too Large", "", b"{}");
        // Another request here would be answered with what was left of this one.
        let _ = read.lock().unwrap().send(stream.read(&mut [0]).ok());
    });
    let server = front(&[&engine], &[]);
    assert_eq!(server.post("/v1/completions", STREAM).status, 413);
    assert_eq!(reads.recv_timeout(PATIENCE), Ok(Some(0)));
}

#[test]
fn a_stream_that_ends_by_closing_continues_without_its_last_event() {
    let script = |request: &Seen, stream: &mut TcpStream| {
        let prompt = request.json()["prompt"].as_str().unwrap().to_owned();
        let of_it = ["Once upon", "Once upon a"];
        let events = match of_it.iter().position(|&begin| begin == prompt) {
            Some(0) => text_event("first", " a"),
            _ => text_event("second", " time") + "data: [DONE]\n\n",
        };
        let head =
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        say(stream, format!("{head}{events}").as_bytes());
    };
    let (one, two) = (Engine::start(script), Engine::start(script));
    let server = front(&[&one, &two], &[]);
    let events = server.post("/v1/completions", STREAM).events();
    assert_eq!(text_of(&events), " a time");
    assert_eq!(events.len(), 3);
}

#[test]
fn a_stream_with_a_length_has_none_after_it_continued() {
    let script = |request: &Seen, stream: &mut TcpStream| {
        let prompt = request.json()["prompt"].as_str().unwrap().to_owned();
        if prompt == "Once upon" {
            let event = text_event("first", " a");
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n";
            let length = event.len() + 300_000;
            say(
                stream,
                format!("{head}content-length: {length}\r\n\r\n{event}").as_bytes(),
            );
        } else {
            stream_texts(stream, "second", &[" time"]);
        }
    };
    let (one, two) = (Engine::start(script), Engine::start(script));
    let server = front(&[&one, &two], &[]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(got.header("content-length"), None);
    assert_eq!(text_of(&got.events()), " a time");
}

#[test]
fn every_stream_of_a_lost_engine_continues() {
    // More than the budget of retries without earlier requests.
    const STREAMS: usize = 24;
    let go = Arc::new(std::sync::Barrier::new(STREAMS));
    let script = move |request: &Seen, stream: &mut TcpStream| {
        let prompt = request.json()["prompt"].as_str().unwrap().to_owned();
        if prompt == "Once upon" {
            say(stream, EVENTS);
            chunk(stream, &text_event("first", " a"));
            go.wait();
        } else {
            stream_texts(stream, "second", &[" time"]);
        }
    };
    let (one, two) = (Engine::start(script.clone()), Engine::start(script));
    let server = front(&[&one, &two], &[]);
    let texts: Vec<String> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..STREAMS)
            .map(|_| scope.spawn(|| text_of(&server.post("/v1/completions", STREAM).events())))
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect()
    });
    assert!(texts.iter().all(|text| text == " a time"), "{texts:?}");
}

#[test]
fn pages_may_use_engines_as_the_router_says() {
    let engine = Engine::start(|_, stream| {
        answer(
            stream,
            "200 OK",
            "access-control-allow-origin: *\r\n",
            b"{}",
        );
    });
    let server = front(&[&engine], &["--set=live.cors_origins=https://good"]);
    let send = |method: &str, origin: &str| {
        let origin = format!("Origin: https://{origin}");
        let headers = [&*origin, "Access-Control-Request-Method: POST"];
        let headers = &headers[..if method == "OPTIONS" { 2 } else { 1 }];
        server
            .connect()
            .send(method, "/v1/completions", headers, b"{\"prompt\":\"x\"}")
    };
    let evil = send("POST", "evil");
    assert_eq!(evil.header("access-control-allow-origin"), None);
    let good = send("POST", "good");
    assert_eq!(
        good.header("access-control-allow-origin"),
        Some("https://good")
    );
    assert_eq!(send("OPTIONS", "evil").status, 404);
    assert_eq!(engine.seen().len(), 2);
}

#[test]
fn methods_that_could_show_or_change_an_engine_stay_here() {
    let engine = Engine::start(|_, stream| answer(stream, "200 OK", "", WHOLE));
    let server = front(&[&engine], &[]);
    for (method, path, status) in [
        ("TRACE", "/v1/models/x", 405),
        ("POST", "/props", 405),
        ("GET", "/get_server_info", 404),
    ] {
        let got = server.connect().send(method, path, &[], b"");
        assert_eq!(got.status, status, "{method} {path}");
    }
    assert!(engine.seen().is_empty());
}

#[test]
fn prompts_with_one_beginning_meet_one_engine() {
    let ok = |_: &Seen, stream: &mut TcpStream| answer(stream, "200 OK", "", WHOLE);
    let engines = [Engine::start(ok), Engine::start(ok), Engine::start(ok)];
    let server = front(&[&engines[0], &engines[1], &engines[2]], &[]);
    let ask = |group: usize, turn: usize| {
        let system = format!("You are assistant {group}. {}", "Be brief. ".repeat(200));
        let body = serde_json::json!({"model": "m", "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": format!("Question {turn}")},
        ]});
        assert_eq!(
            server
                .post("/v1/chat/completions", &body.to_string())
                .status,
            200
        );
    };
    for turn in 0..4 {
        for group in 0..6 {
            ask(group, turn);
        }
    }
    for group in 0..6 {
        let name = format!("assistant {group}.");
        let took = engines.iter().map(|engine| {
            let seen = engine.seen();
            seen.iter()
                .filter(|of| String::from_utf8_lossy(&of.body).contains(&name))
                .count()
        });
        let took: Vec<usize> = took.collect();
        assert!(took.contains(&4), "group {group} is spread: {took:?}");
    }
}

/// The publisher of an engine's KV events, as vLLM's.
pub(crate) struct Publisher {
    pub(crate) port: u16,
    batches: mpsc::Sender<KvEvent>,
}

impl Publisher {
    pub(crate) fn start() -> Publisher {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (batches, published) = mpsc::channel::<KvEvent>();
        let (joined, subscribers) = mpsc::channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.expect("a subscriber");
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                // ZMTP 3.0's greeting with the NULL mechanism, and READY of a PUB socket.
                let mut hello = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
                hello.extend_from_slice(b"NULL");
                hello.resize(64, 0);
                hello.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
                say(&mut stream, &hello);
                if stream.read_exact(&mut [0; 64]).is_err() || joined.send(stream).is_err() {
                    return; // the test is over
                }
            }
        });
        std::thread::spawn(move || {
            let mut streams = Vec::new();
            for (sequence, event) in (0u64..).zip(published) {
                if streams.is_empty() {
                    streams.extend(subscribers.recv());
                }
                streams.extend(subscribers.try_iter());
                let batch = KvEventBatch {
                    events: vec![event],
                    ..KvEventBatch::default()
                };
                let frames: [&[u8]; 3] = [b"", &sequence.to_be_bytes(), &batch.to_vec()];
                for (more, frame) in [3, 3, 2].into_iter().zip(frames) {
                    let len = (frame.len() as u64).to_be_bytes();
                    for stream in &mut streams {
                        say(stream, &[&[more], &len[..], frame].concat());
                    }
                }
            }
        });
        Publisher { port, batches }
    }

    /// The engine has computed the blocks of `tokens`; it names them by numbers from `first` on.
    pub(crate) fn store(&self, first: u64, tokens: &[u32]) {
        let blocks = tokens.len() / ENGINE_BLOCK;
        let stored = BlockStored {
            block_hashes: (first..).take(blocks).map(ExternalHash::Int).collect(),
            token_ids: tokens[..blocks * ENGINE_BLOCK].to_vec(),
            block_size: ENGINE_BLOCK as u32,
            ..BlockStored::default()
        };
        let event = KvEvent::BlockStored(Box::new(stored));
        self.batches.send(event).expect("a subscriber");
    }

    pub(crate) fn clear(&self) {
        let event = KvEvent::AllBlocksCleared {};
        self.batches.send(event).expect("a subscriber");
    }
}

/// Tokens per block of engines with KV events.
const ENGINE_BLOCK: usize = 32;

/// An engine that reports `publisher`, and answers every request.
pub(crate) fn caching(publisher: Option<&Publisher>) -> Engine {
    caching_at(TcpListener::bind("127.0.0.1:0").unwrap(), publisher)
}

pub(crate) fn caching_at(listener: TcpListener, publisher: Option<&Publisher>) -> Engine {
    let sources = match publisher {
        Some(publisher) => serde_json::json!({"0": {
            "publisher": "zmq", "endpoint": format!("tcp://*:{}", publisher.port), "topic": ""}}),
        None => serde_json::json!({}),
    };
    Engine::serving("m", listener, move |seen, stream| {
        match seen.line.split(' ').nth(1) {
            Some("/kv_event_sources") => {
                answer(stream, "200 OK", "", sources.to_string().as_bytes());
            }
            Some("/metrics") => {
                let labels =
                    "block_size=\"32\",num_gpu_blocks=\"9000\",enable_prefix_caching=\"True\"";
                let sample = format!("vllm:cache_config_info{{{labels}}} 1\n");
                answer(stream, "200 OK", "", sample.as_bytes());
            }
            Some("/tokenize") => answer(stream, "404 Not Found", "", b"{}"),
            _ if seen.line.starts_with("POST ") => answer(stream, "200 OK", "", WHOLE),
            _ => answer(stream, "404 Not Found", "", b"{}"),
        }
    })
}

/// Prompts that `engine` got.
pub(crate) fn took(engine: &Engine) -> usize {
    let seen = engine.seen();
    seen.iter()
        .filter(|of| of.line.starts_with("POST ") && !of.line.contains("/tokenize"))
        .count()
}

pub(crate) fn tokenizer() -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let exported = run(&["tokenizer", "export", dir.path().to_str().unwrap()]);
    assert_eq!(exported.0, Some(0), "{exported:?}");
    let flag = format!("--set=model.tokenizer={}", dir.path().display());
    (dir, flag)
}

/// Without vLLM: modelled servers name their publishers as vLLM does, two of them on one host with the default ports.
#[test]
fn modelled_servers_rehearse_routing_by_kv_events() {
    let (_dir, tokenizer) = tokenizer();
    let own = [
        "--set=pool.main.workers=1",
        "--set=live.events.bus=zmq",
        "--set=model.name=m",
    ];
    let engines = [Server::start(&[FAST, &own]), Server::start(&[FAST, &own])];
    let mut command = slipstream();
    command
        .arg("serve")
        .args([&tokenizer, "--set=model.name=m"]);
    for engine in &engines {
        let sources = engine.get("/kv_event_sources");
        assert_eq!(sources.status, 200);
        assert!(
            sources.text().contains("tcp://127.0.0.1:"),
            "{}",
            sources.text()
        );
        command.args(["--engine", &format!("http://{}", engine.address())]);
    }
    let router = Server::spawn(command);
    router.await_metric("slipstream_engine_kv_connected", |n| n == 2.0);
    let prompt = "Measure twice, then cut. ".repeat(200);
    let body = serde_json::json!({"model": "m", "prompt": prompt, "max_tokens": 2}).to_string();
    assert_eq!(router.post("/v1/completions", &body).status, 200);
    router.await_metric("slipstream_router_cached_blocks", |n| n > 0.0);
    let silent = Server::start(&[FAST]);
    assert_eq!(
        silent.get("/kv_event_sources").status,
        404,
        "it publishes none"
    );
}

#[test]
fn prompts_go_to_the_engine_whose_events_show_them() {
    let publishers = [Publisher::start(), Publisher::start()];
    let engines = [caching(Some(&publishers[0])), caching(Some(&publishers[1]))];
    let (_dir, tokenizer) = tokenizer();
    let server = front(
        &[&engines[0], &engines[1]],
        &[&tokenizer, "--set=model.name=m"],
    );
    server.await_metric("slipstream_engine_kv_connected", |n| n == 2.0);
    let send = |path: &str, headers: &[&str], body: serde_json::Value| {
        let before = [took(&engines[0]), took(&engines[1])];
        let got = server
            .connect()
            .send("POST", path, headers, body.to_string().as_bytes());
        assert_eq!(got.status, 200, "{}", got.text());
        usize::from(took(&engines[1]) > before[1])
    };
    let complete = |prompt: String| {
        let body = serde_json::json!({"model": "m", "prompt": prompt});
        send("/v1/completions", &[], body)
    };
    let mut held = 0;
    // The second is tokenized by a helper thread.
    for (at, bytes) in [(1, 2_000), (2, 40_000)] {
        let begin = format!(
            "Case {at}. {}",
            "Measure twice, then cut. ".repeat(bytes / 25)
        );
        let mut tokens = Vec::new();
        TextModel::builtin().encode(&begin, true, &mut tokens);
        let (whole, half) = (tokens.len(), tokens.len() / 2);
        assert!(half >= 4 * ENGINE_BLOCK);
        // Routed to engine 0, which does not keep it.
        let body = serde_json::json!({"model": "m", "prompt": format!("{begin} First?")});
        let named = ["x-slipstream-worker: w0"];
        assert_eq!(send("/v1/completions", &named, body), 0);
        publishers[0].store(at * 100_000, &tokens[..half]);
        publishers[1].store(at * 100_000, &tokens);
        held += whole / ENGINE_BLOCK + half / ENGINE_BLOCK;
        server.await_metric("slipstream_router_cached_blocks", |n| n == held as f64);
        for turn in 0..6 {
            assert_eq!(complete(format!("{begin} Question {turn}?")), 1);
        }
        let ids = [&tokens[..], &[7, 7, 7]].concat();
        let body = serde_json::json!({"model": "m", "prompt": ids});
        assert_eq!(send("/v1/completions", &[], body), 1);
        publishers[1].clear();
        held -= whole / ENGINE_BLOCK;
        server.await_metric("slipstream_router_cached_blocks", |n| n == held as f64);
        for turn in 0..6 {
            assert_eq!(complete(format!("{begin} Question {turn}?")), 0);
        }
    }
    let messages = serde_json::json!([
        {"role": "system", "content": "Be brief. ".repeat(80)}, {"role": "user", "content": "Why?"}
    ]);
    let text = "Be brief. ".repeat(80);
    let options = ChatOptions {
        add_generation_prompt: true,
        continue_final_message: false,
        tools: &[],
        template_kwargs: &[],
        now_unix_s: 0,
    };
    let said = [Message::new("system", &text), Message::new("user", "Why?")];
    let mut tokens = Vec::new();
    let model = TextModel::builtin();
    model.encode_chat(&said, &options, &mut tokens).unwrap();
    publishers[1].store(900_000, &tokens);
    held += tokens.len() / ENGINE_BLOCK;
    server.await_metric("slipstream_router_cached_blocks", |n| n == held as f64);
    for _ in 0..6 {
        let body = serde_json::json!({"model": "m", "messages": messages});
        assert_eq!(send("/v1/chat/completions", &[], body), 1);
    }
    assert_eq!(server.metric("slipstream_engine_kv_gaps_total"), 0.0);
    assert_eq!(
        server.metric("slipstream_engine_prompts_total{as=\"text\"}"),
        0.0
    );
    // Tokens of prompts with tools are not certain: they follow the text of earlier ones.
    let tools = |turn: usize| {
        let body = serde_json::json!({"model": "m", "tools": [{"type": "function"}], "messages": [
            {"role": "system", "content": "Use tools. ".repeat(80)},
            {"role": "user", "content": format!("Question {turn}")}]});
        send("/v1/chat/completions", &[], body)
    };
    let first = tools(0);
    for turn in 1..6 {
        assert_eq!(tools(turn), first);
    }
    assert_eq!(
        server.metric("slipstream_engine_prompts_total{as=\"text\"}"),
        6.0
    );
}

#[test]
fn an_engine_that_comes_later_is_followed() {
    let publishers = [Publisher::start(), Publisher::start()];
    let first = caching(Some(&publishers[0]));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let address = address.unwrap();
    let later = format!("--engine=http://{address}");
    let (_dir, tokenizer) = tokenizer();
    let server = front(&[&first], &[&later, &tokenizer, "--set=model.name=m"]);
    server.await_metric("slipstream_engine_kv_connected", |n| n == 1.0);
    let second = caching_at(TcpListener::bind(address).unwrap(), Some(&publishers[1]));
    server.await_metric("slipstream_engine_kv_connected", |n| n == 2.0);
    server.await_metric("slipstream_engine_up", |n| n == 2.0);
    let ids: Vec<u32> = (1..=100).collect();
    publishers[1].store(1, &ids);
    server.await_metric("slipstream_router_cached_blocks", |n| n == 3.0);
    let body = serde_json::json!({"model": "m", "prompt": ids}).to_string();
    for _ in 0..6 {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    assert_eq!((took(&first), took(&second)), (0, 6));
}

#[test]
fn an_engine_that_comes_back_is_followed_again() {
    let publisher = Publisher::start();
    let first = caching(Some(&publisher));
    let address = first.address;
    let other = caching(None);
    let (_dir, tokenizer) = tokenizer();
    let flags = [
        &*tokenizer,
        "--set=model.name=m",
        "--set=upstream.health_interval_s=0.05",
    ];
    let server = front(&[&first, &other], &flags);
    server.await_metric("slipstream_engine_kv_connected", |n| n == 1.0);
    let ids: Vec<u32> = (1..=100).collect();
    publisher.store(1, &ids);
    server.await_metric("slipstream_router_cached_blocks", |n| n == 3.0);
    // Nobody listens for requests, but the connection for events stays: a restart that the subscriber does not see.
    drop(first);
    server.await_metric("slipstream_engine_up", |n| n == 1.0);
    server.await_metric("slipstream_router_cached_blocks", |n| n == 0.0);
    let again = caching_at(TcpListener::bind(address).unwrap(), Some(&publisher));
    server.await_metric("slipstream_engine_up", |n| n == 2.0);
    // The gap is found, and what comes after it is known again.
    for at in 1..100_000 {
        let more: Vec<u32> = (at * 1_000 + 1..=at * 1_000 + 100).collect();
        publisher.store(u64::from(at) * 10, &more);
        if server.metric("slipstream_router_cached_blocks") > 0.0 {
            break;
        }
    }
    assert!(server.metric("slipstream_router_kv_gaps_total") > 0.0);
    publisher.clear();
    let last: Vec<u32> = (1..=4 * ENGINE_BLOCK as u32).collect();
    publisher.store(1, &last);
    // The others have three each.
    server.await_metric("slipstream_router_cached_blocks", |n| n == 4.0);
    publisher.store(9_999_999, &last);
    let body = serde_json::json!({"model": "m", "prompt": last}).to_string();
    let named = ["x-slipstream-worker: w1"];
    for _ in 0..6 {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
        let other = serde_json::json!({"model": "m", "prompt": [7]}).to_string();
        server
            .connect()
            .send("POST", "/v1/completions", &named, other.as_bytes());
    }
    assert_eq!(took(&again), 6);
}

#[test]
fn prompts_with_one_beginning_meet_whoever_publishes_events() {
    let publisher = Publisher::start();
    let engines = [caching(Some(&publisher)), caching(None)];
    let (_dir, tokenizer) = tokenizer();
    for (more, followed) in [
        // One publishes none: what was sent there is known, in the same tokens.
        (&["--set=model.name=m", &tokenizer][..], Some(1.0)),
        (&["--set=model.name=other", &tokenizer], Some(0.0)),
        (&["--set=model.name=m"], None),
    ] {
        let server = front(&[&engines[0], &engines[1]], more);
        match followed {
            Some(count) => server.await_metric("slipstream_engine_kv_connected", |n| n == count),
            None => assert!(
                !server
                    .get("/metrics")
                    .text()
                    .contains("engine_kv_connected")
            ),
        }
        let before = [took(&engines[0]), took(&engines[1])];
        let system = "Be brief. ".repeat(80);
        // The second engine, whose cache no events tell of.
        let first = serde_json::json!({"model": "m", "prompt": format!("{system}first")});
        let named = ["x-slipstream-worker: w1"];
        let sent = server.connect().send(
            "POST",
            "/v1/completions",
            &named,
            first.to_string().as_bytes(),
        );
        assert_eq!(sent.status, 200);
        for turn in 0..4 {
            let body = serde_json::json!({"model": "m", "prompt": format!("{system}{turn}")});
            assert_eq!(
                server.post("/v1/completions", &body.to_string()).status,
                200
            );
        }
        let got = [0, 1].map(|at| took(&engines[at]) - before[at]);
        assert_eq!(got, [0, 5], "{more:?}");
        if followed.is_some() {
            let as_tokens = server.metric("slipstream_engine_prompts_total{as=\"tokens\"}");
            assert_eq!(as_tokens > 0.0, followed == Some(1.0), "{more:?}");
        }
    }
}

#[test]
fn our_own_server_is_an_engine() {
    let one = Server::start(&[FAST]);
    let two = Server::start(&[FAST]);
    let flags = [&one, &two].map(|engine| format!("--engine=http://{}", engine.address()));
    let server = Server::start(&[&[&flags[0], &flags[1]]]);
    server.assert_alive();
    let body = r#"{"model":"test-model","prompt":"hello","max_tokens":20,"ignore_eos":true,"seed":3,"stream":true}"#;
    let strip = |events: Vec<String>| text_of(&events);
    let direct = strip(one.post("/v1/completions", body).events());
    assert_eq!(strip(server.post("/v1/completions", body).events()), direct);
    one.kill();
    for _ in 0..4 {
        assert_eq!(strip(server.post("/v1/completions", body).events()), direct);
    }
    server.await_metric("slipstream_engine_up", |up| up == 1.0);
    server.assert_alive();
}

#[test]
fn open_streams_end_with_an_error_when_the_server_stops() {
    let (hold, held) = mpsc::channel::<()>();
    let held = Mutex::new(held);
    let engine = Engine::start(move |_, stream| {
        say(stream, EVENTS);
        chunk(stream, &text_event("a", "x"));
        let _ = held.lock().unwrap().recv_timeout(PATIENCE);
    });
    let server = front(&[&engine], &["--set=live.drain_timeout_s=0.05"]);
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], STREAM.len());
    client.write(STREAM.as_bytes());
    assert_eq!(client.head().status, 200);
    assert!(client.chunk().is_some());
    server.signal("-TERM");
    let last = client.chunk().expect("an error event");
    let last = String::from_utf8(last).unwrap();
    assert!(
        last.contains("\"stopping\"") && last.ends_with("data: [DONE]\n\n"),
        "{last}"
    );
    drop(hold);
}

#[test]
fn modelled_and_real_pools_in_one_file_are_refused_with_the_way_out() {
    let (code, _, error) = crate::server::run(&[
        "serve",
        "--engine=http://127.0.0.1:1",
        "--set=pool.modelled.workers=2",
    ]);
    assert_eq!(code, Some(2), "{error}");
    assert!(
        error.contains("pool `modelled`") || error.contains("and pool"),
        "{error}"
    );
    assert!(error.contains("on another port"), "{error}");
    for (flag, hint) in [
        ("--engine=ftp://gpu1", "http:// or https://"),
        ("--engine=gpu1:8000", "http://127.0.0.1:8001"),
    ] {
        let (code, _, error) = crate::server::run(&["serve", flag]);
        assert_eq!(code, Some(2), "{error}");
        assert!(error.contains(hint), "{error}");
    }
    let (code, _, error) = crate::server::run(&[
        "serve",
        "--engine=http://127.0.0.1:1",
        "--set=live.faults.error_500=0.5",
    ]);
    assert_eq!(code, Some(2), "{error}");
    assert!(
        error.contains("`[live.faults]` affects modelled engines only"),
        "{error}"
    );
}
