//! Images and their encoder: passes worked out by hand.

use slipstream_base::EncoderInput;
use slipstream_config::cluster::{EncoderConfig, EngineConfig};
use slipstream_engine::Refusal;

use crate::rig::{Rig, STEP_NS, request, small, tokens_of};

const INPUT_NS: u64 = 100;
const TOKEN_NS: u64 = 10;

fn rig(budget_tokens: u32, cache_tokens: u32, whole_inputs: bool) -> Rig {
    Rig::new(&EngineConfig {
        encoder: Some(EncoderConfig {
            budget_tokens,
            cache_tokens,
            whole_inputs,
            input_ns: INPUT_NS as f64,
            token_ns: TOKEN_NS as f64,
        }),
        ..small(100)
    })
}

/// Adds a prompt of 40 tokens of its own with images, each its first token, number of tokens, and id.
fn add(rig: &mut Rig, id: u64, images: &[(u32, u32, u64)], max_tokens: u32) -> Result<(), Refusal> {
    let mut request = request(id, &tokens_of(id, 40), max_tokens);
    let input = |&(offset, tokens, id)| EncoderInput { id, offset, tokens };
    request.params.encoder_inputs = images.iter().map(input).collect();
    rig.add(request)
}

/// Of each pass: its length without the step itself, tokens of prompts, and sequences with a token.
fn passes(rig: &mut Rig) -> Vec<(u64, u64, Vec<u64>)> {
    let mut passes = Vec::new();
    loop {
        let before = rig.now;
        if !rig.step() {
            return passes;
        }
        let (_, tokens, ..) = rig.work();
        passes.push((rig.now.since(before) - STEP_NS, tokens, rig.ids()));
    }
}

/// The time of an encoder that computes inputs of so many tokens.
fn encoder_ns(inputs: &[u64]) -> u64 {
    inputs
        .iter()
        .map(|tokens| INPUT_NS + TOKEN_NS * tokens)
        .sum()
}

#[test]
fn an_image_is_computed_with_its_first_token() {
    let mut rig = rig(64, 64, false);
    add(&mut rig, 0, &[(4, 12, 7)], 2).unwrap();
    assert_eq!(
        passes(&mut rig),
        [(encoder_ns(&[12]), 40, vec![0]), (0, 0, vec![0])]
    );
    assert_eq!(rig.engine.encoded(), (1, 12));
}

#[test]
fn a_prompt_waits_before_an_image_beyond_the_budget() {
    // 12 and 12 are more than a pass computes, and more than are kept.
    let images = [(0, 12, 1), (15, 12, 2)];
    for (budget, cache) in [(20, 64), (64, 20)] {
        let mut rig = rig(budget, cache, false);
        add(&mut rig, 0, &images, 1).unwrap();
        assert_eq!(
            passes(&mut rig),
            [
                (encoder_ns(&[12]), 15, vec![]),
                (encoder_ns(&[12]), 25, vec![0])
            ]
        );
    }
    let mut rig = rig(24, 24, false);
    add(&mut rig, 0, &images, 1).unwrap();
    assert_eq!(passes(&mut rig), [(encoder_ns(&[12, 12]), 40, vec![0])]);
}

/// A sequence whose image has to wait keeps its place, and those behind it are considered.
#[test]
fn others_pass_a_prompt_that_waits_for_the_encoder() {
    let mut rig = rig(20, 64, false);
    add(&mut rig, 0, &[(0, 20, 1)], 1).unwrap();
    add(&mut rig, 1, &[(0, 20, 2)], 1).unwrap();
    add(&mut rig, 2, &[], 1).unwrap();
    assert_eq!(
        passes(&mut rig),
        [
            // 64 tokens: of the third sequence, 24.
            (encoder_ns(&[20]), 64, vec![0]),
            (encoder_ns(&[20]), 56, vec![2, 1]),
        ]
    );
}

#[test]
fn outputs_are_kept_until_others_take_their_room() {
    let mut rig = rig(64, 24, false);
    let mut cost = |image| {
        let id = rig.now.0;
        add(&mut rig, id, &[(4, 12, image)], 1).unwrap();
        let passes = passes(&mut rig);
        assert_eq!(passes.len(), 1);
        passes[0].0
    };
    let (new, kept) = (encoder_ns(&[12]), 0);
    // 3 takes the room of 2, which was left before 1 was.
    let found = [1, 2, 1, 3, 1, 2].map(&mut cost);
    assert_eq!(found, [new, new, kept, new, kept, new]);
    // One that is there twice is computed once.
    add(&mut rig, 1, &[(0, 12, 8), (20, 12, 8)], 1).unwrap();
    assert_eq!(passes(&mut rig)[0].0, new);
    assert_eq!(rig.engine.encoder_room(), (0, 24));
    rig.engine.restart();
    assert_eq!(rig.engine.encoder_room(), (24, 24));
}

#[test]
fn an_image_may_be_kept_in_one_pass() {
    // The pass has 64 tokens, of which the first sequence takes 40.
    for (whole, second) in [(false, 24), (true, 10)] {
        let mut rig = rig(64, 64, whole);
        add(&mut rig, 0, &[], 1).unwrap();
        add(&mut rig, 1, &[(10, 20, 1)], 1).unwrap();
        let passes = passes(&mut rig);
        assert_eq!(passes[0].1, 40 + second, "{whole}");
        let first = if whole { 0 } else { encoder_ns(&[20]) };
        assert_eq!(
            (passes[0].0, passes[1].0),
            (first, encoder_ns(&[20]) - first)
        );
    }
}

#[test]
fn an_image_that_never_fits_is_refused() {
    for (budget, cache) in [(64, 19), (19, 64)] {
        let mut rig = rig(budget, cache, false);
        let refused = add(&mut rig, 0, &[(0, 20, 1)], 1).unwrap_err();
        let most = 19;
        assert_eq!(refused, Refusal::EncoderInput { tokens: 20, most });
    }
    // A whole image must fit a pass of 64 tokens.
    let mut whole = rig(100, 100, true);
    let refused = add(&mut whole, 0, &[(0, 65, 1)], 1).unwrap_err();
    assert_eq!(
        refused,
        Refusal::EncoderInput {
            tokens: 65,
            most: 64
        }
    );
    let mut none = Rig::new(&small(100));
    add(&mut none, 0, &[(0, 20, 1)], 1).unwrap();
    assert_eq!(passes(&mut none), [(0, 40, vec![0])]);
}
