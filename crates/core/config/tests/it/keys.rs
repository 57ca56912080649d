//! Keys that no class reads: harmless ones are read over, ones that may bear on size are not, whatever their ending.

use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};
use slipstream_config::preset::ReadModel;

use crate::models::read;
use crate::strangers::{MODELS, language};

/// Names of keys of `keys.json`.
fn names(of: &str) -> Vec<String> {
    static KEYS: LazyLock<Value> =
        LazyLock::new(|| serde_json::from_str(include_str!("keys.json")).expect("JSON"));
    let lines = KEYS[of].as_array().expect("lines");
    let words = lines
        .iter()
        .flat_map(|line| line.as_str().expect("a line").split(' '));
    words.map(str::to_owned).collect()
}

/// A published file with `key`, in the object of the language model or in the one around it.
fn with(at: Index, key: &str, value: &Value, outside: bool) -> (Value, &'static ReadModel) {
    let (config, before) = &MODELS[at.index(MODELS.len())];
    let mut config = config.clone();
    let object = if outside {
        config.as_object_mut().expect("an object")
    } else {
        language(&mut config)
    };
    object.insert(key.to_owned(), value.clone());
    (config, before)
}

/// Values other than null, false and zero.
fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!(true)),
        (1..200_000u64).prop_map(Value::from),
        (0.1..9.0f64).prop_map(Value::from),
        Just(json!("rmsnorm")),
        Just(json!([4096, 0])),
        Just(json!({ "q4": { "dtype": "int4", "num_layers": 3 } })),
    ]
}

proptest! {
    #[test]
    fn keys_of_every_class_change_nothing(
        at: Index,
        key in select([names("base"), names("files")].concat()),
        value in any_value(),
        outside: bool,
    ) {
        let (config, before) = with(at, &key, &value, outside);
        let after = read(&config).map_err(TestCaseError::fail)?;
        prop_assert_eq!(&after.shape, &before.shape);
    }

    #[test]
    fn keys_of_tokens_change_nothing(
        at: Index,
        key in prop_oneof![
            select(names("tokens")),
            ("(im|text|tool|think|image|pad)_", select(vec!["start", "end", "newline", "sep"]), select(vec!["_id", "_token", "_token_id", "_token_index", "_ids"]))
                .prop_map(|(start, middle, end)| start + middle + end),
        ],
        value in prop_oneof![
            (1..200_000u64).prop_map(Value::from),
            Just(json!([1, 106])),
            Just(json!("<|im_end|>")),
        ],
        outside: bool,
    ) {
        let (config, before) = with(at, &key, &value, outside);
        let after = read(&config).map_err(TestCaseError::fail)?;
        prop_assert_eq!(&after.shape, &before.shape);
    }

    /// Neither an ending of harmless keys nor a list of zeros hides a word of size.
    #[test]
    fn keys_of_sizes_are_named_whatever_their_end(
        at: Index,
        start in select(vec![
            "num_experts_per_tok", "hidden_size", "kv", "moe_intermediate", "kv_sharing", "ssm_state", "layer_types",
            "window", "vocab_size", "mamba", "latent", "expert", "n_group_heads", "block_size",
        ]),
        end in select(vec![
            "_bias", "_std", "_implementation", "_init", "_coef", "_eps", "_dropout", "_act", "_loss", "_theta", "_map",
            "_softcap", "_id", "_ids", "_token", "_token_id", "_prob", "_activation",
        ]),
        value in prop_oneof![
            any_value(),
            (2..64usize).prop_map(|count| json!(vec![0; count])),
            Just(json!([0])),
            Just(json!("mla")),
        ],
    ) {
        let key = format!("{start}{end}");
        let (config, _) = with(at, &key, &value, false);
        let word = match read(&config) {
            Ok(read) => read.notes.join(" "),
            Err(error) => error,
        };
        prop_assert!(word.contains(&key), "not a word of {key} = {value}: {word}");
        // A size, or a list with an entry for each layer, is refused unless it is a token.
        if (value.is_array() || value.as_u64().is_some_and(|n| n > 1)) && !end.ends_with("_token_id") && end != "_theta" && end != "_softcap" {
            prop_assert!(read(&config).is_err(), "read in spite of {key} = {value}");
        }
    }
}
