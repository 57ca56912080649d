//! Sequences that do not compute all of their prompt: another engine does, or host memory has a part.

use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, EngineRequest, RequestId, Role, SimTime};

use super::Engine;
use super::peers::PeerLoad;
use super::schedule::Plan;
use super::sequence::RunningSequence;
use crate::error::Refusal;
use crate::host_tier::FoundBelow;
use crate::pool::Table;

/// The progress of the KV transfer of a sequence, and the part that this engine computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferState {
    /// It is in the engine's queues. [`Role::Prefill`]: its blocks are held when it ends.
    /// [`Role::Decode`]: it waits for blocks into which the prompt's keys and values can come.
    Queued(Role),
    /// It has its blocks and is in no queue until the transfer has filled them.
    Loading {
        /// Of them, found in this engine's own cache.
        cached_tokens: u32,
    },
    /// Its prompt has been received, except the last token, which is computed here.
    Loaded,
    /// It has its blocks, and some of them are being loaded from host memory. It is in no queue until then.
    HostLoading(HostHit),
    /// The same, but some of them are being fetched from another engine.
    PeerLoading(HostHit),
    /// They have been loaded; what follows them is computed here.
    HostLoaded(HostHit),
}

/// The part of a sequence that need not be computed, because this engine's host memory had some of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostHit {
    /// Part of the sequence that this engine computes.
    role: Role,
    /// Leading tokens found on the GPU or in host memory, or received.
    pub(super) tokens: u32,
}

impl TransferState {
    /// Holds blocks and is in no queue of the engine's own.
    pub(super) fn is_on_its_way(self) -> bool {
        !matches!(self, TransferState::Queued(_))
    }
}

/// A sequence whose prompt comes from elsewhere has its blocks; fill them, then call
/// [`Engine::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Whose.
    pub id: RequestId,
    /// Leading tokens of the prompt that this engine had cached and that need not come.
    pub cached_tokens: u32,
}

/// Sequences of disaggregated prefill that are in no queue of this engine.
#[derive(Default)]
pub(super) struct KvTransfers {
    /// Blocks of prompts that were computed here, until they are fetched.
    pub(super) held: std::collections::BTreeMap<RequestId, Table>,
    /// Sequences that are not [`TransferState::Queued`].
    pub(super) loading: u32,
    /// Slots of those that are [`TransferState::Loaded`] or [`TransferState::HostLoaded`], in the order of their
    /// transfers. They run before all that wait: they hold blocks, which the head of the queue may be waiting for.
    pub(super) loaded: std::collections::VecDeque<u32>,
    /// Not taken yet.
    reserved: Vec<Reserved>,
}

impl Engine {
    /// As [`add`](Engine::add), for an engine that computes the prompt alone: the sequence ends with
    /// its first token, and its blocks stay held until [`release_held`](Engine::release_held).
    ///
    /// Source: vLLM, `NixlConnectorScheduler.request_finished`, which delays the freeing of blocks
    /// until the other engine has read them.
    ///
    /// # Errors
    /// As [`add`](Engine::add).
    pub fn add_prompt(&mut self, now: SimTime, mut request: EngineRequest) -> Result<(), Refusal> {
        let one = request.params.answered.saturating_add(1);
        request.params.max_tokens = request.params.max_tokens.min(one);
        self.add_part(now, request, Role::Prefill)
    }

    /// As [`add`](Engine::add), for an engine that gets the prompt's keys and values from another one.
    /// When its turn in the waiting queue comes, and there are blocks for the whole prompt, it gets
    /// them and leaves the queue: see [`take_reserved`](Engine::take_reserved).
    ///
    /// Source: vLLM, `Scheduler.schedule` (`WAITING_FOR_REMOTE_KVS`).
    ///
    /// # Errors
    /// As [`add`](Engine::add).
    pub fn add_answer(&mut self, now: SimTime, request: EngineRequest) -> Result<(), Refusal> {
        self.add_part(now, request, Role::Decode)
    }

    /// Moves the sequences that got their blocks since the last call to the end of `out`. To be called
    /// after each [`begin_pass`](Engine::begin_pass), also after one that began none.
    pub fn take_reserved(&mut self, out: &mut Vec<Reserved>) {
        out.append(&mut self.transfers.reserved);
    }

