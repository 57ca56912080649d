//! Pipelines of stages: times worked out by hand, and answers that do not depend on them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use slipstream_base::{RankId, SimTime, TokenId};
use slipstream_config::cluster::{EngineConfig, PipelineConfig};
use slipstream_engine::timing::Constant;
use slipstream_engine::{Engine, PassOutput};

use crate::rig::{STEP_NS, output_model, request, small, tokens_of};

/// An engine whose layers are divided as `layers`, and that schedules nothing ahead.
fn stages(layers: &[u32], latency_ns: f64) -> EngineConfig {
    EngineConfig {
        pipeline: Some(PipelineConfig {
            layers: layers.to_vec(),
            send_ns_per_token: 0.0,
            latency_ns,
        }),
        ..small(100)
    }
}

fn engine(config: &EngineConfig) -> Engine {
    let timing = Box::new(Constant { step_ns: STEP_NS });
    Engine::new(RankId::default(), config, timing, output_model(10_000)).unwrap()
}

/// Runs until nothing is left. Each pass that gave tokens: when it ended, and whose they were.
fn run(engine: &mut Engine) -> Vec<(u64, Vec<u64>)> {
    let (mut now, mut out) = (SimTime(0), PassOutput::default());
    let mut passes = Vec::new();
    while let Some(end) = engine.begin_pass(now) {
        engine.audit();
        assert!(end >= now);
        now = end;
        engine.finish_pass(&mut out);
        engine.audit();
        let ids: Vec<u64> = out.tokens.iter().map(|(id, _)| id.0).collect();
        if !ids.is_empty() {
            passes.push((now.0, ids));
        }
        assert!(passes.len() < 100_000, "does not come to an end");
    }
    assert!(engine.is_idle());
    passes
}

fn add(engine: &mut Engine, id: u64, prompt: u32, max_tokens: u32) {
    let request = request(id, &tokens_of(id, prompt), max_tokens);
    engine.add(SimTime(0), request).unwrap();
}

/// Each token takes both stages one after the other: half of the time each of them is idle.
#[test]
fn one_request_leaves_a_bubble_in_every_stage() {
    for ahead in [false, true] {
        let mut engine = engine(&EngineConfig {
            async_scheduling: ahead,
            ..stages(&[1, 1], 0.0)
        });
        add(&mut engine, 0, 6, 3);
        let expected = [(1_000, vec![0]), (2_000, vec![0]), (3_000, vec![0])];
        assert_eq!(run(&mut engine), expected);
    }
}

/// Four requests that fit a pass are in the same one, so that the pipeline holds one pass at a time, as in vLLM.
#[test]
fn requests_that_arrive_together_share_a_bubble() {
    let mut engine = engine(&stages(&[1, 1], 0.0));
    (0..4).for_each(|id| add(&mut engine, id, 1, 2));
    let all = vec![0, 1, 2, 3];
    assert_eq!(run(&mut engine), [(1_000, all.clone()), (2_000, all)]);
}

/// Passes of two tokens: the second one enters the first stage when the first one leaves it, and both alternate.
/// Twice the tokens of one pass at a time, with the same gaps.
#[test]
fn two_passes_fill_two_stages() {
    let config = EngineConfig {
        max_num_batched_tokens: 2,
        ..stages(&[1, 1], 0.0)
    };
    let mut engine = engine(&config);
    (0..4).for_each(|id| add(&mut engine, id, 1, 3));
    let (a, b) = (vec![0, 1], vec![2, 3]);
    let expected = [1_000, 1_500, 2_000, 2_500, 3_000, 3_500]
        .into_iter()
        .zip([&a, &b, &a, &b, &a, &b])
        .map(|(at, ids)| (at, ids.clone()));
    assert_eq!(run(&mut engine), expected.collect::<Vec<_>>());
}

/// The stage with most layers sets the pace: 750 ns of it per pass. A pass waits for the one before it.
#[test]
fn the_largest_stage_sets_the_pace() {
    let config = EngineConfig {
        max_num_batched_tokens: 2,
        ..stages(&[1, 3], 0.0)
    };
    let mut engine = engine(&config);
    (0..4).for_each(|id| add(&mut engine, id, 1, 3));
    let ends: Vec<u64> = run(&mut engine).into_iter().map(|(at, _)| at).collect();
    assert_eq!(ends, [1_000, 1_750, 2_500, 3_250, 4_000, 4_750]);
}

