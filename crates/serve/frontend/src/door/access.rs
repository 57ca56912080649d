//! The access log: a JSON line per request, written by a thread of its own behind a bounded queue.
//!
//! Shards hand entries over and never wait: an entry for which there is no room, or that cannot be written, is
//! dropped and counted.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use serde::Serialize;
use slipstream_metrics::{Collector, Family};

use crate::door::outbox::{Handed, Outbox};
use crate::door::trace_context::Span;

/// Entries that may wait to be written.
const QUEUE: usize = 8192;

/// Bytes that are written at once.
const BATCH_BYTES: usize = 64 << 10;

/// Interval at which the writer looks whether to open its file again.
const LOOK: Duration = Duration::from_millis(250);

/// Time that a reader of a pipe has to make room.
const PIPE_WAIT: Duration = Duration::from_secs(1);

/// Time at the end for what waits to be written.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// Longest path and model name in a line, bytes.
pub(crate) const TEXT_BYTES_MAX: usize = 256;

/// Where the lines go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessTarget {
    /// Standard output.
    Stdout,
    /// This file, at its end; made if it does not exist.
    File(PathBuf),
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AnswerEnd {
    /// All of it was passed to the client's connection.
    Complete,
    /// It broke off: its engine was lost, a limit was reached, or the server stopped.
    Broken,
    /// The client left before its end.
    #[default]
    ClientLeft,
    /// It is an error of status 400 or above, and complete.
    Refused,
}

impl AnswerEnd {
    /// As it is written in lines and spans.
    pub(crate) fn name(self) -> &'static str {
        match self {
            AnswerEnd::Complete => "complete",
            AnswerEnd::Broken => "broken",
            AnswerEnd::ClientLeft => "client_left",
            AnswerEnd::Refused => "refused",
        }
    }
}

/// One request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    pub(crate) request_id: String,
    pub(crate) key: Option<Box<str>>,
    pub(crate) method: String,
    /// Without the query.
    pub(crate) path: String,
    pub(crate) status: u16,
    pub(crate) model: Option<String>,
    pub(crate) engine: Option<String>,
    pub(crate) prompt_tokens: Option<u64>,
    pub(crate) cached_tokens: Option<u64>,
    pub(crate) completion_tokens: Option<u64>,
    /// `CLOCK_MONOTONIC`, ns.
    pub(crate) begun_ns: u64,
    /// First event of a stream; 0: there was none.
    pub(crate) first_ns: u64,
    pub(crate) ended_ns: u64,
    pub(crate) retries: u32,
    pub(crate) resumes: u32,
    pub(crate) trace_id: Option<String>,
    /// Set if its span is exported.
    pub(crate) span: Option<Span>,
    pub(crate) end: AnswerEnd,
    /// Wall clock at its end.
    pub(crate) unix: Duration,
}

/// A line; its fields are documented in `docs/engines.md`.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    request_id: &'a str,
    key: Option<&'a str>,
    method: &'a str,
    path: &'a str,
    status: u16,
    model: Option<&'a str>,
    engine: Option<&'a str>,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    ttft_s: Option<f64>,
    duration_s: f64,
    retries: u32,
    resumes: u32,
    trace_id: Option<&'a str>,
    end: &'static str,
}

impl Entry {
    fn write(&self, out: &mut Vec<u8>) {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let line = Line {
            time: rfc3339(self.unix),
            request_id: &self.request_id,
            key: self.key.as_deref(),
            method: &self.method,
            path: &self.path,
            status: self.status,
            model: self.model.as_deref(),
            engine: self.engine.as_deref(),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            ttft_s: (self.first_ns > 0)
                .then(|| seconds(self.first_ns.saturating_sub(self.begun_ns))),
            duration_s: seconds(self.ended_ns.saturating_sub(self.begun_ns)),
            retries: self.retries,
            resumes: self.resumes,
            trace_id: self.trace_id.as_deref(),
            end: self.end.name(),
        };
        serde_json::to_writer(&mut *out, &line).expect("strings and numbers into memory");
        out.push(b'\n');
    }
}

