//! `slipstream serve`: a live cluster in one process.

use std::path::PathBuf;
use std::process::ExitCode;

/// Flags of `slipstream serve`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cluster file; without one, a small default cluster is served
    cluster: Option<PathBuf>,
}

/// Serves until interrupted.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet (cluster {:?})", args.cluster)
}
