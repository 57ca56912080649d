//! `[arrival]`: when sessions begin.

use crate::doc::{Table, choice, optional, required, section, value};

/// Arrivals of sessions. A session is one conversation, and usually one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// Closed loop: a fixed number of concurrent sessions; when one ends, the next begins.
    Closed {
        /// Concurrent sessions, at least 1.
        concurrency: u32,
    },
    /// At constant intervals.
    Constant {
        /// Sessions, 1/s.
        rate_per_s: f64,
    },
    /// At exponential intervals (Poisson).
    Poisson {
        /// Mean sessions, 1/s.
        rate_per_s: f64,
    },
    /// At Gamma-distributed intervals: `cv` above 1 is burstier than Poisson, below 1 smoother.
    Gamma {
        /// Mean sessions, 1/s.
        rate_per_s: f64,
        /// Standard deviation of the intervals over their mean.
        cv: f64,
    },
    /// At Weibull-distributed intervals: `shape` below 1 is burstier than Poisson, 1 is Poisson,
    /// above 1 is smoother.
    Weibull {
        /// Mean sessions, 1/s.
        rate_per_s: f64,
        /// Shape of the distribution.
        shape: f64,
    },
    /// Poisson, at a rate that changes linearly and then stays constant.
    Ramp {
        /// Sessions, 1/s, at the start.
        from_per_s: f64,
        /// Sessions, 1/s, at the end of the ramp and after it; above 0.
        to_per_s: f64,
        /// Duration of the ramp, s, above 0.
        ramp_s: f64,
    },
    /// Poisson, at a rate that follows a cosine.
    Diurnal {
        /// Mean sessions over a period, 1/s.
        rate_per_s: f64,
        /// The rate varies from `rate_per_s · (1 − amplitude)` to `rate_per_s · (1 + amplitude)`.
        amplitude: f64,
        /// Period, s. Default: a day.
        period_s: f64,
        /// Time of the first peak, s. Default: half a period, so that a run begins at the minimum.
        peak_s: f64,
    },
    /// At these times, ms, in order; one session each.
    Timestamps {
        /// Shape `[n]`, not decreasing.
        ms: Vec<f64>,
    },
    /// From the trace.
    Trace,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum ArrivalKind {
    Closed,
    Constant,
    Poisson,
    Gamma,
    Weibull,
    Ramp,
    Diurnal,
    Timestamps,
    Trace,
}

const KINDS: &[(&str, ArrivalKind)] = &[
    ("closed", ArrivalKind::Closed),
    ("constant", ArrivalKind::Constant),
    ("poisson", ArrivalKind::Poisson),
    ("gamma", ArrivalKind::Gamma),
    ("weibull", ArrivalKind::Weibull),
    ("ramp", ArrivalKind::Ramp),
    ("diurnal", ArrivalKind::Diurnal),
    ("timestamps", ArrivalKind::Timestamps),
    ("trace", ArrivalKind::Trace),
];

section! {
    keys ArrivalKeys of "arrival" {
        /// The process of arrivals, above.
        key kind: ArrivalKind = choice(KINDS, ArrivalKind::Closed)
            .with_default_text("required in the table; without it `\"closed\"`, or `\"trace\"` with `[trace]`");
        /// Concurrent sessions. A session keeps its slot during think time.
        ///
        /// High: requests wait in the engines' queues.
        key concurrency: u32 = value(1).at_least(1).unit("sessions");
        /// Mean rate of sessions.
        ///
        /// A session of several turns has as many requests.
        key rate_per_s: f64 = required("set the sessions per second: `rate_per_s = 10`", 1.0)
            .check(|r| is_rate(*r), RATE_MUST).with_description("sessions/s, 1e-8 to 1e9").with_default_text("required");
        /// Standard deviation of the intervals over their mean: above 1 is burstier than Poisson, below 1 smoother.
        key cv: f64 = required("set the burstiness: 1 is Poisson, above is burstier", 1.0)
            .within(0.0..=100.0).with_default_text("required");
        /// Shape of the distribution of intervals: below 1 is burstier than Poisson, 1 is Poisson.
        ///
        /// Below 0.1 the mean would converge only after billions of intervals.
        key shape: f64 = required("set the shape: below 1 is burstier than Poisson, 1 is Poisson", 1.0)
            .within(0.1..=100.0).with_default_text("required");
        /// Rate at the start of a ramp.
        key from_per_s: f64 = value(0.0).within(0.0..=RATE_MAX).unit("sessions/s");
        /// Rate at the end of a ramp, and after it.
        key to_per_s: f64 = required("set the last rate: `to_per_s = 20`", 1.0)
            .check(|r| is_rate(*r), RATE_MUST).with_description("sessions/s, 1e-8 to 1e9").with_default_text("required");
        /// Duration of a ramp.
        key ramp_s: f64 = required("set the duration of the ramp: `ramp_s = 600`", 1.0)
            .check(|s| *s > 0.0, "above 0").with_description("s, above 0").with_default_text("required");
        /// Largest change of the rate over a period, relative to its mean.
        key amplitude: f64 = value(0.5).within(0.0..=1.0);
        /// Length of a period.
        key period_s: f64 = value(86_400.0).check(|s| *s > 0.0, "above 0").with_description("s, above 0");
        /// Time of the first peak. By default a run begins at the minimum.
        key peak_s?: f64 = optional().check(|s: &f64| s.is_finite(), "a time").with_description("s").with_default_text("half of `period_s`");
        /// Times of arrival.
        key ms: Vec<f64> = required("list the arrival times, ms: `ms = [0, 120, 250]`", vec![0.0])
            .check(|ms| are_times(ms), "at least one time, none negative, in order")
            .with_description("list of times, ms, in order").with_default_text("required");
    }
}

