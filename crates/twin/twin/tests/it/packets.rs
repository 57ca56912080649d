//! `network.mode = "packets"` and `flows`: the same without contention, and queues with it; links that fail,
//! background traffic.

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

/// Time must go on although cancelled bytes are still under way that no request waits for.
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

/// Workers under a leaf switch each, and `spines` that carry all that a worker sends.
fn far_apart(mode: &str, spines: u32, more: &str) -> slipstream_config::cluster::Cluster {
    let network = format!(
        "[network]\nmode = \"{mode}\"\nworkers_per_leaf = 1\nspines = {spines}\nuplink_bits_per_s = {}\n{more}",
        400e9 * f64::from(spines)
    );
    ten_ms(APART, &network)
}

/// The time of one KV transfer of 5.9 ms that begins at 10 ms, and the digest.
fn one_far(mode: &str, spines: u32, more: &str) -> (f64, u64) {
    let cluster = far_apart(mode, spines, more);
    let (outcome, ended) = simulate(&cluster, &load(1, 1, 2_000, 3), &Options::default());
    assert_eq!(outcome.cut, None);
    assert_eq!(ended[0].error, None);
    let (from, to) = ended[0].hops.kv.unwrap();
    ((to.0 - from.0) as f64 / MS as f64, outcome.digest)
}

fn uplink(leaf: u32, spine: u32, until: &str) -> String {
    format!("[[event]]\nkind = \"uplink\"\nleaf = {leaf}\nspine = {spine}\nat_s = 0.012\n{until}")
}

#[test]
fn a_transfer_waits_for_its_only_uplink() {
    let whole = one_far("flows", 1, "").0;
    for leaf in [0, 1] {
        let fails = uplink(leaf, 0, "until_s = 0.1\n");
        // At 12 ms 2 of its 5.9 ms are over; they end at 100 ms.
        let flows = one_far("flows", 1, &fails).0;
        assert!((flows - whole - 88.0).abs() < 0.001, "{flows}");
        // The packets on the way are lost, and a timer of 67 ms sends them again.
        let (packets, digest) = one_far("packets", 1, &fails);
        assert!(packets > flows && packets < flows + 67.2, "{packets}");
        assert_eq!(one_far("packets", 1, &fails), (packets, digest));
        // The other direction of time: a link that fails after the transfer is not noticed.
        let late = fails.replace("0.012", "0.05");
        let calm = one_far("packets", 1, "").0;
        assert_eq!(one_far("packets", 1, &late).0, calm);
    }
}

#[test]
fn a_transfer_takes_another_spine() {
    let calm = one_far("packets", 2, "").0;
    let times = |more: &str| {
        let mut times =
            [0, 1].map(|spine| one_far("packets", 2, &(more.to_owned() + &uplink(0, spine, ""))).0);
        times.sort_by(f64::total_cmp);
        times
    };
    let at_once = times("");
    // It uses one of the two. A simulated packet takes whole ns, 1 % more.
    assert!((at_once[0] - calm).abs() < 0.07, "{at_once:?} {calm}");
    assert!(
        (0.0..0.3).contains(&(at_once[1] - calm)) && at_once[1] > at_once[0],
        "{at_once:?} {calm}"
    );
    // Until routes change all packets are lost, in this time and what their timer takes.
    let late = times("reroute_ms = 2\n");
    assert!(late[1] > calm + 2.0 && late[1] < calm + 75.0, "{late:?}");
    // A fluid has half of the uplinks left, which is all that it needs.
    let flows = one_far("flows", 2, "").0;
    assert_eq!(one_far("flows", 2, &uplink(0, 0, "")).0, flows);
}

#[test]
fn a_transfer_waits_for_an_interface_that_is_down() {
    let down = "[[event]]\nkind = \"link\"\nworker = 1\nshare = 0\nat_s = 0.012\nuntil_s = 0.05\n";
    let whole = one_far("flows", 1, "").0;
    let flows = one_far("flows", 1, down).0;
    assert!((flows - whole - 38.0).abs() < 0.001, "{flows}");
    let packets = one_far("packets", 1, down).0;
    assert!(packets > flows && packets < flows + 67.2, "{packets}");
}

/// A file of `slipstream net run` with one flow.
fn background(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.toml");
    let head = "duration = 1.0\n[topology]\ncategory = \"LeafSpine\"\n\
                leaf_spine = { leaves = 1, spines = 1, hosts_per_leaf = 8 }\n[switch]\nport_rate = 4e11\n";
    std::fs::write(&path, format!("{head}{text}")).unwrap();
    let key = format!("background = {:?}\n", path.to_str().unwrap());
    (folder, key)
}

/// 500 MB from the prefill to the decode worker, from 5 ms on: 10 ms alone.
const BESIDE: &str = "[[flow]]\nflow_id = 1\nflow_type = \"RoCE\"\ngraph = [[0, 1]]\ntraffic = { initial_delay = 0.005, \
                      size = 500_000_000, pkt_size_dist = 4096 }\n";

#[test]
fn background_traffic_slows_a_transfer_down() {
    let calm = one_far("packets", 1, "").0;
    let (_folder, key) = background(BESIDE);
    let (beside, digest) = one_far("packets", 1, &key);
    // Both are on their way from 10 ms on, with 250 and 295 MB left.
    assert!((1.5..2.6).contains(&(beside / calm)), "{beside} {calm}");
    assert_eq!(one_far("packets", 1, &key), (beside, digest));
    // In the other direction, or when it is over.
    for text in [
        BESIDE.replace("[[0, 1]]", "[[1, 0]]"),
        BESIDE.replace("500_000_000", "50_000_000"),
    ] {
        let (_folder, key) = background(&text);
        let other = one_far("packets", 1, &key).0;
        assert!((other / calm - 1.0).abs() < 0.01, "{other} {calm}");
    }
}

#[test]
fn background_traffic_of_unknown_hosts_is_refused() {
    let refused = |key: &str| {
        let cluster = far_apart("packets", 1, key);
        let read = |path: &std::path::Path| std::fs::read(path);
        let load = load(1, 1, 100, 2);
        let outcome =
            slipstream_twin::simulate(&cluster, &load, &Options::default(), read, &mut ());
        outcome.err().unwrap().to_string()
    };
    let (_folder, key) = background(&BESIDE.replace("[[0, 1]]", "[[0, 7]]"));
    let text = refused(&key);
    for part in [
        "`network.background`",
        "other.toml",
        "flow 1 has host 7",
        "3 network interfaces",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let (_folder, key) = background("[[flow]]\nflow_typ = 1\n");
    assert!(refused(&key).contains("flow_typ"));
    let text = refused("background = \"missing.toml\"\n");
    assert!(
        text.contains("missing.toml") && text.contains("relative"),
        "{text}"
    );
}
