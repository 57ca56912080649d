//! Record of a forwarded request: lengths and hashes, no text.
//!
//! Lengths are the engine's `usage`. A stream without it is counted as it passes: tokens that its events name, or
//! its events with text.

use std::rc::Rc;
use std::sync::Arc;

use memchr::memmem;
use serde::Deserialize;
use slipstream_base::WorkerId;
use slipstream_planes::clock::monotonic_ns;
use slipstream_recorder::{RecordedRequest, RecorderHandle};

use super::sse;
use crate::door::account::TokenCounts;
use crate::door::connection::Owner;
use crate::door::shadow::Shadowed;

/// The end of an answer that is kept for its `usage`, bytes.
const TAIL_BYTES: usize = 4 << 10;

/// Answers of one request at most (`n`).
const CHOICES_MAX: u32 = 128;

/// A request that will be recorded: when it is dropped.
pub(super) struct Recording {
    recorder: Option<RecorderHandle>,
    /// The request whose line in the access log, or whose key, wants them.
    account: Option<Rc<Owner>>,
    request: RecordedRequest,
    /// The same for a twin of the fleet.
    shadow: Option<Shadowed>,
    /// Answers that it asks for.
    choices: u32,
    tally: Tally,
}

/// Knowledge of an answer's length.
#[derive(Debug, Default)]
struct Tally {
    usage: Usage,
    /// Some of an answer came.
    begun: bool,
    /// Tokens by the events so far.
    counted: u32,
    /// The last bytes of an answer that is no stream.
    tail: Vec<u8>,
}

/// `usage` of an answer.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Usage {
    /// The second name is that of Anthropic's API and of `/v1/responses`.
    #[serde(alias = "input_tokens")]
    prompt_tokens: Option<u32>,
    #[serde(alias = "output_tokens")]
    completion_tokens: Option<u32>,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: Option<PromptDetails>,
    /// Anthropic's `input_tokens` leaves these out.
    cache_read_input_tokens: Option<u32>,
    cache_creation_input_tokens: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u32>,
}

impl Usage {
    fn prompt(&self) -> Option<u32> {
        let cached = self.cache_read_input_tokens.unwrap_or(0);
        let cached = cached.saturating_add(self.cache_creation_input_tokens.unwrap_or(0));
        self.prompt_tokens
            .map(|tokens| tokens.saturating_add(cached))
    }

    fn cached(&self) -> Option<u32> {
        let details = self.prompt_tokens_details.as_ref();
        let cached = details.and_then(|details| details.cached_tokens);
        cached.or(self.cache_read_input_tokens)
    }

    /// Takes over what a later one says.
    fn update(&mut self, later: Usage) {
        self.prompt_tokens = later.prompt_tokens.or(self.prompt_tokens);
        self.completion_tokens = later.completion_tokens.or(self.completion_tokens);
        let details = later.prompt_tokens_details;
        self.prompt_tokens_details = details.or(self.prompt_tokens_details.take());
        let read = later.cache_read_input_tokens;
        self.cache_read_input_tokens = read.or(self.cache_read_input_tokens);
        let created = later.cache_creation_input_tokens;
        self.cache_creation_input_tokens = created.or(self.cache_creation_input_tokens);
    }
}

impl Recording {
    pub(super) fn new(
        recorder: Option<RecorderHandle>,
        account: Option<Rc<Owner>>,
        shadow: Option<Shadowed>,
        request: RecordedRequest,
        choices: u32,
    ) -> Self {
        Recording {
            recorder,
            account,
            shadow,
            request,
            choices: choices.clamp(1, CHOICES_MAX),
            tally: Tally::default(),
        }
    }

    /// Whole events of a stream.
    pub(super) fn on_events(&mut self, events: &[u8]) {
        let before = self.tally.counted;
        self.tally.on_events(events);
        if let Some(Shadowed { request, .. }) = &mut self.shadow {
            let now = monotonic_ns();
            if before == 0 && self.tally.counted > 0 {
                request.first_ns = now;
            }
            // Events behind the last token have no text.
            if self.tally.counted > before {
                request.last_ns = now;
            }
        }
    }

    /// A piece of an answer that is no stream.
    pub(super) fn on_piece(&mut self, piece: &[u8]) {
        self.tally.on_piece(piece);
        if let Some(Shadowed { request, .. }) = &mut self.shadow {
            request.last_ns = monotonic_ns();
        }
    }

