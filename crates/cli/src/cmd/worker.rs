//! `slipstream worker`: runs engines for frontend processes.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use slipstream_base::WorkerId;
use slipstream_base::text::counted;
use slipstream_config::cluster::Cluster;
use slipstream_events::EventPlane;
use slipstream_metrics::Registry;
use slipstream_planes::wire::SNAPSHOT_BLOCKS_MAX;
use slipstream_planes::{EventSink, Plane, PlaneLimits};
use slipstream_worker::callhome::{CallHome, CallHomeConfig, CallHomeEvents};
use slipstream_worker::metrics;
use slipstream_worker::{LiveTiming, ThreadStats, WorkerSet, engine_threads};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::plane_args::{PlaneArgs, fingerprint, instance, process_name};
use crate::cmd::serve;
use crate::out;

/// Flags of `slipstream worker`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    plane: PlaneArgs,
    /// Run workers of this pool only [default: all pools]
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,
    /// Workers of the pool (the only one, or --pool), from 0: one (2), a range (0..4), or several
    /// with commas [default: all]
    #[arg(long, value_name = "I", value_delimiter = ',')]
    index: Vec<String>,
    /// Divide modelled time by this; 0: no waiting at all [default: live.speedup]
    #[arg(long, value_name = "FACTOR")]
    speedup: Option<f64>,
    /// Limit of connected frontend shards
    #[arg(long, value_name = "COUNT", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    links: u16,
    /// Serve /metrics on this address; port 0 selects a free one [default: not at all]
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,
}

/// Runs until interrupted.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let speedup = args.speedup;
    let sets: Vec<String> = speedup
        .map(|speedup| format!("live.speedup={speedup:?}"))
        .into_iter()
        .collect();
    let Some(cluster) = args.cluster.resolve_modelled(&sets)? else {
        return Ok(ExitCode::SUCCESS); // --print-config
    };
    let chosen = choose(&cluster, args.pool.as_deref(), &args.index)?;
    let Running { set, home, bus } = start(args, &cluster, &chosen)?;
    let names: Vec<String> = chosen.iter().map(WorkerId::to_string).collect();
    let signals = serve::Signals::install()?;
    // On stdout, as data: a script waits for it.
    out::print(&format!("running {}\n", names.join(" ")))?;
    signals.wait();
    serve::say_draining(&cluster);
    home.leave();
    let threads: Vec<Arc<ThreadStats>> = set.thread_stats().collect();
    let began = Instant::now();
    let drain = Duration::try_from_secs_f64(cluster.live.drain_timeout_s).unwrap_or(Duration::MAX);
    while threads.iter().any(|thread| thread.streams.get() > 0) && began.elapsed() < drain {
        std::thread::sleep(Duration::from_millis(10));
    }
    let ended = set.shutdown();
    home.shutdown();
    // Last, so that the engines' final events are still published.
    drop(bus);
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// A running worker process.
struct Running {
    set: WorkerSet,
    home: CallHome,
    bus: Option<EventPlane>,
}

fn start(args: &Args, cluster: &Cluster, chosen: &[WorkerId]) -> anyhow::Result<Running> {
    let live = &cluster.live;
    for pool in &cluster.pools {
        anyhow::ensure!(
            pool.engine.num_gpu_blocks <= SNAPSHOT_BLOCKS_MAX,
            "pool `{}`: `num_gpu_blocks` is {}, and cache snapshots for frontends are sent in one \
             frame of at most {SNAPSHOT_BLOCKS_MAX} blocks; raise `block_size`, or use `slipstream \
             serve`",
            pool.name,
            pool.engine.num_gpu_blocks
        );
    }
    let text = slipstream_fleet::server::text_model(cluster, true)?;
    let specs = serve::worker_specs(cluster, &text, |worker| chosen.contains(&worker))?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = engine_threads(live.engine_threads, cores, specs.len());
    let plane = Plane::new(usize::from(args.links), threads, PlaneLimits::default());
    let events = CallHomeEvents::new();
    let (bus, publishers) = super::events::start(cluster, &specs, threads)?;
    for line in bus.iter().flat_map(super::events::addresses) {
        errln!("{line}");
    }
    let mut publishers = publishers.into_iter();
    let sinks = (0..threads)
        .map(|_| match publishers.next() {
            Some(publisher) => Box::new((events.sink(), publisher)) as Box<dyn EventSink>,
            None => Box::new(events.sink()),
        })
        .collect();
    let timing = LiveTiming {
        speedup: live.speedup,
        ..LiveTiming::default()
    };
    let set = WorkerSet::start(specs, &timing, plane.threads, sinks, events.on_ready())?;
    if let Some(bus) = &bus {
        super::events::resync_lost_kv(bus, set.resyncs());
    }
    let config = CallHomeConfig {
        instance: instance(),
        fingerprint: fingerprint(cluster),
        name: process_name(),
        discovery: args.plane.discovery()?,
        lease: args.plane.lease()?,
        deadline: args.plane.peer_deadline()?,
        unsent_bytes_max: 64 << 20,
        tls: args.plane.tls()?,
    };
    let home = CallHome::start(config, &set, plane.shards, events)?;
    if let Some(listen) = &args.metrics {
        let mut registry = Registry::default();
        registry.register_collector(metrics::collector(&set, &cluster.model.name));
        registry.register_collector(metrics::call_home_collector(home.stats().clone()));
        if let Some(bus) = &bus {
            registry.register_collector(bus.collector());
        }
        let address = slipstream_fleet::metrics_page::serve(listen, registry)?;
        errln!("metrics at http://{address}/metrics");
    }
    Ok(Running { set, home, bus })
}

