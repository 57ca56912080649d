//! The scheduler.

use slipstream_base::cluster::EngineConfig;
use slipstream_base::{EngineRequest, ForwardPassMetrics, KvDelta, RankId, RequestId, SimTime};

use crate::answer::OutputModel;
use crate::error::{EngineError, Refusal};
use crate::output::{PassOutput, Stats};
use crate::timing::StepTime;

/// One rank of one engine: its scheduler and its KV cache.
pub struct Engine {
    rank: RankId,
    timing: Box<dyn StepTime>,
    output: OutputModel,
    stats: Stats,
}

#[allow(clippy::unused_self, unused_variables, clippy::needless_pass_by_value)]
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
        output.check()?;
        let stats = Stats {
            total_blocks: config.num_gpu_blocks,
            ..Stats::default()
        };
        Ok(Engine {
            rank,
            timing,
            output,
            stats,
        })
    }

    /// Takes `request` into the waiting queue.
    ///
    /// # Errors
    /// [`Refusal`] if it can never run; the engine is unchanged then.
    pub fn add(&mut self, now: SimTime, request: EngineRequest) -> Result<(), Refusal> {
        unimplemented!("lands next")
    }

    /// Drops a request at any moment, also between the begin and the end of a pass; its blocks are
    /// free at once. False if the engine does not know it (any more).
    pub fn abort(&mut self, id: RequestId) -> bool {
        unimplemented!("lands next")
    }

    /// Schedules a pass that starts at `now`, and returns when it ends by the model; `None` if there
    /// is nothing to do. [`finish_pass`](Engine::finish_pass) must come before the next one.
    pub fn begin_pass(&mut self, now: SimTime) -> Option<SimTime> {
        unimplemented!("lands next")
    }

    /// Applies the pass begun last, and fills `out` with what it gave.
    pub fn finish_pass(&mut self, out: &mut PassOutput) {
        unimplemented!("lands next")
    }

    /// True between `begin_pass` and `finish_pass`.
    pub fn in_pass(&self) -> bool {
        unimplemented!("lands next")
    }

    /// True if no sequence is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.stats.running == 0 && self.stats.waiting == 0
    }

    /// The engine's state in numbers; costs nothing.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Longest sequence (prompt plus answer) that this engine can hold, tokens: `max_model_len`, or
    /// less where the KV cache is smaller.
    pub fn max_len(&self) -> u32 {
        unimplemented!("lands next")
    }

    /// Fills `out` with `Cleared` and every block held, for a consumer that lost a delta.
    pub fn kv_snapshot(&self, out: &mut KvDelta) {
        unimplemented!("lands next")
    }

    /// Takes the changes of the KV cache that no pass has handed out yet; false if there are none.
    pub fn take_kv(&mut self, out: &mut KvDelta) -> bool {
        unimplemented!("lands next")
    }

    /// Forgets every cached block. False, with nothing changed, while sequences hold blocks, as in
    /// vLLM.
    pub fn reset_prefix_cache(&mut self) -> bool {
        unimplemented!("lands next")
    }

    /// An idle heartbeat: a record with the next number, no pass, and what waits.
    pub fn heartbeat(&mut self, out: &mut ForwardPassMetrics) {
        unimplemented!("lands next")
    }
}
