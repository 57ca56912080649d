//! Workers on hosts: `network.gpus_per_host`.

use slipstream_twin::Options;

use super::model::{APART, KV_BYTES, MS, load, simulate, ten_ms};
use super::{cluster, workload};

#[test]
fn transfers_between_workers_of_one_host_do_not_use_the_network() {
    let time = |more: &str| {
        let network = format!("[network]\nmode = \"packets\"\n{more}");
        let (_, ended) = simulate(
            &ten_ms(APART, &network),
            &load(1, 1, 1_000, 3),
            &Options::default(),
        );
        assert_eq!(ended[0].error, None);
        let (from, to) = ended[0].hops.kv.unwrap();
        to.0 - from.0
    };
    assert!(time("") > 1_000 * KV_BYTES / 50);
    // 3.6 Tbit/s are 450 bytes per ns, 800 Gbit/s 100.
    assert_eq!(time("gpus_per_host = 8\n"), 1_000 * KV_BYTES / 450);
    assert_eq!(
        time("gpus_per_host = 2\nhost_bits_per_s = 800e9\n"),
        1_000 * KV_BYTES / 100
    );
    // Each worker on a host of its own.
    assert_eq!(time("gpus_per_host = 1\n"), time(""));
}

#[test]
fn gpus_of_a_host_share_its_interfaces() {
    let pools = "[pool.p]\nrole = \"prefill\"\n[pool.p.engine]\ntensor_parallel_size = 4\n[pool.d]\nrole = \"decode\"\n\
                 [pool.d.engine]\ntensor_parallel_size = 4\n";
    for mode in ["flows", "packets"] {
        let time = |nics: u32| {
            let network = format!(
                "[network]\nmode = \"{mode}\"\ngpus_per_host = 4\nnics_per_host = {nics}\n"
            );
            let (_, ended) = simulate(
                &ten_ms(pools, &network),
                &load(1, 1, 2_000, 3),
                &Options::default(),
            );
            let (from, to) = ended[0].hops.kv.unwrap();
            (to.0 - from.0) as f64
        };
        let bytes = (2_000 * KV_BYTES) as f64;
        for nics in [0, 4, 2, 1] {
            let rate = 50.0 * f64::from(if nics == 0 { 4 } else { nics });
            let off = time(nics) / (bytes / rate + 2_000.0) - 1.0;
            assert!((-0.001..0.02).contains(&off), "{mode} {nics}: {off}");
        }
    }
}

/// Qwen3 30B-A3B: prompts by four GPUs, answers by eight ranks with experts of their own, on hosts of `gpus`.
fn experts(mode: &str, gpus: u32, osl: u32) -> (f64, f64, u64) {
    let text = format!(
        "[model]\npreset = \"qwen3-30b-a3b\"\n[pool.p]\nrole = \"prefill\"\nworkers = 2\n[pool.p.engine]\n\
         tensor_parallel_size = 4\n[pool.d]\nrole = \"decode\"\n[pool.d.engine]\ndata_parallel_size = 8\n\
         enable_expert_parallel = true\n[engine]\nnum_gpu_blocks = 8192\n[engine.timing]\ngpu = \"h100-sxm\"\n\
         [router]\npolicy = \"round_robin\"\n[network]\nmode = \"{mode}\"\nnic_bits_per_s = 100e9\ngpus_per_host = {gpus}\n"
    );
    let load = workload(&format!(
        "requests = 24\n[arrival]\nkind = \"poisson\"\nrate_per_s = 30\n[[class]]\nisl = 3000\nosl = {osl}\n"
    ));
    let (outcome, ended) = simulate(&cluster(&text), &load, &Options::default());
    assert_eq!((outcome.cut, ended.len()), (None, 24));
    let transfers = ended.iter().map(|e| {
        let (from, to) = e.hops.kv.unwrap();
        (to.0 - from.0) as f64
    });
    let transfer = transfers.sum::<f64>() / 24.0 / MS as f64;
    let steps = ended
        .iter()
        .map(|e| (e.last - e.first) as f64 / f64::from(e.tokens - 1));
    (
        transfer,
        steps.sum::<f64>() / 24.0 / MS as f64,
        outcome.digest,
    )
}

#[test]
fn exchanges_of_experts_and_transfers_meet_on_the_network() {
    for mode in ["flows", "packets"] {
        let (transfer, step, digest) = experts(mode, 4, 60);
        let (calm_transfer, calm_step, _) = experts(mode, 0, 60);
        assert!(step > 1.02 * calm_step, "{mode}: {step} {calm_step}");
        assert!(
            transfer > 1.01 * calm_transfer,
            "{mode}: {transfer} {calm_transfer}"
        );
        assert_eq!(experts(mode, 4, 60).2, digest);
    }
}

/// Without transfers steps depend on their own load alone: jumps and threads change nothing.
#[test]
fn collectives_without_transfers_are_the_same_on_any_number_of_threads() {
    let text = "[model]\npreset = \"llama-3.1-8b\"\n[pool.a]\nworkers = 4\n[engine]\nnum_gpu_blocks = 4096\n\
                tensor_parallel_size = 8\n[engine.timing]\nkind = \"roofline\"\ngpu = \"h100-sxm\"\n[router]\n\
                policy = \"round_robin\"\n[network]\nmode = \"packets\"\ngpus_per_host = 4\n";
    let cluster = cluster(text);
    let load = load(200, 100, 500, 40);
    let digest = |threads, one_queue, jump| {
        let options = Options {
            threads,
            one_queue,
            jump,
            ..Options::default()
        };
        simulate(&cluster, &load, &options).0.digest
    };
    let first = digest(1, false, true);
    for (threads, one_queue, jump) in [(2, false, true), (1, true, true), (1, true, false)] {
        assert_eq!(digest(threads, one_queue, jump), first);
    }
}

/// The example: its exchanges of experts make steps longer than inside of one host.
#[test]
fn the_example_has_longer_steps_than_on_one_host() {
    let text = include_str!("../../../../../examples/cluster-hosts.toml");
    let text = text.replace("mode = \"packets\"", "mode = \"flows\"");
    let last = |text: &str| {
        let (outcome, ended) = simulate(
            &cluster(text),
            &load(20, 10, 4_000, 50),
            &Options::default(),
        );
        assert_eq!((outcome.cut, ended.len()), (None, 20));
        ended.iter().map(|e| e.last - e.first).sum::<u64>()
    };
    assert!(last(&text) > last(&text.replace("gpus_per_host = 8", "gpus_per_host = 0")));
}
