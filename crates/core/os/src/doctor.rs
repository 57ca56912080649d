//! Checks of this host: whether a server can run on it, and what makes one slower.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};

use crate::checks::{Check, Verdict};
use crate::memory::proc_bytes;

/// Port that `slipstream serve` listens on by default.
const PORT: u16 = 8_000;

/// Checks this host.
pub fn examine() -> Vec<Check> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    vec![
        processors(cores),
        load(cores),
        memory(),
        open_files(getrlimit(Resource::Nofile).maximum),
        backlog(read("/proc/sys/net/core/somaxconn").as_deref()),
        port(PORT),
        clock_source(
            read("/sys/devices/system/clocksource/clocksource0/current_clocksource").as_deref(),
        ),
        timers(),
        shared_memory(),
    ]
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path)
        .ok()
        .map(|text| text.trim().to_owned())
}

fn processors(cores: usize) -> Check {
    const WHAT: &str = "processors";
    let found = format!("{cores} for this process");
    if cores >= 2 {
        return Check::ok(WHAT, found);
    }
    Check::new(
        WHAT,
        Verdict::Note,
        found,
        "frontend and engines share it; give the process two or more, or compare CPU time \
         instead of latency",
    )
}

fn load(cores: usize) -> Check {
    const WHAT: &str = "other work";
    let average = read("/proc/loadavg")
        .and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok())
        .unwrap_or(0.0);
    let found = format!("load average {average:.1}");
    if average <= 0.5 * cores as f64 {
        return Check::ok(WHAT, found);
    }
    Check::new(
        WHAT,
        Verdict::Note,
        found,
        "measurements now include that work; wait for it to end, or compare ratios of CPU time",
    )
}

fn memory() -> Check {
    const WHAT: &str = "memory";
    const LEAST: u64 = 256 << 20;
    let Some(free) = proc_bytes("/proc/meminfo", "MemAvailable:") else {
        return Check::new(
            WHAT,
            Verdict::Note,
            "unknown",
            "mount /proc; without it, a cluster too large for this host is not rejected",
        );
    };
    let found = format!("{:.1} GiB free", free as f64 / f64::from(1 << 30));
    if free >= LEAST {
        return Check::ok(WHAT, found);
    }
    Check::new(
        WHAT,
        Verdict::Missing,
        found,
        "a server with one modelled engine needs up to 100 MiB; stop another program",
    )
}

/// `limit`: the hard limit, which `serve`, `frontend` and `bench` use; `None` is none.
fn open_files(limit: Option<u64>) -> Check {
    const WHAT: &str = "open files";
    let limit = limit.unwrap_or(u64::MAX);
    let found = match limit {
        u64::MAX => "no limit".to_owned(),
        _ => format!("{limit} at most"),
    };
    match limit {
        4096.. => Check::ok(WHAT, found),
        128.. => Check::new(
            WHAT,
            Verdict::Note,
            found,
            "each connection needs one; further clients wait. Raise the hard limit (ulimit -Hn, \
             LimitNOFILE=, docker run --ulimit nofile=)",
        ),
        _ => Check::new(
            WHAT,
            Verdict::Missing,
            found,
            "raise the hard limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=)",
        ),
    }
}

/// `most`: `net.core.somaxconn`, the upper bound of `listen`'s backlog.
fn backlog(most: Option<&str>) -> Check {
    const WHAT: &str = "pending connections";
    let found = most.and_then(|text| text.parse::<u32>().ok());
    match found {
        Some(most @ 1024..) => Check::ok(WHAT, format!("{most}")),
        Some(most) => Check::new(
            WHAT,
            Verdict::Note,
            format!("{most}"),
            "further clients that connect at once wait a second for a retry: \
             sysctl net.core.somaxconn=4096",
        ),
        None => Check::new(WHAT, Verdict::Note, "unknown", "mount /proc"),
    }
}

