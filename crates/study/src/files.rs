//! Files that a configuration refers to, read with a size limit: a path may be wrong.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Largest file, bytes: a table of 4 million measured steps has about 120 MB.
const BYTES_MAX: u64 = 256 << 20;

/// The content of `path`.
///
/// # Errors
/// If it cannot be read, or exceeds `BYTES_MAX` (a device, or weights instead of a
/// `config.json`).
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(File::open(path)?, BYTES_MAX)
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
