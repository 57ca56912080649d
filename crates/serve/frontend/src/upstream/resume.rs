//! Plans how a stream continues on another engine after its own was lost. No I/O.
//!
//! The bytes that the client has are parsed only after the loss: an undisturbed stream costs a copy. The new request asks
//! for the continuation of the tokens (or text) so far; `rewrite` adapts its events to the stream.
//!
//! | plan | request | exact |
//! | --- | --- | --- |
//! | again | as the client sent it | yes: the client has nothing of the answer yet |
//! | tokens | `/v1/completions` with the ids of the prompt and of the answer so far, also for chats | yes |
//! | chat of tokens | the chat with these ids in `kv_transfer_params.prompt_token_ids`, so that the engine's parsers of reasoning and tool calls read the rest | yes, if a parser that begins here reads the rest as the first engine's would |
//! | text | prompt and text so far, or an assistant message to be continued | no: it is tokenized anew |
//!
//! Sources: vLLM 0.32 and 0.33, `vllm/entrypoints/openai/*/serving.py`, `vllm/renderers/online_renderer.py`
//! (`_reused_prompt_token_ids`), `vllm/v1/engine/detokenizer.py`, `vllm/parser`.

use serde_json::{Value, json};

use super::api::StreamKind;
use super::continuity::{hinders, is_plain, may_hinder};
use super::lax::{Body, is_unset};
use super::rewrite::{Rewriter, Seam, Translation};
use super::sent::{Kept, Sent, Step};

/// A stream whose engine is lost.
#[derive(Debug)]
pub(super) struct Lost<'a> {
    pub(super) kind: StreamKind,
    /// The client's request.
    pub(super) body: &'a [u8],
    /// Events that the client has, with token ids if engines sent some.
    pub(super) sent: &'a [u8],
    /// Offsets in `sent` at which other engines continued, each with the tokens before it, or `None` if unknown.
    pub(super) seams: &'a [(usize, Option<Kept>)],
    /// Ids of the prompt, if the router requested them.
    pub(super) prompt: Option<&'a [u32]>,
    /// Whether the stream may continue by tokens, not only by text.
    pub(super) by_tokens: bool,
    /// Whether prompts' ids may be sent in `kv_transfer_params`, because no KV transfer needs that field.
    pub(super) by_params: bool,
    /// The model's context length, tokens, if known.
    pub(super) model_len: Option<u64>,
}

/// A way to continue a stream.
#[derive(Debug)]
pub(super) struct Plan {
    /// Body of the new request.
    pub(super) body: Vec<u8>,
    /// Path of the new request, if it differs.
    pub(super) path: Option<&'static str>,
    /// Whether only vLLM understands the request.
    pub(super) is_for_vllm: bool,
    /// Condition on the first events of the new stream.
    pub(super) seam: Option<Seam>,
    /// Tokens of the answer that are in the new prompt, if they are the lost engine's own tokens.
    pub(super) kept: Option<Kept>,
    pub(super) rewriter: Rewriter,
}

