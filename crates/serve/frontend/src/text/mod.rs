//! Text into tokens and back.
//!
//! - [`TextModel`]: tokenizer, chat template and detokenization table of the served model; the
//!   built-in one needs no file.
//! - [`Detokenizer`]: the text of a growing answer, whole characters only.
//! - [`ChatRenderer`]: chats as a template renders them, without a tokenizer.
//! - [`StopMatcher`]: stop strings in a growing text.

mod builtin;
mod clock;
mod detok;
mod export;
mod fast;
mod hf;
mod jinja;
mod pieces;
mod rendering;
mod stop;
mod template;
mod trie;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use detok::Detokenizer;
pub use export::builtin_files;
pub use rendering::ChatRenderer;
use slipstream_base::width::to_u32;
use slipstream_base::{TokenId, mix};

use slipstream_structured::Tree;
pub use stop::{StopHit, StopMatcher};

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// `system`, `user`, `assistant`, or what else the template knows.
    pub role: Cow<'a, str>,
    /// The text. Parts are joined by line breaks.
    pub content: Cow<'a, str>,
    /// The parts of `content`, if it came as a list or was left out: templates that loop over parts get them apart.
    pub parts: Option<Vec<std::ops::Range<usize>>>,
    /// The speaker, where roles do not suffice.
    pub name: Option<Cow<'a, str>>,
    /// Calls that it makes, or that it answers.
    pub tools: Option<Box<MessageTools>>,
    /// Reasoning of the model before the message.
    pub reasoning: Option<Cow<'a, str>>,
    /// Its images, in order.
    pub images: Vec<ImagePart>,
}

/// An image in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePart {
    /// Where it stands in the message's text, bytes. A line break separates it from the text.
    pub at: usize,
    /// Hash of its address or data: equal images have equal tokens.
    pub hash: u64,
}

/// Calls and results of tools in a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageTools {
    /// `tool_calls`, with `function.arguments` as objects, as templates take them.
    pub calls: Vec<Tree>,
    /// `tool_call_id`: the call that it answers.
    pub call_id: Option<String>,
}

impl<'a> Message<'a> {
    /// A message without a name.
    pub fn new(role: &'a str, content: &'a str) -> Message<'a> {
        Message {
            role: role.into(),
            content: content.into(),
            parts: None,
            name: None,
            tools: None,
            reasoning: None,
            images: Vec::new(),
        }
    }

    /// The calls that it makes.
    pub fn calls(&self) -> &[Tree] {
        self.tools.as_ref().map_or(&[], |tools| &tools.calls)
    }
}

/// How to render a chat.
#[derive(Clone, Copy, Debug)]
pub struct ChatOptions<'a> {
    /// Open the assistant's turn behind the last message.
    pub add_generation_prompt: bool,
    /// The answer continues the last message, which stays open. Not with `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Tools that the model may call, as the client sent them.
    pub tools: &'a [Tree],
    /// Variables for the template, from the request.
    pub template_kwargs: &'a [(String, Tree)],
    /// The time that templates may write into a prompt, Unix time, s.
    pub now_unix_s: u64,
}

