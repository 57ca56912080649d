//! Reader of batches of KV events.
//!
//! Batches are read event by event: an event of an unknown shape invalidates only the blocks that it may
//! have changed.
//!
//! | unreadable event | may have changed |
//! | --- | --- |
//! | `BlockStored` | nothing that was known; its blocks stay unknown |
//! | `BlockRemoved` or an unknown type, of other memory than the GPU's | nothing that is followed |
//! | the same of the GPU's memory, with readable `block_hashes` | these blocks |
//! | `BlockRemoved`, no readable type, or an unknown type whose name suggests a removal | any block |
//! | an unknown type without `block_hashes` | nothing |
//!
//! Unknown fields are skipped, unless their name shows that they are part of a block's identity.

use slipstream_base::TokenId;

use super::{BlockRemoved, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch, MEDIUM_GPU};
use crate::msgpack::{DecodeError, Reader};

/// Events of a batch at most. An engine publishes a batch per step, with a few events per request. Each takes some 300
/// bytes, however few it has on the wire.
const EVENTS_MAX: usize = 1 << 17;

/// Extra keys of all blocks of a batch at most, nested ones included. Each takes 32 bytes, and one on the wire.
const EXTRA_KEYS_MAX: u32 = 1 << 17;

impl KvEventBatch {
    /// Reads a batch: maps, positional arrays, or a mix. Events that cannot be read are counted in
    /// [`unreadable`](KvEventBatch::unreadable); those that may have removed blocks become
    /// [`KvEvent::Unreadable`].
    ///
    /// # Errors
    /// [`DecodeError`]: the batch has no list of events, or more than 131,072, or it is no valid MessagePack. Any block
    /// may have been removed.
    pub fn decode(bytes: &[u8]) -> Result<KvEventBatch, DecodeError> {
        let mut reader = Reader::new(bytes);
        let mut batch = KvEventBatch::default();
        let fields = Fields::open(&mut reader, "a batch of KV events", BATCH_FIELDS)?;
        let mut has_events = false;
        let mut keys_left = EXTRA_KEYS_MAX;
        for place in 0..fields.len {
            match fields.name(place, &mut reader)? {
                "ts" => batch.ts = informative(&mut reader, |r| r.float("ts"))?.unwrap_or_default(),
                "events" => {
                    has_events = true;
                    let at = reader.at();
                    let len = reader.array("events")?;
                    if len > EVENTS_MAX {
                        let what = format!("{len} KV events in a batch, more than {EVENTS_MAX}");
                        return Err(Reader::value_error(at, what));
                    }
                    for _ in 0..len {
                        batch.read_event(&mut reader, &mut keys_left)?;
                    }
                }
                // SGLang's name is the second one.
                "data_parallel_rank" | "attn_dp_rank" => {
                    batch.data_parallel_rank =
                        informative(&mut reader, |r| r.u32("data_parallel_rank"))?;
                }
                _ => reader.skip("an unknown field")?,
            }
        }
        reader.end()?;
        if !has_events {
            return Err(Reader::value_error(
                0,
                "a batch of KV events without `events`",
            ));
        }
        Ok(batch)
    }

    /// Reads the next event, or skips it and notes what it may have changed.
    fn read_event(
        &mut self,
        reader: &mut Reader<'_>,
        keys_left: &mut u32,
    ) -> Result<(), DecodeError> {
        let start = reader.clone();
        let error = match read_event(reader, keys_left) {
            Ok(event) => {
                self.events.push(event);
                return Ok(());
            }
            Err(error) => error,
        };
        *reader = start.clone();
        reader.skip("a KV event")?;
        self.unreadable.events += 1;
        self.unreadable
            .first
            .get_or_insert_with(|| error.to_string());
        match Remains::of(start).cost() {
            Cost::Nothing => {}
            Cost::Blocks(hashes) => self.events.push(KvEvent::Unreadable {
                block_hashes: Some(hashes),
            }),
            Cost::AnyBlock => {
                let event = KvEvent::Unreadable { block_hashes: None };
                // A batch of nothing else stays small.
                if self.events.last() != Some(&event) {
                    self.events.push(event);
                }
            }
        }
        Ok(())
    }
}

