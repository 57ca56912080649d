//! Workers that fetch blocks from each other.

use std::fmt::Write as _;

use proptest::prelude::*;
use slipstream_config::cluster::{Cluster, RouterPolicy};
use slipstream_config::workload_file::Workload;
use slipstream_twin::{Options, Outcome, RequestRecord, Sink};

use super::model::{KV_BYTES, MS};
use super::{cluster, run, workload};

/// Time to first token, worker, and tokens found: in all, and at another worker.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Found {
    id: u64,
    ttft: u64,
    worker: u32,
    cached: u32,
    host: u32,
    peer: u32,
}

#[derive(Default)]
struct Records(Vec<Found>);

impl Sink for Records {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        assert_eq!(r.error, None);
        assert!(r.lower.host_tokens + r.lower.disk_tokens + r.lower.peer_tokens <= r.cached_tokens);
        self.0.push(Found {
            id: r.request.id().0,
            ttft: r.first.0 - r.request.due.0,
            worker: r.rank.expect("it was answered").worker.0,
            cached: r.cached_tokens,
            host: r.lower.host_tokens,
            peer: r.lower.peer_tokens,
        });
    }
}

fn simulate(cluster: &Cluster, load: &Workload, options: &Options) -> (Outcome, Vec<Found>) {
    let mut records = Records::default();
    let outcome = run(cluster, load, options, &mut records);
    assert_eq!(outcome.cut, None);
    records.0.sort_by_key(|found| found.id);
    (outcome, records.0)
}

/// Prompts of two blocks of 512 tokens each, named by number, at these times in ms.
fn prompts(at: &[(u64, u64)]) -> (tempfile::TempDir, Workload) {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let mut lines = String::new();
    for (at, prompt) in at {
        let (first, second) = (100 * prompt, 100 * prompt + 1);
        writeln!(
            lines,
            r#"{{"timestamp": {at}, "input_length": 1024, "output_length": 2, "hash_ids": [{first}, {second}]}}"#
        )
        .unwrap();
    }
    std::fs::write(&trace, lines).unwrap();
    let load = workload(&format!("[trace]\nfile = \"{}\"\n", trace.display()));
    (folder, load) // the trace is read when it is simulated
}

/// `workers` that take turns; a pass takes 10 ms, and a prompt of 1,024 tokens fills the cache.
fn by_turns(workers: u32, more: &str) -> Cluster {
    cluster(&format!(
        "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = {workers}\n[router]\npolicy = \"round_robin\"\n\
         [engine]\nnum_gpu_blocks = 65\nmax_model_len = 1040\n\
         [engine.timing]\nkind = \"constant\"\nstep_ns = 10_000_000\n{more}\n"
    ))
}

const PEERS: &str =
    "[network]\nmode = \"flows\"\n[engine.peer_tier]\nenabled = true\nlatency_us = 500\n";
/// All blocks of a prompt but the last.
const TOKENS: u32 = 63 * 16;
/// Their bytes at 400 Gbit/s.
const BYTES_NS: u64 = (TOKENS as u64 * KV_BYTES).div_ceil(50);
/// The latency, the request over two links, the bytes, and the way of the last one.
const FETCH_NS: u64 = 500_000 + 2_000 + BYTES_NS + 2_000;

#[test]
fn a_prompt_that_another_worker_has_is_fetched_from_it() {
    let (_folder, load) = prompts(&[(0, 7), (1_000, 7)]);
    let (without, ended) = simulate(&by_turns(2, ""), &load, &Options::default());
    assert_eq!(without.engine.peer_hit_tokens, None);
    assert_eq!(ended[1].ttft, 10 * MS);
    let (with, ended) = simulate(&by_turns(2, PEERS), &load, &Options::default());
    let second = Found {
        id: ended[1].id,
        ttft: FETCH_NS + 10 * MS,
        worker: 1,
        cached: TOKENS,
        host: 0,
        peer: TOKENS,
    };
    assert_eq!((ended[0].cached, ended[1]), (0, second));
    assert_eq!(with.engine.peer_hit_tokens, Some(f64::from(TOKENS)));
    assert_eq!(with.engine.peer_absent_tokens, Some(0.0));
    assert_eq!(
        with.engine.peer_bytes,
        Some((u64::from(TOKENS) * KV_BYTES) as f64)
    );
    assert_eq!(with.engine.prefix_hit_tokens, Some(0.0));
}

#[test]
fn fetches_packet_by_packet_take_the_time_of_flows() {
    let packets = PEERS.replace("flows", "packets");
    let (_folder, load) = prompts(&[(0, 7), (1_000, 7)]);
    let (_, ended) = simulate(&by_turns(2, &packets), &load, &Options::default());
    assert_eq!(ended[1].peer, TOKENS);
    let took = (ended[1].ttft - 10 * MS) as f64 / FETCH_NS as f64;
    assert!((1.0..1.02).contains(&took), "{took}");
}

