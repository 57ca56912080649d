//! Workers from outside: requests through real rings, answers as a shard sees them.

mod hosted;
mod parts;
mod rig;
mod scripted;

use std::collections::BTreeSet;

use rig::{Rig, Setup, Shard, config, engine, expected, rank, until, workers};
use slipstream_base::{FinishReason, KvDelta, KvOp, RankId, TokenId, WorkerId, mix};
use slipstream_engine::timing::{Constant, StepLoad, StepTime};
use slipstream_planes::{
    Plane, PlaneLimits, RefusalReason, StreamAddr, StreamId, ThreadPort, ToWorker,
};
use slipstream_worker::{LiveTiming, StartError, WorkerSet, WorkerSpec};

/// A pass that ends long after every test.
const HOUR_NS: u64 = 3_600_000_000_000;

fn prompt(seed: u64, len: usize) -> Vec<TokenId> {
    (0..len as u64).map(|at| (seed * 31 + at) as u32).collect()
}

fn real_time() -> Setup {
    Setup {
        timing: LiveTiming::default(),
        ..Setup::default()
    }
}

/// Runs `count` requests a shard over `worker_count` workers and checks every answer.
fn check_answers(setup: Setup, worker_count: u32, count: u64) -> Rig {
    let mut rig = setup.start_ready(workers(worker_count, 1_000_000));
    let mut sent = Vec::new();
    for (number, shard) in rig.shards.iter_mut().enumerate() {
        for n in 0..count {
            let seed = n * 16 + number as u64;
            let (isl, osl) = (1 + seed as usize * 7 % 90, 1 + seed as usize * 13 % 60);
            let request = Shard::request(&prompt(seed, isl), osl as u32, seed);
            let addr = shard.start(rank(n as u32 % worker_count), request);
            sent.push((number, addr, seed, isl, osl));
        }
    }
    for shard in &mut rig.shards {
        shard.read_all();
    }
    for (number, addr, seed, isl, osl) in sent {
        let answer = rig.shards[number].answer(addr);
        assert_eq!(answer.tokens, expected(seed, osl));
        let end = answer.end.unwrap();
        assert_eq!(end.reason, FinishReason::Length);
        assert_eq!(end.usage.prompt_tokens as usize, isl);
        assert_eq!(end.usage.completion_tokens as usize, osl);
        let hit = answer.prologue.unwrap().hit_tokens;
        assert_eq!(end.usage.cached_tokens, hit);
    }
    rig
}

#[test]
fn every_stream_ends_once_with_its_tokens_in_order() {
    let rig = check_answers(
        Setup {
            shards: 2,
            threads: 2,
            ..Setup::default()
        },
        3,
        150,
    );
    let passes: u64 = rig.set.ranks().iter().map(|rank| rank.passes.get()).sum();
    let fast: u64 = rig
        .set
        .ranks()
        .iter()
        .map(|rank| rank.fast_passes.get())
        .sum();
    assert_eq!(passes, fast, "without waiting no pass needs a timer");
    assert!(
        rig.set
            .ranks()
            .iter()
            .all(|rank| rank.used_blocks.get() == 0)
    );
    rig.set.shutdown().unwrap();
}

#[test]
fn answers_are_the_same_without_the_fast_path() {
    let rig = check_answers(
        Setup {
            timing: LiveTiming {
                speedup: 1e6,
                fast_path: false,
                ..LiveTiming::default()
            },
            ..Setup::default()
        },
        2,
        40,
    );
    for rank in rig.set.ranks() {
        assert_eq!(rank.timed_passes.get(), rank.passes.get());
        assert_eq!(rank.fast_passes.get(), 0);
    }
}

