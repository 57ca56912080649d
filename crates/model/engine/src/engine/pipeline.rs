//! Pipeline parallelism: several passes are under way, each in another stage.
//!
//! Source: vLLM 0.33, `EngineCore.step_with_batch_queue` (passes are scheduled until the queue is full, then the oldest
//! one's tokens are awaited; passes without work take a place in the queue, too, and requests that left call for one) and
//! `VllmConfig.max_concurrent_batches`.

use std::collections::VecDeque;

use slipstream_base::width::round_u64;
use slipstream_base::{RequestId, SimTime};
use slipstream_config::cluster::PipelineConfig;

use super::schedule::Plan;
use super::sequence::RunningSequence;
use super::{Engine, POLL_NS, Pass};
use crate::waiting::RunningStats;

/// The stages, and the passes in them.
pub(super) struct Pipeline {
    /// Each stage's share of the time of a pass, and when its last pass leaves it.
    stages: Vec<(f64, SimTime)>,
    send_ns_per_token: f64,
    latency_ns: f64,
    /// Most passes at once.
    depth: usize,
    /// Passes from one that gives a sequence a token until the next one that may; 0: none before that token is known.
    stagger: u32,
    /// Passes scheduled so far, those without work included.
    launched: u64,
    /// Passes that have left.
    landed: u64,
    /// Passes in the stages, oldest first.
    flights: VecDeque<Flight>,
    spare: Vec<Vec<Chunk>>,
    /// Sequences have left since the last pass was scheduled: workers are to be told so by another one.
    pub(super) has_left: bool,
    /// Of `flights`, those that the last `begin_pass` scheduled. For tests.
    fresh: usize,
}

/// A pass in the pipeline.
struct Flight {
    plan: Plan,
    /// When it enters the first stage.
    start: SimTime,
    /// When it leaves the last one.
    end: SimTime,
    /// Its sequences in the order in which they run, without those that left or were preempted since.
    chunks: Vec<Chunk>,
    /// Slots of sequences that were preempted since, and that it gives a token.
    overtaken: Vec<u32>,
}

/// Part of a sequence in a pass.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    slot: u32,
    /// Tokens computed before.
    before: u32,
    tokens: u32,
}

/// The parts of a pass that ends, to be looked up in the order of the running queue.
#[derive(Default)]
pub(super) struct Chunks {
    chunks: Vec<Chunk>,
    at: usize,
}

