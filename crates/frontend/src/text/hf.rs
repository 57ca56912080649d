//! Tokenizers in Hugging Face's form: a directory with `tokenizer.json`, and a chat template in
//! `tokenizer_config.json` or `chat_template.jinja`.

use std::collections::HashSet;
use std::io::Read;
use std::path::Path;

use slipstream_base::TokenId;
use slipstream_base::mix;
use tokenizers::Tokenizer;
use tokenizers::decoders::DecoderWrapper;

use super::template::ChatTemplate;
use super::{ChatOptions, Message, TextError, fast};

/// Files of a directory.
pub(super) struct Hf {
    tokenizer: Tokenizer,
    fast: Result<fastokens::Tokenizer, String>,
    template: Option<ChatTemplate>,
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

/// Reads the directory `dir`.
pub(super) fn load(dir: &Path) -> Result<Loaded, TextError> {
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
    let eos = config
        .eos
        .as_deref()
        .and_then(|name| tokenizer.token_to_id(name))
        .ok_or_else(|| TextError::Eos {
            dir: dir.into(),
            named: config.eos.clone(),
        })?;
    let template = config
        .template
        .map(|source| ChatTemplate::new(source, config.bos, config.eos))
        .transpose()?;
    let tokens = token_bytes(&tokenizer)?;
    // Without a normalizer, and with a token for each byte, the tokens' text is the text.
    let keeps =
        tokenizer.get_normalizer().is_none() && spelling(&tokenizer)? == Spelling::ByteLevel;
    let shrinks_to = if keeps { 1 } else { 4 };
    let mut hf = Hf {
        tokenizer,
        fast: Err("not loaded".to_owned()),
        template,
        shrinks_to,
    };
    // The library decides which tokens are safe; the fast encoder must agree with it about them.
    let (output, first) = safe_vocab(&hf, &tokens)?;
    hf.fast = fast::load(&json, &hf.tokenizer, &text_of(&tokens, &output));
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

    pub(super) fn render_chat(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
    ) -> Result<String, TextError> {
        match &self.template {
            Some(template) if options.continue_final_message => {
                template.render_open(messages, options)
            }
            Some(template) => template.render(messages, options),
            None => Err(TextError::NoTemplate),
        }
    }
}

/// Largest file of a tokenizer, bytes. Those of vocabularies of 256,000 tokens have some 35 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    let unreadable = |source| TextError::Read {
        path: path.into(),
        source,
    };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    // A path may be that of a device.
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(TextError::Parse {
            path: path.into(),
            message: format!("it is larger than {} MiB", FILE_BYTES_MAX >> 20),
        });
    }
    if bytes.starts_with("\u{feff}".as_bytes()) {
        bytes.drain(..3);
    }
    Ok(bytes)
}

/// The parts of `tokenizer_config.json` and its companions that matter here.
#[derive(Default)]
struct Config {
    template: Option<String>,
    bos: Option<String>,
    eos: Option<String>,
}

impl Config {
    fn read(dir: &Path) -> Result<Config, TextError> {
        let mut config = Config::default();
        let path = dir.join("tokenizer_config.json");
        if path.exists() {
            let json: serde_json::Value =
                serde_json::from_slice(&read(&path)?).map_err(|error| TextError::Parse {
                    path,
                    message: error.to_string(),
                })?;
            config.bos = special_name(&json["bos_token"]);
            config.eos = special_name(&json["eos_token"]);
            config.template = template_source(&json["chat_template"]);
        }
        // A file of its own wins, as in `transformers`.
        let path = dir.join("chat_template.jinja");
        if path.exists() {
            let source = String::from_utf8(read(&path)?).map_err(|error| TextError::Parse {
                path,
                message: error.to_string(),
            })?;
            config.template = Some(source);
        }
        Ok(config)
    }
}

/// A special token is named by a string, or by an object with its `content`.
fn special_name(json: &serde_json::Value) -> Option<String> {
    json.as_str()
        .or_else(|| json["content"].as_str())
        .map(str::to_owned)
}

/// One template, or a list of named ones of which `default` is for chats without tools.
fn template_source(json: &serde_json::Value) -> Option<String> {
    let named = |list: &Vec<serde_json::Value>| {
        let template = list
            .iter()
            .find(|entry| entry["name"] == "default")
            .or(list.first())?;
        template["template"].as_str().map(str::to_owned)
    };
    json.as_str()
        .map(str::to_owned)
        .or_else(|| json.as_array().and_then(named))
}

/// How tokens are written in the vocabulary.
#[derive(Clone, Copy, PartialEq)]
enum Spelling {
    /// Each byte as a printable character: GPT-2's way.
    ByteLevel,
    /// `▁` for a space, `<0x0A>` for a byte: SentencePiece's way.
    Metaspace,
}

