//! Sets of whole keys and the index of peers: `cargo bench -p slipstream-kvindex --bench keys`.
//!
//! Keys have 36 bytes, as vLLM's under SHA-256. The slowest step of a resync is timed by hand and in
//! CPU time, because its maximum matters, not its mean.
#![allow(clippy::disallowed_methods)] // it has threads, clocks or files

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use slipstream_base::mix::draw;
use slipstream_base::{BlockHash, SimTime};
use slipstream_kvindex::{Change, KeySet, PeerIndex, digest};

const HELD: u64 = 1 << 16;
const STEP: u64 = 512;
/// Keys of a snapshot in one message.
const CHUNK: usize = 1_024;

type Key = [u8; 36];

fn key(of: u64, n: u64) -> Key {
    let mut key = [0; 36];
    for (word, bytes) in key.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&draw(of, n * 8 + word as u64).to_le_bytes()[..bytes.len()]);
    }
    key
}

fn keys(of: u64, count: u64) -> Vec<Key> {
    (0..count).map(|n| key(of, n)).collect()
}

fn full_set(of: u64, held: u64) -> (KeySet, Vec<Key>) {
    let keys = keys(of, held);
    let mut set = KeySet::new(held as usize + 2 * STEP as usize, 1);
    let changes = keys.iter().zip(0..);
    set.apply(changes.map(|(key, block)| (&key[..], Change::Add(block))))
        .expect("keys of one length");
    (set, keys)
}

/// A step of prefill churn in a full pool: 512 blocks in, 512 others out, and a message of both.
fn churn(c: &mut Criterion) {
    let mut group = c.benchmark_group("key_set/churn_512_in_512_out");
    group.throughput(Throughput::Elements(2 * STEP));
    for held in [2_048, 1 << 14, HELD, 1 << 18] {
        for consumed in [false, true] {
            let (mut set, mut ring) = full_set(1, held);
            set.set_consumed(consumed);
            let mut message = Vec::new();
            while set.message_into(CHUNK, &mut message) {
                message.clear();
            }
            let fresh = keys(2, held);
            let mut at = 0;
            let name = if consumed { "consumed" } else { "unconsumed" };
            group.bench_function(BenchmarkId::new(name, held), |b| {
                b.iter(|| {
                    for n in at..at + STEP as usize {
                        // In turn, so that a removed key returns two rounds later.
                        let old = std::mem::replace(&mut ring[n], fresh[n]);
                        let same = old == fresh[n];
                        let new = if same { key(1, n as u64) } else { fresh[n] };
                        ring[n] = new;
                        set.change(&old, Change::Remove(n as u32))
                            .expect("36 bytes");
                        set.change(&new, Change::Add(n as u32)).expect("36 bytes");
                    }
                    at = (at + STEP as usize) % ring.len();
                    message.clear();
                    black_box(set.message_into(CHUNK, &mut message));
                });
            });
        }
    }
    group.finish();
}

/// A decode step: two more blocks.
fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("key_set/decode_2_in");
    for held in [2_048, 1 << 14, HELD, 1 << 18] {
        let (mut set, _) = full_set(1, held);
        set.set_consumed(true);
        let mut message = Vec::new();
        while set.message_into(CHUNK, &mut message) {
            message.clear();
        }
        let fresh = keys(2, 1 << 12);
        let mut at = 0;
        group.bench_function(BenchmarkId::from_parameter(held), |b| {
            b.iter(|| {
                let change = if (at / fresh.len()).is_multiple_of(2) {
                    Change::Add
                } else {
                    Change::Remove
                };
                for n in at..at + 2 {
                    set.change(&fresh[n % fresh.len()], change(n as u32 % 4_096))
                        .expect("36 bytes");
                }
                at += 2;
                message.clear();
                black_box(set.message_into(CHUNK, &mut message));
            });
        });
    }
    group.finish();
}

/// 64 peers with 16,384 keys each, half of them in chains common to all.
fn full_index(peers: usize) -> PeerIndex {
    let held = 1 << 14;
    let index = PeerIndex::new(peers, peers * held, u64::MAX);
    let shared = keys(7, held as u64 / 2);
    for peer in 0..peers {
        let mut set = KeySet::new(held, 1);
        set.set_consumed(true);
        let own = keys(100 + peer as u64, held as u64 / 2);
        set.apply(
            shared
                .iter()
                .chain(&own)
                .map(|key| (&key[..], Change::Add(0))),
        )
        .expect("keys of one length");
        while let Some(message) = set.message(CHUNK) {
            index.apply(SimTime(0), peer, &message).expect("in order");
        }
    }
    assert_eq!(index.dropped_total(), 0);
    index
}