/// Why a tokenizer could not be loaded, or could not render a chat.
///
/// Only [`Template`](TextError::Template), [`TemplateUnsupported`](TextError::TemplateUnsupported), [`TooLong`](TextError::TooLong) and
/// [`NoTemplate`](TextError::NoTemplate) come from a model that was loaded; it stays.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The template refused the chat, or failed on it. The request's fault.
    #[error("the chat template refused the messages: {0}")]
    Template(String),
    /// The template uses what Jinja2 has not, or what is not supported.
    #[error("the chat template uses what is not supported: {message}")]
    TemplateUnsupported {
        /// Its file.
        origin: String,
        /// The line, and the name.
        message: String,
    },
    /// The chat is longer than the caller takes. The request's fault.
    #[error("the chat has at least {tokens} tokens")]
    TooLong {
        /// Lower bound of its tokens.
        tokens: usize,
    },
    /// The tokenizer has no template.
    #[error(
        "the model's tokenizer has no chat template; send a prompt to /v1/completions, or add \
         `chat_template.jinja` to `model.tokenizer`"
    )]
    NoTemplate,
    /// A file cannot be read.
    #[error("{} cannot be read; `model.tokenizer` must be a directory with `tokenizer.json`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{} cannot be parsed: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The error, and its position.
        message: String,
    },
    /// The template is not valid Jinja.
    #[error("the chat template of {origin} is not valid Jinja: {message}")]
    TemplateSyntax {
        /// Its file.
        origin: String,
        /// The line, and the error.
        message: String,
    },
    /// The template renders no plain chat.
    #[error(
        "the chat template of {origin} fails on a chat of a user and an assistant: {message}; correct it, or \
         remove it if only /v1/completions is used"
    )]
    TemplateFails {
        /// Its file.
        origin: String,
        /// The line, and the error.
        message: String,
    },
    /// No end-of-sequence token.
    #[error(
        "{} names {} as end-of-sequence token; set `eos_token` in its `tokenizer_config.json` to a \
         token of the vocabulary",
        dir.display(), named.as_deref().unwrap_or("nothing")
    )]
    Eos {
        /// The directory.
        dir: PathBuf,
        /// The name in it.
        named: Option<String>,
    },
    /// The tokens cannot be turned into bytes.
    #[error(
        "answers cannot be made of the tokenizer's tokens: its decoder, `{0}`, is not `ByteLevel`, `Metaspace`, \
         `ByteFallback`, `WordPiece` or `BPEDecoder`; use another tokenizer, or the built-in one"
    )]
    Decoder(&'static str),
    /// The highest id is beyond reason.
    #[error("the tokenizer has ids up to {0}; at most 4,194,304 are taken")]
    VocabSize(usize),
    /// Too few tokens come back as themselves.
    #[error(
        "only {found} tokens of the tokenizer come back as themselves when an answer is tokenized \
         again, of 64 that are needed; use another tokenizer, or the built-in one"
    )]
    OutputVocab {
        /// Tokens that do.
        found: usize,
    },
}

/// Tokenizer, chat template and detokenization table of a model.
///
/// Immutable after it was made, and shared by all shards through an `Arc`.
pub struct TextModel {
    codec: Codec,
    table: Table,
    eos: TokenId,
    output_vocab: Arc<[TokenId]>,
    first_vocab: Arc<[TokenId]>,
    /// Bytes of the longest token, and of the longest one of answers as JSON.
    token_bytes_max: usize,
    answer_json_max: usize,
}

/// Cost of a tokenizer per byte of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EncodeCost {
    /// Some ns, and some bytes of memory.
    Low,
    /// About 1 µs, and hundreds of bytes.
    High,
}

