//! Workload flags, shared by live load generation and simulation.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use slipstream_config::doc::Settings;
use slipstream_config::workload_file::{OnBadLine, TimeUnit, TraceColumns, Workload};
use slipstream_study::source::{WorkloadSource, read_workload};

/// Longest prompt or answer, tokens: as in workload files.
const TOKENS_MAX: i64 = 100_000_000;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum BadLineArg {
    /// Exit with an error that names the line
    Stop,
    /// Count it and continue
    Skip,
}

impl From<BadLineArg> for OnBadLine {
    fn from(arg: BadLineArg) -> OnBadLine {
        match arg {
            BadLineArg::Stop => OnBadLine::Stop,
            BadLineArg::Skip => OnBadLine::Skip,
        }
    }
}

/// A workload: a file, a trace, or a simple load defined by flags.
#[derive(Clone, clap::Args)]
pub(crate) struct WorkloadArgs {
    /// Workload file (docs/workload.md)
    #[arg(short, long, value_name = "FILE", help_heading = "Workload")]
    pub(crate) workload: Option<PathBuf>,
    /// Replay a trace: Mooncake's or Qwen-Bailian's JSONL, Azure's or BurstGPT's CSV, or the folder of `serve --record`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workload", "isl", "osl"], help_heading = "Workload")]
    pub(crate) trace: Option<PathBuf>,
    /// Closed loop: concurrent requests [default without a file: 1]
    #[arg(long, value_name = "N", conflicts_with_all = ["workload", "rate"], value_parser = clap::value_parser!(u32).range(1..), help_heading = "Workload")]
    pub(crate) concurrency: Option<u32>,
    /// Open loop: requests per second, Poisson arrivals
    #[arg(
        long,
        value_name = "PER_S",
        conflicts_with = "workload",
        help_heading = "Workload"
    )]
    pub(crate) rate: Option<f64>,
    /// Tokens per prompt [default without a file: 1024]
    #[arg(long, value_name = "TOKENS", conflicts_with = "workload", value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX), help_heading = "Workload")]
    pub(crate) isl: Option<u32>,
    /// Tokens per answer [default without a file: 128]
    #[arg(long, value_name = "TOKENS", conflicts_with = "workload", value_parser = clap::value_parser!(u32).range(1..=TOKENS_MAX), help_heading = "Workload")]
    pub(crate) osl: Option<u32>,
    /// Total number of requests [default without a file: 100, or 10 times --concurrency if that is
    /// more, and in plan two minutes of --rate; or the whole trace]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Workload")]
    pub(crate) requests: Option<u64>,
    /// Stop starting sessions after this long, such as 60s (workload time)
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Workload")]
    pub(crate) duration: Option<Duration>,
    /// Divide arrival and think times by this
    #[arg(long, value_name = "FACTOR", help_heading = "Workload")]
    pub(crate) time_scale: Option<f64>,
    /// Seed of the workload's random numbers
    #[arg(long, value_name = "N", help_heading = "Workload")]
    pub(crate) seed: Option<u64>,
    /// Handling of a trace line that is not a request
    #[arg(long, value_name = "WHAT", help_heading = "Workload")]
    pub(crate) on_bad_line: Option<BadLineArg>,
    #[command(flatten)]
    pub(crate) read_as: TraceArgs,
}

/// Format of a trace that is in no known format.
#[derive(Clone, Default, clap::Args)]
pub(crate) struct TraceArgs {
    /// Fields of a trace in another format: arrival=NAME,isl=NAME,osl=NAME, also session, model and ids
    #[arg(long, value_name = "FIELDS", help_heading = "Workload")]
    pub(crate) trace_columns: Option<TraceColumns>,
    /// Unit of the trace's times: s, ms, us or ns [default: its format's]
    #[arg(long, value_name = "UNIT", help_heading = "Workload")]
    pub(crate) trace_unit: Option<TimeUnit>,
}

/// Prints notes about a trace: implausible times, fields that are not read.
pub(crate) fn print_note(workload: &Workload) {
    for note in slipstream_workload::plausible::examine(workload).notes {
        errln!("note: {note}");
    }
}

