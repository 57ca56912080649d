//! Loads that a router refreshes at intervals.

use std::sync::Arc;

use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::{RouterConfig, RouterPolicy};
use slipstream_router::{Candidates, Rng, RoutePolicy, RouteRequest, Router, ViewTurn};

use crate::{config, fleet, prompt, ready, request};

const MS: u64 = 1_000_000;

fn every_5_ms(policy: RouterPolicy) -> RouterConfig {
    RouterConfig {
        view_interval_ms: 5.0,
        ..config(policy)
    }
}

#[test]
fn between_two_looks_it_knows_what_it_routed_and_not_what_ended() {
    let (_fleet, mut router) = ready(2, every_5_ms(RouterPolicy::LeastRequests));
    let prompts = [0, 1, 2, 3, 4, 5, 6].map(|seed| prompt(seed, 100));
    let mut go = |at: u64, n: usize| {
        let routed = router.route(SimTime(at), &request(&prompts[n]), None);
        let routed = routed.unwrap();
        (routed.target.worker.0, routed.active)
    };
    // The first refresh is at 5 ms. The router's own requests count at once.
    let (first, ended) = go(5 * MS, 0);
    let (second, _second) = go(6 * MS, 1);
    assert_eq!((first, second), (0, 1));
    // The first ends. Both still seem to have one, so the lower number is taken; then one more.
    drop(ended);
    let (third, _third) = go(7 * MS, 2);
    let (fourth, _fourth) = go(10 * MS - 1, 3);
    assert_eq!((third, fourth), (0, 1), "view 2 and 1, actual 1 and 1");
    // From 10 to 15 ms it uses the view of 5 ms, plus its requests since: 2 and 2.
    let (fifth, _fifth) = go(10 * MS, 4);
    assert_eq!(fifth, 0, "view 3 and 2, actual 2 and 2");
    // From 15 ms on it uses the view of 10 ms, which has 1 and 2, plus the one routed since.
    let (sixth, _sixth) = go(15 * MS, 5);
    assert_eq!(sixth, 0, "view and actual 2 and 2");
    // After a pause it refreshes at once: 3 and 2.
    assert_eq!(go(100 * MS, 6).0, 1);
}

/// `direct` chooses among the ranks of the worker that is named, by their loads.
#[test]
fn a_named_workers_ranks_are_seen_now_and_then() {
    let fleet = fleet(1, 2, every_5_ms(RouterPolicy::Direct));
    fleet.set_ready(WorkerId(0), true);
    let mut router = Router::new(Arc::clone(&fleet), 0);
    let prompts = [0, 1, 2].map(|seed| prompt(seed, 100));
    let mut go = |at: u64, n: usize| {
        let request = RouteRequest {
            direct: Some(WorkerId(0)),
            ..request(&prompts[n])
        };
        let routed = router.route(SimTime(at), &request, None).unwrap();
        (routed.target.dp_rank, routed.active)
    };
    let (first, _kept) = go(0, 0);
    let (second, ended) = go(MS, 1);
    assert_eq!((first, second), (0, 1));
    // Rank 1 is idle again, which the view shows after the next refresh. Until then both have one
    // request, and the first is taken.
    drop(ended);
    assert_eq!(go(2 * MS, 2).0, 0, "view 1 and 1, actual 1 and 0");
}

/// The last rank with the fewest requests, or the first of all.
struct Custom {
    reads_loads: bool,
}

impl RoutePolicy for Custom {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        _request: &RouteRequest<'_>,
        _rng: &mut Rng,
    ) -> Option<usize> {
        let requests = |place: &usize| candidates.view(*place).requests;
        let all = 0..candidates.len();
        if self.reads_loads {
            all.rev().min_by_key(requests)
        } else {
            all.min()
        }
    }

    fn reads_loads(&self) -> bool {
        self.reads_loads
    }
}

