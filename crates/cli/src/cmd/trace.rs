//! `slipstream trace`: summarizes and converts traces.

use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use slipstream_base::SimTime;
use slipstream_base::width::nanos;
use slipstream_config::workload_file::{Arrival, Content, OnBadLine, TraceFile, Workload};
use slipstream_report::latency::{TOO_FEW, enough_samples};
use slipstream_report::partial::Partial;
use slipstream_report::table::{Table, counted, grouped, number};
use slipstream_workload::mooncake::MooncakeWriter;
use slipstream_workload::schedule::Shard;
use slipstream_workload::stats::Stats;
use slipstream_workload::{Schedule, Source, write};

use crate::cmd::workload_args::{self, BadLineArg, TraceArgs, time};
use crate::out;

/// Limit of rows in the table over time, unless --window requests more; longer traces get longer
/// windows.
const WINDOWS_MAX: u64 = 40;

/// Limit of rows with --window.
const ROWS_MAX: u64 = 100_000;

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
        /// Mooncake's, Qwen-Bailian's or Slipstream's JSONL, or Azure's or BurstGPT's CSV
        file: PathBuf,
        /// Tokens per block
        #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65536))]
        block_size: u32,
        /// Tokens per entry of `hash_ids` [default: its format's]
        #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
        tokens_per_id: Option<u32>,
        /// Window of a row in the table over time [default: 60s, or longer to give 40 rows]
        #[arg(long, value_name = "TIME", value_parser = time)]
        window: Option<Duration>,
        /// Number of requests to read [default: all]
        #[arg(long, value_name = "N")]
        requests: Option<u64>,
        /// Handling of a line that is not a request
        #[arg(long, value_name = "WHAT", default_value = "stop")]
        on_bad_line: BadLineArg,
        #[command(flatten)]
        read_as: TraceArgs,
    },
    /// Convert a trace (or a workload file's requests) to another format
    Convert(Convert),
}

