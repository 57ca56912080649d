//! The search at one load.

use std::sync::Arc;

use anyhow::Context;
use slipstream_base::{Slo, width};
use slipstream_config::cluster::EngineConfig;
use slipstream_config::workload_file::{Content, Workload};
use slipstream_engine::timing::{self, StepLoad, StepTime};
use slipstream_plan::bound::{self, Ideal};
use slipstream_plan::confidence::{self, StepError};
use slipstream_plan::search::{Candidate, grid};
use slipstream_plan::space::{self, Setting, Shape};
use slipstream_plan::{Choice, Conditions, Demand, Search, load};
use slipstream_report::Objectives;
use slipstream_report::table::number;

use super::driver::{self, Driver, Elsewhere, trial};
use super::{Changed, Found, NotFound, Plan, Row, Sensitivity, scaled};
use crate::control::Control;
use crate::files;

/// Smallest part of a workload that settings are compared on, requests.
const PART_MIN: f64 = 150.0;
/// Limit of parts, in addition to the whole workload.
const PARTS_MAX: usize = 2;
/// Largest part that answers are found on, requests; they are confirmed on the whole.
const MAIN_MAX: f64 = 50_000.0;
/// Rows of other shapes.
const ROWS_MAX: usize = 8;
/// Relative change of objectives and load in the sensitivity analysis.
const CHANGE: f64 = 0.2;

/// Factors on the question's conditions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Factors {
    pub(super) load: f64,
    /// On the limits of the objectives.
    pub(super) slo: f64,
    /// On the duration of steps.
    pub(super) slower: f64,
}

impl Factors {
    pub(super) fn of_load(load: f64) -> Factors {
        Factors {
            load,
            slo: 1.0,
            slower: 1.0,
        }
    }

    pub(super) fn bits(self) -> [u64; 3] {
        [self.load, self.slo, self.slower].map(f64::to_bits)
    }
}

/// The search at one load.
#[derive(Clone, Copy)]
pub(super) struct AtLoad<'a> {
    pub(super) plan: &'a Plan,
    pub(super) factors: Factors,
    pub(super) jobs: usize,
    pub(super) control: &'a Control,
    pub(super) elsewhere: Option<&'a dyn Elsewhere>,
}

/// Inputs of the trials at a load.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) requests: u64,
    /// Mean prompt and answer, tokens.
    pub(super) lengths: [f64; 2],
    /// Shapes that the bounds exclude, with the most that they can reach.
    pub(super) ideal: Vec<(String, Ideal)>,
    pub(super) shapes: Vec<Shape>,
    /// Shape `[shapes]`.
    pub(super) candidates: Vec<Candidate>,
    /// Of a worker. Shape `[shapes]`.
    pub(super) ranks: Vec<u32>,
    /// Shape `[shapes][settings]`.
    pub(super) settings: Vec<Vec<Setting>>,
    pub(super) parts: Vec<Workload>,
    pub(super) lengths_s: Vec<f64>,
    /// Of the requests. Shape `[parts]`.
    pub(super) shares: Vec<f64>,
    /// Index of the part that answers are found on.
    pub(super) main: usize,
    pub(super) parts_text: String,
}

/// Parts of a workload: the busiest ones, and all of it.
struct Parts {
    parts: Vec<Workload>,
    lengths_s: Vec<f64>,
    /// Of the requests. Shape `[parts]`.
    shares: Vec<f64>,
    /// Index of the part that answers are found on.
    main: usize,
    text: String,
}

/// A shape with its bounds.
#[derive(Debug)]
struct Bounded {
    shape: Shape,
    candidate: Candidate,
    ranks: u32,
}

