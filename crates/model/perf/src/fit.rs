//! Makes a profile from measured deployments, and scores it on those that a fit did not see.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use slipstream_base::width::{floor_u64, to_usize};

use crate::deployment::Deployment;
pub use crate::linear_algebra::FitError;
use crate::linear_algebra::solve;
use crate::predict::physical;
use crate::profile::{COUNT, Distance, OWN, Params, Profile, SHARED};
use crate::residual::{self, Features};

/// A deployment with its measured means.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The deployment.
    pub deployment: Deployment,
    /// Mean TPOT, ms.
    pub tpot_ms: f64,
    /// Mean TTFT, ms.
    pub ttft_ms: f64,
}

/// Spread of measurements around a residual on log time, TPOT and TTFT: of 0.1 to 0.4 for TTFT, what held-out
/// loads were predicted best with.
const NOISE: [f64; 2] = [0.06, 0.25];
/// The same of what physics leaves over, while parameters are fitted.
const PHYSICS_NOISE: [f64; 2] = [0.12, 0.35];

/// Errors of TPOT and TTFT by physics alone, on a log scale, over those that are expected.
fn log_errors(params: &Params, sample: &Sample) -> [f64; 2] {
    let p = physical(&sample.deployment, params);
    [
        libm::log(p.tpot_ms / sample.tpot_ms) / PHYSICS_NOISE[0],
        libm::log(p.ttft_ms / sample.ttft_ms) / PHYSICS_NOISE[1],
    ]
}

/// Normal equations (matrix, right side) of the errors at `here`, by slopes. Large errors weigh less.
fn equations(samples: &[&Sample], here: &Params) -> (Vec<f64>, Vec<f64>) {
    const STEP: f64 = 1e-3;
    let mut moved = Vec::with_capacity(COUNT);
    for i in 0..COUNT {
        let mut values = here.values.clone();
        values[i] *= libm::exp(STEP);
        moved.push(Params { values });
    }
    let mut a = vec![0.0; COUNT * COUNT];
    let mut b = vec![0.0; COUNT];
    for sample in samples {
        let framework = sample.deployment.framework as usize;
        let own = SHARED.len() + framework * OWN.len();
        let touched: Vec<usize> = (0..SHARED.len()).chain(own..own + OWN.len()).collect();
        let e = log_errors(here, sample);
        let slopes: Vec<[f64; 2]> = touched
            .iter()
            .map(|&i| {
                let m = log_errors(&moved[i], sample);
                [(m[0] - e[0]) / STEP, (m[1] - e[1]) / STEP]
            })
            .collect();
        for target in 0..2 {
            let weight = 1.0 / (1.0 + e[target] * e[target]).sqrt();
            for (&i, u) in touched.iter().zip(&slopes) {
                b[i] -= weight * u[target] * e[target];
                for (&j, v) in touched.iter().zip(&slopes) {
                    if j <= i {
                        a[i * COUNT + j] += weight * u[target] * v[target];
                    }
                }
            }
        }
    }
    (a, b)
}

/// Fits the physical parameters: Gauss-Newton on log time with the priors as ridge and weights that
/// fall off beyond one standard deviation.
///
/// # Errors
/// If a step cannot be solved, such as for measured times that are not positive and finite.
pub fn params(samples: &[&Sample]) -> Result<Params, FitError> {
    let prior: Vec<f64> = Params::prior()
        .values
        .iter()
        .map(|x| libm::log(*x))
        .collect();
    let spread = Params::spread();
    let mut at = prior.clone();
    let params_of = |at: &[f64]| Params {
        values: at.iter().map(|x| libm::exp(*x)).collect(),
    };
    // Soft L1: quadratic near 0, linear beyond.
    let cost_of = |at: &[f64]| {
        let params = params_of(at);
        let data: f64 = samples
            .iter()
            .flat_map(|s| log_errors(&params, s))
            .map(|e| 2.0 * ((1.0 + e * e).sqrt() - 1.0))
            .sum();
        let held: f64 = at
            .iter()
            .zip(&prior)
            .zip(&spread)
            .map(|((x, p), s)| (2.0 * (x - p) / s).powi(2))
            .sum();
        data + held
    };
    let mut cost = cost_of(&at);
    let mut damping = 1e-2;
    for _ in 0..14 {
        let (mut a, mut b) = equations(samples, &params_of(&at));
        for i in 0..COUNT {
            let pull = 4.0 / (spread[i] * spread[i]);
            b[i] -= pull * (at[i] - prior[i]);
            a[i * COUNT + i] += pull;
        }
        let mut better = false;
        for _ in 0..6 {
            let (mut a, mut step) = (a.clone(), b.clone());
            for i in 0..COUNT {
                a[i * COUNT + i] *= 1.0 + damping;
            }
            if !solve(&mut a, &mut step) {
                return Err(FitError);
            }
            let there: Vec<f64> = at
                .iter()
                .zip(&step)
                .map(|(x, s)| x + s.clamp(-0.7, 0.7))
                .collect();
            let cost_there = cost_of(&there);
            if cost_there < cost {
                let little = cost - cost_there < 1e-4 * cost;
                (at, cost) = (there, cost_there);
                damping = (damping * 0.3).max(1e-6);
                better = !little;
                break;
            }
            damping *= 5.0;
        }
        if !better {
            break;
        }
    }
    Ok(params_of(&at))
}