/// A time since 1970 in UTC, with milliseconds. Days to dates as in the proleptic Gregorian calendar.
fn rfc3339(since: Duration) -> String {
    let days = since.as_secs() / 86_400;
    let (mut year, mut day) = (1970, days);
    loop {
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let length = if leap { 366 } else { 365 };
        if day < length {
            let february = if leap { 29 } else { 28 };
            let months = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            let mut month = 0;
            while day >= months[month] {
                day -= months[month];
                month += 1;
            }
            let second = since.as_secs() % 86_400;
            return format!(
                "{year:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
                month + 1,
                day + 1,
                second / 3600,
                second / 60 % 60,
                second % 60,
                since.subsec_millis()
            );
        }
        day -= length;
        year += 1;
    }
}

#[derive(Debug, Default)]
struct Counts {
    handed: Arc<Handed>,
    written: AtomicU64,
    /// They could not be written.
    failed: AtomicU64,
    reopen: AtomicBool,
}

/// An access log that is being written. Queued lines are written when it is dropped.
pub struct AccessLog {
    outbox: Outbox,
    counts: Arc<Counts>,
}

impl fmt::Debug for AccessLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AccessLog({:?})", self.counts)
    }
}

impl AccessLog {
    /// Opens `target`, and starts the thread that writes it.
    ///
    /// # Errors
    /// It cannot be opened: also a FIFO that no process reads. Or the thread cannot be made.
    pub fn start(target: AccessTarget) -> io::Result<AccessLog> {
        let sink = Sink::open(target)?;
        let counts: Arc<Counts> = Arc::default();
        let shared = counts.clone();
        let write = move |receive: &Receiver<_>| write_all(receive, sink, &shared);
        let outbox = Outbox::start("access-log", QUEUE, counts.handed.clone(), write)?;
        Ok(AccessLog { outbox, counts })
    }

    /// Hands an entry over, if there is room.
    pub(crate) fn send(&self, entry: Box<Entry>) {
        self.outbox.send(entry);
    }

    /// Opens the file anew, after a rotation.
    pub fn reopener(&self) -> Reopener {
        Reopener(self.counts.clone())
    }

    /// Waits for lines, if the process ends without dropping the log.
    pub fn flusher(&self) -> Flusher {
        Flusher(self.counts.clone())
    }

    /// Counts of its lines.
    pub fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(self.counts.clone(), Arc::clone, FAMILIES)
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        // A pipe may have no reader.
        if !self.outbox.close(CLOSE_WAIT) {
            tracing::warn!("the access log was not written to its end within {CLOSE_WAIT:?}");
        }
    }
}

/// Asks an access log to open its file anew.
#[derive(Clone, Debug)]
pub struct Reopener(Arc<Counts>);

impl Reopener {
    /// It does so within a fraction of a second.
    pub fn reopen(&self) {
        self.0.reopen.store(true, Relaxed);
    }
}

/// Waits until lines are written.
#[derive(Clone, Debug)]
pub struct Flusher(Arc<Counts>);

impl Flusher {
    /// Waits for the lines that were handed over before, `time` at most. Returns whether all are written.
    pub fn flush(&self, time: Duration) -> bool {
        let counts = &self.0;
        let settled = || counts.written.load(Relaxed) + counts.failed.load(Relaxed);
        counts.handed.await_settled(time, settled)
    }
}

struct Sink {
    target: AccessTarget,
    file: File,
    /// Precedes the next line: the rest of one that is there in part.
    rest: Vec<u8>,
    failing: bool,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o640)
        // A FIFO without a reader is an error at once, and one with a slow reader does not hold the thread up.
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
}

