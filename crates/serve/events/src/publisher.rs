//! Publishers of engine threads, and the thread that passes events to the bus.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::width::{to_u16, to_usize};
use slipstream_base::{BlockHash, ForwardPassMetrics, KvDelta, KvOp, RankId, WorkerId};
use slipstream_config::cluster::{Cluster, EventBus, EventsConfig};
use slipstream_planes::EventSink;
use tokio::sync::Notify;

use crate::batch::{RankTopics, ThreadQueue, Topic};
use crate::bus::{Bus, BusCounters, Hub, HubBus, NatsError, add};
use crate::fpm::{FpmMessage, write_fpm};
use crate::kv::KvChanges;
use crate::metrics::{EventCounts, FAMILIES};
#[cfg(feature = "nats")]
use crate::nats::NatsBus;
use crate::zmq::{BindError, Listeners, ZmqAddresses, ZmqBus};
use slipstream_metrics::Collector;

/// Time for the bus to send the rest at shutdown.
const DRAIN: Duration = Duration::from_secs(2);

/// Limit of changes or tokens per KV batch: NATS accepts messages of 1 MiB by default. A change
/// takes up to 206 bytes, a token up to 5.
const BATCH_OPS_MAX: usize = 2048;
const BATCH_TOKENS_MAX: usize = 64 << 10;

/// Minimum interval between snapshot requests after dropped events, per thread.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);

/// Parameters of publishers besides the cluster file.
#[derive(Clone, Debug)]
pub struct PlaneOptions {
    /// Every rank of this process, with the offset of its ZeroMQ ports from those of the cluster
    /// file: its index among the cluster's ranks, so that processes of one cluster file use
    /// different ports.
    pub ranks: Vec<(RankId, usize)>,
    /// Number of engine threads, and so of publishers.
    pub threads: usize,
    /// Tokens per block.
    pub block_size: u32,
    /// Root of block chains without a salt of their own.
    pub root: BlockHash,
    /// Benchmark mode: build every message from owned fields in a new buffer, and format every
    /// subject again.
    pub fresh_buffers: bool,
}

impl PlaneOptions {
    /// Options of the workers of `cluster` for which `runs` is true. Workers are numbered over all pools in file order.
    pub fn of_cluster(
        cluster: &Cluster,
        runs: impl Fn(WorkerId) -> bool,
        threads: usize,
    ) -> PlaneOptions {
        let mut ranks = Vec::new();
        let (mut number, mut offset) = (0, 0);
        for pool in &cluster.pools {
            for _ in 0..pool.workers {
                let worker = WorkerId(number);
                for dp_rank in 0..to_u16(pool.engine.data_parallel_size) {
                    if runs(worker) {
                        ranks.push((RankId { worker, dp_rank }, offset));
                    }
                    offset += 1;
                }
                number += 1;
            }
        }
        PlaneOptions {
            ranks,
            threads,
            // One router, one block size: checked when the cluster file is read.
            block_size: cluster.pools[0].engine.block_size,
            root: BlockHash::root(&cluster.model.name, "", ""),
            fresh_buffers: false,
        }
    }
}

/// Why events cannot be published. Nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    /// A ZeroMQ address cannot be listened on.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// NATS cannot be used.
    #[error(transparent)]
    Nats(#[from] NatsError),
    /// A rank's name is not a valid subject.
    #[error(
        "`{subject}` is not a NATS subject; use letters, digits, `-` and `_` in live.events.subject_prefix"
    )]
    Subject {
        /// The rejected subject.
        subject: String,
    },
    /// The thread or its runtime could not be started.
    #[error("the event thread does not start")]
    Thread(#[source] io::Error),
}

/// The event plane of a process: one thread that passes events of engine threads to the bus.
/// Dropping it sends the rest, within two seconds.
pub struct EventPlane {
    shared: Arc<Shared>,
    hub: Hub,
    addresses: ZmqAddresses,
    join: Option<JoinHandle<()>>,
}

impl fmt::Debug for EventPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventPlane")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

