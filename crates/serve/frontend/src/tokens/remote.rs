//! A shard's connections to worker processes.
//!
//! Workers dial; the shard listens. Each connection is one task: it reads passes and takes them
//! apart at once, and writes what the handlers of this shard have put into the peer's outbox since
//! it last ran. Handlers and connections share a thread, so nothing here is locked.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use slipstream_base::{KvDelta, RankId, WorkerId};
use slipstream_planes::clock::{clock_id, monotonic_ns, same_clock};
use slipstream_planes::link::{Link, LinkError, Socket, yield_turn};
use slipstream_planes::tls::Tls;
use slipstream_planes::wire::{self, FrameKind, Hello, Reject, RejectReason, Welcome, WireError};
use slipstream_planes::{PassFrame, StartRequest, ToWorker};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::door::listen::{StartError, bind};
use crate::door::metrics::ShardMetrics;
use crate::door::shard::{LogPace, Shard};
use crate::tokens::roster::{Roster, feeds_index};
use crate::tokens::workers::Workers;

/// Connections of one shard that are greeted at one time; more are closed.
const GREETINGS_MAX: usize = 256;

/// Reads in one turn, of at least 16 KiB each; then the clients' sockets get theirs.
const READS_PER_TURN: usize = 8;

/// Changes of blocks that are looked at together: two cache lines each, of the 512 or more that a
/// first-level cache holds.
const DELTA_OPS: usize = 64;

/// Deltas that are kept to be applied together.
const DELTAS_MAX: usize = 64;

/// Bytes beyond [`RemoteLimits::unsent_bytes_max`] at which a worker that reads too slowly is cut:
/// the longest request, and controls of a million streams.
const UNSENT_SLACK_BYTES: usize = wire::BODY_BYTES_MAX + (32 << 20);

/// Bounds of a shard's connections to workers.
#[derive(Clone, Copy, Debug)]
pub struct RemoteLimits {
    /// A worker that was silent for so long counts as gone. Default 5 s.
    pub deadline: Duration,
    /// Bytes of requests that may wait for one worker process to read them. Beyond that its
    /// requests go elsewhere. Default 16 MiB.
    pub unsent_bytes_max: usize,
    /// Bytes of a stream's tokens (4 each) that may come before its client has read some. Too low:
    /// tokens wait for credit. Default 256 KiB.
    pub credit_bytes: u32,
}

impl Default for RemoteLimits {
    fn default() -> Self {
        RemoteLimits {
            deadline: slipstream_planes::link::DEADLINE,
            unsent_bytes_max: 16 << 20,
            credit_bytes: 256 << 10,
        }
    }
}

/// Where one shard listens for workers.
pub struct RemotePlane {
    /// `None`: connections come from a simulator.
    listener: Option<StdListener>,
    roster: Arc<Roster>,
    limits: RemoteLimits,
    tls: Option<Tls>,
}

/// A bound socket for workers, before there is a roster.
pub struct PlaneSocket {
    listener: StdListener,
    address: SocketAddr,
}

impl PlaneSocket {
    /// Binds `listen` (`host:port`; port 0 picks a free one), exclusively.
    ///
    /// # Errors
    /// [`StartError::Bind`].
    pub fn bind(listen: &str) -> Result<PlaneSocket, StartError> {
        let (listener, address) = bind(listen)?;
        Ok(PlaneSocket { listener, address })
    }

    /// The address bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A shard's plane on this socket; with `tls`, for workers that prove who they are.
    pub fn serve(self, roster: Arc<Roster>, limits: RemoteLimits, tls: Option<Tls>) -> RemotePlane {
        RemotePlane {
            listener: Some(self.listener),
            roster,
            limits,
            tls,
        }
    }
}

/// A shard's worker processes.
pub(crate) struct WorkerLinks {
    pub(crate) roster: Arc<Roster>,
    limits: RemoteLimits,
    tls: Option<Tls>,
    listener: Cell<Option<StdListener>>,
    /// The process that runs a worker, by worker.
    peers: RefCell<Vec<Option<Rc<Peer>>>>,
    greetings: Cell<usize>,
    /// Peers that were turned away.
    log: LogPace,
}

