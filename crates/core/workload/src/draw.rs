//! Named streams of random numbers, and the distributions made from them.
//!
//! `ln`, `exp`, `cos` and `pow` come from `libm`, so that a seed gives the same requests on every
//! machine.

use slipstream_base::mix::{draw, mix64, unit};
use slipstream_base::width;
use slipstream_config::workload_file::Dist;

/// A stream of 64-bit random numbers, addressed by index: draw 7 is the same whether or not others
/// were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(u64);

impl Stream {
    /// The stream called `name` under `seed`.
    pub fn named(seed: u64, name: &str) -> Stream {
        // FNV-1a spreads the name, mix64 the seed; all names are literals of this crate.
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, byte| {
            (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Stream(mix64(seed ^ 0x5eed) ^ name)
    }

    /// A separate stream for item `index`.
    #[must_use]
    pub fn child(self, index: u64) -> Stream {
        Stream(draw(self.0, index))
    }

    /// Draw `index`.
    pub fn bits(self, index: u64) -> u64 {
        draw(self.0, index)
    }

    /// Draw `index` in `[0, 1)`.
    pub fn unit(self, index: u64) -> f64 {
        unit(self.bits(index))
    }

    /// Draw `index` in `(0, 1]`: safe under `ln`.
    fn unit_above_zero(self, index: u64) -> f64 {
        1.0 - self.unit(index)
    }

    /// Exponential with mean 1. Uses draw 0.
    pub fn exponential(self) -> f64 {
        -libm::log(self.unit_above_zero(0))
    }

    /// Standard normal. Uses draws `2·pair` and `2·pair + 1`.
    ///
    /// Source: Box and Muller, "A note on the generation of random normal deviates", 1958.
    fn normal(self, pair: u64) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(self.unit_above_zero(2 * pair)));
        radius * libm::cos(std::f64::consts::TAU * self.unit(2 * pair + 1))
    }

    /// Gamma with shape `k > 0` and mean 1.
    ///
    /// Source: Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS
    /// 26(3), 2000; below shape 1 by their boost, `gamma(k + 1) · U^(1/k)`.
    pub fn gamma(self, k: f64) -> f64 {
        let boosted = k < 1.0;
        let shape = if boosted { k + 1.0 } else { k };
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / libm::sqrt(9.0 * d);
        // Each round is accepted with probability above 0.95. 64 rounds without an acceptance do
        // not happen (below 1e-83), but the bound keeps the loop finite.
        let (normals, uniforms) = (self.child(0), self.child(1));
        let mut value = d;
        for round in 0..64 {
            let x = normals.normal(round);
            let v = 1.0 + c * x;
            if v <= 0.0 {
                continue;
            }
            let v = v * v * v;
            let u = uniforms.unit_above_zero(round);
            if libm::log(u) < 0.5 * x * x + d - d * v + d * libm::log(v) {
                value = d * v;
                break;
            }
        }
        if boosted {
            value *= libm::pow(self.child(2).unit_above_zero(0), 1.0 / k);
        }
        value / k
    }

    /// Weibull with shape `k > 0` and mean 1.
    pub fn weibull(self, k: f64) -> f64 {
        libm::pow(self.exponential(), 1.0 / k) / libm::tgamma(1.0 + 1.0 / k)
    }

    /// A whole number from 1 to `n`, *k* with a chance proportional to `k^-skew`, in O(1).
    ///
    /// Source: Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone
    /// discrete distributions", ACM TOMACS 6(3), 1996, with the hat `x^-skew`.
    fn zipf(self, n: f64, skew: f64) -> f64 {
        let hat = |x: f64| libm::exp(-skew * libm::log(x));
        // The hat's integral from 1, and its inverse; both smooth through skew 1.
        let area = |x: f64| {
            let log = libm::log(x);
            if (1.0 - skew).abs() < 1e-9 {
                log
            } else {
                libm::expm1((1.0 - skew) * log) / (1.0 - skew)
            }
        };
        let area_inverse = |a: f64| {
            if (1.0 - skew).abs() < 1e-9 {
                libm::exp(a)
            } else {
                libm::exp(libm::log1p((a * (1.0 - skew)).max(-1.0)) / (1.0 - skew))
            }
        };
        let (low, high) = (area(1.5) - 1.0, area(n + 0.5));
        let sure = 2.0 - area_inverse(area(2.5) - hat(2.0));
        // Each round is accepted with probability above 0.7 whatever the skew, so 256 rounds
        // without an acceptance do not happen.
        for round in 0..256 {
            let a = high + self.unit(round) * (low - high);
            let x = area_inverse(a);
            let k = libm::round(x).clamp(1.0, n);
            if k - x <= sure || a >= area(k + 0.5) - hat(k) {
                return k;
            }
        }
        1.0
    }

