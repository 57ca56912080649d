//! Tests on complete cluster files: values that are read, and mistakes that are refused.

use proptest::prelude::*;

use std::io;

use super::engine::{NOT_MODELLED, layers_of_stages};
use super::file::read;
use super::*;
use crate::doc::{Diagnostics, Settings};
use crate::preset::{self, Link};

fn parse(text: &str) -> Result<(Cluster, Settings), Diagnostics> {
    read(Doc::parse("c.toml", text.as_bytes()), |path| {
        match path.to_str() {
            Some("models/tiny/config.json") => Ok(
                br#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
                "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100,
                "max_position_embeddings": 512}"#
                    .to_vec(),
            ),
            Some("broken.json") => Ok(b"{".to_vec()),
            Some("grid.csv") => Ok(Vec::new()),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    })
}

#[track_caller]
fn check_refused(text: &str, expected: &[&str]) {
    let shown = match parse(text) {
        Ok(_) => panic!("accepted: {text}"),
        Err(diagnostics) => format!("error: {diagnostics}"),
    };
    for part in expected {
        assert!(shown.contains(part), "no {part:?} in\n{shown}");
    }
    let count = shown.matches("error: ").count();
    assert_eq!(count, expected.len(), "mistakes in\n{shown}");
}

#[test]
fn five_mistakes_are_reported_together() {
    check_refused(
        "[model]\npreset = \"qwen3-32\"\n\n[engine]\nblock_size = 0\nmax_nmu_seqs = 5\n\
         enable_prefix_caching = \"yes\"\n\n[ruoter]\npolicy = \"kv\"\n",
        &[
            "c.toml:2:10: `model.preset` is \"qwen3-32\", which is not a preset",
            "c.toml:5:14: `engine.block_size` is 0, but must be 1 to 1024",
            "c.toml:6:1: unknown key `engine.max_nmu_seqs`\nhint: did you mean `max_num_seqs`?",
            "c.toml:7:25: `engine.enable_prefix_caching` is a string (\"yes\"), but must be true or false",
            "c.toml:9:2: unknown key `ruoter`\nhint: did you mean `router`?",
        ],
    );
}

#[test]
fn sections_to_come_are_not_called_unknown() {
    check_refused(
        "[prices]\n[live.tls]\n",
        &[
            "c.toml:1:2: `prices` does not belong in a cluster file",
            "`live.tls` is not",
        ],
    );
}

#[test]
fn events_and_roles_that_cannot_be_are_refused() {
    check_refused(
        "[pool.main]\nworkers = 3\n[[event]]\nkind = \"crash\"\nat_s = 1\nworker = 3\n\
         [[event]]\nkind = \"slow\"\nat_s = 2\nuntil_s = 2\nworker = 0\nfactor = 2\nshare = 0.5\n\
         [[event]]\nkind = \"fire\"\nat_s = -1\n",
        &[
            "c.toml:6:10: `event[0].worker` is 3, but must be the number of a worker, 0 to 2",
            "`until_s` is 2, but it begins at 2",
            "`event[1].share` is not used: only \"link\" and \"kv_loss\" use it",
            "`event[2].kind` is a string (\"fire\"), but must be one of",
            "`event[2].at_s` is -1",
            "`event[2].worker` is missing",
        ],
    );
    check_refused(
        "[pool.a]\nrole = \"prefill\"\n",
        &["no pool generates answers"],
    );
    check_refused(
        "[pool.a]\nrole = \"decode\"\n[pool.b]\n",
        &["to compute its prompts"],
    );
    let (cluster, _) = parse(
        "[pool.p]\nrole = \"prefill\"\n[pool.d]\nrole = \"decode\"\n\
         [[event]]\nkind = \"link\"\nat_s = 9\nworker = 1\nshare = 0\n\
         [[event]]\nkind = \"drain\"\nat_s = 2\nuntil_s = 3\nworker = 0\n",
    )
    .unwrap();
    let kinds: Vec<_> = cluster.events.iter().map(|e| (e.at_s, e.fault)).collect();
    assert_eq!(
        kinds,
        [(2.0, Fault::Drain), (9.0, Fault::Link { share: 0.0 })]
    );
}

#[test]
fn packets_need_links_of_fixed_rates() {
    let packets = "[network]\nmode = \"packets\"\npacket_bytes = 1024\n";
    let (cluster, _) = parse(packets).unwrap();
    assert_eq!(cluster.network.mode, NetworkMode::Packets);
    assert_eq!(cluster.network.packet_bytes, 1024);
    check_refused(
        &format!(
            "{packets}messages = true\nnic_bits_per_s = 1e9\n\
             [[event]]\nkind = \"link\"\nat_s = 1\nworker = 0\nshare = 0.5\n"
        ),
        &[
            "the frontend's interface has 1e11 bits/s, and that of a GPU 1e9",
            "an event of kind \"link\" has `share = 0.5`",
        ],
    );
    check_refused(
        "[network]\nmode = \"flows\"\npacket_bytes = 1024\nbackground = \"other.toml\"\n",
        &[
            "`network.packet_bytes` is not used: only \"packets\" uses it",
            "`network.background` is not used",
        ],
    );
    let down = "[[event]]\nkind = \"link\"\nat_s = 1\nworker = 0\nshare = 0\n";
    check_refused(&format!("{packets}{down}"), &["has no end"]);
    assert!(parse(&format!("{packets}{down}until_s = 2\n")).is_ok());
}

#[test]
fn workers_fill_hosts_or_parts_of_them() {
    let text = |tensor: u32, gpus: u32, nics: u32, timing: &str| {
        format!(
            "[model]\npreset = \"llama-3.1-8b\"\n[pool.a]\nworkers = 3\n[engine]\nnum_gpu_blocks = 4096\n\
             tensor_parallel_size = {tensor}\n[engine.timing]\n{timing}\n[network]\nmode = \"flows\"\n\
             gpus_per_host = {gpus}\nnics_per_host = {nics}\n"
        )
    };
    let roofline = "kind = \"roofline\"\ngpu = \"h100-sxm\"";
    let hosts = |text: &str| {
        let (cluster, _) = parse(text).unwrap();
        let nics = cluster.network.nics(cluster.pools[0].engine.gpus());
        (cluster.hosts(), nics)
    };
    // Two workers of four GPUs share a host of eight; a host of two has half of one.
    assert_eq!(hosts(&text(4, 8, 0, roofline)), (vec![0, 0, 1], 4));
    assert_eq!(hosts(&text(4, 8, 4, roofline)), (vec![0, 0, 1], 2));
    assert_eq!(hosts(&text(4, 2, 0, roofline)), (vec![0, 2, 4], 4));
    assert_eq!(hosts(&text(8, 12, 0, roofline)), (vec![0, 1, 2], 8));
    let alone = text(4, 0, 0, roofline).replace("nics_per_host = 0\n", "");
    assert_eq!(hosts(&alone), (vec![0, 1, 2], 4));
    let constant = "kind = \"constant\"\nstep_ns = 10_000_000";
    assert!(parse(&text(4, 4, 0, constant)).is_ok());
    for (text, cause) in [
        (text(4, 2, 0, constant), "which part of them is collectives"),
        (text(8, 3, 0, roofline), "do not fill hosts of 3"),
        (
            text(4, 8, 3, roofline),
            "a divisor of `gpus_per_host`, which is 8",
        ),
        (text(2, 8, 2, roofline), "4 GPUs share a network interface"),
        (
            text(4, 0, 2, roofline),
            "`network.nics_per_host` is not used: `gpus_per_host` is 0",
        ),
        (
            text(4, 8, 0, roofline).replace("\"flows\"", "\"none\""),
            "`network.gpus_per_host` is not used",
        ),
    ] {
        check_refused(&text, &[cause]);
    }
}

#[test]
fn uplinks_that_fail_must_exist() {
    let event = |leaf: u32, spine: u32| {
        format!("[[event]]\nkind = \"uplink\"\nat_s = 1\nleaf = {leaf}\nspine = {spine}\n")
    };
    let network = |mode: &str, spines: u32| {
        format!(
            "[pool.main]\nworkers = 4\n[network]\nmode = \"{mode}\"\nworkers_per_leaf = 2\n\
             uplink_bits_per_s = 1e11\nspines = {spines}\n"
        )
    };
    let text = network("flows", 2) + &event(1, 1);
    let (cluster, _) = parse(&text).unwrap();
    let fault = Fault::Uplink { leaf: 1, spine: 1 };
    assert_eq!(
        (cluster.events[0].fault, &*cluster.events[0].workers),
        (fault, &[][..])
    );
    check_refused(
        &event(0, 0),
        &["is about a link between switches that is not modelled"],
    );
    check_refused(
        &(network("flows", 2) + &event(2, 2)),
        &[
            "`leaf = 2`, and the workers are under 2 leaf",
            "`spine = 2`, and `network.spines` is 2",
        ],
    );
    check_refused(
        "[network]\nspines = 2\n",
        &["the links to them have no rate"],
    );
    check_refused(
        &(network("packets", 2) + &event(0, 0) + &event(1, 1)),
        &["are about all spine switches"],
    );
    assert!(parse(&(network("packets", 2) + &event(0, 0) + &event(1, 0))).is_ok());
    assert!(parse(&(network("flows", 1) + &event(0, 0))).is_ok());
}