pub(crate) struct Shared {
    pub(crate) queues: Vec<Arc<ThreadQueue>>,
    pub(crate) counters: Arc<BusCounters>,
    bell: Arc<Notify>,
    /// Signals the end, once.
    stopping: Notify,
    snapshots: OnceLock<SnapshotRequest>,
}

type SnapshotRequest = Box<dyn Fn(RankId) + Send + Sync>;

impl EventPlane {
    /// Starts the configured bus, with one publisher per engine thread. `None` if no bus is
    /// configured.
    ///
    /// # Errors
    /// [`PlaneError`].
    pub fn start(
        config: &EventsConfig,
        options: &PlaneOptions,
    ) -> Result<Option<(EventPlane, Vec<EventPublisher>)>, PlaneError> {
        if config.bus == EventBus::None {
            return Ok(None);
        }
        let ranks: Vec<RankId> = options.ranks.iter().map(|&(rank, _)| rank).collect();
        let topics = Arc::new(topics(config, &ranks)?);
        let bell = Arc::new(Notify::new());
        let queue = || {
            let bytes_max = to_usize(config.queue_bytes_max);
            Arc::new(ThreadQueue::new(bytes_max, Arc::clone(&bell)))
        };
        let shared = Arc::new(Shared {
            queues: (0..options.threads).map(|_| queue()).collect(),
            counters: Arc::default(),
            bell,
            stopping: Notify::new(),
            snapshots: OnceLock::new(),
        });
        let listeners = match config.bus {
            EventBus::Zmq => {
                let offsets: Vec<usize> = options.ranks.iter().map(|&(_, at)| at).collect();
                Some(Listeners::bind(config, &offsets)?)
            }
            _ => None,
        };
        let addresses = listeners.as_ref().map(Listeners::addresses);
        let hub = Hub::default();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(PlaneError::Thread)?;
        let sender = BatchSender {
            config: config.clone(),
            #[cfg(feature = "nats")]
            fresh: options.fresh_buffers,
            topics: Arc::clone(&topics),
            shared: Arc::clone(&shared),
            hub: hub.clone(),
        };
        let (started, starts) = std::sync::mpsc::channel();
        let join = std::thread::Builder::new()
            .name("events".into())
            .spawn(move || {
                let local = tokio::task::LocalSet::new();
                local.block_on(&runtime, sender.run(listeners, &started));
            })
            .map_err(PlaneError::Thread)?;
        match starts.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(PlaneError::Thread(io::Error::other("it died"))),
        }
        let publishers = shared
            .queues
            .iter()
            .map(|queue| EventPublisher::new(config, options, queue, &topics, &shared))
            .collect();
        let plane = EventPlane {
            shared,
            hub,
            addresses: addresses.unwrap_or_default(),
            join: Some(join),
        };
        Ok(Some((plane, publishers)))
    }

    /// ZeroMQ's endpoints; empty on other buses.
    pub fn addresses(&self) -> &ZmqAddresses {
        &self.addresses
    }

    /// The bus inside the process; without events on other buses.
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    /// Its counters.
    pub fn counts(&self) -> EventCounts {
        EventCounts(Arc::clone(&self.shared))
    }

    /// Its metrics for `/metrics`.
    pub fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(self.counts(), EventCounts::clone, FAMILIES)
    }

    /// Sets the function that requests a snapshot of a rank's cache after its KV events were
    /// dropped, so that subscribers can recover. Without it they only see the gap in the sequence.
    pub fn on_lost_kv(&self, request: impl Fn(RankId) + Send + Sync + 'static) {
        // The first call wins.
        let _ = self.shared.snapshots.set(Box::new(request));
    }

    fn stop(&mut self) {
        self.shared.stopping.notify_one();
        if let Some(join) = self.join.take()
            && join.join().is_err()
        {
            tracing::error!("the event thread died; events were lost");
        }
        let [(_, fpm), (_, kv)] = self.counts().queues();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        let (subscribers, refused) = (load(&counters.subscriber_dropped), load(&counters.refused));
        if fpm + kv + subscribers + refused > 0 {
            tracing::warn!(
                fpm,
                kv,
                subscribers,
                refused,
                "events were dropped: metrics and KV batches in full queues, for slow subscribers, and refused by the bus"
            );
        }
    }
}

