//! The request and response plane inside one process: bounded rings between each shard and each
//! engine thread.
//! A pair of shard and thread has three rings: requests one way, frames the other, and emptied
//! frames back for reuse. Each has one producer and one consumer.
//! frames back to be filled again. Each has one producer and one consumer.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use rtrb::{Consumer, Producer, PushError, RingBuffer};
use slipstream_base::WorkerId;
use slipstream_base::width::to_u8;

use crate::bell::{TaskBell, ThreadBell};
use crate::clock::monotonic_ns;
use crate::frame::{PassFrame, ToWorker};
use crate::host::HostSlot;
use crate::sync::{Arc, AtomicBool, Ordering, fence};

/// Bounds of the rings of one pair of shard and engine thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneLimits {
    /// Requests and controls to the thread. Too low: bursts are refused with 503.
    /// Each costs 24 bytes. Default 4096.
    pub requests: usize,
    /// Frames to the shard. Too low: the thread waits for the shard more often. Too
    /// high: tokens accumulate in memory that a reader will not take soon. Default 8.
    pub frames: usize,
    /// Words (4 bytes) from which on a frame takes no further pass. One pass is never split, so a
    /// frame may be larger by the output of one pass. Default 16,384.
    pub frame_words: usize,
}

impl Default for PlaneLimits {
    fn default() -> Self {
        PlaneLimits {
            requests: 4096,
            frames: 8,
            frame_words: 16 * 1024,
        }
    }
}

/// What a shard that takes no frames may leave in its open one, in frames. 4 MiB by default: with 10,000
/// tokens per second it fills in 100 s.
pub const APART_FRAMES: usize = 64;

/// The ends of all rings, ready to be given to shards and engine threads.
#[derive(Debug)]
pub struct Plane {
    /// One per shard, by shard.
    pub shards: Vec<ShardPort>,
    /// One per engine thread.
    pub threads: Vec<ThreadPort>,
}

impl Plane {
    /// Rings between `shards` shards and `threads` engine threads. [`thread_of`] maps workers to
    /// threads.
    ///
    /// # Panics
    /// If there are no shards, no threads, or more than 255 shards.
    pub fn new(shards: usize, threads: usize, limits: PlaneLimits) -> Plane {
        assert!(
            (1..=255).contains(&shards),
            "a shard and their count have 8 bits"
        );
        assert!(threads > 0, "engines need a thread to run on");
        let task_bells: Vec<_> = (0..shards).map(|_| Arc::new(TaskBell::default())).collect();
        let mut shard_links: Vec<Vec<ShardLink>> = (0..shards).map(|_| Vec::new()).collect();
        let threads = (0..threads)
            .map(|_| {
                let bell = Arc::new(ThreadBell::default());
                let links = shard_links.iter_mut().zip(&task_bells);
                let links = links.map(|(links, task_bell)| {
                    let (shard_end, thread_end) = link(&bell, task_bell, limits);
                    links.push(shard_end);
                    thread_end
                });
                let links = links.collect();
                ThreadPort {
                    links,
                    bell,
                    next: 0,
                    limits,
                }
            })
            .collect();
        let shards = shard_links
            .into_iter()
            .zip(task_bells)
            .enumerate()
            .map(|(shard, (links, bell))| ShardPort {
                unrung: Cell::new(0),
                reader: RefCell::default(),
                shard: to_u8(shard),
                links: links.into(),
                bell,
                next: Cell::new(0),
            })
            .collect();
        Plane { shards, threads }
    }
}

fn link(
    thread_bell: &Arc<ThreadBell>,
    task_bell: &Arc<TaskBell>,
    limits: PlaneLimits,
) -> (ShardLink, ThreadLink) {
    let (request_in, request_out) = RingBuffer::new(limits.requests.max(1));
    let (frame_in, frame_out) = RingBuffer::new(limits.frames.max(1));
    // Every frame that may exist: those in the ring, one being filled, one being read.
    let (empty_in, empty_out) = RingBuffer::new(limits.frames.max(1) + 2);
    let flow = Arc::new(Flow::default());
    let host = std::sync::Arc::new(HostSlot::default());
    (
        ShardLink {
            requests: RefCell::new(Requests {
                ring: request_in,
                controls: VecDeque::new(),
            }),
            frames: RefCell::new(frame_out),
            emptied: RefCell::new(empty_in),
            thread_bell: Arc::clone(thread_bell),
            flow: Arc::clone(&flow),
            host: std::sync::Arc::clone(&host),
            gone: Cell::new(false),
            due: Cell::new(false),
        },
        ThreadLink {
            requests: request_out,
            frames: frame_in,
            emptied: empty_out,
            open: PassFrame::new(),
            task_bell: Arc::clone(task_bell),
            flow,
            host,
        },
    )
}