/// Known blocks that an unreadable event may have changed.
enum Cost {
    Nothing,
    Blocks(Vec<ExternalHash>),
    AnyBlock,
}

/// The readable parts of an unreadable event.
#[derive(Default)]
struct Remains<'b> {
    kind: Option<&'b str>,
    block_hashes: Option<Vec<ExternalHash>>,
    medium: Option<&'b str>,
}

impl<'b> Remains<'b> {
    /// Reads an event that was skipped once, so its MessagePack is valid.
    fn of(mut reader: Reader<'b>) -> Remains<'b> {
        let mut remains = Remains::default();
        let _ = remains.read(&mut reader); // fields before an error count
        remains
    }

    fn read(&mut self, reader: &mut Reader<'b>) -> Result<(), DecodeError> {
        let mut fields = Fields::open(reader, "a KV event", &[])?;
        if fields.places.is_some() && fields.len > 0 {
            self.kind = informative(reader, |r| r.str("type"))?;
            fields.len -= 1;
            // Of an unknown type, the hashes come first as in all others.
            fields.places = Some(match self.kind {
                Some("BlockStored") => STORED_FIELDS,
                _ => REMOVED_FIELDS,
            });
        }
        for place in 0..fields.len {
            match fields.name(place, reader)? {
                "type" => self.kind = informative(reader, |r| r.str("type"))?,
                "block_hashes" => {
                    let read = |r: &mut Reader<'b>| list(r, "block_hashes", read_hash);
                    self.block_hashes = informative(reader, read)?;
                }
                "medium" => self.medium = informative(reader, |r| r.str("medium"))?,
                _ => reader.skip("a field")?,
            }
        }
        Ok(())
    }

    fn cost(self) -> Cost {
        let elsewhere = |medium: &str| !medium.eq_ignore_ascii_case(MEDIUM_GPU);
        let Some(kind) = self.kind else {
            return self.block_hashes.map_or(Cost::AnyBlock, Cost::Blocks);
        };
        if kind == "BlockStored" || self.medium.is_some_and(elsewhere) {
            return Cost::Nothing;
        }
        match self.block_hashes {
            Some(hashes) => Cost::Blocks(hashes),
            None if sounds_like_removal(kind) => Cost::AnyBlock,
            None => Cost::Nothing,
        }
    }
}

/// Whether events of an unknown type may remove blocks that they do not name.
fn sounds_like_removal(kind: &str) -> bool {
    const PARTS: &[&str] = &[
        "remov", "clear", "evict", "delet", "reset", "flush", "drop", "free", "invalid", "expire",
        "purge", "discard", "wipe", "lost",
    ];
    let kind = kind.to_ascii_lowercase();
    PARTS.iter().any(|part| kind.contains(part))
}

/// Whether an unknown field of a stored block is part of its identity: equal tokens are then
/// different blocks.
fn is_identity(name: &str) -> bool {
    const PARTS: &[&str] = &[
        "salt",
        "lora",
        "adapter",
        "extra_key",
        "namespace",
        "tenant",
        "isolation",
    ];
    let name = name.to_ascii_lowercase();
    PARTS.iter().any(|part| name.contains(part))
}

/// A value that does not matter for blocks; `None` if it cannot be read.
fn informative<'b, T>(
    reader: &mut Reader<'b>,
    read: impl FnOnce(&mut Reader<'b>) -> Result<T, DecodeError>,
) -> Result<Option<T>, DecodeError> {
    let start = reader.clone();
    if let Ok(value) = optional(reader, read) {
        return Ok(value);
    }
    *reader = start;
    reader.skip("a value")?;
    Ok(None)
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
            // Names that are no text are those of unknown fields.
            None => Ok(informative(reader, |r| r.str("a field's name"))?.unwrap_or("")),
        }
    }
}