/// Returns the ways in which a stream can continue, the best first.
///
/// # Errors
/// The reason why it cannot.
pub(super) fn plans(lost: &Lost<'_>) -> Result<Vec<Plan>, String> {
    let Some(body) = Body::read(lost.body) else {
        return Err("its request is not a JSON object".into());
    };
    let asks_ids = body.is("return_token_ids");
    let mut sent = Sent::read(lost.kind, lost.sent, lost.seams, asks_ids)?;
    if let Some(prompt) = lost.prompt {
        sent.prompt = Some(prompt.iter().map(|&id| u64::from(id)).collect());
    }
    let choices = body.choices();
    let is_finished = choices.is_some_and(|all| sent.finished.len() as u64 >= all);
    if sent.is_over || is_finished {
        return Err("only its last events were missing".into());
    }
    // A client with ids but no text may get the same answer again, from the first token on.
    let is_bare = !sent.has_text && !sent.has_more && choices == Some(1);
    let has_ids_only = asks_ids && is_bare && sent.tokens.is_some();
    if !sent.delivered || has_ids_only {
        let body = lost.body.to_vec();
        let mut rewriter = Rewriter::new(lost.kind, &sent, 0);
        if sent.prompt.is_none() {
            rewriter.shows_prompt();
        }
        if asks_ids {
            rewriter.repeats_those(sent.ids_behind(0));
        }
        return Ok(vec![Plan {
            body,
            path: None,
            is_for_vllm: false,
            seam: None,
            kept: Some(Kept {
                tokens: 0,
                chars: 0,
            }),
            rewriter,
        }]);
    }
    let known = body.iter().filter(|(field, value)| hinders(field, value));
    let known = known.map(|(field, _)| field.as_str());
    let unread = body.unread().filter(|field| may_hinder(field));
    if let Some(field) = known.chain(unread).next() {
        return Err(format!("streams with `{field}` do not continue"));
    }
    if let Some(field) = &sent.refused {
        return Err(format!("streams with `{field}` do not continue"));
    }
    let has_tools = body.get("tools").is_some_and(|tools| !is_unset(tools))
        && body.get("tool_choice") != Some(&"none".into());
    let mut request = Request {
        lost,
        asks_ids,
        stop: Stop::of(&body),
        is_greedy: is_greedy(&body),
        body,
        sent,
        has_tools,
    };
    request.order()
}

struct Request<'a> {
    lost: &'a Lost<'a>,
    /// Whether the client requested token ids.
    asks_ids: bool,
    body: Body,
    sent: Sent,
    stop: Stop,
    is_greedy: bool,
    /// Whether the engine's parser of tool calls reads the answer.
    has_tools: bool,
}

/// The point of the answer at which the new request continues.
#[derive(Debug)]
struct Cut {
    kept: Kept,
    /// Text after that point that the client already has.
    repeated: String,
    /// Whether the last kept token may end within a character, which its text does not show.
    is_doubtful: bool,
}

