//! Several models in one cluster: each is computed as by a cluster of its own.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use proptest::prelude::*;
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_twin::{Options, Outcome, RequestRecord, Sink, TwinError};

use super::model::MS;
use super::{cluster, run, workload};

/// A session's number among those of its model, and the turn.
type Key = (u64, u32);

/// First token, last token, worker, and tokens that were cached and computed.
type Times = (u64, u64, Option<u32>, u32, u32);

#[derive(Default)]
struct Records {
    /// By model.
    ended: BTreeMap<u32, BTreeMap<(u64, u32), Times>>,
}

impl Sink for Records {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        assert_eq!(r.error, None);
        let worker = r.rank.map(|rank| rank.worker.0);
        let times = (
            r.first.0,
            r.last.0,
            worker,
            r.cached_tokens,
            r.output_tokens,
        );
        let of_model = self.ended.entry(r.request.model).or_default();
        of_model.insert((r.request.session, r.request.turn), times);
    }
}

fn simulate(cluster: &Cluster, load: &Workload, options: &Options) -> (Outcome, Records) {
    let mut records = Records::default();
    let outcome = run(cluster, load, options, &mut records);
    assert_eq!(outcome.cut, None);
    (outcome, records)
}

/// Passes of 10 ms in the pool of `small`, of 30 ms in that of `large`.
fn two_models(more: &str) -> Cluster {
    cluster(&format!(
        "[engine]\nnum_gpu_blocks = 4096\nmax_model_len = 16384\n[engine.timing]\nkind = \"constant\"\n\
         step_ns = 10_000_000\n[pool.a]\n[pool.a.model]\nname = \"small\"\n[pool.b]\n[pool.b.model]\n\
         preset = \"llama-3.1-8b\"\nname = \"large\"\n[pool.b.engine.timing]\nstep_ns = 30_000_000\n{more}"
    ))
}

const LOAD: &str = "requests = 400\nisl = 100\nosl = 3\nmodels = [\"small\", \"large\"]\nmodel_weights = [3, 1]\n\
                    [arrival]\nkind = \"constant\"\nrate_per_s = 1\n";

#[test]
fn each_request_is_computed_by_its_model() {
    let (outcome, records) = simulate(&two_models(""), &workload(LOAD), &Options::default());
    let [small, large] = [0, 1].map(|model| &records.ended[&model]);
    for (of_model, step, worker) in [(small, 10 * MS, 0), (large, 30 * MS, 1)] {
        for (&(session, _), &(first, last, rank, cached, tokens)) in of_model {
            let due = session * 1_000 * MS;
            assert_eq!((first, last), (due + step, due + 3 * step));
            assert_eq!((rank, cached, tokens), (Some(worker), 0, 3));
        }
    }
    // Three of four; four standard errors.
    assert_eq!(small.len() + large.len(), 400);
    assert!((small.len() as f64 - 300.0).abs() < 35.0, "{}", small.len());
    let [a, b] = &outcome.models[..] else {
        panic!("two models");
    };
    assert_eq!((&*a.name, &*b.name), ("small", "large"));
    assert_eq!(a.totals.requests.sent, small.len() as u64);
    assert_eq!(b.totals.latencies().ttft_ms.unwrap().mean, 30.0);
    assert_eq!(outcome.totals.requests.sent, 400);
}

#[test]
fn other_digits_are_drawn_as_without_models() {
    let one = super::model::ten_ms("", "");
    let without = LOAD.replace(
        "models = [\"small\", \"large\"]\nmodel_weights = [3, 1]\n",
        "",
    );
    let with = without.replace("osl", "models = [\"qwen3-8b\"]\nosl");
    let digest = |text: &str| run(&one, &workload(text), &Options::default(), &mut ()).digest;
    assert_eq!(digest(&with), digest(&without));
}

