//! The store of one rank: tiers, and the threads that move blocks between them, peers and the
//! caller's buffers.
//!
//! ```text
//!   put ──► memory, queue ──► writer threads ──► lower tiers
//!   load ──► queue ──► reader threads: memory, else a lower tier, else a peer ──► buffer ──► wait
//!   housekeeper: expired blocks, changed keys ──► messages ──► take_message
//! ```
//!
//! A block that is read from a lower tier is put back into memory. The transport fetches blocks
//! of peers into the caller's buffer. Another thread polls for the end of fetches, and reconnects
//! peers.
//!
//! [`Store::load`], [`Store::take_message`], [`Store::stats`], [`Store::request_snapshot`],
//! [`Store::reset`] and [`Store::detach`] take only locks that are held for some hundred
//! instructions, so an engine's thread may call them; `reset` also renames a folder. [`Store::put`],
//! [`Store::wait`] and [`Store::close`] are for threads that may wait.

mod discovered;
mod followers;
mod keys;
mod links;
mod sizes;
mod work;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slipstream_base::sync::{lock, unpoisoned};
use slipstream_discovery::{Session, SessionError};

use crate::region::Region;
use crate::tier::memory::MemoryTier;
use crate::tier::{Medium, Tier, TierError, TierStats};
use crate::transport::{Address, TransportError};
use sizes::{BlockSizes, check_buffer};
use work::{Load, Shared};

pub use discovered::PeerDiscovery;
pub use followers::{Candidate, PeerKeys};
pub use links::{PeerLinks, PeerOptions, PeerStats};

/// Threads that read for loads. Two, so that one slow read of a lower tier does not block reads
/// from memory.
const READERS: usize = 2;
/// Threads that write to lower tiers. A single one is bound by the latency of creating and renaming
/// files.
const WRITERS: usize = 4;
/// Interval at which [`Store::close`] checks its writers, and how long it waits after its limit for
/// a write in progress.
const WRITERS_POLL: Duration = Duration::from_millis(1);
const LAST_WRITE: Duration = Duration::from_secs(2);

/// How a store is set up.
pub struct StoreOptions {
    /// Bytes per block of each group of layers. If there are several groups, the last four bytes of
    /// a key are its group (big-endian).
    pub block_bytes: Vec<usize>,
    /// The first tier, whose slots hold the largest block.
    pub memory: Arc<MemoryTier>,
    /// The tiers below it, the fastest first. Every block is written to each of them.
    pub lower: Vec<Arc<dyn Tier>>,
    /// Time limit of [`Store::close`] for writing queued blocks to lower tiers.
    pub close_max: Duration,
    /// Keys per message.
    pub keys_max: usize,
    /// Whether [`Store::take_tier_message`] has messages.
    pub publish_tiers: bool,
    /// Peers that blocks are shared with.
    pub peers: Option<PeerOptions>,
}

impl StoreOptions {
    /// One block size, memory only.
    pub fn new(memory: Arc<MemoryTier>) -> StoreOptions {
        StoreOptions {
            block_bytes: vec![memory.block_bytes()],
            memory,
            lower: Vec::new(),
            close_max: Duration::from_secs(30),
            keys_max: 2_048,
            publish_tiers: false,
            peers: None,
        }
    }
}

