//! State of faults: which are active, which workers are lost, and what follows for a worker. Faults of more than one worker
//! have states of their own in `partition` and `upgrade`.

mod partition;
mod upgrade;

use std::collections::BTreeSet;

use slipstream_base::WorkerId;
use slipstream_config::cluster::{Cluster, Fault, FaultEvent};

use crate::effect::Effect;
use crate::parts::ns;
pub(crate) use partition::{Held, Partitions};
pub(crate) use upgrade::{UpgradeState, Upgrades};

/// The current faults of each worker.
pub(crate) struct Faults {
    /// By event of the cluster file: whether it is active.
    active: Vec<bool>,
    /// By worker: whether it is lost.
    down: Vec<bool>,
    /// By worker: number of starts, to recognize a start that a later one superseded.
    starts: Vec<u32>,
    /// By worker: from its start until it takes requests, ns.
    startup_ns: Vec<u64>,
    /// Whether passes may not be jumped over, because their KV events have times of their own.
    pub(crate) need_single_passes: bool,
    pub(crate) partitions: Partitions,
    /// Events that keep a frontend from running.
    frontends_down: u32,
    pub(crate) upgrades: Upgrades,
}

/// The effect of all faults on one worker.
pub(crate) struct Effects {
    /// Whether it takes requests, unless it is scaled down.
    pub(crate) takes_requests: bool,
    /// Factor on the times of its steps.
    pub(crate) pace: f64,
    /// Share that is left of its interface's rate.
    pub(crate) link_share: f64,
    /// Share of its KV events that the router gets.
    pub(crate) kv_kept: f64,
    /// Additional delay of its KV events, ms.
    pub(crate) kv_delay_ms: f64,
}

impl Faults {
    pub(crate) fn new(cluster: &Cluster) -> Faults {
        let each = cluster.pools.iter().flat_map(|pool| {
            let startup_ns = ns(pool.engine.startup_s * 1e9);
            (0..pool.workers).map(move |_| startup_ns)
        });
        let startup_ns: Vec<u64> = each.collect();
        let workers = startup_ns.len();
        Faults {
            active: vec![false; cluster.events.len()],
            down: vec![false; workers],
            starts: vec![0; workers],
            startup_ns,
            need_single_passes: cluster.events.iter().any(|e| Effect::hits_kv(e.fault)),
            partitions: Partitions::new(workers),
            frontends_down: 0,
            upgrades: Upgrades::default(),
        }
    }

    /// Whether tokens may reach clients later than their passes end.
    pub(crate) fn delay_output(cluster: &Cluster) -> bool {
        let divides = |fault| matches!(fault, Fault::Partition { .. });
        cluster.events.iter().any(|event| divides(event.fault))
    }

    /// An event begins or ends.
    pub(crate) fn set_active(&mut self, event: u32, active: bool) {
        self.active[event as usize] = active;
    }

    /// Whether a worker is lost.
    pub(crate) fn is_down(&self, worker: WorkerId) -> bool {
        self.down[worker.index()]
    }

    /// Number of workers.
    pub(crate) fn workers(&self) -> usize {
        self.down.len()
    }

    /// Number of starts of a worker.
    pub(crate) fn starts_of(&self, worker: WorkerId) -> u32 {
        self.starts[worker.index()]
    }

    /// A worker is lost with all its state.
    pub(crate) fn lose(&mut self, worker: WorkerId) {
        self.down[worker.index()] = true;
        self.starts[worker.index()] += 1;
    }

    /// A lost worker starts. Returns the number of the start, and its duration in ns.
    pub(crate) fn start(&mut self, worker: WorkerId) -> (u32, u64) {
        self.starts[worker.index()] += 1;
        (self.starts_of(worker), self.startup_ns[worker.index()])
    }

    /// A worker is up, unless a later start superseded this one. Returns whether it is.
    pub(crate) fn is_started(&mut self, worker: WorkerId, start: u32) -> bool {
        let current = self.starts_of(worker) == start;
        if current {
            self.down[worker.index()] = false;
        }
        current
    }

    pub(crate) fn frontend_is_down(&self) -> bool {
        self.frontends_down > 0
    }

    /// An event stops the frontend. Returns whether it ran before.
    pub(crate) fn stop_frontend(&mut self) -> bool {
        self.frontends_down += 1;
        self.frontends_down == 1
    }

    /// Such an event ends. Returns whether the frontend runs again.
    pub(crate) fn start_frontend(&mut self) -> bool {
        self.frontends_down -= 1;
        self.frontends_down == 0
    }

    /// The events of `all`, those of the cluster file, that are active at `worker`.
    fn active<'a>(
        &'a self,
        all: &'a [FaultEvent],
        worker: WorkerId,
    ) -> impl Iterator<Item = &'a FaultEvent> {
        let events = all.iter().zip(&self.active);
        events
            .filter(move |(event, active)| **active && event.workers.contains(&worker.0))
            .map(|(event, _)| event)
    }

    /// Whether an event keeps a lost worker from starting.
    pub(crate) fn keeps_down(&self, all: &[FaultEvent], worker: WorkerId) -> bool {
        self.active(all, worker).any(|event| restarts(event.fault))
    }

    /// Spines to which the links of a leaf switch are down.
    pub(crate) fn uplinks_down(&self, all: &[FaultEvent], of: u32) -> usize {
        let events = all.iter().zip(&self.active);
        let down = events.filter_map(|(event, active)| match event.fault {
            Fault::Uplink { leaf, spine } if *active && leaf == of => Some(spine),
            _ => None,
        });
        down.collect::<BTreeSet<u32>>().len()
    }

    /// Whether a worker is lost, or takes no requests because of an event.
    pub(crate) fn is_out(&self, all: &[FaultEvent], worker: WorkerId) -> bool {
        let takes = |event: &FaultEvent| Effect::of(event.fault).takes_requests;
        self.is_down(worker)
            || self.partitions.are_closed(worker)
            || self.upgrades.drain(worker)
            || !self.active(all, worker).all(takes)
    }

    /// The effect of all active faults on a worker.
    pub(crate) fn effects(&self, all: &[FaultEvent], worker: WorkerId) -> Effects {
        let mut sum = Effects {
            takes_requests: !self.is_down(worker)
                && !self.partitions.are_closed(worker)
                && !self.upgrades.drain(worker),
            pace: 1.0,
            link_share: 1.0,
            kv_kept: 1.0,
            kv_delay_ms: 0.0,
        };
        for event in self.active(all, worker) {
            let effect = Effect::of(event.fault);
            sum.takes_requests &= effect.takes_requests;
            sum.pace *= effect.pace.unwrap_or(1.0);
            sum.link_share *= effect.link_share;
            sum.kv_kept *= 1.0 - effect.kv_loss;
            sum.kv_delay_ms += effect.kv_delay_ms;
        }
        if self.partitions.lose_kv(worker) {
            sum.kv_kept = 0.0;
        }
        sum
    }
}

/// Whether a worker that ends by `fault` starts again at its end.
pub(crate) fn restarts(fault: Fault) -> bool {
    matches!(fault, Fault::Crash | Fault::Gpu { .. })
}
