//! Misbehaving peers on the plane, which send wrong, partial or no data. The test plays them, and
//! speaks the wire protocol itself.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use slipstream_base::{
    BlockHash, FinishReason, KvDelta, KvOp, RankId, Role, SimTime, WorkerId, mix,
};
use slipstream_discovery::{Backend, Change, Record as _};
use slipstream_planes::discovery::{self, ProcessRecord, ProcessRole};
use slipstream_planes::frame::{NO_LIMIT, StartRequest};
use slipstream_planes::wire::{self, Announced, FrameKind, Hello, RankLoad, Welcome};
use slipstream_planes::{End, FirstPass, PassFrame, Prologue, StreamId, ToWorker, Usage};

use crate::planes::{Worker, await_ready, begin, completion, frontend_command, rest};
use crate::server::{FAST, FROZEN, Server};

const PATIENCE: Duration = Duration::from_secs(30);

/// A peer times out after a second.
const IMPATIENT: &[&str] = &["--peer-deadline=1", "--lease=1"];

const ONE_SHARD: &[&str] = &["--set=live.shards=1"];

/// A frontend that does not log each of the many violations.
fn quiet_frontend(dir: &Path, args: &[&[&str]]) -> Server {
    let mut command = frontend_command(dir, args, ONE_SHARD);
    command.env("RUST_LOG", "error");
    Server::spawn(command)
}

const W0: RankId = RankId {
    worker: WorkerId(0),
    dp_rank: 0,
};
const W1: RankId = RankId {
    worker: WorkerId(1),
    dp_rank: 0,
};

/// The record of the only process of `role` in `dir`, when it exists.
fn record(dir: &Path, role: ProcessRole) -> ProcessRecord {
    let began = Instant::now();
    loop {
        let mut changes = Vec::new();
        let mut folder = discovery::backend(&discovery::Place::Folder(dir.into())).unwrap();
        folder.poll(SimTime::ZERO, &mut changes).unwrap();
        let mut records = changes.into_iter().filter_map(|change| match change {
            Change::Put { value, .. } => serde_json::from_str::<ProcessRecord>(&value).ok(),
            _ => None,
        });
        let found = records.find(|record| record.role == role);
        if let Some(record) = found {
            return record;
        }
        assert!(
            began.elapsed() < PATIENCE,
            "no {role:?} in {}",
            dir.display()
        );
        std::thread::yield_now();
    }
}

fn hello(frontend: &ProcessRecord, workers: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Hello {
        instance: 77,
        fingerprint: frontend.fingerprint,
        shard: 0,
        deadline_ms: 1000,
        clock: 1, // of no host
        name: "the test".into(),
        workers: workers
            .iter()
            .map(|&worker| Announced {
                worker: WorkerId(worker),
                ranks: 1,
                ready: true,
            })
            .collect(),
        key: frontend.key.as_ref().expect("a frontend has one").bytes(),
    }
    .encode(&mut bytes);
    bytes
}

/// One end of a connection.
struct Peer {
    stream: TcpStream,
    inbox: Vec<u8>,
}

impl Peer {
    fn new(stream: TcpStream) -> Peer {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let inbox = Vec::new();
        Peer { stream, inbox }
    }

    /// Connects as a process that runs `workers`, and is accepted.
    fn worker(frontend: &ProcessRecord, workers: &[u32]) -> Peer {
        let mut peer = Peer::new(TcpStream::connect(&frontend.shards[0]).unwrap());
        peer.say(&hello(frontend, workers));
        let (kind, body) = peer.next().expect("an answer");
        assert_eq!(kind, FrameKind::Welcome, "{body:?}");
        peer
    }

    fn say(&mut self, bytes: &[u8]) {
        // The connection may be closed before everything was sent.
        let _ = self.stream.write_all(bytes);
    }

    /// The next frame except pings; `None` once the connection is closed.
    fn next(&mut self) -> Option<(FrameKind, Vec<u8>)> {
        loop {
            if let Some(frame) = wire::split(&self.inbox).expect("frames of ours") {
                let (kind, body, len) = (frame.kind, frame.body.to_vec(), frame.len);
                self.inbox.drain(..len);
                if kind == FrameKind::Ping {
                    continue;
                }
                return Some((kind, body));
            }
            let mut bytes = [0; 4096];
            let read = self.stream.read(&mut bytes).ok()?;
            if read == 0 {
                return None;
            }
            self.inbox.extend_from_slice(&bytes[..read]);
        }
    }