/// Ends the last line of the file at `path`, if a process was killed within it.
fn end_of_line(path: &Path) -> Vec<u8> {
    let last = || {
        let length = std::fs::metadata(path)
            .ok()
            .filter(std::fs::Metadata::is_file)?;
        let mut last = [0];
        let at = length.len().checked_sub(1)?;
        File::open(path).ok()?.read_exact_at(&mut last, at).ok()?;
        Some(last[0])
    };
    match last() {
        None | Some(b'\n') => Vec::new(),
        Some(_) => b"\n".to_vec(),
    }
}

impl Sink {
    fn open(target: AccessTarget) -> io::Result<Sink> {
        let file = match &target {
            AccessTarget::Stdout => File::from(io::stdout().as_fd().try_clone_to_owned()?),
            AccessTarget::File(path) => open(path)?,
        };
        let rest = match &target {
            AccessTarget::Stdout => Vec::new(),
            AccessTarget::File(path) => end_of_line(path),
        };
        Ok(Sink {
            target,
            file,
            rest,
            failing: false,
        })
    }

    fn reopen(&mut self) {
        let AccessTarget::File(path) = &self.target else {
            return;
        };
        match open(path) {
            Ok(file) => {
                self.file = file;
                self.rest = end_of_line(path);
                tracing::info!("access log {} opened anew", path.display());
            }
            Err(error) => tracing::warn!(
                "access log {} cannot be opened anew ({error}); lines go to the file that was opened before",
                path.display()
            ),
        }
    }

    /// Writes `lines`. Returns how many were not.
    fn write(&mut self, lines: &[u8]) -> u64 {
        let mut rest = lines;
        let end = Instant::now() + PIPE_WAIT;
        let length = self.length();
        let error = loop {
            if rest.is_empty() {
                break None;
            }
            let next = if self.rest.is_empty() {
                rest
            } else {
                &self.rest
            };
            match self.file.write(next) {
                Ok(0) => break Some(io::Error::from(ErrorKind::WriteZero)),
                Ok(count) if !self.rest.is_empty() => drop(self.rest.drain(..count)),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => break Some(error),
            }
        };
        let written = &lines[..lines.len() - rest.len()];
        if let Some(error) = &error {
            let whole = memchr::memrchr(b'\n', written).map_or(0, |at| at + 1);
            if whole < written.len() && !self.cut(length, written.len(), whole) {
                let end = memchr::memchr(b'\n', rest).map_or(rest.len(), |at| at + 1);
                self.rest = rest[..end].to_vec();
            }
            if !self.failing {
                tracing::warn!("the access log cannot be written ({error}); its lines are dropped");
            }
        } else if self.failing {
            tracing::info!("the access log is written again");
        }
        self.failing = error.is_some();
        memchr::memchr_iter(b'\n', rest).count() as u64
    }
}

impl Sink {
    /// Length of a regular file.
    fn length(&self) -> Option<u64> {
        let stat = self.file.metadata().ok()?;
        stat.is_file().then_some(stat.len())
    }

    /// Takes a line back that was written in part: `written` bytes at `length`, of which `whole` are whole lines. False
    /// if it is not certain that they are the last ones of a regular file.
    fn cut(&self, length: Option<u64>, written: usize, whole: usize) -> bool {
        let (Some(before), Some(now)) = (length, self.length()) else {
            return false;
        };
        now == before + written as u64 && self.file.set_len(before + whole as u64).is_ok()
    }
}

