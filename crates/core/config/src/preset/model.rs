//! Shapes of models, and the presets.

use std::borrow::Cow;

use slipstream_base::width::floor_u64;

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
        /// The index of sparse attention (DeepSeek-V3.2, GLM-5); `None`: every token is attended to.
        index: Option<SparseIndex>,
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

/// The index that chooses the tokens which sparse attention reads. It has keys of its own in the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseIndex {
    /// Tokens of the context that are attended to (`index_topk`).
    pub tokens: u32,
    /// Layers with an index; the others attend to the tokens that a layer before them chose.
    pub layers: u32,
    /// `index_n_heads`.
    pub heads: u32,
    /// `index_head_dim`.
    pub head_dim: u32,
}

impl SparseIndex {
    /// Bytes of the keys of one token in one layer, on every GPU: FP8, with a scale of 32 bits per 128 numbers, whatever
    /// the format of the KV cache.
    ///
    /// Source: vLLM 0.33, `Indexer.__init__` in `vllm/model_executor/models/deepseek_v2.py` (`k_cache`).
    pub fn key_bytes(&self) -> u64 {
        u64::from(self.head_dim) + u64::from(self.head_dim / 128) * 4
    }
}

impl Attention {
    /// Bytes of one token's compressed vector in one layer of latent attention.
    ///
    /// Sparse attention in FP8 keeps a scale of 32 bits per 128 numbers and its rotary part in 16 bits: 656 bytes for 512
    /// and 64 numbers. Source: vLLM 0.33, `fp8_ds_mla` in `vllm/model_executor/layers/attention/mla_attention.py`.
    pub fn latent_bytes(&self, dtype: Dtype) -> Option<f64> {
        let Attention::Latent {
            kv_rank,
            rope_dim,
            index,
            ..
        } = *self
        else {
            return None;
        };
        let [rank, rope] = [kv_rank, rope_dim].map(f64::from);
        Some(if index.is_some() && dtype == Dtype::Fp8 {
            rank + f64::from(kv_rank / 128) * 4.0 + rope * 2.0
        } else {
            (rank + rope) * dtype.bytes()
        })
    }

    /// The index of sparse attention.
    pub fn index(&self) -> Option<SparseIndex> {
        match self {
            Attention::Latent { index, .. } => *index,
            _ => None,
        }
    }
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
    /// Format of dense MLPs and shared experts next to routed experts, if the checkpoint's files say that and the format of
    /// attention (`weights`); `None`: both as is usual for the format of the experts.
    pub mlps: Option<Dtype>,
    /// Weights that share a scale of 16 bits where the format is INT4; 0: a scale per channel.
    pub int4_group: u32,
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

