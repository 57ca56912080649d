//! `slipstream net`: the packet-level network on its own.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::Subcommand;
use slipstream_base::doc::Doc;
use slipstream_des::Spin;
use slipstream_netsim::config::{self, Config};
use slipstream_netsim::output::{self, Cost};
use slipstream_netsim::{Execution, RunResult, Simulation};
use slipstream_report::record::ColumnType::{F64, Text, U64};
use slipstream_report::record::{Cell, Column, RecordError, RecordWriter};

use slipstream_report::table::counted;

use crate::cmd::memory;

/// Simulate a packet network.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run configuration files, one after the other
    Run(RunArgs),
}

#[derive(clap::Args)]
struct RunArgs {
    /// Configuration files (TOML); those of Days, another simulator, are read as they are
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Override a key of the files; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// With --json: leave out flows and ports
    #[arg(long, requires = "json")]
    totals: bool,
    /// Threads; the result does not depend on them [default: all cores, while they pay]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Option<u32>,
    /// Looks at the window barrier before a waiting thread parks
    #[arg(long, default_value_t = Spin::default().looks)]
    spin: u32,
    /// Write sources.csv, sinks.csv, switches.csv and (with `report_interval`) series.csv into this
    /// folder (over `log_path`)
    #[arg(long, value_name = "FOLDER")]
    csv: Option<PathBuf>,
    /// Write a report with plots, one HTML file; set `report_interval` for queues over time
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write a trace that Perfetto and Chrome show
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Write a record for each flow; Parquet if the name ends in .parquet, else CSV
    #[arg(long, value_name = "FILE")]
    flows: Option<PathBuf>,
    /// Show progress on stderr even if it is no terminal
    #[arg(long)]
    progress: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Command::Run(args) = &args.command;
    let (mut failed, mut stuck) = (false, false);
    for file in &args.files {
        match run_file(file, args) {
            Ok(true) => {}
            Ok(false) => stuck = true,
            Err(error) if crate::out::is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                eprintln!("error: {error:#}");
                failed = true;
            }
        }
    }
    Ok(if failed {
        ExitCode::from(2)
    } else if stuck {
        ExitCode::from(1)
    } else {
        ExitCode::SUCCESS
    })
}