    /// The prompt's keys and values have come: its full blocks can be hit, and the next pass may
    /// compute its last token, and with it the first of the answer. False, with nothing changed, if
    /// the engine has no such sequence (any more) that waits for them.
    ///
    /// Source: vLLM, `Scheduler._update_waiting_for_remote_kv`: received blocks are cached, the last token
    /// is computed again, and the request goes before those in the waiting queue.
    pub fn receive(&mut self, id: RequestId) -> bool {
        let Some(&slot) = self.by_id.get(&id) else {
            return false;
        };
        let TransferState::Loading { .. } = self.sequences[slot].transfer else {
            return false;
        };
        let sequence = &mut self.sequences[slot];
        sequence.transfer = TransferState::Loaded;
        let len = sequence.tokens();
        self.cache_full(slot, len - 1);
        self.transfers.loaded.push_back(slot);
        true
    }

    /// Frees the blocks of a prompt that was computed here. False if there are none of that name.
    pub fn release_held(&mut self, id: RequestId) -> bool {
        let Some(table) = self.transfers.held.remove(&id) else {
            return false;
        };
        self.cache.release(table);
        true
    }

    /// Blocks that are held for others to fetch, and sequences that wait for theirs to be filled.
    /// With any of them an engine may have sequences and yet begin no pass.
    pub fn hands_over(&self) -> bool {
        !self.transfers.held.is_empty() || self.transfers.loading > 0
    }

    /// Gives the waiting sequence `slot` blocks for its whole prompt; false if there are too few.
    pub(super) fn reserve(&mut self, slot: u32) -> bool {
        let sequence = &mut self.sequences[slot];
        let (cached_tokens, next_block) = self.cache.find_hits(sequence, &self.output);
        if !self.leave_with_blocks(slot, next_block) {
            return false;
        }
        let sequence = &mut self.sequences[slot];
        sequence.transfer = TransferState::Loading { cached_tokens };
        sequence.cached_tokens = cached_tokens;
        let id = sequence.request.id;
        let reserved = Reserved { id, cached_tokens };
        self.transfers.reserved.push(reserved);
        true
    }

    /// Takes a waiting sequence out of its queue, with its hits and free blocks for the rest of its
    /// tokens. False, with nothing changed, if there are too few: one that has left never waits for blocks.
    fn leave_with_blocks(&mut self, slot: u32, next_block: Option<BlockHash>) -> bool {
        let len = self.sequences[slot].tokens();
        if !self.cache.has_room(len) {
            self.waiting.block(slot, next_block, &mut self.cache);
            return false;
        }
        self.waiting.remove(slot, &self.sequences[slot]);
        let sequence = &mut self.sequences[slot];
        self.cache.hold_hits(sequence);
        self.cache.extend(&mut sequence.table, len);
        self.transfers.loading += 1;
        true
    }

    /// Moves sequences whose prompts have come to the running queue.
    pub(super) fn admit_loaded<const AHEAD: bool>(&mut self, now: SimTime, plan: &mut Plan) {
        while plan.budget > 0
            && to_u32(self.running.len()) < self.running_max()
            && let Some((at, slot)) = self.first_loaded()
        {
            let left = self.left_of_loaded(slot);
            if !self.limits.chunked && left > plan.budget {
                break;
            }
            self.transfers.loaded.remove(at);
            self.transfers.loading -= 1;
            self.run_loaded::<AHEAD>(now, slot, plan);
        }
    }

    /// The first of the sequences whose blocks have come that a pass may run, and its place.
    fn first_loaded(&self) -> Option<(usize, u32)> {
        let mut loaded = self.transfers.loaded.iter().copied().enumerate();
        loaded.find(|&(_, slot)| !self.is_passed_over(slot))
    }

    /// Forgets that a sequence, which is aborted, was on its way.
    pub(super) fn leave_transfers(&mut self, slot: u32) {
        self.transfers.loading -= 1;
        self.transfers.loaded.retain(|&s| s != slot);
        if let Some(tier) = self.cache.host_mut() {
            tier.forget(slot);
        }
        self.peers.forget(slot);
    }

    /// Whether sequences wait for blocks from host memory.
    pub(super) fn awaits_host_loads(&self) -> bool {
        let tier = self.cache.host();
        tier.is_some_and(|tier| tier.next_due().is_some())
    }

