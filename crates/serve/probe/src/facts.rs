//! Facts about an engine, learned from the answers of its information endpoints.
//!
//! | engine | recognized by | block size, KV blocks | parallel sizes, limits |
//! | --- | --- | --- | --- |
//! | vLLM | `vllm` as owner of a model, `vllm:` metrics | labels of `vllm:cache_config_info` | `/server_info`, if the server runs with `VLLM_SERVER_DEV_MODE=1` |
//! | SGLang | `sglang` as owner, `sglang:` metrics, fields of `/server_info` | `page_size`, `max_total_num_tokens` | `/server_info` or, in older versions, `/get_server_info` |
//! | llama.cpp | `/props` | none: it caches per slot, not per block | `total_slots`, `n_ctx` |
//! | Slipstream | `slipstream` as owner | labels of `vllm:cache_config_info` | |
//!
//! Sources: vLLM 0.32 and 0.33 (`vllm/entrypoints`, `vllm/v1/metrics/loggers.py`), SGLang 0.5
//! (`srt/entrypoints/http_server.py`), llama.cpp's `tools/server/README.md`. Nothing is guessed: a
//! field that no answer states is `None`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Serialize, Serializer};
use serde_json::Value;
use slipstream_base::EngineKind;
use slipstream_base::text::foreign;

use crate::http::{Answer, FetchError};
use crate::prometheus::Samples;

/// Models listed in [`EngineFacts`] at most; a server with thousands of adapters lists them all.
const MODELS_MAX: usize = 4096;

/// Data-parallel ranks at most.
const RANKS_MAX: u32 = 1024;

/// An information endpoint. All are optional for an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// `GET /v1/models`: every OpenAI server.
    Models,
    /// `GET /version`: vLLM, Slipstream.
    Version,
    /// `GET /metrics`: all, llama.cpp with `--metrics`.
    Metrics,
    /// `GET /server_info`: SGLang; vLLM in development mode.
    ServerInfo,
    /// `GET /get_server_info`: earlier SGLang versions.
    GetServerInfo,
    /// `GET /get_model_info`: SGLang.
    GetModelInfo,
    /// `GET /props`: llama.cpp.
    Props,
    /// `GET /kv_event_sources`: vLLM.
    KvEventSources,
}

impl Endpoint {
    /// All endpoints, in the order in which they are reported.
    pub const ALL: [Endpoint; 8] = [
        Endpoint::Models,
        Endpoint::Version,
        Endpoint::Metrics,
        Endpoint::ServerInfo,
        Endpoint::GetServerInfo,
        Endpoint::GetModelInfo,
        Endpoint::Props,
        Endpoint::KvEventSources,
    ];

    /// Path and query.
    pub fn path(self) -> &'static str {
        match self {
            Endpoint::Models => "/v1/models",
            Endpoint::Version => "/version",
            Endpoint::Metrics => "/metrics",
            // SGLang ignores the query, which asks vLLM for JSON instead of text.
            Endpoint::ServerInfo => "/server_info?config_format=json",
            Endpoint::GetServerInfo => "/get_server_info",
            Endpoint::GetModelInfo => "/get_model_info",
            Endpoint::Props => "/props",
            Endpoint::KvEventSources => "/kv_event_sources",
        }
    }
}

/// A model that requests may name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServedModel {
    /// Its name in requests.
    pub id: String,
    /// Limit of prompt plus answer, tokens.
    pub max_model_len: Option<u32>,
    /// For a LoRA adapter, the base model's id.
    pub parent: Option<String>,
    /// Path or repository of the weights.
    pub root: Option<String>,
}

/// GPUs and ranks of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Parallel {
    /// GPUs that share a layer.
    pub tensor: Option<u32>,
    /// Stages of layers.
    pub pipeline: Option<u32>,
    /// Ranks, each with its own scheduler and KV cache.
    pub data: Option<u32>,
    /// GPUs that share the experts.
    pub expert: Option<u32>,
}

/// A publisher of KV events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvEventSource {
    /// Data-parallel rank in its engine.
    pub rank: u32,
    /// ZeroMQ PUB endpoint, `tcp://HOST:PORT`. A wildcard address is replaced by the engine's host.
    pub endpoint: String,
    /// ZeroMQ ROUTER endpoint that replays past batches.
    pub replay_endpoint: Option<String>,
    /// Topic of the events.
    pub topic: String,
}

