//! The cheapest cluster that attains objectives under a workload.
//!
//! A [`Plan`] is a checked question. [`Plan::answer`] searches; its trials run on threads, or through
//! [`Elsewhere`] in other processes, each of which has the same plan and runs [`Plan::measure`].

mod at_load;
mod base;
mod driver;
mod output;
mod scaled;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};
use slipstream_base::Slo;
use slipstream_config::cluster::{Dtype, POLICIES};
use slipstream_config::doc::{Diagnostics, suggestion};
use slipstream_config::preset::{self, ModelShape};
use slipstream_config::prices::Prices;
use slipstream_config::workload_file::Workload;
use slipstream_plan::bound::Ideal;
use slipstream_plan::confidence::{Share, StepError};
use slipstream_plan::search::Nearest;
use slipstream_plan::space::{self, Setting, Shape};
use slipstream_plan::trial::Answer as TrialAnswer;
use slipstream_plan::{Choice, Demand};
use slipstream_report::Objectives;
use slipstream_report::table::number;

use self::at_load::{AtLoad, Factors, Ready};
use self::base::Base;
use self::scaled::Scaled;
use crate::control::Control;
use crate::source::{ClusterSource, PriceSource, WorkloadSource};
use crate::{cores, memory};

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
    /// GPUs to choose from.
    pub gpus: Vec<String>,
    /// GPUs of a rank.
    pub tensor_parallel: Vec<u32>,
    /// Stages of a rank, each of as many GPUs; empty: the cluster file's.
    pub pipeline_parallel: Vec<u32>,
    /// Ranks of a worker; empty: the cluster file's.
    pub data_parallel: Vec<u32>,
    /// Whether each GPU of a worker has whole experts; empty: the cluster file's.
    pub expert_parallel: Vec<bool>,
    /// Host memory of a rank for KV blocks, GiB; empty: the cluster file's.
    pub host_memory: Vec<f64>,
    /// Tokens of a draft, 0 for none; empty: the cluster file's.
    pub speculation: Vec<u32>,
    /// Formats of the weights; empty: the checkpoint's, and FP8 if that is BF16.
    pub precision: Vec<String>,
    /// Formats of the KV cache.
    pub kv_cache_dtype: Vec<String>,
    /// `aggregated`, `disaggregated`.
    pub serving: Vec<String>,
    /// Values of `engine.max_num_seqs`; the first one is the base.
    pub max_num_seqs: Vec<u32>,
    /// Values of `engine.max_num_batched_tokens`; the first one is the base.
    pub max_num_batched_tokens: Vec<u32>,
    /// Values of `router.policy`; the first one is the base.
    pub policies: Vec<String>,
    /// Values of `router.prefill_weight` for policy `kv`; empty: the cluster file's.
    pub prefill_weights: Vec<f64>,
    /// Values of `router.temperature` for policy `kv`; empty: the cluster file's.
    pub temperatures: Vec<f64>,
    /// Fewest workers with the cluster file's `[autoscale]`, each tried for the answer and the rows next to it; empty: not
    /// tried.
    pub autoscale_min: Vec<u32>,
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
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        Question {
            workload: WorkloadSource::default(),
            slo: None,
            attain: 0.99,
            load: vec![1.0],
            headroom: 0.0,
            model: None,
            cluster: ClusterSource::default(),
            gpus: words(&["h100-sxm"]),
            tensor_parallel: vec![1, 2, 4, 8],
            pipeline_parallel: Vec::new(),
            data_parallel: Vec::new(),
            expert_parallel: Vec::new(),
            host_memory: Vec::new(),
            speculation: Vec::new(),
            precision: Vec::new(),
            kv_cache_dtype: words(&["auto"]),
            serving: words(&["aggregated", "disaggregated"]),
            max_num_seqs: vec![256, 64, 1024],
            max_num_batched_tokens: vec![8192, 2048, 16384],
            policies: words(&["kv", "power_of_two", "round_robin"]),
            prefill_weights: Vec::new(),
            temperatures: Vec::new(),
            autoscale_min: Vec::new(),
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
    gpus: Vec<String>,
    tensor_parallel: Vec<u32>,
    pipeline_parallel: Vec<Option<u32>>,
    data_parallel: Vec<Option<u32>>,
    expert_parallel: Vec<Option<bool>>,
    host_memory: Vec<Option<f64>>,
    speculation: Vec<Option<u32>>,
    precision: Vec<Dtype>,
    kv_cache_dtype: Vec<KvCache>,
    /// Whether prefill and decode have workers of their own.
    serving: Vec<bool>,
    max_num_seqs: Vec<u32>,
    max_num_batched_tokens: Vec<u32>,
    policies: Vec<String>,
    prefill_weights: Vec<f64>,
    temperatures: Vec<f64>,
    autoscale_min: Vec<u32>,
    max_gpus: u32,
    seeds: u64,
    quick: bool,
}

