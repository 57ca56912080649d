//! Loads Slipstream's `sched_ext` scheduler and shows its counters.
//!
//! The scheduler lives as long as this process: however the process ends, SIGKILL included, the kernel
//! returns to its own.
//!
//! Exit status: 0 ended on request (SIGINT, SIGTERM, SysRq-S,
//! `--seconds`), [`REFUSED`], [`KERNEL_ENDED`].
//! `packaging/systemd/slipstream-scx.service` restarts after the last one only.
// They end the process, and with it the scheduler, once their reader has gone; see `errln`.
#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]

/// `eprintln!` that does not end the scheduler if the reader of stderr has gone.
macro_rules! errln {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

#[cfg(test)]
mod differential;
mod imports;
mod intf;
mod notify;
mod watch;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};
use libbpf_rs::btf::{Btf, types};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder};
use slipstream_base::width::{low_u64, round_u64, to_u32};
use slipstream_cpusched::policy::{COUNTERS, Params};
use slipstream_scx::cgroups::Honors;
use slipstream_scx::classes::Classes;
use slipstream_scx::doctor::{self, Places, Verdict};
use slipstream_scx::link::Mechanism;
use slipstream_scx::topology::Topology;
use slipstream_scx::wake;

static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/slipstream.bpf.o"));

/// The scheduler could not be loaded; a retry would fail, too.
const REFUSED: u8 = 2;
/// The kernel ended the scheduler while it ran: a stall, or an error of the BPF program.
const KERNEL_ENDED: u8 = 3;

#[derive(Parser)]
#[command(
    name = "slipstream-scx",
    version,
    about = "Slipstream's CPU scheduler for Linux (sched_ext)"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Load the scheduler; it stays until this process ends
    Run(Run),
    /// Show the counters of the running scheduler
    Stats {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Interval for printing again, in seconds
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
        interval: Option<u64>,
    },
}

#[derive(clap::Args)]
struct Run {
    /// Class file: threads by name or cgroup, with weight, slice and CPUs
    #[arg(long, value_name = "FILE")]
    classes: Option<PathBuf>,
    /// Cost of waking an idle CPU, us, or `auto` to measure it: no handoff from a waker that computes
    /// for longer than that after a wake-up
    #[arg(long, default_value = "20", value_parser = wake_idle)]
    wake_idle_us: WakeIdle,
    /// Disable handoffs
    #[arg(long)]
    no_hand_off: bool,
    /// Follow every sync hint
    #[arg(long)]
    no_learn: bool,
    /// Load although cgroups have CPU limits (cpu.max) that would no longer be enforced
    #[arg(long)]
    ignore_cpu_max: bool,
    /// Interval for printing counters, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    stats: Option<u64>,
    /// End after this many seconds
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,
}

#[derive(Clone, Copy)]
enum WakeIdle {
    Auto,
    Us(u64),
}

fn wake_idle(text: &str) -> Result<WakeIdle, String> {
    match text.parse() {
        _ if text == "auto" => Ok(WakeIdle::Auto),
        Ok(us @ 1..=10_000) => Ok(WakeIdle::Us(us)),
        _ => Err("must be `auto` or 1 to 10000".into()),
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run(&args),
        Command::Stats { json, interval } => stats(json, interval).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|e| {
        errln!("error: {e:#}");
        ExitCode::from(REFUSED)
    })
}

/// Rejects a host that lacks a requirement or loses a guarantee, and warns of ignored settings.
fn check_host(args: &Run) -> anyhow::Result<()> {
    let places = Places {
        sysfs: Path::new("/sys"),
        procfs: Path::new("/proc"),
    };
    let imports = imports::of_object(PROGRAM)?;
    let checks = doctor::examine_with(places, &imports, Honors::ours());
    let line = |c: &doctor::Check| format!("  {}: {}\n    {}", c.what, c.found, c.remedy);
    let is_ours = |c: &doctor::Check| c.found.ends_with("ours");
    let stands_in_the_way = |c: &&doctor::Check| match c.verdict {
        Verdict::Missing => true,
        Verdict::Breaks => !args.ignore_cpu_max,
        // Ours, attached by another process.
        Verdict::Ok | Verdict::Note => is_ours(c),
    };
    let refused: Vec<String> = checks.iter().filter(stands_in_the_way).map(line).collect();
    if !refused.is_empty() {
        bail!(
            "the scheduler cannot be loaded here:\n{}",
            refused.join("\n")
        );
    }
    for c in &checks {
        if c.verdict != Verdict::Ok {
            errln!("warning:\n{}", line(c));
        }
    }
    Ok(())
}

