//! `POST /tokenize` and `POST /detokenize`.

use crate::door::clock::now_unix_s;
use crate::door::service::Service;
use crate::openai::{
    ApiError, TokenizeInput, detokenize_json, parse_detokenize, parse_tokenize, tokenize_json,
};
use crate::text::{ChatOptions, TextError};
use crate::tokens::generate;

/// The answer to a body of `/tokenize`.
pub(crate) fn tokenize(service: &Service, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let parsed = parse_tokenize(body)?;
    generate::check_model(service, parsed.model.as_deref())?;
    let mut tokens = Vec::new();
    match &parsed.input {
        TokenizeInput::Prompt(prompt) => {
            service
                .text
                .encode(prompt, parsed.add_special_tokens, &mut tokens);
        }
        TokenizeInput::Chat {
            messages,
            add_generation_prompt,
            continue_final_message,
            tools,
            template_kwargs,
            template,
        } => {
            // As in vLLM unless it was started to trust them.
            if template.is_some() {
                return Err(ApiError::unsupported(
                    "chat_template",
                    "`chat_template` is not taken from requests: the template of the model's tokenizer is used; \
                     leave it out, or try a template with `slipstream tokenizer render`",
                ));
            }
            let with_images = generate::show_images(service, messages, usize::MAX)?;
            let options = ChatOptions {
                add_generation_prompt: *add_generation_prompt,
                continue_final_message: *continue_final_message,
                tools,
                template_kwargs,
                now_unix_s: now_unix_s(),
            };
            service
                .text
                .encode_chat(
                    with_images.as_deref().unwrap_or(messages),
                    &options,
                    &mut tokens,
                )
                .map_err(|error| match error {
                    TextError::TemplateUnsupported { .. } => {
                        ApiError::failed(500, error.to_string())
                    }
                    error => ApiError::invalid("messages", error.to_string()),
                })?;
        }
    }
    let strings: Option<Vec<String>> = parsed.return_token_strs.then(|| {
        let names = tokens.iter().map(|&token| service.text.token_name(token));
        names.collect()
    });
    Ok(tokenize_json(
        &tokens,
        service.max_model_len,
        strings.as_deref(),
    ))
}

/// The answer to a body of `/detokenize`.
pub(crate) fn detokenize(service: &Service, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let parsed = parse_detokenize(body)?;
    generate::check_model(service, parsed.model.as_deref())?;
    generate::check_tokens(service, "tokens", &parsed.tokens)?;
    let text = service.text.decode(&parsed.tokens);
    Ok(detokenize_json(&text))
}
