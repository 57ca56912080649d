//! The keys of one cache, and its unpublished changes.

use std::collections::{HashMap, VecDeque};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use slipstream_base::width::to_u32;

use crate::key_message::{KeyError, KeyMessage, Writer, digest};

/// A change of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The holder holds the key from now on.
    Add(u32),
    /// The holder no longer holds the key.
    Remove(u32),
}

/// The currently cached keys. The cost of taking changes depends on the changes, never on the held keys.
///
/// A key is a block hash with its cache group, as vLLM writes it (32 bytes of SHA-256 and 4 of
/// group id). Any length is allowed, as long as all keys of a set share it. A key may have several
/// holders (vLLM's block ids, or tiers), and is removed with its last holder. Adding a
/// holder twice has no effect.
///
/// ```text
///   index: digest ─► slot      slots: holders, publication state      keys: slot × key_bytes
/// ```
///
/// A key keeps its slot until its removal is published. A snapshot can therefore walk the slots a few at
/// a time while keys are added and removed.
pub struct KeySet {
    index: HashTable<u32>,
    slots: Vec<Slot>,
    keys: Vec<u8>,
    free: Vec<u32>,
    /// Holders beyond the first, of the few keys that have more than one.
    others: HashMap<u32, Vec<u32>>,
    key_bytes: usize,
    held: usize,
    consumer: Consumer,
    /// Slots with changes that may need publication, each once; see [`Slot::noted`].
    noted: VecDeque<u32>,
    /// Kept to reuse its allocation.
    gone: Vec<u32>,
    /// Keys published in an earlier epoch are published again: a snapshot starts by incrementing it.
    epoch: u32,
    /// Consumers have discarded keys published in an earlier epoch. Removals of keys published since
    /// are published, also while a snapshot repeats them for new consumers.
    void_epoch: u32,
    stream: u64,
    sequence: u64,
}

#[derive(Clone, Copy)]
struct Slot {
    digest: u64,
    /// A holder, if `holders > 0`.
    first: u32,
    holders: u32,
    /// The value of `epoch` when the key was published; 0: never.
    published: u32,
    /// Listed in `noted`. Remains set when the slot is reused for another key.
    noted: bool,
}

/// Whether messages are wanted, and the progress of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Consumer {
    None,
    /// Slots below `next` are done.
    Snapshot {
        next: usize,
        begun: bool,
    },
    Following,
}

impl KeySet {
    /// An empty set, with capacity for `keys` keys (a cache's blocks), whose messages belong to
    /// `stream`: a number that is larger after a restart of the same cache, such as the time of its
    /// start.
    pub fn new(keys: usize, stream: u64) -> KeySet {
        KeySet {
            index: HashTable::with_capacity(keys),
            slots: Vec::with_capacity(keys),
            keys: Vec::new(),
            free: Vec::new(),
            others: HashMap::new(),
            key_bytes: 0,
            held: 0,
            consumer: Consumer::None,
            noted: VecDeque::new(),
            gone: Vec::new(),
            epoch: 1,
            void_epoch: 1,
            stream,
            sequence: 0,
        }
    }

    /// Number of keys held; the number of holders does not count.
    pub fn len(&self) -> usize {
        self.held
    }

    /// Whether no key is held.
    pub fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Keys with changes that no message has published yet. They stay in memory until then.
    pub fn unpublished(&self) -> usize {
        self.noted.len()
    }

    /// Length of each key, bytes; 0 before the first.
    pub fn key_bytes(&self) -> usize {
        self.key_bytes
    }

