//! A set of workers in this process.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use slipstream_base::width::to_u16;
use slipstream_base::{RankId, WorkerId};
use slipstream_planes::bell::ThreadBell;
use slipstream_planes::ring::thread_of;
use slipstream_planes::{EventSink, ThreadPort};

use crate::backend::Backend;
use crate::stats::{RankStats, ThreadStats};
use crate::thread::{EngineThread, RankSeed};

/// A worker to run.
pub struct WorkerSpec {
    /// Its id.
    pub worker: WorkerId,
    /// Its data-parallel ranks, by rank; at least one.
    pub ranks: Vec<Box<dyn Backend>>,
    /// Modelled time until it accepts requests, s.
    pub startup_s: f64,
}

/// How modelled time passes.
#[derive(Clone, Debug)]
pub struct LiveTiming {
    /// Divides modelled time; 0: no waits. Default 1.
    pub speedup: f64,
    /// Maximum waiting sequences of a rank; more are refused as busy. Default 65,536.
    pub waiting_max: u32,
    /// Deliver a pass whose end has passed without arming a timer. Off only to measure the
    /// benefit. Default on.
    pub fast_path: bool,
}

impl Default for LiveTiming {
    fn default() -> Self {
        LiveTiming {
            speedup: 1.0,
            waiting_max: 65_536,
            fast_path: true,
        }
    }
}

/// Why a set of workers could not be started. No thread runs after such an error.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The speedup is negative or not a number.
    #[error("speedup is {0}; give a number of 0 or more (0: do not wait at all)")]
    Speedup(f64),
    /// The start-up time is invalid.
    #[error("worker {worker} starts up for {startup_s} s; give 0 or more")]
    Startup {
        /// The worker.
        worker: WorkerId,
        /// The given value.
        startup_s: f64,
    },
    /// A worker without an engine.
    #[error("worker {worker} has no ranks; set `engine.data_parallel_size` to 1 or more")]
    NoRanks {
        /// The worker.
        worker: WorkerId,
    },
    /// Two workers with one id.
    #[error("two workers are called {worker}")]
    Duplicate {
        /// The id.
        worker: WorkerId,
    },
    /// The numbers of sinks and threads differ.
    #[error("{threads} engine threads have {sinks} event sinks; give one each")]
    Sinks {
        /// Threads.
        threads: usize,
        /// Sinks.
        sinks: usize,
    },
    /// A thread could not be created.
    #[error("cannot start an engine thread")]
    Thread(#[from] io::Error),
}

/// An engine thread died of a broken invariant. Its workers' streams are lost; the shards know.
#[derive(Debug, thiserror::Error)]
#[error("engine thread {thread} died: {message}")]
pub struct JoinError {
    /// The thread.
    pub thread: usize,
    /// Its panic message.
    pub message: String,
}

/// Maximum workers per engine thread before another one is started.
///
/// A pass of 256 sequences takes a thread about 10 µs, and on a real GPU 10 ms or more, so eight
/// workers keep it busy for 1 % of the time. An additional thread costs wake-ups and smaller frames: with
/// three threads instead of one, eight workers at speed-up 1e6 took 13 to 22 % more CPU per request
/// and answered 8 to 17 % fewer.
const WORKERS_PER_THREAD: usize = 8;

/// Engine threads to run: as configured, or, for 0, one per eight workers, with one core left
/// to the shards; never more than there are workers, and at least one.
pub fn engine_threads(configured: u32, cores: usize, workers: usize) -> usize {
    let wanted = match configured {
        0 => workers
            .div_ceil(WORKERS_PER_THREAD)
            .min(cores.saturating_sub(1)),
        threads => threads as usize,
    };
    wanted.min(workers).max(1)
}

/// Called with each worker that has become ready (true), or whose engine has died (false).
pub(crate) type OnReady = Arc<dyn Fn(WorkerId, bool) + Send + Sync>;

/// State shared by a thread and its handle.
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// One of the other flags was set, or a rank's `resync`.
    pub(crate) attention: AtomicBool,
    pub(crate) stop: AtomicBool,
}

