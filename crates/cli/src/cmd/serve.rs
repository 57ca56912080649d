//! `slipstream serve`: a live cluster in one process.
//!
//! Wiring only: engines on engine threads, shards in front of them, rings between, and the router's
//! fleet, which receives KV events and chooses workers.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use prometheus_client::registry::Registry;
use slipstream_base::width::{to_u16, to_u32};
use slipstream_base::{BlockHash, RankId, WorkerId};
use slipstream_config::cluster::{Cluster, EngineConfig, EventBus, LiveConfig};
use slipstream_dispatch::{Dispatcher, QueueRoom, Rules};
use slipstream_engine::{Engine, OutputModel};
use slipstream_events::EventPlane;
use slipstream_fleet::autoscale::{self, LiveAutoscale, Workers};
use slipstream_fleet::metrics::{CacheConfigCollector, FleetCollector};
use slipstream_frontend::text::TextModel;
use slipstream_frontend::{
    ApiKeys, Bound, Faults, Frontend, KvNetwork, Limits, Management, Origins, Service, ShardPlane,
    WorkerTransport,
};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::{EventSink, Plane, PlaneLimits};
use slipstream_recorder::{Recorder, RecorderOptions};
use slipstream_router::{Fleet, Fleets, Router};
use slipstream_worker::{Backend, LiveTiming, Resyncs, WorkerSet, WorkerSpec, engine_threads};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::fleet_sink::FleetSink;
use crate::cmd::shadow::ShadowArgs;
use crate::cmd::switches::Switches;
use crate::out;

/// Environment variable with API keys, comma separated.
const API_KEYS_VARIABLE: &str = "SLIPSTREAM_API_KEYS";

/// Flags of `slipstream serve`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Forward requests to this engine, such as http://127.0.0.1:8001; may be repeated (docs/engines.md)
    #[arg(long, value_name = "URL")]
    engine: Vec<String>,
    /// Address to listen on; port 0 selects a free one [default: live.listen]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Divide modelled time by this; 0: no waiting at all [default: live.speedup]
    #[arg(long, value_name = "FACTOR")]
    speedup: Option<f64>,
    #[command(flatten)]
    record: RecordArgs,
    #[command(flatten)]
    shadow: ShadowArgs,
    #[command(flatten)]
    switches: Switches,
}

/// Where requests are recorded.
#[derive(clap::Args)]
pub(super) struct RecordArgs {
    /// Record requests to files in this folder, for `slipstream simulate --trace DIR`: times, lengths and
    /// keyed block hashes, no text and no tokens
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,
    /// Limit of the folder's files, bytes; the oldest are deleted
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 30, requires = "record", value_parser = clap::value_parser!(u64).range(1 << 20..))]
    record_bytes_max: u64,
}

impl RecordArgs {
    /// Whether requests are recorded.
    pub(super) fn is_on(&self) -> bool {
        self.record.is_some()
    }

    /// Starts the recorder of `service`, with its metrics, if one is asked for.
    pub(super) fn attach(
        &self,
        service: &mut Service,
        registry: &mut Registry,
    ) -> anyhow::Result<Option<Recorder>> {
        let Some(folder) = &self.record else {
            return Ok(None);
        };
        let defaults = RecorderOptions::new(folder, service.block_size);
        let options = RecorderOptions {
            total_bytes_max: self.record_bytes_max,
            // Some files, so that the oldest requests go a few at a time.
            file_bytes_max: defaults.file_bytes_max.min(self.record_bytes_max / 8),
            ..defaults
        };
        let recorder = Recorder::start(options, monotonic_ns())?;
        registry.register_collector(Box::new(recorder.collector()));
        service.recorder = Some(recorder.handle());
        Ok(Some(recorder))
    }
}

