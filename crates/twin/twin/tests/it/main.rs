//! Known answers, and runs that must agree.
#![allow(clippy::disallowed_methods)] // it has files

mod calibrated;
mod faults;
mod host_tier;
mod hosts;
mod lockstep;
mod model;
mod models;
mod packets;
mod peers;
mod planned;
mod real;
mod scaling;
mod threads;

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use slipstream_base::{ForwardPassMetrics, SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, HostMode, RouterPolicy, file};
use slipstream_config::doc::Doc;
use slipstream_config::workload_file::{self, Arrival, Content, Dist, Workload};
use slipstream_report::series::{EngineInfo, Series};
use slipstream_report::{Latency, Objectives, PassRecord};
use slipstream_twin::{Follower, Options, Outcome, Progress, RequestRecord, Sink, simulate};
use slipstream_workload::Request;

fn cluster(text: &str) -> Cluster {
    let no_file = |_: &Path| Err(std::io::Error::from(std::io::ErrorKind::NotFound));
    let doc = Doc::parse("cluster.toml", text.as_bytes());
    file::read(doc, no_file).unwrap_or_else(|e| panic!("{e}")).0
}

fn workload(text: &str) -> Workload {
    let doc = Doc::parse("workload.toml", text.as_bytes());
    workload_file::read(doc).unwrap_or_else(|e| panic!("{e}")).0
}

/// A pass takes 10 ms whatever is in it.
fn constant(workers: u32, more: &str) -> Cluster {
    cluster(&format!(
        "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = {workers}\n[engine]\n\
         num_gpu_blocks = 4096\nmax_model_len = 16384\n{more}\n\
         [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n"
    ))
}

fn run(cluster: &Cluster, workload: &Workload, options: &Options, sink: &mut dyn Sink) -> Outcome {
    let read = |path: &Path| std::fs::read(path);
    simulate(cluster, workload, options, read, sink).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn the_direct_policy_is_refused_at_the_start() {
    let cluster = constant(2, "[router]\npolicy = \"direct\"");
    let workload =
        workload("requests = 5\n[arrival]\nkind = \"closed\"\n[[class]]\nisl = 8\nosl = 2\n");
    let read = |path: &Path| std::fs::read(path);
    let refused = simulate(&cluster, &workload, &Options::default(), read, &mut ());
    let text = refused.err().unwrap().to_string();
    assert!(
        text.contains("`router.policy`") && text.contains("\"kv\""),
        "{text}"
    );
}

/// The compared fields of a request.
struct Ended {
    due: SimTime,
    first: SimTime,
    last: SimTime,
    cached: u32,
    tokens: u32,
}

#[derive(Default)]
struct Records(Vec<Ended>);

impl Sink for Records {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        self.0.push(Ended {
            due: r.request.due,
            first: r.first,
            last: r.last,
            cached: r.cached_tokens,
            tokens: r.output_tokens,
        });
    }
}

const ONE: &str = "requests = 1\n[arrival]\nkind = \"constant\"\nrate_per_s = 1\n\
                   [[class]]\nisl = 100\nosl = 7\n";

#[test]
fn one_request_takes_a_pass_a_token() {
    let mut records = Records::default();
    let outcome = run(
        &constant(1, ""),
        &workload(ONE),
        &Options::default(),
        &mut records,
    );
    let ended = &records.0[0];
    assert_eq!((ended.due.0, ended.cached, ended.tokens), (0, 0, 7));
    assert_eq!((ended.first.0, ended.last.0), (10_000_000, 70_000_000));
    assert_eq!(outcome.passes, 7);
    let latency = outcome.totals.latencies();
    assert_eq!(latency.itl_ms.unwrap().count, 6);
    assert_eq!(latency.itl_ms.unwrap().max, 10.0);
    assert_eq!(latency.tpot_ms.unwrap().p50, 10.0);
}

/// One sequence at a time and one token each is a single server with a fixed service time: the mean
/// wait of M/D/1 is rho * s / (2 (1 - rho)) (Pollaczek and Khinchine).
#[test]
fn one_at_a_time_waits_as_an_m_d_1_queue() {
    for rho in [0.3, 0.7] {
        let load = workload(&format!(
            "requests = 60_000\n[arrival]\nkind = \"poisson\"\nrate_per_s = {}\n\
             [[class]]\nisl = 20\nosl = 1\n",
            rho / 0.010
        ));
        let outcome = run(
            &constant(1, "max_num_seqs = 1"),
            &load,
            &Options::default(),
            &mut (),
        );
        let ttft = outcome.totals.latencies().ttft_ms.unwrap();
        let expected = 10.0 + rho * 10.0 / (2.0 * (1.0 - rho));
        // At rho = 0.7 waits are correlated over about 10 requests, so 60,000 of them determine the
        // mean to 2 %.
        assert!(
            (ttft.mean - expected).abs() / expected < 0.02,
            "rho {rho}: {} against {expected}",
            ttft.mean
        );
    }
}

