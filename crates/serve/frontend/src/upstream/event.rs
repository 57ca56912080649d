//! Parses the data of a server-sent event once, for all modules that judge, adapt or hide a part. No I/O.
//!
//! Most values stay raw text: only short values that are needed are parsed. So the work is linear in the bytes of an event,
//! whatever the engine sent.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
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
            | "title"
            | "content"
            | "output"
    )
}

/// A name, borrowed if it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// Lists of token ids of an event, wherever they are in it.
#[derive(Debug, Default)]
struct Ids<'a> {
    of_answer: Vec<&'a RawValue>,
    of_prompt: Vec<&'a RawValue>,
}

/// Some [`Fields`] of an object, however many it has.
#[derive(Default)]
struct Members<'a> {
    fields: Fields<'a>,
    /// Its own list of token ids, if it has one.
    ids: Option<&'a RawValue>,
}

/// Reads an object, whose lists of token ids go to `ids`. `other` reads the value of a member itself, and returns true, or
/// leaves it.
fn read_members<'de, A: MapAccess<'de>>(
    mut map: A,
    ids: &mut Ids<'de>,
    mut other: impl FnMut(&str, &mut A, &mut Ids<'de>) -> Result<bool, A::Error>,
) -> Result<Members<'de>, A::Error> {
    let (mut fields, mut own) = (Fields::new(), None);
    while let Some(Name(name)) = map.next_key()? {
        match &*name {
            "token_ids" => {
                let list = map.next_value()?;
                ids.of_answer.push(list);
                own = Some(list);
            }
            "prompt_token_ids" => ids.of_prompt.push(map.next_value()?),
            _ if other(&name, &mut map, ids)? => {}
            _ if fields.len() < MEMBERS_MAX || is_read(&name) => {
                fields.insert(name, map.next_value()?);
            }
            _ => {
                map.next_value::<IgnoredAny>()?;
            }
        }
    }
    Ok(Members { fields, ids: own })
}

/// Reads a value of any type into `T`, which a value of another type than expected leaves as it is.
struct LenientReader<'a, 'de, T> {
    into: &'a mut T,
    ids: &'a mut Ids<'de>,
}

/// A value that is read from an object or a list of an event.
trait PartReader<'de> {
    fn read_map<A: MapAccess<'de>>(&mut self, map: A, ids: &mut Ids<'de>) -> Result<(), A::Error>;

    fn read_seq<A: SeqAccess<'de>>(
        &mut self,
        mut seq: A,
        _ids: &mut Ids<'de>,
    ) -> Result<(), A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

impl<'de, T: PartReader<'de>> DeserializeSeed<'de> for LenientReader<'_, 'de, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de, T: PartReader<'de>> Visitor<'de> for LenientReader<'_, 'de, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<(), A::Error> {
        self.into.read_map(map, self.ids)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        self.into.read_seq(seq, self.ids)
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

/// A choice of an answer.
#[derive(Debug, Default)]
pub(super) struct Choice<'a> {
    pub(super) fields: Fields<'a>,
    /// Members of its delta, if that is an object.
    pub(super) delta: Option<Fields<'a>>,
    /// Its list of token ids, if it has one.
    pub(super) ids: Option<&'a RawValue>,
    /// Whether it has members twice, of which readers see different ones.
    is_ambiguous: bool,
}

impl<'de> PartReader<'de> for Choice<'de> {
    fn read_map<A: MapAccess<'de>>(&mut self, map: A, ids: &mut Ids<'de>) -> Result<(), A::Error> {
        let (mut delta, mut deltas) = (Delta::default(), 0);
        let members = read_members(map, ids, |name, map, ids| {
            if name != "delta" {
                return Ok(false);
            }
            deltas += 1;
            let into = &mut delta;
            map.next_value_seed(LenientReader { into, ids })?;
            Ok(true)
        })?;
        (self.fields, self.ids) = (members.fields, members.ids);
        self.is_ambiguous = deltas > 1;
        self.delta = delta.0;
        Ok(())
    }
}

/// Members of a delta.
#[derive(Default)]
struct Delta<'a>(Option<Fields<'a>>);

impl<'de> PartReader<'de> for Delta<'de> {
    fn read_map<A: MapAccess<'de>>(&mut self, map: A, ids: &mut Ids<'de>) -> Result<(), A::Error> {
        self.0 = Some(read_members(map, ids, |_, _, _| Ok(false))?.fields);
        Ok(())
    }
}

/// The first [`CHOICES_MAX`] choices.
#[derive(Default)]
struct Choices<'a> {
    is_list: bool,
    first: Vec<Choice<'a>>,
    has_more: bool,
}

