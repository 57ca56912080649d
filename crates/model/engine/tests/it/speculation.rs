//! Passes that verify drafted tokens.

use proptest::prelude::*;
use slipstream_base::SimTime;
use slipstream_config::cluster::{EngineConfig, SpeculationConfig, SpeculationMethod};
use slipstream_engine::timing::{Constant, Drafting, StepLoad, StepTime};

use crate::rig::{EOS, Rig, STEP_NS, output_model, request, small, tokens_of};

fn drafting(acceptance: &[f64], method: SpeculationMethod) -> SpeculationConfig {
    SpeculationConfig {
        method,
        acceptance: acceptance.to_vec(),
        draft_ns: 0.0,
        draft_share: 0.0,
    }
}

fn with(blocks: u32, acceptance: &[f64], async_scheduling: bool) -> EngineConfig {
    EngineConfig {
        speculation: Some(drafting(acceptance, SpeculationMethod::Mtp)),
        async_scheduling,
        ..small(blocks)
    }
}

/// Ends of the passes that gave tokens, with how many.
fn steps(rig: &mut Rig) -> Vec<(u64, u32)> {
    let mut steps = Vec::new();
    while rig.step() {
        assert!(steps.len() < 10_000, "does not come to an end");
        if rig.out.token_count > 0 {
            steps.push((rig.now.0, rig.out.token_count));
        }
    }
    steps
}

#[test]
fn rejected_drafts_cost_the_time_of_drafting_alone() {
    for async_scheduling in [false, true] {
        let mut plain = Rig::new(&EngineConfig {
            async_scheduling,
            ..small(40)
        });
        let config = with(40, &[0.0; 3], async_scheduling);
        let slower = SpeculationConfig {
            draft_ns: 250.0,
            draft_share: 0.5,
            ..config.speculation.clone().unwrap()
        };
        let timing = Drafting::new(Box::new(Constant { step_ns: STEP_NS }), &slower);
        let mut rig = Rig::with_timing(&config, Box::new(timing), output_model(10_000));
        for rig in [&mut plain, &mut rig] {
            rig.add_len(0, 9, 20);
            rig.add_len(1, 6, 7);
        }
        let expected: Vec<(u64, u32)> = steps(&mut plain)
            .into_iter()
            .map(|(end, tokens)| (end / STEP_NS * 1_750, tokens))
            .collect();
        assert_eq!(steps(&mut rig), expected);
        assert_eq!(rig.answers, plain.answers);
        let stats = rig.engine.stats();
        assert_eq!((stats.drafts, stats.accepted_tokens), (25, 0));
        assert_eq!(stats.draft_tokens, 75);
    }
}

#[test]
fn accepted_drafts_give_all_of_their_tokens_in_each_step() {
    for async_scheduling in [false, true] {
        let mut rig = Rig::new(&with(40, &[1.0; 3], async_scheduling));
        rig.add_len(0, 9, 42);
        let tokens: Vec<u32> = steps(&mut rig).iter().map(|step| step.1).collect();
        // The first token comes with the prompt, and the last draft is longer than the rest.
        assert_eq!(tokens, [&[1][..], &[4; 10], &[1]].concat());
        assert_eq!(rig.now, SimTime(12 * STEP_NS));
        let mut plain = Rig::new(&small(40));
        plain.add_len(0, 9, 42);
        plain.run_until_idle();
        assert_eq!(rig.answers, plain.answers);
        assert_eq!(rig.finished, plain.finished);
        // The pass of the last token had a whole draft, as in vLLM.
        let stats = rig.engine.stats();
        assert_eq!((stats.drafts, stats.draft_tokens), (11, 33));
        assert_eq!(stats.accepted_tokens, 33);
    }
}

#[test]
fn the_mean_length_is_the_sum_of_the_shares() {
    // Each token is accepted with 0.7 if those before it were: (1 - 0.7^4) / (1 - 0.7) tokens per step.
    let shares = [0.7, 0.49, 0.343];
    let expected = (1.0 - 0.7_f64.powi(4)) / 0.3;
    for async_scheduling in [false, true] {
        let mut rig = Rig::new(&with(4_000, &shares, async_scheduling));
        for id in 0..60 {
            rig.add_len(id, 5, 900);
        }
        while let Some(end) = rig.engine.begin_pass(rig.now) {
            rig.engine.finish_pass(&mut rig.out);
            rig.now = end;
        }
        let stats = rig.engine.stats();
        let mean = 1.0 + stats.accepted_tokens as f64 / stats.drafts as f64;
        // 21,000 drafts with a deviation of 1.2: the bound is five of theirs.
        assert!((mean - expected).abs() < 0.042, "{mean} {expected}");
        assert_eq!(stats.draft_tokens, 3 * stats.drafts);
    }
}

/// Drafts depend on the request and the place in its answer, not on those that run beside it.
#[test]
fn draws_are_those_of_the_request() {
    let alone = |ids: &[u64]| {
        let mut rig = Rig::new(&with(400, &[0.8, 0.5], false));
        for &id in ids {
            rig.add_len(id, 9, 60);
        }
        let mut sizes = Vec::new();
        while rig.step() {
            let of = rig.out.tokens.iter().filter(|(id, _)| id.0 == 3);
            sizes.extend(of.map(|(_, tokens)| tokens.len()));
        }
        sizes
    };
    let sizes = alone(&[3]);
    assert!(sizes.contains(&1) && sizes.contains(&2) && sizes.contains(&3));
    assert_eq!(alone(&[1, 2, 3, 4]), sizes);
}

