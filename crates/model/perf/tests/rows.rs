//! Arbitrary rows: an estimate in order, or a reason; a fit, or an error.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use slipstream_perf::fit::{self, Sample};
use slipstream_perf::{Deployment, Profile, predict, read_rows, unknown_columns};

const COLUMNS: &[&str] = &[
    "model_path",
    "system",
    "backend",
    "precision",
    "mode",
    "isl",
    "osl",
    "batch_size",
    "tp_size",
    "pp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "decode_batch_size",
    "prefill_num_workers",
    "decode_num_workers",
    "prefill_tp_size",
    "decode_tp_size",
    "decode_moe_ep_size",
];

/// Numbers: mostly valid sizes, else extremes and fractions.
fn number() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => (0_u32..5).prop_map(|power| (1_u32 << power).to_string()),
        2 => Just(String::new()),
        1 => (0_u32..2_000_000).prop_map(|n| n.to_string()),
        1 => any::<f64>().prop_map(|x| x.to_string()),
        1 => prop::sample::select(vec!["0", "0.5", "-1", "inf", "NaN", "1e308", "4096", "x", "8.0"])
            .prop_map(str::to_owned),
    ]
}

fn tokens() -> impl Strategy<Value = String> {
    prop_oneof![8 => (1_u32..20_000).prop_map(|n| n.to_string()), 1 => number()]
}

fn word(valid: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop_oneof![
        20 => prop::sample::select(valid).prop_map(str::to_owned),
        1 => "[a-z0-9]{0,6}",
    ]
}

fn row() -> impl Strategy<Value = Vec<String>> {
    let words = (
        word(&[
            "llama-3.1-8b",
            "llama-3.1-70b",
            "qwen3-32b",
            "deepseek-v3",
            "gpt-oss-120b",
            "qwen3.5-397b-a17b",
            "mixtral-8x7b",
        ]),
        word(&["h100", "h200_sxm", "b200", "gb300", "l4", "mi355x"]),
        word(&["vllm", "sglang", "trtllm"]),
        word(&["bf16", "fp8", "fp4", "int4", "int8"]),
        word(&["agg", "disagg"]),
    );
    let numbers = prop::collection::vec(number(), COLUMNS.len() - 7);
    (words, tokens(), tokens(), numbers).prop_map(|((a, b, c, d, e), isl, osl, numbers)| {
        let mut cells = vec![a, b, c, d, e, isl, osl];
        cells.extend(numbers);
        cells
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_row_gets_finite_times_in_order_or_a_reason(cells in row()) {
        let text = format!("{}\n{}\n", COLUMNS.join(","), cells.join(","));
        let rows = read_rows(text.as_bytes()).unwrap();
        match Deployment::read(&rows[0], &|_| None) {
            Err(refusal) => prop_assert!(refusal.to_string().len() > 8),
            Ok(deployment) => {
                let e = predict(&deployment, Profile::built_in());
                prop_assert!(e.is_ok(), "valid sizes have an estimate: {text}");
                let e = e.unwrap();
                for [low, value, high] in [
                    [e.ttft_low_ms, e.ttft_ms, e.ttft_high_ms],
                    [e.tpot_low_ms, e.tpot_ms, e.tpot_high_ms],
                ] {
                    prop_assert!(0.0 < low && low <= value && value <= high && high.is_finite());
                }
            }
        }
    }

    #[test]
    fn arbitrary_bytes_are_a_table_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(rows) = read_rows(&bytes) {
            for row in &rows {
                let _ = Deployment::read(row, &|_| None);
            }
            let _ = unknown_columns(&rows);
        }
    }
}

/// The generator reaches estimates, not refusals alone.
#[test]
fn random_rows_are_answered_in_part() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let answered = (0..2000)
        .filter(|_| {
            let cells = row().new_tree(&mut runner).unwrap().current();
            let text = format!("{}\n{}\n", COLUMNS.join(","), cells.join(","));
            let rows = read_rows(text.as_bytes()).unwrap();
            Deployment::read(&rows[0], &|_| None).is_ok()
        })
        .count();
    assert!((20..1900).contains(&answered), "{answered} of 2000");
}

fn samples(tpot_ms: f64) -> Vec<Sample> {
    let head = "model_path,system,backend,precision,isl,osl,batch_size,tp_size\n";
    let rows: Vec<String> = (0..24)
        .map(|i| format!("qwen3-32b,h200,vllm,fp8,1024,1024,{},2", i + 1))
        .collect();
    let rows = read_rows(format!("{head}{}\n", rows.join("\n")).as_bytes()).unwrap();
    rows.iter()
        .map(|row| Sample {
            deployment: Deployment::read(row, &|_| None).unwrap(),
            tpot_ms,
            ttft_ms: 100.0,
        })
        .collect()
}

#[test]
fn a_fit_to_times_that_are_not_finite_is_an_error() {
    for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
        let samples = samples(bad);
        assert!(fit::calibrate(&samples, String::new()).is_err(), "{bad}");
    }
    assert!(fit::params(&samples(8.0).iter().collect::<Vec<_>>()).is_ok());
}

#[test]
fn a_profile_whose_times_overflow_refuses_the_row() {
    let text = Profile::prior().to_text();
    let text = text.replace("vllm.step_ms,1.00000", "vllm.step_ms,1e308");
    let profile = Profile::parse(&text).unwrap();
    let deployment = &samples(8.0)[0].deployment;
    assert!(predict(deployment, &Profile::prior()).is_ok());
    let refused = predict(deployment, &profile).unwrap_err().to_string();
    assert!(refused.starts_with("no estimate"), "{refused}");
}
