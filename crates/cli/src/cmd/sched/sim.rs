//! `slipstream sched sim`: hosts in virtual time.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::json;
use slipstream_base::width::round_u64;
use slipstream_cpusched::config::{Experiment, Plan};
use slipstream_cpusched::perfetto::Trace;
use slipstream_cpusched::policy::COUNTERS;
use slipstream_cpusched::result::RunResult;
use slipstream_report::latency::enough_samples;
use slipstream_report::table::{Table, counted, grouped, number};

use crate::out;

/// Limit of runs (tasks on CPUs) in a trace file; further ones are counted and omitted.
const TRACE_RUNS_MAX: usize = 500_000;

/// Flags of `slipstream sched sim`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Experiment file, such as examples/sched/176cpu.toml
    file: PathBuf,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// Also write a trace of the run in this row of the table (from 1), for ui.perfetto.dev
    #[arg(long, value_name = "ROW", requires = "trace_file")]
    trace_row: Option<usize>,
    /// File for that trace
    #[arg(long, value_name = "FILE", requires = "trace_row")]
    trace_file: Option<PathBuf>,
}

/// Runs the experiment and prints its table.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    crate::out::check_writable([("trace-file", args.trace_file.as_deref())])?;
    let shown = args.file.display();
    let text =
        crate::cmd::files::read_text(&args.file).with_context(|| format!("reading {shown}"))?;
    let beside = args.file.parent().unwrap_or(Path::new(".")).to_owned();
    let load_rtapp = |name: &str| {
        let path = beside.join(name);
        crate::cmd::files::read_text(&path)
            .map_err(|e| format!("`workload.file`: reading {}: {e}", path.display()))
    };
    let experiment = Experiment::parse(&text, load_rtapp).with_context(|| format!("{shown}"))?;
    let rows = experiment.plans.len();
    if let Some(row) = args.trace_row
        && !(1..=rows).contains(&row)
    {
        anyhow::bail!("--trace-row is {row}, but the table has rows 1 to {rows}");
    }
    let mut table = Table::new([
        "policy",
        "CPUs",
        "wake us",
        "load %",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "request p50 us",
        "request p99 us",
        "requests/s",
        "hand-offs/s",
        "ran next %",
        "lied %",
        "used %",
    ]);
    let mut results = Vec::new();
    for (i, plan) in experiment.plans.iter().enumerate() {
        let wanted = args.trace_row == Some(i + 1);
        let mut trace = wanted.then(|| Trace::new(plan.machine.cpus(), TRACE_RUNS_MAX));
        let result = experiment.run(plan, trace.as_mut())?;
        if let (Some(trace), Some(path)) = (trace, &args.trace_file) {
            let (text, dropped) = trace.finish();
            std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
            if dropped > 0 {
                errln!(
                    "trace: {} omitted after the first {TRACE_RUNS_MAX}",
                    counted(dropped, "run")
                );
            }
        }
        table.row(cells(plan, &result, &experiment));
        results.push(as_json(plan, &result));
    }
    if args.json {
        let all = json!({ "seed": experiment.seed, "seeds": experiment.seeds, "measured_ns": experiment.measure_ns, "runs": results });
        out::print(&format!("{all:#}\n"))?;
    } else {
        let groups = experiment
            .plans
            .first()
            .map(|p| &p.workload.groups[p.shown_group]);
        let group = groups.map_or("", String::as_str);
        out::print(&format!(
            "wake-up latency of `{group}` tasks; {}, {} ms measured{}\n{}",
            match experiment.seeds {
                1 => format!("seed {}", experiment.seed),
                n => format!(
                    "seeds {} to {}",
                    experiment.seed,
                    experiment.seed + u64::from(n) - 1
                ),
            },
            experiment.measure_ns / 1_000_000,
            if experiment.seeds == 1 { "" } else { " each" },
            table.render(false)
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn counter(result: &RunResult, name: &str) -> u64 {
    result.counters[slipstream_cpusched::policy::counter(name)]
}

fn cells(plan: &Plan, r: &RunResult, experiment: &Experiment) -> Vec<String> {
    let g = &r.groups[plan.shown_group];
    let us = |h: &hdrhistogram::Histogram<u64>, quantile: f64| {
        if enough_samples(quantile, h.len()) {
            number(h.value_at_quantile(quantile) as f64 / 1e3)
        } else {
            "-".to_owned()
        }
    };
    let seconds = r.measured_ns as f64 / 1e9;
    let warmup_ns = experiment.warmup_ns * u64::from(experiment.seeds);
    let whole = (r.measured_ns + warmup_ns) as f64 / 1e9;
    let handoffs = counter(r, "handoff");
    let share = |n: u64| {
        if handoffs == 0 {
            "-".to_owned()
        } else {
            format!("{:.1}", n as f64 * 100.0 / handoffs as f64)
        }
    };
    vec![
        plan.kind.name().to_owned(),
        plan.machine.cpus().to_string(),
        plan.wake_idle_us
            .map_or("-".to_owned(), |us| us.to_string()),
        plan.load_pct.map_or("-".to_owned(), |l| l.to_string()),
        us(&g.wake, 0.5),
        us(&g.wake, 0.99),
        us(&g.wake, 0.999),
        us(&g.request, 0.5),
        us(&g.request, 0.99),
        grouped(round_u64(r.requests as f64 / seconds)),
        grouped(round_u64(handoffs as f64 / whole)),
        // A trusted handoff is queued where nothing can precede it, so it is not counted when it
        // runs.
        share(counter(r, "ran_next") + counter(r, "trusted")),
        share(counter(r, "hint_lied")),
        format!("{:.1}", r.utilization * 100.0),
    ]
}

fn as_json(plan: &Plan, r: &RunResult) -> serde_json::Value {
    let quantiles = |h: &hdrhistogram::Histogram<u64>| {
        json!({
            "count": h.len(),
            "p50": h.value_at_quantile(0.5),
            "p99": h.value_at_quantile(0.99),
            "p99_9": h.value_at_quantile(0.999),
            "max": h.max(),
        })
    };
    let groups: serde_json::Map<_, _> = r
        .groups
        .iter()
        .map(|g| {
            let value = json!({
                "wake_ns": quantiles(&g.wake),
                "hop_ns": quantiles(&g.hop),
                "request_ns": quantiles(&g.request),
                "run_ns": g.run_ns,
                "wait_max_ns": g.wait_max_ns,
            });
            (g.name.clone(), value)
        })
        .collect();
    let counters: serde_json::Map<_, _> = COUNTERS
        .iter()
        .zip(r.counters)
        .map(|(n, c)| ((*n).to_owned(), c.into()))
        .collect();
    json!({
        "policy": plan.kind.name(),
        "cpus": plan.machine.cpus(),
        "llcs": plan.machine.llcs,
        "wake_idle_us": plan.wake_idle_us,
        "load_pct": plan.load_pct,
        "groups": groups,
        "counters": counters,
        "requests": r.requests,
        "switches": r.switches,
        "llc_moves": r.llc_moves,
        "utilization": r.utilization,
        "idle_beside_work_ns": r.idle_beside_work_ns,
        "events": r.events,
        "digest": format!("{:016x}", r.digest),
    })
}
