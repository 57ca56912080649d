//! Tokenizers in Hugging Face's form: the built-in one written and read back, and others.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use slipstream_frontend::text::{ChatOptions, Message, TextError, TextModel, builtin_files};
use slipstream_structured::Tree;
use tempfile::TempDir;

fn builtin() -> &'static TextModel {
    static MODEL: OnceLock<TextModel> = OnceLock::new();
    MODEL.get_or_init(TextModel::builtin)
}

/// The built-in tokenizer, by way of its files and the `tokenizers` library.
pub(crate) fn exported() -> &'static TextModel {
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

/// The built-in tokenizer with a template that trims messages.
fn trimming() -> TextModel {
    let dir = export(|name, json| {
        if name == "tokenizer_config.json" {
            let template = json["chat_template"].as_str().unwrap();
            json["chat_template"] = template
                .replace("message.content", "message.content|trim")
                .into();
        }
    });
    TextModel::load(dir.path()).unwrap()
}

fn encode(model: &TextModel, text: &str) -> Vec<u32> {
    let mut out = Vec::new();
    model.encode(text, true, &mut out);
    out
}

fn options(add_generation_prompt: bool) -> ChatOptions<'static> {
    ChatOptions {
        add_generation_prompt,
        continue_final_message: false,
        tools: &[],
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
    // The loader finds out by trying, the built-in one knows by construction: words with a
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
        (open, continues) in prop_oneof![Just((false, false)), Just((true, false)), Just((false, true))],
    ) {
        let messages: Vec<Message<'_>> =
            contents.iter().map(|content| Message::new("user", content)).collect();
        let options = ChatOptions { continue_final_message: continues, ..options(open) };
        let text = builtin().render_chat(&messages, &options).unwrap();
        if continues {
            prop_assert!(text.ends_with(contents.last().unwrap()), "{text:?}");
        }
        prop_assert_eq!(text, exported().render_chat(&messages, &options).unwrap());
    }
}

