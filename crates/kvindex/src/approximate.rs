//! The approximate index: what was routed to a target is believed cached there for a while.

use std::sync::{Mutex, PoisonError};

use lru::LruCache;
use slipstream_base::{BlockHash, SimTime};

/// Believes that a block is cached where it was last routed, until `ttl` has passed or as many
/// younger blocks as the target's KV cache holds were routed there.
pub struct ApproximateIndex {
    ttl_ns: u64,
    targets: Box<[Mutex<LruCache<BlockHash, SimTime>>]>,
}

impl ApproximateIndex {
    /// An empty index; `kv_blocks` is the size of each target's KV cache, `ttl_ns` how long a block
    /// is believed to stay.
    pub fn new(kv_blocks: &[u32], ttl_ns: u64) -> ApproximateIndex {
        ApproximateIndex {
            ttl_ns,
            targets: kv_blocks
                .iter()
                .map(|&blocks| {
                    let capacity = std::num::NonZeroUsize::new(blocks as usize)
                        .unwrap_or(std::num::NonZeroUsize::MIN);
                    Mutex::new(LruCache::new(capacity))
                })
                .collect(),
        }
    }

    /// `blocks` were routed to `target` at `now`.
    pub fn on_routed(&self, now: SimTime, target: usize, blocks: &[BlockHash]) {
        let mut held = self.targets[target]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // The head of a chain is touched last, so that its tail is the first to be forgotten, as
        // engines do.
        for &hash in blocks.iter().rev() {
            held.put(hash, now + self.ttl_ns);
        }
    }

    /// For each target, how many leading `blocks` are believed cached. Shape of `out`: `[T]`.
    pub fn overlap(&self, now: SimTime, blocks: &[BlockHash], out: &mut [u32]) {
        for (target, hit) in out.iter_mut().enumerate() {
            *hit = self.overlap_of(now, target, blocks);
        }
    }

    /// How many leading `blocks` are believed cached at `target`.
    pub fn overlap_of(&self, now: SimTime, target: usize, blocks: &[BlockHash]) -> u32 {
        let held = self.targets[target]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        blocks
            .iter()
            .take_while(|hash| held.peek(hash).is_some_and(|until| *until > now))
            .count() as u32
    }

    /// Blocks believed cached at `target`.
    pub fn held(&self, target: usize) -> u64 {
        self.targets[target]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len() as u64
    }

    /// Forgets all that was routed to `target`.
    pub fn forget(&self, target: usize) {
        self.targets[target]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }
}
