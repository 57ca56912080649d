//! Server-sent events of one choice, from pieces rendered once.

use std::cell::RefCell;
use std::rc::Rc;

use slipstream_base::TokenId;
use slipstream_base::width::to_u32;

use super::{CompletionApi, Finish, Head, LogprobsPiece, Usage};
use crate::json::{self, Out};

/// Part of a tool call that a step adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallDelta {
    /// Which call of the choice, from 0.
    pub index: u32,
    /// If the call begins: its id, and the name of the function.
    pub begins: Option<(String, String)>,
    /// A part of the arguments' JSON.
    pub arguments: String,
}

impl CallDelta {
    fn render(&self, out: &mut impl Out) {
        out.put(b"{\"index\":");
        json::integer(out, u64::from(self.index));
        out.put(b",");
        if let Some((id, name)) = &self.begins {
            out.put(b"\"id\":");
            json::string(out, id);
            out.put(b",\"type\":\"function\",\"function\":{\"name\":");
            json::string(out, name);
            out.put(b",\"arguments\":");
        } else {
            out.put(b"\"function\":{\"arguments\":");
        }
        json::string(out, &self.arguments);
        out.put(b"}}");
    }
}

/// Renders the events of one choice of one stream.
///
/// All that does not change from token to token is rendered once, when the stream opens; an event
/// is then three copies: the bytes before the text, the text, those after.
///
/// ```text
/// data: {"id":…,"object":…,"created":…,"model":…,"choices":[{"index":0,"delta":{"content":" the"},…}]}
/// '--------------------- before ------------------------------------------------'  '--' '--- after'
///                                                 '- choices_at    '- body_at
/// ```
///
/// Order of a stream: [`role`](Self::role) (chat alone), [`text`](Self::text) per token,
/// [`finish`](Self::finish) with the last token, for each choice; then [`usage`](Self::usage) if asked
/// for, and [`done`](Self::done).
#[derive(Clone, Debug)]
pub struct SseRender {
    kind: CompletionApi,
    include_usage: bool,
    before: Box<[u8]>,
    /// Where the choices start in `before`: just behind `"choices":[`.
    choices_at: u32,
    /// Where the body of the choice starts in `before`: just behind `"index":N,`.
    body_at: u32,
    /// Counts of the choice so far, if every event carries them.
    running: Option<Usage>,
    /// Ids of tokens for the next event, if events carry them.
    ids: Option<Box<EventIds>>,
    /// Events have nothing behind the text that changes.
    fixed_end: bool,
}

/// Ids of tokens that the next event carries (vLLM's `return_token_ids`).
#[derive(Clone, Debug)]
struct EventIds {
    /// Those of the prompt, until the first event has them.
    prompt: RefCell<Option<Rc<[TokenId]>>>,
    /// Generated since the last event.
    generated: RefCell<Vec<TokenId>>,
}

/// Behind the text of an event that is not the last of its choice.
const CHAT_AFTER: &[u8] = b"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const CHAT_AFTER_USAGE: &[u8] =
    b"\"},\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n";
const COMPLETION_AFTER: &[u8] = b"\",\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const COMPLETION_AFTER_USAGE: &[u8] =
    b"\",\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n";

impl SseRender {
    /// The renderer of choice `index` of the stream `head` opens.
    pub fn new(head: &Head<'_>, index: u32) -> SseRender {
        let mut before = Vec::with_capacity(192 + head.id.len() + head.model.len());
        before.put(b"data: ");
        head.render(&mut before, true);
        before.put(b"\"choices\":[");
        let choices_at = before.len();
        before.put(b"{\"index\":");
        json::integer(&mut before, u64::from(index));
        before.put(b",");
        let body_at = before.len();
        before.put(match head.kind {
            CompletionApi::Chat => b"\"delta\":{\"content\":\"",
            CompletionApi::Completion => b"\"text\":\"",
        });
        SseRender {
            kind: head.kind,
            include_usage: head.include_usage,
            before: before.into(),
            choices_at: to_u32(choices_at),
            body_at: to_u32(body_at),
            running: None,
            ids: None,
            fixed_end: true,
        }
    }

