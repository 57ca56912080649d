//! Metrics of the router's fleet for `/metrics`.

use std::sync::Arc;

use slipstream_config::cluster::Cluster;
use slipstream_frontend::Roster;
use slipstream_frontend::roster::RosterTotals;
use slipstream_frontend::upstream::{Engines, Member};
use slipstream_metrics::{Collector, Family, Samples};
use slipstream_planes::wire::RankLoad;
use slipstream_router::{Counters, Fleets, Load};

/// A collector of the cache configuration of the engines of `cluster` under vLLM's name, which dashboards and
/// `slipstream describe` read.
pub fn cache_config(cluster: &Cluster) -> Box<dyn Collector> {
    let mut ranks = Vec::new();
    for (worker, pool) in cluster.workers() {
        let engine = &pool.engine;
        // As Python prints it.
        let caching = if engine.enable_prefix_caching {
            "True"
        } else {
            "False"
        };
        for rank in 0..engine.data_parallel_size {
            ranks.push(vec![
                ("worker", worker.to_string()),
                ("engine", rank.to_string()),
                ("block_size", engine.block_size.to_string()),
                ("num_gpu_blocks", engine.num_gpu_blocks.to_string()),
                ("cache_dtype", engine.kv_cache_dtype.name().to_owned()),
                ("enable_prefix_caching", caching.to_owned()),
                (
                    "gpu_memory_utilization",
                    engine.gpu_memory_utilization.to_string(),
                ),
            ]);
        }
    }
    slipstream_metrics::collector(Arc::<[_]>::from(ranks), Arc::clone, CACHE_CONFIG)
}

