//! The store of one rank: tiers, and the threads that move blocks between them and the caller's
//! buffers.
//!
//! ```text
//!   put ──► host tier, queue ──► writer threads ──► disk tier
//!   load ──► queue ──► reader threads: host tier, else disk tier ──► buffer ──► ended ──► wait
//!   housekeeper: what has expired, what changed in the tiers ──► messages ──► take_message
//! ```
//!
//! Blocks of peers are fetched into the caller's buffer by kvstore's transport; one more thread polls
//! for the end of fetches and keeps the connections up.
//!
//! The engine's thread calls `load`, `take_message`, `counters`, `request_snapshot`, `reset` and
//! `detach`, which take locks that are held for some hundred instructions only; `reset` also renames
//! a folder. `put`, `wait` and `close` are for threads that may wait.
//!
//! `resets` counts resets: a block that was pinned or read before one is not stored after it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::error::Error;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use slipstream_kvindex::{Change, KeySet};
use slipstream_kvstore::{
    Completion, DiskOptions, DiskTier, Fetch, MemoryOptions, MemoryTier, Nixl, NixlOptions, Region,
    Tier, TierChange, TierError, TransferId, Transport, clock,
};

use crate::keys::life;
use crate::lock;
use crate::meeting::attend;
use crate::peers::{Contacts, Links, Served, meeting, profile};

/// Threads that read for loads. Two, so that one slow disk read does not hold up host memory.
const READERS: usize = 2;
/// Threads that write to disk. One is bound by the latency of creating and renaming files.
const WRITERS: usize = 4;
/// Files of dropped blocks that are removed in one turn of the housekeeper.
const SWEEP_MAX: usize = 64;
/// How often a store that is closed looks whether its writers have ended, and how long it waits
/// beyond the limit for a write that has begun.
const WRITERS_POLL: Duration = Duration::from_millis(1);
const LAST_WRITE: Duration = Duration::from_secs(2);
/// How often the housekeeper looks for blocks whose time has come, and for changes.
const HOUSEKEEPING: Duration = Duration::from_millis(20);
/// How often the end of a fetch is looked for, and how often where none is under way.
const POLL: Duration = Duration::from_micros(50);
const POLL_IDLE: Duration = Duration::from_millis(2);
/// Blocks that may wait for the disk; those beyond are in host memory only, and counted.
const WRITES_MAX: usize = 4_096;
/// Messages about keys that may wait for the scheduler; then it gets a snapshot instead.
const MESSAGES_MAX: usize = 1_024;
/// Blocks that expire in one go.
const EXPIRE_MAX: usize = 1_024;
/// A store that is closed waits so long for fetches to be ended, which takes a turn of the
/// transport's thread; shorter than until a peer is tried again.
const LAST_FETCHES: Duration = Duration::from_millis(250);
/// Holders of a key, to its key set.
const HOST: u32 = 0;
const DISK: u32 = 1;
/// Names of the tiers by these numbers.
const TIERS: [&str; 2] = ["host", "disk"];

/// Memory of a Python object that lets others at its bytes.
pub(crate) struct Buffer {
    base: *mut u8,
    len: usize,
    /// Keeps the memory where it is.
    _owner: PyBuffer<u8>,
}

// SAFETY: the memory stays while the buffer object lives, whichever thread that is in; who may
// touch the bytes when is said where buffers are used.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(owner: PyBuffer<u8>, write: bool) -> PyResult<Buffer> {
        if !owner.is_c_contiguous() {
            return Err(PyValueError::new_err(
                "the buffer's bytes do not lie side by side",
            ));
        }
        if write && owner.readonly() {
            return Err(PyValueError::new_err("the buffer cannot be written to"));
        }
        Ok(Buffer {
            base: owner.buf_ptr().cast(),
            len: owner.len_bytes(),
            _owner: owner,
        })
    }

    /// # Safety
    ///
    /// Nobody writes to these bytes meanwhile.
    unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(at + len <= self.len, "inside the buffer");
        // SAFETY: inside the buffer, which lives as long as `self`; the caller's promise.
        unsafe { std::slice::from_raw_parts(self.base.add(at), len) }
    }

    fn into_region(self) -> Arc<Region> {
        let base = NonNull::new(self.base).unwrap_or(NonNull::dangling());
        // SAFETY: the buffer is the region's owner, and stays valid and initialized while it
        // lives; `slipstream.store.Store`: the caller touches it after the end of its load only.
        unsafe { Region::from_raw(base, self.len, Box::new(self)) }
    }
}

