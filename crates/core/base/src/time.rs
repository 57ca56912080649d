//! Time as a plain number, so that one engine runs on a wall clock and in a simulation.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use crate::width::round_u64;

/// Nanoseconds since the start of a run (simulated) or since an arbitrary origin (live:
/// `CLOCK_MONOTONIC`). 584 years fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimTime(pub u64);

impl SimTime {
    /// The origin.
    pub const ZERO: SimTime = SimTime(0);
    /// Later than everything; the deadline of something that never happens.
    pub const MAX: SimTime = SimTime(u64::MAX);

    /// `seconds` after the origin, rounded to the nearest ns; negative and NaN give the origin.
    pub fn from_secs_f64(seconds: f64) -> SimTime {
        SimTime(round_u64(seconds * 1e9))
    }

    /// Seconds since the origin.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Nanoseconds from `earlier` to `self`; 0 if `earlier` is later.
    pub fn since(self, earlier: SimTime) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for SimTime {
    type Output = SimTime;
    fn add(self, ns: u64) -> SimTime {
        SimTime(self.0.saturating_add(ns))
    }
}

impl AddAssign<u64> for SimTime {
    fn add_assign(&mut self, ns: u64) {
        *self = *self + ns;
    }
}

impl Sub<SimTime> for SimTime {
    type Output = Duration;
    fn sub(self, earlier: SimTime) -> Duration {
        Duration::from_nanos(self.since(earlier))
    }
}

impl fmt::Display for SimTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.6}s", self.as_secs_f64())
    }
}
