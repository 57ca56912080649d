//! Tokenizers in Hugging Face's form: a directory with `tokenizer.json`, and a chat template in
//! `tokenizer_config.json` or `chat_template.jinja`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use slipstream_base::TokenId;
use slipstream_base::mix;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Decoder, Tokenizer};

use super::template::ChatTemplate;
use super::{ChatOptions, Message, TextError, fast};

/// Files of a directory.
pub(super) struct Hf {
    tokenizer: Tokenizer,
    fast: Result<fastokens::Tokenizer, String>,
    templates: Templates,
    /// Times that a text may be longer than the text of its tokens.
    shrinks_to: usize,
}

/// Data that is derived from it once.
pub(super) struct Loaded {
    pub(super) hf: Hf,
    /// Bytes of each token, and whether it is special. Shape `[vocab]`.
    pub(super) tokens: Vec<(Vec<u8>, bool)>,
    pub(super) eos: TokenId,
    pub(super) output: Vec<TokenId>,
    pub(super) first: Vec<TokenId>,
}

/// Reads the directory `dir`; with `answers`, the vocabulary must have tokens that answers can be made of.
pub(super) fn load(dir: &Path, answers: bool) -> Result<Loaded, TextError> {
    let path = dir.join("tokenizer.json");
    let json = read(&path)?;
    let mut tokenizer = Tokenizer::from_bytes(&json).map_err(|error| TextError::Parse {
        path,
        message: error.to_string(),
    })?;
    // A file may ask for every text to be cut or padded; prompts are neither.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .expect("no truncation is always possible");
    let config = Config::read(dir)?;
    let eos = match (config.eos.as_deref()).and_then(|name| tokenizer.token_to_id(name)) {
        Some(eos) => eos,
        // Prompts end without one.
        None if !answers => TokenId::MAX,
        None => {
            return Err(TextError::Eos {
                dir: dir.into(),
                named: config.eos,
            });
        }
    };
    let (origin, templates) = (config.origin.clone(), config.templates()?);
    let spelling = spelling(&tokenizer);
    if let (true, Spelling::Unknown(decoder)) = (answers, spelling) {
        return Err(TextError::Decoder(decoder));
    }
    let tokens = token_bytes(&tokenizer, spelling)?;
    let shrinks_to = match spelling {
        // Without a normalizer, and with a token for each byte, the tokens' text is the text.
        Spelling::ByteLevel if tokenizer.get_normalizer().is_none() => 1,
        Spelling::ByteLevel | Spelling::Metaspace => 4,
        // The token for the unknown stands for a word of any length.
        Spelling::Prefixed | Spelling::Suffixed | Spelling::Unknown(_) => usize::MAX,
    };
    let mut hf = Hf {
        tokenizer,
        fast: Err("not loaded".to_owned()),
        templates,
        shrinks_to,
    };
    // The library decides which tokens are safe; the fast encoder must agree with it about them.
    let output = output_vocab(&hf, &tokens, spelling);
    hf.fast = fast::load(&json, &hf.tokenizer, &text_of(&tokens, &output));
    let (output, first) = if answers {
        let first = first_vocab(&hf, &tokens, &output, &origin)?;
        (output, first)
    } else {
        (Vec::new(), Vec::new())
    };
    Ok(Loaded {
        hf,
        tokens,
        eos,
        output,
        first,
    })
}

impl Hf {
    pub(super) fn encode(&self, text: &str, add_special_tokens: bool, out: &mut Vec<TokenId>) {
        if let Ok(fast) = &self.fast
            && fast::takes(text)
            && let Ok(tokens) = fast.encode_with_special_tokens(text, add_special_tokens)
        {
            out.extend_from_slice(&tokens);
            return;
        }
        // The one failure that the library knows here is a text with no token, from a vocabulary
        // that is neither complete nor has a token for the unknown; such text has no tokens.
        if let Ok(encoding) = self.tokenizer.encode_fast(text, add_special_tokens) {
            out.extend_from_slice(encoding.get_ids());
        }
    }

    /// Times that a text may be longer than the text of its tokens.
    pub(super) fn shrinks_to(&self) -> usize {
        self.shrinks_to
    }

    /// Why the fast encoder is not used, if it is not.
    pub(super) fn slow(&self) -> Option<&str> {
        self.fast.as_ref().err().map(String::as_str)
    }

