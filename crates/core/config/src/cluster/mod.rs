//! The cluster file, resolved: `serve` and `simulate` build their cluster from it.
//!
//! These are plain values with defaults. [`file`](mod@file) reads them from TOML, and reports all mistakes
//! together, with lines. Each key is declared once, by [`section!`](crate::doc), with its default, its bounds and the
//! effect of values that are too small or too large; [`keys`] has all of them, and `docs/cluster-file.md` is generated
//! from it.

mod autoscale;
mod event;
pub mod file;
mod gpu;
mod host;
pub mod keys;
mod kv;
mod live;
mod models;
mod network;
mod reference;
mod router;
mod share;
#[cfg(test)]
mod tests;
mod upstream;

use std::path::{Path, PathBuf};

use crate::doc::Doc;
use crate::preset::{self, Gpu, ModelShape};
use slipstream_base::{Role, WorkerId};

pub use autoscale::{AutoscaleConfig, AutoscalePolicy};
pub use event::{Fault, FaultEvent};
pub use host::{HostConfig, HostMode, HostScheduler, HostThreads, WakeMechanism};
pub use kv::{HandOver, KvConfig};
pub use live::{AutoscaleOutput, EventBus, EventsConfig, FaultsConfig, LiveConfig};
pub use network::{NetworkConfig, NetworkMode};
pub use router::{POLICIES, RouterConfig, RouterPolicy};
pub use share::{ShareConfig, SharingPool};
pub use upstream::{
    BOOTSTRAP_PORT, EngineKind, EngineTls, EngineUrl, HttpEngines, KubernetesConfig, KvProtocol,
    OutlierConfig, PoolTraffic, Resume, UpstreamConfig,
};

/// A year, s: a longer time is an error in the unit, and products with 1e9 ns must fit.
const TIME_S_MAX: f64 = 86_400.0 * 366.0;

/// Limit of workers over all pools; `WorkerId`s are dense and per-worker state is an array.
/// Processes announce their workers with a count of 16 bits.
const WORKERS_MAX: u32 = 65_535;

/// A whole cluster. The default is that of an empty file.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// `[model]`; with [several models](Self::models), that of the first pool.
    pub model: ModelConfig,
    /// `[pool.NAME]`, in file order; at least one. Each has its own resolved `[engine]` and `[model]`.
    pub pools: Vec<PoolConfig>,
    /// `[share.NAME]`: for `simulate` only.
    pub shares: Vec<ShareConfig>,
    /// `[router]`
    pub router: RouterConfig,
    /// `[network]`. Live, it sets the duration of KV transfers between workers only.
    pub network: NetworkConfig,
    /// `[host]`: for `simulate` only.
    pub host: HostConfig,
    /// `[kv]`
    pub kv: KvConfig,
    /// `[[event]]`, in order of time: for `simulate` only.
    pub events: Vec<FaultEvent>,
    /// `[live]`: for `serve` only.
    pub live: LiveConfig,
    /// `[upstream]`: for `serve` with real engines only.
    pub upstream: UpstreamConfig,
}

impl Cluster {
    /// Every worker with its pool, in the order of their numbers: over all pools in file order.
    pub fn workers(&self) -> impl Iterator<Item = (WorkerId, &PoolConfig)> {
        let each = self
            .pools
            .iter()
            .flat_map(|pool| (0..pool.workers).map(move |_| pool));
        (0..).map(WorkerId).zip(each)
    }

    /// The models that the pools serve, each once, in file order: a name is one model.
    pub fn models(&self) -> Vec<&ModelConfig> {
        let mut models: Vec<&ModelConfig> = Vec::new();
        for pool in &self.pools {
            if models.iter().all(|model| model.name != pool.model.name) {
                models.push(&pool.model);
            }
        }
        models
    }

    /// Names of its [models](Self::models), with commas between.
    pub fn model_names(&self) -> String {
        let models = self.models();
        let names: Vec<&str> = models.iter().map(|model| &*model.name).collect();
        names.join(", ")
    }

    /// Tokens of a prompt and its answer at most, so that any engine can hold them: requests for more are
    /// refused, live and simulated.
    pub fn context_max(&self) -> u32 {
        Cluster::context_of(self.pools.iter())
    }

    /// [`context_max`](Self::context_max) of requests for `model`.
    pub fn context_max_of(&self, model: &str) -> u32 {
        Cluster::context_of(self.pools_of(model))
    }

    /// The pools that serve `model`.
    pub fn pools_of(&self, model: &str) -> impl Iterator<Item = &PoolConfig> {
        self.pools
            .iter()
            .filter(move |pool| pool.model.name == model)
    }

