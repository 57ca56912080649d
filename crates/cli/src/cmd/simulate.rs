//! `slipstream simulate`: the cluster of a file under a workload, in virtual time.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use slipstream_base::{SimTime, Stage};
use slipstream_report::drag::DragWriter;
use slipstream_report::run::{ProcessCost, SCHEMA};
use slipstream_report::table::{grouped, number};
use slipstream_report::{DragRecord, RunReport, Slo};
use slipstream_twin::{Options, Outcome, Progress, RequestRecord, Sink};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::workload_args::{WorkloadArgs, time};
use crate::out;

/// Flags of `slipstream simulate`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    what: WorkloadArgs,
    /// Set a key of the workload file, such as arrival.rate_per_s=20; may be repeated
    #[arg(
        long,
        value_name = "KEY=VALUE",
        requires = "workload",
        help_heading = "What to send"
    )]
    workload_set: Vec<String>,

    /// End the run at this simulated time, though requests are under way
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "How to run it")]
    max_sim_time: Option<Duration>,
    /// Divide modelled time by this, as a live cluster at this speed-up would
    #[arg(
        long,
        value_name = "FACTOR",
        default_value_t = 1.0,
        help_heading = "How to run it"
    )]
    speedup: f64,
    /// Threads for engines that have nothing to do with each other (docs/twin.md) [default: cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "How to run it")]
    threads: Option<u32>,
    /// Run every pass on its own instead of jumping over those in which nothing happens; the
    /// result is the same
    #[arg(long, help_heading = "How to run it")]
    no_jump: bool,

    /// Objectives for goodput, such as ttft=1s,itl=50ms
    #[arg(long, value_name = "SLO", help_heading = "What to report")]
    slo: Option<Slo>,
    /// Name of the run in tables
    #[arg(long, value_name = "NAME", help_heading = "What to report")]
    label: Option<String>,
    /// Print JSON (docs/bench.md)
    #[arg(long, help_heading = "What to report")]
    json: bool,
    /// Save the JSON form, for `slipstream bench compare`
    #[arg(long, value_name = "FILE", help_heading = "What to report")]
    out: Option<PathBuf>,
    /// Write one drag record a request to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "What to report")]
    drag: Option<PathBuf>,
    /// Show no progress
    #[arg(long, help_heading = "What to report")]
    quiet: bool,
}

/// Simulates, and reports as `slipstream bench` does.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Some(cluster) = args.cluster.resolve(&[])? else {
        return Ok(ExitCode::SUCCESS); // --print-config
    };
    let (workload, name) = args.what.workload(&args.workload_set)?;
    anyhow::ensure!(
        args.speedup.is_finite() && args.speedup > 0.0,
        "--speedup is {}, but must be above 0",
        args.speedup
    );
    let options = Options {
        speedup: args.speedup,
        slo: args.slo.clone(),
        time_max: args.max_sim_time.map_or(SimTime::MAX, |d| {
            SimTime(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
        }),
        jump: !args.no_jump,
        threads: args.threads.unwrap_or_else(cores),
        each_token: args.slo.as_ref().is_some_and(Slo::reads_longest_gap),
        ..Options::default()
    };
    let drag = match &args.drag {
        None => None,
        Some(path) => {
            let named = || path.display().to_string();
            Some(DragWriter::create(path).with_context(named)?)
        }
    };
    let mut watcher = Watcher {
        drag,
        failure: None,
        began: Instant::now(),
        last: Instant::now(),
        shows: std::io::stderr().is_terminal() && !args.quiet,
        interrupted: interrupted()?,
    };
    let cpu_before = slipstream_bench::process::own_cpu_ns();
    let read = |path: &std::path::Path| std::fs::read(path);
    let outcome = slipstream_twin::simulate(&cluster, &workload, &options, read, &mut watcher)?;
    let cpu_s = (slipstream_bench::process::own_cpu_ns() - cpu_before) as f64 / 1e9;
    let wall_s = watcher.began.elapsed().as_secs_f64();
    watcher.clear();
    if let (Some(drag), Some(path)) = (&mut watcher.drag, &args.drag) {
        let ended = watcher.failure.map_or_else(|| drag.finish(), Err);
        ended.with_context(|| path.display().to_string())?;
    }
    let label = args.label.clone().unwrap_or_else(|| "simulated".into());
    let report = report(
        &outcome,
        &cluster.model.name,
        &name,
        label,
        workload.seed,
        cpu_s,
        args,
    );
    if let Some(path) = &args.out {
        std::fs::write(path, report.to_json()).with_context(|| path.display().to_string())?;
    }
    if args.json {
        out::print(&report.to_json())?;
    } else {
        out::print(&report.render())?;
        let simulated = outcome.ended_at.as_secs_f64();
        out::print(&format!(
            "simulated {} s in {} s ({}×), {} passes ({} % jumped), {} requests a CPU second; \
             seed {}, digest {:016x}\n",
            number(simulated),
            number(wall_s),
            number(simulated / wall_s),
            grouped(outcome.passes),
            number(100.0 * outcome.jumped as f64 / outcome.passes.max(1) as f64),
            number(report.requests.succeeded as f64 / cpu_s),
            workload.seed,
            outcome.digest,
        ))?;
    }
    if let Some(cut) = &outcome.cut {
        eprintln!("note: {cut}; the figures are those of the requests that had ended");
    }
    let failed = outcome.cut.is_some() || report.requests.failed > 0 || report.requests.sent == 0;
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn report(
    outcome: &Outcome,
    model: &str,
    workload: &str,
    label: String,
    seed: u64,
    cpu_s: f64,
    args: &Args,
) -> RunReport {
    let totals = &outcome.totals;
    let tokens = totals.tokens();
    let per = |count: u64| cpu_s * 1e6 / count.max(1) as f64;
    RunReport {
        schema: SCHEMA,
        label,
        target: "simulated".into(),
        model: model.into(),
        workload: workload.into(),
        seed,
        duration_s: totals.duration_s(),
        requests: totals.requests,
        errors: totals.errors.clone(),
        tokens,
        throughput: totals.throughput(),
        latency: totals.latencies(),
        goodput: args.slo.as_ref().map(|slo| totals.goodput(slo)),
        client: Some(ProcessCost {
            cpu_s,
            cpu_us_per_request: per(totals.requests.succeeded),
            cpu_us_per_token: per(tokens.output),
            rss_peak_bytes: slipstream_bench::process::usage_of(std::process::id())
                .map(|usage| usage.rss_peak_bytes),
        }),
        server: None,
        engine: Some(outcome.engine),
    }
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

/// A flag that SIGINT and SIGTERM set. A second signal ends the process.
fn interrupted() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            // Without a handler the process ends at the first signal, which is no loss of data.
            if super::serve::wait_for_signal().is_ok() {
                set.store(true, Ordering::Relaxed);
            }
        })?;
    Ok(flag)
}

