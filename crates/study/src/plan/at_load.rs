//! The search at one load.

use std::sync::Arc;

use anyhow::Context;
use slipstream_base::{Slo, width};
use slipstream_config::cluster::EngineConfig;
use slipstream_config::workload_file::{Content, Workload};
use slipstream_engine::timing::{self, StepTime};
use slipstream_plan::bound::{self, Ideal};
use slipstream_plan::confidence::{self, StepError};
use slipstream_plan::search::{Candidate, grid};
use slipstream_plan::space::{Setting, Shape};
use slipstream_plan::{Choice, Conditions, Demand, Search, load};
use slipstream_report::Objectives;
use slipstream_report::table::number;

use super::driver::{Driver, Elsewhere, trial};
use super::{Asked, Found, NotFound, Plan, Row, Sensitivity, scaled, settings};
use crate::control::Control;
use crate::files;

/// Smallest part of a workload that settings are compared on, requests.
const PART_MIN: f64 = 150.0;
/// Parts next to the whole.
const PARTS_MAX: usize = 2;
/// Largest part that answers are found on, requests; they are confirmed on the whole.
const MAIN_MAX: f64 = 50_000.0;
/// Rows of other shapes.
const ROWS_MAX: usize = 8;
/// Change of objectives and load for the sensitivity.
const CHANGE: f64 = 0.2;

/// The search at one load.
pub(super) struct AtLoad<'a> {
    pub(super) plan: &'a Plan,
    pub(super) load: f64,
    pub(super) jobs: usize,
    pub(super) control: &'a Control,
    pub(super) elsewhere: Option<&'a dyn Elsewhere>,
}

/// Inputs of the trials at a load.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) demand: Demand,
    /// Shapes that the bounds exclude, with the most that they can reach.
    pub(super) ideal: Vec<(String, Ideal)>,
    pub(super) shapes: Vec<Shape>,
    /// Shape `[shapes]`.
    pub(super) candidates: Vec<Candidate>,
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

/// A shape with its bounds.
#[derive(Debug)]
struct Bounded {
    shape: Shape,
    candidate: Candidate,
}

