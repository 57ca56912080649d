//! `slipstream completions` and `slipstream man`: the command line, for shells and for `man`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::builder::PossibleValuesParser;
use clap_complete::Shell;
use slipstream_config::preset;

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
    command = with_presets(command);
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "slipstream", &mut script);
    out::print(&String::from_utf8(script).context("the script is not UTF-8")?)?;
    Ok(ExitCode::SUCCESS)
}

/// The command whose flags for models and GPUs offer the presets.
fn with_presets(command: clap::Command) -> clap::Command {
    let models = preset::model_names;
    let gpus = || preset::GPUS.iter().map(|gpu| -> &'static str { &gpu.name });
    // `bench --model` is a name that a server knows.
    let of_models = command.get_name() != "bench";
    let names: Vec<String> = command
        .get_subcommands()
        .map(|sub| sub.get_name().to_owned())
        .collect();
    let command = command.mut_args(|arg| match arg.get_long() {
        Some("model") if of_models => arg.value_parser(PossibleValuesParser::new(models())),
        Some("gpu" | "gpus") => arg.value_parser(PossibleValuesParser::new(gpus())),
        _ => arg,
    });
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, with_presets)
    })
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
