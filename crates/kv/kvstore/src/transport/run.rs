//! The transport's thread: sockets, deadlines, and copies.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use slipstream_base::SimTime;
use slipstream_base::width::{low_u32, nanos, to_i64, to_u32, to_usize};
use socket2::{Domain, SockAddr, Socket, Type};

use super::conn::{
    Conn, GREETING_BYTES_MAX, OUT_BYTES_MAX, Payload, Phase, Piece, ReadOutcome, Scheme, read_into,
};
use super::endpoint::{Command, Nixl, Promotion, Shared, Transfer, count, hello};
use super::pull::{Pulls, release};
use super::{Address, Completion, FetchError, PeerId, TransportError, TransportEvent};
use crate::arena::Arena;
use crate::handshake::Hello;
use crate::tier::Tier;
use crate::wire::{
    Answer, Blocks, FrameKind, Get, Introduction, Reader, Wanted, WireError, frame, put_text,
    read_frame,
};
use crate::{checksum, clock};

/// Bytes that one connection may receive or copy before the others have a turn.
pub(super) const TURN_BYTES: usize = 8 << 20;
/// Maximum requests in flight per peer, as each pins blocks.
const REQUESTS_MAX: usize = 4_096;
/// How long a peer's request pins blocks after its deadline. A copy that the peer completes in time
/// then never reads a slot that was written to, even if its clock is slightly behind.
const GRACE_NS: u64 = 1_000_000_000;
/// Keys of an index that are swept between two polls of the sockets.
const SWEPT: usize = 1_024;

/// Generations wrap here: with a slot they leave two bits for events that belong to no connection.
const GENERATION_MAX: u32 = (1 << 30) - 1;
const WAKE: u64 = u64::MAX;
const LISTENERS: u64 = 1 << 63;

pub(super) struct Run {
    pub(super) shared: Arc<Shared>,
    epoll: OwnedFd,
    listeners: Vec<(OwnedFd, Scheme)>,
    pub(super) conns: Vec<Option<Conn>>,
    pub(super) transfers: HashMap<u64, Transfer>,
    deadlines: BTreeSet<(SimTime, u64)>,
    /// Blocks in a peer's memory that are to be copied.
    copies: VecDeque<Copy>,
    /// Reads of peers' memory by NIXL.
    pub(super) pulls: Option<Pulls>,
    /// The queue of requests for blocks in lower tiers.
    promotions: Option<SyncSender<Promotion>>,
    next_ping: SimTime,
    sweeping: bool,
    /// Destination of received bytes that are no longer wanted.
    scratch: Vec<u8>,
}

struct Copy {
    peer: PeerId,
    request: u64,
    answers: std::iter::Enumerate<std::vec::IntoIter<Answer>>,
}

/// Why a connection ends.
pub(super) enum CloseReason {
    Wire(WireError),
    Io(io::Error),
    /// Blocks are not compatible.
    Refused(String),
    Text(String),
}

impl From<WireError> for CloseReason {
    fn from(error: WireError) -> CloseReason {
        CloseReason::Wire(error)
    }
}

impl From<io::Error> for CloseReason {
    fn from(error: io::Error) -> CloseReason {
        CloseReason::Io(error)
    }
}

/// Decides whether the thread polls before it sleeps, and for how long.
///
/// An idle virtual CPU takes some 20 µs to wake up, and a transfer wakes three threads in turn. So
/// the thread polls for a while if an event is likely soon: if an answer is due, or if the last two
/// events came close together. But if CPUs are scarce, the sender of the event may be waiting for
/// this very CPU. After polling in vain, the next poll is therefore skipped, then the next two,
/// four, ... up to `SKIPPED_MAX`. The Linux kernel uses a similar policy for idle guests
/// (`Documentation/virt/guest-halt-polling.rst`).
struct Spin {
    max_ns: u64,
    last: SimTime,
    /// The kind of event that is polled for, and until when.
    awaited: Option<(usize, SimTime)>,
    /// For answers that are due, and for events after close ones.
    backoff: [SpinBackoff; 2],
}

/// Polls left to skip, and the length of the current backoff.
#[derive(Clone, Copy, Default)]
struct SpinBackoff {
    skip: u32,
    skipped: u32,
}

const SKIPPED_MAX: u32 = 64;

impl Spin {
    fn new(max: Duration) -> Spin {
        Spin {
            max_ns: nanos(max),
            last: SimTime::ZERO,
            awaited: None,
            backoff: [SpinBackoff::default(); 2],
        }
    }

    fn on_event(&mut self, now: SimTime, answer_due: bool) {
        if let Some((kind, until)) = self.awaited.take() {
            self.end(kind, now < until);
        }
        let close = now.since(self.last) <= self.max_ns;
        self.last = now;
        if self.max_ns == 0 || !(answer_due || close) {
            return;
        }
        let kind = usize::from(!answer_due);
        let backoff = &mut self.backoff[kind];
        if backoff.skip > 0 {
            backoff.skip -= 1;
        } else {
            self.awaited = Some((kind, now + self.max_ns));
        }
    }

    fn should_spin(&mut self, now: SimTime) -> bool {
        let Some((kind, until)) = self.awaited else {
            return false;
        };
        if now < until {
            return true;
        }
        self.awaited = None;
        self.end(kind, false);
        false
    }