#[test]
fn threads_need_a_host_that_the_scheduler_takes() {
    let text = "[host]\nmode = \"threads\"\nscheduler = \"slipstream\"\ncpus = 96\nllcs = 12\nwake_by = \"pipe\"\n";
    let threads = parse(text).unwrap().0.host.threads;
    assert_eq!(threads.scheduler, HostScheduler::Slipstream);
    assert_eq!((threads.llcs, threads.wake_by), (12, WakeMechanism::Pipe));
    assert_eq!(threads.wake_idle_us, None);
    for (cpus, llcs, cause) in [
        (10, 4, "`host.cpus` is 10 and `host.llcs` is 4"),
        (96, 1, "64 at most"),
        (2_048, 32, "has at most 1024 CPUs"),
    ] {
        check_refused(
            &format!("[host]\nmode = \"threads\"\ncpus = {cpus}\nllcs = {llcs}\n"),
            &[cause],
        );
    }
    check_refused(
        "[network]\nmode = \"flows\"\nmessages = true\n[host]\nmode = \"threads\"\n",
        &["`network.messages` puts a network between them"],
    );
    check_refused(
        "[host]\nmode = \"ideal\"\nbackground = 3\n",
        &["`host.background` is not used: only \"threads\" uses it"],
    );
}

#[test]
fn events_of_groups_and_of_the_frontend() {
    let (cluster, _) = parse(
        "[pool.p]\nworkers = 2\nrole = \"prefill\"\n[pool.d]\nworkers = 3\nrole = \"decode\"\n\
         [[event]]\nkind = \"frontend\"\nat_s = 1\nuntil_s = 2\n\
         [[event]]\nkind = \"partition\"\nat_s = 3\nworkers = [4, 0, 4]\n\
         [[event]]\nkind = \"upgrade\"\nat_s = 4\npool = \"d\"\n\
         [[event]]\nkind = \"upgrade\"\nat_s = 5\ndrain_timeout_s = 7\n\
         [[event]]\nkind = \"gpu\"\nat_s = 6\nworker = 1\ndetect_s = 2\n\
         [[event]]\nkind = \"kv_loss\"\nat_s = 7\nworker = 2\n",
    )
    .unwrap();
    let found: Vec<_> = (cluster.events.into_iter())
        .map(|e| (e.fault, e.workers))
        .collect();
    let upgrade = |drain_timeout_s| Fault::Upgrade { drain_timeout_s };
    let partition = Fault::Partition {
        peer_deadline_s: 5.0,
    };
    assert_eq!(
        found,
        [
            (Fault::Frontend, vec![]),
            (partition, vec![0, 4]),
            (upgrade(None), vec![2, 3, 4]),
            (upgrade(Some(7.0)), vec![0, 1, 2, 3, 4]),
            (Fault::Gpu { detect_s: 2.0 }, vec![1]),
            (Fault::KvLoss { share: 1.0 }, vec![2]),
        ]
    );
    // In one line.
    let (cluster, _) =
        parse("event = [{ kind = \"frontend\", at_s = 10, until_s = 12 }]\n[pool.main]\n").unwrap();
    assert_eq!(cluster.events[0].until_s, Some(12.0));
    check_refused(
        "[[event]]\nkind = \"frontend\"\nat_s = 1\nworker = 0\n\
         [[event]]\nkind = \"partition\"\nat_s = 1\nworkers = [1]\n\
         [[event]]\nkind = \"partition\"\nat_s = 1\nworker = 0\n\
         [[event]]\nkind = \"upgrade\"\nat_s = 1\nuntil_s = 2\npool = \"x\"\n\
         [[event]]\nkind = \"gpu\"\nat_s = 1\nuntil_s = 3\ndetect_s = 2\nworker = 0\n\
         [[event]]\nkind = \"kv_late\"\nat_s = 1\nworker = 0\nworkers = [0]\n",
        &[
            "`event[0].worker` is not used: it is a fault of the frontend",
            "`event[1].workers` is [1], but must be numbers of workers, each 0 to 0",
            "`event[2].workers` is missing",
            "`event[2].worker` is not used: \"partition\" has `workers`",
            "`event[3].until_s` is not used: it ends when the last worker is back",
            "`event[3].pool` is \"x\", but must be the name of a pool: main",
            "`until_s` is 3, but the worker ends at 3",
            "`event[5].workers` is not used: only \"partition\" uses it",
            "`event[5].delay_ms` is missing",
        ],
    );
}

#[test]
fn a_model_larger_than_its_gpus_is_refused_with_the_numbers() {
    check_refused(
        "[model]\npreset = \"llama-3.1-70b\"\n[engine]\ntensor_parallel_size = 1\n",
        &[
            "c.toml:4:24: llama-3.1-70b takes 141.1 GB of weights and 0.8 GB of buffers to sample \
           256 sequences on each of 1 GPU of h100-sxm, but 85.5 GB of it is 77.0 GB (`gpu_memory_utilization` 0.9), which leaves no block of KV cache\n\
           hint: set `tensor_parallel_size = 4`, or use a larger GPU",
        ],
    );
}

/// The widths of counts on the wire and in addresses.
#[test]
fn counts_that_no_message_can_hold_are_refused() {
    let (cluster, _) = parse("[pool.a]\nworkers = 65_535\n[live]\nshards = 255\n").unwrap();
    assert_eq!(
        (cluster.pools[0].workers, cluster.live.shards),
        (65_535, 255)
    );
    check_refused(
        "[pool.a]\nworkers = 65_536\n",
        &["c.toml:2:11: `pool.a.workers` is 65536, but must be 1 to 65535"],
    );
    check_refused(
        "[pool.a]\nworkers = 65_535\n[pool.b]\nworkers = 1\n",
        &["the pools have 65536 workers, but must have at most 65535"],
    );
    check_refused(
        "[live]\nshards = 256\n",
        &["c.toml:2:10: `live.shards` is 256, but must be 0 to 255"],
    );
}

#[test]
fn values_that_contradict_each_other_are_refused() {
    check_refused(
        "[engine]\ntensor_parallel_size = 3\n",
        &[
            "`tensor_parallel_size` is 3, but qwen3-8b has 32 attention heads, 8 key-value heads and an MLP width \
           of 12288, which do not all split evenly\nhint: one of 1, 2, 4, 8, 16, 32",
        ],
    );
    check_refused(
        "[engine]\nnum_gpu_blocks = 10\nmax_model_len = 1000\n",
        &["`max_model_len` is 1000, but the KV cache holds 160 tokens (10 blocks of 16)"],
    );
    check_refused(
        "[engine]\nblock_size = 64\nmax_model_len = 32\n",
        &["`block_size` is 64, but `max_model_len` is 32"],
    );
    check_refused(
        "[engine]\nmax_num_seqs = 64\nmax_num_batched_tokens = 32\n",
        &["`max_num_batched_tokens` is 32, but `max_num_seqs` is 64"],
    );
    check_refused(
        "[engine]\nenable_chunked_prefill = false\nmax_num_batched_tokens = 4096\n",
        &["chunked prefill is off"],
    );
    check_refused(
        "[engine]\nmax_num_seqs = 64\nmax_num_active_seqs = 65\n",
        &["c.toml:3:23: `max_num_active_seqs` is more than `max_num_seqs`, 64"],
    );
    check_refused(
        "[engine]\nmax_model_len = 512\nlong_prefill_token_threshold = 513\n",
        &["`long_prefill_token_threshold` is 513, but `max_model_len` is 512"],
    );
    check_refused(
        "[engine]\nmax_model_len = 512\nenable_chunked_prefill = false\nmax_num_scheduled_tokens = 511\n",
        &[
            "`max_num_scheduled_tokens` is less than `max_model_len`, 512, and chunked prefill is off",
        ],
    );
    check_refused(
        "[engine.timing]\nkind = \"roofline\"\ngpu = \"a100-sxm-80gb\"\ndtype = \"fp8\"\n",
        &["c.toml:4:9: `dtype` is \"fp8\", but a100-sxm-80gb has no FP8 units"],
    );
    check_refused(
        "[engine]\nmax_model_len = 50_000\n",
        &["`engine.max_model_len` is 50000, but must be 1 to 40960"],
    );
    check_refused(
        "[pool.a]\n[pool.b.engine]\nblock_size = 32\n",
        &["pool `a` has blocks of 16 tokens, but pool `b` of 32"],
    );
    check_refused("[pool.\"a b\"]\n", &["`a b` cannot name a pool"]);
    check_refused(
        "[pool.a]\nworkers = 65_000\n[pool.b]\nworkers = 65_000\n",
        &["130000 workers"],
    );
    check_refused(
        "[live]\nlisten = \"8000\"\nspeedup = -1\n",
        &[
            "`live.listen` is \"8000\"",
            "`live.speedup` is -1.0, but must be 0 to",
        ],
    );
}

