//! Reads the data of an event once, for all who judge, adapt or hide a part of it. No I/O.
//!
//! Values stay as they are written: only those that are needed are parsed, and only short ones. So the work is linear in the
//! bytes of an event, whatever its engine put into it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::sse;

/// Members of a JSON object. The last one of a name wins, as in Python's parser.
pub(super) type Fields<'a> = BTreeMap<Cow<'a, str>, &'a RawValue>;

/// Limit of members kept per object, besides those that are read: more than any engine sends.
const MEMBERS_MAX: usize = 256;

/// Limit of choices read per event: more than any engine sends in one.
pub(super) const CHOICES_MAX: usize = 1024;

/// Limit of a value that is parsed, in bytes: a tree takes some 50 ns per byte.
const VALUE_BYTES_MAX: usize = 16 << 10;

/// Characters that are kept of a longer value.
const LONG_VALUE_CHARS: usize = 300;

/// Stands for what is hidden.
pub(super) const NULL: &[u8] = b"null";

/// Whether a member of this name is read, however many others there are.
fn is_read(name: &str) -> bool {
    matches!(
        name,
        "error"
            | "error_type"
            | "error_message"
            | "errors"
            | "detail"
            | "type"
            | "object"
            | "choices"
            | "usage"
            | "id"
            | "status"
            | "response"
            | "delta"
            | "text"
            | "index"
            | "finish_reason"
            | "code"
            | "message"
    )
}

/// A name, borrowed if it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// An object: some of its [`Fields`], however many it has, and its lists of token ids.
#[derive(Debug, Default)]
struct Members<'a> {
    fields: Fields<'a>,
    ids: Vec<&'a RawValue>,
    prompt_ids: Vec<&'a RawValue>,
    /// Whether it has choices twice, of which readers see different ones.
    is_ambiguous: bool,
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut found = Members::default();
                while let Some(Name(name)) = map.next_key()? {
                    match &*name {
                        "token_ids" => found.ids.push(map.next_value()?),
                        "prompt_token_ids" => found.prompt_ids.push(map.next_value()?),
                        _ if found.fields.len() < MEMBERS_MAX || is_read(&name) => {
                            let is_choices = name == "choices" || name == "delta";
                            let known = found.fields.insert(name, map.next_value()?);
                            found.is_ambiguous |= is_choices && known.is_some();
                        }
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(found)
            }
        }
        from.deserialize_map(Reads)
    }
}

/// The first [`CHOICES_MAX`] choices.
#[derive(Default)]
struct Choices<'a> {
    first: Vec<&'a RawValue>,
    has_more: bool,
}

impl<'de> Deserialize<'de> for Choices<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Choices<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Self::Value, A::Error> {
                let mut choices = Choices::default();
                while choices.first.len() < CHOICES_MAX {
                    match all.next_element()? {
                        Some(choice) => choices.first.push(choice),
                        None => return Ok(choices),
                    }
                }
                while all.next_element::<IgnoredAny>()?.is_some() {
                    choices.has_more = true;
                }
                Ok(choices)
            }
        }
        from.deserialize_seq(Reads)
    }
}

/// A choice of an answer.
#[derive(Debug, Default)]
pub(super) struct Choice<'a> {
    pub(super) fields: Fields<'a>,
    /// Whether its delta is an object without members.
    pub(super) has_empty_delta: bool,
    /// Its list of token ids, if it has one.
    pub(super) ids: Option<&'a RawValue>,
}

/// An object that is the data of an event.
#[derive(Debug, Default)]
pub(super) struct EventData<'a> {
    pub(super) fields: Fields<'a>,
    pub(super) choices: Vec<Choice<'a>>,
    /// Why it is no event of an answer, if so.
    pub(super) fault: Option<&'static str>,
    /// Lists of token ids, of the answer and of the prompt.
    ids: Vec<&'a RawValue>,
    prompt_ids: Vec<&'a RawValue>,
}