/// Serves until interrupted.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut sets = Vec::new();
    if let Some(listen) = &args.listen {
        sets.push(format!("live.listen={listen:?}"));
    }
    if let Some(speedup) = args.speedup {
        sets.push(format!("live.speedup={speedup:?}"));
    }
    if !args.engine.is_empty() {
        sets.push(format!("pool.engines.engines={:?}", args.engine));
    }
    let Some(cluster) = args.cluster.resolve_live(&sets)? else {
        return Ok(ExitCode::SUCCESS); // --print-config
    };
    if cluster.has_engines() {
        return run_engines(&cluster, args, &sets);
    }
    anyhow::ensure!(
        !args.shadow.is_on(),
        "`--shadow` follows real engines, and this cluster has modelled ones: `slipstream drag` compares those \
         with the twin"
    );
    let live = Live::start(&cluster, args.switches, &args.record)?;
    let workers: u32 = cluster.pools.iter().map(|pool| pool.workers).sum();
    errln!(
        "serving {} with {workers} modelled worker{}",
        cluster.model.name,
        if workers == 1 { "" } else { "s" }
    );
    for line in live.events.iter().flat_map(super::events::addresses) {
        errln!("{line}");
    }
    let signals = Signals::install()?;
    // On stdout, as data: a script reads the address that was chosen for port 0.
    out::print(&format!(
        "listening on http://{}\n",
        live.frontend.address()
    ))?;
    signals.wait();
    say_draining(&cluster);
    live.shutdown()?;
    Ok(ExitCode::SUCCESS)
}

/// Serves real engines until interrupted.
fn run_engines(cluster: &Cluster, args: &Args, sets: &[String]) -> anyhow::Result<ExitCode> {
    let (record, shadow, switches) = (&args.record, &args.shadow, args.switches);
    let live = super::engines::Live::start(cluster, &args.cluster, sets, record, shadow, switches)?;
    errln!("{}", live.summary());
    let signals = Signals::install()?;
    out::print(&format!(
        "listening on http://{}\n",
        live.frontend.address()
    ))?;
    signals.wait();
    say_draining(cluster);
    live.shutdown();
    Ok(ExitCode::SUCCESS)
}

/// A running cluster.
struct Live {
    frontend: Frontend,
    workers: WorkerSet,
    events: Option<EventPlane>,
    recorder: Option<Recorder>,
    autoscale: Option<LiveAutoscale>,
}

