//! How a stream continues on another engine, after its own was lost. No I/O.
//!
//! The bytes that the client has are parsed only now: an undisturbed stream costs nothing. The new request
//! asks for what follows the text (or tokens) so far; its events get the id of the first ones.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::sse;

/// A request whose stream may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamKind {
    Completion,
    Chat,
}

/// How a stream continues.
#[derive(Debug)]
pub(super) struct Plan {
    /// Body of the new request.
    pub(super) body: Vec<u8>,
    pub(super) rewriter: Rewriter,
}

/// Makes the events of the new request those of the stream.
#[derive(Debug)]
pub(super) struct Rewriter {
    kind: StreamKind,
    /// `id` and `created` of the events that the client has.
    id: Option<Value>,
    created: Option<Value>,
    /// Tokens of the answer that are in the new request's prompt.
    tokens_before: u64,
    /// The first events repeat what the client has: the role.
    role_sent: bool,
}

/// The answer at the client.
#[derive(Debug, Default)]
struct Sent {
    id: Option<Value>,
    created: Option<Value>,
    text: String,
    /// Tokens of `text`; `None` if an event did not name them.
    tokens: Option<Vec<u64>>,
    /// Tokens up to the last event with text. The text of later ones is incomplete: a character over several
    /// tokens.
    tokens_with_text: usize,
    prompt_tokens: Option<Vec<u64>>,
    /// Events with text.
    steps: u64,
    /// `usage.completion_tokens` of the last event that had it.
    counted: Option<u64>,
    role: bool,
    finished: bool,
}

/// How the stream of a request with `body` continues after the events `sent`.
///
/// # Errors
/// Why it cannot.
pub(super) fn plan(kind: StreamKind, body: &[u8], sent: &[u8]) -> Result<Plan, String> {
    let Ok(Value::Object(mut body)) = serde_json::from_slice(body) else {
        return Err("its request is not a JSON object".into());
    };
    let mut sent = read_events(kind, sent)?;
    if sent.steps == 0 && !sent.finished {
        // The client has nothing of the answer, so any request may be sent again.
        return Ok(again(kind, &body, sent));
    }
    check_request(&body)?;
    if holds_text_back(&body) {
        // Its tokens are ahead of the text that the client has.
        sent.tokens = None;
    }
    if sent.finished {
        return Err("only its last events were missing".into());
    }
    let tokens_before = match (&sent.tokens, sent.counted) {
        (Some(tokens), _) => tokens.len() as u64,
        (None, Some(counted)) => counted,
        // Engines send an event per step, which has one token without speculative decoding.
        (None, None) => sent.steps,
    };
    lower_limits(kind, &mut body, tokens_before)?;
    match kind {
        StreamKind::Completion => continue_completion(&mut body, &sent)?,
        StreamKind::Chat => continue_chat(&mut body, &sent)?,
    }
    Ok(Plan {
        body: serde_json::to_vec(&body).map_err(|error| error.to_string())?,
        rewriter: Rewriter {
            kind,
            id: sent.id,
            created: sent.created,
            tokens_before,
            role_sent: sent.role,
        },
    })
}

/// The same request once more.
fn again(kind: StreamKind, body: &Map<String, Value>, sent: Sent) -> Plan {
    // Each choice begins with its role, of which the client has some at most.
    let is_one = body.get("n").is_none_or(|n| n.is_null() || *n == 1);
    Plan {
        body: Value::Object(body.clone()).to_string().into_bytes(),
        rewriter: Rewriter {
            kind,
            id: sent.id,
            created: sent.created,
            tokens_before: 0,
            role_sent: sent.role && is_one,
        },
    }
}

/// Whether the engine keeps back text that could begin a stop string.
fn holds_text_back(body: &Map<String, Value>) -> bool {
    let is_long = |stop: &Value| {
        stop.as_str()
            .is_some_and(|stop| stop.chars().nth(1).is_some())
    };
    let includes = body.get("include_stop_str_in_output") == Some(&Value::Bool(true));
    !includes
        && body.get("stop").is_some_and(|stop| match stop {
            Value::Array(stops) => stops.iter().any(is_long),
            stop => is_long(stop),
        })
}

