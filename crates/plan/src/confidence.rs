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

/// The 95 % interval of a share from consecutive parts of one run, each with its count of all and of
/// hits: batch means, as a ratio estimate. Requests that are close in time fail together, so an
/// interval that takes them as independent would be too narrow.
pub fn of_parts(parts: &[(u64, u64)]) -> Interval {
    let parts: Vec<(f64, f64)> = parts
        .iter()
        .filter(|part| part.0 > 0)
        .map(|&(all, hits)| (all as f64, hits as f64))
        .collect();
    let count = parts.len();
    let (all, hits) = parts
        .iter()
        .fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
    let mean = if all > 0.0 { hits / all } else { 0.0 };
    let freedom = count.saturating_sub(1);
    let half = if freedom == 0 {
        f64::INFINITY
    } else {
        // Residuals of the ratio estimator (Cochran, Sampling Techniques, 6.3).
        let residuals: f64 = parts.iter().map(|(n, h)| (h - mean * n).powi(2)).sum();
        let average = all / count as f64;
        t_975(freedom) * (residuals / freedom as f64 / count as f64).sqrt() / average
    };
    Interval { mean, half, count }
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

    #[test]
    fn parts_that_fail_together_widen_the_interval() {
        let even = of_parts(&[(100, 98); 10]);
        assert_eq!((even.mean, even.half), (0.98, 0.0));
        let mut parts = [(100, 100); 10];
        parts[3] = (100, 80);
        let burst = of_parts(&parts);
        assert_eq!(burst.mean, 0.98);
        // As independent requests: 1.96 x sqrt(0.98 x 0.02 / 1000) = 0.0087. In one part: 0.045.
        assert!(burst.half > 0.04 && burst.half < 0.05, "{burst:?}");
        assert_eq!(of_parts(&[(0, 0), (7, 7)]).half, f64::INFINITY);
        assert_eq!(of_parts(&[]).mean, 0.0);
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