/// Writes a kind as one word of letters and underscores.
#[allow(clippy::trivially_copy_pass_by_ref)] // as serde calls it
fn write_kind<S: Serializer>(kind: &EngineKind, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(match kind {
        EngineKind::LlamaCpp => "llama_cpp",
        EngineKind::OpenAi => "open_ai",
        other => other.name(),
    })
}

/// Facts that an engine reports about itself. `None`: no answer stated it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EngineFacts {
    /// Base URL, without a path.
    pub url: String,
    /// Which engine it is.
    #[serde(serialize_with = "write_kind")]
    pub kind: EngineKind,
    /// Its version.
    pub version: Option<String>,
    /// Models that requests may name, in the server's order.
    pub models: Vec<ServedModel>,
    /// Tokens per block of the prefix cache.
    pub block_size: Option<u32>,
    /// KV blocks per rank; the minimum if ranks differ.
    pub kv_blocks: Option<u64>,
    /// The maximum, if ranks differ.
    pub kv_blocks_max: Option<u64>,
    /// Workers behind the address, of Slipstream's servers.
    pub workers: Option<u32>,
    /// Whether blocks are reused between requests.
    pub prefix_caching: Option<bool>,
    /// Format of keys and values, in the engine's words, such as `auto` or `fp8_e4m3`.
    pub kv_cache_dtype: Option<String>,
    /// Share of GPU memory for weights and KV cache.
    pub gpu_memory_utilization: Option<f64>,
    /// Limit of prompt plus answer, tokens.
    pub max_model_len: Option<u32>,
    /// Limit of sequences per step.
    pub max_num_seqs: Option<u32>,
    /// Limit of tokens per step.
    pub max_num_batched_tokens: Option<u32>,
    /// Whether long prompts are split over steps.
    pub chunked_prefill: Option<bool>,
    /// Whether a step is scheduled while the one before it runs.
    pub async_scheduling: Option<bool>,
    /// Number format of the weights, in the engine's words.
    pub dtype: Option<String>,
    /// Quantization method of the weights.
    pub quantization: Option<String>,
    /// Method of speculative decoding, in the engine's words.
    pub speculation: Option<String>,
    /// Tokens drafted per step.
    pub speculative_tokens: Option<u32>,
    /// LoRA adapters in a batch at most.
    pub max_loras: Option<u32>,
    /// GPUs and ranks.
    pub parallel: Parallel,
    /// Data-parallel ranks that this server answers for. Behind an external or a hybrid load balancer it has some of
    /// all ranks.
    pub served_ranks: Option<u32>,
    /// Publishers of KV events, by rank.
    pub kv_events: Vec<KvEventSource>,
    /// Every endpoint that was asked, and its outcome.
    pub asked: Vec<Asked>,
}

/// A request and its outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Asked {
    /// Path of the request.
    pub path: &'static str,
    /// The answer.
    pub outcome: Outcome,
}

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// An answer that was read.
    Read,
    /// Another status than 200.
    Status(u16),
    /// Status 200 with a body that does not have the expected form.
    Unreadable(String),
    /// No answer.
    Failed(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Read => f.write_str("read"),
            Outcome::Status(status) => write!(f, "status {status}"),
            Outcome::Unreadable(what) => write!(f, "unreadable: {what}"),
            Outcome::Failed(error) => f.write_str(error),
        }
    }
}

impl EngineFacts {
    /// The model that LoRA adapters belong to, or else the first one.
    pub fn base_model(&self) -> Option<&ServedModel> {
        let base = self.models.iter().find(|model| model.parent.is_none());
        base.or(self.models.first())
    }

    /// Takes the KV blocks of the ranks, unless they are known.
    fn take_blocks(&mut self, of_ranks: impl Iterator<Item = u64> + Clone) {
        let of_ranks = of_ranks.filter(|&blocks| blocks > 0);
        if self.kv_blocks.is_none() {
            self.kv_blocks = of_ranks.clone().min();
            self.kv_blocks_max = of_ranks.max().filter(|&most| Some(most) != self.kv_blocks);
        }
    }

    /// Data-parallel ranks of this server; 1 if no answer stated them.
    pub fn ranks(&self) -> u32 {
        let ranks = self.served_ranks.or(self.parallel.data);
        ranks.unwrap_or(1).max(1)
    }
}