/// Values to search, or `None` to keep the cluster file's.
fn or_as_given<T: Copy + PartialEq>(values: &[T]) -> Vec<Option<T>> {
    if values.is_empty() {
        vec![None]
    } else {
        unique(values).into_iter().map(Some).collect()
    }
}

/// The values without repetitions, in their order.
fn unique<T: Clone + PartialEq>(values: &[T]) -> Vec<T> {
    let mut unique: Vec<T> = Vec::with_capacity(values.len());
    for value in values {
        if !unique.contains(value) {
            unique.push(value.clone());
        }
    }
    unique
}

/// Checks that a step has room for a token of every sequence, as vLLM requires, in some combination of the values.
fn check_tokens_per_step(question: &Question) -> anyhow::Result<()> {
    let tokens = question.max_num_batched_tokens.iter().max();
    let seqs = question.max_num_seqs.iter().min();
    if let (Some(tokens), Some(seqs)) = (tokens, seqs) {
        ensure!(
            tokens >= seqs,
            "--max-num-batched-tokens has at most {tokens}, but needs at least {seqs}, the least of --max-num-seqs: each step has a \
             token of every sequence; raise it, or lower --max-num-seqs"
        );
    }
    Ok(())
}

impl Args {
    fn of(question: &Question) -> anyhow::Result<Args> {
        let words = |flag: &str, words: &[String]| {
            ensure!(!words.is_empty(), "--{flag} has no value");
            Ok(unique(words))
        };
        let numbers = |flag: &str, values: &[u32], max: u32| {
            ensure!(!values.is_empty(), "--{flag} has no value");
            for value in values {
                ensure!(
                    (1..=max).contains(value),
                    "--{flag} has {value}, but must be 1 to {max}"
                );
            }
            Ok(unique(values))
        };
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
        let parsed = |flag: &'static str| move |error: String| anyhow::anyhow!("--{flag}: {error}");
        let (policies, serving) = (&question.policies, &question.serving);
        for name in policies {
            policy(name).map_err(parsed("policies"))?;
        }
        let [max_gpus] = numbers("max-gpus", &[question.max_gpus], 65_536)?[..] else {
            unreachable!("one number");
        };
        let factors = |flag: &str, values: &[f64]| {
            for value in values {
                ensure!(
                    (0.0..=1e6).contains(value),
                    "--{flag} has {value}, but must be 0 to 1,000,000"
                );
            }
            ensure!(
                values.is_empty() || policies.iter().any(|policy| policy == "kv"),
                "--{flag} is for the policy kv, which --policies does not have; add it, or leave --{flag} out"
            );
            Ok(unique(values))
        };
        if !question.autoscale_min.is_empty() {
            numbers("autoscale-min", &question.autoscale_min, 65_535)?;
        }
        if !question.pipeline_parallel.is_empty() {
            numbers("pipeline-parallel", &question.pipeline_parallel, 1024)?;
        }
        if !question.data_parallel.is_empty() {
            numbers("data-parallel", &question.data_parallel, 1024)?;
        }
        for gib in &question.host_memory {
            ensure!(
                (0.0..=1e6).contains(gib),
                "--host-memory has {gib}, but must be 0 to 1,000,000 GiB"
            );
        }
        for tokens in &question.speculation {
            ensure!(
                *tokens <= 32,
                "--speculation has {tokens}, but drafts have 0 to 32 tokens"
            );
        }
        ensure!(
            (1..=100).contains(&question.seeds),
            "--seeds is {}, but must be 1 to 100",
            question.seeds
        );
        let max_num_seqs = numbers("max-num-seqs", &question.max_num_seqs, 65_536)?;
        let max_num_batched_tokens = numbers(
            "max-num-batched-tokens",
            &question.max_num_batched_tokens,
            1 << 24,
        )?;
        check_tokens_per_step(question)?;
        Ok(Args {
            attain: question.attain,
            load: question.load.clone(),
            headroom: question.headroom,
            gpus: words("gpus", &question.gpus)?,
            tensor_parallel: numbers("tensor-parallel", &question.tensor_parallel, 1024)?,
            pipeline_parallel: or_as_given(&question.pipeline_parallel),
            data_parallel: or_as_given(&question.data_parallel),
            expert_parallel: or_as_given(&question.expert_parallel),
            host_memory: or_as_given(&question.host_memory),
            speculation: or_as_given(&question.speculation),
            precision: unique(&question.precision)
                .iter()
                .map(|name| precision(name).map_err(parsed("precision")))
                .collect::<anyhow::Result<_>>()?,
            kv_cache_dtype: words("kv-cache-dtype", &question.kv_cache_dtype)?
                .iter()
                .map(|name| kv_cache_dtype(name).map_err(parsed("kv-cache-dtype")))
                .collect::<anyhow::Result<_>>()?,
            serving: words("serving", serving)?
                .iter()
                .map(|name| apart(name).map_err(parsed("serving")))
                .collect::<anyhow::Result<_>>()?,
            max_num_seqs,
            max_num_batched_tokens,
            policies: words("policies", policies)?,
            prefill_weights: factors("prefill-weights", &question.prefill_weights)?,
            temperatures: factors("temperatures", &question.temperatures)?,
            autoscale_min: unique(&question.autoscale_min),
            max_gpus,
            seeds: question.seeds,
            quick: question.quick,
        })
    }