/// Fits parameters and residual; the bands stay those of the prior.
///
/// # Errors
/// See [`params`].
pub fn profile(samples: &[&Sample]) -> Result<Profile, FitError> {
    let params = params(samples)?;
    let mut profile = Profile::prior();
    let featured: Vec<(Features, [f64; 2])> = samples
        .iter()
        .map(|s| {
            let p = physical(&s.deployment, &params);
            let errors = [
                libm::log(s.tpot_ms / p.tpot_ms),
                libm::log(s.ttft_ms / p.ttft_ms),
            ];
            (Features::of(&s.deployment), errors)
        })
        .collect();
    for target in 0..2 {
        let rows: Vec<(&Features, f64)> = featured.iter().map(|(f, e)| (f, e[target])).collect();
        profile.residual[target] = residual::fit(&rows, target, NOISE[target])?;
    }
    for (features, _) in &featured {
        features.widen(&mut profile.ranges);
    }
    profile.params = params;
    Ok(profile)
}

/// A sample as a fold that did not contain it predicts it.
#[derive(Clone, Copy, Debug)]
pub struct HeldOut {
    /// Index of the sample.
    pub sample: usize,
    /// Index of the fold among those of its kind.
    pub fold: usize,
    /// Log of predicted over measured, TPOT and TTFT, with the share of the residual that suits the
    /// other folds.
    pub errors: [f64; 2],
    /// The same by physics alone, with the parameters of the fold.
    pub physics: [f64; 2],
    /// The whole residual.
    pub residual: [f64; 2],
    /// Whether more requests were under way than there was room for, by the model.
    pub saturated: bool,
}

/// Names of the folds of one kind, and the fold of each sample; `usize::MAX` if none leaves it out.
pub fn folds(samples: &[Sample], kind: Distance) -> (Vec<String>, Vec<usize>) {
    const PARTS: u64 = 5;
    let cell_of = |d: &Deployment| {
        let p = d.parallel;
        format!(
            "{}|{}|{}|{}|{}|{}x{}x{}",
            d.family(),
            d.gpu.name,
            d.framework.name(),
            d.precision,
            d.mode(),
            p.tensor,
            p.attention_data,
            p.expert
        )
    };
    // Least and largest batch size and input length of each cell.
    let mut loads: BTreeMap<String, [[f64; 2]; 2]> = BTreeMap::new();
    for s in samples {
        let d = &s.deployment;
        let cell = loads.entry(cell_of(d)).or_insert([[f64::INFINITY, 0.0]; 2]);
        for ([least, most], x) in cell.iter_mut().zip([d.batch, d.isl]) {
            (*least, *most) = (least.min(x), most.max(x));
        }
    }
    let keys: Vec<String> = samples
        .iter()
        .map(|s| {
            let d = &s.deployment;
            let p = d.parallel;
            let cell = format!(
                "{}|{}|{}|{}|{}",
                d.family(),
                d.gpu.name,
                d.framework.name(),
                d.precision,
                d.mode()
            );
            match kind {
                Distance::Near => {
                    let series = format!(
                        "{cell}|{}x{}x{}|{}+{}",
                        p.tensor, p.attention_data, p.expert, d.isl, d.osl
                    );
                    part(&series, PARTS)
                }
                Distance::Load => {
                    let [batch, isl] = loads[&cell_of(d)];
                    if d.batch > batch[1] / 4.0 && batch[0] <= batch[1] / 4.0 {
                        "highest batch sizes".to_owned()
                    } else if d.isl > isl[1] / 2.0 && isl[0] <= isl[1] / 2.0 {
                        "longest prompts".to_owned()
                    } else {
                        String::new()
                    }
                }
                Distance::Combination => part(&cell, PARTS),
                Distance::Model => d.family(),
                Distance::Gpu => d.gpu.name.to_string(),
                Distance::Framework => d.framework.name().to_owned(),
            }
        })
        .collect();
    let mut names = keys.clone();
    names.sort_unstable();
    names.dedup();
    names.retain(|name| !name.is_empty());
    let of = keys
        .iter()
        .map(|key| names.binary_search(key).unwrap_or(usize::MAX))
        .collect();
    (names, of)
}

/// One of `parts` equal parts of all texts, by a hash (FNV-1a).
fn part(text: &str, parts: u64) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("part {} of {parts}", (hash >> 17) % parts + 1)
}

