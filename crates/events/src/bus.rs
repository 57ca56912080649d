//! What a bus is, and the one inside the process.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::batch::{Batch, Kind, RankTopics};

/// Carries batches away. Lives on the event thread alone.
pub(crate) trait Bus {
    /// Takes a batch: sent, queued for those who listen within bounds, or counted as dropped.
    ///
    /// It may wait while the other side is away; meanwhile the queues before it fill and drop
    /// their oldest. Dropping the future gives the rest of the batch up.
    fn send<'a>(&'a mut self, batch: &'a Batch) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

    /// Waits until what was taken has left, as far as it can.
    fn close<'a>(&'a mut self) -> Pin<Box<dyn Future<Output = ()> + 'a>>;
}

/// What a bus counts. All of them only grow, but for `subscribers`.
#[derive(Debug, Default)]
pub struct BusCounters {
    /// Forward-pass metrics handed to the bus.
    pub fpm_sent: AtomicU64,
    /// KV batches handed to the bus.
    pub kv_sent: AtomicU64,
    /// Bytes of both.
    pub bytes_sent: AtomicU64,
    /// Events dropped for a subscriber that reads too slowly.
    pub subscriber_dropped: AtomicU64,
    /// Events that the bus refused (too large for it), or gave up at shutdown.
    pub refused: AtomicU64,
    /// Subscribers connected now. NATS: whether the server is (0 or 1).
    pub subscribers: AtomicU64,
    /// Connections lost.
    pub disconnects: AtomicU64,
    /// Peers that sent what no ZeroMQ peer should, or too much.
    pub bad_peers: AtomicU64,
    /// Connections that could not be accepted (too many descriptors or subscribers).
    pub accept_errors: AtomicU64,
    /// Requests for past KV events.
    pub replays: AtomicU64,
    /// Batches sent for them.
    pub replayed: AtomicU64,
    /// Requests that made no sense.
    pub bad_replays: AtomicU64,
}

impl BusCounters {
    pub(crate) fn note_sent(&self, batch: &Batch) {
        let sent = match batch.kind {
            Kind::Fpm => &self.fpm_sent,
            Kind::Kv => &self.kv_sent,
        };
        add(sent, batch.records.len() as u64);
        add(&self.bytes_sent, batch.wire().len() as u64);
    }
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// An event as a subscriber gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Subject or topic.
    pub topic: Bytes,
    /// Number among the events of its kind and rank, from 0; `None` where the bus does not tell.
    pub sequence: Option<u64>,
    /// MessagePack.
    pub payload: Bytes,
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one of these is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    /// A new subscriber for events from now on. What it does not read within `bytes_max` is
    /// dropped, the oldest first.
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
    /// The next event, if one is there.
    pub fn try_recv(&mut self) -> Option<Event> {
        let mut events = lock(&self.queue.events);
        let event = events.0.pop_front()?;
        events.1 -= event.payload.len();
        Some(event)
    }

    /// The next event, when it is there. Any runtime will do.
    pub async fn recv(&mut self) -> Event {
        loop {
            if let Some(event) = self.try_recv() {
                return event;
            }
            self.queue.bell.notified().await;
        }
    }

    /// Events dropped as this subscriber did not read them in time.
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
                    Kind::Fpm => &topics.fpm,
                    Kind::Kv => &topics.kv,
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
