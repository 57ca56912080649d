//! Capacity of an engine's KV cache: the blocks that fit into GPU memory next to the weights.

use super::parallel::Parallel;
use super::{Dtype, EngineConfig, EngineKeys, TimingConfig};
use crate::doc::{Origin, Table};
use crate::preset::{Formats, Gpu, ModelShape};
use slipstream_base::text::counted;
use slipstream_base::width::{floor_u64, to_u32};

/// The blocks of an engine's KV cache, and the keys that their number follows from.
pub(super) struct KvCache {
    pub(super) block_size: u32,
    pub(super) blocks: u32,
    pub(super) dtype: Dtype,
    pub(super) memory_utilization: f64,
    pub(super) max_num_seqs: u32,
}

impl KvCache {
    pub(super) fn capacity_tokens(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.block_size)
    }
}

pub(super) fn read_kv_cache(
    t: &Table<'_>,
    shape: &ModelShape,
    timing: &TimingConfig,
    parallel: &Parallel,
) -> KvCache {
    let default = EngineConfig::default();
    let memory_utilization = EngineKeys::gpu_memory_utilization().read(t);
    let dtype = EngineKeys::kv_cache_dtype().read(t);
    let dtype = dtype.unwrap_or(shape.kv_cache);
    let block_size = EngineKeys::block_size().read(t);
    let max_num_seqs: u32 = EngineKeys::max_num_seqs().read(t);
    let memory = match timing {
        TimingConfig::Roofline {
            gpu,
            dtype: weights,
        }
        | TimingConfig::Calibrated {
            gpu,
            dtype: weights,
            ..
        } if parallel.splits => Some(Memory {
            gpu,
            shape,
            formats: match timing {
                TimingConfig::Roofline { .. } => Formats::uniform(shape, *weights),
                _ => Formats::of(shape, *weights),
            },
            kv_dtype: dtype,
            parallel,
            utilization: memory_utilization,
            max_num_seqs,
        }),
        _ => None,
    };
    let (blocks_fit, origin) = match &memory {
        None => (default.num_gpu_blocks, Origin::Default),
        Some(memory) => memory.blocks(t, block_size),
    };
    // 2^24 blocks of 16 tokens are 268 million tokens, more than any GPU has memory for.
    let blocks = EngineKeys::num_gpu_blocks()
        .field(t)
        .or_from(origin, blocks_fit);
    KvCache {
        block_size,
        blocks,
        dtype,
        memory_utilization,
        max_num_seqs,
    }
}

/// Share of a GPU's memory that is left for the KV cache.
struct Memory<'m> {
    gpu: &'m Gpu,
    shape: &'m ModelShape,
    formats: Formats,
    kv_dtype: Dtype,
    parallel: &'m Parallel,
    utilization: f64,
    max_num_seqs: u32,
}

impl Memory<'_> {
    /// Bytes of weights on each GPU of a stage of `tensor_parallel` GPUs. Ranks divide the experts.
    fn weights(&self, tensor_parallel: u32) -> u64 {
        let experts = tensor_parallel * self.parallel.data;
        let bytes = self
            .formats
            .weight_bytes(self.shape, tensor_parallel, experts);
        self.parallel.of_stage(floor_u64(bytes.ceil()))
    }

    /// Bytes of KV cache per token on each of those GPUs.
    fn kv_bytes_per_token(&self, tensor_parallel: u32) -> u64 {
        let shape = self.shape;
        let bytes = shape.kv_bytes_per_token_per_gpu(tensor_parallel, self.kv_dtype);
        self.parallel.of_stage(bytes)
    }

    /// Blocks that fit next to the weights and the buffers of sampling, and how the number was
    /// derived; a mistake (and 1) if not one fits.
    ///
    /// vLLM also takes off what its profiling pass and the driver use besides: activations of the
    /// layers, the sort's working space, libraries, CUDA graphs. That is not modelled: set
    /// `num_gpu_blocks` to match a given deployment.
    fn blocks(&self, t: &Table<'_>, block_size: u32) -> (u32, Origin) {
        let budget = floor_u64(self.gpu.memory_bytes as f64 * self.utilization);
        let weights = self.weights(self.parallel.tensor);
        // A number that is given comes from an engine that ran: it has taken its buffers off.
        let (sampling, buffers) = if t.has("num_gpu_blocks") {
            (0, String::new())
        } else {
            let bytes = self.shape.sampling_bytes(self.max_num_seqs);
            let sequences = counted(self.max_num_seqs.into(), "sequence");
            let size = gigabytes(bytes);
            (
                bytes,
                format!(" and {size} of buffers to sample {sequences}"),
            )
        };
        let rest = budget.saturating_sub(weights);
        let per_token = self.kv_bytes_per_token(self.parallel.tensor);
        let per_block = (per_token * u64::from(block_size)).max(1);
        let blocks = rest.saturating_sub(sampling) / per_block;
        if blocks == 0 {
            let message = format!(
                "{} takes {} of weights{buffers} on each of {} of {}, but {} of \
                 it is {} (`gpu_memory_utilization` {}), which leaves no block of KV cache",
                self.shape.name,
                gigabytes(weights),
                counted(self.parallel.tensor.into(), "GPU"),
                self.gpu.name,
                gigabytes(self.gpu.memory_bytes),
                gigabytes(budget),
                self.utilization,
            );
            // The smallest that holds one sequence of the model's full length.
            let enough = (1..=64).find(|&tp| {
                let rest = budget
                    .saturating_sub(self.weights(tp))
                    .saturating_sub(sampling);
                let per_token = self.kv_bytes_per_token(tp);
                self.shape.divides_into(tp)
                    && rest >= per_token * u64::from(self.shape.max_positions)
            });
            let (key, hint) = match enough {
                // Half of the rest for sampling leaves the other half for the cache.
                _ if rest / 2 >= self.shape.sampling_bytes(1).max(per_block) => {
                    let fit = rest / 2 / self.shape.sampling_bytes(1);
                    let split = enough
                        .filter(|&tp| tp > self.parallel.tensor)
                        .map_or(String::new(), |tp| {
                            format!("`tensor_parallel_size = {tp}`, ")
                        });
                    let hint =
                        format!("set `max_num_seqs = {fit}` or less, {split}or use a larger GPU");
                    ("max_num_seqs", hint)
                }
                Some(tp) => (
                    "tensor_parallel_size",
                    format!("set `tensor_parallel_size = {tp}`, or use a larger GPU"),
                ),
                None => (
                    "tensor_parallel_size",
                    "use a larger GPU or a smaller model".into(),
                ),
            };
            t.error(key, message, hint);
            return (1, Origin::Default);
        }
        let how = format!(
            "{} {} x {} - {} of weights - {} to sample {} = {}",
            self.gpu.name,
            gigabytes(self.gpu.memory_bytes),
            self.utilization,
            gigabytes(weights),
            gigabytes(sampling),
            counted(self.max_num_seqs.into(), "sequence"),
            gigabytes(rest - sampling),
        );
        (to_u32(blocks.min(1 << 24)), Origin::Derived(how))
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}
