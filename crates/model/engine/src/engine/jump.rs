//! Many decode passes at once, for a driver whose time is virtual: run at once, or planned and run later.

use std::ops::Range;

use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, ForwardPassMetrics, KvOp, RequestId, SimTime};

use super::sequence::RunningSequence;
use super::{Engine, decode_stats};
use crate::host_tier::HostTier;
use crate::timing::StepLoad;
use crate::waiting::RunningStats;

/// Result of a run of decode passes: in each of them every running sequence got tokens, none its first
/// and none its last, and all passes gave the same number. A driver keeps one and hands it in again and
/// again.
#[derive(Clone, Debug, Default)]
pub struct DecodeRun {
    /// When the first pass began.
    pub start: SimTime,
    /// When each pass ended, and the next one began. As many as there were passes.
    pub ends: Vec<SimTime>,
    /// How the KV cache changed, in the order of happening.
    pub kv_ops: Vec<KvOp>,
    /// Where in `kv_ops` the changes of each pass end. Shape `[ends.len()]`.
    pub kv_ends: Vec<u32>,
    /// Number of the delta of the first pass that changed something; each that did has one.
    pub kv_sequence: u64,
    /// Blocks that sequences held in each pass. Shape `[ends.len()]`.
    pub used_blocks: Vec<u32>,
    /// Output tokens of each pass, over all sequences.
    tokens: u32,
    /// Record of the first pass.
    first: ForwardPassMetrics,
}

impl DecodeRun {
    /// The changes of pass `index`. One delta, unless empty: then it takes no number.
    pub fn kv_of(&self, index: usize) -> &[KvOp] {
        let begin = match index {
            0 => 0,
            _ => self.kv_ends[index - 1],
        };
        &self.kv_ops[begin as usize..self.kv_ends[index] as usize]
    }

    /// Sequences that got tokens in each pass.
    pub fn sequences(&self) -> u32 {
        self.first.scheduled_decode.requests
    }

    /// Output tokens of each pass: as many as [`sequences`](Self::sequences), or more if the engine verifies
    /// drafts.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Fills `out` with the record of pass `index`.
    pub fn fpm_of(&self, index: usize, out: &mut ForwardPassMetrics) {
        out.clone_from(&self.first);
        out.counter += index as u64;
        // Every context grows by as much per pass, so their spread stays.
        out.scheduled_decode.kv_tokens += index as u64 * u64::from(self.tokens);
        let start = match index {
            0 => self.start,
            _ => self.ends[index - 1],
        };
        out.wall_time_s = self.ends[index].since(start) as f64 / 1e9;
    }

    fn clear(&mut self) {
        self.ends.clear();
        self.kv_ops.clear();
        self.kv_ends.clear();
        self.used_blocks.clear();
    }
}

/// Scratch of [`Engine::decode_run`].
#[derive(Default)]
pub(super) struct Phases {
    /// Places in the running queue, by how many tokens their last block holds (`computed` modulo
    /// the block size), in order within each.
    places: Vec<u32>,
    /// Where the places of each phase begin in `places`. Shape `[block_size + 1]`.
    begins: Vec<u32>,
    /// Hashes and parents of the blocks that a pass fills.
    filled: Vec<(BlockHash, BlockHash)>,
}

impl Phases {
    fn sort(&mut self, running: &[RunningSequence], block_size: u32) {
        self.begins.clear();
        self.begins.resize(block_size as usize + 1, 0);
        for r in running {
            self.begins[(r.computed % block_size) as usize] += 1;
        }
        let mut begin = 0;
        for count in &mut self.begins {
            begin += std::mem::replace(count, begin);
        }
        self.places.resize(running.len(), 0);
        for (place, r) in running.iter().enumerate() {
            let at = &mut self.begins[(r.computed % block_size) as usize];
            self.places[*at as usize] = to_u32(place);
            *at += 1;
        }
        // Each begin has moved on to the next one's.
        self.begins.rotate_right(1);
        self.begins[0] = 0;
    }

    /// Places whose blocks hold `phase` tokens.
    fn at(&self, phase: u32) -> Range<usize> {
        self.begins[phase as usize] as usize..self.begins[phase as usize + 1] as usize
    }

    /// The same, and none if there is no phase.
    fn of(&self, phase: Option<u32>) -> Range<usize> {
        phase.map_or(0..0, |phase| self.at(phase))
    }
}

