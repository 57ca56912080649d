//! What an engine's KV cache gained and lost, as the router's index hears it.

use crate::ids::RankId;
use crate::token::BlockHash;

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
    /// The last copy of a block is gone.
    Removed {
        /// The block.
        hash: BlockHash,
    },
    /// Every block is gone (prefix cache reset, or the engine restarted).
    Cleared,
}

/// The changes of one pass, in the order in which they happened.
///
/// Order: `sequence` grows by one with each delta that is published for a rank, so a consumer sees
/// a gap. After a gap it asks for a snapshot: `Cleared`, then every block held. A snapshot takes no
/// number: its `sequence` is that of the delta that comes next.
/// Delivery: at least once; a consumer ignores a block that it already holds or never held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvDelta {
    /// Whose cache changed.
    pub rank: RankId,
    /// Number of this delta among those of the rank, from 0.
    pub sequence: u64,
    /// The changes.
    pub ops: Vec<KvOp>,
}
