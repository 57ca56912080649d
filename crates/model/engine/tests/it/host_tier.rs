//! KV blocks in host memory below the GPU's, and on a disk below that.

use slipstream_base::{BlockHash, KvDelta, KvOp, RequestId, SimTime};
use slipstream_config::cluster::{DiskTierConfig, EngineConfig, HostTierConfig};
use slipstream_engine::{HostTier, LowerHits, Medium};

use crate::rig::{Rig, request, small, tokens_of};

const TIER: HostTierConfig = HostTierConfig {
    blocks: 100,
    load_ns_per_block: 2_000_000,
    latency_ns: 500_000,
};

/// An engine of six blocks that computed a prompt of nine tokens, and then another that took all of them.
fn evicted(config: &EngineConfig) -> Rig {
    let mut rig = Rig::new(config);
    rig.add_len(0, 9, 1);
    rig.run_until_idle();
    rig.add_len(1, 22, 1);
    rig.run_until_idle();
    rig
}

fn with_tier() -> EngineConfig {
    EngineConfig {
        host_tier: Some(TIER),
        ..small(6)
    }
}

#[test]
fn a_prompt_that_was_evicted_is_loaded_and_not_computed() {
    for async_scheduling in [false, true] {
        let mut rig = evicted(&EngineConfig {
            async_scheduling,
            ..with_tier()
        });
        assert_eq!(rig.now, SimTime(2_000));
        let passes = rig.engine.stats().passes;
        rig.add(request(2, &tokens_of(0, 9), 1)).unwrap();
        let mut ends = Vec::new();
        while rig.step() {
            ends.push(rig.now.0);
        }
        // Two blocks come 0.5 + 2 x 2 ms after the request. The engine looks each ms, and then computes the last token.
        assert_eq!(
            ends,
            [
                1_002_000, 2_002_000, 3_002_000, 4_002_000, 5_002_000, 5_003_000
            ]
        );
        assert_eq!(rig.work(), (0, 0, 0, 1, 9));
        assert_eq!(rig.finished[&2].1.cached_tokens, 8);
        let stats = rig.engine.stats();
        assert_eq!((stats.host_hit_tokens, stats.prefix_hit_tokens), (8, 0));
        assert_eq!(stats.passes, passes + 1);
        assert_eq!(stats.used_blocks, 0);
    }
}

#[test]
fn without_a_tier_it_is_computed_again() {
    let mut rig = evicted(&small(6));
    rig.add(request(2, &tokens_of(0, 9), 1)).unwrap();
    assert!(rig.step());
    assert_eq!(rig.work(), (1, 9, 0, 0, 0));
    assert!(!rig.engine.has_host_tier());
}

#[test]
fn blocks_on_the_gpu_are_hit_there() {
    let mut rig = Rig::new(&with_tier());
    rig.add_len(0, 9, 1);
    rig.run_until_idle();
    rig.add(request(1, &tokens_of(0, 9), 1)).unwrap();
    assert!(rig.step());
    assert_eq!(rig.work(), (1, 1, 8, 0, 0));
    assert_eq!(rig.engine.stats().host_hit_tokens, 0);
}

#[test]
fn other_requests_run_while_one_is_loaded() {
    let mut rig = evicted(&with_tier());
    rig.add(request(2, &tokens_of(0, 9), 1)).unwrap();
    rig.add_len(3, 5, 2);
    assert!(rig.step());
    assert_eq!(rig.ids(), [3]);
    assert_eq!(rig.now, SimTime(3_000));
}

