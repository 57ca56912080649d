//! The exact index: owners by block hash, fed by KV deltas.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use slipstream_base::{BlockHash, KvDelta, KvOp};

/// Who holds which block, shared by routers (readers) and engine threads (writers).
pub struct BlockIndex {
    inner: Mutex<Inner>,
}

struct Inner {
    owners: HashMap<BlockHash, Vec<bool>>,
    streams: Vec<Stream>,
}

#[derive(Clone, Copy)]
struct Stream {
    next: u64,
    trusted: bool,
}

/// What came of a delta.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Deltas before this one are missing. The target counts as holding nothing until a snapshot
    /// ([`KvOp::Cleared`], then every block held) arrives; ask its engine for one.
    pub gap: bool,
    /// Seen before, and ignored whole.
    pub duplicate: bool,
    /// Blocks that the target holds and did not before.
    pub stored: u32,
    /// Blocks that the target held and does no longer.
    pub removed: u32,
    /// Blocks that found no room: the target holds more than was promised in `new`. They count as
    /// not cached.
    pub dropped: u32,
}

impl BlockIndex {
    /// An empty index for `targets` owners that hold at most `capacity_blocks_total` blocks
    /// between them (the sum of their `num_gpu_blocks`).
    pub fn new(targets: usize, capacity_blocks_total: usize) -> BlockIndex {
        let _ = capacity_blocks_total;
        BlockIndex {
            inner: Mutex::new(Inner {
                owners: HashMap::new(),
                streams: vec![
                    Stream {
                        next: 0,
                        trusted: true
                    };
                    targets
                ],
            }),
        }
    }

    /// Number of owners.
    pub fn targets(&self) -> usize {
        self.lock().streams.len()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies the changes of one pass of `target`.
    ///
    /// A delta older than expected is ignored as a duplicate. One that is newer than expected is a
    /// gap: the target is not trusted until a delta that begins with [`KvOp::Cleared`] (a snapshot)
    /// arrives, in the same stream or by [`BlockIndex::resync`].
    pub fn apply(&self, target: usize, delta: &KvDelta) -> Applied {
        let inner = &mut *self.lock();
        let stream = &mut inner.streams[target];
        if delta.sequence < stream.next {
            return Applied {
                duplicate: true,
                ..Applied::default()
            };
        }
        let missing = delta.sequence > stream.next;
        stream.next = delta.sequence + 1;
        if delta.ops.first() == Some(&KvOp::Cleared) {
            stream.trusted = true;
        } else if missing || !stream.trusted {
            stream.trusted = false;
            return Applied {
                gap: true,
                ..Applied::default()
            };
        }
        inner.change(target, &delta.ops)
    }

    /// Replaces all that `target` holds by `snapshot`, whatever its sequence; deltas go on after it.
    pub fn resync(&self, target: usize, snapshot: &KvDelta) -> Applied {
        let inner = &mut *self.lock();
        inner.streams[target] = Stream {
            next: snapshot.sequence + 1,
            trusted: true,
        };
        inner.change(target, &[KvOp::Cleared]);
        inner.change(target, &snapshot.ops)
    }

    /// Forgets `target`, whose engine is gone; the next one starts at sequence 0.
    pub fn forget(&self, target: usize) {
        let inner = &mut *self.lock();
        inner.streams[target] = Stream {
            next: 0,
            trusted: true,
        };
        inner.change(target, &[KvOp::Cleared]);
    }

    /// For each target, how many leading `blocks` it holds without a break. Shape of `out`: `[T]`.
    pub fn overlap(&self, blocks: &[BlockHash], out: &mut [u32]) {
        let inner = self.lock();
        for (target, hit) in out.iter_mut().enumerate() {
            *hit = inner.leading(target, blocks);
        }
    }

    /// How many leading `blocks` one target holds without a break.
    pub fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        self.lock().leading(target, blocks)
    }

    /// Whether what is known of `target` is complete; `false` from a gap to the next snapshot.
    pub fn is_trusted(&self, target: usize) -> bool {
        self.lock().streams[target].trusted
    }

    /// Blocks that `target` holds.
    pub fn held(&self, target: usize) -> u64 {
        self.lock()
            .owners
            .values()
            .filter(|owners| owners[target])
            .count() as u64
    }
}

impl Inner {
    fn change(&mut self, target: usize, ops: &[KvOp]) -> Applied {
        let targets = self.streams.len();
        let mut applied = Applied::default();
        for op in ops {
            match *op {
                KvOp::Stored { hash, .. } => {
                    let owners = self
                        .owners
                        .entry(hash)
                        .or_insert_with(|| vec![false; targets]);
                    applied.stored += u32::from(!owners[target]);
                    owners[target] = true;
                }
                KvOp::Removed { hash } => {
                    if let Some(owners) = self.owners.get_mut(&hash) {
                        applied.removed += u32::from(owners[target]);
                        owners[target] = false;
                    }
                }
                KvOp::Cleared => {
                    for owners in self.owners.values_mut() {
                        applied.removed += u32::from(owners[target]);
                        owners[target] = false;
                    }
                }
            }
        }
        applied
    }

    fn leading(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        if !self.streams[target].trusted {
            return 0;
        }
        blocks
            .iter()
            .take_while(|hash| self.owners.get(hash).is_some_and(|owners| owners[target]))
            .count() as u32
    }
}