    fn closed(&mut self) -> bool {
        while self.next().is_some() {}
        true
    }

    /// The next request.
    fn start(&mut self) -> Box<StartRequest> {
        loop {
            let (kind, body) = self.next().expect("a request");
            if kind == FrameKind::Start {
                match wire::decode_to_worker(kind, &body, 0).unwrap() {
                    ToWorker::Start(start) => return start,
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

fn pass(fill: impl FnOnce(&mut PassFrame)) -> Vec<u8> {
    let mut pass = PassFrame::new();
    fill(&mut pass);
    let mut bytes = Vec::new();
    wire::encode_pass(&pass, &mut bytes);
    bytes
}

fn tokens(stream: StreamId, tokens: &[u32]) -> Vec<u8> {
    pass(|pass| pass.push_tokens(stream, tokens, None))
}

fn end(stream: StreamId, completion_tokens: u32) -> Vec<u8> {
    let usage = Usage {
        prompt_tokens: 1,
        completion_tokens,
        cached_tokens: 0,
        preemptions: 0,
    };
    let reason = FinishReason::Length;
    pass(|pass| pass.push_end(stream, &End { reason, usage }))
}

/// Prologue and first tokens.
fn first(stream: StreamId, tokens: &[u32]) -> Vec<u8> {
    pass(|pass| {
        let prologue = Prologue {
            hit_tokens: 0,
            worker_recv_ns: Some(1),
            admitted_ns: Some(2),
        };
        pass.push_prologue(stream, &prologue);
        let first = FirstPass {
            start_ns: 3,
            end_ns: 4,
        };
        pass.push_tokens(stream, tokens, Some(first));
    })
}

fn kv(rank: RankId, sequence: u64) -> Vec<u8> {
    let stored = KvOp::Stored {
        hash: BlockHash(1),
        parent: BlockHash(0),
    };
    let delta = KvDelta {
        rank,
        sequence,
        ops: vec![stored],
    };
    let mut bytes = Vec::new();
    wire::encode_kv(&delta, false, &mut bytes);
    bytes
}

fn load(rank: RankId) -> Vec<u8> {
    let load = RankLoad {
        rank,
        ..RankLoad::default()
    };
    let mut bytes = Vec::new();
    wire::encode_loads(&[load], &mut bytes);
    bytes
}

/// Payloads of the events of a stream: its text, and whether it failed.
fn read_events(text: &str) -> (String, bool) {
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(text.matches("[DONE]").count(), 1, "{text}");
    let mut answer = String::new();
    for event in text.split("\n\n").filter_map(|e| e.strip_prefix("data: ")) {
        let Ok(event) = serde_json::from_str::<serde_json::Value>(event) else {
            continue;
        };
        answer += event["choices"][0]["text"].as_str().unwrap_or_default();
    }
    (answer, text.contains("\"error\""))
}

/// A session of a worker, from its hello to the end of its first stream, cut at every byte.
#[test]
fn a_worker_cut_at_any_byte_of_its_session_ends_its_stream_once_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let server = quiet_frontend(dir.path(), &[FAST]);
    let frontend = record(dir.path(), ProcessRole::Frontend);
    let hello = hello(&frontend, &[0]);
    let answer = |stream| {
        [
            first(stream, &[100, 101]),
            kv(W0, 0),
            tokens(stream, &[102]),
            load(W0),
            tokens(stream, &[103, 104]),
            end(stream, 5),
        ]
        .concat()
    };
    let mut expected = String::new();
    let mut finished = 0;
    let mut cut = usize::MAX; // the whole session first
    loop {
        if cut < hello.len() {
            let mut peer = Peer::new(TcpStream::connect(&frontend.shards[0]).unwrap());
            peer.say(&hello[..cut]);
        } else {
            let mut peer = Peer::worker(&frontend, &[0]);
            await_ready(&server, 1);
            let mut client = begin(&server, &completion("a", 5, true));
            let start = peer.start();
            let answer = answer(start.addr.stream);
            let len = answer.len().min(cut.saturating_sub(hello.len()));
            peer.say(&answer[..len]);
            if len == answer.len() {
                assert_eq!(client.head().status, 200);
                let (text, failed) = read_events(&rest(&mut client));
                assert!(!failed);
                expected = text;
                finished += 1;
                if cut != usize::MAX {
                    break;
                }
                cut = 0;
            } else {
                drop(peer);
                let head = client.head();
                if head.status == 200 {
                    let (text, failed) = read_events(&rest(&mut client));
                    assert!(failed, "cut at {cut}");
                    assert!(expected.starts_with(&text), "cut at {cut}: {text}");
                } else {
                    assert_eq!(head.status, 503, "cut at {cut}");
                }
            }
        }
        server.await_metric("slipstream_plane_connections_open", |open| open == 0.0);
        cut += 1;
    }
    assert_eq!(finished, 2);
    assert!(!expected.is_empty());
    server.await_metric("slipstream_plane_connections_open", |open| open == 0.0);
    assert_eq!(server.metric("slipstream_streams_open"), 0.0);
    assert_eq!(server.metric("slipstream_router_requests"), 0.0);
    assert_eq!(server.metric("slipstream_plane_malformed_total"), 0.0);
}

#[test]
fn what_a_worker_says_of_streams_and_ranks_that_are_not_its_own_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let direct: &[&str] = &["--set=router.policy=direct"];
    let server = quiet_frontend(dir.path(), &[FAST, direct]);
    let frontend = record(dir.path(), ProcessRole::Frontend);
    let mut honest = Peer::worker(&frontend, &[0]);
    let mut liar = Peer::worker(&frontend, &[1]);
    await_ready(&server, 2);
    let mut client = server.connect();
    let body = completion("a", 5, true);
    let to_honest = ["x-slipstream-worker: 0"];
    client.write_head("POST", "/v1/completions", &to_honest, body.len());
    client.write(body.as_bytes());
    let stream = honest.start().addr.stream;
    // The right address, from the wrong process.
    liar.say(&first(stream, &[200, 201]));
    liar.say(&end(stream, 2));
    let refused = slipstream_planes::RefusalReason::Invalid;
    liar.say(&pass(|pass| pass.push_refused(stream, 0, refused, "no")));
    server.await_metric("slipstream_foreign_entries_total", |n| n >= 4.0);
    // Addresses without a stream: another generation, another slot, the last slot.
    let stale = server.metric("slipstream_stale_entries_total");
    for (slot, generation) in [(stream.slot, 9), (stream.slot + 1, 0), ((1 << 24) - 1, 0)] {
        honest.say(&tokens(StreamId { slot, generation }, &[1]));
    }
    server.await_metric("slipstream_stale_entries_total", |n| n == stale + 3.0);
    // More tokens than requested, the end twice, and tokens after it.
    honest.say(&first(stream, &[100, 101, 102]));
    honest.say(&tokens(stream, &[103, 104, 105, 106, 107]));
    honest.say(&end(stream, 5));
    honest.say(&end(stream, 5));
    honest.say(&tokens(stream, &[108]));
    assert_eq!(client.head().status, 200);
    let (_, failed) = read_events(&rest(&mut client));
    assert!(!failed);
    server.await_metric("slipstream_excess_tokens_total", |n| n == 3.0);
    assert_eq!(server.metric("vllm:generation_tokens_total"), 5.0);
    // A process that does not own a worker cannot change its cache, load, or readiness.
    for news in [kv(W0, 0), load(W0), {
        let mut bytes = Vec::new();
        wire::encode_ready(W0.worker, false, &mut bytes);
        bytes
    }] {
        let malformed = server.metric("slipstream_plane_malformed_total");
        liar.say(&kv(W1, 0));
        liar.say(&news);
        assert!(liar.closed());
        server.await_metric("slipstream_plane_malformed_total", |n| n == malformed + 1.0);
        await_ready(&server, 1);
        liar = Peer::worker(&frontend, &[1]);
        await_ready(&server, 2);
    }
    drop((honest, liar));
    await_ready(&server, 0);
    assert_eq!(server.metric("slipstream_router_cached_blocks"), 0.0);
}

#[test]
fn noise_after_a_greeting_ends_that_connection_alone() {
    let dir = tempfile::tempdir().unwrap();
    let server = quiet_frontend(dir.path(), &[FAST, IMPATIENT]);
    let worker = Worker::start(dir.path(), &[FAST, &["--pool=main", "--index=0"]]);
    await_ready(&server, 1);
    let frontend = record(dir.path(), ProcessRole::Frontend);
    let stream = StreamId {
        slot: 3,
        generation: 4,
    };
    let good = [
        first(stream, &[1, 2, 3]),
        kv(W1, 0),
        load(W1),
        tokens(stream, &[1]),
        end(stream, 4),
    ]
    .concat();
    for seed in 0..200u64 {
        let mut peer = Peer::worker(&frontend, &[1]);
        let mut bytes = good.clone();
        for n in 0..=seed % 5 {
            let draw = mix::draw(seed, n);
            let at = (draw % bytes.len() as u64) as usize;
            bytes[at] = (draw >> 32) as u8;
        }
        peer.say(&bytes);
        drop(peer);
        server.await_metric("slipstream_plane_connections_open", |open| open == 1.0);
    }
    assert!(server.metric("slipstream_plane_malformed_total") > 20.0);
    await_ready(&server, 1);
    server.assert_alive();
    drop(worker);
}

#[test]
fn half_open_connections_keep_a_worker_out_for_a_moment_and_no_longer() {
    let dir = tempfile::tempdir().unwrap();
    let server = quiet_frontend(dir.path(), &[FAST, IMPATIENT]);
    let frontend = record(dir.path(), ProcessRole::Frontend);
    // More connections than are accepted at one time; half of them begin a hello.
    let mut half_open = Vec::new();
    for n in 0..300 {
        let mut peer = Peer::new(TcpStream::connect(&frontend.shards[0]).unwrap());
        peer.say(&hello(&frontend, &[0])[..n % 2 * 20]);
        half_open.push(peer);
    }
    let worker = Worker::start(dir.path(), &[FAST, IMPATIENT]);
    await_ready(&server, 2);
    assert!(half_open.iter_mut().all(Peer::closed));
    assert!(server.metric("slipstream_plane_rejected_total") >= 300.0);
    server.assert_alive();
    drop(worker);
}

#[test]
fn a_worker_that_never_reads_is_given_up_and_costs_bounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let long: &[&str] = &[
        "--set=model.name=test-model",
        "--set=pool.main.workers=2",
        "--set=model.preset=llama-3.1-8b",
        "--set=engine.max_model_len=131072",
        "--set=engine.num_gpu_blocks=10000",
    ];
    let server = quiet_frontend(dir.path(), &[long, IMPATIENT]);
    let frontend = record(dir.path(), ProcessRole::Frontend);
    let peer = Peer::worker(&frontend, &[0]);
    await_ready(&server, 1);
    // It sends pings, and reads nothing.
    let mut talk = peer.stream.try_clone().unwrap();
    let (cut, until_cut) = mpsc::channel::<()>();
    let pings = std::thread::spawn(move || {
        let mut ping = Vec::new();
        wire::encode_bare(FrameKind::Ping, &mut ping);
        let between = Duration::from_millis(20);
        while talk.write_all(&ping).is_ok()
            && until_cut.recv_timeout(between) == Err(RecvTimeoutError::Timeout)
        {}
    });
    // 50 kB of hashes each: more than sockets and the shard's outbox can hold.
    let prompt = vec!["5"; 100_000].join(",");
    let body = format!(r#"{{"prompt":[{prompt}],"max_tokens":5,"stream":true}}"#);
    let mut clients: Vec<_> = (0..200).map(|_| begin(&server, &body)).collect();
    for client in &mut clients {
        let head = client.head();
        if head.status == 200 {
            let (text, failed) = read_events(&rest(client));
            assert!(failed && text.is_empty());
        } else {
            assert_eq!(head.status, 503);
        }
    }
    server.await_metric("slipstream_plane_silent_total", |silent| silent == 1.0);
    drop(cut);
    pings.join().unwrap();
    await_ready(&server, 0);
    assert_eq!(server.metric("slipstream_streams_open"), 0.0);
    drop(peer);
}

/// A frontend played by the test, in the discovery directory of a worker.
struct Stage {
    listener: std::net::TcpListener,
    record: ProcessRecord,
}

impl Stage {
    fn new(dir: &Path, like: &ProcessRecord) -> Stage {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let record = ProcessRecord {
            instance: 4711,
            name: "the test".into(),
            shards: vec![listener.local_addr().unwrap().to_string()],
            ..like.clone()
        };
        let mut folder = discovery::backend(&discovery::Place::Folder(dir.into())).unwrap();
        let value = serde_json::to_string(&record).unwrap();
        let lease = Duration::from_secs(600);
        folder
            .put(SimTime::ZERO, &record.key(), &value, lease)
            .unwrap();
        Stage { listener, record }
    }

    /// The next worker that connects, and its hello.
    fn accept(&self) -> (Peer, Hello) {
        let (stream, _) = self.listener.accept().unwrap();
        let mut peer = Peer::new(stream);
        let (kind, body) = peer.next().expect("a hello");
        assert_eq!(kind, FrameKind::Hello);
        let hello = Hello::decode(&body).unwrap();
        (peer, hello)
    }

    fn welcome(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        Welcome {
            instance: self.record.instance,
            shard: 0,
            wants_kv: false,
            deadline_ms: 1000,
            name: "the test".into(),
        }
        .encode(&mut bytes);
        bytes
    }
}

fn request(rank: RankId, slot: u32, max_tokens: u32) -> Vec<u8> {
    use slipstream_base::{EngineRequest, GenerationParams, Prompt, RequestId};
    use slipstream_planes::StreamAddr;
    let addr = StreamAddr {
        shard: 0,
        stream: StreamId {
            slot,
            generation: 0,
        },
    };
    let start = StartRequest {
        addr,
        rank,
        request: EngineRequest {
            id: RequestId::from(addr),
            prompt: Prompt::from_tokens(&[1, 2, 3], 16, BlockHash(1)).unwrap(),
            params: GenerationParams {
                max_tokens,
                ignore_eos: true,
                ..GenerationParams::default()
            },
            priority: 0,
            seed: 1,
        },
        dispatched_ns: 1,
        credit_bytes: NO_LIMIT,
        traced: false,
        more: false,
        role: Role::Both,
        attempt: 0,
    };
    let mut bytes = Vec::new();
    wire::encode_start(&start, &mut bytes);
    bytes
}

/// Metrics of a worker process; the sum over labels by name.
fn worker_metric(address: &str, name: &str) -> f64 {
    let page = get(address, "/metrics");
    let values = page.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        (series.split('{').next()? == name).then(|| value.parse::<f64>().expect("a number"))
    });
    let values: Vec<f64> = values.collect();
    assert!(!values.is_empty(), "no {name}: {page}");
    values.iter().sum()
}

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    page
}

