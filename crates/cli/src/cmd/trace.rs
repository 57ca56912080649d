//! `slipstream trace`: what a trace is like.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use slipstream_base::workload_file::{Arrival, Content, OnBadLine, TraceFile, Workload};
use slipstream_report::table::{Table, grouped, number};
use slipstream_workload::Source;
use slipstream_workload::stats::Stats;

use crate::cmd::workload_args::{BadLineArg, time};
use crate::out;

/// Rows of the table over time at most; longer traces get longer windows.
const WINDOWS_MAX: u64 = 40;

/// Flags of `slipstream trace`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Rates, lengths, ideal prefix hits and working set of a trace
    Stats {
        /// Mooncake's JSONL, Azure's or BurstGPT's CSV
        file: PathBuf,
        /// Tokens per block
        #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
        block_size: u32,
        /// Tokens that one of `hash_ids` stands for
        #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
        tokens_per_id: u32,
        /// Length of a row of the table over time [default: 60s, or as many as give 40 rows]
        #[arg(long, value_name = "TIME", value_parser = time)]
        window: Option<Duration>,
        /// Requests to look at [default: all]
        #[arg(long, value_name = "N")]
        requests: Option<u64>,
        /// What to do with a line that is not a request
        #[arg(long, value_name = "WHAT", default_value = "stop")]
        on_bad_line: BadLineArg,
    },
}

/// Prints.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Action::Stats {
        file,
        block_size,
        tokens_per_id,
        window,
        requests,
        on_bad_line,
    } = &args.action;
    let workload = Workload {
        requests: *requests,
        arrival: Arrival::Trace,
        content: Content::Trace(TraceFile {
            path: file.clone(),
            on_bad_line: match on_bad_line {
                BadLineArg::Stop => OnBadLine::Stop,
                BadLineArg::Skip => OnBadLine::Skip,
            },
            tokens_per_id: *tokens_per_id,
        }),
        ..Workload::default()
    };
    let minute = Duration::from_secs(60).as_nanos() as u64;
    let window_ns = window.map_or(minute, |w| w.as_nanos() as u64).max(1);
    let mut source = Source::open(&workload, 0)?;
    let mut stats = Stats::new(*block_size, window_ns);
    for request in source.by_ref() {
        stats.add(&request?);
    }
    out::print(&render(
        &mut stats,
        *block_size,
        window_ns,
        window.is_none(),
    ))?;
    if source.skipped_lines() > 0 {
        eprintln!(
            "note: {} lines were skipped",
            grouped(source.skipped_lines())
        );
    }
    Ok(if stats.requests() == 0 {
        eprintln!("note: the trace holds no request");
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn render(stats: &mut Stats, block_size: u32, window_ns: u64, may_join: bool) -> String {
    let seconds = stats.duration().as_secs_f64();
    let [input, output] = stats.tokens();
    let per_s = |count: u64| number(count as f64 / seconds.max(1e-9));
    let share = |part: u64, of: u64| number(100.0 * part as f64 / of.max(1) as f64);
    let mut text = format!(
        "{} requests in {} s: {} a second, {} prompt and {} answer tokens a second\n\
         ideal prefix hits {} % of prompt tokens, in blocks of {block_size} and an endless cache\n\
         {} distinct blocks, {} tokens\n\n",
        grouped(stats.requests()),
        number(seconds),
        per_s(stats.requests()),
        per_s(input),
        per_s(output),
        share(stats.ideal_hit_tokens(), input),
        grouped(stats.blocks()),
        grouped(stats.blocks() * u64::from(block_size)),
    );
    let mut lengths = Table::new(["tokens", "mean", "min", "p50", "p90", "p99", "max"]);
    for (name, l) in ["prompts", "answers"].into_iter().zip(stats.lengths()) {
        let at = l.at.map(|n| grouped(n.into()));
        lengths.row([name.to_owned(), number(l.mean)].into_iter().chain(at));
    }
    text.push_str(&lengths.render(false));
    text.push('\n');
    let windows = stats.windows();
    // Sums of several windows; a working set is not a sum, so the largest of them is shown.
    let joined = if may_join {
        (windows.len() as u64).div_ceil(WINDOWS_MAX).max(1)
    } else {
        1
    };
    let width_s = window_ns as f64 / 1e9;
    let mut over_time = Table::new([
        "from, s",
        "requests/s",
        "prompt tokens/s",
        "hits %",
        "working set, blocks",
    ]);
    for (at, group) in windows.chunks(joined as usize).enumerate() {
        let sum = |get: fn(&slipstream_workload::stats::Window) -> u64| {
            group.iter().map(get).sum::<u64>()
        };
        let length = width_s * group.len() as f64;
        over_time.row([
            number(at as f64 * width_s * joined as f64),
            number(sum(|w| w.requests) as f64 / length),
            number(sum(|w| w.input_tokens) as f64 / length),
            share(sum(|w| w.hit_tokens), sum(|w| w.input_tokens)),
            grouped(group.iter().map(|w| w.blocks).max().unwrap_or(0)),
        ]);
    }
    text.push_str(&over_time.render(false));
    let most = if joined > 1 {
        ", the most of those in a row"
    } else {
        ""
    };
    let width = number(width_s);
    text + &format!("working set: distinct blocks asked for in {width} s{most}\n")
}
