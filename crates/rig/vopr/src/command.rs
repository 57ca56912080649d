//! The command: one seed, many seeds, planted bugs.

use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slipstream_base::width::to_usize;

use crate::cluster::Shared;
use crate::outcome::Stats;
use crate::plan::Plan;
use crate::shrink::shrink;
use crate::world::run;

/// A call of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// One schedule, with its plan.
    Seed {
        /// The seed.
        seed: u64,
        /// Whether the schedule is logged; a failure is then not shrunk.
        log: bool,
    },
    /// Schedules from this seed on, for so many seconds or up to so many schedules.
    Many {
        /// The first seed.
        from: u64,
        /// Seconds at most.
        seconds: u64,
        /// Schedules at most.
        schedules: u64,
        /// Threads.
        threads: usize,
    },
    /// Each planted bug, for up to so many schedules.
    Planted {
        /// Schedules at most for each.
        schedules: u64,
        /// The bug with this number in `planted::ALL` alone, from 1 on.
        only: Option<u64>,
    },
}

/// How the command is called.
pub const USAGE: &str = "usage: vopr --seed N [--log]\n       \
    vopr [--from N] [--seconds S] [--schedules N] [--threads N]\n       \
    vopr --planted [--only NUMBER] [--schedules N]\n";

impl Command {
    /// Reads flags. Without `--from`, `fresh` is the first seed.
    ///
    /// # Errors
    /// The flag that is wrong, and how to mend it.
    pub fn parse(args: &[String], fresh: u64) -> Result<Command, String> {
        let (mut seed, mut planted, mut log, mut only) = (None, false, false, None);
        let (mut from, mut seconds, mut schedules, mut threads) = (fresh, None, None, 1);
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            if flag == "--planted" {
                planted = true;
                continue;
            }
            if flag == "--log" {
                log = true;
                continue;
            }
            let value = args.next().ok_or(format!("{flag} needs a number"))?;
            let number: u64 = value
                .parse()
                .map_err(|_| format!("{flag} {value}: give a whole number"))?;
            match flag.as_str() {
                "--seed" => seed = Some(number),
                "--only" => only = Some(number),
                "--from" => from = number,
                "--seconds" => seconds = Some(number),
                "--schedules" => schedules = Some(number),
                "--threads" => threads = to_usize(number.clamp(1, 256)),
                _ => return Err(format!("unknown flag {flag}")),
            }
        }
        Ok(match (seed, planted) {
            (Some(seed), _) => Command::Seed { seed, log },
            (None, true) => Command::Planted {
                schedules: schedules.unwrap_or(10_000),
                only,
            },
            (None, false) => Command::Many {
                from,
                seconds: seconds.unwrap_or(if schedules.is_some() { u64::MAX } else { 60 }),
                schedules: schedules.unwrap_or(u64::MAX),
                threads,
            },
        })
    }

    /// Runs it. Returns whether no invariant failed, or every planted bug was found.
    ///
    /// # Errors
    /// Of `out`.
    pub fn run(self, out: &mut (dyn Write + Send)) -> io::Result<bool> {
        let shared = Shared::new();
        match self {
            Command::Seed { seed, log } => one(seed, log, &shared, out),
            Command::Many {
                from,
                seconds,
                schedules,
                threads,
            } => many(from, seconds, schedules, threads, &shared, out),
            Command::Planted { schedules, only } => planted(schedules, only, &shared, out),
        }
    }
}

fn one(seed: u64, log: bool, shared: &Shared, out: &mut dyn Write) -> io::Result<bool> {
    let plan = Plan::of(seed);
    match run(&plan, shared) {
        Ok(stats) => {
            writeln!(out, "{plan}{stats:#?}")?;
            Ok(true)
        }
        Err(failure) => {
            writeln!(out, "{plan}seed {seed} fails at {failure}\n")?;
            if log {
                return Ok(false);
            }
            let (small, failure) = shrink(&plan, &failure, shared);
            writeln!(out, "shrunk, it fails at {failure}\n{small}")?;
            Ok(false)
        }
    }
}

