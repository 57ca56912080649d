//! Answers with temperature 0 depend on the prompt alone: not on the frontend or worker, on other requests, or on the loss
//! of a worker.

use serde_json::{Value, json};

use crate::planes::{Worker, await_ready, frontend};
use crate::server::Server;

/// Steps of 1 ms, and far fewer blocks than the requests need at a time.
const CLUSTER: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.main.workers=3",
    "--set=router.policy=least_requests",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=1000000",
    "--set=engine.num_gpu_blocks=64",
    "--set=engine.max_num_seqs=64",
    "--set=engine.max_model_len=512",
    "--set=live.drain_timeout_s=0.2",
    "--peer-deadline=1",
    "--lease=1",
];

/// Requests at a time.
const CLIENTS: u64 = 24;

/// A request: its path, and its body without `stream`.
fn request(number: u64) -> (&'static str, Value) {
    let prompt = format!(
        "tell me about {}",
        "number ".repeat(number as usize % 7 + 1)
    );
    let prompt = format!("{prompt}{number}");
    let mut body = json!({"max_tokens": 120, "temperature": 0});
    // A seed changes nothing; neither do settings that choose among several tokens.
    for (name, value) in [
        ("seed", json!(number)),
        ("top_p", json!(0.5)),
        ("top_k", json!(9)),
    ] {
        if number % 5 == 1 {
            body[name] = value;
        }
    }
    if number.is_multiple_of(3) {
        body["messages"] = json!([{"role": "user", "content": prompt}]);
        ("/v1/chat/completions", body)
    } else {
        body["prompt"] = prompt.into();
        ("/v1/completions", body)
    }
}

/// Text, reason of the end, and tokens of an answer.
fn answer(server: &Server, number: u64, streamed: bool) -> (String, String, u64) {
    let (path, mut body) = request(number);
    if streamed {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    let got = server.post(path, &body.to_string());
    assert_eq!(got.status, 200, "{}", got.text());
    let events = if streamed {
        let events = got.events();
        assert_eq!(events.last().unwrap(), "[DONE]");
        let events = events[..events.len() - 1].iter();
        events
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    } else {
        vec![got.json()]
    };
    let (mut text, mut reason, mut tokens) = (String::new(), String::new(), 0);
    for event in events {
        assert!(event.get("error").is_none(), "{event}");
        let choice = &event["choices"][0];
        for part in [
            &choice["text"],
            &choice["delta"]["content"],
            &choice["message"]["content"],
        ] {
            text += part.as_str().unwrap_or_default();
        }
        reason += choice["finish_reason"].as_str().unwrap_or_default();
        tokens = event["usage"]["completion_tokens"]
            .as_u64()
            .unwrap_or(tokens);
    }
    (text, reason, tokens)
}

#[test]
fn greedy_answers_are_the_same_on_every_frontend_under_preemption_and_after_a_kill() {
    let alone: Vec<&str> = CLUSTER
        .iter()
        .copied()
        .filter(|arg| !arg.starts_with("--peer") && !arg.starts_with("--lease"))
        .collect();
    let alone = Server::start(&[&alone, &["--set=engine.num_gpu_blocks=4096", "--speedup=0"]]);
    let expected: Vec<_> = (0..CLIENTS)
        .map(|number| answer(&alone, number, false))
        .collect();
    assert!(
        expected.iter().any(|(_, reason, _)| reason == "stop"),
        "natural ends"
    );
    assert!(expected.iter().any(|(text, ..)| *text != expected[0].0));

    let dir = tempfile::tempdir().unwrap();
    let frontends = [
        frontend(dir.path(), &[CLUSTER]),
        frontend(dir.path(), &[CLUSTER]),
    ];
    let start = |index: u32| {
        let index = format!("--index={index}");
        Worker::start(dir.path(), &[CLUSTER, &["--metrics=127.0.0.1:0", &index]])
    };
    let mut workers: Vec<Worker> = (0..2).map(start).collect();
    for server in &frontends {
        await_ready(server, 2);
    }
    for round in 0..3 {
        std::thread::scope(|scope| {
            let asked: Vec<_> = (0..CLIENTS)
                .map(|number| {
                    let server = &frontends[(number + round) as usize % 2];
                    let streamed = (number / 2 + round) % 2 == 0;
                    scope.spawn(move || (number, answer(server, number, streamed)))
                })
                .collect();
            if round == 1 {
                // While they are computed; a third worker takes over.
                frontends[0].await_metric("slipstream_router_requests", |of| of > 4.0);
                workers.push(start(2));
                await_ready(&frontends[0], 3);
                workers.remove(0).kill();
            }
            for asked in asked {
                let (number, got) = asked.join().unwrap();
                assert_eq!(
                    got, expected[number as usize],
                    "round {round}, request {number}"
                );
            }
        });
    }
    let sum = |name: &str| {
        frontends
            .iter()
            .map(|server| server.metric(name))
            .sum::<f64>()
    };
    assert_eq!(sum("slipstream_streams_lost_total"), 0.0);
    assert!(
        sum("vllm:request_num_preemptions_sum") > 0.0,
        "some were preempted"
    );
}
