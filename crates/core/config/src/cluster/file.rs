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

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use super::live;
use super::share::{check_shares, read_share};
use super::upstream::{HttpEngines, KvProtocol, read_engines, read_upstream};
use super::{
    AutoscaleConfig, AutoscalePolicy, Cluster, DiskTierConfig, Dtype,
    EncoderConfig, EngineConfig, EngineKind, Fault, FaultEvent, Framework, HandOver, HostConfig, HostMode, HostScheduler, HostThreads,
    HostTierConfig, KvConfig, LoraConfig, ModelConfig, NetworkConfig, NetworkMode,
    OutputLen, PeerTierConfig, PipelineConfig, PoolConfig, RouterConfig, SchedulingPolicy,
    SpeculationConfig, SpeculationMethod, TIME_S_MAX, TimingConfig, WakeMechanism,
};
use crate::doc::{Diagnostics, Doc, Origin, Section, Settings, Table, suggestion};
use crate::preset::{self, Formats, Gpu, Link, ModelFiles, ModelShape};
use slipstream_base::Role;
use slipstream_base::text::{counted, several};
use slipstream_base::width::{floor_u64, round_u64, to_u32};

/// Prefix of the environment variables that [`Doc::env`] reads for a cluster:
/// `SLIPSTREAM_ENGINE__MAX_NUM_SEQS`.
pub const ENV_PREFIX: &str = "SLIPSTREAM_";

const ROLES: &[(&str, Role)] = &[
    ("both", Role::Both),
    ("prefill", Role::Prefill),
    ("decode", Role::Decode),
];
const AUTOSCALE: &[(&str, Option<AutoscalePolicy>)] = &[
    ("none", None),
    ("utilization", Some(AutoscalePolicy::Utilization)),
    ("queue", Some(AutoscalePolicy::Queue)),
    ("slo", Some(AutoscalePolicy::Slo)),
    ("predictive", Some(AutoscalePolicy::Predictive)),
    ("custom", Some(AutoscalePolicy::Custom)),
];
/// Limit of the engines behind HTTP, as of `upstream.engines_max`.
const ENGINES_MAX: u32 = 4_096;
/// Observations that the line of policy "predictive" is fitted to, at most.
const TREND_MAX: f64 = 1_000.0;
const SCHEDULING: &[(&str, SchedulingPolicy)] = &[
    ("fcfs", SchedulingPolicy::Fcfs),
    ("priority", SchedulingPolicy::Priority),
];
const NETWORKS: &[(&str, NetworkMode)] = &[
    ("none", NetworkMode::None),
    ("flows", NetworkMode::Flows),
    ("packets", NetworkMode::Packets),
];
const HOSTS: &[(&str, HostMode)] = &[
    ("none", HostMode::None),
    ("ideal", HostMode::Ideal),
    ("threads", HostMode::Threads),
];
const SCHEDULERS: &[(&str, HostScheduler)] = &[
    ("eevdf", HostScheduler::Eevdf),
    ("slipstream", HostScheduler::Slipstream),
];
const WAKE_MECHANISMS: &[(&str, WakeMechanism)] = &[
    ("pipe", WakeMechanism::Pipe),
    ("unix", WakeMechanism::Unix),
    ("tcp", WakeMechanism::Tcp),
    ("epoll", WakeMechanism::Epoll),
    ("eventfd", WakeMechanism::Eventfd),
    ("futex", WakeMechanism::Futex),
];
/// CPUs of a host with threads, and of one of its LLCs, at most: limits of the CPU scheduler.
const HOST_CPUS_MAX: u32 = 1_024;
const LLC_CPUS_MAX: u32 = 64;
const HAND_OVERS: &[(&str, HandOver)] = &[("pull", HandOver::Pull), ("push", HandOver::Push)];
/// Formats of the roofline.
const ROOFLINE_DTYPES: &[(&str, Dtype)] = &[("bf16", Dtype::Bf16), ("fp8", Dtype::Fp8)];
const DTYPES: &[(&str, Dtype)] = &[
    ("bf16", Dtype::Bf16),
    ("fp8", Dtype::Fp8),
    ("int8", Dtype::Int8),
    ("int4", Dtype::Int4),
    ("nvfp4", Dtype::Nvfp4),
    ("mxfp4", Dtype::Mxfp4),
];
const FRAMEWORKS: &[(&str, Framework)] = &[
    ("vllm", Framework::Vllm),
    ("sglang", Framework::Sglang),
    ("trtllm", Framework::TrtLlm),
];
/// `None`: the checkpoint's.
const KV_DTYPES: &[(&str, Option<Dtype>)] = &[
    ("auto", None),
    ("bf16", Some(Dtype::Bf16)),
    ("fp8", Some(Dtype::Fp8)),
];

/// Sections of other files that users may look for here.
const ELSEWHERE: &[&str] = &["prices", "power"];

/// Settings of vLLM that the engine does not model.
const NOT_MODELLED: &[(&str, &str)] = &[
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

/// Limit of workers over all pools; `WorkerId`s are dense and per-worker state is an array.
/// Processes announce their workers with a count of 16 bits.
const WORKERS_MAX: u32 = 65_535;
/// Default of `--peer-deadline`, s.
const PEER_DEADLINE_S: f64 = 5.0;

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
        let model = root.table("model", |t| read_model(t, &mut load));
        let links = root.tables("link", read_link);
        let gpus = root.tables("gpu", |name, t| read_gpu(name, t, &links));
        let base = Bases {
            engine: root.base("engine"),
            autoscale: root.base("autoscale"),
            model: root.base("model"),
        };
        let mut pools = root.tables("pool", |name, t| {
            read_pool(name, t, &base, (&model, &gpus), &mut load)
        });
        if pools.is_empty() {
            // As if the file contained `[pool.main]`.
            let whole = root.table("pool", |pools| {
                pools.table("main", |t| {
                    read_pool("main", t, &base, (&model, &gpus), &mut load)
                })
            });
            pools.push(whole);
        }
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
        let block_size = pools[0].engine.block_size;
        if let Some(other) = pools.iter().find(|pool| pool.engine.block_size != block_size) {
            let message = format!(
                "pool `{}` has blocks of {block_size} tokens, but pool `{}` of {}: one router needs \
                 one block size",
                pools[0].name, other.name, other.engine.block_size
            );
            root.error("pool", message, "set `block_size` once, in `[engine]`");
        }
        check_several_models(root, &pools, root.has("event"));
        let network = root.table("network", read_network);
        let host = root.table("host", read_host);
        let shares = root.tables("share", |name, t| read_share(name, t, &pools));
        check_shares(root, &shares, &pools, (network.mode, host.mode));
        let kv = root.table("kv", |t| KvConfig {
            hand_over: t.choice("hand_over", HAND_OVERS).or(HandOver::Pull),
        });
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
            live: root.table("live", live::read_live),
            upstream: root.table("upstream", read_upstream),
        }
    })
}

/// A name is one model.
fn check_models(root: &Table<'_>, pools: &[PoolConfig]) {
    for (at, pool) in pools.iter().enumerate() {
        let name = &pool.model.name;
        let first = pools[..at].iter().find(|other| other.model.name == *name);
        if let Some(first) = first.filter(|first| first.model != pool.model) {
            let message = format!(
                "pools `{}` and `{}` both serve `{name}`, with other values in `[model]` each: a request for it may \
                 go to either",
                first.name, pool.name
            );
            let hint = format!(
                "set `pool.{}.model.name`, if that is another model",
                pool.name
            );
            root.error("pool", message, hint);
        }
    }
}

/// Parts that are modelled for one model alone.
fn check_several_models(root: &Table<'_>, pools: &[PoolConfig], has_events: bool) {
    let first = &pools[0].model.name;
    let Some(other) = pools.iter().find(|pool| pool.model.name != *first) else {
        return;
    };
    let models = format!("the pools serve `{first}` and `{}`", other.model.name);
    let hint = "remove it, or write a file for each model";
    if has_events {
        let message =
            format!("{models}, and events of clusters with several models are not modelled");
        root.error("event", message, hint);
    }
    for pool in pools {
        let refuse = |what: &str| {
            let message = format!(
                "{models}, and {what} of pool `{}` is not modelled for several models",
                pool.name
            );
            root.error("pool", message, hint);
        };
        if pool.autoscale.is_some() {
            refuse("[autoscale]");
        }
        if pool.engine.peer_tier.is_some() {
            refuse("[engine.peer_tier]");
        }
    }
}

/// Some pool must compute prompts, and some must compute answers; so for each model.
fn check_roles(root: &Table<'_>, pools: &[PoolConfig]) {
    let mirrors = |pool: &PoolConfig| {
        pool.engines
            .as_ref()
            .is_some_and(|of| of.traffic.mirror.is_some())
    };
    if !pools.is_empty() && pools.iter().all(mirrors) {
        root.error(
            "pool",
            "every pool has `mirror`, so no pool answers clients",
            "remove `mirror` from a pool",
        );
    }
    let mut models: Vec<&str> = pools.iter().map(|pool| &*pool.model.name).collect();
    models.sort_unstable();
    models.dedup();
    for model in &models {
        let of_model = if models.len() > 1 {
            format!(" of model `{model}`")
        } else {
            String::new()
        };
        let has = |role| {
            let mut own = pools.iter().filter(|pool| pool.model.name == *model);
            own.any(|pool| pool.role == role)
        };
        if has(Role::Prefill) && !has(Role::Decode) && !has(Role::Both) {
            root.error(
                "pool",
                format!(
                    "every pool's `role`{of_model} is \"prefill\", so no pool generates answers"
                ),
                "add a pool with `role = \"decode\"`",
            );
        }
        if has(Role::Decode) && !has(Role::Prefill) {
            root.error(
                "pool",
                format!(
                    "a pool's `role`{of_model} is \"decode\", but no pool's is \"prefill\" to compute its prompts"
                ),
                "add a pool with `role = \"prefill\"`, or use \"both\"",
            );
        }
    }
}

/// SGLang's engines are started for one role, and speak a protocol of their own: all that take part must be theirs.
fn check_kv_protocols(root: &Table<'_>, pools: &[PoolConfig], router: &RouterConfig) {
    let is_sglang = |pool: &&PoolConfig| {
        let protocol = |of: &HttpEngines| of.kv_protocol.of_kind(of.kind);
        pool.engines.as_ref().map(protocol) == Some(KvProtocol::Sglang)
    };
    // Engines of kind "auto" may turn out to be SGLang's.
    let is_other = |pool: &&PoolConfig| {
        let says_auto =
            |of: &HttpEngines| of.kind == EngineKind::Auto && of.kv_protocol == KvProtocol::Auto;
        !is_sglang(pool) && !pool.engines.as_ref().is_some_and(says_auto)
    };
    let apart = || pools.iter().filter(|pool| pool.role != Role::Both);
    let Some(sglang) = apart().find(is_sglang) else {
        return;
    };
    let name = &sglang.name;
    if let Some(other) = apart().find(is_other) {
        let text = format!(
            "pool `{name}` has SGLang's protocol, and pool `{}` another",
            other.name
        );
        let hint = "give all pools with a role one kind of engine, or serve them with two routers";
        root.error("pool", text, hint);
    }
    if let Some(both) = pools.iter().find(|pool| pool.role == Role::Both) {
        let text = format!(
            "pool `{name}` has SGLang's protocol, and pool `{}` the role \"both\": engines of SGLang either compute \
             prompts for others, or answer such prompts",
            both.name
        );
        let hint = "set `role = \"decode\"`, or serve them with two routers";
        root.error("pool", text, hint);
    }
    if router.remote_prefill_tokens_min > 0 || router.remote_prefill_queue_max > 0 {
        let text = format!(
            "pool `{name}` has SGLang's protocol, so its decode engines cannot compute the prompts that \
             `remote_prefill_tokens_min` and `remote_prefill_queue_max` leave to them"
        );
        root.error("router", text, "remove both keys");
    }
}

/// Real engines answer in bytes and modelled ones in tokens: one server has one of the two.
fn check_engines(root: &Table<'_>, pools: &[PoolConfig]) {
    let real = pools.iter().find(|pool| pool.engines.is_some());
    let modelled = pools.iter().find(|pool| pool.engines.is_none());
    if let (Some(real), Some(modelled)) = (real, modelled) {
        root.error(
            "pool",
            format!(
                "pool `{}` has real engines and pool `{}` modelled ones, and one server cannot have both",
                real.name, modelled.name
            ),
            "run `slipstream serve` with the modelled pool on another port, and list its address among \
             `engines`",
        );
    }
    let mut seen = std::collections::BTreeMap::new();
    for pool in pools {
        for url in pool.engines.iter().flat_map(|engines| &engines.urls) {
            if let Some(other) = seen.insert(url.to_string(), &pool.name)
                && *other != pool.name
            {
                root.error(
                    "pool",
                    format!("`{url}` is in pool `{other}` and in pool `{}`", pool.name),
                    "list each engine once",
                );
            }
        }
    }
}

/// `[[event]]`, sorted by time.
fn read_event_list(root: &Table<'_>, pools: &[PoolConfig]) -> Vec<FaultEvent> {
    let mut events = root.array("event", |_, t| read_event(t, pools));
    events.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    events
}

fn read_event(t: &Table<'_>, pools: &[PoolConfig]) -> FaultEvent {
    const KINDS: &[(&str, Fault)] = &[
        ("crash", Fault::Crash),
        ("drain", Fault::Drain),
        ("slow", Fault::Slow { factor: 1.0 }),
        ("link", Fault::Link { share: 1.0 }),
        ("uplink", Fault::Uplink { leaf: 0, spine: 0 }),
        ("gpu", Fault::Gpu { detect_s: 0.0 }),
        ("kv_loss", Fault::KvLoss { share: 1.0 }),
        ("kv_late", Fault::KvLate { delay_ms: 0.0 }),
        ("frontend", Fault::Frontend),
        (
            "partition",
            Fault::Partition {
                peer_deadline_s: 0.0,
            },
        ),
        (
            "upgrade",
            Fault::Upgrade {
                drain_timeout_s: None,
            },
        ),
    ];
    let kind = t.choice("kind", KINDS).required(
        "set it to crash, drain, slow, link, uplink, gpu, kv_loss, kv_late, frontend, partition or upgrade",
        Fault::Crash,
    );
    let at_s = t
        .get("at_s")
        .within(0.0..=TIME_S_MAX)
        .required("set the time, in seconds from the start", 0.0);
    let until_s: Option<f64> = if matches!(kind, Fault::Upgrade { .. }) {
        t.unused("until_s", "kind", "it ends when the last worker is back");
        None
    } else {
        t.get("until_s").within(0.0..=TIME_S_MAX).optional()
    };
    if let Some(until_s) = until_s.filter(|&until_s| until_s <= at_s) {
        t.error(
            "until_s",
            format!("`until_s` is {until_s}, but it begins at {at_s}"),
            "set a later time, or remove it for an event without end",
        );
    }
    let fault = read_fault(t, kind, at_s, until_s);
    FaultEvent {
        at_s,
        until_s,
        workers: read_event_workers(t, kind, pools),
        fault,
    }
}

/// The fault of `kind`, with its parameters.
fn read_fault(t: &Table<'_>, kind: Fault, at_s: f64, until_s: Option<f64>) -> Fault {
    let only = |key: &str, used: bool, by: &str| {
        if !used {
            t.unused(key, "kind", &format!("only {by} it"));
        }
    };
    only(
        "factor",
        matches!(kind, Fault::Slow { .. }),
        "\"slow\" uses",
    );
    let shares = matches!(kind, Fault::Link { .. } | Fault::KvLoss { .. });
    only("share", shares, "\"link\" and \"kv_loss\" use");
    let uplink = matches!(kind, Fault::Uplink { .. });
    only("leaf", uplink, "\"uplink\" uses");
    only("spine", uplink, "\"uplink\" uses");
    only(
        "detect_s",
        matches!(kind, Fault::Gpu { .. }),
        "\"gpu\" uses",
    );
    let late = matches!(kind, Fault::KvLate { .. });
    only("delay_ms", late, "\"kv_late\" uses");
    let parts = matches!(kind, Fault::Partition { .. });
    only("peer_deadline_s", parts, "\"partition\" uses");
    let upgrades = matches!(kind, Fault::Upgrade { .. });
    only("drain_timeout_s", upgrades, "\"upgrade\" uses");
    let time_s = |key| t.get(key).within(0.0..=TIME_S_MAX);
    match kind {
        Fault::Crash | Fault::Drain | Fault::Frontend => kind,
        Fault::Slow { .. } => Fault::Slow {
            factor: t
                .get("factor")
                .within(0.001..=1e6)
                .required("set the factor by which passes take longer", 1.0),
        },
        Fault::Link { .. } => Fault::Link {
            share: t
                .get("share")
                .within(0.0..=1.0)
                .required("set the remaining share of its rate; 0: it is down", 1.0),
        },
        Fault::Uplink { .. } => Fault::Uplink {
            leaf: t.get("leaf").required("set the leaf switch", 0),
            spine: t.get("spine").or(0),
        },
        Fault::KvLoss { .. } => Fault::KvLoss {
            share: t.get("share").within(0.0..=1.0).or(1.0),
        },
        Fault::KvLate { .. } => Fault::KvLate {
            delay_ms: t
                .get("delay_ms")
                .within(0.0..=3.6e6)
                .required("set the additional delay of its KV events, in ms", 0.0),
        },
        Fault::Gpu { .. } => {
            let detect_s: f64 = time_s("detect_s").or(0.0);
            if let Some(until_s) = until_s.filter(|&until_s| until_s <= at_s + detect_s) {
                t.error(
                    "until_s",
                    format!(
                        "`until_s` is {until_s}, but the worker ends at {} (`at_s` and `detect_s`)",
                        at_s + detect_s
                    ),
                    "set a later time, or remove it for a worker that starts again at once",
                );
            }
            Fault::Gpu { detect_s }
        }
        Fault::Partition { .. } => Fault::Partition {
            peer_deadline_s: time_s("peer_deadline_s").or(PEER_DEADLINE_S),
        },
        Fault::Upgrade { .. } => Fault::Upgrade {
            drain_timeout_s: time_s("drain_timeout_s").optional(),
        },
    }
}

