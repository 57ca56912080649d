//! Durations: a histogram of bounded size, and its percentiles.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::table::number;

/// Significant decimal digits of percentiles: the error is at most one part in 1,000. Mean, minimum
/// and maximum are exact.
pub const SIGNIFICANT_DIGITS: u8 = 3;

/// Longest distinct duration, ns (about 52 days); longer ones count as this.
const LONGEST_NS: u64 = 1 << 52;

/// Durations of one kind, ns.
///
/// Memory is bounded (at most about 350 KiB) however many are recorded. Two can be added, so that
/// threads record separately.
#[derive(Clone, Debug)]
pub struct Latency {
    histogram: Histogram<u64>,
    sum_ns: u128,
    longest_ns: u64,
    shortest_ns: u64,
}

impl Default for Latency {
    fn default() -> Self {
        let mut histogram =
            Histogram::new(SIGNIFICANT_DIGITS).expect("3 digits are within the library's 0 to 5");
        histogram.auto(true);
        Latency {
            histogram,
            sum_ns: 0,
            longest_ns: 0,
            shortest_ns: u64::MAX,
        }
    }
}

impl Latency {
    /// Adds one duration.
    pub fn record(&mut self, ns: u64) {
        self.record_n(ns, 1);
    }

    /// Adds `count` equal durations.
    pub fn record_n(&mut self, ns: u64, count: u64) {
        if count == 0 {
            return;
        }
        self.count_n(ns.min(LONGEST_NS), count);
        self.sum_ns += u128::from(ns) * u128::from(count);
        self.longest_ns = self.longest_ns.max(ns);
        self.shortest_ns = self.shortest_ns.min(ns);
    }

    /// Adds `count` times each duration: as [`record_n`](Self::record_n), and faster if neighbors are of one size.
    pub fn record_each(&mut self, durations_ns: impl IntoIterator<Item = u64>, count: u64) {
        if count == 0 {
            return;
        }
        // Those of one bucket that are not in the histogram yet.
        let (mut bucket, mut last, mut many, mut sum) = (0..0, 0, 0, 0);
        for ns in durations_ns {
            sum += u128::from(ns);
            self.longest_ns = self.longest_ns.max(ns);
            self.shortest_ns = self.shortest_ns.min(ns);
            let ns = ns.min(LONGEST_NS);
            if !bucket.contains(&ns) {
                self.count_n(last, many);
                let least = self.histogram.lowest_equivalent(ns);
                bucket = least..self.histogram.next_non_equivalent(ns);
                many = 0;
            }
            last = ns;
            many += count;
        }
        self.count_n(last, many);
        self.sum_ns += sum * u128::from(count);
    }

    fn count_n(&mut self, ns: u64, count: u64) {
        if count > 0 {
            self.histogram
                .record_n(ns, count)
                .expect("an auto-resizing histogram takes every value up to 2^52");
        }
    }

    /// Adds all durations of `other`.
    pub fn add(&mut self, other: &Latency) {
        self.histogram
            .add(&other.histogram)
            .expect("both histograms resize and have the same precision");
        self.sum_ns += other.sum_ns;
        self.longest_ns = self.longest_ns.max(other.longest_ns);
        self.shortest_ns = self.shortest_ns.min(other.shortest_ns);
    }

