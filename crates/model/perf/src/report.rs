//! Errors of held-out folds, as Markdown.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::fit::{HeldOut, Sample, bands, folds, quantile};
use crate::profile::Distance;

/// Table of the errors of `held_out`, by kind of fold, fold, model, GPU, framework and load.
///
/// Errors are `|predicted / measured - 1|`; bias is the median of the signed error. `in band` is the
/// share of measured times inside the band of 80 %, which is made from the other folds' errors.
pub fn markdown(samples: &[Sample], held_out: &BTreeMap<Distance, Vec<HeldOut>>) -> String {
    let mut text = format!("Measured deployments: {}.\n", samples.len());
    let title = |distance: Distance| match distance {
        Distance::Near => "load of a known deployment left out",
        Distance::Load => "highest loads or longest prompts of a known deployment left out",
        Distance::Combination => "combination of known model, GPU and framework left out",
        Distance::Model => "whole model left out",
        Distance::Gpu => "whole GPU left out",
        Distance::Framework => "whole framework left out",
    };
    text.push_str("\n### All folds\n\n");
    header(&mut text, "left out");
    for (&distance, results) in held_out {
        let name = title(distance);
        let physics: Vec<HeldOut> = results
            .iter()
            .map(|r| HeldOut {
                errors: r.physics,
                ..*r
            })
            .collect();
        line(
            &mut text,
            &format!("{name}, physics alone"),
            &physics.iter().collect::<Vec<_>>(),
            None,
        );
        line(
            &mut text,
            name,
            &results.iter().collect::<Vec<_>>(),
            Some(coverage(distance, results)),
        );
    }
    text.push_str("\n### Fold by fold\n\n");
    header(&mut text, "left out");
    for (&distance, results) in held_out {
        let (names, _) = folds(samples, distance);
        for (fold, name) in names.iter().enumerate() {
            let of: Vec<&HeldOut> = results.iter().filter(|r| r.fold == fold).collect();
            let name = match distance {
                Distance::Model => samples[of.first().map_or(0, |r| r.sample)]
                    .deployment
                    .shape
                    .name
                    .to_string(),
                _ => name.clone(),
            };
            line(
                &mut text,
                &format!("{}: {name}", distance.name()),
                &of,
                None,
            );
        }
    }
    for distance in [Distance::Near, Distance::Combination] {
        let Some(results) = held_out.get(&distance) else {
            continue;
        };
        let _ = write!(text, "\n### By group, {}\n\n", title(distance));
        header(&mut text, "group");
        type Key = fn(&Sample, &HeldOut) -> String;
        let keys: [Key; 5] = [
            |s, _| s.deployment.shape.name.to_string(),
            |s, _| s.deployment.gpu.name.to_string(),
            |s, _| format!("{}, {}", s.deployment.framework.name(), s.deployment.mode()),
            |s, _| s.deployment.precision.to_owned(),
            |_, r| {
                if r.saturated {
                    "past saturation"
                } else {
                    "below saturation"
                }
                .to_owned()
            },
        ];
        for key in keys {
            let mut groups: BTreeMap<String, Vec<&HeldOut>> = BTreeMap::new();
            for result in results {
                let name = key(&samples[result.sample], result);
                groups.entry(name).or_default().push(result);
            }
            for (name, of) in groups {
                line(&mut text, &name, &of, None);
            }
        }
    }
    text
}

fn header(text: &mut String, first: &str) {
    let _ = write!(
        text,
        "| {first} | n | TPOT median | p90 | bias | TTFT median | p90 | bias | in band: TPOT | TTFT |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    );
}

fn line(text: &mut String, name: &str, results: &[&HeldOut], inside: Option<[f64; 2]>) {
    if results.is_empty() {
        return;
    }
    let _ = write!(text, "| {name} | {} |", results.len());
    for target in 0..2 {
        let signed: Vec<f64> = results
            .iter()
            .map(|r| 100.0 * libm::expm1(r.errors[target]))
            .collect();
        let absolute: Vec<f64> = signed.iter().map(|e| e.abs()).collect();
        let _ = write!(
            text,
            " {:.1} % | {:.1} % | {:+.1} % |",
            quantile(&absolute, 0.5),
            quantile(&absolute, 0.9),
            quantile(&signed, 0.5)
        );
    }
    match inside {
        Some([tpot, ttft]) => {
            let _ = writeln!(text, " {:.0} % | {:.0} % |", 100.0 * tpot, 100.0 * ttft);
        }
        None => text.push_str(" | |\n"),
    }
}

/// Share of `results` inside bands that were made from the folds other than their own.
fn coverage(distance: Distance, results: &[HeldOut]) -> [f64; 2] {
    let mut inside = [0.0; 2];
    let folds = results.iter().map(|r| r.fold).max().map_or(0, |f| f + 1);
    for fold in 0..folds {
        let others: Vec<HeldOut> = results.iter().filter(|r| r.fold != fold).copied().collect();
        let bands = bands(&BTreeMap::from([(distance, others)]));
        for result in results.iter().filter(|r| r.fold == fold) {
            let band = bands[&(distance, result.saturated)];
            for target in 0..2 {
                let missed = -result.errors[target];
                if (band[target][0]..=band[target][1]).contains(&missed) {
                    inside[target] += 1.0 / results.len() as f64;
                }
            }
        }
    }
    inside
}