    /// Keys of the cluster file that this search sets, in addition to those that every search does.
    fn own_keys(&self) -> Vec<(&'static str, &'static str)> {
        let mut keys = Vec::new();
        let mut add = |searched: bool, key, flag| {
            if searched {
                keys.push((key, flag));
            }
        };
        add(
            self.pipeline_parallel != [None],
            "engine.pipeline_parallel_size",
            "--pipeline-parallel",
        );
        add(
            self.data_parallel != [None],
            "engine.data_parallel_size",
            "--data-parallel",
        );
        add(
            self.expert_parallel != [None],
            "engine.enable_expert_parallel",
            "--expert-parallel",
        );
        add(
            self.host_memory != [None],
            base::HOST_MEMORY,
            "--host-memory",
        );
        add(
            self.speculation != [None],
            base::DRAFT_TOKENS,
            "--speculation",
        );
        add(
            !self.prefill_weights.is_empty(),
            "router.prefill_weight",
            "--prefill-weights",
        );
        add(
            !self.autoscale_min.is_empty(),
            "autoscale.workers_min",
            "--autoscale-min",
        );
        add(
            !self.autoscale_min.is_empty(),
            "autoscale.workers_max",
            "--max-gpus",
        );
        add(
            !self.temperatures.is_empty(),
            "router.temperature",
            "--temperatures",
        );
        keys
    }
}

/// A format of the KV cache; `None`: the checkpoint's.
pub type KvCache = Option<Dtype>;

