//! The paged KV cache: blocks, who holds them, what they cache, and which is evicted next.
//!
//! A block is *held* (by one sequence or more) or *free*. A full block has a *hash*; a free block that
//! has one stays cached, and can be hit, until it is allocated for something else. Free blocks are
//! allocated in this order, which is that of vLLM's free queue:
//!
//! ```text
//!   ┌ blank ───────┐ ┌ cached (LRU) ──────────────────┐
//!   │ have no hash │ │ longest free   …   just freed  │
//!   └──────────────┘ └────────────────────────────────┘
//! ```
//!
//! Source: vLLM 0.33 `vllm/v1/core/block_pool.py`, `BlockPool.free_blocks` (blocks without a hash
//! go to the front of the queue, those with one to its end) and `get_new_blocks` (from the front).
//!
//! # Runs
//!
//! Sequences take, fill and release many blocks in a row, and a sequence releases its last block first,
//! so neighbors of a prompt stay neighbors in the LRU order. Blocks are therefore kept as *runs*:
//! stretches of one chain with the same holders, of which the LRU list has each as one entry, to be
//! evicted from its end. A prompt of hundreds of blocks is one or a few runs; taking, caching,
//! releasing and evicting it costs a few accesses to memory and not some for each block.
//!
//! ```text
//!   prompt A  a0 a1 a2 a3 a4 a5        heads: a0 → ┌ a0 a1 a2 ┐ held by A and B
//!   prompt B  a0 a1 a2 b3 b4                       └──────────┘
//!                                             a3 → ┌ a3 a4 a5 ┐ held by A
//!                                             b3 → ┌ b3 b4 ┐    held by B
//! ```
//!
//! A block is found by following its prompt: from the run that the first hash heads to the end of
//! that, then on to the run that the next hash heads. So a run ends wherever two prompts part, and is
//! *split* where it did not. Hashes are chained: where two are equal so is all that comes before, and
//! where one is not cached nothing that follows is (the block before is released later, and so evicted
//! later). A question about a stretch of hashes therefore needs few of them.
//!
//! A block that has no hash is nothing but a number: how many of them are free, and in each table.
//! Memory is 64 bytes a run and 8 to 16 a cached block, taken as they come to be.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, KvOp};

const NIL: u32 = u32::MAX;

/// Largest pool: 2^26 blocks (10^9 tokens in blocks of 16). Keeps counts of tokens in their types.
pub const BLOCKS_MAX: u32 = 1 << 26;

/// Which changes of a KV cache are published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvChanges {
    /// Every block.
    #[default]
    All,
    /// Blocks that are the first of their prompts: enough to know who may have anything of a prompt.
    FirstBlocks,
    /// None.
    None,
}

/// The blocks of one engine.
pub struct BlockPool {
    total: u32,
    /// Free blocks without a hash.
    blank: u32,
    /// Free blocks with one: those in the LRU list.
    idle: u32,
    /// Runs by number; numbers are used again.
    runs: Vec<Run>,
    /// First of the unused numbers, linked by `next`.
    spare: u32,
    /// The run that a hash heads, of runs that can be hit.
    heads: HashMap<BlockHash, u32, BuildHasherDefault<ChainHasher>>,
    /// Blocks with a hash that another one had before them: what takes its place when that is evicted.
    /// Each is a run by itself, and cannot be hit until then. The oldest and the youngest of a hash,
    /// linked by `younger`.
    copies: HashMap<BlockHash, (u32, u32), BuildHasherDefault<ChainHasher>>,
    buffers: Buffers,
    /// The run that is evicted next, and the last.
    lru_first: u32,
    lru_last: u32,
    cached: u32,
    /// Blocks freed so far. Only a free block can make an allocation possible that failed before.
    releases: u64,
    /// A hash that is waited for, and whether it was cached since.
    watched: Option<BlockHash>,
    watched_came: bool,
    /// Which changes are listed.
    lists: KvChanges,
    /// Number of the changes since [`BlockPool::publish`].
    epoch: u32,
    /// Runs of which blocks were evicted since then, some twice.
    shrunk: Vec<u32>,
    /// Runs that were published and have been evicted since, by their heads.
    ghosts: HashMap<BlockHash, u32, BuildHasherDefault<ChainHasher>>,
}

/// Blocks that follow each other in a chain and have the same holders. One cache line.
#[repr(align(64))]
struct Run {
    /// Hashes of its blocks; behind them those of blocks that were published and have been evicted since.
    hashes: Vec<BlockHash>,
    /// Hash that the first block follows.
    parent: BlockHash,
    /// Blocks; 0 if this is no run, or a ghost.
    len: u32,
    /// Of `hashes`, those that were cached when changes were last published; all of its blocks, unless it has changed since.
    published: u32,
    /// The epoch of its last change.
    epoch: u32,
    /// Sequences that hold it.
    refs: u32,
    /// Neighbors in the LRU list, if no sequence holds it. Otherwise `next` is the run that was split off its
    /// end while it was held: earlier holders hold a part of that, too.
    prev: u32,
    next: u32,
    /// The copy of the same hash that came after it, if this is a copy.
    younger: u32,
    /// Its one block is a copy of a block that is in another run.
    copy: bool,
    /// Its first block is the first of a prompt.
    opens: bool,
    /// Another run may follow its last block, so that it must end there.
    sealed: bool,
    /// Evicted, but remembered until that is published.
    ghost: bool,
}

impl Run {
    /// The hashes of its blocks.
    #[inline]
    fn blocks(&self) -> &[BlockHash] {
        &self.hashes[..self.len as usize]
    }

    /// Of `hashes`, those that were cached when `epoch`, which is now, began.
    #[inline]
    fn published(&self, epoch: u32) -> u32 {
        if self.epoch == epoch {
            self.published
        } else {
            self.len
        }
    }

