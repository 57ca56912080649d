//! The plane of a worker process under a simulator: its task, without threads, sockets and files.

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use slipstream_base::{ForwardPassMetrics, KvDelta, RankId};
use slipstream_planes::EventSink;
use slipstream_planes::discovery::{Place, ProcessRecord, ProcessRole, SessionEvent};
use slipstream_planes::link::Socket;
use slipstream_planes::ring::{Plane, PlaneLimits};
use tokio::sync::{mpsc, watch};

use super::broadcast::EventBroadcast;
use super::{Announced, CallHomeConfig, CallHomeEvents, CallHomeStats, EVENTS_MAX, Home, Stage};
use super::{run, workers_of};
use crate::set::{LiveTiming, StartError, WorkerSet, WorkerSpec};
use crate::thread::EngineThread;
use crate::thread::sim::Checked;

/// Connects to an address.
pub type Connect = Rc<dyn Fn(&str) -> Connecting>;

/// A connection that is being made.
pub type Connecting = Pin<Box<dyn Future<Output = io::Result<Box<dyn Socket>>>>>;

/// Properties of a simulated worker process.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// As in [`CallHomeConfig`].
    pub instance: u64,
    /// As in [`CallHomeConfig`].
    pub fingerprint: u64,
    /// As in [`CallHomeConfig`].
    pub deadline: Duration,
    /// As in [`CallHomeConfig`].
    pub unsent_bytes_max: usize,
    /// Engine threads.
    pub threads: usize,
    /// Connections to shards at a time.
    pub links: usize,
    /// Bounds of the rings.
    pub limits: PlaneLimits,
}

/// A worker process: engine threads that a simulator steps, and the task of its plane.
pub struct SimWorker {
    threads: Vec<EngineThread>,
    set: WorkerSet,
    stage: watch::Sender<Stage>,
    broadcast: EventBroadcast,
    loss: Arc<Loss>,
    stats: Arc<CallHomeStats>,
    events: mpsc::Sender<SessionEvent<ProcessRecord>>,
    record: ProcessRecord,
    withdrawn: Rc<Cell<bool>>,
    stopped: bool,
}

/// The record that the simulator keeps.
struct SimRecord(Rc<Cell<bool>>);

impl Announced for SimRecord {
    fn stop(&self) {
        self.0.set(true);
    }
}

#[derive(Default)]
struct Loss {
    next: AtomicBool,
    healed: AtomicBool,
}

/// Loses a KV delta, which only shows if another one of its rank follows: it is held back until then.
struct LossySink<S> {
    sink: S,
    loss: Arc<Loss>,
    held: Vec<KvDelta>,
}

impl<S: EventSink> EventSink for LossySink<S> {
    fn on_kv(&mut self, delta: &KvDelta) {
        let held = self.held.iter().position(|held| held.rank == delta.rank);
        if let Some(lost) = held {
            self.held.remove(lost);
        } else if self.loss.next.swap(false, Relaxed) {
            return self.held.push(delta.clone());
        }
        self.sink.on_kv(delta);
    }

    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        self.held.retain(|held| held.rank != snapshot.rank);
        self.sink.on_kv_snapshot(snapshot);
    }

    fn on_fpm(&mut self, metrics: &ForwardPassMetrics) {
        self.sink.on_fpm(metrics);
    }

    fn flush(&mut self) {
        if self.loss.healed.load(Relaxed) {
            for held in self.held.drain(..) {
                self.sink.on_kv(&held);
            }
        }
        self.sink.flush();
    }
}

