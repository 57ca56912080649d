//! Small runs whose every step was worked out by hand from vLLM's rules.

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::{
    BlockHash, FinishReason, KvDelta, KvOp, Prompt, RankId, RequestId, SimTime, Tail,
};
use slipstream_config::cluster::{EngineConfig, SchedulingPolicy};
use slipstream_engine::{Engine, FirstToken, LowerHits, OutputModel, Refusal, Usage, output_token};

use crate::rig::{EOS, ROOT, Rig, STEP_NS, output_model, request, small, tokens_of};

#[test]
fn sequences_run_in_the_order_of_their_arrival() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_seqs: 2,
        ..small(100)
    });
    for (id, max_tokens) in [(5, 2), (3, 4), (4, 2), (1, 2)] {
        rig.add_len(id, 6, max_tokens);
    }
    let mut order = Vec::new();
    while rig.step() {
        order.push(rig.ids());
    }
    // 4 takes the place of 5, behind 3; 1 that of 3 and 4, in any order of ends.
    assert_eq!(
        order,
        [
            vec![5, 3],
            vec![5, 3],
            vec![3, 4],
            vec![3, 4],
            vec![1],
            vec![1]
        ]
    );
}

#[test]
fn one_budget_is_split_over_prompts_and_passes() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_batched_tokens: 10,
        ..small(100)
    });
    rig.add_len(0, 25, 3);
    rig.add_len(1, 6, 2);
    let mut work = Vec::new();
    let mut ids = Vec::new();
    while rig.step() {
        work.push(rig.work());
        ids.push(rig.ids());
    }
    assert_eq!(
        work,
        [
            (1, 10, 0, 0, 0),
            (1, 10, 10, 0, 0),
            (2, 10, 20, 0, 0), // the last 5 of the first prompt, 5 of the second
            (1, 1, 5, 1, 26),  // the first decodes: 25 tokens and one more
            (0, 0, 0, 2, 34),  // 27 and 7
        ]
    );
    assert_eq!(ids, [vec![], vec![], vec![0], vec![0, 1], vec![0, 1]]);
}

#[test]
fn a_short_budget_serves_the_front_of_the_running_queue() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_batched_tokens: 2,
        ..small(100)
    });
    for id in 0..3 {
        rig.add_len(id, 1, 3);
    }
    let mut order = Vec::new();
    while rig.step() {
        order.push(rig.ids());
    }
    // The third waits until the first two are done.
    assert_eq!(
        order,
        [[0, 1], [0, 1], [0, 1]]
            .map(Vec::from)
            .into_iter()
            .chain([[2]; 3].map(Vec::from))
            .collect::<Vec<_>>()
    );
}

#[test]
fn without_chunks_a_prompt_waits_for_a_budget_that_holds_it() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_batched_tokens: 10,
        enable_chunked_prefill: false,
        ..small(100)
    });
    rig.add_len(0, 6, 3);
    rig.add_len(1, 6, 1);
    rig.add_len(2, 2, 1); // would fit, but is behind
    let mut work = Vec::new();
    while rig.step() {
        work.push((rig.out.fpm.scheduled_prefill.tokens, rig.ids()));
    }
    assert_eq!(work, [(6, vec![0]), (8, vec![0, 1, 2]), (0, vec![0])]);
}

