//! Tokens, and the chained hashes that identify blocks of KV cache.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// Identity of a block: a hash of its tokens and of every block before it.
///
/// `h_j = XXH3(tokens of block j, seed = h_(j-1))`, with a salt of model, LoRA adapter and tenant
/// as `h_(-1)`. Equal hashes are taken to mean equal prefixes: at 64 bits, 10^8 distinct blocks
/// collide with a probability of about 3 in 10,000 (birthday bound).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub u64);

impl BlockHash {
    /// Root of a chain: the parent of a prompt's first block.
    pub fn root(model: &str, lora: &str, tenant: &str) -> BlockHash {
        // Lengths keep ("ab", "c") apart from ("a", "bc").
        let salted = format!(
            "{}:{model}{}:{lora}{}:{tenant}",
            model.len(),
            lora.len(),
            tenant.len()
        );
        BlockHash(xxh3_64_with_seed(salted.as_bytes(), 0))
    }

    /// Hash of the block that holds `tokens` and follows `self`.
    ///
    /// Allocates nothing up to 64 tokens per block.
    pub fn child(self, tokens: &[TokenId]) -> BlockHash {
        const STACK_TOKENS: usize = 64;
        if tokens.len() <= STACK_TOKENS {
            let mut bytes = [0u8; STACK_TOKENS * 4];
            for (chunk, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                chunk.copy_from_slice(&token.to_le_bytes());
            }
            BlockHash(xxh3_64_with_seed(&bytes[..tokens.len() * 4], self.0))
        } else {
            let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
            BlockHash(xxh3_64_with_seed(&bytes, self.0))
        }
    }

    /// Hash of sub-block `index` of trace id `id`, which follows `self`. Traces that name a run of
    /// tokens by an id instead of listing them (Mooncake: 512 tokens per id) chain their engine
    /// blocks by this. The same function hashes generated tokens of unknown content as `(request,
    /// position)`.
    pub fn child_of_id(self, id: u64, index: u64) -> BlockHash {
        let mut bytes = [0u8; 16];
        bytes[..8].copy_from_slice(&id.to_le_bytes());
        bytes[8..].copy_from_slice(&index.to_le_bytes());
        BlockHash(xxh3_64_with_seed(&bytes, self.0))
    }

    /// Hashes of the full blocks of `tokens`, in order, chained from `self`; a partial last block
    /// has none. Length `tokens.len() / block_size`.
    ///
    /// # Panics
    /// If `block_size` is 0.
    pub fn chain(self, tokens: &[TokenId], block_size: u32) -> Vec<BlockHash> {
        let mut parent = self;
        tokens
            .chunks_exact(block_size as usize)
            .map(|block| {
                parent = parent.child(block);
                parent
            })
            .collect()
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_depends_on_every_earlier_token() {
        let root = BlockHash::root("m", "", "");
        let a = root.chain(&(0..64).collect::<Vec<_>>(), 16);
        let mut changed: Vec<u32> = (0..64).collect();
        changed[20] = 999; // in block 1
        let b = root.chain(&changed, 16);
        assert_eq!(a[0], b[0]);
        assert!(
            (1..4).all(|j| a[j] != b[j]),
            "blocks after a change must differ"
        );
    }

    #[test]
    fn partial_block_has_no_hash() {
        assert_eq!(BlockHash::default().chain(&[1; 47], 16).len(), 2);
    }

    #[test]
    fn salts_do_not_run_together() {
        assert_ne!(
            BlockHash::root("ab", "c", ""),
            BlockHash::root("a", "bc", "")
        );
    }

    #[test]
    fn long_blocks_hash_like_short_ones_would() {
        // The stack buffer and the heap path must agree where they meet.
        let tokens: Vec<u32> = (0..65).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        let h = BlockHash(7);
        assert_eq!(
            h.child(&tokens[..64]).0,
            xxh3_64_with_seed(&bytes[..256], 7)
        );
        assert_eq!(h.child(&tokens).0, xxh3_64_with_seed(&bytes, 7));
    }
}
