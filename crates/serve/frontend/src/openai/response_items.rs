//! Items of a response's `input`, which become the messages of a chat.

use slipstream_structured::Tree;

use super::ApiError;
use super::error::clip;
use super::members::{missing, object, text, wrong_type};
use super::value::Json;

/// The messages of a chat. A call that follows a message of the assistant joins it.
pub(super) fn input_items(path: &str, value: Json<'_>) -> Result<Vec<Tree>, ApiError> {
    if let Json::Text(text) = value {
        return Ok(vec![object([
            ("role", Tree::Text("user".into())),
            ("content", Tree::Text(text.into_owned())),
        ])]);
    }
    let items = value
        .into_elements()
        .map_err(|other| wrong_type(path, "a string or an array of items", &other))?;
    let mut messages = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        input_item(&format!("{path}.{at}"), item, &mut messages)?;
    }
    Ok(messages)
}

fn input_item(path: &str, item: Json<'_>, messages: &mut Vec<Tree>) -> Result<(), ApiError> {
    let Json::Object(members) = item else {
        return Err(wrong_type(path, "an object", &item));
    };
    let mut kind = None;
    let mut content = None;
    let mut others = Vec::new();
    for (name, value) in members {
        match &*name {
            "type" if value != Json::Null => kind = Some(text(&format!("{path}.type"), value)?),
            "content" | "output" => content = Some((name, value)),
            _ => others.push((name.into_owned(), value.into_tree())),
        }
    }
    let others = Tree::Object(others);
    let member = |name: &str| {
        let value = others.get(name).and_then(Tree::as_text);
        value.ok_or_else(|| missing(&format!("{path}.{name}")))
    };
    match kind.as_deref() {
        None | Some("message") => {
            let role = member("role")?;
            if !matches!(role, "user" | "assistant" | "system" | "developer") {
                return Err(ApiError::invalid(
                    format!("{path}.role"),
                    format!("`{path}.role` must be `user`, `assistant`, `system` or `developer`"),
                ));
            }
            let (name, content) = content.ok_or_else(|| missing(&format!("{path}.content")))?;
            let parts = content_parts(&format!("{path}.{name}"), content)?;
            messages.push(object([
                ("role", Tree::Text(role.into())),
                ("content", parts),
            ]));
        }
        Some("function_call") => {
            let function = [
                ("name", Tree::Text(member("name")?.into())),
                ("arguments", Tree::Text(member("arguments")?.into())),
            ];
            let call = object([
                ("id", Tree::Text(member("call_id")?.into())),
                ("type", Tree::Text("function".into())),
                ("function", object(function)),
            ]);
            join_call(call, messages);
        }
        Some("function_call_output") => {
            let (name, output) = content.ok_or_else(|| missing(&format!("{path}.output")))?;
            messages.push(object([
                ("role", Tree::Text("tool".into())),
                ("tool_call_id", Tree::Text(member("call_id")?.into())),
                ("content", content_parts(&format!("{path}.{name}"), output)?),
            ]));
        }
        // Modelled answers have no thoughts, and templates leave out those of earlier turns.
        Some("reasoning") => {}
        Some(other) => {
            return Err(ApiError::unsupported(
                format!("{path}.type"),
                format!(
                    "`{path}` is an item of type `{}`; messages, `function_call`, \
                     `function_call_output` and `reasoning` are supported",
                    clip(other)
                ),
            ));
        }
    }
    Ok(())
}

fn join_call(call: Tree, messages: &mut Vec<Tree>) {
    let of_assistant =
        |message: &&mut Tree| message.get("role").and_then(Tree::as_text) == Some("assistant");
    if let Some(Tree::Object(members)) = messages.last_mut().filter(of_assistant) {
        match members.iter_mut().find(|(name, _)| name == "tool_calls") {
            Some((_, Tree::Array(calls))) => calls.push(call),
            _ => members.push(("tool_calls".into(), Tree::Array(vec![call]))),
        }
        return;
    }
    messages.push(object([
        ("role", Tree::Text("assistant".into())),
        ("content", Tree::Text(String::new())),
        ("tool_calls", Tree::Array(vec![call])),
    ]));
}

/// Content of a chat's message: a text, or parts. Parts of text are joined by line breaks unless there are images.
fn content_parts(path: &str, value: Json<'_>) -> Result<Tree, ApiError> {
    let parts = match value {
        Json::Text(text) => return Ok(Tree::Text(text.into_owned())),
        value => value
            .into_elements()
            .map_err(|other| wrong_type(path, "a string or an array of parts", &other))?,
    };
    let mut content = Vec::with_capacity(parts.len());
    let mut images = 0;
    for (at, part) in parts.into_iter().enumerate() {
        let path = format!("{path}.{at}");
        let part = part.into_tree();
        let Some(kind) = part.get("type").and_then(Tree::as_text) else {
            return Err(missing(&format!("{path}.type")));
        };
        let field = match kind {
            "input_text" | "output_text" | "text" => "text",
            "refusal" => "refusal",
            "input_image" => {
                images += 1;
                content.push(image_part(&path, &part)?);
                continue;
            }
            other => {
                return Err(ApiError::unsupported(
                    format!("{path}.type"),
                    format!(
                        "`{path}` is a part of type `{}`; only text and images are modelled",
                        clip(other)
                    ),
                ));
            }
        };
        let Some(text) = part.get(field).and_then(Tree::as_text) else {
            return Err(missing(&format!("{path}.{field}")));
        };
        content.push(object([
            ("type", Tree::Text("text".into())),
            ("text", Tree::Text(text.into())),
        ]));
    }
    if images > 0 {
        return Ok(Tree::Array(content));
    }
    let texts = content
        .iter()
        .filter_map(|part| part.get("text")?.as_text());
    Ok(Tree::Text(texts.collect::<Vec<_>>().join("\n")))
}

/// The chat's part for one of type `input_image`.
fn image_part(path: &str, part: &Tree) -> Result<Tree, ApiError> {
    if part.get("file_id").is_some_and(|id| *id != Tree::Null) {
        return Err(ApiError::unsupported(
            format!("{path}.file_id"),
            format!("`{path}.file_id` is not supported: no files are stored; send `image_url`"),
        ));
    }
    let path = format!("{path}.image_url");
    let url = super::members::text_member(&path, part.get("image_url"))?;
    // Here, because the chat's parts are counted from other places.
    if !super::messages::is_image_address(url) {
        return Err(super::messages::wrong_image_address(&path));
    }
    Ok(object([
        ("type", Tree::Text("image_url".into())),
        ("image_url", object([("url", Tree::Text(url.into()))])),
    ]))
}
