//! Hosts with threads under a CPU scheduler: times worked out by hand, and what schedulers and CPUs change.

use slipstream_config::cluster::Cluster;
use slipstream_twin::{Options, Outcome};

use super::model::{APART, MS, load, simulate, ten_ms};
use super::{run, workload};

/// Keys of a host whose idle CPUs wake in 10 us.
const HOST: &str = "[host]\nmode = \"threads\"\nwake_idle_us = 10\nparse_us = 100\ntokenize_token_ns = 1000\n\
                    route_us = 50\ndispatch_us = 20\nframe_us = 30\ntoken_ns = 10_000\n";
const SCHEDULERS: [&str; 2] = ["eevdf", "slipstream"];

fn host(scheduler: &str, cpus: u32, more: &str) -> Cluster {
    let host = format!("{HOST}scheduler = \"{scheduler}\"\ncpus = {cpus}\n{more}");
    ten_ms("", &host)
}

/// Requests of 100 tokens in and 7 out.
fn check_second(cluster: &Cluster, expected: [u64; 7]) {
    let (outcome, ended) = simulate(cluster, &load(2, 1, 100, 7), &Options::default());
    assert_eq!(outcome.cut, None);
    // The threads have started by then, and wait.
    let second = ended.iter().find(|e| e.due > 0).unwrap();
    let hops = second.hops;
    let times = [
        hops.parsed,
        hops.tokenized,
        hops.routed,
        hops.dispatched,
        hops.received,
    ];
    let mut all: Vec<u64> = times.iter().map(|at| at.0 - second.due).collect();
    all.extend([second.first - second.due, second.last - second.due]);
    assert_eq!(all, expected);
}

/// A device wakes the API server: 10 us until its CPU runs, 1.5 for the switch. Then 100 us of parsing, 100 of tokens,
/// 50 of routing, 20 of submission. A Unix socket's message costs 4.15 us at each end.
#[test]
fn a_request_takes_the_times_of_its_threads() {
    let wake = 11_500;
    let sent = wake + 270_000;
    let begins = sent + 4_150 + 1_500 + 4_150 + 1;
    // The end of a pass wakes the engine's thread, which wakes the API server: 30 us, and 10 for the token.
    let first = begins + 10 * MS + wake + 1 + 4_150 + 1 + 1_500 + 4_150 + 40_000;
    let parsed = wake + 100_000;
    let expected = [
        parsed,
        parsed + 100_000,
        parsed + 150_000,
        sent,
        sent,
        first,
        first + 60 * MS - 1, // no further step is scheduled
    ];
    check_second(&host("eevdf", 1, ""), expected);
}

/// With two CPUs EEVDF wakes the engine's thread on the idle one, and ours keeps it where its waker is about to wait.
#[test]
fn a_hand_off_saves_the_wake_up_of_an_idle_cpu() {
    let ttft = |scheduler, cpus| {
        let (_, ended) = simulate(
            &host(scheduler, cpus, ""),
            &load(2, 1, 100, 7),
            &Options::default(),
        );
        let second = ended.iter().find(|e| e.due > 0).unwrap();
        second.first - second.due
    };
    let one = ttft("eevdf", 1);
    let woken = ttft("eevdf", 2);
    let handed = ttft("slipstream", 2);
    assert!(one < woken, "{one} {woken}");
    // Twice 10 us: towards the engine, and back.
    assert!(
        handed + 19_000 < woken && handed < one + 2_000,
        "{handed} {woken}"
    );
}

/// 20 requests per second for a while.
fn busy(scheduler: &str, cpus: u32, more: &str) -> Outcome {
    let load = workload(
        "requests = 200\n[arrival]\nkind = \"poisson\"\nrate_per_s = 20\n[[class]]\nisl = 400\nosl = 20\n",
    );
    let outcome = run(
        &host(scheduler, cpus, more),
        &load,
        &Options::default(),
        &mut (),
    );
    assert_eq!(outcome.cut, None);
    assert_eq!(outcome.totals.requests.failed, 0);
    outcome
}

fn mean_ttft_ms(outcome: &Outcome) -> f64 {
    outcome.totals.latencies().ttft_ms.unwrap().mean
}

#[test]
fn more_cpus_do_not_lengthen_the_wait() {
    for scheduler in SCHEDULERS {
        let more = "tokenizers = 2\ndetokenizers = 1\nstep_us = 3000\n";
        let means = [1, 2, 4, 8].map(|cpus| mean_ttft_ms(&busy(scheduler, cpus, more)));
        for pair in means.windows(2) {
            // A CPU of one's own may have to be woken, 10 us for each of six threads.
            assert!(pair[1] <= pair[0] + 0.06, "{scheduler}: {means:?}");
        }
        assert!(means[3] < means[0], "{scheduler}: {means:?}");
    }
}