#[test]
fn a_shard_that_is_behind_stalls_the_thread_and_loses_nothing() {
    let setup = Setup {
        limits: PlaneLimits {
            frames: 1,
            frame_words: 64,
            ..PlaneLimits::default()
        },
        ..Setup::default()
    };
    let mut rig = setup.start_ready(workers(2, 1_000));
    let addrs: Vec<_> = (0..20)
        .map(|seed| {
            let request = Shard::request(&prompt(seed, 8), 100, seed);
            (seed, rig.shards[0].start(rank(seed as u32 % 2), request))
        })
        .collect();
    let stats = rig.set.thread_stats().next().unwrap();
    until(|| stats.stalls.get() > 0);
    rig.shards[0].read_all();
    for (seed, addr) in addrs {
        assert_eq!(rig.shards[0].answer(addr).tokens, expected(seed, 100));
    }
}

/// Two shards of which the second reads nothing until the test lets it.
fn one_of_two_shards_reads_nothing(frame_words: usize) -> Rig {
    let setup = Setup {
        shards: 2,
        limits: PlaneLimits {
            frames: 1,
            frame_words,
            ..PlaneLimits::default()
        },
        ..Setup::default()
    };
    setup.start_ready(workers(2, 1_000))
}

#[test]
fn a_shard_that_reads_nothing_does_not_hold_up_others_and_loses_nothing() {
    let mut rig = one_of_two_shards_reads_nothing(64);
    let mut stuck = rig.shards.pop().unwrap();
    let waiting: Vec<_> = (0..4)
        .map(|seed| {
            (
                seed,
                stuck.start(rank(0), Shard::request(&prompt(seed, 8), 200, seed)),
            )
        })
        .collect();
    let stats = rig.set.thread_stats().next().unwrap();
    until(|| stats.apart.get() == 1);
    // On the same engine and on another one of the thread.
    for seed in 10..20 {
        let shard = &mut rig.shards[0];
        let addr = shard.start(
            rank(seed as u32 % 2),
            Shard::request(&prompt(seed, 8), 300, seed),
        );
        shard.read_all();
        assert_eq!(shard.answer(addr).tokens, expected(seed, 300));
    }
    assert_eq!((stats.apart.get(), stats.given_up.get()), (1, 0));
    stuck.read_all();
    for (seed, addr) in waiting {
        assert_eq!(stuck.answer(addr).tokens, expected(seed, 200));
    }
}

#[test]
fn what_waits_for_a_shard_is_bounded_and_its_streams_then_end() {
    let mut rig = one_of_two_shards_reads_nothing(16);
    let mut stuck = rig.shards.pop().unwrap();
    let waiting: Vec<_> = (0..4)
        .map(|seed| {
            (
                seed,
                stuck.start(rank(0), Shard::request(&prompt(seed, 8), 4_000, seed)),
            )
        })
        .collect();
    let stats = rig.set.thread_stats().next().unwrap();
    until(|| stats.given_up.get() == 4);
    let ranks = rig.set.ranks().to_vec();
    until(|| ranks[0].running.get() + ranks[0].waiting.get() == 0);
    stuck.read_all();
    for (seed, addr) in waiting {
        let answer = stuck.answer(addr);
        assert_eq!(answer.end.unwrap().reason, FinishReason::Abort);
        let tokens = answer.tokens.clone();
        assert!(tokens.len() < 4_000);
        assert_eq!(
            tokens,
            expected(seed, tokens.len()),
            "in order, to where it ended"
        );
    }
}

#[test]
fn a_kill_frees_blocks_in_mid_pass_and_a_stop_tells_the_end() {
    let mut rig = real_time().start_ready(workers(1, HOUR_NS));
    let shard = &mut rig.shards[0];
    let killed = shard.start(rank(0), Shard::request(&prompt(1, 40), 9, 1));
    let stopped = shard.start(rank(0), Shard::request(&prompt(2, 24), 9, 2));
    shard.settle(rank(0));
    let stats = rig.set.ranks()[0].clone();
    // Both are waiting or in the pass; those in the pass hold blocks.
    assert_eq!(stats.running.get() + stats.waiting.get(), 2);
    assert!(stats.used_blocks.get() >= 10);

    let kill = ToWorker::Kill {
        rank: rank(0),
        addr: killed,
    };
    shard.port.send(kill).unwrap();
    shard.settle(rank(0));
    assert_eq!(stats.running.get() + stats.waiting.get(), 1);
    let stop = ToWorker::Stop {
        rank: rank(0),
        addr: stopped,
    };
    shard.port.send(stop).unwrap();
    shard.read_until(|shard| shard.answer(stopped).is_over());
    let end = shard.answer(stopped).end.unwrap();
    assert_eq!(end.reason, FinishReason::Abort);
    assert_eq!(
        (end.usage.prompt_tokens, end.usage.completion_tokens),
        (24, 0)
    );
    assert_eq!(
        (
            stats.running.get(),
            stats.waiting.get(),
            stats.used_blocks.get()
        ),
        (0, 0, 0)
    );
    assert_eq!(stats.finished_abort.get(), 2);
    assert!(
        !shard.answer(killed).is_over(),
        "a killed stream has no reader"
    );
}

