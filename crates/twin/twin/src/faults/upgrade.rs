//! A rolling upgrade: workers drain and restart, one after another.

use std::collections::VecDeque;

use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::Fault;

use super::{Faults, Keeps, Sim, Sink};
use crate::event::Event;
use crate::parts::ns;

/// An upgrade under way.
pub(super) struct Upgrade {
    event: u32,
    /// Workers whose turn has not come.
    left: VecDeque<WorkerId>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The next worker may begin.
    Between,
    /// A worker takes no new requests.
    Draining(WorkerId),
    /// It starts again.
    Starting(WorkerId),
}

impl Faults {
    pub(crate) fn is_upgrading(&self) -> bool {
        !self.upgrades.is_empty()
    }

    /// Whether a worker drains for an upgrade.
    pub(super) fn drains(&self, worker: WorkerId) -> bool {
        let drains = |upgrade: &Upgrade| upgrade.state == State::Draining(worker);
        self.upgrades.iter().any(drains)
    }
}

impl Sim<'_> {
    pub(super) fn begin_upgrade(&mut self, index: u32) {
        let event = &self.cluster.events[index as usize];
        self.faults.upgrades.push(Upgrade {
            event: index,
            left: event
                .workers
                .iter()
                .map(|&worker| WorkerId(worker))
                .collect(),
            state: State::Between,
        });
    }

    /// Lets the next worker begin, and restarts one that has drained.
    pub(crate) fn continue_upgrades(&mut self, sink: &mut dyn Sink) {
        for at in 0..self.faults.upgrades.len() {
            if let State::Draining(worker) = self.faults.upgrades[at].state
                && self.has_drained(worker)
            {
                self.restart_for_upgrade(at, worker, sink);
            }
            while self.faults.upgrades[at].state == State::Between {
                let Some(worker) = self.faults.upgrades[at].left.pop_front() else {
                    break;
                };
                // One that does not run starts with the new version.
                if self.faults.down[worker.index()] || !self.scaling.runs(worker) {
                    continue;
                }
                self.drain_for_upgrade(at, worker);
                if self.has_drained(worker) {
                    self.restart_for_upgrade(at, worker, sink);
                }
            }
        }
        let ends = |of: &Upgrade| of.state == State::Between && of.left.is_empty();
        self.faults.upgrades.retain(|upgrade| !ends(upgrade));
    }

    fn drain_for_upgrade(&mut self, at: usize, worker: WorkerId) {
        self.faults.upgrades[at].state = State::Draining(worker);
        let event = self.faults.upgrades[at].event;
        let timeout_s = match self.cluster.events[event as usize].fault {
            Fault::Upgrade { drain_timeout_s } => drain_timeout_s,
            _ => None,
        };
        let timeout_s = timeout_s.unwrap_or(self.cluster.live.drain_timeout_s);
        let expired = Event::Drained {
            event,
            worker: worker.0,
            start: self.faults.starts[worker.index()],
        };
        let at: SimTime = self.now + ns(timeout_s * 1e9);
        self.plan_event(at, expired);
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    /// Whether a worker has no request left, or was lost.
    fn has_drained(&self, worker: WorkerId) -> bool {
        let idle = (self.nodes.iter())
            .filter(|node| node.rank.worker == worker)
            .all(|node| node.engine.is_idle() && !node.engine.in_pass());
        let own = |of| of == worker;
        self.faults.down[worker.index()] || idle && self.dispatch.requests_of(own).is_empty()
    }

    fn restart_for_upgrade(&mut self, at: usize, worker: WorkerId, sink: &mut dyn Sink) {
        if self.faults.down[worker.index()] {
            self.faults.upgrades[at].state = State::Between;
            return;
        }
        self.faults.upgrades[at].state = State::Starting(worker);
        self.lose_worker(worker, Keeps::Nothing, sink);
        self.start_worker(worker);
        self.refresh_worker(worker);
        self.replace_lost(worker);
    }

    /// A worker had its time to drain: the rest of its requests continues elsewhere.
    pub(crate) fn drain_expired(
        &mut self,
        event: u32,
        worker: u32,
        start: u32,
        sink: &mut dyn Sink,
    ) {
        let worker = WorkerId(worker);
        let current = self.faults.starts[worker.index()] == start;
        let draining = |of: &Upgrade| of.event == event && of.state == State::Draining(worker);
        let at = self.faults.upgrades.iter().position(draining);
        if let Some(at) = at.filter(|_| current) {
            self.restart_for_upgrade(at, worker, sink);
        }
    }

    /// A worker is up.
    pub(super) fn upgraded(&mut self, worker: WorkerId) {
        for upgrade in &mut self.faults.upgrades {
            if upgrade.state == State::Starting(worker) {
                upgrade.state = State::Between;
            }
        }
    }
}
