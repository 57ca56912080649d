//! An engine thread: ranks by deadline, requests in, frames out.

use std::any::Any;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::width::{floor_u64, to_u8, to_u32};
use slipstream_base::{
    EngineRequest, FinishReason, ForwardPassMetrics, KvDelta, RankId, RequestId, Role, SimTime,
    TokenId, WorkerId,
};
use slipstream_engine::{PassOutput, Reserved as Room};
use slipstream_planes::clock::{is_simulated, monotonic_ns};
use slipstream_planes::frame::NO_LIMIT;
use slipstream_planes::host::{Turn, Work};
use slipstream_planes::{
    End, EventSink, FirstPass, Flushed, Input, RefusalReason, Reserved, StartRequest, StreamAddr,
    ThreadPort, ToWorker, Usage,
};

use crate::backend::{Backend, Dead, Refused};
use crate::calm::Calm;
use crate::fan_out::{Streams, fan_out};
use crate::held::HeldTokens;
use crate::inputs::{DuplexStream, Inputs};
use crate::live::{LiveTable, NewStream};
use crate::rank::{Phase, Rank};
use crate::set::{Control, LiveTiming, OnReady};
use crate::stats::{RankStats, ThreadStats};
use crate::timeline::Timeline;

/// A rank that was idle for so long publishes a heartbeat, ns.
const HEARTBEAT_NS: u64 = 1_000_000_000;

/// Bytes of a stream's credit that a token takes.
const TOKEN_BYTES: u32 = TokenId::BITS / 8;

/// Messages taken in one round, so that a flood of requests cannot keep passes from ending.
const MESSAGES_PER_ROUND: usize = 1024;

/// Longest single wait for a shard that is behind, ns; then the thread looks whether it should
/// stop, and waits again. The shard's bell ends the wait earlier.
const STALL_SLICE_NS: u64 = 100_000_000;

/// At shutdown, shards have so long to take the last frames, ns.
const DRAIN_NS: u64 = 1_000_000_000;

/// Parts of a rank.
pub(crate) struct RankSeed {
    pub(crate) rank: RankId,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) stats: Arc<RankStats>,
    pub(crate) startup_s: f64,
}

/// Due at this wall time; same times in the order in which they were set.
type Deadline = Reverse<(u64, u64, u32)>;

pub(crate) struct EngineThread {
    port: ThreadPort,
    sink: Box<dyn EventSink>,
    ranks: Vec<Rank>,
    /// By worker: where its ranks begin in `ranks`, and how many they are.
    workers: Vec<(WorkerId, u32, u32)>,
    live: LiveTable,
    held: HeldTokens,
    /// By shard: whether its frames wait apart.
    apart: Vec<bool>,
    inputs: Inputs,
    /// Streams whose turn the last pass answered.
    turned: Vec<StreamAddr>,
    /// Sequences that the last begin of a pass gave blocks to, for prompts that come from elsewhere.
    reserved: Vec<Room>,
    deadlines: BinaryHeap<Deadline>,
    /// Deadlines set so far.
    sequence: u64,
    /// Ranks in [`Phase::Awake`].
    awake: Vec<u32>,
    /// Ranks due in this round.
    due: Vec<u32>,
    heartbeat_ns: u64,
    calm: Calm,
    /// The shard whose thread runs it.
    hosted_by: Option<u8>,
    /// No shard took frames: it has to wait, which only its own thread may.
    must_wait: bool,
    waiting_max: u32,
    fast_path: bool,
    speedup: f64,
    out: PassOutput,
    kv: KvDelta,
    /// Of the blocks that a delta stores, for sinks that take them.
    blocks: Option<StoredBlocks>,
    fpm: ForwardPassMetrics,
    stats: Arc<ThreadStats>,
    control: Arc<Control>,
    on_ready: OnReady,
    startup: Vec<f64>,
}

