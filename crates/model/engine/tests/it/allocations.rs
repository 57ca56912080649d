//! A steady pass allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use slipstream_base::{EngineRequest, Prompt, SimTime, Tail};
use slipstream_engine::DecodeRun;

use crate::rig::{ROOT, Rig, request, small, tokens_of};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed to the system's allocator unchanged; the counter is a plain cell of
// the thread, whose access neither allocates nor panics (`try_with` covers threads that end).
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` came from `System.alloc` with this `layout`, as the caller promises.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations(f: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    f();
    ALLOCATIONS.with(Cell::get) - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(vec![1u8; 100])), 1);
}

/// Requests that arrive and end all the time, in a cache that is full.
#[test]
fn passes_of_a_warm_engine_allocate_nothing() {
    let mut rig = Rig::new(&small(60));
    let mut decodes = DecodeRun::default();
    let mut counted = 0;
    let mut id = 0;
    for round in 0..40 {
        // Requests that the driver makes, and adding them, are no part of a pass.
        while rig.engine.stats().running + rig.engine.stats().waiting < 6 {
            let mut r: EngineRequest = request(id, &tokens_of(id % 97, 12), 10 + id as u32 % 20);
            if id % 2 == 0 {
                let blocks = r.prompt.blocks().into();
                let tail = Tail::Opaque { id };
                r.prompt = Prompt::from_parts(12, 4, blocks, tail)
                    .unwrap()
                    .with_root(ROOT);
            }
            rig.add(r).unwrap();
            id += 1;
        }
        let passes = allocations(|| {
            let (engine, out) = (&mut rig.engine, &mut rig.out);
            let mut now = rig.now;
            for _ in 0..8 {
                if engine.decode_run(now, SimTime::MAX, 3, &mut decodes) > 0 {
                    now = *decodes.ends.last().unwrap();
                }
                if let Some(end) = engine.begin_pass(now) {
                    engine.finish_pass(out);
                    now = end;
                }
            }
            rig.now = now;
        });
        if round >= 20 {
            counted += passes;
        }
    }
    let stats = rig.engine.stats();
    assert!(
        stats.preemptions == 0 && stats.cached_blocks > 50,
        "{stats:?}"
    );
    assert!(id > 100, "requests come and go");
    assert_eq!(counted, 0);
}