/// The custom policy's own `reads_load` decides, not the configured policy.
#[test]
fn a_policy_of_the_callers_says_whether_it_reads_loads() {
    for named in [RouterPolicy::RoundRobin, RouterPolicy::LeastRequests] {
        for reads_loads in [true, false] {
            let (fleet, _) = ready(2, every_5_ms(named));
            let policy = Box::new(Custom { reads_loads });
            let mut router = Router::with_policy(fleet, 0, policy);
            let p = prompt(1, 100);
            let mut go = |at| {
                let routed = router.route(SimTime(at), &request(&p), None).unwrap();
                (routed.target.worker.0, routed.active)
            };
            let (_kept, ended) = (go(0), go(MS));
            drop(ended);
            // Worker 0 has ended its request, which the view does not show yet: 1 and 1, and the
            // last is taken.
            let (third, _active) = go(2 * MS);
            let turn = router.view_turn(SimTime(3 * MS));
            if reads_loads {
                assert_eq!((third, turn), (1, ViewTurn::Same), "{named:?}");
            } else {
                assert_eq!((third, turn), (0, ViewTurn::Fresh), "{named:?}");
            }
        }
    }
}

#[test]
fn another_routers_requests_are_seen_later() {
    let (fleet, mut mine) = ready(2, every_5_ms(RouterPolicy::LeastTokens));
    let mut other = slipstream_router::Router::new(fleet.clone(), 1);
    let (long, short) = (prompt(1, 400), prompt(2, 16));
    let mut sequences = Vec::new();
    let mut go = |router: &mut slipstream_router::Router, at: u64, prompt| {
        let routed = router.route(SimTime(at), &request(prompt), None).unwrap();
        sequences.push(routed.active);
        routed.target.worker.0
    };
    assert_eq!(go(&mut mine, 0, &short), 0);
    assert_eq!(go(&mut other, 1, &long), 1, "first refresh");
    // Worker 1 has 400 tokens and 0 has 16, but the view does not show that before 10 ms: the
    // refresh at 0 ms had nothing, the one at 5 ms has it.
    assert_eq!(go(&mut mine, 2, &short), 1);
    assert_eq!(go(&mut mine, 5 * MS, &short), 0);
    assert_eq!(go(&mut mine, 5 * MS, &short), 1);
    assert_eq!(mine.view_turn(SimTime(10 * MS - 1)), ViewTurn::Same);
    assert_eq!(mine.view_turn(SimTime(10 * MS)), ViewTurn::Next);
    assert_eq!(mine.view_turn(SimTime(15 * MS)), ViewTurn::Fresh);
    assert_eq!(go(&mut mine, 10 * MS, &short), 0);
    assert_eq!(go(&mut mine, 10 * MS, &short), 0);
}

/// A driver that routes ahead and refreshes by hand decides as one that routes in time order.
#[test]
fn looking_by_hand_decides_the_same() {
    let prompts: Vec<_> = (0..60).map(|n| prompt(n % 7, 40 + 13 * n as u32)).collect();
    let at = |n: usize| SimTime(n as u64 * 1_300_000);
    let run = |by_hand: bool| {
        let (fleet, mut router) = ready(3, every_5_ms(RouterPolicy::LeastTokens));
        let mut chosen = Vec::new();
        let mut live = std::collections::VecDeque::new();
        if by_hand {
            router.manual_refresh();
        }
        for (n, prompt) in prompts.iter().enumerate() {
            let looks = router.view_turn(at(n)) != ViewTurn::Same;
            let choice = router.choose(at(n), &request(prompt), None).unwrap();
            if by_hand && looks {
                router.refresh(); // late, after it was routed, but before it was charged
            }
            live.push_back(choice.charge(&fleet, prompt));
            if live.len() > 9 {
                live.pop_front();
            }
            chosen.push(choice.target);
        }
        chosen
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn thresholds_go_by_what_is_believed() {
    let config = RouterConfig {
        busy_prefill_tokens: 150,
        ..every_5_ms(RouterPolicy::LeastRequests)
    };
    let (_fleet, mut router) = ready(1, config);
    let p = prompt(1, 100);
    let charges: Vec<_> = (0..2)
        .map(|_| router.route(SimTime(0), &request(&p), None).unwrap())
        .collect();
    assert!(router.route(SimTime(MS), &request(&p), None).is_err());
    drop(charges); // all have ended, but the view is older
    assert!(router.route(SimTime(9 * MS), &request(&p), None).is_err());
    assert!(router.route(SimTime(15 * MS), &request(&p), None).is_ok());
}