/// A template that trims takes the space from the answer's first word: answers must then begin
/// with a word that has none.
#[test]
fn where_the_template_trims_answers_begin_without_a_space() {
    let model = trimming();
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

/// As `transformers` does it: where the template trims, the continued message has no space at its end.
#[test]
fn a_trimmed_message_is_continued_at_its_end() {
    let model = trimming();
    let said = [
        Message::new("user", "go"),
        Message::new("assistant", "I went "),
    ];
    let options = ChatOptions {
        continue_final_message: true,
        ..options(false)
    };
    let text = model.render_chat(&said, &options).unwrap();
    assert!(text.ends_with("\nI went"), "{text:?}");
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

/// Words of two letters and more, whose tokens differ from those of their parts.
fn words() -> Vec<String> {
    let letters = |from: char, to: char| (from..=to).collect::<Vec<char>>();
    let (first, second) = (letters('a', 'j'), letters('k', 't'));
    let pair = |a: &char| second.iter().map(move |b| format!("{a}{b}")).collect();
    first
        .iter()
        .flat_map(|a| -> Vec<String> { pair(a) })
        .collect()
}

/// Parts of a `tokenizer.json` and a template, by the family that is built so.
fn families() -> Vec<(&'static str, Value, &'static str)> {
    let inst = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
                {% else %} {{ m.content|trim }} </s>{% endif %}{% endfor %}";
    let marked = "{% for m in messages %}</s>{{ m.content }}{% endfor %}";
    let vocab = |names: Vec<String>| -> Value {
        let mut ids = serde_json::Map::new();
        for name in names {
            let next = ids.len();
            ids.entry(name).or_insert(next.into());
        }
        ids.into()
    };
    let begin = || ["<unk>".to_owned(), "</s>".to_owned()].into_iter();
    let letters = || ('a'..='z').map(String::from);
    let spaced = ["▁".to_owned(), "▁▁".to_owned()].into_iter();
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let starts = ('a'..='j').map(|first| format!("▁{first}"));
    let names = begin()
        .chain(bytes)
        .chain(spaced)
        .chain(letters())
        .chain(starts);
    let names = names.chain(words().into_iter().map(|word| format!("▁{word}")));
    // Runs of spaces come before all others, as in Llama-2.
    let merges = ["▁ ▁".to_owned()].into_iter();
    let merges = merges.chain(('a'..='j').map(|first| format!("▁ {first}")));
    let merges = merges.chain(
        words()
            .into_iter()
            .map(|word| format!("▁{} {}", &word[..1], &word[1..])),
    );
    let model = json!({"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "fuse_unk": true,
                       "vocab": vocab(names.collect()), "merges": merges.collect::<Vec<_>>()});
    let mut decoders = sentencepiece_decoders();
    decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    let llama = json!({
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    });
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false});
    let mistral = json!({"normalizer": null, "pre_tokenizer": metaspace, "decoder": metaspace,
                         "model": model});
    let parts = letters().chain(letters().map(|letter| format!("##{letter}")));
    let bert = json!({
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                       "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100,
                  "vocab": vocab(begin().chain(parts).chain(words()).collect())},
    });
    let level = json!({
        "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
        "model": {"type": "WordLevel", "unk_token": "<unk>",
                  "vocab": vocab(begin().chain(words()).collect())},
    });
    let ended = words()
        .into_iter()
        .map(|word| format!("{word}</w>"))
        .collect::<Vec<_>>();
    let ends = letters().map(|letter| format!("{letter}</w>"));
    let merges = words()
        .into_iter()
        .map(|word| format!("{} {}</w>", &word[..1], &word[1..]));
    let gpt = json!({
        "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"},
        "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
        "model": {"type": "BPE", "unk_token": "<unk>", "end_of_word_suffix": "</w>",
                  "vocab": vocab(begin().chain(letters()).chain(ends).chain(ended).collect()),
                  "merges": merges.collect::<Vec<_>>()},
    });
    vec![
        ("Llama-2", llama.clone(), inst),
        ("Llama-2, text behind a special token", llama, marked),
        ("Mistral", mistral.clone(), inst),
        ("Mistral, text behind a special token", mistral, marked),
        ("BERT", bert, marked),
        ("words", level, marked),
        ("GPT", gpt, marked),
    ]
}

