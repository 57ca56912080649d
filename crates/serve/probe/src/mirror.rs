//! An engine's KV cache, as its KV events describe it, under our own block hashes.
//!
//! Engines name blocks by hashes of their own (SHA-256 over pickled Python values in vLLM), which a
//! router cannot compute from a prompt. But a stored block comes with its tokens and the hash of the
//! block before it. [`KvMirror`] keeps, for each block that the engine holds, its place in *our*
//! chain of hashes ([`BlockHash::child`]), so the next block can be chained to it. It turns the
//! engine's events into [`KvOp`]s with our hashes, which a router's index applies.
//!
//! Rules:
//!
//! * vLLM does not merge equal blocks: two requests that compute the same prefix at once store it
//!   twice, and it is removed twice. Copies are counted; a block is removed with its last copy.
//! * Only blocks in GPU memory count, and only those of one group of layers: the first whose
//!   attention covers the whole context. Blocks of sliding windows and of Mamba states are hits only
//!   together with that group's.
//! * The engine's block size may differ from ours. A block of ours is stored with the engine's block
//!   that completes it, and removed with it.
//! * A block whose hash includes an image, audio or embeddings is chained over [`media_parent`], so
//!   it never equals a block of text.
//! * An engine's hash must identify a block with all tokens before it. Earlier SGLang versions hash the
//!   tokens of a page alone. One hash for two prefixes shows that; the view is then given up.
//! * Blocks whose tokens or whose predecessor are unknown are counted and skipped. They look not
//!   cached, which costs a hit, but never a wrong one.
//! * An unreadable event costs the blocks that it may have removed
//!   ([`KvEventBatch::decode`]).

use std::collections::HashMap;

use lru::LruCache;
use slipstream_base::width::low_u32;
use slipstream_base::{BlockHash, KvOp, TokenId};
use slipstream_events::kv::{ExternalHash, ExtraKey};
use slipstream_events::{BlockRemoved, BlockStored, KvEvent, KvEventBatch};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::readability::Reading;

/// Settings of a [`KvMirror`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorOptions {
    /// Model name in the root of our chains: [`BlockHash::root`]`(model, lora_name, cache_salt)`.
    pub model: String,
    /// Tokens per block of the router. The engine's blocks may have another size.
    pub block_size: u32,
    /// Blocks kept at most: the engine's number of KV blocks. Beyond it the block that was stored
    /// or extended longest ago is dropped. Memory: about 150 bytes per block.
    pub blocks_max: usize,
}

/// Counters of a [`KvMirror`], since its start. Blocks are the engine's unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MirrorCounts {
    /// Blocks stored, copies included.
    pub stored: u64,
    /// Blocks removed, copies included.
    pub removed: u64,
    /// Times that the engine cleared its cache, or that the view was given up.
    pub cleared: u64,
    /// Stored blocks skipped because the block before them is unknown.
    pub unknown_parent: u64,
    /// Stored blocks skipped because the event has no tokens.
    pub without_tokens: u64,
    /// Stored blocks skipped because hashes, tokens and block size do not fit together.
    pub malformed: u64,
    /// Removed blocks that were not known.
    pub unknown_removed: u64,
    /// Stored blocks of other groups of layers.
    pub other_groups: u64,
    /// Stored blocks in other memory than the GPU's.
    pub other_media: u64,
    /// Blocks dropped because there were more than `blocks_max`.
    pub over_capacity: u64,
    /// Stored blocks under a hash that stood for another prefix, and all that were stored after that.
    pub ambiguous: u64,
    /// Blocks dropped because an unreadable event names them. The view itself is in `cleared`.
    pub doubted: u64,
    /// Times that the counts of copies exceeded `blocks_max` and were set to one each.
    pub recounted: u64,
}

/// A block that the engine holds.
#[derive(Debug)]
struct Held {
    /// Copies in the engine.
    copies: u32,
    /// Digest of the prompt's cache salt; 0 without one.
    salt: u32,
    /// Our chain up to the last of our blocks that ends in or before this one.
    chain: BlockHash,
    /// Tokens after the end of `chain`; fewer than our block size.
    pending: Box<[TokenId]>,
    /// Our blocks that end in this one.
    ours: Ours,
}

/// Hashes of our blocks. Most often one.
#[derive(Debug)]
enum Ours {
    None,
    One(BlockHash),
    Several(Box<[BlockHash]>),
}

impl Ours {
    fn as_slice(&self) -> &[BlockHash] {
        match self {
            Ours::None => &[],
            Ours::One(hash) => std::slice::from_ref(hash),
            Ours::Several(hashes) => hashes,
        }
    }
}

/// A group of layers in events; `None` in events without groups.
type Group = Option<u32>;

