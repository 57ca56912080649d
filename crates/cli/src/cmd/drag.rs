//! `slipstream drag`: the same load live and in virtual time, hand-over by hand-over.
//!
//! The live side is what a user would start by hand: this binary's `serve` and `bench` as processes of
//! their own, on loopback.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use slipstream_report::drag;
use slipstream_report::hand_over::{self, HandOvers};
use slipstream_report::table::{counted, grouped};
use slipstream_report::{RunReport, compare};

use crate::cmd::cluster_args::ClusterArgs;
use crate::cmd::workload_args::{WorkloadArgs, WorkloadSets};
use crate::out;

/// Flags of `slipstream drag`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    what: WorkloadArgs,
    #[command(flatten)]
    sets: WorkloadSets,
    /// Run both sides so many times as fast as the modelled cluster
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speedup: f64,
    /// Keep the records and reports of both sides in this directory
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Compare two files of drag records instead of running anything
    #[arg(long, value_names = ["FILE", "FILE"], num_args = 2, conflicts_with_all = ["cluster", "workload", "trace"])]
    compare: Vec<PathBuf>,
}

/// Runs both sides, or compares saved ones.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let [a, b] = args.compare.as_slice() {
        let names = [stem(a), stem(b)];
        let runs = [read(a)?, read(b)?];
        return print([&names[0], &names[1]], [&runs[0], &runs[1]]);
    }
    ensure!(
        args.speedup.is_finite() && args.speedup > 0.0,
        "--speedup is {}, but must be above 0",
        args.speedup
    );
    // Mistakes in the files are told before anything is started.
    if args.cluster.resolve_live(&[])?.is_none() {
        return Ok(ExitCode::SUCCESS); // --print-config
    }
    args.what.workload(&args.sets.workload_set)?;
    let own;
    let dir = if let Some(dir) = &args.keep {
        std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        dir.as_path()
    } else {
        own = TempDir::new()?;
        &own.0
    };
    live(args, dir)?;
    twin(args, dir)?;
    let runs = [read(&dir.join("live.csv"))?, read(&dir.join("twin.csv"))?];
    let code = print(["live", "twin"], [&runs[0], &runs[1]])?;
    let reports = ["live.json", "twin.json"].map(|name| {
        let path = dir.join(name);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        RunReport::from_json(&text).with_context(|| path.display().to_string())
    });
    let reports = reports.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    out::print(&format!("\n{}", compare::render(&reports, false)))?;
    Ok(code)
}

fn print(names: [&str; 2], runs: [&HandOvers; 2]) -> anyhow::Result<ExitCode> {
    out::print(&hand_over::render(names, runs))?;
    let mut code = ExitCode::SUCCESS;
    for (name, run) in names.iter().zip(runs) {
        if run.failed() > 0 || run.requests() == 0 {
            eprintln!(
                "note: {name}: {} failed, {} answered",
                counted(run.failed(), "request"),
                grouped(run.requests())
            );
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

fn read(path: &Path) -> anyhow::Result<HandOvers> {
    let named = || path.display().to_string();
    let mut run = HandOvers::default();
    for record in drag::read(path).with_context(named)? {
        run.add(&record.with_context(named)?);
    }
    Ok(run)
}

/// A directory of this run's own, removed at its end.
struct TempDir(PathBuf);

impl TempDir {
    fn new() -> anyhow::Result<TempDir> {
        let path = std::env::temp_dir().join(format!("slipstream-drag-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(TempDir(path))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        // What is left in a temporary directory does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server that ends with this value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn slipstream() -> anyhow::Result<Command> {
    Ok(Command::new(
        std::env::current_exe().context("finding this program's file")?,
    ))
}

/// Time that the live cluster's engines have to start, at most.
const STARTUP_MAX: Duration = Duration::from_secs(600);

/// Waits until every rank takes requests: the twin's are there from the start.
fn await_ranks(url: &str) -> anyhow::Result<()> {
    let address = url.strip_prefix("http://").unwrap_or(url);
    let begun = Instant::now();
    loop {
        let mut stream = TcpStream::connect(address).context("asking the server for its ranks")?;
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: drag\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        if answer.contains("\"ready\":true") && !answer.contains("\"ready\":false") {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < STARTUP_MAX,
            "the live cluster's engines were not ready after {} s; lower `engine.startup_s`",
            STARTUP_MAX.as_secs()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The seed of `simulate` for a load that states none, where `bench` would take one of its own.
fn same_seed(what: &WorkloadArgs) -> Option<&'static str> {
    let stated = what.workload.is_some() || what.trace.is_some() || what.seed.is_some();
    (!stated).then_some("--seed=0")
}

fn live(args: &Args, dir: &Path) -> anyhow::Result<()> {
    let mut serve = slipstream()?;
    serve
        .arg("serve")
        .args(args.cluster.flags())
        .args(["--listen", "127.0.0.1:0"])
        .arg(format!("--speedup={}", args.speedup))
        .stdout(Stdio::piped());
    let mut server = Server(serve.spawn().context("starting `slipstream serve`")?);
    let stdout = server.0.stdout.take().context("the server's output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    let Some(url) = line.trim().strip_prefix("listening on ") else {
        bail!("`slipstream serve` did not start; its message is above");
    };
    await_ranks(url)?;
    let mut bench = slipstream()?;
    bench
        .args(["bench", url])
        .args(args.what.flags())
        .args(same_seed(&args.what))
        .arg(format!("--time-scale={}", args.scale()))
        .args(
            args.sets
                .workload_set
                .iter()
                .map(|set| format!("--set={set}")),
        )
        .arg("--trace-stages")
        .arg("--drag")
        .arg(dir.join("live.csv"))
        .arg("--out")
        .arg(dir.join("live.json"))
        .args(["--label", "live"])
        .arg(format!("--server-pid={}", server.0.id()))
        .stdout(Stdio::null());
    // 1 means that requests failed, which the records tell better.
    let status = bench.status().context("starting `slipstream bench`")?;
    ensure!(
        status.code().is_some_and(|code| code < 2),
        "`slipstream bench` did not run; its message is above"
    );
    Ok(())
}

fn twin(args: &Args, dir: &Path) -> anyhow::Result<()> {
    let mut simulate = slipstream()?;
    simulate
        .arg("simulate")
        .args(args.cluster.flags())
        .args(args.what.flags())
        .arg(format!("--time-scale={}", args.scale()))
        .arg(format!("--speedup={}", args.speedup))
        .args(
            args.sets
                .workload_set
                .iter()
                .map(|set| format!("--workload-set={set}")),
        )
        .arg("--drag")
        .arg(dir.join("twin.csv"))
        .arg("--out")
        .arg(dir.join("twin.json"))
        .args(["--label", "twin"])
        .stdout(Stdio::null());
    let status = simulate
        .status()
        .context("starting `slipstream simulate`")?;
    ensure!(
        status.code().is_some_and(|code| code < 2),
        "`slipstream simulate` did not run; its message is above"
    );
    Ok(())
}

impl Args {
    /// How much arrivals and think times are compressed.
    fn scale(&self) -> f64 {
        self.what.time_scale.unwrap_or(1.0) * self.speedup
    }
}
