//! Addresses of servers, and how a process proves itself to them.
//!
//! ```text
//!   SCHEME://HOST[:PORT][,HOST[:PORT]…][/PATH][?NAME=VALUE[&NAME=VALUE…]]
//! ```
//!
//! Secrets are in files that the address names: addresses stand in command lines, which every user of a host can read.

use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, ClientConnection, RootCertStore};

/// Largest file with a password, bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Longest password, bytes.
const PASSWORD_BYTES_MAX: usize = 4_096;

/// How servers are connected to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Connections are encrypted, and certificates of servers are verified.
    pub tls: bool,
    /// PEM file of the authorities that sign the servers' certificates; `None`: those of the host.
    pub ca_file: Option<PathBuf>,
    /// PEM files of this process's certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
    /// User, and the file with the password. Needs TLS.
    pub user: Option<(String, PathBuf)>,
}

/// An address in parts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Address<'a> {
    pub(crate) servers: Vec<String>,
    pub(crate) path: &'a str,
    pub(crate) access: Access,
}

impl<'a> Address<'a> {
    /// Reads the part of an address that follows `SCHEME://`.
    ///
    /// # Errors
    /// The fault, as the end of a sentence.
    pub(crate) fn parse(
        rest: &'a str,
        port: u16,
        tls: bool,
        secure: &str,
    ) -> Result<Address<'a>, String> {
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (servers, path) = rest.split_once('/').unwrap_or((rest, ""));
        let servers: Result<Vec<String>, String> =
            servers.split(',').map(|text| server(text, port)).collect();
        Ok(Address {
            servers: servers?,
            path: path.trim_matches('/'),
            access: access(parameters, tls, secure)?,
        })
    }
}

fn server(text: &str, port: u16) -> Result<String, String> {
    if text.contains('@') {
        return Err("has a user or a password among its servers; name them by `?user=NAME&password_file=FILE`".into());
    }
    let (host, port) = match text.rsplit_once(':') {
        // `[::1]` has colons of its own.
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()),
        _ => (text, Some(port)),
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]".contains(&byte);
    match port {
        Some(port) if port > 0 && !host.is_empty() && host.bytes().all(plain) => {
            Ok(format!("{host}:{port}"))
        }
        _ => Err(format!(
            "has the server `{text}`; write HOST:PORT, separated by commas"
        )),
    }
}

