//! Disaggregated prefill, live: in one process and in several, cancelled and killed at every stage.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::planes::{Worker, await_ready, begin, completion, rest};
use crate::server::{Server, slipstream};

/// Two prefill workers, w0 and w1, and two decode workers, w2 and w3; blocks of 16 tokens.
const POOLS: &str = "[model]\nname = \"test-model\"\n[engine]\nblock_size = 16\nnum_gpu_blocks = 256\n\
     max_model_len = 2048\n[pool.p]\nrole = \"prefill\"\nworkers = 2\n[pool.d]\nrole = \"decode\"\n\
     workers = 2\n[engine.timing]\nkind = \"constant\"\n\
     step_ns = 1_000_000\n";

/// A pass takes a millisecond.
const QUICK: &str = "--set=engine.timing.step_ns=1000000";
/// A pass takes an hour.
const FROZEN: &str = "--set=engine.timing.step_ns=3600000000000";
/// A prompt takes days to transfer.
const STUCK: &[&str] = &[
    "--set=network.mode=flows",
    "--set=network.nic_bits_per_s=1000",
];

const BLOCKS_HELD: &str = "vllm:kv_cache_usage_perc";

fn file(dir: &Path) -> PathBuf {
    let path = dir.join("cluster.toml");
    std::fs::write(&path, POOLS).unwrap();
    path
}

fn serve(dir: &Path, args: &[&[&str]]) -> Server {
    let mut command = slipstream();
    command.arg("serve").arg(file(dir)).args(args.concat());
    Server::spawn(command)
}

fn prompt(words: usize) -> String {
    "one two three four ".repeat(words.div_ceil(4))
}

/// Waits until no blocks are held and no request is in flight, on either side.
fn await_empty(server: &Server) {
    server.await_metric(BLOCKS_HELD, |held| held == 0.0);
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    server.await_metric("vllm:num_requests_waiting", |waiting| waiting == 0.0);
    server.await_metric("slipstream_router_requests", |requests| requests == 0.0);
    server.await_metric("slipstream_router_prefill_tokens", |tokens| tokens == 0.0);
    server.await_metric("slipstream_router_active_blocks", |blocks| blocks == 0.0);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
}

fn traced(server: &Server, body: &str) -> (String, Value, Value) {
    let headers = ["x-slipstream-trace: 1"];
    let answer = server
        .connect()
        .send("POST", "/v1/completions", &headers, body.as_bytes());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let trace = answer.header("x-slipstream-trace").expect("a trace");
    let trace = serde_json::from_str(trace).unwrap();
    let json = answer.json();
    let text = json["choices"][0]["text"].as_str().unwrap().to_owned();
    (text, json["usage"].clone(), trace)
}

