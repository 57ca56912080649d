//! The part of a stream that the client received before the engine was lost. No I/O.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::api::StreamKind;
use super::ends::finish_of;
use super::lax::is_unset;
use super::sse;

/// The part of an answer that a delta belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Content,
    /// Text that the engine's parser classified as reasoning.
    Reasoning,
}

/// The tokens up to an event, or to a seam.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Characters that the client has, including this event.
    pub(super) chars: usize,
    /// Tokens so far, including this event.
    pub(super) tokens: usize,
    pub(super) has_text: bool,
    /// Whether the event has exactly one token. If it also has text, it ends with a complete character: vLLM holds back
    /// the text of an incomplete one.
    pub(super) is_single: bool,
    /// At a seam, the characters of the text of the tokens.
    pub(super) seam: Option<usize>,
}

/// Tokens of an answer that the request for its continuation has in its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) tokens: usize,
    /// Characters of their text.
    pub(super) chars: usize,
}

/// The part of an answer that its client has received.
#[derive(Debug, Default)]
pub(super) struct Sent {
    pub(super) id: Option<Value>,
    pub(super) created: Option<Value>,
    /// The last event with a choice.
    pub(super) last: Option<Map<String, Value>>,
    /// Content.
    pub(super) text: String,
    /// Of the last text.
    pub(super) phase: Phase,
    /// Whether the answer has reasoning text.
    pub(super) reasons: bool,
    pub(super) reasoning_tokens: u64,
    pub(super) steps: Vec<Step>,
    /// Tokens of the answer; `None` if an event had no ids.
    pub(super) tokens: Option<Vec<u64>>,
    pub(super) prompt: Option<Vec<u64>>,
    /// `usage.completion_tokens` of the last event that had it.
    pub(super) counted: Option<u64>,
    /// Choices whose role was sent.
    pub(super) roles: Vec<Value>,
    /// Whether the client has more than roles.
    pub(super) delivered: bool,
    /// Whether it has text.
    pub(super) has_text: bool,
    /// Whether it has more than text and ids.
    pub(super) has_more: bool,
    /// The last event has come.
    pub(super) is_over: bool,
    /// Choices with a finish reason.
    pub(super) finished: BTreeSet<u64>,
    /// Tokens that came before a seam behind which they come again.
    shown: Vec<u64>,
    /// A field of a delta that is neither role nor text.
    pub(super) refused: Option<String>,
}

/// Data of the events of `bytes` that have any.
pub(super) fn data_of(bytes: &[u8]) -> impl Iterator<Item = Cow<'_, [u8]>> {
    let all = sse::events(bytes).map(|event| event.data);
    all.filter(|data| !data.is_empty())
}

/// Token ids in `value`, if it is a list of them.
pub(super) fn ids_of(value: Option<&Value>) -> Option<Vec<u64>> {
    value?.as_array()?.iter().map(Value::as_u64).collect()
}

/// Ids of the prompt in an event, or in a choice of it.
pub(super) fn prompt_of(event: &Value, choice: &Value) -> Option<Vec<u64>> {
    let of = |value: &Value| ids_of(value.get("prompt_token_ids"));
    of(choice).or_else(|| of(event))
}

/// Text of a choice, and the part of the answer that it belongs to.
pub(super) fn text_of(kind: StreamKind, choice: &Value) -> (Phase, &str) {
    if kind == StreamKind::Completion || choice.get("delta").is_none() {
        let text = choice.get("text").and_then(Value::as_str);
        return (Phase::Content, text.unwrap_or_default());
    }
    let field = |name| choice["delta"].get(name).and_then(Value::as_str);
    let reasoning = field("reasoning").filter(|of| !of.is_empty());
    if let Some(text) = reasoning
        .or_else(|| field("reasoning_content"))
        .filter(|of| !of.is_empty())
    {
        return (Phase::Reasoning, text);
    }
    (Phase::Content, field("content").unwrap_or_default())
}

