//! Properties of step times that hold whatever was fitted.

use slipstream_config::cluster::Dtype;
use slipstream_config::preset;
use slipstream_perf::{Deployment, predict, read_rows};
use slipstream_perf::{Distance, Formats, Framework, Load, Parallel, Params, Physics, Profile};

fn physics(model: &str, gpu: &str, precision: Dtype, parallel: Parallel) -> Physics {
    let shape = preset::model(model).unwrap();
    Physics::new(
        shape,
        preset::gpu(gpu).unwrap(),
        Formats::of(shape, precision),
        parallel,
        Framework::Vllm,
        &Params::prior(),
    )
}

fn split(tensor: u32, attention_data: u32, expert: u32) -> Parallel {
    Parallel {
        tensor,
        attention_data,
        expert_tensor: tensor * attention_data / expert,
        expert,
        ..Parallel::ONE
    }
}

#[test]
fn more_work_takes_longer_on_every_preset() {
    for model in preset::MODELS.iter() {
        for gpu in preset::GPUS.iter() {
            let step = physics(&model.name, &gpu.name, Dtype::Bf16, split(4, 1, 1));
            let mut before = 0.0;
            for load in [
                Load::decode(1.0, 100.0, 100.0),
                Load::decode(8.0, 100.0, 100.0),
                Load::decode(8.0, 20_000.0, 100.0),
                Load::decode(64.0, 20_000.0, 100.0),
                Load::decode(64.0, 20_000.0, 100.0).with_prompt(1000.0),
                Load::decode(64.0, 20_000.0, 100.0).with_prompt(8000.0),
            ] {
                let ns = step.ns(&load);
                assert!(
                    ns.is_finite() && ns > before,
                    "{} on {}",
                    model.name,
                    gpu.name
                );
                before = ns;
            }
        }
    }
}

#[test]
fn attention_reads_what_its_kind_says() {
    let grows = |model: &str| {
        let step = physics(model, "h200-sxm", Dtype::Bf16, split(8, 1, 1));
        let at = |context: f64| step.terms(&Load::decode(32.0, context, 100.0)).attention;
        (at(64_000.0) - at(32_000.0)) / (at(32_000.0) - at(16_000.0))
    };
    // Full, latent and windowed attention grow with the context; sparse attention by its index alone.
    for model in [
        "llama-3.1-70b",
        "deepseek-v3",
        "gpt-oss-120b",
        "qwen3.5-397b-a17b",
    ] {
        assert!((grows(model) - 2.0).abs() < 1e-6, "{model}");
    }
    let per_token = |model: &str| {
        let step = physics(model, "h200-sxm", Dtype::Bf16, split(8, 1, 1));
        let at = |context: f64| step.terms(&Load::decode(32.0, context, 100.0)).attention;
        at(64_000.0) - at(32_000.0)
    };
    assert!(per_token("deepseek-v3.2") < 0.3 * per_token("deepseek-v3"));
    // Half of gpt-oss's layers see 128 tokens.
    let full = 2.0 * 18.0 * 64.0 * 2.0 * 32.0 * 32_000.0 / (4.8e12 * 0.85) * 1e9;
    assert!((per_token("gpt-oss-120b") / full - 1.0).abs() < 1e-9);
}

#[test]
fn ranks_of_attention_meet_at_the_experts() {
    let alone = physics("deepseek-v3", "h200-sxm", Dtype::Fp8, split(1, 1, 1));
    let eight = physics("deepseek-v3", "h200-sxm", Dtype::Fp8, split(1, 8, 8));
    let load = Load::decode(512.0, 1000.0, 100.0);
    // Each GPU holds an eighth of the experts and serves the tokens of eight ranks: more than an eighth of
    // the work of one alone, and no more than that work with imbalance.
    let (alone, eight) = (alone.terms(&load), eight.terms(&load));
    assert!(eight.experts > alone.experts / 8.0 && eight.experts < 1.4 * alone.experts);
    assert!(alone.collectives == 0.0 && eight.collectives > 0.0);
    assert!(
        (alone.attention / eight.attention - 1.0).abs() < 0.2,
        "attention is not split"
    );
}

/// Twice the rows on the busiest GPU are twice the time of its experts, in batches that are large enough to compute more
/// than they read; nothing else changes.
#[test]
fn the_busiest_experts_set_the_pace() {
    let eight = physics("qwen3-235b-a22b", "h200-sxm", Dtype::Fp8, split(1, 8, 8));
    let load = Load::default().with_prompt(4e6);
    let at = |factor: f64| eight.clone().with_expert_imbalance(factor).terms(&load);
    let ratio = at(2.0).experts / at(1.0).experts;
    assert!((ratio - 2.0).abs() < 0.01, "{ratio}");
    let rest = |factor: f64| at(factor).total() - at(factor).experts;
    assert!((rest(2.0) / rest(1.0) - 1.0).abs() < 1e-12);
}

/// Without expert parallelism, ranks of attention gather each other's tokens for the experts that they share: as
/// much as an all-reduce of all ranks' tokens, which tensor parallelism over as many GPUs has there.
#[test]
fn ranks_that_share_each_expert_gather_tokens() {
    let at = |parallel: Parallel, tokens: f64| {
        physics("qwen3-235b-a22b", "h200-sxm", Dtype::Fp8, parallel)
            .terms(&Load::default().with_prompt(tokens))
            .collectives
    };
    let ranks = Parallel {
        tensor: 1,
        attention_data: 8,
        expert_tensor: 8,
        ..Parallel::ONE
    };
    // One of the two all-reduces of each layer.
    let gathered = at(ranks, 1000.0) / (at(split(8, 1, 1), 8000.0) / 2.0);
    assert!((gathered - 1.0).abs() < 1e-9, "{gathered}");
    // With experts on single ranks, only the chosen ones get a token.
    let exchanged = Parallel {
        expert_tensor: 1,
        expert: 8,
        ..ranks
    };
    assert!(at(exchanged, 1000.0) > 0.0 && at(exchanged, 8000.0) < at(ranks, 8000.0));
}

