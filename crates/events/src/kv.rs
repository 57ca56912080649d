//! KV events as vLLM publishes them: MessagePack batches that say which blocks a rank's cache
//! gained and lost.
//!
//! vLLM (`vllm/distributed/kv_events.py`) writes maps today and wrote positional arrays before;
//! both are read, maps are written. A batch is `{ts, events, data_parallel_rank}`; an event is one
//! of [`KvEvent`], told apart by `type` in a map and by the first item in an array. Fields that
//! vLLM adds and this crate does not know are skipped.

use serde::Serialize;
use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::{BlockHash, KvOp, TokenId};

use crate::msgpack::{self, DecodeError, Reader};

/// Where blocks lie that a GPU holds, in vLLM's word.
pub const MEDIUM_GPU: &str = "GPU";

/// A batch of events of one rank: what one pass changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct KvEventBatch {
    /// When it was made, seconds since 1970.
    pub ts: f64,
    /// In the order in which they happened.
    pub events: Vec<KvEvent>,
    /// The rank; vLLM leaves it out where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_parallel_rank: Option<u32>,
}

/// One change of a cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type")]
pub enum KvEvent {
    /// Blocks were stored, each following the one before it.
    BlockStored {
        /// Their hashes.
        block_hashes: Vec<ExternalHash>,
        /// The block before the first; none if that one opens a prompt.
        parent_block_hash: Option<ExternalHash>,
        /// Their tokens, `block_size` a block; empty where they are not known (a prompt that came
        /// as hashes, a snapshot).
        token_ids: Vec<TokenId>,
        /// Tokens a block.
        block_size: u32,
        /// Number of the LoRA adapter (deprecated in vLLM).
        lora_id: Option<u64>,
        /// Where they lie: [`MEDIUM_GPU`].
        medium: Option<String>,
        /// The LoRA adapter.
        lora_name: Option<String>,
        /// Group of layers that they belong to, in a hybrid cache.
        #[serde(skip_serializing_if = "Option::is_none")]
        group_idx: Option<u32>,
    },
    /// Blocks are gone.
    BlockRemoved {
        /// Their hashes.
        block_hashes: Vec<ExternalHash>,
        /// Where they lay.
        medium: Option<String>,
        /// Group of layers that they belonged to, in a hybrid cache.
        #[serde(skip_serializing_if = "Option::is_none")]
        group_idx: Option<u32>,
    },
    /// Every block is gone.
    AllBlocksCleared {},
}

/// A block's hash: a number, or bytes, as vLLM is configured.
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

impl KvEventBatch {
    /// Serialized into a new buffer.
    pub fn to_vec(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(self).expect("numbers and strings in memory always serialize")
    }

    /// Reads a batch: maps, positional arrays, or a mix.
    ///
    /// # Errors
    /// [`DecodeError`]: what is wrong, at which byte.
    pub fn decode(bytes: &[u8]) -> Result<KvEventBatch, DecodeError> {
        let mut reader = Reader::new(bytes);
        let mut batch = KvEventBatch::default();
        let fields = Fields::open(&mut reader, "a batch of KV events", BATCH_FIELDS)?;
        for place in 0..fields.len {
            match fields.name(place, &mut reader)? {
                "ts" => batch.ts = reader.float("ts")?,
                "events" => {
                    let len = reader.array("events")?;
                    for _ in 0..len {
                        batch.events.push(read_event(&mut reader)?);
                    }
                }
                "data_parallel_rank" => {
                    batch.data_parallel_rank =
                        optional(&mut reader, |r| r.u32("data_parallel_rank"))?;
                }
                _ => reader.skip("an unknown field")?,
            }
        }
        reader.end()?;
        Ok(batch)
    }
}

/// Fields of a positional batch.
const BATCH_FIELDS: &[&str] = &["ts", "events", "data_parallel_rank"];
/// Of a positional event, after its type. vLLM has only ever added fields at the end.
const STORED_FIELDS: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
];
const REMOVED_FIELDS: &[&str] = &["block_hashes", "medium", "group_idx"];

/// Fields of a struct, in a map by name or in an array by place.
struct Fields {
    len: usize,
    places: Option<&'static [&'static str]>,
}

