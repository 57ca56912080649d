//! The memory of GPUs: what weights and KV cache take, and what is left.

use slipstream_config::preset::{Gpu, ModelShape};

use crate::deployment::{Deployment, Formats, Framework, Parallel, Refusal};

/// Share of the GPU's memory that frameworks use, and what of it is neither weights nor cache.
/// Sources: vLLM's default `gpu_memory_utilization` up to 0.18 was 0.9, of the whole memory; TensorRT-LLM's
/// `free_gpu_memory_fraction` is 0.9, of the memory that is free once weights and activations have their place. The
/// reserve is what vLLM's memory profile reports for activations and CUDA graphs on 80 GB GPUs, 2 to 6 GB.
const MEMORY_SHARE: f64 = 0.9;
const RESERVE_BYTES: f64 = 4e9;

/// Bytes of weights on each GPU.
pub(crate) fn weight_bytes(shape: &ModelShape, formats: Formats, parallel: Parallel) -> f64 {
    let experts = parallel.expert_tensor * parallel.expert;
    formats.weight_bytes(shape, parallel.tensor, experts) / f64::from(parallel.pipeline)
}

/// Bytes per token of KV cache on each GPU.
pub(crate) fn token_bytes(shape: &ModelShape, formats: Formats, parallel: Parallel) -> f64 {
    shape.kv_bytes_per_token_per_gpu(parallel.tensor, formats.kv_cache) as f64
        / f64::from(parallel.pipeline)
}

/// Refuses weights that are larger than a GPU's whole memory, and those that leave no room for the
/// KV cache of one request of `tokens`.
///
/// The limit is the whole memory, not [`MEMORY_SHARE`] of it: formats of a checkpoint's parts are
/// assumed, and a deployment that was measured must not be refused by an estimate slightly too large.
pub(crate) fn check_memory(
    shape: &ModelShape,
    gpu: &Gpu,
    formats: Formats,
    parallel: Parallel,
    tokens: u64,
    column: &str,
) -> Result<(), Refusal> {
    const GIB: f64 = (1_u64 << 30) as f64;
    let memory = gpu.memory_bytes as f64;
    let needed = |parallel| {
        let weights = weight_bytes(shape, formats, parallel);
        (
            weights,
            token_bytes(shape, formats, parallel) * tokens as f64,
        )
    };
    let (weights, cache) = needed(parallel);
    if weights + cache <= memory {
        return Ok(());
    }
    let enough = (1..=10)
        .map(|power| parallel.tensor << power)
        .find(|&tensor| {
            let more = tensor / parallel.tensor;
            let (weights, cache) = needed(Parallel {
                tensor,
                expert_tensor: parallel.expert_tensor * more,
                ..parallel
            });
            shape.attention_heads.is_multiple_of(tensor) && weights + cache <= memory
        });
    let mend = enough.map_or("use more GPUs".to_owned(), |tp| {
        format!("use {column} >= {tp}")
    });
    let cached = if weights > memory {
        String::new()
    } else {
        format!(", the KV cache of one request {:.1} GiB,", cache / GIB)
    };
    Err(Refusal::Memory(format!(
        "weights take {:.1} GiB{cached} per GPU of {:.1} GiB; {mend} or another precision",
        weights / GIB,
        memory / GIB
    )))
}

/// Sequences that the KV cache of one attention-data rank holds.
pub(crate) fn sequences_max(d: &Deployment) -> f64 {
    /// Less is no cache that anyone would serve from.
    const LEAST_BYTES: f64 = 2e9;
    let memory = d.gpu.memory_bytes as f64;
    let weights = weight_bytes(&d.shape, d.formats, d.parallel);
    let of_all = memory * MEMORY_SHARE - RESERVE_BYTES - weights;
    let of_free = (memory - weights - RESERVE_BYTES) * MEMORY_SHARE;
    let budget = match d.framework {
        Framework::TrtLlm => of_free,
        // Who runs weights of nearly the usable share has raised the share.
        _ if of_all < LEAST_BYTES => of_free,
        _ => of_all,
    };
    let token = token_bytes(&d.shape, d.formats, d.parallel);
    // Answers are half written on average; some room stays unused.
    let tokens = budget.max(LEAST_BYTES) / token.max(1.0);
    (tokens / (d.isl + 0.55 * d.osl)).max(1.0)
}
