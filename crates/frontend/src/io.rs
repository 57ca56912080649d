//! A client's socket, with a deadline for clients that do not read.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::connection::Connection;

/// A TCP stream whose writes fail once the peer has taken nothing for `write_timeout`.
///
/// The timer exists only while a write is blocked, so a client that reads costs nothing here.
pub(crate) struct ClientIo {
    inner: TokioIo<TcpStream>,
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
        ClientIo {
            inner: TokioIo::new(stream),
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
        let _ = self.inner.inner().readable().await; // an error shows as it is read
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
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl Write for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.client.set_flushed(false);
        let outcome = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.watch(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.client.set_flushed(false);
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.watch(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(cx);
        // Called once nothing is buffered in front of it.
        self.client
            .set_flushed(matches!(outcome, Poll::Ready(Ok(()))));
        self.watch(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.watch(cx, outcome)
    }
}
