//! Adapts the events of a request that continues a stream to that stream. No I/O.

use serde_json::{Map, Value, json};

use super::api::StreamKind;
use super::ends::{finish_in, finish_of};
use super::event::{EditBuffer, EventData, Fields, value};
use super::lax::is_unset;
use super::sent::{Phase, Sent, ids_of, text_of};
use super::sse;

/// Translation of the new request's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Translation {
    #[default]
    None,
    /// A completion continues a chat.
    ChatOfCompletion,
}

/// Condition on the first events of a continuation, before the client gets any.
#[derive(Clone, Debug)]
pub(super) struct Seam {
    /// Ids that the engine must report as its prompt, until it has.
    prompt: Option<Vec<u64>>,
    /// Part of the answer in which its first token must have text. Otherwise a character, or text for a parser, began
    /// before the seam.
    phase: Phase,
}

/// Limit of a part of the first event that is read, in bytes.
const FIRST_BYTES_MAX: usize = 16 << 10;

/// Verdict on the first events.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// More events are needed.
    More,
    Fits,
    Differs(String),
}

impl Seam {
    pub(super) fn text(phase: Phase) -> Seam {
        Seam {
            prompt: None,
            phase,
        }
    }

    pub(super) fn with_prompt(self, prompt: Vec<u64>) -> Seam {
        Seam {
            prompt: Some(prompt),
            ..self
        }
    }

    /// Judges an event, which follows the events judged before. `data`: its data, if that is a JSON object.
    pub(super) fn judge(
        &mut self,
        event: &sse::Event<'_>,
        data: Option<&EventData<'_>>,
    ) -> Verdict {
        let differs = |why: &str| Verdict::Differs(why.into());
        if event.data.is_empty() {
            return Verdict::More;
        }
        let Some(data) = data else {
            return differs("the continuation begins with what is not JSON");
        };
        let error = data.fields.get("error");
        if error.is_some_and(|error| !is_unset(&value(error))) {
            return differs("the engine reported an error to the continuation");
        }
        let Some(first) = data.choices.first() else {
            return Verdict::More;
        };
        if let (Some(wanted), Some(found)) = (&self.prompt, data.prompt()) {
            if serde_json::from_str(found.get()).ok().as_ref() != Some(wanted) {
                return differs("the engine does not take the tokens of a prompt for a chat");
            }
            self.prompt = None;
        }
        let delta = first.delta.as_ref();
        let texts = delta.into_iter().flatten().chain(&first.fields);
        if texts
            .into_iter()
            .any(|(_, raw)| raw.get().len() > FIRST_BYTES_MAX)
        {
            return differs("the continuation begins with too long an event");
        }
        let read = |fields: &Fields<'_>| -> Map<String, Value> {
            let each = fields.iter();
            each.map(|(name, raw)| (name.to_string(), value(raw)))
                .collect()
        };
        let mut choice = read(&first.fields);
        if let Some(delta) = delta {
            choice.insert("delta".into(), read(delta).into());
        }
        let choice = Value::Object(choice);
        let (phase, text) = text_of(StreamKind::Chat, &choice);
        let finish = finish_of(&choice);
        let tokens = first.ids.map_or(0, |raw| {
            serde_json::from_str::<Vec<u64>>(raw.get()).map_or(0, |ids| ids.len())
        });
        if text.is_empty() && tokens == 0 && finish.is_none() {
            return Verdict::More; // the role
        }
        let calls = choice
            .pointer("/delta/tool_calls")
            .is_some_and(|of| !is_unset(of));
        match (self.prompt.is_none(), text.is_empty()) {
            (false, _) => differs("the engine does not take the tokens of a prompt for a chat"),
            // Its text must be that of the first token.
            _ if tokens > 1 => differs("the continuation begins with several tokens at once"),
            _ if calls => differs("a tool call begins where the stream broke off"),
            // A token that ends an answer has no text.
            (true, true) if finish != Some(&"stop".into()) => differs(
                "the stream broke off within a character, or within what the engine's parser reads",
            ),
            (true, false) if phase != self.phase => differs(
                "the engine's parser does not go on with the text where the stream broke off",
            ),
            (true, _) => Verdict::Fits,
        }
    }

    /// Judges the complete events `bytes`.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn judge_all(&mut self, bytes: &[u8]) -> Verdict {
        let all = sse::events(bytes);
        let mut all = all.map(|event| self.judge(&event, EventData::read(&event.text()).as_ref()));
        all.find(|verdict| *verdict != Verdict::More)
            .unwrap_or(Verdict::More)
    }
}