impl Fields {
    fn open(
        reader: &mut Reader<'_>,
        what: &'static str,
        places: &'static [&'static str],
    ) -> Result<Fields, DecodeError> {
        if reader.is_array() {
            let len = reader.array(what)?;
            let places = Some(places);
            return Ok(Fields { len, places });
        }
        let len = reader.map(what)?;
        Ok(Fields { len, places: None })
    }

    /// Name of field number `place`; empty if it lies behind those that are known.
    fn name<'b>(&self, place: usize, reader: &mut Reader<'b>) -> Result<&'b str, DecodeError> {
        match self.places {
            Some(names) => Ok(names.get(place).copied().unwrap_or("")),
            None => reader.str("a field's name"),
        }
    }
}

fn read_event(reader: &mut Reader<'_>) -> Result<KvEvent, DecodeError> {
    let at = reader.at();
    let kind;
    let mut fields;
    if reader.is_array() {
        fields = Fields::open(reader, "a KV event", &[])?;
        if fields.len == 0 {
            return Err(Reader::value_error(at, "a KV event without a type"));
        }
        kind = reader.str("a KV event's type")?;
        fields.len -= 1;
    } else {
        fields = Fields::open(reader, "a KV event", &[])?;
        kind = type_of(reader, fields.len, at)?;
    }
    let mut parts = Parts::default();
    if fields.places.is_some() {
        fields.places = Some(match kind {
            "BlockStored" => STORED_FIELDS,
            "BlockRemoved" => REMOVED_FIELDS,
            _ => &[],
        });
    }
    for place in 0..fields.len {
        parts.read(fields.name(place, reader)?, reader)?;
    }
    let missing = |name: &str| Reader::value_error(at, format!("{kind} without `{name}`"));
    match kind {
        "BlockStored" => Ok(KvEvent::BlockStored {
            block_hashes: parts.block_hashes.ok_or_else(|| missing("block_hashes"))?,
            parent_block_hash: parts.parent_block_hash,
            token_ids: parts.token_ids.ok_or_else(|| missing("token_ids"))?,
            block_size: parts.block_size.ok_or_else(|| missing("block_size"))?,
            lora_id: parts.lora_id,
            medium: parts.medium,
            lora_name: parts.lora_name,
            group_idx: parts.group_idx,
        }),
        "BlockRemoved" => Ok(KvEvent::BlockRemoved {
            block_hashes: parts.block_hashes.ok_or_else(|| missing("block_hashes"))?,
            medium: parts.medium,
            group_idx: parts.group_idx,
        }),
        "AllBlocksCleared" => Ok(KvEvent::AllBlocksCleared {}),
        _ => Err(Reader::value_error(
            at,
            format!(
                "a KV event of type `{}`, which is not known",
                kind.escape_default()
            ),
        )),
    }
}

/// The value of `type` in the map of `len` fields that begins here; nothing is read.
fn type_of<'b>(reader: &Reader<'b>, len: usize, at: usize) -> Result<&'b str, DecodeError> {
    let mut ahead = reader.clone();
    for _ in 0..len {
        if ahead.str("a field's name")? == "type" {
            return ahead.str("a KV event's type");
        }
        ahead.skip("a field")?;
    }
    Err(Reader::value_error(at, "a KV event without a `type`"))
}

/// Fields of all events.
#[derive(Default)]
struct Parts {
    block_hashes: Option<Vec<ExternalHash>>,
    parent_block_hash: Option<ExternalHash>,
    token_ids: Option<Vec<TokenId>>,
    block_size: Option<u32>,
    lora_id: Option<u64>,
    medium: Option<String>,
    lora_name: Option<String>,
    group_idx: Option<u32>,
}

impl Parts {
    fn read(&mut self, name: &str, reader: &mut Reader<'_>) -> Result<(), DecodeError> {
        match name {
            "block_hashes" => {
                let len = reader.array("block_hashes")?;
                let hashes = (0..len)
                    .map(|_| read_hash(reader))
                    .collect::<Result<_, _>>()?;
                self.block_hashes = Some(hashes);
            }
            "parent_block_hash" => self.parent_block_hash = optional(reader, read_hash)?,
            "token_ids" => {
                let len = reader.array("token_ids")?;
                let tokens = (0..len)
                    .map(|_| reader.u32("a token"))
                    .collect::<Result<_, _>>()?;
                self.token_ids = Some(tokens);
            }
            "block_size" => self.block_size = Some(reader.u32("block_size")?),
            "lora_id" => self.lora_id = optional(reader, |r| r.uint("lora_id"))?,
            "medium" => self.medium = optional(reader, |r| Ok(r.str("medium")?.to_owned()))?,
            "lora_name" => {
                self.lora_name = optional(reader, |r| Ok(r.str("lora_name")?.to_owned()))?;
            }
            "group_idx" => self.group_idx = optional(reader, |r| r.u32("group_idx"))?,
            _ => reader.skip("a field")?,
        }
        Ok(())
    }
}

