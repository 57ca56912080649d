//! Requests in two parts: a prompt that is kept for others, an answer that waits for its prompt.

use slipstream_base::{RankId, Role};
use slipstream_engine::timing::Constant;
use slipstream_planes::{StreamAddr, ToWorker};
use slipstream_worker::WorkerSpec;

use crate::rig::{ATTEMPT, Rig, Setup, Shard, config, engine, expected, workers};

const PROMPT: RankId = RankId {
    worker: slipstream_base::WorkerId(0),
    dp_rank: 0,
};
const ANSWER: RankId = RankId {
    worker: slipstream_base::WorkerId(1),
    dp_rank: 0,
};

fn tokens(len: u32) -> Vec<u32> {
    (0..len).collect()
}

fn used(rig: &Rig, rank: RankId) -> u64 {
    let stats = rig.set.ranks().iter().find(|stats| stats.rank == rank);
    stats.unwrap().used_blocks.get()
}

/// Starts a prompt of `len` tokens and waits until it is computed.
fn compute(shard: &mut Shard, len: u32) -> StreamAddr {
    let request = Shard::request(&tokens(len), 9, 5);
    let addr = shard.start_part(PROMPT, request, Role::Prefill);
    shard.read_until(|shard| shard.answer(addr).computed.is_some());
    addr
}

/// Starts an answer to a prompt of `len` tokens, and waits until there is room for that.
fn reserve(shard: &mut Shard, len: u32) -> StreamAddr {
    let request = Shard::request(&tokens(len), 9, 5);
    let addr = shard.start_part(ANSWER, request, Role::Decode);
    shard.read_until(|shard| shard.answer(addr).reserved.is_some());
    addr
}

#[test]
fn a_prompt_is_kept_until_it_is_fetched_and_its_answer_runs_when_it_has_come() {
    let mut rig = Setup::default().start_ready(workers(2, 1_000));
    let mut shard = rig.shards.remove(0);
    let prompt = compute(&mut shard, 40);
    assert_eq!(used(&rig, PROMPT), 10, "40 tokens in blocks of 4");
    assert!(shard.answer(prompt).tokens.is_empty());
    let answer = reserve(&mut shard, 40);
    let reserved = shard.answer(answer).reserved.unwrap();
    assert_eq!((reserved.attempt, reserved.cached_tokens), (ATTEMPT, 0));
    assert!(reserved.at_ns >= reserved.worker_recv_ns);
    assert_eq!(used(&rig, ANSWER), 10);

    let (receive, release) = (
        ToWorker::Receive {
            rank: ANSWER,
            addr: answer,
        },
        ToWorker::Release {
            rank: PROMPT,
            addr: prompt,
        },
    );
    shard.port.send(receive).unwrap();
    shard.port.send(release).unwrap();
    shard.read_until(|shard| shard.answer(answer).is_over());
    assert_eq!(shard.answer(answer).tokens, expected(5, 9));
    let usage = shard.answer(answer).end.unwrap().usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (40, 9));
    shard.settle(PROMPT);
    assert_eq!((used(&rig, PROMPT), used(&rig, ANSWER)), (0, 0));
    let stats = rig.set.ranks();
    assert_eq!(stats[0].prompts_handed_over.get(), 1);
    assert_eq!(stats[1].prompts_received.get(), 1);
    assert_eq!(
        (
            stats[0].prompt_tokens.get(),
            stats[0].generation_tokens.get()
        ),
        (40, 0)
    );
    assert_eq!(
        (
            stats[1].prompt_tokens.get(),
            stats[1].generation_tokens.get()
        ),
        (0, 9)
    );
    assert_eq!(stats[0].finished_abort.get(), 0);
    // Blocks that it computed can be hit, and so can those that it received.
    let again = reserve(&mut shard, 40);
    assert_eq!(shard.answer(again).reserved.unwrap().cached_tokens, 36);
}

