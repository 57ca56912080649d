//! Which trials to run, and the answer that follows from them.
//!
//! A *candidate* is a shape with a setting; its size is a number of workers. The search assumes that
//! more workers attain whenever fewer do, and finds the smallest size by bisection. The search sizes every
//! promising shape on a small part of the workload, and then the cheapest shape on all of it: an answer to
//! improve on. Everything else is tried at the largest size that is cheaper; most candidates miss soon, which takes few
//! requests. Settings are tried on the small part first, and the better quarter goes on to larger parts
//! (successive halving). On the whole workload, the remaining settings challenge the answer, and so do all
//! shapes, other splits of prefill and decode workers, and the better settings of shapes that nearly attain.
//! At last, everything that is cheaper is simulated, if that takes few requests.
//!
//! Trials run in batches that depend on results alone.

mod candidate;
mod challenge;
mod figures;
mod halving;
mod prefer;
mod proof;
mod race;
mod settle;
mod sizing;

use std::collections::{BTreeMap, BTreeSet};

use slipstream_base::mix::mix64;
use slipstream_base::width;

use self::candidate::SPLIT;
use self::sizing::Sizing;
use crate::trial::allowed;

pub use self::candidate::{AxisPoint, Candidate, grid};
pub use self::figures::{LOAD_MAX, LOAD_STEP};

/// Conditions of a trial that differ from those of the question.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conditions {
    /// Factor on the load.
    pub load: f64,
    /// Factor on the limits of the objectives.
    pub slo: f64,
    /// Factor on the duration of steps.
    pub slower: f64,
    /// Number of the seed, from 0.
    pub seed: u64,
}

impl Conditions {
    /// Those of the question.
    pub const PLAIN: Conditions = Conditions {
        load: 1.0,
        slo: 1.0,
        slower: 1.0,
        seed: 0,
    };

    fn key(&self) -> [u64; 4] {
        [
            self.load.to_bits(),
            self.slo.to_bits(),
            self.slower.to_bits(),
            self.seed,
        ]
    }
}

/// A simulation to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Index of the shape.
    pub shape: usize,
    /// Index of the shape's setting.
    pub setting: usize,
    /// Size.
    pub workers: u32,
    /// Index of the part of the workload; the last one is all of it.
    pub part: usize,
    /// Its conditions.
    pub conditions: Conditions,
    /// Seeds that are judged together: the run is stopped beyond the misses that they may have in all. Beyond the question's seeds
    /// these count again.
    pub spare: u64,
}

/// Result of a trial.
#[derive(Clone, Debug, PartialEq)]
pub struct TrialResult {
    /// Whether it attains.
    pub attains: bool,
    /// Whether it ran to its end.
    pub complete: bool,
    /// Requests of each class, and those of them that met their objectives. Shape `[classes]`.
    pub by_class: Vec<(u64, u64)>,
    /// Share of requests that met their objectives, of the class with the lowest one. If the trial
    /// was stopped because it can no longer attain: among those that had ended, which rises with
    /// the time until then.
    pub share: f64,
    /// Requests of that class, of which `share` met their objectives.
    pub judged: u64,
    /// Of the times of all requests until the trial ended or was stopped: trials of one shape, size and part with equal digests ran
    /// alike.
    pub digest: u64,
    /// Requests that were simulated, those under way when it was stopped included.
    pub requests: u64,
}

impl TrialResult {
    /// Whether two runs were the same to their ends. Of runs that were stopped, what follows may differ.
    fn ran_alike(&self, other: &TrialResult) -> bool {
        self.complete && other.complete && self.digest == other.digest
    }