    /// Returns the text of `tokens`, as the library's decoder joins them; `None` if it cannot.
    pub(super) fn decode(&self, tokens: &[TokenId]) -> Option<String> {
        self.tokenizer.decode(tokens, false).ok()
    }

    /// The name of `token` in the vocabulary; empty if it has none.
    pub(super) fn token_name(&self, token: TokenId) -> String {
        self.tokenizer.id_to_token(token).unwrap_or_default()
    }

    pub(super) fn render_chat(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
    ) -> Result<String, TextError> {
        self.templates.render_chat(messages, options)
    }
}

impl Templates {
    pub(super) fn render_chat(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
    ) -> Result<String, TextError> {
        let own = self
            .tool_template
            .as_ref()
            .filter(|_| !options.tools.is_empty());
        let template = own
            .or(self.template.as_ref())
            .ok_or(TextError::NoTemplate)?;
        if options.continue_final_message {
            template.render_open(messages, options)
        } else {
            template.render(messages, options)
        }
    }
}

/// Reads a file of a tokenizer, for a process that starts.
fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    let mut bytes = slipstream_os::files::read(path).map_err(|source| TextError::Read {
        path: path.into(),
        source,
    })?;
    if bytes.starts_with("\u{feff}".as_bytes()) {
        bytes.drain(..3);
    }
    Ok(bytes)
}

/// The parts of `tokenizer_config.json` and its companions that matter here.
#[derive(Default)]
struct Config {
    template: Option<String>,
    /// Template for chats with tools, if there is another one for them.
    tool_template: Option<String>,
    /// File of the template.
    origin: String,
    eos: Option<String>,
    /// Special tokens by the names that templates have for them.
    special: Vec<(String, String)>,
}

impl Config {
    fn read(dir: &Path) -> Result<Config, TextError> {
        let mut config = Config::default();
        let path = dir.join("tokenizer_config.json");
        if path.exists() {
            config.origin = path.display().to_string();
            let json: serde_json::Value =
                serde_json::from_slice(&read(&path)?).map_err(|error| TextError::Parse {
                    path,
                    message: error.to_string(),
                })?;
            config.eos = special_name(&json["eos_token"]);
            let named = json.as_object().into_iter().flatten();
            let named = named.filter(|(name, _)| name.ends_with("_token"));
            config.special = named
                .filter_map(|(name, token)| Some((name.clone(), special_name(token)?)))
                .collect();
            config.template = template_source(&json["chat_template"], "default");
            config.tool_template = template_source(&json["chat_template"], "tool_use");
        }
        // Files of their own win, as in `transformers`.
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            config.origin = path.display().to_string();
            config.template = Some(read_template(path)?);
            config.tool_template = None;
        }
        let path = dir.join("additional_chat_templates/tool_use.jinja");
        if path.exists() {
            config.tool_template = Some(read_template(path)?);
        }
        Ok(config)
    }
}

impl Config {
    fn templates(self) -> Result<Templates, TextError> {
        let parse = |source: &Option<String>| {
            let new =
                |source: &String| ChatTemplate::new(source, &self.origin, self.special.clone());
            source.as_ref().map(new).transpose()
        };
        Ok(Templates {
            template: parse(&self.template)?,
            tool_template: parse(&self.tool_template)?,
            special: self.special,
        })
    }
}

/// Reads the templates of the directory `dir`, without its tokenizer.
pub(super) fn templates(dir: &Path) -> Result<Templates, TextError> {
    Config::read(dir)?.templates()
}

/// Templates of a tokenizer.
#[derive(Default)]
pub(super) struct Templates {
    pub(super) template: Option<ChatTemplate>,
    pub(super) tool_template: Option<ChatTemplate>,
    /// Special tokens by the names that templates have for them.
    pub(super) special: Vec<(String, String)>,
}

fn read_template(path: PathBuf) -> Result<String, TextError> {
    String::from_utf8(read(&path)?).map_err(|error| TextError::Parse {
        path,
        message: error.to_string(),
    })
}

/// A special token is named by a string, or by an object with its `content`.
fn special_name(json: &serde_json::Value) -> Option<String> {
    json.as_str()
        .or_else(|| json["content"].as_str())
        .map(str::to_owned)
}

