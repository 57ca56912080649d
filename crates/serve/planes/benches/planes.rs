//! Stream table, frame encoding and decoding, sending through a ring.

use std::hint::black_box;
use std::sync::mpsc;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use slipstream_base::RankId;
use slipstream_planes::bell::{TaskBell, ThreadBell};
use slipstream_planes::{
    Entry, PassFrame, Plane, PlaneLimits, StreamAddr, StreamId, StreamTable, ToWorker,
};

/// Register, look up, remove: with 1,024 other streams open, and on several threads at once (a
/// table each, as shards have).
fn stream_table(c: &mut Criterion) {
    let mut group = c.benchmark_group("stream_table");
    group.bench_function("register_lookup_remove", |b| {
        let table: StreamTable<[u64; 8]> = StreamTable::new(0, 1 << 16);
        let _open: Vec<_> = (0..1024).map(|n| table.register([n; 8]).unwrap()).collect();
        b.iter(|| {
            let registration = table.register([7; 8]).unwrap();
            table
                .with(registration.id(), |value| value[0] += 1)
                .unwrap();
        });
    });
    group.bench_function("lookup_of_1024", |b| {
        let table: StreamTable<[u64; 8]> = StreamTable::new(0, 1 << 16);
        let open: Vec<_> = (0..1024).map(|n| table.register([n; 8]).unwrap()).collect();
        let mut at = 0;
        b.iter(|| {
            at = (at + 517) % open.len();
            table.with(open[at].id(), |value| value[0] += 1)
        });
    });
    for threads in [1, 2, 4, 8] {
        group.bench_function(format!("register_lookup_remove_{threads}_threads"), |b| {
            b.iter_custom(|iterations| on_threads(threads, iterations));
        });
    }
    group.finish();
}

/// CPU time of the calling thread: what eight threads on four cores need, without the waiting.
fn thread_cpu() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Mean CPU time over threads that all do `iterations`.
fn on_threads(threads: usize, iterations: u64) -> Duration {
    let workers: Vec<_> = (0..threads)
        .map(|shard| {
            std::thread::spawn(move || {
                let table: StreamTable<[u64; 8]> = StreamTable::new(shard as u8, 1 << 16);
                let began = thread_cpu();
                for n in 0..iterations {
                    let registration = table.register([n; 8]).unwrap();
                    table
                        .with(registration.id(), |value| value[0] += 1)
                        .unwrap();
                }
                thread_cpu().saturating_sub(began)
            })
        })
        .collect();
    let total: Duration = workers
        .into_iter()
        .map(|worker| worker.join().unwrap())
        .sum();
    total / threads as u32
}

fn stream(slot: u32) -> StreamId {
    StreamId {
        slot,
        generation: 1,
    }
}

const PASS: u32 = 256;

/// A pass of 256 sequences, one token each; the figures are per token.
fn frame(c: &mut Criterion) {
    let mut group = c.benchmark_group("frame");
    group.throughput(Throughput::Elements(u64::from(PASS)));
    let mut frame = PassFrame::new();
    group.bench_function("encode_256_tokens", |b| {
        b.iter(|| {
            frame.clear();
            for slot in 0..PASS {
                frame.push_tokens(stream(slot), &[black_box(slot)], None);
            }
            frame.len()
        });
    });
    group.bench_function("decode_256_tokens", |b| {
        b.iter(|| {
            let mut sum = 0u64;
            for entry in black_box(&frame).entries() {
                if let Entry::Tokens { stream, tokens, .. } = entry {
                    sum += u64::from(stream.slot) + u64::from(tokens[0]);
                }
            }
            sum
        });
    });
    group.bench_function("check_256_tokens_from_elsewhere", |b| {
        let words = frame.parts().0.to_vec();
        b.iter_batched(
            || words.clone(),
            |words| PassFrame::from_parts(words, String::new(), 0).unwrap(),
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

fn kill() -> ToWorker {
    ToWorker::Kill {
        rank: RankId::default(),
        addr: StreamAddr {
            shard: 0,
            stream: stream(0),
        },
    }
}

/// One message in and out again on one thread: the cost of the ring and its bell without the
/// transfer between caches; and the same through what else could have been used.
fn ring(c: &mut Criterion) {
    let mut group = c.benchmark_group("ring");
    let mut plane = Plane::new(1, 1, PlaneLimits::default());
    let (shard, mut thread) = (plane.shards.pop().unwrap(), plane.threads.pop().unwrap());
    group.bench_function("request", |b| {
        b.iter(|| {
            shard.send(kill()).unwrap();
            thread.receive().unwrap()
        });
    });
    group.bench_function("request_through_sync_channel", |b| {
        let (sender, receiver) = mpsc::sync_channel(4096);
        b.iter(|| {
            sender.send(kill()).unwrap();
            receiver.recv().unwrap()
        });
    });
    group.bench_function("frame_of_256", |b| {
        b.iter(|| {
            let frame = thread.frame(0).unwrap();
            for slot in 0..PASS {
                frame.push_tokens(stream(slot), &[slot], None);
            }
            thread.flush(0, false);
            shard.read_frames(8, |frame| {
                black_box(frame.len());
            })
        });
    });
    group.bench_function("bell_of_an_awake_task", |b| {
        let bell = TaskBell::default();
        b.iter(|| bell.ring());
    });
    group.finish();
}

/// There and back between two sleeping threads: two futex wake-ups.
fn wake_up(c: &mut Criterion) {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    let there = Arc::new(ThreadBell::default());
    let back = Arc::new(ThreadBell::default());
    let count = Arc::new(AtomicU64::new(0));
    let echo = {
        let (there, back, count) = (there.clone(), back.clone(), count.clone());
        std::thread::spawn(move || {
            let mut seen = 0;
            loop {
                there.prepare();
                let now = count.load(Ordering::Acquire);
                if now == seen {
                    there.wait(None);
                    continue;
                }
                there.stay_awake();
                if now == u64::MAX {
                    return;
                }
                seen = now;
                count.store(now + 1, Ordering::Release);
                seen += 1;
                back.ring();
            }
        })
    };
    c.bench_function("ring/wake_up_there_and_back", |b| {
        b.iter(|| {
            let mine = count.load(Ordering::Acquire) + 1;
            count.store(mine, Ordering::Release);
            there.ring();
            loop {
                back.prepare();
                if count.load(Ordering::Acquire) == mine + 1 {
                    back.stay_awake();
                    break;
                }
                back.wait(None);
            }
        });
    });
    count.store(u64::MAX, Ordering::Release);
    there.ring();
    echo.join().unwrap();
}

criterion_group!(benches, stream_table, frame, ring, wake_up);
criterion_main!(benches);
