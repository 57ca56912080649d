//! The KV cache of an engine, as its sequences see it: GPU blocks, the tiers below them, and changes that are not yet
//! published.

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, KvDelta, KvOp, RankId, Tail, TokenId};
use slipstream_config::cluster::EngineConfig;

use super::sequence::Sequence;
use crate::answer::OutputModel;
use crate::host_tier::{FoundBelow, HostTier, Medium};
use crate::pool::{BlockPool, Hits, KvChanges, Table};

/// Blocks of all sequences. Tokens of an answer are not kept: the [`OutputModel`] makes them again where a block of them
/// is hashed.
pub(super) struct Cache {
    rank: RankId,
    block_size: u32,
    /// Full blocks are found again by their prefix.
    reuses: bool,
    pool: BlockPool,
    /// Blocks in host memory, if there is such a tier.
    host: Option<HostTier>,
    /// Cached leading blocks of the sequence that was looked up last.
    hits: Hits,
    /// Block tables of sequences that left, for those to come.
    spare_tables: Vec<Table>,
    /// Since the last delta.
    changes: Vec<KvOp>,
    /// Of the blocks that `changes` stores; `None` unless they are noted.
    stored: Option<StoredBlocks>,
    /// Number of the next delta.
    next_delta: u64,
    /// Scratch: of one block.
    tokens: Vec<TokenId>,
}

impl Cache {
    pub(super) fn new(rank: RankId, config: &EngineConfig) -> Cache {
        Cache {
            rank,
            block_size: config.block_size,
            reuses: config.enable_prefix_caching,
            pool: BlockPool::new(config.num_gpu_blocks),
            host: config.host_tier.map(|host| {
                let tier = HostTier::new(host);
                match config.disk_tier {
                    Some(disk) => tier.with_disk(disk),
                    None => tier,
                }
            }),
            hits: Hits::default(),
            spare_tables: Vec::new(),
            changes: Vec::new(),
            stored: None,
            next_delta: 0,
            tokens: Vec::new(),
        }
    }

    /// Loses all blocks, and all changes. Deltas begin again at 0.
    pub(super) fn clear(&mut self) {
        self.pool.clear();
        if let Some(host) = &mut self.host {
            host.clear();
        }
        self.forget_changes();
        self.next_delta = 0;
    }

    fn forget_changes(&mut self) {
        self.changes.clear();
        if let Some(stored) = &mut self.stored {
            stored.clear();
        }
    }

    /// The blocks on the GPU.
    #[inline]
    pub(super) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    #[inline]
    pub(super) fn host(&self) -> Option<&HostTier> {
        self.host.as_ref()
    }

    #[inline]
    pub(super) fn host_mut(&mut self) -> Option<&mut HostTier> {
        self.host.as_mut()
    }

    /// Whether full blocks are found again by their prefix.
    #[inline]
    pub(super) fn reuses(&self) -> bool {
        self.reuses
    }

    /// Notes the hashes of the full blocks that end in the answer's part from another engine.
    pub(super) fn hash_answered(&mut self, sequence: &mut Sequence, output: &OutputModel) {
        let prompt = &sequence.request.prompt;
        let known = to_u32(prompt.blocks().len());
        let mut parent = prompt.blocks().last().copied().unwrap_or(prompt.root());
        for j in known..sequence.tokens() / self.block_size {
            parent = block_hash(sequence, j, parent, output, &mut self.tokens);
            sequence.generated_blocks.push(parent);
        }
    }

    /// Finds the leading blocks of a waiting sequence that are cached: its hits. Returns the tokens in them, and the first
    /// block that was not found, if the search ended at one.
    pub(super) fn find_hits(
        &mut self,
        sequence: &mut Sequence,
        output: &OutputModel,
    ) -> (u32, Option<BlockHash>) {
        self.hits.clear();
        if !self.reuses {
            return (0, None);
        }
        // At least one token must be computed, or there would be no logits to sample from.
        let most = (sequence.tokens() - 1) / self.block_size;
        self.hash_generated(sequence, most, output);
        let prompt_blocks = sequence.request.prompt.blocks();
        let mut left = most as usize;
        let mut next_block = None;
        for part in [prompt_blocks, &sequence.generated_blocks] {
            let part = &part[..part.len().min(left)];
            left -= part.len();
            let found = self.pool.find(part, &mut self.hits);
            if let Some(&hash) = part.get(found) {
                next_block = Some(hash);
                break;
            }
        }
        (self.hits.blocks() * self.block_size, next_block)
    }

