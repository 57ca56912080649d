//! The `slipstream` binary: parses flags, calls a library, prints text.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::print_stderr // ends the process once stderr is closed; see `errln`
    )
)]

#[macro_use]
mod out;
mod cmd;
mod examples;
mod usage;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use slipstream_base::text::brief;

/// Plans clusters that serve large language models, and routes requests to them: a simulator, a
/// server with modelled engines, and a router in front of real ones.
#[derive(Parser)]
#[command(
    name = "slipstream",
    version,
    propagate_version = true,
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

/// Output of `slipstream` without arguments.
const FIRST_COMMANDS: &str = "\
Slipstream plans clusters that serve large language models, and routes requests to them. To begin, without a GPU:

  slipstream demo              one workload on eight modelled workers: KV-aware routing and round robin
  slipstream init              write a commented cluster.toml and workload.toml
  slipstream simulate cluster.toml -w workload.toml     run them in virtual time
  slipstream plan workload.toml --gpus h100-sxm,l40s    find the smallest cluster for that workload
  slipstream serve cluster.toml                         the same cluster live, with OpenAI's API

In front of running engines:

  slipstream serve --engine http://gpu1:8000 --engine http://gpu2:8000

`slipstream doctor` checks this host, and `slipstream --help` lists every command.
";

// One variant per subcommand, with one module each under `cmd`.
#[derive(Subcommand)]
enum Command {
    /// Run one workload live and simulated on eight modelled workers, with two routing policies
    Demo(cmd::demo::Args),
    /// Write a commented cluster file and workload file
    Init(cmd::init::Args),
    /// Serve OpenAI clients: modelled engines, or a router in front of real ones
    Serve(cmd::serve::Args),
    /// Serve OpenAI clients from the engines of worker processes
    Frontend(cmd::frontend::Args),
    /// Run engines for frontend processes
    Worker(cmd::worker::Args),
    /// Run a workload on a cluster in virtual time
    Simulate(Box<cmd::simulate::Args>),
    /// Run one workload on many clusters in virtual time, and print the Pareto-optimal ones
    Sweep(Box<cmd::sweep::Args>),
    /// Find the cheapest cluster that meets objectives under a workload
    Plan(Box<cmd::plan::Args>),
    /// Predict TTFT and TPOT of a table of deployments, with error bars
    Predict(cmd::predict::Args),
    /// Fit a step-time profile to measured deployments, and score it on held-out ones
    Calibrate(cmd::calibrate::Args),
    /// Run a workload live and in virtual time, and compare the time of each stage
    Drag(Box<cmd::drag::Args>),
    /// Simulate, measure and load the CPU scheduler
    Sched(cmd::sched::Args),
    /// Load an OpenAI endpoint and report client-side latency and throughput
    Bench(Box<cmd::bench::Args>),
    /// Summarize or convert traces
    Trace(cmd::trace::Args),
    /// Export the built-in tokenizer, render chats, or compare a tokenizer with a running engine's
    Tokenizer(cmd::tokenizer::Args),
    /// List the models and GPUs available in a cluster file
    Presets(cmd::presets::Args),
    /// Write a cluster file from what running engines report
    Describe(cmd::describe::Args),
    /// Show the workers or engines of a running server, live
    Top(cmd::top::Args),
    /// Print events of engines: forward-pass metrics and KV events
    Events(cmd::events::Args),
    /// Simulate a packet network
    Net(cmd::net::Args),
    /// Check this host for missing features and performance problems
    Doctor(cmd::doctor::Args),
    /// Print the completion script of a shell
    Completions(cmd::shell::CompletionsArgs),
    /// Write the manual pages to a folder
    Man(cmd::shell::ManArgs),
}

fn main() -> ExitCode {
    let cli = usage::parse();
    log_to_stderr();
    slipstream_os::files::note_inputs();
    let Some(command) = cli.command else {
        return finish(
            out::print(FIRST_COMMANDS)
                .map(|()| ExitCode::SUCCESS)
                .map_err(Into::into),
        );
    };
    let result = match command {
        Command::Demo(args) => cmd::demo::run(&args),
        Command::Init(args) => cmd::init::run(&args),
        Command::Serve(args) => cmd::serve::run(&args),
        Command::Frontend(args) => cmd::frontend::run(&args),
        Command::Worker(args) => cmd::worker::run(&args),
        Command::Simulate(args) => cmd::simulate::run(&args),
        Command::Sweep(args) => cmd::sweep::run(&args),
        Command::Plan(args) => cmd::plan::run(&args),
        Command::Predict(args) => cmd::predict::run(&args),
        Command::Calibrate(args) => cmd::calibrate::run(&args),
        Command::Drag(args) => cmd::drag::run(&args),
        Command::Sched(args) => cmd::sched::run(&args),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::Trace(args) => cmd::trace::run(&args),
        Command::Tokenizer(args) => cmd::tokenizer::run(&args),
        Command::Presets(args) => cmd::presets::run(&args),
        Command::Describe(args) => cmd::describe::run(&args),
        Command::Top(args) => cmd::top::run(&args),
        Command::Events(args) => cmd::events::run(&args),
        Command::Net(args) => cmd::net::run(&args),
        Command::Doctor(args) => cmd::doctor::run(&args),
        Command::Completions(args) => cmd::shell::completions(&args, usage::command()),
        Command::Man(args) => cmd::shell::man(&args, usage::command()),
    };
    finish(result)
}

/// The exit status, after a message if the command failed.
fn finish(result: anyhow::Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) => {
            // A closed reader (`slipstream presets | head`) is not an error.
            if out::is_broken_pipe(&error) {
                return ExitCode::SUCCESS;
            }
            errln!("error: {}", out::chain(&error));
            ExitCode::from(2)
        }
    }
}

/// Log levels: warnings, and discovery between processes.
const SAID: &str = "warn,slipstream_frontend::tokens::remote=info,slipstream_worker::callhome=info";

/// Initializes logging of the libraries: warnings, or the levels of `RUST_LOG`.
fn log_to_stderr() {
    use tracing_subscriber::EnvFilter;
    use tracing_subscriber::field::MakeExt as _;
    use tracing_subscriber::fmt::format::debug_fn;
    // A line is a line, and acts on no terminal, whatever servers and peers have put into its fields.
    let fields = debug_fn(|to, field, value| {
        let value = format!("{value:?}");
        match field.name() {
            "message" => write!(to, "{}", brief(&value, out::LINE_CHARS_MAX)),
            name => write!(to, "{name}={}", brief(&value, out::LINE_CHARS_MAX)),
        }
    });
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(SAID));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .fmt_fields(fields.delimited(" "))
        .with_writer(std::io::stderr)
        .log_internal_errors(false) // `eprintln!` of that ends the process once stderr is closed
        .with_target(false)
        // No color in files, or if NO_COLOR is set (https://no-color.org).
        .with_ansi(
            std::io::stderr().is_terminal()
                && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        )
        .init();
}