#[test]
fn the_youngest_gives_way_and_comes_back() {
    let mut rig = Rig::new(&small(4));
    rig.add_len(0, 4, 8);
    rig.add_len(1, 4, 8);
    let blocks: Vec<BlockHash> = ROOT.chain(&tokens_of(1, 4), 4);

    for _ in 0..5 {
        assert!(rig.step()); // prompts, then 4 tokens each: all four blocks are full
        assert_eq!(rig.ids(), [0, 1]);
    }
    assert_eq!(rig.engine.stats().free_blocks, 0);

    // Token 9 of the first needs a block: the second one's are freed, its last block first, and
    // that is the one evicted.
    assert!(rig.step());
    assert_eq!(rig.ids(), [0]);
    assert_eq!(rig.removed().len(), 1);
    assert_ne!(rig.removed(), blocks);
    let stats = rig.engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.preemptions), (1, 1, 1));
    assert_eq!((stats.used_blocks, stats.free_blocks), (3, 1));
    let queued = rig.out.fpm.queued_decode;
    assert_eq!((queued.requests, queued.kv_tokens), (1, 9));

    // It needs three blocks to come back (one is still cached, but free), and waits.
    for _ in 0..2 {
        assert!(rig.step());
        assert_eq!(rig.ids(), [0]);
    }
    assert_eq!(rig.finished[&0].0, FinishReason::Length);

    // The first has ended. Nine tokens, of which the cached block spares four.
    assert!(rig.step());
    assert_eq!(rig.work(), (1, 5, 4, 0, 0));
    assert_eq!(rig.ids(), [1]);
    rig.run_until_idle();
    let usage = Usage {
        prompt_tokens: 4,
        cached_tokens: 0, // at its first admission nothing was cached
        output_tokens: 8,
        preemptions: 1,
    };
    assert_eq!(rig.finished[&1], (FinishReason::Length, usage));
    // The answer is the same as without the break.
    let vocab: Vec<u32> = (1_000..1_100).collect();
    let answer: Vec<u32> = (0..8).map(|p| output_token(&vocab, 1, p)).collect();
    assert_eq!(rig.answers[&1], answer);
    // Looked up once each: coming back does not count as another query.
    assert_eq!(rig.engine.stats().prefix_query_tokens, 8);
}

#[test]
fn a_pass_that_preempted_admits_nobody() {
    let mut rig = Rig::new(&small(4));
    rig.add_len(0, 4, 8);
    rig.add_len(1, 4, 8);
    for _ in 0..5 {
        rig.step();
    }
    rig.add_len(2, 1, 1);
    // The preemption leaves a block free, and 2 needs no more, but the queue stays closed; then 1
    // is at its head.
    rig.step();
    assert_eq!((rig.ids(), rig.engine.stats().free_blocks), (vec![0], 1));
    rig.step();
    assert_eq!(rig.ids(), [0]);
    rig.step();
    assert_eq!(rig.ids(), [0]); // its last token
    rig.step();
    assert_eq!(rig.ids(), [1, 2]);
}

#[test]
fn the_whole_prompt_must_fit_before_its_first_chunk_runs() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_batched_tokens: 4,
        ..small(5)
    });
    rig.add_len(0, 4, 6); // two blocks from the first decode on
    rig.step();
    rig.add_len(1, 17, 1); // five blocks; the first chunk would need one
    let mut order = Vec::new();
    while rig.step() {
        order.push(rig.work().0);
    }
    // Five decodes alone, then the prompt in five chunks.
    assert_eq!(order, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]);
}

#[test]
fn a_fully_cached_prompt_computes_its_last_block() {
    for (len, hit) in [(8, 4), (9, 8), (7, 4), (4, 0), (3, 0)] {
        let mut rig = Rig::new(&small(100));
        let tokens = tokens_of(0, len);
        rig.add(request(0, &tokens, 1)).unwrap();
        rig.run_until_idle();
        rig.add(request(1, &tokens, 1)).unwrap();
        rig.step();
        assert_eq!(rig.finished[&1].1.cached_tokens, hit, "prompt of {len}");
        assert_eq!(rig.work(), (1, u64::from(len - hit), u64::from(hit), 0, 0));
        // The block computed again is a second copy; it is not published.
        assert_eq!(rig.out.kv.ops, []);
        let stats = rig.engine.stats();
        assert_eq!(stats.prefix_hit_tokens, u64::from(hit));
        assert_eq!(stats.prefix_query_tokens, 2 * u64::from(len));
    }
}