#[test]
fn a_stop_or_kill_that_comes_late_changes_nothing() {
    let mut rig = Setup::default().start_ready(workers(1, 1_000));
    let shard = &mut rig.shards[0];
    let addr = shard.start(rank(0), Shard::request(&[1, 2, 3], 2, 5));
    shard.read_all();
    for message in [
        ToWorker::Stop {
            rank: rank(0),
            addr,
        },
        ToWorker::Kill {
            rank: rank(0),
            addr,
        },
    ] {
        shard.port.send(message).unwrap();
    }
    shard.settle(rank(0));
    assert_eq!(shard.answer(addr).tokens, expected(5, 2));
    assert_eq!(rig.set.ranks()[0].finished_abort.get(), 0);
}

#[test]
fn refusals_say_what_and_why() {
    let mut specs = workers(2, HOUR_NS);
    specs[1].startup_s = 3600.0;
    let setup = Setup {
        timing: LiveTiming {
            waiting_max: 1,
            ..LiveTiming::default()
        },
        ..Setup::default()
    };
    let mut rig = setup.start(specs);
    until(|| rig.set.ranks()[0].is_ready());
    // The engine thread sends it after the flag is set.
    until(|| *rig.ready.lock().unwrap() == [WorkerId(0)]);
    let shard = &mut rig.shards[0];
    let mut refused = |rank: RankId, len: usize| {
        let addr = shard.start(rank, Shard::request(&prompt(0, len), 4, 0));
        shard.read_until(|shard| shard.answer(addr).is_over());
        shard.refusal(addr)
    };
    let (reason, message) = refused(rank(0), 600);
    assert_eq!(reason, RefusalReason::Invalid);
    assert!(
        message.contains("600") && message.contains("512"),
        "{message}"
    );
    assert_eq!(refused(rank(1), 4).0, RefusalReason::NotReady);
    assert_eq!(refused(rank(77), 4).0, RefusalReason::NoSuchRank);

    // One in the pass, one waits, the next is too many.
    let running = shard.start(rank(0), Shard::request(&prompt(0, 4), 4, 0));
    shard.settle(rank(0));
    let waiting = shard.start(rank(0), Shard::request(&prompt(1, 4), 4, 0));
    let busy = shard.start(rank(0), Shard::request(&prompt(2, 4), 4, 0));
    shard.read_until(|shard| shard.answer(busy).is_over());
    assert_eq!(shard.refusal(busy).0, RefusalReason::Busy);
    assert!(!shard.answer(waiting).is_over());

    // The same stream again.
    shard.send_start(running, rank(0), Shard::request(&[1], 4, 0));
    shard.read_until(|shard| shard.answer(running).is_over());
    assert_eq!(shard.refusal(running).0, RefusalReason::Duplicate);
    assert_eq!(rig.set.ranks()[0].refused.get(), 3);
}

#[test]
fn a_slot_that_is_reused_ends_its_earlier_stream() {
    let mut rig = real_time().start_ready(workers(1, HOUR_NS));
    let shard = &mut rig.shards[0];
    let first = shard.start(rank(0), Shard::request(&prompt(1, 8), 4, 1));
    shard.settle(rank(0));
    shard.open.remove(&first.stream); // its kill never comes
    let second = shard.start(rank(0), Shard::request(&prompt(2, 8), 4, 2));
    assert_eq!(second.stream.slot, first.stream.slot);
    shard.settle(rank(0));
    let stats = &rig.set.ranks()[0];
    assert_eq!(stats.running.get() + stats.waiting.get(), 1);
    assert_eq!(rig.set.thread_stats().next().unwrap().superseded.get(), 1);
}