fn read_hash(reader: &mut Reader<'_>) -> Result<ExternalHash, DecodeError> {
    let what = "a block's hash";
    match reader.bytes(what)? {
        Some(bytes) => Ok(ExternalHash::Bytes(bytes.into())),
        None => reader.uint(what).map(ExternalHash::Int),
    }
}

fn optional<'b, T>(
    reader: &mut Reader<'b>,
    read: impl FnOnce(&mut Reader<'b>) -> Result<T, DecodeError>,
) -> Result<Option<T>, DecodeError> {
    if reader.nil() {
        return Ok(None);
    }
    read(reader).map(Some)
}

/// Changes of a cache that become one batch, and what is known besides.
#[derive(Clone, Copy, Debug)]
pub struct KvChanges<'c> {
    /// When, seconds since 1970.
    pub ts: f64,
    /// The rank in its worker.
    pub dp_rank: u16,
    /// Tokens a block.
    pub block_size: u32,
    /// What changed.
    pub ops: &'c [KvOp],
    /// Tokens of the stored blocks, one entry for each [`KvOp::Stored`]; none if not known.
    pub blocks: Option<&'c StoredBlocks>,
    /// Number of the first stored block of `ops` among `blocks`.
    pub first_block: usize,
    /// Root of chains whose first blocks are told by it alone, where `blocks` is not known.
    pub root: BlockHash,
}

/// A run of changes that one event tells.
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

    /// Whether stored block number `block`, which follows `parent`, opens a prompt.
    fn is_first(&self, block: usize, parent: BlockHash) -> bool {
        parent == self.root || self.blocks.is_some_and(|blocks| blocks.is_first(block))
    }

    /// Runs of stored blocks that follow each other, of removed ones, and single clearings.
    fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut at = 0;
        let mut block = self.first_block;
        std::iter::from_fn(move || {
            let first = self.ops.get(at)?;
            let (start, first_block) = (at, block);
            at += 1;
            match first {
                KvOp::Stored { hash, .. } => {
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
                KvOp::Removed { .. } => {
                    while let Some(KvOp::Removed { .. }) = self.ops.get(at) {
                        at += 1;
                    }
                }
                KvOp::Cleared => {}
            }
            Some(Run {
                start,
                end: at,
                block: first_block,
            })
        })
    }

    /// The batch, with fields of its own.
    pub fn to_batch(&self) -> KvEventBatch {
        let events = self.runs().map(|run| {
            let ops = &self.ops[run.start..run.end];
            let block_hashes = ops
                .iter()
                .filter_map(hash_of)
                .map(|hash| ExternalHash::Int(hash.0));
            match ops[0] {
                KvOp::Stored { parent, .. } => KvEvent::BlockStored {
                    block_hashes: block_hashes.collect(),
                    parent_block_hash: (!self.is_first(run.block, parent))
                        .then_some(ExternalHash::Int(parent.0)),
                    token_ids: (run.block..run.block + ops.len())
                        .flat_map(|block| self.tokens(block))
                        .copied()
                        .collect(),
                    block_size: self.block_size,
                    lora_id: None,
                    medium: Some(MEDIUM_GPU.to_owned()),
                    lora_name: None,
                    group_idx: None,
                },
                KvOp::Removed { .. } => KvEvent::BlockRemoved {
                    block_hashes: block_hashes.collect(),
                    medium: Some(MEDIUM_GPU.to_owned()),
                    group_idx: None,
                },
                KvOp::Cleared => KvEvent::AllBlocksCleared {},
            }
        });
        KvEventBatch {
            ts: self.ts,
            events: events.collect(),
            data_parallel_rank: Some(self.dp_rank.into()),
        }
    }

    /// Appends the batch to `out`: the bytes of [`KvEventBatch::to_vec`] without the copies in
    /// between.
    pub fn write(&self, out: &mut Vec<u8>) {
        use msgpack::{array, float, map, nil, string, uint};
        map(out, 3);
        string(out, "ts");
        float(out, self.ts);
        string(out, "events");
        array(out, self.runs().count() as u32);
        for run in self.runs() {
            let ops = &self.ops[run.start..run.end];
            match ops[0] {
                KvOp::Stored { parent, .. } => {
                    map(out, 8);
                    string(out, "type");
                    string(out, "BlockStored");
                    write_hashes(out, ops);
                    string(out, "parent_block_hash");
                    if self.is_first(run.block, parent) {
                        nil(out);
                    } else {
                        uint(out, parent.0);
                    }
                    string(out, "token_ids");
                    let blocks = run.block..run.block + ops.len();
                    let tokens: usize = blocks.clone().map(|b| self.tokens(b).len()).sum();
                    array(out, tokens as u32);
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
                }
                KvOp::Removed { .. } => {
                    map(out, 3);
                    string(out, "type");
                    string(out, "BlockRemoved");
                    write_hashes(out, ops);
                    string(out, "medium");
                    string(out, MEDIUM_GPU);
                }
                KvOp::Cleared => {
                    map(out, 1);
                    string(out, "type");
                    string(out, "AllBlocksCleared");
                }
            }
        }
        string(out, "data_parallel_rank");
        uint(out, self.dp_rank.into());
    }
}

