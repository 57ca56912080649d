//! Stream table, ring hand-over, frame encoding and decoding.
use criterion::{Criterion, criterion_group, criterion_main};
use slipstream_planes::StreamTable;

fn stream_table(c: &mut Criterion) {
    let table: StreamTable<u64> = StreamTable::new(0, 1 << 16);
    c.bench_function("stream_table/register_lookup_remove", |b| {
        b.iter(|| {
            let registration = table.register(7).expect("the table is empty");
            table.with(registration.id(), |value| *value += 1)
        });
    });
}

criterion_group!(benches, stream_table);
criterion_main!(benches);