impl Request<'_> {
    fn order(&mut self) -> Result<Vec<Plan>, String> {
        let mut plans = Vec::new();
        let mut why = None;
        let is_split = self.has_tools || self.sent.reasons;
        if self.lost.by_tokens && self.sent.tokens.is_some() && self.prompt().is_some() {
            for cut in self.cuts() {
                let by_params = self.lost.kind == StreamKind::Chat
                    && self.lost.by_params
                    && cut.repeated.is_empty();
                let plain = self.by_completion(&cut);
                let made = if is_split {
                    // Text that a parser of the engine would remove must not reach the client.
                    let guarded = plain.filter(|_| !self.sent.reasons).map(|mut plan| {
                        plan.rewriter.guard();
                        plan
                    });
                    [by_params.then(|| self.by_chat(&cut)).flatten(), guarded]
                } else {
                    [plain, by_params.then(|| self.by_chat(&cut)).flatten()]
                };
                plans.extend(made.into_iter().flatten());
            }
        }
        if is_split && plans.is_empty() {
            let field = if self.has_tools { "tools" } else { "reasoning" };
            return Err(format!(
                "streams with `{field}` continue by tokens only (`upstream.resume = \"tokens\"`, vLLM)"
            ));
        }
        if !is_split {
            match self.by_text() {
                Ok(plan) => plans.push(plan),
                Err(error) => why = Some(error),
            }
        }
        match why {
            Some(why) if plans.is_empty() => Err(why),
            _ => Ok(plans),
        }
    }

    /// Ids of the prompt, which has text only.
    fn prompt(&self) -> Option<Vec<u64>> {
        match self.lost.kind {
            StreamKind::Completion => {
                let prompt = match self.body.get("prompt")? {
                    Value::Array(items) if items.len() == 1 && !items[0].is_number() => &items[0],
                    other => other,
                };
                let several = prompt
                    .as_array()
                    .filter(|of| !of.iter().all(Value::is_number));
                let known = || prompt.as_array()?.iter().map(Value::as_u64).collect();
                match several {
                    Some(_) => None,
                    None => self.sent.prompt.clone().or_else(known),
                }
            }
            StreamKind::Chat => {
                let messages = self.body.get("messages")?;
                self.sent.prompt.clone().filter(|_| is_plain(messages))
            }
        }
    }

    fn cuts(&self) -> Vec<Cut> {
        let (held, total) = (self.stop.held(), self.sent.chars());
        // A stop string may begin in what the client has.
        let straddles = held == 0 && self.stop.begins_at_end_of(&self.sent.text);
        let margin = if straddles {
            self.stop.longest.saturating_sub(1)
        } else {
            0
        };
        // Characters of the text of the tokens up to `step`, if they are known. vLLM's text is behind its tokens by the
        // characters that it holds.
        let end_of = |step: &Step| {
            let shown = (step.has_text && step.is_single).then_some(step.chars + held);
            step.seam.or(shown).filter(|end| end + margin <= total)
        };
        let steps = self.sent.steps.iter();
        let known = steps
            .rev()
            .find_map(|step| Some((step.tokens, end_of(step)?)));
        let (tokens, chars) = known.unwrap_or_default();
        let mut cuts = Vec::new();
        let last = self
            .sent
            .steps
            .iter()
            .rfind(|step| step.has_text || step.seam.is_some());
        if let Some(last) = last.filter(|of| of.tokens > tokens && held + margin == 0) {
            cuts.push(Cut {
                kept: Kept {
                    tokens: last.tokens,
                    chars: total,
                },
                repeated: String::new(),
                is_doubtful: true,
            });
        }
        // The same tokens come again only if they follow from the prompt.
        if chars == total || self.is_greedy && !self.sent.reasons {
            cuts.push(Cut {
                kept: Kept { tokens, chars },
                repeated: self.sent.text.chars().skip(chars).collect(),
                is_doubtful: false,
            });
        }
        cuts
    }

    fn ids(&self, cut: &Cut) -> Option<Vec<u64>> {
        let mut ids = self.prompt()?;
        ids.extend_from_slice(&self.sent.tokens.as_ref()?[..cut.kept.tokens]);
        Some(ids)
    }

    fn plan(&self, body: &Body, cut: &Cut, mut rewriter: Rewriter) -> Plan {
        let seam = cut.is_doubtful.then(|| Seam::text(self.sent.phase));
        if self.asks_ids {
            rewriter.repeats_those(self.sent.ids_behind(cut.kept.tokens));
        }
        Plan {
            body: body.write(),
            path: None,
            is_for_vllm: true,
            seam,
            kept: Some(cut.kept),
            rewriter,
        }
    }

    fn by_completion(&self, cut: &Cut) -> Option<Plan> {
        let ids = self.ids(cut)?;
        let mut body = self.body.clone();
        for field in ["truncate_prompt_tokens", "truncation_side"] {
            body.remove(field); // applied to the ids already
        }
        let is_chat = self.lost.kind == StreamKind::Chat;
        if is_chat {
            let limit = match body.limit(StreamKind::Chat) {
                Some((_, limit)) => limit,
                // A completion without a limit has 16 tokens.
                None => {
                    (self.lost.model_len?).checked_sub(ids.len() as u64)? + cut.kept.tokens as u64
                }
            };
            for field in CHAT_ONLY {
                body.discard(field);
            }
            body.insert("max_tokens".into(), limit.into());
        }
        lower_limits(StreamKind::Completion, &mut body, cut.kept.tokens as u64).ok()?;
        body.insert("prompt".into(), ids.into());
        let mut rewriter = Rewriter::new(self.lost.kind, &self.sent, cut.kept.tokens);
        rewriter.repeats(&cut.repeated);
        if is_chat {
            rewriter.translate(Translation::ChatOfCompletion);
        }
        if self.has_tools {
            // A parser of tool calls would see these tokens.
            body.insert("skip_special_tokens".into(), false.into());
        }
        let mut plan = self.plan(&body, cut, rewriter);
        plan.path = is_chat.then_some("/v1/completions");
        Some(plan)
    }

    fn by_chat(&self, cut: &Cut) -> Option<Plan> {
        let ids = self.ids(cut)?;
        let mut body = self.body.clone();
        for field in ["truncate_prompt_tokens", "truncation_side"] {
            body.remove(field);
        }
        lower_limits(StreamKind::Chat, &mut body, cut.kept.tokens as u64).ok()?;
        body.insert(
            "kv_transfer_params".into(),
            json!({"prompt_token_ids": ids}),
        );
        let rewriter = Rewriter::new(self.lost.kind, &self.sent, cut.kept.tokens);
        let mut plan = self.plan(&body, cut, rewriter);
        plan.seam = Some(Seam::text(self.sent.phase).with_prompt(ids));
        Some(plan)
    }

    /// # Errors
    /// Why the text does not do.
    fn by_text(&self) -> Result<Plan, String> {
        let (kind, sent) = (self.lost.kind, &self.sent);
        if self
            .body
            .get("truncate_prompt_tokens")
            .is_some_and(|of| !is_unset(of))
        {
            return Err("streams with `truncate_prompt_tokens` do not continue by text".into());
        }
        let known = sent.tokens.as_ref().filter(|_| self.stop.held() == 0);
        let tokens_before = match (known, sent.counted) {
            (Some(_), _) => sent.steps.last().map_or(0, |step| step.tokens as u64),
            (None, Some(counted)) => counted,
            // Engines send an event per step, which has one token without speculative decoding.
            (None, None) => sent.steps.iter().filter(|step| step.has_text).count() as u64,
        };
        let mut body = self.body.clone();
        lower_limits(kind, &mut body, tokens_before)?;
        match kind {
            StreamKind::Completion => continue_completion(&mut body, sent)?,
            StreamKind::Chat => continue_chat(&mut body, sent)?,
        }
        Ok(Plan {
            body: body.write(),
            path: None,
            is_for_vllm: false,
            seam: None,
            kept: None,
            rewriter: Rewriter::new(
                kind,
                sent,
                usize::try_from(tokens_before).unwrap_or(usize::MAX),
            ),
        })
    }
}

