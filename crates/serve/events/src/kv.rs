//! KV events in vLLM's format: MessagePack batches of changes to a rank's set of cached blocks.
//!
//! ```text
//! [ts, [event, …], data_parallel_rank]
//! event: {"type": "BlockStored", "block_hashes": [h, …], "parent_block_hash": h or nil,
//!         "token_ids": [t, …], "block_size": n, "lora_id": nil, "medium": "GPU", "lora_name": nil,
//!         "extra_keys": [nil, …], "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
//!        {"type": "BlockRemoved", "block_hashes": [h], "medium": "GPU", "group_idx": 0}
//!        {"type": "AllBlocksCleared"}
//! ```
//!
//! Source: vLLM 0.33, `vllm/distributed/kv_events.py` (the batch is `array_like`, events are tagged
//! maps that omit defaults), and `BlockPool` for which fields are set. The golden test compares
//! bytes with those of vLLM's own classes. The reader also accepts batches that are maps, events that
//! are positional arrays, as older publishers write them, and SGLang's fields (0.5.23,
//! `srt/disaggregation/kv_events.py`). An unreadable event invalidates the blocks that it may have changed
//! ([`KvEventBatch::decode`]).

use serde::Serialize;
use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::width::{to_u16, to_u32};
use slipstream_base::{BlockHash, KvOp, TokenId};

use crate::msgpack;

mod read;

/// vLLM's name for the memory of a GPU.
pub const MEDIUM_GPU: &str = "GPU";

/// vLLM's name for the cache of layers that attend to the whole context.
pub const FULL_ATTENTION: &str = "full_attention";

/// A batch of events of one rank: the changes of one step.
///
/// Serializes (JSON) as a map; the wire format is [`KvEventBatch::to_vec`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KvEventBatch {
    /// Creation time, seconds since 1970.
    pub ts: f64,
    /// In order of occurrence.
    pub events: Vec<KvEvent>,
    /// The rank in its worker. vLLM always sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_rank: Option<u32>,
    /// Unreadable events. Not encoded.
    #[serde(skip_serializing_if = "UnreadableEvents::is_empty")]
    pub unreadable: UnreadableEvents,
}

/// Events of a batch that could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UnreadableEvents {
    /// Number of unreadable events.
    pub events: u64,
    /// Reason of the first one.
    pub first: Option<String>,
}

impl UnreadableEvents {
    fn is_empty(&self) -> bool {
        self.events == 0
    }
}

/// One change of a cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type")]
pub enum KvEvent {
    /// Blocks were stored; each follows the previous one.
    BlockStored(Box<BlockStored>),
    /// Blocks were evicted.
    BlockRemoved(BlockRemoved),
    /// All blocks were removed.
    AllBlocksCleared {},
    /// An unreadable event that may have removed blocks. Never encoded.
    Unreadable {
        /// The blocks that it may have removed; `None`: any.
        block_hashes: Option<Vec<ExternalHash>>,
    },
}

/// Stored blocks; each follows the previous one.
///
/// The fields from `cache_salt` on are omitted on the wire if they are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BlockStored {
    /// Hashes in prefix order. Shape `[n]`.
    pub block_hashes: Vec<ExternalHash>,
    /// The block before the first; `None` at the beginning of a prompt.
    pub parent_block_hash: Option<ExternalHash>,
    /// Tokens of the blocks, shape `[n * block_size]`. Empty if unknown: a prompt given as hashes, or
    /// a snapshot.
    pub token_ids: Vec<TokenId>,
    /// Tokens per block.
    pub block_size: u32,
    /// Number of the LoRA adapter (deprecated in vLLM).
    pub lora_id: Option<u64>,
    /// Storage medium, such as [`MEDIUM_GPU`].
    pub medium: Option<String>,
    /// The LoRA adapter.
    pub lora_name: Option<String>,
    /// The request's cache salt (SGLang). vLLM has it in `extra_keys` of a prompt's first block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// Inputs of each block's hash besides its tokens. Shape `[n]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra_keys: Option<Vec<Option<Vec<ExtraKey>>>>,
    /// Group of layers, in a hybrid cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_idx: Option<u32>,
    /// Kind of that group's cache, such as [`FULL_ATTENTION`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_spec_kind: Option<String>,
    /// Its window, tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_spec_sliding_window: Option<u32>,
    /// `LOCAL` or `REMOTE`, relative to the publisher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locality: Option<String>,
    /// The offloading tier that published the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ownership: Option<String>,
    /// The session whose request stored the blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_id: Option<String>,
    /// Tokens beyond each block that its hash includes. Shape `[n][any]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookahead_token_ids: Option<Vec<Vec<TokenId>>>,
}

