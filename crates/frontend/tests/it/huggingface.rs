//! Tokenizers in Hugging Face's form: the built-in one written and read back, and others.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_frontend::text::{ChatOptions, Message, TextError, TextModel, builtin_files};
use tempfile::TempDir;

fn builtin() -> &'static TextModel {
    static MODEL: OnceLock<TextModel> = OnceLock::new();
    MODEL.get_or_init(TextModel::builtin)
}

/// The built-in tokenizer, by way of its files and the `tokenizers` library.
fn exported() -> &'static TextModel {
    static MODEL: OnceLock<TextModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let dir = export(|_, _| {});
        TextModel::load(dir.path()).unwrap()
    })
}

/// Writes the built-in tokenizer's files, each changed by `edit`.
fn export(edit: impl Fn(&str, &mut Value)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in builtin_files() {
        let mut json: Value = serde_json::from_str(&content).unwrap();
        edit(name, &mut json);
        fs::write(dir.path().join(name), json.to_string()).unwrap();
    }
    dir
}

fn encode(model: &TextModel, text: &str) -> Vec<u32> {
    let mut out = Vec::new();
    model.encode(text, true, &mut out);
    out
}

fn options(add_generation_prompt: bool) -> ChatOptions<'static> {
    ChatOptions {
        add_generation_prompt,
        template_kwargs: &[],
        now_unix_s: 0,
    }
}

#[test]
fn the_exported_vocabulary_is_the_built_in_one() {
    let (ours, theirs) = (builtin(), exported());
    assert_eq!(ours.vocab_size(), theirs.vocab_size());
    assert_eq!(ours.eos(), theirs.eos());
    for token in 0..ours.vocab_size() {
        assert_eq!(ours.token_bytes(token), theirs.token_bytes(token));
        assert_eq!(ours.token_json(token), theirs.token_json(token));
        assert_eq!(ours.is_special(token), theirs.is_special(token));
    }
    // What the loader finds out by trying, the built-in one knows by construction: words with a
    // space in front. The loader takes fragments of that form too, evenly over the vocabulary.
    let found = theirs.output_vocab();
    let words = found.iter().filter(|t| ours.output_vocab().contains(t));
    assert!(words.count() > 1000);
    assert!(found.iter().all(|&t| ours.token_bytes(t)[0] == b' '));
    assert_eq!(theirs.first_vocab(), theirs.output_vocab());
}

proptest! {
    #[test]
    fn exported_ids_are_the_built_in_ones(
        text in "([ -~]{0,24}|[a-zA-Z ]{0,60}|(<\\|im_end\\|>|<\\|endoftext\\|>|[0-9]{1,7}| |\n|\t|é|漢|😀){0,12}|.{0,24}){1,3}"
    ) {
        prop_assert_eq!(encode(builtin(), &text), encode(exported(), &text), "{:?}", text);
    }

    #[test]
    fn the_exported_template_renders_what_the_built_in_one_does(
        contents in prop::collection::vec(".{0,24}", 1..4),
        open in any::<bool>(),
    ) {
        let messages: Vec<Message<'_>> =
            contents.iter().map(|content| Message::new("user", content)).collect();
        prop_assert_eq!(
            builtin().render_chat(&messages, &options(open)).unwrap(),
            exported().render_chat(&messages, &options(open)).unwrap()
        );
    }
}

/// A template that trims takes the space from the answer's first word: answers must then begin
/// with a word that has none.
#[test]
fn where_the_template_trims_answers_begin_without_a_space() {
    let dir = export(|name, json| {
        if name == "tokenizer_config.json" {
            let template = json["chat_template"].as_str().unwrap();
            json["chat_template"] = template
                .replace("message.content", "message.content|trim")
                .into();
        }
    });
    let model = TextModel::load(dir.path()).unwrap();
    assert!(model.token_bytes(model.output_vocab()[0]).starts_with(b" "));
    let answer = [
        model.first_vocab()[3],
        model.output_vocab()[5],
        model.output_vocab()[2],
    ];
    let text = model.decode(&answer);
    assert!(!text.starts_with(' '));
    let mut tokens = Vec::new();
    let said = [Message::new("user", "go"), Message::new("assistant", &text)];
    model
        .encode_chat(&said, &options(false), &mut tokens)
        .unwrap();
    assert!(tokens.windows(3).any(|window| window == answer), "{text}");
}

