//! TLS. [`Tls`] is mutual TLS between worker processes and shards: each side proves that it belongs to the cluster
//! by a certificate of the cluster's own authority.
//!
//! Frontends' certificates name [`SERVER_NAME`], not hosts: workers connect to addresses from
//! discovery, and the signing authority is decisive. [`ClientTls`] connects to servers of others.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use slipstream_os::files;
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::link::Socket;

/// The DNS name that a frontend's certificate must carry.
pub const SERVER_NAME: &str = "slipstream";

/// Paths of a process's certificate, its key, and the trusted authority, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The process's certificate, and the intermediate ones.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority's certificate; peers must be signed by it.
    pub ca: PathBuf,
}

/// Both ends of TLS. Cheap to clone.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
    connector: TlsConnector,
}

/// Why TLS cannot be used. An error in the files; a retry does not help.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file that cannot be read, or has other contents.
    #[error("{}: {source}; give a PEM file with {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Its expected contents.
        what: &'static str,
        /// The error.
        source: PemError,
    },
    /// Files that do not belong together.
    #[error("certificate, key and authority do not fit together: {0}")]
    Mismatch(String),
    /// The host has no authorities.
    #[error(
        "no certificate authorities were found on this host ({0}); install them (package `ca-certificates`), or name a file of them"
    )]
    NoRoots(String),
}

impl Tls {
    /// Reads the files, for a process that starts ([`files::read`]).
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(files: &TlsFiles) -> Result<Tls, TlsError> {
        let read = files::read;
        let chain = certificates(&files.cert, "the certificate of this process", read)?;
        let read_key = || private_key(&files.key, "the private key of this process", read);
        let mut roots = RootCertStore::empty();
        let what = "the certificate of the cluster's authority";
        for ca in certificates(&files.ca, what, read)? {
            roots.add(ca).map_err(mismatch)?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(mismatch)?;
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(mismatch)?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), read_key()?)
            .map_err(mismatch)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(mismatch)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, read_key()?)
            .map_err(mismatch)?;
        Ok(Tls {
            acceptor: TlsAcceptor::from(Arc::new(server)),
            connector: TlsConnector::from(Arc::new(client)),
        })
    }

    /// A shard's end.
    ///
    /// # Errors
    /// If the peer cannot prove its identity, or the connection fails.
    pub async fn accept(&self, stream: TcpStream) -> std::io::Result<Box<dyn Socket>> {
        Ok(Box::new(self.acceptor.accept(stream).await?))
    }

    /// A worker process's end.
    ///
    /// # Errors
    /// If the peer cannot prove its identity, or the connection fails.
    pub async fn connect(&self, stream: TcpStream) -> std::io::Result<Box<dyn Socket>> {
        let name = ServerName::try_from(SERVER_NAME).expect("a constant name");
        Ok(Box::new(self.connector.connect(name, stream).await?))
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// Paths, as PEM, and names for TLS towards servers of others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// Authorities to trust; `None`: those of the host.
    pub ca: Option<PathBuf>,
    /// The process's certificate with the intermediate ones, and its key.
    pub client: Option<(PathBuf, PathBuf)>,
    /// Name that a server must prove, instead of the host that is connected to.
    pub server_name: Option<String>,
}

/// TLS 1.2 and 1.3 towards servers of others, for HTTP/1.1: their certificates are always verified. Cheap to clone.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    server_name: Option<ServerName<'static>>,
}

impl std::fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ClientTls({:?})", self.server_name)
    }
}

impl ClientTls {
    /// Reads the files, for a process that starts ([`files::read`]).
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load(files: &ClientFiles) -> Result<ClientTls, TlsError> {
        ClientTls::load_by(files, files::read)
    }

