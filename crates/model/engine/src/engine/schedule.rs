//! Schedules a pass: running sequences first, then waiting ones, within the token budget.

use slipstream_base::width::to_u32;
use slipstream_base::{Role, SimTime};
use slipstream_config::cluster::SchedulingPolicy;

use super::Engine;
use super::disagg::TransferState;
use super::encoder::Encoded;
use super::sequence::{RunningSequence, limit_len};
use crate::timing::StepLoad;
use crate::waiting::RunningStats;

/// Work of a pass that is being scheduled.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) budget: u32,
    /// Most tokens of one sequence.
    pub(super) most: u32,
    pub(super) load: StepLoad,
    pub(super) chunks: RunningStats,
    pub(super) contexts: RunningStats,
    pub(super) preempted: bool,
    /// Time before its layers, ns: to load adapters, and of the encoder.
    pub(super) before_ns: u64,
    /// Encoder tokens that it may still compute.
    pub(super) encoder_budget: u32,
    /// Encoder inputs that it computes.
    pub(super) encoded: Vec<Encoded>,
}

impl Engine {
    /// Schedules a pass that begins at once; `None` if there is nothing to do.
    pub(super) fn plan_first(&mut self, now: SimTime) -> Option<Plan> {
        let admits_none = self.running_max() == 0 && self.running.is_empty();
        if self.by_id.is_empty() || admits_none {
            return None;
        }
        loop {
            let plan = self.plan::<false>(now);
            if !plan.load.is_empty() {
                return Some(plan);
            }
            if !plan.preempted && self.hands_over() {
                // Blocks are held for others, or wait to be filled: nothing can run before.
                return None;
            }
            // A lone sequence fits an empty cache, as add() checked, so the last one that ran can
            // only have preempted itself because blocks are held for other engines. vLLM runs an
            // empty step then and schedules again; that takes no time here.
            assert!(plan.preempted && self.hands_over());
        }
    }

    /// Schedules a pass: one that begins now, or with `AHEAD` the one after that.
    pub(super) fn plan<const AHEAD: bool>(&mut self, now: SimTime) -> Plan {
        let mut plan = Plan {
            budget: self.limits.budget,
            most: self.limits.sequence_tokens_max(to_u32(self.by_id.len())),
            encoder_budget: self.encoder.as_ref().map_or(0, |encoder| encoder.budget),
            ..Plan::default()
        };
        self.finish_host_loads(now);
        self.schedule_running::<AHEAD>(&mut plan);
        if self.adapters.is_some() {
            self.note_adapters();
        }
        if !plan.preempted {
            self.admit_waiting::<AHEAD>(now, &mut plan);
        }
        if self.adapters.is_some() {
            self.load_adapters::<AHEAD>(&mut plan);
        }
        if self.encoder.is_some() {
            plan.before_ns += self.encoder_ns(&plan);
        }
        plan
    }

    /// Counts a pass whose length the model of step times had to extrapolate.
    #[inline]
    pub(super) fn note_range(&mut self, load: &StepLoad) {
        if self.timing_has_range && self.timing.extrapolates(load) {
            self.counts.extrapolated_passes += 1;
        }
    }

