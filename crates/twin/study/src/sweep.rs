//! One workload on many clusters, and the Pareto-optimal ones.
//!
//! A [`Sweep`] is checked as a whole before the first run. Its configurations then run in any order, on any
//! number of threads or processes ([`Sweep::rows`] of any range), and [`Sweep::finish`] compares the rows.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use slipstream_base::width;
use slipstream_config::cluster::Cluster;
use slipstream_config::prices::Prices;
use slipstream_config::workload_file::{Arrival, Content, Workload};
use slipstream_plan::confidence::{Interval, Share, interval, share};
use slipstream_plan::load;
use slipstream_report::html::sweep::{SweepPage, SweepPoint};
use slipstream_report::latency::{P50, P99, TOO_FEW, cell};
use slipstream_report::overload::Overload;
use slipstream_report::record::{Cell, Column as FileColumn, ColumnType, RecordWriter};
use slipstream_report::run::{ExpectedError, Latencies, RequestCounts, TokenCounts};
use slipstream_report::table::{Table, counted, grouped, number};
use slipstream_report::{Objectives, Percentiles, Slo};
use slipstream_twin::sweep::{Point, Vary, as_good, combinations, front};
use slipstream_twin::{Options, Outcome};

use crate::columns::Column;
use crate::control::Control;
use crate::meter::{Meter, Watched};
use crate::run::time_max;
use crate::source::{ClusterSource, PriceSource, WorkloadSource, per_hour};
use crate::{cores, files};

/// Limit of runs per sweep.
const RUNS_MAX: usize = 100_000;

/// A key of the cluster or workload file, or `load`, and its values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Axis {
    /// `KEY=A,B,C` or `KEY=FIRST..LAST[..STEP]`.
    Text(String),
    /// The key, and each of its values as written in `--set KEY=`.
    Values(String, Vec<String>),
}

impl Axis {
    fn vary(&self) -> anyhow::Result<Vary> {
        match self {
            Axis::Text(text) => text.parse().map_err(anyhow::Error::msg),
            Axis::Values(key, values) => {
                ensure!(
                    !key.trim().is_empty() && !values.is_empty(),
                    "`{key}` lacks a key or a value"
                );
                Ok(Vary {
                    key: key.trim().to_owned(),
                    values: values.clone(),
                })
            }
        }
    }
}

/// A value in the form that equal numbers share.
fn as_number(value: &str) -> String {
    let value = value.trim();
    match value.parse::<f64>() {
        // Whole numbers have all their digits in a text.
        Ok(number) if value.parse::<i128>().is_err() && number.is_finite() => number.to_string(),
        Ok(_) | Err(_) => value
            .parse::<i128>()
            .map_or_else(|_| value.to_owned(), |n| n.to_string()),
    }
}

/// The question: which of these configurations give most for least?
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Question {
    /// The cluster.
    pub cluster: ClusterSource,
    /// The workload.
    pub workload: WorkloadSource,
    /// Keys and their values: every combination is a configuration.
    pub vary: Vec<Axis>,
    /// Ends each run at this simulated time.
    pub max_sim_time: Option<Duration>,
    /// Seeds of each configuration, from the workload's on.
    pub seeds: u64,
    /// Objectives for goodput; `None`: those of the workload's classes.
    #[serde(with = "crate::source::as_text")]
    pub slo: Option<Slo>,
    /// Share of requests that must meet the objectives.
    pub attain: Option<f64>,
    /// Prices per GPU-hour.
    pub prices: PriceSource,
    /// Tolerance for differences, percent.
    pub tolerance: f64,
}

impl Default for Question {
    fn default() -> Question {
        Question {
            cluster: ClusterSource::default(),
            workload: WorkloadSource::default(),
            vary: Vec::new(),
            max_sim_time: None,
            seeds: 1,
            slo: None,
            attain: None,
            prices: PriceSource::default(),
            tolerance: 1.0,
        }
    }
}