/// Mean requests in flight are arrivals per second times mean time in the system (Little, 1961):
/// exactly, over a run that begins and ends empty.
#[test]
fn littles_law_holds() {
    let load = workload(
        "requests = 2_000\n[arrival]\nkind = \"poisson\"\nrate_per_s = 40\n\
         [[class]]\nisl = { kind = \"uniform\", min = 10, max = 900 }\nosl = { kind = \"uniform\", min = 1, max = 60 }\n",
    );
    let mut records = Records::default();
    let outcome = run(&constant(3, ""), &load, &Options::default(), &mut records);
    let mut changes: Vec<(u64, i64)> = Vec::new();
    let mut times = 0u64;
    for ended in &records.0 {
        changes.extend([(ended.due.0, 1), (ended.last.0, -1)]);
        times += ended.last.since(ended.due);
    }
    changes.sort_unstable();
    let (mut area, mut open, mut before) = (0u64, 0i64, 0);
    for (at, change) in changes {
        area += open as u64 * (at - before);
        (open, before) = (open + change, at);
    }
    assert_eq!(area, times);
    assert_eq!(outcome.totals.requests.succeeded, 2_000);
    let e2e = outcome.totals.latencies().e2e_ms.unwrap();
    assert!((e2e.mean - times as f64 / 2_000.0 / 1e6).abs() < 1e-6);
}

/// The time that requests wait, as the series has it over the run, is the time that they waited: to
/// the nanosecond, with passes of any length and arrivals in the middle of them.
#[test]
fn littles_law_holds_for_what_waits() {
    #[derive(Default)]
    struct Waits {
        series: Option<Series>,
        waited_ns: u128,
        longest_ns: u64,
    }
    impl Sink for Waits {
        fn on_request(&mut self, r: &RequestRecord<'_>) {
            let waited = r.admitted.since(r.request.due);
            self.waited_ns += u128::from(waited);
            self.longest_ns = self.longest_ns.max(waited);
        }
        fn wants_passes(&self) -> bool {
            true
        }
        fn on_pass(&mut self, pass: &PassRecord<'_>) {
            self.series.as_mut().unwrap().on_pass(pass);
        }
    }
    let load = workload(
        "requests = 3_000\n[arrival]\nkind = \"poisson\"\nrate_per_s = 60\n\
         [[class]]\nisl = { kind = \"uniform\", min = 10, max = 1_800 }\n\
         osl = { kind = \"uniform\", min = 1, max = 200 }\n",
    );
    // Long passes, in whose middle most requests come; few sequences, so that a queue builds up.
    let linear = "[engine.timing]\nkind = \"linear\"\nbase_ns = 5e6\nper_prefill_token_ns = 40_000\n\
                  per_decode_token_ns = 100_000\n";
    for (sequences, jump) in [(256, true), (12, true), (12, false)] {
        let cluster = cluster(&format!(
            "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = 4\n[engine]\n\
             num_gpu_blocks = 8192\nmax_num_seqs = {sequences}\n{linear}"
        ));
        let mut waits = Waits {
            series: Some(Series::new(0, EngineInfo::of_cluster(&cluster))),
            ..Waits::default()
        };
        let options = Options {
            jump,
            ..Options::default()
        };
        let outcome = run(&cluster, &load, &options, &mut waits);
        assert_eq!(outcome.totals.requests.succeeded, 3_000);
        // A sequence that is preempted waits again, which its record does not include.
        assert_eq!(outcome.engine.preemptions, Some(0.0));
        let series = waits.series.unwrap();
        let engines = series.bins().iter().flat_map(|bin| &bin.engines);
        let waiting_ns: u128 = engines.map(|engine| engine.waiting_ns).sum();
        assert_eq!(
            waiting_ns, waits.waited_ns,
            "{sequences} sequences, jump {jump}"
        );
        assert!(waits.longest_ns > 20_000_000);
    }
}

