//! Forward-pass metrics (FPM): one record per step and rank.

use crate::ids::RankId;

/// Work of one forward pass, and the state of the queues after it.
///
/// Order: by `counter`, which counts the passes (and idle heartbeats) of a rank. A gap means that a
/// full queue dropped records. Fields and their names on the wire follow the schema that planners
/// for vLLM read (version 1); variances are population variances.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForwardPassMetrics {
    /// The rank that ran the pass.
    pub rank: RankId,
    /// Number of this record among those of the rank, from 0.
    pub counter: u64,
    /// Wall time of the pass, s: modelled if the engine is a model; 0 in a heartbeat.
    pub wall_time_s: f64,
    /// Prefill sequences in the pass.
    pub scheduled_prefill: PrefillStats,
    /// Tokens of scheduled prefills that were already in the KV cache.
    pub scheduled_prefill_kv_tokens: u64,
    /// Decode sequences in the pass.
    pub scheduled_decode: DecodeStats,
    /// Waiting prefill sequences.
    pub queued_prefill: PrefillStats,
    /// Waiting decode sequences (preempted ones).
    pub queued_decode: DecodeStats,
}

/// Totals over prefill sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillStats {
    /// Sequences.
    pub requests: u32,
    /// Tokens to compute: in this pass if scheduled, in total if queued.
    pub tokens: u64,
    /// Variance of those tokens over the sequences.
    pub length_variance: f64,
}

/// Totals over decode sequences. The schema has no count of output tokens: a sequence may get several in
/// a pass, so `requests` is not that count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeStats {
    /// Sequences, each once however many tokens it gets in the pass.
    pub requests: u32,
    /// Tokens of context before the pass, and those that the pass computes.
    pub kv_tokens: u64,
    /// Variance of that context over the sequences.
    pub kv_tokens_variance: f64,
}
