//! `slipstream drag`: the same workload live and in virtual time, compared stage by stage.
//!
//! The live side runs this binary's `serve` and `bench` as separate processes on loopback, as a
//! user would.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use slipstream_bench::host::{self, HostLoad, HostSample, HostVerdict, RunQueue};
use slipstream_config::cluster::Cluster;
use slipstream_probe::Client;
use slipstream_report::gaps::{self, StageGaps};
use slipstream_report::lengths::{self, AnswerLengths};
use slipstream_report::table::{counted, grouped, number};
use slipstream_report::{RunReport, compare, drag};

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
    /// Speed of both sides, as a multiple of the modelled cluster's. `auto`: the fastest that this
    /// host can keep up with (measured for a second), up to 1; `auto:MAX`: up to MAX
    #[arg(long, value_name = "FACTOR", default_value = "1")]
    speedup: Speedup,
    /// Print the factor that `--speedup auto` chooses, and exit
    #[arg(long, conflicts_with_all = ["compare", "json"])]
    print_speedup: bool,
    /// Print one JSON object: gaps, both reports, and the load of the host
    #[arg(long, conflicts_with = "compare")]
    json: bool,
    /// Keep the records and reports of both sides in this directory
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Load this running engine instead, such as http://gpu1:8000, and compare it with the twin of the cluster file; without
    /// one, with that of `slipstream describe`
    #[arg(long, value_name = "URL", conflicts_with_all = ["compare", "print_speedup", "speedup"])]
    engine: Option<String>,
    /// Range of token ids in the prompts for `--engine`, FIRST..END: all must be in its vocabulary
    #[arg(
        long,
        value_name = "RANGE",
        default_value = "1000..30000",
        requires = "engine"
    )]
    token_ids: String,
    /// Compare two files of drag records instead of running anything
    #[arg(long, value_names = ["FILE", "FILE"], num_args = 2, conflicts_with_all = ["cluster", "workload", "trace"])]
    compare: Vec<PathBuf>,
}

/// Speed of both sides.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Speedup {
    /// Times the speed of the modelled cluster.
    Fixed(f64),
    /// As fast as the host allows, up to `max`.
    Auto { max: f64 },
}

impl FromStr for Speedup {
    type Err = String;

    fn from_str(text: &str) -> Result<Speedup, String> {
        let factor = |text: &str| {
            let factor = text.parse::<f64>().ok();
            let usable = factor.filter(|factor| factor.is_finite() && *factor > 0.0);
            usable.ok_or_else(|| {
                format!("`{text}` is not a number above 0, `auto`, or `auto:MAX` such as `auto:10`")
            })
        };
        match text.strip_prefix("auto") {
            None => factor(text).map(Speedup::Fixed),
            Some("") => Ok(Speedup::Auto { max: 1.0 }),
            Some(max) => {
                let max = factor(max.strip_prefix(':').unwrap_or(text))?;
                Ok(Speedup::Auto { max })
            }
        }
    }
}

