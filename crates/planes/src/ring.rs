//! The request and response plane inside one process: bounded rings between each shard and each
//! engine thread.
//!
//! A pair of shard and thread has three rings: requests one way, frames the other, and emptied
//! frames back to be filled again. Each has one producer and one consumer.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll};

use rtrb::{Consumer, Producer, PushError, RingBuffer};
use slipstream_base::WorkerId;

use crate::bell::{TaskBell, ThreadBell};
use crate::clock::monotonic_ns;
use crate::frame::{PassFrame, ToWorker};
use crate::sync::{Arc, AtomicBool, Ordering, fence};

/// Bounds of the rings of one pair of shard and engine thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneLimits {
    /// Requests and controls on their way to the thread. Too low: bursts are refused with 503.
    /// Each costs 24 bytes. Default 4096.
    pub requests: usize,
    /// Frames on their way to the shard. Too low: the thread waits for the shard more often. Too
    /// high: tokens queue up in memory that a reader will not take soon. Default 8.
    pub frames: usize,
    /// Words (4 bytes) from which on a frame takes no further pass. One pass is never split, so a
    /// frame may be larger by what one pass yields. Default 16,384.
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

/// The ends of all rings, ready to be given to shards and engine threads.
#[derive(Debug)]
pub struct Plane {
    /// One a shard, by shard.
    pub shards: Vec<ShardPort>,
    /// One an engine thread.
    pub threads: Vec<ThreadPort>,
}

impl Plane {
    /// Rings between `shards` shards and `threads` engine threads. Which worker lives on which
    /// thread says [`thread_of`].
    ///
    /// # Panics
    /// If there are no shards, no threads, or more than 256 shards.
    pub fn new(shards: usize, threads: usize, limits: PlaneLimits) -> Plane {
        assert!((1..=256).contains(&shards), "an address names 256 shards");
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
                shard: shard as u8,
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
    // Every frame that can be about: those in the ring, one being filled, one being read.
    let (empty_in, empty_out) = RingBuffer::new(limits.frames.max(1) + 2);
    let flow = Arc::new(Flow::default());
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
            gone: Cell::new(false),
        },
        ThreadLink {
            requests: request_out,
            frames: frame_in,
            emptied: empty_out,
            open: PassFrame::new(),
            task_bell: Arc::clone(task_bell),
            flow,
        },
    )
}

/// Who of a pair waits for room.
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

/// A shard's end of its rings. It belongs to one thread; all of it works on `&self`, so that it
/// can be shared by the tasks of that thread.
#[derive(Debug)]
pub struct ShardPort {
    shard: u8,
    /// By engine thread.
    links: Box<[ShardLink]>,
    bell: Arc<TaskBell>,
    /// The thread whose frames are looked at first next time.
    next: Cell<usize>,
}

#[derive(Debug)]
struct ShardLink {
    requests: RefCell<Requests>,
    frames: RefCell<Consumer<PassFrame>>,
    emptied: RefCell<Producer<PassFrame>>,
    thread_bell: Arc<ThreadBell>,
    flow: Arc<Flow>,
    /// Whether it was said that the thread is gone.
    gone: Cell<bool>,
}

#[derive(Debug)]
struct Requests {
    ring: Producer<ToWorker>,
    /// Stops and kills that found the ring full; they may not be lost. No more than two a stream
    /// that was started, so the stream table bounds them.
    controls: VecDeque<ToWorker>,
}