#[test]
fn equal_prompts_of_one_pass_share_blocks() {
    let mut rig = Rig::new(&small(100));
    let tokens = tokens_of(0, 10);
    for id in 0..3 {
        rig.add(request(id, &tokens, 2)).unwrap();
    }
    rig.step();
    // Ten tokens once, then twice the two behind the eight that the first is computing.
    assert_eq!(rig.work(), (3, 14, 16, 0, 0));
    // Two shared blocks and three tails.
    assert_eq!(rig.engine.stats().used_blocks, 5);
}

#[test]
fn nothing_is_reused_with_prefix_caching_off() {
    let mut rig = Rig::new(&EngineConfig {
        enable_prefix_caching: false,
        ..small(100)
    });
    let tokens = tokens_of(0, 10);
    for id in 0..2 {
        rig.add(request(id, &tokens, 9)).unwrap();
    }
    rig.step();
    assert_eq!(rig.work(), (2, 20, 0, 0, 0));
    rig.run_until_idle();
    assert_eq!(rig.out.kv.ops, []);
    let stats = rig.engine.stats();
    assert_eq!((stats.cached_blocks, stats.prefix_query_tokens), (0, 0));
}

#[test]
fn a_later_turn_hits_the_answer_of_the_turn_before() {
    for len in [2, 4, 10] {
        let mut rig = Rig::new(&small(100));
        let mut turn = tokens_of(0, len);
        rig.add(request(0, &turn, 9)).unwrap();
        rig.run_until_idle();
        turn.extend(&rig.answers[&0]);
        turn.push(1); // the user again
        rig.add(request(1, &turn, 1)).unwrap();
        rig.run_until_idle();
        // The last token of the answer was never computed.
        let computed = len + 9 - 1;
        let cached = rig.finished[&1].1.cached_tokens;
        assert_eq!(cached, computed / 4 * 4, "prompt of {len}");
    }
}

#[test]
fn answers_to_opaque_prompts_are_hashed_by_id() {
    let mut rig = Rig::new(&small(100));
    let blocks = [BlockHash(1), BlockHash(2)];
    let mut r = request(0, &[1], 7);
    r.prompt = Prompt::from_parts(9, 4, blocks.into(), Tail::Opaque { id: 42 })
        .unwrap()
        .with_root(ROOT);
    let mut again = r.clone();
    again.id = RequestId(1);
    rig.add(r).unwrap();
    let mut stored = Vec::new();
    while rig.step() {
        stored.extend(rig.out.kv.ops.iter().copied());
    }
    let third = BlockHash(2).child_of_id(42, 2);
    let op = |hash, parent| KvOp::Stored { hash, parent };
    assert_eq!(
        stored,
        [
            op(blocks[0], ROOT),
            op(blocks[1], blocks[0]),
            op(third, blocks[1])
        ]
    );
    // The same name again: the same answer, whose blocks are copies.
    rig.add(again).unwrap();
    rig.run_until_idle();
    assert_eq!(rig.engine.stats().cached_blocks, 3);
}

#[test]
fn the_block_longest_unused_is_evicted_first() {
    let mut rig = Rig::new(&small(6));
    for id in 0..3 {
        rig.add_len(id, 8, 1); // two blocks each
        rig.run_until_idle();
    }
    let blocks: Vec<Vec<BlockHash>> = (0..3).map(|id| ROOT.chain(&tokens_of(id, 8), 4)).collect();
    // The first block of 0 is used again. Its last one must be computed again, and the block taken
    // for that is the block longest unused: its own first copy.
    rig.add(request(3, &tokens_of(0, 8), 1)).unwrap();
    rig.run_until_idle();
    assert_eq!(rig.removed(), [blocks[0][1]]);
    assert_eq!(rig.stored(), [blocks[0][1]]);
    rig.add_len(4, 21, 1);
    rig.run_until_idle();
    assert_eq!(
        rig.removed(),
        [
            blocks[1][1],
            blocks[1][0],
            blocks[2][1],
            blocks[2][0],
            blocks[0][1],
            blocks[0][0]
        ]
    );
}

