//! `slipstream calibrate`: fits step times to measurements, with their error on held-out parts.
//!
//! ```text
//!  --from-points ─► points ─────────────────────────────► a profile of many deployments
//!  --engine ──────► load (sends, records) ─┐
//!  --requests ────► records ───────────────┼─► replay ─► the terms of one engine
//!  --metrics, --fpm ─► steps ──────────────┘
//! ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use slipstream_bench::PromptForm;
use slipstream_calibrate::load::{self, LoadOptions};
use slipstream_calibrate::{fitted, name, one_worker, points, records, replay, steps};
use slipstream_fleet::describe;

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::workload_args::time;
use crate::out;

/// Flags of `slipstream calibrate`.
#[derive(clap::Args)]
#[command(group(clap::ArgGroup::new("source").required(true)))]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// CSV table of measured deployments, with `ttft_ms` and `tpot_ms` (docs/accuracy.md)
    #[arg(long, value_name = "FILE", group = "source", help_heading = "Source")]
    from_points: Option<PathBuf>,
    /// CSV table of the rows to take: an `id`, and an empty or absent `why`
    #[arg(
        long,
        value_name = "FILE",
        requires = "from_points",
        help_heading = "Source"
    )]
    only: Option<PathBuf>,
    /// Running engine, such as http://127.0.0.1:8000: sends it loads and measures them
    #[arg(long, value_name = "URL", group = "source", help_heading = "Source")]
    engine: Option<String>,
    /// Requests of one engine: drag records of `slipstream bench`, or CSV or JSONL with arrival, lengths, TTFT and
    /// E2E (docs/calibrate.md)
    #[arg(long, value_name = "FILE", group = "source", help_heading = "Source")]
    requests: Option<PathBuf>,
    /// vLLM's /metrics, saved at intervals, in order
    #[arg(long, value_name = "FILE", group = "source", num_args = 1.., help_heading = "Source")]
    metrics: Vec<PathBuf>,
    /// Forward-pass metrics, as `slipstream events tail --json` prints them
    #[arg(long, value_name = "FILE", group = "source", help_heading = "Source")]
    fpm: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArgs,
    /// Write the result here: a profile (--from-points), a cluster file (--engine), else `[engine.timing]`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    out: Option<PathBuf>,
    /// Write the report here instead of to stdout (Markdown)
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormArg {
    /// As words
    Text,
    /// As token ids
    Tokens,
}

/// Flags of `--engine`.
#[derive(clap::Args)]
#[command(next_help_heading = "With --engine")]
struct LoadArgs {
    /// Print the loads, and send none
    #[arg(long, requires = "engine")]
    dry_run: bool,
    /// Stop starting requests after this long, all loads together
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = time)]
    max_duration: Duration,
    /// Most requests at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=1024))]
    max_concurrency: u32,
    /// Longest prompt, tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(128..=1_000_000))]
    max_prompt: u32,
    /// Timeout of a request
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    timeout: Duration,
    /// Model name [default: the first in the server's list]
    #[arg(long)]
    model: Option<String>,
    /// API key of the engine
    #[arg(
        long,
        value_name = "KEY",
        env = "SLIPSTREAM_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,
    /// Form of prompts
    #[arg(long, default_value = "text")]
    prompt_form: FormArg,
    /// Range of token ids for `--prompt-form tokens`, FIRST..END
    #[arg(long, value_name = "RANGE", default_value = "1000..30000", value_parser = super::bench::id_range)]
    token_ids: std::ops::Range<u32>,
    /// Seed of lengths and texts
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Measure although other clients use the engine
    #[arg(long)]
    shared: bool,
    /// Keep the records of the requests here (CSV, for --requests)
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
}

impl LoadArgs {
    fn options(&self) -> LoadOptions {
        LoadOptions {
            max_duration: self.max_duration,
            max_concurrency: self.max_concurrency,
            max_prompt: self.max_prompt,
            timeout: self.timeout,
            model: self.model.clone(),
            api_key: self.api_key.clone(),
            form: match self.prompt_form {
                FormArg::Text => PromptForm::Text,
                FormArg::Tokens => PromptForm::Tokens,
            },
            token_ids: self.token_ids.clone(),
            seed: self.seed,
        }
    }
}

