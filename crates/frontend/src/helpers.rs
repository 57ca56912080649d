//! Threads for work that would keep a shard from its other clients: parsing and tokenizing long prompts.
//!
//! The shortest job goes first, so that a long prompt delays other long prompts only. One thread takes
//! short jobs alone. A job that has waited for a second goes before shorter ones.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Jobs that may wait.
const WAITING_MAX: usize = 1024;
/// Largest job of the thread for short ones, bytes.
const SHORT_BYTES: usize = 128 << 10;
/// A job that has waited for so long is the next one.
const PATIENCE: Duration = Duration::from_secs(1);
/// Lowers the threads' share of a CPU that shards need too: at 5 a thread gets a third of what one at 0
/// gets (`sched_prio_to_weight` in Linux).
const NICE: i32 = 5;

/// The threads. Dropping it ends them after their current jobs.
pub(crate) struct Helpers {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    /// By size in bytes, then in order of arrival.
    waiting: BTreeMap<(usize, u64), Job>,
    arrived: u64,
    closed: bool,
}

struct Job {
    since: Instant,
    run: Box<dyn FnOnce() + Send>,
}

/// Why a job has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// Too many wait.
    Busy,
    /// It panicked, or the server stops.
    Failed,
}

impl Helpers {
    /// Starts `threads` threads for any job, and one for short ones.
    pub(crate) fn start(threads: usize) -> std::io::Result<Arc<Helpers>> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let helpers = Arc::new(Helpers {
            shared: shared.clone(),
        });
        for index in 0..=threads {
            let shared = shared.clone();
            let bytes_max = if index == 0 { SHORT_BYTES } else { usize::MAX };
            std::thread::Builder::new()
                .name(format!("helper-{index}"))
                .spawn(move || {
                    lower_priority();
                    shared.work(bytes_max);
                })?;
        }
        Ok(helpers)
    }

    /// No threads: nothing is handed to them.
    #[cfg(feature = "sim")]
    pub(crate) fn none() -> Arc<Helpers> {
        Arc::new(Helpers {
            shared: Arc::new(Shared {
                queue: Mutex::default(),
                changed: Condvar::new(),
            }),
        })
    }

    /// Runs `job`, which handles so many `bytes`, on one of the threads. A job whose caller has gone before
    /// it begins is not run.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoResult> {
        let (send, result) = oneshot::channel();
        let run = Box::new(move || {
            if !send.is_closed() {
                // Fails if the caller is gone.
                let _ = send.send(job());
            }
        });
        {
            let mut queue = self.shared.queue();
            if queue.waiting.len() >= WAITING_MAX || queue.closed {
                return Err(NoResult::Busy);
            }
            queue.arrived += 1;
            let key = (bytes, queue.arrived);
            let since = Instant::now();
            queue.waiting.insert(key, Job { since, run });
        }
        self.shared.changed.notify_all();
        result.await.map_err(|_| NoResult::Failed)
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.closed = true;
        queue.waiting.clear();
        drop(queue);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, bytes_max: usize) {
        let mut queue = self.queue();
        loop {
            if let Some(job) = queue.take(bytes_max, Instant::now()) {
                drop(queue);
                if catch_unwind(AssertUnwindSafe(job.run)).is_err() {
                    tracing::error!("a job of a helper thread panicked");
                }
                queue = self.queue();
            } else if queue.closed {
                return;
            } else {
                let waited = self.changed.wait(queue);
                queue = waited.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

impl Queue {
    /// The job that is next for a thread that takes jobs of up to `bytes_max` bytes.
    fn take(&mut self, bytes_max: usize, now: Instant) -> Option<Job> {
        let fitting = || self.waiting.range(..=(bytes_max, u64::MAX));
        let shortest = *fitting().next()?.0;
        let longest_waiting = fitting().min_by_key(|(_, job)| job.since);
        let key = match longest_waiting {
            Some((key, job)) if now.duration_since(job.since) >= PATIENCE => *key,
            _ => shortest,
        };
        self.waiting.remove(&key)
    }
}

#[cfg(target_os = "linux")]
fn lower_priority() {
    // Of this thread alone, on Linux. Without it jobs run all the same.
    let _ = rustix::process::nice(NICE);
}

#[cfg(not(target_os = "linux"))]
fn lower_priority() {
    let _ = NICE;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(jobs: &[(usize, u64)]) -> (Queue, Instant) {
        let now = Instant::now();
        let mut queue = Queue::default();
        for (at, &(bytes, waited_ms)) in jobs.iter().enumerate() {
            let since = now.checked_sub(Duration::from_millis(waited_ms));
            let job = Job {
                since: since.expect("the host is up for longer"),
                run: Box::new(|| {}),
            };
            queue.waiting.insert((bytes, at as u64), job);
        }
        (queue, now)
    }

    fn order(jobs: &[(usize, u64)], bytes_max: usize) -> Vec<usize> {
        let (mut queue, now) = queue(jobs);
        let mut order = Vec::new();
        loop {
            let before: Vec<usize> = queue.waiting.keys().map(|key| key.0).collect();
            if queue.take(bytes_max, now).is_none() {
                return order;
            }
            let left: Vec<usize> = queue.waiting.keys().map(|key| key.0).collect();
            order.extend(before.into_iter().filter(|bytes| !left.contains(bytes)));
        }
    }

    #[test]
    fn short_jobs_go_first_unless_one_has_waited_for_long() {
        assert_eq!(order(&[(9, 5), (3, 1), (5, 0)], usize::MAX), [3, 5, 9]);
        assert_eq!(order(&[(9, 1500), (3, 1), (5, 0)], usize::MAX), [9, 3, 5]);
        let long = SHORT_BYTES + 1;
        assert_eq!(order(&[(long, 5000), (7, 0)], SHORT_BYTES), [7]);
    }

    #[test]
    fn a_job_that_panics_fails_alone_and_too_many_are_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let helpers = Helpers::start(1).unwrap();
        runtime.block_on(async {
            let failed: Result<(), _> = helpers.run(1, || panic!("on purpose")).await;
            assert_eq!(failed, Err(NoResult::Failed));
            assert_eq!(helpers.run(1, || 7).await, Ok(7));
            assert_eq!(helpers.run(usize::MAX, || 8).await, Ok(8));
            let (open, gate) = std::sync::mpsc::channel::<()>();
            let gate = Arc::new(Mutex::new(gate));
            let blocked = || {
                let gate = gate.clone();
                helpers.run(1, move || {
                    let _ = gate.lock().unwrap_or_else(PoisonError::into_inner).recv();
                })
            };
            let mut jobs: Vec<_> = (0..WAITING_MAX + 10).map(|_| Box::pin(blocked())).collect();
            let mut busy = 0;
            for job in &mut jobs {
                let polled =
                    std::future::poll_fn(|cx| std::task::Poll::Ready(job.as_mut().poll(cx)));
                if polled.await == std::task::Poll::Ready(Err(NoResult::Busy)) {
                    busy += 1;
                }
            }
            // Two threads may have taken a job each.
            assert!((8..=10).contains(&busy), "{busy}");
            drop(jobs);
            drop(open);
            // Jobs whose callers went are skipped, and make room.
            let mut after = Err(NoResult::Busy);
            while after == Err(NoResult::Busy) {
                after = helpers.run(1, || 9).await;
            }
            assert_eq!(after, Ok(9));
        });
    }
}
