//! `slipstream calibrate`: fits step times to measurements, with their error on held-out parts.
//!
//! ```text
//!  --from-points ─► points ─────────────────────────────► a profile of many deployments
//!  --engine ──────► load (sends, records) ─┐
//!  --requests ────► records ───────────────┼─► replay ─► the terms of one engine
//!  --metrics, --fpm ─► steps ──────────────┘
//! ```

mod fitted;
mod load;
mod points;
mod records;
mod replay;
mod steps;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use slipstream_config::cluster::Cluster;

use crate::cmd::cluster_args::ClusterArgs;
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
    load: load::LoadArgs,
    /// Write the result here: a profile (--from-points), a cluster file (--engine), else `[engine.timing]`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    out: Option<PathBuf>,
    /// Write the report here instead of to stdout (Markdown)
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    report: Option<PathBuf>,
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
    if let Some(path) = &args.from_points {
        return points::run(path, args);
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
        let records = records::read(path)?;
        let fitted = replay::fit(&one_worker(cluster)?, &records, &records::fifths(&records))?;
        return finish(args, &fitted, &name(path), fitted::toml("engine", &fitted));
    }
    let (observations, source) = if let Some(path) = &args.fpm {
        (steps::of_recording(path)?, name(path))
    } else {
        let names: Vec<String> = args.metrics.iter().map(|path| name(path)).collect();
        (steps::of_metrics(&args.metrics)?, names.join(", "))
    };
    let fitted = steps::fit(&observations)?;
    finish(args, &fitted, &source, fitted::toml("engine", &fitted))
}

/// Measures a running engine.
fn engine(url: &str, args: &Args) -> anyhow::Result<ExitCode> {
    let key = args.load.api_key.as_deref();
    let client = slipstream_probe::Client::new(url, key, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let facts = runtime.block_on(slipstream_probe::ask_client(&client, ASK))?;
    let text = super::describe::cluster_file(std::slice::from_ref(&facts), None)?;
    let Some(cluster) = args.cluster.resolve_over(text)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let cluster = one_worker(cluster)?;
    let loads = load::plan(&args.load, &cluster.pools[0].engine)?;
    if args.load.dry_run {
        out::print(&load::table(&loads, &args.load))?;
        return Ok(ExitCode::SUCCESS);
    }
    let before = runtime.block_on(load::ended(&client, ASK));
    if !args.load.shared {
        load::check_idle(&runtime, &client, url)?;
    }
    let measured = load::send(url, &loads, &args.load)?;
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
        super::describe::cluster_file(std::slice::from_ref(&facts), Some(&timing))?
    };
    finish(args, &fitted, url, text)
}

/// Writes the result, and prints the report.
fn finish(
    args: &Args,
    fitted: &fitted::Fitted,
    source: &str,
    text: String,
) -> anyhow::Result<ExitCode> {
    let report = fitted::report(fitted, source);
    if let Some(path) = &args.out {
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    match &args.report {
        None => out::print(&report)?,
        Some(path) => {
            std::fs::write(path, report).with_context(|| format!("writing {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// `cluster`, if it is one engine.
fn one_worker(mut cluster: Cluster) -> anyhow::Result<Cluster> {
    anyhow::ensure!(
        cluster.pools.len() == 1,
        "the cluster has {} pools; records of one engine are needed, so name a cluster file with one",
        cluster.pools.len()
    );
    anyhow::ensure!(
        cluster.pools[0].engine.data_parallel_size <= 1,
        "`engine.data_parallel_size` is {}; ranks share one server's time, which is not told apart here: \
         calibrate an engine of one rank",
        cluster.pools[0].engine.data_parallel_size
    );
    cluster.pools[0].workers = 1;
    cluster.pools[0].autoscale = None;
    cluster.events.clear();
    Ok(cluster)
}

fn name(path: &Path) -> String {
    path.file_name()
        .map_or(String::new(), |n| n.to_string_lossy().into_owned())
}
