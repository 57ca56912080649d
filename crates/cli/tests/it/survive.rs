//! Streams that have begun outlive their workers: another worker continues them, and their clients see a pause.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use serde_json::{Value, json};

use crate::planes::{Worker, await_ready, begin, begin_at, completion, frontend, rest};
use crate::server::{Client, Server};
use crate::torture::{Dice, Outcome, judge};

/// Steps of 2 ms. A worker that shuts down gives its streams 0.2 s, and one that is silent is lost after a
/// second.
const CLUSTER: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.main.workers=3",
    "--set=router.policy=least_requests",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=2000000",
    "--set=engine.num_gpu_blocks=8192",
    "--set=engine.max_num_seqs=512",
    "--set=engine.max_model_len=4096",
    "--set=live.drain_timeout_s=0.2",
    "--peer-deadline=1",
    "--lease=1",
];

/// As [`CLUSTER`], with prompts computed by one pool and answers by another.
const APART: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.p.role=prefill",
    "--set=pool.p.workers=2",
    "--set=pool.d.role=decode",
    "--set=pool.d.workers=2",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=2000000",
    "--set=engine.num_gpu_blocks=8192",
    "--set=engine.max_model_len=4096",
    "--peer-deadline=1",
    "--lease=1",
];

fn worker(dir: &Path, cluster: &[&str], pool: &str, index: usize) -> Worker {
    let (pool, index) = (format!("--pool={pool}"), format!("--index={index}"));
    Worker::start(dir, &[cluster, &[&pool, &index]])
}

/// A server of the whole cluster in one process, whose answers nothing disturbs.
fn undisturbed() -> Server {
    let of_server: Vec<&str> = CLUSTER
        .iter()
        .copied()
        .filter(|arg| !arg.starts_with("--peer") && !arg.starts_with("--lease"))
        .collect();
    Server::start(&[&of_server, &["--speedup=0"]])
}

/// The choices of a stream: text, log probabilities, and the reasons; then the counts. Events carry any
/// number of tokens.
fn content(stream: &str) -> Value {
    let mut choices: Vec<(String, Vec<Value>, Value)> = Vec::new();
    let mut usage = Value::Null;
    let mut done = 0;
    for event in stream
        .split("\n\n")
        .filter_map(|e| e.strip_prefix("data: "))
    {
        assert_eq!(done, 0, "nothing follows the end: {event}");
        if event == "[DONE]" {
            done += 1;
            continue;
        }
        let event: Value = serde_json::from_str(event).unwrap();
        assert!(event.get("error").is_none(), "{event}");
        if !event["usage"].is_null() {
            usage = event["usage"].clone();
        }
        for choice in event["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            if choices.len() <= index {
                choices.resize(index + 1, (String::new(), Vec::new(), Value::Null));
            }
            let of = &mut choices[index];
            assert!(of.2.is_null(), "a choice ends once: {event}");
            of.0 += choice["text"].as_str().unwrap();
            if let Some(tokens) = choice["logprobs"]["token_logprobs"].as_array() {
                of.1.extend(tokens.iter().cloned());
            }
            of.2 = choice["finish_reason"].clone();
        }
    }
    assert_eq!(done, 1, "{stream}");
    json!({ "choices": choices, "usage": usage })
}

fn read(client: &mut Client) -> String {
    assert_eq!(client.head().status, 200);
    rest(client)
}

/// Loses the worker of a stream that has begun, by `lose`, while another one is ready.
fn lose_under(body: &str, lose: impl FnOnce(&Server, Worker) -> Option<Worker>) {
    let whole = undisturbed();
    let expected = content(&read(&mut begin(&whole, body)));
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[CLUSTER]);
    let first = worker(dir.path(), CLUSTER, "main", 0);
    await_ready(&server, 1);
    let mut client = begin(&server, body);
    assert_eq!(client.head().status, 200);
    let begun = client.chunk().expect("an event");
    let second = worker(dir.path(), CLUSTER, "main", 1);
    await_ready(&server, 2);
    let left = lose(&server, first);
    let mut stream = String::from_utf8(begun).unwrap();
    stream += &rest(&mut client);
    assert_eq!(content(&stream), expected);
    let sequences = expected["choices"].as_array().unwrap().len() as f64;
    let resumed = server.metric("slipstream_streams_resumed_total");
    assert!((1.0..=sequences).contains(&resumed), "{resumed}");
    assert_eq!(
        server.metric("slipstream_stream_resume_seconds_count"),
        resumed
    );
    assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
    assert_eq!(
        server.metric("vllm:time_to_first_token_seconds_count"),
        sequences
    );
    server.await_metric("slipstream_router_requests", |requests| requests == 0.0);
    drop((left, second));
}

