//! Detects overload: requests arrive faster than they are served, so latency grows until the last arrival.
//!
//! A queue that is served in order and too slowly grows linearly in time, and so does the wait: a request that is due `t`
//! later waits `g·t` longer, and `1 + g` is the offered rate over the served one. Bursts that are worked off leave no growth;
//! chance lengthens a queue by about the square root of the number of requests.

use serde::{Deserialize, Serialize};
use slipstream_base::width;

/// Overload that lasted until the last arrival.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Overload {
    /// When the backlog began to grow, s from the start of the run.
    pub since_s: f64,
    /// Requests per second that were due from then on.
    pub offered_per_s: f64,
    /// Requests per second that were served.
    pub served_per_s: f64,
}

impl Overload {
    /// `since 12 s: 60 requests/s offered, 1 served`
    pub fn line(&self) -> String {
        use crate::table::number;
        format!(
            "since {} s: {} requests/s offered, {} served",
            number(self.since_s),
            number(self.offered_per_s),
            number(self.served_per_s)
        )
    }
}

/// Limit of bins.
const BINS_MAX: usize = 256;
/// Width of the first bins, ns, as a power of two: about 1 ms.
const SHIFT: u32 = 20;
/// Groups of bins that are compared.
const GROUPS: usize = 20;
/// Groups at the end in which the backlog must have grown: a shorter burst may still be worked off.
const GROWN: usize = 5;
/// Growth of latency per time below which requests count as served as fast as they arrive.
const GROWTH: f64 = 0.02;
/// Share of the growth that the latency may have had before it began.
const BEGUN: f64 = 0.05;
/// Standard deviations of the number of requests that chance may add to a queue.
const CHANCE: f64 = 3.0;
/// Minimum duration of the growth, in durations of an unloaded request: before that, load builds up.
const SERVED: f64 = 3.0;

/// Requests due in a time.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    count: u64,
    /// Sums of latencies, ns.
    ttft: f64,
    e2e: f64,
}

impl Bin {
    fn add(&mut self, other: &Bin) {
        self.count += other.count;
        self.ttft += other.ttft;
        self.e2e += other.e2e;
    }
}

/// Latencies of answered requests by the time at which they were due, in constant memory.
#[derive(Clone, Debug)]
pub(crate) struct Backlog {
    /// Width of a bin, as a power of two.
    shift: u32,
    /// Index of the first bin.
    first: u64,
    bins: Vec<Bin>,
    ttft_min: u64,
}

impl Default for Backlog {
    fn default() -> Backlog {
        Backlog {
            shift: SHIFT,
            first: 0,
            bins: Vec::new(),
            ttft_min: u64::MAX,
        }
    }
}

/// Mean latencies of consecutive times, and when they end, s.
struct Growth {
    since_s: f64,
    /// Per time.
    rate: f64,
}

impl Backlog {
    pub(crate) fn on_answered(&mut self, due: u64, ttft: u64, e2e: u64) {
        self.ttft_min = self.ttft_min.min(ttft);
        self.bin(due).add(&Bin {
            count: 1,
            ttft: ttft as f64,
            e2e: e2e as f64,
        });
    }

    fn bin(&mut self, due: u64) -> &mut Bin {
        loop {
            let at = due >> self.shift;
            if self.bins.is_empty() {
                self.first = at;
            }
            let last = self.first + self.bins.len().saturating_sub(1) as u64;
            if at.max(last) - at.min(self.first) < BINS_MAX as u64 {
                if at < self.first {
                    let more = width::to_usize(self.first - at);
                    self.bins
                        .splice(0..0, std::iter::repeat_n(Bin::default(), more));
                    self.first = at;
                }
                let index = width::to_usize(at - self.first);
                if index >= self.bins.len() {
                    self.bins.resize(index + 1, Bin::default());
                }
                return &mut self.bins[index];
            }
            self.widen();
        }
    }

    /// Makes bins twice as wide.
    fn widen(&mut self) {
        let odd = width::to_usize(self.first % 2);
        let mut wider = vec![Bin::default(); (self.bins.len() + odd).div_ceil(2)];
        for (at, bin) in self.bins.iter().enumerate() {
            wider[(at + odd) >> 1].add(bin);
        }
        self.bins = wider;
        self.first /= 2;
        self.shift += 1;
    }

    pub(crate) fn add(&mut self, other: &Backlog) {
        while self.shift < other.shift {
            self.widen();
        }
        for (at, bin) in other.bins.iter().enumerate() {
            if bin.count > 0 {
                self.bin((other.first + at as u64) << other.shift).add(bin);
            }
        }
        self.ttft_min = self.ttft_min.min(other.ttft_min);
    }

