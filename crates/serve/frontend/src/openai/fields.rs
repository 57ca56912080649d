//! Which fields of a request are used, which are refused, and when.

use super::CompletionApi;
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
pub(super) fn rule(kind: CompletionApi, name: &str) -> Option<Rule> {
    let here = match kind {
        CompletionApi::Chat => Where::Chat,
        CompletionApi::Completion => Where::Completion,
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
    used(Where::Chat, "continue_final_message"),
    used(Where::Chat, "chat_template_kwargs"),
    used(Where::Chat, "reasoning_effort"),
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
    used(Where::Both, "allowed_token_ids"),
    used(Where::Both, "prompt_logprobs"),
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
    refused(Where::Both, "logits_processors", is_empty, NO_SAMPLING),
    refused(
        Where::Both,
        "use_beam_search",
        is_false,
        "beam search is not modelled; use `n`",
    ),
    refused(
        Where::Both,
        "logprob_token_ids",
        is_empty,
        "send `logprobs`, which has the likeliest tokens",
    ),
    refused(
        Where::Both,
        "return_token_offsets",
        is_false,
        "send `return_token_ids`, which has the tokens",
    ),
    refused(
        Where::Chat,
        "return_prompt_text",
        is_false,
        "send `return_token_ids`, which has the prompt's tokens",
    ),
    refused(
        Where::Both,
        "return_mm_kwargs",
        is_false,
        "images are counted only",
    ),
    refused(Where::Both, "mm_payload", never, "images are counted only"),
    refused(
        Where::Both,
        "stream_interval",
        |v| *v == Json::Unsigned(1),
        "each step of an engine has an event; leave it out",
    ),
    refused(
        Where::Both,
        "ec_transfer_params",
        is_empty,
        "transfers between encoders are not modelled",
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
    value.as_bool() == Some(false)
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

    fn error_of(kind: CompletionApi, name: &str, value: &Value) -> ApiError {
        let mut body = match kind {
            CompletionApi::Chat => json!({"messages": [{"role": "user", "content": "x"}]}),
            CompletionApi::Completion => json!({"prompt": "x"}),
        };
        body[name] = value.clone();
        let body = body.to_string();
        let parsed = match kind {
            CompletionApi::Chat => parse_chat(body.as_bytes()),
            CompletionApi::Completion => parse_completion(body.as_bytes()),
        };
        parsed.expect_err(&body)
    }

    fn kinds(at: Where) -> &'static [(CompletionApi, &'static str)] {
        const CHAT: (CompletionApi, &str) = (CompletionApi::Chat, "ChatRequest");
        const COMPLETION: (CompletionApi, &str) = (CompletionApi::Completion, "CompletionRequest");
        match at {
            Where::Chat => &[CHAT],
            Where::Completion => &[COMPLETION],
            Where::Both => &[CHAT, COMPLETION],
        }
    }

    #[test]
    fn parser_and_openapi_agree() {
        let api: Value = serde_json::from_slice(openapi_json()).unwrap();
        for field in FIELDS {
            let name = field.name;
            for &(kind, schema) in kinds(field.at) {
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
                    }
                }
            }
        }
    }

    /// How the docs say that a field is handled.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Handling {
        Honored,
        Modelled,
        Checked,
        Refused,
        Ignored,
    }

    /// A row of the table of fields.
    struct Row {
        name: &'static str,
        at: Where,
        handling: Handling,
    }

    /// The table of fields in the docs, a row per field.
    fn table() -> Vec<Row> {
        let docs = include_str!("../../../../../docs/openai-api.md");
        let section = docs
            .split("\n## Fields\n")
            .nth(1)
            .expect("it has a section `Fields`");
        let section = section.split("\n## ").next().unwrap();
        let mut rows = Vec::new();
        for line in section.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let [_, names, at, handling, ..] = cells[..] else {
                panic!("{line}");
            };
            let at = match at {
                "both" => Where::Both,
                "chat" => Where::Chat,
                "completions" => Where::Completion,
                other => panic!("{other}: {line}"),
            };
            let handling = match handling {
                "honored" => Handling::Honored,
                "modelled" => Handling::Modelled,
                "checked" => Handling::Checked,
                "refused" => Handling::Refused,
                "ignored" => Handling::Ignored,
                other => panic!("{other}: {line}"),
            };
            for name in names.split(", ") {
                let name = name.trim_matches('`');
                rows.push(Row { name, at, handling });
            }
        }
        rows
    }

    /// A value of `name` that is not the default, and the other fields that it needs.
    fn sample(kind: CompletionApi, name: &str) -> Value {
        let tool = json!([{"type": "function", "function": {"name": "f"}}]);
        let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}});
        let value = match name {
            "messages" => json!([{"role": "user", "content": "y"}]),
            "prompt" => json!([1, 2]),
            "stream"
            | "ignore_eos"
            | "include_stop_str_in_output"
            | "echo"
            | "return_token_ids" => {
                json!(true)
            }
            "add_special_tokens" => json!(kind == CompletionApi::Chat),
            "stream_options" => {
                return json!({"stream": true, name: {"include_usage": true}});
            }
            "top_logprobs" => return json!({"logprobs": true, name: 3}),
            "logprobs" if kind == CompletionApi::Chat => json!(true),
            "add_generation_prompt" => json!(false),
            "continue_final_message" => return json!({"add_generation_prompt": false, name: true}),
            "tool_choice" => return json!({"tools": tool, name: "required"}),
            "parallel_tool_calls" => return json!({"tools": tool, name: false}),
            "tools" => tool,
            "response_format" => schema,
            "structured_outputs" => json!({"choice": ["a"]}),
            "guided_json" => json!({"type": "null"}),
            "guided_choice" | "stop" => json!(["a"]),
            "guided_regex" => json!("a+"),
            "stop_token_ids" | "allowed_token_ids" => json!([5]),
            "logit_bias" => json!({"5": -100}),
            "chat_template_kwargs" => json!({"a": 1}),
            "reasoning_effort" => json!("low"),
            "model" | "user" | "request_id" | "cache_salt" => json!("m"),
            // Greedy.
            "temperature" => json!(0),
            "top_p" => json!(1e-6),
            "top_k" | "min_p" | "best_of" | "repetition_penalty" => json!(1),
            "frequency_penalty" | "presence_penalty" => json!(0.5),
            _ => json!(3),
        };
        json!({ name: value })
    }

    /// The body of the smallest request, with `fields`.
    fn body_with(kind: CompletionApi, fields: &Value) -> String {
        let mut body = match kind {
            CompletionApi::Chat => json!({"messages": [{"role": "user", "content": "x"}]}),
            CompletionApi::Completion => json!({"prompt": "x"}),
        };
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body.to_string()
    }

    /// Whether the requests with the bodies mean the same.
    fn same(kind: CompletionApi, one: &str, other: &str) -> bool {
        let parse = match kind {
            CompletionApi::Chat => parse_chat,
            CompletionApi::Completion => parse_completion,
        };
        let parsed = |body: &str| {
            parse(body.as_bytes())
                .map(|r| format!("{r:?}"))
                .expect(body)
        };
        parsed(one) == parsed(other)
    }

    /// Every field of the docs' table is sent, and does what the table says.
    #[test]
    fn fields_behave_as_the_docs_say() {
        let table = table();
        let nonsense = [
            json!(true),
            json!(7),
            json!("x"),
            json!({"a": [1]}),
            json!([1]),
        ];
        for Row { name, at, handling } in &table {
            let ignored_at = match at {
                Where::Both => &[],
                Where::Chat => kinds(Where::Completion),
                Where::Completion => kinds(Where::Chat),
            };
            for &(kind, _) in kinds(*at) {
                let fields = sample(kind, name);
                let mut without = fields.clone();
                without.as_object_mut().unwrap().remove(*name);
                let (with, without) = (body_with(kind, &fields), body_with(kind, &without));
                match handling {
                    Handling::Honored | Handling::Modelled => {
                        assert!(
                            !same(kind, &with, &without),
                            "{name} changes nothing: {with}"
                        );
                    }
                    Handling::Checked => {
                        assert!(
                            same(kind, &with, &without),
                            "{name} changes something: {with}"
                        );
                        let error = error_of(kind, name, &json!({"a": 1}));
                        assert_eq!(error.param.as_deref(), Some(*name));
                    }
                    Handling::Refused => {
                        let error = error_of(kind, name, &json!([{"x": 1}]));
                        assert_eq!(error.param.as_deref(), Some(*name));
                        assert_eq!(error.code, Some("unsupported_parameter"));
                    }
                    Handling::Ignored => {
                        for value in &nonsense {
                            let with = body_with(kind, &json!({ *name: value }));
                            assert!(same(kind, &with, &body_with(kind, &json!({}))), "{with}");
                        }
                    }
                }
            }
            for &(kind, _) in ignored_at {
                // Some have another meaning there.
                if table.iter().any(|row| row.name == *name && row.at != *at) {
                    continue;
                }
                let with = body_with(kind, &json!({ *name: {"a": [1]} }));
                assert!(same(kind, &with, &body_with(kind, &json!({}))), "{with}");
            }
        }
    }

    /// Fields of vLLM 0.32's requests.
    const VLLM_BOTH: &[&str] = &[
        "model",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "response_format",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "user",
        "use_beam_search",
        "top_k",
        "min_p",
        "repetition_penalty",
        "watermarking",
        "length_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "prompt_logprobs",
        "logprob_token_ids",
        "allowed_token_ids",
        "bad_words",
        "echo",
        "add_special_tokens",
        "structured_outputs",
        "priority",
        "request_id",
        "session_id",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "routed_experts_prompt_start",
        "return_token_offsets",
        "mm_payload",
        "return_mm_kwargs",
        "cache_salt",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "repetition_detection",
        "thinking_token_budget",
        "stream_interval",
    ];
    const VLLM_CHAT: &[&str] = &[
        "messages",
        "top_logprobs",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "include_reasoning",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "return_prompt_text",
    ];
    const VLLM_COMPLETION: &[&str] = &["prompt", "suffix", "prompt_embeds"];

    #[test]
    fn the_docs_list_every_field() {
        let table = table();
        for row in &table {
            let copies = table.iter().filter(|other| other.name == row.name);
            assert_eq!(copies.count(), 1, "`{}` has two rows", row.name);
        }
        let listed = |name: &str, at: Where| {
            let mut rows = table.iter().filter(|row| row.name == name);
            rows.any(|row| row.at == at || row.at == Where::Both)
        };
        let vllm = [
            (VLLM_BOTH, Where::Both),
            (VLLM_CHAT, Where::Chat),
            (VLLM_COMPLETION, Where::Completion),
        ];
        for (names, at) in vllm {
            for name in names {
                assert!(listed(name, at), "the docs lack `{name}` of vLLM");
            }
        }
        for field in FIELDS {
            assert!(
                listed(field.name, field.at),
                "the docs lack `{}`",
                field.name
            );
        }
        for row in table.iter().filter(|row| row.handling != Handling::Ignored) {
            let known = |field: &Field| field.name == row.name && field.at == row.at;
            assert!(
                FIELDS.iter().any(known),
                "`{}` is not handled there",
                row.name
            );
        }
    }
}
