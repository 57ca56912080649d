//! State of a sequence in an engine. [`RunningSequence`] is the hot part, which each pass reads.

use std::hash::Hasher;

use slipstream_base::mix::mix64;
use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, EngineRequest, RequestId, SimTime, TokenId};

use super::disagg::TransferState;
use crate::output::{FirstToken, LowerHits};
use crate::pool::Table;
use crate::waiting::Rank;

/// A sequence, apart from what a decode pass looks at. The parts that filling a block needs come first.
#[repr(C)]
pub(super) struct Sequence {
    /// Blocks held, in order; empty while it waits, unless its prompt came from elsewhere.
    pub(super) table: Table,
    /// Hashes of full blocks beyond the prompt's, known once a preemption made them worth knowing.
    pub(super) generated_blocks: Vec<BlockHash>,
    pub(super) request: EngineRequest,
    /// Order of arrival; breaks ties of priority.
    pub(super) arrival: u64,
    /// Output tokens when it ends, if nothing ends it before.
    pub(super) end_outputs: u32,
    /// It ends there by itself, with the end-of-sequence token.
    pub(super) natural_end: bool,
    /// Generated so far; while it is running, `RunningSequence::len` is ahead of this.
    pub(super) outputs: u32,
    pub(super) cached_tokens: u32,
    pub(super) lower: LowerHits,
    pub(super) arrived: SimTime,
    /// `None` until it leaves the waiting queue for the first time.
    pub(super) admitted: Option<SimTime>,
    pub(super) preemptions: u32,
    pub(super) running: bool,
    /// Number of the last pass of the pipeline that computes tokens of it although it was preempted since.
    pub(super) last_flight: u64,
    pub(super) transfer: TransferState,
}

impl Sequence {
    pub(super) fn rank(&self) -> Rank {
        (self.request.priority, self.arrival)
    }

    /// Prompt and answer so far, while it waits.
    pub(super) fn tokens(&self) -> u32 {
        self.request.prompt.len() + self.outputs
    }

    /// Whether this engine has generated a token of it, while it waits.
    pub(super) fn has_begun(&self) -> bool {
        self.outputs > self.request.params.answered
    }
}

/// The part of a running sequence that a pass reads, in the order in which they run.
#[derive(Clone, Copy)]
pub(super) struct RunningSequence {
    pub(super) id: RequestId,
    pub(super) seed: u64,
    pub(super) slot: u32,
    pub(super) prompt_len: u32,
    /// Tokens whose keys and values are in the cache.
    pub(super) computed: u32,
    /// Prompt and answer so far. Decoding: `computed + 1`, the last token being computed next.
    pub(super) len: u32,
    /// `len` at which it ends.
    pub(super) end_len: u32,
    /// Tokens that its blocks can hold.
    pub(super) capacity: u32,
    /// Tokens of it in the pass under way, or between two passes in the one that is scheduled
    /// already; 0 if it is not in it. With a pipeline: in all passes that are in it.
    pub(super) scheduled: u32,
    /// Tokens of it in the pass after the one under way, if that is scheduled already.
    pub(super) ahead: u32,
    /// With a pipeline: number of the first pass that may compute it again after one that gives it a token.
    pub(super) eligible: u32,
    /// Caught up with its last token since it was admitted: each pass adds one.
    pub(super) decoding: bool,
    pub(super) natural_end: bool,
    /// Has stop tokens to look for.
    pub(super) stops: bool,
    /// Left (finished or aborted) while a pass is under way; removed at its end.
    pub(super) gone: bool,
}

impl RunningSequence {
    /// A sequence that is admitted with `computed` tokens in its blocks, which hold `capacity`.
    pub(super) fn new(
        slot: u32,
        sequence: &Sequence,
        computed: u32,
        capacity: u32,
        eligible: u32,
    ) -> RunningSequence {
        let prompt_len = sequence.request.prompt.len();
        RunningSequence {
            id: sequence.request.id,
            seed: sequence.request.seed,
            slot,
            prompt_len,
            computed,
            len: sequence.tokens(),
            end_len: prompt_len + sequence.end_outputs,
            capacity,
            scheduled: 0,
            ahead: 0,
            eligible,
            // So that the end of the pass looks whether its token is the first one.
            decoding: false,
            natural_end: sequence.natural_end,
            stops: !sequence.request.params.stop_token_ids.is_empty(),
            gone: false,
        }
    }

