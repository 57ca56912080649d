//! `slipstream events cached`: how much of a prompt an engine has cached, by its KV events.

use std::io::BufRead;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use slipstream_fleet::cached::CacheView;
use slipstream_probe::ask_client;
use tokio::sync::mpsc;

use super::client_args::ClientArgs;
use crate::cmd::workload_args::time;
use crate::out;

/// Flags of `slipstream events cached`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The engine, such as http://gpu1:8000. Prompts are read from stdin, one JSON object per line:
    /// {"tokens": [1, 2, 3], "lora": "name", "salt": "text"}, the last two optional
    #[arg(value_name = "URL")]
    url: String,
    #[command(flatten)]
    client: ClientArgs,
    /// Tokens per block of the index [default: the engine's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    block_size: Option<u32>,
    /// Time limit of each request for the engine's facts
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10s")]
    timeout: Duration,
}

/// Follows the engine, and answers each line of the input by a line.
pub(crate) async fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let client = args.client.client(&args.url)?;
    let facts = ask_client(&client, args.timeout).await?;
    let view = CacheView::follow(&facts, args.block_size)?;
    errln!(
        "following {} of {}; one prompt per line",
        slipstream_base::text::counted(view.ranks() as u64, "rank"),
        facts.url
    );
    // Reading a terminal blocks, and cannot be interrupted.
    let (send, mut lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if send.blocking_send(line).is_err() {
                return;
            }
        }
    });
    let mut failed = false;
    while let Some(line) = lines.recv().await {
        let line = line.context("reading stdin")?;
        if line.trim().is_empty() {
            continue;
        }
        let answer = view.cached(&line).unwrap_or_else(|what| {
            failed = true;
            json!({"error": what})
        });
        out::print(&format!("{answer}\n"))?;
    }
    Ok(ExitCode::from(u8::from(failed)))
}
