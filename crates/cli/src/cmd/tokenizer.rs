//! `slipstream tokenizer`: exports the built-in tokenizer for other tools.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use slipstream_frontend::text::builtin_files;

use crate::out;

/// Flags of `slipstream tokenizer`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Write the built-in tokenizer in Hugging Face's format, with its chat template
    Export {
        /// Directory to write to; created if it does not exist
        dir: PathBuf,
        /// Replace existing files
        #[arg(long)]
        force: bool,
    },
}

/// Runs `slipstream tokenizer`.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Export { dir, force } => export(dir, *force),
    }
}

fn export(dir: &std::path::Path, force: bool) -> anyhow::Result<ExitCode> {
    let files = builtin_files();
    if !force && let Some((name, _)) = files.iter().find(|(name, _)| dir.join(name).exists()) {
        bail!(
            "{} exists; use another directory, or replace it with --force",
            dir.join(name).display()
        );
    }
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    for (name, content) in files {
        let path = dir.join(name);
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
        out::print(&format!("{}\n", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