impl Live {
    fn start(cluster: &Cluster, switches: Switches, record: &RecordArgs) -> anyhow::Result<Live> {
        let live = &cluster.live;
        // First, because it is the most frequent failure: another server on the port.
        let bound = bind(live)?;
        // Every client needs a file descriptor, and the usual soft limit is 1,024.
        let files = slipstream_os::process::raise_open_files();
        super::memory::check(cluster)?;
        let autoscale = autoscale::prepare(cluster)?;
        let text = Arc::new(text_model(cluster, true)?);
        let fleets = Fleets::of_cluster(cluster)?;
        let specs = worker_specs(cluster, &text, |_| true)?;

        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = engine_threads(live.engine_threads, cores, specs.len());
        let shards = shard_count(live.shards, cores);
        let plane = Plane::new(shards, threads, PlaneLimits::default());
        let resyncs: Arc<OnceLock<Resyncs>> = Arc::default();
        let (events, publishers) =
            super::events::start(cluster, &specs, threads, switches.fresh_buffers())?;
        let mut publishers = publishers.into_iter();
        let sinks = (0..threads)
            .map(|_| {
                let fleet = FleetSink::new(fleets.clone(), resyncs.clone());
                match publishers.next() {
                    Some(publisher) => Box::new((fleet, publisher)) as Box<dyn EventSink>,
                    None => Box::new(fleet),
                }
            })
            .collect();
        let timing = LiveTiming {
            speedup: live.speedup,
            fast_path: switches.fast_path(),
            ..LiveTiming::default()
        };
        let at_once = specs.iter().filter(|spec| spec.startup_s == 0.0).count();
        let (ready, became_ready) = std::sync::mpsc::channel();
        let on_ready = {
            let fleets = fleets.clone();
            move |worker: WorkerId, is_ready: bool| {
                if is_ready {
                    fleets.set_ready(worker, true);
                    let _ = ready.send(()); // fails once nothing waits for it
                } else {
                    fleets.on_worker_lost(worker);
                }
            }
        };
        let set = WorkerSet::start(specs, &timing, plane.threads, sinks, on_ready)?;
        // A client that reads the address may send at once, and should not get a 503.
        for _ in 0..at_once {
            became_ready
                .recv_timeout(Duration::from_secs(10))
                .context("a worker without start-up time did not become ready")?;
        }
        // Initialized here only.
        let _ = resyncs.set(set.resyncs());
        if let Some(events) = &events {
            super::events::resync_lost_kv(events, set.resyncs());
        }

        let mut registry = Registry::default();
        registry.register_collector(Box::new(slipstream_worker::metrics::WorkerCollector::new(
            &set,
            &cluster.model.name,
        )));
        registry.register_collector(Box::new(CacheConfigCollector::new(cluster)));
        registry.register_collector(Box::new(FleetCollector {
            fleets: fleets.clone(),
            engines: None,
        }));
        if let Some(events) = &events {
            registry.register_collector(Box::new(events.collector()));
        }
        if let Some(autoscale) = &autoscale {
            registry.register_collector(Box::new(autoscale.collector()));
        }
        let mut service = service(cluster, text, fleets.clone())?;
        fit_files(&mut service, files, false);
        register(&service, &mut registry);
        let recorder = record.attach(&mut service, &mut registry)?;
        let dispatching = Dispatching::new(cluster, fleets.clone(), shards);
        switches.apply(&mut service);
        let planes = plane
            .shards
            .into_iter()
            .enumerate()
            .map(|(shard, port)| ShardPlane {
                transport: WorkerTransport::Rings(port),
                dispatcher: dispatching.of(shard),
                kv_network: dispatching.kv_network.clone(),
            })
            .collect();
        let shared = bound.is_shared();
        let mut frontend = Frontend::start(bound, service, planes, registry)?;
        if shared {
            await_workers(&fleets);
        }
        let ranks = Workers::Modelled(set.ranks().to_vec());
        let autoscale = autoscale::start(autoscale, fleets, &frontend, ranks)?;
        frontend.open()?;
        Ok(Live {
            frontend,
            workers: set,
            events,
            recorder,
            autoscale,
        })
    }

    /// Frontend first, so that open requests can finish; then the engines, then their events.
    fn shutdown(self) -> anyhow::Result<()> {
        drop(self.autoscale);
        self.frontend.shutdown();
        if let Some(recorder) = self.recorder {
            recorder.close();
        }
        self.workers.shutdown()?;
        drop(self.events);
        Ok(())
    }
}

/// Binds the address to listen on, or takes the socket of a service manager (`LISTEN_FDS`), if there is one.
pub(super) fn bind(live: &LiveConfig) -> anyhow::Result<Bound> {
    let count = sockets_given()?;
    match count {
        0 if live.reuse_port => Ok(Bound::bind_shared(&live.listen)?),
        0 => Ok(Bound::bind(&live.listen)?),
        1 => {
            let mut given = listenfd::ListenFd::from_env();
            let socket = given.take_tcp_listener(0).context(
                "the socket from the service manager (LISTEN_FDS) is no TCP socket; use \
                 `ListenStream=HOST:PORT` in its unit",
            )?;
            let bound = Bound::inherited(socket.context("it was taken already")?)?;
            tracing::info!(
                "listening on the socket of the service manager, {}, instead of `live.listen`",
                bound.address()
            );
            Ok(bound)
        }
        count => anyhow::bail!(
            "the service manager passed {count} sockets (LISTEN_FDS); pass one: one `ListenStream` in one unit"
        ),
    }
}