/// A connected worker process.
pub(crate) struct Peer {
    instance: u64,
    name: String,
    /// Rising.
    workers: Vec<WorkerId>,
    /// Its times are readings of this host's clock.
    same_clock: bool,
    /// Frames that the next turn of its task sends.
    outbox: RefCell<Vec<u8>>,
    /// Bytes that its socket has not taken, as of its last turn.
    unsent: Cell<usize>,
    waker: RefCell<Option<Waker>>,
    /// It wants no new streams.
    leaving: Cell<bool>,
}

/// Why a start was not handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotSent {
    /// No process runs the worker, or it vanished a moment ago.
    Gone,
    /// Its tombstone stands: a late registration.
    Tombstone,
    /// It is leaving, or too far behind.
    Busy,
}

impl WorkerLinks {
    pub(crate) fn new(plane: RemotePlane) -> WorkerLinks {
        let workers = plane.roster.worker_count();
        WorkerLinks {
            roster: plane.roster,
            limits: plane.limits,
            tls: plane.tls,
            listener: Cell::new(plane.listener),
            peers: RefCell::new(vec![None; workers]),
            greetings: Cell::new(0),
            log: LogPace::default(),
        }
    }

    pub(crate) fn credit_bytes(&self) -> u32 {
        self.limits.credit_bytes
    }

    /// Puts a start into the outbox of the process of its worker.
    pub(crate) fn start(
        &self,
        start: &StartRequest,
        metrics: &ShardMetrics,
    ) -> Result<(), NotSent> {
        let worker = start.rank.worker.index();
        let now = monotonic_ns();
        if self.roster.tombstones.stands(worker, now) {
            return Err(NotSent::Tombstone);
        }
        let peers = self.peers.borrow();
        let peer = peers.get(worker).and_then(Option::as_ref);
        metrics
            .latency
            .call_home_lookup
            .observe(monotonic_ns() - now);
        let peer = peer.ok_or(NotSent::Gone)?;
        let mut outbox = peer.outbox.borrow_mut();
        let waiting = peer.unsent.get() + outbox.len();
        if peer.leaving.get() || waiting > self.limits.unsent_bytes_max {
            return Err(NotSent::Busy);
        }
        wire::encode_start(start, &mut outbox);
        drop(outbox);
        peer.wake();
        Ok(())
    }

    /// Puts a control into the outbox of the process of its worker. If there is none there is nothing
    /// left to control.
    pub(crate) fn control(&self, message: &ToWorker) {
        let peers = self.peers.borrow();
        let worker = message.rank().worker.index();
        if let Some(peer) = peers.get(worker).and_then(Option::as_ref) {
            wire::encode_to_worker(message, &mut peer.outbox.borrow_mut());
            peer.wake();
        }
    }

    /// A plane whose connections come from a simulator.
    #[cfg(feature = "sim")]
    pub(crate) fn simulated(roster: Arc<Roster>, limits: RemoteLimits) -> RemotePlane {
        RemotePlane {
            listener: None,
            roster,
            limits,
            tls: None,
        }
    }

    /// As [`listen`](Self::listen) does with a connection.
    #[cfg(feature = "sim")]
    pub(crate) fn accept(self: &Rc<WorkerLinks>, workers: &Rc<Workers>, socket: Box<dyn Socket>) {
        if self.greetings.get() >= GREETINGS_MAX {
            return self.roster.on_rejected();
        }
        self.greetings.set(self.greetings.get() + 1);
        let socket = std::future::ready(Ok(socket));
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let served = self.clone().serve_socket(workers.clone(), socket, address);
        tokio::task::spawn_local(served);
    }

    /// Workers whose connections stand here.
    #[cfg(feature = "sim")]
    pub(crate) fn seated(&self) -> Vec<WorkerId> {
        let peers = self.peers.borrow();
        let workers = (0u32..).map(WorkerId).zip(peers.iter());
        workers
            .filter(|(_, peer)| peer.is_some())
            .map(|(worker, _)| worker)
            .collect()
    }

