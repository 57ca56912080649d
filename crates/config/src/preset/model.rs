//! Shapes of models, from their public `config.json`.

use std::borrow::Cow;

use serde_json::{Map, Value};
use thiserror::Error;

use slipstream_base::width::{floor_u64, to_u32};

use super::{layers, quantization};
use crate::cluster::Dtype;

/// A mixture of experts in place of each layer's MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts per layer.
    pub count: u32,
    /// Experts per token.
    pub per_token: u32,
    /// Width of one expert.
    pub intermediate_size: u32,
    /// Total width of the shared experts, which process every token; 0: none.
    pub shared_size: u32,
    /// Layers that have a dense MLP of `intermediate_size` instead of experts.
    pub dense_layers: u32,
    /// Format of the routed experts' weights in the checkpoint.
    pub weights: Dtype,
}

/// The attention of a model's layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// Grouped-query attention over the whole context in every layer.
    #[default]
    Full,
    /// Multi-head latent attention (DeepSeek): one compressed vector per token.
    Latent {
        /// `q_lora_rank`; 0: queries are not compressed.
        query_rank: u32,
        /// `kv_lora_rank`.
        kv_rank: u32,
        /// `qk_rope_head_dim`.
        rope_dim: u32,
        /// `qk_nope_head_dim`.
        nope_dim: u32,
        /// `v_head_dim`.
        value_dim: u32,
        /// Tokens of the context that are attended to (`index_topk`); 0: all.
        sparse_tokens: u32,
    },
    /// Grouped-query attention; some layers have a sliding window.
    Windowed {
        /// Tokens of the window.
        tokens: u32,
        /// Layers with a window.
        layers: u32,
    },
    /// Grouped-query attention in some layers, linear attention (Gated DeltaNet) in the others.
    Linear {
        /// Layers with linear attention.
        layers: u32,
        /// `linear_num_key_heads`.
        key_heads: u32,
        /// `linear_num_value_heads`.
        value_heads: u32,
        /// `linear_key_head_dim` and `linear_value_head_dim`.
        head_dim: u32,
    },
}

/// Shape of a decoder-only transformer with a gated MLP or a mixture of such experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Name in a cluster file.
    pub name: Cow<'static, str>,
    /// Repository of the `config.json`.
    pub source: Cow<'static, str>,
    /// `num_hidden_layers`.
    pub layers: u32,
    /// `hidden_size`.
    pub hidden_size: u32,
    /// `intermediate_size` of the dense MLP; unused with experts.
    pub intermediate_size: u32,
    /// `num_attention_heads`.
    pub attention_heads: u32,
    /// `num_key_value_heads`.
    pub kv_heads: u32,
    /// `head_dim`.
    pub head_dim: u32,
    /// `vocab_size`.
    pub vocab_size: u32,
    /// `max_position_embeddings`: the longest context, tokens.
    pub max_positions: u32,
    /// `tie_word_embeddings`: input and output embedding share one matrix.
    pub tied_embeddings: bool,
    /// Whether query and key are normalized per head (Qwen3, or `use_qk_norm`).
    pub qk_norm: bool,
    /// Format of the checkpoint's matrices of attention and MLPs.
    pub weights: Dtype,
    /// Default format of keys and values.
    pub kv_cache: Dtype,
    /// The mixture of experts, if there is one.
    pub experts: Option<Experts>,
    /// The attention of its layers.
    pub attention: Attention,
}

impl ModelShape {
    /// Whether all layers are equal: attention over the whole context, and a dense MLP or only
    /// routed experts. The roofline supports no other shapes.
    pub fn is_uniform(&self) -> bool {
        self.attention == Attention::Full
            && self
                .experts
                .is_none_or(|e| e.shared_size == 0 && e.dense_layers == 0)
    }

    /// The name of the checkpoint's format: that of its routed experts, if it differs from the
    /// rest.
    pub fn dtype(&self) -> Dtype {
        match self.experts {
            Some(e) if e.weights != Dtype::Bf16 => e.weights,
            _ => self.weights,
        }
    }

