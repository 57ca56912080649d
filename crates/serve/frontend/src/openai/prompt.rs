//! The prompt of a request: a chat for the template, texts, or tokens.

use slipstream_structured::Tree;

use super::error::clip;
use super::members::{boolean, missing, text, tokens, wrong_type};
use super::messages::{messages, opens_turn};
use super::request::{Input, PromptInput};
use super::value::Json;
use super::{ApiError, CompletionApi};
use crate::text::Message;

/// Fields of the prompt as they were sent.
#[derive(Default)]
pub(super) struct RawPrompt<'a> {
    messages: Option<Vec<Message<'a>>>,
    prompts: Option<Vec<PromptInput<'a>>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: bool,
    template_kwargs: Vec<(String, Tree)>,
    reasoning_effort: Option<String>,
    add_special_tokens: Option<bool>,
}

impl<'a> RawPrompt<'a> {
    /// The fields that it takes.
    pub(super) const FIELDS: [&'static str; 7] = [
        "messages",
        "prompt",
        "add_special_tokens",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "reasoning_effort",
    ];

    /// Notes one of [`FIELDS`](Self::FIELDS).
    pub(super) fn take(&mut self, name: &str, value: Json<'a>) -> Result<(), ApiError> {
        match name {
            "messages" => self.messages = Some(messages(name, value)?),
            "prompt" => self.prompts = Some(prompts(name, value)?),
            "add_special_tokens" => self.add_special_tokens = Some(boolean(name, &value)?),
            "add_generation_prompt" => self.add_generation_prompt = Some(boolean(name, &value)?),
            "continue_final_message" => self.continue_final_message = boolean(name, &value)?,
            "chat_template_kwargs" => self.template_kwargs = template_kwargs(name, value)?,
            _ => self.reasoning_effort = Some(reasoning_effort(name, value)?),
        }
        Ok(())
    }

    /// The prompt, and whether it gets tokens such as BOS.
    pub(super) fn finish(self, kind: CompletionApi) -> Result<(Input<'a>, bool), ApiError> {
        let special = self.add_special_tokens;
        let special = special.unwrap_or(kind == CompletionApi::Completion);
        let input = match kind {
            CompletionApi::Chat => Input::Chat {
                continue_final_message: self.continue_final_message,
                add_generation_prompt: opens_turn(
                    self.continue_final_message,
                    self.add_generation_prompt,
                    self.messages.as_ref().and_then(|messages| messages.last()),
                )?,
                messages: self.messages.ok_or_else(|| missing("messages"))?,
                template_kwargs: with_effort(self.template_kwargs, self.reasoning_effort),
            },
            CompletionApi::Completion => {
                Input::Prompts(self.prompts.ok_or_else(|| missing("prompt"))?)
            }
        };
        Ok((input, special))
    }
}

/// A `reasoning_effort`. Source: `ReasoningEffort` in `vllm/renderers/params.py`.
fn reasoning_effort(path: &str, value: Json<'_>) -> Result<String, ApiError> {
    const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
    let effort = text(path, value)?;
    if EFFORTS.contains(&&*effort) {
        return Ok(effort.into_owned());
    }
    Err(ApiError::invalid(
        path,
        format!(
            "`{path}` is {:?}; it must be one of {}",
            clip(&effort),
            EFFORTS.join(", ")
        ),
    ))
}

/// The template's variables with those of an effort. Source: `build_chat_params` in
/// `vllm/entrypoints/openai/chat_completion/protocol.py`.
fn with_effort(mut kwargs: Vec<(String, Tree)>, effort: Option<String>) -> Vec<(String, Tree)> {
    let Some(effort) = effort else {
        return kwargs;
    };
    if !kwargs.iter().any(|(name, _)| name == "enable_thinking") {
        kwargs.push(("enable_thinking".into(), Tree::Bool(effort != "none")));
    }
    kwargs.retain(|(name, _)| name != "reasoning_effort");
    kwargs.push(("reasoning_effort".into(), Tree::Text(effort)));
    kwargs
}

pub(super) fn template_kwargs(
    path: &str,
    value: Json<'_>,
) -> Result<Vec<(String, Tree)>, ApiError> {
    let wrong = wrong_type(path, "an object", &value);
    let Tree::Object(members) = value.into_tree() else {
        return Err(wrong);
    };
    // Arguments of `apply_chat_template`, which vLLM sets itself (`resolve_chat_template_kwargs` in `vllm/renderers/hf.py`).
    for name in ["chat_template", "tokenize"] {
        if members.iter().any(|(known, _)| known == name) {
            let at = format!("{path}.{name}");
            let message = format!("`{at}` is not a variable of the template; leave it out");
            return Err(ApiError::invalid(&at, message));
        }
    }
    Ok(members)
}

pub(super) fn prompts<'a>(path: &str, value: Json<'a>) -> Result<Vec<PromptInput<'a>>, ApiError> {
    const WANTED: &str =
        "a string, an array of strings, an array of token ids, or an array of such";
    let prompts = match value {
        Json::Text(text) => vec![PromptInput::Text(text)],
        Json::Tokens(tokens) => vec![PromptInput::Tokens(tokens)],
        // Numbers, one of which is no token id.
        Json::Array(elements)
            if elements
                .first()
                .is_some_and(|of| matches!(of, Json::Bool(_)) || of.is_number()) =>
        {
            vec![PromptInput::Tokens(tokens(path, Json::Array(elements))?)]
        }
        Json::Array(elements) => elements
            .into_iter()
            .enumerate()
            .map(|(at, element)| match element {
                Json::Text(text) => Ok(PromptInput::Text(text)),
                ids @ (Json::Tokens(_) | Json::Array(_)) => {
                    Ok(PromptInput::Tokens(tokens(&format!("{path}.{at}"), ids)?))
                }
                other => Err(wrong_type(
                    &format!("{path}.{at}"),
                    "a string or an array of token ids",
                    &other,
                )),
            })
            .collect::<Result<_, ApiError>>()?,
        other => return Err(wrong_type(path, WANTED, &other)),
    };
    let is_text = |prompt: &PromptInput<'_>| matches!(prompt, PromptInput::Text(_));
    if let Some(at) = prompts
        .iter()
        .position(|prompt| is_text(prompt) != is_text(&prompts[0]))
    {
        return Err(ApiError::invalid(
            format!("{path}.{at}"),
            format!("`{path}` mixes texts and lists of token ids; send them as two requests"),
        ));
    }
    if prompts.is_empty() {
        return Err(ApiError::invalid(
            path,
            format!("`{path}` is empty; send at least one prompt"),
        ));
    }
    let empty = |prompt: &PromptInput<'_>| match prompt {
        PromptInput::Text(text) => text.is_empty(),
        PromptInput::Tokens(tokens) => tokens.is_empty(),
    };
    if let Some(at) = prompts.iter().position(empty) {
        let at = if prompts.len() == 1 {
            path.to_owned()
        } else {
            format!("{path}.{at}")
        };
        return Err(ApiError::invalid(
            at.clone(),
            format!("`{at}` is empty; a prompt needs at least one token"),
        ));
    }
    Ok(prompts)
}
