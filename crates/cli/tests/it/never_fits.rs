//! Requests that can never fit into `live.memory_max`: 413, not "try again later".

use std::io::Write;
use std::net::TcpStream;
use std::process::{Command, Stdio};

use crate::engines::{Engine, Seen, WHOLE, answer, front};
use crate::server::{FAST, LONG, Server};

/// `live.memory_max`, and what one request may hold of it: half, less its connection.
const MEMORY: usize = 16 << 20;
const ALLOWED: usize = MEMORY / 2 - (16 << 10);
const MEMORY_FLAG: &str = "--set=live.memory_max=16777216";

/// Bytes charged for a body as it arrives.
fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(64 << 10)
}

/// Lengths around the largest that `fits`, and some far from it. SplitMix64 (Steele, Lea, Flood; OOPSLA 2014).
fn lengths(count: usize, seed: u64, fits: impl Fn(usize) -> bool) -> Vec<usize> {
    let (mut low, mut high) = (1 << 10, 8 << 20);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        *(if fits(middle) { &mut low } else { &mut high }) = middle;
    }
    let mut state = seed;
    let mut draw = |most: usize| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 33) as usize % most
    };
    let mut drawn = vec![low, low + 1];
    for n in 0..count {
        drawn.push(match n % 3 {
            0 => low - draw(1 << 10),
            1 => low + 1 + draw(1 << 10),
            _ => (1 << 10) + draw((8 << 20) - (1 << 10)),
        });
    }
    drawn
}

/// A body of `len` bytes that begins with `head`.
fn body(head: &str, len: usize) -> Vec<u8> {
    let mut body = format!("{head}\"prompt\":\"").into_bytes();
    body.resize(len - 2, b'a');
    body.extend_from_slice(b"\"}");
    body
}

/// Status and body of an answer, by curl. `None` if there is no curl.
fn curl(
    server: &Server,
    path: &str,
    body: &[u8],
    http2: bool,
    sized: bool,
) -> Option<(u16, String)> {
    let url = format!("http://{}{path}", server.address());
    let version = if http2 {
        "--http2-prior-knowledge"
    } else {
        "--http1.1"
    };
    let source: &[&str] = if sized {
        &["--data-binary", "@-"]
    } else {
        &["-X", "POST", "-T", "-"]
    };
    let mut command = Command::new("curl");
    command
        .args([
            "--silent",
            "--max-time",
            "60",
            version,
            "--write-out",
            "\n%{http_code}",
        ])
        .args(["-H", "content-type: application/json"])
        .args(source)
        .arg(&url)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().ok()?;
    // It stops reading once it has an answer.
    let _ = child.stdin.take().unwrap().write_all(body);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (text, status) = text.rsplit_once('\n').expect("a status");
    Some((status.parse().unwrap(), text.to_owned()))
}

/// Sends bodies of drawn lengths in every way, and checks that those that fit are answered and no others.
fn check(server: &Server, path: &str, head: &str, seed: u64, fits: impl Fn(usize) -> bool) {
    for (n, len) in lengths(10, seed, &fits).into_iter().enumerate() {
        let body = body(head, len);
        // Every length at the limit in all four ways, others in one.
        let ways = if n < 2 { 0..4 } else { n % 4..n % 4 + 1 };
        for way in ways {
            let Some((status, text)) = curl(server, path, &body, way & 1 == 1, way & 2 == 2) else {
                eprintln!("skipped: there is no curl");
                return;
            };
            let case = format!("{path}, {len} bytes, way {way}: {status} {text:.300}");
            if fits(len) {
                assert_eq!(status, 200, "{case}");
                continue;
            }
            assert_eq!(status, 413, "{case}");
            let error: serde_json::Value = serde_json::from_str(&text).expect(&case);
            let message = error["error"]["message"].as_str().unwrap();
            assert_eq!(error["error"]["code"], "request_too_large", "{case}");
            for part in [
                "`live.memory_max`",
                &MEMORY.to_string(),
                &ALLOWED.to_string(),
            ] {
                assert!(message.contains(part), "{case}");
            }
        }
    }
    let name = "slipstream_requests_rejected_total{reason=\"memory_max\"}";
    assert!(server.metric(name) > 0.0);
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes < 1e6);
}

#[test]
fn a_prompt_that_memory_max_never_admits_is_413() {
    let server = Server::start(&[FAST, &[MEMORY_FLAG]]);
    // Above 16 KiB a helper reads the body, in 32 times its length.
    let fits = |len: usize| len <= 16 << 10 || rounded(len) + rounded(32 * len) <= ALLOWED;
    check(&server, "/tokenize", "{", 1, fits);
}

#[test]
fn a_body_that_memory_max_never_admits_is_413_before_engines() {
    let engine =
        Engine::start(|_: &Seen, stream: &mut TcpStream| answer(stream, "200 OK", "", WHOLE));
    let server = front(&[&engine], &[MEMORY_FLAG]);
    // The prompt's tokens and hashes take twice the body.
    let fits = |len: usize| len <= 64 << 10 || rounded(len) + 2 * len <= ALLOWED;
    check(&server, "/v1/completions", "{\"model\":\"m\",", 2, fits);
}

#[test]
fn an_announced_body_that_never_fits_is_refused_before_it_is_read() {
    let engine =
        Engine::start(|_: &Seen, stream: &mut TcpStream| answer(stream, "200 OK", "", WHOLE));
    let set = &["--set=live.body_bytes_max=1073741824", MEMORY_FLAG];
    for server in [Server::start(&[FAST, set]), front(&[&engine], set)] {
        for len in [ALLOWED + 1, 9 << 20, 1 << 30] {
            let mut client = server.connect();
            client.write_head("POST", "/v1/completions", &[], len);
            let refused = client.answer();
            assert_eq!((refused.status, refused.header("retry-after")), (413, None));
            let needed = format!("needs {} bytes", rounded(len));
            assert!(refused.error().contains(&needed), "{}", refused.error());
        }
    }
}

#[test]
fn an_answer_that_never_fits_is_413() {
    let server = Server::start(&[
        FAST,
        &[MEMORY_FLAG, "--set=live.answer_bytes_max=1073741824"],
    ]);
    let ask = |inputs: usize| {
        let inputs = vec!["\"a\""; inputs].join(",");
        let body = format!("{{\"input\":[{inputs}],\"dimensions\":4096}}");
        server.post("/v1/embeddings", &body)
    };
    // 24 bytes a number.
    for (inputs, status) in [(1, 200), (80, 200), (90, 413), (400, 413)] {
        let got = ask(inputs);
        assert_eq!(got.status, status, "{inputs}: {:.200}", got.text());
        if status == 413 {
            assert!(got.error().contains("`live.memory_max`"), "{}", got.error());
            assert_eq!(got.header("retry-after"), None);
        }
    }
    server.await_metric("slipstream_memory_used_bytes", |bytes| bytes < 1e6);
}

#[test]
fn stored_responses_leave_a_client_room_for_requests() {
    let server = Server::start(&[FAST, LONG, &[MEMORY_FLAG]]);
    let text = "a ".repeat(10 << 10);
    let body = format!("{{\"input\":\"{text}\",\"max_output_tokens\":16}}");
    // More than the client's share in all.
    for n in 0..500 {
        let got = server.post("/v1/responses", &body);
        assert_eq!(got.status, 200, "response {n}: {}", got.text());
    }
    assert!(server.metric("slipstream_memory_used_bytes") <= (MEMORY / 8) as f64 + 1e6);
}
