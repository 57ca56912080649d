//! The search at one load, and what is told about its answer.

use std::sync::Arc;

use slipstream_base::width;
use slipstream_engine::timing;
use slipstream_plan::confidence::{self, Share, StepError};
use slipstream_plan::search::{NearMiss, grid};
use slipstream_plan::space::{Setting, Shape};
use slipstream_plan::{Choice, Conditions, Search};

use super::driver::{Driver, Means, trial};
use super::ready::{self, Factors, Ready};
use super::{Changed, Found, NotFound, Plan, Row, Sensitivity, StoppedSearch, scaled};
use crate::control::Interrupted;
use crate::files;

/// Rows of other shapes.
const ROWS_MAX: usize = 8;
/// Relative change of objectives and load in the sensitivity analysis.
const CHANGE: f64 = 0.2;

/// The search at one load.
#[derive(Clone, Copy)]
pub(super) struct AtLoad<'a> {
    pub(super) plan: &'a Plan,
    pub(super) factors: Factors,
    pub(super) means: Means<'a>,
}

/// What a search tells about its answer.
struct Figures {
    best: Choice,
    others: Vec<Choice>,
    /// As [`Found::headroom`].
    headroom: Option<(f64, Option<f64>)>,
    by_workers: Vec<(u32, f64)>,
    /// Attainment over several seeds.
    sure: Option<Share>,
    /// Requests simulated to find the answer, and in all.
    search_requests: u64,
    requests: u64,
    proven: bool,
}