#[test]
fn a_kill_frees_either_part_at_any_stage() {
    let mut rig = Setup::default().start_ready(workers(2, 1_000));
    let mut shard = rig.shards.remove(0);
    let prompt = compute(&mut shard, 40);
    let answer = reserve(&mut shard, 40);
    let kill = |rank, addr| ToWorker::Kill { rank, addr };
    shard.port.send(kill(PROMPT, prompt)).unwrap();
    shard.port.send(kill(ANSWER, answer)).unwrap();
    shard.settle(PROMPT);
    shard.settle(ANSWER);
    assert_eq!((used(&rig, PROMPT), used(&rig, ANSWER)), (0, 0));
    // Blocks for requests that are gone, or did not ask, change nothing.
    for message in [
        ToWorker::Receive {
            rank: ANSWER,
            addr: answer,
        },
        ToWorker::Release {
            rank: PROMPT,
            addr: prompt,
        },
    ] {
        shard.port.send(message).unwrap();
    }
    let whole = shard.start(ANSWER, Shard::request(&tokens(10), 4, 8));
    let receive = ToWorker::Receive {
        rank: ANSWER,
        addr: whole,
    };
    shard.port.send(receive).unwrap();
    shard.read_until(|shard| shard.answer(whole).is_over());
    assert_eq!(shard.answer(whole).tokens, expected(8, 4));
    let stats = rig.set.ranks();
    assert_eq!(
        stats[0].prompts_handed_over.get() + stats[1].prompts_received.get(),
        0
    );
}

/// A rank that waits for prompts alone runs no pass; what it lets go of wakes it for who waits.
#[test]
fn room_that_is_given_back_goes_to_the_next_in_line() {
    let small = slipstream_config::cluster::EngineConfig {
        num_gpu_blocks: 12,
        ..config()
    };
    let specs = [PROMPT, ANSWER].map(|rank| WorkerSpec {
        worker: rank.worker,
        ranks: vec![engine(rank, &small, Box::new(Constant { step_ns: 1_000 }))],
        startup_s: 0.0,
    });
    let mut rig = Setup::default().start_ready(specs.into());
    let mut shard = rig.shards.remove(0);
    let first = reserve(&mut shard, 40);
    let request = Shard::request(&tokens(44), 3, 6);
    let second = shard.start_part(ANSWER, request, Role::Decode);
    shard.settle(ANSWER);
    assert!(shard.answer(second).reserved.is_none(), "there is no room");
    shard
        .port
        .send(ToWorker::Kill {
            rank: ANSWER,
            addr: first,
        })
        .unwrap();
    shard.read_until(|shard| shard.answer(second).reserved.is_some());
    // As at the side that computes.
    let held = compute(&mut shard, 40);
    let other: Vec<u32> = (1_000..1_044).collect();
    let request = Shard::request(&other, 3, 6);
    let next = shard.start_part(PROMPT, request, Role::Prefill);
    shard.settle(PROMPT);
    assert!(shard.answer(next).computed.is_none(), "there is no room");
    shard
        .port
        .send(ToWorker::Release {
            rank: PROMPT,
            addr: held,
        })
        .unwrap();
    shard.read_until(|shard| shard.answer(next).computed.is_some());
    assert_eq!((used(&rig, PROMPT), used(&rig, ANSWER)), (11, 11));
}

#[test]
fn a_worker_that_shuts_down_ends_both_parts() {
    let mut rig = Setup::default().start_ready(workers(2, 1_000));
    let mut shard = rig.shards.remove(0);
    let prompt = compute(&mut shard, 40);
    let answer = reserve(&mut shard, 40);
    let stopped = std::thread::spawn(move || rig.set.shutdown());
    shard.read_until(|shard| shard.answer(prompt).is_over() && shard.answer(answer).is_over());
    stopped.join().unwrap().unwrap();
    assert!(shard.answer(prompt).end.is_some() && shard.answer(answer).end.is_some());
}
