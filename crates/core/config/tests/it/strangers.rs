//! Configurations as strangers write them: keys of other names, in other objects, too many or too few.
//!
//! After any such change, the result is the same model, or an error or a note that names a key concerned: never a model
//! of another size without a word.

use std::sync::LazyLock;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Map, Value, json};
use slipstream_config::preset::{ModelShape, ReadModel};

use crate::models::{published, read};

/// Models, each with the shape that is read of its file.
pub(crate) static MODELS: LazyLock<Vec<(Value, ReadModel)>> = LazyLock::new(|| {
    published()
        .into_iter()
        .filter(|model| model.refused.is_none())
        .map(|model| {
            let read = read(&model.config).expect(&model.name);
            (model.config, read)
        })
        .collect()
});

/// The object of the language model.
pub(crate) fn language(config: &mut Value) -> &mut Map<String, Value> {
    let object = config.as_object_mut().expect("an object");
    if object.contains_key("text_config") {
        object["text_config"].as_object_mut().expect("an object")
    } else {
        object
    }
}

/// Parts of a shape that decide the size, the compute and the cache of a model: all but its name, its context, norms of heads, and the
/// width of dense MLPs that no layer has.
fn sizes(shape: &ModelShape) -> ModelShape {
    let dense = shape.experts.is_none_or(|experts| experts.dense_layers > 0);
    ModelShape {
        max_positions: 0,
        qk_norm: false,
        intermediate_size: if dense { shape.intermediate_size } else { 0 },
        ..shape.clone()
    }
}

/// `key` as others would spell it.
fn respelled(key: &str, how: usize) -> String {
    let words: Vec<&str> = key.split('_').collect();
    match how {
        0 => format!("moe_{key}"),
        1 => format!("{key}_count"),
        2 => key.replacen("num_", "n_", 1) + if key.starts_with("num_") { "" } else { "_2" },
        3 => {
            words.iter().rev().copied().collect::<Vec<_>>().join("_")
                + if words.len() == 1 { "_1" } else { "" }
        }
        4 => {
            let mut camel = String::new();
            for word in words {
                let (first, rest) = word.split_at(usize::from(!word.is_empty()));
                camel += &first.to_ascii_uppercase();
                camel += rest;
            }
            camel
        }
        5 => format!("text_{key}"),
        6 => format!("{key}s"),
        7 => format!("model.{key}"),
        8 => key.replace("expert", "specialist").replace("head", "hd") + "_",
        _ => format!("{key}_per_layer"),
    }
}

/// A key that no known class has, with a value other than null, false or zero.
fn unknown_key() -> impl Strategy<Value = (String, Value)> {
    let before = select(vec![
        "", "num_", "n_", "moe_", "ssm_", "text_", "use_", "max_", "sparse_", "linear_", "layer_",
    ]);
    let middle = select(vec![
        "routed_expert",
        "expert",
        "mamba_head",
        "state",
        "conv_kernel",
        "recurrent",
        "window",
        "local_attention",
        "latent_dim",
        "kv_rank",
        "index_head",
        "topk_block",
        "chunk",
        "quant_bit",
        "weight_group",
        "mtp_block",
        "kv_share",
        "loop",
        "memory_token",
        "hidden_group",
        "ffn_ratio",
        "vocab_extra",
        "shared_layer",
        "delta_head",
        "gate_group",
        "block_sparse",
        "compress_stride",
        "lora_rank_kv",
        "cross_attention",
        "tied_block",
    ]);
    let after = select(vec![
        "", "s", "_size", "_count", "_list", "_config", "_freq", "_dim",
    ]);
    let value = prop_oneof![
        (2..200_000u64).prop_map(Value::from),
        (2..64usize, 2..9u64).prop_map(|(count, value)| Value::from(vec![value; count])),
        Just(Value::Bool(true)),
        (2..9u64).prop_map(|value| json!({ "type": "block", "size": value })),
        select(vec!["mamba2", "sliding", "int3"]).prop_map(Value::from),
    ];
    (before, middle, after, value)
        .prop_map(|(before, middle, after, value)| (format!("{before}{middle}{after}x"), value))
}

/// Whether `text` names `key`, or the key that takes its place.
fn names(text: &str, keys: &[&str]) -> bool {
    keys.iter().any(|key| text.contains(key))
}