/// As above, for a source; the command reports errors in it.
pub(crate) fn print_note_of(source: &WorkloadSource) {
    if let Ok((workload, _)) = source.workload(&[]) {
        print_note(&workload);
    }
}

/// Overrides of the workload file; `--set` is for the cluster file.
#[derive(clap::Args)]
pub(crate) struct WorkloadSets {
    /// Set a key of the workload file, such as arrival.rate_per_s=20; may be repeated; the last value of a key wins
    #[arg(
        long,
        value_name = "KEY=VALUE",
        requires = "workload",
        help_heading = "Workload"
    )]
    pub(crate) workload_set: Vec<String>,
}

/// The workload file with the overrides `sets`, and the origin of each value.
pub(crate) fn read(path: &Path, sets: &[String]) -> anyhow::Result<(Workload, Settings)> {
    let name = path.display().to_string();
    let text = super::files::read(path).with_context(|| format!("reading {name}"))?;
    read_workload(&name, &text, sets)
}

impl WorkloadArgs {
    /// The workload of these flags, with overrides of its file, for a question.
    pub(crate) fn source(&self, sets: &[String]) -> WorkloadSource {
        WorkloadSource {
            file: self.workload.clone(),
            text: None,
            sets: sets.to_vec(),
            trace: self.trace.clone(),
            concurrency: self.concurrency,
            rate: self.rate,
            isl: self.isl,
            osl: self.osl,
            requests: self.requests,
            duration: self.duration,
            time_scale: self.time_scale,
            seed: self.seed,
            skip_bad_lines: self
                .on_bad_line
                .map(|what| matches!(what, BadLineArg::Skip)),
            trace_columns: self.read_as.trace_columns.as_ref().map(ToString::to_string),
            trace_unit: self.read_as.trace_unit.map(|unit| unit.to_string()),
        }
    }

    /// The flags again, for another subcommand that accepts them; without `--time-scale`.
    pub(crate) fn flags(&self) -> Vec<std::ffi::OsString> {
        self.source(&[]).flags()
    }

    /// The workload, and its short name.
    pub(crate) fn workload(&self, sets: &[String]) -> anyhow::Result<(Workload, String)> {
        self.source(sets).workload(&[])
    }
}

pub(crate) fn time(text: &str) -> Result<Duration, String> {
    slipstream_base::slo::parse_ns(text).map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Alone {
        #[command(flatten)]
        what: WorkloadArgs,
    }

    #[test]
    fn the_flags_of_a_workload_are_passed_on() {
        const ALL: [&str; 11] = [
            "--rate=0.1",
            "--isl=3",
            "--osl=4",
            "--requests=18446744073709551615",
            "--duration=1234567890123ns",
            "--seed=18446744073709551615",
            "--time-scale=0.3",
            "--on-bad-line=skip",
            "--on-bad-line=stop",
            "--trace-unit=us",
            "--trace-columns=isl=a,osl=b,arrival=c d",
        ];
        let parse = |flags: &[String]| {
            let words = std::iter::once("x").chain(flags.iter().map(String::as_str));
            Alone::parse_from(words).what.source(&[])
        };
        for subset in 0..1_u32 << ALL.len() {
            let chosen = ALL
                .iter()
                .enumerate()
                .filter(|(at, _)| subset >> at & 1 == 1);
            let mut flags: Vec<String> = chosen.map(|(_, flag)| (*flag).to_owned()).collect();
            if flags.iter().filter(|flag| flag.contains("bad")).count() == 2 {
                continue;
            }
            if subset & 1 == 0 {
                flags.push("--concurrency=7".to_owned());
            }
            let mut source = parse(&flags);
            let passed = source.flags();
            let passed: Vec<String> = passed
                .into_iter()
                .map(|f| f.into_string().unwrap())
                .collect();
            source.time_scale = None; // the caller's
            assert_eq!(parse(&passed), source);
        }
    }
}