#[test]
fn fewer_bits_are_read_faster() {
    let dense = |precision| {
        physics("llama-3.1-70b", "b200-sxm", precision, split(8, 1, 1))
            .terms(&Load::decode(1.0, 100.0, 100.0))
            .dense
    };
    assert!(dense(Dtype::Bf16) > dense(Dtype::Fp8) && dense(Dtype::Fp8) > dense(Dtype::Nvfp4));
    // Hopper has no FP4 units: weights are unpacked, and prompts gain nothing over 16 bits.
    let prompt = |precision| {
        physics("llama-3.1-70b", "h100-sxm", precision, split(8, 1, 1))
            .terms(&Load::default().with_prompt(8000.0))
            .dense
    };
    assert!(prompt(Dtype::Nvfp4) > prompt(Dtype::Bf16));
}

#[test]
fn error_bars_widen_with_distance_and_unseen_deployments_are_named() {
    let head = "model_path,system,backend,precision,isl,osl,batch_size,tp_size\n";
    let near = "meta-llama/Llama-3.1-70B,h200_sxm,vllm,fp8,1024,1024,16,8\n";
    let model = "google/gemma-3-27b-it,h200_sxm,vllm,bf16,1024,1024,16,2\n";
    let gpu = "meta-llama/Llama-3.1-70B,mi355x,vllm,fp8,1024,1024,16,8\n";
    let combination = "meta-llama/Llama-3.1-70B,h200_sxm,sglang,bf16,1024,1024,16,4\n";
    let both = "google/gemma-3-27b-it,mi355x,vllm,bf16,1024,1024,16,2\n";
    let text = format!("{head}{near}{model}{gpu}{combination}{both}");
    let rows = read_rows(text.as_bytes()).unwrap();
    let answers: Vec<_> = rows
        .iter()
        .map(|row| {
            predict(
                &Deployment::read(row, &|_| None).unwrap(),
                Profile::built_in(),
            )
            .unwrap()
        })
        .collect();
    let distances: Vec<&[Distance]> = answers.iter().map(|a| &*a.distances).collect();
    assert_eq!(
        distances,
        [
            &[Distance::Near][..],
            &[Distance::Model],
            &[Distance::Gpu],
            &[Distance::Combination],
            &[Distance::Model, Distance::Gpu],
        ]
    );
    let width = |i: usize| answers[i].tpot_high_ms / answers[i].tpot_low_ms;
    assert!((1..5).all(|i| width(i) > width(0)));
    // Two unknown parts: no narrower than either alone, at both ends.
    let ends = |i: usize| {
        let a = &answers[i];
        [
            [a.tpot_low_ms / a.tpot_ms, a.tpot_high_ms / a.tpot_ms],
            [a.ttft_low_ms / a.ttft_ms, a.ttft_high_ms / a.ttft_ms],
        ]
    };
    for one in [1, 2] {
        for (both, one) in ends(4).iter().zip(ends(one)) {
            assert!(both[0] <= one[0] + 1e-12 && both[1] >= one[1] - 1e-12);
        }
    }
}

/// A GPU of the cluster file with the numbers of a measured preset is answered as that preset.
#[test]
fn a_gpu_with_the_numbers_of_a_preset_is_answered_as_it() {
    let row = "model_path,system,backend,precision,isl,osl,batch_size,tp_size\n\
               meta-llama/Llama-3.1-70B,h200_sxm,vllm,fp8,1024,1024,16,8\n";
    let preset = Deployment::read(&read_rows(row.as_bytes()).unwrap()[0], &|_| None).unwrap();
    let mut own = preset.clone();
    own.gpu.name = "ours".into();
    own.gpu.like = Some("h200-sxm");
    let answer = |d: &Deployment| predict(d, Profile::built_in()).unwrap();
    assert_eq!(answer(&own), answer(&preset));
    own.gpu.memory_bytes_per_s *= 1.5;
    assert_eq!(answer(&own).distances, [Distance::Gpu]);
}

/// Kernels of few bits would not run if those of more were faster.
#[test]
fn fewer_bits_are_never_slower() {
    let params = Profile::built_in().params.clone();
    let formats = [Dtype::Bf16, Dtype::Fp8, Dtype::Nvfp4];
    for model in ["llama-3.1-70b", "qwen3-235b-a22b"] {
        for gpu in ["h200-sxm", "b200-sxm"] {
            let shape = preset::model(model).unwrap();
            let gpu = preset::gpu(gpu).unwrap();
            // On a GPU without FP4 units, FP4 is unpacked, which is not a kernel of fewer bits.
            let native = formats
                .iter()
                .filter(|format| **format != Dtype::Nvfp4 || gpu.fp4_flops.is_some());
            let mut before = [f64::INFINITY; 2];
            for &format in native {
                let of = Formats::of(shape, format);
                let step = Physics::new(shape, gpu, of, split(8, 1, 1), Framework::Vllm, &params);
                let terms = [
                    step.terms(&Load::default().with_prompt(8000.0)),
                    step.terms(&Load::decode(16.0, 1000.0, 100.0)),
                ];
                let times = terms.map(|terms| terms.dense + terms.experts);
                for (time, before) in times.iter().zip(&before) {
                    assert!(time <= before, "{model} on {}: {format:?}", gpu.name);
                }
                before = times;
            }
        }
    }
}
