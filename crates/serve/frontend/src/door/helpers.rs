//! Threads for work that would keep a shard from its other clients: parsing and tokenizing long prompts.
//!
//! A job is due once it has waited for as long as it may itself take, and the one that is due first goes first. So a
//! short prompt passes long ones, prompts of about one length go in order of arrival, and shorter ones that keep
//! coming delay a long one by no more than that time and the jobs that were due before it. One thread takes short
//! jobs alone.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use slipstream_base::sync::{lock, unpoisoned};
use tokio::sync::oneshot;

/// Jobs that may wait.
const WAITING_MAX: usize = 1024;
/// Largest job of the thread for short ones, bytes.
const SHORT_BYTES: usize = 128 << 10;
/// Time that a job may wait while shorter ones pass it, per byte: what a slow tokenizer takes for it.
const PATIENCE_PER_BYTE: Duration = Duration::from_micros(1);
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
    /// Up to [`SHORT_BYTES`], as they are due, then in order of arrival.
    short: BTreeMap<(Instant, u64), Job>,
    long: BTreeMap<(Instant, u64), Job>,
    arrived: u64,
    closed: bool,
}

type Job = Box<dyn FnOnce() + Send>;

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
            let takes_long = index > 0;
            std::thread::Builder::new()
                .name(format!("helper-{index}"))
                .spawn(move || {
                    lower_priority();
                    shared.work(takes_long);
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
            if queue.short.len() + queue.long.len() >= WAITING_MAX || queue.closed {
                return Err(NoResult::Busy);
            }
            queue.put(bytes, run, Instant::now());
        }
        self.shared.changed.notify_all();
        result.await.map_err(|_| NoResult::Failed)
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        let mut queue = self.shared.queue();
        queue.closed = true;
        queue.short.clear();
        queue.long.clear();
        drop(queue);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    fn work(&self, takes_long: bool) {
        let mut queue = self.queue();
        loop {
            if let Some(job) = queue.take(takes_long) {
                drop(queue);
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!("a job of a helper thread panicked");
                }
                queue = self.queue();
            } else if queue.closed {
                return;
            } else {
                let waited = self.changed.wait(queue);
                queue = unpoisoned(waited);
            }
        }
    }
}

impl Queue {
    fn put(&mut self, bytes: usize, job: Job, now: Instant) {
        self.arrived += 1;
        // Bodies have at most 4 GiB.
        let patience = PATIENCE_PER_BYTE * u32::try_from(bytes).unwrap_or(u32::MAX);
        let jobs = if bytes <= SHORT_BYTES {
            &mut self.short
        } else {
            &mut self.long
        };
        jobs.insert((now + patience, self.arrived), job);
    }

    /// The next job for a thread that takes short ones, and long ones if `takes_long`.
    fn take(&mut self, takes_long: bool) -> Option<Job> {
        let due = |jobs: &BTreeMap<(Instant, u64), Job>| jobs.keys().next().copied();
        let jobs = match (due(&self.short), due(&self.long)) {
            (Some(short), Some(long)) if takes_long && long < short => &mut self.long,
            (None, _) if takes_long => &mut self.long,
            _ => &mut self.short,
        };
        jobs.pop_first().map(|(_, job)| job)
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

    /// Sizes of `jobs`, given with the ms at which they arrive, in the order in which a thread takes them.
    fn order(jobs: &[(usize, u64)], takes_long: bool) -> Vec<usize> {
        let start = Instant::now();
        let taken = Arc::new(Mutex::new(Vec::new()));
        let mut queue = Queue::default();
        for &(bytes, at_ms) in jobs {
            let taken = taken.clone();
            let job = Box::new(move || taken.lock().unwrap().push(bytes));
            queue.put(bytes, job, start + Duration::from_millis(at_ms));
        }
        while let Some(job) = queue.take(takes_long) {
            job();
        }
        taken.lock().unwrap().clone()
    }

    #[test]
    fn short_jobs_pass_long_ones_for_as_long_as_those_may_take() {
        assert_eq!(order(&[(900_000, 0), (3_000, 5)], true), [3_000, 900_000]);
        assert_eq!(order(&[(900_000, 0), (3_000, 900)], true), [900_000, 3_000]);
        let long = SHORT_BYTES + 1;
        assert_eq!(order(&[(long, 0), (7, 5_000)], false), [7]);
        assert_eq!(order(&[(long, 0)], true), [long]);
    }

    #[test]
    fn jobs_of_about_one_size_go_in_order_of_arrival() {
        // As prompts of a load test: 1 % apart.
        let jobs: Vec<_> = (0..20).map(|at| (1_300 - at, at as u64)).collect();
        let sizes: Vec<_> = jobs.iter().map(|job| job.0).collect();
        assert_eq!(order(&jobs, true), sizes);
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
                    let _ = lock(&gate).recv();
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
