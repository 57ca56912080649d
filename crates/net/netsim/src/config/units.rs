//! Rates and times of a file.

use slipstream_base::width::round_u64;
use slipstream_config::doc::Table;

use super::ns;

/// Times are simulated in whole ns.
pub(super) const WHOLE_NS: &str = "0 or at least 1e-9 s: times are whole ns";

/// Rates that can be simulated, bit/s, and delays, ns.
pub(super) const RATES: std::ops::RangeInclusive<f64> = 1.0..=1e15;

pub(super) const DELAYS: std::ops::RangeInclusive<f64> = 0.0..=2e9;

/// Whether a time above 0, in ns, would become 0.
pub(super) fn rounds_to_0(ns: f64) -> bool {
    ns > 0.0 && round_u64(ns) == 0
}

/// A rate in bit/s, rounded to a whole number.
pub(super) fn read_rate(t: &Table<'_>, key: &str) -> Option<u64> {
    t.get::<f64>(key)
        .check(|r| RATES.contains(r), "a rate in bit/s from 1 to 1e15")
        .optional()
        .map(round_u64)
}

/// Reads a retransmission timeout in s as ns. One of 0 would retransmit every packet before its answer.
pub(super) fn read_timeout(t: &Table<'_>, key: &str) -> Option<u64> {
    t.get::<f64>(key)
        .check(
            |&s| (1e-6..1e9).contains(&s),
            "from 1e-6 to 1e9 s; without it, the timeout follows from the path",
        )
        .optional()
        .map(ns)
}

/// Reads a duration in s as ns.
pub(super) fn seconds(t: &Table<'_>, key: &str) -> Option<u64> {
    t.get::<f64>(key)
        .check(|&s| (0.0..1e9).contains(&s), "from 0 to 1e9 s")
        .check(|&s| s == 0.0 || ns(s) > 0, WHOLE_NS)
        .optional()
        .map(ns)
}