    fn schedule_running<const AHEAD: bool>(&mut self, plan: &mut Plan) {
        let mut at = 0;
        loop {
            at += self.schedule_decodes::<AHEAD>(at, plan);
            if at == self.running.len() || plan.budget == 0 {
                return;
            }
            let r = &mut self.running[at];
            let before = r.before::<AHEAD>();
            // The pass under way gives it a token that is not known yet.
            let unknown = AHEAD && r.will_produce_token();
            if AHEAD && self.pipeline.as_ref().is_some_and(|p| p.leaves_out(r)) {
                at += 1;
                continue;
            }
            let len = r.len + u32::from(unknown);
            if unknown && len >= r.end_len {
                let sequence = &self.sequences[r.slot];
                if len == limit_len(sequence, self.limits.max_len) {
                    at += 1; // that token is its last
                    continue;
                }
            }
            let decodes = r.decoding || unknown;
            let left = if decodes && self.speculation.drafts > 0 {
                // The last token that a sequence may have is never computed.
                (1 + self.speculation.drafts).min(self.limits.max_len - 1 - before)
            } else {
                len - before
            };
            let mut chunk = left.min(plan.budget).min(plan.most);
            let (slot, encoder_budget) = (r.slot, plan.encoder_budget);
            if self.encoder.is_some() && !decodes {
                chunk = self.fit_inputs(slot, before, chunk, plan);
            }
            if chunk == 0 {
                at += 1; // if all drafts are accepted, it ends; or its next image has to wait
                continue;
            }
            let r = &mut self.running[at];
            let target = before + chunk;
            let slots = self.speculation.slots(target, self.limits.max_len);
            if r.touches_blocks(slots, target) {
                if !self.make_room::<AHEAD>(&mut at, slots, plan) {
                    // It left the queue, so `at` is already the one behind it. By priority that
                    // one outranks it, and may fit into the blocks that it freed.
                    continue;
                }
                let r = self.running[at];
                let sequence = &mut self.sequences[r.slot];
                self.cache
                    .grow(sequence, slots, target.min(r.len), &self.output);
                self.running[at].capacity = slots.next_multiple_of(self.limits.block_size);
            } else if !r.decoding && self.cache.host().is_some() || self.speculation.drafts > 0 {
                // It may have had blocks for all of its prompt since a load from host memory, or for drafts that were
                // rejected.
                let (slot, known) = (r.slot, target.min(r.len));
                self.cache_full(slot, known);
            }
            let r = &mut self.running[at];
            *r.planned::<AHEAD>() = chunk;
            if self.encoder.is_some() && !decodes {
                self.compute_inputs(slot, encoder_budget, plan);
            }
            let r = &self.running[at];
            if decodes {
                plan.load.add_decode(r.prompt_len, target);
                plan.load.draft_tokens += u64::from(chunk - 1);
                plan.contexts.add(target);
            } else {
                plan.load.add_prefill(before, chunk);
                plan.chunks.add(chunk);
            }
            plan.budget -= chunk;
            at += 1;
        }
    }

    /// Schedules the sequences from `at` on that add one token and need no block for it, up to the
    /// first of another kind; returns how many.
    fn schedule_decodes<const AHEAD: bool>(&mut self, at: usize, plan: &mut Plan) -> usize {
        if self.speculation.drafts > 0 || self.pipeline.is_some() {
            return 0;
        }
        let mut load = StepLoad::default();
        let mut contexts = RunningStats::default();
        for r in self.running[at..].iter_mut().take(plan.budget as usize) {
            let target = r.before::<AHEAD>() + 1;
            // With its last token under way it may end before it is computed again.
            let ends = AHEAD && target >= r.end_len;
            if !r.decoding || r.touches_blocks(target, target) || ends {
                break;
            }
            *r.planned::<AHEAD>() = 1;
            load.add_decode(r.prompt_len, target);
            contexts.add(target);
        }
        plan.load.decode_sequences += load.decode_sequences;
        plan.load.decode_context += load.decode_context;
        plan.load.decode_prompt += load.decode_prompt;
        plan.contexts.add_all(&contexts);
        plan.budget -= contexts.count;
        contexts.count as usize
    }

