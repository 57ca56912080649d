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

/// The key in a file: one line, without the white space around it.
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
    let key = text.trim();
    anyhow::ensure!(
        !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()),
        "{} has no key: write one line of printable ASCII without spaces",
        path.display()
    );
    Ok(key.to_owned())
}