    fn context_of<'p>(pools: impl Iterator<Item = &'p PoolConfig>) -> u32 {
        let engines = pools.map(|pool| &pool.engine);
        let held = |e: &EngineConfig| {
            e.max_model_len
                .min(e.num_gpu_blocks.saturating_mul(e.block_size))
        };
        engines.map(held).min().unwrap_or(0)
    }

    /// Whether some workers compute prompts for others (disaggregated prefill).
    pub fn hands_over(&self) -> bool {
        self.pools.iter().any(|p| p.role == Role::Prefill)
    }

    /// KV bytes per token, by the worker that computes it: 2 x layers x key-value heads x head size
    /// x bytes of `kv_cache_dtype`.
    pub fn kv_bytes_per_token(&self) -> Vec<u64> {
        self.workers()
            .map(|(_, pool)| {
                let dtype = pool.engine.kv_cache_dtype;
                // On one GPU, which has every head once: heads that several GPUs hold are sent
                // once.
                pool.model.shape.kv_bytes_per_token_per_gpu(1, dtype)
            })
            .collect()
    }

    /// Whether some pool has real engines.
    pub fn has_engines(&self) -> bool {
        self.pools.iter().any(|pool| pool.engines.is_some())
    }

    /// GPUs: workers × tensor-parallel × pipeline-parallel × data-parallel size, over all pools; those of a share once.
    pub fn gpus(&self) -> u64 {
        self.gpus_by_pool().map(|(_, gpus)| gpus).sum()
    }

    /// The host of each worker, or its first one: in order of workers, each on the first GPUs behind those of the one
    /// before, but on no more hosts than it needs.
    pub fn hosts(&self) -> Vec<u32> {
        let of = self.network.gpus_per_host;
        let (mut host, mut used) = (0, 0);
        let place = |(_, pool): (_, &PoolConfig)| {
            let gpus = pool.engine.gpus();
            let size = if of == 0 { gpus } else { of };
            if used > 0 && (used + gpus > size || of == 0) {
                (host, used) = (host + 1, 0);
            }
            let first = host;
            used += gpus;
            while used > size {
                (host, used) = (host + 1, used - size);
            }
            first
        };
        self.workers().map(place).collect()
    }
}

impl Default for Cluster {
    fn default() -> Self {
        let no_files = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
        let (cluster, _) = file::read(Doc::empty(), no_files).expect("the defaults are valid");
        cluster
    }
}

/// `[model]`: the model, and its tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A preset's name (`slipstream presets`), which sets the shape of the model. Default
    /// `qwen3-8b`, which fits on one default GPU with space for its KV cache.
    pub preset: String,
    /// Model name in requests. Default: the preset's name.
    pub name: String,
    /// Hugging Face style `config.json`; overrides the preset's shape.
    pub config: Option<PathBuf>,
    /// Directory with `tokenizer.json` (and a chat template); `None`: the built-in tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// LoRA adapters that are served from the start, by name.
    pub lora_adapters: Vec<String>,
    /// Tokens of an image in a chat; 0: images are refused. Default 0.
    pub image_tokens: u32,
    /// The shape of `config` or `preset`.
    pub shape: ModelShape,
    /// Notes for the user about how `config` was read.
    pub notes: Vec<String>,
}

impl ModelConfig {
    const PRESET: &str = "qwen3-8b";
}

impl Default for ModelConfig {
    fn default() -> Self {
        ModelConfig {
            preset: Self::PRESET.into(),
            name: Self::PRESET.into(),
            config: None,
            tokenizer: None,
            lora_adapters: Vec::new(),
            image_tokens: 0,
            shape: preset::model(Self::PRESET).expect("it is a preset").clone(),
            notes: Vec::new(),
        }
    }
}

/// `[pool.NAME]`: a number of equal workers.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolConfig {
    /// The NAME of `[pool.NAME]`.
    pub name: String,
    /// The role of its engines.
    pub role: Role,
    /// Number of workers. Default 1; with `engines`, their number.
    pub workers: u32,
    /// Real engines, reached by HTTP; `None`: the workers are modelled.
    pub engines: Option<HttpEngines>,
    /// `[model]` with this pool's overrides applied.
    pub model: ModelConfig,
    /// `[engine]` with this pool's overrides applied.
    pub engine: EngineConfig,
    /// `[autoscale]` with this pool's overrides applied; `None`: all workers run from the start.
    pub autoscale: Option<AutoscaleConfig>,
}

/// Order of the waiting queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// By `priority` (lower first), then arrival.
    Priority,
}

