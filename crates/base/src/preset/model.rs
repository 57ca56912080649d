//! Shapes of models: what their public `config.json` says.

use std::borrow::Cow;

use serde_json::{Map, Value};
use thiserror::Error;

use crate::cluster::Dtype;

/// A mixture of experts in place of each layer's MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Experts in a layer.
    pub count: u32,
    /// Experts that a token is sent to.
    pub per_token: u32,
    /// Width of one expert.
    pub intermediate_size: u32,
}

/// Shape of a decoder-only transformer with (grouped-query) attention over the whole context and a
/// gated MLP or a mixture of such experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Name in a cluster file.
    pub name: Cow<'static, str>,
    /// Repository whose `config.json` this is.
    pub source: Cow<'static, str>,
    /// `num_hidden_layers`.
    pub layers: u32,
    /// `hidden_size`.
    pub hidden_size: u32,
    /// `intermediate_size` of the dense MLP; unused where there are experts.
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
    /// `tie_word_embeddings`: input and output embedding are one matrix.
    pub tied_embeddings: bool,
    /// Query and key are normalized per head (Qwen3).
    pub qk_norm: bool,
    /// The mixture of experts, if it is one.
    pub experts: Option<Experts>,
}

impl ModelShape {
    /// Weights of the attention projections of one layer.
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

    /// All weights. Norms and biases are left out: below 0.1 % in every preset.
    pub fn params(&self) -> u64 {
        let mlps = self.experts.map_or(1, |e| u64::from(e.count));
        let layer = self.attention_params() + self.router_params() + mlps * self.mlp_params();
        let embeddings = if self.tied_embeddings { 1 } else { 2 };
        u64::from(self.layers) * layer + embeddings * self.embedding_params()
    }

    /// Weights that one token passes through (without the input embedding, which is looked up).
    pub fn active_params(&self) -> u64 {
        let mlps = self.experts.map_or(1, |e| u64::from(e.per_token));
        let layer = self.attention_params() + self.router_params() + mlps * self.mlp_params();
        u64::from(self.layers) * layer + self.embedding_params()
    }

    /// Bytes of weights on each of `tensor_parallel` GPUs. FP8 checkpoints keep the embeddings in
    /// 16 bits.
    pub fn weight_bytes_per_gpu(&self, tensor_parallel: u32, dtype: Dtype) -> u64 {
        let embeddings = self.embedding_params() * if self.tied_embeddings { 1 } else { 2 };
        let bytes = (self.params() - embeddings) * dtype.bytes() + embeddings * Dtype::Bf16.bytes();
        bytes.div_ceil(u64::from(tensor_parallel.max(1)))
    }

    /// Bytes that one token of KV cache takes on each of `tensor_parallel` GPUs. With more GPUs
    /// than key-value heads, heads are repeated.
    pub fn kv_bytes_per_token_per_gpu(&self, tensor_parallel: u32, dtype: Dtype) -> u64 {
        let heads = self.kv_heads.div_ceil(tensor_parallel.max(1));
        2 * u64::from(self.layers) * u64::from(heads) * u64::from(self.head_dim) * dtype.bytes()
    }

    /// Whether `tensor_parallel` GPUs can share the model.
    ///
    /// Source: vLLM, `ModelConfig.verify_with_parallel_config` (heads), `LlamaAttention.__init__`
    /// (key-value heads are split or repeated evenly) and `divide` in `distributed/utils.py` (MLP).
    pub fn divides_into(&self, tensor_parallel: u32) -> bool {
        let tp = tensor_parallel;
        tp > 0
            && self.attention_heads.is_multiple_of(tp)
            && (self.kv_heads.is_multiple_of(tp) || tp.is_multiple_of(self.kv_heads))
            && self.mlp_width().is_multiple_of(tp)
    }

    /// Reads a Hugging Face style `config.json`; `name` is what the model will be called.
    ///
    /// # Errors
    /// If it is no JSON object, a size is missing or unusable, or the architecture has a kind of
    /// attention that this shape cannot express. The message names the field.
    pub fn from_config_json(name: &str, json: &[u8]) -> Result<ModelShape, ShapeError> {
        let value: Value = serde_json::from_slice(json)?;
        let outer = value.as_object().ok_or(ShapeError::NoObject)?;
        // Models that see pictures keep the language model's part apart.
        let config = match outer.get("text_config") {
            Some(inner) => inner.as_object().ok_or(ShapeError::NoObject)?,
            None => outer,
        };
        refuse_other_attention(config)?;
        let hidden_size = number(config, "hidden_size")?;
        let attention_heads = number(config, "num_attention_heads")?;
        let kv_heads = optional(config, "num_key_value_heads")?.unwrap_or(attention_heads);
        if kv_heads > attention_heads {
            return Err(ShapeError::Range {
                field: "num_key_value_heads",
                found: kv_heads.to_string(),
                must: "at most num_attention_heads",
            });
        }
        let model_type = config
            .get("model_type")
            .and_then(Value::as_str)
            .unwrap_or("");
        let count = match optional(config, "num_local_experts")? {
            Some(count) => Some(count),
            None => optional(config, "num_experts")?,
        };
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
                Some(Experts {
                    count,
                    per_token,
                    intermediate_size: match optional(config, "moe_intermediate_size")? {
                        Some(width) => width,
                        None => number(config, "intermediate_size")?,
                    },
                })
            }
        };
        Ok(ModelShape {
            name: name.to_owned().into(),
            source: "config.json".into(),
            layers: number(config, "num_hidden_layers")?,
            hidden_size,
            intermediate_size: match (optional(config, "intermediate_size")?, experts) {
                (Some(width), _) => width,
                (None, Some(experts)) => experts.intermediate_size,
                (None, None) => number(config, "intermediate_size")?,
            },
            attention_heads,
            kv_heads,
            head_dim: optional(config, "head_dim")?
                .unwrap_or((hidden_size / attention_heads).max(1)),
            vocab_size: number(config, "vocab_size")?,
            max_positions: number(config, "max_position_embeddings")?,
            tied_embeddings: config
                .get("tie_word_embeddings")
                .or_else(|| outer.get("tie_word_embeddings"))
                .and_then(Value::as_bool)
                .unwrap_or(false),
            qk_norm: model_type.starts_with("qwen3"),
            experts,
        })
    }
}

