//! One connection between a worker process and a shard: bytes in, whole frames out, and the time
//! since the peer's last frame.
//!
//! A [`Link`] belongs to one task of one thread. It reads and writes as much as the socket allows, and
//! never waits for more of either. Its memory is bounded: an inbox by the longest frame, an
//! outbox by [`Link::is_full`], which its owner must check.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::wire::{self, FrameKind, WireError};

/// Minimum free space for a read, bytes.
const READ_BYTES: usize = 64 << 10;

/// Memory that an empty box keeps, bytes.
const KEEP_BYTES: usize = 256 << 10;

/// A peer that was silent for this long counts as gone, unless configured.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// Clock reads per deadline: a peer is found gone at most a fourth of the deadline too late, and
/// pings are sent four times per deadline.
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
    /// The peer sent a malformed frame.
    #[error("{0}")]
    Wire(#[from] WireError),
    /// Nothing was received for the deadline, or nothing written was taken.
    #[error("the peer {what} for {after:?}; it is stopped, overloaded or cut off")]
    Silent {
        /// The failure of the peer.
        what: &'static str,
        /// Duration.
        after: Duration,
    },
    /// The peer reads more slowly than this side writes, and the outbox is full.
    #[error("the peer left {bytes} bytes unread, which is the limit")]
    Unread {
        /// Unread bytes.
        bytes: usize,
    },
}

/// A socket, encrypted or not.
pub trait Socket: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Socket for T {}

/// See the module's documentation.
pub struct Link {
    socket: Box<dyn Socket>,
    inbox: Inbox,
    outbox: Vec<u8>,
    /// Bytes of the outbox that the socket has taken.
    sent: usize,
    unsent_bytes_max: usize,
    /// The socket has taken bytes that it may not have sent: encrypted sockets buffer some.
    unflushed: bool,
    clock: PeerClock,
}

/// Received bytes that were not parsed yet.
#[derive(Debug)]
struct Inbox {
    bytes: Vec<u8>,
    /// Longest body of a frame.
    body_bytes_max: usize,
    /// Start and end of unread bytes; the rest of the buffer is free.
    start: usize,
    end: usize,
}

