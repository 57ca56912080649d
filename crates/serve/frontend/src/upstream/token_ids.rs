//! Hides token ids that the router requested from vLLM, so that a stream can continue, but its client did not.

use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use super::resume::StreamKind;
use super::sse;

/// Key of the answer's ids, and end of the key of the prompt's ids. Within a JSON string its quotes would be escaped.
static IDS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"token_ids\""));

const NULL: &[u8] = b"null";

/// Limit of lists of ids read per piece of a stream, which is more than any engine sends in one.
const LISTS_MAX: usize = 8_192;

/// Bytes that are remembered from behind a list of ids, at most.
const BEHIND_MAX: usize = 256;

/// Members between the delta of a chat's choice and its ids, in nearly all events.
const BEFORE_IDS: &[u8] = b",\"logprobs\":null,\"finish_reason\":null,\"token_ids\":";

/// Capacity of a buffer for events, which several of them share.
const ROOM: usize = 2 << 10;

/// Hides token ids from a client.
#[derive(Debug)]
pub(super) struct TokenIds {
    kind: StreamKind,
    /// Ids of the prompt, once they have arrived.
    pub(super) prompt: Option<Vec<u32>>,
    /// Whether no more ids of the prompt follow.
    is_begun: bool,
    /// `null` and the end of an event behind its only list of ids; empty if there was none such yet.
    behind: Vec<u8>,
    /// The text before that list, and its bracket.
    key: Vec<u8>,
    /// Where the last list before them begins: the choices.
    choices: Option<usize>,
    room: BytesMut,
}

impl TokenIds {
    pub(super) fn new(kind: StreamKind) -> TokenIds {
        TokenIds {
            kind,
            prompt: None,
            is_begun: false,
            behind: Vec::new(),
            key: Vec::new(),
            choices: None,
            room: BytesMut::new(),
        }
    }

    /// Another engine continues the stream.
    pub(super) fn begin_anew(&mut self) {
        self.is_begun = self.prompt.is_some();
    }

    /// Returns the complete events `events` without the ids of the prompt, which are stored.
    pub(super) fn take_prompt(&mut self, events: Bytes) -> Bytes {
        if self.is_begun {
            return events;
        }
        let mut from = 0;
        while let Some(found) = find(&events[from..]) {
            self.is_begun = true;
            let (start, end) = (from + found.start, from + found.end);
            if !found.is_prompt {
                from = end;
                continue;
            }
            let list = String::from_utf8_lossy(&events[start + 1..end - 1]).replace("data:", "");
            self.prompt = list.split(',').map(|id| id.trim().parse().ok()).collect();
            return [&events[..start], b"null", &events[end..]].concat().into();
        }
        events
    }

    /// Returns the complete events `events` as vLLM sends them to clients that do not request ids. `is_plain`: they are
    /// one event with the members of the event before.
    pub(super) fn hide(&mut self, events: Bytes, is_plain: bool) -> Bytes {
        if is_plain && let Some(start) = self.known_list(&events) {
            self.reserve(events.len() + NULL.len());
            self.room.extend_from_slice(&events[..start]);
            self.room.extend_from_slice(&self.behind);
            return self.room.split().freeze();
        }
        let Some(mut found) = find(&events) else {
            return events;
        };
        self.learn(&events, &found);
        if self.kind == StreamKind::Chat && has_member(&events, &DELTA, b"{}") {
            return without_empty_deltas(&events).into();
        }
        self.reserve(events.len());
        let mut rest = &events[..];
        for _ in 0..LISTS_MAX {
            self.room.extend_from_slice(&rest[..found.start]);
            self.room.extend_from_slice(b"null");
            rest = &rest[found.end..];
            match find(rest) {
                Some(next) => found = next,
                None => break,
            }
        }
        self.room.extend_from_slice(rest);
        self.room.split().freeze()
    }

    /// Returns the start of the only list of ids of `event`, if the list is where it was in an earlier event.
    #[inline]
    fn known_list(&self, event: &[u8]) -> Option<usize> {
        let behind = self.behind.get(NULL.len()..)?;
        let before = event.strip_suffix(behind)?.strip_suffix(b"]")?;
        let digits = before
            .iter()
            .rev()
            .take_while(|b| b.is_ascii_digit())
            .count();
        let start = before.len() - digits - 1;
        let before = before.get(..=start)?.strip_suffix(&self.key[..])?;
        // Neither an event for its ids only, nor one with another list of ids.
        let is_empty = self.kind == StreamKind::Chat && before.ends_with(b"{}");
        (!is_empty && memchr::memrchr(b'[', before) == self.choices).then_some(start)
    }

