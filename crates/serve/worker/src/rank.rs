//! A rank of an engine thread: its backend, and where it is between passes.

use std::sync::Arc;

use slipstream_base::{RankId, SimTime};

use crate::backend::Backend;
use crate::stats::RankStats;
use crate::timeline::Timeline;

/// A rank of an engine thread.
pub(crate) struct Rank {
    pub(crate) id: RankId,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) timeline: Timeline,
    pub(crate) phase: Phase,
    pub(crate) stats: Arc<RankStats>,
    /// Metrics were published since the last heartbeat.
    pub(crate) published: bool,
}

/// State of a rank. In the heap exactly while starting or in a pass.
#[derive(Clone, Copy)]
pub(crate) enum Phase {
    Starting,
    /// Since `wall_ns`, when modelled time was `model`.
    Idle {
        model: SimTime,
        wall_ns: u64,
    },
    /// Something was added; a pass begins at `model` once the requests at hand are taken.
    Awake {
        model: SimTime,
    },
    InPass {
        start: SimTime,
        end: SimTime,
    },
    /// Its backend died. It takes no requests any more.
    Dead,
}

impl Rank {
    /// Modelled time at wall time `now`. Idle time counts as it is, whatever the speedup: nothing
    /// in an engine depends on it, and a modelled clock at a million times the wall clock would
    /// overflow within a day.
    pub(crate) fn model_now(&self, now: u64) -> SimTime {
        match self.phase {
            Phase::Starting | Phase::Dead => SimTime::ZERO,
            Phase::Idle { model, wall_ns } => model + now.saturating_sub(wall_ns),
            Phase::Awake { model } => model,
            Phase::InPass { start, end } => self.timeline.model_between(now, start, end),
        }
    }
}
