//! Workers with small engines, and shards that record frames.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use slipstream_base::{
    BlockHash, EngineRequest, ForwardPassMetrics, GenerationParams, KvDelta, Prompt, RankId,
    RequestId, Role, TokenId, WorkerId,
};
use slipstream_config::cluster::{EngineConfig, OutputLen};
use slipstream_engine::timing::{Constant, StepTime};
use slipstream_engine::{Engine, OutputModel, output_token};
use slipstream_planes::ring::Polled;
use slipstream_planes::{
    End, Entry, EventSink, FirstPass, Input, Plane, PlaneLimits, Prologue, RefusalReason,
    Registration, Reserved, ShardPort, StartRequest, StreamAddr, StreamId, StreamTable, ToWorker,
};
use slipstream_worker::{Backend, LiveTiming, WorkerSet, WorkerSpec};

/// No test takes nearly as long; one that does hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn vocab() -> Arc<[TokenId]> {
    (1_000..1_100).collect()
}

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        block_size: 4,
        num_gpu_blocks: 256,
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        max_model_len: 512,
        ..EngineConfig::default()
    }
}

pub(crate) fn rank(worker: u32) -> RankId {
    RankId {
        worker: WorkerId(worker),
        dp_rank: 0,
    }
}

pub(crate) fn engine(
    rank: RankId,
    config: &EngineConfig,
    timing: Box<dyn StepTime>,
) -> Box<dyn Backend> {
    let output = OutputModel {
        vocab: vocab(),
        first_vocab: None,
        eos: 7,
        lengths: OutputLen::Constant(100_000),
    };
    Box::new(Engine::new(rank, config, timing, output).unwrap())
}

/// `count` workers of one rank, each pass `step_ns` long.
pub(crate) fn workers(count: u32, step_ns: u64) -> Vec<WorkerSpec> {
    (0..count)
        .map(|worker| WorkerSpec {
            worker: WorkerId(worker),
            ranks: vec![engine(
                rank(worker),
                &config(),
                Box::new(Constant { step_ns }),
            )],
            startup_s: 0.0,
        })
        .collect()
}

/// Batches that a sink received.
#[derive(Default)]
pub(crate) struct Heard {
    pub(crate) kv: Vec<KvDelta>,
    pub(crate) snapshots: Vec<KvDelta>,
    pub(crate) fpm: Vec<ForwardPassMetrics>,
}

#[derive(Clone, Default)]
pub(crate) struct Sink(pub(crate) Arc<Mutex<Heard>>);

impl EventSink for Sink {
    fn on_kv(&mut self, delta: &KvDelta) {
        self.0.lock().unwrap().kv.push(delta.clone());
    }
    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        self.0.lock().unwrap().snapshots.push(snapshot.clone());
    }
    fn on_fpm(&mut self, metrics: &ForwardPassMetrics) {
        self.0.lock().unwrap().fpm.push(metrics.clone());
    }
}

pub(crate) struct Rig {
    pub(crate) set: WorkerSet,
    pub(crate) shards: Vec<Shard>,
    pub(crate) sink: Sink,
    pub(crate) ready: Arc<Mutex<Vec<WorkerId>>>,
}

pub(crate) struct Setup {
    pub(crate) shards: usize,
    pub(crate) threads: usize,
    pub(crate) limits: PlaneLimits,
    pub(crate) timing: LiveTiming,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            shards: 1,
            threads: 1,
            limits: PlaneLimits::default(),
            timing: LiveTiming {
                speedup: 0.0,
                ..LiveTiming::default()
            },
        }
    }
}

impl Setup {
    pub(crate) fn start(self, specs: Vec<WorkerSpec>) -> Rig {
        let plane = Plane::new(self.shards, self.threads, self.limits);
        let sink = Sink::default();
        let sinks = plane
            .threads
            .iter()
            .map(|_| Box::new(sink.clone()) as Box<dyn EventSink>)
            .collect();
        let ready = Arc::new(Mutex::new(Vec::new()));
        let on_ready = {
            let ready = Arc::clone(&ready);
            move |worker, is_ready| {
                let mut ready = ready.lock().unwrap();
                if is_ready {
                    ready.push(worker);
                } else {
                    ready.retain(|&of| of != worker);
                }
            }
        };
        let set = WorkerSet::start(specs, &self.timing, plane.threads, sinks, on_ready).unwrap();
        Rig {
            set,
            shards: plane.shards.into_iter().map(Shard::new).collect(),
            sink,
            ready,
        }
    }

    /// Starts, and waits until every worker takes requests.
    pub(crate) fn start_ready(self, specs: Vec<WorkerSpec>) -> Rig {
        let rig = self.start(specs);
        until(|| rig.set.ranks().iter().all(|rank| rank.is_ready()));
        rig
    }
}

