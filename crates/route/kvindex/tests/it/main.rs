//! Concurrent writers and readers of one index, on real threads; sets of whole keys in [`keys`].
#![allow(clippy::disallowed_methods)] // it has threads, clocks or files

mod keys;

use std::sync::atomic::{AtomicBool, Ordering};

use slipstream_base::mix::draw;
use slipstream_base::{BlockHash, KvDelta, KvOp};
use slipstream_kvindex::BlockIndex;

const TARGETS: usize = 70; // two words of owners
const STABLE: u64 = 300;
const TURNS: u64 = 400;

fn chain(seed: u64, len: u64) -> Vec<BlockHash> {
    (0..len).map(|n| BlockHash(draw(seed, n))).collect()
}

fn stored(blocks: &[BlockHash]) -> Vec<KvOp> {
    let parent = BlockHash(0); // the index uses only hashes
    let stored = |&hash| KvOp::Stored { hash, parent };
    blocks.iter().map(stored).collect()
}

/// Each writer's target holds the stable chain throughout, while it stores and removes others,
/// some of them shared with other writers. In the end it removes all chains except the stable one.
#[test]
fn stable_blocks_are_always_found_and_strangers_never() {
    const WRITERS: u64 = 3;
    // At the promised capacity: the writers' chains need all of it.
    let index = BlockIndex::new(TARGETS, (STABLE + WRITERS * 2 * 200 + 200) as usize);
    let stable = chain(1, STABLE);
    let target = |writer: u64| (writer * 32 + 3) as usize; // 3, 35, 67
    let apply = |target: usize, sequence: &mut u64, ops: Vec<KvOp>| {
        let applied = index.apply(
            target,
            &KvDelta {
                sequence: *sequence,
                ops,
                ..KvDelta::default()
            },
        );
        *sequence += 1;
        assert!(!applied.gap && !applied.duplicate);
        assert_eq!(applied.dropped, 0);
    };
    for writer in 0..WRITERS {
        apply(target(writer), &mut 0, stored(&stable));
    }
    let done = AtomicBool::new(false);
    let looks = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let apply = &apply;
                scope.spawn(move || {
                    let mut sequence = 1;
                    for turn in 0..TURNS {
                        let own = chain(100 + writer * TURNS + turn, 200);
                        let common = chain(10, 200);
                        apply(target(writer), &mut sequence, stored(&own));
                        apply(target(writer), &mut sequence, stored(&common));
                        let removed = own.iter().chain(&common);
                        let removed = removed.map(|&hash| KvOp::Removed { hash });
                        apply(target(writer), &mut sequence, removed.collect());
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let mut out = vec![0; TARGETS];
            let strangers = chain(2, STABLE);
            let mut looks = 0u64;
            while !done.load(Ordering::Relaxed) || looks < 100 {
                index.overlap(&stable, &mut out);
                for (at, &hit) in out.iter().enumerate() {
                    let holds = (0..WRITERS).any(|writer| target(writer) == at);
                    assert_eq!(hit, if holds { STABLE as u32 } else { 0 }, "target {at}");
                }
                index.overlap(&strangers, &mut out);
                assert_eq!(out.iter().sum::<u32>(), 0);
                looks += 1;
            }
            looks
        });
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(looks >= 100);
    for at in 0..TARGETS {
        let holds = (0..WRITERS).any(|writer| target(writer) == at);
        assert_eq!(index.held(at), if holds { STABLE } else { 0 });
    }
    assert!((0..TARGETS).all(|at| !index.holds(at, chain(10, 1)[0])));
}
