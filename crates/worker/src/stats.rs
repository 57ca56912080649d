//! Counters and gauges of ranks and engine threads, which other threads read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slipstream_base::RankId;
use slipstream_engine::Stats;

/// A number that one thread writes and others read. Adding is a load and a store, which takes no
/// locked instruction and needs none with one writer.
#[derive(Debug, Default)]
pub struct Cell64(AtomicU64);

impl Cell64 {
    /// The number.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.set(self.get().wrapping_add(n));
    }
}

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
    pub running: Cell64,
    /// Sequences waiting.
    pub waiting: Cell64,
    /// Blocks held by sequences.
    pub used_blocks: Cell64,
    /// Blocks in all.
    pub total_blocks: Cell64,
    /// Prompt tokens looked up in the prefix cache (counter).
    pub prefix_query_tokens: Cell64,
    /// Those found (counter).
    pub prefix_hit_tokens: Cell64,
    /// Prompt tokens looked up in host memory (counter).
    pub host_query_tokens: Cell64,
    /// Those found (counter).
    pub host_hit_tokens: Cell64,
    /// Preemptions (counter).
    pub preemptions: Cell64,
    /// Drafts that were verified (counter).
    pub drafts: Cell64,
    /// Tokens of those drafts (counter).
    pub draft_tokens: Cell64,
    /// Those of them that were accepted (counter).
    pub accepted_tokens: Cell64,
    /// Passes (counter).
    pub passes: Cell64,
    /// Those of them outside the table of step times (counter).
    pub extrapolated_passes: Cell64,
    /// Prompt tokens of sequences that got their first token (counter).
    pub prompt_tokens: Cell64,
    /// Tokens generated and sent (counter).
    pub generation_tokens: Cell64,
    /// Sequences that ended by themselves (counter).
    pub finished_stop: Cell64,
    /// Sequences that reached their length (counter).
    pub finished_length: Cell64,
    /// Sequences stopped or killed (counter).
    pub finished_abort: Cell64,
    /// Prompts that were computed here and fetched by others (counter).
    pub prompts_handed_over: Cell64,
    /// Prompts that came from others (counter).
    pub prompts_received: Cell64,
    /// Requests refused (counter).
    pub refused: Cell64,
    /// Passes whose modelled end was past when they began, so that no timer was armed (counter).
    pub fast_passes: Cell64,
    /// Passes that waited for their modelled end (counter).
    pub timed_passes: Cell64,
    /// Times that the rank was too late to catch up (counter).
    pub late_anchors: Cell64,
    /// KV snapshots published (counter).
    pub resyncs: Cell64,
    /// Tokens per pass: computed ones of prompts, and generated ones.
    pub pass_tokens: TokenHistogram,
}

/// Counts of tokens by powers of two: bucket `i` counts those up to `2^i` (and above `2^(i-1)`).
#[derive(Debug, Default)]
pub struct TokenHistogram {
    buckets: [Cell64; TokenHistogram::BUCKETS],
    sum: Cell64,
}

impl TokenHistogram {
    /// The last bucket begins above 2^17 tokens.
    const BUCKETS: usize = 19;

    pub(crate) fn note(&self, tokens: u64) {
        let bucket = (u64::BITS - tokens.saturating_sub(1).leading_zeros()) as usize;
        self.buckets[bucket.min(Self::BUCKETS - 1)].add(1);
        self.sum.add(tokens);
    }

