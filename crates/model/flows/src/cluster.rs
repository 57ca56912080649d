//! The network between the workers of a cluster file.

use slipstream_base::WorkerId;
use slipstream_base::width::{round_u64, to_u32};
use slipstream_config::cluster::{Cluster, NetworkMode};

use crate::{Endpoint, FabricConfig};

impl FabricConfig {
    /// The network of `cluster`: one endpoint per worker, followed by the frontend's. `None` if it
    /// is not modelled. All of it is `speedup` (above 0) times as fast as in the file.
    pub fn of_cluster(cluster: &Cluster, speedup: f64) -> Option<FabricConfig> {
        let network = &cluster.network;
        if network.mode == NetworkMode::None {
            return None;
        }
        let mut rates: Vec<f64> = cluster
            .workers()
            .map(|(_, pool)| {
                let nics = network.nics(pool.engine.gpus());
                network.nic_bits_per_s * f64::from(nics) * speedup
            })
            .collect();
        let per_leaf = network.workers_per_leaf;
        let mut leaf: Vec<u32> = (0..to_u32(rates.len()))
            .map(|worker| worker.checked_div(per_leaf).unwrap_or(0))
            .collect();
        rates.push(network.frontend_bits_per_s * speedup);
        // Under its own leaf, if there are several.
        leaf.push(match per_leaf {
            0 => 0,
            _ => leaf.last().map_or(0, |last| last + 1),
        });
        let uplink = network.uplink_bits_per_s * speedup;
        Some(FabricConfig {
            endpoint_bits_per_s: rates,
            leaf,
            uplink_bits_per_s: Some(uplink).filter(|&rate| rate > 0.0),
            hop_latency_ns: round_u64(network.hop_latency_us * 1e3 / speedup),
        })
    }
}

impl Endpoint {
    /// The endpoint of a worker in the network of its cluster.
    pub fn of_worker(worker: WorkerId) -> Endpoint {
        Endpoint(worker.0)
    }

    /// The endpoint of the frontend in the network of `cluster`.
    pub fn of_frontend(cluster: &Cluster) -> Endpoint {
        Endpoint(cluster.pools.iter().map(|pool| pool.workers).sum())
    }
}