#[test]
fn the_next_turn_finds_what_the_last_one_generated() {
    let load = workload(
        "requests = 3\n[arrival]\nkind = \"constant\"\nrate_per_s = 1\n\
         [[class]]\nisl = 100\nosl = 60\n[class.session]\nturns = 3\nuser_tokens = 100\nthink_time_s = 0.5\n",
    );
    let mut records = Records::default();
    run(
        &constant(1, "block_size = 16"),
        &load,
        &Options::default(),
        &mut records,
    );
    // Turn 0 leaves 100 + 60 - 1 computed tokens: 9 whole blocks; turn 1 is 100 + 60 + 100 long and
    // leaves 319: 19 blocks.
    let hits: Vec<u32> = records.0.iter().map(|r| r.cached).collect();
    assert_eq!(hits, [0, 144, 304]);
    let due: Vec<u64> = records.0.iter().map(|r| r.due.0 / 1_000_000).collect();
    assert_eq!(due, [0, 600 + 500, 1_100 + 600 + 500]);
}

#[test]
fn a_run_without_end_is_cut_and_says_so() {
    let overload = workload(
        "requests = 100_000\n[arrival]\nkind = \"poisson\"\nrate_per_s = 1000\n\
         [[class]]\nisl = 100\nosl = 100\n",
    );
    let one = constant(1, "max_num_seqs = 8");
    let options = Options {
        in_flight_max: 5_000,
        ..Options::default()
    };
    let outcome = run(&one, &overload, &options, &mut ());
    let cut = outcome.cut.unwrap();
    assert!(
        cut.contains("unstable") && cut.contains("5,001 requests"),
        "{cut}"
    );
    let requests = outcome.totals.requests;
    assert!(requests.succeeded > 0 && requests.unfinished == 5_001);

    let options = Options {
        time_max: SimTime::from_secs_f64(2.0),
        ..Options::default()
    };
    let outcome = run(&one, &overload, &options, &mut ());
    assert!(outcome.cut.unwrap().contains("limit of 2s"));
    assert_eq!(outcome.ended_at, SimTime::from_secs_f64(2.0));
}

/// Regression from random files: a time scale that leaves no time between requests used all memory,
/// and the run could not be interrupted.
#[test]
fn requests_without_end_at_one_time_end_the_run() {
    for policy in ["kv", "round_robin"] {
        let load = workload(
            "duration_s = 1\ntime_scale = 1e9\n[arrival]\nkind = \"constant\"\nrate_per_s = 1e9\n\
             [[class]]\nisl = 100\nosl = 20\n",
        );
        let options = Options {
            in_flight_max: 5_000,
            ..Options::default()
        };
        let cluster = constant(8, &format!("[router]\npolicy = \"{policy}\"\n"));
        let outcome = run(&cluster, &load, &options, &mut ());
        let cut = outcome.cut.unwrap();
        assert!(
            cut.contains("unstable") && cut.contains("requests under way"),
            "{cut}"
        );
        assert!(outcome.totals.requests.unfinished < 20_000, "{policy}");
    }
}

/// Regression from random files: refused clients of a closed loop retried at the same time,
/// forever.
#[test]
fn a_closed_loop_that_is_refused_for_ever_ends_the_run() {
    let load = workload(
        "duration_s = 5\n[arrival]\nkind = \"closed\"\nconcurrency = 40\n[[class]]\nisl = 200\nosl = 100\n",
    );
    let options = Options {
        in_flight_max: 5_000,
        ..Options::default()
    };
    let busy = "[router]\npolicy = \"random\"\nbusy_kv_share = 0.01\n";
    let outcome = run(&constant(8, busy), &load, &options, &mut ());
    let cut = outcome.cut.unwrap();
    assert!(
        cut.contains("stuck: more than 5,000 requests") && cut.contains("`--retries`"),
        "{cut}"
    );
}

#[test]
fn who_watches_can_end_the_run() {
    struct Impatient;
    impl Sink for Impatient {
        fn on_progress(&mut self, progress: Progress) -> bool {
            progress.ended == 0
        }
    }
    let load = workload(
        "requests = 100_000\n[arrival]\nkind = \"poisson\"\nrate_per_s = 1000\n\
         [[class]]\nisl = 100\nosl = 1\n",
    );
    let outcome = run(&constant(8, ""), &load, &Options::default(), &mut Impatient);
    assert!(outcome.cut.unwrap().contains("interrupted"));
    assert!(outcome.totals.requests.succeeded < 100_000);
}

