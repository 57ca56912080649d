//! `slipstream serve`: a live cluster in one process.
//!
//! Wiring only: engines on engine threads, shards in front of them, rings between, and the router's
//! fleet, which receives KV events and chooses workers.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use slipstream_base::width::to_u16;
use slipstream_base::{RankId, WorkerId};
use slipstream_config::cluster::{Cluster, EngineConfig};
use slipstream_engine::{Engine, OutputModel};
use slipstream_events::{EventPlane, EventPublisher};
use slipstream_fleet::autoscale::{self, LiveAutoscale, RankRequests, Workers};
use slipstream_fleet::kv_sink::FleetSink;
use slipstream_fleet::metrics;
use slipstream_fleet::reload::ClusterFile;
use slipstream_fleet::router::{RouterOptions, RouterServer};
use slipstream_fleet::server::{
    Dispatching, RecordOptions, await_workers, fit_files, register, service, shard_count,
    text_model,
};
use slipstream_fleet::{access_log, server, socket, spans};
use slipstream_frontend::text::TextModel;
use slipstream_frontend::{Frontend, ShardPlane, WorkerTransport};
use slipstream_metrics::Registry;
use slipstream_planes::{EventSink, Plane, PlaneLimits};
use slipstream_recorder::Recorder;
use slipstream_router::Fleets;
use slipstream_worker::{
    Backend, LiveTiming, RankStats, Resyncs, WorkerSet, WorkerSpec, engine_threads,
};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::shadow::ShadowArgs;
use crate::out;

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
    #[command(flatten)]
    names: NameArgs,
    /// Divide modelled time by this; 0: no waiting at all [default: live.speedup]
    #[arg(long, value_name = "FACTOR")]
    speedup: Option<f64>,
    #[command(flatten)]
    record: RecordArgs,
    #[command(flatten)]
    shadow: ShadowArgs,
}

/// Address and model by vLLM's flags.
#[derive(clap::Args)]
pub(super) struct NameArgs {
    /// Host to listen on, with the port of --port or 8000
    #[arg(long, value_name = "HOST", conflicts_with = "listen", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    host: Option<String>,
    /// Port to listen on, with the host of --host or 127.0.0.1; 0 selects a free one
    #[arg(long, value_name = "PORT", conflicts_with = "listen")]
    port: Option<u16>,
    /// Modelled model: a preset's name, or a Hugging Face style config.json or its folder [default: the cluster file's]
    #[arg(long, value_name = "MODEL", conflicts_with = "engine", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    model: Option<String>,
    /// Names of the modelled model in requests; answers carry the first [default: model.name]
    #[arg(long, value_name = "NAME", num_args = 1.., conflicts_with = "engine", value_parser = served_name)]
    served_model_name: Vec<String>,
}

fn served_name(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("it is empty".into());
    }
    if std::path::Path::new(text)
        .extension()
        .is_some_and(|of| of == "toml")
    {
        return Err("it looks like the cluster file, which goes before this flag".into());
    }
    Ok(text.to_owned())
}

impl NameArgs {
    /// These flags as keys of the cluster file.
    fn sets(&self) -> Vec<String> {
        let mut sets = Vec::new();
        if self.host.is_some() || self.port.is_some() {
            let host = self.host.as_deref().unwrap_or("127.0.0.1");
            let is_ipv6 = host.contains(':') && !host.starts_with('[');
            let host = if is_ipv6 {
                format!("[{host}]")
            } else {
                host.to_owned()
            };
            let listen = format!("{host}:{}", self.port.unwrap_or(8000));
            let flag = if self.host.is_some() {
                "--host"
            } else {
                "--port"
            };
            sets.push(format!("{flag}: live.listen={listen:?}"));
        }
        if let Some(model) = &self.model {
            let path = std::path::Path::new(model);
            let is_json = path
                .extension()
                .is_some_and(|e| e.eq_ignore_ascii_case("json"));
            let key = if is_json || path.join("config.json").is_file() {
                "config"
            } else {
                "preset"
            };
            sets.push(format!("--model: model.{key}={model:?}"));
        }
        if let Some((first, others)) = self.served_model_name.split_first() {
            sets.push(format!("--served-model-name: model.name={first:?}"));
            if !others.is_empty() {
                sets.push(format!("--served-model-name: model.aliases={others:?}"));
            }
        }
        sets
    }
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
    /// Where requests are recorded, if they are.
    pub(super) fn options(&self) -> Option<RecordOptions> {
        self.record.clone().map(|folder| RecordOptions {
            folder,
            bytes_max: self.record_bytes_max,
        })
    }
}