    /// As [`load`](Self::load), by means of `read`: a process that runs must not wait for a file ([`files::reread`]).
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load_by(
        files: &ClientFiles,
        read: impl Fn(&Path) -> std::io::Result<Vec<u8>>,
    ) -> Result<ClientTls, TlsError> {
        let mut roots = RootCertStore::empty();
        if let Some(path) = &files.ca {
            let what = "the certificates of the authorities to trust";
            for ca in certificates(path, what, &read)? {
                roots.add(ca).map_err(mismatch)?;
            }
        } else {
            // Hosts have expired or odd certificates among theirs; one that verifies is enough.
            let found = within(HOST_STORE_WAIT, rustls_native_certs::load_native_certs)
                .ok_or_else(|| TlsError::NoRoots("reading them takes too long".into()))?;
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                let why = found.errors.first().map(ToString::to_string);
                return Err(TlsError::NoRoots(why.unwrap_or_default()));
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(mismatch)?
            .with_root_certificates(roots);
        let mut config = match &files.client {
            None => config.with_no_client_auth(),
            Some((cert, key)) => {
                let chain = certificates(cert, "the client's certificate", &read)?;
                let what = "the private key of the client's certificate";
                let secret = private_key(key, what, &read)?;
                config
                    .with_client_auth_cert(chain, secret)
                    .map_err(mismatch)?
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let server_name = files.server_name.clone();
        let server_name = server_name.map(ServerName::try_from).transpose();
        Ok(ClientTls {
            config: Arc::new(config),
            server_name: server_name.map_err(mismatch)?,
        })
    }

    /// For clients that connect by other means.
    pub fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }

    /// The name that a server must prove, if it is not the host that is connected to.
    pub fn server_name(&self) -> Option<&ServerName<'static>> {
        self.server_name.as_ref()
    }

    /// Encrypts `stream`, which is connected to `host`: a name, or an IP address without brackets.
    ///
    /// # Errors
    /// The server cannot prove that it is `host`, refuses this process, or the connection fails. The source of those
    /// by TLS is a [`rustls::Error`].
    pub async fn connect(
        &self,
        host: &str,
        stream: TcpStream,
    ) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(std::io::Error::other)?,
        };
        let connector = TlsConnector::from(self.config.clone());
        connector.connect(name, stream).await
    }
}

fn private_key(
    path: &Path,
    what: &'static str,
    read: impl Fn(&Path) -> std::io::Result<Vec<u8>>,
) -> Result<PrivateKeyDer<'static>, TlsError> {
    let pem = read(path).map_err(PemError::Io);
    let key = pem.and_then(|pem| PrivateKeyDer::from_pem_slice(&pem));
    key.map_err(file(path, what))
}

fn certificates(
    path: &Path,
    what: &'static str,
    read: impl Fn(&Path) -> std::io::Result<Vec<u8>>,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = || -> Result<Vec<_>, PemError> {
        let pem = read(path).map_err(PemError::Io)?;
        let found: Vec<_> = CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>()?;
        if found.is_empty() {
            return Err(PemError::NoItemsFound);
        }
        Ok(found)
    };
    read().map_err(file(path, what))
}

fn file(path: &Path, what: &'static str) -> impl FnOnce(PemError) -> TlsError {
    let path = path.to_owned();
    move |source| TlsError::File { path, what, source }
}

fn mismatch(error: impl std::fmt::Display) -> TlsError {
    TlsError::Mismatch(error.to_string())
}

/// Longest wait for the host's store of authorities.
const HOST_STORE_WAIT: Duration = Duration::from_secs(5);

/// Runs `load` on a thread of its own, so that a FIFO or a stalled file system in place of a file stops no reload. `None`: it
/// takes longer than `limit`. The thread stays behind.
fn within<T: Send + 'static>(
    limit: Duration,
    load: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, loaded) = std::sync::mpsc::sync_channel(1);
    let run = move || {
        let _ = done.send(load());
    };
    let thread = std::thread::Builder::new().name("host-ca".into());
    thread.spawn(run).ok()?;
    loaded.recv_timeout(limit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_store_that_stalls_is_left() {
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let stalled = within(Duration::from_millis(1), move || held.recv().is_err());
        assert_eq!(stalled, None);
        drop(hold);
    }

    /// A device that never ends, and a folder: no file is read without a limit.
    #[test]
    fn what_is_no_file_is_refused() {
        for path in ["/dev/zero", "/"] {
            let files = ClientFiles {
                ca: Some(path.into()),
                ..ClientFiles::default()
            };
            let error = ClientTls::load(&files).unwrap_err().to_string();
            assert!(error.contains("PEM file with the certificates"), "{error}");
        }
    }

    #[test]
    fn files_that_hold_nothing_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        let files = |cert: &Path| TlsFiles {
            cert: cert.to_owned(),
            key: empty.clone(),
            ca: empty.clone(),
        };
        let missing = dir.path().join("missing.pem");
        for path in [&empty, &missing] {
            let error = Tls::load(&files(path)).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
            assert!(error.contains("certificate of this process"), "{error}");
        }
    }
}
