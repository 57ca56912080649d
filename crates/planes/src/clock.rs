//! The clock of the live path.

/// `CLOCK_MONOTONIC`, ns. One clock for every process of a host, so that the stages of a request
/// that cross processes can be compared.
#[cfg(target_os = "linux")]
#[inline]
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Time since the first call, ns: comparable inside this process only.
#[cfg(not(target_os = "linux"))]
pub fn monotonic_ns() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    // 1 s ahead, as a reading of 0 means "absent" in stage times.
    ORIGIN.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1_000_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_does_not_run_back() {
        let first = monotonic_ns();
        assert!(first > 0);
        assert!(monotonic_ns() >= first);
    }
}
