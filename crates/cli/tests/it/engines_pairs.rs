//! Disaggregated prefill by protocols that ask both engines at once (SGLang's, and vLLM's MooncakeConnector), with
//! engines that answer by a script.

use std::collections::BTreeMap;
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, mpsc};

use serde_json::json;

use crate::engines::{
    EVENTS, Engine, PATIENCE, STREAM, Seen, WHOLE, answer, chunk, say, stream_texts, text_event,
    text_of,
};
use crate::engines_apart::{front, front_at, prefills};
use crate::server::Server;

/// Where the two engines of a request wait for each other, as for the transfer of keys and values.
#[derive(Default)]
struct Meetings {
    /// By room or transfer: the engines that are there.
    there: Mutex<BTreeMap<String, [bool; 2]>>,
    changed: Condvar,
}

impl Meetings {
    /// Announces engine `side` of `request`, and waits for the other one.
    fn meet(&self, request: &Seen, side: usize) {
        let mut there = self.there.lock().unwrap();
        there.entry(name_of(request)).or_default()[side] = true;
        self.changed.notify_all();
        let alone = |there: &mut BTreeMap<String, [bool; 2]>| {
            there.get(&name_of(request)).is_none_or(|of| !of[1 - side])
        };
        let waited = self.changed.wait_timeout_while(there, PATIENCE, alone);
        assert!(
            !waited.unwrap().1.timed_out(),
            "the other engine was not asked"
        );
    }
}

/// The name of a request's transfer.
fn name_of(request: &Seen) -> String {
    let body = request.json();
    match &body["kv_transfer_params"]["transfer_id"] {
        serde_json::Value::Null => body["bootstrap_room"].to_string(),
        id => id.to_string(),
    }
}

fn is_whole(request: &Seen) -> bool {
    name_of(request) == "null"
}

/// A prefill engine that answers once the decode engine was asked, too.
fn prefill_engine(meetings: &Arc<Meetings>) -> Engine {
    let meetings = meetings.clone();
    Engine::start(move |request, stream| {
        meetings.meet(request, 0);
        answer(stream, "200 OK", "", b"{\"id\":\"p\"}");
    })
}

/// A decode engine that answers once the prefill engine was asked, too. It computes whole requests alone.
fn decode_engine(meetings: &Arc<Meetings>) -> Engine {
    let meetings = meetings.clone();
    Engine::start(move |request, stream| {
        if !is_whole(request) {
            meetings.meet(request, 1);
        }
        if request.json()["stream"] == true {
            stream_texts(stream, "d", &["one ", "two"]);
        } else {
            answer(stream, "200 OK", "", b"{\"id\":\"d\",\"choices\":[{}]}");
        }
    })
}

/// A server that lists the ranks of a prefill engine.
fn bootstrap(ids: &'static [&'static str]) -> Engine {
    Engine::start(move |request, stream| {
        assert_eq!(request.line, "GET /query HTTP/1.1");
        let ranks = ids.iter().enumerate().map(|(rank, id)| {
            let entry = json!({"engine_id": id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}});
            (rank.to_string(), entry)
        });
        let ranks: serde_json::Map<String, serde_json::Value> = ranks.collect();
        answer(stream, "200 OK", "", json!(ranks).to_string().as_bytes());
    })
}

const SGLANG: [&str; 2] = [
    "--set=pool.a.kind=\"sglang\"",
    "--set=pool.b.kind=\"sglang\"",
];

fn sglang(prefill: &[&Engine], decode: &[&Engine]) -> Server {
    front(prefill, decode, &SGLANG)
}

fn mooncake(prefill: &[&Engine], decode: &[&Engine], bootstrap: SocketAddr) -> Server {
    let port = format!("--set=pool.b.bootstrap_port={}", bootstrap.port());
    let protocol = "--set=pool.b.kv_protocol=\"mooncake\"";
    let server = front(prefill, decode, &[protocol, &port]);
    let engines = (prefill.len() + decode.len()) as f64;
    server.await_metric("slipstream_engine_up", |up| up == engines);
    server
}

