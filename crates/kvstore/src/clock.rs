//! The two clocks that this crate reads. Everything below takes `now` as an argument.

use rustix::time::{ClockId, Timespec, clock_gettime};
use slipstream_base::SimTime;

/// Now, in ns of `CLOCK_MONOTONIC`: one clock for all processes of a host.
pub fn now() -> SimTime {
    SimTime(ns(clock_gettime(ClockId::Monotonic)))
}

/// Now, in ns since 1970: for what outlives a process.
pub fn unix_ns() -> u64 {
    ns(clock_gettime(ClockId::Realtime))
}

fn ns(time: Timespec) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
