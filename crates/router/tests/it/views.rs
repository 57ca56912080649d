//! Loads that a router looks at now and then.

use slipstream_base::SimTime;
use slipstream_base::cluster::{RouterConfig, RouterPolicy};

use crate::{config, prompt, ready, request};

const MS: u64 = 1_000_000;

fn every_10_ms(policy: RouterPolicy) -> RouterConfig {
    RouterConfig {
        view_interval_ms: 10.0,
        ..config(policy)
    }
}

#[test]
fn between_two_looks_it_knows_what_it_routed_and_not_what_ended() {
    let (_fleet, mut router) = ready(2, every_10_ms(RouterPolicy::LeastRequests));
    let prompts = [0, 1, 2, 3, 4].map(|seed| prompt(seed, 100));
    let mut go = |at: u64, n: usize| {
        let routed = router.route(SimTime(at), &request(&prompts[n]), None);
        let routed = routed.unwrap();
        (routed.target.worker.0, routed.active)
    };
    // It looks at 5 ms. What it routes itself counts at once.
    let (first, ended) = go(5 * MS, 0);
    let (second, _running) = go(6 * MS, 1);
    assert_eq!((first, second), (0, 1));
    // The first ends. Until 15 ms both seem to have one, so the lower number is taken; then one more.
    drop(ended);
    let (third, _third) = go(7 * MS, 2);
    let (fourth, _fourth) = go(15 * MS - 1, 3);
    assert_eq!(
        (third, fourth),
        (0, 1),
        "2 and 1 believed, 1 and 1 in truth"
    );
    // A look: worker 0 has one, worker 1 has two.
    assert_eq!(go(15 * MS, 4).0, 0);
}

#[test]
fn another_routers_requests_are_seen_at_the_next_look() {
    let (fleet, mut mine) = ready(2, every_10_ms(RouterPolicy::LeastTokens));
    let mut other = slipstream_router::Router::new(fleet.clone(), 1);
    let (long, short) = (prompt(1, 400), prompt(2, 16));
    let start = mine.route(SimTime(0), &request(&short), None).unwrap();
    assert_eq!(start.target.worker.0, 0);
    let theirs = other.route(SimTime(1), &request(&long), None).unwrap();
    assert_eq!(theirs.target.worker.0, 1, "they look for the first time");
    // Worker 1 has 400 tokens and 0 has 16, but that is not known here yet.
    let next = mine.route(SimTime(2), &request(&short), None).unwrap();
    assert_eq!(next.target.worker.0, 1);
    let later = SimTime(10 * MS);
    assert!(mine.looks(later) && !mine.looks(SimTime(10 * MS - 1)));
    let next = mine.route(later, &request(&short), None).unwrap();
    assert_eq!(next.target.worker.0, 0);
}

#[test]
fn thresholds_go_by_what_is_believed() {
    let config = RouterConfig {
        busy_prefill_tokens: 150,
        ..every_10_ms(RouterPolicy::LeastRequests)
    };
    let (_fleet, mut router) = ready(1, config);
    let p = prompt(1, 100);
    let charges: Vec<_> = (0..2)
        .map(|_| router.route(SimTime(0), &request(&p), None).unwrap())
        .collect();
    assert!(router.route(SimTime(MS), &request(&p), None).is_err());
    drop(charges); // all has ended, but it has not looked
    assert!(router.route(SimTime(9 * MS), &request(&p), None).is_err());
    assert!(router.route(SimTime(10 * MS), &request(&p), None).is_ok());
}
