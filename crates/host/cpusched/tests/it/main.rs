//! The simulator against known answers, and the policy on whole hosts.

mod config;
mod deferred;
mod host;
mod jobs;
mod promises;
mod queues;
mod sanitized;

use proptest::test_runner::{Config, RngSeed};

/// 64 cases, the same in every run; with `PROPTEST_CASES` that many, from `PROPTEST_RNG_SEED` or, without
/// it, a fresh seed. About one in 3,000 random mixes exceeds a bound on shares or waits (docs/sched.md,
/// "Shares").
fn cases() -> Config {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u64>().ok());
    let cases = number("PROPTEST_CASES");
    let seed = number("PROPTEST_RNG_SEED");
    Config {
        cases: cases.map_or(64, |n| n as u32),
        rng_seed: match (cases, seed) {
            (Some(_), None) => RngSeed::Random,
            (_, seed) => RngSeed::Fixed(seed.unwrap_or(1)),
        },
        failure_persistence: None,
        max_shrink_iters: number("PROPTEST_MAX_SHRINK_ITERS").map_or(60, |n| n as u32),
        max_global_rejects: 1 << 20,
        ..Config::default()
    }
}
