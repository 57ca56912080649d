//! Residuals of the physical model, on log time: a sum of effects of nested groups of deployments.
//!
//! Every effect is drawn towards 0 by its prior, so a group with little data says little, and a
//! deployment of which no group was measured gets physics alone: the correction fades with
//! distance. Effects of groups that span models (framework, generation, precision) carry over to
//! models that were never measured; those of a combination stay with it.

use std::collections::BTreeMap;
use std::sync::Arc;

use slipstream_base::width::{floor_u64, nearest_f32, to_usize};

use crate::deployment::{Deployment, Serving};
use crate::linear_algebra::{FitError, solve};
use crate::profile::{Distance, Profile};

/// Standard deviations of a group's effects on log TPOT; those on log TTFT are [`TTFT_SPREAD`] times as large
/// (of 0.7 to 4, the one with which held-out loads were predicted best).
struct Group {
    name: &'static str,
    /// Of the effect itself.
    effect: f64,
    /// Of its slopes over the features beyond the first.
    slope: f64,
    /// Features that it has, the constant included.
    features: usize,
}

const fn group(name: &'static str, effect: f64, slope: f64, features: usize) -> Group {
    Group {
        name,
        effect,
        slope,
        features,
    }
}

const TTFT_SPREAD: f64 = 1.0;

/// From wide to narrow.
const GROUPS: &[Group] = &[
    group("mode", 0.03, 0.01, 3),
    group("framework", 0.03, 0.01, 3),
    group("generation", 0.03, 0.01, 3),
    group("system", 0.02, 0.01, 1),
    group("precision", 0.04, 0.015, 3),
    group("kind", 0.04, 0.015, 3),
    group("family", 0.05, 0.02, 3),
    group("family-framework", 0.08, 0.03, 3),
    group("family-generation", 0.08, 0.03, 3),
    group("layout", 0.06, 0.02, 3),
    group("combination", 0.20, 0.08, 7),
    group("name", 0.10, 0.04, 3),
    group("version", 0.12, 0.05, 3),
    group("parallel", 0.12, 0.06, 4),
    group("lengths", 0.06, 0.03, 2),
    group("series", 0.06, 0.04, 2),
];

/// Groups and features of one deployment.
pub(crate) struct Features {
    levels: Vec<String>,
    values: [Vec<f64>; 2],
    /// Batch size, input and output length.
    load: [f64; 3],
}

/// Continuous features stay where deployments are measured: beyond, slopes would extrapolate.
#[inline]
fn within(x: f64, most: f64) -> f64 {
    x.clamp(-most, most)
}

#[inline]
fn log2(x: f64) -> f64 {
    crate::elementary::log2(x.max(1e-9))
}

/// Of the sequences on all ranks.
fn batch_feature(sequences: f64) -> f64 {
    within(log2(sequences) - 4.5, 5.0) / 2.0
}

pub(crate) fn input_feature(isl: f64) -> f64 {
    within(log2(isl / 2048.0), 3.0) / 1.5
}

/// Feature of the residual for a mean output length.
#[inline]
pub(crate) fn output_feature(osl: f64) -> f64 {
    within(log2(osl / 1024.0), 3.0) / 2.0
}

/// Features of one deployment, the constant included.
const FEATURES: usize = 7;
/// Physics is never off by more than this on data that was understood: log TPOT, log TTFT.
const MOST: [f64; 2] = [0.8, 1.5];
/// Loads up to so many times as far are taken to be around the measured ones: series double.
const AROUND: f64 = 2.0;
/// Batch sizes of a rank with a residual of their own; the feature ends below.
const BATCHES: usize = 1024;

/// The residual on the TPOT of one deployment as a function of a step's load.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepResidual {
    /// By sequences that decode: the part that does not depend on lengths, and the slope over the input length.
    by_batch: Arc<[[f64; 2]]>,
    /// Slope over the output length.
    output: f64,
    /// Share of the residual that applies around measured loads, and beyond.
    shares: [f64; 2],
    /// Ends of what counts as around: batch size, input and output length.
    ranges: [[f64; 2]; 3],
}

impl StepResidual {
    /// Log of measured over physical time of steps with `sequences` in decode, of prompts of `isl` tokens
    /// (with their [`input_feature`]) and answers of `osl`, on average.
    #[inline]
    pub(crate) fn at(&self, sequences: f64, (isl, feature): (f64, f64), osl: f64) -> f64 {
        let [constant, input] = self.by_batch[to_usize(floor_u64(sequences)).min(BATCHES)];
        let sum = constant + input * feature + self.output * output_feature(osl);
        let load = [sequences.max(1.0), isl, osl];
        let mut each = load.iter().zip(&self.ranges);
        let around = each.all(|(x, [least, most])| (*least..=*most).contains(x));
        self.shares[usize::from(!around)] * within(sum, MOST[0])
    }
}