/// A message that did not leave; it comes back.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The ring is full. Answer 503, or retry once frames have come.
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

    fn link_of(&self, worker: WorkerId) -> &ShardLink {
        &self.links[self.thread_of(worker)]
    }

    /// Hands `message` to the thread of its worker.
    ///
    /// # Errors
    /// [`SendError::Closed`] if that thread has stopped; for a stop or kill that means that there
    /// is nothing left to end. [`SendError::Full`] for a start (or a resync) that finds no room; a
    /// stop or kill is kept until there is.
    pub fn send(&self, message: ToWorker) -> Result<(), SendError> {
        let link = self.link_of(message.rank().worker);
        let mut requests = link.requests.borrow_mut();
        if requests.ring.is_abandoned() {
            return Err(SendError::Closed(message));
        }
        // Behind what waits already, if anything does: a kill may not overtake its start.
        let full = if requests.controls.is_empty() {
            match requests.ring.push(message) {
                Ok(()) => {
                    drop(requests);
                    link.thread_bell.ring();
                    return Ok(());
                }
                Err(PushError::Full(message)) => message,
            }
        } else {
            message
        };
        if !matches!(full, ToWorker::Stop { .. } | ToWorker::Kill { .. }) {
            return Err(SendError::Full(full));
        }
        requests.controls.push_back(full);
        drop(requests);
        link.flush_controls();
        Ok(())
    }

    /// Takes the frames that are there, calls `read` with each, and sends them back to be filled
    /// again. A look at every thread, one frame each, until nothing is left or `frames_max` were
    /// read (so that a shard can look after its sockets in between). Returns how many were read.
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
            // There is room for every frame that exists; one too many would just be freed.
            let _ = link.emptied.borrow_mut().push(frame);
        }
        for link in &self.links {
            link.flush_controls();
        }
        count
    }

    /// As [`ShardPort::read_frames`], but waits until there is something to tell.
    pub fn poll_frames(
        &self,
        cx: &mut Context<'_>,
        frames_max: usize,
        mut read: impl FnMut(&PassFrame),
    ) -> Poll<Polled> {
        let count = self.read_frames(frames_max, &mut read);
        if count > 0 {
            return Poll::Ready(Polled::Frames(count));
        }
        self.bell.prepare(cx.waker());
        let news = self.look_again(frames_max, &mut read);
        if news.is_some() {
            self.bell.stay_awake();
        }
        news.map_or(Poll::Pending, Poll::Ready)
    }

    fn look_again(&self, frames_max: usize, read: impl FnMut(&PassFrame)) -> Option<Polled> {
        // In this order: what a thread sent before it left is read before it is known as gone.
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

    /// Waits for frames and reads them; see [`ShardPort::poll_frames`]. Needs no runtime of any
    /// kind; dropping the future loses nothing.
    pub async fn frames(&self, frames_max: usize, mut read: impl FnMut(&PassFrame)) -> Polled {
        poll_fn(|cx| self.poll_frames(cx, frames_max, &mut read)).await
    }

    /// The engine thread on which `worker` lives.
    pub fn thread_of(&self, worker: WorkerId) -> usize {
        thread_of(worker, self.links.len())
    }
}

/// What a shard hears when it waits for frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// So many frames were read.
    Frames(usize),
    /// This engine thread stopped or died, and everything it sent has been read. Streams of its
    /// workers ([`ShardPort::thread_of`]) that have not ended never will. Said once a thread.
    ThreadGone(usize),
    /// Every thread is gone, and that has been said.
    Closed,
}

/// The engine thread on which `worker` lives.
pub fn thread_of(worker: WorkerId, threads: usize) -> usize {
    worker.index() % threads
}

impl ShardLink {
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

    /// Sends the controls that wait for room, as far as there is room.
    fn flush_controls(&self) {
        let mut requests = self.requests.borrow_mut();
        let requests = &mut *requests;
        if requests.controls.is_empty() {
            return;
        }
        // Asks to be rung before looking, so that room made after the look is heard of.
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
    /// The shard whose requests are looked at first next time.
    next: usize,
    limits: PlaneLimits,
}

#[derive(Debug)]
struct ThreadLink {
    requests: Consumer<ToWorker>,
    frames: Producer<PassFrame>,
    emptied: Consumer<PassFrame>,
    /// What the shard will get next.
    open: PassFrame,
    task_bell: Arc<TaskBell>,
    flow: Arc<Flow>,
}

/// What became of an open frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// There was nothing in it, or it left, or it may grow.
    Done,
    /// The ring is full; it stays open. See [`ThreadPort::prepare_wait_for_room`].
    Full,
    /// The shard is gone, and what the frame held with it.
    Gone,
}

impl ThreadPort {
    /// Shards.
    pub fn shards(&self) -> usize {
        self.links.len()
    }

    /// The bell that wakes this thread.
    pub fn bell(&self) -> &Arc<ThreadBell> {
        &self.bell
    }

    /// Takes the next request or control, from the shards in turn.
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

    /// Whether there is something to receive.
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
            return Flushed::Done;
        }
        if link.frames.is_abandoned() {
            link.open.clear();
            return Flushed::Gone;
        }
        let behind = link.frames.slots() < limits.frames.max(1);
        if may_grow && behind && link.open.size_words() < limits.frame_words {
            return Flushed::Done;
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
        Flushed::Done
    }

    /// Whether the open frame of `shard` may take another pass.
    pub fn has_room(&self, shard: u8) -> bool {
        self.links[usize::from(shard)].open.size_words() < self.limits.frame_words
    }

    /// The thread is about to sleep until `shard` takes a frame. Returns false if it has done so
    /// meanwhile (or is gone): then the thread stays awake. Otherwise call [`ThreadPort::wait`].
    pub fn prepare_wait_for_room(&mut self, shard: u8) -> bool {
        let link = &self.links[usize::from(shard)];
        link.flow.thread_waits.store(true, Ordering::Relaxed);
        self.bell.prepare();
        let full = link.frames.is_full() && !link.frames.is_abandoned();
        self.sleep_if(full)
    }

    /// The thread is about to sleep until a request comes, or room for an open frame. Returns
    /// false if something has come meanwhile: then the thread stays awake. Otherwise call
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
