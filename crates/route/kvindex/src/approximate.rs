//! The approximate index: blocks routed to a target are assumed cached there for a while.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use lru::LruCache;
use slipstream_base::sync::lock;
use slipstream_base::{BlockHash, SimTime};

use crate::owners::{Owners, Padded};

/// Assumes that a block is cached on the target that it was last routed to. The assumption ends when a
/// time to live has passed, or when as many younger blocks as the target's KV cache holds were routed there.
///
/// For engines that send no KV events. Readers take no lock, except to remove expired blocks.
pub struct ApproximateIndex {
    ttl_ns: u64,
    owners: Owners,
    recent: Box<[Padded<Mutex<Recent>>]>,
    /// Expiry time of the oldest block of each target; `u64::MAX` without one. Packed, because it is read
    /// for each prompt.
    due: Box<[AtomicU64]>,
    dropped: AtomicU64,
}

/// Blocks routed to a target, oldest first, with their expiry times.
struct Recent {
    until: LruCache<BlockHash, SimTime>,
    kv_blocks: usize,
}

impl ApproximateIndex {
    /// An empty index. `kv_blocks` is the size of each target's KV cache (0: it never reuses a
    /// block), `ttl_ns` the time for which a block is assumed cached.
    pub fn new(kv_blocks: &[u32], ttl_ns: u64) -> ApproximateIndex {
        let total = kv_blocks.iter().map(|&blocks| blocks as usize).sum();
        let recent = |&blocks: &u32| {
            Padded(Mutex::new(Recent {
                until: LruCache::unbounded(), // bounded by `kv_blocks`, but not allocated ahead
                kv_blocks: blocks as usize,
            }))
        };
        ApproximateIndex {
            ttl_ns,
            owners: Owners::new(kv_blocks.len(), total),
            recent: kv_blocks.iter().map(recent).collect(),
            due: kv_blocks.iter().map(|_| AtomicU64::new(u64::MAX)).collect(),
            dropped: AtomicU64::new(0),
        }
    }

    /// Records that `blocks` were routed to `target` at `now`.
    pub fn on_routed(&self, now: SimTime, target: usize, blocks: &[BlockHash]) {
        self.with_recent(target, |recent| {
            let blocks = &blocks[..blocks.len().min(recent.kv_blocks)];
            // From the end, so that a chain's end is the oldest and is evicted first, as in an engine.
            for &hash in blocks.iter().rev() {
                if recent.until.put(hash, now + self.ttl_ns).is_some() {
                    continue;
                }
                // Evict before the insertion, because the index is exactly as large as the caches.
                if recent.until.len() > recent.kv_blocks {
                    let oldest = recent.until.pop_lru();
                    let (hash, _) = oldest.expect("it holds at least the newcomer");
                    self.owners.remove(hash, target);
                }
                if self.owners.insert(hash, target).is_err() {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }

    /// For each target, the number of leading `blocks` that are assumed cached. Shape of `out`: `[T]`.
    ///
    /// # Panics
    /// If the length of `out` is not the number of targets.
    pub fn overlap(&self, now: SimTime, blocks: &[BlockHash], out: &mut [u32]) {
        for target in 0..self.due.len() {
            self.forget_due(now, target);
        }
        self.owners.overlap(blocks, out, |_| u64::MAX);
    }

    /// The number of leading `blocks` that are assumed cached at `target`.
    pub fn overlap_of(&self, now: SimTime, target: usize, blocks: &[BlockHash]) -> u32 {
        self.forget_due(now, target);
        self.owners.overlap_of(target, blocks)
    }

    /// Blocks assumed cached at `target`. Some may have expired.
    pub fn held(&self, target: usize) -> u64 {
        let recent = &self.recent[target].0;
        let recent = lock(recent);
        recent.until.len() as u64
    }

    /// Blocks that found no room in the index since its creation. They count as not cached.
    pub fn dropped_total(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Removes all blocks of `target`.
    pub fn forget(&self, target: usize) {
        self.with_recent(target, |recent| {
            while let Some((hash, _)) = recent.until.pop_lru() {
                self.owners.remove(hash, target);
            }
        });
    }

    /// Removes expired blocks. Each block is removed once, so the cost depends on routed blocks, not on
    /// held ones.
    fn forget_due(&self, now: SimTime, target: usize) {
        if self.due[target].load(Ordering::Relaxed) > now.0 {
            return;
        }
        self.with_recent(target, |recent| {
            while let Some((&hash, &until)) = recent.until.peek_lru()
                && until <= now
            {
                recent.until.pop_lru();
                self.owners.remove(hash, target);
            }
        });
    }

    fn with_recent(&self, target: usize, change: impl FnOnce(&mut Recent)) {
        let recent = &self.recent[target].0;
        let mut recent = lock(recent);
        change(&mut recent);
        let due = recent
            .until
            .peek_lru()
            .map_or(u64::MAX, |(_, until)| until.0);
        self.due[target].store(due, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use slipstream_base::mix::draw;

    use super::*;

    fn chain(seed: u64, len: u64) -> Vec<BlockHash> {
        (0..len).map(|n| BlockHash(draw(seed, n))).collect()
    }

    fn overlap(index: &ApproximateIndex, now: u64, blocks: &[BlockHash]) -> Vec<u32> {
        let mut out = vec![u32::MAX; index.due.len()];
        index.overlap(SimTime(now), blocks, &mut out);
        for (target, &hit) in out.iter().enumerate() {
            assert_eq!(index.overlap_of(SimTime(now), target, blocks), hit);
        }
        out
    }

    #[test]
    fn what_was_routed_is_believed_until_its_time() {
        let index = ApproximateIndex::new(&[100, 100], 50);
        let a = chain(1, 20);
        index.on_routed(SimTime(0), 1, &a);
        assert_eq!(overlap(&index, 49, &a), [0, 20]);
        // The first half is routed again, so its time to live starts again.
        index.on_routed(SimTime(30), 1, &a[..10]);
        assert_eq!(overlap(&index, 50, &a), [0, 10]);
        assert_eq!(index.held(1), 10);
        assert_eq!(overlap(&index, 80, &a), [0, 0]);
        assert_eq!(index.held(1), 0);
    }

    #[test]
    fn no_more_is_believed_than_the_cache_holds() {
        let index = ApproximateIndex::new(&[30, 0], 1_000);
        let (a, b) = (chain(1, 20), chain(2, 20));
        index.on_routed(SimTime(0), 0, &a);
        index.on_routed(SimTime(1), 0, &b);
        // The end of the older chain was evicted.
        assert_eq!(overlap(&index, 2, &a), [10, 0]);
        assert_eq!(overlap(&index, 2, &b), [20, 0]);
        index.on_routed(SimTime(3), 0, &chain(3, 100));
        assert_eq!(index.held(0), 30);
        // A target that reuses nothing never counts as holding a block.
        index.on_routed(SimTime(4), 1, &a);
        assert_eq!(overlap(&index, 4, &a)[1], 0);
        index.forget(0);
        assert_eq!((index.held(0), index.dropped_total()), (0, 0));
    }
}
