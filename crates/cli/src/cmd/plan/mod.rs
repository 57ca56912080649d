//! `slipstream plan`: finds the cheapest cluster that attains objectives under a workload.

mod base;
mod driver;
mod output;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use slipstream_base::Slo;
use slipstream_config::cluster::{Dtype, EngineConfig, file};
use slipstream_config::preset::{self, ModelShape};
use slipstream_config::prices::Prices;
use slipstream_config::workload_file::{Content, Workload};
use slipstream_engine::timing::{self, StepTime};
use slipstream_plan::bound::{self, Ideal};
use slipstream_plan::confidence::{self, Interval, StepError};
use slipstream_plan::search::{Candidate, Nearest, grid};
use slipstream_plan::space::{self, Setting, Shape};
use slipstream_plan::trial::Answer;
use slipstream_plan::{Choice, Conditions, Demand, Search, load};
use slipstream_report::Objectives;
use slipstream_report::table::{counted, number};

use self::base::Base;
use self::driver::{Driver, trial};
use crate::cmd::price_args::{PriceArgs, percent};
use crate::cmd::workload_args::WorkloadArgs;
use crate::out;

/// Smallest part of a workload that settings are compared on, requests.
const PART_MIN: f64 = 150.0;
/// Parts beside the whole.
const PARTS_MAX: usize = 2;
/// Largest part that answers are found on, requests; they are confirmed on the whole.
const MAIN_MAX: f64 = 50_000.0;
/// Rows of other shapes.
const ROWS_MAX: usize = 8;
/// Change of objectives and load for the sensitivity.
const CHANGE: f64 = 0.2;