/// Number of sockets that a service manager passed to this process (sd_listen_fds(3)). Variables that it cannot
/// have written are errors, as in systemd's own library: a server on another address would look started.
fn sockets_given() -> anyhow::Result<u32> {
    let Some(count) = std::env::var_os("LISTEN_FDS") else {
        return Ok(0);
    };
    if let Some(pid) = std::env::var_os("LISTEN_PID").filter(|pid| !pid.is_empty()) {
        // Inherited from a process for which they were meant.
        if number("LISTEN_PID", &pid)? != std::process::id() {
            return Ok(0);
        }
    }
    if let Some(first) = std::env::var_os("LISTEN_FDS_FIRST_FD") {
        number("LISTEN_FDS_FIRST_FD", &first)?;
    }
    number("LISTEN_FDS", &count)
}

/// The value of an environment variable of a service manager.
fn number(name: &str, value: &std::ffi::OsStr) -> anyhow::Result<u32> {
    let number = value.to_str().and_then(|value| value.parse::<u32>().ok());
    // Descriptors are `int`s.
    number.filter(|&number| i32::try_from(number).is_ok()).with_context(|| {
        let value: String = value.to_string_lossy().chars().take(40).collect();
        format!(
            "{name} is {value:?}, which is no number from 0 to {}; a service manager sets it for a socket unit: \
             unset it to listen on `live.listen`",
            i32::MAX
        )
    })
}

/// Time that workers may take to become ready before a shared address is served regardless.
const WORKERS_READY: Duration = Duration::from_secs(10);

