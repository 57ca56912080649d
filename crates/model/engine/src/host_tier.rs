//! KV blocks below the GPU's cache, in host memory and on a disk: which are there, and when loads of them end.

use std::collections::VecDeque;

use lru::LruCache;
use slipstream_base::{BlockHash, KvOp, SimTime};
use slipstream_config::cluster::{DiskTierConfig, HostTierConfig};

/// The host memory of one rank. Every block that the GPU caches is copied to it; blocks that were used least
/// recently make room. Loads share one link to the GPU, one after the other.
///
/// Source: vLLM, `OffloadingConnector` (`vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py`)
/// and its LRU manager, and the host tier of `slipstream-kvstore`, whose evictions a test compares.
pub struct HostTier {
    config: HostTierConfig,
    blocks: LruCache<BlockHash, ()>,
    disk: Option<DiskTier>,
    /// End of the last load.
    busy_until: SimTime,
    /// Loads under way, in the order of their ends.
    loads: VecDeque<HostLoad>,
    /// Blocks stored and evicted in memory since they were last taken, if others fetch from it.
    changes: Option<Vec<KvOp>>,
}

/// A load under way.
struct HostLoad {
    slot: u32,
    due: SimTime,
}

/// A place of blocks below the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Host memory.
    Host,
    /// The disk below it.
    Disk,
}

/// The blocks of a load, by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FoundBelow {
    /// All of them.
    pub(crate) blocks: u32,
    /// Those that host memory lacks.
    pub(crate) on_disk: u32,
}

impl HostTier {
    /// An empty tier.
    pub fn new(config: HostTierConfig) -> HostTier {
        HostTier {
            config,
            blocks: LruCache::unbounded(),
            disk: None,
            busy_until: SimTime::ZERO,
            loads: VecDeque::new(),
            changes: None,
        }
    }

    /// The same, with a disk for the blocks that it evicts.
    #[must_use]
    pub fn with_disk(self, config: DiskTierConfig) -> HostTier {
        HostTier {
            disk: Some(DiskTier::new(config)),
            ..self
        }
    }

    /// Stores a block, or notes that it was used.
    pub fn put(&mut self, hash: BlockHash) {
        if self.blocks.put(hash, ()).is_some() {
            return;
        }
        if let Some(changes) = &mut self.changes {
            let parent = BlockHash(0); // not needed
            changes.push(KvOp::Stored { hash, parent });
        }
        if self.blocks.len() as u64 > self.config.blocks
            && let Some((evicted, ())) = self.blocks.pop_lru()
        {
            if let Some(changes) = &mut self.changes {
                changes.push(KvOp::Removed { hash: evicted });
            }
            if let Some(disk) = &mut self.disk {
                disk.put(evicted);
            }
        }
    }