/// Runs both sides, or compares saved ones.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if let [a, b] = args.compare.as_slice() {
        let names = [stem(a), stem(b)];
        let runs = [read(a)?, read(b)?];
        out::print(&gaps::render([&names[0], &names[1]], [&runs[0], &runs[1]]))?;
        return Ok(code([&names[0], &names[1]], [&runs[0], &runs[1]]));
    }
    if let Some(url) = &args.engine {
        return engine(args, url);
    }
    // Errors in the files are reported before anything is started.
    let Some(cluster) = args.cluster.resolve_modelled(&[])? else {
        return Ok(ExitCode::SUCCESS); // --print-config
    };
    args.what.workload(&args.sets.workload_set)?;
    let own;
    let dir = if let Some(dir) = &args.keep {
        std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        dir.as_path()
    } else {
        own = TempDir::new()?;
        &own.0
    };
    let speedup = match args.speedup {
        Speedup::Fixed(factor) => factor,
        Speedup::Auto { max } => calibrate(args, &cluster, dir, max)?,
    };
    if args.print_speedup {
        out::print(&format!("{speedup}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (load, queue) = live(args, speedup, dir)?;
    twin(args, &cluster, speedup, dir)?;
    let runs = [read(&dir.join("live.csv"))?, read(&dir.join("twin.csv"))?];
    let (names, runs) = (["live", "twin"], [&runs[0], &runs[1]]);
    let reports = [report(dir, "live.json")?, report(dir, "twin.json")?];
    let host = HostVerdict::new(load, queue, step_ms(&reports[1]));
    if args.json {
        let [live, twin] = &reports;
        let gaps = gaps::gaps(runs);
        let output = serde_json::json!({
            "speedup": speedup, "host": host.json(), "gaps": gaps, "live": live, "twin": twin,
        });
        out::print_json(&format!(
            "{output}
"
        ))?;
    } else {
        out::print(&gaps::render(names, runs))?;
        out::print(&format!("\n{}", compare::render(&reports, false)))?;
        if let Some(line) = host.line() {
            out::print(&line)?;
        }
    }
    if let Some(warning) = host.warning() {
        errln!("{warning}");
    }
    Ok(code(names, runs))
}

/// Loads the engine at `url`, simulates its twin, and compares the latencies that clients see.
fn engine(args: &Args, url: &str) -> anyhow::Result<ExitCode> {
    args.what.workload(&args.sets.workload_set)?;
    let own;
    let dir = if let Some(dir) = &args.keep {
        std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        dir.as_path()
    } else {
        own = TempDir::new()?;
        &own.0
    };
    let described = dir.join("twin.toml");
    let mut cluster = args.cluster.flags();
    if args.cluster.file().is_none() {
        let mut describe = slipstream()?;
        let output = describe.args(["describe", url]).stderr(Stdio::inherit());
        let output = output.output().context("starting `slipstream describe`")?;
        ensure!(
            output.status.success(),
            "`slipstream describe` did not run; its message is above"
        );
        std::fs::write(&described, &output.stdout)?;
        if args.cluster.is_printed() {
            let text = String::from_utf8(output.stdout)?;
            args.cluster.resolve_over(text)?;
            return Ok(ExitCode::SUCCESS);
        }
        cluster.insert(0, described.clone().into());
        errln!(
            "note: no cluster file is given, so step times are those of the default GPU: name one that \
             `slipstream calibrate` has fitted to the engine, or set engine.timing.gpu"
        );
    } else if let Some(resolved) = args.cluster.resolve_modelled(&[])? {
        cluster.extend(all_workers(&resolved).map(OsString::from));
    } else {
        return Ok(ExitCode::SUCCESS); // --print-config
    }
    let mut bench = bench(args, url, "engine", dir)?;
    bench.args(["--prompt-form", "tokens", "--token-ids", &args.token_ids]);
    bench.arg("--drag").arg(dir.join("live.csv"));
    let before = HostSample::now();
    let status = bench.status().context("starting `slipstream bench`")?;
    let load = HostSample::now().since(&before);
    ensure_ran("bench", status)?;
    let simulated = simulate(args, &cluster, dir)?
        .arg("--drag")
        .arg(dir.join("twin.csv"))
        .status()
        .context("starting `slipstream simulate`")?;
    ensure_ran("simulate", simulated)?;
    let reports = [report(dir, "live.json")?, report(dir, "twin.json")?];
    let host = HostVerdict::new(load, None, step_ms(&reports[1]));
    let lengths = AnswerLengths::of(
        &read_lengths(dir, "live.csv")?,
        &read_lengths(dir, "twin.csv")?,
    );
    if args.json {
        let [live, twin] = &reports;
        let output = serde_json::json!({
            "host": host.json(), "lengths": lengths.json(), "engine": live, "twin": twin,
        });
        out::print_json(&format!(
            "{output}
"
        ))?;
    } else if lengths.is_same() {
        out::print(&compare::render(&reports, false))?;
        if let Some(line) = host.line() {
            out::print(&format!("this {line}"))?;
        }
    }
    if let Some(refusal) = lengths.refusal() {
        errln!("{refusal}");
    }
    Ok(
        if status.success() && simulated.success() && lengths.is_same() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        },
    )
}

/// Tokens of each whole answer in the records of `name`, by request.
fn read_lengths(dir: &Path, name: &str) -> anyhow::Result<BTreeMap<String, u32>> {
    let path = dir.join(name);
    lengths::read(&path).with_context(|| path.display().to_string())
}

pub(super) fn report(dir: &Path, name: &str) -> anyhow::Result<RunReport> {
    let path = dir.join(name);
    let text = super::files::read_text(&path).with_context(|| path.display().to_string())?;
    RunReport::from_json(&text).with_context(|| path.display().to_string())
}

/// An engine step of the run, ms: the median time between tokens. For answers of one token, the
/// TTFT.
pub(super) fn step_ms(report: &RunReport) -> Option<f64> {
    let step = report.latency.itl_ms.or(report.latency.ttft_ms)?.p50;
    (step > 0.0).then_some(step)
}

/// The largest compression up to `max` at which this host, under its current load, meets its
/// deadlines.
fn calibrate(args: &Args, cluster: &Cluster, dir: &Path, max: f64) -> anyhow::Result<f64> {
    let late = host::wake_up_lateness();
    twin(args, cluster, 1.0, dir)?;
    let Some(step_ms) = step_ms(&report(dir, "twin.json")?) else {
        return Ok(max); // no step to be late for
    };
    let Some(factor) = host::compression(step_ms, late, max) else {
        // Even slower would keep nobody's patience, so the run is made, and the warning at its end says what it is worth.
        let factor = max.min(1.0);
        errln!(
            "note: this host is too busy to measure on: timed waits end up to {} ms late, and an engine step takes {} \
             ms; both sides run at speed-up {factor}, and the live figures show the host",
            number(late.as_secs_f64() * 1e3),
            number(step_ms)
        );
        return Ok(factor);
    };
    if factor < max {
        errln!(
            "note: timed waits end up to {} ms late on this host, so both sides run at speed-up {factor} \
             instead of {max}",
            number(late.as_secs_f64() * 1e3)
        );
    }
    Ok(factor)
}

/// Success, unless requests failed, which is reported.
fn code(names: [&str; 2], runs: [&StageGaps; 2]) -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for (name, run) in names.iter().zip(runs) {
        if run.failed() > 0 || run.requests() == 0 {
            errln!(
                "note: {name}: {} failed, {} answered",
                counted(run.failed(), "request"),
                grouped(run.requests())
            );
            code = ExitCode::FAILURE;
        }
    }
    code
}

