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
    /// It is not the engine's fault.
    #[error("it left the fleet")]
    Removed,
    /// Of a health check.
    #[error("health check: {0}")]
    Health(String),
}

impl Failure {
    /// The request did not reach a process.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self, Failure::Refused(_))
    }

    pub(super) fn is_health(&self) -> bool {
        matches!(self, Failure::Health(_))
    }
}

fn lost(error: &io::Error) -> Failure {
    Failure::Lost(error.to_string())
}

/// The first read of a connection takes this much; a read that fills its room doubles it.
const ROOM_MIN: usize = 2 << 10;
const ROOM_MAX: usize = 64 << 10;

pub(super) struct Connection {
    stream: TcpStream,
    /// [`Engine::id`].
    pub(super) engine_id: u64,
    /// Read, but not taken yet.
    pub(super) buf: BytesMut,
    room: usize,
    /// It has carried an answer before.
    pub(super) reused: bool,
    pub(super) idle_since_ns: u64,
}

impl Connection {
    pub(super) async fn open(engine: &Engine, limit: Duration) -> Result<Connection, Failure> {
        let url = &engine.spec.url;
        let connect = async {
            match url.host.parse::<IpAddr>() {
                Ok(ip) => TcpStream::connect((ip, url.port)).await,
                Err(_) => TcpStream::connect((&*url.host, url.port)).await,
            }
        };
        let stream = match tokio::time::timeout(limit, connect).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(Failure::Refused(error.to_string())),
            Err(_) => return Err(Failure::ConnectTimeout(limit)),
        };
        stream.set_nodelay(true).map_err(|error| lost(&error))?;
        Ok(Connection {
            stream,
            engine_id: engine.id,
            buf: BytesMut::new(),
            room: ROOM_MIN,
            reused: false,
            idle_since_ns: 0,
        })
    }

    /// Whether the engine has neither closed an idle connection nor sent anything.
    pub(super) fn is_open(&self) -> bool {
        // The runtime would answer from what it saw last, and bytes that nothing asked for would be the next
        // answer.
        let outcome = socket2::SockRef::from(&self.stream).peek(&mut [MaybeUninit::uninit()]);
        matches!(outcome, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// The answer is complete. False if bytes follow it.
    pub(super) fn rest(&mut self, now_ns: u64) -> bool {
        self.idle_since_ns = now_ns;
        self.reused = true;
        let clean = self.buf.is_empty();
        self.buf = BytesMut::new();
        self.room = ROOM_MIN;
        clean
    }

    /// Sends a request.
    pub(super) async fn send(&mut self, head: BytesMut, body: &[Bytes; 2]) -> Result<(), Failure> {
        let [first, second] = body;
        let mut message = head.chain(first.clone()).chain(second.clone());
        let sent = self.stream.write_all_buf(&mut message).await;
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

    /// Reads what has come. Ready with 0: the engine has closed the connection.
    pub(super) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.buf.capacity() - self.buf.len() < self.room / 2 {
            self.buf.reserve(self.room);
        }
        let room = self.buf.capacity() - self.buf.len();
        let read = pin!(self.stream.read_buf(&mut self.buf)).poll(cx);
        if let Poll::Ready(Ok(bytes)) = read
            && bytes == room
        {
            self.room = (self.room * 2).min(ROOM_MAX);
        }
        read
    }
}
