//! The view of an engine's cache against a model of the engine.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use slipstream_base::{BlockHash, KvDelta, KvOp, RankId, TokenId};
use slipstream_events::kv::{ExternalHash, ExtraKey};
use slipstream_events::{BlockRemoved, BlockStored, KvEvent, KvEventBatch};
use slipstream_kvindex::BlockIndex;
use slipstream_probe::{KvMirror, MirrorCounts, MirrorOptions, media_parent};

const MODEL: &str = "model";

/// A prompt: its adapter and salt, and tokens drawn from few values, so that prompts share prefixes.
#[derive(Clone, Debug)]
struct PromptOf {
    lora: Option<&'static str>,
    salt: Option<&'static str>,
    tokens: Vec<TokenId>,
}

/// The model engine's next action.
#[derive(Clone, Debug)]
enum Step {
    /// Computes a prompt: stores each full block, or only those that it does not hold yet.
    Compute {
        prompt: PromptOf,
        again: bool,
    },
    /// Evicts the copy that was stored longest ago.
    Evict,
    /// Evicts a copy in the middle.
    EvictAt(prop::sample::Index),
    Clear,
}

/// An engine's cache: copies of blocks in the order of eviction. A block is identified by all of
/// the tokens before its end, not by a hash.
#[derive(Default)]
struct Engine {
    copies: Vec<Block>,
    bytes: bool,
    size: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Block {
    lora: Option<&'static str>,
    salt: Option<&'static str>,
    prefix: Vec<TokenId>,
}

impl Engine {
    /// A name that depends on all of the block, as the engine's own hash does.
    fn hash(&self, block: &Block) -> ExternalHash {
        let text = format!("{block:?}");
        // FNV-1a: any hash that is not ours.
        let fnv = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        });
        if self.bytes {
            ExternalHash::Bytes(fnv.to_be_bytes().repeat(4).into())
        } else {
            ExternalHash::Int(fnv)
        }
    }

    fn step(&mut self, step: &Step) -> Vec<KvEvent> {
        match step {
            Step::Compute { prompt, again } => self.compute(prompt, *again),
            Step::Evict | Step::EvictAt(_) if self.copies.is_empty() => Vec::new(),
            Step::Evict => vec![self.remove(0)],
            Step::EvictAt(at) => vec![self.remove(at.index(self.copies.len()))],
            Step::Clear => {
                self.copies.clear();
                vec![KvEvent::AllBlocksCleared {}]
            }
        }
    }

    fn compute(&mut self, prompt: &PromptOf, again: bool) -> Vec<KvEvent> {
        let full = prompt.tokens.len() / self.size;
        let block = |end: usize| Block {
            lora: prompt.lora,
            salt: prompt.salt,
            prefix: prompt.tokens[..end * self.size].to_vec(),
        };
        let held = |block: &Block| self.copies.contains(block);
        let known = (1..=full).take_while(|&end| held(&block(end))).count();
        let from = if again { 0 } else { known };
        if from == full {
            return Vec::new();
        }
        let new: Vec<Block> = (from + 1..=full).map(block).collect();
        let keys = |at: usize| {
            let mut keys = Vec::new();
            keys.extend(prompt.lora.map(|name| ExtraKey::Text(name.into())));
            if at == 0 {
                keys.extend(prompt.salt.map(|salt| ExtraKey::Text(salt.into())));
            }
            (!keys.is_empty()).then_some(keys)
        };
        let stored = BlockStored {
            block_hashes: new.iter().map(|block| self.hash(block)).collect(),
            parent_block_hash: (from > 0).then(|| self.hash(&block(from))),
            token_ids: prompt.tokens[from * self.size..full * self.size].to_vec(),
            block_size: self.size as u32,
            lora_name: prompt.lora.map(str::to_owned),
            medium: Some("GPU".into()),
            extra_keys: Some((from..full).map(keys).collect()),
            group_idx: Some(0),
            kv_cache_spec_kind: Some("full_attention".into()),
            ..BlockStored::default()
        };
        self.copies.extend(new);
        vec![KvEvent::BlockStored(Box::new(stored))]
    }

    fn remove(&mut self, at: usize) -> KvEvent {
        let block = self.copies.remove(at);
        KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: vec![self.hash(&block)],
            medium: Some("GPU".into()),
            group_idx: Some(0),
            ..BlockRemoved::default()
        })
    }

    /// Our hashes of what it holds, by our block size: a block of ours is there if the engine's
    /// block in which it ends is.
    fn ours(&self, size: usize) -> HashSet<BlockHash> {
        let mut all = HashSet::new();
        for block in &self.copies {
            let (end, start) = (block.prefix.len(), block.prefix.len() - self.size);
            let root = BlockHash::root(MODEL, block.lora.unwrap_or(""), block.salt.unwrap_or(""));
            let chain = root.chain(&block.prefix, size as u32);
            let ends = (1..=chain.len()).map(|n| n * size);
            all.extend(
                ends.filter(|e| *e > start && *e <= end)
                    .map(|e| chain[e / size - 1]),
            );
        }
        all
    }
}

