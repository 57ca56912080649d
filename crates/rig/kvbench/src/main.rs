//! `slipstream-kvbench`: benchmarks keys, tiers, and transfers of KV blocks on this host, against targets.

mod measure;

use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use serde_json::json;
use slipstream_kvstore::Address;
use slipstream_report::table::{Table, Tone, color_wanted};

use measure::{Options, Row};

/// Benchmarks keys, tiers, and transfers between two processes, against targets; exits with 1 if a block has the wrong
/// content.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Parts to measure
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "keys,tiers,transfers"
    )]
    part: Vec<Measurement>,
    /// Multiplies the number of repetitions
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Time that transport threads poll before they sleep, us; 0: no polling
    #[arg(long, default_value_t = 50)]
    spin_us: u64,
    /// Benchmark NIXL transfers too: path of its `libnixl_capi.so`
    #[arg(long, env = "SLIPSTREAM_NIXL_LIBRARY", value_name = "FILE")]
    nixl: Option<PathBuf>,
    /// Folder for files and sockets [default: a temporary one]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Exit with 1 if a target is missed on an idle host
    #[arg(long)]
    strict: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The other process of a bench
    #[arg(long, hide = true)]
    serve: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Measurement {
    Keys,
    Tiers,
    Transfers,
}

fn main() -> ExitCode {
    run(&Args::parse()).unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "error: {error:#}");
        let is_wrong = is_wrong_data(&error);
        ExitCode::from(if is_wrong { 1 } else { 2 })
    })
}

fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let options = Options {
        scale: args.scale,
        spin: Duration::from_micros(args.spin_us),
        nixl: args.nixl.clone(),
    };
    anyhow::ensure!(
        args.scale > 0.0 && args.scale.is_finite(),
        "--scale is {}; use a number above 0",
        args.scale
    );
    if args.serve {
        let folder = args.folder.as_deref().unwrap_or(Path::new("."));
        measure::serve(&options, folder, std::io::stdin(), std::io::stdout())?;
        return Ok(ExitCode::SUCCESS);
    }
    let own = tempfile::tempdir().context("creating a temporary folder")?;
    let folder = args.folder.as_deref().unwrap_or(own.path());
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let before = CpuTimes::now();
    let rows = measure_parts(args, &options, folder)?;
    let others = CpuTimes::now().share_of_others(&before);
    let busy = others > OTHERS_MAX;
    let missed = rows
        .iter()
        .filter(|row| row.is_met() == Some(false))
        .count();
    let text = if args.json {
        let rows: Vec<_> = rows.iter().map(as_json).collect();
        let all = json!({
            "scale": args.scale, "spin_us": args.spin_us, "rows": rows, "marks_missed": missed,
            "others_cpu_share": others, "busy_host": busy,
        });
        format!("{all:#}\n")
    } else {
        as_text(&rows, others)
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(ExitCode::from(u8::from(args.strict && missed > 0 && !busy)))
}

/// Share of the host's CPU time used by other processes, above which a missed target is no evidence
/// against this program.
const OTHERS_MAX: f64 = 0.1;

/// Whether a block was lost or had the wrong content: the one failure that is never tolerated.
fn is_wrong_data(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<measure::MeasureError>(),
        Some(measure::MeasureError::Wrong(_))
    )
}

/// CPU time in the kernel's ticks: the host's total, its busy time, and the part of this program
/// and its ended child processes (proc(5), `/proc/stat` and `/proc/PID/stat`).
#[derive(Default)]
struct CpuTimes {
    all: u64,
    used: u64,
    own: u64,
}

impl CpuTimes {
    /// Zero without `/proc`.
    fn now() -> CpuTimes {
        let numbers = |text: &str| -> Vec<u64> {
            let words = text.split_whitespace();
            words.map(|word| word.parse().unwrap_or(0)).collect()
        };
        let host = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        // After the name: user, nice, system, idle, iowait, irq, softirq, steal.
        let host = numbers(host.lines().next().unwrap_or_default());
        let own = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // Fields from the third on follow the name, which is in parentheses; 14 to 17 are times.
        let own = numbers(own.rsplit(')').next().unwrap_or_default());
        let sum = |from: &[u64], fields: std::ops::Range<usize>| {
            from.get(fields).map_or(0, |times| times.iter().sum())
        };
        let all = sum(&host, 1..9);
        CpuTimes {
            all,
            used: all - sum(&host, 4..6),
            own: sum(&own, 11..15),
        }
    }

