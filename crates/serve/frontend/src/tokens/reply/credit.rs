//! Credit: the bytes of tokens that a sequence's worker may send before its client has read.

use slipstream_base::TokenId;
use slipstream_planes::frame::NO_LIMIT;

/// Bytes of so many tokens.
fn bytes_of(tokens: u64) -> u64 {
    tokens * size_of::<TokenId>() as u64
}

/// Credit of one sequence.
pub(super) struct Credit {
    /// Bytes of tokens that the worker may have sent, all in all.
    granted: u64,
    /// What is given when half of it is used up, bytes; `NO_LIMIT`: none is needed.
    step: u32,
}

impl Credit {
    /// No credit is needed.
    pub(super) const UNLIMITED: Credit = Credit {
        granted: 0,
        step: NO_LIMIT,
    };

    /// Credit of `bytes` at the beginning.
    pub(super) fn new(bytes: u32) -> Credit {
        Credit {
            granted: u64::from(bytes),
            step: bytes,
        }
    }

    /// Credit with which a worker starts a sequence of which `came` tokens are here, bytes.
    pub(super) fn at_start(&self, came: u32) -> u32 {
        if self.step == NO_LIMIT {
            return NO_LIMIT;
        }
        let left = self.granted.saturating_sub(bytes_of(came.into()));
        u32::try_from(left).unwrap_or(NO_LIMIT - 1)
    }

    /// Another worker continues after `came` tokens, of which `unread` wait for the client: it may send what the
    /// client has room for.
    pub(super) fn renew(&mut self, came: u32, unread: usize) {
        if self.step != NO_LIMIT {
            let room = u64::from(self.step).saturating_sub(bytes_of(unread as u64));
            self.granted = bytes_of(came.into()) + room;
        }
    }

    /// Credit that is due now that `taken` tokens are with the client, bytes: once half of what the worker had is
    /// used up, as much as was.
    #[inline]
    pub(super) fn due(&mut self, taken: u64) -> u32 {
        if self.step == NO_LIMIT {
            return 0;
        }
        let due = (bytes_of(taken) + u64::from(self.step)).saturating_sub(self.granted);
        let due = u32::try_from(due).unwrap_or(NO_LIMIT - 1);
        if due < self.step / 2 {
            return 0;
        }
        if slipstream_base::planted!("double-credit") {
            return due;
        }
        self.granted += u64::from(due);
        due
    }

    /// Whether more than was granted came.
    #[cfg(feature = "sim")]
    pub(super) fn is_exceeded(&self, came: u32) -> bool {
        self.step != NO_LIMIT && bytes_of(came.into()) > self.granted
    }
}
