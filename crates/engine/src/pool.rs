//! The paged KV cache: blocks, who holds them, what they cache, and which is evicted next.
//!
//! A block is *held* (reference count above 0) or *free*. A full block has a *hash*; a free block
//! that has one stays cached, and can be hit, until it is allocated for something else. Free blocks
//! are allocated in this order, which is that of vLLM's free queue:
//!
//! ```text
//!   ┌ blank ───────┐ ┌ fresh ─────┐ ┌ cached (LRU) ──────────────────┐
//!   │ last in,     │ │ never used │ │ longest free   …   just freed  │
//!   │ first out    │ │            │ │                                │
//!   └──────────────┘ └────────────┘ └────────────────────────────────┘
//! ```
//!
//! Source: vLLM 0.33 `vllm/v1/core/block_pool.py`, `BlockPool.free_blocks` (blocks without a hash
//! go to the front of the queue, those with one to its end) and `get_new_blocks` (from the front).
//!
//! A block takes memory when it is first used (but for 16 bytes in the index): an engine with a
//! large cache and few requests stays small.

use slipstream_base::{BlockHash, KvOp};

/// Index of a block in its pool.
pub type BlockId = u32;

const NIL: u32 = u32::MAX;

/// Largest pool: 2^26 blocks (10^9 tokens in blocks of 16). Keeps indices and table sizes in `u32`.
pub const BLOCKS_MAX: u32 = 1 << 26;

#[derive(Clone, Copy, Default)]
struct Block {
    /// What it caches, and what that follows; meaningful while `hashed`.
    hash: u64,
    parent: u64,
    /// Sequences that hold it.
    refs: u32,
    /// Neighbors among the copies of the same hash, oldest first: a list whose first block's
    /// `older` is its last, so that both ends are at hand.
    older: u32,
    newer: u32,
    hashed: bool,
}

/// Neighbors of a free block in the list that it is in. Apart from the blocks: walking a list is a
/// chain of waits for memory, and eight neighbors of one line are often in a row.
#[derive(Clone, Copy, Default)]
struct Link {
    prev: u32,
    next: u32,
}

/// The blocks of one engine.
pub struct BlockPool {
    total: u32,
    /// Blocks ever used; room for all.
    blocks: Vec<Block>,
    links: Vec<Link>,
    index: HashIndex,
    /// Top of the stack of free blocks without a hash.
    blank: u32,
    /// The free blocks with a hash, next to be evicted first.
    lru_first: u32,
    lru_last: u32,
    free: u32,
    cached: u32,
    /// Blocks freed so far. Only a free block can make an allocation possible that failed before.
    releases: u64,
}

impl BlockPool {
    /// A pool of `blocks` free blocks, at most [`BLOCKS_MAX`].
    pub fn new(blocks: u32) -> BlockPool {
        assert!(blocks <= BLOCKS_MAX, "checked by the engine");
        BlockPool {
            total: blocks,
            blocks: Vec::with_capacity(blocks as usize),
            links: Vec::with_capacity(blocks as usize),
            index: HashIndex::new(blocks),
            blank: NIL,
            lru_first: NIL,
            lru_last: NIL,
            free: blocks,
            cached: 0,
            releases: 0,
        }
    }

    /// All blocks.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that somebody holds.
    pub fn used(&self) -> u32 {
        self.total() - self.free
    }

    /// Distinct hashes that can be hit.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    /// Blocks freed so far.
    pub fn releases(&self) -> u64 {
        self.releases
    }

    /// The oldest block that caches `hash`.
    #[inline]
    pub fn lookup(&self, hash: BlockHash) -> Option<BlockId> {
        self.index.get(hash.0, &self.blocks)
    }

    /// True if nobody holds `block`.
    #[inline]
    pub fn is_free(&self, block: BlockId) -> bool {
        self.blocks[block as usize].refs == 0
    }

    /// What `block` caches.
    #[inline]
    pub fn hash(&self, block: BlockId) -> Option<BlockHash> {
        let block = &self.blocks[block as usize];
        block.hashed.then_some(BlockHash(block.hash))
    }

