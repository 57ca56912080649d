//! Workload flags, shared by live load generation and simulation.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use slipstream_config::doc::{Doc, Settings};
use slipstream_config::workload_file::{
    self, Arrival, Class, Content, Dist, OnBadLine, TraceFile, Workload,
};

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
    /// Replay a trace: Mooncake's JSONL, Azure's or BurstGPT's CSV, or the folder of `serve --record`
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
    /// more; or the whole trace]
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
}

/// Overrides of the workload file; `--set` is for the cluster file.
#[derive(clap::Args)]
pub(crate) struct WorkloadSets {
    /// Set a key of the workload file, such as arrival.rate_per_s=20; may be repeated
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
    let mut doc = Doc::parse(&name, &text);
    for assignment in sets {
        doc.set(assignment);
    }
    workload_file::read(doc).map_err(|mistakes| anyhow::anyhow!("{mistakes}"))
}

impl WorkloadArgs {
    /// The flags again, for another subcommand that accepts them; without `--time-scale`.
    pub(crate) fn flags(&self) -> Vec<std::ffi::OsString> {
        let mut flags: Vec<std::ffi::OsString> = Vec::new();
        for (name, path) in [("--workload", &self.workload), ("--trace", &self.trace)] {
            if let Some(path) = path {
                flags.extend([name.into(), path.clone().into_os_string()]);
            }
        }
        let mut number = |name: &str, value: Option<String>| {
            flags.extend(value.map(|value| format!("{name}={value}").into()));
        };
        number("--concurrency", self.concurrency.map(|n| n.to_string()));
        number("--rate", self.rate.map(|x| x.to_string()));
        number("--isl", self.isl.map(|n| n.to_string()));
        number("--osl", self.osl.map(|n| n.to_string()));
        number("--requests", self.requests.map(|n| n.to_string()));
        number(
            "--duration",
            self.duration.map(|d| format!("{}ns", d.as_nanos())),
        );
        number("--seed", self.seed.map(|n| n.to_string()));
        let on_bad_line = self.on_bad_line.and_then(|what| what.to_possible_value());
        number(
            "--on-bad-line",
            on_bad_line.map(|v| v.get_name().to_owned()),
        );
        flags
    }

    /// The workload, and its short name.
    pub(crate) fn workload(&self, sets: &[String]) -> anyhow::Result<(Workload, String)> {
        let (mut workload, name) = match (&self.workload, &self.trace) {
            (Some(path), _) => (read(path, sets)?.0, file_name(path)),
            (None, Some(path)) => (self.trace_workload(path), file_name(path)),
            (None, None) => self.plain_workload(),
        };
        if let Some(requests) = self.requests {
            workload.requests = Some(requests);
        }
        if let Some(duration) = self.duration {
            workload.duration_s = Some(duration.as_secs_f64());
        }
        if let Some(seed) = self.seed {
            workload.seed = seed;
        }
        if let Some(scale) = self.time_scale {
            if !(scale.is_finite() && scale > 0.0) {
                bail!("--time-scale is {scale}, but must be a finite number above 0");
            }
            workload.time_scale = scale;
        }
        if let (Some(what), Content::Trace(file)) = (self.on_bad_line, &mut workload.content) {
            file.on_bad_line = what.into();
        }
        if let Some(rate) = self.rate
            && !(rate > 0.0 && rate <= workload_file::RATE_MAX)
        {
            bail!(
                "--rate is {rate:?}, but must be above 0 and at most {:e} requests/s",
                workload_file::RATE_MAX
            );
        }
        Ok((workload, name))
    }

    /// The workload as text, for a report: the file's effective values, or the flags.
    pub(crate) fn text(&self, sets: &[String]) -> anyhow::Result<String> {
        if let Some(path) = &self.workload {
            return Ok(read(path, sets)?.1.to_toml());
        }
        let flags = self.flags();
        let words: Vec<_> = flags.iter().map(|flag| flag.to_string_lossy()).collect();
        Ok(words.join(" "))
    }

    fn arrival(&self) -> Option<Arrival> {
        match (self.concurrency, self.rate) {
            (Some(concurrency), _) => Some(Arrival::Closed { concurrency }),
            (None, Some(rate_per_s)) => Some(Arrival::Poisson { rate_per_s }),
            (None, None) => None,
        }
    }

    fn trace_workload(&self, path: &Path) -> Workload {
        Workload {
            arrival: self.arrival().unwrap_or(Arrival::Trace),
            content: Content::Trace(TraceFile {
                path: path.to_owned(),
                on_bad_line: OnBadLine::Stop,
                tokens_per_id: 512,
            }),
            ..Workload::default()
        }
    }

    fn plain_workload(&self) -> (Workload, String) {
        let (isl, osl) = (self.isl.unwrap_or(1024), self.osl.unwrap_or(128));
        let arrival = self.arrival().unwrap_or(Arrival::Closed { concurrency: 1 });
        let when = match &arrival {
            Arrival::Closed { concurrency } => format!("c={concurrency}"),
            _ => format!("{}/s", self.rate.unwrap_or_default()),
        };
        // Fewer than a few waves of a closed loop would show mostly its start-up.
        let waves = 10 * u64::from(self.concurrency.unwrap_or(1));
        let workload = Workload {
            // A duration alone also ends the run.
            requests: self.duration.is_none().then_some(waves.max(100)),
            arrival,
            content: Content::Generated(vec![Class {
                isl: Dist::Exact(f64::from(isl)),
                osl: Dist::Exact(f64::from(osl)),
                ..Class::default()
            }]),
            ..Workload::default()
        };
        (workload, format!("{when} {isl}/{osl}"))
    }
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

pub(crate) fn time(text: &str) -> Result<Duration, String> {
    slipstream_base::slo::parse_ns(text).map(Duration::from_nanos)
}
