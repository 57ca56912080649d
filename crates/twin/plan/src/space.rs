//! The search space: shapes of workers, and settings of engines and router.

use slipstream_base::width;
use slipstream_config::cluster::Dtype;

use crate::axes::{self, Axes};
use crate::search::AxisPoint;

/// How the model lies on GPUs, and which workers compute prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Preset of the GPU.
    pub gpu: String,
    /// GPUs of one rank.
    pub tensor_parallel: u32,
    /// Stages of one rank, each of `tensor_parallel` GPUs; `None`: the cluster file's.
    pub pipeline_parallel: Option<u32>,
    /// Ranks of one worker; `None`: the cluster file's.
    pub data_parallel: Option<u32>,
    /// Whether each GPU has whole experts; `None`: the cluster file's.
    pub expert_parallel: Option<bool>,
    /// Format of the weights.
    pub dtype: Dtype,
    /// Format of the KV cache; `None`: the checkpoint's, vLLM's `auto`.
    pub kv_cache: Option<Dtype>,
    /// Host memory of one rank for KV blocks, GiB; `None`: the cluster file's.
    pub host_gib: Option<f64>,
    /// Tokens of a draft (speculative decoding), 0 for none; `None`: the cluster file's.
    pub draft_tokens: Option<u32>,
    /// If prefill and decode have workers of their own: the share of prefill workers that balances
    /// the work of both. `None`: each worker does both.
    pub prefill_share: Option<f64>,
}

impl Shape {
    /// `h100-sxm TP4 fp8`, with ` PP2`, ` DP2` and ` EP` behind the `TP4` of such a worker, ` fp8-kv` if the KV cache has a format
    /// of its own, ` 256 GiB host` if it has host memory for KV blocks, ` spec3` if it verifies drafts of three tokens, and ` prefill:decode` if those are apart.
    pub fn name(&self) -> String {
        let apart = match self.prefill_share {
            Some(_) => " prefill:decode",
            None => "",
        };
        let cache = self
            .kv_cache
            .map_or_else(String::new, |dtype| format!(" {}-kv", dtype.name()));
        let host = match self.host_gib {
            Some(gib) if gib > 0.0 => format!(" {gib} GiB host"),
            _ => String::new(),
        };
        let drafts = match self.draft_tokens {
            Some(tokens) if tokens > 0 => format!(" spec{tokens}"),
            _ => String::new(),
        };
        let stages = match self.pipeline_parallel {
            Some(stages) if stages > 1 => format!(" PP{stages}"),
            _ => String::new(),
        };
        let ranks = match self.data_parallel {
            Some(ranks) if ranks > 1 => format!(" DP{ranks}"),
            _ => String::new(),
        };
        let experts = match self.expert_parallel {
            Some(true) => " EP",
            _ => "",
        };
        format!(
            "{} TP{}{stages}{ranks}{experts} {}{cache}{host}{drafts}{apart}",
            self.gpu,
            self.tensor_parallel,
            self.dtype.name()
        )
    }

    /// Whether the shapes are one, but for the balance of prefill and decode workers, which follows from the load.
    pub fn is_like(&self, other: &Shape) -> bool {
        let balanced = Shape {
            prefill_share: self.prefill_share.and(other.prefill_share),
            ..self.clone()
        };
        balanced == *other && self.prefill_share.is_some() == other.prefill_share.is_some()
    }

    /// Fewest workers of a cluster of this shape.
    pub fn workers_least(&self) -> u32 {
        if self.prefill_share.is_some() { 2 } else { 1 }
    }
}

/// Settings that do not change the cost of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// `engine.max_num_seqs`
    pub max_num_seqs: u32,
    /// `engine.max_num_batched_tokens`
    pub max_num_batched_tokens: u32,
    /// `router.policy`
    pub policy: String,
    /// `router.prefill_weight` of policy `kv`; `None`: the cluster file's.
    pub prefill_weight: Option<f64>,
    /// `router.temperature` of policy `kv`; `None`: the cluster file's.
    pub temperature: Option<f64>,
    /// Factor on [`Shape::prefill_share`]; 1 in shapes without.
    pub prefill_factor: f64,
    /// Prefill workers more than that share, or fewer.
    pub prefill_shift: i8,
}

