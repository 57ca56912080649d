//! Forward-pass metrics (FPM): one record a pass and rank.

use crate::ids::RankId;

/// What one forward pass worked on, and what was left in the queues.
///
/// Order: by `counter`, per rank, which counts passes (and idle heartbeats); a gap says that a
/// full queue dropped records. Fields and their names on the wire follow the schema that planners
/// for vLLM read (version 1); variances are population variances.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ForwardPassMetrics {
    /// Who ran the pass.
    pub rank: RankId,
    /// Number of this record among those of the rank, from 0.
    pub counter: u64,
    /// Wall time of the pass, s: modelled where the engine is a model; 0 in a heartbeat.
    pub wall_time_s: f64,
    /// Prefill sequences in the pass.
    pub scheduled_prefill: PrefillStats,
    /// Tokens of scheduled prefills that were already in the KV cache.
    pub scheduled_prefill_kv_tokens: u64,
    /// Decode sequences in the pass.
    pub scheduled_decode: DecodeStats,
    /// Prefill sequences that wait.
    pub queued_prefill: PrefillStats,
    /// Decode sequences that wait (preempted ones).
    pub queued_decode: DecodeStats,
}

/// Sums over prefill sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrefillStats {
    /// Sequences.
    pub requests: u32,
    /// Tokens to compute: of this pass if scheduled, in all if queued.
    pub tokens: u64,
    /// Variance of those tokens over the sequences.
    pub length_variance: f64,
}

/// Sums over decode sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeStats {
    /// Sequences.
    pub requests: u32,
    /// Tokens of context that they attend to.
    pub kv_tokens: u64,
    /// Variance of that context over the sequences.
    pub kv_tokens_variance: f64,
}
