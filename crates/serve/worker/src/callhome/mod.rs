//! A worker process's side of the plane: it finds frontends, dials each of their shards once, and
//! carries frames between the sockets and the rings of its engine threads.
//!
//! ```text
//!   frontend A, shard 0 ◄─TCP─► relay ─┐ one link (a shard's rings)    ┌─► engine thread 0
//!   frontend A, shard 1 ◄─TCP─► relay ─┼────────────────────────────────┼─► …
//!   frontend B, shard 0 ◄─TCP─► relay ─┘ each                           └─► engine thread n
//!              ▲
//!   discovery ─┘ a dialer for every shard that is announced, for as long as it is
//! ```
//!
//! All relays live on one thread. A connection borrows one of a fixed number of *links*; when it
//! ends, every stream of it is killed, the engine threads confirm that (so that what they had sent
//! before reaches no connection), and the link serves the next connection.

mod broadcast;
mod dial;
mod relay;
#[cfg(feature = "sim")]
pub(crate) mod sim;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

use slipstream_base::WorkerId;
use slipstream_planes::discovery::{
    self, Place, ProcessRecord, ProcessRole, Session, SessionError, SessionEvent,
};
use slipstream_planes::link::Socket;
use slipstream_planes::tls::Tls;
use slipstream_planes::{EventSink, ShardPort};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::LocalSet;

use crate::set::{Resyncs, WorkerSet};
use crate::stats::RankStats;
use broadcast::{BroadcastSink, EventBroadcast};
use dial::Target;

/// Changes of the discovery directory that may wait for the plane's thread; then the discovery
/// thread waits as well.
const EVENTS_MAX: usize = 1_024;

/// How a worker process is found, and finds frontends.
#[derive(Clone, Debug)]
pub struct CallHomeConfig {
    /// Drawn at the start of this run.
    pub instance: u64,
    /// Of the cluster; frontends of another are not dialed.
    pub fingerprint: u64,
    /// For people: host and process.
    pub name: String,
    /// Where processes find each other.
    pub discovery: Place,
    /// This process's record counts for so long after its last renewal. Default 3 s.
    pub lease: Duration,
    /// A frontend that was silent for so long, and for longer than `lease`, counts as gone. Default 5 s.
    pub deadline: Duration,
    /// Bytes that may wait for one shard to read them; beyond that its connection is cut. Too low:
    /// a burst cuts a healthy frontend. Default 64 MiB.
    pub unsent_bytes_max: usize,
    /// Encrypt, and let each side prove who it is; `None`: plain TCP.
    pub tls: Option<Tls>,
}

/// Counters of the plane of a worker process. Written by its thread.
#[derive(Debug, Default)]
pub struct CallHomeStats {
    /// Connections to shards, open now.
    pub open: AtomicU64,
    /// Connections greeted.
    pub connected: AtomicU64,
    /// Attempts that failed before a greeting.
    pub failed: AtomicU64,
    /// Greetings that were rejected.
    pub rejected: AtomicU64,
    /// Connections that ended while the frontend was wanted.
    pub lost: AtomicU64,
    /// Of those: the peer was silent or did not read.
    pub silent: AtomicU64,
    /// Of those: the peer sent bytes that are no frame.
    pub malformed: AtomicU64,
    /// Times that no link was free for a shard.
    pub links_short: AtomicU64,
    /// Requests refused because an engine thread's ring was full.
    pub refused: AtomicU64,
    /// Frames sent.
    pub frames: AtomicU64,
    /// Bytes sent, frames of passes alone.
    pub pass_bytes: AtomicU64,
}

/// The event sinks of a worker process, one per engine thread, and the broadcast that they write
/// to. Created before the engines start; given to [`CallHome::start`].
pub struct CallHomeEvents {
    broadcast: EventBroadcast,
}

impl Default for CallHomeEvents {
    fn default() -> Self {
        CallHomeEvents::new()
    }
}

impl CallHomeEvents {
    /// There is no listener yet.
    pub fn new() -> CallHomeEvents {
        CallHomeEvents {
            broadcast: EventBroadcast::default(),
        }
    }

    /// A sink for one more engine thread.
    pub fn sink(&self) -> impl EventSink + use<> {
        BroadcastSink::new(self.broadcast.clone())
    }

    /// To be called with each worker that becomes ready, or stops being so; see
    /// [`WorkerSet::start`](crate::WorkerSet::start).
    pub fn on_ready(&self) -> impl Fn(WorkerId, bool) + Send + Sync + 'static {
        let broadcast = self.broadcast.clone();
        move |worker, ready| broadcast.on_ready(worker, ready)
    }
}

