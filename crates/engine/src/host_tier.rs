//! KV blocks in host memory, below the GPU's cache: which are there, and when loads of them end.

use std::collections::VecDeque;

use lru::LruCache;
use slipstream_base::{BlockHash, SimTime};
use slipstream_config::cluster::HostTierConfig;

/// The host memory of one rank. Every block that the GPU caches is copied to it; blocks that were used least
/// recently make room. Loads share one link to the GPU, one after the other.
///
/// Source: vLLM, `OffloadingConnector` (`vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py`)
/// and its LRU manager, and the host tier of `slipstream-kvstore`, whose evictions a test compares.
pub struct HostTier {
    config: HostTierConfig,
    blocks: LruCache<BlockHash, ()>,
    /// End of the last load.
    busy_until: SimTime,
    /// Loads under way, in the order of their ends.
    loads: VecDeque<HostLoad>,
}

/// A load under way.
struct HostLoad {
    slot: u32,
    due: SimTime,
}

impl HostTier {
    /// An empty tier.
    pub fn new(config: HostTierConfig) -> HostTier {
        HostTier {
            config,
            blocks: LruCache::unbounded(),
            busy_until: SimTime::ZERO,
            loads: VecDeque::new(),
        }
    }

    /// Stores a block, or notes that it was used.
    pub fn put(&mut self, hash: BlockHash) {
        if self.blocks.put(hash, ()).is_none() && self.blocks.len() as u64 > self.config.blocks {
            self.blocks.pop_lru();
        }
    }

    /// Whether the tier has a block. One that it has counts as used.
    pub fn has(&mut self, hash: BlockHash) -> bool {
        self.blocks.get(&hash).is_some()
    }

    /// Blocks stored.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Begins to load `blocks` for the sequence in `slot`.
    pub(crate) fn load(&mut self, now: SimTime, slot: u32, blocks: u32) {
        let copy_ns = u64::from(blocks) * self.config.load_ns_per_block;
        // Latencies overlap with the copies before.
        let due = (now + self.config.latency_ns).max(self.busy_until) + copy_ns;
        self.busy_until = due;
        self.loads.push_back(HostLoad { slot, due });
    }

    /// The sequence of the next load that has ended by `now`.
    pub(crate) fn next_loaded(&mut self, now: SimTime) -> Option<u32> {
        self.loads.front().filter(|load| load.due <= now)?;
        self.loads.pop_front().map(|load| load.slot)
    }

    /// End of the next load.
    pub(crate) fn next_due(&self) -> Option<SimTime> {
        self.loads.front().map(|load| load.due)
    }

    /// Forgets the load of a sequence that left. The link stays busy with it.
    pub(crate) fn forget(&mut self, slot: u32) {
        self.loads.retain(|load| load.slot != slot);
    }

    /// Loses all blocks and loads.
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.loads.clear();
        self.busy_until = SimTime::ZERO;
    }
}
