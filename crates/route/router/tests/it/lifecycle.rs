//! From a request to the end of its sequence.

use proptest::prelude::*;
use slipstream_router::Score;

use super::*;

#[test]
fn a_sequence_is_charged_and_gives_all_back() {
    let (fleet, mut router) = ready(1, RouterConfig::default());
    let prompt = prompt(1, 100); // 6 blocks and 4 tokens
    let mut routed = route(&mut router, &prompt);
    let load = fleet.loads()[0];
    assert_eq!((load.requests, load.prefill_tokens), (1, 100));
    assert_eq!((load.decode_tokens, load.active_blocks), (0, 7));
    routed.active.on_first_token();
    routed.active.on_first_token();
    let load = fleet.loads()[0];
    assert_eq!((load.requests, load.prefill_tokens), (1, 0));
    assert_eq!((load.decode_tokens, load.active_blocks), (100, 7));
    drop(routed);
    assert_eq!(charged(&fleet), 0);
    // A sequence that ends before its first token gives back its prefill, too.
    drop(route(&mut router, &prompt));
    assert_eq!(charged(&fleet), 0);
    assert_eq!(fleet.loads()[0].routed_total, 2);
}

#[test]
fn blocks_in_common_are_charged_once() {
    let (fleet, mut router) = ready(1, RouterConfig::default());
    let long = route(&mut router, &prompt(1, 160));
    let short = route(&mut router, &prompt(1, 80));
    let other = route(&mut router, &prompt(2, 40));
    assert_eq!(fleet.loads()[0].active_blocks, 10 + 3);
    drop(long);
    assert_eq!(fleet.loads()[0].active_blocks, 5 + 3);
    drop((short, other));
    assert_eq!(charged(&fleet), 0);
}

#[test]
fn hits_are_not_charged_and_the_last_token_always_is() {
    let (fleet, mut router) = ready(2, RouterConfig::default());
    let prompt = prompt(1, 160);
    fleet.on_kv(&stored(1, 0, &prompt));
    let routed = route(&mut router, &prompt);
    assert_eq!(routed.target.worker, WorkerId(1));
    // All 10 blocks are cached, but the engine computes the last token, and so the last block.
    assert_eq!(routed.hit_blocks, 9);
    assert_eq!(routed.active.prefill_tokens(), 16);
}

#[test]
fn round_robin_reports_and_charges_hits_as_well() {
    let (fleet, mut router) = ready(2, config(RouterPolicy::RoundRobin));
    let prompt = prompt(1, 100);
    fleet.on_kv(&stored(1, 0, &prompt));
    let hits: Vec<_> = (0..4)
        .map(|_| route(&mut router, &prompt).hit_blocks)
        .collect();
    assert_eq!(hits, [0, 6, 0, 6]);
}

#[test]
fn a_gap_hides_a_workers_blocks_until_its_snapshot() {
    let (fleet, mut router) = ready(2, RouterConfig::default());
    let prompt = prompt(1, 160);
    assert!(!fleet.on_kv(&stored(1, 0, &prompt)).gap);
    assert_eq!(route(&mut router, &prompt).hit_blocks, 9);
    let lost = KvDelta {
        ops: Vec::new(),
        ..stored(1, 2, &prompt)
    };
    assert!(fleet.on_kv(&lost).gap, "delta 1 is missing");
    let routed = route(&mut router, &prompt);
    assert_eq!((routed.target.worker, routed.hit_blocks), (WorkerId(0), 0));
    drop(routed);
    let mut snapshot = stored(1, 3, &prompt);
    snapshot.ops.insert(0, KvOp::Cleared);
    assert!(!fleet.on_kv(&snapshot).gap);
    let routed = route(&mut router, &prompt);
    assert_eq!((routed.target.worker, routed.hit_blocks), (WorkerId(1), 9));
}

#[test]
fn a_lost_worker_takes_its_blocks_along() {
    let (fleet, mut router) = ready(2, RouterConfig::default());
    let prompt = prompt(1, 160);
    fleet.on_kv(&stored(1, 0, &prompt));
    fleet.on_worker_lost(WorkerId(1));
    assert_eq!(route(&mut router, &prompt).target.worker, WorkerId(0));
    fleet.set_ready(WorkerId(1), true);
    assert_eq!(route(&mut router, &prompt).hit_blocks, 0);
    // After a restart it numbers its deltas from 0 again.
    assert!(!fleet.on_kv(&stored(1, 0, &prompt)).gap);
    assert_eq!(route(&mut router, &prompt).hit_blocks, 9);
}

