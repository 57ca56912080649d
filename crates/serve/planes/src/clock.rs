//! The clock of the live path.

/// `CLOCK_MONOTONIC`, ns. One clock for every process of a host, so that the stages of a request
/// that cross processes can be compared.
#[cfg(target_os = "linux")]
#[inline]
pub fn monotonic_ns() -> u64 {
    #[cfg(feature = "sim")]
    if let Some(now) = sim::now() {
        return now;
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Time since the first call, ns: comparable inside this process only.
#[cfg(not(target_os = "linux"))]
pub fn monotonic_ns() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    #[cfg(feature = "sim")]
    if let Some(now) = sim::now() {
        return now;
    }
    // 1 s ahead, because a reading of 0 means "absent" in stage times.
    slipstream_base::width::nanos(ORIGIN.get_or_init(Instant::now).elapsed()) + 1_000_000_000
}

/// Identifies the clock that [`monotonic_ns`] reads. Processes of one host share it until the next
/// boot, and their readings compare. 0 if the system has no id.
pub fn clock_id() -> u64 {
    #[cfg(feature = "sim")]
    if let Some(id) = sim::id() {
        return id;
    }
    // proc_sys_kernel(5): drawn at each boot. Processes in containers read the host's.
    let Ok(boot) = std::fs::read_to_string("/proc/sys/kernel/random/boot_id") else {
        return 0;
    };
    let digits = boot.chars().filter(char::is_ascii_hexdigit).take(16);
    u64::from_str_radix(&digits.collect::<String>(), 16).unwrap_or(0)
}

/// Whether this thread's clock is a simulated one. Never without the feature `sim`.
#[inline]
pub fn is_simulated() -> bool {
    #[cfg(feature = "sim")]
    return sim::now().is_some();
    #[cfg(not(feature = "sim"))]
    false
}

/// The clock of a simulated process (feature `sim`). It is the thread's, so that schedules on several threads
/// do not see each other's.
#[cfg(feature = "sim")]
pub mod sim {
    use std::cell::Cell;

    thread_local! {
        /// The time, ns, and the clock's id.
        static CLOCK: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
    }

    /// From now on the clock `id` reads `now_ns` on this thread; `None`: the system's clock is read.
    pub fn set(clock: Option<(u64, u64)>) {
        CLOCK.set(clock);
    }

    #[inline]
    pub(super) fn now() -> Option<u64> {
        CLOCK.get().map(|(now, _)| now)
    }

    pub(super) fn id() -> Option<u64> {
        CLOCK.get().map(|(_, id)| id)
    }
}

/// Whether readings under `one` and `other` ([`clock_id`]) may be compared.
pub fn same_clock(one: u64, other: u64) -> bool {
    one == other && one != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_one_clock_and_an_unknown_one_is_like_no_other() {
        assert_eq!(clock_id(), clock_id());
        assert!(same_clock(7, 7));
        assert!(!same_clock(7, 8));
        assert!(!same_clock(0, 0));
    }

    #[test]
    fn time_does_not_run_back() {
        let first = monotonic_ns();
        assert!(first > 0);
        assert!(monotonic_ns() >= first);
    }
}