/// Which side of a pair waits for room.
#[derive(Debug)]
struct Flow {
    /// The engine thread waits for room among the frames.
    thread_waits: AtomicBool,
    /// The shard has controls that found no room among the requests.
    shard_waits: AtomicBool,
}

impl Default for Flow {
    fn default() -> Self {
        Flow {
            thread_waits: AtomicBool::new(false),
            shard_waits: AtomicBool::new(false),
        }
    }
}

/// A shard's end of its rings. It belongs to one thread; all methods take `&self`, so that the
/// tasks of that thread can share it.
#[derive(Debug)]
pub struct ShardPort {
    shard: u8,
    /// By engine thread.
    links: Box<[ShardLink]>,
    bell: Arc<TaskBell>,
    /// The thread whose frames are read first next time.
    next: Cell<usize>,
    /// Messages of [`ShardPort::send_soon`] to threads that slept, since the last poll for frames.
    unrung: Cell<u32>,
    /// Wakes the task that reads frames.
    reader: RefCell<Option<Waker>>,
}

/// Messages that wait for a poll at most: a shard's turn with one request takes 20 to 50 µs.
const UNRUNG_MAX: u32 = 8;

#[derive(Debug)]
struct ShardLink {
    requests: RefCell<Requests>,
    frames: RefCell<Consumer<PassFrame>>,
    emptied: RefCell<Producer<PassFrame>>,
    thread_bell: Arc<ThreadBell>,
    flow: Arc<Flow>,
    host: std::sync::Arc<HostSlot>,
    /// Whether the thread's end was reported.
    gone: Cell<bool>,
    /// Whether the thread is to be rung.
    due: Cell<bool>,
}

#[derive(Debug)]
struct Requests {
    ring: Producer<ToWorker>,
    /// Stops, kills and similar messages that found the ring full; they must not be lost. Only a few
    /// per started stream, so the stream table bounds them.
    controls: VecDeque<ToWorker>,
}

/// A message that could not be sent; it is returned.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The ring is full. Answer 503, or retry once frames have arrived.
    #[error("the request ring of the engine thread is full; retry later")]
    Full(ToWorker),
    /// The engine thread is gone. Retry on another worker.
    #[error("the engine thread has stopped; retry on another worker")]
    Closed(ToWorker),
}

impl ShardPort {
    /// The shard that owns this end.
    pub fn shard(&self) -> u8 {
        self.shard
    }

    /// Engine threads.
    pub fn threads(&self) -> usize {
        self.links.len()
    }

    /// Where `thread` may lend its work to this shard.
    pub fn host(&self, thread: usize) -> std::sync::Arc<HostSlot> {
        std::sync::Arc::clone(&self.links[thread].host)
    }

    fn link_of(&self, worker: WorkerId) -> &ShardLink {
        &self.links[self.thread_of(worker)]
    }

    /// Sends `message` to the thread of its worker.
    ///
    /// # Errors
    /// [`SendError::Closed`] if that thread has stopped; for a stop or kill, its stream has
    /// already ended. [`SendError::Full`] for a start (or a resync) that finds no room; a
    /// stop or kill is kept until there is room.
    pub fn send(&self, message: ToWorker) -> Result<(), SendError> {
        let link = self.link_of(message.rank().worker);
        if link.send(message)? {
            link.thread_bell.ring();
        }
        Ok(())
    }

