//! A small HTTP client for an engine's information endpoints: one connection per request, a limit on
//! the body, one deadline over all.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Longest body read, bytes. vLLM's `/metrics` is some 100 KB per rank.
pub const BODY_BYTES_MAX: usize = 8 << 20;

/// An engine's address and what it takes to reach it. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    /// `http://host:port`, without a path.
    base: String,
    host: String,
    port: u16,
    authorization: Option<HeaderValue>,
    tls: Option<Arc<rustls::ClientConfig>>,
    /// Name that the server must prove, instead of `host`.
    server_name: Option<ServerName<'static>>,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the key.
        f.debug_struct("Client")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Body, at most [`BODY_BYTES_MAX`].
    pub body: Bytes,
}

/// A URL that is no engine's address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{url}` {why}; give an engine's address such as http://10.0.0.5:8000")]
pub struct UrlError {
    /// The URL as given.
    pub url: String,
    /// The fault.
    pub why: &'static str,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The connection could not be opened. The engine may still be starting.
    #[error("no connection to {to}: {why}")]
    Connect {
        /// Host and port.
        to: String,
        /// The cause.
        why: String,
    },
    /// The connection was opened, but no valid answer came.
    #[error("{path}: {why}")]
    Answer {
        /// Path of the request.
        path: String,
        /// The cause.
        why: String,
    },
    /// The body is longer than [`BODY_BYTES_MAX`].
    #[error("{path}: the body is longer than {BODY_BYTES_MAX} bytes")]
    TooLong {
        /// Path of the request.
        path: String,
    },
    /// Out of time.
    #[error("{path}: no answer within {:.1} s", within.as_secs_f64())]
    Timeout {
        /// Path of the request.
        path: String,
        /// The deadline.
        within: Duration,
    },
}

impl Client {
    /// A client for `url`: `http://HOST[:PORT]`, or `https://HOST[:PORT]` with `tls`. A path of `/v1`
    /// is dropped. `api_key` is sent as a bearer token.
    ///
    /// # Errors
    /// [`UrlError`].
    pub fn new(
        url: &str,
        api_key: Option<&str>,
        tls: Option<Arc<rustls::ClientConfig>>,
    ) -> Result<Client, UrlError> {
        let fail = |why| UrlError {
            url: url.to_owned(),
            why,
        };
        let uri: Uri = url.trim().parse().map_err(|_| fail("is not a URL"))?;
        let (tls, default_port) = match (uri.scheme_str(), tls) {
            (Some("http"), _) => (None, 80),
            (Some("https"), Some(tls)) => (Some(tls), 443),
            (Some("https"), None) => return Err(fail("needs TLS, which is not configured here")),
            (Some(_), _) => return Err(fail("is neither http:// nor https://")),
            (None, _) => return Err(fail("has no http:// or https://")),
        };
        if uri
            .authority()
            .is_some_and(|authority| authority.as_str().contains('@'))
        {
            return Err(fail("has a user name, which is not sent; use an API key"));
        }
        if !matches!(uri.path().trim_end_matches('/'), "" | "/v1") || uri.query().is_some() {
            return Err(fail("has a path, which is not used"));
        }
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .ok_or(fail("has no host"))?;
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let port = match authority.strip_prefix(host).unwrap_or_default() {
            "" => default_port,
            port => {
                let port = port.strip_prefix(':').and_then(|port| port.parse().ok());
                port.filter(|&port| port > 0)
                    .ok_or(fail("has an invalid port"))?
            }
        };
        let authorization = api_key
            .map(|key| HeaderValue::try_from(format!("Bearer {key}")))
            .transpose()
            .map_err(|_| fail("is given with an API key that cannot be sent in a header"))?
            .map(|mut value| {
                value.set_sensitive(true);
                value
            });
        let scheme = if tls.is_some() { "https" } else { "http" };
        Ok(Client {
            base: format!("{scheme}://{host}:{port}"),
            host: host.to_owned(),
            port,
            authorization,
            tls,
            server_name: None,
        })
    }

    /// The same client, to which a server must prove that it is `name`, whatever host the URL names.
    #[must_use]
    pub fn with_server_name(mut self, name: ServerName<'static>) -> Client {
        self.server_name = Some(name);
        self
    }

    /// Base URL: scheme, host and port.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Host, in brackets if it is an IPv6 address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// `GET path`, complete within `deadline`.
    ///
    /// # Errors
    /// [`FetchError`]. An answer with any status is no error.
    pub async fn get(&self, path: &str, deadline: Duration) -> Result<Answer, FetchError> {
        self.send(Method::GET, path, Bytes::new(), deadline).await
    }

