//! Predictions against measured deployments, if the data is present.
#![allow(clippy::disallowed_methods)] // it has files

use std::collections::HashSet;
use std::path::PathBuf;

use slipstream_perf::fit::{self, Sample, quantile};
use slipstream_perf::{Deployment, Distance, Profile, predict, read_rows};

fn data() -> Option<PathBuf> {
    let folder = std::env::var_os("SLIPSTREAM_DATA").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../../shared/data"),
        PathBuf::from,
    );
    let folder = folder.join("accuracy");
    folder.join("silicon_points.csv").exists().then_some(folder)
}

/// Judgeable deployments; `None`, with a message, if there is no data.
fn samples() -> Option<Vec<Sample>> {
    let Some(folder) = data() else {
        eprintln!("skipped: no accuracy/silicon_points.csv in ../shared/data or SLIPSTREAM_DATA");
        return None;
    };
    let read = |name: &str| read_rows(&std::fs::read(folder.join(name)).unwrap()).unwrap();
    let judgeable: HashSet<String> = read("silicon_judgeable.csv")
        .into_iter()
        .filter(|row| row.get("why").is_none())
        .map(|row| row.id)
        .collect();
    let rows = read("silicon_points.csv");
    let rows = rows.iter().filter(|row| judgeable.contains(&row.id));
    Some(
        rows.map(|row| Sample {
            deployment: Deployment::read(row, &|_| None)
                .unwrap_or_else(|refusal| panic!("{} is not answered: {refusal}", row.id)),
            tpot_ms: row.number("tpot_ms").unwrap(),
            ttft_ms: row.number("ttft_ms").unwrap(),
        })
        .collect(),
    )
}

fn errors(pairs: impl Iterator<Item = (f64, f64)>) -> Vec<f64> {
    pairs
        .map(|(found, true_)| (found / true_ - 1.0).abs())
        .collect()
}

#[test]
fn the_built_in_profile_answers_every_judgeable_deployment() {
    let Some(samples) = samples() else { return };
    assert!(samples.len() > 1000);
    let profile = Profile::built_in();
    let answers: Vec<_> = samples
        .iter()
        .map(|s| (predict(&s.deployment, profile).unwrap(), s))
        .collect();
    for (answer, sample) in &answers {
        let d = &sample.deployment;
        assert_eq!(
            answer.distances,
            [Distance::Near],
            "{} on {}",
            d.shape.name,
            d.gpu.name
        );
        assert!(answer.tpot_low_ms <= answer.tpot_ms && answer.tpot_ms <= answer.tpot_high_ms);
        assert!(answer.ttft_low_ms <= answer.ttft_ms && answer.ttft_ms <= answer.ttft_high_ms);
    }
    let tpot = errors(answers.iter().map(|(a, s)| (a.tpot_ms, s.tpot_ms)));
    let ttft = errors(answers.iter().map(|(a, s)| (a.ttft_ms, s.ttft_ms)));
    assert!(quantile(&tpot, 0.5) < 0.05 && quantile(&tpot, 0.9) < 0.20);
    assert!(quantile(&ttft, 0.5) < 0.14);
}

/// The fit carries over to a framework that it did not see: physics is not memory.
#[test]
fn physics_without_a_framework_predicts_it_within_a_quarter() {
    let Some(samples) = samples() else { return };
    let vllm = |s: &Sample| s.deployment.framework == slipstream_perf::Framework::Vllm;
    let known: Vec<&Sample> = samples.iter().filter(|s| !vllm(s)).collect();
    let fitted = fit::profile(&known).unwrap();
    let unseen = samples.iter().filter(|s| vllm(s));
    let tpot =
        errors(unseen.map(|s| (predict(&s.deployment, &fitted).unwrap().tpot_ms, s.tpot_ms)));
    let median = quantile(&tpot, 0.5);
    assert!(median < 0.25, "{median}");
}