    /// Same as [`ShardPort::send`], but of many messages between two polls for frames only the first one rings its
    /// thread at once. For the others, threads that sleep are rung at the next poll, to which the shard's task is
    /// woken: behind the tasks that are ready now, whose messages a thread then takes in one round. To wake a
    /// thread costs as much as a fifth of a short request.
    ///
    /// # Errors
    /// As [`ShardPort::send`].
    pub fn send_soon(&self, message: ToWorker) -> Result<(), SendError> {
        let link = self.link_of(message.rank().worker);
        if !link.send(message)? || (!link.due.get() && !link.thread_bell.sleeps()) {
            return Ok(());
        }
        link.due.set(true);
        let unrung = self.unrung.get();
        self.unrung.set(unrung + 1);
        match &*self.reader.borrow() {
            Some(reader) if unrung == 1 => reader.wake_by_ref(),
            Some(_) if unrung > 1 && unrung < UNRUNG_MAX => {}
            _ => {
                self.unrung.set(2.min(unrung + 1)); // the task has been woken once
                self.ring_due();
            }
        }
        Ok(())
    }

    fn ring_due(&self) {
        for link in &self.links {
            if link.due.replace(false) {
                link.thread_bell.ring();
            }
        }
    }

    /// Takes the available frames, calls `read` with each, and returns them for
    /// reuse. Visits every thread, one frame each, until nothing is left or `frames_max` were
    /// read (so that a shard can serve its sockets in between). Returns the number of frames read.
    pub fn read_frames(&self, frames_max: usize, mut read: impl FnMut(&PassFrame)) -> usize {
        let mut count = 0;
        let mut empty = 0;
        while count < frames_max && empty < self.links.len() {
            let at = self.next.get();
            self.next.set((at + 1) % self.links.len());
            let link = &self.links[at];
            // Not borrowed while `read` runs: it may send.
            let Some(mut frame) = link.take_frame() else {
                empty += 1;
                continue;
            };
            empty = 0;
            count += 1;
            read(&frame);
            frame.clear();
            // There is room for every existing frame; an extra one would just be freed.
            let _ = link.emptied.borrow_mut().push(frame);
        }
        for link in &self.links {
            link.flush_controls();
        }
        count
    }

    /// Same as [`ShardPort::read_frames`], but waits until there is a result.
    pub fn poll_frames(
        &self,
        cx: &mut Context<'_>,
        frames_max: usize,
        mut read: impl FnMut(&PassFrame),
    ) -> Poll<Polled> {
        if self.unrung.get() > 0 {
            // The threads' first frames find the task awake.
            self.bell.stay_awake();
            self.unrung.set(0);
            self.ring_due();
        }
        let count = self.read_frames(frames_max, &mut read);
        if count > 0 {
            return Poll::Ready(Polled::Frames(count));
        }
        self.bell.prepare(cx.waker());
        match &mut *self.reader.borrow_mut() {
            Some(reader) => reader.clone_from(cx.waker()),
            reader => *reader = Some(cx.waker().clone()),
        }
        let news = self.look_again(frames_max, &mut read);
        if news.is_some() {
            self.bell.stay_awake();
        }
        news.map_or(Poll::Pending, Poll::Ready)
    }

    fn look_again(&self, frames_max: usize, read: impl FnMut(&PassFrame)) -> Option<Polled> {
        // In this order: frames sent before a thread left are read before it is reported as gone.
        let gone = self
            .links
            .iter()
            .position(|link| !link.gone.get() && link.frames.borrow().is_abandoned());
        let count = self.read_frames(frames_max, read);
        if count > 0 {
            return Some(Polled::Frames(count));
        }
        if let Some(thread) = gone {
            self.links[thread].gone.set(true);
            return Some(Polled::ThreadGone(thread));
        }
        let all_gone = self.links.iter().all(|link| link.gone.get());
        all_gone.then_some(Polled::Closed)
    }

    /// Waits for frames and reads them; see [`ShardPort::poll_frames`]. Needs no specific
    /// runtime; dropping the future loses nothing.
    pub async fn frames(&self, frames_max: usize, mut read: impl FnMut(&PassFrame)) -> Polled {
        poll_fn(|cx| self.poll_frames(cx, frames_max, &mut read)).await
    }

    /// The engine thread that runs `worker`.
    pub fn thread_of(&self, worker: WorkerId) -> usize {
        thread_of(worker, self.links.len())
    }
}

/// Result of a shard's wait for frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// Number of frames read.
    Frames(usize),
    /// This engine thread stopped or died, and everything it sent has been read. Open streams of its
    /// workers ([`ShardPort::thread_of`]) will never end. Reported once per thread.
    ThreadGone(usize),
    /// Every thread is gone, and that has been reported.
    Closed,
}

