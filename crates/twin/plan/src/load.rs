//! A workload at another load.

use slipstream_base::width;
use slipstream_config::workload_file::{Arrival, Content, Workload};

/// `workload` with `factor` times the load, above 0.
///
/// Generated workloads get `factor` times the sessions per second, and as many more requests, over
/// the same time; think times stay. Traces, and arrivals at given times, are compressed in time: they
/// have no other requests to add. Closed loops get `factor` times the concurrency (at least 1).
pub fn scaled(workload: &Workload, factor: f64) -> Workload {
    let mut scaled = workload.clone();
    if factor == 1.0 {
        return scaled;
    }
    let more = |count: u64| width::round_u64(count as f64 * factor).max(1);
    let generated = matches!(workload.content, Content::Generated(_));
    match &mut scaled.arrival {
        Arrival::Closed { concurrency } => {
            *concurrency = u32::try_from(more(u64::from(*concurrency))).unwrap_or(u32::MAX);
        }
        Arrival::Constant { rate_per_s }
        | Arrival::Poisson { rate_per_s }
        | Arrival::Gamma { rate_per_s, .. }
        | Arrival::Weibull { rate_per_s, .. }
        | Arrival::Diurnal { rate_per_s, .. } => *rate_per_s *= factor,
        Arrival::Ramp {
            from_per_s,
            to_per_s,
            ..
        } => {
            *from_per_s *= factor;
            *to_per_s *= factor;
        }
        Arrival::Timestamps { .. } | Arrival::Trace => {
            scaled.time_scale *= factor;
            scaled.window_s = scaled
                .window_s
                .map(|(from, length)| (from / factor, length / factor));
            return scaled;
        }
    }
    if generated {
        scaled.requests = scaled.requests.map(more);
    }
    scaled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_grow_and_times_shrink() {
        let poisson = Workload {
            requests: Some(100),
            arrival: Arrival::Poisson { rate_per_s: 3.0 },
            window_s: Some((10.0, 5.0)),
            ..Workload::default()
        };
        let twice = scaled(&poisson, 2.0);
        assert_eq!(twice.arrival, Arrival::Poisson { rate_per_s: 6.0 });
        assert_eq!((twice.requests, twice.time_scale), (Some(200), 1.0));
        assert_eq!(twice.window_s, Some((10.0, 5.0)));
        let stamps = Workload {
            arrival: Arrival::Timestamps {
                ms: vec![0.0, 10.0],
            },
            ..poisson
        };
        let twice = scaled(&stamps, 2.0);
        assert_eq!((twice.requests, twice.time_scale), (Some(100), 2.0));
        assert_eq!(twice.window_s, Some((5.0, 2.5)));
        let closed = Workload {
            arrival: Arrival::Closed { concurrency: 4 },
            ..Workload::default()
        };
        let halved = scaled(&closed, 0.1);
        assert_eq!(halved.arrival, Arrival::Closed { concurrency: 1 });
        assert_eq!(scaled(&closed, 1.0), closed);
    }
}
