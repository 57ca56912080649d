//! An engine: adds, finishes and aborts sequences, and applies the results of each pass to them.

mod adapters;
mod cache;
mod disagg;
mod encoder;
mod in_step;
mod jump;
mod limits;
mod peers;
mod pipeline;
mod queue;
mod schedule;
mod sequence;
mod speculation;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use slipstream_base::fpm::{DecodeStats, PrefillStats};
use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::width::to_u32;
use slipstream_base::{
    BlockHash, EngineRequest, FinishReason, ForwardPassMetrics, KvDelta, RankId, RequestId, Role,
    SimTime,
};
use slipstream_config::cluster::EngineConfig;

use crate::answer::{OutputModel, natural_len};
use crate::error::{EngineError, Refusal};
use crate::host_tier::{DiskTier, HostTier};
use crate::output::{Finished, LowerHits, PassOutput, Stats, Usage};
use crate::pool::{KvChanges, Table};
use crate::timing::{StepLoad, StepTime};
use crate::waiting::RunningStats;

use adapters::Adapters;
use cache::Cache;
pub use disagg::Reserved;
use disagg::{KvTransfers, TransferState};
use encoder::Encoder;
pub use jump::DecodeRun;
use jump::{Phases, PlannedPasses};
use limits::Limits;
use peers::Peers;
pub use peers::{FoundAtPeer, PeerBlocks, PeerLoad};
use pipeline::Pipeline;
use queue::Queue;
use schedule::Plan;
use sequence::{IdHasher, RunningSequence, Sequence, Slab, first_token, stops_at};
use speculation::{Answered, Speculation};

/// One rank of one engine: its scheduler and its KV cache.
///
/// A driver calls [`add`](Engine::add) and [`abort`](Engine::abort) at any moment, and in turn
/// [`begin_pass`](Engine::begin_pass) and, once the time that it returned has come,
/// [`finish_pass`](Engine::finish_pass).
///
/// Cost: a pass is O(sequences scheduled + blocks moved); a pass that only decodes and fills no
/// block allocates nothing. Memory follows live state: requests, and blocks once used.
pub struct Engine {
    rank: RankId,
    limits: Limits,
    /// No sequence is admitted for now.
    paused: bool,
    timing: Box<dyn StepTime>,
    /// `timing` has a range beyond which it extrapolates.
    timing_has_range: bool,
    output: OutputModel,
    lists_tokens: bool,

    cache: Cache,
    sequences: Slab,
    by_id: HashMap<RequestId, u32, BuildHasherDefault<IdHasher>>,
    running: Vec<RunningSequence>,
    waiting: Queue,
    transfers: KvTransfers,
    peers: Peers,
    speculation: Speculation,
    /// Stages, and the passes in them; `None` with a single one.
    pipeline: Option<Box<Pipeline>>,
    /// LoRA adapters, if they are limited.
    adapters: Option<Box<Adapters>>,
    /// The encoder of images, if its time is modelled.
    encoder: Option<Box<Encoder>>,

    pass: Option<Pass>,
    /// Scheduled already; begins when the pass under way has ended. Its sequences may have left.
    next: Option<Plan>,
    planned: PlannedPasses,
    during_pass: DuringPass,
    counts: Counts,

    // Scratch.
    phases: Phases,
}

/// Changes since the pass under way began.
#[derive(Default)]
struct DuringPass {
    /// Slots of sequences that were preempted while the pass computes a token for them, and the drafted tokens that it
    /// verifies.
    overtaken: Vec<(u32, u32)>,
    /// When sequences joined the waiting queue.
    arrived: Vec<SimTime>,
}

/// Sums since the engine was made.
#[derive(Default)]
struct Counts {
    /// Forward-pass metrics.
    fpm: u64,
    /// Sequences, also those that left.
    arrivals: u64,
    // For [`Stats`].
    passes: u64,
    extrapolated_passes: u64,
    preemptions: u64,
    prefix_query_tokens: u64,
    prefix_hit_tokens: u64,
    host_hit_tokens: u64,
    disk_hit_tokens: u64,
}

/// The pass under way.
#[derive(Clone, Copy)]
struct Pass {
    start: SimTime,
    end: SimTime,
    load: StepLoad,
    chunks: RunningStats,
    contexts: RunningStats,
}

