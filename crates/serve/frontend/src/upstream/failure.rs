//! Failures of engines: why a request had no answer, or only a part of one.

use std::io;
use std::time::Duration;

use super::reported::Reported;
use crate::wire::WireError;

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

/// The failure of a connection that broke with `error`.
pub(super) fn lost(error: &io::Error) -> Failure {
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

/// The TLS error in `error`, if it is one.
pub(super) fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// The failure of a TLS connection, with its remedy.
pub(super) fn tls_failure(error: &rustls::Error) -> Failure {
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
