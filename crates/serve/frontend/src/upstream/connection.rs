//! A connection to an engine.

use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use hyper::Method;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::ends::Reported;
use super::engines::Engine;
use super::wire::{self, ResponseHead, WireError};

/// Why an engine did not answer a request, or only in part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// No process listens there, or its name has no address.
    #[error("cannot connect: {0}")]
    Refused(String),
    #[error("cannot connect within {0:?}")]
    ConnectTimeout(Duration),
    /// It did not prove that it is the engine, or does not accept the router. The request was not sent, or not read.
    #[error("TLS: {text}")]
    Tls { fault: TlsFault, text: String },
    /// The connection broke.
    #[error("connection lost: {0}")]
    Lost(String),
    #[error("no byte of an answer within {0:?}")]
    FirstByteTimeout(Duration),
    #[error("nothing for {0:?} in mid-answer")]
    Stalled(Duration),
    #[error("{0}")]
    Protocol(WireError),
    #[error("it answered {0}")]
    Status(u16),
    /// An error within an answer of status 200.
    #[error("it reported an error within its answer: {}", .0.text)]
    Reported(Reported),
    /// A stream that ended cleanly before its end.
    #[error("{0}")]
    Incomplete(&'static str),
    /// It is not the engine's fault.
    #[error("it left the fleet")]
    Removed,
    /// Nor is this: it sent what the router requested.
    #[error("an event that must be read is longer than 1 MiB")]
    LongEvent,
    /// Health checks found it down, and it sent nothing since.
    #[error("it stopped answering requests and health checks")]
    Hung,
    /// Of a health check.
    #[error("health check: {0}")]
    Health(String),
}

impl Failure {
    /// Its kind as a word.
    pub(super) fn cause(&self) -> &'static str {
        match self {
            Failure::Refused(_) => "refused",
            Failure::ConnectTimeout(_) => "connect_timeout",
            Failure::Tls { fault, .. } => fault.name(),
            Failure::Lost(_) => "lost",
            Failure::FirstByteTimeout(_) | Failure::Stalled(_) => "timeout",
            Failure::Protocol(_) => "protocol",
            Failure::Status(_) => "status",
            Failure::Reported(_) => "reported",
            Failure::Incomplete(_) => "incomplete",
            Failure::Removed => "removed",
            Failure::LongEvent => "long_event",
            Failure::Hung | Failure::Health(_) => "health",
        }
    }

    /// No request can reach it until its operator or the router's changes something.
    pub(super) fn is_tls(&self) -> bool {
        matches!(self, Failure::Tls { .. })
    }

    /// The request did not reach a process.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Failure::Refused(_))
    }

    /// No byte of the request was sent: there was no connection.
    pub(super) fn is_before_request(&self) -> bool {
        matches!(
            self,
            Failure::Refused(_) | Failure::ConnectTimeout(_) | Failure::Tls { .. }
        )
    }

    pub(super) fn is_health(&self) -> bool {
        matches!(self, Failure::Health(_) | Failure::Hung)
    }
}

fn lost(error: &io::Error) -> Failure {
    // In TLS 1.3 a server refuses its client's certificate after the client has begun to send.
    match tls_error(error) {
        Some(tls @ rustls::Error::AlertReceived(_)) => tls_failure(tls),
        _ => Failure::Lost(error.to_string()),
    }
}

/// A TLS error between the router and an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TlsFault {
    /// The engine's certificate is for other names.
    CertificateName,
    /// It has expired, or is not valid yet.
    CertificateExpired,
    /// No trusted authority signed it, or it is otherwise bad.
    CertificateUntrusted,
    /// The engine wants a certificate of the router, or another one.
    ClientCertificate,
    /// The engine does not speak TLS, or no version in common.
    Protocol,
}

impl TlsFault {
    pub(super) fn name(self) -> &'static str {
        match self {
            TlsFault::CertificateName => "certificate_name",
            TlsFault::CertificateExpired => "certificate_expired",
            TlsFault::CertificateUntrusted => "certificate_untrusted",
            TlsFault::ClientCertificate => "client_certificate",
            TlsFault::Protocol => "tls",
        }
    }

    fn of(error: &rustls::Error) -> TlsFault {
        use rustls::{AlertDescription as Alert, CertificateError as Bad, Error};
        match error {
            Error::InvalidCertificate(bad) => match bad {
                Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                    TlsFault::CertificateName
                }
                Bad::Expired
                | Bad::ExpiredContext { .. }
                | Bad::NotValidYet
                | Bad::NotValidYetContext { .. } => TlsFault::CertificateExpired,
                _ => TlsFault::CertificateUntrusted,
            },
            Error::AlertReceived(
                Alert::CertificateRequired
                | Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnknownCA
                | Alert::AccessDenied
                // Answer of TLS 1.2 servers to a client without a certificate.
                | Alert::HandshakeFailure,
            ) => TlsFault::ClientCertificate,
            _ => TlsFault::Protocol,
        }
    }
}

fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

fn tls_failure(error: &rustls::Error) -> Failure {
    let fault = TlsFault::of(error);
    let remedy = match (fault, error) {
        (TlsFault::CertificateName, _) => {
            "; use a host name of its certificate in the URL, or `server_name` of its pool"
        }
        (TlsFault::CertificateExpired, _) => "; renew its certificate, or check the clocks",
        (TlsFault::CertificateUntrusted, _) => "; name its authority in `ca_file` of its pool",
        (TlsFault::ClientCertificate, _) => {
            "; it may want a client certificate: `cert_file` and `key_file` of its pool"
        }
        (_, rustls::Error::InvalidMessage(_)) => {
            "; it may not speak TLS: write http:// if that is meant"
        }
        _ => "",
    };
    Failure::Tls {
        fault,
        text: format!("{error}{remedy}"),
    }
}

