//! `slipstream demo`: one workload on eight modelled workers, live and in virtual time, with two
//! routing policies.
//!
//! Runs this binary's `serve`, `bench` and `simulate` as separate processes on loopback, as a user
//! would. The simulated half is printed first. Live time is compressed only as far as the host keeps up with, which
//! a calibration measures; on a busy host the live half is shorter, and its text says how far it can be trusted.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use slipstream_base::width::floor_u64;
use slipstream_bench::host::{self, HostSample, HostVerdict, RunQueue};
use slipstream_report::table::{color_wanted, counted, grouped, number};
use slipstream_report::{RunReport, compare};

use super::drag::{Server, await_ranks, report, slipstream, step_ms};
use crate::out;

/// Flags of `slipstream demo`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A fifth of the requests and of the time
    #[arg(long, conflicts_with = "trace")]
    short: bool,
    /// Replay the beginning of a trace in Mooncake's format, on larger workers
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Number of requests, simulated and live [default: 6000 simulated, with --short 1200, of a trace 1000; and as
    /// many of them live as fit into 20 s per policy, 35 s on a busy host]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Modelled seconds per second of the live half [default: as many as this host keeps up with, up to 10, of a
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

/// Length of the calibration's load.
const CALIBRATION: Duration = Duration::from_secs(2);
/// Length of a policy's live run.
const LIVE: Duration = Duration::from_secs(20);
/// The same at a low pace, at which fewer requests fit into a second.
const LIVE_SLOW: Duration = Duration::from_secs(35);
/// Fewest live requests, however slow this host is.
const LIVE_REQUESTS_MIN: u64 = 150;

/// Largest ratio of the live to the simulated median ITL. An engine's pace does not depend on the policy
/// or on its load, so a larger one means that the host did not keep time.
const ITL_RATIO_MAX: f64 = 1.25;

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
    let color = color_wanted(
        std::io::stdout().is_terminal(),
        std::env::var_os("NO_COLOR").as_deref(),
    );
    let simulated = demo.simulated(demo.requests, 1.0, "simulated")?;
    out::print(&format!(
        "Eight modelled workers: {}. Load: {}.\n\n\
         Simulated, in {} s:\n\n{}{}\n",
        demo.who,
        demo.what,
        number(simulated.wall.as_secs_f64()),
        compare::render_gains(&simulated.reports, color),
        demo.why,
    ))?;

    let speedup = match args.speedup {
        Some(speedup) => speedup,
        None => demo.calibrate(&simulated.reports[1])?,
    };
    let (requests, twins) = demo.fit(args, speedup)?;
    let mut live = Vec::new();
    for (at, ((policy, label), twin)) in POLICIES.iter().zip(&twins.reports).enumerate() {
        errln!(
            "live, {} of {}: {label} routing, {}, about {} s",
            at + 1,
            POLICIES.len(),
            counted(requests, "request"),
            number(twin.duration_s.ceil())
        );
        let host = demo.live(policy, label, speedup, &demo.load(requests), policy)?;
        live.push((report(&dir, &format!("{policy}.json"))?, host));
    }
    out::print(&live_text(&demo, speedup, &live, &twins.reports, color))?;
    out::print(&demo.closing(requests, speedup))?;
    let failed = live.iter().any(|(report, _)| report.requests.failed > 0);
    Ok(if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// The live tables, and how far they can be trusted.
fn live_text(
    demo: &Demo<'_>,
    speedup: f64,
    live: &[(RunReport, HostVerdict)],
    twins: &[RunReport],
    color: bool,
) -> String {
    let reports: Vec<RunReport> = live.iter().map(|(report, _)| report.clone()).collect();
    let sent = reports[0].requests.sent;
    let which = if sent < demo.requests {
        format!("the first {} of these", counted(sent, "request"))
    } else {
        "the same requests".to_owned()
    };
    let mut text = format!(
        "Live, over HTTP on this machine: {which}, {}:\n\n{}",
        if speedup == 1.0 {
            "at the real pace".to_owned()
        } else {
            format!("{speedup} times as fast, so that 1 ms stands for {speedup} ms")
        },
        compare::render_gains(&reports, color)
    );
    let ratio = reports.iter().zip(twins).filter_map(itl_ratio);
    let ratio = ratio.reduce(f64::max).unwrap_or(1.0);
    let busy = live.iter().filter_map(|(_, host)| host.busy_share());
    let busy = busy.reduce(f64::max).map_or(String::new(), |share| {
        format!(" Its CPUs were {} % busy.", number(100.0 * share))
    });
    if ratio > ITL_RATIO_MAX {
        let _ = write!(
            text,
            "\nHow far to trust this half: this host did not keep time. Tokens came {} times as far apart as the \
             engines made them, so the live latencies show the host; counts and prefix hits are right, and so is \
             the simulated half.{busy}\n",
            number(ratio)
        );
        return text;
    }
    for ((_, label), (live, twin)) in POLICIES.iter().zip(reports.iter().zip(twins)) {
        let _ = write!(
            text,
            "\n{label} routing, live and simulated:\n\n{}",
            compare::render(&[live.clone(), twin.clone()], color)
        );
    }
    let doubt = live.iter().find_map(|(_, host)| host.wait_share());
    let _ = match doubt {
        Some(share) => writeln!(
            text,
            "\nHow far to trust this half: server and client waited for a CPU at each wake-up, {} % of an engine \
             step, so live latencies are that much too long or more.{busy}",
            number(100.0 * share)
        ),
        None => writeln!(
            text,
            "\nHow far to trust this half: this host kept time, tokens came {} times as far apart as simulated.{busy}",
            number(ratio)
        ),
    };
    text
}

/// How many times as far apart tokens came live as simulated.
fn itl_ratio((live, twin): (&RunReport, &RunReport)) -> Option<f64> {
    Some(live.latency.itl_ms?.p50 / twin.latency.itl_ms?.p50)
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

/// Both policies in virtual time.
struct Simulated {
    reports: Vec<RunReport>,
    /// Time that it took.
    wall: Duration,
}

/// The cluster and the load that are run.
struct Demo<'a> {
    dir: &'a Path,
    /// The cluster file and its overrides.
    cluster: Vec<OsString>,
    /// Flags of the load without the number of requests, for `bench` and `simulate`.
    load: Vec<OsString>,
    /// Simulated requests.
    requests: u64,
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
                load: vec!["--trace".into(), trace.clone().into()],
                requests,
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
            // The file's sessions think for up to a minute; single questions at a steady rate fit into any time.
            load: vec![
                "--workload".into(),
                file.into(),
                "--workload-set=session.turns=1".into(),
                "--workload-set=arrival.rate_per_s=20".into(),
            ],
            requests,
            speedup_max: 10.0,
            who: "Qwen3 32B on 2 x H100 each",
            what: format!(
                "{} questions about 64 documents, 20 a second",
                grouped(requests)
            ),
            why: "\nKV routing sends a question to the worker that has its document cached; round robin makes every \
                  worker read every document.\n",
        })
    }

    /// The flags of the load with its first `requests` requests.
    fn load(&self, requests: u64) -> Vec<OsString> {
        let mut load = self.load.clone();
        load.push(format!("--requests={requests}").into());
        load
    }

    /// The requests that a live run has time for, and their simulation at its pace. `--requests` decides, if it is
    /// stated.
    fn fit(&self, args: &Args, speedup: f64) -> anyhow::Result<(u64, Simulated)> {
        let time = if speedup < self.speedup_max {
            LIVE_SLOW
        } else {
            LIVE
        };
        let limit_s = time.as_secs_f64() / if args.short { 5.0 } else { 1.0 };
        let mut requests = self.requests;
        loop {
            let twins = self.simulated(requests, speedup, "twin")?;
            let durations = twins.reports.iter().map(|report| report.duration_s);
            let longest = durations.fold(0.0, f64::max);
            let fewer = floor_u64(requests as f64 * 0.95 * limit_s / longest.max(1e-9));
            let fewer = fewer.max(LIVE_REQUESTS_MIN);
            if args.requests.is_some() || longest <= limit_s || fewer >= requests {
                return Ok((requests, twins));
            }
            requests = fewer;
        }
    }

    /// The largest compression at which this host keeps up with the engines' pace, as far as that can be measured
    /// in a few seconds; 1 on a host that is too busy for any. `twin`: the load in virtual time.
    fn calibrate(&self, twin: &RunReport) -> anyhow::Result<f64> {
        errln!("measuring how fast a live cluster can run on this host, about 5 s");
        let before = HostSample::now();
        let late = host::wake_up_lateness();
        let others = HostSample::now().since(&before).busy_share.unwrap_or(0.0);
        let fastest =
            step_ms(twin).and_then(|step| host::compression(step, late, self.speedup_max));
        let fastest = fastest.unwrap_or(1.0).max(1.0);
        let rate = twin.throughput.requests_per_s;
        let requests = (rate * fastest * CALIBRATION.as_secs_f64()).ceil().max(1.0);
        let load = self.load(floor_u64(requests));
        let before = HostSample::now();
        self.live("kv", "calibration", fastest, &load, "calibration")?;
        let busy = HostSample::now().since(&before).busy_share;
        // Without counters of the kernel there is nothing to go by.
        let speedup = busy.map_or(fastest, |busy| {
            host::quieter_compression(fastest, busy, others)
        });
        if speedup < self.speedup_max {
            errln!(
                "timed waits end up to {} ms late, and other programs take {} % of the CPUs: the live half runs at \
                 {speedup} times the real pace, not {}",
                number(late.as_secs_f64() * 1e3),
                number(100.0 * others),
                self.speedup_max
            );
        }
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

    /// The load's first `requests` requests under each policy, `speedup` times as fast, in virtual time; saved as
    /// `POLICY.NAME.json`.
    fn simulated(&self, requests: u64, speedup: f64, name: &str) -> anyhow::Result<Simulated> {
        let began = Instant::now();
        let mut reports = Vec::new();
        for (policy, label) in POLICIES {
            let file = format!("{policy}.{name}.json");
            let status = slipstream()?
                .arg("simulate")
                .args(&self.cluster)
                .args(self.load(requests))
                .arg(format!("--set=router.policy={policy}"))
                .arg(format!("--speedup={speedup}"))
                .arg(format!("--time-scale={speedup}"))
                .arg("--no-api-time")
                .args(["--label", &format!("{label}, simulated"), "--quiet"])
                .arg("--out")
                .arg(self.dir.join(&file))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .output()
                .context("starting `slipstream simulate`")?;
            ensure!(
                status.status.code().is_some_and(|code| code < 2),
                "`slipstream simulate` did not run: {}",
                String::from_utf8_lossy(&status.stderr).trim()
            );
            reports.push(report(self.dir, &file)?);
        }
        Ok(Simulated {
            reports,
            wall: began.elapsed(),
        })
    }

    /// What was shown, where the pages are, and what to try next.
    fn closing(&self, requests: u64, speedup: f64) -> String {
        let dir = self.dir.display();
        let (workload, model) = if self.load[0] == "--workload" {
            (format!("{dir}/workload.toml"), "qwen3-32b")
        } else {
            let trace = Path::new(&self.load[1]).display().to_string();
            (trace, "llama-3.1-70b")
        };
        format!(
            "\nShown: KV-aware routing against round robin, simulated with {}, and live with {} at {}the \
             real pace.\n\
             Pages: {dir}/kv.html and {dir}/round_robin.html have the live runs; the cluster file and the reports \
             are beside them.\n\
             Next: `slipstream plan {workload} --model {model} --gpus h100-sxm,l40s --slo ttft=1s,itl=50ms` finds the cheapest \
             cluster for a load, `slipstream serve {dir}/cluster.toml` is the live cluster with its page at /ui, and \
             `slipstream serve --engine http://gpu1:8000 --engine http://gpu2:8000` routes to your engines.\n",
            counted(self.requests, "request"),
            counted(requests, "request"),
            if speedup == 1.0 {
                String::new()
            } else {
                format!("{speedup} times ")
            },
        )
    }
}
