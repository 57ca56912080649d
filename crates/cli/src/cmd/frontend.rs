//! `slipstream frontend`: the OpenAI HTTP server for worker processes.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use slipstream_config::cluster::Cluster;
use slipstream_fleet::metrics;
use slipstream_fleet::{server, socket};
use slipstream_frontend::{
    Frontend, PlaneSocket, RemoteLimits, Roster, ShardPlane, WorkerTransport,
};
use slipstream_metrics::Registry;
use slipstream_planes::discovery::{
    self, ProcessRecord, ProcessRole, SeatKey, Session, SessionEvent,
};
use slipstream_recorder::Recorder;
use slipstream_router::Fleets;

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::plane_args::{PlaneArgs, fingerprint, instance, process_name};
use crate::cmd::serve;
use crate::out;

/// Flags of `slipstream frontend`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    plane: PlaneArgs,
    /// Address to listen on; port 0 selects a free one [default: live.listen]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address at which workers connect to this process; its ports are chosen automatically
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    plane_host: String,
    #[command(flatten)]
    record: serve::RecordArgs,
}

/// Serves until interrupted.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let listen = args.listen.as_ref();
    let sets: Vec<String> = listen
        .map(|listen| format!("live.listen={listen:?}"))
        .into_iter()
        .collect();
    let Some(cluster) = args.cluster.resolve_modelled(&sets)? else {
        return Ok(ExitCode::SUCCESS); // --print-config
    };
    let (frontend, announced, recorder) = start(args, &cluster)?;
    errln!(
        "serving {} from worker processes: slipstream worker with the same cluster file",
        cluster.model.name
    );
    let signals = serve::Signals::install()?;
    out::listening(frontend.address())?;
    signals.wait();
    serve::say_draining(&cluster);
    frontend.shutdown();
    // Last: until then, workers that start may continue its streams.
    drop(announced);
    if let Some(recorder) = recorder {
        recorder.close();
    }
    Ok(ExitCode::SUCCESS)
}

fn start(args: &Args, cluster: &Cluster) -> anyhow::Result<(Frontend, Session, Option<Recorder>)> {
    let live = &cluster.live;
    let bound = socket::bind(live)?;
    // Every client needs a file descriptor, and the usual soft limit is 1,024.
    let files = slipstream_os::process::raise_open_files();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shards = server::shard_count(live.shards, cores);
    let sockets = sockets(&args.plane_host, shards)?;
    let key = SeatKey::draw().context("drawing a key for workers")?;
    let record = ProcessRecord {
        role: ProcessRole::Frontend,
        instance: instance(),
        name: process_name(),
        fingerprint: fingerprint(cluster),
        shards: sockets.iter().map(|s| s.address().to_string()).collect(),
        workers: Vec::new(),
        key: Some(key.clone()),
    };
    let lease = args.plane.lease()?;

    let text = Arc::new(server::text_model(cluster, true)?);
    let fleets = Fleets::of_cluster(cluster)?;
    let workers: u32 = cluster.pools.iter().map(|pool| pool.workers).sum();
    let roster = Arc::new(Roster::new(
        record.instance,
        record.fingerprint,
        record.name.clone(),
        fleets.clone(),
        workers as usize,
        shards,
        key.bytes(),
    ));
    let buffer = u32::try_from(live.stream_buffer_bytes_max).unwrap_or(u32::MAX);
    let most = RemoteLimits::default().credit_bytes;
    let limits = RemoteLimits {
        deadline: args.plane.peer_deadline()?,
        credit_bytes: most.min(buffer).max(4096),
        ..RemoteLimits::default()
    };
    let tls = args.plane.tls()?;
    let mut registry = registry(cluster, &fleets, &roster);
    let mut service = server::service(cluster, text, fleets.clone())?;
    server::fit_files(&mut service, files, false);
    server::register(&service, &mut registry);
    let recorder = args
        .record
        .options()
        .map(|options| server::record(&options, &mut service, &mut registry));
    let recorder = recorder.transpose()?;
    let dispatching = server::Dispatching::new(cluster, fleets.clone(), shards);
    let planes = sockets
        .into_iter()
        .enumerate()
        .map(|(shard, socket)| ShardPlane {
            transport: WorkerTransport::Sockets(socket.serve(roster.clone(), limits, tls.clone())),
            dispatcher: dispatching.of(shard),
            kv_network: dispatching.kv_network.clone(),
        })
        .collect();
    let shared = bound.is_shared();
    let mut frontend = Frontend::start(bound, service, planes, registry)?;
    // After it, so that workers that find the record find the shards.
    let folder = discovery::backend(&args.plane.discovery()?)?;
    let on_event = |event: SessionEvent<ProcessRecord>| {
        if let SessionEvent::Failed(error) = event {
            tracing::warn!("{error}");
        }
    };
    let announced = Session::start("discovery", folder, Some((record, lease)), on_event)?;
    if shared {
        server::await_workers(&fleets);
    }
    frontend.open()?;
    Ok((frontend, announced, recorder))
}

/// A socket for workers for each shard.
fn sockets(host: &str, shards: usize) -> anyhow::Result<Vec<PlaneSocket>> {
    let bind =
        |_| PlaneSocket::bind(&format!("{host}:0")).context("binding --plane-host for workers");
    let sockets = (0..shards).map(bind).collect::<anyhow::Result<Vec<_>>>()?;
    anyhow::ensure!(
        !sockets
            .iter()
            .any(|socket| socket.address().ip().is_unspecified()),
        "--plane-host {host} is not an address that workers can connect to; use one of this host's"
    );
    Ok(sockets)
}

/// Metrics of the workers and their fleets.
fn registry(cluster: &Cluster, fleets: &Fleets, roster: &Arc<Roster>) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(metrics::cache_config(cluster));
    registry.register_collector(metrics::fleets(fleets.clone(), None));
    registry.register_collector(metrics::roster(roster.clone(), &cluster.model.name));
    registry
}
