//! `[arrival]`: when sessions begin.

use super::Arrival;
use crate::doc::Table;

#[derive(Clone, Copy, PartialEq)]
enum ArrivalKind {
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

const RATE_MUST: &str = "above 0 and at most 1e9 (one per nanosecond)";

fn is_rate(per_s: f64) -> bool {
    per_s > 0.0 && per_s <= RATE_MAX
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
                concurrency: t.get("concurrency").within(1..).or(1),
            },
            ArrivalKind::Constant => Arrival::Constant {
                rate_per_s: read_rate(t),
            },
            ArrivalKind::Poisson => Arrival::Poisson {
                rate_per_s: read_rate(t),
            },
            ArrivalKind::Gamma => Arrival::Gamma {
                rate_per_s: read_rate(t),
                cv: t
                    .get("cv")
                    .within(0.0..=100.0)
                    .required("set the burstiness: 1 is Poisson, above is burstier", 1.0),
            },
            ArrivalKind::Weibull => Arrival::Weibull {
                rate_per_s: read_rate(t),
                // Below 0.1 the mean converges only after billions of intervals.
                shape: t.get("shape").within(0.1..=100.0).required(
                    "set the shape: below 1 is burstier than Poisson, 1 is Poisson",
                    1.0,
                ),
            },
            ArrivalKind::Ramp => read_ramp(t),
            ArrivalKind::Diurnal => read_diurnal(t),
            ArrivalKind::Timestamps => Arrival::Timestamps {
                ms: t
                    .get::<Vec<f64>>("ms")
                    .check(
                        |ms| !ms.is_empty() && ms[0] >= 0.0 && ms.is_sorted(),
                        "at least one time, none negative, in order",
                    )
                    .required(
                        "list the arrival times, ms: `ms = [0, 120, 250]`",
                        vec![0.0],
                    ),
            },
            ArrivalKind::Trace => Arrival::Trace,
        }
    })
}

fn read_kind(t: &Table<'_>, has_trace: bool) -> ArrivalKind {
    let kind = t.choice("kind", KINDS);
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
    t.get("rate_per_s")
        .check(|r| is_rate(*r), RATE_MUST)
        .required("set the sessions per second: `rate_per_s = 10`", 1.0)
}

fn read_ramp(t: &Table<'_>) -> Arrival {
    Arrival::Ramp {
        from_per_s: t.get("from_per_s").within(0.0..=RATE_MAX).or(0.0),
        to_per_s: t
            .get("to_per_s")
            .check(|r| is_rate(*r), RATE_MUST)
            .required("set the last rate: `to_per_s = 20`", 1.0),
        ramp_s: t
            .get("ramp_s")
            .check(|s| *s > 0.0, "above 0")
            .required("set the duration of the ramp: `ramp_s = 600`", 1.0),
    }
}

fn read_diurnal(t: &Table<'_>) -> Arrival {
    let rate_per_s = read_rate(t);
    let amplitude = t.get("amplitude").within(0.0..=1.0).or(0.5);
    let period_s = t
        .get("period_s")
        .check(|s| *s > 0.0, "above 0")
        .or(86_400.0);
    Arrival::Diurnal {
        rate_per_s,
        amplitude,
        period_s,
        peak_s: t
            .get("peak_s")
            .check(|s: &f64| s.is_finite(), "a time")
            .or(period_s / 2.0),
    }
}
