//! Engines and their pools as they are configured.

use slipstream_base::EngineKind;
use slipstream_base::{Role, WorkerId};
use slipstream_config::cluster::{Cluster, EngineTls, EngineUrl, KvProtocol, PoolTraffic};
use slipstream_planes::tls::ClientTls;

/// An engine as it is configured.
#[derive(Clone, Debug)]
pub struct EngineSpec {
    /// Its number in the fleet.
    pub worker: WorkerId,
    /// NAME of its `[pool.NAME]`.
    pub pool: String,
    /// Its address.
    pub url: EngineUrl,
    /// The server that it runs.
    pub kind: EngineKind,
    /// Key that it wants.
    pub api_key: Option<String>,
    /// The part of requests that it computes.
    pub role: Role,
    /// How its keys and values get to decode engines, and the port of its bootstrap server.
    pub kv_protocol: (KvProtocol, u16),
    /// TLS of its pool; needed for `https://`.
    pub tls: Option<ClientTls>,
    /// Its pool's share of the requests.
    pub traffic: PoolTraffic,
}

impl EngineSpec {
    /// The engines of `cluster`, in the order of their numbers, and its pools of engines. `read_key` reads a pool's API key, and `read_tls` its
    /// certificates.
    ///
    /// # Errors
    /// Those of `read_key` and `read_tls`.
    pub fn of_cluster<E>(
        cluster: &Cluster,
        mut read_key: impl FnMut(&std::path::Path) -> Result<String, E>,
        mut read_tls: impl FnMut(&EngineTls) -> Result<ClientTls, E>,
    ) -> Result<(Vec<EngineSpec>, Vec<PoolSpec>), E> {
        let (mut specs, mut pools) = (Vec::new(), Vec::new());
        // A pool without engines at the start has a free worker.
        let mut first_of_pool = 0;
        for pool in &cluster.pools {
            let first = first_of_pool;
            first_of_pool += pool.workers;
            let Some(engines) = &pool.engines else {
                continue;
            };
            let api_key = engines
                .api_key_file
                .as_deref()
                .map(&mut read_key)
                .transpose()?;
            let is_tls = engines.urls.iter().chain(&engines.dns).any(|url| url.tls);
            let tls = is_tls.then(|| read_tls(&engines.tls)).transpose()?;
            pools.push(PoolSpec {
                name: pool.name.clone(),
                kind: engines.kind,
                api_key: api_key.clone(),
                role: pool.role,
                kv_protocol: (engines.kv_protocol, engines.bootstrap_port),
                tls: tls.clone(),
                traffic: engines.traffic,
            });
            for (number, url) in (first..).zip(&engines.urls) {
                specs.push(EngineSpec {
                    worker: WorkerId(number),
                    pool: pool.name.clone(),
                    url: url.clone(),
                    kind: engines.kind,
                    api_key: api_key.clone(),
                    role: pool.role,
                    kv_protocol: (engines.kv_protocol, engines.bootstrap_port),
                    tls: tls.clone(),
                    traffic: engines.traffic,
                });
            }
        }
        Ok((specs, pools))
    }
}

/// Common settings of the engines of a pool.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    /// NAME of `[pool.NAME]`.
    pub name: String,
    /// The server that they run.
    pub kind: EngineKind,
    /// Key that they want.
    pub api_key: Option<String>,
    /// The part of requests that they compute.
    pub role: Role,
    /// How their keys and values get to decode engines, and the port of their bootstrap servers.
    pub kv_protocol: (KvProtocol, u16),
    /// TLS of its `https://` engines; `None`: it had none, and the host's authorities hold for later ones.
    pub tls: Option<ClientTls>,
    /// Its share of the requests.
    pub traffic: PoolTraffic,
}

impl PoolSpec {
    /// The pool of an engine.
    pub fn of(spec: &EngineSpec) -> PoolSpec {
        PoolSpec {
            name: spec.pool.clone(),
            kind: spec.kind,
            api_key: spec.api_key.clone(),
            role: spec.role,
            kv_protocol: spec.kv_protocol,
            tls: spec.tls.clone(),
            traffic: spec.traffic,
        }
    }
}
