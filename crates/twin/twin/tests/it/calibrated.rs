//! Simulated deployments against the profile's own predictions.

use slipstream_config::cluster::Framework;
use slipstream_perf::{Deployment, Profile, predict, read_rows};
use slipstream_twin::{Options, simulate};

use crate::{cluster, workload};

/// Model, GPU, format, tensor-parallel size, concurrency, input and output tokens.
type Case = (&'static str, &'static str, &'static str, u32, u32, u32, u32);

/// Deployments below saturation: the queues of the two models differ beyond.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (model, gpu, dtype, tp) in [
        ("llama-3.1-8b", "h100-sxm", "bf16", 1),
        ("llama-3.1-8b", "h200-sxm", "fp8", 1),
        ("llama-3.1-70b", "h200-sxm", "fp8", 4),
        ("llama-3.1-70b", "b200-sxm", "nvfp4", 2),
        ("qwen3-32b", "h100-sxm", "fp8", 2),
        ("qwen3-235b-a22b", "h200-sxm", "fp8", 8),
        ("gpt-oss-120b", "h100-sxm", "mxfp4", 2),
        ("deepseek-v3", "b200-sxm", "fp8", 8),
        ("minimax-m2.5", "b200-sxm", "fp8", 4),
        ("mixtral-8x7b", "h100-sxm", "bf16", 2),
    ] {
        for (concurrency, isl, osl) in [
            (1, 1024, 512),
            (8, 1024, 512),
            (32, 1024, 1024),
            (4, 4096, 512),
            (64, 512, 512),
        ] {
            cases.push((model, gpu, dtype, tp, concurrency, isl, osl));
        }
    }
    cases
}

/// `simulate` and `predict` compute with one model: at a fixed concurrency they agree up to queues, which
/// one steps through and the other has in closed form.
#[test]
fn simulate_and_predict_agree_on_fifty_deployments() {
    let cases = cases();
    assert!(cases.len() >= 50);
    let (mut off, mut alone) = (Vec::new(), Vec::new());
    for (model, gpu, dtype, tp, concurrency, isl, osl) in cases {
        let cluster = cluster(&format!(
            "[model]\npreset = \"{model}\"\n[engine]\ntensor_parallel_size = {tp}\n\
             max_num_seqs = 1024\nenable_prefix_caching = false\n\
             [engine.timing]\ngpu = \"{gpu}\"\ndtype = \"{dtype}\"\n[pool.main]\nworkers = 1\n"
        ));
        let requests = (concurrency * 6).max(12);
        let workload = workload(&format!(
            "requests = {requests}\n[arrival]\nkind = \"closed\"\nconcurrency = {concurrency}\n\
             [[class]]\nisl = {isl}\nosl = {osl}\n"
        ));
        let read = |path: &std::path::Path| std::fs::read(path);
        let outcome = simulate(&cluster, &workload, &Options::default(), read, &mut ()).unwrap();
        let simulated = outcome.totals.latencies().tpot_ms.unwrap().mean;
        let simulated_ttft = outcome.totals.latencies().ttft_ms.unwrap().mean;
        let head = "model_path,system,backend,precision,isl,osl,batch_size,tp_size\n";
        let framework = Framework::Vllm.name();
        let row = format!("{model},{gpu},{framework},{dtype},{isl},{osl},{concurrency},{tp}\n");
        let rows = read_rows(format!("{head}{row}").as_bytes()).unwrap();
        let mut deployment = Deployment::read(&rows[0], &|_| None).unwrap();
        // The cluster's default: a cache in 16 bits.
        deployment.formats.kv_cache = cluster.pools[0].engine.kv_cache_dtype;
        let predicted = predict(&deployment, Profile::built_in()).unwrap();
        let tpot = simulated / predicted.tpot_ms - 1.0;
        let ttft = simulated_ttft / predicted.ttft_ms - 1.0;
        eprintln!(
            "{model} {gpu} {dtype} tp{tp} c{concurrency} {isl}+{osl}: TPOT {simulated:.2} of {:.2} ms ({tpot:+.3}), \
             TTFT {simulated_ttft:.1} of {:.1} ms ({ttft:+.3})",
            predicted.tpot_ms, predicted.ttft_ms
        );
        off.push(tpot.abs());
        if concurrency == 1 {
            // The closed form has the step that a busy engine has scheduled before a request comes; an
            // idle one has none.
            let ttft = (simulated_ttft + simulated) / predicted.ttft_ms - 1.0;
            alone.push(ttft.abs());
        }
        let errors = outcome.expected_errors(&cluster, read).unwrap();
        assert_eq!(errors.len(), 1);
        let bars = &errors[0];
        assert!(bars.tpot[0] < 1.0 && bars.tpot[1] > 1.0 && !bars.region.is_empty());
    }
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let worst = off.iter().copied().fold(0.0, f64::max);
    let (tpot, ttft) = (median(off), median(alone));
    eprintln!("median: TPOT {tpot:.3}, TTFT alone {ttft:.3}; worst TPOT {worst:.3}");
    assert!(tpot < 0.05, "{tpot}");
    assert!(worst < 0.20, "{worst}");
    // Without other requests there is no queue. With them, a closed loop of equal lengths stays in step
    // with itself: its prompts come together, which measured loads do far less.
    assert!(ttft < 0.10, "{ttft}");
}

