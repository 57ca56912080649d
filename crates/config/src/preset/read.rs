//! Reads the shape of a model from its `config.json`.

use std::borrow::Cow;

use serde_json::{Map, Value};
use thiserror::Error;

use slipstream_base::width::{floor_u64, to_u32};

use super::model::{Attention, Experts, ModelShape};
use super::{layers, quantization};
use crate::cluster::Dtype;

impl ModelShape {
    /// Reads a Hugging Face style `config.json`; `name` is the model's name.
    ///
    /// Layers for multi-token prediction (`use_mtp`, `num_nextn_predict_layers`) are omitted: vLLM
    /// loads them only for speculative decoding, which is not modelled.
    ///
    /// # Errors
    /// If it is not a JSON object, a size is missing or invalid, or this shape cannot express a
    /// property: a kind of attention or MLP (state-space layers, several kinds of windows), or a
    /// format of the weights. The message has the field's name.
    pub fn from_config_json(name: &str, json: &[u8]) -> Result<ModelShape, ShapeError> {
        let value: Value = serde_json::from_slice(json)?;
        let outer = value.as_object().ok_or(ShapeError::NoObject)?;
        // Multimodal models have the language model in a separate object.
        let inner = ["text_config", "language_config", "llm_config"];
        let config = match inner.iter().find_map(|field| outer.get(*field)) {
            Some(inner) => inner.as_object().ok_or(ShapeError::NoObject)?,
            None => outer,
        };
        let model_type = known_model_type(config)?;
        let gemma = model_type.starts_with("gemma");
        let hidden_size = number(config, "hidden_size")?;
        let layers = number(config, "num_hidden_layers")?;
        let attention = layers::attention(config, layers)?;
        let attention_heads = number(config, "num_attention_heads")?;
        let kv_heads = optional(config, "num_key_value_heads")?.unwrap_or(attention_heads);
        if !attention_heads.is_multiple_of(kv_heads) {
            return Err(ShapeError::Range {
                field: "num_key_value_heads",
                found: kv_heads.to_string(),
                must: "a divisor of num_attention_heads",
            });
        }
        let mut count = None;
        for field in ["num_local_experts", "num_experts", "n_routed_experts"] {
            count = match count {
                None => optional(config, field)?,
                found => found,
            };
        }
        let latent = matches!(attention, Attention::Latent { .. });
        let formats = quantization::read(outer, config, layers, latent, count.is_some())?;
        let experts = match count {
            None => None,
            Some(count) => {
                let per_token = number(config, "num_experts_per_tok")?;
                if per_token > count {
                    return Err(ShapeError::Range {
                        field: "num_experts_per_tok",
                        found: per_token.to_string(),
                        must: "at most the number of experts",
                    });
                }
                let intermediate_size = match optional(config, "moe_intermediate_size")? {
                    Some(width) => width,
                    None => number(config, "intermediate_size")?,
                };
                Some(Experts {
                    count,
                    per_token,
                    intermediate_size,
                    shared_size: layers::shared_width(config, model_type, intermediate_size)?,
                    dense_layers: layers::dense_layers(config, layers)?,
                    weights: formats.experts,
                })
            }
        };
        Ok(ModelShape {
            name: name.to_owned().into(),
            source: "config.json".into(),
            layers,
            hidden_size,
            intermediate_size: match (
                // Llama 4: separate widths of dense layers and of experts.
                optional(config, "intermediate_size_mlp")?
                    .or(optional(config, "intermediate_size")?),
                experts,
            ) {
                (Some(width), _) => width,
                (None, Some(experts)) => experts.intermediate_size,
                (None, None) => number(config, "intermediate_size")?,
            },
            attention_heads,
            kv_heads,
            head_dim: match (attention, gemma) {
                (
                    Attention::Latent {
                        rope_dim, nope_dim, ..
                    },
                    _,
                ) => rope_dim.saturating_add(nope_dim),
                // Gemma's files leave the default of their class out.
                (_, true) => optional(config, "head_dim")?.unwrap_or(256),
                (_, false) => {
                    optional(config, "head_dim")?.unwrap_or((hidden_size / attention_heads).max(1))
                }
            },
            vocab_size: if model_type == "gemma3_text" {
                optional(config, "vocab_size")?.unwrap_or(262_208)
            } else {
                number(config, "vocab_size")?
            },
            max_positions: context(config, model_type)?,
            tied_embeddings: config
                .get("tie_word_embeddings")
                .or_else(|| outer.get("tie_word_embeddings"))
                .and_then(Value::as_bool)
                // The default of the classes whose files leave it out.
                .unwrap_or(gemma || model_type.starts_with("cohere")),
            qk_norm: model_type.starts_with("qwen3")
                || config.get("use_qk_norm").and_then(Value::as_bool) == Some(true),
            weights: formats.weights,
            kv_cache: formats.kv_cache,
            experts,
            attention,
        })
    }
}

