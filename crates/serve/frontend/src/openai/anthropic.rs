//! Anthropic's Messages API, as vLLM serves it: requests become chats, and a chat's events become messages.
//!
//! Source: Anthropic's API reference, "Messages" and "Streaming messages"; vLLM,
//! `vllm/entrypoints/anthropic/protocol.py`.

use serde_json::{Value, json};

use super::chunks::Chunks;
use super::error::clip;
use super::request::{missing, read_members, text, text_member, wrong_type};
use super::value::Json;
use super::{ApiError, Usage};
use crate::structured::Tree;

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
                "stop_sequences" => put("stop", value.into_tree()),
                "stream" => stream = super::request::boolean(name, &value)?,
                "system" => system = Some(Tree::Text(plain_text(name, value)?)),
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
                    if let Some(format) = value.member("format").filter(|f| **f != Json::Null) {
                        let schema = format.member("schema").cloned().unwrap_or(Json::Null);
                        put(
                            "response_format",
                            object([
                                ("type", Tree::Text("json_schema".into())),
                                ("json_schema", object([("schema", schema.into_tree())])),
                            ]),
                        );
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
    let mut messages: Vec<Tree> = messages.ok_or_else(|| missing("messages"))?;
    if let Some(system) = system {
        messages.insert(
            0,
            object([("role", Tree::Text("system".into())), ("content", system)]),
        );
    }
    if counts_only {
        chat.retain(|(name, _)| matches!(name.as_str(), "model" | "tools"));
    } else {
        chat.push(("stream".into(), Tree::Bool(true)));
        let counts = [
            ("include_usage", Tree::Bool(true)),
            ("continuous_usage_stats", Tree::Bool(true)),
        ];
        chat.push(("stream_options".into(), object(counts)));
    }
    chat.push(("messages".into(), Tree::Array(messages)));
    let chat = serde_json::to_vec(&Tree::Object(chat)).expect("a tree is JSON");
    Ok(MessagesRequest { chat, stream })
}

fn object<const N: usize>(members: [(&str, Tree); N]) -> Tree {
    let members = members.into_iter();
    Tree::Object(members.map(|(name, value)| (name.into(), value)).collect())
}

/// A text, or blocks of text, which are joined by line breaks.
fn plain_text(path: &str, value: Json<'_>) -> Result<String, ApiError> {
    let blocks = match value {
        Json::Text(text) => return Ok(text.into_owned()),
        value => value
            .into_elements()
            .map_err(|other| wrong_type(path, "a string or an array of text blocks", &other))?,
    };
    let mut whole = String::new();
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let block = block.into_tree();
        match (
            kind(&path, &block)?,
            block.get("text").and_then(Tree::as_text),
        ) {
            ("text", Some(text)) => {
                if at > 0 {
                    whole.push('\n');
                }
                whole.push_str(text);
            }
            ("text", None) => return Err(missing(&format!("{path}.text"))),
            (other, _) => return Err(unsupported_block(&path, other)),
        }
    }
    Ok(whole)
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
            Json::Text(text) => {
                let content = Tree::Text(text.into_owned());
                messages.push(object([("role", Tree::Text(role)), ("content", content)]));
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
    let results = messages.len();
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let result = block.member("content").cloned();
        let block = block.into_tree();
        let member = |name: &str| {
            let value = block.get(name).cloned();
            value.ok_or_else(|| missing(&format!("{path}.{name}")))
        };
        match kind(&path, &block)? {
            "text" => match member("text")? {
                text @ Tree::Text(_) => parts.push(text_part(text)),
                _ => return Err(missing(&format!("{path}.text"))),
            },
            "image" => {
                images += 1;
                parts.push(image_part(&path, &block)?);
            }
            "tool_use" if role == "assistant" => {
                let function = [("name", member("name")?), ("arguments", member("input")?)];
                calls.push(object([
                    ("id", member("id")?),
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
                    ("tool_call_id", member("tool_use_id")?),
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
            // Modelled answers have no thoughts, and templates leave out those of earlier turns.
            "thinking" | "redacted_thinking" => {}
            other => return Err(unsupported_block(&path, other)),
        }
    }
    if !parts.is_empty() || !calls.is_empty() || messages.len() == results {
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
                Some(value) => function.push((to.to_owned(), value.clone())),
                None if from == "description" => {}
                None => return Err(missing(&format!("{path}.{from}"))),
            }
        }
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
                Some(Json::Text(name)) => word(name),
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
        Some(Json::Bool(disabled)) => Some(!disabled),
        _ => None,
    };
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