/// The workers selected by pool and index, in ascending order.
fn choose(
    cluster: &Cluster,
    pool: Option<&str>,
    indexes: &[String],
) -> anyhow::Result<Vec<WorkerId>> {
    anyhow::ensure!(
        indexes.is_empty() || pool.is_some() || cluster.pools.len() == 1,
        "--index counts within a pool, and the cluster file has {}; select one with --pool",
        cluster.pools.len()
    );
    let mut first = 0;
    let mut chosen = Vec::new();
    for candidate in &cluster.pools {
        let count = candidate.workers;
        if pool.is_none_or(|name| name == candidate.name) {
            if indexes.is_empty() {
                chosen.extend((first..first + count).map(WorkerId));
            }
            for index in indexes {
                for index in read_index(index, count)? {
                    anyhow::ensure!(
                        index < count,
                        "--index {index}: pool `{}` has {}, 0 to {}",
                        candidate.name,
                        counted(count.into(), "worker"),
                        count.saturating_sub(1)
                    );
                    chosen.push(WorkerId(first + index));
                }
            }
        }
        first += count;
    }
    if chosen.is_empty() {
        let pools: Vec<&str> = cluster.pools.iter().map(|p| p.name.as_str()).collect();
        let pool = pool.unwrap_or_default();
        anyhow::bail!(
            "--pool {pool}: no workers there; the cluster file has the pools {}",
            pools.join(", ")
        );
    }
    chosen.sort_unstable();
    chosen.dedup();
    Ok(chosen)
}

/// `3`, `0..4` (without 4) or `2..` (to the last of `count`).
fn read_index(text: &str, count: u32) -> anyhow::Result<std::ops::Range<u32>> {
    let number = |text: &str| {
        text.parse::<u32>()
            .with_context(|| format!("--index {text}: use a number, or a range such as 0..4"))
    };
    Ok(match text.split_once("..") {
        None => {
            let index = number(text)?;
            index..index.saturating_add(1)
        }
        Some((from, "")) => number(from)?..count,
        Some((from, to)) => number(from)?..number(to)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_config::cluster::PoolConfig;

    fn cluster() -> Cluster {
        let mut cluster = Cluster::default();
        let pool = |name: &str, workers| PoolConfig {
            name: name.into(),
            workers,
            ..cluster.pools[0].clone()
        };
        cluster.pools = vec![pool("a", 2), pool("b", 4)];
        cluster
    }

    fn chosen(pool: Option<&str>, indexes: &[&str]) -> Result<Vec<u32>, String> {
        let indexes: Vec<String> = indexes.iter().map(|&s| s.into()).collect();
        choose(&cluster(), pool, &indexes)
            .map(|chosen| chosen.iter().map(|worker| worker.0).collect())
            .map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn workers_are_named_by_pool_and_index() {
        assert_eq!(chosen(None, &[]), Ok(vec![0, 1, 2, 3, 4, 5]));
        assert_eq!(chosen(Some("b"), &[]), Ok(vec![2, 3, 4, 5]));
        assert_eq!(chosen(Some("b"), &["3", "0..2"]), Ok(vec![2, 3, 5]));
        assert_eq!(chosen(Some("b"), &["2..", "3"]), Ok(vec![4, 5]));
        let check = |pool, indexes: &[&str], part: &str| {
            let error = chosen(Some(pool), indexes).unwrap_err();
            assert!(error.contains(part), "{error}");
        };
        check("c", &[], "the pools a, b");
        check("a", &["2"], "pool `a` has 2 workers, 0 to 1");
        check("a", &["x"], "--index x");
        check("a", &["2.."], "no workers there");
    }
}
