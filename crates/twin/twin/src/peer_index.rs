//! Index of the blocks that workers may fetch from each other.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slipstream_base::{BlockHash, KvDelta, SimTime};
use slipstream_engine::{FoundAtPeer, PeerBlocks};
use slipstream_kvindex::BlockIndex;

use crate::node::Node;

/// Blocks of all ranks, by the events that have arrived: those in host memory, which has copies of those on the GPUs; of
/// ranks without it those on the GPUs.
pub(crate) struct PeerIndex {
    index: BlockIndex,
    /// Changes that have not arrived, by their arrival.
    late: Mutex<BTreeMap<(SimTime, u64), (u32, KvDelta)>>,
    lag_ns: u64,
    /// Ranks with host memory.
    hosts: Box<[bool]>,
    /// Number of the next change of each rank's host memory.
    host_sequences: Mutex<Vec<u64>>,
}

impl PeerIndex {
    /// Of `nodes`, with `blocks` blocks together; their events arrive `lag_ns` late.
    pub(crate) fn new(nodes: &[Node], blocks: usize, lag_ns: u64) -> PeerIndex {
        let index = BlockIndex::new(nodes.len(), blocks);
        index.promise_single_writer();
        PeerIndex {
            index,
            late: Mutex::default(),
            lag_ns,
            hosts: nodes.iter().map(|n| n.engine.has_host_tier()).collect(),
            host_sequences: Mutex::new(vec![0; nodes.len()]),
        }
    }

    fn late(&self) -> MutexGuard<'_, BTreeMap<(SimTime, u64), (u32, KvDelta)>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPUs' cache of `node` changed at `at`.
    pub(crate) fn on_kv(&self, at: SimTime, node: u32, delta: &KvDelta) {
        if !self.hosts[node as usize] {
            self.insert(at, node, delta);
        }
    }

    pub(crate) fn insert(&self, at: SimTime, node: u32, delta: &KvDelta) {
        let mut late = self.late();
        // In the order of arrivals; at equal times in that of their ranks.
        let order = u64::from(node) << 40 | delta.sequence & ((1 << 40) - 1);
        late.insert((at + self.lag_ns, order), (node, delta.clone()));
    }

    /// A rank lost its cache.
    pub(crate) fn forget(&self, node: u32) {
        self.late().retain(|_, (of, _)| *of != node);
        self.index.forget(node as usize);
        self.host_sequences()[node as usize] = 0;
    }

    fn host_sequences(&self) -> MutexGuard<'_, Vec<u64>> {
        let sequences = self.host_sequences.lock();
        sequences.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn next_of_host(&self, node: u32) -> u64 {
        let next = &mut self.host_sequences()[node as usize];
        *next += 1;
        *next - 1
    }

    fn apply_before(&self, limit: SimTime) {
        let mut late = self.late();
        while let Some(entry) = late.first_entry()
            && entry.key().0 < limit
        {
            let (node, delta) = entry.remove();
            self.index.apply(node as usize, &delta);
        }
    }
}

/// The look-up of one rank.
pub(crate) struct RankLookup {
    pub(crate) index: Arc<PeerIndex>,
    pub(crate) node: u32,
    /// Ranks of its pool.
    pub(crate) pool: Range<u32>,
}

impl PeerBlocks for RankLookup {
    fn find(&self, now: SimTime, blocks: &[BlockHash], have: u32) -> Option<FoundAtPeer> {
        self.index.apply_before(now + 1);
        let mut hits = vec![0; self.index.index.targets()];
        self.index.index.overlap(blocks, &mut hits);
        let mut best = None;
        let mut most = have;
        // From the next rank on, so that equal ones are asked by turns.
        for peer in (self.node + 1..self.pool.end).chain(self.pool.start..self.node) {
            let blocks = hits[peer as usize];
            if blocks > most {
                most = blocks;
                best = Some(FoundAtPeer { peer, blocks });
            }
        }
        best
    }
}