    /// It will change in `epoch`, which is now.
    #[inline]
    fn before_change(&mut self, epoch: u32) {
        (self.published, self.epoch) = (self.published(epoch), epoch);
    }
}

/// A part of a table: `len` blocks that begin with the first of `run`, and continue in the runs that were split off
/// it.
#[derive(Clone, Copy, Debug)]
struct Segment {
    run: u32,
    len: u32,
}

impl Default for Segment {
    fn default() -> Segment {
        Segment { run: NIL, len: 0 }
    }
}

/// The blocks that a sequence holds, in order: those that are cached, then those without a hash.
#[derive(Debug, Default)]
pub struct Table {
    /// Its segments but the last one.
    earlier: Vec<Segment>,
    /// The last one; of run `NIL` if there is none.
    last: Segment,
    /// The last block's hash, if it has a segment.
    last_hash: BlockHash,
    cached: u32,
    blank: u32,
}

impl Table {
    /// Blocks in it.
    #[inline]
    #[must_use]
    pub fn len(&self) -> u32 {
        self.cached + self.blank
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it has memory that another sequence could use.
    pub(crate) fn has_room(&self) -> bool {
        self.earlier.capacity() > 0
    }

    fn push(&mut self, segment: Segment) {
        if self.last.run != NIL {
            self.earlier.push(self.last);
        }
        self.last = segment;
    }

    fn segments(&self) -> impl DoubleEndedIterator<Item = Segment> + '_ {
        let last = (self.last.run != NIL).then_some(self.last);
        self.earlier.iter().copied().chain(last)
    }

    /// Of its blocks, those that have a hash.
    #[must_use]
    pub fn cached(&self) -> u32 {
        self.cached
    }
}

/// Leading blocks of a sequence that are cached, as [`BlockPool::find`] found them. Good until the pool
/// changes.
#[derive(Debug, Default)]
pub struct Hits {
    segments: Vec<Segment>,
    blocks: u32,
    free: u32,
}

impl Hits {
    /// How many there are.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Of them, those that no sequence holds: to hold them uses up free blocks.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.segments.clear();
        (self.blocks, self.free) = (0, 0);
    }
}

/// Hashes that no block has, and where they come.
struct Fresh<'a> {
    /// The run at whose end they follow.
    before: u32,
    parent: BlockHash,
    /// The first of them is the first of a prompt.
    opens: bool,
    hashes: &'a [BlockHash],
}

/// Where a chain stands: behind block `offset` of `run`, or before its first block.
#[derive(Clone, Copy)]
struct Place {
    run: u32,
    offset: u32,
}

const START: Place = Place {
    run: NIL,
    offset: 0,
};

impl BlockPool {
    /// A pool of `blocks` free blocks, at most [`BLOCKS_MAX`].
    pub fn new(blocks: u32) -> BlockPool {
        assert!(blocks <= BLOCKS_MAX, "checked by the engine");
        BlockPool {
            total: blocks,
            blank: blocks,
            idle: 0,
            runs: Vec::new(),
            spare: NIL,
            heads: HashMap::default(),
            copies: HashMap::default(),
            buffers: Buffers::default(),
            lru_first: NIL,
            lru_last: NIL,
            cached: 0,
            releases: 0,
            watched: None,
            watched_came: false,
            lists: KvChanges::All,
            epoch: 0,
            shrunk: Vec::new(),
            ghosts: HashMap::default(),
        }
    }

    /// All blocks.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Blocks that no sequence holds.
    pub fn free(&self) -> u32 {
        self.blank + self.idle
    }

    /// Blocks that sequences hold.
    pub fn used(&self) -> u32 {
        self.total() - self.free()
    }

    /// Distinct hashes that can be hit.
    pub fn cached(&self) -> u32 {
        self.cached
    }

    /// Blocks freed so far.
    pub fn releases(&self) -> u64 {
        self.releases
    }

    /// Sets which changes are listed (all by default).
    pub fn list_changes(&mut self, which: KvChanges) {
        self.lists = which;
    }

    /// Whether changes are listed of the first blocks of prompts alone.
    pub fn lists_first_blocks(&self) -> bool {
        self.lists == KvChanges::FirstBlocks
    }

    /// From now on notes whether `hash`, which is not cached, comes to be.
    pub fn watch(&mut self, hash: Option<BlockHash>) {
        (self.watched, self.watched_came) = (hash, false);
    }

    /// Whether the hash that is watched was cached since.
    pub fn watched_came(&self) -> bool {
        self.watched_came
    }

    /// Continues the search for a chain, of which `hits` has all blocks found so far: adds the leading
    /// ones of `hashes` that are cached, the oldest copy of each. Returns how many those are.
    pub fn find(&self, hashes: &[BlockHash], hits: &mut Hits) -> usize {
        let mut at = 0;
        if let Some(last) = hits.segments.last_mut() {
            let run = &self.runs[last.run as usize];
            let more = shared(&run.blocks()[last.len as usize..], hashes);
            last.len += to_u32(more);
            hits.blocks += to_u32(more);
            hits.free += if run.refs == 0 { to_u32(more) } else { 0 };
            at = more;
            if last.len < run.len {
                return at;
            }
        }
        while at < hashes.len()
            && let Some(&id) = self.heads.get(&hashes[at])
        {
            let run = &self.runs[id as usize];
            let len = to_u32(shared(run.blocks(), &hashes[at..]));
            hits.segments.push(Segment { run: id, len });
            hits.blocks += len;
            hits.free += if run.refs == 0 { len } else { 0 };
            at += len as usize;
            if len < run.len {
                break;
            }
        }
        at
    }

