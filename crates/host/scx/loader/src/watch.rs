//! The loader's loop while the scheduler runs: it waits for a signal, for the kernel to end the
//! scheduler, and for cgroups to be created or removed. Between those events it sleeps.

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use libbpf_rs::{Map, MapCore as _, MapFlags, Object};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::consts::{SIGINT, SIGTERM};
use slipstream_scx::cgroups::{self, ClassTable, Honors, InUse, Tracker, Update};
use slipstream_scx::classes::{Classes, Subject};

use crate::{Run, intf, map, notify, read_counters, text};

/// If some cgroup has no watch, the tree is walked at this interval.
const RESCAN: Duration = Duration::from_secs(10);
/// Interval for reading the exit record if the BPF program does not announce its end.
const EXIT_POLL: Duration = Duration::from_millis(100);
/// Cgroups named in warnings while the scheduler runs; later ones are counted only.
const WARNED_MAX: usize = 20;

/// Why the loader stopped waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// A signal, SysRq-S, or the end of `--seconds`.
    OnRequest,
    /// A CPU came online or went offline.
    Hotplug,
    /// The kernel ended the scheduler; it has been reported.
    ByKernel,
}

/// SIGINT and SIGTERM, as bytes of a socket.
pub struct Signals(UnixStream);

impl Signals {
    /// Handles both signals from now on.
    ///
    /// # Errors
    /// If a handler cannot be installed.
    pub fn install() -> anyhow::Result<Signals> {
        let (receiver, sender) = UnixStream::pair().context("making a socket for signals")?;
        receiver.set_nonblocking(true)?;
        for signal in [SIGINT, SIGTERM] {
            let sender = sender.try_clone()?;
            signal_hook::low_level::pipe::register(signal, sender)
                .with_context(|| format!("handling signal {signal}"))?;
        }
        Ok(Signals(receiver))
    }

    fn arrived(&self) -> bool {
        matches!((&self.0).read(&mut [0; 8]), Ok(1..))
    }
}

/// The BPF program's map from cgroup to class.
struct CgroupMap<'o>(Map<'o>);

impl ClassTable for CgroupMap<'_> {
    fn put(&mut self, cgroup: u64, class: u32) -> io::Result<bool> {
        let key = cgroup.to_ne_bytes();
        let Err(e) = self.0.update(&key, &class.to_ne_bytes(), MapFlags::ANY) else {
            return Ok(true);
        };
        // A full hash map rejects new keys and accepts new values of old ones.
        let is_new = self
            .0
            .lookup(&key, MapFlags::ANY)
            .is_ok_and(|v| v.is_none());
        if is_new {
            Ok(false)
        } else {
            Err(io::Error::other(e))
        }
    }

    fn remove(&mut self, cgroup: u64) -> io::Result<()> {
        match self.0.delete(&cgroup.to_ne_bytes()) {
            Err(e) if e.kind() != libbpf_rs::ErrorKind::NotFound => Err(io::Error::other(e)),
            _ => Ok(()),
        }
    }
}

/// Warnings about cgroups, each logged once.
#[derive(Default)]
struct Warnings {
    settings: Vec<InUse>,
    left_out: usize,
    unstored: usize,
    is_partial: bool,
}

impl Warnings {
    fn settings(&mut self, honors: Honors, found: Vec<InUse>) {
        for s in found {
            if honors.enforces(&s.setting) || self.settings.contains(&s) {
                continue;
            }
            if self.settings.len() < WARNED_MAX {
                errln!("warning: not enforced by this scheduler: {s}");
                self.settings.push(s);
            } else {
                if self.left_out == 0 {
                    errln!("warning: further cgroups with such settings are not listed");
                }
                self.left_out += 1;
            }
        }
    }

    /// `room`: entries of the table.
    fn coverage(&mut self, tracker: &Tracker, room: u32) {
        if tracker.unstored() > self.unstored {
            errln!(
                "warning: {} cgroups have the default class: the table of {} is full; use fewer \
                 rules on cgroups, or rules on thread names",
                tracker.unstored(),
                room
            );
        }
        self.unstored = tracker.unstored();
        let is_partial = tracker.unwatched() > 0 || tracker.untracked() > 0;
        if is_partial && !self.is_partial {
            errln!(
                "warning: not all cgroups can be watched, so new ones get their class up to {} s \
                 late; raise fs.inotify.max_user_watches",
                RESCAN.as_secs()
            );
        }
        self.is_partial = is_partial;
    }
}

