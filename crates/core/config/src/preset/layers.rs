//! Kinds of layers in a Hugging Face style `config.json`: attention, and the layers with experts.
//!
//! Fields and defaults: the configuration classes of Transformers 5.24, and the models of vLLM 0.33
//! that use them. A kind that [`Attention`] cannot express is refused, with the name of its field.

use serde_json::Value;

use slipstream_base::width::to_u32;

use super::class::{Class, DenseLayers, Kind, Windows};
use super::error::ShapeError;
use super::fields::{Fields, integer};
use super::model::{Attention, SparseIndex};

/// Keys of state-space layers, without effect in a file whose layers all have attention.
const STATE_SPACE: &[&str] = &[
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_head",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "time_step_limit",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
];

/// The attention of the `layers` layers of a file of `class`.
pub(super) fn attention(
    class: &Class,
    fields: Fields<'_>,
    layers: u32,
) -> Result<Attention, ShapeError> {
    for (key, what) in [
        ("hybrid_override_pattern", "a mix of kinds of layers"),
        ("ssm_state_size", "state-space layers"),
        ("state_size", "state-space layers"),
    ] {
        if fields.set(key) {
            return Err(fields.unsupported(key, what));
        }
    }
    // MiniMax: 1 is full attention, 0 its own linear one.
    let kinds = fields.list("attn_type_list")?.unwrap_or_default();
    if kinds.iter().any(|kind| kind.as_u64() != Some(1)) {
        return Err(fields.unsupported("attn_type_list", "a mix of kinds of layers"));
    }
    if class.attention == Kind::StateSpace {
        state_space(fields, layers)?;
        return Ok(Attention::Full);
    }
    if fields.set("mamba_d_state") {
        return Err(fields.unsupported("mamba_d_state", "state-space layers"));
    }
    let kinds = kinds_of_layers(fields, "layer_types", layers)?;
    match class.attention {
        Kind::Latent | Kind::LatentSparse => latent(class, fields, layers, &kinds),
        Kind::Delta => delta(fields, layers, &kinds),
        Kind::Grouped | Kind::StateSpace => windowed(class, fields, layers, &kinds),
    }
}

/// Checks that no layer of a hybrid file is a state-space layer.
fn state_space(fields: Fields<'_>, layers: u32) -> Result<(), ShapeError> {
    let mut stated = false;
    for key in ["layers_block_type", "layer_types"] {
        let kinds = kinds_of_layers(fields, key, layers)?;
        stated |= !kinds.is_empty();
        if kinds
            .iter()
            .any(|kind| !["attention", "full_attention"].contains(kind))
        {
            return Err(fields.unsupported(key, "state-space layers: a mix of kinds of layers"));
        }
    }
    if !stated {
        return Err(fields.missing("layer_types"));
    }
    fields.mark_all(STATE_SPACE);
    Ok(())
}

/// The kinds that `key` lists, one for each layer; none if the file lists none.
fn kinds_of_layers<'a>(
    fields: Fields<'a>,
    key: &str,
    layers: u32,
) -> Result<Vec<&'a str>, ShapeError> {
    let listed = fields.list(key)?.unwrap_or_default();
    if !listed.is_empty() && listed.len() as u64 != u64::from(layers) {
        return Err(ShapeError::Range {
            field: fields.path(key).into(),
            found: format!("of {} layers", listed.len()),
            must: "of as many layers as num_hidden_layers",
        });
    }
    Ok(listed
        .iter()
        .map(|kind| kind.as_str().unwrap_or("?"))
        .collect())
}

fn latent(
    class: &Class,
    fields: Fields<'_>,
    layers: u32,
    kinds: &[&str],
) -> Result<Attention, ShapeError> {
    let sparse = class.attention == Kind::LatentSparse;
    if kinds
        .iter()
        .any(|kind| *kind != "full_attention" && !(sparse && *kind == "indexed_attention"))
    {
        return Err(fields.unsupported("layer_types", "this mix of attention kinds"));
    }
    if !fields.has("q_lora_rank") {
        return Err(fields.missing("q_lora_rank"));
    }
    let query_rank = fields.optional("q_lora_rank")?.unwrap_or(0);
    let index = if sparse {
        Some(sparse_index(class, fields, layers)?)
    } else {
        None
    };
    Ok(Attention::Latent {
        query_rank,
        kv_rank: fields.number("kv_lora_rank")?,
        rope_dim: fields.number("qk_rope_head_dim")?,
        nope_dim: fields.number("qk_nope_head_dim")?,
        value_dim: fields.number("v_head_dim")?,
        index,
    })
}

