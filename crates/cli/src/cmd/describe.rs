//! `slipstream describe`: a cluster file from what a running engine reports.

use std::process::ExitCode;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use slipstream_fleet::describe::cluster_file;
use slipstream_probe::ask_client;

use super::client_args::ClientArgs;
use crate::cmd::workload_args::time;
use crate::out;

/// Flags of `slipstream describe`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Running engines of one model, such as http://gpu1:8000
    #[arg(required = true, value_name = "URL", value_parser = NonEmptyStringValueParser::new())]
    urls: Vec<String>,
    #[command(flatten)]
    client: ClientArgs,
    /// Time limit of each request to an engine
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10s")]
    timeout: Duration,
    /// Print every fact as JSON instead of a cluster file
    #[arg(long)]
    json: bool,
}

/// Asks the engines, and prints a cluster file.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let facts = runtime.block_on(async {
        let mut facts = Vec::new();
        for url in &args.urls {
            let client = args.client.client(url)?;
            facts.push(ask_client(&client, args.timeout).await?);
        }
        anyhow::Ok(facts)
    })?;
    if args.json {
        out::print_json(&format!("{}\n", serde_json::to_string_pretty(&facts)?))?;
    } else {
        out::print(&cluster_file(&facts, None)?)?;
    }
    Ok(ExitCode::SUCCESS)
}
