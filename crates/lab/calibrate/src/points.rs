//! A profile fitted to measured deployments, with its error on held-out folds.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use anyhow::Context;
use slipstream_os::files;
use slipstream_perf::fit::{self, Sample};
use slipstream_perf::{Deployment, Profile, predict, read_rows, report};

use crate::{Note, name};

/// Rows below which no folds can be held out.
const ROWS_MIN: usize = 20;

/// A profile and its errors on held-out folds.
pub struct Fit {
    /// The profile.
    pub profile: Profile,
    /// Its errors, as Markdown.
    pub report: String,
}

/// Fits a profile to the rows of the table `points`, of those that the table `only` names if there is one.
///
/// # Errors
/// A table cannot be read, or has too few rows that can be fitted to.
pub fn fit(points: &Path, only: Option<&Path>, note: Note<'_>) -> anyhow::Result<Fit> {
    let read = |path: &Path| {
        let text = files::read(path).with_context(|| format!("reading {}", path.display()))?;
        read_rows(&text).with_context(|| format!("reading {}", path.display()))
    };
    let rows = read(points)?;
    if let Some(unknown) = slipstream_study::predict::unknown_note(&rows) {
        note(&unknown);
    }
    let prior = Profile::prior();
    let chosen: Option<HashSet<String>> = match only {
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
        if chosen
            .as_ref()
            .is_some_and(|chosen| !chosen.contains(&row.id))
        {
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
        note(&format!("{count} rows left out: {reason}"));
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
        only.map_or(String::new(), |only| format!(
            ", rows chosen by {}",
            name(only)
        )),
        name(points),
        only.map_or(String::new(), |only| format!(" --only {}", name(only))),
    );
    let (profile, held_out) = fit::calibrate(&samples, source)
        .with_context(|| format!("fitting to {}", points.display()))?;
    let report = report::markdown(&samples, &held_out);
    Ok(Fit { profile, report })
}