/// Why a `config.json` was refused. Correct the file, or choose a preset.
#[derive(Debug, Error)]
pub enum ShapeError {
    /// Not JSON.
    #[error("not JSON")]
    Json(#[from] serde_json::Error),
    /// JSON, but not an object.
    #[error("not a JSON object")]
    NoObject,
    /// A field is missing.
    #[error("`{0}` is missing")]
    Missing(&'static str),
    /// A field is invalid.
    #[error("`{field}` is {found}, but must be {must}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// The valid values.
        must: &'static str,
    },
    /// A kind of attention or MLP that [`ModelShape`] cannot express.
    #[error("`{field}`: {what} is not modelled")]
    Unsupported {
        /// The field.
        field: &'static str,
        /// The unsupported property.
        what: Cow<'static, str>,
    },
}

pub(super) fn unsupported(field: &'static str, what: &'static str) -> ShapeError {
    ShapeError::Unsupported {
        field,
        what: what.into(),
    }
}

/// The `model_type` of `config`, or "" if there is none, which is read as a Llama.
fn known_model_type(config: &Map<String, Value>) -> Result<&str, ShapeError> {
    let Some(model_type) = config.get("model_type").and_then(Value::as_str) else {
        return Ok("");
    };
    if MLPS_WITHOUT_GATE.contains(&model_type) {
        return Err(unsupported("model_type", "an MLP without a gate"));
    }
    if config.get("is_encoder_decoder").and_then(Value::as_bool) == Some(true) {
        return Err(unsupported(
            "is_encoder_decoder",
            "an encoder before the decoder",
        ));
    }
    // State-space layers and others are refused by their own fields, which say more.
    let refused_elsewhere = [
        "jamba",
        "mamba",
        "nemotron_h",
        "minimax",
        "bamba",
        "falcon_h1",
        "zamba",
    ];
    if !KNOWN.contains(&model_type) && !refused_elsewhere.iter().any(|t| model_type.starts_with(t))
    {
        let shown: String = model_type
            .chars()
            .filter(|c| !c.is_control())
            .take(40)
            .collect();
        return Err(ShapeError::Unsupported {
            field: "model_type",
            what: format!("the architecture `{shown}`").into(),
        });
    }
    Ok(model_type)
}

/// Context of the model, tokens.
///
/// Source: vLLM, `_get_and_verify_max_len` in `vllm/config/model.py`: factors of rotary embeddings apply, except
/// those of kinds whose `max_position_embeddings` has them already; YaRN's applies to the original context.
fn context(config: &Map<String, Value>, model_type: &str) -> Result<u32, ShapeError> {
    let stated = if model_type == "gemma3_text" {
        optional(config, "max_position_embeddings")?.unwrap_or(131_072)
    } else {
        number(config, "max_position_embeddings")?
    };
    let named = ["rope_scaling", "rope_parameters"];
    let scaling = named
        .iter()
        .find_map(|field| config.get(*field)?.as_object());
    // Layers of several kinds have one object each.
    let scaling = scaling.map(|of| of.values().find_map(Value::as_object).unwrap_or(of));
    let Some(scaling) = scaling.filter(|_| !model_type.starts_with("gemma3")) else {
        return Ok(stated);
    };
    let kind = ["rope_type", "type"]
        .iter()
        .find_map(|field| scaling.get(*field)?.as_str());
    let factor = scaling
        .get("factor")
        .map_or(Some(1.0), Value::as_f64)
        .filter(|f| (1.0..=1e4).contains(f));
    match kind {
        None | Some("default" | "su" | "longrope" | "llama3" | "mrope") => Ok(stated),
        Some("linear" | "dynamic" | "yarn" | "deepseek_yarn") => {
            let Some(factor) = factor else {
                return Err(unsupported(
                    "rope_scaling",
                    "a `factor` that is no number of at least 1",
                ));
            };
            let original = match kind {
                Some("linear" | "dynamic") => stated,
                _ => optional(scaling, "original_max_position_embeddings")?.unwrap_or(stated),
            };
            let positions = floor_u64(f64::from(original) * factor);
            u32::try_from(positions).map_err(|_| {
                unsupported(
                    "rope_scaling",
                    "a context of more than 4,294,967,295 tokens",
                )
            })
        }
        Some(_) => Err(unsupported("rope_scaling", "this kind of rotary embedding")),
    }
}

/// Values of `model_type` whose layers are those of [`ModelShape`]: attention with or without groups, windows, latent
/// or linear, and gated MLPs or experts. Source: their modules in vLLM 0.33, `vllm/model_executor/models`.
const KNOWN: &[&str] = &[
    "aria_text",
    "baichuan",
    "chatglm",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_text",
    "glm4v_moe_text",
    "glm_moe_dsa",
    "gpt_oss",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "internlm2",
    "internlm3",
    "kimi_k2",
    "kimi_k25",
    "llama",
    "llama4",
    "llama4_text",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen2_moe",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
    "seed_oss",
    "smollm3",
    "solar",
    "stablelm",
    "yi",
];

/// Values of `model_type` whose MLPs have two matrices, not three. Source: their modules in vLLM 0.33,
/// `vllm/model_executor/models`.
const MLPS_WITHOUT_GATE: &[&str] = &[
    "gpt2",
    "gptj",
    "gpt_neox",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "phi",
    "starcoder2",
    "nemotron",
    "persimmon",
];

pub(super) fn number(config: &Map<String, Value>, field: &'static str) -> Result<u32, ShapeError> {
    optional(config, field)?.ok_or(ShapeError::Missing(field))
}

pub(super) fn optional(
    config: &Map<String, Value>,
    field: &'static str,
) -> Result<Option<u32>, ShapeError> {
    // Far above any model, and small enough that products of three stay below 2^64.
    const MAX: u64 = 1 << 21;
    match config.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(n) if (1..=MAX).contains(&n) => Ok(Some(to_u32(n))),
            Some(n) if field == "max_position_embeddings" && u32::try_from(n).is_ok() && n > 0 => {
                Ok(Some(to_u32(n)))
            }
            _ => Err(ShapeError::Range {
                field,
                found: value.to_string().chars().take(40).collect(),
                must: "an integer from 1 to 2,097,152",
            }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::model::model;
    use super::*;

    #[test]
    fn layers_with_a_window_follow_from_the_kind_of_model() {
        // Layers, heads and head sizes of the published files; the key-value bytes are computed by
        // hand.
        for (kind, layers, more, windowed) in [
            ("gemma2", 42, r#""sliding_window": 4096"#, 21),
            ("gemma3_text", 62, r#""sliding_window": 1024"#, 52),
            ("cohere2", 32, r#""sliding_window": 4096"#, 24),
            (
                "cohere2",
                32,
                r#""sliding_window": 4096, "layer_switch": 2"#,
                16,
            ),
            (
                "gemma3_text",
                62,
                r#""sliding_window": 1024, "_sliding_window_pattern": 2"#,
                31,
            ),
            ("mistral", 32, r#""sliding_window": 4096"#, 32),
            ("phi3", 32, r#""sliding_window": 2047"#, 32),
            // Fewer layers than the period: no layer has full attention.
            ("gemma3_text", 5, r#""sliding_window": 512"#, 5),
            ("qwen2", 28, r#""sliding_window": 4096"#, 0),
        ] {
            let json = format!(
                r#"{{"model_type": "{kind}", "hidden_size": 4096, "num_hidden_layers": {layers},
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                "intermediate_size": 14336, "vocab_size": 32000,
                "max_position_embeddings": 32768, {more}}}"#
            );
            let shape = ModelShape::from_config_json("x", json.as_bytes()).unwrap();
            let found = match shape.attention {
                Attention::Windowed { layers, .. } => layers,
                _ => 0,
            };
            assert_eq!(found, windowed, "{kind} {more}");
            // 2 x 8 heads x 128 x 2 bytes per layer; all layers if none has full attention.
            let counted = if windowed == layers {
                layers
            } else {
                layers - windowed
            };
            let bytes = shape.kv_bytes_per_token_per_gpu(1, Dtype::Bf16);
            assert_eq!(bytes, u64::from(counted) * 4_096, "{kind} {more}");
        }
    }

    /// What files leave out is the default of their class in Transformers, and rotary scaling extends contexts as in vLLM.
    #[test]
    fn defaults_of_classes_and_scaled_contexts_are_read() {
        let sizes = r#""num_hidden_layers": 6, "hidden_size": 3840, "intermediate_size": 15360,
            "num_attention_heads": 16, "num_key_value_heads": 8"#;
        let read = |rest: &str| {
            let json = format!("{{{sizes}, {rest}}}");
            ModelShape::from_config_json("x", json.as_bytes()).unwrap()
        };
        // gemma-3-12b has no vocabulary, context, head size or tie of its own in its file.
        let gemma = read(
            r#""model_type": "gemma3_text", "sliding_window": 1024,
               "rope_scaling": {"factor": 8.0, "rope_type": "linear"}"#,
        );
        assert_eq!((gemma.vocab_size, gemma.max_positions), (262_208, 131_072));
        assert_eq!((gemma.head_dim, gemma.tied_embeddings), (256, true));
        let plain = r#""vocab_size": 100, "max_position_embeddings": 32768"#;
        let llama = read(&format!("{plain}, \"model_type\": \"llama\""));
        assert_eq!((llama.head_dim, llama.tied_embeddings), (240, false));
        for (scaling, expected) in [
            (
                r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}"#,
                131_072,
            ),
            // DeepSeek states the scaled context already.
            (
                r#"{"type": "yarn", "factor": 8, "original_max_position_embeddings": 4096}"#,
                32_768,
            ),
            (r#"{"rope_type": "linear", "factor": 2.0}"#, 65_536),
            (
                r#"{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}"#,
                32_768,
            ),
            (
                r#"{"rope_type": "default", "mrope_section": [1, 2]}"#,
                32_768,
            ),
            (
                r#"{"full_attention": {"rope_type": "yarn", "factor": 2.0}}"#,
                65_536,
            ),
            ("null", 32_768),
        ] {
            for field in ["rope_scaling", "rope_parameters"] {
                let shape = read(&format!("{plain}, \"{field}\": {scaling}"));
                assert_eq!(shape.max_positions, expected, "{field} {scaling}");
            }
        }
        // The language model of others is in a part of the file.
        let inner =
            format!("{{\"model_type\": \"internvl_chat\", \"llm_config\": {{{sizes}, {plain}}}}}");
        assert_eq!(
            ModelShape::from_config_json("x", inner.as_bytes())
                .unwrap()
                .layers,
            6
        );
    }

    #[test]
    fn a_config_json_gives_the_preset_of_its_model() {
        let json = br#"{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
            "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
            "tie_word_embeddings": false, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "sliding_window": null, "use_sliding_window": false}"#;
        let read = ModelShape::from_config_json("qwen3-30b-a3b", json).unwrap();
        let preset = model("qwen3-30b-a3b").unwrap();
        assert_eq!(
            ModelShape {
                source: preset.source.clone(),
                ..read
            },
            *preset
        );
    }

    /// The checkpoint of the same model in FP8 has half the weights, and a KV cache of the same
    /// size.
    #[test]
    fn an_fp8_checkpoint_halves_only_the_weights() {
        let json = |more: &str| {
            format!(
                r#"{{"model_type": "qwen3_moe", "num_hidden_layers": 94, "hidden_size": 4096,
                "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 4,
                "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
                "decoder_sparse_step": 1, "mlp_only_layers": []{more}}}"#
            )
        };
        let fp8 = r#", "quantization_config": {"quant_method": "fp8",
            "activation_scheme": "dynamic", "weight_block_size": [128, 128]}"#;
        let read = |more: &str| {
            let json = json(more);
            ModelShape::from_config_json("qwen3-235b-a22b", json.as_bytes()).unwrap()
        };
        let (plain, fp8) = (read(""), read(fp8));
        assert_eq!((plain.weights, fp8.weights), (Dtype::Bf16, Dtype::Fp8));
        assert_eq!(fp8.kv_cache, Dtype::Bf16);
        let gigabytes = |shape: &ModelShape| {
            let bytes = shape.weight_bytes_per_gpu(1, shape.weights);
            (bytes as f64 / 1e9).round() as u32
        };
        assert_eq!((gigabytes(&plain), gigabytes(&fp8)), (470, 236));
    }

    #[test]
    fn fields_of_a_config_json_other_than_sizes_are_used() {
        let json = |more: &str| {
            format!(
                r#"{{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
                "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512{more}}}"#
            )
        };
        let read = |more: &str| ModelShape::from_config_json("x", json(more).as_bytes()).unwrap();
        let plain = read("");
        assert!(!plain.qk_norm);
        assert!(read(", \"use_qk_norm\": true").qk_norm);
        // Layers for speculative decoding are not loaded.
        let with_mtp =
            ", \"use_mtp\": true, \"num_mtp_modules\": 3, \"num_nextn_predict_layers\": 1";
        assert_eq!(read(with_mtp), plain);
        let experts =
            ", \"n_routed_experts\": 8, \"num_experts_per_tok\": 2, \"moe_layer_freq\": 1";
        assert_eq!(read(experts).experts.map(|e| e.count), Some(8));
    }

    #[test]
    fn an_old_config_json_gets_its_defaults() {
        let json = br#"{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
            "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000,
            "max_position_embeddings": 4096}"#;
        let read = ModelShape::from_config_json("llama-2-7b", json).unwrap();
        let preset = model("llama-2-7b").unwrap();
        assert_eq!(
            ModelShape {
                source: preset.source.clone(),
                ..read
            },
            *preset
        );
    }

    #[test]
    fn bad_configs_are_refused_by_field() {
        let good = r#""num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512"#;
        let cases = [
            ("[]".to_owned(), "not a JSON object"),
            ("{".to_owned(), "not JSON"),
            ("{}".to_owned(), "`hidden_size` is missing"),
            (
                format!("{{{good}, \"num_key_value_heads\": 0}}"),
                "`num_key_value_heads` is 0",
            ),
            (
                format!("{{{good}, \"num_key_value_heads\": 8}}"),
                "a divisor of num_attention_heads",
            ),
            (
                format!("{{{good}, \"num_key_value_heads\": 3}}"),
                "`num_key_value_heads` is 3",
            ),
            (
                format!("{{{good}, \"model_type\": \"t5\"}}"),
                "`model_type`: the architecture `t5` is not modelled",
            ),
            (
                format!("{{{good}, \"model_type\": \"llama\", \"is_encoder_decoder\": true}}"),
                "`is_encoder_decoder`: an encoder",
            ),
            (
                format!(
                    "{{{good}, \"rope_scaling\": {{\"rope_type\": \"spiral\", \"factor\": 2.0}}}}"
                ),
                "`rope_scaling`: this kind",
            ),
            (
                format!("{{{good}, \"rope_scaling\": {{\"type\": \"yarn\", \"factor\": -4}}}}"),
                "`rope_scaling`: a `factor`",
            ),
            (
                format!(
                    "{{{good}, \"rope_scaling\": {{\"type\": \"yarn\", \"factor\": 1e4, \
                     \"original_max_position_embeddings\": 2097152}}}}"
                ),
                "`rope_scaling`: a context of more",
            ),
            (format!("{{{good}, \"head_dim\": -1}}"), "`head_dim` is -1"),
            (
                format!("{{{good}, \"head_dim\": 99999999999}}"),
                "`head_dim` is 99999999999",
            ),
            (
                format!("{{{good}, \"num_experts\": 8}}"),
                "`num_experts_per_tok` is missing",
            ),
            (
                format!("{{{good}, \"kv_lora_rank\": 512}}"),
                "`qk_rope_head_dim` is missing",
            ),
            (
                format!("{{{good}, \"mamba_d_state\": 128}}"),
                "`mamba_d_state`: state-space layers",
            ),
            (
                format!("{{{good}, \"attn_type_list\": [1, 0, 1]}}"),
                "linear attention",
            ),
            (
                format!(
                    "{{{good}, \"num_experts\": 8, \"num_experts_per_tok\": 2, \"mlp_only_layers\": [0], \
                     \"decoder_sparse_step\": 2}}"
                ),
                "`decoder_sparse_step`: this mix of dense layers",
            ),
            (
                format!("{{{good}, \"n_routed_experts\": 8}}"),
                "`num_experts_per_tok` is missing",
            ),
            (
                format!("{{{good}, \"model_type\": \"gpt_neox\"}}"),
                "an MLP without a gate",
            ),
            (
                format!("{{{good}, \"quantization_config\": {{\"quant_method\": \"gptq\"}}}}"),
                "`quantization_config`: `gptq` of ? bits is not modelled",
            ),
            (
                format!("{{{good}, \"layer_types\": [\"linear_attention\"]}}"),
                "`layer_types` is of 1 layers",
            ),
            (
                format!(
                    "{{{good}, \"layer_types\": [\"sliding_attention\", \"linear_attention\"]}}"
                ),
                "`layer_types`: this mix",
            ),
            ("{\"text_config\": 3}".to_owned(), "not a JSON object"),
        ];
        for (json, part) in cases {
            let error = ModelShape::from_config_json("x", json.as_bytes())
                .unwrap_err()
                .to_string();
            assert!(error.contains(part), "{error} for {json}");
        }
        let good = format!("{{{good}}}");
        assert_eq!(
            ModelShape::from_config_json("x", good.as_bytes())
                .unwrap()
                .head_dim,
            16
        );
    }
}
