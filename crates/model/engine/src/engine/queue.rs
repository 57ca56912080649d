//! The waiting queue of an engine: its order, its totals, and why its head is blocked.

use slipstream_base::BlockHash;
use slipstream_config::cluster::SchedulingPolicy;

use super::cache::Cache;
use super::sequence::{Sequence, Slab};
use crate::waiting::{RunningStats, Waiting};

pub(super) struct Queue {
    order: Waiting,
    /// Sequences that have no token yet: tokens of their prompts.
    prefill: RunningStats,
    /// Sequences that had been decoding: their tokens.
    decode: RunningStats,
    blocked: Option<BlockedHead>,
    /// Slots of sequences that the pass being scheduled does not consider; out of the order until it is scheduled.
    passed_over: Vec<u32>,
}

/// Why the head of the queue could not be admitted, and what would have to change.
///
/// Looking for the blocks of a long prompt in every pass would cost O(prompt) per pass. The
/// need of a sequence shrinks only when its next block becomes cached, and free blocks grow only by
/// releases; so until one of the two happens the answer stays no. (A hit block that another sequence
/// touches leaves both sides one lower.)
#[derive(Clone, Copy)]
struct BlockedHead {
    slot: u32,
    releases: u64,
    next_block: Option<BlockHash>,
}

impl Queue {
    pub(super) fn new(policy: SchedulingPolicy) -> Queue {
        Queue {
            order: Waiting::new(policy),
            prefill: RunningStats::default(),
            decode: RunningStats::default(),
            blocked: None,
            passed_over: Vec::new(),
        }
    }

    /// The next to be admitted.
    #[inline]
    pub(super) fn first(&self) -> Option<u32> {
        self.order.first()
    }

    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.order.len()
    }

    /// All, in order. For tests.
    pub(super) fn slots(&self) -> Vec<u32> {
        self.order.slots()
    }

    /// Tokens of the prompts that have no token yet.
    pub(super) fn prefill(&self) -> &RunningStats {
        &self.prefill
    }

    /// Tokens of the sequences that had been decoding.
    pub(super) fn decode(&self) -> &RunningStats {
        &self.decode
    }

    fn sums(&mut self, has_begun: bool) -> &mut RunningStats {
        if has_begun {
            &mut self.decode
        } else {
            &mut self.prefill
        }
    }

    /// Enters a new arrival.
    pub(super) fn push(&mut self, slot: u32, sequence: &Sequence) {
        self.order.push(slot, sequence.rank());
        self.sums(sequence.has_begun()).add(sequence.tokens());
    }

    /// Enters a preempted sequence.
    pub(super) fn push_preempted(&mut self, slot: u32, sequence: &Sequence) {
        self.order.push_preempted(slot, sequence.rank());
        self.sums(sequence.has_begun()).add(sequence.tokens());
    }

    /// Takes out a sequence that is in.
    pub(super) fn remove(&mut self, slot: u32, sequence: &Sequence) {
        self.order.remove(slot, sequence.rank());
        self.sums(sequence.has_begun()).remove(sequence.tokens());
        self.recheck_head(slot);
    }

    /// A sequence of `before` tokens in the queue got more, from a pass that was under way when it was preempted.
    pub(super) fn grew(&mut self, slot: u32, had_begun: bool, before: u32, sequence: &Sequence) {
        self.sums(had_begun).remove(before);
        self.decode.add(sequence.tokens());
        self.recheck_head(slot);
    }

    /// Takes the head out of the order while a pass is scheduled that does not consider it.
    pub(super) fn pass_over(&mut self, slot: u32, sequence: &Sequence) {
        self.order.remove(slot, sequence.rank());
        self.passed_over.push(slot);
    }

    /// The pass is scheduled: those that were passed over are at their places again.
    pub(super) fn end_pass(&mut self, sequences: &Slab) {
        while let Some(slot) = self.passed_over.pop() {
            self.order.push_preempted(slot, sequences[slot].rank());
        }
    }

    /// The head lacks blocks, and `next_block` is the first one of it that is not cached, if it knows one.
    pub(super) fn block(&mut self, slot: u32, next_block: Option<BlockHash>, cache: &mut Cache) {
        cache.watch(next_block);
        self.blocked = Some(BlockedHead {
            slot,
            releases: cache.pool().releases(),
            next_block,
        });
    }

    /// True if the sequence lacked blocks lately, and nothing happened that could help.
    pub(super) fn is_blocked(&mut self, slot: u32, cache: &Cache) -> bool {
        let Some(head) = self.blocked else {
            return false;
        };
        let pool = cache.pool();
        let same = head.slot == slot && head.releases == pool.releases() && !pool.watched_came();
        if !same {
            self.blocked = None;
        }
        same
    }

    /// Whether the head lacked blocks lately.
    pub(super) fn has_blocked_head(&self) -> bool {
        self.blocked.is_some()
    }

    /// Whether the head lacks blocks, and this one would help.
    #[inline]
    pub(super) fn waits_for(&self, block: BlockHash) -> bool {
        self.blocked
            .is_some_and(|head| head.next_block == Some(block))
    }

    /// Its need of blocks is another now.
    fn recheck_head(&mut self, slot: u32) {
        if self.blocked.is_some_and(|head| head.slot == slot) {
            self.blocked = None;
        }
    }
}
