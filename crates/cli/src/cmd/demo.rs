//! `slipstream demo`: one workload on eight modelled workers, live and in virtual time, with two
//! routing policies.
//!
//! Runs this binary's `serve`, `bench` and `simulate` as separate processes on loopback, as a user
//! would. Time is compressed only as far as the host keeps up with: a calibration measures it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use slipstream_bench::host::{self, HostSample, HostVerdict, RunQueue};
use slipstream_report::table::{color_wanted, grouped, number};
use slipstream_report::{RunReport, compare};

use super::drag::{Server, await_ranks, report, slipstream, step_ms};
use crate::out;

/// Flags of `slipstream demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A fifth of the requests
    #[arg(long, conflicts_with = "trace")]
    short: bool,
    /// Replay the beginning of a trace in Mooncake's format, on larger workers
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Total number of requests [default: 6000, with --short 1200, of a trace 1000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Modelled seconds per second, however busy the host is [default: calibrated, up to 10, of a
    /// trace up to 6]
    #[arg(long, value_name = "FACTOR", value_parser = factor)]
    speedup: Option<f64>,
    /// Folder for reports and pages [default: a new temporary one]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

const CLUSTER: &str = include_str!("../../../../examples/cluster.toml");
const WORKLOAD: &str = include_str!("../../../../examples/demo.workload.toml");

/// Policies in the order of the table's columns: the second one is expected to be better.
const POLICIES: [(&str, &str); 2] = [("round_robin", "round robin"), ("kv", "kv")];

/// Part that other processes may take at the start: the rest is too little to run in.
const OTHERS_MAX: f64 = 0.4;

/// Length of the calibration's load.
const CALIBRATION: Duration = Duration::from_secs(2);

/// Largest ratio of the live to the simulated median ITL. An engine's pace does not depend on the policy
/// or on its load, so a larger one means that the host did not keep time.
const ITL_RATIO_MAX: f64 = 1.25;
/// Exit status if all requests were answered, but the host did not keep time (`EX_TEMPFAIL` of sysexits.h).
const DID_NOT_KEEP_TIME: u8 = 75;

fn factor(text: &str) -> Result<f64, String> {
    let factor = text.parse::<f64>().ok();
    factor
        .filter(|factor| factor.is_finite() && *factor > 0.0)
        .ok_or_else(|| format!("`{text}` is not a number above 0"))
}

/// Runs the demo.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let dir = folder(args.out.as_deref())?;
    let demo = Demo::new(args, &dir)?;
    let speedup = match args.speedup {
        Some(speedup) => speedup,
        None => demo.calibrate()?,
    };
    out::print(&format!(
        "Eight modelled workers ({}) behind real HTTP on this machine.\n\
         Load: {}, {speedup} times as fast as they would come.\n",
        demo.who, demo.what
    ))?;

    let mut live = Vec::new();
    for (policy, label) in POLICIES {
        errln!("{label} routing, live:");
        let host = demo.live(policy, label, speedup, &demo.load, policy)?;
        live.push((report(&dir, &format!("{policy}.json"))?, host));
    }
    let begun = Instant::now();
    let mut twins = Vec::new();
    for (policy, label) in POLICIES {
        demo.simulate(policy, label, speedup)?;
        twins.push(report(&dir, &format!("{policy}.simulated.json"))?);
    }
    let simulated = begun.elapsed();

    let color = color_wanted(
        std::io::stdout().is_terminal(),
        std::env::var_os("NO_COLOR").as_deref(),
    );
    let mut code = ExitCode::SUCCESS;
    let failed = live.iter().any(|(report, _)| report.requests.failed > 0);
    let late = live
        .iter()
        .zip(&twins)
        .find_map(|((live, _), twin)| behind(live, twin));
    let mut text = String::new();
    if let Some(ratio) = late {
        // Times that show the host alone are not printed as if they were the cluster's.
        errln!(
            "error: this host did not keep time: tokens came {} times as far apart as the engines made \
             them, so the live latencies show the host; stop other jobs, or run with a lower `--speedup` \
             than {speedup}",
            number(ratio)
        );
        code = ExitCode::from(DID_NOT_KEEP_TIME);
        let _ = write!(
            text,
            "\nSimulated (virtual time, so that a busy host does not change it):\n\n{}",
            compare::render_gains(&twins, color)
        );
    } else {
        for (_, host) in &live {
            if let Some(warning) = host.warning() {
                errln!("{warning}");
                break;
            }
        }
        let reports: Vec<RunReport> = live.into_iter().map(|(report, _)| report).collect();
        let _ = write!(
            text,
            "\nLive:\n\n{}",
            compare::render_gains(&reports, color)
        );
        for ((_, label), (live, twin)) in POLICIES.iter().zip(reports.into_iter().zip(twins)) {
            let _ = write!(
                text,
                "\n{label} routing, live and simulated:\n\n{}",
                compare::render(&[live, twin], color)
            );
        }
    }
    let _ = write!(
        text,
        "\nBoth simulations took {} s. Time was compressed {speedup} times: 1 ms stands for {} ms of the \
         modelled GPUs.\n{}Pages: {} and {}\n",
        number(simulated.as_secs_f64()),
        number(speedup),
        demo.why,
        dir.join("kv.html").display(),
        dir.join("round_robin.html").display(),
    );
    out::print(&text)?;
    if failed {
        code = ExitCode::FAILURE;
    }
    Ok(code)
}

/// How many times as far apart tokens came live as simulated, if that is too much to be the cluster's.
fn behind(live: &RunReport, twin: &RunReport) -> Option<f64> {
    let ratio = live.latency.itl_ms?.p50 / twin.latency.itl_ms?.p50;
    (ratio > ITL_RATIO_MAX).then_some(ratio)
}

/// The folder of the results.
fn folder(stated: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(dir) = stated {
        std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        return Ok(dir.to_owned());
    }
    // `create_dir` fails if the name exists, so that no other user's folder is written to.
    let path = std::env::temp_dir().join(format!("slipstream-demo-{}", std::process::id()));
    std::fs::create_dir(&path)
        .with_context(|| format!("making {}; name another folder by --out", path.display()))?;
    Ok(path)
}

/// The cluster and the load that are run.
struct Demo<'a> {
    dir: &'a Path,
    /// The cluster file and its overrides.
    cluster: Vec<OsString>,
    /// Flags of the load, for `bench` and `simulate`.
    load: Vec<OsString>,
    is_trace: bool,
    speedup_max: f64,
    who: &'static str,
    what: String,
    /// The reason of the difference between the policies.
    why: &'static str,
}

