//! `slipstream predict`: TTFT and TPOT of a table of deployments.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use slipstream_config::preset::ModelShape;
use slipstream_perf::{Deployment, Distance, Profile, Row, predict, read_rows, unknown_columns};

use crate::out;

/// Flags of `slipstream predict`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// CSV table of deployments (docs/accuracy.md lists the columns)
    file: PathBuf,
    /// Profile from `slipstream calibrate` [default: the built-in one]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Folder of models that are no presets: DIR/<model_path>/config.json
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
    /// Write the answers to this file instead of stdout
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Answers every row of the table, or says why not.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let profile = load_profile(args.profile.as_deref())?;
    let text = super::files::read(&args.file)
        .with_context(|| format!("reading {}", args.file.display()))?;
    let rows = read_rows(&text).with_context(|| format!("reading {}", args.file.display()))?;
    anyhow::ensure!(
        !rows.is_empty(),
        "{} has no rows; it must be a CSV table with a header (docs/accuracy.md)",
        args.file.display()
    );
    note_unknown_columns(&rows);
    if let Some(folder) = &args.models {
        anyhow::ensure!(
            folder.is_dir(),
            "--models {} is no directory; it must hold <model_path>/config.json",
            folder.display()
        );
    }
    let models = |name: &str| model_of(args.models.as_deref(), name);
    let (answers, refused) = answer(&rows, &profile, &models);
    match &args.out {
        None => out::print(&answers)?,
        Some(path) => {
            std::fs::write(path, &answers)
                .with_context(|| format!("writing {}", path.display()))?;
        }
    }
    if refused > 0 {
        eprintln!(
            "note: {refused} of {} rows were not answered; the column `reason` says why",
            rows.len()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Notes columns that nothing is read from, such as misspelt ones.
pub(crate) fn note_unknown_columns(rows: &[Row]) {
    let unknown = unknown_columns(rows);
    if !unknown.is_empty() {
        eprintln!(
            "note: columns that are not read: {}; docs/accuracy.md lists those that are",
            unknown.join(", ")
        );
    }
}

/// The table of answers, and the number of rows without one.
fn answer(
    rows: &[Row],
    profile: &Profile,
    models: &dyn Fn(&str) -> Option<ModelShape>,
) -> (String, usize) {
    let mut answers = String::from(
        "id,ttft_ms,ttft_low_ms,ttft_high_ms,tpot_ms,tpot_low_ms,tpot_high_ms,extrapolated,saturated,\
         assumed,reason\n",
    );
    let mut refused = 0;
    for row in rows {
        let id = quoted(&row.id);
        let estimate = Deployment::read(row, models)
            .and_then(|deployment| Ok((predict(&deployment, profile)?, deployment)));
        match estimate {
            Ok((e, deployment)) => {
                let far: Vec<&str> = e
                    .distances
                    .iter()
                    .map(|distance| match distance {
                        Distance::Near => "no",
                        other => other.name(),
                    })
                    .collect();
                let far = far.join("; ");
                let _ = writeln!(
                    answers,
                    "{id},{:.4},{:.4},{:.4},{:.4},{:.4},{:.4},{far},{},{},",
                    e.ttft_ms,
                    e.ttft_low_ms,
                    e.ttft_high_ms,
                    e.tpot_ms,
                    e.tpot_low_ms,
                    e.tpot_high_ms,
                    if e.saturated { "yes" } else { "no" },
                    quoted(&deployment.assumed.join("; ")),
                );
            }
            Err(refusal) => {
                refused += 1;
                let _ = writeln!(answers, "{id},,,,,,,,,,{}", quoted(&refusal.to_string()));
            }
        }
    }
    (answers, refused)
}

/// The profile in `path`, or the built-in one.
pub(crate) fn load_profile(path: Option<&Path>) -> anyhow::Result<Profile> {
    let Some(path) = path else {
        return Ok(Profile::built_in().clone());
    };
    let text = super::files::read(path).with_context(|| format!("reading {}", path.display()))?;
    let text = String::from_utf8(text).with_context(|| format!("reading {}", path.display()))?;
    Profile::parse(&text).with_context(|| format!("{}", path.display()))
}

/// The shape in `folder`/`name`/config.json, if there is one that can be read.
fn model_of(folder: Option<&Path>, name: &str) -> Option<ModelShape> {
    // A name comes from a table: it may not leave the folder.
    if name
        .split('/')
        .any(|part| part.is_empty() || part.starts_with('.'))
    {
        return None;
    }
    let path = folder?.join(name).join("config.json");
    let json = super::files::read(&path).ok()?;
    match ModelShape::from_config_json(name, &json) {
        Ok(shape) => Some(shape),
        Err(error) => {
            eprintln!("warning: {}: {error}", path.display());
            None
        }
    }
}

/// `text` as a cell of a CSV table.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_an_answer_or_a_reason_in_its_place() {
        let text = b"id,model_path,system,backend,precision,isl,osl,batch_size,tp_size\n\
            \"a,b\",meta-llama/Llama-3.1-70B,h200_sxm,vllm,fp8,1024,1024,16,8\n\
            c,acme/unheard-of,h200_sxm,vllm,fp8,1024,1024,16,8\n\
            d,meta-llama/Llama-3.1-70B,b300,vllm,fp8,1024,1024,16,\n\
            e,google/gemma-3-27b-it,b300,vllm,fp8,1024,1024,16,1\n";
        let rows = read_rows(text).unwrap();
        let (answers, refused) = answer(&rows, Profile::built_in(), &|_| None);
        assert_eq!(refused, 1);
        let again = read_rows(answers.as_bytes()).unwrap();
        let ids: Vec<&str> = again.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(ids, ["a,b", "c", "d", "e"]);
        assert_eq!(again[0].get("extrapolated"), Some("no"));
        assert!(again[0].number("ttft_ms").unwrap() > again[0].number("tpot_ms").unwrap());
        assert_eq!(again[1].get("ttft_ms"), None);
        assert_eq!(
            again[1].get("reason"),
            Some("unknown model: acme/unheard-of")
        );
        assert_eq!(again[2].get("extrapolated"), Some("gpu"));
        assert_eq!(again[3].get("extrapolated"), Some("model; gpu"));
        assert_eq!(again[2].get("assumed"), Some("tp_size: 1"));
    }

    #[test]
    fn a_name_in_a_table_cannot_leave_the_folder_of_models() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("models/org/tiny");
        std::fs::create_dir_all(&inside).unwrap();
        let json = r#"{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 128}"#;
        std::fs::write(inside.join("config.json"), json).unwrap();
        std::fs::write(folder.path().join("config.json"), json).unwrap();
        let models = folder.path().join("models");
        let found = |name: &str| model_of(Some(&models), name).is_some();
        assert!(found("org/tiny"));
        assert!(!found("..") && !found("org/../..") && !found("/") && !found("org/absent"));
    }
}