#[test]
fn an_abort_between_begin_and_end_of_a_pass_frees_at_once() {
    let mut rig = Rig::new(&small(10));
    for id in 0..3 {
        rig.add_len(id, 6, 5);
    }
    rig.step();
    let end = rig.engine.begin_pass(rig.now).unwrap();
    assert_eq!(rig.engine.stats().used_blocks, 6);
    assert!(rig.engine.abort(RequestId(1)));
    assert!(!rig.engine.abort(RequestId(1)));
    let stats = rig.engine.stats();
    assert_eq!((stats.used_blocks, stats.running), (4, 2));
    rig.add_len(1, 3, 2); // the id is free again
    rig.engine.audit();
    rig.finish(end);
    assert_eq!(rig.ids(), [0, 2]);
    rig.step();
    assert_eq!(rig.ids(), [0, 2, 1]);
    rig.run_until_idle();
    assert_eq!(rig.finished[&1].1.output_tokens, 2);
}

#[test]
fn aborts_reach_the_waiting_and_the_last_one_running() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_seqs: 1,
        ..small(10)
    });
    for id in 0..3 {
        rig.add_len(id, 6, 5);
    }
    rig.step();
    assert!(rig.engine.abort(RequestId(1)));
    assert_eq!(rig.engine.stats().waiting, 1);
    let end = rig.engine.begin_pass(rig.now).unwrap();
    assert!(rig.engine.abort(RequestId(0)));
    assert!(rig.engine.abort(RequestId(2)));
    assert!(rig.engine.is_idle() && rig.engine.in_pass());
    rig.finish(end);
    assert!(rig.ids().is_empty());
    assert_eq!(rig.engine.begin_pass(rig.now), None);
    assert!(!rig.engine.abort(RequestId(9)));
}

#[test]
fn low_priority_waits_and_gives_way() {
    let config = EngineConfig {
        scheduling_policy: SchedulingPolicy::Priority,
        max_num_seqs: 2,
        ..small(4)
    };
    let mut rig = Rig::new(&config);
    for (id, priority) in [(0, 5), (1, 1), (2, 0), (3, 1)] {
        let mut r = request(id, &tokens_of(id, 4), 8);
        r.priority = priority;
        rig.add(r).unwrap();
    }
    for _ in 0..5 {
        rig.step();
        assert_eq!(rig.ids(), [2, 1]);
    }
    // The first in the queue needs a block: 1 gives way. It is ahead of 3, having come first, and
    // both are ahead of 0.
    let mut order = Vec::new();
    while rig.step() {
        order.push(rig.ids());
    }
    let expect = |n: usize, ids: &[u64]| vec![ids.to_vec(); n];
    assert_eq!(
        order,
        [
            expect(3, &[2]),
            // Three blocks for the nine tokens of 1, so one is left for 3.
            expect(1, &[1, 3]),
            // 3 needs a second block for its fifth token: it is its own victim, behind 1. Then it
            // waits, since it needs two.
            expect(2, &[1]),
            // 3, whose block is still cached, runs with 0 until 0 must give way for its ninth token.
            expect(4, &[3, 0]),
            expect(3, &[3]),
            expect(4, &[0]),
        ]
        .concat()
    );
}

