//! Streams and requests that move from one engine to another: engines that die, hang, are named, or leave.

use std::io::{BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, mpsc};

use serde_json::{Value, json};

use crate::engines::{
    EVENTS, Engine, PATIENCE, STREAM, Seen, WHOLE, answer, chunk, front, read_request, say,
    stream_texts, text_event, text_of,
};
use crate::server::Server;

/// Tokens of a prompt. Those of answers are 1000, 1001, …, with the texts " t0", " t1", ….
const PROMPT: [u64; 2] = [7, 8];
const FIRST: u64 = 1000;

/// How an engine fails within an answer.
#[derive(Clone, Copy, Debug)]
enum End {
    /// Its connection breaks.
    Cut,
    /// Its stream ends cleanly.
    Early,
    /// These data of a last event say so, before `[DONE]`.
    Says(&'static str),
}

const ENDS: [End; 4] = [
    End::Cut,
    End::Early,
    End::Says(r#"{"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}"#),
    End::Says(
        r#"{"id":"one","choices":[{"index":0,"text":"","delta":{},"finish_reason":"abort","token_ids":[]}]}"#,
    ),
];

/// Answers as vLLM does. With `dies`, a new answer ends after that many tokens, in that way.
fn vllm(dies: Option<(u64, End)>) -> Engine {
    Engine::start(move |seen, stream| {
        let body = seen.json();
        let is_chat = seen.line.contains("/chat/");
        let ids: Vec<u64> = match &body["prompt"] {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).collect(),
            _ => PROMPT.to_vec(),
        };
        let from = ids.iter().filter(|id| **id >= FIRST).count() as u64;
        let asks_ids = body["return_token_ids"] == true;
        let echo = if body["echo"] == true && !asks_ids {
            "prompt"
        } else {
            ""
        };
        let number = |field: &str| match &body[field] {
            Value::String(text) => text.trim().parse().ok(),
            number => number.as_f64(),
        };
        let max = number("max_completion_tokens").or(number("max_tokens"));
        let max = max.unwrap() as u64;
        let model = json!({"id": if from == 0 { "one" } else { "two" }, "created": from, "model": "m",
            "object": if is_chat { "chat.completion.chunk" } else { "text_completion" }});
        let event = |stream: &mut TcpStream, more: Value| {
            let mut event = model.clone();
            event
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            chunk(stream, &format!("data: {event}\n\n"));
        };
        let shown = |ids: Value| if asks_ids { ids } else { Value::Null };
        say(stream, EVENTS);
        if is_chat {
            let role = json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null});
            event(
                stream,
                json!({"choices": [role], "prompt_token_ids": shown(json!(ids))}),
            );
        }
        for at in from..from + max {
            if let Some((_, end)) = dies.filter(|(dies, _)| from == 0 && at == *dies) {
                match end {
                    End::Cut => return,
                    End::Early => {}
                    End::Says(data) => {
                        chunk(stream, &format!("data: {data}\n\ndata: [DONE]\n\n"));
                    }
                }
                return say(stream, b"0\r\n\r\n");
            }
            let text = format!(
                "{}{}",
                if at == 0 { echo } else { "" },
                format_args!(" t{at}")
            );
            let finish = if at + 1 == from + max {
                "length".into()
            } else {
                Value::Null
            };
            let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": finish,
                "token_ids": shown(json!([FIRST + at]))});
            if is_chat {
                choice["delta"] = json!({"content": text});
            } else {
                choice["text"] = text.into();
                choice["prompt_token_ids"] =
                    shown(if at == from { json!(ids) } else { Value::Null });
            }
            event(stream, json!({"choices": [choice]}));
        }
        let usage = json!({"prompt_tokens": ids.len(), "completion_tokens": max, "total_tokens": ids.len() as u64 + max});
        event(stream, json!({"choices": [], "usage": usage}));
        chunk(stream, "data: [DONE]\n\n");
        say(stream, b"0\r\n\r\n");
    })
}

fn parsed(events: &[String]) -> Vec<Value> {
    let events = events.iter().filter(|event| *event != "[DONE]");
    events
        .map(|event| serde_json::from_str(event).unwrap())
        .collect()
}

