//! Waking a shard on time.

use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use slipstream_planes::clock::{is_simulated, monotonic_ns};
use tokio::time::{Sleep, sleep};

/// Wakes a task at a time of `CLOCK_MONOTONIC`. The runtime's own timers count in milliseconds, as
/// long as a prompt's keys and values may take; Linux's count in nanoseconds.
pub(crate) struct Alarm {
    timer: Option<timer::Timer>,
    /// Without a timer file: the time that is waited for.
    sleep: Option<(u64, Pin<Box<Sleep>>)>,
}

impl Alarm {
    /// An alarm of the runtime at hand.
    pub(crate) fn new() -> Alarm {
        let timer = || {
            timer::Timer::new()
                .inspect_err(|error| {
                    tracing::warn!(%error, "no timer file; waits are as exact as milliseconds");
                })
                .ok()
        };
        Alarm {
            timer: if is_simulated() { None } else { timer() },
            sleep: None,
        }
    }

    /// Returns once the clock says `at_ns`; never for `None`. It may return early.
    pub(crate) async fn wait_until(&mut self, at_ns: Option<u64>) {
        match at_ns {
            Some(at_ns) => poll_fn(|cx| self.poll_until(at_ns, cx)).await,
            None => pending().await,
        }
    }

    /// As [`wait_until`](Self::wait_until).
    pub(crate) fn poll_until(&mut self, at_ns: u64, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(timer) = &mut self.timer {
            match timer.poll_until(at_ns, cx) {
                Poll::Ready(Err(_)) => self.timer = None,
                Poll::Ready(Ok(())) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
        if self.sleep.as_ref().is_none_or(|(at, _)| *at != at_ns) {
            let left = Duration::from_nanos(at_ns.saturating_sub(monotonic_ns()));
            self.sleep = Some((at_ns, Box::pin(sleep(left))));
        }
        let Some((_, sleep)) = &mut self.sleep else {
            return Poll::Ready(());
        };
        std::task::ready!(sleep.as_mut().poll(cx));
        self.sleep = None;
        Poll::Ready(())
    }
}

#[cfg(target_os = "linux")]
mod timer {
    use std::io;
    use std::os::fd::OwnedFd;
    use std::task::{Context, Poll, ready};

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };
    use slipstream_planes::clock::monotonic_ns;
    use tokio::io::unix::AsyncFd;

    /// A timerfd(2), which has no slack.
    pub(super) struct Timer {
        file: AsyncFd<OwnedFd>,
        /// The time that it is set to; 0: it has passed.
        set_ns: u64,
    }

    impl Timer {
        pub(super) fn new() -> io::Result<Timer> {
            let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
            let file = timerfd_create(TimerfdClockId::Monotonic, flags)?;
            #[allow(
                deprecated,
                reason = "an `OwnedFd` is one descriptor from its making to its drop, which is what \
                          the unsafe `register` asks for and this crate may not promise"
            )]
            let file = AsyncFd::new(file)?;
            Ok(Timer { file, set_ns: 0 })
        }

        /// One system call per time. The file is not read: setting it again clears it, and the poller reports
        /// each time once.
        pub(super) fn poll_until(
            &mut self,
            at_ns: u64,
            cx: &mut Context<'_>,
        ) -> Poll<io::Result<()>> {
            // A time of 0 would disarm it.
            let at_ns = at_ns.max(1);
            if self.set_ns != at_ns {
                let zero = Timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                };
                let at = Itimerspec {
                    it_interval: zero,
                    it_value: Timespec {
                        tv_sec: (at_ns / 1_000_000_000).cast_signed(),
                        tv_nsec: (at_ns % 1_000_000_000).cast_signed(),
                    },
                };
                timerfd_settime(&self.file, TimerfdTimerFlags::ABSTIME, &at)?;
                self.set_ns = at_ns;
            }
            loop {
                let mut ready = ready!(self.file.poll_read_ready(cx))?;
                ready.clear_ready();
                // Or it was the readiness of an earlier setting.
                if monotonic_ns() >= at_ns {
                    self.set_ns = 0;
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod timer {
    use std::io;
    use std::task::{Context, Poll};

    /// None here.
    pub(super) struct Timer;

    impl Timer {
        pub(super) fn new() -> io::Result<Timer> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub(super) fn poll_until(&mut self, _: u64, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