#[test]
fn a_sequence_that_preempts_itself_stalls_none_of_higher_priority() {
    let config = EngineConfig {
        scheduling_policy: SchedulingPolicy::Priority,
        ..small(6)
    };
    let mut rig = Rig::new(&config);
    rig.add_len(0, 5, 8);
    let mut low = request(1, &tokens_of(1, 6), 8);
    low.priority = 9;
    rig.add(low).unwrap();
    rig.step();
    rig.add_len(2, 5, 8);
    for _ in 0..2 {
        rig.step();
        assert_eq!(rig.ids(), [0, 1, 2]);
    }
    // All six blocks are held. 1 needs a third for its ninth token and is the lowest in priority, so
    // it preempts itself. 2 runs behind it, needs no block, and decodes in the same pass.
    assert_eq!(rig.engine.stats().free_blocks, 0);
    rig.step();
    assert_eq!(rig.ids(), [0, 2]);
    assert_eq!(rig.engine.stats().preemptions, 1);
    assert_eq!(rig.work(), (0, 0, 0, 2, 8 + 7));
    // The blocks of 1 are free now, and 0 takes one for its ninth token in the next pass, which
    // admits no sequence behind the head of the queue: 1 needs three and two are left.
    rig.step();
    assert_eq!(rig.ids(), [0, 2]);
    rig.run_until_idle();
    assert_eq!(rig.finished[&1].1.preemptions, 1);
    assert_eq!(rig.finished[&1].1.output_tokens, 8);
}

#[test]
fn a_victim_already_scheduled_gives_its_budget_back() {
    let config = EngineConfig {
        scheduling_policy: SchedulingPolicy::Priority,
        ..small(4)
    };
    let mut rig = Rig::new(&config);
    let mut low = request(0, &tokens_of(0, 5), 11);
    low.priority = 9;
    rig.add(low).unwrap();
    rig.add_len(1, 8, 5);
    rig.step(); // 1 first, by priority: both hold two blocks
    assert_eq!(rig.ids(), [1, 0]);
    rig.engine.abort(RequestId(1));
    // Now 0 runs first in the queue and the new one behind it.
    rig.add_len(2, 8, 5);
    rig.step();
    assert_eq!(rig.ids(), [0, 2]);
    assert_eq!(rig.engine.stats().free_blocks, 0);
    // 0 is scheduled, then 2 needs a third block, and 0 is the victim.
    rig.step();
    assert_eq!(rig.ids(), [2]);
    assert_eq!(rig.engine.preemptions_of(RequestId(0)), Some(1));
    assert_eq!(rig.engine.preemptions_of(RequestId(1)), None);
    assert_eq!(rig.work(), (0, 0, 0, 1, 9));
    assert_eq!(rig.out.fpm.queued_decode.kv_tokens, 7);
    rig.run_until_idle();
    assert_eq!(rig.finished[&0].1.output_tokens, 11);
    assert_eq!(rig.finished[&0].1.preemptions, 1);
}

#[test]
fn the_budget_of_a_victim_serves_those_behind_it() {
    let mut rig = Rig::new(&EngineConfig {
        block_size: 2,
        max_num_batched_tokens: 10,
        scheduling_policy: SchedulingPolicy::Priority,
        ..small(33)
    });
    let add = |rig: &mut Rig, id, len, priority| {
        let mut r = request(id, &[1], 20);
        r.prompt = Prompt::from_tokens(&tokens_of(id, len), 2, ROOT).unwrap();
        r.priority = priority;
        rig.add(r).unwrap();
    };
    add(&mut rig, 0, 5, 9);
    rig.step();
    add(&mut rig, 1, 5, 0);
    add(&mut rig, 2, 54, 0);
    // The long prompt gets what the two leave: 4 tokens, then 8 a pass.
    for pass in 1..=6u64 {
        rig.step();
        let (_, tokens, _, decodes, _) = rig.work();
        assert_eq!((tokens, decodes), if pass == 1 { (9, 1) } else { (8, 2) });
    }
    // 0 has computed 11 tokens, 1 has 10, 2 has 44: 6 + 5 + 22 blocks.
    assert_eq!(rig.engine.stats().free_blocks, 0);
    // 0 needs none for its twelfth token and is scheduled. 1 needs one for its eleventh: 0 gives way,
    // and its token of the budget goes to the long prompt.
    rig.step();
    assert_eq!(rig.engine.stats().preemptions, 1);
    assert_eq!(rig.work(), (1, 9, 44, 1, 11));
}

