//! The choice among equally cheap candidates.

use super::{Choice, Conditions, Evaluate, LOAD_MAX, Search, Stage, Trial};

/// Growth of the load at which candidates of equal cost are compared.
const LOAD_GROWTH: f64 = 1.3;
/// Limit of candidates that cost as much as the answer and are compared with it.
const EQUAL_MAX: usize = 8;

impl<E: Evaluate> Search<'_, E> {
    /// Of the candidates that attain at the cost of `best`: one with workers of one kind, if any has, and of these
    /// one without host memory; and of these the one that attains at the highest load on the largest part that is not the whole.
    pub(super) fn prefer(&mut self, best: Choice, stage: Stage) -> Result<Choice, E::Error> {
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
    pub(super) fn strongest(&mut self, mut left: Vec<Trial>) -> Result<Trial, E::Error> {
        let part = self.whole_part().saturating_sub(1);
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
}
