//! What one frontend thread owns, and how it takes frames apart.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use prometheus_client::registry::Registry;
use slipstream_base::mix;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::ring::{Polled, ShardPort};
use slipstream_planes::{Entry, PassFrame, RefusalReason, StreamId, StreamTable, ToWorker};
use slipstream_router::Router;

use crate::metrics::ShardMetrics;
use crate::openai::ApiError;
use crate::reply::Feed;
use crate::service::Service;

/// Frames that are taken apart before the sockets get a turn. Each may hold thousands of tokens;
/// without a bound a shard whose engines are endlessly fast would never write.
const FRAMES_PER_TURN: usize = 64;

/// A shard's ends of what it shares with others.
pub struct ShardPlane {
    /// Rings to and from the engine threads.
    pub port: ShardPort,
    /// Its own front of the router.
    pub router: Router,
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
    port: ShardPort,
    /// Sequences under way over all shards.
    streams_open: Arc<AtomicU64>,
    requests: Cell<u64>,
}

impl Shard {
    pub(crate) fn new(
        index: u8,
        service: Arc<Service>,
        plane: ShardPlane,
        registry: Arc<Registry>,
        metrics: Arc<ShardMetrics>,
        streams_open: Arc<AtomicU64>,
    ) -> Shard {
        Shard {
            index,
            metrics,
            registry,
            router: RefCell::new(plane.router),
            table: StreamTable::new(index, service.limits.streams_max),
            model: service.model.as_str().into(),
            port: plane.port,
            streams_open,
            requests: Cell::new(0),
            service,
        }
    }

    /// A number for a new request: unlike any other of this run, and of other runs by their seed.
    pub(crate) fn next_request_number(&self) -> u64 {
        let number = self.requests.get();
        self.requests.set(number + 1);
        mix::draw(self.service.seed ^ (u64::from(self.index) << 56), number)
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

    /// Hands `message` to its engine thread. False if the thread's ring is full or gone.
    pub(crate) fn send(&self, message: ToWorker) -> bool {
        self.port.send(message).is_ok()
    }

    /// Hands a stop or kill over. The plane keeps it if the ring is full; a thread that is gone has
    /// nothing left to kill.
    pub(crate) fn send_control(&self, message: ToWorker) {
        let _ = self.port.send(message);
    }

    /// Takes frames apart for as long as there are engine threads.
    pub(crate) async fn drain(self: Rc<Shard>) {
        loop {
            match self
                .port
                .frames(FRAMES_PER_TURN, |frame| self.on_frame(frame))
                .await
            {
                // The replies that this filled are woken; let them write before the next frames.
                Polled::Frames(_) => tokio::task::yield_now().await,
                Polled::ThreadGone(thread) => self.on_thread_gone(thread),
                Polled::Closed => return,
            }
        }
    }

    /// An engine thread ended: what its workers had not finished will never be.
    fn on_thread_gone(&self, thread: usize) {
        let fleet = &self.service.fleet;
        for target in fleet.targets() {
            if self.port.thread_of(target.rank.worker) == thread {
                fleet.on_worker_lost(target.rank.worker);
            }
        }
        self.table.for_each(|_, feed| {
            let mut state = feed.reply.state.borrow_mut();
            let rank = state.target(feed.sequence);
            if self.port.thread_of(rank.worker) == thread {
                state.on_refused(
                    feed.sequence,
                    &ApiError::worker_lost(&rank.worker.to_string()),
                );
            }
        });
    }

    fn on_frame(&self, frame: &PassFrame) {
        let now_ns = monotonic_ns();
        self.metrics.frames.add(1);
        for entry in frame.entries() {
            self.on_entry(&entry, now_ns);
        }
    }

    #[inline]
    fn on_entry(&self, entry: &Entry<'_>, now_ns: u64) {
        let known = match *entry {
            Entry::Tokens {
                stream,
                tokens,
                first,
            } => {
                let text = &self.service.text;
                let kill = self.table.with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    let sequence = feed.sequence;
                    state
                        .on_tokens(sequence, tokens, first, now_ns, text, &self.metrics)
                        .then(|| state.target(sequence))
                });
                if let Some(Some(rank)) = kill {
                    self.kill(rank, stream);
                }
                kill.is_some()
            }
            Entry::Prologue { stream, prologue } => self
                .table
                .with(stream, |feed| {
                    feed.reply
                        .state
                        .borrow_mut()
                        .on_prologue(feed.sequence, &prologue);
                })
                .is_some(),
            Entry::End { stream, end } => self
                .table
                .with(stream, |feed| {
                    let mut state = feed.reply.state.borrow_mut();
                    state.on_end(feed.sequence, &end, &self.metrics);
                })
                .is_some(),
            Entry::Refused {
                stream,
                reason,
                message,
            } => self
                .table
                .with(stream, |feed| {
                    self.metrics.engine_refusals.add(1);
                    tracing::info!(%message, ?reason, "an engine refused a request");
                    let mut state = feed.reply.state.borrow_mut();
                    state.on_refused(feed.sequence, &refusal(reason, message));
                })
                .is_some(),
        };
        if !known {
            self.metrics.stale_entries.add(1);
        }
    }

    fn kill(&self, rank: slipstream_base::RankId, stream: StreamId) {
        let addr = slipstream_planes::StreamAddr {
            shard: self.index,
            stream,
        };
        self.send_control(ToWorker::Kill { rank, addr });
    }
}

/// What a client is told when an engine refuses its request.
fn refusal(reason: RefusalReason, message: &str) -> ApiError {
    match reason {
        RefusalReason::Invalid => ApiError::bad_body(message),
        _ => ApiError::overloaded(message, 1),
    }
}