fn access(parameters: &str, tls: bool, secure: &str) -> Result<Access, String> {
    let names = ["ca_file", "cert_file", "key_file", "user", "password_file"];
    let mut values = [const { None }; 5];
    for parameter in parameters.split('&').filter(|text| !text.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let Some(at) = names.iter().position(|known| *known == name) else {
            let known = names.map(|name| format!("`{name}`")).join(", ");
            return Err(format!("has the parameter `{name}`; there is {known}"));
        };
        if value.is_empty() || values[at].is_some() {
            return Err(format!("needs one value of `{name}`"));
        }
        values[at] = Some(value);
    }
    if !tls && let Some(at) = values.iter().position(Option::is_some) {
        // A password would be sent in the clear.
        return Err(format!(
            "has `{}`, which needs TLS; write {secure}",
            names[at]
        ));
    }
    let [ca_file, cert_file, key_file, user, password_file] = values;
    let both = |first: Option<&str>, second: Option<&str>, names: &str| match (first, second) {
        (Some(first), Some(second)) => Ok(Some((first.to_owned(), PathBuf::from(second)))),
        (None, None) => Ok(None),
        _ => Err(format!("needs both of {names}, or none")),
    };
    let client = both(cert_file, key_file, "`cert_file` and `key_file`")?;
    Ok(Access {
        tls,
        ca_file: ca_file.map(PathBuf::from),
        client: client.map(|(cert, key)| (cert.into(), key)),
        user: both(user, password_file, "`user` and `password_file`")?,
    })
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

impl Access {
    /// Reads the certificates; `None`: without TLS.
    pub(crate) fn tls(&self) -> io::Result<Option<Arc<ClientConfig>>> {
        if !self.tls {
            return Ok(None);
        }
        let mut roots = RootCertStore::empty();
        if let Some(path) = &self.ca_file {
            for ca in certificates(path)? {
                roots
                    .add(ca)
                    .map_err(|error| invalid(format!("{}: {error}", path.display())))?;
            }
        } else {
            // Hosts have expired or odd certificates among theirs; one that verifies is enough.
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                let text =
                    "this host has no certificate authorities; name a file of them as `ca_file`";
                return Err(invalid(text.into()));
            }
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots);
        let config = match &self.client {
            None => config.with_no_client_auth(),
            Some((cert, key)) => {
                let unread = |error| {
                    invalid(format!(
                        "{}: {error}; give a PEM file with the key",
                        key.display()
                    ))
                };
                let secret = PrivateKeyDer::from_pem_file(key).map_err(unread)?;
                let joined = config.with_client_auth_cert(certificates(cert)?, secret);
                joined.map_err(|error| {
                    invalid(format!("{} and {}: {error}", cert.display(), key.display()))
                })?
            }
        };
        Ok(Some(Arc::new(config)))
    }

    /// User and password, if there are any. The file is read each time, so that it may be replaced.
    pub(crate) fn user(&self) -> io::Result<Option<(&str, String)>> {
        let Some((user, path)) = &self.user else {
            return Ok(None);
        };
        let password = slipstream_os::files::reread_text(path, FILE_BYTES_MAX)
            .map_err(|error| invalid(format!("{}: {error}", path.display())))?;
        let password = password.trim_end_matches(['\n', '\r']);
        if password.is_empty() || password.len() > PASSWORD_BYTES_MAX {
            return Err(invalid(format!(
                "{} holds no password of 1 to {PASSWORD_BYTES_MAX} bytes",
                path.display()
            )));
        }
        Ok(Some((user, password.to_owned())))
    }
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let unread = |error: rustls::pki_types::pem::Error| {
        invalid(format!(
            "{}: {error}; give a PEM file with certificates",
            path.display()
        ))
    };
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .map_err(unread)?
        .collect();
    let found = found.map_err(unread)?;
    if found.is_empty() {
        return Err(unread(rustls::pki_types::pem::Error::NoItemsFound));
    }
    Ok(found)
}

/// A connection that may be encrypted.
#[derive(Debug)]
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<rustls::StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    /// Encrypts `socket`, which is connected to `server` (`HOST:PORT`), unless there is no `tls`.
    pub(crate) fn new(
        mut socket: TcpStream,
        server: &str,
        tls: Option<&Arc<ClientConfig>>,
        end: Instant,
    ) -> io::Result<Stream> {
        let Some(config) = tls else {
            return Ok(Stream::Plain(socket));
        };
        let host = server.rsplit_once(':').map_or(server, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let mut tls =
            ClientConnection::new(config.clone(), name).map_err(|error| explained(&error))?;
        while tls.is_handshaking() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            socket.set_read_timeout(Some(left))?;
            socket.set_write_timeout(Some(left))?;
            if tls.wants_write() {
                tls.write_tls(&mut socket)?;
            } else if tls.read_tls(&mut socket)? == 0 {
                let text = "TLS: it closed the connection; it may not speak TLS";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
            } else if let Err(error) = tls.process_new_packets() {
                let _ = tls.write_tls(&mut socket); // the reason, for the server's log
                return Err(explained(&error));
            }
        }
        Ok(Stream::Tls(Box::new(rustls::StreamOwned::new(tls, socket))))
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Tls(stream) => stream.get_ref(),
        }
    }
}