fn stem(path: &Path) -> String {
    path.file_stem()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

fn read(path: &Path) -> anyhow::Result<StageGaps> {
    let named = || path.display().to_string();
    let mut run = StageGaps::default();
    for record in drag::read(path).with_context(named)? {
        run.add(&record.with_context(named)?);
    }
    Ok(run)
}

/// A directory for this run, removed at its end.
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
        // Leftovers in a temporary directory do no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server process that ends when this value is dropped.
pub(super) struct Server(pub(super) Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn slipstream() -> anyhow::Result<Command> {
    Ok(Command::new(
        std::env::current_exe().context("finding this program's file")?,
    ))
}

/// Time limit of a health check.
const HEALTH_MAX: Duration = Duration::from_secs(30);

/// Time limit for the live cluster's engines to start.
const STARTUP_MAX: Duration = Duration::from_secs(600);

/// Waits until every rank takes requests, as the twin's do from the start.
pub(super) fn await_ranks(url: &str) -> anyhow::Result<()> {
    let client = Client::new(url, None, None)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let begun = Instant::now();
    runtime.block_on(async {
        loop {
            let answer = client.get("/health", HEALTH_MAX).await;
            let body = answer.context("asking the server for its ranks")?.body;
            let body = String::from_utf8_lossy(&body);
            if body.contains("\"ready\":true") && !body.contains("\"ready\":false") {
                return Ok(());
            }
            ensure!(
                begun.elapsed() < STARTUP_MAX,
                "the live cluster's engines were not ready after {} s; lower `engine.startup_s`",
                STARTUP_MAX.as_secs()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
}

/// The seed of `simulate` for a load without one; `bench` would choose a random one.
fn same_seed(what: &WorkloadArgs) -> Option<&'static str> {
    let stated = what.workload.is_some() || what.trace.is_some() || what.seed.is_some();
    (!stated).then_some("--seed=0")
}

/// Runs the live side. Returns the load of the host, and how long the threads of server and client
/// waited for a CPU.
fn live(args: &Args, speedup: f64, dir: &Path) -> anyhow::Result<(HostLoad, Option<RunQueue>)> {
    let mut serve = slipstream()?;
    serve
        .arg("serve")
        .args(args.cluster.flags())
        .args(["--listen", "127.0.0.1:0"])
        .arg(format!("--speedup={speedup}"))
        .stdout(Stdio::piped());
    let mut server = Server(serve.spawn().context("starting `slipstream serve`")?);
    let stdout = server.0.stdout.take().context("the server's output")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    let Some(url) = line.trim().strip_prefix("listening on ") else {
        bail!("`slipstream serve` did not start; its message is above");
    };
    await_ranks(url)?;
    let mut bench = bench(args, url, "live", dir)?;
    bench
        .arg(format!("--time-scale={}", args.scale(speedup)))
        .arg("--trace-stages")
        .arg("--drag")
        .arg(dir.join("live.csv"))
        .arg(format!("--server-pid={}", server.0.id()));
    let before = HostSample::now();
    let at_start = RunQueue::of(server.0.id());
    let mut client = bench.spawn().context("starting `slipstream bench`")?;
    // Its counters disappear when it ends, so they are read periodically.
    let mut of_client = None;
    let status = loop {
        of_client = RunQueue::of(client.id()).or(of_client);
        match client.try_wait()? {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let load = HostSample::now().since(&before);
    let of_server = RunQueue::of(server.0.id()).map(|now| now.since(at_start.unwrap_or_default()));
    let queue = of_server.map(|server| server.plus(of_client.unwrap_or_default()));
    ensure_ran("bench", status)?;
    Ok((load, queue))
}

/// Flags of a twin that has all workers of `cluster` throughout, as the live side has.
fn all_workers(cluster: &Cluster) -> impl Iterator<Item = String> {
    let scaled = cluster.pools.iter().filter(|p| p.autoscale.is_some());
    scaled.map(|pool| format!("--set=pool.{}.autoscale.policy=none", pool.name))
}

fn twin(args: &Args, cluster: &Cluster, speedup: f64, dir: &Path) -> anyhow::Result<()> {
    let mut simulate = simulate(args, &args.cluster.flags(), dir)?;
    simulate
        .args(all_workers(cluster))
        .arg(format!("--time-scale={}", args.scale(speedup)))
        .arg(format!("--speedup={speedup}"))
        // The live side is our own server, not vLLM's.
        .arg("--no-api-time")
        .arg("--drag")
        .arg(dir.join("twin.csv"));
    let status = simulate
        .status()
        .context("starting `slipstream simulate`")?;
    ensure_ran("simulate", status)
}

/// `slipstream bench` of the server at `url`, with its report in `live.json`.
fn bench(args: &Args, url: &str, label: &str, dir: &Path) -> anyhow::Result<Command> {
    let mut bench = slipstream()?;
    bench
        .args(["bench", url])
        .args(args.what.flags())
        .args(same_seed(&args.what))
        .args(args.workload_sets())
        .arg("--out")
        .arg(dir.join("live.json"))
        .args(["--label", label])
        .stdout(Stdio::null());
    Ok(bench)
}

/// `slipstream simulate` of the same load, with its report in `twin.json`. `cluster`: the arguments
/// that name the cluster.
fn simulate(args: &Args, cluster: &[OsString], dir: &Path) -> anyhow::Result<Command> {
    let mut simulate = slipstream()?;
    simulate
        .arg("simulate")
        .args(cluster)
        .args(args.what.flags())
        .args(args.workload_sets())
        .arg("--out")
        .arg(dir.join("twin.json"))
        .args(["--label", "twin"])
        .stdout(Stdio::null());
    Ok(simulate)
}

/// Fails unless the command did its work. Exit status 1 means that requests failed: the report
/// shows them.
fn ensure_ran(command: &str, status: ExitStatus) -> anyhow::Result<()> {
    ensure!(
        status.code().is_some_and(|code| code < 2),
        "`slipstream drag` runs `slipstream {command}`, which failed ({status}); its message is above"
    );
    Ok(())
}

impl Args {
    /// Compression of arrivals and think times.
    fn scale(&self, speedup: f64) -> f64 {
        self.what.time_scale.unwrap_or(1.0) * speedup
    }

    /// The flags `--workload-set` again.
    fn workload_sets(&self) -> impl Iterator<Item = String> {
        let sets = self.sets.workload_set.iter();
        sets.map(|set| format!("--workload-set={set}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speedup_is_a_factor_or_chosen() {
        let check = |text: &str, expected| assert_eq!(text.parse(), Ok(expected), "{text}");
        check("20", Speedup::Fixed(20.0));
        check("auto", Speedup::Auto { max: 1.0 });
        check("auto:10", Speedup::Auto { max: 10.0 });
        for text in ["0", "-1", "inf", "fast", "auto:", "auto:0", "auto10", ""] {
            assert!(text.parse::<Speedup>().is_err(), "{text}");
        }
    }
}
