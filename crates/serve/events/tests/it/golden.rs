//! Bytes from other implementations: vLLM's KV events, and Dynamo's forward-pass metrics.
//! `scripts/vllm/event_goldens.py` writes the files with the classes of those packages.

use std::collections::BTreeMap;

use slipstream_base::fpm::{DecodeStats, PrefillStats};
use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::{BlockHash, ForwardPassMetrics, KvOp, RankId, TokenId, WorkerId};
use slipstream_events::fpm::write_fpm;
use slipstream_events::kv::{ExternalHash, ExtraKey, KvChanges};
use slipstream_events::{BlockStored, FpmMessage, KvEvent, KvEventBatch};

use super::ROOT;

/// Messages by name.
fn messages(text: &str) -> BTreeMap<&str, Vec<u8>> {
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, hex) = line.split_once(' ').expect("a name and bytes");
            (name, hex.as_bytes().chunks(2).map(byte).collect())
        })
        .collect()
}

fn kv_batches() -> BTreeMap<&'static str, Vec<u8>> {
    messages(include_str!("golden/vllm_kv_events.txt"))
}

fn stored(hash: u64, parent: BlockHash) -> KvOp {
    KvOp::Stored {
        hash: BlockHash(hash),
        parent,
    }
}

fn removed(hash: u64) -> KvOp {
    KvOp::Removed {
        hash: BlockHash(hash),
    }
}

/// Our encoding of a cache's changes; `tokens` are those of each stored block of two tokens.
fn encoded(dp_rank: u16, ops: &[KvOp], tokens: &[[TokenId; 2]], opens: bool) -> Vec<u8> {
    let mut blocks = StoredBlocks::default();
    for (at, tokens) in tokens.iter().enumerate() {
        blocks.push(tokens, opens && at == 0);
    }
    let changes = KvChanges {
        ts: 1_763_800_000.25,
        dp_rank,
        block_size: 2,
        ops,
        blocks: Some(&blocks),
        first_block: 0,
        root: ROOT,
    };
    let mut out = Vec::new();
    changes.write(&mut out);
    out
}

#[test]
fn kv_events_have_the_bytes_of_vllms_own_classes() {
    let golden = kv_batches();
    let check = |name: &str, ours: Vec<u8>| {
        assert_eq!(
            KvEventBatch::decode(&ours).unwrap(),
            KvEventBatch::decode(&golden[name]).unwrap(),
            "{name}"
        );
        assert_eq!(ours, golden[name], "{name}");
    };
    let chain = [stored(1, ROOT), stored(u64::MAX, BlockHash(1))];
    let tokens = [[5, 127], [128, 151_935]];
    check("prompt", encoded(0, &chain, &tokens, true));
    let answer = [stored(1 << 63, BlockHash(200))];
    check("answer", encoded(3, &answer, &[[65_535, 65_536]], false));
    let salted = [stored(1, BlockHash(50)), stored(2, BlockHash(1))];
    check("salt", encoded(0, &salted, &[[5, 6], [7, 8]], true));
    let mut long: Vec<KvOp> = (2..=40).map(|n| stored(n, BlockHash(n - 1))).collect();
    long.insert(0, stored(1, ROOT));
    long.push(removed(1 << 32));
    let tokens: Vec<[u32; 2]> = (0..40).map(|n| [2 * n, 2 * n + 1]).collect();
    check("long", encoded(0, &long, &tokens, true));
    let evicted = [removed(1), removed(70_000), stored(9, BlockHash(8))];
    check("evicted", encoded(1, &evicted, &[[0, 1]], false));
    check("cleared", encoded(0, &[KvOp::Cleared], &[], false));
    check("none", encoded(u16::MAX, &[], &[], false));
}

