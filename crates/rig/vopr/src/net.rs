//! Sockets between simulated processes: bytes in order and without loss within a connection, as TCP gives
//! them, until a fault.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use slipstream_base::width::to_usize;
use slipstream_planes::wire::HEADER_BYTES;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::rng::Rng;

/// Byte of a frame's header that holds the version of the format.
const VERSION_AT: usize = 4;

/// An event and its time.
pub(crate) struct Due<E> {
    pub(crate) at_ns: u64,
    sequence: u64,
    pub(crate) event: E,
}

impl<E> PartialEq for Due<E> {
    fn eq(&self, other: &Due<E>) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Due<E> {}

impl<E> PartialOrd for Due<E> {
    fn partial_cmp(&self, other: &Due<E>) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Due<E> {
    /// The earliest is the greatest.
    fn cmp(&self, other: &Due<E>) -> Ordering {
        (other.at_ns, other.sequence).cmp(&(self.at_ns, self.sequence))
    }
}

/// Events by time; those of one time in the order in which they were added.
pub(crate) struct Queue<E> {
    heap: RefCell<BinaryHeap<Due<E>>>,
    sequence: Cell<u64>,
    /// The present, ns.
    pub(crate) now_ns: Cell<u64>,
}

impl<E> Queue<E> {
    pub(crate) fn new(now_ns: u64) -> Rc<Queue<E>> {
        Rc::new(Queue {
            heap: RefCell::default(),
            sequence: Cell::new(0),
            now_ns: Cell::new(now_ns),
        })
    }

    pub(crate) fn now(&self) -> u64 {
        self.now_ns.get()
    }

    pub(crate) fn push(&self, at_ns: u64, event: E) {
        let sequence = self.sequence.get();
        self.sequence.set(sequence + 1);
        let at_ns = at_ns.max(self.now());
        self.heap.borrow_mut().push(Due {
            at_ns,
            sequence,
            event,
        });
    }

    pub(crate) fn next_at(&self) -> Option<u64> {
        self.heap.borrow().peek().map(|due| due.at_ns)
    }

    pub(crate) fn pop(&self) -> Option<Due<E>> {
        self.heap.borrow_mut().pop()
    }
}

/// An event of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Delivery {
    pub(crate) connection: usize,
    /// The side that reads.
    pub(crate) to: usize,
}

/// One direction of a connection.
#[derive(Default)]
struct Pipe {
    /// Pieces under way. An empty one is the end.
    sent: VecDeque<Vec<u8>>,
    received: VecDeque<u8>,
    /// Bytes in both.
    used: usize,
    last_at: u64,
    stalled_until: u64,
    slow_ns: u64,
    ended: bool,
    /// The reader is gone, and the writer is not notified: bytes are lost.
    void: bool,
    reset: bool,
    corrupt: bool,
    frame: FrameTracker,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn wake(&mut self) {
        for waker in [self.reader.take(), self.writer.take()]
            .into_iter()
            .flatten()
        {
            waker.wake();
        }
    }
}

/// Where frames begin in a sequence of bytes.
#[derive(Default)]
struct FrameTracker {
    header: Vec<u8>,
    body_left: usize,
}

impl FrameTracker {
    /// Goes over `bytes`. Returns the place of a version byte in it, if there is one.
    fn advance(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut found = None;
        let mut at = 0;
        while at < bytes.len() {
            if self.body_left > 0 {
                let step = self.body_left.min(bytes.len() - at);
                self.body_left -= step;
                at += step;
                continue;
            }
            if self.header.len() == VERSION_AT {
                found = Some(at);
            }
            self.header.push(bytes[at]);
            at += 1;
            if self.header.len() == HEADER_BYTES {
                let len = [
                    self.header[0],
                    self.header[1],
                    self.header[2],
                    self.header[3],
                ];
                self.body_left = u32::from_le_bytes(len) as usize;
                self.header.clear();
            }
        }
        found
    }
}

struct Connection {
    /// By the side that reads.
    pipes: [Pipe; 2],
    /// A process on each side: the worker's, and the frontend's.
    ends: [usize; 2],
    latency_ns: u64,
    open: bool,
    /// By side: whether its process keeps the socket.
    kept: [bool; 2],
}

struct State<E> {
    connections: Vec<Connection>,
    rng: Rng,
    window: usize,
    queue: Rc<Queue<E>>,
}

/// The network.
pub(crate) struct Net<E: From<Delivery>> {
    state: Rc<RefCell<State<E>>>,
}

impl<E: From<Delivery>> Clone for Net<E> {
    fn clone(&self) -> Self {
        Net {
            state: self.state.clone(),
        }
    }
}

impl<E: From<Delivery> + 'static> Net<E> {
    /// A network on which at most `window` bytes are under way per direction of a connection.
    pub(crate) fn new(seed: u64, window: usize, queue: Rc<Queue<E>>) -> Net<E> {
        Net {
            state: Rc::new(RefCell::new(State {
                connections: Vec::new(),
                rng: Rng::new(seed),
                window,
                queue,
            })),
        }
    }

