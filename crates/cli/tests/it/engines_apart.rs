//! Disaggregated prefill with engines that answer by a script: what each gets, and what a failure costs.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, mpsc};

use crate::engines::{
    EVENTS, Engine, PATIENCE, STREAM, answer, chunk, say, stream_texts, text_event, text_of,
};
use crate::server::{Server, run};

/// As an engine writes them: not as a JSON library would.
const PARAMS: &str = r#"{"do_remote_prefill": true,"remote_block_ids":[[1,2],[ ]],"remote_host":"h\u00e9",
    "remote_port":5600,"x":{"y":1.50,"big":12345678901234567890123},"do_remote_decode":false}"#;

fn prefilled() -> String {
    format!(r#"{{"id":"p","choices":[{{"text":"z"}}],"kv_transfer_params":{PARAMS}}}"#)
}

/// Computes prompts.
fn prefill_engine() -> Engine {
    Engine::start(|_, stream| answer(stream, "200 OK", "", prefilled().as_bytes()))
}

/// Answers, and streams if it is asked to.
fn decode_engine() -> Engine {
    Engine::start(|request, stream| {
        if request.json()["stream"] == true {
            stream_texts(stream, "d", &["one ", "two"]);
        } else {
            answer(stream, "200 OK", "", b"{\"id\":\"d\",\"choices\":[{}]}");
        }
    })
}

fn pools(prefill: &[SocketAddr], decode: &[SocketAddr]) -> Vec<String> {
    let urls = |of: &[SocketAddr]| {
        let urls: Vec<String> = of.iter().map(|at| format!("\"http://{at}\"")).collect();
        urls.join(",")
    };
    vec![
        format!("--set=pool.a.engines=[{}]", urls(decode)),
        "--set=pool.a.role=\"decode\"".into(),
        format!("--set=pool.b.engines=[{}]", urls(prefill)),
        "--set=pool.b.role=\"prefill\"".into(),
        // Bodies are compared byte for byte.
        "--set=upstream.resume=text".into(),
        "--set=live.shards=1".into(),
    ]
}

pub(crate) fn front_at(prefill: &[SocketAddr], decode: &[SocketAddr], more: &[&str]) -> Server {
    let flags = pools(prefill, decode);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Server::start(&[&flags, more])
}

pub(crate) fn front(prefill: &[&Engine], decode: &[&Engine], more: &[&str]) -> Server {
    let of = |engines: &[&Engine]| -> Vec<SocketAddr> {
        engines.iter().map(|engine| engine.address).collect()
    };
    front_at(&of(prefill), &of(decode), more)
}

/// Prompts that an engine was to compute for another one, by their end.
pub(crate) fn prefills(server: &Server, engine: &Engine, outcome: &str) -> f64 {
    let url = format!("http://{}", engine.address);
    let series = r#"slipstream_engine_prefills_total{engine="URL",outcome="OUTCOME"}"#;
    server.metric(&series.replace("URL", &url).replace("OUTCOME", outcome))
}

/// The router expects hits where a prompt is computed.
#[test]
fn expected_hits_are_those_of_the_prefill_engine() {
    let (prefill, decode) = (prefill_engine(), decode_engine());
    let server = front(&[&prefill], &[&decode], &[]);
    let prompt = "Once upon a time ".repeat(100);
    let body = format!(r#"{{"model":"m","prompt":"{prompt}","max_tokens":9}}"#);
    for _ in 0..2 {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    let count = |name: &str, engine: &Engine| {
        let series = r#"slipstream_engine_NAME_total{engine="http://URL"}"#;
        let series = series.replace("NAME", name);
        server.metric(&series.replace("URL", &engine.address.to_string()))
    };
    let blocks = count("prompt_blocks", &prefill);
    let hits = count("prefix_hit_blocks", &prefill);
    assert!(blocks > 20.0, "{blocks}");
    assert!(
        hits > 0.4 * blocks && hits <= 0.5 * blocks,
        "of the second: {hits}"
    );
    assert_eq!(count("prompt_blocks", &decode), 0.0);
}

#[test]
fn parameters_of_the_prefill_engine_reach_the_decode_engine_as_they_are() {
    let (prefill, decode) = (prefill_engine(), decode_engine());
    let server = front(&[&prefill], &[&decode], &[]);
    let chat = r#" {"model":"m","messages":[{"role":"user","content":"hi"}],"max_completion_tokens":7,
        "stream":true,"stream_options":{"include_usage":true},"min_tokens":3,"temperature":1.0e0}"#;
    let plain = r#"{"model":"m","prompt":"Once upon","max_tokens":9,"logprobs":2}"#;
    for (path, body) in [
        ("/v1/completions", plain),
        ("/v1/completions", STREAM),
        ("/v1/chat/completions", chat),
    ] {
        let headers = [
            "Accept-Encoding: gzip",
            "X-Custom: 1",
            "Authorization: Bearer theirs",
        ];
        let got = server
            .connect()
            .send("POST", path, &headers, body.as_bytes());
        assert_eq!(got.status, 200);
        if body.contains("\"stream\":true") {
            assert_eq!(text_of(&got.events()), "one two");
        } else {
            assert_eq!(got.text(), "{\"id\":\"d\",\"choices\":[{}]}");
        }
        let (first, second) = (
            prefill.seen().last().unwrap().clone(),
            decode.seen().last().unwrap().clone(),
        );
        assert_eq!(first.line, format!("POST {path} HTTP/1.1"));
        let asked = first.json();
        assert_eq!(asked["max_tokens"], 1);
        assert_eq!(asked["stream"], false);
        assert_eq!(
            asked["kv_transfer_params"],
            serde_json::json!({
                "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null,
            })
        );
        for field in ["stream_options", "min_tokens", "logprobs"] {
            assert!(asked.get(field).is_none(), "{field}");
        }
        let sent: serde_json::Value = serde_json::from_str(body).unwrap();
        for field in ["model", "prompt", "messages", "temperature"] {
            assert_eq!(asked.get(field), sent.get(field), "{field}");
        }
        let expected =
            body.trim_start()
                .replacen('{', &format!("{{\"kv_transfer_params\":{PARAMS},"), 1);
        assert_eq!(String::from_utf8(second.body.clone()).unwrap(), expected);
        let id = first.header("x-request-id").expect("an id");
        assert_eq!(second.header("x-request-id"), Some(id));
        assert_eq!(got.header("x-request-id"), Some(id));
        assert_eq!(first.header("accept-encoding"), None);
        // A compressed answer cannot be judged.
        assert_eq!(second.header("accept-encoding"), Some("identity"));
        for seen in [&first, &second] {
            assert_eq!(seen.header("x-custom"), Some("1"));
            assert_eq!(seen.header("authorization"), Some("Bearer theirs"));
        }
    }
    assert_eq!(prefills(&server, &prefill, "transferred"), 3.0);
    assert_eq!(server.metric("slipstream_engine_prefills_total"), 3.0);
    assert_eq!(server.metric("slipstream_prompts_apart_total"), 3.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
    // The client's name for the request is kept.
    let named = ["X-Request-Id: mine"];
    server
        .connect()
        .send("POST", "/v1/completions", &named, plain.as_bytes());
    for engine in [&prefill, &decode] {
        let seen = engine.seen();
        assert_eq!(seen.last().unwrap().header("x-request-id"), Some("mine"));
    }
}

#[test]
fn requests_of_one_engine_never_reach_a_prefill_engine() {
    let (prefill, decode) = (prefill_engine(), decode_engine());
    let min = "--set=router.remote_prefill_tokens_min=20";
    let server = front(&[&prefill], &[&decode], &[min]);
    let long = "word ".repeat(40);
    for (path, fields) in [
        ("/v1/completions", r#""n":2,"prompt":"LONG""#),
        ("/v1/completions", r#""best_of":2,"prompt":"LONG""#),
        ("/v1/completions", r#""prompt":["LONG","LONG"]"#),
        ("/v1/completions", r#""prompt":"LONG","echo":true"#),
        ("/v1/completions", r#""prompt":"LONG","prompt_logprobs":1"#),
        (
            "/v1/completions",
            r#""prompt":"LONG","use_beam_search":true"#,
        ),
        (
            "/v1/completions",
            r#""prompt":"LONG","kv_transfer_params":{"do_remote_decode":true}"#,
        ),
        // Less than `remote_prefill_tokens_min`.
        ("/v1/completions", r#""prompt":"short""#),
        ("/v1/embeddings", r#""input":"LONG""#),
        ("/tokenize", r#""prompt":"LONG""#),
    ] {
        let body = format!("{{{}}}", fields.replace("LONG", &long));
        assert_eq!(server.post(path, &body).status, 200, "{body}");
        let seen = decode.seen();
        assert_eq!(
            seen.last().unwrap().body,
            body.as_bytes(),
            "byte for byte: {body}"
        );
    }
    assert!(prefill.seen().is_empty());
    // Not known at the decode engine.
    let body = format!(r#"{{"prompt":"Another {long}"}}"#);
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    assert_eq!(prefill.seen().len(), 1);
}

#[test]
fn an_answer_without_parameters_lets_the_decode_engine_compute() {
    let decode = decode_engine();
    for text in [
        r#"{"id":"p"}"#,
        r#"{"kv_transfer_params":null}"#,
        r#"{"kv_transfer_params":{}}"#,
        r#"{"kv_transfer_params":"x"}"#,
    ] {
        let prefill = Engine::start(move |_, stream| answer(stream, "200 OK", "", text.as_bytes()));
        let server = front(&[&prefill], &[&decode], &[]);
        let got = server.post("/v1/completions", STREAM);
        assert_eq!(text_of(&got.events()), "one two");
        assert_eq!(decode.seen().last().unwrap().body, STREAM.as_bytes());
        assert_eq!(prefills(&server, &prefill, "no_params"), 1.0);
        assert_eq!(server.metric("slipstream_engine_prefills_total"), 1.0);
    }
}

fn check_fallback(name: &str, broken: impl Fn(&mut TcpStream) + Send + Sync + 'static) {
    let prefill = Engine::start(move |_, stream| broken(stream));
    let decode = decode_engine();
    // A prefill that fails is no retry.
    let server = front(&[&prefill], &[&decode], &["--set=upstream.retries_max=0"]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(got.status, 200, "{name}: {}", got.text());
    assert_eq!(text_of(&got.events()), "one two", "{name}");
    assert_eq!(prefill.seen().len(), 1, "{name}");
    let seen = decode.seen();
    assert_eq!(seen.len(), 1, "{name}");
    assert_eq!(seen[0].body, STREAM.as_bytes(), "{name}");
    assert_eq!(prefills(&server, &prefill, "failed"), 1.0, "{name}");
    assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn a_prefill_engine_that_fails_costs_no_answer() {
    check_fallback("an error", |stream| {
        answer(stream, "500 Internal Server Error", "", b"{}");
    });
    check_fallback("a refusal", |stream| {
        answer(stream, "400 Bad Request", "", b"{}");
    });
    check_fallback("busy", |stream| {
        answer(stream, "503 Service Unavailable", "", b"busy");
    });
    check_fallback("a closed connection", |_| {});
    check_fallback("half an answer", |stream| {
        say(
            stream,
            b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"id\"",
        );
    });
    check_fallback("a stream", |stream| stream_texts(stream, "p", &["a"]));
    check_fallback("no JSON", |stream| {
        answer(stream, "200 OK", "", b"\x1f\x8b\x08");
    });
    check_fallback("no HTTP", |stream| say(stream, b"SSH-2.0\r\n\r\n"));
    check_fallback("an endless answer", |stream| {
        say(stream, EVENTS);
        let piece = " ".repeat(1 << 20);
        (0..6).for_each(|_| chunk(stream, &piece));
    });
    // No process listens any more: the health checks know it only later.
    let port = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap();
    let prefill = Engine::serving("m", port, |_, stream| {
        answer(stream, "200 OK", "", prefilled().as_bytes());
    });
    let decode = decode_engine();
    let server = front(&[&prefill], &[&decode], &[]);
    assert_eq!(server.post("/v1/completions", STREAM).status, 200);
    drop(prefill);
    for _ in 0..3 {
        let got = server.post("/v1/completions", STREAM);
        assert_eq!(text_of(&got.events()), "one two", "{address} is gone");
    }
    assert_eq!(server.get("/ready").status, 200);
}

#[test]
fn a_long_prompt_and_long_parameters_are_passed_on() {
    let ids: Vec<String> = (0..200_000).map(|id| id.to_string()).collect();
    let params = format!(r#"{{"remote_block_ids":[{}]}}"#, ids.join(","));
    let text = format!(r#"{{"kv_transfer_params":{params}}}"#);
    // In chunks, and longer than one read otherwise takes.
    let prefill = Engine::start(move |_, stream| {
        say(stream, EVENTS);
        for piece in text.as_bytes().chunks(100_000) {
            chunk(stream, std::str::from_utf8(piece).unwrap());
        }
        say(stream, b"0\r\n\r\n");
    });
    let decode = decode_engine();
    let server = front(&[&prefill], &[&decode], &[]);
    let body = format!(
        r#"{{"prompt":"{}","max_tokens":3}}"#,
        "word ".repeat(60_000)
    );
    let got = server.post("/v1/completions", &body);
    assert_eq!(got.status, 200, "{}", got.text());
    let sent = body.replacen('{', &format!("{{\"kv_transfer_params\":{params},"), 1);
    assert!(decode.seen()[0].body == sent.as_bytes());
    assert_eq!(prefill.seen()[0].json()["max_tokens"], 1);
}

#[test]
fn a_decode_engine_that_fails_is_asked_for_all_of_it_or_replaced() {
    // It refuses the parameters: a server that does not know the field, or a transfer that failed.
    for status in ["400 Bad Request", "500 Internal Server Error"] {
        let prefill = prefill_engine();
        let decode = Engine::start(move |request, stream| {
            if request.json().get("kv_transfer_params").is_some() {
                answer(stream, status, "", b"{}");
            } else {
                stream_texts(stream, "d", &["one ", "two"]);
            }
        });
        let server = front(&[&prefill], &[&decode], &["--set=upstream.retries_max=0"]);
        let got = server.post("/v1/completions", STREAM);
        assert_eq!(text_of(&got.events()), "one two", "{status}");
        assert_eq!(decode.seen()[1].body, STREAM.as_bytes());
        assert_eq!(prefills(&server, &prefill, "decode_failed"), 1.0);
        assert_eq!(server.metric("slipstream_engine_prefills_total"), 1.0);
    }
    // The client's own mistake is answered by the engine.
    let (prefill, decode) = (
        Engine::start(|_, stream| answer(stream, "400 Bad Request", "", b"p")),
        Engine::start(|_, stream| answer(stream, "400 Bad Request", "", b"d")),
    );
    let server = front(&[&prefill], &[&decode], &[]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!((got.status, got.text().as_str()), (400, "d"));
    // It dies before its first byte: another one answers.
    let prefill = prefill_engine();
    let (dying, decode) = (Engine::start(|_, _| {}), decode_engine());
    let server = front(&[&prefill], &[&dying, &decode], &[]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(text_of(&got.events()), "one two");
    assert_eq!(dying.seen().len(), 1);
    assert_eq!(prefill.seen().len(), 2, "for each decode engine");
    assert_eq!(prefills(&server, &prefill, "decode_failed"), 1.0);
    assert_eq!(prefills(&server, &prefill, "transferred"), 1.0);
    // There is no other one.
    let server = front(&[&prefill], &[&dying], &[]);
    assert!(server.post("/v1/completions", STREAM).status >= 502);
    server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
}

#[test]
fn a_stream_continues_after_its_decode_engine_is_lost() {
    let prefill = prefill_engine();
    let lost = || {
        Engine::start(|request, stream| {
            if request.json()["prompt"] == "Once upon" {
                say(stream, EVENTS);
                chunk(stream, &text_event("d", "one "));
            } else {
                stream_texts(stream, "e", &["two"]);
            }
        })
    };
    let (a, b) = (lost(), lost());
    let server = front(&[&prefill], &[&a, &b], &[]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(text_of(&got.events()), "one two");
    let prompts: Vec<_> = prefill
        .seen()
        .iter()
        .map(|of| of.json()["prompt"].clone())
        .collect();
    assert_eq!(prompts, ["Once upon", "Once uponone "]);
}

#[test]
fn a_client_that_leaves_stops_whichever_engine_has_its_request() {
    let (say_begun, begun) = mpsc::channel();
    let (say_closed, closed) = mpsc::channel();
    let hangs = |begun: mpsc::Sender<()>, closed: mpsc::Sender<()>| {
        let senders = Mutex::new((begun, closed));
        Engine::start(move |_, stream| {
            senders.lock().unwrap().0.send(()).unwrap();
            let end = stream.read(&mut [0]).map_err(|error| error.kind());
            assert_ne!(end, Err(std::io::ErrorKind::WouldBlock));
            senders.lock().unwrap().1.send(()).unwrap();
        })
    };
    let (prefill, decode) = (prefill_engine(), decode_engine());
    let slow_prefill = hangs(say_begun.clone(), say_closed.clone());
    let slow_decode = hangs(say_begun, say_closed);
    for (prefill, decode) in [(&slow_prefill, &decode), (&prefill, &slow_decode)] {
        let server = front(&[prefill], &[decode], &[]);
        let mut client = server.connect();
        client.write_head("POST", "/v1/completions", &[], STREAM.len());
        client.write(STREAM.as_bytes());
        begun.recv_timeout(PATIENCE).expect("an engine has it");
        drop(client);
        closed.recv_timeout(PATIENCE).expect("its connection ends");
        server.await_metric("slipstream_engine_in_flight", |open| open == 0.0);
    }
    assert!(decode.seen().is_empty(), "nothing follows the prefill");
}

#[test]
fn prefill_engines_alone_are_no_service() {
    let prefill = prefill_engine();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = free.local_addr().unwrap();
    drop(free);
    let server = front_at(&[prefill.address], &[nobody], &[]);
    assert_eq!(server.get("/ready").status, 503);
    assert_eq!(server.post("/v1/completions", STREAM).status, 503);
    assert!(prefill.seen().is_empty());
    let engines = server.get("/health").json()["engines"].clone();
    assert_eq!(engines[0]["role"], "decode");
    assert_eq!(engines[1]["role"], "prefill");
}

#[test]
fn engines_join_the_pool_of_their_role() {
    let (prefill, decode) = (prefill_engine(), decode_engine());
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("admin.key");
    std::fs::write(&key, "secret\n").unwrap();
    let key = format!("--set=upstream.admin_key_file=\"{}\"", key.display());
    let server = front(&[&prefill], &[&decode], &[&key]);
    let (second, third) = (prefill_engine(), decode_engine());
    for (engine, pool, role) in [(&second, "b", "prefill"), (&third, "a", "decode")] {
        let body = format!(r#"{{"url":"http://{}","pool":"{pool}"}}"#, engine.address);
        let added = server.connect().send(
            "POST",
            "/admin/engines",
            &["Authorization: Bearer secret"],
            body.as_bytes(),
        );
        assert_eq!(added.status, 201, "{}", added.text());
        let list = server.get("/health").json()["engines"].clone();
        let url = format!("http://{}", engine.address);
        let entry = list.as_array().unwrap().iter().find(|of| of["url"] == *url);
        assert_eq!(entry.unwrap()["role"], role);
    }
    server.await_metric("slipstream_engine_up", |up| up == 4.0);
    for old in [&prefill, &decode] {
        let path = format!("/admin/engines?url=http://{}&drain_s=0", old.address);
        let key = ["Authorization: Bearer secret"];
        let left = server.connect().send("DELETE", &path, &key, b"");
        assert_eq!(left.status, 202, "{}", left.text());
    }
    server.await_metric("slipstream_engines_removed_total", |left| left == 2.0);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(text_of(&got.events()), "one two");
    assert!(prefill.seen().is_empty() && decode.seen().is_empty());
    assert_eq!(second.seen()[0].json()["max_tokens"], 1);
    assert_eq!(third.seen()[0].json()["max_tokens"], 9);
}

#[test]
fn top_shows_roles_and_failed_prefills() {
    let prefill = Engine::start(|_, stream| answer(stream, "500 Broken", "", b"{}"));
    let decode = decode_engine();
    let server = front(&[&prefill], &[&decode], &[]);
    let got = server.post("/v1/completions", STREAM);
    assert_eq!(text_of(&got.events()), "one two");
    let url = format!("http://{}", server.address());
    let (code, text, errors) = run(&["top", &url, "--once", "--interval=10ms"]);
    assert_eq!(code, Some(0), "{errors}");
    let cells = |name: &str| -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name} in {text}"));
        let cells = line.split("  ").map(|cell| cell.trim().to_owned());
        cells.filter(|cell| !cell.is_empty()).collect()
    };
    let columns = cells("engine");
    let cell = |engine: &Engine, column: &str| {
        let at = columns.iter().position(|name| name == column);
        let row = cells(&format!("http://{}", engine.address));
        row[at.unwrap_or_else(|| panic!("{column} in {text}"))].clone()
    };
    assert_eq!(cell(&prefill, "role"), "prefill");
    assert_eq!(cell(&decode, "role"), "decode");
    assert_eq!(
        (&*cell(&prefill, "failed"), &*cell(&decode, "failed")),
        ("1", "-")
    );
    assert!(text.contains("prefill: failed: 1"), "{text}");
}

#[test]
fn engines_without_the_protocol_cannot_have_a_role() {
    let (code, _, error) = run(&[
        "serve",
        "--set=pool.a.engines=[\"http://127.0.0.1:1\"]",
        "--set=pool.b.engines=[\"http://127.0.0.1:2\"]",
        "--set=pool.b.role=\"prefill\"",
        "--set=pool.b.kind=\"llamacpp\"",
    ]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("vLLM or SGLang"), "{error}");
    let (code, _, error) = run(&[
        "serve",
        "--set=pool.b.engines=[\"http://127.0.0.1:2\"]",
        "--set=pool.b.role=\"prefill\"",
    ]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("no pool generates answers"), "{error}");
}
