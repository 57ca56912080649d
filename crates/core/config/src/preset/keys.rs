//! Keys that no class reads: which of them may bear on size, compute or cache.
//!
//! Rules exempt a key by the end of its name, but no rule wins over a word in it that bears on size ([`STEMS`]): such
//! a key is named in a note, or refused if its value is not one of what the ending says. Only whole names are exempt
//! without a word ([`IMMATERIAL`]).
//!
//! Sources of names: the configuration classes of Transformers 4.36 to 5.20 and of vLLM 0.33, and files of checkpoints.

use serde_json::Value;

use super::fields::{integer, is_nothing};

/// What is known of a key that no class read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bearing {
    /// None: its name or its value says so.
    None,
    /// None by the end of its name, or as a name and value of no size: named in a note.
    Unlikely,
    /// May change size, compute or cache.
    Possible,
}

/// The bearing of `key` with `value`.
pub(super) fn bearing(key: &str, value: &Value) -> Bearing {
    if is_off(value) || is_unit(key, value) || is_immaterial(key) {
        return Bearing::None;
    }
    let stem = has_stem(key);
    match ending(key, value) {
        Some(Ending::Token) if !stem => Bearing::None,
        Some(Ending::Constant) if stem => Bearing::Unlikely,
        Some(Ending::Constant) => Bearing::None,
        _ if stem || bears(value) => Bearing::Possible,
        _ => Bearing::Unlikely,
    }
}

/// Whether a value turns a feature off. A list of zeros may be one entry for each layer, or name layer 0.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().all(|item| !item.is_number() && is_off(item)),
        Value::Object(entries) => entries.values().all(is_off),
        other => is_nothing(other),
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

/// Whether the value of a key without a stem can bear on size, compute or cache: a size, a list of them, or an object with
/// such a key.
fn bears(value: &Value) -> bool {
    match value {
        Value::Number(_) => integer(value).is_some_and(|n| n >= 2),
        Value::Array(items) => items.len() > 1 && items.iter().any(bears),
        Value::Object(entries) => entries
            .iter()
            .any(|(key, value)| bearing(key, value) == Bearing::Possible),
        _ => false,
    }
}

/// Whether a word in `key` bears on size, compute or cache.
fn has_stem(key: &str) -> bool {
    let lower = key.to_ascii_lowercase();
    let starts = |stem: &str| {
        lower.starts_with(stem)
            || lower
                .match_indices(stem)
                .any(|(at, _)| lower.as_bytes()[at - 1] == b'_')
    };
    STEMS.iter().any(|stem| lower.contains(stem))
        || STARTS.iter().any(|stem| starts(stem))
        || lower.ends_with("_n")
}

/// What the end of a name says of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The number or text of a token.
    Token,
    /// A constant of a norm, of an activation, of initialization or of training, or a kernel's name.
    Constant,
}

/// What the end of `key` says, if `value` is one of that kind.
fn ending(key: &str, value: &Value) -> Option<Ending> {
    let ends = |endings: &[&str]| endings.iter().any(|ending| key.ends_with(ending));
    let real = |most: f64| value.as_f64().is_some_and(|real| real.abs() <= most);
    let tokens = |value: &Value| value.is_u64() || value.is_string();
    let token = tokens(value)
        || value.is_boolean()
        || value
            .as_array()
            .is_some_and(|items| items.iter().all(tokens));
    if ends(&["_token_id", "_token_ids", "_token_index"]) {
        return token.then_some(Ending::Constant);
    }
    if ends(&["_token", "_id", "_ids", "_token_list"]) {
        return token.then_some(Ending::Token);
    }
    let fits = if ends(&["_eps", "_epsilon", "dropout", "_pdrop", "_prob"]) {
        value.is_boolean() || real(1.0) && !value.is_u64()
    } else if ends(&[
        "_coef",
        "_coeff",
        "_std",
        "initializer_range",
        "_init",
        "_loss",
        "_loss_weight",
    ]) {
        value.is_boolean() || real(1.0)
    } else if ends(&["_bias"]) {
        value.is_boolean()
    } else if ends(&["_act", "_activation", "_act_fn"]) {
        value.is_boolean() || value.is_string()
    } else if ends(&["softcapping", "softcap", "_theta"]) {
        value.is_number()
    } else if ends(&["_implementation"]) {
        value.as_str().is_some_and(|name| KERNELS.contains(&name))
    } else {
        false
    };
    fits.then_some(Ending::Constant)
}