/// Passes that only decode, whose ends are known and that are run later. While there are any, the running
/// sequences stay as they were before the first.
#[derive(Default)]
pub(super) struct PlannedPasses {
    /// When the first one begins.
    start: SimTime,
    /// When each ends, and the next one begins; empty if there are none.
    ends: Vec<SimTime>,
    /// How many have been run.
    run: u32,
    /// The load of the next one.
    load: StepLoad,
}

impl PlannedPasses {
    pub(super) fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// When the last pass that was run ended.
    fn at(&self) -> SimTime {
        match self.run {
            0 => self.start,
            run => self.ends[run as usize - 1],
        }
    }
}

/// What a run of decode passes begins with.
struct Decodes {
    /// Passes until one in which a sequence ends.
    quiet: u32,
    load: StepLoad,
    contexts: RunningStats,
}

impl Engine {
    /// Runs up to `max_passes` passes that only decode, the first of them at `now`, and returns how
    /// many it ran: with the same result as as many single passes, in O(sequences + passes + blocks
    /// moved) together.
    ///
    /// It stops before a pass that would end at `until` or later (something may happen then that the
    /// pass must see, or an abort in the middle of it), in which a sequence ends, that lacks a block,
    /// or that could admit a waiting sequence. 0 if that is so at once, if a sequence is in prefill
    /// or has stop tokens, if stored blocks are noted, or if the engine drafts or is a pipeline: a single pass comes next
    /// then.
    ///
    /// No output tokens are made up; they are in [`OutputModel::token`](crate::OutputModel::token), if anyone
    /// asks.
    ///
    /// # Panics
    /// If a pass is under way.
    pub fn decode_run(
        &mut self,
        now: SimTime,
        until: SimTime,
        max_passes: u32,
        run: &mut DecodeRun,
    ) -> u32 {
        assert!(self.is_between_passes(), "finish_pass() comes first");
        run.clear();
        run.start = now;
        let loaded = self.cache.host().and_then(HostTier::next_due);
        let until = loaded.map_or(until, |due| due.min(until));
        let Some(decodes) = self.decodes(max_passes) else {
            return 0;
        };
        let Decodes {
            quiet,
            load,
            contexts,
        } = decodes;
        let mut phases = std::mem::take(&mut self.phases);
        phases.sort(&self.running, self.limits.block_size);
        let passes = self.run_passes(now, until, quiet, load, &mut phases, run);
        self.phases = phases;
        if passes == 0 {
            return 0;
        }
        self.move_on(passes);
        self.publish_run(run);
        self.heartbeat(&mut run.first);
        run.first.scheduled_decode = decode_stats(&contexts);
        // An engine that drafts makes no jumps.
        run.tokens = run.sequences();
        self.counts.fpm += u64::from(passes) - 1;
        self.counts.passes += u64::from(passes);
        passes
    }

    /// The passes to come, of `max_passes` at most, if every running sequence gets a token in each and none its
    /// last one.
    fn decodes(&mut self, max_passes: u32) -> Option<Decodes> {
        // Tokens of stored blocks are noted pass by pass, and each draft is drawn.
        if self.cache.notes_tokens()
            || self.speculation.drafts > 0
            || self.pipeline.is_some()
            || self.encoder.as_ref().is_some_and(|e| e.is_needed())
            || !self.waiting_cannot_move()
        {
            return None;
        }
        let mut contexts = RunningStats::default();
        let mut quiet = max_passes;
        // Ahead of its pass each sequence has its token scheduled already.
        let scheduled = u32::from(self.limits.ahead);
        for r in &self.running {
            let has_token = r.decoding && r.len > r.prompt_len;
            if !has_token || r.stops || r.scheduled != scheduled {
                return None;
            }
            quiet = quiet.min(r.end_len - r.len - 1);
            contexts.add(r.len);
        }
        if quiet == 0 || self.running.is_empty() {
            return None;
        }
        if let Some(adapters) = &mut self.adapters {
            let of = |r: &RunningSequence| self.sequences[r.slot].request.params.adapter;
            // Loads belong to a pass that is run by itself.
            if !adapters.are_active(self.running.iter().map(of)) {
                return None;
            }
        }
        let load = StepLoad {
            decode_sequences: to_u32(self.running.len()),
            decode_context: contexts.tokens,
            decode_prompt: self.running.iter().map(|r| u64::from(r.prompt_len)).sum(),
            ..StepLoad::default()
        };
        // A sequence that left since may be in the pass that is scheduled, too.
        if self.next.as_ref().is_some_and(|next| next.load != load) {
            return None;
        }
        Some(Decodes {
            quiet,
            load,
            contexts,
        })
    }