    /// Preempts until the running sequence `at` can have blocks for `target` tokens; false if it had
    /// to give way itself. `at` follows the sequence when one before it is taken out.
    fn make_room<const AHEAD: bool>(
        &mut self,
        at: &mut usize,
        target: u32,
        plan: &mut Plan,
    ) -> bool {
        let slot = self.running[*at].slot;
        loop {
            let held = self.sequences[slot].table.len();
            if target.div_ceil(self.limits.block_size) - held <= self.cache.pool().free() {
                return true;
            }
            plan.preempted = true;
            let victim = match self.limits.policy {
                SchedulingPolicy::Fcfs => self.running.len() - 1,
                SchedulingPolicy::Priority => (0..self.running.len())
                    .max_by_key(|&i| self.sequences[self.running[i].slot].rank())
                    .expect("at least the sequence itself runs"),
            };
            let mut r = self.running.remove(victim);
            if *r.planned::<AHEAD>() > 0 {
                plan.unschedule::<AHEAD>(&mut r);
                plan.take_back_inputs(r.slot);
            }
            self.preempt::<AHEAD>(&r);
            match victim.cmp(at) {
                std::cmp::Ordering::Less => *at -= 1,
                std::cmp::Ordering::Equal => return false,
                std::cmp::Ordering::Greater => {}
            }
        }
    }

    /// Moves a sequence from running back to waiting; everything is computed again later, except
    /// blocks that are still cached then.
    fn preempt<const AHEAD: bool>(&mut self, r: &RunningSequence) {
        let sequence = &mut self.sequences[r.slot];
        self.cache.preempt(sequence);
        sequence.outputs = r.len - r.prompt_len;
        if slipstream_base::planted!("forgotten-token") {
            sequence.outputs = sequence.outputs.saturating_sub(1);
        }
        sequence.preemptions += 1;
        sequence.running = false;
        // A prompt computed for another engine is of no use without its blocks: it is computed
        // again, and its token too.
        let delivers = sequence.transfer != TransferState::Queued(Role::Prefill);
        if let Some(pipeline) = &mut self.pipeline {
            let last = pipeline.preempt(r, delivers);
            sequence.last_flight = if delivers { last } else { 0 };
        } else if AHEAD && r.will_produce_token() && delivers {
            let drafts = r.computed + r.scheduled - r.len;
            self.during_pass.overtaken.push((r.slot, drafts));
        }
        self.leave_inputs(r.slot);
        self.counts.preemptions += 1;
        self.waiting.push_preempted(r.slot, &self.sequences[r.slot]);
    }

    fn admit_waiting<const AHEAD: bool>(&mut self, now: SimTime, plan: &mut Plan) {
        self.admit_loaded::<AHEAD>(now, plan);
        while plan.budget > 0 && to_u32(self.running.len()) < self.running_max() {
            let Some(slot) = self.waiting.first() else {
                break;
            };
            if self.is_passed_over(slot) {
                self.waiting.pass_over(slot, &self.sequences[slot]);
                continue;
            }
            if self.waiting.is_blocked(slot, &self.cache) {
                break;
            }
            match self.sequences[slot].transfer {
                TransferState::Queued(Role::Decode) => {
                    if self.reserve(slot) {
                        continue;
                    }
                    break;
                }
                TransferState::Queued(Role::Both | Role::Prefill) => {}
                TransferState::Loading { .. }
                | TransferState::Loaded
                | TransferState::PeerLoading(_)
                | TransferState::HostLoading(_)
                | TransferState::HostLoaded(_) => unreachable!("it is in no queue"),
            }
            let sequence = &mut self.sequences[slot];
            let (computed, next_block) = self.cache.find_hits(sequence, &self.output);
            let below = self.cache.find_below(sequence);
            if below.blocks > 0 || self.peers.are_set() {
                match self.load_from_elsewhere(now, slot, below, next_block) {
                    Some(true) => continue,
                    Some(false) => break,
                    None => {}
                }
            }
            let len = self.sequences[slot].tokens();
            let left = (len - computed).min(plan.most);
            if !self.limits.chunked && left > plan.budget {
                break;
            }
            let mut chunk = left.min(plan.budget);
            let encoder_budget = plan.encoder_budget;
            let encodes = self.encodes(slot);
            if encodes {
                chunk = self.fit_inputs(slot, computed, chunk, plan);
                if chunk == 0 {
                    self.waiting.pass_over(slot, &self.sequences[slot]);
                    continue;
                }
            }

            // The whole sequence must fit, not its first chunk alone (vLLM's
            // `scheduler_reserve_full_isl`, on by default).
            let slots = self
                .speculation
                .slots(computed + chunk, self.limits.max_len);
            let fits = if self.limits.reserves_full {
                len.max(slots)
            } else {
                slots
            };
            if !self.cache.has_room(fits) {
                self.leave_inputs(slot);
                // The need for a chunk depends on the rest of the budget, too; and each look at images leaves traces.
                if self.limits.reserves_full && fits == len && !encodes {
                    self.waiting.block(slot, next_block, &mut self.cache);
                }
                break;
            }
            self.admit::<AHEAD>(now, slot, computed, chunk);
            if encodes {
                self.compute_inputs(slot, encoder_budget, plan);
            }
            plan.load.add_prefill(computed, chunk);
            plan.chunks.add(chunk);
            plan.budget -= chunk;
        }
        self.waiting.end_pass(&self.sequences);
    }