    /// Hashes the first `blocks` blocks of a waiting sequence, as far as they have no hash yet: if it
    /// was preempted while a pass was under way, its blocks may have been full and not cached, and
    /// the token of that pass may have filled one.
    fn hash_generated(&mut self, sequence: &mut Sequence, blocks: u32, output: &OutputModel) {
        loop {
            let prompt = &sequence.request.prompt;
            let j = to_u32(prompt.blocks().len() + sequence.generated_blocks.len());
            if j >= blocks {
                return;
            }
            let parent = *sequence
                .generated_blocks
                .last()
                .or(prompt.blocks().last())
                .unwrap_or(&prompt.root());
            let hash = block_hash(sequence, j, parent, output, &mut self.tokens);
            sequence.generated_blocks.push(hash);
        }
    }

    /// The blocks of a waiting sequence, from the one behind its hits on, that host memory or the disk has.
    pub(super) fn find_below(&mut self, sequence: &Sequence) -> FoundBelow {
        let mut found = FoundBelow::default();
        let Some(host) = &mut self.host else {
            return found;
        };
        let most = (sequence.tokens() - 1) / self.block_size;
        let known = sequence.request.prompt.blocks().iter();
        let known = known.chain(&sequence.generated_blocks);
        let hashes = known.take(most as usize);
        for &hash in hashes.skip(self.hits.blocks() as usize) {
            match host.find(hash) {
                Some(Medium::Host) => {}
                Some(Medium::Disk) => found.on_disk += 1,
                None => break,
            }
            found.blocks += 1;
        }
        found
    }

    /// Blocks of the sequence that was looked up last, as far as they are cached.
    #[inline]
    pub(super) fn hits(&self) -> u32 {
        self.hits.blocks()
    }

    /// Whether there are blocks for the first `tokens` of the sequence that was looked up last. A hit block that no
    /// sequence holds is among the free ones, so holding it uses one up.
    #[inline]
    pub(super) fn has_room(&self, tokens: u32) -> bool {
        let new_blocks = tokens.div_ceil(self.block_size) - self.hits.blocks();
        new_blocks + self.hits.free() <= self.pool.free()
    }

    /// Gives the sequence that was looked up last its hits.
    pub(super) fn hold_hits(&mut self, sequence: &mut Sequence) {
        sequence.table = self.spare_tables.pop().unwrap_or_default();
        self.pool.hold(&self.hits, &mut sequence.table);
    }

    /// Gives a sequence blocks for `tokens` tokens, of which there are enough.
    #[inline]
    pub(super) fn extend(&mut self, table: &mut Table, tokens: u32) {
        let missing = tokens.div_ceil(self.block_size) - table.len();
        self.pool.allocate(missing, table, &mut self.changes);
    }

    /// Gives a sequence blocks for `target` tokens, of which there are enough, and caches those that
    /// are full with its `known` ones. Blocks are cached when they are scheduled, not when they are
    /// computed, so that the next sequence of the same pass hits them, as in vLLM.
    pub(super) fn grow(
        &mut self,
        sequence: &mut Sequence,
        target: u32,
        known: u32,
        output: &OutputModel,
    ) {
        self.extend(&mut sequence.table, target);
        self.cache_full(sequence, known, output);
    }