/// Adapts the events of the new request to the stream.
#[derive(Debug)]
pub(super) struct Rewriter {
    kind: StreamKind,
    translation: Translation,
    /// `id` and `created` of the events that the client has.
    id: Option<Value>,
    created: Option<Value>,
    /// An event of the stream.
    template: Option<Map<String, Value>>,
    /// Tokens of the prompt, if they are known.
    prompt_tokens: Option<u64>,
    /// Whether the events have the ids of another prompt than the client's, or ones that it has.
    hides_prompt: bool,
    /// Tokens of the answer that are in the new request's prompt, and the reasoning tokens among them.
    tokens_before: usize,
    reasoning_before: u64,
    /// Choices whose role the client has.
    roles: Vec<Value>,
    /// Text that the new request repeats, and that the client has.
    repeated: String,
    /// Ids that the new request repeats, and that the client has.
    known_ids: Vec<u64>,
    /// Whether text with which a tool call could begin is withheld from the client.
    is_guarded: bool,
    /// Reason why the continuation must end.
    pub(super) refused: Option<&'static str>,
}

/// An event of the new request, as one of the stream.
#[derive(Debug, Default)]
pub(super) struct Rewritten {
    /// As it is kept for another continuation.
    pub(super) kept: Vec<u8>,
    /// As its client gets it; empty if it does not.
    pub(super) shown: Vec<u8>,
}

/// Limit of an event that is adapted, in bytes, without the ids of a prompt. Its tree takes some 50 ns per byte.
const REWRITTEN_BYTES_MAX: usize = 64 << 10;

/// Text with which tool calls begin, in the formats that vLLM has parsers for.
const CALL_BEGINNINGS: [&str; 5] = ["<", "[", "{", "functools", "\u{ff5c}"];

impl Rewriter {
    /// A rewriter for a stream whose client has `sent`. `tokens_before`: tokens of the answer in the new prompt.
    pub(super) fn new(kind: StreamKind, sent: &Sent, tokens_before: usize) -> Rewriter {
        Rewriter {
            kind,
            translation: Translation::None,
            id: sent.id.clone(),
            created: sent.created.clone(),
            template: sent.last.clone(),
            prompt_tokens: sent.prompt.as_ref().map(|ids| ids.len() as u64),
            hides_prompt: true,
            tokens_before,
            reasoning_before: sent.reasoning_tokens,
            roles: sent.roles.clone(),
            repeated: String::new(),
            known_ids: Vec::new(),
            is_guarded: false,
            refused: None,
        }
    }

    pub(super) fn translate(&mut self, translation: Translation) {
        self.translation = translation;
    }

    /// The new request generates `text` again.
    pub(super) fn repeats(&mut self, text: &str) {
        text.clone_into(&mut self.repeated);
    }

    /// The new request generates tokens again, of which the client has these `ids`.
    pub(super) fn repeats_those(&mut self, ids: Vec<u64>) {
        self.known_ids = ids;
    }

    /// The new request is the client's own, and the client does not have the ids of its prompt.
    pub(super) fn shows_prompt(&mut self) {
        self.hides_prompt = false;
    }

    pub(super) fn guard(&mut self) {
        self.is_guarded = true;
    }

    /// Whether the stream's client got nothing that its events depend on, so that those of the new request need no change.
    pub(super) fn is_idle(&self) -> bool {
        self.id.is_none()
            && self.created.is_none()
            && self.translation == Translation::None
            && self.tokens_before == 0
            && self.roles.is_empty()
            && self.repeated.is_empty()
            && self.known_ids.is_empty()
            && !(self.hides_prompt || self.is_guarded)
    }

