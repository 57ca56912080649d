//! `slipstream simulate`: the cluster of a file under a workload, in virtual time.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use slipstream_report::Slo;
use slipstream_report::run::ProcessCost;
use slipstream_report::table::{counted, number};
use slipstream_study::run::Question;
use slipstream_twin::Outcome;

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::progress;
use crate::cmd::watch::{WatchArgs, Watcher};
use crate::cmd::workload_args::{self, WorkloadArgs, WorkloadSets, time};
use crate::out;

/// Flags of `slipstream simulate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    what: WorkloadArgs,
    #[command(flatten)]
    sets: WorkloadSets,

    /// End the run at this simulated time, though requests are under way
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Run")]
    max_sim_time: Option<Duration>,
    /// Divide modelled time by this, as a live cluster at this speed-up would
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 1.0,
        help_heading = "Run"
    )]
    speedup: f64,
    /// Threads for engines that have nothing to do with each other (docs/twin.md) [default: cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Run")]
    threads: Option<u32>,
    /// Times that a client sends a request again that no worker took
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Run")]
    retries: u32,
    /// Run every pass on its own instead of jumping over those in which nothing happens; the
    /// result is the same
    #[arg(long, help_heading = "Run")]
    no_jump: bool,
    /// Leave out the time of vLLM's API server that the timing model states (about 30 ms per
    /// request), to compare with `slipstream serve`, which has a server of its own
    #[arg(long, help_heading = "Run")]
    no_api_time: bool,

    /// Objectives for goodput, such as ttft=1s,itl=50ms
    #[arg(long, value_name = "SLO", help_heading = "Output")]
    slo: Option<Slo>,
    /// Name of the run in tables
    #[arg(long, value_name = "NAME", help_heading = "Output")]
    label: Option<String>,
    /// Print JSON (docs/results.md)
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Save the JSON form, for `slipstream bench compare`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    out: Option<PathBuf>,
    #[command(flatten)]
    watch: WatchArgs,
    /// Show no progress
    #[arg(long, help_heading = "Output")]
    quiet: bool,
}

/// Simulates, and reports as `slipstream bench` does.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.cluster.prints_config()? {
        return Ok(ExitCode::SUCCESS);
    }
    let run = question(args).prepare()?;
    out::model_lines(&run.cluster.model_lines());
    workload_args::print_note(&run.workload);
    let files = args.watch.files().into_iter();
    out::check_writable(files.chain([("out", args.out.as_deref())]))?;
    let shows = std::io::stderr().is_terminal() && !args.quiet;
    let mut watcher = Watcher::new(
        &args.watch,
        &run.cluster,
        &run.workload,
        shows,
        progress::interrupted()?,
    )?;
    let cpu_before = slipstream_os::process::own_cpu_ns();
    let outcome = run.simulate(&mut watcher)?;
    let cpu_s = (slipstream_os::process::own_cpu_ns() - cpu_before) as f64 / 1e9;
    let wall_s = watcher.began.elapsed().as_secs_f64();
    watcher.clear();
    let mut failures = watcher.finish();
    let report = run.report(&outcome, wall_s, Some(cost(&outcome, cpu_s)))?;
    if let Some(path) = &args.out {
        failures.extend(out::save(path, &report.to_json()));
    }
    let simulated = outcome.ended_at.as_secs_f64();
    let speed = format!(
        "simulated {} s in {} s ({}×), {} ({} % jumped), {} requests a CPU second",
        number(simulated),
        number(wall_s),
        number(simulated / wall_s),
        counted(outcome.passes, "pass"),
        number(100.0 * outcome.jumped as f64 / outcome.passes.max(1) as f64),
        number(report.requests.succeeded as f64 / cpu_s),
    );
    if let Some(path) = &args.watch.html {
        let facts = vec![
            ("command".into(), out::command_line()),
            ("run".into(), speed.clone()),
        ];
        let page = run.page(&outcome, &report, watcher.series(), facts);
        failures.extend(out::save(path, &page));
    }
    if args.json {
        out::print_json(&report.to_json())?;
    } else {
        out::print(&report.render())?;
        out::print(&format!(
            "{speed}; seed {}, digest {:016x}\n",
            run.workload.seed, outcome.digest
        ))?;
    }
    say_limits(&outcome, report.requests.sent);
    out::complain(&failures);
    let failed = !failures.is_empty()
        || outcome.cut.is_some()
        || report.requests.failed > 0
        || report.requests.sent == 0;
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// The question that the flags ask.
fn question(args: &Args) -> Question {
    Question {
        cluster: args.cluster.source(),
        workload: args.what.source(&args.sets.workload_set),
        slo: args.slo.clone(),
        label: args.label.clone(),
        max_sim_time: args.max_sim_time,
        speedup: args.speedup,
        threads: args.threads,
        retries: args.retries,
        jump: !args.no_jump,
        api_time: !args.no_api_time,
    }
}

/// Notes on what the figures do not cover.
fn say_limits(outcome: &Outcome, sent: u64) {
    if let Some(cut) = &outcome.cut {
        errln!("note: {cut}; the figures are those of the requests that had ended");
    }
    if sent == 0 && outcome.cut.is_none() {
        errln!(
            "note: no request was sent: the first is due after the workload's end, or after more than a century"
        );
    }
    if let Some(extrapolated) = &outcome.extrapolation() {
        errln!("note: {extrapolated}");
    }
}

/// CPU time and memory of the simulation itself.
fn cost(outcome: &Outcome, cpu_s: f64) -> ProcessCost {
    let per = |count: u64| cpu_s * 1e6 / count.max(1) as f64;
    ProcessCost {
        cpu_s,
        cpu_us_per_request: per(outcome.totals.requests.succeeded),
        cpu_us_per_token: per(outcome.totals.tokens().output),
        rss_peak_bytes: slipstream_os::process::usage_of(std::process::id())
            .map(|usage| usage.rss_peak_bytes),
    }
}