    /// Begins to load the blocks `below` of the waiting sequence `slot`, behind its hits, from host memory or the
    /// disk, and those behind them from a `peer`. False if there are too few free blocks for all of its tokens.
    pub(super) fn load_from_below(
        &mut self,
        now: SimTime,
        slot: u32,
        below: FoundBelow,
        peer: Option<PeerLoad>,
        next_block: Option<BlockHash>,
    ) -> bool {
        if !self.leave_with_blocks(slot, next_block) {
            return false;
        }
        let on_gpu = self.cache.hits() * self.limits.block_size;
        let tokens = on_gpu + below.blocks * self.limits.block_size;
        let sequence = &mut self.sequences[slot];
        let TransferState::Queued(role) = sequence.transfer else {
            unreachable!("it was in a queue");
        };
        let hit = HostHit { role, tokens };
        sequence.transfer = match peer {
            Some(_) => TransferState::PeerLoading(hit),
            None => TransferState::HostLoading(hit),
        };
        if sequence.admitted.is_none() {
            sequence.cached_tokens = tokens;
            self.counts.prefix_query_tokens += u64::from(sequence.tokens());
            self.counts.prefix_hit_tokens += u64::from(on_gpu);
            sequence.lower.disk_tokens = below.on_disk * self.limits.block_size;
            sequence.lower.host_tokens = (below.blocks - below.on_disk) * self.limits.block_size;
            self.counts.host_hit_tokens += u64::from(sequence.lower.host_tokens);
            self.counts.disk_hit_tokens += u64::from(sequence.lower.disk_tokens);
        }
        let tier = self.cache.host_mut().filter(|_| below.blocks > 0);
        match (peer, tier) {
            (None, Some(tier)) => tier.load(now, slot, below),
            (None, None) => {}
            (Some(mut load), tier) => {
                load.not_before = tier.map_or(now, |tier| tier.loaded_at(now, below));
                self.begin_peer_load(slot, load);
            }
        }
        true
    }

    /// Caches the blocks of loads that have ended, and lets their sequences run.
    pub(super) fn finish_host_loads(&mut self, now: SimTime) {
        if let Some(tier) = self.cache.host_mut() {
            tier.begin_pass(now);
        }
        while let Some(slot) = self.cache.host_mut().and_then(|t| t.next_loaded(now)) {
            let sequence = &mut self.sequences[slot];
            let TransferState::HostLoading(hit) = sequence.transfer else {
                unreachable!("its load was under way");
            };
            sequence.transfer = TransferState::HostLoaded(hit);
            self.cache_full(slot, hit.tokens);
            self.transfers.loaded.push_back(slot);
        }
    }

    /// Tokens that a sequence whose blocks have come computes in its next pass, if the budget allows it.
    fn left_of_loaded(&self, slot: u32) -> u32 {
        let sequence = &self.sequences[slot];
        match sequence.transfer {
            TransferState::HostLoaded(hit) => sequence.tokens() - hit.tokens,
            _ => 1,
        }
    }

    fn run_loaded<const AHEAD: bool>(&mut self, now: SimTime, slot: u32, plan: &mut Plan) {
        let sequence = &mut self.sequences[slot];
        let (prompt_len, len) = (sequence.request.prompt.len(), sequence.tokens());
        let (role, computed) = match sequence.transfer {
            TransferState::HostLoaded(hit) => (hit.role, hit.tokens),
            // Once preempted, it is computed here like any other.
            _ => (Role::Both, len - 1),
        };
        let chunk = (len - computed).min(plan.budget).min(plan.most);
        sequence.transfer = TransferState::Queued(role);
        sequence.running = true;
        sequence.admitted.get_or_insert(now);
        let capacity = len.next_multiple_of(self.limits.block_size);
        let eligible = self.pipeline.as_ref().map_or(0, |p| p.step());
        let mut r = RunningSequence::new(slot, sequence, computed, capacity, eligible);
        *r.planned::<AHEAD>() = chunk;
        if let Some(adapters) = &mut self.adapters {
            adapters.run(self.sequences[slot].request.params.adapter);
        }
        self.cache_full(slot, computed + chunk);
        self.running.push(r);
        if len - computed == 1 {
            // One token with all of its context: for the GPU it is a decode.
            plan.load.add_decode(prompt_len, len);
            plan.contexts.add(len);
        } else {
            plan.load.add_prefill(computed, chunk);
            plan.chunks.add(chunk);
        }
        plan.budget -= chunk;
    }
}
