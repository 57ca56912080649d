//! Number formats of a checkpoint, from `quantization_config` in its `config.json`.
//!
//! Supported: FP8 weights with FP8 activations, INT4 weights with 16-bit activations, NVFP4, MXFP4,
//! and FP8 KV caches. Other formats are refused by name, as their bytes or their peak differ.

use serde_json::{Map, Value};

use super::read::ShapeError;
use crate::cluster::Dtype;

/// The default formats in which vLLM would run a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Formats {
    /// Matrices of attention and MLPs.
    pub(super) weights: Dtype,
    /// Routed experts.
    pub(super) experts: Dtype,
    /// Keys and values.
    pub(super) kv_cache: Dtype,
}

type Object = Map<String, Value>;

const FIELD: &str = "quantization_config";

/// Reads the formats from `config`, or from `outer`, the object that contains it. `layers` is the
/// number of served layers; `latent`: it has latent attention; `mixture`: it has routed experts.
///
/// Source: vLLM 0.33, `vllm/model_executor/layers/quantization` (`fp8.py`, `fbgemm_fp8.py`,
/// `modelopt.py`, `compressed_tensors`) and `get_kv_cache_quant_algo_string` in
/// `vllm/utils/torch_utils.py`.
pub(super) fn read(
    outer: &Object,
    config: &Object,
    layers: u32,
    latent: bool,
    mixture: bool,
) -> Result<Formats, ShapeError> {
    let found = [config, outer].into_iter().find_map(|object| {
        // llm-compressor used the second name at first.
        let named = |field: &str| object.get(field).filter(|value| !value.is_null());
        named(FIELD).or_else(|| named("compression_config"))
    });
    let Some(found) = found else {
        return Ok(Formats {
            weights: Dtype::Bf16,
            experts: Dtype::Bf16,
            kv_cache: Dtype::Bf16,
        });
    };
    let Some(quantization) = found.as_object() else {
        return Err(unsupported("a value that is not a JSON object"));
    };
    let method = text(quantization, "quant_method").unwrap_or("(no `quant_method`)");
    // ModelOpt nests its settings in some files.
    let inner = quantization.get("quantization").and_then(Value::as_object);
    let inner = inner.unwrap_or(quantization);
    let bits = || {
        let named = |field| quantization.get(field);
        named("bits")
            .or_else(|| named("w_bit"))
            .map_or("?".into(), Value::to_string)
    };
    let mut only_experts = false;
    let (weights, kv_cache) = match method {
        // gpt-oss: only routed experts.
        "mxfp4" if mixture => {
            return Ok(Formats {
                weights: Dtype::Bf16,
                experts: Dtype::Mxfp4,
                kv_cache: Dtype::Bf16,
            });
        }
        "awq" | "gptq" | "awq_marlin" | "gptq_marlin" => match &*bits() {
            "4" => {
                check_dynamic(quantization)?;
                (Dtype::Int4, Dtype::Bf16)
            }
            bits => return Err(unsupported(&format!("`{method}` of {bits} bits"))),
        },
        // Dynamic scales: the cache stays in 16 bits unless `kv_cache_dtype` is set.
        "fp8" | "fbgemm_fp8" => (Dtype::Fp8, Dtype::Bf16),
        "compressed-tensors" => {
            let weights;
            (weights, only_experts) = check_groups(quantization)?;
            (weights, kv_format(quantization.get("kv_cache_scheme"))?)
        }
        "modelopt" => {
            let weights = match text(inner, "quant_algo") {
                Some(algorithm) if algorithm.eq_ignore_ascii_case("fp8") => Dtype::Fp8,
                Some(algorithm) if algorithm.eq_ignore_ascii_case("nvfp4") => Dtype::Nvfp4,
                algorithm => {
                    let algorithm = algorithm.unwrap_or("an unnamed format");
                    return Err(unsupported(&format!("`modelopt` with {algorithm}")));
                }
            };
            let scheme = ["kv_cache_scheme", "kv_cache_quant_algo"]
                .into_iter()
                .find_map(|key| inner.get(key).filter(|value| !value.is_null()));
            (weights, kv_format(scheme)?)
        }
        other => return Err(unsupported(&format!("the format `{other}`"))),
    };
    // Matrices in 16 bits that `Formats::of` expects: all except routed experts (INT4), or
    // attention (NVFP4).
    let known = |name: &str| {
        let routed = name.contains("experts") && !name.contains("shared");
        let whole_layer = !["attn", "attention", "_proj", "mlp", "shared"]
            .iter()
            .any(|part| name.contains(part));
        match weights {
            Dtype::Int4 => mixture && !routed && !whole_layer,
            Dtype::Nvfp4 => latent && ["attn", "attention"].iter().any(|part| name.contains(part)),
            _ => false,
        }
    };
    if only_experts && !(weights == Dtype::Int4 && mixture) {
        return Err(unsupported(
            "`compressed-tensors` whose `targets` are experts alone",
        ));
    }
    let mut kept = only_experts;
    for key in [
        "modules_to_not_convert",
        "ignored_layers",
        "ignore",
        "exclude_modules",
    ] {
        let names = quantization.get(key).or_else(|| inner.get(key));
        for name in names.and_then(Value::as_array).into_iter().flatten() {
            let projection = name.as_str().filter(|name| is_projection(name, layers));
            if let Some(name) = projection {
                if known(name) {
                    kept = true;
                    continue;
                }
                let what = format!("a projection kept in 16 bits (`{key}`: {name})");
                return Err(unsupported(&what));
            }
        }
    }
    if weights == Dtype::Int4 && mixture && !kept {
        // `Formats::of` assumes that attention of INT4 mixtures is in 16 bits.
        return Err(unsupported(
            "a mixture of experts whose attention has INT4 weights",
        ));
    }
    Ok(Formats {
        weights: if kept { Dtype::Bf16 } else { weights },
        experts: weights,
        kv_cache,
    })
}

