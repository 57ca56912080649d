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

use super::autoscale::read_autoscale;
use super::event::read_event_list;
use super::gpu::{read_gpu, read_link};
use super::host::{check_host, read_host};
use super::live;
use super::network::{check_hosts, check_links, read_network};
use super::share::{check_shares, read_share};
use super::upstream::{HttpEngines, KvProtocol, UpstreamConfig, read_engines};
use super::{
    Cluster, DiskTierConfig, Dtype, EncoderConfig, EngineConfig, EngineKind,
    Framework, HostTierConfig, KvConfig, LoraConfig, ModelConfig, OutputLen, PeerTierConfig,
    PipelineConfig, PoolConfig, RouterConfig, SchedulingPolicy, SpeculationConfig,
    SpeculationMethod, TimingConfig, WORKERS_MAX,
};
use crate::doc::{Diagnostics, Doc, Origin, Section, Settings, Table, suggestion};
use crate::preset::{self, Formats, Gpu, ModelFiles, ModelShape};
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
const SCHEDULING: &[(&str, SchedulingPolicy)] = &[
    ("fcfs", SchedulingPolicy::Fcfs),
    ("priority", SchedulingPolicy::Priority),
];
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
            live: root.table("live", live::read_live),
            upstream: root.table("upstream", UpstreamConfig::read),
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
pub(super) fn layers_of_stages(layers: u32, stages: u32) -> Vec<u32> {
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