    /// True if the pass that is being scheduled does not consider a waiting sequence, but those behind it: a pass in the
    /// pipeline computes tokens of it still, or its adapter would be one too many.
    pub(super) fn is_passed_over(&self, slot: u32) -> bool {
        let sequence = &self.sequences[slot];
        let (pipeline, adapters) = (self.pipeline.as_ref(), self.adapters.as_ref());
        pipeline.is_some_and(|p| p.is_before_end_of(sequence.last_flight))
            || adapters.is_some_and(|a| a.is_one_too_many(sequence.request.params.adapter))
    }

    /// Moves the sequence to the running queue, with its hits and new blocks for `chunk`
    /// tokens behind the `computed` ones.
    fn admit<const AHEAD: bool>(&mut self, now: SimTime, slot: u32, computed: u32, chunk: u32) {
        self.waiting.remove(slot, &self.sequences[slot]);
        let slots = self
            .speculation
            .slots(computed + chunk, self.limits.max_len);
        let sequence = &mut self.sequences[slot];
        sequence.running = true;
        self.cache.hold_hits(sequence);
        if sequence.admitted.is_none() {
            sequence.admitted = Some(now);
            sequence.cached_tokens = computed;
            if self.cache.reuses() {
                self.counts.prefix_query_tokens += u64::from(sequence.tokens());
                self.counts.prefix_hit_tokens += u64::from(computed);
            }
        }
        let capacity = slots.next_multiple_of(self.limits.block_size);
        let eligible = self.pipeline.as_ref().map_or(0, |p| p.step());
        let mut r = RunningSequence::new(slot, sequence, computed, capacity, eligible);
        *r.planned::<AHEAD>() = chunk;
        if let Some(adapters) = &mut self.adapters {
            adapters.run(self.sequences[slot].request.params.adapter);
        }
        let sequence = &mut self.sequences[slot];
        self.cache
            .grow(sequence, slots, computed + chunk, &self.output);
        self.running.push(r);
    }
}

impl Plan {
    /// Undoes the scheduling of a sequence.
    fn unschedule<const AHEAD: bool>(&mut self, r: &mut RunningSequence) {
        let before = r.before::<AHEAD>();
        let decodes = r.decoding || AHEAD && r.will_produce_token();
        let chunk = std::mem::take(r.planned::<AHEAD>());
        self.budget += chunk;
        if decodes {
            let target = before + chunk;
            self.load.decode_sequences -= 1;
            self.load.decode_context -= u64::from(target);
            self.load.decode_prompt -= u64::from(r.prompt_len);
            self.load.draft_tokens -= u64::from(chunk - 1);
            self.contexts.remove(target);
        } else {
            let mut part = StepLoad::default();
            part.add_prefill(before, chunk);
            self.load.prefill_tokens -= part.prefill_tokens;
            self.load.prefill_sequences -= 1;
            self.load.prefill_context -= part.prefill_context;
            self.load.prefill_attention -= part.prefill_attention;
            self.chunks.remove(chunk);
        }
    }
}