/// Bytes to and from an engine.
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    fn tcp(&self) -> &TcpStream {
        match self {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => stream.get_ref().0,
        }
    }
}

/// The first read of a connection takes this much; a read that fills its room doubles it.
const ROOM_MIN: usize = 2 << 10;
const ROOM_MAX: usize = 64 << 10;

pub(super) struct Connection {
    stream: Stream,
    /// [`Engine::id`].
    pub(super) engine_id: u64,
    /// Read, but not taken yet.
    pub(super) buf: BytesMut,
    room: usize,
    pub(super) idle_since_ns: u64,
}

async fn connect(host: &str, port: u16) -> Result<TcpStream, Failure> {
    let stream = match host.parse::<IpAddr>() {
        Ok(ip) => TcpStream::connect((ip, port)).await,
        Err(_) => TcpStream::connect((host, port)).await,
    };
    let stream = stream.map_err(|error| Failure::Refused(error.to_string()))?;
    stream.set_nodelay(true).map_err(|error| lost(&error))?;
    Ok(stream)
}

impl Connection {
    pub(super) async fn open(engine: &Engine, limit: Duration) -> Result<Connection, Failure> {
        let url = &engine.spec.url;
        let secured = async {
            let stream = connect(&url.host, url.port).await?;
            if !url.tls {
                return Ok(Stream::Plain(stream));
            }
            // Never without: an engine's URL says that it is encrypted.
            let Some(tls) = &engine.spec.tls else {
                return Err(Failure::Tls {
                    fault: TlsFault::Protocol,
                    text: "the pool has no TLS settings".into(),
                });
            };
            match tls.connect(&url.host, stream).await {
                Ok(stream) => Ok(Stream::Tls(Box::new(stream))),
                Err(error) => Err(match tls_error(&error) {
                    Some(error) => tls_failure(error),
                    None => Failure::Lost(format!("in the TLS handshake: {error}")),
                }),
            }
        };
        match tokio::time::timeout(limit, secured).await {
            Ok(stream) => Ok(Connection::new(engine, stream?)),
            Err(_) => Err(Failure::ConnectTimeout(limit)),
        }
    }

    /// A connection to the bootstrap server of `engine`, which has no TLS.
    pub(super) async fn open_bootstrap(
        engine: &Engine,
        limit: Duration,
    ) -> Result<Connection, Failure> {
        let (host, port) = (&engine.spec.url.host, engine.spec.kv_protocol.1);
        match tokio::time::timeout(limit, connect(host, port)).await {
            Ok(stream) => Ok(Connection::new(engine, Stream::Plain(stream?))),
            Err(_) => Err(Failure::ConnectTimeout(limit)),
        }
    }

    fn new(engine: &Engine, stream: Stream) -> Connection {
        Connection {
            stream,
            engine_id: engine.id,
            buf: BytesMut::new(),
            room: ROOM_MIN,
            idle_since_ns: 0,
        }
    }

    /// Whether the engine has neither closed an idle connection nor sent anything.
    pub(super) fn is_open(&self) -> bool {
        // The runtime would answer from what it saw last, and bytes that nothing asked for would be the next
        // answer.
        if let Stream::Tls(stream) = &self.stream
            && !stream.get_ref().1.wants_read()
        {
            return false; // decrypted bytes, or the peer's farewell
        }
        let outcome = socket2::SockRef::from(self.stream.tcp()).peek(&mut [MaybeUninit::uninit()]);
        matches!(outcome, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// The answer is complete. False if bytes follow it.
    pub(super) fn rest(&mut self, now_ns: u64) -> bool {
        self.idle_since_ns = now_ns;
        let clean = self.buf.is_empty();
        self.buf = BytesMut::new();
        self.room = ROOM_MIN;
        clean
    }

    /// Sends a request.
    pub(super) async fn send(&mut self, head: BytesMut, body: &[Bytes; 2]) -> Result<(), Failure> {
        let [first, second] = body;
        let mut message = head.chain(first.clone()).chain(second.clone());
        let sent = match &mut self.stream {
            Stream::Plain(stream) => stream.write_all_buf(&mut message).await,
            Stream::Tls(stream) => match stream.write_all_buf(&mut message).await {
                Ok(()) => stream.flush().await, // encrypted bytes may wait for the socket
                error => error,
            },
        };
        sent.map_err(|error| lost(&error))
    }

    /// Reads the head of the answer.
    pub(super) async fn read_head(&mut self, method: &Method) -> Result<ResponseHead, Failure> {
        loop {
            match wire::take_head(&mut self.buf, method) {
                Ok(Some(head)) => return Ok(head),
                Ok(None) => {}
                Err(error) => return Err(Failure::Protocol(error)),
            }
            match std::future::poll_fn(|cx| self.poll_fill(cx)).await {
                Ok(0) => return Err(Failure::Lost("closed before it answered".into())),
                Ok(_) => {}
                Err(error) => return Err(lost(&error)),
            }
        }
    }

    /// Reads available bytes. Ready with 0: the engine has closed the connection.
    pub(super) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.buf.capacity() - self.buf.len() < self.room / 2 {
            self.buf.reserve(self.room);
        }
        let room = self.buf.capacity() - self.buf.len();
        let read = match &mut self.stream {
            Stream::Plain(stream) => pin!(stream.read_buf(&mut self.buf)).poll(cx),
            Stream::Tls(stream) => pin!(stream.read_buf(&mut self.buf)).poll(cx),
        };
        if let Poll::Ready(Ok(bytes)) = read
            && bytes == room
        {
            self.room = (self.room * 2).min(ROOM_MAX);
        }
        read
    }
}