    /// `POST path` with a JSON body, complete within `deadline`.
    ///
    /// # Errors
    /// As [`get`](Client::get).
    pub async fn post_json(
        &self,
        path: &str,
        body: impl Into<Bytes>,
        deadline: Duration,
    ) -> Result<Answer, FetchError> {
        self.send(Method::POST, path, body.into(), deadline).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        deadline: Duration,
    ) -> Result<Answer, FetchError> {
        let answer = tokio::time::timeout(deadline, self.exchange(method, path, body)).await;
        answer.unwrap_or_else(|_| {
            Err(FetchError::Timeout {
                path: path.to_owned(),
                within: deadline,
            })
        })
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Answer, FetchError> {
        let to = format!("{}:{}", self.host, self.port);
        let connect = |why: String| FetchError::Connect {
            to: to.clone(),
            why,
        };
        let name = self.host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((name, self.port)).await;
        let stream = stream.map_err(|error| connect(error.to_string()))?;
        let _ = stream.set_nodelay(true);
        let Some(tls) = &self.tls else {
            return self.over(stream, method, path, body).await;
        };
        let server = match &self.server_name {
            Some(name) => name.clone(),
            None => {
                ServerName::try_from(name.to_owned()).map_err(|error| connect(error.to_string()))?
            }
        };
        let stream = TlsConnector::from(Arc::clone(tls))
            .connect(server, stream)
            .await;
        let stream = stream.map_err(|error| connect(format!("TLS: {error}")))?;
        self.over(stream, method, path, body).await
    }

    async fn over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Answer, FetchError> {
        let fail = |why: String| FetchError::Answer {
            path: path.to_owned(),
            why,
        };
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| fail(error.to_string()))?;
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, format!("{}:{}", self.host, self.port))
            .header(
                USER_AGENT,
                concat!("slipstream/", env!("CARGO_PKG_VERSION")),
            )
            .header(ACCEPT, "*/*");
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.authorization {
            request = request.header(AUTHORIZATION, key);
        }
        let request = request
            .body(Full::new(body))
            .map_err(|error| fail(error.to_string()))?;
        let exchange = async {
            let answer = sender.send_request(request).await;
            let answer = answer.map_err(|error| fail(chain(&error)))?;
            let status = answer.status().as_u16();
            let body = Limited::new(answer.into_body(), BODY_BYTES_MAX)
                .collect()
                .await;
            let body = body.map_err(|error| {
                if error.downcast_ref::<LengthLimitError>().is_some() {
                    let path = path.to_owned();
                    return FetchError::TooLong { path };
                }
                fail(chain(error.as_ref()))
            })?;
            Ok(Answer {
                status,
                body: body.to_bytes(),
            })
        };
        // The connection does the I/O, in this task, so that nothing outlives a dropped future.
        tokio::pin!(exchange, connection);
        tokio::select! {
            biased;
            answer = &mut exchange => return answer,
            ended = &mut connection => {
                if let Err(error) = ended {
                    // The answer may have been complete before; if not, this is why.
                    return tokio::time::timeout(Duration::ZERO, exchange)
                        .await
                        .unwrap_or_else(|_| Err(fail(chain(&error))));
                }
            }
        }
        exchange.await
    }
}

/// An error with its causes.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked_and_shortened() {
        for (url, base) in [
            ("http://gpu1:8000", "http://gpu1:8000"),
            ("http://gpu1:8000/", "http://gpu1:8000"),
            ("http://gpu1:8000/v1", "http://gpu1:8000"),
            ("http://gpu1:8000/v1/", "http://gpu1:8000"),
            ("http://[::1]:9", "http://[::1]:9"),
            (" http://gpu1 ", "http://gpu1:80"),
        ] {
            assert_eq!(Client::new(url, None, None).unwrap().base(), base, "{url}");
        }
        for (url, part) in [
            ("gpu1:8000", "http"),
            ("https://gpu1", "TLS"),
            ("tcp://gpu1:1", "neither"),
            ("http://user:pass@gpu1", "user name"),
            ("http://gpu1/api", "path"),
            ("http://gpu1?x=1", "path"),
            ("http://gpu1:0", "port"),
            ("http://gpu1:99999", "port"),
            ("", "not a URL"),
        ] {
            let error = Client::new(url, None, None).unwrap_err().to_string();
            assert!(error.contains(part), "{url}: {error}");
        }
    }

    #[test]
    fn keys_are_checked_and_never_printed() {
        let error = Client::new("http://a", Some("line\nbreak"), None).unwrap_err();
        assert!(error.to_string().contains("API key"), "{error}");
        let client = Client::new("http://a", Some("sk-secret"), None).unwrap();
        assert!(!format!("{client:?}").contains("secret"));
    }
}
