//! Runs of decode passes against single ones: the same cluster run both ways leaves the same log.

use proptest::prelude::*;
use slipstream_base::width::to_u32;
use slipstream_base::{ForwardPassMetrics, KvDelta, RankId, RequestId, SimTime};
use slipstream_config::cluster::{DiskTierConfig, EngineConfig, HostTierConfig};
use slipstream_engine::timing::{StepLoad, StepTime};
use slipstream_engine::{DecodeRun, Engine, Finished, FirstToken, PassOutput, Stats};

use crate::against_plain::{Maker, Op, config, op};
use crate::rig::output_model;

/// Depends on everything that the load says.
struct Uneven;

impl StepTime for Uneven {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        100 + 7 * load.prefill_tokens + 3 * u64::from(load.decode_sequences) + load.decode_context
    }

    fn has_range(&self) -> bool {
        true
    }

    fn extrapolates(&self, load: &StepLoad) -> bool {
        load.decode_context % 3 == 1
    }
}

#[derive(Debug, PartialEq)]
struct Pass {
    end: SimTime,
    fpm: ForwardPassMetrics,
    kv: KvDelta,
    got_a_token: Option<Vec<RequestId>>,
    token_count: u32,
    first: Vec<FirstToken>,
    finished: Vec<Finished>,
}

/// Something that happens to the engine, and when.
#[derive(Clone, Debug)]
struct Event {
    at: SimTime,
    op: Op,
}

/// How decode passes are run.
#[derive(Clone, Copy)]
enum Jump {
    /// One by one.
    None,
    /// At most so many at once.
    Run(u32),
    /// Planned, at most so many, and run in two parts.
    Plan(u32),
}