fn write_all(receive: &Receiver<Box<Entry>>, mut sink: Sink, counts: &Counts) {
    let mut lines = Vec::new();
    loop {
        if counts.reopen.swap(false, Relaxed) {
            sink.reopen();
        }
        match receive.recv_timeout(LOOK) {
            Ok(entry) => entry.write(&mut lines),
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let mut count = 1;
        while lines.len() < BATCH_BYTES
            && let Ok(entry) = receive.try_recv()
        {
            entry.write(&mut lines);
            count += 1;
        }
        let failed = sink.write(&lines);
        counts.failed.fetch_add(failed, Relaxed);
        counts.written.fetch_add(count - failed, Relaxed);
        lines.clear();
    }
}

/// The wall clock, for entries.
pub(crate) fn unix_now() -> Duration {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default()
}

const FAMILIES: &[Family<Arc<Counts>>] = &[
    Family::total(
        "slipstream_access_log_lines",
        "Lines of the access log that were written",
        |of| of.written.load(Relaxed),
    ),
    Family::counter(
        "slipstream_access_log_dropped",
        "Lines of the access log that were dropped",
        |of, samples| {
            samples.add(&[("reason", "queue")], of.handed.crowded());
            samples.add(&[("reason", "write")], of.failed.load(Relaxed));
        },
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Against `date -u -d @N`.
    #[test]
    fn times_are_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(Duration::from_secs(seconds)), text);
        }
        assert!(rfc3339(Duration::from_millis(1_234)).ends_with("01.234Z"));
    }

    #[test]
    fn lines_that_were_handed_over_can_be_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let log = AccessLog::start(AccessTarget::File(path.clone())).unwrap();
        for _ in 0..1000 {
            log.send(Box::default());
        }
        let flusher = log.flusher();
        // As at the end of a process that drops nothing.
        std::mem::forget(log);
        assert!(flusher.flush(Duration::from_secs(10)));
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 1000);
    }

    #[test]
    fn a_torn_line_is_counted_and_does_not_spoil_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "{\"half").unwrap();
        let mut sink = Sink::open(AccessTarget::File(path.clone())).unwrap();
        assert_eq!(sink.write(b"{}\n{}\n"), 0);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"half\n{}\n{}\n");
        sink.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert_eq!(sink.write(b"{}\n{}\n"), 2, "no space is left");
        assert!(sink.failing && sink.rest.is_empty());
    }

    #[test]
    fn a_line_written_in_part_is_taken_back_or_finished() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut sink = Sink::open(AccessTarget::File(path.clone())).unwrap();
        assert_eq!(sink.write(b"{1}\n"), 0);
        let length = sink.length();
        // As a write that ends at the end of the disk's space leaves it.
        sink.file.write_all(b"{2}\n{3").unwrap();
        assert!(sink.cut(length, 6, 4));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{1}\n{2}\n");
        // Another process wrote there as well.
        assert!(!sink.cut(length, 2, 0));
        // A pipe takes the rest when it has room.
        let (reader, writer) = io::pipe().unwrap();
        let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
        rustix::fs::fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
        sink.file = File::from(std::os::fd::OwnedFd::from(writer));
        let long = [&vec![b'x'; 1 << 20][..], b"\n"].concat();
        assert_eq!(sink.write(&long), 1, "nobody reads it");
        let lines = std::thread::spawn(move || {
            let lines = io::BufRead::lines(io::BufReader::new(reader));
            lines.map(|line| line.unwrap().len()).collect::<Vec<_>>()
        });
        while sink.write(b"{}\n") > 0 {}
        drop(sink);
        let lines = lines.join().unwrap();
        assert_eq!((lines[0], lines.last()), (1 << 20, Some(&2)));
    }

    #[test]
    fn a_file_is_opened_anew_and_a_fifo_without_a_reader_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut sink = Sink::open(AccessTarget::File(path.clone())).unwrap();
        sink.write(b"1\n");
        std::fs::rename(&path, dir.path().join("log.1")).unwrap();
        sink.write(b"2\n");
        sink.reopen();
        sink.write(b"3\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "3\n");
        let old = std::fs::read_to_string(dir.path().join("log.1")).unwrap();
        assert_eq!(old, "1\n2\n");
        let fifo = dir.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.unwrap().success());
        assert!(AccessLog::start(AccessTarget::File(fifo)).is_err());
        let folder = AccessTarget::File(dir.path().to_owned());
        assert!(AccessLog::start(folder).is_err());
    }
}
