//! Many streams, random cancels, slow readers, and workers that are killed, stopped and restarted:
//! every stream ends exactly once, with the right tokens in order.
//!
//! `SLIPSTREAM_TORTURE_S` sets the duration in seconds (`scripts/run.sh torture`: 180; CI: 20; default 3).

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::planes::{Worker, await_ready, await_true, begin, completion, frontend};
use crate::server::{Client, Server};

/// Passes of 1 ms, so that a stream takes a fifth of a second and spans its worker's end.
const CLUSTER: &[&str] = &[
    "--set=model.name=test-model",
    "--set=pool.main.workers=3",
    "--set=engine.timing.kind=constant",
    "--set=engine.timing.step_ns=1000000",
    "--set=engine.num_gpu_blocks=4096",
    "--set=engine.max_num_seqs=512",
    "--set=engine.max_model_len=4096",
    "--peer-deadline=1",
    "--lease=1",
];

const TOKENS: u32 = 200;
const SEEDS: u64 = 16;
const THREADS: u64 = 32;
/// Concurrent streams per thread; it reads them one after the other, so most are slow.
const STREAMS: usize = 32;

fn body(seed: u64) -> String {
    completion("a long way from home", TOKENS, true)
        .replace("\"seed\":7", &format!("\"seed\":{seed}"))
}

/// The outcome of a stream.
#[derive(Debug, PartialEq)]
pub(crate) enum Outcome {
    Finished,
    Failed,
    Refused,
}

/// Reads a stream to its end, and compares its text with the expected text.
pub(crate) fn judge(client: &mut Client, expected: &str) -> Outcome {
    let head = client.head();
    if head.status == 503 {
        return Outcome::Refused; // no worker could take it
    }
    assert_eq!(head.status, 200);
    let mut bytes = Vec::new();
    while let Some(chunk) = client.chunk() {
        bytes.extend_from_slice(&chunk);
    }
    let text = String::from_utf8(bytes).unwrap();
    let mut answer = String::new();
    let mut outcome = None;
    let mut done = 0;
    for event in text.split("\n\n").filter_map(|e| e.strip_prefix("data: ")) {
        assert_eq!(done, 0, "nothing follows the end: {event}");
        if event == "[DONE]" {
            done += 1;
            continue;
        }
        assert_eq!(outcome, None, "a stream ends once: {event}");
        let event: serde_json::Value = serde_json::from_str(event).unwrap();
        if event.get("error").is_some() {
            outcome = Some(Outcome::Failed);
            continue;
        }
        let choice = &event["choices"][0];
        answer += choice["text"].as_str().unwrap();
        match choice["finish_reason"].as_str() {
            None => {}
            Some("length") => outcome = Some(Outcome::Finished),
            // A draining worker whose time limit was reached.
            Some("abort") => outcome = Some(Outcome::Failed),
            Some(other) => panic!("ended by {other}"),
        }
    }
    assert_eq!(done, 1, "{text}");
    let outcome = outcome.unwrap_or_else(|| panic!("a stream without an end: {text}"));
    if outcome == Outcome::Finished {
        assert_eq!(answer, expected);
    } else {
        assert!(
            expected.starts_with(&answer),
            "tokens in order, to where it broke"
        );
    }
    outcome
}

/// A generator for varied, not random, values (Knuth's MMIX constants).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn worker(dir: &Path, index: usize) -> Worker {
    let index = format!("--index={index}");
    Worker::start(dir, &[CLUSTER, &["--pool=main", &index]])
}

