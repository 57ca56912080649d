//! Records the requests of a live server as a trace that `slipstream simulate --trace DIR` replays.
//!
//! A line holds arrival, lengths, session and block hashes: no text, no tokens, no names of clients.
//! Block hashes and sessions are hashed again with a key that is drawn at the start and never
//! written (SipHash-1-3), so a record shows which prompts share a prefix, but not whether a known
//! text was among them. Records of two runs therefore share no block hashes.
//!
//! ```text
//! {"slipstream_record": 1, "tokens_per_id": 16}
//! {"timestamp": 1790000000000.125, "input_length": 40, "output_length": 7, "hash_ids": [5, 9, 2],
//!  "session_id": 77, "priority": 1, "class": "batch"}
//! ```
//!
//! Each line after the first is one sequence, in order of its end. `timestamp` is its arrival in ms
//! since 1970, `hash_ids` has one entry for each `tokens_per_id` tokens, the last one for the rest
//! (which no other prompt shares). The other fields are omitted if they have no value.
//!
//! Callers never wait: they put requests into a bounded queue, and drops are counted. A thread
//! writes files of limited size, deletes the oldest ones beyond a limit, and syncs them.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use slipstream_base::BlockHash;
use slipstream_base::width::nanos;
use slipstream_metrics::{Collector, Family};

/// Version of the format, in the first line of each file.
pub const FORMAT: u64 = 1;

/// Start and end of a file's name.
const NAME: (&str, &str) = ("requests-", ".jsonl");

/// Longest time that a line waits for its sync.
const SYNC: Duration = Duration::from_secs(1);

/// Settings of a [`Recorder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecorderOptions {
    /// Folder of the files; made if it is missing.
    pub folder: PathBuf,
    /// Tokens per block hash.
    pub block_size: u32,
    /// A file ends at this size, bytes.
    pub file_bytes_max: u64,
    /// The oldest files are deleted beyond this total, bytes. At least two files are kept.
    pub total_bytes_max: u64,
    /// Requests that may wait for the writer; further ones are dropped and counted.
    pub queue_max: usize,
}

impl RecorderOptions {
    /// Defaults: files of 64 MiB, 1 GiB of them, 16,384 waiting requests.
    pub fn new(folder: impl Into<PathBuf>, block_size: u32) -> RecorderOptions {
        RecorderOptions {
            folder: folder.into(),
            block_size,
            file_bytes_max: 64 << 20,
            total_bytes_max: 1 << 30,
            queue_max: 16_384,
        }
    }
}

/// Why recording cannot start.
#[derive(Debug, thiserror::Error)]
#[error("cannot record to {}: {source}", folder.display())]
pub struct RecorderError {
    /// The folder.
    pub folder: PathBuf,
    /// The cause.
    #[source]
    pub source: io::Error,
}

/// A sequence at its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedRequest {
    /// Arrival, `CLOCK_MONOTONIC` ns.
    pub arrival_ns: u64,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens of the answer. Sequences without any are counted, not written.
    pub output_tokens: u32,
    /// Hashes of the prompt's full blocks.
    pub blocks: Arc<[BlockHash]>,
    /// The client's session, hashed.
    pub session: Option<u64>,
    /// Priority; lower runs first.
    pub priority: i32,
    /// Class of the request.
    pub class: Option<Arc<str>>,
}

/// Counters, for `/metrics`.
#[derive(Debug, Default)]
pub struct RecorderCounters {
    /// Requests written.
    pub written: AtomicU64,
    /// Requests dropped because the queue was full.
    pub dropped: AtomicU64,
    /// Requests lost because a file could not be written.
    pub failed: AtomicU64,
    /// Requests without an answer token, which are not recorded.
    pub unanswered: AtomicU64,
    /// Files deleted beyond the limit.
    pub deleted_files: AtomicU64,
}

/// The counters on `/metrics`.
const FAMILIES: &[Family<Arc<RecorderCounters>>] = &[
    Family::total("slipstream_record_written", "Requests recorded", |of| {
        of.written.load(Ordering::Relaxed)
    }),
    Family::total(
        "slipstream_record_dropped",
        "Requests not recorded because the queue was full",
        |of| of.dropped.load(Ordering::Relaxed),
    ),
    Family::total(
        "slipstream_record_failed",
        "Requests not recorded because a file could not be written",
        |of| of.failed.load(Ordering::Relaxed),
    ),
    Family::total(
        "slipstream_record_unanswered",
        "Requests without an answer token, which are not recorded",
        |of| of.unanswered.load(Ordering::Relaxed),
    ),
    Family::total(
        "slipstream_record_deleted_files",
        "Files of the record deleted beyond its limit",
        |of| of.deleted_files.load(Ordering::Relaxed),
    ),
];

