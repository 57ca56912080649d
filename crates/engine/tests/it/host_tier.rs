//! KV blocks in host memory below the GPU's.

use slipstream_base::{BlockHash, KvDelta, KvOp, RequestId, SimTime};
use slipstream_config::cluster::{EngineConfig, HostTierConfig};
use slipstream_engine::HostTier;

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
