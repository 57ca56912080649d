//! One connection at work: requests from the socket to the rings, frames from the rings to the
//! socket.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use slipstream_planes::link::{Link, LinkError, yield_turn};
use slipstream_planes::ring::Polled;
use slipstream_planes::stream::SLOTS_MAX;
use slipstream_planes::wire::{self, FrameKind, WireError};
use slipstream_planes::{
    Entry, PassFrame, RefusalReason, SendError, ShardPort, StreamAddr, StreamId, ToWorker,
};
use tokio::sync::watch;

use super::broadcast::Subscription;
use super::{Home, Stage, dial};

/// Reads of the socket in one turn, of at least 16 KiB each; then frames get theirs.
const READS_PER_TURN: usize = 8;

/// Frames in one turn.
const FRAMES_PER_TURN: usize = 64;

/// The stream that hang-ups are confirmed by. No table is large enough to use it.
const NO_STREAM: u32 = SLOTS_MAX - 1;

pub(super) struct Relay {
    home: Rc<Home>,
    link: Link,
    port: ShardPort,
    subscription: Subscription,
}

impl Relay {
    pub(super) fn new(
        home: Rc<Home>,
        link: Link,
        port: ShardPort,
        subscription: Subscription,
        wants_kv: bool,
    ) -> Relay {
        let relay = Relay {
            home,
            link,
            port,
            subscription,
        };
        if wants_kv {
            // In this order: deltas between the two come before the snapshot, and are skipped.
            relay.subscription.want_kv();
            relay.ask_for_snapshots();
        }
        relay
    }

    fn ask_for_snapshots(&self) {
        for stats in self.home.workers.iter().flat_map(|worker| &worker.ranks) {
            self.home.resyncs.resync(stats.rank);
        }
    }

    /// Relays until the connection ends, or this process does and all was sent.
    pub(super) async fn run(
        &mut self,
        mut staged: watch::Receiver<Stage>,
    ) -> Result<(), LinkError> {
        loop {
            if *staged.borrow_and_update() == Stage::Closing {
                return self.close().await;
            }
            tokio::select! {
                biased;
                outcome = poll_fn(|cx| self.poll(cx)) => return outcome,
                changed = staged.changed() => {
                    if changed.is_err() {
                        return self.close().await;
                    }
                }
            }
        }
    }