#[test]
fn a_prompt_is_computed_by_one_worker_and_answered_by_another() {
    let dir = tempfile::tempdir().unwrap();
    let alone = serve(
        dir.path(),
        &[&[QUICK, "--set=router.remote_prefill_tokens_min=4096"]],
    );
    let body = completion(&prompt(40), 20, false);
    let (text, _, trace) = traced(&alone, &body);
    assert!(trace["prefill_worker"].is_null(), "too short: {trace}");
    assert_eq!(alone.metric("slipstream_prompts_apart_total"), 0.0);
    for order in ["pull", "push"] {
        let order = format!("--set=kv.hand_over={order}");
        let more = [
            "--set=network.mode=flows",
            "--set=router.remote_prefill_tokens_min=16",
        ];
        let server = serve(dir.path(), &[&[QUICK, &order], &more]);
        let (same, usage, trace) = traced(&server, &body);
        assert_eq!(same, text, "the answer does not depend on where it is made");
        assert!(trace["prefill_worker"].as_u64() < Some(2), "{trace}");
        assert!(trace["worker"].as_u64() >= Some(2), "{trace}");
        let stages = &trace["stages"];
        let at = |name: &str| {
            stages[name]
                .as_u64()
                .unwrap_or_else(|| panic!("{name}: {trace}"))
        };
        let order = [
            "worker_recv",
            "prefilled",
            "kv_sent",
            "kv_received",
            "first_pass_start",
        ];
        assert!(order.is_sorted_by_key(|name| at(name)), "{trace}");
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
        let bytes = server.metric("slipstream_kv_sent_bytes_total");
        let tokens = usage["prompt_tokens"].as_f64().unwrap();
        // Twice 36 layers x 8 key-value heads x 128 x 2 bytes: the default model, Qwen3 8B.
        assert_eq!(bytes, tokens * 2.0 * 36.0 * 8.0 * 128.0 * 2.0);
        // Both have it now: nothing is left to compute elsewhere.
        let (same, usage, trace) = traced(&server, &body);
        assert_eq!(same, text);
        assert!(trace["prefill_worker"].is_null(), "{trace}");
        assert!(usage["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));
        assert_eq!(
            server.metric("slipstream_rank_prompts_handed_over_total"),
            1.0
        );
        assert_eq!(server.metric("slipstream_rank_prompts_received_total"), 1.0);
        let mut stream = begin(&server, &completion(&prompt(80), 9, true));
        assert_eq!(stream.head().status, 200);
        let streamed = rest(&mut stream);
        assert!(streamed.ends_with("data: [DONE]\n\n") && !streamed.contains("error"));
        assert_eq!(server.metric("slipstream_prompts_apart_total"), 2.0);
        await_empty(&server);
    }
}

/// Clients that disconnect during the prefill, during the transfer, while the decode worker has no
/// free blocks, and during decode leave nothing behind.
#[test]
fn no_block_is_kept_for_a_client_that_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let body = completion(&prompt(400), 50, true);
    for order in ["pull", "push"] {
        let order = format!("--set=kv.hand_over={order}");
        // A pass that never ends; a transfer that never ends, with more prompts queued behind it
        // than fit.
        for stuck in [&[FROZEN] as &[&str], &[QUICK, STUCK[0], STUCK[1]]] {
            let server = serve(dir.path(), &[stuck, &[&order]]);
            let clients: Vec<_> = (0..20).map(|_| begin(&server, &body)).collect();
            server.await_metric("slipstream_streams_open", |open| open == 20.0);
            server.await_metric(BLOCKS_HELD, |held| held > 0.0);
            drop(clients);
            await_empty(&server);
        }
        let server = serve(
            dir.path(),
            &[&[QUICK, STUCK[0], "--set=network.nic_bits_per_s=1e11", &order]],
        );
        for round in 0..10 {
            let mut clients: Vec<_> = (0..24)
                .map(|n| {
                    begin(
                        &server,
                        &completion(&prompt(100 + 7 * n + round), 200, true),
                    )
                })
                .collect();
            // Some disconnect at once, some after one or a few tokens, the rest all together.
            clients.drain(..8);
            for (at, client) in clients.iter_mut().enumerate().take(8) {
                assert_eq!(client.head().status, 200);
                for _ in 0..at {
                    assert!(client.chunk().is_some());
                }
            }
            drop(clients);
        }
        await_empty(&server);
        assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
        server.assert_alive();
    }
}

/// A frontend in front of the pools; prompts of 16 tokens and more are computed apart.
fn frontend(dir: &Path, more: &[&str]) -> Server {
    let mut command = slipstream();
    command.arg("frontend").arg(file(dir)).args(more);
    command.args([
        "--set=live.shards=2",
        "--set=router.remote_prefill_tokens_min=16",
    ]);
    command.arg("--discovery").arg(dir);
    Server::spawn(command)
}

fn worker(dir: &Path, pool: &str, index: &str, more: &[&str]) -> Worker {
    let path = file(dir);
    let pool = format!("--pool={pool}");
    let index = format!("--index={index}");
    let place = [path.to_str().unwrap(), &pool, &index];
    Worker::start(dir, &[&place, more])
}

/// [`await_empty`], as far as frontends have the state of worker processes.
fn await_empty_workers(server: &Server) {
    server.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    server.await_metric("vllm:num_requests_waiting", |waiting| waiting == 0.0);
    server.await_metric("slipstream_router_requests", |requests| requests == 0.0);
}

#[test]
fn processes_hand_prompts_over_and_end_in_order() {
    for order in ["pull", "push"] {
        let order = format!("--set=kv.hand_over={order}");
        let dir = tempfile::tempdir().unwrap();
        let server = frontend(dir.path(), &[&order]);
        let prefill = worker(dir.path(), "p", "0..2", &[QUICK]);
        let decode = worker(dir.path(), "d", "0..2", &[QUICK]);
        await_ready(&server, 4);
        let (text, _, trace) = traced(&server, &completion(&prompt(60), 12, false));
        assert!(!text.is_empty());
        assert!(trace["prefill_worker"].as_u64() < Some(2), "{trace}");
        assert!(trace["worker"].as_u64() >= Some(2), "{trace}");
        assert!(trace["stages"]["kv_received"].is_u64(), "{trace}");
        await_empty_workers(&server);
        // A draining worker takes no new requests: prompts are then computed by their decode
        // workers.
        assert!(prefill.terminate().success());
        await_ready(&server, 2);
        let (_, _, trace) = traced(&server, &completion(&prompt(90), 5, false));
        assert!(trace["prefill_worker"].is_null(), "{trace}");
        drop(decode);
    }
}

/// The prefill worker is killed during the prefill: another one computes the prompt.
#[test]
fn a_prompt_whose_worker_is_killed_is_computed_elsewhere_once() {
    // One cluster, in which passes take an hour, except on workers with speed-up 0.
    let quick: &[&str] = &[FROZEN, "--speedup=0"];
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &["--set=router.policy=round_robin", FROZEN]);
    let decode = worker(dir.path(), "d", "0..2", quick);
    let frozen = worker(dir.path(), "p", "0", &[FROZEN]);
    await_ready(&server, 3);
    let mut waiting: Vec<_> = (0..12)
        .map(|n| begin(&server, &completion(&prompt(40 + n), 5, false)))
        .collect();
    server.await_metric("slipstream_prompts_apart_total", |apart| apart == 12.0);
    let second = worker(dir.path(), "p", "1", quick);
    await_ready(&server, 4);
    frozen.kill();
    for client in &mut waiting {
        let answer = client.answer();
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json()["usage"]["completion_tokens"], 5);
    }
    assert_eq!(server.metric("slipstream_streams_retried_total"), 12.0);
    assert_eq!(server.metric("slipstream_streams_lost_total"), 0.0);
    await_empty_workers(&server);
    drop((decode, second));
}