fn spelling(tokenizer: &Tokenizer) -> Result<Spelling, TextError> {
    fn of(decoder: &DecoderWrapper) -> Option<Spelling> {
        match decoder {
            DecoderWrapper::ByteLevel(_) => Some(Spelling::ByteLevel),
            DecoderWrapper::Metaspace(_) | DecoderWrapper::ByteFallback(_) => {
                Some(Spelling::Metaspace)
            }
            DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().find_map(of),
            _ => None,
        }
    }
    tokenizer
        .get_decoder()
        .and_then(of)
        .ok_or(TextError::Decoder)
}

/// The bytes that each token stands for, by id; ids without a token have none.
fn token_bytes(tokenizer: &Tokenizer) -> Result<Vec<(Vec<u8>, bool)>, TextError> {
    let spelling = spelling(tokenizer)?;
    let from_char = byte_level_chars();
    let vocab = tokenizer.get_vocab(true);
    let size = vocab.values().max().map_or(0, |&id| id as usize + 1);
    // Ids that are far apart would make a table of mostly nothing.
    const VOCAB_MAX: usize = 1 << 22;
    if size > VOCAB_MAX {
        return Err(TextError::VocabSize(size));
    }
    let mut tokens = vec![(Vec::new(), false); size];
    for (text, id) in vocab {
        tokens[id as usize].0 = match spelling {
            Spelling::ByteLevel => text
                .chars()
                .map(|c| from_char.get(c as usize).copied().flatten())
                .collect::<Option<Vec<u8>>>()
                .unwrap_or_else(|| text.clone().into_bytes()),
            Spelling::Metaspace => match byte_of(&text) {
                Some(byte) => vec![byte],
                None => text.replace('▁', " ").into_bytes(),
            },
        };
    }
    for (id, added) in tokenizer.get_added_tokens_decoder() {
        tokens[id as usize] = (added.content.into_bytes(), added.special);
    }
    Ok(tokens)
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

/// Tokens in the output vocabulary at least: with fewer, answers would repeat blocks by chance.
const SAFE_MIN: usize = 64;
/// And at most: more give nothing, and each is checked.
const SAFE_MAX: usize = 4096;

/// Tokens that come back as themselves, in any order and where the template puts an answer; and
/// those that may be first there.
fn safe_vocab(
    hf: &Hf,
    tokens: &[(Vec<u8>, bool)],
) -> Result<(Vec<TokenId>, Vec<TokenId>), TextError> {
    let spaced = candidates(tokens, |bytes| {
        bytes.len() >= 3 && bytes[0] == b' ' && bytes[1..].iter().all(u8::is_ascii_lowercase)
    });
    let safe = stable(hf, tokens, spaced);
    if safe.len() < SAFE_MIN {
        return Err(TextError::OutputVocab { found: safe.len() });
    }
    let first = if hf.template.is_none() || first_in_chat(hf, tokens, &safe, safe[0]) {
        safe.clone()
    } else {
        let bare = candidates(tokens, |bytes| {
            bytes.len() >= 2 && bytes.iter().all(u8::is_ascii_lowercase)
        });
        let first: Vec<TokenId> = bare
            .into_iter()
            .filter(|&token| first_in_chat(hf, tokens, &safe, token))
            .take(SAFE_MIN * 4)
            .collect();
        if first.len() < SAFE_MIN {
            return Err(TextError::OutputVocab { found: first.len() });
        }
        first
    };
    Ok((safe, first))
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
    }
    safe
}

/// Those of `order` whose text is not cut into tokens where they begin and end.
fn not_returned(hf: &Hf, tokens: &[(Vec<u8>, bool)], order: &[TokenId]) -> HashSet<TokenId> {
    let mut got = Vec::new();
    hf.encode(&text_of(tokens, order), false, &mut got);
    // Places in the text at which the tokens that came back begin, with their ids.
    let mut at = 0;
    let starts: HashSet<(usize, TokenId)> = got
        .iter()
        .map(|&token| {
            let start = at;
            at += tokens[token as usize].0.len();
            (start, token)
        })
        .collect();
    let mut at = 0;
    order
        .iter()
        .filter(|&&token| {
            let start = at;
            at += tokens[token as usize].0.len();
            !starts.contains(&(start, token))
        })
        .copied()
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
fn first_in_chat(hf: &Hf, tokens: &[(Vec<u8>, bool)], safe: &[TokenId], first: TokenId) -> bool {
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
    let Ok(chat) = hf.render_chat(&messages, &options) else {
        return false;
    };
    let mut got = Vec::new();
    hf.encode(&chat, false, &mut got);
    got.windows(answer.len()).any(|window| window == answer)
}
