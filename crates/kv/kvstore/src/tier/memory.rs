//! Blocks in host memory that peers on the host can read in place.

use std::sync::{Arc, Mutex, MutexGuard};

use slipstream_base::SimTime;
use slipstream_base::sync::lock;
use slipstream_base::width::to_u32;

use super::{Medium, Tier, TierChange, TierError, TierStats};
use crate::arena::Arena;
use crate::checksum;
use crate::ledger::{Cleared, Ledger, Removal};

/// Size of a memory tier.
#[derive(Clone, Copy, Debug)]
pub struct MemoryOptions {
    /// Bytes of all blocks together; rounded down to whole blocks.
    pub bytes: usize,
    /// Bytes of the largest block. Each block takes as much.
    pub block_bytes: usize,
    /// How long a block is kept, ns; `None`: until it is evicted.
    pub ttl_ns: Option<u64>,
}

/// Host memory in slots of one size.
///
/// A slot is *free*, *filled* (by the thread that took it from the free ones), or *held*
/// (read-only). Readers pin a held slot. A slot that is dropped while pinned becomes free with its
/// last unpin. So no slot is written while it is read, by this process or by one that pins it
/// through a connection.
pub struct MemoryTier {
    arena: Arc<Arena>,
    slots: usize,
    block_bytes: usize,
    state: Mutex<State>,
}

struct State {
    ledger: Ledger<StoredBlock>,
    free: Vec<u32>,
    /// Pins per slot.
    pins: Vec<u32>,
    /// Slots without a key that become free with their last unpin.
    doomed: Vec<bool>,
    /// Slots of blocks that were cleared at once; they are freed one by one, when needed.
    cleared: Vec<Cleared<StoredBlock>>,
    /// Number of clears.
    epoch: u64,
    /// Pins per slot by peers, and the number of slots that have such pins; see
    /// [`MemoryTier::lend`].
    lends: Vec<u32>,
    lent: usize,
}

#[derive(Clone, Copy)]
struct StoredBlock {
    slot: u32,
    len: u32,
    checksum: u64,
}

/// A block that stays in its slot until this is dropped.
pub struct Pinned {
    tier: Arc<MemoryTier>,
    block: StoredBlock,
    is_lent: bool,
}

impl Pinned {
    /// The block.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the slot is held or doomed, and pinned: see `MemoryTier`.
        unsafe { self.tier.arena.bytes(self.offset(), self.len()) }
    }

    /// Its offset in [`MemoryTier::arena`].
    pub fn offset(&self) -> usize {
        self.tier.offset(self.block.slot)
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.block.len as usize
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The checksum when it was stored.
    pub fn checksum(&self) -> u64 {
        self.block.checksum
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.tier.unpin(self.block.slot, self.is_lent);
    }
}

impl MemoryTier {
    /// Allocates the memory.
    ///
    /// # Errors
    ///
    /// [`TierError::TooLarge`] if `bytes` is less than one block, [`TierError::Arena`] if there is
    /// no memory.
    pub fn new(options: MemoryOptions) -> Result<Arc<MemoryTier>, TierError> {
        let slots = options.bytes / options.block_bytes.max(1);
        let fits = u32::try_from(slots).is_ok() && u32::try_from(options.block_bytes).is_ok();
        if slots == 0 || options.block_bytes == 0 || !fits {
            return Err(TierError::TooLarge {
                bytes: options.block_bytes,
                max: options.bytes,
            });
        }
        Ok(Arc::new(MemoryTier {
            arena: Arc::new(Arena::create(slots * options.block_bytes)?),
            slots,
            block_bytes: options.block_bytes,
            state: Mutex::new(State {
                ledger: Ledger::new(options.ttl_ns),
                free: (0..to_u32(slots)).rev().collect(),
                pins: vec![0; slots],
                doomed: vec![false; slots],
                cleared: Vec::new(),
                epoch: 0,
                lends: vec![0; slots],
                lent: 0,
            }),
        }))
    }

    /// The memory of the blocks.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Bytes of the largest block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Pins a block for reading, and makes it the most recently used.
    pub fn pin(self: &Arc<Self>, now: SimTime, key: &[u8]) -> Option<Pinned> {
        let block = self.take_pin(now, key)?;
        Some(Pinned {
            tier: Arc::clone(self),
            block,
            is_lent: false,
        })
    }