impl SimWorker {
    /// A process of `specs`, and the task of its plane, which ends with it. Connections are made by `connect`.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(
        config: &SimConfig,
        specs: Vec<WorkerSpec>,
        timing: &LiveTiming,
        connect: Connect,
    ) -> Result<(SimWorker, impl Future<Output = ()> + use<>), StartError> {
        let plane = Plane::new(config.links, config.threads, config.limits);
        let events = CallHomeEvents::new();
        let loss = Arc::<Loss>::default();
        let sinks = (0..config.threads).map(|_| {
            Box::new(LossySink {
                sink: events.sink(),
                loss: loss.clone(),
                held: Vec::new(),
            }) as Box<dyn EventSink>
        });
        let (set, mut threads) = WorkerSet::assemble(
            specs,
            timing,
            plane.threads,
            sinks.collect(),
            events.on_ready(),
        )?;
        for thread in &mut threads {
            thread.start_up();
        }
        let name = format!("process-{:x}", config.instance);
        let call_home = CallHomeConfig {
            instance: config.instance,
            fingerprint: config.fingerprint,
            name: name.clone(),
            discovery: Place::Folder(PathBuf::new()),
            lease: Duration::from_secs(3),
            deadline: config.deadline,
            unsent_bytes_max: config.unsent_bytes_max,
            tls: None,
        };
        let workers = workers_of(&set);
        let record = ProcessRecord {
            role: ProcessRole::Worker,
            instance: config.instance,
            name,
            fingerprint: config.fingerprint,
            shards: Vec::new(),
            workers: workers.iter().map(|of| of.worker.0).collect(),
            key: None,
        };
        let (stage, staged) = watch::channel(Stage::Running);
        let (sender, receiver) = mpsc::channel(EVENTS_MAX);
        let stats = Arc::new(CallHomeStats::default());
        let (broadcast, resyncs) = (events.broadcast.clone(), set.resyncs());
        let withdrawn = Rc::new(Cell::new(false));
        let session = SimRecord(withdrawn.clone());
        let task = {
            let stats = stats.clone();
            async move {
                let links = plane.shards;
                let home = Home::new(call_home, links, workers, resyncs, events.broadcast, stats);
                home.connect.replace(Some(connect));
                run(home, session, receiver, staged).await;
            }
        };
        let worker = SimWorker {
            threads,
            set,
            stage,
            broadcast,
            loss,
            stats,
            events: sender,
            record,
            withdrawn,
            stopped: false,
        };
        Ok((worker, task))
    }

    /// Its record, unless it has taken it away.
    pub fn record(&self) -> Option<&ProcessRecord> {
        (!self.withdrawn.get()).then_some(&self.record)
    }

    /// Reports a change of the discovery directory. False if too many wait.
    pub fn on_discovery(&self, event: SessionEvent<ProcessRecord>) -> bool {
        self.events.try_send(event).is_ok()
    }

    /// Whether a thread has something to do at `now_ns`.
    pub fn is_due(&mut self, now_ns: u64) -> bool {
        let mut threads = self.threads.iter_mut();
        !self.stopped && threads.any(|thread| thread.is_due(now_ns))
    }

    /// The time at which a thread has something to do, ns, unless a message comes before.
    pub fn next_due(&self) -> u64 {
        if self.stopped {
            return u64::MAX;
        }
        let times = self.threads.iter().map(EngineThread::next_due);
        times.min().unwrap_or(u64::MAX)
    }

    /// One round of each thread that is due.
    pub fn round(&mut self, now_ns: u64) {
        for thread in self.threads.iter_mut().filter(|_| !self.stopped) {
            if thread.is_due(now_ns) {
                thread.step();
            }
        }
    }

    /// Connections lose the next KV deltas, as if they were too far behind.
    pub fn lose_kv(&self) {
        self.broadcast.lose();
    }

    /// Connections lose the next KV delta, and do not notice.
    pub fn lose_kv_unseen(&self) {
        self.loss.next.store(true, Relaxed);
    }

    /// No more deltas are lost.
    pub fn heal(&self) {
        self.loss.next.store(false, Relaxed);
        self.loss.healed.store(true, Relaxed);
    }

    /// Distinct blocks in the cache of each rank.
    pub fn caches(&self) -> Vec<(RankId, u64)> {
        self.threads.iter().flat_map(EngineThread::caches).collect()
    }

    /// As [`CallHome::leave`](super::CallHome::leave).
    pub fn leave(&self) {
        self.broadcast.on_stopping();
        let _ = self.stage.send(Stage::Leaving);
    }

    /// Ends the engines' streams, then the connections: what a process does when its time to finish is over.
    pub fn stop(&mut self) {
        for thread in &mut self.threads {
            thread.end();
        }
        self.stopped = true;
        let _ = self.stage.send(Stage::Closing);
    }

    /// Connections to shards, open now.
    pub fn open_links(&self) -> u64 {
        self.stats.open.load(Relaxed)
    }

    /// Frames that were malformed.
    pub fn malformed(&self) -> u64 {
        self.stats.malformed.load(Relaxed)
    }

    /// Bytes of KV deltas that wait for a connection's task. None do while no task is woken.
    pub fn kv_waiting(&self) -> usize {
        self.broadcast.kv_waiting()
    }

    /// Whether every rank accepts requests.
    pub fn is_ready(&self) -> bool {
        self.set.ranks().iter().all(|rank| rank.is_ready())
    }

    /// Checks the invariants of the threads, and returns what they hold. No stream has more than
    /// `credit_tokens`, unless its credit is not limited.
    ///
    /// # Errors
    /// The invariant that does not hold.
    pub fn check(&self, credit_tokens: u32) -> Result<Checked, String> {
        let mut sum = Checked::default();
        for thread in &self.threads {
            sum.add(&thread.check(credit_tokens)?);
        }
        Ok(sum)
    }
}