fn write_hashes(out: &mut Vec<u8>, ops: &[KvOp]) {
    msgpack::string(out, "block_hashes");
    msgpack::array(out, ops.len() as u32);
    for hash in ops.iter().filter_map(hash_of) {
        msgpack::uint(out, hash.0);
    }
}

fn hash_of(op: &KvOp) -> Option<BlockHash> {
    match op {
        KvOp::Stored { hash, .. } | KvOp::Removed { hash } => Some(*hash),
        KvOp::Cleared => None,
    }
}

/// Appends a hash as it is on the wire; for those who write events of their own.
pub fn write_hash(out: &mut Vec<u8>, hash: &ExternalHash) {
    match hash {
        ExternalHash::Int(hash) => msgpack::uint(out, *hash),
        ExternalHash::Bytes(hash) => msgpack::bytes(out, hash),
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
        // Few hashes, so that chains come up.
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
            KvEvent::BlockStored {
                block_hashes,
                parent_block_hash: None,
                token_ids,
                ..
            },
            KvEvent::BlockStored {
                parent_block_hash: Some(ExternalHash::Int(1)),
                ..
            },
            KvEvent::BlockRemoved {
                block_hashes: gone, ..
            },
            KvEvent::AllBlocksCleared {},
        ] = &batch.events[..]
        else {
            panic!("{batch:?}")
        };
        assert_eq!(block_hashes.len(), 2);
        assert_eq!(token_ids, &[1, 1, 2, 2]);
        assert_eq!(gone.len(), 2);
    }

    #[test]
    fn positional_arrays_are_read() {
        // What vLLM wrote before it wrote maps: ["BlockStored", hashes, parent, tokens, size, lora].
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
        let stored = KvEvent::BlockStored {
            block_hashes: vec![ExternalHash::Int(1), ExternalHash::Int(2)],
            parent_block_hash: None,
            token_ids: vec![5, 6, 7, 8],
            block_size: 2,
            lora_id: None,
            medium: None,
            lora_name: None,
            group_idx: None,
        };
        let removed = KvEvent::BlockRemoved {
            block_hashes: vec![ExternalHash::Int(1)],
            medium: None,
            group_idx: None,
        };
        assert_eq!(
            batch.events,
            [stored, removed, KvEvent::AllBlocksCleared {}]
        );
    }

    #[test]
    fn what_is_missing_or_strange_is_named() {
        let check = |value: Vec<u8>, expected: &str| {
            let error = KvEventBatch::decode(&value).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let encode = |events: &[(&str, u32)]| rmp_serde::to_vec(&(1.0, events)).unwrap();
        check(
            encode(&[("BlockStolen", 1)]),
            "type `BlockStolen`, which is not known",
        );
        check(encode(&[("BlockStored", 1)]), "block_hashes expected");
        check(
            rmp_serde::to_vec(&(1.0, [("BlockStored",)])).unwrap(),
            "BlockStored without `block_hashes`",
        );
        check(
            rmp_serde::to_vec(&7).unwrap(),
            "a batch of KV events expected",
        );
        let mut extra = KvEventBatch::default().to_vec();
        extra.push(0);
        check(extra, "1 more bytes");
    }
}
