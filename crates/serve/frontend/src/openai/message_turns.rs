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
