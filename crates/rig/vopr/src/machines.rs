//! Worker processes and frontends of a schedule: which are up, and how each is started.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use slipstream_base::width::{to_u8, to_u32};
use slipstream_base::{RankId, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_dispatch::{Dispatcher, QueueRoom, Rules};
use slipstream_engine::Engine;
use slipstream_frontend::sim::{SimFrontend, SimShard};
use slipstream_frontend::{KvNetwork, Limits, RemoteLimits, Roster, Service};
use slipstream_planes::discovery::{ProcessRecord, ProcessRole, SeatKey};
use slipstream_planes::ring::PlaneLimits;
use slipstream_router::{Fleets, Router};
use slipstream_worker::sim::{Connect, SimConfig, SimWorker};
use slipstream_worker::{Backend, LiveTiming, WorkerSpec};

use crate::client::Answers;
use crate::plan::Shape;
use crate::tasks::{Driver, Group};

/// Fingerprint of the cluster.
const FINGERPRINT: u64 = 7;
const KEY: &str = "00112233445566778899aabbccddeeff";

/// What all processes of a schedule have in common.
pub(crate) struct Site<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) seed: u64,
    pub(crate) cluster: &'a Cluster,
    pub(crate) answers: &'a Answers,
    pub(crate) driver: &'a Driver,
}

/// A worker process, or its absence.
#[derive(Default)]
pub(crate) struct Process {
    pub(crate) up: Option<(SimWorker, Group)>,
    pub(crate) instance: u64,
    pub(crate) frozen_until: u64,
    /// How far its clock is ahead, ns.
    pub(crate) ahead_ns: u64,
    pub(crate) leaving: bool,
    /// A run of it was stopped: it then sent all tokens that waited, with credit or without.
    pub(crate) stopped: bool,
    /// Frontends whose records it has read, by instance.
    pub(crate) known: BTreeSet<u64>,
}

/// A frontend, or its absence.
#[derive(Default)]
pub(crate) struct Frontend {
    pub(crate) up: Option<RunningFrontend>,
    pub(crate) instance: u64,
    /// The record of the run before.
    pub(crate) stale: Option<ProcessRecord>,
}

/// A frontend that runs.
pub(crate) struct RunningFrontend {
    pub(crate) groups: Vec<Group>,
    pub(crate) shards: Vec<SimShard>,
    pub(crate) roster: Arc<Roster>,
    pub(crate) fleets: Fleets,
    pub(crate) record: ProcessRecord,
}

impl RunningFrontend {
    /// Starts the frontend of this index, whose `instance` has not run before.
    pub(crate) fn start(
        index: usize,
        instance: u64,
        site: &Site<'_>,
    ) -> Result<RunningFrontend, String> {
        let shape = site.shape;
        let cluster = site.cluster;
        let fleets = Fleets::of_cluster(cluster).map_err(|error| error.to_string())?;
        let key = SeatKey::try_from(KEY.to_owned()).map_err(str::to_owned)?;
        let name = format!("frontend-{index}");
        let roster = Arc::new(Roster::new(
            instance,
            FINGERPRINT,
            name.clone(),
            fleets.clone(),
            shape.worker_count(),
            shape.shards,
            key.bytes(),
        ));
        let limits = Limits {
            streams_max: shape.streams_max,
            client_streams_max: shape.streams_max,
            write_timeout: Duration::from_secs(2),
            request_timeout: (shape.request_timeout_ms > 0)
                .then(|| Duration::from_millis(shape.request_timeout_ms)),
            ..Limits::default()
        };
        let service = Service {
            max_model_len: shape.blocks * 16,
            kv_blocks: shape.blocks,
            limits,
            seed: site.seed,
            ..Service::new("m", site.answers.text.clone(), fleets.clone())
        };
        let remote = RemoteLimits {
            deadline: Duration::from_millis(shape.deadline_ms),
            credit_bytes: shape.credit_bytes,
            ..RemoteLimits::default()
        };
        let frontend = SimFrontend::new(service, roster.clone(), remote);
        let rules = Rules::of_cluster(cluster);
        let room = QueueRoom::default();
        let network = fleets
            .prefill
            .is_some()
            .then(|| Arc::new(KvNetwork::new(cluster, shape.shards)));
        let mut groups = Vec::new();
        let mut shards = Vec::new();
        for shard in 0..shape.shards {
            let router =
                |fleet: &Arc<slipstream_router::Fleet>| Router::new(fleet.clone(), to_u32(shard));
            let prefill = fleets.prefill.as_ref().map(router);
            let dispatcher = Dispatcher::new(rules, router(&fleets.serve), prefill)
                .with_queue_room(room.clone());
            let group = Group::new(site.driver);
            let shard = frontend.shard(to_u8(shard), dispatcher, network.clone());
            let run = shard.clone();
            group.local.spawn_local(async move {
                run.run().await;
            });
            groups.push(group);
            shards.push(shard);
        }
        let record = ProcessRecord {
            role: ProcessRole::Frontend,
            instance,
            name,
            fingerprint: FINGERPRINT,
            shards: (0..shape.shards)
                .map(|shard| format!("{index} {shard} {instance}"))
                .collect(),
            workers: Vec::new(),
            key: Some(key),
        };
        Ok(RunningFrontend {
            groups,
            shards,
            roster,
            fleets,
            record,
        })
    }
}

/// Starts the worker process of this index, which dials frontends by `connect`.
pub(crate) fn start_worker(
    index: usize,
    instance: u64,
    site: &Site<'_>,
    connect: Connect,
) -> Result<(SimWorker, Group), String> {
    let shape = site.shape;
    let config = SimConfig {
        instance,
        fingerprint: FINGERPRINT,
        deadline: Duration::from_millis(shape.deadline_ms),
        unsent_bytes_max: 64 << 20,
        threads: shape.threads,
        // One more than there are shards: a second dial of a shard is not held up by a lack of links.
        links: shape.frontends * shape.shards + 1,
        limits: PlaneLimits {
            requests: shape.ring,
            ..PlaneLimits::default()
        },
    };
    let timing = LiveTiming {
        waiting_max: shape.waiting_max,
        ..LiveTiming::default()
    };
    let mut specs = Vec::new();
    let mut worker = 0;
    for pool in &site.cluster.pools {
        for _ in 0..pool.workers {
            let id = WorkerId(worker);
            worker += 1;
            if id.index() / shape.workers != index {
                continue;
            }
            let rank = RankId {
                worker: id,
                dp_rank: 0,
            };
            let read = |_: &Path| Err(io::ErrorKind::NotFound.into());
            let model = &site.cluster.model.shape;
            let step = slipstream_engine::timing::build(&pool.engine, model, read)
                .map_err(|error| error.to_string())?;
            let output = site.answers.output.clone();
            let engine =
                Engine::new(rank, &pool.engine, step, output).map_err(|error| error.to_string())?;
            specs.push(WorkerSpec {
                worker: id,
                ranks: vec![Box::new(engine) as Box<dyn Backend>],
                startup_s: pool.engine.startup_s,
            });
        }
    }
    let started = SimWorker::start(&config, specs, &timing, connect);
    let (worker, task) = started.map_err(|error| error.to_string())?;
    let group = Group::new(site.driver);
    group.local.spawn_local(task);
    Ok((worker, group))
}