#[test]
fn shutdown_ends_streams_that_are_under_way() {
    let mut rig = real_time().start_ready(workers(2, HOUR_NS));
    let shard = &mut rig.shards[0];
    let addrs: Vec<StreamAddr> = (0..10)
        .map(|seed| {
            shard.start(
                rank(seed % 2),
                Shard::request(&prompt(u64::from(seed), 8), 4, 1),
            )
        })
        .collect();
    shard.settle(rank(0));
    shard.settle(rank(1));
    rig.set.shutdown().unwrap();
    let shard = &mut rig.shards[0];
    shard.read_until(|shard| !shard.gone.is_empty());
    for addr in addrs {
        assert_eq!(shard.answer(addr).end.unwrap().reason, FinishReason::Abort);
    }
}

#[test]
fn shutdown_waits_neither_for_a_dead_shard_nor_for_one_that_reads_nothing() {
    let setup = Setup {
        shards: 2,
        limits: PlaneLimits {
            frames: 1,
            frame_words: 8,
            ..PlaneLimits::default()
        },
        ..Setup::default()
    };
    let mut rig = setup.start_ready(workers(1, 1_000));
    for shard in &mut rig.shards {
        for seed in 0..4 {
            shard.start(rank(0), Shard::request(&prompt(seed, 8), 400, seed));
        }
    }
    let stats = rig.set.thread_stats().next().unwrap();
    until(|| stats.stalls.get() > 0);
    drop(rig.shards.pop());
    rig.set.shutdown().unwrap();
}

#[test]
fn streams_of_a_dead_shard_are_dropped_and_others_go_on() {
    let setup = Setup {
        shards: 2,
        ..Setup::default()
    };
    let mut rig = setup.start_ready(workers(1, 1_000));
    let mut dying = rig.shards.pop().unwrap();
    for seed in 0..4 {
        dying.start(rank(0), Shard::request(&prompt(seed, 8), 500, seed));
    }
    drop(dying);
    let shard = &mut rig.shards[0];
    let addr = shard.start(rank(0), Shard::request(&prompt(9, 8), 300, 9));
    shard.read_all();
    assert_eq!(shard.answer(addr).tokens, expected(9, 300));
    let rank = rig.set.ranks()[0].clone();
    until(|| rank.running.get() + rank.waiting.get() == 0 && rank.used_blocks.get() == 0);
}

#[test]
fn modelled_time_is_kept_and_no_token_comes_before_its_time() {
    const STEP_NS: u64 = 2_000_000;
    let mut rig = real_time().start_ready(workers(1, STEP_NS));
    let shard = &mut rig.shards[0];
    let addr = shard.start(rank(0), Shard::request(&prompt(1, 8), 4, 1));
    shard.read_all();
    let answer = shard.answer(addr);
    let first = answer.first.unwrap();
    let prologue = answer.prologue.unwrap();
    assert_eq!(first.end_ns - first.start_ns, STEP_NS);
    assert!(prologue.worker_recv_ns.unwrap() <= prologue.admitted_ns.unwrap());
    assert!(prologue.admitted_ns.unwrap() <= first.start_ns);
    // Four passes, unless the host was late: then later, never earlier.
    assert!(answer.last_sent_ns >= first.start_ns + 4 * STEP_NS);
    assert_eq!(rig.set.thread_stats().next().unwrap().handover.0.count(), 1);
}

/// Applies a delta to a set of blocks.
fn apply(held: &mut BTreeSet<u64>, delta: &KvDelta) {
    for op in &delta.ops {
        match op {
            KvOp::Stored { hash, .. } => assert!(held.insert(hash.0), "stored twice"),
            KvOp::Removed { hash } => assert!(held.remove(&hash.0), "removed but not held"),
            KvOp::Cleared => held.clear(),
        }
    }
}