impl Sent {
    /// Reads the events `bytes`; `seams` as in [`super::resume::Lost`]. `asks_ids`: the client requested token ids.
    ///
    /// # Errors
    /// The reason why the stream cannot continue.
    pub(super) fn read(
        kind: StreamKind,
        bytes: &[u8],
        seams: &[(usize, Option<Kept>)],
        asks_ids: bool,
    ) -> Result<Sent, String> {
        let mut sent = Sent {
            tokens: Some(Vec::new()),
            ..Sent::default()
        };
        let mut from = 0;
        for &(at, kept) in seams {
            sent.read_part(kind, &bytes[from..at], asks_ids)?;
            from = at;
            match (kept, &mut sent.tokens) {
                (Some(kept), Some(tokens)) => {
                    // Later tokens count from the seam; what the client has stays.
                    if tokens.len() > sent.shown.len() {
                        sent.shown.clone_from(tokens);
                    }
                    tokens.truncate(kept.tokens);
                    let chars = sent.chars();
                    sent.steps.retain(|step| step.tokens <= kept.tokens);
                    sent.steps.push(Step {
                        chars,
                        tokens: kept.tokens,
                        has_text: false,
                        is_single: false,
                        seam: Some(kept.chars),
                    });
                }
                _ => sent.tokens = None,
            }
        }
        sent.read_part(kind, &bytes[from..], asks_ids)?;
        Ok(sent)
    }

    /// Ids behind the first `kept` that a client which asked for ids has.
    pub(super) fn ids_behind(&self, kept: usize) -> Vec<u64> {
        let tokens = self.tokens.as_deref().unwrap_or_default();
        let longest = if self.shown.len() > tokens.len() {
            &self.shown
        } else {
            tokens
        };
        longest.get(kept..).unwrap_or_default().to_vec()
    }

    /// Number of characters of text that the client has.
    pub(super) fn chars(&self) -> usize {
        self.steps.last().map_or(0, |step| step.chars)
    }

    fn read_part(&mut self, kind: StreamKind, bytes: &[u8], asks_ids: bool) -> Result<(), String> {
        for data in data_of(bytes) {
            if data.trim_ascii() == b"[DONE]" {
                self.is_over = true;
                continue;
            }
            // A byte that is not UTF-8 is a character at the client, too.
            let Ok(event) = serde_json::from_str::<Value>(&String::from_utf8_lossy(&data)) else {
                return Err("an event of it is not JSON".into());
            };
            if event.get("error").is_some_and(|error| !is_unset(error)) {
                return Err("the engine reported an error".into());
            }
            self.read_event(kind, event, asks_ids);
        }
        Ok(())
    }

    fn read_event(&mut self, kind: StreamKind, event: Value, asks_ids: bool) {
        if self.id.is_none() {
            self.id = event.get("id").cloned();
            self.created = event.get("created").cloned();
        }
        let counted = event.pointer("/usage/completion_tokens");
        self.counted = counted.and_then(Value::as_u64).or(self.counted);
        let choices = event.get("choices").and_then(Value::as_array);
        for choice in choices.into_iter().flatten() {
            if finish_of(choice).is_some() {
                let index = choice.get("index").and_then(Value::as_u64);
                self.finished.insert(index.unwrap_or(0));
            }
            self.prompt = prompt_of(&event, choice).or(self.prompt.take());
            let delta = choice.get("delta").and_then(Value::as_object);
            for (field, value) in delta.into_iter().flatten() {
                match field.as_str() {
                    "role" => self
                        .roles
                        .push(choice.get("index").cloned().unwrap_or_default()),
                    "content" | "reasoning" | "reasoning_content" => {}
                    _ if is_unset(value) => {}
                    _ => {
                        self.refused = Some(field.clone());
                        self.delivered = true;
                        self.has_more = true;
                    }
                }
            }
            let (phase, text) = text_of(kind, choice);
            let ids = ids_of(choice.get("token_ids")).filter(|ids| !ids.is_empty());
            let has_text = !text.is_empty();
            self.has_more |= choice.get("logprobs").is_some_and(|of| !of.is_null());
            self.delivered |= has_text || self.has_more || asks_ids && ids.is_some();
            if !has_text && ids.is_none() {
                continue;
            }
            if has_text {
                self.has_text = true;
                self.phase = phase;
                match phase {
                    Phase::Content => self.text.push_str(text),
                    Phase::Reasoning => self.reasons = true,
                }
            }
            let is_single = ids.as_ref().is_some_and(|ids| ids.len() == 1);
            match (&mut self.tokens, ids) {
                (Some(all), Some(ids)) => {
                    if phase == Phase::Reasoning {
                        self.reasoning_tokens += ids.len() as u64;
                    }
                    all.extend(ids);
                }
                (all, _) => *all = None,
            }
            self.steps.push(Step {
                chars: self.chars() + text.chars().count(),
                tokens: self.tokens.as_ref().map_or(0, Vec::len),
                has_text,
                is_single,
                seam: None,
            });
        }
        if let Value::Object(event) = event
            && event.get("choices").is_some_and(|of| !is_unset(of))
        {
            self.last = Some(event);
        }
    }
}
