//! The store of one rank: tiers, and the threads that move blocks between them and the caller's
//! buffers.
//!
//! ```text
//!   put ──► host tier, queue ──► writer thread ──► disk tier
//!   load ──► queue ──► reader threads: host tier, else disk tier ──► buffer ──► ended ──► wait
//!   housekeeper: what has expired, what changed in the tiers ──► messages ──► take_message
//! ```
//!
//! The engine's thread calls `load`, `take_message`, `counters` and `request_snapshot`, which take
//! locks that are held for some hundred instructions only. `put` and `wait` are for threads that
//! may wait.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use slipstream_kvindex::{Change, KeySet};
use slipstream_kvstore::{
    DiskOptions, DiskTier, MemoryOptions, MemoryTier, Tier, TierChange, TierError, clock,
};

use crate::keys::life;

/// Threads that read for loads. Two, so that one slow disk read does not hold up host memory.
const READERS: usize = 2;
/// How often the housekeeper looks for blocks whose time has come, and for changes.
const HOUSEKEEPING: Duration = Duration::from_millis(20);
/// Blocks that may wait for the disk; those beyond are in host memory only, and counted.
const WRITES_MAX: usize = 4_096;
/// Messages about keys that may wait for the scheduler; then it gets a snapshot instead.
const MESSAGES_MAX: usize = 1_024;
/// Blocks that expire in one go.
const EXPIRE_MAX: usize = 1_024;
/// Holders of a key, to its key set.
const HOST: u32 = 0;
const DISK: u32 = 1;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

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

    /// # Safety
    ///
    /// Nobody else reads or writes these bytes meanwhile.
    #[allow(clippy::mut_from_ref)]
    unsafe fn bytes_mut(&self, at: usize, len: usize) -> &mut [u8] {
        assert!(at + len <= self.len, "inside the buffer");
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at), len) }
    }
}

/// A load: one block after the other into `into`.
struct Load {
    job: u64,
    keys: Vec<Box<[u8]>>,
    into: Buffer,
    deadline: Instant,
}

/// How a load ended.
struct Ended {
    job: u64,
    failed: Vec<u32>,
    reason: &'static str,
}

/// What is held, told, and not told yet.
struct Books {
    keys: KeySet,
    changes: Vec<TierChange>,
    messages: VecDeque<Vec<u8>>,
}

struct Shared {
    block_bytes: usize,
    keys_max: usize,
    host: Arc<MemoryTier>,
    /// Taken when the store is closed, so that another may open the folder.
    disk: Mutex<Option<Arc<DiskTier>>>,
    books: Mutex<Books>,
    resend: AtomicBool,
    loads: Mutex<VecDeque<Load>>,
    loads_came: Condvar,
    writes: Mutex<VecDeque<Box<[u8]>>>,
    writes_came: Condvar,
    ended: Mutex<VecDeque<Ended>>,
    ended_came: Condvar,
    /// Held for reading while a block is stored, and for writing while all are dropped.
    storing: RwLock<()>,
    stop: AtomicBool,
    writes_dropped: AtomicU64,
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

    fn end(&self, job: u64, failed: Vec<u32>, reason: &'static str) {
        lock(&self.ended).push_back(Ended {
            job,
            failed,
            reason,
        });
        self.ended_came.notify_one();
    }

    fn read(&self) {
        while let Some(load) = self.next(&self.loads, &self.loads_came) {
            let (mut failed, mut reason) = (Vec::new(), "");
            for (at, key) in load.keys.iter().enumerate() {
                // SAFETY: the caller does not touch its buffer from the submission to the end of
                // the load, and this thread alone has taken it.
                let out = unsafe { load.into.bytes_mut(at * self.block_bytes, self.block_bytes) };
                let why = if Instant::now() >= load.deadline || self.stop.load(Ordering::Relaxed) {
                    "deadline"
                } else if self.read_one(key, out) {
                    continue;
                } else {
                    "absent"
                };
                reason = why;
                failed.push(at as u32);
            }
            self.end(load.job, failed, reason);
        }
    }

