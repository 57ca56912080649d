//! Which workers take requests, and how fast they are: what faults and scaling ask for together.

use slipstream_base::WorkerId;

use super::Sim;
use crate::parts::ns;
use crate::run::Sink;

impl Sim<'_> {
    /// Sets a worker's readiness, pace and link according to its active faults and to `[autoscale]`.
    pub(super) fn refresh_worker(&mut self, worker: WorkerId) {
        let effects = self.faults.effects(&self.cluster.events, worker);
        let ready = effects.takes_requests && self.scaling.runs(worker);
        for side in self.model.sides() {
            side.fleet.set_ready(worker, ready);
        }
        for node in self.nodes.of_worker(worker) {
            if let Some(of_node) = &node.pace {
                of_node.set(effects.pace);
            }
        }
        if self.faults.need_single_passes {
            let not_before = self.faults.partitions.held_until(worker);
            for node in self.nodes.numbers_of(worker) {
                let side = self.model.side_of(self.nodes[node].role);
                side.set_kv_fault(node, |fault| {
                    fault.share = 1.0 - effects.kv_kept;
                    fault.delay_ns = ns(effects.kv_delay_ms * 1e6);
                    fault.not_before = not_before;
                });
            }
        }
        let now = self.agenda.now;
        self.wire.set_share(now, worker, effects.link_share);
        self.model.dispatch.on_fleet_changed();
    }

    /// An `[[event]]` of `worker` began or ended: others start in its place.
    pub(super) fn replace_lost(&mut self, worker: WorkerId) {
        if let Some(pool) = self.scaling.pool_of(worker) {
            let wanted = self.scaling.wanted(pool, self.agenda.now);
            self.follow(pool, wanted);
        }
    }

    /// Stops the workers that are not wanted at the start, and plans the first decisions.
    pub(super) fn begin_scaling(&mut self) {
        for worker in self.scaling.begin(&mut self.agenda) {
            self.refresh_worker(worker);
        }
    }

    /// Decides how many workers of a pool run, and starts or drains some.
    pub(super) fn scale(&mut self, pool: usize, sink: &mut dyn Sink) {
        let out = self.workers_out(pool);
        let arrived = self.flights.arrived();
        let (nodes, model) = (&mut self.nodes, &mut self.model);
        let observed = self.scaling.observe(pool, nodes, model, &out, arrived);
        let now = self.agenda.now;
        self.scaling.stop_drained(pool, now, nodes, model);
        let (wanted, differs) = self.scaling.decide(pool, now, observed, arrived, sink);
        let changed = self.follow(pool, wanted);
        self.scaling
            .plan_next(pool, changed || differs, &mut self.agenda);
    }

    /// A worker that was added has started, unless it was stopped before.
    pub(super) fn scaled_up(&mut self, worker: u32, start: u32) {
        self.scaling.started(worker, start);
        self.refresh_worker(WorkerId(worker));
    }

    /// Which workers of a scaled pool an `[[event]]` has crashed or drains.
    fn workers_out(&self, pool: usize) -> Vec<bool> {
        let workers = self.scaling.workers(pool);
        let out = workers.map(|worker| self.faults.is_out(&self.cluster.events, worker));
        out.collect()
    }

    /// Starts or drains workers of a pool, so that `wanted` are ready or start. Returns whether it did.
    fn follow(&mut self, pool: usize, wanted: u32) -> bool {
        let out = self.workers_out(pool);
        let changed = self.scaling.follow(pool, wanted, &out, &mut self.agenda);
        for &worker in &changed {
            self.refresh_worker(worker);
        }
        let (nodes, model) = (&mut self.nodes, &mut self.model);
        let now = self.agenda.now;
        self.scaling.stop_drained(pool, now, nodes, model);
        !changed.is_empty()
    }
}
