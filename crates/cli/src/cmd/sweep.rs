//! `slipstream sweep`: runs one workload on many clusters in virtual time, and finds the
//! Pareto-optimal ones.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use slipstream_base::SimTime;
use slipstream_config::cluster::Cluster;
use slipstream_config::prices::Prices;
use slipstream_config::workload_file::{Arrival, Content};
use slipstream_plan::confidence::{Interval, interval};
use slipstream_plan::load;
use slipstream_report::html::sweep::{SweepPage, SweepPoint};
use slipstream_report::latency::{P50, P99, TOO_FEW, cell};
use slipstream_report::record::{Cell, Column, ColumnType, RecordWriter};
use slipstream_report::run::ExpectedError;
use slipstream_report::table::{Table, counted, grouped, number};
use slipstream_report::{Objectives, Percentiles, Slo};
use slipstream_twin::sweep::{Point, Vary, as_good, combinations, front};
use slipstream_twin::{Options, Outcome};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::price_args::{PriceArgs, per_hour, percent};
use crate::cmd::workload_args::{WorkloadArgs, WorkloadSets, time};
use crate::out;

/// Limit of configurations per sweep.
const RUNS_MAX: usize = 100_000;

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

/// A configuration and its result.
struct Row {
    values: Vec<String>,
    /// Of the first seed; totals of all.
    outcome: Outcome,
    /// Expected error of each pool.
    expected: Vec<ExpectedError>,
    /// Mean over seeds.
    goodput_per_s: f64,
    /// Half the width of its 95 % interval, if there are several seeds.
    goodput_half: Option<f64>,
    /// Share of requests that met their objectives, of the class with the lowest one; mean over seeds.
    attained: Option<Interval>,
    /// Per hour, if GPUs have prices.
    cost_per_hour: Option<f64>,
    /// Of answers, mean over seeds.
    output_tokens_per_s: f64,
    /// Mean over seeds.
    duration_s: f64,
    gpus: u64,
    gpu_hours: f64,
    /// On the Pareto front: no other configuration gives more for less, beyond the tolerance.
    front: bool,
    /// Off the front, but equal to one on it within the tolerance.
    as_good: bool,
}

