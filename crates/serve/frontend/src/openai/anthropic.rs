//! Anthropic's Messages API, as vLLM serves it: requests become chats, and a chat's events become messages.
//!
//! Source: Anthropic's API reference, "Messages" and "Streaming messages"; vLLM,
//! `vllm/entrypoints/anthropic/protocol.py`.

use serde_json::{Value, json};
use slipstream_structured::Tree;

use super::chunks::Chunks;
use super::error::clip;
use super::members::{missing, read_members, text, text_member, whole, wrong_type};
use super::value::{Json, lax_whole};
use super::{ApiError, Usage};

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

fn object<const N: usize>(members: [(&str, Tree); N]) -> Tree {
    let members = members.into_iter();
    Tree::Object(members.map(|(name, value)| (name.into(), value)).collect())
}

/// Values of `output_config.effort`.
const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Beginning of the text by which a client names itself, with a number for each request. vLLM leaves the text out.
const BILLING: &str = "x-anthropic-billing-header";

/// The text of the blocks of text of a system prompt, as vLLM joins them; `None` if there is none.
fn system_text(path: &str, value: Json<'_>) -> Result<Option<Tree>, ApiError> {
    let blocks = match value {
        Json::Text(text) => return Ok((!text.is_empty()).then(|| Tree::Text(text.into_owned()))),
        value => value
            .into_elements()
            .map_err(|other| wrong_type(path, "a string or an array of text blocks", &other))?,
    };
    let mut whole = String::new();
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let block = block.into_tree();
        if kind(&path, &block)? == "text" {
            let text = block_text(&path, &block)?.unwrap_or_default();
            if !text.starts_with(BILLING) {
                whole.push_str(text);
            }
        }
    }
    Ok((!whole.is_empty()).then_some(Tree::Text(whole)))
}

/// The text of a block; `None` if it has none.
fn block_text<'a>(path: &str, block: &'a Tree) -> Result<Option<&'a str>, ApiError> {
    match block.get("text") {
        None | Some(Tree::Null) => Ok(None),
        Some(Tree::Text(text)) => Ok(Some(text)),
        Some(_) => Err(ApiError::invalid(
            format!("{path}.text"),
            format!("`{path}.text` must be a string"),
        )),
    }
}

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

fn kind<'a>(path: &str, block: &'a Tree) -> Result<&'a str, ApiError> {
    let kind = block.get("type").and_then(Tree::as_text);
    kind.ok_or_else(|| missing(&format!("{path}.type")))
}

fn unsupported_block(path: &str, kind: &str) -> ApiError {
    ApiError::unsupported(
        path,
        format!(
            "`{path}` is a block of type `{}`; text, images, and uses and results of tools, are supported",
            clip(kind)
        ),
    )
}

/// The messages of a chat. A message of the user with results of tools becomes several.
fn turns(path: &str, value: Json<'_>) -> Result<Vec<Tree>, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of messages", &other))?;
    let mut messages = Vec::with_capacity(elements.len());
    for (at, element) in elements.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let Json::Object(members) = element else {
            return Err(wrong_type(&path, "an object", &element));
        };
        let mut role = None;
        let mut content = None;
        for (name, value) in members {
            match &*name {
                "role" => role = Some(text(&format!("{path}.role"), value)?.into_owned()),
                "content" => content = Some(value),
                _ => {}
            }
        }
        let role = role.ok_or_else(|| missing(&format!("{path}.role")))?;
        if !matches!(role.as_str(), "user" | "assistant" | "system") {
            return Err(ApiError::invalid(
                format!("{path}.role"),
                format!("`{path}.role` must be `user`, `assistant` or `system`"),
            ));
        }
        let path = format!("{path}.content");
        match content.ok_or_else(|| missing(&path))? {
            Json::Text(text)
                if role == "system" && (text.is_empty() || text.starts_with(BILLING)) => {}
            Json::Text(text) => {
                let content = Tree::Text(text.into_owned());
                messages.push(object([("role", Tree::Text(role)), ("content", content)]));
            }
            content if role == "system" => {
                let content = system_text(&path, content)?;
                messages.extend(
                    content
                        .map(|content| object([("role", Tree::Text(role)), ("content", content)])),
                );
            }
            content => turn(&path, role, content, &mut messages)?,
        }
    }
    Ok(messages)
}

