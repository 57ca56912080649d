//! The text of an answer that grows token by token.

use slipstream_base::TokenId;

use super::TextModel;

/// Joins the bytes of tokens into text, and keeps the bytes of a character until it is whole.
#[derive(Clone, Debug, Default)]
pub struct Detokenizer {
    /// The beginning of a character; at most 3 bytes.
    partial: Vec<u8>,
}

impl Detokenizer {
    /// Whether no bytes are kept, so that a token which is text on its own can be given out as is.
    #[inline]
    pub fn is_clean(&self) -> bool {
        self.partial.is_empty()
    }

    /// Appends to `out` the text that `token` completes. Special tokens have none. Bytes that can
    /// never become a character turn into U+FFFD.
    pub fn push(&mut self, model: &TextModel, token: TokenId, out: &mut String) {
        if model.is_special(token) {
            return;
        }
        self.partial.extend_from_slice(model.token_bytes(token));
        loop {
            match std::str::from_utf8(&self.partial) {
                Ok(text) => {
                    out.push_str(text);
                    self.partial.clear();
                    return;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    let text = std::str::from_utf8(&self.partial[..valid]);
                    out.push_str(text.expect("valid up to there"));
                    let Some(bad) = error.error_len() else {
                        self.partial.drain(..valid);
                        return;
                    };
                    out.push('\u{fffd}');
                    self.partial.drain(..valid + bad);
                }
            }
        }
    }

    /// The answer has ended: the beginning of a character that never came turns into U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.partial.is_empty() {
            out.push('\u{fffd}');
            self.partial.clear();
        }
    }
}