/// Reads an event, with at most `keys_left` extra keys.
fn read_event(reader: &mut Reader<'_>, keys_left: &mut u32) -> Result<KvEvent, DecodeError> {
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
    let is_positional_store = fields.places.is_some() && kind == "BlockStored";
    for place in 0..fields.len {
        let name = fields.name(place, reader)?;
        // SGLang 0.5.18 and later append a map to positional events of salted blocks.
        if is_positional_store && place >= METADATA_PLACE_MIN && reader.is_map() {
            read_metadata(reader, &mut stored, &mut found, keys_left)?;
        } else {
            read_field(name, reader, &mut stored, &mut found, keys_left)?;
        }
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
            // Without it, the blocks would seem to begin a prompt.
            require(found.parent_block_hash, "parent_block_hash")?;
            require(found.token_ids, "token_ids")?;
            require(found.block_size, "block_size")?;
            if let Some(last) = found.bigrams {
                stored.lookahead_token_ids = lookahead(&stored, &last);
            }
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
        if informative(&mut ahead, |r| r.str("a field's name"))? == Some("type") {
            return ahead.str("a KV event's type");
        }
        ahead.skip("a field")?;
    }
    Err(Reader::value_error(at, "a KV event without a `type`"))
}

/// First place of a positional stored event, behind its type, that may be a map: behind the fields
/// of all versions.
const METADATA_PLACE_MIN: usize = 6;

/// Reads the map that SGLang appends (`BlockStoredMetadata` in `srt/disaggregation/kv_events.py`).
fn read_metadata(
    reader: &mut Reader<'_>,
    event: &mut BlockStored,
    found: &mut Found,
    keys_left: &mut u32,
) -> Result<(), DecodeError> {
    let fields = Fields::open(reader, "metadata of a stored block", &[])?;
    for place in 0..fields.len {
        match fields.name(place, reader)? {
            name @ ("cache_salt" | "lora_name" | "session_id") => {
                read_field(name, reader, event, found, keys_left)?;
            }
            name => skip_unknown(name, reader)?,
        }
    }
    Ok(())
}

/// Skips a field that is not known.
fn skip_unknown(name: &str, reader: &mut Reader<'_>) -> Result<(), DecodeError> {
    if is_identity(name) && !reader.nil_ahead() {
        let what = format!("unknown field `{}`", name.escape_default());
        return Err(Reader::value_error(reader.at(), what));
    }
    reader.skip("a field")
}

/// Required fields that an event has.
#[derive(Default)]
struct Found {
    block_hashes: bool,
    parent_block_hash: bool,
    /// The second token of each pair, if the event has pairs of tokens.
    bigrams: Option<Vec<TokenId>>,
    token_ids: bool,
    block_size: bool,
}

/// Reads the field `name` of an event of either kind into `event`.
fn read_field(
    name: &str,
    reader: &mut Reader<'_>,
    event: &mut BlockStored,
    found: &mut Found,
    keys_left: &mut u32,
) -> Result<(), DecodeError> {
    match name {
        "block_hashes" => {
            event.block_hashes = list(reader, "block_hashes", read_hash)?;
            found.block_hashes = true;
        }
        "parent_block_hash" => {
            event.parent_block_hash = optional(reader, read_hash)?;
            found.parent_block_hash = true;
        }
        "token_ids" => {
            (event.token_ids, found.bigrams) = read_tokens(reader)?;
            found.token_ids = true;
        }
        "block_size" => {
            event.block_size = reader.u32("block_size")?;
            found.block_size = true;
        }
        "lora_id" => event.lora_id = optional(reader, |r| r.uint("lora_id"))?,
        "medium" => event.medium = text(reader, "medium")?,
        "cache_salt" => event.cache_salt = text(reader, "cache_salt")?,
        "metadata" if reader.is_map() => read_metadata(reader, event, found, keys_left)?,
        "lora_name" => event.lora_name = text(reader, "lora_name")?,
        "extra_keys" => {
            event.extra_keys = optional(reader, |reader| {
                list(reader, "extra_keys", |reader| {
                    optional(reader, |reader| {
                        read_keys(reader, EXTRA_KEYS_DEPTH_MAX, keys_left)
                    })
                })
            })?;
        }
        "group_idx" => event.group_idx = optional(reader, |r| r.u32("group_idx"))?,
        "kv_cache_spec_kind" => event.kv_cache_spec_kind = text(reader, "kv_cache_spec_kind")?,
        "kv_cache_spec_sliding_window" => {
            event.kv_cache_spec_sliding_window =
                informative(reader, |r| r.u32("kv_cache_spec_sliding_window"))?;
        }
        "locality" => event.locality = informative(reader, |r| owned(r, "locality"))?,
        "ownership" => event.ownership = informative(reader, |r| owned(r, "ownership"))?,
        "session_id" => event.session_id = informative(reader, |r| owned(r, "session_id"))?,
        "lookahead_token_ids" => {
            event.lookahead_token_ids = informative(reader, |reader| {
                list(reader, "lookahead_token_ids", |reader| {
                    list(reader, "a block's lookahead_token_ids", |r| {
                        r.u32("a token")
                    })
                })
            })?;
        }
        "type" => reader.skip("type")?,
        _ => skip_unknown(name, reader)?,
    }
    Ok(())
}