/// Values of `_attn_implementation` and the like.
const KERNELS: &[&str] = &[
    "auto",
    "batched_mm",
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "flashinfer",
    "grouped_mm",
    "kernels",
    "sdpa",
    "triton",
    "xformers",
];

/// Parts of names as [`STEMS`], at the start of a word: `n_` is not one in `activation_function`.
const STARTS: &[&str] = &["n_", "num_", "per_", "tie"];

/// Whether `key` is one of those that matter to no size, compute or cache.
fn is_immaterial(key: &str) -> bool {
    IMMATERIAL
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
    "multi_modal",
    "media",
    "candidate_resolutions",
    "global_view_pos",
    "tile_tag",
    "max_splits_per_img",
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
    (
        "every class of Transformers 4.36 to 5.20 (`PretrainedConfig`, `GenerationConfig`), and its tools",
        "_name_or_path sequence_bias tf_legacy_loss _attn_implementation_autoset _attn_implementation_internal _configuration_file _flash_attn_2_enabled _from_auto \
         _from_model_config _from_pipeline _output_attentions _pre_quantization_dtype name_or_path use_bfloat16 xla_device \
         return_unused_kwargs trust_remote_code revision code_revision local_files_only keys_to_ignore_at_inference \
         tie_encoder_decoder decoder_start_token_id add_bos_token add_eos_token transformers.js_config \
         num_logits_to_keep logits_to_keep num_choices pretraining_sequence_length neftune_noise_alpha \
         assistant_confidence_threshold assistant_early_exit assistant_lookbehind target_lookbehind is_assistant \
         num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens max_matching_ngram_size dola_layers \
         cache_config compile_config disable_compile constraints generation_kwargs guidance_scale low_memory max_time \
         encoder_repetition_penalty epsilon_cutoff eta_cutoff force_words_ids forced_decoder_ids min_new_tokens min_p \
         output_logits penalty_alpha prefill_chunk_size renormalize_logits return_legacy_cache stop_strings token_healing \
         watermarking_config",
    ),
    (
        "functions and constants of classes of Transformers and vLLM, by whole name where a word in it is a stem",
        "normalization_function activation_function layer_norm_eps layer_norm_epsilon layernorm_epsilon layer_norm_type \
         moe_router_activation moe_router_activation_func moe_router_logit_softcapping moe_jitter_eps moe_loss_weight \
         moe_token_dropout moe_router_scaling_factor moe_normalize_expert_weights moe_apply_router_weight_on_input \
         moe_shared_expert_overlap moe_eval_capacity_token_fraction use_moe_router_bias use_attention_bias add_bias_linear \
         normalize_router_prob_before_dropping norm_expert_weight router_ignore_padding_tokens route_scale router_z_loss_coef \
         second_expert_policy attention_probs_dropout_prob attention_drop_rate attn_drop_rate attn_dropout hidden_dropout_prob \
         embed_dropout mlp_dropout ff_dropout ffn_dropout layerdrop layer_drop mlp_hidden_act ff_activation ffn_act_fn \
         dense_act_fn layer_norm_elementwise_affine layer_scale_init_value fp32_residual_connection residual_in_fp32 \
         apply_query_key_layer_scaling apply_residual_connection_post_layernorm scale_attn_weights \
         scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attn_uses_sequence_id attention_in_multiplier \
         attention_out_multiplier lm_head_multiplier logits_mup_width_multiplier attn_temperature_tuning_floor_scale \
         attn_temperature_tuning_q_scale_constant deterministic_flash_attn bias_dropout_fusion alibi alibi_bias_max \
         position_embeddings_type rotary_embedding_base rope_use_fp32_in_outer_product chunk_size_lm_head \
         model_parallel_size onnx_export projection_hidden_size",
    ),
    (
        "Hunyuan's trainer, classifier and encoder of images, which its files of text models state too",
        "dense_list org_vocab_size class_num num_media_embeds anyres_pooling_size anyres_vit_max_image_size \
         anyres_vit_two_views add_classification_head moe_drop_tokens moe_random_routing_dropped_token vit_token vit_patch \
         vit_input_resolution vit_mapping_type vit_norm_type vit_type vit_path vit_add_patchemb_bias vit_remove_prenorm \
         vit_used_rms_norm pool_type skip_cls_token position_embedding_xdrope xdrope_section",
    ),
];