#[test]
fn without_events_what_was_routed_is_believed_for_a_while() {
    let (_, mut router) = ready(
        4,
        RouterConfig {
            kv_events: false,
            approximate_ttl_s: 10.0,
            ..RouterConfig::default()
        },
    );
    let prompt = prompt(1, 160);
    let mut at = |seconds: u64| {
        let routed = router.route(SimTime(seconds * SECOND), &request(&prompt), None);
        routed.unwrap().hit_blocks
    };
    assert_eq!(at(0), 0);
    assert_eq!(at(5), 9);
    assert_eq!(at(14), 9, "used at 5, so believed until 15");
    assert_eq!(at(24), 0);
}

#[test]
fn a_session_stays_until_its_time_or_its_worker_is_gone() {
    let (fleet, mut router) = ready(
        3,
        RouterConfig {
            affinity_ttl_s: 10.0,
            ..config(RouterPolicy::RoundRobin)
        },
    );
    let prompt = prompt(1, 100);
    let mut at = |seconds: u64, session: Option<u64>| {
        let request = RouteRequest {
            session,
            ..request(&prompt)
        };
        let routed = router.route(SimTime(seconds * SECOND), &request, None);
        routed.unwrap().target.worker.0
    };
    assert_eq!(at(0, Some(5)), 0);
    assert_eq!(at(0, None), 1);
    assert_eq!(at(9, Some(5)), 0);
    assert_eq!(at(18, Some(5)), 0, "each request renews it");
    assert_eq!(at(28, Some(5)), 2, "over after 10 s");
    assert_eq!(at(28, Some(6)), 0);
    fleet.set_ready(WorkerId(2), false);
    let moved = at(29, Some(5));
    assert_ne!(moved, 2);
    fleet.set_ready(WorkerId(2), true);
    assert_eq!(at(30, Some(5)), moved);
    assert_eq!(fleet.counters().affinity_hits_total, 3);
}

#[test]
fn sessions_are_bounded_and_the_quiet_ones_go_first() {
    let (fleet, mut router) = ready(
        2,
        RouterConfig {
            affinity_ttl_s: 1e6,
            ..config(RouterPolicy::RoundRobin)
        },
    );
    let prompt = prompt(1, 10);
    for session in 0..300_000 {
        let request = RouteRequest {
            session: Some(session),
            ..request(&prompt)
        };
        drop(router.route(SimTime(session), &request, None).unwrap());
    }
    let dropped = fleet.counters().sessions_dropped_total;
    // 2^18 are kept, give or take how evenly they spread over the table's parts.
    assert!((37_000..50_000).contains(&dropped), "{dropped}");
    let mut again = |session| {
        let before = fleet.counters().affinity_hits_total;
        let request = RouteRequest {
            session: Some(session),
            ..request(&prompt)
        };
        drop(router.route(SimTime(300_000), &request, None).unwrap());
        fleet.counters().affinity_hits_total > before
    };
    assert!(again(299_999));
    assert!(!again(0));
}

#[test]
fn the_client_may_name_a_worker_and_its_ranks_are_chosen_among() {
    let fleet = fleet(2, 2, config(RouterPolicy::Direct));
    (0..2).for_each(|worker| fleet.set_ready(WorkerId(worker), true));
    let mut router = Router::new(Arc::clone(&fleet), 0);
    let prompt = prompt(1, 100);
    let to = |worker| RouteRequest {
        direct: Some(WorkerId(worker)),
        ..request(&prompt)
    };
    let first = router.route(SimTime(0), &to(1), None).unwrap();
    let second = router.route(SimTime(0), &to(1), None).unwrap();
    assert_eq!(
        (first.target.worker, first.target.dp_rank),
        (WorkerId(1), 0)
    );
    assert_eq!(
        (second.target.worker, second.target.dp_rank),
        (WorkerId(1), 1)
    );
    let unknown = error(&mut router, &to(7));
    assert_eq!(
        unknown,
        RouteError::UnknownWorker {
            worker: WorkerId(7),
            last: 1
        }
    );
    assert_eq!(
        error(&mut router, &request(&prompt)),
        RouteError::WorkerNotNamed
    );
    fleet.set_ready(WorkerId(1), false);
    let not_ready = error(&mut router, &to(1));
    assert_eq!(
        not_ready,
        RouteError::WorkerNotReady {
            worker: WorkerId(1)
        }
    );
    assert!(not_ready.retry_may_help() && !unknown.retry_may_help());
}

