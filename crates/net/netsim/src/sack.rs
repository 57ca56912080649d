//! SACK options under way.
//!
//! A packet is an event of 16 bytes, without room for the ranges of an option. An ACK with an option is an event of
//! the kind [`EventKind::Sack`](crate::event::EventKind::Sack), and its `seq` is the index of a [`SackOption`] in the
//! store of its shard. The option leaves the store with the event: when the packet is delivered, dropped, or mailed to
//! another shard. Only receivers with a gap send options, so other packets cost nothing.

use slipstream_base::width::to_u32;

/// Ranges per option: those of 8 bytes that fit the 40 bytes of TCP options (RFC 2018 section 3).
pub(crate) const BLOCKS_MAX: usize = 4;

/// An acknowledgment with ranges beyond it. Byte numbers are the low 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SackOption {
    /// All bytes below have arrived.
    pub(crate) ack: u32,
    /// Ranges that have arrived beyond it, the latest first; an empty range ends the list.
    pub(crate) blocks: [(u32, u32); BLOCKS_MAX],
    /// Whether the packet's data had arrived before (RFC 2883: D-SACK).
    pub(crate) duplicate: bool,
}

/// The options of a shard's packets. Slots are reused, so their number is the maximum under way.
#[derive(Debug, Default)]
pub(crate) struct SackStore {
    slots: Vec<SackOption>,
    free: Vec<u32>,
}

impl SackStore {
    /// Stores an option and returns its index.
    pub(crate) fn put(&mut self, option: SackOption) -> u32 {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = option;
            return index;
        }
        self.slots.push(option);
        to_u32(self.slots.len() - 1)
    }

    /// Removes an option.
    pub(crate) fn take(&mut self, index: u32) -> SackOption {
        self.free.push(index);
        self.slots[index as usize]
    }

    /// Options under way.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused() {
        let mut store = SackStore::default();
        let option = |ack| SackOption {
            ack,
            ..SackOption::default()
        };
        let (a, b) = (store.put(option(1)), store.put(option(2)));
        assert_eq!((store.take(a).ack, store.len()), (1, 1));
        let c = store.put(option(3));
        assert_eq!((store.take(b).ack, store.take(c).ack), (2, 3));
        assert_eq!((store.len(), store.slots.len()), (0, 2));
    }
}
