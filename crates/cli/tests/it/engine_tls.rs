//! `slipstream serve` in front of engines with TLS, with certificates made here, on loopback.

use std::fmt::Write as _;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use crate::engines::{Engine, PATIENCE, STREAM, front, stream_texts, text_of};
use crate::server::{FAST, Server, run};

/// An authority, and a folder for its certificate and those that it signs.
struct Authority {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

/// PEM files of a certificate and its key.
struct Identity {
    cert: PathBuf,
    key: PathBuf,
}

impl Authority {
    fn new() -> Authority {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let cert = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), cert.pem()).unwrap();
        let issuer = Issuer::new(params, key);
        Authority { dir, issuer }
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// A certificate for `name`; an expired one if not `valid`.
    fn sign(&self, name: &str, valid: bool) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        if !valid {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2020, 1, 2);
        }
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let path = |end: &str| self.dir.path().join(format!("{name}-{valid}.{end}"));
        let identity = Identity {
            cert: path("pem"),
            key: path("key"),
        };
        std::fs::write(&identity.cert, cert.pem()).unwrap();
        std::fs::write(&identity.key, key.serialize_pem()).unwrap();
        identity
    }
}

/// TLS in front of a server without it.
struct TlsFront {
    address: SocketAddr,
    accepted: Arc<AtomicUsize>,
    #[allow(dead_code)] // its tasks end with it
    runtime: tokio::runtime::Runtime,
}

impl TlsFront {
    /// `clients`: the authority of certificates that clients must have.
    fn start(inner: SocketAddr, identity: &Identity, clients: Option<&Path>) -> TlsFront {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let config = match clients {
            None => config.with_no_client_auth(),
            Some(ca) => {
                let mut roots = RootCertStore::empty();
                roots
                    .add(CertificateDer::from_pem_file(ca).unwrap())
                    .unwrap();
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                config.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let chain = vec![CertificateDer::from_pem_file(&identity.cert).unwrap()];
        let key = PrivateKeyDer::from_pem_file(&identity.key).unwrap();
        let config = Arc::new(config.with_single_cert(chain, key).unwrap());
        let acceptor = tokio_rustls::TlsAcceptor::from(config);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = listener.unwrap();
        let address = listener.local_addr().unwrap();
        let accepted = Arc::new(AtomicUsize::new(0));
        let counted = accepted.clone();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counted.fetch_add(1, Relaxed);
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let mut outer = acceptor.accept(stream).await.ok()?;
                    let mut inner = tokio::net::TcpStream::connect(inner).await.ok()?;
                    tokio::io::copy_bidirectional(&mut outer, &mut inner)
                        .await
                        .ok()
                });
            }
        });
        TlsFront {
            address,
            accepted,
            runtime,
        }
    }
}

/// A router in front of `engines`, with these keys in their pool.
fn router(urls: &[String], keys: &[(&str, &Path)], more: &str) -> (Server, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let mut written = String::new();
    for (key, path) in keys {
        writeln!(written, "{key} = {:?}", path.display().to_string()).unwrap();
    }
    let path = dir.path().join("cluster.toml");
    let text = format!(
        "[pool.gpu]\nengines = {urls:?}\n{written}{more}\n[live]\nshards = 1\n[upstream]\nconnect_timeout_s = 10\n"
    );
    std::fs::write(&path, text).unwrap();
    let server = Server::start(&[&[path.to_str().unwrap()]]);
    (server, dir)
}

fn engines_of(server: &Server) -> serde_json::Value {
    server.get("/health").json()["engines"].clone()
}

#[test]
fn streams_pass_through_tls_on_connections_that_are_kept() {
    let authority = Authority::new();
    let identity = authority.sign("127.0.0.1", true);
    let client = authority.sign("router", true);
    let inner = Server::start(&[FAST]);
    let tls = TlsFront::start(inner.address(), &identity, Some(&authority.ca()));
    let keys = [
        ("ca_file", authority.ca()),
        ("cert_file", client.cert),
        ("key_file", client.key),
    ];
    let keys: Vec<(&str, &Path)> = keys.iter().map(|(key, path)| (*key, &**path)).collect();
    let url = format!("https://{}", tls.address);
    let (server, _dir) = router(std::slice::from_ref(&url), &keys, "");
    let engines = engines_of(&server);
    assert_eq!(engines[0]["state"], "up", "{engines}");
    assert_eq!(engines[0]["url"], url.as_str());

    // Longer than a record of TLS, and than any buffer on the way.
    let body = format!(
        r#"{{"model":"test-model","prompt":"{}","max_tokens":2000,"stream":true,"ignore_eos":true,"seed":7}}"#,
        "word ".repeat(200)
    );
    let direct = inner.post("/v1/completions", &body);
    let before = inner.metric("slipstream_http_requests_total");
    for _ in 0..5 {
        let got = server.post("/v1/completions", &body);
        assert_eq!(got.status, 200, "{}", got.text());
        let texts = |answer: &crate::server::Answer| {
            let text = answer.text();
            let events = text.split_terminator("\n\n");
            let events = events.map(|event| event.trim_start_matches("data: ").to_owned());
            text_of(&events.collect::<Vec<_>>())
        };
        assert!(!texts(&got).is_empty());
        assert_eq!(texts(&got), texts(&direct));
    }
    // Each health check takes a connection of its own; five requests share one.
    let checks = server.metric("slipstream_engine_health_checks_total");
    let accepted = tls.accepted.load(Relaxed) as f64;
    assert!(
        before > 0.0 && accepted <= checks + 2.0,
        "{accepted} accepted, {checks} checks"
    );
}