impl Chunks {
    /// Tokens of the sequence in the pass.
    pub(super) fn tokens_of(&mut self, slot: u32) -> u32 {
        match self.chunks.get(self.at) {
            Some(chunk) if chunk.slot == slot => {
                self.at += 1;
                chunk.tokens
            }
            _ => 0,
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low bits are wanted")]
fn low(number: u64) -> u32 {
    number as u32
}

impl Pipeline {
    pub(super) fn new(config: &PipelineConfig, ahead: bool) -> Pipeline {
        let all: u32 = config.layers.iter().sum();
        let share = |&layers: &u32| f64::from(layers) / f64::from(all.max(1));
        let stages = config.layers.iter().map(share);
        Pipeline {
            stages: stages.map(|share| (share, SimTime::ZERO)).collect(),
            send_ns_per_token: config.send_ns_per_token,
            latency_ns: config.latency_ns,
            depth: config.layers.len() + usize::from(ahead),
            stagger: if ahead { config.stages() } else { 0 },
            launched: 0,
            landed: 0,
            flights: VecDeque::new(),
            spare: Vec::new(),
            has_left: false,
            fresh: 0,
        }
    }

    pub(super) fn clear(&mut self) {
        self.flights.clear();
        self.landed = self.launched;
        for (_, free) in &mut self.stages {
            *free = SimTime::ZERO;
        }
    }

    /// Number of the pass that is being scheduled, or comes next, modulo 2^32.
    pub(super) fn step(&self) -> u32 {
        low(self.launched + 1)
    }

    fn has_room(&self) -> bool {
        self.flights.len() < self.depth
    }

    /// When the token that a sequence is due is known.
    fn token_at(&self, r: &RunningSequence) -> Option<SimTime> {
        let number = r.eligible.wrapping_sub(self.stagger);
        let at = number.wrapping_sub(low(self.landed + 1));
        Some(self.flights.get(at as usize)?.end)
    }

    /// Whether the pass that is being scheduled leaves out a running sequence.
    ///
    /// Source: vLLM, `Scheduler.schedule` (a sequence without a known token that was not computed has nothing to compute)
    /// and `AsyncScheduler._update_after_schedule` (`next_decode_eligible_step`).
    pub(super) fn leaves_out(&self, r: &RunningSequence) -> bool {
        match self.stagger {
            0 => r.will_produce_token(),
            // `step < eligible`, modulo 2^32.
            _ => self.step().wrapping_sub(r.eligible) > u32::MAX / 2,
        }
    }

    /// Whether pass `number` has not left yet.
    pub(super) fn is_before_end_of(&self, number: u64) -> bool {
        number > self.landed
    }

    /// Whether a pass that computes something is in it.
    pub(super) fn is_busy(&self) -> bool {
        self.flights.iter().any(|f| !f.plan.load.is_empty())
    }

    /// Takes a sequence that is preempted out of its passes. The last of them gives it a token, if it `delivers` and one is
    /// due. Returns the number of that pass; 0 if it is in none.
    pub(super) fn preempt(&mut self, r: &RunningSequence, delivers: bool) -> u64 {
        let of_it = |f: &Flight| f.chunks.iter().any(|c| c.slot == r.slot);
        let Some(last) = self.flights.iter().rposition(of_it) else {
            return 0;
        };
        if delivers && r.will_produce_token() {
            self.flights[last].overtaken.push(r.slot);
        }
        self.forget(r.slot);
        self.landed + 1 + last as u64
    }

    /// Takes a sequence out of its passes.
    fn forget(&mut self, slot: u32) {
        for flight in &mut self.flights {
            if let Some(at) = flight.chunks.iter().position(|c| c.slot == slot) {
                flight.chunks.remove(at);
            }
        }
    }

    /// The token that a preempted sequence is due is not wanted any more.
    pub(super) fn drop_token(&mut self, slot: u32) {
        for flight in &mut self.flights {
            flight.overtaken.retain(|&s| s != slot);
        }
    }

    /// Sends a pass of `step_ns` through the stages, `tokens` of which cross each border. Returns when it enters the first
    /// one, and when it leaves the last one.
    fn pass_through(&mut self, now: SimTime, step_ns: u64, tokens: u64) -> (SimTime, SimTime) {
        let send_ns = round_u64(self.latency_ns + self.send_ns_per_token * tokens as f64);
        let mut start = None;
        let mut at = now;
        // Shares of whole nanoseconds that add up to the step.
        let (mut share, mut done_ns) = (0.0, 0);
        let last = self.stages.len() - 1;
        for (stage, (part, free)) in self.stages.iter_mut().enumerate() {
            let begin = at.max(*free);
            start.get_or_insert(begin);
            share += *part;
            let until_ns = if stage == last {
                step_ns
            } else {
                round_u64(share * step_ns as f64).min(step_ns)
            };
            *free = begin + (until_ns - done_ns);
            done_ns = until_ns;
            at = *free;
            if stage < last {
                at += send_ns;
            }
        }
        (start.unwrap_or(now), at)
    }
}

impl Engine {
    /// [`begin_pass`](Engine::begin_pass) of a pipeline.
    pub(super) fn begin_pipelined(&mut self, now: SimTime) -> Option<SimTime> {
        self.pipeline().fresh = 0;
        loop {
            let mut gave_way = false;
            let has_left = std::mem::take(&mut self.pipeline().has_left);
            if has_left || !self.by_id.is_empty() {
                let plan = self.plan::<true>(now);
                gave_way = plan.preempted;
                let works = !plan.load.is_empty();
                self.launch(now, plan);
                if self.pipeline().has_room() && (works || !self.by_id.is_empty()) {
                    continue;
                }
            }
            let pipeline = self.pipeline();
            let first = pipeline.flights.front()?;
            if !first.plan.load.is_empty() {
                let pass = Pass {
                    start: first.start,
                    end: first.end,
                    load: first.plan.load,
                    chunks: first.plan.chunks,
                    contexts: first.plan.contexts,
                };
                self.pass = Some(pass);
                return Some(pass.end);
            }
            // A pass without work leaves at once.
            if !pipeline.is_busy() && !gave_way {
                pipeline.flights.clear();
                pipeline.landed = pipeline.launched;
                if !self.awaits_host_loads() {
                    // Nothing runs before blocks come or are released.
                    assert!(self.by_id.is_empty() || self.hands_over());
                    return None;
                }
                self.launch(now, Plan::default());
                let end = now + POLL_NS;
                self.pass = Some(Pass {
                    start: now,
                    end,
                    load: Plan::default().load,
                    chunks: RunningStats::default(),
                    contexts: RunningStats::default(),
                });
                return Some(end);
            }
            pipeline.flights.pop_front();
            pipeline.landed += 1;
        }
    }

    fn pipeline(&mut self) -> &mut Pipeline {
        self.pipeline.as_mut().expect("the engine is a pipeline")
    }

    /// Puts a pass that was just scheduled into the pipeline.
    fn launch(&mut self, now: SimTime, plan: Plan) {
        let load = plan.load;
        let mut step_ns = 0;
        if !load.is_empty() {
            self.note_range(&load);
            self.counts.passes += 1;
            step_ns = plan.before_ns + self.timing.step_ns(&load);
        }
        let Some(pipeline) = &mut self.pipeline else {
            return;
        };
        let mut ready = now;
        let mut chunks = pipeline.spare.pop().unwrap_or_default();
        let again = pipeline.step().wrapping_add(pipeline.stagger);
        for r in &mut self.running {
            let tokens = std::mem::take(&mut r.ahead);
            if tokens > 0 {
                // The first stage needs the token that it computes.
                if r.will_produce_token()
                    && let Some(known) = pipeline.token_at(r)
                {
                    ready = ready.max(known);
                }
                let before = r.computed + r.scheduled;
                let slot = r.slot;
                chunks.push(Chunk {
                    slot,
                    before,
                    tokens,
                });
                r.scheduled += tokens;
                if r.will_produce_token() {
                    r.eligible = again;
                }
            }
        }
        let (start, end) = match step_ns {
            0 => (now, now),
            _ => pipeline.pass_through(ready, step_ns, load.tokens()),
        };
        pipeline.launched += 1;
        pipeline.fresh += 1;
        pipeline.flights.push_back(Flight {
            plan,
            start,
            end,
            chunks,
            overtaken: Vec::new(),
        });
    }

    /// Takes the pass under way out of the pipeline.
    pub(super) fn take_flight(&mut self) -> Chunks {
        let pipeline = self.pipeline.as_mut().expect("the engine is a pipeline");
        let Some(flight) = pipeline.flights.pop_front() else {
            return Chunks::default(); // the engine was restarted
        };
        pipeline.landed += 1;
        let slots = flight.overtaken.iter();
        self.during_pass
            .overtaken
            .extend(slots.map(|&slot| (slot, 0)));
        Chunks {
            chunks: flight.chunks,
            at: 0,
        }
    }

    /// Keeps the memory of a pass that was applied for another one.
    pub(super) fn reuse_flight(&mut self, mut chunks: Chunks) {
        if let Some(pipeline) = &mut self.pipeline {
            chunks.chunks.clear();
            pipeline.spare.push(chunks.chunks);
        }
    }

    /// Takes a sequence that leaves out of the passes in the pipeline, if there is one.
    pub(super) fn leave_flights(&mut self, slot: u32) {
        if let Some(pipeline) = &mut self.pipeline {
            pipeline.forget(slot);
        }
    }

    /// With a pipeline: of each pass that the last `begin_pass` scheduled, the sequences in order, their tokens computed
    /// before, and those in it. For tests.
    #[doc(hidden)]
    pub fn launched(&self) -> Vec<Vec<(RequestId, u32, u32)>> {
        let Some(pipeline) = &self.pipeline else {
            return Vec::new();
        };
        let fresh = pipeline.fresh.min(pipeline.flights.len());
        let flights = pipeline.flights.iter().skip(pipeline.flights.len() - fresh);
        let chunks = flights.map(|f| {
            let of = |c: &Chunk| (self.sequences[c.slot].request.id, c.before, c.tokens);
            f.chunks.iter().map(of).collect()
        });
        chunks.collect()
    }
}
