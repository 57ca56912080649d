//! The built-in tokenizer: no file, every text there and back, tokens that do not depend on what
//! stands next to them.
//!
//! A text is cut into pieces by one rule, and each piece into tokens, longest first:
//!
//! ```text
//! piece  =  [space] 1 to 16 ASCII letters  |  1 to 3 ASCII digits  |  any other character
//! ```
//!
//! Tokens are the 256 bytes (so that nothing is without one), numbers of 2 and 3 digits, common
//! words with and without a space in front and a capital, and fragments that are frequent in those
//! words. A piece that is a word is one token, whatever surrounds it: answers are made of such
//! words with a space in front, and become the same tokens when a client sends them back.
//!
//! The rule and the longest-match search are those of a `Split` pre-tokenizer, a `ByteLevel` one and
//! a `WordPiece` model of the `tokenizers` library, so that it can be written in that library's form
//! ([`builtin_files`](super::builtin_files)); a test compares the ids.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use slipstream_base::TokenId;
use slipstream_base::width::to_u32;
use slipstream_structured::Tree;

use super::pieces::{Pieces, WINDOW};
use super::trie::Trie;
use super::{ChatOptions, Message};

/// Letters in a piece at most. Longer runs (encoded data) are cut, which bounds the search.
pub(super) const LETTERS_MAX: usize = 16;
/// Digits in a piece at most.
pub(super) const DIGITS_MAX: usize = 3;

const END_OF_TEXT: &str = "<|endoftext|>";
const IM_START: &str = "<|im_start|>";
const IM_END: &str = "<|im_end|>";

/// Our own list of common English words, lower case, one a line.
static WORDS: &str = include_str!("../../assets/words.txt");

/// The tokenizer's tables.
pub(super) struct Builtin {
    tokens: Vec<Token>,
    /// Texts without special tokens: those are looked for on their own.
    trie: Trie,
    /// Those of its texts that are a whole short piece: most of any English text.
    pieces: Pieces,
    output: Vec<TokenId>,
}

/// A token of the vocabulary.
pub(super) struct Token {
    pub(super) bytes: Box<[u8]>,
    pub(super) special: bool,
}

impl Builtin {
    pub(super) fn new() -> Builtin {
        let words: Vec<&str> = WORDS.lines().filter(|word| !word.is_empty()).collect();
        let mut tokens = Vec::new();
        let mut seen = HashSet::new();
        let mut add = |bytes: Vec<u8>| {
            if seen.insert(bytes.clone()) {
                tokens.push(Token {
                    bytes: bytes.into(),
                    special: false,
                });
            }
        };
        // Byte `b` is token `b`: encoding relies on it.
        (0..=255u8).for_each(|byte| add(vec![byte]));
        for digits in 2..=to_u32(DIGITS_MAX) {
            (0..10u32.pow(digits))
                .for_each(|n| add(format!("{n:0width$}", width = digits as usize).into_bytes()));
        }
        fragments(&words).into_iter().for_each(&mut add);
        for word in &words {
            let capital = word[..1].to_ascii_uppercase() + &word[1..];
            for text in [*word, &capital] {
                add(format!(" {text}").into_bytes());
                add(text.as_bytes().to_vec());
            }
        }
        let entries = || tokens.iter().zip(0..).map(|(t, id)| (&*t.bytes, id));
        let trie = Trie::new(entries());
        let pieces = Pieces::new(entries());
        let output = words
            .iter()
            .map(|word| {
                let spaced = format!(" {word}");
                let (token, len) = trie.longest(spaced.as_bytes()).expect("it was added");
                assert_eq!(len, spaced.len(), "` {word}` is a token");
                token
            })
            .collect();
        for name in [END_OF_TEXT, IM_START, IM_END] {
            tokens.push(Token {
                bytes: name.as_bytes().into(),
                special: true,
            });
        }
        Builtin {
            tokens,
            trie,
            pieces,
            output,
        }
    }

    pub(super) fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Words with a space in front.
    pub(super) fn output_vocab(&self) -> &[TokenId] {
        &self.output
    }

    pub(super) fn eos(&self) -> TokenId {
        self.special(2)
    }

    fn special(&self, index: usize) -> TokenId {
        to_u32(self.tokens.len() - 3 + index)
    }

