//! Decisions about the pools of a live cluster, from counters that only grow and gauges.

use slipstream_base::SimTime;
use slipstream_config::cluster::AutoscaleConfig;

use crate::{Autoscaler, Decision, Observed};

/// Counters and gauges of a pool at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PoolSample {
    /// Workers that take requests.
    pub ready: u32,
    /// Requests that wait, in its workers and in front of them.
    pub waiting: u64,
    /// Requests that it computes.
    pub running: u64,
    /// Requests that have arrived at the cluster since its start.
    pub arrived_total: u64,
    /// First tokens since its start.
    pub first_tokens_total: u64,
    /// Sum of the times to them, s.
    pub ttft_total_s: f64,
}

/// A number of workers to publish.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// Name of the pool.
    pub pool: String,
    /// Its last decision.
    pub decision: Decision,
}

struct Pool {
    name: String,
    scaler: Autoscaler,
    /// Requests that a worker computes at a time.
    slots: u64,
    ttft_s: Option<f64>,
    last: PoolSample,
    /// Until when workers that are found running are taken for wanted.
    settled: SimTime,
}

/// The pools of a live cluster that are scaled.
#[derive(Default)]
pub struct Scalers {
    pools: Vec<Pool>,
}

impl Scalers {
    /// No pool.
    pub fn new() -> Scalers {
        Scalers::default()
    }

    /// Adds a pool, of which a worker computes `slots` requests at a time. `first` is its state now: its workers stay for
    /// a cooldown, and its counters begin there.
    pub fn add(
        &mut self,
        name: &str,
        config: AutoscaleConfig,
        slots: u64,
        first: PoolSample,
        now: SimTime,
    ) {
        let scaler = Autoscaler::resumed(config, first.ready, now);
        self.pools.push(Pool {
            name: name.to_owned(),
            scaler,
            slots: slots.max(1),
            ttft_s: config.ttft_s,
            last: first,
            settled: now + SimTime::from_secs_f64(config.cooldown_s).0,
        });
    }

    /// Names of the pools, and the numbers that are wanted.
    pub fn wanted(&self) -> impl Iterator<Item = (&str, u32)> {
        let pools = self.pools.iter();
        pools.map(|pool| (&*pool.name, pool.scaler.wanted()))
    }

    /// Time of the next decision; `None` if there is no pool.
    pub fn next_decision(&self) -> Option<SimTime> {
        let each = self.pools.iter().map(|pool| pool.scaler.next_decision());
        each.min()
    }

    /// Decides about the pools whose decision is due at `now`, by the `sample` of each.
    pub fn decide(
        &mut self,
        now: SimTime,
        mut sample: impl FnMut(&str) -> PoolSample,
    ) -> Vec<Desired> {
        let due = |pool: &&mut Pool| pool.scaler.next_decision() <= now;
        let mut all = Vec::new();
        for pool in self.pools.iter_mut().filter(due) {
            let observed = pool.observe(sample(&pool.name));
            // Workers that became known after the start, such as engines that answered late.
            if now <= pool.settled {
                pool.scaler.adopt(now, observed.ready);
            }
            let before = pool.scaler.wanted();
            let wanted = pool.scaler.decide(now, &observed);
            all.push(Desired {
                pool: pool.name.clone(),
                decision: Decision {
                    at: now,
                    observed,
                    before,
                    wanted,
                },
            });
        }
        all
    }
}

impl Pool {
    /// The state since the last sample.
    fn observe(&mut self, sample: PoolSample) -> Observed {
        let last = std::mem::replace(&mut self.last, sample);
        let first_tokens = sample
            .first_tokens_total
            .saturating_sub(last.first_tokens_total);
        let ratio = |objective_s: f64| {
            let sum_s = (sample.ttft_total_s - last.ttft_total_s).max(0.0);
            sum_s / first_tokens as f64 / objective_s
        };
        Observed {
            ready: sample.ready,
            waiting: sample.waiting,
            running: sample.running,
            slots: self.slots,
            ttft_ratio: self.ttft_s.filter(|_| first_tokens > 0).map(ratio),
            arrivals: sample.arrived_total.saturating_sub(last.arrived_total),
        }
    }
}

#[cfg(test)]
mod tests {
    use slipstream_config::cluster::AutoscalePolicy;

