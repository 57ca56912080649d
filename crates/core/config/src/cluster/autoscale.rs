//! `[autoscale]`: the policy and bounds by which a pool's size follows its load.

use super::DAY_S;
use crate::doc::{Table, choice, optional, section, value};

/// The load that decides how many workers of a pool run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoscalePolicy {
    /// Requests that wait or run, over `engine.max_num_seqs` of all workers.
    Utilization,
    /// Requests that wait, per worker.
    Queue,
    /// Mean TTFT over its objective.
    Slo,
    /// As [`AutoscalePolicy::Utilization`], with the load that the trend of the arrival rate leads to.
    Predictive,
    /// A function of the program that simulates.
    Custom,
}

impl AutoscalePolicy {
    /// Its name in a cluster file.
    pub fn name(self) -> &'static str {
        match self {
            AutoscalePolicy::Utilization => "utilization",
            AutoscalePolicy::Queue => "queue",
            AutoscalePolicy::Slo => "slo",
            AutoscalePolicy::Predictive => "predictive",
            AutoscalePolicy::Custom => "custom",
        }
    }
}

const POLICIES: &[(&str, Option<AutoscalePolicy>)] = &[
    ("none", None),
    ("utilization", Some(AutoscalePolicy::Utilization)),
    ("queue", Some(AutoscalePolicy::Queue)),
    ("slo", Some(AutoscalePolicy::Slo)),
    ("predictive", Some(AutoscalePolicy::Predictive)),
    ("custom", Some(AutoscalePolicy::Custom)),
];

/// Limit of the engines behind HTTP, as of `upstream.engines_max`.
const ENGINES_MAX: u32 = 4_096;
/// Observations that the line of policy "predictive" is fitted to, at most.
const TREND_MAX: f64 = 1_000.0;

/// `[autoscale]`: how many of a pool's workers run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoscaleConfig {
    /// The measured value.
    pub policy: AutoscalePolicy,
    /// The value to keep, above 0. Default 0.8; for [`AutoscalePolicy::Queue`] 4.
    pub target: f64,
    /// Time between decisions, s. Default 15.
    pub interval_s: f64,
    /// Scale-down waits for this time after any change, and takes the highest recommendation in it, s.
    /// Default 300.
    pub cooldown_s: f64,
    /// Fewest workers, at least 1. Default 1.
    pub workers_min: u32,
    /// Most workers. Default: `pool.NAME.workers`.
    pub workers_max: u32,
    /// Workers that run at the start. Default `workers_min`.
    pub workers_start: u32,
    /// Time over which [`AutoscalePolicy::Predictive`] fits its line, s. Default: 8 intervals.
    pub trend_s: f64,
    /// How far ahead it looks, s. Default: the workers' `startup_s` and one interval.
    pub lookahead_s: f64,
    /// Objective of TTFT for [`AutoscalePolicy::Slo`] in a live cluster, s; `None`: there is none.
    pub ttft_s: Option<f64>,
}

section! {
    keys AutoscaleKeys of "autoscale" {
        /// How many of a pool's workers run. Of every pool, unless `pool.NAME.autoscale` has its own. utilization:
        /// requests that wait or run, over `max_num_seqs` of all workers; queue: requests that wait, per worker; slo:
        /// mean TTFT of the last interval over its objective; predictive: as utilization, at the load that the trend
        /// of the arrival rate leads to; custom: a Python function (docs/python.md). Simulated, new workers take
        /// requests after `engine.startup_s`, with an empty cache; workers to stop take no new requests and end
        /// theirs. `serve` starts and stops none: it publishes the number (docs/autoscale.md).
        key policy: Option<AutoscalePolicy> = choice(POLICIES, None);
        /// The value to keep. utilization, predictive: workers are added and removed in proportion. queue, slo: added
        /// in proportion, doubled at most; removed one by one while the value is below half of it. Differences within
        /// 10 % change nothing.
        ///
        /// Low: more workers than needed. High: requests wait until new workers have started.
        key target: f64 = value(0.8).within(0.01..=1e6).with_default_text("0.8; queue: 4");
        /// Time between decisions. Default: Kubernetes' autoscaler's.
        ///
        /// High: late decisions.
        key interval_s: f64 = value(15.0).within(0.1..=DAY_S).unit("s");
        /// Time after any change without a removal; a removal follows the highest recommendation in it. Default:
        /// Kubernetes' autoscaler's window.
        ///
        /// Low: workers stop between bursts, and their caches are lost.
        key cooldown_s: f64 = value(300.0).within(0.0..=DAY_S).unit("s");
        /// Fewest workers that run.
        key workers_min: u32 = value(1).with_description("1 to `workers_max`");
        /// Most workers that run.
        ///
        /// Low: requests wait under load.
        key workers_max?: u32 = optional()
            .with_description("1 to `pool.NAME.workers`; with `engines`: 1 to 4,096, and needed").with_default_text("`pool.NAME.workers`");
        /// Workers that run at the start. Simulation only: a server starts from the workers that it has.
        key workers_start?: u32 = optional()
            .with_description("`workers_min` to `workers_max`").with_default_text("`workers_min`");
        /// predictive: time over which a line is fitted to the arrival rate, by least squares.
        ///
        /// Low: noise is taken for a trend. High: a new trend is noticed late.
        key trend_s?: f64 = optional().within(0.2..=DAY_S)
            .with_description("s, 2 to 1,000 intervals").with_default_text("8 intervals");
        /// predictive: how far ahead the line is read.
        ///
        /// Low: workers are ready after the load that needs them. High: they wait for it.
        key lookahead_s?: f64 = optional().within(0.0..=DAY_S)
            .unit("s").with_default_text("`engine.startup_s` and one interval");
        /// slo: the objective of TTFT in `serve`, which needs it. Simulated, objectives are those of `--slo` or of
        /// the classes; requests without one have this.
        key ttft_s?: f64 = optional().within(0.001..=DAY_S).unit("s");
    }
}