/// Facts from `answers`, by endpoint. `url` is the base URL, `host` its host.
pub fn learn(
    url: &str,
    host: &str,
    answers: &[(Endpoint, Result<Answer, FetchError>)],
) -> EngineFacts {
    let mut facts = EngineFacts {
        url: url.to_owned(),
        ..EngineFacts::default()
    };
    let mut signs = Signs::default();
    for endpoint in Endpoint::ALL {
        let found = answers.iter().find(|(asked, _)| *asked == endpoint);
        let Some((_, answer)) = found else { continue };
        let outcome = match answer {
            Err(error) => Outcome::Failed(error.to_string()),
            Ok(answer) if answer.status != 200 => Outcome::Status(answer.status),
            Ok(answer) => match read(endpoint, &answer.body, host, &mut facts, &mut signs) {
                Ok(()) => Outcome::Read,
                Err(what) => Outcome::Unreadable(what),
            },
        };
        facts.asked.push(Asked {
            path: endpoint.path(),
            outcome,
        });
    }
    facts.kind = signs.kind();
    if facts.max_model_len.is_none() {
        facts.max_model_len = facts.base_model().and_then(|model| model.max_model_len);
    }
    facts
}

/// Signs of an engine. An owner counts more than metrics: a proxy may expose those of
/// the engine behind it, and Slipstream exposes some under vLLM's names.
#[derive(Default)]
struct Signs {
    owner: Option<EngineKind>,
    fields: Option<EngineKind>,
    metrics: Option<EngineKind>,
}

impl Signs {
    fn kind(&self) -> EngineKind {
        self.owner
            .or(self.fields)
            .or(self.metrics)
            .unwrap_or(EngineKind::OpenAi)
    }
}

fn read(
    endpoint: Endpoint,
    body: &[u8],
    host: &str,
    facts: &mut EngineFacts,
    signs: &mut Signs,
) -> Result<(), String> {
    if endpoint == Endpoint::Metrics {
        let text = String::from_utf8_lossy(body);
        return metrics(&text, facts, signs);
    }
    let value: Value =
        serde_json::from_slice(body).map_err(|error| format!("not JSON: {error}"))?;
    match endpoint {
        Endpoint::Models => models(&value, facts, signs),
        Endpoint::Version => {
            let version = text(&value, "/version").ok_or("no text `version`")?;
            facts.version.get_or_insert(version);
            Ok(())
        }
        Endpoint::ServerInfo | Endpoint::GetServerInfo => match value.get("vllm_config") {
            Some(config) => vllm_config(config, facts, signs),
            None => sglang_info(&value, host, facts, signs),
        },
        Endpoint::GetModelInfo => {
            let path = text(&value, "/model_path").ok_or("no text `model_path`")?;
            signs.fields.get_or_insert(EngineKind::Sglang);
            if let Some(model) = facts.models.first_mut() {
                model.root.get_or_insert(path);
            }
            Ok(())
        }
        Endpoint::Props => llama_props(&value, facts, signs),
        Endpoint::KvEventSources => kv_event_sources(&value, host, facts),
        Endpoint::Metrics => unreachable!("handled above"),
    }
}

fn models(value: &Value, facts: &mut EngineFacts, signs: &mut Signs) -> Result<(), String> {
    let list = value.get("data").and_then(Value::as_array);
    let list = list.ok_or("no array `data`")?;
    for model in list.iter().take(MODELS_MAX) {
        let id = text(model, "/id").ok_or("a model without a text `id`")?;
        let owner = model.get("owned_by").and_then(Value::as_str);
        let owner = owner.and_then(EngineKind::of_owner);
        signs.owner = signs.owner.or(owner);
        facts.models.push(ServedModel {
            id,
            max_model_len: whole(model, "/max_model_len"),
            parent: text(model, "/parent"),
            root: text(model, "/root"),
        });
    }
    Ok(())
}

fn metrics(text: &str, facts: &mut EngineFacts, signs: &mut Signs) -> Result<(), String> {
    let found = Samples::parse(text);
    if found.samples.is_empty() {
        return Err(format!("no sample in {} lines", text.lines().count()));
    }
    let any = |prefix: &str| found.samples.iter().any(|s| s.name.starts_with(prefix));
    signs.metrics = [
        ("slipstream_", EngineKind::Slipstream),
        ("sglang:", EngineKind::Sglang),
        ("vllm:", EngineKind::Vllm),
        ("llamacpp:", EngineKind::LlamaCpp),
    ]
    .into_iter()
    .find_map(|(prefix, kind)| any(prefix).then_some(kind));
    cache_config(&found, facts);
    Ok(())
}