#[test]
fn chats_and_completions_continue_by_their_tokens_and_clients_see_no_ids() {
    for (path, body) in [
        (
            "/v1/chat/completions",
            r#"{"model":"m","messages":[{"role":"user","content":"q"}],"max_tokens":6,"stream":true}"#,
        ),
        (
            "/v1/completions",
            r#"{"model":"m","prompt":"q","max_tokens":6,"stream":true}"#,
        ),
    ] {
        let whole = vllm(None);
        let wanted = front(&[&whole], &["--set=upstream.resume=off"])
            .post(path, body)
            .events();
        assert!(whole.seen()[0].json().get("return_token_ids").is_none());
        let losses = (1..6).zip(ENDS.into_iter().cycle());
        for (dies, end) in losses.chain(ENDS.map(|end| (3, end))) {
            let (one, two) = (vllm(Some((dies, end))), vllm(Some((dies, end))));
            let server = front(&[&one, &two], &[]);
            let events = server.post(path, body).events();
            assert_eq!(parsed(&events), parsed(&wanted), "{path} {dies} {end:?}");
            assert_eq!(events.last(), wanted.last());
            let rest = [&one, &two].map(Engine::seen).concat();
            let rest: Vec<&Seen> = rest
                .iter()
                .filter(|of| of.json()["prompt"].is_array())
                .collect();
            assert_eq!(rest.len(), 1, "the rest of it alone");
            assert!(
                rest[0].line.starts_with("POST /v1/completions "),
                "{}",
                rest[0].line
            );
            assert_eq!(rest[0].json()["max_tokens"], 6 - dies);
            assert_eq!(
                server.metric("slipstream_engine_streams_resumed_total"),
                1.0
            );
        }
        // However it is written: as vLLM reads it.
        for (from, to) in [
            ("\"stream\"", "\"return_token_ids\":false,\"stream\""),
            ("\"stream\"", "\"return_token_ids\":null,\"stream\""),
            (":true", ":\"yes\""),
            (":6", ":6.0"),
            (":6", ":\" 6\""),
            (":6", ":6,\"n\":\"1\""),
            ("{\"model\"", "\u{feff}{\"model\""),
        ] {
            let body = body.replacen(from, to, 1);
            let (one, two) = (vllm(Some((3, End::Cut))), vllm(Some((3, End::Cut))));
            let server = front(&[&one, &two], &[]);
            let events = server.post(path, &body).events();
            assert_eq!(parsed(&events), parsed(&wanted), "{path} {body}");
            let rest = [&one, &two].map(Engine::seen).concat();
            let rest = rest.iter().find(|of| of.json()["prompt"].is_array());
            assert_eq!(rest.unwrap().json()["max_tokens"], 3, "{path} {body}");
        }
        // Its own question for ids is answered.
        let one = vllm(None);
        let asks = body.replace("\"stream\"", "\"return_token_ids\":true,\"stream\"");
        let events = parsed(&front(&[&one], &[]).post(path, &asks).events());
        let ids = events
            .iter()
            .filter(|event| event["choices"][0]["token_ids"].is_array());
        assert_eq!(ids.count(), 6, "{path}");
    }
}