fn written(parts: &Value, config: &Value) -> TempDir {
    let mut json = json!({
        "version": "1.0", "truncation": null, "padding": null, "post_processor": null,
        "added_tokens": [{"id": 1, "content": "</s>", "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false, "special": true}],
    });
    for (name, part) in parts.as_object().unwrap() {
        json[name] = part.clone();
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    dir
}

/// Answers of a modelled server come back as their tokens, but for what a normalizer does at the begin.
#[test]
fn servers_start_with_every_family_of_tokenizers() {
    for (family, parts, template) in families() {
        let dir = written(
            &parts,
            &json!({"eos_token": "</s>", "chat_template": template}),
        );
        let model = TextModel::load(dir.path()).unwrap_or_else(|error| panic!("{family}: {error}"));
        let vocab = model.output_vocab();
        assert_eq!(vocab.len(), 100, "{family}");
        assert!(model.first_vocab().len() >= 64, "{family}");
        for seed in 0..20usize {
            let answer: Vec<u32> = (0..40)
                .map(|at| vocab[(seed * 31 + at * at * 7) % vocab.len()])
                .collect();
            let text: Vec<u8> = answer
                .iter()
                .flat_map(|&token| model.token_bytes(token).to_vec())
                .collect();
            let back = encode(&model, std::str::from_utf8(&text).unwrap());
            assert!(
                back.ends_with(&answer[1..]),
                "{family}: {back:?} {answer:?}"
            );
            assert_eq!(
                model.decode(&back).trim(),
                model.decode(&answer).trim(),
                "{family}"
            );
        }
        // A word of any length may be one token.
        let long = "é".repeat(4000);
        let tokens = encode(&model, &long).len();
        assert!(model.tokens_min(long.len()) <= tokens, "{family}");
    }
}

/// A router starts with any tokenizer: with no end of sequence, and with a decoder that no answer could be made of.
#[test]
fn a_router_starts_with_every_tokenizer() {
    for (family, mut parts, _) in families() {
        for decoder in [
            parts["decoder"].clone(),
            Value::Null,
            json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}),
            json!({"type": "Sequence", "decoders": [{"type": "Fuse"}]}),
        ] {
            parts["decoder"] = decoder;
            let dir = written(&parts, &json!({}));
            let model = TextModel::load_for_prompts(dir.path())
                .unwrap_or_else(|error| panic!("{family}: {error}"));
            assert!(!encode(&model, "ak bl").is_empty(), "{family}");
        }
    }
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
    check(
        dir.path(),
        "chat_template.jinja is not valid Jinja: line 1: ",
    );
    fs::write(
        dir.path().join("chat_template.jinja"),
        "{{ bos_token }}\n{{ messages[0].role.nothing.at_all }}",
    )
    .unwrap();
    check(
        dir.path(),
        "chat_template.jinja fails on a chat of a user and an assistant: line 2: undefined value",
    );

    let dir = export(|name, json| {
        if name == "tokenizer.json" {
            json["decoder"] = json!({"type": "Fuse"});
        }
    });
    check(dir.path(), "its decoder, `Fuse`, is not");

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

/// A router writes no answers: neither the vocabulary nor the template may keep it from starting.
#[test]
fn prompts_need_no_vocabulary_for_answers() {
    let dir = export(|name, json| {
        if name == "tokenizer.json" {
            json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[a-z]|[^a-z]".into();
        }
    });
    let template = "{% for m in messages %}{{ raise_exception('no chats') }}{% endfor %}";
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    assert!(TextModel::load(dir.path()).is_err());
    let model = TextModel::load_for_prompts(dir.path()).unwrap();
    assert_eq!(model.decode(&encode(&model, "ab cd")), "ab cd");
    let said = [Message::new("user", "x")];
    let error = model.render_chat(&said, &options(true)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the chat template refused the messages: no chats"
    );
}

/// As `transformers` finds them: every special token by its name, and another template for tools.
#[test]
fn templates_see_special_tokens_and_one_may_be_for_tools() {
    let dir = export(|name, json| {
        if name == "tokenizer_config.json" {
            json["pad_token"] = "<pad>".into();
            json["chat_template"] = json!([
                {"name": "tool_use", "template": "{{ tools | length }} tools"},
                {"name": "default", "template": "{{ pad_token }}{{ bos_token is defined }}{{ x }}"},
            ]);
        }
    });
    let model = TextModel::load_for_prompts(dir.path()).unwrap();
    let said = [Message::new("user", "x")];
    let kwargs = [("pad_token".to_owned(), Tree::Text("mine".into()))];
    let plain = options(true);
    let tool = [Tree::Object(Vec::new())];
    for (options, expected) in [
        (plain, "<pad>False"),
        (
            ChatOptions {
                template_kwargs: &kwargs,
                ..plain
            },
            "mineFalse",
        ),
        (
            ChatOptions {
                tools: &tool,
                ..plain
            },
            "1 tools",
        ),
    ] {
        assert_eq!(model.render_chat(&said, &options).unwrap(), expected);
    }
}

/// An added token.
#[derive(Clone, Debug)]
struct Added {
    content: &'static str,
    special: bool,
    lstrip: bool,
    rstrip: bool,
    single_word: bool,
    normalized: bool,
}

/// A tokenizer whose vocabulary is bytes, some letters and `added`, byte by byte or as SentencePiece spells it.
fn small(byte_level: bool, decoders: &[Value], added: &[Added]) -> TempDir {
    let mut names: Vec<String> = vec!["<unk>".into(), "</s>".into()];
    if byte_level {
        let exported: Value = serde_json::from_str(&builtin_files()[0].1).unwrap();
        let vocab = exported["model"]["vocab"].as_object().unwrap();
        let bytes = vocab.iter().filter(|(_, id)| id.as_u64().unwrap() < 256);
        names.extend(bytes.map(|(text, _)| text.clone()));
    } else {
        names.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
        names.extend(["▁", "a", "b", "▁a"].map(String::from));
    }
    let vocab: serde_json::Map<_, _> = (0..)
        .zip(&names)
        .map(|(id, name)| (name.clone(), json!(id)))
        .collect();
    let mut tokens = vec![
        json!({"id": 1, "content": "</s>", "single_word": false, "lstrip": false,
                                 "rstrip": false, "normalized": false, "special": true}),
    ];
    for (id, token) in (names.len()..).zip(added) {
        tokens.push(
            json!({"id": id, "content": token.content, "single_word": token.single_word,
                           "lstrip": token.lstrip, "rstrip": token.rstrip,
                           "normalized": token.normalized, "special": token.special}),
        );
    }
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false});
    let (normalizer, pre) = if byte_level {
        (Value::Null, bytes)
    } else {
        (
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
            Value::Null,
        )
    };
    let merges = if byte_level {
        json!([])
    } else {
        json!(["▁ a"])
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "post_processor": null,
        "added_tokens": tokens, "normalizer": normalizer, "pre_tokenizer": pre,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "byte_fallback": !byte_level, "unk_token": "<unk>",
                  "fuse_unk": true, "vocab": vocab, "merges": merges},
    });
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({"eos_token": "</s>"}).to_string();
    fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    dir
}

