//! Requests of Anthropic's Messages API, as vLLM serves it: they become chats.
//!
//! Source: Anthropic's API reference, "Messages"; vLLM, `vllm/entrypoints/anthropic/protocol.py`.

use slipstream_structured::Tree;

use super::ApiError;
use super::error::clip;
use super::members::{missing, object, read_members, whole, wrong_type};
use super::message_turns::{system_text, turns};
use super::value::{Json, lax_whole};

/// A request that became a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessagesRequest {
    /// Body of `POST /v1/chat/completions`, streamed with counts in every event.
    pub chat: Vec<u8>,
    /// The client asked for events.
    pub stream: bool,
}

/// Parses the body of `POST /v1/messages`, or of `POST /v1/messages/count_tokens` if `counts_only`.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault.
pub fn parse_messages(body: &[u8], counts_only: bool) -> Result<MessagesRequest, ApiError> {
    let mut chat: Vec<(String, Tree)> = Vec::new();
    let mut system = None;
    let mut messages = None;
    let mut stream = false;
    let mut max_tokens = false;
    let mut thinking = None;
    read_members(
        body,
        |_| true,
        |name, value| {
            if value == Json::Null {
                return Ok(());
            }
            let mut put = |name: &str, value: Tree| {
                chat.retain(|(known, _)| known != name);
                chat.push((name.into(), value));
            };
            match name {
                "model"
                | "temperature"
                | "top_p"
                | "top_k"
                | "cache_salt"
                | "seed"
                | "chat_template_kwargs" => put(name, value.into_tree()),
                "max_tokens" => {
                    max_tokens = true;
                    put(name, value.into_tree());
                }
                "stop_sequences" if !matches!(value, Json::Array(_)) => {
                    return Err(wrong_type(name, "an array of strings", &value));
                }
                "stop_sequences" => put("stop", value.into_tree()),
                "stream" => stream = super::members::boolean(name, &value)?,
                "system" => system = system_text(name, value)?,
                "metadata" | "thinking" if !matches!(value, Json::Object(_)) => {
                    return Err(wrong_type(name, "an object", &value));
                }
                "thinking" => thinking = Some(value),
                "messages" => messages = Some(turns(name, value)?),
                "tools" => put(name, tools(name, value)?),
                "tool_choice" => {
                    let (choice, parallel) = tool_choice(name, &value)?;
                    put(name, choice);
                    if let Some(parallel) = parallel {
                        put("parallel_tool_calls", Tree::Bool(parallel));
                    }
                }
                "output_config" => {
                    if let Some(schema) = output_schema(name, &value)? {
                        put("response_format", schema);
                    }
                    if let Some(effort) = word_of(name, &value, "effort", &EFFORTS)? {
                        put("reasoning_effort", Tree::Text(effort.into()));
                    }
                }
                "mcp_servers" | "container" => {
                    return Err(ApiError::unsupported(
                        name,
                        format!("`{name}` is not supported: nothing is run for a request"),
                    ));
                }
                _ => {}
            }
            Ok(())
        },
    )?;
    if !max_tokens && !counts_only {
        return Err(missing("max_tokens"));
    }
    if let Some(thinking) = thinking {
        let limit = chat.iter().find(|(name, _)| name == "max_tokens");
        let limit =
            limit.and_then(|(_, limit)| lax_whole(&serde_json::to_value(limit).ok()?)?.as_u64());
        if !thinks(&thinking, limit)? {
            chat.retain(|(name, _)| name != "reasoning_effort");
            chat.push(("reasoning_effort".into(), Tree::Text("none".into())));
        }
    }
    // Without tools `auto` and `none` say the same.
    let has_tools = |(name, of): &(String, Tree)| name == "tools" && *of != Tree::Array(Vec::new());
    if !chat.iter().any(has_tools) {
        let is_plain = |of: &Tree| matches!(of.as_text(), Some("auto" | "none"));
        chat.retain(|(name, of)| name != "tools" && (name != "tool_choice" || !is_plain(of)));
    }
    let mut messages: Vec<Tree> = messages.ok_or_else(|| missing("messages"))?;
    if let Some(system) = system {
        messages.insert(
            0,
            object([("role", Tree::Text("system".into())), ("content", system)]),
        );
    }
    if counts_only {
        chat.retain(|(name, _)| {
            matches!(
                name.as_str(),
                "model" | "tools" | "chat_template_kwargs" | "reasoning_effort"
            )
        });
    } else {
        chat.push(("stream".into(), Tree::Bool(true)));
        let counts = [
            ("include_usage", Tree::Bool(true)),
            ("continuous_usage_stats", Tree::Bool(true)),
        ];
        chat.push(("stream_options".into(), object(counts)));
    }
    chat.push(("messages".into(), Tree::Array(messages)));
    let chat = Tree::Object(chat).to_json();
    Ok(MessagesRequest { chat, stream })
}

/// Values of `output_config.effort`.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// The word under `name`, which is one of `words`; `None` if it is not set.
pub(super) fn word_of<'w>(
    path: &str,
    value: &Json<'_>,
    name: &str,
    words: &[&'w str],
) -> Result<Option<&'w str>, ApiError> {
    let path = format!("{path}.{name}");
    let found = match value.member(name) {
        None | Some(Json::Null) => return Ok(None),
        Some(Json::Text(text)) => words.iter().find(|word| **word == *text),
        Some(_) => None,
    };
    found.copied().map(Some).ok_or_else(|| {
        let words: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
        ApiError::invalid(
            &*path,
            format!("`{path}` must be one of {}", words.join(", ")),
        )
    })
}

