//! `/tokenize` and `/detokenize`, in vLLM's shapes.

use std::borrow::Cow;

use slipstream_base::TokenId;
use slipstream_structured::Tree;

use super::members::{boolean, missing, read_members, text, tokens};
use super::messages::{messages, opens_turn};
use super::prompt::template_kwargs;
use super::request::model as model_name;
use super::value::Json;
use super::{ApiError, form};
use crate::json::{self, Out};
use crate::text::{ChatOptions, ChatRenderer, Message};

/// A request to `/tokenize`.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest<'a> {
    /// `model`, if named.
    pub model: Option<Cow<'a, str>>,
    /// The text or chat.
    pub input: TokenizeInput<'a>,
    /// Tokens such as BOS too. Default: for a prompt true, for a chat false.
    pub add_special_tokens: bool,
    /// Answer with the tokens' texts too.
    pub return_token_strs: bool,
}

/// The text or chat.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeInput<'a> {
    /// Text.
    Prompt(Cow<'a, str>),
    /// A chat, as its template renders it.
    Chat {
        /// The messages.
        messages: Vec<Message<'a>>,
        /// Open the assistant's turn at the end. Default true.
        add_generation_prompt: bool,
        /// The last message stays open. Default false.
        continue_final_message: bool,
        /// Tools that the model may call.
        tools: Vec<Tree>,
        /// `chat_template_kwargs`: variables for the template.
        template_kwargs: Vec<(String, Tree)>,
        /// `chat_template`: a template for this chat.
        template: Option<Cow<'a, str>>,
    },
}

/// Parses the body of `POST /tokenize`.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault.
pub fn parse_tokenize(body: &[u8]) -> Result<TokenizeRequest<'_>, ApiError> {
    let mut model = None;
    let mut prompt = None;
    let mut special = None;
    let mut strs = false;
    let known = |name: &str| {
        matches!(
            name,
            "model" | "prompt" | "add_special_tokens" | "return_token_strs"
        ) || CHAT_FIELDS.contains(&name)
    };
    let mut of_chat = Vec::new();
    read_members(body, known, |name, value| {
        if value == Json::Null {
            return Ok(());
        }
        match name {
            "model" => model = model_name(name, value)?,
            "prompt" => prompt = Some(value),
            "add_special_tokens" => special = Some(boolean(name, &value)?),
            "return_token_strs" => strs = boolean(name, &value)?,
            _ => of_chat.push((name.to_owned(), value)),
        }
        Ok(())
    })?;
    // As vLLM reads the union of its two classes: a chat if it is one, and otherwise a text, whatever else there is.
    let chat = if of_chat.iter().any(|(name, _)| name == "messages") {
        Some(chat_input(of_chat))
    } else {
        None
    };
    let input = match (prompt, chat) {
        (_, Some(Ok(chat))) => chat,
        (Some(prompt), Some(Err(_))) if prompt.is_text() => {
            TokenizeInput::Prompt(text("prompt", prompt)?)
        }
        (_, Some(Err(error))) => return Err(error),
        (Some(prompt), None) => TokenizeInput::Prompt(text("prompt", prompt)?),
        (None, None) => return Err(missing("prompt")),
    };
    let is_chat = matches!(input, TokenizeInput::Chat { .. });
    Ok(TokenizeRequest {
        model,
        input,
        add_special_tokens: special.unwrap_or(!is_chat),
        return_token_strs: strs,
    })
}

/// Fields of chats.
const CHAT_FIELDS: [&str; 6] = [
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
    "chat_template",
];

/// The chat of these fields.
fn chat_input(fields: Vec<(String, Json<'_>)>) -> Result<TokenizeInput<'_>, ApiError> {
    let mut chat = Vec::new();
    let (mut opened, mut continues) = (None, false);
    let (mut tools, mut kwargs, mut template) = (Vec::new(), Vec::new(), None);
    for (name, value) in fields {
        match &*name {
            "messages" => chat = messages(&name, value)?,
            "add_generation_prompt" => opened = Some(boolean(&name, &value)?),
            "continue_final_message" => continues = boolean(&name, &value)?,
            "tools" => tools = form::shown_tools(&name, value)?,
            "chat_template_kwargs" => kwargs = template_kwargs(&name, value)?,
            _ => template = Some(text(&name, value)?),
        }
    }
    Ok(TokenizeInput::Chat {
        add_generation_prompt: opens_turn(continues, opened, chat.last())?,
        continue_final_message: continues,
        messages: chat,
        tools,
        template_kwargs: kwargs,
        template,
    })
}

/// Body of the answer to `/tokenize`. `token_strs`, if asked for, has one entry a token.
pub fn tokenize_json(
    tokens: &[TokenId],
    max_model_len: u32,
    token_strs: Option<&[String]>,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + tokens.len() * 6);
    out.put(b"{\"count\":");
    json::integer(&mut out, tokens.len() as u64);
    out.put(b",\"max_model_len\":");
    json::integer(&mut out, u64::from(max_model_len));
    out.put(b",\"tokens\":[");
    for (at, token) in tokens.iter().enumerate() {
        if at > 0 {
            out.put(b",");
        }
        json::integer(&mut out, u64::from(*token));
    }
    out.put(b"],\"token_strs\":");
    match token_strs {
        None => out.put(b"null"),
        Some(strs) => {
            out.put(b"[");
            for (at, token) in strs.iter().enumerate() {
                if at > 0 {
                    out.put(b",");
                }
                json::string(&mut out, token);
            }
            out.put(b"]");
        }
    }
    out.put(b"}");
    out
}

/// A request to `/detokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest<'a> {
    /// `model`, if named.
    pub model: Option<Cow<'a, str>>,
    /// Tokens of the text; the caller checks them against the vocabulary.
    pub tokens: Vec<TokenId>,
}

/// Parses the body of `POST /detokenize`.
///
/// # Errors
/// [`ApiError`] 400 with the field at fault.
pub fn parse_detokenize(body: &[u8]) -> Result<DetokenizeRequest<'_>, ApiError> {
    let mut model = None;
    let mut ids = None;
    let known = |name: &str| matches!(name, "model" | "tokens");
    read_members(body, known, |name, value| {
        match (name, value) {
            (_, Json::Null) => {}
            ("model", value) => model = model_name(name, value)?,
            (_, value) => ids = Some(tokens(name, value)?),
        }
        Ok(())
    })?;
    Ok(DetokenizeRequest {
        model,
        tokens: ids.ok_or_else(|| missing("tokens"))?,
    })
}

/// Body of the answer to `/detokenize`.
pub fn detokenize_json(prompt: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(16 + prompt.len());
    out.put(b"{\"prompt\":");
    json::string(&mut out, prompt);
    out.put(b"}");
    out
}
/// Renders the chat in `body`, a request to `/tokenize`, at the Unix time `now_unix_s`.
///
/// # Errors
/// The fault of the request, the template or the chat.
pub fn render_chat_body(
    renderer: &mut ChatRenderer,
    body: &[u8],
    now_unix_s: u64,
) -> Result<String, String> {
    let request = parse_tokenize(body).map_err(|error| error.message)?;
    let TokenizeInput::Chat {
        messages,
        add_generation_prompt,
        continue_final_message,
        tools,
        template_kwargs,
        template,
    } = &request.input
    else {
        return Err("`prompt` has no template; send `messages`".into());
    };
    let options = ChatOptions {
        add_generation_prompt: *add_generation_prompt,
        continue_final_message: *continue_final_message,
        tools,
        template_kwargs,
        now_unix_s,
    };
    renderer
        .render(messages, &options, template.as_deref())
        .map_err(|error| error.to_string())
}
