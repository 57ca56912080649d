//! Makes the last events of a stream whose engine was lost after the complete answer had arrived. No I/O.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::api::{Api, StreamKind};
use super::ends::finish_of;
use super::lax::Body;
use super::sent::Kept;
use super::sse;

/// Returns the events that end the stream of a request with `body` after the events `sent`; `None` if part of the answer
/// is missing. `seams`: offsets in `sent` at which other engines continued, each with the tokens kept, if known. `prompt`:
/// tokens of the prompt, if the router knows them.
pub(super) fn closing(
    api: Api,
    body: &[u8],
    sent: &[u8],
    seams: &[(usize, Option<Kept>)],
    prompt: Option<u64>,
) -> Option<Vec<u8>> {
    let kind = match api {
        Api::Chat => StreamKind::Chat,
        Api::Completions => StreamKind::Completion,
        _ => return None,
    };
    let body = Body::read(body)?;
    let choices = body.choices()?;
    let mut seen = Sent::read(sent, seams)?;
    seen.prompt = prompt.or(seen.prompt);
    let is_finished = seen.finished.len() as u64 >= choices;
    // An engine that holds text back, as it may begin a stop string, still has some of it.
    let may_hold_text = body.get("stop").is_some_and(|stop| !stop.is_null());
    let has_all_tokens =
        choices == 1 && !may_hold_text && has_all_tokens(&body, kind, seen.tokens());
    if !is_finished && !has_all_tokens {
        return None;
    }
    let mut out = Vec::new();
    let mut put = |event: &Value| {
        out.extend_from_slice(b"data: ");
        out.extend_from_slice(event.to_string().as_bytes());
        out.extend_from_slice(b"\n\n");
    };
    if !is_finished {
        let choice = match api {
            Api::Chat => {
                json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "length"})
            }
            _ => json!({"index": 0, "text": "", "logprobs": null, "finish_reason": "length"}),
        };
        put(&seen.event(json!([choice]), None));
    }
    let wants_usage = body
        .get("stream_options")
        .and_then(|options| options.get("include_usage"));
    if wants_usage == Some(&Value::Bool(true))
        && !seen.has_last_usage
        && let Some(usage) = seen.usage(choices)
    {
        put(&seen.event(json!([]), Some(usage)));
    }
    out.extend_from_slice(b"data: [DONE]\n\n");
    Some(out)
}

/// Whether an answer of `tokens` has reached its limit. Echoed text is no part of the answer, but in its events.
fn has_all_tokens(body: &Body, kind: StreamKind, tokens: Option<u64>) -> bool {
    let limit = body.limit(kind).map(|(_, limit)| limit);
    let limit = limit.filter(|&limit| limit > 0 && !body.is("echo"));
    limit.is_some_and(|limit| tokens >= Some(limit))
}

/// The part of the answer that the client has.
#[derive(Debug, Default)]
struct Sent {
    /// The first event with an id, without its choices and usage.
    frame: Map<String, Value>,
    finished: BTreeSet<u64>,
    /// Number of token ids in the events; `None` if an event has none.
    named: Option<u64>,
    prompt: Option<u64>,
    /// `usage` of the last event that had one.
    counted: Option<Value>,
    /// Whether that event followed all choices.
    has_last_usage: bool,
}

impl Sent {
    /// Reads complete events. `None` if one is not an object, or the stream is over.
    fn read(bytes: &[u8], seams: &[(usize, Option<Kept>)]) -> Option<Sent> {
        let mut sent = Sent {
            named: Some(0),
            ..Sent::default()
        };
        let mut from = 0;
        for &(at, kept) in seams {
            sent.read_part(&bytes[from..at])?;
            sent.on_seam(kept);
            from = at;
        }
        sent.read_part(&bytes[from..])?;
        Some(sent)
    }

    /// Another engine continues. It generates tokens again whose text did not arrive.
    fn on_seam(&mut self, kept: Option<Kept>) {
        self.named = kept.map(|kept| kept.tokens as u64);
    }

    fn read_part(&mut self, bytes: &[u8]) -> Option<()> {
        let sent = self;
        for event in sse::events(bytes) {
            if event.data.is_empty() {
                continue;
            }
            let Ok(Value::Object(mut event)) = serde_json::from_slice(&event.text()) else {
                return None;
            };
            let choices = match event.remove("choices") {
                Some(Value::Array(choices)) => choices,
                _ => Vec::new(),
            };
            if let Some(usage) = event.remove("usage").filter(Value::is_object) {
                sent.has_last_usage = choices.is_empty();
                sent.counted = Some(usage);
            }
            let of_event = ids(event.remove("prompt_token_ids").as_ref());
            sent.prompt = sent.prompt.or(of_event);
            for choice in &choices {
                sent.read_choice(choice);
            }
            if sent.frame.is_empty() && event.contains_key("id") {
                sent.frame = event;
            }
        }
        Some(())
    }

