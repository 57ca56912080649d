//! The keys of somebody else, followed through its messages.

use crate::key_message::{KeyError, KeyMessage, Knowledge, Order};
use crate::key_set::{Change, KeySet};

/// Another engine's keys, whole. Where only prefix look-ups are wanted, and of many peers,
/// [`crate::PeerIndex`] is smaller.
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
    /// Takes one message.
    ///
    /// # Errors
    ///
    /// Unless the error is [`KeyError::Stale`], nothing is believed afterwards until the next
    /// snapshot begins; ask for one.
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

    /// What is known of the other's keys.
    pub fn knowledge(&self) -> Knowledge {
        self.order.knowledge()
    }

    /// The keys that the other is known to hold.
    pub fn keys(&self) -> &KeySet {
        &self.keys
    }
}
