//! Reads the shape of a model from the files of its checkpoint.

use serde_json::Value;

use slipstream_base::width::floor_u64;

use super::class::{self, Class, Mixture, Shared};
use super::error::ShapeError;
use super::fields::{Fields, Log, Object, cleaned};
use super::files::ModelFiles;
use super::kept::Parts;
use super::model::{Attention, Experts, ModelShape};
use super::{index, layers, python_json, quantization};
use crate::cluster::Dtype;

/// A shape, and what the user should know of how it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadModel {
    /// The shape.
    pub shape: ModelShape,
    /// Sentences: defaults that were applied, keys that were ignored, weights that were left out.
    pub notes: Vec<String>,
}

impl ModelFiles {
    /// Reads the shape; `name` is the model's name.
    ///
    /// Layers for multi-token prediction (`num_nextn_predict_layers`) are omitted: vLLM loads them only for speculative
    /// decoding. Encoders of images, video and sound are omitted as well.
    ///
    /// # Errors
    /// If a file is not a JSON object, a size is missing or invalid, the shape cannot express a property, a key that may
    /// affect size, compute or cache is unknown, or the size of the weights contradicts the index. The message names the
    /// key.
    pub fn read(&self, name: &str) -> Result<ReadModel, ShapeError> {
        let value = python_json::parse(&self.config)?;
        let outer = value.as_object().ok_or(ShapeError::NoObject)?;
        let log = Log::default();
        let around = Fields::new(outer, "", &log);
        let (config, prefix, class) = language_model(around, outer, &log)?;
        let fields = Fields::new(config, &prefix, &log);
        let shape = self.shape(name, class, fields, around)?;
        for key in ["use_gated_activation", "use_glu", "glu_mlp", "gated_mlp"] {
            if fields.flag(key)? == Some(false) {
                return Err(fields.unsupported(key, "an MLP without a gate"));
            }
        }
        neutral(class, fields, &shape)?;
        let mtp = left_out_layers(fields)?;
        let mut format = None;
        for object in [fields, around] {
            for key in ["torch_dtype", "dtype"] {
                format = format.or(object.text(key)?);
            }
        }
        if let Some(other) =
            format.filter(|name| !["bfloat16", "float16", "float32", "auto"].contains(name))
        {
            return Err(
                fields.unsupported("torch_dtype", format!("weights in `{}`", cleaned(other)))
            );
        }
        let media = outer.keys().any(|key| {
            [
                "vision_config",
                "audio_config",
                "visual",
                "vision_tower",
                "mm_vision_tower",
            ]
            .contains(&&**key)
        });
        let nested = !std::ptr::eq(config, outer);
        let model_type = fields.text("model_type")?.unwrap_or_default();
        fields.close(model_type, None, media && !nested)?;
        if nested {
            around.close(model_type, Some(config), true)?;
        }
        let mut notes = log.notes();
        if mtp > 0 {
            notes.push("without the layers of multi-token prediction".to_owned());
        }
        if media {
            notes.push("without its encoder of non-text inputs".to_owned());
        }
        if let Some(text) = &self.index {
            notes.extend(index::check(
                text,
                &shape,
                format == Some("float32"),
                outer,
                mtp,
            )?);
        }
        Ok(ReadModel { shape, notes })
    }

    fn shape(
        &self,
        name: &str,
        class: &Class,
        fields: Fields<'_>,
        around: Fields<'_>,
    ) -> Result<ModelShape, ShapeError> {
        let hidden_size = fields.number("hidden_size")?;
        let layers = fields.number("num_hidden_layers")?;
        let attention = layers::attention(class, fields, layers)?;
        let latent = matches!(attention, Attention::Latent { .. });
        let (attention_heads, kv_heads) = heads(class, fields, latent)?;
        let mut experts = routed(class, fields, layers)?;
        let parts = Parts {
            layers,
            attention,
            experts,
        };
        let formats = quantization::read(self, around, fields, parts)?;
        if let Some(experts) = &mut experts {
            experts.weights = formats.experts;
        }
        Ok(ModelShape {
            name: name.to_owned().into(),
            source: "config.json".into(),
            layers,
            hidden_size,
            intermediate_size: dense_width(class, fields, experts)?,
            attention_heads,
            kv_heads,
            head_dim: head_dim(class, fields, attention, hidden_size, attention_heads)?,
            vocab_size: match fields.optional("vocab_size")? {
                Some(size) => size,
                // Gemma 3's files leave it out.
                None if class.types.contains(&"gemma3_text") => {
                    fields.assume("vocab_size", 262_208)
                }
                None => return Err(fields.missing("vocab_size")),
            },
            max_positions: context(class, fields)?,
            tied_embeddings: tied(class, fields, around, self.index.as_deref())?,
            qk_norm: {
                let stated = fields.flag("use_qk_norm")?;
                class.qk_norm || stated == Some(true)
            },
            weights: formats.weights,
            mlps: formats.mlps,
            int4_group: if formats.experts == Dtype::Int4 {
                formats.group
            } else {
                64
            },
            kv_cache: formats.kv_cache,
            experts,
            attention,
        })
    }
}

