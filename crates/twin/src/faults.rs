//! Faults: workers that are lost and restart, drain, or are slow; links that are slow or down.

use slipstream_base::{RequestId, SimTime, WorkerId};
use slipstream_config::cluster::{self, Cluster, Fault};
use slipstream_engine::Usage;

use crate::parts::ns;
use crate::sim::{Event, Sim, Sink};

/// The effect of a fault on its worker while it is active. A crash also takes the worker's state.
pub(crate) struct Effect {
    takes_requests: bool,
    /// Factor on the times of its steps; `None` if no such fault changes them.
    pub(crate) pace: Option<f64>,
    /// Share that is left of its interface's rate.
    link_share: f64,
}

impl Effect {
    const NONE: Effect = Effect {
        takes_requests: true,
        pace: None,
        link_share: 1.0,
    };

    pub(crate) fn of(fault: Fault) -> Effect {
        match fault {
            Fault::Crash | Fault::Drain => Effect {
                takes_requests: false,
                ..Effect::NONE
            },
            Fault::Slow { factor } => Effect {
                pace: Some(factor),
                ..Effect::NONE
            },
            Fault::Link { share } => Effect {
                link_share: share,
                ..Effect::NONE
            },
        }
    }
}

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
}

impl Faults {
    pub(crate) fn new(cluster: &Cluster) -> Faults {
        let each = cluster.pools.iter().flat_map(|pool| {
            let startup_ns = ns(pool.engine.startup_s * 1e9);
            (0..pool.workers).map(move |_| startup_ns)
        });
        let startup_ns: Vec<u64> = each.collect();
        Faults {
            active: vec![false; cluster.events.len()],
            down: vec![false; startup_ns.len()],
            starts: vec![0; startup_ns.len()],
            startup_ns,
        }
    }
}

impl Sim<'_> {
    pub(crate) fn begin_event(&mut self, index: u32, sink: &mut dyn Sink) {
        let event = self.cluster.events[index as usize].clone();
        self.faults.active[index as usize] = true;
        if let Some(until_s) = event.until_s {
            let at = SimTime::from_secs_f64(until_s);
            self.plan_event(at, Event::End { event: index });
        }
        let worker = WorkerId(event.worker);
        if event.fault == Fault::Crash && !self.faults.down[worker.index()] {
            self.crash(worker, sink);
        }
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    pub(crate) fn end_event(&mut self, index: u32) {
        self.faults.active[index as usize] = false;
        let event = &self.cluster.events[index as usize];
        let worker = WorkerId(event.worker);
        let crashes = |e: &cluster::FaultEvent| e.fault == Fault::Crash;
        if crashes(event) && !self.active(worker).any(crashes) {
            let starts = &mut self.faults.starts[worker.index()];
            *starts += 1;
            let start = *starts;
            let at = self.now + self.faults.startup_ns[worker.index()];
            let ready = Event::Ready {
                worker: worker.0,
                start,
            };
            self.plan_event(at, ready);
        }
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    /// A worker has started, unless a later start superseded this one.
    pub(crate) fn worker_ready(&mut self, worker: u32, start: u32) {
        let worker = WorkerId(worker);
        if self.faults.starts[worker.index()] == start {
            self.faults.down[worker.index()] = false;
            self.refresh_worker(worker);
            self.replace_lost(worker);
        }
    }

    fn active(&self, worker: WorkerId) -> impl Iterator<Item = &cluster::FaultEvent> {
        let events = self.cluster.events.iter().zip(&self.faults.active);
        events
            .filter(move |(event, active)| **active && event.worker == worker.0)
            .map(|(event, _)| event)
    }

    /// Whether a worker is lost, or takes no requests because of an event.
    pub(crate) fn is_out(&self, worker: WorkerId) -> bool {
        let takes = |event: &cluster::FaultEvent| Effect::of(event.fault).takes_requests;
        self.faults.down[worker.index()] || !self.active(worker).all(takes)
    }

    /// Sets a worker's readiness, pace and link according to its active faults and to `[autoscale]`.
    pub(crate) fn refresh_worker(&mut self, worker: WorkerId) {
        let runs = !self.faults.down[worker.index()] && self.scaling.runs(worker);
        let (mut ready, mut pace, mut share) = (runs, 1.0, 1.0);
        for event in self.active(worker) {
            let effect = Effect::of(event.fault);
            ready &= effect.takes_requests;
            pace *= effect.pace.unwrap_or(1.0);
            share *= effect.link_share;
        }
        for side in [Some(&self.serve), self.prefill.as_ref()]
            .into_iter()
            .flatten()
        {
            side.fleet.set_ready(worker, ready);
        }
        for node in self.nodes.iter().filter(|n| n.rank.worker == worker) {
            if let Some(of_node) = &node.pace {
                of_node.set(pace);
            }
        }
        self.wire.set_share(self.now, worker, share);
        self.dispatch.on_fleet_changed();
    }

    /// The part of a request's answer by `target` that has reached its client.
    fn usage_of(&self, id: RequestId, target: u32) -> Usage {
        let node = &self.nodes[target as usize];
        let (tokens, end) = self.frames.under_way(target, node.life, id);
        let known = node.engine.usage_of(id).or(end.map(|done| done.usage));
        // It is on no engine while it, or its prompt, is in transfer.
        let mut usage = known.unwrap_or_else(|| Usage {
            prompt_tokens: self.flights.get(id).request.prompt.tokens(),
            ..Usage::default()
        });
        usage.output_tokens = usage.output_tokens.saturating_sub(tokens);
        usage
    }

    /// Removes a lost worker, with its part of every request.
    fn crash(&mut self, worker: WorkerId, sink: &mut dyn Sink) {
        self.faults.down[worker.index()] = true;
        self.faults.starts[worker.index()] += 1;
        for side in [Some(&mut self.serve), self.prefill.as_mut()]
            .into_iter()
            .flatten()
        {
            side.on_worker_lost(worker);
        }
        // The clients' part of the answers, before the engines remove them.
        let hit: Vec<(u32, u32, Usage)> = (self.dispatch.requests_of(|of| of == worker))
            .into_iter()
            .map(|(slot, _)| {
                let rank = self.dispatch.decode_rank(slot);
                let target = self.serve.node_of(rank.expect("a worker has a part of it"));
                let flight = self.flights.get(RequestId(slot.into()));
                if let Some((target, usage)) = flight.resuming {
                    return (slot, target, usage); // no worker has added to it
                }
                (slot, target, self.usage_of(RequestId(slot.into()), target))
            })
            .collect();
        for &(slot, target, usage) in &hit {
            let flight = self.flights.get_mut(RequestId(slot.into()));
            if usage.output_tokens > 0 && flight.resuming.is_none() {
                flight.last = self.nodes[target as usize].last_token(flight);
                flight.answered = usage.output_tokens;
                flight.resuming = Some((target, usage));
            }
        }
        for node in &mut self.nodes {
            if node.rank.worker == worker {
                node.crash();
            }
        }
        for (slot, target, usage) in hit {
            let now = self.now;
            self.lost = Some((target, usage));
            let (dispatch, mut env) = self.dispatching();
            dispatch.on_worker_gone(now, slot, worker, &mut env);
            self.carry_out(None, sink);
        }
    }
}
