//! `[share.NAME]`: GPUs that pools share by turns.

use super::{Cluster, EngineConfig, HostMode, NetworkMode, PoolConfig, TimingConfig};
use crate::doc::{Origin, Table, optional, required, section, value};
use slipstream_base::Role;
use slipstream_base::text::counted;
use slipstream_base::width::round_u64;

/// GPUs that several pools share: worker *i* of each is on the same ones. One model at a time is awake there.
#[derive(Clone, Debug, PartialEq)]
pub struct ShareConfig {
    /// The NAME of `[share.NAME]`.
    pub name: String,
    /// Its pools, in the order of its list; the first of a worker's is awake at the start.
    pub pools: Vec<SharingPool>,
    /// Time that a model stays awake while requests for another one wait, if it has work, ns. At least 1 ms.
    pub turn_ns: u64,
}

/// A pool that shares its GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingPool {
    /// Its place in [`Cluster::pools`].
    pub pool: usize,
    /// Time to put a worker to sleep, ns.
    pub sleep_ns: u64,
    /// Time to wake it up, ns.
    pub wake_ns: u64,
}

impl Cluster {
    /// Each pool with the GPUs that it has in addition to those of the pools before it: those of a share count once.
    pub fn gpus_by_pool(&self) -> impl Iterator<Item = (&PoolConfig, u64)> {
        let of = |(at, pool): (usize, &PoolConfig)| {
            let share = self.share_of(at);
            let before = share.into_iter().flat_map(|share| &share.pools);
            let before = before.filter(|before| before.pool < at);
            let workers = before.map(|before| self.pools[before.pool].workers);
            let more = pool.workers.saturating_sub(workers.max().unwrap_or(0));
            u64::from(more) * u64::from(pool.engine.gpus())
        };
        (self.pools.iter().enumerate()).map(move |(at, pool)| (pool, of((at, pool))))
    }

    /// The share that the pool at `at` is in.
    pub fn share_of(&self, at: usize) -> Option<&ShareConfig> {
        let has = |share: &&ShareConfig| share.pools.iter().any(|of| of.pool == at);
        self.shares.iter().find(has)
    }
}

/// Longest time of a key in ms: a day.
const MS_MAX: f64 = 86_400e3;

const WAKE_REMEDY: &str = "set the rate at which weights come back to a GPU: of host memory (level 1), such as \
     `wake_bytes_per_s = 20e9` for PCIe 4.0 x16, or of the disk (level 2), such as 3e9";

section! {
    keys ShareKeys of "share.NAME" {
        /// Pools that share GPUs: worker i of each is on the same ones. One of their models is awake there, and the
        /// others sleep ([rules](twin.md#shared-gpus)).
        ///
        /// Their workers need equal GPUs, as many each, and models of different names. GPUs and prices count them
        /// once.
        key pools: Vec<String> = required(
            "list the pools that share GPUs, such as `pools = [\"small\", \"large\"]`",
            Vec::new(),
        ).with_description("list of pools, 2 or more").with_default_text("required");
        /// vLLM's sleep levels: 1 keeps the weights of a model that sleeps in host memory, 2 drops them. Both drop
        /// its KV cache.
        ///
        /// 1: the host needs memory for the weights of all models, which is not checked. 2: weights come from the
        /// disk.
        key level: u32 = value(1).within(1..=2).with_description("1 or 2");
        /// Rate at which weights come back to each GPU. A worker wakes in `wake_ms` plus its weights per GPU over
        /// this rate.
        ///
        /// High: swaps look free. Level 1 has the rate of the GPU's link to the host, level 2 that of the disk.
        key wake_bytes_per_s: f64 = required(WAKE_REMEDY, 20e9).within(1e6..=1e15)
            .unit("bytes/s").with_default_text("required");
        /// Rate at which weights leave each GPU for host memory. A worker falls asleep in `sleep_ms` plus its weights
        /// per GPU over this rate; with level 2 in `sleep_ms`.
        ///
        /// As of `wake_bytes_per_s`.
        key sleep_bytes_per_s?: f64 = optional().within(1e6..=1e15)
            .unit("bytes/s").note("level 1").with_default_text("`wake_bytes_per_s`");
        /// Time to wake up besides the weights: allocations, the engine's loop, a first step that is slower.
        ///
        /// Low: the first token after a swap is too early.
        key wake_ms: f64 = value(0.0).within(0.0..=MS_MAX).unit("ms");
        /// Time to fall asleep besides the weights.
        ///
        /// As of `wake_ms`.
        key sleep_ms: f64 = value(0.0).within(0.0..=MS_MAX).unit("ms");
        /// Time that a model which has work stays awake while requests for another one wait. Then it admits no more,
        /// finishes what runs, and sleeps.
        ///
        /// Low: most of the time goes to swaps. High: requests for the other models wait long.
        key turn_ms: f64 = value(5_000.0).within(1.0..=MS_MAX).unit("ms");
    }
}