#[track_caller]
fn check_refused(cluster: &Cluster, load: &Workload, expected: &[&str]) {
    let read = |path: &Path| std::fs::read(path);
    let refused = slipstream_twin::simulate(cluster, load, &Options::default(), read, &mut ());
    let error: TwinError = refused.expect_err("it is refused");
    let text = error.to_string();
    for part in expected {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn models_that_no_pool_serves_are_named() {
    let typo = LOAD.replace("\"large\"]", "\"larger\"]");
    let served = "2 models, `small`, `large`";
    check_refused(&two_models(""), &workload(&typo), &["`larger`", served]);
    let none = "requests = 3\n[[class]]\nname = \"chat\"\nisl = 8\n";
    check_refused(
        &two_models(""),
        &workload(none),
        &["`chat`", "no model", served],
    );
    let one = super::model::ten_ms("", "");
    check_refused(&one, &workload(LOAD), &["`small`", "one model, `qwen3-8b`"]);
    let line = |model: &str| {
        format!("{{\"timestamp\": 0, \"input_length\": 20, \"output_length\": 2{model}}}\n")
    };
    for (line, expected) in [
        (
            line(", \"model\": \"other\""),
            "line 2: `model` is \"other\"",
        ),
        (line(""), "line 2: `model` is missing"),
        (line(", \"model\": 3"), "line 2: `model` is not a name"),
    ] {
        let trace = Trace::new(&[self::line_of("small"), line]);
        check_refused(&two_models(""), &trace.workload(), &[expected]);
    }
    // Without several models the field has no meaning.
    let trace = Trace::new(&[self::line_of("gpt")]);
    run(&one, &trace.workload(), &Options::default(), &mut ());
}

fn line_of(model: &str) -> String {
    format!(
        "{{\"timestamp\": 0, \"input_length\": 20, \"output_length\": 2, \"model\": \"{model}\"}}\n"
    )
}

#[test]
fn lengths_are_limited_by_the_model_of_a_request() {
    let both = two_models("[pool.b.engine]\nmax_model_len = 102\n");
    // Of 100 tokens and these, in both orders.
    let trace = requests(&[(0, 0, 3), (1, 1, 3), (2, 0, 3), (3, 1, 2)]);
    let outcome = run(&both, &trace.workload(), &Options::default(), &mut ());
    let counts = outcome.models.iter().map(|of| of.totals.requests);
    let counts: Vec<(u64, u64)> = counts.map(|of| (of.succeeded, of.failed)).collect();
    assert_eq!(counts, [(2, 0), (1, 1)]);
    let error = &outcome.models[1].totals.errors["refused"];
    assert!(error.example.contains("102 tokens"), "{}", error.example);
}

/// A trace in a file.
struct Trace(tempfile::NamedTempFile);

impl Trace {
    fn new(lines: &[String]) -> Trace {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), lines.concat()).unwrap();
        Trace(file)
    }

    fn workload(&self) -> Workload {
        workload(&format!(
            "[trace]\nfile = \"{}\"\n",
            self.0.path().display()
        ))
    }
}

/// A session of a model: when it begins, and each turn's tokens in, out, and delay.
#[derive(Clone, Debug)]
struct Session {
    model: usize,
    gap_ms: u64,
    prefix: u64,
    turns: Vec<(u32, u32, u32)>,
}

fn session() -> impl Strategy<Value = Session> {
    let turns = prop::collection::vec((1u32..400, 1u32..40, 0u32..2_000), 1..4);
    (0usize..2, 0u64..300, 0u64..4, turns).prop_map(|(model, gap_ms, prefix, turns)| Session {
        model,
        gap_ms,
        prefix,
        turns,
    })
}

/// The sessions for which `takes` holds, in our own format.
fn trace_of(sessions: &[Session], takes: impl Fn(&Session) -> bool) -> Trace {
    let (mut at, mut lines) = (0, Vec::new());
    for (name, session) in sessions.iter().enumerate() {
        at += session.gap_ms;
        if !takes(session) {
            continue;
        }
        let mut turns = Vec::new();
        for (turn, (tokens, output, delay)) in session.turns.iter().enumerate() {
            let mut add = format!("[{}, {tokens}]", 1_000 * (name + 1) + turn);
            if turn == 0 {
                // Both models have the same prefixes.
                add = format!("[{}, 160, \"system\"], {add}", session.prefix);
            }
            turns.push(format!(
                "{{\"add\": [{add}], \"output_length\": {output}, \"delay\": {delay}}}"
            ));
        }
        lines.push(format!(
            "{{\"timestamp\": {at}, \"model\": \"{}\", \"turns\": [{}]}}\n",
            ["small", "large"][session.model],
            turns.join(", ")
        ));
    }
    Trace::new(&lines)
}