fn sparse_index(class: &Class, fields: Fields<'_>, layers: u32) -> Result<SparseIndex, ShapeError> {
    let heads = if class.types.contains(&"glm_moe_dsa") {
        32
    } else {
        64
    };
    let size = |key, default| -> Result<u32, ShapeError> {
        let stated = fields.optional(key)?;
        Ok(stated.unwrap_or_else(|| fields.assume(key, default)))
    };
    let head_dim = size("index_head_dim", 128)?;
    // One scale per 128 numbers.
    if !head_dim.is_multiple_of(128) {
        return Err(ShapeError::Range {
            field: fields.path("index_head_dim").into(),
            found: head_dim.to_string(),
            must: "a multiple of 128",
        });
    }
    Ok(SparseIndex {
        tokens: size("index_topk", 2048)?,
        layers: index_layers(fields, layers)?,
        heads: size("index_n_heads", heads)?,
        head_dim,
    })
}

/// Layers with an index; the others reuse the tokens chosen by a layer before them.
///
/// Source: vLLM 0.33, `DeepseekV2MLAAttention.__init__` (`index_topk_pattern`, `index_topk_freq`,
/// `index_skip_topk_offset`); Transformers 5.24, `GlmMoeDsaConfig.__post_init__` (`indexer_types`).
fn index_layers(fields: Fields<'_>, layers: u32) -> Result<u32, ShapeError> {
    let listed = |key: &str, full: &str, kinds: Vec<&str>| {
        if kinds.len() as u64 != u64::from(layers) {
            return Err(ShapeError::Range {
                field: fields.path(key).into(),
                found: format!("of {} layers", kinds.len()),
                must: "of as many layers as num_hidden_layers",
            });
        }
        Ok(to_u32(kinds.iter().filter(|kind| **kind == full).count()))
    };
    let step = fields.optional("index_topk_freq")?;
    let offset = fields.count("index_skip_topk_offset")?.unwrap_or(2);
    let scheduled = match fields.text("index_topk_pattern")? {
        Some(pattern) if pattern.bytes().all(|kind| b"FS".contains(&kind)) => {
            let kinds = (0..pattern.len()).map(|at| &pattern[at..=at]).collect();
            Some(listed("index_topk_pattern", "F", kinds)?)
        }
        Some(_) => {
            let what = "a pattern with other letters than F and S";
            return Err(fields.unsupported("index_topk_pattern", what));
        }
        None => step.map(|step| {
            let full =
                (0..layers).filter(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(step));
            to_u32(full.count())
        }),
    };
    let kinds = kinds_of_layers(fields, "indexer_types", layers)?;
    if kinds.is_empty() {
        return Ok(scheduled.unwrap_or(layers));
    }
    if kinds.iter().any(|kind| !["full", "shared"].contains(kind)) {
        return Err(fields.unsupported("indexer_types", "this kind of index"));
    }
    let full = listed("indexer_types", "full", kinds)?;
    if let Some(other) = scheduled.filter(|other| *other != full) {
        let what = format!("{full} layers with an index, where other keys say {other},");
        return Err(fields.unsupported("indexer_types", what));
    }
    Ok(full)
}