/// The band that a simulation shows holds the answer of `predict` to the same load, for short and long
/// prompts and answers: the residual is that of the lengths at hand. Lengths of answers vary, so that
/// requests do not stay in step with each other.
#[test]
fn the_band_of_a_simulation_holds_the_prediction_at_any_length() {
    let mut off = Vec::new();
    for (model, gpu, dtype, tp) in [
        ("llama-3.1-70b", "h200-sxm", "fp8", 4),
        ("qwen3-32b", "h100-sxm", "fp8", 2),
        ("gpt-oss-120b", "h100-sxm", "mxfp4", 2),
        ("gpt-oss-120b", "b200-sxm", "mxfp4", 1),
        ("minimax-m2.5", "b200-sxm", "fp8", 4),
        ("deepseek-v3", "h200-sxm", "fp8", 8),
    ] {
        for (isl, osl) in [
            (256, 256),
            (256, 4096),
            (1024, 1024),
            (4096, 512),
            (16_000, 128),
        ] {
            for concurrency in [1, 16] {
                let cluster = cluster(&format!(
                    "[model]\npreset = \"{model}\"\n[engine]\ntensor_parallel_size = {tp}\n\
                     enable_prefix_caching = false\n\
                     [engine.timing]\ngpu = \"{gpu}\"\ndtype = \"{dtype}\"\n[pool.main]\nworkers = 1\n"
                ));
                let requests = concurrency * 8;
                let (least, most) = (osl / 2, osl + osl / 2);
                let workload = workload(&format!(
                    "requests = {requests}\n[arrival]\nkind = \"closed\"\nconcurrency = {concurrency}\n\
                     [[class]]\nisl = {isl}\n\
                     osl = {{ kind = \"uniform\", min = {least}, max = {most} }}\n"
                ));
                let read = |path: &std::path::Path| std::fs::read(path);
                let outcome =
                    simulate(&cluster, &workload, &Options::default(), read, &mut ()).unwrap();
                let simulated = outcome.totals.latencies().tpot_ms.unwrap().mean;
                let engine = &cluster.pools[0].engine;
                let mut deployment =
                    slipstream_engine::timing::deployment(engine, &cluster.model.shape).unwrap();
                deployment.isl = f64::from(isl);
                deployment.osl = f64::from(osl);
                deployment.batch = f64::from(concurrency);
                let predicted = predict(&deployment, Profile::built_in()).unwrap().tpot_ms;
                let bars = &outcome.expected_errors(&cluster, read).unwrap()[0];
                let case = format!(
                    "{model} {gpu} c{concurrency} {isl}+{osl}: simulated {simulated:.2}, predicted {predicted:.2}"
                );
                eprintln!("{case} ({:+.3})", simulated / predicted - 1.0);
                assert!(
                    (simulated * bars.tpot[0]..=simulated * bars.tpot[1]).contains(&predicted),
                    "{case}"
                );
                off.push((simulated / predicted - 1.0).abs());
            }
        }
    }
    off.sort_by(f64::total_cmp);
    let (median, worst) = (off[off.len() / 2], off[off.len() - 1]);
    eprintln!(
        "{} deployments: median {median:.3}, worst {worst:.3}",
        off.len()
    );
    assert!(median < 0.04 && worst < 0.15, "{median} {worst}");
}

