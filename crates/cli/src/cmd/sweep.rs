//! `slipstream sweep`: runs one workload on many clusters in virtual time, and finds the
//! Pareto-optimal ones.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use slipstream_report::Slo;
use slipstream_report::table::counted;
use slipstream_study::sweep::{Axis, Question};
use slipstream_twin::sweep::Vary;

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::on::{self, Ray};
use crate::cmd::price_args::PriceArgs;
use crate::cmd::progress;
use crate::cmd::workload_args::{self, WorkloadArgs, WorkloadSets, time};
use crate::out;
use slipstream_study::source::percent;

/// Flags of `slipstream sweep`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Key of the cluster or workload file, or `load`, and its values: KEY=A,B,C or
    /// KEY=FIRST..LAST[..STEP]; may be repeated
    #[arg(long, value_name = "KEY=VALUES", required = true)]
    vary: Vec<Vary>,
    #[command(flatten)]
    what: WorkloadArgs,
    #[command(flatten)]
    sets: WorkloadSets,

    /// Stop each run at this simulated time, with requests in flight
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Run")]
    max_sim_time: Option<Duration>,
    /// Seeds of each configuration, from the workload's on: figures are means, with 95 % intervals
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000), help_heading = "Run")]
    seeds: u64,
    /// Concurrent runs [default: cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Run")]
    jobs: Option<u16>,
    /// Run on a Ray cluster: ray (the one of RAY_ADDRESS, or a new one here) or ray://HOST:PORT; the answer is the same
    #[arg(long, value_name = "RAY", value_parser = on::address, help_heading = "Run")]
    on: Option<String>,

    /// Objectives for goodput, such as ttft=1s,itl=50ms; without them every answer counts
    #[arg(long, value_name = "SLO", help_heading = "Output")]
    slo: Option<Slo>,
    /// Share of requests that must meet the objectives: marks the configurations that attain it, and
    /// names the cheapest
    #[arg(long, value_name = "PERCENT", value_parser = percent, help_heading = "Output")]
    attain: Option<f64>,
    #[command(flatten)]
    price: PriceArgs,
    /// Tolerance, in percent, for differences in goodput and GPU-hours
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 1.0,
        help_heading = "Output"
    )]
    tolerance: f64,
    /// Write one row per configuration to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    out: Option<PathBuf>,
    /// Write a self-contained HTML page with plots to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Print only the configurations on the Pareto front
    #[arg(long, help_heading = "Output")]
    front: bool,
    /// Do not print progress
    #[arg(long, help_heading = "Output")]
    quiet: bool,
}

/// Runs all configurations, and prints a table.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let question = Question {
        cluster: args.cluster.source(),
        workload: args.what.source(&args.sets.workload_set),
        vary: args
            .vary
            .iter()
            .map(|vary| Axis::Values(vary.key.clone(), vary.values.clone()))
            .collect(),
        max_sim_time: args.max_sim_time,
        seeds: args.seeds,
        slo: args.slo.clone(),
        attain: args.attain,
        prices: args.price.source(),
        tolerance: args.tolerance,
    };
    workload_args::print_note_of(&question.workload);
    let asked = args
        .on
        .as_ref()
        .map(|_| question.travelling())
        .transpose()?;
    let sweep = Arc::new(question.prepare()?);
    if args.cluster.is_printed() {
        out::print(&sweep.first_settings()?)?;
        return Ok(ExitCode::SUCCESS);
    }
    out::model_lines(&sweep.model_lines());
    out::check_writable([("out", args.out.as_deref()), ("html", args.html.as_deref())])?;
    let shows = std::io::stderr().is_terminal() && !args.quiet;
    let rows = if let (Some(on), Some(asked)) = (&args.on, &asked) {
        Ray::start(on, asked, Some(sweep.len()), shows).and_then(|ray| ray.rows())
    } else {
        let control = progress::interruptible(shows)?;
        sweep.rows(0..sweep.len(), args.jobs.map(usize::from), &control)
    };
    progress::clear(shows);
    let rows = rows?;
    let interrupted = rows.len() < sweep.len() && args.on.is_none();
    if interrupted {
        errln!(
            "note: interrupted; {} of {} had run, and only those are compared",
            rows.len(),
            counted(sweep.len() as u64, "configuration")
        );
    }
    let answer = if interrupted {
        sweep.so_far(rows)
    } else {
        sweep.finish(rows)?
    };
    let mut failures = Vec::new();
    if let Some(path) = &args.out
        && let Err(error) = answer.save(path)
    {
        failures.push(out::incomplete(path, &error));
    }
    if let Some(path) = &args.html {
        let page = answer.page(&out::command_line())?;
        failures.extend(out::save(path, &page));
    }
    out::print(&answer.text(args.front))?;
    for note in answer.notes() {
        errln!("note: {note}");
    }
    out::complain(&failures);
    Ok(if failures.is_empty() && !interrupted {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
