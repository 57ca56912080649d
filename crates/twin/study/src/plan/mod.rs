//! The cheapest cluster that attains objectives under a workload.
//!
//! A [`Plan`] is a checked question. [`Plan::answer`] searches; its trials run on threads, or through
//! [`Elsewhere`] in other processes, each of which has the same plan and runs [`Plan::measure`].

mod at_load;
mod base;
mod deployment;
mod driver;
mod output;
mod ready;
mod scaled;
mod shapes;
mod words;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};
use slipstream_base::Slo;
use slipstream_config::doc::suggestion;
use slipstream_config::preset;
use slipstream_config::prices::Prices;
use slipstream_config::workload_file::{Content, Workload};
use slipstream_plan::axes::repeated;
use slipstream_plan::bound::Ideal;
use slipstream_plan::confidence::{Share, StepError};
use slipstream_plan::search::NearMiss;
use slipstream_plan::space::{self, Setting, Shape};
use slipstream_plan::trial::Answer as TrialAnswer;
use slipstream_plan::{Choice, Demand};
use slipstream_report::Objectives;
use slipstream_report::table::number;

use self::at_load::AtLoad;
use self::base::Base;
use self::driver::Means;
use self::ready::{Factors, Ready};
use self::scaled::Scaled;
use crate::control::{Control, Interrupted};
use crate::source::{ClusterSource, PriceSource, WorkloadSource};
use crate::{cores, memory};

pub use slipstream_plan::Axes;
pub use slipstream_plan::axes::{AXES, Axis, Domain};

pub use self::driver::{Batch, Elsewhere, Result as TrialResult};

/// The question: which cluster is the cheapest that attains these objectives under this workload?
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Question {
    /// The workload.
    pub workload: WorkloadSource,
    /// Objectives of each request; `None`: those of the workload's classes.
    #[serde(with = "crate::source::as_text")]
    pub slo: Option<Slo>,
    /// Share of the requests of each class that must meet its objectives.
    pub attain: f64,
    /// Factors on the workload's load, each with an answer of its own.
    pub load: Vec<f64>,
    /// Load beyond the stated one at which the objectives must still be attained, as a share.
    pub headroom: f64,
    /// Model: a preset's name, or the path of a `config.json`. `None`: the cluster file's.
    pub model: Option<String>,
    /// Settings that are not searched.
    pub cluster: ClusterSource,
    /// Values to search on each axis.
    pub axes: Axes,
    /// Most GPUs of a cluster.
    pub max_gpus: u32,
    /// Prices per GPU-hour.
    pub prices: PriceSource,
    /// Seeds that the answer must attain on average; traces have one.
    pub seeds: u64,
    /// Only the answer: no runners-up, headroom and sensitivity.
    pub quick: bool,
}

impl Default for Question {
    fn default() -> Question {
        Question {
            workload: WorkloadSource::default(),
            slo: None,
            attain: 0.99,
            load: vec![1.0],
            headroom: 0.0,
            model: None,
            cluster: ClusterSource::default(),
            axes: Axes::default(),
            max_gpus: 1024,
            prices: PriceSource::default(),
            seeds: 3,
            quick: false,
        }
    }
}

/// The question, checked.
#[derive(Debug)]
struct Args {
    attain: f64,
    load: Vec<f64>,
    headroom: f64,
    axes: Axes,
    max_gpus: u32,
    seeds: u64,
    quick: bool,
}