/// A configuration and its figures, over all of its seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Index of the configuration.
    pub at: usize,
    /// Requests of all seeds.
    pub requests: RequestCounts,
    /// Their tokens.
    pub tokens: TokenCounts,
    /// Their latencies.
    pub latency: Latencies,
    /// Preempted sequences.
    pub preemptions: Option<f64>,
    /// Passes of the engines.
    pub passes: u64,
    /// Of these, outside the table of step times.
    pub extrapolated: u64,
    /// Digest of the first seed's run.
    pub digest: String,
    /// Of the first seed's run: requests came faster than they were answered.
    pub overloaded: Option<Overload>,
    /// Why a run ended early, if one did.
    pub cut: Option<String>,
    /// Expected error of each pool.
    pub expected: Vec<ExpectedError>,
    /// Mean over seeds.
    pub goodput_per_s: f64,
    /// Half the width of its 95 % interval, if there are several seeds.
    pub goodput_half: Option<f64>,
    /// Share of requests that met their objectives, of the class with the lowest one; mean over seeds.
    pub attained: Option<f64>,
    /// Its 95 % interval, if there are several seeds.
    pub attained_range: Option<[f64; 2]>,
    /// Per hour, if GPUs have prices.
    pub cost_per_hour: Option<f64>,
    /// Of answers, mean over seeds.
    pub output_tokens_per_s: f64,
    /// Mean over seeds.
    pub duration_s: f64,
    /// GPUs of the cluster.
    pub gpus: u64,
    /// GPUs times the duration.
    pub gpu_hours: f64,
}

/// A sweep that can run.
#[derive(Debug)]
pub struct Sweep {
    question: Question,
    vary: Vec<Vary>,
    /// Shape `[configurations][vary]`.
    values: Vec<Vec<String>>,
    /// Shape `[configurations]`.
    clusters: Vec<Cluster>,
    /// Shape `[configurations]`.
    workloads: Vec<Workload>,
    objectives: Objectives,
    prices: Prices,
    options: Options,
    name: String,
    seed: u64,
}

impl Question {
    /// The question as JSON that can travel to another process, with the texts of its files.
    ///
    /// # Errors
    /// If a file cannot be read, or is not UTF-8.
    pub fn travelling(&self) -> anyhow::Result<String> {
        let mut question = self.clone();
        question.cluster = question.cluster.with_text()?;
        question.workload = question.workload.with_text()?;
        question.prices = question.prices.with_text()?;
        Ok(serde_json::to_string(&question)?)
    }

    /// Reads the files, and checks every configuration, so that an error in the last is not found after an
    /// hour of runs.
    ///
    /// # Errors
    /// If a file cannot be read, or a value is wrong.
    pub fn prepare(self) -> anyhow::Result<Sweep> {
        self.check()?;
        let vary = self.axes()?;
        let prices = self.prices.read(&self.cluster.gpus()?)?;
        let (workload, name) = self.workload.workload(&[])?;
        self.check_runs(&vary, &workload)?;
        let objectives = Objectives::of(&workload, self.slo.clone());
        ensure!(
            self.attain.is_none() || objectives.are_stated(),
            "--attain needs objectives: state them with --slo"
        );
        let values: Vec<Vec<String>> = combinations(&vary)
            .into_iter()
            .map(|values| values.into_iter().map(str::to_owned).collect())
            .collect();
        let mut clusters = Vec::with_capacity(values.len());
        let mut workloads = Vec::with_capacity(values.len());
        for values in &values {
            let (cluster, varied) = self.configuration(&vary, values, &workload, &prices)?;
            clusters.push(cluster);
            workloads.push(varied);
        }
        Ok(Sweep {
            seed: workload.seed,
            options: Options {
                each_token: objectives.read_longest_gap(),
                slo: objectives.clone(),
                time_max: time_max(self.max_sim_time),
                ..Options::default()
            },
            question: self,
            vary,
            values,
            clusters,
            workloads,
            objectives,
            prices,
            name,
        })
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (0.0..=50.0).contains(&self.tolerance),
            "--tolerance is {}, but must be 0 to 50 (percent)",
            self.tolerance
        );
        ensure!(
            self.attain
                .is_none_or(|attain| attain > 0.0 && attain <= 1.0),
            "--attain must be above 0 and at most 100 %"
        );
        ensure!(
            (1..=1000).contains(&self.seeds),
            "--seeds is {}, but must be 1 to 1,000",
            self.seeds
        );
        Ok(())
    }

    fn axes(&self) -> anyhow::Result<Vec<Vary>> {
        let vary: Vec<Vary> = self
            .vary
            .iter()
            .map(Axis::vary)
            .collect::<anyhow::Result<_>>()?;
        ensure!(
            !vary.is_empty(),
            "nothing varies; name a key and its values"
        );
        Ok(vary)
    }

    /// Checks the number of runs, and that each gives another result.
    fn check_runs(&self, vary: &[Vary], workload: &Workload) -> anyhow::Result<()> {
        for (at, each) in vary.iter().enumerate() {
            ensure!(
                vary[..at].iter().all(|before| before.key != each.key),
                "--vary has `{}` twice; list all of its values in one",
                each.key
            );
            let mut seen = HashMap::with_capacity(each.values.len());
            for value in &each.values {
                if let Some(first) = seen.insert(as_number(value), value) {
                    let both = if first == value {
                        format!("{value} twice")
                    } else {
                        format!("{first} and {value}, which are equal")
                    };
                    bail!("--vary: `{}` has {both}; keep one", each.key);
                }
            }
        }
        let runs: f64 = vary.iter().map(|vary| vary.values.len() as f64).product();
        ensure!(
            runs * self.seeds as f64 <= RUNS_MAX as f64,
            "{} of {}; the limit of runs is {RUNS_MAX}",
            counted(width::floor_u64(runs), "configuration"),
            counted(self.seeds, "seed")
        );
        let replays = matches!(workload.arrival, Arrival::Trace)
            && matches!(workload.content, Content::Trace(_));
        ensure!(
            self.seeds == 1 || !replays,
            "--seeds {}: a replayed trace is the same for every seed; leave it out, or draw arrivals with --rate",
            self.seeds
        );
        Ok(())
    }

    /// The cluster and the workload with one combination of `values`. Shape of `values`: as `vary`.
    fn configuration(
        &self,
        vary: &[Vary],
        values: &[String],
        workload: &Workload,
        prices: &Prices,
    ) -> anyhow::Result<(Cluster, Workload)> {
        let (mut sets, mut workload_sets, mut factor) = (Vec::new(), Vec::new(), 1.0);
        for (vary, value) in vary.iter().zip(values) {
            let set = format!("{}={value}", vary.key);
            match file_of(&vary.key) {
                File::Cluster => sets.push(set),
                File::Workload => workload_sets.push(set),
                File::Load => factor = load_factor(value)?,
            }
        }
        let all = || {
            [sets.as_slice(), workload_sets.as_slice()]
                .concat()
                .join(", ")
        };
        let (cluster, _) = self.cluster.resolve_simulated(&sets).with_context(all)?;
        let varied = if workload_sets.is_empty() {
            workload.clone()
        } else {
            ensure!(
                self.workload.has_file(),
                "--vary {}: a key of the workload file, and there is none; use --workload, or `--vary load=…`",
                workload_sets.join(", ")
            );
            self.workload.workload(&workload_sets).with_context(all)?.0
        };
        if prices.are_stated() {
            per_hour(&cluster, prices).with_context(all)?;
        }
        Ok((cluster, load::scaled(&varied, factor)))
    }
}