/// Flags of `slipstream trace convert`.
#[derive(clap::Args)]
struct Convert {
    /// A trace in any supported format, or a workload file (.toml)
    input: PathBuf,
    /// Output file [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Output format
    #[arg(long, value_name = "FORM", default_value = "slipstream")]
    to: Form,
    /// Tokens per entry of `hash_ids`, in input and output [default: the input's format's, and 512]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens_per_id: Option<u32>,
    /// Total number of requests, including later turns [default: all]
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// Seed for parameters that the input leaves open
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Handling of a line that is not a request
    #[arg(long, value_name = "WHAT")]
    on_bad_line: Option<BadLineArg>,
    #[command(flatten)]
    read_as: TraceArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Form {
    /// Slipstream's own: one session per line, texts by name
    Slipstream,
    /// Mooncake's: one request per line, with `hash_ids`
    Mooncake,
}

/// Summarizes, or converts.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Action::Stats {
        file,
        block_size,
        tokens_per_id,
        window,
        requests,
        on_bad_line,
        read_as,
    } = &args.action
    else {
        let Action::Convert(args) = &args.action else {
            unreachable!("there are two")
        };
        return convert(args);
    };
    let workload = Workload {
        requests: *requests,
        arrival: Arrival::Trace,
        content: Content::Trace(TraceFile {
            path: file.clone(),
            on_bad_line: (*on_bad_line).into(),
            tokens_per_id: *tokens_per_id,
            unit: read_as.trace_unit,
            columns: read_as.trace_columns.clone(),
        }),
        ..Workload::default()
    };
    workload_args::print_note(&workload);
    let minute = 60_000_000_000;
    let window_ns = window.map_or(minute, nanos);
    anyhow::ensure!(window_ns > 0, "--window is 0; use a duration, such as 60s");
    // Answers take no time here: later turns follow after their delay.
    let mut schedule = Schedule::open(&workload, 0, Shard::WHOLE)?;
    let mut stats = Stats::new(*block_size, window_ns);
    while let Some(due) = schedule.next_due(SimTime::ZERO)? {
        while let Some(request) = schedule.pop(due)? {
            stats.add(&request);
            schedule.on_done(&request, request.output_len, request.due);
        }
    }
    let rows = stats.duration().0 / window_ns + 1;
    anyhow::ensure!(
        window.is_none() || rows <= ROWS_MAX,
        "--window makes {} rows of the trace's {} s, and the limit is {}; use a longer one",
        grouped(rows),
        number(stats.duration().as_secs_f64()),
        grouped(ROWS_MAX)
    );
    out::print(&render(
        &mut stats,
        *block_size,
        window_ns,
        window.is_none(),
    ))?;
    if schedule.skipped_lines() > 0 {
        errln!(
            "note: {} skipped",
            counted(schedule.skipped_lines(), "line")
        );
    }
    Ok(if stats.requests() == 0 {
        errln!("note: the trace has no requests");
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn convert(args: &Convert) -> anyhow::Result<ExitCode> {
    out::check_writable([("out", args.out.as_deref())])?;
    let workload = workload_of(args)?;
    // Whether the trace is empty, and whether lines name sessions, is known before the file is
    // created.
    let follow_ups = Schedule::open(&workload, 0, Shard::WHOLE)?.may_follow_up()?;
    let mut source = Source::open(&workload, 0)?;
    let named = || match &args.out {
        Some(path) => path.display().to_string(),
        None => "stdout".to_owned(),
    };
    let (mut out, mut partial): (Box<dyn Write>, _) = match &args.out {
        Some(path) => {
            let (file, partial) = Partial::create(path).with_context(named)?;
            (Box::new(BufWriter::new(file)), Some(partial))
        }
        None => (Box::new(BufWriter::new(std::io::stdout().lock())), None),
    };
    let mut mooncake = MooncakeWriter::new(args.tokens_per_id.unwrap_or(512), follow_ups);
    let (mut sessions, mut requests) = (0u64, 0);
    let after = |sessions: u64| format!("{} after {}", named(), counted(sessions, "session"));
    while let Some(first) = source.next() {
        let scale = workload.time_scale;
        let written = match args.to {
            Form::Slipstream => write::write_session(&mut out, &source, first?, scale),
            Form::Mooncake => mooncake.write_session(&mut out, &source, first?, scale),
        };
        requests += written.with_context(|| after(sessions))?;
        sessions += 1;
    }
    out.flush()
        .and_then(|()| partial.as_mut().map_or(Ok(()), Partial::complete))
        .with_context(|| after(sessions))?;
    let skipped = match source.skipped_lines() {
        0 => String::new(),
        lines => format!(", {} skipped", counted(lines, "line")),
    };
    errln!(
        "{} in {} written{skipped}",
        counted(requests, "request"),
        counted(sessions, "session")
    );
    Ok(if requests == 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// The requests of the input, as the flags have them.
fn workload_of(args: &Convert) -> anyhow::Result<Workload> {
    let mut workload = if args.input.extension().is_some_and(|e| e == "toml") {
        workload_args::read(&args.input, &[])?.0
    } else {
        Workload {
            arrival: Arrival::Trace,
            content: Content::Trace(TraceFile {
                path: args.input.clone(),
                on_bad_line: OnBadLine::Stop,
                tokens_per_id: args.tokens_per_id,
                ..TraceFile::default()
            }),
            ..Workload::default()
        }
    };
    anyhow::ensure!(
        workload.models().is_empty(),
        "{}: the formats that are written have no models; remove `models`",
        args.input.display()
    );
    workload.requests = args.requests.or(workload.requests);
    workload.seed = args.seed.unwrap_or(workload.seed);
    let read_as = &args.read_as;
    if let Content::Trace(file) = &mut workload.content {
        file.on_bad_line = args.on_bad_line.map_or(file.on_bad_line, Into::into);
        file.columns = read_as.trace_columns.clone().or(file.columns.take());
        file.unit = read_as.trace_unit.or(file.unit);
        file.tokens_per_id = args.tokens_per_id.or(file.tokens_per_id);
    } else {
        anyhow::ensure!(
            args.on_bad_line.is_none()
                && read_as.trace_columns.is_none()
                && read_as.trace_unit.is_none(),
            "{}: it has no trace, so --on-bad-line, --trace-columns and --trace-unit do not apply",
            args.input.display()
        );
    }
    workload_args::print_note(&workload);
    anyhow::ensure!(
        !matches!(workload.arrival, Arrival::Closed { .. }),
        "{}: a closed loop has no arrival times to write; set another `arrival.kind`",
        args.input.display()
    );
    Ok(workload)
}

/// Percentiles of the length columns after the mean, between minimum and maximum.
const LENGTH_SHARES: [Option<f64>; 5] = [None, Some(0.5), Some(0.9), Some(0.99), None];

fn render(stats: &mut Stats, block_size: u32, window_ns: u64, may_join: bool) -> String {
    let seconds = stats.duration().as_secs_f64();
    let [input, output] = stats.tokens();
    let per_s = |count: u64| number(count as f64 / seconds.max(1e-9));
    let mut text = format!(
        "{} in {} s: {} a second, {} prompt and {} answer tokens a second\n\
         ideal prefix hits {} % of prompt tokens, in blocks of {block_size} and an endless cache\n\
         {}, {}\n\n",
        counted(stats.requests(), "request"),
        number(seconds),
        per_s(stats.requests()),
        per_s(input),
        per_s(output),
        share(stats.ideal_hit_tokens(), input),
        counted(stats.blocks(), "distinct block"),
        counted(stats.blocks() * u64::from(block_size), "token"),
    );
    let requests = stats.requests();
    let mut lengths = Table::new(["tokens", "mean", "min", "p50", "p90", "p99", "max"]);
    for (name, l) in ["prompts", "answers"].into_iter().zip(stats.lengths()) {
        let at = l.at.into_iter().zip(LENGTH_SHARES).map(|(n, share)| {
            if share.is_none_or(|share| enough_samples(share, requests)) {
                grouped(n.into())
            } else {
                "-".to_owned()
            }
        });
        lengths.row([name.to_owned(), number(l.mean)].into_iter().chain(at));
    }
    text.push_str(&lengths.render(false));
    if !enough_samples(0.99, requests) {
        text.push_str(TOO_FEW);
        text.push('\n');
    }
    text.push('\n');
    let (over_time, joined) = over_time(stats, window_ns, may_join);
    text.push_str(&over_time.render(false));
    let most = if joined > 1 {
        ", the maximum over the windows of a row"
    } else {
        ""
    };
    let width = number(window_ns as f64 / 1e9);
    text + &format!("working set: distinct blocks requested in {width} s{most}\n")
}

/// Part in percent.
fn share(part: u64, of: u64) -> String {
    number(100.0 * part as f64 / of.max(1) as f64)
}

/// A row for each window, or for as many windows together as a table has room for; and how many that are.
fn over_time(stats: &Stats, window_ns: u64, may_join: bool) -> (Table, u64) {
    let windows = stats.windows();
    let length_ns = stats.duration().0.saturating_add(1);
    // Totals of several windows; a working set is not additive, so the largest is shown.
    let joined = if may_join {
        length_ns.div_ceil(window_ns).div_ceil(WINDOWS_MAX)
    } else {
        1
    };
    let row_ns = window_ns.saturating_mul(joined);
    let mut over_time = Table::new([
        "from, s",
        "requests/s",
        "prompt tokens/s",
        "hits %",
        "working set, blocks",
    ]);
    let mut rest = windows;
    for row in 0..length_ns.div_ceil(row_ns) {
        let end = (row + 1).saturating_mul(joined);
        let (group, after) = rest.split_at(rest.partition_point(|(number, _)| *number < end));
        rest = after;
        let sum = |get: fn(&slipstream_workload::stats::Window) -> u64| {
            group.iter().map(|(_, w)| get(w)).sum::<u64>()
        };
        let begin_ns = row * row_ns;
        // The last row ends with the trace.
        let length_s = row_ns.min(length_ns - begin_ns) as f64 / 1e9;
        let per_s = |count: u64| number(count as f64 / length_s);
        over_time.row([
            number(begin_ns as f64 / 1e9),
            per_s(sum(|w| w.requests)),
            per_s(sum(|w| w.input_tokens)),
            share(sum(|w| w.hit_tokens), sum(|w| w.input_tokens)),
            grouped(group.iter().map(|(_, w)| w.blocks).max().unwrap_or(0)),
        ]);
    }
    (over_time, joined)
}