    fn end(&mut self, kind: usize, arrived: bool) {
        let backoff = &mut self.backoff[kind];
        backoff.skipped = if arrived {
            0
        } else {
            (2 * backoff.skipped).clamp(1, SKIPPED_MAX)
        };
        backoff.skip = backoff.skipped;
    }
}

impl Run {
    pub(super) fn new(
        shared: Arc<Shared>,
        listeners: Vec<OwnedFd>,
        promotions: Option<SyncSender<Promotion>>,
        pulls: Option<Pulls>,
    ) -> io::Result<Run> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let readable = epoll::EventFlags::IN;
        epoll::add(
            &epoll,
            &shared.wake,
            epoll::EventData::new_u64(WAKE),
            readable,
        )?;
        for (at, listener) in listeners.iter().enumerate() {
            let data = epoll::EventData::new_u64(LISTENERS | at as u64);
            epoll::add(&epoll, listener, data, readable)?;
        }
        let scheme = |at: usize| Scheme::of(&shared.options.listen[at]);
        let peers = shared.generations.len();
        Ok(Run {
            epoll,
            listeners: listeners
                .into_iter()
                .enumerate()
                .map(|(at, fd)| (fd, scheme(at)))
                .collect(),
            conns: (0..peers).map(|_| None).collect(),
            transfers: HashMap::new(),
            deadlines: BTreeSet::new(),
            copies: VecDeque::new(),
            pulls,
            promotions,
            next_ping: SimTime::ZERO,
            sweeping: false,
            scratch: Vec::new(),
            shared,
        })
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        let mut spin = Spin::new(self.shared.options.spin);
        while !self.shared.stop.load(Ordering::Acquire) {
            let worked = self.take_commands();
            let now = clock::now();
            self.end_due(now);
            self.copy_some();
            self.pull_some();
            self.check_peers(now);
            if worked || !events.is_empty() {
                spin.on_event(now, !self.transfers.is_empty());
            }
            events.clear();
            self.wait(now, spin.should_spin(now), &mut events);
            for &(data, flags) in &events {
                self.on_event(data, flags);
            }
        }
    }

    fn wait(&mut self, now: SimTime, spin: bool, events: &mut Vec<(u64, epoll::EventFlags)>) {
        let mut ready: Vec<epoll::Event> = Vec::with_capacity(64);
        let busy = spin || !self.copies.is_empty() || self.sweeping;
        let mut timeout_ns = 0;
        let spin_ns = nanos(self.shared.options.spin);
        let pause_ns = self
            .pulls
            .as_ref()
            .and_then(|pulls| pulls.pause_ns(now, spin_ns));
        if let Some(pause_ns) = pause_ns.filter(|_| !busy) {
            timeout_ns = pause_ns;
        } else if !busy {
            let first = self.deadlines.first().map_or(SimTime::MAX, |&(at, _)| at);
            // Rounded up, so that a deadline has passed when the wait ends.
            timeout_ns = first.min(self.next_ping).since(now).min(10_000_000_000) + 1_000;
            // Pairs with the fence in `Shared::wake`: a command pushed before is seen here, and a
            // later one wakes this thread.
            self.shared.sleeping.store(true, Ordering::SeqCst);
            std::sync::atomic::fence(Ordering::SeqCst);
            if !self.shared.commands.is_empty() {
                timeout_ns = 0;
            }
        }
        let timeout = Timespec {
            tv_sec: to_i64(timeout_ns / 1_000_000_000),
            tv_nsec: to_i64(timeout_ns % 1_000_000_000),
        };
        let waited = epoll::wait(&self.epoll, spare_capacity(&mut ready), Some(&timeout));
        self.shared.sleeping.store(false, Ordering::SeqCst);
        debug_assert!(waited.is_ok() || waited == Err(Errno::INTR));
        events.extend(ready.iter().map(|event| (event.data.u64(), event.flags)));
    }

    fn on_event(&mut self, data: u64, flags: epoll::EventFlags) {
        if data == WAKE {
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        } else if data & LISTENERS != 0 {
            self.accept(to_usize(data & !LISTENERS));
        } else {
            let peer = PeerId {
                slot: low_u32(data),
                generation: (data >> 32) as u32,
            };
            self.with_conn(peer, |run, conn| {
                if conn.phase == Phase::Connecting {
                    Run::on_connected(conn)?;
                }
                if flags.intersects(epoll::EventFlags::OUT) {
                    conn.write()?;
                }
                if flags.intersects(
                    epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR,
                ) {
                    run.on_readable(conn)?;
                }
                Ok(())
            });
        }
    }

    /// Runs `f` on a connection that is up; ends the connection on an error.
    pub(super) fn with_conn(
        &mut self,
        peer: PeerId,
        f: impl FnOnce(&mut Run, &mut Conn) -> Result<(), CloseReason>,
    ) -> bool {
        let entry = &mut self.conns[peer.slot as usize];
        if entry.as_ref().is_none_or(|conn| conn.peer != peer) {
            return false;
        }
        // Taken out of the table, so that `f` can use both this and the connection.
        let mut conn = entry.take().expect("checked above");
        let mut result = f(self, &mut conn);
        if result.is_ok() {
            result = conn.write().map_err(CloseReason::from);
        }
        if result.is_ok() && conn.is_slow() {
            count(&self.shared.counters.slow_peers, 1);
            result = Err(CloseReason::Text(format!(
                "it left more than {OUT_BYTES_MAX} bytes unread"
            )));
        }
        match result {
            Ok(()) => {
                self.watch(&mut conn);
                self.conns[peer.slot as usize] = Some(conn);
            }
            Err(why) => self.end(conn, &why),
        }
        true
    }

    fn watch(&self, conn: &mut Conn) {
        let wants = !conn.is_written() || conn.phase == Phase::Connecting;
        if wants != conn.wants_write {
            conn.wants_write = wants;
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, wants);
            let _ = epoll::modify(&self.epoll, &conn.socket, data_of(conn.peer), flags);
        }
    }

    fn take_commands(&mut self) -> bool {
        let mut worked = false;
        while let Some(command) = self.shared.commands.pop() {
            worked = true;
            match command {
                Command::Connect(peer, address) => self.connect(peer, &address),
                Command::Disconnect(peer) => {
                    self.with_conn(peer, |_, _| {
                        Err(CloseReason::Text("closed by this side".into()))
                    });
                }
                Command::Fetch(transfer, get) => self.fetch(transfer, get),
                Command::Promoted(peer, get) => {
                    self.with_conn(peer, |run, conn| run.serve(conn, &get));
                }
                Command::Publish(message) => {
                    let frame: Arc<[u8]> = frame(FrameKind::Keys, &message).into();
                    let up = self.conns.iter().flatten();
                    let up: Vec<_> = up
                        .filter(|c| c.phase == Phase::Up)
                        .map(|c| c.peer)
                        .collect();
                    // The peers were collected first, as `with_conn` may remove connections.
                    for peer in up {
                        self.with_conn(peer, |_, conn| {
                            conn.push(Piece::Shared(Arc::clone(&frame)));
                            Ok(())
                        });
                    }
                }
                Command::Resync(peer) => {
                    self.with_conn(peer, |_, conn| {
                        conn.push(Piece::Bytes(frame(FrameKind::Resync, &[])));
                        Ok(())
                    });
                }
            }
        }
        worked
    }

    fn connect(&mut self, peer: PeerId, address: &Address) {
        if matches!(address, Address::Nixl(_)) && self.shared.options.nixl == Nixl::Off {
            self.free(peer);
            self.shared.peer_event(TransportEvent::Down {
                peer,
                why: TransportError::NoNixl {
                    address: address.to_string(),
                }
                .to_string(),
                refused: true,
            });
            return;
        }
        let opened = open(address).and_then(|socket| self.add(peer, address, socket));
        if let Err(error) = opened {
            self.free(peer);
            self.shared.peer_event(TransportEvent::Down {
                peer,
                why: format!("{address}: connecting failed: {error}"),
                refused: false,
            });
        }
    }

    fn add(&mut self, peer: PeerId, address: &Address, socket: OwnedFd) -> io::Result<()> {
        let scheme = Scheme::of(address);
        let mut conn = Conn::new(peer, address.to_string(), socket, scheme, clock::now());
        conn.phase = Phase::Connecting;
        conn.wants_write = true;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT;
        epoll::add(&self.epoll, &conn.socket, data_of(peer), flags)?;
        self.greet(&mut conn);
        self.conns[peer.slot as usize] = Some(conn);
        Ok(())
    }

    fn greet(&self, conn: &mut Conn) {
        conn.push(Piece::Bytes(
            hello(&self.shared.options, conn.scheme).frame(),
        ));
        if conn.scheme == Scheme::Pull {
            let introduction = self.pulls.as_ref().map(Pulls::introduction);
            let introduction = introduction.cloned().unwrap_or_default();
            conn.push(Piece::Bytes(introduction.frame()));
        }
    }

    fn on_connected(conn: &mut Conn) -> Result<(), CloseReason> {
        // The socket is writable: a connect without blocking has ended, with this result.
        let error = rustix::net::sockopt::socket_error(&conn.socket).map_err(io::Error::from)?;
        error.map_err(io::Error::from)?;
        conn.phase = Phase::Greeting;
        if conn.scheme != Scheme::Map {
            rustix::net::sockopt::set_tcp_nodelay(&conn.socket, true).map_err(io::Error::from)?;
        }
        Ok(())
    }

    fn accept(&mut self, listener: usize) {
        let (fd, scheme) = (&self.listeners[listener].0, self.listeners[listener].1);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let Ok(socket) = rustix::net::accept_with(fd, flags) else {
            return; // closed already, or no descriptors left: the peer times out and retries
        };
        if self.shared.free_slots.is_empty() {
            self.end_ungreeted();
        }
        let Some(slot) = self.shared.free_slots.pop() else {
            let peers = self.shared.generations.len();
            tracing::warn!("refusing a connection: all {peers} are in use; raise peers_max");
            return;
        };
        let generation = self.shared.generations[slot as usize].load(Ordering::Acquire);
        let peer = PeerId { slot, generation };
        if scheme != Scheme::Map {
            let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        }
        let mut conn = Conn::new(peer, "an inbound peer".into(), socket, scheme, clock::now());
        conn.is_inbound = true;
        let readable = epoll::EventFlags::IN;
        if epoll::add(&self.epoll, &conn.socket, data_of(peer), readable).is_err() {
            self.free(peer);
            return;
        }
        self.greet(&mut conn);
        self.conns[slot as usize] = Some(conn);
        // Writes the greeting.
        self.with_conn(peer, |_, _| Ok(()));
    }

    /// Ends the connection that has waited longest for its peer's greeting, so that silent peers
    /// cannot block others.
    fn end_ungreeted(&mut self) {
        let greeting = self.conns.iter().flatten();
        let greeting = greeting.filter(|conn| conn.is_inbound && conn.phase == Phase::Greeting);
        let oldest = greeting
            .min_by_key(|conn| conn.started)
            .map(|conn| conn.peer);
        if let Some(peer) = oldest {
            self.with_conn(peer, |_, _| {
                Err(CloseReason::Text(
                    "it did not greet, and another peer needed the connection".into(),
                ))
            });
        }
    }

    /// Ends a connection and everything that depends on it.
    fn end(&mut self, conn: Conn, why: &CloseReason) {
        let peer = conn.peer;
        let _ = epoll::delete(&self.epoll, &conn.socket);
        let lost: Vec<u64> = self
            .transfers
            .values()
            .filter(|t| t.peer == peer)
            .map(|t| t.id)
            .collect();
        for id in lost {
            self.fail_rest(id, FetchError::Lost);
        }
        self.copies.retain(|copy| copy.peer != peer);
        if let (Some(pulls), Some(remote)) = (&mut self.pulls, &conn.remote) {
            pulls.remove_connection(peer, remote);
        }
        if let Some(index) = &self.shared.options.index {
            index.forget(peer.slot as usize);
            self.sweeping = true;
        }
        let counters = &self.shared.counters;
        let (text, refused) = match why {
            CloseReason::Wire(error) => {
                count(&counters.malformed, 1);
                let version = matches!(error, WireError::Version { .. });
                (error.to_string(), version)
            }
            CloseReason::Io(error) => (format!("the connection ended: {error}"), false),
            CloseReason::Refused(text) => {
                count(&counters.refused, 1);
                (text.clone(), true)
            }
            CloseReason::Text(text) => (text.clone(), false),
        };
        tracing::info!("{}: {text}", conn.name);
        let why = format!("{}: {text}", conn.name);
        // Dropping the connection unpins its blocks.
        drop(conn);
        self.free(peer);
        self.shared
            .peer_event(TransportEvent::Down { peer, why, refused });
    }

    fn free(&self, peer: PeerId) {
        let generation = &self.shared.generations[peer.slot as usize];
        // The slot's next connection has another generation, so that late commands and events miss
        // it.
        generation.store((peer.generation + 1) & GENERATION_MAX, Ordering::Release);
        let pushed = self.shared.free_slots.push(peer.slot);
        debug_assert!(pushed.is_ok(), "the queue has room for all slots");
    }

    fn on_readable(&mut self, conn: &mut Conn) -> Result<(), CloseReason> {
        let mut turn = 0;
        while turn < TURN_BYTES {
            let outcome = if conn.payload.is_some() {
                self.read_payload(conn)?
            } else {
                let outcome = conn.read()?;
                if matches!(outcome, ReadOutcome::Bytes(_)) {
                    conn.last_received = clock::now();
                    self.on_input(conn)?;
                    let waiting = conn.input.len() - conn.start;
                    if conn.phase != Phase::Up && waiting > GREETING_BYTES_MAX {
                        return Err(CloseReason::Wire(WireError::Malformed {
                            what: "it exceeds the maximum length of a greeting",
                        }));
                    }
                }
                outcome
            };
            match outcome {
                ReadOutcome::Bytes(bytes) => turn += bytes,
                ReadOutcome::Nothing => return Ok(()),
                ReadOutcome::End if conn.phase == Phase::Greeting => {
                    return Err(CloseReason::Text(
                        "it closed the connection before greeting".into(),
                    ));
                }
                ReadOutcome::End => {
                    return Err(CloseReason::Text("it closed the connection".into()));
                }
            }
        }
        Ok(())
    }

    /// Handles the complete frames in the input.
    fn on_input(&mut self, conn: &mut Conn) -> Result<(), CloseReason> {
        while conn.payload.is_none() {
            // Moved out, as `body` borrows the input while `on_frame` uses the connection.
            let input = std::mem::take(&mut conn.input);
            let Some((kind, body, bytes)) = read_frame(&input[conn.start..])? else {
                conn.input = input;
                break;
            };
            conn.start += bytes;
            let result = self.on_frame(conn, kind, body);
            conn.input = input;
            result?;
        }
        // The bytes after the frame are the start of its blocks.
        while conn.payload.is_some() && conn.start < conn.input.len() {
            let input = std::mem::take(&mut conn.input);
            let taken = self.take_payload(conn, &input[conn.start..]);
            conn.input = input;
            conn.start += taken;
            if conn.payload.is_none() {
                return self.on_input(conn);
            }
        }
        Ok(())
    }

    fn on_frame(
        &mut self,
        conn: &mut Conn,
        kind: FrameKind,
        body: &[u8],
    ) -> Result<(), CloseReason> {
        match (conn.phase, kind) {
            (Phase::Greeting, FrameKind::Hello) => self.on_hello(conn, Hello::read(body)?),
            (Phase::Introducing, FrameKind::Introduction) => {
                self.on_introduction(conn, &Introduction::read(body)?)
            }
            (Phase::Introducing, FrameKind::Memory) => self.on_memory(conn),
            (_, FrameKind::Refused) => Err(CloseReason::Refused(Reader(body).text()?)),
            (Phase::Up, FrameKind::Get) => self.on_get(conn, Get::read(body)?),
            (Phase::Up, FrameKind::Blocks) => self.on_blocks(conn, Blocks::read(body)?),
            (Phase::Up, FrameKind::Release) => {
                conn.pins.remove(&Reader(body).u64()?);
                Ok(())
            }
            (Phase::Up, FrameKind::Keys) => {
                self.on_keys(conn, body);
                Ok(())
            }
            (Phase::Up, FrameKind::Resync) => {
                self.shared.snapshot_wanted.store(true, Ordering::Release);
                Ok(())
            }
            (Phase::Up, FrameKind::Ping) => Ok(()),
            _ => Err(CloseReason::Wire(WireError::Malformed {
                what: "a greeting is missing or repeated",
            })),
        }
    }

    fn on_hello(&mut self, conn: &mut Conn, theirs: Hello) -> Result<(), CloseReason> {
        conn.name = format!("{} ({})", theirs.name, conn.name);
        if let Err(mismatch) = hello(&self.shared.options, conn.scheme).check(&theirs) {
            // An older peer may not find the difference itself, so it receives the reason.
            let mut body = Vec::new();
            put_text(&mut body, &mismatch.to_string());
            conn.push(Piece::Bytes(frame(FrameKind::Refused, &body)));
            let _ = conn.write();
            return Err(CloseReason::Refused(mismatch.to_string()));
        }
        conn.peer_name = theirs.name;
        conn.arena_bytes = theirs.arena_bytes;
        // Only after the check: blocks are only for peers with this profile.
        if let (Scheme::Map, Some(tier)) = (conn.scheme, &self.shared.options.serves) {
            let frame = frame(FrameKind::Memory, &[]);
            conn.push(Piece::Memory(frame, Arc::clone(tier)));
        }
        if conn.scheme == Scheme::Pull || theirs.arena_bytes > 0 {
            conn.phase = Phase::Introducing;
        } else {
            self.on_up(conn);
        }
        Ok(())
    }

    /// Maps the memory that a peer offers.
    fn on_memory(&mut self, conn: &mut Conn) -> Result<(), CloseReason> {
        let Some(fd) = conn.fd.take() else {
            return Err(CloseReason::Text(
                "it offers shared memory without a descriptor".into(),
            ));
        };
        let arena = Arena::map_peer(fd, conn.arena_bytes);
        let arena = arena.map_err(|error| CloseReason::Text(error.to_string()))?;
        conn.arena = Some(Arc::new(arena));
        self.on_up(conn);
        Ok(())
    }

    fn on_introduction(
        &mut self,
        conn: &mut Conn,
        theirs: &Introduction,
    ) -> Result<(), CloseReason> {
        if let Some(pulls) = &mut self.pulls
            && !theirs.agent.is_empty()
        {
            let remote = pulls.add_peer(theirs);
            conn.remote = Some(remote.map_err(|error| CloseReason::Text(error.to_string()))?);
        }
        self.on_up(conn);
        Ok(())
    }

    fn on_up(&mut self, conn: &mut Conn) {
        conn.phase = Phase::Up;
        if let Some(index) = &self.shared.options.index {
            index.connect(conn.last_received, conn.peer.slot as usize);
        }
        // The peer has no keys of this side yet.
        self.shared.snapshot_wanted.store(true, Ordering::Release);
        self.shared.peer_event(TransportEvent::Up {
            peer: conn.peer,
            name: conn.peer_name.clone(),
        });
    }

    fn on_keys(&mut self, conn: &mut Conn, message: &[u8]) {
        let Some(index) = &self.shared.options.index else {
            return;
        };
        let counters = &self.shared.counters;
        match index.apply(conn.last_received, conn.peer.slot as usize, message) {
            Ok(_) => count(&counters.key_messages, 1),
            Err(error) if !error.loses_trust() => count(&counters.key_stale, 1),
            Err(error) => {
                count(&counters.key_errors, 1);
                tracing::warn!("{}: {error}", conn.name);
                conn.push(Piece::Bytes(frame(FrameKind::Resync, &[])));
            }
        }
        self.sweeping = true;
    }

    /// Handles a peer's request for blocks.
    fn on_get(&mut self, conn: &mut Conn, get: Get) -> Result<(), CloseReason> {
        let options = &self.shared.options;
        if let (Some(promotions), Some(memory)) = (&self.promotions, &options.serves) {
            let now = conn.last_received;
            let is_lower = |wanted: &Wanted| {
                let mut lower = options.lower.iter();
                memory.len_of(now, &wanted.key).is_none()
                    && lower.any(|t| t.len_of(now, &wanted.key) == Some(wanted.len as usize))
            };
            if get.blocks.iter().any(is_lower) {
                let due = now + self.serve_ns(&get);
                let promotion = Promotion {
                    peer: conn.peer,
                    get,
                    due,
                };
                return match promotions.try_send(promotion) {
                    Ok(()) => Ok(()),
                    // The disk is overloaded: serve the blocks in memory.
                    Err(TrySendError::Full(promotion) | TrySendError::Disconnected(promotion)) => {
                        self.serve(conn, &promotion.get)
                    }
                };
            }
        }
        self.serve(conn, &get)
    }

    /// How long a request may pin blocks: until its own deadline, but at most `serve_max`.
    fn serve_ns(&self, get: &Get) -> u64 {
        let max = nanos(self.shared.options.serve_max);
        (u64::from(get.deadline_ms) * 1_000_000).min(max)
    }

    /// Answers with the blocks in memory.
    fn serve(&mut self, conn: &mut Conn, get: &Get) -> Result<(), CloseReason> {
        let now = clock::now();
        if conn.pins.len() >= REQUESTS_MAX {
            return Err(CloseReason::Text(format!(
                "it has more than {REQUESTS_MAX} requests in flight"
            )));
        }
        let mut answers = Vec::with_capacity(get.blocks.len());
        let mut pins = Vec::new();
        let counters = &self.shared.counters;
        let stay = conn.scheme != Scheme::Stream;
        for wanted in &get.blocks {
            let tier = self.shared.options.serves.as_ref();
            let mut pinned = tier.and_then(|tier| tier.lend(now, &wanted.key));
            // Checked after the pin, so that no block stored after `stop_serving` is served.
            if self.shared.is_serving_stopped.load(Ordering::SeqCst) {
                pinned = None;
            }
            let Some(pin) = pinned else {
                count(&counters.absent, 1);
                answers.push(Answer::Absent);
                continue;
            };
            if pin.len() != wanted.len as usize {
                answers.push(Answer::Length(to_u32(pin.len())));
                continue;
            }
            count(&counters.served_blocks, 1);
            count(&counters.served_bytes, pin.len() as u64);
            answers.push(Answer::Here {
                checksum: pin.checksum(),
                offset: pin.offset() as u64,
                len: wanted.len,
            });
            pins.push(pin);
        }
        let request = get.request;
        let until = now + self.serve_ns(get) + GRACE_NS;
        conn.push(Piece::Bytes(Blocks { request, answers }.frame()));
        if stay {
            if !pins.is_empty() {
                conn.pins.insert(request, (until, pins));
                if let (Some(pulls), Scheme::Pull) = (&mut self.pulls, conn.scheme) {
                    pulls.on_pinned(now);
                }
            }
        } else {
            for pin in pins {
                conn.push(Piece::Block(pin));
            }
            // Blocks over TCP stay pinned until they are written.
            conn.write_due = Some(conn.write_due.map_or(until, |due| due.max(until)));
        }
        Ok(())
    }

    /// Handles a peer's answer.
    fn on_blocks(&mut self, conn: &mut Conn, blocks: Blocks) -> Result<(), CloseReason> {
        let Blocks { request, answers } = blocks;
        let transfer = self.transfers.get(&request).filter(|t| t.peer == conn.peer);
        if transfer.is_some_and(|transfer| transfer.destinations.len() != answers.len()) {
            return Err(CloseReason::Text(
                "its answer does not match the request".into(),
            ));
        }
        if conn.scheme != Scheme::Stream && transfer.is_none() {
            // The deadline has passed, or the request went to another peer.
            conn.push(release(request));
            return Ok(());
        }
        if conn.scheme == Scheme::Pull {
            return self.begin_pull(conn, request, answers);
        }
        if conn.scheme == Scheme::Map {
            self.copies.push_back(Copy {
                peer: conn.peer,
                request,
                answers: answers.into_iter().enumerate(),
            });
            return Ok(());
        }
        // If the deadline has passed, the blocks are still read from the stream, and discarded.
        let wanted: Vec<Option<usize>> = match transfer {
            Some(transfer) => transfer
                .destinations
                .iter()
                .map(|p| p.as_ref().map(crate::region::Lease::len))
                .collect(),
            None => vec![None; answers.len()],
        };
        let mut coming = VecDeque::with_capacity(answers.len());
        let mut failed = Vec::new();
        for (at, (answer, wanted)) in answers.into_iter().zip(wanted).enumerate() {
            match answer {
                Answer::Here { checksum, len, .. } => {
                    if wanted.is_some_and(|wanted| wanted != len as usize) {
                        return Err(CloseReason::Text(
                            "its blocks differ from the requested length".into(),
                        ));
                    }
                    coming.push_back((to_u32(at), len, checksum));
                }
                Answer::Absent => failed.push((at, FetchError::Absent)),
                Answer::Length(_) => failed.push((at, FetchError::Length)),
            }
        }
        for (at, why) in failed {
            self.settle(request, at, Err(why));
        }
        conn.payload = Some(Payload {
            request,
            blocks: coming,
            filled: 0,
        });
        self.end_payload_if_complete(conn);
        Ok(())
    }

    /// Takes blocks from bytes that were read with other data; returns how many bytes.
    fn take_payload(&mut self, conn: &mut Conn, bytes: &[u8]) -> usize {
        let mut taken = 0;
        while let Some(payload) = &mut conn.payload
            && let Some(&(at, len, _)) = payload.blocks.front()
            && taken < bytes.len()
        {
            let wanted = (len as usize - payload.filled).min(bytes.len() - taken);
            if let Some(destination) = destination_of(&mut self.transfers, payload.request, at) {
                let to = &mut destination[payload.filled..payload.filled + wanted];
                to.copy_from_slice(&bytes[taken..taken + wanted]);
            }
            payload.filled += wanted;
            taken += wanted;
            self.end_payload_if_complete(conn);
        }
        taken
    }

    /// Reads a block into its destination.
    fn read_payload(&mut self, conn: &mut Conn) -> Result<ReadOutcome, CloseReason> {
        let payload = conn.payload.as_mut().expect("checked by the caller");
        let &(at, len, _) = payload.blocks.front().expect("an empty payload is removed");
        let destination = destination_of(&mut self.transfers, payload.request, at);
        let outcome = if let Some(destination) = destination {
            read_into(&conn.socket, &mut destination[payload.filled..])?
        } else {
            // No destination: the bytes are late, and discarded.
            let left = (len as usize - payload.filled).min(1 << 20);
            self.scratch.resize(left, 0);
            read_into(&conn.socket, &mut self.scratch)?
        };
        if let ReadOutcome::Bytes(bytes) = outcome {
            conn.last_received = clock::now();
            payload.filled += bytes;
            self.end_payload_if_complete(conn);
        }
        Ok(outcome)
    }

    /// Settles complete blocks, and removes a complete payload.
    fn end_payload_if_complete(&mut self, conn: &mut Conn) {
        let Some(payload) = &mut conn.payload else {
            return;
        };
        while let Some(&(at, len, sum)) = payload.blocks.front()
            && payload.filled == len as usize
        {
            payload.blocks.pop_front();
            payload.filled = 0;
            let verify = self.shared.options.verify;
            let destination = destination_of(&mut self.transfers, payload.request, at);
            if let Some(destination) = destination {
                let right = !verify || checksum(destination) == sum;
                let outcome = if right {
                    Ok(())
                } else {
                    Err(FetchError::Checksum)
                };
                self.settle(payload.request, at as usize, outcome);
            }
        }
        if payload.blocks.is_empty() {
            let request = payload.request;
            conn.payload = None;
            self.finish_if_settled(request);
        }
    }

    /// Copies blocks out of peers' memory.
    fn copy_some(&mut self) {
        let mut turn = 0;
        let verify = self.shared.options.verify;
        while turn < TURN_BYTES {
            let Some(mut copy) = self.copies.pop_front() else {
                return;
            };
            let request = copy.request;
            let arena = self.conns[copy.peer.slot as usize]
                .as_ref()
                .filter(|conn| conn.peer == copy.peer)
                .and_then(|conn| conn.arena.clone());
            while turn < TURN_BYTES
                && let Some((at, answer)) = copy.answers.next()
            {
                let outcome = match answer {
                    Answer::Absent => Err(FetchError::Absent),
                    Answer::Length(_) => Err(FetchError::Length),
                    Answer::Here {
                        checksum: sum,
                        offset,
                        ..
                    } => {
                        let Some(destination) =
                            destination_of(&mut self.transfers, request, to_u32(at))
                        else {
                            continue;
                        };
                        // An empty block counts as well, so that every turn ends.
                        turn += destination.len().max(1);
                        let sum = verify.then_some(sum);
                        let right = arena
                            .as_ref()
                            .is_some_and(|arena| arena.copy_out(offset, destination, sum));
                        if right {
                            Ok(())
                        } else {
                            Err(FetchError::Checksum)
                        }
                    }
                };
                // The peer pins a block only until the deadline.
                let in_time = |t: &Transfer| clock::now() <= t.deadline;
                let late = !self.transfers.get(&request).is_some_and(in_time);
                let outcome = if late {
                    Err(FetchError::Deadline)
                } else {
                    outcome
                };
                self.settle(request, at, outcome);
            }
            if copy.answers.len() > 0 {
                self.copies.push_back(copy); // others have a turn
                return;
            }
            // The caller first: the message to the peer takes a system call.
            self.finish_if_settled(request);
            self.with_conn(copy.peer, |_, conn| {
                conn.push(release(request));
                Ok(())
            });
        }
    }

    fn fetch(&mut self, transfer: Transfer, get: Vec<u8>) {
        let (id, peer) = (transfer.id, transfer.peer);
        self.deadlines.insert((transfer.deadline, id));
        let empty = transfer.destinations.is_empty();
        self.transfers.insert(id, transfer);
        let mut up = false;
        self.with_conn(peer, |_, conn| {
            // A peer without remote memory only follows keys.
            up = conn.phase == Phase::Up && (conn.scheme != Scheme::Pull || conn.remote.is_some());
            if up && !empty {
                conn.push(Piece::Bytes(get));
            }
            Ok(())
        });
        if !up {
            self.fail_rest(id, FetchError::Lost);
        } else if empty {
            self.finish_if_settled(id);
        }
    }

    /// Records whether a block arrived.
    pub(super) fn settle(&mut self, request: u64, at: usize, outcome: Result<(), FetchError>) {
        let Some(transfer) = self.transfers.get_mut(&request) else {
            return;
        };
        let Some(destination) = transfer.destinations[at].take() else {
            return;
        };
        let counters = &self.shared.counters;
        match outcome {
            Ok(()) => {
                transfer.bytes += destination.len() as u64;
                count(&counters.fetched_blocks, 1);
                count(&counters.fetched_bytes, destination.len() as u64);
            }
            Err(why) => {
                transfer.failed.push((to_u32(at), why));
                count(&counters.failed[why as usize], 1);
            }
        }
    }

    pub(super) fn finish_if_settled(&mut self, request: u64) {
        let settled = |t: &Transfer| t.destinations.iter().all(Option::is_none);
        if !self.transfers.get(&request).is_some_and(settled) {
            return;
        }
        let transfer = self.transfers.remove(&request).expect("checked above");
        self.deadlines.remove(&(transfer.deadline, request));
        let done = Completion {
            transfer: super::TransferId(request),
            blocks: to_u32(transfer.destinations.len()),
            bytes: transfer.bytes,
            failed: transfer.failed,
            took_ns: clock::now().since(transfer.started),
        };
        let pushed = self.shared.done.push(done);
        assert!(pushed.is_ok(), "the submission reserved room");
    }

    fn fail_rest(&mut self, request: u64, why: FetchError) {
        let count = self
            .transfers
            .get(&request)
            .map_or(0, |t| t.destinations.len());
        for at in 0..count {
            self.settle(request, at, Err(why));
        }
        self.finish_if_settled(request);
    }

    fn end_due(&mut self, now: SimTime) {
        while let Some(&(at, id)) = self.deadlines.first()
            && at <= now
        {
            self.deadlines.pop_first();
            self.fail_rest(id, FetchError::Deadline);
        }
    }

    /// Pings peers, and ends connections that are silent, did not greet, or do not read their
    /// answers. Runs four times per `silence_max`.
    fn check_peers(&mut self, now: SimTime) {
        if let Some(index) = &self.shared.options.index
            && (self.sweeping || now >= self.next_ping)
        {
            self.sweeping = index.tick(now, SWEPT);
        }
        if now < self.next_ping {
            return;
        }
        let silence_ns = nanos(self.shared.options.silence_max);
        self.next_ping = now + silence_ns / 4;
        if let Some(pulls) = &mut self.pulls {
            pulls.progress();
        }
        let peers: Vec<PeerId> = self.conns.iter().flatten().map(|conn| conn.peer).collect();
        for peer in peers {
            self.with_conn(peer, |run, conn| {
                if now.since(conn.last_received) > silence_ns {
                    return Err(CloseReason::Text(format!(
                        "it was silent for {} ms",
                        silence_ns / 1_000_000
                    )));
                }
                if conn.phase != Phase::Up && now.since(conn.started) > silence_ns {
                    return Err(CloseReason::Text("it did not greet in time".into()));
                }
                // Its pins are void: it must not read further.
                let overdue = conn.pins.values().any(|(until, _)| *until < now);
                if overdue || conn.write_due.is_some_and(|due| due < now) {
                    return Err(CloseReason::Text(
                        "it did not read its answers in time".into(),
                    ));
                }
                if conn.phase == Phase::Up {
                    conn.push(Piece::Bytes(frame(FrameKind::Ping, &[])));
                    if let Some(index) = &run.shared.options.index {
                        index.on_message(conn.last_received, peer.slot as usize);
                    }
                }
                Ok(())
            });
        }
    }
}