    /// The overload; `None` if requests were served as fast as they came.
    pub(crate) fn overload(&self) -> Option<Overload> {
        let each = |bin: &Bin| [bin.ttft, bin.e2e];
        let alone_s = self.ttft_min as f64 / 1e9;
        if let Some(growth) = self.growth(|bin| each(bin)[0], |_| alone_s) {
            return Some(self.served(&growth));
        }
        // Answers may wait for other workers than those that give first tokens.
        let after_first = |groups: &[Bin]| {
            let means = groups.iter().filter(|group| group.count > 0);
            let means = means.map(|group| (group.e2e - group.ttft) / group.count as f64 / 1e9);
            means.fold(f64::INFINITY, f64::min)
        };
        let growth = self.growth(|bin| each(bin)[1], after_first)?;
        Some(self.served(&growth))
    }

    fn width_s(&self) -> f64 {
        (1u64 << self.shift) as f64 / 1e9
    }

    fn served(&self, growth: &Growth) -> Overload {
        let (begin, count) = self.from(growth.since_s);
        let length_s = (self.first + self.bins.len() as u64) as f64 * self.width_s() - begin;
        let offered = count as f64 / length_s.max(1e-9);
        Overload {
            since_s: begin,
            offered_per_s: offered,
            served_per_s: offered / (1.0 + growth.rate),
        }
    }

    /// The start of the first bin that begins at a time or later, s, and the requests from there.
    fn from(&self, since_s: f64) -> (f64, u64) {
        let starts =
            (0..self.bins.len()).map(|at| (self.first + at as u64) as f64 * self.width_s());
        let bins = starts
            .zip(&self.bins)
            .filter(|(start, _)| *start >= since_s);
        let mut begin = None;
        let mut count = 0;
        for (start, bin) in bins {
            begin.get_or_insert(start);
            count += bin.count;
        }
        (begin.unwrap_or(since_s), count)
    }

    /// How a latency grows towards the end of the requests. `alone_s`: the time of a request by itself, by the groups.
    fn growth(&self, sum: impl Fn(&Bin) -> f64, alone_s: impl Fn(&[Bin]) -> f64) -> Option<Growth> {
        let bins = self.bins.len();
        if bins < GROUPS {
            return None;
        }
        let edge = |group: usize| group * bins / GROUPS;
        let groups: Vec<Bin> = (0..GROUPS)
            .map(|group| {
                let mut all = Bin::default();
                self.bins[edge(group)..edge(group + 1)]
                    .iter()
                    .for_each(|bin| all.add(bin));
                all
            })
            .collect();
        let start_s = self.first as f64 * self.width_s();
        let middle_s =
            |group: usize| start_s + (edge(group) + edge(group + 1)) as f64 / 2.0 * self.width_s();
        let known: Vec<(usize, f64)> = groups
            .iter()
            .enumerate()
            .filter(|(_, group)| group.count > 0)
            .map(|(at, group)| (at, sum(group) / group.count as f64 / 1e9))
            .collect();
        let &(last, end_s) = known.last()?;
        let base_s = known
            .iter()
            .map(|each| each.1)
            .fold(f64::INFINITY, f64::min);
        let begun = |each: &&(usize, f64)| each.1 <= base_s + BEGUN * (end_s - base_s);
        let &(from, from_s) = known.iter().rev().find(begun)?;
        if last < from + GROWN {
            return None;
        }
        let rate = (end_s - from_s) / (middle_s(last) - middle_s(from));
        // The queue was as long as the shortest wait says before.
        let since_s = if from == 0 { start_s } else { middle_s(from) };
        let (begin_s, count) = self.from(since_s);
        let length_s = middle_s(last) - begin_s;
        let queued = count as f64 * rate / (1.0 + rate);
        let grows = rate >= GROWTH
            && queued > CHANCE * (self.dispersion(begin_s) * count as f64).sqrt()
            && length_s >= SERVED * alone_s(&groups);
        grows.then_some(Growth { since_s, rate })
    }