impl Setting {
    /// `256 seqs, 8192 tokens, kv`, with ` weight 4` and ` temperature 0.5` if those are searched.
    pub fn name(&self) -> String {
        let part = |name: &str, value: Option<f64>| {
            value.map_or_else(String::new, |value| format!(" {name} {value}"))
        };
        format!(
            "{} seqs, {} tokens, {}{}{}",
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.policy,
            part("weight", self.prefill_weight),
            part("temperature", self.temperature)
        )
    }
}

impl Setting {
    fn routing(&self) -> (&str, Option<f64>, Option<f64>) {
        (&self.policy, self.prefill_weight, self.temperature)
    }
}

/// Each setting as the index of its value on each axis. Shape `[settings]`
pub fn places(settings: &[Setting]) -> Vec<AxisPoint> {
    fn place<T: PartialEq>(
        settings: &[Setting],
        of: usize,
        value: impl Fn(&Setting) -> T,
    ) -> usize {
        let own = value(&settings[of]);
        let first = settings.iter().position(|each| value(each) == own);
        first.expect("the setting is one of them")
    }
    // Those of one worker more or less are next to each other.
    let split = |s: &Setting| {
        let factor = FACTORS
            .iter()
            .position(|&factor| factor == s.prefill_factor);
        let shift = SHIFTS.iter().position(|&shift| shift == s.prefill_shift);
        match factor {
            Some(0) | None => shift.unwrap_or(0),
            Some(factor) => SHIFTS.len() + 2 * factor,
        }
    };
    let routing = |s: &Setting| (s.policy.clone(), s.prefill_weight, s.temperature);
    let of = |at| {
        [
            place(settings, at, |s| s.max_num_seqs),
            place(settings, at, |s| s.max_num_batched_tokens),
            place(settings, at, routing),
            split(&settings[at]),
        ]
    };
    (0..settings.len()).map(of).collect()
}

/// The first of a shape's `settings` that gives the same cluster of `workers` workers as the one at `at`: splits round to whole
/// workers, and a router with one target of each kind has no choice. `ranks`: targets of a worker.
pub fn same(shape: &Shape, settings: &[Setting], at: usize, workers: u32, ranks: u32) -> usize {
    let prefill = |of: &Setting| {
        let share = shape.prefill_share?;
        Some(prefill_workers(share, of, workers))
    };
    let own = &settings[at];
    let own_prefill = prefill(own);
    let most = own_prefill.map_or(workers, |prefill| prefill.max(workers - prefill));
    let no_choice = most.saturating_mul(ranks) == 1;
    let is_same = |of: &Setting| {
        of.max_num_seqs == own.max_num_seqs
            && of.max_num_batched_tokens == own.max_num_batched_tokens
            && (no_choice || of.routing() == own.routing())
            && prefill(of) == own_prefill
    };
    settings[..at].iter().position(is_same).unwrap_or(at)
}

/// Prefill workers among `workers` (at least 2) of a shape with workers of both kinds.
pub fn prefill_workers(share: f64, setting: &Setting, workers: u32) -> u32 {
    let most = workers.saturating_sub(1).max(1);
    let balanced = (share * setting.prefill_factor * f64::from(workers)).round();
    let balanced = width::floor_u32(balanced).clamp(1, most);
    balanced
        .saturating_add_signed(setting.prefill_shift.into())
        .clamp(1, most)
}

/// The assignments `KEY=VALUE` of a cluster of `workers` workers, for a cluster file without pools.
pub fn sets(shape: &Shape, setting: &Setting, workers: u32) -> Vec<String> {
    let mut sets = axes::assignments(shape, setting);
    match shape.prefill_share {
        None => sets.push(format!("pool.main.workers={workers}")),
        Some(share) => {
            let prefill = prefill_workers(share, setting, workers);
            sets.extend([
                "pool.prefill.role=prefill".to_owned(),
                format!("pool.prefill.workers={prefill}"),
                "pool.decode.role=decode".to_owned(),
                format!("pool.decode.workers={}", workers - prefill),
            ]);
        }
    }
    sets
}

