//! The trait of tiers, which store blocks, and its implementations.

pub mod disk;
pub mod memory;
mod settings;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use slipstream_base::SimTime;

use crate::arena::ArenaError;

pub use settings::{Setting, Settings};

/// The medium of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Memory of the host.
    Host,
    /// A local disk.
    Disk,
}

impl Medium {
    /// Every medium.
    pub const ALL: [Medium; 2] = [Medium::Host, Medium::Disk];

    /// Its name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Medium::Host => "host",
            Medium::Disk => "disk",
        }
    }

    /// vLLM's name for it in KV events (`medium` of `BlockStored` in
    /// `vllm/distributed/kv_events.py`).
    pub fn vllm_name(self) -> &'static str {
        match self {
            Medium::Host => "CPU",
            Medium::Disk => "STORAGE",
        }
    }
}

/// A tier below memory.
struct Lower {
    /// What the names of its settings begin with.
    name: &'static str,
    open: OpenTier,
}

/// Opens a tier, for blocks that are kept for so long, ns; `None`: the settings ask for none.
type OpenTier = fn(&mut Settings, Option<u64>) -> Result<Option<Arc<dyn Tier>>, TierError>;

/// The tiers below memory, from the fastest.
const LOWER: &[Lower] = &[Lower {
    name: "disk",
    open: disk::open_with,
}];

/// Opens the tiers below memory that `settings` ask for. Their names are `TIER_SETTING`, such as `disk_dir`. Blocks are
/// kept for `ttl_ns`; `None`: until they are evicted.
///
/// # Errors
///
/// [`TierError::Setting`], or that a tier cannot be opened.
pub fn open_lower(
    mut settings: BTreeMap<String, Setting>,
    ttl_ns: Option<u64>,
) -> Result<Vec<Arc<dyn Tier>>, TierError> {
    let mut tiers = Vec::new();
    for lower in LOWER {
        let mut own = Settings::of(lower.name, &mut settings);
        tiers.extend((lower.open)(&mut own, ttl_ns)?);
        own.end()?;
    }
    match settings.pop_first() {
        None => Ok(tiers),
        Some((name, _)) => Err(TierError::Setting {
            name,
            why: "is unknown",
        }),
    }
}

/// Stores blocks by key, up to a number of bytes, with LRU eviction.
///
/// `now` is [`crate::clock::now`] in production. Keys are any bytes. A key identifies its content,
/// so a put of a key that is held changes nothing.
pub trait Tier: Send + Sync {
    /// Its medium.
    fn medium(&self) -> Medium;

    /// Stores a block. `false` if it was held already. May evict others.
    ///
    /// # Errors
    ///
    /// [`TierError::TooLarge`], [`TierError::Pinned`] (a retry may succeed) and
    /// [`TierError::Disk`]. The block is not held then.
    fn put(&self, now: SimTime, key: &[u8], bytes: &[u8]) -> Result<bool, TierError> {
        self.put_in(self.epoch(), now, key, bytes)
    }

    /// Number of calls of [`Tier::clear`].
    fn epoch(&self) -> u64;

    /// As [`Tier::put`], but stores nothing and returns `false` if [`Tier::clear`] was called since
    /// `epoch`: then the block is from before the clear.
    ///
    /// # Errors
    ///
    /// Those of [`Tier::put`].
    fn put_in(&self, epoch: u64, now: SimTime, key: &[u8], bytes: &[u8])
    -> Result<bool, TierError>;

    /// Copies a block to `out` and verifies it. `false` if there is none; `out` may contain
    /// anything then.
    ///
    /// # Errors
    ///
    /// [`TierError::Length`] if the block is not as long as `out`.
    fn get(&self, now: SimTime, key: &[u8], out: &mut [u8]) -> Result<bool, TierError>;

    /// Length of the block, if it is held.
    fn len_of(&self, now: SimTime, key: &[u8]) -> Option<usize>;

    /// Drops a block. `false` if there was none.
    fn remove(&self, key: &[u8]) -> bool;

    /// Drops up to `count_max` expired blocks; returns how many.
    fn expire(&self, now: SimTime, count_max: usize) -> usize;

    /// Frees up to `count_max` blocks that [`Tier::clear`] has dropped, if that takes work; returns
    /// how many. To be called periodically.
    fn sweep(&self, count_max: usize) -> usize {
        let _ = count_max;
        0
    }

    /// Appends the changes since the last call, in order. `false` if some were discarded, because
    /// they were not taken for long: then [`Tier::keys`] has the current keys.
    fn take_changes(&self, out: &mut Vec<TierChange>) -> bool;

    /// All keys held, in O(keys).
    fn keys(&self) -> Vec<Box<[u8]>>;

    /// Counters.
    fn stats(&self) -> TierStats;

    /// Drops all blocks in O(1); their memory or files are freed later. The next
    /// [`Tier::take_changes`] returns `false`.
    fn clear(&self);
}

/// A block was stored or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierChange {
    /// The block is held from now on.
    Stored(Box<[u8]>),
    /// The block is no longer held.
    Removed(Box<[u8]>),
}

/// Counters of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks held.
    pub blocks: u64,
    /// Bytes held, including the overhead of each block.
    pub bytes: u64,
    /// Blocks stored.
    pub stored_total: u64,
    /// Calls of [`Tier::get`] that found a block. Reads in place by peers or for a lower tier are
    /// not counted.
    pub hits_total: u64,
    /// Calls of [`Tier::get`] that found none, or a corrupt one.
    pub misses_total: u64,
    /// Blocks that were evicted.
    pub evicted_total: u64,
    /// Blocks that expired.
    pub expired_total: u64,
    /// Blocks that failed verification and were dropped.
    pub corrupt_total: u64,
    /// Blocks that could not be stored.
    pub failed_total: u64,
}

/// Why a call failed. The tier remains usable.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// The block exceeds the maximum size.
    #[error("block of {bytes} bytes exceeds the tier's {max} bytes; increase `block_bytes`")]
    TooLarge {
        /// Bytes of the block.
        bytes: usize,
        /// Maximum size.
        max: usize,
    },
    /// Every block that could be evicted is being read. A retry may succeed.
    #[error("all {slots} slots are being read; give the host tier more bytes")]
    Pinned {
        /// Number of slots.
        slots: usize,
    },
    /// The block has another length than the reader expects: they disagree on the layout.
    #[error("a block has {got} bytes instead of {want}; all engines need one block layout")]
    Length {
        /// Expected length.
        want: usize,
        /// Length of the block.
        got: usize,
    },
    /// A disk operation failed: the disk is full, read-only or gone.
    #[error("{path}: {what} failed; free some space, or give the disk tier fewer bytes")]
    Disk {
        /// The file.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The I/O error.
        source: std::io::Error,
    },
    /// Another process uses the folder.
    #[error("{path} is the disk tier of another process; give each engine its own folder")]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// A setting of a tier below memory is unknown or has a wrong value.
    #[error("the option `{name}` {why}")]
    Setting {
        /// Its name.
        name: String,
        /// What is wrong.
        why: &'static str,
    },
    /// The memory could not be allocated.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}