/// Runs all configurations, and prints a table.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    ensure!(
        (0.0..=50.0).contains(&args.tolerance),
        "--tolerance is {}, but must be 0 to 50 (percent)",
        args.tolerance
    );
    ensure!(
        args.attain
            .is_none_or(|attain| attain > 0.0 && attain <= 1.0),
        "--attain must be above 0 and at most 100 %"
    );
    let prices = args.price.read(&args.cluster.gpus()?)?;
    let (workload, name) = args.what.workload(&args.sets.workload_set)?;
    for (at, vary) in args.vary.iter().enumerate() {
        ensure!(
            args.vary[..at].iter().all(|before| before.key != vary.key),
            "--vary has `{}` twice; list all of its values in one",
            vary.key
        );
    }
    let runs = combinations(&args.vary);
    ensure!(
        runs.len() as u64 * args.seeds <= RUNS_MAX as u64,
        "{} of {}; the limit of runs is {RUNS_MAX}",
        counted(runs.len() as u64, "configuration"),
        counted(args.seeds, "seed")
    );
    let replays =
        matches!(workload.arrival, Arrival::Trace) && matches!(workload.content, Content::Trace(_));
    ensure!(
        args.seeds == 1 || !replays,
        "--seeds {}: a replayed trace is the same for every seed; leave it out, or draw arrivals with --rate",
        args.seeds
    );
    let objectives = Objectives::of(&workload, args.slo.clone());
    ensure!(
        args.attain.is_none() || objectives.are_stated(),
        "--attain needs objectives: state them with --slo"
    );
    let options = Options {
        each_token: objectives.read_longest_gap(),
        slo: objectives.clone(),
        time_max: args.max_sim_time.map_or(SimTime::MAX, |d| {
            SimTime(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
        }),
        ..Options::default()
    };
    // All configurations first, so that an error in the last is not found after an hour of runs.
    let mut clusters = Vec::with_capacity(runs.len());
    let mut workloads = Vec::with_capacity(runs.len());
    for values in &runs {
        let (mut sets, mut workload_sets, mut factor) = (Vec::new(), Vec::new(), 1.0);
        for (vary, value) in args.vary.iter().zip(values) {
            let set = format!("{}={value}", vary.key);
            match axis(&vary.key) {
                Axis::Cluster => sets.push(set),
                Axis::Workload => workload_sets.push(set),
                Axis::Load => factor = load_factor(value)?,
            }
        }
        let all = || {
            [sets.as_slice(), workload_sets.as_slice()]
                .concat()
                .join(", ")
        };
        let cluster = args.cluster.resolve(&sets).with_context(all)?;
        let Some(cluster) = cluster else {
            return Ok(ExitCode::SUCCESS); // --print-config
        };
        let varied = if workload_sets.is_empty() {
            workload.clone()
        } else {
            ensure!(
                args.what.workload.is_some(),
                "--vary {}: a key of the workload file, and there is none; use --workload, or `--vary load=…`",
                workload_sets.join(", ")
            );
            let own = &args.sets.workload_set;
            args.what
                .workload(&[own.as_slice(), workload_sets.as_slice()].concat())
                .with_context(all)?
                .0
        };
        if prices.are_stated() {
            per_hour(&cluster, &prices).with_context(all)?;
        }
        clusters.push(cluster);
        workloads.push(load::scaled(&varied, factor));
    }
    let cores = super::cores() as usize;
    let seeds = args.seeds as usize;
    let each: Vec<(usize, u64)> = (0..clusters.len())
        .flat_map(|at| (0..args.seeds).map(move |seed| (at, seed)))
        .collect();
    let jobs = args.jobs.map_or(cores, usize::from).min(each.len());
    let shows = std::io::stderr().is_terminal() && !args.quiet;
    let outcomes = run_all(&each, jobs, shows, |&(at, seed)| {
        let mut workload = workloads[at].clone();
        workload.seed = workload.seed.wrapping_add(seed);
        slipstream_twin::simulate(
            &clusters[at],
            &workload,
            &options,
            super::files::read,
            &mut (),
        )
    })?;
    let mut outcomes = outcomes.into_iter();
    let mut rows: Vec<Row> = runs
        .iter()
        .zip(&clusters)
        .map(|(values, cluster)| {
            let own: Vec<Outcome> = outcomes.by_ref().take(seeds).collect();
            row(values, cluster, own, &objectives, &prices)
        })
        .collect::<anyhow::Result<_>>()?;
    let points: Vec<Point> = rows
        .iter()
        .map(|row| Point {
            gain: row.goodput_per_s,
            cost: row.gpu_hours,
        })
        .collect();
    let tolerance = args.tolerance / 100.0;
    let on = front(&points, tolerance);
    let as_good = as_good(&points, &on, tolerance);
    for (row, (front, as_good)) in rows.iter_mut().zip(on.into_iter().zip(as_good)) {
        (row.front, row.as_good) = (front, as_good);
    }
    let mut failures = Vec::new();
    if let Some(path) = &args.out
        && let Err(error) = save(path, &args.vary, &rows)
    {
        failures.push(out::incomplete(path, &error));
    }
    let cut = rows.iter().filter(|row| row.outcome.cut.is_some()).count();
    let extrapolated = rows.iter().filter(|row| row.outcome.extrapolated > 0);
    let mut notes = Vec::new();
    if cut > 0 {
        notes.push(format!(
            "{} cut short (reason: `cut` in --out); requests that ended before are counted",
            counted(cut as u64, "run")
        ));
    }
    if let Some(worst) = extrapolated.clone().max_by(|a, b| {
        let share = |row: &&Row| row.outcome.extrapolated as f64 / row.outcome.passes.max(1) as f64;
        share(a).total_cmp(&share(b))
    }) {
        notes.push(format!(
            "{} with passes outside the table of step times (`extrapolated_passes` in --out), the worst with {} \
             of {}",
            counted(extrapolated.count() as u64, "run"),
            grouped(worst.outcome.extrapolated),
            grouped(worst.outcome.passes),
        ));
    }
    let all: Vec<ExpectedError> = rows.iter().flat_map(|row| row.expected.clone()).collect();
    if let Some(tpot) = widest(&all, |e| e.tpot)
        && let Some(ttft) = widest(&all, |e| e.ttft)
    {
        let percent = |factor: f64| 100.0 * (factor - 1.0);
        notes.push(format!(
            "expected error, the widest of all runs: TPOT {:+.0} to {:+.0} %, TTFT {:+.0} to {:+.0} % (80 % of \
             measurements; `expected_…` in --out has each run's)",
            percent(tpot[0]),
            percent(tpot[1]),
            percent(ttft[0]),
            percent(ttft[1]),
        ));
    }
    if let Some(path) = &args.html {
        let subtitle = format!(
            "{} · {name} · seed {}",
            clusters[0].model.name, workload.seed
        );
        let page = page(args, &objectives, &subtitle, notes.clone(), &rows)?;
        failures.extend(out::save(path, &page));
    }
    print(args, &objectives, &rows)?;
    for note in &notes {
        eprintln!("note: {note}");
    }
    out::complain(&failures);
    Ok(if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs each of `runs` on one of `jobs` threads; outcomes in the same order.
fn run_all<R: Sync, E: std::error::Error + Send + Sync + 'static>(
    runs: &[R],
    jobs: usize,
    shows: bool,
    simulate: impl Fn(&R) -> Result<Outcome, E> + Sync,
) -> anyhow::Result<Vec<Outcome>> {
    let next = AtomicUsize::new(0);
    let ended = AtomicUsize::new(0);
    let outcomes: Vec<Mutex<Option<Result<Outcome, E>>>> =
        runs.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(run) = runs.get(at) else {
                        return;
                    };
                    let outcome = simulate(run);
                    *outcomes[at].lock().expect("a run is stored whole") = Some(outcome);
                    let ended = ended.fetch_add(1, Ordering::Relaxed) + 1;
                    if shows {
                        let mut stderr = std::io::stderr().lock();
                        // A closed terminal must not end the sweep.
                        let _ = write!(
                            stderr,
                            "\r\x1b[K{ended} of {} ended",
                            counted(runs.len() as u64, "run")
                        );
                        let _ = stderr.flush();
                    }
                }
            });
        }
    });
    if shows {
        eprint!("\r\x1b[K");
    }
    outcomes
        .into_iter()
        .map(|outcome| {
            let outcome = outcome.into_inner().expect("a run is stored whole");
            Ok(outcome.expect("every run was taken by a thread")?)
        })
        .collect()
}