#[test]
fn an_engine_that_does_not_prove_itself_gets_no_byte_of_a_request() {
    let authority = Authority::new();
    let other = Authority::new();
    let good = authority.sign("127.0.0.1", true);
    let cases = [
        (
            authority.sign("engine.example", true),
            None,
            "certificate_name",
        ),
        (
            authority.sign("127.0.0.1", false),
            None,
            "certificate_expired",
        ),
        (other.sign("127.0.0.1", true), None, "certificate_untrusted"),
        (good, Some(authority.ca()), "client_certificate"),
    ];
    for (identity, clients, cause) in &cases {
        let engine = Engine::start(|_, stream| stream_texts(stream, "a", &["secret"]));
        let tls = TlsFront::start(engine.address, identity, clients.as_deref());
        let url = format!("https://{}", tls.address);
        let (server, _dir) = router(
            std::slice::from_ref(&url),
            &[("ca_file", &authority.ca())],
            "",
        );
        let engines = engines_of(&server);
        assert_eq!(engines[0]["state"], "down", "{cause}: {engines}");
        assert_eq!(engines[0]["last_failure_cause"], *cause, "{engines}");
        let said = engines[0]["last_failure"].as_str().unwrap();
        assert!(said.starts_with("TLS: "), "{said}");
        let got = server.post("/v1/completions", STREAM);
        assert_eq!(got.status, 503, "{}", got.text());
        assert!(engine.seen().is_empty(), "{cause}");
        let counted = format!("slipstream_engine_failures_total{{engine=\"{url}\",cause=\"tls\"}}");
        assert!(server.metric(&counted) > 0.0);
    }
    // The right name, for an engine that is reached by its address.
    let named = authority.sign("engine.example", true);
    let engine = Engine::start(|_, stream| stream_texts(stream, "a", &["there"]));
    let tls = TlsFront::start(engine.address, &named, None);
    let (server, _dir) = router(
        &[format!("https://{}", tls.address)],
        &[("ca_file", &authority.ca())],
        "server_name = \"engine.example\"",
    );
    let got = server.post("/v1/completions", STREAM);
    assert!(got.text().contains("there"), "{}", got.text());
}

#[test]
fn an_engine_without_tls_is_not_asked_in_plain_text() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (send, first_bytes) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(3) {
            let mut stream = stream.unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut byte = [0];
            let _ = stream.read(&mut byte);
            let _ = std::io::Write::write_all(&mut stream, b"HTTP/1.1 200 OK\r\n\r\n");
            let _ = send.send(byte[0]);
        }
    });
    let authority = Authority::new();
    let url = format!("https://{address}");
    let (server, _dir) = router(&[url], &[("ca_file", &authority.ca())], "");
    let first = first_bytes.recv_timeout(PATIENCE).unwrap();
    assert_eq!(first, 22, "a handshake record (RFC 8446, section 5.1)");
    let engines = engines_of(&server);
    assert_eq!(engines[0]["last_failure_cause"], "tls", "{engines}");
    let said = engines[0]["last_failure"].as_str().unwrap();
    assert!(said.contains("write http://"), "{said}");
}

#[test]
fn a_handshake_that_does_not_end_is_cut_off() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap(); // the kernel accepts
    let silent_url = format!("https://{}", silent.local_addr().unwrap());
    let engine = Engine::start(|_, stream| stream_texts(stream, "a", &["there"]));
    let flags = [
        format!("--engine={silent_url}"),
        "--set=upstream.connect_timeout_s=0.05".to_owned(),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = front(&[&engine], &flags);
    for _ in 0..4 {
        let got = server.post("/v1/completions", STREAM);
        assert!(got.text().contains("there"), "{}", got.text());
    }
    let engines = engines_of(&server);
    let engines = engines.as_array().unwrap();
    let slow = engines.iter().find(|of| of["url"] == silent_url.as_str());
    let slow = slow.unwrap();
    assert_eq!(slow["state"], "down", "{slow}");
    let said = slow["last_failure"].as_str().unwrap();
    assert!(said.contains("cannot connect within"), "{said}");
}

#[test]
fn describe_verifies_certificates() {
    let authority = Authority::new();
    let inner = Server::start(&[FAST]);
    let identity = authority.sign("127.0.0.1", true);
    let tls = TlsFront::start(inner.address(), &identity, None);
    let url = format!("https://{}", tls.address);
    let ca = format!("--ca-file={}", authority.ca().display());
    let (code, text, errors) = run(&["describe", &url, &ca]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(text.contains("test-model"), "{text}");
    // Of an authority that no host has.
    let (code, _, errors) = run(&["describe", &url]);
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("TLS: invalid peer certificate"), "{errors}");
    let plain = format!("http://{}", inner.address());
    let (code, _, errors) = run(&["describe", &plain, &ca]);
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("is not https://"), "{errors}");
}