    /// Events carry the ids of their tokens, and the first one those of the prompt.
    pub fn with_token_ids(mut self, prompt: Rc<[TokenId]>) -> SseRender {
        self.ids = Some(Box::new(EventIds {
            prompt: RefCell::new(Some(prompt)),
            generated: RefCell::default(),
        }));
        self.fixed_end = false;
        self
    }

    /// The id of a token of the next event, if events carry them.
    pub fn note_token(&self, token: TokenId) {
        if let Some(ids) = &self.ids {
            ids.generated.borrow_mut().push(token);
        }
    }

    /// Every event carries the counts of its choice so far (`continuous_usage_stats`, an extension
    /// of vLLM's), beginning with none generated.
    pub fn with_running_usage(mut self, prompt_tokens: u64) -> SseRender {
        self.running = Some(Usage {
            prompt_tokens,
            ..Usage::default()
        });
        self.fixed_end = false;
        self
    }

    /// The counts for the next events, where they carry some.
    #[inline]
    pub fn set_counts(&mut self, completion_tokens: u64, cached_tokens: u64) {
        if let Some(running) = &mut self.running {
            running.completion_tokens = completion_tokens;
            running.cached_tokens = cached_tokens;
        }
    }

    /// The event that opens a choice of a chat: `"delta":{"role":"assistant","content":""}`.
    /// Completions have none.
    pub fn role(&self, out: &mut impl Out) {
        if self.kind == CompletionApi::Completion {
            return;
        }
        out.put(&self.before[..self.body_at as usize]);
        out.put(b"\"delta\":{\"role\":\"assistant\",\"content\":\"");
        self.put_after(out);
    }

    /// An event with `text`.
    #[inline]
    pub fn text(&self, text: &str, out: &mut impl Out) {
        // Room for the usual case, where nothing is escaped.
        out.reserve(self.before.len() + text.len() + self.after().len());
        out.put(&self.before);
        json::escape(out, text);
        self.put_after(out);
    }

    /// An event with a text that is already escaped, from
    /// [`TextModel::token_json`](crate::text::TextModel::token_json).
    #[inline]
    pub fn escaped(&self, json: &[u8], out: &mut impl Out) {
        out.reserve(self.before.len() + json.len() + self.after().len());
        out.put(&self.before);
        out.put(json);
        self.put_after(out);
    }

    /// An event with `text` and the log probabilities of its tokens.
    pub fn text_logprobs(&self, text: &str, logprobs: &LogprobsPiece, out: &mut impl Out) {
        out.put(&self.before);
        json::escape(out, text);
        out.put(self.close_text());
        out.put(b"\"logprobs\":");
        logprobs.render(self.kind, out);
        out.put(b",\"finish_reason\":null");
        self.close(out);
    }

    /// An event with parts of calls, and why the choice ended if it is its last one. A completion has no calls: its event
    /// has no text.
    pub fn calls(
        &self,
        calls: &[CallDelta],
        logprobs: Option<&LogprobsPiece>,
        finish: Option<&Finish<'_>>,
        out: &mut impl Out,
    ) {
        if self.kind != CompletionApi::Chat {
            return match (finish, logprobs) {
                (Some(finish), _) => self.finish(None, logprobs, finish, out),
                (None, Some(logprobs)) => self.text_logprobs("", logprobs, out),
                (None, None) => self.text("", out),
            };
        }
        out.put(&self.before[..self.body_at as usize]);
        out.put(b"\"delta\":{");
        for (at, call) in calls.iter().enumerate() {
            out.put(if at == 0 { b"\"tool_calls\":[" } else { b"," });
            call.render(out);
        }
        out.put(if calls.is_empty() { b"}," } else { b"]}," });
        out.put(b"\"logprobs\":");
        match logprobs {
            Some(logprobs) => logprobs.render(self.kind, out),
            None => out.put(b"null"),
        }
        match finish {
            Some(finish) => {
                out.put(b",");
                finish.render(out);
            }
            None => out.put(b",\"finish_reason\":null"),
        }
        self.close(out);
    }

