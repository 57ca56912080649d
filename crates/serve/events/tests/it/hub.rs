//! The bus inside the process, and properties of all buses.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::{BlockHash, KvDelta, KvOp};
use slipstream_config::cluster::EventBus;
use slipstream_events::kv::ExternalHash;
use slipstream_events::{Event, FpmMessage, HubSubscriber, KvEvent, KvEventBatch};
use slipstream_planes::EventSink;

use super::{config, pass, rank, start, stores, wait_until};

fn all(subscriber: &mut HubSubscriber) -> Vec<Event> {
    std::iter::from_fn(|| subscriber.try_recv()).collect()
}

#[test]
fn every_pass_arrives_in_order_by_rank() {
    let (plane, mut publisher) = start(&config(EventBus::InProcess), false);
    let mut subscriber = plane.hub().subscribe(64 << 20);
    for counter in 0..5000 {
        for worker in 0..2 {
            publisher.on_fpm(&pass(worker, counter));
        }
        publisher.flush();
    }
    drop(plane); // sends the remaining events
    let mut next = [0; 2];
    for event in all(&mut subscriber) {
        let fpm = FpmMessage::decode(&event.payload).unwrap();
        let worker = usize::from(fpm.worker_id == "w1");
        assert_eq!(event.topic, format!("slipstream.fpm.w{worker}.0"));
        assert_eq!(fpm.counter_id, next[worker]);
        assert_eq!(event.sequence, Some(fpm.counter_id));
        assert_eq!(fpm.scheduled_requests.sum_decode_kv_tokens, fpm.counter_id);
        next[worker] += 1;
    }
    assert_eq!(next, [5000; 2]);
    assert_eq!(subscriber.dropped(), 0);
}

#[test]
fn fresh_buffers_make_the_same_events() {
    let events = [false, true].map(|fresh| {
        let (plane, mut publisher) = start(&config(EventBus::InProcess), fresh);
        let mut subscriber = plane.hub().subscribe(1 << 20);
        for counter in 0..50 {
            publisher.on_fpm(&pass(1, counter));
        }
        publisher.flush();
        drop(plane);
        all(&mut subscriber)
    });
    assert_eq!(events[0].len(), 50);
    assert_eq!(events[0], events[1]);
}

#[test]
fn kv_events_name_tokens_where_they_are_known() {
    let (plane, mut publisher) = start(&config(EventBus::InProcess), false);
    assert!(publisher.wants_blocks());
    let mut subscriber = plane.hub().subscribe(1 << 20);
    let mut blocks = StoredBlocks::default();
    for n in 0..3 {
        blocks.push(&[n, 10 + n], n == 0);
    }
    publisher.on_kv_blocks(&stores(0, 0, 3), &blocks);
    publisher.on_kv(&stores(1, 5, 1));
    publisher.flush();
    drop(plane);
    let batches: Vec<KvEventBatch> = all(&mut subscriber)
        .iter()
        .map(|event| KvEventBatch::decode(&event.payload).unwrap())
        .collect();
    let [known, unknown] = &batches[..] else {
        panic!("{batches:?}")
    };
    let [KvEvent::BlockStored(stored)] = &known.events[..] else {
        panic!("{known:?}")
    };
    assert_eq!(
        stored.block_hashes,
        [1000, 1001, 1002].map(ExternalHash::Int)
    );
    assert_eq!((&stored.parent_block_hash, stored.block_size), (&None, 2));
    assert_eq!(stored.token_ids, [0, 10, 1, 11, 2, 12]);
    assert!(
        matches!(&unknown.events[..], [KvEvent::BlockStored(stored)] if stored.token_ids.is_empty())
    );
}

#[test]
fn a_large_delta_becomes_several_batches_with_rising_sequences() {
    let (plane, mut publisher) = start(&config(EventBus::InProcess), false);
    let mut subscriber = plane.hub().subscribe(1 << 30);
    publisher.on_kv(&stores(0, 0, 10_000));
    publisher.on_kv(&stores(0, 10_000, 1));
    publisher.flush();
    drop(plane);
    let events = all(&mut subscriber);
    let sequences: Vec<Option<u64>> = events.iter().map(|event| event.sequence).collect();
    assert_eq!(sequences, (0..6).map(Some).collect::<Vec<_>>());
    let blocks =
        events.iter().map(
            |event| match &KvEventBatch::decode(&event.payload).unwrap().events[..] {
                [KvEvent::BlockStored(stored)] => stored.block_hashes.len(),
                other => panic!("{other:?}"),
            },
        );
    assert_eq!(
        blocks.collect::<Vec<_>>(),
        [2048, 2048, 2048, 2048, 1808, 1]
    );
}

