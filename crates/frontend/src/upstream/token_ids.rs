//! Hides token ids that the router requested from vLLM, so that a stream can continue, but its client did not.

use std::sync::LazyLock;

use bytes::{BufMut, Bytes, BytesMut};
use memchr::memmem::{self, Finder};

use super::resume::StreamKind;

/// Key of the answer's ids, and end of the key of the prompt's ids. Within a JSON string its quotes would be escaped.
static IDS: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"token_ids\":["));

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
    room: BytesMut,
}

impl TokenIds {
    pub(super) fn new(kind: StreamKind) -> TokenIds {
        TokenIds {
            kind,
            prompt: None,
            is_begun: false,
            room: BytesMut::new(),
        }
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
            let ids = events[start + 1..end - 1].split(|&b| b == b',');
            let parsed = ids.map(|id| {
                let id = std::str::from_utf8(id.trim_ascii()).ok()?;
                id.parse().ok()
            });
            self.prompt = parsed.collect();
            return [&events[..start], b"null", &events[end..]].concat().into();
        }
        events
    }

    /// Returns the complete events `events` as vLLM sends them to clients that do not request ids.
    pub(super) fn hide(&mut self, events: Bytes) -> Bytes {
        let Some(mut found) = find(&events) else {
            return events;
        };
        if self.kind == StreamKind::Chat && memmem::find(&events, EMPTY_DELTA).is_some() {
            return without_empty_deltas(&events).into();
        }
        if self.room.capacity() < events.len() {
            self.room.reserve(ROOM.max(events.len()));
        }
        let mut rest = &events[..];
        loop {
            self.room.put_slice(&rest[..found.start]);
            self.room.put_slice(b"null");
            rest = &rest[found.end..];
            match find(rest) {
                Some(next) => found = next,
                None => break,
            }
        }
        self.room.put_slice(rest);
        self.room.split().freeze()
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
        let start = key + IDS.needle().len() - 1;
        let end = start + memchr::memchr(b']', &events[start..])? + 1;
        let is_list = |b: &u8| matches!(b, b'0'..=b'9' | b',' | b' ');
        let is_prompt = events[..key].ends_with(b"\"prompt_");
        let is_ids = is_prompt || events[..key].ends_with(b"\"");
        if is_ids && events[start + 1..end - 1].iter().all(is_list) {
            return Some(Ids {
                is_prompt,
                start,
                end,
            });
        }
        from = start;
    }
}

const EMPTY_DELTA: &[u8] = b"\"delta\":{}";

/// Returns `events` without ids, and without events that vLLM sends for their ids only: a parser of the engine holds back
/// their text.
fn without_empty_deltas(events: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(events.len());
    let mut rest = events;
    while !rest.is_empty() {
        let end = memmem::find(rest, b"\n\n").map_or(rest.len(), |at| at + 2);
        let (event, after) = rest.split_at(end);
        rest = after;
        let has = |text: &[u8]| memmem::find(event, text).is_some();
        let mut left = event;
        let is_for_ids =
            find(event).is_some() && has(EMPTY_DELTA) && has(b"\"finish_reason\":null");
        if is_for_ids {
            continue;
        }
        while let Some(found) = find(left) {
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

    use super::*;

    fn hidden(kind: StreamKind, events: &str) -> (String, Option<Vec<u32>>) {
        let mut ids = TokenIds::new(kind);
        let kept = ids.take_prompt(Bytes::copy_from_slice(events.as_bytes()));
        let out = ids.hide(kept);
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

    proptest! {
        /// Whatever an answer's text is, only lists of ids in their fields go.
        #[test]
        fn nothing_but_ids_is_hidden(
            texts in prop::collection::vec(r#"[a"\\{}\[\]:,0-9_]{0,12}|"?(prompt_)?token_ids"?:\[[0-9,]{0,4}\]?"#, 1..4),
            ids in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..4), 3),
            chat in any::<bool>(),
        ) {
            let (mut with, mut without) = (String::new(), String::new());
            for (text, ids) in texts.iter().zip(&ids) {
                let event = |ids: Value| {
                    let choice = if chat {
                        json!({"delta": {"content": text}, "token_ids": ids, "finish_reason": null})
                    } else {
                        json!({"text": text, "token_ids": ids, "prompt_token_ids": null})
                    };
                    format!("data: {}\n\n", json!({"choices": [choice], "model": text}))
                };
                with += &event(json!(ids));
                without += &event(Value::Null);
            }
            let kind = if chat { StreamKind::Chat } else { StreamKind::Completion };
            prop_assert_eq!(hidden(kind, &with).0, without);
        }
    }
}
