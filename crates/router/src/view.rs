//! Loads as a router believes them to be, where it does not look each time.

use std::sync::atomic::Ordering;

use slipstream_base::{Prompt, SimTime};

use crate::fleet::Fleet;

/// The load of a target as a router saw it last, with what it has routed there since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ViewedLoad {
    pub(crate) requests: u64,
    pub(crate) prefill_tokens: u64,
    pub(crate) decode_tokens: u64,
    pub(crate) active_blocks: u64,
}

impl ViewedLoad {
    /// As it is.
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

/// How a moment stands to what a router has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewTurn {
    /// It goes by what it went by before.
    Same,
    /// It goes by the look that it took in the interval before this one.
    Next,
    /// It has not looked for so long that it goes by what it sees now.
    Fresh,
}

/// What one router believes.
///
/// Time is cut into intervals of `router.view_interval_ms`. In each, decisions go by the look that was
/// taken in the one before, and by what the router has routed since that look: at most two intervals
/// old, as where workers tell of their loads once in each, and the news takes as long.
#[derive(Debug)]
pub(crate) struct Views {
    interval_ns: u64,
    /// The interval of the last request; `None` before the first.
    interval: Option<u64>,
    /// What decisions go by; by dense target index.
    pub(crate) loads: Vec<ViewedLoad>,
    /// What they go by in the next interval: as seen in this one, with what was routed since.
    next: Vec<ViewedLoad>,
    /// `next` has been seen.
    seen: bool,
    /// What was routed in this interval, while it has not been.
    routed: Vec<(u32, ViewedLoad)>,
    /// The driver says when to look.
    pub(crate) by_hand: bool,
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
            by_hand: false,
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

    /// A request comes at `now`: from here on decisions go by the next look.
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
                self.see(fleet);
                self.loads.clone_from(&self.next);
            }
        }
        self.interval = Some(now.0 / self.interval_ns);
        if !self.by_hand {
            self.see(fleet);
        }
    }

    /// Looks, for the decisions of the next interval, unless it has.
    pub(crate) fn see(&mut self, fleet: &Fleet) {
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

    /// `prompt` goes to `target`. Blocks that it shares with others there, other than those that it
    /// hits, are counted again until they are seen.
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
            self.routed.push((target as u32, more));
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
