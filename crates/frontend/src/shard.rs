//! What one frontend thread owns, and how it takes frames apart.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::registry::Registry;
use slipstream_base::{FinishReason, RankId, SimTime, WorkerId, mix};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::frame::{Entries, NO_LIMIT};
use slipstream_planes::ring::{Polled, SendError, ShardPort};
use slipstream_planes::{
    Entry, PassFrame, RefusalReason, StartRequest, StreamAddr, StreamId, StreamTable, ToWorker,
};
use slipstream_router::{RouteRequest, Routed, Router};

use crate::hand_over::{Carrier, HandOvers, Remote as RemotePrompt};
use crate::metrics::{Rejection, ShardMetrics};
use crate::openai::ApiError;
use crate::remote::{NotSent, Peer, Remote, RemotePlane};
use crate::reply::{Again, Feed, Leg, NewTokens, Reply, ReplyState};
use crate::service::Service;

/// Frames that are taken apart before the sockets get a turn. Each may hold thousands of tokens;
/// without a bound a shard whose engines are endlessly fast would never write.
const FRAMES_PER_TURN: usize = 64;

/// How a shard reaches workers.
pub enum Transport {
    /// Rings to and from the engine threads of this process.
    Rings(ShardPort),
    /// Connections from worker processes.
    Sockets(RemotePlane),
}

/// A shard's ends of what it shares with others.
pub struct ShardPlane {
    /// To workers and back.
    pub transport: Transport,
    /// Its own front of the router.
    pub router: Router,
    /// Where some workers compute prompts for others.
    pub hand_overs: Option<HandOvers>,
}

/// [`Transport`] at work.
pub(crate) enum Plane {
    Rings(ShardPort),
    Sockets(Rc<Remote>),
}

/// State of one frontend thread.
pub(crate) struct Shard {
    pub(crate) index: u8,
    pub(crate) service: Arc<Service>,
    pub(crate) metrics: Arc<ShardMetrics>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) router: RefCell<Router>,
    pub(crate) table: StreamTable<Feed>,
    pub(crate) model: Rc<str>,
    pub(crate) carrier: Option<Carrier>,
    pub(crate) plane: Plane,
    /// `--bench-locked-table`: held while a stream table is touched.
    table_lock: Option<Arc<Mutex<()>>>,
    /// Sequences under way over all shards.
    streams_open: Arc<AtomicU64>,
    requests: Cell<u64>,
    /// When an answer of 5xx was last logged, ns, and how many were not since.
    complained: Cell<(u64, u64)>,
}

impl Shard {
    pub(crate) fn new(
        index: u8,
        service: Arc<Service>,
        plane: ShardPlane,
        registry: Arc<Registry>,
        metrics: Arc<ShardMetrics>,
        streams_open: Arc<AtomicU64>,
        table_lock: Option<Arc<Mutex<()>>>,
    ) -> Shard {
        let streams_max = match &plane.hand_overs {
            None => service.limits.streams_max,
            // A prompt that is computed elsewhere has a stream of its own meanwhile.
            Some(_) => service.limits.streams_max.saturating_mul(2),
        };
        Shard {
            index,
            metrics,
            registry,
            router: RefCell::new(plane.router),
            table: StreamTable::new(index, streams_max),
            model: service.model.as_str().into(),
            plane: match plane.transport {
                Transport::Rings(port) => Plane::Rings(port),
                Transport::Sockets(plane) => Plane::Sockets(Rc::new(Remote::new(plane))),
            },
            carrier: plane.hand_overs.map(|of| Carrier::new(index, of)),
            table_lock,
            streams_open,
            requests: Cell::new(0),
            complained: Cell::new((0, 0)),
            service,
        }
    }