    /// Tokens computed before the pass that is being scheduled.
    #[inline]
    pub(super) fn before<const AHEAD: bool>(&self) -> u32 {
        if AHEAD {
            self.computed + self.scheduled
        } else {
            self.computed
        }
    }

    /// True if the pass under way computes its last known token, and so gives it another.
    #[inline]
    pub(super) fn will_produce_token(&self) -> bool {
        // Drafted tokens come behind that one.
        self.computed + self.scheduled >= self.len
    }

    /// True if a pass that computes it up to `target`, with room for `slots` tokens, needs a block or fills one. Ahead of its
    /// pass the last token is not known, so the block that it fills is not either.
    #[inline]
    pub(super) fn touches_blocks(&self, slots: u32, target: u32) -> bool {
        slots > self.capacity || slots == self.capacity && self.len >= target
    }

    /// Tokens of it in the pass that is being scheduled.
    #[inline]
    pub(super) fn planned<const AHEAD: bool>(&mut self) -> &mut u32 {
        if AHEAD {
            &mut self.ahead
        } else {
            &mut self.scheduled
        }
    }
}

/// Tokens of a sequence at which it ends whatever they are.
pub(super) fn limit_len(sequence: &Sequence, max_len: u32) -> u32 {
    let prompt_len = sequence.request.prompt.len();
    prompt_len + sequence.request.params.max_tokens.min(max_len - prompt_len)
}

pub(super) fn first_token(
    id: RequestId,
    sequence: &Sequence,
    first_pass_start: SimTime,
) -> FirstToken {
    FirstToken {
        id,
        cached_tokens: sequence.cached_tokens,
        lower: sequence.lower,
        arrived: sequence.arrived,
        admitted: sequence.admitted.expect("it was scheduled"),
        first_pass_start,
    }
}

/// True if output token number `position` is a stop token that counts.
pub(super) fn stops_at(sequence: &Sequence, position: u32, token: TokenId) -> bool {
    let params = &sequence.request.params;
    // As the end-of-sequence token, masked while fewer than min_tokens are out.
    position >= params.min_tokens && params.stop_token_ids.contains(&token)
}

/// Sequences by slot; slots are used again.
#[derive(Default)]
pub(super) struct Slab {
    slots: Vec<Option<Sequence>>,
    free: Vec<u32>,
}

impl Slab {
    pub(super) fn insert(&mut self, sequence: Sequence) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.slots[slot as usize] = Some(sequence);
            slot
        } else {
            self.slots.push(Some(sequence));
            to_u32(self.slots.len()) - 1
        }
    }

    pub(super) fn remove(&mut self, slot: u32) -> Sequence {
        self.free.push(slot);
        self.slots[slot as usize]
            .take()
            .expect("a slot is removed once")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(slot, s)| Some((to_u32(slot), s.as_ref()?)))
    }
}

impl std::ops::Index<u32> for Slab {
    type Output = Sequence;
    fn index(&self, slot: u32) -> &Sequence {
        self.slots[slot as usize].as_ref().expect("slot in use")
    }
}

impl std::ops::IndexMut<u32> for Slab {
    fn index_mut(&mut self, slot: u32) -> &mut Sequence {
        self.slots[slot as usize].as_mut().expect("slot in use")
    }
}

/// Ids are small numbers or packed addresses: one round of mixing spreads them, and no client
/// chooses them.
#[derive(Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix64(self.0 ^ u64::from(byte));
        }
    }
    fn write_u64(&mut self, id: u64) {
        self.0 = mix64(id);
    }
}