fn prompt() -> impl Strategy<Value = PromptOf> {
    let lora = prop_oneof![4 => Just(None), 1 => Just(Some("a")), 1 => Just(Some("b"))];
    let salt = prop_oneof![4 => Just(None), 1 => Just(Some("s"))];
    // Runs of one token, so that many prompts have a common prefix.
    let tokens = prop::collection::vec((0u32..2, 1usize..20), 0..6)
        .prop_map(|runs| runs.into_iter().flat_map(|(t, n)| vec![t; n]).collect());
    (lora, salt, tokens).prop_map(|(lora, salt, tokens)| PromptOf { lora, salt, tokens })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (prompt(), prop::bool::weighted(0.3))
            .prop_map(|(prompt, again)| Step::Compute { prompt, again }),
        4 => Just(Step::Evict),
        2 => any::<prop::sample::Index>().prop_map(Step::EvictAt),
        1 => Just(Step::Clear),
    ]
}

/// Applies changes as an index does.
fn apply(held: &mut HashSet<BlockHash>, ops: &[KvOp]) {
    for op in ops {
        match *op {
            KvOp::Stored { hash, .. } => assert!(held.insert(hash), "stored twice"),
            KvOp::Removed { hash } => assert!(held.remove(&hash), "removed, but not held"),
            KvOp::Cleared => held.clear(),
        }
    }
}

fn options(block_size: u32, blocks_max: usize) -> MirrorOptions {
    MirrorOptions {
        model: MODEL.into(),
        block_size,
        blocks_max,
    }
}

proptest! {
    /// Also where a prefix is evicted in its middle and computed again, and for block sizes that
    /// neither divide each other nor agree.
    #[test]
    fn the_view_holds_what_the_engine_holds(
        steps in prop::collection::vec(step(), 1..60),
        bytes in any::<bool>(),
        theirs in 1usize..9,
        ours in 1usize..9,
    ) {
        let mut engine = Engine { bytes, size: theirs, ..Engine::default() };
        let mut mirror = KvMirror::new(options(ours as u32, 1 << 16));
        let mut held = HashSet::new();
        let mut skipped = HashSet::new();
        let mut ops = Vec::new();
        for step in &steps {
            let events = engine.step(step);
            let batch = KvEventBatch { ts: 1.0, events, ..KvEventBatch::default() };
            // Through the wire format.
            let batch = KvEventBatch::decode(&batch.to_vec()).unwrap();
            ops.clear();
            mirror.apply(&batch, &mut ops);
            apply(&mut held, &ops);
            prop_assert_eq!(&held, &engine.ours(ours));
            skipped.insert(mirror.counts().unknown_parent);
        }
        // The model stores no block without the one before it, so none was skipped.
        prop_assert_eq!(skipped, HashSet::from([0]));
        let distinct: HashSet<_> = engine.copies.iter().collect();
        prop_assert_eq!(mirror.held(), distinct.len());
    }

    /// For any events, the view stays within its bound, and the changes stay consistent.
    #[test]
    fn nonsense_stays_within_the_bound(
        events in prop::collection::vec(nonsense(), 1..80),
        max in 0usize..6,
    ) {
        let mut mirror = KvMirror::new(options(2, max));
        let mut held = HashSet::new();
        for event in events {
            let mut ops = Vec::new();
            let batch = KvEventBatch { events: vec![event], ..KvEventBatch::default() };
            mirror.apply(&KvEventBatch::decode(&batch.to_vec()).unwrap(), &mut ops);
            apply(&mut held, &ops);
            prop_assert!(mirror.held() <= max);
            prop_assert_eq!(mirror.our_blocks(), held.len());
        }
        let mut ops = Vec::new();
        mirror.clear(&mut ops);
        prop_assert_eq!((mirror.held(), mirror.our_blocks(), ops), (0, 0, vec![KvOp::Cleared]));
    }
}