#[test]
fn a_prompt_that_can_never_run_is_refused_with_the_numbers() {
    let long = workload(
        "requests = 2\n[arrival]\nkind = \"constant\"\nrate_per_s = 1\n\
         [[class]]\nisl = 20_000\nosl = 7\n",
    );
    let outcome = run(&constant(1, ""), &long, &Options::default(), &mut ());
    assert_eq!(outcome.totals.requests.failed, 2);
    let example = &outcome.totals.errors["refused"].example;
    assert!(example.contains("20000"), "{example}");
}

/// A cluster and a load, drawn.
fn scenario() -> impl Strategy<Value = (Cluster, Workload)> {
    let policy = prop::sample::select(vec![
        "kv",
        "round_robin",
        "random",
        "least_requests",
        "power_of_two",
    ]);
    let arrival = prop_oneof![
        (5u32..400).prop_map(|rate| format!("kind = \"poisson\"\nrate_per_s = {rate}")),
        (1u32..40).prop_map(|c| format!("kind = \"closed\"\nconcurrency = {c}")),
    ];
    (
        (1u32..4, 40u32..400, 1u32..20, policy, any::<bool>()),
        (arrival, 1u32..300, 1u32..120, 1u32..4, any::<u32>()),
    )
        .prop_map(
            |((workers, blocks, seqs, policy, roofline), (arrival, isl, osl, turns, seed))| {
                let timing = if roofline {
                    "kind = \"roofline\"\ngpu = \"h100-sxm\""
                } else {
                    "kind = \"constant\"\nstep_ns = 10_000_000"
                };
                let cluster = cluster(&format!(
                    "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = {workers}\n[engine]\n\
                     block_size = 16\nnum_gpu_blocks = {blocks}\nmax_model_len = 600\n\
                     max_num_seqs = {seqs}\nmax_num_batched_tokens = 256\n\
                     [engine.timing]\n{timing}\n[router]\npolicy = \"{policy}\"\n"
                ));
                let workload = workload(&format!(
                    "seed = {seed}\nrequests = 60\n[arrival]\n{arrival}\n\
                     [[class]]\nisl = {{ kind = \"uniform\", min = 1, max = {isl} }}\n\
                     osl = {{ kind = \"uniform\", min = 1, max = {osl} }}\n\
                     [class.session]\nturns = {turns}\nthink_time_s = 0.05\n\
                     [[class]]\nweight = 0.5\nisl = 20\nosl = {osl}\n"
                ));
                (cluster, workload)
            },
        )
}

/// Every pass, engine by engine.
#[derive(Default)]
struct Passes(Vec<Pass>);

#[derive(Debug, PartialEq)]
struct Pass {
    engine: u32,
    times: (SimTime, SimTime),
    fpm: ForwardPassMetrics,
    counts: [u32; 3],
    gaps: Vec<(u64, u32)>,
}

impl Sink for Passes {
    fn wants_passes(&self) -> bool {
        true
    }

    fn on_pass(&mut self, p: &PassRecord<'_>) {
        let mut fpm = p.fpm.clone();
        // A spread is a rounded number, and the rounding may differ.
        fpm.scheduled_decode.kv_tokens_variance = fpm.scheduled_decode.kv_tokens_variance.round();
        self.0.push(Pass {
            engine: p.engine,
            times: (p.start, p.end),
            fpm,
            counts: [p.tokens, p.used_blocks, p.preemptions],
            gaps: p.gaps.to_vec(),
        });
    }
}

/// Requests as they were computed, in the form in which they can be fed to another run, and their times.
#[derive(Default)]
struct Fed {
    requests: Vec<(Request, WorkerId)>,
    times: BTreeMap<u64, (SimTime, SimTime, u32, u32, WorkerId)>,
}