/// The residual of steps that only decode, of which nothing but the length of answers changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeResidual {
    /// The part that does not depend on the length of answers.
    rest: f64,
    output: f64,
    shares: [f64; 2],
    /// The number of sequences and the length of prompts are around measured ones.
    around: bool,
    range: [f64; 2],
}

impl StepResidual {
    /// As [`at`](Self::at), for any output length.
    #[inline]
    pub(crate) fn of_decodes(&self, sequences: f64, (isl, feature): (f64, f64)) -> DecodeResidual {
        let [constant, input] = self.by_batch[to_usize(floor_u64(sequences)).min(BATCHES)];
        let [batches, inputs, outputs] = self.ranges;
        let is_in = |x: f64, [least, most]: [f64; 2]| (least..=most).contains(&x);
        DecodeResidual {
            rest: constant + input * feature,
            output: self.output,
            shares: self.shares,
            around: is_in(sequences.max(1.0), batches) && is_in(isl, inputs),
            range: outputs,
        }
    }
}

impl DecodeResidual {
    /// As [`StepResidual::at`], with the same bits; with the feature of the output length.
    #[inline]
    pub(crate) fn at(&self, osl: f64, feature: f64) -> f64 {
        let sum = self.rest + self.output * feature;
        let [least, most] = self.range;
        let around = self.around && (least..=most).contains(&osl);
        self.shares[usize::from(!around)] * within(sum, MOST[0])
    }
}

impl Features {
    pub(crate) fn of(d: &Deployment) -> Features {
        let framework = d.framework.name();
        let generation = d.gpu.generation;
        let mode = d.mode();
        let family = d.family();
        let kind = match (d.shape.experts, d.shape.attention) {
            (None, _) => "dense",
            (Some(_), slipstream_config::preset::Attention::Latent { .. }) => "latent",
            (Some(_), slipstream_config::preset::Attention::Linear { .. }) => "linear",
            (Some(_), _) => "experts",
        };
        let p = d.parallel;
        let layout = format!(
            "{}{}",
            if p.expert > 1 { "ep" } else { "tp" },
            if p.attention_data > 1 { "-dp" } else { "" }
        );
        let combination = format!("{family}|{framework}|{generation}|{}|{mode}", d.precision);
        let parallel = match d.serving {
            Serving::Aggregated => format!(
                "{combination}|{}|{}x{}x{}",
                d.gpu.measured_name(),
                p.tensor,
                p.attention_data,
                p.expert
            ),
            Serving::Disaggregated { prefill, .. } => format!(
                "{combination}|{}|{}x{}x{}-{}x{}",
                d.gpu.measured_name(),
                p.tensor,
                p.attention_data,
                p.expert,
                prefill.tensor,
                prefill.attention_data
            ),
        };
        let lengths = format!(
            "{combination}|{}|{}+{}",
            d.gpu.measured_name(),
            d.isl,
            d.osl
        );
        let series = format!("{parallel}|{}+{}", d.isl, d.osl);
        let levels = GROUPS
            .iter()
            .map(|group| match group.name {
                "mode" => mode.to_owned(),
                "framework" => format!("{framework}|{mode}"),
                "generation" => format!("{generation}|{framework}"),
                "system" => format!("{}|{framework}", d.gpu.measured_name()),
                "precision" => format!("{framework}|{generation}|{}", d.precision),
                "kind" => format!("{framework}|{kind}|{generation}|{}", d.precision),
                "family" => family.clone(),
                "family-framework" => format!("{family}|{framework}"),
                "family-generation" => format!("{family}|{framework}|{generation}"),
                "layout" => format!("{framework}|{layout}|{kind}"),
                "combination" => combination.clone(),
                // Repositories of one shape may be served with other options, such as drafts of tokens.
                "name" => format!("{combination}|{}", d.shape.name),
                "version" => format!("{combination}|{}|{}", d.shape.name, d.version),
                "parallel" => parallel.clone(),
                "lengths" => lengths.clone(),
                "series" => series.clone(),
                other => unreachable!("{other} is no group"),
            })
            .collect();
        let batch = batch_feature(d.batch * f64::from(p.attention_data));
        let (input, output) = (input_feature(d.isl), output_feature(d.osl));
        let gpus = within(log2(f64::from(p.tensor * p.attention_data)) - 2.0, 2.0);
        let base = [
            1.0,
            batch,
            input,
            gpus,
            output,
            batch * batch / 2.0 - 0.3,
            batch * input,
        ];
        let values = [base.to_vec(), base.to_vec()];
        Features {
            levels,
            values,
            load: [d.batch, d.isl, d.osl],
        }
    }