/// The common format of all groups of a compressed-tensors file: FP8 weights and activations, INT4
/// weights with 16-bit activations, or FP4 weights and activations in groups of 16. Also whether the
/// targets are only routed experts.
fn check_groups(quantization: &Object) -> Result<(Dtype, bool), ShapeError> {
    let groups = quantization.get("config_groups").and_then(Value::as_object);
    let groups = groups.filter(|groups| !groups.is_empty());
    let Some(groups) = groups else {
        return Err(unsupported("`compressed-tensors` without `config_groups`"));
    };
    let mut found = None;
    let mut only_experts = true;
    for group in groups.values() {
        let targets = group.get("targets").and_then(Value::as_array);
        for target in targets.into_iter().flatten() {
            let name = target.as_str().unwrap_or("?");
            let of_experts = name.contains("experts") && !name.contains("shared");
            if name != "Linear" && !of_experts {
                let name: String = name.chars().take(60).collect();
                return Err(unsupported(&format!(
                    "`targets` of some layers alone ({name})"
                )));
            }
            only_experts &= of_experts;
        }
        only_experts &= targets.is_some_and(|targets| !targets.is_empty());
        let part = |part| group.get(part).filter(|value: &&Value| !value.is_null());
        let (weights, activations) = (part("weights"), part("input_activations"));
        let format = match (weights, activations) {
            (Some(weights), Some(activations))
                if is(weights, 8, "float") && is(activations, 8, "float") =>
            {
                Dtype::Fp8
            }
            (Some(weights), None) if is(weights, 4, "int") => Dtype::Int4,
            (Some(weights), Some(activations))
                if is(weights, 4, "float") && is(activations, 4, "float") =>
            {
                Dtype::Nvfp4
            }
            (weights, activations) => {
                let name = |scheme: Option<&Value>| scheme.map_or("16-bit".into(), name_of);
                let what = format!(
                    "`compressed-tensors` with {} weights under {} activations",
                    name(weights),
                    name(activations)
                );
                return Err(unsupported(&what));
            }
        };
        if found.is_some_and(|found| found != format) {
            return Err(unsupported(
                "`compressed-tensors` with groups of several formats",
            ));
        }
        found = Some(format);
    }
    Ok((found.expect("at least one group was checked"), only_experts))
}

/// Refuses other bits for some layers, which GPTQModel writes as patterns in `dynamic`.
fn check_dynamic(quantization: &Object) -> Result<(), ShapeError> {
    let dynamic = quantization.get("dynamic").and_then(Value::as_object);
    for pattern in dynamic.into_iter().flat_map(Object::keys) {
        // In 16 bits in any case, or small.
        let apart = ["lm_head", "embed", "norm", "visual", "vision", "mtp"];
        let router = pattern.trim_end_matches(['$', '*', '.']).ends_with("gate");
        if !router && !apart.iter().any(|word| pattern.contains(word)) {
            let pattern: String = pattern.chars().take(60).collect();
            return Err(unsupported(&format!(
                "other bits for some layers (`dynamic`: {pattern})"
            )));
        }
    }
    Ok(())
}