impl<'a> Demo<'a> {
    fn new(args: &Args, dir: &'a Path) -> anyhow::Result<Demo<'a>> {
        let file = dir.join("cluster.toml");
        let write = |path: &Path, text: &str| {
            std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
        };
        write(&file, CLUSTER)?;
        let mut cluster: Vec<OsString> = vec![file.into()];
        if let Some(trace) = &args.trace {
            // Traces hold prompts of up to 128k tokens: a model that takes them, on four GPUs each.
            cluster.push("--set=model.preset=llama-3.1-70b".into());
            cluster.push("--set=engine.tensor_parallel_size=4".into());
            let requests = args.requests.unwrap_or(1000);
            return Ok(Demo {
                dir,
                cluster,
                load: vec![
                    "--trace".into(),
                    trace.clone().into(),
                    format!("--requests={requests}").into(),
                ],
                is_trace: true,
                speedup_max: 6.0,
                who: "Llama 3.1 70B on 4 x H100 each",
                what: format!(
                    "the first {} requests of {}",
                    grouped(requests),
                    trace.display()
                ),
                why: "",
            });
        }
        let file = dir.join("workload.toml");
        write(&file, WORKLOAD)?;
        let requests = args
            .requests
            .unwrap_or(if args.short { 1200 } else { 6000 });
        Ok(Demo {
            dir,
            cluster,
            load: vec![
                "--workload".into(),
                file.into(),
                format!("--requests={requests}").into(),
            ],
            is_trace: false,
            speedup_max: 10.0,
            who: "Qwen3 32B on 2 x H100 each",
            what: format!("{} questions about 64 documents", grouped(requests)),
            why: "KV routing sends a question to the worker that has its document cached; round robin \
                  makes every worker read every document.\n",
        })
    }

    /// The largest compression at which the host stays below [`host::BUSY_MAX`] and meets an engine's deadlines.
    fn calibrate(&self) -> anyhow::Result<f64> {
        let before = HostSample::now();
        let late = host::wake_up_lateness();
        let others = HostSample::now().since(&before).busy_share.unwrap_or(0.0);
        let advice = "stop other jobs, or force the demo with `--speedup 1`";
        ensure!(
            others <= OTHERS_MAX,
            "other processes take {} % of this host's CPU time, so live latencies would show them; {advice}",
            number(100.0 * others)
        );
        self.simulate("kv", "calibration", 1.0)?;
        let twin = report(self.dir, "kv.simulated.json")?;
        let fastest =
            step_ms(&twin).and_then(|step| host::compression(step, late, self.speedup_max));
        let Some(fastest) = fastest else {
            bail!(
                "timed waits end up to {} ms late on this host, which is too much of an engine step; {advice}",
                number(late.as_secs_f64() * 1e3)
            );
        };
        errln!("calibration, {} s:", CALIBRATION.as_secs());
        let rate = twin.throughput.requests_per_s;
        let requests = (rate * fastest * CALIBRATION.as_secs_f64()).ceil().max(1.0);
        let mut load = self.load.clone();
        load.pop(); // --requests
        load.push(format!("--requests={requests}").into());
        if !self.is_trace {
            // The rate of requests of the whole run from the start, without pauses.
            load.push("--set=session.turns=1".into());
            load.push(format!("--set=arrival.rate_per_s={rate}").into());
        }
        let before = HostSample::now();
        self.live("kv", "calibration", fastest, &load, "calibration")?;
        let busy = HostSample::now().since(&before).busy_share;
        let Some(busy) = busy else {
            return Ok(fastest); // the kernel does not count
        };
        let Some(speedup) = host::quieter_compression(fastest, busy, others) else {
            bail!(
                "this host was {} % busy at {fastest} times the modelled pace, {} % of it other processes, \
                 and would be too busy even in real time; {advice}",
                number(100.0 * busy),
                number(100.0 * others)
            );
        };
        errln!(
            "calibrated: at {fastest} times the modelled pace this host was {} % busy ({} % before); the demo \
             runs {speedup} times as fast, to stay below {} %",
            number(100.0 * busy),
            number(100.0 * others),
            number(100.0 * host::BUSY_MAX),
        );
        Ok(speedup)
    }

    /// Serves with `policy`, runs `load`, and saves its report as `NAME.json` and its page as `NAME.html`.
    fn live(
        &self,
        policy: &str,
        label: &str,
        speedup: f64,
        load: &[OsString],
        name: &str,
    ) -> anyhow::Result<HostVerdict> {
        let mut serve = slipstream()?;
        serve
            .arg("serve")
            .args(&self.cluster)
            .args(["--listen", "127.0.0.1:0"])
            .arg(format!("--speedup={speedup}"))
            .arg(format!("--set=router.policy={policy}"))
            .stdout(Stdio::piped());
        let mut server = Server(serve.spawn().context("starting `slipstream serve`")?);
        let stdout = server.0.stdout.take().context("the server's output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let Some(url) = line.trim().strip_prefix("listening on ") else {
            bail!("`slipstream serve` did not start; its message is above");
        };
        await_ranks(url)?;
        let at_start = RunQueue::of(server.0.id());
        let before = HostSample::now();
        let status = slipstream()?
            .args(["bench", url])
            .args(load)
            .arg(format!("--time-scale={speedup}"))
            .args(["--label", label])
            .arg(format!("--server-pid={}", server.0.id()))
            .arg("--out")
            .arg(self.dir.join(format!("{name}.json")))
            .arg("--html")
            .arg(self.dir.join(format!("{name}.html")))
            .stdout(Stdio::null())
            .status()
            .context("starting `slipstream bench`")?;
        ensure!(
            status.code().is_some_and(|code| code < 2),
            "`slipstream bench` did not run; its message is above"
        );
        let load = HostSample::now().since(&before);
        let queue = RunQueue::of(server.0.id()).map(|now| now.since(at_start.unwrap_or_default()));
        let step = step_ms(&report(self.dir, &format!("{name}.json"))?);
        Ok(HostVerdict::new(load, queue, step))
    }

    /// The same cluster, load and compression in virtual time; `POLICY.simulated.json`.
    fn simulate(&self, policy: &str, label: &str, speedup: f64) -> anyhow::Result<()> {
        let status = slipstream()?
            .arg("simulate")
            .args(&self.cluster)
            .args(&self.load)
            .arg(format!("--set=router.policy={policy}"))
            .arg(format!("--speedup={speedup}"))
            .arg(format!("--time-scale={speedup}"))
            .arg("--no-api-time")
            .args(["--label", &format!("{label}, simulated"), "--quiet"])
            .arg("--out")
            .arg(self.dir.join(format!("{policy}.simulated.json")))
            .stdout(Stdio::null())
            .status()
            .context("starting `slipstream simulate`")?;
        ensure!(
            status.code().is_some_and(|code| code < 2),
            "`slipstream simulate` did not run; its message is above"
        );
        Ok(())
    }
}