    /// Appends the tokens of `text`; names of special tokens in it count as those tokens.
    pub(super) fn encode(&self, text: &str, out: &mut Vec<TokenId>) {
        let bytes = text.as_bytes();
        // English has about 4 bytes per token; a wrong guess costs one more allocation.
        out.reserve(bytes.len() / 4 + 8);
        let mut at = 0;
        while at < bytes.len() {
            let byte = bytes[at];
            let class = CLASS[byte as usize];
            if matches!(class, Class::Letter | Class::Space)
                && let Some((token, len)) = self.pieces.find(window_at(bytes, at))
            {
                out.push(token);
                at += len;
                continue;
            }
            let end = match class {
                Class::Letter => letters_end(bytes, at),
                Class::Space if bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic) => {
                    letters_end(bytes, at + 1)
                }
                Class::Digit => digits_end(bytes, at),
                Class::Angle => {
                    if let Some((token, len)) = self.special_at(&bytes[at..]) {
                        out.push(token);
                        at += len;
                        continue;
                    }
                    at + 1
                }
                Class::Space | Class::Other => at + 1,
            };
            if end == at + 1 {
                out.push(TokenId::from(byte));
                at = end;
                continue;
            }
            while at < end {
                let (token, len) = self
                    .trie
                    .longest(&bytes[at..end])
                    .expect("every byte is a token");
                out.push(token);
                at += len;
            }
        }
    }

    fn special_at(&self, bytes: &[u8]) -> Option<(TokenId, usize)> {
        [END_OF_TEXT, IM_START, IM_END]
            .iter()
            .enumerate()
            .find(|(_, name)| bytes.starts_with(name.as_bytes()))
            .map(|(index, name)| (self.special(index), name.len()))
    }

    /// Appends the tokens of a chat, as if [`render_chat`] had been encoded: special tokens and line
    /// breaks stand alone, so the parts between them can be encoded one by one.
    pub(super) fn encode_chat(
        &self,
        messages: &[Message<'_>],
        options: &ChatOptions<'_>,
        out: &mut Vec<TokenId>,
    ) {
        const NEWLINE: TokenId = b'\n' as TokenId;
        if !options.tools.is_empty() {
            out.push(self.special(1));
            self.encode("system", out);
            out.push(NEWLINE);
            self.encode(&tools_text(options.tools), out);
            out.push(self.special(2));
            out.push(NEWLINE);
        }
        for (at, message) in (1..).zip(messages) {
            out.push(self.special(1));
            self.encode(&message.role, out);
            out.push(NEWLINE);
            if message.calls().is_empty() {
                self.encode(&message.content, out);
            } else {
                self.encode(&with_calls(message), out);
            }
            if options.continue_final_message && at == messages.len() {
                return;
            }
            out.push(self.special(2));
            out.push(NEWLINE);
        }
        if options.add_generation_prompt {
            out.push(self.special(1));
            self.encode("assistant", out);
            out.push(NEWLINE);
        }
    }
}

