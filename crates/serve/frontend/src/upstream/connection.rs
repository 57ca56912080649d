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

use super::engines::Engine;
use super::failure::{Failure, TlsFault, lost, tls_error, tls_failure};
use crate::wire::{self, ResponseHead};

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