    /// Holds a cached block once more.
    #[inline]
    pub fn touch(&mut self, block: BlockId) {
        let b = &mut self.blocks[block as usize];
        b.refs += 1;
        if b.refs == 1 {
            // Only cached blocks are looked up, so it is in the LRU list.
            let Link { prev, next } = self.links[block as usize];
            self.unlink_lru(prev, next);
            self.free -= 1;
        }
    }

    /// Takes a free block for new content, and holds it once. What it cached is forgotten; if that
    /// was the last copy, `ops` hears of it.
    ///
    /// # Panics
    /// If no block is free.
    #[inline]
    pub fn allocate(&mut self, ops: &mut Vec<KvOp>) -> BlockId {
        let id = if self.blank != NIL {
            let id = self.blank;
            self.blank = self.links[id as usize].next;
            id
        } else if (self.blocks.len() as u32) < self.total {
            self.blocks.push(Block::default());
            self.links.push(Link::default());
            self.blocks.len() as u32 - 1
        } else {
            let id = self.lru_first;
            assert!(id != NIL, "allocate() is called only where free() > 0");
            let next = self.links[id as usize].next;
            self.unlink_lru(NIL, next);
            self.forget(id, ops);
            id
        };
        self.blocks[id as usize].refs = 1;
        self.free -= 1;
        id
    }

    /// Takes `count` free blocks, as [`allocate`](BlockPool::allocate) does one by one.
    pub fn allocate_many(&mut self, count: usize, table: &mut Vec<BlockId>, ops: &mut Vec<KvOp>) {
        if self.blocks.len() as u32 == self.total {
            // They come from the LRU list, and what they cached leaves the index.
            let mut at = self.lru_first;
            let victims = std::iter::from_fn(|| {
                let block = self.blocks.get(at as usize)?; // none at NIL
                at = self.links[at as usize].next;
                Some(BlockHash(block.hash))
            });
            self.foresee(victims.take(count));
        }
        table.extend((0..count).map(|_| self.allocate(ops)));
    }

    /// Reads where the index has, or would have, these hashes, and does nothing with it.
    ///
    /// The places are at random, so in a pool larger than the processor's caches each costs a wait
    /// for memory. Those of a short loop are waited for together; those of the long loops that move
    /// blocks are not. It pays where many engines take turns, as in a simulator.
    #[inline]
    pub fn foresee(&self, hashes: impl Iterator<Item = BlockHash>) {
        let seen = hashes.fold(0, |seen, hash| seen ^ self.index.peek(hash.0));
        std::hint::black_box(seen);
    }

    /// Lets go of a block. A free block without a hash is allocated next, one with a hash last.
    #[inline]
    pub fn release(&mut self, block: BlockId) {
        let lru_last = self.lru_last;
        let b = &mut self.blocks[block as usize];
        assert!(b.refs > 0, "a block is released by who holds it");
        b.refs -= 1;
        if b.refs > 0 {
            return;
        }
        self.free += 1;
        self.releases += 1;
        if b.hashed {
            self.links[block as usize] = Link {
                prev: lru_last,
                next: NIL,
            };
            self.lru_last = block;
            if lru_last == NIL {
                self.lru_first = block;
            } else {
                self.links[lru_last as usize].next = block;
            }
        } else {
            self.links[block as usize].next = self.blank;
            self.blank = block;
        }
    }

    /// Notes that `block`, which is held, is full and caches `hash`, which follows `parent`. If it
    /// is the first copy, `ops` hears of it.
    #[inline]
    pub fn cache(
        &mut self,
        block: BlockId,
        hash: BlockHash,
        parent: BlockHash,
        ops: &mut Vec<KvOp>,
    ) {
        let b = &mut self.blocks[block as usize];
        debug_assert!(b.refs > 0 && !b.hashed, "a held block becomes full once");
        b.hash = hash.0;
        b.parent = parent.0;
        b.hashed = true;
        match self.index.insert(hash.0, block, &self.blocks) {
            None => {
                let b = &mut self.blocks[block as usize];
                (b.older, b.newer) = (block, NIL);
                self.cached += 1;
                ops.push(KvOp::Stored { hash, parent });
            }
            Some(first) => {
                let last = self.blocks[first as usize].older;
                self.blocks[last as usize].newer = block;
                let b = &mut self.blocks[block as usize];
                (b.older, b.newer) = (last, NIL);
                self.blocks[first as usize].older = block;
            }
        }
    }

