//! Duplex requests over HTTP: clients that send turns while they receive.

use std::path::Path;

use crate::planes::{Worker, await_ready, frontend};
use crate::server::{Client, FAST, FROZEN, Server};

const NDJSON: &str = "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked";

fn first_line(prompt: &str, max_tokens: u32) -> String {
    format!(
        "{{\"prompt\":\"{prompt}\",\"max_tokens\":{max_tokens},\"ignore_eos\":true,\"stream\":true,\
         \"seed\":7,\"stream_options\":{{\"include_usage\":true}}}}\n"
    )
}

/// Opens a duplex request.
fn open(server: &Server) -> Client {
    let mut client = server.connect();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: test\r\n{NDJSON}\r\n\r\n");
    client.write(head.as_bytes());
    client
}

fn say(client: &mut Client, text: &str) {
    client.write(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes());
}

fn hang_up(client: &mut Client) {
    client.write(b"0\r\n\r\n");
}

/// Reads events until one has a finish reason; returns the turn's text.
fn read_turn(client: &mut Client, unread: &mut String) -> String {
    let mut text = String::new();
    loop {
        while let Some(end) = unread.find("\n\n") {
            let event: String = unread.drain(..end + 2).collect();
            let event = event.trim().strip_prefix("data: ").expect("an event");
            let event: serde_json::Value = serde_json::from_str(event).expect("JSON");
            let choice = &event["choices"][0];
            text += choice["text"].as_str().unwrap_or_else(|| panic!("{event}"));
            if choice["finish_reason"] == "length" {
                return text;
            }
        }
        let chunk = client.chunk().expect("the stream continues");
        *unread += std::str::from_utf8(&chunk).unwrap();
    }
}

fn rest(client: &mut Client, mut unread: String) -> String {
    while let Some(chunk) = client.chunk() {
        unread += std::str::from_utf8(&chunk).unwrap();
    }
    unread
}

/// A duplex request of three turns, the second begun after the first was received, the third sent
/// early.
fn converse(server: &Server) -> Vec<String> {
    let mut client = open(server);
    let unread = &mut String::new();
    say(
        &mut client,
        &first_line("one two three four five six seven eight", 20),
    );
    assert_eq!(client.head().status, 200);
    let mut turns = vec![read_turn(&mut client, unread)];
    say(
        &mut client,
        "{\"prompt\":\" and then?\"}\n{\"prompt\":[100,101,102]}\n",
    );
    turns.push(read_turn(&mut client, unread));
    turns.push(read_turn(&mut client, unread));
    hang_up(&mut client);
    let rest = rest(&mut client, std::mem::take(unread));
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert!(!rest.contains("\"error\""), "{rest}");
    let usage = rest
        .split("data: ")
        .find(|event| event.contains("\"usage\":{"));
    let usage: serde_json::Value = serde_json::from_str(usage.expect("counts").trim()).unwrap();
    assert_eq!(usage["usage"]["completion_tokens"], 60, "{usage}");
    assert!(
        usage["usage"]["prompt_tokens"].as_u64().unwrap() > 11,
        "{usage}"
    );
    turns
}

#[test]
fn a_client_sends_while_it_receives_and_each_turn_goes_on_from_the_last() {
    let server = Server::start(&[FAST]);
    let turns = converse(&server);
    assert!(turns.iter().all(|turn| !turn.is_empty()));
    assert_eq!(converse(&server), turns, "same seed, same answers");
    // The first turn is the answer to a whole request.
    let body = first_line("one two three four five six seven eight", 20);
    let whole = server.post(
        "/v1/completions",
        &body
            .replace("\"stream\":true,", "")
            .replace(",\"stream_options\":{\"include_usage\":true}", ""),
    );
    assert_eq!(whole.json()["choices"][0]["text"], turns[0].as_str());
    // Separate processes give the same result.
    let dir = tempfile::tempdir().unwrap();
    let apart = frontend(dir.path(), &[FAST]);
    let worker = Worker::start(dir.path(), &[FAST]);
    await_ready(&apart, 2);
    assert_eq!(converse(&apart), turns);
    apart.await_metric("slipstream_streams_open", |open| open == 0.0);
    apart.await_metric("vllm:num_requests_running", |running| running == 0.0);
    drop(worker);
}

#[test]
fn a_request_that_cannot_be_duplex_is_refused_and_a_bad_turn_ends_it() {
    let server = Server::start(&[FAST]);
    let check_refused = |line: &str, param: &str| {
        let mut client = open(&server);
        say(&mut client, line);
        hang_up(&mut client);
        let answer = client.answer();
        assert_eq!(answer.status, 400, "{line}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], param, "{}", answer.text());
    };
    let good = first_line("a", 5);
    check_refused("{\"prompt\":\"a\",\"max_tokens\":5}\n", "stream");
    check_refused(&good.replace("5,", "5000,"), "max_tokens");
    check_refused(&good.replace("\"seed\":7", "\"n\":2"), "n");
    check_refused(&good.replace("\"seed\":7", "\"stop\":\"x\""), "stop");
    check_refused(&good.replace("\"a\"", "[\"a\",\"b\"]"), "prompt");
    for (turn, part) in [
        ("{\"promt\":\"b\"}\n", "prompt"),
        ("{\"prompt\":7}\n", "prompt"),
        ("nonsense\n", "JSON"),
        ("{\"prompt\":[4294967295]}\n", "vocabulary"),
    ] {
        let mut client = open(&server);
        let unread = &mut String::new();
        say(&mut client, &good);
        assert_eq!(client.head().status, 200);
        read_turn(&mut client, unread);
        say(&mut client, turn);
        let rest = rest(&mut client, std::mem::take(unread));
        assert!(
            rest.contains("\"error\"") && rest.contains(part),
            "{turn}: {rest}"
        );
        assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    }
    // A turn that exceeds the remaining model length.
    let mut client = open(&server);
    let long = vec!["9"; 4090].join(",");
    say(&mut client, &good);
    say(&mut client, &format!("{{\"prompt\":[{long}]}}\n"));
    assert_eq!(client.head().status, 200);
    let rest = rest(&mut client, String::new());
    assert!(rest.contains("begin a new request"), "{rest}");
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    server.assert_alive();
}

#[test]
fn a_talk_whose_client_or_worker_goes_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[FROZEN]);
    let start = |dir: &Path| Worker::start(dir, &[FROZEN]);
    let worker = start(dir.path());
    await_ready(&server, 1);
    // The current pass takes an hour, so a later request waits.
    let begin = |state: &str| {
        let mut client = open(&server);
        say(&mut client, &first_line("a b c", 5));
        say(&mut client, "{\"prompt\":\"d\"}\n");
        assert_eq!(client.head().status, 200);
        server.await_metric(state, |sequences| sequences == 1.0);
        client
    };
    drop(begin("vllm:num_requests_running"));
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    server.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    let mut client = begin("vllm:num_requests_waiting");
    worker.kill();
    let rest = rest(&mut client, String::new());
    assert!(
        rest.contains("\"error\"") && rest.ends_with("data: [DONE]\n\n"),
        "{rest}"
    );
    let worker = start(dir.path());
    await_ready(&server, 1);
    drop(begin("vllm:num_requests_running"));
    drop(worker);
}