    /// To be held while the stream table is touched; `None` but for measuring.
    #[inline]
    pub(crate) fn lock_table(&self) -> Option<MutexGuard<'_, ()>> {
        let lock = self.table_lock.as_ref()?;
        Some(lock.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A number for a new request: unlike any other of this run, and of other runs by their seed.
    pub(crate) fn next_request_number(&self) -> u64 {
        let number = self.requests.get();
        self.requests.set(number + 1);
        mix::draw(self.service.seed ^ (u64::from(self.index) << 56), number)
    }

    /// Whether an answer of 5xx may be logged: one a second. Then: how many were not since the last.
    pub(crate) fn may_complain(&self) -> Option<u64> {
        const PAUSE_NS: u64 = 1_000_000_000;
        let now = monotonic_ns();
        let (last, unsaid) = self.complained.get();
        if last != 0 && now < last + PAUSE_NS {
            self.complained.set((last, unsaid + 1));
            return None;
        }
        self.complained.set((now, 0));
        Some(unsaid)
    }

    /// Claims room for `count` sequences. False if that would exceed `live.streams_max`.
    pub(crate) fn open_streams(&self, count: usize) -> bool {
        let before = self.streams_open.fetch_add(count as u64, Relaxed);
        if before + count as u64 > u64::from(self.service.limits.streams_max) {
            self.streams_open.fetch_sub(count as u64, Relaxed);
            return false;
        }
        self.metrics.streams_open.add(count as u64);
        true
    }

    /// Gives back the room of `count` sequences.
    pub(crate) fn on_streams_closed(&self, count: usize) {
        self.streams_open.fetch_sub(count as u64, Relaxed);
        self.metrics.streams_open.sub(count as u64);
    }

    /// Credit that a new stream gets.
    pub(crate) fn credit_bytes(&self) -> u32 {
        match &self.plane {
            Plane::Rings(_) => NO_LIMIT,
            Plane::Sockets(remote) => remote.credit_bytes(),
        }
    }

    /// Chooses who computes a prompt for the worker that generates the answer, of which that one is
    /// expected to reuse `hit_blocks`; `None` if it does it itself.
    pub(crate) fn route_prompt(
        &self,
        now: SimTime,
        route: &RouteRequest<'_>,
        hit_blocks: u32,
    ) -> Option<Routed> {
        let carrier = self.carrier.as_ref()?;
        let hit_tokens = hit_blocks * self.service.block_size;
        let uncached = route.prompt.len().saturating_sub(hit_tokens);
        // What the client named is the worker that answers.
        let route = RouteRequest {
            direct: None,
            ..*route
        };
        let mut router = carrier.router.borrow_mut();
        router.route_prompt(now, &route, uncached)
    }

    /// Hands sequence `index` of `reply` to its worker; to two of them if another one, `prompt`,
    /// computes its prompt. If a worker cannot take it, or turns out to be gone before the answer has
    /// begun, another one gets it, once.
    ///
    /// # Errors
    /// What to tell the client if nobody takes it.
    pub(crate) fn launch(
        &self,
        reply: &Rc<Reply>,
        index: u32,
        again: Again,
        prompt: Option<Routed>,
    ) -> Result<(), ApiError> {
        let credit = again.start.credit_bytes;
        reply.state.borrow_mut().set_credit(index, credit);
        if let Some(prompt) = prompt {
            return self.launch_apart(reply, index, again, prompt, 0);
        }
        let worker = again.start.rank.worker;
        match self.hand_over(again.start) {
            Ok(None) => Ok(()),
            Ok(Some(start)) => {
                let again = Again { start, ..again };
                reply.state.borrow_mut().keep(index, again);
                Ok(())
            }
            Err(start) => self.relaunch(reply, index, Again { start, ..again }, worker),
        }
    }

    /// Hands a start over. It comes back where it may be needed again: `Ok(Some)` from a socket,
    /// as the worker behind it may vanish; `Err` if it was not handed over.
    pub(crate) fn hand_over(
        &self,
        start: Box<StartRequest>,
    ) -> Result<Option<Box<StartRequest>>, Box<StartRequest>> {
        match &self.plane {
            Plane::Rings(port) => match port.send(ToWorker::Start(start)) {
                Ok(()) => Ok(None),
                Err(
                    SendError::Full(ToWorker::Start(start))
                    | SendError::Closed(ToWorker::Start(start)),
                ) => Err(start),
                Err(_) => unreachable!("what comes back is what was sent"),
            },
            Plane::Sockets(remote) => match remote.start(&start, &self.metrics) {
                Ok(()) => Ok(Some(start)),
                Err(why) => {
                    if why == NotSent::Tombstone {
                        self.metrics.late_starts.add(1);
                    }
                    Err(start)
                }
            },
        }
    }

    /// The worker `failed` of a sequence that has sent nothing did not take it, or is gone: another
    /// one gets it.
    pub(crate) fn relaunch(
        &self,
        reply: &Rc<Reply>,
        index: u32,
        again: Again,
        failed: WorkerId,
    ) -> Result<(), ApiError> {
        let Again {
            mut start,
            session,
            direct,
        } = again;
        let route = RouteRequest {
            prompt: &start.request.prompt,
            max_tokens: start.request.params.max_tokens,
            session,
            direct,
            exclude: &[failed],
        };
        let now = SimTime(monotonic_ns());
        let routed = self.router.borrow_mut().route(now, &route, None);
        let routed = routed.map_err(|error| {
            self.metrics.on_rejected(Rejection::NoWorker);
            ApiError::overloaded(
                format!("worker {failed} does not take the request, and {error}"),
                1,
            )
        })?;
        self.metrics.retries.add(1);
        let prompt = if start.more {
            None
        } else {
            self.route_prompt(now, &route, routed.hit_blocks)
        };
        start.rank = routed.target;
        reply
            .state
            .borrow_mut()
            .move_to(index, routed.target, routed.active);
        if let Some(prompt) = prompt {
            let again = Again {
                start,
                session,
                direct,
            };
            return self.launch_apart(reply, index, again, prompt, 1);
        }
        match self.hand_over(start) {
            Ok(_) => Ok(()),
            Err(start) => {
                self.metrics.on_rejected(Rejection::NoWorker);
                let workers = format!("workers {failed} and {} do", start.rank.worker);
                Err(ApiError::overloaded(
                    format!("{workers} not take the request at the moment; try again"),
                    1,
                ))
            }
        }
    }

    /// Hands a stop, kill or credit over. The plane keeps it if there is no room; a worker that is
    /// gone has nothing left to control.
    pub(crate) fn send_control(&self, message: ToWorker) {
        match &self.plane {
            Plane::Rings(port) => {
                let _ = port.send(message);
            }
            Plane::Sockets(remote) => remote.control(&message),
        }
    }

    /// Takes frames apart for as long as there are engine threads, or may be connections.
    pub(crate) async fn drain(self: Rc<Shard>) {
        let port = match &self.plane {
            Plane::Rings(port) => port,
            Plane::Sockets(remote) => return remote.clone().listen(self.clone()).await,
        };
        loop {
            match port
                .frames(FRAMES_PER_TURN, |frame| self.on_frame(frame, None))
                .await
            {
                // The replies that this filled are woken; let them write before the next frames.
                Polled::Frames(_) => tokio::task::yield_now().await,
                Polled::ThreadGone(thread) => {
                    let lost = |worker| port.thread_of(worker) == thread;
                    for fleet in self.service.fleets.each() {
                        for target in fleet.targets() {
                            if lost(target.rank.worker) {
                                fleet.on_worker_lost(target.rank.worker);
                            }
                        }
                    }
                    self.on_workers_gone(lost);
                }
                Polled::Closed => return,
            }
        }
    }

    /// Workers vanished: their streams that have begun will never be finished and end with an
    /// error; the others go elsewhere, once.
    pub(crate) fn on_workers_gone(&self, gone: impl Fn(WorkerId) -> bool) {
        let mut elsewhere = Vec::new();
        let mut apart = Vec::new();
        self.table.for_each(|_, feed| {
            if feed.leg == Leg::Prompt {
                return;
            }
            let mut state = feed.reply.state.borrow_mut();
            let worker = state.target(feed.sequence).worker;
            if state.has_ended(feed.sequence) {
                return;
            }
            if let Some(prompt) = state.prompt_rank(feed.sequence) {
                let lost = [worker, prompt.worker].into_iter().find(|&w| gone(w));
                if let Some(worker) = lost {
                    apart.push((feed.reply.clone(), feed.sequence, worker));
                }
                return;
            }
            if !gone(worker) {
                return;
            }
            if let Some(again) = state.take_kept(feed.sequence) {
                elsewhere.push((feed.reply.clone(), feed.sequence, again, worker));
            } else {
                self.metrics.streams_lost.add(1);
                state.on_refused(feed.sequence, &ApiError::worker_lost(&worker.to_string()));
            }
        });
        for (reply, index, again, worker) in elsewhere {
            self.retry(&reply, index, again, worker);
        }
        for (reply, index, worker) in apart {
            let again = self
                .abandon(&reply, index)
                .and_then(RemotePrompt::into_again);
            if let Some(again) = again {
                self.retry(&reply, index, again, worker);
            } else {
                self.metrics.streams_lost.add(1);
                let error = ApiError::worker_lost(&worker.to_string());
                reply.state.borrow_mut().on_refused(index, &error);
            }
        }
    }

    /// The server stops: what is under way ends with an error. Returns the number of streams.
    pub(crate) fn end_all(&self) -> u64 {
        let mut cut = 0;
        self.table.for_each(|_, feed| {
            let mut state = feed.reply.state.borrow_mut();
            if feed.leg == Leg::Answer && !state.has_ended(feed.sequence) {
                cut += 1;
                state.fail(&ApiError::stopping());
            }
        });
        self.metrics.streams_cut_stop.add(cut);
        cut
    }

    fn retry(&self, reply: &Rc<Reply>, index: u32, again: Again, failed: WorkerId) {
        if let Err(error) = self.relaunch(reply, index, again, failed) {
            self.metrics.streams_lost.add(1);
            reply.state.borrow_mut().on_refused(index, &error);
        }
    }

    /// Takes a frame apart. `from` sent it; `None`: an engine thread of this process did.
    pub(crate) fn on_frame(&self, frame: &PassFrame, from: Option<&Peer>) {
        let now_ns = monotonic_ns();
        self.metrics.frames.add(1);
        if let Some(first) = frame.entries().next() {
            let lock = self.lock_table();
            std::hint::black_box(self.table.contains(first.stream()));
            drop(lock);
            let took = monotonic_ns() - now_ns;
            self.metrics.table_access.observe(took);
        }
        let mut entries = frame.entries();
        while let Some(entry) = entries.next() {
            if self.table_lock.is_some() {
                drop(self.lock_table());
            }
            self.on_entry(&entry, &entries, now_ns, from);
        }
    }

    /// Applies an entry of a frame, which `rest` follow.
    #[inline]
    fn on_entry(&self, entry: &Entry<'_>, rest: &Entries<'_>, now_ns: u64, from: Option<&Peer>) {
        // Who does not run a stream has nothing to say of it, whatever address it guessed.
        let foreign = |worker| {
            let foreign = from.is_some_and(|peer| !peer.runs(worker));
            if foreign {
                self.metrics.foreign_entries.add(1);
            }
            foreign
        };
        let strange_clock = from.is_some_and(|peer| !peer.has_our_clock());
        let known = match *entry {
            Entry::Tokens {
                stream,
                tokens,
                first,
            } => {
                let text = &self.service.text;
                let told = self.table.with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    let sequence = feed.sequence;
                    if feed.leg == Leg::Prompt || foreign(state.target(sequence).worker) {
                        return None;
                    }
                    let new = NewTokens {
                        tokens,
                        first: first.map(|first| first.unless(strange_clock)),
                        end_follows: rest.begin_with_end_of(stream),
                        now_ns,
                    };
                    let kill = state.on_tokens(sequence, &new, text, &self.metrics);
                    let credit = state.credit_due(sequence);
                    (kill || credit > 0).then(|| (state.target(sequence), kill, credit))
                });
                match told {
                    Some(Some((rank, true, _))) => self.kill(rank, stream),
                    Some(Some((rank, false, bytes))) => self.give_credit(rank, stream, bytes),
                    Some(None) | None => {}
                }
                told.is_some()
            }
            Entry::Prologue { stream, prologue } => self
                .table
                .with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    if !foreign(speaker(&state, feed)) {
                        state.on_prologue(feed.sequence, &prologue.unless(strange_clock));
                    }
                })
                .is_some(),
            Entry::Turn { stream, end } => self
                .table
                .with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    if feed.leg == Leg::Answer && !foreign(state.target(feed.sequence).worker) {
                        state.on_turn(feed.sequence, &end, &self.service.text);
                    }
                })
                .is_some(),
            Entry::Room { stream, bytes } => self
                .table
                .with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    if feed.leg == Leg::Answer && !foreign(state.target(feed.sequence).worker) {
                        state.on_room(bytes);
                    }
                })
                .is_some(),
            Entry::End { stream, end } => {
                let ended = self.table.with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    let worker = speaker(&state, feed);
                    if foreign(worker) {
                        return None;
                    }
                    let (reply, sequence) = (feed.reply.clone(), feed.sequence);
                    if feed.leg == Leg::Prompt {
                        return Some(Cut::Prompt(reply, sequence));
                    }
                    // Nobody asked the worker to: it shuts down. What has sent nothing goes elsewhere.
                    if end.reason == FinishReason::Abort && !state.has_ended(sequence) {
                        if state.remote(sequence).is_some() {
                            return Some(Cut::Prompt(reply, sequence));
                        }
                        if let Some(again) = state.take_kept(sequence) {
                            return Some(Cut::Kept(reply, sequence, again, worker));
                        }
                    }
                    state.on_end(sequence, &end, &self.service.text, &self.metrics);
                    None
                });
                let known = ended.is_some();
                match ended.flatten() {
                    None => {}
                    Some(Cut::Prompt(reply, index)) => {
                        self.on_part_lost(&reply, index, self.addr(stream));
                    }
                    Some(Cut::Kept(reply, index, again, worker)) => {
                        self.retry(&reply, index, again, worker);
                    }
                }
                known
            }
            Entry::Computed { stream, pass } => {
                let found = self.table.with(stream, |feed| {
                    let state = feed.reply.state.borrow();
                    let ours = feed.leg == Leg::Prompt && !foreign(speaker(&state, feed));
                    ours.then(|| (feed.reply.clone(), feed.sequence))
                });
                let known = found.is_some();
                if let Some(Some((reply, index))) = found {
                    self.on_computed(&reply, index, pass.unless(strange_clock));
                }
                known
            }
            Entry::Reserved { stream, reserved } => {
                let found = self.table.with(stream, |feed| {
                    let state = feed.reply.state.borrow();
                    let ours = feed.leg == Leg::Answer && !foreign(speaker(&state, feed));
                    ours.then(|| (feed.reply.clone(), feed.sequence))
                });
                let known = found.is_some();
                if let Some(Some((reply, index))) = found {
                    self.on_reserved(&reply, index, &reserved.unless(strange_clock));
                }
                known
            }
            Entry::Refused {
                stream,
                reason,
                message,
            } => {
                let again = self.table.with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    let worker = speaker(&state, feed);
                    if foreign(worker) {
                        return None;
                    }
                    self.metrics.engine_refusals.add(1);
                    tracing::info!(%message, ?reason, "an engine refused a request");
                    if state.prompt_rank(feed.sequence).is_some() {
                        return Some((feed.reply.clone(), feed.sequence, None, worker));
                    }
                    let again = state.take_kept(feed.sequence);
                    if let Some(again) = again.filter(|_| reason.retry_elsewhere()) {
                        return Some((feed.reply.clone(), feed.sequence, Some(again), worker));
                    }
                    state.on_refused(feed.sequence, &refusal(reason, message));
                    None
                });
                let known = again.is_some();
                match again.flatten() {
                    None => {}
                    Some((reply, index, Some(again), worker)) => {
                        self.retry(&reply, index, again, worker);
                    }
                    Some((reply, index, None, worker)) => {
                        // One of two workers: the other is to forget the request.
                        let again = self
                            .abandon(&reply, index)
                            .and_then(RemotePrompt::into_again);
                        if let Some(again) = again.filter(|_| reason.retry_elsewhere()) {
                            self.retry(&reply, index, again, worker);
                        } else {
                            let error = refusal(reason, message);
                            reply.state.borrow_mut().on_refused(index, &error);
                        }
                    }
                }
                known
            }
        };
        if !known {
            self.metrics.stale_entries.add(1);
        }
    }

    fn addr(&self, stream: StreamId) -> StreamAddr {
        StreamAddr {
            shard: self.index,
            stream,
        }
    }

    fn give_credit(&self, rank: RankId, stream: StreamId, bytes: u32) {
        let addr = self.addr(stream);
        self.send_control(ToWorker::Credit { rank, addr, bytes });
    }

    fn kill(&self, rank: RankId, stream: StreamId) {
        let addr = self.addr(stream);
        self.send_control(ToWorker::Kill { rank, addr });
    }
}

/// What a worker that shuts down has ended before its first token.
enum Cut {
    /// A sequence whose prompt is elsewhere, at either worker.
    Prompt(Rc<Reply>, u32),
    /// A sequence that this worker had to itself.
    Kept(Rc<Reply>, u32, Again, WorkerId),
}

/// The worker that has something to say by the stream of `feed`.
fn speaker(state: &ReplyState, feed: &Feed) -> WorkerId {
    let target = state.target(feed.sequence);
    match feed.leg {
        Leg::Answer => target.worker,
        Leg::Prompt => state.prompt_rank(feed.sequence).unwrap_or(target).worker,
    }
}

/// What a client is told when an engine refuses its request.
fn refusal(reason: RefusalReason, message: &str) -> ApiError {
    match reason {
        RefusalReason::Invalid => ApiError::bad_body(message),
        _ => ApiError::overloaded(message, 1),
    }
}