#[test]
fn answers_end_as_asked() {
    // natural length; max, min, ignore_eos; tokens, reason, whether the last one is EOS
    let cases = [
        (3, (10, 0, false), (3, FinishReason::Stop, true)),
        (3, (3, 0, false), (3, FinishReason::Stop, true)),
        (3, (2, 0, false), (2, FinishReason::Length, false)),
        (3, (10, 0, true), (10, FinishReason::Length, false)),
        (3, (10, 5, false), (6, FinishReason::Stop, true)),
        (3, (10, 2, false), (3, FinishReason::Stop, true)),
        (1, (10, 0, false), (1, FinishReason::Stop, true)),
        (50, (1_000, 0, true), (14, FinishReason::Length, false)), // max_model_len
    ];
    for (natural, (max_tokens, min_tokens, ignore_eos), (count, reason, eos)) in cases {
        let config = EngineConfig {
            max_model_len: 20,
            ..small(100)
        };
        let mut rig = Rig::with_output(&config, output_model(natural));
        let mut r = request(0, &tokens_of(0, 6), max_tokens);
        r.params.min_tokens = min_tokens;
        r.params.ignore_eos = ignore_eos;
        rig.add(r).unwrap();
        rig.run_until_idle();
        let (got, usage) = rig.finished[&0];
        assert_eq!((got, usage.output_tokens), (reason, count));
        assert_eq!(rig.answers[&0].len() as u32, count);
        let ends = rig.answers[&0]
            .iter()
            .map(|&t| t == EOS)
            .collect::<Vec<_>>();
        assert!(ends[..ends.len() - 1].iter().all(|&e| !e));
        assert_eq!(ends[ends.len() - 1], eos);
    }
}

#[test]
fn stop_tokens_end_an_answer_and_are_part_of_it() {
    let vocab: Vec<u32> = (1_000..1_100).collect();
    let answer: Vec<u32> = (0..20).map(|p| output_token(&vocab, 0, p)).collect();
    let stop = answer[4];
    assert!(!answer[..4].contains(&stop), "pick another seed");
    let again = answer
        .iter()
        .skip(5)
        .position(|&t| t == stop)
        .map(|i| i + 6);
    for (min_tokens, ends) in [(0, 5), (4, 5), (5, again.unwrap_or(20))] {
        let mut rig = Rig::new(&small(100));
        let mut r = request(0, &tokens_of(0, 6), 20);
        r.params.stop_token_ids = [stop].into();
        r.params.min_tokens = min_tokens;
        rig.add(r).unwrap();
        rig.run_until_idle();
        assert_eq!(rig.answers[&0], answer[..ends]);
        let reason = if ends == 20 && again.is_none() {
            FinishReason::Length
        } else {
            FinishReason::Stop
        };
        assert_eq!(rig.finished[&0].0, reason);
    }
}

#[test]
fn first_tokens_carry_their_times() {
    let mut rig = Rig::new(&EngineConfig {
        max_num_batched_tokens: 10,
        ..small(100)
    });
    rig.now = SimTime(500);
    rig.add_len(0, 25, 2);
    rig.now = SimTime(700);
    rig.step();
    rig.step();
    assert_eq!(rig.out.first, []);
    rig.step();
    assert_eq!(
        rig.out.first,
        [FirstToken {
            id: RequestId(0),
            cached_tokens: 0,
            lower: LowerHits::default(),
            arrived: SimTime(500),
            admitted: SimTime(700),
            first_pass_start: SimTime(700 + 2 * STEP_NS),
        }]
    );
    rig.step();
    assert_eq!(rig.out.first, []);
}