fn sentencepiece_decoders() -> Vec<Value> {
    vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ]
}

/// Gemma's runs of spaces are added tokens, written with `▁` as others are.
#[test]
fn added_tokens_go_through_the_decoder() {
    let plain = |content, special| Added {
        content,
        special,
        lstrip: false,
        rstrip: false,
        single_word: false,
        normalized: false,
    };
    let added = [plain("▁▁▁▁", false), plain("<end▁of>", true)];
    let dir = small(false, &sentencepiece_decoders(), &added);
    let model = TextModel::load_for_prompts(dir.path()).unwrap();
    let spaces = model.vocab_size() - 2;
    let ids = encode(&model, "a▁▁▁▁b");
    assert_eq!(ids[1], spaces);
    assert_eq!(model.token_bytes(spaces), b"    ");
    assert_eq!(model.token_json(spaces), Some(&b"    "[..]));
    assert_eq!(model.decode(&ids), "a    b");
    assert_eq!(model.token_name(spaces), "▁▁▁▁");
    assert!(!model.is_special(spaces) && model.is_special(spaces + 1));
}

fn added_tokens() -> impl Strategy<Value = Vec<Added>> {
    let contents = vec![
        "▁▁",
        "▁▁▁▁",
        "<|x|>",
        "<think>",
        "\n\n",
        "  ",
        "é",
        "<0x41>b",
        "ab",
        "Ġb",
        "A",
        "[a]",
        "<end▁of>",
    ];
    let chosen = prop::sample::subsequence(contents, 1..6);
    (chosen, prop::collection::vec(any::<[bool; 5]>(), 6)).prop_map(|(contents, flags)| {
        let each = contents.into_iter().zip(flags);
        each.map(
            |(content, [special, lstrip, rstrip, single_word, normalized])| Added {
                content,
                special,
                lstrip,
                rstrip,
                single_word,
                normalized,
            },
        )
        .collect()
    })
}

