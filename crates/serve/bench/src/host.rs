//! Load of the host, which decides whether latencies measured on it are meaningful.
//!
//! Two views, both from `/proc` (Linux; absent elsewhere):
//!
//! - [`HostSample`]: the whole host. CPU time and the part that a hypervisor took away (`/proc/stat`,
//!   proc_stat(5)), and how long some task waited for a CPU (`/proc/pressure/cpu`, Linux,
//!   `Documentation/accounting/psi.rst`).
//! - [`RunQueue`]: how long the threads of one process waited for a CPU (third column of
//!   `/proc/PID/task/TID/schedstat`: `Documentation/scheduler/sched-stats.rst`). The mean wait per turn
//!   on a CPU is about what every wake-up adds to a token.
//!
//! [`wake_up_lateness`] measures the same before a run starts.

use std::fs;
use std::time::{Duration, Instant};

use slipstream_report::table::number;

/// State of the host at one moment; two of them give a [`HostLoad`].
#[derive(Clone, Debug)]
pub struct HostSample {
    at: Instant,
    cpu: Option<CpuTicks>,
    pressure_us: Option<u64>,
}

/// CPU time of all CPUs since boot, clock ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CpuTicks {
    total: u64,
    idle: u64,
    steal: u64,
}

/// Load of the host between two samples. `None`: not reported by the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostLoad {
    /// Part of all CPUs' time that was not idle, stolen time included.
    pub busy_share: Option<f64>,
    /// Part of all CPUs' time that a hypervisor gave to others.
    pub steal_share: Option<f64>,
    /// Part of the time in which some task waited for a CPU.
    pub pressure_share: Option<f64>,
}

impl HostSample {
    /// The current state.
    pub fn now() -> HostSample {
        let read = |path| fs::read_to_string(path).ok();
        HostSample {
            at: Instant::now(),
            cpu: read("/proc/stat").and_then(|text| cpu_ticks(&text)),
            pressure_us: read("/proc/pressure/cpu").and_then(|text| pressure_us(&text)),
        }
    }

    /// Difference between `earlier` and this sample.
    pub fn since(&self, earlier: &HostSample) -> HostLoad {
        let wall_us = self.at.duration_since(earlier.at).as_micros() as f64;
        let cpu = self.cpu.zip(earlier.cpu).map(|(now, then)| CpuTicks {
            total: now.total.saturating_sub(then.total),
            idle: now.idle.saturating_sub(then.idle),
            steal: now.steal.saturating_sub(then.steal),
        });
        let of_total = |part: fn(CpuTicks) -> u64| {
            let cpu = cpu.filter(|cpu| cpu.total > 0)?;
            Some(part(cpu) as f64 / cpu.total as f64)
        };
        let pressure_us = self.pressure_us.zip(earlier.pressure_us);
        HostLoad {
            busy_share: of_total(|cpu| cpu.total.saturating_sub(cpu.idle)),
            steal_share: of_total(|cpu| cpu.steal),
            pressure_share: pressure_us
                .filter(|_| wall_us > 0.0)
                .map(|(now, then)| (now.saturating_sub(then) as f64 / wall_us).min(1.0)),
        }
    }
}

/// First line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal; guest time
/// is part of user.
fn cpu_ticks(stat: &str) -> Option<CpuTicks> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = fields
        .split_ascii_whitespace()
        .take(8)
        .map(|field| field.parse().ok())
        .collect::<Option<_>>()?;
    let &[_, _, _, idle, iowait, _, _, steal] = &ticks[..] else {
        return None;
    };
    Some(CpuTicks {
        total: ticks.iter().sum(),
        idle: idle + iowait,
        steal,
    })
}

/// `some avg10=… total=MICROSECONDS` of a pressure file.
fn pressure_us(pressure: &str) -> Option<u64> {
    let some = pressure.lines().find_map(|l| l.strip_prefix("some "))?;
    let total = some.split_ascii_whitespace().last()?;
    total.strip_prefix("total=")?.parse().ok()
}