impl AtLoad<'_> {
    /// The load that must be attained.
    fn hardest(&self) -> f64 {
        self.load * (1.0 + self.plan.args.headroom)
    }

    pub(super) fn ready(&self) -> anyhow::Result<Arc<Ready>> {
        let key = self.load.to_bits();
        let lock = || self.plan.ready.lock().expect("entries are whole");
        if let Some(ready) = lock().get(&key) {
            return Ok(ready.clone());
        }
        let plan = self.plan;
        let demand = if self.hardest() == 1.0 {
            plan.demand.clone()
        } else {
            Demand::of(&load::scaled(&plan.workload, self.hardest()))?
        };
        let mut ideal = Vec::new();
        let mut bounded = Vec::new();
        for shape in &plan.shapes {
            self.control.check()?;
            match self.bound(shape, &demand, &plan.asked)? {
                Ok(found) if found.candidate.workers_max < shape.workers_least() => {}
                Ok(found) => bounded.push(found),
                Err(most) => ideal.push((shape.name(), most)),
            }
        }
        let shapes: Vec<Shape> = bounded.iter().map(|b| b.shape.clone()).collect();
        let settings: Vec<Vec<Setting>> = shapes
            .iter()
            .map(|shape| settings(&plan.args, shape.prefill_share.is_some()))
            .collect();
        let (parts, lengths_s, shares, main, parts_text) = self.parts();
        let ready = Arc::new(Ready {
            demand,
            ideal,
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
        Driver::new(
            &self.plan.base,
            ready,
            &self.plan.asked.objectives,
            &self.plan.args,
            self.load,
            self.jobs,
            self.control,
            self.elsewhere,
        )
    }

    pub(super) fn answer(
        &self,
        ready: &Ready,
        above: &mut Vec<(Shape, Setting, u32)>,
    ) -> anyhow::Result<Result<Found, NotFound>> {
        let args = &self.plan.args;
        let Ready {
            demand,
            shapes,
            candidates,
            settings,
            shares,
            ..
        } = ready;
        let (main, ideal) = (ready.main, ready.ideal.clone());
        let mut driver = self.driver(ready);
        let plain = Conditions {
            load: self.hardest(),
            ..Conditions::PLAIN
        };
        let requests = demand.needs.len() as u64;
        if candidates.is_empty() {
            return Ok(Err(NotFound {
                load: self.load,
                nearest: None,
                ideal,
                requests,
            }));
        }
        let mut search = Search::new(candidates, args.attain, shares, main, plain, &mut driver);
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
        let mut best = search.find(&others)?;
        if let Some(found) = best {
            best = search.confirm(&found)?;
        }
        // Generated workloads have chance in them: the answer attains on average over seeds.
        let generated = matches!(self.plan.workload.content, Content::Generated(_));
        let seeds = if generated { args.seeds } else { 1 };
        let mut sure = None;
        while let Some(found) = best {
            let conditions: Vec<Conditions> = (0..seeds)
                .map(|seed| Conditions { seed, ..plain })
                .collect();
            let measured = search.check_to_end(&found, &conditions)?;
            let of = measured
                .iter()
                .map(|m| (m.judged, width::round_u64(m.share * m.judged as f64)));
            sure = confidence::share(&of.collect::<Vec<_>>());
            if sure.is_none_or(|over| over.mean >= args.attain - 1e-12) {
                break;
            }
            let more = Choice {
                workers: found.workers + 1,
                cost: candidates[found.shape].cost_of(found.workers + 1),
                ..found
            };
            best = (more.workers <= candidates[found.shape].workers_max).then_some(more);
        }
        let search_requests = search.requests;
        let Some(best) = best else {
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
                    let row = row(&mut driver, sized, main, plain)?;
                    Ok((nearest, row))
                })
                .transpose()?;
            return Ok(Err(NotFound {
                load: self.load,
                nearest,
                ideal,
                requests,
            }));
        };
        let mut others = Vec::new();
        let mut headroom = None;
        let mut by_workers = Vec::new();
        if !args.quick {
            others = search.runners_up(&best, ROWS_MAX)?;
            headroom = Some(search.headroom(&best)?);
            by_workers = search.around(&best)?;
        }
        let now = Conditions {
            load: self.load,
            ..plain
        };
        let last = shares.len() - 1;
        let mut run_requests = search.requests;
        let best_row = row(&mut driver, best, last, now)?;
        let step_error = step_error(&driver, &best_row, demand)?;
        let mut sensitivity = Vec::new();
        if !args.quick {
            let rivals: Vec<Choice> = std::iter::once(best)
                .chain(others.first().copied())
                .collect();
            let mut search = Search::new(candidates, args.attain, shares, main, plain, &mut driver);
            for (knob, conditions) in knobs(plain, step_error.as_ref()) {
                let sizes = rivals
                    .iter()
                    .map(|rival| search.resize(rival, conditions))
                    .collect::<anyhow::Result<_>>()?;
                sensitivity.push(Sensitivity { knob, sizes });
            }
            run_requests += search.requests;
        }
        let others = others
            .into_iter()
            .map(|sized| row(&mut driver, sized, main, now))
            .collect::<anyhow::Result<Vec<Row>>>()?;
        let scaled = if args.autoscale_min.is_empty() {
            None
        } else {
            let rows: Vec<&Row> = std::iter::once(&best_row).chain(&others).collect();
            Some(scaled::search(
                &mut driver,
                &rows,
                &args.autoscale_min,
                last,
                plain,
            )?)
        };
        let by_load = driver
            .complete
            .iter()
            .filter(|(trial, _)| {
                (trial.shape, trial.setting, trial.workers)
                    == (best.shape, best.setting, best.workers)
                    && trial.conditions.seed == 0
            })
            .map(|(trial, share)| (trial.conditions.load / self.load, *share))
            .collect();
        let sure = sure.or_else(|| confidence::share(&best_row.answer.parts));
        above.push((
            shapes[best.shape].clone(),
            settings[best.shape][best.setting].clone(),
            best.workers,
        ));
        let apart: Vec<bool> = shapes.iter().map(|s| s.prefill_share.is_some()).collect();
        Ok(Ok(Found {
            load: self.load,
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

    /// The bounds of a shape; `Err` if it cannot attain even on an idle cluster.
    fn bound(
        &self,
        shape: &Shape,
        demand: &Demand,
        context: &Asked,
    ) -> anyhow::Result<Result<Bounded, Ideal>> {
        let args = &self.plan.args;
        let each = settings(args, shape.prefill_share.is_some());
        let (cluster, _) = self
            .plan
            .base
            .resolve(shape, &each[0], shape.workers_least())?;
        let engine: &EngineConfig = &cluster.pools[0].engine;
        let mut timing: Box<dyn StepTime> =
            timing::build(engine, &cluster.model.shape, files::read)?;
        let most = bound::ideal(
            demand,
            &context.objectives,
            engine,
            &mut *timing,
            args.attain,
        );
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
            gap_limit_s(&context.objectives),
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
        let kind = args.gpus.iter().position(|gpu| *gpu == shape.gpu);
        // Too many for --max-gpus: its largest size is tried, to say how far it gets.
        let workers_max = args.max_gpus / gpus;
        let workers_min = workers_min.min(workers_max).max(shape.workers_least());
        Ok(Ok(Bounded {
            candidate: Candidate {
                cost: per_gpu.context("every GPU has a price, as was checked")? * f64::from(gpus)
                    + memory,
                workers_least: shape.workers_least(),
                workers_min,
                workers_max,
                settings: each.len(),
                kind: kind.unwrap_or(0),
                apart: shape.prefill_share.is_some(),
                hosts_kv: host_gib > 0.0,
            },
            shape,
        }))
    }

    /// The parts of the workload: workloads, lengths in seconds, and shares of the requests; and the
    /// index of the one that answers are found on.
    fn parts(&self) -> (Vec<Workload>, Vec<f64>, Vec<f64>, usize, String) {
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
        let weight = |need: &slipstream_plan::demand::Need| {
            // A token of an answer takes about as long as some tens of a prompt, in large batches.
            f64::from(need.input - need.cached) + 20.0 * f64::from(need.output)
        };
        let mut parts = Vec::new();
        let mut lengths = Vec::new();
        let mut texts = Vec::new();
        for &share in &shares {
            let mut part = self.plan.workload.clone();
            let length = length_s * share;
            if share < 1.0 {
                let from = self.plan.demand.busiest(length, weight);
                part.window_s = Some((from, length));
                texts.push(format!("{} s from {} s", number(length), number(from)));
            }
            parts.push(part);
            lengths.push(length);
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
        (parts, lengths, shares, main, text)
    }
}

/// A configuration with the figures of a complete run.
fn row(
    driver: &mut Driver<'_>,
    sized: Choice,
    part: usize,
    conditions: Conditions,
) -> anyhow::Result<Row> {
    let trial = trial(&sized, part, conditions);
    let answer = driver.whole(&trial)?;
    let shape = &driver.ready.shapes[sized.shape];
    let setting = &driver.ready.settings[sized.shape][sized.setting];
    Ok(Row {
        shape: shape.clone(),
        setting: setting.clone(),
        gpus: driver.cluster(&trial)?.gpus(),
        answer,
        sized,
    })
}

fn step_error(
    driver: &Driver<'_>,
    row: &Row,
    demand: &Demand,
) -> anyhow::Result<Option<StepError>> {
    let trial = trial(&row.sized, 0, Conditions::PLAIN);
    let cluster = driver.cluster(&trial)?;
    let [isl, osl] = demand.mean_lengths();
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
fn knobs(plain: Conditions, error: Option<&StepError>) -> Vec<(String, Conditions)> {
    let percent = |factor: f64| format!("{:.0}", (100.0 * (factor - 1.0)).abs());
    let mut knobs = Vec::new();
    for (slo, word) in [(1.0 - CHANGE, "tighter"), (1.0 + CHANGE, "looser")] {
        knobs.push((
            format!("objectives are {} % {word}", percent(slo)),
            Conditions { slo, ..plain },
        ));
    }
    for (factor, word) in [(1.0 - CHANGE, "lower"), (1.0 + CHANGE, "higher")] {
        knobs.push((
            format!("the load is {} % {word}", percent(factor)),
            Conditions {
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
            Conditions { slower, ..plain },
        ));
    }
    knobs
}
