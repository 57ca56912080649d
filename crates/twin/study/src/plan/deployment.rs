//! The answer as a deployment of vLLM: what a template needs to write commands, scripts or manifests.
//!
//! Values that a plan cannot know are not guessed: they are *needs*, variables that an operator sets. `${NAME}` in the
//! value of a flag stands for one.

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use slipstream_base::Role;
use slipstream_config::cluster::{
    EngineConfig, PoolConfig, RouterPolicy, SchedulingPolicy, SpeculationMethod,
};
use slipstream_config::doc::Settings;
use slipstream_plan::Shape;

use super::base::{Base, HOST_MEMORY};
use super::scaled::Bounds;
use super::{Asked, Found, output, words};

/// Keys of `[engine]` that end up in flags, or that describe the model of the engine rather than the engine.
const KNOWN: &[&str] = &[
    "block_size",
    "num_gpu_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "async_scheduling",
    "long_prefill_token_threshold",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "host_tier.gib",
    "speculation.num_speculative_tokens",
    // Of the simulation.
    "data_parallel_barrier",
    "expert_imbalance",
    "pipeline_link_bytes_per_s",
    "pipeline_latency_us",
    "startup_s",
    "host_tier.",
    "speculation.",
    "output_len.",
    "timing.",
];

/// vLLM's connector for two engines of one request, as its documentation starts it.
const CONNECTOR: &str = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both"}"#;

/// Publishes KV events, and repeats earlier ones (docs/engines.md).
const KV_EVENTS: &str = r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}"#;

/// A variable that an operator sets.
fn need(name: &str, what: &str) -> Value {
    json!({ "name": name, "what": what })
}

/// The context of templates (docs/plan.md). `command`: what made the plan.
///
/// # Errors
/// If the answer combines features that vLLM does not run together.
pub(super) fn context(
    asked: &Asked,
    found: &Found,
    base: &Base,
    command: &str,
) -> anyhow::Result<Value> {
    let best = &found.best;
    let shape = &best.shape;
    let (cluster, settings) = &base.resolve(shape, &best.setting, best.sized.workers)?;
    let router = &cluster.router;
    let follows_events = router.policy == RouterPolicy::Kv && router.kv_events;
    let pools = cluster.pools.iter();
    let pools = pools.map(|pool| pool_json(pool, shape, settings, follows_events));
    let pools = pools.collect::<anyhow::Result<Vec<_>>>()?;
    let first = cluster.pools.first().context("the answer has no pool")?;
    Ok(json!({
        "slipstream": env!("CARGO_PKG_VERSION"),
        "command": one_line(command),
        "answer": one_line(&output::claim(found)),
        "cost": one_line(&output::cost(asked, found)),
        "sentences": one_line(&words::sentences(asked, found)),
        "model": one_line(&asked.model),
        "preset": model_preset(settings),
        "gpu": shape.gpu,
        "block_size": first.engine.block_size,
        "disaggregated": shape.prefill_share.is_some(),
        "router": {
            "kv_events": follows_events,
            "settings": given(settings, "router.", &[]),
        },
        "pools": pools,
        "autoscale": autoscale(found, base)?,
        "notes": notes(found, settings, follows_events, first.engine.speculation.is_some()),
    }))
}

/// Text for a comment: nothing in it can end the line.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The preset that the cluster names; null for a `config.json`.
fn model_preset(settings: &Settings) -> Value {
    let value = |path: &str| settings.get(path).and_then(|of| of.value.clone());
    match (value("model.config"), value("model.preset")) {
        (None, Some(preset)) => preset.trim_matches('"').into(),
        _ => Value::Null,
    }
}

/// Lines `key = value` of a table, of the values that the answer or the cluster file set, without some keys.
fn given(settings: &Settings, table: &str, without: &[&str]) -> Vec<String> {
    let lines = settings.given().filter_map(|of| {
        let key = of.path.strip_prefix(table)?;
        let key = Some(key).filter(|key| !without.contains(key))?;
        Some(format!("{key} = {}", of.value.as_ref()?))
    });
    lines.collect()
}

