//! Sizes shapes, and selects settings, on growing parts of the workload (successive halving).

use slipstream_base::width;

use super::{
    Candidate, Choice, Evaluate, FAR, KEEP, KEEP_MIN, NEAR, Search, Sizing, Stage, Trial,
    TrialResult,
};

/// Limit of values that are changed in the base setting of a shape that attains with it at no size.
const CHANGES_MAX: usize = 4;
/// A shape whose cost on a part is above the lowest one by more than this factor is not promising, unless one worker
/// less makes up for it.
const PROMISING: f64 = 1.5;
/// A change of a setting that closes less than this share of the gap to the target is the last one.
const GAIN: f64 = 0.1;
/// A value of a setting is far worse if it takes this factor on the misses.
const WORSE: f64 = 2.0;

impl<E: Evaluate> Search<'_, E> {
    /// Sizes every shape with its best known setting, on the smallest part on which it can be. Cheap sizes are
    /// tried first; shapes that are not promising at the sizes that are left are not tried. Larger parts are for GPUs of
    /// which no shape attains on a smaller one. `best`: an answer to improve on. Result: part and size. Shape `[shapes]`.
    pub(super) fn size_shapes(
        &mut self,
        best: Option<Choice>,
        later: f64,
    ) -> Result<Vec<Option<(usize, u32)>>, E::Error> {
        let mut sizes: Vec<Option<(usize, u32)>> = vec![None; self.shapes.len()];
        let mut kinds: Vec<usize> = best
            .iter()
            .map(|best| self.shapes[best.shape].kind)
            .collect();
        for part in 0..=self.whole_part() {
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
    /// best one. A size that is found may leave shapes behind that were promising before, so these are tried then.
    pub(super) fn try_settings(
        &mut self,
        best: Option<Choice>,
        sizes: &mut [Option<(usize, u32)>],
    ) -> Result<(), E::Error> {
        let mut open: Vec<usize> = (0..self.shapes.len())
            .filter(|&shape| self.shapes[shape].settings > 1)
            .collect();
        loop {
            let least = self.lowest(best, sizes, None);
            let (promising, behind): (Vec<usize>, Vec<usize>) = open.iter().partition(|&&shape| {
                let size = sizes[shape];
                size.is_some_and(|size| self.is_promising(best, sizes, shape, size.1))
            });
            let mut found = false;
            for shape in behind {
                found |= self.try_settings_of(shape, least, sizes)?;
            }
            if !found {
                return Ok(());
            }
            open = promising;
        }
    }

    /// Tries other settings of a shape at its largest size that costs less than `least`. Whether one attains.
    fn try_settings_of(
        &mut self,
        shape: usize,
        least: f64,
        sizes: &mut [Option<(usize, u32)>],
    ) -> Result<bool, E::Error> {
        let of = &self.shapes[shape];
        let workers = if least.is_finite() {
            of.cheaper_than(least)
        } else {
            Some(of.workers_max)
        };
        let Some(workers) = workers else {
            return Ok(false);
        };
        let first = self.setting(shape);
        let stage = Self::stage_of_part(0);
        let (setting, most) = self.ascend(shape, first, workers, stage, Candidate::neighbors)?;
        if most.attains {
            sizes[shape] = Some((0, workers));
            self.known[shape] = Some((setting, workers));
        }
        Ok(most.attains)
    }

    /// Changes one value of a setting at a time, as long as that brings it nearer to the target, until it attains with the
    /// seeds of the stage together. `near`: settings to try instead of one.
    pub(super) fn ascend(
        &mut self,
        shape: usize,
        mut setting: usize,
        workers: u32,
        stage: Stage,
        near: fn(&Candidate, usize) -> Vec<usize>,
    ) -> Result<(usize, TrialResult), E::Error> {
        let first = self.trial_at(shape, setting, workers, stage);
        let mut most = self.run_at(&[first], stage)?.remove(0);
        for _ in 0..CHANGES_MAX {
            if most.attains {
                break;
            }
            let others = near(&self.shapes[shape], setting);
            let trial = |&other: &usize| self.trial_at(shape, other, workers, stage);
            let trials: Vec<Trial> = others.iter().map(trial).collect();
            let measured = self.run_at(&trials, stage)?;
            let gap = self.target - most.share;
            let mut better = None;
            for (near, measured) in others.into_iter().zip(measured) {
                if (measured.attains, measured.share) > (most.attains, most.share) {
                    most = measured;
                    better = Some(near);
                }
            }
            let Some(better) = better else { break };
            setting = better;
            if self.target - most.share > (1.0 - GAIN) * gap {
                break;
            }
        }
        Ok((setting, most))
    }

    /// The lowest cost of the sizes and of `best`, or of the sizes of a kind.
    pub(super) fn lowest(
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
    pub(super) fn is_promising(
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
    pub(super) fn halve(
        &mut self,
        best: Option<Choice>,
        sizes: &[Option<(usize, u32)>],
        later: f64,
    ) -> Result<Vec<(usize, usize)>, E::Error> {
        let mut first: Vec<(f64, usize)> = Vec::new();
        for (shape, size) in sizes.iter().enumerate() {
            if let Some((_, workers)) = *size
                && self.is_promising(best, sizes, shape, workers)
                && self.largest_cheaper_size(best, shape).is_some()
            {
                first.push((self.shapes[shape].cost_of(workers), shape));
            }
        }
        first.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        // The known setting of each shape first: they lower the cost at which the others are tried.
        let known = first.iter().map(|&(_, shape)| (shape, self.setting(shape)));
        let mut ranked: Vec<(usize, usize)> = known.collect();
        if self.whole_part() > 0 {
            self.phase("settings", self.parts[0] * ranked.len() as f64, later);
        }
        for (_, shape) in first {
            for setting in self.worthwhile(best, shape)? {
                if !ranked.contains(&(shape, setting)) {
                    ranked.push((shape, setting));
                }
            }
        }
        for part in 0..self.whole_part() {
            let work = self.parts[part] * 0.5 * ranked.len() as f64;
            self.phase("settings", work, later);
            let cheapest = self.race(best, &ranked, Self::stage_of_part(part))?;
            ranked = self.rank(cheapest, &ranked, Self::stage_of_part(part))?;
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
    /// changes of one value at a time, those of [`Search::combinations`]. Otherwise that one alone.
    fn worthwhile(&mut self, best: Option<Choice>, shape: usize) -> Result<Vec<usize>, E::Error> {
        let Some(workers) = self.largest_cheaper_size(best, shape) else {
            return Ok(Vec::new());
        };
        if self.whole_part() == 0 {
            return Ok((0..self.shapes[shape].settings).collect());
        }
        let stage = Self::stage_of_part(0);
        let mut setting = self.setting(shape);
        let first = self.trial_at(shape, setting, workers, stage);
        let mut most = self.run(&[first])?.remove(0);
        if most.share < self.target - FAR {
            (setting, most) = self.ascend(shape, setting, workers, stage, Candidate::neighbors)?;
        }
        if !most.attains && most.share < self.target - FAR {
            return Ok(vec![setting]);
        }
        self.combinations(shape, setting, workers, stage)
    }

    /// All settings of a shape but those with values that are of no use at a size: changed alone in `setting`, they are far
    /// worse, or give the same run.
    pub(super) fn combinations(
        &mut self,
        shape: usize,
        setting: usize,
        workers: u32,
        stage: Stage,
    ) -> Result<Vec<usize>, E::Error> {
        let own = self
            .run(&[self.trial_at(shape, setting, workers, stage)])?
            .remove(0);
        let near = self.shapes[shape].neighbors(setting);
        let trial = |&near: &usize| self.trial_at(shape, near, workers, stage);
        let trials: Vec<Trial> = near.iter().map(trial).collect();
        let measured = self.run(&trials)?;
        let of = &self.shapes[shape];
        let shares = near.iter().zip(&measured).map(|(&near, m)| (near, m.share));
        let first = (setting, own.share);
        let (better, most) = shares.fold(first, |a, b| if b.1 > a.1 { b } else { a });
        let least = (most - NEAR).min(1.0 - WORSE * (1.0 - most));
        let mut useless: Vec<(usize, usize)> = Vec::new();
        for (near, measured) in near.into_iter().zip(measured) {
            let is_worse = !measured.attains && measured.share < least;
            if let Some(axis) = of.only_change(setting, near)
                && (is_worse || measured.ran_alike(&own))
            {
                useless.push((axis, of.places[near][axis]));
            }
        }
        let mut kept = of.with_split_of(better);
        kept.retain(|&other| {
            let place = of.places[other];
            useless.iter().all(|&(axis, value)| place[axis] != value)
        });
        Ok(kept)
    }
}