/// A load: one block after the other into `into`.
struct Load {
    job: u64,
    keys: Vec<Box<[u8]>>,
    /// For each key, the peer that is said to hold it; empty: this store.
    sources: Vec<String>,
    /// Where in `into` each block begins, and where the last one ends.
    places: Vec<usize>,
    into: Arc<Region>,
    deadline: Instant,
}

impl Load {
    /// Where a block goes: its first byte, and how many.
    fn place(&self, at: usize) -> (usize, usize) {
        (self.places[at], self.places[at + 1] - self.places[at])
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

/// Loads that wait for peers by their numbers, and which fetch is of which, with its places.
#[derive(Default)]
struct Fetching {
    loads: HashMap<u64, Pending>,
    fetches: HashMap<TransferId, (u64, Vec<u32>)>,
}

/// How a load ended.
struct Ended {
    job: u64,
    failed: Vec<u32>,
    reason: &'static str,
    /// Dropped by a thread of Python's, as dropping a Python object waits for the interpreter.
    _into: Arc<Region>,
}

/// What is held, told, and not told yet.
struct Books {
    keys: KeySet,
    /// What peers are told: the same keys, to other followers.
    served: KeySet,
    /// Keys by tier, where somebody asked for them.
    tiers: Option<[KeySet; 2]>,
    changes: Vec<TierChange>,
    messages: VecDeque<Vec<u8>>,
    /// The tier's number, and what changed in it.
    tier_messages: VecDeque<(u32, Vec<u8>)>,
    /// Changes of keys that no message can name.
    untold: Arc<AtomicU64>,
}

impl Books {
    /// What is told of is held by that tier no longer.
    fn forget(&mut self, holder: u32) {
        for keys in [&mut self.keys, &mut self.served] {
            let held: Vec<Box<[u8]>> = keys.iter().map(Into::into).collect();
            let _ = keys.apply(held.iter().map(|key| (&key[..], Change::Remove(holder))));
        }
        if let Some(tiers) = &mut self.tiers {
            tiers[holder as usize].clear();
        }
    }

    fn note(&mut self, holder: u32, change: &TierChange) {
        let (key, change) = match change {
            TierChange::Stored(key) => (key, Change::Add(holder)),
            TierChange::Removed(key) => (key, Change::Remove(holder)),
        };
        if let Err(error) = self.keys.change(key, change) {
            // A disk may hold keys of another length, of another hash function.
            if self.untold.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(
                    "a stored block is not told of: {error}; or give this engine a disk_dir of its own"
                );
            }
            return;
        }
        let _ = self.served.change(key, change);
        if let Some(tiers) = &mut self.tiers {
            let _ = tiers[holder as usize].change(key, change);
        }
    }
}

/// Bytes of a block, or of one of each group.
#[derive(FromPyObject)]
enum BlockBytes {
    One(usize),
    Groups(Vec<usize>),
}

/// Bytes of blocks by their groups, whose ids are the last four bytes of keys (`crate::groups`).
struct Sizes {
    groups: Vec<usize>,
    largest: usize,
}

impl Sizes {
    fn new(bytes: BlockBytes) -> PyResult<Sizes> {
        let groups = match bytes {
            BlockBytes::One(bytes) => vec![bytes],
            BlockBytes::Groups(groups) => groups,
        };
        match groups.iter().max() {
            Some(&largest) if !groups.contains(&0) => Ok(Sizes { groups, largest }),
            _ => Err(PyValueError::new_err("blocks without bytes")),
        }
    }

    /// Bytes of a key's block; `None` if there is no such group. Of one group alone nothing is
    /// asked of the key.
    fn of(&self, key: &[u8]) -> Option<usize> {
        if let &[only] = &self.groups[..] {
            return Some(only);
        }
        let group = u32::from_be_bytes(*key.last_chunk()?);
        self.groups.get(group as usize).copied()
    }