    /// Whether some holder holds the key.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.find(key)
            .is_some_and(|slot| self.slots[slot as usize].holders > 0)
    }

    /// The keys held, in no particular order. Costs O(keys).
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let slots = self.slots.iter().enumerate();
        slots
            .filter(|(_, slot)| slot.holders > 0)
            .map(|(at, _)| self.key(to_u32(at)))
    }

    /// Applies changes in order, up to the first that is rejected.
    ///
    /// # Errors
    ///
    /// As [`KeySet::change`].
    pub fn apply<'a>(
        &mut self,
        changes: impl IntoIterator<Item = (&'a [u8], Change)>,
    ) -> Result<(), KeyError> {
        changes
            .into_iter()
            .try_for_each(|(key, change)| self.change(key, change))
    }

    /// Applies one change. Adding a held key and removing an absent one have no effect.
    ///
    /// # Errors
    ///
    /// [`KeyError::Length`] if the key's length differs from that of the others, [`KeyError::Size`] if
    /// the first key has an invalid length. The set is unchanged.
    #[inline]
    pub fn change(&mut self, key: &[u8], change: Change) -> Result<(), KeyError> {
        if key.len() != self.key_bytes || key.is_empty() {
            self.set_key_bytes(key.len())?;
        }
        match change {
            Change::Add(holder) => self.add(key, holder),
            Change::Remove(holder) => self.remove(key, holder),
        }
        Ok(())
    }

    #[cold]
    fn set_key_bytes(&mut self, got: usize) -> Result<(), KeyError> {
        if got == 0 || got > usize::from(u16::MAX) {
            return Err(KeyError::Size { got });
        }
        if self.key_bytes != 0 {
            let want = self.key_bytes;
            return Err(KeyError::Length { want, got });
        }
        self.key_bytes = got;
        self.keys.reserve(self.slots.capacity() * got);
        Ok(())
    }

    fn add(&mut self, key: &[u8], holder: u32) {
        let KeySet {
            index,
            slots,
            keys,
            free,
            key_bytes,
            ..
        } = self;
        let (bytes, digest) = (*key_bytes, digest(key).0);
        let entry = index.entry(
            digest,
            |&at| slots[at as usize].digest == digest && key_at(keys, at, bytes) == key,
            |&at| slots[at as usize].digest,
        );
        let at = match entry {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                let at = if let Some(at) = free.pop() {
                    let range = at as usize * bytes..(at as usize + 1) * bytes;
                    keys[range].copy_from_slice(key);
                    at
                } else {
                    keys.extend_from_slice(key);
                    u32::try_from(slots.len()).expect("below 2^32 keys")
                };
                entry.insert(at);
                let fresh = Slot {
                    digest,
                    first: 0,
                    holders: 0,
                    published: 0,
                    noted: false,
                };
                match slots.get_mut(at as usize) {
                    Some(slot) => {
                        *slot = Slot {
                            noted: slot.noted,
                            ..fresh
                        }
                    }
                    None => slots.push(fresh),
                }
                at
            }
        };
        let slot = &mut self.slots[at as usize];
        if slot.holders == 0 {
            (slot.first, slot.holders) = (holder, 1);
            self.held += 1;
            self.note(at);
        } else if slot.first != holder {
            let others = self.others.entry(at).or_default();
            if !others.contains(&holder) {
                others.push(holder);
                slot.holders += 1;
            }
        }
    }

    fn remove(&mut self, key: &[u8], holder: u32) {
        let Some(at) = self.find(key) else { return };
        let slot = &mut self.slots[at as usize];
        match slot.holders {
            1 if slot.first == holder => {}
            0 | 1 => return,
            _ => {
                let others = self.others.get_mut(&at).expect("more than one holder");
                if slot.first == holder {
                    slot.first = others.pop().expect("as many as counted");
                } else if let Some(place) = others.iter().position(|&other| other == holder) {
                    others.swap_remove(place);
                } else {
                    return;
                }
                slot.holders -= 1;
                if others.is_empty() {
                    self.others.remove(&at);
                }
                return;
            }
        }
        slot.holders = 0;
        self.held -= 1;
        if slot.published >= self.void_epoch && self.consumer != Consumer::None {
            self.note(at);
        } else {
            self.release(at); // never published
        }
    }

    fn find(&self, key: &[u8]) -> Option<u32> {
        if key.len() != self.key_bytes {
            return None;
        }
        let digest = digest(key).0;
        self.index
            .find(digest, |&at| {
                self.slots[at as usize].digest == digest && self.key(at) == key
            })
            .copied()
    }

    #[inline]
    fn key(&self, at: u32) -> &[u8] {
        key_at(&self.keys, at, self.key_bytes)
    }

    fn note(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        if self.consumer != Consumer::None && !slot.noted {
            slot.noted = true;
            self.noted.push_back(at);
        }
    }

    fn release(&mut self, at: u32) {
        let digest = self.slots[at as usize].digest;
        let found = self.index.find_entry(digest, |&other| other == at);
        found.expect("a slot in use is indexed").remove();
        self.slots[at as usize].published = 0;
        self.free.push(at);
    }

    /// Removes all keys: the pool was flushed. Consumers get an empty snapshot.
    pub fn clear(&mut self) {
        self.index.clear();
        self.slots.clear();
        self.keys.clear();
        self.free.clear();
        self.others.clear();
        self.noted.clear();
        self.held = 0;
        if self.consumer != Consumer::None {
            self.begin_snapshot(false);
        }
    }

    /// Starts or stops publication; the first messages are a snapshot. Without consumers, no change is
    /// recorded.
    pub fn set_consumed(&mut self, consumed: bool) {
        match (consumed, self.consumer) {
            (true, Consumer::None) => self.begin_snapshot(false),
            (false, Consumer::Following | Consumer::Snapshot { .. }) => {
                self.settle();
                self.consumer = Consumer::None;
            }
            _ => {}
        }
    }

    /// Starts a new snapshot: a receiver is new, or saw a gap. Receivers that have all keys apply its
    /// messages as deltas and discard nothing. Does nothing without a consumer.
    pub fn request_snapshot(&mut self) {
        match self.consumer {
            // No consumer, or a snapshot that has not begun.
            Consumer::None | Consumer::Snapshot { begun: false, .. } => {}
            _ => self.begin_snapshot(true),
        }
    }

    fn begin_snapshot(&mut self, repeats: bool) {
        self.epoch = self.epoch.checked_add(1).expect("2^32 snapshots");
        if !repeats {
            self.void_epoch = self.epoch;
        }
        self.consumer = Consumer::Snapshot {
            next: 0,
            begun: false,
        };
    }

    /// Discards recorded changes, because there is no consumer. Costs the changes since the last message.
    fn settle(&mut self) {
        while let Some(at) = self.noted.pop_front() {
            let slot = &mut self.slots[at as usize];
            slot.noted = false;
            if slot.holders == 0 && slot.published >= self.void_epoch {
                self.release(at);
            }
        }
    }

    /// Appends the next message to `out`: the changes since the last one, and part of a snapshot if one
    /// is in progress. Returns `false` if there is no change, or no consumer.
    ///
    /// A message has at most `2 * keys_max` keys: `keys_max` changes, and as many of the snapshot.
    /// Further changes are in the next message; call again.
    pub fn message_into(&mut self, keys_max: usize, out: &mut Vec<u8>) -> bool {
        let keys_max = keys_max.max(1);
        let mut message = KeyMessage::without_keys(self.stream, self.sequence + 1, self.key_bytes);
        if self.consumer == Consumer::None
            || (self.consumer == Consumer::Following && self.noted.is_empty())
        {
            return false;
        }
        let mut writer = Writer::new(out);
        let mut added = 0;
        let snapshot = matches!(self.consumer, Consumer::Snapshot { .. });
        if let Consumer::Snapshot { next, begun } = self.consumer {
            message.begins = !begun;
            message.repeats = !begun && self.epoch != self.void_epoch;
            // Slots that are empty or already published count towards the limit: they take time, too.
            let end = self.slots.len().min(next + keys_max);
            for (at, slot) in (next..end).zip(&mut self.slots[next..end]) {
                if slot.holders > 0 && slot.published != self.epoch {
                    slot.published = self.epoch;
                    writer.key(key_at(&self.keys, to_u32(at), self.key_bytes));
                    added += 1;
                }
            }
            self.consumer = if end == self.slots.len() {
                Consumer::Following
            } else {
                Consumer::Snapshot {
                    next: end,
                    begun: true,
                }
            };
        }
        // Added keys come first in a message, so the removed ones wait for a second pass.
        let mut gone = std::mem::take(&mut self.gone);
        loop {
            for _ in 0..self.noted.len().min(keys_max) {
                let at = self.noted.pop_front().expect("as many as counted");
                let slot = &mut self.slots[at as usize];
                slot.noted = false;
                if slot.holders > 0 && slot.published != self.epoch {
                    slot.published = self.epoch;
                    writer.key(key_at(&self.keys, at, self.key_bytes));
                    added += 1;
                } else if slot.holders == 0 && slot.published >= self.void_epoch {
                    gone.push(at);
                }
                // Otherwise the key was added and removed again, or removed and added again.
            }
            // Changes that undo each other are no message, but others may follow them.
            if snapshot || added > 0 || !gone.is_empty() || self.noted.is_empty() {
                break;
            }
        }
        for &at in &gone {
            writer.key(key_at(&self.keys, at, self.key_bytes));
            self.release(at);
        }
        let removed = to_u32(gone.len());
        gone.clear();
        self.gone = gone;
        // A snapshot message without keys is still sent: its begin and end flags matter.
        if !snapshot && added + removed == 0 {
            writer.cancel();
            return false;
        }
        message.ends = self.consumer == Consumer::Following;
        self.sequence += 1;
        writer.finish(&message, added, removed);
        true
    }

    /// Same as [`KeySet::message_into`], into a new buffer.
    pub fn message(&mut self, keys_max: usize) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        self.message_into(keys_max, &mut out).then_some(out)
    }
}

#[inline]
fn key_at(keys: &[u8], at: u32, key_bytes: usize) -> &[u8] {
    &keys[at as usize * key_bytes..][..key_bytes]
}
