//! `/tokenize` and `/detokenize`, in vLLM's shapes.

use std::borrow::Cow;

use slipstream_base::TokenId;

use super::json::{self, Out};
use super::request::{
    boolean, messages, missing, model as model_name, opens_turn, read_members, template_kwargs,
    text, tokens,
};
use super::value::Json;
use super::{ApiError, form};
use crate::structured::Tree;
use crate::text::Message;

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
    let mut chat = None;
    let mut special = None;
    let mut opened = None;
    let mut continues = false;
    let mut strs = false;
    let mut tools = Vec::new();
    let mut kwargs = Vec::new();
    let mut template = None;
    let known = |name: &str| {
        matches!(
            name,
            "model"
                | "prompt"
                | "messages"
                | "add_special_tokens"
                | "add_generation_prompt"
                | "continue_final_message"
                | "return_token_strs"
                | "tools"
                | "chat_template_kwargs"
                | "chat_template"
        )
    };
    read_members(body, known, |name, value| {
        if value == Json::Null {
            return Ok(());
        }
        match name {
            "model" => model = model_name(name, value)?,
            "prompt" => prompt = Some(text(name, value)?),
            "messages" => chat = Some(messages(name, value)?),
            "add_special_tokens" => special = Some(boolean(name, &value)?),
            "add_generation_prompt" => opened = Some(boolean(name, &value)?),
            "continue_final_message" => continues = boolean(name, &value)?,
            "tools" => tools = form::shown_tools(name, value)?,
            "chat_template_kwargs" => kwargs = template_kwargs(name, value)?,
            "chat_template" => template = Some(text(name, value)?),
            _ => strs = boolean(name, &value)?,
        }
        Ok(())
    })?;
    let is_chat = chat.is_some();
    let input = match (prompt, chat) {
        (Some(prompt), None) => TokenizeInput::Prompt(prompt),
        (None, Some(messages)) => TokenizeInput::Chat {
            add_generation_prompt: opens_turn(continues, opened, messages.last())?,
            continue_final_message: continues,
            messages,
            tools,
            template_kwargs: kwargs,
            template,
        },
        (None, None) => return Err(missing("prompt")),
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "messages",
                "both `prompt` and `messages` were sent; send one of them",
            ));
        }
    };
    Ok(TokenizeRequest {
        model,
        input,
        add_special_tokens: special.unwrap_or(!is_chat),
        return_token_strs: strs,
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
