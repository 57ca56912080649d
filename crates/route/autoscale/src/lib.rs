//! How many workers a pool should have.
//!
//! An [`Autoscaler`] takes observations of one pool at fixed intervals, and returns the number of workers
//! that it wants. It does no I/O and reads no clock: the twin starts and drains simulated workers by it, and
//! a live server publishes its numbers.
//!
//! The rules are those of Kubernetes' horizontal autoscaler (*Horizontal Pod Autoscaling*, "Algorithm
//! details"): a number in proportion to a measured value over its target, no change within a tolerance, and
//! scale-down by the highest recommendation of a window. In addition at most one scale-down happens per
//! window, and none within a window after any other change.
//!
//! The predictive policy fits a line to the arrival rates of the last observations by ordinary least squares,
//! and takes the load to grow as the line does until new workers have started.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]

mod live;
mod trend;

pub use live::{Desired, PoolSample, Scalers};
pub use trend::Trend;

use std::collections::VecDeque;

use slipstream_base::SimTime;
use slipstream_base::width::{floor_u32, floor_u64, to_usize};
use slipstream_config::cluster::{AutoscaleConfig, AutoscalePolicy};

/// Relative difference between a value and its target that changes nothing. Source: the default of
/// `--horizontal-pod-autoscaler-tolerance`.
const TOLERANCE: f64 = 0.1;
/// Growth in one decision of policies whose value does not tell how much is missing. Source: the default
/// scale-up policy of Kubernetes, 100 %.
const GROWTH_MAX: f64 = 2.0;
/// Share of the target below which such a policy takes one worker away.
const SLACK: f64 = 0.5;

/// The state of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Observed {
    /// Workers that take requests.
    pub ready: u32,
    /// Requests that wait, in engines and in front of them.
    pub waiting: u64,
    /// Requests that engines compute.
    pub running: u64,
    /// Requests that one worker computes at a time, at most; above 0.
    pub slots: u64,
    /// Mean TTFT over its objective, of the requests whose first token came since the last observation;
    /// `None` if there is none.
    pub ttft_ratio: Option<f64>,
    /// Requests that arrived at the cluster since the last observation.
    pub arrivals: u64,
}

/// A decision about one pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// When.
    pub at: SimTime,
    /// The state that it was made by.
    pub observed: Observed,
    /// Workers that were wanted before.
    pub before: u32,
    /// Workers that are wanted now.
    pub wanted: u32,
}

/// Decides about one pool.
#[derive(Clone, Debug)]
pub struct Autoscaler {
    config: AutoscaleConfig,
    interval_ns: u64,
    cooldown_ns: u64,
    wanted: u32,
    /// Of the next decision.
    next: SimTime,
    /// Of the last change.
    changed: Option<SimTime>,
    /// Recommendations of the last `cooldown_s`, falling: the first is the highest.
    recent: VecDeque<(SimTime, u32)>,
    /// Arrivals per second. Only read by the predictive policy.
    trend: Trend,
}

impl Autoscaler {
    /// For a pool of which `config.workers_start` workers are wanted first. The first decision is one interval
    /// after `start`.
    pub fn new(config: AutoscaleConfig, start: SimTime) -> Autoscaler {
        let ns = |s: f64| SimTime::from_secs_f64(s).0;
        let interval_ns = ns(config.interval_s).max(1);
        let points = (config.trend_s / config.interval_s).ceil();
        Autoscaler {
            interval_ns,
            cooldown_ns: ns(config.cooldown_s),
            wanted: config
                .workers_start
                .clamp(config.workers_min, config.workers_max),
            next: start + interval_ns,
            changed: None,
            recent: VecDeque::new(),
            trend: Trend::new(to_usize(floor_u64(points))),
            config,
        }
    }

    /// For a pool that has `running` workers when decisions begin, and is not known from before. As if they had been
    /// recommended at `start`: nothing is removed within the cooldown.
    pub fn resumed(config: AutoscaleConfig, running: u32, start: SimTime) -> Autoscaler {
        let mut scaler = Autoscaler::new(config, start);
        scaler.wanted = running.clamp(config.workers_min, config.workers_max);
        scaler.recent.push_back((start, scaler.wanted));
        scaler
    }

    /// More workers are running than are wanted, although none were removed: `running` are wanted from now on.
    pub fn adopt(&mut self, now: SimTime, running: u32) {
        let running = running.min(self.config.workers_max);
        if running > self.wanted {
            self.wanted = running;
            self.recent.clear();
            self.recent.push_back((now, running));
        }
    }

    /// Whether a function of the program makes the recommendations.
    pub fn is_custom(&self) -> bool {
        self.config.policy == AutoscalePolicy::Custom
    }

    /// The number of workers that is wanted.
    pub fn wanted(&self) -> u32 {
        self.wanted
    }