impl<'de> PartReader<'de> for Choices<'de> {
    fn read_map<A: MapAccess<'de>>(
        &mut self,
        mut map: A,
        _: &mut Ids<'de>,
    ) -> Result<(), A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn read_seq<A: SeqAccess<'de>>(
        &mut self,
        mut all: A,
        ids: &mut Ids<'de>,
    ) -> Result<(), A::Error> {
        self.is_list = true;
        while self.first.len() < CHOICES_MAX {
            let mut choice = Choice::default();
            let into = &mut choice;
            if all
                .next_element_seed(LenientReader {
                    into,
                    ids: &mut *ids,
                })?
                .is_none()
            {
                return Ok(());
            }
            self.first.push(choice);
        }
        while all.next_element::<IgnoredAny>()?.is_some() {
            self.has_more = true;
        }
        Ok(())
    }
}

/// An object that is the data of an event.
#[derive(Debug, Default)]
pub(super) struct EventData<'a> {
    /// Members, but for the choices.
    pub(super) fields: Fields<'a>,
    pub(super) choices: Vec<Choice<'a>>,
    /// Whether it has a list of choices, perhaps an empty one.
    pub(super) has_choices: bool,
    /// Why it is no event of an answer, if so.
    pub(super) fault: Option<&'static str>,
    ids: Ids<'a>,
}

impl<'de> Deserialize<'de> for EventData<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct EventVisitor;
        impl<'de> Visitor<'de> for EventVisitor {
            type Value = EventData<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                let (mut choices, mut lists, mut ids) = (Choices::default(), 0, Ids::default());
                let members = read_members(map, &mut ids, |name, map, ids| {
                    if name != "choices" {
                        return Ok(false);
                    }
                    lists += 1;
                    let into = &mut choices;
                    map.next_value_seed(LenientReader { into, ids })?;
                    Ok(true)
                })?;
                let is_ambiguous = lists > 1 || choices.first.iter().any(|of| of.is_ambiguous);
                let fault = match (choices.has_more, is_ambiguous) {
                    (true, _) => Some("an event of its stream has more than 1,024 choices"),
                    (_, true) => Some("an event of its stream has a member twice"),
                    _ => None,
                };
                Ok(EventData {
                    fields: members.fields,
                    has_choices: choices.is_list,
                    choices: choices.first,
                    fault,
                    ids,
                })
            }
        }
        from.deserialize_map(EventVisitor)
    }
}

impl<'a> EventData<'a> {
    /// Reads an object; `None` if `json` is not one.
    pub(super) fn read(json: &'a [u8]) -> Option<EventData<'a>> {
        serde_json::from_slice(json).ok()
    }

    /// Whether it has ids of the answer's tokens.
    pub(super) fn has_ids(&self) -> bool {
        self.ids.of_answer.iter().any(|raw| !is_null(raw))
    }

    /// The list of the prompt's ids, if it has one.
    pub(super) fn prompt(&self) -> Option<&'a RawValue> {
        let mut lists = self.ids.of_prompt.iter().copied();
        lists.find(|raw| !is_null(raw))
    }

    /// Places in `json`, the data, of the prompt's ids; with `all`, also of the answer's. In order.
    pub(super) fn places(&self, json: &[u8], all: bool) -> Vec<Range<usize>> {
        let of_answer = self.ids.of_answer.iter().filter(|_| all);
        let raws = of_answer.chain(&self.ids.of_prompt);
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
pub(super) struct EditBuffer<'a> {
    source: &'a [u8],
    copy: Vec<u8>,
    /// The part of the source that is in the copy.
    done: usize,
}

impl<'a> EditBuffer<'a> {
    pub(super) fn of(source: &'a [u8]) -> EditBuffer<'a> {
        EditBuffer {
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

/// Some members of an object; `None` if `json` is not one.
pub(super) fn fields(json: &[u8]) -> Option<Fields<'_>> {
    struct AllMembers<'a>(Fields<'a>);
    impl<'de> PartReader<'de> for AllMembers<'de> {
        fn read_map<A: MapAccess<'de>>(
            &mut self,
            map: A,
            ids: &mut Ids<'de>,
        ) -> Result<(), A::Error> {
            self.0 = read_members(map, ids, |_, _, _| Ok(false))?.fields;
            Ok(())
        }
    }
    if !json.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    let (mut into, mut ids) = (AllMembers(Fields::new()), Ids::default());
    let mut from = serde_json::Deserializer::from_slice(json);
    let read = LenientReader {
        into: &mut into,
        ids: &mut ids,
    };
    read.deserialize(&mut from).and_then(|()| from.end()).ok()?;
    Some(into.0)
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NAMES: &[&str] = &[
        "choices",
        "delta",
        "token_ids",
        "prompt_token_ids",
        "index",
        "finish_reason",
        "text",
        "x\"\u{e9}",
    ];