impl EngineThread {
    pub(crate) fn new(
        port: ThreadPort,
        sink: Box<dyn EventSink>,
        seeds: Vec<RankSeed>,
        timing: &LiveTiming,
        stats: Arc<ThreadStats>,
        control: Arc<Control>,
        on_ready: OnReady,
    ) -> EngineThread {
        let mut workers: Vec<(WorkerId, u32, u32)> = Vec::new();
        let mut ranks = Vec::new();
        let mut startup = Vec::new();
        for seed in seeds {
            match workers.last_mut() {
                Some((worker, _, count)) if *worker == seed.rank.worker => *count += 1,
                _ => workers.push((seed.rank.worker, to_u32(ranks.len()), 1)),
            }
            startup.push(seed.startup_s);
            ranks.push(Rank {
                id: seed.rank,
                backend: seed.backend,
                timeline: Timeline::new(timing.speedup, 0),
                phase: Phase::Starting,
                stats: seed.stats,
                published: false,
            });
        }
        workers.sort_unstable();
        let blocks = sink.wants_blocks().then(StoredBlocks::default);
        if blocks.is_some() {
            for rank in &mut ranks {
                rank.backend.note_stored_blocks(true);
            }
        }
        EngineThread {
            blocks,
            live: LiveTable::new(port.shards()),
            held: HeldTokens::default(),
            apart: vec![false; port.shards()],
            inputs: Inputs::default(),
            turned: Vec::new(),
            reserved: Vec::new(),
            port,
            sink,
            ranks,
            workers,
            deadlines: BinaryHeap::new(),
            sequence: 0,
            awake: Vec::new(),
            due: Vec::new(),
            heartbeat_ns: 0,
            calm: Calm::default(),
            hosted_by: None,
            must_wait: false,
            waiting_max: timing.waiting_max,
            fast_path: timing.fast_path,
            speedup: timing.speedup,
            out: PassOutput::default(),
            kv: KvDelta::default(),
            fpm: ForwardPassMetrics::default(),
            stats,
            control,
            on_ready,
            startup,
        }
    }

    pub(crate) fn run(mut self: Box<Self>) {
        set_timer_slack();
        self.start_ranks();
        while !self.should_stop() {
            if self.round() {
                continue;
            }
            match self.calm_shard() {
                Some(shard) => self = self.lend(shard),
                None => self.sleep(),
            }
        }
        self.shut_down();
    }

    /// The shard whose thread may run this one's work.
    fn calm_shard(&self) -> Option<u8> {
        self.live.only_shard().filter(|_| self.calm.is_calm())
    }

    /// Has the thread of `shard` run the work until it returns, if that shard does so.
    fn lend(mut self: Box<Self>, shard: u8) -> Box<Self> {
        let Some(host) = self.port.host(shard).filter(|host| host.is_open()) else {
            self.sleep();
            return self;
        };
        self.hosted_by = Some(shard);
        let back: Box<dyn Any> = host.lend(self);
        let mut back: Box<Self> = back.downcast().expect("what was lent comes back");
        back.hosted_by = None;
        back
    }

    /// Takes messages, runs due passes, and publishes. Returns whether more are due already.
    fn round(&mut self) -> bool {
        self.take_messages();
        self.begin_awake();
        let now = monotonic_ns();
        if self.run_due(now) {
            self.calm.on_round(now);
        }
        if now >= self.heartbeat_ns {
            self.heartbeat(now);
        }
        self.sink.flush();
        self.stats.streams.set(self.live.len() as u64);
        // No client waits for a pass before it is due, so the thread runs all passes that are.
        let more = self.fast_path && self.next_deadline() <= now;
        self.flush(more);
        more
    }

    /// A look at the flags, if one was raised.
    fn should_stop(&mut self) -> bool {
        if !self.control.attention.swap(false, Ordering::AcqRel) {
            return false;
        }
        for at in 0..self.ranks.len() {
            if self.ranks[at].stats.resync.swap(false, Ordering::AcqRel) {
                self.resync(at);
            }
        }
        self.control.stop.load(Ordering::Acquire)
    }

    fn start_ranks(&mut self) {
        let now = monotonic_ns();
        self.heartbeat_ns = now + HEARTBEAT_NS;
        for at in 0..self.ranks.len() {
            let seconds = self.startup[at];
            let delay_ns = if self.speedup > 0.0 {
                floor_u64(seconds / self.speedup * 1e9)
            } else {
                0
            };
            self.set_deadline(to_u32(at), now.saturating_add(delay_ns));
        }
    }

    fn set_deadline(&mut self, rank: u32, wall_ns: u64) {
        self.deadlines.push(Reverse((wall_ns, self.sequence, rank)));
        self.sequence += 1;
    }

    fn next_deadline(&self) -> u64 {
        self.deadlines
            .peek()
            .map_or(u64::MAX, |Reverse((at, ..))| *at)
    }

    // Requests and controls.

    fn take_messages(&mut self) {
        for _ in 0..MESSAGES_PER_ROUND {
            let Some(message) = self.port.receive() else {
                break;
            };
            self.stats.received.add(1);
            match message {
                ToWorker::Start(start) => self.start(*start),
                ToWorker::Stop { addr, .. } => self.end_early(addr, true),
                ToWorker::Kill { addr, .. } => self.end_early(addr, false),
                ToWorker::Receive { addr, .. } => self.receive(addr),
                ToWorker::Release { addr, .. } => self.release(addr),
                ToWorker::Credit { addr, bytes, .. } => self.give_credit(addr, bytes),
                ToWorker::Input(input) => self.take_input(&input),
                ToWorker::HangUp { addr, .. } => self.hang_up(addr),
                ToWorker::Resync { rank } => {
                    if let Some(at) = self.rank_index(rank) {
                        self.resync(at);
                    }
                }
            }
        }
    }