fn decoders() -> impl Strategy<Value = (bool, Vec<Value>, bool)> {
    let metaspace = |scheme| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
    let stripping = [sentencepiece_decoders(), vec![strip]].concat();
    let regex = json!({"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false});
    // Whether bytes have characters, the decoders, and whether each token has a text of its own.
    prop_oneof![
        Just((true, vec![bytes.clone()], true)),
        Just((true, vec![bytes, json!({"type": "Fuse"})], true)),
        Just((false, sentencepiece_decoders(), true)),
        Just((false, stripping, false)),
        Just((
            false,
            vec![
                regex,
                json!({"type": "ByteFallback"}),
                json!({"type": "Fuse"})
            ],
            true
        )),
        Just((
            false,
            vec![json!({"type": "ByteFallback"}), metaspace("never")],
            true
        )),
        Just((
            false,
            vec![json!({"type": "ByteFallback"}), metaspace("always")],
            false
        )),
    ]
}

proptest! {
    // Each case reads a tokenizer.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 8, ..ProptestConfig::default() })]

    /// Generated tokenizers against the library: added tokens of every kind, decoders of every kind.
    #[test]
    fn added_tokens_are_the_librarys(
        (byte_level, decoders, apart) in decoders(),
        added in added_tokens(),
        texts in prop::collection::vec(
            "(a|b|A| |▁|\n|é|😀|<\\|x\\|>|<think>|</s>|\\[a\\]|<0x41>b|Ġb|<end▁of>|ab){0,12}", 4),
        ids in prop::collection::vec(2u32..270, 0..12),
    ) {
        // The library maps one normalized text to either of its tokens, by a hash with a random seed.
        let spaces = added.iter().filter(|token| token.normalized && ["▁▁", "  "].contains(&token.content));
        prop_assume!(byte_level || spaces.count() < 2);
        let dir = small(byte_level, &decoders, &added);
        let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
        let model = TextModel::load_for_prompts(dir.path()).unwrap();
        for text in &texts {
            let theirs = library.encode(text.as_str(), true).unwrap();
            prop_assert_eq!(encode(&model, text), theirs.get_ids(), "{:?}", text);
        }
        let ids: Vec<u32> = ids.into_iter().filter(|&id| id < model.vocab_size()).collect();
        let decoded = library.decode(&ids, false).unwrap();
        prop_assert_eq!(model.decode(&ids), decoded.clone());
        // The text of a stream of these tokens.
        if apart {
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| model.token_bytes(id).to_vec()).collect();
            if let Ok(text) = String::from_utf8(bytes) {
                prop_assert_eq!(text, decoded);
            }
        }
        for &id in &ids {
            prop_assert_eq!(model.token_name(id), library.id_to_token(id).unwrap_or_default());
        }
    }
}

/// Pre-tokenizers of models that are deployed now, by the regular expressions they are known by.
const SPLITS: [(&str, &[&str]); 4] = [
    (
        "Llama 3",
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "Qwen 2 and 3",
        &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "gpt-oss",
        &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
    ),
    (
        "DeepSeek V3",
        &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        ],
    ),
];

/// A byte-level BPE whose merges were learned from this crate's own text, with `splits` in front.
fn byte_level(splits: &[&str], normalizer: &Value) -> TempDir {
    let exported = builtin_files();
    let chars: Vec<char> = {
        // The spelling of bytes is that of the exported vocabulary's first 256 tokens.
        let json: Value = serde_json::from_str(&exported[0].1).unwrap();
        let vocab = json["model"]["vocab"].as_object().unwrap();
        let mut chars = vec!['\0'; 256];
        for (text, id) in vocab {
            let id = id.as_u64().unwrap() as usize;
            if id < 256 {
                chars[id] = text.chars().next().unwrap();
            }
        }
        chars
    };
    let corpus = format!(
        "{}{}",
        include_str!("../../src/text/mod.rs"),
        "日本語の文 für Ärger русский 123 456 💡 \n\n".repeat(20)
    );
    let mut words: Vec<Vec<String>> = corpus
        .split_inclusive(' ')
        .map(|word| word.trim_end_matches(' '))
        .map(|word| {
            format!(" {word}")
                .bytes()
                .map(|b| chars[b as usize].to_string())
                .collect()
        })
        .collect();
    let mut vocab: Vec<String> = chars.iter().map(char::to_string).collect();
    let mut merges = Vec::new();
    for _ in 0..600 {
        let mut counts = std::collections::BTreeMap::new();
        for pair in words.iter().flat_map(|word| word.windows(2)) {
            *counts
                .entry((pair[0].clone(), pair[1].clone()))
                .or_insert(0) += 1;
        }
        let Some(((a, b), _)) = counts.into_iter().max_by_key(|(_, count)| *count) else {
            break;
        };
        let both = format!("{a}{b}");
        for word in &mut words {
            let mut at = 0;
            while at + 1 < word.len() {
                if word[at] == a && word[at + 1] == b {
                    word[at].clone_from(&both);
                    word.remove(at + 1);
                }
                at += 1;
            }
        }
        if !vocab.contains(&both) {
            vocab.push(both);
        }
        merges.push(format!("{a} {b}"));
    }
    let special = ["<|end|>", "<|user|>", "<｜begin▁of▁sentence｜>"];
    let first_special = vocab.len();
    let mut stages: Vec<Value> = splits
        .iter()
        .map(|regex| {
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated",
                   "invert": false})
        })
        .collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false});
    stages.push(bytes.clone());
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer,
        "added_tokens": special.iter().enumerate().map(|(at, content)| json!({
            "id": first_special + at, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": stages},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": special[2], "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {special[2]: {"id": special[2], "ids": [first_special + 2],
                                            "tokens": [special[2]]}}},
        "decoder": bytes,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": false,
                  "byte_fallback": false, "ignore_merges": false, "merges": merges,
                  "vocab": vocab.iter().enumerate().map(|(id, text)| (text.clone(), json!(id)))
                      .collect::<serde_json::Map<_, _>>()},
    });
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({"eos_token": "<|end|>"}).to_string();
    fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    dir
}

