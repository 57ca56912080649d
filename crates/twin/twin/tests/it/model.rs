//! Disaggregated prefill, the network, the host, delayed cache state, faults: examples worked out
//! by hand, and properties over random clusters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use proptest::prelude::*;
use slipstream_base::SimTime;
use slipstream_config::cluster::Cluster;
use slipstream_twin::{Hops, Options, Outcome, RequestRecord, Sink};

use super::{cluster, run, workload};

pub(super) const MS: u64 = 1_000_000;
/// Keys and values of a token of Qwen3 8B: 2 x 36 layers x 8 heads x 128 x 2 bytes.
pub(super) const KV_BYTES: u64 = 147_456;

/// A pass takes 10 ms whatever is in it. `pools` and `more` are the file's.
pub(super) fn ten_ms(pools: &str, more: &str) -> Cluster {
    cluster(&format!(
        "[model]\npreset = \"qwen3-8b\"\n{pools}\n[engine]\nnum_gpu_blocks = 4096\n\
         max_model_len = 16384\n[engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{more}\n"
    ))
}

pub(super) const APART: &str = "[pool.p]\nrole = \"prefill\"\n[pool.d]\nrole = \"decode\"\n";

/// `count` requests at `rate` per second.
pub(super) fn load(
    count: u32,
    rate: u32,
    isl: u32,
    osl: u32,
) -> slipstream_config::workload_file::Workload {
    workload(&format!(
        "requests = {count}\n[arrival]\nkind = \"constant\"\nrate_per_s = {rate}\n\
         [[class]]\nisl = {isl}\nosl = {osl}\n"
    ))
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ended {
    pub(super) id: u64,
    pub(super) due: u64,
    pub(super) admitted: u64,
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) workers: (Option<u32>, Option<u32>),
    pub(super) tokens: u32,
    pub(super) retries: u32,
    pub(super) hops: Hops,
    pub(super) error: Option<String>,
}

#[derive(Default)]
struct Records(Vec<Ended>);

impl Sink for Records {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        let worker = |rank: Option<slipstream_base::RankId>| rank.map(|rank| rank.worker.0);
        self.0.push(Ended {
            id: r.request.id().0,
            due: r.request.due.0,
            admitted: r.admitted.0,
            first: r.first.0,
            last: r.last.0,
            workers: (worker(r.prefill_rank), worker(r.rank)),
            tokens: r.output_tokens,
            retries: r.retries,
            hops: r.hops,
            error: r.error.map(|e| e.message.to_owned()),
        });
    }
}

pub(super) fn simulate(
    cluster: &Cluster,
    load: &slipstream_config::workload_file::Workload,
    options: &Options,
) -> (Outcome, Vec<Ended>) {
    let mut records = Records::default();
    let outcome = run(cluster, load, options, &mut records);
    (outcome, records.0)
}

/// First and last token of one request of 100 tokens in and 7 out.
#[track_caller]
pub(super) fn check_one(pools: &str, more: &str, first: u64, last: u64) -> Ended {
    let (outcome, ended) = simulate(
        &ten_ms(pools, more),
        &load(1, 1, 100, 7),
        &Options::default(),
    );
    assert_eq!(outcome.cut, None);
    let one = ended.into_iter().next().unwrap();
    assert_eq!(one.error, None);
    assert_eq!((one.first, one.last), (first, last));
    assert_eq!(one.tokens, 7);
    one
}

#[test]
fn a_prompt_handed_over_costs_a_pass_and_its_bytes() {
    // Computed in a pass; its last token once more in the first pass of the answer.
    let one = check_one(APART, "", 20 * MS, 80 * MS);
    assert_eq!(one.workers, (Some(0), Some(1)));
    assert_eq!(one.hops.received.0, 0, "when the first of the two got it");
    assert_eq!(one.hops.prefilled.map(|at| at.0), Some(10 * MS));
    // 400 Gbit/s are 50 bytes per ns; each of two links takes 1 us. Pull: the answer to the
    // frontend, the request to the other worker, its query, and the transfer.
    let flows = "[network]\nmode = \"flows\"\n";
    let bytes_ns = 100 * KV_BYTES / 50;
    let pull = 20 * MS + 2_000 + 2_000 + 2_000 + bytes_ns + 2_000;
    check_one(APART, flows, pull, pull + 60 * MS);
    // Push: blocks are reserved first; then the prompt, then its KV transfer.
    let push = 20 * MS + 2_000 + bytes_ns + 2_000;
    let more = format!("{flows}[kv]\nhand_over = \"push\"\n");
    check_one(APART, &more, push, push + 60 * MS);
    // Two switches between them: four links each way that does not end at the frontend.
    let far = pull + 2 * 2_000 + 2 * 2_000;
    let more = format!("{flows}workers_per_leaf = 1\n");
    check_one(APART, &more, far, far + 60 * MS);
    // An uplink of a quarter of the interface.
    let more = format!("{flows}workers_per_leaf = 1\nuplink_bits_per_s = 100e9\n");
    let narrow = far + 3 * bytes_ns;
    check_one(APART, &more, narrow, narrow + 60 * MS);
}

#[test]
fn short_prompts_and_busy_pools_are_not_handed_over() {
    let min = "[router]\nremote_prefill_tokens_min = ";
    assert_eq!(
        check_one(APART, &format!("{min}101\n"), 10 * MS, 70 * MS).workers,
        (None, Some(1))
    );
    assert_eq!(
        check_one(APART, &format!("{min}100\n"), 20 * MS, 80 * MS).workers,
        (Some(0), Some(1))
    );
    // Four at once: the first two may queue 100 and 200 tokens, the third finds 200 before it.
    let cluster = ten_ms(APART, "[router]\nremote_prefill_queue_max = 150\n");
    let at_once = workload(
        "requests = 4\n[arrival]\nkind = \"closed\"\nconcurrency = 4\n[[class]]\nisl = 100\nosl = 2\n",
    );
    let (outcome, mut ended) = simulate(&cluster, &at_once, &Options::default());
    ended.sort_by_key(|e| e.id);
    let by: Vec<_> = ended.iter().map(|e| e.workers.0).collect();
    assert_eq!(by, [Some(0), Some(0), None, None]);
    assert_eq!(outcome.kv_transfers.times.count(), 2);
    assert_eq!(outcome.kv_transfers.bytes, 200 * KV_BYTES);
}

