//! How long a shard works on one thing before the next has its turn.
//!
//! While a task of a shard is polled, all other clients of that shard wait. [`Metered`] measures the CPU
//! time of each poll: time that the kernel gave to other threads does not count. It is never too low, and at
//! most about a millisecond too high. A poll costs two readings of the wall clock. The clock of a thread's CPU time
//! takes a system call, so it is read only after long polls and once per millisecond of work: a shard with a few
//! short polls per step of its engines reads it every fifth step.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use slipstream_planes::clock::monotonic_ns;

use crate::door::metrics::ShardMetrics;

/// Polls that took less time than this are not looked at further, ns.
const LONG_NS: u64 = 200_000;
/// Work after which a reading of the CPU clock is replaced, ns.
const STALE_NS: u64 = 1_000_000;
/// Work between two polls at most, ns: the runtime's own. The rest of that time is sleep.
const BETWEEN_NS: u64 = 200_000;

/// Measures the polls of a shard's tasks.
#[derive(Clone)]
pub(crate) struct Meter {
    metrics: Arc<ShardMetrics>,
    /// When the last poll ended, wall time.
    ended_ns: Rc<Cell<u64>>,
    /// CPU time when it was last read.
    cpu_ns: Rc<Cell<u64>>,
    /// Work since then, ns: no less than its CPU time.
    worked_ns: Rc<Cell<u64>>,
}

impl Meter {
    pub(crate) fn new(metrics: Arc<ShardMetrics>) -> Meter {
        Meter {
            metrics,
            ended_ns: Rc::new(Cell::new(monotonic_ns())),
            cpu_ns: Rc::new(Cell::new(thread_cpu_ns())),
            worked_ns: Rc::default(),
        }
    }

    /// Runs `task` on this thread, and measures it.
    pub(crate) fn spawn(
        &self,
        task: impl Future<Output = ()> + 'static,
    ) -> tokio::task::JoinHandle<()> {
        tokio::task::spawn_local(Metered {
            task: Box::pin(task),
            meter: self.clone(),
        })
    }

    /// A poll that began at `began_ns` has ended.
    #[inline]
    fn on_polled(&self, began_ns: u64) {
        let now = monotonic_ns();
        let took = now.saturating_sub(began_ns);
        let between = began_ns.saturating_sub(self.ended_ns.replace(now));
        let worked = self.worked_ns.get() + took + between.min(BETWEEN_NS);
        self.worked_ns.set(worked);
        if took >= LONG_NS || worked >= STALE_NS {
            self.look(took);
        }
    }

    /// Reads the CPU clock after a poll that took `took_ns`.
    #[cold]
    fn look(&self, took_ns: u64) {
        self.worked_ns.set(0);
        let now = thread_cpu_ns();
        // Of this poll, and of the millisecond before it at most: shorter polls have not been looked at.
        let cpu_ns = now.saturating_sub(self.cpu_ns.replace(now)).min(took_ns);
        if cpu_ns < LONG_NS {
            return;
        }
        self.metrics.polls.long.observe(cpu_ns);
        if cpu_ns > self.metrics.polls.max_ns.get() {
            self.metrics.polls.max_ns.set(cpu_ns);
        }
    }
}

/// CPU time of this thread, ns.
#[cfg(target_os = "linux")]
fn thread_cpu_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Without such a clock, wall time: never too little.
#[cfg(not(target_os = "linux"))]
fn thread_cpu_ns() -> u64 {
    monotonic_ns()
}

struct Metered {
    task: Pin<Box<dyn Future<Output = ()>>>,
    meter: Meter,
}

impl Future for Metered {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let began_ns = monotonic_ns();
        let polled = self.task.as_mut().poll(cx);
        self.meter.on_polled(began_ns);
        polled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_and_sleep_does_not() {
        let metrics = Arc::new(ShardMetrics::new());
        let meter = Meter::new(metrics.clone());
        let local = tokio::task::LocalSet::new();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        local.block_on(&runtime, async {
            let blocked = meter.spawn(async {
                // No CPU time: the thread is parked.
                std::thread::park_timeout(std::time::Duration::from_millis(60));
            });
            blocked.await.unwrap();
            assert!(metrics.polls.max_ns.get() < 40_000_000);
            let busy = meter.spawn(async {
                let began = thread_cpu_ns();
                while thread_cpu_ns() - began < 80_000_000 {
                    std::hint::spin_loop();
                }
            });
            busy.await.unwrap();
        });
        assert!(metrics.polls.max_ns.get() >= 80_000_000);
    }
}