    /// Remembers the place of `found`, the first list of ids of `events`, if nothing but the end of an event follows.
    #[cold]
    fn learn(&mut self, events: &[u8], found: &Ids) {
        self.behind.clear();
        let (before, rest) = (&events[..found.start], &events[found.end..]);
        let key = match self.kind {
            StreamKind::Chat => BEFORE_IDS,
            StreamKind::Completion => b"\"token_ids\":",
        };
        if before.ends_with(key)
            && rest.len() <= BEHIND_MAX
            && !rest.contains(&b'{')
            && !rest.contains(&b'[')
        {
            self.behind.extend_from_slice(NULL);
            self.behind.extend_from_slice(rest);
            self.key = [key, b"["].concat();
            self.choices = memchr::memrchr(b'[', before);
        }
    }

    /// Makes room for `bytes`.
    fn reserve(&mut self, bytes: usize) {
        if self.room.capacity() < bytes {
            self.room.reserve(ROOM.max(bytes));
        }
    }
}

/// A list of ids.
struct Ids {
    is_prompt: bool,
    /// Of its opening bracket.
    start: usize,
    /// Behind its closing one.
    end: usize,
}

fn find(events: &[u8]) -> Option<Ids> {
    let mut from = 0;
    loop {
        let key = from + IDS.find(&events[from..])?;
        let behind = key + IDS.needle().len();
        let is_prompt = events[..key].ends_with(b"\"prompt_");
        let is_ids = is_prompt || events[..key].ends_with(b"\"");
        let list = value_at(events, behind).filter(|&at| is_ids && events[at] == b'[');
        match list.and_then(|start| Some((start, end_of(events, start)?))) {
            Some((start, end)) => {
                return Some(Ids {
                    is_prompt,
                    start,
                    end,
                });
            }
            None => from = behind,
        }
    }
}

/// The end of the list of numbers that begins at `start`.
#[inline]
fn end_of(events: &[u8], start: usize) -> Option<usize> {
    let mut at = start + 1;
    loop {
        let list = &events[at..];
        let length = list
            .iter()
            .position(|b| !matches!(b, b'0'..=b'9' | b',' | b' ' | b'-'))?;
        at += length;
        match list[length] {
            b']' => return Some(at + 1),
            _ => at = Some(behind_space(events, at)).filter(|&next| next > at)?,
        }
    }
}

/// The first place from `at` on that has no white space. JSON may be spread over several `data` lines.
#[inline]
fn behind_space(events: &[u8], mut at: usize) -> usize {
    while let Some(byte) = events.get(at) {
        match byte {
            b'\n' if events[at + 1..].starts_with(b"data:") => at += 6,
            b' ' | b'\t' | b'\r' | b'\n' => at += 1,
            _ => break,
        }
    }
    at
}

/// Where the value of the key that ends at `key` begins.
#[inline]
fn value_at(events: &[u8], key: usize) -> Option<usize> {
    let colon = behind_space(events, key);
    let at = (events.get(colon) == Some(&b':')).then(|| behind_space(events, colon + 1))?;
    (at < events.len()).then_some(at)
}

static DELTA: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"delta\""));
static REASON: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));

/// Whether `events` have a member with the key `name` and this value, which may have white space.
fn has_member(events: &[u8], name: &Finder<'_>, value: &[u8]) -> bool {
    name.find_iter(events).any(|key| {
        let Some(mut at) = value_at(events, key + name.needle().len()) else {
            return false;
        };
        value.iter().all(|byte| {
            let is_it = events.get(at) == Some(byte);
            at = if byte == &b'{' {
                behind_space(events, at + 1)
            } else {
                at + 1
            };
            is_it
        })
    })
}

