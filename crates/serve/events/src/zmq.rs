//! The ZeroMQ bus: PUB sockets that bind, ROUTER sockets that replay, and a SUB that reads.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpListener as StdListener, ToSocketAddrs};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use slipstream_base::width::{to_u32, to_usize};
use slipstream_config::cluster::EventsConfig;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::batch::{Batch, EventKind, RankTopics};
use crate::bus::{Bus, BusCounters, Event, add};
use crate::zmtp::{self, Connection, SMALL_FRAME_MAX, ZmtpError};

/// Limit of subscribers per socket; further ones are rejected and counted.
const SUBSCRIBERS_MAX: usize = 256;

/// Limit of topics per subscriber.
const FILTERS_MAX: usize = 1024;

/// Time limit of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Longest frame that a subscriber accepts, bytes. A batch is one step of an engine: 16 MiB hold 3 million tokens.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Slices per write. Linux takes up to 1,024.
const SLICES: usize = 64;

/// Tail of a replay: sequence −1 and no payload. Source: vLLM, `ZmqEventPublisher.END_SEQ`.
pub const END_SEQUENCE: u64 = u64::MAX;

/// An address that cannot be bound.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {endpoint} ({key}); is the port taken?")]
pub struct BindError {
    /// The endpoint, after the rank's offset.
    pub endpoint: String,
    /// Its configuration key.
    pub key: &'static str,
    /// The cause.
    #[source]
    pub source: io::Error,
}

/// Sockets that listen, bound before anything starts.
#[derive(Debug)]
pub(crate) struct Listeners {
    fpm: Option<StdListener>,
    kv: Vec<StdListener>,
    replay: Vec<StdListener>,
}

/// Endpoints of a process's events over ZeroMQ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ZmqAddresses {
    /// Forward-pass metrics of all ranks.
    pub fpm: Option<SocketAddr>,
    /// KV events, by rank.
    pub kv: Vec<SocketAddr>,
    /// Replay, by rank.
    pub replay: Vec<SocketAddr>,
}

impl Listeners {
    /// `offsets`: of each rank's ports from the configured ones.
    pub(crate) fn bind(config: &EventsConfig, offsets: &[usize]) -> Result<Listeners, BindError> {
        let default = EventsConfig::default();
        let by_rank = |endpoint: &str, key| {
            offsets
                .iter()
                .map(|&offset| bind_or_free(endpoint, &default.kv_endpoint, offset, key))
                .collect::<Result<Vec<_>, _>>()
        };
        let mut listeners = Listeners {
            fpm: None,
            kv: Vec::new(),
            replay: Vec::new(),
        };
        if config.fpm {
            listeners.fpm = Some(bind_or_free(
                &config.fpm_endpoint,
                &default.fpm_endpoint,
                0,
                "live.events.fpm_endpoint",
            )?);
        }
        if config.kv {
            listeners.kv = by_rank(&config.kv_endpoint, "live.events.kv_endpoint")?;
            if let Some(endpoint) = &config.replay_endpoint {
                listeners.replay = by_rank(endpoint, "live.events.replay_endpoint")?;
            }
        }
        Ok(listeners)
    }

    pub(crate) fn addresses(&self) -> ZmqAddresses {
        let address = |l: &StdListener| l.local_addr().expect("a bound socket has an address");
        ZmqAddresses {
            fpm: self.fpm.as_ref().map(address),
            kv: self.kv.iter().map(address).collect(),
            replay: self.replay.iter().map(address).collect(),
        }
    }
}

/// As [`bind`]; if `endpoint` is the `default` and another server has its port, a free one, so that two servers can run on
/// one host.
fn bind_or_free(
    endpoint: &str,
    default: &str,
    offset: usize,
    key: &'static str,
) -> Result<StdListener, BindError> {
    match bind(endpoint, offset, key) {
        Err(error) if endpoint == default && error.source.kind() == io::ErrorKind::AddrInUse => {
            let (host, _) = endpoint.rsplit_once(':').unwrap_or((endpoint, ""));
            let listener = bind(&format!("{host}:0"), 0, key)?;
            tracing::warn!(
                "{key}: another server has {}, so a free port is used",
                error.endpoint
            );
            Ok(listener)
        }
        bound => bound,
    }
}