#[test]
fn events_tell_every_pass_and_every_block() {
    let mut rig = Setup {
        threads: 2,
        ..Setup::default()
    }
    .start_ready(workers(2, 1_000));
    let shard = &mut rig.shards[0];
    for seed in 0..60 {
        shard.start(
            rank(seed as u32 % 2),
            Shard::request(&prompt(seed, 80), 30, seed),
        );
    }
    shard.read_all();
    shard.settle(rank(0));
    let resync = ToWorker::Resync { rank: rank(0) };
    shard.port.send(resync).unwrap();
    shard.settle(rank(0));
    assert!(rig.set.resync(rank(1)) && !rig.set.resync(rank(2)));
    until(|| rig.set.ranks().iter().all(|rank| rank.resyncs.get() == 1));
    let stats = rig.set.ranks().to_vec();
    rig.set.shutdown().unwrap();

    let events = rig.sink.0.lock().unwrap();
    for stats in stats {
        let rank = stats.rank;
        let fpm: Vec<_> = events.fpm.iter().filter(|fpm| fpm.rank == rank).collect();
        assert!(
            fpm.iter()
                .enumerate()
                .all(|(n, fpm)| fpm.counter == n as u64)
        );
        let passes = fpm.iter().filter(|fpm| fpm.wall_time_s > 0.0).count() as u64;
        assert_eq!(passes, stats.passes.get());

        let mut held = BTreeSet::new();
        let deltas = events.kv.iter().filter(|kv| kv.rank == rank);
        let mut next = 0;
        for delta in deltas {
            assert_eq!(delta.sequence, next);
            next += 1;
            apply(&mut held, delta);
        }
        assert!(next > 0);
        let mut snapshot = BTreeSet::new();
        let published = events.snapshots.iter().find(|kv| kv.rank == rank).unwrap();
        assert_eq!(published.ops[0], KvOp::Cleared);
        apply(&mut snapshot, published);
        assert_eq!(published.sequence, next);
        assert_eq!(snapshot, held);
    }
}

#[test]
fn an_idle_rank_publishes_metrics() {
    let rig = Setup::default().start_ready(workers(1, 1_000));
    until(|| !rig.sink.0.lock().unwrap().fpm.is_empty());
    let events = rig.sink.0.lock().unwrap();
    assert_eq!((events.fpm[0].wall_time_s, events.fpm[0].counter), (0.0, 0));
}

struct Broken;

impl StepTime for Broken {
    fn step_ns(&mut self, _load: &StepLoad) -> u64 {
        panic!("the table has no such row")
    }
}

#[test]
fn a_thread_that_dies_is_heard_of() {
    let mut specs = workers(2, 1_000);
    specs[1].ranks = vec![engine(rank(1), &config(), Box::new(Broken))];
    let mut rig = Setup {
        threads: 2,
        ..Setup::default()
    }
    .start_ready(specs);
    let shard = &mut rig.shards[0];
    let lost = shard.start(rank(1), Shard::request(&[1], 1, 1));
    shard.read_until(|shard| shard.gone == [1]);
    assert!(!shard.answer(lost).is_over());
    let fine = shard.start(rank(0), Shard::request(&[1], 1, 1));
    shard.read_until(|shard| shard.answer(fine).is_over());
    let ready: Vec<bool> = rig.set.ranks().iter().map(|rank| rank.is_ready()).collect();
    assert_eq!(ready, [true, false]);
    let error = rig.set.shutdown().unwrap_err();
    assert_eq!(
        error.to_string(),
        "engine thread 1 died: the table has no such row"
    );
}

