//! `slipstream bench`: loads an OpenAI endpoint and reports latency and throughput as its clients
//! measure them.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use clap::{Subcommand, ValueEnum};
use slipstream_base::text::several;
use slipstream_bench::{Config, Endpoint, Outcome, Progress, PromptForm, Target};
use slipstream_report::html::run::RunPage;
use slipstream_report::run::ProcessCost;
use slipstream_report::table::{color_wanted, grouped, number};
use slipstream_report::{Objectives, Slo};
use slipstream_report::{RunReport, compare};
use slipstream_workload::Vocabulary;

use crate::cmd::bench_sweep::{self, SweepArgs};
use crate::cmd::workload_args::{self, WorkloadArgs};
use crate::out;

/// Flags of `slipstream bench`.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    load: Load,
}

#[derive(Subcommand)]
enum Action {
    /// Compare saved runs, with ratios to the first
    Compare {
        /// Files that `slipstream bench --out` wrote
        #[arg(required = true, num_args = 2..)]
        runs: Vec<PathBuf>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum EndpointArg {
    /// /v1/completions: prompts have the exact length
    Completions,
    /// /v1/chat/completions: the server's template adds tokens
    Chat,
}

#[derive(Clone, Copy, ValueEnum)]
enum FormArg {
    /// As words
    Text,
    /// As token ids (completions only)
    Tokens,
}

#[derive(clap::Args)]
pub(super) struct Load {
    /// Server, such as http://127.0.0.1:8000
    #[arg(required_unless_present = "print_config")]
    url: Option<String>,

    #[command(flatten)]
    pub(super) what: WorkloadArgs,
    /// Set a key of the workload file, such as arrival.rate_per_s=20; may be repeated
    #[arg(
        long = "workload-set",
        alias = "set",
        value_name = "KEY=VALUE",
        requires = "workload",
        help_heading = "Workload"
    )]
    set: Vec<String>,
    /// Print the workload's effective values with their origins, and exit
    #[arg(long, requires = "workload", help_heading = "Workload")]
    print_config: bool,

    #[command(flatten)]
    client: ClientSettings,
    #[command(flatten)]
    pub(super) sweep: SweepArgs,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

/// How requests are sent.
#[derive(clap::Args)]
struct ClientSettings {
    /// Endpoint to load
    #[arg(long, default_value = "completions", help_heading = "Client")]
    endpoint: EndpointArg,
    /// Form of prompts
    #[arg(long, default_value = "text", help_heading = "Client")]
    prompt_form: FormArg,
    /// Range of token ids for `--prompt-form tokens`, FIRST..END
    #[arg(long, value_name = "RANGE", default_value = "1000..30000", value_parser = id_range, help_heading = "Client")]
    token_ids: std::ops::Range<u32>,
    /// Model name [default: the first in the server's list]
    #[arg(long, help_heading = "Client")]
    model: Option<String>,
    /// API key
    #[arg(
        long,
        env = "SLIPSTREAM_API_KEY",
        hide_env_values = true,
        help_heading = "Client"
    )]
    api_key: Option<String>,
    /// Additional header, such as "x-tenant: a"; may be repeated
    #[arg(long = "header", value_name = "HEADER", value_parser = header, help_heading = "Client")]
    headers: Vec<String>,
    /// Request whole answers instead of streams
    #[arg(long, help_heading = "Client")]
    no_stream: bool,
    /// Warm-up requests before the measurement, with different texts
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Client")]
    warmup: u64,
    /// Timeout of a request
    #[arg(long, value_name = "TIME", default_value = "600s", value_parser = workload_args::time, help_heading = "Client")]
    timeout: Duration,
    /// Timeout of a connection attempt
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = workload_args::time, help_heading = "Client")]
    connect_timeout: Duration,
    /// Client retries of requests that are answered 429 or 503
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Client")]
    retries: u32,
    /// Limit of requests in flight; further ones wait, and their wait counts
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Client")]
    max_in_flight: u64,
    /// Threads of the load generator
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256), help_heading = "Client")]
    threads: u32,
    /// Wait this long for the server to start
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = workload_args::time, help_heading = "Client")]
    wait_ready: Duration,
}

/// What is measured, and where it is written.
#[derive(clap::Args)]
pub(super) struct OutputArgs {
    /// Objectives for goodput, such as ttft=1s,itl=50ms
    #[arg(long, value_name = "SLO", help_heading = "Output")]
    pub(super) slo: Option<Slo>,
    /// Name of the run in tables
    #[arg(long, value_name = "NAME", help_heading = "Output")]
    label: Option<String>,
    /// Print JSON (docs/results.md)
    #[arg(long, help_heading = "Output")]
    pub(super) json: bool,
    /// Save the JSON form, for `slipstream bench compare`
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) out: Option<PathBuf>,
    /// Write one drag record per request to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) drag: Option<PathBuf>,
    /// Write the run over time to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) series: Option<PathBuf>,
    /// Write a self-contained HTML page with plots to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(super) html: Option<PathBuf>,
    /// Request stage times from a Slipstream server; for --drag
    #[arg(long, requires = "drag", help_heading = "Output")]
    trace_stages: bool,
    /// Server process whose CPU time and memory are measured; may be repeated
    #[arg(long = "server-pid", value_name = "PID", help_heading = "Output")]
    server_pids: Vec<u32>,
    /// Do not read the server's /metrics
    #[arg(long, help_heading = "Output")]
    no_metrics: bool,
    /// Do not print progress
    #[arg(long, help_heading = "Output")]
    pub(super) quiet: bool,
}