#[test]
fn a_stop_token_ends_an_answer_within_a_draft() {
    for async_scheduling in [false, true] {
        let mut rig = Rig::new(&with(40, &[1.0; 7], async_scheduling));
        rig.add_len(0, 9, 30);
        rig.run_until_idle();
        let answer = rig.answers[&0].clone();
        // The first place of a token that none before it has, in the middle of a step.
        let at = (3..8)
            .find(|&at| !answer[..at].contains(&answer[at]))
            .unwrap();
        let mut stopped = Rig::new(&with(40, &[1.0; 7], async_scheduling));
        let mut asked = request(0, &tokens_of(0, 9), 30);
        asked.params.stop_token_ids = vec![answer[at]].into();
        stopped.add(asked).unwrap();
        stopped.run_until_idle();
        assert_eq!(stopped.answers[&0], answer[..=at]);
        assert_eq!(stopped.engine.stats().used_blocks, 0);
    }
}

#[test]
fn blocks_for_drafts_are_taken_in_advance_if_the_drafter_writes_them() {
    // 7 prompt tokens: the pass of the prompt needs 2 blocks of 4, and 3 with room for 3 drafts of the drafter.
    for (method, first, second) in [
        (SpeculationMethod::Ngram, 2, 3),
        (SpeculationMethod::Mtp, 3, 4),
    ] {
        let mut rig = Rig::new(&EngineConfig {
            speculation: Some(drafting(&[0.0; 3], method)),
            ..small(40)
        });
        rig.add_len(0, 7, 5);
        let mut used = Vec::new();
        for _ in 0..2 {
            let end = rig.engine.begin_pass(rig.now).unwrap();
            used.push(rig.engine.stats().used_blocks);
            rig.finish(end);
        }
        // The next one computes tokens 7 to 10.
        assert_eq!(used, [first, second], "{method:?}");
    }
}

/// A step takes as long as its sequences, contexts and drafted tokens say, at the lengths that turn out.
struct ByLoad;

impl StepTime for ByLoad {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        1_000_000 * u64::from(load.decode_sequences)
            + 1_000 * load.draft_tokens
            + load.decode_context
    }
}

#[test]
fn contexts_are_those_of_accepted_tokens() {
    for async_scheduling in [false, true] {
        let config = with(40, &[0.0; 3], async_scheduling);
        let mut rig = Rig::with_timing(&config, Box::new(ByLoad), output_model(10_000));
        rig.add_len(0, 9, 5);
        let mut lengths = Vec::new();
        let mut before = 0;
        while rig.step() {
            lengths.push(rig.now.0 - before);
            before = rig.now.0;
        }
        // The prompt, then one token each with three drafts: 10 to 13 tokens of context, and 3 of drafts.
        let expected: Vec<u64> = (10..=13).map(|context| 1_003_000 + context + 3).collect();
        assert_eq!(lengths[1..], expected);
    }
}

proptest! {
    /// Answers do not depend on drafts: also with preemptions, stop tokens and early ends.
    #[test]
    fn answers_are_those_without_drafts(
        acceptance in prop::collection::vec(0.0..=1.0_f64, 1..6),
        ngram in any::<bool>(),
        async_scheduling in any::<bool>(),
        blocks in 8..40u32,
        max_num_batched_tokens in 3..40u32,
        max_num_seqs in 1..6u32,
        natural in 1..60u32,
        requests in prop::collection::vec((1..20u32, 1..40u32, 0..4u32, any::<bool>()), 1..8),
    ) {
        let mut acceptance = acceptance;
        acceptance.sort_by(|a, b| b.total_cmp(a));
        let method = if ngram { SpeculationMethod::Ngram } else { SpeculationMethod::Eagle };
        let config = EngineConfig {
            async_scheduling,
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len: 60,
            ..small(blocks)
        };
        let drafted = EngineConfig {
            speculation: Some(drafting(&acceptance, method)),
            ..config.clone()
        };
        let [plain, drafted] = [config, drafted].map(|config| {
            let mut rig = Rig::with_output(&config, output_model(natural));
            for (id, &(len, max_tokens, wait, stops)) in (0..).zip(&requests) {
                for _ in 0..wait {
                    rig.step();
                }
                let mut asked = request(id, &tokens_of(id % 3, len), max_tokens);
                asked.params.ignore_eos = natural % 2 == 0;
                if stops {
                    asked.params.stop_token_ids = vec![1_000, 1_001, EOS].into();
                }
                // Too long for so small a cache is refused by both.
                let _ = rig.add(asked);
            }
            rig.run_until_idle();
            assert_eq!(rig.engine.stats().used_blocks, 0);
            let ended: Vec<_> = rig.finished.iter().map(|(id, (why, of))| (*id, *why, of.output_tokens)).collect();
            (rig.answers, ended)
        });
        prop_assert_eq!(plain, drafted);
    }
}