fn run(args: &Run) -> anyhow::Result<ExitCode> {
    // Before the scheduler is loaded: a shell starts background jobs with SIGINT ignored, and only a
    // handler changes that.
    let signals = watch::Signals::install()?;
    check_host(args)?;
    let wake_idle_us = match args.wake_idle_us {
        WakeIdle::Us(us) => us,
        WakeIdle::Auto => measure_wake_idle()?,
    };
    let ends = args
        .seconds
        .map(|s| Instant::now() + Duration::from_secs(s));
    let mut seen = BTreeSet::new();
    loop {
        // Before the topology: the kernel refuses the scheduler if CPUs changed since.
        let hotplug_seq = std::fs::read_to_string("/sys/kernel/sched_ext/hotplug_seq")
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(0);
        let topology = Topology::read(Path::new("/sys"))?;
        seen.extend(topology.cpus.keys().copied());
        let gone = seen.iter().filter(|c| !topology.cpus.contains_key(c));
        let gone: BTreeSet<u32> = gone.copied().collect();
        let classes = read_classes(args.classes.as_deref(), &topology, &gone)?;
        let mut params = Params::with_defaults();
        params.wake_idle_ns = wake_idle_us * 1_000;
        params.hand_off = u32::from(!args.no_hand_off);
        params.learn = u32::from(!args.no_learn);
        params.llcs_per_node = topology.llcs_per_node();
        let (object, _link) = load(&params, &topology, &classes, hotplug_seq)?;
        errln!(
            "slipstream schedules {} CPUs in {} LLCs; handoff up to {wake_idle_us} us; \
             end this process to return to the kernel's scheduler",
            topology.cpus.len(),
            topology.llcs.len()
        );
        notify::ready(&format!(
            "{} CPUs in {} LLCs",
            topology.cpus.len(),
            topology.llcs.len()
        ));
        match watch::until_the_end(&object, args, &classes, &signals, ends)? {
            watch::Ended::OnRequest => return Ok(ExitCode::SUCCESS),
            watch::Ended::Hotplug => {
                errln!("the online CPUs changed: reading the topology and loading again");
            }
            watch::Ended::ByKernel => return Ok(ExitCode::from(KERNEL_ENDED)),
        }
    }
}

/// Wakes a thread by futex a few times, under the current scheduler; it usually finds an idle
/// CPU. A handoff must be faster than the median.
fn measure_wake_idle() -> anyhow::Result<u64> {
    let spec = wake::Spec {
        mechanism: Mechanism::Futex,
        rounds: 500,
        warmup: 50,
        linger_us: 0,
    };
    let measured = wake::measure(spec).context("measuring the wake-up of an idle CPU")?;
    Ok(round_u64(measured.latency.p50_us).clamp(5, 1_000))
}

/// `gone`: CPUs that were present when the file was first read.
fn read_classes(
    file: Option<&Path>,
    topology: &Topology,
    gone: &BTreeSet<u32>,
) -> anyhow::Result<Classes> {
    let Some(file) = file else {
        return Ok(Classes::default());
    };
    let text =
        std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    Classes::parse_without(&text, topology, gone).with_context(|| format!("{}", file.display()))
}

fn map<'o>(object: &'o Object, name: &str) -> anyhow::Result<libbpf_rs::Map<'o>> {
    let found = object.maps().find(|m| m.name().to_string_lossy() == name);
    found.with_context(|| format!("the BPF object has no map `{name}`; rebuild it"))
}

/// The flags of `struct sched_ext_ops` that the running kernel knows; it refuses all others.
fn kernels_flags() -> anyhow::Result<u64> {
    let btf =
        Btf::from_vmlinux().context("reading the kernel's types (/sys/kernel/btf/vmlinux)")?;
    let is_flag = |name: Option<&OsStr>| {
        name.and_then(OsStr::to_str)
            .is_some_and(|n| n.starts_with("SCX_OPS_"))
    };
    // 64 bits wide since it has a flag above bit 31.
    if let Some(flags) = btf.type_by_name::<types::Enum64<'_>>("scx_ops_flags") {
        let flags = flags.iter().filter(|f| is_flag(f.name));
        return Ok(flags.fold(0, |all, f| all | low_u64(f.value.cast_unsigned())));
    }
    let flags = btf
        .type_by_name::<types::Enum<'_>>("scx_ops_flags")
        .context("this kernel has no `enum scx_ops_flags`: it lacks sched_ext")?;
    let flags = flags.iter().filter(|f| is_flag(f.name));
    Ok(flags.fold(0, |all, f| all | f.value.cast_unsigned()))
}