#[test]
fn sglang_engines_get_one_request_at_once_and_meet_in_a_room() {
    let meetings = Arc::default();
    let (prefill, decode) = (prefill_engine(&meetings), decode_engine(&meetings));
    let server = sglang(&[&prefill], &[&decode]);
    let chat = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"n\":2 , \"x\":{\"y\":1.0e0} }\n";
    // A client does not choose whom the decode engine connects to.
    let theirs = r#"{"model":"m","prompt":"Once","bootstrap_host":"evil","bootstrap_room":7}"#;
    let mut rooms = Vec::new();
    for (path, body) in [
        ("/v1/completions", STREAM),
        ("/v1/chat/completions", chat),
        ("/v1/completions", theirs),
    ] {
        let headers = ["Accept-Encoding: gzip", "Authorization: Bearer theirs"];
        let got = server
            .connect()
            .send("POST", path, &headers, body.as_bytes());
        assert_eq!(got.status, 200, "{}", got.text());
        if body == STREAM {
            assert_eq!(text_of(&got.events()), "one two");
        }
        let (first, second) = (
            prefill.seen().last().unwrap().clone(),
            decode.seen().last().unwrap().clone(),
        );
        let text = String::from_utf8(first.body.clone()).unwrap();
        assert_eq!(text.as_bytes(), &*second.body);
        let (before, after) = text
            .split_once(",\"bootstrap_host\":\"127.0.0.1\"")
            .unwrap();
        assert_eq!(before, body.trim_end().strip_suffix('}').unwrap());
        assert!(after.starts_with(",\"bootstrap_port\":8998,\"bootstrap_room\":"));
        let asked = first.json();
        assert_eq!(asked["bootstrap_host"], "127.0.0.1");
        rooms.push(asked["bootstrap_room"].as_u64().expect("a number"));
        for seen in [&first, &second] {
            assert_eq!(seen.line, format!("POST {path} HTTP/1.1"));
            assert_eq!(seen.header("authorization"), Some("Bearer theirs"));
            assert_eq!(seen.header("x-request-id"), got.header("x-request-id"));
        }
    }
    rooms.dedup();
    assert!(
        rooms.len() == 3 && rooms.iter().all(|&room| room < 1 << 62),
        "{rooms:?}"
    );
    assert_eq!(prefills(&server, &prefill, "transferred"), 3.0);
    assert_eq!(server.metric("slipstream_engine_prefills_total"), 3.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn mooncake_engines_get_their_requests_at_once_and_one_transfer_id() {
    let meetings = Arc::default();
    let (prefill, decode) = (prefill_engine(&meetings), decode_engine(&meetings));
    let ranks = bootstrap(&["e-0", "e-1"]);
    let server = mooncake(&[&prefill], &[&decode], ranks.address);
    let mut of_ranks = [0; 2];
    for _ in 0..16 {
        let got = server.post("/v1/completions", STREAM);
        assert_eq!(text_of(&got.events()), "one two");
        let (first, second) = (
            prefill.seen().last().unwrap().clone(),
            decode.seen().last().unwrap().clone(),
        );
        let (asked, answers) = (first.json(), second.json());
        assert_eq!(
            (&asked["max_tokens"], &asked["stream"]),
            (&json!(1), &json!(false))
        );
        let id = &asked["kv_transfer_params"]["transfer_id"];
        assert_eq!(
            asked["kv_transfer_params"],
            json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id})
        );
        let rank: usize = first
            .header("x-data-parallel-rank")
            .unwrap()
            .parse()
            .unwrap();
        of_ranks[rank] += 1;
        assert_eq!(
            answers["kv_transfer_params"],
            json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
                "remote_engine_id": format!("e-{rank}"),
                "remote_bootstrap_addr": format!("http://127.0.0.1:{}", ranks.address.port())})
        );
        assert!(second.header("x-data-parallel-rank").is_none());
        let rest = String::from_utf8(second.body).unwrap();
        assert!(rest.ends_with(&STREAM[1..]), "byte for byte: {rest}");
    }
    assert!(of_ranks.iter().all(|&count| count > 0), "{of_ranks:?}");
    assert_eq!(prefills(&server, &prefill, "transferred"), 16.0);
    // One engine computes it.
    let whole = r#"{"prompt":"x","n":2}"#;
    assert_eq!(server.post("/v1/completions", whole).status, 200);
    assert_eq!(decode.seen().last().unwrap().body, whole.as_bytes());
}

