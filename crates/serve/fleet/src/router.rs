//! A router in front of real engines, as a running server.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use slipstream_base::Role;
use slipstream_base::text::counted;
use slipstream_config::cluster::{Cluster, EngineTls, PoolConfig};
use slipstream_frontend::text::TextModel;
use slipstream_frontend::upstream::health::{self, HealthChecks};
use slipstream_frontend::upstream::{self, EngineSpec, Engines, PoolSpec};
use slipstream_frontend::{Bound, Frontend, ShardPlane, WorkerTransport};
use slipstream_metrics::Registry;
use slipstream_os::process;
use slipstream_recorder::Recorder;
use slipstream_router::{Fleet, Fleets};

use crate::autoscale::{self, LiveAutoscale, Workers};
use crate::engine_kv::{self, Following};
use crate::keys::{KeyFiles, read_key, read_tls};
use crate::membership::{self, Membership};
use crate::metrics;
use crate::reload::{self, ClusterFile, Reload};
use crate::server::{
    Dispatching, RecordOptions, fit_files, record, register, service, shard_count, text_model,
};
use crate::shadow::{Shadow, ShadowOptions};

/// Time at start in which engines may answer their first health check. A client that reads the address may
/// send at once, and should not get a 503.
const FIRST_CHECKS: Duration = Duration::from_secs(3);

/// Slots for engines that come later, if their number is not configured.
const SLOTS: u32 = 8;

/// What a router does besides routing. The default does nothing.
#[derive(Default)]
pub struct RouterOptions {
    /// The file that the cluster was read from. It is watched, and slots are kept for engines that it may list later.
    pub file: Option<ClusterFile>,
    /// Requests are recorded.
    pub record: Option<RecordOptions>,
    /// A twin predicts the requests' times.
    pub shadow: Option<ShadowOptions>,
    /// Receives notes to the operator during the start, such as an engine that does not answer.
    pub note: Option<fn(&str)>,
}

/// A router in front of real engines: an OpenAI server on threads of its own, which chooses an engine for each request
/// and follows the engines' health, caches and membership.
///
/// Stop it by [`shutdown`](Self::shutdown): if it is dropped, open requests are not finished.
pub struct RouterServer {
    frontend: Frontend,
    engines: Arc<Engines>,
    checks: HealthChecks,
    events: Option<Following>,
    reload: Option<Reload>,
    membership: Option<Membership>,
    recorder: Option<Recorder>,
    shadow: Option<Shadow>,
    autoscale: Option<LiveAutoscale>,
}

