//! Where blocks are stored.

pub mod disk;
pub mod memory;

use std::path::PathBuf;

use slipstream_base::SimTime;

use crate::arena::ArenaError;

/// What kind of place a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Memory of the host.
    Host,
    /// A local disk.
    Disk,
}

impl Medium {
    /// vLLM's word for it in KV events (`medium` of `BlockStored` in
    /// `vllm/distributed/kv_events.py`).
    pub fn vllm_name(self) -> &'static str {
        match self {
            Medium::Host => "CPU",
            Medium::Disk => "STORAGE",
        }
    }
}

/// Holds blocks by key, up to a number of bytes, least recently used out first.
///
/// `now` is [`crate::clock::now`] in production. Keys are any bytes; a block that is put again
/// under a key that is held stays as it is, as a key stands for its content.
pub trait Tier: Send + Sync {
    /// What kind of place it is.
    fn medium(&self) -> Medium;

    /// Stores a block. `false` if it was there. May evict others.
    ///
    /// # Errors
    ///
    /// [`TierError::TooLarge`], [`TierError::Pinned`] (a retry may help) and [`TierError::Disk`].
    /// The block is not held then.
    fn put(&self, now: SimTime, key: &[u8], bytes: &[u8]) -> Result<bool, TierError> {
        self.put_in(self.epoch(), now, key, bytes)
    }

    /// How often [`Tier::clear`] was called.
    fn epoch(&self) -> u64;

    /// As [`Tier::put`], unless [`Tier::clear`] was called since `epoch`: then the block is of before,
    /// is not stored, and the answer is `false`.
    ///
    /// # Errors
    ///
    /// Those of [`Tier::put`].
    fn put_in(&self, epoch: u64, now: SimTime, key: &[u8], bytes: &[u8])
    -> Result<bool, TierError>;

    /// Copies a block to `out` after which it has been verified, or says that there is none.
    /// `out` may hold anything after a miss.
    ///
    /// # Errors
    ///
    /// [`TierError::Length`] if the block is not as long as `out`.
    fn get(&self, now: SimTime, key: &[u8], out: &mut [u8]) -> Result<bool, TierError>;

    /// Bytes of the block, if it is held.
    fn len_of(&self, now: SimTime, key: &[u8]) -> Option<usize>;

    /// Drops a block. `false` if there was none.
    fn remove(&self, key: &[u8]) -> bool;

    /// Drops up to `count_max` blocks whose time has come; returns of how many that was said.
    fn expire(&self, now: SimTime, count_max: usize) -> usize;

    /// Removes up to `count_max` blocks that [`Tier::clear`] has dropped, if they take removing;
    /// returns how many. To be called now and then.
    fn sweep(&self, count_max: usize) -> usize {
        let _ = count_max;
        0
    }

    /// Appends what changed since the last call, in order. `false` if some of it was not kept, as
    /// nothing took them for long: then [`Tier::keys`] has what is held.
    fn take_changes(&self, out: &mut Vec<TierChange>) -> bool;

    /// All keys held. Costs O(keys).
    fn keys(&self) -> Vec<Box<[u8]>>;

    /// Counts so far.
    fn stats(&self) -> TierStats;

    /// Drops everything, in a time that does not depend on how much there is; what it took is freed
    /// later. [`Tier::take_changes`] says that changes are lost.
    fn clear(&self);
}

/// A block came or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TierChange {
    /// It is held from now on.
    Stored(Box<[u8]>),
    /// It no longer is.
    Removed(Box<[u8]>),
}

/// What a tier has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Blocks held.
    pub blocks: u64,
    /// Bytes held, with what a tier adds to each block.
    pub bytes: u64,
    /// Blocks stored.
    pub stored_total: u64,
    /// [`Tier::get`]s that found a block: not what peers, or a tier below, read in place.
    pub hits_total: u64,
    /// [`Tier::get`]s that found none, or a damaged one.
    pub misses_total: u64,
    /// Blocks that made room.
    pub evicted_total: u64,
    /// Blocks whose time came.
    pub expired_total: u64,
    /// Blocks that were not what was stored, and were dropped.
    pub corrupt_total: u64,
    /// Blocks that could not be stored.
    pub failed_total: u64,
}

/// Removal a tier cannot do what it was asked. The tier is usable after each of them.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// No block of this size will ever fit.
    #[error("block of {bytes} bytes exceeds the tier's {max} bytes; increase `block_bytes`")]
    TooLarge {
        /// Bytes of the block.
        bytes: usize,
        /// Bytes that fit.
        max: usize,
    },
    /// Every block that could make room is being read. A retry may help.
    #[error("all {slots} places are being read; give the host tier more bytes")]
    Pinned {
        /// Places there are.
        slots: usize,
    },
    /// A block has another length than the reader expects: they disagree about the layout.
    #[error("a block has {got} bytes where {want} are wanted; all engines need one block layout")]
    Length {
        /// Bytes wanted.
        want: usize,
        /// Bytes of the block.
        got: usize,
    },
    /// The disk refused: full, read-only or gone.
    #[error("{path}: {what} failed; free some space, or give the disk tier fewer bytes")]
    Disk {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Removal it failed.
        source: std::io::Error,
    },
    /// The folder is in use by another process.
    #[error("{path} is the disk tier of another process; give each engine a folder of its own")]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// There is no memory for it.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}
