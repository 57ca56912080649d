//! API keys and certificates for connections to engines.

use std::io;
use std::path::Path;

use anyhow::Context;
use slipstream_config::cluster::EngineTls;
use slipstream_planes::tls::{ClientFiles, ClientTls};

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
