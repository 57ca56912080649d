//! Client requests to `slipstream serve`: valid, invalid, and protocol violations.

use serde_json::Value;

use crate::planes::begin;
use crate::server::{FAST, FROZEN, LONG, Server, run};

fn events(body: &str) -> (Vec<Value>, Server) {
    let server = Server::start(&[FAST]);
    let answer = server.post("/v1/chat/completions", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let mut events = answer.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let events = events
        .iter()
        .map(|e| serde_json::from_str(e).expect("JSON"))
        .collect();
    (events, server)
}

#[test]
fn a_stream_has_one_event_a_token_and_the_counts_at_its_end() {
    let (events, server) = events(
        r#"{"messages":[{"role":"user","content":"count to ten"}],"max_tokens":7,"ignore_eos":true,
            "stream":true,"stream_options":{"include_usage":true}}"#,
    );
    let texts: Vec<&str> = events
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str())
        .collect();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(
        texts.len(),
        8,
        "the role's event, and one per token: {texts:?}"
    );
    assert!(texts[1..].iter().all(|t| !t.is_empty()));
    let reasons: Vec<_> = events
        .iter()
        .filter_map(|e| e["choices"][0]["finish_reason"].as_str())
        .collect();
    assert_eq!(reasons, ["length"]);
    let last = &events[events.len() - 2]["choices"][0];
    assert_eq!(last["finish_reason"], "length", "with the last token");
    let usage = &events.last().unwrap()["usage"];
    assert_eq!(usage["completion_tokens"], 7);

    // The text re-tokenizes to the tokens counted.
    let answer: String = texts.concat();
    let body = serde_json::json!({"prompt": answer, "add_special_tokens": false}).to_string();
    assert_eq!(server.post("/tokenize", &body).json()["count"], 7);
}

/// `vllm bench serve` counts every event of a completion as a token.
#[test]
fn a_completion_has_as_many_events_as_tokens() {
    for stop in ["", r#","stop":["no such thing"]"#, r#","logprobs":1"#] {
        let server = Server::start(&[FAST]);
        let body = format!(
            r#"{{"prompt":"count to ten","max_tokens":7,"ignore_eos":true,"stream":true,"n":2{stop}}}"#
        );
        let text = server.post("/v1/completions", &body).text();
        let mut events = [0, 0];
        let mut ended = [0, 0];
        for event in text.split("\n\n").filter_map(|e| e.strip_prefix("data: ")) {
            let Ok(event) = serde_json::from_str::<serde_json::Value>(event) else {
                continue; // [DONE]
            };
            let choice = &event["choices"][0];
            let index = choice["index"].as_u64().unwrap() as usize;
            events[index] += 1;
            if choice["finish_reason"] == "length" {
                ended[index] = events[index];
            }
        }
        assert_eq!((events, ended), ([7, 7], [7, 7]), "{text}");
    }
}