/// A completion of `tokens` tokens with `more` fields.
fn body(tokens: u32, more: &Value) -> String {
    let mut body = json!({
        "prompt": "a long way from home", "max_tokens": tokens, "ignore_eos": true, "seed": 7,
        "stream": true, "stream_options": { "include_usage": true },
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body.to_string()
}

#[test]
fn a_stream_whose_worker_is_killed_continues_with_the_same_tokens_and_counts() {
    lose_under(&body(1500, &json!({})), |_, worker| {
        worker.kill();
        None
    });
}

#[test]
fn choices_log_probabilities_and_stop_strings_continue_as_they_were() {
    let plain = body(1500, &json!({}));
    let text = content(&read(&mut begin(&undisturbed(), &plain)));
    let text = text["choices"][0][0].as_str().unwrap().to_owned();
    // It straddles tokens, and ends the first choice near its end.
    let at = text.char_indices().rev().nth(300).unwrap().0;
    let stop: String = text[at..].chars().take(12).collect();
    let more = json!({ "n": 3, "logprobs": 2, "stop": [stop] });
    lose_under(&body(1500, &more), |_, worker| {
        worker.kill();
        None
    });
}

#[test]
fn a_stream_continues_elsewhere_when_its_worker_shuts_down() {
    lose_under(&body(1500, &json!({ "n": 2 })), |_, worker| {
        assert!(worker.terminate().success());
        None
    });
}

#[test]
fn a_stream_continues_elsewhere_when_its_worker_is_stopped_and_late_frames_do_not_reach_it() {
    lose_under(&body(1500, &json!({})), |server, worker| {
        worker.signal("-STOP");
        server.await_metric("slipstream_streams_resumed_total", |resumed| resumed > 0.0);
        worker.signal("-CONT");
        Some(worker)
    });
}

#[test]
fn a_stopped_frontend_finds_its_streams_again_while_its_lease_lasts() {
    let whole = undisturbed();
    let body = body(1500, &json!({}));
    let expected = content(&read(&mut begin(&whole, &body)));
    let dir = tempfile::tempdir().unwrap();
    // Workers give a silent peer up after a second otherwise.
    let cluster: Vec<&str> = CLUSTER
        .iter()
        .map(|&flag| {
            if flag == "--lease=1" {
                "--lease=20"
            } else {
                flag
            }
        })
        .collect();
    let stopped = frontend(dir.path(), &[&cluster]);
    let other = frontend(dir.path(), &[&cluster]);
    let first = worker(dir.path(), &cluster, "main", 0);
    await_ready(&stopped, 1);
    await_ready(&other, 1);
    let mut client = begin(&stopped, &body);
    assert_eq!(client.head().status, 200);
    let mut stream = String::from_utf8(client.chunk().unwrap()).unwrap();
    stopped.signal("-STOP");
    // 1,000 steps of 2 ms pass.
    let meanwhile = completion("another way", 1000, true);
    assert!(read(&mut begin(&other, &meanwhile)).ends_with("data: [DONE]\n\n"));
    stopped.signal("-CONT");
    stream += &rest(&mut client);
    assert_eq!(content(&stream), expected);
    assert_eq!(stopped.metric("slipstream_streams_lost_total"), 0.0);
    assert_eq!(stopped.metric("slipstream_streams_resumed_total"), 0.0);
    drop(first);
}

#[test]
fn a_whole_answer_continues_too() {
    let body = completion("a long way from home", 800, false);
    let whole = undisturbed();
    let expected = whole.post("/v1/completions", &body).json();
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[CLUSTER]);
    let first = worker(dir.path(), CLUSTER, "main", 0);
    await_ready(&server, 1);
    let mut client = begin(&server, &body);
    server.await_metric("vllm:generation_tokens_total", |tokens| tokens > 10.0);
    let second = worker(dir.path(), CLUSTER, "main", 1);
    await_ready(&server, 2);
    first.kill();
    let found = client.answer();
    assert_eq!(found.status, 200, "{}", found.text());
    assert_eq!(found.json()["choices"], expected["choices"]);
    assert_eq!(found.json()["usage"], expected["usage"]);
    drop(second);
}

#[test]
fn who_opts_out_and_what_reaches_the_limit_or_finds_no_worker_ends_with_worker_lost() {
    let limit: &[&str] = &["--set=router.resumes_max=1"];
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[CLUSTER, limit]);
    let first = worker(dir.path(), CLUSTER, "main", 0);
    await_ready(&server, 1);
    let body = completion("a long way from home", 3000, true);
    let mut stays = begin_at(&server, &body, &["x-slipstream-resume: off"]);
    let mut moves = begin(&server, &body);
    for client in [&mut stays, &mut moves] {
        assert_eq!(client.head().status, 200);
        assert!(client.chunk().is_some());
    }
    let answer = begin_at(&server, &body, &["x-slipstream-resume: perhaps"]).answer();
    assert_eq!(answer.status, 400, "{}", answer.text());
    let second = worker(dir.path(), CLUSTER, "main", 1);
    await_ready(&server, 2);
    first.kill();
    let text = rest(&mut stays);
    assert!(text.contains("\"code\":\"worker_lost\""), "{text}");
    server.await_metric("slipstream_stream_resume_seconds_count", |n| n == 1.0);
    assert_eq!(server.metric("slipstream_streams_not_resumed_total"), 1.0);
    // The limit: another worker is there.
    let third = worker(dir.path(), CLUSTER, "main", 2);
    await_ready(&server, 2);
    second.kill();
    let text = rest(&mut moves);
    assert!(text.contains("\"code\":\"worker_lost\""), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    // No worker is left.
    let mut client = begin(&server, &body);
    assert_eq!(client.head().status, 200);
    assert!(client.chunk().is_some());
    third.kill();
    let text = rest(&mut client);
    assert!(text.contains("\"code\":\"worker_lost\""), "{text}");
    assert!(text.contains("no other continues it"), "{text}");
    assert_eq!(server.metric("slipstream_streams_not_resumed_total"), 3.0);
    assert_eq!(server.metric("slipstream_streams_resumed_total"), 1.0);
    server.await_metric("slipstream_router_requests", |requests| requests == 0.0);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
}

#[test]
fn a_client_that_leaves_while_its_stream_waits_for_a_worker_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    // The second worker never ends a step, so that the stream waits there.
    let server = frontend(dir.path(), &[CLUSTER]);
    let first = worker(dir.path(), CLUSTER, "main", 0);
    await_ready(&server, 1);
    let mut client = begin(&server, &completion("a long way from home", 3000, true));
    assert_eq!(client.head().status, 200);
    assert!(client.chunk().is_some());
    let slow = [CLUSTER, &["--speedup=0.000001"]].concat();
    let second = worker(dir.path(), &slow, "main", 1);
    await_ready(&server, 2);
    first.kill();
    server.await_metric("slipstream_streams_resumed_total", |resumed| resumed == 1.0);
    server.await_metric("vllm:num_requests_running", |running| running == 1.0);
    drop(client);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    server.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    drop(second);
}

