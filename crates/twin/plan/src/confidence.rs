//! How sure an answer is: intervals over seeds or parts of a run, and the error of step times.

use slipstream_config::cluster::EngineConfig;
use slipstream_config::preset::ModelShape;
use slipstream_engine::timing;
use slipstream_perf::{Deployment, Distance, Profile, predict};

/// A mean with the half width of its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// Half the width; 0 if every value is equal, infinite for one value.
    pub half: f64,
    /// Values that it comes from.
    pub count: usize,
}

/// Student's t at 97.5 %, for 1 to 30 degrees of freedom; beyond them the normal distribution's.
const T_975: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
];

fn t_975(freedom: usize) -> f64 {
    let at = freedom.checked_sub(1);
    at.map_or(f64::INFINITY, |at| T_975.get(at).copied().unwrap_or(1.96))
}

/// The 95 % interval of the mean of independent values, such as those of seeds.
pub fn interval(values: &[f64]) -> Interval {
    let count = values.len();
    let mean = values.iter().sum::<f64>() / count.max(1) as f64;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let freedom = count.saturating_sub(1);
    let half = if freedom == 0 {
        f64::INFINITY
    } else {
        t_975(freedom) * (squares / freedom as f64 / count as f64).sqrt()
    };
    Interval { mean, half, count }
}

/// A share of requests with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Hits over requests.
    pub mean: f64,
    /// Lower end, above 0 unless nothing was hit.
    pub low: f64,
    /// Upper end, below 1 unless everything was hit.
    pub high: f64,
    /// Seeds or parts that it comes from.
    pub count: usize,
}

/// The 95 % interval of a share from clusters of requests, such as seeds or consecutive parts of one
/// run, each with its count of all and of hits. `None` for fewer than two clusters.
///
/// Requests of one cluster fail together, so they count as fewer: as their number over Kish's design
/// effect, the variance of the ratio estimate (Cochran, Sampling Techniques, 6.3) over that of as many
/// independent requests. It is taken as at least 1, so equal clusters do not make the interval narrower
/// than independent requests would. The interval is Wilson's score interval, which has a width without
/// misses, with Student's t for the number of clusters.
pub fn share(clusters: &[(u64, u64)]) -> Option<Share> {
    let clusters: Vec<(f64, f64)> = clusters
        .iter()
        .filter(|cluster| cluster.0 > 0)
        .map(|&(all, hits)| (all as f64, hits as f64))
        .collect();
    let freedom = clusters.len().checked_sub(2)? + 1;
    let count = clusters.len() as f64;
    let (all, hits) = clusters
        .iter()
        .fold((0.0, 0.0), |sum, each| (sum.0 + each.0, sum.1 + each.1));
    let mean = hits / all;
    let residuals: f64 = clusters.iter().map(|(n, h)| (h - mean * n).powi(2)).sum();
    let variance = residuals / freedom as f64 * count / (all * all);
    let independent = mean * (1.0 - mean) / all;
    let effect = if independent > 0.0 {
        (variance / independent).max(1.0)
    } else {
        1.0
    };
    let [low, high] = wilson(mean, all / effect, t_975(freedom));
    Some(Share {
        mean,
        low,
        high,
        count: clusters.len(),
    })
}

/// Wilson's score interval of a share `p` of `n` independent requests, with the quantile `z`.
///
/// Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, Journal of
/// the American Statistical Association 22 (1927).
fn wilson(p: f64, n: f64, z: f64) -> [f64; 2] {
    let square = z * z / n;
    let center = p + square / 2.0;
    let half = z * (p * (1.0 - p) / n + square / n / 4.0).sqrt();
    let end = |value: f64| (value / (1.0 + square)).clamp(0.0, 1.0);
    // Without misses the upper end is 1, and not nearly so by rounding.
    [
        if p <= 0.0 { 0.0 } else { end(center - half) },
        if p >= 1.0 { 1.0 } else { end(center + half) },
    ]
}

/// Expected error of step times: 80 % of measured deployments fall between `low` and `high` of the
/// predicted time per output token.
#[derive(Clone, Debug, PartialEq)]
pub struct StepError {
    /// Measured over predicted, lower end: 0.9 is 10 % faster.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// How far the deployment is from measured ones (docs/accuracy.md): `no`, `combination`, …
    pub distance: String,
}

/// The error of step times of a worker of `engine`, from its profile: at `isl` and `osl` tokens per request, and
/// `running` sequences per rank. `None` if its step times have no profile, or the profile cannot express it.
pub fn step_error(
    model: &ModelShape,
    engine: &EngineConfig,
    profile: &Profile,
    isl: f64,
    osl: f64,
    running: f64,
) -> Option<StepError> {
    let deployment = Deployment {
        isl: isl.max(1.0),
        osl: osl.max(1.0),
        batch: running.max(1.0),
        ..timing::deployment(engine, model)?
    };
    let estimate = predict(&deployment, profile).ok()?;
    let distances: Vec<&str> = estimate
        .distances
        .iter()
        .map(|distance| match distance {
            Distance::Near => "no",
            other => other.name(),
        })
        .collect();
    Some(StepError {
        low: estimate.tpot_low_ms / estimate.tpot_ms,
        high: estimate.tpot_high_ms / estimate.tpot_ms,
        distance: distances.join("; "),
    })
}