/// Runs a file; false if the run found a deadlock.
fn run_file(file: &Path, args: &RunArgs) -> anyhow::Result<bool> {
    let text = std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
    let begin = (Instant::now(), cpu_s());
    let mut doc = Doc::parse(&file.to_string_lossy(), &text);
    for set in &args.set {
        doc.set(set);
    }
    let load = |path: &Path| std::fs::read_to_string(path).map_err(|error| error.to_string());
    let config = config::read_with(doc, &load).map_err(|mistakes| anyhow::anyhow!("{mistakes}"))?;
    let execution = Execution {
        threads: args.threads.unwrap_or_else(super::cores),
        // Who names a number gets it.
        window_events_min: args.threads.map_or(EVENTS_A_WINDOW_MIN, |_| 0),
        spin: Spin { looks: args.spin },
        memory_bytes_max: memory_at_hand(),
    };
    let mut simulation = Simulation::new(config.scenario.clone(), execution)
        .with_context(|| file.display().to_string())?;
    let ready = (Instant::now(), cpu_s());
    let duration_ns = config.scenario.duration_ns;
    let show = args.progress || std::io::stderr().is_terminal();
    let mut last = ready.0;
    let mut progress = |now: u64, events: u64| {
        if show && last.elapsed().as_millis() >= 200 {
            last = Instant::now();
            let rate = events as f64 / ready.0.elapsed().as_secs_f64();
            eprint!(
                "\r{:.6} of {:.6} s simulated, {events} events, {:.1} M/s ",
                now as f64 / 1e9,
                duration_ns as f64 / 1e9,
                rate / 1e6
            );
        }
    };
    // Often enough to move, seldom enough to cost nothing.
    let every = (duration_ns / 10_000).max(1);
    simulation.run(execution, every, &mut progress);
    if show {
        eprint!("\r\x1b[K");
    }
    let done = (Instant::now(), cpu_s());
    let cost = Cost {
        setup_s: (ready.0 - begin.0).as_secs_f64(),
        setup_cpu_s: ready.1 - begin.1,
        run_s: (done.0 - ready.0).as_secs_f64(),
        run_cpu_s: done.1 - ready.1,
        rss_bytes_max: rss_bytes_max(),
        threads: simulation.threads(),
        shards: simulation.shard_count(),
        windows: simulation.windows(),
    };
    let result = simulation.result();
    write_csv(&config, &result, args)?;
    let name = file.display().to_string();
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    if let Some(path) = &args.html {
        write(path, output::html(&name, &config, &result, &cost))?;
    }
    if let Some(path) = &args.perfetto {
        write(path, output::perfetto(&config, &result))?;
    }
    if let Some(path) = &args.flows {
        write_flows(path, &config, &result)
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let text = if args.json {
        let mut json = output::json(&name, &config, &result, &cost);
        if args.totals
            && let Some(members) = json.as_object_mut()
        {
            members.remove("flows");
            members.remove("ports");
        }
        format!("{json}\n")
    } else {
        output::text(&name, &config, &result, &cost)
    };
    crate::out::print(&text)?;
    let events_a_window = result.totals.events / cost.windows.max(1);
    if args.threads.is_some() && cost.threads > 1 && events_a_window < EVENTS_A_WINDOW_MIN {
        eprintln!(
            "note: threads met {}, once in {}, which costs more than they save; leave --threads out",
            counted(cost.windows, "time"),
            counted(events_a_window, "event")
        );
    }
    if let Some(deadlock) = &result.deadlock {
        let what = output::deadlock_text(&config, deadlock);
        eprintln!("error: {name}: PFC deadlock {what}");
    }
    Ok(result.deadlock.is_none())
}

fn write_csv(config: &Config, result: &RunResult, args: &RunArgs) -> anyhow::Result<()> {
    let Some(folder) = args.csv.as_ref().or(config.log_path.as_ref()) else {
        return Ok(());
    };
    std::fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let series = output::series_csv(config, result);
    for (name, text) in [
        ("sources.csv", Some(output::sources_csv(result))),
        ("sinks.csv", Some(output::sinks_csv(config, result))),
        ("switches.csv", Some(output::switches_csv(config, result))),
        ("series.csv", series),
    ] {
        let Some(text) = text else { continue };
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// A record a flow, as CSV or Parquet.
fn write_flows(path: &Path, config: &Config, result: &RunResult) -> Result<(), RecordError> {
    let columns = [
        ("id", U64),
        ("src", U64),
        ("dst", U64),
        ("transport", Text),
        ("start_ns", U64),
        ("delivered_ns", U64),
        ("acked_ns", U64),
        ("ideal_ns", U64),
        ("bytes", U64),
        ("bytes_acked", U64),
        ("packets_sent", U64),
        ("retransmitted", U64),
        ("fast_retransmits", U64),
        ("timeouts", U64),
        ("nacks", U64),
        ("notifications", U64),
        ("cwnd", U64),
        ("rate_bits_per_s", F64),
        ("one_way_delay_ns_mean", F64),
    ];
    let columns = columns.map(|(name, kind)| Column::new(name, kind));
    let mut writer = RecordWriter::create(path, &columns)?;
    let flows = result.flows.iter().zip(&config.scenario.flows);
    for ((f, spec), &ideal) in flows.zip(&result.ideal_ns) {
        writer.write(&[
            Cell::U64(f.id),
            Cell::U64(f.src.into()),
            Cell::U64(f.dst.into()),
            Cell::Text(output::transport_name(&spec.transport)),
            Cell::U64(f.start_ns),
            f.delivered_ns.into(),
            f.acked_ns.into(),
            Cell::U64(ideal),
            Cell::U64(f.bytes),
            Cell::U64(f.bytes_acked),
            Cell::U64(f.packets_sent),
            Cell::U64(f.retransmitted),
            Cell::U64(f.fast_retransmits.into()),
            Cell::U64(f.timeouts.into()),
            Cell::U64(f.nacks),
            Cell::U64(f.notifications),
            Cell::U64(f.cwnd),
            f.rate_bits_per_s.into(),
            f.one_way_delay_ns_mean.into(),
        ])?;
    }
    writer.finish()
}

/// CPU time of the process, all threads, s.
fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn rss_bytes_max() -> u64 {
    memory::proc_bytes("/proc/self/status", "VmHWM:").unwrap_or(0)
}

/// Events between two meetings of threads below which one thread is faster: measured, 38 a window
/// take twice to ten times as long on two to four threads, E5's 10,000 and more gain
/// (`docs/benchmarks-net.md`).
const EVENTS_A_WINDOW_MIN: u64 = 1000;

/// Memory that a run may take; no limit where it cannot be told.
fn memory_at_hand() -> u64 {
    memory::proc_bytes("/proc/meminfo", "MemAvailable:").unwrap_or(u64::MAX)
}