fn delta(fields: Fields<'_>, layers: u32, kinds: &[&str]) -> Result<Attention, ShapeError> {
    let linear = if kinds.is_empty() {
        match fields.optional("full_attention_interval")? {
            Some(interval) => layers - layers / interval,
            None => return Err(fields.missing_any(&["layer_types", "full_attention_interval"])),
        }
    } else {
        fields.mark_all(&["full_attention_interval"]);
        if kinds
            .iter()
            .any(|kind| !["linear_attention", "full_attention"].contains(kind))
        {
            return Err(fields.unsupported("layer_types", "this mix of attention kinds"));
        }
        to_u32(
            kinds
                .iter()
                .filter(|kind| **kind == "linear_attention")
                .count(),
        )
    };
    // The gate is counted with the weights.
    if fields.flag("attn_output_gate")? == Some(false) {
        return Err(fields.unsupported(
            "attn_output_gate",
            "attention without a gate in this architecture",
        ));
    }
    // No windows in these classes, whatever their files keep of others. The convolution and the format of the state are
    // small.
    windows_off(fields)?;
    fields.optional("linear_conv_kernel_dim")?;
    fields.text("mamba_ssm_dtype")?;
    let head_dim = fields.number("linear_key_head_dim")?;
    let value_dim = fields.number("linear_value_head_dim")?;
    if value_dim != head_dim {
        return Err(ShapeError::Range {
            field: fields.path("linear_value_head_dim").into(),
            found: value_dim.to_string(),
            must: "that of linear_key_head_dim",
        });
    }
    Ok(Attention::Linear {
        layers: linear,
        key_heads: fields.number("linear_num_key_heads")?,
        value_heads: fields.number("linear_num_value_heads")?,
        head_dim,
    })
}

/// Marks the keys of windows that are switched off.
fn windows_off(fields: Fields<'_>) -> Result<(), ShapeError> {
    if fields.flag("use_sliding_window")? == Some(true) && fields.set("sliding_window") {
        return Err(fields.unsupported("use_sliding_window", "a window in this architecture"));
    }
    fields.mark_all(&["sliding_window", "max_window_layers"]);
    Ok(())
}

fn windowed(
    class: &Class,
    fields: Fields<'_>,
    layers: u32,
    kinds: &[&str],
) -> Result<Attention, ShapeError> {
    if kinds.is_empty() {
        return match class.windows {
            Windows::No => {
                if fields.flag("use_sliding_window")? != Some(true)
                    && fields.has("use_sliding_window")
                {
                    windows_off(fields)?;
                }
                Ok(Attention::Full)
            }
            Windows::Chunked => chunked(fields, layers),
            _ => sliding(class, fields, layers),
        };
    }
    let mut others: Vec<&str> = kinds
        .iter()
        .copied()
        .filter(|kind| !["full_attention", "attention"].contains(kind))
        .collect();
    let count = to_u32(others.len());
    others.sort_unstable();
    others.dedup();
    let patterns: &[&str] = match class.windows {
        Windows::No => &[],
        Windows::Chunked => &["no_rope_layers", "no_rope_layer_interval"],
        _ => &[
            "sliding_window_pattern",
            "_sliding_window_pattern",
            "layer_switch",
            "use_sliding_window",
            "max_window_layers",
            "global_attn_every_n_layers",
        ],
    };
    fields.mark_all(patterns);
    match others[..] {
        [] => {
            fields.mark_all(&["sliding_window", "use_sliding_window", "max_window_layers"]);
            if class.windows == Windows::Chunked {
                fields.mark_all(&["attention_chunk_size"]);
            }
            Ok(Attention::Full)
        }
        ["sliding_attention"] if class.windows != Windows::No => Ok(Attention::Windowed {
            tokens: fields.number("sliding_window")?,
            layers: count,
        }),
        ["chunked_attention"] if class.windows == Windows::Chunked => Ok(Attention::Windowed {
            tokens: fields.number("attention_chunk_size")?,
            layers: count,
        }),
        _ => Err(fields.unsupported("layer_types", "this mix of attention kinds")),
    }
}

/// Llama 4: every fourth layer has full attention.
fn chunked(fields: Fields<'_>, layers: u32) -> Result<Attention, ShapeError> {
    if !fields.set("attention_chunk_size") {
        return if fields.has("attention_chunk_size") {
            Ok(Attention::Full)
        } else {
            Err(fields.missing("attention_chunk_size"))
        };
    }
    let interval = fields.optional("no_rope_layer_interval")?;
    let full = match fields.list("no_rope_layers")? {
        Some(list) if !list.is_empty() => {
            if list.len() as u64 != u64::from(layers) {
                return Err(ShapeError::Range {
                    field: fields.path("no_rope_layers").into(),
                    found: format!("of {} layers", list.len()),
                    must: "of as many layers as num_hidden_layers",
                });
            }
            to_u32(list.iter().filter(|rope| rope.as_u64() == Some(0)).count())
        }
        _ => layers / interval.unwrap_or(4),
    };
    Ok(Attention::Windowed {
        tokens: fields.number("attention_chunk_size")?,
        layers: layers - full.min(layers),
    })
}

