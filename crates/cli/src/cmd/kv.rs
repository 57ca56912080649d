//! `slipstream kv`: what sharing blocks of KV cache costs on this host.

use std::io::{BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, ExitCode, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Subcommand, ValueEnum};
use serde_json::json;
use slipstream_kvstore::Address;
use slipstream_kvstore::measure::{self, Options, Row};
use slipstream_report::table::{Table, Tone, color_wanted};

use crate::out;

/// Flags of `slipstream kv`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure keys, tiers, and transfers between two processes; exits with 1 if a mark is missed
    Bench(BenchArgs),
}

#[derive(clap::Args)]
struct BenchArgs {
    /// Parts to measure
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "keys,tiers,transfers"
    )]
    part: Vec<Part>,
    /// Multiplies how often each case is repeated
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// How long the transports' threads look for more to do before they sleep, us
    #[arg(long, default_value_t = 0)]
    spin_us: u64,
    /// Folder for files and sockets [default: a temporary one]
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The other process of a bench
    #[arg(long, hide = true)]
    serve: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Keys,
    Tiers,
    Transfers,
}

/// Runs `slipstream kv`.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Command::Bench(args) = &args.command;
    let options = Options {
        scale: args.scale,
        spin: Duration::from_micros(args.spin_us),
    };
    anyhow::ensure!(
        args.scale > 0.0 && args.scale.is_finite(),
        "--scale is {}; give a number above 0",
        args.scale
    );
    if args.serve {
        let folder = args.folder.as_deref().unwrap_or(Path::new("."));
        measure::serve(&options, folder, std::io::stdin(), std::io::stdout())?;
        return Ok(ExitCode::SUCCESS);
    }
    let own = args.folder.is_none();
    let folder = args.folder.clone().unwrap_or_else(|| {
        std::env::temp_dir().join(format!("slipstream-kv-bench-{}", std::process::id()))
    });
    std::fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let rows = measure_parts(args, &options, &folder);
    if own {
        let _ = std::fs::remove_dir_all(&folder);
    }
    let rows = rows?;
    let missed = rows
        .iter()
        .filter(|row| row.is_met() == Some(false))
        .count();
    if args.json {
        let rows: Vec<_> = rows.iter().map(as_json).collect();
        let all = json!({ "scale": args.scale, "spin_us": args.spin_us, "rows": rows, "marks_missed": missed });
        out::print(&format!("{all:#}\n"))?;
    } else {
        out::print(&as_text(&rows))?;
    }
    Ok(ExitCode::from(u8::from(missed > 0)))
}

fn measure_parts(args: &BenchArgs, options: &Options, folder: &Path) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for part in [Part::Keys, Part::Tiers, Part::Transfers] {
        if !args.part.contains(&part) {
            continue;
        }
        rows.append(&mut match part {
            Part::Keys => measure::keys(options)?,
            Part::Tiers => measure::tiers(options, folder)?,
            Part::Transfers => {
                let mut other = start_other(args, folder)?;
                let addresses = addresses_of(&mut other);
                let rows = addresses.and_then(|at| Ok(measure::transfers(options, &at)?));
                drop(other.stdin.take()); // it ends
                other.wait().context("waiting for the other process")?;
                rows?
            }
        });
    }
    Ok(rows)
}

fn start_other(args: &BenchArgs, folder: &Path) -> anyhow::Result<Child> {
    Process::new(std::env::current_exe().context("finding this program")?)
        .args(["kv", "bench", "--serve"])
        .args(["--spin-us", &args.spin_us.to_string()])
        .args(["--scale", &args.scale.to_string()])
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
        "mark": row.mark, "met": row.is_met(),
    })
}

fn as_text(rows: &[Row]) -> String {
    let no_color = std::env::var_os("NO_COLOR");
    let color = color_wanted(std::io::stdout().is_terminal(), no_color.as_deref());
    let mut table = Table::new(["", "measured", "p99", "unit", "mark", ""]);
    let digits = |value: f64| match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    for row in rows {
        let sign = if row.unit == "us" { "≤" } else { "≥" };
        let mark = row
            .mark
            .map_or(String::new(), |mark| format!("{sign} {mark}"));
        let (met, tone) = match row.is_met() {
            None => ("", Tone::Plain),
            Some(true) => ("met", Tone::Better),
            Some(false) => ("MISSED", Tone::Worse),
        };
        let plain = [
            row.what.clone(),
            digits(row.value),
            row.p99.map_or(String::new(), digits),
            row.unit.to_owned(),
            mark,
        ];
        let cells = plain.map(|cell| (cell, Tone::Plain));
        table.toned_row(cells.into_iter().chain([(met.to_owned(), tone)]));
    }
    let mut text = table.render(color);
    text.push_str("Keys are measured in CPU time, the rest in wall time. Times are medians, but for resyncs.\n");
    text
}
