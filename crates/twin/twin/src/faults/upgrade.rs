//! State of rolling upgrades: workers drain and restart, one after another.

use std::collections::VecDeque;

use slipstream_base::WorkerId;

/// An upgrade under way.
struct Upgrade {
    event: u32,
    /// Workers whose turn has not come.
    left: VecDeque<WorkerId>,
    state: UpgradeState,
}

/// The state of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpgradeState {
    /// The next worker may begin.
    Between,
    /// A worker takes no new requests.
    Draining(WorkerId),
    /// It starts again.
    Starting(WorkerId),
}

/// The upgrades of a run.
#[derive(Default)]
pub(crate) struct Upgrades(Vec<Upgrade>);

impl Upgrades {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of upgrades under way.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether a worker drains for an upgrade.
    pub(crate) fn drain(&self, worker: WorkerId) -> bool {
        let drains = |upgrade: &Upgrade| upgrade.state == UpgradeState::Draining(worker);
        self.0.iter().any(drains)
    }

    /// The upgrade of `event` begins.
    pub(crate) fn begin(&mut self, event: u32, workers: &[u32]) {
        self.0.push(Upgrade {
            event,
            left: workers.iter().map(|&worker| WorkerId(worker)).collect(),
            state: UpgradeState::Between,
        });
    }

    pub(crate) fn event(&self, at: usize) -> u32 {
        self.0[at].event
    }

    pub(crate) fn state(&self, at: usize) -> UpgradeState {
        self.0[at].state
    }

    pub(crate) fn set(&mut self, at: usize, state: UpgradeState) {
        self.0[at].state = state;
    }

    /// Takes the worker whose turn comes, if one may begin.
    pub(crate) fn take_next(&mut self, at: usize) -> Option<WorkerId> {
        let upgrade = &mut self.0[at];
        if upgrade.state != UpgradeState::Between {
            return None;
        }
        upgrade.left.pop_front()
    }

    /// Forgets those that are over.
    pub(crate) fn forget_ended(&mut self) {
        let ends = |of: &Upgrade| of.state == UpgradeState::Between && of.left.is_empty();
        self.0.retain(|upgrade| !ends(upgrade));
    }

    /// The upgrade of `event`, if `worker` drains for it.
    pub(crate) fn draining(&self, event: u32, worker: WorkerId) -> Option<usize> {
        let state = UpgradeState::Draining(worker);
        self.0
            .iter()
            .position(|of| of.event == event && of.state == state)
    }

    /// A worker is up.
    pub(crate) fn on_started(&mut self, worker: WorkerId) {
        for upgrade in &mut self.0 {
            if upgrade.state == UpgradeState::Starting(worker) {
                upgrade.state = UpgradeState::Between;
            }
        }
    }
}
