//! Which fields of a request are used, which are refused, and when.

use super::Kind;
use super::value::Json;

/// Treatment of a known field. Fields that are not in the table are ignored.
#[derive(Clone, Copy)]
pub(super) enum Rule {
    /// It is parsed and checked.
    Used,
    /// It asks for something not modelled, unless `harmless` says that its value asks for nothing.
    Refused {
        harmless: fn(&Json<'_>) -> bool,
        hint: &'static str,
    },
}

/// Which endpoints know a field.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Where {
    Chat,
    Completion,
    Both,
}

pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) at: Where,
    pub(super) rule: Rule,
}

/// The rule for `name` at `kind`; `None` if it is unknown.
pub(super) fn rule(kind: Kind, name: &str) -> Option<Rule> {
    let here = match kind {
        Kind::Chat => Where::Chat,
        Kind::Completion => Where::Completion,
    };
    FIELDS
        .iter()
        .find(|f| f.name == name && (f.at == Where::Both || f.at == here))
        .map(|f| f.rule)
}

const fn used(at: Where, name: &'static str) -> Field {
    Field {
        name,
        at,
        rule: Rule::Used,
    }
}

const fn refused(
    at: Where,
    name: &'static str,
    harmless: fn(&Json<'_>) -> bool,
    hint: &'static str,
) -> Field {
    Field {
        name,
        at,
        rule: Rule::Refused { harmless, hint },
    }
}

/// Every field that OpenAI's or vLLM's reference names and that we use or refuse. Those that are
/// left out on purpose, since they change nothing that is modelled, are in `docs/openai-api.md`.
pub(super) static FIELDS: &[Field] = &[
    used(Where::Both, "model"),
    used(Where::Chat, "messages"),
    used(Where::Completion, "prompt"),
    used(Where::Both, "stream"),
    used(Where::Both, "stream_options"),
    used(Where::Both, "n"),
    used(Where::Both, "max_tokens"),
    used(Where::Chat, "max_completion_tokens"),
    used(Where::Both, "min_tokens"),
    used(Where::Both, "ignore_eos"),
    used(Where::Both, "stop"),
    used(Where::Both, "stop_token_ids"),
    used(Where::Both, "include_stop_str_in_output"),
    used(Where::Both, "seed"),
    used(Where::Both, "logprobs"),
    used(Where::Chat, "top_logprobs"),
    used(Where::Both, "echo"),
    used(Where::Both, "add_special_tokens"),
    used(Where::Chat, "add_generation_prompt"),
    used(Where::Chat, "chat_template_kwargs"),
    used(Where::Both, "priority"),
    used(Where::Both, "user"),
    used(Where::Both, "request_id"),
    used(Where::Both, "cache_salt"),
    used(Where::Both, "return_token_ids"),
    used(Where::Both, "best_of"),
    used(Where::Both, "temperature"),
    used(Where::Both, "top_p"),
    used(Where::Both, "top_k"),
    used(Where::Both, "min_p"),
    used(Where::Both, "frequency_penalty"),
    used(Where::Both, "presence_penalty"),
    used(Where::Both, "repetition_penalty"),
    used(Where::Both, "logit_bias"),
    used(Where::Chat, "tools"),
    used(Where::Chat, "tool_choice"),
    used(Where::Chat, "parallel_tool_calls"),
    used(Where::Both, "response_format"),
    used(Where::Both, "structured_outputs"),
    used(Where::Both, "guided_json"),
    used(Where::Both, "guided_regex"),
    used(Where::Both, "guided_choice"),
    refused(Where::Chat, "functions", is_empty, NO_TOOLS),
    refused(
        Where::Chat,
        "function_call",
        |v| is_text(v, "none"),
        NO_TOOLS,
    ),
    refused(Where::Both, "guided_grammar", never, NO_GRAMMAR),
    refused(Where::Both, "guided_decoding_backend", never, NO_GRAMMAR),
    refused(Where::Both, "guided_whitespace_pattern", never, NO_GRAMMAR),
    refused(Where::Both, "structural_tag", never, NO_GRAMMAR),
    refused(
        Where::Chat,
        "modalities",
        is_text_only,
        "only text is modelled; send [\"text\"] or leave it out",
    ),
    refused(Where::Chat, "audio", never, "only text is modelled"),
    refused(
        Where::Chat,
        "mm_processor_kwargs",
        is_empty,
        "only text is modelled",
    ),
    refused(
        Where::Chat,
        "web_search_options",
        never,
        "nothing is searched; leave it out",
    ),
    refused(
        Where::Chat,
        "prediction",
        never,
        "predicted outputs are not modelled; leave it out",
    ),
    refused(
        Where::Chat,
        "documents",
        is_empty,
        "put the documents into the messages",
    ),
    refused(
        Where::Chat,
        "chat_template",
        never,
        "the model's own template is used; set `model.tokenizer` to change it",
    ),
    refused(
        Where::Chat,
        "continue_final_message",
        is_false,
        "send the start of the answer as a prompt to /v1/completions",
    ),
    refused(
        Where::Completion,
        "suffix",
        |v| is_text(v, ""),
        "filling in the middle is not modelled; leave it out",
    ),
    refused(
        Where::Completion,
        "prompt_embeds",
        never,
        "send `prompt` as text or token ids",
    ),
    refused(Where::Both, "bad_words", is_empty, NO_SAMPLING),
    refused(Where::Both, "allowed_token_ids", is_empty, NO_SAMPLING),
    refused(Where::Both, "logits_processors", is_empty, NO_SAMPLING),
    refused(
        Where::Both,
        "use_beam_search",
        is_false,
        "beam search is not modelled; use `n`",
    ),
    refused(
        Where::Both,
        "prompt_logprobs",
        never,
        "log probabilities are modelled for generated tokens alone",
    ),
    refused(
        Where::Both,
        "truncate_prompt_tokens",
        never,
        "shorten the prompt before it is sent",
    ),
    refused(
        Where::Both,
        "return_tokens_as_token_ids",
        is_false,
        "send `return_token_ids`, which adds them to the text",
    ),
    refused(
        Where::Both,
        "kv_transfer_params",
        is_empty,
        "KV transfers are set up by the cluster file, not by requests",
    ),
];

const NO_TOOLS: &str = "functions are sent as `tools`";
const NO_GRAMMAR: &str =
    "grammars are not modelled; send a JSON schema, choices or a regular expression";
const NO_SAMPLING: &str = "answers are drawn from a fixed vocabulary; leave it out";

fn never(_: &Json<'_>) -> bool {
    false
}

fn is_false(value: &Json<'_>) -> bool {
    *value == Json::Bool(false)
}

fn is_text(value: &Json<'_>, text: &str) -> bool {
    matches!(value, Json::Text(t) if t == text)
}

fn is_empty(value: &Json<'_>) -> bool {
    match value {
        Json::Array(elements) => elements.is_empty(),
        Json::Object(members) => members.is_empty(),
        _ => false,
    }
}

fn is_text_only(value: &Json<'_>) -> bool {
    matches!(value, Json::Array(kinds) if kinds.iter().all(|kind| is_text(kind, "text")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::openai::{ApiError, openapi_json, parse_chat, parse_completion};

    fn error_of(kind: Kind, name: &str, value: &Value) -> ApiError {
        let mut body = match kind {
            Kind::Chat => json!({"messages": [{"role": "user", "content": "x"}]}),
            Kind::Completion => json!({"prompt": "x"}),
        };
        body[name] = value.clone();
        let body = body.to_string();
        let parsed = match kind {
            Kind::Chat => parse_chat(body.as_bytes()),
            Kind::Completion => parse_completion(body.as_bytes()),
        };
        parsed.expect_err(&body)
    }

    fn kinds(field: &Field) -> &'static [(Kind, &'static str)] {
        const CHAT: (Kind, &str) = (Kind::Chat, "ChatRequest");
        const COMPLETION: (Kind, &str) = (Kind::Completion, "CompletionRequest");
        match field.at {
            Where::Chat => &[CHAT],
            Where::Completion => &[COMPLETION],
            Where::Both => &[CHAT, COMPLETION],
        }
    }

    #[test]
    fn parser_openapi_and_docs_agree() {
        let api: Value = serde_json::from_slice(openapi_json()).unwrap();
        let docs = include_str!("../../../../docs/openai-api.md");
        for field in FIELDS {
            let name = field.name;
            assert!(docs.contains(&format!("`{name}`")), "docs lack `{name}`");
            for &(kind, schema) in kinds(field) {
                let listed = &api["components"]["schemas"][schema]["properties"][name];
                match field.rule {
                    Rule::Used => {
                        assert!(listed.is_object(), "{schema} lacks `{name}`");
                        // No field takes both an object and a number: one is a wrong type.
                        let wrong = match name {
                            "logit_bias"
                            | "stream_options"
                            | "chat_template_kwargs"
                            | "response_format"
                            | "structured_outputs"
                            | "guided_json"
                            | "tool_choice" => json!(1),
                            _ => json!({"a": 1}),
                        };
                        let error = error_of(kind, name, &wrong);
                        assert_eq!(error.param.as_deref(), Some(name));
                    }
                    Rule::Refused { .. } => {
                        assert!(listed.is_null(), "{schema} lists `{name}`");
                        let error = error_of(kind, name, &json!([{"x": 1}]));
                        assert_eq!(error.param.as_deref(), Some(name));
                        assert_eq!(error.code, Some("unsupported_parameter"));
                    }
                }
            }
        }
    }
}
