//! A rolling upgrade: workers drain and restart, one after another.

use slipstream_base::WorkerId;
use slipstream_config::cluster::Fault;

use super::Sim;
use super::loss::Kept;
use crate::event::Event;
use crate::faults::UpgradeState;
use crate::parts::ns;
use crate::run::Sink;

impl Sim<'_> {
    /// Lets the next worker begin, and restarts one that has drained.
    pub(super) fn continue_upgrades(&mut self, sink: &mut dyn Sink) {
        for at in 0..self.faults.upgrades.len() {
            if let UpgradeState::Draining(worker) = self.faults.upgrades.state(at)
                && self.has_drained(worker)
            {
                self.restart_for_upgrade(at, worker, sink);
            }
            while let Some(worker) = self.faults.upgrades.take_next(at) {
                // One that does not run starts with the new version.
                if self.faults.is_down(worker) || !self.scaling.runs(worker) {
                    continue;
                }
                self.drain_for_upgrade(at, worker);
                if self.has_drained(worker) {
                    self.restart_for_upgrade(at, worker, sink);
                }
            }
        }
        self.faults.upgrades.forget_ended();
    }

    fn drain_for_upgrade(&mut self, at: usize, worker: WorkerId) {
        let upgrades = &mut self.faults.upgrades;
        upgrades.set(at, UpgradeState::Draining(worker));
        let event = upgrades.event(at);
        let timeout_s = match self.cluster.events[event as usize].fault {
            Fault::Upgrade { drain_timeout_s } => drain_timeout_s,
            _ => None,
        };
        let timeout_s = timeout_s.unwrap_or(self.cluster.live.drain_timeout_s);
        let expired = Event::Drained {
            event,
            worker: worker.0,
            start: self.faults.starts_of(worker),
        };
        let at = self.agenda.now + ns(timeout_s * 1e9);
        self.agenda.plan(at, expired);
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    /// Whether a worker has no request left, or was lost.
    fn has_drained(&self, worker: WorkerId) -> bool {
        let own = |of| of == worker;
        self.faults.is_down(worker)
            || self.nodes.are_idle(worker) && self.model.dispatch.requests_of(own).is_empty()
    }

    fn restart_for_upgrade(&mut self, at: usize, worker: WorkerId, sink: &mut dyn Sink) {
        if self.faults.is_down(worker) {
            self.faults.upgrades.set(at, UpgradeState::Between);
            return;
        }
        self.faults.upgrades.set(at, UpgradeState::Starting(worker));
        self.lose_worker(worker, Kept::Nothing, sink);
        self.start_worker(worker);
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    /// A worker had its time to drain: the rest of its requests continues elsewhere.
    pub(super) fn drain_expired(
        &mut self,
        event: u32,
        worker: u32,
        start: u32,
        sink: &mut dyn Sink,
    ) {
        let worker = WorkerId(worker);
        let current = self.faults.starts_of(worker) == start;
        let at = self.faults.upgrades.draining(event, worker);
        if let Some(at) = at.filter(|_| current) {
            self.restart_for_upgrade(at, worker, sink);
        }
    }
}