/// An address that was free a moment ago.
fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Violations by a frontend; none of them affects the streams of another frontend.
#[test]
fn a_frontend_that_talks_nonsense_or_never_reads_is_cut_and_the_other_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let server = quiet_frontend(dir.path(), &[FAST, IMPATIENT]);
    let stage = Stage::new(dir.path(), &record(dir.path(), ProcessRole::Frontend));
    let page = free_address();
    let metrics: &[&str] = &["--metrics", &page];
    let worker = Worker::start(dir.path(), &[FAST, IMPATIENT, metrics]);
    // Garbage instead of a welcome, half a welcome, a welcome of another frontend.
    let mut other = Vec::new();
    Welcome {
        instance: 1,
        shard: 0,
        wants_kv: false,
        deadline_ms: 1000,
        name: String::new(),
    }
    .encode(&mut other);
    for bytes in [
        &b"HTTP/1.1 200 OK\r\n\r\n"[..],
        &stage.welcome()[..9],
        &other,
    ] {
        let (mut peer, hello) = stage.accept();
        assert_eq!(hello.workers.len(), 2);
        peer.say(bytes);
        drop(peer);
    }
    // Requests for unknown workers are refused, controls for them are harmless, garbage closes the
    // connection.
    let (mut peer, _) = stage.accept();
    peer.say(&stage.welcome());
    let nobody = RankId {
        worker: WorkerId(9),
        dp_rank: 0,
    };
    let addr = slipstream_planes::StreamAddr {
        shard: 0,
        stream: StreamId {
            slot: 9,
            generation: 9,
        },
    };
    for rank in [W0, nobody] {
        let bytes = 1 << 20;
        for message in [
            ToWorker::Stop { rank, addr },
            ToWorker::Kill { rank, addr },
            ToWorker::Credit { rank, addr, bytes },
            ToWorker::Resync { rank },
        ] {
            let mut bytes = Vec::new();
            wire::encode_to_worker(&message, &mut bytes);
            peer.say(&bytes);
        }
    }
    peer.say(&request(nobody, 0, 5));
    let refused = loop {
        let (kind, body) = peer.next().expect("a refusal");
        if kind == FrameKind::Pass {
            let mut pass = PassFrame::new();
            wire::decode_pass(&body, &mut pass).unwrap();
            let entry = pass.entries().next().unwrap();
            break matches!(
                entry,
                slipstream_planes::Entry::Refused {
                    reason: slipstream_planes::RefusalReason::NoSuchRank,
                    ..
                }
            );
        }
    };
    assert!(refused);
    peer.say(&first(addr.stream, &[1])); // a worker's frame
    assert!(peer.closed());
    // It requests much, sends pings, and never reads: the limit is 64 MiB, or a second.
    let (mut peer, _) = stage.accept();
    peer.say(&stage.welcome());
    let mut ping = Vec::new();
    wire::encode_bare(FrameKind::Ping, &mut ping);
    let mut slot = 0;
    let began = Instant::now();
    loop {
        for _ in 0..64 {
            slot += 1;
            if peer.stream.write_all(&request(W0, slot, 4000)).is_err() {
                break;
            }
        }
        if peer.stream.write_all(&ping).is_err() {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "it is cut");
    }
    drop(peer);
    // Its streams have ended, and the other frontend was not affected.
    server.await_metric("vllm:num_requests_running", |running| running == 0.0);
    server.await_metric("vllm:num_requests_waiting", |waiting| waiting == 0.0);
    server.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    assert_eq!(server.metric("slipstream_plane_connections_total"), 1.0);
    server.assert_alive();
    let met = |name: &str| worker_metric(&page, &format!("slipstream_callhome_{name}"));
    assert!(met("open") >= 1.0);
    assert!(met("failed_total") >= 2.0, "garbage, and half a welcome");
    assert!(
        met("rejected_total") >= 1.0,
        "a welcome of another frontend"
    );
    assert!(
        met("malformed_total") >= 1.0,
        "a frame of the other direction"
    );
    assert!(met("silent_total") >= 1.0, "it never read");
    assert!(worker_metric(&page, "slipstream_engine_thread_orphaned_total") >= 1.0);
    assert!(get(&page, "/").starts_with("HTTP/1.1 404"));
    drop(worker);
}

#[test]
fn a_frontend_that_is_stopped_is_given_up_its_blocks_freed_and_taken_back() {
    let dir = tempfile::tempdir().unwrap();
    let one = quiet_frontend(dir.path(), &[FROZEN, IMPATIENT]);
    let other = quiet_frontend(dir.path(), &[FROZEN, IMPATIENT]);
    let worker = Worker::start(dir.path(), &[FROZEN, IMPATIENT]);
    await_ready(&one, 1);
    await_ready(&other, 1);
    let client = begin(&one, &completion("a b c", 100, true));
    other.await_metric("vllm:num_requests_running", |running| running == 1.0);
    one.signal("-STOP");
    other.await_metric("vllm:num_requests_running", |running| running == 0.0);
    other.await_metric("slipstream_worker_used_blocks", |used| used == 0.0);
    await_ready(&other, 1);
    one.signal("-CONT");
    await_ready(&one, 1);
    one.await_metric("slipstream_streams_open", |open| open == 0.0);
    drop((client, worker));
}