#[test]
fn ids_are_asked_for_only_where_they_help() {
    let one = vllm(None);
    let server = front(&[&one], &[]);
    for (path, fields, asks) in [
        ("/v1/completions", "", true),
        ("/v1/completions", r#""echo":true,"#, false),
        ("/v1/completions", r#""logprobs":1,"#, false),
        ("/v1/completions", r#""n":2,"#, false),
        ("/v1/completions", r#""presence_penalty":0.5,"#, false),
        (
            "/v1/completions",
            r#""presence_penalty":0.0,"logprobs":null,"n":1,"#,
            true,
        ),
        (
            "/v1/completions",
            r#""response_format":{"type":"json_object"},"#,
            false,
        ),
        ("/v1/completions", r#""prompt":["a","b"],"#, false),
        (
            "/v1/chat/completions",
            r#""tools":[{"type":"function"}],"#,
            true,
        ),
        (
            "/v1/chat/completions",
            r#""tools":[{"type":"function"}],"tool_choice":"required","#,
            false,
        ),
        (
            "/v1/chat/completions",
            r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}],"#,
            false,
        ),
    ] {
        let body = format!(
            r#"{{"model":"m","prompt":"p","messages":[{{"role":"user","content":"q"}}],{fields}"max_tokens":2,"stream":true}}"#
        );
        let body = if path.contains("chat") {
            body.replace(r#""prompt":"p","#, "")
        } else {
            body
        };
        assert_eq!(server.post(path, &body).status, 200);
        let asked = one.seen().last().unwrap().json()["return_token_ids"] == true;
        assert_eq!(asked, asks, "{path} {fields}");
    }
    let body = r#"{"model":"m","prompt":"p","echo":true,"max_tokens":2,"stream":true}"#;
    assert_eq!(
        text_of(&server.post("/v1/completions", body).events()),
        "prompt t0 t1"
    );
}

/// An engine that stops reading and answering while its gate is shut, and keeps its connections.
struct Hanging {
    address: SocketAddr,
    gate: Arc<(Mutex<bool>, Condvar)>,
    closed: Arc<Mutex<usize>>,
}

impl Hanging {
    fn start() -> Hanging {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hanging = Hanging {
            address: listener.local_addr().unwrap(),
            gate: Arc::default(),
            closed: Arc::default(),
        };
        let (gate, closed) = (hanging.gate.clone(), hanging.closed.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (gate, closed) = (gate.clone(), closed.clone());
                std::thread::spawn(move || serve_hanging(&stream.unwrap(), &gate, &closed));
            }
        });
        hanging
    }

    fn set(&self, hangs: bool) {
        *self.gate.0.lock().unwrap() = hangs;
        self.gate.1.notify_all();
    }
}

fn serve_hanging(stream: &TcpStream, gate: &(Mutex<bool>, Condvar), closed: &Mutex<usize>) {
    let mut stream = stream.try_clone().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while let Some(request) = read_request(&mut reader) {
        let hangs = gate.0.lock().unwrap();
        let waits = gate.1.wait_timeout_while(hangs, PATIENCE, |hangs| *hangs);
        drop(waits.unwrap());
        if request.line.starts_with("GET /v1/models ") {
            let list = br#"{"object":"list","data":[{"id":"m","owned_by":"vllm"}]}"#;
            answer(&mut stream, "200 OK", "", list);
        } else if request.line.starts_with("GET ") {
            answer(&mut stream, "200 OK", "", b"");
        } else if request.json()["stream"] == true {
            say(&mut stream, EVENTS);
            chunk(&mut stream, &text_event("first", " a"));
            // The rest comes too late.
            *gate.0.lock().unwrap() = true;
            let is_closed = matches!(stream.read(&mut [0]), Ok(0) | Err(_));
            *closed.lock().unwrap() += usize::from(is_closed);
            return;
        } else {
            answer(&mut stream, "200 OK", "", b"{\"from\":1,\"choices\":[{}]}");
        }
    }
}

#[test]
fn streams_and_requests_leave_an_engine_that_hangs() {
    let hanging = Hanging::start();
    let other = Engine::start(|request, stream| {
        if request.json()["stream"] == true {
            assert_eq!(request.json()["prompt"], "Once upon a");
            stream_texts(stream, "second", &[" time"]);
        } else {
            answer(stream, "200 OK", "", b"{\"from\":2,\"choices\":[{}]}");
        }
    });
    let first = format!("--engine=http://{}", hanging.address);
    let server = Server::start(&[&[
        &first,
        &other.flag(),
        "--set=live.shards=1",
        "--set=upstream.health_interval_s=0.05",
        "--set=upstream.health_timeout_s=0.1",
    ]]);
    server.await_metric("slipstream_engine_up", |up| up == 2.0);
    let named = ["x-slipstream-worker: w0"];
    let send = |body: &str| {
        server
            .connect()
            .send("POST", "/v1/completions", &named, body.as_bytes())
    };
    std::thread::scope(|scope| {
        let stream = scope.spawn(|| send(STREAM));
        // The engine hangs from its first event on.
        server.await_metric("slipstream_engine_answer_bytes_total", |bytes| bytes > 0.0);
        let whole = scope.spawn(|| send(r#"{"model":"m","prompt":"x"}"#));
        assert_eq!(text_of(&stream.join().unwrap().events()), " a time");
        assert_eq!(
            whole.join().unwrap().text(),
            "{\"from\":2,\"choices\":[{}]}"
        );
    });
    server.await_metric("slipstream_engine_up", |up| up == 1.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
    hanging.set(false);
    server.await_metric("slipstream_engine_up", |up| up == 2.0);
    crate::planes::await_true("the hung stream's connection ends", || {
        *hanging.closed.lock().unwrap() == 1
    });
    assert_eq!(other.seen().len(), 2, "nothing twice");
    assert_eq!(
        send(r#"{"model":"m","prompt":"x"}"#).text(),
        "{\"from\":1,\"choices\":[{}]}"
    );
}

#[test]
fn a_named_engine_is_the_first_to_be_asked() {
    let dead = Engine::start(|_, _| {});
    let other = Engine::start(|_, stream| answer(stream, "200 OK", "", WHOLE));
    let server = front(&[&dead, &other], &["--set=upstream.failures_max=1000"]);
    let send = |worker: &str| {
        let named = format!("x-slipstream-worker: {worker}");
        let body = br#"{"model":"m","prompt":"x"}"#;
        server
            .connect()
            .send("POST", "/v1/completions", &[&named], body)
    };
    assert_eq!(send("w0").status, 200);
    assert_eq!((dead.seen().len(), other.seen().len()), (1, 1));
    assert_eq!(send("w1").status, 200);
    assert_eq!((dead.seen().len(), other.seen().len()), (1, 2));
    // There is no such engine: a mistake, not a loss.
    let unknown = send("w7");
    assert!(unknown.status >= 400, "{}", unknown.text());
    assert_eq!(other.seen().len(), 2);
    // The policy leaves the choice to clients alone.
    let direct = [
        "--set=router.policy=\"direct\"",
        "--set=upstream.failures_max=1000",
    ];
    let (dead, other) = (Engine::start(|_, _| {}), Engine::start(|_, _| {}));
    let server = front(&[&dead, &other], &direct);
    let named = ["x-slipstream-worker: w0"];
    let got = server.connect().send(
        "POST",
        "/v1/completions",
        &named,
        br#"{"model":"m","prompt":"x"}"#,
    );
    assert_eq!(got.status, 502, "{}", got.text());
    assert!(other.seen().is_empty());
}

/// The ids of a long prompt come before the first token of a continuation: the router charges them to the client.
#[test]
fn the_beginning_of_a_continuation_takes_memory_of_its_client() {
    const EVENT_BYTES: usize = 500_000;
    const EVENTS_BEFORE: usize = 8;
    let first = vllm(Some((2, End::Cut)));
    let (let_go, may_go) = mpsc::channel();
    let may_go = Mutex::new(may_go);
    let second = Engine::start(move |seen, stream| {
        if seen.json()["kv_transfer_params"].is_null() {
            return answer(stream, "400 Bad Request", "", b"{}"); // another way to continue
        }
        say(stream, EVENTS);
        let long = format!("data: {{\"x\":\"{}\"}}\n\n", "x".repeat(EVENT_BYTES));
        for _ in 0..EVENTS_BEFORE {
            chunk(stream, &long);
        }
        let _ = may_go.lock().unwrap().recv_timeout(PATIENCE);
    });
    let body =
        br#"{"model":"m","messages":[{"role":"user","content":"q"}],"max_tokens":6,"stream":true,
        "tools":[{"type":"function","function":{"name":"f"}}]}"#;
    let named = ["x-slipstream-worker: w0"];
    let used = "slipstream_memory_used_bytes";
    let server = front(&[&first, &second], &[]);
    std::thread::scope(|scope| {
        let send = || {
            server
                .connect()
                .send("POST", "/v1/chat/completions", &named, body)
        };
        let stream = scope.spawn(send);
        let held = (EVENT_BYTES * EVENTS_BEFORE) as f64;
        server.await_metric(used, |bytes| bytes >= held);
        let_go.send(()).unwrap();
        let text = stream.join().unwrap().text();
        assert!(text.contains("\"stream_lost\""), "{text:.2000}");
    });
    server.await_metric(used, |bytes| bytes < 500_000.0);
}