/// Prints a note of the library.
fn note(text: &str) {
    errln!("note: {text}");
}

/// Time limit of an engine's answer to a question about itself.
const ASK: Duration = Duration::from_secs(10);

/// Fits, holds out, writes the result and its errors.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let (None, None, Some(unused)) = (&args.requests, &args.engine, args.cluster.first_given()) {
        anyhow::bail!(
            "{unused} has no effect here: only --requests and --engine read a cluster; leave it out"
        );
    }
    out::check_writable([
        ("keep", args.load.keep.as_deref()),
        ("out", args.out.as_deref()),
        ("report", args.report.as_deref()),
    ])?;
    if let Some(path) = &args.from_points {
        let fit = points::fit(path, args.only.as_deref(), &note)?;
        return write(args, &fit.report, &fit.profile.to_text());
    }
    if let Some(url) = &args.engine {
        return engine(url, args);
    }
    if let Some(path) = &args.requests {
        let Some(cluster) = args.cluster.resolve(&[])? else {
            return Ok(ExitCode::SUCCESS);
        };
        if args.cluster.file().is_none() {
            errln!(
                "note: without a cluster file the limits of the engine (max_num_seqs, max_num_batched_tokens, KV \
                 blocks) are the defaults; `slipstream describe URL` writes one"
            );
        }
        let records = records::read(path, &note)?;
        let fitted = replay::fit(&one_worker(cluster)?, &records, &records::fifths(&records))?;
        return finish(args, &fitted, &name(path), &fitted::toml("engine", &fitted));
    }
    let (observations, source) = if let Some(path) = &args.fpm {
        (steps::of_recording(path)?, name(path))
    } else {
        let names: Vec<String> = args.metrics.iter().map(|path| name(path)).collect();
        (steps::of_metrics(&args.metrics)?, names.join(", "))
    };
    let fitted = steps::fit(&observations)?;
    finish(args, &fitted, &source, &fitted::toml("engine", &fitted))
}

/// Measures a running engine.
fn engine(url: &str, args: &Args) -> anyhow::Result<ExitCode> {
    let key = args.load.api_key.as_deref();
    let client = slipstream_probe::Client::new(url, key, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let facts = runtime.block_on(slipstream_probe::ask_client(&client, ASK))?;
    let text = describe::cluster_file(std::slice::from_ref(&facts), None)?;
    let Some(cluster) = args.cluster.resolve_over(text)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let cluster = one_worker(cluster)?;
    let options = args.load.options();
    let loads = load::plan(&options, &cluster.pools[0].engine)?;
    if args.load.dry_run {
        out::print(&load::table(&loads, &options))?;
        return Ok(ExitCode::SUCCESS);
    }
    let before = runtime.block_on(load::ended(&client, ASK));
    if !args.load.shared {
        load::check_idle(&runtime, &client, url, ASK, &note)?;
    }
    let measured = load::send(url, &loads, &options, &|text| errln!("{text}"), &note)?;
    if !args.load.shared {
        let after = runtime.block_on(load::ended(&client, ASK));
        load::check_alone(before, after, measured.sent, url)?;
    }
    let records = records::checked(measured.records)?;
    if let Some(path) = &args.load.keep {
        std::fs::write(path, records::csv(&records))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let names: Vec<String> = loads.iter().map(|load| load.name.to_owned()).collect();
    let parts = records::by_part(&records, names);
    let fitted = replay::fit(&cluster, &records, &parts)?;
    let text = if args.cluster.file().is_some() {
        fitted::toml("engine", &fitted)
    } else {
        let timing = fitted::toml("pool.main.engine", &fitted);
        describe::cluster_file(std::slice::from_ref(&facts), Some(&timing))?
    };
    finish(args, &fitted, url, &text)
}

fn finish(
    args: &Args,
    fitted: &fitted::Fitted,
    source: &str,
    text: &str,
) -> anyhow::Result<ExitCode> {
    write(args, &fitted::report(fitted, source), text)
}

/// Writes the result, and prints the report.
fn write(args: &Args, report: &str, result: &str) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.out {
        std::fs::write(path, result).with_context(|| format!("writing {}", path.display()))?;
    }
    match &args.report {
        None => out::print(report)?,
        Some(path) => {
            std::fs::write(path, report).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
