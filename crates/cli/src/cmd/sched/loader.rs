//! `slipstream sched run|stats`: executes `slipstream-scx`, the loader.
//!
//! It is a separate program because it needs clang and libelf at build time, which `slipstream`
//! must not.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const LOADER: &str = "slipstream-scx";

/// Flags of `slipstream sched run` and `stats`: the loader's own.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Passed on to slipstream-scx; `-- --help` lists its flags
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Executes the loader.
pub(crate) fn run(command: &str, args: &Args) -> anyhow::Result<ExitCode> {
    let Some(loader) = find() else {
        anyhow::bail!(
            "`{LOADER}` is neither next to this program nor on the PATH; build it with `scripts/run.sh scx` \
             (it needs clang 16 or later, libelf and zlib, and is not part of the default build), \
             or set SLIPSTREAM_SCX to its path"
        );
    };
    let error = Command::new(&loader).arg(command).args(&args.args).exec();
    Err(anyhow::Error::new(error).context(format!("starting {}", loader.display())))
}

fn find() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("SLIPSTREAM_SCX") {
        return Some(path.into());
    }
    let beside = std::env::current_exe()
        .ok()
        .and_then(|p| Some(p.parent()?.join(LOADER)));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join(LOADER));
    beside.into_iter().chain(on_path).find(|p| p.is_file())
}