fn look_up(c: &mut Criterion) {
    let mut group = c.benchmark_group("peer_index/look_up_256");
    let index = full_index(64);
    let mut out = vec![0; 64];
    let chains = |of: u64, count: u64| -> Vec<Vec<Key>> {
        let all = keys(of, count * 256);
        all.chunks(256).map(<[Key]>::to_vec).collect()
    };
    let cases = [
        ("all_peers_hold_it", chains(7, 32)),
        ("one_peer_holds_it", chains(140, 32)),
        ("no_peer_holds_it", chains(9_999, 32)),
    ];
    for (name, chains) in &cases {
        let mut turn = 0;
        let mut digests: Vec<BlockHash> = Vec::new();
        group.bench_function(*name, |b| {
            b.iter(|| {
                turn = (turn + 1) % chains.len();
                digests.clear();
                digests.extend(chains[turn].iter().map(|key| digest(key)));
                index.overlap(black_box(&digests), &mut out);
            });
        });
    }
    // Every run ends at another block: 64 peers hold 4, 8, ... 256 blocks.
    let stairs = PeerIndex::new(64, 64 * 256, u64::MAX);
    let chain = keys(5, 256);
    for peer in 0..64 {
        let mut set = KeySet::new(256, 1);
        set.set_consumed(true);
        let held = &chain[..4 * (peer + 1)];
        set.apply(held.iter().map(|key| (&key[..], Change::Add(0))))
            .expect("keys of one length");
        let message = set.message(CHUNK).expect("a snapshot");
        stairs.apply(SimTime(0), peer, &message).expect("in order");
    }
    group.bench_function("64_runs_end_apart", |b| {
        b.iter(|| {
            let digests: [BlockHash; 256] = std::array::from_fn(|n| digest(&chain[n]));
            stairs.overlap(black_box(&digests), &mut out);
        });
    });
    group.finish();
}

/// Messages of 512 keys in and 512 out, of one peer among 64.
fn follow(c: &mut Criterion) {
    let mut group = c.benchmark_group("peer_index/apply_512_in_512_out");
    group.throughput(Throughput::Elements(2 * STEP));
    let index = full_index(64);
    let mut set = KeySet::new(1 << 14, 2);
    set.set_consumed(true);
    let own = keys(100, 1 << 13);
    set.apply(own.iter().map(|key| (&key[..], Change::Add(0))))
        .expect("keys of one length");
    let send = |set: &mut KeySet| {
        let message = set.message(CHUNK)?;
        let start = Instant::now();
        index.apply(SimTime(0), 0, &message).expect("in order");
        Some(start.elapsed())
    };
    while send(&mut set).is_some() {}
    while index.tick(SimTime(0), CHUNK) {}
    let mut turn = 0;
    group.bench_function("64_peers", |b| {
        b.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                // Keys that return after 16 turns.
                let (new, old) = (turn % 16, (turn + 15) % 16);
                let step = |n: usize| &own[n * STEP as usize..][..STEP as usize];
                for key in step(old) {
                    set.change(key, Change::Remove(0)).expect("36 bytes");
                }
                for key in step(new) {
                    set.change(key, Change::Add(0)).expect("36 bytes");
                }
                turn += 1;
                while let Some(time) = send(&mut set) {
                    spent += time;
                }
            }
            spent
        });
    });
    group.finish();
}

/// CPU time of this thread: the duration of a step on a machine with a spare core.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The slowest step of a resync of 64k keys, on either side: percentiles over the resyncs.
fn resync(c: &mut Criterion) {
    let (mut set, _) = full_set(1, HELD);
    let index = PeerIndex::new(64, 64 << 16, u64::MAX);
    index.connect(SimTime(0), 0);
    set.set_consumed(true);
    let mut group = c.benchmark_group("resync_64k");
    let mut slowest: Vec<[Duration; 3]> = Vec::new();
    let mut message = Vec::with_capacity(1 << 20);
    let mut resync = |slowest: &mut Vec<[Duration; 3]>| {
        let mut steps = [Duration::ZERO; 3];
        let mut time = |side: usize, f: &mut dyn FnMut() -> bool| {
            let start = cpu_time();
            let more = f();
            steps[side] = steps[side].max(cpu_time().saturating_sub(start));
            more
        };
        time(0, &mut || {
            set.request_snapshot();
            true
        });
        loop {
            message.clear();
            if !time(0, &mut || set.message_into(CHUNK, &mut message)) {
                break;
            }
            time(1, &mut || index.apply(SimTime(0), 0, &message).is_ok());
        }
        while time(2, &mut || index.tick(SimTime(0), 2 * CHUNK)) {}
        assert!(index.is_known(0));
        slowest.push(steps);
    };
    group.bench_function("all_steps", |b| b.iter(|| resync(&mut slowest)));
    group.finish();
    for (side, name) in ["message", "apply", "tick"].into_iter().enumerate() {
        let mut steps: Vec<Duration> = slowest.iter().map(|steps| steps[side]).collect();
        steps.sort_unstable();
        let at = |part: f64| steps[((steps.len() - 1) as f64 * part) as usize];
        eprintln!(
            "resync_64k/slowest_{name}_step (CPU): p50 {:?}, p99 {:?}, max {:?} of {} resyncs",
            at(0.5),
            at(0.99),
            at(1.0),
            steps.len()
        );
    }
}

criterion_group!(benches, churn, decode, look_up, follow, resync);
criterion_main!(benches);