fn turn(
    path: &str,
    role: String,
    content: Json<'_>,
    messages: &mut Vec<Tree>,
) -> Result<(), ApiError> {
    let blocks = content
        .into_elements()
        .map_err(|other| wrong_type(path, "a string or an array of blocks", &other))?;
    let mut parts = Vec::new();
    let mut images = 0;
    let mut calls = Vec::new();
    let mut thoughts = String::new();
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let result = block.member("content").cloned();
        let block = block.into_tree();
        // A text, which may be absent.
        let word = |name: &str| match block.get(name) {
            None | Some(Tree::Null) => Ok(Tree::Text(String::new())),
            Some(word @ Tree::Text(_)) => Ok(word.clone()),
            Some(_) => Err(ApiError::invalid(
                format!("{path}.{name}"),
                format!("`{path}.{name}` must be a string"),
            )),
        };
        match kind(&path, &block)? {
            "text" => {
                let text = block_text(&path, &block)?.filter(|text| !text.is_empty());
                parts.extend(text.map(|text| text_part(Tree::Text(text.into()))));
            }
            "image" => {
                images += 1;
                parts.push(image_part(&path, &block)?);
            }
            "tool_use" => {
                let input = match block.get("input") {
                    None | Some(Tree::Null) => Tree::Object(Vec::new()),
                    Some(input @ Tree::Object(_)) => input.clone(),
                    Some(_) => {
                        return Err(ApiError::invalid(
                            format!("{path}.input"),
                            format!("`{path}.input` must be an object"),
                        ));
                    }
                };
                let mut arguments = String::new();
                input.write(&mut arguments);
                let function = [
                    ("name", word("name")?),
                    ("arguments", Tree::Text(arguments)),
                ];
                calls.push(object([
                    ("id", word("id")?),
                    ("type", Tree::Text("function".into())),
                    ("function", object(function)),
                ]));
            }
            "tool_result" if role == "user" => {
                let (content, shown) = match result {
                    None | Some(Json::Null) => (String::new(), Vec::new()),
                    Some(content) => tool_result(&format!("{path}.content"), content)?,
                };
                messages.push(object([
                    ("role", Tree::Text("tool".into())),
                    ("tool_call_id", word("tool_use_id")?),
                    ("content", Tree::Text(content)),
                ]));
                if !shown.is_empty() {
                    // As in vLLM: templates take images from users only.
                    messages.push(object([
                        ("role", Tree::Text("user".into())),
                        ("content", Tree::Array(shown)),
                    ]));
                }
            }
            // As in vLLM: the text of the result, for want of a call that it could belong to.
            "tool_result" => {
                let content = match result {
                    None | Some(Json::Null) => String::new(),
                    Some(content) => tool_result(&format!("{path}.content"), content)?.0,
                };
                parts.push(text_part(Tree::Text(format!("Tool result: {content}"))));
            }
            "thinking" => {
                if let Tree::Text(thought) = word("thinking")? {
                    thoughts.push_str(&thought);
                }
            }
            "redacted_thinking" | "tool_reference" => {}
            other => return Err(unsupported_block(&path, other)),
        }
    }
    // As in vLLM: nothing that a user said is no message.
    if role != "user" || !parts.is_empty() {
        let content = if images > 0 {
            Tree::Array(parts)
        } else {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_text());
            Tree::Text(texts.collect::<Vec<_>>().join("\n"))
        };
        let mut message = vec![
            ("role".to_owned(), Tree::Text(role)),
            ("content".to_owned(), content),
        ];
        if !calls.is_empty() {
            message.push(("tool_calls".to_owned(), Tree::Array(calls)));
        }
        if !thoughts.is_empty() {
            message.push(("reasoning".to_owned(), Tree::Text(thoughts)));
        }
        messages.push(Tree::Object(message));
    }
    Ok(())
}

/// Text and images of a tool's result, apart.
fn tool_result(path: &str, value: Json<'_>) -> Result<(String, Vec<Tree>), ApiError> {
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    let blocks = match value {
        Json::Text(text) => return Ok((text.into_owned(), images)),
        value => value
            .into_elements()
            .map_err(|other| wrong_type(path, "a string or an array of blocks", &other))?,
    };
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let block = block.into_tree();
        match kind(&path, &block)? {
            "text" => match block.get("text").and_then(Tree::as_text) {
                Some(text) => texts.push(text.to_owned()),
                None => return Err(missing(&format!("{path}.text"))),
            },
            "image" => images.push(image_part(&path, &block)?),
            other => return Err(unsupported_block(&path, other)),
        }
    }
    Ok((texts.join("\n"), images))
}

fn text_part(text: Tree) -> Tree {
    object([("type", Tree::Text("text".into())), ("text", text)])
}