/// Why a worker process cannot call home.
#[derive(Debug, thiserror::Error)]
pub enum CallHomeError {
    /// The discovery directory.
    #[error(transparent)]
    Discovery(#[from] SessionError),
    /// A thread or its runtime could not be made.
    #[error("cannot start the plane's thread")]
    Thread(#[from] io::Error),
}

/// The plane's thread. Dropping it without [`CallHome::shutdown`] leaves it running.
pub struct CallHome {
    thread: Option<JoinHandle<()>>,
    stage: watch::Sender<Stage>,
    broadcast: EventBroadcast,
    stats: Arc<CallHomeStats>,
}

/// How far the process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Running,
    /// No new connections, no record; open streams continue.
    Leaving,
    /// Connections close once what the engines sent has left.
    Closing,
}

/// State that the tasks of the plane's thread share.
struct Home {
    config: CallHomeConfig,
    /// Links that no connection uses.
    free: RefCell<Vec<ShardPort>>,
    workers: Vec<WorkerRanks>,
    /// Any one worker of each engine thread, to say something to the thread.
    thread_workers: Vec<Option<WorkerId>>,
    resyncs: Resyncs,
    broadcast: EventBroadcast,
    stats: Arc<CallHomeStats>,
    /// Permits for attempts to dial unproven frontends, and for their links.
    unproven: Semaphore,
    unproven_links: Semaphore,
    /// Numbers hang-ups.
    hang_ups: Cell<u32>,
    /// This process is about to end: engine threads may, too.
    leaving: Cell<bool>,
    #[cfg(feature = "sim")]
    connect: RefCell<Option<sim::Connect>>,
}

struct WorkerRanks {
    worker: WorkerId,
    ranks: Vec<Arc<RankStats>>,
}

impl WorkerRanks {
    fn is_ready(&self) -> bool {
        self.ranks.iter().all(|rank| rank.is_ready())
    }
}

impl CallHome {
    /// Announces the workers of `set`, and dials every shard of every frontend of the same cluster
    /// that is announced, now or later. `links` are the shards' ends of the engine threads' rings:
    /// so many shards can be served at once.
    ///
    /// # Errors
    /// [`CallHomeError`].
    pub fn start(
        config: CallHomeConfig,
        set: &WorkerSet,
        links: Vec<ShardPort>,
        events: CallHomeEvents,
    ) -> Result<CallHome, CallHomeError> {
        let workers = workers_of(set);
        let record = ProcessRecord {
            role: ProcessRole::Worker,
            instance: config.instance,
            name: config.name.clone(),
            fingerprint: config.fingerprint,
            shards: Vec::new(),
            workers: workers.iter().map(|of| of.worker.0).collect(),
            key: None,
        };
        let folder = discovery::backend(&config.discovery)?;
        let (sender, events_of_peers) = mpsc::channel(EVENTS_MAX);
        // The plane's thread may be gone, at the end.
        let on_event = move |event| drop(sender.blocking_send(event));
        let session = Session::start("discovery", folder, Some((record, config.lease)), on_event)?;
        let (stage, staged) = watch::channel(Stage::Running);
        let stats = Arc::new(CallHomeStats::default());
        let (broadcast, resyncs) = (events.broadcast.clone(), set.resyncs());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let thread = {
            let stats = Arc::clone(&stats);
            std::thread::Builder::new()
                .name("plane".into())
                .spawn(move || {
                    let home = Home::new(config, links, workers, resyncs, events.broadcast, stats);
                    LocalSet::new().block_on(&runtime, run(home, session, events_of_peers, staged));
                })?
        };
        Ok(CallHome {
            thread: Some(thread),
            stage,
            broadcast,
            stats,
        })
    }

    /// Counters of the plane.
    pub fn stats(&self) -> &Arc<CallHomeStats> {
        &self.stats
    }

    /// Times that a frontend was so far behind on KV deltas that it got snapshots instead.
    pub fn feed_overflows(&self) -> u64 {
        self.broadcast.overflows()
    }

    /// Asks frontends for no more requests, and takes the record away. Open streams continue.
    pub fn leave(&self) {
        self.broadcast.on_stopping();
        // The thread is gone only if it panicked; the message would have no reader.
        let _ = self.stage.send(Stage::Leaving);
    }