impl io::Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(into),
            Stream::Tls(stream) => stream.read(into).map_err(|error| {
                // In TLS 1.3 a server refuses a certificate after the handshake.
                let tls = error.get_ref().and_then(|source| source.downcast_ref());
                tls.map(explained).unwrap_or(error)
            }),
        }
    }
}

impl io::Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            Stream::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(socket) => socket.flush(),
            Stream::Tls(stream) => stream.flush(),
        }
    }
}

/// An error of TLS with its remedy.
fn explained(error: &rustls::Error) -> io::Error {
    use rustls::Error::{AlertReceived, InvalidCertificate, InvalidMessage};
    let remedy = match error {
        InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "; name the server as its certificate does",
        InvalidCertificate(_) => "; name its authority as `ca_file`, and compare the clocks",
        AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::HandshakeFailure,
        ) => "; it wants another certificate of this process: `cert_file` and `key_file`",
        InvalidMessage(_) => "; it may not speak TLS",
        _ => "",
    };
    io::Error::other(format!("TLS: {error}{remedy}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An authority, whose certificate is `NAME.pem` in `files`.
    pub(crate) fn authority(files: &Path, name: &str) -> rcgen::Issuer<'static, rcgen::KeyPair> {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let cert = params.self_signed(&key).unwrap();
        std::fs::write(files.join(format!("{name}.pem")), cert.pem()).unwrap();
        rcgen::Issuer::new(params, key)
    }

    /// `ca.pem`, and certificates for 127.0.0.1 with their keys: `server` and `client`. etcd's gateway shows that of
    /// the server to the server itself.
    pub(crate) fn identities(files: &Path) {
        use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let issuer = authority(files, "ca");
        for name in ["server", "client"] {
            let key = rcgen::KeyPair::generate().unwrap();
            let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
            params.extended_key_usages = vec![ServerAuth, ClientAuth];
            // With one, a gateway of etcd that has users refuses the client.
            params.distinguished_name = rcgen::DistinguishedName::new();
            let cert = params.signed_by(&key, &issuer).unwrap();
            std::fs::write(files.join(format!("{name}.pem")), cert.pem()).unwrap();
            std::fs::write(files.join(format!("{name}.key")), key.serialize_pem()).unwrap();
        }
    }

    #[test]
    fn addresses_name_files_and_no_secrets() {
        let parse = |text| Address::parse(text, 7, true, "x://");
        let found =
            parse("a,[::1]:9/b/c?user=u&password_file=/p/w&ca_file=ca&cert_file=c&key_file=k");
        let expected = Access {
            tls: true,
            ca_file: Some("ca".into()),
            client: Some(("c".into(), "k".into())),
            user: Some(("u".into(), "/p/w".into())),
        };
        let found = found.unwrap();
        assert_eq!(found.servers, ["a:7", "[::1]:9"]);
        assert_eq!((found.path, found.access), ("b/c", expected));
        for (text, part) in [
            ("a?password=x", "has the parameter `password`"),
            ("a?user", "one value of `user`"),
            ("a?user=u", "both of `user` and `password_file`"),
            ("a?cert_file=u", "both of `cert_file` and `key_file`"),
            ("a?ca_file=u&ca_file=v", "one value of `ca_file`"),
            ("u:p@a", "password_file"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        let clear = Address::parse("a?user=u&password_file=p", 7, false, "x://").unwrap_err();
        assert!(clear.contains("needs TLS; write x://"), "{clear}");
    }

    #[test]
    fn files_that_hold_nothing_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty");
        std::fs::write(&empty, "\n").unwrap();
        let missing = dir.path().join("missing");
        for path in [&empty, &missing] {
            let access = Access {
                tls: true,
                ca_file: Some(path.clone()),
                user: Some(("u".into(), path.clone())),
                ..Access::default()
            };
            for error in [access.tls().unwrap_err(), access.user().unwrap_err()] {
                assert!(
                    error.to_string().contains(path.to_str().unwrap()),
                    "{error}"
                );
            }
        }
    }
}