#[test]
fn every_field_of_vllms_kv_events_is_read_and_written_back() {
    let golden = kv_batches();
    assert_eq!(golden.len(), 8);
    for (name, bytes) in &golden {
        let batch = KvEventBatch::decode(bytes).unwrap();
        assert_eq!(&batch.to_vec(), bytes, "{name}");
    }
    let batch = KvEventBatch::decode(&golden["fields"]).unwrap();
    let [KvEvent::BlockStored(stored), KvEvent::BlockRemoved(gone)] = &batch.events[..] else {
        panic!("{batch:?}")
    };
    let hashes = [ExternalHash::Bytes([1; 32].into()), ExternalHash::Int(7)];
    assert_eq!(
        (&stored.block_hashes[..], &gone.block_hashes[..]),
        (&hashes[..], &hashes[..])
    );
    assert_eq!(stored.lora_name.as_deref(), Some("adapter"));
    assert_eq!(stored.session_id.as_deref(), Some("session-1"));
    assert_eq!(stored.lookahead_token_ids, Some(vec![vec![3], vec![5]]));
    let image = |offset| ExtraKey::List(vec![ExtraKey::Text("image".into()), offset]);
    let keys = stored.extra_keys.as_ref().unwrap();
    assert_eq!(
        keys[0].as_deref(),
        Some(
            &[
                ExtraKey::Text("adapter".into()),
                image(ExtraKey::Uint(128)),
                image(ExtraKey::Int(-1)),
            ][..]
        )
    );
    assert_eq!(gone.ownership.as_deref(), Some("disk"));
}

#[test]
fn forward_pass_metrics_have_the_bytes_of_dynamos_own_class() {
    let golden = messages(include_str!("golden/dynamo_fpm.txt"));
    let rank = |dp_rank| RankId {
        worker: WorkerId(7),
        dp_rank,
    };
    let full = ForwardPassMetrics {
        rank: rank(3),
        counter: 1 << 40,
        wall_time_s: 0.0125,
        scheduled_prefill: PrefillStats {
            requests: 2,
            tokens: 8192,
            length_variance: 1024.5,
        },
        scheduled_prefill_kv_tokens: 70_000,
        scheduled_decode: DecodeStats {
            requests: 255,
            kv_tokens: 1 << 33,
            kv_tokens_variance: 0.0,
        },
        queued_prefill: PrefillStats {
            requests: 1,
            tokens: 128,
            length_variance: 0.0,
        },
        queued_decode: DecodeStats {
            requests: 3,
            kv_tokens: 4096,
            kv_tokens_variance: 2.25,
        },
    };
    let heartbeat = ForwardPassMetrics {
        rank: rank(0),
        counter: 9,
        ..ForwardPassMetrics::default()
    };
    assert_eq!(golden.len(), 2);
    for (name, metrics) in [("pass", full), ("heartbeat", heartbeat)] {
        let mut ours = Vec::new();
        write_fpm(&mut ours, "w7", &metrics);
        assert_eq!(ours, golden[name], "{name}");
        let read = FpmMessage::decode(&golden[name]).unwrap();
        assert_eq!(read, FpmMessage::new("w7", &metrics), "{name}");
    }
}

/// A batch cannot take many times its size in memory.
#[test]
fn events_and_extra_keys_of_a_batch_are_bounded() {
    let max = 1 << 17;
    let cleared = |count: usize| KvEventBatch {
        events: vec![KvEvent::AllBlocksCleared {}; count],
        ..KvEventBatch::default()
    };
    let all = KvEventBatch::decode(&cleared(max).to_vec()).unwrap();
    assert_eq!(all.events.len(), max);
    let error = KvEventBatch::decode(&cleared(max + 1).to_vec()).unwrap_err();
    assert!(error.to_string().contains("131073 KV events"), "{error}");
    let stored = |keys: usize| {
        KvEvent::BlockStored(Box::new(BlockStored {
            block_hashes: vec![ExternalHash::Int(1)],
            token_ids: vec![7],
            block_size: 1,
            extra_keys: (keys > 0).then(|| vec![Some(vec![ExtraKey::Uint(1); keys])]),
            ..BlockStored::default()
        }))
    };
    let batch = |keys: &[usize]| {
        let events = keys.iter().map(|&keys| stored(keys)).collect();
        let batch = KvEventBatch {
            events,
            ..KvEventBatch::default()
        };
        KvEventBatch::decode(&batch.to_vec()).unwrap()
    };
    assert_eq!(batch(&[max - 1, 1, 0]).unreadable.events, 0);
    let beyond = batch(&[max, 0, 1, 0]);
    assert_eq!((beyond.unreadable.events, beyond.events.len()), (1, 3));
    let first = beyond.unreadable.first.unwrap();
    assert!(first.contains("131072 extra keys"), "{first}");
}