impl Sink for Fed {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        let Some(rank) = r.rank else {
            return; // refused: no engine had it
        };
        let request = Request {
            turns: r.request.turn + 1,
            output_len: r.output_tokens,
            ignore_eos: true,
            ..r.request.clone()
        };
        self.requests.push((request, rank.worker));
        let times = (
            r.first,
            r.last,
            r.cached_tokens,
            r.output_tokens,
            rank.worker,
        );
        self.times.insert(r.request.id().0, times);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A sink that records passes gets the same records with and without jumping, and changes
    /// nothing; the sums over passes equal the run's counts.
    #[test]
    fn passes_add_up_jumped_over_or_not((cluster, workload) in scenario()) {
        let with = |jump: bool| {
            let options = Options { jump, ..Options::default() };
            let mut passes = Passes::default();
            let outcome = run(&cluster, &workload, &options, &mut passes);
            // A stable sort: each engine's stay in order.
            passes.0.sort_by_key(|p| p.engine);
            (outcome, passes.0)
        };
        let ((outcome, jumped), (_, single)) = (with(true), with(false));
        for (a, b) in jumped.iter().zip(&single) {
            prop_assert_eq!(a, b);
        }
        prop_assert_eq!(jumped.len(), single.len());
        prop_assert_eq!(outcome.passes, jumped.len() as u64);
        prop_assert_eq!(outcome.digest, run(&cluster, &workload, &Options::default(), &mut ()).digest);
        let tokens: u64 = jumped.iter().map(|p| u64::from(p.counts[0])).sum();
        prop_assert_eq!(tokens, outcome.totals.tokens().output);
        let preemptions: u64 = jumped.iter().map(|p| u64::from(p.counts[2])).sum();
        prop_assert_eq!(Some(preemptions as f64), outcome.engine.preemptions);
        let mut itl = Latency::default();
        for &(ns, count) in jumped.iter().flat_map(|p| &p.gaps) {
            itl.record_n(ns, count.into());
        }
        prop_assert_eq!(itl.percentiles(), outcome.totals.itl.percentiles());
        for pair in jumped.windows(2).filter(|pair| pair[0].engine == pair[1].engine) {
            prop_assert!(pair[0].times.1 <= pair[1].times.0);
            prop_assert!(pair[0].fpm.counter < pair[1].fpm.counter);
        }
    }

    /// Records of passes are the same if their tokens take time to reach the clients.
    #[test]
    fn passes_are_recorded_as_they_ran_if_their_tokens_travel(
        blocks in 40u32..80,
        rate in 20u32..100,
        full in any::<bool>(),
    ) {
        let workload = workload(&format!(
            "requests = 40\n[arrival]\nkind = \"poisson\"\nrate_per_s = {rate}\n\
             [[class]]\nisl = {{ kind = \"uniform\", min = 1, max = 300 }}\nosl = 100\n"
        ));
        let passes = |frame_us: u32| {
            let cluster = cluster(&format!(
                "[model]\npreset = \"qwen3-8b\"\n[engine]\nnum_gpu_blocks = {blocks}\n\
                 max_model_len = 400\nscheduler_reserve_full_isl = {full}\n\
                 [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n\
                 [host]\nmode = \"ideal\"\ncpus = 4096\nparse_us = 0\ntokenize_token_ns = 0\n\
                 route_us = 0\ndispatch_us = 0\nframe_us = {frame_us}\ntoken_ns = 0\n"
            ));
            let mut passes = Passes::default();
            let outcome = run(&cluster, &workload, &Options::default(), &mut passes);
            let preemptions: u64 = passes.0.iter().map(|p| u64::from(p.counts[2])).sum();
            assert_eq!(Some(preemptions as f64), outcome.engine.preemptions);
            passes.0.into_iter().map(|p| (p.times, p.counts)).collect::<Vec<_>>()
        };
        let at_once = passes(0);
        // A frame takes less than a pass, and more.
        for late in [passes(30), passes(25_000)] {
            prop_assert_eq!(at_once.len(), late.len());
            for (a, b) in at_once.iter().zip(&late) {
                prop_assert_eq!(a, b);
            }
        }
    }

