//! `slipstream serve` in front of real engines.
//!
//! Wiring only: the router's fleet, the thread that checks engines' health, and shards that forward.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use prometheus_client::registry::Registry;
use slipstream_base::Role;
use slipstream_base::text::counted;
use slipstream_config::cluster::{Cluster, EngineTls, PoolConfig};
use slipstream_fleet::autoscale::{self, LiveAutoscale, Workers};
use slipstream_fleet::engine_kv::{self, Following};
use slipstream_fleet::membership::{self, Membership};
use slipstream_fleet::metrics::FleetCollector;
use slipstream_fleet::server::{
    Dispatching, fit_files, register, service, shard_count, text_model,
};
use slipstream_fleet::socket;
use slipstream_frontend::text::TextModel;
use slipstream_frontend::upstream::health::{self, HealthChecks};
use slipstream_frontend::upstream::{EngineCollector, EngineSpec, Engines};
use slipstream_frontend::{Frontend, ShardPlane, WorkerTransport};
use slipstream_planes::tls::{ClientFiles, ClientTls};
use slipstream_recorder::Recorder;
use slipstream_router::{Fleet, Fleets};

use super::cluster_args::ClusterArgs;
use super::reload::{self, Reload};
use super::serve::RecordArgs;
use super::shadow::{Shadow, ShadowArgs};
use super::switches::Switches;

/// Time at start in which engines may answer their first health check. A client that reads the address may
/// send at once, and should not get a 503.
const FIRST_CHECKS: Duration = Duration::from_secs(3);

/// Slots for engines that come later, if their number is not configured.
const SLOTS: u32 = 8;

/// A running server in front of real engines.
pub(crate) struct Live {
    pub(crate) frontend: Frontend,
    engines: Arc<Engines>,
    checks: HealthChecks,
    events: Option<Following>,
    reload: Option<Reload>,
    membership: Option<Membership>,
    recorder: Option<Recorder>,
    shadow: Option<Shadow>,
    autoscale: Option<LiveAutoscale>,
}

impl Live {
    /// Starts it. `args` and `sets` are those that `cluster` was read with: its file is watched.
    pub(crate) fn start(
        cluster: &Cluster,
        args: &ClusterArgs,
        sets: &[String],
        record: &RecordArgs,
        shadow: &ShadowArgs,
        switches: Switches,
    ) -> anyhow::Result<Live> {
        let faults = &cluster.live.faults;
        anyhow::ensure!(
            faults.rates() == [0.0; 4],
            "`[live.faults]` affects modelled engines only, and this cluster has real ones; set it for the \
             `slipstream serve` that models an engine"
        );
        anyhow::ensure!(
            cluster.live.admin_key_file.is_none(),
            "`live.admin_key_file` is the key of modelled engines, and this cluster has real ones; the router's admin API has \
             `upstream.admin_key_file`"
        );
        let bound = socket::bind(&cluster.live)?;
        // A client and an engine per stream.
        let files = slipstream_os::process::raise_open_files();
        let file = cluster;
        let cluster = &membership::resolved(file, |note| errln!("note: {note}"))?;
        // At the start, a key may come from a pipe.
        let read = super::files::read;
        let key = |path: &Path| {
            read_key(path, |path| {
                slipstream_os::secrets::read(path).map(String::into_bytes)
            })
        };
        let (specs, pools) = EngineSpec::of_cluster(cluster, key, |tls| read_tls(tls, read))?;
        let admin_key = cluster.upstream.admin_key_file.as_deref().map(key);
        let admin_key = admin_key.transpose()?;
        let has_names = file.pools.iter().any(|pool| {
            let engines = pool.engines.as_ref();
            engines.is_some_and(|of| !of.dns.is_empty() || of.endpoint_slices.is_some())
        });
        let may_grow = args.file().is_some() || admin_key.is_some() || has_names;
        let slots = slots(cluster, may_grow)?;
        let given = cluster.clone();
        let autoscale = autoscale::prepare(&given)?;
        let (cluster, follows) = match engine_kv::learn(cluster, &specs)? {
            Ok(sizes) => (sizes.cluster(cluster)?, true),
            Err(why) => (as_routed(cluster, &why), false),
        };
        let cluster = with_slots(cluster, slots);
        let guesses = |fleet: Fleet| if follows { fleet.with_guesses() } else { fleet };
        let fleets = Fleets::of_cluster_with(&cluster, guesses)?;
        let text = Arc::new(if follows {
            text_model(&cluster, false)?
        } else {
            TextModel::builtin() // engines tokenize
        });
        let mut engines = Engines::new(specs, &cluster.upstream, fleets.clone());
        if follows {
            engines = engines.with_tokens(cluster.model.name.clone());
        }
        if let Some(key) = admin_key {
            engines = engines.with_admin_key(key);
        }
        if cluster.live.api_keys_file.is_some() {
            engines = engines.with_own_keys();
        }
        engines.set_pools(pools);
        let engines = Arc::new(engines);
        let follow = || {
            let (engines, fleets) = (engines.clone(), fleets.clone());
            engine_kv::follow(&cluster, engines, fleets, text.clone(), record.is_on())
        };
        let events = follows.then(follow).transpose();
        let events = events.context("following KV events")?;
        let checks = health::start(engines.clone()).context("starting health checks")?;

        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shards = shard_count(cluster.live.shards, cores);
        let dispatching = Dispatching::new(&cluster, fleets.clone(), shards);
        let mut service = service(&cluster, text, fleets.clone())?;
        fit_files(&mut service, files, true);
        switches.apply(&mut service);
        let mut registry = Registry::default();
        registry.register_collector(Box::new(EngineCollector(engines.clone())));
        if let Some(events) = &events {
            registry.register_collector(Box::new(events.collector()));
        }
        registry.register_collector(Box::new(FleetCollector {
            fleets: fleets.clone(),
            engines: Some(engines.clone()),
        }));
        if let Some(autoscale) = &autoscale {
            registry.register_collector(Box::new(autoscale.collector()));
        }
        register(&service, &mut registry);
        let recorder = record.attach(&mut service, &mut registry)?;
        let shadow = shadow.start(&given, service.block_size)?;
        if let Some(shadow) = &shadow {
            service.shadow = Some(shadow.feed());
            registry.register_collector(Box::new(shadow.collector()));
        }
        let planes = (0..shards)
            .map(|shard| ShardPlane {
                transport: WorkerTransport::Engines(engines.clone()),
                dispatcher: dispatching.of(shard),
                kv_network: None,
            })
            .collect();
        let frontend = Frontend::start(bound, service, planes, registry)?;
        let reload = reload::start(args, sets, engines.clone()).context("watching the file")?;
        let membership = membership::start(file, &given, &engines)?;
        let mut live = Live {
            frontend,
            engines,
            checks,
            events,
            reload,
            membership,
            recorder,
            shadow,
            autoscale: None,
        };
        live.await_first_checks();
        let engines = Workers::Real(live.engines.clone());
        live.autoscale = autoscale::start(autoscale, fleets, &live.frontend, engines)?;
        live.frontend.open()?;
        Ok(live)
    }