    /// Adapts an event whose data is an object. `hides_ids`: its client did not request token ids.
    pub(super) fn rewrite(
        &mut self,
        json: &[u8],
        data: &EventData<'_>,
        hides_ids: bool,
    ) -> Rewritten {
        let mut short = EditBuffer::of(json);
        if self.hides_prompt || hides_ids {
            for ids in data.places(json, false) {
                short.replace(ids, b"null"); // those of the stream came with its first event
            }
        }
        let short = short.upto(json.len());
        let short = short.as_deref().unwrap_or(json);
        let event = Some(short).filter(|of| of.len() <= REWRITTEN_BYTES_MAX);
        let event = event.and_then(|json| serde_json::from_slice::<Map<String, Value>>(json).ok());
        let Some(mut event) = event else {
            self.refused = Some("an event of the other engine is longer than 64 KiB");
            return Rewritten::default();
        };
        if !self.rewrite_event(&mut event) {
            return Rewritten::default();
        }
        let kept = written(&event);
        if self.known_ids.is_empty() && !hides_ids {
            return Rewritten {
                shown: kept.clone(),
                kept,
            };
        }
        let is_for_client =
            self.remove_known_ids(&mut event) && !(hides_ids && hide_ids(&mut event));
        Rewritten {
            kept,
            shown: if is_for_client {
                written(&event)
            } else {
                Vec::new()
            },
        }
    }

    /// Rewrites the complete events `bytes`, up to the first one that must not reach the client. Data that is no object, and
    /// comments, stay.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn rewrite_all(&mut self, bytes: &[u8], hides_ids: bool) -> Rewritten {
        let mut all = Rewritten::default();
        for event in sse::events(bytes) {
            let text = event.text();
            let new = if let Some(data) = EventData::read(&text) {
                self.rewrite(&text, &data, hides_ids)
            } else {
                let whole = bytes[event.start..event.end].to_vec();
                Rewritten {
                    kept: whole.clone(),
                    shown: whole,
                }
            };
            if self.refused.is_some() {
                break;
            }
            all.kept.extend(new.kept);
            all.shown.extend(new.shown);
        }
        all
    }

    /// Removes ids that the client has. Returns false if it has all of the event.
    fn remove_known_ids(&mut self, event: &mut Map<String, Value>) -> bool {
        let choice = event.get_mut("choices").and_then(|of| of.get_mut(0));
        let Some(choice) = choice.filter(|_| !self.known_ids.is_empty()) else {
            return true;
        };
        let Some(list) = ids_of(choice.get("token_ids")) else {
            return true;
        };
        let known = list.len().min(self.known_ids.len());
        if list[..known] != self.known_ids[..known] {
            self.refused = Some("the other engine's tokens differ from what the client has");
            return false;
        }
        self.known_ids.drain(..known);
        choice["token_ids"] = list[known..].into();
        let (_, text) = text_of(self.kind, choice);
        list.len() > known || !text.is_empty() || finish_of(choice).is_some()
    }

    /// Returns false if the client already has the event, or must not get it.
    fn rewrite_event(&mut self, event: &mut Map<String, Value>) -> bool {
        for (field, value) in [("id", &self.id), ("created", &self.created)] {
            if let (Some(value), true) = (value, event.contains_key(field)) {
                event.insert(field.into(), value.clone());
            }
        }
        if let Some(Value::Object(usage)) = event.get_mut("usage") {
            self.correct_usage(usage);
        }
        if self.translation == Translation::ChatOfCompletion
            && let Some(object) = self.template.as_ref().and_then(|of| of.get("object"))
        {
            event.insert("object".into(), object.clone());
        }
        let Some(Value::Array(choices)) = event.get_mut("choices") else {
            return true;
        };
        for choice in choices.iter_mut() {
            let Some(choice) = choice.as_object_mut() else {
                continue;
            };
            if self.translation == Translation::ChatOfCompletion {
                translate_choice(choice);
            }
            if !self.repeated.is_empty() || self.is_guarded {
                self.check_text(choice);
                if self.refused.is_some() {
                    return false;
                }
            }
            let unfinished = !is_finished(choice);
            let index = choice.get("index").cloned().unwrap_or_default();
            if self.kind != StreamKind::Chat || !self.roles.contains(&index) {
                continue;
            }
            let Some(Value::Object(delta)) = choice.get_mut("delta") else {
                continue;
            };
            let repeats = delta.remove("role").is_some();
            let says = delta.iter().any(|(_, value)| !is_unset(value));
            if repeats && !says && unfinished {
                return false;
            }
        }
        true
    }

    /// Corrects counts: they are those of the answer, not of the new request.
    fn correct_usage(&self, usage: &mut Map<String, Value>) {
        let add = |usage: &mut Map<String, Value>, field: &str, more: i64| {
            if let Some(count) = usage.get(field).and_then(Value::as_i64) {
                usage.insert(field.into(), count.saturating_add(more).max(0).into());
            }
        };
        let before = i64::try_from(self.tokens_before).unwrap_or(i64::MAX);
        add(usage, "prompt_tokens", -before);
        add(usage, "completion_tokens", before);
        // Text is tokenized anew, to another number of tokens perhaps.
        if let (Some(known), true) = (self.prompt_tokens, usage.contains_key("prompt_tokens")) {
            let answer = usage.get("completion_tokens").and_then(Value::as_u64);
            usage.insert("prompt_tokens".into(), known.into());
            if usage.contains_key("total_tokens") {
                let total = known.saturating_add(answer.unwrap_or(0));
                usage.insert("total_tokens".into(), total.into());
            }
        }
        let prompt = usage.get("prompt_tokens").and_then(Value::as_u64);
        if let Some(Value::Object(details)) = usage.get_mut("prompt_tokens_details")
            && let (Some(cached), Some(prompt)) =
                (details.get("cached_tokens").and_then(Value::as_u64), prompt)
        {
            // Tokens of the answer are cached by now, too.
            details.insert("cached_tokens".into(), cached.min(prompt).into());
        }
        if let Some(Value::Object(details)) = usage.get_mut("completion_tokens_details") {
            let more = i64::try_from(self.reasoning_before).unwrap_or(i64::MAX);
            add(details, "reasoning_tokens", more);
        }
    }

    /// Removes text that the client has, and holds back text that it must not get.
    fn check_text(&mut self, choice: &mut Map<String, Value>) {
        let ends = is_finished(choice);
        let text = match choice.get_mut("delta") {
            Some(delta) => delta.get_mut("content"),
            None => choice.get_mut("text"),
        };
        if let Some(Value::String(text)) = text {
            if let Some(rest) = self.repeated.strip_prefix(text.as_str()) {
                self.repeated = rest.to_owned();
                text.clear();
            } else if let Some(rest) = text.strip_prefix(self.repeated.as_str()) {
                *text = rest.to_owned();
                self.repeated.clear();
            } else {
                self.refused = Some("the other engine's answer differs from what the client has");
            }
            let begins = CALL_BEGINNINGS.iter().any(|of| text.contains(of));
            if self.is_guarded && begins {
                self.refused =
                    Some("what follows may be a tool call, which a completion does not tell apart");
            }
        }
        if ends && !self.repeated.is_empty() {
            self.refused = Some("the other engine's answer ends before what the client has");
        }
    }
}