/// `[engine]`: vLLM's names and meanings.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Tokens per KV block. Default 16.
    pub block_size: u32,
    /// KV blocks per rank. Default: the GPU's memory after the weights, or 16,384 if no GPU is set.
    pub num_gpu_blocks: u32,
    /// Limit of sequences per pass. Default 256.
    pub max_num_seqs: u32,
    /// Limit of tokens per pass. Default 8,192.
    pub max_num_batched_tokens: u32,
    /// Limit of prompt plus answer, tokens. Default: the model's.
    pub max_model_len: u32,
    /// Reuse blocks by hash. Default true.
    pub enable_prefix_caching: bool,
    /// Split a prompt over passes if the budget is short. Default true.
    pub enable_chunked_prefill: bool,
    /// Order of the waiting queue.
    pub scheduling_policy: SchedulingPolicy,
    /// Schedule each pass when the one before it begins. Default true.
    pub async_scheduling: bool,
    /// Limit of a sequence's tokens in a pass while there are other sequences; 0, the default: none.
    pub long_prefill_token_threshold: u32,
    /// Raise that limit to a sequence's fair share of `max_num_batched_tokens`. Default false.
    pub long_prefill_token_threshold_adaptive: bool,
    /// Limit of running sequences. Default: `max_num_seqs`.
    pub max_num_active_seqs: Option<u32>,
    /// Limit of tokens that a pass schedules. Default: `max_num_batched_tokens`.
    pub max_num_scheduled_tokens: Option<u32>,
    /// Admit a sequence only if blocks for all of its tokens are free, not for its first chunk
    /// alone. Default true.
    pub scheduler_reserve_full_isl: bool,
    /// GPUs that share one replica of the model. Default 1.
    pub tensor_parallel_size: u32,
    /// The stages that layers are divided into, if there are several (`pipeline_parallel_size`). Default: none.
    pub pipeline: Option<PipelineConfig>,
    /// Ranks of a worker, each with its own scheduler. Default 1.
    pub data_parallel_size: u32,
    /// The ranks of a worker begin every step together. Default false.
    pub data_parallel_barrier: bool,
    /// Divide whole experts between the GPUs of a worker, instead of every expert. Default false.
    pub enable_expert_parallel: bool,
    /// Rows of the GPU whose experts have most, over the mean of all GPUs. Default: the profile's.
    pub expert_imbalance: Option<f64>,
    /// Share of a GPU's memory for weights and KV cache. Default 0.9.
    pub gpu_memory_utilization: f64,
    /// Number format of keys and values. Default: the checkpoint's, which is BF16 unless it
    /// contains scales for FP8.
    pub kv_cache_dtype: Dtype,
    /// `[engine.host_tier]`: host memory for KV blocks. Default: none.
    pub host_tier: Option<HostTierConfig>,
    /// `[engine.disk_tier]`: a disk for KV blocks, below host memory. Default: none.
    pub disk_tier: Option<DiskTierConfig>,
    /// `[engine.peer_tier]`: blocks that other workers have are fetched from them. Default: none.
    pub peer_tier: Option<PeerTierConfig>,
    /// `[engine.speculation]`: speculative decoding. Default: none.
    pub speculation: Option<SpeculationConfig>,
    /// `[engine.lora]`: limits of LoRA adapters, and the time to load them. Default: none.
    pub lora: Option<LoraConfig>,
    /// `[engine.encoder]`: the encoder of images. Default: none.
    pub encoder: Option<EncoderConfig>,
    /// Time from a worker's start until it takes requests, s. Default 0.
    pub startup_s: f64,
    /// Natural length of an answer, tokens: drawn per request from its seed, unless the request
    /// sets `ignore_eos`.
    pub output_len: OutputLen,
    /// `[engine.timing]`
    pub timing: TimingConfig,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            block_size: 16,
            num_gpu_blocks: 16_384,
            max_num_seqs: 256,
            max_num_batched_tokens: 8_192,
            max_model_len: 32_768,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            scheduling_policy: SchedulingPolicy::Fcfs,
            async_scheduling: true,
            long_prefill_token_threshold: 0,
            long_prefill_token_threshold_adaptive: false,
            max_num_active_seqs: None,
            max_num_scheduled_tokens: None,
            scheduler_reserve_full_isl: true,
            tensor_parallel_size: 1,
            pipeline: None,
            data_parallel_size: 1,
            data_parallel_barrier: false,
            enable_expert_parallel: false,
            expert_imbalance: None,
            gpu_memory_utilization: 0.9,
            kv_cache_dtype: Dtype::Bf16,
            host_tier: None,
            disk_tier: None,
            peer_tier: None,
            speculation: None,
            lora: None,
            encoder: None,
            startup_s: 0.0,
            output_len: OutputLen::default(),
            timing: TimingConfig::default(),
        }
    }
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