/// Time that threads of a process waited for a CPU, and how often they were scheduled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunQueue {
    /// Time spent ready to run, without a CPU, ns.
    pub wait_ns: u64,
    /// Turns on a CPU.
    pub turns: u64,
}

impl RunQueue {
    /// Totals of the live threads of process `pid`. `None` if there is no such process, or the
    /// kernel does not count.
    pub fn of(pid: u32) -> Option<RunQueue> {
        let mut sum = RunQueue::default();
        for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
            // A thread may end during the scan.
            let stat = thread.and_then(|t| fs::read_to_string(t.path().join("schedstat")));
            if let Some(queue) = stat.ok().as_deref().and_then(run_queue) {
                sum = sum.plus(queue);
            }
        }
        (sum.turns > 0).then_some(sum)
    }

    /// Sum of both.
    pub fn plus(self, other: RunQueue) -> RunQueue {
        RunQueue {
            wait_ns: self.wait_ns + other.wait_ns,
            turns: self.turns + other.turns,
        }
    }

    /// Increase since `earlier`.
    pub fn since(self, earlier: RunQueue) -> RunQueue {
        RunQueue {
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            turns: self.turns.saturating_sub(earlier.turns),
        }
    }

    /// Mean wait per turn, ms.
    pub fn mean_wait_ms(self) -> f64 {
        if self.turns == 0 {
            return 0.0;
        }
        self.wait_ns as f64 / self.turns as f64 / 1e6
    }
}

fn run_queue(schedstat: &str) -> Option<RunQueue> {
    let mut fields = schedstat.split_ascii_whitespace().skip(1);
    Some(RunQueue {
        wait_ns: fields.next()?.parse().ok()?,
        turns: fields.next()?.parse().ok()?,
    })
}

/// Lateness of timed waits on this host: the 99th percentile of 400 waits of 1 ms, on one thread.
/// Takes under a second, longer if the host is busy.
pub fn wake_up_lateness() -> Duration {
    const WAITS: usize = 400;
    const WAIT: Duration = Duration::from_millis(1);
    let mut late: Vec<Duration> = (0..WAITS)
        .map(|_| {
            let begun = Instant::now();
            std::thread::sleep(WAIT);
            begun.elapsed().saturating_sub(WAIT)
        })
        .collect();
    late.sort_unstable();
    late[WAITS * 99 / 100]
}

/// Part of an engine step that waiting for a CPU may take before measured latencies mislead.
pub const WAIT_SHARE_MAX: f64 = 0.05;

/// The largest time compression up to `max` at which timed waits end within [`WAIT_SHARE_MAX`] of
/// an engine step of `step_ms`, rounded down to 1, 2 or 5 times a power of ten. `None` if even a
/// tenth of the real pace is too fast.
pub fn compression(step_ms: f64, lateness: Duration, max: f64) -> Option<f64> {
    const LEAST: f64 = 0.1;
    let late_ms = lateness.as_secs_f64() * 1e3;
    let limit = if late_ms > 0.0 {
        WAIT_SHARE_MAX * step_ms / late_ms
    } else {
        f64::INFINITY
    };
    if limit >= max {
        return Some(max);
    }
    let decade = libm::pow(10.0, libm::floor(libm::log10(limit)));
    let rounded = [5.0, 2.0, 1.0]
        .map(|digit| digit * decade)
        .into_iter()
        // A rounding error must not put it below a limit that it equals.
        .find(|&step| step <= limit * (1.0 + 1e-9))?;
    (rounded >= LEAST * (1.0 - 1e-9)).then_some(rounded)
}

/// Part of the host's CPU time that a live run and all else may take together. Above it, wake-ups wait
/// for a CPU, and compressed latencies show those waits.
pub const BUSY_MAX: f64 = 0.5;

/// Part of the host's CPU time that a run may take on a host whose other processes take all that [`BUSY_MAX`] leaves:
/// the kernel divides CPUs fairly.
const FAIR_SHARE: f64 = 0.15;