/// Why a `config.json` was refused. Mend the file, or choose a preset.
#[derive(Debug, Error)]
pub enum ShapeError {
    /// Not JSON.
    #[error("not JSON")]
    Json(#[from] serde_json::Error),
    /// JSON, but no object.
    #[error("not a JSON object")]
    NoObject,
    /// A field is missing.
    #[error("`{0}` is missing")]
    Missing(&'static str),
    /// A field is unusable.
    #[error("`{field}` is {found}, but must be {must}")]
    Range {
        /// The field.
        field: &'static str,
        /// What stands there.
        found: String,
        /// What should.
        must: &'static str,
    },
    /// A kind of attention or MLP that [`ModelShape`] cannot express.
    #[error("`{field}`: {what} is not modelled")]
    Unsupported {
        /// The field that says so.
        field: &'static str,
        /// What it is.
        what: &'static str,
    },
}

fn refuse_other_attention(config: &Map<String, Value>) -> Result<(), ShapeError> {
    let set = |field: &str| {
        config
            .get(field)
            .is_some_and(|v| !v.is_null() && v.as_u64() != Some(0))
    };
    let unsupported = |field, what| Err(ShapeError::Unsupported { field, what });
    if set("kv_lora_rank") {
        return unsupported("kv_lora_rank", "multi-head latent attention");
    }
    if set("n_shared_experts") {
        return unsupported("n_shared_experts", "a mixture with shared experts");
    }
    if set("shared_expert_intermediate_size") {
        return unsupported(
            "shared_expert_intermediate_size",
            "a mixture with shared experts",
        );
    }
    let others = |v: &Value| {
        v.as_array()
            .is_some_and(|a| a.iter().any(|k| k != "full_attention"))
    };
    if config.get("layer_types").is_some_and(others) {
        return unsupported("layer_types", "a mix of attention kinds");
    }
    // Qwen2 writes a window and switches it off.
    let window_off = config.get("use_sliding_window").and_then(Value::as_bool) == Some(false);
    if set("sliding_window") && !window_off {
        return unsupported("sliding_window", "attention over a window");
    }
    Ok(())
}

fn number(config: &Map<String, Value>, field: &'static str) -> Result<u32, ShapeError> {
    optional(config, field)?.ok_or(ShapeError::Missing(field))
}

fn optional(config: &Map<String, Value>, field: &'static str) -> Result<Option<u32>, ShapeError> {
    // Far above any model, and low enough that products of three stay below 2^64.
    const MAX: u64 = 1 << 21;
    match config.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(n) if (1..=MAX).contains(&n) => Ok(Some(n as u32)),
            Some(n) if field == "max_position_embeddings" && u32::try_from(n).is_ok() && n > 0 => {
                Ok(Some(n as u32))
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
        experts: None,
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
    // Not `..shape`: a const fn cannot drop what that leaves over.
    let mut shape = shape;
    shape.experts = Some(Experts {
        count,
        per_token,
        intermediate_size: width,
    });
    shape
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
];

/// The model named `name`.
pub fn model(name: &str) -> Option<&'static ModelShape> {
    MODELS.iter().find(|model| model.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes in billions as the models' cards print them; 1 % covers norms, biases and rounding.
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
    fn kv_bytes_split_over_heads_and_then_repeat() {
        let shape = model("llama-3.1-8b").unwrap();
        assert_eq!(shape.kv_bytes_per_token_per_gpu(1, Dtype::Bf16), 131_072);
        assert_eq!(shape.kv_bytes_per_token_per_gpu(8, Dtype::Bf16), 16_384);
        assert_eq!(shape.kv_bytes_per_token_per_gpu(16, Dtype::Bf16), 16_384);
        assert_eq!(shape.kv_bytes_per_token_per_gpu(1, Dtype::Fp8), 65_536);
        assert!(shape.divides_into(16) && shape.divides_into(32));
        assert!(!shape.divides_into(3) && !shape.divides_into(64) && !shape.divides_into(0));
        // 28 heads, 4 key-value heads and 18,944 of width: 28 would split the heads, not the MLP.
        assert!(!model("qwen2.5-7b").unwrap().divides_into(28));
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
                "at most num_attention_heads",
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
                "latent attention",
            ),
            (format!("{{{good}, \"sliding_window\": 4096}}"), "window"),
            (
                format!("{{{good}, \"layer_types\": [\"linear_attention\"]}}"),
                "layer_types",
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