/// Labels of the ranks.
type CacheConfigs = Arc<[Vec<(&'static str, String)>]>;

const CACHE_CONFIG: &[Family<CacheConfigs>] = &[Family::gauge(
    "vllm:cache_config_info",
    "Configuration of the engines' KV caches",
    |of, samples| {
        for labels in &**of {
            let labels = labels.iter().map(|(name, value)| (*name, value.as_str()));
            samples.add(&labels.collect::<Vec<_>>(), 1);
        }
    },
)];

/// A collector of a frontend's worker processes. vLLM's metrics name `model`.
pub fn roster(roster: Arc<Roster>, model: &str) -> Box<dyn Collector> {
    let scrape = |(roster, model): &(Arc<Roster>, String)| Workers {
        totals: roster.totals(),
        loads: roster.loads(),
        model: model.clone(),
    };
    slipstream_metrics::collector((roster, model.to_owned()), scrape, WORKERS)
}

/// The worker processes at one scrape.
struct Workers {
    totals: RosterTotals,
    loads: Vec<RankLoad>,
    model: String,
}

impl Workers {
    fn each(&self, samples: &mut Samples<'_>, of: fn(&RankLoad) -> f64) {
        for load in &self.loads {
            let worker = load.rank.worker.to_string();
            let engine = load.rank.dp_rank.to_string();
            let labels = [
                ("model_name", self.model.as_str()),
                ("worker", &worker),
                ("engine", &engine),
            ];
            samples.add_real(&labels, of(load));
        }
    }
}

const WORKERS: &[Family<Workers>] = &[
    Family::gauge(
        "slipstream_plane_connections_open",
        "Connections of worker processes to shards",
        |of, samples| samples.add(&[], of.totals.open),
    ),
    Family::gauge(
        "slipstream_plane_tombstones",
        "Workers lost in the last seconds that have not returned",
        |of, samples| samples.add(&[], of.totals.tombstones),
    ),
    Family::counter(
        "slipstream_plane_connections",
        "Worker process connections accepted",
        |of, samples| samples.add(&[], of.totals.connected),
    ),
    Family::counter(
        "slipstream_plane_rejected",
        "Worker process connections rejected",
        |of, samples| samples.add(&[], of.totals.rejected),
    ),
    Family::counter(
        "slipstream_plane_lost",
        "Worker process connections closed",
        |of, samples| samples.add(&[], of.totals.lost),
    ),
    // Names and meanings of the first three: vLLM, `vllm/v1/metrics/loggers.py`.
    Family::gauge(
        "vllm:num_requests_running",
        "Running sequences by the worker's last report, over all frontends",
        |of, samples| of.each(samples, |l| f64::from(l.running)),
    ),
    Family::gauge(
        "vllm:num_requests_waiting",
        "Waiting sequences by the worker's last report",
        |of, samples| of.each(samples, |l| f64::from(l.waiting)),
    ),
    Family::gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache held by sequences, 0 to 1, by the worker's last report",
        |of, samples| {
            of.each(samples, |l| {
                f64::from(l.used_blocks) / f64::from(l.total_blocks.max(1))
            });
        },
    ),
    Family::gauge(
        "slipstream_worker_used_blocks",
        "Blocks held by sequences, by the worker's last report",
        |of, samples| of.each(samples, |l| f64::from(l.used_blocks)),
    ),
    Family::gauge(
        "slipstream_worker_total_blocks",
        "KV cache size in blocks",
        |of, samples| of.each(samples, |l| f64::from(l.total_blocks)),
    ),
];

/// A collector of loads by rank and the router's counters; a scrape reads atomics. Of real `engines`, workers that are
/// none now are left out.
pub fn fleets(fleets: Fleets, engines: Option<Arc<Engines>>) -> Box<dyn Collector> {
    slipstream_metrics::collector((fleets, engines), Routing::of, ROUTER)
}

/// The router at one scrape.
struct Routing {
    loads: Vec<Load>,
    /// Of each fleet.
    counters: Vec<Counters>,
}

impl Routing {
    fn of((fleets, engines): &(Fleets, Option<Arc<Engines>>)) -> Routing {
        let mut loads: Vec<Load> = fleets.each().flat_map(|fleet| fleet.loads()).collect();
        if let Some(engines) = engines {
            let members = engines.list();
            loads.retain(|load| {
                let is_it = |of: &Member| of.spec().worker == load.rank.worker;
                members.iter().any(is_it)
            });
        }
        loads.sort_unstable_by_key(|load| load.rank);
        let counters = fleets.each().map(|fleet| fleet.counters()).collect();
        Routing { loads, counters }
    }

    fn each(&self, samples: &mut Samples<'_>, of: fn(&Load) -> u64) {
        for load in &self.loads {
            let (worker, engine) = labels(load);
            samples.add(&[("worker", &worker), ("engine", &engine)], of(load));
        }
    }

    fn sum(&self, samples: &mut Samples<'_>, of: fn(&Counters) -> u64) {
        samples.add(&[], self.counters.iter().map(of).sum());
    }
}

const ROUTER: &[Family<Routing>] = &[
    Family::gauge(
        "slipstream_router_ready",
        "1 if the rank takes requests",
        |of, samples| of.each(samples, |l| l.ready.into()),
    ),
    Family::gauge(
        "slipstream_router_requests",
        "Sequences routed and not ended",
        |of, samples| of.each(samples, |l| l.requests),
    ),
    Family::gauge(
        "slipstream_router_prefill_tokens",
        "Prompt tokens routed and not yet computed",
        |of, samples| of.each(samples, |l| l.prefill_tokens),
    ),
    Family::gauge(
        "slipstream_router_active_blocks",
        "Distinct blocks of live sequences",
        |of, samples| of.each(samples, |l| l.active_blocks),
    ),
    Family::gauge(
        "slipstream_router_cached_blocks",
        "Blocks in the index",
        |of, samples| of.each(samples, |l| l.cached_blocks),
    ),
    Family::gauge(
        "slipstream_router_index_trusted",
        "0 while a KV delta is missing",
        |of, samples| of.each(samples, |l| l.trusted.into()),
    ),
    Family::counter(
        "slipstream_router_routed",
        "Sequences routed to the rank",
        |of, samples| of.each(samples, |l| l.routed_total),
    ),
    Family::counter(
        "slipstream_router_kv_gaps",
        "KV deltas skipped in gaps",
        |of, samples| of.sum(samples, |c| c.kv_gaps_total),
    ),
    Family::counter(
        "slipstream_router_kv_duplicates",
        "Duplicate KV deltas",
        |of, samples| of.sum(samples, |c| c.kv_duplicates_total),
    ),
    Family::counter(
        "slipstream_router_kv_strangers",
        "KV deltas of unknown ranks",
        |of, samples| of.sum(samples, |c| c.kv_strangers_total),
    ),
    Family::counter(
        "slipstream_router_kv_dropped_blocks",
        "Blocks beyond the index's capacity",
        |of, samples| of.sum(samples, |c| c.kv_dropped_blocks_total),
    ),
    Family::counter(
        "slipstream_router_busy",
        "Requests refused as busy",
        |of, samples| of.sum(samples, |c| c.busy_total),
    ),
    Family::counter(
        "slipstream_router_affinity_hits",
        "Requests routed to their session's worker",
        |of, samples| of.sum(samples, |c| c.affinity_hits_total),
    ),
    Family::counter(
        "slipstream_router_sessions_dropped",
        "Sessions evicted because the table was full",
        |of, samples| of.sum(samples, |c| c.sessions_dropped_total),
    ),
];

fn labels(load: &Load) -> (String, String) {
    (load.rank.worker.to_string(), load.rank.dp_rank.to_string())
}