    /// From now on lists the changes of memory.
    pub(crate) fn list_changes(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// Moves the changes to the end of `out`.
    pub(crate) fn take_changes(&mut self, out: &mut Vec<KvOp>) {
        if let Some(changes) = &mut self.changes {
            out.append(changes);
        }
    }

    /// Whether memory has a block, which does not count as used.
    pub(crate) fn holds(&self, hash: BlockHash) -> bool {
        self.blocks.contains(&hash)
    }

    /// Whether the tier has a block. One that it has counts as used.
    pub fn has(&mut self, hash: BlockHash) -> bool {
        self.blocks.get(&hash).is_some()
    }

    /// Where a block is, host memory first. One that is found counts as used there.
    pub fn find(&mut self, hash: BlockHash) -> Option<Medium> {
        if self.has(hash) {
            return Some(Medium::Host);
        }
        let on_disk = self.disk.as_mut().is_some_and(|disk| disk.has(hash));
        on_disk.then_some(Medium::Disk)
    }

    /// Blocks stored.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The disk below it, if there is one.
    pub fn disk(&self) -> Option<&DiskTier> {
        self.disk.as_ref()
    }

    /// A pass begins at `now`: blocks that are evicted in it are written from then on.
    pub(crate) fn begin_pass(&mut self, now: SimTime) {
        if let Some(disk) = &mut self.disk {
            disk.now = now;
        }
    }

    /// Begins to load blocks for the sequence in `slot`.
    pub(crate) fn load(&mut self, now: SimTime, slot: u32, found: FoundBelow) {
        let due = self.loaded_at(now, found);
        self.loads.push_back(HostLoad { slot, due });
    }

    /// Begins to load blocks, and returns when that ends.
    pub(crate) fn loaded_at(&mut self, now: SimTime, found: FoundBelow) -> SimTime {
        let copy_ns = self.config.load_ns_per_block;
        // Latencies overlap with the copies before.
        let begin = (now + self.config.latency_ns).max(self.busy_until);
        let mut due = begin + u64::from(found.blocks) * copy_ns;
        if let Some(disk) = self.disk.as_mut().filter(|_| found.on_disk > 0) {
            let (first, last) = disk.read(now, found.on_disk);
            // Each block is copied once it was read, and the one before it was copied: the first or the last read decides.
            let copies = u64::from(found.on_disk) * copy_ns;
            due = due.max(first + copies).max(last + copy_ns);
        }
        self.busy_until = due;
        due
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

    /// Loses all blocks in memory, and loads. The disk keeps its blocks, and writes none that were lost.
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.loads.clear();
        if let Some(changes) = &mut self.changes {
            changes.clear();
        }
        self.busy_until = SimTime::ZERO;
        if let Some(disk) = &mut self.disk {
            disk.restart();
        }
    }
}

/// The disk of one rank, below its host memory: blocks that memory evicts are written to it, and blocks that were
/// used least recently make room. Reads follow each other, and so do writes; one does not delay the other.
///
/// Source: the disk tier of `slipstream-kvstore`, whose evictions a test compares, and the limit of its queue.
pub struct DiskTier {
    config: DiskTierConfig,
    blocks: LruCache<BlockHash, ()>,
    /// When the pass under way began.
    now: SimTime,
    /// End of the last read, and of the last write.
    read_until: SimTime,
    written_until: SimTime,
    dropped: u64,
}

/// Most blocks that wait to be written, as in the KV store (`WRITES_MAX` in `crates/kv/kvstore/src/store/work.rs`).
const WRITES_MAX: u64 = 4_096;

impl DiskTier {
    fn new(config: DiskTierConfig) -> DiskTier {
        DiskTier {
            config,
            blocks: LruCache::unbounded(),
            now: SimTime::ZERO,
            read_until: SimTime::ZERO,
            written_until: SimTime::ZERO,
            dropped: 0,
        }
    }

    /// Writes a block, or notes that it was used. It is dropped if too many wait.
    fn put(&mut self, hash: BlockHash) {
        if self.blocks.get(&hash).is_some() {
            return;
        }
        let begin = self.written_until.max(self.now);
        if begin.since(self.now) >= WRITES_MAX * self.config.store_ns_per_block.max(1) {
            self.dropped += 1;
            return;
        }
        self.written_until = begin + self.config.store_ns_per_block;
        self.blocks.put(hash, ());
        if self.blocks.len() as u64 > self.config.blocks {
            self.blocks.pop_lru();
        }
    }

    fn has(&mut self, hash: BlockHash) -> bool {
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

    /// Blocks that were not written, because too many waited.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Reads `blocks`, at least one: returns when the first and the last have been read.
    fn read(&mut self, now: SimTime, blocks: u32) -> (SimTime, SimTime) {
        let begin = (now + self.config.latency_ns).max(self.read_until);
        let each = self.config.load_ns_per_block;
        self.read_until = begin + u64::from(blocks) * each;
        (begin + each, self.read_until)
    }

    fn restart(&mut self) {
        self.read_until = SimTime::ZERO;
        self.written_until = SimTime::ZERO;
    }
}
