//! `network.mode = "packets"` beside `flows`: the same without contention, and queues with it.

use slipstream_twin::{Options, Outcome};

use super::model::{APART, Ended, KV_BYTES, MS, load, simulate, ten_ms};
use super::workload;

const PULL_APART: &str = "[pool.p]\nrole = \"prefill\"\nworkers = 4\n[pool.d]\nrole = \"decode\"\n";

/// One request of `isl` tokens over prefill and decode workers.
fn one(pools: &str, mode: &str, more: &str, isl: u32) -> (Outcome, Ended) {
    let cluster = ten_ms(pools, &format!("[network]\nmode = \"{mode}\"\n{more}"));
    let (outcome, mut ended) = simulate(&cluster, &load(1, 1, isl, 7), &Options::default());
    assert_eq!(outcome.cut, None);
    let one = ended.pop().unwrap();
    assert_eq!(one.error, None);
    (outcome, one)
}

/// The time of its KV transfer, ns.
fn transfer(pools: &str, mode: &str, more: &str, isl: u32) -> u64 {
    let (from, to) = one(pools, mode, more, isl).1.hops.kv.unwrap();
    to.0 - from.0
}

#[test]
fn without_contention_packets_take_the_time_of_flows() {
    let gpus = |prefill: u32, decode: u32| {
        format!(
            "[pool.p]\nrole = \"prefill\"\n[pool.p.engine]\ntensor_parallel_size = {prefill}\n\
             [pool.d]\nrole = \"decode\"\n[pool.d.engine]\ntensor_parallel_size = {decode}\n"
        )
    };
    for (pools, more) in [
        (gpus(1, 1), ""),
        (gpus(2, 2), ""),
        (gpus(2, 4), ""),
        (gpus(1, 1), "workers_per_leaf = 1\n"),
        (
            gpus(2, 2),
            "workers_per_leaf = 1\nuplink_bits_per_s = 800e9\n",
        ),
    ] {
        for isl in [100, 2_000, 16_000] {
            let flows = transfer(&pools, "flows", more, isl) as f64;
            let packets = transfer(&pools, "packets", more, isl) as f64;
            let off = packets / flows - 1.0;
            // Headers are 1.5 %.
            assert!((0.0..0.02).contains(&off), "{pools} {more} {isl}: {off}");
        }
    }
    // By hand: 100 tokens are 3,600 packets, the last one once more behind the switch.
    let wire = 100 * KV_BYTES + 3_600 * 62;
    assert_eq!(
        transfer(APART, "packets", "", 100),
        ((wire + 4_096 + 62) as f64 / 50.0).ceil() as u64 + 2_000
    );
    // Requests and answers use it, too.
    let messages = "messages = true\n";
    let (_, flows) = one(APART, "flows", messages, 2_000);
    let (_, packets) = one(APART, "packets", messages, 2_000);
    let off = packets.first as f64 / flows.first as f64 - 1.0;
    assert!((0.0..0.01).contains(&off), "{off}");
}

/// Prompts of four prefill workers end at one time, and go to one decode worker.
fn incast(mode: &str) -> (Outcome, Vec<u64>) {
    let cluster = ten_ms(
        PULL_APART,
        &format!("[network]\nmode = \"{mode}\"\n[router]\npolicy = \"round_robin\"\n"),
    );
    let load = workload(
        "requests = 4\n[arrival]\nkind = \"closed\"\nconcurrency = 4\n[[class]]\nisl = 1000\nosl = 2\n",
    );
    let (outcome, ended) = simulate(&cluster, &load, &Options::default());
    assert_eq!((outcome.cut.clone(), ended.len()), (None, 4));
    let times = ended.iter().map(|e| {
        let (from, to) = e.hops.kv.unwrap();
        to.0 - from.0
    });
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    (outcome, times)
}

#[test]
fn an_incast_takes_longer_by_packets() {
    let alone = 1_000 * KV_BYTES / 50;
    let (_, flows) = incast("flows");
    assert_eq!(flows, [4 * alone + 2_000; 4], "each has a quarter");
    let (outcome, packets) = incast("packets");
    // DCQCN starts with halves for each of the four, and more slowly finds back: the interface is not always full.
    let last = packets[3] as f64 / flows[3] as f64;
    assert!((1.2..2.0).contains(&last), "{packets:?}");
    assert!(packets[0] < packets[3], "{packets:?}");
    let (again, times) = incast("packets");
    assert_eq!((outcome.digest, packets), (again.digest, times));
}

#[test]
fn a_transfer_that_is_cancelled_leaves_the_network() {
    // The source of one of four is lost while all are under way.
    let crash = "[[event]]\nkind = \"crash\"\nat_s = 0.012\nuntil_s = 0.02\nworker = 1\n";
    for (mode, end) in [("flows", 20), ("packets", 30)] {
        let cluster = ten_ms(
            PULL_APART,
            &format!("[network]\nmode = \"{mode}\"\n[router]\npolicy = \"round_robin\"\n{crash}"),
        );
        let load = workload(
            "requests = 4\n[arrival]\nkind = \"closed\"\nconcurrency = 4\n[[class]]\nisl = 1000\nosl = 2\n",
        );
        let (outcome, ended) = simulate(&cluster, &load, &Options::default());
        assert_eq!((outcome.cut, ended.len()), (None, 4));
        assert_eq!(outcome.totals.requests.failed, 0);
        let retried = ended.iter().filter(|e| e.retries > 0).count();
        assert_eq!((retried, outcome.kv_transfers.times.count()), (1, 4));
        // Three went on with what the fourth left.
        let calm = ended.iter().filter(|e| e.retries == 0);
        let last = calm.map(|e| e.hops.kv.unwrap().1.0 / MS).max().unwrap();
        assert!(last < end, "{ended:?}");
    }
}

/// Time must go on although cancelled bytes are still under way that nobody waits for.
#[test]
fn transfers_that_a_partition_cancels_start_again_at_its_end() {
    let cut = "[[event]]\nkind = \"partition\"\nat_s = 0.012\nuntil_s = 0.05\nworkers = [4]\n";
    let cluster = ten_ms(
        PULL_APART,
        &format!("[network]\nmode = \"packets\"\n[router]\npolicy = \"round_robin\"\n{cut}"),
    );
    let load = workload(
        "requests = 4\n[arrival]\nkind = \"closed\"\nconcurrency = 4\n[[class]]\nisl = 1000\nosl = 2\n",
    );
    let (outcome, ended) = simulate(&cluster, &load, &Options::default());
    assert_eq!((outcome.cut, ended.len()), (None, 4));
    assert_eq!(outcome.totals.requests.failed, 0);
    let first = ended.iter().map(|e| e.hops.kv.unwrap().1.0).min();
    assert!(first > Some(50 * MS), "{ended:?}");
}