impl AtLoad<'_> {
    /// The load that must be attained.
    fn hardest(&self) -> f64 {
        self.factors.hardest(self.plan.args.headroom)
    }

    /// Conditions under which the objectives must be attained.
    fn plain(&self) -> Conditions {
        Conditions {
            load: self.hardest(),
            slo: self.factors.slo,
            slower: self.factors.slower,
            seed: 0,
        }
    }

    pub(super) fn ready(&self) -> anyhow::Result<Arc<Ready>> {
        ready::prepare(self.plan, self.factors, self.means.control)
    }

    pub(super) fn driver<'b>(&'b self, ready: &'b Ready) -> Driver<'b> {
        Driver::new(self.plan, ready, self.factors, self.means)
    }

    fn search<'b, 'c>(
        &self,
        ready: &'b Ready,
        driver: &'b mut Driver<'c>,
    ) -> Search<'b, Driver<'c>> {
        Search::new(
            &ready.candidates,
            self.plan.args.attain,
            &ready.shares,
            ready.main,
            self.plain(),
            self.plan.seeds(),
            driver,
        )
    }

    /// Searches, and describes the answer. `above`: the answers to higher loads. An interruption leaves an answer without
    /// what was to follow, or ends the search as [`StoppedSearch`].
    pub(super) fn answer(
        &self,
        ready: &Ready,
        above: &mut Vec<(Shape, Setting, u32)>,
    ) -> anyhow::Result<Result<Found, NotFound>> {
        if ready.candidates.is_empty() {
            return Ok(Err(self.not_found(ready, None, true)));
        }
        let mut driver = self.driver(ready);
        let mut search = self.search(ready, &mut driver);
        let found = match search.find(&known(ready, above)) {
            Err(error) if error.is::<Interrupted>() => {
                let so_far = cheapest_so_far(ready, &mut driver, self.plain())?;
                return Err(self.stopped(so_far));
            }
            found => found?,
        };
        let Some(best) = found else {
            let (nearest, proven) = (search.nearest(), search.proven);
            let nearest = nearest.map(|nearest| nearest_row(ready, &mut driver, nearest));
            return Ok(Err(self.not_found(ready, nearest.transpose()?, proven)));
        };
        let figures = match self.figures(&mut search, best) {
            Err(error) if error.is::<Interrupted>() => {
                Figures::without_others(best, search.requests)
            }
            figures => figures?,
        };
        let best = figures.best;
        let found = match self.found(ready, &mut driver, figures) {
            Err(error) if error.is::<Interrupted>() => {
                let so_far = cheapest_so_far(ready, &mut driver, self.plain())?;
                return Err(self.stopped(so_far));
            }
            found => found?,
        };
        above.push((
            ready.shapes[best.shape].clone(),
            ready.settings[best.shape][best.setting].clone(),
            best.workers,
        ));
        Ok(Ok(found))
    }

    fn stopped(&self, so_far: Option<Row>) -> anyhow::Error {
        let load = self.factors.load;
        StoppedSearch { load, so_far }.into()
    }

    fn not_found(&self, ready: &Ready, nearest: Option<(NearMiss, Row)>, proven: bool) -> NotFound {
        NotFound {
            proven,
            load: self.factors.load,
            nearest,
            ideal: ready.ideal.clone(),
            requests: ready.requests,
        }
    }

    /// What the search itself tells about its answer. `best`: the one that [`Search::find`] found.
    fn figures(
        &self,
        search: &mut Search<'_, Driver<'_>>,
        mut best: Choice,
    ) -> anyhow::Result<Figures> {
        let search_requests = search.requests;
        let mut others = Vec::new();
        let mut headroom = None;
        let mut by_workers = Vec::new();
        if !self.plan.args.quick {
            (best, others) = search.table(best, ROWS_MAX)?;
            headroom = Some(search.headroom(&best)?);
            if self.plan.charts {
                by_workers = search.neighboring_sizes(&best)?;
            }
        }
        let each_seed = search.each_seed(&best)?;
        let of = each_seed
            .iter()
            .map(|m| (m.judged, width::round_u64(m.share * m.judged as f64)));
        Ok(Figures {
            best,
            others,
            headroom,
            by_workers,
            sure: confidence::share(&of.collect::<Vec<_>>()),
            search_requests,
            requests: search.requests,
            proven: search.proven,
        })
    }

    /// The answer with its rows, and the answers under changed conditions.
    fn found(
        &self,
        ready: &Ready,
        driver: &mut Driver<'_>,
        figures: Figures,
    ) -> anyhow::Result<Found> {
        let (args, best) = (&self.plan.args, figures.best);
        let (load, plain, seeds) = (self.factors.load, self.plain(), self.plan.seeds());
        let now = Conditions { load, ..plain };
        let last = ready.shares.len() - 1;
        // The share of all seeds, unless the figures are of another load than the one that must be attained.
        let attained = |of: &Choice| (plain == now).then_some(of.share);
        let best_row = row(driver, best, last, now, attained(&best))?;
        let step_error = step_error(driver, &best_row, ready.lengths)?;
        let mut all_requests = figures.requests;
        let mut sensitivity = Vec::new();
        if !args.quick {
            for (knob, factors) in knobs(self.factors, step_error.as_ref()) {
                let changed = AtLoad { factors, ..*self };
                let changed = unless_interrupted(changed.changed(knob, ready, &best))?;
                let Some((sensitivity_of, requests)) = changed else {
                    break;
                };
                sensitivity.push(sensitivity_of);
                all_requests += requests;
            }
        }
        let others = figures.others.into_iter();
        let others = others
            .map(|sized| row(driver, sized, ready.main, now, attained(&sized)))
            .filter_map(|row| unless_interrupted(row).transpose())
            .collect::<anyhow::Result<Vec<Row>>>()?;
        let scaled = if args.axes.autoscale_min.is_empty() {
            None
        } else {
            let rows: Vec<&Row> = std::iter::once(&best_row).chain(&others).collect();
            let fewest = &args.axes.autoscale_min;
            unless_interrupted(scaled::search(driver, &rows, fewest, last, plain))?
        };
        let first = (self.hardest() / load, best_row.attained);
        let by_load = driver.shares_by_load(&best).into_iter();
        let by_load = by_load.map(|(of, share)| (of / load, share));
        let apart = ready.shapes.iter().map(|s| s.prefill_share.is_some());
        let apart: Vec<bool> = apart.collect();
        Ok(Found {
            load,
            sure: figures
                .sure
                .or_else(|| confidence::share(&best_row.answer.parts)),
            seeds: if seeds > 1 { seeds } else { 0 },
            headroom: figures.headroom,
            step_error,
            others,
            scaled,
            ideal: ready.ideal.clone(),
            sensitivity,
            by_workers: figures.by_workers,
            by_load: by_load.chain([first]).collect(),
            proven: figures.proven,
            search_requests: figures.search_requests,
            all_requests,
            grid_requests: grid(&ready.candidates, &apart, best.cost) * ready.requests,
            requests: ready.requests,
            best: best_row,
        })
    }

    /// The answer under these conditions, as if they were asked about, and what the shape of the `answer` to the question with the
    /// inputs `of` needs then. Also the requests that were simulated.
    fn changed(
        &self,
        knob: String,
        of: &Ready,
        answer: &Choice,
    ) -> anyhow::Result<(Sensitivity, u64)> {
        let ready = self.ready()?;
        let shapes = &ready.shapes;
        let own = shapes
            .iter()
            .position(|shape| shape.is_like(&of.shapes[answer.shape]));
        let mut driver = self.driver(&ready);
        let mut search = self.search(&ready, &mut driver);
        let first = &of.settings[answer.shape][answer.setting];
        let mut near = Vec::new();
        if let Some(own) = own
            && let Some(setting) = ready.settings[own].iter().position(|each| each == first)
        {
            search = search.preferring(own, setting);
            near.push(Choice {
                shape: own,
                setting,
                ..*answer
            });
        }
        let found = search.find(&near)?;
        let own = match (found, own) {
            (Some(found), Some(own)) if found.shape == own => Some(found),
            (Some(found), Some(own)) => search.own(own, found.cost)?,
            _ => None,
        };
        let requests = search.requests;
        let cheapest = found
            .map(|sized| -> anyhow::Result<_> {
                let trial = trial(&sized, ready.main, self.plain());
                Ok(Changed {
                    gpus: driver.cluster(&trial)?.gpus(),
                    shape: shapes[sized.shape].clone(),
                    setting: ready.settings[sized.shape][sized.setting].clone(),
                    same: own.is_some_and(|own| own.shape == sized.shape),
                    sized,
                })
            })
            .transpose()?;
        let sensitivity = Sensitivity {
            knob,
            slower: self.factors.slower,
            cheapest,
            own,
        };
        Ok((sensitivity, requests))
    }
}