    /// Jumping, and looking at each token, change nothing; and every request ends once.
    #[test]
    fn jumps_change_nothing((cluster, workload) in scenario()) {
        let objectives = Objectives::of(&workload, None);
        let with = |jump: bool, each_token: bool| {
            let slo = objectives.clone();
            let options = Options { jump, each_token, slo, ..Options::default() };
            run(&cluster, &workload, &options, &mut ())
        };
        let (jumped, single, each) = (with(true, false), with(false, false), with(true, true));
        let classes = |outcome: &Outcome| outcome.totals.class_reports(&objectives);
        prop_assert_eq!(single.jumped, 0);
        for other in [&single, &each] {
            prop_assert_eq!(jumped.digest, other.digest);
            prop_assert_eq!(jumped.passes, other.passes);
            prop_assert_eq!(jumped.ended_at, other.ended_at);
            prop_assert_eq!(jumped.engine, other.engine);
            prop_assert_eq!(jumped.totals.latencies(), other.totals.latencies());
            prop_assert_eq!(classes(&jumped), classes(other));
        }
        // Each class has as many gaps as its answers have, and they are those of all.
        let of = classes(&jumped);
        prop_assert_eq!(of.len(), 2);
        for class in &of {
            let gaps = class.itl_ms.map_or(0, |p| p.count);
            prop_assert_eq!(gaps, class.output_tokens - class.succeeded);
        }
        let most = of.iter().filter_map(|class| Some(class.itl_ms?.max)).fold(0.0, f64::max);
        prop_assert_eq!(most, jumped.totals.latencies().itl_ms.map_or(0.0, |p| p.max));
        let requests = jumped.totals.requests;
        prop_assert!(jumped.cut.is_none());
        prop_assert_eq!(requests.sent, requests.succeeded + requests.failed);
        prop_assert!(requests.sent + requests.abandoned >= 60);
        let tokens = jumped.totals.tokens();
        let gaps = jumped.totals.latencies().itl_ms.map_or(0, |p| p.count);
        prop_assert_eq!(gaps, tokens.output - requests.succeeded);
    }
    /// A router that queries the engines for cached blocks finds the same as by deltas.
    #[test]
    fn asking_engines_and_hearing_of_them_agree((cluster, workload) in scenario(), jump in any::<bool>()) {
        let with = |feed_index: bool| {
            let options = Options { jump, feed_index, ..Options::default() };
            run(&cluster, &workload, &options, &mut ())
        };
        let (asked, heard) = (with(false), with(true));
        prop_assert_eq!(asked.digest, heard.digest);
        prop_assert_eq!(asked.engine, heard.engine);
        prop_assert_eq!(asked.totals.latencies(), heard.totals.latencies());
    }

    /// A run that gets its requests while it advances, each at the worker that had it, computes the times of a run
    /// that knew them at its start, whatever its steps are.
    #[test]
    fn a_run_fed_in_steps_is_the_whole_run(
        (mut cluster, mut workload) in scenario(),
        rate in 5u32..400,
        steps in prop::collection::vec(1u64..400, 1..20),
        has_threads in any::<bool>(),
    ) {
        if has_threads {
            cluster.host.mode = HostMode::Threads;
            cluster.host.threads.background = 2;
        }
        workload.arrival = Arrival::Poisson { rate_per_s: rate.into() };
        let mut whole = Fed::default();
        let outcome = run(&cluster, &workload, &Options::default(), &mut whole);
        prop_assert!(outcome.cut.is_none());
        let mut requests: Vec<(Request, WorkerId)> = whole.requests;
        requests.sort_by_key(|(request, _)| request.due);
        let options = Options::default();
        let read = |path: &Path| std::fs::read(path);
        let mut follower = Follower::new(&cluster, &options, read).unwrap();
        let mut fed = Fed::default();
        let mut waiting = requests.into_iter().peekable();
        let mut steps = steps.into_iter().cycle();
        let mut to = SimTime::ZERO;
        while waiting.peek().is_some() || follower.open() > 0 {
            to = SimTime(to.0 + steps.next().unwrap() * 1_000_000);
            while let Some((request, worker)) = waiting.next_if(|(of, _)| of.due < to) {
                follower.push(request, worker).unwrap();
            }
            prop_assert_eq!(follower.advance(to, &mut fed).unwrap(), None);
            prop_assert!(to < outcome.ended_at + 1_000_000_000, "{} are open", follower.open());
        }
        prop_assert_eq!(fed.times, whole.times);
        let late = Request { due: SimTime(to.0 - 1), ..fed.requests[0].0.clone() };
        prop_assert!(follower.push(late, WorkerId(0)).is_err());
    }

