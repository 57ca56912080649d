//! Tokens on their way past hyper and its tasks.
//!
//! ```text
//!   PassFrame ─► ReplyState::on_tokens ─► `out` ─┬─► Workers::write_some ─► one chunk, one send
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

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::Write;
use std::rc::Rc;

use crate::door::socket::Sent;
use crate::tokens::reply::Reply;
use crate::tokens::workers::Workers;

/// Streams that are written before others have a turn: a send takes 3 to 10 µs.
const WRITES_PER_TURN: usize = 32;

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

impl Workers {
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
        self.shard.metrics.flushes.add(1);
        self.shard.metrics.direct_writes.add(1);
    }
}