/// Strings that end an answer.
#[derive(Debug)]
struct Stop {
    strings: Vec<String>,
    /// Length of the longest one, in characters.
    longest: usize,
    /// Whether the string that ends the answer is part of it.
    is_included: bool,
}

impl Stop {
    fn of(body: &Body) -> Stop {
        let strings: Vec<String> = match body.get("stop") {
            Some(Value::String(stop)) => vec![stop.clone()],
            Some(Value::Array(stops)) => {
                let each = stops.iter().filter_map(Value::as_str);
                each.map(str::to_owned).collect()
            }
            _ => Vec::new(),
        };
        Stop {
            longest: strings
                .iter()
                .map(|of| of.chars().count())
                .max()
                .unwrap_or(0),
            strings,
            is_included: body.is("include_stop_str_in_output"),
        }
    }

    /// Number of characters that vLLM holds back, because a stop string could begin with them.
    fn held(&self) -> usize {
        if self.is_included {
            0
        } else {
            self.longest.saturating_sub(1)
        }
    }

    /// Whether `text` ends with the beginning of a stop string.
    fn begins_at_end_of(&self, text: &str) -> bool {
        self.strings.iter().any(|stop| {
            let parts = stop.char_indices().skip(1).map(|(at, _)| &stop[..at]);
            parts.into_iter().any(|part| text.ends_with(part))
        })
    }
}

/// Whether the prompt determines the answer's tokens.
fn is_greedy(body: &Body) -> bool {
    let number = |field| body.get(field).and_then(Value::as_f64);
    number("temperature").is_some_and(|of| of < 1e-5) || number("top_k") == Some(1.0)
}

/// Fields of chats that completions do not have.
const CHAT_ONLY: &[&str] = &[
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "logprobs",
    "top_logprobs",
    "echo",
    "max_completion_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "include_reasoning",
    "response_format",
    "media_io_kwargs",
    "mm_processor_kwargs",
];