    /// True if no waiting sequence can be admitted while the running ones do nothing but decode.
    fn waiting_cannot_move(&mut self) -> bool {
        let running = to_u32(self.running.len());
        if running > self.limits.budget {
            return false; // not all of them are in a pass
        }
        if !self.transfers.loaded.is_empty() && running < self.running_max() {
            return false;
        }
        match self.waiting.first() {
            None => true,
            Some(head) => {
                running >= self.running_max()
                    || running == self.limits.budget
                    || self.waiting.is_blocked(head, &self.cache)
            }
        }
    }

    /// The passes themselves: their times, and the blocks that they take and fill. Leaves `computed`
    /// and `len` as they were.
    fn run_passes(
        &mut self,
        now: SimTime,
        until: SimTime,
        quiet: u32,
        mut load: StepLoad,
        phases: &mut Phases,
        run: &mut DecodeRun,
    ) -> u32 {
        let mut end = now;
        let (mut grows, mut fills) = (self.growing(1), self.filling(1));
        for pass in 1..=quiet {
            if let Some(tier) = self.cache.host_mut() {
                tier.begin_pass(end);
            }
            end += self.timing.step_ns(&load);
            if end >= until {
                return pass - 1;
            }
            let (growing, filling) = (phases.at(grows), phases.of(fills));
            if to_u32(growing.len()) > self.cache.pool().free() {
                return pass - 1;
            }
            if !self.hash_filled(pass, filling.clone(), phases) {
                return pass - 1;
            }
            self.move_blocks(growing, filling, phases);
            self.note_range(&load);
            run.ends.push(end);
            run.used_blocks.push(self.cache.pool().used());
            run.kv_ends.push(self.cache.changes());
            load = load.next_decode();
            grows = self.phase_before(grows);
            fills = fills.map(|phase| self.phase_before(phase));
        }
        quiet
    }

    /// The phase of the sequences that need a block in pass number `pass` of a run, from 1: it computes token
    /// `computed + pass`, the first in a block. Ahead of its pass a sequence gets the block for the token that
    /// the pass gives it.
    #[inline]
    fn growing(&self, pass: u32) -> u32 {
        let size = self.limits.block_size;
        (size - (pass - 1 + u32::from(self.limits.ahead)) % size) % size
    }

    /// The phase of the sequences that fill a block in that pass, whose token is the last in it; `None` if blocks are not
    /// cached.
    #[inline]
    fn filling(&self, pass: u32) -> Option<u32> {
        let size = self.limits.block_size;
        self.cache.reuses().then_some((size - pass % size) % size)
    }

    /// The phase for which a pass does what the one before it did for `phase`.
    #[inline]
    fn phase_before(&self, phase: u32) -> u32 {
        phase.checked_sub(1).unwrap_or(self.limits.block_size - 1)
    }

    /// Plans up to `max_passes` passes that only decode, the first of them at `now`, and returns when the last of them
    /// ends. They are those that [`decode_run`](Engine::decode_run) would run; `None` where it would run none, and
    /// if a sequence waits for a block, or blocks are kept in host memory.
    ///
    /// Until then nothing depends on the engine but its KV cache, so the driver runs them when they have ended,
    /// or when it needs that: [`run_planned`](Engine::run_planned). Before any other call it ends the plan:
    /// [`end_plan`](Engine::end_plan).
    ///
    /// # Panics
    /// If a pass is under way.
    pub fn plan_run(&mut self, now: SimTime, max_passes: u32) -> Option<SimTime> {
        assert!(self.is_between_passes(), "finish_pass() comes first");
        if !self.may_plan() {
            return None;
        }
        let Decodes {
            mut quiet, load, ..
        } = self.decodes(max_passes)?;
        if self.cache.pool().lists_first_blocks() {
            // Whoever asks for blocks knows who has the first one of a prompt: none comes to be unnoticed.
            let first = self.running.iter().map(|r| r.computed).min();
            if let Some(first) = first.filter(|&first| first < self.limits.block_size) {
                quiet = quiet.min(self.limits.block_size - 1 - first);
            }
        }
        let mut phases = std::mem::take(&mut self.phases);
        phases.sort(&self.running, self.limits.block_size);
        let planned = &mut self.planned;
        (planned.start, planned.run, planned.load) = (now, 0, load);
        planned.ends.clear();
        let mut free = self.cache.pool().free();
        let lacks_block = |&pass: &u32| {
            let growing = to_u32(phases.at(self.growing(pass)).len());
            let lacks = growing > free;
            free = free.saturating_sub(growing);
            lacks
        };
        // Each sequence takes one block per block size at most.
        let each = u64::from(quiet.div_ceil(self.limits.block_size));
        let passes = if each * self.running.len() as u64 <= u64::from(self.cache.pool().free()) {
            quiet
        } else {
            (1..=quiet).find(lacks_block).map_or(quiet, |pass| pass - 1)
        };
        let ends = &mut self.planned.ends;
        self.timing.decode_ends(now, &load, passes, ends);
        self.phases = phases;
        self.planned.ends.last().copied()
    }

