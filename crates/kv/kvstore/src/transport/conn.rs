//! One connection: its socket, unparsed input, and queued output.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use slipstream_base::SimTime;

use super::pull::RemoteMemory;
use super::{Address, PeerId};
use crate::arena::Arena;
use crate::tier::memory::{MemoryTier, Pinned};

/// Bytes per read of frames.
const READ_BYTES: usize = 64 << 10;
/// Pieces per write.
const PIECES: usize = 32;
/// Maximum bytes queued for a slow peer. Blocks do not count: the peer's requests bound them.
pub(super) const OUT_BYTES_MAX: usize = 64 << 20;
/// Maximum bytes that a peer may send before its greeting is accepted. NIXL's metadata of an agent
/// has some KiB.
pub(super) const GREETING_BYTES_MAX: usize = 1 << 20;

/// Progress of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The socket is not connected yet.
    Connecting,
    /// Greetings are exchanged.
    Greeting,
    /// The peer has sent its greeting, but not yet the access to its memory.
    Introducing,
    Up,
}

/// How blocks are transferred over a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// Blocks follow their frames.
    Stream,
    /// The other side maps the memory of the blocks.
    Map,
    /// The other side reads the blocks by NIXL.
    Pull,
}

impl Scheme {
    pub(super) fn of(address: &Address) -> Scheme {
        match address {
            Address::Tcp(_) => Scheme::Stream,
            Address::Unix(_) => Scheme::Map,
            Address::Nixl(_) => Scheme::Pull,
        }
    }

    /// The name in the handshake.
    pub(super) fn name(self) -> &'static str {
        match self {
            Scheme::Stream => "tcp",
            Scheme::Map => "unix",
            Scheme::Pull => "nixl",
        }
    }
}

pub(super) struct Conn {
    pub(super) peer: PeerId,
    /// For messages: the peer's name and address, once it has greeted.
    pub(super) name: String,
    pub(super) peer_name: String,
    pub(super) socket: OwnedFd,
    pub(super) scheme: Scheme,
    pub(super) phase: Phase,
    pub(super) last_received: SimTime,
    /// When the connection was made; the greeting is due some time after.
    pub(super) started: SimTime,
    /// Unparsed input begins at `start`.
    pub(super) input: Vec<u8>,
    pub(super) start: usize,
    /// Blocks that follow a frame, in order.
    pub(super) payload: Option<Payload>,
    /// The peer made the connection.
    pub(super) is_inbound: bool,
    /// A descriptor received with the peer's memory, and the size from its greeting.
    pub(super) fd: Option<OwnedFd>,
    pub(super) arena_bytes: u64,
    /// The peer's memory: mapped, or read by NIXL.
    pub(super) arena: Option<Arc<Arena>>,
    pub(super) remote: Option<RemoteMemory>,
    out: VecDeque<Piece>,
    /// Bytes of the first piece that are already sent.
    out_at: usize,
    out_bytes: usize,
    pub(super) wants_write: bool,
    /// Blocks that the peer reads in this side's memory, by its request.
    pub(super) pins: HashMap<u64, (SimTime, Vec<Pinned>)>,
    /// When the peer must have read the answers that are queued for it.
    pub(super) write_due: Option<SimTime>,
}

/// Blocks that follow a frame and are being received.
pub(super) struct Payload {
    pub(super) request: u64,
    /// Index in the request, length, checksum.
    pub(super) blocks: VecDeque<(u32, u32, u64)>,
    /// Received bytes of the first one.
    pub(super) filled: usize,
}

pub(super) enum Piece {
    Bytes(Vec<u8>),
    Shared(Arc<[u8]>),
    Block(Pinned),
    /// A frame, with the descriptor of this side's memory.
    Memory(Vec<u8>, Arc<MemoryTier>),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Bytes(bytes) | Piece::Memory(bytes, _) => bytes,
            Piece::Shared(bytes) => bytes,
            Piece::Block(block) => block.bytes(),
        }
    }

    fn weight(&self) -> usize {
        match self {
            Piece::Block(_) => 0,
            other => other.bytes().len(),
        }
    }
}

/// The result of a read.
pub(super) enum ReadOutcome {
    Bytes(usize),
    /// No data for now.
    Nothing,
    /// The peer closed the connection.
    End,
}