    /// Sends what the engines have yet said, closes all connections, and waits for the thread. To
    /// be called when the engines have stopped.
    pub fn shutdown(mut self) {
        let _ = self.stage.send(Stage::Closing);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the plane's thread ended by panic");
        }
    }
}

/// The record of this process in the discovery directory.
trait Announced {
    /// Takes the record away. Does nothing if that was done.
    fn stop(&self);
}

impl Announced for Session {
    fn stop(&self) {
        Session::stop(self);
    }
}

/// The workers of `set`, rising.
fn workers_of(set: &WorkerSet) -> Vec<WorkerRanks> {
    let mut workers: BTreeMap<WorkerId, Vec<Arc<RankStats>>> = BTreeMap::new();
    for rank in set.ranks() {
        let ranks = workers.entry(rank.rank.worker).or_default();
        ranks.push(Arc::clone(rank));
    }
    workers
        .into_iter()
        .map(|(worker, ranks)| WorkerRanks { worker, ranks })
        .collect()
}

/// Keeps a dialer for each shard of each frontend that is announced, and the record of this process
/// until it is about to end.
async fn run(
    home: Rc<Home>,
    session: impl Announced,
    mut events: mpsc::Receiver<SessionEvent<ProcessRecord>>,
    mut staged: watch::Receiver<Stage>,
) {
    let mut frontends = Frontends::new(&home, &staged);
    loop {
        let stage = *staged.borrow_and_update();
        if stage >= Stage::Leaving {
            home.leaving.set(true);
            session.stop();
        }
        if stage == Stage::Closing {
            break;
        }
        tokio::select! {
            biased;
            changed = staged.changed() => {
                if changed.is_err() {
                    break; // the handle was dropped without a farewell
                }
            }
            Some(event) = events.recv(), if stage == Stage::Running => {
                frontends.on_event(event);
            }
            Some((instance, shard)) = frontends.proven.recv() => frontends.on_proven(instance, shard),
            Some(_) = frontends.tasks.join_next() => {}
        }
    }
    session.stop();
    // Its thread may wait for room.
    drop(events);
    // Dialers see the end by `staged`, and each sends the rest.
    while frontends.tasks.join_next().await.is_some() {}
    drop(session);
}

/// The frontends that are announced, and the tasks that dial them.
struct Frontends {
    home: Rc<Home>,
    staged: watch::Receiver<Stage>,
    /// By instance and shard: the target, or `None` while its record is gone. Closed when the dialer
    /// has ended.
    dialers: BTreeMap<(u64, u8), watch::Sender<Option<Target>>>,
    /// By instance: frontends of which no shard has welcomed this process, with one dialer each.
    unproven: BTreeMap<u64, watch::Sender<Option<Target>>>,
    /// Unproven instances, and the shard that welcomed this process.
    proven: mpsc::UnboundedReceiver<(u64, u8)>,
    prove: dial::Proven,
    tasks: tokio::task::JoinSet<()>,
    /// Instances of other clusters that were reported.
    foreign: std::collections::BTreeSet<u64>,
}

impl Frontends {
    fn new(home: &Rc<Home>, staged: &watch::Receiver<Stage>) -> Frontends {
        let (prove, proven) = mpsc::unbounded_channel();
        Frontends {
            home: Rc::clone(home),
            staged: staged.clone(),
            dialers: BTreeMap::new(),
            unproven: BTreeMap::new(),
            proven,
            prove,
            tasks: tokio::task::JoinSet::new(),
            foreign: std::collections::BTreeSet::new(),
        }
    }

    fn on_event(&mut self, event: SessionEvent<ProcessRecord>) {
        match event {
            SessionEvent::Appeared(record) if record.role == ProcessRole::Frontend => {
                self.dial(&record);
            }
            SessionEvent::Vanished(record) => {
                // Open connections continue; no more are made unless the record comes back.
                let of = (record.instance, 0)..=(record.instance, u8::MAX);
                let dialers = self.dialers.range(of).map(|(_, dialer)| dialer);
                for dialer in dialers.chain(self.unproven.get(&record.instance)) {
                    dialer.send_replace(None);
                }
            }
            SessionEvent::Failed(error) => tracing::warn!("{error}"),
            SessionEvent::Invalid { name, reason } => {
                tracing::warn!("ignoring {name} in the discovery directory: {reason}");
            }
            SessionEvent::Appeared(_) | SessionEvent::Synced | SessionEvent::Recovered => {}
        }
    }

