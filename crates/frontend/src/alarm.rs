//! Waking a shard on time.

use std::future::pending;
use std::io;

/// Wakes a task at a time of `CLOCK_MONOTONIC`. The runtime's own timers count in milliseconds, as
/// long as a prompt's keys and values may take; Linux's count in nanoseconds.
pub(crate) struct Alarm(Option<timer::Timer>);

impl Alarm {
    /// An alarm of the runtime at hand.
    pub(crate) fn new() -> Alarm {
        if slipstream_planes::clock::is_simulated() {
            return Alarm(None);
        }
        Alarm(
            timer::Timer::new()
                .inspect_err(|error| {
                    tracing::warn!(%error, "no timer file; waits are as exact as milliseconds");
                })
                .ok(),
        )
    }

    /// Returns once the clock says `at_ns`; never for `None`. It may return early.
    pub(crate) async fn wait_until(&mut self, at_ns: Option<u64>) {
        let Some(at_ns) = at_ns else {
            return pending().await;
        };
        let waited: io::Result<()> = match &mut self.0 {
            Some(timer) => timer.wait_until(at_ns).await,
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        if waited.is_err() {
            let now = slipstream_planes::clock::monotonic_ns();
            let left = std::time::Duration::from_nanos(at_ns.saturating_sub(now));
            tokio::time::sleep(left).await;
        }
    }
}

#[cfg(target_os = "linux")]
mod timer {
    use std::io;
    use std::os::fd::OwnedFd;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use tokio::io::unix::AsyncFd;

    /// A timerfd(2), which has no slack.
    pub(super) struct Timer(AsyncFd<OwnedFd>);

    impl Timer {
        pub(super) fn new() -> io::Result<Timer> {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            let file = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            #[allow(
                deprecated,
                reason = "an `OwnedFd` is one descriptor from its making to its drop, which is what \
                          the unsafe `register` asks for and this crate may not promise"
            )]
            Ok(Timer(AsyncFd::new(file)?))
        }

        pub(super) async fn wait_until(&mut self, at_ns: u64) -> io::Result<()> {
            let zero = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // A time of 0 would disarm it.
            let at_ns = at_ns.max(1);
            let at = Itimerspec {
                it_interval: zero,
                it_value: Timespec {
                    tv_sec: (at_ns / 1_000_000_000).cast_signed(),
                    tv_nsec: (at_ns % 1_000_000_000).cast_signed(),
                },
            };
            timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &at)?;
            loop {
                let mut ready = self.0.readable().await?;
                let mut count = [0; 8];
                match rustix::io::read(&self.0, &mut count) {
                    Ok(_) => return Ok(()),
                    // Readiness of an earlier setting.
                    Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod timer {
    use std::io;

    /// None here.
    pub(super) struct Timer;

    impl Timer {
        pub(super) fn new() -> io::Result<Timer> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub(super) async fn wait_until(&mut self, _at_ns: u64) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_planes::clock::monotonic_ns;

    #[tokio::test]
    async fn an_alarm_is_never_early_and_can_be_set_again() {
        let mut alarm = Alarm::new();
        // Given up before its time, then set to a later one.
        let never = monotonic_ns() + 3_600_000_000_000;
        tokio::select! {
            biased;
            () = alarm.wait_until(Some(never)) => panic!("an hour early"),
            () = tokio::task::yield_now() => {}
        }
        for ahead_ns in [0, 200_000, 2_000_000] {
            let at = monotonic_ns() + ahead_ns;
            alarm.wait_until(Some(at)).await;
            assert!(monotonic_ns() >= at);
        }
        alarm.wait_until(Some(0)).await;
    }
}
