//! A shard's side of the workers, and how it takes their frames apart.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;

use slipstream_base::{FinishReason, RankId, Stage, WorkerId};
use slipstream_dispatch::Dispatcher;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::frame::{Entries, NO_LIMIT};
use slipstream_planes::ring::{Polled, ShardPort};
use slipstream_planes::{
    Entry, PassFrame, RefusalReason, StreamAddr, StreamId, StreamTable, ToWorker,
};

use crate::door::shard::Shard;
use crate::openai::ApiError;
use crate::tokens::direct::Due;
use crate::tokens::dispatching::Dispatching;
use crate::tokens::kv_network::KvNetwork;
use crate::tokens::remote::{Peer, WorkerLinks};
use crate::tokens::replies::Replies;
use crate::tokens::reply::state::NewTokens;
use crate::tokens::reply::{StreamRole, StreamSlot};
use crate::tokens::response_store::ResponseStore;

/// Frames that are taken apart before the sockets get a turn. Each may hold thousands of tokens;
/// without a bound a shard whose engines are endlessly fast would never write.
const FRAMES_PER_TURN: usize = 64;

/// How a shard reaches workers.
pub(crate) enum Transport {
    /// Rings to and from the engine threads of this process.
    Rings(ShardPort),
    /// Connections from worker processes.
    Sockets(Rc<WorkerLinks>),
}

/// A shard's side of the workers.
pub(crate) struct Workers {
    pub(crate) shard: Rc<Shard>,
    pub(crate) dispatching: Dispatching,
    pub(crate) table: StreamTable<StreamSlot>,
    pub(crate) model: Rc<str>,
    pub(crate) transport: Transport,
    /// Those that later requests may continue.
    pub(crate) responses: Arc<ResponseStore>,
    pub(crate) replies: Replies,
    /// Streams that it writes itself.
    pub(crate) due: Due,
}

impl Workers {
    /// `kv_network`: with workers that compute prompts for others, the network between them.
    pub(crate) fn new(
        shard: Rc<Shard>,
        responses: Arc<ResponseStore>,
        transport: Transport,
        dispatcher: Dispatcher,
        kv_network: Option<Arc<KvNetwork>>,
    ) -> Workers {
        let streams_max = shard.service.limits.streams_max;
        let streams_max = match &kv_network {
            None => streams_max,
            // A prompt that is computed elsewhere has a stream of its own.
            Some(_) => streams_max.saturating_mul(2),
        };
        Workers {
            dispatching: Dispatching::new(shard.index, dispatcher, kv_network),
            table: StreamTable::new(shard.index, streams_max),
            model: shard.service.model.as_str().into(),
            transport,
            responses,
            replies: Replies::default(),
            due: Due::default(),
            shard,
        }
    }

    /// Credit that a new stream gets.
    pub(crate) fn credit_bytes(&self) -> u32 {
        match &self.transport {
            Transport::Rings(_) => NO_LIMIT,
            Transport::Sockets(remote) => remote.credit_bytes(),
        }
    }

    /// Engine threads of this process.
    pub(crate) fn engine_threads(&self) -> usize {
        match &self.transport {
            Transport::Rings(port) => port.threads(),
            Transport::Sockets(_) => 0,
        }
    }

    /// Hands a stop, kill or credit over. The plane keeps it if there is no room; a worker that is
    /// gone has nothing left to control.
    pub(crate) fn send_control(&self, message: ToWorker) {
        match &self.transport {
            Transport::Rings(port) => {
                let _ = port.send(message);
            }
            Transport::Sockets(remote) => remote.control(&message),
        }
    }

