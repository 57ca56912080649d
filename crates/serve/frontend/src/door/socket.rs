//! A client's socket, which hyper and the shard write to.

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::task::Poll;

use bytes::BytesMut;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// A client's socket, which hyper and the shard write to.
#[derive(Default)]
pub(crate) struct Wire {
    /// `None` once hyper is done with it.
    socket: RefCell<Option<TokioIo<TcpStream>>>,
    /// Rest of a chunk that the system has taken a part of.
    owed: RefCell<BytesMut>,
    /// All that hyper was given has been given to the system, and nothing is owed.
    flushed: Cell<bool>,
}

/// Outcome of the send of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    All,
    /// The rest is owed.
    Part,
    /// The system takes nothing now, or never again.
    Nothing,
}

impl Wire {
    /// Connects it, until [`hang_up`](Self::hang_up).
    pub(crate) fn connect(&self, stream: TcpStream) {
        self.socket.replace(Some(TokioIo::new(stream)));
        self.flushed.set(true);
    }

    /// Closes the socket, although requests may still hold the connection.
    pub(crate) fn hang_up(&self) {
        self.socket.take();
        self.flushed.set(false);
    }

    /// Polls the socket.
    pub(crate) fn poll<T>(
        &self,
        poll: impl FnOnce(&mut TokioIo<TcpStream>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut *self.socket.borrow_mut() {
            Some(socket) => poll(socket),
            None => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }

    /// Bytes that go before any others.
    pub(crate) fn owed(&self) -> RefMut<'_, BytesMut> {
        self.owed.borrow_mut()
    }

    pub(crate) fn is_flushed(&self) -> bool {
        self.flushed.get()
    }

    pub(crate) fn set_flushed(&self, flushed: bool) {
        self.flushed.set(flushed);
    }

    /// Sends `chunk`, if hyper has nothing to send.
    pub(crate) fn send(&self, chunk: &[u8]) -> Sent {
        let socket = self.socket.borrow();
        let Some(socket) = socket.as_ref().filter(|_| self.flushed.get()) else {
            return Sent::Nothing;
        };
        match socket.inner().try_write(chunk) {
            Ok(sent) if sent == chunk.len() => Sent::All,
            Ok(0) | Err(_) => Sent::Nothing, // an error shows as hyper writes
            Ok(sent) => {
                self.owed.borrow_mut().extend_from_slice(&chunk[sent..]);
                self.flushed.set(false);
                Sent::Part
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Read;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::time::Duration;

    use hyper::rt::Write as _;

    use super::*;
    use crate::door::connection::Connection;
    use crate::door::io::ClientIo;

    #[test]
    fn the_rest_of_a_chunk_goes_before_what_hyper_writes() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let mut there = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (here, _) = listener.accept().unwrap();
            here.set_nonblocking(true).unwrap();
            let stream = TcpStream::from_std(here).unwrap();
            stream.writable().await.unwrap();
            let connection = Connection::new(Arc::default());
            let mut io = ClientIo::new(stream, connection.clone(), Duration::from_secs(60), || {});
            let wire = connection.wire();
            assert_eq!(wire.send(b"begin"), Sent::All);
            // More than the system keeps for a connection.
            let chunk: Vec<u8> = (0..16 << 20).map(|at: u32| (at / 251) as u8).collect();
            assert_eq!(wire.send(&chunk), Sent::Part);
            assert_eq!(wire.send(b"not now"), Sent::Nothing);
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                there.read_to_end(&mut all).unwrap();
                all
            });
            let tail = poll_fn(|cx| Pin::new(&mut io).poll_write(cx, b"tail")).await;
            assert_eq!(tail.unwrap(), 4);
            assert_eq!(wire.send(b"not yet"), Sent::Nothing);
            poll_fn(|cx| Pin::new(&mut io).poll_flush(cx))
                .await
                .unwrap();
            assert_eq!(wire.send(b"end"), Sent::All);
            drop(io);
            assert_eq!(wire.send(b"gone"), Sent::Nothing);
            let all = reader.join().unwrap();
            assert!(all == [&b"begin"[..], &chunk, b"tailend"].concat());
        });
    }
}
