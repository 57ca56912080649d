//! Rendered bytes of an answer on their way to the client, whom the shard or hyper writes to.

use std::task::{Context, Waker};

use bytes::{Bytes, BytesMut};

/// Rendered bytes that may wait for one client. Beyond that its tokens are kept as numbers, a
/// fiftieth of the size, until the client has read: 1,024 streams without a reader then hold
/// 8 MiB of text and not 200. One write of 8 KiB carries about 42 tokens; at twice that a token
/// cost no less, and 1,024 streams 10 MiB more. Less by an event, so that
/// the last one does not double the buffer.
pub(super) const RENDERED_BYTES_MAX: usize = (8 << 10) - EVENT_BYTES;

/// Room for nearly any event.
const EVENT_BYTES: usize = 512;

/// Room that a stream keeps for its next events once the shard has written those before.
const WRITTEN_BYTES_KEPT: usize = 2 << 10;

/// Makes room for an event. A buffer that grows by itself ends at odd sizes, up to twice the bound.
#[inline]
pub(super) fn make_room(out: &mut BytesMut) {
    let len = out.len();
    if out.capacity() - len < EVENT_BYTES {
        let size = (len + EVENT_BYTES).next_power_of_two().max(2 << 10);
        out.reserve(size - len);
    }
}

/// Who writes events to the socket (`direct.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    /// The client's side takes all events.
    Client,
    /// The shard may, as soon as the head of the answer and its first events are written.
    ShardLater,
    Shard,
    /// The shard will, in its turn.
    ShardDue,
}

/// Rendered bytes, and who takes them.
pub(super) struct Outlet {
    pub(super) bytes: BytesMut,
    waker: Option<Waker>,
    writer: Writer,
    /// A pause has been counted since the client last caught up.
    is_paused: bool,
    /// Tick of the shard at which the client's side last asked for more.
    pub(super) polled_tick: u64,
}

impl Outlet {
    pub(super) fn new() -> Outlet {
        Outlet {
            bytes: BytesMut::new(),
            waker: None,
            writer: Writer::Client,
            is_paused: false,
            polled_tick: 0,
        }
    }

    /// Whether events may be rendered: otherwise tokens wait.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.bytes.len() < RENDERED_BYTES_MAX
    }

    /// Wakes the client's side.
    pub(super) fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Has the client's side woken.
    pub(super) fn wait(&mut self, cx: &Context<'_>) {
        self.waker = Some(cx.waker().clone());
    }

    /// Whether the shard writes the events: the client's side waits, and has nothing to add.
    #[inline]
    pub(super) fn is_shards(&self, is_complete: bool) -> bool {
        let on = matches!(self.writer, Writer::Shard | Writer::ShardDue);
        on && self.waker.is_some() && !is_complete && !self.is_paused
    }

    /// Notes that the shard will write. Returns whether it did not know yet.
    #[inline]
    pub(super) fn set_due(&mut self) -> bool {
        std::mem::replace(&mut self.writer, Writer::ShardDue) == Writer::Shard
    }

    /// The shard's turn to write has come.
    pub(super) fn clear_due(&mut self) {
        if self.writer == Writer::ShardDue {
            self.writer = Writer::Shard;
        }
    }

    /// Events that the shard may write. Without a waker the client's side is about to look.
    pub(super) fn for_shard(&self) -> Option<&[u8]> {
        (self.waker.is_some() && !self.bytes.is_empty()).then_some(&self.bytes)
    }

    /// The shard has written all events.
    pub(super) fn on_written(&mut self) {
        self.bytes.clear();
        if self.bytes.capacity() > WRITTEN_BYTES_KEPT {
            self.bytes = BytesMut::new();
        }
    }

    /// The shard may write to the socket.
    pub(super) fn allow_direct(&mut self) {
        self.writer = Writer::ShardLater;
    }

    /// All events, for the client's side. With them, whether the shard may write those that follow.
    pub(super) fn take(&mut self) -> (Bytes, bool) {
        if self.writer == Writer::ShardLater {
            self.writer = Writer::Shard;
        }
        let may_follow = self.writer != Writer::Client;
        (self.bytes.split().freeze(), may_follow)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// The client does not keep up. Returns whether that is new.
    pub(super) fn pause(&mut self) -> bool {
        !std::mem::replace(&mut self.is_paused, true)
    }

    /// The client has everything there is.
    pub(super) fn caught_up(&mut self) {
        self.is_paused = false;
    }
}