/// Times of the peer's last frame, and of its last read.
struct PeerClock {
    /// Silence after which the peer is given up.
    patience: Duration,
    ticks: Interval,
    last_tick: Instant,
    last_frame: Instant,
    last_read: Instant,
    /// Whether a frame was sent since the last tick.
    has_sent: bool,
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
            inbox: Inbox {
                bytes: Vec::new(),
                body_bytes_max: wire::BODY_BYTES_MAX,
                start: 0,
                end: 0,
            },
            outbox: Vec::new(),
            sent: 0,
            unsent_bytes_max,
            unflushed: false,
            clock: PeerClock {
                patience: deadline,
                ticks,
                last_tick: now,
                last_frame: now,
                last_read: now,
                has_sent: false,
            },
        }
    }

    /// Refuses frames with a longer body from now on: a peer that has not greeted gets little memory.
    pub fn limit_frames(&mut self, body_bytes_max: usize) {
        self.inbox.body_bytes_max = body_bytes_max;
    }

    /// Sets the deadline that both sides agreed on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        let period = (deadline / TICKS_PER_DEADLINE).max(Duration::from_millis(1));
        self.clock.patience = deadline;
        self.clock.ticks = interval_at(Instant::now() + period, period);
        self.clock
            .ticks
            .set_missed_tick_behavior(MissedTickBehavior::Delay);
    }

    /// Gives the peer up after `patience` only, if that is longer than the deadline, in which both sides send four pings.
    pub fn extend_patience(&mut self, patience: Duration) {
        self.clock.patience = self.clock.patience.max(patience);
    }

    /// Reads the available bytes, once. Ready after a read.
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
        self.clock.last_frame = Instant::now();
        Poll::Ready(Ok(()))
    }

    /// The next whole frame of the received bytes.
    ///
    /// # Errors
    /// [`WireError`]; do not use the link further.
    pub fn next_frame(&mut self) -> Result<Option<(FrameKind, &[u8])>, WireError> {
        self.inbox.next_frame()
    }

    /// Buffer to which frames are appended; [`Link::poll_write`] sends them.
    pub fn outbox(&mut self) -> &mut Vec<u8> {
        &mut self.outbox
    }

    /// Bytes that wait to be sent.
    pub fn unsent(&self) -> usize {
        self.outbox.len() - self.sent
    }

    /// Whether more bytes wait to be sent than allowed.
    pub fn is_full(&self) -> bool {
        self.unsent() > self.unsent_bytes_max
    }

    /// Writes pending bytes. Pending while the socket takes no more.
    ///
    /// # Errors
    /// [`LinkError::Io`].
    pub fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        if self.unsent() == 0 {
            return self.poll_flush(cx);
        }
        self.clock.has_sent = true;
        while self.unsent() > 0 {
            let rest = &self.outbox[self.sent..];
            let taken = ready!(Pin::new(&mut self.socket).poll_write(cx, rest))?;
            let taken = if slipstream_base::planted!("short-write") {
                rest.len()
            } else {
                taken
            };
            if taken == 0 {
                return Poll::Ready(Err(LinkError::Closed));
            }
            self.sent += taken;
            self.unflushed = true;
            self.clock.last_read = Instant::now();
        }
        self.sent = 0;
        if self.outbox.capacity() > KEEP_BYTES {
            self.outbox = Vec::new();
        } else {
            self.outbox.clear();
        }
        self.poll_flush(cx)
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        if self.unflushed {
            ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Handles the clock: appends a ping if nothing was sent for a while. Returns whether it is
    /// time to report loads, four times per deadline.
    ///
    /// # Errors
    /// [`LinkError::Silent`] if nothing was received from the peer, or it took nothing of the pending
    /// bytes, for the deadline.
    pub fn poll_time(&mut self, cx: &mut Context<'_>) -> Result<bool, LinkError> {
        if self.clock.ticks.poll_tick(cx).is_pending() {
            return Ok(false);
        }
        // Arms the next tick; a tick that is already due is seen next time.
        while self.clock.ticks.poll_tick(cx).is_ready() {}
        let (now, after) = (Instant::now(), self.clock.patience);
        let period = self.clock.ticks.period();
        let late = (now - self.clock.last_tick).saturating_sub(period * 2);
        self.clock.last_tick = now;
        // While this process was stopped, it could not hear the peer, whose frames it reads next.
        for time in [&mut self.clock.last_frame, &mut self.clock.last_read] {
            *time = (*time + late).min(now);
        }
        if now - self.clock.last_frame >= after && !slipstream_base::planted!("deaf-link") {
            let what = "said nothing";
            return Err(LinkError::Silent { what, after });
        }
        if self.unsent() == 0 {
            self.clock.last_read = now;
        } else if now - self.clock.last_read >= after {
            let what = "read nothing";
            return Err(LinkError::Silent { what, after });
        }
        if !std::mem::take(&mut self.clock.has_sent) {
            wire::encode_bare(FrameKind::Ping, &mut self.outbox);
        }
        Ok(true)
    }

    /// Reads until a whole frame is available, and returns the result of `take`. For greetings.
    ///
    /// # Errors
    /// [`LinkError`]; the errors of `take`.
    pub async fn receive<T>(
        &mut self,
        mut take: impl FnMut(FrameKind, &[u8]) -> Result<T, WireError>,
    ) -> Result<T, LinkError> {
        loop {
            if let Some((kind, body)) = self.inbox.next_frame()? {
                return Ok(take(kind, body)?);
            }
            std::future::poll_fn(|cx| self.poll_read(cx)).await?;
        }
    }

    /// Sends all pending bytes. For greetings and farewells.
    ///
    /// # Errors
    /// [`LinkError`].
    pub async fn flush(&mut self) -> Result<(), LinkError> {
        std::future::poll_fn(|cx| self.poll_write(cx)).await
    }
}

impl Inbox {
    /// Free space after the unread bytes.
    fn room(&mut self) -> &mut [u8] {
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
            if self.bytes.len() > KEEP_BYTES {
                self.bytes = Vec::new();
            }
        }
        if self.bytes.len() - self.end < READ_BYTES / 4 {
            // Half a frame at the end: it moves to the front, and the free space doubles.
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

    fn next_frame(&mut self) -> Result<Option<(FrameKind, &[u8])>, WireError> {
        let unread = &self.bytes[self.start..self.end];
        let Some(frame) = wire::split_within(unread, self.body_bytes_max)? else {
            return Ok(None);
        };
        self.start += frame.len;
        Ok(Some((frame.kind, frame.body)))
    }
}

/// Yields to all other tasks, sockets and timers included, and wakes the task afterwards. A task
/// that woke itself at once would get dozens of turns before its runtime polls sockets again.
pub fn yield_turn(cx: &mut Context<'_>) {
    let turn = std::pin::pin!(tokio::task::yield_now());
    let pending = turn.poll(cx).is_pending();
    debug_assert!(pending, "who yields is woken later");
}

#[cfg(test)]
mod tests {
    use slipstream_base::{RankId, WorkerId};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;
    use crate::frame::{PassFrame, ToWorker};
    use crate::stream::StreamId;