#[test]
fn an_answer_whose_prompt_was_computed_elsewhere_continues() {
    for order in ["pull", "push"] {
        let order = format!("--set=kv.hand_over={order}");
        let whole = undisturbed();
        let body = body(1500, &json!({}));
        let expected = content(&read(&mut begin(&whole, &body)));
        let dir = tempfile::tempdir().unwrap();
        let cluster = [APART, &[&order]].concat();
        let server = frontend(dir.path(), &[&cluster]);
        let prefill: Vec<Worker> = (0..2)
            .map(|index| worker(dir.path(), &cluster, "p", index))
            .collect();
        let first = worker(dir.path(), &cluster, "d", 0);
        await_ready(&server, 3);
        let mut client = begin(&server, &body);
        assert_eq!(client.head().status, 200);
        let mut stream = String::from_utf8(client.chunk().unwrap()).unwrap();
        let second = worker(dir.path(), &cluster, "d", 1);
        await_ready(&server, 4);
        first.kill();
        stream += &rest(&mut client);
        let found = content(&stream);
        assert_eq!(found["choices"], expected["choices"], "{order}");
        assert_eq!(
            server.metric("slipstream_prompts_apart_total"),
            2.0,
            "a prefill worker computed the prompt with the tokens so far"
        );
        server.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
        drop((prefill, second));
    }
}