    fn rank_index(&self, rank: RankId) -> Option<usize> {
        let found = self
            .workers
            .binary_search_by_key(&rank.worker, |&(worker, ..)| worker);
        let (_, first, count) = self.workers[found.ok()?];
        (u32::from(rank.dp_rank) < count).then(|| first as usize + usize::from(rank.dp_rank))
    }

    fn start(&mut self, start: StartRequest) {
        let now = monotonic_ns();
        self.stats
            .handover
            .0
            .observe(now.saturating_sub(start.dispatched_ns));
        let addr = start.addr;
        if usize::from(addr.shard) >= self.port.shards() {
            self.stats.misaddressed.add(1);
            return;
        }
        let Some(at) = self.rank_index(start.rank) else {
            let message = format!(
                "no rank {} runs in this process; refresh the fleet",
                start.rank
            );
            self.refuse(addr, start.attempt, RefusalReason::NoSuchRank, &message);
            return;
        };
        let new = NewStream {
            rank: to_u32(at),
            prompt_tokens: start.request.prompt.len(),
            credit_tokens: match start.credit_bytes {
                NO_LIMIT => NO_LIMIT,
                bytes => bytes / TOKEN_BYTES,
            },
            recv_ns: if start.traced { now } else { 0 },
            is_duplex: start.more,
            role: start.role,
            attempt: start.attempt,
        };
        let opening = start.more.then(|| start.request.clone());
        if let Err(refused) = self.admit(at, start, now) {
            self.ranks[at].stats.refused.add(1);
            self.refuse(addr, new.attempt, refused.reason, &refused.message);
            return;
        }
        self.live.insert(addr, new);
        if let Some(request) = opening {
            self.inputs.begin(addr, &request);
            self.go_on(addr, None);
        }
    }

    /// Puts a request into its engine's waiting queue.
    fn admit(&mut self, at: usize, start: StartRequest, now: u64) -> Result<(), Refused> {
        self.make_way(start.addr)?;
        let mut request = start.request;
        request.id = start.addr.into();
        let model = self.ranks[at].model_now(now);
        self.enqueue(at, request, start.role, model, now)
    }

    /// Puts a request into a rank's waiting queue at `model`, which is `now` by its modelled time.
    fn enqueue(
        &mut self,
        at: usize,
        request: EngineRequest,
        role: Role,
        model: SimTime,
        now: u64,
    ) -> Result<(), Refused> {
        let rank = &mut self.ranks[at];
        let id = rank.id;
        let not_ready = match rank.phase {
            Phase::Starting => Some("is starting up; retry in a moment"),
            Phase::Dead => Some("has no engine any more; retry on another"),
            _ => None,
        };
        if let Some(why) = not_ready {
            return Err(Refused {
                reason: RefusalReason::NotReady,
                message: format!("worker {} {why}", id.worker),
            });
        }
        let waiting = rank.backend.stats().waiting;
        if waiting >= self.waiting_max {
            let limit = self.waiting_max;
            return Err(Refused {
                reason: RefusalReason::Busy,
                message: format!("{waiting} requests wait at {id}, which is the limit of {limit}"),
            });
        }
        rank.backend.start(model, request, role)?;
        rank.stats.note_engine(&rank.backend.stats());
        self.wake(at, now);
        Ok(())
    }

    /// A rank has something to do, or room for what waits. If it was idle it begins a pass once the
    /// messages at hand are taken.
    fn wake(&mut self, at: usize, now: u64) {
        let rank = &mut self.ranks[at];
        if matches!(rank.phase, Phase::Idle { .. }) && !rank.backend.is_idle() {
            let model = rank.model_now(now);
            rank.timeline.anchor(model, now);
            rank.phase = Phase::Awake { model };
            self.awake.push(to_u32(at));
        }
    }

    /// The prompt of an answer has come. Of one that is gone it crossed the kill.
    fn receive(&mut self, addr: StreamAddr) {
        let Some(live) = self.live.get_mut(addr) else {
            return;
        };
        let at = live.rank as usize;
        if self.ranks[at].backend.receive(addr.into()) {
            self.ranks[at].stats.prompts_received.add(1);
            self.wake(at, monotonic_ns());
        }
    }

    /// A prompt that was computed here has been fetched: its blocks are free, perhaps for those who
    /// wait.
    fn release(&mut self, addr: StreamAddr) {
        let Some(live) = self.live.get_mut(addr) else {
            return;
        };
        let at = live.rank as usize;
        let rank = &mut self.ranks[at];
        if slipstream_base::planted!("ignored-release") {
            return;
        }
        if rank.backend.release(addr.into()) {
            rank.stats.prompts_handed_over.add(1);
            rank.stats.note_engine(&rank.backend.stats());
            self.live.remove(addr);
            self.wake(at, monotonic_ns());
        } else {
            // A release before the prompt is computed is a cancel.
            self.end_early(addr, false);
        }
    }

