//! A router's delayed view of loads.

use std::sync::atomic::Ordering;

use slipstream_base::width::to_u32;
use slipstream_base::{Prompt, SimTime};

use crate::fleet::Fleet;

/// The load of a target at the router's last refresh, plus its own routing since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ViewedLoad {
    pub(crate) requests: u64,
    pub(crate) prefill_tokens: u64,
    pub(crate) decode_tokens: u64,
    pub(crate) active_blocks: u64,
}

impl ViewedLoad {
    /// The current load.
    #[inline]
    pub(crate) fn of(fleet: &Fleet, target: usize) -> ViewedLoad {
        let load = &fleet.loads[target];
        ViewedLoad {
            requests: load.requests.load(Ordering::Relaxed),
            prefill_tokens: load.prefill_tokens.load(Ordering::Relaxed),
            decode_tokens: load.decode_tokens.load(Ordering::Relaxed),
            active_blocks: load.active_blocks.load(Ordering::Relaxed),
        }
    }
}

/// Age of the view that a decision uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewTurn {
    /// The same view as for the previous decision.
    Same,
    /// The view that was refreshed in the previous interval.
    Next,
    /// The view has expired; it is refreshed now.
    Fresh,
}

/// The view of one router.
///
/// Time is divided into intervals of `router.view_interval_ms`. Decisions in an interval use the
/// view that was refreshed in the previous one, plus the router's own routing since. The view is at
/// most two intervals old, as if workers published their loads once per interval, with a delay of
/// one interval.
#[derive(Debug)]
pub(crate) struct Views {
    interval_ns: u64,
    /// The interval of the last request; `None` before the first.
    interval: Option<u64>,
    /// The view of this interval; by dense target index.
    pub(crate) loads: Vec<ViewedLoad>,
    /// The view of the next interval: loads at its refresh, plus requests routed since.
    next: Vec<ViewedLoad>,
    /// Whether `next` was refreshed.
    seen: bool,
    /// Requests routed in this interval, until it is.
    routed: Vec<(u32, ViewedLoad)>,
    /// The driver decides when to refresh.
    pub(crate) manual: bool,
}

impl Views {
    pub(crate) fn new(interval_ns: u64) -> Views {
        Views {
            interval_ns: interval_ns.max(1),
            interval: None,
            loads: Vec::new(),
            next: Vec::new(),
            seen: false,
            routed: Vec::new(),
            manual: false,
        }
    }

    pub(crate) fn turn(&self, now: SimTime) -> ViewTurn {
        let interval = now.0 / self.interval_ns;
        match self.interval {
            Some(last) if last == interval => ViewTurn::Same,
            Some(last) if last + 1 == interval => ViewTurn::Next,
            _ => ViewTurn::Fresh,
        }
    }

    /// A request arrives at `now`: from here on decisions use the next view.
    pub(crate) fn advance(&mut self, now: SimTime, fleet: &Fleet) {
        match self.turn(now) {
            ViewTurn::Same => return,
            ViewTurn::Next => {
                assert!(self.seen, "it looks in every interval");
                std::mem::swap(&mut self.loads, &mut self.next);
                self.seen = false;
            }
            ViewTurn::Fresh => {
                self.routed.clear();
                self.seen = false;
                self.refresh(fleet);
                self.loads.clone_from(&self.next);
            }
        }
        self.interval = Some(now.0 / self.interval_ns);
        if !self.manual {
            self.refresh(fleet);
        }
    }

    /// Refreshes the view for the next interval, unless it is done.
    pub(crate) fn refresh(&mut self, fleet: &Fleet) {
        if self.seen {
            return;
        }
        self.next.clear();
        let targets = 0..fleet.targets().len();
        self.next
            .extend(targets.map(|target| ViewedLoad::of(fleet, target)));
        for (target, more) in self.routed.drain(..) {
            self.next[target as usize].add(more);
        }
        self.seen = true;
    }

    /// Charges `prompt` to `target`. Blocks that it shares with other prompts there, except its
    /// hits, are counted twice until the next refresh.
    pub(crate) fn on_routed(&mut self, target: usize, prompt: &Prompt, hit_blocks: u32) {
        let (size, len) = (u64::from(prompt.block_size()), u64::from(prompt.len()));
        let hits = u64::from(hit_blocks);
        let more = ViewedLoad {
            requests: 1,
            prefill_tokens: len - hits * size,
            decode_tokens: 0,
            active_blocks: len.div_ceil(size) - hits,
        };
        self.loads[target].add(more);
        if self.seen {
            self.next[target].add(more);
        } else {
            self.routed.push((to_u32(target), more));
        }
    }
}

impl ViewedLoad {
    fn add(&mut self, more: ViewedLoad) {
        self.requests += more.requests;
        self.prefill_tokens += more.prefill_tokens;
        self.decode_tokens += more.decode_tokens;
        self.active_blocks += more.active_blocks;
    }
}