/// A send takes its latency, and its bytes: 100 ns and 10 ns for each of 6 tokens, then of one.
#[test]
fn activations_cross_each_border() {
    let mut config = stages(&[1, 1, 2], 100.0);
    config.pipeline.as_mut().unwrap().send_ns_per_token = 10.0;
    let mut engine = engine(&config);
    add(&mut engine, 0, 6, 2);
    let first = 1_000 + 2 * 160;
    let expected = [(first, vec![0]), (first + 1_000 + 2 * 110, vec![0])];
    assert_eq!(run(&mut engine), expected);
}

/// Chunks of one prompt follow each other through the stages: a prompt of four passes takes five halves.
#[test]
fn chunks_of_a_prompt_fill_the_stages() {
    let config = EngineConfig {
        max_num_batched_tokens: 8,
        ..stages(&[1, 1], 0.0)
    };
    let mut engine = engine(&config);
    add(&mut engine, 0, 32, 1);
    assert_eq!(run(&mut engine), [(2_500, vec![0])]);
}

/// A request that arrives while a pass is under way is taken in when it ends.
#[test]
fn arrivals_wait_for_the_oldest_pass() {
    let mut engine = engine(&stages(&[1, 1], 0.0));
    add(&mut engine, 0, 6, 2);
    let end = engine.begin_pass(SimTime(0)).unwrap();
    engine
        .add(SimTime(100), request(1, &tokens_of(1, 6), 1))
        .unwrap();
    let mut out = PassOutput::default();
    engine.finish_pass(&mut out);
    let end = engine.begin_pass(end).unwrap();
    engine.finish_pass(&mut out);
    assert_eq!((end, out.finished.len()), (SimTime(2_000), 2));
}

type Job = (u32, u32, u8);

/// Answers of `jobs` on `config`: requests of a length and a number of tokens, that arrive after some passes.
fn answers(config: &EngineConfig, jobs: &[Job]) -> BTreeMap<u64, Vec<TokenId>> {
    let mut engine = engine(config);
    let (mut now, mut out) = (SimTime(0), PassOutput::default());
    let mut answers: BTreeMap<u64, Vec<TokenId>> = BTreeMap::new();
    let mut jobs = (0..).zip(jobs).peekable();
    let mut due = 0;
    for _ in 0..100_000 {
        while let Some((id, &(prompt, max_tokens, _))) = jobs.next_if(|(_, job)| job.2 <= due) {
            engine
                .add(now, request(id, &tokens_of(id % 3, prompt), max_tokens))
                .unwrap();
            due = 0;
        }
        due = due.saturating_add(1);
        let Some(end) = engine.begin_pass(now) else {
            if jobs.peek().is_none() {
                assert!(engine.is_idle());
                return answers;
            }
            continue;
        };
        engine.audit();
        now = end;
        engine.finish_pass(&mut out);
        engine.audit();
        for (id, tokens) in &out.tokens {
            answers.entry(id.0).or_default().extend(tokens);
        }
    }
    panic!("does not come to an end");
}

proptest! {
    /// Preemptions, chunks and stages change when tokens come, and nothing about them.
    #[test]
    fn answers_are_those_of_one_stage(
        jobs in prop::collection::vec((1..40_u32, 1..20_u32, 0..4_u8), 1..14),
        count in 2..5_usize,
        blocks in 16..40_u32,
        budget in 4..64_u32,
        ahead: bool,
    ) {
        let one = EngineConfig {
            max_num_batched_tokens: budget,
            num_gpu_blocks: blocks,
            ..small(blocks)
        };
        let several = EngineConfig {
            async_scheduling: ahead,
            pipeline: Some(PipelineConfig {
                layers: vec![2; count],
                send_ns_per_token: 0.5,
                latency_ns: 3.0,
            }),
            ..one.clone()
        };
        prop_assert_eq!(answers(&several, &jobs), answers(&one, &jobs));
    }
}