impl Drop for EventPlane {
    fn drop(&mut self) {
        self.stop();
    }
}

fn topics(config: &EventsConfig, ranks: &[RankId]) -> Result<Vec<RankTopics>, PlaneError> {
    let prefix = &config.subject_prefix;
    let topic = |kind: &str, rank: RankId, topic: Option<&str>| {
        let subject = format!("{prefix}.{kind}.{}.{}", rank.worker, rank.dp_rank);
        let wire = topic.unwrap_or(&subject).as_bytes();
        Topic::new(&subject, wire).map_err(|_| PlaneError::Subject {
            subject: subject.clone(),
        })
    };
    ranks
        .iter()
        .map(|&rank| {
            Ok(RankTopics {
                rank,
                worker_id: rank.worker.to_string(),
                fpm: topic("fpm", rank, None)?,
                kv: topic("kv", rank, Some(&config.kv_topic))?,
            })
        })
        .collect()
}

/// Passes batches from queues to the bus, on the event thread.
struct BatchSender {
    config: EventsConfig,
    #[cfg(feature = "nats")]
    fresh: bool,
    topics: Arc<Vec<RankTopics>>,
    shared: Arc<Shared>,
    hub: Hub,
}

impl BatchSender {
    async fn run(
        self,
        listeners: Option<Listeners>,
        started: &std::sync::mpsc::Sender<Result<(), PlaneError>>,
    ) {
        let mut bus = match self.open(listeners).await {
            Ok(bus) => bus,
            Err(error) => {
                let _ = started.send(Err(error)); // `start` waits for it
                return;
            }
        };
        let _ = started.send(Ok(()));
        let interval = Duration::from_secs_f64(self.config.interval_ms / 1e3);
        loop {
            tokio::select! {
                () = self.shared.bell.notified() => {}
                () = self.shared.stopping.notified() => break,
            }
            // Ends when the server returns, or when the process stops.
            tokio::select! {
                () = self.send_batches(&mut *bus) => {}
                () = self.shared.stopping.notified() => break,
            }
            // Events that arrived during the send leave together. There is no wait for more: the
            // first event after a pause was sent above.
            if !interval.is_zero() {
                tokio::select! {
                    () = tokio::time::sleep(interval) => {}
                    () = self.shared.stopping.notified() => break,
                }
            }
        }
        let rest = async {
            self.send_batches(&mut *bus).await;
            bus.close().await;
        };
        let in_time = tokio::time::timeout(DRAIN, rest).await;
        let mut left = 0;
        for lane in self.shared.queues.iter().flat_map(|queue| queue.lanes()) {
            while let Some(batch) = lane.take() {
                left += batch.records.len() as u64;
            }
        }
        add(&self.shared.counters.refused, left);
        if in_time.is_err() {
            tracing::warn!(
                left,
                "the event bus did not accept all events before shutdown"
            );
        }
    }

    async fn open(&self, listeners: Option<Listeners>) -> Result<Box<dyn Bus>, PlaneError> {
        let (topics, counters) = (Arc::clone(&self.topics), &self.shared.counters);
        match (self.config.bus, listeners) {
            (EventBus::Zmq, Some(listeners)) => {
                let bus = ZmqBus::start(listeners, &self.config, &topics, counters);
                Ok(Box::new(bus.map_err(PlaneError::Thread)?))
            }
            (EventBus::Nats, _) => self.open_nats().await,
            _ => Ok(Box::new(HubBus {
                hub: self.hub.clone(),
                topics,
                counters: Arc::clone(counters),
            })),
        }
    }

    #[cfg(feature = "nats")]
    async fn open_nats(&self) -> Result<Box<dyn Bus>, PlaneError> {
        let url = &self.config.nats_url;
        let bus = NatsBus::start(url, &self.topics, self.fresh, &self.shared.counters).await?;
        Ok(Box::new(bus))
    }

