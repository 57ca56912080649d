//! API keys and certificates for connections to engines.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use slipstream_config::cluster::EngineTls;
use slipstream_os::{files, secrets};
use slipstream_planes::tls::{ClientFiles, ClientTls};

/// Reads files of keys and certificates, at the start and again when the cluster file changes.
///
/// A pipe of the shell has its content once, so the content is kept and stays valid: the change of another key must not
/// be refused because of it.
#[derive(Default)]
pub(crate) struct KeyFiles {
    pipes: Mutex<BTreeMap<PathBuf, Vec<u8>>>,
}

impl KeyFiles {
    /// Reads a file at the start. Two pools may name one pipe.
    pub(crate) fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        if let Some(content) = self.of_pipe(path) {
            return Ok(content);
        }
        let is_pipe = files::is_read_once(path);
        let bytes = files::read(path)?;
        if is_pipe {
            let mut pipes = self.pipes.lock().unwrap_or_else(PoisonError::into_inner);
            pipes.insert(path.into(), bytes.clone());
        }
        Ok(bytes)
    }

    /// As [`read`](Self::read). Warns if every user of this host may read the file.
    pub(crate) fn read_secret(&self, path: &Path) -> io::Result<Vec<u8>> {
        let bytes = self.read(path)?;
        secrets::warn_if_open(path);
        Ok(bytes)
    }

    /// Reads a file while the process runs.
    pub(crate) fn reread(&self, path: &Path) -> io::Result<Vec<u8>> {
        let of_pipe = self.of_pipe(path).map(Ok);
        of_pipe.unwrap_or_else(|| files::reread(path, files::BYTES_MAX))
    }

    fn of_pipe(&self, path: &Path) -> Option<Vec<u8>> {
        let pipes = self.pipes.lock().unwrap_or_else(PoisonError::into_inner);
        pipes.get(path).cloned()
    }
}

/// TLS of a pool.
pub(crate) fn read_tls(
    tls: &EngineTls,
    read: impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> anyhow::Result<ClientTls> {
    let files = ClientFiles {
        ca: tls.ca_file.clone(),
        client: tls.client.clone(),
        server_name: tls.server_name.clone(),
    };
    ClientTls::load_by(&files, read)
        .context("TLS towards engines (`ca_file`, `cert_file`, `key_file`)")
}

/// The key in a file: one line, without the white space around it, or a byte order mark.
pub(crate) fn read_key(
    path: &Path,
    read: impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> anyhow::Result<String> {
    let text = read(path).and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
    let text = text.with_context(|| {
        format!(
            "reading a key (`api_key_file` or `admin_key_file`) from {}",
            path.display()
        )
    })?;
    let key = text.trim_start_matches('\u{feff}').trim();
    anyhow::ensure!(
        !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()),
        "{} has no key: write one line of printable ASCII without spaces",
        path.display()
    );
    Ok(key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_from_a_pipe_is_kept_and_one_from_a_file_is_read_again() {
        use std::io::Write;
        let (read_end, mut write_end) = io::pipe().unwrap();
        write_end.write_all(b"of-pipe").unwrap();
        drop(write_end);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&read_end);
        let pipe = PathBuf::from(format!("/proc/self/fd/{fd}"));
        let keys = KeyFiles::default();
        for _ in 0..2 {
            assert_eq!(keys.read(&pipe).unwrap(), b"of-pipe");
            assert_eq!(keys.reread(&pipe).unwrap(), b"of-pipe");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "first").unwrap();
        assert_eq!(keys.read(&file).unwrap(), b"first");
        std::fs::write(&file, "second").unwrap();
        assert_eq!(keys.reread(&file).unwrap(), b"second");
    }

    #[test]
    fn a_key_is_one_line_however_an_editor_saved_it() {
        let read = |text: &str| {
            let bytes = text.as_bytes().to_vec();
            read_key(Path::new("key"), |_| Ok(bytes.clone()))
        };
        for text in ["k-1", "k-1\n", "\u{feff}k-1\r\n", "  k-1\t"] {
            assert_eq!(read(text).unwrap(), "k-1", "{text:?}");
        }
        for text in ["", "\n", "\u{feff}", "k 1", "k\n1", "k-\u{e9}"] {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(error.contains("key has no key"), "{text:?}: {error}");
        }
    }
}