fn nonsense() -> impl Strategy<Value = KvEvent> {
    let hash = || (0u64..6).prop_map(ExternalHash::Int);
    let hashes = || prop::collection::vec(hash(), 0..4);
    let medium = || {
        prop_oneof![
            Just(None),
            Just(Some("GPU".to_owned())),
            Just(Some("CPU".to_owned()))
        ]
    };
    let stored = (
        hashes(),
        prop::option::of(hash()),
        prop::collection::vec(0u32..3, 0..9),
        0u32..4,
        medium(),
        prop::option::of(0u32..2),
    )
        .prop_map(
            |(block_hashes, parent, token_ids, block_size, medium, group_idx)| {
                KvEvent::BlockStored(Box::new(BlockStored {
                    block_hashes,
                    parent_block_hash: parent,
                    token_ids,
                    block_size,
                    medium,
                    group_idx,
                    ..BlockStored::default()
                }))
            },
        );
    let removed = (hashes(), medium(), prop::option::of(0u32..2)).prop_map(
        |(block_hashes, medium, group_idx)| {
            KvEvent::BlockRemoved(BlockRemoved {
                block_hashes,
                medium,
                group_idx,
                ..BlockRemoved::default()
            })
        },
    );
    prop_oneof![6 => stored, 3 => removed, 1 => Just(KvEvent::AllBlocksCleared {})]
}

/// A store of `tokens`, two per block, after `parent`; the engine's hashes are `hashes`.
fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[TokenId]) -> BlockStored {
    BlockStored {
        block_hashes: hashes.iter().map(|&hash| ExternalHash::Int(hash)).collect(),
        parent_block_hash: parent.map(ExternalHash::Int),
        token_ids: tokens.to_vec(),
        block_size: 2,
        ..BlockStored::default()
    }
}

fn removed(hash: u64) -> KvEvent {
    KvEvent::BlockRemoved(BlockRemoved {
        block_hashes: vec![ExternalHash::Int(hash)],
        ..BlockRemoved::default()
    })
}

/// Counts and our blocks after `events`.
fn check(events: Vec<KvEvent>, counts: MirrorCounts, blocks: &[BlockHash]) {
    let mut mirror = KvMirror::new(options(2, 100));
    let (mut ops, mut held) = (Vec::new(), HashSet::new());
    let batch = KvEventBatch {
        events,
        ..KvEventBatch::default()
    };
    mirror.apply(&batch, &mut ops);
    apply(&mut held, &ops);
    assert_eq!(mirror.counts(), counts);
    assert_eq!(held, blocks.iter().copied().collect());
}

fn store(stored: BlockStored) -> KvEvent {
    KvEvent::BlockStored(Box::new(stored))
}

#[test]
fn blocks_that_cannot_be_placed_are_counted_and_skipped() {
    let root = BlockHash::root(MODEL, "", "");
    let ab = root.chain(&[1, 2, 3, 4], 2);
    let wrong_keys = BlockStored {
        extra_keys: Some(vec![None]),
        ..stored(&[5, 6], None, &[1, 2, 3, 4])
    };
    let no_size = BlockStored {
        block_size: 0,
        ..stored(&[5], None, &[1, 2])
    };
    check(
        vec![
            store(stored(&[1, 2], None, &[1, 2, 3, 4])),
            store(stored(&[4], Some(3), &[7, 8])), // its parent is not known
            store(stored(&[5], Some(4), &[7, 8])), // nor is this one, therefore
            store(stored(&[6, 7], None, &[])),
            store(stored(&[6, 7], None, &[1, 2, 3])),
            store(wrong_keys),
            store(no_size),
            removed(9),
        ],
        MirrorCounts {
            stored: 2,
            unknown_parent: 2,
            without_tokens: 2,
            malformed: 5,
            unknown_removed: 1,
            ..MirrorCounts::default()
        },
        &ab,
    );
}