impl Sweep {
    /// Number of configurations.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is none; there always is one.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Runs the configurations of `range` on `jobs` threads (`None`: one per core). Rows in their order; if the sweep is
    /// interrupted, those of which every run had ended.
    ///
    /// # Errors
    /// If a run fails.
    pub fn rows(
        &self,
        range: Range<usize>,
        jobs: Option<usize>,
        control: &Control,
    ) -> anyhow::Result<Vec<Row>> {
        ensure!(
            range.start <= range.end && range.end <= self.len(),
            "configurations {} to {} of {}",
            range.start,
            range.end,
            self.len()
        );
        let seeds = self.question.seeds;
        let each: Vec<(usize, u64)> = range
            .clone()
            .flat_map(|at| (0..seeds).map(move |seed| (at, seed)))
            .collect();
        let jobs = jobs
            .unwrap_or_else(|| cores() as usize)
            .clamp(1, each.len().max(1));
        let requests = |&(at, _): &(usize, u64)| self.workloads[at].requests;
        let mut outcomes = run_all(&each, jobs, control, requests, |&(at, seed), sink| {
            let mut workload = self.workloads[at].clone();
            workload.seed = workload.seed.wrapping_add(seed);
            slipstream_twin::simulate(
                &self.clusters[at],
                &workload,
                &self.options,
                files::read,
                sink,
            )
        })?
        .into_iter();
        let rows = range.filter_map(|at| {
            let own = outcomes.by_ref().take(width::to_usize(seeds));
            let own: Vec<Option<Outcome>> = own.collect();
            let own: Option<Vec<Outcome>> = own.into_iter().collect();
            Some(self.row(at, own?))
        });
        rows.collect()
    }

