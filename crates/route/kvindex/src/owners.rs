//! The table with its writers' locks, and the walk along a prompt.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use slipstream_base::BlockHash;
use slipstream_base::sync::lock;
use slipstream_base::width::to_u32;

use crate::table::{Full, Table};

/// Owners by block, for any number of readers and writers.
pub(crate) struct Owners {
    table: Table<AtomicU64>,
    /// One lock per shard of the table, for writers.
    locks: Box<[Padded<Mutex<()>>]>,
    /// There is only one writer, which takes no lock.
    single_writer: AtomicBool,
    targets: usize,
    /// Maximum number of blocks from one look-up to the next; see [`STRIDE`].
    stride: usize,
}

/// Keeps data that one thread writes off the cache lines of others.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// Some of the targets `64 * word..64 * word + 64`, one bit each.
#[derive(Clone, Copy, Default)]
struct Bits {
    word: usize,
    bits: u64,
}

/// Words of owners that a walk keeps on the stack: 1,024 targets.
const STACK_WORDS: usize = 16;

/// Blocks from one look-up to the next, once the start of a prompt is known to be cached.
///
/// The owners of the skipped blocks are assumed to be those that hold both ends. That is correct if
/// the blocks of a target are closed under "the block before", as in an LRU of whole
/// chains: vLLM frees a chain's blocks from its end (`KVCacheManager.free` in
/// `vllm/v1/core/kv_cache_manager.py`), so a block is never evicted before its successors.
/// Otherwise a hit may be counted too long, and the chosen worker may hold less than the index
/// reported.
const STRIDE: usize = 8;
/// Maximum look-ups started together, so that their cache misses overlap.
const GROUP: usize = 16;

impl Owners {
    pub(crate) fn new(targets: usize, keys: usize) -> Owners {
        let table = Table::new(targets, keys);
        Owners {
            locks: (0..table.shards()).map(|_| Padded::default()).collect(),
            single_writer: AtomicBool::new(false),
            table,
            targets,
            stride: STRIDE,
        }
    }

    /// An index whose walks look up every block.
    pub(crate) fn exact(targets: usize, keys: usize) -> Owners {
        Owners {
            stride: 1,
            ..Owners::new(targets, keys)
        }
    }

    pub(crate) fn targets(&self) -> usize {
        self.targets
    }

    pub(crate) fn words(&self) -> usize {
        self.table.owner_words()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.table.bytes()
    }

    /// From now on writers exclude each other: changes take no lock.
    pub(crate) fn promise_single_writer(&self) {
        self.single_writer.store(true, Ordering::Release);
    }