    /// Whether passes that only decode can be planned: if no sequence waits for a block, and no blocks are kept in host
    /// memory.
    pub fn may_plan(&self) -> bool {
        self.cache.host().is_none() && !self.waiting.has_blocked_head()
    }

    /// Runs the planned passes that end by `now` and have not been run, and returns how many those are. `run` has their
    /// ends and the changes of the KV cache.
    pub fn run_planned(&mut self, now: SimTime, run: &mut DecodeRun) -> u32 {
        run.clear();
        let first = self.planned.run;
        let ends = &self.planned.ends[first as usize..];
        let due = ends.iter().take_while(|&&end| end <= now).count();
        if due == 0 {
            return 0;
        }
        run.start = self.planned.at();
        run.ends
            .extend_from_slice(&self.planned.ends[first as usize..][..due]);
        let passes = to_u32(due);
        let mut phases = std::mem::take(&mut self.phases);
        let (mut grows, mut fills) = (self.growing(first + 1), self.filling(first + 1));
        for pass in first + 1..=first + passes {
            let (growing, filling) = (phases.at(grows), phases.of(fills));
            if !(growing.is_empty() && filling.is_empty()) {
                let moves = self.hash_filled(pass, filling.clone(), &mut phases);
                assert!(moves, "no sequence waits for a block");
                self.move_blocks(growing, filling, &phases);
            }
            run.kv_ends.push(self.cache.changes());
            grows = self.phase_before(grows);
            fills = fills.map(|phase| self.phase_before(phase));
        }
        self.phases = phases;
        self.planned.run += passes;
        if self.timing_has_range {
            let mut load = self.planned.load;
            for _ in 0..passes {
                self.note_range(&load);
                load = load.next_decode();
            }
        }
        let load = &mut self.planned.load;
        load.decode_context += u64::from(passes) * u64::from(load.decode_sequences);
        self.publish_run(run);
        self.counts.fpm += u64::from(passes);
        self.counts.passes += u64::from(passes);
        passes
    }

    /// Ends a plan, and returns when the last of its passes that was run ended: the next pass begins then.
    pub fn end_plan(&mut self) -> SimTime {
        let (end, passes) = (self.planned.at(), self.planned.run);
        self.planned.ends.clear();
        self.planned.run = 0;
        self.planned.start = end;
        self.move_on(passes);
        end
    }

    /// True between two passes, if none are planned.
    pub(super) fn is_between_passes(&self) -> bool {
        self.pass.is_none() && self.planned.is_empty()
    }

    /// Every running sequence got a token in each of `passes` passes.
    fn move_on(&mut self, passes: u32) {
        for r in &mut self.running {
            r.computed += passes;
            r.len += passes;
        }
        if let Some(next) = &mut self.next {
            next.load.decode_context += u64::from(passes) * u64::from(next.load.decode_sequences);
            next.contexts = next.contexts.grown(passes);
        }
    }

    /// Hands over what a run changed in the KV cache.
    fn publish_run(&mut self, run: &mut DecodeRun) {
        run.kv_sequence = self.cache.take_changes(&mut run.kv_ops);
        if !run.kv_ops.is_empty() {
            let changed = (0..run.ends.len()).filter(|&i| !run.kv_of(i).is_empty());
            self.cache.number_deltas(changed.count() as u64);
        }
    }

    /// Hashes the blocks that the sequences in `filling` fill in `pass`; false if one of them is what
    /// the head of the waiting queue is waiting for.
    fn hash_filled(&mut self, pass: u32, filling: Range<usize>, phases: &mut Phases) -> bool {
        phases.filled.clear();
        for i in filling {
            let r = &self.running[phases.places[i] as usize];
            let j = (r.computed + pass) / self.limits.block_size - 1;
            let sequence = &self.sequences[r.slot];
            let (hash, parent) = self.cache.hash_full(sequence, j, &self.output);
            if self.waiting.waits_for(hash) {
                return false;
            }
            phases.filled.push((hash, parent));
        }
        true
    }