/// The format of weights that a flag names.
///
/// # Errors
/// A message with the values.
pub fn precision(text: &str) -> Result<Dtype, String> {
    let names = || Dtype::ALL.map(Dtype::name).join(", ");
    Dtype::ALL
        .into_iter()
        .find(|dtype| dtype.name() == text)
        .ok_or_else(|| format!("`{text}` is not a format of weights; one of {}", names()))
}

/// The format of the KV cache that a flag names.
///
/// # Errors
/// A message with the values.
pub fn kv_cache_dtype(text: &str) -> Result<KvCache, String> {
    match text {
        "auto" => Ok(None),
        "bf16" => Ok(Some(Dtype::Bf16)),
        "fp8" => Ok(Some(Dtype::Fp8)),
        _ => Err(format!(
            "`{text}` is not a format of the KV cache; one of auto, bf16, fp8"
        )),
    }
}

/// Whether prefill and decode have workers of their own, by the name of a kind of serving.
///
/// # Errors
/// A message with the values.
pub fn apart(text: &str) -> Result<bool, String> {
    match text {
        "aggregated" => Ok(false),
        "disaggregated" => Ok(true),
        _ => Err(format!(
            "`{text}` is not a kind of serving; one of aggregated, disaggregated"
        )),
    }
}

/// The routing policy that a flag names.
///
/// # Errors
/// A message with the values.
pub fn policy(text: &str) -> Result<String, String> {
    let mut names = POLICIES
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| *name != "direct");
    if names.clone().any(|name| name == text) {
        Ok(text.to_owned())
    } else {
        let all: Vec<&str> = names.by_ref().collect();
        Err(format!(
            "`{text}` is not a policy; one of {}",
            all.join(", ")
        ))
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
    nearest: Option<(Nearest, Row)>,
    /// Shapes that the bounds exclude, with the most that they can reach.
    ideal: Vec<(String, Ideal)>,
    requests: u64,
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
        let (workload, name) = self.workload.workload(&[])?;
        let args = Args::of(self)?;
        let objectives = Objectives::of(&workload, self.slo.clone());
        ensure!(
            objectives.are_stated(),
            "no objective to attain; state one with --slo, such as --slo ttft=1s,itl=50ms, or `slo` of the workload's classes"
        );
        let base = Base::read(
            &self.cluster,
            self.model.as_deref(),
            &args.own_keys(),
            !args.autoscale_min.is_empty(),
        )?;
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
            searched: searched(&args, &shared.model.shape),
            assumed: base.assumed(&shared),
            traffic: Traffic::of(&demand),
            seed: workload.seed,
        };
        let shapes = shapes(&args, &base, &shared.model.shape, &mut asked.excluded)?;
        if shapes.is_empty() {
            bail!(
                "{} cannot run on any of the GPUs and sizes searched:\n{}",
                asked.model,
                output::excluded(&asked.excluded)
            );
        }
        if !args.autoscale_min.is_empty() {
            scaled::check(&base, &shapes, &settings(&args, false).0[0])?;
        }
        Ok(Plan {
            notes: base.note_dropped().into_iter().collect(),
            workload_text: self.workload.text(self.slo.as_ref())?,
            args,
            base,
            shapes,
            workload,
            demand,
            asked,
            ready: Mutex::default(),
        })
    }
}

impl Plan {
    /// Notes about the question.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Description of the model as it was read.
    pub fn model_lines(&self) -> &[String] {
        self.base.model_lines()
    }