    fn read_choice(&mut self, choice: &Value) {
        if finish_of(choice).is_some() {
            let index = choice.get("index").and_then(Value::as_u64);
            self.finished.insert(index.unwrap_or(0));
        }
        self.prompt = self.prompt.or(ids(choice.get("prompt_token_ids")));
        let tokens = ids(choice.get("token_ids"));
        let says = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        let delta = choice.get("delta").and_then(Value::as_object);
        let has_text = choice.get("text").is_some_and(says)
            || delta.into_iter().flatten().any(|(name, value)| {
                name != "role" && (says(value) || value.as_array().is_some_and(|of| !of.is_empty()))
            });
        if !has_text && tokens.is_none_or(|tokens| tokens == 0) {
            return;
        }
        self.named = self.named.zip(tokens).map(|(before, more)| before + more);
    }

    /// Tokens of the answer, if the engine said how many: by its events they cannot be counted, as some engines send
    /// several per event, or several events per token.
    fn tokens(&self) -> Option<u64> {
        let counted = self.counted.as_ref();
        let counted = counted.and_then(|usage| usage.get("completion_tokens")?.as_u64());
        self.named.max(counted)
    }

    /// The answer's usage, if an event counted it or all tokens were named.
    fn usage(&self, choices: u64) -> Option<Value> {
        if let Some(counted) = &self.counted {
            return Some(counted.clone()).filter(|_| choices == 1);
        }
        let (prompt, answer) = (self.prompt?, self.named?);
        Some(json!({
            "prompt_tokens": prompt,
            "total_tokens": prompt + answer,
            "completion_tokens": answer,
        }))
    }

    fn event(&self, choices: Value, usage: Option<Value>) -> Value {
        let mut event = self.frame.clone();
        event.insert("choices".into(), choices);
        if let Some(usage) = usage {
            event.insert("usage".into(), usage);
        }
        Value::Object(event)
    }
}