    /// Layers whose keys and values cover the whole context.
    pub fn full_attention_layers(&self) -> u32 {
        match self.attention {
            Attention::Full | Attention::Latent { .. } => self.layers,
            Attention::Windowed { layers, .. } | Attention::Linear { layers, .. } => {
                self.layers.saturating_sub(layers)
            }
        }
    }

    /// Weights of the attention projections of all layers.
    pub fn attention_params_total(&self) -> u64 {
        let hidden = u64::from(self.hidden_size);
        let heads = u64::from(self.attention_heads);
        let all = u64::from(self.layers);
        match self.attention {
            Attention::Full | Attention::Windowed { .. } => all * self.attention_params(),
            Attention::Latent {
                query_rank,
                kv_rank,
                rope_dim,
                nope_dim,
                value_dim,
                ..
            } => {
                let [query_rank, kv_rank, rope, nope, value] =
                    [query_rank, kv_rank, rope_dim, nope_dim, value_dim].map(u64::from);
                let query = if query_rank == 0 {
                    hidden * heads * (nope + rope)
                } else {
                    query_rank * (hidden + heads * (nope + rope))
                };
                let layer = query
                    + hidden * (kv_rank + rope)
                    + kv_rank * heads * (nope + value)
                    + heads * value * hidden;
                all * layer
            }
            Attention::Linear {
                layers,
                key_heads,
                value_heads,
                head_dim,
            } => {
                let [linear, keys, values, width] =
                    [layers, key_heads, value_heads, head_dim].map(u64::from);
                // Query, key, value, output gate and output; two numbers per value head.
                let layer = hidden * width * (2 * keys + 3 * values) + 2 * hidden * values;
                // Full layers gate their output with as many numbers as the queries have.
                let full = self.attention_params() + hidden * heads * u64::from(self.head_dim);
                linear * layer + (all - linear.min(all)) * full
            }
        }
    }

    /// Weights of the dense MLPs and of shared experts, all layers.
    pub fn dense_mlp_params(&self) -> u64 {
        let one = |width: u32| 3 * u64::from(self.hidden_size) * u64::from(width);
        match self.experts {
            None => u64::from(self.layers) * one(self.intermediate_size),
            Some(e) => {
                u64::from(e.dense_layers) * one(self.intermediate_size)
                    + u64::from(self.expert_layers()) * one(e.shared_size)
            }
        }
    }

    /// Layers that have experts.
    pub fn expert_layers(&self) -> u32 {
        self.experts
            .map_or(0, |e| self.layers.saturating_sub(e.dense_layers))
    }

    /// Weights of all routed experts and their routers.
    pub fn expert_params(&self) -> u64 {
        self.experts.map_or(0, |e| {
            u64::from(self.expert_layers()) * u64::from(e.count) * self.mlp_params()
        })
    }

    /// Weights of the attention projections of one layer with [`Attention::Full`].
    pub fn attention_params(&self) -> u64 {
        let heads = u64::from(self.attention_heads) + u64::from(self.kv_heads);
        // Query and output have `attention_heads`, key and value `kv_heads` each.
        2 * u64::from(self.hidden_size) * heads * u64::from(self.head_dim)
    }

    /// Width of one gated MLP: the dense one, or one expert.
    pub fn mlp_width(&self) -> u32 {
        self.experts
            .map_or(self.intermediate_size, |e| e.intermediate_size)
    }

    /// Weights of one gated MLP (gate, up, down).
    pub fn mlp_params(&self) -> u64 {
        3 * u64::from(self.hidden_size) * u64::from(self.mlp_width())
    }

    /// Weights of the router of one layer; 0 without experts.
    pub fn router_params(&self) -> u64 {
        self.experts
            .map_or(0, |e| u64::from(self.hidden_size) * u64::from(e.count))
    }

    /// Weights of one embedding matrix.
    pub fn embedding_params(&self) -> u64 {
        u64::from(self.vocab_size) * u64::from(self.hidden_size)
    }

    /// All weights. Norms and biases are omitted: below 0.1 % in every preset.
    pub fn params(&self) -> u64 {
        let embeddings = if self.tied_embeddings { 1 } else { 2 };
        self.attention_params_total()
            + u64::from(self.expert_layers()) * self.router_params()
            + self.dense_mlp_params()
            + self.expert_params()
            + embeddings * self.embedding_params()
    }