impl RouterServer {
    /// Starts a router in front of the engines of `cluster`, whose pools list real ones. Blocks for some seconds at
    /// most: engines are asked for their sizes and health. Raises this process's limit of open files.
    ///
    /// # Errors
    /// A setting that only modelled engines have, a file that cannot be read or does not fit, or a thread that cannot be
    /// started. An engine that does not answer is none.
    ///
    /// # Panics
    /// In an asynchronous task with `model.tokenizer`, or `dns` of a pool: it waits for answers on the caller's thread.
    pub fn start(
        cluster: &Cluster,
        bound: Bound,
        options: RouterOptions,
    ) -> anyhow::Result<RouterServer> {
        let note = |text: &str| {
            if let Some(note) = options.note {
                note(text);
            }
        };
        check_settings(cluster)?;
        // A client and an engine per stream.
        let files = process::raise_open_files();
        let file = cluster;
        let cluster = &membership::resolved(file, note)?;
        let listed = Listed::read(cluster, options.file.is_some() || has_names(file))?;
        let given = cluster.clone();
        let autoscale = autoscale::prepare(&given)?;
        let keys = listed.keys.clone();
        let Connected {
            cluster,
            fleets,
            text,
            engines,
            events,
        } = listed.connect(cluster, options.record.is_some())?;
        let checks = health::start(engines.clone()).context("starting health checks")?;

        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shards = shard_count(cluster.live.shards, cores);
        let dispatching = Dispatching::new(&cluster, fleets.clone(), shards);
        let mut service = service(&cluster, text, fleets.clone())?;
        fit_files(&mut service, files, true);
        let mut registry = Registry::default();
        registry.register_collector(upstream::collector(engines.clone()));
        registry.register_collector(metrics::fleets(fleets.clone(), Some(engines.clone())));
        let collectors = [
            events.as_ref().map(Following::collector),
            autoscale.as_ref().map(autoscale::Prepared::collector),
        ];
        for collector in collectors.into_iter().flatten() {
            registry.register_collector(collector);
        }
        register(&service, &mut registry);
        let recorder = options
            .record
            .map(|options| record(&options, &mut service, &mut registry));
        let recorder = recorder.transpose()?;
        let start = |options: ShadowOptions| Shadow::start(options, &given, service.block_size);
        let shadow = options.shadow.map(start).transpose()?;
        if let Some(shadow) = &shadow {
            service.shadow = Some(shadow.feed());
            registry.register_collector(shadow.collector());
        }
        let planes = (0..shards)
            .map(|shard| ShardPlane {
                transport: WorkerTransport::Engines(engines.clone()),
                dispatcher: dispatching.of(shard),
                kv_network: None,
            })
            .collect();
        let frontend = Frontend::start(bound, service, planes, registry)?;
        let watch = |of| {
            reload::start(of, file, engines.clone(), keys.clone()).context("watching the file")
        };
        let reload = options.file.map(watch).transpose()?;
        let membership = membership::start(file, &given, &engines)?;
        let mut router = RouterServer {
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
        for engine in router.await_first_checks() {
            note(&format!("no requests go to {engine}"));
        }
        let engines = Workers::Real(router.engines.clone());
        router.autoscale = autoscale::start(autoscale, fleets, &router.frontend, engines)?;
        router.frontend.open()?;
        Ok(router)
    }

    /// The address served.
    pub fn address(&self) -> SocketAddr {
        self.frontend.address()
    }

    /// Waits until each engine has answered a health check, or for [`FIRST_CHECKS`]. Returns those that no requests go
    /// to, with the reason.
    fn await_first_checks(&self) -> Vec<String> {
        let end = Instant::now() + FIRST_CHECKS;
        while !self.engines.all_asked() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.engines.unreachable()
    }

    /// The engines by role, and how many are ready, as a line of text.
    pub fn summary(&self) -> String {
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

    /// Stops accepting connections, lets open requests finish for up to `live.drain_timeout_s`, and ends all threads.
    pub fn shutdown(self) {
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

/// Engines as a cluster file lists them, with their keys.
struct Listed {
    specs: Vec<EngineSpec>,
    pools: Vec<PoolSpec>,
    admin_key: Option<String>,
    /// Room for engines that come later.
    slots: u32,
    keys: Arc<KeyFiles>,
}

/// Engines in the fleets of a router.
struct Connected {
    /// The cluster with the sizes that the engines report.
    cluster: Cluster,
    fleets: Fleets,
    text: Arc<TextModel>,
    engines: Arc<Engines>,
    events: Option<Following>,
}

impl Listed {
    /// Reads the engines of `cluster`. `may_grow`: others may come without the admin API.
    fn read(cluster: &Cluster, may_grow: bool) -> anyhow::Result<Listed> {
        let keys = Arc::new(KeyFiles::default());
        let key = |path: &Path| read_key(path, |path| keys.read_secret(path));
        let tls = |tls: &EngineTls| read_tls(tls, |path| keys.read(path));
        let (specs, pools) = EngineSpec::of_cluster(cluster, key, tls)?;
        let admin_key = cluster.upstream.admin_key_file.as_deref().map(key);
        let admin_key = admin_key.transpose()?;
        let slots = slots(cluster, may_grow || admin_key.is_some())?;
        Ok(Listed {
            specs,
            pools,
            admin_key,
            slots,
            keys,
        })
    }

    /// Asks the engines for their sizes, and follows their KV events if the router can use them.
    fn connect(self, cluster: &Cluster, is_recorded: bool) -> anyhow::Result<Connected> {
        let (cluster, follows) = match engine_kv::learn(cluster, &self.specs)? {
            Ok(sizes) => (sizes.cluster(cluster)?, true),
            Err(why) => (as_routed(cluster, &why), false),
        };
        let cluster = with_slots(cluster, self.slots);
        let guesses = |fleet: Fleet| if follows { fleet.with_guesses() } else { fleet };
        let fleets = Fleets::of_cluster_with(&cluster, guesses)?;
        let text = Arc::new(if follows {
            text_model(&cluster, false)?
        } else {
            TextModel::builtin() // engines tokenize
        });
        let engines = Engines::new(self.specs, &cluster.upstream, fleets.clone());
        engines.set_pools(self.pools);
        let engines = Arc::new(with_settings(engines, &cluster, follows, self.admin_key));
        let follow = || {
            let (engines, fleets) = (engines.clone(), fleets.clone());
            engine_kv::follow(&cluster, engines, fleets, text.clone(), is_recorded)
        };
        let events = follows.then(follow).transpose();
        let events = events.context("following KV events")?;
        Ok(Connected {
            cluster,
            fleets,
            text,
            engines,
            events,
        })
    }
}

/// Refuses what a cluster of real engines cannot have.
fn check_settings(cluster: &Cluster) -> anyhow::Result<()> {
    anyhow::ensure!(
        cluster.has_engines(),
        "no pool lists `engines`: a router needs `pool.NAME.engines`; for modelled engines run `slipstream serve`"
    );
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
    Ok(())
}

/// Whether a pool's engines come from a name or from Kubernetes, and so change.
fn has_names(cluster: &Cluster) -> bool {
    cluster.pools.iter().any(|pool| {
        let engines = pool.engines.as_ref();
        engines.is_some_and(|of| !of.dns.is_empty() || of.endpoint_slices.is_some())
    })
}

/// `engines` as the settings of `cluster` have them. `follows`: the router knows what their caches hold.
fn with_settings(
    mut engines: Engines,
    cluster: &Cluster,
    follows: bool,
    admin_key: Option<String>,
) -> Engines {
    if follows {
        engines = engines.with_tokens(cluster.model.name.clone());
    }
    if let Some(key) = admin_key {
        engines = engines.with_admin_key(key);
    }
    if cluster.live.api_keys_file.is_some() {
        engines = engines.with_own_keys();
    }
    engines
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
