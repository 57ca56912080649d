//! `slipstream sched`: simulates, benchmarks and loads the CPU scheduler.

mod bench;
pub(crate) mod doctor;
mod loader;
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
    /// Benchmark wake-up latency on this host, by mechanism and by load
    Bench(bench::Args),
    /// Check whether Slipstream's scheduler can run on this host
    Doctor(doctor::Args),
    /// Load Slipstream's scheduler until interrupted (root; needs the separate slipstream-scx)
    Run(loader::Args),
    /// Print the counters of the running scheduler
    Stats(loader::Args),
}

/// Runs one of the scheduler's subcommands.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Sim(args) => sim::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Run(args) => loader::run("run", args),
        Command::Stats(args) => loader::run("stats", args),
    }
}
