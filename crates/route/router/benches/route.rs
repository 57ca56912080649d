//! A routing decision, and the accounting of a sequence: `cargo bench -p slipstream-router`.
//!
//! Prompts are 190 blocks of 64 tokens (the mean of Mooncake's conversation trace); eight share
//! their first half. Each target holds 16,384 cached blocks and 16 live sequences.
#![allow(clippy::disallowed_methods)] // it measures the router itself

use std::collections::{HashMap, VecDeque};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use slipstream_base::mix::draw;
use slipstream_base::{BlockHash, KvDelta, KvOp, Prompt, RankId, SimTime, Tail, WorkerId};
use slipstream_config::cluster::{RouterConfig, RouterPolicy};
use slipstream_router::{Fleet, RouteRequest, Routed, Router, TargetConfig};

const BLOCK_SIZE: u32 = 64;
const KV_BLOCKS: u32 = 16_384;
const PROMPT_BLOCKS: u32 = 190;
const PER_TARGET: u32 = KV_BLOCKS / PROMPT_BLOCKS;
const LIVE: usize = 16;

/// Prompt `n`; eight in a row share their first half.
fn prompt(n: u64) -> Prompt {
    let mut parent = BlockHash(0);
    let blocks = (0..u64::from(PROMPT_BLOCKS)).map(|block| {
        let id = if block < 95 { n / 8 } else { (1 << 32) + n };
        parent = BlockHash(draw(parent.0 ^ id, block));
        parent
    });
    let len = PROMPT_BLOCKS * BLOCK_SIZE + 10;
    Prompt::from_parts(len, BLOCK_SIZE, blocks.collect(), Tail::Opaque { id: n }).unwrap()
}

fn rank(target: u32) -> RankId {
    RankId {
        worker: WorkerId(target),
        dp_rank: 0,
    }
}

fn fleet(targets: u32, cached: bool, config: RouterConfig) -> Arc<Fleet> {
    let list = (0..targets).map(|target| TargetConfig {
        rank: rank(target),
        kv_blocks: KV_BLOCKS,
        prefix_caching: true,
    });
    let fleet = Fleet::new(config, BLOCK_SIZE, list.collect()).unwrap();
    for target in 0..targets {
        fleet.set_ready(WorkerId(target), true);
        for n in 0..if cached { PER_TARGET } else { 0 } {
            let prompt = prompt(u64::from(n * targets + target));
            let stored = |&hash| KvOp::Stored {
                hash,
                parent: BlockHash(0),
            };
            fleet.on_kv(&KvDelta {
                rank: rank(target),
                sequence: n.into(),
                ops: prompt.blocks().iter().map(stored).collect(),
            });
        }
    }
    Arc::new(fleet)
}

fn request(prompt: &Prompt) -> RouteRequest<'_> {
    RouteRequest {
        prompt,
        max_tokens: 100,
        session: None,
        direct: None,
        only: None,
        exclude: &[],
    }
}

/// One sequence starts, and the oldest ends.
fn turn(router: &mut Router, prompt: &Prompt, live: &mut VecDeque<Routed>, keep: usize) {
    let mut routed = router
        .route(SimTime(0), &request(black_box(prompt)), None)
        .unwrap();
    routed.active.on_first_token();
    live.push_back(routed);
    if live.len() > keep {
        live.pop_front();
    }
}

fn route(c: &mut Criterion) {
    let mut group = c.benchmark_group("route");
    let policies = [
        ("kv", RouterPolicy::Kv),
        ("least_requests", RouterPolicy::LeastRequests),
        ("power_of_two", RouterPolicy::PowerOfTwo),
        ("round_robin", RouterPolicy::RoundRobin),
    ];
    for targets in [8, 64, 512] {
        for (name, policy) in policies {
            let config = RouterConfig {
                policy,
                ..RouterConfig::default()
            };
            let fleet = fleet(targets, true, config);
            let mut router = Router::new(fleet, 0);
            // Cached blocks, each on one target, in random order.
            let cached = u64::from(targets * PER_TARGET);
            let prompts: Vec<_> = (0..cached.min(4_000))
                .map(|n| prompt(n * 7_919 % cached))
                .collect();
            let mut live = VecDeque::new();
            let mut at = 0;
            let keep = LIVE * targets as usize;
            group.bench_function(BenchmarkId::new(name, targets), |b| {
                b.iter(|| {
                    at = (at + 1) % prompts.len();
                    turn(&mut router, &prompts[at], &mut live, keep);
                });
            });
        }
    }
    group.finish();
}

