//! One connection between a worker process and a shard: bytes in, whole frames out, and the time
//! since the peer was heard.
//!
//! A [`Link`] belongs to one task of one thread. It reads what is there, writes what is there, and
//! never waits for more of either. What it keeps is bounded: an inbox by the longest frame, an
//! outbox by [`Link::is_full`], which its owner heeds.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::wire::{self, Kind, WireError};

/// Room that a read finds at least, bytes.
const READ_BYTES: usize = 64 << 10;

/// Memory that an empty box keeps, bytes.
const KEEP_BYTES: usize = 256 << 10;

/// A peer that was silent for so long counts as gone, unless told otherwise.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// Looks at the time in one deadline: a peer is found gone at most a fourth of it too late, and
/// pings come four times in it.
const TICKS_PER_DEADLINE: u32 = 4;

/// Why a connection ended. Another one may be made.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer closed it, or its process ended.
    #[error("the peer closed the connection")]
    Closed,
    /// The system ended it.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer sent what is no frame.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// Nothing was heard for the deadline, or nothing of what was written was taken.
    #[error("the peer {what} for {after:?}; it is stopped, overloaded or cut off")]
    Silent {
        /// What it did.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// The peer reads more slowly than it is written to, and the outbox is full.
    #[error("the peer left {bytes} bytes unread, which is the limit")]
    Unread {
        /// How many.
        bytes: usize,
    },
}

/// A socket, encrypted or not.
pub trait Socket: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Socket for T {}

/// See the module's text.
pub struct Link {
    socket: Box<dyn Socket>,
    inbox: Inbox,
    outbox: Vec<u8>,
    /// Bytes of the outbox that the socket has taken.
    sent: usize,
    unsent_bytes_max: usize,
    clock: PeerClock,
}

/// Received bytes that were not yet taken apart.
#[derive(Debug, Default)]
struct Inbox {
    bytes: Vec<u8>,
    /// Where unread bytes begin and end; what lies behind is room.
    start: usize,
    end: usize,
}

/// When the peer was last heard, and when it last took something.
struct PeerClock {
    deadline: Duration,
    ticks: Interval,
    heard: Instant,
    took: Instant,
    /// Something was sent since the last tick.
    spoke: bool,
}

impl Link {
    /// A link over a connected socket.
    pub fn new(socket: Box<dyn Socket>, deadline: Duration, unsent_bytes_max: usize) -> Link {
        let now = Instant::now();
        let period = (deadline / TICKS_PER_DEADLINE).max(Duration::from_millis(1));
        let mut ticks = interval_at(now + period, period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Link {
            socket,
            inbox: Inbox::default(),
            outbox: Vec::new(),
            sent: 0,
            unsent_bytes_max,
            clock: PeerClock {
                deadline,
                ticks,
                heard: now,
                took: now,
                spoke: false,
            },
        }
    }

    /// A link over TCP: small frames leave at once.
    ///
    /// # Errors
    /// If the peer has gone already.
    pub fn over_tcp(
        stream: TcpStream,
        deadline: Duration,
        unsent_bytes_max: usize,
    ) -> io::Result<Link> {
        stream.set_nodelay(true)?;
        Ok(Link::new(Box::new(stream), deadline, unsent_bytes_max))
    }

    /// Takes the deadline that both sides agreed on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        let period = (deadline / TICKS_PER_DEADLINE).max(Duration::from_millis(1));
        self.clock.deadline = deadline;
        self.clock.ticks = interval_at(Instant::now() + period, period);
        self.clock
            .ticks
            .set_missed_tick_behavior(MissedTickBehavior::Delay);
    }

