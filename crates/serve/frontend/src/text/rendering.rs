//! Chats rendered without a tokenizer, to try templates.

use std::path::Path;

use super::hf::{self, Templates};
use super::template::ChatTemplate;
use super::{ChatOptions, Message, TextError};

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

    /// Renders a chat by the template of the directory, or by `template`, which came with the chat.
    ///
    /// # Errors
    /// The fault of the template or the chat.
    pub fn render(
        &mut self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
        template: Option<&str>,
    ) -> Result<String, TextError> {
        let templates = match template {
            Some(source) => self.parsed(source)?,
            None => &self.own,
        };
        templates.render_chat(messages, options)
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