fn pool_json(
    pool: &PoolConfig,
    shape: &Shape,
    settings: &Settings,
    follows_events: bool,
) -> anyhow::Result<Value> {
    let mut flags = Flags::default();
    flags.of_engine(pool, settings);
    flags.of_weights(pool, shape);
    flags.of_drafts(&pool.engine)?;
    if pool.role != Role::Both {
        if pool.engine.host_tier.is_some() {
            bail!(
                "--emit: the answer has host memory for KV blocks in pools that hand over prompts, and how vLLM combines both \
                 connectors depends on the deployment; write the cluster file (--write) and combine them by hand, or plan without \
                 one of them (--host-memory 0, --serving aggregated)"
            );
        }
        flags.add("--kv-transfer-config", &CONNECTOR);
        flags.needs.push(need(
            "VLLM_NIXL_SIDE_CHANNEL_HOST",
            "the address of this host by which other engines reach it",
        ));
    }
    if follows_events {
        flags.add("--kv-events-config", &KV_EVENTS);
    }
    let role = match pool.role {
        Role::Both => "both",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    };
    Ok(json!({
        "name": pool.name,
        "role": role,
        "workers": pool.workers,
        "gpus": pool.engine.gpus(),
        "max_num_seqs": pool.engine.max_num_seqs,
        "flags": flags.flags,
        "needs": flags.needs,
    }))
}

/// Flags of `vllm serve`.
#[derive(Default)]
struct Flags {
    flags: Vec<Value>,
    needs: Vec<Value>,
}

impl Flags {
    fn add(&mut self, flag: &str, value: &dyn std::fmt::Display) {
        self.flags
            .push(json!({ "flag": flag, "value": value.to_string() }));
    }

    fn switch(&mut self, flag: &str, is_set: bool) {
        if is_set {
            self.flags.push(json!({ "flag": flag }));
        }
    }

    /// Sizes and limits.
    fn of_engine(&mut self, pool: &PoolConfig, settings: &Settings) {
        let engine = &pool.engine;
        let stated = |key: &str| stated(settings, &format!("pool.{}.{key}", pool.name));
        self.add("--tensor-parallel-size", &engine.tensor_parallel_size);
        for (flag, size) in [
            ("--pipeline-parallel-size", engine.pipeline_parallel_size()),
            ("--data-parallel-size", engine.data_parallel_size),
        ] {
            if size > 1 {
                self.add(flag, &size);
            }
        }
        self.switch("--enable-expert-parallel", engine.enable_expert_parallel);
        self.add("--max-num-seqs", &engine.max_num_seqs);
        self.add("--max-num-batched-tokens", &engine.max_num_batched_tokens);
        self.add("--max-model-len", &engine.max_model_len);
        self.add("--block-size", &engine.block_size);
        self.add("--gpu-memory-utilization", &engine.gpu_memory_utilization);
        match stated("engine.kv_cache_dtype").as_deref() {
            Some("fp8") => self.add("--kv-cache-dtype", &"fp8"),
            Some("bf16") => self.add("--kv-cache-dtype", &"bfloat16"),
            _ => {}
        }
        if stated("engine.num_gpu_blocks").is_some() {
            self.add("--num-gpu-blocks-override", &engine.num_gpu_blocks);
        }
        self.switch("--no-enable-prefix-caching", !engine.enable_prefix_caching);
        self.switch(
            "--no-enable-chunked-prefill",
            !engine.enable_chunked_prefill,
        );
        self.switch("--no-async-scheduling", !engine.async_scheduling);
        if engine.scheduling_policy == SchedulingPolicy::Priority {
            self.add("--scheduling-policy", &"priority");
        }
        if engine.long_prefill_token_threshold > 0 {
            let tokens = engine.long_prefill_token_threshold;
            self.add("--long-prefill-token-threshold", &tokens);
        }
        if engine.host_tier.is_some()
            && let Some(gib) = stated(HOST_MEMORY)
        {
            self.add("--kv-offloading-size", &gib);
        }
    }