    /// Number of recorded durations.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// The smallest recorded duration that at least `share` (0 to 1) of all do not exceed, ns;
    /// `None` if there are none.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        (self.count() > 0).then(|| {
            self.histogram
                .value_at_quantile(share)
                .clamp(self.shortest_ns, self.longest_ns)
        })
    }

    /// The distribution in about `points` steps: durations, ns, with the share of all that did not
    /// exceed each. Between two steps its error is below `1 / points`; the last one is the longest
    /// duration, with share 1.
    pub fn cdf(&self, points: usize) -> Vec<(u64, f64)> {
        let mut steps: Vec<(u64, f64)> = Vec::new();
        let all = self.count() as f64;
        let mut seen = 0;
        let least = 1.0 / points.max(1) as f64;
        for value in self.histogram.iter_recorded() {
            seen += value.count_since_last_iteration();
            let ns = value.value_iterated_to();
            let ns = ns.clamp(self.shortest_ns, self.longest_ns);
            let (share, last) = (seen as f64 / all, steps.last().copied());
            // Tails have few samples but the most interest: they are kept wherever a step shows on
            // a logarithmic axis.
            let shows = last.is_none_or(|(at, kept)| {
                share - kept >= least || ns as f64 >= at.max(1) as f64 * (1.0 + 4.0 * least)
            });
            if shows || seen == self.count() {
                steps.push((ns, share));
            }
        }
        steps
    }

    /// The percentiles of reports; `None` if nothing was recorded.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let at = |share| self.quantile_ns(share).map(ms);
        Some(Percentiles {
            count: self.count(),
            mean: self.sum_ns as f64 / self.count() as f64 / 1e6,
            min: at(0.0).map(|_| ms(self.shortest_ns))?,
            p50: at(0.50)?,
            p75: at(0.75)?,
            p90: at(0.90)?,
            p95: at(0.95)?,
            p99: at(0.99)?,
            max: ms(self.longest_ns),
        })
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Percentiles of durations, ms. Precision: [`SIGNIFICANT_DIGITS`]; mean, min and max are exact.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Number of durations.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Shortest.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// 75th percentile.
    pub p75: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Longest.
    pub max: f64,
}

/// Whether `count` samples determine the value that a `share` (0 to 1) of them stay below. The rule
/// of every table: at least one sample must be above it. Of fewer than 100 samples, the 99th
/// percentile is the largest, and of fewer than ten the 90th; a table would print the maximum
/// twice, or under a wrong name. The median is always determined.
pub fn enough_samples(share: f64, count: u64) -> bool {
    // 100 × (1 − 0.99) is a little more or less than 1.
    count > 0 && (share <= 0.5 || count as f64 * (1.0 - share) >= 1.0 - 1e-6)
}

/// Explains a `-` among percentiles.
pub const TOO_FEW: &str =
    "-: too few samples; at least one must be above a percentile, so p99 needs 100, p95 20, p90 10";

/// One of the percentiles of [`Percentiles`].
#[derive(Clone, Copy, Debug)]
pub struct Quantile {
    share: f64,
    of: fn(&Percentiles) -> f64,
}

/// The median.
pub const P50: Quantile = Quantile {
    share: 0.5,
    of: |p| p.p50,
};
/// The 75th percentile.
pub const P75: Quantile = Quantile {
    share: 0.75,
    of: |p| p.p75,
};
/// The 90th percentile.
pub const P90: Quantile = Quantile {
    share: 0.9,
    of: |p| p.p90,
};
/// The 95th percentile.
pub const P95: Quantile = Quantile {
    share: 0.95,
    of: |p| p.p95,
};
/// The 99th percentile.
pub const P99: Quantile = Quantile {
    share: 0.99,
    of: |p| p.p99,
};

impl Percentiles {
    /// A percentile, ms; `None` if there are too few samples ([`enough_samples`]).
    pub fn at(&self, quantile: Quantile) -> Option<f64> {
        enough_samples(quantile.share, self.count).then(|| (quantile.of)(self))
    }

    /// Whether tables omit one of the percentiles.
    pub fn leaves_out(&self) -> bool {
        !enough_samples(P99.share, self.count)
    }
}

