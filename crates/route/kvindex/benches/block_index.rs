//! Look-ups and changes of the block index: `cargo bench -p slipstream-kvindex`.
//!
//! Every case runs on a full index: each target holds 16,384 blocks (vLLM's size of a small KV
//! cache), in prompts of 190 blocks (the mean of Mooncake's conversation trace in blocks of 64).
#![allow(clippy::disallowed_methods)] // it has threads, clocks or files

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use slipstream_base::mix::draw;
use slipstream_base::{BlockHash, KvDelta, KvOp};
use slipstream_kvindex::BlockIndex;

const KV_BLOCKS: usize = 16_384;
const PROMPT_BLOCKS: usize = 190;
const PROMPTS: usize = KV_BLOCKS / PROMPT_BLOCKS;

/// Prompt `prompt` of `target`: its first `shared` blocks are common to all targets and prompts.
fn prompt(target: usize, prompt: usize, shared: usize) -> Vec<BlockHash> {
    (0..PROMPT_BLOCKS)
        .map(|block| {
            let owner = if block < shared {
                0
            } else {
                1 + target * PROMPTS + prompt
            };
            BlockHash(draw(owner as u64, block as u64))
        })
        .collect()
}

fn stored(blocks: &[BlockHash]) -> Vec<KvOp> {
    let parents = std::iter::once(BlockHash(0)).chain(blocks.iter().copied());
    blocks
        .iter()
        .zip(parents)
        .map(|(&hash, parent)| KvOp::Stored { hash, parent })
        .collect()
}

fn removed(blocks: &[BlockHash]) -> Vec<KvOp> {
    let removed = blocks.iter().rev();
    removed.map(|&hash| KvOp::Removed { hash }).collect()
}

/// An index in which each target holds `PROMPTS` prompts, and the next sequence number.
fn full_index(targets: usize, shared: usize) -> (BlockIndex, u64) {
    let index = BlockIndex::new(targets, targets * KV_BLOCKS);
    for target in 0..targets {
        for number in 0..PROMPTS {
            let delta = KvDelta {
                sequence: number as u64,
                ops: stored(&prompt(target, number, shared)),
                ..KvDelta::default()
            };
            assert_eq!(index.apply(target, &delta).dropped, 0);
        }
    }
    (index, PROMPTS as u64)
}

fn overlap(c: &mut Criterion) {
    let mut group = c.benchmark_group("overlap");
    for targets in [8, 64, 512] {
        let mut out = vec![0; targets];
        for (name, shared) in [("own", 0), ("half_shared", 95), ("all_shared", 190)] {
            let (index, _) = full_index(targets, shared);
            // Other prompts in turn, so that their lines are not all in the first-level cache.
            let prompts: Vec<_> = (0..targets * PROMPTS)
                .map(|n| prompt(n % targets, n / targets, shared))
                .collect();
            let mut turn = 0;
            group.bench_function(BenchmarkId::new(name, targets), |b| {
                b.iter(|| {
                    turn = (turn + 7_919) % prompts.len();
                    index.overlap(black_box(&prompts[turn]), &mut out);
                });
            });
        }
        let (index, _) = full_index(targets, 0);
        let mut turn = 0;
        group.bench_function(BenchmarkId::new("miss", targets), |b| {
            let absent: Vec<_> = (0..1_000).map(|n| prompt(targets, n, 0)).collect();
            b.iter(|| {
                turn = (turn + 1) % absent.len();
                index.overlap(black_box(&absent[turn]), &mut out);
            });
        });
        group.bench_function(BenchmarkId::new("one_target", targets), |b| {
            let prompts: Vec<_> = (0..PROMPTS).map(|n| prompt(1, n, 0)).collect();
            b.iter(|| {
                turn = (turn + 1) % prompts.len();
                index.overlap_of(1, black_box(&prompts[turn]))
            });
        });
    }
    group.finish();
}

/// A prompt's blocks are stored, and removed later.
fn apply(c: &mut Criterion) {
    let mut group = c.benchmark_group("apply");
    group.throughput(Throughput::Elements(2 * PROMPT_BLOCKS as u64));
    for targets in [8, 64, 512] {
        let (index, mut sequence) = full_index(targets, 0);
        let deltas: Vec<_> = (0..64)
            .map(|n| {
                let blocks = prompt(targets, n, 0);
                [stored(&blocks), removed(&blocks)]
            })
            .collect();
        let mut delta = KvDelta::default();
        group.bench_function(BenchmarkId::new("store_and_remove_190", targets), |b| {
            let mut turn = 0;
            b.iter(|| {
                turn = (turn + 1) % deltas.len();
                for ops in &deltas[turn] {
                    delta.sequence = sequence;
                    delta.ops.clone_from(ops);
                    sequence += 1;
                    index.apply(0, &delta);
                }
            });
        });
    }
    group.finish();
}

/// The same from several engine threads, with concurrent look-ups: the cost of the shard locks.
fn contended(c: &mut Criterion) {
    let mut group = c.benchmark_group("contended");
    for writers in [1, 3] {
        let (index, sequence) = full_index(8, 0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for writer in 1..writers {
                let (index, stop) = (&index, &stop);
                scope.spawn(move || {
                    let mut sequence = sequence;
                    while !stop.load(Ordering::Relaxed) {
                        let blocks = prompt(8 + writer, (sequence % 64) as usize, 0);
                        for ops in [stored(&blocks), removed(&blocks)] {
                            let delta = KvDelta {
                                sequence,
                                ops,
                                ..KvDelta::default()
                            };
                            sequence += 1;
                            index.apply(writer, &delta);
                        }
                    }
                });
            }
            let mut delta = KvDelta {
                sequence,
                ..KvDelta::default()
            };
            group.bench_function(BenchmarkId::new("store_and_remove_190", writers), |b| {
                let blocks = prompt(8, 0, 0);
                let both = [stored(&blocks), removed(&blocks)];
                b.iter(|| {
                    for ops in &both {
                        delta.ops.clone_from(ops);
                        index.apply(0, &delta);
                        delta.sequence += 1;
                    }
                });
            });
            group.bench_function(BenchmarkId::new("overlap_own", writers - 1), |b| {
                let prompts: Vec<_> = (0..PROMPTS).map(|n| prompt(1, n, 0)).collect();
                let mut out = vec![0; 8];
                let mut turn = 0;
                b.iter(|| {
                    turn = (turn + 1) % prompts.len();
                    index.overlap(black_box(&prompts[turn]), &mut out);
                });
            });
            stop.store(true, Ordering::Relaxed);
        });
    }
    group.finish();
}

criterion_group!(benches, overlap, apply, contended);
criterion_main!(benches);