    /// The engines have stopped: what they said leaves, then the connection closes.
    async fn close(&mut self) -> Result<(), LinkError> {
        self.take_frames(None)?;
        let limit = self.home.config.deadline;
        // A peer that does not read learns the rest from the closed connection.
        let _ = tokio::time::timeout(limit, self.link.flush()).await;
        Ok(())
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LinkError>> {
        match self.turn(cx) {
            Ok(true) => {
                yield_turn(cx);
                Poll::Pending
            }
            Ok(false) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    /// One look at everything. Returns whether there may be more at once.
    fn turn(&mut self, cx: &mut Context<'_>) -> Result<bool, LinkError> {
        let mut more = true;
        for _ in 0..READS_PER_TURN {
            // First: the read that brought the greeting may have brought requests with it.
            self.take_requests()?;
            match self.link.poll_read(cx) {
                Poll::Ready(read) => read?,
                Poll::Pending => {
                    more = false;
                    break;
                }
            }
        }
        more |= self.take_frames(Some(cx))?;
        let lost = self.subscription.take(cx.waker(), self.link.outbox());
        if lost && !slipstream_base::planted!("lost-snapshot") {
            self.ask_for_snapshots();
        }
        if self.link.poll_time(cx)? {
            dial::put_loads(&self.home, self.link.outbox());
        }
        if self.link.is_full() {
            let bytes = self.link.unsent();
            return Err(LinkError::Unread { bytes });
        }
        if let Poll::Ready(written) = self.link.poll_write(cx) {
            written?;
        }
        Ok(more)
    }

    /// Hands requests that came to their engine threads.
    fn take_requests(&mut self) -> Result<(), WireError> {
        // Refusals, as the outbox is not to be had while a frame is looked at.
        let mut refusals = PassFrame::new();
        while let Some((kind, body)) = self.link.next_frame()? {
            if kind == FrameKind::Ping || kind == FrameKind::Bye {
                // A frontend that leaves sends no more by itself.
                continue;
            }
            let message = wire::decode_to_worker(kind, body, self.port.shard())?;
            if let ToWorker::Resync { rank } = message {
                // By the flag, as a ring may be full: the frontend asks once per gap.
                self.home.resyncs.resync(rank);
                continue;
            }
            let (reason, text, message) = match self.port.send(message) {
                Ok(()) => continue,
                Err(SendError::Full(message)) => (
                    RefusalReason::Busy,
                    "the worker's inbox is full; retry in a moment",
                    message,
                ),
                Err(SendError::Closed(message)) => (
                    RefusalReason::Stopping,
                    "the engine thread has stopped; retry on another worker",
                    message,
                ),
            };
            if let ToWorker::Start(start) = message {
                self.home.count(|s| &s.refused);
                refusals.push_refused(start.addr.stream, start.attempt, reason, text);
            }
        }
        if !refusals.is_empty() {
            wire::encode_pass(&refusals, self.link.outbox());
        }
        Ok(())
    }

    /// Puts frames that wait into the outbox: with `cx`, some, and it is woken when there are
    /// more; without, all. They leave the rings whether or not the peer reads: an engine thread
    /// never waits for a socket, and the outbox has a bound of its own. Returns whether there may
    /// be more at once.
    ///
    /// An engine thread that died is an error: only the end of a connection shows the shard that
    /// its streams there have.
    fn take_frames(&mut self, cx: Option<&mut Context<'_>>) -> Result<bool, LinkError> {
        let (outbox, stats) = (self.link.outbox(), &self.home.stats);
        let mut frames = 0;
        let before = outbox.len();
        let put = |frame: &PassFrame| {
            frames += 1;
            wire::encode_pass(frame, outbox);
        };
        let more = match cx {
            None => {
                self.port.read_frames(usize::MAX, put);
                false
            }
            Some(cx) => match self.port.poll_frames(cx, FRAMES_PER_TURN, put) {
                Poll::Ready(Polled::ThreadGone(_)) if !self.home.leaving.get() => {
                    return Err(io::Error::other("an engine thread died").into());
                }
                // The bell was not set: look again before sleeping.
                Poll::Ready(Polled::Frames(_) | Polled::ThreadGone(_)) => true,
                Poll::Ready(Polled::Closed) | Poll::Pending => false,
            },
        };
        if frames > 0 {
            stats.frames.fetch_add(frames, Relaxed);
            let bytes = (self.link.outbox().len() - before) as u64;
            stats.pass_bytes.fetch_add(bytes, Relaxed);
        }
        Ok(more)
    }

    /// Kills all streams of the connection, waits until the engine threads have done so, and gives
    /// the link back, empty.
    pub(super) async fn hang_up(self) -> ShardPort {
        let port = self.port;
        drop(self.link);
        drop(self.subscription);
        let generation = self.home.hang_ups.get();
        self.home.hang_ups.set(generation.wrapping_add(1));
        let addr = StreamAddr {
            shard: port.shard(),
            stream: StreamId {
                slot: NO_STREAM,
                generation,
            },
        };
        let mut awaited = 0;
        for worker in self.home.thread_workers.iter().flatten() {
            let worker = *worker;
            // Kept by the plane if the ring is full; refused only by a thread that is gone.
            if port.send(ToWorker::HangUp { worker, addr }).is_ok() {
                awaited += 1;
            }
        }
        while awaited > 0 {
            let polled = port
                .frames(FRAMES_PER_TURN, |frame| {
                    let ends = frame.entries().filter(|entry| {
                        matches!(entry, Entry::End { stream, .. } if *stream == addr.stream)
                    });
                    awaited -= ends.count().min(awaited);
                })
                .await;
            match polled {
                Polled::Frames(_) => {}
                Polled::ThreadGone(_) => awaited = awaited.saturating_sub(1),
                Polled::Closed => break,
            }
        }
        port
    }
}