/// The first two both fetch from worker 0, whose link they share.
#[test]
fn fetches_from_one_worker_share_its_link() {
    // Turns: 0, then 1 and 2 at once. At 1 nothing is known of 2, nor at 2 of 1.
    let (_folder, load) = prompts(&[(0, 7), (1_000, 7), (1_000, 7)]);
    let (_, ended) = simulate(&by_turns(3, PEERS), &load, &Options::default());
    let shared = FETCH_NS - BYTES_NS + (2 * u64::from(TOKENS) * KV_BYTES).div_ceil(50);
    for found in &ended[1..] {
        assert_eq!((found.ttft, found.peer), (shared + 10 * MS, TOKENS));
    }
}

/// Between the look-up and the request, another prompt takes the place of the blocks.
#[test]
fn blocks_that_are_gone_are_computed_and_counted() {
    let slow = PEERS.replace("latency_us = 500", "latency_us = 100_000");
    // Turns: 0, 1, 0. The last one evicts what the second has found.
    let (_folder, load) = prompts(&[(0, 7), (1_000, 7), (1_050, 8)]);
    let (outcome, ended) = simulate(&by_turns(2, &slow), &load, &Options::default());
    let waits = 100 * MS + 2_000 + 10 * MS;
    assert_eq!(
        (ended[1].ttft, ended[1].cached, ended[1].peer),
        (waits, 0, 0)
    );
    let counts = outcome.engine;
    assert_eq!(counts.peer_hit_tokens, Some(0.0));
    assert_eq!(counts.peer_absent_tokens, Some(f64::from(TOKENS)));
    // The same, but host memory has them still: it sends them.
    let host = format!("{slow}[engine.host_tier]\ngib = 10\nbytes_per_s = 1e9\n");
    let (outcome, ended) = simulate(&by_turns(2, &host), &load, &Options::default());
    let waits = waits + BYTES_NS + 2_000;
    assert_eq!((ended[1].ttft, ended[1].peer), (waits, TOKENS));
    assert_eq!(outcome.engine.peer_absent_tokens, Some(0.0));
}

/// A prompt that no GPU has any more is in the host memory of the worker that computed it.
#[test]
fn host_memory_of_other_workers_is_found() {
    // Turns: 0, 1, 0, 1. The third evicts the first from the GPU of worker 0.
    let (_folder, load) = prompts(&[(0, 7), (500, 9), (1_000, 8), (1_500, 7)]);
    let (_, ended) = simulate(&by_turns(2, PEERS), &load, &Options::default());
    assert_eq!((ended[3].cached, ended[3].ttft), (0, 10 * MS));
    // 10 GiB have room for all; 0.15 GiB for one prompt.
    for (gib, peer, ttft) in [(10.0, TOKENS, FETCH_NS + 10 * MS), (0.15, 0, 10 * MS)] {
        let host = format!("{PEERS}[engine.host_tier]\ngib = {gib}\nbytes_per_s = 1e9\n");
        let (_, ended) = simulate(&by_turns(2, &host), &load, &Options::default());
        assert_eq!(
            (ended[3].peer, ended[3].host, ended[3].ttft),
            (peer, 0, ttft)
        );
    }
}

/// A worker that was lost has nothing, and is found again with its next prompt.
#[test]
fn a_worker_that_restarted_is_found_again() {
    let crash = "[[event]]\nkind = \"crash\"\nat_s = 0.2\nuntil_s = 0.3\nworker = 0\n";
    let (_folder, load) = prompts(&[(0, 7), (500, 7), (1_000, 8), (1_500, 8)]);
    for host in ["", "[engine.host_tier]\ngib = 10\nbytes_per_s = 1e9\n"] {
        let cluster = by_turns(2, &format!("{PEERS}{host}{crash}"));
        let (_, ended) = simulate(&cluster, &load, &Options::default());
        let found = ended.iter().map(|found| (found.worker, found.peer));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [(0, 0), (1, 0), (0, 0), (1, TOKENS)]
        );
    }
}

/// Until the events of a cache arrive, nothing of it is found.
#[test]
fn a_look_up_is_as_late_as_a_routers() {
    let mut cluster = by_turns(2, PEERS);
    cluster.router.kv_lag_ms = 500.0;
    for (at, peer) in [(509, 0), (511, TOKENS)] {
        // The first pass ends at 10 ms.
        let (_folder, load) = prompts(&[(0, 7), (at, 7)]);
        let (_, ended) = simulate(&cluster, &load, &Options::default());
        assert_eq!(ended[1].peer, peer, "{at} ms");
    }
}

