//! The work of a store's threads.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use slipstream_base::sync::{lock, unpoisoned};
use slipstream_base::width::to_u32;

use super::LoadEnd;
use super::keys::KeyLedger;
use super::links::PeerLinks;
use super::sizes::BlockSizes;
use crate::clock;
use crate::region::Region;
use crate::tier::memory::MemoryTier;
use crate::tier::{Medium, Tier, TierError};
use crate::transport::{BlockTransport, Completion, Fetch, TransferId};

/// Files of dropped blocks removed per turn of the housekeeper.
const SWEEP_MAX: usize = 64;
/// Interval at which the housekeeper drops expired blocks and publishes changes.
const HOUSEKEEPING: Duration = Duration::from_millis(20);
/// Interval at which completed fetches are polled, and the interval while there are none.
const POLL: Duration = Duration::from_micros(50);
const POLL_IDLE: Duration = Duration::from_millis(2);
/// Maximum number of blocks queued for lower tiers; those beyond stay in memory only, and are
/// counted.
const WRITES_MAX: usize = 4_096;
/// Blocks that expire per turn.
const EXPIRE_MAX: usize = 1_024;
/// Time that a closed store waits for fetches to end, which takes one turn of the transport's
/// thread. Shorter than the delay before a peer is tried again.
const LAST_FETCHES: Duration = Duration::from_millis(250);

/// A load of blocks, back to back, into `into`.
pub(super) struct Load {
    pub(super) job: u64,
    pub(super) keys: Vec<Box<[u8]>>,
    /// For each key, the peer that holds it; empty: this store.
    pub(super) sources: Vec<String>,
    /// Where in `into` each block begins, and where the last one ends.
    pub(super) offsets: Vec<usize>,
    pub(super) into: Arc<Region>,
    pub(super) deadline: Instant,
}

impl Load {
    /// The offset and length of a block.
    fn span(&self, at: usize) -> (usize, usize) {
        (self.offsets[at], self.offsets[at + 1] - self.offsets[at])
    }
}

/// A load that waits for peers.
struct Pending {
    /// Fetches that have not ended.
    fetches: usize,
    failed: Vec<u32>,
    reason: &'static str,
    into: Arc<Region>,
}

/// Loads that wait for peers, by their numbers. For each fetch, its load and the indexes of its
/// blocks.
#[derive(Default)]
struct Fetching {
    loads: HashMap<u64, Pending>,
    fetches: HashMap<TransferId, (u64, Vec<u32>)>,
}

/// State that callers and threads share.
pub(super) struct Shared {
    pub(super) sizes: BlockSizes,
    keys_max: usize,
    pub(super) memory: Arc<MemoryTier>,
    /// Emptied when the store is closed, so that another may use their folders.
    pub(super) lower: Mutex<Vec<Arc<dyn Tier>>>,
    /// The media of the tiers, memory first.
    pub(super) media: Vec<Medium>,
    /// Emptied when the store is closed.
    links: Mutex<Option<Arc<PeerLinks>>>,
    fetching: Mutex<Fetching>,
    pub(super) keys: Mutex<KeyLedger>,
    resend: AtomicBool,
    loads: Mutex<VecDeque<Load>>,
    loads_ready: Condvar,
    writes: Mutex<VecDeque<Box<[u8]>>>,
    writes_ready: Condvar,
    pub(super) ended: Mutex<VecDeque<LoadEnd>>,
    pub(super) ended_ready: Condvar,
    /// Counts resets: a block that was pinned or read before one is not stored after it.
    resets: AtomicU64,
    /// Lower tiers and peers are no longer used.
    is_detached: AtomicBool,
    /// Once `stop` is set, writers write queued blocks until then.
    drain_until: Mutex<Option<Instant>>,
    /// Fetches are in flight.
    poll_soon: AtomicBool,
    /// The thread that polls for their end.
    poller: OnceLock<Thread>,
    stop: AtomicBool,
    /// A lower tier has refused the last block.
    refused: AtomicBool,
    pub(super) writes_dropped: AtomicU64,
    /// The key ledger's count, which is read without its lock.
    pub(super) unpublished: Arc<AtomicU64>,
    pub(super) put_failed: AtomicU64,
}