struct Watcher {
    drag: Option<DragWriter<std::io::BufWriter<std::fs::File>>>,
    /// The records could not be written.
    failure: Option<slipstream_report::drag::DragError>,
    began: Instant,
    last: Instant,
    shows: bool,
    interrupted: Arc<AtomicBool>,
}

impl Watcher {
    fn clear(&self) {
        if self.shows {
            eprint!("\r\x1b[K");
        }
    }
}

impl Sink for Watcher {
    fn wants_requests(&self) -> bool {
        self.drag.is_some()
    }

    fn on_request(&mut self, record: &RequestRecord<'_>) {
        let (Some(drag), None) = (&mut self.drag, &self.failure) else {
            return;
        };
        if let Err(error) = drag.write(&drag_record(record)) {
            self.failure = Some(error);
        }
    }

    fn on_progress(&mut self, progress: Progress) -> bool {
        if self.shows && self.last.elapsed() > Duration::from_millis(100) {
            self.last = Instant::now();
            let simulated = progress.now.as_secs_f64();
            let mut stderr = std::io::stderr().lock();
            // A terminal that went away is no reason to end the run.
            let _ = write!(
                stderr,
                "\r\x1b[K{} s simulated ({}×), {} requests ended, {} under way",
                number(simulated),
                number(simulated / self.began.elapsed().as_secs_f64()),
                grouped(progress.ended),
                grouped(progress.in_flight as u64),
            );
            let _ = stderr.flush();
        }
        self.failure.is_none() && !self.interrupted.load(Ordering::Relaxed)
    }
}

/// The moment at which a simulated run begins, in its records: a time of 0 would count as absent.
const ORIGIN_NS: u64 = 1_000_000_000;

fn drag_record(record: &RequestRecord<'_>) -> DragRecord {
    let request = record.request;
    let mut drag = DragRecord {
        id: request.name(),
        worker: record.rank.map(|rank| rank.worker.0),
        isl: Some(record.input_tokens),
        osl: Some(record.output_tokens),
        preemptions: Some(record.preemptions),
        retries: Some(0),
        status: if record.error.is_some() {
            "refused"
        } else {
            "ok"
        }
        .into(),
        ..DragRecord::default()
    };
    drag.times.note(Stage::Due, ORIGIN_NS + request.due.0);
    if record.error.is_none() {
        // Hand-overs that are not modelled take no time.
        for stage in [
            Stage::Accept,
            Stage::Parsed,
            Stage::Tokenized,
            Stage::Routed,
            Stage::Dispatched,
            Stage::WorkerRecv,
        ] {
            drag.times.note(stage, ORIGIN_NS + request.due.0);
        }
        drag.times
            .note(Stage::Admitted, ORIGIN_NS + record.admitted.0);
        drag.times
            .note(Stage::FirstPassStart, ORIGIN_NS + record.first_pass_start.0);
        for stage in [
            Stage::FirstPassEnd,
            Stage::FrameRecv,
            Stage::Rendered,
            Stage::Written,
            Stage::ClientRecv,
        ] {
            drag.times.note(stage, ORIGIN_NS + record.first.0);
        }
        drag.times
            .note(Stage::LastClientRecv, ORIGIN_NS + record.last.0);
    }
    drag
}