    /// The last event of the choice: the last token's text, and why the choice ended. As with vLLM
    /// the two share an event. Without `text`, no token comes with the reason.
    pub fn finish(
        &self,
        text: Option<&str>,
        logprobs: Option<&LogprobsPiece>,
        finish: &Finish<'_>,
        out: &mut impl Out,
    ) {
        if self.kind == CompletionApi::Chat && text.is_none() {
            out.put(&self.before[..self.body_at as usize]);
            out.put(b"\"delta\":{},");
        } else {
            out.put(&self.before);
            json::escape(out, text.unwrap_or_default());
            out.put(self.close_text());
        }
        out.put(b"\"logprobs\":");
        match logprobs {
            Some(logprobs) => logprobs.render(self.kind, out),
            None => out.put(b"null"),
        }
        out.put(b",");
        finish.render(out);
        self.close(out);
    }

    /// As [`finish`](Self::finish), with a text that is already escaped and no log probabilities.
    pub fn finish_escaped(&self, json: &[u8], finish: &Finish<'_>, out: &mut impl Out) {
        out.put(&self.before);
        out.put(json);
        out.put(self.close_text());
        out.put(b"\"logprobs\":null,");
        finish.render(out);
        self.close(out);
    }

    /// The event with the counts of the whole stream: no choices, and `usage`. Send it once, behind
    /// the last choice, if the client asked for it.
    pub fn usage(&self, usage: &Usage, out: &mut impl Out) {
        out.put(&self.before[..self.choices_at as usize]);
        out.put(b"],\"usage\":");
        usage.render(out);
        out.put(b"}\n\n");
    }

    /// The end of the stream.
    pub fn done(out: &mut impl Out) {
        out.put(b"data: [DONE]\n\n");
    }

    /// A failure in mid-stream: the error, then the end.
    pub fn error(error: &super::ApiError, out: &mut impl Out) {
        out.put(b"data: ");
        out.put(&error.body());
        out.put(b"\n\n");
        SseRender::done(out);
    }

    /// The bytes after the text of an event that is not the last of its choice.
    #[inline]
    fn put_after(&self, out: &mut impl Out) {
        if self.fixed_end {
            out.put(self.after());
        } else {
            out.put(self.close_text());
            out.put(b"\"logprobs\":null,\"finish_reason\":null");
            self.close(out);
        }
    }

    #[inline]
    fn after(&self) -> &'static [u8] {
        match (self.kind, self.include_usage) {
            (CompletionApi::Chat, false) => CHAT_AFTER,
            (CompletionApi::Chat, true) => CHAT_AFTER_USAGE,
            (CompletionApi::Completion, false) => COMPLETION_AFTER,
            (CompletionApi::Completion, true) => COMPLETION_AFTER_USAGE,
        }
    }

    fn close_text(&self) -> &'static [u8] {
        match self.kind {
            CompletionApi::Chat => b"\"},",
            CompletionApi::Completion => b"\",",
        }
    }

    /// The end of the choice and of the event.
    fn close(&self, out: &mut impl Out) {
        match &self.ids {
            None => out.put(b"}]"),
            Some(ids) => self.close_with_ids(ids, out),
        }
        if let Some(running) = &self.running {
            out.put(b",\"usage\":");
            running.render(out);
            out.put(b"}\n\n");
            return;
        }
        out.put(if self.include_usage {
            b",\"usage\":null}\n\n"
        } else {
            b"}\n\n"
        });
    }

    /// The end of the choice, with the ids where vLLM has them: a chat's prompt behind the choices, a
    /// completion's in the choice.
    #[cold]
    fn close_with_ids(&self, ids: &EventIds, out: &mut impl Out) {
        let prompt = ids.prompt.take();
        let generated = ids.generated.take();
        let first_of_chat = self.kind == CompletionApi::Chat && prompt.is_some();
        if let (CompletionApi::Completion, Some(prompt)) = (self.kind, &prompt) {
            out.put(b",\"prompt_token_ids\":");
            json::integers(out, prompt);
        }
        // The event of a chat that has the role has no tokens.
        if !(first_of_chat && generated.is_empty()) {
            out.put(b",\"token_ids\":");
            json::integers(out, &generated);
        }
        out.put(b"}]");
        if let (true, Some(prompt)) = (first_of_chat, &prompt) {
            out.put(b",\"prompt_token_ids\":");
            json::integers(out, prompt);
        }
    }
}
