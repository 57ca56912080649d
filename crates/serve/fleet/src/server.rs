//! Parts shared by servers of real and of modelled engines: API keys, limits, tokenizer, dispatchers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use slipstream_base::BlockHash;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::{Cluster, EventBus};
use slipstream_dispatch::{Dispatcher, QueueRoom, Rules};
use slipstream_frontend::text::TextModel;
use slipstream_frontend::{ApiKeys, Faults, KvNetwork, Limits, Management, Origins, Service};
use slipstream_metrics::Registry;
use slipstream_os::{memory, secrets};
use slipstream_planes::clock::monotonic_ns;
use slipstream_recorder::{Recorder, RecorderOptions};
use slipstream_router::{Fleet, Fleets, Router};

use crate::{access_log, spans};

/// Environment variable with API keys, comma separated.
const API_KEYS_VARIABLE: &str = "SLIPSTREAM_API_KEYS";

/// Registers the metrics of the parts of `service`.
pub fn register(service: &Service, registry: &mut Registry) {
    if !service.api_keys.is_empty() {
        registry.register_collector(service.api_keys.collector());
    }
    if let Some(access) = &service.access {
        registry.register_collector(access.collector());
    }
    if let Some(spans) = &service.spans {
        registry.register_collector(spans.collector());
    }
}

/// Where requests are recorded.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Folder of the files; made if it is missing.
    pub folder: PathBuf,
    /// The oldest files are deleted beyond this total, bytes.
    pub bytes_max: u64,
}

/// Starts the recorder of `service`, with its metrics.
///
/// # Errors
/// The folder cannot be written, or a thread cannot be started.
pub fn record(
    options: &RecordOptions,
    service: &mut Service,
    registry: &mut Registry,
) -> anyhow::Result<Recorder> {
    let defaults = RecorderOptions::new(&options.folder, service.block_size);
    let recorder = RecorderOptions {
        total_bytes_max: options.bytes_max,
        // Some files, so that the oldest requests go a few at a time.
        file_bytes_max: defaults.file_bytes_max.min(options.bytes_max / 8),
        ..defaults
    };
    let recorder = Recorder::start(recorder, monotonic_ns())?;
    registry.register_collector(recorder.collector());
    service.recorder = Some(recorder.handle());
    Ok(recorder)
}

/// Lowers the limit of connections to what the limit of open files has room for, and says so.
pub fn fit_files(service: &mut Service, files: u64, forwards: bool) {
    if let Some(before) = service.limits.fit_files(files, forwards) {
        let holds = service.limits.connections_max;
        tracing::warn!(
            "`live.connections_max` is {holds} instead of {before}: this process may have {files} files open; raise the hard \
             limit (LimitNOFILE=, docker run --ulimit nofile=), or set `live.connections_max` to {holds} or less"
        );
    }
}

/// The service of `cluster`, with keys of its files and of the variable `SLIPSTREAM_API_KEYS`. Starts the threads of
/// `live.access_log` and `live.otlp_endpoint`.
///
/// # Errors
/// A file of keys cannot be read or has none, a name of an adapter is taken, or a thread cannot be started.
pub fn service(cluster: &Cluster, text: Arc<TextModel>, fleets: Fleets) -> anyhow::Result<Service> {
    let live = &cluster.live;
    // One router, one block size (checked by `Fleet::of_roles`); the minimum of the other settings.
    let engines = || cluster.pools.iter().map(|pool| &pool.engine);
    let seed = cluster.router.seed ^ slipstream_base::mix::mix64(std::process::id().into());
    let api_keys = api_keys(live.api_keys_file.as_ref())?;
    let admin_key = admin_key(live.admin_key_file.as_ref())?;
    anyhow::ensure!(
        !live.management || api_keys.is_empty() || !admin_key.is_empty(),
        "`live.management` lets whoever may send requests stop the server's answers, and this server has API keys: name a file \
         with the operators' key in `live.admin_key_file`"
    );
    Ok(Service {
        model: cluster.model.name.clone(),
        text,
        root: BlockHash::root(&cluster.model.name, "", ""),
        block_size: fleets.serve.block_size(),
        keep_tokens: live.events.bus != EventBus::None && live.events.kv,
        max_model_len: engines().map(|e| e.max_model_len).min().unwrap_or(0),
        kv_blocks: engines().map(|e| e.num_gpu_blocks).min().unwrap_or(0),
        fleets,
        api_keys,
        admin_key,
        origins: Origins::new(&live.cors_origins),
        faults: Arc::new(Faults::new(live.faults.clone())),
        management: Arc::new(
            Management::new(
                live.management,
                &cluster.model.lora_adapters,
                &cluster.model.name,
            )?
            .with_aliases(cluster.model.aliases.clone()),
        ),
        image_tokens: cluster.model.image_tokens,
        limits: Limits {
            memory_max: match live.memory_max {
                0 => memory::half_of_host(),
                bytes => bytes,
            },
            ..Limits::of(live)
        },
        recorder: None,
        shadow: None,
        access: live
            .access_log
            .as_deref()
            .map(access_log::start)
            .transpose()?,
        spans: live.otlp_endpoint.clone().map(spans::start).transpose()?,
        trace_sample: live.trace_sample,
        created: std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        direct_writes: true,
        seed,
    })
}