/// Waits until the scheduler ends, a signal arrives or the time is up.
///
/// # Errors
/// If a map cannot be read or written, or waiting fails.
pub fn until_the_end(
    object: &Object,
    args: &Run,
    classes: &Classes,
    signals: &Signals,
    ends: Option<Instant>,
) -> anyhow::Result<Ended> {
    let exit = map(object, "slip_exit")?;
    // The map of a ring buffer becomes readable when the program writes to it.
    let announced = object.maps().find(|m| m.name() == "slip_exited");
    let counters = map(object, "slip_stats")?;
    let honors = Honors::ours();
    let mut table = CgroupMap(map(object, "slip_cgroups")?);
    let mut tracker = track(classes, honors, &mut table)?;
    let mut warnings = Warnings::default();
    let start = Instant::now();
    let mut stats_at = args.stats.map(|s| start + Duration::from_secs(s));
    let mut rescan_at = start + RESCAN;
    loop {
        if signals.arrived() || ends.is_some_and(|e| Instant::now() >= e) {
            notify::stopping();
            return Ok(Ended::OnRequest);
        }
        let bytes = exit.lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?;
        if let Some(exit) = intf::Exit::parse(&bytes.unwrap_or_default())
            && exit.kind != 0
        {
            return Ok(if exit.is_hotplug() {
                Ended::Hotplug
            } else if exit.is_requested() {
                errln!("ended by SysRq-S; the kernel's scheduler has taken over");
                Ended::OnRequest
            } else {
                report(&exit);
                Ended::ByKernel
            });
        }
        let mut more = false;
        if let Some(tracker) = &mut tracker {
            let update = if warnings.is_partial && Instant::now() >= rescan_at {
                rescan_at = Instant::now() + RESCAN;
                tracker.rescan(classes, &mut table)
            } else {
                tracker.update(classes, &mut table)
            };
            let Update {
                settings, more: m, ..
            } = update.context("following cgroups")?;
            more = m;
            warnings.settings(honors, settings);
            warnings.coverage(tracker, table.0.max_entries());
        }
        if let (Some(at), Some(every)) = (stats_at, args.stats)
            && Instant::now() >= at
        {
            // Without a reader the scheduler stays, and prints no more.
            let line = text(&read_counters(&counters)?);
            let is_read = writeln!(std::io::stdout(), "{line}").is_ok();
            stats_at = is_read.then(|| at + Duration::from_secs(every));
        }
        let mut wake_at = [ends, stats_at].into_iter().flatten().min();
        if warnings.is_partial {
            wake_at = Some(wake_at.map_or(rescan_at, |t| t.min(rescan_at)));
        }
        let mut timeout = wake_at.map(|t| t.saturating_duration_since(Instant::now()));
        if announced.is_none() {
            timeout = Some(timeout.map_or(EXIT_POLL, |t| t.min(EXIT_POLL)));
        }
        if more {
            timeout = Some(Duration::ZERO);
        }
        let mut fds = vec![PollFd::new(&signals.0, PollFlags::IN)];
        let tracker_fd = tracker.as_ref().map(Tracker::fd);
        fds.extend(
            announced
                .iter()
                .map(|m| PollFd::from_borrowed_fd(m.as_fd(), PollFlags::IN)),
        );
        fds.extend(tracker_fd.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("waiting for events"),
        }
    }
}

/// Tracks cgroups if a rule names some, or if settings on them would not be enforced.
fn track(
    classes: &Classes,
    honors: Honors,
    table: &mut CgroupMap,
) -> anyhow::Result<Option<Tracker>> {
    let has_rules = classes.rules.iter().any(|r| r.subject == Subject::Cgroup);
    if !has_rules && honors.cpu_max && honors.cpu_weight {
        return Ok(None);
    }
    let Some(root) = cgroups::mount_point(Path::new("/sys")) else {
        if has_rules {
            errln!("warning: no cgroup v2 hierarchy: rules on cgroups match nothing");
        }
        return Ok(None);
    };
    let tracker = Tracker::new(&root, classes, table)
        .with_context(|| format!("watching the cgroups below {}", root.display()))?;
    Ok(Some(tracker))
}

/// Prints why the kernel ended the scheduler, with its dump.
fn report(exit: &intf::Exit) {
    let colon = if exit.message.is_empty() { "" } else { ": " };
    if !exit.dump.is_empty() {
        errln!(
            "---- the kernel's dump ----\n{}---- end of the dump ----",
            exit.dump
        );
    }
    errln!(
        "error: the kernel ended the scheduler and returned to its own: {}{colon}{} \
         (kind {}, code {:#x})",
        exit.reason,
        exit.message,
        exit.kind,
        exit.code
    );
    notify::status(&format!("ended by the kernel: {}", exit.reason));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As in a background job of a shell, for which SIGINT is ignored from the start.
    #[test]
    fn both_signals_arrive_as_bytes() {
        let signals = Signals::install().unwrap();
        assert!(!signals.arrived());
        for signal in [SIGINT, SIGTERM] {
            signal_hook::low_level::raise(signal).unwrap();
            assert!(signals.arrived(), "signal {signal}");
            assert!(!signals.arrived());
        }
    }
}
