//! A streamed answer as hyper takes it.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::Frame;
use slipstream_base::Stage;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::link::yield_turn;

use crate::door::access::AnswerEnd;
use crate::door::body::AnswerBody;
use crate::openai::ApiError;
use crate::tokens::reply::handle::ReplyHandle;

/// Times that rendered events are refilled from tokens before other clients have a turn. The socket of a
/// fast reader takes megabytes in one go.
const REFILLS_PER_TURN: u32 = 8;

/// A streamed answer as hyper takes it.
pub(crate) struct ReplyBody {
    handle: ReplyHandle,
    /// Refills since other clients had a turn.
    refills: u32,
}

impl ReplyBody {
    pub(crate) fn new(handle: ReplyHandle) -> ReplyBody {
        ReplyBody { handle, refills: 0 }
    }

    /// Why the reply failed, if it did: the error that its last event has.
    pub(crate) fn error(&self) -> Option<ApiError> {
        self.handle.reply().state.borrow().progress.error().cloned()
    }
}

impl AnswerBody for ReplyBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let handle = &mut self.handle;
        handle.poll_deadline(cx);
        let workers = handle.workers().clone();
        let mut stopped = Vec::new();
        let mut refilled = false;
        let outcome = {
            let mut state = handle.reply().state.borrow_mut();
            let state = &mut *state;
            state.outlet.polled_tick = workers.replies.tick();
            if state.outlet.bytes.is_empty() && !state.progress.is_complete() {
                if self.refills >= REFILLS_PER_TURN {
                    self.refills = 0;
                    yield_turn(cx);
                    return Poll::Pending;
                }
                self.refills += 1;
                stopped = state.refill(&workers.shard.service.text);
                refilled = true;
            }
            if !state.outlet.bytes.is_empty() {
                if state.times.at(Stage::Rendered).is_some() {
                    state.times.note(Stage::Written, monotonic_ns());
                }
                let (events, shard_follows) = state.outlet.take();
                if shard_follows {
                    // Until it is written, nothing goes past it.
                    handle.reply().client.owner().wire().set_flushed(false);
                }
                workers.shard.metrics.flushes.add(1);
                Poll::Ready(Some(Ok(Frame::data(events))))
            } else if state.progress.is_complete() {
                state.progress.deliver();
                if state.progress.error().is_some() {
                    let owner = handle.reply().client.owner();
                    owner.account().note_end(AnswerEnd::Broken);
                }
                Poll::Ready(None)
            } else {
                // The client has everything there is.
                state.outlet.caught_up();
                self.refills = 0;
                state.outlet.wait(cx);
                Poll::Pending
            }
        };
        for index in stopped {
            handle.kill(index);
        }
        if refilled {
            handle.give_credit();
        }
        outcome
    }

    /// The shard may write events to the client's socket itself, as chunks of HTTP/1.1.
    fn allow_direct(&self) {
        self.handle.reply().state.borrow_mut().outlet.allow_direct();
    }
}
