//! The smallest size that attains, by growing steps and bisection.

use super::TrialResult;

/// Consecutive increases by half without improvement after which larger sizes are given up.
const FLAT: usize = 4;

/// Finds the smallest size that attains.
#[derive(Clone, Debug)]
pub(super) struct Sizing {
    /// The largest size that does not attain; sizes up to it are not tried.
    pub(super) fails: u32,
    /// Whether `fails` was tried.
    tried: bool,
    /// The smallest size that attains.
    pub(super) attains: Option<u32>,
    pub(super) next: Option<u32>,
    step: u32,
    max: u32,
    /// Sizes and shares of failed trials, while sizes grow.
    grown: Vec<(u32, f64)>,
    target: f64,
    /// Share of the last failed trial.
    pub(super) failed_share: f64,
    pub(super) attained_share: f64,
}

impl Sizing {
    /// Sizes from `min` to `max`; begins at `start`. `near`: `start` is a good guess.
    pub(super) fn new(min: u32, max: u32, start: u32, near: bool, target: f64) -> Sizing {
        let start = start.clamp(min, max.max(min));
        Sizing {
            fails: min.saturating_sub(1),
            tried: false,
            attains: None,
            next: (min <= max).then_some(start),
            step: if near { 1 } else { (start / 2).max(1) },
            max,
            grown: Vec::new(),
            target,
            failed_share: 0.0,
            attained_share: 0.0,
        }
    }

    pub(super) fn take(&mut self, workers: u32, measured: &TrialResult) {
        if measured.attains {
            self.attains = Some(workers);
            self.attained_share = measured.share;
        } else {
            self.fails = workers;
            self.tried = true;
            self.failed_share = measured.share;
        }
        self.next = match self.attains {
            Some(attains) if attains <= self.fails + 1 => None,
            Some(attains) if self.tried => Some(u32::midpoint(self.fails, attains)),
            Some(attains) => {
                // Downwards, in growing steps, to a size that fails.
                let next = attains.saturating_sub(self.step).max(self.fails + 1);
                self.step = self.step.saturating_mul(2);
                Some(next)
            }
            None if workers >= self.max => None,
            None => {
                self.grown.push((workers, measured.share));
                if self.is_hopeless() {
                    None
                } else {
                    let next = workers.saturating_add(self.step).min(self.max);
                    self.step = self.step.saturating_mul(2);
                    Some(next)
                }
            }
        };
    }

    /// Whether more workers no longer help: [`FLAT`] times in a row, half as many again raised the share
    /// by less than a tenth, and closed less than a tenth of the gap to the target.
    fn is_hopeless(&self) -> bool {
        let mut at = self.grown.len() - 1;
        for _ in 0..FLAT {
            let (workers, share) = self.grown[at];
            let fewer = self.grown[..at]
                .iter()
                .rposition(|(w, _)| u64::from(*w) * 3 <= u64::from(workers) * 2);
            let Some(fewer) = fewer else { return false };
            let before = self.grown[fewer].1;
            if share > 1.1 * before || share - before > 0.1 * (self.target - before) {
                return false;
            }
            at = fewer;
        }
        true
    }
}