fn port(number: u16) -> Check {
    const WHAT: &str = "loopback";
    if let Err(error) = TcpListener::bind(("127.0.0.1", 0)) {
        return Check::new(
            WHAT,
            Verdict::Missing,
            format!("cannot listen on 127.0.0.1: {error}"),
            "bring the interface up: ip link set lo up",
        );
    }
    match TcpListener::bind(("127.0.0.1", number)) {
        Ok(_) => Check::ok(WHAT, format!("port {number} is free")),
        Err(error) => Check::new(
            WHAT,
            Verdict::Note,
            format!("port {number}, the default, is not free: {error}"),
            "slipstream serve --listen 127.0.0.1:0 selects a free one",
        ),
    }
}

/// Every stage takes two timestamps. These clock sources are read without a system call; others
/// take up to a microsecond.
fn clock_source(name: Option<&str>) -> Check {
    const WHAT: &str = "clock";
    const QUICK: [&str; 4] = [
        "tsc",
        "kvm-clock",
        "hyperv_clocksource_tsc_page",
        "arch_sys_counter",
    ];
    match name {
        Some(name) if QUICK.contains(&name) => Check::ok(WHAT, name.to_owned()),
        name => Check::new(
            WHAT,
            Verdict::Note,
            name.unwrap_or("unknown").to_owned(),
            "reading the clock may be a system call here; slipstream reads it several times per \
             request. Boot with clocksource=tsc if the processor's is stable",
        ),
    }
}

/// Lateness of a wait, which adds to each modelled pass.
fn timers() -> Check {
    const WHAT: &str = "timers";
    const WAIT: Duration = Duration::from_micros(500);
    let mut late: Vec<Duration> = (0..21)
        .map(|_| {
            let start = Instant::now();
            std::thread::sleep(WAIT);
            start.elapsed().saturating_sub(WAIT)
        })
        .collect();
    late.sort_unstable();
    let (median, most) = (late[10], late[20]);
    let found = format!(
        "a wait ends {} µs late at the median, {} µs at most of 21",
        median.as_micros(),
        most.as_micros()
    );
    if median < Duration::from_micros(200) {
        return Check::ok(WHAT, found);
    }
    Check::new(
        WHAT,
        Verdict::Note,
        found,
        "token gaps are longer by this; the processors are busy, in deep sleep states (cpupower \
         idle-set -D 50), or the kernel has no high-resolution timers",
    )
}

/// Transport of blocks between engines on one host (`docs/kvstore.md`).
fn shared_memory() -> Check {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    const WHAT: &str = "shared memory";
    let sealed = memfd_create(
        "slipstream-doctor",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )
    .and_then(|file| {
        ftruncate(&file, 4096)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)
    });
    match sealed {
        Ok(()) => Check::ok(WHAT, "sealed memory files"),
        Err(error) => Check::new(
            WHAT,
            Verdict::Note,
            format!("no sealed memory files: {error}"),
            "KV blocks between engines of this host use TCP instead; the container's seccomp profile \
             may forbid memfd_create",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_open_files_are_noted_and_too_few_are_missing() {
        assert_eq!(open_files(None).verdict, Verdict::Ok);
        assert_eq!(open_files(Some(4096)).verdict, Verdict::Ok);
        assert_eq!(open_files(Some(1024)).verdict, Verdict::Note);
        assert_eq!(open_files(Some(64)).verdict, Verdict::Missing);
    }

    #[test]
    fn a_taken_port_is_noted() {
        let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let number = taken.local_addr().unwrap().port();
        let check = port(number);
        assert_eq!(check.verdict, Verdict::Note);
        assert!(check.found.contains(&number.to_string()), "{}", check.found);
    }

    #[test]
    fn slow_clocks_and_short_backlogs_are_noted() {
        assert_eq!(clock_source(Some("tsc")).verdict, Verdict::Ok);
        assert_eq!(clock_source(Some("hpet")).verdict, Verdict::Note);
        assert_eq!(clock_source(None).verdict, Verdict::Note);
        assert_eq!(backlog(Some("4096")).verdict, Verdict::Ok);
        assert_eq!(backlog(Some("128")).verdict, Verdict::Note);
        assert_eq!(backlog(Some("many")).verdict, Verdict::Note);
    }
}