impl Args {
    fn of(question: &Question) -> anyhow::Result<Args> {
        ensure!(
            question.attain > 0.0 && question.attain <= 1.0,
            "--attain is {} %, but must be above 0 and at most 100 %",
            number(question.attain * 100.0)
        );
        ensure!(
            (0.0..=10.0).contains(&question.headroom),
            "--headroom is {} %, but must be 0 to 1,000 %",
            number(question.headroom * 100.0)
        );
        ensure!(!question.load.is_empty(), "--load has no factor");
        for &load in &question.load {
            ensure!(
                load.is_finite() && (1e-3..=1e3).contains(&load),
                "--load has {load}, but factors must be 0.001 to 1,000"
            );
        }
        if let Some(load) = repeated(&question.load) {
            bail!("--load has {load} twice; keep one");
        }
        question.axes.check().map_err(anyhow::Error::msg)?;
        ensure!(
            (1..=65_536).contains(&question.max_gpus),
            "--max-gpus has {}, but must be 1 to 65536",
            question.max_gpus
        );
        ensure!(
            (1..=100).contains(&question.seeds),
            "--seeds is {}, but must be 1 to 100",
            question.seeds
        );
        Ok(Args {
            attain: question.attain,
            load: question.load.clone(),
            headroom: question.headroom,
            axes: question.axes.clone(),
            max_gpus: question.max_gpus,
            seeds: question.seeds,
            quick: question.quick,
        })
    }
}

/// A shape that is not searched, and why.
#[derive(Debug)]
struct Excluded {
    name: String,
    reason: String,
}

/// A configuration with its figures.
#[derive(Debug)]
struct Row {
    sized: Choice,
    shape: Shape,
    setting: Setting,
    gpus: u64,
    /// Share of requests within their objectives over all seeds, of the class with the lowest one.
    attained: f64,
    /// With the first seed.
    answer: TrialAnswer,
}

/// One condition changed, and the answer then.
#[derive(Debug)]
struct Sensitivity {
    knob: String,
    /// Factor on step times.
    slower: f64,
    /// `None`: nothing attains.
    cheapest: Option<Changed>,
    /// Size and cost of the answer's shape in its best setting; `None`: no size attains.
    own: Option<Choice>,
}

/// The answer under a changed condition.
#[derive(Debug)]
struct Changed {
    shape: Shape,
    setting: Setting,
    gpus: u64,
    sized: Choice,
    /// Whether its shape is the answer's.
    same: bool,
}

/// The answer to one load.
#[derive(Debug)]
struct Found {
    load: f64,
    best: Row,
    /// Attainment over seeds, or over parts of the run; `None` if there is one.
    sure: Option<Share>,
    /// Seeds of `sure`; 0: parts of the run.
    seeds: u64,
    /// Factor on the load up to which it attains, and from which it does not.
    headroom: Option<(f64, Option<f64>)>,
    step_error: Option<StepError>,
    others: Vec<Row>,
    /// The cheapest with `[autoscale]`; `None`: it was not searched.
    scaled: Option<Scaled>,
    /// Shapes that the bounds exclude, with the most that they can reach.
    ideal: Vec<(String, Ideal)>,
    sensitivity: Vec<Sensitivity>,
    /// Workers and share near the answer, and load and share.
    by_workers: Vec<(u32, f64)>,
    by_load: Vec<(f64, f64)>,
    /// Whether all that is cheaper was simulated.
    proven: bool,
    /// Requests simulated to find the answer, in all, and by a grid.
    search_requests: u64,
    all_requests: u64,
    grid_requests: u64,
    /// Requests of the workload at this load.
    requests: u64,
}

/// A load that nothing attains.
#[derive(Debug)]
struct NotFound {
    load: f64,
    nearest: Option<(NearMiss, Row)>,
    /// Shapes that the bounds exclude, with the most that they can reach.
    ideal: Vec<(String, Ideal)>,
    requests: u64,
    /// Whether every cluster was simulated that the bounds leave.
    proven: bool,
}

/// A search that was interrupted before it had an answer.
#[derive(Debug)]
struct StoppedSearch {
    load: f64,
    /// The cheapest configuration that had attained with one seed.
    so_far: Option<Row>,
}

impl std::fmt::Display for StoppedSearch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Interrupted.fmt(f)
    }
}

impl std::error::Error for StoppedSearch {}

/// What an interruption left out.
#[derive(Debug, Default)]
struct Interruption {
    /// A search without an answer.
    stopped: Option<StoppedSearch>,
    /// Loads whose searches had not begun.
    not_searched: Vec<f64>,
}