/// The widest of the expected errors of `target` over the pools.
fn widest(errors: &[ExpectedError], of: fn(&ExpectedError) -> [f64; 2]) -> Option<[f64; 2]> {
    errors
        .iter()
        .map(of)
        .reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])])
}

/// File of a varied key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Axis {
    Cluster,
    Workload,
    /// A factor on the load.
    Load,
}

fn axis(key: &str) -> Axis {
    const CLUSTER: [&str; 8] = [
        "model", "engine", "pool", "router", "network", "host", "kv", "live",
    ];
    const WORKLOAD: [&str; 14] = [
        "arrival",
        "class",
        "duration_s",
        "ignore_eos",
        "isl",
        "osl",
        "prefix",
        "priority",
        "requests",
        "seed",
        "session",
        "slo",
        "time_scale",
        "trace",
    ];
    let first = key.split(['.', '[']).next().unwrap_or_default();
    if key == "load" {
        Axis::Load
    } else if WORKLOAD.contains(&first) && !CLUSTER.contains(&first) {
        Axis::Workload
    } else {
        Axis::Cluster // whose reader names the mistake in an unknown key
    }
}

fn load_factor(value: &str) -> anyhow::Result<f64> {
    let factor: f64 = value.parse().unwrap_or(f64::NAN);
    ensure!(
        (1e-3..=1e3).contains(&factor),
        "--vary load: `{value}` is not a factor of 0.001 to 1,000"
    );
    Ok(factor)
}