    /// Forgets everything cached; false, with nothing changed, while any block is held.
    pub fn reset(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        let releases = self.releases;
        *self = BlockPool::new(self.total());
        self.releases = releases + 1;
        true
    }

    /// Each distinct cached hash with its parent, in the order of block numbers.
    pub fn cached_blocks(&self) -> impl Iterator<Item = (BlockHash, BlockHash)> + '_ {
        self.blocks
            .iter()
            // The oldest copy stands for all: it is the one whose `older` is the list's end.
            .filter(|b| b.hashed && self.blocks[b.older as usize].newer == NIL)
            .map(|b| (BlockHash(b.hash), BlockHash(b.parent)))
    }

    /// Takes a block out of the LRU list, given its neighbors there.
    #[inline]
    fn unlink_lru(&mut self, prev: u32, next: u32) {
        if prev == NIL {
            self.lru_first = next;
        } else {
            self.links[prev as usize].next = next;
        }
        if next == NIL {
            self.lru_last = prev;
        } else {
            self.links[next as usize].prev = prev;
        }
    }

    /// Takes the hash off `block`.
    #[inline]
    fn forget(&mut self, block: BlockId, ops: &mut Vec<KvOp>) {
        let Block {
            hash, older, newer, ..
        } = self.blocks[block as usize];
        self.blocks[block as usize].hashed = false;
        if older == block {
            self.index.remove(hash, block);
            self.cached -= 1;
            ops.push(KvOp::Removed {
                hash: BlockHash(hash),
            });
        } else if self.blocks[older as usize].newer == NIL {
            // The oldest of several: the next one takes its place in the index and as list head.
            self.index.replace(hash, block, newer);
            self.blocks[newer as usize].older = older;
        } else {
            self.blocks[older as usize].newer = newer;
            if newer == NIL {
                let first = self
                    .index
                    .get(hash, &self.blocks)
                    .expect("a newer copy's hash is in the index");
                self.blocks[first as usize].older = older;
            } else {
                self.blocks[newer as usize].older = older;
            }
        }
    }

    /// Checks every invariant in O(blocks); `held` is how often each block should be held. For tests.
    #[doc(hidden)]
    pub fn audit(&self, held: &std::collections::HashMap<BlockId, u32>) {
        let mut free = self.total - self.blocks.len() as u32;
        let mut distinct = std::collections::HashSet::new();
        for (id, block) in self.blocks.iter().enumerate() {
            let id = id as BlockId;
            assert_eq!(
                block.refs,
                held.get(&id).copied().unwrap_or(0),
                "references of {id}"
            );
            free += u32::from(block.refs == 0);
            if block.hashed {
                distinct.insert(block.hash);
                let first = self
                    .lookup(BlockHash(block.hash))
                    .expect("a hashed block can be found");
                let copies = self.copies(first);
                assert!(copies.contains(&id), "{id} is among the copies of its hash");
            }
        }
        assert_eq!(free, self.free, "free blocks");
        assert_eq!(distinct.len() as u32, self.cached, "distinct hashes");
        let mut listed = self.total - self.blocks.len() as u32;
        let mut at = self.blank;
        while at != NIL {
            let block = &self.blocks[at as usize];
            assert!(block.refs == 0 && !block.hashed, "blank block {at}");
            listed += 1;
            at = self.links[at as usize].next;
        }
        let (mut at, mut prev) = (self.lru_first, NIL);
        while at != NIL {
            let block = &self.blocks[at as usize];
            assert!(block.refs == 0 && block.hashed && self.links[at as usize].prev == prev);
            listed += 1;
            (prev, at) = (at, self.links[at as usize].next);
        }
        assert_eq!(prev, self.lru_last);
        assert_eq!(listed, self.free, "blocks in the free lists");
    }

    fn copies(&self, first: BlockId) -> Vec<BlockId> {
        let mut copies = vec![first];
        let mut at = self.blocks[first as usize].newer;
        while at != NIL {
            copies.push(at);
            at = self.blocks[at as usize].newer;
        }
        assert_eq!(self.blocks[first as usize].older, copies[copies.len() - 1]);
        copies
    }
}

