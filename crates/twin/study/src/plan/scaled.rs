//! `[autoscale]` on the shapes of a plan: fewest and most workers, by cost.
//!
//! The search itself has a fixed number of workers, whose cost is known before a run. With `[autoscale]` it is
//! measured. So each shape of the answer's table is tried with all bounds, the cheapest possible first, and not if it
//! cannot cost less than the cheapest so far: workers cost at least the fewest that run, and at least the GPU time of the
//! requests.

use anyhow::ensure;
use slipstream_base::width::floor_u32;
use slipstream_config::cluster::AutoscalePolicy;
use slipstream_plan::{Conditions, Setting, Shape, Trial};

use super::base::Base;
use super::driver::Driver;
use super::{Choice, Row};

/// Most workers, over the size that attains without `[autoscale]`: some start too late to be of use.
const MOST: [f64; 3] = [1.0, 1.5, 2.0];

/// The cheapest with `[autoscale]`.
#[derive(Debug)]
pub(super) struct Scaled {
    /// `None`: no bounds cost less than the answer.
    pub(super) best: Option<Bounds>,
    /// Runs, and bounds that could not be cheaper.
    pub(super) tried: usize,
    pub(super) left_out: usize,
}

/// Bounds that attain, and their figures.
#[derive(Debug)]
pub(super) struct Bounds {
    pub(super) name: String,
    pub(super) setting: String,
    pub(super) workers_min: u32,
    pub(super) workers_max: u32,
    /// Of those that existed, over the run.
    pub(super) workers_mean: f64,
    /// Per hour.
    pub(super) cost: f64,
    pub(super) share: f64,
    pub(super) digest: u64,
}

/// Refuses a question without a policy that the twin has.
pub(super) fn check(base: &Base, shapes: &[Shape], setting: &Setting) -> anyhow::Result<()> {
    let plain = shapes.iter().find(|shape| shape.prefill_share.is_none());
    let Some(shape) = plain else {
        anyhow::bail!(
            "--autoscale-min is for clusters with workers of one kind; add aggregated to --serving, or leave it out"
        );
    };
    let (cluster, _) = base.resolve_scaled(shape, setting, None, 65_535)?;
    let config = cluster.pools[0].autoscale;
    ensure!(
        config.is_some_and(|config| config.policy != AutoscalePolicy::Custom),
        "--autoscale-min needs a policy: `[autoscale]` in --cluster, or --set autoscale.policy=utilization"
    );
    Ok(())
}

/// A shape with bounds.
struct Candidate<'a> {
    row: &'a Row,
    /// Cost of one worker per hour.
    worker: f64,
    workers_min: u32,
    workers_max: u32,
    /// It costs at least this.
    least: f64,
}

/// Tries every value of `workers_min` on the shapes of `rows`, of which the first is the answer without `[autoscale]`.
pub(super) fn search(
    driver: &mut Driver<'_>,
    rows: &[&Row],
    fewest: &[u32],
    part: usize,
    conditions: Conditions,
) -> anyhow::Result<Scaled> {
    let mut candidates: Vec<Candidate<'_>> = Vec::new();
    let plain = rows.iter().filter(|row| row.shape.prefill_share.is_none());
    for &row in plain {
        let of = &driver.ready.candidates[row.sized.shape];
        for factor in MOST {
            let workers_max = floor_u32((factor * f64::from(row.sized.workers)).ceil());
            let workers_max = workers_max.min(of.workers_max);
            for &workers_min in fewest.iter().filter(|&&least| least <= workers_max) {
                let same = |other: &Candidate<'_>| {
                    (other.row.sized.shape, other.workers_min, other.workers_max)
                        == (row.sized.shape, workers_min, workers_max)
                };
                if !candidates.iter().any(same) {
                    // The mean is no whole number, as the bound is.
                    let work = of.workers_min.saturating_sub(1);
                    candidates.push(Candidate {
                        row,
                        worker: of.cost,
                        workers_min,
                        workers_max,
                        least: of.cost_of(workers_min.max(work)),
                    });
                }
            }
        }
    }
    // Sorting is stable: of equal ones the first of the table, with the fewest workers at most.
    candidates.sort_by(|a, b| a.least.total_cmp(&b.least));
    let mut lowest = rows[0].sized.cost;
    let (mut best, mut tried, mut left_out) = (None, 0, 0);
    for of in candidates {
        if of.least >= lowest * (1.0 - 1e-9) {
            left_out += 1;
            continue;
        }
        tried += 1;
        let Choice { shape, setting, .. } = of.row.sized;
        let trial = Trial {
            shape,
            setting,
            workers: of.workers_max,
            part,
            conditions,
            spare: 1,
        };
        let answer = driver.scaled(&trial, of.workers_min)?;
        let Some(scaling) = &answer.outcome.scaling else {
            continue;
        };
        let worker_s: f64 = scaling.pools.iter().map(|pool| pool.worker_s).sum();
        let workers_mean = worker_s / answer.outcome.ended_at.as_secs_f64().max(1e-9);
        let cost = of.worker * workers_mean;
        if answer.measured.attains && cost < lowest * (1.0 - 1e-9) {
            lowest = cost;
            best = Some(Bounds {
                name: of.row.shape.name(),
                setting: of.row.setting.name(),
                workers_min: of.workers_min,
                workers_max: of.workers_max,
                workers_mean,
                cost,
                share: answer.measured.share,
                digest: answer.measured.digest,
            });
        }
    }
    Ok(Scaled {
        best,
        tried,
        left_out,
    })
}