fn load(
    params: &Params,
    t: &Topology,
    classes: &Classes,
    hotplug_seq: u64,
) -> anyhow::Result<(Object, Link)> {
    if t.llcs.len() > intf::LLCS_MAX || t.cpus.keys().any(|&id| id >= intf::CPUS_MAX) {
        bail!(
            "{} LLCs and CPU numbers up to {}: at most {} LLCs and CPU {} are supported",
            t.llcs.len(),
            t.cpus.keys().last().copied().unwrap_or(0),
            intf::LLCS_MAX,
            intf::CPUS_MAX - 1
        );
    }
    let rules: Vec<_> = classes.rules.iter().filter_map(intf::rule).collect();
    let by_cgroup = rules.len() < classes.rules.len();
    let mut builder = ObjectBuilder::default();
    let mut open = builder
        .name("slipstream")?
        .open_memory(PROGRAM)
        .context("opening the BPF object")?;
    for (name, value) in [
        (
            ".rodata.config",
            intf::config(params, t, rules.len(), by_cgroup),
        ),
        (".data.cpus", intf::cpus(t)),
        (".data.llcs", intf::llcs(t)),
    ] {
        let mut section = open
            .maps_mut()
            .find(|m| m.name() == name)
            .with_context(|| format!("the BPF object has no section `{name}`; rebuild it"))?;
        section
            .set_initial_value(&value)
            .with_context(|| format!("filling section `{name}`"))?;
    }
    let known = kernels_flags()?;
    // The first members of our `struct sched_ext_ops`; the kernel ignores a sequence number of 0.
    open.maps_mut()
        .find(|m| m.name() == "slipstream")
        .and_then(|mut m| {
            let members = m.initial_value_mut()?.get_mut(..16)?;
            let (seq, flags) = members.split_at_mut(8);
            seq.copy_from_slice(&hotplug_seq.to_ne_bytes());
            let ours = u64::from_ne_bytes((*flags).try_into().ok()?);
            flags.copy_from_slice(&(ours & known).to_ne_bytes());
            Some(())
        })
        .context("the BPF object has no scheduler; rebuild it")?;
    let mut object = open.load().context("the kernel refused the BPF program")?;

    let set = |name: &str, key: u32, value: &[u8]| -> anyhow::Result<()> {
        map(&object, name)?
            .update(&key.to_ne_bytes(), value, MapFlags::ANY)
            .with_context(|| format!("writing entry {key} of map `{name}`"))
    };
    for (i, r) in rules.iter().enumerate() {
        set("slip_rules", to_u32(i), r)?;
    }
    for (i, c) in classes.classes.iter().enumerate() {
        set("slip_classes", to_u32(i), &intf::class(c))?;
    }
    let link = object
        .maps_mut()
        .find(|m| m.name() == "slipstream")
        .context("the BPF object has no scheduler; rebuild it")?
        .attach_struct_ops()
        .context(
            "the kernel did not attach the scheduler; `slipstream sched doctor` checks the usual reasons, such as `isolcpus=`, \
             and `dmesg` may say more",
        )?;
    Ok((object, link))
}

fn read_counters(map: &impl MapCore) -> anyhow::Result<Vec<u64>> {
    (0..to_u32(COUNTERS.len()))
        .map(|i| {
            let per_cpu = map
                .lookup_percpu(&i.to_ne_bytes(), MapFlags::ANY)?
                .unwrap_or_default();
            let word = |b: &Vec<u8>| {
                b.get(..8)
                    .and_then(|b| b.try_into().ok())
                    .map_or(0, u64::from_ne_bytes)
            };
            Ok(per_cpu.iter().map(word).sum())
        })
        .collect()
}

fn text(counters: &[u64]) -> String {
    let shown: Vec<String> = COUNTERS
        .iter()
        .zip(counters)
        .filter(|(_, n)| **n > 0)
        .map(|(c, n)| format!("{c} {n}"))
        .collect();
    shown.join("  ")
}

fn stats(json: bool, interval: Option<u64>) -> anyhow::Result<()> {
    let info = MapInfoIter::default()
        .find(|m| m.name == "slip_stats")
        .context(
            "our scheduler is not running (or this process may not see it: try as root); \
         start it with `slipstream sched run`",
        )?;
    let map = MapHandle::from_map_id(info.id).context("opening the scheduler's counters")?;
    loop {
        let counters = read_counters(&map)?;
        let line = if json {
            let all: serde_json::Map<_, _> = COUNTERS
                .iter()
                .zip(&counters)
                .map(|(c, n)| ((*c).to_owned(), (*n).into()))
                .collect();
            serde_json::Value::Object(all).to_string()
        } else {
            text(&counters)
        };
        match writeln!(std::io::stdout(), "{line}") {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            result => result.context("printing the counters")?,
        }
        let Some(every) = interval else { return Ok(()) };
        std::thread::sleep(Duration::from_secs(every));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The service must not retry permanent failures, and must retry after the kernel ended the scheduler.
    #[test]
    fn exit_statuses_are_those_that_the_service_expects() {
        let unit = include_str!("../../../../../packaging/systemd/slipstream-scx.service");
        let value = |key: &str| {
            let line = unit
                .lines()
                .find_map(|l| l.strip_prefix(key)?.strip_prefix('='));
            line.unwrap_or_else(|| panic!("no {key} in the unit"))
        };
        let prevented: Vec<&str> = value("RestartPreventExitStatus").split(' ').collect();
        assert!(prevented.contains(&REFUSED.to_string().as_str()));
        assert!(!prevented.contains(&KERNEL_ENDED.to_string().as_str()));
        assert_eq!(value("Restart"), "on-failure");
        let words: Vec<&str> = value("ExecStart").split(' ').collect();
        Cli::try_parse_from(["slipstream-scx", words[1]]).expect("the unit's command is known");
    }
}