    /// Weights used per token (without the input embedding, which is a look-up).
    pub fn active_params(&self) -> u64 {
        let routed = self.experts.map_or(0, |e| {
            u64::from(self.expert_layers()) * u64::from(e.per_token) * self.mlp_params()
        });
        self.attention_params_total()
            + u64::from(self.expert_layers()) * self.router_params()
            + self.dense_mlp_params()
            + routed
            + self.embedding_params()
    }

    /// Bytes of weights per GPU of `tensor_parallel`. Attention and dense MLPs are in `dtype`,
    /// experts in the checkpoint's format or in `dtype`, whichever is smaller. Checkpoints of fewer
    /// bits keep the embeddings in 16.
    pub fn weight_bytes_per_gpu(&self, tensor_parallel: u32, dtype: Dtype) -> u64 {
        let embeddings = self.embedding_params() * if self.tied_embeddings { 1 } else { 2 };
        let experts = self.expert_params();
        let of_experts = self
            .experts
            .map_or(dtype.bytes(), |e| e.weights.bytes().min(dtype.bytes()));
        let bytes = (self.params() - embeddings - experts) as f64 * dtype.bytes()
            + experts as f64 * of_experts
            + embeddings as f64 * Dtype::Bf16.bytes();
        floor_u64(bytes).div_ceil(u64::from(tensor_parallel.max(1)))
    }

    /// Bytes of KV cache per token and GPU of `tensor_parallel`. With more GPUs than key-value
    /// heads, heads are repeated; the vector of latent attention is on every GPU. Layers with a
    /// window or a linear state are not counted if other layers have full attention. Without any
    /// full layer, all are counted as full: exact for contexts up to the window, too much beyond
    /// it. A token always takes memory.
    pub fn kv_bytes_per_token_per_gpu(&self, tensor_parallel: u32, dtype: Dtype) -> u64 {
        let numbers = if let Attention::Latent {
            kv_rank, rope_dim, ..
        } = self.attention
        {
            u64::from(kv_rank + rope_dim)
        } else {
            let heads = self.kv_heads.div_ceil(tensor_parallel.max(1));
            2 * u64::from(heads) * u64::from(self.head_dim)
        };
        let layers = match self.full_attention_layers() {
            0 => self.layers,
            full => full,
        };
        let numbers = u64::from(layers) * numbers;
        floor_u64((numbers as f64 * dtype.bytes()).ceil())
    }

    /// Peak bytes per GPU for sampling the next tokens of `sequences`. Every GPU of a rank gathers
    /// the logits of the whole vocabulary.
    ///
    /// Counted per logit, for the tensors that are live while top-p sums probabilities: the head's
    /// logits in BF16 (2 bytes), their copy in float32 (4), that copy sorted (4) with its indices
    /// in int64 (8), the probabilities, which the sums overwrite (4), and the masks of top-k and
    /// top-p (1 each). The workspace of the sort is unknown and omitted.
    ///
    /// Source: vLLM, `GPUModelRunner._dummy_sampler_run` (the profiling step samples `max_num_seqs`
    /// rows with top-k and top-p) and `apply_top_k_top_p_pytorch`.
    pub fn sampling_bytes(&self, sequences: u32) -> u64 {
        const PER_LOGIT: u64 = 2 + 4 + 4 + 8 + 4 + 1 + 1;
        u64::from(sequences) * u64::from(self.vocab_size) * PER_LOGIT
    }