/// Evicted blocks.
///
/// The fields from `group_idx` on are omitted on the wire if they are `None`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BlockRemoved {
    /// Their hashes. vLLM publishes one event per block.
    pub block_hashes: Vec<ExternalHash>,
    /// Storage medium.
    pub medium: Option<String>,
    /// Group of layers, in a hybrid cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_idx: Option<u32>,
    /// `LOCAL` or `REMOTE`, relative to the publisher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locality: Option<String>,
    /// The offloading tier that published the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ownership: Option<String>,
}

/// A block's hash: a number or bytes, depending on vLLM's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ExternalHash {
    /// 64 bits.
    Int(u64),
    /// A digest, such as the 32 bytes of SHA-256.
    Bytes(Box<[u8]>),
}

impl Serialize for ExternalHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ExternalHash::Int(hash) => serializer.serialize_u64(*hash),
            ExternalHash::Bytes(hash) => serializer.serialize_bytes(hash),
        }
    }
}

/// An input of a block's hash besides its tokens: the name of a LoRA adapter, a cache salt, a pair
/// of an image's identifier and its offset, or a digest of embeddings.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ExtraKey {
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Box<[u8]>),
    /// A whole number from 0.
    Uint(u64),
    /// A negative number.
    Int(i64),
    /// Several values.
    List(Vec<ExtraKey>),
}

impl KvEventBatch {
    /// The wire format, in a new buffer.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = Vec::new();
        msgpack::array(&mut out, 3);
        msgpack::float(&mut out, self.ts);
        let written = |event: &&KvEvent| !matches!(event, KvEvent::Unreadable { .. });
        msgpack::array(&mut out, to_u32(self.events.iter().filter(written).count()));
        for event in &self.events {
            match event {
                KvEvent::BlockStored(stored) => stored.write(&mut out),
                KvEvent::BlockRemoved(removed) => removed.write(&mut out),
                KvEvent::AllBlocksCleared {} => write_cleared(&mut out),
                KvEvent::Unreadable { .. } => {}
            }
        }
        write_or_nil(&mut out, self.data_parallel_rank, |out, rank| {
            msgpack::uint(out, rank.into());
        });
        out
    }
}