    /// Where each key's block begins, one after the other, and where the last one ends.
    fn places(&self, keys: &[Box<[u8]>]) -> PyResult<Vec<usize>> {
        let mut end = 0;
        let mut places = vec![0];
        for key in keys {
            end += self.of(key).ok_or_else(|| {
                PyValueError::new_err(format!(
                    "a key ends with {:?}, which is none of {} groups",
                    key.last_chunk::<4>(),
                    self.groups.len()
                ))
            })?;
            places.push(end);
        }
        Ok(places)
    }
}

struct Shared {
    sizes: Sizes,
    keys_max: usize,
    host: Arc<MemoryTier>,
    /// Taken when the store is closed, so that another may open the folder.
    disk: Mutex<Option<Arc<DiskTier>>>,
    /// Taken when the store is closed.
    links: Mutex<Option<Arc<Links>>>,
    fetching: Mutex<Fetching>,
    books: Mutex<Books>,
    resend: AtomicBool,
    loads: Mutex<VecDeque<Load>>,
    loads_came: Condvar,
    writes: Mutex<VecDeque<Box<[u8]>>>,
    writes_came: Condvar,
    ended: Mutex<VecDeque<Ended>>,
    ended_came: Condvar,
    /// Times that all blocks were dropped.
    resets: AtomicU64,
    /// Neither disk nor peers are used any more.
    is_detached: AtomicBool,
    /// Writers go on with what is queued until then, once `stop` is set.
    drain_until: Mutex<Option<Instant>>,
    /// Fetches are under way.
    poll_soon: AtomicBool,
    /// The thread that polls for their end.
    poller: OnceLock<Thread>,
    stop: AtomicBool,
    /// The disk has refused the last block.
    refused: AtomicBool,
    writes_dropped: AtomicU64,
    /// Of the books, to be read without their lock.
    untold: Arc<AtomicU64>,
    put_failed: AtomicU64,
}

impl Shared {
    fn disk(&self) -> Option<Arc<DiskTier>> {
        lock(&self.disk).clone()
    }