#[test]
fn blocks_are_held_until_there_is_room_for_them() {
    // The decode worker has 10 blocks of 16; each prompt takes 7, and an answer ends in an eighth.
    let pools = "[pool.p]\nrole = \"prefill\"\n[pool.p.engine]\nnum_gpu_blocks = 14\nmax_model_len = 160\n\
                 [pool.d]\nrole = \"decode\"\n[pool.d.engine]\nnum_gpu_blocks = 10\nmax_model_len = 160\n";
    let load = workload(
        "requests = 3\n[arrival]\nkind = \"closed\"\nconcurrency = 3\n[[class]]\nisl = 100\nosl = 5\n",
    );
    let cluster = ten_ms(pools, "");
    let (_, mut ended) = simulate(&cluster, &load, &Options::default());
    ended.sort_by_key(|e| e.id);
    // Two prompts are computed at once and held; the first answers from 10 to 60 ms. Then blocks
    // are free for the second, its held blocks are released, and the third is computed from 60 to
    // 70 ms.
    let times: Vec<_> = ended.iter().map(|e| (e.first / MS, e.last / MS)).collect();
    assert_eq!(times, [(20, 60), (70, 110), (120, 160)]);
    // With push, blocks are reserved first: the second prompt is not computed before any are free.
    let push = ten_ms(pools, "[kv]\nhand_over = \"push\"\n");
    let (_, mut ended) = simulate(&push, &load, &Options::default());
    ended.sort_by_key(|e| e.id);
    let times: Vec<_> = ended.iter().map(|e| (e.first / MS, e.last / MS)).collect();
    assert_eq!(times, [(20, 60), (80, 120), (140, 180)]);
}

#[test]
fn what_the_decode_worker_has_is_not_sent() {
    let cluster = ten_ms(APART, "[router]\nremote_prefill_tokens_min = 20\n");
    // Turn 0: 100 in, 60 out, all sent. Turn 1: 100 + 60 + 100 tokens, of which 9 blocks are there.
    let load = workload(
        "requests = 2\n[arrival]\nkind = \"constant\"\nrate_per_s = 1\n\
         [[class]]\nisl = 100\nosl = 60\n[class.session]\nturns = 2\nuser_tokens = 100\nthink_time_s = 0.5\n",
    );
    let (outcome, ended) = simulate(&cluster, &load, &Options::default());
    assert_eq!(ended.len(), 2);
    assert_eq!(outcome.kv_transfers.bytes, (100 + 260 - 144) * KV_BYTES);
}

#[test]
fn the_frontends_work_waits_for_its_cores() {
    let host = "[host]\nmode = \"ideal\"\ncpus = 1\nparse_us = 100\ntokenize_token_ns = 1000\nroute_us = 50\n\
                dispatch_us = 20\nframe_us = 30\ntoken_ns = 10_000\n";
    // 100 + 100 + 50, then 20; a pass; 30 + 10 for each frame of one token.
    let one = check_one("", host, 10_310_000, 70_310_000);
    let hops = one.hops;
    assert_eq!(hops.parsed.0, 100_000);
    assert_eq!(hops.tokenized.0, 200_000);
    assert_eq!(hops.routed.0, 250_000);
    assert_eq!((hops.dispatched.0, hops.received.0), (270_000, 270_000));
    assert_eq!(
        (hops.first_pass_end.0, hops.frame.0),
        (10_270_000, 10_270_000)
    );

    let two_at_once = workload(
        "requests = 2\n[arrival]\nkind = \"closed\"\nconcurrency = 2\n[[class]]\nisl = 100\nosl = 1\n",
    );
    for (cpus, expected) in [(1, [250, 500]), (2, [250, 250])] {
        let host = host.replace("cpus = 1", &format!("cpus = {cpus}"));
        let (_, mut ended) = simulate(&ten_ms("", &host), &two_at_once, &Options::default());
        ended.sort_by_key(|e| e.id);
        let routed: Vec<_> = ended.iter().map(|e| e.hops.routed.0 / 1000).collect();
        assert_eq!(routed, expected, "{cpus} cores");
    }
}

/// One core, one kind of work: the frontend is a queue of its own. With Poisson arrivals and work of a
/// fixed length the mean wait is that of M/D/1; a pass takes no time.
#[test]
fn the_frontend_alone_is_an_m_d_1_queue() {
    let cluster = cluster(
        "[pool.main]\nworkers = 1\n[engine]\nnum_gpu_blocks = 4096\n[engine.timing]\nkind = \"constant\"\nstep_ns = 0\n\
         [host]\nmode = \"ideal\"\ncpus = 1\nparse_us = 1000\ntokenize_token_ns = 0\nroute_us = 0\ndispatch_us = 0\n\
         frame_us = 0\ntoken_ns = 0\n",
    );
    let rho = 0.6;
    let load = workload(&format!(
        "requests = 60_000\n[arrival]\nkind = \"poisson\"\nrate_per_s = {}\n[[class]]\nisl = 20\nosl = 1\n",
        rho * 1000.0
    ));
    let outcome = run(&cluster, &load, &Options::default(), &mut ());
    let mean = outcome.totals.latencies().ttft_ms.unwrap().mean;
    let expected = 1.0 + rho / (2.0 * (1.0 - rho));
    assert!(
        (mean - expected).abs() / expected < 0.02,
        "{mean} for {expected}"
    );
}

/// One sequence at a time, whose length is geometric: with passes of 1 ms, service times of mean 20
/// that are nearly exponential, so the mean wait is nearly that of M/M/1, rho s / (1 - rho). Exactly:
/// Pollaczek and Khinchine with the variance of the geometric distribution.
#[test]
fn a_long_tailed_server_waits_as_an_m_g_1_queue() {
    let cluster = cluster(
        "[pool.main]\nworkers = 1\n[engine]\nnum_gpu_blocks = 4096\nmax_num_seqs = 1\n\
         [engine.timing]\nkind = \"constant\"\nstep_ns = 1_000_000\n",
    );
    let (rho, mean_ms) = (0.5, 20.0);
    let load = workload(&format!(
        "requests = 120_000\n[arrival]\nkind = \"poisson\"\nrate_per_s = {}\n\
         [[class]]\nisl = 20\nosl = {{ kind = \"lognormal\", mean = {mean_ms}, cv = 1.0 }}\n",
        rho / mean_ms * 1e3
    ));
    let (_, ended) = simulate(&cluster, &load, &Options::default());
    let n = ended.len() as f64;
    let tokens = |f: &dyn Fn(f64) -> f64| ended.iter().map(|e| f(e.tokens.into())).sum::<f64>() / n;
    let (s1, s2) = (tokens(&|t| t), tokens(&|t| t * t));
    let span_ms = ended.iter().map(|e| e.due).max().unwrap() as f64 / 1e6;
    let lambda = n / span_ms;
    // Its coefficient of variation is 1, as that of the exponential: the wait is that of M/M/1.
    let expected = lambda * s2 / (2.0 * (1.0 - lambda * s1));
    let wait = ended
        .iter()
        .map(|e| (e.first - e.due) as f64 / 1e6 - 1.0)
        .sum::<f64>()
        / n;
    assert!(
        (wait - expected).abs() / expected < 0.06,
        "{wait} for {expected}"
    );
    let m_m_1 = rho * mean_ms / (1.0 - rho);
    assert!(
        (wait - m_m_1).abs() / m_m_1 < 0.12,
        "{wait} for M/M/1's {m_m_1}"
    );
}

