//! Cost of processes: CPU time and resident memory, from `/proc` (Linux; absent elsewhere).

use std::fs;

/// CPU time and memory of a process so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// User and system time, s.
    pub cpu_s: f64,
    /// Peak resident memory since the process began, bytes.
    pub rss_peak_bytes: u64,
}

/// Cost of process `pid` since its start. `None` if there is no such process, or no `/proc`.
///
/// CPU time is the sum over its threads in ns if the kernel keeps that, otherwise the process's own
/// in clock ticks (10 ms on most systems). The larger counts: only the ticks include threads that
/// have ended.
pub fn usage_of(pid: u32) -> Option<Usage> {
    let ticks = cpu_ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    let ticks_s = ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
    let threads_s = threads_cpu_ns(pid).unwrap_or(0) as f64 / 1e9;
    Some(Usage {
        cpu_s: ticks_s.max(threads_s),
        rss_peak_bytes: rss_peak(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)?,
    })
}

/// Sum over the live threads: the first number of `/proc/PID/task/TID/schedstat` is time on a CPU,
/// ns (Linux, `Documentation/scheduler/sched-stats.rst`).
fn threads_cpu_ns(pid: u32) -> Option<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let on_cpu_ns = |thread: std::io::Result<fs::DirEntry>| -> Option<u64> {
        let stat = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        stat.split_ascii_whitespace().next()?.parse().ok()
    };
    Some(threads.filter_map(on_cpu_ns).sum())
}

/// CPU time of this process so far, ns.
pub fn own_cpu_ns() -> u64 {
    clock_ns(rustix::time::ClockId::ProcessCPUTime)
}

/// `CLOCK_MONOTONIC`, ns: the clock of drag records, comparable between processes of one host.
pub fn monotonic_ns() -> u64 {
    clock_ns(rustix::time::ClockId::Monotonic)
}

fn clock_ns(clock: rustix::time::ClockId) -> u64 {
    let time = rustix::time::clock_gettime(clock);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// Raises the soft limit of open files to the hard one, because every connection is a file. Returns
/// the new limit.
pub fn raise_open_files() -> u64 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let soft = limit.current;
    limit.current = limit.maximum;
    let raised = setrlimit(Resource::Nofile, limit).is_ok();
    let holds = if raised { limit.maximum } else { soft };
    holds.unwrap_or(u64::MAX)
}

/// Fields 14 and 15 (utime, stime) of `/proc/PID/stat`, proc(5). The name in field 2 may hold
/// spaces and parentheses, so counting starts after its last parenthesis.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let after_name = &stat[stat.rfind(')')? + 1..];
    let mut fields = after_name.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn rss_peak(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_fields() {
        let stat = "42 (a b) c) S 1 2 3 4 5 6 7 8 9 10 700 30 0 0 20";
        assert_eq!(cpu_ticks(stat), Some(730));
        assert_eq!(cpu_ticks("garbage"), None);
    }

    #[test]
    fn peak_memory_is_in_bytes() {
        assert_eq!(
            rss_peak("VmPeak:\t 9 kB\nVmHWM:\t    2048 kB\n"),
            Some(2 << 20)
        );
    }

    #[test]
    fn clocks_run_forward() {
        let (a, cpu) = (monotonic_ns(), own_cpu_ns());
        assert!(monotonic_ns() >= a && own_cpu_ns() >= cpu);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_has_a_cost() {
        assert!(usage_of(std::process::id()).unwrap().rss_peak_bytes > 1 << 20);
        assert_eq!(usage_of(u32::MAX), None);
    }
}