    /// The row of a configuration with the outcomes of its seeds, at least one.
    fn row(&self, at: usize, outcomes: Vec<Outcome>) -> anyhow::Result<Row> {
        let (cluster, objectives) = (&self.clusters[at], &self.objectives);
        let gpus = cluster.gpus();
        let mean =
            |of: &dyn Fn(&Outcome) -> f64| interval(&outcomes.iter().map(of).collect::<Vec<f64>>());
        let goodput = mean(&|o| o.totals.goodput_per_s());
        let duration_s = mean(&|o| o.totals.duration_s()).mean;
        let output_tokens_per_s = mean(&|o| o.totals.throughput().output_tokens_per_s).mean;
        let met: Vec<(u64, u64)> = outcomes.iter().map(|o| attained(o, objectives)).collect();
        let attained = objectives.are_stated().then(|| {
            let (all, met) = met.iter().fold((0, 0), |sum, m| (sum.0 + m.0, sum.1 + m.1));
            met as f64 / all.max(1) as f64
        });
        let sure: Option<Share> = attained.and_then(|_| share(&met));
        let gpu_hours = mean(&|o| o.gpu_hours(cluster)).mean;
        let scales = outcomes.iter().any(|o| o.scaling.is_some());
        let several = outcomes.len() > 1;
        let mut outcomes = outcomes.into_iter();
        let mut outcome = outcomes.next().context("every configuration ran")?;
        let closed = matches!(self.workloads[at].arrival, Arrival::Closed { .. });
        let overloaded = outcome.totals.overload().filter(|_| !closed);
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
            at,
            expected: outcome.expected_errors(cluster, files::read)?,
            requests: outcome.totals.requests,
            tokens: outcome.totals.tokens(),
            latency: outcome.totals.latencies(),
            preemptions: outcome.engine.preemptions,
            passes: outcome.passes,
            extrapolated: outcome.extrapolated,
            digest: format!("{:016x}", outcome.digest),
            overloaded,
            cut: outcome.cut,
            gpus,
            gpu_hours,
            goodput_per_s: goodput.mean,
            goodput_half: several.then_some(goodput).and_then(half),
            attained,
            attained_range: sure.map(|sure| [sure.low, sure.high]),
            cost_per_hour: if self.prices.are_stated() {
                // Workers that have stopped cost nothing.
                let all = gpus as f64 * duration_s / 3600.0;
                let share = if scales && all > 0.0 {
                    gpu_hours / all
                } else {
                    1.0
                };
                Some(per_hour(cluster, &self.prices)? * share)
            } else {
                None
            },
            output_tokens_per_s,
            duration_s,
        })
    }

    /// Compares the rows of all configurations, in any order.
    ///
    /// # Errors
    /// If one is missing, or there twice.
    pub fn finish(self: Arc<Self>, rows: Vec<Row>) -> anyhow::Result<Answer> {
        let answer = self.so_far(rows);
        let (rows, len) = (&answer.rows, answer.sweep.len());
        ensure!(
            rows.len() == len && rows.iter().zip(0..).all(|(row, at)| row.at == at),
            "{} for {}: some are missing, or there twice",
            counted(rows.len() as u64, "row"),
            counted(len as u64, "configuration")
        );
        Ok(answer)
    }

    /// Compares the rows of the configurations that have run.
    pub fn so_far(self: Arc<Self>, mut rows: Vec<Row>) -> Answer {
        rows.sort_by_key(|row| row.at);
        let points: Vec<Point> = rows
            .iter()
            .map(|row| Point {
                gain: row.goodput_per_s,
                cost: row.gpu_hours,
            })
            .collect();
        let tolerance = self.question.tolerance / 100.0;
        let on = front(&points, tolerance);
        let as_good = as_good(&points, &on, tolerance);
        let of_configurations = |each: &[bool]| {
            let mut of = vec![false; self.len()];
            for (row, is) in rows.iter().zip(each) {
                of[row.at] = *is;
            }
            of
        };
        Answer {
            front: of_configurations(&on),
            as_good: of_configurations(&as_good),
            sweep: self,
            rows,
        }
    }
}

/// The result of a sweep.
#[derive(Debug)]
pub struct Answer {
    sweep: Arc<Sweep>,
    /// Of the configurations that have run, in their order.
    rows: Vec<Row>,
    /// On the Pareto front: no other configuration gives more for less, beyond the tolerance. Shape
    /// `[configurations]`.
    front: Vec<bool>,
    /// Off the front, but equal to one on it within the tolerance. Shape `[configurations]`.
    as_good: Vec<bool>,
}

