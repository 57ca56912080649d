//! Recorded seeds.

use slipstream_vopr::cluster::Shared;
use slipstream_vopr::{Plan, Stats, run};

/// Schedules of every run of the tests.
const RECORDED: std::ops::Range<u64> = 300..400;

/// Seeds that failed once, with the reason. `SEED REASON` per line.
const REGRESSIONS: &str = include_str!("regressions.txt");

#[test]
fn seeds_that_failed_once_pass() {
    let shared = Shared::new();
    for line in REGRESSIONS.lines().filter(|line| !line.starts_with('#')) {
        let (seed, reason) = line.split_once(' ').expect("SEED REASON");
        let seed = seed.parse().expect("a seed is a number");
        if let Err(failure) = run(&Plan::of(seed), &shared) {
            panic!("seed {seed} fails again at {failure}\nit failed before because: {reason}");
        }
    }
}

#[test]
fn recorded_seeds_pass_and_reach_what_they_are_for() {
    let shared = Shared::new();
    let mut sum = Stats::default();
    for seed in RECORDED {
        match run(&Plan::of(seed), &shared) {
            Ok(stats) => sum.add(&stats),
            Err(failure) => panic!("seed {seed} fails at {failure}"),
        }
    }
    for (what, count) in [
        ("finished", sum.finished),
        ("refused", sum.refused),
        ("lost", sum.lost),
        ("cancelled", sum.cancelled),
        ("retries", sum.retries),
        ("resumed", sum.resumed),
    ] {
        assert!(count > 0, "no schedule has requests that are {what}");
    }
}

#[test]
fn a_seed_replays_exactly() {
    let shared = Shared::new();
    for seed in RECORDED.step_by(6) {
        let plan = Plan::of(seed);
        let (one, other) = (run(&plan, &shared), run(&plan, &Shared::new()));
        assert_eq!(one, other, "seed {seed}");
    }
}