    /// More input of a stream. If the stream has ended, the input crossed the end.
    fn take_input(&mut self, input: &Input) {
        let addr = input.addr;
        let (Some(duplex), Some(live)) = (self.inputs.get_mut(addr), self.live.get_mut(addr))
        else {
            return;
        };
        let max_len = self.ranks[live.rank as usize].backend.max_len() as usize;
        if duplex.take(input).is_err() || duplex.gathered() > max_len {
            self.stats.overruns.add(1);
            self.end_early(addr, true);
            return;
        }
        self.go_on(addr, None);
    }

    /// Begins the next turn of a stream with more input, or ends it, and says how much room
    /// there is for more. `at` is the modelled end of the pass that answered the turn before.
    fn go_on(&mut self, addr: StreamAddr, at: Option<SimTime>) {
        let (Some(duplex), Some(live)) = (self.inputs.get_mut(addr), self.live.get_mut(addr))
        else {
            return;
        };
        let (rank, attempt) = (live.rank as usize, live.attempt);
        if duplex.is_over() {
            let end = duplex.end();
            self.inputs.remove(addr);
            self.live.remove(addr);
            if let Some(frame) = self.port.frame(addr.shard) {
                frame.push_end(addr.stream, &end);
            }
            return;
        }
        if let Some(request) = duplex.next_turn(addr) {
            let now = monotonic_ns();
            let model = at.unwrap_or_else(|| self.ranks[rank].model_now(now));
            if let Err(refused) = self.enqueue(rank, request, Role::Both, model, now) {
                self.inputs.remove(addr);
                self.live.remove(addr);
                self.ranks[rank].stats.refused.add(1);
                self.refuse(addr, attempt, refused.reason, &refused.message);
                return;
            }
        }
        if let Some(duplex) = self.inputs.get_mut(addr) {
            let due = duplex.room_due();
            if due > 0
                && let Some(frame) = self.port.frame(addr.shard)
            {
                frame.push_room(addr.stream, due);
            }
        }
    }

    /// Sees to it that the slot of `addr` is vacant here. A shard that reuses a slot has ended its
    /// earlier stream, whether or not it managed to say so.
    fn make_way(&mut self, addr: StreamAddr) -> Result<(), Refused> {
        self.held.forget(addr);
        match self.live.occupant(addr) {
            None => Ok(()),
            Some(same) if same == addr => Err(Refused {
                reason: RefusalReason::Duplicate,
                message: format!("stream {addr} is already under way"),
            }),
            Some(old) => {
                self.stats.superseded.add(1);
                self.end_early(old, false);
                Ok(())
            }
        }
    }

    fn refuse(&mut self, addr: StreamAddr, attempt: u8, reason: RefusalReason, message: &str) {
        if let Some(frame) = self.port.frame(addr.shard) {
            frame.push_refused(addr.stream, attempt, reason, message);
        }
    }

    /// Ends a stream before its time, and frees its blocks now, also in mid-pass. A stream that
    /// has ended is left alone: its end is on the way.
    fn end_early(&mut self, addr: StreamAddr, tell: bool) {
        if !tell && self.held.contains(addr) {
            self.held.forget(addr);
        }
        let Some(live) = self.live.remove(addr) else {
            return;
        };
        let rank = &mut self.ranks[live.rank as usize];
        let id = RequestId::from(addr);
        let mut preemptions = 0;
        let duplex = self.inputs.remove(addr);
        if duplex.as_ref().is_none_or(DuplexStream::is_answering) {
            let known = if slipstream_base::planted!("unkilled") {
                Some(0)
            } else {
                rank.backend.kill(id)
            };
            debug_assert!(known.is_some(), "a live stream is in its engine");
            preemptions = known.unwrap_or_default();
        }
        rank.stats.note_engine(&rank.backend.stats());
        rank.stats.finished_abort.add(1);
        self.wake(live.rank as usize, monotonic_ns());
        if !tell {
            return;
        }
        let usage = match duplex {
            None => live.usage(preemptions),
            Some(duplex) => duplex.usage(),
        };
        let end = End {
            reason: FinishReason::Abort,
            usage,
        };
        if self.held.end(addr, end) {
            return; // behind the tokens that wait for credit
        }
        if let Some(frame) = self.port.frame(addr.shard) {
            frame.push_end(addr.stream, &end);
        }
    }