    fn dial(&mut self, record: &ProcessRecord) {
        if record.fingerprint != self.home.config.fingerprint {
            if self.foreign.len() < 1024 && self.foreign.insert(record.instance) {
                tracing::warn!(
                    "frontend {} serves another cluster and is not dialed; \
                     start both from one cluster file",
                    record.name
                );
            }
            return;
        }
        self.dialers.retain(|_, dialer| !dialer.is_closed());
        self.unproven.retain(|_, dialer| !dialer.is_closed());
        let record = Rc::new(record.clone());
        let of = (record.instance, 0)..=(record.instance, u8::MAX);
        let is_proven = self.dialers.range(of).next().is_some();
        let target = |shard| {
            Some(Target {
                record: record.clone(),
                shard,
            })
        };
        if is_proven {
            for (shard, _) in (0u8..=255).zip(&record.shards) {
                self.dial_shard(target(Some(shard)), (record.instance, shard));
            }
        } else if let Some(dialer) = self.unproven.get(&record.instance) {
            dialer.send_replace(target(None));
        } else {
            let dialer = self.spawn(target(None));
            self.unproven.insert(record.instance, dialer);
        }
    }

    /// A shard of an unproven frontend welcomed this process: the others are dialed.
    fn on_proven(&mut self, instance: u64, shard: u8) {
        let Some(dialer) = self.unproven.remove(&instance) else {
            return;
        };
        // `None`: its record is gone. Its connection goes on.
        let record = dialer.borrow().as_ref().map(|target| target.record.clone());
        let target = |shard| {
            let record = record.clone()?;
            Some(Target {
                record,
                shard: Some(shard),
            })
        };
        dialer.send_replace(target(shard));
        self.dialers.insert((instance, shard), dialer);
        let shards = record.as_ref().map_or(0, |record| record.shards.len());
        for other in (0u8..=255).take(shards).filter(|&other| other != shard) {
            self.dial_shard(target(other), (instance, other));
        }
    }

    fn dial_shard(&mut self, target: Option<Target>, at: (u64, u8)) {
        // A record that was gone for a while: a second connection would be refused for ever.
        if let Some(dialer) = self.dialers.get(&at)
            && !slipstream_base::planted!("second-dialer")
        {
            dialer.send_replace(target);
            return;
        }
        let dialer = self.spawn(target);
        self.dialers.insert(at, dialer);
    }

    fn spawn(&mut self, target: Option<Target>) -> watch::Sender<Option<Target>> {
        let (dialer, wanted) = watch::channel(target);
        let (home, staged) = (self.home.clone(), self.staged.clone());
        let dial = dial::dial(home, wanted, staged, self.prove.clone());
        self.tasks.spawn_local(dial);
        dialer
    }
}

impl Home {
    fn new(
        config: CallHomeConfig,
        links: Vec<ShardPort>,
        workers: Vec<WorkerRanks>,
        resyncs: Resyncs,
        broadcast: EventBroadcast,
        stats: Arc<CallHomeStats>,
    ) -> Rc<Home> {
        let threads = links.first().map_or(0, ShardPort::threads);
        let mut thread_workers = vec![None; threads];
        for of in &workers {
            let thread = slipstream_planes::ring::thread_of(of.worker, threads);
            thread_workers[thread] = Some(of.worker);
        }
        let unproven_links = links.len().div_ceil(2);
        Rc::new(Home {
            config,
            unproven: Semaphore::new(dial::UNPROVEN_DIALS_MAX),
            unproven_links: Semaphore::new(unproven_links),
            free: RefCell::new(links),
            workers,
            thread_workers,
            resyncs,
            broadcast,
            stats,
            hang_ups: Cell::new(0),
            leaving: Cell::new(false),
            #[cfg(feature = "sim")]
            connect: RefCell::default(),
        })
    }

    /// Connects to `address`, encrypted if configured.
    async fn connect(&self, address: &str) -> io::Result<Box<dyn Socket>> {
        #[cfg(feature = "sim")]
        {
            let connect = self.connect.borrow().clone();
            if let Some(connect) = connect {
                return connect(address).await;
            }
        }
        let stream = TcpStream::connect(address).await?;
        // Small frames leave at once.
        stream.set_nodelay(true)?;
        Ok(match &self.config.tls {
            None => Box::new(stream),
            Some(tls) => tls.connect(stream).await?,
        })
    }

    fn count(&self, of: impl Fn(&CallHomeStats) -> &AtomicU64) {
        of(&self.stats).fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests;