/// A percentile as printed in tables; `-` if there is none.
pub fn cell(percentiles: Option<Percentiles>, quantile: Quantile) -> String {
    let value = percentiles.and_then(|p| p.at(quantile));
    value.map_or_else(|| "-".to_owned(), number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_recorded_at_once_are_those_recorded_one_by_one() {
        let sizes = [
            0,
            1,
            2_047,
            2_048,
            10_000_000,
            10_003_000,
            10_020_000,
            1 << 53,
            u64::MAX,
        ];
        let each = sizes.iter().flat_map(|&ns| [ns, ns, ns.saturating_add(1)]);
        let (mut at_once, mut single) = (Latency::default(), Latency::default());
        at_once.record_each(each.clone(), 3);
        at_once.record_each([5], 0);
        for ns in each {
            single.record_n(ns, 3);
        }
        assert_eq!(at_once.percentiles(), single.percentiles());
        assert_eq!(at_once.cdf(1_000), single.cdf(1_000));
    }

    #[test]
    fn a_percentile_is_told_when_it_is_not_the_maximum() {
        for (share, least) in [
            (0.75, 4),
            (0.9, 10),
            (0.95, 20),
            (0.99, 100),
            (0.999, 1_000),
        ] {
            assert!(
                enough_samples(share, least) && !enough_samples(share, least - 1),
                "{share}"
            );
            // By nearest rank, the definition of the percentile.
            let rank = |count: u64| (share * count as f64 - 1e-9).ceil() as u64;
            assert_eq!((rank(least), rank(least - 1)), (least - 1, least - 1));
        }
        assert!(enough_samples(0.5, 1) && !enough_samples(0.5, 0));
        let of = |count: u64| {
            let mut latency = Latency::default();
            (1..=count).for_each(|ms| latency.record(ms * 1_000_000));
            latency.percentiles()
        };
        assert_eq!(cell(of(99), P99), "-");
        assert_eq!(cell(of(99), P95), "95.0");
        assert_eq!(cell(of(100), P99), "99.0");
        assert_eq!(cell(of(1), P50), "1.00");
        assert_eq!(cell(None, P50), "-");
    }

    #[test]
    fn known_percentiles_of_one_to_a_thousand_ms() {
        let mut latency = Latency::default();
        for n in 1..=1_000u64 {
            latency.record(n * 1_000_000);
        }
        let p = latency.percentiles().unwrap();
        assert_eq!(
            (p.count, p.min, p.max, p.mean),
            (1_000, 1.0, 1_000.0, 500.5)
        );
        for (value, exact) in [
            (p.p50, 500.0),
            (p.p75, 750.0),
            (p.p90, 900.0),
            (p.p99, 990.0),
        ] {
            assert!((value - exact).abs() <= exact * 1e-3, "{value} for {exact}");
        }
    }

    #[test]
    fn a_distribution_rises_to_one_in_few_steps() {
        let mut latency = Latency::default();
        for n in 1..=100_000u64 {
            latency.record(n * 10_000);
        }
        let steps = latency.cdf(100);
        assert!((100..=400).contains(&steps.len()), "{}", steps.len());
        assert!(steps.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
        for &(ns, share) in &steps {
            assert!((share - ns as f64 / 1e9).abs() < 2e-3, "{share} at {ns}");
        }
        assert_eq!(steps.last(), Some(&(1_000_000_000, 1.0)));
        assert_eq!(Latency::default().cdf(100), []);
        latency = Latency::default();
        latency.record_n(7, 3);
        assert_eq!(latency.cdf(100), [(7, 1.0)]);
    }

    #[test]
    fn nothing_recorded_has_no_percentiles() {
        assert_eq!(Latency::default().percentiles(), None);
    }

    #[test]
    fn extremes_are_taken() {
        let mut latency = Latency::default();
        latency.record(0);
        latency.record(u64::MAX);
        let p = latency.percentiles().unwrap();
        assert_eq!(p.min, 0.0);
        assert_eq!(p.max, u64::MAX as f64 / 1e6);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn quantiles_match_a_sorted_list(
            mut values in prop::collection::vec(0u64..10_000_000_000, 1..200),
            share in 0.01f64..1.0,
        ) {
            let (mut left, mut right) = (Latency::default(), Latency::default());
            for (i, &v) in values.iter().enumerate() {
                if i % 2 == 0 { left.record(v) } else { right.record(v) }
            }
            left.add(&right);
            values.sort_unstable();
            let rank = ((share * values.len() as f64).ceil() as usize).clamp(1, values.len());
            let exact = values[rank - 1] as f64;
            let got = left.quantile_ns(share).unwrap() as f64;
            prop_assert!((got - exact).abs() <= exact * 1e-3 + 1.0, "{got} for {exact}");
        }
    }
}