    /// Whether `tensor_parallel` GPUs can share the model.
    ///
    /// Source: vLLM, `ModelConfig.verify_with_parallel_config` (heads), `LlamaAttention.__init__`
    /// (key-value heads are split or repeated evenly) and `divide` in `distributed/utils.py` (MLP).
    pub fn divides_into(&self, tensor_parallel: u32) -> bool {
        let tp = tensor_parallel;
        tp > 0
            && self.attention_heads.is_multiple_of(tp)
            && (matches!(self.attention, Attention::Latent { .. })
                || self.kv_heads.is_multiple_of(tp)
                || tp.is_multiple_of(self.kv_heads))
            && self.mlp_width().is_multiple_of(tp)
    }

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

const fn llama(
    name: &'static str,
    source: &'static str,
    [layers, hidden_size, intermediate_size]: [u32; 3],
    [attention_heads, kv_heads, head_dim]: [u32; 3],
    [vocab_size, max_positions]: [u32; 2],
) -> ModelShape {
    ModelShape {
        name: Cow::Borrowed(name),
        source: Cow::Borrowed(source),
        layers,
        hidden_size,
        intermediate_size,
        attention_heads,
        kv_heads,
        head_dim,
        vocab_size,
        max_positions,
        tied_embeddings: false,
        qk_norm: false,
        weights: Dtype::Bf16,
        kv_cache: Dtype::Bf16,
        experts: None,
        attention: Attention::Full,
    }
}

const fn qwen3(
    name: &'static str,
    source: &'static str,
    sizes: [u32; 3],
    heads: [u32; 2],
    tied_embeddings: bool,
) -> ModelShape {
    let heads = [heads[0], heads[1], 128];
    let mut shape = llama(name, source, sizes, heads, [151_936, 40_960]);
    shape.tied_embeddings = tied_embeddings;
    shape.qk_norm = true;
    shape
}

const fn with_experts(shape: ModelShape, count: u32, per_token: u32, width: u32) -> ModelShape {
    // Not `..shape`: a const fn cannot drop the remaining fields.
    let mut shape = shape;
    shape.experts = Some(Experts {
        count,
        per_token,
        intermediate_size: width,
        shared_size: 0,
        dense_layers: 0,
        weights: Dtype::Bf16,
    });
    shape
}

/// `shared_size` and `dense_layers` of a mixture of experts, and the checkpoint's formats.
const fn sharing(
    shape: ModelShape,
    shared_size: u32,
    dense_layers: u32,
    [weights, of_experts]: [Dtype; 2],
) -> ModelShape {
    let mut shape = shape;
    if let Some(experts) = &mut shape.experts {
        experts.shared_size = shared_size;
        experts.dense_layers = dense_layers;
        experts.weights = of_experts;
    }
    shape.weights = weights;
    shape
}

const fn attending(shape: ModelShape, attention: Attention) -> ModelShape {
    let mut shape = shape;
    shape.attention = attention;
    shape
}

const fn normed(shape: ModelShape) -> ModelShape {
    let mut shape = shape;
    shape.qk_norm = true;
    shape
}

/// Sizes that DeepSeek-V3 and Kimi-K2 share.
const fn latent(sparse_tokens: u32) -> Attention {
    Attention::Latent {
        query_rank: 1536,
        kv_rank: 512,
        rope_dim: 64,
        nope_dim: 128,
        value_dim: 128,
        sparse_tokens,
    }
}

const BF16: [Dtype; 2] = [Dtype::Bf16, Dtype::Bf16];
const FP8: [Dtype; 2] = [Dtype::Fp8, Dtype::Fp8];

const fn deepseek_v3(
    name: &'static str,
    source: &'static str,
    heads: u32,
    [count, dense_layers]: [u32; 2],
    [vocab_size, max_positions]: [u32; 2],
    formats: [Dtype; 2],
    sparse_tokens: u32,
) -> ModelShape {
    let sizes = [61, 7168, 18_432];
    let shape = llama(
        name,
        source,
        sizes,
        [heads, heads, 192],
        [vocab_size, max_positions],
    );
    let shape = sharing(
        with_experts(shape, count, 8, 2048),
        2048,
        dense_layers,
        formats,
    );
    attending(shape, latent(sparse_tokens))
}

const fn tied(shape: ModelShape) -> ModelShape {
    let mut shape = shape;
    shape.tied_embeddings = true;
    shape
}

/// All models, from their public `config.json`.
pub const MODELS: &[ModelShape] = &[
    tied(llama(
        "llama-3.2-1b",
        "meta-llama/Llama-3.2-1B",
        [16, 2048, 8192],
        [32, 8, 64],
        [128_256, 131_072],
    )),
    tied(llama(
        "llama-3.2-3b",
        "meta-llama/Llama-3.2-3B",
        [28, 3072, 8192],
        [24, 8, 128],
        [128_256, 131_072],
    )),
    llama(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B",
        [32, 4096, 14_336],
        [32, 8, 128],
        [128_256, 131_072],
    ),
    llama(
        "llama-3.1-70b",
        "meta-llama/Llama-3.1-70B",
        [80, 8192, 28_672],
        [64, 8, 128],
        [128_256, 131_072],
    ),
    llama(
        "llama-3.1-405b",
        "meta-llama/Llama-3.1-405B",
        [126, 16_384, 53_248],
        [128, 8, 128],
        [128_256, 131_072],
    ),
    llama(
        "llama-2-7b",
        "meta-llama/Llama-2-7b-hf",
        [32, 4096, 11_008],
        [32, 32, 128],
        [32_000, 4096],
    ),
    llama(
        "llama-2-70b",
        "meta-llama/Llama-2-70b-hf",
        [80, 8192, 28_672],
        [64, 8, 128],
        [32_000, 4096],
    ),
    llama(
        "codellama-34b",
        "codellama/CodeLlama-34b-hf",
        [48, 8192, 22_016],
        [64, 8, 128],
        [32_000, 16_384],
    ),
    llama(
        "mistral-7b",
        "mistralai/Mistral-7B-v0.3",
        [32, 4096, 14_336],
        [32, 8, 128],
        [32_768, 32_768],
    ),
    with_experts(
        llama(
            "mixtral-8x7b",
            "mistralai/Mixtral-8x7B-v0.1",
            [32, 4096, 14_336],
            [32, 8, 128],
            [32_000, 32_768],
        ),
        8,
        2,
        14_336,
    ),
    with_experts(
        llama(
            "mixtral-8x22b",
            "mistralai/Mixtral-8x22B-v0.1",
            [56, 6144, 16_384],
            [48, 8, 128],
            [32_000, 65_536],
        ),
        8,
        2,
        16_384,
    ),
    llama(
        "qwen2.5-7b",
        "Qwen/Qwen2.5-7B-Instruct",
        [28, 3584, 18_944],
        [28, 4, 128],
        [152_064, 32_768],
    ),
    llama(
        "qwen2.5-32b",
        "Qwen/Qwen2.5-32B-Instruct",
        [64, 5120, 27_648],
        [40, 8, 128],
        [152_064, 32_768],
    ),
    llama(
        "qwen2.5-72b",
        "Qwen/Qwen2.5-72B-Instruct",
        [80, 8192, 29_568],
        [64, 8, 128],
        [152_064, 32_768],
    ),
    qwen3(
        "qwen3-0.6b",
        "Qwen/Qwen3-0.6B",
        [28, 1024, 3072],
        [16, 8],
        true,
    ),
    qwen3(
        "qwen3-1.7b",
        "Qwen/Qwen3-1.7B",
        [28, 2048, 6144],
        [16, 8],
        true,
    ),
    qwen3("qwen3-4b", "Qwen/Qwen3-4B", [36, 2560, 9728], [32, 8], true),
    qwen3(
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        [36, 4096, 12_288],
        [32, 8],
        false,
    ),
    qwen3(
        "qwen3-14b",
        "Qwen/Qwen3-14B",
        [40, 5120, 17_408],
        [40, 8],
        false,
    ),
    qwen3(
        "qwen3-32b",
        "Qwen/Qwen3-32B",
        [64, 5120, 25_600],
        [64, 8],
        false,
    ),
    with_experts(
        qwen3(
            "qwen3-30b-a3b",
            "Qwen/Qwen3-30B-A3B",
            [48, 2048, 6144],
            [32, 4],
            false,
        ),
        128,
        8,
        768,
    ),
    with_experts(
        qwen3(
            "qwen3-235b-a22b",
            "Qwen/Qwen3-235B-A22B",
            [94, 4096, 12_288],
            [64, 4],
            false,
        ),
        128,
        8,
        1536,
    ),
    llama(
        "llama-3.3-70b",
        "meta-llama/Llama-3.3-70B-Instruct",
        [80, 8192, 28_672],
        [64, 8, 128],
        [128_256, 131_072],
    ),
    attending(
        sharing(
            with_experts(
                llama(
                    "llama-4-scout",
                    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
                    [48, 5120, 16_384],
                    [40, 8, 128],
                    [202_048, 10_485_760],
                ),
                16,
                1,
                8192,
            ),
            8192,
            0,
            BF16,
        ),
        Attention::Windowed {
            tokens: 8192,
            layers: 36,
        },
    ),
    attending(
        sharing(
            with_experts(
                llama(
                    "llama-4-maverick",
                    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
                    [48, 5120, 16_384],
                    [40, 8, 128],
                    [202_048, 1_048_576],
                ),
                128,
                1,
                8192,
            ),
            8192,
            24,
            BF16,
        ),
        Attention::Windowed {
            tokens: 8192,
            layers: 36,
        },
    ),
    attending(
        sharing(
            with_experts(
                llama(
                    "gpt-oss-20b",
                    "openai/gpt-oss-20b",
                    [24, 2880, 2880],
                    [64, 8, 64],
                    [201_088, 131_072],
                ),
                32,
                4,
                2880,
            ),
            0,
            0,
            [Dtype::Bf16, Dtype::Mxfp4],
        ),
        Attention::Windowed {
            tokens: 128,
            layers: 12,
        },
    ),
    attending(
        sharing(
            with_experts(
                llama(
                    "gpt-oss-120b",
                    "openai/gpt-oss-120b",
                    [36, 2880, 2880],
                    [64, 8, 64],
                    [201_088, 131_072],
                ),
                128,
                4,
                2880,
            ),
            0,
            0,
            [Dtype::Bf16, Dtype::Mxfp4],
        ),
        Attention::Windowed {
            tokens: 128,
            layers: 18,
        },
    ),
    deepseek_v3(
        "deepseek-v3",
        "deepseek-ai/DeepSeek-V3",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        0,
    ),
    deepseek_v3(
        "deepseek-v3.1",
        "deepseek-ai/DeepSeek-V3.1",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        0,
    ),
    deepseek_v3(
        "deepseek-r1",
        "deepseek-ai/DeepSeek-R1",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        0,
    ),
    deepseek_v3(
        "deepseek-r1-0528",
        "deepseek-ai/DeepSeek-R1-0528",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        0,
    ),
    deepseek_v3(
        "deepseek-v3.2",
        "deepseek-ai/DeepSeek-V3.2",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        2048,
    ),
    deepseek_v3(
        "kimi-k2",
        "moonshotai/Kimi-K2-Instruct",
        64,
        [384, 1],
        [163_840, 131_072],
        FP8,
        0,
    ),
    deepseek_v3(
        "kimi-k2.5",
        "moonshotai/Kimi-K2.5",
        64,
        [384, 1],
        [163_840, 262_144],
        [Dtype::Bf16, Dtype::Int4],
        0,
    ),
    normed(sharing(
        with_experts(
            llama(
                "glm-4.5",
                "zai-org/GLM-4.5",
                [92, 5120, 12_288],
                [96, 8, 128],
                [151_552, 131_072],
            ),
            160,
            8,
            1536,
        ),
        1536,
        3,
        BF16,
    )),
    normed(sharing(
        with_experts(
            llama(
                "glm-4.6",
                "zai-org/GLM-4.6",
                [92, 5120, 12_288],
                [96, 8, 128],
                [151_552, 202_752],
            ),
            160,
            8,
            1536,
        ),
        1536,
        3,
        BF16,
    )),
    sharing(
        with_experts(
            llama(
                "glm-4.5-air",
                "zai-org/GLM-4.5-Air",
                [46, 4096, 10_944],
                [96, 8, 128],
                [151_552, 131_072],
            ),
            128,
            8,
            1408,
        ),
        1408,
        1,
        BF16,
    ),
    normed(sharing(
        with_experts(
            llama(
                "minimax-m2",
                "MiniMaxAI/MiniMax-M2",
                [62, 3072, 1536],
                [48, 8, 128],
                [200_064, 196_608],
            ),
            256,
            8,
            1536,
        ),
        0,
        0,
        FP8,
    )),
    normed(sharing(
        with_experts(
            llama(
                "minimax-m2.5",
                "MiniMaxAI/MiniMax-M2.5",
                [62, 3072, 1536],
                [48, 8, 128],
                [200_064, 196_608],
            ),
            256,
            8,
            1536,
        ),
        0,
        0,
        FP8,
    )),
    normed(with_experts(
        llama(
            "qwen3-coder-480b-a35b",
            "Qwen/Qwen3-Coder-480B-A35B-Instruct",
            [62, 6144, 8192],
            [96, 8, 128],
            [151_936, 262_144],
        ),
        160,
        8,
        2560,
    )),
    attending(
        sharing(
            with_experts(
                normed(llama(
                    "qwen3-next-80b-a3b",
                    "Qwen/Qwen3-Next-80B-A3B-Instruct",
                    [48, 2048, 5120],
                    [16, 2, 256],
                    [151_936, 262_144],
                )),
                512,
                10,
                512,
            ),
            512,
            0,
            BF16,
        ),
        Attention::Linear {
            layers: 36,
            key_heads: 16,
            value_heads: 32,
            head_dim: 128,
        },
    ),
    attending(
        sharing(
            with_experts(
                normed(llama(
                    "qwen3.5-397b-a17b",
                    "Qwen/Qwen3.5-397B-A17B",
                    [60, 4096, 1024],
                    [32, 2, 256],
                    [248_320, 262_144],
                )),
                512,
                10,
                1024,
            ),
            1024,
            0,
            BF16,
        ),
        Attention::Linear {
            layers: 45,
            key_heads: 16,
            value_heads: 64,
            head_dim: 128,
        },
    ),
    attending(
        normed(tied(llama(
            "gemma-3-4b",
            "google/gemma-3-4b-it",
            [34, 2560, 10_240],
            [8, 4, 256],
            [262_208, 131_072],
        ))),
        Attention::Windowed {
            tokens: 1024,
            layers: 29,
        },
    ),
    attending(
        normed(tied(llama(
            "gemma-3-12b",
            "google/gemma-3-12b-it",
            [48, 3840, 15_360],
            [16, 8, 256],
            [262_208, 131_072],
        ))),
        Attention::Windowed {
            tokens: 1024,
            layers: 40,
        },
    ),
    attending(
        normed(tied(llama(
            "gemma-3-27b",
            "google/gemma-3-27b-it",
            [62, 5376, 21_504],
            [32, 16, 128],
            [262_208, 131_072],
        ))),
        Attention::Windowed {
            tokens: 1024,
            layers: 52,
        },
    ),
    llama(
        "mistral-nemo-12b",
        "mistralai/Mistral-Nemo-Instruct-2407",
        [40, 5120, 14_336],
        [32, 8, 128],
        [131_072, 131_072],
    ),
    llama(
        "mistral-small-3.2-24b",
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
        [40, 5120, 32_768],
        [32, 8, 128],
        [131_072, 131_072],
    ),
    llama(
        "mistral-large-2",
        "mistralai/Mistral-Large-Instruct-2407",
        [88, 12_288, 28_672],
        [96, 8, 128],
        [32_768, 131_072],
    ),
    llama(
        "phi-4",
        "microsoft/phi-4",
        [40, 5120, 17_920],
        [40, 10, 128],
        [100_352, 16_384],
    ),
    attending(
        sharing(
            with_experts(
                llama(
                    "glm-5",
                    "zai-org/GLM-5",
                    [78, 6144, 12_288],
                    [64, 64, 256],
                    [154_880, 202_752],
                ),
                256,
                8,
                2048,
            ),
            2048,
            3,
            BF16,
        ),
        Attention::Latent {
            query_rank: 2048,
            kv_rank: 512,
            rope_dim: 64,
            nope_dim: 192,
            value_dim: 256,
            sparse_tokens: 2048,
        },
    ),
];

/// The model with this name: a preset's name, or the id of its Hugging Face repository in any case.
pub fn model(name: &str) -> Option<&'static ModelShape> {
    MODELS
        .iter()
        .find(|model| model.name == name || model.source.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes in billions from the models' cards; 1 % covers norms, biases and rounding.
    #[test]
    fn parameter_counts_match_the_model_cards() {
        let cards = [
            ("llama-3.2-1b", 1.24),
            ("llama-3.2-3b", 3.21),
            ("llama-3.1-8b", 8.03),
            ("llama-3.1-70b", 70.55),
            ("llama-3.1-405b", 405.85),
            ("llama-2-7b", 6.74),
            ("llama-2-70b", 68.98),
            ("codellama-34b", 33.74),
            ("mistral-7b", 7.25),
            ("mixtral-8x7b", 46.70),
            ("mixtral-8x22b", 140.62),
            ("qwen2.5-7b", 7.62),
            ("qwen2.5-32b", 32.76),
            ("qwen2.5-72b", 72.71),
            ("qwen3-0.6b", 0.596),
            ("qwen3-1.7b", 1.72),
            ("qwen3-4b", 4.02),
            ("qwen3-8b", 8.19),
            ("qwen3-14b", 14.77),
            ("qwen3-32b", 32.76),
            ("qwen3-30b-a3b", 30.53),
            ("qwen3-235b-a22b", 235.09),
            ("llama-3.3-70b", 70.55),
            ("llama-4-scout", 107.77),
            ("llama-4-maverick", 400.7),
            ("gpt-oss-20b", 20.9),
            ("gpt-oss-120b", 116.8),
            ("deepseek-v3", 671.0),
            ("deepseek-v3.1", 671.0),
            ("deepseek-r1", 671.0),
            ("deepseek-r1-0528", 671.0),
            ("deepseek-v3.2", 671.0),
            ("kimi-k2", 1026.0),
            ("kimi-k2.5", 1026.0),
            ("glm-4.5", 352.8),
            ("glm-4.6", 352.8),
            ("glm-4.5-air", 106.9),
            ("minimax-m2", 228.7),
            ("minimax-m2.5", 228.7),
            ("qwen3-coder-480b-a35b", 480.0),
            ("qwen3-next-80b-a3b", 79.7),
            ("qwen3.5-397b-a17b", 397.0),
            ("gemma-3-4b", 3.88),
            ("gemma-3-12b", 11.77),
            ("gemma-3-27b", 27.0),
            ("mistral-nemo-12b", 12.25),
            ("mistral-small-3.2-24b", 23.57),
            ("mistral-large-2", 122.6),
            ("phi-4", 14.66),
            ("glm-5", 744.0),
        ];
        assert_eq!(cards.len(), MODELS.len(), "a preset without a card");
        for (name, billions) in cards {
            let params = model(name).expect(name).params() as f64 / 1e9;
            assert!(
                (params / billions - 1.0).abs() < 0.01,
                "{name}: {params} against {billions}"
            );
        }
        let active = model("qwen3-30b-a3b").unwrap().active_params() as f64 / 1e9;
        assert!((active - 3.0).abs() < 0.1, "A3B: {active}");
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

    #[test]
    fn kv_bytes_split_over_heads_and_then_repeat() {
        let shape = model("llama-3.1-8b").unwrap();
        assert_eq!(shape.kv_bytes_per_token_per_gpu(1, Dtype::Bf16), 131_072);
        assert_eq!(shape.kv_bytes_per_token_per_gpu(8, Dtype::Bf16), 16_384);
        assert_eq!(shape.kv_bytes_per_token_per_gpu(16, Dtype::Bf16), 16_384);
        assert_eq!(shape.kv_bytes_per_token_per_gpu(1, Dtype::Fp8), 65_536);
        assert!(shape.divides_into(16) && shape.divides_into(32));
        assert!(!shape.divides_into(3) && !shape.divides_into(64) && !shape.divides_into(0));
        // 28 heads, 4 key-value heads and a width of 18,944: 28 divides the heads, not the MLP.
        assert!(!model("qwen2.5-7b").unwrap().divides_into(28));
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