#[test]
fn messages_cross_the_network_and_tokens_stay_in_order() {
    let more = "[network]\nmode = \"flows\"\nmessages = true\nfrontend_bits_per_s = 8e6\nnic_bits_per_s = 8e9\n\
                request_token_bytes = 10\nanswer_token_bytes = 1000\n";
    // A byte a us at the frontend: 1,000 bytes there and 2 us, a pass, 1,000 back and 2 us.
    let first = 1_002_000 + 10 * MS + 1_002_000;
    check_one("", more, first, first + 60 * MS);
    // A frame takes 1 ms while the next pass ends after 10: no gap is longer than the passes.
    let slow = more.replace("answer_token_bytes = 1000", "answer_token_bytes = 20000");
    let (outcome, _) = simulate(&ten_ms("", &slow), &load(1, 1, 100, 7), &Options::default());
    let itl = outcome.totals.latencies().itl_ms.unwrap();
    // 20 ms of sending for each 10 ms of computing: frames queue, and come every 20 ms or so.
    assert!(itl.max > 10.0 && itl.count == 6, "{itl:?}");
}

/// An overloaded network: messages wait for their connection's flow, all are delivered, and no
/// faster than the network's rate.
#[test]
fn a_full_network_carries_all_that_waits_in_one_flow() {
    // 100 requests at once to one worker, 1,000 bytes each at a byte a us, 10 tokens of 100 bytes back.
    let more = "[network]\nmode = \"flows\"\nmessages = true\nfrontend_bits_per_s = 8e6\n\
                nic_bits_per_s = 8e9\nrequest_token_bytes = 10\nanswer_token_bytes = 100\n";
    let load = workload(
        "requests = 100\n[arrival]\nkind = \"closed\"\nconcurrency = 100\n[[class]]\nisl = 100\nosl = 10\n",
    );
    let cluster = ten_ms("", more);
    let (outcome, mut ended) = simulate(&cluster, &load, &Options::default());
    assert_eq!((outcome.cut, ended.len()), (None, 100));
    ended.sort_by_key(|e| e.id);
    // The first leaves alone; the 99 waiting ones arrive together, 99 ms and a latency later.
    let both_ways = 2 * 2_000;
    assert_eq!(
        ended[0].first - ended[0].due,
        MS + 10 * MS + MS / 10 + both_ways
    );
    let second: Vec<u64> = ended[1..].iter().map(|e| e.hops.received.0).collect();
    assert!(second.iter().all(|&at| at == second[0]), "{second:?}");
    assert_eq!(second[0], 100 * MS + both_ways);
}

#[test]
fn a_network_that_never_catches_up_ends_the_run_and_says_what_to_change() {
    // A frame of a token takes 100 ms, a pass 10.
    let more = "[network]\nmode = \"flows\"\nmessages = true\nfrontend_bits_per_s = 8e5\n\
                answer_token_bytes = 10000\n";
    let options = Options {
        messages_max: 500,
        ..Options::default()
    };
    let (outcome, _) = simulate(&ten_ms("", more), &load(4, 100, 16, 2_000), &options);
    let cut = outcome.cut.unwrap();
    assert!(
        cut.contains("unstable: 501 messages under way on the network"),
        "{cut}"
    );
    assert!(cut.contains("`network.frontend_bits_per_s`"), "{cut}");
    // With room for them all the run ends by itself.
    let (outcome, ended) = simulate(
        &ten_ms("", more),
        &load(4, 100, 16, 200),
        &Options::default(),
    );
    assert_eq!((outcome.cut, ended.len()), (None, 4));
}

#[test]
fn news_of_blocks_is_late() {
    // The first request still runs on the worker with its blocks when the second arrives, 100 ms
    // after it. The second goes there if the router has the blocks, which a pass that ended at 10
    // ms stored.
    let load = workload(
        "requests = 2\n[arrival]\nkind = \"constant\"\nrate_per_s = 10\n\
         [[class]]\nisl = 400\nosl = 50\n[[class.prefix]]\nbranches = 1\ntokens = 320\n",
    );
    for (lag_ms, second) in [(0, 0), (90, 0), (91, 1)] {
        let more =
            format!("[router]\npolicy = \"kv\"\nprefill_weight = 10\nkv_lag_ms = {lag_ms}\n");
        let cluster = ten_ms("[pool.main]\nworkers = 2\n", &more);
        let (_, mut ended) = simulate(&cluster, &load, &Options::default());
        ended.sort_by_key(|e| e.id);
        let workers: Vec<_> = ended.iter().map(|e| e.workers.1).collect();
        assert_eq!(workers, [Some(0), Some(second)], "{lag_ms} ms late");
    }
}

/// Requests every 5 ms, in turn on two workers, 10 ms per pass, 10 tokens each.
fn two_workers(resumes_max: u32, more: &str) -> Cluster {
    cluster(&format!(
        "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = 2\n\
         [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n\
         [engine]\nnum_gpu_blocks = 4096\nstartup_s = 0.1\n\
         [router]\npolicy = \"round_robin\"\nresumes_max = {resumes_max}\n{more}"
    ))
}

/// Worker 1 is lost at 1 s and back at 1.2 s, and takes requests 0.1 s later.
const CRASH: &str = "[[event]]\nkind = \"crash\"\nat_s = 1.0021\nuntil_s = 1.2\nworker = 1\n";
const CRASH_NS: u64 = 1_002_100_000;

/// Without the crash these would have been on worker 1 at that moment, with and without a token.
fn at_the_crash() -> (BTreeSet<u64>, BTreeSet<u64>) {
    let calm = two_workers(0, "");
    let (_, before) = simulate(&calm, &load(400, 200, 50, 10), &Options::default());
    let there = |e: &&Ended| e.workers.1 == Some(1) && e.due <= CRASH_NS && e.last > CRASH_NS;
    let begun = |e: &&Ended| e.first <= CRASH_NS;
    let (begun, waiting): (Vec<&Ended>, Vec<&Ended>) = before.iter().filter(there).partition(begun);
    assert!(!begun.is_empty() && !waiting.is_empty());
    let ids = |of: Vec<&Ended>| of.iter().map(|e| e.id).collect();
    (ids(begun), ids(waiting))
}