    fn await_first_checks(&self) {
        let end = Instant::now() + FIRST_CHECKS;
        while !self.engines.all_asked() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        for engine in self.engines.unreachable() {
            errln!("note: no requests go to {engine}");
        }
    }

    /// The models and engines served, as text.
    pub(crate) fn summary(&self) -> String {
        let ready = self.engines.ready();
        let members = self.engines.list();
        let of = |role: Role| members.iter().filter(|of| of.spec().role == role).count() as u64;
        let count = counted(members.len() as u64, "engine");
        let roles: Vec<String> = [Role::Prefill, Role::Decode, Role::Both]
            .into_iter()
            .filter(|&role| of(role) > 0)
            .map(|role| match role {
                Role::Both => format!("{} for both", of(role)),
                role => format!("{} {}", of(role), role.name()),
            })
            .collect();
        if of(Role::Both) == members.len() as u64 {
            format!("serving {count} ({ready} ready)")
        } else {
            format!("serving {count}: {} ({ready} ready)", roles.join(", "))
        }
    }

    /// Frontend first, so that open requests can finish.
    pub(crate) fn shutdown(self) {
        drop(self.autoscale);
        drop(self.membership);
        drop(self.reload);
        self.frontend.shutdown();
        if let Some(recorder) = self.recorder {
            recorder.close();
        }
        drop(self.shadow);
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

/// Slots for engines that come later, in a fleet that may change, if `may_grow`.
fn slots(cluster: &Cluster, may_grow: bool) -> anyhow::Result<u32> {
    let now: u32 = cluster.pools.iter().map(|pool| pool.workers).sum();
    // Engines that a deployment adds as `[autoscale]` asks for them.
    let most = cluster.pools.iter().map(|pool| {
        let most = pool.autoscale.map(|config| config.workers_max);
        most.unwrap_or(0).max(pool.workers)
    });
    let most: u32 = most.sum();
    match cluster.upstream.engines_max {
        0 if may_grow => Ok(SLOTS.max(most - now)),
        max if (now.max(1)..most).contains(&max) => anyhow::bail!(
            "`upstream.engines_max` is {max}, and the pools may have {most} engines (`autoscale.workers_max`); raise it, or \
             leave it out"
        ),
        0 => Ok(0),
        max => max.checked_sub(now).with_context(|| {
            format!(
                "`upstream.engines_max` is {max}, and there are {now} engines at start; raise it, or leave it out"
            )
        }),
    }
}

/// `cluster` with workers for `slots` engines that come later, as large as the largest at start. If there are
/// prefill engines, there are as many slots for further ones.
fn with_slots(mut cluster: Cluster, slots: u32) -> Cluster {
    if slots == 0 {
        return cluster;
    }
    for (name, is_prefill) in [("later", false), ("later-prefill", true)] {
        let of_role = |pool: &&PoolConfig| (pool.role == Role::Prefill) == is_prefill;
        let pools = cluster.pools.iter().filter(of_role);
        if let Some(largest) = pools.max_by_key(|pool| pool.engine.num_gpu_blocks) {
            let free = PoolConfig {
                name: name.into(),
                workers: slots,
                ..largest.clone()
            };
            cluster.pools.push(free);
        }
    }
    cluster
}

/// TLS of a pool.
pub(super) fn read_tls(
    tls: &EngineTls,
    read: impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> anyhow::Result<ClientTls> {
    let files = ClientFiles {
        ca: tls.ca_file.clone(),
        client: tls.client.clone(),
        server_name: tls.server_name.clone(),
    };
    ClientTls::load_by(&files, read)
        .context("TLS towards engines (`ca_file`, `cert_file`, `key_file`)")
}

pub(super) fn read_key(
    path: &Path,
    read: impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> anyhow::Result<String> {
    let text = read(path).and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
    let text = text.with_context(|| {
        format!(
            "reading a key (`api_key_file` or `admin_key_file`) from {}",
            path.display()
        )
    })?;
    let key = text.trim();
    anyhow::ensure!(
        !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()),
        "{} has no key: write one line of printable ASCII without spaces",
        path.display()
    );
    Ok(key.to_owned())
}
