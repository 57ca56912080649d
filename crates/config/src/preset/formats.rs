//! Number formats of the parts of a model.

use super::model::{Attention, ModelShape};
use crate::cluster::Dtype;

/// Formats of the weights and of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    /// Attention projections.
    pub attention: Dtype,
    /// Dense MLPs and shared experts.
    pub mlp: Dtype,
    /// Routed experts.
    pub experts: Dtype,
    /// Keys and values.
    pub kv_cache: Dtype,
}

impl Formats {
    /// Formats of a checkpoint of `shape` in `precision`.
    ///
    /// `int4` mixtures quantize only routed experts (Kimi-K2.5's compressed-tensors). NVFP4
    /// checkpoints with latent attention keep its projections in 16 bits
    /// (nvidia/DeepSeek-R1-NVFP4). A checkpoint with 4-bit experts keeps them in every precision
    /// (gpt-oss). Mixtures in FP8 or less are assumed to have an FP8 KV cache.
    pub fn of(shape: &ModelShape, precision: Dtype) -> Formats {
        let latent = matches!(shape.attention, Attention::Latent { .. });
        let packed = shape
            .experts
            .map(|e| e.weights)
            .filter(|w| *w == Dtype::Mxfp4);
        let kv_cache = match precision {
            Dtype::Bf16 => Dtype::Bf16,
            _ if packed.is_some() => Dtype::Bf16,
            _ => Dtype::Fp8,
        };
        if let Some(experts) = packed {
            return Formats {
                attention: Dtype::Bf16,
                mlp: Dtype::Bf16,
                experts,
                kv_cache,
            };
        }
        let (attention, mlp) = match precision {
            Dtype::Int4 if shape.experts.is_some() => (Dtype::Bf16, Dtype::Bf16),
            Dtype::Nvfp4 | Dtype::Mxfp4 if latent => (Dtype::Bf16, precision),
            _ => (precision, precision),
        };
        Formats {
            attention,
            mlp,
            experts: precision,
            kv_cache,
        }
    }

    /// All matrices in `precision`, except experts whose checkpoint has fewer bits, and embeddings.
    pub fn uniform(shape: &ModelShape, precision: Dtype) -> Formats {
        let packed = shape
            .experts
            .map(|e| e.weights)
            .filter(|weights| weights.bytes() < precision.bytes());
        Formats {
            attention: precision,
            mlp: precision,
            experts: packed.unwrap_or(precision),
            kv_cache: shape.kv_cache,
        }
    }

    /// Bytes of weights per GPU. Attention and dense MLPs of `shape` are split over
    /// `tensor_parallel` GPUs, experts over `experts`. Embeddings and routers stay in 16 bits.
    pub fn weight_bytes(&self, shape: &ModelShape, tensor_parallel: u32, experts: u32) -> f64 {
        let embeddings = if shape.tied_embeddings { 1.0 } else { 2.0 };
        let routers = shape.router_params() as f64 * f64::from(shape.expert_layers());
        let dense = shape.attention_params_total() as f64 * self.attention.bytes()
            + shape.dense_mlp_params() as f64 * self.mlp.bytes()
            + embeddings * shape.embedding_params() as f64 * 2.0
            + routers * 2.0;
        dense / f64::from(tensor_parallel.max(1))
            + shape.expert_params() as f64 * self.experts.bytes() / f64::from(experts.max(1))
    }
}
