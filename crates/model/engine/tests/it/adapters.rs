//! LoRA adapters: limits and loads worked out by hand.

use slipstream_base::{GenerationParams, SimTime};
use slipstream_config::cluster::{EngineConfig, LoraConfig};

use crate::rig::{Rig, STEP_NS, request, small, tokens_of};

const LOAD_NS: u64 = 500;
const ACTIVATE_NS: u64 = 200;

fn rig(max_loras: u32, max_cpu_loras: u32) -> Rig {
    Rig::new(&EngineConfig {
        lora: Some(LoraConfig {
            max_loras,
            max_cpu_loras,
            load_ns: LOAD_NS,
            activate_ns: ACTIVATE_NS,
        }),
        ..small(100)
    })
}

/// Adds a prompt of its own for `adapter`; 0 is the model itself.
fn add(rig: &mut Rig, id: u64, adapter: u64, max_tokens: u32) {
    let mut request = request(id, &tokens_of(id, 6), max_tokens);
    request.params = GenerationParams {
        adapter,
        ..request.params
    };
    rig.add(request).unwrap();
}

/// How long each pass takes, and the sequences in it.
fn passes(rig: &mut Rig) -> Vec<(u64, Vec<u64>)> {
    let mut passes = Vec::new();
    loop {
        let before = rig.now;
        if !rig.step() {
            return passes;
        }
        passes.push((rig.now.since(before), rig.ids()));
    }
}

#[test]
fn an_adapter_too_many_waits_and_others_pass_it() {
    let mut rig = rig(1, 1);
    for (id, adapter) in [(0, 7), (1, 8), (2, 0), (3, 7)] {
        add(&mut rig, id, adapter, 2);
    }
    let load = STEP_NS + LOAD_NS + ACTIVATE_NS;
    assert_eq!(
        passes(&mut rig),
        [
            (load, vec![0, 2, 3]),
            (STEP_NS, vec![0, 2, 3]),
            (load, vec![1]),
            (STEP_NS, vec![1]),
        ]
    );
    assert_eq!(rig.engine.adapter_loads(), (2, 2));
}

#[test]
fn sequences_that_waited_keep_their_order() {
    let mut rig = rig(1, 1);
    for (id, adapter) in [(0, 7), (1, 8), (2, 9), (3, 8), (4, 9)] {
        add(&mut rig, id, adapter, 1);
    }
    let order: Vec<Vec<u64>> = passes(&mut rig).into_iter().map(|pass| pass.1).collect();
    assert_eq!(order, [vec![0], vec![1, 3], vec![2, 4]]);
}

/// Of two slots on the GPUs, the one that was used least recently is taken; host memory holds three.
#[test]
fn the_least_recently_used_adapter_makes_room() {
    let mut rig = rig(2, 3);
    let mut cost = |adapter| {
        let id = rig.now.0;
        add(&mut rig, id, adapter, 1);
        let passes = passes(&mut rig);
        assert_eq!(passes.len(), 1);
        passes[0].0 - STEP_NS
    };
    let (fresh, kept) = (LOAD_NS + ACTIVATE_NS, ACTIVATE_NS);
    let found = [1, 2, 1, 3, 1, 2, 4, 3, 2].map(&mut cost);
    // 3 takes the slot of 2, 2 that of 3, and 4 that of 1. Host memory has 1, 2, 3 until 4 takes the place of 3; then 3
    // takes that of 1.
    assert_eq!(found, [fresh, fresh, 0, fresh, 0, kept, fresh, fresh, kept]);
}

#[test]
fn a_restart_forgets_adapters() {
    let mut rig = rig(1, 1);
    add(&mut rig, 0, 7, 1);
    assert_eq!(passes(&mut rig)[0].0, STEP_NS + LOAD_NS + ACTIVATE_NS);
    rig.engine.restart();
    add(&mut rig, 1, 7, 1);
    assert_eq!(passes(&mut rig)[0].0, STEP_NS + LOAD_NS + ACTIVATE_NS);
    assert_eq!(rig.now, SimTime(2 * (STEP_NS + LOAD_NS + ACTIVATE_NS)));
}

/// Passes that are jumped over load nothing, and leave what they use as used last.
#[test]
fn jumps_load_nothing() {
    let mut rig = rig(2, 2);
    add(&mut rig, 0, 7, 40);
    add(&mut rig, 1, 8, 2);
    rig.step();
    rig.step();
    let mut run = slipstream_engine::DecodeRun::default();
    let until = SimTime(u64::MAX);
    let passes_run = rig.engine.decode_run(rig.now, until, 20, &mut run);
    assert_eq!(passes_run, 20);
    rig.now = run.ends[19];
    assert_eq!(rig.now, SimTime(22 * STEP_NS + 2 * (LOAD_NS + ACTIVATE_NS)));
    // 7 was used last, so that 9 takes the place of 8.
    add(&mut rig, 2, 9, 1);
    add(&mut rig, 3, 8, 1);
    rig.step();
    assert_eq!(rig.ids(), [0, 2]);
    assert_eq!(rig.engine.adapter_loads(), (3, 3));
}