    /// Searches the answer of each load. Trials run `elsewhere`, or on `jobs` threads (`None`: one per core).
    ///
    /// # Errors
    /// If a trial cannot run, or the search is interrupted.
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
        for &load in &loads {
            let question = AtLoad {
                plan: &self,
                factors: Factors::of_load(load),
                jobs,
                control,
                elsewhere,
            };
            let ready = question.ready()?;
            parts.clone_from(&ready.parts_text);
            results.push(question.answer(&ready, &mut above)?);
        }
        results.reverse();
        self.asked.parts = parts;
        Ok(Answer {
            asked: self.asked,
            base: self.base,
            workload_text: self.workload_text,
            results,
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
            jobs: jobs.unwrap_or_else(|| cores() as usize).max(1),
            control,
            elsewhere: None,
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
}

impl Answer {
    /// Whether every load has an answer.
    pub fn found(&self) -> bool {
        self.results.iter().all(Result::is_ok)
    }

    /// Tables. `written`: where the answer was written, and the workload in the words of a command.
    pub fn text(&self, written: Option<(&Path, &str)>) -> String {
        output::text(&self.asked, &self.results, written)
    }

    /// One JSON object (`docs/plan.md`).
    ///
    /// # Errors
    /// If it cannot be formatted.
    pub fn json(&self) -> anyhow::Result<String> {
        Ok(output::json(&self.asked, &self.results)?)
    }

    /// A self-contained page. `command`: what made it.
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

/// Refuses GPUs that are neither presets nor `own`, those of the cluster file.
fn check_gpus(args: &Args, own: &[String]) -> anyhow::Result<()> {
    for gpu in &args.gpus {
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
    for gpu in &args.gpus {
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

/// Formats of the weights to search.
fn formats(args: &Args, model: &ModelShape) -> Vec<Dtype> {
    if !args.precision.is_empty() {
        return args.precision.clone();
    }
    // Engines quantize 16 bits to FP8 as they load them; other checkpoints keep their format.
    match model.dtype() {
        Dtype::Bf16 => vec![Dtype::Bf16, Dtype::Fp8],
        checkpoint => vec![checkpoint],
    }
}

/// The axes of the search with their values, in words.
fn searched(args: &Args, model: &ModelShape) -> String {
    let numbers = |values: &[u32]| {
        values
            .iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let weights = formats(args, model);
    let weights: Vec<&str> = weights.iter().map(|dtype| dtype.name()).collect();
    let caches = args.kv_cache_dtype.iter();
    let caches: Vec<&str> = caches
        .map(|dtype| dtype.map_or("auto", Dtype::name))
        .collect();
    let mut more = String::new();
    let mut add = |name: &str, values: Vec<String>| {
        if !values.is_empty() {
            more.extend([format!("; {name} {}", values.join(", "))]);
        }
    };
    let stages = args.pipeline_parallel.iter().flatten();
    add("pipeline parallel", stages.map(u32::to_string).collect());
    let ranks = args.data_parallel.iter().flatten();
    add("data parallel", ranks.map(u32::to_string).collect());
    let experts = args.expert_parallel.iter().flatten();
    let word = |on: &bool| if *on { "on" } else { "off" }.to_owned();
    add("expert parallel", experts.map(word).collect());
    let memory = args.host_memory.iter().flatten();
    let gib = |gib: &f64| format!("{gib} GiB");
    add("host memory", memory.map(gib).collect());
    let drafts = args.speculation.iter().flatten();
    add("tokens of a draft", drafts.map(u32::to_string).collect());
    let factors = |values: &[f64]| values.iter().map(|&value| number(value)).collect();
    add("prefill weights", factors(&args.prefill_weights));
    add("temperatures", factors(&args.temperatures));
    let least = args.autoscale_min.iter().map(u32::to_string).collect();
    add("fewest workers with [autoscale]", least);
    format!(
        "searched: GPUs {}; tensor parallel {}; weights {}; KV cache {}; max_num_seqs {}; max_num_batched_tokens {}; \
         policies {}{more}; up to {} GPUs",
        args.gpus.join(", "),
        numbers(&args.tensor_parallel),
        weights.join(", "),
        caches.join(", "),
        numbers(&args.max_num_seqs),
        numbers(&args.max_num_batched_tokens),
        args.policies.join(", "),
        args.max_gpus
    )
}

/// Every shape that a cluster file can express and memory can hold.
///
/// # Errors
/// If all shapes have the same mistake, which is then one of the cluster file.
fn shapes(
    args: &Args,
    base: &Base,
    model: &ModelShape,
    excluded: &mut Vec<Excluded>,
) -> anyhow::Result<Vec<Shape>> {
    let mut shapes = Vec::new();
    let mut common: Option<Diagnostics> = None;
    let formats = formats(args, model);
    for gpu in &args.gpus {
        for (&dtype, &kv_cache) in formats.iter().flat_map(|dtype| {
            args.kv_cache_dtype
                .iter()
                .map(move |kv_cache| (dtype, kv_cache))
        }) {
            let gpus = args.tensor_parallel.iter().flat_map(|&tensor| {
                let stages = args.pipeline_parallel.iter();
                stages.map(move |&stages| (tensor, stages))
            });
            let parallel = gpus.flat_map(|gpus| {
                args.data_parallel.iter().flat_map(move |&data| {
                    args.expert_parallel.iter().flat_map(move |&experts| {
                        args.host_memory.iter().flat_map(move |&gib| {
                            let drafts = args.speculation.iter();
                            drafts.map(move |&drafts| (gpus, data, experts, (gib, drafts)))
                        })
                    })
                })
            });
            for (gpus, data_parallel, expert_parallel, (host_gib, draft_tokens)) in parallel {
                let (tensor_parallel, pipeline_parallel) = gpus;
                let shape = Shape {
                    gpu: gpu.clone(),
                    tensor_parallel,
                    pipeline_parallel,
                    data_parallel,
                    expert_parallel,
                    dtype,
                    kv_cache,
                    host_gib,
                    draft_tokens,
                    prefill_share: None,
                };
                if !model.divides_into(tensor_parallel) {
                    excluded.push(Excluded {
                        name: shape.name(),
                        reason: format!("{} does not split into {tensor_parallel}", model.name),
                    });
                    continue;
                }
                let setting = &settings(args, false).0[0];
                let engine = match base.resolve(&shape, setting, 1) {
                    Ok((cluster, _)) => cluster.pools[0].engine.clone(),
                    Err(diagnostics) => {
                        let first = diagnostics.iter().next().map(|m| m.message.clone());
                        common.get_or_insert(diagnostics);
                        excluded.push(Excluded {
                            name: shape.name(),
                            reason: first.unwrap_or_default(),
                        });
                        continue;
                    }
                };
                // One GPU has whole experts in either case.
                let alone = engine.gpus() == 1;
                if alone && expert_parallel == Some(true) && args.expert_parallel.len() > 1 {
                    continue;
                }
                for serving in &args.serving {
                    shapes.push(Shape {
                        prefill_share: serving.then_some(0.5),
                        ..shape.clone()
                    });
                }
            }
        }
    }
    let of_file = |diagnostics: &Diagnostics| {
        let message = diagnostics.iter().next().map(|m| m.message.as_str());
        excluded.len() > 1
            && excluded
                .iter()
                .all(|shape| Some(shape.reason.as_str()) == message)
    };
    match common {
        Some(diagnostics) if shapes.is_empty() && of_file(&diagnostics) => Err(diagnostics.into()),
        _ => Ok(shapes),
    }
}

/// Settings of a shape, and how many of them are tried in all combinations.
fn settings(args: &Args, apart: bool) -> (Vec<Setting>, usize) {
    let axes = space::Axes {
        max_num_seqs: &args.max_num_seqs,
        max_num_batched_tokens: &args.max_num_batched_tokens,
        policies: &args.policies,
        prefill_weights: &args.prefill_weights,
        temperatures: &args.temperatures,
    };
    space::settings(&axes, apart)
}

impl Row {
    /// Its workers and shape, in words.
    fn name(&self) -> String {
        space::describe(&self.shape, &self.setting, self.sized.workers)
    }
}