    fn read_one(&self, key: &[u8], out: &mut [u8]) -> bool {
        let now = clock::now();
        match self.host.get(now, key, out) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => tracing_warn(&error),
        }
        let Some(disk) = self.disk() else {
            return false;
        };
        match disk.get(now, key, out) {
            Ok(true) => {
                let _storing = self.storing.read().unwrap_or_else(PoisonError::into_inner);
                // Wanted once, wanted again. Where there is no room it stays on disk.
                let _ = self.host.put(now, key, out);
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
        while let Some(key) = self.next(&self.writes, &self.writes_came) {
            let Some(disk) = self.disk() else { return };
            let _storing = self.storing.read().unwrap_or_else(PoisonError::into_inner);
            let now = clock::now();
            // It may be gone by now: the disk was slower than the host tier is large.
            if let Some(block) = self.host.pin(now, &key)
                && let Err(error) = disk.put(now, &key, block.bytes())
            {
                tracing_warn(&error);
            }
        }
    }

    fn keep_house(&self) {
        while !self.stop.load(Ordering::Acquire) {
            std::thread::park_timeout(HOUSEKEEPING);
            self.host.expire(clock::now(), EXPIRE_MAX);
            if let Some(disk) = self.disk() {
                disk.expire(clock::now(), EXPIRE_MAX);
            }
            self.tell();
        }
    }

    /// Turns what changed in the tiers into messages.
    fn tell(&self) {
        let disk = self.disk();
        let mut books = lock(&self.books);
        let Books {
            keys,
            changes,
            messages,
        } = &mut *books;
        let tiers: [(u32, Option<&dyn Tier>); 2] = [
            (HOST, Some(&*self.host)),
            (DISK, disk.as_deref().map(|disk| disk as &dyn Tier)),
        ];
        for (holder, tier) in tiers {
            let Some(tier) = tier else { continue };
            if !tier.take_changes(changes) {
                // Some were lost: what is held now, less what was said of this tier before.
                changes.clear();
                let held: Vec<Box<[u8]>> = keys.iter().map(Into::into).collect();
                let _ = keys.apply(held.iter().map(|key| (&key[..], Change::Remove(holder))));
                changes.extend(tier.keys().into_iter().map(TierChange::Stored));
            }
            for change in changes.drain(..) {
                let (key, change) = match &change {
                    TierChange::Stored(key) => (key, Change::Add(holder)),
                    TierChange::Removed(key) => (key, Change::Remove(holder)),
                };
                // A disk may hold keys of another length, of another hash function.
                let _ = keys.change(key, change);
            }
        }
        if self.resend.swap(false, Ordering::AcqRel) {
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
    }
}

fn tracing_warn(error: &TierError) {
    tracing::warn!("a block is computed again: {error}");
}

fn to_python(error: TierError) -> PyErr {
    PyOSError::new_err(error.to_string())
}

/// The store of one rank; see [`crate::store`] and `slipstream.store.Store`.
#[pyclass(module = "slipstream._native")]
pub(crate) struct Store {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[pymethods]
impl Store {
    /// `ttl_s` 0: blocks of any age are served. `disk_dir` `None`: no disk.
    #[new]
    #[allow(clippy::similar_names)]
    #[pyo3(signature = (*, block_bytes, host_bytes, disk_dir=None, disk_bytes=0, ttl_s=0.0, keys_max=2048))]
    fn new(
        block_bytes: usize,
        host_bytes: usize,
        disk_dir: Option<PathBuf>,
        disk_bytes: u64,
        ttl_s: f64,
        keys_max: usize,
    ) -> PyResult<Store> {
        let ttl_ns = Some((ttl_s * 1e9) as u64).filter(|ns| *ns > 0);
        let options = MemoryOptions {
            bytes: host_bytes,
            block_bytes,
            ttl_ns,
        };
        let host = MemoryTier::new(options).map_err(to_python)?;
        let disk = disk_dir.map(|path| {
            let options = DiskOptions {
                path,
                bytes: disk_bytes,
                ttl_ns,
                sync: true,
            };
            DiskTier::open(clock::now(), clock::unix_ns(), options)
        });
        let disk = disk.transpose().map_err(to_python)?;
        let mut keys = KeySet::new(host_bytes / block_bytes, life());
        keys.set_consumed(true);
        let shared = Arc::new(Shared {
            block_bytes,
            keys_max,
            host,
            disk: Mutex::new(disk),
            books: Mutex::new(Books {
                keys,
                changes: Vec::new(),
                messages: VecDeque::new(),
            }),
            resend: AtomicBool::new(false),
            loads: Mutex::default(),
            loads_came: Condvar::new(),
            writes: Mutex::default(),
            writes_came: Condvar::new(),
            ended: Mutex::default(),
            ended_came: Condvar::new(),
            storing: RwLock::new(()),
            stop: AtomicBool::new(false),
            writes_dropped: AtomicU64::new(0),
            put_failed: AtomicU64::new(0),
        });
        shared.tell();
        let store = Store {
            shared,
            threads: Mutex::default(),
        };
        for _ in 0..READERS {
            store.spawn("kv-read", Shared::read)?;
        }
        store.spawn("kv-write", Shared::write)?;
        store.spawn("kv-house", Shared::keep_house)?;
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
        let data = self.buffer(data, keys.len(), false)?;
        let shared = &self.shared;
        let result = py.detach(|| {
            let _storing = shared
                .storing
                .read()
                .unwrap_or_else(PoisonError::into_inner);
            let (mut held, mut failed) = (0, None);
            for (at, key) in keys.iter().enumerate() {
                let at = at * shared.block_bytes;
                // SAFETY: `slipstream.store.Store`: nobody writes to `data` until this returns.
                let block = unsafe { data.bytes(at, shared.block_bytes) };
                match shared.host.put(clock::now(), key, block) {
                    Ok(_) => held += 1,
                    Err(error) => {
                        shared.put_failed.fetch_add(1, Ordering::Relaxed);
                        failed = Some(error);
                    }
                }
            }
            (held, failed)
        });
        if shared.disk().is_some() {
            let mut writes = lock(&shared.writes);
            let room = WRITES_MAX.saturating_sub(writes.len());
            let dropped = keys.len().saturating_sub(room) as u64;
            shared.writes_dropped.fetch_add(dropped, Ordering::Relaxed);
            writes.extend(keys.into_iter().take(room));
            shared.writes_came.notify_one();
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
        let load = Load {
            job,
            keys: keys.iter().map(|key| key.as_bytes().into()).collect(),
            into: self.buffer(into, keys.len(), true)?,
            deadline: Instant::now() + Duration::from_secs_f64(deadline_s.clamp(0.0, 1e6)),
        };
        if self.shared.stop.load(Ordering::Acquire) {
            self.shared
                .end(job, (0..load.keys.len() as u32).collect(), "closed");
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
        Ok(counts)
    }

    /// Forgets all blocks. Waits for what is being stored just now.
    fn reset(&self, py: Python<'_>) {
        let shared = &self.shared;
        py.detach(|| {
            let _storing = shared
                .storing
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            lock(&shared.writes).clear();
            shared.host.clear();
            if let Some(disk) = shared.disk() {
                disk.clear();
            }
            shared.tell();
        });
    }

    /// Where peers reach this store.
    #[allow(clippy::unused_self)]
    fn address(&self) -> String {
        String::new()
    }

    /// Ends all threads; loads that have not begun fail.
    fn close(&self, py: Python<'_>) {
        let shared = &self.shared;
        shared.stop.store(true, Ordering::Release);
        py.detach(|| {
            // Under their locks, so that no thread misses it between its look and its wait.
            for load in lock(&shared.loads).drain(..) {
                shared.end(load.job, (0..load.keys.len() as u32).collect(), "closed");
            }
            shared.loads_came.notify_all();
            drop(lock(&shared.writes));
            shared.writes_came.notify_all();
            for thread in lock(&self.threads).drain(..) {
                thread.thread().unpark();
                let _ = thread.join();
            }
            *lock(&shared.disk) = None;
            drop(lock(&shared.ended));
            shared.ended_came.notify_all();
        });
    }
}

impl Store {
    fn spawn(&self, name: &str, work: impl Fn(&Shared) + Send + 'static) -> PyResult<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || work(&shared));
        let thread = thread.map_err(|error| {
            PyRuntimeError::new_err(format!("no thread for the store: {error}; raise ulimit -u"))
        })?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    fn buffer(&self, buffer: PyBuffer<u8>, blocks: usize, write: bool) -> PyResult<Buffer> {
        let buffer = Buffer::new(buffer, write)?;
        let want = blocks * self.shared.block_bytes;
        if buffer.len != want {
            return Err(PyValueError::new_err(format!(
                "the buffer has {} bytes where {blocks} blocks of {} have {want}",
                buffer.len, self.shared.block_bytes
            )));
        }
        Ok(buffer)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        Python::attach(|py| self.close(py));
    }
}
