//! Hides token ids that the router requested from vLLM, so that a stream can continue, but its client did not.

use std::ops::Range;
use std::sync::LazyLock;

use bytes::{Bytes, BytesMut};
use memchr::memmem::Finder;

use super::api::StreamKind;
use super::event::{Choice, EventData, NULL};

/// Key of the answer's ids, and end of the key of the prompt's ids. Within a JSON string its quotes would be escaped.
static IDS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"token_ids\""));

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
    prompt: Option<Vec<u32>>,
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

    /// Ids of the prompt, once they have arrived.
    pub(super) fn prompt(&self) -> Option<&[u32]> {
        self.prompt.as_deref()
    }

    /// Another engine continues the stream.
    pub(super) fn begin_anew(&mut self) {
        self.is_begun = self.prompt.is_some();
    }

    /// Takes the prompt's ids from an event.
    pub(super) fn take_prompt(&mut self, data: &EventData<'_>) {
        if self.is_begun {
            return;
        }
        if let Some(prompt) = data.prompt() {
            self.prompt = serde_json::from_str(prompt.get()).ok();
        }
        self.is_begun = data.prompt().is_some() || data.has_ids();
    }

    /// Whether vLLM sends an event for its ids only: a parser of the engine holds back their text.
    pub(super) fn is_for_ids(&self, data: &EventData<'_>) -> bool {
        let says = |choice: &Choice<'_>| {
            let delta = choice.delta.as_ref();
            delta.is_none_or(|delta| !delta.is_empty()) || choice.reason().is_some()
        };
        self.kind == StreamKind::Chat
            && data.has_ids()
            && !data.choices.is_empty()
            && !data.choices.iter().any(says)
    }

    /// Whether `event`, an event of one line, has no ids. A key may be escaped.
    pub(super) fn is_without(event: &[u8]) -> bool {
        IDS.find(event).is_none() && memchr::memmem::find(event, b"\\u").is_none()
    }

    /// Returns `event`, an event with the members of the event before, as vLLM sends it to clients that do not request ids;
    /// `None` if its ids are not where they were.
    #[inline]
    pub(super) fn hide_known(&mut self, event: &[u8]) -> Option<Bytes> {
        let start = self.known_list(event)?;
        self.reserve(event.len() + NULL.len());
        self.room.extend_from_slice(&event[..start]);
        self.room.extend_from_slice(&self.behind);
        Some(self.room.split().freeze())
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
        let start = before.len().checked_sub(digits + 1)?;
        let before = before.get(..=start)?.strip_suffix(&self.key[..])?;
        // Neither an event for its ids only, nor one with another list of ids.
        let is_empty = self.kind == StreamKind::Chat && before.ends_with(b"{}");
        (!is_empty && memchr::memrchr(b'[', before) == self.choices).then_some(start)
    }

    /// Remembers the place of `ids`, the list of ids in `event`, if nothing but the end of an event follows.
    #[cold]
    pub(super) fn learn(&mut self, event: &[u8], ids: &Range<usize>) {
        self.behind.clear();
        let (before, rest) = (&event[..ids.start], &event[ids.end..]);
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::api::Api;
    use super::super::ends::StreamEnd;
    use super::super::stream::EventStream;
    use super::*;

    /// A stream whose client did not request ids.
    fn stream(kind: StreamKind) -> EventStream {
        let api = match kind {
            StreamKind::Chat => Api::Chat,
            StreamKind::Completion => Api::Completions,
        };
        EventStream::new(StreamEnd::new(api, 8), true, Some(TokenIds::new(kind)))
    }

    fn hidden(kind: StreamKind, events: &str) -> (String, Option<Vec<u32>>) {
        let mut stream = stream(kind);
        let out = stream.pass(Bytes::copy_from_slice(events.as_bytes()), usize::MAX);
        let prompt = stream.prompt().map(<[u32]>::to_vec);
        (String::from_utf8(out.to_vec()).unwrap(), prompt)
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
            let of = |choices| EventStream::new(StreamEnd::new(api, choices), true, Some(TokenIds::new(kind)));
            let mut known = of(1);
            let mut piece = String::new();
            for (event, joined) in events.iter().zip(joined) {
                piece.extend(["data: ", &event.to_string(), "\n\n"]);
                if joined {
                    continue;
                }
                let bytes = Bytes::from(std::mem::take(&mut piece));
                let slow = of(2).pass(bytes.clone(), usize::MAX); // it knows no event
                let fast = known.pass(bytes, usize::MAX);
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