#[test]
fn keys_of_another_kind_are_refused_unless_a_flag_chose_the_kind() {
    let text = "[engine.timing]\nkind = \"constant\"\nstep_ns = 5\ngpu = \"h100-sxm\"\n\
                [engine.output_len]\ntokens = 5\n";
    check_refused(
        text,
        &[
            "c.toml:4:1: `engine.timing.gpu` is not used: `kind` is \"constant\"",
            "c.toml:6:1: `engine.output_len.tokens` is not used: `kind` is \"lognormal\"",
        ],
    );
    let mut doc = Doc::parse("c.toml", b"[engine.timing]\ngpu = \"h200-sxm\"\n");
    doc.set("engine.timing.kind=constant");
    doc.set("engine.timing.step_ns=7");
    let (cluster, _) = read(doc, |_| Err(io::ErrorKind::NotFound.into())).unwrap();
    assert_eq!(
        cluster.pools[0].engine.timing,
        TimingConfig::Constant { step_ns: 7 }
    );
    check_refused(
        "[engine.timing]\nkind = \"constant\"\n",
        &["`engine.timing.step_ns` is missing"],
    );
}

#[test]
fn autoscaling_is_read_for_each_pool() {
    let text = "[autoscale]\npolicy = \"queue\"\ninterval_s = 5\n[pool.a]\nworkers = 4\n\
                [pool.b]\nworkers = 8\n[pool.b.autoscale]\npolicy = \"slo\"\nworkers_min = 3\n";
    let (cluster, _) = parse(text).unwrap();
    let of = |pool: usize| cluster.pools[pool].autoscale.unwrap();
    assert_eq!(
        (of(0).policy, of(1).policy),
        (AutoscalePolicy::Queue, AutoscalePolicy::Slo)
    );
    assert_eq!((of(0).target, of(1).target), (4.0, 0.8));
    assert_eq!((of(0).interval_s, of(1).interval_s), (5.0, 5.0));
    assert_eq!((of(0).workers_start, of(1).workers_start), (1, 3));
    assert_eq!(Cluster::default().pools[0].autoscale, None);
    check_refused("[autoscale]\ntarget = 0.5\n", &["`policy` is \"none\""]);
    check_refused(
        "[autoscale]\npolicy = \"queue\"\nworkers_min = 2\n",
        &["workers_min` is 2"],
    );
    check_refused("[autoscale]\npolicy = \"cpu\"\n", &["\"utilization\""]);
    check_refused(
        "[autoscale]\npolicy = \"slo\"\nworkers_max = 4\n[pool.main]\nengines = [\"http://a:1\"]\n",
        &["first tokens are not measured"],
    );
    check_refused(
        "[autoscale]\npolicy = \"queue\"\n[pool.main]\nengines = [\"http://a:1\"]\n",
        &["workers_max` is missing"],
    );
    let text = "[autoscale]\npolicy = \"queue\"\nworkers_max = 9\n[pool.main]\nengines = [\"http://a:1\"]\n";
    let (cluster, _) = parse(text).unwrap();
    assert_eq!(cluster.pools[0].autoscale.unwrap().workers_max, 9);
}

#[test]
fn a_trend_has_a_window_and_looks_as_far_ahead_as_a_start_takes() {
    let of = |text: &str| {
        let text = format!("[engine]\nstartup_s = 40\n[autoscale]\n{text}");
        parse(&text).unwrap().0.pools[0].autoscale.unwrap()
    };
    let plain = of("policy = \"predictive\"\ninterval_s = 10\n");
    assert_eq!((plain.trend_s, plain.lookahead_s), (80.0, 50.0));
    let own = of("policy = \"predictive\"\ntrend_s = 60\nlookahead_s = 5\n");
    assert_eq!((own.trend_s, own.lookahead_s), (60.0, 5.0));
    for (keys, part) in [
        ("policy = \"predictive\"\ntrend_s = 20\n", "`trend_s` is 20"),
        ("policy = \"queue\"\ntrend_s = 60\n", "not \"predictive\""),
        ("policy = \"queue\"\nttft_s = 1\n", "not \"slo\""),
        ("policy = \"custom\"\ntarget = 1\n", "the function decides"),
    ] {
        check_refused(&format!("[autoscale]\n{keys}"), &[part]);
    }
    check_refused("[live.autoscale]\nwebhook = \"a:1\"\n", &["http://a:1"]);
    check_refused(
        "[live.autoscale]\nwebhook_timeout_s = 1\n",
        &["there is no `webhook`"],
    );
}

#[test]
fn settings_of_vllms_scheduler_are_read() {
    let engine = |text: &str| {
        let (cluster, _) = parse(&format!("[engine]\n{text}")).unwrap();
        cluster.pools[0].engine.clone()
    };
    let default = engine("");
    // As vLLM's.
    assert!(default.async_scheduling && default.scheduler_reserve_full_isl);
    let changed = engine(
        "async_scheduling = false\nlong_prefill_token_threshold = 100\n\
         long_prefill_token_threshold_adaptive = true\nmax_num_active_seqs = 5\n\
         max_num_scheduled_tokens = 300\nscheduler_reserve_full_isl = false\n",
    );
    let expected = EngineConfig {
        async_scheduling: false,
        long_prefill_token_threshold: 100,
        long_prefill_token_threshold_adaptive: true,
        max_num_active_seqs: Some(5),
        max_num_scheduled_tokens: Some(300),
        scheduler_reserve_full_isl: false,
        ..default
    };
    assert_eq!(changed, expected);
}

#[test]
fn settings_of_vllm_that_are_not_modelled_are_refused_by_name() {
    for (key, _) in NOT_MODELLED {
        let text = format!("[engine]\n{key} = 1\n");
        check_refused(&text, &[&format!("`engine.{key}` is not modelled")]);
    }
}

#[test]
fn files_that_cannot_be_used_are_mistakes() {
    check_refused(
        "[model]\nconfig = \"no.json\"\n",
        &["c.toml:2:10: `model.config`: no.json: "],
    );
    check_refused(
        "[model]\nconfig = \"broken.json\"\n",
        &["`model.config`: broken.json: not JSON: EOF"],
    );
    check_refused(
        "[engine.timing]\nkind = \"table\"\npath = \"no.csv\"\n",
        &["`path`: no.csv: "],
    );
    check_refused(
        "[engine.timing]\nkind = \"table\"\n",
        &["`engine.timing.path` is missing"],
    );
}

#[test]
fn a_config_json_gives_name_and_shape() {
    let (cluster, settings) = parse("[model]\nconfig = \"models/tiny/config.json\"\n").unwrap();
    assert_eq!(cluster.model.name, "tiny");
    assert_eq!(cluster.model.shape.layers, 2);
    assert_eq!(cluster.pools[0].engine.max_model_len, 512);
    let origin = &settings.get("model.name").unwrap().origin;
    assert_eq!(origin.to_string(), "folder of model.config");
}

/// The `config.json` of an FP8 checkpoint, alone and with settings of the file.
fn parse_with_json(json: &'static str, text: &str) -> Result<(Cluster, Settings), Diagnostics> {
    let text = format!("[model]\nconfig = \"m/config.json\"\n{text}");
    read(Doc::parse("c.toml", text.as_bytes()), |path| {
        if path.ends_with("m/config.json") {
            Ok(json.into())
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    })
}

const FP8_JSON: &str = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
    "quantization_config": {"quant_method": "fp8"}}"#;

#[test]
fn an_fp8_checkpoint_sets_the_format_of_weights() {
    let (cluster, settings) = parse_with_json(FP8_JSON, "").unwrap();
    let engine = &cluster.pools[0].engine;
    let TimingConfig::Calibrated { dtype, .. } = &engine.timing else {
        panic!("{:?}", engine.timing)
    };
    assert_eq!((*dtype, engine.kv_cache_dtype), (Dtype::Fp8, Dtype::Bf16));
    let dtype = settings.get("pool.main.engine.timing.dtype").unwrap();
    assert_eq!(dtype.value.as_deref(), Some("\"fp8\""));
    assert_eq!(dtype.origin.to_string(), "checkpoint of m");
    for (text, part) in [
        (
            "[engine.timing]\ndtype = \"bf16\"\n",
            "`dtype` is \"bf16\", but m has fp8 weights",
        ),
        (
            "[engine.timing]\nkind = \"roofline\"\ngpu = \"a100-sxm-80gb\"\n",
            "a100-sxm-80gb has no FP8 units, and FP8 weights with 16-bit arithmetic",
        ),
    ] {
        let diagnostics = parse_with_json(FP8_JSON, text).unwrap_err().to_string();
        assert!(diagnostics.contains(part), "{diagnostics}");
    }
}