/// The chat's `response_format` of an `output_config`.
fn output_schema(path: &str, value: &Json<'_>) -> Result<Option<Tree>, ApiError> {
    if !matches!(value, Json::Object(_)) {
        return Err(wrong_type(path, "an object", value));
    }
    let path = format!("{path}.format");
    let format = match value.member("format") {
        None | Some(Json::Null) => return Ok(None),
        Some(format @ Json::Object(_)) => format,
        Some(other) => return Err(wrong_type(&path, "an object", other)),
    };
    word_of(&path, format, "type", &["json_schema"])?;
    let schema = match format.member("schema") {
        Some(schema @ Json::Object(members)) if !members.is_empty() => schema.clone(),
        None | Some(Json::Null | Json::Object(_)) => return Ok(None),
        Some(other) => return Err(wrong_type(&format!("{path}.schema"), "an object", other)),
    };
    Ok(Some(object([
        ("type", Tree::Text("json_schema".into())),
        (
            "json_schema",
            object([
                ("name", Tree::Text("output".into())),
                ("schema", schema.into_tree()),
            ]),
        ),
    ])))
}

/// Checks a `thinking`; returns whether the model may think. `limit`: `max_tokens`.
fn thinks(thinking: &Json<'_>, limit: Option<u64>) -> Result<bool, ApiError> {
    const BUDGET_MIN: u32 = 1024;
    let kinds = ["enabled", "disabled", "adaptive"];
    let kind = word_of("thinking", thinking, "type", &kinds)?;
    let kind = kind.ok_or_else(|| missing("thinking.type"))?;
    if kind == "enabled" {
        let path = "thinking.budget_tokens";
        let budget = thinking
            .member("budget_tokens")
            .filter(|of| **of != Json::Null);
        let budget = budget.ok_or_else(|| missing(path))?;
        let budget = whole(path, budget, BUDGET_MIN, u32::MAX)?;
        if limit.is_some_and(|limit| u64::from(budget) >= limit) {
            return Err(ApiError::invalid(
                path,
                format!("`{path}` is {budget}; it must be below `max_tokens`"),
            ));
        }
    }
    if kind != "disabled" {
        word_of(
            "thinking",
            thinking,
            "display",
            &["summarized", "omitted", "updates"],
        )?;
    }
    Ok(kind != "disabled")
}

fn tools(path: &str, value: Json<'_>) -> Result<Tree, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of tools", &other))?;
    let mut tools = Vec::with_capacity(elements.len());
    for (at, element) in elements.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let strict = match element.member("strict") {
            None | Some(Json::Null) => None,
            Some(strict) => Some(super::members::boolean(&format!("{path}.strict"), strict)?),
        };
        let tool = element.into_tree();
        match tool.get("type").and_then(Tree::as_text) {
            None | Some("custom") => {}
            Some(other) => {
                return Err(ApiError::unsupported(
                    format!("{path}.type"),
                    format!(
                        "`{path}.type` is `{}`; only `custom` tools are modelled",
                        clip(other)
                    ),
                ));
            }
        }
        let mut function = Vec::new();
        for (from, to) in [
            ("name", "name"),
            ("description", "description"),
            ("input_schema", "parameters"),
        ] {
            match tool.get(from) {
                Some(Tree::Object(schema)) if from == "input_schema" => {
                    let mut schema = schema.clone();
                    if !schema.iter().any(|(name, _)| name == "type") {
                        schema.push(("type".to_owned(), Tree::Text("object".into())));
                    }
                    function.push((to.to_owned(), Tree::Object(schema)));
                }
                Some(Tree::Null) | None if from == "description" => {}
                Some(Tree::Text(word)) if from != "input_schema" => {
                    function.push((to.to_owned(), Tree::Text(word.clone())));
                }
                None => return Err(missing(&format!("{path}.{from}"))),
                Some(_) => {
                    let must = if from == "input_schema" {
                        "an object"
                    } else {
                        "a string"
                    };
                    return Err(ApiError::invalid(
                        format!("{path}.{from}"),
                        format!("`{path}.{from}` must be {must}"),
                    ));
                }
            }
        }
        function.extend(strict.map(|strict| ("strict".to_owned(), Tree::Bool(strict))));
        tools.push(object([
            ("type", Tree::Text("function".into())),
            ("function", Tree::Object(function)),
        ]));
    }
    Ok(Tree::Array(tools))
}

/// The chat's `tool_choice`, and its `parallel_tool_calls`.
fn tool_choice(path: &str, value: &Json<'_>) -> Result<(Tree, Option<bool>), ApiError> {
    let word = |word: &str| Tree::Text(word.into());
    let kind = match value.member("type") {
        Some(Json::Text(kind)) => &**kind,
        _ => return Err(missing(&format!("{path}.type"))),
    };
    let choice = match kind {
        "auto" => word("auto"),
        "any" => word("required"),
        "none" => word("none"),
        "tool" => {
            let name = match value.member("name") {
                Some(Json::Text(name)) if !name.is_empty() => word(name),
                _ => return Err(missing(&format!("{path}.name"))),
            };
            object([
                ("type", word("function")),
                ("function", object([("name", name)])),
            ])
        }
        other => {
            return Err(ApiError::invalid(
                format!("{path}.type"),
                format!(
                    "`{path}.type` is `{}`; it must be `auto`, `any`, `tool` or `none`",
                    clip(other)
                ),
            ));
        }
    };
    let parallel = match value.member("disable_parallel_tool_use") {
        None | Some(Json::Null) => None,
        Some(disabled) => {
            let path = format!("{path}.disable_parallel_tool_use");
            Some(!super::members::boolean(&path, disabled)?)
        }
    };
    if !matches!(
        value.member("name"),
        None | Some(Json::Null | Json::Text(_))
    ) {
        return Err(ApiError::invalid(
            format!("{path}.name"),
            format!("`{path}.name` must be a string"),
        ));
    }
    Ok((choice, parallel))
}
