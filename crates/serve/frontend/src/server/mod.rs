//! Threads and sockets: one acceptor, and a shard on each of a few threads.

mod figures;
mod handle;
mod manage;
pub(crate) mod plane;
mod rates;
mod routes;
mod series;
#[cfg(feature = "sim")]
pub mod sim;
mod ui;

pub use crate::door::listen::{Bound, StartError};

use std::cell::Cell;
use std::error::Error;
use std::net::{SocketAddr, TcpListener as StdListener, TcpStream as StdStream};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::{HttpService, service_fn};
use hyper_util::rt::TokioTimer;
use slipstream_base::width::to_u8;
use slipstream_metrics::Registry;
use slipstream_planes::clock::monotonic_ns;
use socket2::{SockFilter, SockRef};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;

use crate::door::budget::{Addresses, Budget, ConnectionPermit};
use crate::door::connection::{Connection, Expired};
use crate::door::helpers::Helpers;
use crate::door::io::ClientIo;
use crate::door::limits::Limits;
use crate::door::listen::{BACKLOG, Sharing};
use crate::door::meter::Meter;
use crate::door::metrics::{FrontendTotals, Page, ShardMetrics, vllm_labels};
use crate::door::service::Service;
use crate::door::shard::{LogPace, Shard, Shared};
use crate::server::handle::handle;
use crate::server::plane::{Plane, ShardPlane};
use crate::tokens::response_store::ResponseStore;

/// Sockets that may wait for a shard to take them. A shard that is this far behind is not helped by
/// more.
const QUEUED_SOCKETS_MAX: usize = 1024;

/// A running frontend. Dropping it without [`Frontend::shutdown`] leaves its threads running.
pub struct Frontend {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    threads: Vec<JoinHandle<()>>,
    /// Until connections are accepted.
    closed: Option<ClosedDoor>,
    totals: FrontendTotals,
}

/// State needed to accept connections.
struct ClosedDoor {
    bound: Bound,
    doors: Vec<ShardDoor>,
    budget: Arc<Budget>,
    stopped: watch::Receiver<bool>,
}

/// A client's socket on its way to a shard.
struct AcceptedSocket {
    socket: StdStream,
    permit: ConnectionPermit,
}

/// One shard's way in: sockets, and how many it holds.
struct ShardDoor {
    sockets: mpsc::Sender<AcceptedSocket>,
    open: Open,
}

/// Connections that are open.
#[derive(Clone, Default)]
struct Open {
    /// At one shard.
    own: Arc<AtomicU64>,
    /// At all shards.
    all: Arc<AtomicU64>,
}

impl Open {
    fn at_another_shard(&self) -> Open {
        Open {
            own: Arc::default(),
            all: self.all.clone(),
        }
    }

    fn add(&self) {
        self.all.fetch_add(1, Relaxed);
        self.own.fetch_add(1, Relaxed);
    }

    fn sub(&self) {
        self.own.fetch_sub(1, Relaxed);
        self.all.fetch_sub(1, Relaxed);
    }
}

