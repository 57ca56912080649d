//! The last stage of a search: confirmation on the whole workload with every seed, and the table of the other shapes.

use crate::trial::allowed;

use super::proof::{self, Extent};
use super::{CHANCE, Choice, Evaluate, Key, ROUNDS_MAX, Search, Sizing, Stage, Trial, TrialResult};

/// Fraction of the allowed misses below which the first seed alone decides.
const CLEAR: f64 = 0.5;

/// Most misses of a stopped run whose share is no estimate. It runs on before a cheaper size is given up.
const FEW: u64 = 4;
/// Factor on the misses that such a run may have.
const OPEN: u64 = 4;

/// Settings near a good one that are kept on the next part.
const KEEP_NEAR: usize = 3;

impl<E: Evaluate> Search<'_, E> {
    /// Returns the cheapest candidate that attains on the last stage, given the one `found` on the main stage. The two
    /// stages may disagree in both directions, so every shape is a candidate again.
    pub(super) fn settle(&mut self, found: Option<Choice>) -> Result<Option<Choice>, E::Error> {
        let stage = self.last_stage();
        let mut best = found;
        if stage != self.main_stage() {
            let runs = stage.seeds as f64 * self.parts[stage.part];
            self.phase("confirmation", 3.0 * runs, runs);
            best = match found {
                Some(found) => self.confirm(found, stage)?,
                None => None,
            };
            let is_near = best.is_none() && self.any_comes_near(stage)?;
            if best.is_some() || is_near {
                best = self.challenge(best, stage)?;
            }
        }
        let before = best;
        best = self.fewer(best, stage)?;
        if before.is_none() && best.is_some() {
            best = self.challenge(best, stage)?;
        }
        let most = self.requests.max(proof::REQUESTS);
        (best, self.proven) = self.prove(best, Extent::ALL, most)?;
        best.map(|best| self.prefer(best, stage)).transpose()
    }

    /// Whether a shape nearly attains with the first seed: the trial that came nearest, or the shape's largest size.
    fn any_comes_near(&mut self, stage: Stage) -> Result<bool, E::Error> {
        let nearest = self.nearest().map(|nearest| {
            let of = nearest.trial;
            self.trial_at(of.shape, of.setting, of.workers, stage)
        });
        let largest = (0..self.shapes.len()).filter_map(|shape| {
            let workers = self.largest_cheaper_size(None, shape)?;
            Some(self.trial_at(shape, self.setting(shape), workers, stage))
        });
        let trials: Vec<Trial> = nearest.into_iter().chain(largest).collect();
        Ok(self.screen_trials(&trials, stage)?.contains(&true))
    }

    /// The answer, or one that costs less: where routing has chance in it, fewer workers may attain where one more misses by a little.
    /// Tries the sizes that miss by chance with the first seed, and one worker less than each of them and than the answer.
    pub(super) fn fewer(
        &mut self,
        mut best: Option<Choice>,
        stage: Stage,
    ) -> Result<Option<Choice>, E::Error> {
        let mut tried: Vec<(Key, u64)> = Vec::new();
        loop {
            let mut trials = self.one_less(best, stage);
            trials.retain(|trial| {
                let trial = (self.key(trial), trial.spare);
                let is_new = !tried.contains(&trial);
                tried.extend(is_new.then_some(trial));
                is_new
            });
            if trials.is_empty() {
                return Ok(best);
            }
            let mut first = self.run(&trials)?.into_iter();
            trials.retain(|_| {
                first
                    .next()
                    .is_some_and(|first| self.misses_by_chance(&first))
            });
            let measured = self.run_at(&trials, stage)?;
            for (trial, measured) in trials.iter().zip(&measured) {
                let cost = self.shapes[trial.shape].cost_of(trial.workers);
                if measured.attains && best.is_none_or(|best| cost < best.cost * (1.0 - 1e-9)) {
                    best = Some(Choice {
                        shape: trial.shape,
                        setting: trial.setting,
                        workers: trial.workers,
                        cost,
                        share: measured.share,
                    });
                }
            }
        }
    }

    /// Whether a run attains, or misses by so little that it may be by chance: one miss more than allowed always is. Unless the run was
    /// stopped, its misses are counted.
    fn misses_by_chance(&self, of: &TrialResult) -> bool {
        let is_one_more =
            |&(all, met): &(u64, u64)| all - met <= allowed(all, self.target).saturating_add(1);
        let close = of.share >= 1.0 - CHANCE * (1.0 - self.target);
        of.attains || close || of.complete && of.by_class.iter().all(is_one_more)
    }

    /// Whether a run was stopped at so few misses that its share tells little.
    fn is_open(of: &TrialResult) -> bool {
        let misses: u64 = of.by_class.iter().map(|(all, met)| all - met).sum();
        !of.complete && misses <= FEW
    }

    /// The trials of a stage that miss by chance, or may, and cost less than `best`, and those with one worker less than each of them and
    /// than `best`. Settings that give one cluster may give several with one worker less.
    fn one_less(&self, best: Option<Choice>, stage: Stage) -> Vec<Trial> {
        let plain = self.plain.key();
        let of_best = best
            .map(|best| self.key(&self.trial_at(best.shape, best.setting, best.workers, stage)));
        let mut trials = Vec::new();
        let mut add = |shape: usize, setting: usize, workers: u32, spare: u64| {
            let of = &self.shapes[shape];
            let is_cheaper = best.is_none_or(|best| of.cost_of(workers) < best.cost * (1.0 - 1e-9));
            if is_cheaper && workers >= of.workers_min.max(1) {
                trials.push(Trial {
                    spare,
                    ..self.trial_at(shape, setting, workers, stage)
                });
            }
        };
        let here = |key: &Key| (key.3, key.4) == (stage.part, plain);
        let seen = self.seen.iter().filter(|(key, _)| here(key));
        let of_best = of_best.iter().map(|key| (key, true));
        let seen = seen.map(|(key, (_, result))| (key, self.misses_by_chance(result)));
        for (&(shape, setting, workers, ..), close) in seen.chain(of_best) {
            if close {
                // The first seed may have the misses of all.
                add(shape, setting, workers, stage.seeds);
                for other in 0..self.shapes[shape].places.len() {
                    if self.evaluate.same(shape, other, workers) == setting {
                        add(shape, other, workers - 1, stage.seeds);
                    }
                }
            } else if Self::is_open(&self.seen[&(shape, setting, workers, stage.part, plain)].1) {
                add(shape, setting, workers, OPEN * stage.seeds);
            }
        }
        trials
    }

    /// The size of what attains where answers are found on a later stage. Smaller ones are tried if they nearly attained there.
    pub(super) fn confirm(
        &mut self,
        found: Choice,
        stage: Stage,
    ) -> Result<Option<Choice>, E::Error> {
        let (shape, setting) = (found.shape, found.setting);
        let mut sizing = self.sizing(shape, found.workers, true);
        let fewer = self.trial(shape, setting, found.workers - 1);
        // It failed on the main stage, in a run that ended at the first seed's misses.
        if self.result(&fewer).is_some() && !self.screen_trials(&[fewer], stage)?[0] {
            sizing.fails = fewer.workers;
        }
        let mut job = [(shape, setting, sizing)];
        self.size(&mut job, stage)?;
        Ok(self.choice_of(&job[0]))
    }

    /// The best of a shape that costs more than `floor`; `None` if no size attains.
    ///
    /// # Errors
    /// As the evaluation's.
    pub fn own(&mut self, shape: usize, floor: f64) -> Result<Option<Choice>, E::Error> {
        let (setting, workers) = self.known[shape].unwrap_or((0, 1));
        self.best_of(shape, setting, workers, floor)
    }

    /// The better ones of the settings that differ in one value from one that is good.
    pub(super) fn near_settings(
        &mut self,
        shape: usize,
        setting: usize,
        workers: u32,
        part: usize,
    ) -> Result<Vec<usize>, E::Error> {
        let near = self.shapes[shape].neighbors(setting);
        self.select_better_settings(shape, near, workers, part, KEEP_NEAR)
    }

    /// Changes one value of the setting at a time, as long as that saves workers of its shape, of which at least `min` are needed.
    fn improve(&mut self, mut best: Choice, min: u32, stage: Stage) -> Result<Choice, E::Error> {
        let shape = best.shape;
        while let Some(fewer) = self.shapes[shape].cheaper_than(best.cost)
            && fewer >= min
        {
            let better = self.near_settings(shape, best.setting, fewer, stage.part)?;
            let better: Vec<(usize, usize)> =
                better.into_iter().map(|each| (shape, each)).collect();
            match self.race(Some(best), &better, stage)? {
                Some(cheaper) if cheaper != best => best = cheaper,
                _ => break,
            }
        }
        Ok(best)
    }

    /// The best of a shape: its smallest size that attains, by a setting and a size that are near. Sizes that cost less than
    /// `floor` are known to fail.
    fn best_of(
        &mut self,
        shape: usize,
        setting: usize,
        workers: u32,
        floor: f64,
    ) -> Result<Option<Choice>, E::Error> {
        let stage = self.main_stage();
        let of = &self.shapes[shape];
        let min = of.cheaper_than(floor).map_or(0, |fails| fails + 1);
        let min = min.max(of.workers_min.max(1));
        let sizing = Sizing::new(min, of.workers_max, workers.max(min), true, self.target);
        let mut job = [(shape, setting, sizing)];
        self.size(&mut job, stage)?;
        let mut best = match self.choice_of(&job[0]) {
            Some(sized) => Some(self.improve(sized, min, stage)?),
            None => None,
        };
        // Not of a workload that is longer than what answers are found on: that takes too many requests.
        if self.main != self.parts.len() - 1 {
            return Ok(best);
        }
        if let Some(found) = best
            && self.seeds > 1
        {
            let many = 1.0 - found.share > CLEAR * (1.0 - self.target);
            let before = self.requests;
            if many || self.takes_few(&found) {
                best = self.confirm(found, self.last_stage())?;
            }
            self.proof_left = self.proof_left.saturating_sub(self.requests - before);
        }
        let before = self.requests;
        let extent = Extent {
            shape: Some(shape),
            floor,
        };
        (best, _) = self.prove(best, extent, self.proof_left)?;
        self.proof_left = self.proof_left.saturating_sub(self.requests - before);
        Ok(best)
    }

    /// Whether the other seeds of what attains with the first one take few requests.
    fn takes_few(&self, of: &Choice) -> bool {
        let first = self.trial(of.shape, of.setting, of.workers);
        self.result(&first)
            .is_some_and(|first| first.requests.saturating_mul(self.seeds - 1) <= self.proof_left)
    }

    /// The answer, and the rows of the other shapes. A row that is cheaper, as its settings were not tried before, is the answer
    /// instead.
    ///
    /// # Errors
    /// As the evaluation's.
    pub fn table(
        &mut self,
        mut best: Choice,
        limit: usize,
    ) -> Result<(Choice, Vec<Choice>), E::Error> {
        let mut rows = self.runners_up(&best, limit)?;
        for _ in 0..ROUNDS_MAX {
            let cheaper = rows.iter().find(|row| row.cost < best.cost * (1.0 - 1e-9));
            let Some(&cheaper) = cheaper else { break };
            self.known[cheaper.shape] = Some((cheaper.setting, cheaper.workers));
            let was_proven = self.proven;
            match self.settle(Some(cheaper))? {
                Some(settled) if settled.cost < best.cost * (1.0 - 1e-9) => {
                    best = settled;
                    rows = self.runners_up(&best, limit)?;
                }
                // With the other seeds, or on the whole, it costs as much.
                _ => {
                    self.proven |= was_proven;
                    rows.retain(|row| *row != cheaper);
                }
            }
        }
        Ok((best, rows))
    }

    /// The best of other shapes: of each kind, and of other promising ones up to `limit`, the cheapest first. `best`: the
    /// answer.
    ///
    /// # Errors
    /// As the evaluation's.
    fn runners_up(&mut self, best: &Choice, limit: usize) -> Result<Vec<Choice>, E::Error> {
        let mut others: Vec<(f64, usize, usize, u32)> = self
            .known
            .iter()
            .enumerate()
            .filter(|(shape, _)| *shape != best.shape)
            .filter_map(|(shape, known)| {
                let (setting, workers) = (*known)?;
                Some((self.shapes[shape].cost_of(workers), shape, setting, workers))
            })
            .collect();
        others.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut kinds = vec![self.shapes[best.shape].kind];
        let mut chosen = Vec::new();
        for (place, other) in others.iter().enumerate() {
            let kind = self.shapes[other.1].kind;
            if place < limit || !kinds.contains(&kind) {
                kinds.push(kind);
                chosen.push(*other);
            }
        }
        self.phase("runners-up", 3.0 * chosen.len() as f64, 20.0);
        let mut sized: Vec<Choice> = Vec::new();
        for (_, shape, setting, workers) in chosen {
            sized.extend(self.best_of(shape, setting, workers, best.cost)?);
        }
        // Of equally cheap ones the simpler first, and then the one with the larger share.
        let simplicity = |of: &Choice| self.shapes[of.shape].simplicity();
        sized.sort_by(|a, b| {
            let cost = a.cost.total_cmp(&b.cost);
            let cost = cost.then(simplicity(a).cmp(&simplicity(b)));
            let share = b.share.total_cmp(&a.share);
            cost.then(share).then(a.shape.cmp(&b.shape))
        });
        Ok(sized)
    }
}