#[test]
fn a_request_goes_only_to_workers_that_may_take_it() {
    for policy in [RouterPolicy::Kv, RouterPolicy::RoundRobin] {
        let (fleet, mut router) = ready(4, config(policy));
        let prompt = prompt(1, 100);
        let only = [WorkerId(1), WorkerId(3)];
        let of_two = RouteRequest {
            only: Some(&only),
            ..request(&prompt)
        };
        for _ in 0..8 {
            let routed = router.route(SimTime(0), &of_two, None).unwrap();
            assert!(only.contains(&routed.target.worker), "{policy:?}");
        }
        fleet.set_ready(WorkerId(1), false);
        let retried = RouteRequest {
            exclude: &[WorkerId(3)],
            ..of_two
        };
        assert!(matches!(
            error(&mut router, &retried),
            RouteError::NoWorker { ready: 3, .. }
        ));
    }
}

#[test]
fn errors_charge_nothing() {
    let (fleet, mut router) = ready(2, RouterConfig::default());
    let prompt = prompt(1, 100);
    let both = [WorkerId(0), WorkerId(1)];
    let tried = RouteRequest {
        exclude: &both,
        ..request(&prompt)
    };
    assert_eq!(
        error(&mut router, &tried),
        RouteError::NoWorker {
            ready: 2,
            excluded: 2
        }
    );
    let wrong = Prompt::from_tokens(&[1; 64], 32, BlockHash(0)).unwrap();
    assert_eq!(
        error(&mut router, &request(&wrong)),
        RouteError::BlockSize {
            prompt: 32,
            fleet: 16
        }
    );
    for worker in both {
        fleet.set_ready(worker, false);
    }
    assert!(error(&mut router, &request(&prompt)).retry_may_help());
    assert_eq!(charged(&fleet), 0);
    assert_eq!(fleet.loads().iter().map(|l| l.routed_total).sum::<u64>(), 0);
}

#[test]
fn scores_name_every_candidate_under_every_policy() {
    for policy in POLICIES {
        let config = RouterConfig {
            prefill_weight: 2.0,
            ..config(policy)
        };
        let (fleet, mut router) = ready(3, config);
        let prompt = prompt(1, 160);
        fleet.on_kv(&stored(2, 0, &prompt));
        let mut scores: Vec<Score> = Vec::new();
        let routed = router.route(SimTime(0), &request(&prompt), Some(&mut scores));
        let hits: Vec<_> = scores
            .iter()
            .map(|s| (s.rank.worker.0, s.hit_blocks))
            .collect();
        assert_eq!(hits, [(0, 0), (1, 0), (2, 9)]);
        if policy == RouterPolicy::Kv {
            let costs: Vec<_> = scores.iter().map(|score| score.cost).collect();
            assert_eq!(costs, [20.0, 20.0, 2.0]);
            assert_eq!(routed.unwrap().target.worker, WorkerId(2));
        }
    }
}

#[test]
fn same_seed_same_choices() {
    let run = |policy, seed, shard| {
        let config = RouterConfig {
            temperature: 0.3,
            seed,
            ..config(policy)
        };
        let (_, router) = ready(7, config);
        let mut router = Router::new(Arc::clone(router.fleet()), shard);
        let mut live = std::collections::VecDeque::new();
        let mut chosen = Vec::new();
        for n in 0..200 {
            live.push_back(route(&mut router, &prompt(n % 5, 50 + 16 * n as u32)));
            chosen.push(live.back().unwrap().target);
            if live.len() > 20 {
                live.pop_front();
            }
        }
        chosen
    };
    for policy in POLICIES {
        assert_eq!(run(policy, 1, 0), run(policy, 1, 0));
    }
    assert_ne!(
        run(RouterPolicy::Random, 1, 0),
        run(RouterPolicy::Random, 2, 0)
    );
    assert_ne!(
        run(RouterPolicy::Random, 1, 0),
        run(RouterPolicy::Random, 1, 1)
    );
}