/// Either worker is killed during the KV transfer: the other releases its blocks, and the request
/// is retried, once.
#[test]
fn a_worker_killed_during_the_transfer_leaves_nothing_at_the_other() {
    for order in ["pull", "push"] {
        let order = format!("--set=kv.hand_over={order}");
        let dir = tempfile::tempdir().unwrap();
        let server = frontend(dir.path(), &[STUCK[0], STUCK[1], &order]);
        let mut prefill: Vec<_> = ["0", "1"]
            .iter()
            .map(|index| worker(dir.path(), "p", index, &[QUICK]))
            .collect();
        let decode = worker(dir.path(), "d", "0", &[QUICK]);
        await_ready(&server, 3);
        let mut client = begin(&server, &completion(&prompt(64), 5, false));
        let sent = |count: f64| {
            let name = "slipstream_kv_sent_bytes_total";
            server.await_metric(name, |bytes| bytes > 0.0 && bytes >= count);
            server.metric(name)
        };
        let bytes = sent(1.0);
        let victim = usize::from(
            server.metric("slipstream_router_requests{worker=\"w1\",engine=\"0\"}") > 0.0,
        );
        prefill.remove(victim).kill();
        // The second attempt reaches the same stage as the first.
        sent(2.0 * bytes);
        assert_eq!(server.metric("slipstream_streams_retried_total"), 1.0);
        // There is no third attempt.
        prefill.remove(0).kill();
        let answer = client.answer();
        // No token was sent, so the client may safely retry.
        assert_eq!(answer.status, 503, "{}", answer.text());
        await_empty_workers(&server);
        // The decode worker is lost: the prefill worker releases its blocks.
        let prefill = worker(dir.path(), "p", "0", &[QUICK]);
        await_ready(&server, 2);
        let mut client = begin(&server, &completion(&prompt(65), 5, false));
        sent(2.0 * bytes + 1.0);
        decode.kill();
        let answer = client.answer();
        assert_eq!(answer.status, 503, "no worker is left: {}", answer.text());
        await_empty_workers(&server);
        drop(prefill);
    }
}

/// A decode worker that ends before the prompt arrived, or while an answer waits for its first
/// token, has sent nothing: another one answers, once.
#[test]
fn what_an_ending_worker_had_not_begun_is_answered_elsewhere() {
    let end_at_once = "--set=live.drain_timeout_s=0";
    for (order, stuck) in [("pull", true), ("push", true), ("pull", false)] {
        let order = format!("--set=kv.hand_over={order}");
        let dir = tempfile::tempdir().unwrap();
        let (network, apart) = if stuck {
            (STUCK, "--set=router.remote_prefill_tokens_min=16")
        } else {
            (
                &[] as &[&str],
                "--set=router.remote_prefill_tokens_min=4096",
            )
        };
        let step = if stuck { QUICK } else { FROZEN };
        let server = frontend(dir.path(), &[network, &[&order, apart, step]].concat());
        let prefill = worker(dir.path(), "p", "0", &[step]);
        let mut decode: Vec<_> = ["0", "1"]
            .iter()
            .map(|index| worker(dir.path(), "d", index, &[step, end_at_once]))
            .collect();
        await_ready(&server, 3);
        let mut client = begin(&server, &completion(&prompt(64), 5, false));
        let sent = "slipstream_kv_sent_bytes_total";
        if stuck {
            server.await_metric(sent, |bytes| bytes > 0.0);
        } else {
            let used = "slipstream_worker_used_blocks";
            server.await_metric(used, |used| used > 0.0);
        }
        let bytes = server.metric(sent);
        let at_second = "slipstream_router_requests{worker=\"w3\",engine=\"0\"}";
        let victim = usize::from(server.metric(at_second) > 0.0);
        assert!(decode.remove(victim).terminate().success());
        server.await_metric("slipstream_streams_retried_total", |count| count == 1.0);
        if stuck {
            server.await_metric(sent, |now| now == 2.0 * bytes);
        }
        // There is no third attempt.
        assert!(decode.remove(0).terminate().success());
        let answer = client.answer();
        let aborted = answer.text().contains("\"finish_reason\":\"abort\"");
        assert!(answer.status >= 500 || aborted, "{}", answer.text());
        await_empty_workers(&server);
        drop(prefill);
    }
}