/// Follows one rank of an engine. See the module's documentation.
#[derive(Debug)]
pub struct KvMirror {
    options: MirrorOptions,
    /// By the engine's hash, in the order of use as stored block or as parent.
    held: LruCache<u128, Held>,
    /// Our blocks, each with the number of the engine's blocks that hold it: two differ in what our
    /// hash does not include, such as lookahead tokens.
    ours: HashMap<BlockHash, u32>,
    /// Sum of `copies`.
    copies: u64,
    /// The group that is followed.
    group: Option<Group>,
    /// Whether one hash stood for two prefixes.
    unusable: bool,
    counts: MirrorCounts,
}

impl KvMirror {
    /// An empty view.
    ///
    /// # Panics
    /// If `block_size` is 0.
    pub fn new(options: MirrorOptions) -> KvMirror {
        assert!(options.block_size > 0, "a block has at least one token");
        KvMirror {
            options,
            held: LruCache::unbounded(), // bounded in `insert`, but not allocated ahead
            ours: HashMap::new(),
            copies: 0,
            group: None,
            unusable: false,
            counts: MirrorCounts::default(),
        }
    }

    /// Counters.
    pub fn counts(&self) -> MirrorCounts {
        self.counts
    }

    /// The engine's blocks that are known, without their copies.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Our blocks that are known.
    pub fn our_blocks(&self) -> usize {
        self.ours.len()
    }

    /// Whether the engine's hashes do not identify prefixes. Then nothing is known of its cache, until
    /// [`restart`](KvMirror::restart); use an approximate index.
    pub fn is_unusable(&self) -> bool {
        self.unusable
    }

    /// Applies a batch, and appends the changes of our blocks to `ops`, in order. Returns how much of
    /// it was understood.
    pub fn apply(&mut self, batch: &KvEventBatch, ops: &mut Vec<KvOp>) -> Reading {
        let mut reading = Reading {
            events: batch.unreadable.events,
            unreadable: batch.unreadable.events,
            views_lost: 0,
        };
        for event in &batch.events {
            match event {
                KvEvent::Unreadable { block_hashes: None } => {
                    reading.views_lost += 1;
                    self.clear(ops);
                    continue; // counted in `unreadable.events`
                }
                KvEvent::Unreadable {
                    block_hashes: Some(hashes),
                } => {
                    self.doubt(hashes, ops);
                    continue;
                }
                KvEvent::BlockStored(stored) => {
                    let skipped = |counts: MirrorCounts| counts.malformed + counts.without_tokens;
                    let before = skipped(self.counts);
                    self.on_stored(stored, ops);
                    reading.unreadable += u64::from(skipped(self.counts) > before);
                }
                KvEvent::BlockRemoved(removed) => self.on_removed(removed, ops),
                KvEvent::AllBlocksCleared {} => self.clear(ops),
            }
            reading.events += 1;
        }
        reading
    }

    /// Forgets all blocks: the engine cleared its cache, restarted, or changes were lost.
    pub fn clear(&mut self, ops: &mut Vec<KvOp>) {
        self.counts.cleared += 1;
        self.held.clear();
        self.ours.clear();
        self.copies = 0;
        // Earlier changes have no effect any more.
        ops.clear();
        ops.push(KvOp::Cleared);
    }

    /// Forgets all blocks and all facts of the engine: it is another process.
    pub fn restart(&mut self, ops: &mut Vec<KvOp>) {
        self.clear(ops);
        self.group = None;
        self.unusable = false;
    }

