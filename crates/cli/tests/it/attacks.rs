//! Effects of one client on the others.
//!
//! Each attack runs next to a paced client. It may delay that client by 10 ms of CPU time at most, which the
//! server's own clock of its shards tells: the CPU time for which a shard worked on one thing.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::server::{Client, FAST, FROZEN, LONG, Server, run, slipstream};

const PATIENCE: Duration = Duration::from_secs(60);

/// The longest CPU time for which a shard may work on one thing, s.
const POLL_MAX_S: f64 = 0.010;

/// Passes of 5 ms: a client's stream is paced by them.
const PACED: &[&str] = &[
    "--speedup=1",
    "--set=model.name=test-model",
    "--set=pool.main.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=5000000",
    "--set=engine.num_gpu_blocks=10000",
    "--set=engine.max_model_len=4096",
    "--set=live.shards=1",
];

/// Runs `attack` while another client receives a stream, and checks that the stream is whole and that no
/// shard worked on one thing for longer than it may.
fn beside_a_paced_client(server: &Server, attack: impl FnOnce(&Server)) {
    let mut paced = server.connect();
    let body = r#"{"prompt":"a","max_tokens":400,"ignore_eos":true,"stream":true,"seed":1}"#;
    paced.write_head("POST", "/v1/completions", &[], body.len());
    paced.write(body.as_bytes());
    assert_eq!(paced.head().status, 200);
    let first = paced.chunk().expect("it has begun");
    attack(server);
    let mut text = String::from_utf8(first).unwrap();
    while let Some(chunk) = paced.chunk() {
        text += std::str::from_utf8(&chunk).unwrap();
    }
    let events = text.matches("\"finish_reason\":null").count();
    assert_eq!(events, 399, "the paced client gets every token");
    assert!(text.ends_with("data: [DONE]\n\n"));
    let longest = server.metric("slipstream_shard_poll_max_seconds");
    assert!(
        longest <= POLL_MAX_S,
        "a shard worked on one thing for {longest} s of CPU time"
    );
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
}

