//! Waits for a time of `CLOCK_MONOTONIC`, to the microsecond if the system allows it.
//!
//! Tokio's timers count in milliseconds, which would send each request of an open loop up to a
//! millisecond late. On Linux this module uses a timerfd instead.

#[cfg(target_os = "linux")]
mod imp {
    use std::os::fd::OwnedFd;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use slipstream_base::width;
    use tokio::io::unix::AsyncFd;

    /// One reusable alarm.
    #[derive(Debug)]
    pub(crate) struct Alarm(AsyncFd<OwnedFd>);

    impl Alarm {
        pub(crate) fn new() -> std::io::Result<Alarm> {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            // Deprecated for types that may hand out a closed descriptor; an `OwnedFd` cannot, and
            // the call that replaces it is unsafe.
            #[allow(deprecated)]
            Ok(Alarm(AsyncFd::new(fd)?))
        }

        /// Returns when the clock reaches `at_ns`, immediately if it already has.
        pub(crate) async fn wait_until(&mut self, at_ns: u64) -> std::io::Result<()> {
            let spec = Itimerspec {
                it_interval: Timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                },
                // 0 would disarm the timer.
                it_value: Timespec {
                    tv_sec: width::to_i64(at_ns / 1_000_000_000),
                    tv_nsec: width::to_i64((at_ns % 1_000_000_000).max(1)),
                },
            };
            timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::ABSTIME, &spec)?;
            loop {
                let mut ready = self.0.readable().await?;
                let mut count = [0u8; 8];
                // Reading resets it. If it is not ready (the alarm was set again), keep waiting.
                match rustix::io::read(self.0.get_ref(), &mut count) {
                    Ok(_) => return Ok(()),
                    Err(rustix::io::Errno::AGAIN) => ready.clear_ready(),
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod imp {
    use std::time::Duration;

    /// One alarm with tokio's resolution, 1 ms.
    #[derive(Debug)]
    pub(crate) struct Alarm;

    impl Alarm {
        pub(crate) fn new() -> std::io::Result<Alarm> {
            Ok(Alarm)
        }

        pub(crate) async fn wait_until(&mut self, at_ns: u64) -> std::io::Result<()> {
            let left = at_ns.saturating_sub(slipstream_os::process::monotonic_ns());
            tokio::time::sleep(Duration::from_nanos(left)).await;
            Ok(())
        }
    }
}

pub(crate) use imp::Alarm;
