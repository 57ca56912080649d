//! Metrics of the router's fleet for `/metrics`.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use slipstream_config::cluster::Cluster;
use slipstream_frontend::Roster;
use slipstream_frontend::families::{self, Family, Samples};
use slipstream_frontend::roster::RosterTotals;
use slipstream_frontend::upstream::{Engines, Member};
use slipstream_planes::wire::RankLoad;
use slipstream_router::{Counters, Fleets, Load};

/// Encodes the engines' cache configuration under vLLM's name, which dashboards and `slipstream describe`
/// read.
#[derive(Debug)]
pub struct CacheConfigCollector(Vec<Vec<(&'static str, String)>>);

impl CacheConfigCollector {
    /// Of the engines of `cluster`.
    pub fn new(cluster: &Cluster) -> CacheConfigCollector {
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
        CacheConfigCollector(ranks)
    }
}

impl Collector for CacheConfigCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        families::encode(CACHE_CONFIG, self, &mut encoder)
    }
}

const CACHE_CONFIG: &[Family<CacheConfigCollector>] = &[Family::gauge(
    "vllm:cache_config_info",
    "Configuration of the engines' KV caches",
    |of, samples| {
        for labels in &of.0 {
            let labels = labels.iter().map(|(name, value)| (*name, value.as_str()));
            samples.add(&labels.collect::<Vec<_>>(), 1);
        }
    },
)];

/// Encodes a frontend's state of worker processes.
pub struct RosterCollector {
    /// The worker processes.
    pub roster: Arc<Roster>,
    /// The served model, as vLLM's metrics name it.
    pub model: String,
}

impl fmt::Debug for RosterCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RosterCollector({:?})", self.roster.totals())
    }
}

impl Collector for RosterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let workers = Workers {
            totals: self.roster.totals(),
            loads: self.roster.loads(),
            model: self.model.clone(),
        };
        families::encode(WORKERS, &workers, &mut encoder)
    }
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

/// Encodes loads by rank and the router's counters; a scrape reads atomics.
pub struct FleetCollector {
    /// The router's targets.
    pub fleets: Fleets,
    /// Real engines: workers that are none now are left out.
    pub engines: Option<Arc<Engines>>,
}

impl fmt::Debug for FleetCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: usize = self.fleets.each().map(|fleet| fleet.targets().len()).sum();
        write!(f, "FleetCollector({ranks} ranks)")
    }
}

impl Collector for FleetCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut loads: Vec<Load> = self.fleets.each().flat_map(|fleet| fleet.loads()).collect();
        if let Some(engines) = &self.engines {
            let members = engines.list();
            loads.retain(|load| {
                let is_it = |of: &Member| of.spec().worker == load.rank.worker;
                members.iter().any(is_it)
            });
        }
        loads.sort_unstable_by_key(|load| load.rank);
        let counters = self.fleets.each().map(|fleet| fleet.counters()).collect();
        families::encode(ROUTER, &Routing { loads, counters }, &mut encoder)
    }
}

/// The router at one scrape.
struct Routing {
    loads: Vec<Load>,
    /// Of each fleet.
    counters: Vec<Counters>,
}

impl Routing {
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
