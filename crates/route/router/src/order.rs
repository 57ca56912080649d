//! Targets in the order of their loads, updated when loads change.

use std::collections::BTreeSet;
use std::ops::Bound;

use slipstream_base::width::to_u32;

use crate::fleet::Fleet;
use crate::policy::{RoutePolicy, WorkerView};
use crate::view::ViewedLoad;

/// The key of a load in a policy's order, least first.
pub type LoadKey = [u64; 3];

/// A target in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ordered {
    pub(crate) key: LoadKey,
    pub(crate) requests: u64,
    pub(crate) target: u32,
}

/// The ready targets of a fleet, by the key of their loads, then requests, then rank. A change of a
/// load costs the logarithm of their number, so that a decision need not look at all loads.
pub(crate) struct LoadOrder {
    targets: BTreeSet<Ordered>,
    /// By dense target index; `None` if it is not ready.
    of_target: Vec<Option<Ordered>>,
}

impl LoadOrder {
    pub(crate) fn new(targets: usize) -> LoadOrder {
        LoadOrder {
            targets: BTreeSet::new(),
            of_target: vec![None; targets],
        }
    }

    /// Takes the `ready` targets with their current loads, and no others.
    pub(crate) fn rebuild(&mut self, fleet: &Fleet, policy: &dyn RoutePolicy, ready: &[u32]) {
        fleet.take_changed(|_| {});
        self.of_target.fill(None);
        for &target in ready {
            self.of_target[target as usize] = ordered(fleet, policy, target as usize);
        }
        self.targets = self.of_target.iter().flatten().copied().collect();
    }

    /// Moves the targets whose loads changed.
    pub(crate) fn refresh(&mut self, fleet: &Fleet, policy: &dyn RoutePolicy) {
        fleet.take_changed(|target| {
            let Some(before) = self.of_target[target] else {
                return; // it is not ready
            };
            let now = ordered(fleet, policy, target);
            if now == Some(before) {
                return;
            }
            self.targets.remove(&before);
            self.targets.extend(now);
            self.of_target[target] = now;
        });
    }

    /// A target's place in the order; `None` if it is not ready.
    pub(crate) fn get(&self, target: u32) -> Option<Ordered> {
        self.of_target[target as usize]
    }

    /// The least.
    pub(crate) fn first(&self) -> Option<Ordered> {
        self.targets.first().copied()
    }

    /// The one behind `at`.
    pub(crate) fn after(&self, at: Ordered) -> Option<Ordered> {
        let behind = (Bound::Excluded(at), Bound::Unbounded);
        self.targets.range(behind).next().copied()
    }

    /// The first with a greater key.
    pub(crate) fn after_key(&self, key: LoadKey) -> Option<Ordered> {
        self.after(Ordered {
            key,
            requests: u64::MAX,
            target: u32::MAX,
        })
    }
}

fn ordered(fleet: &Fleet, policy: &dyn RoutePolicy, target: usize) -> Option<Ordered> {
    let load = ViewedLoad::of(fleet, target);
    let view = WorkerView {
        rank: fleet.targets()[target].rank,
        hit_blocks: 0,
        requests: load.requests,
        prefill_tokens: load.prefill_tokens,
        decode_tokens: load.decode_tokens,
        active_blocks: load.active_blocks,
    };
    Some(Ordered {
        key: policy.load_key(&view, fleet.block_size().into())?,
        requests: load.requests,
        target: to_u32(target),
    })
}