#[test]
fn sequences_may_end_on_another_thread() {
    let (fleet, mut router) = ready(2, RouterConfig::default());
    let routed = route(&mut router, &prompt(1, 100));
    std::thread::scope(|scope| {
        scope.spawn(move || drop(routed));
    });
    assert_eq!(charged(&fleet), 0);
}

#[test]
fn routers_on_several_threads_leave_nothing_charged() {
    let (fleet, _) = ready(5, RouterConfig::default());
    std::thread::scope(|scope| {
        for shard in 0..3 {
            let mut router = Router::new(Arc::clone(&fleet), shard);
            scope.spawn(move || {
                let mut live = std::collections::VecDeque::new();
                for n in 0..500 {
                    live.push_back(route(&mut router, &prompt(n % 7, 16 * (n % 90) as u32 + 5)));
                    let middle = live.len() / 2;
                    live[middle].active.on_first_token();
                    if live.len() > 30 {
                        live.pop_front();
                    }
                }
            });
        }
    });
    assert_eq!(charged(&fleet), 0);
    assert_eq!(
        fleet.loads().iter().map(|l| l.routed_total).sum::<u64>(),
        1_500
    );
}

#[derive(Clone, Debug)]
enum Step {
    Route { seed: u64, len: u32, exclude: u32 },
    FirstToken(prop::sample::Index),
    End(prop::sample::Index),
    Ready(u32, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u64..4, 1u32..400, 0u32..6)
            .prop_map(|(seed, len, exclude)| Step::Route { seed, len, exclude }),
        2 => any::<prop::sample::Index>().prop_map(Step::FirstToken),
        3 => any::<prop::sample::Index>().prop_map(Step::End),
        2 => (0u32..4, any::<bool>()).prop_map(|(worker, ready)| Step::Ready(worker, ready)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn the_chosen_is_ready_and_the_books_balance(
        policy in prop::sample::select(POLICIES.to_vec()),
        temperature in prop::sample::select(vec![0.0, 0.5]),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let fleet = fleet(4, 2, RouterConfig { temperature, ..config(policy) });
        let mut router = Router::new(Arc::clone(&fleet), 0);
        let mut ready = [false; 4];
        let mut live: Vec<(Routed, Prompt, bool)> = Vec::new();
        for step in steps {
            match step {
                Step::Route { seed, len, exclude } => {
                    let prompt = prompt(seed, len);
                    let exclude = [WorkerId(exclude)];
                    let request = RouteRequest { exclude: &exclude, ..request(&prompt) };
                    let open = (0..4).any(|w| ready[w] && WorkerId(w as u32) != exclude[0]);
                    match router.route(SimTime(0), &request, None) {
                        Ok(routed) => {
                            let worker = routed.target.worker;
                            prop_assert!(ready[worker.index()] && worker != exclude[0]);
                            prop_assert!(fleet.target_of(routed.target).is_some());
                            live.push((routed, prompt, false));
                        }
                        Err(error) => {
                            prop_assert!(!open, "{error}");
                            prop_assert!(error.retry_may_help());
                        }
                    }
                }
                Step::FirstToken(at) if !live.is_empty() => {
                    let at = at.index(live.len());
                    live[at].0.active.on_first_token();
                    live[at].2 = true;
                }
                Step::End(at) if !live.is_empty() => drop(live.swap_remove(at.index(live.len()))),
                Step::Ready(worker, is) => {
                    ready[worker as usize] = is;
                    fleet.set_ready(WorkerId(worker), is);
                }
                Step::FirstToken(_) | Step::End(_) => {}
            }
            for (target, load) in fleet.loads().iter().enumerate() {
                let here = || live.iter().filter(|(routed, ..)| fleet.target_of(routed.target) == Some(target));
                prop_assert_eq!(load.requests, here().count() as u64);
                let sum = |decoding| here()
                    .filter(|(.., is)| *is == decoding)
                    .map(|(_, prompt, _)| u64::from(prompt.len()))
                    .sum::<u64>();
                prop_assert_eq!((load.prefill_tokens, load.decode_tokens), (sum(false), sum(true)));
                let blocks: std::collections::BTreeSet<_> =
                    here().flat_map(|(_, prompt, _)| prompt.blocks()).collect();
                let partial = here().filter(|(_, prompt, _)| prompt.len() % BLOCK_SIZE != 0).count();
                prop_assert_eq!(load.active_blocks, (blocks.len() + partial) as u64);
            }
        }
        live.clear();
        prop_assert_eq!(charged(&fleet), 0);
    }
}