/// The row of a configuration with the outcomes of its seeds, at least one.
fn row(
    values: &[&str],
    cluster: &Cluster,
    outcomes: Vec<Outcome>,
    objectives: &Objectives,
    prices: &Prices,
) -> anyhow::Result<Row> {
    let gpus = cluster.gpus();
    let mean =
        |of: &dyn Fn(&Outcome) -> f64| interval(&outcomes.iter().map(of).collect::<Vec<f64>>());
    let goodput = mean(&|o| o.totals.goodput_per_s());
    let duration_s = mean(&|o| o.totals.duration_s()).mean;
    let output_tokens_per_s = mean(&|o| o.totals.throughput().output_tokens_per_s).mean;
    let attained = objectives
        .are_stated()
        .then(|| mean(&|o| attained(o, objectives)));
    let several = outcomes.len() > 1;
    let mut outcomes = outcomes.into_iter();
    let mut outcome = outcomes.next().context("every configuration ran")?;
    for other in outcomes {
        outcome.totals.add(&other.totals);
        outcome.engine.preemptions = outcome
            .engine
            .preemptions
            .zip(other.engine.preemptions)
            .map(|(a, b)| a + b);
        outcome.passes += other.passes;
        outcome.extrapolated += other.extrapolated;
        outcome.cut = outcome.cut.or(other.cut);
    }
    Ok(Row {
        expected: outcome.expected_errors(cluster, super::files::read)?,
        values: values.iter().map(|&value| value.to_owned()).collect(),
        gpus,
        gpu_hours: gpus as f64 * duration_s / 3600.0,
        goodput_per_s: goodput.mean,
        goodput_half: several.then_some(goodput.half),
        attained,
        cost_per_hour: if prices.are_stated() {
            Some(per_hour(cluster, prices)?)
        } else {
            None
        },
        output_tokens_per_s,
        duration_s,
        outcome,
        front: false,
        as_good: false,
    })
}

/// Share of the requests that met their objectives, of the class with the lowest one. Requests that
/// never ended, or were never sent because an earlier turn failed, have missed them.
fn attained(outcome: &Outcome, objectives: &Objectives) -> f64 {
    let requests = &outcome.totals.requests;
    let lost = requests.abandoned + requests.unfinished;
    let share = |met: u64, all: u64| met as f64 / all.max(1) as f64;
    let all = outcome
        .totals
        .goodput(objectives)
        .map_or(0.0, |goodput| share(goodput.met, requests.sent + lost));
    outcome
        .totals
        .class_reports(objectives)
        .iter()
        .filter(|class| class.sent > 0)
        .filter_map(|class| Some(share(class.goodput.as_ref()?.met, class.sent)))
        .fold(all, f64::min)
}

/// Names of the table's columns, after the varied keys.
fn figures(args: &Args, row: Option<&Row>) -> Vec<&'static str> {
    let mut names = vec!["goodput/s"];
    if args.seeds > 1 {
        names.push("±");
    }
    if row.is_some_and(|row| row.attained.is_some()) {
        names.push("attained %");
        if args.seeds > 1 {
            names.push("±");
        }
        if args.attain.is_some() {
            names.push("attains");
        }
    }
    names.push("GPU-hours");
    if row.is_some_and(|row| row.cost_per_hour.is_some()) {
        names.extend(["cost/h", "per M tokens"]);
    }
    names.extend([
        "front",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "hits %",
        "preempted",
        "failed",
    ]);
    names
}

impl Row {
    /// Cost of a million tokens of answers.
    fn per_million(&self) -> Option<f64> {
        let rate = self.output_tokens_per_s;
        let cost = self.cost_per_hour?;
        (rate > 0.0).then(|| cost / (rate * 3600.0) * 1e6)
    }

