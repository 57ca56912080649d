//! Fields of a request that keep its stream at one engine. No I/O.

use serde_json::Value;
use serde_json::value::RawValue;

use super::lax::{self, is_unset};

/// Fields with which the rest of an answer depends on more than the tokens so far, or events have more than text.
const STATEFUL: &[&str] = &[
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "suffix",
    "use_beam_search",
    "functions",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
    "vllm_xargs",
    "prompt_embeds",
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

/// Whether a stream cannot continue if `field` of its request has `value`, as vLLM reads it.
pub(super) fn hinders(field: &str, value: &Value) -> bool {
    match field {
        "n" | "best_of" => !value.is_null() && value.as_u64() != Some(1),
        "response_format" => {
            !value.is_null() && value.get("type").and_then(Value::as_str) != Some("text")
        }
        "tool_choice" => !value.is_null() && !matches!(value.as_str(), Some("auto" | "none")),
        // Zero is a number of alternatives.
        "logprobs" | "prompt_logprobs" if value.is_number() => true,
        _ => STATEFUL.contains(&field) && !is_unset(value),
    }
}

/// [`hinders`] of a value written as `json`.
pub(super) fn hinders_json(field: &str, json: &str) -> bool {
    // A long value asks for something.
    json.len() > 64 && STATEFUL.contains(&field)
        || lax::value(field, json).is_none_or(|value| hinders(field, &value))
}

/// Whether [`hinders`] depends on the value of `field`.
pub(super) fn may_hinder(field: &str) -> bool {
    matches!(field, "n" | "best_of" | "response_format" | "tool_choice")
        || STATEFUL.contains(&field)
}

/// Whether `messages`, of a chat, have text only.
pub(super) fn is_plain(messages: &Value) -> bool {
    const TEXTS: [&str; 5] = ["text", "input_text", "output_text", "refusal", "thinking"];
    let is_text = |part: &Value| {
        let kind = part.get("type").and_then(Value::as_str);
        part.is_string() || kind.is_some_and(|kind| TEXTS.contains(&kind))
    };
    let plain = |message: &Value| match message.get("content") {
        Some(Value::Array(parts)) => parts.iter().all(is_text),
        Some(Value::Object(_)) => false,
        _ => true,
    };
    messages.as_array().is_some_and(|of| of.iter().all(plain))
}

/// [`is_plain`] of JSON, whose parts are read only if there may be any.
pub(super) fn is_plain_json(messages: &RawValue) -> bool {
    let text = messages.get();
    let has = |word: &str| memchr::memmem::find(text.as_bytes(), word.as_bytes()).is_some();
    !has("\"type\"") && !has("_url\"")
        || serde_json::from_str(text).is_ok_and(|messages| is_plain(&messages))
}