    /// Of runs with several seeds: every class attains over all of them.
    fn merge_seeds(each: &[TrialResult], target: f64) -> TrialResult {
        let mut by_class: Vec<(u64, u64)> = Vec::new();
        for measured in each {
            for (at, &(all, met)) in measured.by_class.iter().enumerate() {
                if at >= by_class.len() {
                    by_class.resize(at + 1, (0, 0));
                }
                by_class[at].0 += all;
                by_class[at].1 += met;
            }
        }
        let complete = each.iter().all(|measured| measured.complete);
        let share = |&(all, met): &(u64, u64)| met as f64 / all.max(1) as f64;
        let judged = by_class.iter().filter(|class| class.0 > 0);
        let lowest = judged.min_by(|a, b| share(a).total_cmp(&share(b)));
        let few = |&(all, met): &(u64, u64)| all - met <= allowed(all, target);
        TrialResult {
            attains: complete && by_class.iter().all(few),
            complete,
            share: lowest.map_or(0.0, share),
            judged: lowest.map_or(0, |class| class.0),
            digest: each.iter().fold(0, |sum, each| mix64(sum ^ each.digest)),
            requests: each.iter().map(|each| each.requests).sum(),
            by_class,
        }
    }
}

/// Runs trials.
pub trait Evaluate {
    /// Why a trial cannot run. Ends the search.
    type Error;

    /// Runs trials in any order; results in the order of `trials`.
    ///
    /// # Errors
    /// If one cannot run.
    fn run(
        &mut self,
        trials: &[Trial],
        progress: &Progress,
    ) -> Result<Vec<TrialResult>, Self::Error>;

    /// The first setting of the shape that gives the same cluster at this size. The search runs one of them.
    fn same(&self, _shape: usize, setting: usize, _workers: u32) -> usize {
        setting
    }
}

/// How far the search is, for people.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Progress {
    /// Current step of the search.
    pub phase: &'static str,
    /// Work done, in runs of the whole workload.
    pub done: f64,
    /// Work expected in all, in the same unit; an estimate.
    pub expected: f64,
}

/// A candidate with its size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Index of the shape.
    pub shape: usize,
    /// Index of its setting.
    pub setting: usize,
    /// The smallest size that attains.
    pub workers: u32,
    /// Cost per hour.
    pub cost: f64,
    /// Share of requests that met their objectives.
    pub share: f64,
}

/// A trial that does not attain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NearMiss {
    /// The trial.
    pub trial: Trial,
    /// Its share.
    pub share: f64,
}

/// The search for one question.
pub struct Search<'a, E: Evaluate> {
    shapes: &'a [Candidate],
    target: f64,
    /// Share of the workload in each part; the last one is 1.
    parts: &'a [f64],
    /// The part that answers are found on.
    main: usize,
    /// Conditions of the question itself.
    plain: Conditions,
    /// Seeds on which an answer attains together.
    seeds: u64,
    evaluate: &'a mut E,
    /// Results, with the `spare` of their trials.
    seen: BTreeMap<Key, (u64, TrialResult)>,
    /// Best setting known of each shape, and its size on the largest part so far.
    known: Vec<Option<(usize, u32)>>,
    /// Shape and setting preferred among equal costs.
    preferred: Option<(usize, usize)>,
    /// Requests that the proofs of rows may still take.
    proof_left: u64,
    progress: Progress,
    /// Requests simulated.
    pub requests: u64,
    /// Trials run.
    pub trials: u64,
    /// Whether the answer is proven: all that is cheaper was simulated, and does not attain.
    pub proven: bool,
}

type Key = (usize, usize, u32, usize, [u64; 4]);

/// Where candidates are compared, under the conditions of the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stage {
    part: usize,
    /// Seeds that are judged together, the first ones.
    seeds: u64,
}