    /// Whether the share of `--attain` is reached, on average over seeds.
    fn attains(&self, args: &Args) -> Option<bool> {
        Some(self.attained?.mean >= args.attain? - 1e-12)
    }

    /// Cells of the table, varied values first.
    fn cells(&self, args: &Args) -> Vec<String> {
        let row = self;
        let totals = &row.outcome.totals;
        let latency = totals.latencies();
        let tokens = totals.tokens();
        let hits = 100.0 * tokens.cached.unwrap_or(0) as f64 / tokens.input.max(1) as f64;
        let mut cells = row.values.clone();
        cells.push(number(row.goodput_per_s));
        cells.extend(row.goodput_half.map(number));
        if let Some(attained) = row.attained {
            cells.push(format!("{:.2}", 100.0 * attained.mean));
            if args.seeds > 1 {
                cells.push(number(100.0 * attained.half));
            }
            if let Some(attains) = row.attains(args) {
                cells.push(if attains { "yes" } else { "no" }.to_owned());
            }
        }
        cells.push(number(row.gpu_hours));
        if let Some(cost) = row.cost_per_hour {
            cells.push(format!("{cost:.2}"));
            cells.push(row.per_million().map_or_else(|| "-".to_owned(), number));
        }
        cells.extend([
            match (row.front, row.as_good) {
                (true, _) => "*",
                (false, true) => "~",
                (false, false) => "",
            }
            .to_owned(),
            cell(latency.ttft_ms, P50),
            cell(latency.ttft_ms, P99),
            cell(latency.itl_ms, P50),
            cell(latency.itl_ms, P99),
            number(hits),
            grouped(row.outcome.engine.preemptions.unwrap_or(0.0).round() as u64),
            (totals.requests.failed + totals.requests.abandoned + totals.requests.unfinished)
                .to_string(),
        ]);
        cells
    }
}

/// The page with plots.
fn page(
    args: &Args,
    objectives: &Objectives,
    subtitle: &str,
    warnings: Vec<String>,
    rows: &[Row],
) -> anyhow::Result<String> {
    let points: Vec<SweepPoint> = rows
        .iter()
        .map(|row| {
            let named = args.vary.iter().zip(&row.values);
            let name: Vec<_> = named
                .map(|(vary, value)| format!("{}={value}", vary.key))
                .collect();
            let latency = row.outcome.totals.latencies();
            SweepPoint {
                name: name.join(", "),
                tag: row.values.join(", "),
                goodput_per_s: row.goodput_per_s,
                gpu_hours: row.gpu_hours,
                front: row.front,
                cells: row.cells(args),
                p99_ms: [latency.ttft_ms, latency.itl_ms].map(|p| p.and_then(|p| p.at(P99))),
            }
        })
        .collect();
    let keys = args.vary.iter().map(|vary| vary.key.as_str());
    let header: Vec<&str> = keys.chain(figures(args, rows.first())).collect();
    // The first value of each key represents it among the common values.
    let of_cluster = args
        .vary
        .iter()
        .filter(|vary| axis(&vary.key) == Axis::Cluster);
    let firsts = of_cluster.filter_map(|vary| {
        let first = vary.values.first()?;
        Some(format!("{}={first}", vary.key))
    });
    let settings = match args
        .cluster
        .resolve_with_settings(&firsts.collect::<Vec<_>>())?
    {
        Some((_, settings)) => settings.to_toml(),
        None => String::new(),
    };
    let varied: Vec<String> = args
        .vary
        .iter()
        .map(|vary| format!("{}={}", vary.key, vary.values.join(",")))
        .collect();
    let base = [
        ("base".into(), args.cluster.name()),
        ("varied".into(), varied.join("; ")),
    ];
    let page = SweepPage {
        subtitle,
        base: &base,
        tolerance_is: &tolerance_is(args.tolerance),
        goodput_is: &goodput_is(objectives),
        header: &header,
        keys: args.vary.len(),
        points: &points,
        warnings,
        texts: vec![
            ("Command".into(), out::command_line()),
            (
                "Cluster, every value (of the first configuration)".into(),
                settings,
            ),
            ("Workload".into(), args.what.text(&args.sets.workload_set)?),
        ],
    };
    Ok(page.render())
}

