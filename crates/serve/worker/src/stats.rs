//! Counters and gauges of ranks and engine threads, which other threads read.

use std::sync::atomic::{AtomicBool, Ordering};

use slipstream_base::RankId;
use slipstream_base::count::{Count, Histogram, powers_of_two};
use slipstream_engine::Stats;

/// One rank, as of its last pass or request. Written by its engine thread; cache-line aligned, so
/// that threads do not disturb each other.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct RankStats {
    /// Whose.
    pub rank: RankId,
    /// The rank takes requests: its start-up is over, and its thread lives.
    pub(crate) ready: AtomicBool,
    /// A subscriber missed a KV delta; the thread publishes a snapshot.
    pub(crate) resync: AtomicBool,
    /// Sequences running.
    pub running: Count,
    /// Sequences waiting.
    pub waiting: Count,
    /// Blocks held by sequences.
    pub used_blocks: Count,
    /// Blocks in all.
    pub total_blocks: Count,
    /// Prompt tokens looked up in the prefix cache (counter).
    pub prefix_query_tokens: Count,
    /// Those found (counter).
    pub prefix_hit_tokens: Count,
    /// Host memory, if prompts are looked up there.
    pub host: HostCounts,
    /// Preemptions (counter).
    pub preemptions: Count,
    /// Speculative decoding, if the rank drafts tokens.
    pub speculation: DraftCounts,
    /// Passes (counter).
    pub passes: Count,
    /// Those of them outside the table of step times (counter).
    pub extrapolated_passes: Count,
    /// Prompt tokens of sequences that got their first token (counter).
    pub prompt_tokens: Count,
    /// Tokens generated and sent (counter).
    pub generation_tokens: Count,
    /// Sequences that ended by themselves (counter).
    pub finished_stop: Count,
    /// Sequences that reached their length (counter).
    pub finished_length: Count,
    /// Sequences stopped or killed (counter).
    pub finished_abort: Count,
    /// Prompts that were computed here and fetched by others (counter).
    pub prompts_handed_over: Count,
    /// Prompts that came from others (counter).
    pub prompts_received: Count,
    /// Requests refused (counter).
    pub refused: Count,
    /// Passes whose modelled end was past when they began, so that no timer was armed (counter).
    pub fast_passes: Count,
    /// Passes that waited for their modelled end (counter).
    pub timed_passes: Count,
    /// Times that the rank was too late to catch up (counter).
    pub late_anchors: Count,
    /// KV snapshots published (counter).
    pub resyncs: Count,
    /// Tokens per pass: computed ones of prompts, and generated ones.
    pub pass_tokens: PassTokens,
}

/// Look-ups in host memory. All counters.
#[derive(Debug, Default)]
pub struct HostCounts {
    /// Prompt tokens looked up.
    pub query_tokens: Count,
    /// Those found.
    pub hit_tokens: Count,
}

/// Drafts of a rank. All counters.
#[derive(Debug, Default)]
pub struct DraftCounts {
    /// Drafts that were verified.
    pub drafts: Count,
    /// Their tokens.
    pub tokens: Count,
    /// Tokens that were accepted.
    pub accepted: Count,
}

/// Upper bounds of the tokens of a pass: powers of two to 2^17.
static TOKEN_BOUNDS: [u64; 18] = powers_of_two();
/// Upper bounds of hand-over times, ns: powers of two to 2^34, 17 s.
static HANDOVER_BOUNDS: [u64; 35] = powers_of_two();

/// Tokens of passes.
#[derive(Debug)]
pub struct PassTokens(pub Histogram);

impl Default for PassTokens {
    fn default() -> Self {
        PassTokens(Histogram::new(&TOKEN_BOUNDS))
    }
}

/// Times from shard to engine thread, ns.
#[derive(Debug)]
pub struct HandOver(pub Histogram);

impl Default for HandOver {
    fn default() -> Self {
        HandOver(Histogram::new(&HANDOVER_BOUNDS))
    }
}

impl RankStats {
    /// Whether the rank takes requests: its start-up is over, and its thread lives.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    /// Share of the KV cache held by sequences, from 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        self.used_blocks.get() as f64 / (self.total_blocks.get() as f64).max(1.0)
    }

    pub(crate) fn note_engine(&self, stats: &Stats) {
        self.running.set(u64::from(stats.running));
        self.waiting.set(u64::from(stats.waiting));
        self.used_blocks.set(u64::from(stats.used_blocks));
        self.total_blocks.set(u64::from(stats.total_blocks));
        self.prefix_query_tokens.set(stats.prefix_query_tokens);
        self.prefix_hit_tokens.set(stats.prefix_hit_tokens);
        self.host.query_tokens.set(stats.host_query_tokens);
        self.host.hit_tokens.set(stats.host_hit_tokens);
        self.preemptions.set(stats.preemptions);
        if stats.drafts > 0 {
            self.speculation.drafts.set(stats.drafts);
            self.speculation.tokens.set(stats.draft_tokens);
            self.speculation.accepted.set(stats.accepted_tokens);
        }
        self.passes.set(stats.passes);
        self.extrapolated_passes.set(stats.extrapolated_passes);
    }
}

/// One engine thread. Written by that thread.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct ThreadStats {
    /// Streams under way.
    pub streams: Count,
    /// Requests and controls taken (counter).
    pub received: Count,
    /// Frames sent (counter). Fewer than passes: a shard that is behind gets larger ones.
    pub frames: Count,
    /// Times that a shard took no frames and others did: its own waited apart (counter).
    pub apart: Count,
    /// Streams ended because too much waited for their shard (counter).
    pub given_up: Count,
    /// Times that the thread waited because no shard took a frame (counter).
    pub stalls: Count,
    /// Time of those waits, ns (counter).
    pub stalled_ns: Count,
    /// Times that the thread went to sleep (counter).
    pub sleeps: Count,
    /// Rounds that a shard's thread ran (counter).
    pub hosted: Count,
    /// Streams dropped because their shard is gone (counter).
    pub orphaned: Count,
    /// Times that a stream had used up its credit, and its tokens were kept (counter).
    pub paused: Count,
    /// Streams dropped because their shard reused their slot without killing them (counter).
    pub superseded: Count,
    /// Streams ended because their shard sent more input than there was room for (counter).
    pub overruns: Count,
    /// Messages that named no shard of this plane (counter).
    pub misaddressed: Count,
    /// How long requests took from shard to thread.
    pub handover: HandOver,
}