/// Whether `value` asks for nothing.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Array(items) => items.is_empty(),
        Value::String(text) => text.is_empty() || text == "none",
        _ => false,
    }
}

/// Fields whose answers depend on more than the text so far.
const STATEFUL: &[&str] = &[
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "suffix",
    "use_beam_search",
    "tools",
    "functions",
    "presence_penalty",
    "frequency_penalty",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "kv_transfer_params",
];

fn check_request(body: &Map<String, Value>) -> Result<(), String> {
    for field in ["n", "best_of"] {
        if body.get(field).is_some_and(|n| !n.is_null() && *n != 1) {
            return Err(format!("streams with `{field}` above 1 do not continue"));
        }
    }
    for field in STATEFUL {
        let asks = body.get(*field).is_some_and(|value| !is_unset(value));
        if asks {
            return Err(format!("streams with `{field}` do not continue"));
        }
    }
    let format = body
        .get("response_format")
        .filter(|format| !format.is_null());
    if format.is_some_and(|format| format.get("type").and_then(Value::as_str) != Some("text")) {
        return Err("streams with `response_format` do not continue".into());
    }
    Ok(())
}

fn lower_limits(
    kind: StreamKind,
    body: &mut Map<String, Value>,
    tokens_before: u64,
) -> Result<(), String> {
    // OpenAI's default for completions.
    if kind == StreamKind::Completion && body.get("max_tokens").is_none() {
        body.insert("max_tokens".into(), 16.into());
    }
    for field in ["max_tokens", "max_completion_tokens"] {
        if let Some(max) = body.get(field).and_then(Value::as_u64) {
            let left = max.saturating_sub(tokens_before);
            if left == 0 {
                return Err("it had all its tokens, but not its last event".into());
            }
            body.insert(field.into(), left.into());
        }
    }
    if let Some(min) = body.get("min_tokens").and_then(Value::as_u64) {
        let left = min.saturating_sub(tokens_before);
        body.insert("min_tokens".into(), left.into());
    }
    Ok(())
}

fn continue_completion(body: &mut Map<String, Value>, sent: &Sent) -> Result<(), String> {
    let prompt = body.get("prompt").cloned().unwrap_or_default();
    let prompt = match prompt {
        Value::Array(mut items) if items.len() == 1 && !items[0].is_number() => items.remove(0),
        other => other,
    };
    let known = match &prompt {
        Value::Array(ids) => ids.iter().map(Value::as_u64).collect(),
        _ => sent.prompt_tokens.clone(),
    };
    let continued = match (known, &sent.tokens, &prompt) {
        (Some(before), Some(tokens), _) => [before, tokens.clone()].concat().into(),
        (None, _, Value::String(text)) | (_, None, Value::String(text)) => {
            Value::String(format!("{text}{}", sent.text))
        }
        (_, _, Value::Array(items)) if items.iter().all(Value::is_number) => {
            return Err(
                "a prompt of tokens continues only with `return_token_ids` (`upstream.resume = \
                 \"tokens\"`)"
                    .into(),
            );
        }
        _ => return Err("streams of several prompts do not continue".into()),
    };
    body.insert("prompt".into(), continued);
    Ok(())
}

fn continue_chat(body: &mut Map<String, Value>, sent: &Sent) -> Result<(), String> {
    if sent.text.is_empty() {
        return Ok(()); // asked again
    }
    let continues = body.get("continue_final_message") == Some(&Value::Bool(true));
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

/// Data of each event of `bytes` that has some.
fn data_of(bytes: &[u8]) -> impl Iterator<Item = Cow<'_, [u8]>> {
    let all = sse::events(bytes).map(|event| event.data);
    all.filter(|data| !data.is_empty())
}

