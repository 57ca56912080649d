//! Step times scaled by a fault's slowdown and by the speed-up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipstream_base::width::round_u64;
use slipstream_engine::timing::{StepLoad, StepTime};

/// Factor on the duration of passes: 1, unless a fault slows an engine down.
pub(crate) struct Pace(AtomicU64);

impl Pace {
    pub(crate) fn new(factor: f64) -> Pace {
        Pace(AtomicU64::new(factor.to_bits()))
    }

    /// From the next pass on.
    pub(crate) fn set(&self, factor: f64) {
        self.0.store(factor.to_bits(), Ordering::Relaxed);
    }
}

/// Passes with a factor on their duration.
pub(crate) struct ScaledStepTime {
    pub(crate) timing: Box<dyn StepTime>,
    pub(crate) speedup: f64,
    pub(crate) pace: Arc<Pace>,
}

impl StepTime for ScaledStepTime {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        let factor = f64::from_bits(self.pace.0.load(Ordering::Relaxed));
        round_u64(self.timing.step_ns(load) as f64 * factor / self.speedup)
    }

    fn step_ns_in_group(&mut self, load: &StepLoad, all: u64) -> u64 {
        let factor = f64::from_bits(self.pace.0.load(Ordering::Relaxed));
        round_u64(self.timing.step_ns_in_group(load, all) as f64 * factor / self.speedup)
    }

    fn has_range(&self) -> bool {
        self.timing.has_range()
    }

    fn extrapolates(&self, load: &StepLoad) -> bool {
        self.timing.extrapolates(load)
    }
}
