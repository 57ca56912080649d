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
        // The files of the checkpoint decide, where they were read.
        let stated = shape.mlps.filter(|_| precision == shape.dtype());
        let (attention, mlp) = stated.map_or((attention, mlp), |mlps| (shape.weights, mlps));
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
        let dense = shape.attention_params_total() as f64 * shape.bytes_of(self.attention)
            + shape.dense_mlp_params() as f64 * shape.bytes_of(self.mlp)
            + embeddings * shape.embedding_params() as f64 * 2.0
            + routers * 2.0;
        dense / f64::from(tensor_parallel.max(1))
            + shape.expert_params() as f64 * shape.bytes_of(self.experts)
                / f64::from(experts.max(1))
    }

    /// Describes `shape` as it was read, in a line for people, with the sizes of one GPU that holds all of it:
    /// `qwen3-30b-a3b: 48 layers, 30.5B parameters, 3.35B active, fp8, 31.2 GB, 96 KiB of KV cache per token`.
    pub fn line(&self, name: &str, shape: &ModelShape) -> String {
        let billions = |params: u64| short(params as f64, ["B", "M"]);
        let active = match shape.experts {
            None => String::new(),
            Some(_) => format!(" {} active,", billions(shape.active_params())),
        };
        let kib = shape.kv_bytes_per_token_per_gpu(1, self.kv_cache) as f64 / 1024.0;
        let kib = if kib.fract() == 0.0 {
            format!("{kib}")
        } else {
            format!("{kib:.1}")
        };
        format!(
            "{}: {} layers, {} parameters,{active} {}, {}, {kib} KiB of KV cache per token",
            name.chars().filter(|c| !c.is_control()).collect::<String>(),
            shape.layers,
            billions(shape.params()),
            self.name(shape),
            short(self.weight_bytes(shape, 1, 1), [" GB", " MB"]),
        )
    }

    /// The formats of the weights: that of the experts, and of the rest if it differs.
    fn name(self, shape: &ModelShape) -> String {
        match shape.experts {
            None if self.mlp == self.attention => self.mlp.name().to_owned(),
            None => format!("{} ({} attention)", self.mlp.name(), self.attention.name()),
            Some(_) if self.experts == self.attention => {
                let mlps = self.mlp != self.experts && shape.dense_mlp_params() > 0;
                let rest = format!(" experts and attention ({} MLPs)", self.mlp.name());
                self.experts.name().to_owned() + if mlps { &rest } else { "" }
            }
            Some(_) => format!(
                "{} experts ({} attention)",
                self.experts.name(),
                self.attention.name()
            ),
        }
    }
}

/// A number in units of 10⁹, or of 10⁶ if it is small: with one decimal, or with three significant digits below 10.
fn short(number: f64, [giga, mega]: [&str; 2]) -> String {
    let (number, unit) = if number < 1e7 {
        (number / 1e6, mega)
    } else {
        (number / 1e9, giga)
    };
    let (mut decimals, mut next) = (1, 10.0);
    while number < next && decimals < 6 {
        decimals += 1;
        next /= 10.0;
    }
    format!("{number:.decimals$}{unit}")
}

#[cfg(test)]
mod tests {
    use super::super::models::model;
    use super::*;

    #[test]
    fn a_line_says_what_was_read() {
        for (name, precision, expected) in [
            (
                "qwen3-30b-a3b",
                Dtype::Fp8,
                "m: 48 layers, 30.5B parameters, 3.35B active, fp8, 31.2 GB, 48 KiB of KV cache per token",
            ),
            (
                "llama-3.1-8b",
                Dtype::Bf16,
                "m: 32 layers, 8.03B parameters, bf16, 16.1 GB, 128 KiB of KV cache per token",
            ),
            (
                "kimi-k2.5",
                Dtype::Int4,
                "m: 61 layers, 1026.4B parameters, 32.9B active, int4 experts (bf16 attention), 594.2 GB, \
                 34.3 KiB of KV cache per token",
            ),
        ] {
            let shape = model(name).expect("a preset");
            assert_eq!(Formats::of(shape, precision).line("m", shape), expected);
        }
        for (number, expected) in [
            (594.21e9, "594.2B"),
            (10e9, "10.0B"),
            (8.03e9, "8.03B"),
            (0.268_098e9, "0.268B"),
            (0.0536e9, "0.0536B"),
            (86_528.0, "0.0865M"),
        ] {
            assert_eq!(short(number, ["B", "M"]), expected);
        }
    }
}