/// Waits until all workers are ready: clients of a process that is being replaced have no 503 from its
/// successor then.
pub(super) fn await_workers(fleets: &Fleets) {
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

/// Configuration of the shards' dispatchers.
pub(super) struct Dispatching {
    rules: Rules,
    fleets: Fleets,
    queue: QueueRoom,
    /// Set if some workers compute prompts for others.
    pub(super) kv_network: Option<Arc<KvNetwork>>,
}

impl Dispatching {
    pub(super) fn new(cluster: &Cluster, fleets: Fleets, shards: usize) -> Dispatching {
        let network = || Arc::new(KvNetwork::new(cluster, shards));
        Dispatching {
            rules: Rules::of_cluster(cluster),
            queue: QueueRoom::default(),
            kv_network: fleets.prefill.is_some().then(network),
            fleets,
        }
    }

    /// The dispatcher of one shard.
    pub(super) fn of(&self, shard: usize) -> Dispatcher {
        let router = |fleet: &Arc<Fleet>| Router::new(fleet.clone(), to_u32(shard));
        let prefill = self.fleets.prefill.as_ref().map(router);
        Dispatcher::new(self.rules, router(&self.fleets.serve), prefill)
            .with_queue_room(self.queue.clone())
    }
}

/// Number of shards: as configured, or for 0 one per two cores.
pub(super) fn shard_count(configured: u32, cores: usize) -> usize {
    match configured {
        0 => (cores / 2).clamp(1, 255), // the limit of `live.shards`
        shards => shards as usize,
    }
}

/// The tokenizer of a server that writes `answers`, or of a router, which only reads prompts.
pub(super) fn text_model(cluster: &Cluster, answers: bool) -> anyhow::Result<TextModel> {
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

/// The workers of `cluster` for which `runs` is true. They are numbered over all pools in file
/// order.
pub(super) fn worker_specs(
    cluster: &Cluster,
    text: &TextModel,
    runs: impl Fn(WorkerId) -> bool,
) -> anyhow::Result<Vec<WorkerSpec>> {
    let mut specs = Vec::new();
    let mut workers = 0;
    for pool in &cluster.pools {
        for _ in 0..pool.workers {
            let worker = WorkerId(workers);
            workers += 1;
            if !runs(worker) {
                continue;
            }
            let ranks = (0..pool.engine.data_parallel_size)
                .map(|dp_rank| {
                    let rank = RankId {
                        worker,
                        dp_rank: to_u16(dp_rank),
                    };
                    engine(cluster, rank, &pool.engine, text)
                        .map(|engine| Box::new(engine) as Box<dyn Backend>)
                        .with_context(|| format!("[pool.{}]", pool.name))
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            specs.push(WorkerSpec {
                worker,
                ranks,
                startup_s: pool.engine.startup_s,
            });
        }
    }
    Ok(specs)
}

fn engine(
    cluster: &Cluster,
    rank: RankId,
    config: &EngineConfig,
    text: &TextModel,
) -> anyhow::Result<Engine> {
    let read = super::files::read;
    let timing = slipstream_engine::timing::build(config, &cluster.model.shape, read)?;
    let output = OutputModel {
        vocab: text.output_vocab(),
        first_vocab: Some(text.first_vocab()),
        eos: text.eos(),
        lengths: config.output_len.clone(),
    };
    Ok(Engine::new(rank, config, timing, output)?)
}

/// Registers the metrics of the parts of `service`.
pub(super) fn register(service: &Service, registry: &mut Registry) {
    if !service.api_keys.is_empty() {
        registry.register_collector(Box::new(service.api_keys.collector()));
    }
    if let Some(access) = &service.access {
        registry.register_collector(Box::new(access.collector()));
    }
    if let Some(spans) = &service.spans {
        registry.register_collector(Box::new(spans.collector()));
    }
}
/// Lowers the limit of connections to what the limit of open files has room for, and says so.
pub(super) fn fit_files(service: &mut Service, files: u64, forwards: bool) {
    if let Some(before) = service.limits.fit_files(files, forwards) {
        let holds = service.limits.connections_max;
        tracing::warn!(
            "`live.connections_max` is {holds} instead of {before}: this process may have {files} files open; raise the hard \
             limit (LimitNOFILE=, docker run --ulimit nofile=), or set `live.connections_max` to {holds} or less"
        );
    }
}

pub(super) fn service(
    cluster: &Cluster,
    text: Arc<TextModel>,
    fleets: Fleets,
) -> anyhow::Result<Service> {
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
        management: Arc::new(Management::new(
            live.management,
            &cluster.model.lora_adapters,
            &cluster.model.name,
        )?),
        image_tokens: cluster.model.image_tokens,
        limits: Limits {
            memory_max: match live.memory_max {
                0 => slipstream_os::memory::half_of_host(),
                bytes => bytes,
            },
            ..Limits::of(live)
        },
        recorder: None,
        shadow: None,
        access: live
            .access_log
            .as_deref()
            .map(super::access_log::start)
            .transpose()?,
        spans: live
            .otlp_endpoint
            .clone()
            .map(super::spans::start)
            .transpose()?,
        trace_sample: live.trace_sample,
        created: std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        #[cfg(feature = "bench")]
        locked_table: false,
        direct_writes: true,
        seed,
    })
}

/// The key of admin paths.
fn admin_key(file: Option<&PathBuf>) -> anyhow::Result<ApiKeys> {
    let Some(file) = file else {
        return Ok(ApiKeys::default());
    };
    let text = slipstream_os::secrets::read(file).with_context(|| {
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
        let text = slipstream_os::secrets::read(file).with_context(|| {
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

/// Reaction to a signal.
pub(super) fn say_draining(cluster: &Cluster) {
    errln!(
        "finishing open requests for up to {} s (live.drain_timeout_s); interrupt again to end at once",
        cluster.live.drain_timeout_s
    );
}

/// Handlers of SIGINT and SIGTERM. Before they are installed a signal ends the process at once, so
/// they come before the line that tells scripts that the process is ready.
pub(super) struct Signals {
    runtime: tokio::runtime::Runtime,
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    /// Installs the handlers.
    pub(super) fn install() -> anyhow::Result<Signals> {
        use tokio::signal::unix::{SignalKind, signal};
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let guard = runtime.enter();
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        drop(guard);
        Ok(Signals {
            runtime,
            interrupt,
            terminate,
        })
    }

    /// Returns at a signal. A second one then terminates the process.
    pub(super) fn wait(mut self) {
        self.next();
        std::thread::spawn(move || {
            self.next();
            super::access_log::flush();
            super::spans::flush();
            std::process::exit(130);
        });
    }

    fn next(&mut self) {
        self.runtime.block_on(async {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
            }
        });
    }
}