/// One template, which is the `default` one, or a list or an object of named ones.
fn template_source(json: &serde_json::Value, wanted: &str) -> Option<String> {
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    if let Some(list) = json.as_array() {
        let found = list.iter().find(|entry| entry["name"] == wanted);
        let only = list.first().filter(|_| wanted == "default");
        return text(&found.or(only)?["template"]);
    }
    match json {
        serde_json::Value::Object(named) => text(named.get(wanted)?),
        _ if wanted == "default" => text(json),
        _ => None,
    }
}

/// How tokens are written in the vocabulary.
#[derive(Clone, Copy, PartialEq)]
enum Spelling {
    /// Each byte as a printable character: GPT-2's way.
    ByteLevel,
    /// `▁` for a space, `<0x0A>` for a byte: SentencePiece's way.
    Metaspace,
    /// A word's first token has no mark: BERT's way, and words without parts.
    Prefixed,
    /// A word's last token has a mark, such as `</w>`.
    Suffixed,
    /// Another decoder, of this name.
    Unknown(&'static str),
}

fn spelling(tokenizer: &Tokenizer) -> Spelling {
    fn of(decoder: &DecoderWrapper) -> Option<Spelling> {
        match decoder {
            DecoderWrapper::ByteLevel(_) => Some(Spelling::ByteLevel),
            DecoderWrapper::Metaspace(_) | DecoderWrapper::ByteFallback(_) => {
                Some(Spelling::Metaspace)
            }
            DecoderWrapper::WordPiece(_) => Some(Spelling::Prefixed),
            DecoderWrapper::BPE(_) => Some(Spelling::Suffixed),
            DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().find_map(of),
            _ => None,
        }
    }
    let Some(decoder) = tokenizer.get_decoder() else {
        // The library writes a space between tokens.
        return Spelling::Prefixed;
    };
    of(decoder).unwrap_or(Spelling::Unknown(match decoder {
        DecoderWrapper::CTC(_) => "CTC",
        DecoderWrapper::Replace(_) => "Replace",
        DecoderWrapper::Fuse(_) => "Fuse",
        DecoderWrapper::Strip(_) => "Strip",
        _ => "Sequence",
    }))
}

/// The bytes that each token stands for, by id; ids without a token have none.
fn token_bytes(
    tokenizer: &Tokenizer,
    spelling: Spelling,
) -> Result<Vec<(Vec<u8>, bool)>, TextError> {
    let from_char = byte_level_chars();
    let vocab = tokenizer.get_vocab(true);
    let size = vocab.values().max().map_or(0, |&id| id as usize + 1);
    // Ids that are far apart would make a table of mostly nothing.
    const VOCAB_MAX: usize = 1 << 22;
    if size > VOCAB_MAX {
        return Err(TextError::VocabSize(size));
    }
    let mut tokens = vec![(Vec::new(), false); size];
    let decoder = tokenizer.get_decoder();
    // Added tokens too go through the decoder: a run of spaces may be one, written with `▁`.
    for (text, id) in vocab {
        tokens[id as usize].0 = match spelling {
            Spelling::ByteLevel => text
                .chars()
                .map(|c| from_char.get(c as usize).copied().flatten())
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| text.clone().into_bytes()),
            Spelling::Prefixed | Spelling::Suffixed => {
                { decoder.map_or_else(|| format!(" {text}"), |decoder| word(decoder, &text)) }
                    .into_bytes()
            }
            Spelling::Metaspace | Spelling::Unknown(_) => match byte_of(&text) {
                Some(byte) => vec![byte],
                None => decoder
                    .map_or(text.clone(), |decoder| piece(decoder, text))
                    .into_bytes(),
            },
        };
    }
    for (id, added) in tokenizer.get_added_tokens_decoder() {
        let token = &mut tokens[id as usize];
        token.1 = added.special;
        if matches!(spelling, Spelling::Prefixed | Spelling::Suffixed) {
            token.0 = added.content.into_bytes();
        }
    }
    Ok(tokens)
}

