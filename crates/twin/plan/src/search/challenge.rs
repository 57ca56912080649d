//! Challenges of an answer: every shape, other splits of prefill and decode workers, and all settings of shapes that nearly attain.

use super::race::distinct;
use super::{
    Candidate, Choice, Evaluate, KEEP, KEEP_MIN, ROUNDS_MAX, Search, Stage, Trial, TrialResult,
};

impl<E: Evaluate> Search<'_, E> {
    /// Challenges `best` with every shape in its best known setting, and in every setting where it is near, until none is
    /// cheaper.
    pub(super) fn challenge(
        &mut self,
        mut best: Option<Choice>,
        stage: Stage,
    ) -> Result<Option<Choice>, E::Error> {
        for _ in 0..ROUNDS_MAX {
            let before = best;
            let each: Vec<(usize, usize)> = (0..self.shapes.len())
                .map(|shape| (shape, self.setting(shape)))
                .collect();
            best = self.race(best, &each, stage)?;
            let others = self.other_splits(best, stage)?;
            best = self.race(best, &others, stage)?;
            let near = self.near_misses(best, stage)?;
            best = self.race(best, &near, stage)?;
            if best == before {
                break;
            }
        }
        Ok(best)
    }

    /// Settings of shapes with workers of two kinds with one prefill worker more or less, or some, if that is better at the largest size
    /// that is cheaper than `best`. Without `best`, settings of all shapes that are better at the largest size.
    pub(super) fn other_splits(
        &mut self,
        best: Option<Choice>,
        stage: Stage,
    ) -> Result<Vec<(usize, usize)>, E::Error> {
        let mut better = Vec::new();
        for shape in 0..self.shapes.len() {
            let first = self.setting(shape);
            let near = match best {
                Some(_) => Candidate::next_splits,
                None => Candidate::neighbors,
            };
            let of = &self.shapes[shape];
            let has_others = !near(of, first).is_empty();
            let Some(workers) = self
                .largest_cheaper_size(best, shape)
                .filter(|_| has_others)
            else {
                continue;
            };
            let (setting, _) = self.ascend(shape, first, workers, stage, near)?;
            if setting != first {
                better.push((shape, setting));
            }
        }
        Ok(better)
    }

    /// Settings of the shapes that nearly attain at the largest size that is cheaper than `best`, or at the largest of all: the
    /// better ones at that size on the parts.
    pub(super) fn near_misses(
        &mut self,
        best: Option<Choice>,
        stage: Stage,
    ) -> Result<Vec<(usize, usize)>, E::Error> {
        let mut all = Vec::new();
        for shape in 0..self.shapes.len() {
            let Some(workers) = self.largest_cheaper_size(best, shape) else {
                continue;
            };
            let share = |setting: usize| {
                let trial = self.trial_at(shape, setting, workers, stage);
                Some((setting, self.seen.get(&self.key(&trial))?.1.share))
            };
            let of = &self.shapes[shape];
            let known = (0..of.places.len()).filter_map(share);
            let nearest = known.reduce(|a, b| if b.1 > a.1 { b } else { a });
            let Some((setting, _)) = nearest else {
                continue;
            };
            let trial = self.trial_at(shape, setting, workers, stage);
            if self.screen_trials(&[trial], stage)?[0] {
                let settings = if stage.part > 0 {
                    self.combinations(shape, setting, workers, Self::stage_of_part(0))?
                } else {
                    of.with_split_of(setting)
                };
                let better =
                    self.select_better_settings(shape, settings, workers, stage.part, KEEP_MIN)?;
                all.extend(better.into_iter().map(|setting| (shape, setting)));
            }
        }
        Ok(all)
    }

    /// The better ones of settings of a shape at a size, on the parts below `part`.
    pub(super) fn select_better_settings(
        &mut self,
        shape: usize,
        mut better: Vec<usize>,
        workers: u32,
        part: usize,
        keep_min: usize,
    ) -> Result<Vec<usize>, E::Error> {
        for part in 0..part {
            let trial =
                |&setting| self.trial_at(shape, setting, workers, Self::stage_of_part(part));
            let trials: Vec<Trial> = better.iter().map(trial).collect();
            let measured = self.run(&trials)?;
            let mut order: Vec<(usize, &TrialResult)> =
                better.iter().copied().zip(&measured).collect();
            order.sort_by(|(first, a), (second, b)| {
                let share = b.share.total_cmp(&a.share);
                let order = b.attains.cmp(&a.attains).then(share);
                order.then(first.cmp(second))
            });
            let mut ranked = distinct(order, |measured| (measured.digest, measured.complete));
            ranked.truncate(better.len().div_ceil(KEEP).min(KEEP_MIN * 2).max(keep_min));
            better = ranked;
        }
        Ok(better)
    }
}