    /// Waits for something in `queue`; `None` at the end.
    fn next<T>(&self, queue: &Mutex<VecDeque<T>>, came: &Condvar) -> Option<T> {
        let mut queue = lock(queue);
        loop {
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            if let Some(item) = queue.pop_front() {
                return Some(item);
            }
            queue = came.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn links(&self) -> Option<Arc<Links>> {
        lock(&self.links).clone()
    }

    fn end(&self, job: u64, failed: Vec<u32>, reason: &'static str, into: Arc<Region>) {
        lock(&self.ended).push_back(Ended {
            job,
            failed,
            reason,
            _into: into,
        });
        self.ended_came.notify_one();
    }

    /// Waits for a key to write; `None` at the end, when all are written or there is no time left.
    fn next_write(&self) -> Option<Box<[u8]>> {
        let mut queue = lock(&self.writes);
        loop {
            if self.stop.load(Ordering::Acquire) {
                let until = *lock(&self.drain_until);
                let has_time = until.is_some_and(|until| Instant::now() < until);
                return if has_time { queue.pop_front() } else { None };
            }
            if let Some(key) = queue.pop_front() {
                return Some(key);
            }
            queue = self
                .writes_came
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read(&self) {
        while let Some(load) = self.next(&self.loads, &self.loads_came) {
            self.read_load(load);
        }
    }

    fn read_load(&self, load: Load) {
        let (mut failed, mut reason) = (Vec::new(), "");
        let mut away: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for (at, key) in load.keys.iter().enumerate() {
            let closed = self.stop.load(Ordering::Relaxed);
            if closed || Instant::now() >= load.deadline {
                failed.push(at as u32);
                reason = if closed { "closed" } else { "deadline" };
                continue;
            }
            let (begin, len) = load.place(at);
            let lease = load.into.lease(begin, len);
            // It may have come here since the peer was found.
            if lease.is_ok_and(|mut out| self.read_one(key, out.bytes_mut())) {
                continue;
            }
            match &load.sources[at][..] {
                "" => {
                    failed.push(at as u32);
                    reason = "absent";
                }
                peer => away.entry(peer).or_default().push(at as u32),
            }
        }
        let links = if away.is_empty() { None } else { self.links() };
        let mut fetching = lock(&self.fetching);
        let mut fetches = 0;
        for (peer, places) in away {
            let submitted = links.as_ref().and_then(|links| {
                let blocks: Vec<Fetch<'_>> = places
                    .iter()
                    .map(|&at| {
                        let (begin, len) = load.place(at as usize);
                        Fetch {
                            key: &load.keys[at as usize],
                            at: begin,
                            len,
                        }
                    })
                    .collect();
                let left = load.deadline.saturating_duration_since(Instant::now());
                links
                    .endpoint
                    .fetch(links.peer(peer)?, &load.into, &blocks, left)
                    .ok()
            });
            if let Some(transfer) = submitted {
                fetching.fetches.insert(transfer, (load.job, places));
                fetches += 1;
            } else {
                reason = "lost";
                failed.extend(places);
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
    fn poll_peers(&self) {
        let _ = self.poller.set(std::thread::current());
        while !self.stop.load(Ordering::Acquire) {
            let Some(links) = self.links() else { return };
            let busy = links.poll(|done| self.fetched(&done));
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

    fn fetched(&self, done: &Completion) {
        let mut fetching = lock(&self.fetching);
        let Some((job, places)) = fetching.fetches.remove(&done.transfer) else {
            return;
        };
        let Some(pending) = fetching.loads.get_mut(&job) else {
            return;
        };
        let closed = self.stop.load(Ordering::Acquire);
        for &(at, error) in &done.failed {
            pending.reason = if closed { "closed" } else { error.name() };
            pending.failed.push(places[at as usize]);
        }
        pending.fetches -= 1;
        if pending.fetches == 0
            && let Some(pending) = fetching.loads.remove(&job)
        {
            drop(fetching);
            self.end(job, pending.failed, pending.reason, pending.into);
        }
    }

    fn read_one(&self, key: &[u8], out: &mut [u8]) -> bool {
        let now = clock::now();
        match self.host.get(now, key, out) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => tracing_warn(&error),
        }
        let epoch = self.host.epoch();
        let Some(disk) = self.disk() else {
            return false;
        };
        match disk.get(now, key, out) {
            Ok(true) => {
                // Wanted once, wanted again. Where there is no room it stays on disk.
                let _ = self.host.put_in(epoch, now, key, out);
                true
            }
            Ok(false) => false,
            Err(error) => {
                tracing_warn(&error);
                false
            }
        }
    }

    fn write(&self) {
        while let Some(key) = self.next_write() {
            let resets = self.resets.load(Ordering::Acquire);
            let Some(disk) = self.disk() else {
                continue; // detached, which has counted what was queued
            };
            let (epoch, now) = (disk.epoch(), clock::now());
            let Some(block) = self.host.pin(now, &key) else {
                // The disk was slower than the host tier is large.
                self.writes_dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            if self.resets.load(Ordering::Acquire) != resets {
                continue; // which of both the block is of is not known
            }
            // A full disk is said once, not for each block; they are counted.
            match disk.put_in(epoch, now, &key, block.bytes()) {
                Ok(_) if self.refused.swap(false, Ordering::AcqRel) => {
                    tracing::warn!("blocks are written to disk again");
                }
                Err(error) if !self.refused.swap(true, Ordering::AcqRel) => {
                    let text = in_full(&error);
                    tracing::warn!("blocks are in memory only, not on disk: {text}");
                }
                _ => {}
            }
        }
    }

    /// Takes what waits for the disk off its queue, and counts it as dropped.
    fn drop_writes(&self) -> usize {
        let dropped = std::mem::take(&mut *lock(&self.writes));
        self.writes_dropped
            .fetch_add(dropped.len() as u64, Ordering::Relaxed);
        dropped.len()
    }

    /// Ends the connections to peers; loads that wait for them fail.
    fn drop_links(&self, reason: &'static str) {
        let links = lock(&self.links).take();
        if let Some(links) = &links {
            // Fetches end with their connections, and tell what had come until then.
            links.disconnect();
            let end = Instant::now() + LAST_FETCHES;
            while !lock(&self.fetching).fetches.is_empty() && Instant::now() < end {
                if !links.poll(|done| self.fetched(&done)) {
                    std::thread::park_timeout(POLL);
                }
            }
        }
        // Ends the transport's thread; nothing is written to any buffer from here on.
        drop(links);
        let mut fetching = lock(&self.fetching);
        let Fetching { loads, fetches } = &mut *fetching;
        for (_, (job, places)) in fetches.drain() {
            if let Some(pending) = loads.get_mut(&job) {
                pending.failed.extend(places);
                pending.reason = reason;
            }
        }
        for (job, pending) in loads.drain() {
            self.end(job, pending.failed, pending.reason, pending.into);
        }
    }

    fn keep_house(&self) {
        while !self.stop.load(Ordering::Acquire) {
            std::thread::park_timeout(HOUSEKEEPING);
            self.host.expire(clock::now(), EXPIRE_MAX);
            if let Some(disk) = self.disk() {
                disk.expire(clock::now(), EXPIRE_MAX);
                disk.sweep(SWEEP_MAX);
            }
            self.tell();
        }
    }

    /// Turns what changed in the tiers into messages.
    fn tell(&self) {
        let disk = self.disk();
        let mut books = lock(&self.books);
        let mut changes = std::mem::take(&mut books.changes);
        let tiers: [(u32, Option<&dyn Tier>); 2] = [
            (HOST, Some(&*self.host)),
            (DISK, disk.as_deref().map(|disk| disk as &dyn Tier)),
        ];
        for (holder, tier) in tiers {
            let Some(tier) = tier else { continue };
            if !tier.take_changes(&mut changes) {
                // Some were lost: what is held now, less what was said of this tier before.
                changes.clear();
                books.forget(holder);
                changes.extend(tier.keys().into_iter().map(TierChange::Stored));
            }
            for change in changes.drain(..) {
                books.note(holder, &change);
            }
        }
        let resend = self.resend.swap(false, Ordering::AcqRel);
        let Books {
            keys,
            served,
            tiers,
            messages,
            tier_messages,
            ..
        } = &mut *books;
        if let Some(links) = self.links() {
            if links.endpoint.take_snapshot_wanted() {
                served.set_consumed(true);
                served.request_snapshot();
            }
            // One that the transport cannot take makes it want a snapshot.
            while served
                .message(self.keys_max)
                .is_some_and(|m| links.endpoint.publish(m))
            {}
        }
        if resend {
            messages.clear();
            keys.request_snapshot();
        }
        while messages.len() < MESSAGES_MAX
            && let Some(message) = keys.message(self.keys_max)
        {
            messages.push_back(message);
        }
        if messages.len() == MESSAGES_MAX {
            // Nobody has asked for long; whoever asks next has to start over anyway.
            messages.clear();
            keys.request_snapshot();
        }
        let Some(tiers) = tiers else { return };
        if resend || tier_messages.len() >= MESSAGES_MAX {
            tier_messages.clear();
            tiers.iter_mut().for_each(KeySet::request_snapshot);
        }
        for (tier, keys) in (0..).zip(tiers) {
            while tier_messages.len() < MESSAGES_MAX
                && let Some(message) = keys.message(self.keys_max)
            {
                tier_messages.push_back((tier, message));
            }
        }
    }
}

fn tracing_warn(error: &TierError) {
    tracing::warn!("a block is computed again: {}", in_full(error));
}

/// What an error says, and what the system said to whoever met it.
pub(crate) fn in_full(error: &dyn Error) -> String {
    match error.source() {
        Some(source) => format!("{error} ({source})"),
        None => error.to_string(),
    }
}

fn to_python(error: TierError) -> PyErr {
    PyOSError::new_err(in_full(&error))
}

/// The store of one rank; see [`crate::store`] and `slipstream.store.Store`.
#[pyclass(module = "slipstream._native")]
pub(crate) struct Store {
    shared: Arc<Shared>,
    /// How long it may take to write what waits for the disk.
    close: Duration,
    threads: Mutex<Vec<JoinHandle<()>>>,
    writers: Mutex<Vec<JoinHandle<()>>>,
}

#[pymethods]
impl Store {
    /// `block_bytes` by group. `ttl_s` 0: blocks of any age are served. `disk_dir` `None`: no disk.
    /// `disk_others`: folders whose blocks count as well ([`DiskOptions::others`]). `close_s`: how
    /// long [`Store::close`] writes what waits for the disk.
    /// `tell_tiers`: for [`Store::take_tier_message`]. `nixl`: its library, which `nixl:` addresses
    /// take.
    /// `peer_names`: what `sources` of loads call the peers, if not by their addresses. `peers_dir`:
    /// where others find this store, and it finds them; `engine` is the same for all ranks.
    #[new]
    #[allow(clippy::similar_names)]
    #[pyo3(signature = (
        *, block_bytes, host_bytes, disk_dir=None, disk_bytes=0, disk_others=Vec::new(),
        disk_dirty_bytes=1 << 30, close_s=30.0, ttl_s=0.0, keys_max=2048, identity=None, name="",
        listen=Vec::new(), peers=Vec::new(), peer_names=None, tell_tiers=false, nixl=None,
        peers_dir=None, engine=""
    ))]
    #[allow(clippy::too_many_arguments, clippy::too_many_lines)]
    fn new(
        block_bytes: BlockBytes,
        host_bytes: usize,
        disk_dir: Option<PathBuf>,
        disk_bytes: u64,
        disk_others: Vec<PathBuf>,
        disk_dirty_bytes: u64,
        close_s: f64,
        ttl_s: f64,
        keys_max: usize,
        identity: Option<&Bound<'_, PyDict>>,
        name: &str,
        listen: Vec<String>,
        peers: Vec<String>,
        peer_names: Option<Vec<String>>,
        tell_tiers: bool,
        nixl: Option<PathBuf>,
        peers_dir: Option<PathBuf>,
        engine: &str,
    ) -> PyResult<Store> {
        let ttl_ns = Some((ttl_s * 1e9) as u64).filter(|ns| *ns > 0);
        let sizes = Sizes::new(block_bytes)?;
        let block_bytes = sizes.largest;
        let options = MemoryOptions {
            bytes: host_bytes,
            block_bytes,
            ttl_ns,
        };
        let host = MemoryTier::new(options).map_err(to_python)?;
        let disk = disk_dir.map(|path| {
            let options = DiskOptions {
                ttl_ns,
                dirty_bytes: disk_dirty_bytes,
                others: disk_others,
                ..DiskOptions::new(&path, disk_bytes)
            };
            DiskTier::open(clock::now(), clock::unix_ns(), options)
        });
        let disk = disk.transpose().map_err(to_python)?;
        let followed = |places: usize| {
            let mut keys = KeySet::new(places, life());
            keys.set_consumed(true);
            keys
        };
        let places = host_bytes / block_bytes;
        let mut attends = None;
        let links = match identity {
            Some(identity) if !listen.is_empty() || !peers.is_empty() || peers_dir.is_some() => {
                let serves = Some(Served {
                    memory: Arc::clone(&host),
                    deeper: disk.clone().map(|disk| disk as Arc<dyn Tier>),
                });
                let listens = !listen.is_empty();
                let meeting = meeting(peers_dir, engine, identity, nixl.is_some())?;
                let contacts = Contacts {
                    listen,
                    names: peer_names.unwrap_or_else(|| peers.clone()),
                    peers,
                    meets: meeting.is_some(),
                };
                let nixl = nixl.map_or(Nixl::Off, |library| Nixl::On(NixlOptions::new(&library)));
                let profile = profile(identity)?;
                let (links, _) = Links::start(profile, name, contacts, serves, None, nixl)?;
                let published = match &meeting {
                    Some(meeting) if listens => {
                        Some(meeting.publish(name, links.endpoint.addresses())?)
                    }
                    _ => None,
                };
                attends = meeting.map(|meeting| (meeting, published));
                Some(Arc::new(links))
            }
            _ => None,
        };
        let (has_links, has_disk) = (links.is_some(), disk.is_some());
        let untold = Arc::new(AtomicU64::new(0));
        let shared = Arc::new(Shared {
            sizes,
            keys_max,
            host,
            disk: Mutex::new(disk),
            links: Mutex::new(links),
            fetching: Mutex::default(),
            books: Mutex::new(Books {
                keys: followed(places),
                served: KeySet::new(places, life()),
                tiers: tell_tiers.then(|| [followed(places), followed(0)]),
                changes: Vec::new(),
                messages: VecDeque::new(),
                tier_messages: VecDeque::new(),
                untold: Arc::clone(&untold),
            }),
            resend: AtomicBool::new(false),
            loads: Mutex::default(),
            loads_came: Condvar::new(),
            writes: Mutex::default(),
            writes_came: Condvar::new(),
            ended: Mutex::default(),
            ended_came: Condvar::new(),
            resets: AtomicU64::new(0),
            is_detached: AtomicBool::new(false),
            drain_until: Mutex::new(None),
            poll_soon: AtomicBool::new(false),
            poller: OnceLock::new(),
            stop: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            writes_dropped: AtomicU64::new(0),
            untold,
            put_failed: AtomicU64::new(0),
        });
        shared.tell();
        let store = Store {
            shared,
            close: Duration::from_secs_f64(close_s.clamp(0.0, 1e6)),
            threads: Mutex::default(),
            writers: Mutex::default(),
        };
        for _ in 0..READERS {
            store.spawn("kv-read", Shared::read)?;
        }
        if has_disk {
            for _ in 0..WRITERS {
                let thread = store.start("kv-write", Shared::write)?;
                lock(&store.writers).push(thread);
            }
        }
        store.spawn("kv-house", Shared::keep_house)?;
        if has_links {
            store.spawn("kv-poll", Shared::poll_peers)?;
        }
        if let Some((meeting, published)) = attends {
            let published = Mutex::new(published);
            store.spawn("kv-meet", move |shared| {
                if let Some(links) = shared.links() {
                    let published = lock(&published).take();
                    attend(published, &[(&meeting, &*links)], || {
                        shared.stop.load(Ordering::Acquire)
                            || shared.is_detached.load(Ordering::Acquire)
                    });
                }
            })?;
        }
        Ok(store)
    }

    /// Takes blocks from `data`, one after the other; returns how many are held now.
    fn put(
        &self,
        py: Python<'_>,
        keys: Vec<Bound<'_, PyBytes>>,
        data: PyBuffer<u8>,
    ) -> PyResult<usize> {
        let keys: Vec<Box<[u8]>> = keys.iter().map(|key| key.as_bytes().into()).collect();
        let shared = &self.shared;
        let places = shared.sizes.places(&keys)?;
        let data = buffer(data, &places, false)?;
        let epoch = shared.host.epoch();
        let result = py.detach(|| {
            let (mut held, mut failed) = (0, None);
            for (key, place) in keys.iter().zip(places.windows(2)) {
                // SAFETY: `slipstream.store.Store`: nobody writes to `data` until this returns.
                let block = unsafe { data.bytes(place[0], place[1] - place[0]) };
                match shared.host.put_in(epoch, clock::now(), key, block) {
                    Ok(_) => held += 1,
                    Err(error) => {
                        shared.put_failed.fetch_add(1, Ordering::Relaxed);
                        failed = Some(error);
                    }
                }
            }
            (held, failed)
        });
        if shared.disk().is_some() && shared.host.epoch() == epoch {
            let mut writes = lock(&shared.writes);
            let room = WRITES_MAX.saturating_sub(writes.len());
            let dropped = keys.len().saturating_sub(room) as u64;
            shared.writes_dropped.fetch_add(dropped, Ordering::Relaxed);
            writes.extend(keys.into_iter().take(room));
            shared.writes_came.notify_all();
        }
        py.detach(|| shared.tell());
        match result {
            (0, Some(error)) => Err(to_python(error)),
            (held, _) => Ok(held),
        }
    }

    /// Begins to load blocks into `into`.
    fn load(
        &self,
        job: u64,
        keys: Vec<Bound<'_, PyBytes>>,
        sources: Vec<String>,
        into: PyBuffer<u8>,
        deadline_s: f64,
    ) -> PyResult<()> {
        if sources.len() != keys.len() {
            return Err(PyValueError::new_err("one source a key"));
        }
        let keys: Vec<Box<[u8]>> = keys.iter().map(|key| key.as_bytes().into()).collect();
        let places = self.shared.sizes.places(&keys)?;
        let load = Load {
            job,
            sources,
            into: buffer(into, &places, true)?.into_region(),
            keys,
            places,
            deadline: Instant::now() + Duration::from_secs_f64(deadline_s.clamp(0.0, 1e6)),
        };
        if self.shared.stop.load(Ordering::Acquire) {
            self.shared.end(
                job,
                (0..load.keys.len() as u32).collect(),
                "closed",
                load.into,
            );
            return Ok(());
        }
        lock(&self.shared.loads).push_back(load);
        self.shared.loads_came.notify_one();
        Ok(())
    }

    /// Waits for loads to end: their numbers, the places of blocks that failed, and why.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> Vec<(u64, Vec<u32>, &'static str)> {
        let shared = &self.shared;
        py.detach(|| {
            let ended = lock(&shared.ended);
            let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 1e6));
            let idle = |ended: &mut VecDeque<Ended>| {
                ended.is_empty() && !shared.stop.load(Ordering::Acquire)
            };
            let (mut ended, _) = shared
                .ended_came
                .wait_timeout_while(ended, timeout, idle)
                .unwrap_or_else(PoisonError::into_inner);
            ended
                .drain(..)
                .map(|end| (end.job, end.failed, end.reason))
                .collect()
        })
    }

    /// What changed in the set of keys held here.
    fn take_message<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        // While the housekeeper writes messages there will be one in the next step.
        let mut books = self.shared.books.try_lock().ok()?;
        let message = books.messages.pop_front()?;
        Some(PyBytes::new(py, &message))
    }

    /// What changed in one tier, and its name.
    fn take_tier_message<'py>(
        &self,
        py: Python<'py>,
    ) -> Option<(&'static str, Bound<'py, PyBytes>)> {
        let mut books = self.shared.books.try_lock().ok()?;
        let (tier, message) = books.tier_messages.pop_front()?;
        Some((TIERS[tier as usize], PyBytes::new(py, &message)))
    }

    /// Tells all keys anew.
    fn request_snapshot(&self) {
        self.shared.resend.store(true, Ordering::Release);
    }

    /// Totals by metric.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let shared = &self.shared;
        let (disk, counts) = (shared.disk(), PyDict::new(py));
        let tiers: [(&str, Option<&dyn Tier>); 2] = [
            ("host", Some(&*shared.host)),
            ("disk", disk.as_deref().map(|disk| disk as &dyn Tier)),
        ];
        for (name, tier) in tiers {
            let Some(stats) = tier.map(Tier::stats) else {
                continue;
            };
            for (metric, count) in [
                ("hit_blocks", stats.hits_total),
                ("evicted_blocks", stats.evicted_total),
                ("expired_blocks", stats.expired_total),
                ("corrupt_blocks", stats.corrupt_total),
                ("store_failed_blocks", stats.failed_total),
            ] {
                counts.set_item(format!("{metric}.{name}"), count)?;
            }
        }
        let dropped = shared.writes_dropped.load(Ordering::Relaxed);
        counts.set_item("disk_dropped_blocks", dropped)?;
        counts.set_item("message_errors", shared.untold.load(Ordering::Relaxed))?;
        if let Some(links) = shared.links() {
            links.count(&counts)?;
        }
        Ok(counts)
    }