/// Waits until `count` more streams ended, or for `limit` if fewer do. Returns whether clients are left.
fn let_end(ended: &Receiver<()>, count: u64, limit: Duration) -> bool {
    while ended.try_recv().is_ok() {}
    let until = Instant::now() + limit;
    for _ in 0..count {
        match ended.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => break,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
    true
}

/// Kills, stops and restarts workers while clients are left, each of which sends to `ended`. One of the three
/// always runs.
fn torment(dir: &Path, server: &Server, ended: &Receiver<()>, dice: &mut Dice) -> u64 {
    let mut workers: Vec<Option<Worker>> = (0..3).map(|i| Some(worker(dir, i))).collect();
    let mut torments = 0;
    loop {
        let victim = dice.roll(2) as usize;
        let Some(found) = workers[victim].take() else {
            workers[victim] = Some(worker(dir, victim));
            continue;
        };
        torments += 1;
        match dice.roll(4) {
            0 => found.kill(),
            1 => {
                found.signal("-TERM");
                found.kill();
            }
            2 => {
                // Too short for a timeout.
                found.signal("-STOP");
                let_end(ended, 50, Duration::from_millis(100));
                found.signal("-CONT");
                workers[victim] = Some(found);
            }
            _ => {
                found.signal("-STOP");
                let ready = format!("slipstream_router_ready{{worker=\"w{victim}\",engine=\"0\"}}");
                await_true("a stopped worker still counts as ready", || {
                    server.try_metric(&ready).is_none_or(|ready| ready == 0.0)
                });
                found.signal("-CONT");
                workers[victim] = Some(found);
            }
        }
        if !let_end(ended, 1 + dice.roll(200), Duration::from_millis(250)) {
            break;
        }
    }
    // All restarted, so that the remaining streams can end.
    for (index, slot) in workers.iter_mut().enumerate() {
        slot.get_or_insert_with(|| worker(dir, index));
    }
    LEFT.lock().unwrap().extend(workers.into_iter().flatten());
    torments
}

/// Workers that are started again at the end.
static LEFT: std::sync::Mutex<Vec<Worker>> = std::sync::Mutex::new(Vec::new());

fn expected() -> Vec<String> {
    let mut args: Vec<&str> = CLUSTER[..7].to_vec();
    args.push("--speedup=0");
    let server = Server::start(&[&args]);
    let answer = |seed| {
        let body = body(seed).replace("\"stream\":true", "\"stream\":false");
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["choices"][0]["text"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    (0..SEEDS).map(answer).collect()
}

#[test]
fn every_stream_ends_once_with_the_right_tokens_whatever_happens_to_workers() {
    let seconds = std::env::var("SLIPSTREAM_TORTURE_S").map_or(3, |s| s.parse().expect("seconds"));
    let expected = expected();
    let dir = tempfile::tempdir().unwrap();
    let server = frontend(dir.path(), &[CLUSTER]);
    let (finished, failed, refused, cancelled) =
        <(AtomicU64, AtomicU64, AtomicU64, AtomicU64)>::default();
    let (ends, ended) = channel();
    let torments = std::thread::scope(|scope| {
        let (dir, torn) = (dir.path(), &server);
        let tormentor = scope.spawn(move || torment(dir, torn, &ended, &mut Dice(42)));
        server.await_metric("slipstream_router_ready", |ready| ready >= 1.0);
        let end = Instant::now() + Duration::from_secs(seconds);
        let clients: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (server, expected, ends) = (&server, &expected, ends.clone());
                let (finished, failed, refused) = (&finished, &failed, &refused);
                let cancelled = &cancelled;
                scope.spawn(move || {
                    let mut dice = Dice(thread);
                    while Instant::now() < end {
                        let mut open: Vec<(Client, u64)> = (0..STREAMS)
                            .map(|_| {
                                let seed = dice.roll(SEEDS);
                                (begin(server, &body(seed)), seed)
                            })
                            .collect();
                        for (mut client, seed) in open.drain(..) {
                            if dice.roll(8) == 0 {
                                cancelled.fetch_add(1, Relaxed);
                                continue; // gone, read or not
                            }
                            let count = match judge(&mut client, &expected[seed as usize]) {
                                Outcome::Finished => finished,
                                Outcome::Failed => failed,
                                Outcome::Refused => refused,
                            };
                            count.fetch_add(1, Relaxed);
                            let _ = ends.send(()); // nobody listens if the tormentor failed
                        }
                    }
                })
            })
            .collect();
        drop(ends);
        for client in clients {
            client.join().expect("a client met what it should not");
        }
        tormentor.join().expect("the tormentor")
    });
    eprintln!(
        "{torments} torments: {finished:?} finished, {failed:?} failed, {refused:?} refused, {cancelled:?} cancelled"
    );
    assert!(torments > 0);
    assert!(finished.load(Relaxed) > 0, "most finish");
    // Nothing is left over, on either side.
    await_ready(&server, 3);
    server.await_metric("slipstream_streams_open", |open| open == 0.0);
    server.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    server.await_metric("slipstream_router_requests", |requests| requests == 0.0);
    server.assert_alive();
    LEFT.lock().unwrap().clear();
}
