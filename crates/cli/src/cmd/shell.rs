//! `slipstream completions` and `slipstream man`: the command line, for shells and for `man`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap_complete::Shell;

use crate::out;

/// Flags of `slipstream completions`.
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    /// Shell that reads the script
    shell: Shell,
}

/// Prints the completion script.
pub(crate) fn completions(
    args: &CompletionsArgs,
    mut command: clap::Command,
) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "slipstream", &mut script);
    out::print(&String::from_utf8(script).context("the script is not UTF-8")?)?;
    Ok(ExitCode::SUCCESS)
}

/// Flags of `slipstream man`.
#[derive(clap::Args)]
pub(crate) struct ManArgs {
    /// Folder of section 1, such as /usr/local/share/man/man1; it is created if it does not exist
    dir: PathBuf,
}

/// Writes one page for each command.
pub(crate) fn man(args: &ManArgs, command: clap::Command) -> anyhow::Result<ExitCode> {
    let dir = &args.dir;
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(command, dir))
        .with_context(|| format!("writing manual pages to {}", dir.display()))?;
    Ok(ExitCode::SUCCESS)
}
