//! Reads the cluster file into a [`Cluster`].
//!
//! Layers, from lowest to highest: defaults, the file, the environment, flags. Within one layer and
//! across layers, a pool's own `[pool.NAME.engine]` overrides `[engine]`, which is the base of all
//! pools. So do `[pool.NAME.autoscale]` and `[pool.NAME.model]`.
//!
//! ```
//! use slipstream_config::cluster::file;
//! use slipstream_config::doc::Doc;
//!
//! let mut doc = Doc::parse("cluster.toml", b"[pool.main]\nworkers = 8\n");
//! doc.set("engine.max_num_seqs=64");
//! let (cluster, settings) = file::read(doc, |path| std::fs::read(path)).unwrap();
//! assert_eq!(cluster.pools[0].engine.max_num_seqs, 64);
//! print!("{}", settings.to_toml()); // what `--print-config` shows
//! ```

use std::io;
use std::path::Path;

use super::event::read_event_list;
use super::gpu::{read_gpu, read_link};
use super::host::{check_host, read_host};
use super::live::read_live;
use super::model::read_model;
use super::network::{check_hosts, check_links, read_network};
use super::pool::{
    BaseTables, check_engines, check_kv_protocols, check_models, check_roles, check_several_models,
    read_pool,
};
use super::share::{check_shares, read_share};
use super::{Cluster, KvConfig, PoolConfig, RouterConfig, UpstreamConfig, WORKERS_MAX};
use crate::doc::{Diagnostics, Doc, Section, Settings, Table};

/// Prefix of the environment variables that [`Doc::env`] reads for a cluster:
/// `SLIPSTREAM_ENGINE__MAX_NUM_SEQS`.
pub const ENV_PREFIX: &str = "SLIPSTREAM_";

/// Sections of other files that users may look for here.
const ELSEWHERE: &[&str] = &["prices", "power"];

/// Keys by which a cluster file is known.
pub const TELLING_KEYS: [&str; 5] = ["model", "engine", "pool", "router", "live"];

/// Top-level keys that only files of `slipstream net run` have.
pub const NETWORK_KEYS: [&str; 7] = [
    "topology",
    "edges",
    "switch",
    "flow",
    "flow_set",
    "flow_list",
    "collective",
];

/// The pools, with what they refer to: models, GPUs and links.
fn read_pools(
    root: &Table<'_>,
    load: &mut impl FnMut(&Path) -> io::Result<Vec<u8>>,
) -> Vec<PoolConfig> {
    let model = root.table("model", |t| read_model(t, load));
    let links = root.tables("link", read_link);
    let gpus = root.tables("gpu", |name, t| read_gpu(name, t, &links));
    let base = BaseTables {
        engine: root.base("engine"),
        autoscale: root.base("autoscale"),
        model: root.base("model"),
    };
    let mut pools = root.tables("pool", |name, t| {
        read_pool(name, t, &base, (&model, &gpus), load)
    });
    if pools.is_empty() {
        // As if the file contained `[pool.main]`.
        let whole = root.table("pool", |pools| {
            pools.table("main", |t| {
                read_pool("main", t, &base, (&model, &gpus), load)
            })
        });
        pools.push(whole);
    }
    pools
}

/// Refuses pools of several block sizes.
fn check_block_sizes(root: &Table<'_>, pools: &[PoolConfig]) {
    let block_size = pools[0].engine.block_size;
    if let Some(other) = pools
        .iter()
        .find(|pool| pool.engine.block_size != block_size)
    {
        let message = format!(
            "pool `{}` has blocks of {block_size} tokens, but pool `{}` of {}: one router needs \
             one block size",
            pools[0].name, other.name, other.engine.block_size
        );
        root.error("pool", message, "set `block_size` once, in `[engine]`");
    }
}

/// Reads `doc` as a cluster. `load` reads the files that it refers to (`model.config`,
/// `engine.timing.path`); no other file is opened.
///
/// The [`Settings`] hold every effective value and its origin.
///
/// # Errors
/// All mistakes together, each with place and remedy. Nothing was started.
pub fn read(
    doc: Doc,
    mut load: impl FnMut(&Path) -> io::Result<Vec<u8>>,
) -> Result<(Cluster, Settings), Diagnostics> {
    doc.refuse_kind(
        &TELLING_KEYS,
        &crate::workload_file::TELLING_KEYS,
        "this is a workload file, not a cluster file",
        "give it with `--workload`",
    )?;
    doc.refuse_kind(
        &TELLING_KEYS,
        &NETWORK_KEYS,
        "this is a file of `slipstream net run`, not a cluster file",
        "give it to that, or name it with `network.background`",
    )?;
    doc.read(|root| {
        for section in ELSEWHERE {
            root.refuse(
                section,
                "does not belong in a cluster file",
                "write it to a file of its own, and give that to `slipstream plan` or `sweep` with `--prices FILE`",
            );
        }
        let pools = read_pools(root, &mut load);
        let model = pools[0].model.clone();
        let workers: u64 = pools.iter().map(|pool| u64::from(pool.workers)).sum();
        if workers > u64::from(WORKERS_MAX) {
            let message =
                format!("the pools have {workers} workers, but must have at most {WORKERS_MAX}");
            root.error("pool", message, "lower `workers`");
        }
        check_models(root, &pools);
        check_roles(root, &pools);
        check_engines(root, &pools);
        let router = root.table("router", RouterConfig::read);
        check_kv_protocols(root, &pools, &router);
        check_block_sizes(root, &pools);
        check_several_models(root, &pools, root.has("event"));
        let network = root.table("network", read_network);
        let host = root.table("host", read_host);
        let shares = root.tables("share", |name, t| read_share(name, t, &pools));
        check_shares(root, &shares, &pools, (network.mode, host.mode));
        let kv = root.table("kv", KvConfig::read);
        let events = read_event_list(root, &pools);
        check_links(root, &pools, &network, &events);
        check_hosts(root, &pools, &network);
        check_host(root, &host, &network, &pools);
        Cluster {
            model,
            pools,
            shares,
            router,
            network,
            host,
            kv,
            events,
            live: root.table("live", read_live),
            upstream: root.table("upstream", UpstreamConfig::read),
        }
    })
}