#[test]
fn a_host_does_not_change_what_is_computed() {
    let ideal = run(
        &ten_ms("", "[host]\nmode = \"ideal\"\n"),
        &load(50, 20, 400, 20),
        &Options::default(),
        &mut (),
    );
    for scheduler in SCHEDULERS {
        let cluster = host(scheduler, 2, "background = 3\n");
        let one = run(
            &cluster,
            &load(50, 20, 400, 20),
            &Options::default(),
            &mut (),
        );
        let other = run(
            &cluster,
            &load(50, 20, 400, 20),
            &Options::default(),
            &mut (),
        );
        assert_eq!(one.digest, other.digest, "{scheduler} repeats");
        assert_eq!(
            one.totals.requests.succeeded, ideal.totals.requests.succeeded,
            "{scheduler}"
        );
    }
}

/// Other programs' threads delay tokens, and more of them do so more.
#[test]
fn background_delays_tokens() {
    for scheduler in SCHEDULERS {
        let itl = |background: u32| {
            let outcome = busy(scheduler, 2, &format!("background = {background}\n"));
            outcome.totals.latencies().itl_ms.unwrap().p99
        };
        let (none, some, many) = (itl(0), itl(4), itl(12));
        assert!(
            none < some && some < many,
            "{scheduler}: {none} {some} {many}"
        );
    }
}

/// The example of docs/twin.md: with 16 hogs EEVDF lets an engine's loop wait, and ours does not.
#[test]
fn the_example_shows_a_difference_of_schedulers() {
    let text = include_str!("../../../../../examples/cluster-host.toml");
    let load = load(60, 10, 1024, 100);
    let mean = |scheduler: &str, background: u32| {
        let text = text
            .replace("\"eevdf\"", &format!("\"{scheduler}\""))
            .replace("background = 16", &format!("background = {background}"));
        let outcome = run(&super::cluster(&text), &load, &Options::default(), &mut ());
        let latency = outcome.totals.latencies();
        (latency.ttft_ms.unwrap().mean, latency.itl_ms.unwrap().mean)
    };
    let (quiet, eevdf, ours) = (mean("eevdf", 0), mean("eevdf", 16), mean("slipstream", 16));
    assert!(eevdf.0 > 1.15 * ours.0, "{eevdf:?} {ours:?}");
    assert!(eevdf.1 > 1.2 * ours.1, "{eevdf:?} {ours:?}");
    assert!(ours.1 < 1.05 * quiet.1, "{ours:?} {quiet:?}");
}

#[test]
fn a_thread_of_the_receiver_ends_a_kv_transfer() {
    let second = |connector_us: u32| {
        let host =
            format!("{HOST}cpus = 8\nconnector_us = {connector_us}\n[network]\nmode = \"flows\"\n");
        let (outcome, ended) = simulate(
            &ten_ms(APART, &host),
            &load(2, 1, 100, 7),
            &Options::default(),
        );
        assert_eq!(outcome.cut, None);
        let second = ended.iter().find(|e| e.due > 0).unwrap();
        second.first - second.due
    };
    assert_eq!(second(500) - second(0), 500_000 - 1);
}

/// Without asynchronous scheduling the work of a step comes before it; with it, it hides behind the step before.
#[test]
fn work_of_a_step_hides_behind_the_step_before() {
    let last = |ahead: bool, step_us: u32| {
        let engine = format!("[engine]\nasync_scheduling = {ahead}\n");
        let host = format!("{HOST}scheduler = \"eevdf\"\ncpus = 4\nstep_us = {step_us}\n");
        let cluster = super::cluster(&format!(
            "[model]\npreset = \"qwen3-8b\"\n{engine}num_gpu_blocks = 4096\nmax_model_len = 16384\n\
             [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{host}"
        ));
        let (_, ended) = simulate(&cluster, &load(2, 1, 100, 7), &Options::default());
        let second = ended.iter().find(|e| e.due > 0).unwrap();
        second.last - second.first
    };
    // Work of 0 counts as 1 ns.
    assert_eq!(last(true, 0), 60 * MS);
    assert_eq!(last(true, 2_000), 60 * MS);
    let behind = last(false, 2_000) - last(false, 0);
    assert_eq!(behind, 6 * (2 * MS - 1));
    // Longer than the step: its thread is the bottleneck, which also sends each step's tokens and wakes a CPU for them.
    assert_eq!(last(true, 12_000), 6 * (12 * MS + 1 + 4_150 + 700));
}