impl Figures {
    /// The answer alone.
    fn without_others(best: Choice, requests: u64) -> Figures {
        Figures {
            best,
            others: Vec::new(),
            headroom: None,
            by_workers: Vec::new(),
            sure: None,
            search_requests: requests,
            requests,
            proven: false,
        }
    }
}

/// `None`: it was interrupted.
fn unless_interrupted<T>(result: anyhow::Result<T>) -> anyhow::Result<Option<T>> {
    match result {
        Err(error) if error.is::<Interrupted>() => Ok(None),
        result => result.map(Some),
    }
}

/// The cheapest configuration of a search so far that attained with its first seed.
fn cheapest_so_far(
    ready: &Ready,
    driver: &mut Driver<'_>,
    conditions: Conditions,
) -> anyhow::Result<Option<Row>> {
    let mut choices = Vec::new();
    for (trial, share) in driver.attained() {
        if trial.conditions == conditions {
            choices.push(Choice {
                shape: trial.shape,
                setting: trial.setting,
                workers: trial.workers,
                cost: ready.candidates[trial.shape].cost_of(trial.workers),
                share,
            });
        }
    }
    let cheapest = choices.into_iter().min_by(|a, b| a.cost.total_cmp(&b.cost));
    let row = cheapest.map(|sized| row(driver, sized, ready.main, conditions, Some(sized.share)));
    Ok(row.map(unless_interrupted).transpose()?.flatten())
}