/// Flags of `slipstream plan`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Workload file (.toml), or a trace; or describe a load with the flags below
    #[arg(value_name = "WORKLOAD|TRACE")]
    file: Option<PathBuf>,

    /// Objectives of each request, such as ttft=1s,itl=50ms [default: those of the workload's classes]
    #[arg(long, value_name = "SLO", help_heading = "Question")]
    slo: Option<Slo>,
    /// Share of the requests of each class that must meet its objectives
    #[arg(long, value_name = "PERCENT", default_value = "99%", value_parser = percent, help_heading = "Question")]
    attain: f64,
    /// Factors on the workload's load, each with an answer of its own: 0.5,1,2
    #[arg(
        long,
        value_name = "FACTORS",
        value_delimiter = ',',
        default_value = "1",
        help_heading = "Question"
    )]
    load: Vec<f64>,
    /// Load beyond the stated one at which the objectives must still be attained
    #[arg(long, value_name = "PERCENT", default_value = "0%", value_parser = percent, help_heading = "Question")]
    headroom: f64,
    /// Model: a preset's name, or a Hugging Face style config.json [default: the cluster file's]
    #[arg(long, value_name = "MODEL", help_heading = "Question")]
    model: Option<String>,
    /// Cluster file with the settings that are not searched, such as `[network]` and `[host]`
    #[arg(long, value_name = "CLUSTER.TOML", help_heading = "Question")]
    cluster: Option<PathBuf>,
    /// Override a key of the cluster file; may be repeated
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Question")]
    set: Vec<String>,

    /// GPUs to choose from: presets (slipstream presets), or [gpu.NAME] of the cluster file
    #[arg(
        long,
        value_name = "GPUS",
        value_delimiter = ',',
        default_value = "h100-sxm",
        help_heading = "Search"
    )]
    gpus: Vec<String>,
    /// GPUs of a worker
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "1,2,4,8", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Search")]
    tensor_parallel: Vec<u32>,
    /// Formats of the weights: bf16, fp8, int8, int4, nvfp4, mxfp4 [default: the checkpoint's, and fp8 for bf16]
    #[arg(
        long,
        value_name = "FORMATS",
        value_delimiter = ',',
        value_parser = precision,
        help_heading = "Search"
    )]
    precision: Vec<Dtype>,
    /// Formats of the KV cache: auto (the checkpoint's), bf16, fp8
    #[arg(
        long,
        value_name = "FORMATS",
        value_delimiter = ',',
        default_value = "auto",
        value_parser = kv_cache_dtype,
        help_heading = "Search"
    )]
    kv_cache_dtype: Vec<KvCache>,
    /// Workers that compute prompts and answers, or workers for each
    #[arg(
        long,
        value_name = "KINDS",
        value_delimiter = ',',
        default_value = "aggregated,disaggregated",
        help_heading = "Search"
    )]
    serving: Vec<ServingArg>,
    /// Values of engine.max_num_seqs; the first one is the base
    #[arg(long, value_name = "VALUES", value_delimiter = ',', default_value = "256,64,1024", value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Search")]
    max_num_seqs: Vec<u32>,
    /// Values of engine.max_num_batched_tokens; the first one is the base
    #[arg(long, value_name = "VALUES", value_delimiter = ',', default_value = "8192,2048,16384", value_parser = clap::value_parser!(u32).range(1..=1 << 24), help_heading = "Search")]
    max_num_batched_tokens: Vec<u32>,
    /// Values of router.policy; the first one is the base
    #[arg(
        long,
        value_name = "POLICIES",
        value_delimiter = ',',
        default_value = "kv,power_of_two,round_robin",
        value_parser = policy,
        help_heading = "Search"
    )]
    policies: Vec<String>,
    /// Most GPUs of a cluster
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Search")]
    max_gpus: u32,

    #[command(flatten)]
    price: PriceArgs,

    #[command(flatten)]
    what: WorkloadArgs,
    /// Set a key of the workload file; may be repeated
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Workload")]
    workload_set: Vec<String>,

    /// Seeds that the answer must attain on average; traces have one
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100), help_heading = "Run")]
    seeds: u64,
    /// Only the answer: no runners-up, headroom and sensitivity
    #[arg(long, help_heading = "Run")]
    quick: bool,
    /// Concurrent simulations; the answer is the same for any number [default: cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Run")]
    jobs: Option<u16>,

    /// Print JSON (docs/plan.md)
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Write the answer as a cluster file
    #[arg(long, value_name = "CLUSTER.TOML", help_heading = "Output")]
    write: Option<PathBuf>,
    /// Write a self-contained HTML page to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Show no progress
    #[arg(long, help_heading = "Output")]
    quiet: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ServingArg {
    /// Each worker computes prompts and answers
    Aggregated,
    /// Prefill workers and decode workers
    Disaggregated,
}

/// A format of the KV cache; `None`: the checkpoint's.
type KvCache = Option<Dtype>;

fn precision(text: &str) -> Result<Dtype, String> {
    let names = || Dtype::ALL.map(Dtype::name).join(", ");
    Dtype::ALL
        .into_iter()
        .find(|dtype| dtype.name() == text)
        .ok_or_else(|| format!("`{text}` is not a format of weights; one of {}", names()))
}

fn kv_cache_dtype(text: &str) -> Result<KvCache, String> {
    match text {
        "auto" => Ok(None),
        "bf16" => Ok(Some(Dtype::Bf16)),
        "fp8" => Ok(Some(Dtype::Fp8)),
        _ => Err(format!(
            "`{text}` is not a format of the KV cache; one of auto, bf16, fp8"
        )),
    }
}

