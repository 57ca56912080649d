//! Busy thresholds and `Retry-After`.

use super::*;

fn busy(router: &mut Router, seconds: u64, prompt: &Prompt) -> Option<u32> {
    match router.route(SimTime(seconds * SECOND), &request(prompt), None) {
        Ok(_) => None,
        Err(RouteError::Busy {
            busy,
            retry_after_s,
        }) => {
            assert_eq!(busy, 2);
            Some(retry_after_s)
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn prefill_above_the_threshold_refuses_and_says_when_to_come_back() {
    let (fleet, mut router) = ready(
        2,
        RouterConfig {
            busy_prefill_tokens: 1_000,
            ..config(RouterPolicy::LeastTokens)
        },
    );
    let long = prompt(1, 1_600);
    let mut live = vec![route(&mut router, &long), route(&mut router, &long)];
    assert_eq!(busy(&mut router, 0, &long), Some(1), "no rate known yet");
    // 1,600 tokens in 8 s over two workers: 100 tokens/s each. One idle, the other is 600 above.
    live[0].active.on_first_token();
    live.push(
        router
            .route(SimTime(SECOND), &request(&long), None)
            .unwrap(),
    );
    assert_eq!(busy(&mut router, 8, &long), Some(6));
    // Another 1,600 in 1 s: 800 tokens/s each, so the rest takes less than the shortest answer.
    live[1].active.on_first_token();
    live.push(
        router
            .route(SimTime(8 * SECOND), &request(&long), None)
            .unwrap(),
    );
    assert_eq!(busy(&mut router, 9, &long), Some(1));
    assert_eq!(
        fleet.counters().busy_total,
        0,
        "refusals are the caller's to count"
    );
    drop(live);
    assert_eq!(busy(&mut router, 9, &long), None);
}

#[test]
fn blocks_above_their_share_refuse() {
    let (_, mut router) = ready(
        2,
        RouterConfig {
            busy_kv_share: 0.5, // 500 of 1,000 blocks
            ..config(RouterPolicy::LeastRequests)
        },
    );
    let half = prompt(1, 500 * BLOCK_SIZE);
    let live = [route(&mut router, &half), route(&mut router, &half)];
    assert_eq!(busy(&mut router, 0, &half), None, "at the share, not above");
    let more = [
        route(&mut router, &prompt(2, 16)),
        route(&mut router, &prompt(3, 16)),
    ];
    assert!(busy(&mut router, 0, &half).is_some());
    drop(more);
    assert_eq!(busy(&mut router, 0, &half), None);
    drop(live);
}

#[test]
fn one_busy_worker_is_passed_over_even_for_its_session() {
    let (_, mut router) = ready(
        2,
        RouterConfig {
            busy_prefill_tokens: 1_000,
            affinity_ttl_s: 100.0,
            ..config(RouterPolicy::RoundRobin)
        },
    );
    let long = prompt(1, 1_600);
    let of_session = RouteRequest {
        session: Some(1),
        ..request(&long)
    };
    let first = router.route(SimTime(0), &of_session, None).unwrap();
    let second = router.route(SimTime(0), &of_session, None).unwrap();
    assert_ne!(first.target, second.target);
}

#[test]
fn thresholds_are_off_by_default() {
    let (_, mut router) = ready(2, RouterConfig::default());
    let prompts: Vec<_> = (0..20).map(|n| prompt(n, 16_000)).collect();
    let live: Vec<_> = prompts.iter().map(|p| route(&mut router, p)).collect();
    assert_eq!(live.len(), 20);
}