/// Waits for something that rings no bell.
pub(crate) fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited for {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Frames of a stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) prologue: Option<Prologue>,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) first: Option<FirstPass>,
    pub(crate) refused: Option<(RefusalReason, String)>,
    pub(crate) end: Option<End>,
    /// When the last frame with news of it was sent, ns.
    pub(crate) last_sent_ns: u64,
    /// Ends of turns.
    pub(crate) turns: Vec<End>,
    /// Room given for input, all in all.
    pub(crate) room_bytes: u32,
    /// Its prompt is computed, and kept.
    pub(crate) computed: Option<FirstPass>,
    /// There are blocks for its prompt.
    pub(crate) reserved: Option<Reserved>,
}

impl Answer {
    pub(crate) fn is_over(&self) -> bool {
        self.end.is_some() || self.refused.is_some()
    }
}

/// A shard without clients.
pub(crate) struct Shard {
    pub(crate) port: ShardPort,
    table: StreamTable<()>,
    pub(crate) open: BTreeMap<StreamId, Registration<()>>,
    pub(crate) answers: BTreeMap<StreamId, Answer>,
    pub(crate) gone: Vec<usize>,
    waker: Waker,
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl Shard {
    fn new(port: ShardPort) -> Shard {
        Shard {
            table: StreamTable::new(port.shard(), 4096),
            port,
            open: BTreeMap::new(),
            answers: BTreeMap::new(),
            gone: Vec::new(),
            waker: Waker::from(Arc::new(Unpark(std::thread::current()))),
        }
    }

    pub(crate) fn request(prompt: &[TokenId], max_tokens: u32, seed: u64) -> EngineRequest {
        EngineRequest {
            id: RequestId(0),
            prompt: Prompt::from_tokens(prompt, 4, BlockHash(1)).unwrap(),
            params: GenerationParams {
                max_tokens,
                ..GenerationParams::default()
            },
            priority: 0,
            seed,
        }
    }

    /// Opens a stream and sends `request` to `rank`.
    pub(crate) fn start(&mut self, rank: RankId, request: EngineRequest) -> StreamAddr {
        let registration = self.table.register(()).unwrap();
        let addr = registration.addr();
        self.send_start(addr, rank, request);
        self.answers.insert(addr.stream, Answer::default());
        self.open.insert(addr.stream, registration);
        addr
    }

    /// As [`Shard::start`], for a stream with more input.
    pub(crate) fn start_duplex(&mut self, rank: RankId, request: EngineRequest) -> StreamAddr {
        let registration = self.table.register(()).unwrap();
        let addr = registration.addr();
        self.send(addr, rank, request, true);
        self.answers.insert(addr.stream, Answer::default());
        self.open.insert(addr.stream, registration);
        addr
    }

    pub(crate) fn send_input(
        &mut self,
        addr: StreamAddr,
        rank: RankId,
        tokens: &[TokenId],
        ends_turn: bool,
        last: bool,
    ) {
        let input = Input {
            rank,
            addr,
            tokens: tokens.into(),
            ends_turn,
            last,
        };
        self.port.send(ToWorker::Input(Box::new(input))).unwrap();
    }

    pub(crate) fn send_start(&mut self, addr: StreamAddr, rank: RankId, request: EngineRequest) {
        self.send(addr, rank, request, false);
    }

    /// Starts a part of a request.
    pub(crate) fn start_part(
        &mut self,
        rank: RankId,
        request: EngineRequest,
        role: Role,
    ) -> StreamAddr {
        let registration = self.table.register(()).unwrap();
        let addr = registration.addr();
        let start = StartRequest {
            role,
            ..start_request(addr, rank, request, false)
        };
        self.port.send(ToWorker::Start(Box::new(start))).unwrap();
        self.answers.insert(addr.stream, Answer::default());
        self.open.insert(addr.stream, registration);
        addr
    }

    /// As [`Shard::start`], for a stream of which `credit_bytes` may come at first.
    pub(crate) fn start_with_credit(
        &mut self,
        rank: RankId,
        request: EngineRequest,
        credit_bytes: u32,
    ) -> StreamAddr {
        let registration = self.table.register(()).unwrap();
        let addr = registration.addr();
        let mut start = start_request(addr, rank, request, false);
        start.credit_bytes = credit_bytes;
        self.port.send(ToWorker::Start(Box::new(start))).unwrap();
        self.answers.insert(addr.stream, Answer::default());
        self.open.insert(addr.stream, registration);
        addr
    }

    fn send(&mut self, addr: StreamAddr, rank: RankId, request: EngineRequest, more: bool) {
        let start = start_request(addr, rank, request, more);
        self.port.send(ToWorker::Start(Box::new(start))).unwrap();
    }

    /// Reads frames until `done` is true. Checks that the frames of each stream are in order, and
    /// nothing after its end.
    pub(crate) fn read_until(&mut self, mut done: impl FnMut(&Shard) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !done(self) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "waited for {PATIENCE:?}: {:?}",
                self.answers
            );
            let mut cx = Context::from_waker(&self.waker);
            let (table, answers, open) = (&self.table, &mut self.answers, &mut self.open);
            let polled = self.port.poll_frames(&mut cx, 16, |frame| {
                for entry in frame.entries() {
                    if table.with(entry.stream(), |()| ()).is_some() {
                        let answer = answers.get_mut(&entry.stream()).unwrap();
                        note(answer, entry);
                        answer.last_sent_ns = frame.sent_ns;
                        if answer.is_over() {
                            open.remove(&entry.stream());
                        }
                    }
                }
            });
            match polled {
                Poll::Ready(Polled::Frames(_)) => {}
                Poll::Ready(Polled::ThreadGone(thread)) => self.gone.push(thread),
                Poll::Ready(Polled::Closed) => assert!(done(self), "every thread is gone"),
                Poll::Pending => std::thread::park_timeout(left),
            }
        }
    }

    /// Reads until nothing is under way.
    pub(crate) fn read_all(&mut self) {
        self.read_until(|shard| shard.open.is_empty());
    }

    /// Returns once the thread of `rank` has taken every message sent before.
    pub(crate) fn settle(&mut self, rank: RankId) {
        let nowhere = RankId {
            dp_rank: 999,
            ..rank
        };
        let addr = self.start(nowhere, Shard::request(&[1], 1, 0));
        self.read_until(|shard| shard.answers[&addr.stream].is_over());
        assert_eq!(self.refusal(addr).0, RefusalReason::NoSuchRank);
    }

    pub(crate) fn answer(&self, addr: StreamAddr) -> &Answer {
        &self.answers[&addr.stream]
    }

    pub(crate) fn refusal(&self, addr: StreamAddr) -> (RefusalReason, String) {
        let answer = self.answer(addr);
        answer
            .refused
            .clone()
            .unwrap_or_else(|| panic!("{answer:?} was not refused"))
    }
}