/// Serves until interrupted.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let mut sets = Vec::new();
    if let Some(listen) = &args.listen {
        sets.push(format!("--listen: live.listen={listen:?}"));
    }
    if let Some(speedup) = args.speedup {
        sets.push(format!("--speedup: live.speedup={speedup:?}"));
    }
    if !args.engine.is_empty() {
        sets.push(format!("--engine: pool.engines.engines={:?}", args.engine));
    }
    sets.extend(args.names.sets());
    let Some((cluster, file)) = args.cluster.resolve_watched(&sets)? else {
        return Ok(ExitCode::SUCCESS); // --print-config
    };
    if cluster.has_engines() {
        return run_engines(&cluster, file, args);
    }
    anyhow::ensure!(
        !args.shadow.is_on(),
        "`--shadow` follows real engines, and this cluster has modelled ones: `slipstream drag` compares those \
         with the twin"
    );
    let live = Live::start(&cluster, &args.record)?;
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
    out::listening(live.frontend.address())?;
    signals.wait();
    say_draining(&cluster);
    live.shutdown()?;
    Ok(ExitCode::SUCCESS)
}

/// Serves real engines until interrupted.
fn run_engines(
    cluster: &Cluster,
    file: Option<ClusterFile>,
    args: &Args,
) -> anyhow::Result<ExitCode> {
    let bound = socket::bind(&cluster.live)?;
    let options = RouterOptions {
        file,
        record: args.record.options(),
        shadow: args.shadow.options()?,
        note: Some(|note| errln!("note: {note}")),
    };
    let router = RouterServer::start(cluster, bound, options)?;
    errln!("{}", router.summary());
    let signals = Signals::install()?;
    out::listening(router.address())?;
    signals.wait();
    say_draining(cluster);
    router.shutdown();
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
    fn start(cluster: &Cluster, record: &RecordArgs) -> anyhow::Result<Live> {
        let live = &cluster.live;
        // First, because it is the most frequent failure: another server on the port.
        let bound = socket::bind(live)?;
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
        let (events, publishers) = super::events::start(cluster, &specs, threads)?;
        let sinks = sinks(threads, publishers, &fleets, &resyncs);
        let timing = LiveTiming {
            speedup: live.speedup,
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

        let mut registry = registry(cluster, &set, &fleets);
        if let Some(events) = &events {
            registry.register_collector(events.collector());
        }
        if let Some(autoscale) = &autoscale {
            registry.register_collector(autoscale.collector());
        }
        let mut service = service(cluster, text, fleets.clone())?;
        if let Some(sources) = events.as_ref().and_then(super::events::kv_event_sources) {
            let _ = service.management.kv_event_sources.set(sources); // it is new
        }
        fit_files(&mut service, files, false);
        register(&service, &mut registry);
        let recorder = record
            .options()
            .map(|options| server::record(&options, &mut service, &mut registry));
        let recorder = recorder.transpose()?;
        let dispatching = Dispatching::new(cluster, fleets.clone(), shards);
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
        let autoscale = autoscale::start(autoscale, fleets, &frontend, modelled(&set))?;
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

/// Receivers of the events of each engine thread: the router, and a publisher if there is one.
fn sinks(
    threads: usize,
    publishers: Vec<EventPublisher>,
    fleets: &Fleets,
    resyncs: &Arc<OnceLock<Resyncs>>,
) -> Vec<Box<dyn EventSink>> {
    let mut publishers = publishers.into_iter();
    let sink = |_| {
        let resyncs = resyncs.clone();
        let fleet = FleetSink::new(fleets.clone(), move |rank| {
            if let Some(resyncs) = resyncs.get() {
                resyncs.resync(rank);
            }
        });
        match publishers.next() {
            Some(publisher) => Box::new((fleet, publisher)) as Box<dyn EventSink>,
            None => Box::new(fleet),
        }
    };
    (0..threads).map(sink).collect()
}

/// Metrics of the workers and their fleets.
fn registry(cluster: &Cluster, set: &WorkerSet, fleets: &Fleets) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(slipstream_worker::metrics::collector(
        set,
        &cluster.model.name,
    ));
    registry.register_collector(metrics::cache_config(cluster));
    registry.register_collector(metrics::fleets(fleets.clone(), None));
    registry
}

/// The requests of each rank, for autoscaling.
fn modelled(set: &WorkerSet) -> Workers {
    let ranks = set.ranks().to_vec();
    let requests = move || {
        let of = |rank: &Arc<RankStats>| RankRequests {
            worker: rank.rank.worker,
            running: rank.running.get(),
            waiting: rank.waiting.get(),
        };
        ranks.iter().map(of).collect()
    };
    Workers::Modelled(Box::new(requests))
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
    pub(super) fn wait(self) {
        self.wait_and(|| ());
    }

    /// As [`wait`](Self::wait), and calls `then` before it returns.
    pub(super) fn wait_and(mut self, then: impl FnOnce()) {
        self.next();
        then();
        std::thread::spawn(move || {
            self.next();
            access_log::flush();
            spans::flush();
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
