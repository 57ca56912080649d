//! `[engine]`: settings of an engine, with the names and meanings of vLLM's flags.

mod encoder;
mod kv_cache;
mod lora;
mod output_len;
mod parallel;
mod speculation;
mod tiers;
mod timing;

use std::io;
use std::path::Path;

use super::{DAY_S, ModelConfig};
use crate::doc::{Origin, Row, Table, choice, optional, section, value};
use crate::preset::{Gpu, ModelShape};
use slipstream_base::text::several;

use encoder::read_encoder;
use kv_cache::{KvCache, read_kv_cache};
use lora::read_lora;
use output_len::read_output_len;
use parallel::{read_parallel, read_pipeline};
use speculation::read_speculation;
use tiers::{read_disk_tier, read_host_tier, read_peer_tier};
use timing::read_timing;

pub use encoder::EncoderConfig;
pub use lora::LoraConfig;
pub use output_len::OutputLen;
pub use parallel::PipelineConfig;
#[cfg(test)]
pub(super) use parallel::layers_of_stages;
pub use speculation::{SpeculationConfig, SpeculationMethod};
pub use tiers::{DiskTierConfig, HostTierConfig, PeerTierConfig};
pub use timing::{Dtype, Framework, TimingConfig};

/// Order of the waiting queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// By `priority` (lower first), then arrival.
    Priority,
}

const SCHEDULING: &[(&str, SchedulingPolicy)] = &[
    ("fcfs", SchedulingPolicy::Fcfs),
    ("priority", SchedulingPolicy::Priority),
];

/// `None`: the checkpoint's.
const KV_DTYPES: &[(&str, Option<Dtype>)] = &[
    ("auto", None),
    ("bf16", Some(Dtype::Bf16)),
    ("fp8", Some(Dtype::Fp8)),
];

/// Settings of vLLM that the engine does not model.
pub(super) const NOT_MODELLED: &[(&str, &str)] = &[
    ("max_num_partial_prefills", "is not modelled"),
    ("max_long_partial_prefills", "is not modelled"),
    (
        "prefill_schedule_interval",
        "is not modelled: every step may prefill, vLLM's default",
    ),
    (
        "watermark",
        "is not modelled: a request is admitted if its blocks are free, vLLM's default",
    ),
    (
        "scheduler_cls",
        "is not modelled: `async_scheduling` chooses between vLLM's two schedulers",
    ),
    (
        "speculative_config",
        "is not modelled: [engine.speculation] is, by measured acceptance",
    ),
    ("decode_context_parallel_size", "is not modelled"),
];