impl Frontend {
    /// Starts one shard per element of `planes`; adds their metrics to `registry`, which `/metrics` then
    /// encodes as a whole. Connections are accepted after [`Frontend::open`].
    ///
    /// # Errors
    /// [`StartError::Thread`].
    ///
    /// # Panics
    /// If there are more than 256 planes: addresses have 8 bits for the shard.
    pub fn start(
        bound: Bound,
        service: Service,
        planes: Vec<ShardPlane>,
        mut registry: Registry,
    ) -> Result<Frontend, StartError> {
        let metrics: Vec<_> = planes
            .iter()
            .map(|_| Arc::new(ShardMetrics::new()))
            .collect();
        let budget = Budget::new(service.limits);
        let page = Page {
            shards: metrics.clone(),
            budget: budget.clone(),
            faults: service.faults.clone(),
            management: service.management.clone(),
            labels: vllm_labels(&service),
        };
        for collector in page.collectors() {
            registry.register_collector(collector);
        }
        let answers = Arc::new(ResponseStore::new(service.limits.memory_max));
        let shared = Shared {
            service: Arc::new(service),
            registry: Arc::new(registry),
            budget: budget.clone(),
            helpers: Helpers::start(planes.len())?,
        };
        let totals = FrontendTotals(metrics.clone());
        let (stop, stopped) = watch::channel(false);

        let mut threads = Vec::new();
        let mut doors = Vec::new();
        let open = Open::default();
        for (index, (plane, metrics)) in planes.into_iter().zip(metrics).enumerate() {
            let number = to_u8(index);
            let (sockets, accepted) = mpsc::channel(QUEUED_SOCKETS_MAX);
            let open = open.at_another_shard();
            doors.push(ShardDoor {
                sockets,
                open: open.clone(),
            });
            let (shared, answers) = (shared.clone(), answers.clone());
            let stopped = stopped.clone();
            let linger = if bound.is_shared() {
                LINGER
            } else {
                Duration::ZERO
            };
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let thread = std::thread::Builder::new()
                .name(format!("shard-{index}"))
                .spawn(move || {
                    // Built here: a shard holds `Rc`s and never leaves its thread.
                    let shard = Rc::new(Shard::new(number, shared, metrics));
                    let plane = Plane::new(shard, answers, plane);
                    let run = run_shard(plane, accepted, open, stopped, linger);
                    LocalSet::new().block_on(&runtime, run);
                })?;
            threads.push(thread);
        }

        Ok(Frontend {
            address: bound.address,
            stop,
            threads,
            closed: Some(ClosedDoor {
                bound,
                doors,
                budget,
                stopped,
            }),
            totals,
        })
    }

    /// Accepts connections from now on.
    ///
    /// # Errors
    /// [`StartError::Thread`], and [`StartError::Share`]: another process has bound the address alone since.
    pub fn open(&mut self) -> Result<(), StartError> {
        let Some(closed) = self.closed.take() else {
            return Ok(()); // it is open
        };
        let Bound {
            socket,
            sharing,
            listen,
            ..
        } = closed.bound;
        if sharing == Sharing::Port {
            let share = |source| StartError::Share { listen, source };
            socket.listen(BACKLOG).map_err(share)?;
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let acceptor = Acceptor {
            doors: closed.doors,
            budget: closed.budget,
            addresses: Addresses::default(),
            log: LogPace::default(),
        };
        let accept = acceptor.run(socket.into(), sharing, closed.stopped);
        let thread = std::thread::Builder::new()
            .name("acceptor".into())
            .spawn(move || runtime.block_on(accept))?;
        self.threads.push(thread);
        Ok(())
    }

    /// The address served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sums over the shards.
    pub fn totals(&self) -> FrontendTotals {
        self.totals.clone()
    }

    /// Stops accepting, lets open requests finish for up to the service's `drain` time, and waits
    /// for all threads.
    pub fn shutdown(self) {
        drop(self.closed);
        // Receivers are gone only if every thread has ended already.
        let _ = self.stop.send(true);
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a frontend thread ended by panic");
            }
        }
    }
}

/// Time in which handshakes end that have begun with a socket that is about to close. Longer than the round
/// trip of most clients, and shorter than the second after which they repeat a SYN that was dropped.
const HANDSHAKES: Duration = Duration::from_millis(200);

/// Accepts, and hands each socket to the shard that holds the fewest.
struct Acceptor {
    doors: Vec<ShardDoor>,
    budget: Arc<Budget>,
    addresses: Addresses,
    log: LogPace,
}