/// Fails if `changed` is read as another model than `before` without a word about one of `keys`.
fn check(changed: &Value, before: &ReadModel, keys: &[&str]) -> Result<(), TestCaseError> {
    match read(changed) {
        Err(error) => prop_assert!(names(&error, keys), "{error}, and not a word of {keys:?}"),
        Ok(after) => {
            let same = sizes(&after.shape) == sizes(&before.shape);
            let noted = names(&after.notes.join(" "), keys);
            prop_assert!(
                same || noted,
                "silently another model for {keys:?}: {:?} instead of {:?}",
                after.shape,
                before.shape
            );
        }
    }
    Ok(())
}

/// A key of the language model of the model at `at`, drawn by `key`.
fn draw(at: Index, key: Index) -> (Value, &'static ReadModel, String) {
    let (config, before) = &MODELS[at.index(MODELS.len())];
    let mut config = config.clone();
    let object = language(&mut config);
    let key = object
        .keys()
        .nth(key.index(object.len()))
        .expect("a key")
        .clone();
    (config, before, key)
}

/// Keys whose absence makes the file that of another checkpoint, whatever else it says.
const OF_CHECKPOINTS: &[&str] = &[
    "quantization_config",
    "model_type",
    "rope_scaling",
    "rope_parameters",
];