/// Pipeline parallelism: each stage has some of the layers, and passes them on to the next.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineConfig {
    /// Layers of each stage, in order. At least two stages.
    pub layers: Vec<u32>,
    /// Time to send one token's activations to the next stage, ns.
    pub send_ns_per_token: f64,
    /// Time from the end of a stage until the first of its bytes arrives, ns.
    pub latency_ns: f64,
}

impl PipelineConfig {
    /// Number of stages.
    pub fn stages(&self) -> u32 {
        u32::try_from(self.layers.len()).unwrap_or(u32::MAX)
    }
}

/// Host memory of one rank for KV blocks that its GPUs evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTierConfig {
    /// Blocks that fit.
    pub blocks: u64,
    /// Time to copy one of them to the GPUs, ns.
    pub load_ns_per_block: u64,
    /// Time from the decision to load until the first byte, ns.
    pub latency_ns: u64,
}

/// How a rank fetches KV blocks that other ranks of its pool have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerTierConfig {
    /// Time from the decision to fetch until the other rank begins to send, ns.
    pub latency_ns: u64,
}

/// Disk of one rank for KV blocks that its host memory evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskTierConfig {
    /// Blocks that fit.
    pub blocks: u64,
    /// Time to read one of them into host memory, ns.
    pub load_ns_per_block: u64,
    /// Time to write one, ns.
    pub store_ns_per_block: u64,
    /// Time from the decision to read until the first byte, ns.
    pub latency_ns: u64,
}

/// LoRA adapters of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraConfig {
    /// Adapters in a step, and on the GPUs.
    pub max_loras: u32,
    /// Adapters in host memory, those on the GPUs included.
    pub max_cpu_loras: u32,
    /// Time to load one into host memory, ns.
    pub load_ns: u64,
    /// Time to copy one from there to the GPUs, ns.
    pub activate_ns: u64,
}

/// The encoder of a multimodal model, on the GPUs of its engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EncoderConfig {
    /// Tokens of output that a pass may compute.
    pub budget_tokens: u32,
    /// Tokens of output that are kept.
    pub cache_tokens: u32,
    /// An input is not divided between passes.
    pub whole_inputs: bool,
    /// Time of each input, ns.
    pub input_ns: f64,
    /// Time of each token of output, ns.
    pub token_ns: f64,
}

/// Speculative decoding: tokens that are drafted, and verified in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculationConfig {
    /// The drafter.
    pub method: SpeculationMethod,
    /// For each token of a draft, the share of drafts in which it is accepted. At least one; none is larger than the
    /// one before it.
    pub acceptance: Vec<f64>,
    /// Time of drafting in each step, ns.
    pub draft_ns: f64,
    /// The same as a share of the step's time without it.
    pub draft_share: f64,
}

impl SpeculationConfig {
    /// Tokens of a draft.
    pub fn tokens(&self) -> u32 {
        u32::try_from(self.acceptance.len()).unwrap_or(u32::MAX)
    }
}

/// A drafter, by vLLM's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeculationMethod {
    /// A head on the model's hidden states (EAGLE, EAGLE 3).
    Eagle,
    /// The model's own layers for it (multi-token prediction).
    Mtp,
    /// A smaller model.
    DraftModel,
    /// Earlier occurrences of the last tokens.
    Ngram,
}

impl SpeculationMethod {
    /// Whether drafted tokens have keys and values of the drafter, for which blocks are taken in advance.
    pub fn has_kv_cache(self) -> bool {
        self != SpeculationMethod::Ngram
    }
}

/// Distribution of natural answer lengths, tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum OutputLen {
    /// A constant length.
    Constant(u32),
    /// Log-normal with the given mean and coefficient of variation; at least 1.
    LogNormal {
        /// Mean, tokens.
        mean: f64,
        /// Standard deviation over mean.
        cv: f64,
    },
}

impl Default for OutputLen {
    fn default() -> Self {
        OutputLen::LogNormal {
            mean: 256.0,
            cv: 0.7,
        }
    }
}

