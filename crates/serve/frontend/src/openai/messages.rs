//! The messages of a chat: text, images, calls of tools.

use std::borrow::Cow;
use std::ops::Range;

use slipstream_base::mix;

use super::ApiError;
use super::error::clip;
use super::form::tool_calls;
use super::members::{missing, text, wrong_type};
use super::value::Json;
use crate::text::{ImagePart, Message, MessageTools};

pub(super) fn messages<'a>(path: &str, value: Json<'a>) -> Result<Vec<Message<'a>>, ApiError> {
    let elements = value
        .into_elements()
        .map_err(|other| wrong_type(path, "an array of messages", &other))?;
    if elements.is_empty() {
        return Err(ApiError::invalid(
            path,
            format!("`{path}` is empty; send at least one message"),
        ));
    }
    elements
        .into_iter()
        .enumerate()
        .map(|(at, element)| message(&format!("{path}.{at}"), element))
        .collect()
}

/// Whether the template opens the assistant's turn behind the `last` message: `asked`, unless the answer
/// `continues` that message.
pub(super) fn opens_turn(
    continues: bool,
    asked: Option<bool>,
    last: Option<&Message<'_>>,
) -> Result<bool, ApiError> {
    const FIELD: &str = "continue_final_message";
    if !continues {
        return Ok(asked.unwrap_or(true));
    }
    // Also if it was not sent: true is the default, and vLLM refuses that too.
    if asked != Some(false) {
        return Err(ApiError::invalid(
            FIELD,
            "`continue_final_message` continues the last message, and `add_generation_prompt` (true by \
             default) begins a new one; send `\"add_generation_prompt\": false` with it",
        ));
    }
    if last.is_some_and(|last| !last.calls().is_empty()) {
        return Err(ApiError::invalid(
            FIELD,
            "the last message calls tools, and only text can be continued; leave out its `tool_calls`, \
             or `continue_final_message`",
        ));
    }
    Ok(false)
}

fn message<'a>(path: &str, value: Json<'a>) -> Result<Message<'a>, ApiError> {
    let Json::Object(members) = value else {
        return Err(wrong_type(path, "an object", &value));
    };
    let mut role = None;
    let mut content = None;
    let mut images = Vec::new();
    let mut name = None;
    let (mut raw_calls, mut raw_call_id) = (None, None);
    let (mut reasoning, mut reasoning_content) = (None, None);
    for (member, value) in members {
        if value == Json::Null {
            continue;
        }
        let at = || format!("{path}.{member}");
        match &*member {
            "role" => role = Some(text(&at(), value)?),
            "content" => content = Some(value),
            "name" => name = Some(text(&at(), value)?),
            // As in vLLM, other roles have no calls and no call ids.
            "tool_calls" => raw_calls = Some(value),
            // vLLM's name of it, and the older one.
            "reasoning" if value.is_text() => reasoning = Some(text(&at(), value)?),
            "reasoning_content" if value.is_text() => reasoning_content = Some(text(&at(), value)?),
            "tool_call_id" => raw_call_id = Some(value),
            "function_call" | "audio" => {
                return Err(ApiError::unsupported(
                    at(),
                    format!(
                        "`{}` is not supported: only text is modelled; put it into `content` as \
                         text",
                        at()
                    ),
                ));
            }
            _ => {}
        }
    }
    let role = role.ok_or_else(|| missing(&format!("{path}.role")))?;
    if role.is_empty() {
        return Err(ApiError::invalid(
            format!("{path}.role"),
            format!("`{path}.role` is empty; send `user`, `assistant` or `system`"),
        ));
    }
    // As in vLLM, any message may go without; OpenAI lets only an assistant's that called tools.
    let (content, parts) = match content {
        None => (Cow::default(), Some(Vec::new())),
        Some(value) => message_content(
            &format!("{path}.content"),
            value,
            role == "system",
            &mut images,
        )?,
    };
    let calls = match raw_calls.filter(|_| role == "assistant") {
        Some(value) => tool_calls(&format!("{path}.tool_calls"), value)?,
        None => Vec::new(),
    };
    let call_id = raw_call_id
        .filter(|_| role == "tool")
        .map(|value| text(&format!("{path}.tool_call_id"), value))
        .transpose()?
        .map(Cow::into_owned);
    Ok(Message {
        // Thoughts of others are nothing to a template.
        reasoning: reasoning
            .or(reasoning_content)
            .filter(|_| role == "assistant"),
        role,
        content,
        parts,
        name,
        images,
        tools: (!calls.is_empty() || call_id.is_some())
            .then(|| Box::new(MessageTools { calls, call_id })),
    })
}

/// A content, with the ranges of its parts if it came as a list.
type MessageContent<'a> = (Cow<'a, str>, Option<Vec<Range<usize>>>);