/// Runs `events` to the end. With `jump`, runs as many decode passes at once as the engine will.
fn run(
    config: &EngineConfig,
    natural: u32,
    events: &[Event],
    jump: Jump,
    silent: bool,
) -> (Vec<Pass>, Vec<Stats>, u32) {
    let output = output_model(natural);
    let mut maker = Maker::new(config.block_size, output.clone());
    let mut engine = Engine::new(RankId::default(), config, Box::new(Uneven), output).unwrap();
    engine.list_tokens(!silent);
    let (mut log, mut stats, mut jumped) = (vec![], vec![], 0);
    let (mut out, mut decodes) = (PassOutput::default(), DecodeRun::default());
    let mut live: Vec<RequestId> = vec![];
    let mut events = events.iter().peekable();
    let mut now = SimTime(0);
    let mut busy_until: Option<SimTime> = None;
    loop {
        // Due events, a pass's end before an event of the same time.
        let next = events.peek().map_or(SimTime::MAX, |e| e.at);
        if let Some(end) = busy_until.filter(|&end| end <= next) {
            busy_until = None;
            now = end;
            engine.finish_pass(&mut out);
            live.retain(|id| !out.finished.iter().any(|f| f.id == *id));
            log.push(Pass {
                end,
                fpm: out.fpm.clone(),
                kv: out.kv.clone(),
                got_a_token: (!silent).then(|| out.tokens.iter().map(|t| t.0).collect()),
                token_count: out.token_count,
                first: out.first.clone(),
                finished: out.finished.clone(),
            });
        } else if let Some(event) = events.next_if(|_| busy_until.is_some() || engine.is_idle()) {
            now = now.max(event.at);
            match &event.op {
                Op::Add(add) => {
                    let (request, _) = maker.make(add);
                    let id = request.id;
                    if engine.add(now, request).is_ok() {
                        live.push(id);
                    }
                }
                Op::Abort(n) | Op::AbortDuring(n) if !live.is_empty() => {
                    let id = live.remove(*n as usize % live.len());
                    assert!(engine.abort(id));
                }
                _ => {}
            }
            stats.push(engine.stats());
        } else if engine.is_idle() {
            break;
        }
        engine.audit();
        if busy_until.is_none() && !engine.is_idle() {
            let until = events.peek().map_or(SimTime::MAX, |e| e.at);
            let parts = match jump {
                Jump::None => 0,
                Jump::Run(_) => 1,
                Jump::Plan(most) => 2 * u32::from(engine.plan_run(now, most).is_some()),
            };
            for part in 0..parts {
                let passes = match jump {
                    Jump::None => unreachable!(),
                    Jump::Run(most) => engine.decode_run(now, until, most, &mut decodes),
                    Jump::Plan(_) => {
                        let half = now.0 + until.0.saturating_sub(now.0) / 2;
                        let to = if part == 0 { half } else { until.0 };
                        engine.run_planned(SimTime(to), &mut decodes)
                    }
                };
                assert_eq!(passes as usize, decodes.ends.len());
                engine.audit();
                jumped += passes;
                let mut sequence = decodes.kv_sequence;
                for (i, &end) in decodes.ends.iter().enumerate() {
                    let mut fpm = ForwardPassMetrics::default();
                    if let Jump::Run(_) = jump {
                        decodes.fpm_of(i, &mut fpm);
                    }
                    let ops = decodes.kv_of(i).to_vec();
                    let empty = ops.is_empty();
                    log.push(Pass {
                        end,
                        fpm,
                        kv: KvDelta {
                            rank: RankId::default(),
                            sequence,
                            ops,
                        },
                        got_a_token: (!silent).then(|| engine.running_ids().collect()),
                        token_count: to_u32(engine.running_ids().count()),
                        first: vec![],
                        finished: vec![],
                    });
                    sequence += u64::from(!empty);
                    now = end;
                }
            }
            if let (Jump::Plan(_), 1..) = (jump, parts) {
                now = engine.end_plan();
                engine.audit();
            }
            busy_until = engine.begin_pass(now);
        }
    }
    stats.push(engine.stats());
    (log, stats, jumped)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn a_run_is_as_many_single_passes(
        mut config in config(),
        tier in prop::option::of((1..30u64, 0..3_000u64, 0..5_000u64)),
        disk in prop::option::of((1..60u64, 0..3_000u64, 0..3_000u64, 0..5_000u64)),
        natural in 5..60u32,
        most in prop_oneof![Just(1u32), Just(7), Just(u32::MAX)],
        ops in prop::collection::vec((0..4_000u64, op()), 1..40),
    ) {
        config.host_tier = tier.map(|(blocks, load_ns_per_block, latency_ns)| HostTierConfig {
            blocks,
            load_ns_per_block,
            latency_ns,
        });
        let disk = disk.filter(|_| tier.is_some());
        config.disk_tier =
            disk.map(|(blocks, load_ns_per_block, store_ns_per_block, latency_ns)| DiskTierConfig {
                blocks,
                load_ns_per_block,
                store_ns_per_block,
                latency_ns,
            });
        let mut at = SimTime(0);
        let events: Vec<Event> = ops
            .into_iter()
            .map(|(gap, mut op)| {
                at += gap;
                if let Op::Add(add) = &mut op {
                    add.lengthen();
                }
                Event { at, op }
            })
            .collect();
        let (single, single_stats, _) = run(&config, natural, &events, Jump::None, false);
        let (jumped, jumped_stats, _) = run(&config, natural, &events, Jump::Run(most), false);
        for (a, b) in single.iter().zip(&jumped) {
            prop_assert_eq!(a, b);
        }
        prop_assert_eq!(single.len(), jumped.len());
        prop_assert_eq!(&single_stats, &jumped_stats);

        // Nothing but the list of tokens is lost where it is not asked for.
        let (mut silent, silent_stats, _) = run(&config, natural, &events, Jump::Run(most), true);
        for (pass, listed) in silent.iter_mut().zip(&jumped) {
            pass.got_a_token.clone_from(&listed.got_a_token);
        }
        prop_assert_eq!(&silent, &jumped);
        prop_assert_eq!(&silent_stats, &jumped_stats);

        let (mut planned, planned_stats, _) = run(&config, natural, &events, Jump::Plan(most), true);
        for (pass, listed) in planned.iter_mut().zip(&jumped) {
            pass.got_a_token.clone_from(&listed.got_a_token);
            // A planned pass has no record, but a number.
            if pass.fpm == ForwardPassMetrics::default() {
                pass.fpm.clone_from(&listed.fpm);
            }
        }
        prop_assert_eq!(planned, jumped);
        prop_assert_eq!(planned_stats, jumped_stats);
    }
}

