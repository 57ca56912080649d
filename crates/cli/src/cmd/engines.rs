//! `slipstream serve` in front of real engines.
//!
//! Wiring only: the router's fleet, the thread that checks engines' health, and shards that forward.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use prometheus_client::registry::Registry;
use slipstream_base::text::counted;
use slipstream_config::cluster::Cluster;
use slipstream_frontend::text::TextModel;
use slipstream_frontend::upstream::health::{self, HealthChecks};
use slipstream_frontend::upstream::{EngineCollector, EngineSpec, Engines};
use slipstream_frontend::{Bound, Frontend, ShardPlane, Transport};
use slipstream_router::{Fleet, Fleets};

use super::engine_kv::{self, Following};
use super::serve::{Dispatching, service, shard_count, text_model};
use super::switches::Switches;

/// Time at start in which engines may answer their first health check. A client that reads the address may
/// send at once, and should not get a 503.
const FIRST_CHECKS: Duration = Duration::from_secs(3);

/// A running server in front of real engines.
pub(crate) struct Live {
    pub(crate) frontend: Frontend,
    engines: Arc<Engines>,
    checks: HealthChecks,
    events: Option<Following>,
}

impl Live {
    pub(crate) fn start(cluster: &Cluster, switches: Switches) -> anyhow::Result<Live> {
        let bound = Bound::bind(&cluster.live.listen)?;
        // A client and an engine per stream.
        slipstream_bench::process::raise_open_files();
        let specs = EngineSpec::of_cluster(cluster, read_key)?;
        let (cluster, known) = match engine_kv::learn(cluster, &specs)? {
            Ok(known) => (known.cluster(cluster)?, Some(known)),
            Err(why) => (as_routed(cluster, &why), None),
        };
        let mut fleet = Fleet::from_cluster(&cluster)?;
        if known.is_some() {
            fleet = fleet.with_guesses();
        }
        let fleets = Fleets::from(fleet);
        let mut engines = Engines::new(specs.clone(), &cluster.upstream, fleets.serve.clone());
        let mut text = TextModel::builtin(); // engines tokenize
        if known.is_some() {
            text = text_model(&cluster)?;
            engines = engines.with_tokens(cluster.model.name.clone());
        }
        let engines = Arc::new(engines);
        let events = known.map(|known| known.follow(&cluster, specs, fleets.clone()));
        let events = events.transpose().context("following KV events")?;
        let checks = health::start(engines.clone()).context("starting health checks")?;

        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shards = shard_count(cluster.live.shards, cores);
        let dispatching = Dispatching::new(&cluster, fleets.clone(), shards);
        let mut service = service(&cluster, Arc::new(text), fleets.clone())?;
        switches.apply(&mut service);
        let mut registry = Registry::default();
        registry.register_collector(Box::new(EngineCollector(engines.clone())));
        if let Some(events) = &events {
            registry.register_collector(Box::new(events.collector()));
        }
        registry.register_collector(Box::new(super::fleet_metrics::FleetCollector(fleets)));
        let planes = (0..shards)
            .map(|shard| ShardPlane {
                transport: Transport::Engines(engines.clone()),
                dispatcher: dispatching.of(shard),
                kv_network: None,
            })
            .collect();
        let frontend = Frontend::start(bound, service, planes, registry)?;
        let live = Live {
            frontend,
            engines,
            checks,
            events,
        };
        live.await_first_checks();
        Ok(live)
    }

    fn await_first_checks(&self) {
        let end = Instant::now() + FIRST_CHECKS;
        while !self.engines.all_asked() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        for engine in self.engines.unreachable() {
            eprintln!("note: no requests go to {engine}");
        }
    }

    /// What is served, in words.
    pub(crate) fn summary(&self) -> String {
        let (ready, count) = (self.engines.ready(), self.engines.count());
        format!(
            "serving {} ({ready} ready)",
            counted(count as u64, "engine")
        )
    }

    /// Frontend first, so that open requests can finish.
    pub(crate) fn shutdown(self) {
        self.frontend.shutdown();
        drop(self.checks);
        drop(self.events);
    }
}

/// `cluster` for a router that knows what it routed to engines, but not what they hold.
fn as_routed(cluster: &Cluster, why: &str) -> Cluster {
    const HOW: &str = "routing by the text of earlier prompts, not by KV events";
    if cluster.router.kv_events && cluster.model.tokenizer.is_some() {
        tracing::warn!("{HOW}: {why}");
    } else {
        tracing::info!("{HOW}: {why}");
    }
    let mut cluster = cluster.clone();
    cluster.router.kv_events = false;
    cluster
}

fn read_key(path: &Path) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!(
            "reading an engine's API key (api_key_file) from {}",
            path.display()
        )
    })?;
    let key = text.trim();
    anyhow::ensure!(
        !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()),
        "{} has no API key: write one line of printable ASCII without spaces",
        path.display()
    );
    Ok(key.to_owned())
}