fn policy(text: &str) -> Result<String, String> {
    let mut names = file::POLICIES
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
struct Excluded {
    name: String,
    reason: String,
}

/// A configuration with its figures.
struct Row {
    sized: Choice,
    shape: Shape,
    setting: Setting,
    gpus: u64,
    answer: Answer,
}

/// One knob changed, and what follows.
struct Sensitivity {
    knob: String,
    /// Sizes of the answer's and the first runner-up's shapes; `None`: no size attains.
    sizes: Vec<Option<Choice>>,
}

/// The answer to one load.
struct Found {
    load: f64,
    best: Row,
    /// Attainment over seeds, or over parts of the trace.
    sure: Interval,
    /// Seeds of `sure`; 0: parts of the run.
    seeds: u64,
    /// Factor on the load up to which it attains, and from which it does not.
    headroom: Option<(f64, Option<f64>)>,
    step_error: Option<StepError>,
    others: Vec<Row>,
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
struct NotFound {
    load: f64,
    nearest: Option<(Nearest, Row)>,
    /// Shapes that the bounds exclude, with the most that they can reach.
    ideal: Vec<(String, Ideal)>,
    requests: u64,
}

/// Inputs of the output in addition to answers.
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
    seed: u64,
}

/// A shape with its bounds.
struct Bounded {
    shape: Shape,
    candidate: Candidate,
}

/// Searches, and prints the answer of each load.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (what, workload, name) = workload(args)?;
    check_flags(args)?;
    let objectives = Objectives::of(&workload, args.slo.clone());
    ensure!(
        objectives.are_stated(),
        "no objective to attain; state one with --slo, such as --slo ttft=1s,itl=50ms, or `slo` of the workload's classes"
    );
    let base = Base::read(args.cluster.as_deref(), args.model.as_deref(), &args.set)?;
    let own = base.gpus();
    check_gpus(args, &own)?;
    let prices = args.price.read(&own)?;
    let priced = check_prices(args, &prices)?;
    let shared = base.shared()?;
    super::memory::check_concurrency(&workload)?;
    let demand = Demand::of(&workload)?;
    let jobs = args.jobs.map_or(super::cores() as usize, usize::from);
    let shows = std::io::stderr().is_terminal() && !args.quiet;

    let mut context = Asked {
        model: shared.model.name.clone(),
        workload: name,
        objectives,
        target: args.attain,
        headroom: args.headroom,
        prices,
        priced,
        excluded: Vec::new(),
        parts: String::new(),
        searched: searched(args, &shared.model.shape),
        seed: workload.seed,
    };
    let shapes = shapes(args, &base, &shared.model.shape, &mut context.excluded);
    if shapes.is_empty() {
        bail!(
            "{} cannot run on any of the GPUs and sizes searched:\n{}",
            context.model,
            output::excluded(&context.excluded)
        );
    }
    // The highest load first: what attains it is tried at lower ones, so that these never cost more.
    let mut loads = args.load.clone();
    loads.sort_by(|a, b| b.total_cmp(a));
    loads.dedup();
    let mut results: Vec<Result<Found, NotFound>> = Vec::new();
    let mut above: Vec<(Shape, Setting, u32)> = Vec::new();
    for &load in &loads {
        let question = Question {
            args,
            base: &base,
            shapes: &shapes,
            workload: &workload,
            demand: &demand,
            load,
            jobs,
            shows,
        };
        results.push(question.answer(&mut context, &mut above)?);
    }
    results.reverse();
    let mut failures = Vec::new();
    if let Some(path) = &args.write
        && let Some(Ok(found)) = results.first()
    {
        failures.extend(write(path, &base, found, &context)?);
    }
    if let Some(path) = &args.html {
        let page = output::page(&context, &results, &what.text(&args.workload_set)?);
        failures.extend(out::save(path, &page));
    }
    if args.json {
        out::print(&output::json(&context, &results)?)?;
    } else {
        out::print(&output::text(&context, &results, args))?;
    }
    out::complain(&failures);
    let found = results.iter().all(Result::is_ok);
    Ok(if found && failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn check_flags(args: &Args) -> anyhow::Result<()> {
    ensure!(
        args.attain > 0.0 && args.attain <= 1.0,
        "--attain is {} %, but must be above 0 and at most 100 %",
        number(args.attain * 100.0)
    );
    ensure!(
        (0.0..=10.0).contains(&args.headroom),
        "--headroom is {} %, but must be 0 to 1,000 %",
        number(args.headroom * 100.0)
    );
    for &load in &args.load {
        ensure!(
            load.is_finite() && (1e-3..=1e3).contains(&load),
            "--load has {load}, but factors must be 0.001 to 1,000"
        );
    }
    ensure!(
        args.write.is_none() || args.load.len() == 1,
        "--write writes one cluster, but --load asks for {}; run them one by one",
        counted(args.load.len() as u64, "answer")
    );
    Ok(())
}

/// Refuses GPUs that are neither presets nor `own`, those of the cluster file.
fn check_gpus(args: &Args, own: &[String]) -> anyhow::Result<()> {
    for gpu in &args.gpus {
        if preset::gpu(gpu).is_none() && !own.contains(gpu) {
            let presets = preset::GPUS.iter().map(|gpu| &*gpu.name);
            let names: Vec<&str> = own.iter().map(String::as_str).chain(presets).collect();
            bail!(
                "--gpus has `{gpu}`, which is neither a preset nor a [gpu.{gpu}] of --cluster; one of {}",
                names.join(", ")
            );
        }
    }
    Ok(())
}

/// The workload of the positional file or the flags.
fn workload(args: &Args) -> anyhow::Result<(WorkloadArgs, Workload, String)> {
    let mut what = args.what.clone();
    if let Some(file) = &args.file {
        ensure!(
            what.workload.is_none() && what.trace.is_none(),
            "{} is the workload, so --workload and --trace have no place",
            file.display()
        );
        ensure!(
            what.isl.is_none() && what.osl.is_none(),
            "{} has prompts and answers, so --isl and --osl have no place",
            file.display()
        );
        let is_workload = file
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("toml"));
        if is_workload {
            ensure!(
                what.rate.is_none() && what.concurrency.is_none(),
                "{} has its arrivals; change them with --workload-set arrival.…, or with --load",
                file.display()
            );
            what.workload = Some(file.clone());
        } else {
            what.trace = Some(file.clone());
        }
    } else {
        let load = what.workload.is_some() || what.trace.is_some();
        ensure!(
            load || what.rate.is_some() || what.concurrency.is_some(),
            "no workload; name a workload file or a trace, or describe a load with --rate, --isl and --osl"
        );
    }
    ensure!(
        args.workload_set.is_empty() || what.workload.is_some(),
        "--workload-set changes a workload file, and there is none"
    );
    let (workload, name) = what.workload(&args.workload_set)?;
    Ok((what, workload, name))
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
    format!(
        "searched: GPUs {}; tensor parallel {}; weights {}; KV cache {}; max_num_seqs {}; max_num_batched_tokens {}; \
         policies {}; up to {} GPUs",
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
fn shapes(
    args: &Args,
    base: &Base,
    model: &ModelShape,
    excluded: &mut Vec<Excluded>,
) -> Vec<Shape> {
    let mut shapes = Vec::new();
    let formats = formats(args, model);
    for gpu in &args.gpus {
        for (&dtype, &kv_cache) in formats.iter().flat_map(|dtype| {
            args.kv_cache_dtype
                .iter()
                .map(move |kv_cache| (dtype, kv_cache))
        }) {
            for &tensor_parallel in &args.tensor_parallel {
                let shape = Shape {
                    gpu: gpu.clone(),
                    tensor_parallel,
                    dtype,
                    kv_cache,
                    prefill_share: None,
                };
                if !model.divides_into(tensor_parallel) {
                    excluded.push(Excluded {
                        name: shape.name(),
                        reason: format!("{} does not split into {tensor_parallel}", model.name),
                    });
                    continue;
                }
                let setting = &settings(args, false)[0];
                if let Err(mistakes) = base.resolve(&shape, setting, 1) {
                    let first = mistakes.iter().next().map(|m| m.message.clone());
                    excluded.push(Excluded {
                        name: shape.name(),
                        reason: first.unwrap_or_default(),
                    });
                    continue;
                }
                for serving in &args.serving {
                    shapes.push(Shape {
                        prefill_share: (*serving == ServingArg::Disaggregated).then_some(0.5),
                        ..shape.clone()
                    });
                }
            }
        }
    }
    shapes
}

fn settings(args: &Args, apart: bool) -> Vec<Setting> {
    space::settings(
        &args.max_num_seqs,
        &args.max_num_batched_tokens,
        &args.policies,
        apart,
    )
}

/// The search at one load.
struct Question<'a> {
    args: &'a Args,
    base: &'a Base,
    shapes: &'a [Shape],
    workload: &'a Workload,
    /// At load 1.
    demand: &'a Demand,
    load: f64,
    jobs: usize,
    shows: bool,
}

impl Question<'_> {
    /// The load that must be attained.
    fn hardest(&self) -> f64 {
        self.load * (1.0 + self.args.headroom)
    }

    fn answer(
        &self,
        context: &mut Asked,
        above: &mut Vec<(Shape, Setting, u32)>,
    ) -> anyhow::Result<Result<Found, NotFound>> {
        let args = self.args;
        let scaled;
        let demand = if self.hardest() == 1.0 {
            self.demand
        } else {
            scaled = Demand::of(&load::scaled(self.workload, self.hardest()))?;
            &scaled
        };
        let mut ideal = Vec::new();
        let mut bounded = Vec::new();
        for shape in self.shapes {
            match self.bound(shape, demand, context)? {
                Ok(found) if found.candidate.workers_max < shape.workers_least() => {}
                Ok(found) => bounded.push(found),
                Err(most) => ideal.push((shape.name(), most)),
            }
        }
        let shapes: Vec<Shape> = bounded.iter().map(|b| b.shape.clone()).collect();
        let candidates: Vec<Candidate> = bounded.iter().map(|b| b.candidate.clone()).collect();
        let settings: Vec<Vec<Setting>> = shapes
            .iter()
            .map(|shape| settings(args, shape.prefill_share.is_some()))
            .collect();
        let (parts, lengths_s, shares, main) = self.parts(context);
        let mut driver = Driver::new(
            self.base,
            &shapes,
            &settings,
            parts,
            lengths_s,
            &context.objectives,
            args.attain,
            self.jobs,
            self.shows,
        );
        let plain = Conditions {
            load: self.hardest(),
            ..Conditions::PLAIN
        };
        let requests = demand.needs.len() as u64;
        if candidates.is_empty() {
            return Ok(Err(NotFound {
                load: self.load,
                nearest: None,
                ideal,
                requests,
            }));
        }
        let mut search = Search::new(&candidates, args.attain, &shares, main, plain, &mut driver);
        let others: Vec<Choice> = above
            .iter()
            .filter_map(|(shape, setting, workers)| {
                let at = shapes.iter().position(|s| s.name() == shape.name())?;
                let setting = settings[at].iter().position(|s| s == setting)?;
                Some(Choice {
                    shape: at,
                    setting,
                    workers: *workers,
                    cost: candidates[at].cost_of(*workers),
                    share: 0.0,
                })
            })
            .collect();
        let mut best = search.find(&others)?;
        if let Some(found) = best {
            best = search.confirm(&found)?;
        }
        // Generated workloads have chance in them: the answer attains on average over seeds.
        let generated = matches!(self.workload.content, Content::Generated(_));
        let seeds = if generated { args.seeds } else { 1 };
        let mut sure = None;
        while let Some(found) = best {
            let conditions: Vec<Conditions> = (0..seeds)
                .map(|seed| Conditions { seed, ..plain })
                .collect();
            let measured = search.check_to_end(&found, &conditions)?;
            let of: Vec<f64> = measured.iter().map(|m| m.share).collect();
            let over = confidence::interval(&of);
            if seeds == 1 || over.mean >= args.attain {
                sure = Some(over);
                break;
            }
            let more = Choice {
                workers: found.workers + 1,
                cost: candidates[found.shape].cost_of(found.workers + 1),
                ..found
            };
            best = (more.workers <= candidates[found.shape].workers_max).then_some(more);
        }
        let search_requests = search.requests;
        let Some(best) = best else {
            let nearest = search.nearest();
            let nearest = nearest
                .map(|nearest| -> anyhow::Result<_> {
                    let sized = Choice {
                        shape: nearest.trial.shape,
                        setting: nearest.trial.setting,
                        workers: nearest.trial.workers,
                        cost: candidates[nearest.trial.shape].cost_of(nearest.trial.workers),
                        share: nearest.share,
                    };
                    let row = row(&mut driver, sized, main, plain)?;
                    Ok((nearest, row))
                })
                .transpose()?;
            driver.clear();
            return Ok(Err(NotFound {
                load: self.load,
                nearest,
                ideal,
                requests,
            }));
        };
        let mut others = Vec::new();
        let mut headroom = None;
        let mut by_workers = Vec::new();
        if !args.quick {
            others = search.runners_up(&best, ROWS_MAX)?;
            headroom = Some(search.headroom(&best)?);
            by_workers = search.around(&best)?;
        }
        let now = Conditions {
            load: self.load,
            ..plain
        };
        let last = shares.len() - 1;
        let mut run_requests = search.requests;
        let best_row = row(&mut driver, best, last, now)?;
        let step_error = step_error(&driver, &best_row, demand)?;
        let mut sensitivity = Vec::new();
        if !args.quick {
            let rivals: Vec<Choice> = std::iter::once(best)
                .chain(others.first().copied())
                .collect();
            let mut search =
                Search::new(&candidates, args.attain, &shares, main, plain, &mut driver);
            for (knob, conditions) in knobs(plain, step_error.as_ref()) {
                let sizes = rivals
                    .iter()
                    .map(|rival| search.resize(rival, conditions))
                    .collect::<anyhow::Result<_>>()?;
                sensitivity.push(Sensitivity { knob, sizes });
            }
            run_requests += search.requests;
        }
        let others = others
            .into_iter()
            .map(|sized| row(&mut driver, sized, main, now))
            .collect::<anyhow::Result<Vec<Row>>>()?;
        driver.clear();
        let by_load = driver
            .complete
            .iter()
            .filter(|(trial, _)| {
                (trial.shape, trial.setting, trial.workers)
                    == (best.shape, best.setting, best.workers)
                    && trial.conditions.seed == 0
            })
            .map(|(trial, share)| (trial.conditions.load / self.load, *share))
            .collect();
        let sure = match sure {
            Some(over) if seeds > 1 => over,
            _ => confidence::of_parts(&best_row.answer.parts),
        };
        above.push((
            shapes[best.shape].clone(),
            settings[best.shape][best.setting].clone(),
            best.workers,
        ));
        let apart: Vec<bool> = shapes.iter().map(|s| s.prefill_share.is_some()).collect();
        Ok(Ok(Found {
            load: self.load,
            sure,
            seeds: if seeds > 1 { seeds } else { 0 },
            headroom,
            step_error,
            others,
            ideal,
            sensitivity,
            by_workers,
            by_load,
            search_requests,
            all_requests: run_requests,
            grid_requests: grid(&candidates, &apart, best.cost) * requests,
            requests,
            best: best_row,
        }))
    }

    /// The bounds of a shape; `Err` if it cannot attain even on an idle cluster.
    fn bound(
        &self,
        shape: &Shape,
        demand: &Demand,
        context: &Asked,
    ) -> anyhow::Result<Result<Bounded, Ideal>> {
        let args = self.args;
        let each = settings(args, shape.prefill_share.is_some());
        let (cluster, _) = self.base.resolve(shape, &each[0], shape.workers_least())?;
        let engine: &EngineConfig = &cluster.pools[0].engine;
        let mut timing: Box<dyn StepTime> =
            timing::build(engine, &cluster.model.shape, super::files::read)?;
        let most = bound::ideal(
            demand,
            &context.objectives,
            engine,
            &mut *timing,
            args.attain,
        );
        if most.share < args.attain - 1e-9 {
            return Ok(Err(most));
        }
        let seqs = each.iter().map(|s| s.max_num_seqs).max().unwrap_or(1);
        let tokens = each.iter().map(|s| s.max_num_batched_tokens).max();
        let work = bound::work(
            demand,
            &mut *timing,
            seqs,
            tokens.unwrap_or(1),
            gap_limit_s(&context.objectives),
        );
        let time_s = bound::time_s(demand, &mut *timing);
        let least = |work_s| bound::workers_min(work_s, time_s, args.attain);
        let mut shape = shape.clone();
        let workers_min = if shape.prefill_share.is_some() {
            let whole = work.prefill_s + work.decode_s;
            shape.prefill_share = Some(work.prefill_s / whole.max(1e-12));
            least(whole).max(2)
        } else {
            least(work.mixed_s)
        };
        let gpus = engine.tensor_parallel_size * engine.data_parallel_size;
        let per_gpu = if context.priced {
            context.prices.per_gpu_hour(&shape.gpu)
        } else {
            Some(1.0)
        };
        let kind = args.gpus.iter().position(|gpu| *gpu == shape.gpu);
        // Too many for --max-gpus: its largest size is tried, to say how far it gets.
        let workers_max = args.max_gpus / gpus;
        let workers_min = workers_min.min(workers_max).max(shape.workers_least());
        Ok(Ok(Bounded {
            candidate: Candidate {
                cost: per_gpu.context("every GPU has a price, as was checked")? * f64::from(gpus),
                workers_min,
                workers_max,
                settings: each.len(),
                kind: kind.unwrap_or(0),
            },
            shape,
        }))
    }

    /// The parts of the workload: workloads, lengths in seconds, and shares of the requests; and the
    /// index of the one that answers are found on.
    fn parts(&self, context: &mut Asked) -> (Vec<Workload>, Vec<f64>, Vec<f64>, usize) {
        let all = self.demand.needs.len() as f64;
        let length_s = self.demand.duration_s();
        let mut shares = vec![1.0];
        let mut share = 1.0;
        if all > MAIN_MAX {
            share = MAIN_MAX / all;
            shares.insert(0, share);
        }
        let main_share = share;
        while shares.len() <= PARTS_MAX + usize::from(all > MAIN_MAX)
            && all * share / 4.0 >= PART_MIN
            && !self.demand.closed
        {
            share /= 4.0;
            shares.insert(0, share);
        }
        if self.demand.closed {
            shares.truncate(1);
            shares[0] = 1.0;
        }
        let main = if all > MAIN_MAX && shares.len() > 1 {
            shares.len() - 2
        } else {
            shares.len() - 1
        };
        let weight = |need: &slipstream_plan::demand::Need| {
            // A token of an answer takes about as long as some tens of a prompt, in large batches.
            f64::from(need.input - need.cached) + 20.0 * f64::from(need.output)
        };
        let mut parts = Vec::new();
        let mut lengths = Vec::new();
        let mut texts = Vec::new();
        for &share in &shares {
            let mut part = self.workload.clone();
            let length = length_s * share;
            if share < 1.0 {
                let from = self.demand.busiest(length, weight);
                part.window_s = Some((from, length));
                texts.push(format!("{} s from {} s", number(length), number(from)));
            }
            parts.push(part);
            lengths.push(length);
        }
        context.parts = if texts.is_empty() {
            "every run has the whole workload".to_owned()
        } else {
            let found = if main_share < 1.0 {
                "; the answer is found on the largest of them and confirmed on the whole"
            } else {
                "; answers are found on the whole"
            };
            format!(
                "settings are compared on the busiest parts ({}) of {} s{found}",
                texts.join(", "),
                number(length_s)
            )
        };
        (parts, lengths, shares, main)
    }
}

/// A configuration with the figures of a complete run.
fn row(
    driver: &mut Driver<'_>,
    sized: Choice,
    part: usize,
    conditions: Conditions,
) -> anyhow::Result<Row> {
    let trial = trial(&sized, part, conditions);
    let answer = driver.whole(&trial)?;
    let shape = &driver.shapes[sized.shape];
    let setting = &driver.settings[sized.shape][sized.setting];
    Ok(Row {
        shape: shape.clone(),
        setting: setting.clone(),
        gpus: driver.cluster(&trial)?.gpus(),
        answer,
        sized,
    })
}

fn step_error(
    driver: &Driver<'_>,
    row: &Row,
    demand: &Demand,
) -> anyhow::Result<Option<StepError>> {
    let trial = trial(&row.sized, 0, Conditions::PLAIN);
    let cluster = driver.cluster(&trial)?;
    let [isl, osl] = demand.mean_lengths();
    let totals = &row.answer.outcome.totals;
    // Little's law: requests in the system are their rate times their time in it.
    let e2e_s = totals.latencies().e2e_ms.map_or(0.0, |e2e| e2e.mean / 1e3);
    let under_way = totals.throughput().requests_per_s * e2e_s;
    let decoding = cluster
        .pools
        .last()
        .map_or(1, |pool| pool.workers * pool.engine.data_parallel_size);
    let engine = &cluster.pools[cluster.pools.len() - 1].engine;
    let profile = timing::profile(engine, super::files::read)?;
    Ok(confidence::step_error(
        &cluster.model.shape,
        engine,
        &profile,
        isl,
        osl,
        under_way / f64::from(decoding),
    ))
}

/// The limit on the mean gap between tokens that every class has, s.
fn gap_limit_s(objectives: &Objectives) -> Option<f64> {
    let limit = |slo: Option<&Slo>| {
        let slo = slo?;
        let limits = [slo.limit_ns("itl"), slo.limit_ns("tpot")];
        limits.into_iter().flatten().min()
    };
    let classes = objectives.classes.len().max(1) as u32;
    let each: Option<Vec<u64>> = (0..classes)
        .map(|class| limit(objectives.of_class(class)))
        .collect();
    Some(each?.into_iter().max()? as f64 / 1e9)
}

/// One condition changed at a time.
fn knobs(plain: Conditions, error: Option<&StepError>) -> Vec<(String, Conditions)> {
    let percent = |change: f64| format!("{:+.0} %", change * 100.0);
    let mut knobs = Vec::new();
    for change in [-CHANGE, CHANGE] {
        knobs.push((
            format!("objectives {}", percent(change)),
            Conditions {
                slo: 1.0 + change,
                ..plain
            },
        ));
    }
    for change in [-CHANGE, CHANGE] {
        knobs.push((
            format!("load {}", percent(change)),
            Conditions {
                load: plain.load * (1.0 + change),
                ..plain
            },
        ));
    }
    let steps: Vec<f64> = match error {
        Some(error) => vec![error.low, error.high],
        None => vec![1.0 - CHANGE / 2.0, 1.0 + CHANGE / 2.0],
    };
    for slower in steps {
        knobs.push((
            format!("step times {}", percent(slower - 1.0)),
            Conditions { slower, ..plain },
        ));
    }
    knobs
}

/// Writes the answer as a cluster file.
fn write(
    path: &std::path::Path,
    base: &Base,
    found: &Found,
    context: &Asked,
) -> anyhow::Result<Option<String>> {
    let best = &found.best;
    let (_, settings) = base.resolve(&best.shape, &best.setting, best.sized.workers)?;
    let text = format!(
        "# {}\n# {}\n# Made by: {}\n\n{}",
        output::claim(found),
        output::cost(context, found),
        out::command_line(),
        settings.given_to_toml()
    );
    Ok(out::save(path, &text))
}

impl Row {
    /// Its workers and shape, in words.
    fn name(&self) -> String {
        space::describe(&self.shape, &self.setting, self.sized.workers)
    }
}
