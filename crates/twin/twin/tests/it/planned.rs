//! Passes that are planned and run late: the same run as with one event per pass.

use proptest::prelude::*;
use slipstream_base::SimTime;
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_report::Objectives;
use slipstream_twin::{Options, Outcome};

use crate::{Records, cluster, run, workload};

/// A cluster without faults, pools or network whose router has one of all policies.
fn clusters() -> impl Strategy<Value = Cluster> {
    let policy = prop::sample::select(vec![
        "kv",
        "kv",
        "round_robin",
        "random",
        "least_requests",
        "least_tokens",
        "power_of_two",
    ]);
    let timing = prop::sample::select(vec![
        "kind = \"constant\"\nstep_ns = 10_000_000",
        "kind = \"roofline\"\ngpu = \"h100-sxm\"",
        "gpu = \"h100-sxm\"",
        "kind = \"linear\"\nbase_ns = 5e6\nper_sequence_ns = 1e5",
    ]);
    let block_size = prop::sample::select(vec![1u32, 4, 16, 64]);
    let late = prop_oneof![
        3 => Just((0u32, 0u32)),
        1 => (0u32..40, Just(0u32)),
        1 => (0u32..40, 1u32..100),
    ];
    (
        (1u32..6, 600u32..9_000, 1u32..24, block_size, policy, timing),
        (late, prop_oneof![3 => Just(0u32), 1 => 100u32..600], 0u32..4, any::<u16>()),
    )
        .prop_map(
            |((workers, tokens, seqs, size, policy, timing), ((lag, view), busy, ttl, bits))| {
                let is = |bit: u16| bits & 1 << bit != 0;
                let priority = if is(1) && is(2) { "priority" } else { "fcfs" };
                let tier = if is(3) && is(4) && is(5) {
                    "[engine.host_tier]\ngib = 0.01\nbytes_per_s = 1e9\n"
                } else {
                    ""
                };
                cluster(&format!(
                    "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = {workers}\n{tier}[engine]\n\
                     block_size = {size}\nnum_gpu_blocks = {}\nmax_model_len = 600\n\
                     max_num_seqs = {seqs}\nmax_num_batched_tokens = 256\nasync_scheduling = {}\n\
                     scheduling_policy = \"{priority}\"\nenable_prefix_caching = {}\n\
                     [engine.timing]\n{timing}\n[router]\npolicy = \"{policy}\"\nkv_lag_ms = {lag}\n\
                     view_interval_ms = {view}\nbusy_prefill_tokens = {busy}\nqueue_max = {}\n\
                     affinity_ttl_s = {ttl}\n",
                    tokens.div_ceil(size),
                    is(0),
                    !(is(6) && is(7)),
                    if is(8) { 6 } else { 0 },
                ))
            },
        )
}

/// A workload file with sessions.
fn workloads() -> impl Strategy<Value = Workload> {
    let arrival = prop_oneof![
        (5u32..300).prop_map(|rate| format!("kind = \"poisson\"\nrate_per_s = {rate}")),
        (5u32..60).prop_map(|rate| format!("kind = \"constant\"\nrate_per_s = {rate}")),
        (1u32..40).prop_map(|c| format!("kind = \"closed\"\nconcurrency = {c}")),
    ];
    let think = prop::sample::select(vec![
        "0",
        "0.05",
        "{ kind = \"exponential\", mean = 0.3, max = 2 }",
    ]);
    (
        (arrival, think, 1u32..5, 0u32..3, any::<u32>()),
        (1u32..300, 1u32..150, 1u32..100),
    )
        .prop_map(
            |((arrival, think, turns, branches, seed), (isl, osl, shared))| {
                let isl = isl.max(shared + 1);
                let prefix = match branches {
                    0 => String::new(),
                    n => format!("[[class.prefix]]\nbranches = {n}\ntokens = {shared}\n"),
                };
                workload(&format!(
                    "seed = {seed}\nrequests = 60\n[arrival]\n{arrival}\n\
                     [[class]]\nname = \"chat\"\nslo = \"ttft=100ms,tpot=20ms\"\n\
                     isl = {{ kind = \"uniform\", min = 1, max = {isl} }}\n\
                     osl = {{ kind = \"uniform\", min = 1, max = {osl} }}\n\
                     [class.session]\nturns = {{ kind = \"uniform\", min = 1, max = {turns} }}\n\
                     think_time_s = {think}\nuser_tokens = 9\n{prefix}\
                     [[class]]\nname = \"other\"\nweight = 0.5\nisl = 20\nosl = {osl}\npriority = 1\n"
                ))
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn passes_that_run_late_change_nothing(
        cluster in clusters(),
        workload in workloads(),
        time_max_ms in prop_oneof![3 => Just(600_000u64), 1 => 1u64..3_000],
        retries in 0u32..3,
        feed_index in any::<bool>(),
    ) {
        let slo = Objectives::of(&workload, None);
        let with = |jump: bool, feed_index: bool| {
            let options = Options {
                jump,
                feed_index,
                retries,
                slo: slo.clone(),
                time_max: SimTime(time_max_ms * 1_000_000),
                ..Options::default()
            };
            let mut records = Records::default();
            let outcome = run(&cluster, &workload, &options, &mut records);
            let mut ended: Vec<_> = records
                .0
                .iter()
                .map(|r| (r.last, r.due, r.first, r.cached, r.tokens))
                .collect();
            ended.sort_unstable();
            (outcome, ended)
        };
        let classes = |outcome: &Outcome| outcome.totals.class_reports(&slo);
        let (late, late_ended) = with(true, feed_index);
        let (single, single_ended) = with(false, false);
        prop_assert_eq!(single.jumped, 0);
        prop_assert_eq!(late_ended, single_ended);
        prop_assert_eq!(late.digest, single.digest);
        prop_assert_eq!(late.passes, single.passes);
        prop_assert_eq!(late.ended_at, single.ended_at);
        prop_assert_eq!(late.extrapolated, single.extrapolated);
        prop_assert_eq!(&late.engine, &single.engine);
        prop_assert_eq!(&late.cut, &single.cut);
        prop_assert_eq!(late.totals.requests, single.totals.requests);
        prop_assert_eq!(late.totals.latencies(), single.totals.latencies());
        prop_assert_eq!(classes(&late), classes(&single));
    }
}

/// Engines that are sent a request seldom run nearly all of their passes late, although any end can be followed by
/// a request.
#[test]
fn most_passes_of_a_chat_run_late() {
    let chat = workload(
        "requests = 400\nisl = 400\nosl = 200\n[arrival]\nkind = \"poisson\"\nrate_per_s = 1\n\
         [session]\nturns = 4\nthink_time_s = 1\n",
    );
    for policy in ["kv", "least_requests", "round_robin"] {
        let cluster = cluster(&format!(
            "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = 8\n[engine.timing]\ngpu = \"h100-sxm\"\n\
             [router]\npolicy = \"{policy}\"\n"
        ));
        let outcome = run(&cluster, &chat, &Options::default(), &mut ());
        assert!(
            outcome.jumped * 10 > outcome.passes * 9,
            "{policy}: {} of {}",
            outcome.jumped,
            outcome.passes
        );
    }
}