/// Decodes a token inside a text by `decoder`.
fn piece(decoder: &DecoderWrapper, text: String) -> String {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            let mut decoders = sequence.get_decoders().iter();
            decoders
                .try_fold(text, |text, decoder| {
                    // Behind `Fuse`, decoders see the text of all tokens.
                    match decoder {
                        DecoderWrapper::Fuse(_) => Err(text),
                        _ => Ok(piece(decoder, text)),
                    }
                })
                .unwrap_or_else(|text| text)
        }
        DecoderWrapper::Metaspace(metaspace) => text.replace(metaspace.get_replacement(), " "),
        DecoderWrapper::Replace(_) => {
            let replaced = decoder.decode_chain(vec![text.clone()]);
            replaced.map_or(text, |parts| parts.concat())
        }
        _ => text,
    }
}

/// Decodes a token of a word inside a text by `decoder`.
fn word(decoder: &DecoderWrapper, text: &str) -> String {
    match decoder {
        DecoderWrapper::WordPiece(of) => match text.strip_prefix(&of.prefix) {
            Some(rest) if !of.prefix.is_empty() => rest.to_owned(),
            _ => format!(" {text}"),
        },
        DecoderWrapper::BPE(of) => text.replace(&of.suffix, " "),
        DecoderWrapper::Sequence(of) => {
            let mut parts = of.get_decoders().iter();
            let words = |part: &&DecoderWrapper| {
                matches!(part, DecoderWrapper::WordPiece(_) | DecoderWrapper::BPE(_))
            };
            let found = parts.find(words);
            found.map_or_else(|| text.to_owned(), |decoder| word(decoder, text))
        }
        _ => text.to_owned(),
    }
}

/// `<0x0A>` is a byte.
fn byte_of(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// Which byte a character of a byte-level vocabulary stands for, by code point: printable Latin-1
/// characters stand for themselves, the other bytes in order for U+0100 and up. Source: GPT-2's
/// `bytes_to_unicode`, which the `tokenizers` library follows.
pub(super) fn byte_level_chars() -> Vec<Option<u8>> {
    let mut table = vec![None; 512];
    let mut next = 256;
    for byte in 0..=255u8 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let place = if printable {
            byte as usize
        } else {
            next += 1;
            next - 1
        };
        table[place] = Some(byte);
    }
    table
}

/// `bytes` as a byte-level vocabulary spells them.
pub(super) fn byte_level_name(bytes: &[u8]) -> String {
    let mut chars = ['\0'; 256];
    for (code, byte) in (0..).zip(byte_level_chars()) {
        if let Some(byte) = byte {
            chars[usize::from(byte)] = char::from_u32(code).unwrap_or_default();
        }
    }
    bytes.iter().map(|&byte| chars[usize::from(byte)]).collect()
}

/// Tokens in the output vocabulary at least: with fewer, answers would repeat blocks by chance.
const SAFE_MIN: usize = 64;
/// And at most: more give nothing, and each is checked.
const SAFE_MAX: usize = 4096;

/// Tokens that round-trip in any order.
fn output_vocab(hf: &Hf, tokens: &[(Vec<u8>, bool)], spelling: Spelling) -> Vec<TokenId> {
    let spaced = candidates(tokens, |bytes| {
        let word = match spelling {
            Spelling::Suffixed => bytes.strip_suffix(b" "),
            _ => bytes.strip_prefix(b" "),
        };
        word.is_some_and(|word| word.len() >= 2 && word.iter().all(u8::is_ascii_lowercase))
    });
    stable(hf, tokens, spaced)
}

/// Round-trip tokens that may be first where the template puts an answer, followed by words of `safe`.
fn first_vocab(
    hf: &Hf,
    tokens: &[(Vec<u8>, bool)],
    safe: &[TokenId],
    origin: &str,
) -> Result<Vec<TokenId>, TextError> {
    if safe.len() < SAFE_MIN {
        return Err(TextError::OutputVocab { found: safe.len() });
    }
    if hf.templates.template.is_none() {
        return Ok(safe.to_vec());
    }
    let fails = |error: TextError| TextError::TemplateFails {
        origin: origin.to_owned(),
        message: match error {
            TextError::Template(message) | TextError::TemplateUnsupported { message, .. } => {
                message
            }
            other => other.to_string(),
        },
    };
    if first_in_chat(hf, tokens, safe, safe[0]).map_err(fails)? {
        return Ok(safe.to_vec());
    }
    let bare = candidates(tokens, |bytes| {
        bytes.len() >= 2 && bytes.iter().all(u8::is_ascii_lowercase)
    });
    let first: Vec<TokenId> = bare
        .into_iter()
        .filter(|&token| first_in_chat(hf, tokens, safe, token).unwrap_or(false))
        .take(SAFE_MIN * 4)
        .collect();
    if first.len() < SAFE_MIN {
        // Some tokenizers write a space in front of the text behind a special token, so that no answer there comes
        // back as it was, the model's own included.
        return Ok(safe.to_vec());
    }
    Ok(first)
}