/// The pools of model `of`, or of both.
fn pools_of(of: Option<usize>, pools: [&str; 2], more: &str) -> Cluster {
    let mut text = String::new();
    for (at, pool) in pools.iter().enumerate() {
        if of.is_none_or(|of| of == at) {
            text.push_str(pool);
        }
    }
    write!(text, "{more}").unwrap();
    cluster(&text)
}

const SMALL: &str =
    "[pool.a]\nworkers = 3\n[pool.a.model]\npreset = \"qwen3-8b\"\nname = \"small\"\n";
const LARGE: &str = "[pool.b]\nworkers = 2\n[pool.b.model]\npreset = \"llama-3.1-8b\"\nname = \"large\"\n\
                     [pool.c]\n[pool.c.model]\npreset = \"llama-3.1-8b\"\nname = \"large\"\n\
                     [pool.c.engine]\nmax_num_seqs = 3\n";
const LARGE_APART: &str = "[pool.b]\nrole = \"prefill\"\n[pool.b.model]\npreset = \"llama-3.1-8b\"\nname = \"large\"\n\
                           [pool.c]\nrole = \"decode\"\nworkers = 2\n[pool.c.model]\npreset = \"llama-3.1-8b\"\n\
                           name = \"large\"\n";

/// Everything about the requests of both models, as the two clusters compute them by themselves, with the numbers that
/// workers and sessions have in the common one.
fn apart(sessions: &[Session], pools: [&str; 2], more: &str) -> [BTreeMap<Key, Times>; 2] {
    [0, 1].map(|model| {
        let trace = trace_of(sessions, |session| session.model == model);
        if sessions.iter().all(|session| session.model != model) {
            return BTreeMap::new();
        }
        let alone = pools_of(Some(model), pools, more);
        let (_, mut records) = simulate(&alone, &trace.workload(), &Options::default());
        let workers = pools_of(Some(0), pools, more).workers().count();
        let before = if model == 0 {
            0
        } else {
            u32::try_from(workers).unwrap()
        };
        let numbers = (0u64..).zip(sessions).filter(|(_, s)| s.model == model);
        let numbers: Vec<u64> = numbers.map(|(number, _)| number).collect();
        let each = records.ended.remove(&0).unwrap().into_iter();
        let renamed = each.map(|((session, turn), times)| {
            let (first, last, worker, cached, tokens) = times;
            let key = (numbers[usize::try_from(session).unwrap()], turn);
            (
                key,
                (first, last, worker.map(|w| w + before), cached, tokens),
            )
        });
        renamed.collect()
    })
}