impl Shared {
    pub(super) fn new(
        sizes: BlockSizes,
        memory: Arc<MemoryTier>,
        lower: Vec<Arc<dyn Tier>>,
        links: Option<Arc<PeerLinks>>,
        keys_max: usize,
        publish_tiers: bool,
    ) -> Shared {
        let unpublished = Arc::new(AtomicU64::new(0));
        let blocks = memory.arena().len() / memory.block_bytes();
        let counted = Arc::clone(&unpublished);
        let keys = KeyLedger::new(blocks, 1 + lower.len(), publish_tiers, counted);
        let below = lower.iter().map(|tier| tier.medium());
        Shared {
            sizes,
            keys_max,
            media: std::iter::once(memory.medium()).chain(below).collect(),
            memory,
            lower: Mutex::new(lower),
            links: Mutex::new(links),
            fetching: Mutex::default(),
            keys: Mutex::new(keys),
            resend: AtomicBool::new(false),
            loads: Mutex::default(),
            loads_ready: Condvar::new(),
            writes: Mutex::default(),
            writes_ready: Condvar::new(),
            ended: Mutex::default(),
            ended_ready: Condvar::new(),
            resets: AtomicU64::new(0),
            is_detached: AtomicBool::new(false),
            drain_until: Mutex::new(None),
            poll_soon: AtomicBool::new(false),
            poller: OnceLock::new(),
            stop: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            writes_dropped: AtomicU64::new(0),
            unpublished,
            put_failed: AtomicU64::new(0),
        }
    }

    pub(super) fn lower(&self) -> Vec<Arc<dyn Tier>> {
        lock(&self.lower).clone()
    }