    /// Forgets all blocks. What they took is freed later.
    fn reset(&self) {
        let shared = &self.shared;
        shared.resets.fetch_add(1, Ordering::AcqRel);
        lock(&shared.writes).clear();
        // In this order: a block that was read from disk before is not put into memory after.
        if let Some(disk) = shared.disk() {
            disk.clear();
        }
        shared.host.clear();
    }

    /// Forgets the blocks in memory and lets go of disk and peers for good: what is stored from now on
    /// means something else than what they hold. Blocks on disk stay, for who has that identity.
    fn detach(&self) -> PyResult<()> {
        let shared = &self.shared;
        if shared.is_detached.swap(true, Ordering::AcqRel) {
            self.reset();
            return Ok(());
        }
        shared.resets.fetch_add(1, Ordering::AcqRel);
        // Peers that know keys of before must not get what is stored under them from now on.
        if let Some(links) = shared.links() {
            links.endpoint.stop_serving();
        }
        let disk = lock(&shared.disk).take();
        shared.drop_writes();
        shared.host.clear();
        // Connections take their time to end, and the folder's lock goes with the last of them.
        self.spawn("kv-detach", move |shared| {
            shared.drop_links("detached");
            lock(&shared.books).forget(DISK);
        })?;
        drop(disk);
        Ok(())
    }

