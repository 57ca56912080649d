//! Answers that another engine has begun: the rest is that of an undisturbed answer.

use proptest::prelude::*;
use slipstream_base::{EngineRequest, RequestId, TokenId};
use slipstream_config::cluster::EngineConfig;
use slipstream_engine::OutputModel;

use crate::rig::{Rig, output_model, request, small, tokens_of};

fn rest(of: &EngineRequest, answered: u32) -> EngineRequest {
    let mut rest = of.clone();
    rest.params.answered = answered;
    rest
}

fn answer(rig: &mut Rig, request: EngineRequest) -> Vec<TokenId> {
    let id = request.id.0;
    rig.add(request).unwrap();
    rig.run_until_idle();
    rig.answers.remove(&id).unwrap()
}

proptest! {
    #[test]
    fn the_rest_follows_the_part_that_is_there(
        isl in 1u32..40,
        max_tokens in 2u32..60,
        natural in 1u32..80,
        min_tokens in 0u32..60,
        stops: bool,
        other_first: bool,
        cut in 0u32..1_000,
        chunk in 8u32..64,
    ) {
        let model = OutputModel {
            first_vocab: other_first.then(|| (2_000..2_100).collect()),
            ..output_model(natural)
        };
        let config = EngineConfig { max_num_batched_tokens: chunk, ..small(200) };
        let mut whole = request(1, &tokens_of(1, isl), max_tokens);
        whole.params.min_tokens = min_tokens.min(max_tokens);
        if stops {
            whole.params.stop_token_ids = (1_000..1_010).collect();
        }
        let mut rig = Rig::with_output(&config, model.clone());
        let expected = answer(&mut rig, whole.clone());
        let (reason, usage) = rig.finished[&1];
        prop_assume!(expected.len() > 1);
        let answered = 1 + cut % (expected.len() as u32 - 1);

        let mut rig = Rig::with_output(&config, model);
        let found = answer(&mut rig, rest(&whole, answered));
        prop_assert_eq!(&found[..], &expected[answered as usize..]);
        prop_assert_eq!(rig.finished[&1].0, reason);
        prop_assert_eq!(rig.finished[&1].1.output_tokens, usage.output_tokens);
        prop_assert_eq!(rig.engine.stats().used_blocks, 0);
    }

    /// Blocks are too few for all, so that sequences are preempted before and after their first token here.
    #[test]
    fn continued_answers_survive_preemption(
        // At most 56 tokens each, as many as the 14 blocks hold.
        sequences in prop::collection::vec((1u32..20, 1u32..20, 1u32..19), 1..6),
    ) {
        let mut rig = Rig::new(&small(14));
        let mut expected = Vec::new();
        for (id, &(isl, answered, more)) in (0u64..).zip(&sequences) {
            let whole = request(id, &tokens_of(id, isl), answered + more);
            let all = answer(&mut Rig::new(&small(200)), whole.clone());
            expected.push(all[answered as usize..].to_vec());
            rig.add(rest(&whole, answered)).unwrap();
        }
        let mut firsts = 0;
        while rig.step() {
            firsts += rig.out.first.len();
        }
        prop_assert_eq!(firsts, sequences.len(), "each has its first token here once");
        for (id, expected) in (0u64..).zip(&expected) {
            prop_assert_eq!(&rig.answers[&id], expected);
        }
        prop_assert_eq!(rig.engine.stats().used_blocks, 0);
    }
}

#[test]
fn the_part_that_is_there_is_computed_with_the_prompt_and_can_be_hit() {
    let whole = request(1, &tokens_of(1, 10), 40);
    let mut rig = Rig::new(&small(50));
    rig.add(rest(&whole, 11)).unwrap();
    assert!(rig.step());
    assert_eq!(rig.work(), (1, 21, 0, 0, 0), "a prompt of 21 tokens");
    assert_eq!(rig.out.first.len(), 1);
    assert_eq!(rig.out.fpm.queued_decode.requests, 0);
    rig.run_until_idle();
    // The same blocks as those of an engine that generated all of it.
    let mut other = Rig::new(&small(50));
    let all = answer(&mut other, whole.clone());
    assert_eq!(rig.answers[&1], all[11..]);
    let again = EngineRequest {
        id: RequestId(2),
        ..rest(&whole, 11)
    };
    other.add(again).unwrap();
    assert!(other.step());
    assert_eq!(
        other.out.first[0].cached_tokens, 20,
        "5 full blocks of 21 tokens"
    );
}

#[test]
fn a_prompt_with_the_part_that_is_there_is_computed_for_another_engine() {
    let whole = request(1, &tokens_of(1, 10), 40);
    let all = answer(&mut Rig::new(&small(50)), whole.clone());
    let mut prefill = Rig::new(&small(50));
    prefill
        .engine
        .add_prompt(prefill.now, rest(&whole, 11))
        .unwrap();
    assert!(prefill.step());
    assert_eq!(
        prefill.engine.stats().used_blocks,
        6,
        "held: 21 tokens in blocks of 4"
    );
    assert!(prefill.finished.contains_key(&1));

    let mut decode = Rig::new(&small(50));
    decode
        .engine
        .add_answer(decode.now, rest(&whole, 11))
        .unwrap();
    assert!(!decode.step());
    let mut reserved = Vec::new();
    decode.engine.take_reserved(&mut reserved);
    assert_eq!(reserved.len(), 1);
    assert!(decode.engine.receive(RequestId(1)));
    assert!(decode.step());
    assert_eq!(decode.work(), (0, 0, 0, 1, 21), "as a decode");
    assert_eq!(decode.out.first.len(), 1);
    decode.run_until_idle();
    assert_eq!(decode.answers[&1], all[11..]);
}

#[test]
fn an_answer_that_is_complete_or_too_long_is_refused() {
    let mut rig = Rig::new(&small(50));
    let whole = request(1, &tokens_of(1, 10), 40);
    assert!(rig.add(rest(&whole, 40)).is_err(), "nothing is left");
    let longer = request(1, &tokens_of(1, 10), 2_000);
    assert!(
        rig.add(rest(&longer, 1_500)).is_err(),
        "beyond the model's length"
    );
    assert!(rig.engine.is_idle());
}