/// `vllm:cache_config_info`: one sample per rank, whose labels are the fields of vLLM's
/// `CacheConfig` as Python prints them.
fn cache_config(found: &Samples<'_>, facts: &mut EngineFacts) {
    let samples: Vec<_> = found.of("vllm:cache_config_info").collect();
    let Some(first) = samples.first() else { return };
    let label = |name: &str| first.label(name).filter(|value| *value != "None");
    facts.block_size = facts.block_size.or(label("block_size").and_then(positive));
    let blocks = samples
        .iter()
        .filter_map(|s| s.label("num_gpu_blocks")?.parse().ok());
    facts.take_blocks(blocks);
    facts.prefix_caching = label("enable_prefix_caching")
        .and_then(python_bool)
        .or(facts.prefix_caching);
    if let Some(dtype) = label("cache_dtype") {
        facts.kv_cache_dtype.get_or_insert(dtype.to_owned());
    }
    let share = label("gpu_memory_utilization").and_then(|share| share.parse().ok());
    facts.gpu_memory_utilization = facts.gpu_memory_utilization.or(share);
    // A sample per rank; a server that runs one rank of several shows one. Slipstream's name the worker too.
    let distinct = |label: &str| {
        let values: BTreeSet<_> = samples.iter().map(|s| s.label(label)).collect();
        u32::try_from(values.len()).ok()
    };
    facts.served_ranks = first.label("engine").and_then(|_| distinct("engine"));
    facts.parallel.data = facts.parallel.data.or(distinct("engine"));
    if first.label("worker").is_some() {
        facts.workers = distinct("worker");
    }
}

/// `vllm_config` of vLLM's `/server_info`: JSON, or in older versions the text of its `__str__`.
fn vllm_config(config: &Value, facts: &mut EngineFacts, signs: &mut Signs) -> Result<(), String> {
    signs.fields.get_or_insert(EngineKind::Vllm);
    if let Some(text) = config.as_str() {
        let field = |name: &str| python_field(text, name);
        facts.parallel.tensor = field("tensor_parallel_size").and_then(positive);
        facts.parallel.pipeline = field("pipeline_parallel_size").and_then(positive);
        facts.parallel.data = field("data_parallel_size")
            .and_then(positive)
            .or(facts.parallel.data);
        facts.chunked_prefill = field("enable_chunked_prefill").and_then(python_bool);
        facts.max_model_len = field("max_seq_len").and_then(positive);
        facts.quantization = field("quantization")
            .filter(|q| *q != "None")
            .map(str::to_owned);
        facts.dtype = field("dtype").map(dtype_name);
        let set = |name: &str| field(name).filter(|value| *value != "None");
        if set("speculative_config").is_some() {
            facts.speculation = Some(set("method").unwrap_or("method not reported").to_owned());
            facts.speculative_tokens = set("num_speculative_tokens")
                .or(set("num_spec_tokens"))
                .and_then(positive);
        }
        if set("lora_config").is_some() {
            facts.max_loras = set("max_loras").and_then(positive).or(Some(1));
        }
        return Ok(());
    }
    if !config.is_object() {
        return Err("`vllm_config` is neither text nor an object".into());
    }
    facts.parallel = Parallel {
        tensor: whole(config, "/parallel_config/tensor_parallel_size"),
        pipeline: whole(config, "/parallel_config/pipeline_parallel_size"),
        data: whole(config, "/parallel_config/data_parallel_size").or(facts.parallel.data),
        expert: None,
    };
    if config.pointer("/parallel_config/enable_expert_parallel") == Some(&Value::Bool(true)) {
        let sizes = facts.parallel.tensor.zip(facts.parallel.data);
        facts.parallel.expert = sizes.and_then(|(tensor, data)| tensor.checked_mul(data));
    }
    facts.max_num_seqs = whole(config, "/scheduler_config/max_num_seqs");
    facts.max_num_batched_tokens = whole(config, "/scheduler_config/max_num_batched_tokens");
    facts.chunked_prefill = boolean(config, "/scheduler_config/enable_chunked_prefill");
    facts.async_scheduling = boolean(config, "/scheduler_config/async_scheduling");
    facts.max_model_len = whole(config, "/model_config/max_model_len");
    facts.quantization = text(config, "/model_config/quantization");
    facts.dtype = text(config, "/model_config/dtype").map(|dtype| dtype_name(&dtype));
    let set = |name: &str| config.get(name).filter(|value| !value.is_null());
    if let Some(speculative) = set("speculative_config") {
        let method = text(speculative, "/method");
        facts.speculation = method.or(Some("method not reported".into()));
        facts.speculative_tokens = whole(speculative, "/num_speculative_tokens");
    }
    if let Some(lora) = set("lora_config") {
        facts.max_loras = whole(lora, "/max_loras").or(Some(1));
    }
    facts.block_size = facts
        .block_size
        .or(whole(config, "/cache_config/block_size"));
    let blocks = config
        .pointer("/cache_config/num_gpu_blocks")
        .and_then(Value::as_u64);
    facts.kv_blocks = facts.kv_blocks.or(blocks.filter(|&b| b > 0));
    facts.prefix_caching = facts
        .prefix_caching
        .or(boolean(config, "/cache_config/enable_prefix_caching"));
    Ok(())
}

