//! Indices of weights that do not belong to their `config.json`.
//!
//! The sizes to expect are computed here, from the matrices of the model.

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use slipstream_config::preset::{ModelFiles, ReadModel};

const LAYERS: u64 = 32;
const HIDDEN: u64 = 4096;
const LAYER: u64 = 2 * HIDDEN * (32 + 8) * 128 + 3 * HIDDEN * 14_336;
const EMBEDDING: u64 = 128_256 * HIDDEN;
/// Bytes of the language model in 16 bits.
const BYTES: f64 = (2 * (LAYERS * LAYER + 2 * EMBEDDING)) as f64;

/// Names of weights that are not the language model's.
const OF_ENCODERS: &[&str] = &[
    "projector.x",
    "vision_tower.x",
    "audio_tower.layers.0.fc1.weight",
    "multi_modal_projector.linear_1.weight",
    "visual.blocks.0.attn.qkv.weight",
    "model.image_newline",
    "mm.0.weight",
];

const OF_PREDICTION: &[&str] = &[
    "mtp.layers.0.mlp.up_proj.weight",
    "mtp.fc.weight",
    "model.mtp_layers.1.input_proj.weight",
];

/// The description of an encoder in a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Encoder {
    Absent,
    /// With its sizes: 0.43 billion weights.
    Sized,
    /// By its name.
    Named,
}

fn files(encoder: Encoder, names: &[&str], layers: u64, metadata: Value) -> ModelFiles {
    let mut language = json!({
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 14_336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    });
    let config = match encoder {
        Encoder::Absent => language,
        Encoder::Sized => json!({
            "model_type": "llava", "text_config": language, "tie_word_embeddings": false,
            "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
        }),
        Encoder::Named => {
            language["mm_vision_tower"] = json!("openai/clip-vit-large-patch14");
            language
        }
    };
    let mut weights = serde_json::Map::new();
    for layer in 0..layers {
        let name = format!("model.layers.{layer}.self_attn.q_proj.weight");
        weights.insert(name, json!("a"));
    }
    for name in names {
        weights.insert((*name).to_owned(), json!("a"));
    }
    weights.insert("lm_head.weight".into(), json!("a"));
    let mut index = json!({ "weight_map": weights });
    if !metadata.is_null() {
        index["metadata"] = metadata;
    }
    ModelFiles {
        config: config.to_string().into(),
        index: Some(index.to_string().into()),
        ..ModelFiles::default()
    }
}

fn read(files: &ModelFiles) -> Result<ReadModel, String> {
    files.read("x").map_err(|error| error.to_string())
}

fn gigabytes(bytes: f64) -> String {
    format!("{:.1} GB", bytes / 1e9)
}

proptest! {
    /// A total is accepted only if the model, and what the file says of its encoder, explain it; otherwise the error has both figures.
    #[test]
    fn a_total_of_other_weights_is_refused(
        factor in prop_oneof![0.1..6.0f64, 0.95..1.25f64],
        encoder in select(vec![Encoder::Absent, Encoder::Sized, Encoder::Named]),
        media in subsequence(OF_ENCODERS, 0..=3),
        prediction in subsequence(OF_PREDICTION, 0..=2),
        real: bool,
    ) {
        let total: f64 = f64::round(BYTES * factor);
        let names: Vec<&str> = media.iter().chain(&prediction).copied().collect();
        let number = if real { json!(total) } else { json!(total as u64) };
        let found = read(&files(encoder, &names, LAYERS, json!({ "total_size": number })));
        // The most that the weights left out may have, and the least.
        let of_media = match encoder {
            _ if media.is_empty() => [0.0, 0.0],
            Encoder::Absent => [0.0, 0.0],
            Encoder::Sized => [0.4e9, 1.6e9],
            Encoder::Named => [0.0, 3.8e9],
        };
        let of_prediction = if prediction.is_empty() { 0.0 } else { 2.5e9 };
        let rest = total - BYTES;
        match found {
            Ok(read) => {
                prop_assert!(rest <= 0.031 * total + of_media[1] + of_prediction, "{factor} {names:?} {encoder:?}");
                prop_assert!(rest >= -0.031 * total, "{factor} {names:?} {encoder:?}");
                prop_assert!(!read.notes.join(" ").contains("not checked"));
            }
            Err(error) => {
                prop_assert!(error.contains(&gigabytes(BYTES)) && error.contains(&gigabytes(total)), "{error}");
                let fits = rest.abs() <= 0.029 * total && of_media[0] == 0.0 && prediction.is_empty();
                prop_assert!(!fits, "{error}");
                let named = error.contains("of an encoder");
                prop_assert_eq!(named, !media.is_empty(), "{}", error);
            }
        }
    }

    #[test]
    fn a_total_that_is_no_size_is_refused(
        total in select(vec![json!(-1), json!(0), json!(-16.5e9), json!("16060522496"), json!([1]), json!({"a": 1}), json!(true)]),
        names in subsequence(OF_ENCODERS, 0..=2),
    ) {
        let error = read(&files(Encoder::Absent, &names, LAYERS, json!({ "total_size": total }))).unwrap_err();
        prop_assert!(error.contains("`total_size`") && error.contains("must be"), "{error}");
    }

    /// Layers beyond those of the file are for multi-token prediction only if it says so.
    #[test]
    fn other_numbers_of_layers_are_refused(layers in 1..64u64, names in subsequence(OF_ENCODERS, 0..=2)) {
        let total = json!({ "total_size": BYTES as u64 });
        match read(&files(Encoder::Absent, &names, layers, total)) {
            Ok(_) => prop_assert_eq!(layers, LAYERS),
            Err(error) => prop_assert!(error.contains(&format!("weights of {layers} layers")), "{error}"),
        }
    }
}

#[test]
fn an_index_without_a_total_is_noted() {
    for metadata in [Value::Null, json!({}), json!({ "total_size": null })] {
        let read = read(&files(Encoder::Absent, &["projector.x"], LAYERS, metadata)).unwrap();
        let notes = read.notes.join(" ");
        assert!(
            notes.contains("size of the weights is not checked"),
            "{notes}"
        );
    }
}