    /// Bytes of one weight in `dtype`, with its share of the scales.
    pub fn bytes_of(&self, dtype: Dtype) -> f64 {
        match (dtype, self.int4_group) {
            (Dtype::Int4, 0) => 0.5,
            (Dtype::Int4, group) => 0.5 + 2.0 / f64::from(group),
            _ => dtype.bytes(),
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
                index,
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
                // Queries from their compressed vector; one key, and a weight per head.
                let of_index = index.map_or(0, |index| {
                    let [layers, heads, width] =
                        [index.layers, index.heads, index.head_dim].map(u64::from);
                    layers * (query_rank * heads * width + hidden * (width + heads))
                });
                all * layer + of_index
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

    /// Weights used per token, with both embeddings, as model cards count them.
    pub fn active_params(&self) -> u64 {
        let embeddings = if self.tied_embeddings { 1 } else { 2 };
        let routed = self.experts.map_or(0, |e| {
            u64::from(self.expert_layers()) * u64::from(e.per_token) * self.mlp_params()
        });
        self.attention_params_total()
            + u64::from(self.expert_layers()) * self.router_params()
            + self.dense_mlp_params()
            + routed
            + embeddings * self.embedding_params()
    }

    /// Bytes of weights per GPU of `tensor_parallel`. Attention and dense MLPs are in `dtype`,
    /// experts in the checkpoint's format or in `dtype`, whichever is smaller. Checkpoints of fewer
    /// bits keep the embeddings in 16.
    pub fn weight_bytes_per_gpu(&self, tensor_parallel: u32, dtype: Dtype) -> u64 {
        let embeddings = self.embedding_params() * if self.tied_embeddings { 1 } else { 2 };
        let experts = self.expert_params();
        let of_experts = self.experts.map_or(self.bytes_of(dtype), |e| {
            self.bytes_of(e.weights).min(self.bytes_of(dtype))
        });
        let bytes = (self.params() - embeddings - experts) as f64 * self.bytes_of(dtype)
            + experts as f64 * of_experts
            + embeddings as f64 * Dtype::Bf16.bytes();
        floor_u64(bytes).div_ceil(u64::from(tensor_parallel.max(1)))
    }

    /// Bytes of KV cache per token and GPU of `tensor_parallel`. With more GPUs than key-value
    /// heads, heads are repeated; the vector of latent attention and the keys of its index are on every GPU. Layers with a
    /// window or a linear state are not counted if other layers have full attention. Without any
    /// full layer, all are counted as full: exact for contexts up to the window, too much beyond
    /// it. A token always takes memory.
    pub fn kv_bytes_per_token_per_gpu(&self, tensor_parallel: u32, dtype: Dtype) -> u64 {
        let layer = self.attention.latent_bytes(dtype).unwrap_or_else(|| {
            let heads = self.kv_heads.div_ceil(tensor_parallel.max(1));
            2.0 * f64::from(heads) * f64::from(self.head_dim) * dtype.bytes()
        });
        let of_index = self
            .attention
            .index()
            .map_or(0, |index| u64::from(index.layers) * index.key_bytes());
        let layers = match self.full_attention_layers() {
            0 => self.layers,
            full => full,
        };
        floor_u64((f64::from(layers) * layer).ceil()) + of_index
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
        mlps: None,
        int4_group: 64,
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
const fn latent(index: Option<SparseIndex>) -> Attention {
    Attention::Latent {
        query_rank: 1536,
        kv_rank: 512,
        rope_dim: 64,
        nope_dim: 128,
        value_dim: 128,
        index,
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
    index: Option<SparseIndex>,
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
    attending(shape, latent(index))
}

const fn grouped(shape: ModelShape, int4_group: u32) -> ModelShape {
    let mut shape = shape;
    shape.int4_group = int4_group;
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
        None,
    ),
    deepseek_v3(
        "deepseek-v3.1",
        "deepseek-ai/DeepSeek-V3.1",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        None,
    ),
    deepseek_v3(
        "deepseek-r1",
        "deepseek-ai/DeepSeek-R1",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        None,
    ),
    deepseek_v3(
        "deepseek-r1-0528",
        "deepseek-ai/DeepSeek-R1-0528",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        None,
    ),
    deepseek_v3(
        "deepseek-v3.2",
        "deepseek-ai/DeepSeek-V3.2",
        128,
        [256, 3],
        [129_280, 163_840],
        FP8,
        Some(SparseIndex {
            tokens: 2048,
            layers: 61,
            heads: 64,
            head_dim: 128,
        }),
    ),
    deepseek_v3(
        "kimi-k2",
        "moonshotai/Kimi-K2-Instruct",
        64,
        [384, 1],
        [163_840, 131_072],
        FP8,
        None,
    ),
    grouped(
        deepseek_v3(
            "kimi-k2.5",
            "moonshotai/Kimi-K2.5",
            64,
            [384, 1],
            [163_840, 262_144],
            [Dtype::Bf16, Dtype::Int4],
            None,
        ),
        32,
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
            index: Some(SparseIndex {
                tokens: 2048,
                layers: 78,
                heads: 32,
                head_dim: 128,
            }),
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
        assert!((active - 3.3).abs() < 0.1, "A3B: {active}");
    }

    /// `fp8_ds_mla` has 656 bytes per token and layer, an index 132 (vLLM 0.33), on every GPU.
    #[test]
    fn an_index_has_keys_in_the_kv_cache() {
        for (name, dtype, layers, bytes) in [
            ("deepseek-v3", Dtype::Bf16, 61, 1_152),
            ("deepseek-v3", Dtype::Fp8, 61, 576),
            ("deepseek-v3.2", Dtype::Bf16, 61, 1_152 + 132),
            ("deepseek-v3.2", Dtype::Fp8, 61, 656 + 132),
            ("glm-5", Dtype::Bf16, 78, 1_152 + 132),
        ] {
            let shape = model(name).unwrap();
            for gpus in [1, 8] {
                let found = shape.kv_bytes_per_token_per_gpu(gpus, dtype);
                assert_eq!(found, layers * bytes, "{name} {dtype:?}");
            }
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
}
