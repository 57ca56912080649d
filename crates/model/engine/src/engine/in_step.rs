//! Ranks that begin every pass together: those that share experts wait for each other in each pass.
//!
//! Source: vLLM 0.33, `DPEngineCoreProc.run_busy_loop` (an iteration that schedules nothing runs a dummy batch while any rank
//! has requests) and `Worker.execute_dummy_batch` (its tokens: one, and with speculative decoding those of a draft).

use slipstream_base::SimTime;

use super::schedule::Plan;
use super::{Engine, Pass};
use crate::timing::StepLoad;

impl Engine {
    /// Begins a pass at `now`, as all ranks that share experts do at this time, and returns when it would end by itself. A rank
    /// that has nothing to do runs a dummy batch. [`wait_until`](Engine::wait_until) follows, and
    /// [`finish_pass`](Engine::finish_pass) when the slowest rank has ended.
    ///
    /// `first`: the ranks had paused. With `async_scheduling` a rank that ran a dummy batch has decided about the next pass
    /// already when that began, as all have.
    ///
    /// # Panics
    /// If a pass is under way.
    pub fn begin_in_step(&mut self, now: SimTime, first: bool) -> SimTime {
        let decided = self.limits.ahead && !first && self.next.is_none();
        if !decided && let Some(end) = self.begin_pass(now) {
            let dummy_end = now + self.dummy_ns();
            return match &mut self.pass {
                // It waits for loads.
                Some(pass) if pass.load.is_empty() => {
                    pass.end = dummy_end;
                    dummy_end
                }
                _ => end,
            };
        }
        assert!(self.pass.is_none(), "finish_pass() comes first");
        let end = now + self.dummy_ns();
        let nothing = Plan::default();
        self.pass = Some(Pass {
            start: now,
            end,
            load: nothing.load,
            chunks: nothing.chunks,
            contexts: nothing.contexts,
        });
        if self.limits.ahead {
            let next = self.plan::<true>(now);
            self.next = (!next.load.is_empty()).then_some(next);
        }
        end
    }

    /// Tokens of the pass under way, those of a dummy batch included.
    pub fn tokens_in_step(&self) -> u64 {
        let tokens = self.pass.as_ref().map_or(0, |pass| pass.load.tokens());
        tokens.max(1 + u64::from(self.speculation.drafts))
    }

    /// The passes of all ranks that have begun have `all` tokens together. Returns when this rank's would end by itself.
    pub fn meet(&mut self, all: u64) -> Option<SimTime> {
        let pass = self.pass.as_mut()?;
        if !pass.load.is_empty() {
            // The time before its layers is part of its length.
            let before_ns =
                (pass.end.since(pass.start)).saturating_sub(self.timing.step_ns(&pass.load));
            pass.end = pass.start + (before_ns + self.timing.step_ns_in_group(&pass.load, all));
        }
        Some(pass.end)
    }

    /// The pass under way ends at `end`, with that of the slowest rank.
    pub fn wait_until(&mut self, end: SimTime) {
        if let Some(pass) = &mut self.pass {
            pass.end = end;
        }
    }

    /// Length of a dummy batch, ns.
    fn dummy_ns(&mut self) -> u64 {
        let mut load = StepLoad::default();
        load.add_decode(0, 1);
        load.draft_tokens = self.speculation.drafts.into();
        self.timing.step_ns(&load)
    }
}