    /// Listens for workers, and serves each, for as long as the shard runs.
    pub(crate) async fn listen(self: Rc<WorkerLinks>, workers: Rc<Workers>) {
        let listener = self.listener.take().expect("a shard listens once");
        let listener = match TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "the socket for workers cannot be polled");
                return;
            }
        };
        loop {
            match listener.accept().await {
                Ok((stream, address)) if self.greetings.get() < GREETINGS_MAX => {
                    self.greetings.set(self.greetings.get() + 1);
                    let served = self.clone().serve(workers.clone(), stream, address);
                    tokio::task::spawn_local(served);
                }
                Ok((_, address)) => {
                    self.roster.on_rejected();
                    self.warn(format_args!(
                        "{GREETINGS_MAX} peers are being greeted; {address} was closed"
                    ));
                }
                Err(error) => {
                    // Out of descriptors, most often: give those in use time to be closed.
                    tracing::warn!(%error, "accepting a worker failed; trying again in 20 ms");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    async fn serve(
        self: Rc<WorkerLinks>,
        workers: Rc<Workers>,
        stream: TcpStream,
        address: SocketAddr,
    ) {
        let remote = self.clone();
        let socket = async move {
            // Small frames leave at once.
            stream.set_nodelay(true)?;
            Ok(match &remote.tls {
                None => Box::new(stream) as Box<dyn Socket>,
                Some(tls) => tls.accept(stream).await.inspect_err(|_| {
                    remote.roster.on_rejected();
                })?,
            })
        };
        self.serve_socket(workers, socket, address).await;
    }

    /// Serves the worker process that connects by `socket`.
    pub(crate) async fn serve_socket(
        self: Rc<WorkerLinks>,
        workers: Rc<Workers>,
        socket: impl Future<Output = io::Result<Box<dyn Socket>>>,
        address: SocketAddr,
    ) {
        let greeted = timeout(self.limits.deadline, self.greet(&workers.shard, socket)).await;
        self.greetings.set(self.greetings.get() - 1);
        let (link, peer) = match greeted {
            Ok(Ok(greeted)) => greeted,
            Ok(Err(GreetError::Rejected(reject))) => {
                self.warn(format_args!(
                    "a worker process at {address} was turned away: {reject}"
                ));
                return;
            }
            Ok(Err(error)) => {
                self.warn(format_args!("{address} is no worker process: {error}"));
                return;
            }
            Err(_) => {
                self.roster.on_rejected();
                self.warn(format_args!("{address} connected and did not say hello"));
                return;
            }
        };
        let runs: Vec<_> = peer.workers.iter().map(ToString::to_string).collect();
        tracing::info!(
            "{} runs {} (shard {})",
            peer.name,
            runs.join(" "),
            workers.shard.index
        );
        // Also when this task is dropped at shutdown.
        let mut connection = Connection {
            remote: self.clone(),
            workers,
            peer,
            link,
            pass: PassFrame::new(),
            deltas: Vec::new(),
            received: 0,
            received_ops: 0,
            unsure: Vec::new(),
        };
        let error = poll_fn(|cx| connection.poll(cx)).await;
        let metrics = &connection.workers.shard.metrics;
        match &error {
            LinkError::Wire(_) => metrics.plane.malformed.add(1),
            LinkError::Silent { .. } | LinkError::Unread { .. } => metrics.plane.silent.add(1),
            LinkError::Closed | LinkError::Io(_) => {}
        }
        tracing::warn!("{}: {error}", connection.peer.name);
    }

    /// Logs that a peer was turned away: once a second, as anyone can connect.
    fn warn(&self, message: std::fmt::Arguments<'_>) {
        if let Some(more) = self.log.allows(monotonic_ns()) {
            match more {
                0 => tracing::warn!("{message}"),
                n => tracing::warn!("{message} ({n} more peers since the last such line)"),
            }
        }
    }

    /// Reads the hello and answers it.
    async fn greet(
        &self,
        shard: &Shard,
        socket: impl Future<Output = io::Result<Box<dyn Socket>>>,
    ) -> Result<(Link, Rc<Peer>), GreetError> {
        let limits = &self.limits;
        let mut link = Link::new(socket.await?, limits.deadline, limits.unsent_bytes_max);
        link.limit_frames(Hello::bytes_max(self.roster.worker_count()));
        let hello = link
            .receive(|kind, body| match kind {
                FrameKind::Hello => Hello::decode(body),
                kind => Err(WireError::Place {
                    kind,
                    place: "before a greeting",
                }),
            })
            .await;
        let admitted = match hello {
            Ok(hello) => self.roster.admit(shard.index, &hello).map(|()| hello),
            Err(LinkError::Wire(error)) => {
                self.roster.on_rejected();
                shard.metrics.plane.malformed.add(1);
                Err(Reject {
                    reason: RejectReason::Protocol,
                    message: error.to_string(),
                })
            }
            Err(error) => return Err(error.into()),
        };
        let hello = match admitted {
            Ok(hello) => hello,
            Err(reject) => {
                reject.encode(link.outbox());
                link.flush().await?;
                return Err(reject.into());
            }
        };
        link.limit_frames(wire::BODY_BYTES_MAX);
        let mut workers: Vec<WorkerId> = hello.workers.iter().map(|w| w.worker).collect();
        workers.sort_unstable();
        let peer = Rc::new(Peer {
            instance: hello.instance,
            name: hello.name,
            workers,
            same_clock: same_clock(hello.clock, clock_id()),
            outbox: RefCell::default(),
            unsent: Cell::new(0),
            waker: RefCell::default(),
            leaving: Cell::new(false),
        });
        Welcome {
            instance: self.roster.instance,
            shard: shard.index,
            wants_kv: feeds_index(shard.index),
            deadline_ms: wire::deadline_ms(limits.deadline),
            name: self.roster.name.clone(),
        }
        .encode(link.outbox());
        // The shorter patience counts, as at the other end.
        let theirs = Duration::from_millis(hello.deadline_ms.into());
        link.set_deadline(limits.deadline.min(theirs.max(Duration::from_millis(10))));
        for worker in &peer.workers {
            self.peers.borrow_mut()[worker.index()] = Some(peer.clone());
        }
        Ok((link, peer))
    }
}

#[derive(Debug, thiserror::Error)]
enum GreetError {
    #[error("{0}")]
    Link(#[from] LinkError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Rejected(#[from] Reject),
}

impl Peer {
    /// Whether it runs `worker`.
    #[inline]
    pub(crate) fn runs(&self, worker: WorkerId) -> bool {
        self.workers.binary_search(&worker).is_ok()
    }

    /// Whether its times compare with ours.
    pub(crate) fn has_our_clock(&self) -> bool {
        self.same_clock
    }

    /// Checks that it runs the worker that it speaks of.
    fn check(&self, kind: FrameKind, worker: WorkerId) -> Result<(), WireError> {
        if self.runs(worker) {
            return Ok(());
        }
        Err(WireError::NotIts { kind, worker })
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }
}

/// One connection at work. Dropping it gives the workers' seats back and ends their streams.
struct Connection {
    remote: Rc<WorkerLinks>,
    workers: Rc<Workers>,
    peer: Rc<Peer>,
    link: Link,
    pass: PassFrame,
    /// The first `received` of them are not applied yet; the others lend their memory.
    deltas: Vec<KvDelta>,
    received: usize,
    received_ops: usize,
    /// Ranks whose snapshot was requested and has not arrived.
    unsure: Vec<RankId>,
}

impl Connection {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LinkError> {
        let turned = self.turn(cx);
        // Also if it was the last turn.
        let more = self.workers.write_some();
        match turned {
            Err(error) => {
                while self.workers.write_some() {}
                Poll::Ready(error)
            }
            Ok(again) => {
                if again || more {
                    yield_turn(cx);
                }
                Poll::Pending
            }
        }
    }

    /// One look at everything. Returns whether there may be more at once.
    fn turn(&mut self, cx: &mut Context<'_>) -> Result<bool, LinkError> {
        // First of all: what happens below may put something into the outbox.
        *self.peer.waker.borrow_mut() = Some(cx.waker().clone());
        let mut more = true;
        for _ in 0..READS_PER_TURN {
            // First: the read that brought the greeting may have brought more with it.
            self.take_frames()?;
            match self.link.poll_read(cx) {
                Poll::Ready(read) => read?,
                Poll::Pending => {
                    more = false;
                    break;
                }
            }
        }
        self.link.poll_time(cx)?;
        let outbox = self.link.outbox();
        let mut fresh = self.peer.outbox.borrow_mut();
        if outbox.is_empty() {
            std::mem::swap(outbox, &mut fresh);
        } else {
            outbox.append(&mut fresh);
        }
        drop(fresh);
        if let Poll::Ready(written) = self.link.poll_write(cx) {
            written?;
        }
        let unsent = self.link.unsent();
        self.peer.unsent.set(unsent);
        // Requests stop at the bound, with one beyond it; stops, kills and credit continue.
        if unsent > self.remote.limits.unsent_bytes_max + UNSENT_SLACK_BYTES {
            return Err(LinkError::Unread { bytes: unsent });
        }
        Ok(more)
    }

    fn take_frames(&mut self) -> Result<(), WireError> {
        let taken = self.take_each_frame();
        self.apply_deltas();
        taken
    }

    fn take_each_frame(&mut self) -> Result<(), WireError> {
        while let Some((kind, body)) = self.link.next_frame()? {
            let (workers, roster) = (&self.workers, &self.remote.roster);
            match kind {
                FrameKind::Pass => {
                    wire::decode_pass(body, &mut self.pass)?;
                    workers.on_frame(&self.pass, Some(&self.peer));
                }
                FrameKind::Kv | FrameKind::KvSnapshot => {
                    if self.received == self.deltas.len() {
                        self.deltas.push(KvDelta::default());
                    }
                    let delta = &mut self.deltas[self.received];
                    let snapshot = wire::decode_kv(kind, body, delta)?;
                    self.peer.check(kind, delta.rank.worker)?;
                    if snapshot {
                        let snapshot = std::mem::take(delta);
                        self.apply_deltas();
                        self.remote.roster.fleets().resync(&snapshot);
                        self.unsure.retain(|&unsure| unsure != snapshot.rank);
                        continue;
                    }
                    self.received += 1;
                    self.received_ops += delta.ops.len();
                    if self.received_ops >= DELTA_OPS || self.received == DELTAS_MAX {
                        self.apply_deltas();
                    }
                }
                FrameKind::Ready => {
                    let (worker, ready) = wire::decode_ready(body)?;
                    self.peer.check(kind, worker)?;
                    roster.on_ready(self.peer.instance, worker, ready);
                }
                FrameKind::Load => {
                    let mut of_others = Ok(());
                    wire::decode_loads(body, |load| {
                        match self.peer.check(kind, load.rank.worker) {
                            Ok(()) => roster.on_load(load),
                            Err(error) => of_others = Err(error),
                        }
                    })?;
                    of_others?;
                }
                FrameKind::Ping => {}
                FrameKind::Bye => {
                    self.peer.leaving.set(true);
                    for &worker in &self.peer.workers {
                        roster.on_ready(self.peer.instance, worker, false);
                    }
                }
                kind => {
                    let place = "among answers of a worker";
                    return Err(WireError::Place { kind, place });
                }
            }
        }
        Ok(())
    }

    /// Applies the received deltas together: engines change a few blocks per pass, and each change
    /// would wait for memory by itself.
    fn apply_deltas(&mut self) {
        let fleet = self.remote.roster.fleets();
        let received = &self.deltas[..self.received];
        if received.len() > 1 {
            for delta in received {
                fleet.expect_kv(delta);
            }
        }
        for delta in received {
            let rank = delta.rank;
            if !self.unsure.contains(&rank) && fleet.on_kv(delta).gap {
                tracing::warn!(%rank, "a KV delta is missing");
                if slipstream_base::planted!("lost-resync") {
                    continue;
                }
                self.unsure.push(rank);
                let resync = ToWorker::Resync { rank };
                wire::encode_to_worker(&resync, &mut self.peer.outbox.borrow_mut());
            }
        }
        self.received = 0;
        self.received_ops = 0;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let peer = &self.peer;
        for worker in &peer.workers {
            let mut peers = self.remote.peers.borrow_mut();
            if peers[worker.index()]
                .as_ref()
                .is_some_and(|p| Rc::ptr_eq(p, peer))
            {
                peers[worker.index()] = None;
            }
        }
        let roster = &self.remote.roster;
        roster.on_lost(self.workers.shard.index, peer.instance, &peer.workers);
        if slipstream_base::planted!("lost-worker-unseen") {
            return;
        }
        self.workers
            .on_workers_gone(|worker| peer.workers.contains(&worker));
    }
}