section! {
    /// `[engine]`: vLLM's names and meanings.
    pub struct EngineConfig, keys EngineKeys of "engine", read by hand {
        /// Tokens per KV block: the unit of allocation and of prefix reuse. The same in all pools.
        ///
        /// High: prompts shorter than a block share nothing, and each sequence wastes half a block on average. Low:
        /// more hashes and events per request.
        block_size: u32 = value(16).within(1..=1_024).unit("tokens");
        /// KV blocks per rank.
        ///
        /// Low: preemptions, and long prompts are refused. High: a cache larger than the GPU's memory.
        num_gpu_blocks: u32 = value(16_384).within(1..=1 << 24)
            .unit("blocks").with_default_text("GPU memory x utilization - weights - buffers of sampling; 16,384 unless `timing` has a `gpu`");
        /// Limit of sequences per pass.
        ///
        /// Low: requests wait although the GPU has capacity. High: every token takes longer, and blocks run out
        /// (preemptions).
        max_num_seqs: u32 = value(256).within(1..=65_536).unit("sequences");
        /// Token budget per pass, over prefill and decode. At least `max_num_seqs`; at least `max_model_len` if
        /// chunked prefill is off.
        ///
        /// Low: prefill takes more passes (TTFT). High: passes with prefill delay decodes (ITL).
        max_num_batched_tokens: u32 = value(8_192).within(1..=1 << 24).unit("tokens");
        /// Limit of prompt plus answer.
        ///
        /// Low: requests are refused. High: one request may take the whole cache.
        max_model_len: u32 = value(32_768)
            .with_description("tokens, 1 to the model's").with_default_text("the model's limit, or the KV cache's capacity if smaller");
        /// Reuse cached blocks by hash.
        ///
        /// false: every prompt is computed completely, and KV-aware routing finds no hits.
        enable_prefix_caching: bool = value(true);
        /// Split a prompt over passes if the budget is short.
        ///
        /// false: a prompt waits until one pass can hold all of it.
        enable_chunked_prefill: bool = value(true);
        /// Order of the waiting queue: arrival, or the request's `priority` (lower first).
        ///
        /// "priority": steady urgent load starves the rest.
        scheduling_policy: SchedulingPolicy = choice(SCHEDULING, SchedulingPolicy::Fcfs);
        /// Schedule each pass when the one before it begins, without its tokens, as vLLM does by default.
        ///
        /// true: a request that ends keeps its slot and blocks for one more pass, and one that arrives waits one pass
        /// longer. false: vLLM's synchronous scheduler; `timing` must then contain the host's time between passes.
        async_scheduling: bool = value(true);
        /// Limit of one sequence's tokens in a pass while the engine has other sequences; 0: no limit.
        ///
        /// Low: long prompts take more passes. High: they keep short ones waiting.
        long_prefill_token_threshold: u32 = value(0).with_description("tokens, 0 to `max_model_len`");
        /// Raise that limit to `max_num_batched_tokens` divided by the number of sequences.
        ///
        /// No effect if `long_prefill_token_threshold` is 0.
        long_prefill_token_threshold_adaptive: bool = value(false);
        /// Limit of running sequences.
        ///
        /// Low: requests wait although the GPU has capacity.
        max_num_active_seqs?: u32 = optional().within(1..=65_536)
            .with_description("sequences, 1 to `max_num_seqs`").with_default_text("`max_num_seqs`");
        /// Limit of the tokens that a pass schedules. At least `max_model_len` if chunked prefill is off.
        ///
        /// Low: prefill takes more passes (TTFT), and fewer sequences decode per pass than run.
        max_num_scheduled_tokens?: u32 = optional().within(1..=1 << 24)
            .unit("tokens").with_default_text("`max_num_batched_tokens`");
        /// Admit a request only if blocks for its whole prompt are free, not for its first chunk alone.
        ///
        /// false: long prompts preempt each other when the cache is full.
        scheduler_reserve_full_isl: bool = value(true);
        /// GPUs that share one replica of the model. Must split its attention heads and MLPs evenly, and its
        /// key-value heads evenly or repeat them evenly.
        ///
        /// Low: the weights do not fit. High: time goes into all-reduces.
        tensor_parallel_size: u32 = value(1).within(1..=1_024).unit("GPUs");
        /// Stages that the layers are divided into, each on `tensor_parallel_size` GPUs of its own. As many batches
        /// are under way, and one more with `async_scheduling` (`docs/engine-model.md`).
        ///
        /// High: stages wait for each other, and each request for all of them.
        key pipeline_parallel_size: u32 = value(1).within(1..=1_024)
            .with_description("stages, 1 to the model's layers");
        /// Rate at which a stage sends activations to the next one: 2 bytes x hidden size per token.
        ///
        /// Low: prompts wait between stages. Set it if stages are in different machines.
        key pipeline_link_bytes_per_s?: f64 = optional().within(1e6..=1e13)
            .unit("bytes per second").with_default_text("the link of `engine.timing.gpu`; without one, sends take no time");
        /// Time of a send besides its bytes.
        ///
        /// High: every token waits for it at each stage but the last.
        key pipeline_latency_us: f64 = value(0.0).within(0.0..=1e6).unit("µs");
        /// The stages that layers are divided into, if there are several.
        field pipeline: Option<PipelineConfig> = None;
        /// Ranks per worker, each with its own scheduler and KV cache. Ranks of a mixture divide the experts between
        /// them; each step is taken to meet as many tokens on the other ranks as on its own, unless
        /// `data_parallel_barrier` is set.
        ///
        /// High: cached prefixes are spread over many ranks. A mixture needs `timing.kind` "calibrated", or
        /// `data_parallel_barrier`.
        data_parallel_size: u32 = value(1).within(1..=1_024).unit("ranks");
        /// The ranks of a worker begin every step together and end it with the slowest one, as vLLM's do with a
        /// mixture of experts; a rank without requests runs a dummy batch (`docs/engine-model.md`). For simulation
        /// only. Needs a mixture; no effect with one rank.
        ///
        /// true: one rank's long prompt delays the tokens of all. Runs take longer, as steps are not jumped over.
        data_parallel_barrier: bool = value(false);
        /// Give each GPU of a worker whole experts, instead of a part of every expert.
        ///
        /// true: tokens are exchanged between GPUs; the busiest GPU sets the pace.
        enable_expert_parallel: bool = value(false);
        /// Rows that the experts of the busiest GPU compute, over the mean of all GPUs: 1 / `balancedness`, which
        /// vLLM logs with `eplb_config.log_balancedness`. Needs `enable_expert_parallel`.
        ///
        /// High: every step waits for that GPU. 1: experts that are loaded equally.
        expert_imbalance?: f64 = optional().within(1.0..=1_024.0).with_default_text("the profile's: 1.29");
        /// Share of a GPU's memory for weights and KV cache.
        ///
        /// High: on a real GPU, out of memory, since activations need the rest. Low: fewer blocks.
        gpu_memory_utilization: f64 = value(0.9).within(0.01..=1.0).unit("share");
        /// Format of keys and values, used for the default of `num_gpu_blocks`, memory reads of the roofline, and KV
        /// transfers. "auto", as in vLLM: "bf16", also for FP8 weights, unless the checkpoint contains scales for an
        /// FP8 cache (`kv_cache_scheme`, `kv_cache_quant_algo`).
        ///
        /// "fp8": twice the blocks; the loss of quality is not modelled.
        key kv_cache_dtype: Option<Dtype> = choice(KV_DTYPES, None);
        /// Format of keys and values. Default: the checkpoint's.
        field kv_cache_dtype: Dtype = Dtype::Bf16;
        /// `[engine.host_tier]`: host memory for KV blocks. Default: none.
        field host_tier: Option<HostTierConfig> = None;
        /// `[engine.disk_tier]`: a disk for KV blocks, below host memory. Default: none.
        field disk_tier: Option<DiskTierConfig> = None;
        /// `[engine.peer_tier]`: blocks that other workers have are fetched from them. Default: none.
        field peer_tier: Option<PeerTierConfig> = None;
        /// `[engine.speculation]`: speculative decoding. Default: none.
        field speculation: Option<SpeculationConfig> = None;
        /// `[engine.lora]`: limits of LoRA adapters, and the time to load them. Default: none.
        field lora: Option<LoraConfig> = None;
        /// `[engine.encoder]`: the encoder of images. Default: none.
        field encoder: Option<EncoderConfig> = None;
        /// Time from a worker's start until it takes requests.
        ///
        /// High: the wait is in real time at `speedup` 1.
        startup_s: f64 = value(0.0).within(0.0..=DAY_S).unit("s");
        /// Natural length of an answer, tokens: drawn per request from its seed, unless the request
        /// sets `ignore_eos`.
        field output_len: OutputLen = OutputLen::default();
        /// `[engine.timing]`
        field timing: TimingConfig = TimingConfig::default();
    }
}