#[test]
fn messages_from_nowhere_are_counted() {
    let mut rig = Setup::default().start_ready(workers(1, 1_000));
    let shard = &mut rig.shards[0];
    let addr = StreamAddr {
        shard: 9,
        stream: StreamId {
            slot: 0,
            generation: 0,
        },
    };
    shard.send_start(addr, rank(0), Shard::request(&[1], 1, 1));
    shard
        .port
        .send(ToWorker::Kill {
            rank: rank(0),
            addr,
        })
        .unwrap();
    shard.settle(rank(0));
    let stats = rig.set.thread_stats().next().unwrap();
    assert_eq!(stats.misaddressed.get(), 1);
    assert_eq!(stats.streams.get(), 0);
}

fn start_error(specs: Vec<WorkerSpec>, speedup: f64, ports: Vec<ThreadPort>) -> StartError {
    let timing = LiveTiming {
        speedup,
        ..LiveTiming::default()
    };
    let sinks = vec![Box::new(rig::Sink::default()) as Box<_>];
    WorkerSet::start(specs, &timing, ports, sinks, |_, _| ())
        .err()
        .expect("it should not start")
}

#[test]
fn what_cannot_run_does_not_start() {
    let port = || Plane::new(1, 1, PlaneLimits::default()).threads;
    for speedup in [-1.0, f64::NAN, f64::INFINITY] {
        let error = start_error(workers(1, 1), speedup, port());
        assert!(matches!(error, StartError::Speedup(_)), "{error}");
    }
    let mut specs = workers(2, 1);
    specs[1].worker = WorkerId(0);
    let error = start_error(specs, 1.0, port());
    assert_eq!(error.to_string(), "two workers are called w0");
    let mut specs = workers(1, 1);
    specs[0].ranks.clear();
    let error = start_error(specs, 1.0, port());
    assert!(error.to_string().contains("data_parallel_size"), "{error}");
    let mut specs = workers(1, 1);
    specs[0].startup_s = f64::NAN;
    assert!(matches!(
        start_error(specs, 1.0, port()),
        StartError::Startup { .. }
    ));
    let ports = Plane::new(1, 2, PlaneLimits::default()).threads;
    let error = start_error(workers(1, 1), 1.0, ports);
    assert_eq!(
        error.to_string(),
        "2 engine threads have 1 event sinks; give one each"
    );
}

#[test]
fn data_parallel_ranks_are_engines_of_their_own() {
    let ranks = (0..2)
        .map(|dp_rank| {
            let rank = RankId {
                worker: WorkerId(0),
                dp_rank,
            };
            engine(rank, &config(), Box::new(Constant { step_ns: 1_000 }))
        })
        .collect();
    let spec = WorkerSpec {
        worker: WorkerId(0),
        ranks,
        startup_s: 0.0,
    };
    let mut rig = Setup::default().start_ready(vec![spec]);
    let shard = &mut rig.shards[0];
    let second = RankId {
        worker: WorkerId(0),
        dp_rank: 1,
    };
    let addr = shard.start(second, Shard::request(&[1, 2], 3, 8));
    shard.read_all();
    assert_eq!(shard.answer(addr).tokens, expected(8, 3));
    let passes: Vec<u64> = rig
        .set
        .ranks()
        .iter()
        .map(|rank| rank.passes.get())
        .collect();
    assert_eq!(passes, [0, 3]);
    assert_eq!(*rig.ready.lock().unwrap(), [WorkerId(0)], "sent once");
}

/// Ends a turn with `tokens` once the stream at `addr` was accepted and has ended `turns` turns.
fn say(rig: &mut Rig, addr: StreamAddr, turns: usize, tokens: &[TokenId], last: bool) {
    let accepted = |answer: &rig::Answer| answer.room_bytes > 0 && answer.turns.len() >= turns;
    rig.shards[0].read_until(|shard| accepted(shard.answer(addr)));
    rig.shards[0].send_input(addr, rank(0), tokens, true, last);
}

