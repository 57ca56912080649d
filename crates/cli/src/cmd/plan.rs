//! `slipstream plan`: finds the cheapest cluster that attains objectives under a workload.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::ensure;
use clap::ValueEnum as _;
use slipstream_base::Slo;
use slipstream_report::table::counted;
use slipstream_study::plan::{self, Elsewhere, Question};
use slipstream_study::source::{ClusterSource, WorkloadSource, percent};

use crate::cmd::on::{self, Ray};
use crate::cmd::price_args::PriceArgs;
use crate::cmd::progress;
use crate::cmd::workload_args::{self, WorkloadArgs};
use crate::out;

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
    #[arg(long, value_name = "PERCENT", default_value = "99%", value_parser = percent, allow_hyphen_values = true, help_heading = "Question")]
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
    #[arg(long, value_name = "PERCENT", default_value = "0%", value_parser = percent, allow_hyphen_values = true, help_heading = "Question")]
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
    /// GPUs of a worker, or of each rank of one
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "1,2,4,8", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Search")]
    tensor_parallel: Vec<u32>,
    /// Stages of a worker, or of each rank of one, with as many GPUs each [default: engine.pipeline_parallel_size]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Search")]
    pipeline_parallel: Vec<u32>,
    /// Ranks of a worker (attention data parallelism) [default: engine.data_parallel_size]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Search")]
    data_parallel: Vec<u32>,
    /// Whether each GPU of a worker has whole experts: off, on [default: engine.enable_expert_parallel]
    #[arg(
        long,
        value_name = "VALUES",
        value_delimiter = ',',
        help_heading = "Search"
    )]
    expert_parallel: Vec<Switch>,
    /// Host memory of a rank for KV blocks, GiB; needs engine.host_tier.bytes_per_s: 0,256 [default: engine.host_tier.gib]
    #[arg(
        long,
        value_name = "GIB",
        value_delimiter = ',',
        help_heading = "Search"
    )]
    host_memory: Vec<f64>,
    /// Tokens of a draft (speculative decoding): 0,1,3; needs `method` and `acceptance` of [engine.speculation] [default: the cluster file's]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=32), help_heading = "Search")]
    speculation: Vec<u32>,
    /// Formats of the weights: bf16, fp8, int8, int4, nvfp4, mxfp4 [default: the checkpoint's, and fp8 for bf16]
    #[arg(
        long,
        value_name = "FORMATS",
        value_delimiter = ',',
        value_parser = precision,
        help_heading = "Search"
    )]
    precision: Vec<String>,
    /// Formats of the KV cache: auto (the checkpoint's), bf16, fp8
    #[arg(
        long,
        value_name = "FORMATS",
        value_delimiter = ',',
        default_value = "auto",
        value_parser = kv_cache_dtype,
        help_heading = "Search"
    )]
    kv_cache_dtype: Vec<String>,
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
    /// Values of router.prefill_weight for policy kv; the first one is the base [default: router.prefill_weight]
    #[arg(
        long,
        value_name = "WEIGHTS",
        value_delimiter = ',',
        help_heading = "Search"
    )]
    prefill_weights: Vec<f64>,
    /// Values of router.temperature for policy kv; the first one is the base [default: router.temperature]
    #[arg(
        long,
        value_name = "VALUES",
        value_delimiter = ',',
        help_heading = "Search"
    )]
    temperatures: Vec<f64>,
    /// Fewest workers with the cluster file's `[autoscale]`, tried on the answer and the rows next to it: 1,2,4
    #[arg(long, value_name = "WORKERS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65_535), help_heading = "Search")]
    autoscale_min: Vec<u32>,
    /// Refused: --host-memory searches it
    #[arg(long, hide = true, value_name = "TIERS")]
    kv_tiers: Option<String>,
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
    /// Run on a Ray cluster: ray (the one of RAY_ADDRESS, or a new one here) or ray://HOST:PORT; the answer is the same
    #[arg(long, value_name = "RAY", value_parser = on::address, help_heading = "Run")]
    on: Option<String>,

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
enum Switch {
    /// Every GPU has a part of every expert
    Off,
    /// Each GPU has whole experts
    On,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ServingArg {
    /// Each worker computes prompts and answers
    Aggregated,
    /// Prefill workers and decode workers
    Disaggregated,
}

fn precision(name: &str) -> Result<String, String> {
    plan::precision(name).map(|_| name.to_owned())
}

fn kv_cache_dtype(name: &str) -> Result<String, String> {
    plan::kv_cache_dtype(name).map(|_| name.to_owned())
}

fn policy(name: &str) -> Result<String, String> {
    plan::policy(name)
}

/// Searches, and prints the answer of each load.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let question = args.question()?;
    ensure!(
        args.write.is_none() || args.load.len() == 1,
        "--write writes one cluster, but --load asks for {}; run them one by one",
        counted(args.load.len() as u64, "answer")
    );
    out::check_writable([
        ("write", args.write.as_deref()),
        ("html", args.html.as_deref()),
    ])?;
    let asked = args
        .on
        .as_ref()
        .map(|_| question.travelling())
        .transpose()?;
    let plan = question.prepare()?;
    out::model_lines(plan.model_lines());
    for note in plan.notes() {
        errln!("note: {note}");
    }
    let shows = std::io::stderr().is_terminal() && !args.quiet;
    let control = progress::control(shows);
    let ray = match (&args.on, &asked) {
        (Some(on), Some(asked)) => Some(Ray::start(on, asked, None, false)?),
        _ => None,
    };
    let elsewhere = ray.as_ref().map(|ray| ray as &dyn Elsewhere);
    let answer = plan.answer(args.jobs.map(usize::from), &control, elsewhere);
    progress::clear(shows);
    let answer = answer?;
    let mut failures = Vec::new();
    if let Some(path) = &args.write
        && let Some(text) = answer.cluster_file(&out::command_line())?
    {
        failures.extend(out::save(path, &text));
    }
    if let Some(path) = &args.html {
        failures.extend(out::save(path, &answer.page(&out::command_line())));
    }
    if args.json {
        out::print_json(&answer.json()?)?;
    } else {
        let workload = args.workload_flag();
        let written = args.write.as_deref().map(|path| (path, workload.as_str()));
        out::print(&answer.text(written))?;
    }
    out::complain(&failures);
    Ok(if answer.found() && failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

impl Args {
    fn question(&self) -> anyhow::Result<Question> {
        ensure!(
            self.kv_tiers.is_none(),
            "--kv-tiers: host memory below the GPU is searched with --host-memory 0,256 (GiB of each rank)"
        );
        let serving = self.serving.iter();
        Ok(Question {
            workload: workload(self)?,
            slo: self.slo.clone(),
            attain: self.attain,
            load: self.load.clone(),
            headroom: self.headroom,
            model: self.model.clone(),
            cluster: ClusterSource {
                file: self.cluster.clone(),
                text: None,
                sets: self.set.clone(),
            },
            gpus: self.gpus.clone(),
            tensor_parallel: self.tensor_parallel.clone(),
            pipeline_parallel: self.pipeline_parallel.clone(),
            data_parallel: self.data_parallel.clone(),
            expert_parallel: self
                .expert_parallel
                .iter()
                .map(|&of| of == Switch::On)
                .collect(),
            host_memory: self.host_memory.clone(),
            speculation: self.speculation.clone(),
            precision: self.precision.clone(),
            kv_cache_dtype: self.kv_cache_dtype.clone(),
            serving: serving
                .filter_map(|kind| Some(kind.to_possible_value()?.get_name().to_owned()))
                .collect(),
            max_num_seqs: self.max_num_seqs.clone(),
            max_num_batched_tokens: self.max_num_batched_tokens.clone(),
            policies: self.policies.clone(),
            prefill_weights: self.prefill_weights.clone(),
            temperatures: self.temperatures.clone(),
            autoscale_min: self.autoscale_min.clone(),
            max_gpus: self.max_gpus,
            prices: self.price.source(),
            seeds: self.seeds,
            quick: self.quick,
        })
    }

    /// The workload as flags of `simulate`.
    fn workload_flag(&self) -> String {
        self.file.as_ref().map_or_else(
            || "(the same workload flags)".to_owned(),
            |file| {
                let is_workload = file.extension().is_some_and(|e| e == "toml");
                let flag = if is_workload { "--workload" } else { "--trace" };
                format!("{flag} {}", file.display())
            },
        )
    }
}

/// The workload of the positional file or the flags.
fn workload(args: &Args) -> anyhow::Result<WorkloadSource> {
    let mut what = args.what.clone();
    if let Some(file) = &args.file {
        ensure!(
            what.workload.is_none() && what.trace.is_none(),
            "{} is the workload, so --workload and --trace do not apply",
            file.display()
        );
        ensure!(
            what.isl.is_none() && what.osl.is_none(),
            "{} has prompts and answers, so --isl and --osl do not apply",
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
    let source = what.source(&args.workload_set);
    workload_args::print_note_of(&source);
    Ok(source)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Alone {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn defaults_of_flags_are_those_of_the_library() {
        let flags = Alone::parse_from(["plan", "w.toml"]).args.question();
        let mut question = flags.unwrap();
        question.workload = WorkloadSource::default();
        assert_eq!(question, Question::default());
    }
}