    /// Holds the blocks found, as the first blocks of `table`.
    pub fn hold(&mut self, hits: &Hits, table: &mut Table) {
        debug_assert!(table.is_empty(), "hits are the beginning of a sequence");
        for &segment in &hits.segments {
            let Segment { run: id, len } = segment;
            if len < self.runs[id as usize].len {
                self.split(id, len);
            }
            let run = &mut self.runs[id as usize];
            run.refs += 1;
            if run.refs == 1 {
                self.idle -= run.len;
                self.unlink(id);
            }
        }
        if let Some((&last, earlier)) = hits.segments.split_last() {
            table.earlier.extend_from_slice(earlier);
            table.last = last;
            table.last_hash = self.runs[last.run as usize].hashes[last.len as usize - 1];
        }
        table.cached += hits.blocks;
    }

    /// Takes `count` free blocks for new content, and holds them in `table`. Their old content is
    /// forgotten; `ops` gets those whose last copy is gone.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn allocate(&mut self, count: u32, table: &mut Table, ops: &mut Vec<KvOp>) {
        let blank = count.min(self.blank);
        self.blank -= blank;
        if blank < count {
            self.evict(count - blank, ops);
        }
        table.blank += count;
    }

    /// Notes that as many of the blank blocks of `table` are full and cache `hashes`, of which the first
    /// one follows `parent`: the hash of the last cached block of `table`, or the root of its chain.
    /// `ops` gets those that are the first copies. Returns how many, at the beginning, are not.
    pub fn cache(
        &mut self,
        table: &mut Table,
        mut parent: BlockHash,
        hashes: &[BlockHash],
        ops: &mut Vec<KvOp>,
    ) -> usize {
        let count = to_u32(hashes.len());
        assert!(count <= table.blank, "a block becomes full once");
        let opens = table.cached == 0;
        table.blank -= count;
        table.cached += count;
        let mut place = self.end_of(table);
        let mut copies = 0;
        while let Some(&hash) = hashes.get(copies)
            && let Some(next) = self.step(place, hash)
        {
            place = next;
            let hashes = &hashes[copies..=copies];
            let id = self.add_run(hashes, parent, opens && copies == 0, true);
            let (_, last) = self.copies.entry(hash).or_insert((id, NIL));
            let elder = std::mem::replace(last, id);
            if let Some(elder) = self.runs.get_mut(elder as usize) {
                elder.younger = id;
            }
            table.push(Segment { run: id, len: 1 });
            parent = hash;
            copies += 1;
        }
        if let Some(&last) = hashes.last() {
            table.last_hash = last;
        }
        if copies < hashes.len() {
            if place.run != NIL && place.offset < self.runs[place.run as usize].len {
                self.split(place.run, place.offset); // two chains part here
            }
            let fresh = Fresh {
                before: place.run,
                parent,
                opens: opens && copies == 0,
                hashes: &hashes[copies..],
            };
            self.cache_fresh(table, &fresh, ops);
        }
        copies
    }

    /// Caches hashes that no block has.
    fn cache_fresh(&mut self, table: &mut Table, fresh: &Fresh<'_>, ops: &mut Vec<KvOp>) {
        let &Fresh {
            before,
            parent,
            opens,
            hashes,
        } = fresh;
        let len = to_u32(hashes.len());
        self.cached += len;
        if self.watched.is_some_and(|hash| hashes.contains(&hash)) {
            self.watched_came = true;
        }
        let listed = match self.lists {
            KvChanges::All => hashes,
            KvChanges::FirstBlocks if opens => &hashes[..1],
            KvChanges::FirstBlocks | KvChanges::None => &[],
        };
        let parents = std::iter::once(&parent).chain(listed);
        let pairs = listed.iter().zip(parents);
        ops.extend(pairs.map(|(&hash, &parent)| KvOp::Stored { hash, parent }));
        // The sequence's own last run grows, if no other sequence holds it and nothing else follows it.
        let last = &mut table.last;
        if before != NIL
            && last.run == before
            && let run = &mut self.runs[before as usize]
            && run.len == last.len
            && run.refs == 1
            && !run.sealed
            && run.hashes.len() == run.len as usize
        {
            run.before_change(self.epoch);
            self.buffers.extend(&mut run.hashes, hashes);
            run.len += len;
            last.len += len;
        } else {
            if let Some(before) = self.runs.get_mut(before as usize) {
                before.sealed = true;
            }
            let id = self.add_run(hashes, parent, opens, false);
            self.heads.insert(hashes[0], id);
            table.push(Segment { run: id, len });
        }
    }

    /// Lets go of all blocks of a table, the last one first: the end of a prefix is of no use without
    /// its beginning, so it is evicted before that. Blocks without a hash are allocated next, those
    /// with one last.
    pub fn release(&mut self, table: &mut Table) {
        let leaked = u32::from(slipstream_base::planted!("leaked-block") && table.blank > 0);
        self.blank += table.blank - leaked;
        self.releases += u64::from(table.blank);
        if table.last.run != NIL {
            table.earlier.push(std::mem::take(&mut table.last));
        }
        while let Some(segment) = table.earlier.pop() {
            if self.runs[segment.run as usize].len == segment.len {
                self.let_go(segment.run);
            } else {
                // Runs that were split off: their numbers behind the others, then from the last on.
                let begin = table.earlier.len();
                self.parts_of(segment, |run, len| {
                    table.earlier.push(Segment { run, len });
                });
                for part in table.earlier.drain(begin..).rev() {
                    self.let_go(part.run);
                }
            }
        }
        (table.cached, table.blank) = (0, 0);
    }

    /// The hash of the last cached block of `table`; `None` if it has none.
    pub fn last_hash(&self, table: &Table) -> Option<BlockHash> {
        (table.last.run != NIL).then_some(table.last_hash)
    }

    /// Appends the hashes of the cached blocks of `table` from number `from` on.
    pub fn hashes_from(&self, table: &Table, from: u32, out: &mut Vec<BlockHash>) {
        let mut skip = from as usize;
        for segment in table.segments() {
            self.parts_of(segment, |run, len| {
                let blocks = &self.runs[run as usize].hashes[..len as usize];
                out.extend_from_slice(blocks.get(skip..).unwrap_or_default());
                skip = skip.saturating_sub(blocks.len());
            });
        }
    }

    /// Forgets everything cached; false, with nothing changed, while any block is held.
    pub fn reset(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        self.clear();
        true
    }

    /// All blocks are free and cache nothing, with any holders.
    pub fn clear(&mut self) {
        *self = BlockPool {
            releases: self.releases + 1,
            lists: self.lists,
            ..BlockPool::new(self.total())
        };
    }

    /// Each distinct cached hash with its parent, in no particular order.
    pub fn cached_blocks(&self) -> impl Iterator<Item = (BlockHash, BlockHash)> + '_ {
        let runs = self.runs.iter().filter(|run| !run.copy);
        runs.flat_map(|run| {
            let blocks = run.blocks().iter().copied();
            blocks.zip(std::iter::once(run.parent).chain(run.blocks().iter().copied()))
        })
    }

    /// All changes so far are published: [`published_prefix`](Self::published_prefix) counts them from now on.
    pub fn publish(&mut self) {
        for at in 0..self.shrunk.len() {
            let id = self.shrunk[at];
            let run = &mut self.runs[id as usize];
            run.hashes.truncate(run.len as usize);
            if std::mem::take(&mut run.ghost) {
                self.drop_run(id);
            }
        }
        self.shrunk.clear();
        if self.epoch == u32::MAX {
            for run in &mut self.runs {
                (run.published, run.epoch) = (run.len, 0);
            }
            self.epoch = 0;
        }
        self.epoch += 1;
        self.ghosts.clear();
    }

    /// How many leading ones of `hashes` were cached when changes were last published.
    pub fn published_prefix(&self, hashes: &[BlockHash]) -> u32 {
        let mut at = 0;
        while let Some(hash) = hashes.get(at) {
            let published = |id: &u32| self.runs[*id as usize].published(self.epoch) > 0;
            let head = self.heads.get(hash).copied().filter(published);
            let Some(id) = head.or_else(|| self.ghosts.get(hash).copied()) else {
                break;
            };
            let run = &self.runs[id as usize];
            let published = run.published(self.epoch) as usize;
            let len = shared(&run.hashes[..published], &hashes[at..]);
            at += len;
            if len < published {
                break;
            }
        }
        to_u32(at)
    }

    /// Frees `count` blocks of the LRU list, from its beginning.
    fn evict(&mut self, mut count: u32, ops: &mut Vec<KvOp>) {
        assert!(
            count <= self.idle,
            "allocate() is called only where free() suffices"
        );
        self.idle -= count;
        while count > 0 {
            let id = self.lru_first;
            let run = &mut self.runs[id as usize];
            run.before_change(self.epoch);
            let taken = count.min(run.len);
            count -= taken;
            let left = run.len - taken;
            if run.copy {
                self.drop_copy(id);
            } else if self.copies.is_empty() {
                let gone = &run.blocks()[left as usize..];
                let listed = match self.lists {
                    KvChanges::All => gone,
                    KvChanges::FirstBlocks if run.opens && left == 0 => &gone[..1],
                    KvChanges::FirstBlocks | KvChanges::None => &[],
                };
                ops.extend(listed.iter().rev().map(|&hash| KvOp::Removed { hash }));
                self.cached -= taken;
            } else {
                for at in (left..run.len).rev() {
                    self.forget(id, at, ops);
                }
            }
            self.runs[id as usize].len = left;
            self.shrunk.push(id);
            if left == 0 {
                self.unlink(id);
                self.bury(id);
            }
        }
    }

    /// Block `at` of a run, its last one, is evicted: the next copy takes its place, if there is one.
    fn forget(&mut self, id: u32, at: u32, ops: &mut Vec<KvOp>) {
        let run = &mut self.runs[id as usize];
        let hash = run.hashes[at as usize];
        let Some(copies) = self.copies.get_mut(&hash) else {
            self.cached -= 1;
            let listed = match self.lists {
                KvChanges::All => true,
                KvChanges::FirstBlocks => run.opens && at == 0,
                KvChanges::None => false,
            };
            if listed {
                ops.push(KvOp::Removed { hash });
            }
            return;
        };
        let heir = copies.0;
        copies.0 = self.runs[heir as usize].younger;
        if copies.0 == NIL {
            self.copies.remove(&hash);
        }
        let run = &mut self.runs[id as usize];
        run.sealed = true;
        // Subscribers are sent nothing: the hash stays stored. What was published of the blocks behind it moves along.
        let published = run.published.saturating_sub(at);
        run.published = run.published.min(at);
        let hashes = std::mem::take(&mut run.hashes);
        let heir_run = &mut self.runs[heir as usize];
        heir_run.epoch = self.epoch;
        heir_run.copy = false;
        heir_run.published = published;
        if published > 1 {
            let follow = &hashes[at as usize + 1..(at + published) as usize];
            self.buffers.extend(&mut heir_run.hashes, follow);
        }
        self.runs[id as usize].hashes = hashes;
        self.heads.insert(hash, heir);
        self.shrunk.push(heir);
    }

    /// A copy is evicted; the first one stays.
    fn drop_copy(&mut self, id: u32) {
        let hash = self.runs[id as usize].hashes[0];
        let younger = self.runs[id as usize].younger;
        let Some((first, last)) = self.copies.get_mut(&hash) else {
            return;
        };
        if *first == id {
            *first = younger;
            if younger == NIL {
                self.copies.remove(&hash);
            }
            return;
        }
        // Copies of one block are few.
        let mut elder = *first;
        while elder != NIL && self.runs[elder as usize].younger != id {
            elder = self.runs[elder as usize].younger;
        }
        if let Some(run) = self.runs.get_mut(elder as usize) {
            run.younger = younger;
            if younger == NIL {
                *last = elder;
            }
        }
    }

    /// A run has no block left.
    fn bury(&mut self, id: u32) {
        let run = &mut self.runs[id as usize];
        let head = run.hashes[0];
        if !run.copy && self.heads.get(&head) == Some(&id) {
            self.heads.remove(&head);
        }
        if !run.copy && run.published > 0 {
            run.ghost = true;
            self.ghosts.insert(head, id);
        } else {
            self.drop_run(id);
        }
    }

    /// Splits a run behind its first `at` blocks, of which there are at least one, and more in it.
    fn split(&mut self, id: u32, at: u32) {
        let run = &mut self.runs[id as usize];
        run.before_change(self.epoch);
        let rest = Run {
            hashes: self.buffers.copy_of(&run.hashes[at as usize..]),
            parent: run.hashes[at as usize - 1],
            len: run.len - at,
            published: run.published.saturating_sub(at),
            epoch: self.epoch,
            refs: run.refs,
            prev: run.prev,
            next: run.next,
            younger: NIL,
            copy: false,
            opens: false,
            sealed: run.sealed,
            ghost: false,
        };
        run.hashes.truncate(at as usize);
        run.len = at;
        run.sealed = true;
        run.published = run.published.min(at);
        let (refs, prev, head) = (run.refs, run.prev, rest.hashes[0]);
        let shrunk = rest.hashes.len() > rest.len as usize;
        let new = self.insert_run(rest);
        self.heads.insert(head, new);
        if shrunk {
            self.shrunk.push(new);
        }
        if refs > 0 {
            self.runs[id as usize].next = new;
        } else {
            // The end is evicted first.
            self.runs[new as usize].next = id;
            self.runs[id as usize].prev = new;
            match prev {
                NIL => self.lru_first = new,
                _ => self.runs[prev as usize].next = new,
            }
        }
    }

    /// Calls `part` for each run of a segment, with the number of its blocks.
    #[inline]
    fn parts_of(&self, segment: Segment, mut part: impl FnMut(u32, u32)) {
        let Segment { run: mut id, len } = segment;
        let mut left = len;
        loop {
            let run = &self.runs[id as usize];
            part(id, run.len.min(left));
            if run.len >= left {
                return;
            }
            left -= run.len;
            id = run.next;
        }
    }

    /// Where the cached blocks of `table` end, among those that can be hit.
    fn end_of(&self, table: &Table) -> Place {
        let is_copy = |segment: &Segment| self.runs[segment.run as usize].copy;
        let mut place = START;
        if table.last.run == NIL {
            return place;
        }
        if !is_copy(&table.last) {
            self.parts_of(table.last, |run, offset| place = Place { run, offset });
            return place;
        }
        let own = table.segments().rfind(|segment| !is_copy(segment));
        if let Some(segment) = own {
            self.parts_of(segment, |run, offset| place = Place { run, offset });
        }
        let copies = table.segments().rev().take_while(is_copy).count();
        let earlier = table.segments().count() - copies;
        for copy in table.segments().skip(earlier) {
            let hash = self.runs[copy.run as usize].hashes[0];
            // Each is the copy of a block that can be hit.
            place = self.step(place, hash).unwrap_or(START);
        }
        place
    }

    /// Moves on from `place` to the block with `hash`, if it is there.
    #[inline]
    fn step(&self, place: Place, hash: BlockHash) -> Option<Place> {
        let Place { run: id, offset } = place;
        if let Some(run) = self.runs.get(id as usize) {
            if let Some(&next) = run.blocks().get(offset as usize) {
                let offset = offset + 1;
                return (next == hash).then_some(Place { run: id, offset });
            }
            if !run.sealed {
                debug_assert!(!self.heads.contains_key(&hash), "no run follows it");
                return None;
            }
        }
        let &run = self.heads.get(&hash)?;
        Some(Place { run, offset: 1 })
    }

    /// One holder less.
    #[inline]
    fn let_go(&mut self, id: u32) {
        let lru_last = self.lru_last;
        let run = &mut self.runs[id as usize];
        assert!(run.refs > 0, "a block is released by who holds it");
        run.refs -= 1;
        if run.refs > 0 {
            return;
        }
        self.idle += run.len;
        self.releases += u64::from(run.len);
        (run.prev, run.next) = (lru_last, NIL);
        self.lru_last = id;
        match lru_last {
            NIL => self.lru_first = id,
            _ => self.runs[lru_last as usize].next = id,
        }
    }

    /// Takes a run out of the LRU list.
    #[inline]
    fn unlink(&mut self, id: u32) {
        let Run { prev, next, .. } = self.runs[id as usize];
        match prev {
            NIL => self.lru_first = next,
            _ => self.runs[prev as usize].next = next,
        }
        match next {
            NIL => self.lru_last = prev,
            _ => self.runs[next as usize].prev = prev,
        }
        self.runs[id as usize].next = NIL;
    }

    /// A run that is held once, and is in no map yet.
    fn add_run(&mut self, hashes: &[BlockHash], parent: BlockHash, opens: bool, copy: bool) -> u32 {
        let hashes = self.buffers.copy_of(hashes);
        self.insert_run(Run {
            len: to_u32(hashes.len()),
            hashes,
            parent,
            published: 0,
            epoch: self.epoch,
            refs: 1,
            prev: NIL,
            next: NIL,
            younger: NIL,
            copy,
            opens,
            sealed: copy,
            ghost: false,
        })
    }

    fn insert_run(&mut self, run: Run) -> u32 {
        let id = self.spare;
        if id == NIL {
            self.runs.push(run);
            return to_u32(self.runs.len()) - 1;
        }
        self.spare = self.runs[id as usize].next;
        self.runs[id as usize] = run;
        id
    }

    fn drop_run(&mut self, id: u32) {
        let run = &mut self.runs[id as usize];
        debug_assert!(run.len == 0 && run.refs == 0);
        self.buffers.take_back(std::mem::take(&mut run.hashes));
        (run.published, run.copy) = (0, false);
        run.next = self.spare;
        self.spare = id;
    }

    /// Checks every invariant in O(blocks), given all tables. For tests.
    #[doc(hidden)]
    pub fn audit<'a>(&self, tables: impl Iterator<Item = &'a Table>) {
        let mut refs = vec![0; self.runs.len()];
        let mut held_blank = 0;
        for table in tables {
            held_blank += table.blank;
            let mut cached = 0;
            for segment in table.segments() {
                self.parts_of(segment, |run, len| {
                    assert_eq!(len, self.runs[run as usize].len, "segments end with runs");
                    refs[run as usize] += 1;
                    cached += len;
                });
            }
            assert_eq!(cached, table.cached);
        }
        let (mut idle, mut held, mut idle_runs, mut heads) = (0, 0, 0, 0);
        let mut ends = HashMap::new();
        for (run, &refs) in self.runs.iter().zip(&refs) {
            assert_eq!(run.refs, refs, "holders of a run");
            if run.len > 0 && run.refs == 0 {
                idle_runs += 1;
                idle += run.len;
            }
            held += if run.refs > 0 { run.len } else { 0 };
            if !run.copy {
                for (at, &hash) in (1..).zip(run.blocks()) {
                    let twice = ends.insert(hash, at == run.len);
                    assert!(twice.is_none(), "{hash} can be found in two places");
                }
            }
        }
        for (id, run) in (0..).zip(&self.runs).filter(|(_, run)| run.len > 0) {
            if run.copy {
                assert!(run.len == 1 && ends.contains_key(&run.hashes[0]));
                let mut copy = self.copies[&run.hashes[0]].0;
                while copy != id {
                    copy = self.runs[copy as usize].younger;
                }
            } else {
                heads += 1;
                assert_eq!(self.heads.get(&run.hashes[0]), Some(&id));
                // A run ends wherever another one follows.
                assert_ne!(ends.get(&run.parent), Some(&false), "a run that continues");
            }
        }
        assert_eq!(self.heads.len(), heads);
        assert_eq!(to_u32(ends.len()), self.cached, "distinct hashes");
        assert_eq!(idle, self.idle, "cached blocks that no sequence holds");
        assert_eq!(self.blank + idle + held + held_blank, self.total);
        let (mut at, mut prev) = (self.lru_first, NIL);
        while at != NIL {
            let run = &self.runs[at as usize];
            assert!(run.refs == 0 && run.len > 0 && run.prev == prev);
            idle_runs -= 1;
            (prev, at) = (at, run.next);
        }
        assert_eq!(
            (prev, idle_runs),
            (self.lru_last, 0),
            "the LRU list is whole"
        );
    }
}