/// A server refuses longer messages unless it is configured otherwise.
#[test]
fn no_batch_is_longer_than_nats_takes_by_default() {
    let (plane, mut publisher) = start(&config(EventBus::InProcess), false);
    let mut subscriber = plane.hub().subscribe(1 << 30);
    let mut ops = Vec::new();
    let mut blocks = StoredBlocks::default();
    for n in 0..10_000 {
        // One event per block, as no block follows the previous one, with a salt and long numbers.
        ops.push(KvOp::Stored {
            hash: BlockHash(u64::MAX - n),
            parent: BlockHash(u64::MAX / 2 - n),
        });
        blocks.push(&[u32::MAX; 16], n % 2 == 0);
    }
    let delta = KvDelta {
        rank: rank(0),
        sequence: 0,
        ops,
    };
    publisher.on_kv_blocks(&delta, &blocks);
    publisher.flush();
    drop(plane);
    let longest = all(&mut subscriber)
        .iter()
        .map(|event| event.payload.len())
        .max();
    assert!(longest < Some(1 << 20), "{longest:?}");
}

#[test]
fn a_subscriber_that_does_not_read_loses_the_oldest() {
    let (plane, mut publisher) = start(&config(EventBus::InProcess), false);
    let mut subscriber = plane.hub().subscribe(10_000);
    for counter in 0..1000 {
        publisher.on_fpm(&pass(0, counter));
        publisher.flush();
    }
    drop(plane);
    let left = all(&mut subscriber);
    let dropped = subscriber.dropped();
    assert_eq!(left.len() as u64 + dropped, 1000);
    assert!(left.iter().map(|event| event.payload.len()).sum::<usize>() <= 10_000);
    assert_eq!(left[0].sequence, Some(dropped), "the gap shows");
}

#[test]
fn strangers_are_not_published_and_nothing_breaks() {
    let (plane, mut publisher) = start(&config(EventBus::InProcess), false);
    let mut subscriber = plane.hub().subscribe(1 << 20);
    publisher.on_fpm(&pass(9, 0));
    publisher.on_kv(&stores(9, 0, 1));
    publisher.on_fpm(&pass(1, 0));
    publisher.flush();
    drop(plane);
    assert_eq!(all(&mut subscriber).len(), 1);
}

#[test]
fn dropped_kv_events_ask_for_a_snapshot_of_their_rank() {
    let config = slipstream_config::cluster::EventsConfig {
        queue_bytes_max: 64 << 10,
        interval_ms: 1000.0, // a slow bus, so that the queue fills
        ..config(EventBus::InProcess)
    };
    let (plane, mut publisher) = start(&config, false);
    let mut subscriber = plane.hub().subscribe(1 << 30);
    // This one was not requested: a router joined.
    publisher.on_kv_snapshot(&stores(1, 9_999_999, 1));
    let asked = Arc::new((AtomicU32::new(0), Mutex::new(Vec::new())));
    let asking = Arc::clone(&asked);
    plane.on_lost_kv(move |rank| {
        asking.0.fetch_add(1, Ordering::Relaxed);
        asking.1.lock().unwrap().push(rank);
    });
    let counts = plane.counts();
    let mut at = 0;
    wait_until("a full queue", || {
        publisher.on_kv(&stores(1, at, 1000));
        publisher.flush();
        at += 1000;
        counts.queues()[1].1 > 0
    });
    wait_until("a request for a snapshot", || {
        publisher.flush(); // as an idle thread
        asked.0.load(Ordering::Relaxed) > 0
    });
    assert_eq!(*asked.1.lock().unwrap(), [rank(1)]);
    publisher.on_kv_snapshot(&stores(1, 0, 7));
    publisher.flush();
    drop(plane);
    let events = all(&mut subscriber);
    let blocks = |event: &Event| match &KvEventBatch::decode(&event.payload).unwrap().events[..] {
        [KvEvent::BlockStored(stored)] => stored.block_hashes.clone(),
        other => panic!("{other:?}"),
    };
    let unasked = ExternalHash::Int(1000 + 9_999_999);
    assert!(events.iter().all(|event| !blocks(event).contains(&unasked)));
    assert_eq!(blocks(events.last().unwrap()).len(), 7, "the snapshot");
    let sequences: Vec<u64> = events.iter().filter_map(|event| event.sequence).collect();
    let published = sequences.last().unwrap() + 1;
    assert!(published > sequences.len() as u64, "the gap shows");
}