impl BlockStored {
    fn write(&self, out: &mut Vec<u8>) {
        use msgpack::{array, map16, string, uint};
        let optional = [
            self.cache_salt.is_some(),
            self.extra_keys.is_some(),
            self.group_idx.is_some(),
            self.kv_cache_spec_kind.is_some(),
            self.kv_cache_spec_sliding_window.is_some(),
            self.locality.is_some(),
            self.ownership.is_some(),
            self.session_id.is_some(),
            self.lookahead_token_ids.is_some(),
        ];
        let optional = to_u16(optional.iter().filter(|&&is_some| is_some).count());
        // `msgspec` chooses the header for all 16 fields of vLLM's class before it omits defaults.
        map16(out, 8 + optional);
        string(out, "type");
        string(out, "BlockStored");
        write_hashes(out, &self.block_hashes);
        string(out, "parent_block_hash");
        write_or_nil(out, self.parent_block_hash.as_ref(), write_hash);
        string(out, "token_ids");
        write_tokens(out, &self.token_ids);
        string(out, "block_size");
        uint(out, self.block_size.into());
        string(out, "lora_id");
        write_or_nil(out, self.lora_id, uint);
        string(out, "medium");
        write_or_nil(out, self.medium.as_deref(), string);
        string(out, "lora_name");
        write_or_nil(out, self.lora_name.as_deref(), string);
        write_if_some(out, "cache_salt", self.cache_salt.as_deref(), string);
        write_if_some(
            out,
            "extra_keys",
            self.extra_keys.as_ref(),
            |out, blocks| {
                array(out, to_u32(blocks.len()));
                for keys in blocks {
                    write_or_nil(out, keys.as_deref(), write_keys);
                }
            },
        );
        write_if_some(out, "group_idx", self.group_idx, |out, group| {
            uint(out, group.into());
        });
        let kind = self.kv_cache_spec_kind.as_deref();
        write_if_some(out, "kv_cache_spec_kind", kind, string);
        let window = self.kv_cache_spec_sliding_window;
        write_if_some(
            out,
            "kv_cache_spec_sliding_window",
            window,
            |out, window| {
                uint(out, window.into());
            },
        );
        write_if_some(out, "locality", self.locality.as_deref(), string);
        write_if_some(out, "ownership", self.ownership.as_deref(), string);
        write_if_some(out, "session_id", self.session_id.as_deref(), string);
        let lookahead = self.lookahead_token_ids.as_ref();
        write_if_some(out, "lookahead_token_ids", lookahead, |out, blocks| {
            array(out, to_u32(blocks.len()));
            for tokens in blocks {
                write_tokens(out, tokens);
            }
        });
    }
}

impl BlockRemoved {
    fn write(&self, out: &mut Vec<u8>) {
        use msgpack::{map, string, uint};
        let optional = [
            self.group_idx.is_some(),
            self.locality.is_some(),
            self.ownership.is_some(),
        ];
        let optional = to_u32(optional.iter().filter(|&&is_some| is_some).count());
        map(out, 3 + optional);
        string(out, "type");
        string(out, "BlockRemoved");
        write_hashes(out, &self.block_hashes);
        string(out, "medium");
        write_or_nil(out, self.medium.as_deref(), string);
        write_if_some(out, "group_idx", self.group_idx, |out, group| {
            uint(out, group.into());
        });
        write_if_some(out, "locality", self.locality.as_deref(), string);
        write_if_some(out, "ownership", self.ownership.as_deref(), string);
    }
}

fn write_cleared(out: &mut Vec<u8>) {
    msgpack::map(out, 1);
    msgpack::string(out, "type");
    msgpack::string(out, "AllBlocksCleared");
}

fn write_hashes(out: &mut Vec<u8>, hashes: &[ExternalHash]) {
    msgpack::string(out, "block_hashes");
    msgpack::array(out, to_u32(hashes.len()));
    for hash in hashes {
        write_hash(out, hash);
    }
}

fn write_hash(out: &mut Vec<u8>, hash: &ExternalHash) {
    match hash {
        ExternalHash::Int(hash) => msgpack::uint(out, *hash),
        ExternalHash::Bytes(hash) => msgpack::bytes(out, hash),
    }
}

fn write_tokens(out: &mut Vec<u8>, tokens: &[TokenId]) {
    msgpack::array(out, to_u32(tokens.len()));
    for &token in tokens {
        msgpack::uint(out, token.into());
    }
}

fn write_keys(out: &mut Vec<u8>, keys: &[ExtraKey]) {
    msgpack::array(out, to_u32(keys.len()));
    for key in keys {
        match key {
            ExtraKey::Text(text) => msgpack::string(out, text),
            ExtraKey::Bytes(bytes) => msgpack::bytes(out, bytes),
            ExtraKey::Uint(number) => msgpack::uint(out, *number),
            ExtraKey::Int(number) => msgpack::int(out, *number),
            ExtraKey::List(keys) => write_keys(out, keys),
        }
    }
}

