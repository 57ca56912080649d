//! `slipstream predict`: TTFT and TPOT of a table of deployments.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use slipstream_study::predict::Question;

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
    out::check_writable([("out", args.out.as_deref())])?;
    let name = args.file.display().to_string();
    let text = super::files::read(&args.file).with_context(|| format!("reading {name}"))?;
    let question = Question {
        table: String::from_utf8(text).with_context(|| format!("reading {name}"))?,
        name,
        profile: args.profile.clone(),
        models: args.models.clone(),
    };
    let answer = question.answer()?;
    out::model_lines(&answer.models);
    match &args.out {
        None => out::print(&answer.csv())?,
        Some(path) => {
            std::fs::write(path, answer.csv())
                .with_context(|| format!("writing {}", path.display()))?;
        }
    }
    for note in &answer.notes {
        errln!("note: {note}");
    }
    Ok(ExitCode::SUCCESS)
}