    /// One value of `dist`. Most use draws 0 and 1.
    pub fn sample(self, dist: &Dist) -> f64 {
        match dist {
            Dist::Exact(value) => *value,
            Dist::Uniform { min, max } => min + self.unit(0) * (max - min),
            Dist::Normal { mean, cv, bounds } => {
                (mean + mean * cv * self.normal(0)).clamp(bounds.min, bounds.max)
            }
            Dist::LogNormal { mean, cv, bounds } => {
                // If ln X ~ N(m, s²) then E X = exp(m + s²/2) and cv² = exp(s²) − 1.
                let variance = libm::log(1.0 + cv * cv);
                let location = libm::log(*mean) - variance / 2.0;
                libm::exp(location + libm::sqrt(variance) * self.normal(0))
                    .clamp(bounds.min, bounds.max)
            }
            Dist::Exponential { mean, bounds } => {
                (mean * self.exponential()).clamp(bounds.min, bounds.max)
            }
            Dist::Zipf { min, max, skew } => min - 1.0 + self.zipf(max - min + 1.0, *skew),
            Dist::Empirical(e) => {
                let at = width::to_usize(width::floor_u64(self.unit(0) * e.values.len() as f64));
                // `Source::open` has read the file, which has at least one value.
                e.values[at].clamp(e.bounds.min, e.bounds.max)
            }
            Dist::Choice { values, weights } => values[self.choose(weights)],
        }
    }

    /// One whole value of `dist`, at least `least`: the nearest, or for a uniform distribution each
    /// whole number of the range with equal probability.
    pub fn sample_whole(self, dist: &Dist, least: u32) -> u32 {
        let value = match dist {
            Dist::Uniform { min, max } => libm::floor(
                libm::ceil(*min) + self.unit(0) * (libm::floor(*max) - libm::ceil(*min) + 1.0),
            ),
            dist => libm::round(self.sample(dist)),
        };
        // Infinity becomes the largest length.
        width::floor_u32(value).max(least)
    }

    /// An index of `weights`, by weight. Uses draw 0.
    fn choose(self, weights: &[f64]) -> usize {
        let total: f64 = weights.iter().sum();
        let mut left = self.unit(0) * total;
        for (i, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return i;
            }
        }
        // A rounding error may remain; it belongs to the last index with weight.
        weights.iter().rposition(|w| *w > 0.0).unwrap_or(0)
    }
}

/// Weighted indices in O(log n) per draw, for tables that many draws share.
#[derive(Clone, Debug)]
pub struct Table {
    /// Cumulative weights up to each index, over their total.
    cumulative: Vec<f64>,
}

impl Table {
    /// Index `i` with a probability proportional to `weights[i]`.
    pub fn new(weights: impl IntoIterator<Item = f64>) -> Table {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = weights
            .into_iter()
            .map(|w| {
                sum += w;
                sum
            })
            .collect();
        for c in &mut cumulative {
            *c /= sum;
        }
        Table { cumulative }
    }

    /// Zipf's law over `n` indices.
    pub fn zipf(n: u32, skew: f64) -> Table {
        Table::new((1..=n).map(|k| libm::pow(f64::from(k), -skew)))
    }

