//! A copy of a remote key set, built from its messages.

use crate::key_message::{KeyError, KeyMessage, Knowledge, Order};
use crate::key_set::{Change, KeySet};

/// The whole keys of another engine. [`crate::PeerIndex`] is smaller if only prefix look-ups over many
/// peers are needed.
pub struct KeyMirror {
    keys: KeySet,
    order: Order,
}

impl Default for KeyMirror {
    fn default() -> KeyMirror {
        KeyMirror {
            keys: KeySet::new(0, 0),
            order: Order::default(),
        }
    }
}

impl KeyMirror {
    /// Applies one message.
    ///
    /// # Errors
    ///
    /// After any error except [`KeyError::Stale`], the mirror is empty until the next snapshot begins;
    /// request one.
    pub fn apply(&mut self, message: &[u8]) -> Result<(), KeyError> {
        let result = self.try_apply(message);
        if result.as_ref().is_err_and(KeyError::loses_trust) {
            self.order.distrust();
            self.keys = KeySet::new(0, 0);
        }
        result
    }

    fn try_apply(&mut self, message: &[u8]) -> Result<(), KeyError> {
        let message = KeyMessage::read(message)?;
        if self.order.take(&message)? {
            self.keys = KeySet::new(0, 0); // the new keys may have another length
        }
        self.keys
            .apply(message.added().map(|key| (key, Change::Add(0))))?;
        self.keys
            .apply(message.removed().map(|key| (key, Change::Remove(0))))
    }

    /// How many of the remote engine's keys the mirror has.
    pub fn knowledge(&self) -> Knowledge {
        self.order.knowledge()
    }

    /// The keys of the remote engine, as far as they were received.
    pub fn keys(&self) -> &KeySet {
        &self.keys
    }
}
