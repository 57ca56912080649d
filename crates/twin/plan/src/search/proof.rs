//! Proof of an answer: every cheaper cluster is simulated, if that takes few requests.
//!
//! The rest of the search assumes that more workers attain where fewer do, and that the settings that are best on a part of the
//! workload are among the best on all of it. With few requests, or a routing policy that has chance in it, neither is certain.

use super::{Choice, Evaluate, Search, Stage, Trial};

/// Requests that a proof may take, unless the search took more.
pub(super) const REQUESTS: u64 = 30_000;
/// A proof ends without a result at this many times the requests that it may take: they were estimated.
const OVERRUN: u64 = 2;
/// Clusters that are simulated before a proof looks at their results.
const BATCH: usize = 16;

/// The clusters that a proof covers, in addition to being cheaper than the answer.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// The only shape; `None`: all of them.
    pub(super) shape: Option<usize>,
    /// Sizes that cost less than this are known to fail.
    pub(super) floor: f64,
}

impl Extent {
    /// Every cluster.
    pub(super) const ALL: Extent = Extent {
        shape: None,
        floor: 0.0,
    };
}

impl<E: Evaluate> Search<'_, E> {
    /// Simulates every cluster that is cheaper than `best`, with every seed, the cheapest first, if that takes at most `most` requests.
    /// Result: the cheapest that attains, and whether it is proven.
    pub(super) fn prove(
        &mut self,
        best: Option<Choice>,
        extent: Extent,
        most: u64,
    ) -> Result<(Option<Choice>, bool), E::Error> {
        let stage = self.last_stage();
        let each = self.requests_of_a_miss(stage);
        let Some(open) = self.open_clusters(best, extent, stage, most / each.max(1)) else {
            return Ok((best, false));
        };
        let before = self.requests;
        for batch in open.chunks(BATCH) {
            if self.requests - before > most.saturating_mul(OVERRUN) {
                return Ok((best, false));
            }
            let measured = self.run_at(batch, stage)?;
            let mut each = batch.iter().zip(&measured);
            // The first one is the cheapest.
            if let Some((trial, measured)) = each.find(|(_, measured)| measured.attains) {
                self.known[trial.shape] = Some((trial.setting, trial.workers));
                let found = Choice {
                    shape: trial.shape,
                    setting: trial.setting,
                    workers: trial.workers,
                    cost: self.shapes[trial.shape].cost_of(trial.workers),
                    share: measured.share,
                };
                return Ok((Some(found), true));
            }
        }
        Ok((best, true))
    }

    /// Mean requests of a run of a stage that does not attain; all requests if no such run is known.
    fn requests_of_a_miss(&self, stage: Stage) -> u64 {
        let plain = self.plain.key();
        let here = self
            .seen
            .iter()
            .filter(|(key, _)| (key.3, key.4) == (stage.part, plain))
            .map(|(_, run)| run);
        let (mut count, mut sum, mut whole) = (0, 0, 0);
        for (spare, measured) in here {
            whole = whole.max(measured.requests);
            if !measured.attains {
                // With the misses of all seeds it would have run on.
                let more = if measured.complete {
                    1
                } else {
                    stage.seeds.div_ceil(*spare)
                };
                count += 1;
                sum += measured.requests.saturating_mul(more);
            }
        }
        sum.checked_div(count).unwrap_or(whole)
    }

    /// The clusters that are cheaper than `best` and not known to fail, the cheapest first; `None` if there are more than `most`.
    fn open_clusters(
        &self,
        best: Option<Choice>,
        extent: Extent,
        stage: Stage,
        most: u64,
    ) -> Option<Vec<Trial>> {
        let mut open = Vec::new();
        for (shape, of) in self.shapes.iter().enumerate() {
            let max = self.largest_cheaper_size(best, shape);
            let (true, Some(max)) = (extent.shape.is_none_or(|only| only == shape), max) else {
                continue;
            };
            let fails = of.cheaper_than(extent.floor).unwrap_or(0);
            for workers in of.workers_min.max(fails + 1)..=max {
                for setting in 0..of.places.len() {
                    if self.evaluate.same(shape, setting, workers) != setting {
                        continue;
                    }
                    let trial = self.trial_at(shape, setting, workers, stage);
                    let known = self.result(&Trial {
                        spare: stage.seeds,
                        ..trial
                    });
                    if known.is_none_or(|known| known.complete) {
                        open.push(trial);
                        if open.len() as u64 > most {
                            return None;
                        }
                    }
                }
            }
        }
        let cost = |trial: &Trial| self.shapes[trial.shape].cost_of(trial.workers);
        open.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
        Some(open)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;
    use slipstream_base::mix::{draw, mix64};

    use super::super::{Candidate, Conditions, Progress, TrialResult};
    use super::*;
    use crate::trial::allowed;

    const TARGET: f64 = 0.95;
    /// Of each run.
    const REQUESTS: u64 = 60;

    /// Clusters whose misses follow from nothing, as those of short workloads: neither from their sizes nor from their parts.
    struct Chance {
        seed: u64,
        /// Misses of a run are below this.
        most: u64,
    }

    impl Chance {
        fn misses(&self, of: &Trial) -> u64 {
            let at = [of.shape, of.setting, of.workers as usize, of.part];
            let at = at.iter().fold(of.conditions.seed, |sum, &each| {
                mix64(sum ^ mix64(each as u64))
            });
            draw(self.seed, at) % self.most
        }
    }

    impl Evaluate for Chance {
        type Error = Infallible;

        fn run(&mut self, trials: &[Trial], _: &Progress) -> Result<Vec<TrialResult>, Infallible> {
            let measure = |of: &Trial| {
                let (misses, limit) = (self.misses(of), allowed(REQUESTS * of.spare, TARGET));
                let complete = misses <= limit;
                // A run is stopped at the miss beyond those that it may have, somewhere on its way.
                let all = if complete { REQUESTS } else { 40 };
                let missed = misses.min(limit + 1);
                TrialResult {
                    attains: misses <= allowed(REQUESTS, TARGET),
                    complete,
                    by_class: vec![(all, all - missed)],
                    share: (all - missed) as f64 / all as f64,
                    judged: all,
                    digest: mix64(misses ^ self.seed),
                    requests: all,
                }
            };
            Ok(trials.iter().map(measure).collect())
        }
    }

    fn candidate(cost: u32, settings: usize, kind: usize) -> Candidate {
        Candidate {
            cost: f64::from(cost),
            workers_least: 1,
            workers_min: 1,
            workers_max: 7,
            settings,
            places: (0..settings).map(|at| [at / 2, at % 2, 0, 0]).collect(),
            kind,
            apart: false,
            hosts_kv: false,
        }
    }

    /// The lowest cost of what attains on all seeds together, of each shape.
    fn exhaustive(known: &Chance, shapes: &[Candidate], part: usize, seeds: u64) -> Vec<f64> {
        let attains = |shape: usize, setting: usize, workers: u32| {
            let misses = (0..seeds).map(|seed| {
                known.misses(&Trial {
                    shape,
                    setting,
                    workers,
                    part,
                    conditions: Conditions {
                        seed,
                        ..Conditions::PLAIN
                    },
                    spare: 1,
                })
            });
            misses.sum::<u64>() <= allowed(REQUESTS * seeds, TARGET)
        };
        let lowest = |(shape, of): (usize, &Candidate)| {
            let size = (1..=of.workers_max)
                .find(|&n| (0..of.settings).any(|setting| attains(shape, setting, n)));
            size.map_or(f64::INFINITY, |n| of.cost_of(n))
        };
        shapes.iter().enumerate().map(lowest).collect()
    }

    proptest! {
        /// Larger clusters may do worse, and parts tell nothing: the answer is still the cheapest, each row the cheapest of its shape, and
        /// both whatever is known before.
        #[test]
        fn answers_and_rows_of_few_requests_are_those_of_every_cluster(
            seed: u64,
            most in 5u64..40,
            seeds in 1u64..4,
            parts in prop::sample::select(vec![vec![1.0], vec![0.25, 1.0]]),
            shapes in prop::collection::vec((1u32..12, 1usize..5), 1..5),
            near in prop::option::of((0usize..4, 1u32..8)),
        ) {
            let shapes: Vec<Candidate> = shapes
                .iter()
                .enumerate()
                .map(|(at, &(cost, settings))| candidate(cost, settings, at % 2))
                .collect();
            let mut known = Chance { seed, most };
            let main = parts.len() - 1;
            let least = exhaustive(&known, &shapes, main, seeds);
            let near: Vec<Choice> = near
                .filter(|near| near.0 < shapes.len())
                .map(|(shape, workers)| Choice {
                    shape,
                    setting: 0,
                    workers,
                    cost: shapes[shape].cost_of(workers),
                    share: 1.0,
                })
                .into_iter()
                .collect();
            let mut search =
                Search::new(&shapes, TARGET, &parts, main, Conditions::PLAIN, seeds, &mut known);
            let best = search.find(&near).unwrap();
            prop_assert!(search.proven);
            let cost = best.map_or(f64::INFINITY, |best| best.cost);
            prop_assert_eq!(cost, least.iter().copied().fold(f64::INFINITY, f64::min));
            if let Some(best) = best {
                let (best, rows) = search.table(best, 8).unwrap();
                prop_assert_eq!(best.cost, cost);
                for row in rows {
                    prop_assert_eq!(row.cost, least[row.shape], "{:?}", row);
                }
                for (shape, &least) in least.iter().enumerate() {
                    let own = search.own(shape, best.cost).unwrap();
                    prop_assert_eq!(own.map_or(f64::INFINITY, |own| own.cost), least);
                }
            }
        }

        /// Of trials of one cluster that may miss different numbers of requests, each has the result that it has alone.
        #[test]
        fn the_longest_run_of_a_batch_counts(seed: u64, spares in prop::collection::vec(1u64..13, 1..5)) {
            let shapes = [candidate(1, 1, 0)];
            let mut known = Chance { seed, most: 40 };
            let whole = [1.0];
            let mut search =
                Search::new(&shapes, TARGET, &whole, 0, Conditions::PLAIN, 3, &mut known);
            let of = |search: &Search<'_, Chance>, spare| Trial { spare, ..search.trial(0, 0, 1) };
            let batch: Vec<Trial> = spares.iter().map(|&spare| of(&search, spare)).collect();
            let together = search.run(&batch).unwrap();
            for (trial, measured) in batch.iter().zip(&together) {
                let mut other = Chance { seed, most: 40 };
                let alone = other.run(&[*trial], &Progress::default()).unwrap().remove(0);
                prop_assert_eq!(measured.attains, alone.attains);
                prop_assert!(measured.complete || !alone.complete);
            }
            // The longest is known now.
            let longest = of(&search, spares.iter().copied().max().unwrap());
            prop_assert!(search.result(&longest).is_some());
        }
    }
}