fn write_or_nil<T>(out: &mut Vec<u8>, value: Option<T>, write: impl FnOnce(&mut Vec<u8>, T)) {
    match value {
        Some(value) => write(out, value),
        None => msgpack::nil(out),
    }
}

/// A field with default `None`, which vLLM omits.
fn write_if_some<T>(
    out: &mut Vec<u8>,
    name: &str,
    value: Option<T>,
    write: impl FnOnce(&mut Vec<u8>, T),
) {
    if let Some(value) = value {
        msgpack::string(out, name);
        write(out, value);
    }
}

/// Changes of a cache that become one batch, with their context.
#[derive(Clone, Copy, Debug)]
pub struct KvChanges<'c> {
    /// Time, seconds since 1970.
    pub ts: f64,
    /// The rank in its worker.
    pub dp_rank: u16,
    /// Tokens per block.
    pub block_size: u32,
    /// The changes.
    pub ops: &'c [KvOp],
    /// Tokens of the stored blocks, one entry for each [`KvOp::Stored`]; `None` if unknown.
    pub blocks: Option<&'c StoredBlocks>,
    /// Number of the first stored block of `ops` among `blocks`.
    pub first_block: usize,
    /// Root of chains without a salt.
    pub root: BlockHash,
}

/// A run of changes, published as one event.
struct Run {
    /// Ops `start..end`.
    start: usize,
    end: usize,
    /// Number of its first stored block.
    block: usize,
}