fn print(args: &Args, objectives: &Objectives, rows: &[Row]) -> anyhow::Result<()> {
    let keys = args.vary.iter().map(|vary| vary.key.clone());
    let figures = figures(args, rows.first()).into_iter().map(str::to_owned);
    let mut table = Table::new(keys.chain(figures));
    for row in rows.iter().filter(|row| row.front || !args.front) {
        table.row(row.cells(args));
    }
    out::print(&table.render(false))?;
    let of = goodput_is(objectives);
    out::print(&format!(
        "goodput: requests per second {of}; latencies in ms; *: on the Pareto front (no other gives more for fewer GPU-hours); \
         ~: equal to one on it within the tolerance; {}\n",
        tolerance_is(args.tolerance)
    ))?;
    if let Some(attain) = args.attain {
        out::print(&cheapest(args, attain, rows))?;
    }
    let few = |row: &Row| {
        let latency = row.outcome.totals.latencies();
        let told = [latency.ttft_ms, latency.itl_ms];
        told.into_iter().flatten().any(|p| p.leaves_out())
    };
    if rows.iter().any(few) {
        out::print(&format!("{TOO_FEW}\n"))?;
    }
    Ok(())
}

/// The cheapest configuration that attains, of each load: one that attains less load is no alternative.
fn cheapest(args: &Args, attain: f64, rows: &[Row]) -> String {
    let named = |row: &Row, loads: bool| {
        let named = args.vary.iter().zip(&row.values);
        let wanted = named.filter(|(vary, _)| (axis(&vary.key) != Axis::Cluster) == loads);
        let each: Vec<String> = wanted
            .map(|(vary, value)| format!("{}={value}", vary.key))
            .collect();
        each.join(", ")
    };
    let cost = |row: &Row| row.cost_per_hour.unwrap_or(row.gpus as f64);
    let percent = number(100.0 * attain);
    let mut loads: Vec<String> = Vec::new();
    for row in rows {
        let load = named(row, true);
        if !loads.contains(&load) {
            loads.push(load);
        }
    }
    let line = |load: &String| {
        let attaining = rows
            .iter()
            .filter(|row| named(row, true) == *load && row.attains(args) == Some(true));
        let least = attaining.min_by(|a, b| cost(a).total_cmp(&cost(b)));
        let at = if load.is_empty() {
            String::new()
        } else {
            format!(" at {load}")
        };
        let Some(row) = least else {
            return format!("no configuration attains {percent} %{at}\n");
        };
        let name = named(row, false);
        let name = if name.is_empty() {
            "the cluster"
        } else {
            &name
        };
        let cost = match row.cost_per_hour {
            Some(cost) => format!("{cost:.2} per hour"),
            None => counted(row.gpus, "GPU"),
        };
        format!("cheapest that attains {percent} %{at}: {name} ({cost})\n")
    };
    loads.iter().map(line).collect()
}

/// The tolerance, in words.
fn tolerance_is(percent: f64) -> String {
    if percent > 0.0 {
        format!("tolerance {percent} %")
    } else {
        "no tolerance".to_owned()
    }
}

/// The criterion of goodput, in words.
fn goodput_is(objectives: &Objectives) -> String {
    if objectives.are_stated() {
        format!("within {objectives}")
    } else {
        "answered".to_owned()
    }
}

/// Half the width of an interval, if there is one.
fn half(interval: Interval) -> Option<f64> {
    interval.half.is_finite().then_some(interval.half)
}