/// The chat template of the built-in tokenizer, for libraries that want one.
pub(super) const CHAT_TEMPLATE: &str = "{% if tools %}<|im_start|>system\nTools, one per line:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>\n{\"name\": {{ call.function.name | tojson }}, \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Text that [`CHAT_TEMPLATE`] renders.
pub(super) fn render_chat(messages: &[Message<'_>], options: &ChatOptions<'_>) -> String {
    let mut text = String::with_capacity(
        messages
            .iter()
            .map(|m| m.role.len() + m.content.len() + 32)
            .sum::<usize>()
            + 32,
    );
    if !options.tools.is_empty() {
        let tools = tools_text(options.tools);
        for part in [IM_START, "system\n", &tools, IM_END, "\n"] {
            text.push_str(part);
        }
    }
    for (at, message) in (1..).zip(messages) {
        let content = match message.calls() {
            [] => Cow::Borrowed(&*message.content),
            _ => Cow::Owned(with_calls(message)),
        };
        for part in [IM_START, &*message.role, "\n", &*content] {
            text.push_str(part);
        }
        if options.continue_final_message && at == messages.len() {
            return text;
        }
        text.push_str(IM_END);
        text.push('\n');
    }
    if options.add_generation_prompt {
        text.push_str(IM_START);
        text.push_str("assistant\n");
    }
    text
}

/// Text of the template on tools.
fn tools_text(tools: &[Tree]) -> String {
    let mut text = String::from("Tools, one per line:\n");
    for tool in tools {
        tool.write(&mut text);
        text.push('\n');
    }
    text
}

/// A message's content, and the calls that it makes, as [`crate::tokens::script`] writes them.
fn with_calls(message: &Message<'_>) -> String {
    let mut text = message.content.clone().into_owned();
    for call in message.calls() {
        if !text.is_empty() {
            text.push('\n');
        }
        let function = call.get("function");
        let part = |name| function.and_then(|f| f.get(name)).unwrap_or(&Tree::Null);
        text.push_str("<tool_call>\n{\"name\": ");
        part("name").write(&mut text);
        text.push_str(", \"arguments\": ");
        part("arguments").write(&mut text);
        text.push_str("}\n</tool_call>");
    }
    text
}

/// Fragments for words that are not in the list: letters with a space in front, every pair of
/// letters, and longer runs that at least `OFTEN` words of the list share.
fn fragments(words: &[&str]) -> Vec<Vec<u8>> {
    const OFTEN: u32 = 8;
    let mut inner: BTreeMap<&str, u32> = BTreeMap::new();
    let mut opening: BTreeMap<&str, u32> = BTreeMap::new();
    for word in words {
        for len in 3..=5 {
            for start in 0..(word.len() + 1).saturating_sub(len) {
                *inner.entry(&word[start..start + len]).or_default() += 1;
            }
        }
        for len in 2..=word.len().min(5) {
            *opening.entry(&word[..len]).or_default() += 1;
        }
    }
    let often = |counts: BTreeMap<&str, u32>| -> Vec<String> {
        counts
            .into_iter()
            .filter(|&(_, count)| count >= OFTEN)
            .map(|(text, _)| text.to_owned())
            .collect()
    };
    let mut fragments: Vec<Vec<u8>> = Vec::new();
    for letter in (b'a'..=b'z').chain(b'A'..=b'Z') {
        fragments.push(vec![b' ', letter]);
    }
    for first in b'a'..=b'z' {
        for second in b'a'..=b'z' {
            fragments.push(vec![first, second]);
        }
    }
    fragments.extend(often(inner).into_iter().map(String::into_bytes));
    for text in often(opening) {
        let capital = text[..1].to_ascii_uppercase() + &text[1..];
        fragments.push(format!(" {text}").into_bytes());
        fragments.push(format!(" {capital}").into_bytes());
        fragments.push(capital.into_bytes());
    }
    fragments
}

#[derive(Clone, Copy)]
enum Class {
    Letter,
    Digit,
    Space,
    /// May begin the name of a special token.
    Angle,
    Other,
}

static CLASS: [Class; 256] = {
    let mut table = [Class::Other; 256];
    let mut byte = 0_u8;
    loop {
        table[byte as usize] = match byte {
            b'a'..=b'z' | b'A'..=b'Z' => Class::Letter,
            b'0'..=b'9' => Class::Digit,
            b' ' => Class::Space,
            b'<' => Class::Angle,
            _ => Class::Other,
        };
        if byte == u8::MAX {
            break;
        }
        byte += 1;
    }
    table
};

/// The bytes from `at` on, with zeros behind the last one.
#[inline]
fn window_at(bytes: &[u8], at: usize) -> [u8; WINDOW] {
    let rest = &bytes[at..];
    rest.first_chunk().copied().unwrap_or_else(|| {
        let mut window = [0; WINDOW];
        window[..rest.len()].copy_from_slice(rest);
        window
    })
}

#[inline]
fn letters_end(bytes: &[u8], start: usize) -> usize {
    run_end(bytes, start, LETTERS_MAX, u8::is_ascii_alphabetic)
}

#[inline]
fn digits_end(bytes: &[u8], start: usize) -> usize {
    run_end(bytes, start, DIGITS_MAX, u8::is_ascii_digit)
}

#[inline]
fn run_end(bytes: &[u8], start: usize, max: usize, belongs: fn(&u8) -> bool) -> usize {
    let window = &bytes[start..bytes.len().min(start + max)];
    start + window.iter().take_while(|b| belongs(b)).count()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::LazyLock;

    use proptest::prelude::*;
    use slipstream_base::BlockHash;

    use super::super::tests::builtin;

    fn encode(text: &str) -> Vec<u32> {
        let mut out = Vec::new();
        builtin().encode(text, false, &mut out);
        out
    }

    fn pieces(text: &str) -> Vec<String> {
        encode(text)
            .iter()
            .map(|&t| builtin().decode(&[t]))
            .collect()
    }

    #[test]
    fn words_are_tokens_and_the_rest_is_cut_where_the_rule_says() {
        assert_eq!(
            pieces("The engines  wait, 12345 passes<|im_end|>\n"),
            [
                "The",
                " engines",
                " ",
                " wait",
                ",",
                " ",
                "123",
                "45",
                " passes",
                "<|im_end|>",
                "\n"
            ]
        );
        // A run of letters is cut behind the 16th, wherever a word would continue.
        assert_eq!(encode(&"z".repeat(40)).len(), 8 + 8 + 4);
    }

    /// Ids reach KV-block hashes, exported files and recorded runs: they change only on purpose.
    #[test]
    fn the_vocabulary_stays_as_it_is() {
        let model = builtin();
        let digest = (0..model.vocab_size()).fold(BlockHash(0), |digest, token| {
            let bytes = model.token_bytes(token);
            digest.child(&bytes.iter().map(|&b| b.into()).collect::<Vec<u32>>())
        });
        assert_eq!(
            (model.vocab_size(), digest.to_string().as_str()),
            (35_249, "785794d1fce81331")
        );
    }

    #[test]
    fn english_has_about_four_characters_a_token() {
        let text = "A scheduler that wakes a thread on the wrong core pays twice: once for the \
                    cache that the thread left behind, and again when the balancer moves it \
                    back. Neither cost shows in a throughput benchmark, because the machine is \
                    busy either way; both show in the ninety-ninth percentile of the latency.";
        let per_token = text.len() as f64 / encode(text).len() as f64;
        assert!(per_token > 3.0, "{per_token}");
    }

    /// The rule at the head of this file, with a search through all tokens.
    fn by_the_rule(text: &str) -> Vec<u32> {
        static VOCABULARY: LazyLock<HashMap<Vec<u8>, u32>> = LazyLock::new(|| {
            let model = builtin();
            let tokens = 0..model.vocab_size() - 3;
            tokens.map(|t| (model.token_bytes(t).to_vec(), t)).collect()
        });
        let vocabulary = &*VOCABULARY;
        let specials = vocabulary.len() as u32;
        let names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
        let (mut rest, mut out) = (text.as_bytes(), Vec::new());
        while !rest.is_empty() {
            if let Some(special) = (0..3).find(|&i| rest.starts_with(names[i].as_bytes())) {
                out.push(specials + special as u32);
                rest = &rest[names[special].len()..];
                continue;
            }
            let run = |from: usize, max, belongs: fn(&u8) -> bool| {
                let run = rest[from..].iter().take(max).take_while(|b| belongs(b));
                run.count()
            };
            let space = usize::from(rest[0] == b' ');
            let mut piece = match run(space, 16, u8::is_ascii_alphabetic) {
                0 => run(0, 3, u8::is_ascii_digit).max(1),
                letters => space + letters,
            };
            while piece > 0 {
                let longest = (1..=piece)
                    .rev()
                    .find(|&n| vocabulary.contains_key(&rest[..n]));
                let len = longest.expect("every byte is a token");
                out.push(vocabulary[&rest[..len]]);
                rest = &rest[len..];
                piece -= len;
            }
        }
        out
    }

    proptest! {
        #[test]
        fn every_text_comes_back(text in any::<String>()) {
            prop_assert_eq!(builtin().decode(&encode(&text)), text);
        }

        #[test]
        fn a_text_is_encoded_by_the_rule(
            text in "(the| engines?|[a-zA-Z ]{1,20}|[0-9]{1,5}|<\\|(im_end|x)\\|>|[ ]{1,3}|.){0,8}",
        ) {
            prop_assert_eq!(encode(&text), by_the_rule(&text));
        }

        #[test]
        fn answers_become_the_same_tokens_wherever_they_stand(
            before in "([a-z ]{0,8}|.{0,8})",
            picks in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
            after in "([^a-zA-Z].{0,8})?",
        ) {
            let vocab = builtin().output_vocab();
            let answer: Vec<u32> = picks.iter().map(|pick| *pick.get(&vocab)).collect();
            let text = before.clone() + &builtin().decode(&answer) + &after;
            let expected = [encode(&before), answer, encode(&after)].concat();
            prop_assert_eq!(encode(&text), expected);
        }

        #[test]
        fn a_chat_in_parts_is_the_chat_as_text(
            contents in prop::collection::vec("(<\\|im_(start|end)\\|>|<\\||[a-z <|>\\n]|.){0,12}", 0..4),
            (open, continues) in prop_oneof![Just((false, false)), Just((true, false)), Just((false, true))],
        ) {
            let messages: Vec<_> = contents.iter().map(|c| super::Message::new("user", c)).collect();
            let options = super::super::ChatOptions {
                add_generation_prompt: open,
                continue_final_message: continues,
                tools: &[],
                template_kwargs: &[],
                now_unix_s: 0,
            };
            let mut parts = Vec::new();
            builtin().encode_chat(&messages, &options, &mut parts).unwrap();
            prop_assert_eq!(parts, encode(&builtin().render_chat(&messages, &options).unwrap()));
        }
    }
}