/// Running workers. Dropping it stops them and waits for their threads, as
/// [`WorkerSet::shutdown`] does.
pub struct WorkerSet {
    threads: Vec<RunningThread>,
    ranks: Vec<Arc<RankStats>>,
}

struct RunningThread {
    attention: Attention,
    stats: Arc<ThreadStats>,
    join: Option<JoinHandle<()>>,
}

/// Requests snapshots of ranks' caches; see [`WorkerSet::resyncs`].
#[derive(Clone, Debug, Default)]
pub struct Resyncs {
    ranks: Vec<Arc<RankStats>>,
    threads: Vec<Attention>,
}

impl Resyncs {
    /// Requests `rank` to publish every block that it holds. False if there is no such rank.
    pub fn resync(&self, rank: RankId) -> bool {
        let Some(stats) = self.ranks.iter().find(|stats| stats.rank == rank) else {
            return false;
        };
        stats.resync.store(true, Ordering::Release);
        self.threads[thread_of(rank.worker, self.threads.len())].raise();
        true
    }
}

#[derive(Clone, Debug)]
struct Attention {
    bell: Arc<ThreadBell>,
    control: Arc<Control>,
}

impl Attention {
    /// Makes the thread read its flags.
    fn raise(&self) {
        self.control.attention.store(true, Ordering::Release);
        self.bell.ring();
    }
}

impl WorkerSet {
    /// Starts `specs` on one thread per element of `ports`; each thread publishes to the sink with
    /// the same index.
    ///
    /// A worker that is starting up refuses requests (they may be retried elsewhere).
    /// [`RankStats::is_ready`] and `on_ready(worker, true)`, called from its engine thread, report the end of
    /// the start-up. `on_ready(worker, false)` reports that an engine of the worker has died: send it no more
    /// requests.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        specs: Vec<WorkerSpec>,
        timing: &LiveTiming,
        ports: Vec<ThreadPort>,
        sinks: Vec<Box<dyn EventSink>>,
        on_ready: impl Fn(WorkerId, bool) + Send + Sync + 'static,
    ) -> Result<WorkerSet, StartError> {
        let (mut set, threads) = WorkerSet::assemble(specs, timing, ports, sinks, on_ready)?;
        for (index, thread) in threads.into_iter().enumerate() {
            let join = std::thread::Builder::new()
                .name(format!("engine-{index}"))
                .spawn(move || Box::new(thread).run())?;
            set.threads[index].join = Some(join);
        }
        Ok(set)
    }

    /// The workers of `specs`, and what their threads run.
    pub(crate) fn assemble(
        specs: Vec<WorkerSpec>,
        timing: &LiveTiming,
        ports: Vec<ThreadPort>,
        sinks: Vec<Box<dyn EventSink>>,
        on_ready: impl Fn(WorkerId, bool) + Send + Sync + 'static,
    ) -> Result<(WorkerSet, Vec<EngineThread>), StartError> {
        check(&specs, timing, ports.len(), sinks.len())?;
        let on_ready: OnReady = Arc::new(on_ready);
        let thread_count = ports.len();
        let mut ranks = Vec::new();
        let mut seeds: Vec<Vec<RankSeed>> = (0..thread_count).map(|_| Vec::new()).collect();
        for spec in specs {
            let thread = thread_of(spec.worker, thread_count);
            for (dp_rank, backend) in spec.ranks.into_iter().enumerate() {
                let rank = RankId {
                    worker: spec.worker,
                    dp_rank: to_u16(dp_rank),
                };
                let stats = Arc::new(RankStats {
                    rank,
                    ..RankStats::default()
                });
                stats.note_engine(&backend.stats());
                ranks.push(Arc::clone(&stats));
                seeds[thread].push(RankSeed {
                    rank,
                    backend,
                    stats,
                    startup_s: spec.startup_s,
                });
            }
        }
        let mut set = WorkerSet {
            threads: Vec::new(),
            ranks,
        };
        let mut threads = Vec::new();
        for ((port, sink), seeds) in ports.into_iter().zip(sinks).zip(seeds) {
            let control = Arc::new(Control::default());
            let attention = Attention {
                bell: Arc::clone(port.bell()),
                control: Arc::clone(&control),
            };
            let stats = Arc::new(ThreadStats::default());
            let thread = EngineThread::new(
                port,
                sink,
                seeds,
                timing,
                Arc::clone(&stats),
                control,
                Arc::clone(&on_ready),
            );
            threads.push(thread);
            set.threads.push(RunningThread {
                attention,
                stats,
                join: None,
            });
        }
        Ok((set, threads))
    }

    /// Every rank, by worker and rank in the order in which the workers were given.
    pub fn ranks(&self) -> &[Arc<RankStats>] {
        &self.ranks
    }

    /// Every engine thread.
    pub fn thread_stats(&self) -> impl Iterator<Item = Arc<ThreadStats>> + '_ {
        self.threads.iter().map(|thread| Arc::clone(&thread.stats))
    }

    /// Requests `rank` to publish every block that it holds. False if there is no such rank.
    pub fn resync(&self, rank: RankId) -> bool {
        self.resyncs().resync(rank)
    }

    /// A handle that requests snapshots and owns no thread, so that a sink may keep it. A sink that
    /// kept the set itself could end up joining the thread that it runs on.
    pub fn resyncs(&self) -> Resyncs {
        Resyncs {
            ranks: self.ranks.clone(),
            threads: self.threads.iter().map(|t| t.attention.clone()).collect(),
        }
    }

    /// Stops all engines: open streams end as aborted, waiting requests are refused, computed
    /// tokens are still delivered to shards that take them within a second. Returns when every
    /// thread has ended.
    ///
    /// # Errors
    /// [`JoinError`] of the first thread that had died.
    pub fn shutdown(mut self) -> Result<(), JoinError> {
        self.stop_and_join()
    }

    fn stop_and_join(&mut self) -> Result<(), JoinError> {
        for thread in &self.threads {
            thread.attention.control.stop.store(true, Ordering::Release);
            thread.attention.raise();
        }
        let mut result = Ok(());
        for (index, thread) in self.threads.iter_mut().enumerate() {
            let Some(join) = thread.join.take() else {
                continue;
            };
            if join.thread().id() == std::thread::current().id() {
                // Dropped by a sink or by `on_ready`: that thread ends once it returns to its loop.
                continue;
            }
            let Err(panic) = join.join() else {
                continue;
            };
            let message = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message")
                .to_owned();
            if result.is_ok() {
                result = Err(JoinError {
                    thread: index,
                    message,
                });
            }
        }
        result
    }
}