    /// Takes and fills blocks, in the order of the running queue.
    fn move_blocks(
        &mut self,
        mut growing: Range<usize>,
        mut filling: Range<usize>,
        phases: &Phases,
    ) {
        let mut filled = phases.filled.iter();
        loop {
            let first = |range: &Range<usize>| phases.places[range.clone()].first().copied();
            let grows = first(&growing).unwrap_or(u32::MAX);
            let fills = first(&filling).unwrap_or(u32::MAX);
            if grows == u32::MAX && fills == u32::MAX {
                return;
            }
            // Blocks of one token are taken and filled at once, in this order.
            if grows <= fills {
                growing.start += 1;
                let r = &mut self.running[grows as usize];
                r.capacity += self.limits.block_size;
                let table = &mut self.sequences[r.slot].table;
                let tokens = r.capacity;
                self.cache.extend(table, tokens);
            } else {
                filling.start += 1;
                let table = &mut self.sequences[self.running[fills as usize].slot].table;
                let &(hash, parent) = filled.next().expect("hash_filled() made one for each");
                self.cache.cache_one(table, parent, hash);
            }
        }
    }

    /// Of the pass under way: each sequence in it, in order, its tokens computed before, and those
    /// that the pass computes. For tests.
    #[doc(hidden)]
    pub fn scheduled(&self) -> impl Iterator<Item = (RequestId, u32, u32)> + '_ {
        let scheduled = self.running.iter().filter(|r| r.scheduled > 0);
        scheduled.map(|r| (r.id, r.computed, r.scheduled))
    }

    /// As [`scheduled`](Engine::scheduled), of the pass after the one under way.
    #[doc(hidden)]
    pub fn scheduled_ahead(&self) -> impl Iterator<Item = (RequestId, u32, u32)> + '_ {
        let ahead = self.running.iter().filter(|r| r.ahead > 0);
        ahead.map(|r| (r.id, r.computed + r.scheduled, r.ahead))
    }

    /// True if the pass that comes next is scheduled already. For tests.
    #[doc(hidden)]
    pub fn is_scheduled(&self) -> bool {
        self.next.is_some()
    }

    /// Ids of the waiting sequences, in order. For tests.
    #[doc(hidden)]
    pub fn waiting_ids(&self) -> Vec<RequestId> {
        let ids = self.waiting.slots().into_iter();
        ids.map(|slot| self.sequences[slot].request.id).collect()
    }

    /// Blocks that each of the running sequences holds, in the order in which they run. For tests.
    #[doc(hidden)]
    pub fn running_blocks(&self) -> impl Iterator<Item = u32> + '_ {
        let running = self.running.iter().filter(|r| !r.gone);
        running.map(|r| self.sequences[r.slot].table.len())
    }

    /// Ids of the running sequences, in the order in which they run.
    pub fn running_ids(&self) -> impl Iterator<Item = RequestId> + '_ {
        self.running.iter().filter(|r| !r.gone).map(|r| r.id)
    }
}

#[cfg(test)]
mod tests {
    use slipstream_base::fpm::DecodeStats;

    use super::*;

    /// Three passes of two sequences that get three tokens each: contexts of 100 tokens together.
    #[test]
    fn contexts_grow_by_the_tokens_of_a_pass() {
        let run = DecodeRun {
            start: SimTime(1_000),
            ends: [2_000, 3_500, 5_500].map(SimTime).to_vec(),
            tokens: 6,
            first: ForwardPassMetrics {
                counter: 7,
                scheduled_decode: DecodeStats {
                    requests: 2,
                    kv_tokens: 100,
                    kv_tokens_variance: 4.0,
                },
                ..ForwardPassMetrics::default()
            },
            ..DecodeRun::default()
        };
        assert_eq!((run.sequences(), run.tokens()), (2, 6));
        let mut fpm = ForwardPassMetrics::default();
        let found = [0, 1, 2].map(|pass| {
            run.fpm_of(pass, &mut fpm);
            let decode = fpm.scheduled_decode;
            assert_eq!((decode.requests, decode.kv_tokens_variance), (2, 4.0));
            (fpm.counter, fpm.wall_time_s, decode.kv_tokens)
        });
        assert_eq!(found, [(7, 1e-6, 100), (8, 1.5e-6, 106), (9, 2e-6, 112)]);
    }
}
