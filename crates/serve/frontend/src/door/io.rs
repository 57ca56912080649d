//! A client's socket, with a deadline for clients that do not read.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::door::connection::Connection;
use crate::door::socket::Wire;

/// A TCP stream whose writes fail once the peer has taken nothing for `write_timeout`. The rest of a chunk that the
/// shard began (`tokens::direct`) is written first.
///
/// The timer exists only while a write is blocked, so a client that reads costs nothing here.
pub(crate) struct ClientIo {
    write_timeout: Duration,
    blocked: Option<Pin<Box<Sleep>>>,
    on_cut: Box<dyn Fn()>,
    client: Rc<Connection>,
    /// Bytes that were read before, and are read again first.
    unread: Bytes,
}

impl ClientIo {
    /// Wraps the `stream` of `client`; `on_cut` is called once if the deadline passes.
    pub(crate) fn new(
        stream: TcpStream,
        client: Rc<Connection>,
        write_timeout: Duration,
        on_cut: impl Fn() + 'static,
    ) -> ClientIo {
        client.wire().connect(stream);
        ClientIo {
            write_timeout,
            blocked: None,
            on_cut: Box::new(on_cut),
            client,
            unread: Bytes::new(),
        }
    }

    /// Has `bytes` read again.
    pub(crate) fn unread(&mut self, bytes: Bytes) {
        self.unread = bytes;
    }

    /// Waits until there is something to read, or the client has closed the connection.
    pub(crate) async fn readable(&self) {
        // An error shows as it is read.
        let _ = poll_fn(|cx| {
            self.wire()
                .poll(|socket| socket.inner().poll_read_ready(cx))
        })
        .await;
    }

    fn wire(&self) -> &Wire {
        self.client.wire()
    }

    /// Writes the bytes that are owed.
    fn poll_owed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let wire = self.client.wire();
        let mut owed = wire.owed();
        while !owed.is_empty() {
            match ready!(wire.poll(|socket| Pin::new(socket).poll_write(cx, &owed)))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => owed.advance(count),
            }
            self.blocked = None;
        }
        if owed.capacity() > 0 {
            *owed = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }

    /// Writes with `write`, behind the bytes that are owed.
    fn poll_behind_owed<T>(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut TokioIo<TcpStream>>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let outcome = match self.poll_owed(cx) {
            Poll::Ready(Ok(())) => self.wire().poll(|socket| write(Pin::new(socket), cx)),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        };
        self.watch(cx, outcome)
    }

    /// Passes a write's outcome on, and keeps the deadline of blocked writes.
    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.blocked = None;
            return outcome;
        }
        let timeout = self.write_timeout;
        let sleep = self
            .blocked
            .get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + timeout)));
        if sleep.as_mut().poll(cx).is_ready() {
            (self.on_cut)();
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "client took no data within live.write_timeout_s",
            )));
        }
        Poll::Pending
    }
}

impl Read for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.unread.is_empty() {
            let count = self.unread.len().min(buf.remaining());
            buf.put_slice(&self.unread[..count]);
            self.unread.advance(count);
            return Poll::Ready(Ok(()));
        }
        self.wire()
            .poll(|socket| Pin::new(socket).poll_read(cx, buf))
    }
}

impl Write for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.wire().set_flushed(false);
        self.poll_behind_owed(cx, |socket, cx| socket.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.wire().set_flushed(false);
        self.poll_behind_owed(cx, |socket, cx| socket.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = self.poll_behind_owed(cx, TokioIo::poll_flush);
        // Called once nothing is buffered in front of it.
        self.wire()
            .set_flushed(matches!(outcome, Poll::Ready(Ok(()))));
        outcome
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_behind_owed(cx, TokioIo::poll_shutdown)
    }
}

impl Drop for ClientIo {
    fn drop(&mut self) {
        self.wire().hang_up();
    }
}
