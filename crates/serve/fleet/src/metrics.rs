//! Metrics of the router's fleet for `/metrics`.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use slipstream_config::cluster::Cluster;
use slipstream_frontend::Roster;
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
        let help = "Configuration of the engines' KV caches";
        let name = "vllm:cache_config_info";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for labels in &self.0 {
            family.encode_family(labels)?.encode_gauge(&1_u32)?;
        }
        Ok(())
    }
}

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
        let totals = self.roster.totals();
        for (name, help, value) in [
            (
                "slipstream_plane_connections_open",
                "Connections of worker processes to shards",
                totals.open,
            ),
            (
                "slipstream_plane_tombstones",
                "Workers lost in the last seconds that have not returned",
                totals.tombstones,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&(value as f64))?;
        }
        for (name, help, value) in [
            (
                "slipstream_plane_connections",
                "Worker process connections accepted",
                totals.connected,
            ),
            (
                "slipstream_plane_rejected",
                "Worker process connections rejected",
                totals.rejected,
            ),
            (
                "slipstream_plane_lost",
                "Worker process connections closed",
                totals.lost,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        type Of = fn(&RankLoad) -> f64;
        // Names and meanings of the first three: vLLM, `vllm/v1/metrics/loggers.py`.
        let gauges: [(&str, &str, Of); 5] = [
            (
                "vllm:num_requests_running",
                "Running sequences by the worker's last report, over all frontends",
                |l| f64::from(l.running),
            ),
            (
                "vllm:num_requests_waiting",
                "Waiting sequences by the worker's last report",
                |l| f64::from(l.waiting),
            ),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV cache held by sequences, 0 to 1, by the worker's last report",
                |l| f64::from(l.used_blocks) / f64::from(l.total_blocks.max(1)),
            ),
            (
                "slipstream_worker_used_blocks",
                "Blocks held by sequences, by the worker's last report",
                |l| f64::from(l.used_blocks),
            ),
            (
                "slipstream_worker_total_blocks",
                "KV cache size in blocks",
                |l| f64::from(l.total_blocks),
            ),
        ];
        let loads = self.roster.loads();
        for (name, help, of) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for load in &loads {
                let worker = load.rank.worker.to_string();
                let engine = load.rank.dp_rank.to_string();
                family
                    .encode_family(&[
                        ("model_name", self.model.as_str()),
                        ("worker", worker.as_str()),
                        ("engine", engine.as_str()),
                    ])?
                    .encode_gauge(&of(load))?;
            }
        }
        Ok(())
    }
}

/// Encodes loads by rank and the router's counters; a scrape reads atomics.
pub struct FleetCollector {
    /// The router's targets.
    pub fleets: Fleets,
    /// Real engines: workers that are none now are left out.
    pub engines: Option<Arc<Engines>>,
}

/// Name, help, and reader of the value.
type Gauge = (&'static str, &'static str, fn(&Load) -> u64);

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
        let gauges: [Gauge; 6] = [
            (
                "slipstream_router_ready",
                "1 if the rank takes requests",
                |l| l.ready.into(),
            ),
            (
                "slipstream_router_requests",
                "Sequences routed and not ended",
                |l| l.requests,
            ),
            (
                "slipstream_router_prefill_tokens",
                "Prompt tokens routed and not yet computed",
                |l| l.prefill_tokens,
            ),
            (
                "slipstream_router_active_blocks",
                "Distinct blocks of live sequences",
                |l| l.active_blocks,
            ),
            (
                "slipstream_router_cached_blocks",
                "Blocks in the index",
                |l| l.cached_blocks,
            ),
            (
                "slipstream_router_index_trusted",
                "0 while a KV delta is missing",
                |l| l.trusted.into(),
            ),
        ];
        for (name, help, of) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for load in &loads {
                let (worker, engine) = labels(load);
                family
                    .encode_family(&[("worker", worker.as_str()), ("engine", engine.as_str())])?
                    .encode_gauge(&(of(load) as f64))?;
            }
        }
        let mut routed = encoder.encode_descriptor(
            "slipstream_router_routed",
            "Sequences routed to the rank",
            None,
            MetricType::Counter,
        )?;
        for load in &loads {
            let (worker, engine) = labels(load);
            routed
                .encode_family(&[("worker", worker.as_str()), ("engine", engine.as_str())])?
                .encode_counter::<NoLabelSet, u64, f64>(&load.routed_total, None)?;
        }
        let each: Vec<Counters> = self.fleets.each().map(|fleet| fleet.counters()).collect();
        let sum = |of: fn(&Counters) -> u64| each.iter().map(of).sum::<u64>();
        for (name, help, value) in [
            (
                "slipstream_router_kv_gaps",
                "KV deltas skipped in gaps",
                sum(|c| c.kv_gaps_total),
            ),
            (
                "slipstream_router_kv_duplicates",
                "Duplicate KV deltas",
                sum(|c| c.kv_duplicates_total),
            ),
            (
                "slipstream_router_kv_strangers",
                "KV deltas of unknown ranks",
                sum(|c| c.kv_strangers_total),
            ),
            (
                "slipstream_router_kv_dropped_blocks",
                "Blocks beyond the index's capacity",
                sum(|c| c.kv_dropped_blocks_total),
            ),
            (
                "slipstream_router_busy",
                "Requests refused as busy",
                sum(|c| c.busy_total),
            ),
            (
                "slipstream_router_affinity_hits",
                "Requests routed to their session's worker",
                sum(|c| c.affinity_hits_total),
            ),
            (
                "slipstream_router_sessions_dropped",
                "Sessions evicted because the table was full",
                sum(|c| c.sessions_dropped_total),
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        Ok(())
    }
}

fn labels(load: &Load) -> (String, String) {
    (load.rank.worker.to_string(), load.rank.dp_rank.to_string())
}