    #[cfg(not(feature = "nats"))]
    async fn open_nats(&self) -> Result<Box<dyn Bus>, PlaneError> {
        Err(NatsError::not_built(&self.config.nats_url).into())
    }

    /// Empties the queues, one batch of each in turn.
    async fn send_batches(&self, bus: &mut dyn Bus) {
        loop {
            let mut any = false;
            for queue in &self.shared.queues {
                for lane in queue.lanes() {
                    if let Some(batch) = lane.take() {
                        bus.send(&batch).await;
                        any = true;
                    }
                }
            }
            if !any {
                return;
            }
        }
    }
}

/// The publisher of one engine thread. Encodes on that thread, into batches whose memory is reused;
/// the event thread writes.
pub struct EventPublisher {
    queue: Arc<ThreadQueue>,
    shared: Arc<Shared>,
    topics: Arc<Vec<RankTopics>>,
    prefix: String,
    fpm: bool,
    kv: bool,
    fresh: bool,
    block_size: u32,
    root: BlockHash,
    /// Index of each rank in `topics`, by rank.
    places: Vec<(RankId, u32)>,
    /// The rank of the last event, because the next event is often of the same rank.
    last: Option<(RankId, u32)>,
    /// Number of the next KV batch, by index.
    kv_sequences: Vec<u64>,
    /// Whether events were queued since the last wake-up.
    pending: bool,
    /// Indexes of ranks whose events were dropped; with repeats.
    lost: Vec<u32>,
    /// Ranks that need a snapshot.
    to_resync: BTreeSet<RankId>,
    /// Ranks with a pending snapshot request.
    asked: BTreeSet<RankId>,
    resynced: Option<Instant>,
}

impl fmt::Debug for EventPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventPublisher").finish_non_exhaustive()
    }
}

impl EventPublisher {
    fn new(
        config: &EventsConfig,
        options: &PlaneOptions,
        queue: &Arc<ThreadQueue>,
        topics: &Arc<Vec<RankTopics>>,
        shared: &Arc<Shared>,
    ) -> EventPublisher {
        let ranks = options.ranks.iter().map(|&(rank, _)| rank);
        let mut places: Vec<(RankId, u32)> = ranks.zip(0..).collect();
        places.sort_unstable();
        EventPublisher {
            queue: Arc::clone(queue),
            shared: Arc::clone(shared),
            topics: Arc::clone(topics),
            prefix: config.subject_prefix.clone(),
            fpm: config.fpm,
            kv: config.kv,
            fresh: options.fresh_buffers,
            block_size: options.block_size,
            root: options.root,
            kv_sequences: vec![0; places.len()],
            places,
            last: None,
            pending: false,
            lost: Vec::new(),
            to_resync: BTreeSet::new(),
            asked: BTreeSet::new(),
            resynced: None,
        }
    }

    /// Index of `rank` in the process; `None` for a rank of another process.
    fn place(&mut self, rank: RankId) -> Option<u32> {
        match self.last {
            Some((last, place)) if last == rank => Some(place),
            _ => {
                let found = self.places.binary_search_by_key(&rank, |&(rank, _)| rank);
                self.last = Some(self.places[found.ok()?]);
                self.last.map(|(_, place)| place)
            }
        }
    }