/// The time of a request outside of steps grows with its prompt: requests that never meet take it, their one step of
/// 10 ms, and nothing else, however many threads and whether or not arrivals depend on answers.
#[test]
fn each_prompt_token_delays_its_own_request() {
    struct Ttft(Vec<(u32, u64)>);
    impl slipstream_twin::Sink for Ttft {
        fn on_request(&mut self, r: &slipstream_twin::RequestRecord<'_>) {
            let tokens = r.request.prompt.tokens();
            self.0.push((tokens, r.first.since(r.request.due)));
        }
    }
    let cluster = cluster(
        "[model]\npreset = \"qwen3-8b\"\n[pool.main]\nworkers = 8\n[router]\npolicy = \"round_robin\"\n\
         [engine]\nnum_gpu_blocks = 4096\nmax_model_len = 16384\nasync_scheduling = false\n\
         [engine.timing]\nkind = \"linear\"\nbase_ns = 1e7\napi_ns = 2e6\napi_prompt_token_ns = 5e3\n",
    );
    let class = "[[class]]\nisl = { kind = \"uniform\", min = 10, max = 6000 }\nosl = 1\n";
    for arrival in [
        "[arrival]\nkind = \"constant\"\nrate_per_s = 100\n",
        "[arrival]\nkind = \"closed\"\nconcurrency = 1\n",
    ] {
        let workload = workload(&format!("requests = 200\n{arrival}{class}"));
        let mut digests = Vec::new();
        for threads in [1, 4] {
            let options = Options {
                threads,
                ..Options::default()
            };
            let mut ttft = Ttft(Vec::new());
            let read = |path: &std::path::Path| std::fs::read(path);
            let outcome = simulate(&cluster, &workload, &options, read, &mut ttft).unwrap();
            digests.push(outcome.digest);
            assert_eq!(ttft.0.len(), 200);
            for (tokens, ns) in ttft.0 {
                assert_eq!(
                    ns,
                    12_000_000 + 5_000 * u64::from(tokens),
                    "{tokens} tokens"
                );
            }
        }
        assert_eq!(digests[0], digests[1]);
    }
}

/// A request that is alone passes one stage after the other: its latency is that of one stage with all layers, plus
/// sends of 100 us between them. The error bars name what the stages' shares leave out.
#[test]
fn a_request_alone_takes_as_long_in_stages() {
    let run = |stages: u32| {
        let key = if stages > 1 {
            format!(
                "pipeline_parallel_size = {stages}\npipeline_latency_us = 100\npipeline_link_bytes_per_s = 1e13\n"
            )
        } else {
            String::new()
        };
        let cluster = cluster(&format!(
            "[model]\npreset = \"llama-3.1-8b\"\n[engine]\nnum_gpu_blocks = 4096\nmax_model_len = 16384\n{key}"
        ));
        let workload = workload(
            "requests = 4\n[arrival]\nkind = \"constant\"\nrate_per_s = 0.1\n[[class]]\nisl = 1000\nosl = 101\n",
        );
        let read = |path: &std::path::Path| std::fs::read(path);
        let options = Options::default();
        let outcome = simulate(&cluster, &workload, &options, read, &mut ()).unwrap();
        let errors = outcome.expected_errors(&cluster, read).unwrap();
        let named = errors[0]
            .not_modelled
            .iter()
            .any(|part| part.contains("stages"));
        (
            outcome.totals.latencies().e2e_ms.unwrap().mean,
            named,
            cluster.gpus(),
        )
    };
    let (one, named, gpus) = run(1);
    assert_eq!((named, gpus), (false, 1));
    for stages in [2, 4] {
        let (several, named, gpus) = run(stages);
        assert_eq!((named, gpus), (true, u64::from(stages)));
        let sends = 101.0 * 0.1 * f64::from(stages - 1);
        assert!(
            (several - one - sends).abs() < 0.1,
            "{several} {one} {sends}"
        );
    }
}