/// SGLang's server arguments, scheduler's facts and version in one object.
fn sglang_info(
    info: &Value,
    host: &str,
    facts: &mut EngineFacts,
    signs: &mut Signs,
) -> Result<(), String> {
    if info.get("page_size").is_none() && info.get("mem_fraction_static").is_none() {
        return Err(
            "neither `vllm_config` nor SGLang's `page_size` and `mem_fraction_static`".into(),
        );
    }
    signs.fields.get_or_insert(EngineKind::Sglang);
    if let Some(version) = text(info, "/version") {
        facts.version.get_or_insert(version);
    }
    facts.block_size = facts.block_size.or(whole(info, "/page_size"));
    // The scheduler's number is at the top or, since 0.5, in the state of each rank.
    let tokens: Vec<u64> = match info.get("max_total_num_tokens").and_then(Value::as_u64) {
        Some(tokens) => vec![tokens],
        None => info
            .get("internal_states")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|s| s.get("max_total_num_tokens")?.as_u64())
            .collect(),
    };
    if let Some(page) = facts.block_size {
        facts.take_blocks(tokens.iter().map(|tokens| tokens / u64::from(page)));
    }
    facts.speculation = text(info, "/speculative_algorithm");
    facts.speculative_tokens = whole(info, "/speculative_num_draft_tokens");
    let lora = boolean(info, "/enable_lora") == Some(true)
        || info.get("lora_paths").is_some_and(|paths| {
            !paths.is_null() && paths.as_array().is_none_or(|l| !l.is_empty())
        });
    if lora {
        facts.max_loras = whole(info, "/max_loras_per_batch").or(Some(1));
    }
    facts.prefix_caching = facts
        .prefix_caching
        .or(boolean(info, "/disable_radix_cache").map(|off| !off));
    if let Some(dtype) = text(info, "/kv_cache_dtype") {
        facts.kv_cache_dtype.get_or_insert(dtype);
    }
    let share = info.get("mem_fraction_static").and_then(Value::as_f64);
    facts.gpu_memory_utilization = facts.gpu_memory_utilization.or(share);
    facts.parallel = Parallel {
        tensor: whole(info, "/tp_size"),
        pipeline: whole(info, "/pp_size"),
        data: whole(info, "/dp_size"),
        expert: whole(info, "/ep_size"),
    };
    facts.max_num_seqs = whole(info, "/max_running_requests")
        .or_else(|| whole(info, "/internal_states/0/max_running_requests"));
    facts.chunked_prefill = info
        .get("chunked_prefill_size")
        .and_then(Value::as_i64)
        .map(|size| size > 0);
    facts.max_num_batched_tokens = whole(info, "/chunked_prefill_size");
    facts.max_model_len = whole(info, "/context_length");
    facts.dtype = text(info, "/dtype")
        .filter(|dtype| dtype != "auto")
        .map(|dtype| dtype_name(&dtype));
    facts.quantization = text(info, "/quantization");
    if let Some(model) = facts.models.first_mut()
        && let Some(path) = text(info, "/model_path")
    {
        model.root = Some(path);
    }
    // `--kv-events-config` is JSON in a text.
    if let Some(config) = text(info, "/kv_events_config")
        && let Ok(config) = serde_json::from_str::<Value>(&config)
        && config.get("publisher").and_then(Value::as_str) == Some("zmq")
    {
        for rank in 0..facts.ranks().min(RANKS_MAX) {
            facts
                .kv_events
                .extend(kv_event_source(&config, host, rank, rank));
        }
    }
    Ok(())
}