/// Inputs of the output in addition to answers.
#[derive(Debug)]
struct Asked {
    model: String,
    workload: String,
    objectives: Objectives,
    target: f64,
    headroom: f64,
    prices: Prices,
    /// Whether costs are prices; otherwise they are GPUs.
    priced: bool,
    excluded: Vec<Excluded>,
    /// How the workload was sliced.
    parts: String,
    /// The values of each axis, defaults included: the answer is the best of these.
    searched: String,
    /// Settings that the question left open.
    assumed: Vec<String>,
    /// The workload at load 1.
    traffic: Traffic,
    seed: u64,
}

/// A workload in a few numbers.
#[derive(Clone, Copy, Debug)]
struct Traffic {
    requests: usize,
    /// From the first due time to the last, s; `None` for a closed loop.
    duration_s: Option<f64>,
    /// Mean prompt and answer, tokens.
    lengths: [f64; 2],
    /// Share of the prompt tokens that repeat an earlier prompt.
    repeated: f64,
}

impl Traffic {
    fn of(demand: &Demand) -> Traffic {
        Traffic {
            requests: demand.needs.len(),
            duration_s: (!demand.closed).then(|| demand.duration_s()),
            lengths: demand.mean_lengths(),
            repeated: demand.repeated_share(),
        }
    }

    /// Requests per second, if they are spread over a time.
    fn rate_per_s(&self) -> Option<f64> {
        let duration_s = self.duration_s.filter(|duration_s| *duration_s > 0.0)?;
        Some(self.requests.saturating_sub(1) as f64 / duration_s)
    }
}

/// A question that can be answered.
#[derive(Debug)]
pub struct Plan {
    args: Args,
    base: Base,
    shapes: Vec<Shape>,
    workload: Workload,
    workload_text: String,
    /// At load 1.
    demand: Demand,
    asked: Asked,
    notes: Vec<String>,
    /// Whether the answer is for a page with charts.
    charts: bool,
    /// Inputs of the trials, by the bits of their factors.
    ready: Mutex<HashMap<[u64; 3], Arc<Ready>>>,
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

    /// Reads the files, and checks everything.
    ///
    /// # Errors
    /// If a file cannot be read, or a value is wrong.
    pub fn prepare(&self) -> anyhow::Result<Plan> {
        let (source, steady) = self.workload.clone().steady();
        let (workload, name) = source.workload(&[])?;
        let args = Args::of(self)?;
        let objectives = Objectives::of(&workload, self.slo.clone());
        ensure!(
            objectives.are_stated(),
            "no objective to attain; state one with --slo, such as --slo ttft=1s,itl=50ms, or `slo` of the workload's classes"
        );
        let base = Base::read(&self.cluster, self.model.as_deref(), &args.axes)?;
        let own = base.gpus();
        check_gpus(&args, &own)?;
        let prices = self.prices.read(&own)?;
        let priced = check_prices(&args, &prices)?;
        let shared = base.shared()?;
        memory::check_concurrency(&workload)?;
        let demand = Demand::of(&workload)?;
        let mut asked = Asked {
            model: shared.model.name.clone(),
            workload: name,
            objectives,
            target: args.attain,
            headroom: args.headroom,
            prices,
            priced,
            excluded: Vec::new(),
            parts: String::new(),
            searched: shapes::describe(&args, &shared.model.shape),
            assumed: base.assumed(&shared),
            traffic: Traffic::of(&demand),
            seed: workload.seed,
        };
        let shapes = shapes::all(&args, &base, &shared.model.shape, &mut asked.excluded)?;
        if shapes.is_empty() {
            bail!(
                "{} cannot run on any of the GPUs and sizes searched:\n{}",
                asked.model,
                output::excluded(&asked.excluded)
            );
        }
        if !args.axes.autoscale_min.is_empty() {
            scaled::check(&base, &shapes, &space::settings(&args.axes, false).0[0])?;
        }
        Ok(Plan {
            notes: base.note_dropped().into_iter().chain(steady).collect(),
            workload_text: source.text(self.slo.as_ref())?,
            args,
            base,
            shapes,
            workload,
            demand,
            asked,
            charts: false,
            ready: Mutex::default(),
        })
    }
}