const SEEDS: u64 = 16;
const CLIENTS: u64 = 48;
const TOKENS: u32 = 150;

fn stream_of(seed: u64) -> String {
    completion("a long way from home", TOKENS, true)
        .replace("\"seed\":7", &format!("\"seed\":{seed}"))
}

/// Kills a worker, at least one other being ready, and starts it again, `kills` times.
fn kill_workers(dir: &Path, server: &Server, kills: u64) {
    let mut dice = Dice(42);
    let mut workers: Vec<Option<Worker>> = (0..3)
        .map(|index| Some(worker(dir, CLUSTER, "main", index)))
        .collect();
    await_ready(server, 3);
    for _ in 0..kills {
        let victim = dice.roll(3) as usize;
        workers[victim].take().expect("all run").kill();
        // Sometimes a second one, so that one is left.
        let other = (victim + 1) % 3;
        workers[victim] = Some(worker(dir, CLUSTER, "main", victim));
        if dice.roll(4) == 0 {
            workers[other].take().expect("all run").kill();
            workers[other] = Some(worker(dir, CLUSTER, "main", other));
        }
        await_ready(server, 3);
    }
    KEPT.lock().unwrap().extend(workers.into_iter().flatten());
}

/// Workers that outlive the killing.
static KEPT: std::sync::Mutex<Vec<Worker>> = std::sync::Mutex::new(Vec::new());

/// `SLIPSTREAM_KILLS` sets the number of kills (`scripts/run.sh survive`: 100; default 4).
#[test]
fn no_stream_is_lost_while_a_worker_is_left() {
    let kills = std::env::var("SLIPSTREAM_KILLS").map_or(4, |n| n.parse().expect("a number"));
    let whole = undisturbed();
    let expected: Vec<String> = (0..SEEDS)
        .map(|seed| {
            let body = stream_of(seed).replace("\"stream\":true", "\"stream\":false");
            let answer = whole.post("/v1/completions", &body).json();
            answer["choices"][0]["text"].as_str().unwrap().to_owned()
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[CLUSTER]);
    let (stop, finished, lost) = <(AtomicBool, AtomicU64, AtomicU64)>::default();
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            // Also if it fails: the clients would go on.
            struct Stop<'a>(&'a AtomicBool);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Relaxed);
                }
            }
            let _stop = Stop(&stop);
            kill_workers(dir.path(), &server, kills);
        });
        server.await_metric("slipstream_router_ready", |ready| ready == 3.0);
        for client in 0..CLIENTS {
            let (server, expected, stop) = (&server, &expected, &stop);
            let (finished, lost) = (&finished, &lost);
            scope.spawn(move || {
                let mut dice = Dice(client);
                while !stop.load(Relaxed) {
                    let seed = dice.roll(SEEDS);
                    let mut client = begin(server, &stream_of(seed));
                    let count = match judge(&mut client, &expected[seed as usize]) {
                        Outcome::Finished => finished,
                        Outcome::Failed | Outcome::Refused => lost,
                    };
                    count.fetch_add(1, Relaxed);
                }
            });
        }
        killer.join().expect("the killer");
    });
    let resumed = server.metric("slipstream_streams_resumed_total");
    eprintln!("{kills} kills and more: {finished:?} finished, {lost:?} lost, {resumed} resumed");
    assert!(resumed > 0.0 && finished.load(Relaxed) > 0);
    assert_eq!(lost.load(Relaxed), 0);
    assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    server.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    server.await_metric("slipstream_router_requests", |requests| requests == 0.0);
    KEPT.lock().unwrap().clear();
}
