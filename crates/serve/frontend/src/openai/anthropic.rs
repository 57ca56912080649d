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
    let mut raw = RawMessages::default();
    read_members(body, |_| true, |name, value| raw.take(name, value))?;
    raw.finish(counts_only)
}

/// Fields of a request as they were sent.
#[derive(Default)]
struct RawMessages<'a> {
    /// Those of the chat, without its messages.
    chat: Vec<(String, Tree)>,
    system: Option<Tree>,
    messages: Option<Vec<Tree>>,
    thinking: Option<Json<'a>>,
    stream: bool,
}

impl<'a> RawMessages<'a> {
    /// Sets a field of the chat.
    fn put(&mut self, name: &str, value: Tree) {
        self.chat.retain(|(known, _)| known != name);
        self.chat.push((name.into(), value));
    }

    /// The value of a field of the chat.
    fn value(&self, name: &str) -> Option<&Tree> {
        let found = self.chat.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value)
    }

    /// Notes a field. Null counts as not sent.
    fn take(&mut self, name: &str, value: Json<'a>) -> Result<(), ApiError> {
        match name {
            _ if value == Json::Null => {}
            "model"
            | "temperature"
            | "top_p"
            | "top_k"
            | "cache_salt"
            | "seed"
            | "chat_template_kwargs"
            | "max_tokens" => self.put(name, value.into_tree()),
            "stop_sequences" if !matches!(value, Json::Array(_)) => {
                return Err(wrong_type(name, "an array of strings", &value));
            }
            "stop_sequences" => self.put("stop", value.into_tree()),
            "stream" => self.stream = super::members::boolean(name, &value)?,
            "system" => self.system = system_text(name, value)?,
            "metadata" | "thinking" if !matches!(value, Json::Object(_)) => {
                return Err(wrong_type(name, "an object", &value));
            }
            "thinking" => self.thinking = Some(value),
            "messages" => self.messages = Some(turns(name, value)?),
            "tools" => self.put(name, tools(name, value)?),
            "tool_choice" => {
                let (choice, parallel) = tool_choice(name, &value)?;
                self.put(name, choice);
                if let Some(parallel) = parallel {
                    self.put("parallel_tool_calls", Tree::Bool(parallel));
                }
            }
            "output_config" => {
                if let Some(schema) = output_schema(name, &value)? {
                    self.put("response_format", schema);
                }
                if let Some(effort) = word_of(name, &value, "effort", &EFFORTS)? {
                    self.put("reasoning_effort", Tree::Text(effort.into()));
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
    }

    /// Checks what concerns several fields, and writes the chat.
    fn finish(mut self, counts_only: bool) -> Result<MessagesRequest, ApiError> {
        if !counts_only && self.value("max_tokens").is_none() {
            return Err(missing("max_tokens"));
        }
        if let Some(thinking) = self.thinking.take() {
            let limit = self.value("max_tokens");
            let limit =
                limit.and_then(|limit| lax_whole(&serde_json::to_value(limit).ok()?)?.as_u64());
            if !thinks(&thinking, limit)? {
                self.put("reasoning_effort", Tree::Text("none".into()));
            }
        }
        self.drop_idle_tools();
        let mut messages = self.messages.take().ok_or_else(|| missing("messages"))?;
        if let Some(system) = self.system.take() {
            messages.insert(
                0,
                object([("role", Tree::Text("system".into())), ("content", system)]),
            );
        }
        if counts_only {
            let counted = ["model", "tools", "chat_template_kwargs", "reasoning_effort"];
            self.chat
                .retain(|(name, _)| counted.contains(&name.as_str()));
        } else {
            self.put("stream", Tree::Bool(true));
            let counts = [
                ("include_usage", Tree::Bool(true)),
                ("continuous_usage_stats", Tree::Bool(true)),
            ];
            self.put("stream_options", object(counts));
        }
        self.put("messages", Tree::Array(messages));
        Ok(MessagesRequest {
            chat: Tree::Object(self.chat).to_json(),
            stream: self.stream,
        })
    }

    /// Drops an empty list of tools, and then a choice among none: `auto` and `none` say the same.
    fn drop_idle_tools(&mut self) {
        if self
            .value("tools")
            .is_some_and(|of| *of != Tree::Array(Vec::new()))
        {
            return;
        }
        let is_plain = |of: &Tree| matches!(of.as_text(), Some("auto" | "none"));
        self.chat
            .retain(|(name, of)| name != "tools" && (name != "tool_choice" || !is_plain(of)));
    }
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