impl Drop for WorkerSet {
    fn drop(&mut self) {
        // Callers that need the result call `shutdown`.
        let _ = self.stop_and_join();
    }
}

fn check(
    specs: &[WorkerSpec],
    timing: &LiveTiming,
    threads: usize,
    sinks: usize,
) -> Result<(), StartError> {
    if !(timing.speedup.is_finite() && timing.speedup >= 0.0) {
        return Err(StartError::Speedup(timing.speedup));
    }
    if threads != sinks {
        return Err(StartError::Sinks { threads, sinks });
    }
    let mut seen = std::collections::BTreeSet::new();
    for spec in specs {
        let (worker, startup_s) = (spec.worker, spec.startup_s);
        if spec.ranks.is_empty() {
            return Err(StartError::NoRanks { worker });
        }
        if !(startup_s.is_finite() && startup_s >= 0.0) {
            return Err(StartError::Startup { worker, startup_s });
        }
        if !seen.insert(worker) {
            return Err(StartError::Duplicate { worker });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_core_is_left_to_the_shards() {
        assert_eq!(engine_threads(0, 4, 64), 3);
        assert_eq!(engine_threads(0, 4, 9), 2);
        assert_eq!(engine_threads(0, 4, 8), 1, "one thread does for eight");
        assert_eq!(engine_threads(3, 4, 2), 2, "no more threads than workers");
        assert_eq!(engine_threads(0, 1, 8), 1, "at least one");
        assert_eq!(engine_threads(6, 4, 8), 6, "as asked");
        assert_eq!(engine_threads(0, 64, 0), 1);
    }
}
