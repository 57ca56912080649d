//! Distributions of flow sizes.

use slipstream_base::mix;
use slipstream_base::width::round_u64;

/// Sizes by cumulative probability, linear between the points.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// Bytes, and the probability of at most that size, both rising; the last is 1.
    points: Vec<(f64, f64)>,
}

/// Web search: the measurements of Alizadeh et al., "Data center TCP (DCTCP)", SIGCOMM 2010,
/// Figure 4, at the points used by Li et al., "HPCC: high precision congestion control", SIGCOMM
/// 2019, section 5.1. Bytes, percent.
const WEB_SEARCH: &[(f64, f64)] = &[
    (0.0, 0.0),
    (10e3, 15.0),
    (20e3, 20.0),
    (30e3, 30.0),
    (50e3, 40.0),
    (80e3, 53.0),
    (200e3, 60.0),
    (1e6, 70.0),
    (2e6, 80.0),
    (5e6, 90.0),
    (10e6, 97.0),
    (30e6, 100.0),
];

/// Hadoop: the measurements of Roy et al., "Inside the social network's (datacenter) network",
/// SIGCOMM 2015, Figure 6, at the points used by Li et al. 2019, section 5.1. Bytes, percent.
const HADOOP: &[(f64, f64)] = &[
    (0.0, 0.0),
    (100.0, 1.0),
    (200.0, 2.0),
    (300.0, 5.0),
    (350.0, 15.0),
    (400.0, 20.0),
    (500.0, 30.0),
    (600.0, 40.0),
    (700.0, 50.0),
    (1e3, 60.0),
    (2e3, 67.0),
    (7e3, 70.0),
    (30e3, 72.0),
    (50e3, 82.0),
    (80e3, 87.0),
    (120e3, 90.0),
    (300e3, 95.0),
    (1e6, 97.5),
    (2e6, 99.0),
    (10e6, 100.0),
];

impl Sizes {
    /// Creates a distribution from points (bytes, cumulative probability); the last probability is
    /// 1 or 100 (percent).
    ///
    /// # Errors
    /// If there are fewer than two points, they do not rise, or do not end at 1 or 100.
    pub fn new(points: &[(f64, f64)]) -> Result<Self, String> {
        let Some(&(_, top)) = points.last().filter(|_| points.len() >= 2) else {
            return Err("a distribution of sizes needs at least two points".into());
        };
        if top != 1.0 && top != 100.0 {
            return Err(format!(
                "the last probability is {top}; a distribution must end at 1, or at 100 for percent"
            ));
        }
        for (i, pair) in points.windows(2).enumerate() {
            let [(a, p), (b, q)] = [pair[0], pair[1]];
            if !(a <= b && p <= q && a >= 0.0 && p >= 0.0 && b <= 1e15) {
                return Err(format!(
                    "points {i} ({a}, {p}) and {} ({b}, {q}) do not rise, or are not sizes",
                    i + 1
                ));
            }
        }
        Ok(Sizes {
            points: points.iter().map(|&(b, p)| (b, p / top)).collect(),
        })
    }

    /// A distribution from the literature, by name.
    pub fn named(name: &str) -> Option<Self> {
        let points = match name {
            "WebSearch" => WEB_SEARCH,
            "Hadoop" => HADOOP,
            _ => return None,
        };
        Some(Sizes::new(points).expect("the tables rise to 100"))
    }

    /// Reads CSV: lines of bytes and cumulative probability; a header line is skipped.
    ///
    /// # Errors
    /// As for [`Sizes::new`], and for lines that are not two numbers.
    pub fn from_csv(text: &str) -> Result<Self, String> {
        let mut points = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split([',', ';', '\t', ' ']).filter(|w| !w.is_empty());
            let pair = (
                words.next().and_then(|w| w.parse::<f64>().ok()),
                words.next().and_then(|w| w.parse::<f64>().ok()),
                words.next(),
            );
            match pair {
                (Some(bytes), Some(p), None) => points.push((bytes, p)),
                _ if points.is_empty() && i == 0 => {}
                _ => {
                    return Err(format!(
                        "line {}: `{line}` is not bytes and a cumulative probability",
                        i + 1
                    ));
                }
            }
        }
        Sizes::new(&points)
    }

    /// The points as TOML.
    pub(crate) fn to_toml(&self) -> String {
        let points = self.points.iter().map(|(b, p)| format!("[{b:?}, {p:?}]"));
        format!("[{}]", points.collect::<Vec<_>>().join(", "))
    }

    /// The size below which a share `u` of the flows are, bytes; at least 1.
    pub fn quantile(&self, u: f64) -> u64 {
        let at = self.points.partition_point(|p| p.1 <= u);
        let bytes = match (
            at.checked_sub(1).map(|i| self.points[i]),
            self.points.get(at),
        ) {
            (Some((a, p)), Some(&(b, q))) => a + (b - a) * (u - p) / (q - p),
            (None, Some(&(b, _))) => b,
            (Some((a, _)), None) => a,
            (None, None) => 1.0,
        };
        round_u64(bytes).max(1)
    }

    /// Sample number `index` of the stream `seed`.
    pub(crate) fn sample(&self, seed: u64, index: u64) -> u64 {
        self.quantile(mix::unit(mix::draw(seed, index)))
    }

    /// Mean, bytes.
    pub fn mean(&self) -> f64 {
        let first = self.points[0];
        let below = first.0 * first.1;
        let rest = self.points.windows(2);
        below
            + rest
                .map(|w| f64::midpoint(w[0].0, w[1].0) * (w[1].1 - w[0].1))
                .sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_mean_by_hand() {
        // Half at 1,000 bytes, the rest uniform up to 3,000.
        let sizes = Sizes::new(&[(1000.0, 0.5), (3000.0, 1.0)]).unwrap();
        assert_eq!(sizes.quantile(0.0), 1000);
        assert_eq!(sizes.quantile(0.49), 1000);
        assert_eq!(sizes.quantile(0.75), 2000);
        assert_eq!(sizes.quantile(0.999_999), 3000);
        assert!((sizes.mean() - 1500.0).abs() < 1e-9);
        let mean = (0..20_000).map(|i| sizes.sample(9, i) as f64).sum::<f64>() / 20_000.0;
        // Standard deviation 645: four standard errors of the mean are 18.
        assert!((mean - 1500.0).abs() < 20.0, "{mean}");
    }

    #[test]
    fn means_of_the_tables_by_hand() {
        // Each segment's probability times its midpoint, summed up.
        let mean = |name| Sizes::named(name).unwrap().mean();
        assert!((mean("WebSearch") - 1_711_250.0).abs() < 1e-6);
        assert!((mean("Hadoop") - 120_420.75).abs() < 1e-6);
    }

    #[test]
    fn csv_in_shares_or_percent() {
        let a = Sizes::from_csv("bytes,cdf\n100,0\n\n# half\n200, 0.5\n400,1\n").unwrap();
        let b = Sizes::from_csv("100 0\n200 50\n400 100\n").unwrap();
        assert_eq!(a, b);
        for (text, part) in [
            ("", "two points"),
            ("1,0\n2,0.9", "must end at 1"),
            ("5,0\n2,1", "do not rise"),
            ("1,0\nx,1", "line 2"),
            ("1,0\n2,1,3", "line 2"),
        ] {
            assert!(Sizes::from_csv(text).unwrap_err().contains(part), "{text}");
        }
    }
}