/// Why a call failed. The store remains usable.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No group, or a group with blocks of 0 bytes.
    #[error("blocks have 0 bytes; give each group of layers its `block_bytes`")]
    NoBlockBytes,
    /// The key belongs to no group.
    #[error("a key ends with {suffix:?}, which matches none of {groups} groups")]
    NoGroup {
        /// The key's last bytes.
        suffix: Box<[u8]>,
        /// Number of groups.
        groups: usize,
    },
    /// The caller's buffer has another size than the blocks.
    #[error("the buffer has {bytes} bytes, but {blocks} blocks have {wanted}")]
    Buffer {
        /// Bytes of the buffer.
        bytes: usize,
        /// Number of blocks.
        blocks: usize,
        /// Their bytes.
        wanted: usize,
    },
    /// The numbers of sources and keys differ.
    #[error("{sources} sources for {keys} keys; give one source per key")]
    Sources {
        /// Number of sources.
        sources: usize,
        /// Number of keys.
        keys: usize,
    },
    /// Other hosts cannot connect to the address that the record would contain.
    #[error(
        "peers cannot reach an engine at {address}; listen at an address of this host, such as \
         tcp://10.0.0.1:7300, or leave out peers_dir"
    )]
    Unreachable {
        /// The address.
        address: Address,
    },
    /// A tier failed.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// The transport did not start.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Discovery did not start.
    #[error(transparent)]
    Discovery(#[from] SessionError),
    /// A thread could not be started.
    #[error("cannot start a thread of the store: {0}; raise ulimit -u")]
    Thread(#[source] io::Error),
}

/// Blocks to load, back to back, into a region of their size.
pub struct LoadRequest {
    /// The caller's identifier of this load.
    pub job: u64,
    /// Keys of the blocks.
    pub keys: Vec<Box<[u8]>>,
    /// For each key, the peer that holds it; empty: this store.
    pub sources: Vec<String>,
    /// The destination. The caller does not access it until the load has ended.
    pub into: Arc<Region>,
    /// Time limit; blocks that have not arrived by then fail.
    pub deadline: Duration,
}

/// How a load ended.
pub struct LoadEnd {
    /// The caller's identifier.
    pub job: u64,
    /// Indexes of the keys whose blocks did not arrive, or failed verification.
    pub failed: Vec<u32>,
    /// Why, for metrics; empty if none failed.
    pub reason: &'static str,
    /// The destination, with the other blocks.
    pub into: Arc<Region>,
}

/// Counters of a store.
#[derive(Clone, Debug, Default)]
pub struct StoreStats {
    /// By tier, memory first.
    pub tiers: Vec<(Medium, TierStats)>,
    /// Blocks that were not written to a lower tier, because the queue was full, they were evicted
    /// first, or the store was closed.
    pub dropped_blocks: u64,
    /// Changes of keys that no message can represent.
    pub unpublished_keys: u64,
    /// Blocks that memory did not store.
    pub failed_puts: u64,
    /// Counters of the links to peers, if there are any.
    pub peers: Option<PeerStats>,
}

/// The store of one rank. Closed when dropped.
pub struct Store {
    shared: Arc<Shared>,
    close_max: Duration,
    session: Mutex<Option<Session>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    writers: Mutex<Vec<JoinHandle<()>>>,
}

impl Store {
    /// Starts the threads, connects to peers and publishes this store's addresses.
    ///
    /// # Errors
    ///
    /// [`StoreError`]
    pub fn start(options: StoreOptions) -> Result<Store, StoreError> {
        let sizes = BlockSizes::new(options.block_bytes)?;
        let (memory, lower) = (options.memory, options.lower);
        if sizes.largest > memory.block_bytes() {
            return Err(StoreError::Tier(TierError::TooLarge {
                bytes: sizes.largest,
                max: memory.block_bytes(),
            }));
        }
        let (mut connected, mut session) = (None, None);
        if let Some(peers) = options.peers {
            let (name, discovery) = (peers.name.clone(), peers.discovery.clone());
            let is_listening = !peers.listen.is_empty();
            let serves = Some(links::Served {
                memory: Arc::clone(&memory),
                lower: lower.clone(),
            });
            let (started, _) = PeerLinks::start(peers, serves, None)?;
            let started = Arc::new(started);
            if let Some(discovery) = discovery {
                let publish = is_listening.then(|| (name.as_str(), started.addresses()));
                let ranks = vec![(discovery, Arc::downgrade(&started))];
                session = Some(discovered::start(ranks, publish)?);
            }
            connected = Some(started);
        }
        let (has_links, has_lower) = (connected.is_some(), !lower.is_empty());
        let shared = Arc::new(Shared::new(
            sizes,
            memory,
            lower,
            connected,
            options.keys_max,
            options.publish_tiers,
        ));
        shared.publish_keys();
        let store = Store {
            shared,
            close_max: options.close_max,
            session: Mutex::new(session),
            threads: Mutex::default(),
            writers: Mutex::default(),
        };
        for _ in 0..READERS {
            store.spawn("kv-read", Shared::read)?;
        }
        if has_lower {
            for _ in 0..WRITERS {
                let thread = store.thread("kv-write", Shared::write)?;
                lock(&store.writers).push(thread);
            }
        }
        store.spawn("kv-house", Shared::housekeep)?;
        if has_links {
            store.spawn("kv-poll", Shared::poll_peers)?;
        }
        Ok(store)
    }

    /// Stores blocks that are back to back in `data`; returns how many are now in memory. They are
    /// written to lower tiers later.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the buffer does not fit, or no block was stored.
    pub fn put(&self, keys: Vec<Box<[u8]>>, data: &[u8]) -> Result<usize, StoreError> {
        let shared = &self.shared;
        let offsets = shared.sizes.offsets(&keys)?;
        check_buffer(data.len(), &offsets)?;
        let epoch = shared.memory.epoch();
        let (held_blocks, failure) = shared.put(epoch, &keys, &offsets, data);
        shared.queue_writes(epoch, keys);
        shared.publish_keys();
        match (held_blocks, failure) {
            (0, Some(error)) => Err(error.into()),
            (held_blocks, _) => Ok(held_blocks),
        }
    }

    /// Starts a load, which ends exactly once; see [`Store::wait`].
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the request is invalid; such a load has no end.
    pub fn load(&self, request: LoadRequest) -> Result<(), StoreError> {
        let (sources, keys) = (request.sources.len(), request.keys.len());
        if sources != keys {
            return Err(StoreError::Sources { sources, keys });
        }
        let offsets = self.shared.sizes.offsets(&request.keys)?;
        check_buffer(request.into.len(), &offsets)?;
        self.shared.begin(Load {
            job: request.job,
            keys: request.keys,
            sources: request.sources,
            offsets,
            into: request.into,
            deadline: Instant::now() + request.deadline,
        });
        Ok(())
    }

    /// Waits for loads to end. Returns none at the timeout, or if the store is closed.
    pub fn wait(&self, timeout: Duration) -> Vec<LoadEnd> {
        let shared = &self.shared;
        let ended = lock(&shared.ended);
        let (mut ended, _) = unpoisoned(shared.ended_ready.wait_timeout_while(
            ended,
            timeout,
            |ended| ended.is_empty() && !shared.is_closed(),
        ));
        ended.drain(..).collect()
    }

    /// The next message about changes of the keys in this store. `None` also while messages are
    /// being written; a later call returns them.
    pub fn take_message(&self) -> Option<Vec<u8>> {
        self.shared.keys.try_lock().ok()?.messages.pop_front()
    }

    /// The next message about one tier, and its medium.
    pub fn take_tier_message(&self) -> Option<(Medium, Vec<u8>)> {
        let mut keys = self.shared.keys.try_lock().ok()?;
        let (tier, message) = keys.tier_messages.pop_front()?;
        Some((self.shared.media[tier], message))
    }

    /// Publishes all keys again in the next messages.
    pub fn request_snapshot(&self) {
        self.shared.request_snapshot();
    }

    /// Counters.
    pub fn stats(&self) -> StoreStats {
        let shared = &self.shared;
        let lower = shared.lower();
        let lower = lower.iter().map(|tier| (tier.medium(), tier.stats()));
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StoreStats {
            tiers: std::iter::once((shared.memory.medium(), shared.memory.stats()))
                .chain(lower)
                .collect(),
            dropped_blocks: get(&shared.writes_dropped),
            unpublished_keys: get(&shared.unpublished),
            failed_puts: get(&shared.put_failed),
            peers: shared.links().map(|links| links.stats()),
        }
    }

    /// Drops all blocks. Their memory and files are freed later.
    pub fn reset(&self) {
        self.shared.reset();
    }

    /// Drops the blocks in memory, and stops using lower tiers and peers. Blocks stored from now on
    /// are not compatible with theirs. Blocks in lower tiers stay.
    ///
    /// # Errors
    ///
    /// [`StoreError::Thread`]
    pub fn detach(&self) -> Result<(), StoreError> {
        let Some(lower) = self.shared.detach() else {
            return Ok(()); // already detached
        };
        if let Some(session) = &*lock(&self.session) {
            session.stop();
        }
        // On a separate thread: ending connections takes time, and the last one releases a folder's
        // lock.
        self.spawn("kv-detach", move |shared| {
            shared.drop_links("detached");
            shared.forget_lower();
        })?;
        drop(lower);
        Ok(())
    }

    /// The address at which peers reach this store. `None` without peers, and once it is detached.
    pub fn address(&self) -> Option<Address> {
        if self.shared.is_detached() {
            return None; // its connections may still be ending
        }
        self.shared.links()?.addresses().first().cloned()
    }

    /// Ends all threads; loads that have not started fail. First, queued blocks are written to
    /// lower tiers until `close_max`; the rest is counted.
    pub fn close(&self) {
        let shared = &self.shared;
        let until = Instant::now() + self.close_max;
        shared.begin_close(until);
        // The record is removed first, as writing may take long.
        if let Some(session) = &*lock(&self.session) {
            session.stop();
        }
        for thread in lock(&self.threads).drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
        self.end_writers(until);
        lock(&shared.lower).clear();
        drop(lock(&self.session).take());
        shared.drop_links("closed");
        drop(lock(&shared.ended));
        shared.ended_ready.notify_all();
    }

    /// Waits until `until` for the writers to empty the queue.
    fn end_writers(&self, until: Instant) {
        let mut writers = std::mem::take(&mut *lock(&self.writers));
        let end = until + LAST_WRITE;
        while !writers.is_empty() && Instant::now() < end {
            writers.retain(|writer| !writer.is_finished());
            std::thread::sleep(WRITERS_POLL);
        }
        // A write that the disk never completes cannot be cancelled, so its thread is abandoned.
        let dropped = self.shared.drop_writes() + writers.len();
        if dropped > 0 {
            tracing::warn!(
                "{dropped} blocks were not written to disk within {:.0?} of closing the \
                 store; raise `close_s`",
                self.close_max
            );
        }
    }

    fn spawn(&self, name: &str, work: impl Fn(&Shared) + Send + 'static) -> Result<(), StoreError> {
        let thread = self.thread(name, work)?;
        lock(&self.threads).push(thread);
        Ok(())
    }

    fn thread(
        &self,
        name: &str,
        work: impl Fn(&Shared) + Send + 'static,
    ) -> Result<JoinHandle<()>, StoreError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.into());
        let thread = thread.spawn(move || work(&shared));
        thread.map_err(StoreError::Thread)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests;