    /// Caches the blocks that are full with `target` tokens and are not cached yet.
    pub(super) fn cache_full(
        &mut self,
        sequence: &mut Sequence,
        target: u32,
        output: &OutputModel,
    ) {
        if !self.reuses {
            return;
        }
        let full = sequence.table.cached()..target / self.block_size;
        if full.is_empty() {
            return;
        }
        let prompt_blocks = sequence.request.prompt.blocks();
        let known = to_u32(prompt_blocks.len()).clamp(full.start, full.end);
        if full.start < known {
            let parent = parent_of(sequence, full.start, &self.pool);
            let Sequence { request, table, .. } = sequence;
            let hashes = &request.prompt.blocks()[full.start as usize..known as usize];
            if let Some(host) = &mut self.host {
                for &hash in hashes {
                    host.put(hash);
                }
            }
            let copies = self.pool.cache(table, parent, hashes, &mut self.changes);
            self.note_stored(sequence, full.start + to_u32(copies)..known, output);
        }
        for j in known..full.end {
            let (hash, parent) = self.hash_full(sequence, j, output);
            if let Some(host) = &mut self.host {
                host.put(hash);
            }
            let table = &mut sequence.table;
            let copies = self.pool.cache(table, parent, &[hash], &mut self.changes);
            self.note_stored(sequence, j + to_u32(copies)..j + 1, output);
        }
    }

    /// Notes the tokens of blocks that were just stored, if they are noted.
    fn note_stored(
        &mut self,
        sequence: &Sequence,
        blocks: std::ops::Range<u32>,
        output: &OutputModel,
    ) {
        if let Some(stored) = &mut self.stored {
            for j in blocks {
                push_stored(stored, sequence, j, output, &mut self.tokens);
            }
        }
    }

    /// Hash and parent of the full block `j` of a running sequence, which has cached those before it.
    pub(super) fn hash_full(
        &mut self,
        sequence: &Sequence,
        j: u32,
        output: &OutputModel,
    ) -> (BlockHash, BlockHash) {
        let parent = parent_of(sequence, j, &self.pool);
        let hash = block_hash(sequence, j, parent, output, &mut self.tokens);
        (hash, parent)
    }

    /// Caches one block of a table, which has cached those before it.
    pub(super) fn cache_one(&mut self, table: &mut Table, parent: BlockHash, hash: BlockHash) {
        self.pool.cache(table, parent, &[hash], &mut self.changes);
        if let Some(host) = &mut self.host {
            host.put(hash);
        }
    }

    /// Takes the blocks of a sequence that runs no more, and notes the hashes that find them again.
    pub(super) fn preempt(&mut self, sequence: &mut Sequence) {
        let prompt_blocks = sequence.request.prompt.blocks().len();
        let known = prompt_blocks + sequence.generated_blocks.len();
        let generated = &mut sequence.generated_blocks;
        self.pool
            .hashes_from(&sequence.table, to_u32(known), generated);
        let table = std::mem::take(&mut sequence.table);
        self.release(table);
    }

    /// Frees blocks.
    pub(super) fn release(&mut self, mut table: Table) {
        self.pool.release(&mut table);
        if table.has_room() {
            self.spare_tables.push(table);
        }
    }

    /// From now on notices when a block comes, or no more.
    pub(super) fn watch(&mut self, block: Option<BlockHash>) {
        self.pool.watch(block);
    }

    /// Forgets every cached block. False, with nothing changed, while sequences hold blocks.
    pub(super) fn reset(&mut self) -> bool {
        let done = self.pool.reset();
        if done {
            // This undoes all changes that were not published yet.
            self.forget_changes();
            self.changes.push(KvOp::Cleared);
        }
        done
    }

    /// Sets which changes deltas list.
    pub(super) fn list_changes(&mut self, which: KvChanges) {
        self.pool.list_changes(which);
    }

    /// Number of the changes that no delta has published yet.
    #[inline]
    pub(super) fn changes(&self) -> u32 {
        to_u32(self.changes.len())
    }

    /// Takes the changes that no delta has published yet; false, and no number taken, if there are none.
    pub(super) fn take_delta(&mut self, out: &mut KvDelta) -> bool {
        out.rank = self.rank;
        out.ops.clear();
        out.sequence = self.take_changes(&mut out.ops);
        let any = !out.ops.is_empty();
        self.next_delta += u64::from(any);
        any
    }

    /// Exchanges the changes for `out`, which is empty. Returns the number of the first delta that publishes them, which the
    /// caller counts by [`number_deltas`](Self::number_deltas).
    pub(super) fn take_changes(&mut self, out: &mut Vec<KvOp>) -> u64 {
        std::mem::swap(out, &mut self.changes);
        self.pool.publish();
        self.next_delta
    }

