//! Files that a configuration refers to, read with a size limit: a path may be wrong.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// Largest file, bytes: a table of 4 million measured steps has about 120 MB.
const BYTES_MAX: u64 = 256 << 20;

/// Time in which a process must write to a FIFO that is to be read.
const WRITER_WITHIN: Duration = Duration::from_secs(10);

/// The content of `path`. A FIFO may be without a process that writes to it: it is given up after a while. The pipes of a
/// shell (`/dev/stdin`, `<(…)`) are not.
///
/// # Errors
/// If it cannot be read, or exceeds `BYTES_MAX` (a device, or weights instead of a
/// `config.json`).
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let is_fifo = path.metadata()?.file_type().is_fifo();
    let is_of_shell = path.starts_with("/dev") || path.starts_with("/proc");
    if is_fifo && !is_of_shell {
        return read_fifo(path, WRITER_WITHIN);
    }
    read_at_most(File::open(path)?, BYTES_MAX)
}

/// The content of the FIFO `path`, whose first byte must come within `limit`.
fn read_fifo(path: &Path, limit: Duration) -> io::Result<Vec<u8>> {
    let (send, received) = mpsc::sync_channel(2);
    let owned = path.to_owned();
    // The thread may wait without end; it then ends with the process.
    std::thread::Builder::new()
        .name("fifo-read".into())
        .spawn(move || {
            let mut first = [0];
            let begun = File::open(&owned).and_then(|mut file| {
                let count = file.read(&mut first)?;
                Ok((file, count))
            });
            let rest = begun.map(|(file, count)| {
                let _ = send.send(Ok(Vec::new())); // an error: the caller waits no more
                (file, count)
            });
            let all = rest
                .and_then(|(file, count)| read_at_most((&first[..count]).chain(file), BYTES_MAX));
            let _ = send.send(all);
        })?;
    let silent = || {
        let text = format!("it is a FIFO, and no process wrote to it within {limit:?}");
        io::Error::new(io::ErrorKind::TimedOut, text)
    };
    received.recv_timeout(limit).map_err(|_| silent())??;
    received.recv().map_err(|_| silent())?
}

/// The content of `path` as text, without a byte order mark.
///
/// # Errors
/// As [`read`], and if it is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    let text = String::from_utf8(read(path)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))?;
    Ok(match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_owned(),
        None => text,
    })
}

fn read_at_most(source: impl Read, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let message = format!("larger than {} MiB; is it the right file?", bytes_max >> 20);
        return Err(io::Error::other(message));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_without_a_writer_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let error = read_fifo(&path, Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        let other = folder.path().join("other");
        let made = std::process::Command::new("mkfifo").arg(&other).status();
        assert!(made.unwrap().success());
        let to = other.clone();
        let writer = std::thread::spawn(move || std::fs::write(to, "key\n"));
        assert_eq!(read(&other).unwrap(), b"key\n");
        writer.join().unwrap().unwrap();
    }

    #[test]
    fn what_does_not_end_is_refused() {
        let max = 1 << 20;
        let error = read_at_most(io::repeat(0), max).unwrap_err();
        assert!(error.to_string().contains("larger than 1 MiB"), "{error}");
        let whole = read_at_most(io::repeat(7).take(max), max).unwrap();
        assert_eq!(whole.len() as u64, max);
        let folder = tempfile::tempdir().unwrap();
        assert!(read(folder.path()).is_err());
        let marked = folder.path().join("marked");
        std::fs::write(&marked, "\u{feff}a").unwrap();
        assert_eq!(read_text(&marked).unwrap(), "a");
        std::fs::write(&marked, b"\xff").unwrap();
        assert!(read_text(&marked).is_err());
        assert!(read(&folder.path().join("none")).is_err());
    }
}