    /// Share of the host's CPU time that other processes used since `before`, 0 to 1.
    fn share_of_others(&self, before: &CpuTimes) -> f64 {
        let all = self.all.saturating_sub(before.all).max(1);
        let own = self.own.saturating_sub(before.own);
        let used = self.used.saturating_sub(before.used);
        (used.saturating_sub(own) as f64 / all as f64).clamp(0.0, 1.0)
    }
}

fn measure_parts(args: &Args, options: &Options, folder: &Path) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for part in [
        Measurement::Keys,
        Measurement::Tiers,
        Measurement::Transfers,
    ] {
        if !args.part.contains(&part) {
            continue;
        }
        rows.append(&mut match part {
            Measurement::Keys => measure::keys(options)?,
            Measurement::Tiers => measure::tiers(options, folder)?,
            Measurement::Transfers => {
                let mut other = start_other(args, folder)?;
                let addresses = addresses_of(&mut other);
                let rows =
                    addresses.and_then(|at| Ok(measure::transfers(options, &at, other.id())?));
                drop(other.stdin.take()); // it ends
                other.wait().context("waiting for the other process")?;
                rows?
            }
        });
    }
    Ok(rows)
}

fn start_other(args: &Args, folder: &Path) -> anyhow::Result<Child> {
    let nixl = args
        .nixl
        .iter()
        .flat_map(|file| ["--nixl".as_ref(), file.as_os_str()]);
    Command::new(std::env::current_exe().context("finding this program")?)
        .arg("--serve")
        .args(["--spin-us", &args.spin_us.to_string()])
        .args(["--scale", &args.scale.to_string()])
        .args(nixl)
        .arg("--folder")
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting the other process")
}

fn addresses_of(other: &mut Child) -> anyhow::Result<Vec<(usize, Address)>> {
    let lines = BufReader::new(other.stdout.take().context("its output is a pipe")?).lines();
    let mut addresses = Vec::new();
    for line in lines {
        let line = line?;
        if line == "ready" {
            return Ok(addresses);
        }
        let (size, address) = line.split_once(' ').context("a size and an address")?;
        addresses.push((size.parse()?, address.parse()?));
    }
    anyhow::bail!("the other process ended before it was ready")
}

fn as_json(row: &Row) -> serde_json::Value {
    json!({
        "part": row.part, "what": row.what, "value": row.value, "p99": row.p99, "unit": row.unit,
        "mark": row.target, "met": row.is_met(),
    })
}

fn as_text(rows: &[Row], others: f64) -> String {
    let no_color = std::env::var_os("NO_COLOR");
    let color = color_wanted(std::io::stdout().is_terminal(), no_color.as_deref());
    let mut table = Table::new(["", "measured", "p99", "unit", "target", ""]);
    let digits = |value: f64| match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    for row in rows {
        let sign = if row.unit == "us" { "≤" } else { "≥" };
        let target = row
            .target
            .map_or(String::new(), |target| format!("{sign} {target}"));
        let (met, tone) = match row.is_met() {
            None => ("", Tone::Plain),
            Some(true) => ("met", Tone::Better),
            Some(false) if others > OTHERS_MAX => ("missed, busy host", Tone::Plain),
            Some(false) => ("MISSED", Tone::Worse),
        };
        let plain = [
            row.what.clone(),
            digits(row.value),
            row.p99.map_or(String::new(), digits),
            row.unit.to_owned(),
            target,
        ];
        let cells = plain.map(|cell| (cell, Tone::Plain));
        table.toned_row(cells.into_iter().chain([(met.to_owned(), tone)]));
    }
    let mut text = table.render(color);
    text.push_str("Keys are measured in CPU time, the rest in wall time. Times are medians, except for resyncs.\n");
    let so_what = if others > OTHERS_MAX {
        ": missed targets are not significant"
    } else {
        ""
    };
    let percent = others * 100.0;
    text + &format!("Other processes used {percent:.0} % of this host's CPU time{so_what}.\n")
}
