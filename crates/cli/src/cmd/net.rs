//! `slipstream net`: the packet-level network simulator.

mod init;

use std::io::{self, BufRead, BufReader, BufWriter, IsTerminal, Read as _, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Subcommand;
use slipstream_config::doc::Doc;
use slipstream_des::Spin;
use slipstream_netsim::config::{self, Config, Resources};
use slipstream_netsim::output::{self, Cost};
use slipstream_netsim::{Execution, RunResult, Simulation};
use slipstream_report::partial::Partial;
use slipstream_report::record::ColumnType::{F64, Text, U64};
use slipstream_report::record::{Cell, Column, RecordError, RecordWriter, check_format};

use slipstream_report::table::{counted, number};

use crate::cmd::progress;
use crate::out;
use slipstream_os::memory;

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
    /// Write a commented configuration file to begin with
    Init(init::Args),
}

#[derive(clap::Args)]
struct RunArgs {
    /// Configuration files (TOML), of slipstream or of Days, another simulator
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Dialect of keys with two meanings: slipstream's or that of Days [default: derived from the
    /// keys]
    #[arg(long, value_name = "DIALECT", value_parser = ["slipstream", "days"])]
    dialect: Option<String>,
    /// Override a key of the files; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// With --json: omit flows and ports
    #[arg(long, requires = "json")]
    totals: bool,
    /// Threads; the result does not depend on them [default: all cores, if they pay off]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Option<u32>,
    /// Checks of the window barrier before a waiting thread parks
    #[arg(long, default_value_t = Spin::default().looks)]
    spin: u32,
    /// Write sources.csv, sinks.csv, switches.csv and (with `report_interval`) series.csv into this
    /// folder instead of `log_path`; /dev/null discards them
    #[arg(long, value_name = "FOLDER")]
    csv: Option<PathBuf>,
    /// Write an HTML report with plots; set `report_interval` for queues over time
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write a trace for Perfetto or Chrome
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Write one record per flow; Parquet if the name ends in .parquet, else CSV
    #[arg(long, value_name = "FILE")]
    flows: Option<PathBuf>,
    /// Show progress on stderr even if it is not a terminal
    #[arg(long)]
    progress: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let args = match &args.command {
        Command::Run(args) => args,
        Command::Init(args) => return init::run(args),
    };
    check_flags(args)?;
    let (mut failed, mut incomplete) = (false, false);
    let interrupted = progress::interrupted()?;
    for (at, file) in args.files.iter().enumerate() {
        match run_file(file, args, &interrupted) {
            Ok(Outcome::Complete) => {}
            Ok(Outcome::Interrupted) => {
                incomplete = true;
                let rest = args.files.len() - at - 1;
                if rest > 0 {
                    errln!("note: {} not run", counted(rest as u64, "further file"));
                }
                break;
            }
            Ok(Outcome::Deadlock | Outcome::Unwritten) => incomplete = true,
            Err(error) if crate::out::is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                errln!("error: {error:#}");
                failed = true;
            }
        }
    }
    Ok(if failed {
        ExitCode::from(2)
    } else if incomplete {
        ExitCode::from(1)
    } else {
        ExitCode::SUCCESS
    })
}

/// Refuses flags whose outputs would overwrite each other or mix.
fn check_flags(args: &RunArgs) -> anyhow::Result<()> {
    let outputs = [
        ("--csv", &args.csv),
        ("--html", &args.html),
        ("--perfetto", &args.perfetto),
        ("--flows", &args.flows),
    ];
    if let Some((flag, _)) = outputs
        .iter()
        .find(|(_, path)| path.as_deref() == Some(Path::new("-")))
    {
        anyhow::bail!(
            "{flag} - would mix with the summary on stdout; give a file, or use --json, which has \
             the flows"
        );
    }
    if let Some((flag, _)) = outputs.iter().find(|(_, path)| path.is_some()) {
        anyhow::ensure!(
            args.files.len() == 1,
            "{flag} is for one output, but there are {} configuration files; run them one at a time",
            args.files.len()
        );
    }
    Ok(())
}

/// How a run ended.
#[derive(Clone, Copy, PartialEq)]
enum Outcome {
    Complete,
    /// A PFC deadlock ended the run.
    Deadlock,
    /// A signal ended the run.
    Interrupted,
    /// The run is complete, but an output file could not be written.
    Unwritten,
}

