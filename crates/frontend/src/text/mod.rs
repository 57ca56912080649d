//! Text into tokens and back.
//!
//! - [`TextModel`]: tokenizer, chat template and detokenization table of the served model; the
//!   built-in one needs no file.
//! - [`Detokenizer`]: the text of a growing answer, whole characters only.
//! - [`StopMatcher`]: stop strings in a growing text.

mod builtin;
mod detok;
mod stop;
mod trie;

use std::borrow::Cow;
use std::sync::Arc;

pub use detok::Detokenizer;
use slipstream_base::TokenId;
pub use stop::{StopHit, StopMatcher};

/// A message of a chat. Its parts were joined, if it had several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: Cow<'a, str>,
    /// What was said.
    pub content: Cow<'a, str>,
    /// Who said it, where roles do not tell.
    pub name: Option<Cow<'a, str>>,
}

/// How to render a chat.
#[derive(Clone, Copy, Debug)]
pub struct ChatOptions<'a> {
    /// Open the assistant's turn behind the last message.
    pub add_generation_prompt: bool,
    /// Variables for the template, from the request.
    pub template_kwargs: &'a [(String, serde_json::Value)],
    /// The time that templates may write into a prompt, Unix time, s.
    pub now_unix_s: u64,
}

/// Why a tokenizer could not be loaded, or could not render a chat.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The template refused the chat, or failed on it. The request's fault; the model goes on.
    #[error("the chat template refused the messages: {0}")]
    Template(String),
}

/// Tokenizer, chat template and detokenization table of a model.
///
/// Immutable after it was made, and shared by all shards through an `Arc`.
pub struct TextModel {
    codec: builtin::Builtin,
    table: Table,
    eos: TokenId,
    output_vocab: Arc<[TokenId]>,
    first_vocab: Arc<[TokenId]>,
}

impl TextModel {
    /// The built-in reversible tokenizer: the same for every model, from no file.
    pub fn builtin() -> TextModel {
        let codec = builtin::Builtin::new();
        let table = Table::new(codec.tokens().iter().map(|token| Entry {
            bytes: &token.bytes,
            special: token.special,
        }));
        let output_vocab: Arc<[TokenId]> = codec.output_vocab().into();
        TextModel {
            eos: codec.eos(),
            table,
            first_vocab: output_vocab.clone(),
            output_vocab,
            codec,
        }
    }

    /// Appends the tokens of `text`; with `add_special_tokens` those that the model wants around a
    /// prompt too (the built-in one wants none).
    pub fn encode(&self, text: &str, add_special_tokens: bool, out: &mut Vec<TokenId>) {
        let _ = add_special_tokens;
        self.codec.encode(text, out);
    }

    /// The chat as text, by the model's template.
    ///
    /// # Errors
    /// [`TextError::Template`] if the template refuses it.
    pub fn render_chat(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
    ) -> Result<String, TextError> {
        Ok(builtin::render_chat(
            messages,
            options.add_generation_prompt,
        ))
    }

    /// Appends the tokens of the chat as its template renders it.
    ///
    /// # Errors
    /// As [`render_chat`](Self::render_chat).
    pub fn encode_chat(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
        out: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        self.codec
            .encode_chat(messages, options.add_generation_prompt, out);
        Ok(())
    }

    /// Bytes of `token`; empty for one that is not in the vocabulary. Those of a special token are
    /// its name.
    #[inline]
    pub fn token_bytes(&self, token: TokenId) -> &[u8] {
        self.table.bytes(token)
    }

    /// The text of `token` as the inside of a JSON string, if it is whole characters on its own.
    /// Empty for special tokens, which answers leave out.
    #[inline]
    pub fn token_json(&self, token: TokenId) -> Option<&[u8]> {
        self.table.json(token)
    }

    /// Whether `token` marks something rather than being text: such tokens are left out of answers.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.table.is_special(token)
    }

    /// The text of `tokens`, special ones by name; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|&token| self.token_bytes(token))
            .copied()
            .collect();
        match String::from_utf8_lossy(&bytes) {
            Cow::Borrowed(_) => String::from_utf8(bytes).expect("`from_utf8_lossy` borrowed it"),
            Cow::Owned(text) => text,
        }
    }

    /// Tokens that answers may be made of: their text, in any order and in the place of an answer,
    /// becomes the same tokens again.
    pub fn output_vocab(&self) -> Arc<[TokenId]> {
        self.output_vocab.clone()
    }

    /// Tokens that answers may begin with: where the chat template trims what was said, a first
    /// token with a space in front would come back as another. Else the same as
    /// [`output_vocab`](Self::output_vocab).
    pub fn first_vocab(&self) -> Arc<[TokenId]> {
        self.first_vocab.clone()
    }

    /// The token that ends an answer.
    pub fn eos(&self) -> TokenId {
        self.eos
    }

    /// Tokens in the vocabulary; ids are below it.
    pub fn vocab_size(&self) -> u32 {
        self.table.len()
    }
}

/// Bytes of every token, and the same escaped for JSON, each in one piece of memory.
#[derive(Debug)]
struct Table {
    bytes: Box<[u8]>,
    /// Token `t` has `bytes[starts[t]..starts[t + 1]]`.
    starts: Box<[u32]>,
    json: Box<[u8]>,
    json_starts: Box<[u32]>,
    flags: Box<[u8]>,
}

/// A token as the table takes it.
struct Entry<'a> {
    bytes: &'a [u8],
    special: bool,
}

const SPECIAL: u8 = 1;
/// Not UTF-8 on its own.
const PARTIAL: u8 = 2;

impl Table {
    fn new<'a>(entries: impl Iterator<Item = Entry<'a>>) -> Table {
        let (mut bytes, mut json, mut flags) = (Vec::new(), Vec::new(), Vec::new());
        let (mut starts, mut json_starts) = (vec![0], vec![0]);
        for entry in entries {
            bytes.extend_from_slice(entry.bytes);
            let mut flag = 0;
            if entry.special {
                flag |= SPECIAL;
            }
            match std::str::from_utf8(entry.bytes) {
                Ok(text) if !entry.special => crate::openai::escape(&mut json, text),
                Ok(_) => {}
                Err(_) => flag |= PARTIAL,
            }
            flags.push(flag);
            starts.push(bytes.len() as u32);
            json_starts.push(json.len() as u32);
        }
        Table {
            bytes: bytes.into(),
            starts: starts.into(),
            json: json.into(),
            json_starts: json_starts.into(),
            flags: flags.into(),
        }
    }

    fn len(&self) -> u32 {
        self.flags.len() as u32
    }

    #[inline]
    fn bytes(&self, token: TokenId) -> &[u8] {
        let at = token as usize;
        if at >= self.flags.len() {
            return &[];
        }
        &self.bytes[self.starts[at] as usize..self.starts[at + 1] as usize]
    }

    #[inline]
    fn json(&self, token: TokenId) -> Option<&[u8]> {
        let at = token as usize;
        if *self.flags.get(at)? & PARTIAL != 0 {
            return None;
        }
        Some(&self.json[self.json_starts[at] as usize..self.json_starts[at + 1] as usize])
    }

    fn is_special(&self, token: TokenId) -> bool {
        self.flags
            .get(token as usize)
            .is_some_and(|flag| flag & SPECIAL != 0)
    }
}