fn check_as_apart(sessions: &[Session], pools: [&str; 2], more: &str) {
    let expected = apart(sessions, pools, more);
    let both = pools_of(None, pools, more);
    let trace = trace_of(sessions, |_| true);
    let mut digests = Vec::new();
    for (jump, threads) in [(true, 1), (false, 1), (true, 3)] {
        let options = Options {
            jump,
            threads,
            ..Options::default()
        };
        let (outcome, records) = simulate(&both, &trace.workload(), &options);
        for (model, expected) in (0..).zip(&expected) {
            let found = records.ended.get(&model).cloned().unwrap_or_default();
            assert_eq!(found, *expected, "model {model}");
        }
        digests.push(outcome.digest);
    }
    assert_eq!(digests, [digests[0]; 3]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Requests of other models change nothing: neither times, nor hits, nor the choice of workers.
    #[test]
    fn models_on_gpus_of_their_own_are_computed_as_in_clusters_of_their_own(
        sessions in prop::collection::vec(session(), 1..40),
        policy in prop::sample::select(vec!["kv", "round_robin", "random", "least_tokens", "power_of_two"]),
        large in prop::sample::select(vec![LARGE, LARGE_APART]),
        more in prop::sample::select(vec!["", "kv_lag_ms = 30\n", "view_interval_ms = 50\n", "affinity_ttl_s = 5\n"]),
        constant in any::<bool>(),
        blocks in 120u32..600,
    ) {
        let timing = if constant { "kind = \"constant\"\nstep_ns = 7_000_000\n" } else { "" };
        let more = format!(
            "[engine]\nnum_gpu_blocks = {blocks}\nmax_num_seqs = 5\nmax_model_len = 1900\n[engine.timing]\n{timing}\
             [router]\npolicy = \"{policy}\"\n{more}"
        );
        check_as_apart(&sessions, [SMALL, large], &more);
    }
}

/// Two models of one GPU. Their matrices, of 2 bytes a number: 36 layers of 41,943,040 + 150,994,944 and embeddings of
/// 2 x 622,329,856 are 16,380,854,272 bytes; 32 layers of 41,943,040 + 176,160,768 and 2 x 525,336,576 are 16,059,990,016.
const SHARE: &str =
    "[share.s]\npools = [\"a\", \"b\"]\nwake_bytes_per_s = 1e12\nwake_ms = 100\nsleep_ms = 50\n";
/// To put each to sleep, and to wake it up, ns.
const SLEEP: [u64; 2] = [66_380_854, 66_059_990];
const WAKE: [u64; 2] = [116_380_854, 116_059_990];

/// Requests of 100 tokens in and `output` out: when each is due, ms, and its model.
fn requests(each: &[(u64, usize, u32)]) -> Trace {
    let line = |(at, model, output): &(u64, usize, u32)| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": 100, \"output_length\": {output}, \"model\": \"{}\"}}\n",
            ["small", "large"][*model]
        )
    };
    let lines: Vec<String> = each.iter().map(line).collect();
    Trace::new(&lines)
}

/// First tokens of requests by session, ns.
fn firsts(records: &Records) -> Vec<u64> {
    let all = records.ended.values().flatten();
    let each: BTreeMap<Key, u64> = all.map(|(key, times)| (*key, times.0)).collect();
    each.into_values().collect()
}

#[test]
fn a_model_that_sleeps_wakes_for_a_request() {
    let both = two_models(&format!("{SHARE}turn_ms = 200\n"));
    assert_eq!(both.gpus(), 1);
    // The first is awake at the start. For the second the GPU swaps at once, as nothing runs; and back for the third, which comes
    // while the large model computes its second and last token.
    let trace = requests(&[(0, 0, 3), (1_000, 1, 2), (1_000 + 200, 0, 1)]);
    let (outcome, records) = simulate(&both, &trace.workload(), &Options::default());
    let woke = 1_000 * MS + SLEEP[0] + WAKE[1];
    assert!((1_182 * MS..1_183 * MS).contains(&woke));
    let back = woke + 60 * MS + SLEEP[1] + WAKE[0];
    assert_eq!(firsts(&records), [10 * MS, woke + 30 * MS, back + 10 * MS]);
    let [share] = &outcome.shares[..] else {
        panic!("one share");
    };
    assert_eq!((&*share.name, share.workers, share.swaps), ("s", 1, 2));
    let swapping = SLEEP[0] + WAKE[1] + SLEEP[1] + WAKE[0];
    assert_eq!(share.swapping_ns, swapping);
    let awake = [("a".to_owned(), 1_010 * MS), ("b".to_owned(), 60 * MS)];
    assert_eq!(share.pools, awake);
}

#[test]
fn a_model_with_work_stays_awake_for_a_turn() {
    let both = two_models(&format!(
        "[pool.a.engine]\nmax_num_seqs = 2\n{SHARE}turn_ms = 200\n"
    ));
    // Two at a time of 10 tokens each, 100 ms: at 30 ms a request for the other model comes, so the turn ends at 230 ms. The
    // third pair has begun at 200 ms, and ends at 300 ms; the fourth waits for the model to wake again.
    let mut each = vec![(0, 0, 10); 8];
    each.push((30, 1, 2));
    let (outcome, records) = simulate(&both, &requests(&each).workload(), &Options::default());
    let woke = 300 * MS + SLEEP[0] + WAKE[1];
    let back = woke + 60 * MS + SLEEP[1] + WAKE[0];
    let first = |at: u64| at + 10 * MS;
    let pairs = [0, 100 * MS, 200 * MS, back].map(first);
    let mut expected: Vec<u64> = pairs.iter().flat_map(|&at| [at, at]).collect();
    expected.push(woke + 30 * MS);
    assert_eq!(firsts(&records), expected);
    assert_eq!(outcome.shares[0].swaps, 2);
}

