//! Answers to HTTP requests while they are being made.
//!
//! ```text
//!   PassFrame ─► Workers::drain ─► stream table ─► Reply::on_tokens ─► `out` (rendered events)
//!                                                   │ more than RENDERED_BYTES_MAX unread?
//!                                                   └─► `held` (tokens, 4 bytes each)
//!   hyper polls ReplyBody::poll_frame ◄── `out`, then what `held` renders to
//! ```
//!
//! A reply has one *sequence* for each choice of each prompt. It lives in an `Rc` shared by the
//! stream table (which feeds it) and by the HTTP side (which owns it: dropping a [`ReplyHandle`](handle::ReplyHandle)
//! kills parts that are still under way).

pub(crate) mod body;
mod credit;
pub(crate) mod handle;
mod input;
mod memory;
mod outlet;
mod progress;
mod sequence;
pub(crate) mod spec;
pub(crate) mod state;
pub(crate) mod trace;
pub(crate) mod whole;

use std::cell::{Ref, RefCell};
use std::rc::Rc;

use slipstream_planes::{Registration, StreamAddr};

use crate::door::connection::Client;
use crate::tokens::reply::state::{Overdue, ReplyState};

/// Entry of the stream table: which sequence of which reply it feeds.
pub(crate) struct StreamSlot {
    pub(crate) reply: Rc<Reply>,
    pub(crate) sequence: u32,
    pub(crate) role: StreamRole,
}

/// Which of a sequence's streams it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamRole {
    /// Its tokens come by it.
    Answer,
    /// The worker that computes its prompt for another one reports by it.
    Prefill {
        /// Number of the request in the dispatcher.
        id: u32,
    },
}

/// See the module's text.
pub(crate) struct Reply {
    pub(crate) state: RefCell<ReplyState>,
    /// Its streams, until they are closed.
    streams: RefCell<Vec<Registration<StreamSlot>>>,
    /// Whose it is.
    pub(crate) client: Client,
    /// When it has to be complete, `CLOCK_MONOTONIC` ns.
    deadline_ns: Option<u64>,
}

impl Reply {
    pub(crate) fn new(state: ReplyState, client: Client, deadline_ns: Option<u64>) -> Reply {
        Reply {
            state: RefCell::new(state),
            streams: RefCell::default(),
            client,
            deadline_ns,
        }
    }

    /// Its streams, which are closed by now. The caller takes them off their workers.
    pub(crate) fn take_streams(&self) -> Vec<Registration<StreamSlot>> {
        self.streams.take()
    }

    /// Gives the stream of sequence `index` a new address, which frames of its former workers do not have.
    /// `None` if it is closed.
    pub(crate) fn renew_stream(&self, index: u32) -> Option<StreamAddr> {
        let mut streams = self.streams.borrow_mut();
        let stream = streams.get_mut(index as usize)?;
        stream.renew();
        Some(stream.addr())
    }

    /// Whether it has to end, at tick `tick` of the shard and time `now_ns`. A client may leave what waits
    /// for it unread for `ticks_max` ticks.
    pub(crate) fn overdue(&self, tick: u64, ticks_max: u64, now_ns: u64) -> Option<Overdue> {
        let is_late = self.deadline_ns.is_some_and(|deadline| now_ns >= deadline);
        let mut state = self.state.borrow_mut();
        state.overdue(tick, ticks_max, is_late)
    }

    /// Gives it its streams.
    fn set_streams(&self, streams: Vec<Registration<StreamSlot>>) {
        self.streams.replace(streams);
    }

    fn streams(&self) -> Ref<'_, Vec<Registration<StreamSlot>>> {
        self.streams.borrow()
    }

    /// Address of its first stream.
    fn first_addr(&self) -> StreamAddr {
        self.streams.borrow()[0].addr()
    }
}
