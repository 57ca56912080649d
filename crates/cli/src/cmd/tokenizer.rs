//! `slipstream tokenizer`: exports the built-in tokenizer for other tools, renders chats, and compares tokenizers.

use std::fs;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use slipstream_frontend::openai::{agreement, render_chat_body};
use slipstream_frontend::text::{ChatRenderer, TextModel, builtin_files};
use slipstream_probe::ask_client;

use super::client_args::ClientArgs;
use crate::cmd::workload_args::time;
use crate::out;

/// Flags of `slipstream tokenizer`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Write the built-in tokenizer in Hugging Face's format, with its chat template
    Export {
        /// Directory to write to; created if it does not exist
        dir: PathBuf,
        /// Replace existing files
        #[arg(long)]
        force: bool,
    },
    /// Render chats with a chat template
    ///
    /// Reads bodies of /tokenize from stdin, one per line, with `messages` and optionally `tools`,
    /// `chat_template_kwargs` and so on. Prints a line {"prompt": …} or {"error": …} for each.
    Render {
        /// Folder with a chat template [default: each line's `chat_template`]
        dir: Option<PathBuf>,
    },
    /// Compare a tokenizer and its chat template with a running engine's
    Check(CheckArgs),
}

/// Flags of `slipstream tokenizer check`.
#[derive(clap::Args)]
struct CheckArgs {
    /// The engine, such as http://gpu1:8000
    url: String,
    /// Folder with `tokenizer.json` and, for chat, a template [default: the built-in tokenizer]
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    client: ClientArgs,
    /// Time limit of each request to the engine
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10s")]
    timeout: Duration,
}

/// Runs `slipstream tokenizer`.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Export { dir, force } => export(dir, *force),
        Command::Render { dir } => render(dir.as_deref()),
        Command::Check(args) => tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(check(args)),
    }
}

/// Compares sample by sample. Exits with 1 if any differs.
async fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let text = match &args.tokenizer {
        Some(dir) => TextModel::load(dir).with_context(|| format!("loading {}", dir.display()))?,
        None => TextModel::builtin(),
    };
    let client = args.client.client(&args.url)?;
    let facts = ask_client(&client, args.timeout).await?;
    let model = facts.base_model().context("the engine lists no model")?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let mut all_agree = true;
    for sample in agreement::samples(&text, &model.id, now.as_secs()) {
        let body = sample.body.clone();
        let answer = client.post_json("/tokenize", body, args.timeout).await?;
        let found = sample.compare(answer.status, &answer.body);
        all_agree &= found.agrees();
        out::print(&format!("{}: {found}\n", sample.name))?;
    }
    Ok(ExitCode::from(u8::from(!all_agree)))
}

/// Renders line by line. Exits with 1 if any failed.
fn render(dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let mut renderer = match dir {
        Some(dir) => ChatRenderer::load(dir)?,
        None => ChatRenderer::default(),
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let mut all_render = true;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("reading a chat from stdin")?;
        if line.trim().is_empty() {
            continue;
        }
        let shown = match render_chat_body(&mut renderer, line.as_bytes(), now.as_secs()) {
            Ok(prompt) => serde_json::json!({ "prompt": prompt }),
            Err(error) => {
                all_render = false;
                serde_json::json!({ "error": error })
            }
        };
        out::print_json(&format!("{shown}\n"))?;
    }
    Ok(ExitCode::from(u8::from(!all_render)))
}

fn export(dir: &Path, force: bool) -> anyhow::Result<ExitCode> {
    let files = builtin_files();
    if !force && let Some((name, _)) = files.iter().find(|(name, _)| dir.join(name).exists()) {
        bail!(
            "{} exists; use another directory, or replace it with --force",
            dir.join(name).display()
        );
    }
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    for (name, content) in files {
        let path = dir.join(name);
        fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
        out::print(&format!("{}\n", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