    /// So many bytes more of a stream may go; those that wait go at once.
    fn give_credit(&mut self, addr: StreamAddr, bytes: u32) {
        let Some(frame) = self.port.frame(addr.shard) else {
            return;
        };
        let tokens = bytes / TOKEN_BYTES;
        let gone = self.held.release(addr, tokens, frame);
        if let Some(live) = self.live.get_mut(addr)
            && live.credit_tokens != NO_LIMIT
        {
            let left = live.credit_tokens.saturating_add(tokens - gone);
            live.credit_tokens = left.min(NO_LIMIT - 1);
        }
    }

    /// The shard of `addr` is gone, and another may take its place.
    fn hang_up(&mut self, addr: StreamAddr) {
        if !slipstream_base::planted!("kept-orphans") {
            self.orphan(addr.shard);
        }
        if let Some(frame) = self.port.frame(addr.shard) {
            frame.clear();
            let end = End {
                reason: FinishReason::Abort,
                usage: Usage::default(),
            };
            frame.push_end(addr.stream, &end);
        }
    }

    /// Publishes what a rank's cache holds, behind the changes that were not yet published.
    fn resync(&mut self, at: usize) {
        let rank = &mut self.ranks[at];
        if rank.backend.take_kv(&mut self.kv) {
            publish_kv(
                &mut *self.sink,
                &mut *rank.backend,
                &self.kv,
                &mut self.blocks,
            );
        }
        rank.backend.kv_snapshot(&mut self.kv);
        self.sink.on_kv_snapshot(&self.kv);
        rank.stats.resyncs.add(1);
    }

    // Passes.

    /// Begins a pass in each rank that was idle and got something to do. Not request by request:
    /// requests that arrived together are scheduled together.
    fn begin_awake(&mut self) {
        while let Some(at) = self.awake.pop() {
            if let Phase::Awake { model } = self.ranks[at as usize].phase {
                self.begin(at, model);
            }
        }
    }

    /// Runs each rank that is due at `now`, once: a rank whose every pass is past must not keep
    /// the others, or the requests, from their turn. Returns whether any was.
    fn run_due(&mut self, now: u64) -> bool {
        let mut due = std::mem::take(&mut self.due);
        while let Some(&Reverse((deadline, _, rank))) = self.deadlines.peek()
            && deadline <= now
        {
            self.deadlines.pop();
            due.push(rank);
        }
        let any = !due.is_empty();
        for rank in due.drain(..) {
            match self.ranks[rank as usize].phase {
                Phase::Starting => self.ready(rank),
                Phase::InPass { start, end } => {
                    if self.finish(rank, start, end) {
                        // The modelled end is the next pass's start: what the host lost on the way
                        // does not add up.
                        self.begin(rank, end);
                    }
                }
                Phase::Idle { .. } | Phase::Awake { .. } | Phase::Dead => {
                    unreachable!("a rank has a deadline only while it starts or runs a pass")
                }
            }
        }
        self.due = due;
        any
    }

    fn ready(&mut self, at: u32) {
        let wall_ns = monotonic_ns();
        let rank = &mut self.ranks[at as usize];
        let worker = rank.id.worker;
        rank.phase = Phase::Idle {
            model: SimTime(wall_ns),
            wall_ns,
        };
        rank.stats.ready.store(true, Ordering::Release);
        let mut siblings = self.ranks.iter().filter(|rank| rank.id.worker == worker);
        if siblings.all(|rank| rank.stats.is_ready()) {
            (self.on_ready)(worker, true);
        }
    }

    fn begin(&mut self, at: u32, start: SimTime) {
        let now = monotonic_ns();
        let rank = &mut self.ranks[at as usize];
        if rank.timeline.begin(start, now) {
            rank.stats.late_anchors.add(1);
        }
        let begun = rank.backend.begin_step(start, &mut self.reserved);
        rank.stats.note_engine(&rank.backend.stats());
        if !self.reserved.is_empty() {
            self.publish_reserved(at, start);
        }
        let end = match begun {
            Ok(end) => end,
            Err(dead) => return self.bury(at, &dead),
        };
        let rank = &mut self.ranks[at as usize];
        let Some(end) = end else {
            rank.phase = Phase::Idle {
                model: start,
                wall_ns: now,
            };
            // Changes by aborts would otherwise wait for the next pass.
            if rank.backend.take_kv(&mut self.kv) {
                publish_kv(
                    &mut *self.sink,
                    &mut *rank.backend,
                    &self.kv,
                    &mut self.blocks,
                );
            }
            return;
        };
        rank.phase = Phase::InPass { start, end };
        let wall_ns = rank.timeline.wall_ns(end);
        if wall_ns <= now && self.fast_path {
            rank.stats.fast_passes.add(1);
        } else {
            rank.stats.timed_passes.add(1);
        }
        self.set_deadline(at, wall_ns);
    }