#[test]
fn the_rest_of_a_loaded_prompt_is_computed_in_chunks_and_cached() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_batched_tokens: 8,
        host_tier: Some(TIER),
        ..small(12)
    });
    let mut prompt = tokens_of(0, 17);
    rig.add(request(0, &prompt, 1)).unwrap();
    rig.run_until_idle();
    rig.add_len(1, 47, 1);
    rig.run_until_idle();
    prompt.extend(tokens_of(2, 22));
    rig.add(request(2, &prompt, 1)).unwrap();
    let mut work = Vec::new();
    while rig.step() {
        if rig.work() != (0, 0, 0, 0, 0) {
            work.push(rig.work());
        }
    }
    // 4 blocks came from host memory; 23 tokens are left.
    assert_eq!(work, [(1, 8, 16, 0, 0), (1, 8, 24, 0, 0), (1, 7, 32, 0, 0)]);
    let mut held = KvDelta::default();
    rig.engine.kv_snapshot(&mut held);
    let blocks = request(3, &prompt, 1).prompt.blocks().to_vec();
    assert_eq!(blocks.len(), 9);
    let is_held = |hash: &BlockHash| {
        let same = |op: &KvOp| matches!(op, KvOp::Stored { hash: h, .. } if h == hash);
        held.ops.iter().any(same)
    };
    assert!(blocks.iter().all(is_held));
}

#[test]
fn a_request_that_is_aborted_while_it_is_loaded_leaves_nothing() {
    let mut rig = evicted(&with_tier());
    rig.add(request(2, &tokens_of(0, 9), 1)).unwrap();
    assert!(rig.step());
    assert_eq!(rig.engine.stats().used_blocks, 3);
    assert!(rig.engine.abort(RequestId(2)));
    rig.engine.audit();
    assert_eq!(rig.engine.stats().used_blocks, 0);
    assert!(!rig.step());
    // The link is still busy with the aborted load.
    rig.add(request(3, &tokens_of(0, 9), 1)).unwrap();
    rig.run_until_idle();
    assert_eq!(rig.now, SimTime(9_003_000));
}

#[test]
fn a_loaded_prompt_for_another_engine_is_held_for_it() {
    let mut rig = evicted(&with_tier());
    let prompt = request(2, &tokens_of(0, 9), 5);
    rig.engine.add_prompt(rig.now, prompt).unwrap();
    rig.run_until_idle();
    assert_eq!(rig.finished[&2].1.output_tokens, 1);
    assert!(rig.engine.release_held(RequestId(2)));
    assert_eq!(rig.engine.stats().used_blocks, 0);
}

#[test]
fn a_restart_loses_host_memory_too() {
    let mut rig = evicted(&with_tier());
    rig.engine.restart();
    rig.add(request(2, &tokens_of(0, 9), 1)).unwrap();
    assert!(rig.step());
    assert_eq!(rig.work(), (1, 9, 0, 0, 0));
}

#[test]
fn a_full_tier_evicts_what_was_used_least_recently() {
    let mut tier = HostTier::new(HostTierConfig { blocks: 2, ..TIER });
    tier.put(BlockHash(1));
    tier.put(BlockHash(2));
    assert!(tier.has(BlockHash(1)));
    tier.put(BlockHash(3));
    assert_eq!(tier.len(), 2);
    let has = [1, 2, 3].map(|hash| tier.has(BlockHash(hash)));
    assert_eq!(has, [true, false, true]);
}

const DISK: DiskTierConfig = DiskTierConfig {
    blocks: 100,
    load_ns_per_block: 3_000_000,
    store_ns_per_block: 1_000_000,
    latency_ns: 1_000_000,
};

fn with_disk(host_blocks: u64) -> EngineConfig {
    EngineConfig {
        host_tier: Some(HostTierConfig {
            blocks: host_blocks,
            ..TIER
        }),
        disk_tier: Some(DISK),
        ..small(6)
    }
}