    fn level(&self, group: &str) -> &str {
        let at = GROUPS.iter().position(|g| g.name == group);
        &self.levels[at.expect("a group of the list")]
    }

    /// Name of the constant effect of `group`.
    fn key(&self, group: &str) -> String {
        format!("{group}|{}|0", self.level(group))
    }

    /// Widens `ranges` to the load of this deployment.
    pub(crate) fn widen(&self, ranges: &mut BTreeMap<String, [[f64; 2]; 3]>) {
        let level = self.level("parallel").to_owned();
        let nothing = [[f64::INFINITY, 0.0]; 3];
        let ranges = ranges.entry(level).or_insert(nothing);
        for (x, [least, most]) in self.load.iter().zip(ranges) {
            *least = least.min(*x);
            *most = most.max(*x);
        }
    }

    /// Name, standard deviation and value of each effect on `target` (0: TPOT, 1: TTFT).
    fn effects(&self, target: usize) -> impl Iterator<Item = (String, f64, f64)> {
        let scale = [1.0, TTFT_SPREAD][target];
        GROUPS
            .iter()
            .zip(&self.levels)
            .flat_map(move |(group, level)| {
                self.values[target][..group.features]
                    .iter()
                    .enumerate()
                    .map(move |(i, value)| {
                        let spread = if i == 0 { group.effect } else { group.slope };
                        (
                            format!("{}|{level}|{i}", group.name),
                            spread * scale,
                            *value,
                        )
                    })
            })
    }

    /// Log of measured over physical time that `profile` expects: the farther from its data, the
    /// less of the residual applies.
    pub(crate) fn residual(&self, profile: &Profile, target: usize) -> f64 {
        let shares = self.distances(profile).into_iter();
        let share = shares.map(|distance| profile.damping[&distance][target]);
        share.fold(1.0, f64::min) * self.undamped(&profile.residual[target], target)
    }

    /// The whole residual of all measured groups.
    pub(crate) fn undamped(&self, coefficients: &BTreeMap<String, f32>, target: usize) -> f64 {
        let sum: f64 = self
            .effects(target)
            .filter_map(|(name, _, value)| Some(f64::from(*coefficients.get(&name)?) * value))
            .sum();
        within(sum, MOST[target])
    }

    /// The residual on TPOT of the steps of this deployment, whatever their load.
    pub(crate) fn of_steps(&self, profile: &Profile, ranks: u32) -> StepResidual {
        let coefficients = &profile.residual[0];
        let mut sums = [0.0; FEATURES];
        let groups = GROUPS.iter().zip(&self.levels);
        // A step knows mean lengths, not whether all requests have exactly those that were measured.
        for (group, level) in
            groups.filter(|(group, _)| !["lengths", "series"].contains(&group.name))
        {
            for (i, sum) in sums.iter_mut().enumerate().take(group.features) {
                let name = format!("{}|{level}|{i}", group.name);
                *sum += coefficients.get(&name).map_or(0.0, |c| f64::from(*c));
            }
        }
        let measured = coefficients.contains_key(&self.key("parallel"));
        let share = |distance| profile.damping[&distance][0];
        let (near, far) = if measured {
            (share(Distance::Near), share(Distance::Load))
        } else {
            let distances = self.distances(profile).into_iter();
            let least = distances.map(share).fold(1.0, f64::min);
            (least, least)
        };
        let ranges = profile.ranges.get(self.level("parallel"));
        let ranges = ranges.map_or([[0.0, f64::INFINITY]; 3], |ranges| {
            ranges.map(|[least, most]| [least / AROUND, most * AROUND])
        });
        let gpus = self.values[0][3];
        let by_batch = (0..=BATCHES).map(|batch| {
            let x = batch_feature(batch.max(1) as f64 * f64::from(ranks));
            [
                sums[0] + sums[1] * x + sums[3] * gpus + sums[5] * (x * x / 2.0 - 0.3),
                sums[2] + sums[6] * x,
            ]
        });
        StepResidual {
            by_batch: by_batch.collect(),
            output: sums[4],
            shares: [near, far],
            ranges,
        }
    }

