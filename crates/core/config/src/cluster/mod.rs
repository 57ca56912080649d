//! The cluster file, resolved: `serve` and `simulate` build their cluster from it.
//!
//! These are plain values with defaults. [`file`](mod@file) reads them from TOML, and reports all mistakes
//! together, with lines. Each key is declared once, by [`section!`](crate::doc), with its default, its bounds and the
//! effect of values that are too small or too large; [`keys`] has all of them, and `docs/cluster-file.md` is generated
//! from it.

mod autoscale;
mod engine;
mod event;
pub mod file;
mod gpu;
mod host;
pub mod keys;
mod kv;
mod live;
mod model;
mod models;
mod network;
mod pool;
mod router;
mod share;
#[cfg(test)]
mod tests;
mod upstream;

use std::path::Path;

use crate::doc::Doc;
use slipstream_base::{Role, WorkerId};

pub use autoscale::{AutoscaleConfig, AutoscalePolicy};
pub use engine::{
    DiskTierConfig, Dtype, EncoderConfig, EngineConfig, Framework, HostTierConfig, LoraConfig,
    OutputLen, PeerTierConfig, PipelineConfig, SchedulingPolicy, SpeculationConfig,
    SpeculationMethod, TimingConfig,
};
pub use event::{Fault, FaultEvent};
pub use host::{HostConfig, HostMode, HostScheduler, HostThreads, WakeMechanism};
pub use kv::{HandOver, KvConfig};
pub use live::{AutoscaleOutput, EventBus, EventsConfig, FaultsConfig, LiveConfig};
pub use model::ModelConfig;
pub use network::{NetworkConfig, NetworkMode};
pub use pool::PoolConfig;
pub use router::{POLICIES, RouterConfig, RouterPolicy};
pub use share::{ShareConfig, SharingPool};
pub use upstream::{
    BOOTSTRAP_PORT, EngineTls, EngineUrl, HttpEngines, KubernetesConfig, KvProtocol, OutlierConfig,
    PoolTraffic, Resume, UpstreamConfig,
};

/// A day, s: the longest time of most keys.
const DAY_S: f64 = 86_400.0;

/// A year, s: a longer time is an error in the unit, and products with 1e9 ns must fit.
const TIME_S_MAX: f64 = DAY_S * 366.0;

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