/// The key of admin paths.
fn admin_key(file: Option<&PathBuf>) -> anyhow::Result<ApiKeys> {
    let Some(file) = file else {
        return Ok(ApiKeys::default());
    };
    let text = secrets::read(file).with_context(|| {
        let file = file.display();
        format!("reading the admin key (live.admin_key_file) from {file}")
    })?;
    let keys = ApiKeys::new(text.lines().map(str::to_owned));
    anyhow::ensure!(
        !keys.is_empty(),
        "{} has no key; write one, or remove `live.admin_key_file`",
        file.display()
    );
    Ok(keys)
}

/// The keys of `file` and of the environment variable. A source that is named and has none is an error:
/// without any key the server is open to all.
fn api_keys(file: Option<&PathBuf>) -> anyhow::Result<ApiKeys> {
    let mut keys = ApiKeys::default();
    if let Some(file) = file {
        let text = secrets::read(file).with_context(|| {
            format!(
                "reading API keys (live.api_keys_file) from {}",
                file.display()
            )
        })?;
        keys = ApiKeys::parse(&text).map_err(|fault| {
            anyhow::anyhow!(
                "API keys (live.api_keys_file) in {}: {fault}",
                file.display()
            )
        })?;
        anyhow::ensure!(
            !keys.is_empty(),
            "{} has no API key, and without one the server would be open to all; write one per line \
             (lines with # are comments), or remove `live.api_keys_file`",
            file.display()
        );
    }
    if let Some(listed) = std::env::var_os(API_KEYS_VARIABLE) {
        let listed = listed.into_string();
        let listed = listed.map_err(|_| anyhow::anyhow!("{API_KEYS_VARIABLE} is not UTF-8"))?;
        let listed: Vec<String> = listed.split(',').map(str::to_owned).collect();
        anyhow::ensure!(
            !ApiKeys::new(listed.clone()).is_empty(),
            "{API_KEYS_VARIABLE} is set and has no API key, and without one the server would be open \
             to all; set keys with commas between them, or unset it"
        );
        keys = keys.with(listed);
    }
    Ok(keys)
}

/// Configuration of the shards' dispatchers.
pub struct Dispatching {
    rules: Rules,
    fleets: Fleets,
    queue: QueueRoom,
    /// Set if some workers compute prompts for others.
    pub kv_network: Option<Arc<KvNetwork>>,
}

impl Dispatching {
    /// Of `shards` shards, in front of `fleets`.
    pub fn new(cluster: &Cluster, fleets: Fleets, shards: usize) -> Dispatching {
        let network = || Arc::new(KvNetwork::new(cluster, shards));
        Dispatching {
            rules: Rules::of_cluster(cluster),
            queue: QueueRoom::default(),
            kv_network: fleets.prefill.is_some().then(network),
            fleets,
        }
    }

    /// The dispatcher of one shard.
    pub fn of(&self, shard: usize) -> Dispatcher {
        let router = |fleet: &Arc<Fleet>| Router::new(fleet.clone(), to_u32(shard));
        let prefill = self.fleets.prefill.as_ref().map(router);
        Dispatcher::new(self.rules, router(&self.fleets.serve), prefill)
            .with_queue_room(self.queue.clone())
    }
}

/// Number of shards: as configured, or for 0 one per two cores.
pub fn shard_count(configured: u32, cores: usize) -> usize {
    match configured {
        0 => (cores / 2).clamp(1, 255), // the limit of `live.shards`
        shards => shards as usize,
    }
}

/// The tokenizer of a server that writes `answers`, or of a router, which only reads prompts.
///
/// # Errors
/// It cannot be loaded.
pub fn text_model(cluster: &Cluster, answers: bool) -> anyhow::Result<TextModel> {
    match &cluster.model.tokenizer {
        None => Ok(TextModel::builtin()),
        Some(dir) => {
            let text = if answers {
                TextModel::load(dir)
            } else {
                TextModel::load_for_prompts(dir)
            };
            let text = text.with_context(|| {
                format!(
                    "loading the tokenizer (model.tokenizer) from {}",
                    dir.display()
                )
            })?;
            if let Some(why) = text.slow_encoder() {
                tracing::info!("encoding prompts with the slower `tokenizers` library: {why}");
            }
            Ok(text)
        }
    }
}

/// Time that workers may take to become ready before a shared address is served regardless.
const WORKERS_READY: Duration = Duration::from_secs(10);

/// Waits until all workers are ready: clients of a process that is being replaced have no 503 from its
/// successor then.
pub fn await_workers(fleets: &Fleets) {
    let unready = || {
        let of = |fleet: &Arc<Fleet>| {
            let targets = 0..fleet.targets().len();
            targets.filter(|&target| !fleet.is_ready(target)).count()
        };
        fleets.each().map(of).sum::<usize>()
    };
    let end = Instant::now() + WORKERS_READY;
    while unready() > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    match unready() {
        0 => {}
        count => tracing::warn!(
            "listening although {count} ranks of workers are not ready after {} s",
            WORKERS_READY.as_secs()
        ),
    }
}