/// The engine thread that runs `worker`.
pub fn thread_of(worker: WorkerId, threads: usize) -> usize {
    worker.index() % threads
}

impl ShardLink {
    /// Returns whether the thread is to be rung.
    fn send(&self, message: ToWorker) -> Result<bool, SendError> {
        let mut requests = self.requests.borrow_mut();
        if requests.ring.is_abandoned() {
            return Err(SendError::Closed(message));
        }
        // After waiting messages, if any: a kill must not overtake its start.
        let full = if requests.controls.is_empty() {
            match requests.ring.push(message) {
                Ok(()) => return Ok(true),
                Err(PushError::Full(message)) => message,
            }
        } else {
            message
        };
        if matches!(full, ToWorker::Start(_) | ToWorker::Resync { .. }) {
            return Err(SendError::Full(full));
        }
        requests.controls.push_back(full);
        drop(requests);
        self.flush_controls();
        Ok(false)
    }

    fn take_frame(&self) -> Option<PassFrame> {
        let frame = self.frames.borrow_mut().pop().ok()?;
        fence(Ordering::SeqCst);
        if self.flow.thread_waits.load(Ordering::Relaxed)
            && self.flow.thread_waits.swap(false, Ordering::AcqRel)
        {
            self.thread_bell.ring();
        }
        Some(frame)
    }

    /// Sends waiting controls, as far as there is room.
    fn flush_controls(&self) {
        let mut requests = self.requests.borrow_mut();
        let requests = &mut *requests;
        if requests.controls.is_empty() {
            return;
        }
        // Requests a wake-up before the check, so that room made after the check is noticed.
        self.flow.shard_waits.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut sent = false;
        while let Some(message) = requests.controls.pop_front() {
            if let Err(PushError::Full(message)) = requests.ring.push(message) {
                requests.controls.push_front(message);
                break;
            }
            sent = true;
        }
        if requests.controls.is_empty() || requests.ring.is_abandoned() {
            requests.controls.clear();
            self.flow.shard_waits.store(false, Ordering::Relaxed);
        }
        if sent {
            self.thread_bell.ring();
        }
    }
}

impl Drop for ShardPort {
    fn drop(&mut self) {
        // Threads that wait for this shard see that it is gone once the rings are.
        let bells: Vec<_> = self
            .links
            .iter()
            .map(|link| Arc::clone(&link.thread_bell))
            .collect();
        self.links = Box::default();
        for bell in bells {
            bell.ring();
        }
    }
}

/// An engine thread's end of its rings.
#[derive(Debug)]
pub struct ThreadPort {
    /// By shard.
    links: Vec<ThreadLink>,
    bell: Arc<ThreadBell>,
    /// The shard whose requests are read first next time.
    next: usize,
    limits: PlaneLimits,
}

#[derive(Debug)]
struct ThreadLink {
    requests: Consumer<ToWorker>,
    frames: Producer<PassFrame>,
    emptied: Consumer<PassFrame>,
    /// The frame that the shard gets next.
    open: PassFrame,
    task_bell: Arc<TaskBell>,
    flow: Arc<Flow>,
    host: std::sync::Arc<HostSlot>,
}

/// Result of flushing an open frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// It was empty, or may grow.
    Kept,
    /// It was sent.
    Sent,
    /// The ring is full; it stays open. See [`ThreadPort::prepare_wait_for_room`].
    Full,
    /// The shard is gone, and the frame's contents were dropped.
    Gone,
}

impl ThreadPort {
    /// Shards.
    pub fn shards(&self) -> usize {
        self.links.len()
    }

    /// Where this thread may lend its work to `shard`. `None` if there is no such shard.
    pub fn host(&self, shard: u8) -> Option<std::sync::Arc<HostSlot>> {
        let link = self.links.get(usize::from(shard))?;
        Some(std::sync::Arc::clone(&link.host))
    }

    /// The bell that wakes this thread.
    pub fn bell(&self) -> &Arc<ThreadBell> {
        &self.bell
    }