#[test]
fn a_crash_pauses_what_had_begun_there_and_loses_nothing() {
    let faulty = two_workers(3, CRASH);
    let (outcome, ended) = simulate(&faulty, &load(400, 200, 50, 10), &Options::default());
    let (begun, waiting) = at_the_crash();
    assert_eq!((outcome.cut, outcome.totals.requests.failed), (None, 0));
    for e in &ended {
        assert_eq!((&e.error, e.tokens), (&None, 10), "{e:?}");
        let moved = begun.contains(&e.id) || waiting.contains(&e.id);
        assert_eq!(e.retries, u32::from(moved), "{e:?}");
        if begun.contains(&e.id) {
            assert!(e.first <= CRASH_NS && e.last > CRASH_NS, "{e:?}");
            assert_eq!(e.workers.1, Some(0), "{e:?}");
            // Nine gaps of 10 ms, of which one is longer.
            let pause = e.last - e.first - 8 * 10 * MS;
            // Up to a pass was lost; at the other worker up to one is under way, the next one is scheduled, and
            // one computes the rest.
            assert!((10 * MS..=40 * MS).contains(&pause), "{e:?}");
        }
    }
    let times = &outcome.resumes.times;
    assert_eq!(times.count(), begun.len() as u64);
    let most = times.percentiles().unwrap().max;
    assert!((10.0..=40.0).contains(&most), "{most} ms");
    // 50 tokens of prompt, and one to nine of the answer.
    let each = outcome.resumes.tokens / times.count();
    assert!((51..=59).contains(&each), "{each}");
    let gaps = outcome.totals.latencies().itl_ms.unwrap();
    assert_eq!(
        gaps.count,
        400 * 9,
        "one fewer than tokens, the pause among them"
    );
    assert!(gaps.max >= most * 0.999, "{gaps:?}");
    // Counted token by token it is the same.
    let options = Options {
        each_token: true,
        jump: false,
        ..Options::default()
    };
    let (plain, _) = simulate(&faulty, &load(400, 200, 50, 10), &options);
    assert_eq!(plain.digest, outcome.digest);
    assert_eq!(plain.totals.latencies().itl_ms.unwrap().count, gaps.count);
    let plain = plain.resumes.times;
    assert_eq!(plain.count(), times.count());
    assert_eq!(plain.percentiles().unwrap().max, most);
}

/// One request on two workers: the end of both, and of prefill and decode workers at each stage of the rest.
#[test]
fn an_answer_survives_crash_after_crash_within_its_limit_and_while_a_worker_is_left() {
    let crash = |at_s: f64, worker: u32, until_s: f64| {
        format!(
            "[[event]]\nkind = \"crash\"\nat_s = {at_s}\nuntil_s = {until_s}\nworker = {worker}\n"
        )
    };
    let one = |pools: &str, more: &str| {
        let cluster = ten_ms(pools, more);
        let (outcome, ended) = simulate(&cluster, &load(1, 1, 100, 20), &Options::default());
        assert_eq!(outcome.cut, None);
        (
            outcome.resumes.times.count(),
            ended.into_iter().next().unwrap(),
        )
    };
    let mains = "[pool.main]\nworkers = 2\n";
    // 5 tokens; the rest is under way when the second worker is lost, too, and the first is back.
    let twice = crash(0.055, 0, 0.06) + &crash(0.058, 1, 10.0);
    let (resumed, e) = one(
        mains,
        &format!("[router]\npolicy = \"round_robin\"\n{twice}"),
    );
    assert_eq!(e.tokens, 5, "no worker was ready at 58 ms: {e:?}");
    assert!(e.error.is_some() && resumed == 0);
    let twice = crash(0.055, 0, 0.06) + &crash(0.093, 1, 10.0);
    let (resumed, e) = one(
        mains,
        &format!("[router]\npolicy = \"round_robin\"\n{twice}"),
    );
    assert_eq!(
        (e.tokens, resumed, e.retries, &e.error),
        (20, 2, 2, &None),
        "{e:?}"
    );
    let limit = format!("[router]\npolicy = \"round_robin\"\nresumes_max = 1\n{twice}");
    let (resumed, e) = one(mains, &limit);
    assert_eq!((resumed, e.retries, e.workers.1), (1, 1, Some(1)));
    assert_eq!(e.tokens, 5 + 3, "{e:?}");
    assert!(e.error.as_deref().unwrap().contains("w1"), "{e:?}");
    // Prefill workers 0 and 1, decode workers 2 and 3, and transfers of some milliseconds.
    let apart =
        "[pool.p]\nrole = \"prefill\"\nworkers = 2\n[pool.d]\nrole = \"decode\"\nworkers = 2\n";
    let network = "[network]\nmode = \"flows\"\nnic_bits_per_s = 1e10\n";
    for order in ["pull", "push"] {
        let base = format!("[kv]\nhand_over = \"{order}\"\n{network}");
        let (none, calm) = one(apart, &base);
        assert_eq!((none, calm.tokens), (0, 20));
        let decode = calm.workers.1.unwrap();
        for (second, after_ms) in [
            (0, 2),
            (1, 2),
            (0, 11),
            (1, 11),
            (2, 11),
            (3, 11),
            (2, 30),
            (3, 30),
        ] {
            let at_ms = (calm.first + 45 * MS) / MS;
            let at = |ms: u64| ms as f64 / 1e3;
            let again = at_ms + after_ms;
            if second == decode {
                continue; // it is down already
            }
            let more = format!(
                "{base}{}{}",
                crash(at(at_ms), decode, at(at_ms + 1)),
                crash(at(again), second, 10.0)
            );
            let (resumed, e) = one(apart, &more);
            assert_eq!(
                (e.tokens, &e.error),
                (20, &None),
                "{order} {second} {after_ms}: {e:?}"
            );
            assert!(resumed >= 1);
            assert_eq!(e.first, calm.first);
        }
    }
}

/// The result of each request, by id.
fn fates(ended: &[Ended]) -> BTreeMap<u64, (&Option<String>, u32)> {
    ended
        .iter()
        .map(|e| (e.id, (&e.error, e.retries)))
        .collect()
}