fn ids(value: Option<&Value>) -> Option<u64> {
    Some(value?.as_array()?.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(choices: &str, more: &str) -> String {
        format!(
            "data: {{\"id\":\"c\",\"object\":\"o\",\"created\":1,\"model\":\"m\",\"choices\":[{choices}]{more}}}\n\n"
        )
    }

    fn text(index: u64, text: &str, reason: &str) -> String {
        format!(r#"{{"index":{index},"text":"{text}","finish_reason":{reason}}}"#)
    }

    fn closed(body: &str, sent: &[String]) -> Option<Vec<Value>> {
        let out = closing(
            Api::Completions,
            body.as_bytes(),
            sent.concat().as_bytes(),
            &[],
            None,
        )?;
        let events: Vec<_> = sse::events(&out).map(|of| of.data.into_owned()).collect();
        let (done, events) = events.split_last().unwrap();
        assert_eq!(done, b"[DONE]");
        let parsed = events.iter().map(|of| serde_json::from_slice(of).unwrap());
        Some(parsed.collect())
    }

    #[test]
    fn a_finished_answer_gets_what_is_missing() {
        let last = event(&text(0, "b", "\"stop\""), "");
        let sent = [event(&text(0, "a", "null"), ""), last];
        assert_eq!(closed(r#"{"prompt":"x"}"#, &sent), Some(vec![]));
        assert_eq!(closed(r#"{"prompt":"x","n":2}"#, &sent), None);
        assert_eq!(closed(r#"{"prompt":["x","y"]}"#, &sent), None);
        assert_eq!(closed(r#"{"prompt":[[1],[2]],"n":1}"#, &sent), None);
        let other = [&sent[..], &[event(&text(1, "b", "\"stop\""), "")]].concat();
        assert_eq!(closed(r#"{"prompt":"x","n":2}"#, &other), Some(vec![]));
        // Usage is not invented.
        let asks = r#"{"prompt":"x","stream_options":{"include_usage":true}}"#;
        assert_eq!(closed(asks, &sent), Some(vec![]));
        let counted = r#","usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}"#;
        let with_usage = [event(&text(0, "b", "\"stop\""), counted)];
        let usage = &closed(asks, &with_usage).unwrap()[0];
        assert_eq!(usage["usage"]["completion_tokens"], 2);
        assert_eq!((&usage["id"], &usage["choices"]), (&json!("c"), &json!([])));
        assert_eq!(closed(r#"{"prompt":"x"}"#, &with_usage), Some(vec![]));
        let last = [&with_usage[..], &[event("", counted)]].concat();
        assert_eq!(closed(asks, &last), Some(vec![]), "the client has it");
        assert_eq!(closed(r#"{"prompt":"x","n":"2"}"#, &sent), None);
        let empty = [event(&text(0, "a", "\"\""), "")];
        assert_eq!(closed(r#"{"prompt":"x"}"#, &empty), None);
        let named = r#"{"index":0,"text":"b","finish_reason":"stop","prompt_token_ids":[1,2],"token_ids":[7,8,9]}"#;
        let usage = &closed(asks, &[event(named, "")]).unwrap()[0]["usage"];
        assert_eq!(
            usage,
            &json!({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5})
        );
        // The router has the prompt's ids, its client not.
        let asks = asks.replace("true", "\"yes\"");
        let sent = event(&named.replace("[1,2]", "null"), "");
        let out = closing(
            Api::Completions,
            asks.as_bytes(),
            sent.as_bytes(),
            &[],
            Some(4),
        )
        .unwrap();
        let usage: Value = serde_json::from_slice(&sse::events(&out).next().unwrap().data).unwrap();
        assert_eq!(usage["usage"]["total_tokens"], 7);
    }

    #[test]
    fn tokens_that_are_made_again_count_once() {
        let token = |text: &str, id: u64| {
            let ids =
                format!(r#"{{"index":0,"text":"{text}","token_ids":[{id}],"finish_reason":null}}"#);
            event(&ids, "")
        };
        // The second token begins a character, which the other engine makes again from its first token on.
        let before = [token("a", 1), token("", 2)].concat();
        let sent = [&before[..], &token("", 2), &token("\u{e9}", 3)].concat();
        let kept = |tokens| Some(Kept { tokens, chars: 1 });
        let end = |limit: u64, kept| {
            let body = format!(r#"{{"prompt":"x","max_tokens":{limit}}}"#);
            let seams = [(before.len(), kept)];
            let sent = sent.as_bytes();
            closing(Api::Completions, body.as_bytes(), sent, &seams, None).is_some()
        };
        assert!(end(3, kept(1)) && !end(4, kept(1)));
        assert!(end(4, kept(2)) && !end(5, kept(2)), "both were kept");
        assert!(!end(1, None), "by text they are not known");
    }

    #[test]
    fn an_answer_with_all_its_tokens_is_finished() {
        let token = |of: &str| {
            let with_ids = text(0, of, "null").replace('}', ",\"token_ids\":[7]}");
            event(&with_ids, "")
        };
        let sent = [token("a"), token("b")];
        for max in ["2", "2.0", "\"2\"", "true"] {
            let body = format!(r#"{{"prompt":"x","max_tokens":{max}}}"#);
            let end = closed(&body, &sent).unwrap();
            assert_eq!(end[0]["choices"][0]["finish_reason"], "length");
            assert_eq!(end[0]["id"], "c");
        }
        // Events are no tokens: an engine may send bytes.
        let bytes = ["a", "b", "c"].map(|of| event(&text(0, of, "null"), ""));
        assert_eq!(closed(r#"{"prompt":"x","max_tokens":2}"#, &bytes), None);
        let counted = event(&text(0, "b", "null"), r#","usage":{"completion_tokens":2}"#);
        let counted = [bytes[0].clone(), counted];
        assert!(closed(r#"{"prompt":"x","max_tokens":2}"#, &counted).is_some());
        for body in [
            r#"{"prompt":"x","max_tokens":2,"n":"2"}"#,
            r#"{"prompt":"x","max_tokens":2,"n":2.0}"#,
            r#"{"prompt":"x","max_tokens":2,"echo":"yes"}"#,
            r#"{"prompt":"x","max_completion_tokens":2}"#,
            r#"{"prompt":"x","max_tokens":3}"#,
            r#"{"prompt":"x"}"#,
            r#"{"prompt":"x","max_tokens":2,"n":2}"#,
            r#"{"prompt":"x","max_tokens":2,"echo":true}"#,
            r#"{"prompt":"x","max_tokens":2,"stop":["END"]}"#,
        ] {
            assert_eq!(closed(body, &sent), None, "{body}");
        }
    }
}