impl Acceptor {
    async fn run(
        mut self,
        socket: StdListener,
        sharing: Sharing,
        mut stopped: watch::Receiver<bool>,
    ) {
        let listener = match TcpListener::from_std(socket) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "the listening socket cannot be polled");
                return;
            }
        };
        let mut complain_after = Instant::now();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = stopped.changed() => break,
            };
            match accepted {
                Ok((stream, from)) => self.admit(stream, from),
                Err(error) => {
                    // Out of descriptors, most often: give those in use time to be closed. A closed
                    // handshake (ECONNABORTED) costs one such pause, which has no effect.
                    if Instant::now() >= complain_after {
                        complain_after = Instant::now() + Duration::from_secs(1);
                        tracing::warn!(
                            %error,
                            "accept failed; trying again every 20 ms (`slipstream doctor` shows how \
                             many files this process may open)"
                        );
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        if sharing == Sharing::Port {
            self.leave(&listener).await;
        }
    }

    /// Accepts connections that would be reset with the listening socket: those in its queue, and those whose
    /// handshake has begun. The kernel gives new ones to other processes afterwards.
    async fn leave(&mut self, listener: &TcpListener) {
        if !hands_on_connections() {
            match SockRef::from(listener).attach_filter(&NO_SYN) {
                Ok(()) => {
                    let until = tokio::time::Instant::now() + HANDSHAKES;
                    while let Ok(accepted) = tokio::time::timeout_at(until, listener.accept()).await
                    {
                        match accepted {
                            Ok((stream, from)) => self.admit(stream, from),
                            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
                        }
                    }
                }
                Err(error) => tracing::warn!(
                    %error,
                    "connections that are made at this moment may be reset: the kernel takes no filter for \
                     them; set net.ipv4.tcp_migrate_req=1"
                ),
            }
        }
        // Not by the poller, which may not have seen the last ones yet.
        while let Ok((socket, from)) = SockRef::from(listener).accept() {
            let stream = socket
                .set_nonblocking(true)
                .and_then(|()| TcpStream::from_std(socket.into()));
            if let (Ok(stream), Some(from)) = (stream, from.as_socket()) {
                self.admit(stream, from);
            }
        }
    }

    fn admit(&mut self, stream: TcpStream, from: SocketAddr) {
        match self.budget.connect(self.addresses.of(from.ip())) {
            Ok(permit) => assign_to_shard(stream, permit, &self.doors),
            Err(limit) => {
                if let Some(more) = self.log.allows(monotonic_ns()) {
                    tracing::warn!(
                        "closed a connection from {from}: {limit} is reached ({more} more since \
                         the last such line)"
                    );
                }
            }
        }
    }
}

/// Whether the kernel gives the connections of a closed socket to others that share its port (Linux 5.14).
fn hands_on_connections() -> bool {
    let value = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req");
    value.is_ok_and(|value| value.trim() == "1")
}

/// A filter that drops packets which open a connection: SYN is set and ACK is not. Filters of TCP sockets see
/// the TCP header first; its byte 13 has the flags (RFC 9293, section 3.1).
const NO_SYN: [SockFilter; 5] = [
    SockFilter::new(BPF_LOAD_BYTE, 0, 0, 13),
    SockFilter::new(BPF_AND, 0, 0, 0x12),
    SockFilter::new(BPF_JUMP_EQUAL, 0, 1, 0x02),
    SockFilter::new(BPF_RETURN, 0, 0, 0),
    SockFilter::new(BPF_RETURN, 0, 0, u32::MAX),
];

/// `BPF_LD | BPF_B | BPF_ABS`, `BPF_ALU | BPF_AND | BPF_K`, `BPF_JMP | BPF_JEQ | BPF_K`, `BPF_RET | BPF_K`
/// (linux/bpf_common.h).
const BPF_LOAD_BYTE: u16 = 0x30;
const BPF_AND: u16 = 0x54;
const BPF_JUMP_EQUAL: u16 = 0x15;
const BPF_RETURN: u16 = 0x06;

fn assign_to_shard(stream: TcpStream, permit: ConnectionPermit, doors: &[ShardDoor]) {
    let door = doors
        .iter()
        .min_by_key(|door| door.open.own.load(Relaxed))
        .expect("a frontend has at least one shard");
    // `into_std` moves the socket out of this thread's poller, into the shard's.
    let Ok(socket) = stream.into_std() else {
        return;
    };
    door.open.add();
    if door
        .sockets
        .try_send(AcceptedSocket { socket, permit })
        .is_err()
    {
        door.open.sub();
        tracing::warn!("a shard is {QUEUED_SOCKETS_MAX} sockets behind; connection closed");
    }
}

/// When a shutdown that may take `drain` cuts the streams that are still open, after its begin, and the time that
/// clients then have to take the error. Both are part of `drain`: a service manager kills the process after it.
fn last_moments(drain: Duration) -> (Duration, Duration) {
    let farewell = (drain / 8).clamp(FAREWELL_MIN, FAREWELL_MAX);
    (drain.saturating_sub(farewell), farewell)
}

/// Limits of the time that clients have to take that error. At least: for a drain of no time as well.
const FAREWELL_MIN: Duration = Duration::from_millis(50);
const FAREWELL_MAX: Duration = Duration::from_secs(1);

/// Time for which an idle connection stays open at shutdown if another process serves the address. A request
/// that the client is just sending is then answered, with `Connection: close`, instead of reset.
const LINGER: Duration = Duration::from_secs(5);

async fn run_shard(
    plane: Plane,
    mut accepted: mpsc::Receiver<AcceptedSocket>,
    open: Open,
    mut stopped: watch::Receiver<bool>,
    linger: Duration,
) {
    let shard = plane.shard().clone();
    let meter = shard.meter.clone();
    let tasks = plane.start_tasks();
    // Connections finish what they have begun; the deadline is for clients that do not.
    let mut deadline = None;
    let (time_left, farewell) = last_moments(shard.service.limits.drain);
    let drain = || {
        shard.draining.set(true);
        shard.service.management.look_again();
        Some(tokio::time::Instant::now() + time_left)
    };
    let unseen = stopped.clone();
    loop {
        let stream = tokio::select! {
            stream = accepted.recv() => stream,
            _ = stopped.changed(), if deadline.is_none() => {
                deadline = drain();
                continue;
            }
        };
        // The acceptor hands over the last ones after the stop.
        let Some(AcceptedSocket { socket, permit }) = stream else {
            break;
        };
        let (plane, open, stopped) = (plane.clone(), open.clone(), unseen.clone());
        meter.spawn(async move {
            let shard = plane.shard();
            shard.metrics.connections.accepted.add(1);
            shard.metrics.connections.open.add(1);
            if let Ok(stream) = TcpStream::from_std(socket) {
                let connection = Connection::new(permit.client.clone());
                serve_connection(&plane, &connection, stream, stopped, linger).await;
            }
            drop(permit);
            shard.metrics.connections.open.sub(1);
            open.sub();
        });
    }
    let deadline = deadline.or_else(drain).expect("one of both");
    // Of all shards: a worker whose connection to one of them is gone takes no requests of the others either.
    while open.all.load(Relaxed) > 0 && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let cut = plane.end_all();
    if cut > 0 {
        tracing::warn!("{cut} requests were cut: they took longer than `live.drain_timeout_s`");
        let end = tokio::time::Instant::now() + farewell;
        while open.own.load(Relaxed) > 0 && tokio::time::Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    for task in tasks {
        task.abort();
    }
}

/// Requests that one HTTP/2 connection may have open; its client waits with more.
const HTTP2_STREAMS_MAX: u32 = 1024;

/// First bytes of an HTTP/2 client (RFC 9113, section 3.4), as many as distinguish it: no method
/// of HTTP/1 begins so.
const HTTP2_PREFACE: &[u8] = b"PRI * HT";

/// Whether the client speaks HTTP/2, by its first bytes, which stay unread. `None` if none came in
/// time.
async fn speaks_http2(stream: &TcpStream, patience: Duration) -> Option<bool> {
    let mut first = [0; HTTP2_PREFACE.len()];
    let look = async {
        let mut seen = 0;
        loop {
            let peeked = stream.peek(&mut first).await.ok()?;
            if peeked == 0 {
                return None;
            }
            if first[..peeked] != HTTP2_PREFACE[..peeked] {
                return Some(false);
            }
            if peeked == HTTP2_PREFACE.len() {
                return Some(true);
            }
            if peeked == seen {
                // Seen bytes wake a peek again and again: others get their turn.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            seen = peeked;
        }
    };
    tokio::time::timeout(patience, look).await.ok().flatten()
}

/// Waits until the server has been shutting down for `linger`.
async fn stopped_for(mut stopped: watch::Receiver<bool>, linger: Duration) {
    let _ = stopped.changed().await; // an error: the server is gone
    tokio::time::sleep(linger).await;
}

/// Answer that waits for one HTTP/2 stream's window to open, bytes.
const HTTP2_SEND_BYTES: usize = 64 << 10;

/// At shutdown, time without a stream after which an HTTP/2 connection gets GOAWAY.
const GOAWAY_REST: Duration = Duration::from_secs(1);

/// Time that the client of an idle connection has to close it.
const CLOSE_GRACE: Duration = Duration::from_secs(1);

/// Runs what an HTTP/2 connection spawns on its shard's thread.
#[derive(Clone)]
struct OnThisThread(Meter);

impl<F: Future + 'static> hyper::rt::Executor<F> for OnThisThread {
    fn execute(&self, future: F) {
        self.0.spawn(async move {
            future.await;
        });
    }
}

async fn serve_connection(
    plane: &Plane,
    client: &Rc<Connection>,
    stream: TcpStream,
    stopped: watch::Receiver<bool>,
    linger: Duration,
) {
    let shard = plane.shard();
    // A small response must not wait for the client's delayed ACK.
    if stream.set_nodelay(true).is_err() {
        return; // the peer has gone
    }
    let Limits {
        write_timeout,
        read_timeout,
        header_bytes_max,
        ..
    } = shard.service.limits;
    let cut = {
        let shard = shard.clone();
        move || shard.metrics.streams_cut_slow.add(1)
    };
    let spoken = tokio::select! {
        spoken = speaks_http2(&stream, read_timeout) => spoken,
        () = stopped_for(stopped.clone(), linger) => return, // nothing was asked yet
    };
    let Some(http2) = spoken else {
        return; // it said nothing, or has gone
    };
    let io = ClientIo::new(stream, client.clone(), write_timeout, cut);
    // Boxed: a task has room for the largest of its states, and most connections are idle.
    if http2 {
        Box::pin(serve_http2(plane, client, io, stopped, linger)).await;
        return;
    }
    let service = {
        let (plane, client) = (plane.clone(), client.clone());
        service_fn(move |request| handle(plane.clone(), client.clone(), request))
    };
    let limits = Http1Limits {
        read_timeout,
        header_bytes_max: header_bytes_max as usize,
        buffers_kept: BUFFERS_KEPT,
        linger,
    };
    if let Err(error) = serve_http1(io, client, service, &limits, stopped).await {
        tracing::debug!(%error, "connection ended");
    }
}

/// Time for which an idle HTTP/1 connection keeps its buffers, 16 KiB. Those of most are idle for longer, or hardly
/// ever. Memory of a process is that of the connections that had them at one time, so it is short; to take
/// new ones costs a few µs.
const BUFFERS_KEPT: Duration = Duration::from_millis(250);

/// Idle HTTP/1 connections of a shard that keep their buffers. Further ones give them back at once: what thousands of
/// them took for a moment would stay in the heap, as holes between the parts that connections keep.
const BUFFERS_KEPT_MAX: u32 = 512;

thread_local! {
    /// Idle HTTP/1 connections of this shard that keep their buffers.
    static BUFFERS_KEPT_NOW: Cell<u32> = const { Cell::new(0) };
}

/// A place among [`BUFFERS_KEPT_MAX`].
struct KeptBuffers;

impl KeptBuffers {
    fn take() -> Option<KeptBuffers> {
        let now = BUFFERS_KEPT_NOW.get();
        if now >= BUFFERS_KEPT_MAX {
            return None;
        }
        BUFFERS_KEPT_NOW.set(now + 1);
        Some(KeptBuffers)
    }
}

impl Drop for KeptBuffers {
    fn drop(&mut self) {
        BUFFERS_KEPT_NOW.set(BUFFERS_KEPT_NOW.get() - 1);
    }
}

/// Of an HTTP/1 connection.
struct Http1Limits {
    read_timeout: Duration,
    header_bytes_max: usize,
    buffers_kept: Duration,
    linger: Duration,
}

/// Serves HTTP/1 until the connection ends.
async fn serve_http1<S>(
    mut io: ClientIo,
    client: &Connection,
    mut service: S,
    limits: &Http1Limits,
    stopped: watch::Receiver<bool>,
) -> hyper::Result<()>
where
    S: HttpService<Incoming, ResBody: 'static, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
    <S::ResBody as Body>::Error: Into<Box<dyn Error + Send + Sync>>,
{
    // When it became idle the last time that its buffers were given back.
    let mut rested = None;
    loop {
        let mut stopped = stopped.clone();
        // Boxed, and dropped here: while it is idle, the connection keeps none of it.
        let active = Box::pin(serve_until_rest(
            io,
            client,
            service,
            limits,
            rested,
            stopped.clone(),
        ))
        .await;
        let Some(parts) = active? else {
            return Ok(());
        };
        (io, service) = (parts.io, parts.service);
        rested = client.idle_since();
        if !parts.read_buf.is_empty() {
            // A part of a head.
            io.unread(parts.read_buf);
            continue;
        }
        tokio::select! {
            () = io.readable() => {}
            _ = stopped.changed() => {}
            // As for a head that does not come.
            () = tokio::time::sleep(limits.read_timeout.saturating_sub(limits.buffers_kept)) => return Ok(()),
        }
    }
}

/// Serves HTTP/1 until the connection ends (`None`), or is idle for longer than it keeps its buffers.
async fn serve_until_rest<S>(
    io: ClientIo,
    client: &Connection,
    service: S,
    limits: &Http1Limits,
    rested: Option<u64>,
    mut stopped: watch::Receiver<bool>,
) -> hyper::Result<Option<http1::Parts<ClientIo, S>>>
where
    S: HttpService<Incoming, ResBody: 'static, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
    <S::ResBody as Body>::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.read_timeout)
        // Bounds both the bytes of a head and the buffer of a slow reader.
        .max_buf_size(limits.header_bytes_max.max(8192))
        .serve_connection(io, service);
    let ended = tokio::select! {
        outcome = until_rest(&mut connection, client, limits.buffers_kept, rested, KeptBuffers::take) => outcome,
        _ = stopped.changed() => Some(tokio::select! {
            outcome = &mut connection => outcome,
            () = client.idle_for(limits.linger) => {
                Pin::new(&mut connection).graceful_shutdown();
                (&mut connection).await
            }
        }),
    };
    match ended {
        Some(outcome) => outcome.map(|()| None),
        None => Ok(Some(connection.into_parts())),
    }
}