#[test]
fn a_crash_loses_what_had_begun_there_and_nothing_else() {
    let faulty = two_workers(0, CRASH);
    let (outcome, ended) = simulate(&faulty, &load(400, 200, 50, 10), &Options::default());
    assert_eq!(outcome.cut, None);
    assert_eq!(ended.len(), 400, "every request ends once");
    let crash = CRASH_NS;
    let (begun, waiting) = at_the_crash();
    for (id, (error, retries)) in fates(&ended) {
        assert_eq!(
            error.is_some(),
            begun.contains(&id),
            "request {id}: {error:?}"
        );
        assert_eq!(retries, u32::from(waiting.contains(&id)), "request {id}");
    }
    // Its record has the time of the loss, and the tokens that had arrived: one per pass of 10 ms.
    for e in ended.iter().filter(|e| e.error.is_some()) {
        assert_eq!((e.workers, e.last), ((None, Some(1)), crash), "{e:?}");
        assert_eq!(
            u64::from(e.tokens),
            (crash - e.first) / (10 * MS) + 1,
            "{e:?}"
        );
    }
    let lost = &outcome.totals.errors[slipstream_twin::WORKER_LOST];
    assert_eq!(lost.count, begun.len() as u64);
    assert!(lost.example.contains("w1"), "{}", lost.example);
    // No request is sent to it before it is ready.
    for e in ended.iter().filter(|e| e.workers.1 == Some(1)) {
        assert!(e.last <= crash || e.due >= 1_300 * MS, "{e:?}");
    }
    assert!(
        ended
            .iter()
            .any(|e| e.workers.1 == Some(1) && e.due >= 1_300 * MS)
    );
}

/// Frames take 25 ms through the frontend, so up to three of a request's tokens are in transit when
/// its worker is lost. They never arrive: a request whose tokens were all in transit is retried
/// elsewhere, because the frontend has nothing of it.
#[test]
fn tokens_under_way_when_a_worker_vanishes_have_not_come() {
    let crash = 1_002_100_000;
    let cluster = ten_ms(
        "[pool.main]\nworkers = 2\n[router]\npolicy = \"round_robin\"\nresumes_max = 0\n\
         [host]\nmode = \"ideal\"\ncpus = 4096\nparse_us = 0\ntokenize_token_ns = 0\nroute_us = 0\n\
         dispatch_us = 0\nframe_us = 25000\ntoken_ns = 0\n\
         [[event]]\nkind = \"crash\"\nat_s = 1.0021\nworker = 1\n",
        "",
    );
    let (outcome, ended) = simulate(&cluster, &load(400, 200, 50, 10), &Options::default());
    assert_eq!(outcome.cut, None);
    let lost: Vec<&Ended> = ended.iter().filter(|e| e.error.is_some()).collect();
    assert!(lost.iter().any(|e| e.tokens > 2));
    for e in lost {
        let tokens = (crash - e.first) / (10 * MS) + 1;
        assert_eq!(
            (u64::from(e.tokens), e.workers.1),
            (tokens, Some(1)),
            "{e:?}"
        );
    }
    // At most 25 ms passed between their first pass's end and the crash.
    let again: Vec<&Ended> = ended.iter().filter(|e| e.retries > 0).collect();
    assert!(!again.is_empty());
    for e in again {
        assert_eq!((e.error.as_deref(), e.workers.1), (None, Some(0)), "{e:?}");
        assert!(e.due < crash && e.first > crash, "{e:?}");
    }
}

#[test]
fn a_prompt_survives_the_worker_that_computed_it() {
    let pools = "[pool.p]\nrole = \"prefill\"\nworkers = 2\n[pool.d]\nrole = \"decode\"\n";
    for (at_s, expected) in [
        // During the prefill: again, elsewhere, from the start.
        (0.005, (Some(1), 5 * MS + 20 * MS, 1)),
        // After the transfer: nothing is lost.
        (0.015, (Some(0), 20 * MS, 0)),
    ] {
        let more = format!("[[event]]\nkind = \"crash\"\nat_s = {at_s}\nworker = 0\n");
        let (outcome, ended) = simulate(
            &ten_ms(pools, &more),
            &load(1, 1, 100, 7),
            &Options::default(),
        );
        assert_eq!(outcome.totals.requests.failed, 0);
        let one = &ended[0];
        assert_eq!(
            (one.workers.0, one.first, one.retries),
            expected,
            "crash at {at_s}"
        );
    }
    // The network is slow; the source is lost during the transfer.
    let more = "[network]\nmode = \"flows\"\nnic_bits_per_s = 1e9\n[[event]]\nkind = \"crash\"\nat_s = 0.05\nworker = 0\n";
    let (outcome, ended) = simulate(
        &ten_ms(pools, more),
        &load(1, 1, 100, 7),
        &Options::default(),
    );
    assert_eq!((outcome.totals.requests.failed, ended[0].retries), (0, 1));
    assert_eq!(ended[0].workers, (Some(1), Some(2)));
    assert_eq!(outcome.kv_transfers.times.count(), 1, "one came");
}

#[test]
fn a_straggler_is_slow_while_it_lasts() {
    let more =
        "[[event]]\nkind = \"slow\"\nat_s = 0.025\nuntil_s = 0.055\nworker = 0\nfactor = 2.5\n";
    // Passes of 10 ms end at 10, 20 and 30; then of 25 at 55 (the event is over) and of 10 to the end.
    check_one("", more, 10 * MS, (30 + 25 + 10 * 3) * MS);
}

#[test]
fn a_link_that_is_down_holds_hand_overs_up() {
    let down = "[network]\nmode = \"flows\"\nhop_latency_us = 0\n\
                [[event]]\nkind = \"link\"\nat_s = 0.001\nuntil_s = 0.5\nworker = 1\nshare = 0\n";
    let bytes_ns = 100 * KV_BYTES / 50;
    check_one(
        APART,
        down,
        500 * MS + bytes_ns + 10 * MS,
        570 * MS + bytes_ns,
    );
    // Forever: the run reports it.
    let stuck = down.replace("until_s = 0.5\n", "");
    let (outcome, _) = simulate(
        &ten_ms(APART, &stuck),
        &load(1, 1, 100, 7),
        &Options::default(),
    );
    assert!(outcome.cut.unwrap().contains("stuck: 1 request under way"));
}

#[test]
fn a_draining_worker_ends_what_it_has() {
    let more = "[router]\npolicy = \"round_robin\"\n\
                [[event]]\nkind = \"drain\"\nat_s = 0.5\nuntil_s = 1.0\nworker = 0\n";
    let cluster = ten_ms("[pool.main]\nworkers = 2\n", more);
    let (outcome, ended) = simulate(&cluster, &load(300, 200, 50, 10), &Options::default());
    assert_eq!(outcome.totals.requests.failed, 0);
    for e in &ended {
        let drains = e.due >= 500 * MS && e.due < 1_000 * MS;
        assert!(!drains || e.workers.1 == Some(1));
    }
    assert!(
        ended
            .iter()
            .any(|e| e.workers.1 == Some(0) && e.due < 500 * MS && e.last > 500 * MS)
    );
}