#[test]
fn a_prompt_that_host_memory_evicted_is_read_from_the_disk() {
    // Host memory holds the five blocks of the second prompt alone.
    let mut rig = evicted(&with_disk(5));
    assert_eq!(rig.now, SimTime(2_000));
    rig.add(request(2, &tokens_of(0, 9), 1)).unwrap();
    let mut first = Vec::new();
    while rig.step() {
        first.extend(
            rig.out
                .first
                .iter()
                .map(|first| (first.cached_tokens, first.lower)),
        );
    }
    let lower = LowerHits {
        host_tokens: 0,
        disk_tokens: 8,
        peer_tokens: 0,
    };
    assert_eq!(first, [(8, lower)]);
    let stats = rig.engine.stats();
    assert_eq!((stats.host_hit_tokens, stats.disk_hit_tokens), (0, 8));
    // 1 + 2 x 3 ms to read both, 2 ms to copy the second one: at 9.002 ms. The engine looks each ms, and computes a token.
    assert_eq!(rig.now, SimTime(9_003_000));

    // They are in host memory now, and what they evicted there is on the disk.
    rig.add_len(3, 22, 1);
    rig.run_until_idle();
    rig.add(request(4, &tokens_of(1, 22), 1)).unwrap();
    let before = rig.engine.stats();
    rig.run_until_idle();
    let after = rig.engine.stats();
    let found = [
        after.host_hit_tokens - before.host_hit_tokens,
        after.disk_hit_tokens - before.disk_hit_tokens,
    ];
    assert_eq!(found, [0, 20]);
}

/// The slower of the two decides: reads that take longer than copies, and copies that take longer than reads.
#[test]
fn blocks_are_copied_while_others_are_read() {
    for (read_ns, copy_ns, ready) in [
        (3_000_000, 2_000_000, 1_000_000 + 4 * 3_000_000 + 2_000_000),
        (1_000_000, 2_000_000, 1_000_000 + 1_000_000 + 4 * 2_000_000),
    ] {
        let mut rig = evicted_long(&EngineConfig {
            host_tier: Some(HostTierConfig {
                blocks: 5,
                load_ns_per_block: copy_ns,
                latency_ns: 0,
            }),
            disk_tier: Some(DiskTierConfig {
                load_ns_per_block: read_ns,
                ..DISK
            }),
            ..small(6)
        });
        let begin = rig.now.0;
        rig.add(request(2, &tokens_of(0, 17), 1)).unwrap();
        rig.run_until_idle();
        // Looks are 1 ms apart, and a pass takes 1 µs.
        let looks = u64::div_ceil(ready, 1_000_000) * 1_000_000;
        assert_eq!(rig.now.0 - begin, looks + 1_000, "{read_ns} {copy_ns}");
        assert_eq!(rig.engine.stats().disk_hit_tokens, 16);
    }
}

/// As [`evicted`], with a first prompt of 17 tokens.
fn evicted_long(config: &EngineConfig) -> Rig {
    let mut rig = Rig::new(config);
    rig.add_len(0, 17, 1);
    rig.run_until_idle();
    rig.add_len(1, 22, 1);
    rig.run_until_idle();
    rig
}

#[test]
fn a_restart_keeps_the_disk() {
    let mut rig = evicted(&with_disk(5));
    rig.engine.restart();
    rig.add(request(2, &tokens_of(0, 9), 1)).unwrap();
    rig.run_until_idle();
    assert_eq!(rig.engine.stats().disk_hit_tokens, 8);
}

#[test]
fn a_disk_has_what_memory_evicts_up_to_its_size_and_rate() {
    let tier =
        |disk: DiskTierConfig| HostTier::new(HostTierConfig { blocks: 1, ..TIER }).with_disk(disk);
    let mut two = tier(DiskTierConfig { blocks: 2, ..DISK });
    for hash in 1..=4 {
        two.put(BlockHash(hash));
    }
    let found = [1, 2, 3, 4].map(|hash| two.find(BlockHash(hash)));
    use Medium::{Disk, Host};
    assert_eq!(found, [None, Some(Disk), Some(Disk), Some(Host)]);
    // No time passes, so no write ends: 4,096 wait, and the others are dropped.
    let mut slow = tier(DiskTierConfig {
        blocks: 100_000,
        ..DISK
    });
    for hash in 0..5_000 {
        slow.put(BlockHash(hash));
    }
    let disk = slow.disk().unwrap();
    assert_eq!((disk.len(), disk.dropped()), (4_096, 5_000 - 1 - 4_096));
}
