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

use std::collections::VecDeque;

use slipstream_base::SimTime;
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
}

/// Decides about one pool.
#[derive(Clone, Debug)]
pub struct Autoscaler {
    config: AutoscaleConfig,
    max: u32,
    interval_ns: u64,
    cooldown_ns: u64,
    wanted: u32,
    /// Of the next decision.
    next: SimTime,
    /// Of the last change.
    changed: Option<SimTime>,
    /// Recommendations of the last `cooldown_s`, falling: the first is the highest.
    recent: VecDeque<(SimTime, u32)>,
}

impl Autoscaler {
    /// For a pool of at most `max` workers, at least 1, of which `config.workers_start` are wanted first. The
    /// first decision is one interval after `start`.
    pub fn new(config: AutoscaleConfig, max: u32, start: SimTime) -> Autoscaler {
        let ns = |s: f64| SimTime::from_secs_f64(s).0;
        let interval_ns = ns(config.interval_s).max(1);
        let min = config.workers_min.min(max);
        Autoscaler {
            max,
            interval_ns,
            cooldown_ns: ns(config.cooldown_s),
            wanted: config.workers_start.clamp(min, max),
            next: start + interval_ns,
            changed: None,
            recent: VecDeque::new(),
            config,
        }
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
        let intervals = self.interval_ns.saturating_mul(2);
        self.cooldown_ns.saturating_add(intervals)
    }

    /// Decides by the state of the pool at `now`, and returns the number of workers that is wanted. Workers
    /// that were wanted before and have not started yet count as wanted.
    pub fn decide(&mut self, now: SimTime, observed: &Observed) -> u32 {
        self.next = now + self.interval_ns;
        let min = self.config.workers_min.min(self.max);
        let recommended = self.recommend(observed).clamp(min, self.max);
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
            AutoscalePolicy::Utilization => {
                let load = (observed.waiting + observed.running) as f64;
                let needed = load / (target * observed.slots.max(1) as f64);
                let change = (needed / f64::from(self.wanted.max(1)) - 1.0).abs();
                if change <= TOLERANCE {
                    self.wanted
                } else {
                    // A load that needs exactly 3 workers must not need 4 by rounding.
                    (needed - 1e-9).ceil().clamp(0.0, f64::from(self.max)) as u32
                }
            }
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

    /// For a value over its target that does not fall in proportion to the workers.
    fn by_pressure(&self, pressure: f64, ready: u32) -> u32 {
        if pressure > 1.0 + TOLERANCE {
            // Workers that have not started yet relieve nothing, and are not asked for twice.
            let needed = (f64::from(ready.max(1)) * pressure.min(GROWTH_MAX)).ceil() as u32;
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
            workers_start: 1,
        }
    }

    fn seconds(s: u64) -> SimTime {
        SimTime(s * 1_000_000_000)
    }

    /// Workers wanted at each interval, for the loads of each. Workers are ready one interval after they
    /// are wanted.
    fn run(config: AutoscaleConfig, max: u32, loads: &[(u64, u64)]) -> Vec<u32> {
        let mut scaler = Autoscaler::new(config, max, SimTime::ZERO);
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
                    ttft_ratio: None,
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
            16,
            SimTime::ZERO,
        );
        let mut decide = |s: u64, ratio: Option<f64>| {
            let observed = Observed {
                ready: 4,
                waiting: 0,
                running: 10,
                slots: 10,
                ttft_ratio: ratio,
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
            ]),
            target in 0.1f64..10.0,
            (min, start, max) in (1u32..10, 1u32..40, 1u32..40),
            cooldown_s in 0u32..200,
            loads in prop::collection::vec((0u64..400, 0u64..400, prop::option::of(0.0f64..5.0)), 1..200),
        ) {
            let config = AutoscaleConfig {
                workers_min: min,
                workers_start: start,
                cooldown_s: f64::from(cooldown_s),
                ..config(policy, target)
            };
            let mut scaler = Autoscaler::new(config, max, SimTime::ZERO);
            let (low, high) = (min.min(max), max);
            let mut before = scaler.wanted();
            prop_assert!((low..=high).contains(&before));
            let mut changed: Option<SimTime> = None;
            for (waiting, running, ttft_ratio) in loads {
                let now = scaler.next_decision();
                let observed = Observed { ready: before, waiting, running, slots: 10, ttft_ratio };
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