/// llama.cpp's properties.
fn llama_props(props: &Value, facts: &mut EngineFacts, signs: &mut Signs) -> Result<(), String> {
    let settings = props.get("default_generation_settings");
    let settings = settings.ok_or("no `default_generation_settings`")?;
    signs.fields.get_or_insert(EngineKind::LlamaCpp);
    facts.max_model_len = whole(settings, "/n_ctx").or_else(|| whole(props, "/n_ctx"));
    facts.max_num_seqs = whole(props, "/total_slots");
    if let Some(build) = text(props, "/build_info") {
        facts.version.get_or_insert(build);
    }
    if let Some(model) = facts.models.first_mut()
        && let Some(path) = text(props, "/model_path")
    {
        model.root = Some(path);
    }
    Ok(())
}

/// vLLM's resolved event configuration by rank: ports already have the rank's offset.
fn kv_event_sources(value: &Value, host: &str, facts: &mut EngineFacts) -> Result<(), String> {
    let by_rank = value.as_object().ok_or("not an object of ranks")?;
    let mut sources = BTreeMap::new();
    for (rank, config) in by_rank {
        let rank = rank
            .parse()
            .map_err(|_| format!("`{}` is not a rank", foreign(rank)))?;
        if rank >= RANKS_MAX {
            return Err(format!("rank {rank} is above {RANKS_MAX}"));
        }
        let is_off = config.get("enable_kv_cache_events") == Some(&Value::Bool(false));
        if !is_off && config.get("publisher").and_then(Value::as_str) == Some("zmq") {
            sources.extend(kv_event_source(config, host, rank, 0).map(|source| (rank, source)));
        }
    }
    facts.kv_events = sources.into_values().collect();
    Ok(())
}

/// Source of rank `rank`, whose ports are `offset` above the configured ones.
fn kv_event_source(config: &Value, host: &str, rank: u32, offset: u32) -> Option<KvEventSource> {
    let at = |endpoint: &str| reachable(endpoint, host, offset);
    Some(KvEventSource {
        rank,
        endpoint: at(config.get("endpoint")?.as_str()?)?,
        replay_endpoint: config
            .get("replay_endpoint")
            .and_then(Value::as_str)
            .and_then(at),
        topic: text(config, "/topic").unwrap_or_default(),
    })
}

/// The address under which a subscriber on another host reaches `endpoint`, which the engine at
/// `host` binds; `offset` ports above. `None` for other transports than TCP, and for an address that only the engine's
/// host reaches.
fn reachable(endpoint: &str, host: &str, offset: u32) -> Option<String> {
    let (bound, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = u32::from(port.parse::<u16>().ok()?).checked_add(offset)?;
    let port = u16::try_from(port).ok()?;
    let to = match bound {
        "*" | "0.0.0.0" | "[::]" | "::" => host,
        bound if is_loopback(bound) && !is_loopback(host) => return None,
        bound => bound,
    };
    Some(format!("tcp://{to}:{port}"))
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let address = host.parse::<std::net::IpAddr>();
    address.map_or(host == "localhost", |address| address.is_loopback())
}

/// A whole number from 1 on, of 32 bits.
fn whole(value: &Value, pointer: &str) -> Option<u32> {
    let number = value.pointer(pointer)?.as_u64()?;
    u32::try_from(number).ok().filter(|&number| number > 0)
}

fn boolean(value: &Value, pointer: &str) -> Option<bool> {
    value.pointer(pointer)?.as_bool()
}

/// A text that is not empty.
fn text(value: &Value, pointer: &str) -> Option<String> {
    let text = value.pointer(pointer)?.as_str()?;
    (!text.is_empty()).then(|| text.to_owned())
}

fn positive(text: &str) -> Option<u32> {
    text.parse().ok().filter(|&number| number > 0)
}

fn python_bool(text: &str) -> Option<bool> {
    match text {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

/// The value of `name=value` in a text of several, up to the next comma.
fn python_field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let fields = text.split([',', '(']).map(str::trim);
    let mut found = fields.filter_map(|field| field.strip_prefix(name)?.strip_prefix('='));
    found
        .next()
        .map(|value| value.trim_end_matches(')').trim_matches('\''))
}

/// `torch.bfloat16` as `bfloat16`.
fn dtype_name(dtype: impl AsRef<str>) -> String {
    dtype.as_ref().trim_start_matches("torch.").to_owned()
}