fn read_events(kind: StreamKind, bytes: &[u8]) -> Result<Sent, String> {
    let mut sent = Sent {
        tokens: Some(Vec::new()),
        ..Sent::default()
    };
    for data in data_of(bytes) {
        if data.trim_ascii() == b"[DONE]" {
            sent.finished = true;
            continue;
        }
        let Ok(event) = serde_json::from_slice::<Value>(&data) else {
            return Err("an event of it is not JSON".into());
        };
        if event.get("error").is_some_and(|error| !error.is_null()) {
            return Err("the engine reported an error".into());
        }
        sent.read_event(kind, &event)?;
    }
    if let Some(tokens) = &mut sent.tokens {
        tokens.truncate(sent.tokens_with_text);
    }
    if sent.steps > 0 && sent.tokens.as_ref().is_some_and(Vec::is_empty) {
        sent.tokens = None;
    }
    Ok(sent)
}

impl Sent {
    fn read_event(&mut self, kind: StreamKind, event: &Value) -> Result<(), String> {
        if self.id.is_none() {
            self.id = event.get("id").cloned();
            self.created = event.get("created").cloned();
        }
        let counted = event.pointer("/usage/completion_tokens");
        self.counted = counted.and_then(Value::as_u64).or(self.counted);
        let ids = |value: Option<&Value>| -> Option<Vec<u64>> {
            value?.as_array()?.iter().map(Value::as_u64).collect()
        };
        let choices = event.get("choices").and_then(Value::as_array);
        for choice in choices.into_iter().flatten() {
            if choice
                .get("finish_reason")
                .is_some_and(|why| !why.is_null())
            {
                self.finished = true;
            }
            let prompt = ids(choice
                .get("prompt_token_ids")
                .or(event.get("prompt_token_ids")));
            self.prompt_tokens = prompt.or(self.prompt_tokens.take());
            let text = match kind {
                StreamKind::Completion => choice.get("text"),
                StreamKind::Chat => {
                    let delta = choice.get("delta").and_then(Value::as_object);
                    for (field, value) in delta.into_iter().flatten() {
                        let plain = matches!(field.as_str(), "role" | "content");
                        if !plain && !is_unset(value) {
                            return Err(format!("streams with `{field}` do not continue"));
                        }
                        self.role |= field == "role";
                    }
                    delta.and_then(|delta| delta.get("content"))
                }
            };
            let text = text.and_then(Value::as_str).unwrap_or_default();
            let tokens = ids(choice.get("token_ids"));
            if text.is_empty() && tokens.as_ref().is_none_or(Vec::is_empty) {
                continue;
            }
            self.text.push_str(text);
            self.steps += 1;
            match (&mut self.tokens, tokens) {
                (Some(all), Some(tokens)) => {
                    all.extend(tokens);
                    if !text.is_empty() {
                        self.tokens_with_text = all.len();
                    }
                }
                (all, _) => *all = None,
            }
        }
        Ok(())
    }
}

impl Rewriter {
    /// The whole events `bytes` as events of the stream.
    pub(super) fn rewrite(&mut self, bytes: &[u8]) -> Vec<u8> {
        if sse::events(bytes).next().is_none() {
            return bytes.to_vec(); // comments keep the client's connection open
        }
        let mut out = Vec::with_capacity(bytes.len());
        for data in data_of(bytes) {
            let mut put = |data: &[u8]| {
                for line in data.split(|&byte| byte == b'\n') {
                    out.extend_from_slice(b"data: ");
                    out.extend_from_slice(line);
                    out.push(b'\n');
                }
                out.push(b'\n');
            };
            if let Ok(Value::Object(mut event)) = serde_json::from_slice(&data) {
                if self.rewrite_event(&mut event) {
                    put(Value::Object(event).to_string().as_bytes());
                }
            } else {
                put(&data);
            }
        }
        out
    }

