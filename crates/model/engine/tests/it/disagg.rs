//! One engine computes the prompt, another generates: blocks are held, reserved and filled.

use proptest::prelude::*;
use slipstream_base::{RequestId, SimTime};
use slipstream_config::cluster::EngineConfig;
use slipstream_engine::Reserved;

use crate::rig::{Rig, STEP_NS, request, small, tokens_of};

fn reserved(rig: &mut Rig) -> Vec<Reserved> {
    let mut out = Vec::new();
    rig.engine.take_reserved(&mut out);
    out
}

fn add_answer(rig: &mut Rig, id: u64, len: u32, max_tokens: u32) {
    let request = request(id, &tokens_of(id, len), max_tokens);
    rig.engine.add_answer(rig.now, request).unwrap();
}

#[test]
fn a_computed_prompt_is_held_until_somebody_has_it() {
    let mut rig = Rig::new(&small(10));
    let prompt = request(1, &tokens_of(1, 10), 50);
    rig.engine.add_prompt(rig.now, prompt).unwrap();
    assert!(rig.step());
    assert_eq!(rig.finished[&1].1.output_tokens, 1, "the prompt alone");
    assert!(rig.engine.is_idle() && rig.engine.hands_over());
    assert_eq!(rig.engine.stats().used_blocks, 3);

    // 8 blocks are wanted, 7 are free: it waits until the 3 are given back.
    rig.add_len(2, 32, 1);
    assert!(!rig.step());
    assert!(rig.engine.release_held(RequestId(1)));
    assert!(!rig.engine.release_held(RequestId(1)), "once");
    assert!(rig.step());
    assert_eq!(rig.finished[&2].1.output_tokens, 1);
    assert_eq!(rig.engine.stats().used_blocks, 0);
}

#[test]
fn an_answer_begins_one_pass_after_its_prompt_has_come() {
    let mut rig = Rig::new(&small(10));
    add_answer(&mut rig, 1, 10, 3);
    assert!(!rig.step(), "nothing to compute yet");
    assert_eq!(
        reserved(&mut rig),
        [Reserved {
            id: RequestId(1),
            cached_tokens: 0
        }]
    );
    assert_eq!(rig.engine.stats().used_blocks, 3);
    rig.now = SimTime(5 * STEP_NS);
    assert!(rig.engine.receive(RequestId(1)));
    assert!(!rig.engine.receive(RequestId(1)), "once");
    // One token of the prompt, as a decode with 10 tokens of context.
    assert!(rig.step());
    assert_eq!(rig.work(), (0, 0, 0, 1, 10));
    assert_eq!(rig.out.first[0].admitted, SimTime(5 * STEP_NS));
    rig.run_until_idle();
    assert_eq!(rig.answers[&1].len(), 3);
    assert_eq!(rig.now, SimTime(8 * STEP_NS));

    // Received blocks can be hit: 2 blocks of the prompt. The third was never full.
    let again = request(2, &tokens_of(1, 10), 3);
    rig.engine.add_answer(rig.now, again).unwrap();
    assert!(!rig.step());
    assert_eq!(reserved(&mut rig)[0].cached_tokens, 8);
    assert!(rig.engine.abort(RequestId(2)), "its source is gone");
    assert!(!rig.engine.receive(RequestId(2)));
    assert_eq!(rig.engine.stats().used_blocks, 0);
    rig.engine.audit();
}

#[test]
fn blocks_are_reserved_in_turn_and_beside_a_pass() {
    let mut rig = Rig::new(&small(11));
    rig.add_len(1, 20, 9); // 5 blocks, 7 in the end
    add_answer(&mut rig, 2, 16, 2); // 4 blocks
    add_answer(&mut rig, 3, 16, 2);
    assert!(rig.step());
    let ids: Vec<_> = reserved(&mut rig).iter().map(|r| r.id.0).collect();
    assert_eq!(ids, [2], "no room for the third");
    for _ in 0..8 {
        assert!(rig.step());
    }
    assert!(rig.finished.contains_key(&1));
    assert!(!rig.step());
    assert_eq!(reserved(&mut rig)[0].id.0, 3);
    rig.engine.receive(RequestId(2));
    rig.engine.receive(RequestId(3));
    rig.run_until_idle();
    assert_eq!((rig.answers[&2].len(), rig.answers[&3].len()), (2, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// In any order of prompts, answers, arrivals of blocks and aborts: every invariant holds
    /// after each step, everything ends, and no block is lost.
    #[test]
    fn parts_of_sequences_never_lose_blocks(
        ops in prop::collection::vec((0u8..7, 1u32..40, 1u32..12, any::<prop::sample::Index>()), 1..80),
        blocks in 12u32..40,
        caching in any::<bool>(),
    ) {
        let config = EngineConfig {
            enable_prefix_caching: caching,
            max_num_seqs: 4,
            ..small(blocks)
        };
        let mut rig = Rig::new(&config);
        let (mut live, mut held, mut loading) = (Vec::new(), Vec::new(), Vec::new());
        for (id, (op, len, tokens, which)) in (0u64..).zip(ops) {
            // Few different prompts, so that some are found cached.
            let request = request(id, &tokens_of(u64::from(len % 3), len), tokens);
            match op {
                0 => rig.engine.add(rig.now, request).unwrap(),
                1 => {
                    rig.engine.add_prompt(rig.now, request).unwrap();
                    held.push(id);
                }
                2 => rig.engine.add_answer(rig.now, request).unwrap(),
                3 if !loading.is_empty() => {
                    let id: u64 = loading.remove(which.index(loading.len()));
                    prop_assert!(rig.engine.receive(RequestId(id)));
                }
                4 if !live.is_empty() => {
                    let id: u64 = live[which.index(live.len())];
                    rig.engine.abort(RequestId(id));
                    loading.retain(|&l| l != id);
                }
                5 if !held.is_empty() => {
                    rig.engine.release_held(RequestId(held[which.index(held.len())]));
                }
                _ => {
                    rig.step();
                }
            }
            live.push(id);
            loading.extend(reserved(&mut rig).iter().map(|r| r.id.0));
            rig.engine.audit();
        }
        for _ in 0..10_000 {
            if rig.step() {
                continue;
            }
            loading.extend(reserved(&mut rig).iter().map(|r| r.id.0));
            let held_any = held.drain(..).filter(|&id| rig.engine.release_held(RequestId(id))).count();
            let came = loading.drain(..).filter(|&id| rig.engine.receive(RequestId(id))).count();
            if held_any + came == 0 {
                break;
            }
            held.extend(&live);
        }
        loading.extend(reserved(&mut rig).iter().map(|r| r.id.0));
        prop_assert!(rig.engine.is_idle() && !rig.engine.hands_over());
        prop_assert_eq!(rig.engine.stats().used_blocks, 0);
        rig.engine.audit();
    }
}