fn save(path: &std::path::Path, varies: &[Vary], rows: &[Row]) -> anyhow::Result<()> {
    use ColumnType::{F64, Text, U64};
    let mut columns: Vec<Column> = varies
        .iter()
        .map(|vary| Column::new(&vary.key, Text))
        .collect();
    let figures = [
        ("front", U64),
        ("goodput_per_s", F64),
        ("goodput_half_per_s", F64),
        ("attained", F64),
        ("attained_half", F64),
        ("cost_per_hour", F64),
        ("cost_per_million_output_tokens", F64),
        ("gpus", U64),
        ("gpu_hours", F64),
        ("duration_s", F64),
        ("sent", U64),
        ("succeeded", U64),
        ("failed", U64),
        ("abandoned", U64),
        ("input_tokens", U64),
        ("output_tokens", U64),
        ("cached_tokens", U64),
        ("preemptions", F64),
        ("ttft_ms_mean", F64),
        ("ttft_ms_p50", F64),
        ("ttft_ms_p99", F64),
        ("itl_ms_mean", F64),
        ("itl_ms_p50", F64),
        ("itl_ms_p99", F64),
        ("e2e_ms_p50", F64),
        ("e2e_ms_p99", F64),
        ("passes", U64),
        ("extrapolated_passes", U64),
        ("expected_region", Text),
        ("expected_tpot_low", F64),
        ("expected_tpot_high", F64),
        ("expected_ttft_low", F64),
        ("expected_ttft_high", F64),
        ("digest", Text),
        ("cut", Text),
    ];
    columns.extend(figures.map(|(name, kind)| Column::new(name, kind)));
    let mut file = RecordWriter::create(path, &columns)?;
    for row in rows {
        let totals = &row.outcome.totals;
        let (requests, tokens, latency) = (totals.requests, totals.tokens(), totals.latencies());
        let digest = format!("{:016x}", row.outcome.digest);
        let regions: Vec<&str> = row.expected.iter().map(|e| &*e.region).collect();
        let region = (!regions.is_empty()).then(|| regions.join(" / "));
        let tpot = widest(&row.expected, |e| e.tpot);
        let ttft = widest(&row.expected, |e| e.ttft);
        let of =
            |p: Option<Percentiles>, get: fn(&Percentiles) -> f64| Cell::from(p.as_ref().map(get));
        let mut cells: Vec<Cell<'_>> = row.values.iter().map(|v| Cell::Text(v)).collect();
        cells.extend([
            Cell::U64(row.front.into()),
            Cell::F64(row.goodput_per_s),
            Cell::from(row.goodput_half),
            Cell::from(row.attained.map(|attained| attained.mean)),
            Cell::from(row.attained.and_then(half)),
            Cell::from(row.cost_per_hour),
            Cell::from(row.per_million()),
            Cell::U64(row.gpus),
            Cell::F64(row.gpu_hours),
            Cell::F64(row.duration_s),
            Cell::U64(requests.sent),
            Cell::U64(requests.succeeded),
            Cell::U64(requests.failed),
            Cell::U64(requests.abandoned),
            Cell::U64(tokens.input),
            Cell::U64(tokens.output),
            Cell::from(tokens.cached),
            Cell::from(row.outcome.engine.preemptions),
            of(latency.ttft_ms, |p| p.mean),
            of(latency.ttft_ms, |p| p.p50),
            of(latency.ttft_ms, |p| p.p99),
            of(latency.itl_ms, |p| p.mean),
            of(latency.itl_ms, |p| p.p50),
            of(latency.itl_ms, |p| p.p99),
            of(latency.e2e_ms, |p| p.p50),
            of(latency.e2e_ms, |p| p.p99),
            Cell::U64(row.outcome.passes),
            Cell::U64(row.outcome.extrapolated),
            region.as_deref().map_or(Cell::Absent, Cell::Text),
            tpot.map_or(Cell::Absent, |[low, _]| Cell::F64(low)),
            tpot.map_or(Cell::Absent, |[_, high]| Cell::F64(high)),
            ttft.map_or(Cell::Absent, |[low, _]| Cell::F64(low)),
            ttft.map_or(Cell::Absent, |[_, high]| Cell::F64(high)),
            Cell::Text(&digest),
            row.outcome.cut.as_deref().map_or(Cell::Absent, Cell::Text),
        ]);
        file.write(&cells)?;
    }
    Ok(file.finish()?)
}