impl AtLoad<'_> {
    /// The load that must be attained.
    fn hardest(&self) -> f64 {
        self.factors.load * (1.0 + self.plan.args.headroom)
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

    /// Seeds on which the answer attains together: generated workloads have chance in them.
    fn seeds(&self) -> u64 {
        match self.plan.workload.content {
            Content::Generated(_) => self.plan.args.seeds,
            Content::Trace(_) => 1,
        }
    }

    pub(super) fn ready(&self) -> anyhow::Result<Arc<Ready>> {
        let key = self.factors.bits();
        let lock = || self.plan.ready.lock().expect("entries are whole");
        if let Some(ready) = lock().get(&key) {
            return Ok(ready.clone());
        }
        let plan = self.plan;
        let scaled;
        let demand = if self.hardest() == 1.0 {
            &plan.demand
        } else {
            scaled = Demand::of(&load::scaled(&plan.workload, self.hardest()))?;
            &scaled
        };
        let objectives = driver::scale(&plan.asked.objectives, self.factors.slo);
        let mut ideal = Vec::new();
        let mut bounded = Vec::new();
        for shape in &plan.shapes {
            self.control.check()?;
            match self.bound(shape, demand, &objectives)? {
                Ok(found) if found.candidate.workers_max < shape.workers_least() => {}
                Ok(found) => bounded.push(found),
                Err(most) => ideal.push((shape.name(), most)),
            }
        }
        let shapes: Vec<Shape> = bounded.iter().map(|b| b.shape.clone()).collect();
        let settings: Vec<Vec<Setting>> = shapes
            .iter()
            .map(|shape| space::settings(&plan.args.axes, shape.prefill_share.is_some()).0)
            .collect();
        let Parts {
            parts,
            lengths_s,
            shares,
            main,
            text: parts_text,
        } = self.parts();
        let ready = Arc::new(Ready {
            requests: demand.needs.len() as u64,
            lengths: demand.mean_lengths(),
            ideal,
            ranks: bounded.iter().map(|b| b.ranks).collect(),
            candidates: bounded.into_iter().map(|b| b.candidate).collect(),
            shapes,
            settings,
            parts,
            lengths_s,
            shares,
            main,
            parts_text,
        });
        lock().insert(key, ready.clone());
        Ok(ready)
    }

    pub(super) fn driver<'b>(&'b self, ready: &'b Ready) -> Driver<'b> {
        let mut driver = Driver::new(
            &self.plan.base,
            ready,
            &self.plan.asked.objectives,
            &self.plan.args,
            self.factors,
            self.jobs,
            self.control,
            self.elsewhere,
        );
        driver.charts = self.plan.charts;
        driver
    }

    pub(super) fn answer(
        &self,
        ready: &Ready,
        above: &mut Vec<(Shape, Setting, u32)>,
    ) -> anyhow::Result<Result<Found, NotFound>> {
        let args = &self.plan.args;
        let Ready {
            shapes,
            candidates,
            settings,
            shares,
            requests,
            ..
        } = ready;
        let (main, ideal, requests) = (ready.main, ready.ideal.clone(), *requests);
        let (load, plain, seeds) = (self.factors.load, self.plain(), self.seeds());
        let mut driver = self.driver(ready);
        if candidates.is_empty() {
            return Ok(Err(NotFound {
                load,
                nearest: None,
                ideal,
                requests,
            }));
        }
        let mut search = Search::new(
            candidates,
            args.attain,
            shares,
            main,
            plain,
            seeds,
            &mut driver,
        );
        let others: Vec<Choice> = above
            .iter()
            .filter_map(|(shape, setting, workers)| {
                let at = shapes.iter().position(|s| s.name() == shape.name())?;
                let setting = settings[at].iter().position(|s| s == setting)?;
                Some(Choice {
                    shape: at,
                    setting,
                    workers: *workers,
                    cost: candidates[at].cost_of(*workers),
                    share: 0.0,
                })
            })
            .collect();
        let best = search.find(&others)?;
        let search_requests = search.requests;
        let Some(mut best) = best else {
            let nearest = search.nearest();
            let nearest = nearest
                .map(|nearest| -> anyhow::Result<_> {
                    let sized = Choice {
                        shape: nearest.trial.shape,
                        setting: nearest.trial.setting,
                        workers: nearest.trial.workers,
                        cost: candidates[nearest.trial.shape].cost_of(nearest.trial.workers),
                        share: nearest.share,
                    };
                    let row = row(&mut driver, sized, main, plain, None)?;
                    Ok((nearest, row))
                })
                .transpose()?;
            return Ok(Err(NotFound {
                load,
                nearest,
                ideal,
                requests,
            }));
        };
        let mut others = Vec::new();
        let mut headroom = None;
        let mut by_workers = Vec::new();
        if !args.quick {
            (best, others) = search.table(best, ROWS_MAX)?;
            headroom = Some(search.headroom(&best)?);
            if self.plan.charts {
                by_workers = search.around(&best)?;
            }
        }
        let each_seed = search.each_seed(&best)?;
        let of = each_seed
            .iter()
            .map(|m| (m.judged, width::round_u64(m.share * m.judged as f64)));
        let sure = confidence::share(&of.collect::<Vec<_>>());
        let now = Conditions { load, ..plain };
        let last = shares.len() - 1;
        let mut run_requests = search.requests;
        // The share of all seeds, unless the figures are of another load than the one that must be attained.
        let attained = |of: &Choice| (plain == now).then_some(of.share);
        let best_row = row(&mut driver, best, last, now, attained(&best))?;
        let step_error = step_error(&driver, &best_row, ready.lengths)?;
        let mut sensitivity = Vec::new();
        if !args.quick {
            for (knob, factors) in knobs(self.factors, step_error.as_ref()) {
                let changed = AtLoad { factors, ..*self };
                let (sensitivity_of, requests) = changed.changed(knob, ready, &best)?;
                sensitivity.push(sensitivity_of);
                run_requests += requests;
            }
        }
        let others = others
            .into_iter()
            .map(|sized| row(&mut driver, sized, main, now, attained(&sized)))
            .collect::<anyhow::Result<Vec<Row>>>()?;
        let scaled = if args.axes.autoscale_min.is_empty() {
            None
        } else {
            let rows: Vec<&Row> = std::iter::once(&best_row).chain(&others).collect();
            Some(scaled::search(
                &mut driver,
                &rows,
                &args.axes.autoscale_min,
                last,
                plain,
            )?)
        };
        let first = (self.hardest() / load, best_row.attained);
        let by_load = driver
            .complete
            .iter()
            .filter(|(trial, _)| {
                (trial.shape, trial.setting, trial.workers)
                    == (best.shape, best.setting, best.workers)
                    && trial.conditions.seed == 0
            })
            .map(|(trial, share)| (trial.conditions.load / load, *share))
            .chain([first])
            .collect();
        let sure = sure.or_else(|| confidence::share(&best_row.answer.parts));
        above.push((
            shapes[best.shape].clone(),
            settings[best.shape][best.setting].clone(),
            best.workers,
        ));
        let apart: Vec<bool> = shapes.iter().map(|s| s.prefill_share.is_some()).collect();
        Ok(Ok(Found {
            load,
            sure,
            seeds: if seeds > 1 { seeds } else { 0 },
            headroom,
            step_error,
            others,
            scaled,
            ideal,
            sensitivity,
            by_workers,
            by_load,
            search_requests,
            all_requests: run_requests,
            grid_requests: grid(candidates, &apart, best.cost) * requests,
            requests,
            best: best_row,
        }))
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
        let mut search = Search::new(
            &ready.candidates,
            self.plan.args.attain,
            &ready.shares,
            ready.main,
            self.plain(),
            self.seeds(),
            &mut driver,
        );
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
            cheapest,
            own,
        };
        Ok((sensitivity, requests))
    }

    /// The bounds of a shape; `Err` if it cannot attain even on an idle cluster.
    fn bound(
        &self,
        shape: &Shape,
        demand: &Demand,
        objectives: &Objectives,
    ) -> anyhow::Result<Result<Bounded, Ideal>> {
        let (args, context) = (&self.plan.args, &self.plan.asked);
        let (each, combined) = space::settings(&args.axes, shape.prefill_share.is_some());
        let (cluster, _) = self
            .plan
            .base
            .resolve(shape, &each[0], shape.workers_least())?;
        let engine: &EngineConfig = &cluster.pools[0].engine;
        let mut timing: Box<dyn StepTime> = Box::new(Slower {
            timing: timing::build(engine, &cluster.model.shape, files::read)?,
            factor: self.factors.slower,
        });
        let most = bound::ideal(demand, objectives, engine, &mut *timing, args.attain);
        if most.share < args.attain - 1e-9 {
            return Ok(Err(most));
        }
        let seqs = each.iter().map(|s| s.max_num_seqs).max().unwrap_or(1);
        let tokens = each.iter().map(|s| s.max_num_batched_tokens).max();
        let per_step = bound::tokens_per_step(engine);
        let work = bound::work(
            demand,
            &mut *timing,
            seqs,
            tokens.unwrap_or(1),
            gap_limit_s(objectives),
            per_step,
        )
        .of_ranks(engine.data_parallel_size)
        .of_stage(bound::largest_stage(engine));
        let time_s = bound::time_s(demand, &mut *timing, per_step);
        let least = |work_s| bound::workers_min(work_s, time_s, args.attain);
        let mut shape = shape.clone();
        let workers_min = if shape.prefill_share.is_some() {
            let whole = work.prefill_s + work.decode_s;
            shape.prefill_share = Some(work.prefill_s / whole.max(1e-12));
            least(whole).max(2)
        } else {
            least(work.mixed_s)
        };
        let gpus = engine.gpus();
        let per_gpu = if context.priced {
            context.prices.per_gpu_hour(&shape.gpu)
        } else {
            Some(1.0)
        };
        let host_gib = shape.host_gib.unwrap_or(0.0);
        let per_host_gib = match context.prices.host_gib {
            Some(price) if context.priced => price,
            _ => 0.0,
        };
        let memory = per_host_gib * host_gib * f64::from(engine.data_parallel_size);
        let kind = args.axes.gpus.iter().position(|gpu| *gpu == shape.gpu);
        // Too many for --max-gpus: its largest size is tried, to say how far it gets.
        let workers_max = args.max_gpus / gpus;
        let workers_min = workers_min.min(workers_max).max(shape.workers_least());
        Ok(Ok(Bounded {
            ranks: engine.data_parallel_size,
            candidate: Candidate {
                cost: per_gpu.context("every GPU has a price, as was checked")? * f64::from(gpus)
                    + memory,
                workers_least: shape.workers_least(),
                workers_min,
                workers_max,
                settings: combined,
                places: space::places(&each),
                kind: kind.unwrap_or(0),
                apart: shape.prefill_share.is_some(),
                hosts_kv: host_gib > 0.0,
            },
            shape,
        }))
    }

    /// The parts of the workload.
    fn parts(&self) -> Parts {
        let all = self.plan.demand.needs.len() as f64;
        let length_s = self.plan.demand.duration_s();
        let mut shares = vec![1.0];
        let mut share = 1.0;
        if all > MAIN_MAX {
            share = MAIN_MAX / all;
            shares.insert(0, share);
        }
        let main_share = share;
        while shares.len() <= PARTS_MAX + usize::from(all > MAIN_MAX)
            && all * share / 4.0 >= PART_MIN
            && !self.plan.demand.closed
        {
            share /= 4.0;
            shares.insert(0, share);
        }
        if self.plan.demand.closed {
            shares.truncate(1);
            shares[0] = 1.0;
        }
        let main = if all > MAIN_MAX && shares.len() > 1 {
            shares.len() - 2
        } else {
            shares.len() - 1
        };
        // The mean share: with a request's own share, the cold start would be the busiest part.
        let computed = 1.0 - self.plan.demand.repeated_share();
        let weight = |need: &slipstream_plan::demand::Need| {
            // A token of an answer takes about as long as some tens of a prompt, in large batches.
            computed * f64::from(need.input) + 20.0 * f64::from(need.output)
        };
        let mut texts = Vec::new();
        let windows: Vec<(f64, f64)> = shares
            .iter()
            .filter(|share| **share < 1.0)
            .map(|share| length_s * share)
            .map(|length| (self.plan.demand.busiest(length, weight), length))
            .collect();
        let parts = (0..shares.len()).map(|at| {
            let mut part = self.plan.workload.clone();
            part.window_s = windows.get(at).copied();
            part
        });
        for &(from, length) in &windows {
            texts.push(format!("{} s from {} s", number(length), number(from)));
        }
        let text = if texts.is_empty() {
            "every run has the whole workload".to_owned()
        } else {
            let found = if main_share < 1.0 {
                "; the answer is found on the largest of them and confirmed on the whole"
            } else {
                "; answers are found on the whole"
            };
            format!(
                "settings are compared on the busiest parts ({}) of {} s{found}",
                texts.join(", "),
                number(length_s)
            )
        };
        Parts {
            parts: parts.collect(),
            lengths_s: shares.iter().map(|share| length_s * share).collect(),
            shares,
            main,
            text,
        }
    }
}

/// Step times with a factor on them.
struct Slower {
    timing: Box<dyn StepTime>,
    factor: f64,
}

impl StepTime for Slower {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        width::round_u64(self.timing.step_ns(load) as f64 * self.factor)
    }
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

/// The limit on the mean gap between tokens that every class has, s.
fn gap_limit_s(objectives: &Objectives) -> Option<f64> {
    let limit = |slo: Option<&Slo>| {
        let slo = slo?;
        let limits = [slo.limit_ns("itl"), slo.limit_ns("tpot")];
        limits.into_iter().flatten().min()
    };
    let classes = width::to_u32(objectives.classes.len().max(1));
    let each: Option<Vec<u64>> = (0..classes)
        .map(|class| limit(objectives.of_class(class)))
        .collect();
    Some(each?.into_iter().max()? as f64 / 1e9)
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