/// Runs a file.
fn run_file(file: &Path, args: &RunArgs, interrupted: &AtomicBool) -> anyhow::Result<Outcome> {
    let begin = (Instant::now(), cpu_s());
    let config = read(file, args)?;
    let outputs = Outputs::plan(args, &config)?;
    if let Some(note) = &config.dialect_note {
        errln!("note: {}: {note}", file.display());
    }
    let execution = Execution {
        threads: args.threads.unwrap_or_else(super::cores),
        // An explicit number of threads is used as it is.
        window_events_min: args.threads.map_or(EVENTS_PER_WINDOW_MIN, |_| 0),
        spin: Spin { looks: args.spin },
        memory_bytes_max: memory_at_hand(),
    };
    let mut simulation = Simulation::new(config.scenario.clone(), execution)
        .map_err(|error| anyhow::anyhow!(config.located(&file.display().to_string(), &error)))?;
    let ready = (Instant::now(), cpu_s());
    let duration_ns = config.scenario.duration_ns;
    let show = args.progress || io::stderr().is_terminal();
    let mut last = ready.0;
    let (mut simulated_ns, mut stopped) = (0, false);
    let mut progress = |now: u64, events: u64| {
        if show && last.elapsed().as_millis() >= 200 {
            last = Instant::now();
            show_progress(now, duration_ns, events, ready.0.elapsed());
        }
        simulated_ns = now;
        stopped = interrupted.load(Ordering::Relaxed);
        !stopped
    };
    // Frequent enough to look continuous and to end soon after an interrupt, rare enough to be free.
    let every = (duration_ns / 100_000).clamp(1, 100_000);
    simulation.run_while(execution, every, &mut progress);
    if show {
        err!("\r\x1b[K");
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
    let name = file.display().to_string();
    let mut failures = outputs.write(&name, &config, &result, &cost);
    let printed = if args.json {
        out::stream(|sink| output::write_json(sink, &name, &config, &result, &cost, args.totals))
    } else {
        out::print(&output::text(&name, &config, &result, &cost))
    };
    match printed {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Err(error.into()),
        // As for other outputs: the run is complete.
        Err(error) => failures.push(error.to_string()),
        Ok(()) => {}
    }
    if args.threads.is_some() {
        say_windows(&cost, result.totals.events);
    }
    out::complain(&failures);
    if let Some(deadlock) = &result.deadlock {
        let what = output::deadlock_text(&config, deadlock);
        errln!("error: {name}: PFC deadlock {what}");
    }
    if stopped {
        errln!(
            "note: {name}: interrupted at {:.6} of {:.6} s; the figures are those of the packets until then",
            simulated_ns as f64 / 1e9,
            duration_ns as f64 / 1e9
        );
        return Ok(Outcome::Interrupted);
    }
    Ok(match (&result.deadlock, failures.is_empty()) {
        (_, false) => Outcome::Unwritten,
        (Some(_), true) => Outcome::Deadlock,
        (None, true) => Outcome::Complete,
    })
}

fn show_progress(now: u64, duration_ns: u64, events: u64, wall: Duration) {
    let share = now as f64 / duration_ns.max(1) as f64;
    // An early estimate would be meaningless.
    let left = if share > 0.02 {
        let seconds = wall.as_secs_f64() * (1.0 - share).max(0.0) / share;
        format!(", about {} s left at most", number(seconds))
    } else {
        String::new()
    };
    err!(
        "\r\x1b[K{:.6} of {:.6} s simulated, {events} events, {:.1} M/s{left} ",
        now as f64 / 1e9,
        duration_ns as f64 / 1e9,
        events as f64 / wall.as_secs_f64() / 1e6
    );
}

/// A note if the threads synchronized too often to be worth their cost.
fn say_windows(cost: &Cost, events: u64) {
    let events_a_window = events / cost.windows.max(1);
    if cost.threads > 1 && events_a_window < EVENTS_PER_WINDOW_MIN {
        errln!(
            "note: threads synchronized {}, once in {}, which costs more than it saves; omit --threads",
            counted(cost.windows, "time"),
            counted(events_a_window, "event")
        );
    }
}

/// Reads a configuration and the files that it refers to.
fn read(file: &Path, args: &RunArgs) -> anyhow::Result<Config> {
    // One byte over the limit, to detect longer files.
    let limit = Doc::BYTES_MAX as u64 + 1;
    let mut text = Vec::new();
    let opened =
        slipstream_os::files::open_stream(file).and_then(|f| f.take(limit).read_to_end(&mut text));
    opened.with_context(|| format!("reading {}", file.display()))?;
    let mut doc = Doc::parse(&file.to_string_lossy(), &text);
    if let Some(dialect) = &args.dialect {
        doc.set(&format!("--dialect: dialect={dialect}"));
    }
    for set in &args.set {
        doc.set(set);
    }
    let open = |path: &Path| -> Result<Box<dyn BufRead>, String> {
        let file = slipstream_os::files::open_stream(path).map_err(|error| error.to_string())?;
        Ok(Box::new(BufReader::new(file)))
    };
    let resources = Resources {
        open: &open,
        memory_bytes_max: memory_at_hand(),
    };
    config::read_with(doc, &resources).map_err(|diagnostics| anyhow::anyhow!("{diagnostics}"))
}

/// The files that a run writes. They are checked before the run, so that an invalid path does not
/// cost hours.
struct Outputs {
    csv: Option<PathBuf>,
    html: Option<PathBuf>,
    perfetto: Option<PathBuf>,
    flows: Option<PathBuf>,
}

/// Names of the tables in the folder of `--csv`.
const TABLES: [&str; 4] = ["sources.csv", "sinks.csv", "switches.csv", "series.csv"];

impl Outputs {
    /// The files given by flags and configuration.
    ///
    /// # Errors
    /// If one cannot be written, or two are the same.
    fn plan(args: &RunArgs, config: &Config) -> anyhow::Result<Outputs> {
        // Also discards the tables of `log_path`.
        let discards = |folder: &PathBuf| folder == Path::new("/dev/null");
        let csv = args.csv.clone().or(config.log_path.clone());
        let outputs = Outputs {
            csv: csv.filter(|folder| !discards(folder)),
            html: args.html.clone(),
            perfetto: args.perfetto.clone(),
            flows: args.flows.clone(),
        };
        let tables = if config.scenario.sample_ns.is_some() {
            &TABLES[..]
        } else {
            &TABLES[..3]
        };
        if let Some(folder) = &outputs.csv {
            let exists = std::fs::metadata(folder);
            anyhow::ensure!(
                exists.is_ok_and(|meta| meta.is_dir()) || !folder.exists(),
                "{} is not a folder; --csv (and `log_path`) need one, for several files; /dev/null \
                 discards them",
                folder.display()
            );
            std::fs::create_dir_all(folder)
                .with_context(|| format!("creating {}", folder.display()))?;
        }
        if let Some(flows) = &outputs.flows {
            check_format(flows).with_context(|| format!("writing {}", flows.display()))?;
        }
        let files = [&outputs.html, &outputs.perfetto, &outputs.flows];
        let files = files.into_iter().flatten().cloned();
        let folder = outputs.csv.iter();
        let tables = folder.flat_map(|folder| tables.iter().map(move |name| folder.join(name)));
        let mut seen = Vec::new();
        for path in files.chain(tables) {
            check_writable(&path).with_context(|| format!("writing {}", path.display()))?;
            let place = whole_path(&path);
            anyhow::ensure!(
                !seen.contains(&place),
                "two outputs have the path {}; give each its own file",
                path.display()
            );
            seen.push(place);
        }
        Ok(outputs)
    }

    /// Writes all outputs; returns the errors as text.
    fn write(&self, name: &str, config: &Config, result: &RunResult, cost: &Cost) -> Vec<String> {
        let mut failures = Vec::new();
        let mut save = |path: &Path, write: &dyn Fn(&mut dyn Write) -> io::Result<()>| {
            if let Err(error) = save(path, write) {
                failures.push(out::incomplete(path, &error.into()));
            }
        };
        if let Some(folder) = &self.csv {
            save(&folder.join(TABLES[0]), &|f| {
                output::write_sources_csv(f, result)
            });
            save(&folder.join(TABLES[1]), &|f| {
                output::write_sinks_csv(f, config, result)
            });
            save(&folder.join(TABLES[2]), &|f| {
                output::write_switches_csv(f, config, result)
            });
            if result.series.is_some() {
                save(&folder.join(TABLES[3]), &|f| {
                    output::write_series_csv(f, config, result)
                });
            }
        }
        if let Some(path) = &self.html {
            save(path, &|f| {
                f.write_all(output::html(name, config, result, cost).as_bytes())
            });
        }
        if let Some(path) = &self.perfetto {
            save(path, &|f| {
                f.write_all(output::perfetto(config, result).as_bytes())
            });
        }
        if let Some(path) = &self.flows
            && let Err(error) = write_flows(path, config, result)
        {
            failures.push(out::incomplete(path, &error.into()));
        }
        failures
    }
}

/// The canonical path of a file, as far as it exists.
fn whole_path(path: &Path) -> PathBuf {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    path.canonicalize().unwrap_or_else(|_| {
        let folder = folder.canonicalize().unwrap_or(folder.to_owned());
        folder.join(path.file_name().unwrap_or_default())
    })
}

/// Checks that a file can be created at `path`: creates it under its temporary name, and removes
/// it.
fn check_writable(path: &Path) -> io::Result<()> {
    let meta = std::fs::metadata(path);
    if meta.as_ref().is_ok_and(std::fs::Metadata::is_dir) {
        return Err(io::Error::other("it is a folder; give a file in it"));
    }
    if slipstream_os::files::is_named_fifo(path) {
        return Err(io::Error::other(
            "it is a FIFO, and writing would wait for its reader; name a file, or >(COMMAND)",
        ));
    }
    if meta.is_ok_and(|meta| !meta.is_file()) {
        return Ok(());
    }
    let (_, partial) = Partial::create(path)?;
    partial.discard()
}

/// Writes a file under a temporary name, and renames it when it is complete.
fn save(path: &Path, write: &dyn Fn(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let (file, mut partial) = Partial::create(path)?;
    let mut sink = BufWriter::new(file);
    write(&mut sink)?;
    sink.flush()?;
    partial.complete()
}

/// One record per flow, as CSV or Parquet.
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
            f.started.then_some(f.start_ns).into(),
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

/// Events per window below which one thread is faster. Measured: with 38 per window, two to four
/// threads take twice to ten times as long; with E5's 10,000 and more they are faster
/// (`docs/benchmarks-net.md`).
const EVENTS_PER_WINDOW_MIN: u64 = 1000;

/// Memory that a run may take; no limit if it is unknown.
fn memory_at_hand() -> u64 {
    memory::proc_bytes("/proc/meminfo", "MemAvailable:").unwrap_or(u64::MAX)
}