#[test]
fn a_stream_whose_input_goes_on_is_answered_turn_by_turn() {
    let mut rig = Setup::default().start_ready(workers(1, 1_000_000));
    let request = Shard::request(&prompt(1, 10), 6, 7);
    let addr = rig.shards[0].start_duplex(rank(0), request);
    say(&mut rig, addr, 0, &prompt(2, 5), false); // while the first is answered, or after
    rig.shards[0].send_input(addr, rank(0), &prompt(3, 3), false, false);
    rig.shards[0].send_input(addr, rank(0), &prompt(4, 2), true, true);
    rig.shards[0].read_all();
    let answer = rig.shards[0].answer(addr);
    let seeds = [7, mix::draw(7, 1), mix::draw(7, 2)];
    let whole: Vec<TokenId> = seeds.iter().flat_map(|&seed| expected(seed, 6)).collect();
    assert_eq!(answer.tokens, whole);
    let usage = answer.end.unwrap().usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (20, 18));
    let turns: Vec<_> = answer.turns.iter().map(|end| end.usage).collect();
    assert_eq!(turns.len(), 2, "the third is the end");
    assert_eq!((turns[0].prompt_tokens, turns[1].prompt_tokens), (10, 21));
    assert!(
        turns[1].cached_tokens >= 12,
        "earlier turns are cached: {turns:?}"
    );
    assert_eq!(
        answer.room_bytes,
        (64 << 10) + 10 * 4,
        "as much as was taken"
    );
    assert_eq!(rig.set.thread_stats().next().unwrap().streams.get(), 0);
}

#[test]
fn a_stream_between_its_turns_can_be_ended_stopped_and_killed() {
    let mut rig = Setup::default().start_ready(workers(1, 1_000_000));
    let begin = |rig: &mut Rig| {
        let addr = rig.shards[0].start_duplex(rank(0), Shard::request(&prompt(1, 10), 6, 7));
        say(rig, addr, 1, &prompt(2, 5), false);
        rig.shards[0].read_until(|shard| shard.answer(addr).turns.len() == 2);
        addr
    };
    let ended = begin(&mut rig);
    rig.shards[0].send_input(ended, rank(0), &[], false, true);
    rig.shards[0].read_all();
    let end = rig.shards[0].answer(ended).end.unwrap();
    assert_eq!(end.usage.completion_tokens, 12);
    assert_ne!(end.reason, FinishReason::Abort);
    let stopped = begin(&mut rig);
    let stop = ToWorker::Stop {
        rank: rank(0),
        addr: stopped,
    };
    rig.shards[0].port.send(stop).unwrap();
    rig.shards[0].read_all();
    let end = rig.shards[0].answer(stopped).end.unwrap();
    assert_eq!(end.reason, FinishReason::Abort);
    assert_eq!(end.usage.completion_tokens, 12);
    let killed = begin(&mut rig);
    let kill = ToWorker::Kill {
        rank: rank(0),
        addr: killed,
    };
    rig.shards[0].port.send(kill).unwrap();
    // Frames that crossed the kill are dropped.
    rig.shards[0].send_input(killed, rank(0), &[1], true, false);
    rig.shards[0].settle(rank(0));
    assert_eq!(rig.shards[0].answer(killed).end, None);
    let thread = rig.set.thread_stats().next().unwrap();
    assert_eq!((thread.streams.get(), thread.overruns.get()), (0, 0));
    assert_eq!(rig.set.ranks()[0].used_blocks.get(), 0);
}

#[test]
fn input_beyond_its_room_or_behind_its_last_ends_the_stream_and_is_counted() {
    let mut rig = Setup::default().start_ready(workers(1, 1_000_000));
    for (count, tokens, last) in [(1, vec![5; (64 << 8) + 1], false), (2, vec![5], true)] {
        let addr = rig.shards[0].start_duplex(rank(0), Shard::request(&prompt(1, 10), 400, 7));
        rig.shards[0].read_until(|shard| shard.answer(addr).room_bytes > 0);
        rig.shards[0].send_input(addr, rank(0), &[1], false, last);
        rig.shards[0].send_input(addr, rank(0), &tokens, true, false);
        rig.shards[0].read_all();
        let end = rig.shards[0].answer(addr).end.unwrap();
        assert_eq!(end.reason, FinishReason::Abort);
        let thread = rig.set.thread_stats().next().unwrap();
        assert_eq!((thread.overruns.get(), thread.streams.get()), (count, 0));
    }
}
