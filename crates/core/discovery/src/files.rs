//! Reads files that may be replaced while a process runs: keys, certificates, cluster files.
//!
//! A path may lead to a FIFO, a device or a file system that does not answer. Opening or reading it
//! may then block forever, even against signals. So only regular files are read, with a size limit,
//! on a thread per read; callers wait for it until a deadline.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};

/// Time limit of a read.
pub const READ_WITHIN: Duration = Duration::from_secs(2);

/// Limit of reads in progress. If there are more than a few, they are stuck.
const READS_MAX: usize = 32;

/// Paths of the reads in progress.
static READS: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Opens a regular file, without blocking on anything else.
///
/// # Errors
/// It cannot be opened, or it is not a regular file.
pub fn open_regular(path: &Path, flags: OFlags) -> io::Result<File> {
    let irregular = || {
        let message = "it is not a regular file";
        io::Error::new(io::ErrorKind::InvalidInput, message)
    };
    let stat = if flags.contains(OFlags::NOFOLLOW) {
        path.symlink_metadata()?
    } else {
        path.metadata()?
    };
    // Before it is opened, as opening a device may do something.
    if !stat.is_file() {
        return Err(irregular());
    }
    let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(irregular()); // replaced since
    }
    Ok(file)
}

/// The content of a regular file. Blocks if its file system does not answer.
fn read_regular(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open_regular(path, OFlags::empty())?;
    file.take(bytes_max.saturating_add(1))
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let message = format!("it has more than {bytes_max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
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

/// The content of a regular file of at most `bytes_max` bytes, within [`READ_WITHIN`].
///
/// # Errors
/// It cannot be read in this time, it is not a regular file, or it is larger.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    wait(path, READ_WITHIN, move |path| read_regular(path, bytes_max))
}

fn wait(
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
        let message = format!("no answer within {limit:?}; does its file system answer?");
        io::Error::new(io::ErrorKind::TimedOut, message)
    })?
}

/// As [`read`], as text.
///
/// # Errors
/// As [`read`], and if it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    String::from_utf8(read(path, bytes_max)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_limited_size_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("key"), "secret").unwrap();
        std::os::unix::fs::symlink(at("key"), at("link")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("zero")).unwrap();
        std::os::unix::fs::symlink(at("loop"), at("loop")).unwrap();
        let node = |name: &str, kind| {
            let mode = Mode::RUSR | Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, at(name), kind, mode, 0)
        };
        node("fifo", rustix::fs::FileType::Fifo).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        assert_eq!(read(&at("key"), 6).unwrap(), b"secret");
        assert_eq!(read(&at("link"), 6).unwrap(), b"secret");
        assert!(
            read(&at("key"), 5)
                .unwrap_err()
                .to_string()
                .contains("5 bytes")
        );
        for name in ["fifo", "zero", "socket", "loop", "none", "."] {
            assert!(read(&at(name), 6).is_err(), "{name}");
        }
        drop(socket);
        // Regular files of size 0, as /proc has them.
        let status = read_text(Path::new("/proc/self/status"), 1 << 20).unwrap();
        assert!(status.starts_with("Name:"));
    }

    #[test]
    fn a_read_that_does_not_end_is_left_behind_and_not_repeated() {
        let path = Path::new("/stalled/key");
        let (go, stalled) = mpsc::channel::<()>();
        let (ended, end) = mpsc::channel();
        let stuck = wait(path, Duration::ZERO, move |_| {
            let _ = stalled.recv();
            let _ = ended.send(());
            Ok(Vec::new())
        });
        assert_eq!(stuck.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let again = wait(path, READ_WITHIN, |_| panic!("a second thread"));
        assert!(again.unwrap_err().to_string().contains("earlier read"));
        // Other files are read.
        assert!(read(Path::new("/proc/self/status"), 1 << 20).is_ok());
        drop(go);
        end.recv().unwrap();
        while Reading::begin(path).is_err() {
            std::thread::yield_now(); // the thread ends
        }
    }
}