    /// Takes the next request or control, round robin over the shards.
    pub fn receive(&mut self) -> Option<ToWorker> {
        for _ in 0..self.links.len() {
            let at = self.next;
            self.next = (at + 1) % self.links.len();
            let link = &mut self.links[at];
            let Ok(message) = link.requests.pop() else {
                continue;
            };
            fence(Ordering::SeqCst);
            if link.flow.shard_waits.load(Ordering::Relaxed)
                && link.flow.shard_waits.swap(false, Ordering::AcqRel)
            {
                link.task_bell.ring();
            }
            return Some(message);
        }
        None
    }

    /// Whether there is a request or control to receive.
    pub fn has_requests(&self) -> bool {
        self.links.iter().any(|link| !link.requests.is_empty())
    }

    /// The frame that `shard` will get next. `None` if there is no such shard.
    #[inline]
    pub fn frame(&mut self, shard: u8) -> Option<&mut PassFrame> {
        Some(&mut self.links.get_mut(usize::from(shard))?.open)
    }

    /// Whether `shard`'s end was dropped.
    pub fn is_gone(&self, shard: u8) -> bool {
        self.links
            .get(usize::from(shard))
            .is_none_or(|link| link.frames.is_abandoned())
    }

    /// Sends the open frame of `shard`. With `may_grow`, only if the shard has taken every frame
    /// before it, or if the frame is as large as frames may be: a shard that is behind gets fewer,
    /// larger frames, in the same order. Without it (before the thread sleeps) the frame leaves.
    pub fn flush(&mut self, shard: u8, may_grow: bool) -> Flushed {
        let limits = self.limits;
        let link = &mut self.links[usize::from(shard)];
        if link.open.is_empty() {
            return Flushed::Kept;
        }
        if link.frames.is_abandoned() {
            link.open.clear();
            return Flushed::Gone;
        }
        let behind = link.frames.slots() < limits.frames.max(1);
        if may_grow && behind && link.open.size_words() < limits.frame_words {
            return Flushed::Kept;
        }
        if link.frames.is_full() {
            return Flushed::Full;
        }
        let empty = link.emptied.pop().unwrap_or_default();
        let mut frame = std::mem::replace(&mut link.open, empty);
        frame.sent_ns = monotonic_ns();
        let pushed = link.frames.push(frame);
        debug_assert!(pushed.is_ok(), "a ring that is not full takes a frame");
        link.task_bell.ring();
        Flushed::Sent
    }

    /// Whether the open frame of `shard` may take another pass.
    pub fn has_room(&self, shard: u8) -> bool {
        self.links[usize::from(shard)].open.size_words() < self.limits.frame_words
    }

    /// Whether no shard's open frame may take another pass: nobody can go on. Shards that are gone do not
    /// count.
    pub fn all_behind(&self) -> bool {
        let limit = self.limits.frame_words;
        let live = self.links.iter().filter(|l| !l.frames.is_abandoned());
        let mut sizes = live.map(|link| link.open.size_words()).peekable();
        sizes.peek().is_some() && sizes.all(|size| size >= limit)
    }

    /// Whether the open frame of `shard` may take another pass while other shards go on: up to
    /// [`APART_FRAMES`] times the size of frames.
    pub fn has_room_apart(&self, shard: u8) -> bool {
        let most = self.limits.frame_words.saturating_mul(APART_FRAMES);
        self.links[usize::from(shard)].open.size_words() < most
    }

    /// As [`prepare_wait_for_room`](Self::prepare_wait_for_room), for the first shard that takes a frame.
    pub fn prepare_wait_for_any_room(&mut self) -> bool {
        for link in &self.links {
            link.flow.thread_waits.store(true, Ordering::Relaxed);
        }
        self.bell.prepare();
        let full = self.links.iter().all(|link| {
            if link.frames.is_abandoned() {
                link.open.is_empty()
            } else {
                link.frames.is_full()
            }
        });
        self.sleep_if(full)
    }

    /// The thread is about to sleep until `shard` takes a frame. Returns false if the shard has already
    /// done so (or is gone): then the thread stays awake. Otherwise call [`ThreadPort::wait`].
    pub fn prepare_wait_for_room(&mut self, shard: u8) -> bool {
        let link = &self.links[usize::from(shard)];
        link.flow.thread_waits.store(true, Ordering::Relaxed);
        self.bell.prepare();
        let full = link.frames.is_full() && !link.frames.is_abandoned();
        self.sleep_if(full)
    }

