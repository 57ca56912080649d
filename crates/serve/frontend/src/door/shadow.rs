//! Requests for a twin that runs next to a fleet of real engines: their arrival, engine, lengths and times.
//!
//! Shards put them into a bounded queue and never wait. Messages without room are dropped and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use slipstream_base::{BlockHash, WorkerId};

/// Messages that may wait: two per request.
const QUEUE: usize = 1 << 15;

/// A message to the twin.
#[derive(Clone, Debug)]
pub enum ShadowEvent {
    /// A request arrived. Until it ends, the twin does not pass its arrival.
    Arrived {
        /// Its number.
        id: u64,
        /// `CLOCK_MONOTONIC`, ns.
        arrival_ns: u64,
    },
    /// It ended.
    Ended(Box<ShadowRequest>),
}

/// A request at its end.
#[derive(Clone, Debug, Default)]
pub struct ShadowRequest {
    /// Its number.
    pub id: u64,
    /// Arrival, `CLOCK_MONOTONIC` ns.
    pub arrival_ns: u64,
    /// The engine that answered it; `None`: none did.
    pub worker: Option<WorkerId>,
    /// Its address.
    pub engine: Arc<str>,
    /// Other engines had a part of it: its times are not those of one engine.
    pub is_moved: bool,
    /// Its client has all of the answer.
    pub is_complete: bool,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Of these, cached; `None`: the engine does not say.
    pub cached_tokens: Option<u32>,
    /// Hashes of the prompt's full blocks, of the router's block size.
    pub blocks: Arc<[BlockHash]>,
    /// Tokens of the answer.
    pub output_tokens: u32,
    /// First event of a stream with text, `CLOCK_MONOTONIC` ns; 0: it was no stream.
    pub first_ns: u64,
    /// Last piece of the answer, `CLOCK_MONOTONIC` ns.
    pub last_ns: u64,
    /// Priority; lower runs first.
    pub priority: i32,
}

/// The shards' end of the queue.
#[derive(Clone, Debug)]
pub struct ShadowFeed {
    queue: SyncSender<ShadowEvent>,
    numbers: Arc<AtomicU64>,
    dropped: Arc<AtomicU64>,
}

impl ShadowFeed {
    /// A feed, its messages, and the number of those for which there was no room.
    pub fn new() -> (ShadowFeed, Receiver<ShadowEvent>, Arc<AtomicU64>) {
        let (queue, events) = sync_channel(QUEUE);
        let dropped = Arc::<AtomicU64>::default();
        let feed = ShadowFeed {
            queue,
            numbers: Arc::default(),
            dropped: dropped.clone(),
        };
        (feed, events, dropped)
    }

    /// Announces a request. `None`: there is no room.
    pub(crate) fn begin(&self, arrival_ns: u64) -> Option<Shadowed> {
        let id = self.numbers.fetch_add(1, Relaxed);
        let arrived = ShadowEvent::Arrived { id, arrival_ns };
        if self.queue.try_send(arrived).is_err() {
            self.dropped.fetch_add(1, Relaxed);
            return None;
        }
        Some(Shadowed {
            feed: self.clone(),
            request: ShadowRequest {
                id,
                arrival_ns,
                ..ShadowRequest::default()
            },
        })
    }
}

/// A request that was announced.
pub(crate) struct Shadowed {
    feed: ShadowFeed,
    pub(crate) request: ShadowRequest,
}

impl Shadowed {
    /// It has ended. Without room for it, the twin goes on without it after a time limit.
    pub(crate) fn end(self) {
        let ended = ShadowEvent::Ended(Box::new(self.request));
        if self.feed.queue.try_send(ended).is_err() {
            self.feed.dropped.fetch_add(1, Relaxed);
        }
    }
}