    /// The changes taken are published in `count` deltas.
    pub(super) fn number_deltas(&mut self, count: u64) {
        self.next_delta += count;
    }

    /// Fills `out` with `Cleared` and every block held.
    pub(super) fn snapshot(&self, out: &mut KvDelta) {
        out.rank = self.rank;
        out.sequence = self.next_delta;
        out.ops.clear();
        out.ops.push(KvOp::Cleared);
        let blocks = self.pool.cached_blocks();
        out.ops
            .extend(blocks.map(|(hash, parent)| KvOp::Stored { hash, parent }));
    }

    /// From now on, or no more, notes the tokens of blocks that are stored.
    pub(super) fn note_tokens(&mut self, on: bool) {
        self.stored = on.then(StoredBlocks::default);
    }

    #[inline]
    pub(super) fn notes_tokens(&self) -> bool {
        self.stored.is_some()
    }

    /// Takes the notes on the blocks that the changes taken last store.
    pub(super) fn take_tokens(&mut self, out: &mut StoredBlocks) {
        out.clear();
        if let Some(stored) = &mut self.stored {
            std::mem::swap(out, stored);
        }
    }
}

/// The hash that block `j` of a running sequence follows; all blocks before it are full and no other.
fn parent_of(sequence: &Sequence, j: u32, pool: &BlockPool) -> BlockHash {
    match j {
        0 => sequence.request.prompt.root(),
        _ => match sequence.request.prompt.blocks().get(j as usize - 1) {
            Some(&hash) => hash,
            None => pool
                .last_hash(&sequence.table)
                .expect("full blocks have a hash"),
        },
    }
}

/// Hash of the full block `j` of a sequence, which follows `parent`.
fn block_hash(
    sequence: &Sequence,
    j: u32,
    parent: BlockHash,
    output: &OutputModel,
    scratch: &mut Vec<TokenId>,
) -> BlockHash {
    let prompt = &sequence.request.prompt;
    let blocks = prompt.blocks();
    if let Some(&hash) = blocks.get(j as usize) {
        return hash;
    }
    if let Some(&hash) = sequence.generated_blocks.get(j as usize - blocks.len()) {
        return hash;
    }
    match prompt.tail() {
        Tail::Opaque { id } => parent.child_of_id(*id, u64::from(j)),
        Tail::Tokens(tail) => {
            generated_tokens(sequence, j, tail, output, scratch);
            parent.child(scratch)
        }
    }
}

/// Fills `out` with the tokens of the full block `j`, which comes after the prompt's full blocks.
fn generated_tokens(
    sequence: &Sequence,
    j: u32,
    tail: &[TokenId],
    output: &OutputModel,
    out: &mut Vec<TokenId>,
) {
    // Tokens are made up again rather than kept. The end-of-sequence token is never among them: a
    // sequence ends with it, and its last token is not computed.
    let prompt = &sequence.request.prompt;
    let size = prompt.block_size();
    let (first, last) = (j * size, (j + 1) * size);
    out.clear();
    if first < prompt.len() {
        out.extend_from_slice(tail);
    }
    let outputs = first.max(prompt.len()) - prompt.len()..last - prompt.len();
    out.extend(outputs.map(|p| output.token(sequence.request.seed, p)));
}

/// Notes the full block `j` of a sequence, which was just stored: its tokens, as far as they are
/// known, and whether it opens the prompt.
fn push_stored(
    stored: &mut StoredBlocks,
    sequence: &Sequence,
    j: u32,
    output: &OutputModel,
    scratch: &mut Vec<TokenId>,
) {
    let prompt = &sequence.request.prompt;
    let size = prompt.block_size() as usize;
    let at = j as usize;
    let tokens = if at < prompt.blocks().len() {
        let all = prompt.block_tokens();
        all.map_or(&[][..], |all| &all[at * size..(at + 1) * size])
    } else if let Tail::Tokens(tail) = prompt.tail() {
        generated_tokens(sequence, j, tail, output, scratch);
        &scratch[..]
    } else {
        &[]
    };
    stored.push(tokens, j == 0);
}