    /// Independent engines, and those whose loads are refreshed at intervals, give the same results
    /// with one queue for all events and with separate advances, on any number of threads.
    #[test]
    fn threads_and_queues_change_nothing(
        (mut cluster, mut workload) in scenario(),
        policy in prop::sample::select(vec![
            RouterPolicy::Random,
            RouterPolicy::RoundRobin,
            RouterPolicy::Kv,
            RouterPolicy::LeastTokens,
            RouterPolicy::PowerOfTwo,
        ]),
        (view_ms, lag_ms, affinity) in (1u32..200, 0u32..40, any::<bool>()),
        rate in 5u32..400,
        time_max_ms in prop::option::of(1u64..2_000),
    ) {
        let router = &mut cluster.router;
        router.policy = policy;
        router.view_interval_ms = view_ms.into();
        router.kv_lag_ms = lag_ms.into();
        router.affinity_ttl_s = if affinity { 1.0 } else { 0.0 };
        workload.arrival = Arrival::Poisson { rate_per_s: rate.into() };
        let Content::Generated(classes) = &mut workload.content else { unreachable!() };
        classes[0].session.turns = Dist::Exact(1.0);
        // More than one window's arrivals, for some.
        workload.requests = Some(u64::from(rate) * 6);
        let time_max = time_max_ms.map_or(SimTime::MAX, |ms| SimTime(ms * 1_000_000));
        let with = |threads: u32, one_queue: bool, jump: bool| {
            let options = Options { threads, one_queue, jump, time_max, ..Options::default() };
            let mut records = Records::default();
            let outcome = run(&cluster, &workload, &options, &mut records);
            let mut ends: Vec<_> = records.0.iter().map(|r| (r.last, r.due, r.tokens)).collect();
            let in_order = ends.is_sorted_by_key(|e| e.0);
            ends.sort_unstable();
            (outcome, ends, in_order)
        };
        let (queue, ends, _) = with(1, true, true);
        for (other, other_ends, in_order) in [
            with(1, false, true), with(2, false, true), with(4, false, true), with(4, false, false),
        ] {
            prop_assert_eq!(queue.digest, other.digest);
            prop_assert_eq!(queue.passes, other.passes);
            prop_assert_eq!(queue.ended_at, other.ended_at);
            prop_assert_eq!(queue.engine, other.engine);
            prop_assert_eq!(&queue.cut, &other.cut);
            prop_assert_eq!(queue.totals.requests, other.totals.requests);
            prop_assert_eq!(&queue.totals.errors, &other.totals.errors);
            prop_assert_eq!(queue.totals.tokens(), other.totals.tokens());
            prop_assert_eq!(queue.totals.latencies(), other.totals.latencies());
            prop_assert_eq!(&ends, &other_ends);
            prop_assert!(in_order);
        }
    }
}

/// An engine whose pass ends frees blocks for a prompt and wakes its prefill node; the next prompt
/// of that node may be for another engine, which must not have jumped past that time.
#[test]
fn engines_do_not_jump_past_prompts_that_another_one_sets_going() {
    let cluster = cluster(
        "[model]\npreset = \"qwen3-8b\"\n[engine]\nblock_size = 1\nnum_gpu_blocks = 1000\n\
         max_model_len = 900\ndata_parallel_size = 2\n[engine.timing]\nkind = \"constant\"\n\
         step_ns = 10000000\n[pool.p]\nrole = \"prefill\"\nworkers = 2\n[pool.d]\nworkers = 3\n\
         [pool.m]\n[router]\ntemperature = 1000\nbusy_prefill_tokens = 1000\n",
    );
    let workload = workload(
        "requests = 27\nisl = 398\nosl = 81\n[arrival]\nkind = \"poisson\"\n\
         rate_per_s = 1000000.0\n",
    );
    let single = Options {
        jump: false,
        ..Options::default()
    };
    let jumped = run(&cluster, &workload, &Options::default(), &mut ());
    let single = run(&cluster, &workload, &single, &mut ());
    assert_eq!(jumped.digest, single.digest);
    assert!(jumped.totals.requests.succeeded > 0);
}

#[test]
fn what_is_under_way_when_a_run_is_cut_is_counted_as_that() {
    let workload = workload(
        "requests = 10\nisl = 100\nosl = 100\n[arrival]\nkind = \"closed\"\nconcurrency = 10\n",
    );
    let options = Options {
        time_max: SimTime::from_secs_f64(0.5),
        ..Options::default()
    };
    let outcome = run(&constant(1, ""), &workload, &options, &mut ());
    let requests = outcome.totals.requests;
    assert!(outcome.cut.is_some());
    assert_eq!((requests.sent, requests.succeeded), (10, 0));
    assert_eq!((requests.unfinished, requests.abandoned), (10, 0));
}

/// Arrivals every `gap_ms` from `from_s` to `to_s`.
fn every(gap_ms: u32, from_s: u32, to_s: u32) -> impl Iterator<Item = f64> {
    (from_s * 1000..to_s * 1000)
        .step_by(gap_ms as usize)
        .map(f64::from)
}

