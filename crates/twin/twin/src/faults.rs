//! Faults: workers that are lost and restart, drain, or are slow; links that are slow or down; KV events that are
//! lost or late. Faults of more than one worker are in `frontend`, `partition` and `upgrade`.

mod frontend;
mod partition;
mod upgrade;

use std::collections::BTreeSet;

use slipstream_base::width::to_u32;
use slipstream_base::{KvDelta, RequestId, Role, SimTime, WorkerId};
use slipstream_config::cluster::{self, Cluster, Fault};
use slipstream_engine::Usage;

use crate::effect::Effect;
use crate::event::Event;
use crate::parts::{RoutedNodes, ns};
use crate::run::Sink;
use crate::sim::Sim;
pub(crate) use partition::Held;
use partition::Partitions;
use upgrade::Upgrade;

/// Whether a worker that ends by `fault` starts again at its end.
fn restarts(fault: Fault) -> bool {
    matches!(fault, Fault::Crash | Fault::Gpu { .. })
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
    /// Whether passes may not be jumped over, because their KV events have times of their own.
    pub(crate) need_single_passes: bool,
    partitions: Partitions,
    /// Events that keep a frontend from running.
    frontends_down: u32,
    upgrades: Vec<Upgrade>,
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
            upgrades: Vec::new(),
        }
    }
}