/// Hash to first block: buckets of one cache line, each with seven places.
///
/// Hashes are already mixed (XXH3), so a bucket is chosen by their upper half, and a place holds no
/// more than that half and a block. What does not fit its bucket spills into the next ones, which a
/// bucket counts: a search goes on only where something spilled, and removal leaves neither
/// tombstones nor holes to close. It never grows, so no insertion is ever slow. At most 4 of 7
/// places are in use on average, so about one bucket in twenty spills (a Poisson variable of mean 4
/// exceeds 7 with a probability of 0.051); almost every branch is foreseen by the processor.
struct HashIndex {
    buckets: Vec<Bucket>,
    mask: usize,
}

const PLACES: usize = 7;

#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket {
    /// Upper halves of the hashes. The last one is not used.
    tags: [u32; PLACES + 1],
    /// Blocks plus one, 0 where there is none. Last: how many entries that belong here, or before,
    /// went past this bucket.
    blocks: [u32; PLACES + 1],
}

impl Bucket {
    fn spilled(&self) -> u32 {
        self.blocks[PLACES]
    }

    /// Places whose tag is `tag`; may include empty ones.
    #[inline]
    fn tagged(&self, tag: u32) -> Places {
        Places::of(&self.tags, tag)
    }

    /// Place of `block`, as it is stored: plus one, 0 for an empty place.
    #[inline]
    fn place_of(&self, stored: u32) -> Option<usize> {
        Places::of(&self.blocks, stored).next()
    }
}

/// A set of places, lowest first.
struct Places(u32);

impl Places {
    #[inline]
    fn of(lanes: &[u32; PLACES + 1], value: u32) -> Places {
        let mut equal = 0;
        for (i, &lane) in lanes.iter().enumerate() {
            equal |= u32::from(lane == value) << i;
        }
        Places(equal & ((1 << PLACES) - 1))
    }
}

impl Iterator for Places {
    type Item = usize;
    #[inline]
    fn next(&mut self) -> Option<usize> {
        let place = self.0.trailing_zeros() as usize;
        self.0 &= self.0.wrapping_sub(1);
        (place < PLACES).then_some(place)
    }
}

impl HashIndex {
    fn new(blocks: u32) -> HashIndex {
        let buckets = (blocks as usize).div_ceil(4).next_power_of_two();
        HashIndex {
            buckets: vec![Bucket::default(); buckets],
            mask: buckets - 1,
        }
    }

    #[inline]
    fn tag(hash: u64) -> u32 {
        (hash >> 32) as u32
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        Self::tag(hash) as usize & self.mask
    }

    /// Something of the bucket where the search for `hash` would begin.
    #[inline]
    fn peek(&self, hash: u64) -> u32 {
        self.buckets[self.home(hash)].spilled()
    }

