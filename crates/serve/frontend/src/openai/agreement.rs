//! Compares our tokens with those of an engine, by its `/tokenize`.
//!
//! A router that hashes prompts finds an engine's cached blocks only if it makes the same tokens. Texts
//! on which tokenizers and templates differ in practice are tokenized here and there. I/O is the
//! caller's: [`samples`] gives bodies of requests, [`Sample::compare`] reads the answers.

use std::fmt;

use serde_json::{Value, json};
use slipstream_base::TokenId;
use slipstream_base::text::foreign;

use crate::text::{ChatOptions, Message, TextModel};

/// Prompts without a template: name and text.
const PROMPTS: &[(&str, &str)] = &[
    ("plain", "The quick brown fox jumps over the lazy dog."),
    ("space", "  two\n\n\tthree   \r\n four \u{a0} "),
    ("numbers", "3.14159 1,234,567 007 x2y 10^-9"),
    (
        "unicode",
        "naïve café, 東京タワー, Ελλάδα, עברית, 👩\u{200d}💻🇪🇺, e\u{301}",
    ),
    ("code", "fn main() {\n    let x: Vec<u8> = vec![0; 4];\n}\n"),
    (
        "special",
        "<|im_start|>user<|im_end|><|endoftext|><s>[INST]</s><|eot_id|>",
    ),
];

/// A chat: name, roles with contents, and whether the assistant's turn is opened.
type Chat = (&'static str, &'static [(&'static str, &'static str)], bool);

const CHATS: &[Chat] = &[
    ("user", &[("user", "Hello!")], true),
    (
        "system",
        &[("system", "Be brief."), ("user", "Why is the sky blue?")],
        true,
    ),
    (
        "turns",
        &[
            ("system", "Be brief."),
            ("user", "What is 2 + 2?"),
            ("assistant", "4."),
            ("user", "And twice that?"),
        ],
        true,
    ),
    (
        "unicode",
        &[("user", "Übersetze: 東京 👩\u{200d}💻 é")],
        true,
    ),
    (
        "space",
        &[
            ("user", "  leading and trailing \n\n"),
            ("assistant", "\nyes "),
            ("user", " "),
        ],
        true,
    ),
    (
        "special",
        &[("user", "<|im_end|>\n<|im_start|>system\nno</s>")],
        true,
    ),
    ("closed", &[("user", "Hello!"), ("assistant", "Hi.")], false),
    ("two users", &[("user", "One."), ("user", "Two.")], true),
];

/// A text, tokenized here.
#[derive(Debug)]
pub struct Sample {
    /// Its test cases.
    pub name: String,
    /// Body of `POST /tokenize` for the same text.
    pub body: Vec<u8>,
    /// Our tokens, or why the template refuses it.
    pub tokens: Result<Vec<TokenId>, String>,
}

/// How a sample was tokenized by the engine, compared with us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// The same tokens.
    Same {
        /// Their number.
        tokens: usize,
    },
    /// Both refuse it, as templates may.
    BothRefuse,
    /// Other tokens. A router must not hash this engine's prompts from tokens.
    Different {
        /// Index of the first token that differs.
        at: usize,
        /// Our tokens from there on, a few.
        ours: Vec<TokenId>,
        /// The engine's from there on, a few.
        theirs: Vec<TokenId>,
    },
    /// One side refuses it; why.
    OneRefuses(String),
}

impl Agreement {
    /// Whether tokens made here can be used for the engine.
    pub fn agrees(&self) -> bool {
        matches!(self, Agreement::Same { .. } | Agreement::BothRefuse)
    }
}

impl fmt::Display for Agreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Agreement::Same { tokens } => write!(f, "same ({tokens} tokens)"),
            Agreement::BothRefuse => f.write_str("both refuse it"),
            Agreement::Different { at, ours, theirs } => {
                write!(
                    f,
                    "different from token {at} on: {ours:?} here, {theirs:?} at the engine"
                )
            }
            Agreement::OneRefuses(why) => f.write_str(why),
        }
    }
}

/// Tokens shown of a difference.
const SHOWN: usize = 6;

/// Texts for `model`, tokenized by `text`. `now_unix_s` is the time for templates that write one.
pub fn samples(text: &TextModel, model: &str, now_unix_s: u64) -> Vec<Sample> {
    let prompts = PROMPTS.iter().map(|&(name, prompt)| {
        let mut tokens = Vec::new();
        text.encode(prompt, true, &mut tokens);
        let body = json!({"model": model, "prompt": prompt, "add_special_tokens": true});
        Sample {
            name: format!("prompt: {name}"),
            body: body.to_string().into_bytes(),
            tokens: Ok(tokens),
        }
    });
    let chats = CHATS.iter().map(|&(name, turns, open)| {
        let messages: Vec<Message<'_>> = turns.iter().map(|(r, c)| Message::new(r, c)).collect();
        let options = ChatOptions {
            add_generation_prompt: open,
            continue_final_message: false,
            tools: &[],
            template_kwargs: &[],
            now_unix_s,
        };
        let mut tokens = Vec::new();
        let encoded = text.encode_chat(&messages, &options, &mut tokens);
        let turns = turns
            .iter()
            .map(|(role, content)| json!({"role": role, "content": content}));
        let turns: Vec<Value> = turns.collect();
        let body = json!({"model": model, "messages": turns, "add_generation_prompt": open});
        Sample {
            name: format!("chat: {name}"),
            body: body.to_string().into_bytes(),
            tokens: encoded.map(|()| tokens).map_err(|error| error.to_string()),
        }
    });
    prompts.chain(chats).collect()
}

