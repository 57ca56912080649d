//! What a pass hands back.

use slipstream_base::{FinishReason, ForwardPassMetrics, KvDelta, RequestId, SimTime, TokenId};

/// Results of one pass. A driver keeps one and hands it in again and again: its vectors are
/// cleared, never shrunk, so that a steady pass allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct PassOutput {
    /// When the pass began.
    pub start: SimTime,
    /// When it ended, by the model: the time of every token in it.
    pub end: SimTime,
    /// Output tokens of the pass, at most one a sequence.
    pub token_count: u32,
    /// Those tokens, in the order in which the engine ran their sequences; empty if the engine was
    /// told not to list them ([`Engine::list_tokens`](crate::Engine::list_tokens)).
    pub tokens: Vec<(RequestId, TokenId)>,
    /// Sequences whose first token came in this pass, in the same order.
    pub first: Vec<FirstToken>,
    /// Sequences whose last token came in this pass, in the same order.
    pub finished: Vec<Finished>,
    /// How the KV cache changed since the last delta. Publish it unless `ops` is empty: an empty
    /// delta takes no number.
    pub kv: KvDelta,
    /// What the pass worked on.
    pub fpm: ForwardPassMetrics,
    /// When sequences joined the waiting queue between the begin and the end of the pass, in order.
    /// Those of them that were aborted before its end are left out.
    pub arrived: Vec<SimTime>,
}

impl PassOutput {
    pub(crate) fn clear(&mut self) {
        self.token_count = 0;
        self.tokens.clear();
        self.first.clear();
        self.finished.clear();
        self.kv.ops.clear();
        self.arrived.clear();
    }
}

/// A sequence has its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstToken {
    /// Whose.
    pub id: RequestId,
    /// Prompt tokens found in the KV cache when it was first admitted (the prefix hit).
    pub cached_tokens: u32,
    /// When it was added.
    pub arrived: SimTime,
    /// When it left the waiting queue for the first time.
    pub admitted: SimTime,
    /// When the pass that computed the token began; it ended at [`PassOutput::end`].
    pub first_pass_start: SimTime,
}

/// A sequence has ended. It is no longer known to the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Whose.
    pub id: RequestId,
    /// Why. Never `Abort`: who aborts knows.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
}

/// What a sequence took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those of them that were found in the KV cache at first admission.
    pub cached_tokens: u32,
    /// Tokens generated, the end-of-sequence token included.
    pub output_tokens: u32,
    /// Times that it was preempted (and computed again).
    pub preemptions: u32,
}

/// An engine's state in numbers; counters run since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences in the running queue.
    pub running: u32,
    /// Sequences in the waiting queue, preempted ones included.
    pub waiting: u32,
    /// Blocks held by sequences.
    pub used_blocks: u32,
    /// Blocks that can be allocated; those that cache something are evicted for it.
    pub free_blocks: u32,
    /// All blocks.
    pub total_blocks: u32,
    /// Distinct blocks that can be hit.
    pub cached_blocks: u32,
    /// Prompt tokens looked up at first admissions (counter).
    pub prefix_query_tokens: u64,
    /// Those of them that were found (counter).
    pub prefix_hit_tokens: u64,
    /// Preemptions (counter).
    pub preemptions: u64,
    /// Passes begun (counter).
    pub passes: u64,
    /// Those of them whose length the model of step times had to extrapolate (counter).
    pub extrapolated_passes: u64,
}