    /// As [`MemoryTier::pin`], for a peer. `None` also while peers pin half of all slots: the
    /// others are reserved for blocks of this engine.
    pub(crate) fn lend(self: &Arc<Self>, now: SimTime, key: &[u8]) -> Option<Pinned> {
        let mut state = self.state();
        let at = state.ledger.peek(now, key)?.slot as usize;
        if state.lends[at] == 0 {
            if state.lent >= self.slots.div_ceil(2) {
                return None;
            }
            state.lent += 1;
        }
        state.lends[at] += 1;
        state.pins[at] += 1;
        let block = state.ledger.touch(now, key)?;
        drop(state);
        Some(Pinned {
            tier: Arc::clone(self),
            block,
            is_lent: true,
        })
    }

    fn take_pin(&self, now: SimTime, key: &[u8]) -> Option<StoredBlock> {
        let mut state = self.state();
        let found = state.ledger.touch(now, key);
        if let Some(block) = found {
            state.pins[block.slot as usize] += 1;
        }
        found
    }

    /// Drops a block that failed verification, and counts it.
    pub fn drop_corrupt(&self, key: &[u8]) {
        let mut state = self.state();
        if let Some(block) = state.ledger.remove(key, Removal::Corrupt) {
            state.release(block.slot);
        }
    }

    /// Flips a bit in the middle of a block.
    #[cfg(test)]
    pub(crate) fn damage(&self, key: &[u8]) {
        let block = self
            .take_pin(SimTime::ZERO, key)
            .expect("the block is held");
        let (at, len) = (self.offset(block.slot), block.len as usize);
        // SAFETY: tests damage blocks only while no thread reads them.
        let bytes = unsafe { self.arena.bytes_mut(at, len) };
        bytes[len / 2] ^= 4;
        self.unpin(block.slot, false);
    }

    fn unpin(&self, slot: u32, is_lent: bool) {
        let mut state = self.state();
        let at = slot as usize;
        if is_lent {
            state.lends[at] -= 1;
            state.lent -= usize::from(state.lends[at] == 0);
        }
        state.pins[at] -= 1;
        if state.pins[at] == 0 && state.doomed[at] {
            state.doomed[at] = false;
            state.free.push(slot);
        }
    }

    fn offset(&self, slot: u32) -> usize {
        slot as usize * self.block_bytes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// A free slot, or one that an eviction frees.
    fn take_free(&mut self, now: SimTime) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        while let Some(cleared) = self.cleared.last_mut() {
            let Some(block) = cleared.pop() else {
                self.cleared.pop();
                continue;
            };
            self.release(block.slot);
            if let Some(slot) = self.free.pop() {
                return Some(slot);
            }
        }
        if let Some(key) = self.ledger.pop_due(now)
            && let Some(block) = self.ledger.remove(&key, Removal::Expired)
        {
            self.release(block.slot);
            if let Some(slot) = self.free.pop() {
                return Some(slot);
            }
        }
        let pins = &self.pins;
        let oldest = self.ledger.oldest(|block| pins[block.slot as usize] == 0)?;
        let block = self.ledger.remove(&oldest, Removal::Evicted)?;
        Some(block.slot)
    }

    /// Frees a slot that has lost its key, or marks it until its last unpin.
    fn release(&mut self, slot: u32) {
        if self.pins[slot as usize] == 0 {
            self.free.push(slot);
        } else {
            self.doomed[slot as usize] = true;
        }
    }
}

impl Tier for MemoryTier {
    fn medium(&self) -> Medium {
        Medium::Host
    }

    fn epoch(&self) -> u64 {
        self.state().epoch
    }

    fn put_in(
        &self,
        epoch: u64,
        now: SimTime,
        key: &[u8],
        bytes: &[u8],
    ) -> Result<bool, TierError> {
        if bytes.len() > self.block_bytes {
            self.state().ledger.stats.failed_total += 1;
            return Err(TierError::TooLarge {
                bytes: bytes.len(),
                max: self.block_bytes,
            });
        }
        let slot = {
            let mut state = self.state();
            if state.epoch != epoch || state.ledger.touch(now, key).is_some() {
                return Ok(false);
            }
            let Some(slot) = state.take_free(now) else {
                state.ledger.stats.failed_total += 1;
                return Err(TierError::Pinned { slots: self.slots });
            };
            slot
        };
        // SAFETY: the slot is no longer free and has no key yet, so nothing else refers to it.
        unsafe { self.arena.bytes_mut(self.offset(slot), bytes.len()) }.copy_from_slice(bytes);
        let block = StoredBlock {
            slot,
            len: to_u32(bytes.len()),
            checksum: checksum(bytes),
        };
        let mut state = self.state();
        if state.epoch != epoch {
            state.free.push(slot);
            return Ok(false);
        }
        if let Some(other) = state.ledger.peek(SimTime::ZERO, key) {
            if state.ledger.peek(now, key).is_some() {
                state.free.push(slot); // another thread stored the block first
                return Ok(false);
            }
            state.ledger.remove(key, Removal::Expired);
            state.release(other.slot);
        }
        let until = state.ledger.until(now);
        state
            .ledger
            .insert(key, block, self.block_bytes as u64, until);
        Ok(true)
    }

