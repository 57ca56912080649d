//! Reader of batches of KV events.

use super::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use crate::msgpack::{DecodeError, Reader};

impl KvEventBatch {
    /// Reads a batch: maps, positional arrays, or a mix.
    ///
    /// # Errors
    /// [`DecodeError`]: the error and its byte offset.
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
/// Fields of a positional event, after its type. vLLM has only ever added fields at the end.
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
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
];
const REMOVED_FIELDS: &[&str] = &[
    "block_hashes",
    "medium",
    "group_idx",
    "locality",
    "ownership",
];

/// Fields of a struct, in a map by name or in an array by position.
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

    /// Name of field number `place`; empty beyond the known fields.
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
    let mut stored = BlockStored::default();
    let mut found = Found::default();
    if fields.places.is_some() {
        fields.places = Some(match kind {
            "BlockStored" => STORED_FIELDS,
            "BlockRemoved" => REMOVED_FIELDS,
            _ => &[],
        });
    }
    for place in 0..fields.len {
        read_field(fields.name(place, reader)?, reader, &mut stored, &mut found)?;
    }
    let require = |found: bool, name: &str| {
        if found {
            return Ok(());
        }
        Err(Reader::value_error(at, format!("{kind} without `{name}`")))
    };
    match kind {
        "BlockStored" => {
            require(found.block_hashes, "block_hashes")?;
            require(found.token_ids, "token_ids")?;
            require(found.block_size, "block_size")?;
            Ok(KvEvent::BlockStored(Box::new(stored)))
        }
        "BlockRemoved" => {
            require(found.block_hashes, "block_hashes")?;
            Ok(KvEvent::BlockRemoved(BlockRemoved {
                block_hashes: stored.block_hashes,
                medium: stored.medium,
                group_idx: stored.group_idx,
                locality: stored.locality,
                ownership: stored.ownership,
            }))
        }
        "AllBlocksCleared" => Ok(KvEvent::AllBlocksCleared {}),
        _ => Err(Reader::value_error(
            at,
            format!("unknown KV event type `{}`", kind.escape_default()),
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

/// Required fields that an event has.
#[derive(Default)]
struct Found {
    block_hashes: bool,
    token_ids: bool,
    block_size: bool,
}

/// Reads the field `name` of an event of either kind into `event`.
fn read_field(
    name: &str,
    reader: &mut Reader<'_>,
    event: &mut BlockStored,
    found: &mut Found,
) -> Result<(), DecodeError> {
    match name {
        "block_hashes" => {
            event.block_hashes = list(reader, "block_hashes", read_hash)?;
            found.block_hashes = true;
        }
        "parent_block_hash" => event.parent_block_hash = optional(reader, read_hash)?,
        "token_ids" => {
            event.token_ids = list(reader, "token_ids", |r| r.u32("a token"))?;
            found.token_ids = true;
        }
        "block_size" => {
            event.block_size = reader.u32("block_size")?;
            found.block_size = true;
        }
        "lora_id" => event.lora_id = optional(reader, |r| r.uint("lora_id"))?,
        "medium" => event.medium = text(reader, "medium")?,
        "lora_name" => event.lora_name = text(reader, "lora_name")?,
        "extra_keys" => {
            event.extra_keys = optional(reader, |reader| {
                list(reader, "extra_keys", |reader| {
                    optional(reader, |reader| read_keys(reader, EXTRA_KEYS_DEPTH_MAX))
                })
            })?;
        }
        "group_idx" => event.group_idx = optional(reader, |r| r.u32("group_idx"))?,
        "kv_cache_spec_kind" => event.kv_cache_spec_kind = text(reader, "kv_cache_spec_kind")?,
        "kv_cache_spec_sliding_window" => {
            event.kv_cache_spec_sliding_window =
                optional(reader, |r| r.u32("kv_cache_spec_sliding_window"))?;
        }
        "locality" => event.locality = text(reader, "locality")?,
        "ownership" => event.ownership = text(reader, "ownership")?,
        "session_id" => event.session_id = text(reader, "session_id")?,
        "lookahead_token_ids" => {
            event.lookahead_token_ids = optional(reader, |reader| {
                list(reader, "lookahead_token_ids", |reader| {
                    list(reader, "a block's lookahead_token_ids", |r| {
                        r.u32("a token")
                    })
                })
            })?;
        }
        _ => reader.skip("a field")?,
    }
    Ok(())
}

fn read_hash(reader: &mut Reader<'_>) -> Result<ExternalHash, DecodeError> {
    let what = "a block's hash";
    match reader.bytes(what)? {
        Some(bytes) => Ok(ExternalHash::Bytes(bytes.into())),
        None => reader.uint(what).map(ExternalHash::Int),
    }
}

/// Extra keys are at most pairs; deeper nesting is rejected.
const EXTRA_KEYS_DEPTH_MAX: u32 = 4;

fn read_keys(reader: &mut Reader<'_>, depth: u32) -> Result<Vec<ExtraKey>, DecodeError> {
    let what = "an extra key";
    list(reader, "extra keys of a block", |reader| {
        if reader.is_array() {
            let Some(depth) = depth.checked_sub(1) else {
                let message = format!("{what} is nested deeper than {EXTRA_KEYS_DEPTH_MAX}");
                return Err(Reader::value_error(reader.at(), message));
            };
            return read_keys(reader, depth).map(ExtraKey::List);
        }
        if let Some(bytes) = reader.bytes(what)? {
            return Ok(ExtraKey::Bytes(bytes.into()));
        }
        match reader.peek(what)? {
            0xa0..=0xbf | 0xd9..=0xdb => Ok(ExtraKey::Text(reader.str(what)?.to_owned())),
            0xe0..=0xff | 0xd0..=0xd3 => {
                let number = reader.uint(what)?.cast_signed();
                Ok(u64::try_from(number).map_or(ExtraKey::Int(number), ExtraKey::Uint))
            }
            _ => reader.uint(what).map(ExtraKey::Uint),
        }
    })
}

fn text(reader: &mut Reader<'_>, what: &'static str) -> Result<Option<String>, DecodeError> {
    optional(reader, |reader| Ok(reader.str(what)?.to_owned()))
}

fn list<T>(
    reader: &mut Reader<'_>,
    what: &'static str,
    mut read: impl FnMut(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    let len = reader.array(what)?;
    (0..len).map(|_| read(reader)).collect()
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
