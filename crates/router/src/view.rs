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

/// What one router believes, at most `router.view_interval_ms` old.
#[derive(Debug)]
pub(crate) struct Views {
    interval_ns: u64,
    /// When it looked last; `None` before the first time.
    seen: Option<SimTime>,
    /// By dense target index.
    pub(crate) loads: Vec<ViewedLoad>,
}

impl Views {
    pub(crate) fn new(interval_ns: u64) -> Views {
        Views {
            interval_ns,
            seen: None,
            loads: Vec::new(),
        }
    }

    /// Whether what is believed at `now` is too old, so that it looks.
    pub(crate) fn is_old(&self, now: SimTime) -> bool {
        self.seen
            .is_none_or(|seen| now.since(seen) >= self.interval_ns)
    }

    pub(crate) fn look(&mut self, now: SimTime, fleet: &Fleet) {
        self.seen = Some(now);
        self.loads.clear();
        let targets = 0..fleet.targets().len();
        self.loads
            .extend(targets.map(|target| ViewedLoad::of(fleet, target)));
    }

    /// `prompt` goes to `target`. Blocks that it shares with others there, other than those that it
    /// hits, are counted again until the next look.
    pub(crate) fn on_routed(&mut self, target: usize, prompt: &Prompt, hit_blocks: u32) {
        let (size, len) = (u64::from(prompt.block_size()), u64::from(prompt.len()));
        let hits = u64::from(hit_blocks);
        let load = &mut self.loads[target];
        load.requests += 1;
        load.prefill_tokens += len - hits * size;
        load.active_blocks += len.div_ceil(size) - hits;
    }
}