/// Keys of `[engine]` and of the tables in it.
pub(super) fn rows() -> Vec<Row> {
    let tables = [
        EngineKeys::rows(),
        lora::LoraKeys::rows(),
        encoder::EncoderKeys::rows(),
        tiers::HostTierKeys::rows(),
        tiers::DiskTierKeys::rows(),
        tiers::PeerTierKeys::rows(),
        speculation::SpeculationKeys::rows(),
        output_len::OutputLenKeys::rows(),
        timing::TimingKeys::rows(),
    ];
    tables.into_iter().flatten().collect()
}

impl EngineConfig {
    /// Stages of the pipeline; 1: there is none.
    pub fn pipeline_parallel_size(&self) -> u32 {
        self.pipeline.as_ref().map_or(1, PipelineConfig::stages)
    }

    /// GPUs of a worker.
    pub fn gpus(&self) -> u32 {
        self.tensor_parallel_size * self.pipeline_parallel_size() * self.data_parallel_size
    }
}

pub(super) fn read_engine(
    t: &Table<'_>,
    model: &ModelConfig,
    gpus: &[Gpu],
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> EngineConfig {
    let shape = &model.shape;
    for (key, reason) in NOT_MODELLED {
        t.refuse(key, reason, "remove the key");
    }
    let timing = t.table("timing", |timing| read_timing(timing, model, gpus, load));
    let parallel = read_parallel(t, shape, &timing);
    let kv = read_kv_cache(t, shape, &timing, &parallel);
    let max_model_len = read_model_len(t, shape, &kv);
    let budget = read_budget(t, &kv, max_model_len);
    let host_tier = t.table("host_tier", |t| read_host_tier(t, shape, &kv, &parallel));
    let speculation = t.table("speculation", |t| read_speculation(t, &timing));
    let pipeline = read_pipeline(t, shape, &timing, &parallel, speculation.is_some());
    let peer_tier = t.table("peer_tier", read_peer_tier);
    let others = [
        ("pipeline_parallel_size", pipeline.is_some()),
        ("speculation", speculation.is_some()),
        ("host_tier", host_tier.is_some()),
        ("peer_tier", peer_tier.is_some()),
    ];
    let encoder = t.table("encoder", |t| {
        read_encoder(
            t,
            &timing,
            parallel.tensor,
            budget.max_num_batched_tokens,
            &others,
        )
    });
    EngineConfig {
        block_size: kv.block_size,
        num_gpu_blocks: kv.blocks,
        max_num_seqs: kv.max_num_seqs,
        max_num_batched_tokens: budget.max_num_batched_tokens,
        max_model_len,
        enable_prefix_caching: EngineKeys::enable_prefix_caching().read(t),
        enable_chunked_prefill: budget.enable_chunked_prefill,
        scheduling_policy: EngineKeys::scheduling_policy().read(t),
        async_scheduling: EngineKeys::async_scheduling().read(t),
        long_prefill_token_threshold: budget.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive: EngineKeys::long_prefill_token_threshold_adaptive()
            .read(t),
        max_num_active_seqs: budget.max_num_active_seqs,
        max_num_scheduled_tokens: budget.max_num_scheduled_tokens,
        scheduler_reserve_full_isl: EngineKeys::scheduler_reserve_full_isl().read(t),
        tensor_parallel_size: parallel.tensor,
        pipeline,
        data_parallel_size: parallel.data,
        data_parallel_barrier: parallel.barrier,
        enable_expert_parallel: parallel.experts,
        expert_imbalance: parallel.imbalance,
        gpu_memory_utilization: kv.memory_utilization,
        kv_cache_dtype: kv.dtype,
        host_tier,
        disk_tier: t.table("disk_tier", |t| {
            read_disk_tier(t, shape, &kv, &parallel, host_tier.is_some())
        }),
        peer_tier,
        speculation,
        lora: t.table("lora", read_lora),
        encoder,
        startup_s: EngineKeys::startup_s().read(t),
        output_len: t.table("output_len", read_output_len),
        timing,
    }
}

/// `max_model_len`: at most the model's positions and the tokens of the KV cache.
fn read_model_len(t: &Table<'_>, shape: &ModelShape, kv: &KvCache) -> u32 {
    let capacity = kv.capacity_tokens();
    let fit = u32::try_from(capacity).map_or(shape.max_positions, |c| c.min(shape.max_positions));
    let origin = Origin::Derived(if capacity < u64::from(shape.max_positions) {
        format!(
            "KV cache holds {capacity}, {} allows {}",
            shape.name, shape.max_positions
        )
    } else {
        format!("{} allows {}", shape.name, shape.max_positions)
    });
    let max_model_len: u32 = EngineKeys::max_model_len()
        .field(t)
        .within(1..=shape.max_positions)
        .or_from(origin, fit);
    if u64::from(max_model_len) > capacity {
        let (blocks, block_size) = (kv.blocks, kv.block_size);
        t.error(
            "max_model_len",
            format!(
                "`max_model_len` is {max_model_len}, but the KV cache holds {capacity} {} \
                 ({blocks} {} of {block_size})",
                several(capacity, "token"),
                several(blocks.into(), "block"),
            ),
            format!("set `max_model_len = {capacity}` or less, or give the cache more memory"),
        );
    }
    if kv.block_size > max_model_len {
        t.error(
            "block_size",
            format!(
                "`block_size` is {}, but `max_model_len` is {max_model_len}: \
                 no prompt fills a block",
                kv.block_size
            ),
            "set a smaller `block_size`; vLLM's default is 16",
        );
    }
    max_model_len
}

/// Limits of one step of the scheduler.
struct Budget {
    enable_chunked_prefill: bool,
    max_num_batched_tokens: u32,
    long_prefill_token_threshold: u32,
    max_num_active_seqs: Option<u32>,
    max_num_scheduled_tokens: Option<u32>,
}

fn read_budget(t: &Table<'_>, kv: &KvCache, max_model_len: u32) -> Budget {
    let max_num_seqs = kv.max_num_seqs;
    let enable_chunked_prefill = EngineKeys::enable_chunked_prefill().read(t);
    let max_num_batched_tokens =
        read_batched_tokens(t, enable_chunked_prefill, max_num_seqs, max_model_len);
    let long_prefill_token_threshold: u32 = EngineKeys::long_prefill_token_threshold().read(t);
    if long_prefill_token_threshold > max_model_len {
        t.error(
            "long_prefill_token_threshold",
            format!(
                "`long_prefill_token_threshold` is {long_prefill_token_threshold}, but `max_model_len` \
                 is {max_model_len}"
            ),
            format!("set it to {max_model_len} or less; 0 is no limit"),
        );
    }
    let max_num_active_seqs = EngineKeys::max_num_active_seqs().read(t);
    if max_num_active_seqs.is_some_and(|most| most > max_num_seqs) {
        t.error(
            "max_num_active_seqs",
            format!("`max_num_active_seqs` is more than `max_num_seqs`, {max_num_seqs}"),
            format!("set it to {max_num_seqs} or less"),
        );
    }
    let max_num_scheduled_tokens = EngineKeys::max_num_scheduled_tokens().read(t);
    // As for `max_num_batched_tokens`: without chunking, a step must hold a whole prompt.
    if !enable_chunked_prefill && max_num_scheduled_tokens.is_some_and(|most| most < max_model_len)
    {
        t.error(
            "max_num_scheduled_tokens",
            format!(
                "`max_num_scheduled_tokens` is less than `max_model_len`, {max_model_len}, and chunked \
                 prefill is off: longer prompts can never run"
            ),
            format!("set it to {max_model_len}, or `enable_chunked_prefill = true`"),
        );
    }
    Budget {
        enable_chunked_prefill,
        max_num_batched_tokens,
        long_prefill_token_threshold,
        max_num_active_seqs,
        max_num_scheduled_tokens,
    }
}

fn read_batched_tokens(
    t: &Table<'_>,
    enable_chunked_prefill: bool,
    max_num_seqs: u32,
    max_model_len: u32,
) -> u32 {
    let given = EngineKeys::max_num_batched_tokens().field(t);
    let max_num_batched_tokens = if enable_chunked_prefill {
        given.or(EngineKeys::max_num_batched_tokens()
            .default()
            .max(max_num_seqs))
    } else {
        // Source: vLLM, `SchedulerConfig`: without chunking, a step must hold a whole prompt.
        let whole = max_model_len
            .max(EngineKeys::max_num_batched_tokens().default())
            .max(max_num_seqs);
        given.or_from(Origin::Derived("fits the longest prompt".into()), whole)
    };
    if max_num_batched_tokens < max_num_seqs {
        t.error(
            "max_num_batched_tokens",
            format!(
                "`max_num_batched_tokens` is {max_num_batched_tokens}, but `max_num_seqs` is \
                 {max_num_seqs}: not every running sequence gets a token"
            ),
            format!("set `max_num_batched_tokens = {max_num_seqs}` or more"),
        );
    }
    if !enable_chunked_prefill && max_num_batched_tokens < max_model_len {
        t.error(
            "max_num_batched_tokens",
            format!(
                "`max_num_batched_tokens` is {max_num_batched_tokens}, but `max_model_len` is \
                 {max_model_len} and chunked prefill is off: longer prompts can never run"
            ),
            format!("set it to {max_model_len}, or `enable_chunked_prefill = true`"),
        );
    }
    max_num_batched_tokens
}