/// Records requests until it is closed or dropped.
#[derive(Debug)]
pub struct Recorder {
    handle: RecorderHandle,
    writer: Option<JoinHandle<()>>,
}

impl Recorder {
    /// Makes the folder and the first file, and starts the writer. `monotonic_ns` is the current
    /// reading of the clock of [`RecordedRequest::arrival_ns`].
    ///
    /// # Errors
    /// [`RecorderError`] if the folder or the file cannot be made.
    pub fn start(options: RecorderOptions, monotonic_ns: u64) -> Result<Recorder, RecorderError> {
        let counters: Arc<RecorderCounters> = Arc::default();
        let folder = options.folder.clone();
        let fail = |source| RecorderError {
            folder: folder.clone(),
            source,
        };
        let (queue, requests) = sync_channel(options.queue_max);
        let unix = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let writer =
            Writer::new(options, unix, monotonic_ns, Arc::clone(&counters)).map_err(&fail)?;
        let thread = std::thread::Builder::new()
            .name("recorder".into())
            .spawn(move || writer.run(&requests))
            .map_err(&fail)?;
        Ok(Recorder {
            handle: RecorderHandle { queue, counters },
            writer: Some(thread),
        })
    }

    /// A handle to record with, for any thread.
    pub fn handle(&self) -> RecorderHandle {
        self.handle.clone()
    }

    /// The counters as metrics.
    pub fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(Arc::clone(&self.handle.counters), Arc::clone, FAMILIES)
    }

    /// Writes and syncs earlier requests. Later requests count as dropped.
    pub fn close(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(writer) = self.writer.take() else {
            return;
        };
        // Waits for room in the queue; fails if the writer is gone.
        let _ = self.handle.queue.send(Message::End);
        if writer.join().is_err() {
            tracing::error!("the recorder's thread panicked");
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.end();
    }
}

/// Records requests. Cheap to clone; its calls never wait.
#[derive(Clone, Debug)]
pub struct RecorderHandle {
    queue: SyncSender<Message>,
    counters: Arc<RecorderCounters>,
}