/// Binds `endpoint`, `offset` ports above. Source of the offset: vLLM,
/// `ZmqEventPublisher.offset_endpoint_port`. Port 0 stays 0 and selects a free port for each.
fn bind(endpoint: &str, offset: usize, key: &'static str) -> Result<StdListener, BindError> {
    let fail = |endpoint: String, source| BindError {
        endpoint,
        key,
        source,
    };
    let address = endpoint.strip_prefix("tcp://").unwrap_or(endpoint);
    let parts = address
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let Some((host, port)) = parts else {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "not tcp://ADDRESS:PORT");
        return Err(fail(endpoint.to_owned(), source));
    };
    let host = match host {
        "*" => "0.0.0.0",
        host => host.trim_start_matches('[').trim_end_matches(']'),
    };
    let port = match port {
        0 => Some(0),
        port => u16::try_from(offset).ok().and_then(|o| port.checked_add(o)),
    };
    let Some(port) = port else {
        let source = io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{offset} ports above there is none"),
        );
        return Err(fail(endpoint.to_owned(), source));
    };
    let listener = StdListener::bind((host, port)).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|source| fail(format!("tcp://{host}:{port}"), source))
}

/// The bus.
pub(crate) struct ZmqBus {
    fpm: Option<Rc<PubSocket>>,
    /// By rank.
    kv: Vec<Rc<PubSocket>>,
    /// By rank; empty if past events are not kept.
    replay: Vec<Rc<ReplayBuffer>>,
    counters: Arc<BusCounters>,
}

impl ZmqBus {
    /// Starts to accept. Must be called on a `LocalSet`.
    pub(crate) fn start(
        listeners: Listeners,
        config: &EventsConfig,
        topics: &[RankTopics],
        counters: &Arc<BusCounters>,
    ) -> io::Result<ZmqBus> {
        let outbox_bytes_max = to_usize(config.queue_bytes_max);
        let socket = |listener: StdListener, topics: Vec<Bytes>| {
            let socket = Rc::new(PubSocket {
                subscribers: RefCell::default(),
                topics,
                outbox_bytes_max,
                counters: Arc::clone(counters),
            });
            let listener = TcpListener::from_std(listener)?;
            let serving = Rc::clone(&socket);
            tokio::task::spawn_local(accept(listener, Arc::clone(counters), move |stream| {
                serving.clone().admit(stream)
            }));
            io::Result::Ok(socket)
        };
        let mut bus = ZmqBus {
            fpm: None,
            kv: Vec::new(),
            replay: Vec::new(),
            counters: Arc::clone(counters),
        };
        if let Some(listener) = listeners.fpm {
            let all = topics.iter().map(|t| t.fpm.topic.clone()).collect();
            bus.fpm = Some(socket(listener, all)?);
        }
        for (listener, topics) in listeners.kv.into_iter().zip(topics) {
            bus.kv
                .push(socket(listener, vec![topics.kv.topic.clone()])?);
        }
        for listener in listeners.replay {
            let buffer = Rc::new(ReplayBuffer {
                kept: RefCell::default(),
                batches_max: config.replay_batches_max as usize,
                bytes_max: outbox_bytes_max * REPLAY_BYTES_FACTOR,
                peers: Cell::new(0),
                counters: Arc::clone(counters),
            });
            bus.replay.push(Rc::clone(&buffer));
            let listener = TcpListener::from_std(listener)?;
            tokio::task::spawn_local(accept(listener, Arc::clone(counters), move |stream| {
                buffer.clone().serve(stream)
            }));
        }
        Ok(bus)
    }

    fn publish(&self, batch: &Batch) {
        self.counters.note_sent(batch);
        match batch.kind {
            EventKind::Fpm => {
                if let Some(socket) = &self.fpm {
                    socket.publish(batch);
                }
            }
            EventKind::Kv => {
                for record in &batch.records {
                    let rank = record.rank as usize;
                    if let Some(socket) = self.kv.get(rank) {
                        socket.publish_one(&batch.record_wire(record));
                    }
                    if let Some(replay) = self.replay.get(rank) {
                        replay.keep(record.sequence, batch.record_wire(record));
                    }
                }
            }
        }
    }
}