/// Tokens, and the second ones if they are pairs: an SGLang engine that drafts with EAGLE or MTP
/// publishes each token with the next one (`RadixKey.is_bigram` in `srt/mem_cache/radix_cache.py`).
fn read_tokens(
    reader: &mut Reader<'_>,
) -> Result<(Vec<TokenId>, Option<Vec<TokenId>>), DecodeError> {
    let at = reader.at();
    let len = reader.array("token_ids")?;
    if !reader.is_array() {
        let tokens: Result<_, _> = (0..len).map(|_| reader.u32("a token")).collect();
        return Ok((tokens?, None));
    }
    let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
    for _ in 0..len {
        let pair = reader.array("a pair of tokens")?;
        if pair != 2 {
            let what = format!("{pair} tokens instead of a pair");
            return Err(Reader::value_error(at, what));
        }
        let first = reader.u32("a token")?;
        if seconds.last().is_some_and(|&before| before != first) {
            let what = "pairs of tokens that do not follow one another";
            return Err(Reader::value_error(at, what));
        }
        firsts.push(first);
        seconds.push(reader.u32("a token")?);
    }
    Ok((firsts, Some(seconds)))
}

/// The token behind each block of pairs: a block's hash includes it.
fn lookahead(stored: &BlockStored, seconds: &[TokenId]) -> Option<Vec<Vec<TokenId>>> {
    let size = usize::try_from(stored.block_size)
        .ok()
        .filter(|&size| size > 0)?;
    let ends = seconds.chunks_exact(size).filter_map(<[TokenId]>::last);
    Some(ends.map(|&token| vec![token]).collect())
}

fn read_hash(reader: &mut Reader<'_>) -> Result<ExternalHash, DecodeError> {
    let what = "a block's hash";
    if reader.is_str() {
        return Ok(ExternalHash::Bytes(reader.str(what)?.as_bytes().into()));
    }
    match reader.bytes(what)? {
        Some(bytes) => Ok(ExternalHash::Bytes(bytes.into())),
        None => reader.uint(what).map(ExternalHash::Int),
    }
}

/// Extra keys are at most pairs; deeper nesting is rejected.
const EXTRA_KEYS_DEPTH_MAX: u32 = 4;

fn read_keys(
    reader: &mut Reader<'_>,
    depth: u32,
    keys_left: &mut u32,
) -> Result<Vec<ExtraKey>, DecodeError> {
    let what = "an extra key";
    list(reader, "extra keys of a block", |reader| {
        let Some(left) = keys_left.checked_sub(1) else {
            let message = format!("more than {EXTRA_KEYS_MAX} extra keys in a batch");
            return Err(Reader::value_error(reader.at(), message));
        };
        *keys_left = left;
        if reader.is_array() {
            let Some(depth) = depth.checked_sub(1) else {
                let message = format!("{what} is nested deeper than {EXTRA_KEYS_DEPTH_MAX}");
                return Err(Reader::value_error(reader.at(), message));
            };
            return read_keys(reader, depth, keys_left).map(ExtraKey::List);
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
    optional(reader, |reader| owned(reader, what))
}

fn owned(reader: &mut Reader<'_>, what: &'static str) -> Result<String, DecodeError> {
    Ok(reader.str(what)?.to_owned())
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