fn written(event: &Map<String, Value>) -> Vec<u8> {
    let mut out = b"data: ".to_vec();
    serde_json::to_writer(&mut out, event)
        .expect("its keys are strings, and memory can be written");
    out.extend_from_slice(b"\n\n");
    out
}

/// Hides the ids of an event. Returns true if vLLM sent it for its ids only.
fn hide_ids(event: &mut Map<String, Value>) -> bool {
    let hide = |of: &mut Map<String, Value>| match of.get_mut("token_ids") {
        Some(ids) if !ids.is_null() => {
            *ids = Value::Null;
            true
        }
        _ => false,
    };
    let mut has_ids = hide(event);
    let Some(Value::Array(choices)) = event.get_mut("choices") else {
        return false;
    };
    let mut says = choices.is_empty();
    for choice in choices {
        let Some(choice) = choice.as_object_mut() else {
            says = true;
            continue;
        };
        has_ids |= hide(choice);
        says |= is_finished(choice);
        match choice.get_mut("delta") {
            Some(Value::Object(delta)) => {
                has_ids |= hide(delta);
                says |= !delta.is_empty();
            }
            _ => says = true,
        }
    }
    has_ids && !says
}

fn is_finished(choice: &Map<String, Value>) -> bool {
    finish_in(choice.get("finish_reason")).is_some()
}

/// A choice of a completion as one of a chat.
fn translate_choice(choice: &mut Map<String, Value>) {
    choice.remove("prompt_token_ids");
    let text = choice.remove("text").unwrap_or_else(|| "".into());
    choice.insert("delta".into(), json!({"content": text}));
    if !is_finished(choice) && choice.get("stop_reason").is_some_and(Value::is_null) {
        choice.remove("stop_reason"); // chats have it in their last event
    }
}