    /// Publishes the streams for whose prompts a rank has reserved blocks, at `start`.
    #[cold]
    fn publish_reserved(&mut self, at: u32, start: SimTime) {
        let at_ns = self.ranks[at as usize].timeline.wall_ns(start);
        for room in self.reserved.drain(..) {
            let addr = StreamAddr::from(room.id);
            let (Some(live), Some(frame)) = (self.live.get_mut(addr), self.port.frame(addr.shard))
            else {
                continue;
            };
            debug_assert_eq!(
                live.role,
                Role::Decode,
                "only answers wait for their prompts"
            );
            let recv = (live.recv_ns != 0).then_some(live.recv_ns);
            let reserved = Reserved {
                attempt: live.attempt,
                cached_tokens: room.cached_tokens,
                worker_recv_ns: recv,
                at_ns: recv.map(|recv| at_ns.max(recv)),
            };
            frame.push_reserved(addr.stream, &reserved);
        }
    }

    /// A backend died: its streams end with an error, and its worker takes no requests any more.
    #[cold]
    fn bury(&mut self, at: u32, dead: &Dead) {
        let rank = &mut self.ranks[at as usize];
        let id = rank.id;
        tracing::error!(rank = %id, "engine died: {dead}");
        rank.phase = Phase::Dead;
        rank.stats.ready.store(false, Ordering::Release);
        (self.on_ready)(id.worker, false);
        let message = format!("the engine of {id} died: {dead}");
        for shard in 0..to_u8(self.port.shards()) {
            for addr in self.live.of_shard(shard) {
                if let Some(live) = self.live.get_mut(addr)
                    && live.rank == at
                {
                    let attempt = live.attempt;
                    self.live.remove(addr);
                    self.inputs.remove(addr);
                    // Tokens that wait for credit are of no use without the end that would follow.
                    self.held.forget(addr);
                    self.ranks[at as usize].stats.finished_abort.add(1);
                    self.refuse(addr, attempt, RefusalReason::Stopping, &message);
                }
            }
        }
    }

    /// Ends a pass: its tokens go to the open frames of their shards, its events to the sink. False if
    /// the backend died.
    fn finish(&mut self, at: u32, start: SimTime, end: SimTime) -> bool {
        let rank = &mut self.ranks[at as usize];
        if let Err(dead) = rank.backend.finish_step(&mut self.out) {
            self.bury(at, &dead);
            return false;
        }
        let computed = self.out.fpm.scheduled_prefill.tokens;
        let tokens = computed + u64::from(self.out.token_count);
        rank.stats.pass_tokens.0.observe(tokens);
        self.calm.on_pass(tokens);
        let pass = FirstPass {
            start_ns: rank.timeline.wall_ns(start),
            end_ns: rank.timeline.wall_ns(end),
        };
        let mut streams = Streams {
            live: &mut self.live,
            held: &mut self.held,
            inputs: &mut self.inputs,
            turned: &mut self.turned,
            port: &mut self.port,
            stats: &self.stats,
        };
        let prompts = fan_out(&self.out, rank, pass, &mut streams);
        rank.stats.note_engine(&rank.backend.stats());
        rank.stats
            .generation_tokens
            .add(u64::from(self.out.token_count) - prompts);
        rank.published = true;
        if !self.out.kv.ops.is_empty() {
            publish_kv(
                &mut *self.sink,
                &mut *rank.backend,
                &self.out.kv,
                &mut self.blocks,
            );
        }
        self.sink.on_fpm(&self.out.fpm);
        if !self.turned.is_empty() {
            let mut turned = std::mem::take(&mut self.turned);
            for addr in turned.drain(..) {
                self.go_on(addr, Some(end));
            }
            self.turned = turned;
        }
        true
    }

    /// Once a second: ranks that were idle all the while say that they are alive, and streams of
    /// shards that are gone are dropped.
    fn heartbeat(&mut self, now: u64) {
        self.heartbeat_ns = now + HEARTBEAT_NS;
        for rank in &mut self.ranks {
            if matches!(rank.phase, Phase::Idle { .. }) && !rank.published {
                rank.backend.heartbeat(&mut self.fpm);
                self.sink.on_fpm(&self.fpm);
            }
            rank.published = false;
        }
        for shard in 0..to_u8(self.port.shards()) {
            if self.port.is_gone(shard) {
                self.orphan(shard);
            }
        }
    }

    fn orphan(&mut self, shard: u8) {
        for addr in self.live.of_shard(shard) {
            self.stats.orphaned.add(1);
            self.end_early(addr, false);
        }
        // Those that had ended, except for their tokens.
        self.stats
            .orphaned
            .add(self.held.forget_shard(shard) as u64);
    }

