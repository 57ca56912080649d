//! Which trials to run, and the answer that follows from them.
//!
//! A *candidate* is a shape with a setting; its size is a number of workers. The search assumes that
//! more workers attain whenever fewer do, and finds the smallest size by bisection. It sizes every
//! promising shape on a small part of the workload. There it tries all settings at the largest size that
//! would be cheaper than the best one; most miss soon, which takes few requests. The better quarter goes
//! on to larger parts (successive halving). On the whole workload the best is sized, and then challenged
//! in the same way by those that are left, by every shape, and by the better settings of shapes that
//! nearly attain.
//!
//! Trials are asked for in batches that depend on results alone.

mod settle;
mod sizing;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use slipstream_base::mix::mix64;
use slipstream_base::width;

use self::sizing::Sizing;
use crate::trial::allowed;

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
    /// The run is stopped at this many times the misses that it may have: the number of seeds that are judged together.
    pub spare: u64,
}

/// Result of a trial.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
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
    /// Of the times of all requests: trials of one shape, size and part with equal digests ran alike.
    pub digest: u64,
    /// Requests that were simulated, those under way when it was stopped included.
    pub requests: u64,
}

impl Measured {
    /// Of runs with several seeds: every class attains over all of them.
    fn together(each: &[Measured], target: f64) -> Measured {
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
        Measured {
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
    fn run(&mut self, trials: &[Trial], progress: &Progress) -> Result<Vec<Measured>, Self::Error>;

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

/// A setting as the index of its value on each axis of settings. Splits of prefill and decode workers are [`SPLIT`].
pub type Place = [usize; 4];

/// The axis of splits: those of one prefill worker more or less have indices that differ by 1.
const SPLIT: usize = 3;

/// A shape, as far as the search needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Cost of one worker per hour, above 0.
    pub cost: f64,
    /// Fewest workers that form a cluster: 2 if prefill and decode have workers of their own.
    pub workers_least: u32,
    /// Sizes below this cannot attain.
    pub workers_min: u32,
    /// Sizes above this are not tried.
    pub workers_max: u32,
    /// The number of its settings that are tried in all combinations, at least 1; 0 is the base.
    pub settings: usize,
    /// Its settings as places on the axes: those, and then others that are tried only next to good ones.
    pub places: Vec<Place>,
    /// Shapes of one kind compete for a place of their own in the table, such as GPUs of one preset.
    pub kind: usize,
    /// Whether prefill and decode have workers of their own: of equally cheap shapes, one without is
    /// preferred.
    pub apart: bool,
    /// Whether workers keep KV blocks in host memory: likewise, one without is preferred.
    pub hosts_kv: bool,
}

impl Candidate {
    /// Order of preference among equally cheap shapes, the first one being the simplest.
    fn simplicity(&self) -> (bool, bool) {
        (self.apart, self.hosts_kv)
    }

    /// Settings that differ from one in one value; of the splits that are not tried in all combinations, the next ones.
    fn neighbors(&self, of: usize) -> Vec<usize> {
        let is_near = |&other: &usize| match self.only_change(of, other) {
            Some(SPLIT) if of.max(other) >= self.settings => self.is_next_split(of, other),
            axis => axis.is_some(),
        };
        (0..self.places.len()).filter(is_near).collect()
    }

    /// Settings that differ from one in a prefill worker more or less.
    fn next_splits(&self, of: usize) -> Vec<usize> {
        let is_next = |&other: &usize| {
            self.only_change(of, other) == Some(SPLIT) && self.is_next_split(of, other)
        };
        (0..self.places.len()).filter(is_next).collect()
    }

    fn is_next_split(&self, a: usize, b: usize) -> bool {
        self.places[a][SPLIT].abs_diff(self.places[b][SPLIT]) == 1
    }

    /// The settings that are tried in all combinations, and those with the split of this one.
    fn with_split_of(&self, setting: usize) -> Vec<usize> {
        let split = self.places[setting][SPLIT];
        (0..self.places.len())
            .filter(|&other| other < self.settings || self.places[other][SPLIT] == split)
            .collect()
    }

    /// The axis on which two settings differ; `None` unless it is one.
    fn only_change(&self, a: usize, b: usize) -> Option<usize> {
        let (a, b) = (self.places[a], self.places[b]);
        let mut axes = (0..a.len()).filter(|&axis| a[axis] != b[axis]);
        axes.next().filter(|_| axes.next().is_none())
    }

    /// Cost of `workers` workers.
    pub fn cost_of(&self, workers: u32) -> f64 {
        self.cost * f64::from(workers)
    }

    /// The size that costs `cost`, if there is one.
    fn size_for(&self, cost: f64) -> Option<u32> {
        let workers = (cost / self.cost).round();
        let same = (self.cost * workers - cost).abs() <= cost * 1e-9;
        let fits =
            workers >= f64::from(self.workers_min.max(1)) && workers <= f64::from(self.workers_max);
        (same && fits).then(|| width::floor_u32(workers))
    }

    /// The largest size that costs less than `cost`; `None` if even the smallest does not.
    fn cheaper_than(&self, cost: f64) -> Option<u32> {
        let mut workers = width::floor_u32((cost / self.cost).ceil());
        // Sums of prices are not exact: equal cost is not less.
        while workers > 0 && self.cost_of(workers) >= cost * (1.0 - 1e-9) {
            workers -= 1;
        }
        let workers = workers.min(self.workers_max);
        (workers >= self.workers_min.max(1)).then_some(workers)
    }
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
pub struct Nearest {
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
    seen: BTreeMap<Key, (u64, Measured)>,
    /// Best setting known of each shape, and its size on the largest part so far.
    known: Vec<Option<(usize, u32)>>,
    /// Shape and setting preferred among equal costs.
    preferred: Option<(usize, usize)>,
    progress: Progress,
    /// Requests simulated.
    pub requests: u64,
    /// Trials run.
    pub trials: u64,
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
/// A size whose share of misses is at most this many times the allowed one misses by chance: fewer workers may attain.
const CHANCE: f64 = 1.5;
/// Limit of values that are changed in the base setting of a shape that attains with it at no size.
const CHANGES_MAX: usize = 4;
/// A shape whose cost on a part is above the lowest one by more than this factor is not promising, unless one worker
/// less makes up for it.
const PROMISING: f64 = 1.5;
/// A shape whose share is this far below the target at a size is not tried with every setting there.
const FAR: f64 = 0.1;
/// A value of a setting is far worse if it takes this factor on the misses.
const WORSE: f64 = 2.0;
/// Limit of candidates that are tried before the best of them is sized.
const BATCH_MAX: usize = 8;
/// One of this many candidates is kept on the next part.
const KEEP: usize = 4;
/// Candidates that are always kept.
const KEEP_MIN: usize = 6;
/// Limit of rounds of challenges.
const ROUNDS_MAX: usize = 8;
/// Growth of the load at which candidates of equal cost are compared.
const LOAD_GROWTH: f64 = 1.3;
/// Limit of candidates that cost as much as the answer and are compared with it.
const EQUAL_MAX: usize = 8;

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

    fn whole(&self) -> usize {
        self.main
    }

    fn on(part: usize) -> Stage {
        Stage { part, seeds: 1 }
    }

    /// Where answers are found.
    fn main_stage(&self) -> Stage {
        Self::on(self.main)
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
    fn result(&self, trial: &Trial) -> Option<&Measured> {
        let (spare, measured) = self.seen.get(&self.key(trial))?;
        (measured.complete || *spare >= trial.spare).then_some(measured)
    }

    /// Runs trials that have not run before.
    fn run(&mut self, trials: &[Trial]) -> Result<Vec<Measured>, E::Error> {
        let mut new: Vec<Trial> = Vec::new();
        let mut keys: BTreeSet<Key> = BTreeSet::new();
        for trial in trials {
            if self.result(trial).is_none() && keys.insert(self.key(trial)) {
                new.push(*trial);
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
    fn run_at(&mut self, trials: &[Trial], stage: Stage) -> Result<Vec<Measured>, E::Error> {
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
                let each: Vec<Measured> = std::iter::once(first)
                    .chain(others.by_ref().take(width::to_usize(more)))
                    .collect();
                Measured::together(&each, target)
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

    fn sized(&self, job: &(usize, usize, Sizing)) -> Option<Choice> {
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
        for part in 0..self.whole() {
            let mut job = [(shape, setting, self.sizing(shape, workers, true))];
            self.size(&mut job, Self::on(part))?;
            let Some(sized) = self.sized(&job[0]) else {
                continue;
            };
            if let Some(found) = self.race(Some(sized), &splits, Self::on(part))? {
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
        let Some(max) = self.below(best, shape) else {
            return Ok(best);
        };
        let min = self.shapes[shape].workers_min.max(1);
        let sizing = Sizing::new(min, max, near.min(max), true, self.target);
        let mut job = [(shape, setting, sizing)];
        self.size(&mut job, self.main_stage())?;
        let sized = self.sized(&job[0]);
        if let Some(sized) = sized {
            self.known[shape] = Some((setting, sized.workers));
        }
        Ok(sized.or(best))
    }

    /// The largest size of a shape that is cheaper than `best`; the largest of all if there is none.
    fn below(&self, best: Option<Choice>, shape: usize) -> Option<u32> {
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
            for part in part + 1..self.whole() {
                let mut job = [(shape, setting, self.sizing(shape, workers, true))];
                self.size(&mut job, Self::on(part))?;
                workers = job[0].2.attains.unwrap_or(workers);
            }
            let best = self.size_below(None, shape, setting, workers)?;
            if best.is_some() {
                return Ok(best);
            }
        }
        Ok(None)
    }

    /// Challenges `best` with every shape in its best known setting, and in every setting where it is near, until none is
    /// cheaper.
    fn challenge(
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
            let near = self.near(best, stage)?;
            best = self.race(best, &near, stage)?;
            if best == before {
                break;
            }
        }
        Ok(best)
    }

    /// Settings of shapes with workers of two kinds with one prefill worker more or less, or some, if that is better at the largest size
    /// that is cheaper than `best`. Without `best`, settings of all shapes that are better at the largest size.
    fn other_splits(
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
            let Some(workers) = self.below(best, shape).filter(|_| has_others) else {
                continue;
            };
            let (setting, _) = self.ascend(shape, first, workers, stage, near)?;
            if setting != first {
                better.push((shape, setting));
            }
        }
        Ok(better)
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

    /// Sizes every shape with its best known setting, on the smallest part on which it can be. Cheap sizes are
    /// tried first; shapes that are not promising at the sizes that are left are not tried. Larger parts are for GPUs of
    /// which no shape attains on a smaller one. `best`: an answer to improve on. Result: part and size. Shape `[shapes]`.
    fn size_shapes(
        &mut self,
        best: Option<Choice>,
        later: f64,
    ) -> Result<Vec<Option<(usize, u32)>>, E::Error> {
        let mut sizes: Vec<Option<(usize, u32)>> = vec![None; self.shapes.len()];
        let mut kinds: Vec<usize> = best
            .iter()
            .map(|best| self.shapes[best.shape].kind)
            .collect();
        for part in 0..=self.whole() {
            let of_kind = sizes.iter().zip(self.shapes);
            kinds.extend(of_kind.filter_map(|(size, of)| size.map(|_| of.kind)));
            let open: Vec<usize> = (0..self.shapes.len())
                .filter(|&shape| part == 0 || !kinds.contains(&self.shapes[shape].kind))
                .collect();
            self.phase("sizes", self.parts[part] * 3.0 * open.len() as f64, later);
            let mut jobs: Vec<(usize, usize, Sizing)> = open
                .into_iter()
                .map(|shape| {
                    let known = self.known[shape];
                    let start = known.map_or(self.shapes[shape].workers_min.max(1), |k| k.1);
                    let sizing = self.sizing(shape, start, known.is_some());
                    (shape, self.setting(shape), sizing)
                })
                .collect();
            loop {
                for job in &mut jobs {
                    let found = job.2.attains.map(|workers| (part, workers));
                    sizes[job.0] = sizes[job.0].filter(|_| found.is_none()).or(found);
                }
                for (shape, _, sizing) in &mut jobs {
                    // A smaller step, if the next size is too large to be promising.
                    while let Some(next) = sizing.next
                        && !self.is_promising(best, &sizes, *shape, next)
                    {
                        sizing.next = Some(u32::midpoint(sizing.fails, next))
                            .filter(|&between| between > sizing.fails && between < next);
                    }
                }
                let cost =
                    |job: &(usize, usize, Sizing)| Some(self.shapes[job.0].cost_of(job.2.next?));
                let least = jobs.iter().filter_map(cost).fold(f64::INFINITY, f64::min);
                if least.is_infinite() {
                    break;
                }
                let (at, trials): (Vec<usize>, Vec<Trial>) = (0..jobs.len())
                    .filter(|&at| cost(&jobs[at]).is_some_and(|cost| cost <= least * PROMISING))
                    .filter_map(|at| {
                        let trial = Trial {
                            part,
                            ..self.trial(jobs[at].0, jobs[at].1, jobs[at].2.next?)
                        };
                        Some((at, trial))
                    })
                    .unzip();
                let measured = self.run(&trials)?;
                for ((at, trial), measured) in at.iter().zip(&trials).zip(&measured) {
                    jobs[*at].2.take(trial.workers, measured);
                }
            }
        }
        for (shape, size) in sizes.iter().enumerate() {
            if let Some((_, workers)) = *size {
                self.known[shape] = Some((self.setting(shape), workers));
            }
        }
        Ok(sizes)
    }

    /// Tries other settings of the shapes that are at no size promising with the base: at the largest size that is cheaper than the
    /// best one.
    fn try_settings(
        &mut self,
        best: Option<Choice>,
        sizes: &mut [Option<(usize, u32)>],
    ) -> Result<(), E::Error> {
        let least = self.lowest(best, sizes, None);
        for shape in 0..self.shapes.len() {
            let of = &self.shapes[shape];
            let promising = |size: (usize, u32)| self.is_promising(best, sizes, shape, size.1);
            if of.settings == 1 || sizes[shape].is_some_and(promising) {
                continue;
            }
            let workers = if least.is_finite() {
                of.cheaper_than(least)
            } else {
                Some(of.workers_max)
            };
            let Some(workers) = workers else { continue };
            let first = self.setting(shape);
            let (setting, most) =
                self.ascend(shape, first, workers, Self::on(0), Candidate::neighbors)?;
            if most.attains {
                sizes[shape] = Some((0, workers));
                self.known[shape] = Some((setting, workers));
            }
        }
        Ok(())
    }

    /// Changes one value of a setting at a time, as long as more requests meet their objectives, until it attains. `near`: settings
    /// to try instead of one.
    fn ascend(
        &mut self,
        shape: usize,
        mut setting: usize,
        workers: u32,
        stage: Stage,
        near: fn(&Candidate, usize) -> Vec<usize>,
    ) -> Result<(usize, Measured), E::Error> {
        let first = self.trial_at(shape, setting, workers, stage);
        let mut most = self.run(&[first])?.remove(0);
        for _ in 0..CHANGES_MAX {
            if most.attains {
                break;
            }
            let others = near(&self.shapes[shape], setting);
            let trial = |&other: &usize| self.trial_at(shape, other, workers, stage);
            let trials: Vec<Trial> = others.iter().map(trial).collect();
            let measured = self.run(&trials)?;
            let mut better = None;
            for (near, measured) in others.into_iter().zip(measured) {
                if (measured.attains, measured.share) > (most.attains, most.share) {
                    most = measured;
                    better = Some(near);
                }
            }
            let Some(better) = better else { break };
            setting = better;
        }
        Ok((setting, most))
    }

    /// The lowest cost of the sizes and of `best`, or of the sizes of a kind.
    fn lowest(
        &self,
        best: Option<Choice>,
        sizes: &[Option<(usize, u32)>],
        kind: Option<usize>,
    ) -> f64 {
        let each = self.shapes.iter().zip(sizes);
        let sized = each.filter(|(shape, _)| kind.is_none_or(|kind| shape.kind == kind));
        let costs = sized.filter_map(|(shape, size)| Some(shape.cost_of((*size)?.1)));
        let best = best.filter(|best| kind.is_none_or(|kind| self.shapes[best.shape].kind == kind));
        costs
            .chain(best.map(|best| best.cost))
            .fold(f64::INFINITY, f64::min)
    }

    /// Whether a shape that needs `workers` with its base setting may be the cheapest with another one, or is
    /// the cheapest of its kind.
    fn is_promising(
        &self,
        best: Option<Choice>,
        sizes: &[Option<(usize, u32)>],
        shape: usize,
        workers: u32,
    ) -> bool {
        let of = &self.shapes[shape];
        let lowest = |kind: Option<usize>| self.lowest(best, sizes, kind);
        // Savings of a setting worth a factor of [`PROMISING`], in whole workers: half of two.
        let least = width::floor_u32(f64::from(workers.saturating_sub(1)) / PROMISING) + 1;
        let cost = of.cost_of(workers);
        of.cost_of(least) < lowest(None)
            || cost <= lowest(None) * PROMISING
            || cost <= lowest(Some(of.kind))
    }

    /// Tries the settings of promising shapes on growing parts, at sizes that are cheaper than `best`, and keeps the better ones.
    /// Result: shapes and settings, the most promising first.
    fn halve(
        &mut self,
        best: Option<Choice>,
        sizes: &[Option<(usize, u32)>],
        later: f64,
    ) -> Result<Vec<(usize, usize)>, E::Error> {
        let mut first: Vec<(f64, usize)> = Vec::new();
        for (shape, size) in sizes.iter().enumerate() {
            if let Some((_, workers)) = *size
                && self.is_promising(best, sizes, shape, workers)
                && self.below(best, shape).is_some()
            {
                first.push((self.shapes[shape].cost_of(workers), shape));
            }
        }
        first.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        // The known setting of each shape first: they lower the cost at which the others are tried.
        let known = first.iter().map(|&(_, shape)| (shape, self.setting(shape)));
        let mut ranked: Vec<(usize, usize)> = known.collect();
        if self.whole() > 0 {
            self.phase("settings", self.parts[0] * ranked.len() as f64, later);
        }
        for (_, shape) in first {
            for setting in self.worthwhile(best, shape)? {
                if !ranked.contains(&(shape, setting)) {
                    ranked.push((shape, setting));
                }
            }
        }
        for part in 0..self.whole() {
            let work = self.parts[part] * 0.5 * ranked.len() as f64;
            self.phase("settings", work, later);
            let cheapest = self.race(best, &ranked, Self::on(part))?;
            ranked = self.rank(cheapest, &ranked, Self::on(part))?;
            let keep = ranked.len().div_ceil(KEEP).max(KEEP_MIN);
            let mut kinds: Vec<usize> = Vec::new();
            let mut place = 0;
            ranked.retain(|&(shape, _)| {
                let kind = self.shapes[shape].kind;
                place += 1;
                let kept = place <= keep || !kinds.contains(&kind);
                if kept {
                    kinds.push(kind);
                }
                kept
            });
            // The first of each shape is its best.
            for &(shape, setting) in ranked.iter().rev() {
                if let Some(known) = &mut self.known[shape] {
                    known.0 = setting;
                }
            }
        }
        Ok(ranked)
    }

    /// The settings of a shape to try at the size below `best`. If the known one comes near, or one that is better by
    /// changes of one value at a time, all without the values that are far worse. Otherwise that one alone.
    fn worthwhile(&mut self, best: Option<Choice>, shape: usize) -> Result<Vec<usize>, E::Error> {
        let Some(workers) = self.below(best, shape) else {
            return Ok(Vec::new());
        };
        if self.whole() == 0 {
            return Ok((0..self.shapes[shape].settings).collect());
        }
        let stage = Self::on(0);
        let mut setting = self.setting(shape);
        let mut most = self
            .run(&[self.trial_at(shape, setting, workers, stage)])?
            .remove(0);
        if most.share < self.target - FAR {
            (setting, most) = self.ascend(shape, setting, workers, stage, Candidate::neighbors)?;
        }
        if !most.attains && most.share < self.target - FAR {
            return Ok(vec![setting]);
        }
        let near = self.shapes[shape].neighbors(setting);
        let trial = |&near: &usize| self.trial_at(shape, near, workers, stage);
        let trials: Vec<Trial> = near.iter().map(trial).collect();
        let measured = self.run(&trials)?;
        let of = &self.shapes[shape];
        let shares = near.iter().zip(&measured).map(|(&near, m)| (near, m.share));
        let first = (setting, most.share);
        let (better, most) = shares.fold(first, |a, b| if b.1 > a.1 { b } else { a });
        let least = (most - NEAR).min(1.0 - WORSE * (1.0 - most));
        let mut worse: Vec<(usize, usize)> = Vec::new();
        for (near, measured) in near.into_iter().zip(measured) {
            if let Some(axis) = of.only_change(setting, near)
                && !measured.attains
                && measured.share < least
            {
                worse.push((axis, of.places[near][axis]));
            }
        }
        let mut kept = of.with_split_of(better);
        kept.retain(|&other| {
            let place = of.places[other];
            worse.iter().all(|&(axis, value)| place[axis] != value)
        });
        Ok(kept)
    }

    /// Tries candidates at the largest size that is cheaper than `best`, some at a time. The best of those that attain is sized,
    /// and the others have to be cheaper than that, until none is. Without `best`, the first that attains at any size
    /// is sized. Result: the cheapest.
    fn race(
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
        while best.is_none()
            && let Some((shape, setting)) = open.pop_front()
        {
            let start = self.known[shape].map_or(self.shapes[shape].workers_min, |known| known.1);
            let mut job = [(shape, setting, self.sizing(shape, start, false))];
            self.size(&mut job, stage)?;
            best = self.sized(&job[0]);
            self.learn(best, stage);
        }
        let Some(mut best) = best else {
            return Ok(None);
        };
        // One that attains takes far more requests than one that does not. So few are tried at a time until most do not.
        let mut size = 1;
        while !open.is_empty() {
            let batch: Vec<(usize, usize)> = open.drain(..open.len().min(size)).collect();
            let mut trials: Vec<Trial> = Vec::new();
            for (shape, setting) in batch {
                // Otherwise its smallest cluster costs as much.
                if let Some(workers) = self.shapes[shape].cheaper_than(best.cost) {
                    trials.push(self.trial_at(shape, setting, workers, stage));
                }
            }
            if stage.seeds > 1 {
                let first = self.run(&trials)?;
                let mut first = first.iter();
                let near = self.target - NEAR;
                trials.retain(|_| first.next().is_some_and(|m| m.attains || m.share >= near));
            }
            let measured = self.run_at(&trials, stage)?;
            let mut attain: Vec<(Choice, Measured)> = Vec::new();
            for (trial, measured) in trials.iter().zip(measured) {
                let choice = Choice {
                    shape: trial.shape,
                    setting: trial.setting,
                    workers: trial.workers,
                    cost: self.shapes[trial.shape].cost_of(trial.workers),
                    share: measured.share,
                };
                if measured.attains {
                    attain.push((choice, measured));
                }
            }
            // The cheapest, and of these the one with the largest share; the first of equal ones.
            let next = attain.iter().reduce(|a, b| {
                let less = b.0.cost < a.0.cost * (1.0 - 1e-9);
                let same = b.0.cost <= a.0.cost * (1.0 + 1e-9);
                if less || same && b.0.share > a.0.share {
                    b
                } else {
                    a
                }
            });
            let Some((next, measured)) = next else {
                size = (size * 2).min(BATCH_MAX);
                continue;
            };
            size = 1;
            let min = self.shapes[next.shape].workers_min.max(1);
            let mut sizing = Sizing::new(min, next.workers, next.workers, true, self.target);
            sizing.take(next.workers, measured);
            let mut job = [(next.shape, next.setting, sizing)];
            self.size(&mut job, stage)?;
            best = self.sized(&job[0]).unwrap_or(*next);
            self.learn(Some(best), stage);
            // The others that attain are tried again, but those that ran alike.
            let mut runs: Vec<(usize, u32, u64)> = Vec::new();
            for (each, measured) in attain.iter().rev() {
                let run = (each.shape, each.workers, measured.digest);
                let same = (best.shape, best.setting) == (each.shape, each.setting);
                if !same && !runs.contains(&run) {
                    open.push_front((each.shape, each.setting));
                }
                runs.push(run);
            }
        }
        Ok(Some(best))
    }

    /// Keeps the setting and size of a shape that were found where answers are found, or the first ones.
    fn learn(&mut self, found: Option<Choice>, stage: Stage) {
        if let Some(found) = found
            && (stage.part >= self.whole() || self.known[found.shape].is_none())
        {
            self.known[found.shape] = Some((found.setting, found.workers));
        }
    }

    /// Candidates after a race that `best` won, best first: by their shares at the largest size that is cheaper than `best`. Those
    /// that ran exactly as a better one of the same shape, so that their settings have no effect there, are left out.
    fn rank(
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
            match self.below(best, shape) {
                Some(workers) => trials.push(self.trial_at(shape, setting, workers, stage)),
                None => dear.push((shape, setting)),
            }
        }
        let measured = self.run(&trials)?;
        let mut order: Vec<(&Trial, Measured)> = trials.iter().zip(measured).collect();
        // Sorting is stable: of equal ones the first.
        order.sort_by(|a, b| b.1.share.total_cmp(&a.1.share));
        let mut runs: BTreeSet<(usize, u32, u64)> = BTreeSet::new();
        for (trial, measured) in order {
            if runs.insert((trial.shape, trial.workers, measured.digest)) {
                ranked.push((trial.shape, trial.setting));
            }
        }
        ranked.extend(dear);
        Ok(ranked)
    }

    /// Settings of the shapes that nearly attain at the largest size that is cheaper than `best`, or at the largest of all: the
    /// better ones at that size on the parts.
    fn near(
        &mut self,
        best: Option<Choice>,
        stage: Stage,
    ) -> Result<Vec<(usize, usize)>, E::Error> {
        let mut all = Vec::new();
        for shape in 0..self.shapes.len() {
            let Some(workers) = self.below(best, shape) else {
                continue;
            };
            let share = |setting: usize| {
                let trial = self.trial_at(shape, setting, workers, stage);
                Some((setting, self.seen.get(&self.key(&trial))?.1.share))
            };
            let of = &self.shapes[shape];
            let known = (0..of.places.len()).filter_map(share);
            let nearest = known.reduce(|a, b| if b.1 > a.1 { b } else { a });
            if let Some((setting, share)) = nearest
                && share >= self.target - NEAR
            {
                let settings = of.with_split_of(setting);
                let better = self.better(shape, settings, workers, stage.part, KEEP_MIN)?;
                all.extend(better.into_iter().map(|setting| (shape, setting)));
            }
        }
        Ok(all)
    }

    /// The better ones of settings of a shape at a size, on the parts below `part`.
    fn better(
        &mut self,
        shape: usize,
        mut better: Vec<usize>,
        workers: u32,
        part: usize,
        keep_min: usize,
    ) -> Result<Vec<usize>, E::Error> {
        for part in 0..part {
            let trial = |&setting| self.trial_at(shape, setting, workers, Self::on(part));
            let trials: Vec<Trial> = better.iter().map(trial).collect();
            let measured = self.run(&trials)?;
            let mut ranked: Vec<(bool, f64, usize, u64)> = better
                .iter()
                .zip(&measured)
                .map(|(&setting, m)| (!m.attains, -m.share, setting, m.digest))
                .collect();
            ranked.sort_by(|a, b| a.partial_cmp(b).expect("shares are numbers"));
            let mut runs = Vec::new();
            ranked.retain(|each| {
                let new = !runs.contains(&each.3);
                runs.push(each.3);
                new
            });
            ranked.truncate(better.len().div_ceil(KEEP).min(KEEP_MIN * 2).max(keep_min));
            better = ranked.into_iter().map(|each| each.2).collect();
        }
        Ok(better)
    }

    /// Of the candidates that attain at the cost of `best`: one with workers of one kind, if any has, and of these
    /// one without host memory; and of these the one that attains at the highest load on the largest part that is not the whole.
    fn prefer(&mut self, best: Choice, stage: Stage) -> Result<Choice, E::Error> {
        self.phase("equal cost", 2.0, 0.0);
        if let Some((shape, setting)) = self.preferred
            && let Some(workers) = self.shapes[shape].size_for(best.cost)
        {
            let trial = self.trial_at(shape, setting, workers, stage);
            let measured = self.run_at(&[trial], stage)?.remove(0);
            if measured.attains {
                return Ok(Choice {
                    shape,
                    setting,
                    workers,
                    cost: best.cost,
                    share: measured.share,
                });
            }
        }
        let mut equal: Vec<Trial> = Vec::new();
        for (shape, of) in self.shapes.iter().enumerate() {
            let simple = of.simplicity() <= self.shapes[best.shape].simplicity();
            let Some(workers) = of.size_for(best.cost).filter(|_| simple) else {
                continue;
            };
            // The base setting, too: the best known one is that of smaller sizes, or of smaller parts.
            for setting in [0, self.setting(shape)] {
                let trial = self.trial(shape, setting, workers);
                if (shape, setting) != (best.shape, best.setting) && !equal.contains(&trial) {
                    equal.push(trial);
                }
            }
        }
        let simplicity = |trial: &Trial| self.shapes[trial.shape].simplicity();
        equal.sort_by_key(simplicity);
        equal.truncate(EQUAL_MAX);
        let mut found = best;
        let own = self.trial(best.shape, best.setting, best.workers);
        while !equal.is_empty() {
            // Simpler ones, if there are any, and then those like the answer.
            let simplest = simplicity(&equal[0]);
            let mut left: Vec<Trial> = equal.clone();
            left.retain(|trial| simplicity(trial) == simplest);
            if simplest == self.shapes[best.shape].simplicity() {
                left.push(own);
            }
            let first = self.strongest(left)?;
            if first == own {
                break;
            }
            let again = Trial {
                part: stage.part,
                ..first
            };
            let measured = self.run_at(&[again], stage)?.remove(0);
            if measured.attains {
                found = Choice {
                    shape: first.shape,
                    setting: first.setting,
                    workers: first.workers,
                    cost: best.cost,
                    share: measured.share,
                };
                break;
            }
            equal.retain(|trial| *trial != first);
        }
        Ok(found)
    }

    /// Of trials, at least one: the one that attains at the highest load on the largest part that is not the
    /// whole; the one that comes nearest if none does any more.
    fn strongest(&mut self, mut left: Vec<Trial>) -> Result<Trial, E::Error> {
        let part = self.whole().saturating_sub(1);
        let mut load = 1.0;
        while left.len() > 1 && load < LOAD_MAX {
            load *= LOAD_GROWTH;
            let conditions = Conditions {
                load: self.plain.load * load,
                ..self.plain
            };
            let trials: Vec<Trial> = left
                .iter()
                .map(|each| Trial {
                    part,
                    conditions,
                    ..*each
                })
                .collect();
            let measured = self.run(&trials)?;
            let attain = |at: &usize| measured[*at].attains;
            let kept: Vec<usize> = if measured.iter().any(|measured| measured.attains) {
                (0..left.len()).filter(attain).collect()
            } else {
                // The first of equal ones.
                let nearest = (0..left.len()).reduce(|a, b| {
                    if measured[b].share > measured[a].share {
                        b
                    } else {
                        a
                    }
                });
                nearest.into_iter().collect()
            };
            left = kept.into_iter().map(|at| left[at]).collect();
        }
        Ok(left[0])
    }

    /// Whether a configuration attains under each of `conditions`, on the whole workload.
    fn check(&mut self, of: &Choice, conditions: &[Conditions]) -> Result<Vec<Measured>, E::Error> {
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
    pub fn each_seed(&mut self, of: &Choice) -> Result<Vec<Measured>, E::Error> {
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
    pub fn around(&mut self, best: &Choice) -> Result<Vec<(u32, f64)>, E::Error> {
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
        let progress = self.progress.clone();
        let measured = self.evaluate.run(&trials, &progress)?;
        self.requests += measured.iter().map(|m| m.requests).sum::<u64>();
        Ok(sizes
            .into_iter()
            .zip(measured.iter().map(|m| m.share))
            .collect())
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

    /// The trial on the whole workload that came nearest without attaining.
    pub fn nearest(&self) -> Option<Nearest> {
        let whole = self.whole();
        let plain = self.plain;
        self.seen
            .iter()
            .filter(|((_, _, _, part, key), (_, measured))| {
                *part == whole && *key == plain.key() && !measured.attains
            })
            .map(|(&(shape, setting, workers, ..), (_, measured))| Nearest {
                trial: self.trial(shape, setting, workers),
                share: measured.share,
            })
            .max_by(|a, b| {
                let cost = |n: &Nearest| self.shapes[n.trial.shape].cost_of(n.trial.workers);
                // The cheaper of equal ones.
                a.share
                    .total_cmp(&b.share)
                    .then(cost(b).total_cmp(&cost(a)))
            })
    }
}

/// Resolution of the headroom, relative to the load.
pub const LOAD_STEP: f64 = 0.02;
/// Highest load tried for the headroom, relative to the question's.
pub const LOAD_MAX: f64 = 4.0;

/// Configurations that a search without bounds and bisection simulates to prove an answer that costs
/// `cost`: every shape, setting and size that costs no more, each on the whole workload. With workers
/// of two kinds (`apart`), every split. Shape of `apart`: `[shapes]`.
pub fn grid(shapes: &[Candidate], apart: &[bool], cost: f64) -> u64 {
    shapes
        .iter()
        .zip(apart)
        .map(|(shape, &apart)| {
            let most = (cost * (1.0 + 1e-9) / shape.cost).floor();
            let most = width::floor_u64(most).min(u64::from(shape.workers_max));
            let sizes = if apart {
                // 1 + 2 + … splits; factors on the share are not counted again.
                most * most.saturating_sub(1) / 2
            } else {
                most
            };
            let settings = shape.settings as u64;
            sizes
                * if apart {
                    settings.div_ceil(3)
                } else {
                    settings
                }
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestCaseError;

    use super::*;

    /// Candidates of known capacity: `workers` attain if their capacities add up to the load.
    struct Known {
        /// Requests per second of one worker. Shape `[shapes][settings]`.
        capacity: Vec<Vec<f64>>,
        /// Factor on it on parts, whose caches are cold. Shape `[shapes]`, or empty.
        cold: Vec<f64>,
        /// A size that misses by a little, whatever its capacity: shape and workers.
        unlucky: Option<(usize, u32)>,
        /// Settings beyond this one give the same cluster as it.
        same_from: usize,
        load: f64,
        /// Requests of the whole workload.
        requests: u64,
        parts: Vec<f64>,
        runs: Vec<Trial>,
    }

    const TARGET: f64 = 0.99;

    impl Evaluate for Known {
        type Error = std::convert::Infallible;

        fn same(&self, _: usize, setting: usize, _: u32) -> usize {
            setting.min(self.same_from)
        }

        fn run(&mut self, trials: &[Trial], _: &Progress) -> Result<Vec<Measured>, Self::Error> {
            self.runs.extend(trials);
            let measure = |t: &Trial| {
                let mut capacity = self.capacity[t.shape][t.setting] * f64::from(t.workers);
                if t.part + 1 < self.parts.len() {
                    capacity *= self.cold.get(t.shape).unwrap_or(&1.0);
                } else if self.unlucky == Some((t.shape, t.workers)) {
                    capacity = self.load * 0.999;
                }
                let enough = capacity / (self.load * t.conditions.load * t.conditions.slower);
                let met = width::floor_u64(TARGET * 1e6 * enough.min(1.0) + 1e-3);
                Measured {
                    attains: enough >= 1.0,
                    complete: true,
                    by_class: vec![(1_000_000, met)],
                    share: TARGET * enough.min(1.0),
                    judged: 100,
                    digest: capacity.to_bits() ^ t.setting as u64,
                    requests: (self.parts[t.part] * self.requests as f64) as u64,
                }
            };
            Ok(trials.iter().map(measure).collect())
        }
    }

    fn candidates(costs: &[f64], settings: usize) -> Vec<Candidate> {
        let of = |(at, &cost): (usize, &f64)| Candidate {
            cost,
            workers_least: 1,
            workers_min: 1,
            workers_max: 2000,
            settings,
            places: (0..settings).map(|at| [at, 0, 0, 0]).collect(),
            kind: at % 2,
            apart: false,
            hosts_kv: false,
        };
        costs.iter().enumerate().map(of).collect()
    }

    /// The lowest cost over every candidate and size.
    fn exhaustive(known: &Known, shapes: &[Candidate], load: f64) -> f64 {
        let mut least = f64::INFINITY;
        for (shape, of) in shapes.iter().enumerate() {
            for capacity in &known.capacity[shape] {
                let workers = (1..=of.workers_max)
                    .find(|&n| capacity * f64::from(n) / (known.load * load) >= 1.0);
                least = workers.map_or(least, |n| least.min(of.cost_of(n)));
            }
        }
        least
    }

    /// Checks the search against every combination. `shapes`: cost and capacity of a worker of each;
    /// `factors`: on the capacity, of each setting; `cold`: of each shape on parts.
    fn is_the_cheapest(
        shapes: &[(u32, f64)],
        factors: &[f64],
        load: f64,
        cold: &[f64],
    ) -> Result<(), TestCaseError> {
        let costs: Vec<f64> = shapes.iter().map(|shape| f64::from(shape.0)).collect();
        let space = candidates(&costs, factors.len());
        let capacity = shapes
            .iter()
            .enumerate()
            // Settings differ in what they are worth to each shape.
            .map(|(at, shape)| {
                let n = factors.len();
                (0..n).map(|s| shape.1 * factors[(s + at) % n]).collect()
            })
            .collect();
        let parts = vec![1.0 / 16.0, 0.25, 1.0];
        let mut known = Known {
            capacity,
            cold: cold.to_vec(),
            unlucky: None,
            same_from: usize::MAX,
            load,
            requests: 16_000,
            parts: parts.clone(),
            runs: Vec::new(),
        };
        let find = |known: &mut Known, load: f64, others: &[Choice]| {
            let plain = Conditions {
                load,
                ..Conditions::PLAIN
            };
            let mut search = Search::new(&space, TARGET, &parts, 2, plain, 1, known);
            search.find(others).unwrap()
        };
        let best = find(&mut known, 1.0, &[]).unwrap();
        let least = exhaustive(&known, &space, 1.0);
        prop_assert!(
            (best.cost - least).abs() < 1e-9,
            "{:?}, but {}",
            best,
            least
        );
        // The same trials again, in the same order.
        let runs = std::mem::take(&mut known.runs);
        let again = find(&mut known, 1.0, &[]).unwrap();
        prop_assert_eq!(again, best);
        prop_assert_eq!(&known.runs, &runs);
        // A higher load is never cheaper.
        let more = find(&mut known, 2.0, &[]).unwrap();
        prop_assert!(more.cost >= best.cost);
        // An answer to a question that differs a little changes nothing but the way.
        for (load, near, cost) in [(1.0, more, best.cost), (2.0, best, more.cost)] {
            let again = find(&mut known, load, &[near]).unwrap();
            prop_assert!((again.cost - cost).abs() < 1e-9, "{again:?}, but {cost}");
        }
        Ok(())
    }

    #[test]
    fn one_worker_of_a_better_setting_is_found() {
        // Two workers of the last shape cost more than 1.5 times two of the others; with its second
        // setting one is enough.
        let shapes = [
            (9, 0.5),
            (9, 3.333_567_522_326_223),
            (9, 0.5),
            (14, 4.750_883_507_357_231),
        ];
        let factors = [0.8, 1.073_760_463_239_000_3, 0.8, 0.8];
        is_the_cheapest(&shapes, &factors, 4.794_902_976_332_167, &[]).unwrap();
    }

    proptest! {
        #[test]
        fn the_answer_is_that_of_every_combination(
            shapes in prop::collection::vec((1u32..40, 0.5f64..8.0), 1..8),
            factors in prop::collection::vec(0.8f64..1.2, 1..9),
            load in 1.0f64..300.0,
        ) {
            is_the_cheapest(&shapes, &factors, load, &[])?;
        }

        #[test]
        fn the_answer_does_not_depend_on_cold_parts(
            shapes in prop::collection::vec((1u32..40, 0.5f64..8.0), 1..8),
            cold in prop::collection::vec(0.02f64..1.0, 8),
            load in 1.0f64..300.0,
        ) {
            is_the_cheapest(&shapes, &[1.0], load, &cold)?;
        }

        #[test]
        fn sizes_are_the_smallest_that_attain(need in 1u32..500, min in 1u32..20, start in 1u32..600, near: bool) {
            let mut sizing = Sizing::new(min, 500, start, near, TARGET);
            let mut trials = 0;
            while let Some(workers) = sizing.next {
                prop_assert!((min..=500).contains(&workers));
                let share = TARGET * f64::from(workers) / f64::from(need);
                sizing.take(workers, &Measured { attains: workers >= need, complete: true, by_class: Vec::new(), share: share.min(1.0), judged: 1, digest: 0, requests: 1 });
                trials += 1;
                prop_assert!(trials <= 30);
            }
            prop_assert_eq!(sizing.attains, Some(need.max(min)));
        }
    }

    /// The answer with the base settings of `capacity`: shape, setting and size.
    fn found(costs: &[f64], workers_max: u32, mut known: Known) -> Option<(usize, usize, u32)> {
        let mut space = candidates(costs, known.capacity[0].len());
        for shape in &mut space {
            shape.workers_max = workers_max;
        }
        let parts = known.parts.clone();
        let main = parts.len() - 1;
        let mut search = Search::new(
            &space,
            TARGET,
            &parts,
            main,
            Conditions::PLAIN,
            1,
            &mut known,
        );
        let best = search.find(&[]).unwrap()?;
        Some((best.shape, best.setting, best.workers))
    }

    /// Candidates of these capacities under a load of 8.5 requests per second.
    fn known(capacity: Vec<Vec<f64>>) -> Known {
        Known {
            capacity,
            cold: Vec::new(),
            unlucky: None,
            same_from: usize::MAX,
            load: 8.5,
            requests: 16_000,
            parts: vec![1.0 / 16.0, 0.25, 1.0],
            runs: Vec::new(),
        }
    }

    /// The second shape lives on its cache, and fails utterly without.
    #[test]
    fn parts_exclude_nothing() {
        let known = Known {
            cold: vec![0.9, 0.05],
            ..known(vec![vec![4.0], vec![9.0]])
        };
        assert_eq!(found(&[2.0, 5.0], 2000, known), Some((1, 0, 1)));
    }

    /// Only a split that is not tried in all combinations attains, two prefill workers from the balance. There is no answer without.
    #[test]
    fn splits_further_from_the_balance_are_found() {
        for (first, answer) in [(3.0, (1, 3, 2)), (0.1, (1, 3, 2))] {
            let mut space = candidates(&[9.0, 4.0], 4);
            space[0].workers_max = 5;
            space[1].workers_max = 2;
            for shape in &mut space {
                shape.settings = 1;
                shape.places = [3, 2, 4, 5].map(|split| [0, 0, 0, split]).to_vec();
            }
            let parts = vec![1.0 / 16.0, 0.25, 1.0];
            let mut known = Known {
                parts: parts.clone(),
                ..known(vec![vec![first; 4], vec![1.0, 0.9, 2.0, 5.0]])
            };
            let mut search =
                Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
            let best = search.find(&[]).unwrap().unwrap();
            assert_eq!((best.shape, best.setting, best.workers), answer, "{first}");
        }
    }

    #[test]
    fn settings_that_give_one_cluster_run_once() {
        let mut known = Known {
            same_from: 2,
            ..known(vec![vec![4.0, 4.1, 4.2, 4.2, 4.2], vec![9.0; 5]])
        };
        let space = candidates(&[2.0, 5.0], 5);
        let parts = known.parts.clone();
        let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
        let best = search.find(&[]).unwrap().unwrap();
        assert_eq!((best.shape, best.workers), (1, 1));
        let mut keys: Vec<_> = known
            .runs
            .iter()
            .map(|t| {
                (
                    t.shape,
                    t.setting.min(2),
                    t.workers,
                    t.part,
                    t.conditions.key(),
                )
            })
            .collect();
        let runs = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), runs, "{:?}", known.runs);
    }

    /// No setting attains on a part at any size; many do on the whole workload.
    #[test]
    fn a_part_on_which_nothing_attains_takes_few_runs() {
        let mut known = Known {
            cold: vec![1e-4, 1e-4],
            ..known(vec![vec![4.0; 40], vec![3.0; 40]])
        };
        let space = candidates(&[2.0, 2.0], 40);
        let parts = known.parts.clone();
        let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
        let best = search.find(&[]).unwrap().unwrap();
        assert_eq!((best.shape, best.workers), (0, 3));
        let on_parts = known.runs.iter().filter(|trial| trial.part < 2).count();
        assert!(on_parts < 300, "{on_parts}");
    }

    /// With the base, no size of the second shape up to the limit attains.
    #[test]
    fn a_shape_that_needs_another_setting_at_any_size_is_found() {
        let known = known(vec![vec![9.0, 9.0], vec![1.0, 5.0]]);
        assert_eq!(found(&[10.0, 2.0], 3, known), Some((1, 1, 2)));
    }

    /// Nine workers attain and ten do not, as where requests are routed by chance.
    #[test]
    fn fewer_workers_are_tried_where_one_more_misses_by_chance() {
        let mut known = Known {
            capacity: vec![vec![1.0]],
            cold: Vec::new(),
            unlucky: Some((0, 10)),
            same_from: usize::MAX,
            load: 8.5,
            requests: 16_000,
            parts: vec![1.0],
            runs: Vec::new(),
        };
        let mut space = candidates(&[1.0], 1);
        space[0].workers_min = 5;
        let whole = [1.0];
        let mut search = Search::new(&space, TARGET, &whole, 0, Conditions::PLAIN, 1, &mut known);
        let at_11 = Choice {
            shape: 0,
            setting: 0,
            workers: 11,
            cost: 11.0,
            share: TARGET,
        };
        search
            .run(&[search.trial(0, 0, 10), search.trial(0, 0, 11)])
            .unwrap();
        let best = search.fewer(at_11, search.last_stage()).unwrap();
        assert_eq!(best.workers, 9);
    }

    /// The base setting of the second shape needs two workers, which cost far more than the first shape; its second
    /// setting needs one.
    #[test]
    fn a_setting_that_saves_one_worker_of_two_is_found() {
        let mut space = candidates(&[25.0, 19.0], 2);
        space[1].kind = space[0].kind;
        let parts = vec![1.0 / 16.0, 0.25, 1.0];
        let mut known = Known {
            capacity: vec![vec![8.0, 8.0], vec![5.7, 7.4]],
            cold: Vec::new(),
            unlucky: None,
            same_from: usize::MAX,
            load: 6.7,
            requests: 16_000,
            parts: parts.clone(),
            runs: Vec::new(),
        };
        let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
        let best = search.find(&[]).unwrap().unwrap();
        assert_eq!((best.shape, best.setting, best.workers), (1, 1, 1));
    }

    /// Capacity tells the headroom; a split shape comes first, and has the most.
    #[test]
    fn of_equal_cost_the_simpler_and_then_the_one_with_more_headroom_is_chosen() {
        let answer = |capacity: [f64; 4], apart: [bool; 4]| {
            let mut space = candidates(&[2.0, 1.0, 2.0, 2.0], 1);
            for (shape, apart) in space.iter_mut().zip(apart) {
                shape.apart = apart;
                shape.workers_min = if apart { 2 } else { 1 };
            }
            let parts = vec![0.25, 1.0];
            let mut known = Known {
                capacity: capacity.iter().map(|&each| vec![each]).collect(),
                cold: Vec::new(),
                unlucky: None,
                same_from: usize::MAX,
                load: 16.0,
                requests: 1000,
                parts: parts.clone(),
                runs: Vec::new(),
            };
            let mut search =
                Search::new(&space, TARGET, &parts, 1, Conditions::PLAIN, 1, &mut known);
            let best = search.find(&[]).unwrap().unwrap();
            (best.shape, best.workers, best.cost)
        };
        // 2 workers for 4.0 each, except the second, which takes 4.
        let split_first = [true, false, false, false];
        assert_eq!(answer([20.0, 4.1, 8.5, 11.0], split_first), (3, 2, 4.0));
        assert_eq!(answer([20.0, 6.1, 8.5, 8.6], split_first), (1, 3, 3.0));
        assert_eq!(answer([20.0, 5.2, 8.5, 8.6], split_first), (1, 4, 4.0));
        // Nothing is simpler.
        assert_eq!(answer([9.0, 4.1, 11.0, 8.6], [true; 4]), (2, 2, 4.0));
    }

    /// A changed condition keeps the shape and setting of the first answer, unless another is cheaper.
    #[test]
    fn of_equal_cost_the_preferred_one_stays() {
        let space = candidates(&[2.0, 1.0, 2.0], 2);
        let answer = |capacity: [[f64; 2]; 3], preferred: (usize, usize)| {
            let parts = vec![0.25, 1.0];
            let mut known = Known {
                capacity: capacity.iter().map(|each| each.to_vec()).collect(),
                cold: Vec::new(),
                unlucky: None,
                same_from: usize::MAX,
                load: 16.0,
                requests: 1000,
                parts: parts.clone(),
                runs: Vec::new(),
            };
            let mut search =
                Search::new(&space, TARGET, &parts, 1, Conditions::PLAIN, 3, &mut known)
                    .preferring(preferred.0, preferred.1);
            let best = search.find(&[]).unwrap().unwrap();
            (best.shape, best.setting, best.workers, best.cost)
        };
        // 4.0 each: 2 workers, 4 workers, 2 workers.
        let equal = [[11.0, 8.5], [5.2, 4.1], [9.0, 8.1]];
        for shape in 0..3 {
            for setting in 0..2 {
                let workers = if shape == 1 { 4 } else { 2 };
                assert_eq!(
                    answer(equal, (shape, setting)),
                    (shape, setting, workers, 4.0)
                );
            }
        }
        // Another is cheaper, or the preferred setting does not attain.
        let cheaper = [[11.0, 8.5], [6.1, 4.1], [9.0, 8.1]];
        assert_eq!(answer(cheaper, (0, 1)), (1, 0, 3, 3.0));
        let weak = [[11.0, 7.9], [4.1, 3.0], [9.0, 8.1]];
        assert_eq!(answer(weak, (0, 1)), (0, 0, 2, 4.0));
    }

    #[test]
    fn what_no_size_attains_ends_soon() {
        let mut sizing = Sizing::new(1, 100_000, 1, false, TARGET);
        let mut trials = 0;
        while let Some(workers) = sizing.next {
            let share = 0.9 - 0.5 / f64::from(workers);
            sizing.take(
                workers,
                &Measured {
                    attains: false,
                    complete: true,
                    by_class: Vec::new(),
                    share,
                    judged: 1,
                    digest: 0,
                    requests: 1,
                },
            );
            trials += 1;
        }
        assert_eq!(sizing.attains, None);
        assert!(trials < 16, "{trials}");
        assert_eq!(Sizing::new(5, 4, 5, false, TARGET).next, None);
    }

    #[test]
    fn a_large_space_takes_a_twentieth_of_its_grid() {
        let costs = [8.0, 4.0, 16.0, 2.0, 3.0, 6.0];
        let space = candidates(&costs, 27);
        let capacity = (0..6u32)
            .map(|shape| {
                (0..27u32)
                    .map(|s| {
                        costs[shape as usize] * (0.9 + f64::from((s * 7 + shape) % 27) / 100.0)
                    })
                    .collect()
            })
            .collect();
        let parts = vec![1.0 / 16.0, 0.25, 1.0];
        let mut known = Known {
            capacity,
            cold: Vec::new(),
            unlucky: None,
            same_from: usize::MAX,
            load: 200.0,
            requests: 10_000,
            parts: parts.clone(),
            runs: Vec::new(),
        };
        let mut search = Search::new(&space, TARGET, &parts, 2, Conditions::PLAIN, 1, &mut known);
        let best = search.find(&[]).unwrap().unwrap();
        let simulated = search.requests;
        let grid = grid(&space, &[false; 6], best.cost) * 10_000;
        assert_eq!(best.cost, exhaustive(&known, &space, 1.0));
        assert!(simulated * 20 <= grid, "{simulated} of {grid}");
    }

    #[test]
    fn the_load_at_which_an_answer_fails_is_found() {
        let space = candidates(&[1.0], 1);
        for (capacity, low, high) in [
            (10.0, 1.0, 1.02),
            (12.5, 1.24, 1.26),
            (1000.0, 4.0, f64::NAN),
        ] {
            let mut known = Known {
                capacity: vec![vec![capacity]],
                cold: Vec::new(),
                unlucky: None,
                same_from: usize::MAX,
                load: 10.0,
                requests: 100,
                parts: vec![1.0],
                runs: Vec::new(),
            };
            let mut search =
                Search::new(&space, TARGET, &[1.0], 0, Conditions::PLAIN, 1, &mut known);
            let best = search.find(&[]).unwrap().unwrap();
            let (attains, fails) = search.headroom(&best).unwrap();
            assert!((attains - low).abs() < 1e-6, "{capacity}: {attains}");
            assert!(
                fails.is_none_or(|fails| (fails - high).abs() < 1e-6),
                "{capacity}: {fails:?}"
            );
            assert_eq!(fails.is_none(), high.is_nan());
        }
    }

    #[test]
    fn grids_count_sizes_and_splits() {
        let space = candidates(&[2.0, 2.0], 3);
        // 5 sizes of 3 settings; 1 + 2 + 3 + 4 splits of 1.
        assert_eq!(grid(&space, &[false, true], 10.0), 15 + 10);
    }
}
