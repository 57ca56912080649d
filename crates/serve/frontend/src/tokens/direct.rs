//! Tokens on their way past hyper and its tasks.
//!
//! ```text
//!   PassFrame ─► ReplyState::on_tokens ─► `out` ─┬─► Shard::write_some ─► one chunk, one send
//!                                                └─► the connection's task ─► hyper ─► socket
//! ```
//!
//! To wake a connection's task for a token costs more than its send. So the shard notes which streams a turn
//! of frames gave events, and sends each of them once at its end. Everything else goes by the task: the head of the
//! answer and its first events, its last ones, errors, HTTP/2, HTTP/1.0, events of other shapes, streams with faults,
//! and what a slow client leaves unread.
//!
//! Both write to one socket, so a stream is written here only while
//!
//! - its task waits for events: what it was given before has gone to hyper ([`ReplyState`]'s waker is there), and
//! - the system has taken all that hyper was given (`flushed`): hyper is between two chunks.
//!
//! If the system takes a part of a chunk, the socket's side for hyper writes the rest before anything else
//! ([`ClientIo`](crate::door::io::ClientIo)), and its deadline for clients that do not read counts.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::io::{self, Write};
use std::rc::Rc;
use std::task::Poll;

use bytes::BytesMut;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::tokens::reply::Reply;
use crate::tokens::shard::Shard;

/// Streams that are written before others have a turn: a send takes 3 to 10 µs.
const WRITES_PER_TURN: usize = 32;

/// A client's socket, which hyper and the shard write to.
#[derive(Default)]
pub(crate) struct Wire {
    /// `None` once hyper is done with it.
    socket: RefCell<Option<TokioIo<TcpStream>>>,
    /// Rest of a chunk that the system has taken a part of.
    owed: RefCell<BytesMut>,
    /// All that hyper was given has been given to the system, and nothing is owed.
    flushed: Cell<bool>,
}

/// Outcome of the send of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    All,
    /// The rest is owed.
    Part,
    /// The system takes nothing now, or never again.
    Nothing,
}

impl Wire {
    /// Connects it, until [`hang_up`](Self::hang_up).
    pub(crate) fn connect(&self, stream: TcpStream) {
        self.socket.replace(Some(TokioIo::new(stream)));
        self.flushed.set(true);
    }

    /// Closes the socket, although requests may still hold the connection.
    pub(crate) fn hang_up(&self) {
        self.socket.take();
        self.flushed.set(false);
    }

    /// Polls the socket.
    pub(crate) fn poll<T>(
        &self,
        poll: impl FnOnce(&mut TokioIo<TcpStream>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut *self.socket.borrow_mut() {
            Some(socket) => poll(socket),
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    /// Bytes that go before any others.
    pub(crate) fn owed(&self) -> RefMut<'_, BytesMut> {
        self.owed.borrow_mut()
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.flushed.get()
    }

    pub(crate) fn set_flushed(&self, flushed: bool) {
        self.flushed.set(flushed);
    }

    /// Sends `chunk`, if hyper has nothing to send.
    fn send(&self, chunk: &[u8]) -> Sent {
        let socket = self.socket.borrow();
        let Some(socket) = socket.as_ref().filter(|_| self.flushed.get()) else {
            return Sent::Nothing;
        };
        match socket.inner().try_write(chunk) {
            Ok(sent) if sent == chunk.len() => Sent::All,
            Ok(0) | Err(_) => Sent::Nothing, // an error shows as hyper writes
            Ok(sent) => {
                self.owed.borrow_mut().extend_from_slice(&chunk[sent..]);
                self.flushed.set(false);
                Sent::Part
            }
        }
    }
}

/// Streams with events that a turn has rendered.
#[derive(Default)]
pub(crate) struct Due {
    replies: RefCell<VecDeque<Rc<Reply>>>,
    /// The chunk under way.
    chunk: RefCell<Vec<u8>>,
}

impl Due {
    pub(crate) fn push(&self, reply: Rc<Reply>) {
        self.replies.borrow_mut().push_back(reply);
    }
}

impl Shard {
    /// Writes streams that have events, a turn's worth. Returns whether there are more.
    pub(crate) fn write_some(&self) -> bool {
        for _ in 0..WRITES_PER_TURN {
            // Not borrowed during the write, which may wake tasks.
            let Some(reply) = self.due.replies.borrow_mut().pop_front() else {
                return false;
            };
            self.write(&reply);
        }
        !self.due.replies.borrow().is_empty()
    }

    fn write(&self, reply: &Reply) {
        let mut state = reply.state.borrow_mut();
        let Some(events) = state.take_due() else {
            return;
        };
        let mut chunk = self.due.chunk.borrow_mut();
        chunk.clear();
        let _ = write!(chunk, "{:X}\r\n", events.len()); // memory takes all
        chunk.extend_from_slice(events);
        chunk.extend_from_slice(b"\r\n");
        match reply.client.owner().wire().send(&chunk) {
            Sent::Nothing => return state.on_unwritten(),
            sent => state.on_written(sent == Sent::Part),
        }
        self.metrics.flushes.add(1);
        self.metrics.direct_writes.add(1);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Read;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::time::Duration;

    use hyper::rt::Write as _;

    use super::*;
    use crate::door::connection::Connection;
    use crate::door::io::ClientIo;

    #[test]
    fn the_rest_of_a_chunk_goes_before_what_hyper_writes() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let mut there = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (here, _) = listener.accept().unwrap();
            here.set_nonblocking(true).unwrap();
            let stream = TcpStream::from_std(here).unwrap();
            stream.writable().await.unwrap();
            let connection = Connection::new(Arc::default());
            let mut io = ClientIo::new(stream, connection.clone(), Duration::from_secs(60), || {});
            let wire = connection.wire();
            assert_eq!(wire.send(b"begin"), Sent::All);
            // More than the system keeps for a connection.
            let chunk: Vec<u8> = (0..16 << 20).map(|at: u32| (at / 251) as u8).collect();
            assert_eq!(wire.send(&chunk), Sent::Part);
            assert_eq!(wire.send(b"not now"), Sent::Nothing);
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                there.read_to_end(&mut all).unwrap();
                all
            });
            let tail = poll_fn(|cx| Pin::new(&mut io).poll_write(cx, b"tail")).await;
            assert_eq!(tail.unwrap(), 4);
            assert_eq!(wire.send(b"not yet"), Sent::Nothing);
            poll_fn(|cx| Pin::new(&mut io).poll_flush(cx))
                .await
                .unwrap();
            assert_eq!(wire.send(b"end"), Sent::All);
            drop(io);
            assert_eq!(wire.send(b"gone"), Sent::Nothing);
            let all = reader.join().unwrap();
            assert!(all == [&b"begin"[..], &chunk, b"tailend"].concat());
        });
    }
}