/// The destination of block `at` of a transfer, if it is still wanted.
pub(super) fn destination_of(
    transfers: &mut HashMap<u64, Transfer>,
    request: u64,
    at: u32,
) -> Option<&mut [u8]> {
    let transfer = transfers.get_mut(&request)?;
    let destination = transfer.destinations.get_mut(at as usize)?.as_mut()?;
    Some(destination.bytes_mut())
}

fn data_of(peer: PeerId) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(peer.slot) | (u64::from(peer.generation) << 32))
}

/// Starts to connect.
fn open(address: &Address) -> io::Result<OwnedFd> {
    let (domain, to): (Domain, SockAddr) = match address {
        Address::Tcp(at) | Address::Nixl(at) => (Domain::for_address(*at), (*at).into()),
        Address::Unix(path) => (Domain::UNIX, SockAddr::unix(path)?),
    };
    let socket = Socket::new(domain, Type::STREAM, None)?; // closed on exec by default
    socket.set_nonblocking(true)?;
    match socket.connect(&to) {
        Err(error) if error.raw_os_error() == Some(Errno::INPROGRESS.raw_os_error()) => {}
        other => other?,
    }
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = 50;

    /// Whether the thread polls after an event at `now`.
    fn spins_after(spin: &mut Spin, now: u64, answer_due: bool) -> bool {
        spin.on_event(SimTime(now), answer_due);
        spin.should_spin(SimTime(now))
    }

    #[test]
    fn the_thread_spins_after_close_events_and_when_an_answer_is_due() {
        let spin = || Spin::new(Duration::from_nanos(MAX));
        assert!(!spins_after(&mut spin(), 1_000, false));
        assert!(spins_after(&mut spin(), 1_000, true));
        let mut close = spin();
        assert!(!spins_after(&mut close, 1_000, false));
        assert!(spins_after(&mut close, 1_000 + MAX, false));
        assert!(close.should_spin(SimTime(1_000 + 2 * MAX - 1)));
        assert!(!close.should_spin(SimTime(1_000 + 2 * MAX)));
        let mut off = Spin::new(Duration::ZERO);
        assert!(!spins_after(&mut off, 7, true));
        assert!(!spins_after(&mut off, 7, true));
    }

    #[test]
    fn spinning_in_vain_backs_off_until_an_event_comes() {
        let mut spin = Spin::new(Duration::from_nanos(MAX));
        let mut now = 1_000;
        let mut gaps = Vec::new();
        let mut gap = 0;
        while gaps.len() < 9 {
            now += 1_000;
            if spins_after(&mut spin, now, true) {
                assert!(!spin.should_spin(SimTime(now + MAX)));
                gaps.push(gap);
                gap = 0;
            } else {
                gap += 1;
            }
        }
        assert_eq!(gaps, [0, 1, 2, 4, 8, 16, 32, 64, 64]);
        while !spins_after(&mut spin, now, true) {
            now += 1_000;
        }
        // The event comes in time: from here on, every one is polled for.
        for _ in 0..10 {
            now += MAX - 1;
            assert!(spins_after(&mut spin, now, true));
        }
        // Events after close ones have a separate backoff.
        assert!(spins_after(&mut spin, now + 1, false));
    }
}
