//! Kinds of layers in a Hugging Face style `config.json`: attention, and the layers with experts.
//!
//! Fields and defaults: the configuration classes of Transformers 4.57, and the models of vLLM 0.33
//! that use them. A kind that [`Attention`] cannot express is refused, with the name of its field.

use serde_json::{Map, Value};

use slipstream_base::width::to_u32;

use super::model::Attention;
use super::read::{ShapeError, number, optional, unsupported};

type Object = Map<String, Value>;

fn set(config: &Object, field: &str) -> bool {
    let value = config.get(field);
    value.is_some_and(|v| !v.is_null() && v.as_u64() != Some(0))
}

fn words<'a>(config: &'a Object, field: &str) -> Vec<&'a str> {
    let list = config.get(field).and_then(Value::as_array);
    let list = list.into_iter().flatten();
    list.map(|kind| kind.as_str().unwrap_or("?")).collect()
}

/// The attention of the `layers` layers of `config`.
pub(super) fn attention(config: &Object, layers: u32) -> Result<Attention, ShapeError> {
    for (field, what) in [
        ("hybrid_override_pattern", "a mix of kinds of layers"),
        ("mamba_d_state", "state-space layers"),
        ("ssm_state_size", "state-space layers"),
        ("state_size", "state-space layers"),
    ] {
        if set(config, field) {
            return Err(unsupported(field, what));
        }
    }
    if set(config, "layers_block_type")
        && !words(config, "layers_block_type")
            .iter()
            .all(|kind| *kind == "attention")
    {
        return Err(unsupported("layers_block_type", "a mix of kinds of layers"));
    }
    // MiniMax-Text-01: 0 is its own linear attention, 1 full attention.
    let kinds = config.get("attn_type_list").and_then(Value::as_array);
    if kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind.as_u64() != Some(1))) {
        return Err(unsupported(
            "attn_type_list",
            "this kind of linear attention",
        ));
    }
    if set(config, "kv_lora_rank") {
        return Ok(Attention::Latent {
            query_rank: optional(config, "q_lora_rank")?.unwrap_or(0),
            kv_rank: number(config, "kv_lora_rank")?,
            rope_dim: number(config, "qk_rope_head_dim")?,
            nope_dim: number(config, "qk_nope_head_dim")?,
            value_dim: number(config, "v_head_dim")?,
            sparse_tokens: optional(config, "index_topk")?.unwrap_or(0),
        });
    }
    let listed = words(config, "layer_types");
    if !listed.is_empty() {
        if listed.len() as u64 != u64::from(layers) {
            return Err(ShapeError::Range {
                field: "layer_types",
                found: format!("of {} layers", listed.len()),
                must: "of as many layers as num_hidden_layers",
            });
        }
        let mut others: Vec<&str> = listed
            .iter()
            .copied()
            .filter(|kind| *kind != "full_attention")
            .collect();
        let count = to_u32(others.len());
        others.sort_unstable();
        others.dedup();
        return match others[..] {
            [] => Ok(Attention::Full),
            ["linear_attention"] => linear(config, count),
            ["sliding_attention"] => Ok(Attention::Windowed {
                tokens: number(config, "sliding_window")?,
                layers: count,
            }),
            ["chunked_attention"] => Ok(Attention::Windowed {
                tokens: number(config, "attention_chunk_size")?,
                layers: count,
            }),
            _ => Err(unsupported("layer_types", "this mix of attention kinds")),
        };
    }
    if let Some(interval) = optional(config, "full_attention_interval")? {
        return linear(config, layers - layers / interval);
    }
    if set(config, "attention_chunk_size") {
        // Llama 4: every fourth layer has full attention.
        let full = match config.get("no_rope_layers").and_then(Value::as_array) {
            Some(list) if list.len() as u64 == u64::from(layers) => {
                to_u32(list.iter().filter(|rope| rope.as_u64() == Some(0)).count())
            }
            _ => layers / optional(config, "no_rope_layer_interval")?.unwrap_or(4),
        };
        return Ok(Attention::Windowed {
            tokens: number(config, "attention_chunk_size")?,
            layers: layers - full.min(layers),
        });
    }
    if !set(config, "sliding_window") {
        return Ok(Attention::Full);
    }
    let model_type = config.get("model_type").and_then(Value::as_str);
    let model_type = model_type.unwrap_or("");
    let used = config.get("use_sliding_window").and_then(Value::as_bool);
    // Transformers serializes the pattern under its private name.
    let mut pattern = optional(config, "sliding_window_pattern")?;
    if pattern.is_none() {
        pattern = optional(config, "_sliding_window_pattern")?;
    }
    if pattern.is_none() {
        pattern = match model_type {
            "gemma2" => Some(2),
            "gemma3" | "gemma3_text" => Some(6),
            "cohere2" => Some(optional(config, "layer_switch")?.unwrap_or(4)),
            _ => None,
        };
    }
    // In the Qwen classes, a window is off by default.
    let off = model_type.starts_with("qwen2") || model_type.starts_with("qwen3");
    let windowed = match (used, pattern) {
        // Qwen2 contains a window and disables it, or gives the first layers full attention.
        (Some(false), _) => 0,
        (Some(true), None) => {
            layers
                - optional(config, "max_window_layers")?
                    .unwrap_or(0)
                    .min(layers)
        }
        // Gemma: one layer of each group has full attention.
        (_, Some(pattern)) => layers - layers / pattern,
        (None, None) if off => 0,
        (None, None) => layers,
    };
    Ok(match windowed {
        0 => Attention::Full,
        layers => Attention::Windowed {
            tokens: number(config, "sliding_window")?,
            layers,
        },
    })
}