    /// The thread is about to sleep until a request arrives, or room for an open frame. Returns
    /// false if one has already arrived: then the thread stays awake. Otherwise call
    /// [`ThreadPort::wait`].
    pub fn prepare_wait(&mut self) -> bool {
        for link in self.links.iter().filter(|link| !link.open.is_empty()) {
            link.flow.thread_waits.store(true, Ordering::Relaxed);
        }
        self.bell.prepare();
        let nothing = self.links.iter().all(|link| {
            link.requests.is_empty() && (link.open.is_empty() || link.frames.is_full())
        });
        self.sleep_if(nothing)
    }

    fn sleep_if(&self, nothing_came: bool) -> bool {
        if !nothing_came {
            self.bell.stay_awake();
        }
        nothing_came
    }

    /// Sleeps until rung or until `deadline_ns`; see [`ThreadBell::wait`].
    pub fn wait(&mut self, deadline_ns: Option<u64>) {
        self.bell.wait(deadline_ns);
    }
}

impl Drop for ThreadPort {
    fn drop(&mut self) {
        // Shards that wait for this thread see that it is gone once the rings are.
        for link in std::mem::take(&mut self.links) {
            let bell = Arc::clone(&link.task_bell);
            drop(link);
            bell.ring();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::{Wake, Waker};

    use slipstream_base::RankId;

    use super::*;
    use crate::frame::Entry;
    use crate::stream::{StreamAddr, StreamId};

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }

    const SMALL: PlaneLimits = PlaneLimits {
        requests: 4,
        frames: 2,
        frame_words: 30,
    };

    fn kill(slot: u32) -> ToWorker {
        let addr = StreamAddr {
            shard: 0,
            stream: StreamId {
                slot,
                generation: 0,
            },
        };
        ToWorker::Kill {
            rank: RankId::default(),
            addr,
        }
    }

    fn resync() -> ToWorker {
        ToWorker::Resync {
            rank: RankId::default(),
        }
    }

    fn slot_of(message: &ToWorker) -> u32 {
        match message {
            ToWorker::Kill { addr, .. } => addr.stream.slot,
            other => panic!("{other:?} is not a kill"),
        }
    }

    fn pair() -> (ShardPort, ThreadPort) {
        let mut plane = Plane::new(1, 1, SMALL);
        (plane.shards.pop().unwrap(), plane.threads.pop().unwrap())
    }

    /// Adds a token and sends the frame if possible.
    fn push(thread: &mut ThreadPort, token: u32, may_grow: bool) -> Flushed {
        let stream = StreamId {
            slot: 0,
            generation: 0,
        };
        thread.frame(0).unwrap().push_tokens(stream, &[token], None);
        thread.flush(0, may_grow)
    }

    fn tokens(frame: &PassFrame) -> Vec<u32> {
        frame
            .entries()
            .flat_map(|entry| match entry {
                Entry::Tokens { tokens, .. } => tokens.to_vec(),
                other => panic!("{other:?} is no tokens"),
            })
            .collect()
    }

    #[test]
    fn controls_are_never_lost_and_keep_their_order() {
        let (shard, mut thread) = pair();
        for slot in 0..10 {
            shard.send(kill(slot)).unwrap();
        }
        assert!(matches!(shard.send(resync()), Err(SendError::Full(_))));
        let mut taken = Vec::new();
        while taken.len() < 10 {
            while let Some(message) = thread.receive() {
                taken.push(slot_of(&message));
            }
            shard.read_frames(1, |_| ()); // a shard that looks at its rings sends what waited
        }
        assert_eq!(taken, (0..10).collect::<Vec<_>>());
        assert!(shard.send(resync()).is_ok());
    }

    #[test]
    fn a_shard_with_waiting_controls_is_woken_when_there_is_room() {
        let (shard, mut thread) = pair();
        let woken = std::sync::Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        let mut cx = Context::from_waker(&waker);
        for slot in 0..5 {
            shard.send(kill(slot)).unwrap();
        }
        assert!(shard.poll_frames(&mut cx, 9, |_| ()).is_pending());
        assert_eq!(woken.0.load(SeqCst), 0);
        thread.receive().unwrap();
        assert_eq!(woken.0.load(SeqCst), 1);
        assert!(shard.poll_frames(&mut cx, 9, |_| ()).is_pending());
        let left: Vec<_> = std::iter::from_fn(|| thread.receive()).collect();
        assert_eq!(left.iter().map(slot_of).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }

    #[test]
    fn a_shard_that_is_behind_gets_larger_frames_in_order() {
        let (shard, mut thread) = pair();
        assert_eq!(
            push(&mut thread, 0, true),
            Flushed::Sent,
            "it has taken everything"
        );
        for token in 1..9 {
            assert_eq!(
                push(&mut thread, token, true),
                Flushed::Kept,
                "it is behind"
            );
        }
        assert_eq!(push(&mut thread, 9, true), Flushed::Kept);
        assert_eq!(
            push(&mut thread, 10, true),
            Flushed::Sent,
            "this one is full"
        );
        let mut read = Vec::new();
        assert_eq!(shard.read_frames(9, |frame| read.push(tokens(frame))), 2);
        assert_eq!(read, [vec![0], (1..11).collect()]);
    }

    #[test]
    fn a_full_ring_takes_no_frame_until_one_is_read() {
        let (shard, mut thread) = pair();
        assert_eq!(push(&mut thread, 0, false), Flushed::Sent);
        assert_eq!(push(&mut thread, 1, false), Flushed::Sent);
        assert_eq!(push(&mut thread, 2, false), Flushed::Full);
        assert!(thread.has_room(0), "but it may grow");
        assert!(thread.prepare_wait_for_room(0), "or be waited for");
        shard.read_frames(1, |_| ());
        // The shard has rung, or this would sleep for good.
        thread.wait(None);
        assert_eq!(thread.flush(0, false), Flushed::Sent);
        let mut read = Vec::new();
        shard.read_frames(9, |frame| read.extend(tokens(frame)));
        assert_eq!(read, [1, 2]);
    }

    #[test]
    fn a_thread_does_not_sleep_on_a_request_or_on_room() {
        let (shard, mut thread) = pair();
        assert!(thread.prepare_wait());
        thread.bell().stay_awake();
        shard.send(kill(1)).unwrap();
        assert!(!thread.prepare_wait(), "a request has come");
        thread.receive().unwrap();
        for token in 0..3 {
            push(&mut thread, token, false);
        }
        assert!(thread.prepare_wait(), "an open frame has no room");
        thread.bell().stay_awake();
        shard.read_frames(1, |_| ());
        assert!(!thread.prepare_wait(), "now it has");
    }

    #[test]
    fn messages_that_may_wait_ring_a_thread_once() {
        let limits = PlaneLimits {
            requests: 2 * UNRUNG_MAX as usize,
            ..SMALL
        };
        let mut plane = Plane::new(1, 1, limits);
        let (shard, mut thread) = (plane.shards.remove(0), plane.threads.remove(0));
        let woken = std::sync::Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        let poll = || shard.poll_frames(&mut Context::from_waker(&waker), 9, |_| ());

        assert!(thread.prepare_wait());
        shard.send_soon(kill(0)).unwrap();
        assert!(!thread.bell().sleeps(), "no task would ring it");
        assert_eq!(poll(), Poll::Pending);
        shard.send_soon(kill(0)).unwrap();
        assert_eq!(woken.0.load(SeqCst), 0, "the thread is awake");

        while thread.receive().is_some() {}
        assert!(thread.prepare_wait());
        shard.send_soon(kill(0)).unwrap();
        assert!(!thread.bell().sleeps(), "the first of many");
        while thread.receive().is_some() {}
        assert!(thread.prepare_wait());
        for _ in 0..3 {
            shard.send_soon(kill(0)).unwrap();
        }
        assert_eq!(woken.0.load(SeqCst), 1);
        assert!(thread.bell().sleeps());
        assert_eq!(poll(), Poll::Pending);
        assert!(!thread.bell().sleeps());
        assert_eq!(std::iter::from_fn(|| thread.receive()).count(), 3);

        // No task is late for more than some.
        assert!(thread.prepare_wait());
        shard.send_soon(kill(0)).unwrap();
        assert!(!thread.bell().sleeps());
        while thread.receive().is_some() {}
        assert!(thread.prepare_wait());
        for sent in 1..UNRUNG_MAX {
            shard.send_soon(kill(0)).unwrap();
            assert!(thread.bell().sleeps(), "after {sent} messages");
        }
        shard.send_soon(kill(0)).unwrap();
        assert!(!thread.bell().sleeps());
        assert_eq!(woken.0.load(SeqCst), 2);
    }

    #[test]
    fn frames_are_used_again() {
        let (shard, mut thread) = pair();
        let mut addresses = std::collections::BTreeSet::new();
        for token in 0..100 {
            push(&mut thread, token, false);
            shard.read_frames(9, |frame| {
                addresses.insert(frame.parts().0.as_ptr() as usize);
            });
        }
        assert!(addresses.len() <= 3, "{addresses:?}");
    }

    #[test]
    fn a_shard_hears_of_a_thread_that_is_gone_after_its_last_frame() {
        let mut plane = Plane::new(1, 2, SMALL);
        let shard = plane.shards.pop().unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        let mut poll = |tokens_read: &mut Vec<u32>| {
            shard.poll_frames(&mut cx, 9, |frame| tokens_read.extend(tokens(frame)))
        };
        let mut read = Vec::new();
        let mut leaving = plane.threads.remove(1);
        push(&mut leaving, 77, false);
        drop(leaving);
        assert_eq!(poll(&mut read), Poll::Ready(Polled::Frames(1)));
        assert_eq!(read, [77]);
        assert_eq!(poll(&mut read), Poll::Ready(Polled::ThreadGone(1)));
        assert_eq!(poll(&mut read), Poll::Pending);
        drop(plane.threads);
        assert_eq!(poll(&mut read), Poll::Ready(Polled::ThreadGone(0)));
        assert_eq!(poll(&mut read), Poll::Ready(Polled::Closed));
        assert!(matches!(shard.send(kill(0)), Err(SendError::Closed(_))));
    }

    #[test]
    fn a_thread_hears_of_a_shard_that_is_gone() {
        let (shard, mut thread) = pair();
        for token in 0..3 {
            push(&mut thread, token, false);
        }
        assert!(thread.prepare_wait_for_room(0));
        drop(shard);
        thread.wait(None);
        assert!(thread.is_gone(0));
        assert_eq!(thread.flush(0, false), Flushed::Gone);
        assert_eq!(
            thread.flush(0, false),
            Flushed::Kept,
            "what it held is gone too"
        );
    }

    #[test]
    fn a_reader_that_sends_is_fine() {
        let (shard, mut thread) = pair();
        push(&mut thread, 0, false);
        shard.read_frames(9, |_| shard.send(kill(3)).unwrap());
        assert_eq!(slot_of(&thread.receive().unwrap()), 3);
    }

    /// Two real threads, rings that are nearly always full, both sides asleep half of the time.
    #[test]
    fn nothing_is_lost_between_threads() {
        const COUNT: u32 = 20_000;
        let (shard, mut thread) = pair();
        let engine = std::thread::spawn(move || {
            let (mut sent, mut killed) = (0, 0);
            loop {
                while let Some(message) = thread.receive() {
                    assert_eq!(slot_of(&message), killed);
                    killed += 1;
                }
                if sent == COUNT && killed == COUNT {
                    break;
                }
                if sent < COUNT && thread.has_room(0) {
                    push(&mut thread, sent, sent % 7 != 0);
                    sent += 1;
                } else if thread.flush(0, false) != Flushed::Sent && thread.prepare_wait() {
                    thread.wait(None);
                }
            }
            while thread.flush(0, false) == Flushed::Full {
                if thread.prepare_wait_for_room(0) {
                    thread.wait(None);
                }
            }
        });
        let (mut next, mut sent) = (0, 0);
        let reader = std::thread::current();
        let waker = Waker::from(std::sync::Arc::new(Unpark(reader)));
        let mut cx = Context::from_waker(&waker);
        loop {
            if sent < COUNT {
                shard.send(kill(sent)).unwrap();
                sent += 1;
            }
            let polled = shard.poll_frames(&mut cx, 1, |frame| {
                for token in tokens(frame) {
                    assert_eq!(token, next);
                    next += 1;
                }
            });
            match polled {
                Poll::Ready(Polled::Closed) => break,
                Poll::Pending if sent == COUNT => std::thread::park(),
                _ => {}
            }
        }
        assert_eq!(next, COUNT);
        engine.join().unwrap();
    }

    struct Unpark(std::thread::Thread);

    impl Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
}