/// Number of the attempt that every stream is started with.
pub(crate) const ATTEMPT: u8 = 3;

fn start_request(
    addr: StreamAddr,
    rank: RankId,
    request: EngineRequest,
    more: bool,
) -> StartRequest {
    StartRequest {
        addr,
        rank,
        request,
        dispatched_ns: slipstream_planes::clock::monotonic_ns(),
        credit_bytes: slipstream_planes::frame::NO_LIMIT,
        traced: true,
        more,
        role: Role::Both,
        attempt: ATTEMPT,
    }
}

fn note(answer: &mut Answer, entry: Entry<'_>) {
    assert!(!answer.is_over(), "{entry:?} after the end: {answer:?}");
    match entry {
        Entry::Prologue { prologue, .. } => {
            assert!(answer.prologue.is_none() && answer.tokens.is_empty());
            answer.prologue = Some(prologue);
        }
        Entry::Refused {
            attempt,
            reason,
            message,
            ..
        } => {
            assert_eq!(attempt, ATTEMPT);
            // Also of a stream under way, if its engine has died.
            answer.refused = Some((reason, message.to_owned()));
        }
        Entry::Tokens { tokens, first, .. } => {
            assert!(answer.prologue.is_some(), "a prologue comes first");
            assert_eq!(first.is_some(), answer.tokens.is_empty());
            answer.first = answer.first.or(first);
            answer.tokens.extend_from_slice(tokens);
        }
        Entry::Computed { pass, .. } => {
            assert!(answer.prologue.is_some() && answer.computed.is_none());
            answer.computed = Some(pass);
        }
        Entry::Reserved { reserved, .. } => {
            assert!(answer.prologue.is_none() && answer.reserved.is_none());
            answer.reserved = Some(reserved);
        }
        Entry::Turn { end, .. } => answer.turns.push(end),
        Entry::Room { bytes, .. } => answer.room_bytes += bytes,
        Entry::End { end, .. } => answer.end = Some(end),
    }
}

/// The answer that an engine gives to a request with this seed.
pub(crate) fn expected(seed: u64, tokens: usize) -> Vec<TokenId> {
    let vocab = vocab();
    (0..tokens as u32)
        .map(|at| output_token(&vocab, seed, at))
        .collect()
}