    /// The format of the weights, if it is not the checkpoint's.
    fn of_weights(&mut self, pool: &PoolConfig, shape: &Shape) {
        let checkpoint = pool.model.shape.dtype();
        let what = if shape.dtype == checkpoint {
            "the model, as `vllm serve` takes it: a folder or a name".to_owned()
        } else if shape.dtype.name() == "fp8" && checkpoint.name() == "bf16" {
            self.add("--quantization", &"fp8");
            "the model with 16-bit weights, which vLLM quantizes: a folder or a name".to_owned()
        } else {
            format!(
                "the model with {} weights, as `vllm serve` takes it: a folder or a name",
                shape.dtype.name()
            )
        };
        self.needs.push(need("MODEL", &what));
    }

    fn of_drafts(&mut self, engine: &EngineConfig) -> anyhow::Result<()> {
        let Some(drafts) = &engine.speculation else {
            return Ok(());
        };
        let (method, has_model) = match drafts.method {
            SpeculationMethod::Eagle => ("eagle", true),
            SpeculationMethod::DraftModel => ("draft_model", true),
            SpeculationMethod::Mtp => ("mtp", false),
            SpeculationMethod::Ngram => ("ngram", false),
        };
        let mut config = json!({ "method": method, "num_speculative_tokens": drafts.tokens() });
        if has_model {
            config["model"] = "${DRAFT_MODEL}".into();
            let what = "the model or head that drafts, as vLLM takes it: a folder or a name";
            self.needs.push(need("DRAFT_MODEL", what));
        }
        self.add("--speculative-config", &serde_json::to_string(&config)?);
        Ok(())
    }
}

/// A value that the answer or the cluster file set, without quotes.
fn stated(settings: &Settings, path: &str) -> Option<String> {
    let mut given = settings.given();
    let setting = given.find(|of| of.path == path)?;
    let value = setting.value.as_ref()?;
    Some(value.trim_matches('"').to_owned())
}

/// `[autoscale]` of the router, if the answer's configuration costs less with it.
fn autoscale(found: &Found, base: &Base) -> anyhow::Result<Value> {
    let best = found.scaled.as_ref().and_then(|of| of.best.as_ref());
    let is_answers = |of: &&Bounds| {
        of.name == found.best.shape.name() && of.setting == found.best.setting.name()
    };
    let Some(of) = best.filter(is_answers) else {
        return Ok(Value::Null);
    };
    let best = &found.best;
    let least = Some(of.workers_min);
    let (_, settings) = base.resolve_scaled(&best.shape, &best.setting, least, of.workers_max)?;
    Ok(json!({
        "workers_min": of.workers_min,
        "workers_max": of.workers_max,
        // The bound above is that of the pool in a simulation.
        "settings": given(&settings, "autoscale.", &["workers_max"]),
    }))
}

/// What an operator must know beside the files.
fn notes(
    found: &Found,
    settings: &Settings,
    follows_events: bool,
    has_drafts: bool,
) -> Vec<String> {
    let mut notes = Vec::new();
    for of in settings.given() {
        let Some((_, key)) = of.path.split_once(".engine.") else {
            continue;
        };
        let is_known = |known: &str| match known.strip_suffix('.') {
            Some(table) => key
                .strip_prefix(table)
                .is_some_and(|of| of.starts_with('.')),
            None => key == known,
        };
        let note = format!("engine.{key} has no flag of vLLM here: set it by hand");
        if !KNOWN.iter().any(|known| is_known(known)) && !notes.contains(&note) {
            notes.push(note);
        }
    }
    if follows_events {
        notes.push(
            "the plan assumes that the router follows KV events, for which it needs the model's tokenizer; without them it guesses \
             what engines have cached"
                .to_owned(),
        );
    }
    if has_drafts {
        notes.push(
            "the share of accepted drafts is an assumption of the cluster file: measure it"
                .to_owned(),
        );
    }
    if let Some(best) = found.scaled.as_ref().and_then(|of| of.best.as_ref()) {
        notes.push(format!(
            "with autoscaling, {} to {} x ({}), {} cost less",
            best.workers_min, best.workers_max, best.name, best.setting
        ));
    }
    notes
}