    /// Where peers reach this store.
    fn address(&self) -> String {
        let address =
            |links: Arc<Links>| links.endpoint.addresses().first().map(ToString::to_string);
        self.shared.links().and_then(address).unwrap_or_default()
    }

    /// Ends all threads; loads that have not begun fail. Blocks that wait for the disk are written
    /// first, as far as time allows; the rest is counted.
    fn close(&self, py: Python<'_>) {
        let shared = &self.shared;
        let until = Instant::now() + self.close;
        lock(&shared.drain_until).get_or_insert(until);
        shared.stop.store(true, Ordering::Release);
        py.detach(|| {
            // Under their locks, so that no thread misses it between its look and its wait.
            for load in lock(&shared.loads).drain(..) {
                shared.end(
                    load.job,
                    (0..load.keys.len() as u32).collect(),
                    "closed",
                    load.into,
                );
            }
            shared.loads_came.notify_all();
            drop(lock(&shared.writes));
            shared.writes_came.notify_all();
            for thread in lock(&self.threads).drain(..) {
                thread.thread().unpark();
                let _ = thread.join();
            }
            self.end_writers(until);
            *lock(&shared.disk) = None;
            shared.drop_links("closed");
            drop(lock(&shared.ended));
            shared.ended_came.notify_all();
        });
    }
}

impl Store {
    fn spawn(&self, name: &str, work: impl Fn(&Shared) + Send + 'static) -> PyResult<()> {
        let thread = self.start(name, work)?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    /// Waits for the writers to write what is queued, until a moment.
    fn end_writers(&self, until: Instant) {
        let mut writers = std::mem::take(&mut *lock(&self.writers));
        let end = until + LAST_WRITE;
        while !writers.is_empty() && Instant::now() < end {
            writers.retain(|writer| !writer.is_finished());
            std::thread::sleep(WRITERS_POLL);
        }
        // A write that a disk never ends cannot be called back: it is left to itself.
        let dropped = self.shared.drop_writes() + writers.len();
        if dropped > 0 {
            tracing::warn!(
                "{dropped} blocks were not written to disk in the {:.0?} that the store had to \
                 close; raise `close_s`",
                self.close
            );
        }
    }

    fn start(
        &self,
        name: &str,
        work: impl Fn(&Shared) + Send + 'static,
    ) -> PyResult<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || work(&shared));
        thread.map_err(|error| {
            PyRuntimeError::new_err(format!("no thread for the store: {error}; raise ulimit -u"))
        })
    }
}

/// The caller's buffer for the blocks at `places`.
fn buffer(buffer: PyBuffer<u8>, places: &[usize], write: bool) -> PyResult<Buffer> {
    let buffer = Buffer::new(buffer, write)?;
    let want = places.last().copied().unwrap_or(0);
    if buffer.len != want {
        return Err(PyValueError::new_err(format!(
            "the buffer has {} bytes where {} blocks have {want}",
            buffer.len,
            places.len() - 1
        )));
    }
    Ok(buffer)
}

impl Drop for Store {
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}