    /// The index for `unit` in `[0, 1)`.
    pub fn index(&self, unit: f64) -> usize {
        self.cumulative
            .partition_point(|c| *c <= unit)
            .min(self.cumulative.len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_config::workload_file::Bounds;

    const N: u64 = 100_000;

    /// Mean and coefficient of variation of `N` draws must be as stated. Tolerances: the standard
    /// error of a mean is cv/√N (0.3 % at cv 1); that of a cv is about √(kurtosis)/2√N, below 1 %
    /// for these shapes (log-normal at cv 0.7 has kurtosis 13). Four standard errors each.
    fn check_moments(dist: &Dist, mean: f64, cv: f64) {
        let stream = Stream::named(7, "test");
        let values: Vec<f64> = (0..N).map(|i| stream.child(i).sample(dist)).collect();
        check_values(&values, mean, cv);
    }

    fn check_values(values: &[f64], mean: f64, cv: f64) {
        let n = values.len() as f64;
        let got_mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|v| (v - got_mean).powi(2)).sum::<f64>() / n;
        let got_cv = variance.sqrt() / got_mean;
        let tolerance = 4.0 * cv / n.sqrt();
        assert!(
            (got_mean / mean - 1.0).abs() <= tolerance,
            "mean {got_mean} for {mean}"
        );
        assert!((got_cv - cv).abs() <= 0.03 * cv, "cv {got_cv} for {cv}");
    }

    #[test]
    fn moments_are_as_stated() {
        let bounds = Bounds {
            min: f64::MIN,
            max: f64::MAX,
        };
        check_moments(
            &Dist::Uniform { min: 0.0, max: 2.0 },
            1.0,
            1.0 / 3.0_f64.sqrt(),
        );
        check_moments(
            &Dist::Normal {
                mean: 100.0,
                cv: 0.2,
                bounds,
            },
            100.0,
            0.2,
        );
        check_moments(
            &Dist::LogNormal {
                mean: 300.0,
                cv: 0.7,
                bounds,
            },
            300.0,
            0.7,
        );
        check_moments(&Dist::Exponential { mean: 5.0, bounds }, 5.0, 1.0);
        // 1 and 3 with weights 3 and 1: mean 1.5, variance 0.75.
        let choice = Dist::Choice {
            values: vec![1.0, 3.0],
            weights: vec![3.0, 1.0],
        };
        check_moments(&choice, 1.5, 0.75_f64.sqrt() / 1.5);
    }

    #[test]
    fn zipf_follows_its_law() {
        // Exact mean and cv from the law itself.
        for (min, max, skew) in [
            (1.0, 50.0, 1.0),
            (10.0, 400.0, 1.5),
            (1.0, 6.0, 0.0),
            (1.0, 1e6, 0.7),
        ] {
            let n = max - min + 1.0;
            let (mut weight, mut first, mut second) = (0.0, 0.0, 0.0);
            for k in 1..=n as u64 {
                let (chance, value) = ((k as f64).powf(-skew), min - 1.0 + k as f64);
                weight += chance;
                first += chance * value;
                second += chance * value * value;
            }
            let mean = first / weight;
            let cv = (second / weight - mean * mean).sqrt() / mean;
            check_moments(&Dist::Zipf { min, max, skew }, mean, cv);
        }
        let dist = Dist::Zipf {
            min: 5.0,
            max: 5.0,
            skew: 2.0,
        };
        assert_eq!(Stream::named(1, "one").sample(&dist), 5.0);
        // The share of each value, if there are few: 6/11, 3/11, 2/11.
        let dist = Dist::Zipf {
            min: 1.0,
            max: 3.0,
            skew: 1.0,
        };
        let mut counts = [0u32; 3];
        for i in 0..110_000 {
            counts[Stream::named(2, "three").child(i).sample(&dist) as usize - 1] += 1;
        }
        // The largest standard deviation is 165; four of them.
        assert!(
            counts
                .iter()
                .zip([60_000u32, 30_000, 20_000])
                .all(|(c, e)| c.abs_diff(e) < 660),
            "{counts:?}"
        );
    }

    #[test]
    fn weibull_has_mean_one_and_the_cv_of_its_shape() {
        for shape in [0.7, 1.0, 2.0] {
            let g = |n: f64| libm::tgamma(1.0 + n / shape);
            let cv = (g(2.0) / (g(1.0) * g(1.0)) - 1.0).sqrt();
            let stream = Stream::named(4, "weibull");
            let values: Vec<f64> = (0..N).map(|i| stream.child(i).weibull(shape)).collect();
            check_values(&values, 1.0, cv);
        }
    }

    #[test]
    fn gamma_has_mean_one_and_the_stated_cv() {
        for cv in [0.5, 1.0, 2.0] {
            let stream = Stream::named(3, "gamma");
            let values: Vec<f64> = (0..N)
                .map(|i| stream.child(i).gamma(1.0 / (cv * cv)))
                .collect();
            check_values(&values, 1.0, cv);
        }
    }

    #[test]
    fn exact_is_exact_and_bounds_cut() {
        let stream = Stream::named(1, "x");
        assert_eq!(stream.sample(&Dist::Exact(42.0)), 42.0);
        let bounds = Bounds {
            min: 90.0,
            max: 110.0,
        };
        let dist = Dist::Normal {
            mean: 100.0,
            cv: 0.5,
            bounds,
        };
        assert!((0..1_000).all(|i| (90.0..=110.0).contains(&stream.child(i).sample(&dist))));
    }

    #[test]
    fn whole_uniform_reaches_both_ends_equally() {
        let stream = Stream::named(1, "die");
        let die = Dist::Uniform { min: 1.0, max: 6.0 };
        let mut counts = [0u32; 7];
        for i in 0..60_000 {
            counts[stream.child(i).sample_whole(&die, 0) as usize] += 1;
        }
        // 10,000 each; the standard deviation is 91, four of them 365.
        assert_eq!(counts[0], 0);
        assert!(
            counts[1..].iter().all(|c| c.abs_diff(10_000) < 365),
            "{counts:?}"
        );
    }

    #[test]
    fn zipf_halves_and_thirds() {
        let table = Table::zipf(3, 1.0); // weights 1, 1/2, 1/3: 6/11, 3/11, 2/11
        assert_eq!(
            [0.0, 0.54, 0.55, 0.81, 0.82, 0.999].map(|u| table.index(u)),
            [0, 0, 1, 1, 2, 2]
        );
    }

    #[test]
    fn streams_with_other_names_or_seeds_differ() {
        let a = Stream::named(1, "isl");
        assert_ne!(a.bits(0), Stream::named(1, "osl").bits(0));
        assert_ne!(a.bits(0), Stream::named(2, "isl").bits(0));
        assert_eq!(a.bits(5), Stream::named(1, "isl").bits(5));
    }
}
