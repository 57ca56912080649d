//! Bookkeeping that all tiers share: entries by last use, their expiry, and changes.

use std::collections::VecDeque;

use lru::LruCache;
use slipstream_base::SimTime;

use crate::tier::{TierChange, TierStats};

/// Changes kept for a consumer; one that falls further behind starts over with all keys.
const CHANGES_MAX: usize = 1 << 16;

/// Entries of a tier. `V` is where the bytes are stored.
pub(crate) struct Ledger<V> {
    entries: LruCache<Box<[u8]>, Entry<V>>,
    ttl_ns: Option<u64>,
    /// Expiry times in order, with the stamp of the entry that was put then.
    due: VecDeque<(SimTime, u64, Box<[u8]>)>,
    stamp: u64,
    changes: Vec<TierChange>,
    changes_lost: bool,
    pub(crate) stats: TierStats,
}

/// The former contents of a cleared ledger.
pub(crate) struct Cleared<V> {
    entries: LruCache<Box<[u8]>, Entry<V>>,
    _due: VecDeque<(SimTime, u64, Box<[u8]>)>,
    _changes: Vec<TierChange>,
}

impl<V> Cleared<V> {
    /// Removes one value.
    pub(crate) fn pop(&mut self) -> Option<V> {
        self.entries.pop_lru().map(|(_, entry)| entry.value)
    }
}

struct Entry<V> {
    value: V,
    bytes: u64,
    until: SimTime,
    stamp: u64,
}

/// Why an entry is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    Evicted,
    Expired,
    Removed,
    Corrupt,
}

impl<V: Copy> Ledger<V> {
    pub(crate) fn new(ttl_ns: Option<u64>) -> Ledger<V> {
        Ledger {
            entries: LruCache::unbounded(), // bounded by the tier's bytes
            ttl_ns,
            due: VecDeque::new(),
            stamp: 0,
            changes: Vec::new(),
            changes_lost: false,
            stats: TierStats::default(),
        }
    }

    /// Inserts a key that is not present.
    pub(crate) fn insert(&mut self, key: &[u8], value: V, bytes: u64, until: SimTime) {
        self.stamp += 1;
        let entry = Entry {
            value,
            bytes,
            until,
            stamp: self.stamp,
        };
        let before = self.entries.put(key.into(), entry);
        debug_assert!(before.is_none(), "its slot would be lost");
        self.stats.blocks += 1;
        self.stats.bytes += bytes;
        self.stats.stored_total += 1;
        if until != SimTime::MAX {
            self.due.push_back((until, self.stamp, key.into()));
            self.drop_stale_due();
        }
        self.note(TierChange::Stored(key.into()));
    }

    /// Keys that were removed early leave their expiry times behind. At most half of the queue is
    /// such times.
    fn drop_stale_due(&mut self) {
        if self.due.len() > 2 * self.entries.len() + 64 {
            let entries = &self.entries;
            self.due.retain(|(_, stamp, key)| {
                entries
                    .peek(&key[..])
                    .is_some_and(|entry| entry.stamp == *stamp)
            });
        }
    }

    /// Returns the entry if it has not expired, and makes it the most recently used.
    pub(crate) fn touch(&mut self, now: SimTime, key: &[u8]) -> Option<V> {
        let entry = self.entries.get(key)?;
        (entry.until > now).then_some(entry.value)
    }

    pub(crate) fn peek(&self, now: SimTime, key: &[u8]) -> Option<V> {
        let entry = self.entries.peek(key)?;
        (entry.until > now).then_some(entry.value)
    }

    pub(crate) fn remove(&mut self, key: &[u8], why: Removal) -> Option<V> {
        let entry = self.entries.pop(key)?;
        self.stats.blocks -= 1;
        self.stats.bytes -= entry.bytes;
        match why {
            Removal::Evicted => self.stats.evicted_total += 1,
            Removal::Expired => self.stats.expired_total += 1,
            Removal::Corrupt => self.stats.corrupt_total += 1,
            Removal::Removed => {}
        }
        self.note(TierChange::Removed(key.into()));
        Some(entry.value)
    }

    /// Returns the least recently used of the first few entries that satisfy `may`.
    pub(crate) fn oldest(&self, mut may: impl FnMut(&V) -> bool) -> Option<Box<[u8]>> {
        /// Pinned blocks are few: those that peers are reading now.
        const SCANNED_MAX: usize = 1024;
        let mut entries = self.entries.iter().rev().take(SCANNED_MAX);
        entries
            .find(|(_, entry)| may(&entry.value))
            .map(|(key, _)| key.clone())
    }

    /// Returns a key that has expired.
    pub(crate) fn pop_due(&mut self, now: SimTime) -> Option<Box<[u8]>> {
        while let Some((until, ..)) = self.due.front()
            && *until <= now
        {
            let (_, stamp, key) = self.due.pop_front().expect("front() returned Some");
            let entry = self.entries.peek(&key[..]);
            if entry.is_some_and(|entry| entry.stamp == stamp) {
                return Some(key);
            }
        }
        None
    }

    pub(crate) fn until(&self, now: SimTime) -> SimTime {
        self.ttl_ns.map_or(SimTime::MAX, |ttl| now + ttl)
    }

    /// Removes all entries in O(1). The returned value is slow to drop; any thread may drop it.
    #[must_use]
    pub(crate) fn clear(&mut self) -> Cleared<V> {
        self.changes_lost |= !(self.entries.is_empty() && self.changes.is_empty());
        self.stats.blocks = 0;
        self.stats.bytes = 0;
        Cleared {
            entries: std::mem::replace(&mut self.entries, LruCache::unbounded()),
            _due: std::mem::take(&mut self.due),
            _changes: std::mem::take(&mut self.changes),
        }
    }

    pub(crate) fn keys(&self) -> Vec<Box<[u8]>> {
        self.entries.iter().map(|(key, _)| key.clone()).collect()
    }

    fn note(&mut self, change: TierChange) {
        if self.changes.len() == CHANGES_MAX {
            self.changes.clear();
            self.changes_lost = true;
        }
        self.changes.push(change);
    }

    /// See [`crate::Tier::take_changes`].
    pub(crate) fn take_changes(&mut self, out: &mut Vec<TierChange>) -> bool {
        out.append(&mut self.changes);
        !std::mem::take(&mut self.changes_lost)
    }
}