/// The workers of an event.
fn read_event_workers(t: &Table<'_>, kind: Fault, pools: &[PoolConfig]) -> Vec<u32> {
    let total = (pools.iter()).fold(0u32, |total, pool| total.saturating_add(pool.workers));
    let last = total.saturating_sub(1);
    let group = matches!(kind, Fault::Partition { .. });
    let upgrades = matches!(kind, Fault::Upgrade { .. });
    if !group {
        t.unused("workers", "kind", "only \"partition\" uses it");
    }
    if !upgrades {
        t.unused("pool", "kind", "only \"upgrade\" uses it");
    }
    if group {
        let every = |workers: &Vec<u32>| {
            !workers.is_empty() && workers.iter().all(|&worker| worker < total)
        };
        let mut workers: Vec<u32> = t
            .get("workers")
            .check(every, &format!("numbers of workers, each 0 to {last}"))
            .required(
                "set the workers that are cut off, by their numbers over all pools",
                Vec::new(),
            );
        workers.sort_unstable();
        workers.dedup();
        t.unused("worker", "kind", "\"partition\" has `workers`");
        return workers;
    }
    if upgrades {
        t.unused("worker", "kind", "\"upgrade\" has `pool`");
        let names: Vec<&str> = pools.iter().map(|pool| &*pool.name).collect();
        let of: Option<String> = t
            .get("pool")
            .check(
                |name: &String| names.contains(&name.as_str()),
                &format!("the name of a pool: {}", names.join(", ")),
            )
            .optional();
        if total > WORKERS_MAX {
            return Vec::new(); // that is an error already
        }
        let (mut first, mut workers) = (0, Vec::new());
        for pool in pools {
            if of.as_ref().is_none_or(|of| *of == pool.name) {
                workers.extend(first..first + pool.workers);
            }
            first += pool.workers;
        }
        return workers;
    }
    if kind == Fault::Frontend {
        t.unused("worker", "kind", "it is a fault of the frontend");
        return Vec::new();
    }
    if matches!(kind, Fault::Uplink { .. }) {
        t.unused("worker", "kind", "\"uplink\" has `leaf` and `spine`");
        return Vec::new();
    }
    let worker = t
        .get("worker")
        .check(
            |&worker: &u32| worker < total,
            &format!("the number of a worker, 0 to {last}"),
        )
        .required("set the worker, by its number over all pools", 0);
    vec![worker]
}

fn read_network(t: &Table<'_>) -> NetworkConfig {
    let default = NetworkConfig::default();
    // At most a terabyte per millisecond, at least a bit per millisecond.
    const RATE: std::ops::RangeInclusive<f64> = 1e3..=1e16;
    let mode = t.choice("mode", NETWORKS).or(default.mode);
    let packets = mode == NetworkMode::Packets;
    if !packets {
        for key in ["packet_bytes", "reroute_ms", "background"] {
            t.unused(key, "mode", "only \"packets\" uses it");
        }
    }
    let gpus_per_host = t.get("gpus_per_host").within(0..=1_024);
    let gpus_per_host = gpus_per_host.or(default.gpus_per_host);
    if gpus_per_host == 0 {
        for key in ["nics_per_host", "host_bits_per_s"] {
            t.unused(key, "gpus_per_host", "`gpus_per_host` is 0");
        }
    } else if mode == NetworkMode::None {
        t.unused(
            "gpus_per_host",
            "mode",
            "only \"flows\" and \"packets\" use it",
        );
    }
    let network = NetworkConfig {
        mode,
        gpus_per_host,
        nics_per_host: if gpus_per_host == 0 {
            default.nics_per_host
        } else {
            let nics = t.get("nics_per_host").check(
                |&nics: &u32| nics == 0 || gpus_per_host.is_multiple_of(nics),
                &format!(
                    "a divisor of `gpus_per_host`, which is {gpus_per_host}; or 0 for one per GPU"
                ),
            );
            nics.or(default.nics_per_host)
        },
        host_bits_per_s: if gpus_per_host == 0 {
            default.host_bits_per_s
        } else {
            let rate = t.get("host_bits_per_s").within(RATE);
            rate.or(default.host_bits_per_s)
        },
        packet_bytes: if packets {
            let bytes = t.get("packet_bytes").within(256..=65_000);
            bytes.or(default.packet_bytes)
        } else {
            default.packet_bytes
        },
        spines: t.get("spines").within(1..=64).or(default.spines),
        reroute_ms: if packets {
            let ms = t.get("reroute_ms").within(0.0..=1e6);
            ms.or(default.reroute_ms)
        } else {
            default.reroute_ms
        },
        background: if packets {
            t.path("background").optional()
        } else {
            None
        },
        nic_bits_per_s: t
            .get("nic_bits_per_s")
            .within(RATE)
            .or(default.nic_bits_per_s),
        frontend_bits_per_s: t
            .get("frontend_bits_per_s")
            .within(RATE)
            .or(default.frontend_bits_per_s),
        hop_latency_us: t
            .get("hop_latency_us")
            .within(0.0..=1e6)
            .or(default.hop_latency_us),
        workers_per_leaf: t.get("workers_per_leaf").or(default.workers_per_leaf),
        uplink_bits_per_s: t
            .get("uplink_bits_per_s")
            .check(
                |rate: &f64| *rate == 0.0 || RATE.contains(rate),
                "1e3 to 1e16, or 0 for no limit",
            )
            .or(default.uplink_bits_per_s),
        messages: t.get("messages").or(default.messages),
        request_token_bytes: t
            .get("request_token_bytes")
            .within(0..=4096)
            .or(default.request_token_bytes),
        answer_token_bytes: t
            .get("answer_token_bytes")
            .within(0..=65_536)
            .or(default.answer_token_bytes),
    };
    let (frontend, nic) = (network.frontend_bits_per_s, network.nic_bits_per_s);
    if network.spines > 1 && network.uplink_bits_per_s == 0.0 {
        t.error(
            "spines",
            format!("`spines` is {}, and the links to them have no rate", network.spines),
            "set `uplink_bits_per_s` to the total rate of a leaf switch's links to the spines, or remove `spines`",
        );
    }
    if packets && network.messages && frontend > nic {
        t.error(
            "frontend_bits_per_s",
            format!("the frontend's interface has {frontend:e} bits/s, and that of a GPU {nic:e}: packets need interfaces of one rate"),
            "set it to at most `nic_bits_per_s`, or set `mode = \"flows\"`",
        );
    }
    network
}

/// Workers fill whole hosts or parts of one, and collectives between hosts have a form that is modelled.
fn check_hosts(root: &Table<'_>, pools: &[PoolConfig], network: &NetworkConfig) {
    let (of, share) = (network.gpus_per_host, network.gpus_per_nic());
    if of == 0 || network.mode == NetworkMode::None {
        return;
    }
    for pool in pools {
        let (engine, gpus, name) = (&pool.engine, pool.engine.gpus(), &pool.name);
        let shape = &pool.model.shape;
        let error = |message: String, hint: &str| root.error("pool", message, hint);
        if !gpus.is_multiple_of(share) {
            error(
                format!(
                    "a worker of pool `{name}` has {gpus} GPUs, and {share} GPUs share a network interface: workers \
                         with a part of an interface are not modelled"
                ),
                "raise `network.nics_per_host`",
            );
        }
        if network.hosts_of(gpus).is_none() {
            continue;
        }
        let tensor = engine.tensor_parallel_size;
        if !gpus.is_multiple_of(of) || !(tensor.is_multiple_of(of) || of.is_multiple_of(tensor)) {
            error(
                format!(
                    "a worker of pool `{name}` has {gpus} GPUs, {tensor} of which share each layer, and they do not \
                         fill hosts of {of}"
                ),
                "set `network.gpus_per_host` to a divisor or a multiple of `tensor_parallel_size` that divides the GPUs \
                 of a worker",
            );
        }
        let calibrated = matches!(engine.timing, TimingConfig::Calibrated { .. });
        if !calibrated && !matches!(engine.timing, TimingConfig::Roofline { .. }) {
            error(
                format!(
                    "a worker of pool `{name}` has more GPUs than a host, and its step times do not state which part \
                         of them is collectives, which the network is to carry"
                ),
                "set `engine.timing.kind` to \"calibrated\" or \"roofline\", or `network.gpus_per_host = 0`",
            );
        }
        let ranks = engine.data_parallel_size;
        if shape.experts.is_some() && ranks > 1 && engine.pipeline.is_some() {
            error(
                format!(
                    "a worker of pool `{name}` has more GPUs than a host, {ranks} data-parallel ranks with experts, \
                         and a pipeline: exchanges of experts within a stage are not modelled between hosts"
                ),
                "set `pipeline_parallel_size = 1`, or `network.gpus_per_host = 0`",
            );
        }
        if shape.experts.is_some() && ranks > 1 && !engine.enable_expert_parallel {
            error(
                format!(
                    "a worker of pool `{name}` has more GPUs than a host, and its {ranks} data-parallel ranks share \
                         each expert: that gather and scatter is not modelled between hosts"
                ),
                "set `enable_expert_parallel = true`, or `network.gpus_per_host = 0`",
            );
        }
    }
}

/// Links of packets are up or down, and the links between switches that fail exist.
fn check_links(
    root: &Table<'_>,
    pools: &[PoolConfig],
    network: &NetworkConfig,
    events: &[FaultEvent],
) {
    let packets = network.mode == NetworkMode::Packets;
    let error = |message: &str, hint: &str| root.error("event", message, hint);
    for event in events {
        match event.fault {
            Fault::Link { share } if packets && share > 0.0 => error(
                &format!(
                    "an event of kind \"link\" has `share = {share}`, and with `network.mode = \"packets\"` an \
                     interface is up or down"
                ),
                "set `share = 0`, or `network.mode = \"flows\"`, or remove the event",
            ),
            Fault::Link { .. } if packets && event.until_s.is_none() => error(
                "an event of kind \"link\" has no end, and with `network.mode = \"packets\"` the packets of transfers \
                 are sent again until they arrive",
                "set `until_s`, or use an event of kind \"crash\" for a worker that does not come back",
            ),
            Fault::Uplink { leaf, spine } => {
                check_uplink(root, pools, network, (leaf, spine));
            }
            _ => {}
        }
    }
    let lasting: BTreeSet<u32> = (events.iter())
        .filter(|event| event.until_s.is_none())
        .filter_map(|event| match event.fault {
            Fault::Uplink { spine, .. } => Some(spine),
            _ => None,
        })
        .collect();
    if packets && !lasting.is_empty() && lasting.len() >= network.spines as usize {
        error(
            "events of kind \"uplink\" without end are about all spine switches, and with `network.mode = \"packets\"` \
             the packets of transfers without a path are sent again for ever",
            "set `until_s`, or leave one of `network.spines` with all of its links",
        );
    }
}

fn check_uplink(
    root: &Table<'_>,
    pools: &[PoolConfig],
    network: &NetworkConfig,
    (leaf, spine): (u32, u32),
) {
    let error = |message: String, hint: &str| root.error("event", message, hint);
    if network.mode == NetworkMode::None
        || network.workers_per_leaf == 0
        || network.uplink_bits_per_s == 0.0
    {
        return error(
            "an event of kind \"uplink\" is about a link between switches that is not modelled"
                .into(),
            "set `network.mode`, `network.workers_per_leaf` and `network.uplink_bits_per_s`, or remove the event",
        );
    }
    let workers = (pools.iter()).fold(0u32, |total, pool| total.saturating_add(pool.workers));
    let leaves = workers.div_ceil(network.workers_per_leaf);
    if leaf >= leaves {
        error(
            format!(
                "an event of kind \"uplink\" has `leaf = {leaf}`, and the workers are under {leaves} leaf switches"
            ),
            "set it to the number of a leaf switch, from 0",
        );
    }
    if spine >= network.spines {
        error(
            format!(
                "an event of kind \"uplink\" has `spine = {spine}`, and `network.spines` is {}",
                network.spines
            ),
            "set it to the number of a spine switch, from 0",
        );
    }
}

fn read_host(t: &Table<'_>) -> HostConfig {
    let default = HostConfig::default();
    let us = |key, default| t.get(key).within(0.0..=1e9).or(default);
    let mode = t.choice("mode", HOSTS).or(default.mode);
    HostConfig {
        mode,
        cpus: t.get("cpus").within(1..=4096).or(default.cpus),
        parse_us: us("parse_us", default.parse_us),
        tokenize_token_ns: us("tokenize_token_ns", default.tokenize_token_ns),
        route_us: us("route_us", default.route_us),
        dispatch_us: us("dispatch_us", default.dispatch_us),
        frame_us: us("frame_us", default.frame_us),
        token_ns: us("token_ns", default.token_ns),
        threads: read_threads(t, mode, default.threads),
    }
}

/// The keys of `[host]` that describe its threads.
fn read_threads(t: &Table<'_>, mode: HostMode, default: HostThreads) -> HostThreads {
    if mode != HostMode::Threads {
        let keys = [
            "scheduler",
            "llcs",
            "frontends",
            "tokenizers",
            "detokenizers",
            "background",
            "step_us",
            "connector_us",
            "wake_by",
            "wake_idle_us",
        ];
        for key in keys {
            t.unused(key, "mode", "only \"threads\" uses it");
        }
        return default;
    }
    let us = |key, default| t.get(key).within(0.0..=1e9).or(default);
    let count = |key, least: u32, default| t.get(key).within(least..=1_024).or(default);
    HostThreads {
        scheduler: t.choice("scheduler", SCHEDULERS).or(default.scheduler),
        llcs: t.get("llcs").within(1..=256).or(default.llcs),
        frontends: count("frontends", 1, default.frontends),
        tokenizers: count("tokenizers", 0, default.tokenizers),
        detokenizers: count("detokenizers", 0, default.detokenizers),
        background: count("background", 0, default.background),
        step_us: us("step_us", default.step_us),
        connector_us: us("connector_us", default.connector_us),
        wake_by: t.choice("wake_by", WAKE_MECHANISMS).or(default.wake_by),
        wake_idle_us: t.get("wake_idle_us").within(0.0..=1e6).optional(),
    }
}

/// A host with threads has the CPUs that the scheduler takes, and its workers.
fn check_host(root: &Table<'_>, host: &HostConfig, network: &NetworkConfig, pools: &[PoolConfig]) {
    if host.mode != HostMode::Threads {
        return;
    }
    let (cpus, llcs) = (host.cpus, host.threads.llcs);
    if cpus > HOST_CPUS_MAX {
        root.error(
            "host",
            format!(
                "`host.cpus` is {cpus}, and a host with threads has at most {HOST_CPUS_MAX} CPUs"
            ),
            "set fewer, or `host.mode = \"ideal\"`",
        );
    } else if !cpus.is_multiple_of(llcs) || cpus / llcs > LLC_CPUS_MAX {
        root.error(
            "host",
            format!(
                "`host.cpus` is {cpus} and `host.llcs` is {llcs}: each last-level cache needs the same number of CPUs, \
                 {LLC_CPUS_MAX} at most"
            ),
            "set `host.llcs` to a divisor of `host.cpus` that leaves so few",
        );
    }
    if network.messages && network.mode != NetworkMode::None {
        root.error(
            "host",
            "`host.mode` is \"threads\", whose workers run on the frontend's host, and `network.messages` puts a network \
             between them",
            "set `network.messages = false`, or `host.mode = \"ideal\"`",
        );
    }
    if let Some(pool) = pools.iter().find(|p| p.engine.data_parallel_barrier) {
        root.error(
            "host",
            format!(
                "`host.mode` is \"threads\", whose engines begin their passes one by one, and the ranks of pool `{}` begin \
                 them together (`engine.data_parallel_barrier`)",
                pool.name
            ),
            "set `host.mode = \"ideal\"`, or `engine.data_parallel_barrier = false`",
        );
    }
}

fn read_model(t: &Table<'_>, load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>) -> ModelConfig {
    let default = ModelConfig::default();
    let preset = t.get("preset").or(default.preset);
    let config = t.path("config").optional();
    let known = preset::find_model(&preset);
    if known.is_none() && config.is_none() {
        let names: Vec<&str> = preset::MODELS.iter().map(|m| &*m.name).collect();
        t.error(
            "preset",
            format!("`model.preset` is \"{preset}\", which is not a preset"),
            {
                let names = suggestion(&preset, &names);
                let end = if names.ends_with('?') { "" } else { ";" };
                format!("{names}{end} `model.config` takes the config.json of any other model")
            },
        );
    }
    let name = match &config {
        None => t
            .get("name")
            .check(|n: &String| !n.is_empty(), "a name")
            .or_from(Origin::Preset(preset.clone()), preset.clone()),
        Some(path) => {
            // The default name is that of the model's folder: `models/my-model/config.json`.
            let is_file = path.extension().is_some_and(|ending| ending == "json");
            let folder = if is_file {
                path.parent()
            } else {
                Some(&**path)
            };
            let folder = folder.and_then(Path::file_name);
            let name = folder.map_or("model".into(), |f| f.to_string_lossy().into_owned());
            t.get("name")
                .check(|n: &String| !n.is_empty(), "a name")
                .or_from(Origin::Derived("folder of model.config".into()), name)
        }
    };
    let mut shape = known.unwrap_or(default.shape);
    let mut notes = Vec::new();
    if let Some(path) = &config {
        let read = ModelFiles::load(path, load)
            .map_err(|e| e.to_string())
            .and_then(|files| files.read(&name).map_err(|e| chain(&e)));
        match read {
            Ok(read) => (shape, notes) = (read.shape, read.notes),
            Err(error) => t.error(
                "config",
                format!("`model.config`: {}: {error}", path.display()),
                "set the path of a model's `config.json`, or use a `preset`",
            ),
        }
    }
    ModelConfig {
        preset,
        name,
        config,
        tokenizer: t.path("tokenizer").optional(),
        lora_adapters: t
            .get("lora_adapters")
            .check(
                |names: &Vec<String>| {
                    let fits = |name: &String| !name.is_empty() && name.len() <= 256;
                    names.len() <= 1024 && names.iter().all(fits)
                },
                "up to 1,024 names of 1 to 256 bytes",
            )
            .or(Vec::new()),
        image_tokens: t.get("image_tokens").within(0..=65_536).or(0),
        shape,
        notes,
    }
}

/// The error and its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

/// The tables that every pool starts from.
struct Bases<'a> {
    engine: Table<'a>,
    autoscale: Table<'a>,
    model: Table<'a>,
}

