//! Figures of the answer: its result per seed, neighboring sizes, and headroom.

use slipstream_base::width;

use super::{Choice, Conditions, Evaluate, Search, Trial, TrialResult};

/// Resolution of the headroom, relative to the load.
pub const LOAD_STEP: f64 = 0.02;
/// Highest load tried for the headroom, relative to the question's.
pub const LOAD_MAX: f64 = 4.0;

impl<E: Evaluate> Search<'_, E> {
    /// Whether a configuration attains under each of `conditions`, on the whole workload.
    pub(super) fn check(
        &mut self,
        of: &Choice,
        conditions: &[Conditions],
    ) -> Result<Vec<TrialResult>, E::Error> {
        let trials: Vec<Trial> = conditions
            .iter()
            .map(|&conditions| Trial {
                conditions,
                ..self.trial(of.shape, of.setting, of.workers)
            })
            .collect();
        self.run(&trials)
    }

    /// The results of an answer with each seed, on the last part. Shape `[seeds]`.
    ///
    /// # Errors
    /// As the evaluation's.
    pub fn each_seed(&mut self, of: &Choice) -> Result<Vec<TrialResult>, E::Error> {
        let stage = self.last_stage();
        let trial = self.trial_at(of.shape, of.setting, of.workers, stage);
        let trials: Vec<Trial> = (0..stage.seeds)
            .map(|seed| Trial {
                conditions: Conditions { seed, ..self.plain },
                ..trial
            })
            .collect();
        self.run(&trials)
    }

    /// Sizes near that of an answer, with their shares; the rest of it is the same.
    ///
    /// # Errors
    /// As the evaluation's.
    pub fn neighboring_sizes(&mut self, best: &Choice) -> Result<Vec<(u32, f64)>, E::Error> {
        self.phase("size", 5.0, 10.0);
        let of = &self.shapes[best.shape];
        let step = (best.workers / 10).max(1);
        let sizes: Vec<u32> = (-3i64..=3)
            .map(|n| i64::from(best.workers) + n * i64::from(step))
            .filter(|n| (i64::from(of.workers_least)..=i64::from(of.workers_max)).contains(n))
            .map(width::to_u32)
            .collect();
        let trials: Vec<Trial> = sizes
            .iter()
            .map(|&workers| self.trial(best.shape, best.setting, workers))
            .collect();
        // Trials of the search may have been stopped, so that their shares are those of a part.
        let is_open = |trial: &&Trial| !self.result(trial).is_some_and(|known| known.complete);
        let open: Vec<Trial> = trials.iter().filter(is_open).copied().collect();
        let progress = self.progress.clone();
        let measured = self.evaluate.run(&open, &progress)?;
        self.requests += measured.iter().map(|m| m.requests).sum::<u64>();
        let mut measured = measured.iter();
        let share = |trial: &Trial| match self.result(trial).filter(|known| known.complete) {
            Some(known) => known.share,
            None => measured.next().map_or(0.0, |of| of.share),
        };
        let shares: Vec<f64> = trials.iter().map(share).collect();
        Ok(sizes.into_iter().zip(shares).collect())
    }

    /// The load, relative to the question's, up to which a configuration attains: the highest found
    /// to attain, and the lowest found not to (`None`: above [`LOAD_MAX`]).
    ///
    /// # Errors
    /// As the evaluation's.
    pub fn headroom(&mut self, of: &Choice) -> Result<(f64, Option<f64>), E::Error> {
        self.phase("headroom", 7.0, 12.0);
        let (mut attains, mut fails) = (1.0, None);
        let mut next = 1.1;
        while fails.is_none_or(|fails| fails - attains > LOAD_STEP * 1.01) {
            let conditions = Conditions {
                load: self.plain.load * next,
                ..self.plain
            };
            if self.check(of, &[conditions])?[0].attains {
                attains = next;
            } else {
                fails = Some(next);
            }
            next = match fails {
                Some(fails) => (f64::midpoint(attains, fails) / LOAD_STEP).round() * LOAD_STEP,
                None if attains >= LOAD_MAX => break,
                None => (1.0 + (attains - 1.0) * 2.0).min(LOAD_MAX),
            };
            if fails.is_some_and(|fails| next >= fails) || next <= attains {
                break;
            }
        }
        Ok((attains, fails))
    }
}