/// Serves HTTP/2 until the connection ends.
async fn serve_http2(
    plane: &Plane,
    client: &Rc<Connection>,
    io: ClientIo,
    mut stopped: watch::Receiver<bool>,
    linger: Duration,
) {
    let shard = plane.shard();
    let service = {
        let (plane, client) = (plane.clone(), client.clone());
        service_fn(move |request| handle(plane.clone(), client.clone(), request))
    };
    let connection = http2::Builder::new(OnThisThread(shard.meter.clone()))
        .timer(TokioTimer::new())
        .max_header_list_size(shard.service.limits.header_bytes_max.max(8192))
        .max_concurrent_streams(HTTP2_STREAMS_MAX)
        .max_send_buf_size(HTTP2_SEND_BYTES)
        .serve_connection(io, service);
    tokio::pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        why = client.expired(&shard.service.limits) => {
            let count = match why {
                Expired::Idle => &shard.metrics.connections.idle,
                Expired::Unread => &shard.metrics.connections.unread,
            };
            count.add(1);
            if why == Expired::Idle {
                connection.as_mut().graceful_shutdown();
                let _ = tokio::time::timeout(CLOSE_GRACE, connection).await;
            }
            return;
        }
        _ = stopped.changed() => {
            // Some clients take GOAWAY for the end of streams, also of those whose end they have not read yet.
            let most = if linger.is_zero() { linger } else { shard.service.limits.drain / 2 };
            let rest = until_rest(&mut connection, client, GOAWAY_REST, None, || Some(()));
            let ended = tokio::time::timeout(most, rest).await;
            if let Ok(Some(outcome)) = ended {
                outcome
            } else {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "connection ended");
    }
}