#[test]
fn what_can_never_run_is_refused_with_the_numbers() {
    let mut rig = Rig::new(&EngineConfig {
        max_model_len: 40,
        ..small(6)
    });
    let check = |rig: &mut Rig, r, expected: &str| {
        let before = rig.engine.stats();
        let refusal: Refusal = rig.add(r).unwrap_err();
        assert_eq!(refusal.to_string(), expected);
        assert_eq!(rig.engine.stats(), before);
    };
    check(
        &mut rig,
        request(0, &tokens_of(0, 40), 1),
        "the prompt has 40 tokens, and with at least one output token it exceeds \
         max_model_len = 40; shorten it",
    );
    check(
        &mut rig,
        request(0, &tokens_of(0, 24), 1),
        "the prompt has 24 tokens, and with at least one output token it needs 7 KV blocks of 4, \
         but the engine has 6; shorten it or raise num_gpu_blocks",
    );
    check(
        &mut rig,
        request(0, &tokens_of(0, 2), 0),
        "max_tokens is 0; ask for at least 1",
    );
    let mut r = request(0, &[1], 1);
    r.prompt = Prompt::from_tokens(&[1; 9], 16, ROOT).unwrap();
    check(
        &mut rig,
        r,
        "the prompt is hashed in blocks of 16 tokens, but the engine's have 4",
    );
    rig.add_len(3, 23, 9);
    check(
        &mut rig,
        request(3, &tokens_of(1, 2), 1),
        "request r3 is already in the engine",
    );
    // The longest that fits does run, to the end of the cache.
    rig.run_until_idle();
    assert_eq!(rig.finished[&3].1.output_tokens, 1);

    let mut rig = Rig::new(&EngineConfig {
        enable_chunked_prefill: false,
        max_num_batched_tokens: 12,
        ..small(100)
    });
    check(
        &mut rig,
        request(0, &tokens_of(0, 12), 1),
        "the prompt has 12 tokens, and with at least one output token it exceeds \
         max_num_batched_tokens = 12 while chunked prefill is off; enable_chunked_prefill or \
         raise the budget",
    );
}

#[test]
fn configurations_that_make_no_engine_are_refused() {
    let check = |config: EngineConfig, output, expected: &str| {
        let timing = Box::new(slipstream_engine::timing::Constant { step_ns: 1 });
        let made = Engine::new(RankId::default(), &config, timing, output);
        assert_eq!(made.err().expect("no engine").to_string(), expected);
    };
    let config = small(10);
    check(
        EngineConfig {
            max_num_seqs: 0,
            ..config.clone()
        },
        output_model(1),
        "`engine.max_num_seqs` is 0; set it to 1 or more",
    );
    check(
        EngineConfig {
            num_gpu_blocks: u32::MAX,
            ..config.clone()
        },
        output_model(1),
        "`engine.num_gpu_blocks` is 4294967295; at most 67108864 is possible",
    );
    check(
        EngineConfig {
            block_size: 1 << 20,
            ..config.clone()
        },
        output_model(1),
        "`engine.block_size` is 1048576; at most 65536 is possible",
    );
    check(
        config.clone(),
        OutputModel {
            vocab: [].into(),
            ..output_model(1)
        },
        "the output vocabulary is empty; give the engine at least one token to answer with",
    );
    check(
        config,
        OutputModel {
            eos: 1_003,
            ..output_model(1)
        },
        "the output vocabulary contains the end-of-sequence token 1003; leave it out",
    );
}

