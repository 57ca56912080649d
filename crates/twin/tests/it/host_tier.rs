//! The twin's host memory beside the store that engines have.

use proptest::prelude::*;
use slipstream_base::{BlockHash, SimTime};
use slipstream_config::cluster::HostTierConfig;
use slipstream_engine::HostTier;
use slipstream_kvstore::{MemoryOptions, MemoryTier, Tier};

const BLOCK_BYTES: usize = 4096;

proptest! {
    /// Both have the same blocks after each store and each look-up, so both evict the same one.
    #[test]
    fn evictions_are_those_of_the_store(
        blocks in 1..20_usize,
        uses in prop::collection::vec((any::<bool>(), 0..40_u64), 1..300),
    ) {
        let mut modelled = HostTier::new(HostTierConfig {
            blocks: blocks as u64,
            load_ns_per_block: 1,
            latency_ns: 0,
        });
        let real = MemoryTier::new(MemoryOptions {
            bytes: blocks * BLOCK_BYTES,
            block_bytes: BLOCK_BYTES,
            ttl_ns: None,
        })
        .unwrap();
        let now = SimTime(0);
        let mut bytes = vec![0; BLOCK_BYTES];
        for (stores, hash) in uses {
            let key = hash.to_le_bytes();
            if stores {
                modelled.put(BlockHash(hash));
                real.put(now, &key, &bytes).unwrap();
            } else {
                let found = real.get(now, &key, &mut bytes).unwrap();
                prop_assert_eq!(modelled.has(BlockHash(hash)), found);
            }
            prop_assert_eq!(modelled.len(), real.keys().len());
        }
    }
}
