//! Limits the work on one engine's bytes, so that other tasks get their turns.

/// Work on an engine's bytes before other tasks get a turn, in bytes.
const TURN_BYTES: usize = 64 << 10;

/// Fixed cost of a piece of an answer, in bytes of work: an engine may send chunks of one byte.
const PIECE_BYTES: usize = 256;

/// Limits the work that a task does on an engine's bytes at a time, however fast the engine sends them.
#[derive(Debug, Default)]
pub(super) struct Turn {
    spent: usize,
}

impl Turn {
    /// `bytes` were read.
    pub(super) fn on_read(&mut self, bytes: usize) {
        self.spent += bytes;
    }

    /// They contained a piece of an answer.
    pub(super) fn on_piece(&mut self) {
        self.spent += PIECE_BYTES;
    }

    /// Whether other tasks must have a turn now. The next one begins with that.
    pub(super) fn is_over(&mut self) -> bool {
        let is_over = self.spent >= TURN_BYTES;
        if is_over {
            self.spent = 0;
        }
        is_over
    }
}