    /// Reads once, what is there. Ready once something was read.
    ///
    /// # Errors
    /// [`LinkError::Closed`], [`LinkError::Io`].
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        let room = self.inbox.room();
        let mut buf = ReadBuf::new(room);
        ready!(Pin::new(&mut self.socket).poll_read(cx, &mut buf))?;
        let read = buf.filled().len();
        if read == 0 {
            return Poll::Ready(Err(LinkError::Closed));
        }
        self.inbox.end += read;
        self.clock.heard = Instant::now();
        Poll::Ready(Ok(()))
    }

    /// The next whole frame of what was read.
    ///
    /// # Errors
    /// [`WireError`]; the link is not to be used further.
    pub fn next_frame(&mut self) -> Result<Option<(Kind, &[u8])>, WireError> {
        self.inbox.next_frame()
    }

    /// Where frames to send are appended; [`Link::poll_write`] sends them.
    pub fn outbox(&mut self) -> &mut Vec<u8> {
        &mut self.outbox
    }

    /// Bytes that wait to be sent.
    pub fn unsent(&self) -> usize {
        self.outbox.len() - self.sent
    }

    /// Whether more waits to be sent than may.
    pub fn is_full(&self) -> bool {
        self.unsent() > self.unsent_bytes_max
    }

    /// Writes what waits. Pending while the socket takes no more.
    ///
    /// # Errors
    /// [`LinkError::Io`].
    pub fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        if self.unsent() == 0 {
            return Poll::Ready(Ok(()));
        }
        self.clock.spoke = true;
        while self.unsent() > 0 {
            let rest = &self.outbox[self.sent..];
            let taken = ready!(Pin::new(&mut self.socket).poll_write(cx, rest))?;
            if taken == 0 {
                return Poll::Ready(Err(LinkError::Closed));
            }
            self.sent += taken;
            self.clock.took = Instant::now();
        }
        self.sent = 0;
        if self.outbox.capacity() > KEEP_BYTES {
            self.outbox = Vec::new();
        } else {
            self.outbox.clear();
        }
        // Encrypted sockets keep what they took until they are flushed.
        Pin::new(&mut self.socket)
            .poll_flush(cx)
            .map_err(LinkError::Io)
    }

    /// Looks at the time: appends a ping if nothing was said for a while. Returns whether it is a
    /// moment to say how things are, which comes four times in a deadline.
    ///
    /// # Errors
    /// [`LinkError::Silent`] if the peer was not heard, or took nothing of what waits, for the
    /// deadline.
    pub fn poll_time(&mut self, cx: &mut Context<'_>) -> Result<bool, LinkError> {
        if self.clock.ticks.poll_tick(cx).is_pending() {
            return Ok(false);
        }
        // Arms the next tick; a tick that is due already will be seen next time.
        while self.clock.ticks.poll_tick(cx).is_ready() {}
        let (now, after) = (Instant::now(), self.clock.deadline);
        if now - self.clock.heard >= after {
            let what = "said nothing";
            return Err(LinkError::Silent { what, after });
        }
        if self.unsent() == 0 {
            self.clock.took = now;
        } else if now - self.clock.took >= after {
            let what = "read nothing";
            return Err(LinkError::Silent { what, after });
        }
        if !std::mem::take(&mut self.clock.spoke) {
            wire::encode_bare(Kind::Ping, &mut self.outbox);
        }
        Ok(true)
    }

    /// Reads until a whole frame is there, and returns what `take` makes of it. For greetings.
    ///
    /// # Errors
    /// [`LinkError`]; what `take` finds wrong.
    pub async fn receive<T>(
        &mut self,
        mut take: impl FnMut(Kind, &[u8]) -> Result<T, WireError>,
    ) -> Result<T, LinkError> {
        loop {
            if let Some((kind, body)) = self.inbox.next_frame()? {
                return Ok(take(kind, body)?);
            }
            std::future::poll_fn(|cx| self.poll_read(cx)).await?;
        }
    }

    /// Sends everything that waits. For greetings and farewells.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn flush(&mut self) -> Result<(), LinkError> {
        std::future::poll_fn(|cx| self.poll_write(cx)).await
    }
}

impl Inbox {
    /// Room for more, after what is there.
    fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            if self.bytes.len() > KEEP_BYTES {
                self.bytes = Vec::new();
            }
        }
        if self.bytes.len() - self.end < READ_BYTES / 4 {
            // Half a frame at the end: it moves to the front, and the room behind it doubles.
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            let len = (self.end * 2).max(READ_BYTES);
            if self.bytes.len() < len {
                self.bytes.resize(len, 0);
            }
        }
        &mut self.bytes[self.end..]
    }

    fn next_frame(&mut self) -> Result<Option<(Kind, &[u8])>, WireError> {
        let unread = &self.bytes[self.start..self.end];
        let Some(frame) = wire::split(unread)? else {
            return Ok(None);
        };
        self.start += frame.len;
        Ok(Some((frame.kind, frame.body)))
    }
}