    // Frames, and sleep.

    fn flush(&mut self, may_grow: bool) {
        let mut behind = false;
        for shard in 0..to_u8(self.port.shards()) {
            match self.port.flush(shard, may_grow) {
                Flushed::Kept => {}
                Flushed::Sent => {
                    self.stats.frames.add(1);
                    self.apart[usize::from(shard)] = false;
                }
                Flushed::Gone => self.orphan(shard),
                // It can take more passes, and is tried again after each.
                Flushed::Full if self.port.has_room(shard) => {}
                Flushed::Full => behind = true,
            }
        }
        if behind {
            self.on_behind();
        }
    }

    /// Some shards take no frames, and their open ones are as large as frames may be. While others take frames, these
    /// wait apart, up to a bound.
    #[cold]
    fn on_behind(&mut self) {
        if self.port.all_behind() {
            if self.hosted_by.is_some() {
                self.must_wait = true;
                return;
            }
            return self.wait_for_room();
        }
        for shard in 0..to_u8(self.port.shards()) {
            if self.port.has_room(shard) || self.port.is_gone(shard) {
                continue;
            }
            if !std::mem::replace(&mut self.apart[usize::from(shard)], true) {
                self.stats.apart.add(1);
            }
            if !self.port.has_room_apart(shard) {
                self.give_up(shard);
            }
        }
    }

    /// Ends the streams of a shard for which too much waits, behind their tokens. Another worker continues them
    /// once the shard reads of it.
    fn give_up(&mut self, shard: u8) {
        let mut streams = 0;
        for addr in self.live.of_shard(shard) {
            self.end_early(addr, true);
            streams += 1;
        }
        if streams > 0 {
            self.stats.given_up.add(streams);
            tracing::warn!(
                shard,
                streams,
                "a shard takes no tokens; its streams are ended"
            );
        }
    }

    /// Waits until a shard takes a frame, as the open ones of all are as large as frames may be. No token
    /// is dropped; modelled time runs during the wait, and is re-anchored after.
    fn wait_for_room(&mut self) {
        self.stats.stalls.add(1);
        let began = monotonic_ns();
        while self.port.all_behind() {
            if self.port.prepare_wait_for_any_room() {
                // The shards of a simulated thread run only after it.
                if is_simulated() || self.control.attention.load(Ordering::Acquire) {
                    // To stop, or to publish a snapshot: the round continues with a frame that is
                    // larger than it should be.
                    self.port.bell().stay_awake();
                    break;
                }
                self.port.wait(Some(monotonic_ns() + STALL_SLICE_NS));
            }
            for shard in 0..to_u8(self.port.shards()) {
                match self.port.flush(shard, false) {
                    Flushed::Full | Flushed::Kept => {}
                    Flushed::Sent => {
                        self.stats.frames.add(1);
                        self.apart[usize::from(shard)] = false;
                    }
                    Flushed::Gone => self.orphan(shard),
                }
            }
        }
        self.stats.stalled_ns.add(monotonic_ns() - began);
    }

    fn sleep(&mut self) {
        if !self.port.prepare_wait() {
            return;
        }
        if self.control.attention.load(Ordering::Acquire) {
            self.port.bell().stay_awake();
            return;
        }
        self.stats.sleeps.add(1);
        self.port
            .wait(Some(self.next_deadline().min(self.heartbeat_ns)));
    }

    /// Ends every stream, and gives shards a moment to take the ends.
    fn shut_down(&mut self) {
        while let Some(message) = self.port.receive() {
            if let ToWorker::Start(start) = message {
                let message = "the worker is shutting down; retry on another";
                self.refuse(start.addr, start.attempt, RefusalReason::Stopping, message);
            }
        }
        let deadline = monotonic_ns() + DRAIN_NS;
        for shard in 0..to_u8(self.port.shards()) {
            for addr in self.live.of_shard(shard) {
                self.end_early(addr, true);
            }
            // Credit bounds memory at the other end; there will be no later moment.
            for addr in self.held.of_shard(shard) {
                self.give_credit(addr, NO_LIMIT);
            }
            while self.port.flush(shard, false) == Flushed::Full && monotonic_ns() < deadline {
                if is_simulated() {
                    break; // its shard runs only after it
                }
                if self.port.prepare_wait_for_room(shard) {
                    self.port.wait(Some(deadline));
                }
            }
        }
        self.sink.flush();
    }
}