/// Evenly over the vocabulary, at most [`SAFE_MAX`] tokens that `fit`.
fn candidates(tokens: &[(Vec<u8>, bool)], fit: impl Fn(&[u8]) -> bool) -> Vec<TokenId> {
    let all: Vec<TokenId> = (0..)
        .zip(tokens)
        .filter(|(_, (bytes, special))| !special && fit(bytes))
        .map(|(id, _)| id)
        .collect();
    let stride = all.len().div_ceil(SAFE_MAX).max(1);
    all.into_iter().step_by(stride).collect()
}

/// Drops tokens until texts of them, in several orders, come back as they were.
fn stable(hf: &Hf, tokens: &[(Vec<u8>, bool)], mut safe: Vec<TokenId>) -> Vec<TokenId> {
    const CLEAN_ROUNDS: u64 = 3;
    let (mut round, mut clean) = (0, 0);
    while clean < CLEAN_ROUNDS && !safe.is_empty() {
        let mut order = safe.clone();
        order.sort_by_key(|&token| mix::draw(round, u64::from(token)));
        round += 1;
        let unsafe_ones = not_returned(hf, tokens, &order);
        if unsafe_ones.is_empty() {
            clean += 1;
        } else {
            clean = 0;
            safe.retain(|token| !unsafe_ones.contains(token));
        }
        // One that stands alone is not judged.
        if safe.len() < 2 {
            safe.clear();
        }
    }
    safe
}

/// Those of `order` whose text is not cut into tokens where they begin and end. The first one is not judged: a
/// normalizer may put a space in front of it.
fn not_returned(hf: &Hf, tokens: &[(Vec<u8>, bool)], order: &[TokenId]) -> HashSet<TokenId> {
    let mut got = Vec::new();
    hf.encode(&text_of(tokens, order), false, &mut got);
    // Places in the text at which tokens end, counted from its end, with their ids.
    let ends = |ids: &[TokenId]| -> Vec<(usize, TokenId)> {
        let mut behind = 0;
        let mut ends: Vec<(usize, TokenId)> = (ids.iter().rev())
            .map(|&token| {
                let end = behind;
                behind += tokens[token as usize].0.len();
                (end, token)
            })
            .collect();
        ends.reverse();
        ends
    };
    let returned: HashSet<(usize, TokenId)> = ends(&got).into_iter().collect();
    ends(order)
        .into_iter()
        .skip(1)
        .filter(|place| !returned.contains(place))
        .map(|(_, token)| token)
        .collect()
}

fn text_of(tokens: &[(Vec<u8>, bool)], ids: &[TokenId]) -> String {
    let bytes: Vec<u8> = ids
        .iter()
        .flat_map(|&id| tokens[id as usize].0.iter().copied())
        .collect();
    String::from_utf8(bytes).expect("candidates are ASCII")
}

/// Whether an answer that begins with `first` comes back as its tokens from the next turn's prompt.
fn first_in_chat(
    hf: &Hf,
    tokens: &[(Vec<u8>, bool)],
    safe: &[TokenId],
    first: TokenId,
) -> Result<bool, TextError> {
    let answer: Vec<TokenId> = [first].iter().chain(&safe[..8]).copied().collect();
    let text = text_of(tokens, &answer);
    let messages = [
        Message::new("user", "one"),
        Message::new("assistant", &text),
        Message::new("user", "two"),
    ];
    let options = ChatOptions {
        add_generation_prompt: true,
        continue_final_message: false,
        tools: &[],
        template_kwargs: &[],
        now_unix_s: 0,
    };
    let chat = hf.render_chat(&messages, &options)?;
    let mut got = Vec::new();
    hf.encode(&chat, false, &mut got);
    Ok(got.windows(answer.len()).any(|window| window == answer))
}
