//! Objects of a model's files that remember which of their keys were read.
//!
//! An unread key may be the one that makes a model ten times as large. Every unread key that may affect size, compute or
//! cache is therefore an error; [`IMMATERIAL`] lists the keys that cannot, with the reason.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use slipstream_base::width::to_u32;

use super::error::ShapeError;

pub(super) type Object = Map<String, Value>;

/// Keys that were read, by path, and defaults that stood in for absent ones.
#[derive(Debug, Default)]
pub(super) struct Log {
    read: RefCell<BTreeSet<String>>,
    defaults: RefCell<Vec<String>>,
    ignored: RefCell<Vec<String>>,
}

impl Log {
    /// Whether the key of this path was read.
    pub(super) fn has(&self, path: &str) -> bool {
        self.read.borrow().contains(path)
    }

    /// Sentences for the user: class defaults that were applied, and keys that were ignored.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let defaults = self.defaults.borrow();
        if !defaults.is_empty() {
            notes.push(format!(
                "keys that the file lacks have the defaults of its class: {}",
                defaults.join(", ")
            ));
        }
        let ignored = self.ignored.borrow();
        if !ignored.is_empty() {
            notes.push(format!("not read: {}", ignored.join(", ")));
        }
        notes
    }
}

/// An object of a file. Every look-up is recorded in the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    object: &'a Object,
    /// `text_config.`, or nothing.
    prefix: &'a str,
    log: &'a Log,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Object, prefix: &'a str, log: &'a Log) -> Fields<'a> {
        Fields {
            object,
            prefix,
            log,
        }
    }

    /// The key as it is named in errors: with the objects around it.
    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The value of `key`; `None` if it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.mark(key);
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// Whether the file has `key`, be it null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.mark(key);
        self.object.contains_key(key)
    }

    /// Whether `key` has a value other than null, false and 0.
    pub(super) fn set(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| !is_nothing(value))
    }

    /// Records `keys` as read: something else was read that decides for them.
    pub(super) fn mark_all(&self, keys: &[&str]) {
        for key in keys {
            self.mark(key);
        }
    }

    fn mark(&self, key: &str) {
        if self.object.contains_key(key) {
            self.log.read.borrow_mut().insert(self.path(key));
        }
    }

    /// Records that `value` stands in for the absent `key`.
    pub(super) fn assume<T: ToString>(&self, key: &str, value: T) -> T {
        let text = format!("`{}` {}", self.path(key), value.to_string());
        self.log.defaults.borrow_mut().push(text);
        value
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.range(key, value, "a text")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(value) => Err(self.range(key, value, "true or false")),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(value) => Err(self.range(key, value, "a list")),
        }
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<&'a Object>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(value) => Err(self.range(key, value, "an object")),
        }
    }

    /// A size, from 1.
    pub(super) fn number(&self, key: &str) -> Result<u32, ShapeError> {
        self.optional(key)?.ok_or_else(|| self.missing(key))
    }

    /// A size, from 1; `None` if it is absent or null.
    pub(super) fn optional(&self, key: &str) -> Result<Option<u32>, ShapeError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match integer(value) {
            Some(n) if (1..=SIZE_MAX).contains(&n) => Ok(Some(to_u32(n))),
            _ => Err(self.range(key, value, "an integer from 1 to 2,097,152")),
        }
    }

    /// A count, from 0; `None` if it is absent or null.
    pub(super) fn count(&self, key: &str) -> Result<Option<u32>, ShapeError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match integer(value) {
            Some(n) if n <= SIZE_MAX => Ok(Some(to_u32(n))),
            _ => Err(self.range(key, value, "an integer from 0 to 2,097,152")),
        }
    }

    /// A number of tokens of context.
    pub(super) fn positions(&self, key: &str) -> Result<Option<u32>, ShapeError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match integer(value).and_then(|n| u32::try_from(n).ok()) {
            Some(n) if n > 0 => Ok(Some(n)),
            _ => Err(self.range(key, value, "an integer from 1 to 4,294,967,295")),
        }
    }

    /// A count that some files state for each layer: a number, or a list of equal ones.
    pub(super) fn alike(&self, key: &str, layers: u32) -> Result<Option<u32>, ShapeError> {
        let Some(Value::Array(items)) = self.get(key) else {
            return self.count(key);
        };
        let first = items.first().and_then(integer).filter(|n| *n <= SIZE_MAX);
        match first {
            Some(n)
                if items.len() as u64 == u64::from(layers)
                    && items.iter().all(|item| integer(item) == Some(n)) =>
            {
                Ok(Some(to_u32(n)))
            }
            _ => Err(ShapeError::Unsupported {
                field: self.path(key).into(),
                what: "a list that is not the same number for each layer".into(),
            }),
        }
    }

    /// The count under one of `keys`, which are names for the same thing.
    ///
    /// # Errors
    /// If two of them disagree.
    pub(super) fn any_of(&self, keys: &[&str], layers: u32) -> Result<Option<u32>, ShapeError> {
        let mut found: Option<(&str, u32)> = None;
        for key in keys {
            let Some(value) = self.alike(key, layers)? else {
                continue;
            };
            match found {
                Some((first, of_first)) if of_first != value => {
                    return Err(ShapeError::Unsupported {
                        field: self.path(key).into(),
                        what: format!("{value}, where `{}` is {of_first},", self.path(first))
                            .into(),
                    });
                }
                Some(_) => {}
                None => found = Some((key, value)),
            }
        }
        Ok(found.map(|(_, value)| value))
    }

    pub(super) fn missing(&self, key: &str) -> ShapeError {
        ShapeError::Missing(self.path(key).into())
    }

    /// As [`missing`](Self::missing), for a value that has several names.
    pub(super) fn missing_any(&self, keys: &[&str]) -> ShapeError {
        let names: Vec<String> = keys.iter().map(|key| self.path(key)).collect();
        ShapeError::Missing(names.join("` or `").into())
    }

    pub(super) fn range(&self, key: &str, found: &Value, must: &'static str) -> ShapeError {
        ShapeError::Range {
            field: self.path(key).into(),
            found: shown(found),
            must,
        }
    }

    pub(super) fn unsupported(&self, key: &str, what: impl Into<String>) -> ShapeError {
        ShapeError::Unsupported {
            field: self.path(key).into(),
            what: what.into().into(),
        }
    }

    /// Refuses unread keys that may matter. `twin`: an object whose keys may be repeated here; `media`: keys
    /// about encoders are expected.
    pub(super) fn close(
        &self,
        of: &str,
        twin: Option<&Object>,
        media: bool,
    ) -> Result<(), ShapeError> {
        let read = self.log.read.borrow();
        let mut material = Vec::new();
        for (key, value) in self.object {
            let path = self.path(key);
            let same = twin.and_then(|twin| twin.get(key)) == Some(value);
            if read.contains(&path)
                || same
                || is_nothing(value)
                || is_unit(key, value)
                || is_immaterial(key)
                || media && is_media(key)
            {
                continue;
            }
            if bears(key, value) {
                material.push(format!("`{}` = {}", cleaned(&path), shown(value)));
            } else {
                self.log
                    .ignored
                    .borrow_mut()
                    .push(format!("`{}`", cleaned(&path)));
            }
        }
        if material.is_empty() {
            return Ok(());
        }
        let more = material.len().saturating_sub(NAMED_MAX);
        material.truncate(NAMED_MAX);
        let mut keys = material.join(", ");
        if more > 0 {
            keys = format!("{keys} and {more} more");
        }
        Err(ShapeError::Unread {
            keys,
            of: of.to_owned(),
        })
    }
}

