//! `slipstream sched bench`: wake-up latency on this host, under its current scheduler.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::json;
use slipstream_base::width::{floor_u64, to_u32};
use slipstream_report::latency::enough_samples;
use slipstream_report::table::{Table, grouped, number};
use slipstream_scx::link::Mechanism;
use slipstream_scx::wake::Quantiles;
use slipstream_scx::{load, wake};

use crate::out;

/// Flags of `slipstream sched bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Mechanisms: pipe, unix, tcp, epoll, eventfd, futex
    #[arg(long, value_delimiter = ',', value_parser = mechanism,
          default_value = "pipe,unix,tcp,epoll,eventfd,futex")]
    mechanism: Vec<Mechanism>,
    /// Measured wake-ups per mechanism; 0 skips this part
    #[arg(long, default_value_t = 5000)]
    rounds: u32,
    /// Warm-up wake-ups before those, for the scheduler to learn and the kernel to settle after
    /// program start (idle CPUs keep their ticks for some ms, and wake up faster)
    #[arg(long, default_value_t = 3000)]
    warmup: u32,
    /// Computation of the waker after each wake-up, us
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    linger_us: u64,
    /// Loads, percent of all CPUs; `0` skips this part
    #[arg(long, value_delimiter = ',', default_value = "50,70,90",
          value_parser = clap::value_parser!(u32).range(..=400))]
    load_pct: Vec<u32>,
    /// Wake-up mechanism of the load's workers
    #[arg(long, value_parser = mechanism, default_value = "unix")]
    load_mechanism: Mechanism,
    /// Message threads of the load [default: one per eight CPUs]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    message_threads: Option<u32>,
    /// Total workers [default: number of CPUs]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65536))]
    workers: Option<u32>,
    /// Computation of a worker per request, us
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    work_us: u64,
    /// Duration of each load, ms
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    duration_ms: u64,
    /// Seed of the request stream
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn mechanism(name: &str) -> Result<Mechanism, String> {
    Mechanism::parse(name).ok_or_else(|| {
        let known: Vec<&str> = Mechanism::ALL.iter().map(|m| m.name()).collect();
        format!("unknown mechanism; available: {}", known.join(", "))
    })
}

/// The host's scheduler: the name of the loaded `sched_ext` scheduler, or the kernel's own.
fn scheduler() -> String {
    std::fs::read_to_string("/sys/kernel/sched_ext/root/ops")
        .map_or("the kernel's own".to_owned(), |s| s.trim().to_owned())
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cpus = std::thread::available_parallelism()
        .context("counting CPUs")?
        .get();
    let cpus = to_u32(cpus);
    let (mut wakes, mut loads) = (Vec::new(), Vec::new());
    for &mechanism in &args.mechanism {
        if args.rounds > 0 {
            let spec = wake::Spec {
                mechanism,
                rounds: args.rounds,
                warmup: args.warmup,
                linger_us: args.linger_us,
            };
            let r =
                wake::measure(spec).with_context(|| format!("waking by {}", mechanism.name()))?;
            wakes.push(r);
        }
    }
    let message_threads = args.message_threads.unwrap_or(cpus.div_ceil(8));
    for &load_pct in args.load_pct.iter().filter(|&&l| l > 0) {
        let spec = load::Spec {
            mechanism: args.load_mechanism,
            load_pct,
            cpus,
            message_threads,
            workers: args.workers.unwrap_or(cpus).div_ceil(message_threads),
            work_us: args.work_us,
            duration_ms: args.duration_ms,
            seed: args.seed,
        };
        loads.push(load::measure(spec).with_context(|| format!("the load of {load_pct} %"))?);
    }
    if args.json {
        let all = json!({
            "scheduler": scheduler(), "cpus": cpus, "seed": args.seed, "wake": wakes, "load": loads,
        });
        out::print(&format!("{all:#}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!("scheduler: {}; {cpus} CPUs\n", scheduler());
    if !wakes.is_empty() {
        text += &wake_table(&wakes);
    }
    if !loads.is_empty() {
        let _ = write!(
            text,
            "\nworkers woken by {}, {message_threads} message threads, {} us of work, seed {}\n{}",
            args.load_mechanism.name(),
            args.work_us,
            args.seed,
            load_table(&loads)
        );
    }
    out::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Quantiles of which there are enough samples.
fn quantiles(q: &Quantiles) -> [String; 3] {
    [(0.5, q.p50_us), (0.99, q.p99_us), (0.999, q.p99_9_us)].map(|(share, us)| {
        if enough_samples(share, q.count) {
            number(us)
        } else {
            "-".to_owned()
        }
    })
}

fn wake_table(wakes: &[wake::WakeResult]) -> String {
    let mut table = Table::new(["wake-up by", "p50 us", "p99 us", "p99.9 us", "hand-offs/s"]);
    for r in wakes {
        let mut row = vec![r.mechanism.name().to_owned()];
        row.extend(quantiles(&r.latency));
        row.push(grouped(floor_u64(r.hand_offs_per_s)));
        table.row(row);
    }
    table.render(false)
}

fn load_table(loads: &[load::LoadResult]) -> String {
    let mut table = Table::new([
        "load %",
        "wake p50 us",
        "p99 us",
        "p99.9 us",
        "request p50 us",
        "p99 us",
        "p99.9 us",
        "requests/s",
        "hand-offs/s",
        "dropped",
    ]);
    for r in loads {
        let mut row = vec![r.load_pct.to_string()];
        row.extend(quantiles(&r.wake));
        row.extend(quantiles(&r.request));
        row.push(grouped(floor_u64(r.requests_per_s)));
        row.push(grouped(floor_u64(r.hand_offs_per_s)));
        row.push(r.dropped.to_string());
        table.row(row);
    }
    table.render(false)
}
