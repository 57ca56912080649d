//! Files that a configuration refers to: read once at the start, or again while a process runs.
//!
//! A path may be wrong: it may lead to a device, a FIFO without a writer, a file that does not end, or a file system
//! that does not answer. Every read has a size limit. [`read`] serves a command at its start, where a pipe of the
//! shell is a usual source. [`reread`] serves a running process, which must not wait: it reads regular files and FIFOs
//! only, each on a thread of its own, within [`READ_WITHIN`].

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

/// Largest file, bytes: a table of 4 million measured steps has about 120 MB.
pub const BYTES_MAX: u64 = 256 << 20;

/// Time limit of a read in a running process.
pub const READ_WITHIN: Duration = Duration::from_secs(2);

/// Time in which a process must write to a FIFO that a command reads at its start.
const WRITER_WITHIN: Duration = Duration::from_secs(10);

/// Limit of reads in progress in a running process. If there are more than a few, they are stuck.
const READS_MAX: usize = 32;

/// Paths of the reads in progress in a running process.
static READS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Whether inputs are noted.
static NOTES_INPUTS: AtomicBool = AtomicBool::new(false);

/// Device, inode and time of creation: a removed file's inode is used again.
type Identity = (u64, u64, Option<SystemTime>);

/// Each regular file that [`read`] and [`open_stream`] opened.
static INPUTS: Mutex<BTreeSet<Identity>> = Mutex::new(BTreeSet::new());

fn identity(of: &Metadata) -> Identity {
    (of.dev(), of.ino(), of.created().ok())
}

/// From now on, notes the files that [`read`] and [`open_stream`] open, for [`is_input`]: a command's outputs must not
/// replace its inputs.
pub fn note_inputs() {
    NOTES_INPUTS.store(true, Ordering::Relaxed);
}

/// Whether this process has read `path` as an input, under this name or another.
pub fn is_input(path: &Path) -> bool {
    let inputs = INPUTS.lock().unwrap_or_else(PoisonError::into_inner);
    path.metadata()
        .is_ok_and(|of| inputs.contains(&identity(&of)))
}

fn note_input(file: &File) -> io::Result<()> {
    if NOTES_INPUTS.load(Ordering::Relaxed) {
        let about = file.metadata()?;
        if about.is_file() {
            let mut inputs = INPUTS.lock().unwrap_or_else(PoisonError::into_inner);
            inputs.insert(identity(&about));
        }
    }
    Ok(())
}

/// The content of `path`, for a command that starts. A FIFO without a process that writes to it is given up after a
/// while; the pipes of a shell (`/dev/stdin`, `<(…)`) are not.
///
/// # Errors
/// If it cannot be read, or exceeds [`BYTES_MAX`] (a device, or weights instead of a `config.json`).
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    path.metadata()?;
    if is_named_fifo(path) {
        return read_fifo(path, WRITER_WITHIN, BYTES_MAX);
    }
    let file = File::open(path)?;
    note_input(&file)?;
    read_at_most(file, BYTES_MAX)
}

/// Whether `path` is a FIFO in a folder, whose opening blocks until another process opens it too: not one of the pipes of
/// a shell, which are open.
pub fn is_named_fifo(path: &Path) -> bool {
    !is_of_shell(path) && path.metadata().is_ok_and(|of| of.file_type().is_fifo())
}

/// Opens a file that a command reads as it is used, such as a trace.
///
/// # Errors
/// If it cannot be opened, or is a named FIFO: no signal would end the wait for its writer.
pub fn open_stream(path: &Path) -> io::Result<File> {
    if is_named_fifo(path) {
        return Err(invalid(
            "it is a FIFO; write its content to a file, or pass the command as <(COMMAND)",
        ));
    }
    let file = File::open(path)?;
    note_input(&file)?;
    Ok(file)
}

/// The content of `path`, of at most `bytes_max` bytes, for a process that runs: within [`READ_WITHIN`].
///
/// # Errors
/// It cannot be read in this time, it is larger, or it is neither a regular file nor a FIFO. A pipe of the shell is
/// refused: it was read at the start, and has nothing more.
pub fn reread(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    within(path, READ_WITHIN, move |path| {
        if !path.metadata()?.file_type().is_fifo() {
            return read_at_most(open_regular(path, OFlags::empty())?, bytes_max);
        }
        if is_of_shell(path) {
            return Err(invalid("it is a pipe, which can be read only once"));
        }
        read_fifo(path, READ_WITHIN, bytes_max)
    })
}

/// As [`read`], as text without a byte order mark.
///
/// # Errors
/// As [`read`], and if it is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    text(read(path)?)
}