#[test]
fn a_request_wakes_no_worker_while_another_is_awake_and_free() {
    let mut both = two_models(&format!(
        "[pool.a.engine]\nmax_num_seqs = 1\n[router]\npolicy = \"least_requests\"\n{SHARE}turn_ms = 200\n"
    ));
    for pool in &mut both.pools {
        pool.workers = 2;
    }
    // The large model wakes at one of the workers. Then one request of the small one at a time is for the other worker, though
    // it has had as many as the first. From 2,010 ms on one waits there: 200 ms later a further one may go anywhere.
    let mut each = vec![(0, 1, 2)];
    each.extend([500, 600, 700, 800].map(|at| (at, 0, 5)));
    each.extend([2_000, 2_001, 2_209, 2_211].map(|at| (at, 0, 60)));
    let (outcome, records) = simulate(&both, &requests(&each).workload(), &Options::default());
    let worker = |times: &Times| times.2.unwrap();
    let same = worker(records.ended[&1].values().next().unwrap()) - 2;
    let other = 1 - same;
    let of_small: Vec<u32> = records.ended[&0].values().map(worker).collect();
    let expected = [other, other, other, other, other, other, other, same];
    assert_eq!(of_small, expected);
    assert_eq!(outcome.shares[0].swaps, 2);
}

#[test]
fn a_model_takes_as_few_gpus_as_it_needs() {
    let mut both = two_models(&format!("{SHARE}turn_ms = 200\n"));
    for pool in &mut both.pools {
        pool.workers = 2;
    }
    // The small model is busy on both sets of GPUs. The large one gets one of them, and the other is enough for the small one:
    // its requests there end before the swap, and none follows that could wake it again.
    let mut each: Vec<(u64, usize, u32)> = (0..300).map(|at| (at * 7, 0, 20)).collect();
    each.extend([100, 150, 290, 700, 1_200, 1_900].map(|at| (at, 1, 9)));
    each.sort_unstable();
    let (outcome, records) = simulate(&both, &requests(&each).workload(), &Options::default());
    assert_eq!(outcome.totals.requests.succeeded, 306);
    assert_eq!(outcome.shares[0].swaps, 1);
    let of_large: Vec<u32> = records.ended[&1]
        .values()
        .map(|times| times.2.unwrap())
        .collect();
    assert_eq!(of_large, [of_large[0]; 6]);
    let ttft = outcome.models[0].totals.latencies().ttft_ms.unwrap();
    // The passes under way and scheduled ahead, and its own.
    assert!(ttft.max <= 30.0, "none waits for a swap: {ttft:?}");
}

#[test]
fn a_model_that_sleeps_loses_its_cache() {
    let both = two_models(SHARE);
    let line = |at: u64, model: &str| {
        format!(
            "{{\"timestamp\": {at}, \"input_length\": 100, \"output_length\": 2, \"hash_ids\": [7], \"model\": \"{model}\"}}\n"
        )
    };
    let lines = [
        line(0, "small"),
        line(500, "small"),
        line(1_000, "large"),
        line(2_000, "small"),
    ];
    let trace = Trace::new(&lines);
    for feed_index in [false, true] {
        let options = Options {
            feed_index,
            ..Options::default()
        };
        let (_, records) = simulate(&both, &trace.workload(), &options);
        let cached: Vec<u32> = records.ended[&0].values().map(|times| times.3).collect();
        assert_eq!(cached, [0, 96, 0]);
        assert_eq!(records.ended[&1].values().next().unwrap().3, 0);
    }
}

