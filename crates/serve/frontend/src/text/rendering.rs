//! Chats rendered without a tokenizer, to try templates.

use std::path::Path;

use super::hf::{self, Templates};
use super::template::ChatTemplate;
use super::{ChatOptions, TextError};
use crate::openai::{TokenizeInput, parse_tokenize};

/// Renders chats by the template of a tokenizer's directory, or by one that comes with the chat.
#[derive(Default)]
pub struct ChatRenderer {
    own: Templates,
    /// The last template that came with a chat, with its source.
    last: Option<(String, Templates)>,
}

impl ChatRenderer {
    /// Reads the templates in `dir`.
    ///
    /// # Errors
    /// [`TextError`] if a file or a template cannot be read.
    pub fn load(dir: &Path) -> Result<ChatRenderer, TextError> {
        Ok(ChatRenderer {
            own: hf::templates(dir)?,
            last: None,
        })
    }

    /// Renders the chat in `body`, a request to `/tokenize`, at the Unix time `now_unix_s`.
    ///
    /// # Errors
    /// The fault of the request, the template or the chat.
    pub fn render(&mut self, body: &[u8], now_unix_s: u64) -> Result<String, String> {
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
        let templates = match template {
            Some(source) => self.parsed(source).map_err(|error| error.to_string())?,
            None => &self.own,
        };
        templates
            .render_chat(messages, &options)
            .map_err(|error| error.to_string())
    }

    fn parsed(&mut self, source: &str) -> Result<&Templates, TextError> {
        if self.last.as_ref().is_none_or(|(last, _)| last != source) {
            let special = self.own.special.clone();
            let template = ChatTemplate::new(source, "the request", special)?;
            let templates = Templates {
                template: Some(template),
                ..Templates::default()
            };
            self.last = Some((source.to_owned(), templates));
        }
        Ok(self
            .last
            .as_ref()
            .map_or(&self.own, |(_, templates)| templates))
    }
}