/// The format of keys and values for which a checkpoint contains scales.
fn kv_format(scheme: Option<&Value>) -> Result<Dtype, ShapeError> {
    match scheme.filter(|value| !value.is_null()) {
        None => Ok(Dtype::Bf16),
        Some(Value::String(name)) if name.eq_ignore_ascii_case("fp8") => Ok(Dtype::Fp8),
        Some(scheme) if is_fp8(scheme) => Ok(Dtype::Fp8),
        Some(Value::String(name)) => Err(unsupported(&format!("a KV cache of {name}"))),
        Some(scheme) => Err(unsupported(&format!("a KV cache of {}", name_of(scheme)))),
    }
}

fn is_fp8(scheme: &Value) -> bool {
    is(scheme, 8, "float")
}

fn is(scheme: &Value, bits: u64, kind: &str) -> bool {
    scheme.get("type").and_then(Value::as_str) == Some(kind)
        && scheme.get("num_bits").and_then(Value::as_u64) == Some(bits)
}

/// `4-bit int`, from a scheme of compressed-tensors.
fn name_of(scheme: &Value) -> String {
    let bits = scheme.get("num_bits").map_or("?".into(), Value::to_string);
    let kind = scheme.get("type").and_then(Value::as_str).unwrap_or("?");
    format!("{bits}-bit {kind}")
}

/// Whether a name or pattern of modules that are not quantized refers to matrices of a layer's
/// attention or MLP. Other modules do not matter: embeddings, output heads and norms are always in
/// 16 bits, routers of experts are small. Vision encoders and layers beyond the model's own
/// (multi-token prediction) are not served.
fn is_projection(name: &str, layers: u32) -> bool {
    let name = name.to_ascii_lowercase();
    let other = ["norm", "visual", "vision", "mtp", "embed", "lm_head"];
    if other.iter().any(|word| name.contains(word)) {
        return false;
    }
    let layer = name.split("layers.").nth(1).and_then(|rest| {
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<u32>().ok()
    });
    if layer.is_some_and(|layer| layer >= layers) {
        return false;
    }
    let projections = [
        "_proj",
        "attn",
        "attention",
        "qkv",
        "gate_up",
        "experts",
        "dense_",
    ];
    projections.iter().any(|word| name.contains(word))
        || name.trim_end_matches(['*', '.', '$']).ends_with("mlp")
        || layer.is_some()
            && name
                .trim_end_matches(['*', '.'])
                .ends_with(|c: char| c.is_ascii_digit())
}

fn text<'a>(object: &'a Object, key: &str) -> Option<&'a str> {
    object.get(key).and_then(Value::as_str)
}

