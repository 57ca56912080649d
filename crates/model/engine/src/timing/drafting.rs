//! The time of drafting tokens, added to steps (speculative decoding).

use slipstream_base::width::round_u64;
use slipstream_config::cluster::SpeculationConfig;

use super::{Moved, StepLoad, StepTime};

/// Steps of a model, each with the time of drafting.
pub struct Drafting {
    model: Box<dyn StepTime>,
    draft_ns: f64,
    draft_share: f64,
}

impl Drafting {
    /// The steps of `model` with the drafts of `speculation`.
    pub fn new(model: Box<dyn StepTime>, speculation: &SpeculationConfig) -> Drafting {
        Drafting {
            model,
            draft_ns: speculation.draft_ns,
            draft_share: speculation.draft_share,
        }
    }
}

impl StepTime for Drafting {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        let step_ns = self.model.step_ns(load);
        step_ns + round_u64(step_ns as f64 * self.draft_share + self.draft_ns)
    }

    fn moved_ns(&self, load: &StepLoad) -> Option<Moved> {
        // Drafting follows from the length of the step, and so from its collectives.
        let moved = self.model.moved_ns(load)?;
        Some(moved.times(1.0 + self.draft_share))
    }

    fn step_ns_in_group(&mut self, load: &StepLoad, all: u64) -> u64 {
        let step_ns = self.model.step_ns_in_group(load, all);
        step_ns + round_u64(step_ns as f64 * self.draft_share + self.draft_ns)
    }

    fn copy(&self) -> Option<Box<dyn StepTime>> {
        Some(Box::new(Drafting {
            model: self.model.copy()?,
            ..*self
        }))
    }

    fn has_range(&self) -> bool {
        self.model.has_range()
    }

    fn extrapolates(&self, load: &StepLoad) -> bool {
        self.model.extrapolates(load)
    }
}