#[test]
fn a_block_goes_with_its_last_copy() {
    let root = BlockHash::root(MODEL, "", "");
    let a = root.child(&[1, 2]);
    let twice = || {
        vec![
            store(stored(&[1], None, &[1, 2])),
            store(stored(&[1], None, &[1, 2])),
        ]
    };
    let counts = |stored, removed| MirrorCounts {
        stored,
        removed,
        ..MirrorCounts::default()
    };
    let mut events = twice();
    events.push(removed(1));
    check(events.clone(), counts(2, 1), &[a]);
    events.push(removed(1));
    check(events, counts(2, 2), &[]);
}

/// vLLM can report reused blocks as stored again. Copies beyond the engine's blocks cannot be real.
#[test]
fn reports_of_reuse_do_not_keep_a_block_for_ever() {
    let mut mirror = KvMirror::new(options(2, 4));
    let (mut ops, mut held) = (Vec::new(), HashSet::new());
    let again = store(stored(&[1], None, &[1, 2]));
    let events = vec![again; 50].into_iter().chain(vec![removed(1); 5]);
    let batch = KvEventBatch {
        events: events.collect(),
        ..KvEventBatch::default()
    };
    mirror.apply(&batch, &mut ops);
    apply(&mut held, &ops);
    assert!(mirror.counts().recounted >= 10, "{:?}", mirror.counts());
    assert!(held.is_empty(), "{held:?}");
}

/// Earlier SGLang versions name a page by its own tokens, whatever is before it.
#[test]
fn a_hash_that_stands_for_two_prefixes_ends_the_view() {
    let mut mirror = KvMirror::new(options(2, 100));
    let mut held = HashSet::new();
    let mut send = |mirror: &mut KvMirror, event: KvEvent| {
        let mut ops = Vec::new();
        let events = vec![event];
        mirror.apply(
            &KvEventBatch {
                events,
                ..KvEventBatch::default()
            },
            &mut ops,
        );
        apply(&mut held, &ops);
        held.len()
    };
    assert_eq!(
        send(&mut mirror, store(stored(&[1, 2], None, &[1, 1, 2, 2]))),
        2
    );
    assert_eq!(
        send(&mut mirror, store(stored(&[2, 1], None, &[2, 2, 1, 1]))),
        0
    );
    assert!(mirror.is_unusable());
    assert_eq!(send(&mut mirror, store(stored(&[5], None, &[5, 5]))), 0);
    assert_eq!(mirror.counts().ambiguous, 3);
    // Another process may be another version.
    mirror.restart(&mut Vec::new());
    assert_eq!(send(&mut mirror, store(stored(&[5], None, &[5, 5]))), 1);
    assert!(!mirror.is_unusable());
}

#[test]
fn the_block_stored_longest_ago_makes_room() {
    let mut mirror = KvMirror::new(options(2, 3));
    let (mut ops, mut held) = (Vec::new(), HashSet::new());
    let tokens: Vec<TokenId> = (0..20).collect();
    let hashes: Vec<u64> = (1..=10).collect();
    let batch = KvEventBatch {
        events: vec![store(stored(&hashes, None, &tokens))],
        ..KvEventBatch::default()
    };
    mirror.apply(&batch, &mut ops);
    apply(&mut held, &ops);
    let chain = BlockHash::root(MODEL, "", "").chain(&tokens, 2);
    assert_eq!(held, chain[7..].iter().copied().collect());
    assert_eq!((mirror.held(), mirror.counts().over_capacity), (3, 7));
}

#[test]
fn other_memory_and_other_groups_are_no_hits() {
    let root = BlockHash::root(MODEL, "", "");
    let in_cpu = BlockStored {
        medium: Some("CPU".into()),
        ..stored(&[1], None, &[1, 2])
    };
    let of = |group, kind: &str, tokens: &[TokenId]| BlockStored {
        group_idx: Some(group),
        kv_cache_spec_kind: Some(kind.into()),
        ..stored(&[u64::from(tokens[0])], None, tokens)
    };
    let removed_of = |group, hash| {
        KvEvent::BlockRemoved(BlockRemoved {
            block_hashes: vec![ExternalHash::Int(hash)],
            group_idx: Some(group),
            ..BlockRemoved::default()
        })
    };
    let events = vec![
        store(in_cpu),
        // The first group slides, so the second is followed.
        store(of(0, "sliding_window", &[3, 4])),
        store(of(1, "mla_attention", &[3, 4])),
        store(of(2, "full_attention", &[5, 6])),
        removed_of(0, 3),
        removed_of(2, 3),
    ];
    let counts = MirrorCounts {
        stored: 1,
        other_media: 1,
        other_groups: 2,
        ..MirrorCounts::default()
    };
    check(events, counts, &[root.child(&[3, 4])]);
}