    /// `worker` begins the answer.
    pub(super) fn on_begun(&mut self, worker: WorkerId, engine: &Arc<str>) {
        if let Some(Shadowed { request, .. }) = &mut self.shadow {
            request.worker = Some(worker);
            request.engine = engine.clone();
        }
    }

    /// Another engine had a part of it, or gets one.
    pub(super) fn on_moved(&mut self) {
        if let Some(Shadowed { request, .. }) = &mut self.shadow {
            request.is_moved = true;
        }
    }

    /// The engine has sent all of the answer.
    pub(super) fn on_complete(&mut self) {
        if let Some(Shadowed { request, .. }) = &mut self.shadow {
            request.is_complete = true;
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.tally.close();
        if let Some(tokens) = self.tally.usage.prompt() {
            self.request.input_tokens = tokens;
        }
        // The usage of an event may be that of one choice.
        let usage = self.tally.usage.completion_tokens.unwrap_or(0);
        let output = if self.choices > 1 || usage == 0 {
            usage.max(self.tally.counted)
        } else {
            usage
        };
        if let Some(owner) = self.account.take().filter(|_| self.tally.begun) {
            let cached = self.tally.usage.cached();
            owner.account().note_counts(TokenCounts {
                prompt: self.request.input_tokens.into(),
                cached: cached.map(u64::from),
                completion: output.into(),
            });
        }
        if let Some(mut shadow) = self.shadow.take() {
            let request = &mut shadow.request;
            request.input_tokens = self.request.input_tokens;
            request.cached_tokens = self.tally.usage.cached();
            request.blocks = self.request.blocks.clone();
            request.output_tokens = output;
            request.priority = self.request.priority;
            shadow.end();
        }
        let Some(recorder) = &self.recorder else {
            return;
        };
        // One line per sequence; which of them was how long is not known.
        for choice in 0..self.choices {
            let rest = u32::from(choice < output % self.choices);
            recorder.record(RecordedRequest {
                output_tokens: output / self.choices + rest,
                ..self.request.clone()
            });
        }
    }
}

impl Tally {
    fn on_events(&mut self, events: &[u8]) {
        self.begun = true;
        for event in sse::events(events) {
            if let Some(usage) = usage_of(&event.data) {
                self.usage.update(usage);
            }
            self.counted = self.counted.saturating_add(tokens_of(&event.data));
        }
    }

    fn on_piece(&mut self, piece: &[u8]) {
        self.begun = true;
        let piece = &piece[piece.len().saturating_sub(TAIL_BYTES)..];
        let keep = TAIL_BYTES - piece.len();
        let drop = self.tail.len().saturating_sub(keep);
        self.tail.drain(..drop);
        self.tail.extend_from_slice(piece);
    }