/// Length of a pass that runs nothing. Source: vLLM, `EngineCore._process_engine_step`, which sleeps as long.
const POLL_NS: u64 = 1_000_000;

impl Engine {
    /// An empty engine.
    ///
    /// # Errors
    /// [`EngineError`] if the configuration makes no engine.
    pub fn new(
        rank: RankId,
        config: &EngineConfig,
        timing: Box<dyn StepTime>,
        output: OutputModel,
    ) -> Result<Engine, EngineError> {
        let limits = Limits::new(config)?;
        output.check()?;
        Ok(Engine {
            rank,
            limits,
            paused: false,
            timing_has_range: timing.has_range(),
            timing,
            output,
            lists_tokens: true,
            cache: Cache::new(rank, config),
            sequences: Slab::default(),
            by_id: HashMap::default(),
            running: Vec::new(),
            waiting: Queue::new(config.scheduling_policy),
            transfers: KvTransfers::default(),
            peers: Peers::default(),
            speculation: Speculation::new(config.speculation.as_ref()),
            pipeline: config
                .pipeline
                .as_ref()
                .map(|stages| Box::new(Pipeline::new(stages, config.async_scheduling))),
            adapters: config
                .lora
                .as_ref()
                .map(|lora| Box::new(Adapters::new(lora))),
            encoder: config
                .encoder
                .as_ref()
                .map(|encoder| Box::new(Encoder::new(encoder))),
            pass: None,
            next: None,
            planned: PlannedPasses::default(),
            during_pass: DuringPass::default(),
            counts: Counts::default(),
            phases: Phases::default(),
        })
    }

    /// Takes `request` into the waiting queue; the next pass may admit it. The queue has no bound of
    /// its own: the caller bounds the requests in the engine.
    ///
    /// # Errors
    /// [`Refusal`] if it can never run; the engine is unchanged then.
    pub fn add(&mut self, now: SimTime, request: EngineRequest) -> Result<(), Refusal> {
        self.add_part(now, request, Role::Both)
    }

    fn add_part(
        &mut self,
        now: SimTime,
        request: EngineRequest,
        role: Role,
    ) -> Result<(), Refusal> {
        debug_assert!(self.planned.is_empty(), "end_plan() comes first");
        self.check(&request)?;
        let prompt_len = request.prompt.len();
        let answered = request.params.answered;
        let end_outputs = request
            .params
            .max_tokens
            .min(self.limits.max_len - prompt_len);
        let natural = if request.params.ignore_eos {
            u32::MAX
        } else {
            // vLLM masks the end-of-sequence token while fewer than min_tokens are out, so it can
            // be the next one after them at the earliest.
            natural_len(&self.output.lengths, request.seed)
                .max(request.params.min_tokens.saturating_add(1))
                // The engine that answered so far may draw from other lengths.
                .max(answered.saturating_add(1))
        };
        let (id, arrival) = (request.id, self.counts.arrivals);
        let mut sequence = Sequence {
            request,
            arrival,
            end_outputs: end_outputs.min(natural),
            natural_end: natural <= end_outputs,
            outputs: answered,
            cached_tokens: 0,
            lower: LowerHits::default(),
            arrived: now,
            admitted: None,
            preemptions: 0,
            running: false,
            last_flight: 0,
            transfer: TransferState::Queued(role),
            generated_blocks: Vec::new(),
            table: Table::default(),
        };
        if answered > 0 {
            self.cache.hash_answered(&mut sequence, &self.output);
        }
        let slot = self.sequences.insert(sequence);
        self.by_id.insert(id, slot);
        self.waiting.push(slot, &self.sequences[slot]);
        self.counts.arrivals += 1;
        if self.pass.is_some() {
            self.during_pass.arrived.push(now);
        }
        Ok(())
    }