/// Most workers of a pool that has `workers`, or real engines.
fn read_workers_max(t: &Table<'_>, workers: u32, real: bool) -> u32 {
    if real {
        AutoscaleKeys::workers_max()
            .field(t)
            .within(1..=ENGINES_MAX)
            .required(
                "set the most engines that the deployment may have, such as `workers_max = 8`",
                workers,
            )
    } else {
        AutoscaleKeys::workers_max()
            .field(t)
            .within(1..=workers)
            .or(workers)
    }
}

/// The time that a trend is taken over, and how far ahead it is continued.
fn read_trend(
    t: &Table<'_>,
    policy: AutoscalePolicy,
    interval_s: f64,
    startup_s: f64,
) -> (f64, f64) {
    let (trend_s, lookahead_s) = (8.0 * interval_s, startup_s + interval_s);
    if policy == AutoscalePolicy::Predictive {
        let trend_s = AutoscaleKeys::trend_s().field(t).or(trend_s);
        if trend_s < 2.0 * interval_s || trend_s > TREND_MAX * interval_s {
            t.error(
                "trend_s",
                format!(
                    "`trend_s` is {trend_s}, which is {} intervals of {interval_s} s (`interval_s`), but must be 2 to \
                     {TREND_MAX}",
                    trend_s / interval_s
                ),
                "a line needs two observations; take some ten",
            );
        }
        (
            trend_s,
            AutoscaleKeys::lookahead_s().field(t).or(lookahead_s),
        )
    } else {
        for key in ["trend_s", "lookahead_s"] {
            t.unused(key, "policy", "`policy` is not \"predictive\"");
        }
        (trend_s, lookahead_s)
    }
}

/// Reads `[autoscale]` of a pool of `workers` workers. `real`: they are engines behind HTTP.
pub(super) fn read_autoscale(
    t: &Table<'_>,
    workers: u32,
    startup_s: f64,
    real: bool,
) -> Option<AutoscaleConfig> {
    use AutoscalePolicy::{Custom, Predictive, Queue, Slo, Utilization};
    let Some(policy) = AutoscaleKeys::policy().read(t) else {
        let others = AutoscaleKeys::NAMES.iter().filter(|key| **key != "policy");
        for key in others {
            t.unused(key, "policy", "`policy` is \"none\"");
        }
        return None;
    };
    if real && matches!(policy, Slo | Custom) {
        t.error(
            "policy",
            format!(
                "`policy` is \"{}\", and this pool has real engines, whose first tokens are not measured",
                policy.name()
            ),
            "take \"utilization\", \"queue\" or \"predictive\"",
        );
    }
    let default_target = match policy {
        Utilization | Slo | Predictive | Custom => AutoscaleKeys::target().default(),
        Queue => 4.0,
    };
    let workers_max = read_workers_max(t, workers, real);
    let min = AutoscaleKeys::workers_min();
    let workers_min = min.finish(min.field(t).within(1..=workers_max));
    let target = if policy == Custom {
        t.unused("target", "policy", "the function decides");
        default_target
    } else {
        AutoscaleKeys::target().field(t).or(default_target)
    };
    let interval_s = AutoscaleKeys::interval_s().read(t);
    let (trend_s, lookahead_s) = read_trend(t, policy, interval_s, startup_s);
    if policy != Slo {
        t.unused("ttft_s", "policy", "`policy` is not \"slo\"");
    }
    Some(AutoscaleConfig {
        policy,
        target,
        interval_s,
        cooldown_s: AutoscaleKeys::cooldown_s().read(t),
        workers_min,
        workers_max,
        workers_start: AutoscaleKeys::workers_start()
            .field(t)
            .within(workers_min..=workers_max)
            .or(workers_min),
        trend_s,
        lookahead_s,
        ttft_s: (policy == Slo)
            .then(|| AutoscaleKeys::ttft_s().read(t))
            .flatten(),
    })
}