    fn lock(&self, shard: usize) -> Option<MutexGuard<'_, ()>> {
        if self.single_writer.load(Ordering::Relaxed) {
            return None;
        }
        Some(lock(&self.locks[shard].0))
    }

    /// Records that `target` holds `hash`. Returns whether that is new.
    pub(crate) fn insert(&self, hash: BlockHash, target: usize) -> Result<bool, Full> {
        let _lock = self.lock(self.table.shard_of(hash));
        self.table.insert(hash, target)
    }

    /// Prefetches the entries of `hashes` together.
    pub(crate) fn touch(&self, hashes: impl Iterator<Item = BlockHash>) {
        std::hint::black_box(hashes.fold(0, |seen, hash| seen ^ self.table.touch(hash)));
    }

    /// Removes `hash` from `target`. Returns whether it was held.
    pub(crate) fn remove(&self, hash: BlockHash, target: usize) -> bool {
        let _lock = self.lock(self.table.shard_of(hash));
        self.table.remove(hash, target)
    }

    /// Removes all blocks of `target`. Returns the number of them. Costs the size of the table.
    pub(crate) fn clear(&self, target: usize) -> u64 {
        (0..self.locks.len())
            .map(|shard| {
                let _lock = self.lock(shard);
                self.table.clear(shard, target)
            })
            .sum()
    }

    /// Writes to `out` the number of leading `blocks` of each target whose bit is set in
    /// the word that `trusted` returns; 0 for others.
    pub(crate) fn overlap(
        &self,
        blocks: &[BlockHash],
        out: &mut [u32],
        trusted: impl Fn(usize) -> u64,
    ) {
        assert_eq!(out.len(), self.targets, "one count a target");
        out.fill(0);
        let all = |word: usize| match (self.targets - word * 64).min(64) {
            0 => 0,
            targets => u64::MAX >> (64 - targets),
        };
        let start = |word: usize| Bits {
            word,
            bits: all(word) & trusted(word),
        };
        let ended = |target: usize, hit: u32| out[target] = hit;
        let words = self.words();
        let mut stack = [Bits::default(); STACK_WORDS];
        let mut heap = Vec::new();
        let alive = if words <= STACK_WORDS {
            &mut stack[..words]
        } else {
            heap.resize(words, Bits::default());
            &mut heap[..]
        };
        for (word, alive) in alive.iter_mut().enumerate() {
            *alive = start(word);
        }
        self.walk(blocks, alive, ended);
    }

    /// Whether `target` holds `hash`.
    pub(crate) fn holds(&self, target: usize, hash: BlockHash) -> bool {
        self.owners(self.table.find(hash), hash, target / 64) >> (target % 64) & 1 == 1
    }

    /// The number of leading `blocks` that `target` holds.
    pub(crate) fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        let mut leading = 0;
        let only = Bits {
            word: target / 64,
            bits: 1 << (target % 64),
        };
        self.walk(blocks, &mut [only], |_, hit| leading = hit);
        leading
    }

    /// Walks `blocks` for the targets in `alive`, and reports the length of each one's run.
    #[inline]
    fn walk(&self, blocks: &[BlockHash], alive: &mut [Bits], mut ended: impl FnMut(usize, u32)) {
        let mut live = alive.len();
        // A prompt without a hit takes two look-ups.
        let (mut stride, mut count) = (1, 2);
        let mut settled = 0;
        while settled < blocks.len() && live > 0 {
            let mut ends = [0; GROUP];
            let mut stretches = 0;
            let mut end = settled;
            while stretches < count && end < blocks.len() {
                end = blocks.len().min(end + stride);
                ends[stretches] = end - 1;
                stretches += 1;
            }
            let slots: [_; GROUP] = self.find(ends[..stretches].iter().map(|&end| blocks[end]));
            for (&end, &slot) in ends[..stretches].iter().zip(&slots) {
                let hash = blocks[end];
                if self.keeps_all(slot, hash, &alive[..live]) {
                    settled = end + 1;
                    continue;
                }
                // Some target's run ends here: look up each block of the stretch.
                let slots: [_; STRIDE] = self.find(blocks[settled..end].iter().copied());
                let between = blocks[settled..end].iter().copied().zip(slots);
                for (hash, slot) in between.chain([(hash, slot)]) {
                    live = self.keep(slot, hash, &mut alive[..live], |target| {
                        ended(target, to_u32(settled));
                    });
                    settled += 1;
                }
                if live == 0 {
                    return;
                }
            }
            (stride, count) = (self.stride.min(stride * 4), GROUP.min(count * 2));
        }
        for alive in &alive[..live] {
            for_each(*alive, |target| ended(target, to_u32(settled)));
        }
    }

    /// Slots of up to `N` hashes; empty for positions beyond the last hash.
    #[inline]
    fn find<const N: usize>(
        &self,
        hashes: impl ExactSizeIterator<Item = BlockHash>,
    ) -> [Option<usize>; N] {
        let mut slots = [None; N];
        for (slot, hash) in slots.iter_mut().zip(hashes) {
            *slot = self.table.find(hash);
        }
        slots
    }

    #[inline]
    fn owners(&self, slot: Option<usize>, hash: BlockHash, word: usize) -> u64 {
        slot.map_or(0, |slot| self.table.owners(slot, hash, word))
    }

    /// Whether all targets in `alive` own `hash`.
    #[inline]
    fn keeps_all(&self, slot: Option<usize>, hash: BlockHash, alive: &[Bits]) -> bool {
        alive
            .iter()
            .all(|alive| alive.bits & !self.owners(slot, hash, alive.word) == 0)
    }

    /// Keeps the targets of `alive` that own `hash`, at the front; returns the number of words left.
    #[inline]
    fn keep(
        &self,
        slot: Option<usize>,
        hash: BlockHash,
        alive: &mut [Bits],
        mut lost: impl FnMut(usize),
    ) -> usize {
        let mut live = 0;
        for at in 0..alive.len() {
            let Bits { word, bits } = alive[at];
            let owners = self.owners(slot, hash, word);
            let gone = bits & !owners;
            for_each(Bits { word, bits: gone }, &mut lost);
            // Words without a target are dropped: few remain after the first blocks.
            if bits & owners != 0 {
                alive[live] = Bits {
                    word,
                    bits: bits & owners,
                };
                live += 1;
            }
        }
        live
    }
}

#[inline]
fn for_each(Bits { word, mut bits }: Bits, mut f: impl FnMut(usize)) {
    while bits != 0 {
        f(word * 64 + bits.trailing_zeros() as usize);
        bits &= bits - 1;
    }
}
