//! Whether KV events tell of a target's cache: a prompt that it answered was computed there, so its events have named the
//! prompt's blocks, however they were withheld, skipped or misread otherwise.

use std::sync::Arc;

use slipstream_base::BlockHash;
use slipstream_base::width::to_usize;

/// Answered prompts kept per target and interval at most.
const PROMPTS_MAX: usize = 32;

/// Answered prompts whose blocks the events named, or did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Testimony {
    /// Prompts whose last full block was found.
    pub found: u32,
    /// Prompts whose last full block was not found.
    pub missing: u32,
}

/// Prompts that one target answered lately, by their full blocks.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    /// Since the last call of [`Answered::testify`].
    fresh: Vec<Arc<[BlockHash]>>,
    /// Of the interval before, so their events had time to arrive.
    aged: Vec<Arc<[BlockHash]>>,
}

impl Answered {
    /// The target has computed the prompt with these full blocks.
    pub(crate) fn push(&mut self, blocks: &Arc<[BlockHash]>) {
        if self.fresh.len() < PROMPTS_MAX && !blocks.is_empty() {
            self.fresh.push(Arc::clone(blocks));
        }
    }

    /// Ends an interval. Looks the prompts of the interval before up with `holds`: of each the last block that ends in
    /// or with a full block of the engine. `size` and `engine_size` are tokens per block of ours and the engine's.
    pub(crate) fn testify(
        &mut self,
        size: u32,
        engine_size: u32,
        holds: impl Fn(BlockHash) -> bool,
    ) -> Testimony {
        let mut testimony = Testimony::default();
        for blocks in self.aged.drain(..) {
            let tokens = blocks.len() as u64 * u64::from(size);
            let full = tokens - tokens % u64::from(engine_size.max(1));
            let Some(last) = (full / u64::from(size.max(1))).checked_sub(1) else {
                continue; // shorter than the engine's block
            };
            let is_found = holds(blocks[to_usize(last)]);
            testimony.found += u32::from(is_found);
            testimony.missing += u32::from(!is_found);
        }
        std::mem::swap(&mut self.fresh, &mut self.aged);
        testimony
    }

    /// What was answered says nothing of the cache any more.
    pub(crate) fn clear(&mut self) {
        self.fresh.clear();
        self.aged.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(ids: std::ops::Range<u64>) -> Arc<[BlockHash]> {
        ids.map(BlockHash).collect()
    }

    #[test]
    fn prompts_are_looked_up_one_interval_later_by_their_last_full_block() {
        let mut of = Answered::default();
        of.push(&blocks(1..6)); // 5 blocks of 16: an engine with blocks of 32 has 2 of its own
        of.push(&blocks(0..0));
        of.push(&blocks(9..10)); // shorter than the engine's block
        let never = |_| -> bool { panic!("too early") };
        assert_eq!(of.testify(16, 32, never), Testimony::default());
        let found = of.testify(16, 32, |hash| hash == BlockHash(4));
        assert_eq!((found.found, found.missing), (1, 0));
        assert_eq!(of.testify(16, 32, never), Testimony::default());
        for _ in 0..100 {
            of.push(&blocks(1..6));
        }
        of.testify(16, 16, never);
        let missing = of.testify(16, 16, |hash| hash != BlockHash(5));
        assert_eq!((missing.found, missing.missing), (0, 32));
        of.push(&blocks(1..6));
        of.testify(16, 16, never);
        of.clear();
        assert_eq!(of.testify(16, 16, never), Testimony::default());
    }
}
