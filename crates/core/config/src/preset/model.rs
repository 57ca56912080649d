//! Shapes of models: sizes of layers, and the weights and bytes of cache that follow from them.

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

#[cfg(test)]
mod tests {
    use super::super::models::model;
    use super::*;

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