#[test]
fn a_prefill_engine_whose_bootstrap_server_does_not_answer_is_not_asked() {
    let meetings = Arc::default();
    let (prefill, decode) = (prefill_engine(&meetings), decode_engine(&meetings));
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = free.local_addr().unwrap().port();
    drop(free);
    let port = format!("--set=pool.b.bootstrap_port={nobody}");
    let more = ["--set=pool.b.kv_protocol=\"mooncake\"", &*port];
    let server = front(&[&prefill], &[&decode], &more);
    server.await_metric("slipstream_engine_up", |up| up == 1.0);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(text_of(&got.events()), "one two");
    assert!(prefill.seen().is_empty());
    assert_eq!(decode.seen()[0].body, STREAM.as_bytes());
    let engines = server.get("/health").json()["engines"].clone();
    let failure = engines[1]["last_failure"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(
        failure.contains(&format!("bootstrap server (port {nobody})")),
        "{failure}"
    );
}

/// Waits until the router closes the connection, and says so.
fn hang(stream: &mut TcpStream, closed: &Mutex<mpsc::Sender<()>>) {
    let end = stream.read(&mut [0]).map_err(|error| error.kind());
    assert_ne!(end, Err(std::io::ErrorKind::WouldBlock));
    closed.lock().unwrap().send(()).unwrap();
}

fn check_prefill_fails(name: &str, broken: impl Fn(&mut TcpStream) + Copy + Send + Sync + 'static) {
    let meetings: Arc<Meetings> = Arc::default();
    let failing = || {
        let meetings = meetings.clone();
        Engine::start(move |request, stream| {
            meetings.meet(request, 0);
            broken(stream);
        })
    };
    // vLLM's decode engine waits for blocks that never come; then it computes the prompt.
    let (say_closed, closed) = mpsc::channel();
    let decode = {
        let (meetings, closed) = (meetings.clone(), Mutex::new(say_closed));
        Engine::start(move |request, stream| {
            if is_whole(request) {
                return stream_texts(stream, "d", &["one ", "two"]);
            }
            meetings.meet(request, 1);
            hang(stream, &closed);
        })
    };
    let (prefill, ranks) = (failing(), bootstrap(&["e"]));
    let server = mooncake(&[&prefill], &[&decode], ranks.address);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(text_of(&got.events()), "one two", "{name}");
    closed
        .recv_timeout(PATIENCE)
        .expect("the other request ends");
    assert_eq!(decode.seen()[1].body, STREAM.as_bytes());
    assert_eq!(prefills(&server, &prefill, "failed"), 1.0, "{name}");
    assert_eq!(server.metric("slipstream_engine_prefills_total"), 1.0);
    assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);

    // That of SGLang cannot: another pair gets the request.
    let (say_closed, closed) = mpsc::channel();
    let (failing, working) = (failing(), prefill_engine(&meetings));
    let decode = || {
        let (meetings, closed) = (meetings.clone(), Mutex::new(say_closed.clone()));
        let failing = failing.address.port();
        Engine::start(move |request, stream| {
            meetings.meet(request, 1);
            if request.json()["bootstrap_port"] == failing {
                return hang(stream, &closed);
            }
            stream_texts(stream, "d", &["one ", "two"]);
        })
    };
    let (first, second) = (decode(), decode());
    // The port names the prefill engine here, so each has a pool.
    let flags = [
        format!("--set=pool.c.engines=[\"http://{}\"]", working.address),
        "--set=pool.c.role=\"prefill\"".into(),
        "--set=pool.c.kind=\"sglang\"".into(),
        format!("--set=pool.b.bootstrap_port={}", failing.address.port()),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(SGLANG).collect();
    let server = front(&[&failing], &[&first, &second], &flags);
    server.await_metric("slipstream_engine_up", |up| up == 4.0);
    let mut failed = 0;
    // Either is asked first.
    for _ in 0..8 {
        let got = server.post("/v1/completions", STREAM);
        assert_eq!(text_of(&got.events()), "one two", "{name}: {}", got.text());
        if failing.seen().len() > failed {
            failed += 1;
            closed
                .recv_timeout(PATIENCE)
                .expect("the other request ends");
        }
    }
    assert!(failed > 0, "{name}");
    assert_eq!(prefills(&server, &failing, "failed"), failed as f64);
    assert_eq!(prefills(&server, &working, "transferred"), 8.0);
    assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn a_prefill_that_fails_ends_the_request_to_the_decode_engine() {
    check_prefill_fails("an error", |stream| {
        answer(stream, "500 Internal Server Error", "", b"{}");
    });
    check_prefill_fails("a closed connection", |_| {});
    check_prefill_fails("half an answer", |stream| {
        say(
            stream,
            b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"id\"",
        );
    });
}

#[test]
fn a_prompt_that_sglang_refuses_is_not_sent_elsewhere() {
    let (say_closed, closed) = mpsc::channel();
    let closed_of = Mutex::new(say_closed);
    let decode = Engine::start(move |_, stream| hang(stream, &closed_of));
    let refuses = || {
        Engine::start(|_, stream| {
            answer(stream, "400 Bad Request", "", b"{\"message\":\"too long\"}");
        })
    };
    let (first, second) = (refuses(), refuses());
    let server = sglang(&[&first, &second], &[&decode]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(got.status, 400);
    assert!(got.text().contains("too long"), "{}", got.text());
    closed
        .recv_timeout(PATIENCE)
        .expect("the other request ends");
    assert_eq!(first.seen().len() + second.seen().len(), 1);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn a_decode_engine_that_fails_ends_the_request_to_the_prefill_engine() {
    let meetings: Arc<Meetings> = Arc::default();
    let (say_closed, closed) = mpsc::channel();
    // It holds the blocks until the decode engine has them.
    let holding = || {
        let (meetings, closed) = (meetings.clone(), Mutex::new(say_closed.clone()));
        Engine::start(move |request, stream| {
            meetings.meet(request, 0);
            hang(stream, &closed);
        })
    };
    // It refuses the parameters, and computes the prompt.
    let refusing = {
        let meetings = meetings.clone();
        Engine::start(move |request, stream| {
            if is_whole(request) {
                return stream_texts(stream, "d", &["one ", "two"]);
            }
            meetings.meet(request, 1);
            answer(stream, "500 Internal Server Error", "", b"{}");
        })
    };
    let (prefill, ranks) = (holding(), bootstrap(&["e"]));
    let server = mooncake(&[&prefill], &[&refusing], ranks.address);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(text_of(&got.events()), "one two");
    closed
        .recv_timeout(PATIENCE)
        .expect("the other request ends");
    assert_eq!(prefills(&server, &prefill, "decode_failed"), 1.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);

    // It is lost, or answers as one of SGLang whose prompt did not arrive: another pair gets the request.
    for status in ["", "500 Internal Server Error", "503 Service Unavailable"] {
        let lost = {
            let meetings = meetings.clone();
            Engine::start(move |request, stream| {
                meetings.meet(request, 1);
                if !status.is_empty() {
                    answer(stream, status, "", b"{}");
                }
            })
        };
        let working = decode_engine(&meetings);
        let prefill = {
            let (meetings, closed) = (meetings.clone(), Mutex::new(say_closed.clone()));
            let asked = Mutex::new(0);
            Engine::start(move |request, stream| {
                meetings.meet(request, 0);
                *asked.lock().unwrap() += 1;
                if *asked.lock().unwrap() == 1 {
                    return hang(stream, &closed);
                }
                answer(stream, "200 OK", "", WHOLE);
            })
        };
        let server = sglang(&[&prefill], &[&lost, &working]);
        server.await_metric("slipstream_engine_up", |up| up == 3.0);
        let got = server.post("/v1/completions", STREAM);
        if lost.seen().is_empty() {
            // The other one was chosen; its prefill engine was let go at its end.
            assert_eq!(text_of(&got.events()), "one two");
            closed
                .recv_timeout(PATIENCE)
                .expect("the other request ends");
            continue;
        }
        assert_eq!(
            text_of(&got.events()),
            "one two",
            "{status}: {}",
            got.text()
        );
        closed
            .recv_timeout(PATIENCE)
            .expect("the other request ends");
        assert_eq!(prefill.seen().len(), 2, "{status}");
        assert_eq!(prefills(&server, &prefill, "decode_failed"), 1.0);
        assert_eq!(prefills(&server, &prefill, "transferred"), 1.0);
        server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
    }
}

#[test]
fn a_client_that_leaves_stops_both_engines() {
    let meetings: Arc<Meetings> = Arc::default();
    let (say_closed, closed) = mpsc::channel();
    let (say_met, met) = mpsc::channel();
    let hanging = |side| {
        let meetings = meetings.clone();
        let senders = (Mutex::new(say_met.clone()), Mutex::new(say_closed.clone()));
        Engine::start(move |request, stream| {
            meetings.meet(request, side);
            senders.0.lock().unwrap().send(()).unwrap();
            hang(stream, &senders.1);
        })
    };
    let (prefill, decode) = (hanging(0), hanging(1));
    let server = sglang(&[&prefill], &[&decode]);
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], STREAM.len());
    client.write(STREAM.as_bytes());
    for _ in 0..2 {
        met.recv_timeout(PATIENCE).expect("both have it");
    }
    drop(client);
    for _ in 0..2 {
        closed.recv_timeout(PATIENCE).expect("both connections end");
    }
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn an_answer_may_begin_before_that_of_the_prefill_engine_ends() {
    let (say_begun, begun) = mpsc::channel();
    let (say_done, done) = mpsc::channel();
    let prefill = {
        let channels = Mutex::new((begun, say_done));
        Engine::start(move |_, stream| {
            let channels = channels.lock().unwrap();
            channels
                .0
                .recv_timeout(PATIENCE)
                .expect("the client has a word");
            stream.set_nonblocking(true).unwrap();
            let open = stream.peek(&mut [0]).map_err(|error| error.kind());
            assert_eq!(open, Err(std::io::ErrorKind::WouldBlock), "it was cut");
            stream.set_nonblocking(false).unwrap();
            answer(stream, "200 OK", "", WHOLE);
            channels.1.send(()).unwrap();
        })
    };
    let decode = {
        let done = Mutex::new(done);
        Engine::start(move |_, stream| {
            say(stream, EVENTS);
            chunk(stream, &text_event("d", "one "));
            done.lock()
                .unwrap()
                .recv_timeout(PATIENCE)
                .expect("the prompt is sent");
            chunk(stream, &text_event("d", "two"));
            chunk(stream, "data: [DONE]\n\n");
            say(stream, b"0\r\n\r\n");
        })
    };
    let server = sglang(&[&prefill], &[&decode]);
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], STREAM.len());
    client.write(STREAM.as_bytes());
    assert_eq!(client.head().status, 200);
    let first = client.chunk().expect("an event");
    assert!(String::from_utf8_lossy(&first).contains("one "));
    say_begun.send(()).unwrap();
    let mut rest = Vec::new();
    while let Some(chunk) = client.chunk() {
        rest.extend_from_slice(&chunk);
    }
    assert!(String::from_utf8_lossy(&rest).ends_with("[DONE]\n\n"));
    assert_eq!(prefills(&server, &prefill, "transferred"), 1.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn decode_engines_of_sglang_alone_are_no_service_for_prompts() {
    let meetings = Arc::default();
    let decode = decode_engine(&meetings);
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = free.local_addr().unwrap();
    drop(free);
    let server = front_at(&[nobody], &[decode.address], &SGLANG);
    server.await_metric("slipstream_engine_up", |up| up == 1.0);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(got.status, 503);
    assert!(got.text().contains("no prefill engine"), "{}", got.text());
    assert_eq!(server.get("/ready").status, 503);
    assert!(decode.seen().is_empty());
    let tokens = server.post("/tokenize", r#"{"prompt":"x"}"#);
    assert_eq!(tokens.status, 200, "it needs no prefill");
}
