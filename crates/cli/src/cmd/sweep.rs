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
use slipstream_report::html::sweep::{SweepPage, SweepPoint};
use slipstream_report::latency::{P50, P99, TOO_FEW, cell};
use slipstream_report::record::{Cell, Column, ColumnType, RecordWriter};
use slipstream_report::table::{Table, counted, grouped, number};
use slipstream_report::{Objectives, Percentiles, Slo};
use slipstream_twin::sweep::{Point, Vary, as_good, combinations, front};
use slipstream_twin::{Options, Outcome};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::workload_args::{WorkloadArgs, WorkloadSets, time};
use crate::out;

/// Limit of configurations per sweep.
const RUNS_MAX: usize = 100_000;

/// Flags of `slipstream sweep`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Key of the cluster file and its values: KEY=A,B,C or KEY=FIRST..LAST[..STEP]; may be repeated
    #[arg(long, value_name = "KEY=VALUES", required = true)]
    vary: Vec<Vary>,
    #[command(flatten)]
    what: WorkloadArgs,
    #[command(flatten)]
    sets: WorkloadSets,

    /// Stop each run at this simulated time, with requests in flight
    #[arg(long, value_name = "TIME", value_parser = time, help_heading = "Run")]
    max_sim_time: Option<Duration>,
    /// Concurrent runs [default: cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Run")]
    jobs: Option<u16>,

    /// Objectives for goodput, such as ttft=1s,itl=50ms; without them every answer counts
    #[arg(long, value_name = "SLO", help_heading = "Output")]
    slo: Option<Slo>,
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
    outcome: Outcome,
    goodput_per_s: f64,
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
        runs.len() <= RUNS_MAX,
        "{}; the limit is {RUNS_MAX}",
        counted(runs.len() as u64, "configuration")
    );
    let objectives = Objectives::of(&workload, args.slo.clone());
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
    for values in &runs {
        let sets: Vec<String> = args
            .vary
            .iter()
            .zip(values)
            .map(|(vary, value)| format!("{}={value}", vary.key))
            .collect();
        let cluster = args
            .cluster
            .resolve(&sets)
            .with_context(|| sets.join(", "))?;
        let Some(cluster) = cluster else {
            return Ok(ExitCode::SUCCESS); // --print-config
        };
        clusters.push(cluster);
    }
    let cores = super::cores() as usize;
    let jobs = args.jobs.map_or(cores, usize::from).min(clusters.len());
    let shows = std::io::stderr().is_terminal() && !args.quiet;
    let outcomes = run_all(&clusters, jobs, shows, |cluster| {
        slipstream_twin::simulate(cluster, &workload, &options, super::files::read, &mut ())
    })?;
    let mut rows: Vec<Row> = runs
        .iter()
        .zip(&clusters)
        .zip(outcomes)
        .map(|((values, cluster), outcome)| row(values, cluster, outcome))
        .collect();
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

/// Runs each cluster on one of `jobs` threads; outcomes in the order of `clusters`.
fn run_all<E: std::error::Error + Send + Sync + 'static>(
    clusters: &[Cluster],
    jobs: usize,
    shows: bool,
    simulate: impl Fn(&Cluster) -> Result<Outcome, E> + Sync,
) -> anyhow::Result<Vec<Outcome>> {
    let next = AtomicUsize::new(0);
    let ended = AtomicUsize::new(0);
    let outcomes: Vec<Mutex<Option<Result<Outcome, E>>>> =
        clusters.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cluster) = clusters.get(at) else {
                        return;
                    };
                    let outcome = simulate(cluster);
                    *outcomes[at].lock().expect("a run is stored whole") = Some(outcome);
                    let ended = ended.fetch_add(1, Ordering::Relaxed) + 1;
                    if shows {
                        let mut stderr = std::io::stderr().lock();
                        // A closed terminal must not end the sweep.
                        let _ = write!(
                            stderr,
                            "\r\x1b[K{ended} of {} ended",
                            counted(clusters.len() as u64, "run")
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

fn row(values: &[&str], cluster: &Cluster, outcome: Outcome) -> Row {
    let gpus = cluster.gpus();
    Row {
        values: values.iter().map(|&value| value.to_owned()).collect(),
        gpus,
        gpu_hours: gpus as f64 * outcome.totals.duration_s() / 3600.0,
        goodput_per_s: outcome.totals.goodput_per_s(),
        outcome,
        front: false,
        as_good: false,
    }
}

/// Columns of the table, after the varied keys.
const FIGURES: [&str; 10] = [
    "goodput/s",
    "GPU-hours",
    "front",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "hits %",
    "preempted",
    "failed",
];

impl Row {
    /// Cells of the table, varied values first.
    fn cells(&self) -> Vec<String> {
        let row = self;
        let totals = &row.outcome.totals;
        let latency = totals.latencies();
        let tokens = totals.tokens();
        let hits = 100.0 * tokens.cached.unwrap_or(0) as f64 / tokens.input.max(1) as f64;
        let figures = [
            number(row.goodput_per_s),
            number(row.gpu_hours),
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
        ];
        row.values.iter().cloned().chain(figures).collect()
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
                cells: row.cells(),
                p99_ms: [latency.ttft_ms, latency.itl_ms].map(|p| p.and_then(|p| p.at(P99))),
            }
        })
        .collect();
    let keys = args.vary.iter().map(|vary| vary.key.as_str());
    let header: Vec<&str> = keys.chain(FIGURES).collect();
    // The first value of each key represents it among the common values.
    let firsts = args.vary.iter().filter_map(|vary| {
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
    let mut table = Table::new(keys.chain(FIGURES.map(str::to_owned)));
    for row in rows.iter().filter(|row| row.front || !args.front) {
        table.row(row.cells());
    }
    out::print(&table.render(false))?;
    let of = goodput_is(objectives);
    out::print(&format!(
        "goodput: requests per second {of}; latencies in ms; *: on the Pareto front (no other gives more for fewer GPU-hours); \
         ~: equal to one on it within the tolerance; {}\n",
        tolerance_is(args.tolerance)
    ))?;
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

fn save(path: &std::path::Path, varies: &[Vary], rows: &[Row]) -> anyhow::Result<()> {
    use ColumnType::{F64, Text, U64};
    let mut columns: Vec<Column> = varies
        .iter()
        .map(|vary| Column::new(&vary.key, Text))
        .collect();
    let figures = [
        ("front", U64),
        ("goodput_per_s", F64),
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
        ("digest", Text),
        ("cut", Text),
    ];
    columns.extend(figures.map(|(name, kind)| Column::new(name, kind)));
    let mut file = RecordWriter::create(path, &columns)?;
    for row in rows {
        let totals = &row.outcome.totals;
        let (requests, tokens, latency) = (totals.requests, totals.tokens(), totals.latencies());
        let digest = format!("{:016x}", row.outcome.digest);
        let of =
            |p: Option<Percentiles>, get: fn(&Percentiles) -> f64| Cell::from(p.as_ref().map(get));
        let mut cells: Vec<Cell<'_>> = row.values.iter().map(|v| Cell::Text(v)).collect();
        cells.extend([
            Cell::U64(row.front.into()),
            Cell::F64(row.goodput_per_s),
            Cell::U64(row.gpus),
            Cell::F64(row.gpu_hours),
            Cell::F64(totals.duration_s()),
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
            Cell::Text(&digest),
            row.outcome.cut.as_deref().map_or(Cell::Absent, Cell::Text),
        ]);
        file.write(&cells)?;
    }
    Ok(file.finish()?)
}