/// Keys that count layers of multi-token prediction, which are left out, and describe them.
pub(super) const MTP: &[&str] = &[
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "_num_mtp_layers",
    "mtp_share_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "use_mtp",
    "mtp_transformer_layers",
    "mtp_use_dedicated_embeddings",
    "multi_token_prediction",
];

/// Far above any model, and small enough that products of three stay below 2^64.
const SIZE_MAX: u64 = 1 << 21;
/// Keys that an error names.
const NAMED_MAX: usize = 6;

/// A whole number, also if it is written as a real one (`8.0`), as Python writes some.
pub(super) fn integer(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let real = value.as_f64()?;
        let whole = real.fract() == 0.0 && (0.0..=1e15).contains(&real);
        whole.then(|| slipstream_base::width::floor_u64(real))
    })
}

/// A value as errors show it: cut, and without control characters.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    let short: String = text.chars().filter(|c| !c.is_control()).take(40).collect();
    if short.len() < text.len() {
        short + "…"
    } else {
        short
    }
}

pub(super) fn cleaned(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Null, false, 0, or nothing but those: a feature that is off.
pub(super) fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || text.eq_ignore_ascii_case("none"),
        Value::Array(items) => items.iter().all(is_nothing),
        Value::Object(entries) => entries.values().all(is_nothing),
    }
}

/// Whether `value` is a factor, an interval or a step of one, which changes nothing.
fn is_unit(key: &str, value: &Value) -> bool {
    const PARTS: &[&str] = &[
        "_mod",
        "_factor",
        "interval",
        "_freq",
        "_step",
        "multiplier",
    ];
    value.as_f64() == Some(1.0) && PARTS.iter().any(|part| key.ends_with(part))
}