impl Bus for ZmqBus {
    fn send<'a>(&'a mut self, batch: &'a Batch) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        self.publish(batch);
        // The connections' tasks run before more is queued for them.
        Box::pin(tokio::task::yield_now())
    }

    fn close<'a>(&'a mut self) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(async {
            for socket in self.fpm.iter().chain(&self.kv) {
                socket.drained().await;
            }
        })
    }
}

/// Accepts connections, each served by its own task.
async fn accept<F: Future<Output = ()> + 'static>(
    listener: TcpListener,
    counters: Arc<BusCounters>,
    serve: impl Fn(TcpStream) -> F,
) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::task::spawn_local(serve(stream));
            }
            Err(error) => {
                // Usually out of descriptors: an immediate retry would spin.
                if counters.accept_errors.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::warn!(%error, "could not accept a subscriber; further failures are only counted");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// A PUB socket.
struct PubSocket {
    subscribers: RefCell<Vec<Rc<Subscriber>>>,
    /// Its topics.
    topics: Vec<Bytes>,
    outbox_bytes_max: usize,
    counters: Arc<BusCounters>,
}

/// A connected subscriber.
#[derive(Default)]
struct Subscriber {
    filters: RefCell<Vec<Bytes>>,
    /// Whether the filters accept every topic of the socket, so that batches are sent unchanged.
    takes_all: Cell<bool>,
    outbox: RefCell<Outbox>,
    bell: Notify,
}

/// Queued events of a subscriber.
#[derive(Default)]
struct Outbox {
    /// Whole events, and their number.
    parts: VecDeque<(Bytes, u32)>,
    bytes: usize,
    /// Whether the front part is partly written, and must be completed.
    begun: bool,
}

impl Outbox {
    /// Adds events; returns how many older ones were dropped.
    fn push(&mut self, part: Bytes, events: u32, bytes_max: usize) -> u64 {
        self.bytes += part.len();
        self.parts.push_back((part, events));
        let first = usize::from(self.begun);
        let mut dropped = 0;
        // The newest stays, whatever its size.
        while self.bytes > bytes_max && self.parts.len() > first + 1 {
            let (part, events) = self.parts.remove(first).expect("index is below len");
            self.bytes -= part.len();
            dropped += u64::from(events);
        }
        dropped
    }

    /// Records that `written` bytes were sent.
    fn advance(&mut self, mut written: usize) {
        self.bytes -= written;
        while let Some((front, _)) = self.parts.front_mut() {
            if written < front.len() {
                front.advance(written);
                self.begun |= written > 0;
                return;
            }
            written -= front.len();
            self.parts.pop_front();
            self.begun = false;
        }
    }

    /// Fills `slices` with the next parts.
    fn slices<'o>(&'o self, slices: &mut [IoSlice<'o>; SLICES]) -> usize {
        let mut len = 0;
        for ((part, _), slice) in self.parts.iter().zip(slices) {
            *slice = IoSlice::new(part);
            len += 1;
        }
        len
    }
}

impl PubSocket {
    fn publish(&self, batch: &Batch) {
        for subscriber in self.subscribers.borrow().iter() {
            if subscriber.takes_all.get() {
                let events = to_u32(batch.records.len());
                self.queue(subscriber, batch.wire().clone(), events);
                continue;
            }
            let filters = subscriber.filters.borrow();
            let mut part = BytesMut::new();
            let mut events = 0;
            for record in &batch.records {
                let topic = &self.topics[record.rank as usize];
                if filters.iter().any(|filter| topic.starts_with(filter)) {
                    part.extend_from_slice(&batch.record_wire(record));
                    events += 1;
                }
            }
            drop(filters);
            if events > 0 {
                self.queue(subscriber, part.freeze(), events);
            }
        }
    }

    /// Publishes one event on the only topic here.
    fn publish_one(&self, wire: &Bytes) {
        for subscriber in self.subscribers.borrow().iter() {
            if subscriber.takes_all.get() {
                self.queue(subscriber, wire.clone(), 1);
            }
        }
    }

    fn queue(&self, subscriber: &Subscriber, part: Bytes, events: u32) {
        let mut outbox = subscriber.outbox.borrow_mut();
        let dropped = outbox.push(part, events, self.outbox_bytes_max);
        add(&self.counters.subscriber_dropped, dropped);
        subscriber.bell.notify_one();
    }

    /// Serves a peer until it disconnects.
    async fn admit(self: Rc<PubSocket>, stream: TcpStream) {
        if self.subscribers.borrow().len() >= SUBSCRIBERS_MAX {
            add(&self.counters.accept_errors, 1);
            return;
        }
        let subscriber = Rc::new(Subscriber::default());
        self.subscribers.borrow_mut().push(Rc::clone(&subscriber));
        add(&self.counters.subscribers, 1);
        let ended = self.serve(&subscriber, stream).await;
        self.subscribers
            .borrow_mut()
            .retain(|other| !Rc::ptr_eq(other, &subscriber));
        self.counters.subscribers.fetch_sub(1, Ordering::Relaxed);
        note_end(&self.counters, "subscriber", ended);
    }

    async fn serve(&self, subscriber: &Subscriber, stream: TcpStream) -> Result<(), ZmtpError> {
        let mut peer = handshake(stream, "PUB", "SUB, XSUB").await?;
        loop {
            // Also before the first wait: a subscription may have arrived with the handshake.
            while let Some(frame) = zmtp::take_frame(&mut peer.buffer, SMALL_FRAME_MAX)? {
                if let Some(answer) = self.on_frame(subscriber, &frame)? {
                    // Only between whole events, as `begun` shows.
                    let mut outbox = subscriber.outbox.borrow_mut();
                    let at = usize::from(outbox.begun);
                    outbox.bytes += answer.len();
                    outbox.parts.insert(at, (answer, 0));
                }
            }
            write(subscriber, &peer.stream)?;
            let waiting = !subscriber.outbox.borrow().parts.is_empty();
            tokio::select! {
                readable = peer.stream.readable() => {
                    readable?;
                    match peer.stream.try_read_buf(&mut peer.buffer) {
                        Ok(0) => return Err(ZmtpError::Closed),
                        Ok(_) => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(error) => return Err(error.into()),
                    }
                    peer.buffer.reserve(1 << 10);
                }
                writable = peer.stream.writable(), if waiting => writable?,
                () = subscriber.bell.notified() => {}
            }
        }
    }

    /// Processes a subscription or a command; returns the reply.
    fn on_frame(
        &self,
        subscriber: &Subscriber,
        frame: &zmtp::Frame,
    ) -> Result<Option<Bytes>, ZmtpError> {
        let (subscribes, topic) = if frame.command {
            match zmtp::split_command(&frame.body) {
                Some((b"SUBSCRIBE", topic)) => (true, topic),
                Some((b"CANCEL", topic)) => (false, topic),
                Some((b"PING", data)) => return Ok(Some(zmtp::pong(data).into())),
                _ => return Ok(None),
            }
        } else {
            match frame.body.split_first() {
                Some((1, topic)) => (true, topic),
                Some((0, topic)) => (false, topic),
                // Messages from a subscriber to a publisher are ignored, as in libzmq.
                _ => return Ok(None),
            }
        };
        let mut filters = subscriber.filters.borrow_mut();
        if subscribes {
            if filters.len() == FILTERS_MAX {
                return Err(ZmtpError::Frames(FILTERS_MAX));
            }
            filters.push(Bytes::copy_from_slice(topic));
        } else if let Some(at) = filters.iter().position(|filter| filter == topic) {
            filters.swap_remove(at);
        }
        let passes = |topic: &Bytes| filters.iter().any(|filter| topic.starts_with(filter));
        subscriber.takes_all.set(self.topics.iter().all(passes));
        Ok(None)
    }

    /// Waits until the queues of all reading subscribers are empty.
    async fn drained(&self) {
        let all_empty = || {
            let subscribers = self.subscribers.borrow();
            subscribers
                .iter()
                .all(|s| s.outbox.borrow().parts.is_empty())
        };
        while !all_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Writes as much as the peer accepts.
fn write(subscriber: &Subscriber, stream: &TcpStream) -> Result<(), ZmtpError> {
    let mut outbox = subscriber.outbox.borrow_mut();
    while !outbox.parts.is_empty() {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let len = outbox.slices(&mut slices);
        match stream.try_write_vectored(&slices[..len]) {
            Ok(written) => outbox.advance(written),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

async fn handshake(
    stream: TcpStream,
    ours: &str,
    theirs: &'static str,
) -> Result<Connection, ZmtpError> {
    match tokio::time::timeout(HANDSHAKE, Connection::open(stream, ours, theirs)).await {
        Ok(opened) => opened,
        Err(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
    }
}

/// Counts the end of a connection by its reason.
fn note_end(counters: &BusCounters, what: &str, ended: Result<(), ZmtpError>) {
    match ended {
        Ok(()) => {}
        Err(ZmtpError::Closed | ZmtpError::Io(_)) => add(&counters.disconnects, 1),
        Err(error) => {
            // Logged once, so that a port scan cannot fill the log.
            if counters.bad_peers.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(%error, "disconnected a {what}; further ones are only counted");
            }
        }
    }
}

/// Memory limit of past events, as a multiple of a queue's.
const REPLAY_BYTES_FACTOR: usize = 8;

/// Limit of concurrent replay requests per rank.
const REPLAY_PEERS_MAX: usize = 64;

/// Past KV events of a rank.
struct ReplayBuffer {
    kept: RefCell<Kept>,
    batches_max: usize,
    bytes_max: usize,
    peers: Cell<usize>,
    counters: Arc<BusCounters>,
}

#[derive(Default)]
struct Kept {
    /// Sequence, and the published batch: topic, sequence and payload.
    batches: VecDeque<(u64, Bytes)>,
    bytes: usize,
}

impl ReplayBuffer {
    fn keep(&self, sequence: u64, frames: Bytes) {
        let mut kept = self.kept.borrow_mut();
        kept.bytes += frames.len();
        kept.batches.push_back((sequence, frames));
        while kept.batches.len() > self.batches_max || kept.bytes > self.bytes_max {
            let Some((_, oldest)) = kept.batches.pop_front() else {
                break;
            };
            kept.bytes -= oldest.len();
        }
    }

    /// Answers a peer until it disconnects.
    async fn serve(self: Rc<ReplayBuffer>, stream: TcpStream) {
        if self.peers.get() >= REPLAY_PEERS_MAX {
            add(&self.counters.accept_errors, 1);
            return;
        }
        self.peers.set(self.peers.get() + 1);
        let ended = self.answer(stream).await;
        self.peers.set(self.peers.get() - 1);
        note_end(&self.counters, "reader of past events", ended);
    }

    /// Source of the exchange: vLLM 0.33, `ZmqEventPublisher._service_replay`. A request is an empty
    /// frame and a sequence. The answer is every batch from there on, each as an empty frame, topic,
    /// sequence and payload; then the end marker: [`END_SEQUENCE`] between an empty topic and an
    /// empty payload.
    async fn answer(&self, stream: TcpStream) -> Result<(), ZmtpError> {
        const EMPTY_FRAME: &[u8] = &[1, 0];
        let mut peer = handshake(stream, "ROUTER", "REQ, DEALER, ROUTER").await?;
        loop {
            let request = peer.message(4, SMALL_FRAME_MAX).await?;
            let start = match &request[..] {
                [empty, start] if empty.is_empty() => start[..].try_into().ok(),
                _ => None,
            };
            let Some(start) = start.map(u64::from_be_bytes) else {
                if self.counters.bad_replays.fetch_add(1, Ordering::Relaxed) == 0 {
                    let lengths: Vec<usize> = request.iter().map(Bytes::len).collect();
                    tracing::warn!(
                        "a request for past events has frames of {lengths:?} bytes, but an empty \
                         one and one of 8 are needed; further ones are only counted"
                    );
                }
                continue;
            };
            add(&self.counters.replays, 1);
            let batches: Vec<Bytes> = {
                let kept = self.kept.borrow();
                let first = kept
                    .batches
                    .partition_point(|&(sequence, _)| sequence < start);
                kept.batches
                    .range(first..)
                    .map(|(_, frames)| frames.clone())
                    .collect()
            };
            for frames in &batches {
                let mut message = Bytes::from_static(EMPTY_FRAME).chain(frames.clone());
                peer.stream.write_all_buf(&mut message).await?;
                add(&self.counters.replayed, 1);
            }
            let mut end = [EMPTY_FRAME, EMPTY_FRAME].concat();
            zmtp::put_frame(&mut end, &END_SEQUENCE.to_be_bytes(), true);
            zmtp::put_frame(&mut end, &[], false);
            peer.stream.write_all(&end).await?;
        }
    }
}

/// Why a subscriber received no event.
#[derive(Debug, thiserror::Error)]
pub enum ZmqError {
    /// The publisher is unreachable or speaks another protocol. Connect again later.
    #[error("{endpoint}: {source}")]
    Peer {
        /// The publisher.
        endpoint: String,
        /// The cause.
        source: ZmtpError,
    },
    /// One message was not an event; the next may be valid.
    #[error(
        "{endpoint}: a message has frames of {lengths:?} bytes, but an event has three: topic, \
         sequence (8 bytes) and payload"
    )]
    Shape {
        /// The publisher.
        endpoint: String,
        /// Bytes of each frame.
        lengths: Vec<usize>,
    },
}

impl ZmqError {
    /// Whether the connection can still be used.
    pub fn may_go_on(&self) -> bool {
        matches!(self, ZmqError::Shape { .. })
    }
}

/// A SUB socket with one connection.
#[derive(Debug)]
pub struct ZmqSubscriber {
    endpoint: String,
    connection: Connection,
}

impl ZmqSubscriber {
    /// Connects to `endpoint` (`tcp://HOST:PORT`) and subscribes to the prefix `topic`.
    ///
    /// # Errors
    /// [`ZmqError::Peer`].
    pub async fn connect(endpoint: &str, topic: &str) -> Result<ZmqSubscriber, ZmqError> {
        let mut connection = connect(endpoint, "SUB", "PUB, XPUB").await?;
        let wire = zmtp::subscribe(topic.as_bytes());
        let asked = connection.stream.write_all(&wire).await;
        asked.map_err(|source| peer_error(endpoint, source.into()))?;
        let endpoint = endpoint.to_owned();
        Ok(ZmqSubscriber {
            endpoint,
            connection,
        })
    }

    /// The next event. Not cancellation-safe.
    ///
    /// # Errors
    /// [`ZmqError`], which shows whether the connection is still usable.
    pub async fn recv(&mut self) -> Result<Event, ZmqError> {
        let message = self.connection.message(8, EVENT_BYTES_MAX).await;
        let frames = message.map_err(|source| peer_error(&self.endpoint, source))?;
        match &frames[..] {
            [topic, sequence, payload] if sequence.len() == 8 => Ok(Event {
                topic: topic.clone(),
                sequence: Some(sequence.clone().get_u64()),
                payload: payload.clone(),
            }),
            _ => Err(shape_error(&self.endpoint, &frames)),
        }
    }
}

/// Past KV events of a publisher, one by one: for readers that must not keep all of them in memory.
#[derive(Debug)]
pub struct ZmqReplay {
    endpoint: String,
    connection: Connection,
}

impl ZmqReplay {
    /// Connects to `endpoint` (`tcp://HOST:PORT`) and requests past KV events from sequence `start`
    /// on.
    ///
    /// # Errors
    /// [`ZmqError::Peer`].
    pub async fn request(endpoint: &str, start: u64) -> Result<ZmqReplay, ZmqError> {
        let mut connection = connect(endpoint, "REQ", "ROUTER, REP").await?;
        let mut request = Vec::new();
        zmtp::put_frame(&mut request, &[], true);
        zmtp::put_frame(&mut request, &start.to_be_bytes(), false);
        let asked = connection.stream.write_all(&request).await;
        asked.map_err(|source| peer_error(endpoint, source.into()))?;
        let endpoint = endpoint.to_owned();
        Ok(ZmqReplay {
            endpoint,
            connection,
        })
    }

    /// The next event; `None` at the end marker. Not cancellation-safe.
    ///
    /// # Errors
    /// [`ZmqError`].
    pub async fn next(&mut self) -> Result<Option<Event>, ZmqError> {
        let message = self.connection.message(8, EVENT_BYTES_MAX).await;
        let frames = message.map_err(|source| peer_error(&self.endpoint, source))?;
        // Publishers before vLLM 0.32 send no topic.
        let (topic, sequence, payload) = match &frames[..] {
            [empty, topic, sequence, payload] if empty.is_empty() => {
                (topic.clone(), sequence, payload)
            }
            [empty, sequence, payload] if empty.is_empty() => (Bytes::new(), sequence, payload),
            _ => return Err(shape_error(&self.endpoint, &frames)),
        };
        if sequence.len() != 8 {
            return Err(shape_error(&self.endpoint, &frames));
        }
        let sequence = sequence.clone().get_u64();
        if sequence == END_SEQUENCE {
            return Ok(None);
        }
        Ok(Some(Event {
            topic,
            sequence: Some(sequence),
            payload: payload.clone(),
        }))
    }
}

/// Requests past KV events from sequence `start` on. Available ones arrive in order, up to the end
/// marker.
///
/// # Errors
/// [`ZmqError`].
pub async fn replay(endpoint: &str, start: u64) -> Result<Vec<Event>, ZmqError> {
    let mut replay = ZmqReplay::request(endpoint, start).await?;
    let mut events = Vec::new();
    while let Some(event) = replay.next().await? {
        events.push(event);
    }
    Ok(events)
}

async fn connect(endpoint: &str, ours: &str, theirs: &'static str) -> Result<Connection, ZmqError> {
    let opened = async {
        let address = endpoint
            .strip_prefix("tcp://")
            .unwrap_or(endpoint)
            .to_owned();
        let found = tokio::task::spawn_blocking(move || address.to_socket_addrs()).await;
        let found: Vec<SocketAddr> = found.map_err(io::Error::other)??.collect();
        let stream = TcpStream::connect(&found[..]).await?;
        handshake(stream, ours, theirs).await
    };
    opened.await.map_err(|source| peer_error(endpoint, source))
}

fn peer_error(endpoint: &str, source: ZmtpError) -> ZmqError {
    ZmqError::Peer {
        endpoint: endpoint.to_owned(),
        source,
    }
}

fn shape_error(endpoint: &str, frames: &[Bytes]) -> ZmqError {
    ZmqError::Shape {
        endpoint: endpoint.to_owned(),
        lengths: frames.iter().map(Bytes::len).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outbox_drops_the_oldest_but_never_a_part_of_an_event() {
        let mut outbox = Outbox::default();
        assert_eq!(outbox.push(Bytes::from_static(b"aaaa"), 2, 10), 0);
        outbox.advance(1);
        assert!(outbox.begun);
        outbox.push(Bytes::from_static(b"bbbb"), 3, 10);
        // 3 + 4 + 4 bytes are too many; a partly written event stays, so the next one is dropped.
        assert_eq!(outbox.push(Bytes::from_static(b"cccc"), 1, 10), 3);
        let parts: Vec<&[u8]> = outbox.parts.iter().map(|(part, _)| &part[..]).collect();
        assert_eq!(parts, [&b"aaa"[..], b"cccc"]);
        outbox.advance(7);
        assert!(outbox.parts.is_empty() && outbox.bytes == 0 && !outbox.begun);
    }

    #[test]
    fn ports_go_up_with_ranks_and_end_at_the_last() {
        let error = bind("tcp://127.0.0.1:65535", 1, "live.events.kv_endpoint").unwrap_err();
        assert!(
            error.to_string().contains("live.events.kv_endpoint"),
            "{error}"
        );
        let any = bind("tcp://127.0.0.1:0", 3, "k").unwrap();
        assert_ne!(any.local_addr().unwrap().port(), 0);
        assert!(bind("tcp://*:0", 0, "k").is_ok());
        assert!(bind("nonsense", 0, "k").is_err());
    }
}