/// SentencePiece's spelling: `▁` for a space, `<0x0A>` for a byte, merges instead of pieces.
#[test]
fn sentencepiece_like_vocabularies_work() {
    let mut vocab = serde_json::Map::new();
    let mut merges = Vec::new();
    let mut add = |text: String| {
        let next = vocab.len();
        vocab.entry(text).or_insert(next.into());
    };
    add("<unk>".into());
    add("</s>".into());
    (0..=255u8).for_each(|byte| add(format!("<0x{byte:02X}>")));
    add("▁".into());
    ('a'..='z').for_each(|letter| add(letter.into()));
    for first in 'a'..='j' {
        add(format!("▁{first}"));
        merges.push(format!("▁ {first}"));
    }
    for first in 'a'..='j' {
        for second in 'k'..='t' {
            add(format!("▁{first}{second}"));
            merges.push(format!("▁{first} {second}"));
        }
    }
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "post_processor": null,
        "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false, "special": true}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>",
                  "fuse_unk": true, "vocab": vocab, "merges": merges},
    });
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(
        dir.path().join("tokenizer_config.json"),
        json!({"eos_token": {"content": "</s>"}}).to_string(),
    )
    .unwrap();
    let model = TextModel::load(dir.path()).unwrap();
    assert_eq!(model.eos(), 1);
    assert_eq!(model.output_vocab().len(), 100);
    let tokens = encode(&model, " ak bl\né");
    assert_eq!(model.decode(&tokens), " ak bl\né");
    assert_eq!(tokens.len(), 2 + 1 + 2);
    // No template: chats are refused, and the message says what to do.
    let error = model
        .render_chat(&[Message::new("user", "x")], &options(true))
        .unwrap_err();
    assert!(error.to_string().contains("/v1/completions"), "{error}");
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason() {
    let check = |dir: &Path, part: &str| {
        let error = TextModel::load(dir)
            .err()
            .expect("it must not load")
            .to_string();
        assert!(error.contains(part), "{error:?} should say {part:?}");
    };
    check(
        Path::new("/nonexistent"),
        "must be a directory with `tokenizer.json`",
    );

    let dir = export(|_, _| {});
    fs::write(dir.path().join("tokenizer.json"), "{\"version\":").unwrap();
    check(dir.path(), "tokenizer.json cannot be parsed");

    let dir = export(|_, _| {});
    fs::write(dir.path().join("tokenizer_config.json"), "[").unwrap();
    check(dir.path(), "tokenizer_config.json cannot be parsed");

    let dir = export(|_, json| {
        json.as_object_mut().unwrap().remove("eos_token");
    });
    check(dir.path(), "names nothing as end-of-sequence token");

    let dir = export(|_, _| {});
    fs::write(dir.path().join("chat_template.jinja"), "{% for %}").unwrap();
    check(dir.path(), "the chat template cannot be parsed");

    let dir = export(|name, json| {
        if name == "tokenizer.json" {
            json["decoder"] = Value::Null;
        }
    });
    check(dir.path(), "decoder is neither");

    // Lower-casing loses nothing that answers have, but a cut behind two letters leaves no word.
    let dir = export(|name, json| {
        if name == "tokenizer.json" {
            json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a-z]|[^a-z]".into();
        }
    });
    check(dir.path(), "come back as themselves");
    assert!(matches!(
        TextModel::load(dir.path()),
        Err(TextError::OutputVocab { found: 0 })
    ));
}