/// The object of the language model in `outer`, its prefix in errors, and its class.
fn language_model<'a>(
    around: Fields<'a>,
    outer: &'a Object,
    log: &'a Log,
) -> Result<(&'a Object, String, &'static Class), ShapeError> {
    if outer.contains_key("n_layers") && outer.contains_key("dim") {
        return Err(around.unsupported(
            "n_layers",
            "Mistral's own `params.json`; use the `config.json` of the same model: this format",
        ));
    }
    if around.flag("is_encoder_decoder")? == Some(true) {
        return Err(around.unsupported("is_encoder_decoder", "an encoder before the decoder"));
    }
    let of_outer = around.text("model_type")?;
    let mut inner = None;
    for key in ["text_config", "language_config", "llm_config"] {
        if let Some(object) = around.get(key) {
            let object = object.as_object().ok_or(ShapeError::NoObject)?;
            if let Some((first, _)) = inner {
                return Err(
                    around.unsupported(key, format!("a second language model beside `{first}`"))
                );
            }
            inner = Some((key, object));
        }
    }
    let Some((key, object)) = inner else {
        let class = class_of(around, of_outer)?;
        check_architectures(around, class.architectures, class.types[0])?;
        return Ok((outer, String::new(), class));
    };
    let of_outer = of_outer.ok_or_else(|| around.missing("model_type"))?;
    let architectures = class::around(of_outer);
    if architectures.is_empty() {
        return Err(unknown(around, of_outer));
    }
    check_architectures(around, &architectures, of_outer)?;
    let prefix = format!("{key}.");
    let fields = Fields::new(object, &prefix, log);
    let class = class_of(fields, fields.text("model_type")?)?;
    if fields.flag("is_encoder_decoder")? == Some(true) {
        return Err(fields.unsupported("is_encoder_decoder", "an encoder before the decoder"));
    }
    check_architectures(fields, class.architectures, class.types[0])?;
    Ok((object, prefix, class))
}

