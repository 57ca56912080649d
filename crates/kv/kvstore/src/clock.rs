//! The two clocks that this crate reads. All other modules take `now` as an argument.

use rustix::time::{ClockId, Timespec, clock_gettime};
use slipstream_base::SimTime;

/// Now, in ns of `CLOCK_MONOTONIC`, which all processes of a host share.
pub fn now() -> SimTime {
    SimTime(ns(clock_gettime(ClockId::Monotonic)))
}

/// Now, in ns since 1970: for times that outlive a process.
pub fn unix_ns() -> u64 {
    ns(clock_gettime(ClockId::Realtime))
}

fn ns(time: Timespec) -> u64 {
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}