impl Plan {
    /// Runs other sizes and loads of the answer to their ends, for the charts of [`Answer::page`].
    #[must_use]
    pub fn with_charts(mut self) -> Plan {
        self.charts = true;
        self
    }

    /// Seeds on which the answer attains together: generated workloads have chance in them.
    fn seeds(&self) -> u64 {
        match self.workload.content {
            Content::Generated(_) => self.args.seeds,
            Content::Trace(_) => 1,
        }
    }

    /// Notes about the question.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Description of the model as it was read.
    pub fn model_lines(&self) -> &[String] {
        self.base.model_lines()
    }

    /// Searches the answer of each load. Trials run `elsewhere`, or on `jobs` threads (`None`: one per core). If it is
    /// interrupted, the answers so far.
    ///
    /// # Errors
    /// If a trial cannot run.
    pub fn answer(
        mut self,
        jobs: Option<usize>,
        control: &Control,
        elsewhere: Option<&dyn Elsewhere>,
    ) -> anyhow::Result<Answer> {
        let jobs = jobs.unwrap_or_else(|| cores() as usize).max(1);
        // The highest load first: what attains it is tried at lower ones, so that these never cost more.
        let mut loads = self.args.load.clone();
        loads.sort_by(|a, b| b.total_cmp(a));
        loads.dedup();
        let mut results: Vec<Result<Found, NotFound>> = Vec::new();
        let mut above: Vec<(Shape, Setting, u32)> = Vec::new();
        let mut parts = String::new();
        let mut interruption = Interruption::default();
        for (at, &load) in loads.iter().enumerate() {
            if control.is_interrupted() {
                interruption.not_searched = loads[at..].to_vec();
                break;
            }
            let question = AtLoad {
                plan: &self,
                factors: Factors::of_load(load),
                means: Means {
                    jobs,
                    control,
                    elsewhere,
                },
            };
            let answer = question.ready().and_then(|ready| {
                parts.clone_from(&ready.parts_text);
                question.answer(&ready, &mut above)
            });
            match answer {
                Ok(result) => results.push(result),
                Err(error) => {
                    interruption.stopped = Some(stopped(error, load)?);
                }
            }
        }
        let interruption = control.is_interrupted().then_some(interruption);
        results.reverse();
        self.asked.parts = parts;
        Ok(Answer {
            asked: self.asked,
            base: self.base,
            workload_text: self.workload_text,
            results,
            interruption,
        })
    }

    /// Runs a batch of trials of this question's search.
    ///
    /// # Errors
    /// If one cannot run, or is interrupted.
    pub fn measure(
        &self,
        batch: &Batch,
        jobs: Option<usize>,
        control: &Control,
    ) -> anyhow::Result<Vec<TrialResult>> {
        let question = AtLoad {
            plan: self,
            factors: batch.factors(),
            means: Means {
                jobs: jobs.unwrap_or_else(|| cores() as usize).max(1),
                control,
                elsewhere: None,
            },
        };
        let ready = question.ready()?;
        question.driver(&ready).measure(batch)
    }
}

/// The answers of a plan.
#[derive(Debug)]
pub struct Answer {
    asked: Asked,
    base: Base,
    workload_text: String,
    /// One per load, in rising order.
    results: Vec<Result<Found, NotFound>>,
    /// `None`: all was searched.
    interruption: Option<Interruption>,
}

/// The search at `load` that an interruption ended; other errors stay errors.
fn stopped(error: anyhow::Error, load: f64) -> anyhow::Result<StoppedSearch> {
    match error.downcast::<StoppedSearch>() {
        Ok(stopped) => Ok(stopped),
        Err(error) if error.is::<Interrupted>() => Ok(StoppedSearch { load, so_far: None }),
        Err(error) => Err(error),
    }
}

impl Answer {
    /// Whether every load has an answer.
    pub fn found(&self) -> bool {
        let of_each = |of: &Interruption| of.stopped.is_none() && of.not_searched.is_empty();
        self.interruption.as_ref().is_none_or(of_each) && self.results.iter().all(Result::is_ok)
    }

