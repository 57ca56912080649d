//! The bus trait, and the bus inside the process.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bytes::Bytes;
use slipstream_base::sync::lock;
use tokio::sync::Notify;

use crate::batch::{Batch, EventKind, RankTopics};

/// Sends batches. Runs on the event thread only.
pub(crate) trait Bus {
    /// Takes a batch: sent, queued within bounds for subscribers, or counted as dropped.
    ///
    /// It may wait while the peer is unavailable. During that time the queues before it fill and
    /// drop their oldest. Dropping the future drops the rest of the batch.
    fn send<'a>(&'a mut self, batch: &'a Batch) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

    /// Waits until the taken batches were sent, as far as possible.
    fn close<'a>(&'a mut self) -> Pin<Box<dyn Future<Output = ()> + 'a>>;
}

/// Counters of a bus. All are monotonic except `subscribers`.
#[derive(Debug, Default)]
pub struct BusCounters {
    /// Forward-pass metrics passed to the bus.
    pub fpm_sent: AtomicU64,
    /// KV batches passed to the bus.
    pub kv_sent: AtomicU64,
    /// Bytes of both.
    pub bytes_sent: AtomicU64,
    /// Events dropped for a subscriber that reads too slowly.
    pub subscriber_dropped: AtomicU64,
    /// Events that the bus rejected (too large), or dropped at shutdown.
    pub refused: AtomicU64,
    /// Connected subscribers. NATS: whether the server is connected (0 or 1).
    pub subscribers: AtomicU64,
    /// Connections lost.
    pub disconnects: AtomicU64,
    /// Peers that violated the protocol or a limit.
    pub bad_peers: AtomicU64,
    /// Connections that could not be accepted (too many descriptors or subscribers).
    pub accept_errors: AtomicU64,
    /// Requests for past KV events.
    pub replays: AtomicU64,
    /// Batches sent in reply.
    pub replayed: AtomicU64,
    /// Malformed requests.
    pub bad_replays: AtomicU64,
}

impl BusCounters {
    pub(crate) fn note_sent(&self, batch: &Batch) {
        let sent = match batch.kind {
            EventKind::Fpm => &self.fpm_sent,
            EventKind::Kv => &self.kv_sent,
        };
        add(sent, batch.records.len() as u64);
        add(&self.bytes_sent, batch.wire().len() as u64);
    }
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// A received event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Subject or topic.
    pub topic: Bytes,
    /// Number among the events of its kind and rank, from 0; `None` if the bus does not provide it.
    pub sequence: Option<u64>,
    /// MessagePack.
    pub payload: Bytes,
}

/// Why NATS cannot be used. A server that is not running yet is no error.
#[derive(Debug, thiserror::Error)]
#[error("NATS at {url} (live.events.nats_url): {source}")]
pub struct NatsError {
    /// The server.
    pub url: String,
    /// The cause.
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl NatsError {
    /// The error of a build without the feature `nats`.
    pub fn not_built(url: &str) -> NatsError {
        let source = "this binary was built without NATS; build it with `cargo build --release`";
        NatsError {
            url: url.to_owned(),
            source: source.into(),
        }
    }
}

/// The bus inside the process.
#[derive(Clone, Debug, Default)]
pub struct Hub {
    subscribers: Arc<Mutex<Vec<Weak<HubQueue>>>>,
}

/// A subscriber inside the process. Dropping it ends the subscription.
#[derive(Debug)]
pub struct HubSubscriber {
    queue: Arc<HubQueue>,
}

#[derive(Debug)]
struct HubQueue {
    bytes_max: usize,
    events: Mutex<(VecDeque<Event>, usize)>,
    dropped: AtomicU64,
    bell: Notify,
}

impl Hub {
    /// A new subscriber for events from now on. Beyond `bytes_max` of unread events, the oldest are
    /// dropped.
    pub fn subscribe(&self, bytes_max: usize) -> HubSubscriber {
        let queue = Arc::new(HubQueue {
            bytes_max,
            events: Mutex::default(),
            dropped: AtomicU64::new(0),
            bell: Notify::new(),
        });
        lock(&self.subscribers).push(Arc::downgrade(&queue));
        HubSubscriber { queue }
    }
}

impl HubSubscriber {
    /// The next event, if one is available.
    pub fn try_recv(&mut self) -> Option<Event> {
        let mut events = lock(&self.queue.events);
        let event = events.0.pop_front()?;
        events.1 -= event.payload.len();
        Some(event)
    }

    /// Waits for the next event. Works on any runtime.
    pub async fn recv(&mut self) -> Event {
        loop {
            if let Some(event) = self.try_recv() {
                return event;
            }
            self.queue.bell.notified().await;
        }
    }

    /// Events dropped because this subscriber did not read them in time.
    pub fn dropped(&self) -> u64 {
        self.queue.dropped.load(Ordering::Relaxed)
    }
}

/// [`Hub`] as a bus.
pub(crate) struct HubBus {
    pub(crate) hub: Hub,
    pub(crate) topics: Arc<Vec<RankTopics>>,
    pub(crate) counters: Arc<BusCounters>,
}

impl HubBus {
    fn publish(&self, batch: &Batch) {
        self.counters.note_sent(batch);
        let mut subscribers = lock(&self.hub.subscribers);
        let mut alive = 0;
        subscribers.retain(|subscriber| {
            let Some(queue) = subscriber.upgrade() else {
                return false;
            };
            alive += 1;
            let mut events = lock(&queue.events);
            for record in &batch.records {
                let topics = &self.topics[record.rank as usize];
                let topic = match batch.kind {
                    EventKind::Fpm => &topics.fpm,
                    EventKind::Kv => &topics.kv,
                };
                let payload = batch.payload(record);
                events.1 += payload.len();
                events.0.push_back(Event {
                    topic: Bytes::copy_from_slice(topic.subject.as_bytes()),
                    sequence: Some(record.sequence),
                    payload,
                });
            }
            let mut dropped = 0;
            while events.1 > queue.bytes_max {
                let oldest = events.0.pop_front().expect("bytes are of events");
                events.1 -= oldest.payload.len();
                dropped += 1;
            }
            drop(events);
            add(&queue.dropped, dropped);
            add(&self.counters.subscriber_dropped, dropped);
            queue.bell.notify_one();
            true
        });
        self.counters.subscribers.store(alive, Ordering::Relaxed);
    }
}

impl Bus for HubBus {
    fn send<'a>(&'a mut self, batch: &'a Batch) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        self.publish(batch);
        Box::pin(std::future::ready(()))
    }

    fn close<'a>(&'a mut self) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(std::future::ready(()))
    }
}