/// A tokenizer as we load it, and the same by the `tokenizers` library alone.
type Both = (&'static str, TextModel, tokenizers::Tokenizer);

fn both() -> &'static Vec<Both> {
    static BOTH: OnceLock<Vec<Both>> = OnceLock::new();
    BOTH.get_or_init(|| {
        SPLITS
            .into_iter()
            .map(|(name, splits)| {
                let nfc = json!({"type": "NFC"});
                let normalizer = if name.starts_with("Qwen") {
                    nfc
                } else {
                    Value::Null
                };
                let dir = byte_level(splits, &normalizer);
                let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json"));
                (name, TextModel::load(dir.path()).unwrap(), library.unwrap())
            })
            .collect()
    })
}

#[test]
fn tokenizers_of_models_deployed_now_are_encoded_fast() {
    for (name, model, _) in both() {
        assert_eq!(model.slow_encoder(), None, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn fast_tokens_are_those_of_the_library(
        text in "([ -~]{0,40}|[a-zA-Z ]{0,60}|(<\\|end\\|>|<\\|user\\|>|'[sSſtTmM]|'LL|ſ|\u{212a}|[0-9]{1,7}| |\n|\r\n|\t|é|e\u{301}|漢|の|😀|\u{a0}|pub fn ){0,16}|\\PC{0,24}|.{0,24}){1,4}",
        special in any::<bool>(),
    ) {
        for (name, model, library) in both() {
            let mut ours = Vec::new();
            model.encode(&text, special, &mut ours);
            let theirs = library.encode_fast(text.as_str(), special).unwrap();
            prop_assert_eq!(&ours[..], theirs.get_ids(), "{} on {:?}", name, &text);
        }
    }
}

/// Long prompts are split over threads, and chats come back with their history.
#[test]
fn fast_tokens_of_a_long_chat_are_those_of_the_library() {
    let mut chat = String::new();
    for turn in 0..40 {
        let part = include_str!("../../src/text/mod.rs");
        let from = part.char_indices().nth(turn * 97).unwrap().0;
        chat.push_str("<|user|>");
        chat.push_str(&part[from..]);
        chat.push_str("<|end|>\n");
        if turn % 8 < 2 {
            for (name, model, library) in both() {
                let theirs = library.encode_fast(chat.as_str(), true).unwrap();
                assert_eq!(
                    encode(model, &chat),
                    theirs.get_ids(),
                    "{name}, turn {turn}"
                );
            }
        }
    }
}

#[test]
fn a_tokenizer_that_the_fast_encoder_lacks_is_encoded_by_the_library() {
    assert!(exported().slow_encoder().is_some(), "WordPiece");
    let dir = byte_level(SPLITS[0].1, &json!({"type": "NFKC"}));
    let model = TextModel::load(dir.path()).unwrap();
    let why = model.slow_encoder().expect("no NFKC");
    assert!(why.contains("NFKC"), "{why}");
    assert_eq!(encode(&model, "ﬁ")[1..], encode(&model, "fi")[1..]);
}
