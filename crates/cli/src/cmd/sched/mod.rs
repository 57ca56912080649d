//! `slipstream sched`: the CPU scheduler, simulated, measured and loaded.

mod sim;

use std::process::ExitCode;

/// Flags of `slipstream sched`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Simulate a host under several schedulers and compare wake-up latencies
    Sim(sim::Args),
}

/// Runs one of the scheduler's subcommands.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Sim(args) => sim::run(args),
    }
}
