//! Input that follows the start of a request: room for it at the worker, and turns of the client.

use std::task::{Context, Poll, Waker};

use slipstream_base::TokenId;
use slipstream_base::width::to_usize;

/// The input of a request with more to come.
pub(super) struct Input {
    /// Room that the worker has given and that is not used, bytes.
    room_bytes: u64,
    /// The reader of the body.
    waker: Option<Waker>,
    /// Turns that the client has asked for, and those that are answered.
    turns_asked: u64,
    turns_answered: u64,
    /// The answer has no reader any more.
    is_over: bool,
}

impl Input {
    /// The first turn is asked for by the request itself.
    pub(super) fn new() -> Input {
        Input {
            room_bytes: 0,
            waker: None,
            turns_asked: 1,
            turns_answered: 0,
            is_over: false,
        }
    }

    /// The answer has no reader any more.
    pub(super) fn end(&mut self) {
        self.is_over = true;
        self.wake();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Wakes the reader of the body, to look again.
    pub(super) fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Has the reader woken.
    pub(super) fn wait(&mut self, cx: &Context<'_>) {
        self.waker = Some(cx.waker().clone());
    }

    /// The worker has room for so much more.
    pub(super) fn add_room(&mut self, bytes: u32) {
        self.room_bytes = self.room_bytes.saturating_add(bytes.into());
        self.wake();
    }

    /// So many tokens are on their way.
    pub(super) fn use_room(&mut self, tokens: usize) {
        let bytes = (tokens * size_of::<TokenId>()) as u64;
        self.room_bytes = self.room_bytes.saturating_sub(bytes);
    }

    /// Another worker gets the request, and gives room of its own.
    pub(super) fn forget_room(&mut self) {
        self.room_bytes = 0;
    }

    /// Tokens that there is room for, at least one.
    pub(super) fn room(&self) -> Poll<usize> {
        match to_usize(self.room_bytes) / size_of::<TokenId>() {
            0 => Poll::Pending,
            tokens => Poll::Ready(tokens),
        }
    }

    pub(super) fn ask_turn(&mut self) {
        self.turns_asked += 1;
    }

    pub(super) fn answer_turn(&mut self) {
        self.turns_answered += 1;
    }

    /// Whether the client has an answer to every turn.
    pub(super) fn awaits_turn(&self) -> bool {
        self.turns_answered >= self.turns_asked
    }
}