#[test]
fn every_event_has_counts_where_they_are_asked_for() {
    let (events, _server) = events(
        r#"{"messages":[{"role":"user","content":"count to ten"}],"max_tokens":7,"ignore_eos":true,
            "stop":["no such thing"],"stream":true,
            "stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#,
    );
    let (last, events) = events.split_last().unwrap();
    let counts: Vec<_> = events
        .iter()
        .map(|e| {
            assert_eq!(e["usage"]["prompt_tokens"], last["usage"]["prompt_tokens"]);
            e["usage"]["completion_tokens"].as_u64().unwrap()
        })
        .collect();
    // The role's event, and one per token.
    assert_eq!(counts, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(last["usage"]["completion_tokens"], 7);
}

#[test]
fn the_same_seed_gives_the_same_answer_and_choices_differ() {
    let server = Server::start(&[FAST]);
    let ask = |seed: u32| {
        let body = format!(r#"{{"prompt":"once","max_tokens":20,"n":2,"seed":{seed}}}"#);
        let json = server.post("/v1/completions", &body).json();
        let text = |i: usize| json["choices"][i]["text"].as_str().unwrap().to_owned();
        (text(0), text(1))
    };
    let first = ask(5);
    assert_eq!(first, ask(5));
    assert_ne!(first, ask(6));
    assert_ne!(first.0, first.1);
}

/// At a real pace: few and short steps, which a shard's thread runs, and events that it writes itself.
#[test]
fn an_engine_at_its_shard_gives_the_same_answer() {
    let body =
        r#"{"prompt":"count to ten","max_tokens":60,"ignore_eos":true,"stream":true,"seed":7}"#;
    let shown = |server: &Server| -> String {
        let events = server.post("/v1/completions", body).events();
        let events = events
            .iter()
            .filter_map(|e| serde_json::from_str::<Value>(e).ok());
        events
            .map(|event| {
                event["choices"][0]["text"]
                    .as_str()
                    .expect("text")
                    .to_owned()
            })
            .collect()
    };
    let paced = Server::start(&[FROZEN, &["--set=engine.timing.step_ns=2000000"]]);
    let answer = shown(&paced);
    assert_eq!(answer, shown(&Server::start(&[FAST])));
    assert!(paced.metric("slipstream_engine_thread_hosted_total") > 0.0);
    assert!(paced.metric("slipstream_direct_writes_total") > 0.0);
    assert_eq!(answer, shown(&paced), "again, from the cache");
}

#[test]
fn a_repeated_prompt_hits_the_cache_in_whole_blocks() {
    let server = Server::start(&[FAST]);
    let body = format!(r#"{{"prompt":"{}","max_tokens":1}}"#, "the ".repeat(100));
    let first = server.post("/v1/completions", &body).json();
    let second = server.post("/v1/completions", &body).json();
    let cached = |json: &Value| json["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let len = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(cached(&first), Some(0));
    // All full blocks of 16; the last token is always computed.
    assert_eq!(cached(&second), Some((len - 1) / 16 * 16));
}

/// Each turn repeats the conversation so far; the blocks of the answer are found too, even if the
/// chat template trims it.
#[test]
fn the_next_turn_hits_the_answer_of_the_last_one_where_the_template_trims() {
    let dir = tempfile::tempdir().unwrap();
    let exported = run(&["tokenizer", "export", dir.path().to_str().unwrap()]);
    assert_eq!(exported.0, Some(0), "{exported:?}");
    let config = dir.path().join("tokenizer_config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let trimming = text.replace("message.content", "message.content|trim");
    assert_ne!(trimming, text);
    std::fs::write(&config, trimming).unwrap();
    let tokenizer = format!("--set=model.tokenizer={}", dir.path().display());
    let server = Server::start(&[FAST, &["--set=pool.main.workers=1", &tokenizer]]);
    // Half of the vocabulary begins with a space: one seed could pass by chance, eight do not.
    for seed in 0..8 {
        let chat = |messages: Value| {
            let body = serde_json::json!({
                "messages": messages, "max_tokens": 80, "ignore_eos": true, "seed": seed,
            });
            let answer = server.post("/v1/chat/completions", &body.to_string());
            assert_eq!(answer.status, 200, "{}", answer.text());
            answer.json()
        };
        let question = serde_json::json!({"role": "user", "content": format!("number {seed}")});
        let first = chat(serde_json::json!([question]));
        let said = &first["choices"][0]["message"]["content"];
        let second = chat(serde_json::json!([
            question,
            {"role": "assistant", "content": said},
            {"role": "user", "content": "go on"},
        ]));
        let count = |json: &Value, key: &str| json["usage"][key].as_u64().unwrap();
        // The last token of an answer is not computed, so its block is not cached.
        let computed = count(&first, "prompt_tokens") + count(&first, "completion_tokens") - 1;
        let cached = &second["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert_eq!(cached.as_u64(), Some(computed / 16 * 16), "seed {seed}");
    }
}

#[test]
fn a_batch_of_prompts_gets_its_choices_in_order() {
    let server = Server::start(&[FAST]);
    let body = r#"{"prompt":["a b c","d e f"],"max_tokens":8,"n":2,"ignore_eos":true}"#;
    let json = server.post("/v1/completions", body).json();
    let texts: std::collections::BTreeSet<_> = (0..4)
        .map(|n| json["choices"][n]["text"].as_str().unwrap())
        .collect();
    assert_eq!(
        texts.len(),
        4,
        "a batch is not one answer many times: {texts:?}"
    );
    let indices: Vec<_> = json["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["index"].as_u64().unwrap())
        .collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(json["usage"]["completion_tokens"], 32);
}

#[test]
fn a_stop_string_ends_the_answer_and_frees_the_sequence() {
    let server = Server::start(&[FAST]);
    let ask = |stop: &str| {
        let body = serde_json::json!({
            "prompt": "go on", "max_tokens": 200, "seed": 1, "ignore_eos": true,
            "stop": if stop.is_empty() { vec![] } else { vec![stop] },
        });
        server.post("/v1/completions", &body.to_string()).json()
    };
    let whole = ask("")["choices"][0]["text"].as_str().unwrap().to_owned();
    // Any word from the middle will do; its first occurrence counts.
    let word = whole.split(' ').nth(20).unwrap().to_owned();
    let stopped = ask(&word);
    let expected = &whole[..whole.find(&word).unwrap()];
    assert_eq!(stopped["choices"][0]["text"], expected);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert!(stopped["usage"]["completion_tokens"].as_u64().unwrap() <= 21);
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
}

#[test]
fn a_trace_is_given_to_who_asks() {
    let server = Server::start(&[FAST]);
    let body = br#"{"prompt":"a","max_tokens":2,"ignore_eos":true}"#;
    let headers = ["x-slipstream-trace: 1", "x-request-id: mine"];
    let answer = server
        .connect()
        .send("POST", "/v1/completions", &headers, body);
    assert_eq!(answer.header("x-request-id"), Some("mine"));
    assert_eq!(answer.json()["id"], "cmpl-mine");
    let trace: Value =
        serde_json::from_str(answer.header("x-slipstream-trace").expect("a trace")).unwrap();
    let stages = trace["stages"].as_object().unwrap();
    let order = [
        "accept",
        "parsed",
        "tokenized",
        "routed",
        "dispatched",
        "worker_recv",
        "frame_recv",
    ];
    let times: Vec<u64> = order.iter().map(|s| stages[*s].as_u64().unwrap()).collect();
    assert!(times.is_sorted(), "{trace}");
    assert_eq!(trace["hit_blocks"], 0);
    assert_eq!(
        trace["scores"].as_array().map(Vec::len),
        Some(2),
        "one score per worker"
    );
    let untraced = server.post("/v1/completions", r#"{"prompt":"a","max_tokens":2}"#);
    assert_eq!(untraced.header("x-slipstream-trace"), None);
}

#[test]
fn a_worker_can_be_named() {
    let server = Server::start(&[FAST]);
    let body = br#"{"prompt":"a","max_tokens":2,"ignore_eos":true}"#;
    for worker in ["0", "1"] {
        let header = format!("x-slipstream-worker: {worker}");
        let headers = [header.as_str(), "x-slipstream-trace: 1"];
        let answer = server
            .connect()
            .send("POST", "/v1/completions", &headers, body);
        let trace: Value =
            serde_json::from_str(answer.header("x-slipstream-trace").unwrap()).unwrap();
        assert_eq!(trace["worker"].to_string(), worker);
    }
    for worker in ["2", "first"] {
        let header = format!("x-slipstream-worker: {worker}");
        let answer = server
            .connect()
            .send("POST", "/v1/completions", &[&header], body);
        assert_eq!(answer.status, 400, "{}", answer.text());
    }
}

/// Each invalid request: status, and words of its message.
#[test]
fn bad_requests_are_told_what_where_and_how_to_mend_it() {
    let server = Server::start(&[FAST]);
    let long = format!(r#"{{"prompt":"{}"}}"#, "the ".repeat(6000));
    let cases: &[(&str, &str, u16, &[&str])] = &[
        ("/v1/chat/completions", r#"{"messages":[}"#, 400, &["JSON"]),
        (
            "/v1/chat/completions",
            r#"{"messages":[]}"#,
            400,
            &["messages"],
        ),
        (
            "/v1/chat/completions",
            r#"{"messages":"hi"}"#,
            400,
            &["messages"],
        ),
        (
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":7}]}"#,
            400,
            &["content"],
        ),
        (
            "/v1/completions",
            r#"{"prompt":"a","max_tokens":-1}"#,
            400,
            &["max_tokens"],
        ),
        (
            "/v1/completions",
            r#"{"prompt":"a","max_tokens":99999999999999999999}"#,
            400,
            &["max_tokens"],
        ),
        (
            "/v1/completions",
            r#"{"prompt":"a","max_tokens":5000}"#,
            400,
            &["4096", "5001"],
        ),
        (
            "/v1/completions",
            r#"{"prompt":"a","max_tokens":"ten"}"#,
            400,
            &["max_tokens"],
        ),
        (
            "/v1/completions",
            r#"{"prompt":[4000000000]}"#,
            400,
            &["4000000000", "vocabulary"],
        ),
        (
            "/v1/chat/completions",
            r#"{"messages":[{"role":"user","content":"a"}],"tools":[{}]}"#,
            400,
            &["tools"],
        ),
        (
            "/v1/completions",
            r#"{"prompt":"a","model":"gpt-9"}"#,
            404,
            &["gpt-9", "test-model"],
        ),
        ("/v1/completions", &long, 400, &["4096"]),
        ("/v1/complete", r#"{"prompt":"a"}"#, 404, &["/openapi.json"]),
        ("/health", "{}", 405, &["GET"]),
    ];
    for (path, body, status, words) in cases {
        let answer = server.post(path, body);
        let shown = &body[..body.len().min(80)];
        assert_eq!(answer.status, *status, "{path} {shown}: {}", answer.text());
        for word in *words {
            assert!(
                answer.error().contains(word),
                "{shown}: no {word:?} in {:?}",
                answer.error()
            );
        }
    }
    let utf8 = server.send("POST", "/v1/completions", b"{\"prompt\":\"\xff\xfe\"}");
    assert_eq!(utf8.status, 400, "{}", utf8.text());
    assert!(utf8.error().contains("UTF-8"), "{}", utf8.error());
    server.assert_alive();
    let rejected = server.metric("slipstream_requests_rejected_total");
    assert_eq!(rejected, cases.len() as f64 + 1.0);
}

#[test]
fn fields_that_nobody_knows_are_ignored() {
    let server = Server::start(&[FAST]);
    let body = r#"{"prompt":"a","max_tokens":2,"ignore_eos":true,"some_future_field":{"x":[1]}}"#;
    assert_eq!(server.post("/v1/completions", body).status, 200);
}

#[test]
fn a_body_beyond_the_limit_is_refused_before_it_is_read() {
    let server = Server::start(&[FAST, &["--set=live.body_bytes_max=2000"]]);
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], 1 << 40);
    let answer = client.answer();
    assert_eq!(answer.status, 413);
    assert!(answer.error().contains("2000"), "{}", answer.error());
    // Without a length too.
    let mut client = server.connect();
    client.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n\
          Transfer-Encoding: chunked\r\n\r\n800\r\n",
    );
    client.write(&[b' '; 0x800]);
    client.write(b"\r\n");
    assert_eq!(client.answer().status, 413);
    server.assert_alive();
}

#[test]
fn other_media_types_are_refused() {
    let server = Server::start(&[FAST]);
    let mut client = server.connect();
    client.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: text/plain\r\n\
          Content-Length: 2\r\n\r\n{}",
    );
    let answer = client.answer();
    assert_eq!(answer.status, 415);
    assert!(answer.error().contains("application/json"));
}

#[test]
fn heads_that_are_too_long_or_too_slow_end_their_connection_alone() {
    let server = Server::start(&[FAST, &["--set=live.read_timeout_s=0.2"]]);
    let mut long = server.connect();
    let header = format!("x-filler: {}", "y".repeat(100_000));
    long.write(format!("GET /health HTTP/1.1\r\n{header}\r\n\r\n").as_bytes());
    let answer = long.head();
    assert_eq!(answer.status, 431);
    let mut slow = server.connect();
    slow.write(b"GET /health HTTP/1.1\r\nHost: t\r\n");
    assert!(slow.is_closed(), "the head never ended");
    let mut slow = server.connect();
    slow.write_head("POST", "/v1/completions", &[], 100);
    slow.write(b"{\"prompt\":");
    let answer = slow.answer();
    assert_eq!(answer.status, 408, "{}", answer.text());
    server.assert_alive();
}

#[test]
fn a_client_that_goes_away_frees_its_blocks() {
    let server = Server::start(&[FROZEN]);
    let body = r#"{"prompt":"a b c","max_tokens":100,"ignore_eos":true,"stream":true}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    assert_eq!(client.head().status, 200);
    server.await_metric("vllm:num_requests_running", |running| running == 1.0);
    drop(client);
    // The current pass takes an hour; the blocks are freed without it.
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    server.await_metric("vllm:kv_cache_usage_perc", |used| used == 0.0);
    assert_eq!(server.metric("slipstream_client_disconnects_total"), 1.0);
    let aborted =
        r#"vllm:request_success_total{model_name="test-model",engine="0",finished_reason="abort"}"#;
    server.await_metric(aborted, |aborted| aborted == 1.0);
    // A whole answer uses another wait.
    let body = r#"{"prompt":"a b c","max_tokens":100,"ignore_eos":true}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    // Not running: the current pass began without it.
    server.await_metric("vllm:num_requests_waiting", |waiting| waiting == 1.0);
    drop(client);
    server.await_metric("vllm:num_requests_waiting", |waiting| waiting == 0.0);
}

#[test]
fn a_half_closed_client_is_taken_to_be_gone() {
    let server = Server::start(&[FROZEN]);
    let body = r#"{"prompt":"a b c","max_tokens":100,"ignore_eos":true,"stream":true}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    assert_eq!(client.head().status, 200);
    server.await_metric("vllm:num_requests_running", |running| running == 1.0);
    client.shutdown_write();
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
}

#[test]
fn a_client_that_does_not_read_is_paused_then_cut_and_others_go_on() {
    let server = Server::start(&[FAST, LONG, &["--set=live.write_timeout_s=0.5"]]);
    // 120,000 events of about 150 bytes fill any socket buffer.
    let body = r#"{"prompt":"a","max_tokens":120000,"ignore_eos":true,"stream":true}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    server.await_metric("slipstream_streams_paused_total", |n| n >= 1.0);
    server.assert_alive();
    server.await_metric("slipstream_streams_cut_total", |n| n == 1.0);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    server.assert_alive();
}

#[test]
fn a_full_stream_buffer_cuts_its_stream() {
    let server = Server::start(&[FAST, LONG, &["--set=live.stream_buffer_bytes_max=65536"]]);
    let body = r#"{"prompt":"a","max_tokens":120000,"ignore_eos":true,"stream":true}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    server.await_metric("slipstream_streams_cut_total", |n| n == 1.0);
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    // A client that reads in the end gets the error and the end.
    let answer = client.answer();
    let events = answer.events();
    let [.., error, done] = events.as_slice() else {
        panic!("no events")
    };
    assert_eq!(done, "[DONE]");
    assert!(error.contains("stream_buffer_bytes_max"), "{error}");
}

#[test]
fn a_deadline_ends_what_takes_too_long() {
    let server = Server::start(&[FROZEN, &["--set=live.request_timeout_s=0.2"]]);
    let whole = server.post("/v1/completions", r#"{"prompt":"a","max_tokens":9}"#);
    assert_eq!(whole.status, 504, "{}", whole.text());
    let stream = server.post(
        "/v1/completions",
        r#"{"prompt":"a","max_tokens":9,"stream":true}"#,
    );
    assert!(
        stream.events()[0].contains("deadline_exceeded"),
        "{}",
        stream.text()
    );
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
}

#[test]
fn streams_beyond_the_limit_are_asked_to_come_back() {
    let server = Server::start(&[FROZEN, &["--set=live.streams_max=2"]]);
    let body = r#"{"prompt":"a","max_tokens":9,"n":2,"stream":true}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    assert_eq!(client.head().status, 200);
    let refused = server.post("/v1/completions", r#"{"prompt":"a","max_tokens":9}"#);
    assert_eq!(refused.status, 503);
    assert!(refused.header("retry-after").is_some());
    // More streams than the server ever opens is an error of the client, and a retry does not help.
    let never = server.post("/v1/completions", r#"{"prompt":["a","b","c"]}"#);
    assert_eq!(never.status, 400, "{}", never.text());
    assert!(never.error().contains("3 streams"), "{}", never.error());
    drop(client);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
}

#[test]
fn busy_workers_answer_503_with_a_time_to_come_back() {
    let server = Server::start(&[FROZEN, &["--set=router.busy_prefill_tokens=50"]]);
    let body = format!(
        r#"{{"prompt":"{}","max_tokens":2,"stream":true}}"#,
        "the ".repeat(100)
    );
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    assert_eq!(client.head().status, 200);
    let refused = server.post("/v1/completions", &body);
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(
        refused
            .header("retry-after")
            .unwrap()
            .parse::<u32>()
            .unwrap()
            >= 1
    );
    assert_eq!(server.metric("slipstream_requests_rejected_total"), 1.0);
}

#[test]
fn requests_wait_in_order_for_a_busy_worker_and_the_rest_get_503() {
    let busy = "--set=router.busy_prefill_tokens=50";
    let server = Server::start(&[FROZEN, &[busy, "--set=router.queue_max=2"]]);
    let body = |word: &str| {
        let prompt = format!("{word} ").repeat(100);
        format!(r#"{{"prompt":"{prompt}","max_tokens":2,"stream":true}}"#)
    };
    let queued = |count: f64| {
        server.await_metric("slipstream_requests_queued", |queued| queued == count);
    };
    let running = begin(&server, &body("a"));
    server.await_metric("vllm:num_requests_running", |running| running == 1.0);
    let first = begin(&server, &body("b"));
    queued(1.0);
    let second = begin(&server, &body("c"));
    queued(2.0);
    let refused = server.post("/v1/completions", &body("d"));
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.header("retry-after").is_some());
    // A client that disconnects frees its place.
    drop(second);
    queued(1.0);
    // A free slot at the worker lets the next one run.
    drop(running);
    queued(0.0);
    let name = "slipstream_router_requests{worker=\"w0\",engine=\"0\"}";
    server.await_metric(name, |requests| requests == 1.0);
    drop(first);
    server.await_metric(name, |requests| requests == 0.0);
}

#[test]
fn keys_are_asked_for_where_they_are_set() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "first\nsecond\n").unwrap();
    let set = format!("--set=live.api_keys_file={}", keys.display());
    let server = Server::start(&[FAST, &[&set]]);
    let refused = server.get("/v1/models");
    assert_eq!(refused.status, 401);
    assert!(refused.error().contains("Authorization"));
    let headers = ["Authorization: Bearer second"];
    assert_eq!(
        server
            .connect()
            .send("GET", "/v1/models", &headers, b"")
            .status,
        200
    );
    assert_eq!(server.get("/health").status, 200, "probes have no keys");
}

#[test]
fn one_connection_serves_many_requests() {
    let server = Server::start(&[FAST]);
    let mut client = server.connect();
    for tokens in 1..=20 {
        let body = format!(r#"{{"prompt":"a","max_tokens":{tokens},"ignore_eos":true}}"#);
        let answer = client.send("POST", "/v1/completions", &[], body.as_bytes());
        assert_eq!(answer.json()["usage"]["completion_tokens"], tokens);
    }
    assert_eq!(
        server.metric("slipstream_connections_total"),
        2.0,
        "this one, and for the metric"
    );
}

#[test]
fn listings_say_what_is_served() {
    let server = Server::start(&[FAST]);
    assert_eq!(
        server.get("/v1/models").json()["data"][0]["id"],
        "test-model"
    );
    assert_eq!(
        server.get("/v1/models/test-model").json()["max_model_len"],
        4096
    );
    assert_eq!(server.get("/v1/models/other").status, 404);
    for path in ["/health", "/live", "/ready", "/version"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
}

#[test]
fn a_port_that_is_taken_is_said_so() {
    let server = Server::start(&[FAST]);
    let listen = format!("--listen={}", server.address());
    let (code, _, stderr) = run(&["serve", &listen]);
    assert_eq!(code, Some(2));
    assert!(stderr.contains(&server.address().to_string()), "{stderr}");
    assert!(stderr.contains("--listen"), "what to do: {stderr}");
    server.assert_alive();
}

#[test]
fn a_cluster_file_with_five_mistakes_lists_all_five() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("cluster.toml");
    let text = "[engine]\nblock_sise = 16\nmax_num_seqs = -1\n[router]\npolicy = \"kw\"\n\
                [pool.main]\nworkers = 0\n[live]\nspeedup = \"fast\"\n";
    std::fs::write(&file, text).unwrap();
    let (code, _, stderr) = run(&["serve", file.to_str().unwrap()]);
    assert_eq!(code, Some(2));
    for line in [2, 3, 5, 7, 9] {
        assert!(
            stderr.contains(&format!("cluster.toml:{line}")),
            "line {line} in:\n{stderr}"
        );
    }
    assert!(stderr.contains("block_size"), "the nearest key: {stderr}");
}

#[test]
fn print_config_tells_where_values_came_from() {
    let (code, stdout, _) = run(&["serve", "--set=engine.max_num_seqs=7", "--print-config"]);
    assert_eq!(code, Some(0));
    let line = stdout
        .lines()
        .find(|l| l.starts_with("max_num_seqs"))
        .expect("the key");
    assert!(line.contains('7') && line.contains("--set"), "{line}");
}

#[test]
fn http2_clients_are_served_on_the_same_port() {
    let server = Server::start(&[FAST]);
    let url = format!("http://{}/v1/completions", server.address());
    let curl = |stream: bool| {
        let body =
            format!(r#"{{"prompt":"a","max_tokens":5,"ignore_eos":true,"stream":{stream}}}"#);
        let output = std::process::Command::new("curl")
            .args([
                "--silent",
                "--no-buffer",
                "--http2-prior-knowledge",
                "--max-time",
                "20",
            ])
            .args(["--write-out", "HTTP/%{http_version} %{http_code}", &url])
            .args(["-H", "content-type: application/json", "-d", &body])
            .output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let Ok(whole) = curl(false) else {
        eprintln!("skipped: there is no curl");
        return;
    };
    assert!(whole.ends_with("HTTP/2 200"), "{whole}");
    assert!(whole.contains("\"completion_tokens\":5"), "{whole}");
    let stream = curl(true).expect("it ran before");
    assert!(stream.ends_with("data: [DONE]\n\nHTTP/2 200"), "{stream}");
    // An idle connection delays nothing, nor does one that stops within the preface.
    let mut half = server.connect();
    half.write(b"PRI * ");
    let quiet = server.connect();
    server.assert_alive();
    assert!(server.terminate().success());
    drop((half, quiet));
}

#[test]
fn what_takes_longer_than_the_drain_ends_with_an_error() {
    let server = Server::start(&[FROZEN, &["--set=live.drain_timeout_s=0.2"]]);
    let ask = |stream: bool| {
        let body = format!(r#"{{"prompt":"a","max_tokens":30,"stream":{stream}}}"#);
        let mut client = server.connect();
        client.write_head("POST", "/v1/completions", &[], body.len());
        client.write(body.as_bytes());
        client
    };
    let (mut stream, mut whole) = (ask(true), ask(false));
    server.await_metric("slipstream_streams_open", |open| open == 2.0);
    assert!(server.terminate().success());
    let text = stream.answer().text();
    assert!(text.contains(r#""code":"stopping""#), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let whole = whole.answer();
    assert_eq!(whole.status, 503, "{}", whole.text());
    assert!(whole.error().contains("live.drain_timeout_s"));
}

#[test]
fn terminating_lets_open_requests_finish() {
    let server = Server::start(&[
        &[
            "--speedup=1",
            "--set=pool.main.workers=1",
            "--set=engine.timing.kind=constant",
        ],
        &[
            "--set=engine.timing.step_ns=20000000",
            "--set=engine.num_gpu_blocks=1024",
        ],
        &["--set=engine.max_model_len=4096"],
    ]);
    let body = r#"{"prompt":"a","max_tokens":30,"ignore_eos":true,"stream":true}"#;
    let mut client = server.connect();
    client.write_head("POST", "/v1/completions", &[], body.len());
    client.write(body.as_bytes());
    assert_eq!(client.head().status, 200);
    assert!(client.chunk().is_some());
    let status = server.terminate();
    assert!(status.success(), "{status}");
    let mut rest = String::new();
    while let Some(chunk) = client.chunk() {
        rest += std::str::from_utf8(&chunk).unwrap();
    }
    assert!(rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert!(!rest.contains("error"), "{rest}");
}

#[test]
fn names_with_slashes_compressed_bodies_and_long_heads_are_told_apart() {
    let server = Server::start(&[
        FAST,
        &[
            "--set=model.name=meta/llama",
            "--set=live.header_bytes_max=1024",
        ],
    ]);
    for path in ["/v1/models/meta/llama", "/v1/models/meta%2Fllama"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert_eq!(server.get("/v1/models/meta%2").status, 404);
    let send = |header: &str| {
        let body = r#"{"prompt":"a","max_tokens":1}"#;
        let mut client = server.connect();
        client.write_head("POST", "/v1/completions", &[header], body.len());
        client.write(body.as_bytes());
        client.answer()
    };
    let packed = send("Content-Encoding: gzip");
    assert_eq!(packed.status, 415);
    assert!(packed.error().contains("gzip"), "{}", packed.error());
    assert_eq!(send("Content-Encoding: identity").status, 200);
    assert_eq!(send(&format!("x-long: {}", "y".repeat(800))).status, 200);
    let long = send(&format!("x-long: {}", "y".repeat(1000)));
    assert_eq!(long.status, 431);
    assert!(long.error().contains("1024"), "{}", long.error());
}

/// vLLM's flags: several names of one model, and a port.
#[test]
fn a_model_has_the_names_that_vllms_flags_give_it() {
    let mut command = crate::server::slipstream();
    command
        .arg("serve")
        .args(&FAST[..1])
        .args(&FAST[2..])
        .args(["--served-model-name", "gpt-4o", "gpt-4o-mini", "--port=0"]);
    let server = Server::spawn_as_it_is(command);
    let models: Value = serde_json::from_str(&server.get("/v1/models").text()).unwrap();
    let ids: Vec<&str> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|model| model["id"].as_str())
        .collect();
    assert_eq!(ids, ["gpt-4o", "gpt-4o-mini"]);
    for name in ids {
        let body = format!(r#"{{"model":"{name}","prompt":"a","max_tokens":2}}"#);
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer: Value = serde_json::from_str(&answer.text()).unwrap();
        assert_eq!(answer["model"], "gpt-4o", "answers carry the first name");
        assert_eq!(server.get(&format!("/v1/models/{name}")).status, 200);
    }
    let other = server.post("/v1/completions", r#"{"model":"gpt-3","prompt":"a"}"#);
    assert_eq!(other.status, 404);
    assert!(other.text().contains("gpt-4o-mini"), "{}", other.text());
}

/// A server that answers at once attains any rate, and none attains a nanosecond.
#[test]
fn a_sweep_doubles_or_halves_the_rate() {
    let server = Server::start(&[FAST]);
    let url = format!("http://{}", server.address());
    let sweep = |slo: &str| {
        let (code, out, err) = run(&[
            "bench",
            &url,
            "--sweep",
            "--rate=200",
            "--requests=20",
            "--isl=10",
            "--osl=2",
            "--sweep-steps=3",
            "--json",
            slo,
        ]);
        let json: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
        let steps = json["steps"].as_array().unwrap().clone();
        let loads: Vec<f64> = steps.iter().map(|s| s["load"].as_f64().unwrap()).collect();
        let sent = steps
            .iter()
            .map(|s| s["report"]["requests"]["sent"].as_u64());
        (
            code,
            loads,
            sent.map(Option::unwrap).collect::<Vec<_>>(),
            json,
        )
    };
    let (code, loads, sent, json) = sweep("--slo=ttft=60s");
    assert_eq!((code, loads), (Some(0), vec![1.0, 2.0, 4.0]));
    assert_eq!(sent, [20, 40, 80], "each run takes as long as the first");
    assert_eq!(json["highest"]["rate_per_s"], 800.0);
    let (code, loads, _, json) = sweep("--slo=ttft=1ns");
    assert_eq!((code, loads), (Some(1), vec![1.0, 0.5, 0.25]));
    assert_eq!(json["highest"], Value::Null);
    let refused = run(&["bench", &url, "--sweep", "--slo=ttft=1s"]);
    assert_eq!(refused.0, Some(2));
    assert!(refused.2.contains("--rate"), "{}", refused.2);
}