fn sliding(class: &Class, fields: Fields<'_>, layers: u32) -> Result<Attention, ShapeError> {
    let used = fields.flag("use_sliding_window")?;
    let last_full = fields.count("max_window_layers")?;
    // Transformers serializes the pattern under its private name. Exaone writes a text of kinds.
    let mut pattern = match fields.get("sliding_window_pattern") {
        Some(Value::String(text)) => {
            let period = to_u32(text.len());
            let full = text.chars().filter(|kind| *kind == 'G').count();
            if full != 1 || !text.chars().all(|kind| kind == 'L' || kind == 'G') {
                return Err(fields.unsupported("sliding_window_pattern", "this pattern of windows"));
            }
            Some(period)
        }
        _ => fields.count("sliding_window_pattern")?.filter(|n| *n > 0),
    };
    for key in [
        "_sliding_window_pattern",
        "layer_switch",
        "global_attn_every_n_layers",
    ] {
        pattern = pattern.or(fields.count(key)?.filter(|n| *n > 0));
    }
    let mut tokens = fields.count("sliding_window")?;
    let mut stated = fields.has("sliding_window");
    if let Some(window) = class.window.filter(|_| !stated) {
        tokens = Some(fields.assume("sliding_window", window));
        stated = true;
    }
    // Files of Gemma 2 repeat the window under this name, which Transformers does not read.
    if class.types.contains(&"gemma2")
        && let Some(repeated) = fields.count("sliding_window_size")?
        && Some(repeated) != tokens
    {
        let tokens = tokens.map_or("null".into(), |tokens| tokens.to_string());
        let what = format!("{repeated}, where `sliding_window` is {tokens},");
        return Err(fields.unsupported("sliding_window_size", what));
    }
    let tokens = tokens.filter(|tokens| *tokens > 0);
    let windowed = match (class.windows, used) {
        // Qwen2 contains a window and disables it, or gives the first layers full attention.
        (_, Some(false)) | (Windows::Off, None) | (Windows::No | Windows::Chunked, _) => 0,
        (Windows::Off, Some(true)) => match pattern {
            Some(pattern) => layers - layers / pattern,
            None if tokens.is_some() && last_full.is_none() => {
                return Err(fields.missing("max_window_layers"));
            }
            None => layers - last_full.unwrap_or(layers).min(layers),
        },
        // A window that is null is none; a file without the key has its class's.
        (Windows::All | Windows::Every(_), _) if !stated => {
            return Err(fields.missing("sliding_window"));
        }
        (Windows::AllIfStated, _) if !stated => {
            fields.assume("sliding_window", "none");
            0
        }
        (Windows::All | Windows::AllIfStated, _) => match pattern {
            Some(pattern) => layers - layers / pattern,
            None => layers,
        },
        // One layer of each group has full attention.
        (Windows::Every(period), _) => layers - layers / pattern.unwrap_or(period),
    };
    Ok(match (windowed, tokens) {
        (0, _) | (_, None) => Attention::Full,
        (layers, Some(tokens)) => Attention::Windowed { tokens, layers },
    })
}