    /// Upper bound of each bucket, tokens (the last one's is infinite), and the count in it.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        self.buckets.iter().enumerate().map(|(i, count)| {
            let last = i == Self::BUCKETS - 1;
            let bound = if last { f64::MAX } else { (1u64 << i) as f64 };
            (bound, count.get())
        })
    }

    /// All tokens.
    pub fn sum(&self) -> u64 {
        self.sum.get()
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
        self.host_query_tokens.set(stats.host_query_tokens);
        self.host_hit_tokens.set(stats.host_hit_tokens);
        self.preemptions.set(stats.preemptions);
        if stats.drafts > 0 {
            self.drafts.set(stats.drafts);
            self.draft_tokens.set(stats.draft_tokens);
            self.accepted_tokens.set(stats.accepted_tokens);
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
    pub streams: Cell64,
    /// Requests and controls taken (counter).
    pub received: Cell64,
    /// Frames sent (counter). Fewer than passes: a shard that is behind gets larger ones.
    pub frames: Cell64,
    /// Times that a shard took no frames and others did: its own waited apart (counter).
    pub apart: Cell64,
    /// Streams ended because too much waited for their shard (counter).
    pub given_up: Cell64,
    /// Times that the thread waited because no shard took a frame (counter).
    pub stalls: Cell64,
    /// Time of those waits, ns (counter).
    pub stalled_ns: Cell64,
    /// Times that the thread went to sleep (counter).
    pub sleeps: Cell64,
    /// Rounds that a shard's thread ran (counter).
    pub hosted: Cell64,
    /// Streams dropped because their shard is gone (counter).
    pub orphaned: Cell64,
    /// Times that a stream had used up its credit, and its tokens were kept (counter).
    pub paused: Cell64,
    /// Streams dropped because their shard reused their slot without killing them (counter).
    pub superseded: Cell64,
    /// Streams ended because their shard sent more input than there was room for (counter).
    pub overruns: Cell64,
    /// Messages that named no shard of this plane (counter).
    pub misaddressed: Cell64,
    /// How long requests took from shard to thread.
    pub handover: Histogram,
}

/// Times by powers of two: bucket `i` counts those below `2^i` ns (and not below `2^(i-1)`).
#[derive(Debug)]
pub struct Histogram {
    buckets: [Cell64; Histogram::BUCKETS],
    sum_ns: Cell64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            buckets: [const { Cell64(AtomicU64::new(0)) }; Histogram::BUCKETS],
            sum_ns: Cell64::default(),
        }
    }
}

impl Histogram {
    /// The last bucket begins at 2^34 ns, 17 s.
    const BUCKETS: usize = 36;

    pub(crate) fn note(&self, ns: u64) {
        let bucket = (u64::BITS - ns.leading_zeros()) as usize;
        self.buckets[bucket.min(Self::BUCKETS - 1)].add(1);
        self.sum_ns.add(ns);
    }

    /// Upper bound of each bucket, s (the last one's is infinite), and the count in it.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        self.buckets.iter().enumerate().map(|(i, count)| {
            let last = i == Self::BUCKETS - 1;
            let bound = if last {
                f64::MAX
            } else {
                (1u64 << i) as f64 / 1e9
            };
            (bound, count.get())
        })
    }

    /// Sum of all times, s.
    pub fn sum_s(&self) -> f64 {
        self.sum_ns.get() as f64 / 1e9
    }

    /// Times noted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(Cell64::get).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_up_to_a_power_of_two() {
        let tokens = TokenHistogram::default();
        for n in [0, 1, 2, 3, 4, 8, 9, 1 << 17, (1 << 17) + 1, u64::MAX / 2] {
            tokens.note(n);
        }
        let filled: Vec<_> = tokens.buckets().filter(|&(_, n)| n > 0).collect();
        let last = f64::from(1 << 17);
        assert_eq!(
            filled,
            [
                (1.0, 2),
                (2.0, 1),
                (4.0, 2),
                (8.0, 1),
                (16.0, 1),
                (last, 1),
                (f64::MAX, 2)
            ]
        );
    }

    #[test]
    fn a_time_is_counted_below_the_next_power_of_two() {
        let times = Histogram::default();
        for ns in [0, 1, 3, 4, u64::MAX] {
            times.note(ns);
        }
        let filled: Vec<_> = times.buckets().filter(|&(_, n)| n > 0).collect();
        assert_eq!(
            filled,
            [(1e-9, 1), (2e-9, 1), (4e-9, 1), (8e-9, 1), (f64::MAX, 1)]
        );
        assert_eq!(times.count(), 5);
    }
}
