//! `slipstream net init`: a commented network file to begin with.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use slipstream_netsim::config::STARTER;

use crate::cmd::init::save;
use crate::out;

/// Flags of `slipstream net init`.
#[derive(clap::Args)]
pub(super) struct Args {
    /// File to write
    #[arg(value_name = "FILE", default_value = "net.toml")]
    file: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let path = args.file.display();
    match save(&args.file, STARTER, args.force) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            bail!("{path} exists; remove it, name another file, or replace it by --force")
        }
        other => other.with_context(|| format!("writing {path}"))?,
    }
    let page = args.file.with_extension("html");
    out::print(&format!(
        "{path}: 128 hosts of a fat-tree, each sends 1 MB to another\n\n\
         slipstream net run {path} --html {}\n",
        page.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