pub(super) fn read_share(name: &str, t: &Table<'_>, pools: &[PoolConfig]) -> ShareConfig {
    let names = ShareKeys::pools().read(t);
    let mut places: Vec<usize> = Vec::new();
    for of in &names {
        match pools.iter().position(|pool| pool.name == *of) {
            None => t.error(
                "pools",
                format!("`pools` of share `{name}` has `{of}`, and there is no [pool.{of}]"),
                "list names of pools of this file",
            ),
            Some(at) if places.contains(&at) => t.error(
                "pools",
                format!("`pools` of share `{name}` has `{of}` twice"),
                "list each pool once",
            ),
            Some(at) => places.push(at),
        }
    }
    if names.len() < 2 && t.has("pools") {
        t.error(
            "pools",
            format!(
                "share `{name}` has {}, but GPUs are shared by two or more",
                counted(names.len() as u64, "pool")
            ),
            "list two pools or more, or remove the share",
        );
    }
    let level: u32 = ShareKeys::level().read(t);
    let wake_bytes_per_s = ShareKeys::wake_bytes_per_s().read(t);
    let sleep_bytes_per_s = if level == 1 {
        let origin = Origin::Derived("`wake_bytes_per_s`".into());
        let rate = ShareKeys::sleep_bytes_per_s().field(t);
        rate.or_from(origin, wake_bytes_per_s)
    } else {
        t.unused("sleep_bytes_per_s", "level", "level 2 drops the weights");
        f64::INFINITY
    };
    let wake_ms = ShareKeys::wake_ms().read(t);
    let sleep_ms = ShareKeys::sleep_ms().read(t);
    let turn_ms = ShareKeys::turn_ms().read(t);
    let sharing = |at: usize| {
        let weights = weight_bytes(&pools[at]);
        SharingPool {
            pool: at,
            sleep_ns: round_u64(sleep_ms * 1e6 + weights / sleep_bytes_per_s * 1e9),
            wake_ns: round_u64(wake_ms * 1e6 + weights / wake_bytes_per_s * 1e9),
        }
    };
    ShareConfig {
        name: name.to_owned(),
        pools: places.into_iter().map(sharing).collect(),
        turn_ns: round_u64(turn_ms * 1e6),
    }
}

/// Bytes of weights on each GPU of a worker: of its largest stage, if it is a pipeline.
fn weight_bytes(pool: &PoolConfig) -> f64 {
    let (shape, engine) = (&pool.model.shape, &pool.engine);
    let tensor = engine.tensor_parallel_size;
    let experts = tensor * engine.data_parallel_size;
    pool.formats().weight_bytes(shape, tensor, experts)
}

/// The name of a pool's GPU, if its step times state one.
fn gpu_of(engine: &EngineConfig) -> Option<&str> {
    match &engine.timing {
        TimingConfig::Roofline { gpu, .. } | TimingConfig::Calibrated { gpu, .. } => {
            Some(&gpu.name)
        }
        _ => None,
    }
}