impl<'a> EventData<'a> {
    /// Reads an object; `None` if `json` is not one.
    pub(super) fn read(json: &'a [u8]) -> Option<EventData<'a>> {
        let mut of_event: Members<'a> = serde_json::from_slice(json).ok()?;
        let mut is_ambiguous = of_event.is_ambiguous;
        let choices = of_event.fields.get("choices").map(|raw| raw.get());
        let choices: Choices<'a> = choices
            .and_then(|json| serde_json::from_str(json).ok())
            .unwrap_or_default();
        let mut read = Vec::with_capacity(choices.first.len());
        for raw in choices.first {
            let of_choice: Members<'a> = serde_json::from_str(raw.get()).unwrap_or_default();
            let delta = of_choice.fields.get("delta").map(|raw| raw.get());
            let of_delta = delta.filter(|json| json.starts_with('{'));
            let of_delta = of_delta.and_then(|json| serde_json::from_str::<Members<'a>>(json).ok());
            is_ambiguous |= of_choice.is_ambiguous;
            of_event.ids.extend(&of_choice.ids);
            of_event.prompt_ids.extend(&of_choice.prompt_ids);
            let mut has_empty_delta = false;
            if let Some(of_delta) = of_delta {
                has_empty_delta = of_delta.fields.is_empty();
                of_event.ids.extend(of_delta.ids);
                of_event.prompt_ids.extend(of_delta.prompt_ids);
            }
            read.push(Choice {
                ids: of_choice.ids.last().copied(),
                fields: of_choice.fields,
                has_empty_delta,
            });
        }
        let fault = match (choices.has_more, is_ambiguous) {
            (true, _) => Some("an event of its stream has more than 1,024 choices"),
            (_, true) => Some("an event of its stream has a member twice"),
            _ => None,
        };
        Some(EventData {
            fields: of_event.fields,
            choices: read,
            fault,
            ids: of_event.ids,
            prompt_ids: of_event.prompt_ids,
        })
    }

    /// Whether it has ids of the answer's tokens.
    pub(super) fn has_ids(&self) -> bool {
        self.ids.iter().any(|raw| !is_null(raw))
    }

    /// The list of the prompt's ids, if it has one.
    pub(super) fn prompt(&self) -> Option<&'a RawValue> {
        self.prompt_ids.iter().copied().find(|raw| !is_null(raw))
    }

    /// Places in `json`, the data, of the prompt's ids; with `all`, also of the answer's. In order.
    pub(super) fn places(&self, json: &[u8], all: bool) -> Vec<Range<usize>> {
        let of_answer = self.ids.iter().filter(|_| all);
        let raws = of_answer.chain(&self.prompt_ids);
        let mut places: Vec<_> = raws
            .filter(|raw| !is_null(raw))
            .map(|raw| place(json, raw.get()))
            .collect();
        places.sort_unstable_by_key(|place| place.start);
        places
    }
}

/// Where `part` is in `json`, which contains it.
fn place(json: &[u8], part: &str) -> Range<usize> {
    let start = part.as_ptr().addr() - json.as_ptr().addr();
    start..start + part.len()
}

/// An edited copy of some bytes. Without edits it is no copy.
#[derive(Debug)]
pub(super) struct Edited<'a> {
    source: &'a [u8],
    copy: Vec<u8>,
    /// The part of the source that is in the copy.
    done: usize,
}

impl<'a> Edited<'a> {
    pub(super) fn of(source: &'a [u8]) -> Edited<'a> {
        Edited {
            source,
            copy: Vec::new(),
            done: 0,
        }
    }

    /// Replaces a part, behind those replaced before.
    pub(super) fn replace(&mut self, part: Range<usize>, with: &[u8]) {
        if self.copy.capacity() == 0 {
            self.copy.reserve(self.source.len());
        }
        self.copy
            .extend_from_slice(&self.source[self.done..part.start]);
        self.copy.extend_from_slice(with);
        self.done = part.end;
    }

    /// Returns the bytes up to `end` of the source; `None` if they are those of the source.
    pub(super) fn upto(mut self, end: usize) -> Option<Vec<u8>> {
        if self.done == 0 {
            return None;
        }
        let rest = self.source.get(self.done..end).unwrap_or_default();
        self.copy.extend_from_slice(rest);
        Some(self.copy)
    }
}

/// Places of parts of the data of `event` in the stream's bytes `piece`, which contains the event.
pub(super) fn places_in(
    piece: &[u8],
    event: &sse::Event<'_>,
    mut parts: Vec<Range<usize>>,
) -> Vec<Range<usize>> {
    if parts.is_empty() {
        return parts;
    }
    let lines = event.data_lines(piece);
    let mut at = lines.iter().peekable();
    let mut line = (0, 0);
    let mut to_piece = |offset: usize| {
        while let Some(next) = at.next_if(|&&(of_data, _)| of_data <= offset) {
            line = *next;
        }
        line.1 + offset - line.0
    };
    for part in &mut parts {
        // The last byte, as the end may be that of the line.
        let start = to_piece(part.start);
        *part = start..to_piece(part.end - 1) + 1;
    }
    parts
}

pub(super) fn fields(json: &[u8]) -> Option<Fields<'_>> {
    let found: Option<Members<'_>> = serde_json::from_slice(json).ok();
    found.map(|of| of.fields)
}

pub(super) fn string(raw: &&RawValue) -> Option<String> {
    serde_json::from_str(raw.get()).ok()
}

/// A value; of a long one the beginning of its JSON.
pub(super) fn value(raw: &RawValue) -> Value {
    let json = raw.get();
    if json.len() > VALUE_BYTES_MAX {
        let json = json.trim_start_matches('"');
        return Value::String(json.chars().take(LONG_VALUE_CHARS).collect());
    }
    serde_json::from_str(json).unwrap_or_default()
}

fn is_null(raw: &RawValue) -> bool {
    raw.get() == "null"
}

/// Whether a value stands for an absent one: some engines send `"error": null` or `"finish_reason": ""`.
pub(super) fn is_nothing(raw: &RawValue) -> bool {
    matches!(raw.get(), "null" | "false" | "\"\"" | "{}" | "[]")
}
