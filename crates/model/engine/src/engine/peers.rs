//! Blocks that other engines have: a waiting sequence fetches them instead of computing them.

use std::collections::BTreeMap;
use std::sync::Arc;

use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, KvOp, SimTime};

use super::Engine;
use super::disagg::TransferState;
use crate::host_tier::FoundBelow;

/// Look-up of blocks that other engines have.
pub trait PeerBlocks: Send + Sync {
    /// The engine that has most of the leading `blocks`, and how many, if more than `have`.
    fn find(&self, now: SimTime, blocks: &[BlockHash], have: u32) -> Option<FoundAtPeer>;
}

/// Leading blocks of a prompt at another engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundAtPeer {
    /// The engine, as the driver numbers them.
    pub peer: u32,
    /// Number of leading blocks that it has.
    pub blocks: u32,
}

/// Blocks to be fetched for a sequence, which has its own and waits: fetch them, then call
/// [`Engine::receive_from_peer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerLoad {
    /// Identifies the load at this engine.
    pub load: u64,
    /// The engine to fetch from.
    pub peer: u32,
    /// Leading blocks of the sequence, up to the last one to be fetched.
    pub blocks: Vec<BlockHash>,
    /// Those of them that this engine has.
    pub have: u32,
    /// End of the load of its own blocks from host memory or the disk; the sequence waits for both.
    pub not_before: SimTime,
}

/// State of an engine that fetches from others.
#[derive(Default)]
pub(super) struct Peers {
    blocks: Option<Arc<dyn PeerBlocks>>,
    /// Not taken yet.
    wanted: Vec<PeerLoad>,
    /// Slots of sequences that wait, by load.
    slots: BTreeMap<u64, u32>,
    loads: u64,
    pub(super) hit_tokens: u64,
}

impl Peers {
    #[inline]
    pub(super) fn are_set(&self) -> bool {
        self.blocks.is_some()
    }

    /// The engine restarts.
    pub(super) fn clear(&mut self) {
        self.wanted.clear();
        self.slots.clear();
    }

    /// A sequence that may have waited has left.
    pub(super) fn forget(&mut self, slot: u32) {
        if !self.slots.is_empty() {
            self.slots.retain(|_, waiting| *waiting != slot);
        }
    }
}

impl Engine {
    /// From now on fetches blocks that other engines have, of those that it lacks.
    pub fn set_peers(&mut self, blocks: Arc<dyn PeerBlocks>) {
        self.peers.blocks = Some(blocks);
        if let Some(tier) = self.cache.host_mut() {
            tier.list_changes();
        }
    }

    /// Moves the changes of host memory since the last call to the end of `out`, if this engine has peers. Their `parent` is not
    /// set.
    pub fn take_host_changes(&mut self, out: &mut Vec<KvOp>) {
        if let Some(tier) = self.cache.host_mut() {
            tier.take_changes(out);
        }
    }

    /// Moves the loads that began since the last call to the end of `out`. To be called after each
    /// [`begin_pass`](Engine::begin_pass), also after one that began none.
    pub fn take_peer_loads(&mut self, out: &mut Vec<PeerLoad>) {
        out.append(&mut self.peers.wanted);
    }

    /// How many of `blocks`, the leading ones of a prompt, this engine can send from the one behind `have` on: from the GPU, or
    /// from host memory.
    pub fn sends(&self, blocks: &[BlockHash], have: u32) -> u32 {
        let mut held = self.cache.pool().published_prefix(blocks);
        if let Some(tier) = self.cache.host() {
            let rest = blocks[held as usize..].iter();
            held += to_u32(rest.take_while(|&&hash| tier.holds(hash)).count());
        }
        held.saturating_sub(have)
    }

    /// A load has ended, with as many of its `blocks` as the other engine had still. The next pass may run the sequence,
    /// which computes the others. False, with nothing changed, if the engine has no such load (any more).
    pub fn receive_from_peer(&mut self, load: u64, blocks: u32) -> bool {
        let Some(slot) = self.peers.slots.remove(&load) else {
            return false;
        };
        let tokens = blocks * self.limits.block_size;
        let sequence = &mut self.sequences[slot];
        let TransferState::PeerLoading(mut hit) = sequence.transfer else {
            unreachable!("its load was under way");
        };
        hit.tokens += tokens;
        if sequence.admitted.is_none() {
            sequence.cached_tokens += tokens;
            sequence.lower.peer_tokens = tokens;
            self.peers.hit_tokens += u64::from(tokens);
        }
        sequence.transfer = TransferState::HostLoaded(hit);
        self.cache_full(slot, hit.tokens);
        self.transfers.loaded.push_back(slot);
        true
    }

    /// Begins to load the blocks `below` of the waiting sequence `slot`, and those that another engine has. `None` if there are
    /// none; false if there are too few free blocks for all of its tokens.
    #[inline(never)] // it would make the common path of an admission longer
    pub(super) fn load_from_elsewhere(
        &mut self,
        now: SimTime,
        slot: u32,
        below: FoundBelow,
        next_block: Option<BlockHash>,
    ) -> Option<bool> {
        let peer = self.find_at_peers(now, slot, below.blocks);
        if below.blocks == 0 && peer.is_none() {
            return None;
        }
        Some(self.load_from_below(now, slot, below, peer, next_block))
    }

    /// Blocks of the waiting sequence `slot` at another engine, if that has more than its `hits` and the ones `below`.
    fn find_at_peers(&mut self, now: SimTime, slot: u32, below: u32) -> Option<PeerLoad> {
        let peers = self.peers.blocks.as_ref()?;
        let sequence = &self.sequences[slot];
        let most = (sequence.tokens() - 1) / self.limits.block_size;
        let known = sequence.request.prompt.blocks().iter();
        let known = known.chain(&sequence.generated_blocks);
        let mut blocks: Vec<BlockHash> = known.take(most as usize).copied().collect();
        let have = self.cache.hits() + below;
        let found = peers.find(now, &blocks, have)?;
        blocks.truncate(found.blocks as usize);
        let load = self.peers.loads;
        self.peers.loads += 1;
        Some(PeerLoad {
            load,
            peer: found.peer,
            blocks,
            have,
            not_before: now,
        })
    }

    /// The sequence `slot` waits for a load.
    pub(super) fn begin_peer_load(&mut self, slot: u32, load: PeerLoad) {
        self.peers.slots.insert(load.load, slot);
        self.peers.wanted.push(load);
    }
}