/// Drives a connection until it ends, or has been idle for `kept` (`None`), or idle at all if `place` has none for it.
/// That does not count again if it has been idle since `rested`.
async fn until_rest<C: Future + Unpin, P>(
    connection: &mut C,
    client: &Connection,
    kept: Duration,
    rested: Option<u64>,
    place: impl Fn() -> Option<P>,
) -> Option<C::Output> {
    let mut timer = std::pin::pin!(tokio::time::sleep(kept));
    // Requests do not touch it: it is set for the first time that may be the end, and looked at then.
    let mut is_set = false;
    let mut placed = None;
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(outcome) = Pin::new(&mut *connection).poll(cx) {
            return Poll::Ready(Some(outcome));
        }
        loop {
            let Some(since_ns) = client.idle_since().filter(|&since| Some(since) != rested) else {
                placed = None;
                return Poll::Pending;
            };
            if placed.is_none() {
                placed = place();
            }
            let idle = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
            if idle >= kept || placed.is_none() {
                return Poll::Ready(None);
            }
            if !is_set {
                is_set = true;
                let end = tokio::time::Instant::now() + kept.saturating_sub(idle);
                timer.as_mut().reset(end);
            }
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            is_set = false;
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use http_body_util::{BodyExt, Full};
    use hyper::{Request, Response};

    use super::*;

    /// Size of the state of a call of `_of`.
    fn size_of_call<A, F>(_of: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_without_a_request_keeps_no_state_of_one() {
        type Arguments = (
            &'static Plane,
            &'static Rc<Connection>,
            TcpStream,
            watch::Receiver<bool>,
        );
        let bytes = size_of_call(|(plane, client, stream, stopped): Arguments| {
            serve_connection(plane, client, stream, stopped, LINGER)
        });
        type Request1 = (Plane, Rc<Connection>, Request<Incoming>);
        let of_request =
            size_of_call(|(plane, client, request): Request1| handle(plane, client, request));
        // Connections of both protocols take more than this, and the handling of a request takes most.
        assert!(
            bytes <= 1536 && bytes < of_request,
            "{bytes} bytes, {of_request} per request"
        );
    }

    #[test]
    fn few_idle_connections_keep_their_buffers() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let _context = runtime.enter();
        let is_kept = |connection: &mut Pin<Box<dyn Future<Output = Option<()>>>>| {
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            connection.as_mut().poll(&mut cx).is_pending()
        };
        let idle = || {
            let client = Connection::new(Arc::default());
            client.wire().set_flushed(true);
            drop(client.begin(monotonic_ns()));
            client
        };
        let serve = |client: Rc<Connection>| -> Pin<Box<dyn Future<Output = Option<()>>>> {
            Box::pin(async move {
                let mut open = std::future::pending();
                let hour = Duration::from_secs(3600);
                until_rest(&mut open, &client, hour, None, KeptBuffers::take).await
            })
        };
        let clients: Vec<_> = (0..BUFFERS_KEPT_MAX).map(|_| idle()).collect();
        let mut kept: Vec<_> = clients.iter().cloned().map(serve).collect();
        assert!(kept.iter_mut().all(is_kept));
        // One too many, until another one has a request, or ends.
        assert!(!is_kept(&mut serve(idle())));
        let request = clients[0].begin(monotonic_ns());
        assert!(is_kept(&mut kept[0]));
        assert!(is_kept(&mut serve(idle())), "the first has a request");
        drop(request);
        assert!(is_kept(&mut kept[0]));
        assert!(!is_kept(&mut serve(idle())), "it is idle again");
        drop(kept.pop());
        assert!(is_kept(&mut serve(idle())), "the last has ended");
    }

    #[test]
    fn a_drain_ends_within_its_time() {
        for drain in [0, 40, 50, 200, 1000, 8000, 30_000, 600_000].map(Duration::from_millis) {
            let (streams, clients) = last_moments(drain);
            assert!(streams + clients <= drain.max(FAREWELL_MIN), "{drain:?}");
            assert!(
                streams + clients >= drain
                    && streams >= drain.mul_f64(0.7).saturating_sub(FAREWELL_MIN)
            );
            assert!(clients >= FAREWELL_MIN && clients <= FAREWELL_MAX);
        }
    }

    /// Answers each request with its path and the length of its body, on one connection that gives its buffers
    /// back after every answer.
    fn answers(portions: &[&[u8]], count: usize) -> Vec<String> {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let mut there = StdStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, _) = listener.accept().unwrap();
        here.set_nonblocking(true).unwrap();
        let serving = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let client = Connection::new(Arc::default());
                let of_request = client.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let owner = of_request.begin(monotonic_ns());
                    async move {
                        let path = request.uri().path().to_owned();
                        let length = request.into_body().collect().await?.to_bytes().len();
                        drop(owner);
                        let text = format!("{path} {length}\n");
                        Ok::<_, hyper::Error>(Response::new(Full::<bytes::Bytes>::from(text)))
                    }
                });
                let stream = TcpStream::from_std(here).unwrap();
                let io = ClientIo::new(stream, client.clone(), Duration::from_secs(30), || {});
                let limits = Http1Limits {
                    read_timeout: Duration::from_secs(30),
                    header_bytes_max: 16 << 10,
                    buffers_kept: Duration::ZERO,
                    linger: Duration::ZERO,
                };
                let (_stop, stopped) = watch::channel(false);
                serve_http1(io, &client, service, &limits, stopped).await
            })
        });
        let mut got = String::new();
        let mut sent = Vec::new();
        for portion in portions {
            there.write_all(portion).unwrap();
            sent.extend_from_slice(portion);
            // A portion that ends a request is followed by the next one once all are answered.
            let text = std::str::from_utf8(&sent).unwrap();
            let due = if text.ends_with("\r\n\r\n") {
                text.matches(" HTTP/1.1").count()
            } else {
                0
            };
            while got.matches(" 200 OK").count() < due || (due > 0 && !got.ends_with('\n')) {
                let mut piece = [0; 4096];
                let length = there.read(&mut piece).unwrap();
                assert!(length > 0, "closed after {got}");
                got += std::str::from_utf8(&piece[..length]).unwrap();
            }
        }
        while !got.ends_with('\n') || got.matches(" 200 OK").count() < count {
            let mut piece = [0; 4096];
            let length = there.read(&mut piece).unwrap();
            assert!(length > 0, "closed after {got}");
            got += std::str::from_utf8(&piece[..length]).unwrap();
        }
        drop(there);
        serving.join().unwrap().unwrap();
        let lines = got.lines().filter(|line| line.starts_with('/'));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn a_connection_that_gave_its_buffers_back_answers_further_requests() {
        let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").into_bytes();
        let (one, two, three) = (get("/1"), get("/2"), get("/3"));
        assert_eq!(answers(&[&one, &two, &three], 3), ["/1 0", "/2 0", "/3 0"]);
        // Heads that come in parts, also with the end of the request before.
        let both = [&one[..], &two[..]].concat();
        for cut in 1..both.len() {
            let found = answers(&[&both[..cut], &both[cut..], &three], 3);
            assert_eq!(found, ["/1 0", "/2 0", "/3 0"], "{cut}");
        }
        let body = "POST /4 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello";
        assert_eq!(answers(&[&one, body.as_bytes()], 2), ["/1 0", "/4 5"]);
    }
}
