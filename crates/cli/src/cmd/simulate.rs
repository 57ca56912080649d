//! `slipstream simulate`: the cluster of a file under a workload, in virtual time.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slipstream_base::SimTime;
use slipstream_config::cluster::{Cluster, Happening};
use slipstream_report::html::run::RunPage;
use slipstream_report::run::{
    EngineCounts, GpuCost, ProcessCost, Resumed, SCHEMA, Simulation, Transfers,
};
use slipstream_report::table::{counted, number};
use slipstream_report::{Objectives, RunReport, Slo};
use slipstream_twin::{Options, Outcome};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::watch::{WatchArgs, Watcher};
use crate::cmd::workload_args::{WorkloadArgs, WorkloadSets, time};
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
    let Some((cluster, settings)) = args.cluster.resolve_with_settings(&[])? else {
        return Ok(ExitCode::SUCCESS); // --print-config
    };
    let (workload, name) = args.what.workload(&args.sets.workload_set)?;
    // Slower than this, steps would last for years.
    anyhow::ensure!(
        (1e-3..=1e12).contains(&args.speedup),
        "--speedup is {:e}, but must be 0.001 to 1e12",
        args.speedup
    );
    let objectives = Objectives::of(&workload, args.slo.clone());
    let options = Options {
        speedup: args.speedup,
        each_token: objectives.read_longest_gap(),
        slo: objectives,
        time_max: args.max_sim_time.map_or(SimTime::MAX, |d| {
            SimTime(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
        }),
        jump: !args.no_jump,
        threads: args.threads.unwrap_or_else(super::cores),
        retries: args.retries,
        ..Options::default()
    };
    let shows = std::io::stderr().is_terminal() && !args.quiet;
    let mut watcher = Watcher::new(&args.watch, &cluster, &workload, shows, interrupted()?)?;
    let cpu_before = slipstream_bench::process::own_cpu_ns();
    let read = super::files::read;
    super::memory::check(&cluster)?;
    super::memory::check_concurrency(&workload)?;
    let outcome = slipstream_twin::simulate(&cluster, &workload, &options, read, &mut watcher)?;
    let cpu_s = (slipstream_bench::process::own_cpu_ns() - cpu_before) as f64 / 1e9;
    let wall_s = watcher.began.elapsed().as_secs_f64();
    watcher.clear();
    let mut failures = watcher.finish();
    let label = args.label.clone().unwrap_or_else(|| "simulated".into());
    let mut report = report(
        &outcome,
        &cluster,
        &name,
        label,
        workload.seed,
        cpu_s,
        &options.slo,
    );
    report.simulation = Some(Simulation {
        simulated_s: outcome.ended_at.as_secs_f64(),
        wall_s,
        passes: outcome.passes,
        jumped: outcome.jumped,
        extrapolated: outcome.extrapolated,
        digest: format!("{:016x}", outcome.digest),
        cut: outcome.cut.clone(),
        expected_error: outcome.expected_errors(&cluster, read)?,
    });
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
    let extrapolated = outcome.extrapolation();
    let errors = report.simulation.iter().flat_map(|s| &s.expected_error);
    let expected: Vec<(String, String)> = errors
        .map(|error| ("expected error".into(), error.line()))
        .collect();
    if let Some(path) = &args.watch.html {
        let page = RunPage {
            title: "Simulated run",
            report: &report,
            distributions: &outcome.totals.distributions(),
            series: watcher.series.as_ref(),
            slo: args.slo.as_ref(),
            events: happenings(&cluster),
            warnings: outcome.cut.iter().chain(&extrapolated).cloned().collect(),
            facts: [
                ("command".into(), out::command_line()),
                ("run".into(), speed.clone()),
                ("digest".into(), format!("{:016x}", outcome.digest)),
            ]
            .into_iter()
            .chain(expected)
            .collect(),
            texts: vec![
                ("Cluster, every value".into(), settings.to_toml()),
                ("Workload".into(), args.what.text(&args.sets.workload_set)?),
            ],
        };
        failures.extend(out::save(path, &page.render()));
    }
    if args.json {
        out::print(&report.to_json())?;
    } else {
        out::print(&report.render())?;
        out::print(&format!(
            "{speed}; seed {}, digest {:016x}\n",
            workload.seed, outcome.digest
        ))?;
    }
    if let Some(cut) = &outcome.cut {
        eprintln!("note: {cut}; the figures are those of the requests that had ended");
    }
    if let Some(extrapolated) = &extrapolated {
        eprintln!("note: {extrapolated}");
    }
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

fn report(
    outcome: &Outcome,
    cluster: &Cluster,
    workload: &str,
    label: String,
    seed: u64,
    cpu_s: f64,
    objectives: &Objectives,
) -> RunReport {
    let totals = &outcome.totals;
    let tokens = totals.tokens();
    let per = |count: u64| cpu_s * 1e6 / count.max(1) as f64;
    RunReport {
        schema: SCHEMA,
        label,
        target: "simulated".into(),
        model: cluster.model.name.clone(),
        workload: workload.into(),
        seed,
        duration_s: totals.duration_s(),
        requests: totals.requests,
        errors: totals.errors.clone(),
        tokens,
        throughput: totals.throughput(),
        latency: totals.latencies(),
        goodput: totals.goodput(objectives),
        classes: totals.class_reports(objectives),
        gpu: Some(GpuCost {
            gpus: cluster.gpus(),
            hours: cluster.gpus() as f64 * totals.duration_s() / 3600.0,
        }),
        client: Some(ProcessCost {
            cpu_s,
            cpu_us_per_request: per(totals.requests.succeeded),
            cpu_us_per_token: per(tokens.output),
            rss_peak_bytes: slipstream_bench::process::usage_of(std::process::id())
                .map(|usage| usage.rss_peak_bytes),
        }),
        server: None,
        simulation: None,
        transfers: outcome.hand_overs.times.percentiles().map(|ms| Transfers {
            count: ms.count,
            bytes: outcome.hand_overs.bytes,
            ms: Some(ms),
        }),
        resumed: outcome.resumes.times.percentiles().map(|ms| Resumed {
            count: ms.count,
            tokens: outcome.resumes.tokens,
            ms: Some(ms),
        }),
        engine: Some(EngineCounts {
            // All pools have blocks of one size; the router would not take them otherwise.
            prefix_hit_blocks: outcome
                .engine
                .prefix_hit_tokens
                .map(|tokens| tokens / f64::from(cluster.pools[0].engine.block_size)),
            ..outcome.engine
        }),
    }
}

/// What the cluster file says will happen, by time.
fn happenings(cluster: &Cluster) -> Vec<(f64, String)> {
    let mut all = Vec::new();
    for event in &cluster.events {
        let name = match event.what {
            Happening::Crash => "crash",
            Happening::Drain => "drain",
            Happening::Slow { .. } => "slow",
            Happening::Link { .. } => "link",
        };
        all.push((event.at_s, format!("{name} w{}", event.worker)));
        if let Some(until_s) = event.until_s {
            all.push((until_s, format!("{name} w{} ends", event.worker)));
        }
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// A flag that SIGINT and SIGTERM set. A second signal ends the process.
fn interrupted() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            // Without a handler the process ends at the first signal, which is no loss of data.
            if let Ok(signals) = super::serve::Signals::install() {
                signals.wait();
                set.store(true, Ordering::Relaxed);
            }
        })?;
    Ok(flag)
}