/// Distance to the target below which a share nearly attains.
const NEAR: f64 = 0.02;
/// A shape whose share is this far below the target at a size is not tried with every setting there.
const FAR: f64 = 0.1;
/// A size whose share of misses is at most this many times the allowed one misses by chance: fewer workers may attain.
const CHANCE: f64 = 1.5;
/// One of this many candidates is kept on the next part.
const KEEP: usize = 4;
/// Candidates that are always kept.
const KEEP_MIN: usize = 6;
/// Limit of rounds of challenges.
const ROUNDS_MAX: usize = 8;
impl<'a, E: Evaluate> Search<'a, E> {
    /// A search among `shapes` for the cheapest that attains `target`. `parts`: the share of the whole
    /// workload in each of its parts, rising to 1; answers are found on part `main` with the first seed, and
    /// settled on the last one with `seeds` of them. `plain`: the conditions of the question.
    pub fn new(
        shapes: &'a [Candidate],
        target: f64,
        parts: &'a [f64],
        main: usize,
        plain: Conditions,
        seeds: u64,
        evaluate: &'a mut E,
    ) -> Search<'a, E> {
        assert!(parts.last() == Some(&1.0), "the last part is the whole");
        Search {
            known: vec![None; shapes.len()],
            preferred: None,
            proof_left: proof::REQUESTS,
            proven: false,
            shapes,
            target,
            parts,
            main,
            plain,
            seeds,
            evaluate,
            seen: BTreeMap::new(),
            progress: Progress::default(),
            requests: 0,
            trials: 0,
        }
    }

    /// Prefers this shape in this setting to all others that cost as much: the answer to a question that differs a little.
    #[must_use]
    pub fn preferring(mut self, shape: usize, setting: usize) -> Search<'a, E> {
        self.preferred = Some((shape, setting));
        self
    }

    fn whole_part(&self) -> usize {
        self.main
    }

    fn stage_of_part(part: usize) -> Stage {
        Stage { part, seeds: 1 }
    }

    /// Where answers are found.
    fn main_stage(&self) -> Stage {
        Self::stage_of_part(self.main)
    }

    /// Where answers must attain.
    fn last_stage(&self) -> Stage {
        Stage {
            part: self.parts.len() - 1,
            seeds: self.seeds,
        }
    }

    /// Announces a phase that is expected to take `work` runs of the whole workload, with `later` after
    /// it.
    fn phase(&mut self, name: &'static str, work: f64, later: f64) {
        self.progress.phase = name;
        self.progress.expected = self.progress.done + work + later;
    }

    /// Identity of a trial. Settings that give the same cluster have one.
    fn key(&self, trial: &Trial) -> Key {
        let &Trial {
            shape,
            setting,
            workers,
            part,
            conditions,
            ..
        } = trial;
        let setting = self.evaluate.same(shape, setting, workers);
        (shape, setting, workers, part, conditions.key())
    }

    /// The result of a trial, if it ran. One that was stopped tells nothing about larger spares.
    fn result(&self, trial: &Trial) -> Option<&TrialResult> {
        let (spare, measured) = self.seen.get(&self.key(trial))?;
        (measured.complete || *spare >= trial.spare).then_some(measured)
    }

    /// Runs trials that have not run before.
    fn run(&mut self, trials: &[Trial]) -> Result<Vec<TrialResult>, E::Error> {
        let mut new: Vec<Trial> = Vec::new();
        let mut keys: BTreeSet<Key> = BTreeSet::new();
        for trial in trials {
            if self.result(trial).is_some() {
                continue;
            }
            let key = self.key(trial);
            if keys.insert(key) {
                new.push(*trial);
            } else if let Some(same) = new.iter_mut().find(|other| self.key(other) == key) {
                // The longer of two runs tells what the shorter one does.
                same.spare = same.spare.max(trial.spare);
            }
        }
        if !new.is_empty() {
            let measured = self.evaluate.run(&new, &self.progress)?;
            for (trial, measured) in new.iter().zip(measured) {
                self.requests += measured.requests;
                self.trials += 1;
                self.progress.done += self.parts[trial.part];
                self.seen.insert(self.key(trial), (trial.spare, measured));
            }
            self.progress.expected = self.progress.expected.max(self.progress.done);
        }
        let result = |trial: &Trial| self.seen[&self.key(trial)].1.clone();
        Ok(trials.iter().map(result).collect())
    }

    /// Runs trials of the first seed with all seeds of a stage. A run is stopped when it has more misses than all of them may have
    /// together, and the other seeds are not run then.
    fn run_at(&mut self, trials: &[Trial], stage: Stage) -> Result<Vec<TrialResult>, E::Error> {
        if stage.seeds == 1 {
            return self.run(trials);
        }
        let of_seed = |trial: &Trial, seed| Trial {
            spare: stage.seeds,
            conditions: Conditions {
                seed,
                ..trial.conditions
            },
            ..*trial
        };
        let first: Vec<Trial> = trials.iter().map(|trial| of_seed(trial, 0)).collect();
        let firsts = self.run(&first)?;
        let open = trials.iter().zip(&firsts);
        let open = open.filter(|(_, first)| first.complete);
        let others: Vec<Trial> = open
            .flat_map(|(trial, _)| (1..stage.seeds).map(|seed| of_seed(trial, seed)))
            .collect();
        let mut others = self.run(&others)?.into_iter();
        let target = self.target;
        Ok(firsts
            .into_iter()
            .map(|first| {
                let more = if first.complete { stage.seeds - 1 } else { 0 };
                let each: Vec<TrialResult> = std::iter::once(first)
                    .chain(others.by_ref().take(width::to_usize(more)))
                    .collect();
                TrialResult::merge_seeds(&each, target)
            })
            .collect())
    }

    /// Sizes candidates on a part; all of them advance together.
    fn size(&mut self, jobs: &mut [(usize, usize, Sizing)], stage: Stage) -> Result<(), E::Error> {
        loop {
            let (at, trials): (Vec<usize>, Vec<Trial>) = jobs
                .iter()
                .enumerate()
                .filter_map(|(at, (shape, setting, sizing))| {
                    Some((at, self.trial_at(*shape, *setting, sizing.next?, stage)))
                })
                .unzip();
            if at.is_empty() {
                return Ok(());
            }
            let measured = self.run_at(&trials, stage)?;
            for ((at, trial), measured) in at.iter().zip(&trials).zip(&measured) {
                jobs[*at].2.take(trial.workers, measured);
            }
        }
    }

    fn sizing(&self, shape: usize, start: u32, near: bool) -> Sizing {
        let of = &self.shapes[shape];
        Sizing::new(
            of.workers_min.max(1),
            of.workers_max,
            start,
            near,
            self.target,
        )
    }

    fn choice_of(&self, job: &(usize, usize, Sizing)) -> Option<Choice> {
        let workers = job.2.attains?;
        Some(Choice {
            shape: job.0,
            setting: job.1,
            workers,
            cost: self.shapes[job.0].cost_of(workers),
            share: job.2.attained_share,
        })
    }

    /// The cheapest candidate that attains on the whole workload; `None` if none does. Of equally cheap ones
    /// the simpler, and then the one with more headroom on the largest part. `others`: answers to questions that
    /// differ a little, such as in the load. The answer does not cost more than these in the sizes that attain
    /// here, and only what costs less is searched.
    ///
    /// # Errors
    /// As the evaluation's.
    pub fn find(&mut self, others: &[Choice]) -> Result<Option<Choice>, E::Error> {
        let later = 8.0 + self.shapes.len() as f64;
        let stage = self.main_stage();
        self.phase("known answers", 2.0 * others.len() as f64, later);
        let mut best: Option<Choice> = None;
        for other in others {
            best = self.near_answer(best, other)?;
        }
        let mut sizes = self.size_shapes(best, later)?;
        if best.is_none() {
            best = self.first_answer(&sizes)?;
        }
        self.try_settings(best, &mut sizes)?;
        if best.is_none() {
            best = self.first_answer(&sizes)?;
        }
        let ranked = self.halve(best, &sizes, later)?;
        self.phase("whole workload", later * 0.6, later * 0.4);
        best = self.race(best, &ranked, stage)?;
        self.phase("challenges", later * 0.4, 0.0);
        best = self.challenge(best, stage)?;
        best = self.settle(best)?;
        if let Some(best) = best {
            self.known[best.shape] = Some((best.setting, best.workers));
        }
        Ok(best)
    }

    /// Sizes the answer to a question that differs a little, with the split that is best here. It comes near its size on the parts.
    /// Result: the cheaper one of it and `best`.
    fn near_answer(
        &mut self,
        best: Option<Choice>,
        other: &Choice,
    ) -> Result<Option<Choice>, E::Error> {
        let shape = other.shape;
        let (mut setting, mut workers) = (other.setting, other.workers);
        let splits: Vec<(usize, usize)> = self.shapes[shape]
            .with_split_of(setting)
            .into_iter()
            .filter(|&split| self.shapes[shape].only_change(setting, split) == Some(SPLIT))
            .chain([setting])
            .map(|split| (shape, split))
            .collect();
        for part in 0..self.whole_part() {
            let mut job = [(shape, setting, self.sizing(shape, workers, true))];
            self.size(&mut job, Self::stage_of_part(part))?;
            let Some(sized) = self.choice_of(&job[0]) else {
                continue;
            };
            if let Some(found) = self.race(Some(sized), &splits, Self::stage_of_part(part))? {
                (setting, workers) = (found.setting, found.workers);
            }
        }
        self.size_below(best, shape, setting, workers)
    }

    /// Sizes a candidate where answers are found, near a size that it may have. Result: the cheaper one of it and `best`.
    fn size_below(
        &mut self,
        best: Option<Choice>,
        shape: usize,
        setting: usize,
        near: u32,
    ) -> Result<Option<Choice>, E::Error> {
        let Some(max) = self.largest_cheaper_size(best, shape) else {
            return Ok(best);
        };
        let min = self.shapes[shape].workers_min.max(1);
        let sizing = Sizing::new(min, max, near.min(max), true, self.target);
        let mut job = [(shape, setting, sizing)];
        self.size(&mut job, self.main_stage())?;
        let sized = self.choice_of(&job[0]);
        if let Some(sized) = sized {
            self.known[shape] = Some((setting, sized.workers));
        }
        Ok(sized.or(best))
    }

    /// The largest size of a shape that is cheaper than `best`; the largest of all if there is none.
    fn largest_cheaper_size(&self, best: Option<Choice>, shape: usize) -> Option<u32> {
        let of = &self.shapes[shape];
        match best {
            Some(best) => of.cheaper_than(best.cost),
            None => (of.workers_max >= of.workers_min.max(1)).then_some(of.workers_max),
        }
    }

    /// An answer to improve on: of the shapes that were sized, the cheapest that attains on the whole workload. Each is sized on
    /// growing parts, as it takes few requests to come near its size there.
    fn first_answer(&mut self, sizes: &[Option<(usize, u32)>]) -> Result<Option<Choice>, E::Error> {
        let each = sizes.iter().enumerate();
        let mut order: Vec<(usize, usize, u32)> = each
            .filter_map(|(shape, size)| size.map(|(part, workers)| (shape, part, workers)))
            .collect();
        let cost = |of: &(usize, usize, u32)| self.shapes[of.0].cost_of(of.2);
        order.sort_by(|a, b| cost(a).total_cmp(&cost(b)).then(a.0.cmp(&b.0)));
        for (shape, part, mut workers) in order {
            let setting = self.setting(shape);
            for part in part + 1..self.whole_part() {
                let mut job = [(shape, setting, self.sizing(shape, workers, true))];
                self.size(&mut job, Self::stage_of_part(part))?;
                workers = job[0].2.attains.unwrap_or(workers);
            }
            let best = self.size_below(None, shape, setting, workers)?;
            if best.is_some() {
                return Ok(best);
            }
        }
        Ok(None)
    }

    fn trial(&self, shape: usize, setting: usize, workers: u32) -> Trial {
        self.trial_at(shape, setting, workers, self.main_stage())
    }

    /// The trial of the first seed.
    fn trial_at(&self, shape: usize, setting: usize, workers: u32, stage: Stage) -> Trial {
        Trial {
            shape,
            setting,
            workers,
            part: stage.part,
            conditions: self.plain,
            spare: 1,
        }
    }

    /// The best setting known of a shape; the base, if none is.
    fn setting(&self, shape: usize) -> usize {
        self.known[shape].map_or(0, |known| known.0)
    }

    /// The trial on the whole workload that came nearest without attaining.
    pub fn nearest(&self) -> Option<NearMiss> {
        let whole = self.whole_part();
        let plain = self.plain;
        self.seen
            .iter()
            .filter(|((_, _, _, part, key), (_, measured))| {
                *part == whole && *key == plain.key() && !measured.attains
            })
            .map(|(&(shape, setting, workers, ..), (_, measured))| NearMiss {
                trial: self.trial(shape, setting, workers),
                share: measured.share,
            })
            .max_by(|a, b| {
                let cost = |n: &NearMiss| self.shapes[n.trial.shape].cost_of(n.trial.workers);
                // The cheaper of equal ones.
                a.share
                    .total_cmp(&b.share)
                    .then(cost(b).total_cmp(&cost(a)))
            })
    }
}

#[cfg(test)]
mod tests;
