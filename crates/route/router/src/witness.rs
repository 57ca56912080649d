//! Whether KV events tell of a target's cache: a prompt that it answered was computed there, so its events have named the
//! prompt's blocks, however they were withheld, skipped or misread otherwise. Blocks are looked up when the answer ends, as a
//! full cache evicts them soon after, and once more in the next interval, as their events may be on the way.

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
    /// Prompts of this interval whose block was found at once.
    found: u32,
    /// Tokens per block of the engine, as of the last interval; 0 before.
    engine_size: u32,
    /// Those that were not, since the last call of [`Answered::testify`].
    fresh: Vec<Arc<[BlockHash]>>,
    /// Of the interval before, so their events had time to arrive.
    aged: Vec<Arc<[BlockHash]>>,
}

impl Answered {
    /// The target has computed the prompt with these full blocks, of `size` tokens each.
    pub(crate) fn push(
        &mut self,
        blocks: &Arc<[BlockHash]>,
        size: u32,
        holds: impl Fn(BlockHash) -> bool,
    ) {
        // Both kinds within one limit, or many prompts would look better than they are.
        if self.found as usize + self.fresh.len() >= PROMPTS_MAX {
            return;
        }
        match last_full(blocks, size, self.engine_size) {
            Some(last) if holds(last) => self.found += 1,
            Some(_) => self.fresh.push(Arc::clone(blocks)),
            None => {}
        }
    }

    /// Ends an interval. Looks the prompts of the interval before up again with `holds`. `size` and `engine_size` are
    /// tokens per block of ours and the engine's.
    pub(crate) fn testify(
        &mut self,
        size: u32,
        engine_size: u32,
        holds: impl Fn(BlockHash) -> bool,
    ) -> Testimony {
        self.engine_size = engine_size;
        let mut testimony = Testimony {
            found: std::mem::take(&mut self.found),
            missing: 0,
        };
        for blocks in self.aged.drain(..) {
            let Some(last) = last_full(&blocks, size, engine_size) else {
                continue;
            };
            let is_found = holds(last);
            testimony.found += u32::from(is_found);
            testimony.missing += u32::from(!is_found);
        }
        std::mem::swap(&mut self.fresh, &mut self.aged);
        testimony
    }

    /// What was answered says nothing of the cache any more.
    pub(crate) fn clear(&mut self) {
        self.found = 0;
        self.fresh.clear();
        self.aged.clear();
    }
}

/// The last of `blocks` that ends in or with a full block of the engine; `None`: the prompt is shorter than that.
fn last_full(blocks: &[BlockHash], size: u32, engine_size: u32) -> Option<BlockHash> {
    let tokens = blocks.len() as u64 * u64::from(size);
    let full = tokens - tokens % u64::from(engine_size.max(1));
    let last = (full / u64::from(size.max(1))).checked_sub(1)?;
    Some(blocks[to_usize(last)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(ids: std::ops::Range<u64>) -> Arc<[BlockHash]> {
        ids.map(BlockHash).collect()
    }

    #[test]
    fn prompts_are_looked_up_at_once_and_one_interval_later() {
        let mut of = Answered::default();
        let never = |_| -> bool { panic!("too early") };
        let none = |_| false;
        of.testify(16, 32, never);
        of.push(&blocks(1..6), 16, none); // 5 blocks of 16: an engine with blocks of 32 has 2 of its own
        of.push(&blocks(0..0), 16, never);
        of.push(&blocks(9..10), 16, never); // shorter than the engine's block
        of.push(&blocks(11..15), 16, |hash| hash == BlockHash(14));
        let first = of.testify(16, 32, never);
        assert_eq!((first.found, first.missing), (1, 0));
        let second = of.testify(16, 32, |hash| hash == BlockHash(4));
        assert_eq!((second.found, second.missing), (1, 0));
        assert_eq!(of.testify(16, 16, never), Testimony::default());
        // It was evicted before it was looked up again.
        of.push(&blocks(1..6), 16, |hash| hash == BlockHash(5));
        assert_eq!(of.testify(16, 16, none).found, 1);
        for _ in 0..100 {
            of.push(&blocks(1..6), 16, none);
        }
        of.testify(16, 16, never);
        let missing = of.testify(16, 16, |hash| hash != BlockHash(5));
        assert_eq!((missing.found, missing.missing), (0, 32));
        // One in four was found, however many were asked for.
        for n in 0..400 {
            of.push(&blocks(1..6), 16, |_| n % 4 == 0);
        }
        let at_once = of.testify(16, 16, never);
        let later = of.testify(16, 16, none);
        assert_eq!((at_once.found, later.missing), (8, 24));
        of.push(&blocks(1..6), 16, none);
        of.testify(16, 16, never);
        of.clear();
        assert_eq!(of.testify(16, 16, never), Testimony::default());
    }
}
