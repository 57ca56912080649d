//! `slipstream bench --sweep`: the highest load of a server at which its clients' objectives are attained.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::ensure;
use slipstream_bench::search::LoadSearch;
use slipstream_bench::{Config, Outcome, Progress};
use slipstream_config::workload_file::{Arrival, Workload};
use slipstream_plan::load;
use slipstream_report::RunReport;
use slipstream_report::table::{Table, grouped, number};
use slipstream_study::source::percent;

use crate::cmd::bench::{Load, config, show_progress};
use crate::out;

/// Flags of the search.
#[derive(clap::Args)]
pub(super) struct SweepArgs {
    /// Find the highest rate that attains --slo: run the load at several rates, from --rate on
    #[arg(long, conflicts_with_all = ["concurrency", "drag", "series", "html", "trace_stages"], help_heading = "Sweep")]
    pub(super) sweep: bool,
    /// Share of the requests of each class that must meet the objectives
    #[arg(long, value_name = "PERCENT", default_value = "99%", value_parser = percent, allow_hyphen_values = true, requires = "sweep", help_heading = "Sweep")]
    attain: f64,
    /// Runs at most; each takes as long as the first
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(2..=100), requires = "sweep", help_heading = "Sweep")]
    sweep_steps: u32,
}

/// A run at one load.
struct Step {
    /// Factor on the stated load.
    load: f64,
    /// Sessions per second, if the workload has a rate.
    rate_per_s: Option<f64>,
    /// Share of requests within their objectives, of the class with the lowest one.
    attained: f64,
    attains: bool,
    report: RunReport,
}

