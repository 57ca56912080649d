//! Number formats of a checkpoint: what `quantization_config` of its `config.json` says.
//!
//! FP8 weights that are multiplied with FP8 activations are taken, and FP8 KV caches. All else is
//! refused by name: another format has other bytes, another peak, or both.

use serde_json::{Map, Value};

use super::model::ShapeError;
use crate::cluster::Dtype;

/// Formats in which vLLM would run a checkpoint if nothing else is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Formats {
    /// Of the matrices of attention and MLPs.
    pub(super) weights: Dtype,
    /// Of keys and values.
    pub(super) kv_cache: Dtype,
}

type Object = Map<String, Value>;

const FIELD: &str = "quantization_config";

/// Reads the formats from `config`, or from `outer`, the object that holds it. `layers` is the number
/// of layers that are served.
///
/// Source: vLLM 0.33, `vllm/model_executor/layers/quantization` (`fp8.py`, `fbgemm_fp8.py`,
/// `modelopt.py`, `compressed_tensors`) and `get_kv_cache_quant_algo_string` in
/// `vllm/utils/torch_utils.py`.
pub(super) fn read(outer: &Object, config: &Object, layers: u32) -> Result<Formats, ShapeError> {
    let found = [config, outer].into_iter().find_map(|object| {
        // llm-compressor wrote the second name at first.
        let named = |field: &str| object.get(field).filter(|value| !value.is_null());
        named(FIELD).or_else(|| named("compression_config"))
    });
    let Some(found) = found else {
        return Ok(Formats {
            weights: Dtype::Bf16,
            kv_cache: Dtype::Bf16,
        });
    };
    let Some(quantization) = found.as_object() else {
        return Err(unsupported("what is not a JSON object"));
    };
    let method = text(quantization, "quant_method").unwrap_or("(no `quant_method`)");
    // ModelOpt nests its settings in some files.
    let inner = quantization.get("quantization").and_then(Value::as_object);
    let inner = inner.unwrap_or(quantization);
    let kv_cache = match method {
        // Online scales: the cache stays in 16 bits unless `kv_cache_dtype` says otherwise.
        "fp8" | "fbgemm_fp8" => Dtype::Bf16,
        "compressed-tensors" => {
            check_groups(quantization)?;
            kv_format(quantization.get("kv_cache_scheme"))?
        }
        "modelopt" => {
            match text(inner, "quant_algo") {
                Some(algorithm) if algorithm.eq_ignore_ascii_case("fp8") => {}
                algorithm => {
                    let algorithm = algorithm.unwrap_or("an unnamed format");
                    return Err(unsupported(&format!("`modelopt` with {algorithm}")));
                }
            }
            let said = ["kv_cache_scheme", "kv_cache_quant_algo"]
                .into_iter()
                .find_map(|key| inner.get(key).filter(|value| !value.is_null()));
            kv_format(said)?
        }
        other => return Err(unsupported(&format!("the format `{other}`"))),
    };
    for key in [
        "modules_to_not_convert",
        "ignored_layers",
        "ignore",
        "exclude_modules",
    ] {
        let names = quantization.get(key).or_else(|| inner.get(key));
        for name in names.and_then(Value::as_array).into_iter().flatten() {
            if let Some(name) = name.as_str().filter(|name| is_projection(name, layers)) {
                let what = format!("a projection kept in 16 bits (`{key}`: {name})");
                return Err(unsupported(&what));
            }
        }
    }
    Ok(Formats {
        weights: Dtype::Fp8,
        kv_cache,
    })
}

/// Checks that all groups of a compressed-tensors file have FP8 weights and FP8 activations.
fn check_groups(quantization: &Object) -> Result<(), ShapeError> {
    let groups = quantization.get("config_groups").and_then(Value::as_object);
    let groups = groups.filter(|groups| !groups.is_empty());
    let Some(groups) = groups else {
        return Err(unsupported("`compressed-tensors` without `config_groups`"));
    };
    for group in groups.values() {
        for (part, name) in [
            ("weights", "weights"),
            ("input_activations", "activations under 8-bit weights"),
        ] {
            let scheme = group.get(part).filter(|value| !value.is_null());
            if !scheme.is_some_and(is_fp8) {
                let format = scheme.map_or("16-bit".into(), name_of);
                let what = format!("`compressed-tensors` with {format} {name}");
                return Err(unsupported(&what));
            }
        }
    }
    Ok(())
}

/// The format of keys and values that a checkpoint brings scales for.
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
    scheme.get("type").and_then(Value::as_str) == Some("float")
        && scheme.get("num_bits").and_then(Value::as_u64) == Some(8)
}

/// `4-bit int`, of a scheme of compressed-tensors.
fn name_of(scheme: &Value) -> String {
    let bits = scheme.get("num_bits").map_or("?".into(), Value::to_string);
    let kind = scheme.get("type").and_then(Value::as_str).unwrap_or("?");
    format!("{bits}-bit {kind}")
}

/// Whether a name or pattern of modules that are not quantized means matrices of a layer's attention
/// or MLP. Embeddings, output heads and norms are in 16 bits in any case, routers of experts are
/// small, and encoders of pictures and layers beyond the model's own (multi-token prediction)
/// are not served.
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
        read(&outer, &Object::new(), 4).map_err(|e| e.to_string())
    }

    const FP8: Formats = Formats {
        weights: Dtype::Fp8,
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
            // Qwen3-235B-A22B-FP8 lists what is small or not in a layer's matrices.
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
                FP8, // a layer for multi-token prediction, behind the four
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
    fn other_formats_are_refused_by_name() {
        let group = |weights: &str, activations: &str| {
            format!(
                "{{\"quant_method\": \"compressed-tensors\", \"config_groups\": {{\"group_0\": \
                 {{\"weights\": {weights}, \"input_activations\": {activations}}}}}}}"
            )
        };
        let eight = r#"{"num_bits": 8, "type": "float"}"#;
        let cases = [
            (r#"{"quant_method": "awq", "bits": 4}"#.into(), "the format `awq`"),
            (r#"{"quant_method": "mxfp4"}"#.into(), "the format `mxfp4`"),
            (r#"{"bits": 4}"#.into(), "(no `quant_method`)"),
            ("3".into(), "not a JSON object"),
            (
                r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#.into(),
                "`modelopt` with NVFP4",
            ),
            (
                group(r#"{"num_bits": 4, "type": "int"}"#, "null"),
                "4-bit int weights",
            ),
            (group(eight, "null"), "16-bit activations"),
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