/// Runs a workload, or compares saved runs.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.action {
        Some(Action::Compare { runs }) => compare_runs(runs),
        None => load(&args.load),
    }
}

fn compare_runs(files: &[PathBuf]) -> anyhow::Result<ExitCode> {
    let read = |path: &PathBuf| -> anyhow::Result<RunReport> {
        let named = || path.display().to_string();
        let text = super::files::read_text(path).with_context(named)?;
        RunReport::from_json(&text).with_context(named)
    };
    let runs = files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let no_color = std::env::var_os("NO_COLOR");
    let color = color_wanted(std::io::stdout().is_terminal(), no_color.as_deref());
    out::print(&compare::render(&runs, color))?;
    Ok(ExitCode::SUCCESS)
}

fn load(args: &Load) -> anyhow::Result<ExitCode> {
    if args.print_config {
        let source = args.what.source(&args.set);
        out::print(&source.text(args.output.slo.as_ref())?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let config = config(args)?;
    out::check_writable([
        ("out", args.output.out.as_deref()),
        ("drag", args.output.drag.as_deref()),
        ("series", args.output.series.as_deref()),
        ("html", args.output.html.as_deref()),
    ])?;
    if args.sweep.sweep {
        return bench_sweep::run(args);
    }
    let shows = std::io::stderr().is_terminal() && !args.output.quiet;
    let mut last = Progress::default();
    let outcome = slipstream_bench::run(config, &mut |progress| {
        if shows {
            show_progress(progress, &last);
            last = *progress;
        }
    });
    if shows {
        err!("\r\x1b[K");
    }
    let mut outcome = outcome?;
    for note in &outcome.notes {
        errln!("note: {note}");
    }
    if outcome.interrupted {
        errln!("note: interrupted; figures cover the requests that ended before");
    }
    let failures = save(args, &mut outcome)?;
    let report = &outcome.report;
    if args.output.json {
        out::print_json(&report.to_json())?;
    } else {
        out::print(&report.render())?;
    }
    out::complain(&failures);
    let failed = !failures.is_empty()
        || report.requests.failed > 0
        || outcome.interrupted
        || report.requests.sent == 0;
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// The load that the flags describe.
pub(super) fn config(args: &Load) -> anyhow::Result<Config> {
    for (at, pid) in args.output.server_pids.iter().enumerate() {
        // Its CPU time would count twice.
        ensure!(
            !args.output.server_pids[..at].contains(pid),
            "--server-pid {pid} is there twice; keep one"
        );
    }
    let (mut workload, mut name) = args.what.workload(&args.set)?;
    workload_args::print_note(&workload);
    let what = &args.what;
    if what.workload.is_none() && what.trace.is_none() && what.seed.is_none() {
        // New texts: with those of the last run the server would answer from its cache.
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        workload.seed = u64::from(since.unwrap_or_default().subsec_nanos());
        name = format!("{name} seed {}", workload.seed);
    }
    let url = args.url.as_deref().unwrap_or_default();
    let objectives = Objectives::of(&workload, args.output.slo.clone());
    Ok(Config {
        target: Target::resolve(url)?,
        endpoint: match args.client.endpoint {
            EndpointArg::Completions => Endpoint::Completions,
            EndpointArg::Chat => Endpoint::Chat,
        },
        form: match args.client.prompt_form {
            FormArg::Text => PromptForm::Text,
            FormArg::Tokens => PromptForm::Tokens,
        },
        stream: !args.client.no_stream,
        model: args.client.model.clone(),
        api_key: args.client.api_key.clone(),
        headers: args.client.headers.clone(),
        label: args.output.label.clone().unwrap_or_else(|| name.clone()),
        workload,
        workload_name: name,
        vocabulary: Vocabulary::english(),
        token_ids: args.client.token_ids.clone(),
        slo: objectives,
        series: args.output.html.is_some() || args.output.series.is_some(),
        warmup: args.client.warmup,
        timeout: args.client.timeout,
        connect_timeout: args.client.connect_timeout,
        threads: args.client.threads,
        in_flight_max: args.client.max_in_flight,
        retries: args.client.retries,
        drag: args.output.drag.clone(),
        trace_stages: args.output.trace_stages,
        server_pids: args.output.server_pids.clone(),
        scrape_metrics: !args.output.no_metrics,
        wait_ready: args.client.wait_ready,
        catch_interrupt: true,
    })
}

/// Writes the files that the flags name. Returns what failed.
fn save(args: &Load, outcome: &mut Outcome) -> anyhow::Result<Vec<String>> {
    let report = &outcome.report;
    let mut failures = Vec::new();
    if let (Some(error), Some(path)) = (outcome.drag_failure.take(), &args.output.drag) {
        failures.push(out::incomplete(path, &error.into()));
    }
    if let Some(path) = &args.output.out {
        failures.extend(out::save(path, &report.to_json()));
    }
    if let (Some(path), Some(series)) = (&args.output.series, &outcome.series)
        && let Err(error) = series.save(path)
    {
        failures.push(out::incomplete(path, &error.into()));
    }
    if let Some(path) = &args.output.html {
        let page = page(args, outcome)?;
        failures.extend(out::save(path, &page));
    }
    Ok(failures)
}

fn page(args: &Load, outcome: &Outcome) -> anyhow::Result<String> {
    let mut warnings = outcome.notes.clone();
    if outcome.interrupted {
        warnings.push("interrupted; figures cover the requests that ended before".into());
    }
    let report = &outcome.report;
    let cost = |cost: &ProcessCost| {
        format!(
            "{} CPU-s, {} µs per request, {} µs per output token",
            number(cost.cpu_s),
            number(cost.cpu_us_per_request),
            number(cost.cpu_us_per_token)
        )
    };
    let mut facts = vec![("command".to_owned(), out::command_line())];
    for (name, process) in [("load generator", report.client), ("server", report.server)] {
        facts.extend(process.map(|process| (name.to_owned(), cost(&process))));
    }
    let page = RunPage {
        title: "Live run",
        report,
        distributions: &outcome.distributions,
        series: outcome.series.as_deref(),
        slo: args.output.slo.as_ref(),
        events: Vec::new(),
        warnings,
        facts,
        texts: vec![(
            "Workload".into(),
            args.what.source(&args.set).text(args.output.slo.as_ref())?,
        )],
    };
    Ok(page.render())
}

pub(super) fn show_progress(now: &Progress, last: &Progress) {
    let seconds = (now.elapsed_ns.saturating_sub(last.elapsed_ns)) as f64 / 1e9;
    let rate = if seconds > 0.0 {
        now.events.saturating_sub(last.events) as f64 / seconds
    } else {
        0.0
    };
    let of = now
        .total
        .map_or(String::new(), |t| format!(" of {}", grouped(t)));
    let what = if now.warming_up { "warm-up: " } else { "" };
    let failed = if now.failed > 0 {
        format!(", {} failed", grouped(now.failed))
    } else {
        String::new()
    };
    let mut stderr = std::io::stderr().lock();
    // A closed terminal must not end the run.
    let _ = write!(
        stderr,
        "\r\x1b[K{what}{}{of} {} ended{failed}, {} in flight, {} tokens/s",
        grouped(now.ended),
        several(now.total.unwrap_or(now.ended), "request"),
        grouped(now.in_flight),
        number(rate)
    );
    let _ = stderr.flush();
}

pub(super) fn id_range(text: &str) -> Result<std::ops::Range<u32>, String> {
    let wrong = || format!("`{text}` is not FIRST..END with FIRST below END, such as 1000..30000");
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    let first = first.parse().map_err(|_| wrong())?;
    let end = end.parse().map_err(|_| wrong())?;
    if first < end {
        Ok(first..end)
    } else {
        Err(wrong())
    }
}

fn header(text: &str) -> Result<String, String> {
    let name_ok = |name: &str| {
        !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    match text.split_once(':') {
        Some((name, value)) if name_ok(name) && !value.contains(|c: char| c.is_control()) => {
            Ok(text.to_owned())
        }
        _ => Err(format!("`{text}` is not a header; expected NAME: VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use slipstream_frontend::text::TextModel;

    /// The precondition for exact prompt lengths on Slipstream's own server.
    #[test]
    fn every_word_of_a_prompt_is_one_token_of_the_built_in_tokenizer() {
        let (vocabulary, model) = (Vocabulary::english(), TextModel::builtin());
        // 20,000 draws over fewer than 400 words miss none (probability below 1e-18).
        let (mut text, mut tokens) = (String::new(), Vec::new());
        vocabulary.write_text(1, 20_000, &mut text);
        model.encode(&text, false, &mut tokens);
        assert_eq!(tokens.len(), 20_000);
    }

    #[derive(clap::Parser)]
    struct Alone {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_process_is_measured_once() {
        let flags = ["bench", "http://127.0.0.1:1", "--rate=1", "--server-pid=5"];
        let again = ["--server-pid=7", "--server-pid=5"];
        let load = Alone::parse_from([&flags[..], &again].concat()).args.load;
        let error = config(&load).err().unwrap().to_string();
        assert!(error.contains("--server-pid 5 is there twice"), "{error}");
    }

    #[test]
    fn flags_that_are_not_what_they_should_be_say_so() {
        assert_eq!(id_range("5..9"), Ok(5..9));
        for bad in ["9..5", "5", "a..b", "5..5"] {
            assert!(id_range(bad).unwrap_err().contains("FIRST..END"));
        }
        assert!(header("x-a: 1").is_ok());
        for bad in ["x-a", ": 1", "x a: 1", "x-a: 1\r\nx-b: 2"] {
            assert!(header(bad).unwrap_err().contains("NAME: VALUE"));
        }
    }
}