    fn get(&self, now: SimTime, key: &[u8], out: &mut [u8]) -> Result<bool, TierError> {
        let Some(block) = self.take_pin(now, key) else {
            self.state().ledger.stats.misses_total += 1;
            return Ok(false);
        };
        let len = block.len as usize;
        let verified = (len == out.len()).then(|| {
            // SAFETY: the slot is pinned, so it is not written to.
            out.copy_from_slice(unsafe { self.arena.bytes(self.offset(block.slot), len) });
            checksum(out) == block.checksum
        });
        self.unpin(block.slot, false);
        match verified {
            None => Err(TierError::Length {
                want: out.len(),
                got: len,
            }),
            Some(true) => {
                self.state().ledger.stats.hits_total += 1;
                Ok(true)
            }
            Some(false) => {
                self.drop_corrupt(key);
                self.state().ledger.stats.misses_total += 1;
                Ok(false)
            }
        }
    }

    fn len_of(&self, now: SimTime, key: &[u8]) -> Option<usize> {
        let block = self.state().ledger.peek(now, key)?;
        Some(block.len as usize)
    }

    fn remove(&self, key: &[u8]) -> bool {
        let mut state = self.state();
        let Some(block) = state.ledger.remove(key, Removal::Removed) else {
            return false;
        };
        state.release(block.slot);
        true
    }

    fn expire(&self, now: SimTime, count_max: usize) -> usize {
        let mut state = self.state();
        let mut count = 0;
        while count < count_max
            && let Some(key) = state.ledger.pop_due(now)
        {
            if let Some(block) = state.ledger.remove(&key, Removal::Expired) {
                state.release(block.slot);
            }
            count += 1;
        }
        count
    }

    fn take_changes(&self, out: &mut Vec<TierChange>) -> bool {
        self.state().ledger.take_changes(out)
    }

    fn keys(&self) -> Vec<Box<[u8]>> {
        self.state().ledger.keys()
    }

    fn stats(&self) -> TierStats {
        self.state().ledger.stats
    }

    fn clear(&self) {
        let mut state = self.state();
        let cleared = state.ledger.clear();
        state.cleared.push(cleared);
        state.epoch += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(blocks: usize, ttl_ns: Option<u64>) -> Arc<MemoryTier> {
        MemoryTier::new(MemoryOptions {
            bytes: blocks * 4096,
            block_bytes: 4096,
            ttl_ns,
        })
        .unwrap()
    }

    #[test]
    fn a_pinned_block_stays_while_others_are_evicted() {
        let tier = tier(2, None);
        let now = SimTime(0);
        tier.put(now, b"a", &[1; 4096]).unwrap();
        tier.put(now, b"b", &[2; 4096]).unwrap();
        let pinned = tier.pin(now, b"a").unwrap();
        let both = tier.pin(now, b"b").unwrap();
        let full = tier.put(now, b"c", &[3; 4096]).unwrap_err();
        assert!(matches!(full, TierError::Pinned { slots: 2 }));
        drop(both);
        tier.put(now, b"c", &[3; 4096]).unwrap();
        assert_eq!(tier.len_of(now, b"b"), None);
        // Dropped while it is read: its bytes stay until the reader unpins it.
        assert!(tier.remove(b"a"));
        tier.put(now, b"d", &[4; 4096]).unwrap();
        assert_eq!(pinned.bytes(), [1; 4096]);
        assert_eq!(checksum(pinned.bytes()), pinned.checksum());
        drop(pinned);
        assert!(tier.put(now, b"e", &[5; 4096]).unwrap());
        assert_eq!(tier.stats().blocks, 2);
        assert_eq!(tier.stats().failed_total, 1);
    }

    #[test]
    fn a_block_that_was_damaged_in_memory_is_a_miss() {
        let tier = tier(2, None);
        let now = SimTime(0);
        tier.put(now, b"a", &[1; 100]).unwrap();
        tier.damage(b"a");
        let mut out = [0; 100];
        assert!(!tier.get(now, b"a", &mut out).unwrap());
        assert_eq!((tier.stats().corrupt_total, tier.stats().blocks), (1, 0));
        assert!(tier.put(now, b"a", &[1; 100]).unwrap());
        assert!(tier.get(now, b"a", &mut out).unwrap());
    }
}