fn unsupported(what: &str) -> ShapeError {
    ShapeError::Unsupported {
        field: FIELD,
        what: what.to_owned().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn formats(quantization: &str) -> Result<Formats, String> {
        let text = format!("{{\"quantization_config\": {quantization}}}");
        let outer: Object = serde_json::from_str(&text).unwrap();
        read(&outer, &Object::new(), 4, false, true).map_err(|e| e.to_string())
    }

    const FP8: Formats = Formats {
        weights: Dtype::Fp8,
        experts: Dtype::Fp8,
        kv_cache: Dtype::Bf16,
    };
    const FP8_KV: Formats = Formats {
        kv_cache: Dtype::Fp8,
        ..FP8
    };

    #[test]
    fn fp8_checkpoints_are_fp8() {
        let eight = r#"{"num_bits": 8, "type": "float", "dynamic": true}"#;
        let groups = format!(
            "\"config_groups\": {{\"group_0\": {{\"weights\": {eight}, \"input_activations\": {eight}}}}}"
        );
        let cases = [
            // Qwen3-235B-A22B-FP8 lists modules that are small or not in a layer's matrices.
            (
                r#"{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head",
                    "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]}"#
                    .to_owned(),
                FP8,
            ),
            (
                r#"{"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}"#.into(),
                FP8,
            ),
            (
                r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.4.self_attn.q_proj"]}"#
                    .into(),
                FP8, // a layer for multi-token prediction, after the four
            ),
            (
                format!(
                    "{{\"quant_method\": \"compressed-tensors\", {groups}, \"ignore\": [\"lm_head\"]}}"
                ),
                FP8,
            ),
            (
                format!(
                    "{{\"quant_method\": \"compressed-tensors\", {groups}, \"kv_cache_scheme\": {eight}}}"
                ),
                FP8_KV,
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "FP8"}"#.into(),
                FP8,
            ),
            (
                r#"{"quant_method": "modelopt", "quantization": {"quant_algo": "FP8",
                    "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}"#
                    .into(),
                FP8_KV,
            ),
        ];
        for (json, expected) in cases {
            assert_eq!(formats(&json), Ok(expected), "{json}");
        }
        assert_eq!(formats("null").unwrap().weights, Dtype::Bf16);
    }

    #[test]
    fn only_experts_have_four_bits_if_the_rest_is_kept() {
        // Kimi-K2.5 and gpt-oss.
        let int4 = r#"{"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights":
            {"num_bits": 4, "type": "int", "group_size": 32}, "input_activations": null}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]}"#;
        let of_experts = |experts| Formats {
            weights: Dtype::Bf16,
            experts,
            kv_cache: Dtype::Bf16,
        };
        assert_eq!(formats(int4), Ok(of_experts(Dtype::Int4)));
        let mxfp4 =
            r#"{"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}"#;
        assert_eq!(formats(mxfp4), Ok(of_experts(Dtype::Mxfp4)));
        let whole = formats(r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#).unwrap();
        assert_eq!((whole.weights, whole.experts), (Dtype::Nvfp4, Dtype::Nvfp4));
    }

    #[test]
    fn other_formats_are_refused_by_name() {
        let group = |weights: &str, activations: &str| {
            format!(
                "{{\"quant_method\": \"compressed-tensors\", \"config_groups\": {{\"group_0\": \
                 {{\"weights\": {weights}, \"input_activations\": {activations}}}}}}}"
            )
        };
        let eight = r#"{"num_bits": 8, "type": "float"}"#;
        let cases = [
            (r#"{"quant_method": "awq", "bits": 8}"#.into(), "`awq` of 8 bits"),
            (r#"{"quant_method": "bitsandbytes"}"#.into(), "the format `bitsandbytes`"),
            (
                r#"{"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mlp.*": {}}}"#.into(),
                "other bits for some layers (`dynamic`: -:.*mlp.*)",
            ),
            (
                group(eight, eight).replace("\"weights\"", "\"targets\": [\"re:.*mlp.*\"], \"weights\""),
                "`targets` of some layers alone (re:.*mlp.*)",
            ),
            (
                group(eight, eight).replace("\"weights\"", "\"targets\": [\"re:.*experts.*\"], \"weights\""),
                "whose `targets` are experts alone",
            ),
            (r#"{"bits": 4}"#.into(), "(no `quant_method`)"),
            ("3".into(), "not a JSON object"),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}"#.into(),
                "`modelopt` with W4A8_AWQ",
            ),
            (
                group(r#"{"num_bits": 4, "type": "int"}"#, "null"),
                "a mixture of experts whose attention has INT4",
            ),
            (group(eight, "null"), "8-bit float weights under 16-bit activations"),
            (
                group(eight, r#"{"num_bits": 8, "type": "int"}"#),
                "8-bit int activations",
            ),
            (
                r#"{"quant_method": "compressed-tensors"}"#.into(),
                "without `config_groups`",
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}"#
                    .into(),
                "a KV cache of NVFP4",
            ),
            // Llama-3.1-405B-FP8 keeps attention, and the first and last layers, in 16 bits.
            (
                r#"{"quant_method": "fbgemm_fp8", "modules_to_not_convert":
                    ["model.layers.0.mlp.down_proj"]}"#
                    .into(),
                "model.layers.0.mlp.down_proj",
            ),
            (
                r#"{"quant_method": "fp8", "ignored_layers": ["model.layers.3"]}"#.into(),
                "model.layers.3",
            ),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules":
                    ["*.self_attn*"]}"#
                    .into(),
                "*.self_attn*",
            ),
        ];
        for (json, part) in cases {
            let error = formats(&json).unwrap_err();
            assert!(error.starts_with("`quantization_config`: "), "{error}");
            assert!(error.contains(part), "{error} for {json}");
        }
    }
}