/// `[engine.timing]`: the duration of a pass.
#[derive(Clone, Debug, PartialEq)]
pub enum TimingConfig {
    /// A constant duration, ns.
    Constant {
        /// Duration of a pass, ns.
        step_ns: u64,
    },
    /// `base + per_prefill_token·p + per_prefill_pair·a + per_decode_token·d + per_sequence·s +
    /// per_context_token·c`, ns.
    Linear {
        /// Fixed cost of a pass, ns.
        base_ns: f64,
        /// Per prompt token computed, ns.
        per_prefill_token_ns: f64,
        /// Per (query, key) pair that causal attention scores for prompts, ns.
        per_prefill_pair_ns: f64,
        /// Per sequence that decodes, ns.
        per_decode_token_ns: f64,
        /// Per sequence in the pass, ns.
        per_sequence_ns: f64,
        /// Per token of context attended to by decoding sequences, ns.
        per_context_token_ns: f64,
        /// Time of a request outside of passes: HTTP, tokenizer, hops between processes, ns.
        api_ns: f64,
        /// The same per token of the prompt, ns.
        api_prompt_token_ns: f64,
    },
    /// The model's shape and the GPU's peaks, with overheads, efficiencies and residuals of a profile
    /// of measured deployments.
    Calibrated {
        /// The GPU: a preset (`slipstream presets`), or a table `[gpu.NAME]` of the file.
        gpu: Gpu,
        /// Format of the weights. Default: the checkpoint's.
        dtype: Dtype,
        /// The framework whose overheads apply.
        framework: Framework,
        /// A profile of `slipstream calibrate`; `None`: the built-in one.
        profile: Option<PathBuf>,
    },
    /// From the model's shape and the GPU's peaks alone.
    Roofline {
        /// The GPU: a preset (`slipstream presets`), or a table `[gpu.NAME]` of the file.
        gpu: Gpu,
        /// Format of the weights: `bf16` has 2 bytes, `fp8` 1. Default: the checkpoint's.
        dtype: Dtype,
    },
    /// A CSV grid of measured passes.
    Table {
        /// The file.
        path: PathBuf,
    },
}

impl Default for TimingConfig {
    fn default() -> Self {
        TimingConfig::Calibrated {
            gpu: preset::gpu("h100-sxm").expect("it is a preset").clone(),
            dtype: Dtype::Bf16,
            framework: Framework::Vllm,
            profile: None,
        }
    }
}

/// Serving framework; each has overheads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    TrtLlm,
}

impl Framework {
    /// All of them, in the order of a profile's parameters.
    pub const ALL: [Framework; 3] = [Framework::Vllm, Framework::Sglang, Framework::TrtLlm];

    /// Word in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Framework::Vllm => "vllm",
            Framework::Sglang => "sglang",
            Framework::TrtLlm => "trtllm",
        }
    }

    /// The framework called `name`, in any case, with or without hyphens.
    pub fn named(name: &str) -> Option<Framework> {
        let letters = name.chars().filter(char::is_ascii_alphanumeric);
        let name: String = letters.map(|c| c.to_ascii_lowercase()).collect();
        let name = match &*name {
            "tensorrtllm" | "trt" => "trtllm",
            name => name,
        };
        Framework::ALL.into_iter().find(|f| f.name() == name)
    }
}

/// Number format of weights or KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtype {
    /// 16 bits.
    #[default]
    Bf16,
    /// 8 bits, floating point; scales per tensor, channel or block of 128.
    Fp8,
    /// 8 bits, integer.
    Int8,
    /// 4 bits, integer, with a 16-bit scale per group of 64: GPTQ, AWQ, compressed-tensors.
    Int4,
    /// 4 bits, floating point, with an FP8 scale per 16 numbers.
    Nvfp4,
    /// 4 bits, floating point, with an 8-bit exponent per 32 numbers.
    Mxfp4,
}

impl Dtype {
    /// Bytes of one number, its share of the scales included if there is one per group of numbers.
    pub fn bytes(self) -> f64 {
        match self {
            Dtype::Bf16 => 2.0,
            Dtype::Fp8 | Dtype::Int8 => 1.0,
            Dtype::Int4 | Dtype::Mxfp4 => 0.53125,
            Dtype::Nvfp4 => 0.5625,
        }
    }

    /// All of them.
    pub const ALL: [Dtype; 6] = [
        Dtype::Bf16,
        Dtype::Fp8,
        Dtype::Int8,
        Dtype::Int4,
        Dtype::Nvfp4,
        Dtype::Mxfp4,
    ];

    /// Word in files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::Fp8 => "fp8",
            Dtype::Int8 => "int8",
            Dtype::Int4 => "int4",
            Dtype::Nvfp4 => "nvfp4",
            Dtype::Mxfp4 => "mxfp4",
        }
    }
}