fn linear(config: &Object, layers: u32) -> Result<Attention, ShapeError> {
    let head_dim = number(config, "linear_key_head_dim")?;
    let value_dim = number(config, "linear_value_head_dim")?;
    if value_dim != head_dim {
        return Err(ShapeError::Range {
            field: "linear_value_head_dim",
            found: value_dim.to_string(),
            must: "that of linear_key_head_dim",
        });
    }
    Ok(Attention::Linear {
        layers,
        key_heads: number(config, "linear_num_key_heads")?,
        value_heads: number(config, "linear_num_value_heads")?,
        head_dim,
    })
}

/// Total width of the shared experts, which process every token; 0: none.
pub(super) fn shared_width(
    config: &Object,
    model_type: &str,
    width: u32,
) -> Result<u32, ShapeError> {
    for field in [
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ] {
        if set(config, field) {
            return number(config, field);
        }
    }
    if set(config, "n_shared_experts") {
        return Ok(number(config, "n_shared_experts")?.saturating_mul(width));
    }
    // Llama 4 has one shared expert, without a field for it.
    Ok(if model_type.starts_with("llama4") {
        width
    } else {
        0
    })
}

/// Layers of a mixture of experts that have a dense MLP instead.
pub(super) fn dense_layers(config: &Object, layers: u32) -> Result<u32, ShapeError> {
    let listed = |field: &str| config.get(field).and_then(Value::as_array);
    if let Some(of) = listed("moe_layer_freq") {
        let dense = of.iter().filter(|on| on.as_u64() == Some(0)).count();
        return Ok(to_u32(dense).min(layers));
    }
    if let Some(with) = listed("moe_layers").filter(|with| !with.is_empty()) {
        return Ok(layers.saturating_sub(to_u32(with.len())));
    }
    let first = match config.get("first_k_dense_replace").and_then(Value::as_u64) {
        Some(0) | None => 0,
        Some(_) => number(config, "first_k_dense_replace")?,
    };
    let only = listed("mlp_only_layers").map_or(0, |layers| to_u32(layers.len()));
    for field in [
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "moe_layer_freq",
    ] {
        if let Some(step) = optional(config, field)?.filter(|step| *step > 1) {
            if first > 0 || only > 0 {
                return Err(unsupported(field, "this mix of dense layers and experts"));
            }
            return Ok(layers - layers / step);
        }
    }
    Ok((first + only).min(layers))
}
