//! Turns of Anthropic's Messages API, which become the messages of a chat.

use slipstream_structured::Tree;

use super::ApiError;
use super::error::clip;
use super::members::{missing, object, text, text_member, wrong_type};
use super::value::Json;

/// Beginning of the text by which a client names itself, with a number for each request. vLLM leaves the text out.
const BILLING: &str = "x-anthropic-billing-header";

/// The text of the blocks of text of a system prompt, as vLLM joins them; `None` if there is none.
pub(super) fn system_text(path: &str, value: Json<'_>) -> Result<Option<Tree>, ApiError> {
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
pub(super) fn turns(path: &str, value: Json<'_>) -> Result<Vec<Tree>, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of messages", &other))?;
    let mut messages = Vec::with_capacity(elements.len());
    for (at, element) in elements.into_iter().enumerate() {
        messages.extend(messages_of(&format!("{path}.{at}"), element)?);
    }
    Ok(messages)
}

/// The messages of a chat that a turn becomes.
fn messages_of(path: &str, turn: Json<'_>) -> Result<Vec<Tree>, ApiError> {
    let Json::Object(members) = turn else {
        return Err(wrong_type(path, "an object", &turn));
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
    let content = content.ok_or_else(|| missing(&path))?;
    let message =
        |content: Tree| object([("role", Tree::Text(role.clone())), ("content", content)]);
    match content {
        Json::Text(text) if role == "system" && (text.is_empty() || text.starts_with(BILLING)) => {
            Ok(Vec::new())
        }
        Json::Text(text) => Ok(vec![message(Tree::Text(text.into_owned()))]),
        content if role == "system" => {
            let content = system_text(&path, content)?;
            Ok(content.into_iter().map(message).collect())
        }
        content => {
            let blocks = content
                .into_elements()
                .map_err(|other| wrong_type(&path, "a string or an array of blocks", &other))?;
            let mut turn = Turn::of(role);
            for (at, block) in blocks.into_iter().enumerate() {
                turn.take(&format!("{path}.{at}"), block)?;
            }
            Ok(turn.finish())
        }
    }
}

/// A turn whose blocks are read.
struct Turn {
    role: String,
    /// Messages that come first: results of tools.
    results: Vec<Tree>,
    /// Texts and images.
    parts: Vec<Tree>,
    has_images: bool,
    calls: Vec<Tree>,
    thoughts: String,
}

impl Turn {
    fn of(role: String) -> Turn {
        Turn {
            role,
            results: Vec::new(),
            parts: Vec::new(),
            has_images: false,
            calls: Vec::new(),
            thoughts: String::new(),
        }
    }

    fn take(&mut self, path: &str, block: Json<'_>) -> Result<(), ApiError> {
        let result = block.member("content").cloned();
        let block = block.into_tree();
        match kind(path, &block)? {
            "text" => {
                let text = block_text(path, &block)?.filter(|text| !text.is_empty());
                let part = text.map(|text| text_part(Tree::Text(text.into())));
                self.parts.extend(part);
            }
            "image" => {
                self.has_images = true;
                self.parts.push(image_part(path, &block)?);
            }
            "tool_use" => self.calls.push(call(path, &block)?),
            "tool_result" => {
                let (text, images) = match result {
                    None | Some(Json::Null) => (String::new(), Vec::new()),
                    Some(content) => tool_result(&format!("{path}.content"), content)?,
                };
                if self.role == "user" {
                    self.result(word(path, &block, "tool_use_id")?, text, images);
                } else {
                    // As in vLLM: the text of the result, for want of a call that it could belong to.
                    let text = format!("Tool result: {text}");
                    self.parts.push(text_part(Tree::Text(text)));
                }
            }
            "thinking" => {
                if let Tree::Text(thought) = word(path, &block, "thinking")? {
                    self.thoughts.push_str(&thought);
                }
            }
            "redacted_thinking" | "tool_reference" => {}
            other => return Err(unsupported_block(path, other)),
        }
        Ok(())
    }

    /// Adds a result of a tool, with its images apart: as in vLLM, templates take images from users only.
    fn result(&mut self, call: Tree, text: String, images: Vec<Tree>) {
        self.results.push(object([
            ("role", Tree::Text("tool".into())),
            ("tool_call_id", call),
            ("content", Tree::Text(text)),
        ]));
        if !images.is_empty() {
            self.results.push(object([
                ("role", Tree::Text("user".into())),
                ("content", Tree::Array(images)),
            ]));
        }
    }

    /// The messages of the chat.
    fn finish(self) -> Vec<Tree> {
        let mut messages = self.results;
        // As in vLLM: nothing that a user said is no message.
        if self.role == "user" && self.parts.is_empty() {
            return messages;
        }
        let content = if self.has_images {
            Tree::Array(self.parts)
        } else {
            let texts = self.parts.iter();
            let texts = texts.filter_map(|part| part.get("text")?.as_text());
            Tree::Text(texts.collect::<Vec<_>>().join("\n"))
        };
        let mut message = vec![
            ("role".to_owned(), Tree::Text(self.role)),
            ("content".to_owned(), content),
        ];
        if !self.calls.is_empty() {
            message.push(("tool_calls".to_owned(), Tree::Array(self.calls)));
        }
        if !self.thoughts.is_empty() {
            message.push(("reasoning".to_owned(), Tree::Text(self.thoughts)));
        }
        messages.push(Tree::Object(message));
        messages
    }
}

/// The text under `name`, which may be absent.
fn word(path: &str, block: &Tree, name: &str) -> Result<Tree, ApiError> {
    match block.get(name) {
        None | Some(Tree::Null) => Ok(Tree::Text(String::new())),
        Some(word @ Tree::Text(_)) => Ok(word.clone()),
        Some(_) => Err(ApiError::invalid(
            format!("{path}.{name}"),
            format!("`{path}.{name}` must be a string"),
        )),
    }
}

/// The chat's call of a tool for a block of type `tool_use`.
fn call(path: &str, block: &Tree) -> Result<Tree, ApiError> {
    let mut arguments = String::new();
    match block.get("input") {
        None | Some(Tree::Null) => arguments.push_str("{}"),
        Some(input @ Tree::Object(_)) => input.write(&mut arguments),
        Some(_) => {
            return Err(ApiError::invalid(
                format!("{path}.input"),
                format!("`{path}.input` must be an object"),
            ));
        }
    }
    let function = [
        ("name", word(path, block, "name")?),
        ("arguments", Tree::Text(arguments)),
    ];
    Ok(object([
        ("id", word(path, block, "id")?),
        ("type", Tree::Text("function".into())),
        ("function", object(function)),
    ]))
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