impl Conn {
    pub(super) fn new(
        peer: PeerId,
        name: String,
        socket: OwnedFd,
        scheme: Scheme,
        now: SimTime,
    ) -> Conn {
        Conn {
            peer,
            name,
            peer_name: String::new(),
            socket,
            scheme,
            phase: Phase::Greeting,
            last_received: now,
            started: now,
            input: Vec::new(),
            start: 0,
            payload: None,
            is_inbound: false,
            fd: None,
            arena_bytes: 0,
            arena: None,
            remote: None,
            out: VecDeque::new(),
            out_at: 0,
            out_bytes: 0,
            wants_write: false,
            pins: HashMap::new(),
            write_due: None,
        }
    }

    pub(super) fn push(&mut self, piece: Piece) {
        self.out_bytes += piece.weight();
        self.out.push_back(piece);
    }

    pub(super) fn is_slow(&self) -> bool {
        self.out_bytes > OUT_BYTES_MAX
    }

    pub(super) fn is_written(&self) -> bool {
        self.out.is_empty()
    }

    /// Writes as much as possible. An error ends the connection.
    pub(super) fn write(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            let sent = self.write_some();
            match sent {
                Ok(sent) => self.advance(sent),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.write_due = None;
        Ok(())
    }

    fn write_some(&self) -> rustix::io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); PIECES];
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(&self.out) {
            if count > 0 && matches!(piece, Piece::Memory(..)) {
                break; // its descriptor is sent with its first byte
            }
            let skip = if count == 0 { self.out_at } else { 0 };
            *slice = IoSlice::new(&piece.bytes()[skip..]);
            count += 1;
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if let (Some(Piece::Memory(_, tier)), 0) = (self.out.front(), self.out_at) {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [tier.arena().fd()];
            assert!(
                control.push(SendAncillaryMessage::ScmRights(&fds)),
                "the buffer has space for one descriptor"
            );
            return rustix::net::sendmsg(&self.socket, &slices[..1], &mut control, flags);
        }
        let mut control = SendAncillaryBuffer::default();
        rustix::net::sendmsg(&self.socket, &slices[..count], &mut control, flags)
    }

    fn advance(&mut self, mut sent: usize) {
        while let Some(first) = self.out.front() {
            let left = first.bytes().len() - self.out_at;
            if sent < left {
                self.out_at += sent;
                return;
            }
            sent -= left;
            self.out_at = 0;
            self.out_bytes -= first.weight();
            self.out.pop_front();
        }
    }

    /// Reads some bytes, and appends them to `input`.
    pub(super) fn read(&mut self) -> io::Result<ReadOutcome> {
        if self.start > 0 {
            self.input.drain(..self.start);
            self.start = 0;
        }
        let before = self.input.len();
        self.input.resize(before + READ_BYTES, 0);
        let has_fd = self.phase == Phase::Greeting || self.phase == Phase::Introducing;
        let outcome = if self.scheme == Scheme::Map && has_fd {
            self.read_with_fd(before)
        } else {
            read_into(&self.socket, &mut self.input[before..])
        };
        let kept = match outcome {
            Ok(ReadOutcome::Bytes(bytes)) => bytes,
            _ => 0,
        };
        self.input.truncate(before + kept);
        outcome
    }

    fn read_with_fd(&mut self, before: usize) -> io::Result<ReadOutcome> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [io::IoSliceMut::new(&mut self.input[before..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let outcome = rustix::net::recvmsg(self.socket.as_fd(), &mut slices, &mut control, flags);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fd = fds.last().or(self.fd.take());
            }
        }
        outcome_of(outcome.map(|message| message.bytes))
    }
}

/// Reads into `out`, which is not empty.
pub(super) fn read_into(socket: &OwnedFd, out: &mut [u8]) -> io::Result<ReadOutcome> {
    outcome_of(rustix::io::read(socket, out))
}

fn outcome_of(read: rustix::io::Result<usize>) -> io::Result<ReadOutcome> {
    match read {
        Ok(0) => Ok(ReadOutcome::End),
        Ok(bytes) => Ok(ReadOutcome::Bytes(bytes)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(ReadOutcome::Nothing),
        Err(error) => Err(error.into()),
    }
}