    fn on_stored(&mut self, stored: &BlockStored, ops: &mut Vec<KvOp>) {
        let blocks = stored.block_hashes.len();
        let count = blocks as u64;
        if self.unusable {
            self.counts.ambiguous += count;
            return;
        }
        if !in_gpu(stored.medium.as_deref()) {
            self.counts.other_media += count;
            return;
        }
        if !self.follows(stored) {
            self.counts.other_groups += count;
            return;
        }
        if blocks == 0 {
            return;
        }
        if stored.token_ids.is_empty() {
            self.counts.without_tokens += count;
            return;
        }
        let size = stored.block_size as usize;
        let fits = size > 0 && size.checked_mul(blocks) == Some(stored.token_ids.len());
        let keys = stored.extra_keys.as_deref().unwrap_or_default();
        if !fits || !(keys.is_empty() || keys.len() == blocks) {
            self.counts.malformed += count;
            return;
        }
        let (mut chain, mut pending, salt) = match &stored.parent_block_hash {
            None => (self.root(stored), Vec::new(), salt_digest(salt_of(stored))),
            Some(parent) => {
                let Some(parent) = self.held.get(&key(parent)) else {
                    self.counts.unknown_parent += count;
                    return;
                };
                // Engines that name the salt in each event name it in the parent's too.
                let named = stored.cache_salt.as_deref();
                if named.is_some_and(|salt| salt_digest(Some(salt)) != parent.salt) {
                    self.counts.malformed += count;
                    return;
                }
                (parent.chain, parent.pending.to_vec(), parent.salt)
            }
        };
        let first = stored.parent_block_hash.is_none();
        for (at, hash) in stored.block_hashes.iter().enumerate() {
            let tokens = &stored.token_ids[at * size..(at + 1) * size];
            let keys = keys.get(at).and_then(Option::as_deref).unwrap_or_default();
            let name = stored.lora_name.as_deref();
            let (_, media) = split_keys(keys, name, first && at == 0);
            if !media.is_empty() {
                chain = fold(chain, media);
            }
            let parent = chain;
            let ours = self.extend(&mut chain, &mut pending, tokens);
            let key = key(hash);
            let held = self.held.peek(&key);
            if held.is_some_and(|held| held.chain != chain || *held.pending != *pending) {
                self.counts.ambiguous += (blocks - at) as u64;
                self.unusable = true;
                self.clear(ops);
                return;
            }
            let held = Held {
                copies: 1,
                salt,
                chain,
                pending: pending.as_slice().into(),
                ours,
            };
            self.insert(key, parent, held, ops);
            self.counts.stored += 1;
        }
    }

    /// Chains `tokens`: our blocks that they complete.
    fn extend(
        &self,
        chain: &mut BlockHash,
        pending: &mut Vec<TokenId>,
        tokens: &[TokenId],
    ) -> Ours {
        let size = self.options.block_size as usize;
        if pending.is_empty() && tokens.len() == size {
            *chain = chain.child(tokens);
            return Ours::One(*chain);
        }
        pending.extend_from_slice(tokens);
        let full = pending.len() / size * size;
        let completed: Box<[BlockHash]> = pending[..full]
            .chunks_exact(size)
            .map(|block| {
                *chain = chain.child(block);
                *chain
            })
            .collect();
        pending.drain(..full);
        match &completed[..] {
            [] => Ours::None,
            [one] => Ours::One(*one),
            _ => Ours::Several(completed),
        }
    }

    /// Adds a copy of the engine's block `key`, whose blocks of ours follow `parent`.
    fn insert(&mut self, key: u128, parent: BlockHash, block: Held, ops: &mut Vec<KvOp>) {
        self.copies += 1;
        if let Some(held) = self.held.get_mut(&key) {
            held.copies = held.copies.saturating_add(1);
            if self.copies > self.options.blocks_max as u64 {
                self.recount();
            }
            return;
        }
        let mut before = parent;
        for &hash in block.ours.as_slice() {
            let holders = self.ours.entry(hash).or_insert(0);
            *holders += 1;
            if *holders == 1 {
                ops.push(KvOp::Stored {
                    hash,
                    parent: before,
                });
            }
            before = hash;
        }
        self.held.put(key, block);
        if self.held.len() > self.options.blocks_max
            && let Some((_, oldest)) = self.held.pop_lru()
        {
            self.counts.over_capacity += 1;
            self.copies -= u64::from(oldest.copies);
            self.release(&oldest.ours, ops);
        }
        if self.copies > self.options.blocks_max as u64 {
            self.recount();
        }
    }

    /// An engine cannot hold more copies than it has blocks. It reports more if it is asked to
    /// report reused blocks as stored (vLLM's `kv_cache_report_mode`); then copies are unknown.
    fn recount(&mut self) {
        self.counts.recounted += 1;
        for (_, held) in &mut self.held {
            held.copies = 1;
        }
        self.copies = self.held.len() as u64;
    }

    fn on_removed(&mut self, removed: &BlockRemoved, ops: &mut Vec<KvOp>) {
        // Removals often have no group if there is only one.
        let of_group = removed.group_idx.is_none() || self.group == Some(removed.group_idx);
        if !in_gpu(removed.medium.as_deref()) || !of_group {
            return;
        }
        for hash in &removed.block_hashes {
            let key = key(hash);
            let Some(held) = self.held.peek_mut(&key) else {
                self.counts.unknown_removed += 1;
                continue;
            };
            self.counts.removed += 1;
            self.copies -= 1;
            held.copies -= 1;
            if held.copies == 0
                && let Some(held) = self.held.pop(&key)
            {
                self.release(&held.ours, ops);
            }
        }
    }

    /// Drops blocks that the engine may have removed, with all copies.
    fn doubt(&mut self, hashes: &[ExternalHash], ops: &mut Vec<KvOp>) {
        for hash in hashes {
            if let Some(held) = self.held.pop(&key(hash)) {
                self.counts.doubted += 1;
                self.copies -= u64::from(held.copies);
                self.release(&held.ours, ops);
            }
        }
    }

