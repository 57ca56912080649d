//! Builds a run from its files.

use std::borrow::Cow;
use std::io;
use std::path::Path;

use slipstream_base::mix::mix64;
use slipstream_base::{BlockHash, SimTime};
use slipstream_config::cluster::{
    AutoscaleConfig, AutoscalePolicy, Cluster, HostMode, PoolConfig, RouterPolicy,
};
use slipstream_config::workload_file::Workload;
use slipstream_dispatch::{self as dispatch, Dispatcher};
use slipstream_engine::timing::ApiTime;
use slipstream_workload::Schedule;
use slipstream_workload::schedule::{Lag, Shard};

use super::{Cause, Rules, Scratch, Sim};
use crate::agenda::Agenda;
use crate::env::Pins;
use crate::event::Event;
use crate::faults::Faults;
use crate::flight::Flights;
use crate::host;
use crate::lockstep::Lockstep;
use crate::models::{ModelParts, Models};
use crate::node::Nodes;
use crate::parts::{Parts, RoutedNodes, Sides, api_time, ns};
use crate::peers::Peers;
use crate::planned::PlannedPasses;
use crate::run::{Options, TwinError};
use crate::scaling::Pools;
use crate::share::Shares;
use crate::tally::Tally;
use crate::threads::Threads;
use crate::wire::Wire;

impl<'a> Sim<'a> {
    /// A run of `workload` on `cluster`. `read` reads the files that the cluster refers to.
    pub(crate) fn new(
        cluster: &'a Cluster,
        workload: &Workload,
        options: &'a Options,
        read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Sim<'a>, TwinError> {
        check(cluster, options)?;
        let mut wire = Wire::new(cluster, options.speedup, read)?;
        let has_host = cluster.host.mode != HostMode::None;
        let delays_output = has_host || wire.carries_messages() || Faults::delay_output(cluster);
        let mut parts = Parts::new(cluster, options, delays_output, read)?;
        let traffic = std::mem::take(&mut parts.traffic);
        if cluster.hands_over() || cluster.pools.iter().any(|p| p.engine.peer_tier.is_some()) {
            wire.set_traffic(traffic);
        }
        let peers = Peers::new(cluster, &mut parts.nodes, options.speedup);
        let shares = Shares::new(cluster, &mut parts.nodes, options.speedup);
        if let Some(peers) = &peers {
            for sides in &mut parts.models {
                for side in sides.prefill.iter_mut().chain([&mut sides.serve]) {
                    side.peers = Some(peers.index.clone());
                }
            }
        }
        let threads = Threads::new(cluster, parts.nodes.len(), workload.seed)?;
        let api_times = api_times(cluster, options, read)?;
        let schedule = schedule(cluster, workload, &api_times)?;
        let models = models(cluster, options, parts.models, &api_times, &schedule);
        let (models, first) = Models::new(cluster, models);
        let mut sim = Sim {
            options,
            cluster,
            rules: Rules {
                hands_over: cluster.hands_over(),
                delays_output,
                looks_first: false,
                watches: false,
                seed: mix64(workload.seed ^ cluster.router.seed),
            },
            schedule,
            agenda: Agenda::new(),
            nodes: Nodes::new(parts.nodes),
            planned: PlannedPasses::default(),
            model: first,
            models,
            flights: Flights::default(),
            pins: Pins::new(),
            wire,
            peers,
            shares,
            lockstep: Lockstep::new(cluster),
            host: host::of_cluster(cluster),
            threads,
            faults: Faults::new(cluster),
            scaling: Pools::new(cluster),
            cause: Cause::default(),
            scratch: Scratch::default(),
        };
        for (index, event) in (0u32..).zip(&cluster.events) {
            let at = SimTime::from_secs_f64(event.at_s);
            sim.agenda.plan(at, Event::Begin { event: index });
        }
        sim.begin_scaling();
        sim.settle_shares();
        Ok(sim)
    }
}

/// Refuses what a run cannot have.
fn check(cluster: &Cluster, options: &Options) -> Result<(), TwinError> {
    if cluster.router.policy == RouterPolicy::Direct {
        return Err(TwinError::Direct);
    }
    let by_slo = |of: &AutoscaleConfig| of.policy == AutoscalePolicy::Slo && of.ttft_s.is_none();
    let scaled = |pool: &&PoolConfig| pool.autoscale.as_ref().is_some_and(by_slo);
    if let Some(pool) = cluster.pools.iter().find(scaled)
        && !options.slo.any_limits("ttft")
    {
        let pool = pool.name.clone();
        return Err(TwinError::NoObjective { pool });
    }
    Ok(())
}

/// Time from a request's arrival at the servers to the router, by model.
fn api_times(
    cluster: &Cluster,
    options: &Options,
    read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> Result<Vec<ApiTime>, TwinError> {
    // A modelled frontend has costs of its own.
    let counts = options.api_time && cluster.host.mode == HostMode::None;
    let models = cluster.models();
    let times = models.iter().map(|model| {
        if counts {
            api_time(cluster, &model.name, options, read)
        } else {
            Ok(ApiTime::default())
        }
    });
    times.collect()
}

fn schedule(
    cluster: &Cluster,
    workload: &Workload,
    api_times: &[ApiTime],
) -> Result<Schedule, TwinError> {
    let mut workload = Cow::Borrowed(workload);
    let models = cluster.models();
    if models.len() > 1 || !workload.models().is_empty() {
        let served = models.iter().map(|model| model.name.clone());
        workload.to_mut().served_models = served.collect();
    }
    let lag = |of: &ApiTime| Lag {
        request_ns: ns(of.request_ns),
        prompt_token_ns: of.prompt_token_ns,
    };
    let lags: Vec<Lag> = api_times.iter().map(lag).collect();
    Ok(Schedule::open(&workload, 0, Shard::WHOLE)?.with_lags(&lags))
}

/// The parts of each model, with a dispatcher of its own.
fn models(
    cluster: &Cluster,
    options: &Options,
    sides: Vec<Sides>,
    api_times: &[ApiTime],
    schedule: &Schedule,
) -> Vec<ModelParts> {
    let models = cluster.models();
    let each = models.iter().zip(sides).zip(api_times);
    let of_model = each.map(|((model, sides), api_time)| {
        let dispatch = Dispatcher::new(
            dispatch::Rules::of_cluster(cluster),
            sides.serve.router(),
            sides.prefill.as_ref().map(RoutedNodes::router),
        );
        #[cfg(feature = "journal")]
        let dispatch = match &options.journal {
            Some(journal) => dispatch.with_journal(journal.clone()),
            None => dispatch,
        };
        #[cfg(not(feature = "journal"))]
        let _ = options;
        ModelParts {
            serve: sides.serve,
            prefill: sides.prefill,
            dispatch,
            root: BlockHash::root(&model.name, "", ""),
            context_max: cluster.context_max_of(&model.name),
            api_time: if schedule.is_closed() {
                *api_time
            } else {
                ApiTime::default()
            },
            tally: Tally::default(),
        }
    });
    of_model.collect()
}