/// A worker that is lost while it sends: the other one computes the prompt.
#[test]
fn a_worker_that_is_lost_sends_nothing() {
    let slow = PEERS.replace("mode = \"flows\"", "mode = \"flows\"\nnic_bits_per_s = 1e9");
    let crash = "[[event]]\nkind = \"crash\"\nat_s = 1.1\nworker = 0\n";
    let (_folder, load) = prompts(&[(0, 7), (1_000, 7)]);
    let (outcome, ended) = simulate(
        &by_turns(2, &format!("{slow}{crash}")),
        &load,
        &Options::default(),
    );
    assert_eq!((ended[1].cached, ended[1].peer), (0, 0));
    assert_eq!(outcome.engine.peer_absent_tokens, Some(f64::from(TOKENS)));
    assert_eq!(outcome.engine.peer_hit_tokens, Some(0.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// One request after the other: each finds no less than without peers, what it finds there is found nowhere else, and
    /// passes that could be jumped over change nothing.
    #[test]
    fn hits_are_never_fewer(
        workers in 1..5u32,
        blocks in 65..260u32,
        host in any::<bool>(),
        policy in prop::sample::select(vec!["round_robin", "random", "kv"]),
        latency_us in prop::sample::select(vec![0, 300, 20_000]),
        network in any::<bool>(),
        order in prop::collection::vec(0..6u64, 1..40),
    ) {
        let at: Vec<(u64, u64)> = (0..).map(|n| n * 1_000).zip(order).collect();
        let (_folder, load) = prompts(&at);
        let mut more = String::new();
        if network {
            more += "[network]\nmode = \"flows\"\n";
        }
        if host {
            more += "[engine.host_tier]\ngib = 0.3\nbytes_per_s = 1e10\n";
        }
        let build = |peers: &str| {
            let mut cluster = by_turns(workers, &format!("{more}{peers}"));
            cluster.router.policy = match policy {
                "random" => RouterPolicy::Random,
                "kv" => RouterPolicy::Kv,
                _ => RouterPolicy::RoundRobin,
            };
            for pool in &mut cluster.pools {
                pool.engine.num_gpu_blocks = blocks;
            }
            cluster
        };
        let peers = format!("[engine.peer_tier]\nenabled = true\nlatency_us = {latency_us}\n");
        let (_, plain) = simulate(&build(""), &load, &Options::default());
        let (outcome, with) = simulate(&build(&peers), &load, &Options::default());
        let single = Options { jump: false, ..Options::default() };
        let (again, _) = simulate(&build(&peers), &load, &single);
        prop_assert_eq!(outcome.digest, again.digest);
        let mut of_peers = 0;
        for (plain, with) in plain.iter().zip(&with) {
            prop_assert_eq!((plain.id, plain.worker), (with.id, with.worker));
            prop_assert!(with.cached >= plain.cached);
            prop_assert!(with.cached <= TOKENS);
            // Peers are asked for the rest alone.
            prop_assert_eq!(with.cached - with.peer, plain.cached);
            prop_assert_eq!(with.host, plain.host);
            of_peers += with.peer;
        }
        prop_assert_eq!(outcome.engine.peer_hit_tokens, Some(f64::from(of_peers)));
    }
}

/// The example: what one worker has spares another one the computation.
#[test]
fn the_example_finds_more_than_without_peers() {
    let text = include_str!("../../../../../examples/cluster-peers.toml");
    let load = workload(
        "requests = 300\n[arrival]\nkind = \"constant\"\nrate_per_s = 20\n\
         [[class]]\nisl = 4200\nosl = 20\n[[class.prefix]]\nbranches = 3\ntokens = 4096\n",
    );
    let (with, found) = simulate(&cluster(text), &load, &Options::default());
    let off = text.replace("enabled = true\nlatency_us = 200", "enabled = false #");
    let (without, plain) = simulate(&cluster(&off), &load, &Options::default());
    assert!(with.engine.peer_hit_tokens > Some(0.0));
    assert_eq!(without.engine.peer_hit_tokens, None);
    let cached = |found: &[Found]| found.iter().map(|found| found.cached).sum::<u32>();
    assert!(cached(&found) > cached(&plain));
}

/// Workers that compute prompts for others fetch from each other, and never from those that generate.
#[test]
fn prefill_workers_fetch_from_their_pool() {
    let apart = by_turns(2, PEERS);
    let mut pools = vec![apart.pools[0].clone(), apart.pools[0].clone()];
    pools[0].role = slipstream_base::Role::Prefill;
    pools[1].role = slipstream_base::Role::Decode;
    pools[1].name = "decode".into();
    let cluster = Cluster { pools, ..apart };
    let (_folder, load) = prompts(&[(0, 7), (1_000, 7), (2_000, 8)]);
    let (_, ended) = simulate(&cluster, &load, &Options::default());
    assert_eq!(
        ended.iter().map(|found| found.peer).collect::<Vec<_>>(),
        [0, TOKENS, 0]
    );
    assert_eq!(ended[1].worker, 3);
}