/// Room for the hashes of runs, used again and again: capacities of 4, 8, 16, … hashes, each size apart,
/// so that a warm engine allocates nothing. It keeps no more than was used at once.
#[derive(Default)]
struct Buffers {
    spare: [Vec<Vec<BlockHash>>; BUFFER_SIZES],
}

/// Up to 4 << 11 = 8,192 hashes; longer ones are not kept.
const BUFFER_SIZES: usize = 12;

impl Buffers {
    fn size(len: usize) -> usize {
        len.max(4).next_power_of_two().trailing_zeros() as usize - 2
    }

    fn copy_of(&mut self, hashes: &[BlockHash]) -> Vec<BlockHash> {
        let size = Self::size(hashes.len());
        let spare = self.spare.get_mut(size).and_then(Vec::pop);
        let mut buffer = spare.unwrap_or_else(|| Vec::with_capacity(4 << size));
        buffer.extend_from_slice(hashes);
        buffer
    }

    fn extend(&mut self, buffer: &mut Vec<BlockHash>, hashes: &[BlockHash]) {
        let len = buffer.len() + hashes.len();
        if len > buffer.capacity() {
            let size = Self::size(len);
            let spare = self.spare.get_mut(size).and_then(Vec::pop);
            let mut larger = spare.unwrap_or_else(|| Vec::with_capacity(4 << size));
            larger.extend_from_slice(buffer);
            self.take_back(std::mem::replace(buffer, larger));
        }
        buffer.extend_from_slice(hashes);
    }