/// As [`reread`], as text without a byte order mark.
///
/// # Errors
/// As [`reread`], and if it is not UTF-8.
pub fn reread_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    text(reread(path, bytes_max)?)
}

/// Whether `path` is a pipe of the shell, which only the first [`read`] gets the content of.
pub fn is_read_once(path: &Path) -> bool {
    is_of_shell(path) && path.metadata().is_ok_and(|of| of.file_type().is_fifo())
}

/// Opens a regular file, without blocking on anything else.
///
/// # Errors
/// It cannot be opened, or it is not a regular file.
pub fn open_regular(path: &Path, flags: OFlags) -> io::Result<File> {
    let irregular = || invalid("it is not a regular file");
    let stat = if flags.contains(OFlags::NOFOLLOW) {
        path.symlink_metadata()?
    } else {
        path.metadata()?
    };
    // Before it is opened, as opening a device may do something.
    if !stat.is_file() {
        return Err(irregular());
    }
    let file = open(path, flags)?;
    if !file.metadata()?.is_file() {
        return Err(irregular()); // replaced since
    }
    Ok(file)
}

fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(path, flags, Mode::empty())?))
}

fn invalid(message: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

/// Whether `path` is a pipe that this process was started with, as shells make them: a standard stream or `<(…)`.
fn is_of_shell(path: &Path) -> bool {
    let standard = ["/dev/stdin", "/dev/stdout", "/dev/stderr"];
    let is_fd = |path: &Path| {
        path.starts_with("/dev/fd")
            || path.starts_with("/proc") && path.parent().is_some_and(|of| of.ends_with("fd"))
    };
    let is_open = |path: &Path| is_fd(path) || standard.iter().any(|known| path == *known);
    // A link to one of them is one.
    is_open(path) || path.read_link().is_ok_and(|to| is_open(&to))
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    let mut text = String::from_utf8(bytes)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

fn read_at_most(source: impl Read, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source
        .take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let (limit, unit) = if bytes_max < 1 << 20 {
            (bytes_max, "bytes")
        } else {
            (bytes_max >> 20, "MiB")
        };
        let message = format!("larger than {limit} {unit}; is it the right file?");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// The content of the FIFO `path`, up to the time when its last writer closes it. Each part must come within `limit`.
fn read_fifo(path: &Path, limit: Duration, bytes_max: u64) -> io::Result<Vec<u8>> {
    // Opened without waiting: a blocked thread would take the content that a later read waits for.
    let file = open(path, OFlags::empty())?;
    if !file.metadata()?.file_type().is_fifo() {
        return Err(invalid("it was a FIFO, and has been replaced"));
    }
    read_at_most(Fifo { file, limit }, bytes_max)
}

/// A FIFO whose reads wait for a writer until a deadline.
struct Fifo {
    file: File,
    limit: Duration,
}

impl Read for Fifo {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let deadline = Instant::now() + self.limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            };
            // Not readable until there is a writer: a read would return the end of the file before that.
            match poll(
                &mut [PollFd::new(&self.file, PollFlags::IN)],
                Some(&timeout),
            ) {
                Ok(0) => {
                    let limit = self.limit;
                    let text = format!("it is a FIFO, and no process wrote to it within {limit:?}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(_) => {}
            }
            match self.file.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}

/// Path of a read in progress.
struct Reading(PathBuf);

impl Reading {
    fn begin(path: &Path) -> io::Result<Reading> {
        let mut reads = READS.lock().unwrap_or_else(PoisonError::into_inner);
        if reads.len() >= READS_MAX || !reads.insert(path.into()) {
            let message = "an earlier read of a file has not ended; does its file system answer?";
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        Ok(Reading(path.into()))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut reads = READS.lock().unwrap_or_else(PoisonError::into_inner);
        reads.remove(&self.0);
    }
}

/// Runs `read` on a thread, which is left behind if it does not end within `limit`: opening or reading a file may block
/// forever, even against signals.
fn within(
    path: &Path,
    limit: Duration,
    read: impl FnOnce(&Path) -> io::Result<Vec<u8>> + Send + 'static,
) -> io::Result<Vec<u8>> {
    let reading = Reading::begin(path)?;
    let (send, received) = mpsc::sync_channel(1);
    let run = move || {
        let bytes = read(&reading.0);
        drop(reading);
        let _ = send.send(bytes); // an error: the caller waits no more
    };
    let thread = std::thread::Builder::new().name("file-read".into());
    thread.spawn(run)?; // detached
    received.recv_timeout(limit).map_err(|_| {
        let message = format!("no answer within {limit:?}; does its file system or writer answer?");
        io::Error::new(io::ErrorKind::TimedOut, message)
    })?
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
