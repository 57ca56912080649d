//! Decode passes that are planned when they begin, and run when something needs their engine.
//!
//! An engine that only decodes does nothing that another part of the cluster could see until a request of it ends:
//! no arrival depends on it, and the loads that a router reads change with first tokens and ends alone. So its passes
//! up to then are one event. The engine runs them when that event comes, or before that if a request is sent to it,
//! or if a router reads its cache:
//!
//! ```text
//!   engine 0   ├──┼──┼──┼──┼──┼──┼──┤ end of a request      passes 1 to 8 run here
//!   engine 1   ├───┼───┼───┼ ─ ┼ ─ ┼ ─ ┤                    1 to 3 run here, the 4th begins; the rest is forgotten
//!   arrival                  ▲ at engine 1
//! ```
//!
//! Passes that are run late have the ends, gaps between tokens and cache changes that they would have had in time.
//! Requests that end at one time can be recorded in another order.

use slipstream_base::{KvDelta, Prompt, SimTime};
use slipstream_engine::DecodeRun;
use slipstream_router::ViewTurn;

use crate::node::{Node, Phase};
use crate::parts::RoutedNodes;
use crate::tally::Tally;

/// State of a run whose engines plan passes.
#[derive(Default)]
pub(crate) struct PlannedPasses {
    /// Of each node, the number of its entry in the queue of pass ends: other entries are of plans that were ended.
    /// Empty if engines plan no passes.
    entries: Vec<u64>,
    run: DecodeRun,
    kv: KvDelta,
    targets: Vec<usize>,
}

impl PlannedPasses {
    /// From now on engines plan passes.
    pub(crate) fn enable(&mut self, nodes: usize) {
        self.entries = vec![u64::MAX; nodes];
    }

    pub(crate) fn is_enabled(&self) -> bool {
        !self.entries.is_empty()
    }

    /// The pass under way at `node`, or its plan, has this entry.
    pub(crate) fn set_entry(&mut self, node: u32, entry: u64) {
        if let Some(of_node) = self.entries.get_mut(node as usize) {
            *of_node = entry;
        }
    }

    /// Whether `entry` is of a plan that was ended.
    pub(crate) fn is_stale(&self, node: u32, entry: u64) -> bool {
        let of_node = self.entries.get(node as usize);
        of_node.is_some_and(|&of_node| of_node != entry)
    }

    /// Plans passes of a node from `now` on. Returns the end of the last one.
    pub(crate) fn plan(&self, node: &mut Node, now: SimTime) -> Option<SimTime> {
        if !self.is_enabled() {
            return None;
        }
        node.plan(now)
    }

    /// Runs the passes of `node` that have ended by `now`.
    pub(crate) fn run(
        &mut self,
        now: SimTime,
        node: u32,
        nodes: &mut [Node],
        side: &mut RoutedNodes,
        tally: &mut Tally,
    ) {
        let n = &mut nodes[node as usize];
        if n.phase != Phase::Planned {
            return;
        }
        let passes = n.run_planned(now, &mut self.run, &mut tally.totals);
        tally.passes += u64::from(passes);
        tally.jumped += u64::from(passes);
        side.on_run(node, n, &self.run, &mut self.kv);
    }

    /// The same for all nodes.
    pub(crate) fn run_all(
        &mut self,
        now: SimTime,
        nodes: &mut [Node],
        side: &mut RoutedNodes,
        tally: &mut Tally,
    ) {
        if self.is_enabled() {
            for node in (0..).take(nodes.len()) {
                self.run(now, node, nodes, side, tally);
            }
        }
    }

    /// Runs what a router of `side` can see when it chooses a worker for `prompt`.
    pub(crate) fn before_route(
        &mut self,
        now: SimTime,
        turn: ViewTurn,
        prompt: &Prompt,
        nodes: &mut [Node],
        side: &mut RoutedNodes,
        tally: &mut Tally,
    ) {
        if !self.is_enabled() {
            return;
        }
        if side.indexes_kv {
            if !side.keeps_view(turn) {
                self.run_all(now, nodes, side, tally);
            }
        } else if side.asks_engines()
            && let Some(&first) = prompt.blocks().first()
        {
            // A plan ends before it would fill the first block of a prompt, so no others have it.
            let mut targets = std::mem::take(&mut self.targets);
            side.owners(first, &mut targets);
            for target in targets.drain(..) {
                let node = side.nodes[target];
                self.run(now, node, nodes, side, tally);
            }
            self.targets = targets;
        }
    }
}