/// `8 x (h100-sxm TP4 fp8)`, or `2 prefill + 6 decode x (…)`.
pub fn describe(shape: &Shape, setting: &Setting, workers: u32) -> String {
    let plain = Shape {
        prefill_share: None,
        ..shape.clone()
    };
    match shape.prefill_share {
        None => format!("{workers} x ({})", plain.name()),
        Some(share) => {
            let prefill = prefill_workers(share, setting, workers);
            format!(
                "{prefill} prefill + {} decode x ({})",
                workers - prefill,
                plain.name()
            )
        }
    }
}

/// The only policy that reads weight and temperature.
pub(crate) const WEIGHED: &str = "kv";

/// Factors on the share of prefill workers that balances the work. The first is the base.
const FACTORS: [f64; 3] = [1.0, 0.75, 1.33];
/// Prefill workers more or fewer than that share.
const SHIFTS: [i8; 7] = [-3, -2, -1, 0, 1, 2, 3];

/// Every combination of settings; the first value of each comes first in all. With `apart`, each also
/// with more and fewer prefill workers than balance the work: by factors, and after all of these by one to three workers.
/// Also the number of those before the latter.
pub fn settings(axes: &Axes, apart: bool) -> (Vec<Setting>, usize) {
    if !apart {
        let all = combinations(axes, 1.0, 0);
        let count = all.len();
        return (all, count);
    }
    let factors = FACTORS
        .iter()
        .flat_map(|&factor| combinations(axes, factor, 0));
    let mut all: Vec<Setting> = factors.collect();
    let count = all.len();
    let shifts = SHIFTS.iter().filter(|&&shift| shift != 0);
    all.extend(shifts.flat_map(|&shift| combinations(axes, 1.0, shift)));
    (all, count)
}