/// The compression at which a host that was `busy` at `fastest` stays below [`BUSY_MAX`], or its run below a fair share
/// of a busy host, rounded down to 10, 5, 2 or 1; `others`: the part of other processes, which does not shrink with it.
/// At least 1.
pub fn quieter_compression(fastest: f64, busy: f64, others: f64) -> f64 {
    if busy <= BUSY_MAX {
        return fastest;
    }
    let own = (busy - others).max(f64::MIN_POSITIVE);
    let limit = fastest * (BUSY_MAX - others).max(FAIR_SHARE) / own;
    let steps = [10.0, 5.0, 2.0, 1.0];
    let step = steps.into_iter().find(|&step| step <= limit.min(fastest));
    step.unwrap_or(1.0)
}

/// Load of the host during a live run, and whether the run's latencies mean something.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostVerdict {
    load: HostLoad,
    /// Mean wait of a server or client thread for a CPU, per wake-up, ms.
    mean_wait_ms: Option<f64>,
    /// An engine step, ms of wall-clock time: the twin's median ITL.
    step_ms: Option<f64>,
    /// Whether the waits are short enough, relative to a step, for meaningful live latencies.
    /// `None`: not known.
    is_quiet: Option<bool>,
}

impl HostVerdict {
    /// `queue`: waits of the server's and the client's threads. `step_ms`: an engine step.
    pub fn new(load: HostLoad, queue: Option<RunQueue>, step_ms: Option<f64>) -> HostVerdict {
        let mean_wait_ms = queue.map(RunQueue::mean_wait_ms);
        let is_quiet = mean_wait_ms
            .zip(step_ms)
            .map(|(wait, step)| wait <= WAIT_SHARE_MAX * step);
        HostVerdict {
            load,
            mean_wait_ms,
            step_ms,
            is_quiet,
        }
    }

    /// Part of all CPUs' time that was not idle.
    pub fn busy_share(&self) -> Option<f64> {
        self.load.busy_share
    }

    /// Mean wait for a CPU over an engine step, if the latencies are misleading for it.
    pub fn wait_share(&self) -> Option<f64> {
        let share = self.mean_wait_ms? / self.step_ms?;
        (!self.is_quiet?).then_some(share)
    }