/// Runs the load at several rates, and prints a row for each.
pub(super) fn run(args: &Load) -> anyhow::Result<ExitCode> {
    let sweep = &args.sweep;
    ensure!(
        sweep.attain > 0.0 && sweep.attain <= 1.0,
        "--attain is {} %, but must be above 0 and at most 100 %",
        number(100.0 * sweep.attain)
    );
    let stated = config(args)?;
    ensure!(
        stated.slo.are_stated(),
        "--sweep finds the highest rate that attains objectives: state them with --slo, such as --slo ttft=1s,itl=50ms"
    );
    ensure!(
        !matches!(stated.workload.arrival, Arrival::Closed { .. }),
        "--sweep varies the rate of arrivals, and this load has none: state the first one to try with --rate"
    );
    let mut search = LoadSearch::new(sweep.sweep_steps);
    let mut steps: Vec<Step> = Vec::new();
    let mut interrupted = false;
    let mut failed = Vec::new();
    while let Some(load) = search.next_load() {
        let outcome = match measure(args, &stated, load, steps.len()) {
            // The server may have died of the rate before: the rows so far are what was asked for.
            Err(error) if !steps.is_empty() => {
                failed.push(format!("the run at {load} times the load: {error:#}"));
                break;
            }
            outcome => outcome?,
        };
        interrupted = outcome.interrupted;
        if interrupted {
            break; // its requests are those of a part
        }
        let step = Step::of(load, &stated.workload, outcome.report, sweep.attain);
        errln!("{}", step.line());
        search.note(load, step.attains);
        steps.push(step);
    }
    let json = json(args, &stated, &steps, &search, interrupted);
    let mut failures = failed;
    if let Some(path) = &args.output.out {
        failures.extend(out::save(path, &json));
    }
    if args.output.json {
        out::print_json(&json)?;
    } else {
        out::print(&text(&steps, &search, sweep.attain))?;
    }
    if interrupted {
        errln!("note: interrupted; the rows are those of the runs that had ended");
    }
    out::complain(&failures);
    let found = search.highest().is_some() && !interrupted && failures.is_empty();
    Ok(if found {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs the stated load, multiplied by `load`.
fn measure(args: &Load, stated: &Config, load: f64, at: usize) -> anyhow::Result<Outcome> {
    let mut workload = load::scaled(&stated.workload, load);
    // New texts: with those of the run before, the server would answer from its cache.
    workload.seed = workload.seed.wrapping_add(at as u64);
    let config = Config {
        workload,
        ..stated.clone()
    };
    let shows = std::io::stderr().is_terminal() && !args.output.quiet;
    let mut last = Progress::default();
    let outcome = slipstream_bench::run(config, &mut |progress| {
        if shows {
            show_progress(progress, &last);
            last = *progress;
        }
    });
    if shows {
        err!("\r\x1b[K");
    }
    let outcome = outcome?;
    for note in &outcome.notes {
        errln!("note: {note}");
    }
    Ok(outcome)
}

impl Step {
    fn of(load: f64, stated: &Workload, report: RunReport, target: f64) -> Step {
        let all = report.goodput.iter().map(|goodput| goodput.share);
        let classes = report.classes.iter().filter(|class| class.sent > 0);
        let of_classes = classes.filter_map(|class| Some(class.goodput.as_ref()?.share));
        let attained = all.chain(of_classes).reduce(f64::min).unwrap_or(0.0);
        Step {
            load,
            rate_per_s: rate_per_s(stated).map(|rate| rate * load),
            attained,
            attains: report.requests.sent > 0 && attained >= target - 1e-12,
            report,
        }
    }

    /// The load in words.
    fn name(&self) -> String {
        match self.rate_per_s {
            Some(rate) => format!("{}/s", number(rate)),
            None => format!("{} times the load", number(self.load)),
        }
    }

    fn line(&self) -> String {
        let verdict = if self.attains { "attains" } else { "misses" };
        format!(
            "{}: {} % attained, {verdict}",
            self.name(),
            number(100.0 * self.attained)
        )
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "load": self.load,
            "rate_per_s": self.rate_per_s,
            "attained": self.attained,
            "attains": self.attains,
        })
    }
}

/// Sessions per second of a workload with a rate.
fn rate_per_s(workload: &Workload) -> Option<f64> {
    match &workload.arrival {
        Arrival::Constant { rate_per_s }
        | Arrival::Poisson { rate_per_s }
        | Arrival::Gamma { rate_per_s, .. }
        | Arrival::Weibull { rate_per_s, .. }
        | Arrival::Diurnal { rate_per_s, .. } => Some(rate_per_s * workload.time_scale),
        _ => None,
    }
}

/// The table, by rising load, and the answer.
fn text(steps: &[Step], search: &LoadSearch, target: f64) -> String {
    let mut table = Table::new([
        "load",
        "rate/s",
        "requests",
        "failed",
        "tokens/s",
        "TTFT p99",
        "ITL p99",
        "E2E p99",
        "attained %",
        "attains",
    ]);
    let mut rows: Vec<&Step> = steps.iter().collect();
    rows.sort_by(|a, b| a.load.total_cmp(&b.load));
    for step in &rows {
        let (report, latency) = (&step.report, &step.report.latency);
        let p99 = |of: Option<slipstream_report::Percentiles>| {
            of.map_or_else(|| "-".to_owned(), |of| number(of.p99))
        };
        table.row([
            number(step.load),
            step.rate_per_s.map_or_else(|| "-".to_owned(), number),
            grouped(report.requests.sent),
            grouped(report.requests.failed),
            number(report.throughput.output_tokens_per_s),
            p99(latency.ttft_ms),
            p99(latency.itl_ms),
            p99(latency.e2e_ms),
            number(100.0 * step.attained),
            if step.attains { "yes" } else { "no" }.to_owned(),
        ]);
    }
    let at = |load: Option<f64>| rows.iter().find(|step| Some(step.load) == load);
    let target = number(100.0 * target);
    let answer = match (at(search.highest()), at(search.lowest_missed())) {
        (Some(best), Some(next)) => format!(
            "highest that attains {target} %: {} ({} requests/s answered); {} does not\n",
            best.name(),
            number(best.report.throughput.requests_per_s),
            next.name()
        ),
        (Some(best), None) => format!(
            "the highest rate tried, {}, attains {target} %; --sweep-steps allows more\n",
            best.name()
        ),
        (None, Some(next)) => format!(
            "no rate tried attains {target} %, down to {}\n",
            next.name()
        ),
        (None, None) => "no run has ended\n".to_owned(),
    };
    format!("{}latencies in ms\n{answer}", table.render(false))
}

fn json(
    args: &Load,
    stated: &Config,
    steps: &[Step],
    search: &LoadSearch,
    interrupted: bool,
) -> String {
    let with_report = |step: &Step| {
        let mut json = step.json();
        json["report"] = serde_json::to_value(&step.report).unwrap_or_default();
        json
    };
    let highest = steps
        .iter()
        .find(|step| Some(step.load) == search.highest());
    let value = serde_json::json!({
        "schema": 1,
        "slo": stated.slo.to_string(),
        "attain": args.sweep.attain,
        "steps": steps.iter().map(with_report).collect::<Vec<_>>(),
        "highest": highest.map(Step::json),
        "interrupted": interrupted,
    });
    format!("{value:#}\n")
}