    /// One holder less of each of our blocks in `ours`.
    fn release(&mut self, ours: &Ours, ops: &mut Vec<KvOp>) {
        // A chain's end first, as in an engine.
        for &hash in ours.as_slice().iter().rev() {
            let Some(holders) = self.ours.get_mut(&hash) else {
                continue;
            };
            *holders -= 1;
            if *holders == 0 {
                self.ours.remove(&hash);
                ops.push(KvOp::Removed { hash });
            }
        }
    }

    /// Whether the group of `stored` is the one that is followed; the first of its kind becomes it.
    fn follows(&mut self, stored: &BlockStored) -> bool {
        let covers_all = match stored.kv_cache_spec_kind.as_deref() {
            Some(kind) => matches!(
                kind,
                "full_attention" | "mla_attention" | "sink_full_attention"
            ),
            // Events of earlier versions name no kind. There the first group is the one with
            // full attention, if there is one.
            None => stored.group_idx.is_none_or(|group| group == 0),
        };
        covers_all && *self.group.get_or_insert(stored.group_idx) == stored.group_idx
    }

    /// The root of a prompt that begins with `stored`.
    fn root(&self, stored: &BlockStored) -> BlockHash {
        let name = stored.lora_name.as_deref();
        let salt = salt_of(stored);
        // Versions that publish the number alone: an adapter that no request names.
        let number = match (name, stored.lora_id) {
            (None, Some(id)) => Some(format!("lora_id={id}")),
            _ => None,
        };
        let lora = name.or(number.as_deref()).unwrap_or_default();
        BlockHash::root(&self.options.model, lora, salt.unwrap_or_default())
    }
}

/// The cache salt of a prompt that begins with `stored`.
fn salt_of(stored: &BlockStored) -> Option<&str> {
    let keys = stored.extra_keys.as_deref().unwrap_or_default().first();
    let keys = keys.and_then(Option::as_deref).unwrap_or_default();
    let (salt, _) = split_keys(keys, stored.lora_name.as_deref(), true);
    stored
        .cache_salt
        .as_deref()
        .or(salt)
        .filter(|salt| !salt.is_empty())
}

/// Digest of a salt, which is not 0.
fn salt_digest(salt: Option<&str>) -> u32 {
    salt.filter(|salt| !salt.is_empty())
        .map_or(0, |salt| low_u32(xxh3_64(salt.as_bytes())) | 1)
}

/// Whether a block is in GPU memory. Events of earlier versions name no medium.
fn in_gpu(medium: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium.eq_ignore_ascii_case(slipstream_events::kv::MEDIUM_GPU))
}

/// A key of fixed size for an engine's hash. Numbers and bytes never coincide in practice: 128 bits.
fn key(hash: &ExternalHash) -> u128 {
    match hash {
        ExternalHash::Int(number) => u128::from(*number),
        ExternalHash::Bytes(bytes) => xxh3_128(bytes),
    }
}

/// Divides a block's extra keys into the cache salt and those of its content. vLLM's order: the
/// name of the LoRA adapter, pairs of an item's identifier and offset, the salt (first block
/// only), digests of embeddings.
fn split_keys<'k>(
    keys: &'k [ExtraKey],
    lora: Option<&str>,
    first: bool,
) -> (Option<&'k str>, &'k [ExtraKey]) {
    let named = |key: &ExtraKey| matches!(key, ExtraKey::Text(text) if Some(text.as_str()) == lora);
    let keys = match keys.split_first() {
        Some((key, rest)) if named(key) => rest,
        _ => keys,
    };
    match keys {
        // The only other key: the usual case of a salted prompt of text.
        [ExtraKey::Text(salt)] if first => (Some(salt), &[]),
        _ => (None, keys),
    }
}

/// The parent that a block with media in it is chained to instead of `parent`. `keys` are its extra
/// keys without a LoRA adapter's name: in vLLM, pairs of an item's identifier and its offset.
pub fn media_parent(parent: BlockHash, keys: &[ExtraKey]) -> BlockHash {
    fold(parent, keys)
}

fn fold(parent: BlockHash, keys: &[ExtraKey]) -> BlockHash {
    keys.iter().fold(parent, |parent, key| match key {
        ExtraKey::Text(text) => parent.child_of_id(xxh3_64(text.as_bytes()), 1),
        ExtraKey::Bytes(bytes) => parent.child_of_id(xxh3_64(bytes), 2),
        ExtraKey::Uint(number) => parent.child_of_id(*number, 3),
        ExtraKey::Int(number) => parent.child_of_id(number.cast_unsigned(), 4),
        ExtraKey::List(keys) => fold(parent.child_of_id(keys.len() as u64, 5), keys),
    })
}
