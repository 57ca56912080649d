//! Connections: a pool for the run, and blocking requests before and after it.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;

use crate::answer::Answer;
use crate::body::push_common_headers;
use crate::http::{HttpError, Parser};
use crate::target::Target;

/// Largest read, bytes. All connections of a thread share one buffer, so it may be large.
const READ_BYTES: usize = 128 << 10;

/// Why an exchange ended without an answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{0}")]
    Connect(io::Error),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Http(#[from] HttpError),
}

impl Failure {
    /// The category that the error is counted in.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Failure::Connect(_) => "connect",
            Failure::Io(e) if e.kind() == io::ErrorKind::ConnectionReset => "connection reset",
            Failure::Io(_) => "connection failed",
            Failure::Http(HttpError::Cut) => "closed in mid-answer",
            Failure::Http(_) => "not HTTP",
        }
    }
}

/// The connections of one thread.
#[derive(Debug)]
pub(crate) struct Pool {
    addresses: Vec<SocketAddr>,
    connect_timeout: Duration,
    idle: RefCell<Vec<TcpStream>>,
    buffer: RefCell<Vec<u8>>,
}

impl Pool {
    pub(crate) fn new(target: &Target, connect_timeout: Duration) -> Pool {
        Pool {
            addresses: target.addresses.clone(),
            connect_timeout,
            idle: RefCell::new(Vec::new()),
            buffer: RefCell::new(vec![0; READ_BYTES]),
        }
    }

    /// An idle connection (and `true`), or a new one.
    pub(crate) async fn take(&self) -> Result<(TcpStream, bool), Failure> {
        // The most recently used one is the least likely to have been closed.
        if let Some(stream) = self.idle.borrow_mut().pop() {
            return Ok((stream, true));
        }
        Ok((self.connect().await?, false))
    }

    /// A new connection with TCP_NODELAY set, as in OpenAI's clients.
    pub(crate) async fn connect(&self) -> Result<TcpStream, Failure> {
        let connect = TcpStream::connect(&self.addresses[..]);
        let stream = tokio::time::timeout(self.connect_timeout, connect)
            .await
            .map_err(|_| {
                let message = format!("no connection within {:?}", self.connect_timeout);
                Failure::Connect(io::Error::new(io::ErrorKind::TimedOut, message))
            })?
            .map_err(Failure::Connect)?;
        stream.set_nodelay(true).map_err(Failure::Connect)?;
        Ok(stream)
    }

    /// Keeps a connection for the next request.
    pub(crate) fn give(&self, stream: TcpStream) {
        self.idle.borrow_mut().push(stream);
    }

    /// Waits until the socket has bytes and reads them in place. No bytes: closed.
    pub(crate) async fn read<R>(
        &self,
        stream: &mut TcpStream,
        mut look: impl FnMut(&[u8]) -> R,
    ) -> io::Result<R> {
        poll_fn(|cx| {
            // Borrowed for this poll only; other requests use it in theirs.
            let mut buffer = self.buffer.borrow_mut();
            let mut read = ReadBuf::new(&mut buffer);
            ready!(Pin::new(&mut *stream).poll_read(cx, &mut read))?;
            Poll::Ready(Ok(look(read.filled())))
        })
        .await
    }
}

/// Requests `path` on a connection of its own; returns status and body. Blocks.
pub(crate) fn get(
    target: &Target,
    path: &str,
    api_key: Option<&str>,
    headers: &[String],
    timeout: Duration,
) -> Result<(u16, String), Failure> {
    let mut last = io::Error::other("no address");
    for address in &target.addresses {
        match std::net::TcpStream::connect_timeout(address, timeout) {
            Ok(stream) => return get_over(stream, target, path, api_key, headers, timeout),
            Err(error) => last = error,
        }
    }
    Err(Failure::Connect(last))
}

/// Largest body of such an answer, bytes.
const GET_BYTES_MAX: usize = 64 << 20;

fn get_over(
    mut stream: std::net::TcpStream,
    target: &Target,
    path: &str,
    api_key: Option<&str>,
    headers: &[String],
    timeout: Duration,
) -> Result<(u16, String), Failure> {
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let mut head = format!(
        "GET {}{path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n",
        target.base_path, target.authority
    );
    push_common_headers(&mut head, api_key, headers);
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    let (mut parser, mut body) = (Parser::default(), Vec::new());
    let mut buffer = vec![0; 16 << 10];
    while !parser.is_complete() {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            parser.on_close()?;
        }
        parser.feed(&buffer[..n], |_, bytes| body.extend_from_slice(bytes))?;
        if body.len() > GET_BYTES_MAX {
            return Err(Failure::Io(io::Error::other("the answer is too long")));
        }
    }
    let status = parser.head().map_or(0, |h| h.status);
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// The message of an error body.
pub(crate) fn error_text(body: &str) -> String {
    let mut answer = Answer::new(false);
    answer.feed_body(body.as_bytes());
    answer.end_body(false);
    answer.error.unwrap_or_default()
}