    fn close(&mut self) {
        if let Some(usage) = usage_of(&self.tail) {
            self.usage.update(usage);
        }
    }
}

/// The last `usage` in `json`, of which the beginning may be missing. `null` is none.
fn usage_of(json: &[u8]) -> Option<Usage> {
    const NAME: &[u8] = b"\"usage\"";
    let at = memmem::rfind(json, NAME)? + NAME.len();
    let value = json[at..].trim_ascii_start().strip_prefix(b":")?;
    // The rest is not read.
    let mut values = serde_json::Deserializer::from_slice(value).into_iter::<Option<Usage>>();
    values.next()?.ok()?
}

/// Tokens of the answer in an event: those it names, else one if it has text.
fn tokens_of(event: &[u8]) -> u32 {
    const IDS: &[u8] = b"\"token_ids\":";
    let named = memmem::find(event, IDS).and_then(|at| {
        let list = event[at + IDS.len()..]
            .trim_ascii_start()
            .strip_prefix(b"[")?;
        let end = list.iter().position(|&byte| byte == b']')?;
        let list = list[..end].trim_ascii();
        let commas = memchr::memchr_iter(b',', list).count();
        let tokens = if list.is_empty() { 0 } else { commas + 1 };
        Some(u32::try_from(tokens).unwrap_or(u32::MAX))
    });
    named.unwrap_or_else(|| u32::from(has_text(event)))
}

/// Whether an event has text of an answer, in any of the fields that engines use for it.
fn has_text(event: &[u8]) -> bool {
    const FIELDS: [&[u8]; 7] = [
        b"\"delta\":",
        b"\"partial_json\":",
        b"\"content\":",
        b"\"text\":",
        b"\"reasoning_content\":",
        b"\"reasoning\":",
        b"\"arguments\":",
    ];
    FIELDS.iter().any(|&field| {
        memmem::find_iter(event, field).any(|at| {
            let value = event[at + field.len()..].trim_ascii_start();
            value.first() == Some(&b'"') && value.get(1) != Some(&b'"')
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(events: &[&str]) -> (Option<u32>, u32) {
        let mut tally = Tally::default();
        for event in events {
            tally.on_events(format!("data: {event}\n\n").as_bytes());
        }
        tally.close();
        (tally.usage.completion_tokens, tally.counted)
    }

    #[test]
    fn events_of_responses_and_messages_count() {
        let delta = r#"{"type":"response.output_text.delta","delta":"a"}"#;
        assert_eq!(counted(&[delta, delta]), (None, 2));
        let json = r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}"#;
        assert_eq!(counted(&[json]), (None, 1));
    }

    #[test]
    fn prompts_of_messages_include_their_cached_part() {
        let mut tally = Tally::default();
        tally.on_events(
            br#"data: {"message":{"usage":{"input_tokens":9,"cache_read_input_tokens":400,"output_tokens":1}}}"#,
        );
        assert_eq!(tally.usage.prompt(), Some(409));
        assert_eq!(tally.usage.cached(), Some(400));
        let mut tally = Tally::default();
        tally.on_events(
            br#"data: {"usage":{"input_tokens":409,"input_tokens_details":{"cached_tokens":400},"output_tokens":1}}"#,
        );
        assert_eq!(
            (tally.usage.prompt(), tally.usage.cached()),
            (Some(409), Some(400))
        );
    }

    #[test]
    fn streams_are_counted_by_usage_tokens_or_events() {
        let role = r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
        let word = r#"{"choices":[{"delta":{"content":"a \"text\":"}}]}"#;
        let thought = r#"{"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}"#;
        let call = r#"{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{"}}]}}]}"#;
        let end = r#"{"choices":[{"delta":{"content":""},"finish_reason":"stop"}],"usage":null}"#;
        let all = [role, word, thought, call, end, "[DONE]"];
        assert_eq!(counted(&all), (None, 3));
        let usage =
            r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":41,"x":{"y":1}}}"#;
        assert_eq!(counted(&[word, usage, "[DONE]"]), (Some(41), 1));
        let ids = r#"{"choices":[{"text":"ab","token_ids":[5, 6,7]}]}"#;
        let none = r#"{"choices":[{"text":"","token_ids":[]}]}"#;
        assert_eq!(counted(&[ids, none]), (None, 3));
        assert_eq!(counted(&["", "{", "\"usage\":", "\"usage\": 7"]), (None, 0));
    }

    #[test]
    fn data_of_several_lines_and_other_line_ends_counts() {
        for end in ["\n", "\r", "\r\n"] {
            let mut tally = Tally::default();
            let lines = [
                "data: {\"usage\":",
                "data:{\"completion_tokens\":",
                ": c",
                "data: 41}}",
                "",
                "",
            ];
            tally.on_events(lines.join(end).as_bytes());
            assert_eq!(tally.usage.completion_tokens, Some(41), "{end:?}");
        }
    }

    #[test]
    fn a_whole_answer_is_counted_by_its_usage_however_it_comes() {
        let text = format!(
            r#"{{"choices":[{{"text":"{}\"usage\""}}],"usage":{{"prompt_tokens":9,"completion_tokens":12}}}}"#,
            "x".repeat(3 * TAIL_BYTES)
        );
        for piece in [1, 1_000, text.len()] {
            let mut tally = Tally::default();
            text.as_bytes()
                .chunks(piece)
                .for_each(|of| tally.on_piece(of));
            assert!(tally.tail.len() <= TAIL_BYTES);
            tally.close();
            assert_eq!(tally.usage.completion_tokens, Some(12), "{piece}");
            assert_eq!(tally.usage.prompt_tokens, Some(9));
        }
    }
}