    use super::*;

    fn config(policy: AutoscalePolicy) -> AutoscaleConfig {
        AutoscaleConfig {
            policy,
            target: 1.0,
            interval_s: 10.0,
            cooldown_s: 30.0,
            workers_min: 1,
            workers_max: 16,
            workers_start: 1,
            trend_s: 80.0,
            lookahead_s: 30.0,
            ttft_s: Some(0.5),
        }
    }

    fn seconds(s: u64) -> SimTime {
        SimTime(s * 1_000_000_000)
    }

    /// A clock and counters by script. 10 slots per worker.
    #[test]
    fn counters_become_the_state_of_an_interval() {
        let mut scalers = Scalers::new();
        let first = PoolSample {
            ready: 2,
            arrived_total: 1_000,
            first_tokens_total: 900,
            ttft_total_s: 50.0,
            ..PoolSample::default()
        };
        scalers.add(
            "a",
            config(AutoscalePolicy::Utilization),
            10,
            first,
            seconds(5),
        );
        scalers.add("b", config(AutoscalePolicy::Slo), 10, first, seconds(9));
        assert_eq!(scalers.next_decision(), Some(seconds(15)));
        let later = PoolSample {
            waiting: 25,
            running: 20,
            arrived_total: 1_060,
            first_tokens_total: 950,
            ttft_total_s: 100.0,
            ..first
        };
        let of = |desired: &[Desired]| -> Vec<(String, u32, u32)> {
            let each = desired.iter();
            each.map(|d| (d.pool.clone(), d.decision.before, d.decision.wanted))
                .collect()
        };
        // Only `a` is due: 45 requests need 4.5 workers.
        let decided = scalers.decide(seconds(15), |_| later);
        assert_eq!(of(&decided), [("a".to_owned(), 2, 5)]);
        let observed = decided[0].decision.observed;
        assert_eq!((observed.arrivals, observed.slots), (60, 10));
        // `b`: 50 first tokens in 50 s are a mean of 1 s, twice the objective.
        let decided = scalers.decide(seconds(19), |_| later);
        assert_eq!(of(&decided), [("b".to_owned(), 2, 4)]);
        assert_eq!(decided[0].decision.observed.ttft_ratio, Some(2.0));
        // No further first token.
        let decided = scalers.decide(seconds(29), |_| later);
        let observed: Vec<_> = decided.iter().map(|d| d.decision.observed).collect();
        assert_eq!((observed[0].arrivals, observed[1].ttft_ratio), (0, None));
        assert_eq!(scalers.wanted().collect::<Vec<_>>(), [("a", 5), ("b", 4)]);
        assert_eq!(Scalers::new().next_decision(), None);
    }

    /// A server that has just started knows its workers one after another, and removes none of them for a cooldown.
    #[test]
    fn workers_that_are_found_late_are_kept() {
        let mut scalers = Scalers::new();
        let none = PoolSample::default();
        scalers.add(
            "a",
            config(AutoscalePolicy::Utilization),
            10,
            none,
            seconds(0),
        );
        let mut at = |s: u64, ready: u32| {
            let decided = scalers.decide(seconds(s), |_| PoolSample { ready, ..none });
            decided[0].decision.wanted
        };
        assert_eq!([at(10, 0), at(20, 3), at(30, 5), at(40, 5)], [1, 3, 5, 5]);
        assert_eq!([at(60, 5), at(70, 5)], [5, 1]);
        // Later, more than wanted are those that are about to stop.
        assert_eq!(at(80, 5), 1);
    }

    /// A counter that restarts, as of an engine that came back, is no negative number of requests.
    #[test]
    fn counters_that_fall_count_nothing() {
        let mut scalers = Scalers::new();
        let first = PoolSample {
            ready: 1,
            arrived_total: 500,
            first_tokens_total: 500,
            ttft_total_s: 100.0,
            ..PoolSample::default()
        };
        scalers.add("a", config(AutoscalePolicy::Slo), 10, first, seconds(0));
        let decided = scalers.decide(seconds(10), |_| PoolSample {
            ready: 1,
            ..PoolSample::default()
        });
        let observed = decided[0].decision.observed;
        assert_eq!((observed.arrivals, observed.ttft_ratio), (0, None));
    }
}
