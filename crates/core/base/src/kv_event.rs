//! Changes of an engine's KV cache, as published to the router's index.

use crate::ids::RankId;
use crate::token::{BlockHash, TokenId};
use crate::width::to_u32;

/// One change of the set of blocks that a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvOp {
    /// The first copy of a block was stored; a later prompt with this prefix can reuse it.
    Stored {
        /// The block.
        hash: BlockHash,
        /// The block before it; the chain's root for the first block of a prompt.
        parent: BlockHash,
    },
    /// The last copy of a block was removed.
    Removed {
        /// The block.
        hash: BlockHash,
    },
    /// Every block was removed (prefix cache reset, or engine restart).
    Cleared,
}

/// The changes of one step, in order.
///
/// Order: `sequence` grows by one with each delta that is published for a rank, so a consumer
/// detects a gap. After a gap it requests a snapshot: `Cleared`, then every block held. A snapshot
/// takes no number: its `sequence` is that of the next delta.
/// Delivery: at least once. A consumer ignores a duplicate store, and the removal of a block that
/// it does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvDelta {
    /// The rank whose cache changed.
    pub rank: RankId,
    /// Number of this delta among those of the rank, from 0.
    pub sequence: u64,
    /// The changes.
    pub ops: Vec<KvOp>,
}

/// Tokens of the blocks that a delta stores, for consumers outside of Slipstream: one entry for
/// each [`KvOp::Stored`], in the same order. Kept apart from the delta, because it takes many times
/// the memory and the router needs none of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredBlocks {
    tokens: Vec<TokenId>,
    blocks: Vec<StoredBlock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StoredBlock {
    /// End of its tokens in `tokens`.
    end: u32,
    first: bool,
}

impl StoredBlocks {
    /// Adds a block: its tokens (none if they are not known), and whether it opens a prompt.
    pub fn push(&mut self, tokens: &[TokenId], first: bool) {
        self.tokens.extend_from_slice(tokens);
        let end = to_u32(self.tokens.len());
        self.blocks.push(StoredBlock { end, first });
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Removes all blocks.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.blocks.clear();
    }

    /// Tokens of block `index`; empty if they are not known, or there is no such block.
    pub fn tokens(&self, index: usize) -> &[TokenId] {
        let Some(block) = self.blocks.get(index) else {
            return &[];
        };
        let start = match index {
            0 => 0,
            _ => self.blocks[index - 1].end,
        };
        &self.tokens[start as usize..block.end as usize]
    }

    /// Whether block `index` opens a prompt. False if there is no such block.
    pub fn is_first(&self, index: usize) -> bool {
        self.blocks.get(index).is_some_and(|block| block.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_blocks_keep_their_own_tokens() {
        let mut blocks = StoredBlocks::default();
        blocks.push(&[1, 2], true);
        blocks.push(&[], false);
        blocks.push(&[3], false);
        assert_eq!(blocks.len(), 3);
        let tokens: Vec<&[TokenId]> = (0..4).map(|i| blocks.tokens(i)).collect();
        assert_eq!(tokens, [&[1, 2][..], &[], &[3], &[]]);
        let first: Vec<bool> = (0..4).map(|i| blocks.is_first(i)).collect();
        assert_eq!(first, [true, false, false, false]);
        blocks.clear();
        assert!(blocks.is_empty() && blocks.tokens(0).is_empty());
    }
}
