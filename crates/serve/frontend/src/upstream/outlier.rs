//! Measures engines' latencies per interval, and ejects engines that are worse than their peers.
//!
//! An engine may answer every health check and every request, and still be several times slower than the
//! others: a GPU that throttles, a link with errors, a noisy neighbor. As in Envoy's outlier detection
//! (`envoy.config.cluster.v3.OutlierDetection`), an engine that stands out in an interval takes no
//! requests for a time that grows with each ejection and shrinks with each compared interval without one. At
//! most a share of a pool is out at a time.
//!
//! An engine is compared with the median of its peers: engines of the same pool with enough requests in the
//! same interval. Differences from Envoy: latencies count as well as errors; engines that are out for another
//! reason count towards the share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use slipstream_config::cluster::OutlierConfig;

use super::counters::Totals;
use super::engines::{Engines, State};

/// Minimum number of peers with enough requests for a comparison.
const PEERS_MIN: usize = 2;

/// Floor of the peers' median, s: differences below it are noise.
const LATENCY_S_MIN: f64 = 0.001;

/// One engine in one interval.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// Unique id of the engine.
    id: u64,
    /// Whether the engine takes requests.
    is_up: bool,
    counts: Totals,
}

impl Sample {
    /// Share of the engine's requests that failed.
    fn errors(&self) -> f64 {
        self.counts.failures as f64 / (self.counts.ended().max(1)) as f64
    }
}

/// An engine to eject.
#[derive(Clone, Debug, PartialEq)]
struct Ejection {
    id: u64,
    duration: Duration,
    /// The reason, as a clause about the engine.
    why: String,
}

/// Finds outliers among the engines of one pool. It has no clock: it is called once per interval.
#[derive(Debug)]
struct Detector {
    config: OutlierConfig,
    base: Duration,
    longest: Duration,
    /// Per engine, the ejections that still count.
    times: BTreeMap<u64, u32>,
}

impl Detector {
    fn new(config: OutlierConfig, base: Duration, longest: Duration) -> Detector {
        Detector {
            config,
            base,
            longest,
            times: BTreeMap::new(),
        }
    }

    /// Returns the engines to eject now, the worst first.
    fn step(&mut self, pool: &[Sample]) -> Vec<Ejection> {
        self.times
            .retain(|id, _| pool.iter().any(|of| of.id == *id));
        let compared: Vec<&Sample> = pool
            .iter()
            .filter(|of| of.is_up && of.counts.ended() >= self.config.requests_min)
            .collect();
        let mut found: Vec<(f64, &Sample, String)> = compared
            .iter()
            .filter_map(|of| self.judge(of, &compared).map(|(by, why)| (by, *of, why)))
            .collect();
        found.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.id.cmp(&b.1.id)));
        for of in &compared {
            // Each interval in which it does not stand out takes an ejection off.
            if !found.iter().any(|(_, other, _)| other.id == of.id)
                && let Some(times) = self.times.get_mut(&of.id)
            {
                *times = times.saturating_sub(1);
            }
        }
        found.truncate(self.room(pool));
        let eject = |(_, of, why): (f64, &Sample, String)| {
            let times = self.times.entry(of.id).or_insert(0);
            *times = times.saturating_add(1);
            Ejection {
                id: of.id,
                duration: self.base.saturating_mul(*times).min(self.longest),
                why,
            }
        };
        found.into_iter().map(eject).collect()
    }

    /// Number of engines that may be ejected now: one even of a small pool, but only if none is out, and never the last.
    fn room(&self, pool: &[Sample]) -> usize {
        let up = pool.iter().filter(|of| of.is_up).count();
        let most = pool.len() as f64 * self.config.ejected_max;
        let share = (1..=pool.len())
            .take_while(|&count| count as f64 <= most)
            .count();
        let out = pool.len() - up;
        share.max(1).saturating_sub(out).min(up.saturating_sub(1))
    }

    /// Returns how far `of` stands out, and why; `None` if it does not.
    fn judge(&self, of: &Sample, compared: &[&Sample]) -> Option<(f64, String)> {
        let peers = || compared.iter().filter(|other| other.id != of.id);
        let median = |figure: &dyn Fn(&Sample) -> Option<f64>| {
            let mut all: Vec<f64> = peers().filter_map(|other| figure(other)).collect();
            all.sort_by(f64::total_cmp);
            (all.len() >= PEERS_MIN).then(|| all[all.len() / 2])
        };
        let errors = self.config.errors;
        if errors > 0.0
            && of.errors() >= errors
            && let Some(usual) = median(&|other| Some(other.errors()))
            // If all fail, the requests do.
            && usual < errors / 2.0
        {
            let (own, usual) = (of.errors() * 100.0, usual * 100.0);
            let why = format!("{own:.0} % of its requests failed, {usual:.0} % at its peers");
            return Some((f64::MAX, why));
        }
        type Figure = fn(&Totals) -> Option<f64>;
        let figures: [(&str, Figure); 2] = [
            ("to the first byte", Totals::first_byte_s),
            ("between two pieces of a stream", Totals::between_s),
        ];
        let slower = figures.iter().filter_map(|(what, figure)| {
            let usual = median(&|other| figure(&other.counts))?.max(LATENCY_S_MIN);
            let own = figure(&of.counts)?;
            let by = own / usual;
            let (own, usual) = (own * 1e3, usual * 1e3);
            let why = format!("it took {own:.1} ms {what}, and its peers {usual:.1}");
            (by > self.config.latency).then_some((by, why))
        });
        let is_on = self.config.latency > 0.0;
        let worst = slower.max_by(|a, b| a.0.total_cmp(&b.0));
        worst.filter(|_| is_on)
    }
}