fn lower_limits(kind: StreamKind, body: &mut Body, tokens_before: u64) -> Result<(), String> {
    // OpenAI's default for completions.
    if kind == StreamKind::Completion && body.get("max_tokens").is_none() {
        body.insert("max_tokens".into(), 16.into());
    }
    if let Some((field, max)) = body.limit(kind) {
        let left = max.saturating_sub(tokens_before);
        if left == 0 {
            return Err("it may have had all its tokens, but not its last event".into());
        }
        // The other one counts for nothing.
        for field in ["max_tokens", "max_completion_tokens"] {
            body.discard(field);
        }
        body.insert(field.into(), left.into());
    }
    if let Some(min) = body.get("min_tokens").and_then(Value::as_u64) {
        let left = min.saturating_sub(tokens_before);
        body.insert("min_tokens".into(), left.into());
    }
    Ok(())
}

fn continue_completion(body: &mut Body, sent: &Sent) -> Result<(), String> {
    let prompt = body.get("prompt").cloned().unwrap_or_default();
    let prompt = match prompt {
        Value::Array(mut items) if items.len() == 1 && !items[0].is_number() => items.remove(0),
        other => other,
    };
    let continued = match &prompt {
        Value::String(text) => Value::String(format!("{text}{}", sent.text)),
        Value::Array(items) if items.iter().all(Value::is_number) => {
            return Err(
                "a prompt of tokens continues by tokens only (`upstream.resume = \"tokens\"`, vLLM), and sampled \
                 answers only if the text of their last tokens has come"
                    .into(),
            );
        }
        _ => return Err("streams of several prompts do not continue".into()),
    };
    body.insert("prompt".into(), continued);
    Ok(())
}

