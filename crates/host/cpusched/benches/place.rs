//! Native cost of a placement decision, by path: 22 LLCs of 8 CPUs, 1,000 tasks.
//!
//! `cargo bench -p slipstream-cpusched`

use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use slipstream_cpusched::policy::{
    COUNTERS, Core, Params, WAKE_PREV_OK, WAKE_SYNC, WAKE_WAKER_OK, Wake,
};

const WAKER: u32 = 9;

/// The expected path, the wake-up's flags, and the busy CPUs.
type Case = (&'static str, u32, fn(u32) -> bool);

/// All CPUs idle except those of `busy`; each task last ran on the CPU of its number.
fn host(busy: impl Fn(u32) -> bool) -> Core {
    let mut core = Core::new(Params::with_defaults(), 22, 8, 2);
    for cpu in 0..176 {
        core.set_idle(cpu, !busy(cpu));
    }
    for task in 0..1_000 {
        core.add_task(100, task % 176);
        core.tasks[task as usize].runs_on_llc = 100;
    }
    core
}

fn place(c: &mut Criterion) {
    let sync = WAKE_SYNC | WAKE_WAKER_OK | WAKE_PREV_OK;
    let cases: [Case; 5] = [
        ("handoff", sync, |cpu| cpu == WAKER),
        ("prev_idle", WAKE_PREV_OK, |cpu| cpu == WAKER),
        ("llc_core", WAKE_PREV_OK, |cpu| cpu == 12),
        ("far_idle", WAKE_PREV_OK, |cpu| cpu / 8 == 1),
        ("queue_llc", WAKE_PREV_OK, |_| true),
    ];
    let mut group = c.benchmark_group("place");
    for (path, flags, busy) in cases {
        let fresh = host(busy);
        let mut now = 0;
        // The policy's whole work for a wake-up: account, place, slice.
        let mut decide = move |core: &mut Core| {
            now += 1_000;
            let wake = Wake {
                now,
                rnd: now.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                waker_cpu: WAKER,
                prev_cpu: 12,
                flags,
                ..Wake::default()
            };
            core.account(12, 12, now, true);
            let p = core.place(12, Some(9), black_box(wake), None);
            (p.path, core.slice(12, p.llc))
        };
        assert_eq!(COUNTERS[decide(&mut fresh.clone()).0 as usize], path);
        // A claimed CPU is restored by a fresh copy of the host, whose creation is not measured.
        group.bench_function(path, |b| {
            b.iter_batched_ref(|| fresh.clone(), &mut decide, BatchSize::SmallInput);
        });
    }
    group.finish();
}

criterion_group!(benches, place);
criterion_main!(benches);
