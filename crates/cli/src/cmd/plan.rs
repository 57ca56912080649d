//! `slipstream plan`: finds the cheapest cluster that attains objectives under a workload.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::ensure;
use slipstream_base::Slo;
use slipstream_report::table::counted;
use slipstream_study::plan::{Elsewhere, Question};
use slipstream_study::source::{ClusterSource, WorkloadSource, percent};

use crate::cmd::axis_args::AxisArgs;
use crate::cmd::emission::Emission;
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
        value_parser = factor,
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

    #[command(flatten)]
    axes: AxisArgs,
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
    /// Write files that deploy the answer to the empty or new folder DIR. TARGET: vllm (commands), helm (values of the chart and
    /// manifests), or a folder of templates (docs/plan.md)
    #[arg(long, num_args = 2, value_names = ["TARGET", "DIR"], help_heading = "Output")]
    emit: Option<Vec<String>>,
    /// Write a self-contained HTML page to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    html: Option<PathBuf>,
    /// Show no progress
    #[arg(long, help_heading = "Output")]
    quiet: bool,
}

fn factor(text: &str) -> Result<f64, String> {
    let number = text.trim().parse();
    number.map_err(|_| {
        format!("`{text}` is not a number; write factors with commas between them: 0.5,1,2")
    })
}

/// Searches, and prints the answer of each load.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let question = args.question()?;
    ensure!(
        args.write.is_none() || args.load.len() == 1,
        "--write writes one cluster, but --load asks for {}; run them one by one",
        counted(args.load.len() as u64, "answer")
    );
    let emission = Emission::prepare(args.emit.as_deref(), args.load.len())?;
    out::check_writable([
        ("write", args.write.as_deref()),
        ("html", args.html.as_deref()),
    ])?;
    let asked = args
        .on
        .as_ref()
        .map(|_| question.travelling())
        .transpose()?;
    let mut plan = question.prepare()?;
    if args.html.is_some() {
        plan = plan.with_charts();
    }
    out::model_lines(plan.model_lines());
    for note in plan.notes() {
        errln!("note: {note}");
    }
    let shows = std::io::stderr().is_terminal() && !args.quiet;
    let control = match &args.on {
        // A signal ends the other processes too.
        Some(_) => progress::control(shows),
        None => progress::interruptible(shows)?,
    };
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
    if let Some(emission) = &emission {
        failures.extend(emission.write(&answer.deployment(&out::command_line())));
    }
    if args.json {
        out::print_json(&answer.json()?)?;
    } else {
        let workload = args.workload_flag();
        let written = args.write.as_deref().map(|path| (path, workload.as_str()));
        out::print(&answer.text(written))?;
    }
    out::complain(&failures);
    let interrupted = answer.interruption().is_some();
    if interrupted {
        errln!("note: interrupted; the answer is what was found before");
    }
    Ok(if answer.found() && failures.is_empty() && !interrupted {
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
            axes: self.axes.0.clone(),
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