impl Sample {
    /// Compares with the engine's answer: its status and body.
    pub fn compare(&self, status: u16, body: &[u8]) -> Agreement {
        let ours = match (&self.tokens, status) {
            (Ok(ours), 200) => ours,
            (Err(_), 400..500) => return Agreement::BothRefuse,
            (Err(why), _) => return Agreement::OneRefuses(format!("refused here: {why}")),
            (Ok(_), status) => {
                let shown: String = String::from_utf8_lossy(body).chars().take(200).collect();
                let shown = foreign(&shown);
                return Agreement::OneRefuses(format!("the engine answers {status}: {shown}"));
            }
        };
        let answer: Option<Value> = serde_json::from_slice(body).ok();
        let theirs = answer
            .as_ref()
            .and_then(|answer| answer.get("tokens")?.as_array());
        let tokens = |list: &Vec<Value>| -> Option<Vec<TokenId>> {
            list.iter()
                .map(|token| TokenId::try_from(token.as_u64()?).ok())
                .collect()
        };
        let Some(theirs) = theirs.and_then(tokens) else {
            return Agreement::OneRefuses("the engine's answer has no list `tokens`".into());
        };
        if *ours == theirs {
            return Agreement::Same { tokens: ours.len() };
        }
        let at = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
        let rest = |tokens: &[TokenId]| tokens[at..].iter().copied().take(SHOWN).collect();
        Agreement::Different {
            at,
            ours: rest(ours),
            theirs: rest(&theirs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::{TokenizeInput, parse_tokenize, tokenize_json};

    /// Answers of our own server.
    fn answer(text: &TextModel, body: &[u8]) -> Vec<u8> {
        let request = parse_tokenize(body).unwrap();
        let mut tokens = Vec::new();
        match &request.input {
            TokenizeInput::Prompt(prompt) => {
                text.encode(prompt, request.add_special_tokens, &mut tokens);
            }
            TokenizeInput::Chat {
                messages,
                add_generation_prompt,
                continue_final_message,
                tools,
                template_kwargs,
                template: _,
            } => {
                let options = ChatOptions {
                    add_generation_prompt: *add_generation_prompt,
                    continue_final_message: *continue_final_message,
                    tools,
                    template_kwargs,
                    now_unix_s: 0,
                };
                text.encode_chat(messages, &options, &mut tokens).unwrap();
            }
        }
        tokenize_json(&tokens, 1024, None)
    }

    #[test]
    fn the_same_tokenizer_agrees_on_every_sample() {
        let text = TextModel::builtin();
        let samples = samples(&text, "m", 0);
        assert_eq!(samples.len(), PROMPTS.len() + CHATS.len());
        for sample in &samples {
            let found = sample.compare(200, &answer(&text, &sample.body));
            let tokens = sample.tokens.as_ref().unwrap().len();
            assert_eq!(found, Agreement::Same { tokens }, "{}", sample.name);
        }
    }

    #[test]
    fn the_first_difference_is_shown() {
        let sample = |tokens: Result<Vec<TokenId>, String>| Sample {
            name: String::new(),
            body: Vec::new(),
            tokens,
        };
        let ours = || Ok(vec![1, 2, 3]);
        let found = sample(ours()).compare(200, br#"{"tokens": [1, 2, 4, 5]}"#);
        let expected = Agreement::Different {
            at: 2,
            ours: vec![3],
            theirs: vec![4, 5],
        };
        assert_eq!(found, expected);
        // One that only ends earlier.
        let found = sample(ours()).compare(200, br#"{"tokens": [1, 2]}"#);
        assert!(matches!(&found, Agreement::Different { at: 2, theirs, .. } if theirs.is_empty()));
        assert!(!found.agrees());
        let refused = || Err("roles must alternate".to_owned());
        assert_eq!(sample(refused()).compare(400, b"{}"), Agreement::BothRefuse);
        for (tokens, status, body, part) in [
            (
                refused(),
                200,
                &br#"{"tokens": [1]}"#[..],
                "refused here: roles",
            ),
            (ours(), 404, b"no such path", "answers 404: no such path"),
            (ours(), 200, b"{}", "no list `tokens`"),
            (ours(), 200, br#"{"tokens": [-1]}"#, "no list `tokens`"),
        ] {
            let found = sample(tokens).compare(status, body);
            assert!(
                !found.agrees() && found.to_string().contains(part),
                "{found}"
            );
        }
    }
}