    /// Time of the next decision.
    pub fn next_decision(&self) -> SimTime {
        self.next
    }

    /// Time after which decisions by the same observations change nothing, if none has changed anything within it, ns.
    pub fn settles_ns(&self) -> u64 {
        // Older recommendations leave the window, and one decision is made without them.
        let window = match self.config.policy {
            AutoscalePolicy::Predictive => self.trend.capacity() as u64,
            _ => 0,
        };
        let intervals = self.interval_ns.saturating_mul(2 + window);
        self.cooldown_ns.saturating_add(intervals)
    }

    /// Decides by the state of the pool at `now`, and returns the number of workers that is wanted. Workers
    /// that were wanted before and have not started yet count as wanted.
    ///
    /// A pool with policy `custom` keeps its number: [`Autoscaler::decide_by`].
    pub fn decide(&mut self, now: SimTime, observed: &Observed) -> u32 {
        let rate = observed.arrivals as f64 / self.config.interval_s;
        self.trend.push(rate);
        let recommended = self.recommend(observed);
        self.decide_by(now, recommended)
    }

    /// Decides by a recommendation that the caller made: within the bounds, and after the cooldown if it is lower.
    pub fn decide_by(&mut self, now: SimTime, recommended: u32) -> u32 {
        self.next = now + self.interval_ns;
        let recommended = recommended.clamp(self.config.workers_min, self.config.workers_max);
        while self.recent.back().is_some_and(|(_, of)| *of <= recommended) {
            self.recent.pop_back();
        }
        self.recent.push_back((now, recommended));
        while self
            .recent
            .front()
            .is_some_and(|(at, _)| now.since(*at) > self.cooldown_ns)
        {
            self.recent.pop_front();
        }
        let highest = self.recent.front().map_or(recommended, |(_, of)| *of);
        let is_quiet = self
            .changed
            .is_none_or(|changed| now.since(changed) >= self.cooldown_ns);
        let wanted = if recommended > self.wanted {
            recommended
        } else if highest < self.wanted && is_quiet {
            highest
        } else {
            self.wanted
        };
        if wanted != self.wanted {
            self.wanted = wanted;
            self.changed = Some(now);
        }
        self.wanted
    }

    /// The number of workers that the current state asks for.
    fn recommend(&self, observed: &Observed) -> u32 {
        let target = self.config.target;
        match self.config.policy {
            AutoscalePolicy::Utilization => self.by_load(observed, 1.0),
            AutoscalePolicy::Predictive => {
                let ahead = self.config.lookahead_s / self.config.interval_s;
                self.by_load(observed, self.trend.growth(ahead).min(GROWTH_MAX))
            }
            AutoscalePolicy::Custom => self.wanted,
            AutoscalePolicy::Queue => {
                let waiting = observed.waiting as f64 / f64::from(observed.ready.max(1));
                self.by_pressure(waiting / target, observed.ready)
            }
            AutoscalePolicy::Slo => match observed.ttft_ratio {
                Some(ratio) => self.by_pressure(ratio / target, observed.ready),
                // Without a first token: requests that wait have none, and an idle pool is too large.
                None if observed.waiting > 0 => self.wanted,
                None => self.wanted.saturating_sub(1),
            },
        }
    }

    /// For a load in proportion to which workers are needed, times `growth`.
    fn by_load(&self, observed: &Observed, growth: f64) -> u32 {
        let load = (observed.waiting + observed.running) as f64 * growth;
        let needed = load / (self.config.target * observed.slots.max(1) as f64);
        let change = (needed / f64::from(self.wanted.max(1)) - 1.0).abs();
        if change <= TOLERANCE {
            self.wanted
        } else {
            // A load that needs exactly 3 workers must not need 4 by rounding.
            let max = f64::from(self.config.workers_max);
            floor_u32((needed - 1e-9).ceil().clamp(0.0, max))
        }
    }