    /// False: the client has it already.
    fn rewrite_event(&mut self, event: &mut Map<String, Value>) -> bool {
        for (field, value) in [("id", &self.id), ("created", &self.created)] {
            if let (Some(value), true) = (value, event.contains_key(field)) {
                event.insert(field.into(), value.clone());
            }
        }
        if let Some(Value::Object(usage)) = event.get_mut("usage") {
            let add = |usage: &mut Map<String, Value>, field: &str, more: i64| {
                if let Some(count) = usage.get(field).and_then(Value::as_i64) {
                    usage.insert(field.into(), count.saturating_add(more).max(0).into());
                }
            };
            let before = i64::try_from(self.tokens_before).unwrap_or(i64::MAX);
            add(usage, "prompt_tokens", -before);
            add(usage, "completion_tokens", before);
        }
        event.remove("prompt_token_ids");
        let Some(Value::Array(choices)) = event.get_mut("choices") else {
            return true;
        };
        for choice in choices.iter_mut() {
            let Some(choice) = choice.as_object_mut() else {
                continue;
            };
            choice.remove("prompt_token_ids");
            let unfinished = choice.get("finish_reason").is_none_or(Value::is_null);
            if self.kind != StreamKind::Chat || !self.role_sent {
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
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let out = plan.rewriter.rewrite(
            b"data: {\"id\":\"c2\",\"created\":9,\"choices\":[{\"text\":\"e\"}],\
              \"usage\":{\"prompt_tokens\":4,\"completion_tokens\":1,\"total_tokens\":5}}\n\ndata: [DONE]\n\n",
        );
        let out = String::from_utf8(out).unwrap();
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
        let tokens = plan(
            StreamKind::Completion,
            br#"{"prompt":[[5]],"max_tokens":9}"#,
            sent,
        );
        assert_eq!(
            body_of(&tokens.unwrap())["prompt"],
            serde_json::json!([5, 8, 9])
        );
        let bare = b"data: {\"choices\":[{\"text\":\"x\"}]}\n\n";
        assert!(plan(StreamKind::Completion, br#"{"prompt":[5]}"#, bare).is_err());
    }

    #[test]
    fn tokens_whose_text_the_client_does_not_have_are_made_again() {
        // With `stop`, vLLM sends text later than its tokens.
        let sent = b"data: {\"choices\":[{\"text\":\"x\",\"prompt_token_ids\":[1,2],\"token_ids\":[8,9]}]}\n\n";
        for (stop, exact) in [
            (r#","stop":"\n""#, true),
            (r#","stop":["\n","END"]"#, false),
            (r#","stop":"END","include_stop_str_in_output":true"#, true),
        ] {
            let body = format!("{{\"prompt\":\"ab\"{stop}}}");
            let plan = plan(StreamKind::Completion, body.as_bytes(), sent).unwrap();
            let wanted = if exact {
                serde_json::json!([1, 2, 8, 9])
            } else {
                "abx".into()
            };
            assert_eq!(body_of(&plan)["prompt"], wanted, "{stop}");
        }
        // A character whose last token did not come.
        let sent = [
            &sent[..],
            b"data: {\"choices\":[{\"text\":\"\",\"token_ids\":[7]}]}\n\n",
        ]
        .concat();
        let plan = plan(StreamKind::Completion, br#"{"prompt":"ab"}"#, &sent).unwrap();
        assert_eq!(body_of(&plan)["prompt"], serde_json::json!([1, 2, 8, 9]));
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
        let out = first.rewriter.rewrite(
            b"data: {\"id\":\"d\",\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n\
              data: {\"id\":\"d\",\"choices\":[{\"delta\":{\"content\":\" you\"}}]}\n\n",
        );
        let out = String::from_utf8(out).unwrap();
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
            let out = plan.rewriter.rewrite(
                b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\n",
            );
            let event: Value = serde_json::from_slice(&data_of(&out).next().unwrap()).unwrap();
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
            "[]",
        ] {
            assert!(
                plan(StreamKind::Completion, body.as_bytes(), event).is_err(),
                "{body}"
            );
        }
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