    /// What an interruption left out, if there was one.
    pub fn interruption(&self) -> Option<String> {
        Some(output::interruption(
            &self.asked,
            self.interruption.as_ref()?,
        ))
    }

    /// Tables. `written`: where the answer was written, and the workload in the words of a command.
    pub fn text(&self, written: Option<(&Path, &str)>) -> String {
        let interruption = self.interruption().map(|said| format!("{said}\n"));
        interruption.unwrap_or_default() + &output::text(&self.asked, &self.results, written)
    }

    /// One JSON object (`docs/plan.md`).
    ///
    /// # Errors
    /// If it cannot be formatted.
    pub fn json(&self) -> anyhow::Result<String> {
        Ok(output::json(
            &self.asked,
            &self.results,
            self.interruption().as_deref(),
        )?)
    }

    /// A self-contained page, with charts over sizes and loads after [`Plan::with_charts`]. `command`: what made it.
    pub fn page(&self, command: &str) -> String {
        output::page(&self.asked, &self.results, &self.workload_text, command)
    }

    /// The first answer as a cluster file; `None` if there is none.
    ///
    /// # Errors
    /// If the cluster cannot be resolved again.
    pub fn cluster_file(&self, command: &str) -> anyhow::Result<Option<String>> {
        let Some(Ok(found)) = self.results.first() else {
            return Ok(None);
        };
        let best = &found.best;
        let (_, settings) = self
            .base
            .resolve(&best.shape, &best.setting, best.sized.workers)?;
        Ok(Some(format!(
            "# {}\n# {}\n# Made by: {command}\n\n{}",
            output::claim(found),
            output::cost(&self.asked, found),
            settings.given_to_toml()
        )))
    }
}

impl Answer {
    /// The first answer as a deployment of vLLM, for [`Templates`](crate::templates::Templates); `None` if there is none.
    ///
    /// # Errors
    /// If the cluster cannot be resolved again, or vLLM has no documented form of the answer.
    pub fn deployment(&self, command: &str) -> anyhow::Result<Option<serde_json::Value>> {
        let Some(Ok(found)) = self.results.first() else {
            return Ok(None);
        };
        deployment::context(&self.asked, found, &self.base, command).map(Some)
    }
}

/// Refuses GPUs that are neither presets nor `own`, those of the cluster file.
fn check_gpus(args: &Args, own: &[String]) -> anyhow::Result<()> {
    for gpu in &args.axes.gpus {
        if preset::gpu(gpu).is_none() && !own.contains(gpu) {
            let presets = preset::GPUS.iter().map(|gpu| &*gpu.name);
            let names: Vec<&str> = own.iter().map(String::as_str).chain(presets).collect();
            bail!(
                "--gpus has `{gpu}`, which is neither a preset nor a [gpu.{gpu}] of --cluster; {}",
                suggestion(gpu, &names)
            );
        }
    }
    Ok(())
}

/// Whether costs are prices: then every GPU needs one.
fn check_prices(args: &Args, prices: &Prices) -> anyhow::Result<bool> {
    if !prices.are_stated() {
        return Ok(false);
    }
    for gpu in &args.axes.gpus {
        if prices.per_gpu_hour(gpu).is_none() {
            let what = if prices.gpu_hour.contains_key(gpu) {
                format!("energy has a price, but {gpu} has no power; set `{gpu}` in [power]")
            } else {
                format!(
                    "{gpu} has no price, so it cannot be compared; give --price {gpu}=PRICE, or leave it out of --gpus"
                )
            };
            bail!("{what}");
        }
        ensure!(
            prices.per_gpu_hour(gpu) > Some(0.0),
            "the price of {gpu} is 0: any number of them would cost nothing"
        );
    }
    Ok(true)
}

impl Row {
    /// Its workers and shape, in words.
    fn name(&self) -> String {
        space::describe(&self.shape, &self.setting, self.sized.workers)
    }
}