    /// For a value over its target that does not fall in proportion to the workers.
    fn by_pressure(&self, pressure: f64, ready: u32) -> u32 {
        if pressure > 1.0 + TOLERANCE {
            // Workers that have not started yet relieve nothing, and are not asked for twice.
            let needed = floor_u32((f64::from(ready.max(1)) * pressure.min(GROWTH_MAX)).ceil());
            needed.max(self.wanted)
        } else if pressure < SLACK {
            self.wanted.saturating_sub(1)
        } else {
            self.wanted
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(policy: AutoscalePolicy, target: f64) -> AutoscaleConfig {
        AutoscaleConfig {
            policy,
            target,
            interval_s: 10.0,
            cooldown_s: 60.0,
            workers_min: 1,
            workers_max: 16,
            workers_start: 1,
            trend_s: 80.0,
            lookahead_s: 30.0,
            ttft_s: None,
        }
    }

    fn seconds(s: u64) -> SimTime {
        SimTime(s * 1_000_000_000)
    }

    /// Workers wanted at each interval, for the loads of each. Workers are ready one interval after they
    /// are wanted.
    fn run(config: AutoscaleConfig, workers_max: u32, loads: &[(u64, u64)]) -> Vec<u32> {
        let config = AutoscaleConfig {
            workers_max,
            ..config
        };
        let mut scaler = Autoscaler::new(config, SimTime::ZERO);
        let mut ready = scaler.wanted();
        loads
            .iter()
            .map(|&(waiting, running)| {
                let now = scaler.next_decision();
                let observed = Observed {
                    ready,
                    waiting,
                    running,
                    slots: 10,
                    ..Observed::default()
                };
                let wanted = scaler.decide(now, &observed);
                ready = wanted;
                wanted
            })
            .collect()
    }

    #[test]
    fn a_step_of_load_is_followed_at_once_and_left_after_the_cooldown() {
        // 10 slots at 80 %: 8 requests per worker. 41 requests need 5.125, so 6; 48 need 6.
        let loads = [(0, 8), (33, 8), (0, 48), (0, 5), (0, 5)];
        let mut all = loads.to_vec();
        all.extend([(0, 5); 6]);
        let wanted = run(config(AutoscalePolicy::Utilization, 0.8), 8, &all);
        // The high recommendation at 30 s is in the window of 60 s until 90 s.
        assert_eq!(wanted, [1, 6, 6, 6, 6, 6, 6, 6, 6, 1, 1]);
        // No more than there are.
        let most = run(config(AutoscalePolicy::Utilization, 0.8), 4, &all);
        assert_eq!(most[1], 4);
    }

    /// 10 slots at 100 %. Arrivals grow by 10 per interval and the load with them; the line is read 3 intervals ahead.
    #[test]
    fn a_rising_trend_asks_for_workers_before_the_load_needs_them() {
        let decide = |policy| {
            let mut scaler = Autoscaler::new(config(policy, 1.0), SimTime::ZERO);
            let mut wanted = Vec::new();
            for at in 1..=6u64 {
                let observed = Observed {
                    ready: scaler.wanted(),
                    running: 10 * at,
                    slots: 10,
                    arrivals: 10 * at,
                    ..Observed::default()
                };
                wanted.push(scaler.decide(scaler.next_decision(), &observed));
            }
            wanted
        };
        assert_eq!(decide(AutoscalePolicy::Utilization), [1, 2, 3, 4, 5, 6]);
        // One point is no line. Then the rate 3 intervals on is (n + 3) / n of that of now: 2.5 times, of which 2
        // are taken, 6/3, 7/4, 8/5, 9/6: loads of 40, 60, 70, 80, 90.
        assert_eq!(decide(AutoscalePolicy::Predictive), [1, 4, 6, 7, 8, 9]);
    }

    /// The load of a falling trend is not taken to be lower than it is.
    #[test]
    fn a_falling_trend_removes_nothing_early() {
        let decide = |policy| {
            let config = AutoscaleConfig {
                workers_start: 6,
                cooldown_s: 0.0,
                ..config(policy, 1.0)
            };
            let mut scaler = Autoscaler::new(config, SimTime::ZERO);
            let each = (1..=6u64).rev().map(|at| {
                let observed = Observed {
                    ready: scaler.wanted(),
                    running: 10 * at,
                    slots: 10,
                    arrivals: 10 * at,
                    ..Observed::default()
                };
                scaler.decide(scaler.next_decision(), &observed)
            });
            each.collect::<Vec<u32>>()
        };
        let reactive = decide(AutoscalePolicy::Utilization);
        assert_eq!(reactive, [6, 5, 4, 3, 2, 1]);
        assert_eq!(decide(AutoscalePolicy::Predictive), reactive);
    }

    #[test]
    fn a_pool_that_is_found_running_keeps_its_workers_for_a_cooldown() {
        let config = config(AutoscalePolicy::Utilization, 1.0);
        let idle = Observed {
            slots: 10,
            ..Observed::default()
        };
        let mut scaler = Autoscaler::resumed(config, 5, seconds(100));
        let wanted: Vec<u32> = (0..8)
            .map(|_| scaler.decide(scaler.next_decision(), &idle))
            .collect();
        assert_eq!(wanted, [5, 5, 5, 5, 5, 5, 1, 1]);
        // Not more than the bounds.
        assert_eq!(Autoscaler::resumed(config, 50, seconds(0)).wanted(), 16);
        assert_eq!(Autoscaler::resumed(config, 0, seconds(0)).wanted(), 1);
    }

    #[test]
    fn a_recommendation_from_outside_has_the_bounds_and_the_cooldown() {
        let mut scaler = Autoscaler::new(config(AutoscalePolicy::Custom, 1.0), SimTime::ZERO);
        assert!(scaler.is_custom());
        assert_eq!(scaler.decide_by(seconds(10), 100), 16);
        assert_eq!(scaler.decide_by(seconds(20), 0), 16);
        assert_eq!(scaler.decide_by(seconds(70), 0), 16, "100 is 60 s old");
        assert_eq!(scaler.decide_by(seconds(80), 0), 1);
        assert_eq!(scaler.decide(seconds(90), &Observed::default()), 1);
    }

    #[test]
    fn differences_within_the_tolerance_change_nothing() {
        let start = |workers_start| AutoscaleConfig {
            workers_start,
            ..config(AutoscalePolicy::Utilization, 0.5)
        };
        // 5 requests per worker: 10 workers for 50, 10.8 for 54, 11.2 for 56.
        assert_eq!(run(start(10), 20, &[(0, 50), (0, 54)]), [10, 10]);
        assert_eq!(run(start(10), 20, &[(0, 56)]), [12]);
    }

    #[test]
    fn queues_double_the_workers_at_most_and_give_back_one_by_one() {
        let queue = config(AutoscalePolicy::Queue, 4.0);
        let mut loads = vec![(20, 10), (20, 20), (9, 40), (0, 40)];
        loads.extend([(0, 4); 14]);
        let wanted = run(queue, 16, &loads);
        // 20 per worker is 5 targets, and 10 per worker is 2.5: doubled; 9 for 4 workers is below one.
        assert_eq!(wanted[..4], [2, 4, 4, 4]);
        // The last high recommendation is that of 30 s, and each step takes a cooldown.
        let downs: Vec<usize> = (1..wanted.len())
            .filter(|&at| wanted[at] < wanted[at - 1])
            .map(|at| (at + 1) * 10)
            .collect();
        assert_eq!(downs, [100, 170], "{wanted:?}");
    }

    #[test]
    fn late_first_tokens_ask_for_workers_in_proportion() {
        let mut scaler = Autoscaler::new(
            AutoscaleConfig {
                workers_start: 4,
                ..config(AutoscalePolicy::Slo, 0.8)
            },
            SimTime::ZERO,
        );
        let mut decide = |s: u64, ratio: Option<f64>| {
            let observed = Observed {
                ready: 4,
                waiting: 0,
                running: 10,
                slots: 10,
                ttft_ratio: ratio,
                arrivals: 0,
            };
            scaler.decide(seconds(s), &observed)
        };
        assert_eq!(decide(10, Some(0.8)), 4);
        // 1.2 of an objective of which 0.8 is wanted: half as many again.
        assert_eq!(decide(20, Some(1.2)), 6);
        // They have not started: no more are asked for.
        assert_eq!(decide(30, Some(1.2)), 6);
        assert_eq!(decide(40, Some(10.0)), 8);
        assert_eq!(decide(60, Some(0.3)), 8);
        assert_eq!(decide(110, Some(0.3)), 7);
    }

    proptest! {
        #[test]
        fn counts_stay_in_bounds_and_do_not_flap(
            policy in prop::sample::select(vec![
                AutoscalePolicy::Utilization, AutoscalePolicy::Queue, AutoscalePolicy::Slo,
                AutoscalePolicy::Predictive,
            ]),
            target in 0.1f64..10.0,
            (min, start, more) in (1u32..10, 1u32..40, 0u32..40),
            cooldown_s in 0u32..200,
            loads in prop::collection::vec((0u64..400, 0u64..400, prop::option::of(0.0f64..5.0)), 1..200),
        ) {
            let max = min + more;
            let config = AutoscaleConfig {
                workers_min: min,
                workers_max: max,
                workers_start: start,
                cooldown_s: f64::from(cooldown_s),
                ..config(policy, target)
            };
            let mut scaler = Autoscaler::new(config, SimTime::ZERO);
            let (low, high) = (min, max);
            let mut before = scaler.wanted();
            prop_assert!((low..=high).contains(&before));
            let mut changed: Option<SimTime> = None;
            for (waiting, running, ttft_ratio) in loads {
                let now = scaler.next_decision();
                let observed = Observed {
                    ready: before, waiting, running, slots: 10, ttft_ratio, arrivals: waiting,
                };
                let wanted = scaler.decide(now, &observed);
                prop_assert!((low..=high).contains(&wanted), "{wanted}");
                if wanted < before {
                    let quiet = changed.is_none_or(|at| now.since(at) >= u64::from(cooldown_s) * 1_000_000_000);
                    prop_assert!(quiet, "{before} to {wanted} at {now}, after a change at {changed:?}");
                }
                if wanted != before {
                    changed = Some(now);
                }
                before = wanted;
                prop_assert!(scaler.recent.len() as u64 <= u64::from(cooldown_s) / 10 + 2);
            }
        }
    }
}