    fn take_back(&mut self, mut buffer: Vec<BlockHash>) {
        // By what it can hold for sure.
        let size = Self::size(buffer.capacity() / 2 + 1);
        if buffer.capacity() >= 4 << size
            && let Some(spare) = self.spare.get_mut(size)
        {
            buffer.clear();
            spare.push(buffer);
        }
    }
}

/// How many leading hashes two stretches share. Hashes are chained: where two are equal, so are all
/// before them.
#[inline]
fn shared(a: &[BlockHash], b: &[BlockHash]) -> usize {
    let both = a.len().min(b.len());
    if both == 0 || a[both - 1] == b[both - 1] {
        return both;
    }
    let (mut equal, mut differ) = (0, both - 1);
    while equal < differ {
        let middle = equal + (differ - equal) / 2;
        if a[middle] == b[middle] {
            equal = middle + 1;
        } else {
            differ = middle;
        }
    }
    equal
}

/// Hashes of blocks are mixed already (XXH3).
#[derive(Default)]
struct ChainHasher(u64);

impl Hasher for ChainHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    /// A chain: block `j` is one of several that may follow block `j - 1`.
    fn chain(branches: &[u8]) -> Vec<BlockHash> {
        let mut parent = BlockHash::default();
        let follow = |&branch: &u8| {
            parent = parent.child_of_id(branch.into(), 0);
            parent
        };
        branches.iter().map(follow).collect()
    }

    /// Holds the cached ones among the first `most` blocks of `path`, and new blocks for all of it.
    fn admit(pool: &mut BlockPool, path: &[BlockHash], most: usize, ops: &mut Vec<KvOp>) -> Table {
        let (mut hits, mut table) = (Hits::default(), Table::default());
        pool.find(&path[..most], &mut hits);
        pool.hold(&hits, &mut table);
        pool.allocate(path.len() as u32 - table.len(), &mut table, ops);
        let from = table.cached() as usize;
        let parent = pool.last_hash(&table).unwrap_or_default();
        pool.cache(&mut table, parent, &path[from..], ops);
        table
    }

    fn removed(ops: &[KvOp]) -> Vec<BlockHash> {
        let gone = ops.iter().filter_map(|op| match op {
            KvOp::Removed { hash } => Some(*hash),
            _ => None,
        });
        gone.collect()
    }

    #[test]
    fn evicts_the_block_that_was_free_longest_and_chains_from_their_end() {
        let mut pool = BlockPool::new(7);
        let mut ops = Vec::new();
        let (a, b) = (chain(&[0, 0, 0]), chain(&[1, 1]));
        let mut first = admit(&mut pool, &a, 0, &mut ops);
        let mut second = admit(&mut pool, &b, 0, &mut ops);
        pool.release(&mut first);
        pool.release(&mut second);
        // The first block of `a` is used again, so the rest of it is oldest.
        let mut again = admit(&mut pool, &a[..1], 1, &mut ops);
        pool.release(&mut again);
        ops.clear();
        let mut all = Table::default();
        pool.allocate(2, &mut all, &mut ops);
        assert_eq!(ops, [], "blank blocks go first");
        pool.allocate(3, &mut all, &mut ops);
        assert_eq!(removed(&ops), [a[2], a[1], b[1]]);
        pool.allocate(2, &mut all, &mut ops);
        assert_eq!(removed(&ops)[3..], [b[0], a[0]]);
        assert_eq!((pool.free(), pool.cached()), (0, 0));
    }

    #[test]
    fn only_the_first_copy_is_stored_and_the_last_removed() {
        let mut pool = BlockPool::new(6);
        let mut ops = Vec::new();
        let path = chain(&[0, 0]);
        let mut tables: Vec<Table> = (0..3)
            .map(|_| admit(&mut pool, &path, 0, &mut ops))
            .collect();
        assert_eq!(ops.len(), 2, "stored once each");
        assert_eq!(pool.cached(), 2);
        ops.clear();
        for at in [1, 0, 2] {
            pool.release(&mut tables[at]);
        }
        let mut taken = Table::default();
        pool.allocate(4, &mut taken, &mut ops); // the middle copies, then the first ones
        assert_eq!(ops, []);
        let mut hits = Hits::default();
        assert_eq!(pool.find(&path, &mut hits), 2);
        pool.allocate(2, &mut taken, &mut ops);
        assert_eq!(removed(&ops), [path[1], path[0]]);
        hits.clear();
        assert_eq!(pool.find(&path, &mut hits), 0);
    }

    #[test]
    fn a_sequence_that_goes_on_does_not_hide_one_that_parted_from_it() {
        let mut pool = BlockPool::new(9);
        let mut ops = Vec::new();
        let (a, b) = (chain(&[0, 0, 0]), chain(&[0, 0, 1]));
        let mut first = admit(&mut pool, &a[..2], 0, &mut ops);
        let mut second = admit(&mut pool, &b, 2, &mut ops);
        pool.release(&mut second);
        // It is the only holder of the two blocks again, but `b` continues from there.
        pool.allocate(1, &mut first, &mut ops);
        pool.cache(&mut first, a[1], &a[2..], &mut ops);
        for path in [&a, &b] {
            assert_eq!(pool.find(path, &mut Hits::default()), 3);
        }
        pool.audit([&first].into_iter());
    }

    #[test]
    fn reset_waits_until_nothing_is_held() {
        let mut pool = BlockPool::new(2);
        let path = chain(&[0]);
        let mut table = admit(&mut pool, &path, 0, &mut Vec::new());
        assert!(!pool.reset());
        assert_eq!(pool.find(&path, &mut Hits::default()), 1);
        pool.release(&mut table);
        assert!(pool.reset());
        assert_eq!(pool.find(&path, &mut Hits::default()), 0);
        assert_eq!((pool.cached(), pool.free()), (0, 2));
    }

    /// The pool block by block, as slow and plain as can be.
    #[derive(Default)]
    struct Plain {
        free: VecDeque<u32>,
        refs: BTreeMap<u32, u32>,
        hashes: BTreeMap<u32, BlockHash>,
        copies: BTreeMap<BlockHash, Vec<u32>>,
        published: BTreeSet<BlockHash>,
        ops: Vec<KvOp>,
        lists: KvChanges,
    }

    impl Plain {
        fn allocate(&mut self) -> u32 {
            let block = self.free.pop_front().unwrap();
            if let Some(hash) = self.hashes.remove(&block) {
                let copies = self.copies.get_mut(&hash).unwrap();
                copies.retain(|&b| b != block);
                if copies.is_empty() {
                    self.copies.remove(&hash);
                    if self.is_listed(hash) {
                        self.ops.push(KvOp::Removed { hash });
                    }
                }
            }
            self.refs.insert(block, 1);
            block
        }
        fn cache(&mut self, block: u32, hash: BlockHash, parent: BlockHash) {
            self.hashes.insert(block, hash);
            let copies = self.copies.entry(hash).or_default();
            let fresh = copies.is_empty();
            copies.push(block);
            if fresh && self.is_listed(hash) {
                self.ops.push(KvOp::Stored { hash, parent });
            }
        }
        fn is_listed(&self, hash: BlockHash) -> bool {
            let first = || (0..2).any(|branch| hash == chain(&[branch])[0]);
            self.lists == KvChanges::All || self.lists == KvChanges::FirstBlocks && first()
        }
        fn touch(&mut self, block: u32) {
            self.free.retain(|&b| b != block);
            *self.refs.entry(block).or_default() += 1;
        }
        fn release(&mut self, block: u32) {
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
        fn leading(&self, path: &[BlockHash]) -> Vec<u32> {
            let first = |hash| self.copies.get(hash).map(|copies| copies[0]);
            path.iter().map_while(first).collect()
        }
    }

    struct Both {
        pool: BlockPool,
        plain: Plain,
        ops: Vec<KvOp>,
        sequences: Vec<(Vec<BlockHash>, Table, Vec<u32>)>,
    }

    impl Both {
        fn admit(&mut self, path: Vec<BlockHash>, most: usize) {
            let mut hits = Hits::default();
            // In two pieces, as a prompt and its answer.
            let (one, two) = path[..most.min(path.len())].split_at(most.min(path.len()) / 2);
            let mut found = self.pool.find(one, &mut hits);
            if found == one.len() {
                found += self.pool.find(two, &mut hits);
            }
            let blocks = self.plain.leading(&path[..most.min(path.len())]);
            assert_eq!(found, blocks.len());
            let unheld = blocks.iter().filter(|b| !self.plain.refs.contains_key(b));
            assert_eq!(hits.free() as usize, unheld.count());
            let mut table = Table::default();
            self.pool.hold(&hits, &mut table);
            for &block in &blocks {
                self.plain.touch(block);
            }
            self.sequences.push((path, table, blocks));
        }

        fn grow(&mut self, which: usize, most: usize) {
            let (path, table, blocks) = &mut self.sequences[which];
            let count = most
                .min(path.len() - blocks.len())
                .min(self.pool.free() as usize);
            self.pool.allocate(count as u32, table, &mut self.ops);
            blocks.extend((0..count).map(|_| self.plain.allocate()));
        }

        fn fill(&mut self, which: usize, most: usize) {
            let (path, table, blocks) = &mut self.sequences[which];
            let from = table.cached() as usize;
            let to = blocks.len().min(from + most);
            let parent = |j: usize| match j {
                0 => BlockHash::default(),
                _ => path[j - 1],
            };
            assert_eq!(self.pool.last_hash(table).unwrap_or_default(), parent(from));
            let stored = self.ops.len();
            let copies = self
                .pool
                .cache(table, parent(from), &path[from..to], &mut self.ops);
            if self.plain.lists == KvChanges::All {
                assert_eq!(to - from - copies, self.ops.len() - stored);
            }
            for j in from..to {
                self.plain.cache(blocks[j], path[j], parent(j));
            }
            let mut hashes = Vec::new();
            self.pool.hashes_from(table, 1, &mut hashes);
            assert_eq!(hashes, path[1.min(to)..to]);
        }

        fn release(&mut self, which: usize) {
            let (_, mut table, blocks) = self.sequences.swap_remove(which);
            self.pool.release(&mut table);
            blocks.iter().rev().for_each(|&b| self.plain.release(b));
        }

        fn check(&self, paths: &[Vec<BlockHash>]) {
            self.pool
                .audit(self.sequences.iter().map(|(_, table, _)| table));
            assert_eq!(self.ops, self.plain.ops);
            assert_eq!(self.pool.free() as usize, self.plain.free.len());
            assert_eq!(self.pool.cached() as usize, self.plain.copies.len());
            for path in paths {
                let found = self.pool.find(path, &mut Hits::default());
                assert_eq!(found, self.plain.leading(path).len());
                let published = path.iter().take_while(|h| self.plain.published.contains(h));
                assert_eq!(self.pool.published_prefix(path) as usize, published.count());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 128 }))]
        #[test]
        fn agrees_with_a_plain_pool(
            size in 1u32..24,
            lists in prop::sample::select(vec![KvChanges::All, KvChanges::FirstBlocks, KvChanges::None]),
            // Few branches, so that paths share much.
            paths in prop::collection::vec(prop::collection::vec(0u8..2, 1..10), 1..6),
            steps in prop::collection::vec((0u8..8, any::<prop::sample::Index>(), 0usize..10), 0..120),
        ) {
            let paths: Vec<_> = paths.iter().map(|path| chain(path)).collect();
            let mut both = Both {
                pool: BlockPool::new(size),
                plain: Plain { free: (0..size).collect(), lists, ..Plain::default() },
                ops: Vec::new(),
                sequences: Vec::new(),
            };
            both.pool.list_changes(lists);
            for (step, which, most) in steps {
                let live = both.sequences.len();
                match step {
                    0 | 1 => both.admit(which.get(&paths).clone(), most),
                    2 | 3 if live > 0 => both.grow(which.index(live), most),
                    4 | 5 if live > 0 => both.fill(which.index(live), most),
                    6 if live > 0 => both.release(which.index(live)),
                    7 => {
                        both.pool.publish();
                        both.plain.published = both.plain.copies.keys().copied().collect();
                    }
                    _ => {}
                }
                both.check(&paths);
            }
            let mut listed: Vec<_> = both.pool.cached_blocks().map(|(hash, _)| hash).collect();
            listed.sort_unstable();
            prop_assert_eq!(listed, both.plain.copies.keys().copied().collect::<Vec<_>>());
        }
    }
}