    pub(super) fn links(&self) -> Option<Arc<PeerLinks>> {
        lock(&self.links).clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn request_snapshot(&self) {
        self.resend.store(true, Ordering::Release);
    }

    /// Stores blocks in memory. Returns how many it now holds, and the last failure.
    pub(super) fn put(
        &self,
        epoch: u64,
        keys: &[Box<[u8]>],
        offsets: &[usize],
        data: &[u8],
    ) -> (usize, Option<TierError>) {
        let (mut held_blocks, mut failure) = (0, None);
        for (key, offset) in keys.iter().zip(offsets.windows(2)) {
            let block = &data[offset[0]..offset[1]];
            match self.memory.put_in(epoch, clock::now(), key, block) {
                Ok(_) => held_blocks += 1,
                Err(error) => {
                    self.put_failed.fetch_add(1, Ordering::Relaxed);
                    failure = Some(error);
                }
            }
        }
        (held_blocks, failure)
    }

    /// Queues blocks for lower tiers, unless memory was cleared since `epoch`.
    pub(super) fn queue_writes(&self, epoch: u64, keys: Vec<Box<[u8]>>) {
        if lock(&self.lower).is_empty() || self.memory.epoch() != epoch {
            return;
        }
        let mut writes = lock(&self.writes);
        let room = WRITES_MAX.saturating_sub(writes.len());
        let dropped = keys.len().saturating_sub(room) as u64;
        self.writes_dropped.fetch_add(dropped, Ordering::Relaxed);
        writes.extend(keys.into_iter().take(room));
        self.writes_ready.notify_all();
    }

    pub(super) fn begin(&self, load: Load) {
        let mut loads = lock(&self.loads);
        // Under the lock: `begin_close` drains the queue once, after it has set `stop`.
        if self.is_closed() {
            drop(loads);
            self.end_closed(load);
            return;
        }
        loads.push_back(load);
        self.loads_ready.notify_one();
    }

    /// Fails all later loads, and ends writers at `until`.
    pub(super) fn begin_close(&self, until: Instant) {
        lock(&self.drain_until).get_or_insert(until);
        self.stop.store(true, Ordering::Release);
        // Under each lock, so that no thread misses `stop` between its check and its wait.
        for load in lock(&self.loads).drain(..) {
            self.end_closed(load);
        }
        self.loads_ready.notify_all();
        drop(lock(&self.writes));
        self.writes_ready.notify_all();
    }

    fn end_closed(&self, load: Load) {
        let all = (0..to_u32(load.keys.len())).collect();
        self.end(load.job, all, "closed", load.into);
    }

    pub(super) fn reset(&self) {
        self.resets.fetch_add(1, Ordering::AcqRel);
        lock(&self.writes).clear();
        // Lower tiers first, so that memory cannot take a block read from them before the reset.
        for tier in self.lower() {
            tier.clear();
        }
        self.memory.clear();
    }

    pub(super) fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Acquire)
    }

    /// Drops the lower tiers, and returns them; `None` if already detached.
    pub(super) fn detach(&self) -> Option<Vec<Arc<dyn Tier>>> {
        if self.is_detached.swap(true, Ordering::AcqRel) {
            self.reset();
            return None;
        }
        self.resets.fetch_add(1, Ordering::AcqRel);
        // Peers may still know keys of earlier blocks, and must not receive new blocks under them.
        if let Some(links) = self.links() {
            links.endpoint.stop_serving();
        }
        let lower = std::mem::take(&mut *lock(&self.lower));
        self.drop_writes();
        self.memory.clear();
        Some(lower)
    }

    /// Publishes that the lower tiers hold nothing.
    pub(super) fn forget_lower(&self) {
        let mut keys = lock(&self.keys);
        (1..self.media.len()).for_each(|tier| keys.clear_tier(tier));
    }

    /// Waits for a load; `None` when the store is closed.
    fn next_load(&self) -> Option<Load> {
        let mut loads = lock(&self.loads);
        loop {
            if self.is_closed() {
                return None;
            }
            if let Some(load) = loads.pop_front() {
                return Some(load);
            }
            loads = unpoisoned(self.loads_ready.wait(loads));
        }
    }

    fn end(&self, job: u64, failed: Vec<u32>, reason: &'static str, into: Arc<Region>) {
        lock(&self.ended).push_back(LoadEnd {
            job,
            failed,
            reason,
            into,
        });
        self.ended_ready.notify_one();
    }

    /// Waits for a key to write. When the store is closed: `None` once all are written, or at the
    /// time limit.
    fn next_write(&self) -> Option<Box<[u8]>> {
        let mut queue = lock(&self.writes);
        loop {
            if self.is_closed() {
                let until = *lock(&self.drain_until);
                let has_time = until.is_some_and(|until| Instant::now() < until);
                return if has_time { queue.pop_front() } else { None };
            }
            if let Some(key) = queue.pop_front() {
                return Some(key);
            }
            queue = unpoisoned(self.writes_ready.wait(queue));
        }
    }

    pub(super) fn read(&self) {
        while let Some(load) = self.next_load() {
            self.read_load(load);
        }
    }

    fn read_load(&self, load: Load) {
        let (mut failed, mut reason) = (Vec::new(), "");
        let mut remote: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for (at, key) in load.keys.iter().enumerate() {
            let closed = self.stop.load(Ordering::Relaxed);
            if closed || Instant::now() >= load.deadline {
                failed.push(to_u32(at));
                reason = if closed { "closed" } else { "deadline" };
                continue;
            }
            let (begin, len) = load.span(at);
            let lease = load.into.lease(begin, len);
            // The block may have been stored here since the peer was chosen.
            if lease.is_ok_and(|mut out| self.read_block(key, out.bytes_mut())) {
                continue;
            }
            match &load.sources[at][..] {
                "" => {
                    failed.push(to_u32(at));
                    reason = "absent";
                }
                peer => remote.entry(peer).or_default().push(to_u32(at)),
            }
        }
        let links = if remote.is_empty() {
            None
        } else {
            self.links()
        };
        // Locked during submission, so that no fetch ends before it is recorded.
        let mut fetching = lock(&self.fetching);
        let mut fetches = 0;
        for (peer, indexes) in remote {
            let submitted = links
                .as_ref()
                .and_then(|links| submit(links, peer, &load, &indexes));
            if let Some(transfer) = submitted {
                fetching.fetches.insert(transfer, (load.job, indexes));
                fetches += 1;
            } else {
                reason = "lost";
                failed.extend(indexes);
            }
        }
        if fetches == 0 {
            drop(fetching);
            self.end(load.job, failed, reason, load.into);
            return;
        }
        let pending = Pending {
            fetches,
            failed,
            reason,
            into: load.into,
        };
        fetching.loads.insert(load.job, pending);
        drop(fetching);
        self.poll_soon.store(true, Ordering::Release);
        if let Some(poller) = self.poller.get() {
            poller.unpark();
        }
    }

    /// Keeps the connections up, and ends loads whose last fetch has ended.
    pub(super) fn poll_peers(&self) {
        let _ = self.poller.set(std::thread::current());
        while !self.is_closed() {
            let Some(links) = self.links() else { return };
            let busy = links.poll(|done| self.on_fetched(&done));
            // Not held while parked, so that `drop_links` can end the transport.
            drop(links);
            let waiting = self.poll_soon.load(Ordering::Acquire);
            if waiting && lock(&self.fetching).loads.is_empty() {
                self.poll_soon.store(false, Ordering::Release);
            }
            if !busy {
                std::thread::park_timeout(if waiting { POLL } else { POLL_IDLE });
            }
        }
    }

    fn on_fetched(&self, done: &Completion) {
        let mut fetching = lock(&self.fetching);
        let Some((job, indexes)) = fetching.fetches.remove(&done.transfer) else {
            return;
        };
        let Some(pending) = fetching.loads.get_mut(&job) else {
            return;
        };
        let closed = self.is_closed();
        for &(at, error) in &done.failed {
            pending.reason = if closed { "closed" } else { error.name() };
            pending.failed.push(indexes[at as usize]);
        }
        pending.fetches -= 1;
        if pending.fetches == 0
            && let Some(pending) = fetching.loads.remove(&job)
        {
            drop(fetching);
            self.end(job, pending.failed, pending.reason, pending.into);
        }
    }

    /// Reads a block from the first tier that has it.
    fn read_block(&self, key: &[u8], out: &mut [u8]) -> bool {
        let now = clock::now();
        match self.memory.get(now, key, out) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => warn_recomputed(&error),
        }
        let epoch = self.memory.epoch();
        for tier in self.lower() {
            match tier.get(now, key, out) {
                Ok(true) => {
                    // A block that was read is likely to be read again. If memory has no room, it
                    // stays in the lower tier.
                    let _ = self.memory.put_in(epoch, now, key, out);
                    return true;
                }
                Ok(false) => {}
                Err(error) => warn_recomputed(&error),
            }
        }
        false
    }

    pub(super) fn write(&self) {
        while let Some(key) = self.next_write() {
            let resets = self.resets.load(Ordering::Acquire);
            let lower = self.lower(); // empty if detached, which counted the queue
            let epochs: Vec<u64> = lower.iter().map(|tier| tier.epoch()).collect();
            if lower.is_empty() {
                continue;
            }
            let now = clock::now();
            let Some(block) = self.memory.pin(now, &key) else {
                // Evicted before its write: lower tiers are too slow for memory's size.
                self.writes_dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            if self.resets.load(Ordering::Acquire) != resets {
                continue; // the block may be from before the reset
            }
            for (tier, epoch) in lower.iter().zip(epochs) {
                self.report_write(&tier.put_in(epoch, now, &key, block.bytes()));
            }
        }
    }

    /// Logs a failure once, not for each block; the tier counts them.
    fn report_write(&self, written: &Result<bool, TierError>) {
        match written {
            Ok(_) if self.refused.swap(false, Ordering::AcqRel) => {
                tracing::warn!("blocks are written to disk again");
            }
            Err(error) if !self.refused.swap(true, Ordering::AcqRel) => {
                let text = with_source(error);
                tracing::warn!("blocks are in memory only, not on disk: {text}");
            }
            _ => {}
        }
    }

    /// Empties the queue of writes, and counts them as dropped.
    pub(super) fn drop_writes(&self) -> usize {
        let dropped = std::mem::take(&mut *lock(&self.writes));
        self.writes_dropped
            .fetch_add(dropped.len() as u64, Ordering::Relaxed);
        dropped.len()
    }

    /// Ends the connections to peers; loads that wait for them fail.
    pub(super) fn drop_links(&self, reason: &'static str) {
        let links = lock(&self.links).take();
        if let Some(links) = &links {
            // Fetches end with their connections, and report the blocks that arrived before.
            links.disconnect();
            let end = Instant::now() + LAST_FETCHES;
            while !lock(&self.fetching).fetches.is_empty() && Instant::now() < end {
                if !links.poll(|done| self.on_fetched(&done)) {
                    std::thread::park_timeout(POLL);
                }
            }
        }
        // Ends the transport's thread; no buffer is written afterwards.
        drop(links);
        let mut fetching = lock(&self.fetching);
        let Fetching { loads, fetches } = &mut *fetching;
        for (_, (job, indexes)) in fetches.drain() {
            if let Some(pending) = loads.get_mut(&job) {
                pending.failed.extend(indexes);
                pending.reason = reason;
            }
        }
        for (job, pending) in loads.drain() {
            self.end(job, pending.failed, pending.reason, pending.into);
        }
    }

    pub(super) fn housekeep(&self) {
        while !self.is_closed() {
            std::thread::park_timeout(HOUSEKEEPING);
            self.memory.expire(clock::now(), EXPIRE_MAX);
            for tier in self.lower() {
                tier.expire(clock::now(), EXPIRE_MAX);
                tier.sweep(SWEEP_MAX);
            }
            self.publish_keys();
        }
    }

    /// Turns changes in the tiers into messages.
    pub(super) fn publish_keys(&self) {
        let lower = self.lower();
        let mut keys = lock(&self.keys);
        keys.update(0, &*self.memory);
        for (index, tier) in (1..).zip(&lower) {
            keys.update(index, &**tier);
        }
        if let Some(links) = self.links() {
            let (endpoint, served) = (&links.endpoint, &mut keys.served);
            if endpoint.take_snapshot_wanted() {
                served.set_consumed(true);
                served.request_snapshot();
            }
            // If the transport's queue is full, it requests a snapshot later.
            while served
                .message(self.keys_max)
                .is_some_and(|message| endpoint.publish(message))
            {}
        }
        let resend = self.resend.swap(false, Ordering::AcqRel);
        keys.write_messages(self.keys_max, resend);
    }
}

/// Starts to fetch blocks of a load from a peer; `None` if it is not connected or its queue is
/// full.
fn submit(links: &PeerLinks, peer: &str, load: &Load, indexes: &[u32]) -> Option<TransferId> {
    let blocks: Vec<Fetch<'_>> = indexes
        .iter()
        .map(|&at| {
            let (begin, len) = load.span(at as usize);
            Fetch {
                key: &load.keys[at as usize],
                at: begin,
                len,
            }
        })
        .collect();
    let left = load.deadline.saturating_duration_since(Instant::now());
    let peer = links.peer(peer)?;
    links.endpoint.fetch(peer, &load.into, &blocks, left).ok()
}

fn warn_recomputed(error: &TierError) {
    tracing::warn!("a block will be recomputed: {}", with_source(error));
}

/// An error with its source.
fn with_source(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error} ({source})"),
        None => error.to_string(),
    }
}
