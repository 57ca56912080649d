//! The present time of a run, and what is planned: events, and the ends of passes.
//!
//! At equal times passes end in the order in which they began, and events happen in the order in which they were planned.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use slipstream_base::{Role, SimTime};

use crate::event::Event;

/// End of a pass: its time, its entry, its node, and the node's number of restarts when it began.
type PassEnd = Reverse<(SimTime, u64, u32, u32)>;

pub(crate) struct Agenda {
    pub(crate) now: SimTime,
    /// No request that arrives later is known yet: passes are jumped up to here.
    pub(crate) horizon: SimTime,
    events: BinaryHeap<Reverse<(SimTime, u64, Event)>>,
    /// Ends of passes on serving nodes: no other part depends on them, unless requests follow from ends.
    ends: BinaryHeap<PassEnd>,
    /// Ends of passes on prefill nodes.
    prefill_ends: BinaryHeap<PassEnd>,
    /// Entries so far, of all three.
    sequence: u64,
}

impl Agenda {
    pub(crate) fn new() -> Agenda {
        Agenda {
            now: SimTime::ZERO,
            horizon: SimTime::MAX,
            events: BinaryHeap::new(),
            ends: BinaryHeap::new(),
            prefill_ends: BinaryHeap::new(),
            sequence: 0,
        }
    }

    /// Plans `event` for `at`.
    pub(crate) fn plan(&mut self, at: SimTime, event: Event) {
        self.events.push(Reverse((at, self.sequence, event)));
        self.sequence += 1;
    }

    /// Takes the next event that is due now.
    pub(crate) fn take_event(&mut self) -> Option<Event> {
        let &Reverse((at, _, event)) = self.events.peek()?;
        if at > self.now {
            return None;
        }
        self.events.pop();
        Some(event)
    }

    /// A pass of `node`, in its present `life`, ends at `end`. Returns its entry.
    pub(crate) fn plan_end(&mut self, end: SimTime, node: u32, life: u32, role: Role) -> u64 {
        let entry = self.sequence;
        let ends = match role {
            Role::Prefill => &mut self.prefill_ends,
            _ => &mut self.ends,
        };
        ends.push(Reverse((end, entry, node, life)));
        self.sequence += 1;
        entry
    }

    /// Takes the entry, node and life of the next pass of a serving node that has ended by now.
    pub(crate) fn take_end(&mut self) -> Option<(u64, u32, u32)> {
        take(&mut self.ends, self.now)
    }

    /// As [`take_end`](Self::take_end), of a prefill node.
    pub(crate) fn take_prefill_end(&mut self) -> Option<(u64, u32, u32)> {
        take(&mut self.prefill_ends, self.now)
    }

    /// Time of the first end of a pass on a serving node, of a plan that was ended perhaps.
    pub(crate) fn first_end(&self) -> Option<SimTime> {
        self.ends.peek().map(|Reverse((end, ..))| *end)
    }

    /// As [`first_end`](Self::first_end), but forgets those of plans that were ended: `is_stale` says so of a node and an
    /// entry.
    pub(crate) fn next_end(&mut self, is_stale: impl Fn(u32, u64) -> bool) -> Option<SimTime> {
        while let Some(&Reverse((end, entry, node, _))) = self.ends.peek() {
            if !is_stale(node, entry) {
                return Some(end);
            }
            self.ends.pop();
        }
        None
    }

    /// Time of the next event, or of the next end of a pass on a prefill node.
    pub(crate) fn next_other(&self) -> Option<SimTime> {
        let end = self.prefill_ends.peek().map(|Reverse((end, ..))| *end);
        let event = self.events.peek().map(|Reverse((at, ..))| *at);
        end.into_iter().chain(event).min()
    }

    /// Whether nothing but ends of passes on serving nodes is planned.
    pub(crate) fn has_ends_only(&self) -> bool {
        self.events.is_empty() && self.prefill_ends.is_empty()
    }

    /// Whether no pass is under way, and all events are of a kind.
    pub(crate) fn has_only(&self, of: impl Fn(&Event) -> bool) -> bool {
        let mut events = self.events.iter();
        self.ends.is_empty()
            && self.prefill_ends.is_empty()
            && events.all(|Reverse((_, _, event))| of(event))
    }
}

fn take(ends: &mut BinaryHeap<PassEnd>, now: SimTime) -> Option<(u64, u32, u32)> {
    let &Reverse((end, entry, node, life)) = ends.peek()?;
    if end > now {
        return None;
    }
    ends.pop();
    Some((entry, node, life))
}