fn many(
    from: u64,
    seconds: u64,
    schedules: u64,
    threads: usize,
    shared: &Shared,
    out: &mut (dyn Write + Send),
) -> io::Result<bool> {
    let began = Instant::now();
    let limit = Duration::from_secs(seconds);
    let next = AtomicU64::new(0);
    let sums = Mutex::new((Stats::default(), 0u64, 0u64));
    let out = Mutex::new(out);
    let broken = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while began.elapsed() < limit && !broken.load(Ordering::Relaxed) {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    if nth >= schedules {
                        break;
                    }
                    let seed = from.wrapping_add(nth);
                    let outcome = run(&Plan::of(seed), shared);
                    let (sum, done, failed) = &mut *sums.lock().expect("it is not poisoned");
                    *done += 1;
                    match outcome {
                        Ok(stats) => sum.add(&stats),
                        Err(failure) => {
                            *failed += 1;
                            let mut out = out.lock().expect("it is not poisoned");
                            let written = writeln!(out, "seed {seed} fails at {failure}");
                            broken.fetch_or(written.is_err(), Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let (sum, done, failed) = sums.into_inner().expect("it is not poisoned");
    let wall = began.elapsed().as_secs_f64();
    let cpu = cpu_s().unwrap_or(wall * threads as f64);
    let out = out.into_inner().expect("it is not poisoned");
    writeln!(
        out,
        "{done} schedules from seed {from}: {failed} failed\n\
         {} events in {cpu:.1} s of CPU time ({:.0} per second and core), {wall:.1} s\n\
         {} requests finished, {} refused, {} lost, {} cancelled; {} tokens, {} retries, \
         {} continued, {} late entries; {:.0} s of virtual time",
        sum.events,
        sum.events as f64 / cpu,
        sum.finished,
        sum.refused,
        sum.lost,
        sum.cancelled,
        sum.tokens,
        sum.retries,
        sum.resumed,
        sum.stale,
        sum.virtual_ns as f64 / 1e9,
    )?;
    Ok(failed == 0)
}

/// CPU time of this process, s.
fn cpu_s() -> Option<f64> {
    // proc_pid_stat(5): user and system time are fields 14 and 15, in ticks of 10 ms.
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some((ticks(11)? + ticks(12)?) / 100.0)
}

#[cfg(not(feature = "planted"))]
fn planted(
    _schedules: u64,
    _only: Option<u64>,
    _shared: &Shared,
    out: &mut dyn Write,
) -> io::Result<bool> {
    writeln!(
        out,
        "this build has no planted bugs; build it with --features planted"
    )?;
    Ok(false)
}

#[cfg(feature = "planted")]
fn planted(
    schedules: u64,
    only: Option<u64>,
    shared: &Shared,
    out: &mut dyn Write,
) -> io::Result<bool> {
    let mut all = true;
    writeln!(
        out,
        "| Planted bug | Schedules | Found as |\n| --- | --- | --- |"
    )?;
    for (number, bug) in (1u64..).zip(crate::planted::ALL) {
        if only.is_some_and(|only| only != number) {
            continue;
        }
        slipstream_base::planted::plant(bug.name);
        let found =
            (0..schedules).find_map(|seed| Some((seed, run(&Plan::of(seed), shared).err()?)));
        slipstream_base::planted::plant("");
        let (name, what) = (bug.name, bug.what);
        if let Some((seed, failure)) = found {
            let seen = failure.what.replace('|', "/");
            let seen: String = seen.chars().take(160).collect();
            writeln!(out, "| `{name}`: {what} | {} | {seen} |", seed + 1)?;
        } else {
            all = false;
            writeln!(out, "| `{name}`: {what} | not in {schedules} | |")?;
        }
        out.flush()?;
    }
    Ok(all)
}