#[test]
fn clients_try_again_when_nobody_is_there() {
    let more = "[[event]]\nkind = \"crash\"\nat_s = 0\nuntil_s = 2.5\nworker = 0\n";
    for (retries, answered) in [(0, false), (2, false), (3, true)] {
        let options = Options {
            retries,
            ..Options::default()
        };
        let (outcome, ended) = simulate(&ten_ms("", more), &load(1, 1, 100, 7), &options);
        let requests = outcome.totals.requests;
        assert_eq!(
            (requests.succeeded == 1, requests.retries),
            (answered, retries.into())
        );
        // A second between tries: the fourth, at 3 s, finds it ready. Its wait counts.
        if answered {
            assert_eq!(ended[0].first, 3_010 * MS);
        } else {
            assert!(
                ended[0]
                    .error
                    .as_deref()
                    .unwrap()
                    .contains("no worker is ready")
            );
        }
    }
}

#[test]
fn what_does_not_fit_into_the_model_is_refused_as_by_the_server() {
    // 16,384 tokens fit, one more does not, however it is divided. Both queues of events refuse it.
    for (isl, osl, fits) in [
        (16_000, 384, true),
        (16_000, 385, false),
        (16_383, 1, true),
        (16_384, 1, false),
        (20_000, 10, false),
    ] {
        for one_queue in [false, true] {
            let options = Options {
                one_queue,
                ..Options::default()
            };
            for pools in ["", APART] {
                let (outcome, ended) =
                    simulate(&ten_ms(pools, ""), &load(2, 1, isl, osl), &options);
                for e in &ended {
                    let error = e.error.as_deref().unwrap_or_default();
                    assert_eq!(error.is_empty(), fits, "{isl} + {osl}: {error}");
                    assert_eq!(e.tokens, if fits { osl } else { 0 });
                    assert!(fits || error.contains("16384") && error.contains("max_model_len"));
                }
                assert_eq!(ended.len(), 2);
                let refused = outcome.totals.errors.get(slipstream_twin::REFUSED);
                assert_eq!(refused.is_some(), !fits);
            }
        }
    }
}

#[test]
fn requests_wait_in_turn_while_all_are_busy_and_the_rest_is_refused() {
    // A worker with 150 prompt tokens before it is busy: two prompts of 100. Five at once: two go, two
    // wait for the first tokens at 10 ms and go then, one is refused. The pass that begins at 10 ms was
    // scheduled before they came, so theirs is the one after it.
    let at_once = workload(
        "requests = 5\n[arrival]\nkind = \"closed\"\nconcurrency = 5\n[[class]]\nisl = 100\nosl = 2\n",
    );
    let cluster = |queue_max: u32| {
        ten_ms(
            "",
            &format!("[router]\nbusy_prefill_tokens = 150\nqueue_max = {queue_max}\n"),
        )
    };
    let (outcome, mut ended) = simulate(&cluster(2), &at_once, &Options::default());
    assert_eq!(outcome.cut, None);
    ended.sort_by_key(|e| e.id);
    let firsts: Vec<_> = ended[..4].iter().map(|e| e.first / MS).collect();
    assert_eq!(firsts, [10, 10, 30, 30]);
    assert!(ended[4].error.as_deref().unwrap().contains("busy"));
    let failed = |queue_max| {
        let (outcome, _) = simulate(&cluster(queue_max), &at_once, &Options::default());
        outcome.totals.requests.failed
    };
    assert_eq!((failed(0), failed(1), failed(3)), (3, 2, 0));
}