/// Refuses a pool whose workers have other GPUs than those of the share's first pool.
fn check_alike(error: &dyn Fn(String, &str), name: &str, first: &PoolConfig, pool: &PoolConfig) {
    let (mine, theirs) = (pool.engine.gpus(), first.engine.gpus());
    if mine != theirs {
        error(
            format!(
                "share `{name}`: a worker of pool `{}` has {}, and one of pool `{}` has {}, but worker i of each \
                 is on the same GPUs",
                first.name,
                counted(theirs.into(), "GPU"),
                pool.name,
                counted(mine.into(), "GPU"),
            ),
            "give their engines one `tensor_parallel_size`, or remove a pool from the share",
        );
    }
    if let (Some(mine), Some(theirs)) = (gpu_of(&pool.engine), gpu_of(&first.engine))
        && mine != theirs
    {
        error(
            format!(
                "share `{name}`: pool `{}` has GPUs of kind {theirs}, and pool `{}` of kind {mine}, but worker i \
                 of each is on the same GPUs",
                first.name, pool.name,
            ),
            "set one `engine.timing.gpu`, or remove a pool from the share",
        );
    }
}

/// Pools of a share have equal GPUs, other models, and nothing that is not modelled for models that sleep.
pub(super) fn check_shares(
    root: &Table<'_>,
    shares: &[ShareConfig],
    pools: &[PoolConfig],
    (network, host): (NetworkMode, HostMode),
) {
    let Some(any) = shares.first() else {
        return;
    };
    let refused = |key: &str, what: &str, hint: &str| {
        let message = format!(
            "{what} with GPUs that pools share (share `{}`) is not modelled",
            any.name
        );
        root.error(key, message, hint);
    };
    if network != NetworkMode::None {
        refused("network", "`network.mode`", "set `network.mode = \"none\"`");
    }
    if host != HostMode::None {
        refused("host", "`host.mode`", "set `host.mode = \"none\"`");
    }
    let mut taken: Vec<(usize, &str)> = Vec::new();
    for share in shares {
        let name = &share.name;
        let error = |message: String, hint: &str| root.error("share", message, hint);
        for (place, of) in share.pools.iter().enumerate() {
            let pool = &pools[of.pool];
            if let Some((_, other)) = taken.iter().find(|(at, _)| *at == of.pool) {
                error(
                    format!(
                        "pool `{}` is in share `{other}` and in share `{name}`",
                        pool.name
                    ),
                    "list it in one of them",
                );
            }
            taken.push((of.pool, name));
            check_pool(&error, name, pool);
            check_alike(&error, name, &pools[share.pools[0].pool], pool);
            let before = share.pools[..place].iter().map(|of| &pools[of.pool]);
            if let Some(same) = before
                .into_iter()
                .find(|before| before.model.name == pool.model.name)
            {
                error(
                    format!(
                        "share `{name}`: pools `{}` and `{}` both serve `{}`, which would take turns with itself",
                        same.name, pool.name, pool.model.name
                    ),
                    "set `pool.NAME.model`, or remove a pool from the share",
                );
            }
        }
    }
}

fn check_pool(error: &dyn Fn(String, &str), share: &str, pool: &PoolConfig) {
    let engine = &pool.engine;
    for (asked, what, hint) in [
        (
            pool.engines.is_some(),
            "real engines",
            "remove it from the share",
        ),
        (
            pool.role != Role::Both,
            "a `role` other than \"both\"",
            "remove `role`, or remove the pool from the share",
        ),
        (
            engine.data_parallel_size > 1,
            "`data_parallel_size` above 1",
            "use more workers instead",
        ),
        (
            engine.pipeline.is_some(),
            "`pipeline_parallel_size` above 1",
            "use `tensor_parallel_size` instead",
        ),
        (
            engine.host_tier.is_some(),
            "KV blocks in host memory",
            "remove [engine.host_tier]",
        ),
    ] {
        if asked {
            error(
                format!(
                    "share `{share}`: pool `{}` has {what}, which is not modelled for models that take turns",
                    pool.name
                ),
                hint,
            );
        }
    }
}