    #[inline]
    fn get(&self, hash: u64, blocks: &[Block]) -> Option<BlockId> {
        let mut at = self.home(hash);
        loop {
            let bucket = &self.buckets[at];
            for place in bucket.tagged(Self::tag(hash)) {
                let stored = bucket.blocks[place];
                if stored != 0 && blocks[stored as usize - 1].hash == hash {
                    return Some(stored - 1);
                }
            }
            if bucket.spilled() == 0 {
                return None;
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Enters `block` as the first of its hash, unless there is one: then returns that.
    #[inline]
    fn insert(&mut self, hash: u64, block: BlockId, blocks: &[Block]) -> Option<BlockId> {
        let found = self.get(hash, blocks);
        if found.is_none() {
            let mut at = self.home(hash);
            loop {
                let bucket = &mut self.buckets[at];
                if let Some(place) = bucket.place_of(0) {
                    bucket.tags[place] = Self::tag(hash);
                    bucket.blocks[place] = block + 1;
                    break;
                }
                bucket.blocks[PLACES] += 1;
                at = (at + 1) & self.mask;
            }
        }
        found
    }

    /// Puts `new` in the place of `old`, the first of `hash`.
    fn replace(&mut self, hash: u64, old: BlockId, new: BlockId) {
        let mut at = self.home(hash);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some(place) = bucket.place_of(old + 1) {
                bucket.blocks[place] = new + 1;
                return;
            }
            assert!(bucket.spilled() > 0, "a cached block is in the index");
            at = (at + 1) & self.mask;
        }
    }

    /// Takes out `block`, the first of `hash`.
    #[inline]
    fn remove(&mut self, hash: u64, block: BlockId) {
        let mut at = self.home(hash);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some(place) = bucket.place_of(block + 1) {
                bucket.blocks[place] = 0;
                return;
            }
            assert!(bucket.spilled() > 0, "a cached block is in the index");
            // It went past this bucket, and no longer does.
            bucket.blocks[PLACES] -= 1;
            at = (at + 1) & self.mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    fn hash(n: u64) -> BlockHash {
        BlockHash::default().child_of_id(n, 0)
    }

    #[test]
    fn evicts_the_block_that_was_free_longest() {
        let mut pool = BlockPool::new(3);
        let mut ops = Vec::new();
        let held: Vec<BlockId> = (0..3).map(|_| pool.allocate(&mut ops)).collect();
        for (&block, n) in held.iter().zip(1..) {
            pool.cache(block, hash(n), hash(0), &mut ops);
        }
        // Freed in the order 2, 0, 1; then 2 is hit and freed again, so 0 is the oldest.
        for i in [2, 0, 1] {
            pool.release(held[i]);
        }
        let hit = pool.lookup(hash(3)).unwrap();
        pool.touch(hit);
        pool.release(hit);
        ops.clear();
        for _ in 0..3 {
            pool.allocate(&mut ops);
        }
        let removed = |n| KvOp::Removed { hash: hash(n) };
        assert_eq!(ops, [removed(1), removed(2), removed(3)]);
    }

    #[test]
    fn blocks_without_a_hash_are_taken_before_any_is_evicted() {
        let mut pool = BlockPool::new(2);
        let mut ops = Vec::new();
        let (a, b) = (pool.allocate(&mut ops), pool.allocate(&mut ops));
        pool.cache(a, hash(1), hash(0), &mut ops);
        pool.release(a);
        pool.release(b);
        ops.clear();
        assert_eq!(pool.allocate(&mut ops), b);
        assert_eq!(ops, []);
        assert_eq!(pool.lookup(hash(1)), Some(a));
    }

    #[test]
    fn only_the_first_copy_is_stored_and_the_last_removed() {
        let mut pool = BlockPool::new(3);
        let mut ops = Vec::new();
        let held: Vec<BlockId> = (0..3).map(|_| pool.allocate(&mut ops)).collect();
        for &block in &held {
            pool.cache(block, hash(7), hash(0), &mut ops);
        }
        assert_eq!(
            ops,
            [KvOp::Stored {
                hash: hash(7),
                parent: hash(0)
            }]
        );
        assert_eq!(pool.lookup(hash(7)), Some(held[0]), "the oldest is hit");
        ops.clear();
        pool.release(held[1]);
        pool.release(held[0]);
        pool.release(held[2]);
        pool.allocate(&mut ops); // takes held[1], the middle copy
        assert_eq!(pool.lookup(hash(7)), Some(held[0]));
        pool.allocate(&mut ops); // takes held[0], the first
        assert_eq!(pool.lookup(hash(7)), Some(held[2]));
        assert_eq!(ops, []);
        pool.allocate(&mut ops);
        assert_eq!(pool.lookup(hash(7)), None);
        assert_eq!(ops, [KvOp::Removed { hash: hash(7) }]);
    }

    #[test]
    fn reset_waits_until_nothing_is_held() {
        let mut pool = BlockPool::new(2);
        let mut ops = Vec::new();
        let a = pool.allocate(&mut ops);
        pool.cache(a, hash(1), hash(0), &mut ops);
        assert!(!pool.reset());
        assert_eq!(pool.lookup(hash(1)), Some(a));
        pool.release(a);
        assert!(pool.reset());
        assert_eq!(
            (pool.lookup(hash(1)), pool.cached(), pool.free()),
            (None, 0, 2)
        );
    }

    /// The pool as a queue and a map of lists, as slow and plain as can be.
    #[derive(Default)]
    struct Plain {
        free: VecDeque<BlockId>,
        refs: BTreeMap<BlockId, u32>,
        hashes: BTreeMap<BlockId, u64>,
        copies: BTreeMap<u64, Vec<BlockId>>,
        ops: Vec<KvOp>,
    }

    impl Plain {
        fn allocate(&mut self) -> BlockId {
            let block = self.free.pop_front().unwrap();
            if let Some(h) = self.hashes.remove(&block) {
                let copies = self.copies.get_mut(&h).unwrap();
                copies.retain(|&b| b != block);
                if copies.is_empty() {
                    self.copies.remove(&h);
                    self.ops.push(KvOp::Removed { hash: hash(h) });
                }
            }
            self.refs.insert(block, 1);
            block
        }
        fn cache(&mut self, block: BlockId, h: u64) {
            self.hashes.insert(block, h);
            let copies = self.copies.entry(h).or_default();
            if copies.is_empty() {
                self.ops.push(KvOp::Stored {
                    hash: hash(h),
                    parent: hash(0),
                });
            }
            copies.push(block);
        }
        fn touch(&mut self, block: BlockId) {
            self.free.retain(|&b| b != block);
            *self.refs.entry(block).or_default() += 1;
        }
        fn release(&mut self, block: BlockId) {
            let refs = self.refs.get_mut(&block).unwrap();
            *refs -= 1;
            if *refs == 0 {
                self.refs.remove(&block);
                if self.hashes.contains_key(&block) {
                    self.free.push_back(block);
                } else {
                    self.free.push_front(block);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn agrees_with_a_plain_pool(
            size in 1u32..12,
            ops in prop::collection::vec((0u8..4, 0usize..64, 1u64..8), 0..200),
        ) {
            let mut pool = BlockPool::new(size);
            let mut heard = Vec::new();
            let mut plain = Plain { free: (0..size).collect(), ..Plain::default() };
            let mut held: Vec<BlockId> = Vec::new(); // one entry a reference
            for (op, pick, h) in ops {
                match op {
                    0 if pool.free() > 0 => {
                        let block = pool.allocate(&mut heard);
                        prop_assert_eq!(block, plain.allocate());
                        held.push(block);
                    }
                    1 if !held.is_empty() => {
                        let block = held.swap_remove(pick % held.len());
                        pool.release(block);
                        plain.release(block);
                    }
                    2 if !held.is_empty() => {
                        let block = held[pick % held.len()];
                        if pool.hash(block).is_none() {
                            pool.cache(block, hash(h), hash(0), &mut heard);
                            plain.cache(block, h);
                        }
                    }
                    3 => {
                        let found = pool.lookup(hash(h));
                        prop_assert_eq!(found, plain.copies.get(&h).map(|c| c[0]));
                        if let Some(block) = found {
                            pool.touch(block);
                            plain.touch(block);
                            held.push(block);
                        }
                    }
                    _ => {}
                }
                let mut refs = HashMap::new();
                for &block in &held {
                    *refs.entry(block).or_insert(0) += 1;
                }
                pool.audit(&refs);
                prop_assert_eq!(pool.cached() as usize, plain.copies.len());
            }
            prop_assert_eq!(&heard, &plain.ops);
            let mut listed: Vec<u64> = pool.cached_blocks().map(|(h, _)| h.0).collect();
            let mut expected: Vec<u64> = plain.copies.keys().map(|&h| hash(h).0).collect();
            listed.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(listed, expected);
        }

        /// Many keys that share a home slot: deletion must not cut their chains.
        #[test]
        fn index_survives_crowded_slots(ops in prop::collection::vec((any::<bool>(), 0u32..16), 0..300)) {
            let mut index = HashIndex::new(16);
            // Blocks 0 to 15; the upper halves collide in groups of eight.
            let key = |b: u32| (u64::from(30 + b / 8) << 32) | u64::from(b);
            let mut blocks = vec![Block::default(); 16];
            for b in 0..16 {
                blocks[b as usize].hash = key(b);
            }
            let mut present = [false; 16];
            for (add, b) in ops {
                if add {
                    let found = index.insert(key(b), b, &blocks);
                    prop_assert_eq!(found.is_some(), present[b as usize]);
                    present[b as usize] = true;
                } else if present[b as usize] {
                    index.remove(key(b), b);
                    present[b as usize] = false;
                }
                for b in 0..16 {
                    prop_assert_eq!(index.get(key(b), &blocks), present[b as usize].then_some(b));
                }
            }
        }
    }
}