/// Text, or parts of it, which are joined by a newline as vLLM does for templates that take text
/// (`vllm/renderers/chat_utils/chat_message.py`).
fn message_content<'a>(
    path: &str,
    value: Json<'a>,
    is_system: bool,
    images: &mut Vec<ImagePart>,
) -> Result<MessageContent<'a>, ApiError> {
    let without_billing = |text: Cow<'a, str>| {
        if is_system {
            without_billing(text)
        } else {
            Some(text)
        }
    };
    if let Json::Text(text) = value {
        return Ok(match without_billing(text) {
            Some(text) => (text, None),
            None => (Cow::default(), Some(Vec::new())),
        });
    }
    let parts = value
        .into_elements()
        .map_err(|other| wrong_type(path, "a string or an array of text parts", &other))?;
    let mut joined: Option<Cow<'a, str>> = None;
    let mut ranges = Vec::with_capacity(parts.len());
    for (at, part) in parts.into_iter().enumerate() {
        let part = match content_part(&format!("{path}.{at}"), part)? {
            Part::Text(text) => without_billing(text).map_or(Part::Nothing, Part::Text),
            other => other,
        };
        match (part, &mut joined) {
            (Part::Nothing, _) => {}
            (Part::Image(hash), text) => {
                let at = text.as_ref().map_or(0, |text| text.len());
                images.push(ImagePart { at, hash });
            }
            // vLLM leaves empty parts out of a joined text.
            (Part::Text(empty), text) if empty.is_empty() => {
                let at = text.as_ref().map_or(0, |text| text.len());
                ranges.push(at..at);
            }
            (Part::Text(first), None) => {
                ranges.push(0..first.len());
                joined = Some(first);
            }
            (Part::Text(next), Some(text)) => {
                let text = text.to_mut();
                // An image between the two has its own line breaks.
                if images.last().is_none_or(|image| image.at < text.len()) {
                    text.push('\n');
                }
                let start = text.len();
                text.push_str(&next);
                ranges.push(start..text.len());
            }
        }
    }
    Ok((joined.unwrap_or_default(), Some(ranges)))
}

/// A system text without the line that some coding agents put in front, which differs in each request, as in vLLM: a prompt
/// that kept it would never hit the prefix cache. `None` if nothing is left of it.
/// Source: `_strip_claude_code_billing_header` in `vllm/renderers/chat_utils/chat_message.py`.
fn without_billing(text: Cow<'_, str>) -> Option<Cow<'_, str>> {
    if !text.starts_with("x-anthropic-billing-header") {
        return Some(text);
    }
    let (_, rest) = text.split_once('\n')?;
    (!rest.is_empty()).then(|| rest.to_owned().into())
}

/// A part of a message.
enum Part<'a> {
    Text(Cow<'a, str>),
    /// An image, by the hash of its address or data.
    Image(u64),
    /// Null in place of a text.
    Nothing,
}

fn content_part<'a>(path: &str, part: Json<'a>) -> Result<Part<'a>, ApiError> {
    let members = match part {
        Json::Text(text) => return Ok(Part::Text(text)),
        Json::Object(members) => members,
        other => return Err(wrong_type(path, "an object with a `type`", &other)),
    };
    let mut kind = None;
    let mut said = [const { None }; TEXT_MEMBERS.len()];
    let mut image = None;
    for (member, value) in members {
        let at = || format!("{path}.{member}");
        if let Some(of) = TEXT_MEMBERS.iter().position(|name| *name == member) {
            said[of] = Some(match value {
                Json::Null => None,
                value => Some(text(&at(), value)?),
            });
            continue;
        }
        match &*member {
            "type" if value != Json::Null => kind = Some(text(&at(), value)?),
            "image_url" => image = Some(image_hash(&at(), value)?),
            _ => {}
        }
    }
    let kind = match kind {
        Some(kind) => kind,
        None if image.is_some() => "image_url".into(),
        None => return Err(missing(&format!("{path}.type"))),
    };
    // As vLLM's `MM_PARSER_MAP` (`vllm/renderers/chat_utils/chat_message.py`).
    let member = match &*kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" | "thinking" => &*kind,
        "image_url" | "input_image" => {
            let hash = image.ok_or_else(|| missing(&format!("{path}.image_url")))?;
            return Ok(Part::Image(hash));
        }
        other => {
            return Err(ApiError::unsupported(
                path,
                format!(
                    "`{path}` is a part of type `{}`; only parts with text and images are supported",
                    clip(other)
                ),
            ));
        }
    };
    let of = TEXT_MEMBERS.iter().position(|name| *name == member);
    match of.and_then(|of| said[of].take()) {
        Some(Some(text)) => Ok(Part::Text(text)),
        Some(None) => Ok(Part::Nothing),
        None => Err(missing(&format!("{path}.{member}"))),
    }
}

/// Members of a part that hold its text, each for its kinds of parts.
const TEXT_MEMBERS: [&str; 3] = ["text", "refusal", "thinking"];

pub(super) fn is_image_address(url: &str) -> bool {
    ["http://", "https://", "data:image/"]
        .iter()
        .any(|start| url.starts_with(start))
}

pub(super) fn wrong_image_address(path: &str) -> ApiError {
    ApiError::invalid(
        path,
        format!("`{path}` must begin with `http://`, `https://` or `data:image/`"),
    )
}

/// Hash of an image's address or data. It is not fetched.
fn image_hash(path: &str, value: Json<'_>) -> Result<u64, ApiError> {
    let url = match value {
        Json::Object(members) => {
            let url = members.into_iter().find(|(name, _)| name == "url");
            let (_, url) = url.ok_or_else(|| missing(&format!("{path}.url")))?;
            text(&format!("{path}.url"), url)?
        }
        url => text(path, url)?,
    };
    if !is_image_address(&url) {
        return Err(wrong_image_address(path));
    }
    let hash = |hash, chunk: &[u8]| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix::draw(hash, u64::from_le_bytes(word))
    };
    Ok(url.as_bytes().chunks(8).fold(url.len() as u64, hash))
}