/// A cluster with all features, and a load.
fn scenario() -> impl Strategy<Value = (Cluster, slipstream_config::workload_file::Workload)> {
    let policies = vec![
        "kv",
        "round_robin",
        "least_requests",
        "power_of_two",
        "least_tokens",
    ];
    let events = prop::collection::vec((0u8..10, 1u32..1500, 1u32..800, 0u32..5, 0u8..4), 0..5);
    (
        (0u32..3, 1u32..3, 40u32..300, 1u32..16, prop::sample::select(policies)),
        (any::<bool>(), 0u8..6, 0u8..5, 0u32..60, 0u32..40),
        events,
        (5u32..300, any::<bool>(), 1u32..300, 1u32..80, 1u32..3, any::<u32>()),
    )
        .prop_map(|((prefill, workers, blocks, seqs, policy), (push, network, host, lag_ms, view_ms), events, load)| {
            let (rate, closed, isl, osl, turns, seed) = load;
            let total = prefill + workers;
            let pools = match prefill {
                0 => format!("[pool.main]\nworkers = {workers}\n"),
                n => format!("[pool.p]\nrole = \"prefill\"\nworkers = {n}\n[pool.d]\nrole = \"decode\"\nworkers = {workers}\n"),
            };
            let slows = events.iter().any(|(kind, ..)| *kind == 3);
            let mode = match network {
                0 => "mode = \"none\"",
                // Large ones, and few requests below, as each costs events.
                4 | 5 if !slows => "mode = \"packets\"\npacket_bytes = 65000",
                _ => "mode = \"flows\"",
            };
            let requests = if mode.contains("packets") { 12 } else { 80 };
            let pipeline = if seed % 4 == 1 { "pipeline_parallel_size = 2\npipeline_latency_us = 20\n" } else { "" };
            let (lora, adapters) = if seed % 3 == 1 {
                ("[engine.lora]\nmax_loras = 1\nmax_cpu_loras = 2\nload_ms = 7\nactivate_ms = 2\n", "adapters = [\"a\", \"b\", \"c\"]")
            } else {
                ("", "")
            };
            let mut text = format!(
                "[model]\npreset = \"qwen3-8b\"\n{pools}{lora}[engine]\nblock_size = 16\nnum_gpu_blocks = {blocks}\n\
                 max_model_len = 600\nmax_num_seqs = {seqs}\nmax_num_batched_tokens = 256\nstartup_s = 0.05\n{pipeline}\
                 [engine.timing]\nkind = \"roofline\"\ngpu = \"h100-sxm\"\n\
                 [router]\npolicy = \"{policy}\"\nkv_lag_ms = {lag_ms}\nview_interval_ms = {view_ms}\nremote_prefill_tokens_min = 64\nbusy_prefill_tokens = {}\nqueue_max = 5\n\
                 [network]\n{mode}\nnic_bits_per_s = 1e10\nfrontend_bits_per_s = 1e10\nmessages = {}\n\
                 [host]\nmode = \"{}\"\ncpus = 2\n[kv]\nhand_over = \"{}\"\n",
                if host == 2 { 400 } else { 0 },
                (network == 2 || network == 5) && host < 3,
                match host {
                    1 => "ideal",
                    3 => "threads\"\nbackground = 2\ntokenizers = 1\nstep_us = 800\nscheduler = \"eevdf",
                    4 => "threads\"\nbackground = 1\nfrontends = 2\nconnector_us = 90\nscheduler = \"slipstream",
                    _ => "none",
                },
                if push { "push" } else { "pull" },
            );
            for (kind, at, length, worker, share) in events {
                let (at, until) = (f64::from(at) / 1e3, f64::from(at + length) / 1e3);
                let worker = worker % total;
                let mut of = format!("worker = {worker}\n");
                let mut until = format!("until_s = {until}\n");
                match kind {
                    7 => of.clear(),
                    8 => of = format!("workers = [{worker}]\n"),
                    9 => (of, until) = (String::new(), String::new()),
                    _ => {}
                }
                let kind = match kind {
                    0 => "kind = \"crash\"".to_owned(),
                    1 => "kind = \"drain\"".to_owned(),
                    2 => format!("kind = \"slow\"\nfactor = {}", 1 + share),
                    3 => format!("kind = \"link\"\nshare = {}", f64::from(share) / 4.0),
                    4 => "kind = \"gpu\"\ndetect_s = 0.0005".to_owned(),
                    5 => format!("kind = \"kv_loss\"\nshare = {}", f64::from(share + 1) / 4.0),
                    6 => format!("kind = \"kv_late\"\ndelay_ms = {}", 20 * share),
                    7 => "kind = \"frontend\"".to_owned(),
                    8 => format!("kind = \"partition\"\npeer_deadline_s = {}", f64::from(share) / 5.0),
                    _ => format!("kind = \"upgrade\"\ndrain_timeout_s = {}", f64::from(share) / 20.0),
                };
                text.extend(["[[event]]\n", &kind, &format!("\nat_s = {at}\n"), &until, &of]);
            }
            let arrival = if closed {
                format!("kind = \"closed\"\nconcurrency = {}", 1 + rate / 10)
            } else {
                format!("kind = \"poisson\"\nrate_per_s = {rate}")
            };
            let workload = workload(&format!(
                "seed = {seed}\nrequests = {requests}\n[arrival]\n{arrival}\n\
                 [[class]]\n{adapters}\nisl = {{ kind = \"uniform\", min = 1, max = {isl} }}\n\
                 osl = {{ kind = \"uniform\", min = 1, max = {osl} }}\n\
                 [class.session]\nturns = {turns}\nthink_time_s = 0.05\n"
            ));
            (cluster(&text), workload)
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// With pools, network, host, delayed cache state and faults: jumps, processing each token and
    /// caches by deltas change nothing, a run repeats, every request ends once, and every token has
    /// its gap.
    #[test]
    fn jumps_change_nothing_whatever_is_modelled((cluster, workload) in scenario()) {
        let with = |jump: bool, each_token: bool, feed_index: bool| {
            let options = Options { jump, each_token, feed_index, retries: 2, time_max: SimTime(600_000 * MS), ..Options::default() };
            simulate(&cluster, &workload, &options)
        };
        let ((jumped, ended), (single, one_by_one), (each, _)) =
            (with(true, false, false), with(false, false, false), with(true, true, true));
        prop_assert_eq!(single.jumped, 0);
        for other in [&single, &each] {
            prop_assert_eq!(jumped.digest, other.digest);
            prop_assert_eq!(jumped.passes, other.passes);
            prop_assert_eq!(jumped.ended_at, other.ended_at);
            prop_assert_eq!(jumped.engine, other.engine);
            prop_assert_eq!(&jumped.cut, &other.cut);
            prop_assert_eq!(jumped.totals.requests, other.totals.requests);
            prop_assert_eq!(jumped.totals.latencies(), other.totals.latencies());
            prop_assert_eq!(jumped.kv_transfers.bytes, other.kv_transfers.bytes);
        }
        let key = |e: &Ended| (e.id, e.first, e.last);
        let sorted = |mut all: Vec<Ended>| { all.sort_by_key(key); all };
        let ended = sorted(ended);
        prop_assert_eq!(&ended, &sorted(one_by_one));
        prop_assert_eq!(&jumped.cut, &None);
        let ids: BTreeSet<u64> = ended.iter().map(|e| e.id).collect();
        prop_assert_eq!(ids.len(), ended.len(), "once each");
        let requests = jumped.totals.requests;
        prop_assert_eq!(requests.sent, ended.len() as u64);
        prop_assert_eq!(requests.sent, requests.succeeded + requests.failed);
        let answered: Vec<_> = ended.iter().filter(|e| e.error.is_none()).collect();
        let tokens: u64 = answered.iter().map(|e| u64::from(e.tokens)).sum();
        prop_assert_eq!(tokens, jumped.totals.tokens().output);
        for e in &answered {
            let h = &e.hops;
            let in_order = [e.due, h.parsed.0, h.tokenized.0, h.routed.0, h.dispatched.0, h.received.0, h.first_pass_end.0, e.first, e.last];
            prop_assert!(in_order.is_sorted(), "{:?}", e);
        }
        if cluster.events.is_empty() {
            let gaps = jumped.totals.latencies().itl_ms.map_or(0, |p| p.count);
            prop_assert_eq!(gaps, tokens - requests.succeeded);
        }
    }
}

/// Drafts that are always accepted divide the steps of an answer by their length; such as are never accepted change
/// nothing but the time that they take.
#[test]
fn drafts_are_verified_in_fewer_steps() {
    let load = workload(
        "requests = 3\nisl = 100\nosl = 42\n[arrival]\nkind = \"constant\"\nrate_per_s = 0.5\n",
    );
    let with = |more: &str| {
        cluster(&format!(
            "[engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{more}\n"
        ))
    };
    let drafted = |rate: f64| {
        with(&format!(
            "[engine.speculation]\nnum_speculative_tokens = 3\nmethod = \"mtp\"\n\
             acceptance = [{rate:?}, {rate:?}, {rate:?}]\ndraft_us = 2000\n"
        ))
    };
    let (plain, _) = simulate(&with(""), &load, &Options::default());
    assert_eq!(plain.engine.drafts, None);
    // The prompt, and 41 tokens one by one or four at a time.
    for (rate, steps, accepted) in [(0.0, 42, 0.0), (1.0, 12, 99.0)] {
        let (outcome, ended) = simulate(&drafted(rate), &load, &Options::default());
        for request in &ended {
            assert_eq!(request.last - request.due, steps * 12 * MS, "{rate}");
            assert_eq!(request.tokens, 42);
        }
        let engine = outcome.engine;
        assert_eq!(engine.accepted_tokens, Some(accepted));
        assert_eq!(
            engine.draft_tokens,
            engine.drafts.map(|drafts| 3.0 * drafts)
        );
        // An event per step, as live clients see it.
        let gaps = outcome.totals.latencies().itl_ms.unwrap();
        assert_eq!(gaps.count, 3 * (steps - 1));
        assert!((gaps.p50 - 12.0).abs() < 0.2, "{}", gaps.p50);
    }
}

/// Sessions of two adapters in turn, of which the GPU holds one and host memory both: each first use is loaded, and
/// copied to the GPU; later ones are copied again.
#[test]
fn adapters_are_loaded_by_their_first_requests() {
    let load = |adapters: &str| {
        workload(&format!(
            "requests = 60\nisl = 100\nosl = 2\n{adapters}\n[arrival]\nkind = \"constant\"\nrate_per_s = 0.5\n"
        ))
    };
    let one = |more: &str| {
        cluster(&format!(
            "[engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{more}\n"
        ))
    };
    let lora = "[engine.lora]\nmax_loras = 1\nmax_cpu_loras = 2\nload_ms = 300\nactivate_ms = 15\n";
    let two = "adapters = [\"sql\", \"chat\"]";
    // The model itself, and adapters without limits.
    for (cluster, load) in [(one(lora), load("")), (one(""), load(two))] {
        let (_, ended) = simulate(&cluster, &load, &Options::default());
        assert!(ended.iter().all(|r| r.first - r.due == 10 * MS));
    }
    let (_, ended) = simulate(&one(lora), &load(two), &Options::default());
    let waits: Vec<u64> = ended.iter().map(|r| (r.first - r.due) / MS).collect();
    let count = |ms: u64| waits.iter().filter(|&&wait| wait == ms).count();
    let (loaded, copied, there) = (count(325), count(25), count(10));
    assert_eq!((loaded, loaded + copied + there), (2, 60), "{waits:?}");
    assert!(copied > 10 && there > 10, "{waits:?}");
    // One adapter is loaded once.
    let (_, ended) = simulate(
        &one(lora),
        &load("adapters = [\"sql\"]"),
        &Options::default(),
    );
    assert_eq!(ended[0].first - ended[0].due, 325 * MS);
    assert!(ended[1..].iter().all(|r| r.first - r.due == 10 * MS));
}

/// A request with two images is as late as their encoder takes, on one thread or several.
#[test]
fn images_are_encoded_before_their_prompts() {
    let load = |images: &str| {
        workload(&format!(
            "requests = 40\nisl = 100\nosl = 3\n{images}\n[arrival]\nkind = \"constant\"\nrate_per_s = 5\n"
        ))
    };
    let one = |more: &str| {
        cluster(&format!(
            "[engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n[pool.main]\nworkers = 2\n\
             [router]\npolicy = \"round_robin\"\n{more}\n"
        ))
    };
    let encoder = "[engine.encoder]\nenabled = true\ntoken_us = 20\ninput_us = 500\n";
    let images = "images_per_request = 2\nimage_tokens = 1000\n";
    let waits = |cluster: &Cluster, load: &_, threads: u32| {
        let options = Options {
            threads,
            ..Options::default()
        };
        let (_, ended) = simulate(cluster, load, &options);
        assert_eq!(ended.len(), 40);
        let waits: BTreeSet<u64> = ended.iter().map(|r| (r.first - r.due) / 1_000).collect();
        waits.into_iter().collect::<Vec<u64>>()
    };
    assert_eq!(waits(&one(""), &load(images), 1), [10_000]);
    assert_eq!(waits(&one(encoder), &load(""), 1), [10_000]);
    for threads in [1, 2] {
        assert_eq!(waits(&one(encoder), &load(images), threads), [51_000]);
    }
    // One image per step: the other one has to wait for the next.
    let narrow = format!("{encoder}max_num_encoder_input_tokens = 1500\n");
    assert_eq!(waits(&one(&narrow), &load(images), 1), [61_000]);
}

/// Two prompts that one GPU cache cannot hold together, in turns, with host memory for both: from the second time
/// on all of a prompt's blocks but the last come from host memory, in the time of their bytes.
#[test]
fn prompts_that_the_gpu_evicted_come_from_host_memory() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let mut lines = String::new();
    for i in 0..6 {
        let first = 100 * (i % 2);
        let (at, second) = (1_000 * i, first + 1);
        writeln!(
            lines,
            r#"{{"timestamp": {at}, "input_length": 1024, "output_length": 2, "hash_ids": [{first}, {second}]}}"#
        )
        .unwrap();
    }
    std::fs::write(&trace, lines).unwrap();
    let load = workload(&format!("[trace]\nfile = \"{}\"\n", trace.display()));
    let one = |more: &str| {
        cluster(&format!(
            "[model]\npreset = \"qwen3-8b\"\n[engine]\nnum_gpu_blocks = 65\nmax_model_len = 1040\n\
             [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{more}\n"
        ))
    };
    let (without, _) = simulate(&one(""), &load, &Options::default());
    assert_eq!(without.engine.host_hit_tokens, None);
    assert_eq!(without.engine.prefix_hit_tokens, Some(0.0));
    // All 63 blocks in 10.5 ms.
    let rate = 63.0 * 16.0 * KV_BYTES as f64 / 0.0105;
    let tier = format!("[engine.host_tier]\ngib = 1\nbytes_per_s = {rate:.1}\n");
    let (with, ended) = simulate(&one(&tier), &load, &Options::default());
    assert_eq!(with.engine.host_hit_tokens, Some(4.0 * 63.0 * 16.0));
    assert_eq!(with.totals.requests.failed, 0);
    for (i, request) in ended.iter().enumerate() {
        // 10.5 ms of load end in the eleventh poll.
        let wait = if i < 2 { 0 } else { 11 * MS };
        assert_eq!(request.first - request.due, wait + 10 * MS, "{i}");
    }
    // Host memory has room for one of the prompts; the other one is on the disk.
    let block = 16.0 * KV_BYTES as f64;
    let tiers = format!(
        "[engine.host_tier]\ngib = {}\nbytes_per_s = {rate:.1}\n\
         [engine.disk_tier]\ngib = 1\nbytes_per_s = {:.1}\nlatency_us = 250\n",
        64.5 * block / (1_u64 << 30) as f64,
        63.0 * block / 0.0315
    );
    let (with, ended) = simulate(&one(&tiers), &load, &Options::default());
    assert_eq!(with.engine.disk_hit_tokens, Some(4.0 * 63.0 * 16.0));
    assert_eq!(with.engine.host_hit_tokens, Some(0.0));
    for (i, request) in ended.iter().enumerate() {
        // 0.25 ms, 31.5 ms of reads, and the copy of the last block.
        let wait = if i < 2 { 0 } else { 32 * MS };
        assert_eq!(request.first - request.due, wait + 10 * MS, "{i}");
    }
}