fn are_times(ms: &[f64]) -> bool {
    !ms.is_empty() && ms[0] >= 0.0 && ms.is_sorted()
}

/// Keys, the kinds of arrivals that use them, and the error with another kind.
const KEYS: &[(&str, &[ArrivalKind], &str)] = {
    use ArrivalKind as K;
    const RATED: &[ArrivalKind] = &[K::Constant, K::Poisson, K::Gamma, K::Weibull, K::Diurnal];
    const RAMP: &str = "only a ramp has it";
    const DIURNAL: &str = "only diurnal arrivals have it";
    &[
        (
            "concurrency",
            &[K::Closed],
            "only a closed loop has a concurrency",
        ),
        ("rate_per_s", RATED, "this kind of arrival has no rate"),
        ("cv", &[K::Gamma], "only Gamma arrivals have a cv"),
        ("shape", &[K::Weibull], "only Weibull arrivals have a shape"),
        ("from_per_s", &[K::Ramp], RAMP),
        ("to_per_s", &[K::Ramp], RAMP),
        ("ramp_s", &[K::Ramp], RAMP),
        ("amplitude", &[K::Diurnal], DIURNAL),
        ("period_s", &[K::Diurnal], DIURNAL),
        ("peak_s", &[K::Diurnal], DIURNAL),
        (
            "ms",
            &[K::Timestamps],
            "only arrivals from timestamps have them",
        ),
    ]
};

/// Limit of sessions per second: one per nanosecond, the clock's resolution.
pub const RATE_MAX: f64 = 1e9;

/// Lowest rate of sessions per second: one in three years. A lower one has no session within the clock's range.
pub const RATE_MIN: f64 = 1e-8;

const RATE_MUST: &str = "at least 1e-8 (one in three years) and at most 1e9 (one per nanosecond)";

fn is_rate(per_s: f64) -> bool {
    (RATE_MIN..=RATE_MAX).contains(&per_s)
}

pub(super) fn read_arrival(root: &Table<'_>, has_trace: bool) -> Arrival {
    root.table("arrival", |t| {
        let kind = read_kind(t, has_trace);
        for (key, kinds, why) in KEYS {
            if !kinds.contains(&kind) {
                t.unused(key, "kind", why);
            }
        }
        match kind {
            ArrivalKind::Closed => Arrival::Closed {
                concurrency: ArrivalKeys::concurrency().read(t),
            },
            ArrivalKind::Constant => Arrival::Constant {
                rate_per_s: read_rate(t),
            },
            ArrivalKind::Poisson => Arrival::Poisson {
                rate_per_s: read_rate(t),
            },
            ArrivalKind::Gamma => Arrival::Gamma {
                rate_per_s: read_rate(t),
                cv: ArrivalKeys::cv().read(t),
            },
            ArrivalKind::Weibull => Arrival::Weibull {
                rate_per_s: read_rate(t),
                shape: ArrivalKeys::shape().read(t),
            },
            ArrivalKind::Ramp => Arrival::Ramp {
                from_per_s: ArrivalKeys::from_per_s().read(t),
                to_per_s: ArrivalKeys::to_per_s().read(t),
                ramp_s: ArrivalKeys::ramp_s().read(t),
            },
            ArrivalKind::Diurnal => read_diurnal(t),
            ArrivalKind::Timestamps => Arrival::Timestamps {
                ms: ArrivalKeys::ms().read(t),
            },
            ArrivalKind::Trace => Arrival::Trace,
        }
    })
}

fn read_kind(t: &Table<'_>, has_trace: bool) -> ArrivalKind {
    let kind = ArrivalKeys::kind().field(t);
    let kind = if t.is_present() && !has_trace {
        kind.required(
            "set the kind of arrivals: `kind = \"poisson\"`",
            ArrivalKind::Closed,
        )
    } else {
        kind.or(if has_trace {
            ArrivalKind::Trace
        } else {
            ArrivalKind::Closed
        })
    };
    if kind == ArrivalKind::Trace && !has_trace {
        t.error(
            "kind",
            "`arrival.kind` is \"trace\", but there is no `[trace]`",
            "add `[trace]` with its `file`, or choose another kind",
        );
    }
    kind
}

fn read_rate(t: &Table<'_>) -> f64 {
    ArrivalKeys::rate_per_s().read(t)
}

fn read_diurnal(t: &Table<'_>) -> Arrival {
    let rate_per_s = read_rate(t);
    let amplitude = ArrivalKeys::amplitude().read(t);
    let period_s = ArrivalKeys::period_s().read(t);
    Arrival::Diurnal {
        rate_per_s,
        amplitude,
        period_s,
        peak_s: ArrivalKeys::peak_s().field(t).or(period_s / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_says_which_kinds_use_it() {
        let mut used: Vec<&str> = KEYS.iter().map(|(key, ..)| *key).collect();
        used.insert(0, "kind");
        assert_eq!(used, ArrivalKeys::NAMES);
    }
}