    /// JSON of any shape, mostly that of an event.
    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<i32>().prop_map(|n| Value::from(f64::from(n) / 8.0)),
            "[a-z\"\\\\{}\\[\\]:,\u{e9}]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(5, 60, 5, |inner| {
            let member = (prop::sample::select(NAMES), inner.clone());
            prop_oneof![
                1 => prop::collection::vec(inner, 0..5).prop_map(Value::from),
                3 => prop::collection::vec(member, 0..6).prop_map(|all| {
                    all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
                }),
            ]
        })
    }

    fn event() -> impl Strategy<Value = Value> {
        let choices = prop::collection::vec(values(), 0..4).prop_map(Value::from);
        let member = (prop::sample::select(NAMES), values());
        let rest = prop::collection::vec(member, 0..4);
        (prop_oneof![4 => choices, 1 => values()], rest).prop_map(|(choices, rest)| {
            let rest = rest.into_iter().map(|(name, of)| (name.to_owned(), of));
            rest.chain([("choices".to_owned(), choices)]).collect()
        })
    }

    /// Hides ids in a tree.
    fn hide(value: &mut Value) {
        for name in ["token_ids", "prompt_token_ids"] {
            if let Some(ids) = value.get_mut(name) {
                *ids = Value::Null;
            }
        }
    }

    proptest! {
        /// Members, choices and the places of ids are those of a tree, however the event is written.
        #[test]
        fn one_reading_finds_what_a_tree_has(
            value in prop_oneof![4 => event(), 1 => values()],
            way in 0usize..3,
            cut in any::<prop::sample::Index>(),
        ) {
            let json = match way {
                0 => value.to_string(),
                _ => serde_json::to_string_pretty(&value).unwrap(),
            };
            let text = match way {
                2 => format!(": c\nid: 1\ndata: {}\n\n", json.replace('\n', "\r\ndata:")),
                _ => format!("data: {}\n\n", json.replace('\n', "\ndata: ")),
            };
            let event = sse::events(text.as_bytes()).next().unwrap();
            let data = EventData::read(&event.data);
            let Some(members) = value.as_object() else {
                prop_assert!(data.is_none());
                return Ok(());
            };
            let data = data.unwrap();
            for (name, value) in members {
                let found = data.fields.get(&**name).map(|raw| raw.get());
                let found = found.map(|json| serde_json::from_str::<Value>(json).unwrap());
                let is_apart = matches!(&**name, "choices" | "token_ids" | "prompt_token_ids");
                prop_assert_eq!(found, Some(value.clone()).filter(|_| !is_apart));
            }
            let choices = value.get("choices").and_then(Value::as_array);
            prop_assert_eq!(data.choices.len(), choices.map_or(0, Vec::len));
            for (read, choice) in data.choices.iter().zip(choices.into_iter().flatten()) {
                let delta = choice.get("delta").and_then(Value::as_object);
                prop_assert_eq!(read.delta.is_some(), delta.is_some());
                prop_assert_eq!(read.ids.is_some(), choice.get("token_ids").is_some());
                let index = choice.get("index").and_then(Value::as_u64);
                let of_read = read.fields.get("index").and_then(|raw| raw.get().parse().ok());
                prop_assert_eq!(of_read, index);
            }
            let mut wanted = value.clone();
            hide(&mut wanted);
            for choice in wanted.get_mut("choices").and_then(Value::as_array_mut).into_iter().flatten() {
                hide(choice);
                choice.get_mut("delta").map(hide);
            }
            let mut edited = EditBuffer::of(text.as_bytes());
            for place in places_in(text.as_bytes(), &event, data.places(&event.data, true)) {
                edited.replace(place, NULL);
            }
            let edited = edited.upto(text.len()).unwrap_or_else(|| text.clone().into());
            let shown = sse::events(&edited).next().unwrap();
            prop_assert_eq!((shown.start, shown.end), (event.start, edited.len()));
            prop_assert_eq!(serde_json::from_slice::<Value>(&shown.data).unwrap(), wanted);
            // The beginning of an object is none.
            let part = &json.as_bytes()[..cut.index(json.len())];
            prop_assert!(EventData::read(part).is_none() && fields(part).is_none());
            prop_assert!(fields(json.as_bytes()).is_some());
        }
    }
}