/// Three models of two GPUs, one of them with one worker.
const THREE: &str = "[pool.a]\nworkers = 2\n[pool.a.model]\nname = \"small\"\n\
                     [pool.b]\nworkers = 2\n[pool.b.model]\npreset = \"llama-3.1-8b\"\nname = \"large\"\n\
                     [pool.c]\n[pool.c.model]\npreset = \"llama-3.1-8b\"\nname = \"third\"\n\
                     [share.s]\npools = [\"a\", \"b\", \"c\"]\nwake_bytes_per_s = 1e12\n";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every request ends, and is waited for no longer than its model's turn takes to come.
    #[test]
    fn models_that_share_gpus_answer_all(
        gaps in prop::collection::vec((0u64..400, 0usize..3, 1u32..120, 1u32..12), 1..60),
        turn_ms in 1u32..1_500,
        seqs in 1u32..4,
        blocks in 20u32..80,
        ahead in any::<bool>(),
        policy in prop::sample::select(vec!["kv", "round_robin", "least_requests"]),
        lag in prop::sample::select(vec!["", "kv_lag_ms = 30\n"]),
        arrival in prop::sample::select(vec!["", "[arrival]\nkind = \"closed\"\nconcurrency = 3\n"]),
        turns in 1usize..3,
    ) {
        let text = format!(
            "[engine]\nnum_gpu_blocks = {blocks}\nmax_num_seqs = {seqs}\nmax_model_len = 320\nasync_scheduling = {ahead}\n\
             [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n[router]\npolicy = \"{policy}\"\n{lag}{THREE}turn_ms = {turn_ms}\n"
        );
        let both = cluster(&text);
        let mut at = 0;
        let lines = gaps.iter().map(|(gap, model, input, output)| {
            at += gap;
            let turn = format!("{{\"add\": [[{model}, {input}]], \"output_length\": {output}}}");
            format!(
                "{{\"timestamp\": {at}, \"model\": \"{}\", \"turns\": [{}]}}\n",
                ["small", "large", "third"][*model],
                vec![turn; turns].join(", ")
            )
        });
        let trace = Trace::new(&lines.collect::<Vec<_>>());
        let load = workload(&format!("{arrival}[trace]\nfile = \"{}\"\n", trace.0.path().display()));
        let requests = turns * gaps.len();
        let mut outcomes = Vec::new();
        for (jump, feed_index) in [(true, false), (false, false), (true, true)] {
            let options = Options { jump, feed_index, threads: 3, ..Options::default() };
            let (outcome, records) = simulate(&both, &load, &options);
            prop_assert_eq!(outcome.totals.requests.succeeded, requests as u64);
            prop_assert_eq!(firsts(&records).len(), requests);
            let share = &outcome.shares[0];
            let awake: u64 = share.pools.iter().map(|(_, ns)| ns).sum();
            prop_assert_eq!(awake + share.swapping_ns, 2 * outcome.ended_at.0);
            outcomes.push((outcome.digest, share.swaps, share.swapping_ns, outcome.totals.latencies()));
        }
        prop_assert_eq!(&outcomes[0], &outcomes[1]);
        prop_assert_eq!(&outcomes[0], &outcomes[2]);
    }

    /// One model has more work than its GPU can do. A request for the other waits for no more than a turn, the last
    /// sequences, and a swap; requests that wait when it wakes are all in its first passes.
    #[test]
    fn a_busy_model_starves_no_other(
        turn_ms in 1u64..2_000,
        output in 1u32..20,
        others in prop::collection::vec(0u64..8_000, 1..6),
    ) {
        let both = two_models(&format!("[pool.a.engine]\nmax_num_seqs = 2\n{SHARE}turn_ms = {turn_ms}\n"));
        let mut each: Vec<(u64, usize, u32)> = (0..300).map(|i| (i * 20, 0, output)).collect();
        each.extend(others.iter().map(|&at| (at, 1, 1)));
        each.sort_unstable();
        let (outcome, records) = simulate(&both, &requests(&each).workload(), &Options::default());
        prop_assert_eq!(outcome.totals.requests.succeeded, each.len() as u64);
        let longest = u64::from(output) * 10 * MS;
        // It may come when the model falls asleep that it is for: then a turn of the other one is before it, too.
        let swaps = 2 * (SLEEP[0] + WAKE[1] + SLEEP[1] + WAKE[0]);
        let bound = 2 * (turn_ms * MS + longest + 30 * MS) + swaps;
        for (&(session, _), times) in &records.ended[&1] {
            let due = each[usize::try_from(session).unwrap()].0 * MS;
            prop_assert!(times.0 - due <= bound, "{} after {due}", times.0 - due);
        }
    }
}