/// Whether an unknown key can bear on size, compute or cache: by a stem in its name or in those below it, or because its
/// value is a list with an entry for each layer, or a size.
fn bears(key: &str, value: &Value) -> bool {
    let lower = key.to_ascii_lowercase();
    if STEMS.iter().any(|stem| lower.contains(stem)) {
        return true;
    }
    match value {
        Value::Number(_) => integer(value).is_some_and(|n| n >= 2),
        Value::Array(items) => items.len() > 1 && items.iter().any(|item| bears(key, item)),
        Value::Object(entries) => entries
            .iter()
            .any(|(key, value)| !is_nothing(value) && !is_immaterial(key) && bears(key, value)),
        _ => false,
    }
}

/// Parts of the names of keys that bear on size, compute or cache.
const STEMS: &[&str] = &[
    // mixtures of experts
    "expert",
    "moe",
    "rout",
    "shared",
    "topk",
    "top_k",
    "sparse",
    "dense",
    "capacity",
    "gate",
    "gating",
    // other layers than attention and MLP
    "ssm",
    "mamba",
    "state",
    "conv",
    "recurr",
    "rnn",
    "lru",
    "delta",
    "linear",
    "hybrid",
    "loop",
    "ngram",
    "memory",
    "altup",
    "laurel",
    "cross",
    "encoder",
    "decoder",
    "canon",
    "hyper",
    "residual_stream",
    "engram",
    // attention and its cache
    "index",
    "window",
    "chunk",
    "local",
    "global",
    "lora",
    "latent",
    "rank",
    "compress",
    "cache",
    "kv",
    "attn",
    "attention",
    "head",
    "mla",
    "gqa",
    "mqa",
    "nope",
    "rope",
    "rotary",
    "position",
    "context",
    "sink",
    "cla",
    "share",
    // sizes
    "num_",
    "n_",
    "_n",
    "count",
    "dim",
    "size",
    "width",
    "depth",
    "layer",
    "block",
    "hidden",
    "intermediate",
    "ffn",
    "ff_",
    "mlp",
    "vocab",
    "embd",
    "embed",
    "per_",
    "interval",
    "interleave",
    "freq",
    "pattern",
    "period",
    "stride",
    "ratio",
    "factor",
    "expan",
    "repeat",
    "group",
    "tie",
    "tying",
    "skip",
    // formats, and layers that are left out
    "quant",
    "bit",
    "fp8",
    "fp4",
    "int4",
    "int8",
    "mtp",
    "nextn",
    "next_n",
    "predict",
    "speculat",
    "draft",
    "adapter",
    "prun",
    "sparsity",
    "dtype",
];

/// Whether `key` is one of those that matter to no size, compute or cache.
fn is_immaterial(key: &str) -> bool {
    key == "_name_or_path"
        || ENDINGS.iter().any(|ending| key.ends_with(ending))
        || IMMATERIAL
            .iter()
            .any(|(_, keys)| keys.split_whitespace().any(|known| known == key))
}

/// Whether `key` is about an encoder of images, video or sound.
pub(super) fn is_media(key: &str) -> bool {
    MEDIA.iter().any(|media| {
        key.strip_prefix(media)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    })
}

/// Endings of immaterial keys: ids of tokens, constants of norms, of initialization and of training.
const ENDINGS: &[&str] = &[
    "_token_id",
    "_token_ids",
    "_token_index",
    "_eps",
    "_epsilon",
    "dropout",
    "_pdrop",
    "_coef",
    "_coeff",
    "_std",
    "initializer_range",
    "_init",
    "_loss",
    "_loss_weight",
    "_bias",
    "_act",
    "_activation",
    "_act_fn",
    "softcapping",
    "softcap",
    "_theta",
    "_implementation",
];

/// First words of keys about encoders of images, video and sound. They are read as such only in a file that has an
/// encoder, as `vision_config` or around a language model's own object.
const MEDIA: &[&str] = &[
    "vision",
    "visual",
    "image",
    "video",
    "audio",
    "speech",
    "mm",
    "projector",
    "projection",
    "vit",
    "multimodal",
    "spatial",
    "temporal",
    "img",
    "multi",
    "media",
    "media_",
    "use_image",
    "use_thumbnail",
    "dynamic_image",
    "downsample",
    "use_unified_vision_chunk",
    "force_image",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "ps_version",
    "select_layer",
    "template",
    "alignment",
    "max_value_projector",
];

