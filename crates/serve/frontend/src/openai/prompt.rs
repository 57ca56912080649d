//! The prompt of a request: a chat for the template, texts, or tokens.

use slipstream_structured::Tree;

use super::ApiError;
use super::error::clip;
use super::members::{text, tokens, wrong_type};
use super::request::PromptInput;
use super::value::Json;

/// A `reasoning_effort`. Source: `ReasoningEffort` in `vllm/renderers/params.py`.
pub(super) fn reasoning_effort(path: &str, value: Json<'_>) -> Result<String, ApiError> {
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
pub(super) fn with_effort(
    mut kwargs: Vec<(String, Tree)>,
    effort: Option<String>,
) -> Vec<(String, Tree)> {
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