fn class_of(fields: Fields<'_>, model_type: Option<&str>) -> Result<&'static Class, ShapeError> {
    let model_type = model_type.ok_or_else(|| fields.missing("model_type"))?;
    class::of_type(model_type).ok_or_else(|| unknown(fields, model_type))
}

/// Refuses `model_type`, with the reason if it is known.
fn unknown(fields: Fields<'_>, model_type: &str) -> ShapeError {
    let what = match class::refused(model_type) {
        Some(why) => format!("`{model_type}` has {why}, which"),
        None => format!("the architecture `{}`", cleaned(model_type)),
    };
    fields.unsupported("model_type", what)
}

/// Refuses a class of the model that is not one of `known`, those of `model_type`: vLLM chooses the model by this name.
fn check_architectures(
    fields: Fields<'_>,
    known: &[&str],
    model_type: &str,
) -> Result<(), ShapeError> {
    for name in fields.list("architectures")?.unwrap_or_default() {
        let name = name.as_str().unwrap_or("?");
        if !known.contains(&name) {
            let what = format!(
                "`{}`, which is not the class of `{model_type}`,",
                cleaned(name)
            );
            return Err(fields.unsupported("architectures", what));
        }
    }
    Ok(())
}

/// Query heads, and heads of keys and values.
fn heads(class: &Class, fields: Fields<'_>, latent: bool) -> Result<(u32, u32), ShapeError> {
    let heads = match (fields.optional("num_attention_heads")?, class.heads) {
        (Some(heads), _) => heads,
        (None, Some([heads, _])) => fields.assume("num_attention_heads", heads),
        (None, None) => return Err(fields.missing("num_attention_heads")),
    };
    let kv_heads = match (fields.optional("num_key_value_heads")?, class.heads) {
        (Some(kv_heads), _) => kv_heads,
        (None, _) if latent => heads,
        (None, Some([_, kv_heads])) => fields.assume("num_key_value_heads", kv_heads),
        (None, None) if class.heads_default => fields.assume("num_key_value_heads", heads),
        (None, None) => return Err(fields.missing("num_key_value_heads")),
    };
    if !latent && !heads.is_multiple_of(kv_heads) {
        return Err(ShapeError::Range {
            field: fields.path("num_key_value_heads").into(),
            found: kv_heads.to_string(),
            must: "a divisor of num_attention_heads",
        });
    }
    Ok((heads, kv_heads))
}

fn head_dim(
    class: &Class,
    fields: Fields<'_>,
    attention: Attention,
    hidden_size: u32,
    heads: u32,
) -> Result<u32, ShapeError> {
    let stated = fields.any_of(&["head_dim", "attention_head_dim"], 1)?;
    if let Attention::Latent {
        rope_dim, nope_dim, ..
    } = attention
    {
        let whole = rope_dim.saturating_add(nope_dim);
        if let Some(found) = fields
            .optional("qk_head_dim")?
            .filter(|found| *found != whole)
        {
            return Err(ShapeError::Range {
                field: fields.path("qk_head_dim").into(),
                found: found.to_string(),
                must: "qk_nope_head_dim + qk_rope_head_dim",
            });
        }
        return Ok(whole);
    }
    match (stated, class.head_dim) {
        (Some(0), _) => Err(fields.range(
            "head_dim",
            &Value::from(0),
            "an integer from 1 to 2,097,152",
        )),
        (Some(stated), _) => Ok(stated),
        (None, Some(default)) => Ok(fields.assume("head_dim", default)),
        (None, None) if hidden_size.is_multiple_of(heads) => {
            Ok(fields.assume("head_dim", hidden_size / heads))
        }
        (None, None) => Err(fields.missing("head_dim")),
    }
}

/// Names of the number of experts, of those for each token, and of shared ones.
const COUNT: &[&str] = &[
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
];
const PER_TOKEN: &[&str] = &[
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
];
const SHARED: &[&str] = &[
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
];

/// The mixture of experts, with weights in 16 bits so far.
fn routed(class: &Class, fields: Fields<'_>, layers: u32) -> Result<Option<Experts>, ShapeError> {
    let (shared, dense) = match class.experts {
        // A key about experts is unknown to such a class, and is refused as such.
        Mixture::Dense => return Ok(None),
        Mixture::SharedOrRouted => {
            let count = fields.any_of(COUNT, layers)?.unwrap_or(0);
            if count > 0 {
                return Err(fields.unsupported("num_local_experts", "experts of this architecture"));
            }
            fields.mark_all(PER_TOKEN);
            return Ok(None);
        }
        Mixture::Routed(shared, dense) => (shared, dense),
    };
    let stated = |keys: &[&'static str]| match fields.any_of(keys, layers)? {
        Some(0) => Err(fields.range(keys[0], &Value::from(0), "an integer from 1 to 2,097,152")),
        Some(value) => Ok(value),
        None => Err(fields.missing_any(keys)),
    };
    let count = stated(COUNT)?;
    let per_token = stated(PER_TOKEN)?;
    if per_token > count {
        return Err(ShapeError::Range {
            field: fields.path("num_experts_per_tok").into(),
            found: per_token.to_string(),
            must: "at most the number of experts",
        });
    }
    let width = if class.own_width {
        stated(&["moe_intermediate_size", "expert_dim"])?
    } else if class.types == ["hunyuan_v1_moe"] {
        // The class of vLLM reads it, and that of Transformers does not.
        match fields.alike("moe_intermediate_size", layers)? {
            Some(width) if width > 0 => width,
            _ => fields.assume("moe_intermediate_size", fields.number("intermediate_size")?),
        }
    } else {
        fields.number("intermediate_size")?
    };
    let shared_size = shared_width(class, fields, layers, (shared, width))?;
    Ok(Some(Experts {
        count,
        per_token,
        intermediate_size: width,
        shared_size,
        dense_layers: layers::dense_layers(dense, fields, layers)?,
        weights: Dtype::Bf16,
    }))
}

/// Total width of the shared experts, if routed ones have `width`.
fn shared_width(
    class: &Class,
    fields: Fields<'_>,
    layers: u32,
    (shared, width): (Shared, u32),
) -> Result<u32, ShapeError> {
    const SHARED_WIDTH: &[&str] = &[
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ];
    match shared {
        Shared::No => Ok(0),
        Shared::One => Ok(width),
        Shared::Width => match fields.any_of(SHARED_WIDTH, layers)? {
            Some(width) => Ok(width),
            None => Err(fields.missing_any(SHARED_WIDTH)),
        },
        Shared::Count => {
            let found = fields.any_of(SHARED, layers)?;
            let null = SHARED.iter().any(|key| fields.has(key));
            let count = match found {
                Some(count) => count,
                None if null => 0,
                None => return Err(fields.missing_any(SHARED)),
            };
            // Hunyuan has its shared experts with this flag alone.
            if class.types == ["hunyuan_v1_moe"] && fields.flag("use_mixed_mlp_moe")? == Some(false)
            {
                return Err(
                    fields.unsupported("use_mixed_mlp_moe", "a mixture without its shared experts")
                );
            }
            let one = fields
                .optional("moe_shared_expert_intermediate_size")?
                .unwrap_or(width);
            Ok(count.saturating_mul(one))
        }
    }
}

/// Records keys of sizes as read whose values say what the class says anyway.
fn neutral(class: &Class, fields: Fields<'_>, shape: &ModelShape) -> Result<(), ShapeError> {
    let latent = matches!(shape.attention, Attention::Latent { .. });
    if fields.get("use_mla") == Some(&Value::Bool(true)) && !latent {
        return Err(fields.unsupported("use_mla", "latent attention in this class"));
    }
    if fields.flag("lm_head")? == Some(false) {
        return Err(fields.unsupported("lm_head", "a model without a head"));
    }
    // Layers that share their caches, and the layers of each share. Without the flag there are none.
    match fields.flag("use_cla")? {
        Some(true) => {
            return Err(fields.unsupported("use_cla", "attention that shares caches across layers"));
        }
        Some(false) => fields.mark_all(&["cla_share_factor"]),
        None => {}
    }
    // One expert is a dense MLP, of `intermediate_size`.
    let one = |key| fields.peek(key).and_then(super::fields::integer) == Some(1);
    if class.experts == Mixture::Dense && COUNT.iter().any(|key| one(key)) {
        fields.mark_all(
            COUNT
                .iter()
                .copied()
                .filter(|key| one(key))
                .collect::<Vec<_>>()
                .as_slice(),
        );
        fields.mark_all(PER_TOKEN);
        fields.mark_all(SHARED);
        fields.mark_all(&["moe_intermediate_size"]);
    }
    Ok(())
}

/// Width of the dense MLPs.
fn dense_width(
    class: &Class,
    fields: Fields<'_>,
    experts: Option<Experts>,
) -> Result<u32, ShapeError> {
    if class.experts == Mixture::SharedOrRouted {
        fields.mark_all(&["intermediate_size"]);
        return fields.number("shared_intermediate_size");
    }
    let stated = fields.optional("intermediate_size")?;
    let Some(experts) = experts else {
        return stated.ok_or_else(|| fields.missing("intermediate_size"));
    };
    // Llama 4: separate widths of dense layers and of experts.
    let own = if class.types.contains(&"llama4") {
        Some(fields.number("intermediate_size_mlp")?)
    } else {
        None
    };
    match own.or(stated) {
        Some(width) => Ok(width),
        None if experts.dense_layers > 0 => Err(fields.missing("intermediate_size")),
        None => Ok(experts.intermediate_size),
    }
}

/// Whether both embeddings are one matrix.
fn tied(
    class: &Class,
    fields: Fields<'_>,
    around: Fields<'_>,
    index: Option<&[u8]>,
) -> Result<bool, ShapeError> {
    const KEY: &str = "tie_word_embeddings";
    let inner = fields.flag(KEY)?;
    let outer = around.flag(KEY)?;
    let tied = match (outer, inner) {
        // The object around decides in vLLM, which unties embeddings if the checkpoint has a head of its own.
        (Some(true), Some(false)) => match index.and_then(index::has_head) {
            Some(head) => !head,
            None => {
                return Err(ShapeError::Range {
                    field: fields.path(KEY).into(),
                    found: format!("false, where `{}` is true", around.path(KEY)),
                    must: "the same, unless model.safetensors.index.json is beside it and decides",
                });
            }
        },
        (Some(tied), _) => tied,
        // Files of Transformers 5 leave out what their class says, which the object inside need not repeat.
        (None, Some(tied)) => match index.and_then(index::has_head) {
            Some(head) => !head,
            None => around.assume(KEY, tied),
        },
        (None, None) => fields.assume(KEY, class.tied),
    };
    // Cohere's name of the same thing.
    if let Some(other) = fields
        .flag("use_embedding_sharing")?
        .filter(|other| *other != tied)
    {
        let what = format!("{other}, where `tie_word_embeddings` is {tied},");
        return Err(fields.unsupported("use_embedding_sharing", what));
    }
    Ok(tied)
}

/// Layers of multi-token prediction that the file counts.
fn left_out_layers(fields: Fields<'_>) -> Result<u32, ShapeError> {
    let mut most = 0;
    for key in super::fields::MTP {
        most = most.max(match fields.get(key) {
            Some(Value::Bool(on)) => u32::from(*on),
            _ => fields.count(key)?.unwrap_or(0),
        });
    }
    Ok(most)
}

/// Context of the model, tokens.
///
/// Source: vLLM, `_get_and_verify_max_len` in `vllm/config/model.py` and `derive_max_model_len_and_key` in
/// `vllm/transformers_utils/model_arch_config_convertor.py`: factors of rotary embeddings apply, except those of kinds
/// whose `max_position_embeddings` has them already; YaRN's applies to the original context.
fn context(class: &Class, fields: Fields<'_>) -> Result<u32, ShapeError> {
    const OTHERS: &[&str] = &[
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_target_positions",
        "max_sequence_length",
        "max_seq_length",
        "seq_len",
    ];
    let gemma3 = class.types.contains(&"gemma3_text");
    let mut stated = match fields.positions("max_position_embeddings")? {
        Some(stated) => stated,
        None if gemma3 => fields.assume("max_position_embeddings", 131_072),
        None => return Err(fields.missing("max_position_embeddings")),
    };
    for key in OTHERS {
        stated = stated.min(fields.positions(key)?.unwrap_or(stated));
    }
    stated = fields.positions("model_max_length")?.unwrap_or(stated);
    let mut scaling = None;
    for key in ["rope_scaling", "rope_parameters"] {
        scaling = scaling.or(fields.object(key)?.map(|object| (key, object)));
    }
    // Gemma 3's factor is in its `max_position_embeddings`.
    let Some((key, object)) = scaling.filter(|_| !gemma3) else {
        return Ok(stated);
    };
    // Layers of several kinds have one object each.
    let object = object.values().find_map(Value::as_object).unwrap_or(object);
    let kind = ["rope_type", "type"]
        .iter()
        .find_map(|field| object.get(*field)?.as_str());
    let factor = object
        .get("factor")
        .filter(|factor| !factor.is_null())
        .map_or(Some(1.0), Value::as_f64)
        .filter(|f| (1.0..=1e4).contains(f));
    match kind {
        None | Some("default" | "su" | "longrope" | "llama3" | "mrope") => Ok(stated),
        Some("linear" | "dynamic" | "yarn" | "deepseek_yarn") => {
            let Some(factor) = factor else {
                return Err(fields.unsupported(key, "a `factor` that is no number of at least 1"));
            };
            let original = match kind {
                Some("linear" | "dynamic") => stated,
                _ => match object.get("original_max_position_embeddings") {
                    None | Some(Value::Null) => stated,
                    Some(value) => super::fields::integer(value)
                        .and_then(|n| u32::try_from(n).ok())
                        .ok_or_else(|| {
                            fields.range(
                                "original_max_position_embeddings",
                                value,
                                "a number of tokens",
                            )
                        })?,
                },
            };
            let positions = floor_u64(f64::from(original) * factor);
            u32::try_from(positions)
                .map_err(|_| fields.unsupported(key, "a context of more than 4,294,967,295 tokens"))
        }
        Some(kind) => Err(fields.unsupported(
            key,
            format!("this kind of rotary embedding (`{}`)", cleaned(kind)),
        )),
    }
}
#[cfg(test)]
mod tests {
    use super::super::models::model;
    use super::*;

    /// Which layers have an index: as vLLM and Transformers schedule them.
    #[test]
    fn layers_that_share_an_index_have_no_keys_of_their_own() {
        let read = |more: &str| {
            let json = format!(
                r#"{{"model_type": "glm_moe_dsa", "num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128,
                "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
                "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
                "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
                "max_position_embeddings": 512, "index_topk": 64, "index_n_heads": 4{more}}}"#
            );
            read_config("x", &json)
        };
        let shared = ", \"full\", \"shared\"".repeat(4);
        for (more, layers) in [
            ("", 8),
            (r#", "index_topk_freq": 1"#, 8),
            // Layers 0 and 1, 5: from the offset on, each fourth.
            (r#", "index_topk_freq": 4"#, 3),
            (r#", "index_topk_freq": 4, "index_skip_topk_offset": 0"#, 2),
            (r#", "index_topk_pattern": "FSSSFSSS""#, 2),
            (&format!(r#", "indexer_types": [{}]"#, &shared[2..]), 4),
        ] {
            let shape = read(more).unwrap();
            let index = shape.attention.index().unwrap();
            assert_eq!((index.layers, index.head_dim), (layers, 128), "{more}");
            let bytes = shape.kv_bytes_per_token_per_gpu(1, Dtype::Bf16);
            assert_eq!(bytes, 8 * 1_152 + u64::from(layers) * 132, "{more}");
        }
        for (more, part) in [
            (
                r#", "index_topk_pattern": "FS""#,
                "`index_topk_pattern` is of 2 layers",
            ),
            (
                r#", "index_topk_pattern": "FSSSFSSX""#,
                "other letters than F and S",
            ),
            (r#", "index_head_dim": 64"#, "a multiple of 128"),
            (
                &format!(
                    r#", "index_topk_freq": 4, "indexer_types": [{}]"#,
                    &shared[2..]
                ),
                "`indexer_types`: 4 layers with an index, where other keys say 3",
            ),
        ] {
            let error = read(more).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    /// The shape of a `config.json` alone.
    fn read_config(name: &str, json: &str) -> Result<ModelShape, String> {
        let files = ModelFiles {
            config: json.into(),
            ..ModelFiles::default()
        };
        let read = files.read(name).map_err(|error| error.to_string())?;
        Ok(read.shape)
    }

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
            let shape = read_config("x", &json).unwrap();
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

    /// Keys that files leave out have the default of their class in Transformers, and rotary scaling extends contexts as in vLLM.
    #[test]
    fn defaults_of_classes_and_scaled_contexts_are_read() {
        let sizes = r#""num_hidden_layers": 6, "hidden_size": 3840, "intermediate_size": 15360,
            "num_attention_heads": 16, "num_key_value_heads": 8"#;
        let read = |rest: &str| {
            let json = format!("{{{sizes}, {rest}}}");
            read_config("x", &json).unwrap()
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
                let shape = read(&format!(
                    "{plain}, \"model_type\": \"llama\", \"{field}\": {scaling}"
                ));
                assert_eq!(shape.max_positions, expected, "{field} {scaling}");
            }
        }
        // The language model of others is in a part of the file.
        let inner = format!(
            "{{\"model_type\": \"internvl_chat\", \"llm_config\": {{\"model_type\": \"llama\", {sizes}, {plain}}}}}"
        );
        assert_eq!(read_config("x", &inner).unwrap().layers, 6);
    }

    #[test]
    fn a_config_json_gives_the_preset_of_its_model() {
        let json = r#"{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
            "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
            "tie_word_embeddings": false, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "sliding_window": null, "use_sliding_window": false}"#;
        let read = read_config("qwen3-30b-a3b", json).unwrap();
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
            read_config("qwen3-235b-a22b", &json).unwrap()
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
        let json = |model_type: &str, more: &str| {
            format!(
                r#"{{"model_type": "{model_type}", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
                "max_position_embeddings": 512{more}}}"#
            )
        };
        let read = |of: &str, more: &str| read_config("x", &json(of, more)).unwrap();
        let moe = ", \"n_routed_experts\": 8, \"num_experts_per_tok\": 2, \"moe_layer_freq\": 1, \
            \"first_k_dense_replace\": 1, \"moe_intermediate_size\": 32, \"n_shared_experts\": 1";
        let plain = read("glm4_moe", moe);
        assert!(!plain.qk_norm);
        assert!(read("glm4_moe", &format!("{moe}, \"use_qk_norm\": true")).qk_norm);
        // Layers for speculative decoding are not loaded.
        let with_mtp = format!(
            "{moe}, \"use_mtp\": true, \"num_mtp_modules\": 3, \"num_nextn_predict_layers\": 1"
        );
        assert_eq!(read("glm4_moe", &with_mtp), plain);
        let experts = plain.experts.unwrap();
        assert_eq!(
            (experts.count, experts.dense_layers, experts.shared_size),
            (8, 1, 32)
        );
    }

    #[test]
    fn an_old_config_json_gets_its_defaults() {
        let json = r#"{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
            "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000,
            "max_position_embeddings": 4096}"#;
        let read = read_config("llama-2-7b", json).unwrap();
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
        let good = r#""model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512"#;
        let cases = [
            ("[]".to_owned(), "not a JSON object"),
            ("{".to_owned(), "not JSON"),
            ("{}".to_owned(), "`model_type` is missing"),
            (
                r#"{"model_type": "llama"}"#.to_owned(),
                "`hidden_size` is missing",
            ),
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
                "`model_type`: `t5` has an encoder before the decoder",
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
                format!(
                    "{{{good}, \"model_type\": \"qwen3_moe\", \"num_key_value_heads\": 4, \"num_experts\": 8}}"
                ),
                "`num_experts_per_tok` or `experts_per_token`",
            ),
            (
                format!(
                    "{{{good}, \"model_type\": \"deepseek_v3\", \"q_lora_rank\": null, \"kv_lora_rank\": 512}}"
                ),
                "`qk_rope_head_dim` is missing",
            ),
            (
                format!("{{{good}, \"mamba_d_state\": 128}}"),
                "`mamba_d_state`: state-space layers",
            ),
            (
                format!("{{{good}, \"attn_type_list\": [1, 0, 1]}}"),
                "a mix of kinds of layers",
            ),
            (
                format!("{{{good}, \"n_routed_experts\": 8}}"),
                "`n_routed_experts` = 8 may change size, compute or cache, but is unknown for `llama`",
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
            let error = read_config("x", &json).unwrap_err();
            assert!(error.contains(part), "{error} for {json}");
        }
        let good = format!("{{{good}}}");
        assert_eq!(read_config("x", &good).unwrap().head_dim, 16);
    }

    const LLAMA: &str = r#""model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192,
        "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "head_dim": 128, "tie_word_embeddings": false"#;

    #[test]
    fn files_beside_state_the_format() {
        let modelopt = |algorithm: &str, cache: &str| {
            format!(
                r#"{{"producer": {{"name": "modelopt", "version": "0.23.0"}}, "quantization":
                {{"quant_algo": {algorithm}, "kv_cache_quant_algo": {cache}, "exclude_modules": ["lm_head"]}}}}"#
            )
        };
        let gptq = r#"{"bits": 4, "group_size": 128, "desc_act": false, "sym": true, "damp_percent": 0.01}"#;
        let awq = r#"{"zero_point": true, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}"#;
        let read = |hf_quant: Option<&str>, quantize: Option<&str>, more: &str| {
            let files = ModelFiles {
                config: format!("{{{LLAMA}{more}}}").into(),
                hf_quant_config: hf_quant.map(Into::into),
                quantize_config: quantize.map(|text| ("quantize_config.json", text.into())),
                index: None,
            };
            let read = files.read("x").map_err(|error| error.to_string())?;
            let shape = read.shape;
            Ok::<_, String>((shape.weights, shape.kv_cache, shape.int4_group))
        };
        let (bf16, fp8) = (Dtype::Bf16, Dtype::Fp8);
        let own = r#", "quantization_config": {"quant_method": "fp8"}"#;
        for (beside, quantize, more, expected) in [
            (None, None, "", Ok((bf16, bf16, 64))),
            (
                Some(modelopt("\"FP8\"", "\"FP8\"")),
                None,
                "",
                Ok((fp8, fp8, 64)),
            ),
            (
                Some(modelopt("\"NVFP4\"", "null")),
                None,
                "",
                Ok((Dtype::Nvfp4, bf16, 64)),
            ),
            (None, Some(gptq), "", Ok((Dtype::Int4, bf16, 128))),
            (None, Some(awq), "", Ok((Dtype::Int4, bf16, 128))),
            // `config.json` comes first.
            (
                Some(modelopt("\"NVFP4\"", "null")),
                Some(gptq),
                own,
                Ok((fp8, bf16, 64)),
            ),
            (
                Some(modelopt("\"W4A8_AWQ\"", "null")),
                None,
                "",
                Err("`hf_quant_config.json`: `modelopt` with W4A8_AWQ"),
            ),
            (
                Some(modelopt("null", "null")),
                None,
                "",
                Err("`modelopt` with an unnamed format"),
            ),
            (
                Some("[]".to_owned()),
                None,
                "",
                Err("hf_quant_config.json in the same folder is not a JSON object"),
            ),
            (
                None,
                Some(r#"{"bits": 8}"#),
                "",
                Err("`quantize_config.json`: `gptq` of 8 bits"),
            ),
            (
                None,
                Some(r#"{"bits": 4, "group_size": 128, "outlier_bits": 16}"#),
                "",
                Err("`quantize_config.json`: `outlier_bits` = 16"),
            ),
            (
                None,
                None,
                r#", "quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32]}"#,
                Err("in blocks of [1,32]"),
            ),
        ] {
            let read = read(beside.as_deref(), quantize, more);
            match expected {
                Ok(expected) => assert_eq!(read, Ok(expected), "{beside:?} {quantize:?}"),
                Err(part) => {
                    let error = read.expect_err(part);
                    assert!(error.contains(part), "{error}");
                }
            }
        }
    }

    #[test]
    fn the_index_must_agree_with_the_shape() {
        let weights = |layers: u32, more: &[&str]| {
            let names = (0..layers)
                .map(|layer| format!("\"model.layers.{layer}.mlp.up_proj.weight\": \"a\""));
            let more = more.iter().map(|name| format!("\"{name}\": \"a\""));
            names.chain(more).collect::<Vec<_>>().join(", ")
        };
        let check = |config: &str, total: &str, names: &str| {
            let files = ModelFiles {
                config: config.into(),
                index: Some(
                    format!("{{\"metadata\": {{{total}}}, \"weight_map\": {{{names}}}}}").into(),
                ),
                ..ModelFiles::default()
            };
            files
                .read("x")
                .map(|read| read.notes)
                .map_err(|error| error.to_string())
        };
        let llama = format!("{{{LLAMA}}}");
        let names = weights(80, &["lm_head.weight"]);
        // 70.55 billion weights of two bytes.
        let right = "\"total_size\": 141107412992";
        assert_eq!(check(&llama, right, &names), Ok(vec![]));
        // The same in FP8 without a word about it.
        let error = check(&llama, "\"total_size\": 72671625216", &names).unwrap_err();
        assert!(
            error.contains("141.1 GB of weights, but") && error.contains("says 72.7 GB"),
            "{error}"
        );
        let error = check(&llama, right, &weights(81 + 8, &[])).unwrap_err();
        assert!(
            error.contains("`num_hidden_layers` is 80") && error.contains("89 layers"),
            "{error}"
        );
        let error = check(&llama, right, &weights(40, &[])).unwrap_err();
        assert!(error.contains("40 layers"), "{error}");
        let single = format!("{{{LLAMA}, \"torch_dtype\": \"float32\"}}");
        assert_eq!(
            check(&single, "\"total_size\": 282214825984", &names),
            Ok(vec![])
        );
        let notes = check(&llama, "", &names).unwrap();
        assert!(notes[0].contains("no `total_size`"), "{notes:?}");
        // DeepSeek-V3 counts 671 billion weights, and 685 with its layer of multi-token prediction and that layer's copies
        // of the embeddings (README of the model).
        let deepseek = r#"{"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
            "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "max_position_embeddings": 163840, "tie_word_embeddings": false, "num_nextn_predict_layers": 1,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128]}}"#;
        let mtp = [
            "model.layers.61.embed_tokens.weight",
            "model.layers.61.shared_head.head.weight",
        ];
        let names = weights(61, &mtp);
        assert!(check(deepseek, "\"total_size\": 688586727753", &names).is_ok());
        let error = check(deepseek, "\"total_size\": 1369000000000", &names).unwrap_err();
        assert!(error.contains("multi-token prediction"), "{error}");
    }

    /// As in vLLM: the object around the language model's decides, and the weights where it contradicts the object inside.
    #[test]
    fn embeddings_of_nested_models_are_tied_by_the_object_around() {
        let read = |outer: Option<bool>, inner: Option<bool>, head: Option<bool>| {
            let key = |tied: Option<bool>| {
                tied.map_or(String::new(), |tied| {
                    format!(", \"tie_word_embeddings\": {tied}")
                })
            };
            let config = format!(
                r#"{{"model_type": "llava"{}, "text_config": {{"model_type": "llama", "num_hidden_layers": 2,
                "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100,
                "max_position_embeddings": 512{}}}}}"#,
                key(outer),
                key(inner)
            );
            let index = head.map(|head| {
                let name = if head {
                    "language_model.lm_head.weight"
                } else {
                    "model.embed_tokens.weight"
                };
                format!(r#"{{"metadata": {{}}, "weight_map": {{"{name}": "a"}}}}"#).into()
            });
            let files = ModelFiles {
                config: config.into(),
                index,
                ..ModelFiles::default()
            };
            let read = files.read("x").map_err(|error| error.to_string())?;
            Ok::<_, String>(read.shape.tied_embeddings)
        };
        let (yes, no) = (Some(true), Some(false));
        for (outer, inner, head, tied) in [
            (None, None, None, false),
            (None, yes, None, true),
            (yes, None, None, true),
            (no, yes, None, false),
            (yes, no, yes, false),
            (yes, no, no, true),
            (None, yes, yes, false),
            (yes, yes, no, true),
        ] {
            let found = read(outer, inner, head);
            assert_eq!(found, Ok(tied), "{outer:?} {inner:?} {head:?}");
        }
        let error = read(yes, no, None).unwrap_err();
        assert!(
            error.contains(
                "`text_config.tie_word_embeddings` is false, where `tie_word_embeddings` is true"
            ),
            "{error}"
        );
    }

    /// Files of Gemma leave out what their class says: `configuration_gemma2.py` and `configuration_gemma3.py` of
    /// Transformers 5.24.
    #[test]
    fn keys_of_gemma_files_have_the_defaults_of_their_classes() {
        let gemma2 = |more: &str| {
            let json = format!(
                r#"{{"model_type": "gemma2", "num_hidden_layers": 26, "hidden_size": 2304, "intermediate_size": 9216,
                "vocab_size": 256000, "max_position_embeddings": 8192, "cache_implementation": "hybrid"{more}}}"#
            );
            read_config("x", &json)
        };
        let windows = |tokens| Attention::Windowed { tokens, layers: 13 };
        for (more, tokens) in [
            ("", 4096),
            (r#", "sliding_window_size": 4096"#, 4096),
            (
                r#", "sliding_window": 512, "sliding_window_size": 512"#,
                512,
            ),
        ] {
            let shape = gemma2(more).unwrap();
            assert_eq!(shape.attention, windows(tokens), "{more}");
            assert_eq!(
                (shape.attention_heads, shape.kv_heads, shape.head_dim),
                (8, 4, 256)
            );
            // The published gemma-2-2b has 2.61 billion weights.
            assert!(
                (2.60..2.63).contains(&(shape.params() as f64 / 1e9)),
                "{}",
                shape.params()
            );
        }
        let error = gemma2(r#", "sliding_window": 512, "sliding_window_size": 4096"#).unwrap_err();
        assert!(
            error.contains("`sliding_window_size`: 4096, where `sliding_window` is 512,"),
            "{error}"
        );
        let files = ModelFiles {
            config: br#"{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
                "mm_tokens_per_image": 256, "vision_config": {"hidden_size": 1152}, "text_config": {"model_type":
                "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}"#
                .to_vec(),
            ..ModelFiles::default()
        };
        let read = files.read("x").unwrap();
        assert_eq!((read.shape.attention_heads, read.shape.kv_heads), (8, 4));
        // 3.88 billion without the encoder, as the model's card counts 4.3 with it.
        assert!(
            (3.87..3.90).contains(&(read.shape.params() as f64 / 1e9)),
            "{}",
            read.shape.params()
        );
        assert!(
            read.notes[0].contains(
                "`text_config.num_attention_heads` 8, `text_config.num_key_value_heads` 4"
            ),
            "{:?}",
            read.notes
        );
    }

    #[test]
    fn experts_of_listed_layers_are_those_of_the_step() {
        let read = |more: &str| {
            let json = format!(
                r#"{{"model_type": "llama4_text", "head_dim": 16, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
                "attention_chunk_size": null, "intermediate_size_mlp": 256, "num_local_experts": 8, "num_experts_per_tok": 1{more}}}"#
            );
            let shape = read_config("x", &json)?;
            Ok::<_, String>(shape.experts.unwrap().dense_layers)
        };
        for (more, dense) in [
            (
                r#", "interleave_moe_layer_step": 2, "moe_layers": [1, 3]"#,
                2,
            ),
            (r#", "interleave_moe_layer_step": 2, "moe_layers": null"#, 2),
            (r#", "interleave_moe_layer_step": 0, "moe_layers": []"#, 4),
            (r#", "moe_layers": []"#, 4),
            (r#", "moe_layers": [0]"#, 3),
        ] {
            assert_eq!(read(more), Ok(dense), "{more}");
        }
        for list in ["[]", "[0, 2]", "[1]", "[0, 1, 2, 3]"] {
            let error = read(&format!(
                r#", "interleave_moe_layer_step": 2, "moe_layers": {list}"#
            ));
            assert!(
                error.clone().is_err_and(|e| e.contains("`moe_layers`")),
                "{error:?}"
            );
        }
    }

    #[test]
    fn an_encoder_is_left_out_of_the_comparison() {
        // Mistral-Small-3.1-24B: 24.0 billion weights, 23.6 of them the language model's.
        let config = r#"{"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
            "image_token_index": 10, "multimodal_projector_bias": false, "projector_hidden_act": "gelu",
            "spatial_merge_size": 2, "vision_feature_layer": -1, "torch_dtype": "bfloat16",
            "text_config": {"model_type": "mistral", "num_hidden_layers": 40, "hidden_size": 5120,
            "intermediate_size": 32768, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 131072, "max_position_embeddings": 131072, "sliding_window": null,
            "tie_word_embeddings": false},
            "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24,
            "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14}}"#;
        let check = |total: u64| {
            let index = format!(
                r#"{{"metadata": {{"total_size": {total}}}, "weight_map": {{
                "language_model.model.layers.39.mlp.up_proj.weight": "a", "language_model.lm_head.weight": "a",
                "vision_tower.transformer.layers.23.attention.q_proj.weight": "a",
                "multi_modal_projector.linear_1.weight": "a"}}}}"#
            );
            let files = ModelFiles {
                config: config.into(),
                index: Some(index.into()),
                ..ModelFiles::default()
            };
            files
                .read("x")
                .map(|read| read.notes)
                .map_err(|error| error.to_string())
        };
        let notes = check(48_022_792_192).unwrap();
        assert_eq!(notes, ["without its encoder of non-text inputs"]);
        let error = check(24_500_000_000).unwrap_err();
        assert!(
            error.contains("47.1 GB of weights, but") && error.contains("of an encoder"),
            "{error}"
        );
    }

    #[test]
    fn keys_that_were_not_read_are_refused_by_name() {
        for (more, part) in [
            (
                r#""moe_num_experts": 64"#,
                "`moe_num_experts` = 64 may change size",
            ),
            (r#""sliding_window": 4096"#, "`sliding_window` = 4096"),
            (r#""ssm_cfg": {"layer": "Mamba2"}"#, "`ssm_cfg` = "),
            (r#""num_loops": 3"#, "`num_loops` = 3"),
            (r#""kv_lora_rank": 512"#, "`kv_lora_rank` = 512"),
            (
                r#""use_sparse_attention": true"#,
                "`use_sparse_attention` = true",
            ),
            (r#""hidden_sizes": [1, 2]"#, "`hidden_sizes` = "),
            (
                r#""router_scale": Infinity"#,
                "`router_scale` = \"Infinity\"",
            ),
            (r#""tower": 12"#, "`tower` = 12"),
            (r#""extra": {"experts": {"count": 8}}"#, "`extra` = "),
            (
                r#""torch_dtype": "float8_e4m3fn""#,
                "weights in `float8_e4m3fn`",
            ),
            (
                r#""architectures": ["LlamaMoEForCausalLM"]"#,
                "`LlamaMoEForCausalLM`, which is not the class of `llama`",
            ),
            (
                r#""hidden_size": Infinity"#,
                "`hidden_size` is \"Infinity\"",
            ),
        ] {
            let error = read_config("x", &format!("{{{LLAMA}, {more}}}")).unwrap_err();
            assert!(error.contains(part), "{error} for {more}");
        }
        let plain = read_config("x", &format!("{{{LLAMA}}}")).unwrap();
        for more in [
            r#""moe_num_experts": 0"#,
            r#""num_experts": null, "use_sparse_attention": false, "kv_heads_by_layer": []"#,
            r#""attn_implementation": "sdpa", "router_aux_loss_coef": 0.001, "unsloth_version": "2025.1""#,
            r#""architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "time_scale": NaN"#,
        ] {
            assert_eq!(
                read_config("x", &format!("{{{LLAMA}, {more}}}")).as_ref(),
                Ok(&plain),
                "{more}"
            );
        }
        for of in [
            "zamba9",
            "mamba3",
            "nemotron_h_dense",
            "bamba2",
            "falcon_h1",
            "minimax_m3",
            "minimax",
            "llama5",
            "Llama",
            "nemotron_h",
            "lfm2",
            "gemma4",
            "deepseek_v4",
            "qwen3_moe_linear",
        ] {
            let error =
                read_config("x", &format!("{{{LLAMA}, \"model_type\": \"{of}\"}}")).unwrap_err();
            assert!(
                error.starts_with("`model_type`: ") && error.contains(&format!("`{of}`")),
                "{error}"
            );
        }
        let files = ModelFiles {
            config: format!("{{{LLAMA}, \"speed\": 0.5}}").into(),
            ..ModelFiles::default()
        };
        assert_eq!(files.read("x").unwrap().notes, ["not read: `speed`"]);
    }
}