/// Runs each of `runs` on one of `jobs` threads; outcomes in the same order, `None` for those that an interruption
/// ended or prevented. `requests`: the number of a run's requests, if its workload states it.
fn run_all<R: Sync, E: std::error::Error + Send + Sync + 'static>(
    runs: &[R],
    jobs: usize,
    control: &Control,
    requests: impl Fn(&R) -> Option<u64> + Sync,
    simulate: impl Fn(&R, &mut Watched<'_>) -> Result<Outcome, E> + Sync,
) -> anyhow::Result<Vec<Option<Outcome>>> {
    let next = AtomicUsize::new(0);
    let meter = Meter::new(control, runs.len());
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
                    if control.is_interrupted() {
                        return;
                    }
                    let mut sink = meter.run(at, requests(run));
                    let outcome = simulate(run, &mut sink);
                    let was_cut = outcome.as_ref().is_ok_and(|of| of.cut.is_some());
                    if control.is_interrupted() && was_cut {
                        return;
                    }
                    *outcomes[at].lock().expect("a run is stored whole") = Some(outcome);
                    meter.ended(at);
                }
            });
        }
    });
    outcomes
        .into_iter()
        .map(|outcome| {
            let outcome = outcome.into_inner().expect("a run is stored whole");
            Ok(outcome.transpose()?)
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
enum File {
    Cluster,
    Workload,
    /// A factor on the load.
    Load,
}

fn file_of(key: &str) -> File {
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
        File::Load
    } else if WORKLOAD.contains(&first) && !CLUSTER.contains(&first) {
        File::Workload
    } else {
        File::Cluster // whose reader names the mistake in an unknown key
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

/// Requests of the class with the lowest share of requests that met their objectives, or of all if that is
/// lower, and those that met them. Requests that never ended, or were never sent because an earlier turn
/// failed, have missed them.
fn attained(outcome: &Outcome, objectives: &Objectives) -> (u64, u64) {
    let requests = &outcome.totals.requests;
    let lost = requests.abandoned + requests.unfinished;
    let met = outcome.totals.goodput(objectives).map_or(0, |all| all.met);
    let share = |&(all, met): &(u64, u64)| met as f64 / all.max(1) as f64;
    outcome
        .totals
        .class_reports(objectives)
        .iter()
        .filter(|class| class.sent > 0)
        .filter_map(|class| Some((class.sent, class.goodput.as_ref()?.met)))
        .fold((requests.sent + lost, met), |lowest, class| {
            if share(&class) < share(&lowest) {
                class
            } else {
                lowest
            }
        })
}

/// Columns of a row's record, after the varied keys.
const FIGURES: [(&str, ColumnType); 40] = [
    ("front", ColumnType::U64),
    ("goodput_per_s", ColumnType::F64),
    ("goodput_half_per_s", ColumnType::F64),
    ("attained", ColumnType::F64),
    ("attained_half", ColumnType::F64),
    ("attained_low", ColumnType::F64),
    ("attained_high", ColumnType::F64),
    ("cost_per_hour", ColumnType::F64),
    ("cost_per_million_output_tokens", ColumnType::F64),
    ("gpus", ColumnType::U64),
    ("gpu_hours", ColumnType::F64),
    ("duration_s", ColumnType::F64),
    ("sent", ColumnType::U64),
    ("succeeded", ColumnType::U64),
    ("failed", ColumnType::U64),
    ("abandoned", ColumnType::U64),
    ("input_tokens", ColumnType::U64),
    ("output_tokens", ColumnType::U64),
    ("cached_tokens", ColumnType::U64),
    ("preemptions", ColumnType::F64),
    ("ttft_ms_mean", ColumnType::F64),
    ("ttft_ms_p50", ColumnType::F64),
    ("ttft_ms_p99", ColumnType::F64),
    ("itl_ms_mean", ColumnType::F64),
    ("itl_ms_p50", ColumnType::F64),
    ("itl_ms_p99", ColumnType::F64),
    ("e2e_ms_p50", ColumnType::F64),
    ("e2e_ms_p99", ColumnType::F64),
    ("passes", ColumnType::U64),
    ("extrapolated_passes", ColumnType::U64),
    ("expected_region", ColumnType::Text),
    ("expected_tpot_low", ColumnType::F64),
    ("expected_tpot_high", ColumnType::F64),
    ("expected_ttft_low", ColumnType::F64),
    ("expected_ttft_high", ColumnType::F64),
    ("overloaded_since_s", ColumnType::F64),
    ("offered_per_s", ColumnType::F64),
    ("served_per_s", ColumnType::F64),
    ("digest", ColumnType::Text),
    ("cut", ColumnType::Text),
];

impl Row {
    /// Cost of a million tokens of answers.
    pub fn per_million(&self) -> Option<f64> {
        let rate = self.output_tokens_per_s;
        let cost = self.cost_per_hour?;
        (rate > 0.0).then(|| cost / (rate * 3600.0) * 1e6)
    }
}

impl Answer {
    /// The rows of the configurations that have run, in their order.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Names of the table's columns, after the varied keys.
    fn figures(&self) -> Vec<&'static str> {
        let (question, first) = (&self.sweep.question, self.rows.first());
        let mut names = vec!["goodput/s"];
        if question.seeds > 1 {
            names.push("±");
        }
        if first.is_some_and(|row| row.attained.is_some()) {
            names.push("attained %");
            if question.seeds > 1 {
                names.push("95 % interval");
            }
            if question.attain.is_some() {
                names.push("attains");
            }
        }
        names.push("GPU-hours");
        if first.is_some_and(|row| row.cost_per_hour.is_some()) {
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

    /// Whether the share that is asked for is reached, on average over seeds.
    fn attains(&self, row: &Row) -> Option<bool> {
        Some(row.attained? >= self.sweep.question.attain? - 1e-12)
    }

    /// Cells of the table, varied values first.
    fn cells(&self, row: &Row) -> Vec<String> {
        let latency = &row.latency;
        let tokens = &row.tokens;
        let hits = 100.0 * tokens.cached.unwrap_or(0) as f64 / tokens.input.max(1) as f64;
        let several = self.sweep.question.seeds > 1;
        let half = |half: Option<f64>| half.map_or_else(|| "-".to_owned(), number);
        let mut cells = self.sweep.values[row.at].clone();
        cells.push(number(row.goodput_per_s));
        if several {
            cells.push(half(row.goodput_half));
        }
        if let Some(attained) = row.attained {
            cells.push(format!("{:.2}", 100.0 * attained));
            if several {
                cells.push(row.attained_range.map_or_else(
                    || "-".to_owned(),
                    |[low, high]| format!("{:.2}–{:.2}", 100.0 * low, 100.0 * high),
                ));
            }
            if let Some(attains) = self.attains(row) {
                cells.push(if attains { "yes" } else { "no" }.to_owned());
            }
        }
        cells.push(number(row.gpu_hours));
        if let Some(cost) = row.cost_per_hour {
            cells.push(format!("{cost:.2}"));
            cells.push(row.per_million().map_or_else(|| "-".to_owned(), number));
        }
        cells.extend([
            match (self.front[row.at], self.as_good[row.at]) {
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
            grouped(width::round_u64(row.preemptions.unwrap_or(0.0))),
            (row.requests.failed + row.requests.abandoned + row.requests.unfinished).to_string(),
        ]);
        cells
    }

    /// Notes about the figures.
    pub fn notes(&self) -> Vec<String> {
        let rows = &self.rows;
        let cut = rows.iter().filter(|row| row.cut.is_some()).count();
        let extrapolated = rows.iter().filter(|row| row.extrapolated > 0);
        let mut notes = Vec::new();
        let overloaded = rows
            .iter()
            .filter_map(|row| Some((row.overloaded?, self.sweep.values[row.at].join(", "))));
        let worst = overloaded.clone().reduce(|a, b| {
            let factor = |of: &Overload| of.offered_per_s / of.served_per_s;
            if factor(&b.0) > factor(&a.0) { b } else { a }
        });
        if let Some((worst, values)) = worst {
            notes.push(format!(
                "{} overloaded: latencies are those of a queue that grows until requests stop; the most ({values}): {}",
                counted(overloaded.count() as u64, "run"),
                worst.line()
            ));
        }
        if cut > 0 {
            notes.push(format!(
                "{} cut short (reason: `cut` in --out); requests that ended before are counted",
                counted(cut as u64, "run")
            ));
        }
        if let Some(worst) = extrapolated.clone().max_by(|a, b| {
            let share = |row: &&Row| row.extrapolated as f64 / row.passes.max(1) as f64;
            share(a).total_cmp(&share(b))
        }) {
            notes.push(format!(
                "{} with passes outside the table of step times (`extrapolated_passes` in --out), the worst with {} \
                 of {}",
                counted(extrapolated.count() as u64, "run"),
                grouped(worst.extrapolated),
                grouped(worst.passes),
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
        notes
    }

    /// The page with plots. `command`: what made it.
    ///
    /// # Errors
    /// If the sources cannot be read again.
    pub fn page(&self, command: &str) -> anyhow::Result<String> {
        let Sweep {
            question,
            vary,
            values,
            clusters,
            ..
        } = &*self.sweep;
        let points: Vec<SweepPoint> = self
            .rows
            .iter()
            .map(|row| {
                let values = &values[row.at];
                let name: Vec<_> = vary
                    .iter()
                    .zip(values)
                    .map(|(vary, value)| format!("{}={value}", vary.key))
                    .collect();
                let latency = &row.latency;
                SweepPoint {
                    name: name.join(", "),
                    tag: values.join(", "),
                    goodput_per_s: row.goodput_per_s,
                    gpu_hours: row.gpu_hours,
                    front: self.front[row.at],
                    cells: self.cells(row),
                    p99_ms: [latency.ttft_ms, latency.itl_ms].map(|p| p.and_then(|p| p.at(P99))),
                }
            })
            .collect();
        let keys = vary.iter().map(|vary| vary.key.as_str());
        let header: Vec<&str> = keys.chain(self.figures()).collect();
        let varied: Vec<String> = vary
            .iter()
            .map(|vary| format!("{}={}", vary.key, vary.values.join(",")))
            .collect();
        let base = [
            ("base".into(), question.cluster.name()),
            ("varied".into(), varied.join("; ")),
        ];
        let page = SweepPage {
            subtitle: &format!(
                "{} · {} · seed {}",
                clusters[0].model_names(),
                self.sweep.name,
                self.sweep.seed
            ),
            base: &base,
            tolerance_is: &tolerance_is(question.tolerance),
            goodput_is: &goodput_is(&self.sweep.objectives),
            header: &header,
            keys: vary.len(),
            points: &points,
            warnings: self.notes(),
            texts: vec![
                ("Command".into(), command.to_owned()),
                (
                    "Cluster, every value (of the first configuration)".into(),
                    self.sweep.first_settings()?,
                ),
                (
                    "Workload".into(),
                    question.workload.text(question.slo.as_ref())?,
                ),
            ],
        };
        Ok(page.render())
    }

    /// The table; `front_only`: of the configurations on the Pareto front.
    pub fn text(&self, front_only: bool) -> String {
        let keys = self.sweep.vary.iter().map(|vary| vary.key.clone());
        let figures = self.figures().into_iter().map(str::to_owned);
        let mut table = Table::new(keys.chain(figures));
        for row in &self.rows {
            if self.front[row.at] || !front_only {
                table.row(self.cells(row));
            }
        }
        let mut text = table.render(false);
        let legend = format!(
            "goodput: requests per second {}; latencies in ms; *: on the Pareto front (no other gives more for fewer GPU-hours); \
             ~: equal to one on it within the tolerance; {}\n",
            goodput_is(&self.sweep.objectives),
            tolerance_is(self.sweep.question.tolerance)
        );
        text.push_str(&legend);
        if let Some(attain) = self.sweep.question.attain {
            text.push_str(&self.cheapest(attain));
        }
        let few = |row: &Row| {
            let percentiles = [row.latency.ttft_ms, row.latency.itl_ms];
            percentiles.into_iter().flatten().any(|p| p.leaves_out())
        };
        if self.rows.iter().any(few) {
            text.push_str(TOO_FEW);
            text.push('\n');
        }
        text
    }

    /// The cheapest configuration that attains, of each load: one that attains less load is no alternative.
    fn cheapest(&self, attain: f64) -> String {
        let named = |row: &Row, loads: bool| {
            let named = self.sweep.vary.iter().zip(&self.sweep.values[row.at]);
            let wanted = named.filter(|(vary, _)| (file_of(&vary.key) != File::Cluster) == loads);
            let each: Vec<String> = wanted
                .map(|(vary, value)| format!("{}={value}", vary.key))
                .collect();
            each.join(", ")
        };
        let cost = |row: &Row| row.cost_per_hour.unwrap_or(row.gpus as f64);
        let percent = number(100.0 * attain);
        let mut loads: Vec<String> = Vec::new();
        for row in &self.rows {
            let load = named(row, true);
            if !loads.contains(&load) {
                loads.push(load);
            }
        }
        let line = |load: &String| {
            let attaining = self
                .rows
                .iter()
                .filter(|row| named(row, true) == *load && self.attains(row) == Some(true));
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

    /// Writes one row per configuration: CSV, or Parquet by the file's name.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> anyhow::Result<()> {
        let columns: Vec<FileColumn> = self
            .sweep
            .vary
            .iter()
            .map(|vary| FileColumn::new(&vary.key, ColumnType::Text))
            .chain(FIGURES.map(|(name, kind)| FileColumn::new(name, kind)))
            .collect();
        let mut file = RecordWriter::create(path, &columns)?;
        for row in &self.rows {
            self.with_cells(row, |cells| file.write(cells))?;
        }
        Ok(file.finish()?)
    }

    /// The rows of [`save`](Self::save) as columns.
    pub fn columns(&self) -> Vec<Column> {
        let keys = self.sweep.vary.iter().map(|vary| Column::text(&vary.key));
        let figures = FIGURES.iter().map(|(name, kind)| match kind {
            ColumnType::U64 => Column::u64(name),
            ColumnType::F64 => Column::f64(name),
            ColumnType::Text => Column::text(name),
        });
        let mut columns: Vec<Column> = keys.chain(figures).collect();
        let kinds = std::iter::repeat_n(ColumnType::Text, self.sweep.vary.len())
            .chain(FIGURES.map(|(_, kind)| kind));
        let kinds: Vec<ColumnType> = kinds.collect();
        for row in &self.rows {
            self.with_cells(row, |cells| {
                for ((cell, column), kind) in cells.iter().zip(&mut columns).zip(&kinds) {
                    match (cell, kind) {
                        (Cell::U64(value), _) => column.push_u64(Some(*value)),
                        (Cell::F64(value), _) => column.push_f64(Some(*value)),
                        (Cell::Text(value), _) => column.push_text(Some(value)),
                        (Cell::Absent, ColumnType::U64) => column.push_u64(None),
                        (Cell::Absent, ColumnType::F64) => column.push_f64(None),
                        (Cell::Absent, ColumnType::Text) => column.push_text(None),
                    }
                }
            });
        }
        columns
    }

    /// Passes the cells of a row's record, varied values first.
    fn with_cells<T>(&self, row: &Row, write: impl FnOnce(&[Cell<'_>]) -> T) -> T {
        let (requests, tokens, latency) = (row.requests, row.tokens, row.latency);
        let regions: Vec<&str> = row.expected.iter().map(|e| &*e.region).collect();
        let region = (!regions.is_empty()).then(|| regions.join(" / "));
        let tpot = widest(&row.expected, |e| e.tpot);
        let ttft = widest(&row.expected, |e| e.ttft);
        let of =
            |p: Option<Percentiles>, get: fn(&Percentiles) -> f64| Cell::from(p.as_ref().map(get));
        let values = &self.sweep.values[row.at];
        let mut cells: Vec<Cell<'_>> = values.iter().map(|v| Cell::Text(v)).collect();
        cells.extend([
            Cell::U64(self.front[row.at].into()),
            Cell::F64(row.goodput_per_s),
            Cell::from(row.goodput_half),
            Cell::from(row.attained),
            Cell::from(row.attained_range.map(|[low, high]| (high - low) / 2.0)),
            Cell::from(row.attained_range.map(|[low, _]| low)),
            Cell::from(row.attained_range.map(|[_, high]| high)),
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
            Cell::from(row.preemptions),
            of(latency.ttft_ms, |p| p.mean),
            of(latency.ttft_ms, |p| p.p50),
            of(latency.ttft_ms, |p| p.p99),
            of(latency.itl_ms, |p| p.mean),
            of(latency.itl_ms, |p| p.p50),
            of(latency.itl_ms, |p| p.p99),
            of(latency.e2e_ms, |p| p.p50),
            of(latency.e2e_ms, |p| p.p99),
            Cell::U64(row.passes),
            Cell::U64(row.extrapolated),
            region.as_deref().map_or(Cell::Absent, Cell::Text),
            tpot.map_or(Cell::Absent, |[low, _]| Cell::F64(low)),
            tpot.map_or(Cell::Absent, |[_, high]| Cell::F64(high)),
            ttft.map_or(Cell::Absent, |[low, _]| Cell::F64(low)),
            ttft.map_or(Cell::Absent, |[_, high]| Cell::F64(high)),
            Cell::from(row.overloaded.map(|of| of.since_s)),
            Cell::from(row.overloaded.map(|of| of.offered_per_s)),
            Cell::from(row.overloaded.map(|of| of.served_per_s)),
            Cell::Text(&row.digest),
            row.cut.as_deref().map_or(Cell::Absent, Cell::Text),
        ]);
        write(&cells)
    }
}

impl Sweep {
    /// Descriptions of the models of its clusters.
    pub fn model_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for line in self.clusters.iter().flat_map(Cluster::model_lines) {
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines
    }

    /// Every value of the first configuration's cluster, as TOML.
    ///
    /// # Errors
    /// If the source cannot be read again.
    pub fn first_settings(&self) -> anyhow::Result<String> {
        // The first value of each key represents it among the common values.
        let of_cluster = self
            .vary
            .iter()
            .filter(|vary| file_of(&vary.key) == File::Cluster);
        let firsts: Vec<String> = of_cluster
            .filter_map(|vary| Some(format!("{}={}", vary.key, vary.values.first()?)))
            .collect();
        Ok(self.question.cluster.resolve(&firsts)?.1.to_toml())
    }
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