impl RecorderHandle {
    /// Records a sequence at its end.
    pub fn record(&self, request: RecordedRequest) {
        if request.output_tokens == 0 {
            self.counters.unanswered.fetch_add(1, Ordering::Relaxed);
        } else if self.queue.try_send(Message::Request(request)).is_err() {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counters.
    pub fn counters(&self) -> &RecorderCounters {
        &self.counters
    }
}

/// A message to the writer.
#[derive(Debug)]
enum Message {
    Request(RecordedRequest),
    End,
}

/// The writer's thread.
struct Writer {
    options: RecorderOptions,
    counters: Arc<RecorderCounters>,
    key: RandomState,
    /// Time of monotonic 0, ms since 1970.
    epoch_ms: f64,
    /// Written requests: the name of a prompt's last part, which no other has.
    count: u64,
    /// Number in file names, which grows.
    next_file: u64,
    file: Option<File>,
    file_bytes: u64,
    /// When the first line that is not synced was written.
    unsynced: Option<Instant>,
    line: Vec<u8>,
    warned: bool,
}

impl Writer {
    fn new(
        options: RecorderOptions,
        unix: Duration,
        monotonic_ns: u64,
        counters: Arc<RecorderCounters>,
    ) -> io::Result<Writer> {
        fs::create_dir_all(&options.folder)?;
        let mut writer = Writer {
            epoch_ms: unix.as_secs_f64() * 1e3 - monotonic_ns as f64 / 1e6,
            // Names sort by time, also after those of earlier runs.
            next_file: nanos(unix) / 1_000_000,
            options,
            counters,
            key: RandomState::new(),
            count: 0,
            file: None,
            file_bytes: 0,
            unsynced: None,
            line: Vec::new(),
            warned: false,
        };
        writer.open()?;
        Ok(writer)
    }

    fn run(mut self, requests: &Receiver<Message>) {
        loop {
            let wait = self
                .unsynced
                .map_or(SYNC, |since| SYNC.saturating_sub(since.elapsed()));
            let result = match requests.recv_timeout(wait) {
                Ok(Message::Request(request)) => self.write(&request),
                Err(RecvTimeoutError::Timeout) => self.sync(),
                Ok(Message::End) | Err(RecvTimeoutError::Disconnected) => {
                    // Requests that other threads recorded at the same time.
                    while let Ok(Message::Request(request)) = requests.try_recv() {
                        let written = self.write(&request);
                        self.check(written);
                    }
                    let synced = self.sync();
                    self.check(synced);
                    return;
                }
            };
            self.check(result);
            if self.unsynced.is_some_and(|since| since.elapsed() >= SYNC) {
                let synced = self.sync();
                self.check(synced);
            }
        }
    }

    /// Logs the first error. The next file is tried with the next request.
    fn check(&mut self, result: io::Result<()>) {
        if let Err(error) = result
            && !std::mem::replace(&mut self.warned, true)
        {
            let folder = self.options.folder.display().to_string();
            tracing::error!(folder, %error, "recording failed; further failures are only counted");
        }
    }

    fn write(&mut self, request: &RecordedRequest) -> io::Result<()> {
        self.render(request);
        let written = self.append();
        let mut counter = &self.counters.written;
        if written.is_err() {
            // It may end in half a line.
            self.file = None;
            counter = &self.counters.failed;
        }
        counter.fetch_add(1, Ordering::Relaxed);
        written
    }

    fn append(&mut self) -> io::Result<()> {
        if self.file.is_none()
            || self.file_bytes + self.line.len() as u64 > self.options.file_bytes_max
        {
            self.sync()?;
            self.open()?;
        }
        let file = self.file.as_mut().ok_or(io::ErrorKind::NotFound)?;
        file.write_all(&self.line)?;
        self.file_bytes += self.line.len() as u64;
        self.unsynced.get_or_insert_with(Instant::now);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.unsynced.take().is_some()
            && let Some(file) = &self.file
        {
            file.sync_data()?;
        }
        Ok(())
    }

    /// Begins a file, and deletes the oldest ones beyond the limit.
    fn open(&mut self) -> io::Result<()> {
        self.file = None;
        self.shrink()?;
        let (start, end) = NAME;
        let name = format!("{start}{:015}{end}", self.next_file);
        let path = self.options.folder.join(name);
        self.next_file += 1;
        let mut file = File::options()
            .write(true)
            .create_new(true)
            // As the access log: lengths and names of models and keys are not for every user.
            .mode(0o640)
            .open(&path)?;
        let head = format!(
            "{{\"slipstream_record\": {FORMAT}, \"tokens_per_id\": {}}}\n",
            self.options.block_size
        );
        file.write_all(head.as_bytes())?;
        self.file = Some(file);
        self.file_bytes = head.len() as u64;
        // The file's name too survives a crash.
        File::open(&self.options.folder)?.sync_all()
    }

    /// Deletes the oldest files so that a new one of full size fits.
    fn shrink(&self) -> io::Result<()> {
        let mut files = Vec::new();
        let mut total = 0;
        for path in files_of(&self.options.folder)? {
            let bytes = fs::metadata(&path)?.len();
            total += bytes;
            files.push((path, bytes));
        }
        let limit = self
            .options
            .total_bytes_max
            .saturating_sub(self.options.file_bytes_max);
        let mut left = files.len();
        for (path, bytes) in files {
            if total <= limit || left <= 1 {
                break;
            }
            fs::remove_file(&path)?;
            self.counters.deleted_files.fetch_add(1, Ordering::Relaxed);
            total -= bytes;
            left -= 1;
        }
        Ok(())
    }

    fn render(&mut self, request: &RecordedRequest) {
        self.count += 1;
        let timestamp = self.epoch_ms + request.arrival_ns as f64 / 1e6;
        let line = &mut self.line;
        line.clear();
        let _ = write!(
            line,
            "{{\"timestamp\": {timestamp:.3}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": [",
            request.input_tokens, request.output_tokens,
        );
        let full = (request.input_tokens / self.options.block_size) as usize;
        let ids = request.input_tokens.div_ceil(self.options.block_size) as usize;
        for at in 0..ids {
            let id = match request.blocks.get(at) {
                Some(hash) if at < full => self.key.hash_one((0_u8, hash.0)),
                _ => self.key.hash_one((1_u8, self.count, at)),
            };
            let separator = if at == 0 { "" } else { ", " };
            let _ = write!(line, "{separator}{id}");
        }
        line.push(b']');
        if let Some(session) = request.session {
            // Readers take signed numbers.
            let session = self.key.hash_one((2_u8, session)) >> 1;
            let _ = write!(line, ", \"session_id\": {session}");
        }
        if request.priority != 0 {
            let _ = write!(line, ", \"priority\": {}", request.priority);
        }
        if let Some(class) = &request.class {
            let _ = write!(line, ", \"class\": {}", serde_json::Value::from(&**class));
        }
        line.extend_from_slice(b"}\n");
    }
}

/// Files of a record, oldest first.
///
/// # Errors
/// If `folder` cannot be read.
pub fn files_of(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let (start, end) = NAME;
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let digits = name
            .to_str()
            .and_then(|name| name.strip_prefix(start)?.strip_suffix(end));
        if digits
            .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}