fn combinations(axes: &Axes, prefill_factor: f64, prefill_shift: i8) -> Vec<Setting> {
    let searched = |policy: &str, values: &[f64]| -> Vec<Option<f64>> {
        if values.is_empty() || policy != WEIGHED {
            vec![None]
        } else {
            values.iter().copied().map(Some).collect()
        }
    };
    let mut all = Vec::new();
    for policy in &axes.policies {
        let temperatures = searched(policy, &axes.temperatures);
        for prefill_weight in searched(policy, &axes.prefill_weights) {
            for &temperature in &temperatures {
                for &max_num_batched_tokens in &axes.max_num_batched_tokens {
                    for &max_num_seqs in &axes.max_num_seqs {
                        if max_num_seqs <= max_num_batched_tokens {
                            all.push(Setting {
                                max_num_seqs,
                                max_num_batched_tokens,
                                policy: policy.clone(),
                                prefill_weight,
                                temperature,
                                prefill_factor,
                                prefill_shift,
                            });
                        }
                    }
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn splits() -> (Vec<Setting>, usize) {
        let axes = Axes {
            max_num_seqs: vec![256, 64],
            max_num_batched_tokens: vec![8192],
            policies: vec!["kv".to_owned(), "round_robin".to_owned()],
            ..Axes::default()
        };
        settings(&axes, true)
    }

    fn apart(share: f64) -> Shape {
        Shape {
            gpu: "h200".into(),
            tensor_parallel: 2,
            pipeline_parallel: None,
            data_parallel: None,
            expert_parallel: None,
            dtype: Dtype::Fp8,
            kv_cache: None,
            host_gib: None,
            draft_tokens: None,
            prefill_share: Some(share),
        }
    }

    #[test]
    fn both_kinds_have_a_worker_and_each_split_near_the_balance_is_a_setting() {
        let (settings, combined) = splits();
        assert_eq!((settings.len(), combined), (4 * (3 + 6), 4 * 3));
        for workers in 2..40 {
            for share in [0.0, 0.01, 0.3, 0.5, 0.99, 1.0] {
                let splits: Vec<u32> = settings
                    .iter()
                    .map(|setting| prefill_workers(share, setting, workers))
                    .collect();
                assert!(splits.iter().all(|split| (1..workers).contains(split)));
                for near in splits[0].saturating_sub(3).max(1)..=(splits[0] + 3).min(workers - 1) {
                    assert!(splits.contains(&near), "{near} of {workers}, {share}");
                }
            }
        }
    }

    #[test]
    fn settings_of_one_cluster_have_one_identity() {
        let (settings, _) = splits();
        let without_policy = |sets: Vec<String>| -> Vec<String> {
            let is_other = |set: &String| !set.starts_with("router.");
            sets.into_iter().filter(is_other).collect()
        };
        for workers in 2..12 {
            for (share, ranks) in [(0.2, 1), (0.5, 1), (0.5, 2), (0.9, 1)] {
                let shape = apart(share);
                for at in 0..settings.len() {
                    let first = same(&shape, &settings, at, workers, ranks);
                    let same_of = |other: usize| {
                        let [a, b] = [other, at].map(|at| sets(&shape, &settings[at], workers));
                        a == b || workers * ranks == 2 && without_policy(a) == without_policy(b)
                    };
                    let expected = (0..settings.len()).find(|&other| same_of(other));
                    assert_eq!(Some(first), expected, "{workers} {share} {at}");
                }
            }
        }
    }

    #[test]
    fn splits_of_one_worker_more_are_next_to_each_other() {
        let (settings, _) = splits();
        let places = places(&settings);
        for (a, of) in places.iter().zip(&settings) {
            for (b, other) in places.iter().zip(&settings) {
                let shifted = of.prefill_factor == 1.0 && other.prefill_factor == 1.0;
                let next = shifted && of.prefill_shift.abs_diff(other.prefill_shift) == 1;
                assert_eq!(a[3].abs_diff(b[3]) == 1, next, "{of:?} {other:?}");
            }
        }
    }

    #[test]
    fn the_first_values_are_the_base() {
        let axes = Axes {
            max_num_seqs: vec![256, 1024],
            max_num_batched_tokens: vec![8192, 512],
            policies: vec!["kv".to_owned(), "round_robin".to_owned()],
            ..Axes::default()
        };
        let (all, combined) = settings(&axes, true);
        assert_eq!(all[0].name(), "256 seqs, 8192 tokens, kv");
        assert_eq!(all[0].prefill_factor, 1.0);
        assert_eq!(combined, 3 * 2 * 3, "1,024 sequences need as many tokens");
    }

    #[test]
    fn weights_are_those_of_the_policy_that_reads_them() {
        let axes = Axes {
            max_num_seqs: vec![64],
            max_num_batched_tokens: vec![512],
            policies: vec!["kv".to_owned(), "round_robin".to_owned()],
            prefill_weights: vec![4.0, 1.0],
            temperatures: vec![0.0, 0.5, 2.0],
            ..Axes::default()
        };
        let (all, _) = settings(&axes, false);
        assert_eq!(all.len(), 2 * 3 + 1);
        assert_eq!(
            all[0].name(),
            "64 seqs, 512 tokens, kv weight 4 temperature 0"
        );
        assert_eq!(
            all[4].name(),
            "64 seqs, 512 tokens, kv weight 1 temperature 0.5"
        );
        assert_eq!(all[6].name(), "64 seqs, 512 tokens, round_robin");
        let shape = Shape {
            gpu: "h200".into(),
            tensor_parallel: 2,
            pipeline_parallel: Some(3),
            data_parallel: Some(4),
            expert_parallel: Some(true),
            dtype: Dtype::Fp8,
            kv_cache: None,
            host_gib: Some(256.0),
            draft_tokens: Some(3),
            prefill_share: None,
        };
        assert_eq!(shape.name(), "h200 TP2 PP3 DP4 EP fp8 256 GiB host spec3");
        let sets = sets(&shape, &all[4], 3);
        for set in [
            "engine.pipeline_parallel_size=3",
            "engine.data_parallel_size=4",
            "engine.enable_expert_parallel=true",
            "engine.host_tier.gib=256.0",
            "engine.speculation.num_speculative_tokens=3",
            "router.prefill_weight=1.0",
            "router.temperature=0.5",
            "pool.main.workers=3",
        ] {
            assert!(sets.iter().any(|of| of == set), "{set}: {sets:?}");
        }
    }
}