fn completion(prompt: &str, rest: &str) -> String {
    format!(r#"{{"prompt":"{prompt}","ignore_eos":true,{rest}}}"#)
}

#[test]
fn a_whole_answer_with_log_probabilities_holds_nobody_up() {
    let server = Server::start(&[PACED]);
    beside_a_paced_client(&server, |server| {
        for (path, wish) in [
            ("/v1/completions", r#""logprobs":20"#),
            (
                "/v1/chat/completions",
                r#""logprobs":true,"top_logprobs":20"#,
            ),
        ] {
            let input = match path {
                "/v1/completions" => r#""prompt":"a""#,
                _ => r#""messages":[{"role":"user","content":"a"}]"#,
            };
            let body =
                format!(r#"{{{input},"n":32,"max_tokens":60,"ignore_eos":true,"seed":3,{wish}}}"#);
            let answer = server.post(path, &body);
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(
                answer.text().len() > 1 << 20,
                "large enough to be sent in pieces"
            );
            let json = answer.json();
            assert_eq!(json["usage"]["completion_tokens"], 32 * 60);
            let choice = &json["choices"][31]["logprobs"];
            let tops = match path {
                "/v1/completions" => &choice["top_logprobs"][59],
                _ => &choice["content"][59]["top_logprobs"],
            };
            let count = tops.as_array().map_or_else(
                || tops.as_object().map_or(0, serde_json::Map::len),
                Vec::len,
            );
            assert_eq!(count, 20, "{tops}");
        }
    });
}

#[test]
fn an_answer_that_could_be_too_large_is_refused_at_once() {
    let server = Server::start(&[FAST, LONG]);
    let body = completion("a", r#""n":128,"logprobs":20,"max_tokens":6000"#);
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 400);
    assert!(
        answer.error().contains("live.answer_bytes_max"),
        "{}",
        answer.error()
    );
    assert_eq!(answer.json()["error"]["code"], "answer_too_large");
    // Streams are bounded by what their client reads.
    let stream = completion(
        "a",
        r#""n":128,"logprobs":20,"max_tokens":6000,"stream":true"#,
    );
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], stream.len());
    client.write(stream.as_bytes());
    assert_eq!(client.head().status, 200);
    drop(client);
    // Prompts that are repeated count.
    let long = "the ".repeat(20_000);
    let echo = completion(&long, r#""n":128,"echo":true,"stream":true"#);
    let answer = server.post("/v1/completions", &echo);
    assert_eq!(
        (answer.status, answer.json()["error"]["param"].as_str()),
        (400, Some("echo"))
    );
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
}

/// The built-in tokenizer as a Hugging Face directory.
fn exported() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let exported = run(&["tokenizer", "export", dir.path().to_str().unwrap()]);
    assert_eq!(exported.0, Some(0), "{exported:?}");
    dir
}

fn with_tokenizer(dir: &Path) -> String {
    format!("--set=model.tokenizer={}", dir.display())
}

#[test]
fn long_prompts_hold_nobody_up() {
    let dir = exported();
    let tokenizer = with_tokenizer(dir.path());
    for args in [&[][..], &[tokenizer.as_str()][..]] {
        let server = Server::start(&[PACED, args]);
        beside_a_paced_client(&server, |server| {
            let long = "the quick brown fox ".repeat(20_000);
            for body in [
                completion(&long, r#""max_tokens":1"#),
                completion(&long, r#""max_tokens":1,"n":128"#),
                completion(&"\u{17f}".repeat(50_000), r#""max_tokens":1"#),
            ] {
                let answer = server.post("/v1/completions", &body);
                assert_eq!(answer.status, 400, "{}", answer.text());
                assert!(
                    answer.error().contains("maximum context length"),
                    "{}",
                    answer.error()
                );
            }
            let tokens = server.post("/tokenize", &format!(r#"{{"prompt":"{long}"}}"#));
            assert!(tokens.json()["count"].as_u64() >= Some(80_000));
        });
    }
}

#[test]
fn a_text_too_long_by_its_bytes_is_not_tokenized() {
    let dir = exported();
    let tokenizer = with_tokenizer(dir.path());
    let server = Server::start(&[FAST, &[&tokenizer]]);
    let spaces = " ".repeat(7 << 20);
    let chat = format!(r#"{{"messages":[{{"role":"user","content":"{spaces}"}}]}}"#);
    for (path, body) in [
        ("/v1/completions", completion(&spaces, r#""max_tokens":1"#)),
        ("/v1/chat/completions", chat),
    ] {
        let answer = server.post(path, &body);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
        // The bound follows from the longest token; the text has a token per space.
        let said = answer.error();
        let counted: u64 = said
            .split_once('(')
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
            .or_else(|| {
                said.split(' ').find_map(|word| {
                    word.trim_end_matches(',')
                        .parse()
                        .ok()
                        .filter(|&n: &u64| n > 4096)
                })
            })
            .unwrap_or_else(|| panic!("{said}"));
        assert!(counted > 4096 && counted < 7 << 20, "not counted: {said}");
    }
}

/// An HTTP/2 client that speaks frames (RFC 9113).
pub(crate) struct Http2(TcpStream);

impl Http2 {
    pub(crate) fn connect(server: &Server, window: u32) -> Http2 {
        let stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Http2(stream);
        client
            .0
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .unwrap();
        let mut settings = vec![0, 4]; // SETTINGS_INITIAL_WINDOW_SIZE
        settings.extend(window.to_be_bytes());
        client.frame(4, 0, 0, &settings);
        client
    }

    fn frame(&mut self, kind: u8, flags: u8, stream: u32, body: &[u8]) {
        let mut frame = (body.len() as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(body);
        self.0.write_all(&frame).unwrap();
    }

    fn headers(&mut self, stream: u32, method: &str, path: &str, flags: u8) {
        let mut block = Vec::new();
        for (name, value) in [
            (":method", method),
            (":scheme", "http"),
            (":path", path),
            (":authority", "test"),
            ("content-type", "application/json"),
        ] {
            // A literal field without indexing (RFC 7541, section 6.2.2).
            block.extend([0, name.len() as u8]);
            block.extend(name.as_bytes());
            block.push(value.len() as u8);
            block.extend(value.as_bytes());
        }
        self.frame(1, flags, stream, &block);
    }

    pub(crate) fn post(&mut self, stream: u32, path: &str, body: &str) {
        self.headers(stream, "POST", path, 4);
        self.frame(0, 1, stream, body.as_bytes());
    }

    /// Reads until the server closes the connection.
    pub(crate) fn until_closed(mut self) {
        let mut bytes = [0; 4096];
        loop {
            match self.0.read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(error) => panic!("the server leaves the connection open: {error}"),
            }
        }
    }
}

#[test]
fn a_client_that_opens_no_window_keeps_no_streams() {
    let args = [
        "--set=live.write_timeout_s=0.5",
        "--set=live.streams_max=1000",
    ];
    let server = Server::start(&[FAST, &args]);
    let mut client = Http2::connect(&server, 0);
    let body = r#"{"prompt":"a","max_tokens":1,"n":8,"stream":true}"#;
    for request in 0..8 {
        client.post(2 * request + 1, "/v1/completions", body);
    }
    // A large answer that is not streamed, and one that no engine made.
    client.post(
        17,
        "/v1/completions",
        r#"{"prompt":"a","max_tokens":100,"n":32,"logprobs":5,"ignore_eos":true}"#,
    );
    client.headers(19, "GET", "/openapi.json", 5);
    server.await_metric(
        "slipstream_streams_cut_total{reason=\"slow_reader\"}",
        |cut| cut >= 9.0,
    );
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    client.until_closed();
    server.await_metric(
        "slipstream_connections_closed_total{reason=\"unread\"}",
        |n| n == 1.0,
    );
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes < 100_000.0);
    server.assert_alive();
}

#[test]
fn the_time_of_a_request_is_over_for_a_client_that_reads_nothing_too() {
    let server = Server::start(&[FAST, &["--set=live.request_timeout_s=0.5"]]);
    let mut client = Http2::connect(&server, 0);
    client.post(
        1,
        "/v1/completions",
        r#"{"prompt":"a","max_tokens":1,"n":8,"stream":true}"#,
    );
    server.await_metric("slipstream_streams_cut_total{reason=\"deadline\"}", |cut| {
        cut == 1.0
    });
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    drop(client);
}

#[test]
fn a_connection_and_a_client_leave_streams_for_others_and_ready_tells() {
    let args = [
        "--set=live.streams_max=64",
        "--set=live.client_streams_max=64",
        "--set=live.connection_streams_max=40",
    ];
    let server = Server::start(&[FROZEN, &args]);
    let body = r#"{"prompt":"a","max_tokens":1,"n":32,"stream":true}"#;
    let mut first = Http2::connect(&server, 65_535);
    first.post(1, "/v1/completions", body);
    server.await_metric("slipstream_streams_open", |open| open == 32.0);
    assert_eq!(server.get("/ready").status, 200);
    first.post(3, "/v1/completions", body);
    server.await_metric(
        "slipstream_requests_rejected_total{reason=\"streams_max\"}",
        |n| n == 1.0,
    );
    let mut second = Http2::connect(&server, 65_535);
    second.post(1, "/v1/completions", body);
    server.await_metric("slipstream_streams_open", |open| open == 64.0);
    let ready = server.get("/ready");
    assert_eq!(
        (ready.status, ready.json()["reason"].as_str()),
        (503, Some("streams_max"))
    );
    let refused = server.post("/v1/completions", r#"{"prompt":"a"}"#);
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (503, Some("1"))
    );
    drop((first, second));
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    assert_eq!(server.get("/ready").status, 200);
}

#[test]
fn http2_connections_that_say_nothing_end() {
    let args = [
        "--set=live.read_timeout_s=0.3",
        "--set=live.idle_timeout_s=0.3",
    ];
    let server = Server::start(&[FAST, &args]);
    let silent = Http2::connect(&server, 65_535);
    let mut half = Http2::connect(&server, 65_535);
    half.headers(1, "GET", "/health", 1); // no END_HEADERS
    let mut served = Http2::connect(&server, 65_535);
    served.headers(1, "GET", "/health", 5);
    for client in [silent, half, served] {
        client.until_closed();
    }
    server.await_metric(
        "slipstream_connections_closed_total{reason=\"idle\"}",
        |n| n == 3.0,
    );
}

#[test]
fn an_address_leaves_connections_for_others() {
    let args = [
        "--set=live.connections_max=8",
        "--set=live.client_connections_max=6",
    ];
    let server = Server::start(&[FAST, &args]);
    let mut held: Vec<Client> = (0..5).map(|_| server.connect()).collect();
    for client in &mut held {
        assert_eq!(client.send("GET", "/health", &[], b"").status, 200);
    }
    let mut others: Vec<TcpStream> = (0..3).map(|_| from(&server, 2)).collect();
    // The sixth of this address, and then none of any.
    let mut last = server.connect();
    let mut closed = 0;
    for stream in &mut others {
        let mut byte = [0];
        stream
            .set_read_timeout(Some(Duration::from_millis(1)))
            .unwrap();
        closed += usize::from(matches!(stream.read(&mut byte), Ok(0)));
    }
    assert_eq!(closed, 0, "three of another address fit");
    assert!(last.is_closed());
    let page = held[0].send("GET", "/metrics", &[], b"").text();
    assert!(
        page.contains("slipstream_connections_closed_total{reason=\"connections_max\"} 1"),
        "{page}"
    );
    drop(others);
    // Room for all again: now the limit of this address counts.
    let began = Instant::now();
    let mut more = Vec::new();
    while held[0]
        .send("GET", "/metrics", &[], b"")
        .text()
        .contains("{reason=\"client_connections_max\"} 0")
    {
        assert!(began.elapsed() < PATIENCE);
        more.push(server.connect());
    }
}

/// A connection from 127.0.0.`host`.
fn from(server: &Server, host: u8) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let address = IpAddr::V4(Ipv4Addr::new(127, 0, 0, host));
    socket.bind(&SocketAddr::new(address, 0).into()).unwrap();
    socket.connect(&server.address().into()).unwrap();
    socket.into()
}

#[test]
fn memory_is_shed_before_it_is_full() {
    let server = Server::start(&[FAST, &["--set=live.memory_max=16777216"]]);
    // Bodies of 4 MiB that never become whole, from two addresses.
    let part = |host: u8, bytes: usize| {
        let mut stream = from(&server, host);
        let head = "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n\
                    Content-Length: 8000000\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        // Fails once the server has refused the rest.
        let _ = stream.write_all(&vec![b' '; bytes]);
        stream
    };
    let mut held = vec![part(2, 7 << 20)];
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes > 7e6);
    let mut refused = part(2, 2 << 20);
    refused.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut status = [0; 12];
    refused.read_exact(&mut status).unwrap();
    assert_eq!(&status, b"HTTP/1.1 429", "one client takes half at most");
    server.assert_alive();
    held.push(part(3, 7 << 20));
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes > 14.7e6);
    let answer = server.post("/v1/completions", r#"{"prompt":"a"}"#);
    assert_eq!(
        (answer.status, answer.header("retry-after")),
        (503, Some("1"))
    );
    assert_eq!(answer.json()["error"]["code"], "memory_max");
    let ready = server.get("/ready");
    assert_eq!(
        (ready.status, ready.json()["reason"].as_str()),
        (503, Some("memory_max"))
    );
    assert!(server.metric("slipstream_requests_rejected_total{reason=\"memory_max\"}") >= 2.0);
    drop(held);
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes < 1e6);
    server.assert_alive();
}

#[test]
fn a_duplex_request_that_falls_silent_ends() {
    let server = Server::start(&[FAST, &["--set=live.idle_timeout_s=0.3"]]);
    let open = |blank: bool| {
        let mut client = server.connect();
        client.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/x-ndjson\r\n\
              Transfer-Encoding: chunked\r\n\r\n",
        );
        let line = completion("a", r#""max_tokens":2,"stream":true"#) + "\n";
        client.write(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes());
        if blank {
            client.write(b"1\r\n\n\r\n");
        }
        client
    };
    for blank in [false, true] {
        let mut client = open(blank);
        assert_eq!(client.head().status, 200);
        let mut text = String::new();
        while let Some(chunk) = client.chunk() {
            text += std::str::from_utf8(&chunk).unwrap();
        }
        assert!(text.contains("idle_timeout"), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    assert_eq!(
        server.metric("slipstream_streams_cut_total{reason=\"idle\"}"),
        2.0
    );
}

#[test]
fn keys_that_are_all_comments_do_not_open_the_server() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "\u{feff}# our keys follow\n# sk-old\n\n").unwrap();
    let keys = format!("--set=live.api_keys_file={}", file.path().display());
    let (status, _, said) = run(&["serve", "--listen=127.0.0.1:0", &keys]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("has no API key"), "{said}");
    for empty in ["", " , # sk-old"] {
        let output = slipstream()
            .args(["serve", "--listen=127.0.0.1:0"])
            .env("SLIPSTREAM_API_KEYS", empty)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(
            said.contains("SLIPSTREAM_API_KEYS is set and has no API key"),
            "{said}"
        );
    }
}

#[test]
fn a_key_is_a_client_of_its_own() {
    let mut command = slipstream();
    command
        .arg("serve")
        .args(FROZEN)
        .arg("--set=live.client_streams_max=4")
        .env("SLIPSTREAM_API_KEYS", "alpha,beta");
    let server = Server::spawn(command);
    let ask = |key: &str, stream: bool| {
        let mut client = server.connect();
        let body = format!(r#"{{"prompt":"a","n":4,"stream":{stream}}}"#);
        let key = format!("Authorization: bearer {key}");
        client.write_head("POST", "/v1/completions", &[&key], body.len());
        client.write(body.as_bytes());
        client
    };
    let _held = ask("alpha", true);
    server.await_metric("slipstream_streams_open", |open| open == 4.0);
    assert_eq!(ask("alpha", false).answer().status, 429);
    let _other = ask("beta", true);
    server.await_metric("slipstream_streams_open", |open| open == 8.0);
    assert_eq!(ask("gamma", false).answer().status, 401);
}

#[test]
fn pages_of_named_origins_may_use_the_api() {
    let origin = "Origin: https://chat.example.org";
    let preflight = [origin, "Access-Control-Request-Method: POST"];
    let mut command = slipstream();
    command
        .arg("serve")
        .args(FAST)
        .arg("--set=live.cors_origins=\"https://chat.example.org, http://localhost:3000\"")
        .env("SLIPSTREAM_API_KEYS", "alpha");
    let server = Server::spawn(command);
    let ask = |method: &str, headers: &[&str]| {
        server
            .connect()
            .send(method, "/v1/chat/completions", headers, b"{}")
    };
    // A browser sends no key with this.
    let answer = ask("OPTIONS", &preflight);
    assert_eq!(answer.status, 204);
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://chat.example.org")
    );
    assert!(
        answer
            .header("access-control-allow-headers")
            .unwrap()
            .contains("authorization")
    );
    // The page can read the reason of a refusal.
    let answer = ask("POST", &[origin]);
    assert_eq!(answer.status, 401);
    assert_eq!(
        answer.header("access-control-allow-origin"),
        Some("https://chat.example.org")
    );
    let other = [
        "Origin: https://evil.example",
        "Access-Control-Request-Method: POST",
    ];
    let answer = ask("OPTIONS", &other);
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (401, None)
    );
    let closed = Server::start(&[FAST]);
    let answer = closed
        .connect()
        .send("OPTIONS", "/v1/chat/completions", &preflight, b"");
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (405, None)
    );
}