proptest! {
    #[test]
    fn renamed_keys_are_noticed(at: Index, key: Index, how in 0..10usize) {
        let (mut config, before, key) = draw(at, key);
        let new = respelled(&key, how);
        let object = language(&mut config);
        prop_assume!(!object.contains_key(&new));
        let value = object.remove(&key).expect("it is there");
        object.insert(new.clone(), value);
        check(&config, before, &[&key, &new])?;
    }

    #[test]
    fn keys_in_another_object_are_noticed(
        at: Index,
        keys in prop::collection::vec(any::<Index>(), 1..4),
        name in select(vec!["moe_config", "attention", "ffn_config", "ssm_cfg", "layers_config", "model", "extra"]),
    ) {
        let (mut config, before, _) = draw(at, keys[0]);
        let mut inner = Map::new();
        for key in &keys {
            let object = language(&mut config);
            let key = object.keys().nth(key.index(object.len())).expect("a key").clone();
            if let Some(value) = object.remove(&key) {
                inner.insert(key, value);
            }
        }
        let moved: Vec<String> = inner.keys().cloned().collect();
        language(&mut config).insert(name.to_owned(), Value::Object(inner));
        let mut named: Vec<&str> = moved.iter().map(String::as_str).collect();
        named.push(name);
        check(&config, before, &named)?;
    }

    #[test]
    fn removed_keys_are_noticed(at: Index, key: Index) {
        let (mut config, before, key) = draw(at, key);
        prop_assume!(!OF_CHECKPOINTS.contains(&&*key));
        language(&mut config).remove(&key);
        check(&config, before, &[&key])?;
    }

    #[test]
    fn unknown_keys_are_refused_by_name(at: Index, (key, value) in unknown_key(), outside: bool) {
        let (config, _) = &MODELS[at.index(MODELS.len())];
        let mut config = config.clone();
        let object = if outside {
            config.as_object_mut().expect("an object")
        } else {
            language(&mut config)
        };
        object.insert(key.clone(), value);
        let error = read(&config).map(|read| read.shape);
        let error = error.expect_err("a key that nobody knows");
        prop_assert!(error.contains(&format!("{key}`")), "{error}");
    }

    #[test]
    fn unknown_keys_of_formats_are_refused_by_name(at: Index, (key, value) in unknown_key()) {
        let (config, _) = &MODELS[at.index(MODELS.len())];
        let mut config = config.clone();
        let object = language(&mut config);
        let formats = object.entry("quantization_config").or_insert_with(|| json!({ "quant_method": "fp8" }));
        formats.as_object_mut().expect("an object").insert(key.clone(), value);
        let error = read(&config).map(|read| read.shape);
        let error = error.expect_err("a key that nobody knows");
        prop_assert!(error.contains(&key) || error.contains("quantization_config"), "{error}");
    }

    #[test]
    fn relatives_of_known_architectures_are_refused(
        at: Index,
        end in select(vec!["2", "9", "_moe", "_next", "_linear", "x", "_v2", "_text", "_sparse"]),
        class: bool,
    ) {
        let (config, _) = &MODELS[at.index(MODELS.len())];
        let mut config = config.clone();
        let object = language(&mut config);
        let known = if class && object.contains_key("architectures") { "architectures" } else { "model_type" };
        let name = match &object[known] {
            Value::Array(names) => format!("{}{end}", names[0].as_str().unwrap_or_default()),
            name => format!("{}{end}", name.as_str().unwrap_or_default()),
        };
        // `qwen3` + `_moe` and the like are known themselves: their own rules apply.
        let before = sizes(&MODELS[at.index(MODELS.len())].1.shape);
        object.insert(known.to_owned(), if known == "architectures" { json!([name]) } else { json!(name) });
        match read(&config) {
            Err(error) => prop_assert!(error.contains('`'), "{error}"),
            Ok(after) => prop_assert_eq!(sizes(&after.shape), before),
        }
    }

    /// A module kept in 16 bits, whatever the pattern that names it.
    #[test]
    fn projections_kept_in_sixteen_bits_are_refused(
        layer in 0..4u32,
        module in select(vec!["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "self_attn", "mlp"]),
        number in 0..4usize,
        start in 0..5usize,
        end in select(vec!["", ".*", "*", "$"]),
        among in 0..3usize,
        file in 0..4usize,
    ) {
        let number = [layer.to_string(), "*".into(), "\\d+".into(), ".*".into()][number].clone();
        let name = format!("layers.{number}.{module}");
        let name = match start {
            0 => format!("model.{name}"),
            1 => format!("re:.*{name}"),
            2 => format!("re:.*(lm_head|{name})"),
            3 => format!("*{name}"),
            _ => name.replace(&format!("layers.{number}."), "*"),
        } + end;
        let mut names = vec!["lm_head".to_owned(), "re:.*mlp.gate$".to_owned()];
        names.insert(among, name.clone());
        let mut config = json!({
            "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": false,
        });
        config["quantization_config"] = match file {
            0 => json!({ "quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": names }),
            1 => json!({ "quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": names }),
            2 => json!({ "quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": names }),
            _ => {
                let eight = json!({ "num_bits": 8, "type": "float", "strategy": "channel" });
                let group = json!({ "targets": ["Linear"], "weights": eight, "input_activations": eight });
                json!({ "quant_method": "compressed-tensors", "ignore": names, "config_groups": { "a": group } })
            }
        };
        let error = read(&config).map(|read| read.shape).expect_err("a layer is kept");
        prop_assert!(error.contains("kept in 16 bits"), "{error} for {name}");
    }

    /// Mixtures that keep some of their modules: read with the bytes that are computed here, or refused.
    #[test]
    fn kept_modules_of_mixtures_are_counted_or_refused(
        latent: bool,
        method in 0..4usize,
        attention in 0..5usize,
        dense in 0..5usize,
        shared in 0..5usize,
        extra in select(vec!["lm_head", "re:.*mlp.gate$", "re:^(?!.*norm).*self_attn.*$", "model.layers.9*", "re:.*experts.1.*", "re:.*\\.2\\..*"]),
    ) {
        const LAYERS: u64 = 6;
        let mut config = json!({
            "num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 128,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512,
            "tie_word_embeddings": false, "num_experts_per_tok": 2,
        });
        let object = config.as_object_mut().expect("an object");
        let (more, of_attention, dense_layers) = if latent {
            (json!({"model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 2,
                "kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}),
                256 * 96 + 96 * 4 * 48 + 256 * 80 + 64 * 4 * 64 + 4 * 32 * 256, 2)
        } else {
            (json!({"model_type": "qwen3_moe", "num_experts": 8, "head_dim": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}),
                4 * 256 * 256, 0)
        };
        object.extend(more.as_object().expect("an object").clone());
        let projections: &[&str] = if latent {
            &["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
        } else {
            &["q_proj", "k_proj", "v_proj", "o_proj"]
        };
        let mlp: &[&str] = &["gate_proj", "up_proj", "down_proj"];
        let wild = if method == 0 { "*" } else { "re:.*" };
        let end = if method == 0 { "*" } else { ".*" };
        // All by a pattern, all by name, all but one module, all but a layer; or none.
        let keep = |how: usize, of: &str, names: &[&str], layers: std::ops::Range<u64>| -> Vec<String> {
            let mut all: Vec<String> = layers
                .flat_map(|layer| names.iter().map(move |name| format!("model.layers.{layer}.{of}.{name}")))
                .collect();
            match how {
                0 => Vec::new(),
                1 if of == "mlp" && method == 0 => all,
                1 if of == "mlp" => vec![r"re:.*mlp\.(gate|up|gate_up|down)_proj.*".to_owned()],
                1 => vec![format!("{wild}{of}{end}")],
                2 => all,
                3 => { all.pop(); all }
                _ => { all.drain(..names.len()); all }
            }
        };
        let mut names = keep(attention, "self_attn", projections, 0..LAYERS);
        if latent {
            names.extend(keep(dense, "mlp", mlp, 0..dense_layers));
            names.extend(keep(shared, "mlp.shared_experts", mlp, dense_layers..LAYERS));
        }
        names.push(extra.to_owned());
        let group = |weights: Value, activations: Value| json!({ "quant_method": "compressed-tensors", "ignore": names,
            "config_groups": { "a": { "targets": ["Linear"], "weights": weights, "input_activations": activations } } });
        let eight = json!({ "num_bits": 8, "type": "float", "strategy": "channel" });
        let four = json!({ "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16 });
        let (formats, bytes) = match method {
            0 => (json!({ "quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": names }), 0.5625),
            1 => (group(json!({ "num_bits": 4, "type": "int", "group_size": 128 }), Value::Null), 0.5 + 2.0 / 128.0),
            2 => (group(eight.clone(), eight), 1.0),
            _ => (group(four.clone(), four), 0.5625),
        };
        config["quantization_config"] = formats;
        let other = ["re:.*experts.1.*", "re:.*\\.2\\..*", "re:^(?!.*norm).*self_attn.*$"];
        // A glob or text is no expression: ModelOpt's names match nothing then, and are refused all the same.
        let partial = attention > 2
            || latent && (dense > 2 || shared > 2 || (dense > 0) != (shared > 0))
            || other.contains(&extra);
        let found = read(&config);
        if partial {
            let error = found.map(|read| read.shape).expect_err("a part is kept");
            prop_assert!(error.contains("kept"), "{error}");
        } else {
            let shape = found.map_err(TestCaseError::fail)?.shape;
            let of = |kept: bool| if kept { 2.0 } else { bytes };
            let sparse = (LAYERS - dense_layers) as f64;
            let mlps = if latent { dense_layers as f64 * 1024.0 + sparse * 256.0 } else { 0.0 };
            let expected = LAYERS as f64 * f64::from(of_attention) * of(attention > 0)
                + 3.0 * 256.0 * mlps * of(latent && shared > 0)
                + sparse * 8.0 * 3.0 * 256.0 * 128.0 * bytes
                + sparse * 8.0 * 256.0 * 2.0
                + 2.0 * 1000.0 * 256.0 * 2.0;
            let formats = slipstream_config::preset::Formats::of(&shape, shape.dtype());
            let found = formats.weight_bytes(&shape, 1, 1);
            prop_assert!((found / expected - 1.0).abs() < 1e-4, "{found} instead of {expected}: {names:?}");
        }
    }

    /// `dynamic` of GPTQ: other bits for any projection of a dense model are refused, whatever the pattern.
    #[test]
    fn other_bits_of_projections_are_refused(
        start in select(vec!["-:", "+:", ""]),
        before in select(vec![".*", "model\\.layers\\.\\d+\\..*", ".*\\.1\\..*", "^.*"]),
        module in select(vec!["gate", "mlp.*gate", "down", "(norm|down_proj)", "self_attn", "layers", "q_proj", "up"]),
        end in select(vec!["", ".*", ".+", "_proj", "_proj$"]),
    ) {
        let pattern = format!("{start}{before}{module}{end}");
        let config = json!({
            "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": false,
            "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {pattern.as_str(): {"bits": 8}}},
        });
        let error = read(&config).map(|read| read.shape).expect_err("other bits");
        prop_assert!(error.contains("`dynamic`"), "{error} for {pattern}");
    }

    #[test]
    fn nothing_panics(at: Index, changes in prop::collection::vec((any::<Index>(), 0..8usize), 1..6)) {
        let (config, _) = &MODELS[at.index(MODELS.len())];
        let mut config = config.clone();
        for (key, value) in changes {
            let object = language(&mut config);
            let key = object.keys().nth(key.index(object.len())).expect("a key").clone();
            let value = match value {
                0 => json!(0),
                1 => json!(-1),
                2 => json!(u64::MAX),
                3 => json!(1e300),
                4 => json!("Infinity"),
                5 => json!([1, "a", null]),
                6 => json!({"a": [], "rope_type": "yarn", "factor": 1e4}),
                _ => Value::Null,
            };
            object.insert(key, value);
        }
        let _ = read(&config);
    }
}