#[test]
fn a_lone_answer_is_one_run_between_its_first_and_last_pass() {
    let config = EngineConfig {
        block_size: 16,
        ..EngineConfig::default()
    };
    let mut output = output_model(1);
    output.eos = 1;
    let mut engine = Engine::new(RankId::default(), &config, Box::new(Uneven), output).unwrap();
    let mut request = crate::rig::request(0, &[1], 100);
    let tokens = crate::rig::tokens_of(0, 40);
    request.prompt = slipstream_base::Prompt::from_tokens(&tokens, 16, crate::rig::ROOT).unwrap();
    request.params.ignore_eos = true;
    engine.add(SimTime(0), request).unwrap();
    let (mut out, mut decodes) = (PassOutput::default(), DecodeRun::default());
    assert_eq!(
        engine.decode_run(SimTime(0), SimTime::MAX, 9, &mut decodes),
        0
    );
    let end = engine.begin_pass(SimTime(0)).unwrap();
    engine.finish_pass(&mut out);
    assert_eq!(end, SimTime(100 + 7 * 40));
    let passes = engine.decode_run(end, SimTime::MAX, u32::MAX, &mut decodes);
    assert_eq!(passes, 98);
    // Contexts 41 to 138.
    let sum: u64 = (41..=138).map(|c| 100 + 3 + c).sum();
    assert_eq!(*decodes.ends.last().unwrap(), end + sum);
    // Blocks 2 to 7 filled, at 48, 64, ... 128 tokens.
    assert_eq!(decodes.kv_ops.len(), 6);
    assert_eq!(engine.stats().used_blocks, 9);
    engine.begin_pass(*decodes.ends.last().unwrap()).unwrap();
    engine.finish_pass(&mut out);
    assert_eq!(out.finished[0].usage.output_tokens, 100);
    assert!(engine.is_idle());
}

#[test]
fn a_run_stops_before_a_pass_that_ends_when_something_happens() {
    let config = crate::rig::small(100);
    let mut rig = crate::rig::Rig::new(&config);
    rig.add_len(0, 3, 50);
    rig.step();
    let mut decodes = DecodeRun::default();
    let at = |passes: u64| rig.now + passes * crate::rig::STEP_NS;
    assert_eq!(rig.engine.decode_run(rig.now, at(1), 50, &mut decodes), 0);
    assert_eq!(rig.engine.decode_run(rig.now, at(5), 50, &mut decodes), 4);
    assert_eq!(decodes.ends, [at(1), at(2), at(3), at(4)]);
    assert_eq!(
        rig.engine
            .decode_run(at(4), SimTime(at(5).0 + 1), 50, &mut decodes),
        1
    );
}

#[test]
fn a_run_stops_before_the_pass_that_caches_what_the_head_waits_for() {
    use crate::rig::{Rig, request, small, tokens_of};
    let mut rig = Rig::new(&small(4));
    rig.add_len(0, 4, 20);
    rig.step();
    // The same conversation one turn on: four blocks, of which the first is cached, and two are
    // free. Once the second is cached, two are enough.
    let mut turn = tokens_of(0, 4);
    let vocab: Vec<u32> = (1_000..1_100).collect();
    turn.extend((0..5).map(|p| slipstream_engine::output_token(&vocab, 0, p)));
    turn.extend([1; 4]);
    rig.add(request(1, &turn, 1)).unwrap();
    rig.step();
    assert_eq!(rig.ids(), [0], "stuck for now");
    let mut decodes = DecodeRun::default();
    let passes = rig
        .engine
        .decode_run(rig.now, SimTime::MAX, 50, &mut decodes);
    assert_eq!(passes, 2, "seven tokens computed");
    rig.now = decodes.ends[1];
    rig.step();
    assert_eq!(rig.ids(), [0, 1]);
    assert_eq!(rig.work(), (1, 5, 8, 1, 8));
}