/// `[pool.NAME.model]` over `[model]`, which is `inherited`.
fn read_pool_model(
    t: &Table<'_>,
    base: &Table<'_>,
    inherited: &ModelConfig,
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> ModelConfig {
    if !t.has("model") {
        return inherited.clone();
    }
    let own = t.base("model");
    if own.has("preset") && !own.has("config") && base.has("config") {
        own.error(
            "preset",
            "`preset` has no effect: `model.config`, which every pool starts from, overrides the preset's shape",
            "move `config` to the pools that it is for, or set it here, too",
        );
    }
    t.table_over("model", base, |t| read_model(t, load))
}

fn read_pool(
    name: &str,
    t: &Table<'_>,
    bases: &Bases<'_>,
    (model, gpus): (&ModelConfig, &[Gpu]),
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> PoolConfig {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        t.error(
            "",
            format!("`{name}` cannot name a pool"),
            "use up to 64 letters, digits, `-` and `_`: it becomes a label of metrics",
        );
    }
    let role = t.choice("role", ROLES).or(Role::Both);
    let engines = read_engines(t, role);
    let kind = engines.as_ref().map(|engines| engines.kind);
    if kind == Some(EngineKind::LlamaCpp) && role != Role::Both {
        t.error(
            "role",
            "engines of kind \"llamacpp\" pass no keys and values to others, so a pool of them has the role \"both\"",
            "remove `role`; disaggregated prefill needs vLLM or SGLang",
        );
    }
    let traffic = engines.as_ref().map(|engines| engines.traffic);
    let key = traffic.and_then(|of| {
        let weight = of.weight.map(|_| "weight");
        weight.or(of.mirror.map(|_| "mirror"))
    });
    if let Some(key) = key.filter(|_| role != Role::Both) {
        t.error(
            key,
            format!("`{key}` needs a pool with the role \"both\": a request has engines of two pools otherwise"),
            "remove `role`, or the share of traffic",
        );
    }
    let workers = match &engines {
        // Reported if the list is bad.
        Some(engines) => (to_u32(engines.urls.len())).max(1),
        None => t.get("workers").within(1..=WORKERS_MAX).or(1),
    };
    let model = read_pool_model(t, &bases.model, model, load);
    let engine = t.table_over("engine", &bases.engine, |engine| {
        read_engine(engine, &model, gpus, load)
    });
    PoolConfig {
        name: name.to_owned(),
        role,
        workers,
        model,
        autoscale: t.table_over("autoscale", &bases.autoscale, |t| {
            read_autoscale(t, workers, engine.startup_s, engines.is_some())
        }),
        engines,
        engine,
    }
}

/// Reads `[autoscale]` of a pool of `workers` workers. `real`: they are engines behind HTTP.
fn read_autoscale(
    t: &Table<'_>,
    workers: u32,
    startup_s: f64,
    real: bool,
) -> Option<AutoscaleConfig> {
    use AutoscalePolicy::{Custom, Predictive, Queue, Slo, Utilization};
    let Some(policy) = t.choice("policy", AUTOSCALE).or(None) else {
        for key in [
            "target",
            "interval_s",
            "cooldown_s",
            "workers_min",
            "workers_max",
            "workers_start",
            "trend_s",
            "lookahead_s",
            "ttft_s",
        ] {
            t.unused(key, "policy", "`policy` is \"none\"");
        }
        return None;
    };
    if real && matches!(policy, Slo | Custom) {
        t.error(
            "policy",
            format!(
                "`policy` is \"{}\", and this pool has real engines, whose first tokens are not measured",
                policy.name()
            ),
            "take \"utilization\", \"queue\" or \"predictive\"",
        );
    }
    let default_target = match policy {
        Utilization | Slo | Predictive | Custom => 0.8,
        Queue => 4.0,
    };
    let workers_max = if real {
        t.get("workers_max").within(1..=ENGINES_MAX).required(
            "set the most engines that the deployment may have, such as `workers_max = 8`",
            workers,
        )
    } else {
        t.get("workers_max").within(1..=workers).or(workers)
    };
    let workers_min = t.get("workers_min").within(1..=workers_max).or(1);
    let target = if policy == Custom {
        t.unused("target", "policy", "the function decides");
        default_target
    } else {
        t.get("target").within(0.01..=1e6).or(default_target)
    };
    let interval_s = t.get("interval_s").within(0.1..=86_400.0).or(15.0);
    let (trend_s, lookahead_s) = (8.0 * interval_s, startup_s + interval_s);
    let (trend_s, lookahead_s) = if policy == Predictive {
        let trend_s = t.get("trend_s").within(0.2..=86_400.0).or(trend_s);
        if trend_s < 2.0 * interval_s || trend_s > TREND_MAX * interval_s {
            t.error(
                "trend_s",
                format!(
                    "`trend_s` is {trend_s}, which is {} intervals of {interval_s} s (`interval_s`), but must be 2 to \
                     {TREND_MAX}",
                    trend_s / interval_s
                ),
                "a line needs two observations; take some ten",
            );
        }
        (
            trend_s,
            t.get("lookahead_s").within(0.0..=86_400.0).or(lookahead_s),
        )
    } else {
        for key in ["trend_s", "lookahead_s"] {
            t.unused(key, "policy", "`policy` is not \"predictive\"");
        }
        (trend_s, lookahead_s)
    };
    if policy != Slo {
        t.unused("ttft_s", "policy", "`policy` is not \"slo\"");
    }
    Some(AutoscaleConfig {
        policy,
        target,
        interval_s,
        cooldown_s: t.get("cooldown_s").within(0.0..=86_400.0).or(300.0),
        workers_min,
        workers_max,
        workers_start: t
            .get("workers_start")
            .within(workers_min..=workers_max)
            .or(workers_min),
        trend_s,
        lookahead_s,
        ttft_s: (policy == Slo)
            .then(|| t.get("ttft_s").within(0.001..=86_400.0).optional())
            .flatten(),
    })
}

/// The link called `NAME` in `[link.NAME]`: kind, bytes/s, latency of an all-reduce.
type NamedLink = (String, Link, f64, Option<f64>);

fn read_link(name: &str, t: &Table<'_>) -> NamedLink {
    const KINDS: &[(&str, Link)] = &[("fabric", Link::Fabric), ("pcie", Link::Pcie)];
    let kind = t.choice("kind", KINDS).or(Link::Pcie);
    let bytes_per_s = t.get("bytes_per_s").within(1e6..=1e15).required(
        "set the bandwidth between two GPUs in one direction, such as `bytes_per_s = 64e9` for PCIe 5.0 x16",
        64e9,
    );
    let reduce_us = t.get("reduce_us").within(0.1..=1e6).optional();
    (name.to_owned(), kind, bytes_per_s, reduce_us)
}

/// `[gpu.NAME]`: a GPU by its numbers, or a preset with other ones.
fn read_gpu(name: &str, t: &Table<'_>, links: &[NamedLink]) -> Gpu {
    if preset::gpu(name).is_some() {
        t.error(
            "",
            format!("`{name}` is a preset"),
            format!("call it otherwise, with `like = \"{name}\"` for a preset with other numbers"),
        );
    }
    let presets: Vec<(&str, &'static Gpu)> =
        preset::GPUS.iter().map(|gpu| (&*gpu.name, gpu)).collect();
    let like: Option<&'static Gpu> = t.choice("like", &presets).optional();
    let number = |key: &str, of: fn(&Gpu) -> Option<f64>, remedy: &str| {
        let field = t.get(key).within(1e3..=1e18);
        match like.and_then(of) {
            Some(default) => {
                field.or_from(Origin::Preset(like.map_or("", |g| &g.name).into()), default)
            }
            None => field.required(remedy, 1e12),
        }
    };
    let optional = |key: &str, of: fn(&Gpu) -> Option<f64>| {
        let found: Option<f64> = t.get(key).within(1e3..=1e18).optional();
        found.or_else(|| like.and_then(of))
    };
    let bf16_flops = number(
        "bf16_flops",
        |g| Some(g.bf16_flops),
        "set the dense BF16 throughput in FLOP/s, such as `bf16_flops = 989e12`, or a preset in `like`",
    );
    let memory_bytes = number(
        "memory_bytes",
        |g| Some(g.memory_bytes as f64),
        "set the memory that programs can use, such as `memory_bytes = 85e9`, or a preset in `like`",
    );
    let memory_bytes_per_s = number(
        "memory_bytes_per_s",
        |g| Some(g.memory_bytes_per_s),
        "set the memory bandwidth, such as `memory_bytes_per_s = 3350e9`, or a preset in `like`",
    );
    let wanted: Option<String> = t.get("link").optional();
    let link = wanted.as_ref().and_then(|wanted| {
        let found = links.iter().find(|(name, ..)| name == wanted);
        if found.is_none() {
            t.error(
                "link",
                format!("`link` is \"{wanted}\", but there is no table `[link.{wanted}]`"),
                "add the table, or remove the key",
            );
        }
        found
    });
    let (link, link_bytes_per_s, reduce_us) = match (link, like) {
        (Some((_, kind, bytes_per_s, reduce_us)), _) => (*kind, *bytes_per_s, *reduce_us),
        (None, Some(like)) => (like.link, like.link_bytes_per_s, like.reduce_us),
        // PCIe 4.0 x16, which the slowest servers have.
        (None, None) => (Link::Pcie, 32e9, None),
    };
    Gpu {
        name: name.to_owned().into(),
        like: like.map(|gpu| &*gpu.name),
        title: "a GPU of the cluster file",
        bf16_flops,
        fp8_flops: optional("fp8_flops", |g| g.fp8_flops),
        fp4_flops: optional("fp4_flops", |g| g.fp4_flops),
        memory_bytes: floor_u64(memory_bytes),
        memory_bytes_per_s,
        link_bytes_per_s,
        link,
        reduce_us,
        source: "cluster file",
    }
}

fn read_engine(
    t: &Table<'_>,
    model: &ModelConfig,
    gpus: &[Gpu],
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> EngineConfig {
    let default = EngineConfig::default();
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
        enable_prefix_caching: t
            .get("enable_prefix_caching")
            .or(default.enable_prefix_caching),
        enable_chunked_prefill: budget.enable_chunked_prefill,
        scheduling_policy: t
            .choice("scheduling_policy", SCHEDULING)
            .or(default.scheduling_policy),
        async_scheduling: t.get("async_scheduling").or(default.async_scheduling),
        long_prefill_token_threshold: budget.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive: t
            .get("long_prefill_token_threshold_adaptive")
            .or(default.long_prefill_token_threshold_adaptive),
        max_num_active_seqs: budget.max_num_active_seqs,
        max_num_scheduled_tokens: budget.max_num_scheduled_tokens,
        scheduler_reserve_full_isl: t
            .get("scheduler_reserve_full_isl")
            .or(default.scheduler_reserve_full_isl),
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
        startup_s: t
            .get("startup_s")
            .within(0.0..=86_400.0)
            .or(default.startup_s),
        output_len: t.table("output_len", read_output_len),
        timing,
    }
}

/// How GPUs divide the model.
struct Parallel {
    tensor: u32,
    /// Whether `tensor` divides the model evenly.
    splits: bool,
    /// Layers of each stage of the pipeline; one without.
    stages: Vec<u32>,
    data: u32,
    /// Whether ranks begin every step together.
    barrier: bool,
    experts: bool,
    imbalance: Option<f64>,
}

impl Parallel {
    /// Of something that all layers together have in equal parts, the part of the stage with the most layers.
    fn of_stage(&self, bytes: u64) -> u64 {
        let most = self.stages.iter().copied().max().unwrap_or(1);
        let all: u32 = self.stages.iter().sum();
        (bytes * u64::from(most)).div_ceil(u64::from(all.max(1)))
    }
}

/// Layers of each of `stages` stages.
///
/// Source: vLLM, `get_pp_indices` in `vllm/distributed/utils.py`: what is left of an equal division goes to the stages
/// before the last one, from the back.
fn layers_of_stages(layers: u32, stages: u32) -> Vec<u32> {
    let left = layers % stages;
    (0..stages)
        .map(|stage| layers / stages + u32::from(stage + left + 1 >= stages && stage + 1 < stages))
        .collect()
}

fn read_parallel(t: &Table<'_>, shape: &ModelShape, timing: &TimingConfig) -> Parallel {
    let default = EngineConfig::default();
    let tensor = t
        .get("tensor_parallel_size")
        .within(1..=1024)
        .or(default.tensor_parallel_size);
    let splits = shape.divides_into(tensor);
    if !splits {
        let fitting: Vec<String> = (1..=64)
            .filter(|&tp| shape.divides_into(tp))
            .map(|tp: u32| tp.to_string())
            .collect();
        t.error(
            "tensor_parallel_size",
            format!(
                "`tensor_parallel_size` is {tensor}, but {} has {} attention heads, {} \
                 key-value heads and an MLP width of {}, which do not all split evenly",
                shape.name,
                shape.attention_heads,
                shape.kv_heads,
                shape.mlp_width(),
            ),
            format!("one of {}", fitting.join(", ")),
        );
    }
    let stages: u32 = t.get("pipeline_parallel_size").within(1..=1024).or(1);
    if stages > shape.layers {
        t.error(
            "pipeline_parallel_size",
            format!(
                "`pipeline_parallel_size` is {stages}, but {} has {} layers",
                shape.name, shape.layers
            ),
            format!("set it to {} or less", shape.layers),
        );
    }
    let data = t
        .get("data_parallel_size")
        .within(1..=1024)
        .or(default.data_parallel_size);
    let mixture = shape.experts.is_some();
    let calibrated = matches!(timing, TimingConfig::Calibrated { .. });
    let experts = t
        .get("enable_expert_parallel")
        .or(default.enable_expert_parallel);
    if experts && !(mixture && calibrated) {
        let reason = if mixture {
            "only `timing.kind` \"calibrated\" knows the exchange of tokens between experts"
                .to_owned()
        } else {
            format!("{} has no experts", shape.name)
        };
        t.error(
            "enable_expert_parallel",
            format!("`enable_expert_parallel` is true, but {reason}"),
            "set it to false",
        );
    }
    if !experts {
        t.unused(
            "expert_imbalance",
            "enable_expert_parallel",
            "`enable_expert_parallel` is false",
        );
    }
    let imbalance = t.get("expert_imbalance").within(1.0..=1024.0).optional();
    let barrier = read_barrier(t, shape, data, stages);
    // Such times are those of one deployment, as it is.
    let stated = !matches!(timing, TimingConfig::Roofline { .. });
    if data > 1 && mixture && !calibrated && !(barrier && stated) {
        t.error(
            "data_parallel_size",
            format!(
                "`data_parallel_size` is {data}, but {} is a mixture of experts: its ranks \
                 share the experts and meet in every step, which only `timing.kind` \"calibrated\" models",
                shape.name
            ),
            "use that kind, or set it to 1 with more `workers` (each with all experts)",
        );
    }
    Parallel {
        tensor,
        splits,
        stages: layers_of_stages(shape.layers, stages),
        data,
        barrier,
        experts,
        imbalance,
    }
}

fn read_barrier(t: &Table<'_>, shape: &ModelShape, data: u32, stages: u32) -> bool {
    let key = "data_parallel_barrier";
    let default = EngineConfig::default();
    let barrier = t.get(key).or(default.data_parallel_barrier);
    if data == 1 {
        return false; // one rank waits for no other
    }
    let reason = if shape.experts.is_none() {
        format!(
            "the ranks of {}, which has no experts, never meet",
            shape.name
        )
    } else if stages > 1 {
        format!(
            "`pipeline_parallel_size` is {stages}, and pipelines whose ranks meet are not modelled"
        )
    } else {
        return barrier;
    };
    if barrier {
        t.error(
            key,
            format!("`{key}` is true, but {reason}"),
            "set it to false",
        );
    }
    false
}

/// Bytes of an activation between two stages: 16 bits.
const ACTIVATION_BYTES: f64 = 2.0;

fn read_pipeline(
    t: &Table<'_>,
    shape: &ModelShape,
    timing: &TimingConfig,
    parallel: &Parallel,
    drafts: bool,
) -> Option<PipelineConfig> {
    let stages = parallel.stages.len();
    if stages == 1 {
        for key in ["pipeline_link_bytes_per_s", "pipeline_latency_us"] {
            t.unused(
                key,
                "pipeline_parallel_size",
                "`pipeline_parallel_size` is 1",
            );
        }
        return None;
    }
    let link = t.get("pipeline_link_bytes_per_s").within(1e6..=1e13);
    let link = match timing {
        TimingConfig::Roofline { gpu, .. } | TimingConfig::Calibrated { gpu, .. } => {
            let origin = Origin::Derived(format!("link of {}", gpu.name));
            Some(link.or_from(origin, gpu.link_bytes_per_s))
        }
        _ => link.optional(),
    };
    let latency_us = t.get("pipeline_latency_us").within(0.0..=1e6).or(0.0);
    if drafts {
        t.error(
            "pipeline_parallel_size",
            format!("`pipeline_parallel_size` is {stages}, and pipelines that verify drafts are not modelled"),
            "set it to 1, or remove [engine.speculation]",
        );
    }
    let bytes = f64::from(shape.hidden_size) * ACTIVATION_BYTES;
    Some(PipelineConfig {
        layers: parallel.stages.clone(),
        send_ns_per_token: link.map_or(0.0, |bytes_per_s| bytes / bytes_per_s * 1e9),
        latency_ns: latency_us * 1e3,
    })
}

/// The blocks of an engine's KV cache, and the keys that their number follows from.
struct KvCache {
    block_size: u32,
    blocks: u32,
    dtype: Dtype,
    memory_utilization: f64,
    max_num_seqs: u32,
}

impl KvCache {
    fn capacity_tokens(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.block_size)
    }
}

fn read_kv_cache(
    t: &Table<'_>,
    shape: &ModelShape,
    timing: &TimingConfig,
    parallel: &Parallel,
) -> KvCache {
    let default = EngineConfig::default();
    let memory_utilization = t
        .get("gpu_memory_utilization")
        .within(0.01..=1.0)
        .or(default.gpu_memory_utilization);
    let dtype = t.choice("kv_cache_dtype", KV_DTYPES).or(None);
    let dtype = dtype.unwrap_or(shape.kv_cache);
    let block_size = t.get("block_size").within(1..=1024).or(default.block_size);
    let max_num_seqs: u32 = t
        .get("max_num_seqs")
        .within(1..=65_536)
        .or(default.max_num_seqs);
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
    let blocks = t
        .get("num_gpu_blocks")
        .within(1..=1 << 24)
        .or_from(origin, blocks_fit);
    KvCache {
        block_size,
        blocks,
        dtype,
        memory_utilization,
        max_num_seqs,
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

fn read_host_tier(
    t: &Table<'_>,
    shape: &ModelShape,
    kv: &KvCache,
    parallel: &Parallel,
) -> Option<HostTierConfig> {
    let gib = t.get("gib").within(0.0..=1e6).or(0.0);
    if gib == 0.0 {
        for key in ["bytes_per_s", "latency_us"] {
            t.unused(key, "gib", "`gib` is 0");
        }
        return None;
    }
    let bytes_per_s = t.get("bytes_per_s").within(1e6..=1e13).required(
        "set what a copy from pinned host memory to one GPU reaches; PCIe 5.0 x16 carries at most 63e9",
        50e9,
    );
    let latency_us = t.get("latency_us").within(0.0..=1e6).or(0.0);
    if !parallel.splits {
        return None; // reported already
    }
    // Each GPU of the rank has its own copy of its part, over its own link.
    let of_all =
        shape.kv_bytes_per_token_per_gpu(parallel.tensor, kv.dtype) * u64::from(kv.block_size);
    let of_gpu = parallel.of_stage(of_all);
    let blocks = gib * GIB / (of_all as f64 * f64::from(parallel.tensor));
    if blocks < 1.0 {
        t.error(
            "gib",
            format!(
                "`gib` is {gib}, which is less than one block of {} {} takes",
                kv.block_size,
                several(kv.block_size.into(), "token"),
            ),
            "set more, or 0 for no host tier",
        );
        return None;
    }
    Some(HostTierConfig {
        blocks: floor_u64(blocks),
        load_ns_per_block: round_u64(of_gpu as f64 / bytes_per_s * 1e9),
        latency_ns: round_u64(latency_us * 1e3),
    })
}

fn read_disk_tier(
    t: &Table<'_>,
    shape: &ModelShape,
    kv: &KvCache,
    parallel: &Parallel,
    has_host_tier: bool,
) -> Option<DiskTierConfig> {
    let gib = t.get("gib").within(0.0..=1e6).or(0.0);
    if gib == 0.0 {
        for key in ["bytes_per_s", "write_bytes_per_s", "latency_us"] {
            t.unused(key, "gib", "`gib` is 0");
        }
        return None;
    }
    let bytes_per_s = t.get("bytes_per_s").within(1e6..=1e13).required(
        "set the rate of sequential reads that the disk reaches; an NVMe drive on PCIe 5.0 x4 carries at most 15.8e9",
        5e9,
    );
    let write_bytes_per_s = t
        .get("write_bytes_per_s")
        .within(1e6..=1e13)
        .or_from(Origin::Derived("`bytes_per_s`".into()), bytes_per_s);
    let latency_us = t.get("latency_us").within(0.0..=1e6).or(0.0);
    if !parallel.splits {
        return None; // reported already
    }
    if !has_host_tier {
        t.error(
            "gib",
            "`disk_tier` takes the blocks that host memory evicts, and there is no `host_tier`"
                .to_owned(),
            "set `gib` and `bytes_per_s` of [engine.host_tier], or remove [engine.disk_tier]",
        );
        return None;
    }
    let of_gpu =
        shape.kv_bytes_per_token_per_gpu(parallel.tensor, kv.dtype) * u64::from(kv.block_size);
    let bytes = of_gpu as f64 * f64::from(parallel.tensor);
    let blocks = gib * GIB / bytes;
    if blocks < 1.0 {
        t.error(
            "gib",
            format!("`gib` is {gib}, which is less than one block takes"),
            "set more, or 0 for no disk tier",
        );
        return None;
    }
    let ns = |bytes_per_s: f64| round_u64(bytes / bytes_per_s * 1e9);
    Some(DiskTierConfig {
        blocks: floor_u64(blocks),
        load_ns_per_block: ns(bytes_per_s),
        store_ns_per_block: ns(write_bytes_per_s),
        latency_ns: round_u64(latency_us * 1e3),
    })
}

fn read_lora(t: &Table<'_>) -> Option<LoraConfig> {
    let max_loras: u32 = t.get("max_loras").within(0..=1024).or(0);
    if max_loras == 0 {
        for key in ["max_cpu_loras", "load_ms", "activate_ms"] {
            t.unused(key, "max_loras", "`max_loras` is 0");
        }
        return None;
    }
    let max_cpu_loras: u32 = t
        .get("max_cpu_loras")
        .within(1..=65_536)
        .or_from(Origin::Derived("`max_loras`".into()), max_loras);
    if max_cpu_loras < max_loras {
        t.error(
            "max_cpu_loras",
            format!("`max_cpu_loras` is less than `max_loras`, {max_loras}"),
            format!("set it to {max_loras} or more"),
        );
    }
    let ns = |ms: f64| round_u64(ms * 1e6);
    Some(LoraConfig {
        max_loras,
        max_cpu_loras,
        load_ns: ns(t.get("load_ms").within(0.0..=1e6).or(0.0)),
        activate_ns: ns(t.get("activate_ms").within(0.0..=1e6).or(0.0)),
    })
}

/// Drafters by vLLM's names.
const SPECULATION: &[(&str, SpeculationMethod)] = &[
    ("eagle", SpeculationMethod::Eagle),
    ("mtp", SpeculationMethod::Mtp),
    ("draft_model", SpeculationMethod::DraftModel),
    ("ngram", SpeculationMethod::Ngram),
];

fn read_peer_tier(t: &Table<'_>) -> Option<PeerTierConfig> {
    if !t.get("enabled").or(false) {
        t.unused("latency_us", "enabled", "`enabled` is false");
        return None;
    }
    let latency_us = t.get("latency_us").within(0.0..=1e6).or(0.0);
    Some(PeerTierConfig {
        latency_ns: round_u64(latency_us * 1e3),
    })
}

/// `others`: keys of `[engine]` that an encoder does not go with, and whether they are set.
fn read_encoder(
    t: &Table<'_>,
    timing: &TimingConfig,
    tensor: u32,
    budget: u32,
    others: &[(&str, bool)],
) -> Option<EncoderConfig> {
    if !t.get("enabled").or(false) {
        for key in [
            "token_us",
            "parameters",
            "patches_per_token",
            "flops_share",
            "input_us",
            "max_num_encoder_input_tokens",
            "encoder_cache_size",
            "disable_chunked_mm_input",
        ] {
            t.unused(key, "enabled", "`enabled` is false");
        }
        return None;
    }
    if let Some((other, _)) = others.iter().find(|(_, is_set)| *is_set) {
        t.error(
            "enabled",
            format!("an encoder with `engine.{other}` is not modelled"),
            format!("set it to false, or remove `engine.{other}`"),
        );
    }
    let of_tokens = || Origin::Derived("max_num_batched_tokens".into());
    let tokens = |key| t.get(key).within(1..=1 << 24).or_from(of_tokens(), budget);
    Some(EncoderConfig {
        budget_tokens: tokens("max_num_encoder_input_tokens"),
        cache_tokens: tokens("encoder_cache_size"),
        whole_inputs: t.get("disable_chunked_mm_input").or(false),
        input_ns: t.get("input_us").within(0.0..=1e9).or(0.0) * 1e3,
        token_ns: read_encoder_token_us(t, timing, tensor) * 1e3,
    })
}

/// Time of a token of the encoder's output, µs: as stated, or from the parameters of a vision transformer.
fn read_encoder_token_us(t: &Table<'_>, timing: &TimingConfig, tensor: u32) -> f64 {
    let token_us = t.get("token_us").within(0.0..=1e6);
    let parameters: Option<f64> = t.get("parameters").within(1e3..=1e13).optional();
    let Some(parameters) = parameters else {
        for key in ["patches_per_token", "flops_share"] {
            t.unused(key, "parameters", "`parameters` is not set");
        }
        return token_us.required(
            "set the time per token that an image takes in the prompt, or `parameters` of the encoder",
            0.0,
        );
    };
    let patches: f64 = t.get("patches_per_token").within(1.0..=1024.0).or(4.0);
    let share: f64 = t.get("flops_share").within(0.01..=1.0).or(0.5);
    let (TimingConfig::Roofline { gpu, .. } | TimingConfig::Calibrated { gpu, .. }) = timing else {
        t.error(
            "parameters",
            "`parameters` gives a time by the arithmetic of a GPU, and `engine.timing` has none",
            "set `token_us` instead",
        );
        return 0.0;
    };
    // Each parameter is a multiplication and an addition per patch. Tensor-parallel GPUs divide the weights.
    let flops = 2.0 * parameters * patches;
    let us = flops / (gpu.bf16_flops * share * f64::from(tensor)) * 1e6;
    token_us.or_from(Origin::Derived(format!("`parameters` on {}", gpu.name)), us)
}

fn read_speculation(t: &Table<'_>, timing: &TimingConfig) -> Option<SpeculationConfig> {
    let tokens: u32 = t.get("num_speculative_tokens").within(0..=32).or(0);
    if tokens == 0 {
        for key in ["method", "acceptance", "draft_us", "draft_share"] {
            t.unused(
                key,
                "num_speculative_tokens",
                "`num_speculative_tokens` is 0",
            );
        }
        return None;
    }
    let method = t.choice("method", SPECULATION).required(
        "name the drafter, such as `method = \"mtp\"`",
        SpeculationMethod::Mtp,
    );
    let ordered = |rates: &Vec<f64>| {
        rates.iter().all(|rate| (0.0..=1.0).contains(rate))
            && rates.windows(2).all(|pair| pair[1] <= pair[0])
    };
    let acceptance = t
        .get::<Vec<f64>>("acceptance")
        .check(
            |rates| rates.len() >= tokens as usize,
            &format!("a list of at least {tokens}, as `num_speculative_tokens` is"),
        )
        .check(
            ordered,
            "shares of 0 to 1, none larger than the one before it: a token is accepted only after those before it",
        )
        .required(
            "set what your deployment measures: vLLM logs it as `Per-position acceptance rate`",
            vec![0.0; tokens as usize],
        );
    // Further ones are of longer drafts.
    let acceptance = acceptance[..acceptance.len().min(tokens as usize)].to_vec();
    let draft_us = t.get("draft_us").within(0.0..=1e6).or(0.0);
    let draft_share = t.get("draft_share").within(0.0..=10.0).or(0.0);
    if matches!(timing, TimingConfig::Table { .. }) {
        t.error(
            "num_speculative_tokens",
            "a table of step times has no rows with drafted tokens".to_owned(),
            "set another `engine.timing.kind`, or remove [engine.speculation]",
        );
    }
    Some(SpeculationConfig {
        method,
        acceptance,
        draft_ns: draft_us * 1e3,
        draft_share,
    })
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
    let max_model_len: u32 = t
        .get("max_model_len")
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
    let default = EngineConfig::default();
    let max_num_seqs = kv.max_num_seqs;
    let enable_chunked_prefill = t
        .get("enable_chunked_prefill")
        .or(default.enable_chunked_prefill);
    let max_num_batched_tokens =
        read_batched_tokens(t, enable_chunked_prefill, max_num_seqs, max_model_len);
    let long_prefill_token_threshold: u32 = t
        .get("long_prefill_token_threshold")
        .or(default.long_prefill_token_threshold);
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
    let max_num_active_seqs = t.get("max_num_active_seqs").within(1..=65_536).optional();
    if max_num_active_seqs.is_some_and(|most| most > max_num_seqs) {
        t.error(
            "max_num_active_seqs",
            format!("`max_num_active_seqs` is more than `max_num_seqs`, {max_num_seqs}"),
            format!("set it to {max_num_seqs} or less"),
        );
    }
    let max_num_scheduled_tokens = t
        .get("max_num_scheduled_tokens")
        .within(1..=1 << 24)
        .optional();
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
    let default = EngineConfig::default();
    let given = t.get("max_num_batched_tokens").within(1..=1 << 24);
    let max_num_batched_tokens = if enable_chunked_prefill {
        given.or(default.max_num_batched_tokens.max(max_num_seqs))
    } else {
        // Source: vLLM, `SchedulerConfig`: without chunking, a step must hold a whole prompt.
        let whole = max_model_len
            .max(default.max_num_batched_tokens)
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

fn read_output_len(t: &Table<'_>) -> OutputLen {
    #[derive(Clone, PartialEq)]
    enum Kind {
        Constant,
        LogNormal,
    }
    let kinds = [("constant", Kind::Constant), ("lognormal", Kind::LogNormal)];
    let tokens_max = 1 << 24;
    match t.choice("kind", &kinds).or(Kind::LogNormal) {
        Kind::Constant => {
            for key in ["mean", "cv"] {
                t.unused(key, "kind", "`kind` is \"constant\"");
            }
            OutputLen::Constant(
                t.get("tokens")
                    .within(1..=tokens_max)
                    .required("set the number", 1),
            )
        }
        Kind::LogNormal => {
            t.unused("tokens", "kind", "`kind` is \"lognormal\"");
            OutputLen::LogNormal {
                mean: t.get("mean").within(1.0..=f64::from(tokens_max)).or(256.0),
                cv: t.get("cv").within(0.0..=10.0).or(0.7),
            }
        }
    }
}

fn read_timing(
    t: &Table<'_>,
    model: &ModelConfig,
    gpus: &[Gpu],
    load: &mut dyn FnMut(&Path) -> io::Result<Vec<u8>>,
) -> TimingConfig {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Calibrated,
        Constant,
        Linear,
        Roofline,
        Table,
    }
    const KINDS: &[(&str, Kind)] = &[
        ("calibrated", Kind::Calibrated),
        ("constant", Kind::Constant),
        ("linear", Kind::Linear),
        ("roofline", Kind::Roofline),
        ("table", Kind::Table),
    ];
    const KEYS: &[(Kind, &[&str])] = &[
        (Kind::Constant, &["step_ns"]),
        (
            Kind::Linear,
            &[
                "base_ns",
                "per_prefill_token_ns",
                "per_prefill_pair_ns",
                "per_decode_token_ns",
                "per_sequence_ns",
                "per_context_token_ns",
                "api_ns",
                "api_prompt_token_ns",
            ],
        ),
        (Kind::Calibrated, &["gpu", "dtype", "framework", "profile"]),
        (Kind::Roofline, &["gpu", "dtype"]),
        (Kind::Table, &["path"]),
    ];
    // An hour: a longer pass is an error in the unit.
    const STEP_NS_MAX: u64 = 3_600_000_000_000;

    let shape = &model.shape;
    let kind = t.choice("kind", KINDS).or(Kind::Calibrated);
    let word = KINDS
        .iter()
        .find(|(_, k)| *k == kind)
        .map_or("", |(word, _)| word);
    let keys_of = |kind| KEYS.iter().filter(move |(k, _)| *k == kind);
    let own: Vec<&str> = keys_of(kind).flat_map(|(_, keys)| *keys).copied().collect();
    let mut others: Vec<&str> = KEYS.iter().flat_map(|(_, keys)| *keys).copied().collect();
    others.sort_unstable();
    others.dedup();
    for key in others.into_iter().filter(|key| !own.contains(key)) {
        t.unused(key, "kind", &format!("`kind` is \"{word}\""));
    }
    match kind {
        Kind::Constant => TimingConfig::Constant {
            step_ns: t.get("step_ns").within(0..=STEP_NS_MAX).required(
                "set the duration of a pass, such as `step_ns = 10_000_000` for 10 ms",
                0,
            ),
        },
        Kind::Linear => {
            let coefficient = |key| t.get(key).within(0.0..=STEP_NS_MAX as f64).or(0.0);
            TimingConfig::Linear {
                base_ns: t.get("base_ns").within(0.0..=STEP_NS_MAX as f64).required(
                    "set the duration of an empty pass, such as `base_ns = 5e6` for 5 ms",
                    0.0,
                ),
                per_prefill_token_ns: coefficient("per_prefill_token_ns"),
                per_prefill_pair_ns: coefficient("per_prefill_pair_ns"),
                per_decode_token_ns: coefficient("per_decode_token_ns"),
                per_sequence_ns: coefficient("per_sequence_ns"),
                per_context_token_ns: coefficient("per_context_token_ns"),
                api_ns: coefficient("api_ns"),
                api_prompt_token_ns: coefficient("api_prompt_token_ns"),
            }
        }
        Kind::Roofline => {
            if !shape.is_uniform() {
                t.error(
                    "kind",
                    format!(
                        "`kind` is \"roofline\", but {} has layers of several kinds, latent attention or shared \
                         experts, which the roofline cannot express",
                        shape.name
                    ),
                    "take \"table\" or \"linear\"; `slipstream predict` answers deployments of this model",
                );
            }
            let gpu = choose_gpu(t, gpus);
            let dtype = read_weights(t, shape, &gpu);
            TimingConfig::Roofline { gpu, dtype }
        }
        Kind::Calibrated => {
            let gpu = choose_gpu(t, gpus);
            let dtype = read_formats(t, model);
            let framework = t.choice("framework", FRAMEWORKS).or(Framework::Vllm);
            let profile = t.path("profile").optional();
            if let Some(path) = &profile
                && let Err(error) = load(path)
            {
                t.error(
                    "profile",
                    format!("`profile`: {}: {error}", path.display()),
                    "set it to a file of `slipstream calibrate --out`, or remove it for the built-in one",
                );
            }
            TimingConfig::Calibrated {
                gpu,
                dtype,
                framework,
                profile,
            }
        }
        Kind::Table => {
            let path = t
                .path("path")
                .required("set it to a CSV file (see docs/step-time.md)", "".into());
            if !path.as_os_str().is_empty()
                && let Err(error) = load(&path)
            {
                t.error(
                    "path",
                    format!("`path`: {}: {error}", path.display()),
                    "paths are relative to the folder of the cluster file",
                );
            }
            TimingConfig::Table { path }
        }
    }
}

/// The GPU of `gpu`: a preset, or one of the file's own.
fn choose_gpu(t: &Table<'_>, gpus: &[Gpu]) -> Gpu {
    let all: Vec<(&str, &Gpu)> = gpus
        .iter()
        .chain(preset::GPUS)
        .map(|gpu| (&*gpu.name, gpu))
        .collect();
    let default = preset::gpu("h100-sxm").expect("it is a preset");
    t.choice("gpu", &all).or(default).clone()
}

/// The format of the weights, for a model that takes every format on every GPU: that of a checkpoint that exists.
///
/// A `config.json` is one checkpoint, and engines quantize 16 bits to FP8 as they load it. The name of a preset is a
/// model, of which checkpoints with fewer bits are published; more bits than the model was released in have no use.
fn read_formats(t: &Table<'_>, model: &ModelConfig) -> Dtype {
    let shape = &model.shape;
    let checkpoint = shape.dtype();
    let origin = match checkpoint {
        Dtype::Bf16 => Origin::Default,
        _ => Origin::Derived(format!("checkpoint of {}", shape.name)),
    };
    let dtype = t.choice("dtype", DTYPES).or_from(origin, checkpoint);
    let exists = dtype == checkpoint
        || match (model.config.is_some(), checkpoint) {
            (true, Dtype::Bf16) => dtype == Dtype::Fp8,
            (true, _) => false,
            (false, Dtype::Bf16) => true,
            (false, _) => dtype.bytes() < checkpoint.bytes() && checkpoint == Dtype::Fp8,
        };
    if !exists {
        let hint = match checkpoint {
            Dtype::Bf16 => format!(
                "use the `config.json` of a checkpoint in {}, or \"fp8\", to which engines quantize 16 bits",
                dtype.name()
            ),
            _ => format!(
                "remove it, or use the `config.json` of a checkpoint in {}",
                dtype.name()
            ),
        };
        t.error(
            "dtype",
            format!(
                "`dtype` is \"{}\", but {} has {} weights",
                dtype.name(),
                shape.name,
                checkpoint.name()
            ),
            hint,
        );
    }
    dtype
}

/// The format of the weights: the checkpoint's, or FP8 quantized from 16 bits at load time.
fn read_weights(t: &Table<'_>, shape: &ModelShape, gpu: &Gpu) -> Dtype {
    let origin = match shape.weights {
        Dtype::Bf16 => Origin::Default,
        _ => Origin::Derived(format!("`quantization_config` of {}", shape.name)),
    };
    let dtype = t
        .choice("dtype", ROOFLINE_DTYPES)
        .or_from(origin, shape.weights);
    if shape.weights == Dtype::Fp8 && dtype == Dtype::Bf16 {
        t.error(
            "dtype",
            format!(
                "`dtype` is \"bf16\", but {} has FP8 weights (`quantization_config`)",
                shape.name
            ),
            "remove it, or use the `config.json` of the checkpoint in 16 bits",
        );
    }
    let name = &gpu.name;
    if dtype == Dtype::Fp8 && gpu.fp8_flops.is_none() {
        let (message, hint) = if shape.weights == Dtype::Fp8 {
            (
                format!(
                    "{} has FP8 weights, but {name} has no FP8 units, and FP8 weights with \
                     16-bit arithmetic are not modelled",
                    shape.name
                ),
                "use another `gpu`, or the `config.json` of the checkpoint in 16 bits",
            )
        } else {
            (
                format!("`dtype` is \"fp8\", but {name} has no FP8 units"),
                "use \"bf16\", or another `gpu`",
            )
        };
        t.error("dtype", message, hint);
    }
    dtype
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::RouterPolicy;

    fn parse(text: &str) -> Result<(Cluster, Settings), Diagnostics> {
        read(Doc::parse("c.toml", text.as_bytes()), |path| {
            match path.to_str() {
                Some("models/tiny/config.json") => Ok(
                    br#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
                    "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100,
                    "max_position_embeddings": 512}"#
                        .to_vec(),
                ),
                Some("broken.json") => Ok(b"{".to_vec()),
                Some("grid.csv") => Ok(Vec::new()),
                _ => Err(io::ErrorKind::NotFound.into()),
            }
        })
    }

    #[track_caller]
    fn check_refused(text: &str, expected: &[&str]) {
        let shown = match parse(text) {
            Ok(_) => panic!("accepted: {text}"),
            Err(diagnostics) => format!("error: {diagnostics}"),
        };
        for part in expected {
            assert!(shown.contains(part), "no {part:?} in\n{shown}");
        }
        let count = shown.matches("error: ").count();
        assert_eq!(count, expected.len(), "mistakes in\n{shown}");
    }

    #[test]
    fn five_mistakes_are_reported_together() {
        check_refused(
            "[model]\npreset = \"qwen3-32\"\n\n[engine]\nblock_size = 0\nmax_nmu_seqs = 5\n\
             enable_prefix_caching = \"yes\"\n\n[ruoter]\npolicy = \"kv\"\n",
            &[
                "c.toml:2:10: `model.preset` is \"qwen3-32\", which is not a preset",
                "c.toml:5:14: `engine.block_size` is 0, but must be 1 to 1024",
                "c.toml:6:1: unknown key `engine.max_nmu_seqs`\nhint: did you mean `max_num_seqs`?",
                "c.toml:7:25: `engine.enable_prefix_caching` is a string (\"yes\"), but must be true or false",
                "c.toml:9:2: unknown key `ruoter`\nhint: did you mean `router`?",
            ],
        );
    }

    #[test]
    fn sections_to_come_are_not_called_unknown() {
        check_refused(
            "[prices]\n[live.tls]\n",
            &[
                "c.toml:1:2: `prices` does not belong in a cluster file",
                "`live.tls` is not",
            ],
        );
    }

    #[test]
    fn events_and_roles_that_cannot_be_are_refused() {
        check_refused(
            "[pool.main]\nworkers = 3\n[[event]]\nkind = \"crash\"\nat_s = 1\nworker = 3\n\
             [[event]]\nkind = \"slow\"\nat_s = 2\nuntil_s = 2\nworker = 0\nfactor = 2\nshare = 0.5\n\
             [[event]]\nkind = \"fire\"\nat_s = -1\n",
            &[
                "c.toml:6:10: `event[0].worker` is 3, but must be the number of a worker, 0 to 2",
                "`until_s` is 2, but it begins at 2",
                "`event[1].share` is not used: only \"link\" and \"kv_loss\" use it",
                "`event[2].kind` is a string (\"fire\"), but must be one of",
                "`event[2].at_s` is -1",
                "`event[2].worker` is missing",
            ],
        );
        check_refused(
            "[pool.a]\nrole = \"prefill\"\n",
            &["no pool generates answers"],
        );
        check_refused(
            "[pool.a]\nrole = \"decode\"\n[pool.b]\n",
            &["to compute its prompts"],
        );
        let (cluster, _) = parse(
            "[pool.p]\nrole = \"prefill\"\n[pool.d]\nrole = \"decode\"\n\
             [[event]]\nkind = \"link\"\nat_s = 9\nworker = 1\nshare = 0\n\
             [[event]]\nkind = \"drain\"\nat_s = 2\nuntil_s = 3\nworker = 0\n",
        )
        .unwrap();
        let kinds: Vec<_> = cluster.events.iter().map(|e| (e.at_s, e.fault)).collect();
        assert_eq!(
            kinds,
            [(2.0, Fault::Drain), (9.0, Fault::Link { share: 0.0 })]
        );
    }

    #[test]
    fn packets_need_links_of_fixed_rates() {
        let packets = "[network]\nmode = \"packets\"\npacket_bytes = 1024\n";
        let (cluster, _) = parse(packets).unwrap();
        assert_eq!(cluster.network.mode, NetworkMode::Packets);
        assert_eq!(cluster.network.packet_bytes, 1024);
        check_refused(
            &format!(
                "{packets}messages = true\nnic_bits_per_s = 1e9\n\
                 [[event]]\nkind = \"link\"\nat_s = 1\nworker = 0\nshare = 0.5\n"
            ),
            &[
                "the frontend's interface has 1e11 bits/s, and that of a GPU 1e9",
                "an event of kind \"link\" has `share = 0.5`",
            ],
        );
        check_refused(
            "[network]\nmode = \"flows\"\npacket_bytes = 1024\nbackground = \"other.toml\"\n",
            &[
                "`network.packet_bytes` is not used: only \"packets\" uses it",
                "`network.background` is not used",
            ],
        );
        let down = "[[event]]\nkind = \"link\"\nat_s = 1\nworker = 0\nshare = 0\n";
        check_refused(&format!("{packets}{down}"), &["has no end"]);
        assert!(parse(&format!("{packets}{down}until_s = 2\n")).is_ok());
    }

    #[test]
    fn workers_fill_hosts_or_parts_of_them() {
        let text = |tensor: u32, gpus: u32, nics: u32, timing: &str| {
            format!(
                "[model]\npreset = \"llama-3.1-8b\"\n[pool.a]\nworkers = 3\n[engine]\nnum_gpu_blocks = 4096\n\
                 tensor_parallel_size = {tensor}\n[engine.timing]\n{timing}\n[network]\nmode = \"flows\"\n\
                 gpus_per_host = {gpus}\nnics_per_host = {nics}\n"
            )
        };
        let roofline = "kind = \"roofline\"\ngpu = \"h100-sxm\"";
        let hosts = |text: &str| {
            let (cluster, _) = parse(text).unwrap();
            let nics = cluster.network.nics(cluster.pools[0].engine.gpus());
            (cluster.hosts(), nics)
        };
        // Two workers of four GPUs share a host of eight; a host of two has half of one.
        assert_eq!(hosts(&text(4, 8, 0, roofline)), (vec![0, 0, 1], 4));
        assert_eq!(hosts(&text(4, 8, 4, roofline)), (vec![0, 0, 1], 2));
        assert_eq!(hosts(&text(4, 2, 0, roofline)), (vec![0, 2, 4], 4));
        assert_eq!(hosts(&text(8, 12, 0, roofline)), (vec![0, 1, 2], 8));
        let alone = text(4, 0, 0, roofline).replace("nics_per_host = 0\n", "");
        assert_eq!(hosts(&alone), (vec![0, 1, 2], 4));
        let constant = "kind = \"constant\"\nstep_ns = 10_000_000";
        assert!(parse(&text(4, 4, 0, constant)).is_ok());
        for (text, cause) in [
            (text(4, 2, 0, constant), "which part of them is collectives"),
            (text(8, 3, 0, roofline), "do not fill hosts of 3"),
            (
                text(4, 8, 3, roofline),
                "a divisor of `gpus_per_host`, which is 8",
            ),
            (text(2, 8, 2, roofline), "4 GPUs share a network interface"),
            (
                text(4, 0, 2, roofline),
                "`network.nics_per_host` is not used: `gpus_per_host` is 0",
            ),
            (
                text(4, 8, 0, roofline).replace("\"flows\"", "\"none\""),
                "`network.gpus_per_host` is not used",
            ),
        ] {
            check_refused(&text, &[cause]);
        }
    }

    #[test]
    fn uplinks_that_fail_must_exist() {
        let event = |leaf: u32, spine: u32| {
            format!("[[event]]\nkind = \"uplink\"\nat_s = 1\nleaf = {leaf}\nspine = {spine}\n")
        };
        let network = |mode: &str, spines: u32| {
            format!(
                "[pool.main]\nworkers = 4\n[network]\nmode = \"{mode}\"\nworkers_per_leaf = 2\n\
                 uplink_bits_per_s = 1e11\nspines = {spines}\n"
            )
        };
        let text = network("flows", 2) + &event(1, 1);
        let (cluster, _) = parse(&text).unwrap();
        let fault = Fault::Uplink { leaf: 1, spine: 1 };
        assert_eq!(
            (cluster.events[0].fault, &*cluster.events[0].workers),
            (fault, &[][..])
        );
        check_refused(
            &event(0, 0),
            &["is about a link between switches that is not modelled"],
        );
        check_refused(
            &(network("flows", 2) + &event(2, 2)),
            &[
                "`leaf = 2`, and the workers are under 2 leaf",
                "`spine = 2`, and `network.spines` is 2",
            ],
        );
        check_refused(
            "[network]\nspines = 2\n",
            &["the links to them have no rate"],
        );
        check_refused(
            &(network("packets", 2) + &event(0, 0) + &event(1, 1)),
            &["are about all spine switches"],
        );
        assert!(parse(&(network("packets", 2) + &event(0, 0) + &event(1, 0))).is_ok());
        assert!(parse(&(network("flows", 1) + &event(0, 0))).is_ok());
    }

    #[test]
    fn threads_need_a_host_that_the_scheduler_takes() {
        let text = "[host]\nmode = \"threads\"\nscheduler = \"slipstream\"\ncpus = 96\nllcs = 12\nwake_by = \"pipe\"\n";
        let threads = parse(text).unwrap().0.host.threads;
        assert_eq!(threads.scheduler, HostScheduler::Slipstream);
        assert_eq!((threads.llcs, threads.wake_by), (12, WakeMechanism::Pipe));
        assert_eq!(threads.wake_idle_us, None);
        for (cpus, llcs, cause) in [
            (10, 4, "`host.cpus` is 10 and `host.llcs` is 4"),
            (96, 1, "64 at most"),
            (2_048, 32, "has at most 1024 CPUs"),
        ] {
            check_refused(
                &format!("[host]\nmode = \"threads\"\ncpus = {cpus}\nllcs = {llcs}\n"),
                &[cause],
            );
        }
        check_refused(
            "[network]\nmode = \"flows\"\nmessages = true\n[host]\nmode = \"threads\"\n",
            &["`network.messages` puts a network between them"],
        );
        check_refused(
            "[host]\nmode = \"ideal\"\nbackground = 3\n",
            &["`host.background` is not used: only \"threads\" uses it"],
        );
    }

    #[test]
    fn events_of_groups_and_of_the_frontend() {
        let (cluster, _) = parse(
            "[pool.p]\nworkers = 2\nrole = \"prefill\"\n[pool.d]\nworkers = 3\nrole = \"decode\"\n\
             [[event]]\nkind = \"frontend\"\nat_s = 1\nuntil_s = 2\n\
             [[event]]\nkind = \"partition\"\nat_s = 3\nworkers = [4, 0, 4]\n\
             [[event]]\nkind = \"upgrade\"\nat_s = 4\npool = \"d\"\n\
             [[event]]\nkind = \"upgrade\"\nat_s = 5\ndrain_timeout_s = 7\n\
             [[event]]\nkind = \"gpu\"\nat_s = 6\nworker = 1\ndetect_s = 2\n\
             [[event]]\nkind = \"kv_loss\"\nat_s = 7\nworker = 2\n",
        )
        .unwrap();
        let found: Vec<_> = (cluster.events.into_iter())
            .map(|e| (e.fault, e.workers))
            .collect();
        let upgrade = |drain_timeout_s| Fault::Upgrade { drain_timeout_s };
        let partition = Fault::Partition {
            peer_deadline_s: 5.0,
        };
        assert_eq!(
            found,
            [
                (Fault::Frontend, vec![]),
                (partition, vec![0, 4]),
                (upgrade(None), vec![2, 3, 4]),
                (upgrade(Some(7.0)), vec![0, 1, 2, 3, 4]),
                (Fault::Gpu { detect_s: 2.0 }, vec![1]),
                (Fault::KvLoss { share: 1.0 }, vec![2]),
            ]
        );
        // In one line.
        let (cluster, _) =
            parse("event = [{ kind = \"frontend\", at_s = 10, until_s = 12 }]\n[pool.main]\n")
                .unwrap();
        assert_eq!(cluster.events[0].until_s, Some(12.0));
        check_refused(
            "[[event]]\nkind = \"frontend\"\nat_s = 1\nworker = 0\n\
             [[event]]\nkind = \"partition\"\nat_s = 1\nworkers = [1]\n\
             [[event]]\nkind = \"partition\"\nat_s = 1\nworker = 0\n\
             [[event]]\nkind = \"upgrade\"\nat_s = 1\nuntil_s = 2\npool = \"x\"\n\
             [[event]]\nkind = \"gpu\"\nat_s = 1\nuntil_s = 3\ndetect_s = 2\nworker = 0\n\
             [[event]]\nkind = \"kv_late\"\nat_s = 1\nworker = 0\nworkers = [0]\n",
            &[
                "`event[0].worker` is not used: it is a fault of the frontend",
                "`event[1].workers` is [1], but must be numbers of workers, each 0 to 0",
                "`event[2].workers` is missing",
                "`event[2].worker` is not used: \"partition\" has `workers`",
                "`event[3].until_s` is not used: it ends when the last worker is back",
                "`event[3].pool` is \"x\", but must be the name of a pool: main",
                "`until_s` is 3, but the worker ends at 3",
                "`event[5].workers` is not used: only \"partition\" uses it",
                "`event[5].delay_ms` is missing",
            ],
        );
    }

    #[test]
    fn a_model_larger_than_its_gpus_is_refused_with_the_numbers() {
        check_refused(
            "[model]\npreset = \"llama-3.1-70b\"\n[engine]\ntensor_parallel_size = 1\n",
            &[
                "c.toml:4:24: llama-3.1-70b takes 141.1 GB of weights and 0.8 GB of buffers to sample \
               256 sequences on each of 1 GPU of h100-sxm, but 85.5 GB of it is 77.0 GB (`gpu_memory_utilization` 0.9), which leaves no block of KV cache\n\
               hint: set `tensor_parallel_size = 4`, or use a larger GPU",
            ],
        );
    }

    /// The widths of counts on the wire and in addresses.
    #[test]
    fn counts_that_no_message_can_hold_are_refused() {
        let (cluster, _) = parse("[pool.a]\nworkers = 65_535\n[live]\nshards = 255\n").unwrap();
        assert_eq!(
            (cluster.pools[0].workers, cluster.live.shards),
            (65_535, 255)
        );
        check_refused(
            "[pool.a]\nworkers = 65_536\n",
            &["c.toml:2:11: `pool.a.workers` is 65536, but must be 1 to 65535"],
        );
        check_refused(
            "[pool.a]\nworkers = 65_535\n[pool.b]\nworkers = 1\n",
            &["the pools have 65536 workers, but must have at most 65535"],
        );
        check_refused(
            "[live]\nshards = 256\n",
            &["c.toml:2:10: `live.shards` is 256, but must be 0 to 255"],
        );
    }

    #[test]
    fn values_that_contradict_each_other_are_refused() {
        check_refused(
            "[engine]\ntensor_parallel_size = 3\n",
            &[
                "`tensor_parallel_size` is 3, but qwen3-8b has 32 attention heads, 8 key-value heads and an MLP width \
               of 12288, which do not all split evenly\nhint: one of 1, 2, 4, 8, 16, 32",
            ],
        );
        check_refused(
            "[engine]\nnum_gpu_blocks = 10\nmax_model_len = 1000\n",
            &["`max_model_len` is 1000, but the KV cache holds 160 tokens (10 blocks of 16)"],
        );
        check_refused(
            "[engine]\nblock_size = 64\nmax_model_len = 32\n",
            &["`block_size` is 64, but `max_model_len` is 32"],
        );
        check_refused(
            "[engine]\nmax_num_seqs = 64\nmax_num_batched_tokens = 32\n",
            &["`max_num_batched_tokens` is 32, but `max_num_seqs` is 64"],
        );
        check_refused(
            "[engine]\nenable_chunked_prefill = false\nmax_num_batched_tokens = 4096\n",
            &["chunked prefill is off"],
        );
        check_refused(
            "[engine]\nmax_num_seqs = 64\nmax_num_active_seqs = 65\n",
            &["c.toml:3:23: `max_num_active_seqs` is more than `max_num_seqs`, 64"],
        );
        check_refused(
            "[engine]\nmax_model_len = 512\nlong_prefill_token_threshold = 513\n",
            &["`long_prefill_token_threshold` is 513, but `max_model_len` is 512"],
        );
        check_refused(
            "[engine]\nmax_model_len = 512\nenable_chunked_prefill = false\nmax_num_scheduled_tokens = 511\n",
            &[
                "`max_num_scheduled_tokens` is less than `max_model_len`, 512, and chunked prefill is off",
            ],
        );
        check_refused(
            "[engine.timing]\nkind = \"roofline\"\ngpu = \"a100-sxm-80gb\"\ndtype = \"fp8\"\n",
            &["c.toml:4:9: `dtype` is \"fp8\", but a100-sxm-80gb has no FP8 units"],
        );
        check_refused(
            "[engine]\nmax_model_len = 50_000\n",
            &["`engine.max_model_len` is 50000, but must be 1 to 40960"],
        );
        check_refused(
            "[pool.a]\n[pool.b.engine]\nblock_size = 32\n",
            &["pool `a` has blocks of 16 tokens, but pool `b` of 32"],
        );
        check_refused("[pool.\"a b\"]\n", &["`a b` cannot name a pool"]);
        check_refused(
            "[pool.a]\nworkers = 65_000\n[pool.b]\nworkers = 65_000\n",
            &["130000 workers"],
        );
        check_refused(
            "[live]\nlisten = \"8000\"\nspeedup = -1\n",
            &[
                "`live.listen` is \"8000\"",
                "`live.speedup` is -1.0, but must be 0 to",
            ],
        );
    }

    #[test]
    fn keys_of_another_kind_are_refused_unless_a_flag_chose_the_kind() {
        let text = "[engine.timing]\nkind = \"constant\"\nstep_ns = 5\ngpu = \"h100-sxm\"\n\
                    [engine.output_len]\ntokens = 5\n";
        check_refused(
            text,
            &[
                "c.toml:4:1: `engine.timing.gpu` is not used: `kind` is \"constant\"",
                "c.toml:6:1: `engine.output_len.tokens` is not used: `kind` is \"lognormal\"",
            ],
        );
        let mut doc = Doc::parse("c.toml", b"[engine.timing]\ngpu = \"h200-sxm\"\n");
        doc.set("engine.timing.kind=constant");
        doc.set("engine.timing.step_ns=7");
        let (cluster, _) = read(doc, |_| Err(io::ErrorKind::NotFound.into())).unwrap();
        assert_eq!(
            cluster.pools[0].engine.timing,
            TimingConfig::Constant { step_ns: 7 }
        );
        check_refused(
            "[engine.timing]\nkind = \"constant\"\n",
            &["`engine.timing.step_ns` is missing"],
        );
    }

    #[test]
    fn autoscaling_is_read_for_each_pool() {
        let text = "[autoscale]\npolicy = \"queue\"\ninterval_s = 5\n[pool.a]\nworkers = 4\n\
                    [pool.b]\nworkers = 8\n[pool.b.autoscale]\npolicy = \"slo\"\nworkers_min = 3\n";
        let (cluster, _) = parse(text).unwrap();
        let of = |pool: usize| cluster.pools[pool].autoscale.unwrap();
        assert_eq!(
            (of(0).policy, of(1).policy),
            (AutoscalePolicy::Queue, AutoscalePolicy::Slo)
        );
        assert_eq!((of(0).target, of(1).target), (4.0, 0.8));
        assert_eq!((of(0).interval_s, of(1).interval_s), (5.0, 5.0));
        assert_eq!((of(0).workers_start, of(1).workers_start), (1, 3));
        assert_eq!(Cluster::default().pools[0].autoscale, None);
        check_refused("[autoscale]\ntarget = 0.5\n", &["`policy` is \"none\""]);
        check_refused(
            "[autoscale]\npolicy = \"queue\"\nworkers_min = 2\n",
            &["workers_min` is 2"],
        );
        check_refused("[autoscale]\npolicy = \"cpu\"\n", &["\"utilization\""]);
        check_refused(
            "[autoscale]\npolicy = \"slo\"\nworkers_max = 4\n[pool.main]\nengines = [\"http://a:1\"]\n",
            &["first tokens are not measured"],
        );
        check_refused(
            "[autoscale]\npolicy = \"queue\"\n[pool.main]\nengines = [\"http://a:1\"]\n",
            &["workers_max` is missing"],
        );
        let text = "[autoscale]\npolicy = \"queue\"\nworkers_max = 9\n[pool.main]\nengines = [\"http://a:1\"]\n";
        let (cluster, _) = parse(text).unwrap();
        assert_eq!(cluster.pools[0].autoscale.unwrap().workers_max, 9);
    }

    #[test]
    fn a_trend_has_a_window_and_looks_as_far_ahead_as_a_start_takes() {
        let of = |text: &str| {
            let text = format!("[engine]\nstartup_s = 40\n[autoscale]\n{text}");
            parse(&text).unwrap().0.pools[0].autoscale.unwrap()
        };
        let plain = of("policy = \"predictive\"\ninterval_s = 10\n");
        assert_eq!((plain.trend_s, plain.lookahead_s), (80.0, 50.0));
        let own = of("policy = \"predictive\"\ntrend_s = 60\nlookahead_s = 5\n");
        assert_eq!((own.trend_s, own.lookahead_s), (60.0, 5.0));
        for (keys, part) in [
            ("policy = \"predictive\"\ntrend_s = 20\n", "`trend_s` is 20"),
            ("policy = \"queue\"\ntrend_s = 60\n", "not \"predictive\""),
            ("policy = \"queue\"\nttft_s = 1\n", "not \"slo\""),
            ("policy = \"custom\"\ntarget = 1\n", "the function decides"),
        ] {
            check_refused(&format!("[autoscale]\n{keys}"), &[part]);
        }
        check_refused("[live.autoscale]\nwebhook = \"a:1\"\n", &["http://a:1"]);
        check_refused(
            "[live.autoscale]\nwebhook_timeout_s = 1\n",
            &["there is no `webhook`"],
        );
    }

    #[test]
    fn settings_of_vllms_scheduler_are_read() {
        let engine = |text: &str| {
            let (cluster, _) = parse(&format!("[engine]\n{text}")).unwrap();
            cluster.pools[0].engine.clone()
        };
        let default = engine("");
        // As vLLM's.
        assert!(default.async_scheduling && default.scheduler_reserve_full_isl);
        let changed = engine(
            "async_scheduling = false\nlong_prefill_token_threshold = 100\n\
             long_prefill_token_threshold_adaptive = true\nmax_num_active_seqs = 5\n\
             max_num_scheduled_tokens = 300\nscheduler_reserve_full_isl = false\n",
        );
        let expected = EngineConfig {
            async_scheduling: false,
            long_prefill_token_threshold: 100,
            long_prefill_token_threshold_adaptive: true,
            max_num_active_seqs: Some(5),
            max_num_scheduled_tokens: Some(300),
            scheduler_reserve_full_isl: false,
            ..default
        };
        assert_eq!(changed, expected);
    }

    #[test]
    fn settings_of_vllm_that_are_not_modelled_are_refused_by_name() {
        for (key, _) in NOT_MODELLED {
            let text = format!("[engine]\n{key} = 1\n");
            check_refused(&text, &[&format!("`engine.{key}` is not modelled")]);
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_mistakes() {
        check_refused(
            "[model]\nconfig = \"no.json\"\n",
            &["c.toml:2:10: `model.config`: no.json: "],
        );
        check_refused(
            "[model]\nconfig = \"broken.json\"\n",
            &["`model.config`: broken.json: not JSON: EOF"],
        );
        check_refused(
            "[engine.timing]\nkind = \"table\"\npath = \"no.csv\"\n",
            &["`path`: no.csv: "],
        );
        check_refused(
            "[engine.timing]\nkind = \"table\"\n",
            &["`engine.timing.path` is missing"],
        );
    }

    #[test]
    fn a_config_json_gives_name_and_shape() {
        let (cluster, settings) = parse("[model]\nconfig = \"models/tiny/config.json\"\n").unwrap();
        assert_eq!(cluster.model.name, "tiny");
        assert_eq!(cluster.model.shape.layers, 2);
        assert_eq!(cluster.pools[0].engine.max_model_len, 512);
        let origin = &settings.get("model.name").unwrap().origin;
        assert_eq!(origin.to_string(), "folder of model.config");
    }

    /// The `config.json` of an FP8 checkpoint, alone and with settings of the file.
    fn parse_with_json(json: &'static str, text: &str) -> Result<(Cluster, Settings), Diagnostics> {
        let text = format!("[model]\nconfig = \"m/config.json\"\n{text}");
        read(Doc::parse("c.toml", text.as_bytes()), |path| {
            if path.ends_with("m/config.json") {
                Ok(json.into())
            } else {
                Err(io::ErrorKind::NotFound.into())
            }
        })
    }

    const FP8_JSON: &str = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
        "quantization_config": {"quant_method": "fp8"}}"#;

    #[test]
    fn an_fp8_checkpoint_sets_the_format_of_weights() {
        let (cluster, settings) = parse_with_json(FP8_JSON, "").unwrap();
        let engine = &cluster.pools[0].engine;
        let TimingConfig::Calibrated { dtype, .. } = &engine.timing else {
            panic!("{:?}", engine.timing)
        };
        assert_eq!((*dtype, engine.kv_cache_dtype), (Dtype::Fp8, Dtype::Bf16));
        let dtype = settings.get("pool.main.engine.timing.dtype").unwrap();
        assert_eq!(dtype.value.as_deref(), Some("\"fp8\""));
        assert_eq!(dtype.origin.to_string(), "checkpoint of m");
        for (text, part) in [
            (
                "[engine.timing]\ndtype = \"bf16\"\n",
                "`dtype` is \"bf16\", but m has fp8 weights",
            ),
            (
                "[engine.timing]\nkind = \"roofline\"\ngpu = \"a100-sxm-80gb\"\n",
                "a100-sxm-80gb has no FP8 units, and FP8 weights with 16-bit arithmetic",
            ),
        ] {
            let diagnostics = parse_with_json(FP8_JSON, text).unwrap_err().to_string();
            assert!(diagnostics.contains(part), "{diagnostics}");
        }
    }

    #[test]
    fn host_memory_holds_whole_blocks_of_a_rank() {
        let tier = |text: &str| {
            let text = format!("[model]\npreset = \"llama-3.1-8b\"\n{text}");
            parse(&text).map(|(cluster, _)| cluster.pools[0].engine.host_tier)
        };
        assert_eq!(tier("").unwrap(), None);
        // A block: 16 tokens x 2 x 32 layers x 8 heads x 128 x 2 bytes = 2 MiB.
        let on = "[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\nlatency_us = 3\n";
        let expected = HostTierConfig {
            blocks: 512,
            load_ns_per_block: 2_097_152,
            latency_ns: 3_000,
        };
        assert_eq!(tier(on).unwrap(), Some(expected));
        // Each of two GPUs loads its half.
        let two = tier(&format!("[engine]\ntensor_parallel_size = 2\n{on}"));
        let half = HostTierConfig {
            load_ns_per_block: 1_048_576,
            ..expected
        };
        assert_eq!(two.unwrap(), Some(half));
        for (text, part) in [
            ("gib = 1", "PCIe 5.0 x16 carries at most 63e9"),
            ("gib = 0.001\nbytes_per_s = 1e9", "less than one block"),
            ("gib = -1\nbytes_per_s = 1e9", "0"),
        ] {
            let error = tier(&format!("[engine.host_tier]\n{text}\n")).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn peers_are_asked_if_enabled() {
        let tier = |text: &str| {
            let text = format!("[model]\npreset = \"llama-3.1-8b\"\n[engine.peer_tier]\n{text}");
            parse(&text).map(|(cluster, _)| cluster.pools[0].engine.peer_tier)
        };
        assert_eq!(tier("").unwrap(), None);
        let expected = PeerTierConfig { latency_ns: 2_500 };
        assert_eq!(
            tier("enabled = true\nlatency_us = 2.5\n").unwrap(),
            Some(expected)
        );
        for (text, part) in [
            ("latency_us = 1\n", "`enabled` is false"),
            ("enabled = true\nlatency_us = -1\n", "0"),
        ] {
            let error = tier(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_disk_holds_what_host_memory_evicts() {
        let disk = |text: &str| {
            let text = format!("[model]\npreset = \"llama-3.1-8b\"\n{text}");
            parse(&text).map(|(cluster, _)| cluster.pools[0].engine.disk_tier)
        };
        const HOST: &str = "[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\n";
        assert_eq!(disk(HOST).unwrap(), None);
        let on = "[engine.disk_tier]\ngib = 2\nbytes_per_s = 2e9\nwrite_bytes_per_s = 1e9\nlatency_us = 100\n";
        let expected = DiskTierConfig {
            blocks: 1024,
            load_ns_per_block: 1_048_576,
            store_ns_per_block: 2_097_152,
            latency_ns: 100_000,
        };
        assert_eq!(disk(&format!("{HOST}{on}")).unwrap(), Some(expected));
        // The GPUs of a rank share its disk.
        let two = disk(&format!("[engine]\ntensor_parallel_size = 2\n{HOST}{on}"));
        assert_eq!(two.unwrap(), Some(expected));
        for (text, part) in [
            (on, "there is no `host_tier`"),
            (&*format!("{HOST}[engine.disk_tier]\ngib = 1\n"), "15.8e9"),
            (
                &format!("{HOST}[engine.disk_tier]\nlatency_us = 1\n"),
                "`gib` is 0",
            ),
        ] {
            let error = disk(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn speculation_is_given_by_measured_acceptance() {
        let read = |text: &str| {
            let text = format!("[engine.speculation]\n{text}\n");
            parse(&text).map(|(cluster, _)| cluster.pools[0].engine.speculation.clone())
        };
        assert_eq!(read("").unwrap(), None);
        let on = "num_speculative_tokens = 2\nmethod = \"eagle\"\nacceptance = [0.8, 0.5]\ndraft_us = 300\n";
        let expected = SpeculationConfig {
            method: SpeculationMethod::Eagle,
            acceptance: vec![0.8, 0.5],
            draft_ns: 300_000.0,
            draft_share: 0.0,
        };
        assert_eq!(read(on).unwrap(), Some(expected.clone()));
        let longer = on.replace("0.5]", "0.5, 0.2]");
        assert_eq!(read(&longer).unwrap(), Some(expected));
        for (text, part) in [
            (
                "num_speculative_tokens = 2\nmethod = \"mtp\"",
                "Per-position acceptance rate",
            ),
            (
                "num_speculative_tokens = 2\nacceptance = [0.8, 0.5]",
                "name the drafter",
            ),
            (
                "num_speculative_tokens = 2\nmethod = \"mtp\"\nacceptance = [0.8]",
                "a list of at least 2",
            ),
            (
                "num_speculative_tokens = 2\nmethod = \"mtp\"\nacceptance = [0.5, 0.8]",
                "none larger than the one before",
            ),
            (
                "num_speculative_tokens = 1\nmethod = \"mtp\"\nacceptance = [1.5]",
                "shares of 0 to 1",
            ),
            ("method = \"mtp\"", "`num_speculative_tokens` is 0"),
            ("num_speculative_tokens = 33", "32"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        let vllm = parse("[engine]\nspeculative_config = {}\n").unwrap_err();
        assert!(vllm.to_string().contains("[engine.speculation]"), "{vllm}");
    }

    #[test]
    fn experts_that_are_divided_may_be_loaded_unequally() {
        let text = "[model]\npreset = \"qwen3-235b-a22b\"\n[engine]\ntensor_parallel_size = 8\n\
                    enable_expert_parallel = true\nexpert_imbalance = 1.5\n";
        let (cluster, _) = parse(text).unwrap();
        assert_eq!(cluster.pools[0].engine.expert_imbalance, Some(1.5));
        check_refused(
            &text.replace("1.5", "0.9"),
            &["`engine.expert_imbalance` is 0.9, but must be 1 to 1024"],
        );
        check_refused(
            "[engine]\nexpert_imbalance = 1.5\n",
            &["`enable_expert_parallel` is false"],
        );
    }

    #[test]
    fn adapters_have_room_in_host_memory() {
        let lora = |text: &str| {
            let (cluster, _) = parse(&format!("[engine.lora]\n{text}")).unwrap();
            cluster.pools[0].engine.lora
        };
        assert_eq!(lora(""), None);
        let all =
            lora("max_loras = 2\nmax_cpu_loras = 9\nload_ms = 1.5\nactivate_ms = 2\n").unwrap();
        assert_eq!((all.max_loras, all.max_cpu_loras), (2, 9));
        assert_eq!((all.load_ns, all.activate_ns), (1_500_000, 2_000_000));
        assert_eq!(lora("max_loras = 3\n").unwrap().max_cpu_loras, 3);
        check_refused(
            "[engine.lora]\nmax_loras = 3\nmax_cpu_loras = 2\n",
            &["`max_cpu_loras` is less than `max_loras`, 3"],
        );
        check_refused("[engine.lora]\nload_ms = 3\n", &["`max_loras` is 0"]);
    }

    #[test]
    fn stages_divide_layers_and_memory() {
        // Worked out from vLLM's rule: the rest goes to the stages before the last, from the back.
        for (layers, stages, expected) in [
            (36, 1, vec![36]),
            (36, 2, vec![18, 18]),
            (32, 3, vec![11, 11, 10]),
            (61, 4, vec![15, 15, 16, 15]),
            (63, 4, vec![16, 16, 16, 15]),
        ] {
            assert_eq!(layers_of_stages(layers, stages), expected);
        }
        let engine = |text: &str| {
            let (cluster, _) =
                parse(&format!("[model]\npreset = \"llama-3.1-8b\"\n{text}")).unwrap();
            (cluster.gpus(), cluster.pools[0].engine.clone())
        };
        let (one_gpus, one) = engine("");
        let (two_gpus, two) = engine(
            "[engine]\npipeline_parallel_size = 2\npipeline_link_bytes_per_s = 1e9\npipeline_latency_us = 30\n",
        );
        assert_eq!((one_gpus, two_gpus, one.pipeline), (1, 2, None));
        let stages = two.pipeline.unwrap();
        assert_eq!((stages.layers, stages.latency_ns), (vec![16, 16], 30_000.0));
        // 4,096 numbers of two bytes.
        assert_eq!(stages.send_ns_per_token, 8_192.0);
        // Half of the weights and half of each block: more than twice the blocks.
        assert!(
            two.num_gpu_blocks > 2 * one.num_gpu_blocks,
            "{}",
            two.num_gpu_blocks
        );
        // The link of the GPU.
        let (_, near) = engine("[engine]\npipeline_parallel_size = 2\n");
        let send_ns = near.pipeline.unwrap().send_ns_per_token;
        assert!(send_ns > 0.0 && send_ns < 8_192.0 / 10.0, "{send_ns}");
        let (_, free) = engine(
            "[engine]\npipeline_parallel_size = 2\n[engine.timing]\nkind = \"constant\"\nstep_ns = 1\n",
        );
        assert_eq!(free.pipeline.unwrap().send_ns_per_token, 0.0);
        check_refused(
            "[engine]\npipeline_parallel_size = 37\n",
            &["`pipeline_parallel_size` is 37, but qwen3-8b has 36 layers"],
        );
        check_refused(
            "[engine]\npipeline_latency_us = 5\n",
            &["`pipeline_parallel_size` is 1"],
        );
        check_refused(
            "[engine]\npipeline_parallel_size = 2\n[engine.speculation]\nnum_speculative_tokens = 1\n\
             method = \"mtp\"\nacceptance = [0.5]\n",
            &["pipelines that verify drafts are not modelled"],
        );
    }

    #[test]
    fn the_kv_cache_has_a_format_of_its_own() {
        let blocks = |text: &str| {
            let (cluster, _) = parse(text).unwrap();
            let bytes = cluster.kv_bytes_per_token()[0];
            (cluster.pools[0].engine.num_gpu_blocks, bytes)
        };
        let plain = blocks("");
        let weights = blocks("[engine.timing]\ndtype = \"fp8\"\n");
        let cache = blocks("[engine]\nkv_cache_dtype = \"fp8\"\n");
        let auto = blocks("[engine]\nkv_cache_dtype = \"auto\"\n");
        // FP8 weights leave room for more blocks of the same size; an FP8 cache halves their size.
        assert_eq!(auto, plain);
        assert!(weights.0 > plain.0 && weights.0 < plain.0 * 3 / 2);
        assert_eq!(weights.1, plain.1);
        assert_eq!((cache.0 / 2, cache.1 * 2), plain);
        // The checkpoint contains scales for an FP8 cache.
        let scales = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
            "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8"}}"#;
        for (text, expected) in [
            ("", Dtype::Fp8),
            ("[engine]\nkv_cache_dtype = \"bf16\"\n", Dtype::Bf16),
        ] {
            let (cluster, _) = parse_with_json(scales, text).unwrap();
            assert_eq!(cluster.pools[0].engine.kv_cache_dtype, expected);
        }
    }

    #[test]
    fn ranks_of_a_mixture_of_experts_divide_them_or_are_refused() {
        check_refused(
            "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 2\ndata_parallel_size = 2\n\
             [engine.timing]\nkind = \"roofline\"\n",
            &["c.toml:5:22: `data_parallel_size` is 2, but mixtral-8x7b is a mixture of experts"],
        );
        // Two ranks divide the experts: twice the GPUs, and more room than one rank has.
        let mixture = |ranks: u32| {
            let text = format!(
                "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 2\n\
                 data_parallel_size = {ranks}\nenable_expert_parallel = true\n"
            );
            let engine = parse(&text).unwrap().0.pools[0].engine.clone();
            engine.num_gpu_blocks
        };
        assert!(mixture(2) > mixture(1) * 3 / 2);
        check_refused(
            "[engine]\nenable_expert_parallel = true\n",
            &["`enable_expert_parallel` is true, but qwen3-8b has no experts"],
        );
        let dense = "[engine]\ndata_parallel_size = 2\n";
        assert_eq!(parse(dense).unwrap().0.gpus(), 2);
    }

    #[test]
    fn ranks_meet_if_they_share_experts() {
        let mixture = |text: &str| {
            format!(
                "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 2\n\
                 data_parallel_barrier = true\n{text}"
            )
        };
        let barrier = |text: &str| parse(text).unwrap().0.pools[0].engine.data_parallel_barrier;
        assert!(!barrier("[engine]\ndata_parallel_size = 2\n"));
        assert!(barrier(&mixture("data_parallel_size = 2\n")));
        // Times that are stated are those of ranks that share experts; a roofline has all experts on each.
        let constant = "[engine.timing]\nkind = \"constant\"\nstep_ns = 5\n";
        assert!(barrier(&mixture(&format!(
            "data_parallel_size = 2\n{constant}"
        ))));
        let roofline = "data_parallel_size = 2\n[engine.timing]\nkind = \"roofline\"\n";
        check_refused(&mixture(roofline), &["`data_parallel_size` is 2"]);
        assert!(!barrier(&mixture("")));
        check_refused(
            &mixture("data_parallel_size = 2\npipeline_parallel_size = 2\n"),
            &["`data_parallel_barrier` is true, but `pipeline_parallel_size` is 2"],
        );
        check_refused(
            &mixture("data_parallel_size = 2\n[host]\nmode = \"threads\"\ncpus = 4\n"),
            &["`host.mode` is \"threads\", whose engines begin their passes one by one"],
        );
        check_refused(
            "[engine]\ndata_parallel_size = 2\ndata_parallel_barrier = true\n",
            &["c.toml:3:25: `data_parallel_barrier` is true, but the ranks of qwen3-8b"],
        );
    }

    #[test]
    fn an_encoder_has_a_time_and_the_room_of_a_pass() {
        let encoder = |text: &str| {
            let text = format!("[engine]\nmax_num_batched_tokens = 4096\n[engine.encoder]\n{text}");
            parse(&text).map(|(cluster, _)| cluster.pools[0].engine.encoder)
        };
        assert_eq!(encoder("").unwrap(), None);
        let stated = encoder("enabled = true\ntoken_us = 20\ninput_us = 5\n")
            .unwrap()
            .unwrap();
        assert_eq!((stated.budget_tokens, stated.cache_tokens), (4096, 4096));
        assert_eq!((stated.token_ns, stated.input_ns), (20e3, 5e3));
        // 2 x 0.5e9 x 4 operations at half of 989.4e12 per second.
        let derived = encoder("enabled = true\nparameters = 0.5e9\n")
            .unwrap()
            .unwrap();
        assert!(
            (derived.token_ns - 4e9 / 494.7e12 * 1e9).abs() < 10.0,
            "{}",
            derived.token_ns
        );
        let refused = |text: &str| encoder(text).unwrap_err().to_string();
        for (text, part) in [
            ("enabled = true\n", "`engine.encoder.token_us` is missing"),
            ("token_us = 5\n", "`enabled` is false"),
            (
                "enabled = true\ntoken_us = 5\nflops_share = 0.4\n",
                "`parameters` is not set",
            ),
            (
                "enabled = true\nparameters = 1e9\n[engine.timing]\nkind = \"constant\"\nstep_ns = 5\n",
                "`engine.timing` has none",
            ),
            (
                "enabled = true\ntoken_us = 5\n[engine.peer_tier]\nenabled = true\n",
                "`engine.peer_tier` is not modelled",
            ),
        ] {
            let error = refused(text);
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn formats_that_no_checkpoint_has_are_refused() {
        let of = |model: &str, dtype: &str| {
            let text = format!(
                "[model]\npreset = \"{model}\"\n[engine]\ntensor_parallel_size = 8\n\
                 [engine.timing]\ngpu = \"b200-sxm\"\ndtype = \"{dtype}\"\n"
            );
            parse(&text).map(|_| ()).map_err(|e| e.to_string())
        };
        // Fewer bits than the model was released in are published as other checkpoints; more are not.
        for (model, dtype) in [
            ("llama-3.1-70b", "int4"),
            ("llama-3.1-70b", "nvfp4"),
            ("deepseek-v3", "fp8"),
            ("deepseek-v3", "nvfp4"),
            ("gpt-oss-120b", "mxfp4"),
        ] {
            assert_eq!(of(model, dtype), Ok(()), "{model} {dtype}");
        }
        for (model, dtype, has) in [
            ("gpt-oss-120b", "fp8", "mxfp4"),
            ("gpt-oss-120b", "bf16", "mxfp4"),
            ("gpt-oss-120b", "nvfp4", "mxfp4"),
            ("deepseek-v3", "bf16", "fp8"),
            ("deepseek-v3", "int8", "fp8"),
        ] {
            let error = of(model, dtype).unwrap_err();
            let expected = format!("`dtype` is \"{dtype}\", but {model} has {has} weights");
            assert!(error.contains(&expected), "{error}");
        }
        // A `config.json` is one checkpoint.
        for dtype in ["nvfp4", "int4", "bf16"] {
            let text = format!("[engine.timing]\ndtype = \"{dtype}\"\n");
            let error = parse_with_json(FP8_JSON, &text).unwrap_err().to_string();
            assert!(error.contains("but m has fp8 weights"), "{error}");
        }
    }

    #[test]
    fn a_flag_that_a_pool_overrides_is_refused_with_the_key_to_set() {
        let text = "[engine]\nblock_size = 32\n[pool.main.engine]\nmax_num_seqs = 64\n\
                    timing.gpu = \"l40s\"\n";
        let resolve = |sets: &[&str]| {
            let mut doc = Doc::parse("c.toml", text.as_bytes());
            for set in sets {
                doc.set(set);
            }
            read(doc, |_| Err(io::ErrorKind::NotFound.into())).map_err(|e| e.to_string())
        };
        let error = resolve(&["engine.max_num_seqs=8", "engine.timing.gpu=h100-sxm"]).unwrap_err();
        assert_eq!(
            error,
            "--set engine.max_num_seqs=8: `engine.max_num_seqs` would have no effect: \
             `pool.main.engine.max_num_seqs` is set (c.toml:4)\n\
             hint: set `pool.main.engine.max_num_seqs` instead\n\
             error: --set engine.timing.gpu=h100-sxm: `engine.timing.gpu` would have no effect: \
             `pool.main.engine.timing.gpu` is set (c.toml:5)\n\
             hint: set `pool.main.engine.timing.gpu` instead"
        );
        // The pool's own key, and keys that no pool has.
        let own = "pool.main.engine.max_num_seqs=8";
        let (cluster, _) = resolve(&[own, "engine.block_size=16"]).unwrap();
        let engine = &cluster.pools[0].engine;
        assert_eq!((engine.max_num_seqs, engine.block_size), (8, 16));
        assert!(resolve(&["engine.max_num_seqs=4", own]).is_ok());
    }

    #[test]
    fn a_gpu_like_a_preset_with_its_numbers_is_that_preset() {
        let text = "[gpu.same]\nlike = \"h100-sxm\"\n[gpu.big]\nlike = \"h100-sxm\"\nmemory_bytes = 141e9\n\
                    [pool.a.engine.timing]\ngpu = \"same\"\n[pool.b.engine.timing]\ngpu = \"big\"\n";
        let (cluster, _) = parse(text).unwrap();
        let names: Vec<&str> = cluster
            .pools
            .iter()
            .map(|pool| match &pool.engine.timing {
                TimingConfig::Calibrated { gpu, .. } => gpu.measured_name(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(names, ["h100-sxm", "big"]);
    }

    #[test]
    fn a_gpu_and_a_link_are_said_by_numbers() {
        let text = "[link.pairs]\nkind = \"fabric\"\nbytes_per_s = 300e9\nreduce_us = 12\n\
                    [gpu.ours]\nbf16_flops = 148e12\nmemory_bytes = 96e9\nmemory_bytes_per_s = 4e12\nlink = \"pairs\"\n\
                    [gpu.big]\nlike = \"h100-sxm\"\nmemory_bytes = 141e9\n\
                    [pool.a.engine.timing]\ngpu = \"ours\"\n[pool.b.engine.timing]\ngpu = \"big\"\n";
        let (cluster, settings) = parse(text).unwrap();
        let gpu = |pool: usize| match &cluster.pools[pool].engine.timing {
            TimingConfig::Calibrated { gpu, .. } => gpu,
            other => panic!("{other:?}"),
        };
        let (ours, big, preset) = (gpu(0), gpu(1), preset::gpu("h100-sxm").unwrap());
        assert_eq!(
            (&*ours.name, ours.kin(), ours.fp8_flops),
            ("ours", "ours", None)
        );
        assert_eq!(
            (ours.link, ours.link_bytes_per_s, ours.reduce_us),
            (Link::Fabric, 300e9, Some(12.0))
        );
        assert_eq!((big.kin(), big.fp8_flops), ("h100-sxm", preset.fp8_flops));
        assert_eq!((big.memory_bytes, big.link), (141_000_000_000, preset.link));
        assert!(cluster.pools[1].engine.num_gpu_blocks > cluster.pools[0].engine.num_gpu_blocks);
        let (again, _) = parse(&settings.to_toml()).unwrap();
        assert_eq!(again, cluster);
        check_refused(
            "[gpu.h20]\nmemory_bytes = 1e9\nlink = \"x\"\n[engine.timing]\ngpu = \"y\"\n",
            &[
                "`h20` is a preset",
                "`gpu.h20.bf16_flops` is missing",
                "`gpu.h20.memory_bytes_per_s` is missing",
                "there is no table `[link.x]`",
                "`engine.timing.gpu` is a string (\"y\"), but must be one of \"h20\", \"a100-sxm-80gb\"",
            ],
        );
    }

    #[test]
    fn kv_blocks_follow_from_the_gpu() {
        let (cluster, settings) = parse("").unwrap();
        assert_eq!(cluster, Cluster::default());
        // 81,559 MiB x 0.9 - 16.38 GB of weights - 24 bytes x 256 x 151,936 logits, over 16 tokens of
        // 147,456 bytes.
        let engine = &cluster.pools[0].engine;
        assert_eq!(engine.num_gpu_blocks, 25_284);
        assert_eq!(
            engine.max_model_len, 40_960,
            "the model's, since the cache holds more"
        );
        let blocks = settings.get("pool.main.engine.num_gpu_blocks").unwrap();
        assert_eq!(
            blocks.origin.to_string(),
            "h100-sxm 85.5 GB x 0.9 - 16.4 GB of weights - 0.9 GB to sample 256 sequences = 59.7 GB",
        );
        let tight = "[model]\npreset = \"qwen3-32b\"\n[engine]\ngpu_memory_utilization = 0.85\n";
        let (cluster, settings) = parse(tight).unwrap();
        let len = settings.get("pool.main.engine.max_model_len").unwrap();
        assert_eq!(
            len.origin.to_string(),
            "KV cache holds 23776, qwen3-32b allows 40960"
        );
        assert_eq!(cluster.pools[0].engine.max_model_len, 23_776);
    }

    #[test]
    fn kv_blocks_are_close_to_those_that_vllm_reports() {
        let blocks = |gpu: &str, sequences: u32| {
            let text = format!(
                "[model]\npreset = \"llama-3.1-8b\"\n[engine]\nmax_num_seqs = {sequences}\n\
                 [engine.timing]\ngpu = \"{gpu}\"\n"
            );
            parse(&text).unwrap().0.pools[0].engine.num_gpu_blocks
        };
        // vLLM on one H100 of 80 GB.
        assert!((27_000..=28_000).contains(&blocks("h100-sxm", 1024)));
        // vLLM on an RTX 4090 has 2,593. What is not modelled is more of a small GPU.
        assert!((2_593..2_593 * 11 / 10).contains(&blocks("rtx-4090", 256)));
        // 24 bytes x 768 x 128,256 logits more, in blocks of 2 MiB.
        assert_eq!(blocks("h100-sxm", 256) - blocks("h100-sxm", 1024), 1_127);
    }

    #[test]
    fn sampling_too_many_sequences_for_the_memory_is_refused() {
        let text = "[engine]\nmax_num_seqs = 65536\n";
        check_refused(
            text,
            &[
                "c.toml:2:16: qwen3-8b takes 16.4 GB of weights and 239.0 GB of buffers to sample 65,536 \
               sequences on each of 1 GPU of h100-sxm, but 85.5 GB of it is 77.0 GB (`gpu_memory_utilization` \
               0.9), which leaves no block of KV cache\n\
               hint: set `max_num_seqs = 8307` or less, or use a larger GPU",
            ],
        );
        parse(&text.replace("65536", "8307")).unwrap_or_else(|e| panic!("{e}"));
        // A number of blocks from an engine's log holds whatever is counted here.
        let given = format!("{text}num_gpu_blocks = 1000\n");
        assert_eq!(
            parse(&given).unwrap().0.pools[0].engine.num_gpu_blocks,
            1000
        );
    }

    #[test]
    fn a_model_of_windows_alone_has_a_bounded_cache() {
        let json = r#"{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
            "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096}"#;
        let (cluster, _) =
            parse_with_json(json, "[engine.timing]\nkind = \"calibrated\"\n").unwrap();
        // 76.97 GB - 14.48 GB of weights - 0.20 GB to sample, over 16 tokens of 131,072 bytes.
        let blocks = cluster.pools[0].engine.num_gpu_blocks;
        assert!((29_600..29_800).contains(&blocks), "{blocks}");
    }

    #[test]
    fn each_real_engine_is_a_worker() {
        let text = "[pool.a]\nengines = [\"http://x:1\", \"http://[::1]:2/v\"]\nkind = \"vllm\"\n\
                    [pool.b]\nengines = [\"http://y\"]\n[upstream]\nresume = \"tokens\"\n";
        let (cluster, settings) = parse(text).unwrap();
        let workers: Vec<u32> = cluster.pools.iter().map(|pool| pool.workers).collect();
        assert_eq!(workers, [2, 1]);
        assert!(cluster.has_engines());
        assert_eq!(cluster.upstream.resume, crate::cluster::Resume::Tokens);
        // The printed text reads back.
        let (again, _) = parse(&settings.to_toml()).unwrap();
        assert_eq!(again, cluster);
    }

    #[test]
    fn mistakes_about_real_engines_are_named() {
        check_refused(
            "[pool.a]\nengines = [\"http://a:1\", \"http://a:1\", \"ftp://b\"]\nworkers = 3\nrole = \"prefill\"\nkind = \"llamacpp\"\n",
            &[
                "listed twice",
                "does not begin with http://",
                "each of `engines` is one worker",
                "the role \"both\"",
                "no pool generates answers",
            ],
        );
        check_refused("[pool.a]\nengines = []\n", &["1 to 4,096"]);
        check_refused("[pool.a]\nkind = \"vllm\"\n", &["has no `engines`"]);
        check_refused("[pool.a]\nweight = 3\n", &["has no `engines`"]);
        check_refused(
            "[pool.a]\nengines = [\"http://a:1\"]\nca_file = \"ca.pem\"\n",
            &["no engine of the pool is `https://`"],
        );
        check_refused(
            "[pool.a]\nengines = [\"https://a\"]\ncert_file = \"a.pem\"\nserver_name = \"a b\"\n",
            &["without `key_file`", "a host name or an IP address"],
        );
        check_refused(
            "[pool.a]\nengines = [\"http://a:1\"]\n[pool.b]\nengines = [\"http://a:1/\"]\n[pool.c]\n",
            &["in pool `a` and in pool `b`", "cannot have both"],
        );
        check_refused(
            "[pool.a]\nengines = [\"http://a:1\"]\nweight = 1\nmirror = 0.5\n",
            &["remove one of them", "no pool answers clients"],
        );
        let apart = "[pool.p]\nengines = [\"http://p:1\"]\nrole = \"prefill\"\n[pool.d]\nengines = [\"http://d:1\"]\n";
        for (more, expected) in [
            (
                "role = \"decode\"\nkind = \"sglang\"\n[pool.q]\nengines = [\"http://q:1\"]\nrole = \"prefill\"\nkind = \"vllm\"\n",
                "pool `d` has SGLang's protocol, and pool `q` another",
            ),
            (
                "[pool.q]\nengines = [\"http://q:1\"]\nrole = \"prefill\"\nkind = \"sglang\"\n",
                "and pool `d` the role \"both\"",
            ),
            (
                "role = \"decode\"\nkind = \"sglang\"\n[router]\nremote_prefill_tokens_min = 9\n",
                "remove both keys",
            ),
            ("kv_protocol = \"mooncake\"\n", "role is not \"prefill\""),
            ("bootstrap_port = 1\n", "role is not \"prefill\""),
        ] {
            check_refused(&format!("{apart}{more}"), &[expected]);
        }
        check_refused(
            "[pool.a]\nengines = [\"http://a:1\"]\nrole = \"decode\"\nweight = 2\n[pool.b]\nengines = [\"http://b:1\"]\nmirror = 1.5\n",
            &[
                "no pool's is \"prefill\"",
                "`weight` needs a pool with the role \"both\"",
                "`pool.b.mirror` is 1.5",
            ],
        );
        check_refused(
            "[pool.a]\ndns = [\"http://10.0.0.1:8000\", \"https://x\"]\n",
            &["an address, not a name", "set `server_name`"],
        );
        check_refused(
            "[upstream]\nforward = [\"x\"]\nfailures_max = 0\n",
            &["begin with `/`", "failures_max"],
        );
    }

    #[test]
    fn pools_inherit_and_override() {
        let text = "[engine]\nmax_num_seqs = 100\n[pool.small]\nworkers = 2\n[pool.big]\n\
                    [pool.big.engine]\nmax_num_seqs = 200\ntensor_parallel_size = 2\n\
                    [pool.big.engine.timing]\ngpu = \"h200-sxm\"\n";
        let mut doc = Doc::parse("c.toml", text.as_bytes());
        doc.set("pool.small.engine.max_num_seqs=150");
        doc.set("pool.big.workers=3");
        let (cluster, settings) = read(doc, |_| Err(io::ErrorKind::NotFound.into())).unwrap();
        let [small, big] = &cluster.pools[..] else {
            panic!("{:?}", cluster.pools)
        };
        assert_eq!(
            (
                small.name.as_str(),
                small.workers,
                small.engine.max_num_seqs
            ),
            ("small", 2, 150)
        );
        assert_eq!(
            (big.name.as_str(), big.workers, big.engine.max_num_seqs),
            ("big", 3, 200)
        );
        assert!(big.engine.num_gpu_blocks > 3 * small.engine.num_gpu_blocks);
        let origin = |path: &str| settings.get(path).unwrap().origin.to_string();
        assert_eq!(
            origin("pool.small.engine.max_num_seqs"),
            "--set pool.small.engine.max_num_seqs=150"
        );
        assert_eq!(origin("pool.big.engine.max_num_seqs"), "c.toml:7");
    }

    #[test]
    fn pools_may_serve_several_models() {
        let text = "[model]\npreset = \"qwen3-8b\"\n[pool.a]\n[pool.b]\n[pool.b.model]\n\
                    preset = \"llama-3.1-8b\"\n[pool.c]\n[pool.c.model]\nname = \"tuned\"\n";
        let (cluster, settings) = parse(text).unwrap();
        let names: Vec<&str> = cluster.models().iter().map(|m| &*m.name).collect();
        assert_eq!(names, ["qwen3-8b", "llama-3.1-8b", "tuned"]);
        let [a, b, c] = &cluster.pools[..] else {
            panic!("three pools");
        };
        assert_eq!(a.model.shape, c.model.shape);
        assert_eq!(b.model.shape.name, "llama-3.1-8b");
        // Memory and lengths are those of the pool's model.
        assert_eq!(a.engine, c.engine);
        assert_eq!(
            (a.engine.max_model_len, b.engine.max_model_len),
            (40_960, 131_072)
        );
        assert_ne!(a.engine.num_gpu_blocks, b.engine.num_gpu_blocks);
        assert_eq!(cluster.context_max(), 40_960);
        assert_eq!(cluster.context_max_of("llama-3.1-8b"), 131_072);
        assert_eq!(
            settings
                .get("pool.b.model.name")
                .unwrap()
                .origin
                .to_string(),
            "preset llama-3.1-8b"
        );
        let (again, _) = parse(&settings.to_toml()).unwrap();
        assert_eq!(again, cluster);
    }

    #[test]
    fn models_that_contradict_each_other_are_refused() {
        let two = "[pool.a]\n[pool.b]\n[pool.b.model]\npreset = \"llama-3.1-8b\"\n";
        for (text, expected) in [
            (
                "[model]\nname = \"m\"\n[pool.a]\n[pool.b]\n[pool.b.model]\npreset = \"llama-3.1-8b\"\n".to_owned(),
                &["pools `a` and `b` both serve `m`"][..],
            ),
            (
                "[model]\nconfig = \"m/config.json\"\n[pool.a]\n[pool.a.model]\npreset = \"qwen3-8b\"\n".to_owned(),
                &["m/config.json", "`preset` has no effect"],
            ),
            (
                two.replace("[pool.b]", "[pool.b]\nrole = \"prefill\"")
                    + "[pool.c]\nrole = \"decode\"\n",
                &[
                    "every pool's `role` of model `llama-3.1-8b` is \"prefill\"",
                    "a pool's `role` of model `qwen3-8b` is \"decode\"",
                ],
            ),
            (
                format!("{two}[[event]]\nkind = \"crash\"\nat_s = 1\nworker = 0\n"),
                &["`qwen3-8b` and `llama-3.1-8b`, and events"],
            ),
            (
                format!("{two}[pool.b.autoscale]\npolicy = \"queue\"\n"),
                &["[autoscale] of pool `b`"],
            ),
            (
                format!("{two}[pool.a.engine.peer_tier]\nenabled = true\n"),
                &["[engine.peer_tier] of pool `a`"],
            ),
            (
                two.replace("preset", "presett"),
                &["presett"],
            ),
        ] {
            check_refused(&text, expected);
        }
    }

    const SHARED: &str = "[pool.a]\nworkers = 3\n[pool.b]\nworkers = 2\n[pool.b.model]\npreset = \"llama-3.1-8b\"\n[pool.c]\n\
                          [share.s]\npools = [\"b\", \"a\"]\nwake_bytes_per_s = 10e9\n";

    #[test]
    fn pools_may_share_gpus() {
        let (cluster, settings) = parse(&format!("{SHARED}wake_ms = 300\nsleep_ms = 5\n")).unwrap();
        let [share] = &cluster.shares[..] else {
            panic!("one share");
        };
        assert_eq!((&*share.name, share.turn_ns), ("s", 5_000_000_000));
        // 16,059,990,016 bytes of weights at 10e9 bytes/s, both ways.
        let [b, a] = [share.pools[0], share.pools[1]];
        assert_eq!(
            (b.pool, b.sleep_ns, b.wake_ns),
            (1, 1_610_999_002, 1_905_999_002)
        );
        assert_eq!(a.pool, 0);
        // Three sets of GPUs, and one for `c`.
        let gpus: Vec<u64> = cluster.gpus_by_pool().map(|(_, gpus)| gpus).collect();
        assert_eq!((gpus, cluster.gpus()), (vec![3, 0, 1], 4));
        assert_eq!(parse(&settings.to_toml()).unwrap().0, cluster);
        // Level 2 drops the weights.
        let (cluster, _) = parse(&format!("{SHARED}level = 2\n")).unwrap();
        let b = cluster.shares[0].pools[0];
        assert_eq!((b.sleep_ns, b.wake_ns), (0, 1_605_999_002));
    }

    #[test]
    fn shares_that_cannot_be_are_refused() {
        let more = |text: &str| format!("{SHARED}{text}");
        for (text, expected) in [
            (
                SHARED.replace("\"b\"", "\"x\""),
                &["`pools` of share `s` has `x`"][..],
            ),
            (
                SHARED.replace("\"b\"", "\"a\""),
                &["`pools` of share `s` has `a` twice"],
            ),
            (SHARED.replace("\"b\", ", ""), &["share `s` has 1 pool,"]),
            (
                SHARED.replace("[\"b\", \"a\"]", "[]"),
                &["share `s` has 0 pools,"],
            ),
            (
                SHARED.replace("wake_bytes_per_s = 10e9\n", ""),
                &["wake_bytes_per_s"],
            ),
            (
                SHARED.replace("\"b\"", "\"c\""),
                &["pools `c` and `a` both serve `qwen3-8b`"],
            ),
            (
                more("[share.t]\npools = [\"b\", \"c\"]\nwake_bytes_per_s = 1e9\n"),
                &["pool `b` is in share `s` and in share `t`"],
            ),
            (
                more("[pool.b.engine]\ntensor_parallel_size = 2\n"),
                &["a worker of pool `b` has 2 GPUs, and one of pool `a` has 1 GPU"],
            ),
            (
                more("[pool.b.engine.timing]\ngpu = \"l40s\"\n"),
                &["pool `b` has GPUs of kind l40s, and pool `a` of kind"],
            ),
            (
                more("[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\n"),
                &[
                    "pool `b` has KV blocks in host memory",
                    "pool `a` has KV blocks in host memory",
                ],
            ),
            (
                more("[network]\nmode = \"flows\"\n"),
                &["`network.mode` with GPUs that pools share"],
            ),
            (
                more("[host]\nmode = \"ideal\"\n"),
                &["`host.mode` with GPUs that pools share"],
            ),
            (more("turn_ms = 0\n"), &["`share.s.turn_ms` is 0"]),
            (
                more("level = 2\nsleep_bytes_per_s = 1e9\n"),
                &["`share.s.sleep_bytes_per_s` is not used"],
            ),
        ] {
            check_refused(&text, expected);
        }
    }

    #[test]
    fn a_mistake_that_all_pools_inherit_is_reported_once() {
        check_refused(
            "[engine]\nblock_size = 0\nmystery = 1\n[pool.a]\n[pool.b]\n[pool.c]\n",
            &["`engine.block_size` is 0", "unknown key `engine.mystery`"],
        );
    }

    #[test]
    fn examples_are_the_clusters_that_they_say() {
        let read_example = |name: &str| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../../examples")
                .join(name);
            let doc = Doc::parse(name, &std::fs::read(path).unwrap());
            read(doc, |path| std::fs::read(path)).unwrap().0
        };
        let cluster = read_example("cluster.toml");
        assert_eq!(cluster.pools[0].workers, 8);
        assert_eq!(cluster.model.preset, "qwen3-32b");
        assert_eq!(cluster.pools[0].engine.tensor_parallel_size, 2);
        assert_eq!(cluster.router.policy, RouterPolicy::Kv);

        let cluster = read_example("cluster-pools.toml");
        let [small, long] = &cluster.pools[..] else {
            panic!("{:?}", cluster.pools)
        };
        assert_eq!((small.workers, small.engine.max_model_len), (4, 8192));
        assert_eq!((long.workers, long.engine.max_model_len), (1, 40_960));
        let fp8 = |gpu: &str| TimingConfig::Calibrated {
            gpu: preset::gpu(gpu).unwrap().clone(),
            dtype: Dtype::Fp8,
            framework: Framework::Vllm,
            profile: None,
        };
        assert_eq!(
            (&small.engine.timing, &long.engine.timing),
            (&fp8("l40s"), &fp8("h200-sxm"))
        );
        assert_eq!(small.engine.max_num_seqs, long.engine.max_num_seqs);

        let cluster = read_example("cluster-prefill-decode.toml");
        let roles: Vec<_> = cluster.pools.iter().map(|p| (p.role, p.workers)).collect();
        assert_eq!(roles, [(Role::Prefill, 4), (Role::Decode, 4)]);
        assert_eq!(cluster.network.mode, NetworkMode::Flows);
        let cluster = read_example("cluster-models.toml");
        assert_eq!((cluster.models().len(), cluster.gpus()), (4, 8));
        let cluster = read_example("cluster-faults.toml");
        assert_eq!(cluster.events.len(), 5);
        assert_eq!(cluster.pools[0].engine.startup_s, 20.0);
    }

    #[test]
    fn listen_addresses() {
        for good in [
            "127.0.0.1:8000",
            "[::1]:0",
            "localhost:80",
            "node-7.cluster:65535",
        ] {
            assert!(live::is_listen_address(good), "{good}");
        }
        for bad in [
            "",
            "8000",
            ":80",
            "localhost",
            "localhost:99999",
            "1.2.3:80",
            "a b:1",
            "::1:80:",
        ] {
            assert!(!live::is_listen_address(bad), "{bad}");
        }
    }

    #[test]
    fn event_endpoints_and_subjects() {
        for good in [
            "tcp://127.0.0.1:5557",
            "tcp://*:0",
            "tcp://[::]:1",
            "tcp://node-7:80",
        ] {
            assert!(live::is_zmq_endpoint(&good.to_string()), "{good}");
        }
        for bad in [
            "",
            "127.0.0.1:5557",
            "ipc:///tmp/x",
            "tcp://*",
            "tcp://*:x",
            "tcp://1.2.3",
        ] {
            assert!(!live::is_zmq_endpoint(&bad.to_string()), "{bad}");
        }
        for good in ["slipstream", "a.b-c.d_1"] {
            assert!(live::is_subject_prefix(&good.to_string()), "{good}");
        }
        for bad in ["", ".a", "a.", "a..b", "a b", "a.*", "a.>"] {
            assert!(!live::is_subject_prefix(&bad.to_string()), "{bad}");
        }
        check_refused(
            "[live.events]\nbus = \"kafka\"\nfpm_endpoint = \"5556\"\nsubject_prefix = \"a b\"\n",
            &[
                "`live.events.bus`",
                "`live.events.fpm_endpoint`",
                "`live.events.subject_prefix`",
            ],
        );
    }

    /// A value for a key: mostly plausible, sometimes not.
    fn line() -> impl Strategy<Value = String> {
        let words = prop_oneof![
            Just("\"kv\""),
            Just("\"constant\""),
            Just("\"linear\""),
            Just("\"table\""),
            Just("\"roofline\""),
            Just("\"grid.csv\""),
            Just("\"h200-sxm\""),
            Just("\"fp8\""),
            Just("\"llama-3.1-8b\""),
            Just("true"),
            Just("false"),
            Just("\"127.0.0.1:1\""),
            Just("\"priority\""),
            Just("nan"),
            Just("{}"),
        ];
        let value = prop_oneof![
            4 => (0u64..5000).prop_map(|n| n.to_string()),
            2 => (0.0..4.0f64).prop_map(|x| format!("{x:?}")),
            3 => words.prop_map(str::to_owned),
        ];
        let key = prop::sample::select(super::super::keys::rows());
        (key, value, any::<bool>()).prop_map(|(key, value, plain)| {
            // Half of the time the default, so that documents of several lines are often valid.
            let value = key.default.filter(|_| plain).unwrap_or(value);
            format!("{} = {value}\n", key.path.replace("NAME", "p"))
        })
    }

    proptest! {
        #[test]
        fn documents_never_panic_and_print_config_reads_back(
            lines in prop::collection::vec(line(), 0..4),
            noise in prop::option::weighted(0.2, ".{0,30}"),
        ) {
            let text = lines.concat() + &noise.unwrap_or_default();
            if let Ok((cluster, settings)) = parse(&text) {
                let printed = settings.to_toml();
                let (again, _) = parse(&printed).map_err(|e| TestCaseError::fail(format!("{e}\nin\n{printed}")))?;
                prop_assert_eq!(cluster, again);
            }
        }

        #[test]
        fn bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = read(Doc::parse("c.toml", &bytes), |_| Err(io::ErrorKind::NotFound.into()));
        }
    }
}
