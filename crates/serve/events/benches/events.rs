//! Cost of publishing a pass on an engine thread.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use slipstream_base::fpm::{DecodeStats, PrefillStats};
use slipstream_base::{BlockHash, ForwardPassMetrics, KvDelta, KvOp, RankId};
use slipstream_config::cluster::{EventBus, EventsConfig};
use slipstream_events::fpm::{FpmMessage, write_fpm};
use slipstream_events::{EventPlane, PlaneOptions};
use slipstream_planes::EventSink;

fn record() -> ForwardPassMetrics {
    ForwardPassMetrics {
        counter: 1_234_567,
        wall_time_s: 0.0123,
        scheduled_prefill: PrefillStats {
            requests: 2,
            tokens: 1024,
            length_variance: 65_536.0,
        },
        scheduled_prefill_kv_tokens: 512,
        scheduled_decode: DecodeStats {
            requests: 254,
            kv_tokens: 390_000,
            kv_tokens_variance: 87_000.5,
        },
        ..ForwardPassMetrics::default()
    }
}

fn encode(c: &mut Criterion) {
    let fpm = record();
    let mut group = c.benchmark_group("fpm");
    let mut buffer = Vec::new();
    group.bench_function("borrowed, buffer used again", |b| {
        b.iter(|| {
            buffer.clear();
            write_fpm(&mut buffer, black_box("w0"), black_box(&fpm));
            buffer.len()
        });
    });
    group.bench_function("owned, new buffer", |b| {
        b.iter(|| FpmMessage::new(black_box("w0"), black_box(&fpm)).to_vec());
    });
    let bytes = FpmMessage::new("w0", &fpm).to_vec();
    group.bench_function("decode", |b| {
        b.iter(|| FpmMessage::decode(black_box(&bytes)));
    });
    group.finish();
}

/// The engine thread's whole work: encode, queue, ring. The bus thread discards the events.
fn publish(c: &mut Criterion) {
    let mut group = c.benchmark_group("publish");
    for (name, fresh_buffers) in [("as it is", false), ("fresh buffers", true)] {
        let config = EventsConfig {
            bus: EventBus::InProcess,
            ..EventsConfig::default()
        };
        let options = PlaneOptions {
            ranks: vec![(RankId::default(), 0)],
            threads: 1,
            block_size: 16,
            root: BlockHash::default(),
            fresh_buffers,
        };
        let started = EventPlane::start(&config, &options).expect("needs nothing");
        let (_plane, mut publishers) = started.expect("a bus is named");
        let publisher = &mut publishers[0];
        let mut fpm = record();
        group.bench_function(format!("a pass, {name}"), |b| {
            b.iter(|| {
                fpm.counter += 1;
                publisher.on_fpm(&fpm);
                publisher.flush();
            });
        });
        let mut delta = KvDelta {
            ops: (1..9)
                .map(|n| KvOp::Stored {
                    hash: BlockHash(n << 40),
                    parent: BlockHash((n - 1) << 40),
                })
                .collect(),
            ..KvDelta::default()
        };
        group.bench_function(format!("8 blocks without tokens, {name}"), |b| {
            b.iter(|| {
                delta.sequence += 1;
                publisher.on_kv(&delta);
                publisher.flush();
            });
        });
    }
    group.finish();
}

criterion_group!(benches, encode, publish);
criterion_main!(benches);