/// Returns `events` without ids, and without events that vLLM sends for their ids only: a parser of the engine holds back
/// their text.
fn without_empty_deltas(events: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(events.len());
    let mut rest = events;
    let mut lists = 0;
    while !rest.is_empty() {
        let end = sse::events(rest).next().map_or(rest.len(), |of| of.end);
        let (event, after) = rest.split_at(end);
        rest = after;
        let mut left = event;
        let is_for_ids = find(event).is_some()
            && has_member(event, &DELTA, b"{}")
            && has_member(event, &REASON, b"null");
        if is_for_ids {
            continue;
        }
        while lists < LISTS_MAX
            && let Some(found) = find(left)
        {
            lists += 1;
            out.extend_from_slice(&left[..found.start]);
            out.extend_from_slice(b"null");
            left = &left[found.end..];
        }
        out.extend_from_slice(left);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::ends::{Api, StreamEnd};
    use super::*;

    fn hidden(kind: StreamKind, events: &str) -> (String, Option<Vec<u32>>) {
        let mut ids = TokenIds::new(kind);
        let kept = ids.take_prompt(Bytes::copy_from_slice(events.as_bytes()));
        let out = ids.hide(kept, false);
        (String::from_utf8(out.to_vec()).unwrap(), ids.prompt)
    }

    #[test]
    fn events_are_those_of_a_request_without_ids() {
        // The field order of vLLM 0.32.
        let first = r#"data: {"id":"c","choices":[{"index":0,"text":" a","logprobs":null,"token_ids":[7, 8],"prompt_token_ids":[1,2]}]}"#;
        let (out, _) = hidden(StreamKind::Completion, &format!("{first}\n\n"));
        assert!(
            out.contains(r#""token_ids":null,"prompt_token_ids":null}"#),
            "{out}"
        );
        let first = r#"data: {"id":"c","choices":[{"delta":{"role":"assistant","content":""}}],"prompt_token_ids":[1,2,300]}"#;
        let (out, prompt) = hidden(StreamKind::Chat, &format!("{first}\n\n"));
        assert!(out.ends_with("\"prompt_token_ids\":null}\n\n"), "{out}");
        assert_eq!(prompt, Some(vec![1, 2, 300]));
        // A token whose text a parser keeps is sent for its id alone.
        let swallowed = r#"data: {"choices":[{"delta":{},"finish_reason":null,"token_ids":[5]}]}"#;
        let last = r#"data: {"choices":[{"delta":{},"finish_reason":"stop","token_ids":[2]}]}"#;
        let (out, _) = hidden(StreamKind::Chat, &format!("{swallowed}\n\n{last}\n\n"));
        assert_eq!(out, format!("{}\n\n", last.replace("[2]", "null")));
    }

    /// Events of an answer, most of them of one shape.
    fn answers() -> impl Strategy<Value = Vec<Value>> {
        let text = prop_oneof![
            4 => " [a-z]{1,9}",
            1 => Just(String::new()),
            1 => r#"[a"\\{}\[\]:,0-9_]{0,12}|"?token_ids"?:\[[0-9,]{0,4}\]?"#,
        ];
        let ids = prop_oneof![
            8 => any::<u32>().prop_map(|id| json!([id])),
            1 => prop::collection::vec(any::<u32>(), 0..4).prop_map(|ids| json!(ids)),
            1 => Just(Value::Null),
        ];
        let more = prop_oneof![
            12 => Just(json!({})),
            1 => Just(json!({"usage": {"completion_tokens": 3}})),
            1 => Just(json!({"prompt_token_ids": [1, 2]})),
            1 => Just(json!({"choices_of": [[7]]})),
        ];
        let logprobs =
            prop_oneof![8 => Just(Value::Null), 1 => Just(json!({"content": [{"bytes": [7]}]}))];
        let event = (text, ids, more, logprobs, 0..20_usize, any::<bool>());
        prop::collection::vec(event, 1..12).prop_map(|events| {
            let of = |(text, ids, more, logprobs, kind, is_chat): (String, Value, Value, Value, usize, bool)| {
                let delta = match kind {
                    0 => json!({}),
                    _ => json!({"content": text}),
                };
                let reason = if kind == 1 { json!("stop") } else { Value::Null };
                let choice = if is_chat || kind > 2 {
                    json!({"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason, "token_ids": ids})
                } else {
                    json!({"index": 0, "text": text, "token_ids": ids, "finish_reason": reason})
                };
                let choices = if kind == 2 { vec![choice.clone(), choice] } else { vec![choice] };
                let mut event = json!({"id": "c", "choices": choices});
                event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                event
            };
            events.into_iter().map(of).collect()
        })
    }

    /// Python's way to write JSON.
    struct Spaced;

    impl serde_json::ser::Formatter for Spaced {
        fn begin_array_value<W: ?Sized + std::io::Write>(
            &mut self,
            to: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            if first { Ok(()) } else { to.write_all(b", ") }
        }

        fn begin_object_key<W: ?Sized + std::io::Write>(
            &mut self,
            to: &mut W,
            first: bool,
        ) -> std::io::Result<()> {
            if first { Ok(()) } else { to.write_all(b", ") }
        }

        fn begin_object_value<W: ?Sized + std::io::Write>(
            &mut self,
            to: &mut W,
        ) -> std::io::Result<()> {
            to.write_all(b": ")
        }
    }

    proptest! {
        /// Where the ids of an event were found before, and where they are searched for, are the same.
        #[test]
        fn events_of_a_known_shape_lose_the_ids_that_others_lose(
            events in answers(),
            chat in any::<bool>(),
            joined in prop::collection::vec(any::<bool>(), 12),
        ) {
            let kind = if chat { StreamKind::Chat } else { StreamKind::Completion };
            let api = if chat { Api::Chat } else { Api::Completions };
            let (mut known, mut anew) = (TokenIds::new(kind), TokenIds::new(kind));
            let mut end = StreamEnd::new(api, 1);
            let mut piece = String::new();
            for (event, joined) in events.iter().zip(joined) {
                piece.extend(["data: ", &event.to_string(), "\n\n"]);
                if joined {
                    continue;
                }
                let bytes = Bytes::from(std::mem::take(&mut piece));
                let is_plain = end.is_plain(&bytes);
                if !is_plain {
                    end.read(&bytes);
                }
                let (fast, slow) = (known.hide(bytes.clone(), is_plain), anew.hide(bytes, false));
                prop_assert_eq!(&fast, &slow, "{:?}", String::from_utf8_lossy(&slow));
            }
        }

        /// For any text of an answer, only lists of ids in their fields go.
        #[test]
        fn nothing_but_ids_is_hidden(
            texts in prop::collection::vec(r#"[a"\\{}\[\]:,0-9_]{0,12}|"?(prompt_)?token_ids"?:\[[0-9,]{0,4}\]?"#, 1..4),
            ids in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..4), 3),
            chat in any::<bool>(),
            style in 0usize..3,
        ) {
            // As C++ and Rust write JSON, as Python does, and over several lines.
            let written = |event: Value| match style {
                0 => event.to_string(),
                1 => {
                    let mut out = Vec::new();
                    let mut to = serde_json::Serializer::with_formatter(&mut out, Spaced);
                    serde::Serialize::serialize(&event, &mut to).unwrap();
                    String::from_utf8(out).unwrap()
                }
                _ => serde_json::to_string_pretty(&event).unwrap().replace('\n', "\ndata:"),
            };
            let (mut with, mut without) = (String::new(), String::new());
            for (text, ids) in texts.iter().zip(&ids) {
                let event = |ids: Value| {
                    let choice = if chat {
                        json!({"delta": {"content": text}, "token_ids": ids, "finish_reason": null})
                    } else {
                        json!({"text": text, "token_ids": ids, "prompt_token_ids": null})
                    };
                    format!("data: {}\n\n", written(json!({"choices": [choice], "model": text})))
                };
                with += &event(json!(ids));
                without += &event(Value::Null);
            }
            let kind = if chat { StreamKind::Chat } else { StreamKind::Completion };
            let (out, prompt) = hidden(kind, &with);
            prop_assert_eq!(&out, &without);
            prop_assert_eq!(prompt, None);
            // The prompt's ids are found however they are written.
            let first = |ids: Value| format!("data: {}\n\n", written(json!({"prompt_token_ids": ids, "choices": []})));
            let (out, prompt) = hidden(kind, &(first(json!(ids[0])) + &with));
            prop_assert_eq!(out, first(Value::Null) + &without);
            prop_assert_eq!(prompt.unwrap_or_default(), ids[0].clone());
            // Events of tokens that a parser swallowed are left out.
            let swallowed = |reason: Value| format!("data: {}\n\n",
                written(json!({"choices": [{"delta": {}, "token_ids": [5], "finish_reason": reason}]})));
            let (out, _) = hidden(StreamKind::Chat, &swallowed(Value::Null));
            prop_assert_eq!(out, "");
            let (out, _) = hidden(StreamKind::Chat, &swallowed(json!("stop")));
            prop_assert!(out.contains("null") && !out.contains('5'), "{}", out);
        }
    }
}