#[test]
fn a_block_with_an_image_is_not_its_text() {
    let root = BlockHash::root(MODEL, "", "");
    let image = |name: &str| {
        let pair = [ExtraKey::Text(name.into()), ExtraKey::Int(-1)];
        vec![ExtraKey::List(pair.to_vec())]
    };
    let with = |hash, keys| BlockStored {
        extra_keys: Some(vec![keys]),
        ..stored(&[hash], None, &[1, 2])
    };
    let after = |name: &str| media_parent(root, &image(name)).child(&[1, 2]);
    let blocks = [root.child(&[1, 2]), after("cat"), after("dog")];
    assert_eq!(HashSet::from(blocks).len(), 3);
    check(
        vec![
            store(with(1, None)),
            store(with(2, Some(image("cat")))),
            store(with(3, Some(image("dog")))),
        ],
        MirrorCounts {
            stored: 3,
            ..MirrorCounts::default()
        },
        &blocks,
    );
}

/// Deltas of the view in the router's own index.
#[test]
fn the_routers_index_finds_what_the_engine_holds() {
    let index = BlockIndex::new(1, 64);
    let mut mirror = KvMirror::new(options(2, 64));
    let prompt: Vec<TokenId> = (0..16).collect();
    let chain = BlockHash::root(MODEL, "", "").chain(&prompt, 2);
    let mut sequence = 0;
    let mut send = |events: Vec<KvEvent>| {
        let mut ops = Vec::new();
        let batch = KvEventBatch {
            events,
            ..KvEventBatch::default()
        };
        mirror.apply(&batch, &mut ops);
        let rank = RankId::default();
        let applied = index.apply(
            0,
            &KvDelta {
                rank,
                sequence,
                ops,
            },
        );
        assert!(!applied.gap && applied.dropped == 0, "{applied:?}");
        sequence += 1;
    };
    let hits = || {
        let mut out = [0];
        index.overlap(&chain, &mut out);
        out[0]
    };
    send(vec![store(stored(&[1, 2, 3], None, &prompt[..6]))]);
    assert_eq!(hits(), 3);
    send(vec![store(stored(&[4, 5, 6, 7, 8], Some(3), &prompt[6..]))]);
    assert_eq!(hits(), 8);
    send(vec![removed(8), removed(7)]);
    assert_eq!(hits(), 6);
    send(vec![KvEvent::AllBlocksCleared {}]);
    assert_eq!(hits(), 0);
}

/// One block may be several of ours, and the other way round.
#[test]
fn blocks_of_another_size_are_translated() {
    let tokens: Vec<TokenId> = (0..12).collect();
    for (theirs, ours) in [(4, 2), (2, 4), (3, 2), (6, 6)] {
        let mut mirror = KvMirror::new(options(ours, 100));
        let count = tokens.len() / theirs;
        let hashes: Vec<u64> = (1..=count as u64).collect();
        let events = vec![store(BlockStored {
            block_size: theirs as u32,
            ..stored(&hashes, None, &tokens)
        })];
        let (mut ops, mut held) = (Vec::new(), HashSet::new());
        let batch = KvEventBatch {
            events,
            ..KvEventBatch::default()
        };
        mirror.apply(&batch, &mut ops);
        // Each names the block before it, which an index may rely on.
        let mut before = BlockHash::root(MODEL, "", "");
        let parents: HashMap<_, _> = ops
            .iter()
            .filter_map(|op| match *op {
                KvOp::Stored { hash, parent } => Some((hash, parent)),
                _ => None,
            })
            .collect();
        for hash in before.chain(&tokens, ours) {
            assert_eq!(parents.get(&hash), Some(&before), "{theirs} and {ours}");
            before = hash;
        }
        apply(&mut held, &ops);
        assert_eq!(held.len(), tokens.len() / ours as usize);
    }
}