/// 95 tokens of 10 ms each: 9 to 10 requests under way at 10 per second, and 38 to 39 at 40. A worker is to have
/// 5, so these need 2 and 8 workers.
#[test]
fn workers_follow_a_step_of_load() {
    let mut load =
        workload("[arrival]\nkind = \"timestamps\"\nms = [0]\n[[class]]\nisl = 8\nosl = 95\n");
    let ms: Vec<f64> = every(100, 0, 60)
        .chain(every(25, 60, 120))
        .chain(every(100, 120, 300))
        .collect();
    let count = ms.len() as u64;
    load.arrival = Arrival::Timestamps { ms };
    load.requests = Some(count);
    let scaled = |workers: u32, more: &str| {
        constant(
            workers,
            &format!(
                "max_num_seqs = 100\nstartup_s = 5\n[autoscale]\npolicy = \"utilization\"\n\
                 target = 0.05\ninterval_s = 10\ncooldown_s = 60\n{more}"
            ),
        )
    };
    let run = |cluster: &Cluster| run(cluster, &load, &Options::default(), &mut ());
    let outcome = run(&scaled(10, ""));
    assert_eq!(
        outcome.totals.requests.succeeded, count,
        "drained workers end theirs"
    );
    let scaling = outcome.scaling.unwrap();
    let changes: Vec<(f64, u32, u32)> = scaling
        .changes
        .iter()
        .map(|c| (c.at.as_secs_f64(), c.before, c.wanted))
        .collect();
    // The last 40 per second are in the window of 60 s after 120 s until that of 190 s.
    assert_eq!(changes, [(10.0, 1, 2), (70.0, 2, 8), (190.0, 8, 2)]);
    // Workers that drain have ended their requests by the next decision.
    let end = outcome.ended_at.as_secs_f64();
    let workers = 10.0 + 2.0 * 60.0 + 8.0 * 130.0 + 2.0 * (end - 200.0);
    assert!(
        (scaling.pools[0].worker_s - workers).abs() < 1e-6,
        "{scaling:?}"
    );
    assert_eq!(
        (scaling.pools[0].wanted_min, scaling.pools[0].wanted_max),
        (1, 8)
    );
    assert!((scaling.gpu_s - workers).abs() < 1e-6, "one GPU each");

    // No more than the pool has, and no fewer than asked for.
    let bounded = run(&scaled(6, "workers_min = 3\nworkers_start = 5\n"));
    let scaling = bounded.scaling.unwrap();
    let wanted: Vec<u32> = scaling.changes.iter().map(|c| c.wanted).collect();
    assert_eq!(wanted, [3, 6, 3], "{scaling:?}");
    // The same workers from the start to the end, with and without autoscaling.
    let fixed = run(&scaled(6, "workers_min = 6\n"));
    let plain = run(&constant(6, "max_num_seqs = 100\nstartup_s = 5\n"));
    assert_eq!(fixed.digest, plain.digest);
    assert_eq!(
        (plain.scaling, fixed.scaling.unwrap().changes.len()),
        (None, 0)
    );
}

/// A worker that is added is used only after its start, and has lost its cache when it comes back.
#[test]
fn added_workers_start_and_removed_ones_lose_their_caches() {
    struct Ranks(Vec<(f64, u32, u32)>);
    impl Sink for Ranks {
        fn on_request(&mut self, record: &RequestRecord<'_>) {
            let rank = record.rank.expect("it was answered");
            self.0.push((
                record.request.due.as_secs_f64(),
                rank.worker.0,
                record.cached_tokens,
            ));
        }
    }
    let mut load =
        workload("[arrival]\nkind = \"timestamps\"\nms = [0]\n[[class]]\nisl = 8\nosl = 95\n");
    let ms: Vec<f64> = every(100, 0, 40)
        .chain(every(1000, 40, 80))
        .chain(every(100, 80, 120))
        .collect();
    load.requests = Some(ms.len() as u64);
    load.arrival = Arrival::Timestamps { ms };
    let cluster = constant(
        2,
        "max_num_seqs = 100\nstartup_s = 7\n[autoscale]\npolicy = \"utilization\"\ntarget = 0.05\n\
         interval_s = 10\ncooldown_s = 20\n[router]\npolicy = \"round_robin\"\n",
    );
    let mut ranks = Ranks(Vec::new());
    let outcome = run(&cluster, &load, &Options::default(), &mut ranks);
    let changes: Vec<(f64, u32)> = outcome
        .scaling
        .unwrap()
        .changes
        .iter()
        .map(|c| (c.at.as_secs_f64(), c.wanted))
        .collect();
    assert_eq!(changes, [(10.0, 2), (70.0, 1), (90.0, 2)]);
    for (due, worker, _) in &ranks.0 {
        let second = (17.0..70.0).contains(due) || *due >= 97.0;
        assert!(second || *worker == 0, "worker {worker} at {due}");
    }
    let of_second = ranks.0.iter().filter(|each| each.1 == 1).count();
    assert!(of_second > 200, "{of_second}");
}
