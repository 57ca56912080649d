//! Tries candidates at sizes that are cheaper than the best known one.

use std::collections::VecDeque;

use super::{Choice, Evaluate, NEAR, Search, Sizing, Stage, Trial, TrialResult};

/// Limit of candidates that are tried before the best of them is sized.
const BATCH_MAX: usize = 8;

impl<E: Evaluate> Search<'_, E> {
    /// Tries candidates at the largest size that is cheaper than `best`, some at a time. The best of those that attain is sized,
    /// and the others have to be cheaper than that, until none is. Without `best`, the first that attains at any size
    /// is sized. Result: the cheapest.
    pub(super) fn race(
        &mut self,
        mut best: Option<Choice>,
        candidates: &[(usize, usize)],
        stage: Stage,
    ) -> Result<Option<Choice>, E::Error> {
        let mut open: VecDeque<(usize, usize)> = VecDeque::new();
        for candidate in candidates {
            let is_best = best.is_some_and(|best| (best.shape, best.setting) == *candidate);
            if !is_best && !open.contains(candidate) {
                open.push_back(*candidate);
            }
        }
        if best.is_none() {
            best = self.size_first(&mut open, stage)?;
        }
        let Some(mut best) = best else {
            return Ok(None);
        };
        // One that attains takes far more requests than one that does not. So few are tried at a time until most do not.
        let mut size = 1;
        while !open.is_empty() {
            let batch: Vec<(usize, usize)> = open.drain(..open.len().min(size)).collect();
            let attain = self.cheaper(&best, &batch, stage)?;
            let Some((next, measured)) = cheapest(&attain) else {
                size = (size * 2).min(BATCH_MAX);
                continue;
            };
            size = 1;
            let min = self.shapes[next.shape].workers_min.max(1);
            let mut sizing = Sizing::new(min, next.workers, next.workers, true, self.target);
            sizing.take(next.workers, measured);
            let mut job = [(next.shape, next.setting, sizing)];
            self.size(&mut job, stage)?;
            best = self.choice_of(&job[0]).unwrap_or(*next);
            self.learn(Some(best), stage);
            // The others that attain are tried again, but those that ran alike.
            let mut runs: Vec<(usize, u32, u64)> = Vec::new();
            let mut again: Vec<(usize, usize)> = Vec::new();
            for (each, measured) in &attain {
                let run = (each.shape, each.workers, measured.digest);
                let same = (best.shape, best.setting) == (each.shape, each.setting);
                if !same && !runs.contains(&run) {
                    again.push((each.shape, each.setting));
                }
                runs.push(run);
            }
            again
                .into_iter()
                .rev()
                .for_each(|each| open.push_front(each));
        }
        Ok(Some(best))
    }

    /// Sizes candidates in their order until one attains at some size.
    fn size_first(
        &mut self,
        open: &mut VecDeque<(usize, usize)>,
        stage: Stage,
    ) -> Result<Option<Choice>, E::Error> {
        while let Some((shape, setting)) = open.pop_front() {
            let start = self.known[shape].map_or(self.shapes[shape].workers_min, |known| known.1);
            let mut job = [(shape, setting, self.sizing(shape, start, false))];
            self.size(&mut job, stage)?;
            let found = self.choice_of(&job[0]);
            self.learn(found, stage);
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The candidates of a batch that attain at the largest size that is cheaper than `best`.
    fn cheaper(
        &mut self,
        best: &Choice,
        batch: &[(usize, usize)],
        stage: Stage,
    ) -> Result<Vec<(Choice, TrialResult)>, E::Error> {
        let mut trials: Vec<Trial> = Vec::new();
        for &(shape, setting) in batch {
            // Otherwise its smallest cluster costs as much.
            if let Some(workers) = self.shapes[shape].cheaper_than(best.cost) {
                trials.push(self.trial_at(shape, setting, workers, stage));
            }
        }
        if stage.seeds > 1 {
            let mut near = self.screen_trials(&trials, stage)?.into_iter();
            trials.retain(|_| near.next() == Some(true));
        }
        let measured = self.run_at(&trials, stage)?;
        let each = trials.iter().zip(measured);
        let attain = each.filter(|(_, measured)| measured.attains);
        let choice = |(trial, measured): (&Trial, TrialResult)| {
            let choice = Choice {
                shape: trial.shape,
                setting: trial.setting,
                workers: trial.workers,
                cost: self.shapes[trial.shape].cost_of(trial.workers),
                share: measured.share,
            };
            (choice, measured)
        };
        Ok(attain.map(choice).collect())
    }

    /// Whether trials attain or nearly do with the first seed. If others are judged with it, they run until they have
    /// more misses than all of the seeds may have: the share of a run that was stopped earlier is too low, if its misses came first.
    pub(super) fn screen_trials(
        &mut self,
        trials: &[Trial],
        stage: Stage,
    ) -> Result<Vec<bool>, E::Error> {
        let trials: Vec<Trial> = trials
            .iter()
            .map(|trial| Trial {
                spare: stage.seeds,
                ..*trial
            })
            .collect();
        let least = self.target - NEAR;
        let measured = self.run(&trials)?;
        Ok(measured
            .iter()
            .map(|m| m.attains || m.share >= least)
            .collect())
    }

    /// Keeps the setting and size of a shape that were found where answers are found, or the first ones.
    pub(super) fn learn(&mut self, found: Option<Choice>, stage: Stage) {
        if let Some(found) = found
            && (stage.part >= self.whole_part() || self.known[found.shape].is_none())
        {
            self.known[found.shape] = Some((found.setting, found.workers));
        }
    }

    /// Candidates after a race that `best` won, best first: by their shares at the largest size that is cheaper than `best`. Those
    /// that ran exactly as a better one of the same shape, so that their settings have no effect there, are left out.
    pub(super) fn rank(
        &mut self,
        best: Option<Choice>,
        candidates: &[(usize, usize)],
        stage: Stage,
    ) -> Result<Vec<(usize, usize)>, E::Error> {
        let first = best.map(|best| (best.shape, best.setting));
        let of_best = first.filter(|first| candidates.contains(first));
        let mut ranked: Vec<(usize, usize)> = of_best.into_iter().collect();
        let mut trials: Vec<Trial> = Vec::new();
        let mut dear: Vec<(usize, usize)> = Vec::new();
        for &(shape, setting) in candidates {
            if Some((shape, setting)) == first {
                continue;
            }
            match self.largest_cheaper_size(best, shape) {
                Some(workers) => trials.push(self.trial_at(shape, setting, workers, stage)),
                None => dear.push((shape, setting)),
            }
        }
        let measured = self.run(&trials)?;
        let mut order: Vec<(&Trial, TrialResult)> = trials.iter().zip(measured).collect();
        // Sorting is stable: of equal ones the first.
        order.sort_by(|a, b| b.1.share.total_cmp(&a.1.share));
        let order = order
            .into_iter()
            .map(|(trial, measured)| ((trial.shape, trial.setting), (trial, measured)));
        ranked.extend(distinct(order, |(trial, measured)| {
            let run = (trial.shape, trial.workers, measured.digest);
            (run, measured.complete)
        }));
        ranked.extend(dear);
        Ok(ranked)
    }
}

/// Candidates in their order, one for each run. Those that ran alike until both were stopped come last, and those that ran alike to
/// the end are left out: `run` is a run's identity, and whether it ended.
pub(super) fn distinct<C, T, R: PartialEq>(
    order: impl IntoIterator<Item = (C, T)>,
    run: impl Fn(&T) -> (R, bool),
) -> Vec<C> {
    let (mut first, mut stopped) = (Vec::new(), Vec::new());
    let mut runs: Vec<R> = Vec::new();
    for (candidate, of) in order {
        let (run, ended) = run(&of);
        if !runs.contains(&run) {
            runs.push(run);
            first.push(candidate);
        } else if !ended {
            stopped.push(candidate);
        }
    }
    first.extend(stopped);
    first
}

/// The cheapest, and of these the one with the largest share; the first of equal ones.
fn cheapest(attain: &[(Choice, TrialResult)]) -> Option<&(Choice, TrialResult)> {
    attain.iter().reduce(|a, b| {
        let less = b.0.cost < a.0.cost * (1.0 - 1e-9);
        let same = b.0.cost <= a.0.cost * (1.0 + 1e-9);
        if less || same && b.0.share > a.0.share {
            b
        } else {
            a
        }
    })
}