    /// Two connected sockets: of `worker`, and of `frontend`.
    pub(crate) fn connect(
        &self,
        worker: usize,
        frontend: usize,
        latency_ns: u64,
    ) -> [SimSocket<E>; 2] {
        let mut state = self.state.borrow_mut();
        let connection = state.connections.len();
        state.connections.push(Connection {
            pipes: [Pipe::default(), Pipe::default()],
            ends: [worker, frontend],
            latency_ns,
            open: true,
            kept: [true; 2],
        });
        [0, 1].map(|side| SimSocket {
            net: self.clone(),
            connection,
            side,
        })
    }

    /// Bytes of a connection arrive.
    pub(crate) fn deliver(&self, delivery: Delivery) {
        let mut state = self.state.borrow_mut();
        let state = &mut *state;
        let now = state.queue.now();
        let connection = &mut state.connections[delivery.connection];
        let pipe = &mut connection.pipes[delivery.to];
        if pipe.void || pipe.reset {
            return;
        }
        if now < pipe.stalled_until {
            let at = pipe.stalled_until;
            return state.queue.push(at, delivery.into());
        }
        let Some(bytes) = pipe.sent.pop_front() else {
            return;
        };
        if bytes.is_empty() {
            pipe.ended = true;
            pipe.wake();
            // The peer is gone: writes to it fail.
            let back = &mut connection.pipes[1 - delivery.to];
            back.reset = true;
            back.wake();
            connection.open = false;
            return;
        }
        pipe.received.extend(&bytes);
        if let Some(reader) = pipe.reader.take() {
            reader.wake();
        }
    }

    /// Whether the worker's process keeps the socket of `connection`, whatever became of the other side.
    pub(crate) fn is_kept_by_worker(&self, connection: usize) -> bool {
        self.state.borrow().connections[connection].kept[0]
    }

    /// An open connection between `worker` and any frontend, by `pick`.
    pub(crate) fn pick(&self, worker: usize, pick: u64) -> Option<usize> {
        let state = self.state.borrow();
        let of = state.connections.iter().enumerate();
        let open: Vec<usize> = of
            .filter(|(_, connection)| connection.open && connection.ends[0] == worker)
            .map(|(index, _)| index)
            .collect();
        (!open.is_empty()).then(|| open[to_usize(pick % open.len() as u64)])
    }

    /// Both ends learn at once that the connection is gone; bytes under way are lost.
    pub(crate) fn cut(&self, connection: usize) {
        let mut state = self.state.borrow_mut();
        let connection = &mut state.connections[connection];
        connection.open = false;
        for pipe in &mut connection.pipes {
            pipe.sent.clear();
            pipe.reset = true;
            pipe.wake();
        }
    }

    /// `side` learns that the connection is gone, the other one does not.
    pub(crate) fn half_open(&self, connection: usize, side: usize) {
        let mut state = self.state.borrow_mut();
        let connection = &mut state.connections[connection];
        connection.open = false;
        // Reads and writes of `side` fail; bytes of the other side vanish.
        connection.pipes[side].sent.clear();
        connection.pipes[side].received.clear();
        connection.pipes[side].void = true;
        connection.pipes[side].ended = true;
        connection.pipes[side].wake();
        connection.pipes[1 - side].void = true;
        connection.pipes[1 - side].wake();
    }

    /// Nothing reaches `side` until `until_ns`.
    pub(crate) fn stall(&self, connection: usize, side: usize, until_ns: u64) {
        let mut state = self.state.borrow_mut();
        let pipe = &mut state.connections[connection].pipes[side];
        pipe.stalled_until = pipe.stalled_until.max(until_ns);
    }