#[test]
fn host_memory_holds_whole_blocks_of_a_rank() {
    let tier = |text: &str| {
        let text = format!("[model]\npreset = \"llama-3.1-8b\"\n{text}");
        parse(&text).map(|(cluster, _)| cluster.pools[0].engine.host_tier)
    };
    assert_eq!(tier("").unwrap(), None);
    // A block: 16 tokens x 2 x 32 layers x 8 heads x 128 x 2 bytes = 2 MiB.
    let on = "[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\nlatency_us = 3\n";
    let expected = HostTierConfig {
        blocks: 512,
        load_ns_per_block: 2_097_152,
        latency_ns: 3_000,
    };
    assert_eq!(tier(on).unwrap(), Some(expected));
    // Each of two GPUs loads its half.
    let two = tier(&format!("[engine]\ntensor_parallel_size = 2\n{on}"));
    let half = HostTierConfig {
        load_ns_per_block: 1_048_576,
        ..expected
    };
    assert_eq!(two.unwrap(), Some(half));
    for (text, part) in [
        ("gib = 1", "PCIe 5.0 x16 carries at most 63e9"),
        ("gib = 0.001\nbytes_per_s = 1e9", "less than one block"),
        ("gib = -1\nbytes_per_s = 1e9", "0"),
    ] {
        let error = tier(&format!("[engine.host_tier]\n{text}\n")).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn peers_are_asked_if_enabled() {
    let tier = |text: &str| {
        let text = format!("[model]\npreset = \"llama-3.1-8b\"\n[engine.peer_tier]\n{text}");
        parse(&text).map(|(cluster, _)| cluster.pools[0].engine.peer_tier)
    };
    assert_eq!(tier("").unwrap(), None);
    let expected = PeerTierConfig { latency_ns: 2_500 };
    assert_eq!(
        tier("enabled = true\nlatency_us = 2.5\n").unwrap(),
        Some(expected)
    );
    for (text, part) in [
        ("latency_us = 1\n", "`enabled` is false"),
        ("enabled = true\nlatency_us = -1\n", "0"),
    ] {
        let error = tier(text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_disk_holds_what_host_memory_evicts() {
    let disk = |text: &str| {
        let text = format!("[model]\npreset = \"llama-3.1-8b\"\n{text}");
        parse(&text).map(|(cluster, _)| cluster.pools[0].engine.disk_tier)
    };
    const HOST: &str = "[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\n";
    assert_eq!(disk(HOST).unwrap(), None);
    let on = "[engine.disk_tier]\ngib = 2\nbytes_per_s = 2e9\nwrite_bytes_per_s = 1e9\nlatency_us = 100\n";
    let expected = DiskTierConfig {
        blocks: 1024,
        load_ns_per_block: 1_048_576,
        store_ns_per_block: 2_097_152,
        latency_ns: 100_000,
    };
    assert_eq!(disk(&format!("{HOST}{on}")).unwrap(), Some(expected));
    // The GPUs of a rank share its disk.
    let two = disk(&format!("[engine]\ntensor_parallel_size = 2\n{HOST}{on}"));
    assert_eq!(two.unwrap(), Some(expected));
    for (text, part) in [
        (on, "there is no `host_tier`"),
        (&*format!("{HOST}[engine.disk_tier]\ngib = 1\n"), "15.8e9"),
        (
            &format!("{HOST}[engine.disk_tier]\nlatency_us = 1\n"),
            "`gib` is 0",
        ),
    ] {
        let error = disk(text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn speculation_is_given_by_measured_acceptance() {
    let read = |text: &str| {
        let text = format!("[engine.speculation]\n{text}\n");
        parse(&text).map(|(cluster, _)| cluster.pools[0].engine.speculation.clone())
    };
    assert_eq!(read("").unwrap(), None);
    let on =
        "num_speculative_tokens = 2\nmethod = \"eagle\"\nacceptance = [0.8, 0.5]\ndraft_us = 300\n";
    let expected = SpeculationConfig {
        method: SpeculationMethod::Eagle,
        acceptance: vec![0.8, 0.5],
        draft_ns: 300_000.0,
        draft_share: 0.0,
    };
    assert_eq!(read(on).unwrap(), Some(expected.clone()));
    let longer = on.replace("0.5]", "0.5, 0.2]");
    assert_eq!(read(&longer).unwrap(), Some(expected));
    for (text, part) in [
        (
            "num_speculative_tokens = 2\nmethod = \"mtp\"",
            "Per-position acceptance rate",
        ),
        (
            "num_speculative_tokens = 2\nacceptance = [0.8, 0.5]",
            "name the drafter",
        ),
        (
            "num_speculative_tokens = 2\nmethod = \"mtp\"\nacceptance = [0.8]",
            "a list of at least 2",
        ),
        (
            "num_speculative_tokens = 2\nmethod = \"mtp\"\nacceptance = [0.5, 0.8]",
            "none larger than the one before",
        ),
        (
            "num_speculative_tokens = 1\nmethod = \"mtp\"\nacceptance = [1.5]",
            "shares of 0 to 1",
        ),
        ("method = \"mtp\"", "`num_speculative_tokens` is 0"),
        ("num_speculative_tokens = 33", "32"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    let vllm = parse("[engine]\nspeculative_config = {}\n").unwrap_err();
    assert!(vllm.to_string().contains("[engine.speculation]"), "{vllm}");
}

#[test]
fn experts_that_are_divided_may_be_loaded_unequally() {
    let text = "[model]\npreset = \"qwen3-235b-a22b\"\n[engine]\ntensor_parallel_size = 8\n\
                enable_expert_parallel = true\nexpert_imbalance = 1.5\n";
    let (cluster, _) = parse(text).unwrap();
    assert_eq!(cluster.pools[0].engine.expert_imbalance, Some(1.5));
    check_refused(
        &text.replace("1.5", "0.9"),
        &["`engine.expert_imbalance` is 0.9, but must be 1 to 1024"],
    );
    check_refused(
        "[engine]\nexpert_imbalance = 1.5\n",
        &["`enable_expert_parallel` is false"],
    );
}

#[test]
fn adapters_have_room_in_host_memory() {
    let lora = |text: &str| {
        let (cluster, _) = parse(&format!("[engine.lora]\n{text}")).unwrap();
        cluster.pools[0].engine.lora
    };
    assert_eq!(lora(""), None);
    let all = lora("max_loras = 2\nmax_cpu_loras = 9\nload_ms = 1.5\nactivate_ms = 2\n").unwrap();
    assert_eq!((all.max_loras, all.max_cpu_loras), (2, 9));
    assert_eq!((all.load_ns, all.activate_ns), (1_500_000, 2_000_000));
    assert_eq!(lora("max_loras = 3\n").unwrap().max_cpu_loras, 3);
    check_refused(
        "[engine.lora]\nmax_loras = 3\nmax_cpu_loras = 2\n",
        &["`max_cpu_loras` is less than `max_loras`, 3"],
    );
    check_refused("[engine.lora]\nload_ms = 3\n", &["`max_loras` is 0"]);
}

#[test]
fn stages_divide_layers_and_memory() {
    // Worked out from vLLM's rule: the rest goes to the stages before the last, from the back.
    for (layers, stages, expected) in [
        (36, 1, vec![36]),
        (36, 2, vec![18, 18]),
        (32, 3, vec![11, 11, 10]),
        (61, 4, vec![15, 15, 16, 15]),
        (63, 4, vec![16, 16, 16, 15]),
    ] {
        assert_eq!(layers_of_stages(layers, stages), expected);
    }
    let engine = |text: &str| {
        let (cluster, _) = parse(&format!("[model]\npreset = \"llama-3.1-8b\"\n{text}")).unwrap();
        (cluster.gpus(), cluster.pools[0].engine.clone())
    };
    let (one_gpus, one) = engine("");
    let (two_gpus, two) = engine(
        "[engine]\npipeline_parallel_size = 2\npipeline_link_bytes_per_s = 1e9\npipeline_latency_us = 30\n",
    );
    assert_eq!((one_gpus, two_gpus, one.pipeline), (1, 2, None));
    let stages = two.pipeline.unwrap();
    assert_eq!((stages.layers, stages.latency_ns), (vec![16, 16], 30_000.0));
    // 4,096 numbers of two bytes.
    assert_eq!(stages.send_ns_per_token, 8_192.0);
    // Half of the weights and half of each block: more than twice the blocks.
    assert!(
        two.num_gpu_blocks > 2 * one.num_gpu_blocks,
        "{}",
        two.num_gpu_blocks
    );
    // The link of the GPU.
    let (_, near) = engine("[engine]\npipeline_parallel_size = 2\n");
    let send_ns = near.pipeline.unwrap().send_ns_per_token;
    assert!(send_ns > 0.0 && send_ns < 8_192.0 / 10.0, "{send_ns}");
    let (_, free) = engine(
        "[engine]\npipeline_parallel_size = 2\n[engine.timing]\nkind = \"constant\"\nstep_ns = 1\n",
    );
    assert_eq!(free.pipeline.unwrap().send_ns_per_token, 0.0);
    check_refused(
        "[engine]\npipeline_parallel_size = 37\n",
        &["`pipeline_parallel_size` is 37, but qwen3-8b has 36 layers"],
    );
    check_refused(
        "[engine]\npipeline_latency_us = 5\n",
        &["`pipeline_parallel_size` is 1"],
    );
    check_refused(
        "[engine]\npipeline_parallel_size = 2\n[engine.speculation]\nnum_speculative_tokens = 1\n\
         method = \"mtp\"\nacceptance = [0.5]\n",
        &["pipelines that verify drafts are not modelled"],
    );
}

#[test]
fn the_kv_cache_has_a_format_of_its_own() {
    let blocks = |text: &str| {
        let (cluster, _) = parse(text).unwrap();
        let bytes = cluster.kv_bytes_per_token()[0];
        (cluster.pools[0].engine.num_gpu_blocks, bytes)
    };
    let plain = blocks("");
    let weights = blocks("[engine.timing]\ndtype = \"fp8\"\n");
    let cache = blocks("[engine]\nkv_cache_dtype = \"fp8\"\n");
    let auto = blocks("[engine]\nkv_cache_dtype = \"auto\"\n");
    // FP8 weights leave room for more blocks of the same size; an FP8 cache halves their size.
    assert_eq!(auto, plain);
    assert!(weights.0 > plain.0 && weights.0 < plain.0 * 3 / 2);
    assert_eq!(weights.1, plain.1);
    assert_eq!((cache.0 / 2, cache.1 * 2), plain);
    // The checkpoint contains scales for an FP8 cache.
    let scales = r#"{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8"}}"#;
    for (text, expected) in [
        ("", Dtype::Fp8),
        ("[engine]\nkv_cache_dtype = \"bf16\"\n", Dtype::Bf16),
    ] {
        let (cluster, _) = parse_with_json(scales, text).unwrap();
        assert_eq!(cluster.pools[0].engine.kv_cache_dtype, expected);
    }
}

#[test]
fn ranks_of_a_mixture_of_experts_divide_them_or_are_refused() {
    check_refused(
        "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 2\ndata_parallel_size = 2\n\
         [engine.timing]\nkind = \"roofline\"\n",
        &["c.toml:5:22: `data_parallel_size` is 2, but mixtral-8x7b is a mixture of experts"],
    );
    // Two ranks divide the experts: twice the GPUs, and more room than one rank has.
    let mixture = |ranks: u32| {
        let text = format!(
            "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 2\n\
             data_parallel_size = {ranks}\nenable_expert_parallel = true\n"
        );
        let engine = parse(&text).unwrap().0.pools[0].engine.clone();
        engine.num_gpu_blocks
    };
    assert!(mixture(2) > mixture(1) * 3 / 2);
    check_refused(
        "[engine]\nenable_expert_parallel = true\n",
        &["`enable_expert_parallel` is true, but qwen3-8b has no experts"],
    );
    let dense = "[engine]\ndata_parallel_size = 2\n";
    assert_eq!(parse(dense).unwrap().0.gpus(), 2);
}

#[test]
fn ranks_meet_if_they_share_experts() {
    let mixture = |text: &str| {
        format!(
            "[model]\npreset = \"mixtral-8x7b\"\n[engine]\ntensor_parallel_size = 2\n\
             data_parallel_barrier = true\n{text}"
        )
    };
    let barrier = |text: &str| parse(text).unwrap().0.pools[0].engine.data_parallel_barrier;
    assert!(!barrier("[engine]\ndata_parallel_size = 2\n"));
    assert!(barrier(&mixture("data_parallel_size = 2\n")));
    // Times that are stated are those of ranks that share experts; a roofline has all experts on each.
    let constant = "[engine.timing]\nkind = \"constant\"\nstep_ns = 5\n";
    assert!(barrier(&mixture(&format!(
        "data_parallel_size = 2\n{constant}"
    ))));
    let roofline = "data_parallel_size = 2\n[engine.timing]\nkind = \"roofline\"\n";
    check_refused(&mixture(roofline), &["`data_parallel_size` is 2"]);
    assert!(!barrier(&mixture("")));
    check_refused(
        &mixture("data_parallel_size = 2\npipeline_parallel_size = 2\n"),
        &["`data_parallel_barrier` is true, but `pipeline_parallel_size` is 2"],
    );
    check_refused(
        &mixture("data_parallel_size = 2\n[host]\nmode = \"threads\"\ncpus = 4\n"),
        &["`host.mode` is \"threads\", whose engines begin their passes one by one"],
    );
    check_refused(
        "[engine]\ndata_parallel_size = 2\ndata_parallel_barrier = true\n",
        &["c.toml:3:25: `data_parallel_barrier` is true, but the ranks of qwen3-8b"],
    );
}

#[test]
fn an_encoder_has_a_time_and_the_room_of_a_pass() {
    let encoder = |text: &str| {
        let text = format!("[engine]\nmax_num_batched_tokens = 4096\n[engine.encoder]\n{text}");
        parse(&text).map(|(cluster, _)| cluster.pools[0].engine.encoder)
    };
    assert_eq!(encoder("").unwrap(), None);
    let stated = encoder("enabled = true\ntoken_us = 20\ninput_us = 5\n")
        .unwrap()
        .unwrap();
    assert_eq!((stated.budget_tokens, stated.cache_tokens), (4096, 4096));
    assert_eq!((stated.token_ns, stated.input_ns), (20e3, 5e3));
    // 2 x 0.5e9 x 4 operations at half of 989.4e12 per second.
    let derived = encoder("enabled = true\nparameters = 0.5e9\n")
        .unwrap()
        .unwrap();
    assert!(
        (derived.token_ns - 4e9 / 494.7e12 * 1e9).abs() < 10.0,
        "{}",
        derived.token_ns
    );
    let refused = |text: &str| encoder(text).unwrap_err().to_string();
    for (text, part) in [
        ("enabled = true\n", "`engine.encoder.token_us` is missing"),
        ("token_us = 5\n", "`enabled` is false"),
        (
            "enabled = true\ntoken_us = 5\nflops_share = 0.4\n",
            "`parameters` is not set",
        ),
        (
            "enabled = true\nparameters = 1e9\n[engine.timing]\nkind = \"constant\"\nstep_ns = 5\n",
            "`engine.timing` has none",
        ),
        (
            "enabled = true\ntoken_us = 5\n[engine.peer_tier]\nenabled = true\n",
            "`engine.peer_tier` is not modelled",
        ),
    ] {
        let error = refused(text);
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn formats_that_no_checkpoint_has_are_refused() {
    let of = |model: &str, dtype: &str| {
        let text = format!(
            "[model]\npreset = \"{model}\"\n[engine]\ntensor_parallel_size = 8\n\
             [engine.timing]\ngpu = \"b200-sxm\"\ndtype = \"{dtype}\"\n"
        );
        parse(&text).map(|_| ()).map_err(|e| e.to_string())
    };
    // Fewer bits than the model was released in are published as other checkpoints; more are not.
    for (model, dtype) in [
        ("llama-3.1-70b", "int4"),
        ("llama-3.1-70b", "nvfp4"),
        ("deepseek-v3", "fp8"),
        ("deepseek-v3", "nvfp4"),
        ("gpt-oss-120b", "mxfp4"),
    ] {
        assert_eq!(of(model, dtype), Ok(()), "{model} {dtype}");
    }
    for (model, dtype, has) in [
        ("gpt-oss-120b", "fp8", "mxfp4"),
        ("gpt-oss-120b", "bf16", "mxfp4"),
        ("gpt-oss-120b", "nvfp4", "mxfp4"),
        ("deepseek-v3", "bf16", "fp8"),
        ("deepseek-v3", "int8", "fp8"),
    ] {
        let error = of(model, dtype).unwrap_err();
        let expected = format!("`dtype` is \"{dtype}\", but {model} has {has} weights");
        assert!(error.contains(&expected), "{error}");
    }
    // A `config.json` is one checkpoint.
    for dtype in ["nvfp4", "int4", "bf16"] {
        let text = format!("[engine.timing]\ndtype = \"{dtype}\"\n");
        let error = parse_with_json(FP8_JSON, &text).unwrap_err().to_string();
        assert!(error.contains("but m has fp8 weights"), "{error}");
    }
}

#[test]
fn a_flag_that_a_pool_overrides_is_refused_with_the_key_to_set() {
    let text = "[engine]\nblock_size = 32\n[pool.main.engine]\nmax_num_seqs = 64\n\
                timing.gpu = \"l40s\"\n";
    let resolve = |sets: &[&str]| {
        let mut doc = Doc::parse("c.toml", text.as_bytes());
        for set in sets {
            doc.set(set);
        }
        read(doc, |_| Err(io::ErrorKind::NotFound.into())).map_err(|e| e.to_string())
    };
    let error = resolve(&["engine.max_num_seqs=8", "engine.timing.gpu=h100-sxm"]).unwrap_err();
    assert_eq!(
        error,
        "--set engine.max_num_seqs=8: `engine.max_num_seqs` would have no effect: \
         `pool.main.engine.max_num_seqs` is set (c.toml:4)\n\
         hint: set `pool.main.engine.max_num_seqs` instead\n\
         error: --set engine.timing.gpu=h100-sxm: `engine.timing.gpu` would have no effect: \
         `pool.main.engine.timing.gpu` is set (c.toml:5)\n\
         hint: set `pool.main.engine.timing.gpu` instead"
    );
    // The pool's own key, and keys that no pool has.
    let own = "pool.main.engine.max_num_seqs=8";
    let (cluster, _) = resolve(&[own, "engine.block_size=16"]).unwrap();
    let engine = &cluster.pools[0].engine;
    assert_eq!((engine.max_num_seqs, engine.block_size), (8, 16));
    assert!(resolve(&["engine.max_num_seqs=4", own]).is_ok());
}

#[test]
fn a_gpu_like_a_preset_with_its_numbers_is_that_preset() {
    let text = "[gpu.same]\nlike = \"h100-sxm\"\n[gpu.big]\nlike = \"h100-sxm\"\nmemory_bytes = 141e9\n\
                [pool.a.engine.timing]\ngpu = \"same\"\n[pool.b.engine.timing]\ngpu = \"big\"\n";
    let (cluster, _) = parse(text).unwrap();
    let names: Vec<&str> = cluster
        .pools
        .iter()
        .map(|pool| match &pool.engine.timing {
            TimingConfig::Calibrated { gpu, .. } => gpu.measured_name(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(names, ["h100-sxm", "big"]);
}

#[test]
fn a_gpu_and_a_link_are_said_by_numbers() {
    let text = "[link.pairs]\nkind = \"fabric\"\nbytes_per_s = 300e9\nreduce_us = 12\n\
                [gpu.ours]\nbf16_flops = 148e12\nmemory_bytes = 96e9\nmemory_bytes_per_s = 4e12\nlink = \"pairs\"\n\
                [gpu.big]\nlike = \"h100-sxm\"\nmemory_bytes = 141e9\n\
                [pool.a.engine.timing]\ngpu = \"ours\"\n[pool.b.engine.timing]\ngpu = \"big\"\n";
    let (cluster, settings) = parse(text).unwrap();
    let gpu = |pool: usize| match &cluster.pools[pool].engine.timing {
        TimingConfig::Calibrated { gpu, .. } => gpu,
        other => panic!("{other:?}"),
    };
    let (ours, big, preset) = (gpu(0), gpu(1), preset::gpu("h100-sxm").unwrap());
    assert_eq!(
        (&*ours.name, ours.kin(), ours.fp8_flops),
        ("ours", "ours", None)
    );
    assert_eq!(
        (ours.link, ours.link_bytes_per_s, ours.reduce_us),
        (Link::Fabric, 300e9, Some(12.0))
    );
    assert_eq!((big.kin(), big.fp8_flops), ("h100-sxm", preset.fp8_flops));
    assert_eq!((big.memory_bytes, big.link), (141_000_000_000, preset.link));
    assert!(cluster.pools[1].engine.num_gpu_blocks > cluster.pools[0].engine.num_gpu_blocks);
    let (again, _) = parse(&settings.to_toml()).unwrap();
    assert_eq!(again, cluster);
    check_refused(
        "[gpu.h20]\nmemory_bytes = 1e9\nlink = \"x\"\n[engine.timing]\ngpu = \"y\"\n",
        &[
            "`h20` is a preset",
            "`gpu.h20.bf16_flops` is missing",
            "`gpu.h20.memory_bytes_per_s` is missing",
            "there is no table `[link.x]`",
            "`engine.timing.gpu` is a string (\"y\"), but must be one of \"h20\", \"a100-sxm-80gb\"",
        ],
    );
}

/// A name is no data: only `like` says whose kernels a GPU has.
#[test]
fn the_name_of_a_gpu_says_nothing_of_its_generation() {
    let numbers = "bf16_flops = 989e12\nmemory_bytes = 85e9\nmemory_bytes_per_s = 3350e9\n";
    for (like, generation) in [("", "older"), ("like = \"b200-sxm\"\n", "blackwell")] {
        let text =
            format!("[gpu.h100-mine]\n{numbers}{like}[engine.timing]\ngpu = \"h100-mine\"\n");
        let (cluster, _) = parse(&text).unwrap();
        let TimingConfig::Calibrated { gpu, .. } = &cluster.pools[0].engine.timing else {
            panic!("the default kind")
        };
        assert_eq!(gpu.generation, generation);
    }
}

#[test]
fn kv_blocks_follow_from_the_gpu() {
    let (cluster, settings) = parse("").unwrap();
    assert_eq!(cluster, Cluster::default());
    // 81,559 MiB x 0.9 - 16.38 GB of weights - 24 bytes x 256 x 151,936 logits, over 16 tokens of
    // 147,456 bytes.
    let engine = &cluster.pools[0].engine;
    assert_eq!(engine.num_gpu_blocks, 25_284);
    assert_eq!(
        engine.max_model_len, 40_960,
        "the model's, since the cache holds more"
    );
    let blocks = settings.get("pool.main.engine.num_gpu_blocks").unwrap();
    assert_eq!(
        blocks.origin.to_string(),
        "h100-sxm 85.5 GB x 0.9 - 16.4 GB of weights - 0.9 GB to sample 256 sequences = 59.7 GB",
    );
    let tight = "[model]\npreset = \"qwen3-32b\"\n[engine]\ngpu_memory_utilization = 0.85\n";
    let (cluster, settings) = parse(tight).unwrap();
    let len = settings.get("pool.main.engine.max_model_len").unwrap();
    assert_eq!(
        len.origin.to_string(),
        "KV cache holds 23776, qwen3-32b allows 40960"
    );
    assert_eq!(cluster.pools[0].engine.max_model_len, 23_776);
}

#[test]
fn kv_blocks_are_close_to_those_that_vllm_reports() {
    let blocks = |gpu: &str, sequences: u32| {
        let text = format!(
            "[model]\npreset = \"llama-3.1-8b\"\n[engine]\nmax_num_seqs = {sequences}\n\
             [engine.timing]\ngpu = \"{gpu}\"\n"
        );
        parse(&text).unwrap().0.pools[0].engine.num_gpu_blocks
    };
    // vLLM on one H100 of 80 GB.
    assert!((27_000..=28_000).contains(&blocks("h100-sxm", 1024)));
    // vLLM on an RTX 4090 has 2,593. What is not modelled is more of a small GPU.
    assert!((2_593..2_593 * 11 / 10).contains(&blocks("rtx-4090", 256)));
    // 24 bytes x 768 x 128,256 logits more, in blocks of 2 MiB.
    assert_eq!(blocks("h100-sxm", 256) - blocks("h100-sxm", 1024), 1_127);
}

#[test]
fn sampling_too_many_sequences_for_the_memory_is_refused() {
    let text = "[engine]\nmax_num_seqs = 65536\n";
    check_refused(
        text,
        &[
            "c.toml:2:16: qwen3-8b takes 16.4 GB of weights and 239.0 GB of buffers to sample 65,536 \
           sequences on each of 1 GPU of h100-sxm, but 85.5 GB of it is 77.0 GB (`gpu_memory_utilization` \
           0.9), which leaves no block of KV cache\n\
           hint: set `max_num_seqs = 8307` or less, or use a larger GPU",
        ],
    );
    parse(&text.replace("65536", "8307")).unwrap_or_else(|e| panic!("{e}"));
    // A number of blocks from an engine's log holds whatever is counted here.
    let given = format!("{text}num_gpu_blocks = 1000\n");
    assert_eq!(
        parse(&given).unwrap().0.pools[0].engine.num_gpu_blocks,
        1000
    );
}

#[test]
fn a_model_of_windows_alone_has_a_bounded_cache() {
    let json = r#"{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096}"#;
    let (cluster, _) = parse_with_json(json, "[engine.timing]\nkind = \"calibrated\"\n").unwrap();
    // 76.97 GB - 14.48 GB of weights - 0.20 GB to sample, over 16 tokens of 131,072 bytes.
    let blocks = cluster.pools[0].engine.num_gpu_blocks;
    assert!((29_600..29_800).contains(&blocks), "{blocks}");
}

#[test]
fn each_real_engine_is_a_worker() {
    let text = "[pool.a]\nengines = [\"http://x:1\", \"http://[::1]:2/v\"]\nkind = \"vllm\"\n\
                [pool.b]\nengines = [\"http://y\"]\n[upstream]\nresume = \"tokens\"\n";
    let (cluster, settings) = parse(text).unwrap();
    let workers: Vec<u32> = cluster.pools.iter().map(|pool| pool.workers).collect();
    assert_eq!(workers, [2, 1]);
    assert!(cluster.has_engines());
    assert_eq!(cluster.upstream.resume, crate::cluster::Resume::Tokens);
    // The printed text reads back.
    let (again, _) = parse(&settings.to_toml()).unwrap();
    assert_eq!(again, cluster);
}

#[test]
fn mistakes_about_real_engines_are_named() {
    check_refused(
        "[pool.a]\nengines = [\"http://a:1\", \"http://a:1\", \"ftp://b\"]\nworkers = 3\nrole = \"prefill\"\nkind = \"llamacpp\"\n",
        &[
            "listed twice",
            "does not begin with http://",
            "each of `engines` is one worker",
            "the role \"both\"",
            "no pool generates answers",
        ],
    );
    check_refused("[pool.a]\nengines = []\n", &["1 to 4,096"]);
    check_refused("[pool.a]\nkind = \"vllm\"\n", &["has no `engines`"]);
    check_refused("[pool.a]\nweight = 3\n", &["has no `engines`"]);
    check_refused(
        "[pool.a]\nengines = [\"http://a:1\"]\nca_file = \"ca.pem\"\n",
        &["no engine of the pool is `https://`"],
    );
    check_refused(
        "[pool.a]\nengines = [\"https://a\"]\ncert_file = \"a.pem\"\nserver_name = \"a b\"\n",
        &["without `key_file`", "a host name or an IP address"],
    );
    check_refused(
        "[pool.a]\nengines = [\"http://a:1\"]\n[pool.b]\nengines = [\"http://a:1/\"]\n[pool.c]\n",
        &["in pool `a` and in pool `b`", "cannot have both"],
    );
    check_refused(
        "[pool.a]\nengines = [\"http://a:1\"]\nweight = 1\nmirror = 0.5\n",
        &["remove one of them", "no pool answers clients"],
    );
    let apart = "[pool.p]\nengines = [\"http://p:1\"]\nrole = \"prefill\"\n[pool.d]\nengines = [\"http://d:1\"]\n";
    for (more, expected) in [
        (
            "role = \"decode\"\nkind = \"sglang\"\n[pool.q]\nengines = [\"http://q:1\"]\nrole = \"prefill\"\nkind = \"vllm\"\n",
            "pool `d` has SGLang's protocol, and pool `q` another",
        ),
        (
            "[pool.q]\nengines = [\"http://q:1\"]\nrole = \"prefill\"\nkind = \"sglang\"\n",
            "and pool `d` the role \"both\"",
        ),
        (
            "role = \"decode\"\nkind = \"sglang\"\n[router]\nremote_prefill_tokens_min = 9\n",
            "remove both keys",
        ),
        ("kv_protocol = \"mooncake\"\n", "role is not \"prefill\""),
        ("bootstrap_port = 1\n", "role is not \"prefill\""),
    ] {
        check_refused(&format!("{apart}{more}"), &[expected]);
    }
    check_refused(
        "[pool.a]\nengines = [\"http://a:1\"]\nrole = \"decode\"\nweight = 2\n[pool.b]\nengines = [\"http://b:1\"]\nmirror = 1.5\n",
        &[
            "no pool's is \"prefill\"",
            "`weight` needs a pool with the role \"both\"",
            "`pool.b.mirror` is 1.5",
        ],
    );
    check_refused(
        "[pool.a]\ndns = [\"http://10.0.0.1:8000\", \"https://x\"]\n",
        &["an address, not a name", "set `server_name`"],
    );
    check_refused(
        "[upstream]\nforward = [\"x\"]\nfailures_max = 0\n",
        &["begin with `/`", "failures_max"],
    );
}

#[test]
fn pools_inherit_and_override() {
    let text = "[engine]\nmax_num_seqs = 100\n[pool.small]\nworkers = 2\n[pool.big]\n\
                [pool.big.engine]\nmax_num_seqs = 200\ntensor_parallel_size = 2\n\
                [pool.big.engine.timing]\ngpu = \"h200-sxm\"\n";
    let mut doc = Doc::parse("c.toml", text.as_bytes());
    doc.set("pool.small.engine.max_num_seqs=150");
    doc.set("pool.big.workers=3");
    let (cluster, settings) = read(doc, |_| Err(io::ErrorKind::NotFound.into())).unwrap();
    let [small, big] = &cluster.pools[..] else {
        panic!("{:?}", cluster.pools)
    };
    assert_eq!(
        (
            small.name.as_str(),
            small.workers,
            small.engine.max_num_seqs
        ),
        ("small", 2, 150)
    );
    assert_eq!(
        (big.name.as_str(), big.workers, big.engine.max_num_seqs),
        ("big", 3, 200)
    );
    assert!(big.engine.num_gpu_blocks > 3 * small.engine.num_gpu_blocks);
    let origin = |path: &str| settings.get(path).unwrap().origin.to_string();
    assert_eq!(
        origin("pool.small.engine.max_num_seqs"),
        "--set pool.small.engine.max_num_seqs=150"
    );
    assert_eq!(origin("pool.big.engine.max_num_seqs"), "c.toml:7");
}

#[test]
fn pools_may_serve_several_models() {
    let text = "[model]\npreset = \"qwen3-8b\"\n[pool.a]\n[pool.b]\n[pool.b.model]\n\
                preset = \"llama-3.1-8b\"\n[pool.c]\n[pool.c.model]\nname = \"tuned\"\n";
    let (cluster, settings) = parse(text).unwrap();
    let names: Vec<&str> = cluster.models().iter().map(|m| &*m.name).collect();
    assert_eq!(names, ["qwen3-8b", "llama-3.1-8b", "tuned"]);
    let [a, b, c] = &cluster.pools[..] else {
        panic!("three pools");
    };
    assert_eq!(a.model.shape, c.model.shape);
    assert_eq!(b.model.shape.name, "llama-3.1-8b");
    // Memory and lengths are those of the pool's model.
    assert_eq!(a.engine, c.engine);
    assert_eq!(
        (a.engine.max_model_len, b.engine.max_model_len),
        (40_960, 131_072)
    );
    assert_ne!(a.engine.num_gpu_blocks, b.engine.num_gpu_blocks);
    assert_eq!(cluster.context_max(), 40_960);
    assert_eq!(cluster.context_max_of("llama-3.1-8b"), 131_072);
    assert_eq!(
        settings
            .get("pool.b.model.name")
            .unwrap()
            .origin
            .to_string(),
        "preset llama-3.1-8b"
    );
    let (again, _) = parse(&settings.to_toml()).unwrap();
    assert_eq!(again, cluster);
}

#[test]
fn models_that_contradict_each_other_are_refused() {
    let two = "[pool.a]\n[pool.b]\n[pool.b.model]\npreset = \"llama-3.1-8b\"\n";
    for (text, expected) in [
        (
            "[model]\nname = \"m\"\n[pool.a]\n[pool.b]\n[pool.b.model]\npreset = \"llama-3.1-8b\"\n".to_owned(),
            &["pools `a` and `b` both serve `m`"][..],
        ),
        (
            "[model]\nconfig = \"m/config.json\"\n[pool.a]\n[pool.a.model]\npreset = \"qwen3-8b\"\n".to_owned(),
            &["m/config.json", "`preset` has no effect"],
        ),
        (
            two.replace("[pool.b]", "[pool.b]\nrole = \"prefill\"")
                + "[pool.c]\nrole = \"decode\"\n",
            &[
                "every pool's `role` of model `llama-3.1-8b` is \"prefill\"",
                "a pool's `role` of model `qwen3-8b` is \"decode\"",
            ],
        ),
        (
            format!("{two}[[event]]\nkind = \"crash\"\nat_s = 1\nworker = 0\n"),
            &["`qwen3-8b` and `llama-3.1-8b`, and events"],
        ),
        (
            format!("{two}[pool.b.autoscale]\npolicy = \"queue\"\n"),
            &["[autoscale] of pool `b`"],
        ),
        (
            format!("{two}[pool.a.engine.peer_tier]\nenabled = true\n"),
            &["[engine.peer_tier] of pool `a`"],
        ),
        (
            two.replace("preset", "presett"),
            &["presett"],
        ),
    ] {
        check_refused(&text, expected);
    }
}

const SHARED: &str = "[pool.a]\nworkers = 3\n[pool.b]\nworkers = 2\n[pool.b.model]\npreset = \"llama-3.1-8b\"\n[pool.c]\n\
                      [share.s]\npools = [\"b\", \"a\"]\nwake_bytes_per_s = 10e9\n";

#[test]
fn pools_may_share_gpus() {
    let (cluster, settings) = parse(&format!("{SHARED}wake_ms = 300\nsleep_ms = 5\n")).unwrap();
    let [share] = &cluster.shares[..] else {
        panic!("one share");
    };
    assert_eq!((&*share.name, share.turn_ns), ("s", 5_000_000_000));
    // 16,059,990,016 bytes of weights at 10e9 bytes/s, both ways.
    let [b, a] = [share.pools[0], share.pools[1]];
    assert_eq!(
        (b.pool, b.sleep_ns, b.wake_ns),
        (1, 1_610_999_002, 1_905_999_002)
    );
    assert_eq!(a.pool, 0);
    // Three sets of GPUs, and one for `c`.
    let gpus: Vec<u64> = cluster.gpus_by_pool().map(|(_, gpus)| gpus).collect();
    assert_eq!((gpus, cluster.gpus()), (vec![3, 0, 1], 4));
    assert_eq!(parse(&settings.to_toml()).unwrap().0, cluster);
    // Level 2 drops the weights.
    let (cluster, _) = parse(&format!("{SHARED}level = 2\n")).unwrap();
    let b = cluster.shares[0].pools[0];
    assert_eq!((b.sleep_ns, b.wake_ns), (0, 1_605_999_002));
}

#[test]
fn shares_that_cannot_be_are_refused() {
    let more = |text: &str| format!("{SHARED}{text}");
    for (text, expected) in [
        (
            SHARED.replace("\"b\"", "\"x\""),
            &["`pools` of share `s` has `x`"][..],
        ),
        (
            SHARED.replace("\"b\"", "\"a\""),
            &["`pools` of share `s` has `a` twice"],
        ),
        (SHARED.replace("\"b\", ", ""), &["share `s` has 1 pool,"]),
        (
            SHARED.replace("[\"b\", \"a\"]", "[]"),
            &["share `s` has 0 pools,"],
        ),
        (
            SHARED.replace("wake_bytes_per_s = 10e9\n", ""),
            &["wake_bytes_per_s"],
        ),
        (
            SHARED.replace("\"b\"", "\"c\""),
            &["pools `c` and `a` both serve `qwen3-8b`"],
        ),
        (
            more("[share.t]\npools = [\"b\", \"c\"]\nwake_bytes_per_s = 1e9\n"),
            &["pool `b` is in share `s` and in share `t`"],
        ),
        (
            more("[pool.b.engine]\ntensor_parallel_size = 2\n"),
            &["a worker of pool `b` has 2 GPUs, and one of pool `a` has 1 GPU"],
        ),
        (
            more("[pool.b.engine.timing]\ngpu = \"l40s\"\n"),
            &["pool `b` has GPUs of kind l40s, and pool `a` of kind"],
        ),
        (
            more("[engine.host_tier]\ngib = 1\nbytes_per_s = 1e9\n"),
            &[
                "pool `b` has KV blocks in host memory",
                "pool `a` has KV blocks in host memory",
            ],
        ),
        (
            more("[network]\nmode = \"flows\"\n"),
            &["`network.mode` with GPUs that pools share"],
        ),
        (
            more("[host]\nmode = \"ideal\"\n"),
            &["`host.mode` with GPUs that pools share"],
        ),
        (more("turn_ms = 0\n"), &["`share.s.turn_ms` is 0"]),
        (
            more("level = 2\nsleep_bytes_per_s = 1e9\n"),
            &["`share.s.sleep_bytes_per_s` is not used"],
        ),
    ] {
        check_refused(&text, expected);
    }
}

#[test]
fn a_mistake_that_all_pools_inherit_is_reported_once() {
    check_refused(
        "[engine]\nblock_size = 0\nmystery = 1\n[pool.a]\n[pool.b]\n[pool.c]\n",
        &["`engine.block_size` is 0", "unknown key `engine.mystery`"],
    );
}

#[test]
fn examples_are_the_clusters_that_they_say() {
    let read_example = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../../examples")
            .join(name);
        let doc = Doc::parse(name, &std::fs::read(path).unwrap());
        read(doc, |path| std::fs::read(path)).unwrap().0
    };
    let cluster = read_example("cluster.toml");
    assert_eq!(cluster.pools[0].workers, 8);
    assert_eq!(cluster.model.preset, "qwen3-32b");
    assert_eq!(cluster.pools[0].engine.tensor_parallel_size, 2);
    assert_eq!(cluster.router.policy, RouterPolicy::Kv);

    let cluster = read_example("cluster-pools.toml");
    let [small, long] = &cluster.pools[..] else {
        panic!("{:?}", cluster.pools)
    };
    assert_eq!((small.workers, small.engine.max_model_len), (4, 8192));
    assert_eq!((long.workers, long.engine.max_model_len), (1, 40_960));
    let fp8 = |gpu: &str| TimingConfig::Calibrated {
        gpu: preset::gpu(gpu).unwrap().clone(),
        dtype: Dtype::Fp8,
        framework: Framework::Vllm,
        profile: None,
    };
    assert_eq!(
        (&small.engine.timing, &long.engine.timing),
        (&fp8("l40s"), &fp8("h200-sxm"))
    );
    assert_eq!(small.engine.max_num_seqs, long.engine.max_num_seqs);

    let cluster = read_example("cluster-prefill-decode.toml");
    let roles: Vec<_> = cluster.pools.iter().map(|p| (p.role, p.workers)).collect();
    assert_eq!(roles, [(Role::Prefill, 4), (Role::Decode, 4)]);
    assert_eq!(cluster.network.mode, NetworkMode::Flows);
    let cluster = read_example("cluster-models.toml");
    assert_eq!((cluster.models().len(), cluster.gpus()), (4, 8));
    let cluster = read_example("cluster-faults.toml");
    assert_eq!(cluster.events.len(), 5);
    assert_eq!(cluster.pools[0].engine.startup_s, 20.0);
}

#[test]
fn listen_addresses() {
    for good in [
        "127.0.0.1:8000",
        "[::1]:0",
        "localhost:80",
        "node-7.cluster:65535",
    ] {
        assert!(live::is_listen_address(good), "{good}");
    }
    for bad in [
        "",
        "8000",
        ":80",
        "localhost",
        "localhost:99999",
        "1.2.3:80",
        "a b:1",
        "::1:80:",
    ] {
        assert!(!live::is_listen_address(bad), "{bad}");
    }
}

#[test]
fn event_endpoints_and_subjects() {
    for good in [
        "tcp://127.0.0.1:5557",
        "tcp://*:0",
        "tcp://[::]:1",
        "tcp://node-7:80",
    ] {
        assert!(live::is_zmq_endpoint(good), "{good}");
    }
    for bad in [
        "",
        "127.0.0.1:5557",
        "ipc:///tmp/x",
        "tcp://*",
        "tcp://*:x",
        "tcp://1.2.3",
    ] {
        assert!(!live::is_zmq_endpoint(bad), "{bad}");
    }
    for good in ["slipstream", "a.b-c.d_1"] {
        assert!(live::is_subject_prefix(good), "{good}");
    }
    for bad in ["", ".a", "a.", "a..b", "a b", "a.*", "a.>"] {
        assert!(!live::is_subject_prefix(bad), "{bad}");
    }
    check_refused(
        "[live.events]\nbus = \"kafka\"\nfpm_endpoint = \"5556\"\nsubject_prefix = \"a b\"\n",
        &[
            "`live.events.bus`",
            "`live.events.fpm_endpoint`",
            "`live.events.subject_prefix`",
        ],
    );
}

/// A value for a key: mostly plausible, sometimes not.
fn line() -> impl Strategy<Value = String> {
    let words = prop_oneof![
        Just("\"kv\""),
        Just("\"constant\""),
        Just("\"linear\""),
        Just("\"table\""),
        Just("\"roofline\""),
        Just("\"grid.csv\""),
        Just("\"h200-sxm\""),
        Just("\"fp8\""),
        Just("\"llama-3.1-8b\""),
        Just("true"),
        Just("false"),
        Just("\"127.0.0.1:1\""),
        Just("\"priority\""),
        Just("nan"),
        Just("{}"),
    ];
    let value = prop_oneof![
        4 => (0u64..5000).prop_map(|n| n.to_string()),
        2 => (0.0..4.0f64).prop_map(|x| format!("{x:?}")),
        3 => words.prop_map(str::to_owned),
    ];
    let key = prop::sample::select(super::keys::rows());
    (key, value, any::<bool>()).prop_map(|(key, value, plain)| {
        // Half of the time the default, so that documents of several lines are often valid.
        let value = key.default.filter(|_| plain).unwrap_or(value);
        format!("{} = {value}\n", key.path.replace("NAME", "p"))
    })
}

proptest! {
    #[test]
    fn documents_never_panic_and_print_config_reads_back(
        lines in prop::collection::vec(line(), 0..4),
        noise in prop::option::weighted(0.2, ".{0,30}"),
    ) {
        let text = lines.concat() + &noise.unwrap_or_default();
        if let Ok((cluster, settings)) = parse(&text) {
            let printed = settings.to_toml();
            let (again, _) = parse(&printed).map_err(|e| TestCaseError::fail(format!("{e}\nin\n{printed}")))?;
            prop_assert_eq!(cluster, again);
        }
    }

    #[test]
    fn bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(Doc::parse("c.toml", &bytes), |_| Err(io::ErrorKind::NotFound.into()));
    }
}