impl KvChanges<'_> {
    fn tokens(&self, block: usize) -> &[TokenId] {
        self.blocks.map_or(&[], |blocks| blocks.tokens(block))
    }

    /// Whether stored block number `block`, which follows `parent`, begins a prompt.
    fn is_first(&self, block: usize, parent: BlockHash) -> bool {
        parent == self.root || self.blocks.is_some_and(|blocks| blocks.is_first(block))
    }

    /// The extra key of a stored block that follows `parent`: the salt of a prompt's first block.
    /// The engine receives only the chain's root, not the salt, so the root is used instead.
    fn salt(&self, is_first: bool, parent: BlockHash) -> Option<String> {
        (is_first && parent != self.root).then(|| format!("{:016x}", parent.0))
    }

    /// Runs of consecutive stored blocks; single removals and clearings, because vLLM publishes an
    /// event for each.
    fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut at = 0;
        let mut block = self.first_block;
        std::iter::from_fn(move || {
            let first = self.ops.get(at)?;
            let (start, first_block) = (at, block);
            at += 1;
            if let KvOp::Stored { hash, .. } = first {
                let known = self.tokens(block).is_empty();
                block += 1;
                let mut last = *hash;
                while let Some(KvOp::Stored { hash, parent }) = self.ops.get(at)
                    && *parent == last
                    && self.tokens(block).is_empty() == known
                {
                    last = *hash;
                    at += 1;
                    block += 1;
                }
            }
            Some(Run {
                start,
                end: at,
                block: first_block,
            })
        })
    }

    /// The batch with owned fields.
    pub fn to_batch(&self) -> KvEventBatch {
        let events = self.runs().map(|run| {
            let ops = &self.ops[run.start..run.end];
            let block_hashes = ops
                .iter()
                .filter_map(hash_of)
                .map(|hash| ExternalHash::Int(hash.0))
                .collect();
            match ops[0] {
                KvOp::Stored { parent, .. } => {
                    let is_first = self.is_first(run.block, parent);
                    let salt = self.salt(is_first, parent);
                    let mut extra_keys = vec![None; ops.len()];
                    extra_keys[0] = salt.map(|salt| vec![ExtraKey::Text(salt)]);
                    KvEvent::BlockStored(Box::new(BlockStored {
                        block_hashes,
                        parent_block_hash: (!is_first).then_some(ExternalHash::Int(parent.0)),
                        token_ids: (run.block..run.block + ops.len())
                            .flat_map(|block| self.tokens(block))
                            .copied()
                            .collect(),
                        block_size: self.block_size,
                        medium: Some(MEDIUM_GPU.to_owned()),
                        extra_keys: Some(extra_keys),
                        group_idx: Some(0),
                        kv_cache_spec_kind: Some(FULL_ATTENTION.to_owned()),
                        ..BlockStored::default()
                    }))
                }
                KvOp::Removed { .. } => KvEvent::BlockRemoved(BlockRemoved {
                    block_hashes,
                    medium: Some(MEDIUM_GPU.to_owned()),
                    group_idx: Some(0),
                    ..BlockRemoved::default()
                }),
                KvOp::Cleared => KvEvent::AllBlocksCleared {},
            }
        });
        KvEventBatch {
            ts: self.ts,
            events: events.collect(),
            data_parallel_rank: Some(self.dp_rank.into()),
            unreadable: UnreadableEvents::default(),
        }
    }

    /// Appends the batch to `out`: the same bytes as [`KvEventBatch::to_vec`], without intermediate
    /// copies.
    pub fn write(&self, out: &mut Vec<u8>) {
        use msgpack::{array, float, map, map16, nil, string, uint};
        array(out, 3);
        float(out, self.ts);
        array(out, to_u32(self.runs().count()));
        for run in self.runs() {
            let ops = &self.ops[run.start..run.end];
            match ops[0] {
                KvOp::Stored { parent, .. } => {
                    map16(out, 11); // as in `BlockStored::write`
                    string(out, "type");
                    string(out, "BlockStored");
                    string(out, "block_hashes");
                    array(out, to_u32(ops.len()));
                    for hash in ops.iter().filter_map(hash_of) {
                        uint(out, hash.0);
                    }
                    string(out, "parent_block_hash");
                    let is_first = self.is_first(run.block, parent);
                    if is_first {
                        nil(out);
                    } else {
                        uint(out, parent.0);
                    }
                    string(out, "token_ids");
                    let blocks = run.block..run.block + ops.len();
                    let tokens: usize = blocks.clone().map(|b| self.tokens(b).len()).sum();
                    array(out, to_u32(tokens));
                    for &token in blocks.flat_map(|block| self.tokens(block)) {
                        uint(out, token.into());
                    }
                    string(out, "block_size");
                    uint(out, self.block_size.into());
                    string(out, "lora_id");
                    nil(out);
                    string(out, "medium");
                    string(out, MEDIUM_GPU);
                    string(out, "lora_name");
                    nil(out);
                    string(out, "extra_keys");
                    array(out, to_u32(ops.len()));
                    match self.salt(is_first, parent) {
                        Some(salt) => {
                            array(out, 1);
                            string(out, &salt);
                        }
                        None => nil(out),
                    }
                    out.resize(out.len() + ops.len() - 1, msgpack::NIL);
                    string(out, "group_idx");
                    uint(out, 0);
                    string(out, "kv_cache_spec_kind");
                    string(out, FULL_ATTENTION);
                }
                KvOp::Removed { hash } => {
                    map(out, 4);
                    string(out, "type");
                    string(out, "BlockRemoved");
                    string(out, "block_hashes");
                    array(out, 1);
                    uint(out, hash.0);
                    string(out, "medium");
                    string(out, MEDIUM_GPU);
                    string(out, "group_idx");
                    uint(out, 0);
                }
                KvOp::Cleared => write_cleared(out),
            }
        }
        uint(out, self.dp_rank.into());
    }
}