impl Sim<'_> {
    pub(crate) fn begin_event(&mut self, index: u32, sink: &mut dyn Sink) {
        let event = &self.cluster.events[index as usize];
        self.faults.active[index as usize] = true;
        if let Some(until_s) = event.until_s {
            let at = SimTime::from_secs_f64(until_s);
            self.plan_event(at, Event::End { event: index });
        }
        match event.fault {
            Fault::Frontend => return self.lose_frontend(sink),
            Fault::Partition { peer_deadline_s } => return self.divide(index, peer_deadline_s),
            Fault::Upgrade { .. } => return self.begin_upgrade(index),
            Fault::Uplink { leaf, .. } => return self.refresh_uplinks(leaf),
            _ => {}
        }
        let worker = WorkerId(event.workers[0]);
        match event.fault {
            Fault::Crash if !self.faults.down[worker.index()] => {
                self.lose_worker(worker, Keeps::Nothing, sink);
            }
            Fault::Gpu { detect_s } => {
                let start = self.faults.starts[worker.index()];
                self.hang(worker);
                let at = self.now + ns(detect_s * 1e9);
                let event = index;
                self.plan_event(at, Event::Detect { event, start });
            }
            _ => {}
        }
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    pub(crate) fn end_event(&mut self, index: u32, sink: &mut dyn Sink) {
        self.faults.active[index as usize] = false;
        let event = &self.cluster.events[index as usize];
        match event.fault {
            Fault::Frontend => return self.start_frontend(),
            Fault::Partition { .. } => return self.rejoin(index, sink),
            Fault::Uplink { leaf, .. } => return self.refresh_uplinks(leaf),
            _ => {}
        }
        let worker = WorkerId(event.workers[0]);
        let crashes = |e: &cluster::FaultEvent| restarts(e.fault);
        if crashes(event) && self.faults.down[worker.index()] && !self.active(worker).any(crashes) {
            self.start_worker(worker);
        }
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    /// Sets the rate of a leaf switch's links to the spine according to those that are down.
    fn refresh_uplinks(&mut self, of: u32) {
        let active = self.cluster.events.iter().zip(&self.faults.active);
        let down = active.filter_map(|(event, active)| match event.fault {
            Fault::Uplink { leaf, spine } if *active && leaf == of => Some(spine),
            _ => None,
        });
        let down: BTreeSet<u32> = down.collect();
        let spines = f64::from(self.cluster.network.spines);
        self.wire
            .set_uplink_share(self.now, of, 1.0 - down.len() as f64 / spines);
    }

    /// Starts a lost worker: it takes requests once it is up.
    fn start_worker(&mut self, worker: WorkerId) {
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

    /// A worker has started, unless a later start superseded this one.
    pub(crate) fn worker_ready(&mut self, worker: u32, start: u32) {
        let worker = WorkerId(worker);
        if self.faults.starts[worker.index()] == start {
            self.faults.down[worker.index()] = false;
            self.refresh_worker(worker);
            self.replace_lost(worker);
            self.upgraded(worker);
        }
    }

    /// No pass of a worker ends any more.
    fn hang(&mut self, worker: WorkerId) {
        if !self.faults.down[worker.index()] {
            let nodes = self.nodes.iter_mut();
            for node in nodes.filter(|node| node.rank.worker == worker) {
                node.hang();
            }
        }
    }

    /// A worker that lost a GPU ends, unless it has ended since. Without an end of the event it starts again at once.
    pub(crate) fn gpu_detected(&mut self, index: u32, start: u32, sink: &mut dyn Sink) {
        let event = &self.cluster.events[index as usize];
        let worker = WorkerId(event.workers[0]);
        let runs = !self.faults.down[worker.index()];
        if runs && self.faults.starts[worker.index()] == start {
            self.lose_worker(worker, Keeps::Nothing, sink);
        }
        if event.until_s.is_none() {
            self.end_event(index, sink);
        } else {
            self.refresh_worker(worker);
            self.replace_lost(worker);
        }
    }

    fn active(&self, worker: WorkerId) -> impl Iterator<Item = &cluster::FaultEvent> {
        let events = self.cluster.events.iter().zip(&self.faults.active);
        events
            .filter(move |(event, active)| **active && event.workers.contains(&worker.0))
            .map(|(event, _)| event)
    }

    /// Whether a worker is lost, or takes no requests because of an event.
    pub(crate) fn is_out(&self, worker: WorkerId) -> bool {
        let takes = |event: &cluster::FaultEvent| Effect::of(event.fault).takes_requests;
        let faults = &self.faults;
        faults.down[worker.index()]
            || faults.partitions.are_closed(worker)
            || faults.drains(worker)
            || !self.active(worker).all(takes)
    }

    /// Sets a worker's readiness, pace and link according to its active faults and to `[autoscale]`.
    pub(crate) fn refresh_worker(&mut self, worker: WorkerId) {
        let faults = &self.faults;
        let runs = !faults.down[worker.index()] && self.scaling.runs(worker);
        let reached = !faults.partitions.are_closed(worker) && !faults.drains(worker);
        let (mut ready, mut pace, mut share) = (runs && reached, 1.0, 1.0);
        let (mut kv_kept, mut kv_delay_ms) = (1.0, 0.0);
        for event in self.active(worker) {
            let effect = Effect::of(event.fault);
            ready &= effect.takes_requests;
            pace *= effect.pace.unwrap_or(1.0);
            share *= effect.link_share;
            kv_kept *= 1.0 - effect.kv_loss;
            kv_delay_ms += effect.kv_delay_ms;
        }
        if faults.partitions.lose_kv(worker) {
            kv_kept = 0.0;
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
        if self.faults.need_single_passes {
            let not_before = self.faults.partitions.held_until(worker);
            self.set_kv_fault(worker, |fault| {
                (fault.share, fault.delay_ns) = (1.0 - kv_kept, ns(kv_delay_ms * 1e6));
                fault.not_before = not_before;
            });
        }
        self.wire.set_share(self.now, worker, share);
        self.dispatch.on_fleet_changed();
    }

    fn set_kv_fault(&mut self, worker: WorkerId, change: impl Fn(&mut crate::parts::KvFault)) {
        for node in 0..to_u32(self.nodes.len()) {
            if self.nodes[node as usize].rank.worker == worker {
                self.side_of(node).set_kv_fault(node, &change);
            }
        }
    }

    /// The router that `node` publishes its KV events to.
    fn side_of(&mut self, node: u32) -> &mut RoutedNodes {
        match (self.nodes[node as usize].role, &mut self.prefill) {
            (Role::Prefill, Some(side)) => side,
            _ => &mut self.serve,
        }
    }

    /// Plans the requests of routers that noticed a gap in the KV events of a rank.
    pub(crate) fn plan_resyncs(&mut self) {
        while let Some((at, node, life)) = self.serve.resyncs.pop() {
            self.plan_event(at, Event::Resync { node, life });
        }
        while let Some((at, node, life)) = self.prefill.as_mut().and_then(|p| p.resyncs.pop()) {
            self.plan_event(at, Event::Resync { node, life });
        }
    }

    /// Publishes the KV events of `node` that wait, and then all that its cache holds.
    pub(crate) fn publish_snapshot(&mut self, node: u32) {
        if !self.side_of(node).indexes_kv {
            return; // its router asks the engines
        }
        let (now, life) = (self.now, self.nodes[node as usize].life);
        let mut delta = KvDelta::default();
        if self.nodes[node as usize].engine.take_kv(&mut delta) {
            self.side_of(node).on_kv(now, node, life, &delta);
        }
        self.nodes[node as usize].engine.kv_snapshot(&mut delta);
        self.side_of(node).on_snapshot(now, node, life, delta);
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
    fn lose_worker(&mut self, worker: WorkerId, keeps: Keeps, sink: &mut dyn Sink) {
        if keeps == Keeps::Nothing {
            self.faults.down[worker.index()] = true;
            self.faults.starts[worker.index()] += 1;
        }
        let sides = [Some(&mut self.serve), self.prefill.as_mut()];
        for side in sides.into_iter().flatten() {
            match keeps {
                Keeps::Nothing => side.on_worker_lost(worker),
                Keeps::Cache => side.fleet.on_worker_lost(worker),
            }
        }
        // The clients' part of the answers, before the engines remove them.
        let hit: Vec<(u32, u32, Usage)> = (self.dispatch.requests_of(|of| of == worker))
            .into_iter()
            .map(|(slot, _)| {
                let lost = self.arrived_of(slot);
                let (target, usage) = lost.expect("a worker has a part of it");
                (slot, target, usage)
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
        for node in 0..to_u32(self.nodes.len()) {
            if self.nodes[node as usize].rank.worker != worker {
                continue;
            }
            match keeps {
                Keeps::Nothing => self.nodes[node as usize].crash(),
                Keeps::Cache => {
                    let engine = &mut self.nodes[node as usize].engine;
                    for &(slot, ..) in &hit {
                        let id = RequestId(slot.into());
                        let _ = engine.abort(id) || engine.release_held(id);
                    }
                    self.disconnect(node);
                }
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

    /// The node that generates the answer of a request, and the part of it that has reached its client; `None` if no
    /// worker has a part of it.
    fn arrived_of(&self, slot: u32) -> Option<(u32, Usage)> {
        let flight = self.flights.get(RequestId(slot.into()));
        if flight.resuming.is_some() {
            return flight.resuming; // no worker has added to it
        }
        let rank = self.dispatch.decode_rank(slot)?;
        let target = self.serve.node_of(rank);
        Some((target, self.usage_of(RequestId(slot.into()), target)))
    }

    /// The connection of `node` to its frontend is closed, and its sequences were removed: the pass under way has
    /// nothing to deliver.
    fn disconnect(&mut self, node: u32) {
        let mut out = self.out.take().unwrap_or_default();
        while self.nodes[node as usize].engine.in_pass() && !self.nodes[node as usize].hangs {
            let n = &mut self.nodes[node as usize];
            n.engine.finish_pass(&mut out);
            let (now, life) = (self.now, n.life);
            self.side_of(node).on_kv(now, node, life, &out.kv);
        }
        self.out = Some(out);
        self.nodes[node as usize].frames_end = self.now;
        self.nodes[node as usize].leave_sequences();
        self.wake(node);
    }
}

/// The state that a lost worker keeps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keeps {
    /// Its process has ended.
    Nothing,
    /// Its connection is closed, and its requests ended with it.
    Cache,
}