    fn check(&self, request: &EngineRequest) -> Result<(), Refusal> {
        self.limits.check(request)?;
        if let Some(encoder) = &self.encoder {
            let mut most = encoder.input_max();
            if encoder.takes_whole() {
                most = most.min(self.limits.budget).min(self.limits.long_prefill);
            }
            let inputs = request.params.encoder_inputs.iter();
            if let Some(tokens) = inputs.map(|i| i.tokens).find(|&tokens| tokens > most) {
                return Err(Refusal::EncoderInput { tokens, most });
            }
        }
        if self.by_id.contains_key(&request.id) {
            return Err(Refusal::Duplicate { id: request.id });
        }
        Ok(())
    }

    /// Loses everything: sequences, blocks, the pass under way, unpublished changes. Deltas begin
    /// again at 0; counters of [`Stats`] run on.
    pub fn restart(&mut self) {
        self.cache.clear();
        self.sequences = Slab::default();
        self.by_id.clear();
        self.running.clear();
        self.waiting = Queue::new(self.limits.policy);
        self.transfers = KvTransfers::default();
        self.peers.clear();
        if let Some(adapters) = &mut self.adapters {
            adapters.clear();
        }
        if let Some(encoder) = &mut self.encoder {
            encoder.clear();
        }
        self.pass = None;
        self.next = None;
        self.planned = PlannedPasses::default();
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.clear();
        }
        self.during_pass.overtaken.clear();
        self.during_pass.arrived.clear();
    }

    /// Usage of a request so far, at the end of the last pass; `None` if the engine does not know it
    /// (any more). O(sequences that run).
    pub fn usage_of(&self, id: RequestId) -> Option<Usage> {
        let &slot = self.by_id.get(&id)?;
        let sequence = &self.sequences[slot];
        let mut output_tokens = sequence.outputs;
        if sequence.running {
            // While it runs, only its place in the queue is kept up to date.
            let r = self.running.iter().find(|r| r.slot == slot && !r.gone)?;
            output_tokens = r.len - r.prompt_len;
        }
        Some(Usage {
            prompt_tokens: sequence.request.prompt.len(),
            cached_tokens: sequence.cached_tokens,
            output_tokens,
            preemptions: sequence.preemptions,
        })
    }

    /// Times that a request was preempted so far; `None` if the engine does not know it (any more).
    pub fn preemptions_of(&self, id: RequestId) -> Option<u32> {
        let &slot = self.by_id.get(&id)?;
        Some(self.sequences[slot].preemptions)
    }

    /// Drops a request at any moment, also between the begin and the end of a pass; its blocks are
    /// free at once. False if the engine does not know it (any more).
    pub fn abort(&mut self, id: RequestId) -> bool {
        let Some(&slot) = self.by_id.get(&id) else {
            return false;
        };
        if self.sequences[slot].running {
            let at = self
                .running
                .iter()
                .position(|r| r.slot == slot && !r.gone)
                .expect("a running sequence is in the running queue");
            if self.pass.is_some() {
                self.running[at].gone = true;
            } else {
                self.running.remove(at);
            }
            self.leave_flights(slot);
        } else if self.sequences[slot].transfer.is_on_its_way() {
            self.leave_transfers(slot);
        } else {
            let arrived = self.sequences[slot].arrived;
            self.waiting.remove(slot, &self.sequences[slot]);
            self.during_pass.overtaken.retain(|&(s, _)| s != slot);
            if let Some(pipeline) = &mut self.pipeline {
                pipeline.drop_token(slot);
            }
            if let Some(at) = self
                .during_pass
                .arrived
                .iter()
                .position(|&at| at == arrived)
            {
                self.during_pass.arrived.remove(at);
            }
        }
        self.remove(slot);
        true
    }

    /// From now on, or no more, no waiting sequence is admitted. Those that run go on; one that is preempted waits.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Sequences that may run at once.
    #[inline]
    fn running_max(&self) -> u32 {
        if self.paused { 0 } else { self.limits.running }
    }

    /// Begins a pass at `now`, and returns when it ends by the model; `None` if there is nothing to
    /// do. [`finish_pass`](Engine::finish_pass) comes before the next one.
    ///
    /// Running sequences go first, in the order of their admission, then waiting ones, all within
    /// one budget of `max_num_batched_tokens`. A running sequence that finds no free block preempts
    /// the youngest running one (by priority: the lowest, which may be itself; the running ones
    /// behind it are still scheduled). A pass that preempted admits no sequence.
    ///
    /// With `async_scheduling`, the pass that begins was scheduled when the one before it began, and
    /// the one after it is scheduled now: without the tokens of the one that begins. An engine that
    /// had nothing to do schedules both.
    ///
    /// Source: vLLM 0.33, `Scheduler.schedule` in `vllm/v1/core/sched/scheduler.py`,
    /// `vllm/v1/core/sched/async_scheduler.py`, and `EngineCore.step_with_batch_queue`.
    ///
    /// While all that it could run waits for loads from host memory, an engine runs empty passes, as vLLM's
    /// loop does (`EngineCore._process_engine_step`).
    ///
    /// With a pipeline, passes are scheduled until there are as many as it takes, and the oldest one is under way.
    ///
    /// # Panics
    /// If a pass is under way.
    pub fn begin_pass(&mut self, now: SimTime) -> Option<SimTime> {
        assert!(self.is_between_passes(), "finish_pass() comes first");
        if self.pipeline.is_some() {
            return self.begin_pipelined(now);
        }
        let plan = match self.next.take() {
            Some(plan) => plan,
            None => match self.plan_first(now) {
                Some(plan) => plan,
                None if self.awaits_host_loads() => Plan::default(),
                None => return None,
            },
        };
        let tokens = plan.load.tokens();
        assert!(tokens <= u64::from(self.limits.budget));
        let end = if plan.load.is_empty() {
            now + POLL_NS
        } else {
            self.note_range(&plan.load);
            self.counts.passes += 1;
            now + (plan.before_ns + self.timing.step_ns(&plan.load))
        };
        self.pass = Some(Pass {
            start: now,
            end,
            load: plan.load,
            chunks: plan.chunks,
            contexts: plan.contexts,
        });
        if self.limits.ahead {
            let next = self.plan::<true>(now);
            self.next = (!next.load.is_empty()).then_some(next);
        }
        Some(end)
    }

    /// Caches the blocks that are full with `target` tokens and are not cached yet.
    fn cache_full(&mut self, slot: u32, target: u32) {
        let sequence = &mut self.sequences[slot];
        self.cache.cache_full(sequence, target, &self.output);
    }

    /// Forgets a sequence that is in neither queue any more.
    fn remove(&mut self, slot: u32) {
        self.leave_inputs(slot);
        let sequence = self.sequences.remove(slot);
        self.by_id.remove(&sequence.request.id);
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.has_left = true;
        }
        self.cache.release(sequence.table);
    }

    /// Applies the pass begun last, and fills `out` with what it gave.
    ///
    /// # Panics
    /// If no pass is under way.
    pub fn finish_pass(&mut self, out: &mut PassOutput) {
        if self.pipeline.is_some() {
            self.apply_pass::<true, false>(out);
        } else if self.encoder.is_some() {
            self.apply_pass::<false, true>(out);
        } else {
            self.apply_pass::<false, false>(out);
        }
    }

    fn apply_pass<const PIPELINED: bool, const ENCODES: bool>(&mut self, out: &mut PassOutput) {
        let pass = self.pass.take().expect("begin_pass() comes first");
        let mut flight = if PIPELINED {
            self.take_flight()
        } else {
            pipeline::Chunks::default()
        };
        out.clear();
        (out.start, out.end) = (pass.start, pass.end);
        std::mem::swap(&mut out.arrived, &mut self.during_pass.arrived);
        let mut running = std::mem::take(&mut self.running);
        // Tokens in addition to the first one of each sequence.
        let (mut gone, mut token_count, mut further) = (0, 0, 0);
        let lists_tokens = self.lists_tokens;
        for r in &mut running {
            if r.gone {
                gone += 1;
                continue;
            }
            if PIPELINED {
                let tokens = flight.tokens_of(r.slot);
                r.scheduled -= tokens;
                r.computed += tokens;
            } else {
                let tokens = std::mem::replace(&mut r.scheduled, std::mem::take(&mut r.ahead));
                r.computed += tokens;
                if ENCODES && tokens > 0 {
                    self.leave_passed_inputs(r);
                }
            }
            // A part of its prompt; or it was not in the pass.
            if r.computed < r.len {
                continue;
            }
            if r.computed > r.len {
                let (tokens, ends) = self.verify(r, out);
                token_count += tokens;
                further += tokens - 1;
                gone += usize::from(ends);
                continue;
            }
            // If it is in the pass that comes next, that has cached its blocks.
            if r.scheduled == 0 && self.limits.ahead {
                self.cache_full(r.slot, r.computed);
            }
            r.len += 1;
            token_count += 1;
            let ends = r.len == r.end_len;
            let mut stops = false;
            if lists_tokens || r.stops {
                let position = r.len - 1 - r.prompt_len;
                let token = if ends && r.natural_end {
                    self.output.eos
                } else {
                    self.output.token(r.seed, position)
                };
                if lists_tokens {
                    out.tokens.push(r.id, token);
                }
                stops = r.stops && stops_at(&self.sequences[r.slot], position, token);
            }
            if !r.decoding {
                r.decoding = true;
                self.note_first(r, pass.start, out);
            }
            if ends || stops {
                gone += 1;
                self.finish(r, stops, out);
            }
        }
        self.running = running;
        if PIPELINED {
            self.reuse_flight(flight);
        }
        out.token_count = token_count;
        while let Some((slot, drafts)) = self.during_pass.overtaken.pop() {
            further += self.deliver_overtaken(slot, drafts, pass.start, out) - 1;
        }
        out.sequence_count = out.token_count - further;
        if gone > 0 {
            self.running.retain(|r| !r.gone);
        }
        self.take_kv(&mut out.kv);
        self.report(&pass, &mut out.fpm);
        let queued = self.running.len() + self.waiting.len() as usize;
        assert_eq!(queued + self.transfers.loading as usize, self.by_id.len());
    }

    /// Notes the first token of the sequence, unless it has had one: before it was preempted, or from
    /// another engine.
    fn note_first(&self, r: &RunningSequence, start: SimTime, out: &mut PassOutput) {
        let sequence = &self.sequences[r.slot];
        let position = r.len - 1 - r.prompt_len;
        if position == sequence.request.params.answered {
            out.first.push(first_token(r.id, sequence, start));
        }
    }

    fn finish(&mut self, r: &mut RunningSequence, stops: bool, out: &mut PassOutput) {
        r.gone = true;
        let sequence = &self.sequences[r.slot];
        let reason = if stops || r.natural_end {
            FinishReason::Stop
        } else {
            FinishReason::Length
        };
        out.finished.push(Finished {
            id: r.id,
            reason,
            usage: Usage {
                prompt_tokens: r.prompt_len,
                cached_tokens: sequence.cached_tokens,
                output_tokens: r.len - r.prompt_len,
                preemptions: sequence.preemptions,
            },
        });
        if sequence.transfer == TransferState::Queued(Role::Prefill) {
            let table = std::mem::take(&mut self.sequences[r.slot].table);
            self.transfers.held.insert(r.id, table);
        }
        self.leave_flights(r.slot);
        self.remove(r.slot);
    }

    /// Gives a sequence that was preempted during the pass the tokens that the pass computed, which may end it: one, and
    /// those of its `drafts` that are accepted. Returns how many.
    fn deliver_overtaken(
        &mut self,
        slot: u32,
        drafts: u32,
        start: SimTime,
        out: &mut PassOutput,
    ) -> u32 {
        let before = self.sequences[slot].tokens();
        let sequence = &self.sequences[slot];
        let (id, begun) = (sequence.request.id, sequence.has_begun());
        let answered = Answered {
            seed: sequence.request.seed,
            slot,
            outputs: sequence.outputs,
            end_outputs: sequence.end_outputs,
            natural_end: sequence.natural_end,
            stops: !sequence.request.params.stop_token_ids.is_empty(),
        };
        let (tokens, stops) = self.answer(id, &answered, drafts, out);
        let sequence = &mut self.sequences[slot];
        sequence.outputs += tokens;
        let ends = sequence.outputs == sequence.end_outputs;
        out.token_count += tokens;
        let sequence = &self.sequences[slot];
        if !begun {
            out.first.push(first_token(id, sequence, start));
        }
        self.waiting.grew(slot, begun, before, sequence);
        if ends || stops {
            let reason = if stops || sequence.natural_end {
                FinishReason::Stop
            } else {
                FinishReason::Length
            };
            let usage = Usage {
                prompt_tokens: sequence.request.prompt.len(),
                cached_tokens: sequence.cached_tokens,
                output_tokens: sequence.outputs,
                preemptions: sequence.preemptions,
            };
            out.finished.push(Finished { id, reason, usage });
            self.waiting.remove(slot, &self.sequences[slot]);
            self.remove(slot);
        }
        tokens
    }

    fn report(&mut self, pass: &Pass, fpm: &mut ForwardPassMetrics) {
        self.heartbeat(fpm);
        if pass.load.is_empty() {
            return; // it ran nothing
        }
        fpm.wall_time_s = pass.end.since(pass.start) as f64 / 1e9;
        fpm.scheduled_prefill = prefill_stats(&pass.chunks);
        fpm.scheduled_prefill_kv_tokens = pass.load.prefill_context - pass.load.prefill_tokens;
        fpm.scheduled_decode = decode_stats(&pass.contexts);
    }

    /// Whether passes list their output tokens (by default they do). A simulator needs
    /// no more than their number.
    pub fn list_tokens(&mut self, on: bool) {
        self.lists_tokens = on;
    }

    /// Sets which changes of the KV cache deltas list (all by default). A driver that reads
    /// [`published_prefix`](Engine::published_prefix) does not need all.
    pub fn list_kv(&mut self, which: KvChanges) {
        self.cache.list_changes(which);
    }

    /// How many leading ones of `blocks` the KV cache held when its changes were last taken
    /// ([`finish_pass`](Engine::finish_pass), [`take_kv`](Engine::take_kv)): the hit that a router finds
    /// after all of them. A few look-ups, for a prompt of any length.
    pub fn published_prefix(&self, blocks: &[BlockHash]) -> u32 {
        self.cache.pool().published_prefix(blocks)
    }

    /// True between `begin_pass` and `finish_pass`.
    pub fn in_pass(&self) -> bool {
        self.pass.is_some()
    }

    /// True if no sequence is running or waiting, and no pass is scheduled. (One may still be under
    /// way, if all its sequences were aborted.)
    pub fn is_idle(&self) -> bool {
        let next = self.next.is_some() || self.pipeline.as_ref().is_some_and(|p| p.is_busy());
        self.by_id.is_empty() && !next
    }

    /// Whether this engine keeps blocks in host memory.
    pub fn has_host_tier(&self) -> bool {
        self.cache.host().is_some()
    }

    /// The disk below its host memory, if there is one.
    pub fn disk(&self) -> Option<&DiskTier> {
        self.cache.host().and_then(HostTier::disk)
    }

    /// Whether each pass is scheduled when the one before it begins (`async_scheduling`).
    pub fn schedules_ahead(&self) -> bool {
        self.limits.ahead
    }

    /// Whether the budget of a pass may end before the sequences that decode do. Else each of them
    /// gets a token in every pass from its first on, until it ends or is preempted.
    pub fn may_leave_out(&self) -> bool {
        // vLLM wants `max_num_batched_tokens` to be no less than `max_num_seqs`. A sequence that is
        // in prefill still is the last that runs, unless its part of the budget is limited.
        let each = 1 + self.speculation.drafts;
        self.limits.budget < self.running_max().saturating_mul(each)
            || self.limits.long_prefill != u32::MAX
            || self.pipeline.is_some()
    }

    /// The engine's state in numbers; O(1).
    pub fn stats(&self) -> Stats {
        Stats {
            running: to_u32(self.by_id.len()) - self.waiting.len() - self.transfers.loading,
            waiting: self.waiting.len(),
            used_blocks: self.cache.pool().used(),
            free_blocks: self.cache.pool().free(),
            total_blocks: self.cache.pool().total(),
            cached_blocks: self.cache.pool().cached(),
            prefix_query_tokens: self.counts.prefix_query_tokens,
            prefix_hit_tokens: self.counts.prefix_hit_tokens,
            host_query_tokens: match self.cache.host() {
                Some(_) => self.counts.prefix_query_tokens - self.counts.prefix_hit_tokens,
                None => 0,
            },
            host_hit_tokens: self.counts.host_hit_tokens,
            disk_hit_tokens: self.counts.disk_hit_tokens,
            peer_hit_tokens: self.peers.hit_tokens,
            preemptions: self.counts.preemptions,
            drafts: self.speculation.verified,
            draft_tokens: self.speculation.draft_tokens,
            accepted_tokens: self.speculation.accepted_tokens,
            passes: self.counts.passes,
            extrapolated_passes: self.counts.extrapolated_passes,
        }
    }

    /// Longest sequence (prompt plus answer) that this engine can hold, tokens: `max_model_len`, or
    /// less where the KV cache (or, without chunked prefill, the budget of a pass) is smaller.
    pub fn max_len(&self) -> u32 {
        self.limits.max_len
    }

    /// Fills `out` with `Cleared` and every block held, for a consumer that lost a delta. O(cached
    /// blocks).
    ///
    /// It takes no number: `sequence` is that of the next delta to come, which may repeat changes
    /// that the snapshot already has; applied in order they do no harm.
    pub fn kv_snapshot(&self, out: &mut KvDelta) {
        self.cache.snapshot(out);
    }

    /// Takes the changes of the KV cache that no delta has published yet; false, and no number taken, if
    /// there are none. `finish_pass` does this too.
    pub fn take_kv(&mut self, out: &mut KvDelta) -> bool {
        self.cache.take_delta(out)
    }

    /// From now on, or no more, notes the tokens of blocks that are stored, for
    /// [`take_stored_blocks`](Engine::take_stored_blocks). An engine that notes them makes no jumps.
    pub fn note_stored_blocks(&mut self, on: bool) {
        self.cache.note_tokens(on);
    }

    /// Takes the notes on the blocks that the delta taken last stores. To be called after each
    /// `finish_pass` and `take_kv`.
    pub fn take_stored_blocks(&mut self, out: &mut StoredBlocks) {
        self.cache.take_tokens(out);
    }

    /// Forgets every cached block. False, with nothing changed, while sequences hold blocks, as in
    /// vLLM.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.cache.reset()
    }

    /// Fills `out` with a record that has the next number, no pass, and what waits: an idle
    /// heartbeat.
    pub fn heartbeat(&mut self, out: &mut ForwardPassMetrics) {
        *out = ForwardPassMetrics {
            rank: self.rank,
            counter: self.counts.fpm,
            queued_prefill: prefill_stats(self.waiting.prefill()),
            queued_decode: decode_stats(self.waiting.decode()),
            ..ForwardPassMetrics::default()
        };
        self.counts.fpm += 1;
    }

    /// Checks every invariant in O(blocks + sequences). For tests.
    #[doc(hidden)]
    pub fn audit(&self) {
        let mut running = 0;
        for (slot, sequence) in self.sequences.iter() {
            assert_eq!(self.by_id.get(&sequence.request.id), Some(&slot));
            running += u32::from(sequence.running);
            let holds = sequence.running || sequence.transfer.is_on_its_way();
            assert!(holds || sequence.table.is_empty());
        }
        let tables = self.sequences.iter().map(|(_, sequence)| &sequence.table);
        self.cache
            .pool()
            .audit(tables.chain(self.transfers.held.values()));
        let stats = self.stats();
        assert_eq!(stats.free_blocks + stats.used_blocks, stats.total_blocks);
        assert_eq!(running, stats.running);
        assert!(running <= self.limits.running);
        for r in self.running.iter().filter(|r| !r.gone) {
            let blocks = self.sequences[r.slot].table.len();
            assert_eq!(blocks * self.limits.block_size, r.capacity);
            assert!(r.computed < r.len && r.len < r.end_len && r.computed <= r.capacity);
        }
        let waiting = self.waiting.prefill().count + self.waiting.decode().count;
        assert_eq!(waiting, stats.waiting);
    }
}

fn prefill_stats(sums: &RunningStats) -> PrefillStats {
    PrefillStats {
        requests: sums.count,
        tokens: sums.tokens,
        length_variance: sums.variance(),
    }
}

fn decode_stats(sums: &RunningStats) -> DecodeStats {
    DecodeStats {
        requests: sums.count,
        kv_tokens: sums.tokens,
        kv_tokens_variance: sums.variance(),
    }
}
