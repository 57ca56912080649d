//! The built-in tokenizer in Hugging Face's form, for load tools that want one.

use serde_json::{Map, Value, json};

use super::builtin::{self, Builtin, DIGITS_MAX, LETTERS_MAX};
use super::hf::byte_level_chars;

/// The files of a directory that `transformers`' `AutoTokenizer` and the `tokenizers` library load:
/// name and content.
///
/// They give the same ids as [`TextModel::builtin`](super::TextModel::builtin).
pub fn builtin_files() -> Vec<(&'static str, String)> {
    let builtin = Builtin::new();
    let pretty = |value: &Value| {
        serde_json::to_string_pretty(value).expect("a JSON value can be written") + "\n"
    };
    vec![
        ("tokenizer.json", pretty(&tokenizer_json(&builtin))),
        ("tokenizer_config.json", pretty(&config_json(&builtin))),
    ]
}

fn tokenizer_json(builtin: &Builtin) -> Value {
    let char_of = {
        let mut chars = vec!['\0'; 256];
        for (c, byte) in (0u32..).zip(byte_level_chars()) {
            if let Some(byte) = byte {
                chars[byte as usize] = char::from_u32(c).expect("below 512");
            }
        }
        chars
    };
    let mut vocab = Map::new();
    let mut added = Vec::new();
    for (id, token) in builtin.tokens().iter().enumerate() {
        if token.special {
            added.push(json!({
                "id": id,
                "content": String::from_utf8_lossy(&token.bytes),
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": true,
            }));
        } else {
            let text: String = token.bytes.iter().map(|&b| char_of[b as usize]).collect();
            vocab.insert(text, id.into());
        }
    }
    let pieces = format!(" ?[A-Za-z]{{1,{LETTERS_MAX}}}|[0-9]{{1,{DIGITS_MAX}}}|[^A-Za-z0-9]");
    let byte_level = json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": false,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pieces},
                    "behavior": "Isolated",
                    "invert": false,
                },
                byte_level,
            ],
        },
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "WordPiece",
            // Every byte is a token, so nothing is unknown; the format wants a name.
            "unk_token": "<|endoftext|>",
            // Tokens inside a word are written as those at its start.
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": 64,
            "vocab": vocab,
        },
    })
}

fn config_json(builtin: &Builtin) -> Value {
    let special: Vec<_> = builtin
        .tokens()
        .iter()
        .filter(|token| token.special)
        .map(|token| String::from_utf8_lossy(&token.bytes))
        .collect();
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": false,
        "bos_token": null,
        "eos_token": String::from_utf8_lossy(&builtin.tokens()[builtin.eos() as usize].bytes),
        "pad_token": special[0],
        "additional_special_tokens": special,
        "chat_template": builtin::CHAT_TEMPLATE,
    })
}