/// The answers to other questions, as choices of this one.
fn known(ready: &Ready, answers: &[(Shape, Setting, u32)]) -> Vec<Choice> {
    let choice = |(shape, setting, workers): &(Shape, Setting, u32)| {
        let named = |of: &Shape| of.name() == shape.name();
        let shape = ready.shapes.iter().position(named)?;
        let setting = ready.settings[shape].iter().position(|s| s == setting)?;
        Some(Choice {
            shape,
            setting,
            workers: *workers,
            cost: ready.candidates[shape].cost_of(*workers),
            share: 0.0,
        })
    };
    answers.iter().filter_map(choice).collect()
}

fn nearest_row(
    ready: &Ready,
    driver: &mut Driver<'_>,
    nearest: NearMiss,
) -> anyhow::Result<(NearMiss, Row)> {
    let of = nearest.trial;
    let sized = Choice {
        shape: of.shape,
        setting: of.setting,
        workers: of.workers,
        cost: ready.candidates[of.shape].cost_of(of.workers),
        share: nearest.share,
    };
    let row = row(driver, sized, ready.main, of.conditions, None)?;
    Ok((nearest, row))
}

/// A configuration with the figures of a complete run.
fn row(
    driver: &mut Driver<'_>,
    sized: Choice,
    part: usize,
    conditions: Conditions,
    attained: Option<f64>,
) -> anyhow::Result<Row> {
    let trial = trial(&sized, part, conditions);
    let answer = driver.whole(&trial)?;
    let shape = &driver.ready.shapes[sized.shape];
    let setting = &driver.ready.settings[sized.shape][sized.setting];
    Ok(Row {
        shape: shape.clone(),
        setting: setting.clone(),
        gpus: driver.cluster(&trial)?.gpus(),
        attained: attained.unwrap_or(answer.measured.share),
        answer,
        sized,
    })
}

fn step_error(
    driver: &Driver<'_>,
    row: &Row,
    [isl, osl]: [f64; 2],
) -> anyhow::Result<Option<StepError>> {
    let trial = trial(&row.sized, 0, Conditions::PLAIN);
    let cluster = driver.cluster(&trial)?;
    let totals = &row.answer.outcome.totals;
    // Little's law: requests in the system are their rate times their time in it.
    let e2e_s = totals.latencies().e2e_ms.map_or(0.0, |e2e| e2e.mean / 1e3);
    let under_way = totals.throughput().requests_per_s * e2e_s;
    let decoding = cluster
        .pools
        .last()
        .map_or(1, |pool| pool.workers * pool.engine.data_parallel_size);
    let engine = &cluster.pools[cluster.pools.len() - 1].engine;
    let profile = timing::profile(engine, files::read)?;
    Ok(confidence::step_error(
        &cluster.model.shape,
        engine,
        &profile,
        isl,
        osl,
        under_way / f64::from(decoding),
    ))
}

/// One condition changed at a time.
fn knobs(plain: Factors, error: Option<&StepError>) -> Vec<(String, Factors)> {
    let percent = |factor: f64| format!("{:.0}", (100.0 * (factor - 1.0)).abs());
    let mut knobs = Vec::new();
    for (slo, word) in [(1.0 - CHANGE, "tighter"), (1.0 + CHANGE, "looser")] {
        knobs.push((
            format!("objectives are {} % {word}", percent(slo)),
            Factors { slo, ..plain },
        ));
    }
    for (factor, word) in [(1.0 - CHANGE, "lower"), (1.0 + CHANGE, "higher")] {
        knobs.push((
            format!("the load is {} % {word}", percent(factor)),
            Factors {
                load: plain.load * factor,
                ..plain
            },
        ));
    }
    let steps = match error {
        Some(error) => [error.low, error.high],
        None => [1.0 - CHANGE / 2.0, 1.0 + CHANGE / 2.0],
    };
    for slower in steps {
        let word = if slower < 1.0 { "less time" } else { "longer" };
        knobs.push((
            format!("steps take {} % {word}", percent(slower)),
            Factors { slower, ..plain },
        ));
    }
    knobs
}