/// Predicts every sample by a profile that was fitted without its fold.
///
/// # Errors
/// See [`params`].
pub fn held_out(samples: &[Sample], kind: Distance) -> Result<Vec<HeldOut>, FitError> {
    let (names, of) = folds(samples, kind);
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<HeldOut>, FitError> {
        let mut results = Vec::new();
        loop {
            let fold = next.fetch_add(1, Ordering::Relaxed);
            if fold >= names.len() {
                return Ok(results);
            }
            one_fold(samples, &of, fold, &mut results)?;
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    #[expect(
        clippy::disallowed_methods,
        reason = "threads of one fit, whatever their number"
    )]
    let mut results = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all = Vec::with_capacity(samples.len());
        for worker in workers {
            all.extend(worker.join().expect("a fit does not panic")?);
        }
        Ok::<_, FitError>(all)
    })?;
    results.sort_by_key(|r| r.sample);
    for fold in 0..names.len() {
        let others: Vec<HeldOut> = results.iter().filter(|r| r.fold != fold).copied().collect();
        let shares = damping(&others);
        for result in results.iter_mut().filter(|r| r.fold == fold) {
            result.errors = [0, 1].map(|t| result.physics[t] + shares[t] * result.residual[t]);
        }
    }
    Ok(results)
}

/// Predicts the samples of `fold` by a profile that was fitted to the others.
fn one_fold(
    samples: &[Sample],
    of: &[usize],
    fold: usize,
    results: &mut Vec<HeldOut>,
) -> Result<(), FitError> {
    let others = samples.iter().zip(of).filter(|(_, f)| **f != fold);
    let kept: Vec<&Sample> = others.map(|(sample, _)| sample).collect();
    if kept.is_empty() {
        return Ok(());
    }
    let fitted = profile(&kept)?;
    for (index, sample) in samples.iter().enumerate().filter(|(i, _)| of[*i] == fold) {
        let physical = physical(&sample.deployment, &fitted.params);
        let features = Features::of(&sample.deployment);
        let physics = [
            libm::log(physical.tpot_ms / sample.tpot_ms),
            libm::log(physical.ttft_ms / sample.ttft_ms),
        ];
        let residual = [0, 1].map(|target| features.undamped(&fitted.residual[target], target));
        results.push(HeldOut {
            sample: index,
            fold,
            errors: physics,
            physics,
            residual,
            saturated: physical.saturated,
        });
    }
    Ok(())
}

/// The shares of the residual, TPOT and TTFT, with which `results` are predicted best: least mean
/// of the absolute errors on log time.
pub fn damping(results: &[HeldOut]) -> [f64; 2] {
    const STEPS: u32 = 20;
    [0, 1].map(|target| {
        let shares = (0..=STEPS).map(|i| f64::from(i) / f64::from(STEPS));
        let error = |share: f64| -> f64 {
            let errors = results
                .iter()
                .map(|r| (r.physics[target] + share * r.residual[target]).abs());
            errors.sum()
        };
        let errors = shares.map(|share| (error(share), share));
        errors
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .map_or(1.0, |(_, share)| share)
    })
}

/// The value below which `share` of `values` lie; `values` is not empty.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = share * (sorted.len() - 1) as f64;
    let below = to_usize(floor_u64(at));
    let low = sorted[below];
    let high = sorted[(below + 1).min(sorted.len() - 1)];
    low + (high - low) * at.fract()
}

/// Bands in which 80 % of the measured times of held-out samples lie, on log time around the
/// prediction, by distance and load. Few samples of a kind take those of all loads.
pub fn bands(
    held_out: &BTreeMap<Distance, Vec<HeldOut>>,
) -> BTreeMap<(Distance, bool), [[f64; 2]; 2]> {
    const LEAST: usize = 30;
    let mut bands = BTreeMap::new();
    for (&distance, results) in held_out {
        for past in [false, true] {
            let chosen: Vec<&HeldOut> = results.iter().filter(|r| r.saturated == past).collect();
            let chosen = if chosen.len() < LEAST {
                results.iter().collect()
            } else {
                chosen
            };
            let band = [0, 1].map(|target| {
                let missed: Vec<f64> = chosen.iter().map(|r| -r.errors[target]).collect();
                if missed.is_empty() {
                    return [-1.0, 1.0];
                }
                [
                    quantile(&missed, 0.1).min(0.0),
                    quantile(&missed, 0.9).max(0.0),
                ]
            });
            bands.insert((distance, past), band);
        }
    }
    bands
}

/// Fits a profile to all of `samples`, with bands from the errors of held-out folds, which are
/// returned besides. `source` says what the samples are, and the command.
///
/// # Errors
/// See [`params`].
pub fn calibrate(
    samples: &[Sample],
    source: String,
) -> Result<(Profile, BTreeMap<Distance, Vec<HeldOut>>), FitError> {
    let held_out: BTreeMap<_, _> = Distance::ALL
        .into_iter()
        .map(|distance| Ok((distance, held_out(samples, distance)?)))
        .collect::<Result<_, FitError>>()?;
    let mut profile = profile(&samples.iter().collect::<Vec<_>>())?;
    profile.bands = bands(&held_out);
    profile.damping = held_out
        .iter()
        .map(|(&distance, results)| (distance, damping(results)))
        .collect();
    profile.source = source;
    Ok((profile, held_out))
}