    /// As JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "busy_share": self.load.busy_share,
            "steal_share": self.load.steal_share,
            "pressure_share": self.load.pressure_share,
            "mean_wait_ms": self.mean_wait_ms,
            "step_ms": self.step_ms,
            "is_quiet": self.is_quiet,
        })
    }

    /// A line about the host, with the kernel's figures.
    pub fn line(&self) -> Option<String> {
        let percent = |share: Option<f64>, what: &str| {
            share.map(|share| format!("{} % {what}", number(100.0 * share)))
        };
        let parts = [
            percent(self.load.busy_share, "of CPU time busy"),
            percent(self.load.steal_share, "stolen by the hypervisor"),
            percent(
                self.load.pressure_share,
                "of the time with a task waiting for a CPU",
            ),
            self.mean_wait_ms.map(|wait| {
                let wait = number(wait);
                format!("server and client waited {wait} ms per wake-up")
            }),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| format!("host: {}\n", parts.join(", ")))
    }

    /// A warning about the live figures, if there is one.
    pub fn warning(&self) -> Option<String> {
        let (wait, step) = (self.mean_wait_ms?, self.step_ms?);
        if self.is_quiet? {
            return None;
        }
        Some(format!(
            "warning: the host was too busy for these latencies: server and client waited {} ms for a \
             CPU at each wake-up, {} % of an engine step of {} ms, and more than {} % affects every \
             figure of the live side; stop other jobs, or slow both sides down (`--speedup auto`)",
            number(wait),
            number(100.0 * wait / step),
            number(step),
            100.0 * WAIT_SHARE_MAX,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_host_are_those_of_the_kernels_counters() {
        let at = Instant::now();
        let sample = |ms, stat: &str, pressure: &str| HostSample {
            at: at + Duration::from_millis(ms),
            cpu: cpu_ticks(stat),
            pressure_us: pressure_us(pressure),
        };
        let before = sample(
            0,
            "cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2\n",
            "some avg10=1.00 avg60=2.00 avg300=3.00 total=5000\nfull avg10=0.00 total=9\n",
        );
        let after = sample(
            1000,
            "cpu  130 10 120 710 110 5 5 10 7 7\n",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=255000\nfull avg10=0.00 total=9\n",
        );
        let load = after.since(&before);
        assert_eq!(load.busy_share, Some(0.8));
        assert_eq!(load.steal_share, Some(0.1));
        assert_eq!(load.pressure_share, Some(0.25));
        let blind = sample(1000, "intr 1", "full total=3");
        assert_eq!(blind.since(&before), HostLoad::default());
        assert_eq!(before.since(&before).busy_share, None, "no time has passed");
    }

    #[test]
    fn waits_of_threads_add_up() {
        let one = run_queue("900 4000000 10\n").unwrap();
        let both = one.plus(run_queue("100 2000000 2").unwrap());
        assert_eq!((both.wait_ns, both.turns), (6_000_000, 12));
        assert!((both.mean_wait_ms() - 0.5).abs() < 1e-12);
        assert_eq!(run_queue("900"), None);
        assert_eq!(RunQueue::default().mean_wait_ms(), 0.0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_had_turns_on_a_cpu() {
        assert!(RunQueue::of(std::process::id()).is_none_or(|queue| queue.turns > 0));
        assert_eq!(RunQueue::of(u32::MAX), None);
    }

    #[test]
    fn the_compression_follows_from_step_and_lateness() {
        let check = |step_ms, late_us, max, expected| {
            let late = Duration::from_micros(late_us);
            assert_eq!(compression(step_ms, late, max), expected, "{late_us} µs");
        };
        check(12.0, 0, 10.0, Some(10.0));
        check(12.0, 60, 10.0, Some(10.0)); // an idle host: 5 % of 12 ms are 600 µs
        check(12.0, 61, 10.0, Some(5.0));
        check(12.0, 300, 10.0, Some(2.0));
        check(12.0, 600, 10.0, Some(1.0));
        check(12.0, 601, 10.0, Some(0.5));
        check(12.0, 6000, 10.0, Some(0.1));
        check(12.0, 6001, 10.0, None);
        check(12.0, 100, 3.0, Some(3.0)); // the requested value need not be round
    }

    #[test]
    fn the_host_stays_below_half_its_capacity() {
        assert_eq!(quieter_compression(10.0, 0.5, 0.1), 10.0);
        // 80 points at 10 are 8 per unit of speed-up; 40 are left.
        assert_eq!(quieter_compression(10.0, 0.9, 0.1), 5.0);
        assert_eq!(quieter_compression(10.0, 0.95, 0.1), 2.0);
        // Fewer than 15 points are left: a run takes its fair share.
        assert_eq!(quieter_compression(10.0, 1.0, 0.4), 2.0);
        assert_eq!(quieter_compression(10.0, 1.0, 0.9), 10.0);
        assert_eq!(
            quieter_compression(2.0, 1.0, 0.3),
            1.0,
            "0.57 is too slow to wait for"
        );
    }

    /// Regression: figures of a busy host without a warning (TTFT 742 ms, the twin had 12).
    #[test]
    fn a_busy_host_is_reported_with_the_figures() {
        let host = |wait_us: u64, step_ms| {
            let queue = RunQueue {
                wait_ns: 1000 * wait_us * 1000,
                turns: 1000,
            };
            let load = HostLoad {
                busy_share: Some(0.97),
                ..HostLoad::default()
            };
            HostVerdict::new(load, Some(queue), step_ms)
        };
        let busy = host(700, Some(12.0));
        assert_eq!(busy.is_quiet, Some(false));
        let warning = busy.warning().unwrap();
        assert!(
            warning.contains("waited 0.700 ms") && warning.contains("5.83 %"),
            "{warning}"
        );
        let line = busy.line().unwrap();
        assert!(line.contains("97.0 % of CPU time busy"), "{line}");
        assert_eq!(host(500, Some(12.0)).warning(), None);
        assert_eq!(
            host(700, None).is_quiet,
            None,
            "without a step there is no verdict"
        );
        assert_eq!(HostVerdict::default().line(), None);
    }
}