#[test]
fn a_snapshot_is_what_the_deltas_add_up_to() {
    let mut rig = Rig::new(&small(5));
    let mut held = std::collections::BTreeSet::new();
    let apply = |held: &mut std::collections::BTreeSet<BlockHash>, delta: &KvDelta| {
        for op in &delta.ops {
            match *op {
                KvOp::Stored { hash, .. } => assert!(held.insert(hash)),
                KvOp::Removed { hash } => assert!(held.remove(&hash)),
                KvOp::Cleared => held.clear(),
            }
        }
    };
    let mut published = 0;
    for id in 0..6 {
        rig.add_len(id, 9, 6);
        while rig.step() {
            let delta = rig.out.kv.clone();
            assert_eq!(delta.sequence, published);
            published += u64::from(!delta.ops.is_empty());
            apply(&mut held, &delta);
        }
    }
    let mut snapshot = KvDelta::default();
    rig.engine.kv_snapshot(&mut snapshot);
    assert_eq!(snapshot.sequence, published);
    assert_eq!(snapshot.ops[0], KvOp::Cleared);
    let mut fresh = std::collections::BTreeSet::new();
    apply(&mut fresh, &snapshot);
    assert_eq!(fresh, held);
    assert_eq!(rig.engine.stats().cached_blocks as usize, held.len());

    // The next delta has the number that the snapshot names, and continues there.
    rig.add_len(9, 9, 6);
    rig.step();
    assert_eq!(rig.out.kv.sequence, snapshot.sequence);
    apply(&mut fresh, &rig.out.kv);
    assert_eq!(rig.engine.stats().cached_blocks as usize, fresh.len());

    // A reset is published as well, even if no pass comes.
    assert!(!rig.engine.reset_prefix_cache(), "blocks are held");
    rig.engine.abort(RequestId(9));
    assert!(rig.engine.reset_prefix_cache());
    let mut delta = KvDelta::default();
    assert!(rig.engine.take_kv(&mut delta));
    assert_eq!(delta.ops, [KvOp::Cleared]);
    assert!(!rig.engine.take_kv(&mut delta));
    assert_eq!(rig.engine.stats().cached_blocks, 0);
}

#[test]
fn heartbeats_are_numbered_with_the_passes() {
    let mut rig = Rig::new(&small(100));
    rig.add_len(0, 6, 2);
    rig.add_len(1, 8, 2);
    let mut beat = slipstream_base::ForwardPassMetrics::default();
    rig.engine.heartbeat(&mut beat);
    assert_eq!(beat.counter, 0);
    let queued = beat.queued_prefill;
    assert_eq!(
        (queued.requests, queued.tokens, queued.length_variance),
        (2, 14, 1.0)
    );
    rig.step();
    assert_eq!(rig.out.fpm.counter, 1);
    assert_eq!(rig.out.fpm.wall_time_s, 1e-6);
    assert_eq!(rig.out.fpm.scheduled_prefill.length_variance, 1.0);
    rig.step();
    assert_eq!(rig.out.fpm.counter, 2);
    // Contexts 7 and 9.
    assert_eq!(rig.out.fpm.scheduled_decode.kv_tokens_variance, 1.0);
}

#[test]
fn noted_blocks_hash_to_what_was_stored() {
    // Few blocks, so that sequences are preempted, blocks evicted and stored again.
    let mut rig = Rig::new(&small(24));
    rig.engine.note_stored_blocks(true);
    for id in 0..6 {
        let tokens = tokens_of(if id == 5 { 5 } else { id % 3 }, 10 + id as u32);
        let mut request = request(id, &tokens, 30);
        if id != 5 {
            request.prompt = request.prompt.with_block_tokens(&tokens).unwrap();
        }
        rig.add(request).unwrap();
    }
    let mut noted = StoredBlocks::default();
    let (mut known, mut unknown, mut first) = (0, 0, 0);
    while rig.step() {
        rig.engine.take_stored_blocks(&mut noted);
        let mut at = 0;
        for op in &rig.out.kv.ops {
            let KvOp::Stored { hash, parent } = *op else {
                continue;
            };
            if noted.tokens(at).is_empty() {
                unknown += 1;
            } else {
                assert_eq!(parent.child(noted.tokens(at)), hash);
                known += 1;
            }
            assert_eq!(noted.is_first(at), parent == ROOT);
            first += u32::from(noted.is_first(at));
            at += 1;
        }
        assert_eq!(noted.len(), at, "one entry for each stored block");
    }
    assert!(known > 40 && first >= 3, "{known} {first}");
    assert!(unknown > 0, "the prompt that kept no tokens");
    assert!(rig.engine.stats().preemptions > 0);
}