    /// Every part that was never measured, or the one word for a deployment of measured parts.
    pub(crate) fn distances(&self, profile: &Profile) -> Vec<Distance> {
        let measured = |name: &str| profile.residual[0].contains_key(&self.key(name));
        let any_framework = |level: &str| {
            let framework = level.split('|').next().unwrap_or("");
            ["agg", "disagg"].iter().any(|mode| {
                profile.residual[0].contains_key(&format!("framework|{framework}|{mode}|0"))
            })
        };
        let any_gpu = |level: &str| {
            let gpu = level.split('|').next().unwrap_or("");
            let start = format!("system|{gpu}|");
            profile.residual[0]
                .range(start.clone()..)
                .next()
                .is_some_and(|(name, _)| name.starts_with(&start))
        };
        if measured("parallel") {
            let ranges = profile.ranges.get(self.level("parallel"));
            let around = ranges.is_none_or(|ranges| {
                let mut each = self.load.iter().zip(ranges);
                each.all(|(x, [least, most])| (least / AROUND..=most * AROUND).contains(x))
            });
            return vec![if around {
                Distance::Near
            } else {
                Distance::Load
            }];
        }
        let unknown = [
            (Distance::Model, !measured("family")),
            (Distance::Gpu, !any_gpu(&self.levels[3])),
            (Distance::Framework, !any_framework(&self.levels[1])),
        ];
        let unknown: Vec<Distance> = unknown
            .into_iter()
            .filter_map(|(distance, unknown)| unknown.then_some(distance))
            .collect();
        if unknown.is_empty() {
            vec![Distance::Combination]
        } else {
            unknown
        }
    }
}

/// Fits effects to the second of each of `samples`, log of measured over physical time: ridge
/// regression, with samples that lie `noise` and more away counting less (Cauchy weights).
///
/// Solved in its dual form, a matrix of the samples: there are several effects per sample.
///
/// # Errors
/// If the system cannot be solved.
pub(crate) fn fit(
    samples: &[(&Features, f64)],
    target: usize,
    noise: f64,
) -> Result<BTreeMap<String, f32>, FitError> {
    /// After so many, weights change by less than what a held-out error shows.
    const ROUNDS: usize = 8;
    let n = samples.len();
    // Levels as numbers, to compare them quickly.
    let mut numbers: BTreeMap<(usize, &str), usize> = BTreeMap::new();
    let levels: Vec<Vec<usize>> = samples
        .iter()
        .map(|(features, _)| {
            let of_group = features.levels.iter().enumerate().map(|(group, level)| {
                let next = numbers.len();
                *numbers.entry((group, level.as_str())).or_insert(next)
            });
            of_group.collect()
        })
        .collect();
    let scale = [1.0, TTFT_SPREAD][target];
    let mut kernel = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            let (x, y) = (&samples[i].0.values[target], &samples[j].0.values[target]);
            let sum: f64 = GROUPS
                .iter()
                .enumerate()
                .filter(|(g, _)| levels[i][*g] == levels[j][*g])
                .map(|(_, group)| {
                    let pairs = x.iter().zip(y).take(group.features).skip(1);
                    let slopes: f64 = pairs.map(|(a, b)| a * b).sum();
                    group.effect * group.effect + group.slope * group.slope * slopes
                })
                .sum();
            kernel[i * n + j] = sum * scale * scale;
        }
    }
    let mut weights = vec![1.0; n];
    let mut dual = vec![0.0; n];
    for _ in 0..ROUNDS {
        let mut a = kernel.clone();
        for (i, weight) in weights.iter().enumerate() {
            a[i * n + i] += noise * noise / weight;
        }
        dual = samples.iter().map(|(_, error)| *error).collect();
        if !solve(&mut a, &mut dual) {
            return Err(FitError);
        }
        for (weight, dual) in weights.iter_mut().zip(&dual) {
            // The residual of a sample is its dual variable times its variance.
            let left = dual * noise * noise / *weight;
            *weight = 1.0 / (1.0 + (left / (2.0 * noise)).powi(2));
        }
    }
    let mut effects: BTreeMap<String, f64> = BTreeMap::new();
    for ((features, _), dual) in samples.iter().zip(&dual) {
        for (name, spread, value) in features.effects(target) {
            *effects.entry(name).or_default() += spread * spread * value * dual;
        }
    }
    Ok(effects
        .into_iter()
        .map(|(name, effect)| (name, nearest_f32(effect)))
        .collect())
}
