//! `plan` with values at the ends of its axes: an answer or an error that names the flag, never a panic.
#![allow(clippy::disallowed_methods)] // tests unwrap

use proptest::prelude::*;
use slipstream_study::Control;
use slipstream_study::plan::{AXES, Axes, Domain, Question};
use slipstream_study::source::WorkloadSource;

const WORKLOAD: &str =
    "requests = 8\nisl = 100\nosl = 4\n[arrival]\nkind = \"constant\"\nrate_per_s = 4\n";

fn tiny() -> Question {
    Question {
        workload: WorkloadSource {
            text: Some(WORKLOAD.into()),
            ..WorkloadSource::default()
        },
        slo: Some("ttft=2s,itl=100ms".parse().unwrap()),
        model: Some("llama-3.1-8b".into()),
        axes: Axes {
            tensor_parallel: vec![1],
            precision: vec!["fp8".into()],
            max_num_seqs: vec![8],
            max_num_batched_tokens: vec![512],
            policies: vec!["kv".into()],
            ..Axes::default()
        },
        max_gpus: 4,
        seeds: 1,
        quick: true,
        ..Question::default()
    }
}

fn error(question: &Question) -> String {
    format!("{:#}", question.prepare().unwrap_err())
}

#[test]
fn steps_without_room_for_a_token_of_each_sequence_are_refused() {
    let of = |max_num_seqs: &[u32], max_num_batched_tokens: &[u32]| Question {
        axes: Axes {
            max_num_seqs: max_num_seqs.to_vec(),
            max_num_batched_tokens: max_num_batched_tokens.to_vec(),
            ..tiny().axes
        },
        ..tiny()
    };
    for (seqs, tokens) in [(vec![256, 64, 1024], vec![1]), (vec![64], vec![63, 2, 31])] {
        let said = error(&of(&seqs, &tokens));
        for part in ["--max-num-batched-tokens", "at least 64", "--max-num-seqs"] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
    // One combination is enough.
    assert!(of(&[1024, 64], &[2, 64]).prepare().is_ok());
    assert!(of(&[1], &[1]).prepare().is_ok());
}

/// A value of each axis, and another way to write it.
fn sample(axis: &slipstream_study::plan::Axis) -> [String; 2] {
    let word = match (axis.domain, axis.name) {
        (Domain::Counts(least, _), _) => return [least.to_string(), format!("0{least}")],
        (Domain::Numbers(_), _) => return ["1.5".into(), "15e-1".into()],
        (Domain::Switches(_), _) => "on",
        (Domain::Names(names), _) => names[0].0,
        (Domain::Words(_), "gpus") => "l4",
        (Domain::Words(_), "policies") => "kv",
        (Domain::Words(_), _) => "fp8",
    };
    [word.into(), word.into()]
}

#[test]
fn a_value_that_is_there_twice_is_refused_on_every_axis() {
    for axis in AXES {
        let [one, same] = sample(axis);
        let mut axes = tiny().axes;
        axes.set(axis, &[one.clone(), same.clone()]).unwrap();
        let said = error(&Question { axes, ..tiny() });
        let flag = format!("--{} has ", axis.flag());
        assert!(said.starts_with(&flag) && said.contains("twice"), "{said}");
        for empty in ["", " "] {
            assert!(axis.check_text(empty).is_err(), "{}: {empty:?}", axis.name);
        }
        axis.check_text(&one).unwrap();
        if let Domain::Words(_) | Domain::Names(_) = axis.domain {
            let mut axes = tiny().axes;
            axes.set(axis, &[one, String::new()]).unwrap();
            let said = error(&Question { axes, ..tiny() });
            assert!(
                said.starts_with(&format!("--{}: a value is empty", axis.flag())),
                "{said}"
            );
        }
    }
    let load = vec![1.0, 0.5, 1.0];
    assert!(error(&Question { load, ..tiny() }).contains("--load has 1 twice"));
}

/// Zero to three values: the ends of a range, beyond them, repeated, in any order.
fn values(most: u32) -> impl Strategy<Value = Vec<u32>> {
    let value = prop_oneof![
        4 => prop::sample::select(vec![1, 2, 3, 8, 64]),
        1 => Just(0),
        1 => Just(most),
        1 => Just(most.saturating_add(1)),
        1 => Just(u32::MAX),
    ];
    prop::collection::vec(value, 0..4)
}

fn factors() -> impl Strategy<Value = Vec<f64>> {
    let value = prop_oneof![
        3 => prop::sample::select(vec![0.0, 1.0, 4.0]),
        1 => prop::sample::select(vec![-0.0, -1.0, 1e6, 2e6, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE]),
    ];
    prop::collection::vec(value, 0..3)
}

/// Changes one or two axes of a question.
#[derive(Clone, Debug)]
enum Axis {
    TensorParallel(Vec<u32>),
    PipelineParallel(Vec<u32>),
    DataParallel(Vec<u32>),
    ExpertParallel(Vec<bool>),
    HostMemory(Vec<f64>),
    Speculation(Vec<u32>),
    MaxNumSeqs(Vec<u32>),
    MaxNumBatchedTokens(Vec<u32>),
    PrefillWeights(Vec<f64>),
    Temperatures(Vec<f64>),
    AutoscaleMin(Vec<u32>),
    Load(Vec<f64>),
    Attain(f64),
    Headroom(f64),
    MaxGpus(u32),
    Seeds(u64),
    Words(usize, Vec<&'static str>),
}

fn axis() -> impl Strategy<Value = Axis> {
    let share = prop::sample::select(vec![0.0, 1e-12, 0.5, 1.0, 1.0 + 1e-9, 10.0, 11.0, f64::NAN]);
    let words = prop::sample::select(vec![
        "",
        "auto",
        "bf16",
        "fp8",
        "fp4",
        "kv",
        "round_robin",
        "aggregated",
        "disaggregated",
        "h100-sxm",
        "l4",
        "none",
    ]);
    prop_oneof![
        values(1024).prop_map(Axis::TensorParallel),
        values(1024).prop_map(Axis::PipelineParallel),
        values(1024).prop_map(Axis::DataParallel),
        prop::collection::vec(any::<bool>(), 0..4).prop_map(Axis::ExpertParallel),
        factors().prop_map(Axis::HostMemory),
        values(32).prop_map(Axis::Speculation),
        values(65_536).prop_map(Axis::MaxNumSeqs),
        values(1 << 24).prop_map(Axis::MaxNumBatchedTokens),
        factors().prop_map(Axis::PrefillWeights),
        factors().prop_map(Axis::Temperatures),
        values(65_535).prop_map(Axis::AutoscaleMin),
        prop::collection::vec(
            prop::sample::select(vec![0.0, 9e-4, 1e-3, 1.0, 1e3, 1001.0, f64::NAN]),
            0..3
        )
        .prop_map(Axis::Load),
        share.clone().prop_map(Axis::Attain),
        share.prop_map(Axis::Headroom),
        prop::sample::select(vec![0, 1, 2, 65_536, 65_537, u32::MAX]).prop_map(Axis::MaxGpus),
        prop::sample::select(vec![0, 1, 100, 101, u64::MAX]).prop_map(Axis::Seeds),
        (0..5usize, prop::collection::vec(words, 0..3))
            .prop_map(|(at, words)| Axis::Words(at, words)),
    ]
}

fn change(of: &mut Question, axis: Axis) {
    match axis {
        Axis::TensorParallel(values) => of.axes.tensor_parallel = values,
        Axis::PipelineParallel(values) => of.axes.pipeline_parallel = values,
        Axis::DataParallel(values) => of.axes.data_parallel = values,
        Axis::ExpertParallel(values) => of.axes.expert_parallel = values,
        Axis::HostMemory(values) => of.axes.host_memory = values,
        Axis::Speculation(values) => of.axes.speculation = values,
        Axis::MaxNumSeqs(values) => of.axes.max_num_seqs = values,
        Axis::MaxNumBatchedTokens(values) => of.axes.max_num_batched_tokens = values,
        Axis::PrefillWeights(values) => of.axes.prefill_weights = values,
        Axis::Temperatures(values) => of.axes.temperatures = values,
        Axis::AutoscaleMin(values) => of.axes.autoscale_min = values,
        Axis::Load(values) => of.load = values,
        Axis::Attain(value) => of.attain = value,
        Axis::Headroom(value) => of.headroom = value,
        Axis::MaxGpus(value) => of.max_gpus = value,
        Axis::Seeds(value) => of.seeds = value,
        Axis::Words(at, words) => {
            let words = words.into_iter().map(str::to_owned).collect();
            *[
                &mut of.axes.gpus,
                &mut of.axes.precision,
                &mut of.axes.kv_cache_dtype,
                &mut of.axes.serving,
                &mut of.axes.policies,
            ][at] = words;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    #[test]
    fn ends_of_axes_are_answered_or_refused(axes in prop::collection::vec(axis(), 1..3)) {
        let mut question = tiny();
        for axis in axes {
            change(&mut question, axis);
        }
        match question.prepare() {
            Err(said) => prop_assert!(!said.to_string().is_empty()),
            Ok(plan) => {
                if let Err(said) = plan.answer(Some(1), &Control::default(), None) {
                    prop_assert!(!said.to_string().is_empty());
                }
            }
        }
    }
}