enum Codec {
    Builtin(builtin::Builtin),
    HuggingFace(Box<hf::Hf>),
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
        let eos = codec.eos();
        TextModel::new(
            Codec::Builtin(codec),
            table,
            eos,
            output_vocab.clone(),
            output_vocab,
        )
    }

    fn new(
        codec: Codec,
        table: Table,
        eos: TokenId,
        output_vocab: Arc<[TokenId]>,
        first_vocab: Arc<[TokenId]>,
    ) -> TextModel {
        let answers = output_vocab.iter().chain(&*first_vocab);
        let json = |&token: &TokenId| table.json(token).map_or(0, <[u8]>::len);
        TextModel {
            token_bytes_max: (0..table.len())
                .map(|token| table.bytes(token).len())
                .max()
                .unwrap_or(0)
                .max(1),
            answer_json_max: answers.map(json).max().unwrap_or(0).max(1),
            codec,
            table,
            eos,
            output_vocab,
            first_vocab,
        }
    }

    /// The tokenizer in the directory `dir`: `tokenizer.json`, with special tokens and chat template
    /// from `tokenizer_config.json` or `chat_template.jinja`.
    ///
    /// May take seconds: checks which tokens round-trip.
    ///
    /// # Errors
    /// [`TextError`] if a file is missing or wrong, or if the tokenizer cannot be used for answers
    /// that become the same tokens again.
    pub fn load(dir: &Path) -> Result<TextModel, TextError> {
        hf::load(dir, true).map(TextModel::of)
    }

    /// As [`load`](Self::load), for prompts alone: a router writes no answers, so that any vocabulary will do.
    ///
    /// # Errors
    /// [`TextError`] if a file is missing or wrong.
    pub fn load_for_prompts(dir: &Path) -> Result<TextModel, TextError> {
        hf::load(dir, false).map(TextModel::of)
    }

    fn of(loaded: hf::Loaded) -> TextModel {
        let table = Table::new(loaded.tokens.iter().map(|(bytes, special)| Entry {
            bytes,
            special: *special,
        }));
        let codec = Codec::HuggingFace(Box::new(loaded.hf));
        let (output, first) = (loaded.output.into(), loaded.first.into());
        TextModel::new(codec, table, loaded.eos, output, first)
    }

    /// A lower bound of the tokens of a text of `bytes` bytes, without a look at it.
    ///
    /// Exact for tokenizers that keep every byte. Others may normalize a text to a shorter one: the bound
    /// allows for a quarter. 0 for vocabularies of words, whose token for the unknown has any length.
    pub fn tokens_min(&self, bytes: usize) -> usize {
        let shrinks = match &self.codec {
            Codec::Builtin(_) => 1,
            Codec::HuggingFace(hf) => hf.shrinks_to(),
        };
        bytes / self.token_bytes_max.saturating_mul(shrinks)
    }

    /// Bytes of the longest token of answers as the inside of a JSON string.
    pub(crate) fn answer_json_max(&self) -> usize {
        self.answer_json_max
    }

    /// Cost of encoding the text in `json`, a request's body.
    pub(crate) fn cost(&self, json: &[u8]) -> EncodeCost {
        match &self.codec {
            Codec::Builtin(_) => EncodeCost::Low,
            Codec::HuggingFace(hf) if hf.slow().is_none() && fast::takes_json(json) => {
                EncodeCost::Low
            }
            Codec::HuggingFace(_) => EncodeCost::High,
        }
    }

    /// Appends the tokens of `text`; with `add_special_tokens` those that the model wants around a
    /// prompt too (the built-in one wants none).
    pub fn encode(&self, text: &str, add_special_tokens: bool, out: &mut Vec<TokenId>) {
        match &self.codec {
            Codec::Builtin(builtin) => builtin.encode(text, out),
            Codec::HuggingFace(hf) => hf.encode(text, add_special_tokens, out),
        }
    }

    /// Why prompts are encoded by the `tokenizers` library instead of the fast encoder, which takes
    /// a hundredth of the time. `None` if the fast one is used, or the built-in tokenizer.
    pub fn slow_encoder(&self) -> Option<&str> {
        match &self.codec {
            Codec::Builtin(_) => None,
            Codec::HuggingFace(hf) => hf.slow(),
        }
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
        match &self.codec {
            Codec::Builtin(_) => Ok(builtin::render_chat(messages, options)),
            Codec::HuggingFace(hf) => hf.render_chat(messages, options),
        }
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
        self.encode_chat_within(messages, options, usize::MAX, out)
    }

    /// As [`encode_chat`](Self::encode_chat), if the chat's length does not show already that it has more
    /// than `tokens_max` tokens.
    ///
    /// # Errors
    /// [`TextError::TooLong`] otherwise.
    pub fn encode_chat_within(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
        tokens_max: usize,
        out: &mut Vec<TokenId>,
    ) -> Result<(), TextError> {
        let check = |bytes: usize| match self.tokens_min(bytes) {
            tokens if tokens > tokens_max => Err(TextError::TooLong { tokens }),
            _ => Ok(()),
        };
        match &self.codec {
            Codec::Builtin(builtin) => {
                check(messages.iter().map(|m| m.content.len()).sum())?;
                builtin.encode_chat(messages, options, out);
            }
            Codec::HuggingFace(hf) => {
                let text = hf.render_chat(messages, options)?;
                check(text.len())?;
                hf.encode(&text, false, out);
            }
        }
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

    /// The name of `token` in the vocabulary, such as `Ġthe`; empty for one that is not in it.
    pub fn token_name(&self, token: TokenId) -> String {
        match &self.codec {
            Codec::Builtin(_) if self.is_special(token) => {
                String::from_utf8_lossy(self.token_bytes(token)).into_owned()
            }
            Codec::Builtin(_) => hf::byte_level_name(self.token_bytes(token)),
            Codec::HuggingFace(hf) => hf.token_name(token),
        }
    }

    /// The text of `tokens`, special ones by name; bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        if let Codec::HuggingFace(hf) = &self.codec
            && let Some(text) = hf.decode(tokens)
        {
            return text;
        }
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

    /// Tokens that answers may begin with: where the chat template trims messages, a first
    /// token with a space in front would come back as another. Else the same as
    /// [`output_vocab`](Self::output_vocab), also if no token would come back.
    pub fn first_vocab(&self) -> Arc<[TokenId]> {
        self.first_vocab.clone()
    }

    /// Text of `tokens` tokens that stands for the image with `hash`.
    pub(crate) fn image_text(&self, hash: u64, tokens: u32) -> String {
        let vocab = &self.output_vocab;
        let word = |at| vocab[mix::index(mix::draw(hash, at), vocab.len())];
        let words: Vec<TokenId> = (0..u64::from(tokens)).map(word).collect();
        self.decode(&words)
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
                Ok(text) if !entry.special => crate::json::escape(&mut json, text),
                Ok(_) => {}
                Err(_) => flag |= PARTIAL,
            }
            flags.push(flag);
            starts.push(to_u32(bytes.len()));
            json_starts.push(to_u32(json.len()));
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
        to_u32(self.flags.len())
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

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::OnceLock;

    use super::*;

    /// One model for all tests: it takes a while to build without optimization.
    pub(crate) fn builtin() -> &'static TextModel {
        static MODEL: OnceLock<TextModel> = OnceLock::new();
        MODEL.get_or_init(TextModel::builtin)
    }

    #[test]
    fn tokens_have_bytes_and_json_and_special_ones_are_no_text() {
        let model = builtin();
        let newline = TokenId::from(b'\n');
        assert_eq!(model.token_bytes(newline), b"\n");
        assert_eq!(model.token_json(newline), Some(&b"\\n"[..]));
        assert_eq!(model.token_json(0xc3), None, "half a character");
        assert_eq!(model.token_bytes(model.eos()), b"<|im_end|>");
        assert_eq!(model.token_json(model.eos()), Some(&b""[..]));
        assert!(model.is_special(model.eos()) && !model.is_special(newline));
        let beyond = model.vocab_size();
        assert_eq!(model.token_bytes(beyond), b"");
        assert_eq!(model.token_json(beyond), None);
    }

    #[test]
    fn characters_are_given_out_whole() {
        let model = builtin();
        let mut detok = Detokenizer::default();
        let mut out = String::new();
        for (byte, so_far) in
            "aé\u{1f600}"
                .bytes()
                .zip(["a", "a", "aé", "aé", "aé", "aé", "aé\u{1f600}"])
        {
            detok.push(model, TokenId::from(byte), &mut out);
            assert_eq!(out, so_far);
        }
        // A broken character does not swallow what follows it.
        detok.push(model, 0xe2, &mut out);
        detok.push(model, TokenId::from(b'b'), &mut out);
        detok.push(model, model.eos(), &mut out);
        detok.push(model, 0xe2, &mut out);
        assert!(!detok.is_clean());
        detok.finish(&mut out);
        assert_eq!(out, "aé\u{1f600}\u{fffd}b\u{fffd}");
    }
}