    /// Variance of the number of requests in a time over its mean, from neighboring bins: at least that of independent
    /// arrivals.
    fn dispersion(&self, from_s: f64) -> f64 {
        let skipped = (from_s / self.width_s()).round() - self.first as f64;
        let bins = self
            .bins
            .iter()
            .skip(width::to_usize(width::floor_u64(skipped.max(0.0))));
        let counts: Vec<f64> = bins.map(|bin| bin.count as f64).collect();
        let squares: f64 = counts
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).powi(2))
            .sum();
        let sum: f64 = counts.iter().sum();
        (squares / 2.0 / sum.max(1.0)).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use slipstream_base::mix::{draw, unit};

    use super::*;

    /// A queue with one server: arrivals by their gaps, and a service time each, in ms.
    fn queue(gaps: impl Iterator<Item = f64>, mut service: impl FnMut(usize) -> f64) -> Backlog {
        let (mut due, mut free) = (0.0, 0.0f64);
        let mut backlog = Backlog::default();
        for (at, gap) in gaps.enumerate() {
            due += gap;
            let time = service(at);
            free = free.max(due) + time;
            let ns = |ms: f64| (ms * 1e6) as u64;
            backlog.on_answered(ns(due), ns(free - due), ns(free - due + 5.0 * time));
        }
        backlog
    }

    /// Exponential gaps with this mean.
    fn poisson(seed: u64, count: u64, mean: f64) -> impl Iterator<Item = f64> {
        (0..count).map(move |n| -mean * (1.0 - unit(draw(seed, n))).ln())
    }

    #[test]
    fn queues_with_one_server_have_known_answers() {
        for seed in 0..50 {
            for count in [300, 3_000, 20_000] {
                let at = |load: f64| queue(poisson(seed, count, 10.0 / load), |_| 10.0).overload();
                for load in [0.3, 0.7, 0.9] {
                    assert_eq!(at(load), None, "{seed} {count} {load}");
                }
                let sixty = at(60.0).unwrap();
                assert!(
                    (sixty.offered_per_s / 6000.0 - 1.0).abs() < 0.25,
                    "{sixty:?}"
                );
                assert!((sixty.served_per_s / 100.0 - 1.0).abs() < 0.1, "{sixty:?}");
                if count == 20_000 {
                    let above = at(1.1).unwrap();
                    assert!(
                        (above.offered_per_s / 110.0 - 1.0).abs() < 0.05,
                        "{above:?}"
                    );
                    assert!((above.served_per_s / 100.0 - 1.0).abs() < 0.05, "{above:?}");
                    assert!(above.since_s < 0.3 * 20_000.0 / 110.0, "{above:?}");
                }
            }
        }
    }

    #[test]
    fn the_begin_of_an_overload_is_found() {
        let gaps = poisson(1, 20_000, 20.0).chain(poisson(2, 40_000, 5.0));
        let found = queue(gaps, |_| 10.0).overload().unwrap();
        // 400 s at half the load, and 200 s at twice.
        assert!((found.since_s - 400.0).abs() < 30.0, "{found:?}");
        assert!((found.served_per_s / 100.0 - 1.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn bursts_that_are_worked_off_are_none() {
        for seed in 0..20 {
            // A hundred at once, every 2 s: half of what can be served.
            let bursts = (0..10_000).map(|n| if n % 100 == 0 { 2_000.0 } else { 0.0 });
            assert_eq!(queue(bursts, |_| 10.0).overload(), None);
            // Five times the load for a tenth of the requests, in the middle and at the end.
            let calm = |part: u64| poisson(seed + 100 * part, 4_000, 15.0);
            let burst = |part: u64| poisson(seed + 100 * part, 400, 2.0);
            let gaps = calm(1).chain(burst(2)).chain(calm(3)).chain(burst(4));
            assert_eq!(queue(gaps, |_| 10.0).overload(), None, "{seed}");
        }
    }

    #[test]
    fn long_answers_of_a_short_run_are_none() {
        // Each takes 30 s, at no load, and all are due within 20 s.
        let mut backlog = Backlog::default();
        for n in 0..200u64 {
            let after = 20 + draw(3, n) % 20;
            backlog.on_answered(n * 100_000_000, 50_000_000, after * 1_000_000_000);
        }
        assert_eq!(backlog.overload(), None);
    }

    #[test]
    fn parts_of_a_run_add_up() {
        let (mut whole, mut one, mut two) = <(Backlog, Backlog, Backlog)>::default();
        for n in 0..5_000u64 {
            let (due, wait) = (n * 7_000_000, n * 3_000_000);
            whole.on_answered(due, wait, wait);
            if n % 3 == 0 { &mut one } else { &mut two }.on_answered(due, wait, wait);
        }
        one.add(&two);
        assert_eq!(one.overload(), whole.overload());
        let found = whole.overload().unwrap();
        assert!(
            (found.offered_per_s * 0.007 - 1.0).abs() < 0.02,
            "{found:?}"
        );
        assert!((found.served_per_s * 0.010 - 1.0).abs() < 0.02, "{found:?}");
        assert_eq!(Backlog::default().overload(), None);
    }
}
