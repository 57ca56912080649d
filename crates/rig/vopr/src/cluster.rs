//! The clusters that schedules run on.

use std::io;
use std::path::Path;
use std::sync::Arc;

use slipstream_base::Role;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::{Cluster, OutputLen, RouterPolicy, TimingConfig, file};
use slipstream_config::doc::Doc;
use slipstream_frontend::text::TextModel;

use crate::plan::{Policy, Pools, Shape};

/// Shared by all schedules, because it takes long to make.
#[derive(Clone)]
pub struct Shared {
    pub(crate) text: Arc<TextModel>,
    whole: Cluster,
    apart: Cluster,
}

impl Default for Shared {
    fn default() -> Self {
        Shared::new()
    }
}

impl Shared {
    /// Tables of the tokenizer, and cluster files.
    pub fn new() -> Shared {
        const HEAD: &str = "[model]\nname = \"m\"\n[engine]\nblock_size = 16\nnum_gpu_blocks = 64\n\
             max_model_len = 1024\n[network]\nmode = \"flows\"\n[router]\n\
             remote_prefill_tokens_min = 16\n";
        const TIMING: &str = "[engine.timing]\nkind = \"constant\"\nstep_ns = 1_000_000\n";
        let cluster = |pools: &str| {
            let text = format!("{HEAD}{pools}{TIMING}");
            let no_file = |_: &Path| Err(io::ErrorKind::NotFound.into());
            let doc = Doc::parse("cluster.toml", text.as_bytes());
            file::read(doc, no_file).unwrap_or_else(|e| panic!("{e}")).0
        };
        Shared {
            text: Arc::new(TextModel::builtin()),
            whole: cluster("[pool.a]\nworkers = 1\n"),
            apart: cluster(
                "[pool.p]\nrole = \"prefill\"\nworkers = 1\n[pool.d]\nrole = \"decode\"\nworkers = 1\n",
            ),
        }
    }
}

/// The cluster of a schedule.
pub(crate) fn cluster_of(shape: &Shape, shared: &Shared) -> Cluster {
    let mut cluster = match shape.pools {
        Pools::Whole => shared.whole.clone(),
        _ => shared.apart.clone(),
    };
    let workers = to_u32(shape.worker_count());
    let prefill = to_u32(shape.prefill_workers());
    for pool in &mut cluster.pools {
        pool.workers = match pool.role {
            Role::Prefill => prefill,
            _ => workers - prefill,
        };
        let engine = &mut pool.engine;
        engine.num_gpu_blocks = shape.blocks;
        engine.max_model_len = shape.blocks * 16;
        engine.max_num_seqs = shape.seqs;
        engine.max_num_batched_tokens = shape.batched_tokens;
        engine.startup_s = shape.startup_ms as f64 / 1e3;
        engine.output_len = OutputLen::LogNormal {
            mean: f64::from(shape.answer_tokens),
            cv: 0.7,
        };
        engine.timing = TimingConfig::Constant {
            step_ns: shape.step_ns,
        };
    }
    cluster.kv.hand_over = match shape.pools {
        Pools::Push => slipstream_config::cluster::HandOver::Push,
        _ => slipstream_config::cluster::HandOver::Pull,
    };
    cluster.network.nic_bits_per_s = shape.nic_bits_per_s as f64;
    cluster.router.queue_max = to_u32(shape.queue_max);
    cluster.router.busy_kv_share = f64::from(shape.busy_percent) / 100.0;
    cluster.router.policy = match shape.policy {
        Policy::Kv => RouterPolicy::Kv,
        Policy::RoundRobin => RouterPolicy::RoundRobin,
    };
    cluster
}
