//! The twin's host memory and disk beside the store that engines have.

use proptest::prelude::*;
use slipstream_base::{BlockHash, SimTime};
use slipstream_config::cluster::{DiskTierConfig, HostTierConfig};
use slipstream_engine::{HostTier, Medium};
use slipstream_kvstore::{DiskOptions, DiskTier, MemoryOptions, MemoryTier, Tier};

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

proptest! {
    /// The disk below: both have the same blocks after each store and each look-up.
    #[test]
    fn evictions_of_the_disk_are_those_of_the_store(
        blocks in 1..20_u64,
        uses in prop::collection::vec((any::<bool>(), 0..40_u64), 1..100),
    ) {
        // One block in memory: each stored block evicts the one before it to the disk.
        let mut modelled = HostTier::new(HostTierConfig {
            blocks: 1,
            load_ns_per_block: 1,
            latency_ns: 0,
        })
        .with_disk(DiskTierConfig {
            blocks,
            load_ns_per_block: 1,
            store_ns_per_block: 0,
            latency_ns: 0,
        });
        let folder = tempfile::tempdir().unwrap();
        let now = SimTime(0);
        // A file has a head of 64 bytes and a key of eight.
        let bytes_max = blocks * (BLOCK_BYTES as u64 + 64 + 8);
        let real = DiskTier::open(now, 1, DiskOptions::new(folder.path(), bytes_max)).unwrap();
        let mut bytes = vec![0; BLOCK_BYTES];
        let mut in_memory = None;
        for (stores, hash) in uses {
            if stores {
                modelled.put(BlockHash(hash));
                if let Some(evicted) = in_memory.replace(hash).filter(|&evicted| evicted != hash) {
                    real.put(now, &evicted.to_le_bytes(), &bytes).unwrap();
                }
            } else if in_memory != Some(hash) {
                let found = real.get(now, &hash.to_le_bytes(), &mut bytes).unwrap();
                prop_assert_eq!(modelled.find(BlockHash(hash)), found.then_some(Medium::Disk));
            }
            prop_assert_eq!(modelled.disk().unwrap().len(), real.keys().len());
        }
    }
}