fn continue_chat(body: &mut Body, sent: &Sent) -> Result<(), String> {
    let continues = body.is("continue_final_message");
    let Some(Value::Array(messages)) = body.get_mut("messages") else {
        return Err("its request has no `messages`".into());
    };
    let last = messages.last_mut().filter(|_| continues);
    match last.and_then(|message| message.get_mut("content")) {
        Some(Value::String(content)) => content.push_str(&sent.text),
        None if !continues => messages.push(serde_json::json!({
            "role": "assistant",
            "content": sent.text,
        })),
        _ => return Err("its last message is not plain text".into()),
    }
    body.insert("continue_final_message".into(), true.into());
    body.insert("add_generation_prompt".into(), false.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::sent::data_of;
    use super::*;

    fn all(kind: StreamKind, body: &[u8], sent: &[u8]) -> Result<Vec<Plan>, String> {
        plans(&Lost {
            kind,
            body,
            sent,
            seams: &[],
            prompt: None,
            by_tokens: true,
            by_params: true,
            model_len: None,
        })
    }

    fn plan(kind: StreamKind, body: &[u8], sent: &[u8]) -> Result<Plan, String> {
        Ok(all(kind, body, sent)?.remove(0))
    }

    fn body_of(plan: &Plan) -> Value {
        serde_json::from_slice(&plan.body).unwrap()
    }

    #[test]
    fn a_completion_continues_from_its_text() {
        let body = br#"{"prompt":"ab","max_tokens":5,"min_tokens":4,"stream":true,"odd":{"x":1}}"#;
        let sent = b"data: {\"id\":\"c1\",\"created\":7,\"choices\":[{\"text\":\" c\"}]}\n\n\
                     data: {\"id\":\"c1\",\"created\":7,\"choices\":[{\"text\":\"d\"}]}\n\n";
        let mut plan = plan(StreamKind::Completion, body, sent).unwrap();
        assert_eq!(
            body_of(&plan),
            serde_json::json!({"prompt":"ab cd","max_tokens":3,"min_tokens":2,"stream":true,"odd":{"x":1}})
        );
        let out = plan.rewriter.rewrite_all(
            b"data: {\"id\":\"c2\",\"created\":9,\"choices\":[{\"text\":\"e\"}],\
              \"usage\":{\"prompt_tokens\":4,\"completion_tokens\":1,\"total_tokens\":5}}\n\ndata: [DONE]\n\n",
            false,
        );
        let out = String::from_utf8(out.kept).unwrap();
        let (event, done) = out.split_once("\n\n").unwrap();
        let event: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!((&event["id"], &event["created"]), (&"c1".into(), &7.into()));
        let usage = &event["usage"];
        assert_eq!(usage["prompt_tokens"], 2);
        assert_eq!(usage["completion_tokens"], 3);
        assert_eq!(usage["total_tokens"], 5);
        assert_eq!(done, "data: [DONE]\n\n");
    }

    #[test]
    fn tokens_are_exact_where_the_engine_names_them() {
        let sent = b"data: {\"id\":\"c\",\"choices\":[{\"text\":\"x\",\"prompt_token_ids\":[1,2],\"token_ids\":[8,9]}]}\n\n";
        let text = plan(StreamKind::Completion, br#"{"prompt":"ab"}"#, sent).unwrap();
        let body = body_of(&text);
        assert_eq!(body["prompt"], serde_json::json!([1, 2, 8, 9]));
        assert_eq!(body["max_tokens"], 14, "two of the default's 16 are there");
        // The engine's own word of its prompt comes first.
        for (ids, wanted) in [("[1,2]", json!([1, 2, 8, 9])), ("null", json!([5, 8, 9]))] {
            let sent = format!(
                "data: {{\"choices\":[{{\"text\":\"x\",\"prompt_token_ids\":{ids},\"token_ids\":[8,9]}}]}}\n\n"
            );
            let body = br#"{"prompt":[[5]],"max_tokens":9}"#;
            let plan = plan(StreamKind::Completion, body, sent.as_bytes());
            assert_eq!(body_of(&plan.unwrap())["prompt"], wanted);
        }
        let bare = b"data: {\"choices\":[{\"text\":\"x\"}]}\n\n";
        assert!(plan(StreamKind::Completion, br#"{"prompt":[5]}"#, bare).is_err());
    }

    #[test]
    fn tokens_whose_text_the_client_does_not_have_are_made_again() {
        let event = |text: &str, ids: &str| {
            format!(
                "data: {{\"choices\":[{{\"text\":\"{text}\",\"prompt_token_ids\":[1,2],\"token_ids\":{ids}}}]}}\n\n"
            )
        };
        // With `stop`, vLLM sends text later than its tokens: "ab" of "abcd" here.
        let sent = [event("", "[8]"), event("a", "[9]"), event("b", "[7]")].concat();
        for (fields, prompt) in [
            (r#""stop":"\n""#, json!([1, 2, 8, 9, 7])),
            (r#""stop":["\n","END"]"#, json!("ab")),
            // The client has all of the text of no tokens; greedy decoding makes them again.
            (r#""stop":["END"],"temperature":0"#, json!([1, 2])),
            (
                r#""stop":"END","include_stop_str_in_output":true"#,
                json!([1, 2, 8, 9, 7]),
            ),
            // A stop string may have begun.
            (
                r#""stop":"bye","include_stop_str_in_output":true,"top_k":1"#,
                json!([1, 2]),
            ),
        ] {
            let body = format!("{{\"prompt\":\"\",{fields}}}");
            let plan = plan(StreamKind::Completion, body.as_bytes(), sent.as_bytes()).unwrap();
            assert_eq!(body_of(&plan)["prompt"], prompt, "{fields}");
        }
        // A character whose last token did not come.
        let sent = [event("x", "[8]"), event("", "[7]")].concat();
        let plan = plan(
            StreamKind::Completion,
            br#"{"prompt":"ab"}"#,
            sent.as_bytes(),
        );
        assert_eq!(body_of(&plan.unwrap())["prompt"], json!([1, 2, 8]));
    }

    #[test]
    fn a_chat_continues_its_last_message_and_repeats_no_role() {
        let body = br#"{"messages":[{"role":"user","content":"q"}],"max_tokens":9}"#;
        let sent = b"data: {\"id\":\"c\",\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n\
                     data: {\"id\":\"c\",\"choices\":[{\"delta\":{\"content\":\"Hi\"}}]}\r\n\r\n";
        let mut first = plan(StreamKind::Chat, body, sent).unwrap();
        let continued = body_of(&first);
        assert_eq!(
            continued["messages"][1],
            serde_json::json!({"role":"assistant","content":"Hi"})
        );
        assert_eq!(continued["continue_final_message"], true);
        assert_eq!(continued["add_generation_prompt"], false);
        assert_eq!(continued["max_tokens"], 8);
        let out = first.rewriter.rewrite_all(
            b"data: {\"id\":\"d\",\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n\
              data: {\"id\":\"d\",\"choices\":[{\"delta\":{\"content\":\" you\"}}]}\n\n",
            false,
        );
        let out = String::from_utf8(out.kept).unwrap();
        assert!(
            !out.contains("role") && out.contains(" you") && out.contains("\"c\""),
            "{out}"
        );
        // A second loss: the rewritten part is at the client, too.
        let twice = [&sent[..], out.as_bytes()].concat();
        let again = plan(StreamKind::Chat, body, &twice).unwrap();
        assert_eq!(body_of(&again)["messages"][1]["content"], "Hi you");
        assert_eq!(body_of(&again)["max_tokens"], 7);
    }

    #[test]
    fn counts_that_no_answer_has_stay_in_range() {
        let body = br#"{"messages":[{"role":"user","content":"q"}]}"#;
        for counted in [i64::MAX.cast_unsigned(), 1 << 63, u64::MAX] {
            let sent = format!(
                "data: {{\"choices\":[{{\"delta\":{{\"content\":\"Hi\"}}}}],\
                 \"usage\":{{\"completion_tokens\":{counted}}}}}\n\n"
            );
            let mut plan = plan(StreamKind::Chat, body, sent.as_bytes()).unwrap();
            let out = plan.rewriter.rewrite_all(
                b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\n",
                false,
            );
            let event: Value = serde_json::from_slice(&data_of(&out.kept).next().unwrap()).unwrap();
            assert_eq!(event["usage"]["prompt_tokens"], 0);
            assert_eq!(event["usage"]["completion_tokens"], i64::MAX);
        }
    }

    #[test]
    fn what_depends_on_more_than_text_does_not_continue() {
        let event = b"data: {\"choices\":[{\"text\":\"x\",\"delta\":{\"content\":\"x\"}}]}\n\n";
        for body in [
            r#"{"prompt":"a","n":2}"#,
            r#"{"prompt":"a","logprobs":1}"#,
            r#"{"prompt":"a","echo":true}"#,
            r#"{"prompt":["a","b"]}"#,
            r#"{"prompt":"a","response_format":{"type":"json_object"}}"#,
            r#"{"prompt":"a","frequency_penalty":0.5}"#,
            r#"{"prompt":"a","max_tokens":1}"#,
            r#"{"prompt":"a","max_tokens":"1.0"}"#,
            r#"{"prompt":"a","n":"2"}"#,
            r#"{"prompt":"a","echo":1}"#,
            r#"{"prompt":"a","logprobs":0}"#,
            r#"{"prompt":"a","bad_words":["x"]}"#,
            r#"{"prompt":"a","vllm_xargs":{"x":1}}"#,
            "[]",
        ] {
            assert!(
                plan(StreamKind::Completion, body.as_bytes(), event).is_err(),
                "{body}"
            );
        }
        let odd = r#"{"prompt":"a","n":1.0,"best_of":"1","echo":"off","frequency_penalty":"0"}"#;
        assert!(plan(StreamKind::Completion, odd.as_bytes(), event).is_ok());
        let unset = r#"{"prompt":"a","n":1,"logprobs":null,"echo":false,"best_of":1,"tools":[],"frequency_penalty":0.0}"#;
        assert!(plan(StreamKind::Completion, unset.as_bytes(), event).is_ok());
        for events in [
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#,
            r#"{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}"#,
            r#"{"error":{"message":"no"}}"#,
            "garbage",
        ] {
            let events = format!("data: {events}\n\n");
            let chat = br#"{"messages":[{"role":"user","content":"q"}]}"#;
            assert!(
                plan(StreamKind::Chat, chat, events.as_bytes()).is_err(),
                "{events}"
            );
        }
    }
}