/// Keys that do not bear on size, compute or cache, and why.
const IMMATERIAL: &[(&str, &str)] = &[
    (
        "the program that wrote the file, and where its code is",
        "transformers_version auto_map model_name model_name_or_path unsloth_version unsloth_fixed task_specific_params \
         finetuning_task base_model license torch_dtype_loss producer id2label label2id num_labels problem_type \
         classifier_dropout prefix tokenizer_class processor_class sep_token_id",
    ),
    (
        "numbers that change values, not shapes",
        "routed_scaling_factor moe_routed_scaling_factor router_scaling_factor norm_topk_prob moe_renormalize \
         scoring_func topk_method moe_router_score_function score_function n_group topk_group num_expert_group \
         moe_norm_min use_routing_bias use_expert_bias router_bias moe_router_enable_expert_bias \
         router_jitter_noise input_jitter_noise moe_router_use_sigmoid moe_router_bias_update_rate \
         e_score_correction_bias use_score_correction_bias norm_router router_dtype \
         swiglu_limit swiglu_alpha swiglu_beta swiglu_limits swiglu_limits_shared attention_multiplier \
         embedding_multiplier residual_multiplier logits_scaling logit_scale query_pre_attn_scalar \
         attn_temperature_tuning attn_scale floor_scale attention_value_scale mup_enabled scale_emb scale_depth \
         hidden_act hidden_activation clip_qkv norm_type use_gemma_norm layernorm_full_attention_beta \
         attention_softmax_in_fp32 scale_attention_softmax_in_fp32 attn_logit_softcapping final_logit_softcapping \
         enable_moe_fp32_combine enable_lm_head_fp32 use_rmsnorm norm_after norm_reorder",
    ),
    (
        "rotary embeddings: no weights, and the context is read where it is scaled",
        "rope_theta rope_local_base_freq rope_interleave rope_interleaved partial_rotary_factor rotary_dim \
         rotary_percent rotary_emb_base rope_percent rotary_pct no_rope_layers no_rope_layer_interval no_rope_layers_interval \
         original_max_position_embeddings mrope_section rope_type mrope_interleaved position_embedding_type \
         use_rotary_embeddings use_rotary_pos_emb max_window_layers_rope indexer_rope_interleave rope_pct",
    ),
    (
        "biases and norms of each channel: below 0.1 % of the weights",
        "attention_bias mlp_bias qkv_bias use_bias use_qkv_bias add_qkv_bias attention_out_bias bias lm_head_bias \
         o_proj_bias attention_qkv_bias mlp_fc1_bias mlp_fc2_bias conv_bias qk_layernorm use_qk_layernorm qk_norm_type \
         use_mla_norm rms_norm_before_ffn use_post_norm use_pre_norm attn_sink add_attention_sink attention_sink_bias",
    ),
    (
        "training and initialization",
        "use_cache pretraining_tp output_router_logits output_attentions output_hidden_states return_dict \
         router_aux_loss_coef aux_loss_alpha seq_aux balance_loss_coef ep_size embedding_initializer_range \
         initializer_factor initializer_cutoff_factor use_return_dict gradient_checkpointing initialization_method \
         moe_z_loss_coefficient moe_aux_loss_coefficient router_z_loss_coefficient moe_dropout embedding_dropout \
         output_dropout residual_dropout attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop \
         moe_random_routing_dropout im_start_id head_dropout router_warmup_steps mtp_loss_scaling_factor \
         moe_capacity moe_gate moe_gate_act moe_use_aux_free moe_use_aux_free_update_coef",
    ),
    (
        "how the program of the model computes, with equal results",
        "use_flash_attn use_flash_attention use_flash_attention_2 _attn_implementation attn_implementation \
         _experts_implementation moe_implementation use_dynamic_ntk use_logn_attn \
         use_cache_quantization use_cache_kernel softmax_in_fp32 fp32 bf16 fp16 experts_implementation \
         use_grouped_mm pad_embeddings deterministic reference_compile use_fused_rmsnorm use_fused_mlp _commit_hash use_parallel_block use_parallel_embedding order_of_interleaved_layers cache_implementation \
         chunk_size_feed_forward is_decoder is_encoder_decoder torchscript tpu attn_impl low_cpu_mem_usage",
    ),
    (
        "sampling and chat, not the model",
        "temperature top_p min_length max_length do_sample num_beams num_beam_groups diversity_penalty \
         no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences length_penalty \
         repetition_penalty early_stopping output_scores return_dict_in_generate forced_bos_token_id \
         forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens \
         begin_suppress_tokens typical_p top_k chat_template prediction_start_id max_new_tokens eod_id pad_id bos_id eos_id ignore_index initial_context_length",
    ),
];