/// Everything except the index: an empty one answers after two look-ups.
fn accounting(c: &mut Criterion) {
    let mut group = c.benchmark_group("accounting");
    let prompts: Vec<_> = (0..1_000).map(prompt).collect();
    let config = || RouterConfig {
        policy: RouterPolicy::RoundRobin,
        ..RouterConfig::default()
    };
    for threads in [1, 3] {
        let fleet = fleet(8, false, config());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for shard in 1..threads {
                let (fleet, stop, prompts) = (Arc::clone(&fleet), &stop, &prompts);
                scope.spawn(move || {
                    let mut router = Router::new(fleet, shard);
                    let mut live = VecDeque::new();
                    for prompt in prompts.iter().cycle() {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        turn(&mut router, prompt, &mut live, 8 * LIVE);
                    }
                });
            }
            let mut router = Router::new(Arc::clone(&fleet), 0);
            let mut live = VecDeque::new();
            let mut at = 0;
            group.bench_function(
                BenchmarkId::new("charge_and_drop_190_blocks", threads),
                |b| {
                    b.iter(|| {
                        at = (at + 1) % prompts.len();
                        turn(&mut router, &prompts[at], &mut live, 8 * LIVE);
                    });
                },
            );
            stop.store(true, Ordering::Relaxed);
        });
    }
    // The alternative: a count per block.
    let mut counts: HashMap<BlockHash, u32> = HashMap::new();
    let mut live: VecDeque<&Prompt> = VecDeque::new();
    let mut at = 0;
    group.bench_function("count_each_block_for_comparison", |b| {
        b.iter(|| {
            at = (at + 1) % prompts.len();
            for &hash in prompts[at].blocks() {
                *counts.entry(hash).or_default() += 1;
            }
            live.push_back(&prompts[at]);
            if live.len() > LIVE {
                for hash in live.pop_front().unwrap().blocks() {
                    let count = counts.get_mut(hash).unwrap();
                    *count -= 1;
                    if *count == 0 {
                        counts.remove(hash);
                    }
                }
            }
        });
    });
    group.finish();
}

/// Cost of options: KV-aware routing at 8 targets with each of them.
fn variants(c: &mut Criterion) {
    let mut group = c.benchmark_group("variants");
    let prompts: Vec<_> = (0..600).map(prompt).collect();
    let cases = [
        (
            "session",
            RouterConfig {
                affinity_ttl_s: 1e3,
                ..RouterConfig::default()
            },
        ),
        (
            "approximate_index",
            RouterConfig {
                kv_events: false,
                ..RouterConfig::default()
            },
        ),
        (
            "temperature",
            RouterConfig {
                temperature: 0.5,
                ..RouterConfig::default()
            },
        ),
        (
            "thresholds",
            RouterConfig {
                busy_kv_share: 0.99,
                busy_prefill_tokens: 1 << 40,
                ..RouterConfig::default()
            },
        ),
    ];
    for (name, config) in cases {
        let mut router = Router::new(fleet(8, true, config), 0);
        let mut live = VecDeque::new();
        let mut at = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                at = (at + 1) % prompts.len();
                let request = RouteRequest {
                    session: Some(at as u64),
                    ..request(&prompts[at])
                };
                let now = SimTime(at as u64);
                live.push_back(router.route(now, &request, None).unwrap());
                if live.len() > 8 * LIVE {
                    live.pop_front();
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, route, accounting, variants);
criterion_main!(benches);