    /// Takes frames apart for as long as there are engine threads, or may be connections.
    pub(crate) async fn drain(self: Rc<Workers>) {
        let port = match &self.transport {
            Transport::Rings(port) => port,
            Transport::Sockets(remote) => return remote.clone().listen(self.clone()).await,
        };
        loop {
            let mut waited = false;
            let polled = poll_fn(|cx| {
                let on_frame = |frame: &PassFrame| self.on_frame(frame, None);
                let polled = port.poll_frames(cx, FRAMES_PER_TURN, on_frame);
                waited |= polled.is_pending();
                polled
            });
            match polled.await {
                Polled::Frames(_) => {
                    while self.write_some() {
                        tokio::task::yield_now().await;
                    }
                    // Other replies that this filled are woken; let them write before the next frames. If there are
                    // none yet, the wait for them does that.
                    if !waited {
                        tokio::task::yield_now().await;
                    }
                }
                Polled::ThreadGone(thread) => {
                    let lost = |worker| port.thread_of(worker) == thread;
                    for fleet in self.shard.service.fleets.each() {
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

    /// The server stops: open requests end with an error. Returns the number of streams.
    pub(crate) fn end_all(&self) -> u64 {
        let mut cut = 0;
        self.table.for_each(|_, feed| {
            let mut state = feed.reply.state.borrow_mut();
            if feed.role == StreamRole::Answer && !state.has_ended(feed.sequence) {
                cut += 1;
                state.fail(&ApiError::stopping());
            }
        });
        cut
    }

    /// Takes a frame apart. `from` sent it; `None`: an engine thread of this process did.
    pub(crate) fn on_frame(&self, frame: &PassFrame, from: Option<&Peer>) {
        let now_ns = monotonic_ns();
        self.shard.metrics.plane.frames.add(1);
        let mut entries = frame.entries();
        while let Some(entry) = entries.next() {
            self.on_entry(&entry, &entries, now_ns, from);
        }
        self.admit_queued();
    }

    /// Applies an entry of a frame, which `rest` follow.
    #[inline]
    fn on_entry(&self, entry: &Entry<'_>, rest: &Entries<'_>, now_ns: u64, from: Option<&Peer>) {
        let known = match *entry {
            Entry::Tokens {
                stream,
                tokens,
                first,
            } => {
                let new = NewTokens {
                    tokens,
                    first,
                    end_follows: rest.begin_with_end_of(stream),
                    now_ns,
                };
                self.on_tokens(stream, new, from)
            }
            _ => self.on_event(entry, from),
        };
        if !known {
            self.shard.metrics.plane.stale_entries.add(1);
        }
    }

    /// Whether `worker` is not one that `from` runs. A worker that does not run a stream cannot report on
    /// it, whatever address it guessed.
    fn is_foreign(&self, worker: Option<WorkerId>, from: Option<&Peer>) -> bool {
        let runs = |peer: &Peer| worker.is_some_and(|worker| peer.runs(worker));
        let foreign = from.is_some_and(|peer| !runs(peer));
        if foreign {
            self.shard.metrics.plane.foreign_entries.add(1);
        }
        foreign
    }

    /// Tokens of a stream came. False if it is gone.
    #[inline]
    fn on_tokens(&self, stream: StreamId, mut new: NewTokens<'_>, from: Option<&Peer>) -> bool {
        let strange_clock = from.is_some_and(|peer| !peer.has_our_clock());
        new.first = new.first.map(|first| first.unless(strange_clock));
        let found = self.table.with(stream, |feed| {
            let mut state = feed.reply.state.borrow_mut();
            let sequence = feed.sequence;
            let rank = state.target(sequence);
            if feed.role != StreamRole::Answer || self.is_foreign(Some(rank.worker), from) {
                return None;
            }
            let taken = state.on_tokens(
                sequence,
                &new,
                &self.shard.service.text,
                &self.shard.metrics,
            );
            let credit = state.credit_due(sequence);
            if taken.due {
                self.due.push(feed.reply.clone());
            }
            Some((rank, taken, credit))
        });
        if let Some(Some((rank, taken, credit))) = found {
            if taken.begins {
                self.dispatching.on_first_token(stream.slot);
            }
            if taken.kill {
                self.cancel(stream.slot);
            } else if credit > 0 {
                self.give_credit(rank, stream, credit);
            }
        }
        found.is_some()
    }

    /// Anything but tokens: a few entries per request. False if its stream is gone.
    fn on_event(&self, entry: &Entry<'_>, from: Option<&Peer>) -> bool {
        let stream = entry.stream();
        let found = self.table.with(stream, |feed| {
            (feed.reply.clone(), feed.sequence, feed.role)
        });
        let Some((reply, index, role)) = found else {
            return false;
        };
        let (id, worker) = match role {
            StreamRole::Answer => {
                let target = reply.state.borrow().target(index);
                (stream.slot, Some(target.worker))
            }
            StreamRole::Prefill { id } => {
                let rank = self.dispatching.prefill_rank(id);
                (id, rank.map(|rank| rank.worker))
            }
        };
        let (Some(worker), false) = (worker, self.is_foreign(worker, from)) else {
            return true;
        };
        let strange_clock = from.is_some_and(|peer| !peer.has_our_clock());
        let mut state = reply.state.borrow_mut();
        match (*entry, role) {
            (Entry::Prologue { prologue, .. }, _) => {
                state.on_prologue(index, &prologue.unless(strange_clock));
            }
            (Entry::Turn { end, .. }, StreamRole::Answer) => {
                state.on_turn(index, &end, &self.shard.service.text);
            }
            (Entry::Room { bytes, .. }, StreamRole::Answer) => state.on_room(bytes),
            (Entry::End { end, .. }, _) => {
                let unasked = end.reason == FinishReason::Abort && !state.has_ended(index);
                let moves = || !state.has_begun(index) || self.dispatching.resumes(id);
                if role != StreamRole::Answer || unasked && moves() {
                    // The worker shuts down: another one begins, or continues.
                    drop(state);
                    self.on_given_up(id, worker);
                } else {
                    if !state.on_end(index, &end, &self.shard.service.text, &self.shard.metrics) {
                        return false;
                    }
                    drop(state);
                    if !slipstream_base::planted!("lost-end") {
                        self.on_ended(id);
                    }
                }
            }
            (Entry::Computed { pass, .. }, StreamRole::Prefill { .. }) => {
                let pass = pass.unless(strange_clock);
                let rank = self.dispatching.prefill_rank(id);
                state.on_prompt_computed(index, rank, pass);
                drop(state);
                self.on_prefilled(id, pass.end_ns);
            }
            (Entry::Reserved { reserved, .. }, StreamRole::Answer) => {
                let reserved = reserved.unless(strange_clock);
                if let Some(ns) = reserved.worker_recv_ns {
                    state.times.note(Stage::WorkerRecv, ns);
                }
                drop(state);
                self.on_reserved(id, &reserved);
            }
            (
                Entry::Refused {
                    attempt,
                    reason,
                    message,
                    ..
                },
                _,
            ) => {
                drop(state);
                self.shard.metrics.plane.refusals.add(1);
                tracing::info!(%message, ?reason, "an engine refused a request");
                if !self.is_attempt(id, attempt) {
                    return true; // the stream was started again before this came
                }
                let error = refusal(reason, message);
                self.on_refused(id, worker, reason.retry_elsewhere(), error);
            }
            _ => {} // of the other kind of stream
        }
        true
    }

    fn addr(&self, stream: StreamId) -> StreamAddr {
        StreamAddr {
            shard: self.shard.index,
            stream,
        }
    }

    fn give_credit(&self, rank: RankId, stream: StreamId, bytes: u32) {
        let addr = self.addr(stream);
        if slipstream_base::planted!("lost-credit") && bytes.is_multiple_of(3) {
            return;
        }
        self.send_control(ToWorker::Credit { rank, addr, bytes });
    }
}

/// The error for a client whose request an engine refuses.
fn refusal(reason: RefusalReason, message: &str) -> ApiError {
    match reason {
        RefusalReason::Invalid => ApiError::bad_body(message),
        _ => ApiError::overloaded(message, 1),
    }
}