/// The chat's part for a block of type `image`: data become a `data:` address, as in vLLM.
fn image_part(path: &str, block: &Tree) -> Result<Tree, ApiError> {
    let path = format!("{path}.source");
    let source = block.get("source").ok_or_else(|| missing(&path))?;
    if !matches!(source, Tree::Object(_)) {
        return Err(ApiError::invalid(
            path.clone(),
            format!("`{path}` must be an object"),
        ));
    }
    let member = |name: &str| text_member(&format!("{path}.{name}"), source.get(name));
    let wrong = |name: &str, must: &str| {
        ApiError::invalid(
            format!("{path}.{name}"),
            format!("`{path}.{name}` must {must}"),
        )
    };
    let url = match member("type")? {
        "base64" => {
            // As in vLLM, which the API's reference does not allow.
            let media = source.get("media_type").and_then(Tree::as_text);
            let media = media.unwrap_or("image/jpeg");
            if !media.starts_with("image/") {
                return Err(wrong("media_type", "begin with `image/`"));
            }
            format!("data:{media};base64,{}", member("data")?)
        }
        "url" => {
            let url = member("url")?;
            if !["http://", "https://"]
                .iter()
                .any(|start| url.starts_with(start))
            {
                return Err(wrong("url", "begin with `http://` or `https://`"));
            }
            url.to_owned()
        }
        other => {
            return Err(ApiError::unsupported(
                format!("{path}.type"),
                format!(
                    "`{path}.type` is `{}`; images are taken as `base64` or by `url`",
                    clip(other)
                ),
            ));
        }
    };
    Ok(object([
        ("type", Tree::Text("image_url".into())),
        ("image_url", object([("url", Tree::Text(url))])),
    ]))
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

/// Body of an error in Anthropic's shape.
pub fn message_error(error: &ApiError) -> Vec<u8> {
    error_json(error.status, &error.message).into_bytes()
}

fn error_json(status: u16, message: &str) -> String {
    let kind = match status {
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": message}}).to_string()
}

/// Body of the answer to `count_tokens`.
pub fn input_tokens_json(tokens: u64) -> Vec<u8> {
    json!({"input_tokens": tokens}).to_string().into_bytes()
}

/// Turns the events of a chat into those of a message, and into the message itself.
#[derive(Debug, Default)]
pub struct MessageStream {
    chunks: Chunks,
    /// `id` and `model` once it has begun.
    head: Option<(String, String)>,
    /// Blocks so far, if the message is sent as a whole.
    blocks: Vec<Block>,
    /// Blocks that have begun; the last one is open if `open`.
    begun: usize,
    open: bool,
    /// The open block is a call.
    in_call: bool,
    usage: Usage,
    reason: Option<String>,
    stop: Option<String>,
    error: Option<(u16, String)>,
}

#[derive(Debug)]
enum Block {
    Text(String),
    Call {
        id: String,
        name: String,
        input: String,
    },
}

impl MessageStream {
    /// Takes a frame of the chat's events. Appends the message's events to `out` if there is one.
    pub fn take(&mut self, frame: &[u8], mut out: Option<&mut Vec<u8>>) {
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.take(frame, |chunk| self.chunk(chunk, &mut out));
        self.chunks = chunks;
    }

    /// Bytes of the blocks so far.
    pub fn bytes(&self) -> usize {
        let len = |block: &Block| match block {
            Block::Text(text) => text.len(),
            Block::Call { id, name, input } => id.len() + name.len() + input.len(),
        };
        self.blocks.iter().map(len).sum()
    }

    fn chunk(&mut self, chunk: &Value, out: &mut Option<&mut Vec<u8>>) {
        if let Some(error) = chunk.get("error") {
            let message = error["message"].as_str().unwrap_or_default().to_owned();
            let status = ApiError::status_of(error["code"].as_str());
            emit(out, "error", || error_json(status, &message));
            self.error = Some((status, message));
            return;
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
            self.usage = Usage {
                prompt_tokens: usage["prompt_tokens"].as_u64().unwrap_or(0),
                completion_tokens: usage["completion_tokens"].as_u64().unwrap_or(0),
                cached_tokens: usage["prompt_tokens_details"]["cached_tokens"]
                    .as_u64()
                    .unwrap_or(0),
            };
        }
        if self.head.is_none() {
            let text = |name: &str| chunk[name].as_str().unwrap_or_default().to_owned();
            self.head = Some((text("id").replacen("chatcmpl-", "msg_", 1), text("model")));
            emit(out, "message_start", || {
                json!({"type": "message_start", "message": self.message(&[])}).to_string()
            });
        }
        let Some(choice) = chunk["choices"].get(0) else {
            return self.end(out);
        };
        let delta = &choice["delta"];
        if let Some(text) = delta["content"].as_str().filter(|text| !text.is_empty()) {
            self.text(text, out);
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            self.call(part, out);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.reason = Some(reason.to_owned());
            self.stop = choice["stop_reason"].as_str().map(str::to_owned);
        }
    }

    fn begin(&mut self, block: &Value, in_call: bool, out: &mut Option<&mut Vec<u8>>) {
        self.close(out);
        let index = self.begun;
        emit(out, "content_block_start", || {
            json!({"type": "content_block_start", "index": index, "content_block": block})
                .to_string()
        });
        self.begun += 1;
        self.open = true;
        self.in_call = in_call;
    }

    fn delta(&self, delta: &Value, out: &mut Option<&mut Vec<u8>>) {
        emit(out, "content_block_delta", || {
            json!({"type": "content_block_delta", "index": self.begun - 1, "delta": delta})
                .to_string()
        });
    }

    fn close(&mut self, out: &mut Option<&mut Vec<u8>>) {
        if std::mem::take(&mut self.open) {
            let index = self.begun - 1;
            emit(out, "content_block_stop", || {
                json!({"type": "content_block_stop", "index": index}).to_string()
            });
        }
    }

    fn text(&mut self, text: &str, out: &mut Option<&mut Vec<u8>>) {
        if !self.open || self.in_call {
            self.begin(&json!({"type": "text", "text": ""}), false, out);
            if out.is_none() {
                self.blocks.push(Block::Text(String::new()));
            }
        }
        self.delta(&json!({"type": "text_delta", "text": text}), out);
        if let Some(Block::Text(whole)) = self.blocks.last_mut() {
            whole.push_str(text);
        }
    }

    fn call(&mut self, part: &Value, out: &mut Option<&mut Vec<u8>>) {
        let function = &part["function"];
        if let Some(id) = part["id"].as_str() {
            let name = function["name"].as_str().unwrap_or_default();
            let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
            self.begin(&block, true, out);
            if out.is_none() {
                self.blocks.push(Block::Call {
                    id: id.to_owned(),
                    name: name.to_owned(),
                    input: String::new(),
                });
            }
        }
        let arguments = function["arguments"].as_str().unwrap_or_default();
        if !arguments.is_empty() {
            self.delta(
                &json!({"type": "input_json_delta", "partial_json": arguments}),
                out,
            );
            if let Some(Block::Call { input, .. }) = self.blocks.last_mut() {
                input.push_str(arguments);
            }
        }
    }

    fn end(&mut self, out: &mut Option<&mut Vec<u8>>) {
        self.close(out);
        let (reason, stop) = self.reason();
        emit(out, "message_delta", || {
            json!({
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": stop},
                "usage": self.counts(),
            })
            .to_string()
        });
        emit(out, "message_stop", || {
            json!({"type": "message_stop"}).to_string()
        });
    }

    /// `stop_reason` and `stop_sequence`.
    fn reason(&self) -> (Option<&'static str>, Option<&str>) {
        let Some(reason) = self.reason.as_deref() else {
            return (None, None);
        };
        match (reason, self.stop.as_deref()) {
            ("length", _) => (Some("max_tokens"), None),
            (_, Some(stop)) => (Some("stop_sequence"), Some(stop)),
            // Also of a call that the client named, which ends a chat with `stop`.
            _ if self.in_call => (Some("tool_use"), None),
            _ => (Some("end_turn"), None),
        }
    }

    /// Counts as Anthropic has them: cached tokens are not among `input_tokens`.
    fn counts(&self) -> Value {
        json!({
            "input_tokens": self.usage.prompt_tokens.saturating_sub(self.usage.cached_tokens),
            "cache_read_input_tokens": self.usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion_tokens,
        })
    }

    fn message(&self, content: &[Value]) -> Value {
        let (id, model) = self.head.clone().unwrap_or_default();
        let (reason, stop) = self.reason();
        json!({
            "id": id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": model,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self.counts(),
        })
    }

    /// The whole message, after the last frame. A call that `max_tokens` cut has no input.
    ///
    /// # Errors
    /// Status and message, if the chat failed.
    pub fn whole(&self) -> Result<Vec<u8>, (u16, String)> {
        if let Some((status, message)) = &self.error {
            return Err((*status, message.clone()));
        }
        let block = |block: &Block| match block {
            Block::Text(text) => json!({"type": "text", "text": text}),
            Block::Call { id, name, input } => {
                let input = serde_json::from_str(input).unwrap_or_else(|_| json!({}));
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        };
        let content: Vec<Value> = self.blocks.iter().map(block).collect();
        Ok(self.message(&content).to_string().into_bytes())
    }
}

fn emit(out: &mut Option<&mut Vec<u8>>, event: &str, data: impl FnOnce() -> String) {
    if let Some(out) = out {
        out.extend_from_slice(format!("event: {event}\ndata: {}\n\n", data()).as_bytes());
    }
}