    fn run<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(future)
    }

    const DEADLINE: Duration = Duration::from_secs(4);

    /// The bytes of a worker's short session, and the ends of its frames.
    fn session() -> (Vec<u8>, Vec<usize>) {
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        let hello = wire::Hello {
            instance: 1,
            fingerprint: 2,
            shard: 0,
            deadline_ms: 4000,
            clock: 3,
            name: "a worker".into(),
            workers: vec![wire::Announced {
                worker: WorkerId(0),
                ranks: 1,
                ready: true,
            }],
            key: [0; 16],
        };
        hello.encode(&mut bytes);
        ends.push(bytes.len());
        for token in 0..5 {
            let mut pass = PassFrame::new();
            let stream = StreamId {
                slot: token,
                generation: 0,
            };
            pass.push_tokens(stream, &[token, token + 1], None);
            wire::encode_pass(&pass, &mut bytes);
            ends.push(bytes.len());
            wire::encode_bare(FrameKind::Ping, &mut bytes);
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    /// Reads frames until the link ends.
    async fn read_all(link: &mut Link) -> (usize, LinkError) {
        let mut frames = 0;
        loop {
            match link.receive(|_, _| Ok(())).await {
                Ok(()) => frames += 1,
                Err(error) => return (frames, error),
            }
        }
    }

    #[test]
    fn a_session_cut_at_any_byte_gives_the_frames_before_the_cut_and_then_its_end() {
        let (bytes, ends) = session();
        for cut in 0..=bytes.len() {
            run(async {
                let (mut peer, socket) = duplex(1 << 16);
                let mut link = Link::new(Box::new(socket), DEADLINE, 1 << 20);
                peer.write_all(&bytes[..cut]).await.unwrap();
                drop(peer);
                let (frames, error) = read_all(&mut link).await;
                let whole = ends.iter().filter(|&&end| end <= cut).count();
                assert_eq!(frames, whole, "cut at {cut}");
                assert!(matches!(error, LinkError::Closed), "cut at {cut}: {error}");
            });
        }
    }

    #[test]
    fn a_frame_that_is_longer_than_a_greeting_is_refused_by_its_header() {
        run(async {
            let (mut peer, socket) = duplex(1 << 16);
            let mut link = Link::new(Box::new(socket), DEADLINE, 1 << 20);
            link.limit_frames(wire::Hello::bytes_max(2));
            let mut header = (1u32 << 20).to_le_bytes().to_vec();
            header.extend([wire::VERSION, FrameKind::Hello as u8, 0, 0]);
            peer.write_all(&header).await.unwrap();
            let error = link.receive(|_, _| Ok(())).await.unwrap_err();
            assert!(
                matches!(error, LinkError::Wire(WireError::Length { .. })),
                "{error}"
            );
            // A frame within the limit passes; after the greeting there is no limit.
            let (bytes, _) = session();
            let (mut peer, socket) = duplex(1 << 16);
            let mut link = Link::new(Box::new(socket), DEADLINE, 1 << 20);
            link.limit_frames(wire::Hello::bytes_max(2));
            peer.write_all(&bytes).await.unwrap();
            link.receive(|_, _| Ok(())).await.unwrap();
            link.limit_frames(wire::BODY_BYTES_MAX);
            link.receive(|_, _| Ok(())).await.unwrap();
        });
    }

    #[test]
    fn a_session_that_comes_byte_by_byte_is_the_same_session() {
        let (bytes, ends) = session();
        run(async {
            let (mut peer, socket) = duplex(1);
            let mut link = Link::new(Box::new(socket), DEADLINE, 1 << 20);
            let write = async {
                peer.write_all(&bytes).await.unwrap();
                drop(peer);
            };
            let ((frames, _), ()) = tokio::join!(read_all(&mut link), write);
            assert_eq!(frames, ends.len());
        });
    }

    #[test]
    fn long_frames_and_many_of_them_pass_through_a_small_pipe() {
        run(async {
            let (socket, other) = duplex(1000);
            let mut sender = Link::new(Box::new(socket), DEADLINE, 1 << 20);
            let mut receiver = Link::new(Box::new(other), DEADLINE, 1 << 20);
            let mut sent = 0;
            for words in [0, 1, 50_000, 3, 300_000, 7] {
                let mut pass = PassFrame::new();
                for token in 0..words {
                    let stream = StreamId {
                        slot: 1,
                        generation: 1,
                    };
                    pass.push_tokens(stream, &[token], None);
                }
                sent += words;
                wire::encode_pass(&pass, sender.outbox());
            }
            let mut received = 0;
            let receive = async {
                let mut pass = PassFrame::new();
                for _ in 0..6 {
                    let decode = |_, body: &[u8]| wire::decode_pass(body, &mut pass);
                    receiver.receive(decode).await.unwrap();
                    received += pass.len();
                }
            };
            let (flushed, ()) = tokio::join!(sender.flush(), receive);
            flushed.unwrap();
            assert_eq!(received, sent);
            assert!(
                sender.outbox().capacity() <= KEEP_BYTES,
                "memory is given back"
            );
        });
    }

    /// Polls the link as its owner does, until it ends.
    async fn live(link: &mut Link) -> LinkError {
        std::future::poll_fn(|cx| {
            while let Poll::Ready(read) = link.poll_read(cx) {
                if let Err(error) = read {
                    return Poll::Ready(error);
                }
                while let Ok(Some(_)) = link.next_frame() {}
            }
            if let Err(error) = link.poll_time(cx) {
                return Poll::Ready(error);
            }
            match link.poll_write(cx) {
                Poll::Ready(Err(error)) => Poll::Ready(error),
                _ => Poll::Pending,
            }
        })
        .await
    }

    #[test]
    fn two_ends_that_have_nothing_to_say_keep_each_other_alive() {
        run(async {
            let (one, other) = duplex(1 << 16);
            let mut one = Link::new(Box::new(one), DEADLINE, 1 << 20);
            let mut other = Link::new(Box::new(other), DEADLINE, 1 << 20);
            let lives = async { tokio::join!(live(&mut one), live(&mut other)) };
            let outcome = tokio::time::timeout(DEADLINE * 20, lives).await;
            assert!(outcome.is_err(), "{outcome:?}");
        });
    }

    #[test]
    fn a_peer_that_says_nothing_is_given_up_after_the_deadline() {
        run(async {
            let (socket, _peer) = duplex(1 << 16);
            let mut link = Link::new(Box::new(socket), DEADLINE, 1 << 20);
            let began = Instant::now();
            let error = live(&mut link).await;
            assert!(matches!(
                error,
                LinkError::Silent {
                    what: "said nothing",
                    ..
                }
            ));
            assert!(began.elapsed() <= DEADLINE * 5 / 4);
        });
    }

    #[test]
    fn a_peer_that_is_stopped_for_less_than_the_patience_is_kept() {
        run(async {
            let (socket, _peer) = duplex(1 << 16);
            let mut link = Link::new(Box::new(socket), DEADLINE, 1 << 20);
            link.extend_patience(DEADLINE / 2); // no less
            link.extend_patience(DEADLINE * 3);
            let began = Instant::now();
            let error = live(&mut link).await;
            assert!(matches!(error, LinkError::Silent { .. }), "{error}");
            let kept = began.elapsed();
            assert!(
                (DEADLINE * 3..=DEADLINE * 13 / 4).contains(&kept),
                "{kept:?}"
            );
        });
    }

    #[test]
    fn a_peer_that_never_reads_is_given_up_though_it_talks() {
        run(async {
            let (socket, peer) = duplex(100);
            let mut link = Link::new(Box::new(socket), DEADLINE, 1 << 20);
            let rank = RankId::default();
            for _ in 0..100 {
                wire::encode_to_worker(&ToWorker::Resync { rank }, link.outbox());
            }
            let (_unread, mut talker) = tokio::io::split(peer);
            let talk = async {
                let mut ping = Vec::new();
                wire::encode_bare(FrameKind::Ping, &mut ping);
                loop {
                    if talker.write_all(&ping).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(DEADLINE / 4).await;
                }
            };
            let error = tokio::select! {
                error = live(&mut link) => error,
                () = talk => unreachable!("the link holds its end"),
            };
            assert!(
                matches!(
                    error,
                    LinkError::Silent {
                        what: "read nothing",
                        ..
                    }
                ),
                "{error}"
            );
        });
    }

    #[test]
    fn what_waits_is_counted_and_bounded() {
        run(async {
            let (socket, mut peer) = duplex(10);
            let mut link = Link::new(Box::new(socket), DEADLINE, 100);
            for _ in 0..20 {
                wire::encode_bare(FrameKind::Ping, link.outbox());
            }
            assert!(link.is_full());
            assert_eq!(link.unsent(), 160);
            let mut received = vec![0; 160];
            let (flushed, read) = tokio::join!(link.flush(), peer.read_exact(&mut received));
            flushed.unwrap();
            read.unwrap();
            assert!(!link.is_full());
        });
    }
}
