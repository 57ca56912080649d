//! Inputs of the trials at a load: shapes with their bounds and settings, and the parts of the workload.

use std::sync::Arc;

use anyhow::Context;
use slipstream_base::{Slo, width};
use slipstream_config::cluster::EngineConfig;
use slipstream_config::workload_file::Workload;
use slipstream_engine::timing::{self, StepLoad, StepTime};
use slipstream_plan::bound::{self, Ideal};
use slipstream_plan::search::Candidate;
use slipstream_plan::space::{self, Setting, Shape};
use slipstream_plan::{Demand, load};
use slipstream_report::Objectives;
use slipstream_report::table::number;

use super::Plan;
use crate::control::Control;
use crate::files;

/// Smallest part of a workload that settings are compared on, requests.
const PART_MIN: f64 = 150.0;
/// Limit of parts, in addition to the whole workload.
const PARTS_MAX: usize = 2;
/// Largest part that answers are found on, requests; they are confirmed on the whole.
const MAIN_MAX: f64 = 50_000.0;
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

    /// The load that must be attained, with a headroom as a share.
    pub(super) fn hardest(self, headroom: f64) -> f64 {
        self.load * (1.0 + headroom)
    }

    pub(super) fn bits(self) -> [u64; 3] {
        [self.load, self.slo, self.slower].map(f64::to_bits)
    }
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

/// The inputs of the trials at these factors. A plan keeps them: several searches and batches need them.
pub(super) fn prepare(
    plan: &Plan,
    factors: Factors,
    control: &Control,
) -> anyhow::Result<Arc<Ready>> {
    let key = factors.bits();
    let lock = || plan.ready.lock().expect("entries are whole");
    if let Some(ready) = lock().get(&key) {
        return Ok(ready.clone());
    }
    let ready = Arc::new(Preparation { plan, factors }.ready(control)?);
    lock().insert(key, ready.clone());
    Ok(ready)
}

/// Makes the inputs of the trials.
struct Preparation<'a> {
    plan: &'a Plan,
    factors: Factors,
}

impl Preparation<'_> {
    fn ready(&self, control: &Control) -> anyhow::Result<Ready> {
        let plan = self.plan;
        let hardest = self.factors.hardest(plan.args.headroom);
        let scaled;
        let demand = if hardest == 1.0 {
            &plan.demand
        } else {
            scaled = Demand::of(&load::scaled(&plan.workload, hardest))?;
            &scaled
        };
        let objectives = scale(&plan.asked.objectives, self.factors.slo);
        let mut ideal = Vec::new();
        let mut bounded = Vec::new();
        for shape in &plan.shapes {
            control.check()?;
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
        Ok(Ready {
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
        })
    }

    /// The bounds of a shape; `Err` if it cannot attain even on an idle cluster.
    fn bound(
        &self,
        shape: &Shape,
        demand: &Demand,
        objectives: &Objectives,
    ) -> anyhow::Result<Result<Bounded, Ideal>> {
        let args = &self.plan.args;
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
        let time_s = bound::time_s(demand, objectives);
        let share = bound::share_in_time(demand, args.attain);
        let least = |work_s| bound::workers_min(work_s, time_s, share);
        let mut shape = shape.clone();
        let workers_min = if shape.prefill_share.is_some() {
            let whole = work.prefill_s + work.decode_s;
            shape.prefill_share = Some(work.prefill_s / whole.max(1e-12));
            least(whole).max(2)
        } else {
            least(work.mixed_s)
        };
        let gpus = engine.gpus();
        // Too many for --max-gpus: its largest size is tried, to say how far it gets.
        let workers_max = args.max_gpus / gpus;
        let workers_min = workers_min.min(workers_max).max(shape.workers_least());
        let kind = args.axes.gpus.iter().position(|gpu| *gpu == shape.gpu);
        Ok(Ok(Bounded {
            ranks: engine.data_parallel_size,
            candidate: Candidate {
                cost: self.worker_cost(&shape, engine)?,
                workers_least: shape.workers_least(),
                workers_min,
                workers_max,
                settings: combined,
                places: space::places(&each),
                kind: kind.unwrap_or(0),
                apart: shape.prefill_share.is_some(),
                hosts_kv: shape.host_gib > Some(0.0),
            },
            shape,
        }))
    }

    /// Cost of a worker per hour.
    fn worker_cost(&self, shape: &Shape, engine: &EngineConfig) -> anyhow::Result<f64> {
        let context = &self.plan.asked;
        let per_gpu = if context.priced {
            context.prices.per_gpu_hour(&shape.gpu)
        } else {
            Some(1.0)
        };
        let per_host_gib = match context.prices.host_gib {
            Some(price) if context.priced => price,
            _ => 0.0,
        };
        let host_gib = shape.host_gib.unwrap_or(0.0);
        let memory = per_host_gib * host_gib * f64::from(engine.data_parallel_size);
        let per_gpu = per_gpu.context("every GPU has a price, as was checked")?;
        Ok(per_gpu * f64::from(engine.gpus()) + memory)
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

/// Objectives with every limit multiplied by `factor`.
pub(super) fn scale(objectives: &Objectives, factor: f64) -> Objectives {
    let scaled = |slo: &Option<Slo>| slo.as_ref().map(|slo| slo.scaled(factor));
    Objectives {
        all: scaled(&objectives.all),
        classes: objectives
            .classes
            .iter()
            .map(|(name, slo)| (name.clone(), scaled(slo)))
            .collect(),
    }
}
