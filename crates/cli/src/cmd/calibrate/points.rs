//! A profile fitted to measured deployments, with its error on held-out folds.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use slipstream_perf::fit::{self, Sample};
use slipstream_perf::{Deployment, Profile, predict, read_rows, report};

use super::{Args, name};
use crate::out;

/// Rows below which no folds can be held out.
const ROWS_MIN: usize = 20;

/// Fits, holds out, writes the profile and its errors.
pub(super) fn run(points: &Path, args: &Args) -> anyhow::Result<ExitCode> {
    let read = |path: &Path| {
        let text = super::super::files::read(path)
            .with_context(|| format!("reading {}", path.display()))?;
        read_rows(&text).with_context(|| format!("reading {}", path.display()))
    };
    let rows = read(points)?;
    if let Some(note) = slipstream_study::predict::unknown_note(&rows) {
        errln!("note: {note}");
    }
    let prior = Profile::prior();
    let only: Option<HashSet<String>> = match &args.only {
        None => None,
        Some(path) => Some(
            read(path)?
                .into_iter()
                .filter(|row| row.get("why").is_none())
                .map(|row| row.id)
                .collect(),
        ),
    };
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    let mut samples = Vec::new();
    for row in &rows {
        if only.as_ref().is_some_and(|only| !only.contains(&row.id)) {
            continue;
        }
        let positive = |column| {
            row.number(column)
                .filter(|x: &f64| x.is_normal() && *x > 0.0)
        };
        // A row without a finite estimate would spoil the sums of all others.
        let deployment = Deployment::read(row, &|_| None)
            .and_then(|deployment| predict(&deployment, &prior).map(|_| deployment));
        match deployment {
            Ok(deployment) => {
                let times = (positive("tpot_ms"), positive("ttft_ms"));
                if let (Some(tpot_ms), Some(ttft_ms)) = times {
                    samples.push(Sample {
                        deployment,
                        tpot_ms,
                        ttft_ms,
                    });
                } else {
                    let reason = "ttft_ms or tpot_ms is not a positive number";
                    *reasons.entry(reason.into()).or_default() += 1;
                }
            }
            Err(refusal) => *reasons.entry(refusal.to_string()).or_default() += 1,
        }
    }
    for (reason, count) in &reasons {
        errln!("note: {count} rows left out: {reason}");
    }
    anyhow::ensure!(
        samples.len() >= ROWS_MIN,
        "{} has {} rows that can be fitted to; {ROWS_MIN} are needed",
        points.display(),
        samples.len()
    );
    let source = format!(
        "Step-time profile: parameters, residuals on log time (TPOT, TTFT), 80 % bands.\n\
         Fitted to columns ttft_ms and tpot_ms of {} deployments of {}{}.\n\
         Repeat: slipstream calibrate --from-points {}{} --out FILE\n\
         Held-out errors: docs/accuracy.md\n",
        samples.len(),
        name(points),
        args.only.as_ref().map_or(String::new(), |only| format!(
            ", rows chosen by {}",
            name(only)
        )),
        name(points),
        args.only
            .as_ref()
            .map_or(String::new(), |only| format!(" --only {}", name(only))),
    );
    let (profile, held_out) = fit::calibrate(&samples, source)
        .with_context(|| format!("fitting to {}", points.display()))?;
    if let Some(path) = &args.out {
        std::fs::write(path, profile.to_text())
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let text = report::markdown(&samples, &held_out);
    match &args.report {
        None => out::print(&text)?,
        Some(path) => {
            std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
