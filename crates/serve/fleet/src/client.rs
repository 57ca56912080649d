//! A client of servers that the cluster file names, such as a webhook or Kubernetes' API: one request per connection.

use hyper::body::{Body, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, HOST, HeaderValue, InvalidHeaderValue, USER_AGENT};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use slipstream_config::cluster::EngineUrl;
use slipstream_planes::tls::ClientTls;
use tokio::net::TcpStream;

/// A server.
pub(crate) struct Client {
    pub(crate) url: EngineUrl,
    /// With `https://`.
    pub(crate) tls: Option<ClientTls>,
}

/// Why there is no answer. A retry may help, except after [`ClientError::Header`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// The server cannot be reached, or is not the one that its certificate names.
    #[error(transparent)]
    Connect(#[from] std::io::Error),
    /// The host or the token cannot be in a header.
    #[error(transparent)]
    Header(#[from] InvalidHeaderValue),
    /// The connection ended, or the answer is not HTTP.
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

impl Client {
    /// Sends `request` with a bearer token, if there is one, and returns the head of the answer, whose body ends the
    /// connection. Runs in a `LocalSet`.
    pub(crate) async fn send<B>(
        &self,
        mut request: Request<B>,
        token: Option<&str>,
    ) -> Result<Response<Incoming>, ClientError>
    where
        B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + 'static,
    {
        let headers = request.headers_mut();
        headers.insert(HOST, HeaderValue::try_from(self.url.authority())?);
        headers.insert(USER_AGENT, HeaderValue::from_static("slipstream"));
        if let Some(token) = token {
            let bearer = HeaderValue::try_from(format!("Bearer {token}"))?;
            headers.insert(AUTHORIZATION, bearer);
        }
        let stream = TcpStream::connect((&*self.url.host, self.url.port)).await?;
        let mut sender = match &self.tls {
            None => open(stream).await?,
            Some(tls) => open(tls.connect(&self.url.host, stream).await?).await?,
        };
        Ok(sender.send_request(request).await?)
    }
}

async fn open<T, B>(stream: T) -> Result<SendRequest<B>, hyper::Error>
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with the answer that it carries.
    tokio::task::spawn_local(async move {
        let _ = connection.await;
    });
    Ok(sender)
}