    /// Every piece takes so much longer.
    pub(crate) fn slow(&self, connection: usize, extra_ns: u64) {
        let mut state = self.state.borrow_mut();
        for pipe in &mut state.connections[connection].pipes {
            pipe.slow_ns = extra_ns;
        }
    }

    /// The next frame towards `side` arrives with a wrong bit in its header.
    pub(crate) fn corrupt(&self, connection: usize, side: usize) {
        self.state.borrow_mut().connections[connection].pipes[side].corrupt = true;
    }

    /// Ends slowness and pending corruption everywhere.
    pub(crate) fn heal(&self) {
        let mut state = self.state.borrow_mut();
        let now = state.queue.now();
        for connection in &mut state.connections {
            for pipe in &mut connection.pipes {
                pipe.slow_ns = 0;
                pipe.corrupt = false;
                pipe.stalled_until = pipe.stalled_until.min(now);
            }
        }
    }

    /// All sockets of `end` at `side` vanish without a word when they are dropped: its host lost power.
    pub(crate) fn silence(&self, side: usize, end: usize) {
        let mut state = self.state.borrow_mut();
        for connection in &mut state.connections {
            if connection.open && connection.ends[side] == end {
                connection.open = false;
                connection.pipes[0].void = true;
                connection.pipes[1].void = true;
            }
        }
    }
}

/// A socket of a simulated process.
pub(crate) struct SimSocket<E: From<Delivery> + 'static> {
    net: Net<E>,
    pub(crate) connection: usize,
    side: usize,
}

impl<E: From<Delivery>> AsyncRead for SimSocket<E> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.net.state.borrow_mut();
        let state = &mut *state;
        let pipe = &mut state.connections[self.connection].pipes[self.side];
        if pipe.received.is_empty() {
            if pipe.reset {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            if pipe.ended {
                return Poll::Ready(Ok(()));
            }
            pipe.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let most = pipe.received.len().min(buf.remaining());
        // Reads come in any portion.
        let count = if most > 1 && state.rng.one_in(4) {
            state.rng.size(1, most)
        } else {
            most
        };
        let (front, back) = pipe.received.as_slices();
        let first = count.min(front.len());
        buf.put_slice(&front[..first]);
        buf.put_slice(&back[..count - first]);
        pipe.received.drain(..count);
        pipe.used -= count;
        if let Some(writer) = pipe.writer.take() {
            writer.wake();
        }
        Poll::Ready(Ok(()))
    }
}

impl<E: From<Delivery>> AsyncWrite for SimSocket<E> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.net.state.borrow_mut();
        let state = &mut *state;
        let connection = &mut state.connections[self.connection];
        let ended = connection.pipes[self.side].ended;
        let pipe = &mut connection.pipes[1 - self.side];
        if pipe.reset || ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = state.window.saturating_sub(pipe.used);
        if room == 0 {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = room.min(bytes.len());
        let mut piece = bytes[..count].to_vec();
        pipe.used += count;
        let version = pipe.frame.advance(&piece);
        if let (true, Some(at)) = (pipe.corrupt, version) {
            piece[at] ^= 1 << state.rng.below(8);
            pipe.corrupt = false;
        }
        if pipe.void {
            return Poll::Ready(Ok(count)); // fills a buffer of the system that nobody empties
        }
        let latency = connection.latency_ns + state.rng.below(connection.latency_ns + 1);
        let at = pipe.last_at.max(state.queue.now() + latency + pipe.slow_ns);
        pipe.last_at = at;
        pipe.sent.push_back(piece);
        let delivery = Delivery {
            connection: self.connection,
            to: 1 - self.side,
        };
        state.queue.push(at, delivery.into());
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl<E: From<Delivery>> Drop for SimSocket<E> {
    fn drop(&mut self) {
        let Ok(mut state) = self.net.state.try_borrow_mut() else {
            return;
        };
        let state = &mut *state;
        let connection = &mut state.connections[self.connection];
        connection.kept[self.side] = false;
        let mine = &mut connection.pipes[self.side];
        (mine.reader, mine.writer) = (None, None);
        mine.received.clear();
        mine.used = 0;
        let pipe = &mut connection.pipes[1 - self.side];
        if pipe.void || pipe.reset {
            return;
        }
        let at = pipe.last_at.max(state.queue.now() + connection.latency_ns);
        pipe.last_at = at;
        pipe.sent.push_back(Vec::new());
        let delivery = Delivery {
            connection: self.connection,
            to: 1 - self.side,
        };
        state.queue.push(at, delivery.into());
    }
}