fn hash_of(op: &KvOp) -> Option<BlockHash> {
    match op {
        KvOp::Stored { hash, .. } | KvOp::Removed { hash } => Some(*hash),
        KvOp::Cleared => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOT: BlockHash = BlockHash(99);

    fn changes<'c>(ops: &'c [KvOp], blocks: Option<&'c StoredBlocks>) -> KvChanges<'c> {
        KvChanges {
            ts: 1.5,
            dp_rank: 3,
            block_size: 2,
            ops,
            blocks,
            first_block: 0,
            root: ROOT,
        }
    }

    fn stored(hash: u64, parent: u64) -> KvOp {
        KvOp::Stored {
            hash: BlockHash(hash),
            parent: BlockHash(parent),
        }
    }

    fn removed(hash: u64) -> KvOp {
        KvOp::Removed {
            hash: BlockHash(hash),
        }
    }

    fn op() -> impl Strategy<Value = KvOp> {
        // Few hashes, so that chains occur.
        prop_oneof![
            5 => (0u64..4, 0u64..4).prop_map(|(hash, parent)| stored(hash, parent)),
            2 => any::<u64>().prop_map(removed),
            1 => Just(KvOp::Cleared),
        ]
    }

    proptest! {
        #[test]
        fn both_forms_give_the_same_bytes_and_are_read_back(
            ops in prop::collection::vec(op(), 0..40),
            known in prop::option::of(prop::collection::vec((any::<bool>(), any::<bool>()), 40)),
        ) {
            let blocks = known.map(|known| {
                let mut blocks = StoredBlocks::default();
                for (known, first) in known {
                    blocks.push(if known { &[7, 70_000] } else { &[] }, first);
                }
                blocks
            });
            let changes = changes(&ops, blocks.as_ref());
            let batch = changes.to_batch();
            let mut borrowed = Vec::new();
            changes.write(&mut borrowed);
            prop_assert_eq!(&borrowed, &batch.to_vec());
            prop_assert_eq!(KvEventBatch::decode(&borrowed).unwrap(), batch);
        }

        #[test]
        fn a_batch_cut_anywhere_is_refused(
            ops in prop::collection::vec(op(), 0..8), cut in 0.0..1.0f64,
        ) {
            let whole = changes(&ops, None).to_batch().to_vec();
            let cut = (whole.len() as f64 * cut) as usize;
            prop_assert!(KvEventBatch::decode(&whole[..cut]).is_err());
        }

        #[test]
        fn arbitrary_and_changed_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            ops in prop::collection::vec(op(), 1..8), at in any::<usize>(), to in any::<u8>(),
        ) {
            let _ = KvEventBatch::decode(&bytes);
            let mut bytes = changes(&ops, None).to_batch().to_vec();
            let at = at % bytes.len();
            bytes[at] = to;
            let _ = KvEventBatch::decode(&bytes);
        }
    }

    #[test]
    fn blocks_that_follow_each_other_are_one_event() {
        let mut blocks = StoredBlocks::default();
        for hash in 1..=3 {
            blocks.push(&[hash, hash], hash == 1);
        }
        let ops = [
            stored(1, 50),
            stored(2, 1),
            stored(3, 1),
            removed(8),
            removed(9),
            KvOp::Cleared,
        ];
        let batch = changes(&ops, Some(&blocks)).to_batch();
        let [
            KvEvent::BlockStored(first),
            KvEvent::BlockStored(second),
            KvEvent::BlockRemoved(removed),
            KvEvent::BlockRemoved(_),
            KvEvent::AllBlocksCleared {},
        ] = &batch.events[..]
        else {
            panic!("{batch:?}")
        };
        assert_eq!(first.block_hashes.len(), 2);
        assert_eq!(first.parent_block_hash, None);
        assert_eq!(first.token_ids, [1, 1, 2, 2]);
        assert_eq!(second.parent_block_hash, Some(ExternalHash::Int(1)));
        assert_eq!(removed.block_hashes, [ExternalHash::Int(8)]);
    }

    #[test]
    fn positional_arrays_are_read() {
        // vLLM's format before events became maps:
        // ["BlockStored", hashes, parent, tokens, size, lora].
        let positional = (
            1.5,
            (
                (
                    "BlockStored",
                    (1u64, 2u64),
                    None::<u64>,
                    (5, 6, 7, 8),
                    2,
                    None::<u64>,
                ),
                ("BlockRemoved", (1u64,)),
                ("AllBlocksCleared",),
            ),
            3,
        );
        let batch = KvEventBatch::decode(&rmp_serde::to_vec(&positional).unwrap()).unwrap();
        assert_eq!((batch.ts, batch.data_parallel_rank), (1.5, Some(3)));
        let stored = KvEvent::BlockStored(Box::new(BlockStored {
            block_hashes: vec![ExternalHash::Int(1), ExternalHash::Int(2)],
            token_ids: vec![5, 6, 7, 8],
            block_size: 2,
            ..BlockStored::default()
        }));
        let removed = KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: vec![ExternalHash::Int(1)],
            ..BlockRemoved::default()
        });
        assert_eq!(
            batch.events,
            [stored, removed, KvEvent::AllBlocksCleared {}]
        );
    }

    /// Decodes `batch`, which may have events that cannot be read.
    fn read(batch: &impl Serialize) -> KvEventBatch {
        KvEventBatch::decode(&rmp_serde::to_vec_named(batch).unwrap()).unwrap()
    }

    #[test]
    fn what_is_missing_or_strange_is_named() {
        let check = |batch: KvEventBatch, expected: &str| {
            assert_eq!(batch.unreadable.events, 1, "{expected}");
            let error = batch.unreadable.first.unwrap();
            assert!(error.contains(expected), "{error}");
        };
        check(
            read(&(1.0, [("BlockStolen", 1)])),
            "unknown KV event type `BlockStolen`",
        );
        check(read(&(1.0, [("BlockStored", 1)])), "block_hashes expected");
        check(
            read(&(1.0, [("BlockStored",)])),
            "BlockStored without `block_hashes`",
        );
        let orphan = [("type", "BlockRemoved")];
        let orphan = orphan
            .into_iter()
            .collect::<std::collections::BTreeMap<_, _>>();
        check(read(&(1.0, [orphan])), "without `block_hashes`");
        let refused = |bytes: &[u8], expected: &str| {
            let error = KvEventBatch::decode(bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused(&[7], "a batch of KV events expected");
        refused(&rmp_serde::to_vec(&(1.0,)).unwrap(), "without `events`");
        let mut extra = KvEventBatch::default().to_vec();
        extra.push(0);
        refused(&extra, "1 more bytes");
    }

    /// Kinds of events that cannot be read, and the blocks that each may have removed.
    #[test]
    fn an_event_that_cannot_be_read_costs_what_it_may_have_changed() {
        use serde_json::json;
        let blocks = |hashes: &[u64]| {
            Some(KvEvent::Unreadable {
                block_hashes: Some(hashes.iter().copied().map(ExternalHash::Int).collect()),
            })
        };
        let any = || Some(KvEvent::Unreadable { block_hashes: None });
        for (event, cost) in [
            // Stored: nothing that was known.
            (
                json!({"type": "BlockStored", "block_hashes": [1], "token_ids": {}}),
                None,
            ),
            (json!(["BlockStored", [1], null, ["a", "b"], 2, null]), None),
            // Without its parent the block would begin a prompt.
            (
                json!({"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}),
                None,
            ),
            // A field that makes equal tokens different blocks.
            (
                json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null,
                    "token_ids": [1, 2], "block_size": 2, "prompt_salt": "s"}),
                None,
            ),
            (
                json!(["BlockStored", [1], null, [1, 2], 2, null, "GPU", {"tenant": "t"}]),
                None,
            ),
            (
                json!(["BlockStored", [1], null, [[1, 2], [3, 4]], 2, null]),
                None,
            ),
            (
                json!(["BlockStored", [1], null, [[1, 2, 3]], 1, null]),
                None,
            ),
            // Removed: the blocks that it names, or any.
            (
                json!({"type": "BlockRemoved", "block_hashes": [1, 2], "group_idx": "x"}),
                blocks(&[1, 2]),
            ),
            (
                json!({"type": "BlockRemoved", "block_hashes": [1, 2.5]}),
                any(),
            ),
            (json!({"type": "BlockRemoved", "hashes": [1]}), any()),
            (json!(["BlockRemoved", {"1": 2}]), any()),
            (
                json!({"type": "BlockRemoved", "block_hashes": {}, "medium": "CPU"}),
                None,
            ),
            // Unknown types.
            (
                json!({"type": "BlockPinned", "block_hashes": [3]}),
                blocks(&[3]),
            ),
            (json!(["BlockMoved", [3], "GPU"]), blocks(&[3])),
            (json!(["BlockMoved", [3], "CPU"]), None),
            (json!({"type": "Heartbeat", "at": 1.5}), None),
            (json!({"type": "CacheReset"}), any()),
            (json!({"type": 5, "block_hashes": [4]}), blocks(&[4])),
            (json!({"kind": "BlockRemoved"}), any()),
            (json!(null), any()),
            (json!([]), any()),
        ] {
            let clear = json!({"type": "AllBlocksCleared", "reason": {"new": [1]}});
            let batch = read(&json!([1.0, [clear, event, clear], 0]));
            assert_eq!(batch.unreadable.events, 1, "{event}");
            let cleared = || KvEvent::AllBlocksCleared {};
            let expected: Vec<KvEvent> = [Some(cleared()), cost, Some(cleared())]
                .into_iter()
                .flatten()
                .collect();
            assert_eq!(batch.events, expected, "{event}");
        }
    }

    #[test]
    fn fields_of_other_engines_are_read() {
        use serde_json::json;
        let stored = |event: serde_json::Value| {
            let mut batch = read(&json!([1.0, [event.clone()], 0]));
            assert_eq!(batch.unreadable, UnreadableEvents::default(), "{event}");
            match batch.events.remove(0) {
                KvEvent::BlockStored(stored) => *stored,
                other => panic!("{other:?}"),
            }
        };
        let positional = |tail: &[serde_json::Value]| {
            let mut event = json!(["BlockStored", [-5], null, [1, 2], 2, null, "GPU"]);
            event.as_array_mut().unwrap().extend_from_slice(tail);
            stored(event)
        };
        // SGLang 0.5.18: a map at position 7. Later a field.
        let salted = positional(&[json!({"cache_salt": "s", "session_id": 7})]);
        assert_eq!(
            (salted.cache_salt.as_deref(), salted.lora_name),
            (Some("s"), None)
        );
        let behind = positional(&[json!("lora"), json!({"cache_salt": "s"})]);
        assert_eq!(behind.lora_name.as_deref(), Some("lora"));
        assert_eq!(behind.cache_salt.as_deref(), Some("s"));
        let named = stored(
            json!({"type": "BlockStored", "block_hashes": ["ab"], "parent_block_hash": null,
            "token_ids": [1, 2], "block_size": 2, "lora_id": null, "cache_salt": "s", "session_id": {"a": 1},
            "locality": 3, "later_salt": null, "anything": [1, {"x": null}]}),
        );
        assert_eq!(named.cache_salt.as_deref(), Some("s"));
        assert_eq!(named.block_hashes, [ExternalHash::Bytes(b"ab"[..].into())]);
        // EAGLE: pairs. The hash of a block includes the token behind it.
        let pairs = json!([
            "BlockStored",
            [1, 2],
            null,
            [[5, 6], [6, 7], [7, 8], [8, 9]],
            2,
            null,
            "GPU"
        ]);
        let pairs = stored(pairs);
        assert_eq!(pairs.token_ids, [5, 6, 7, 8]);
        assert_eq!(pairs.lookahead_token_ids, Some(vec![vec![7], vec![9]]));
    }
}