/// Layers of a mixture of experts that have a dense MLP instead.
pub(super) fn dense_layers(
    rule: DenseLayers,
    fields: Fields<'_>,
    layers: u32,
) -> Result<u32, ShapeError> {
    let kinds = kinds_of_layers(fields, "mlp_layer_types", layers)?;
    if !kinds.is_empty() {
        fields.mark_all(&[
            "first_k_dense_replace",
            "moe_layer_freq",
            "mlp_only_layers",
            "decoder_sparse_step",
        ]);
        if kinds.iter().any(|kind| !["dense", "sparse"].contains(kind)) {
            return Err(fields.unsupported("mlp_layer_types", "this kind of MLP"));
        }
        return Ok(to_u32(
            kinds.iter().filter(|kind| **kind == "dense").count(),
        ));
    }
    let dense = |has_experts: &dyn Fn(u32) -> bool| count_without(layers, has_experts);
    match rule {
        DenseLayers::No => Ok(0),
        DenseLayers::First => dense_before_first(fields, layers),
        DenseLayers::Step => {
            if !fields.has("mlp_only_layers") {
                fields.assume("mlp_only_layers", "[]");
            }
            let only = indices(fields, "mlp_only_layers", layers)?;
            let step = match fields.optional("decoder_sparse_step")? {
                Some(step) => step,
                None => fields.assume("decoder_sparse_step", 1),
            };
            Ok(dense(&|layer| {
                !only.contains(&layer) && (layer + 1).is_multiple_of(step)
            }))
        }
        DenseLayers::Interleaved => dense_between(fields, layers),
        DenseLayers::Range => {
            let Some(first) = fields.count("moe_layer_start_index")? else {
                return Err(fields.missing("moe_layer_start_index"));
            };
            let last = match fields.get("moe_layer_end_index") {
                Some(value) if value.as_i64() == Some(-1) => layers - 1,
                _ => fields.count("moe_layer_end_index")?.unwrap_or(layers - 1),
            };
            let step = fields.optional("moe_layer_interval")?.unwrap_or(1);
            Ok(dense(&|layer| {
                (first..=last).contains(&layer) && (layer + 1).is_multiple_of(step)
            }))
        }
    }
}

/// How many of `layers` have no experts.
fn count_without(layers: u32, has_experts: &dyn Fn(u32) -> bool) -> u32 {
    to_u32((0..layers).filter(|layer| !has_experts(*layer)).count())
}

/// Layers before `first_k_dense_replace`, and those that `moe_layer_freq` leaves out.
fn dense_before_first(fields: Fields<'_>, layers: u32) -> Result<u32, ShapeError> {
    if let Some(Value::Array(on)) = fields.get("moe_layer_freq") {
        fields.mark_all(&["first_k_dense_replace"]);
        if on.len() as u64 != u64::from(layers) {
            return Err(ShapeError::Range {
                field: fields.path("moe_layer_freq").into(),
                found: format!("of {} layers", on.len()),
                must: "of as many layers as num_hidden_layers",
            });
        }
        return Ok(to_u32(
            on.iter().filter(|on| on.as_u64() == Some(0)).count(),
        ));
    }
    let Some(first) = fields.count("first_k_dense_replace")? else {
        return Err(fields.missing("first_k_dense_replace"));
    };
    let step = fields.optional("moe_layer_freq")?.unwrap_or(1);
    Ok(count_without(layers, &|layer| {
        layer >= first && layer.is_multiple_of(step)
    }))
}

/// Layers that `moe_layers` or `interleave_moe_layer_step` leave out.
fn dense_between(fields: Fields<'_>, layers: u32) -> Result<u32, ShapeError> {
    let step = fields.count("interleave_moe_layer_step")?;
    // vLLM reads the step and Transformers the list, an empty one too.
    if fields.list("moe_layers")?.is_none() {
        let step = step.ok_or_else(|| fields.missing("interleave_moe_layer_step"))?;
        return Ok(count_without(layers, &|layer| {
            step > 0 && (layer + 1).is_multiple_of(step)
        }));
    }
    let with = indices(fields, "moe_layers", layers)?;
    let stepped = |layer: u32| step.is_none_or(|n| n > 0 && (layer + 1).is_multiple_of(n));
    if step.is_some() && (0..layers).any(|layer| stepped(layer) != with.contains(&layer)) {
        let what = "a list of other layers than `interleave_moe_layer_step` says";
        return Err(fields.unsupported("moe_layers", what));
    }
    Ok(count_without(layers, &|layer| with.contains(&layer)))
}

/// The different layers that `key` lists.
fn indices(fields: Fields<'_>, key: &str, layers: u32) -> Result<Vec<u32>, ShapeError> {
    let mut found = Vec::new();
    for item in fields.list(key)?.unwrap_or_default() {
        match integer(item) {
            Some(layer) if layer < u64::from(layers) => found.push(to_u32(layer)),
            _ => return Err(fields.range(key, item, "numbers of layers")),
        }
    }
    Ok(found)
}