    fn put_kv(&mut self, delta: &KvDelta, blocks: Option<&StoredBlocks>) {
        if !self.kv || delta.ops.is_empty() {
            return;
        }
        let Some(place) = self.place(delta.rank) else {
            return;
        };
        let ts = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |since| since.as_secs_f64());
        let (mut at, mut block) = (0, 0);
        while at < delta.ops.len() {
            let (end, next_block) = batch_end(&delta.ops, at, block, blocks);
            let changes = KvChanges {
                ts,
                dp_rank: delta.rank.dp_rank,
                block_size: self.block_size,
                ops: &delta.ops[at..end],
                blocks,
                first_block: block,
                root: self.root,
            };
            (at, block) = (end, next_block);
            let sequence = self.kv_sequences[place as usize];
            self.kv_sequences[place as usize] += 1;
            let topic = &self.topics[place as usize].kv;
            let lane = &self.queue.kv;
            if self.fresh {
                let payload = changes.to_batch().to_vec();
                let encode = |out: &mut Vec<u8>| out.extend_from_slice(&payload);
                lane.put(place, sequence, &topic.frame, encode, &mut self.lost);
            } else {
                let encode = |out: &mut Vec<u8>| changes.write(out);
                lane.put(place, sequence, &topic.frame, encode, &mut self.lost);
            }
        }
        self.pending = true;
        for place in self.lost.drain(..) {
            self.to_resync.insert(self.topics[place as usize].rank);
        }
    }

    /// Requests snapshots of ranks whose events were dropped, once the queue has space.
    fn resync(&mut self) {
        let Some(request) = self.shared.snapshots.get() else {
            return;
        };
        let lately = self
            .resynced
            .is_some_and(|at| at.elapsed() < SNAPSHOT_INTERVAL);
        if lately || !self.queue.kv.has_room() {
            return;
        }
        self.resynced = Some(Instant::now());
        for rank in std::mem::take(&mut self.to_resync) {
            self.asked.insert(rank);
            request(rank);
        }
    }
}

/// End of a batch that begins with `ops[at]`, and the number of the stored block after it.
fn batch_end(
    ops: &[KvOp],
    at: usize,
    block: usize,
    blocks: Option<&StoredBlocks>,
) -> (usize, usize) {
    let (mut end, mut next_block, mut tokens) = (at, block, 0);
    while end < ops.len() && end - at < BATCH_OPS_MAX && tokens < BATCH_TOKENS_MAX {
        if let KvOp::Stored { .. } = ops[end] {
            tokens += blocks.map_or(0, |blocks| blocks.tokens(next_block).len());
            next_block += 1;
        }
        end += 1;
    }
    (end, next_block)
}

impl EventSink for EventPublisher {
    fn on_kv(&mut self, delta: &KvDelta) {
        self.put_kv(delta, None);
    }

    fn wants_blocks(&self) -> bool {
        self.kv
    }

    fn on_kv_blocks(&mut self, delta: &KvDelta, blocks: &StoredBlocks) {
        self.put_kv(delta, Some(blocks));
    }

    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        // Snapshots are also made for routers that join or detected a gap of their own. Subscribers
        // here missed nothing then, and would lose the tokens that they have.
        if self.asked.remove(&snapshot.rank) {
            self.put_kv(snapshot, None);
        }
    }

    fn on_fpm(&mut self, metrics: &ForwardPassMetrics) {
        if !self.fpm {
            return;
        }
        let Some(place) = self.place(metrics.rank) else {
            return;
        };
        let topics = &self.topics[place as usize];
        let lane = &self.queue.fpm;
        let sequence = metrics.counter;
        if self.fresh {
            let rank = metrics.rank;
            let worker_id = rank.worker.to_string();
            let subject = format!("{}.fpm.{worker_id}.{}", self.prefix, rank.dp_rank);
            let topic = Topic::new(&subject, subject.as_bytes()).expect("it was valid before");
            let payload = FpmMessage::new(&worker_id, metrics).to_vec();
            let encode = |out: &mut Vec<u8>| out.extend_from_slice(&payload);
            lane.put(place, sequence, &topic.frame, encode, &mut self.lost);
        } else {
            let encode = |out: &mut Vec<u8>| write_fpm(out, &topics.worker_id, metrics);
            lane.put(place, sequence, &topics.fpm.frame, encode, &mut self.lost);
        }
        self.lost.clear(); // visible as a gap in the counter
        self.pending = true;
    }

    fn flush(&mut self) {
        if !self.to_resync.is_empty() {
            self.resync();
        }
        if std::mem::take(&mut self.pending) {
            self.queue.bell.notify_one();
        }
    }
}