impl Work for EngineThread {
    fn turn(&mut self, waker: &Waker) -> Turn {
        self.port.bell().stay_awake();
        self.port.bell().wake_task(Some(waker));
        if self.control.attention.load(Ordering::Acquire) {
            return Turn::Leave; // its own thread looks why
        }
        self.stats.hosted.add(1);
        let more = self.round();
        let elsewhere = self.live.len() > 0 && self.live.only_shard() != self.hosted_by;
        if elsewhere || !self.calm.is_calm() || std::mem::take(&mut self.must_wait) {
            return Turn::Leave;
        }
        if more || !self.port.prepare_wait() {
            return Turn::Until(0);
        }
        if self.control.attention.load(Ordering::Acquire) {
            return Turn::Leave;
        }
        Turn::Until(self.next_deadline().min(self.heartbeat_ns))
    }

    fn leave(&mut self) {
        self.port.bell().stay_awake();
        self.port.bell().wake_task(None);
    }
}

#[cfg(feature = "sim")]
pub(crate) mod sim {
    //! A thread that a simulator steps.

    use super::{EngineThread, Phase};

    /// State of an engine thread.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Checked {
        /// Streams.
        pub live: u64,
        /// Streams with tokens that wait for credit.
        pub held: u64,
        /// Blocks that sequences hold.
        pub used_blocks: u64,
        /// Sequences that run.
        pub running: u64,
        /// Sequences that wait.
        pub waiting: u64,
        /// Tokens generated so far.
        pub generated: u64,
    }

    impl Checked {
        pub(crate) fn add(&mut self, other: &Checked) {
            self.live += other.live;
            self.held += other.held;
            self.used_blocks += other.used_blocks;
            self.running += other.running;
            self.waiting += other.waiting;
            self.generated += other.generated;
        }
    }

    impl EngineThread {
        pub(crate) fn start_up(&mut self) {
            self.start_ranks();
        }

        pub(crate) fn is_due(&mut self, now_ns: u64) -> bool {
            self.port.has_requests()
                || self.next_due() <= now_ns
                || !self.awake.is_empty()
                || self
                    .control
                    .attention
                    .load(std::sync::atomic::Ordering::Acquire)
        }

        pub(crate) fn next_due(&self) -> u64 {
            self.next_deadline().min(self.heartbeat_ns)
        }

        pub(crate) fn step(&mut self) {
            self.should_stop();
            self.round();
        }

        pub(crate) fn end(&mut self) {
            self.shut_down();
        }

        pub(crate) fn caches(&self) -> Vec<(slipstream_base::RankId, u64)> {
            let of = |rank: &super::Rank| (rank.id, rank.backend.stats().cached_blocks.into());
            self.ranks.iter().map(of).collect()
        }

        /// Blocks are conserved in each engine, and its sequences are live streams.
        pub(crate) fn check(&self, credit_tokens: u32) -> Result<Checked, String> {
            let mut sum = Checked {
                live: self.live.len() as u64,
                held: self.held.len() as u64,
                ..Checked::default()
            };
            for rank in &self.ranks {
                let stats = rank.backend.stats();
                let (id, used, free) = (rank.id, stats.used_blocks, stats.free_blocks);
                if used + free != stats.total_blocks {
                    return Err(format!(
                        "{id}: {used} blocks used and {free} free are not {}",
                        stats.total_blocks
                    ));
                }
                if stats.running + stats.waiting == 0 && !matches!(rank.phase, Phase::Dead) {
                    let of = self.live.of_rank(self.rank_index(id));
                    if of == 0 && used > 0 {
                        return Err(format!("{id}: {used} blocks belong to no stream"));
                    }
                }
                sum.used_blocks += u64::from(used);
                sum.running += u64::from(stats.running);
                sum.waiting += u64::from(stats.waiting);
                sum.generated += rank.stats.generation_tokens.get();
            }
            if sum.running + sum.waiting > sum.live {
                return Err(format!(
                    "{} sequences run or wait for {} streams",
                    sum.running + sum.waiting,
                    sum.live
                ));
            }
            self.live.check(credit_tokens)?;
            Ok(sum)
        }
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        // Also when an engine's assertion ends the thread.
        for rank in &self.ranks {
            rank.stats.ready.store(false, Ordering::Release);
        }
    }
}

/// Publishes a delta that `backend` just gave, with the tokens of its blocks if they are wanted.
fn publish_kv(
    sink: &mut dyn EventSink,
    backend: &mut dyn Backend,
    delta: &KvDelta,
    blocks: &mut Option<StoredBlocks>,
) {
    match blocks {
        None => sink.on_kv(delta),
        Some(blocks) => {
            backend.take_stored_blocks(blocks);
            sink.on_kv_blocks(delta, blocks);
        }
    }
}

/// Asks for wake-ups on time: by default Linux may add 50 µs to a thread's sleep (prctl(2),
/// PR_SET_TIMERSLACK). Its effect: `docs/live-path.md`.
fn set_timer_slack() {
    #[cfg(target_os = "linux")]
    {
        // Kernels without the call sleep a little longer; nothing else changes.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    }
}