/// Records the latencies of each interval, and ejects outliers, until it is dropped.
pub(super) async fn watch(engines: Arc<Engines>) {
    let (config, base, longest) = engines.outlier_settings();
    let interval = Duration::from_secs_f64(config.interval_s);
    let mut detectors: BTreeMap<String, Detector> = BTreeMap::new();
    let mut before: BTreeMap<u64, Totals> = BTreeMap::new();
    loop {
        tokio::time::sleep(interval).await;
        let members = engines.each();
        let mut pools: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
        let mut now = BTreeMap::new();
        for engine in &members {
            let totals = engine.counters.totals();
            let counts = totals.since(before.get(&engine.id).unwrap_or(&Totals::default()));
            engine.counters.recent.note(&counts);
            now.insert(engine.id, totals);
            let sample = Sample {
                id: engine.id,
                is_up: engine.state() == State::Up && !engine.is_draining(),
                counts,
            };
            pools
                .entry(engine.spec.pool.clone())
                .or_default()
                .push(sample);
        }
        before = now;
        if !config.is_on() {
            continue;
        }
        detectors.retain(|pool, _| pools.contains_key(pool));
        for (pool, samples) in pools {
            let new = || Detector::new(config, base, longest);
            for ejection in detectors.entry(pool).or_insert_with(new).step(&samples) {
                if let Some(engine) = members.iter().find(|of| of.id == ejection.id) {
                    engine.counters.outliers.fetch_add(1, Relaxed);
                    engines.eject_outlier(engine, ejection.duration, ejection.why);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config() -> OutlierConfig {
        OutlierConfig {
            latency: 3.0,
            errors: 0.5,
            requests_min: 10,
            ejected_max: 0.3,
            ..OutlierConfig::default()
        }
    }

    fn detector() -> Detector {
        Detector::new(config(), Duration::from_secs(5), Duration::from_secs(120))
    }

    /// `requests` answered after `ms` each, and `failures`.
    fn sample(id: u64, requests: u64, ms: u64, failures: u64) -> Sample {
        Sample {
            id,
            is_up: true,
            counts: Totals {
                answers: requests,
                failures,
                first_byte_ns: requests * ms * 1_000_000,
                pieces: requests * 10,
                stream_ns: requests * 10 * 5_000_000,
            },
        }
    }

    #[test]
    fn the_slower_and_the_failing_one_are_ejected_and_no_other() {
        let ids = |pool: &[Sample]| {
            let found = detector().step(pool);
            found.iter().map(|of| of.id).collect::<Vec<_>>()
        };
        let usual = |id| sample(id, 100, 40 + id, 1);
        let others = [usual(1), usual(2), usual(3)];
        let with = |of: Sample| [&others[..], &[of]].concat();
        assert_eq!(ids(&with(usual(4))), [0; 0]);
        assert_eq!(ids(&with(sample(4, 100, 200, 0))), [4]);
        assert_eq!(
            ids(&with(sample(4, 100, 40, 60))),
            [0; 0],
            "38 % is below the limit"
        );
        assert_eq!(ids(&with(sample(4, 20, 40, 60))), [4]);
        assert_eq!(ids(&with(sample(4, 9, 900, 0))), [0; 0], "too few requests");
        // Only its streams are slow.
        let mut slow = usual(4);
        slow.counts.stream_ns *= 4;
        let found = detector().step(&with(slow));
        assert!(found[0].why.contains("pieces of a stream"), "{found:?}");
        // Two are no majority; and if all are alike, the load is.
        assert_eq!(ids(&[usual(1), sample(2, 100, 900, 0)]), [0; 0]);
        assert_eq!(
            ids(&[
                sample(1, 20, 40, 60),
                sample(2, 20, 40, 60),
                sample(3, 20, 40, 60)
            ]),
            [0; 0]
        );
        // Off.
        let config = OutlierConfig::default();
        assert!(!config.is_on());
        let mut off = Detector::new(config, Duration::from_secs(5), Duration::from_secs(120));
        assert_eq!(off.step(&with(sample(4, 100, 9_000, 900))), []);
    }

    #[test]
    fn ejections_of_one_engine_grow_and_are_forgotten() {
        let mut of = detector();
        let pool = |slow: u64| {
            [
                sample(1, 100, 40, 0),
                sample(2, 100, 40, 0),
                sample(3, 100, slow, 0),
            ]
        };
        let mut seconds = |slow| of.step(&pool(slow)).first().map(|of| of.duration.as_secs());
        assert_eq!(
            [seconds(400), seconds(400), seconds(400)],
            [Some(5), Some(10), Some(15)]
        );
        assert_eq!(
            [seconds(40), seconds(40), seconds(400)],
            [None, None, Some(10)]
        );
        assert!((0..100).all(|_| seconds(400).is_some_and(|s| s <= 120)));
        assert_eq!(seconds(400), Some(120));
    }

    proptest! {
        /// For any behavior of the engines: never more are out than the bound allows, and each comes back.
        #[test]
        fn the_bound_holds_and_each_engine_comes_back(
            count in 1u64..12,
            ejected_max in 0.0..=1.0f64,
            intervals in prop::collection::vec(
                prop::collection::vec((0u64..200, 1u64..5_000, 0u64..200, prop::bool::weighted(0.1)), 12), 1..40),
        ) {
            let mut of = detector();
            of.config.ejected_max = ejected_max;
            let bound = ((count as f64 * ejected_max) as usize).max(1);
            // By engine: the interval in which it is back. Intervals are 5 s.
            let mut out: BTreeMap<u64, u64> = BTreeMap::new();
            for (now, figures) in (0u64..).zip(&intervals) {
                out.retain(|_, until| *until > now);
                let mut pool: Vec<Sample> = (0..count)
                    .zip(figures)
                    .map(|(id, &(requests, ms, failures, is_down))| {
                        let mut of = sample(id, requests, ms, failures);
                        of.is_up = !is_down && !out.contains_key(&id);
                        of
                    })
                    .collect();
                let found = of.step(&pool);
                // The order of the engines does not matter.
                pool.reverse();
                let was_out = pool.iter().filter(|of| !of.is_up).count();
                prop_assert!(found.is_empty() || was_out + found.len() <= bound);
                prop_assert!(found.len() < count as usize, "one is left");
                for ejection in found {
                    let up = pool.iter().any(|of| of.id == ejection.id && of.is_up);
                    prop_assert!(up, "it is out already");
                    prop_assert!(ejection.duration <= Duration::from_secs(120));
                    let steps = ejection.duration.as_secs().div_ceil(5);
                    out.insert(ejection.id, now + steps);
                }
            }
            prop_assert!(out.values().all(|until| *until <= intervals.len() as u64 + 24));
        }
    }
}