#[cfg(test)]
mod tests {
    use slipstream_config::cluster::{Dtype, Framework, TimingConfig};
    use slipstream_config::preset;

    use super::*;

    #[test]
    fn intervals_are_students() {
        // 5 values, s = 1.5811, t(4) = 2.776: 2.776 x 1.5811 / sqrt(5) = 1.9629.
        let i = interval(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!((i.mean, i.count), (3.0, 5));
        assert!((i.half - 1.9629).abs() < 1e-3, "{i:?}");
        assert_eq!(interval(&[0.5]).half, f64::INFINITY);
        assert_eq!(interval(&[0.5, 0.5, 0.5]).half, 0.0);
    }

    /// Figures of R. G. Newcombe, Two-sided confidence intervals for the single proportion, Statistics in
    /// Medicine 17 (1998), table I, method 3.
    #[test]
    fn score_intervals_are_those_published() {
        for (hits, all, low, high) in [
            (81.0, 263.0, 0.2553, 0.3662),
            (15.0, 148.0, 0.0624, 0.1605),
            (0.0, 20.0, 0.0, 0.1611),
            (1.0, 29.0, 0.0061, 0.1718),
        ] {
            let found = wilson(hits / all, all, 1.959_964);
            assert!((found[0] - low).abs() < 5e-5, "{hits} of {all}: {found:?}");
            assert!((found[1] - high).abs() < 5e-5, "{hits} of {all}: {found:?}");
            // Misses instead of hits: the mirror image.
            let other = wilson(1.0 - hits / all, all, 1.959_964);
            assert!((other[0] - (1.0 - found[1])).abs() < 1e-12);
        }
    }

    #[test]
    fn no_miss_among_few_requests_is_not_certain() {
        // n / (n + t²), with t(19) = 2.093 and t(2) = 4.303.
        let run = share(&[(12, 12); 20]).unwrap();
        assert_eq!((run.mean, run.high, run.count), (1.0, 1.0, 20));
        assert!((run.low - 240.0 / (240.0 + 2.093f64.powi(2))).abs() < 1e-9);
        let seeds = share(&[(80, 80); 3]).unwrap();
        assert!((seeds.low - 240.0 / (240.0 + 4.303f64.powi(2))).abs() < 1e-9);
        let nothing = share(&[(80, 0); 3]).unwrap();
        assert_eq!((nothing.mean, nothing.low), (0.0, 0.0));
        assert!((nothing.high - (1.0 - seeds.low)).abs() < 1e-9);
    }

    #[test]
    fn parts_that_fail_together_widen_the_interval() {
        // Ten equal parts are no more certain than 1,000 independent requests.
        let even = share(&[(100, 98); 10]).unwrap();
        let expected = wilson(0.98, 1000.0, 2.262);
        assert!((even.low - expected[0]).abs() < 1e-9, "{even:?}");
        assert!((even.high - expected[1]).abs() < 1e-9, "{even:?}");
        let mut parts = [(100, 100); 10];
        parts[3] = (100, 80);
        let burst = share(&parts).unwrap();
        assert_eq!(burst.mean, 0.98);
        // Residuals of 18 and nine times 2: a variance of (18² + 9 x 2²) / 9 x 10 / 1000² = 4e-4, over
        // 0.98 x 0.02 / 1000: 20.4 times that of independent requests, so they count as 49.
        let expected = wilson(0.98, 49.0, 2.262);
        assert!((burst.low - expected[0]).abs() < 1e-9, "{burst:?}");
        assert!((burst.high - expected[1]).abs() < 1e-9, "{burst:?}");
        assert!(burst.low < 0.90 && burst.high > 0.99, "{burst:?}");
        assert_eq!(share(&[(0, 0), (7, 7)]), None);
        assert_eq!(share(&[]), None);
    }

    #[test]
    fn known_deployments_have_narrower_bands() {
        let model = preset::model("llama-3.1-70b").unwrap();
        let error = |gpu: &str, tensor_parallel| {
            let engine = EngineConfig {
                tensor_parallel_size: tensor_parallel,
                timing: TimingConfig::Calibrated {
                    gpu: preset::gpu(gpu).unwrap().clone(),
                    dtype: Dtype::Fp8,
                    framework: Framework::Vllm,
                    profile: None,
                },
                ..EngineConfig::default()
            };
            step_error(model, &engine, Profile::built_in(), 1024.0, 1024.0, 32.0)
        };
        let known = error("h100-sxm", 4).unwrap();
        let unknown = error("l40s", 8).unwrap();
        assert!(known.low < 1.0 && known.high > 1.0, "{known:?}");
        assert!(unknown.high - unknown.low > known.high - known.low);
        assert_eq!(unknown.distance, "gpu");
        let constant = EngineConfig {
            timing: TimingConfig::Constant { step_ns: 1 },
            ..EngineConfig::default()
        };
        let none = step_error(model, &constant, Profile::built_in(), 1.0, 1.0, 1.0);
        assert_eq!(none, None);
    }
}
