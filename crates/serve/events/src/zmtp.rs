//! The subset of ZMTP 3.0, ZeroMQ's wire protocol, for PUB, SUB and a ROUTER that replies.
//!
//! Why not a library: in the pure Rust one (`zeromq` 0.7) a PUB socket drops messages for a slow
//! subscriber without a counter, drops the newest rather than the oldest, and takes messages one by
//! one. Here a batch stores events in wire format, one write sends many, and drops are counted.
//! Tests run against that crate and against libzmq, which checks the wire format.
//!
//! Source: RFC 23/ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>), with PING and the SUBSCRIBE command
//! of 37/ZMTP 3.1. Security is NULL: publish sensitive events over NATS with TLS, or on a private
//! network.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use slipstream_base::text::foreign;
use slipstream_base::width::{to_u8, to_u32, to_usize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// More frames of the message follow.
const MORE: u8 = 1;
/// The length has 8 bytes.
const LONG: u8 = 2;
/// A command instead of a part of a message.
const COMMAND: u8 = 4;

/// Bytes of a greeting.
pub(crate) const GREETING_BYTES: usize = 64;

/// Longest frame during the handshake, and from peers that only subscribe.
pub(crate) const SMALL_FRAME_MAX: usize = 4 << 10;

/// A protocol error. The connection is closed; a new one may succeed.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The connection failed.
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// Not ZMTP 3.
    #[error("the peer does not speak ZMTP 3 (its greeting begins {0:02x?}); is it ZeroMQ?")]
    Greeting([u8; 12]),
    /// Another security mechanism.
    #[error("the peer requires security mechanism `{0}`, but only NULL is supported")]
    Mechanism(String),
    /// Invalid flags of a frame.
    #[error("a frame begins with 0x{0:02x}, which is invalid in ZMTP 3")]
    Flags(u8),
    /// A frame is too long.
    #[error("a frame has {len} bytes, but {max} is the limit")]
    TooLong {
        /// Its length.
        len: u64,
        /// The limit.
        max: usize,
    },
    /// The handshake failed.
    #[error("the handshake ended with `{0}` instead of READY")]
    NotReady(String),
    /// An incompatible socket type.
    #[error("the peer's socket is of type `{found}`, but {expected} is needed")]
    SocketType {
        /// The peer's type.
        found: String,
        /// The compatible types.
        expected: &'static str,
    },
    /// A message has too many frames.
    #[error("a message has more than {0} frames")]
    Frames(usize),
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) command: bool,
    pub(crate) more: bool,
    pub(crate) body: Bytes,
}

/// The greeting of a peer without security.
pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[0] = 0xff;
    bytes[8] = 1; // padding as in libzmq; a peer of version 1 reads it as a length
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Checks that `bytes` are a greeting of our version without security.
pub(crate) fn check_greeting(bytes: &[u8; GREETING_BYTES]) -> Result<(), ZmtpError> {
    if bytes[0] != 0xff || bytes[9] & 1 == 0 || bytes[10] < 3 {
        let mut head = [0; 12];
        head.copy_from_slice(&bytes[..12]);
        return Err(ZmtpError::Greeting(head));
    }
    let mechanism = bytes[12..32].split(|&b| b == 0).next().unwrap_or(&[]);
    if mechanism != b"NULL" {
        let name = foreign(&String::from_utf8_lossy(mechanism)).into_owned();
        return Err(ZmtpError::Mechanism(name));
    }
    Ok(())
}

/// Appends a frame's header.
pub(crate) fn put_header(out: &mut Vec<u8>, len: usize, more: bool) {
    let more = if more { MORE } else { 0 };
    if let Ok(len) = u8::try_from(len) {
        out.extend_from_slice(&[more, len]);
    } else {
        out.push(more | LONG);
        out.extend_from_slice(&(len as u64).to_be_bytes());
    }
}

/// Appends a frame.
pub(crate) fn put_frame(out: &mut Vec<u8>, body: &[u8], more: bool) {
    put_header(out, body.len(), more);
    out.extend_from_slice(body);
}

/// Appends a command.
fn put_command(out: &mut Vec<u8>, name: &str, data: &[u8]) {
    let len = 1 + name.len() + data.len();
    // All commands here are short.
    out.extend_from_slice(&[COMMAND, to_u8(len), to_u8(name.len())]);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(data);
}

fn ready(socket_type: &str) -> Vec<u8> {
    const PROPERTY: &str = "Socket-Type";
    let mut data = vec![to_u8(PROPERTY.len())];
    data.extend_from_slice(PROPERTY.as_bytes());
    data.extend_from_slice(&to_u32(socket_type.len()).to_be_bytes());
    data.extend_from_slice(socket_type.as_bytes());
    let mut out = Vec::new();
    put_command(&mut out, "READY", &data);
    out
}

/// The message that subscribes to a topic.
pub(crate) fn subscribe(topic: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut body = vec![1];
    body.extend_from_slice(topic);
    put_frame(&mut out, &body, false);
    out
}

/// Removes a frame from the front of `buffer`, if it is complete.
pub(crate) fn take_frame(buffer: &mut BytesMut, max: usize) -> Result<Option<Frame>, ZmtpError> {
    let Some(&flags) = buffer.first() else {
        return Ok(None);
    };
    if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
        return Err(ZmtpError::Flags(flags));
    }
    let (header, len) = if flags & LONG == 0 {
        let Some(&len) = buffer.get(1) else {
            return Ok(None);
        };
        (2, u64::from(len))
    } else {
        let Some(len) = buffer.get(1..9) else {
            return Ok(None);
        };
        (9, u64::from_be_bytes(len.try_into().expect("8 bytes")))
    };
    if len > max as u64 {
        return Err(ZmtpError::TooLong { len, max });
    }
    let len = to_usize(len);
    if buffer.len() < header + len {
        buffer.reserve(header + len - buffer.len());
        return Ok(None);
    }
    buffer.advance(header);
    Ok(Some(Frame {
        command: flags & COMMAND != 0,
        more: flags & MORE != 0,
        body: buffer.split_to(len).freeze(),
    }))
}

/// Splits a command into its name and body.
pub(crate) fn split_command(body: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&len, rest) = body.split_first()?;
    rest.split_at_checked(usize::from(len))
}

/// The reply to a PING.
pub(crate) fn pong(data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    // A time to live of two bytes, then up to 16 bytes that are returned.
    let context = data.get(2..).unwrap_or(&[]);
    put_command(&mut out, "PONG", &context[..context.len().min(16)]);
    out
}

/// The value of `Socket-Type` in the properties of READY.
pub(crate) fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    while let Some((name, rest)) = split_command(properties) {
        let (len, rest) = rest.split_at_checked(4)?;
        let len = u32::from_be_bytes(len.try_into().expect("4 bytes")) as usize;
        let (value, rest) = rest.split_at_checked(len)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        properties = rest;
    }
    None
}

/// A connection past its handshake.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    /// Bytes read and not yet consumed.
    pub(crate) buffer: BytesMut,
}

impl Connection {
    /// Performs the handshake as a socket of type `ours`. The peer must be of one of the types
    /// `theirs` (as a list in words, for the message).
    pub(crate) async fn open(
        mut stream: TcpStream,
        ours: &str,
        theirs: &'static str,
    ) -> Result<Connection, ZmtpError> {
        stream.set_nodelay(true)?;
        stream.write_all(&greeting()).await?;
        let mut theirs_bytes = [0; GREETING_BYTES];
        stream
            .read_exact(&mut theirs_bytes)
            .await
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => ZmtpError::Closed,
                _ => error.into(),
            })?;
        check_greeting(&theirs_bytes)?;
        stream.write_all(&ready(ours)).await?;
        let buffer = BytesMut::new();
        let mut connection = Connection { stream, buffer };
        let frame = connection.frame(SMALL_FRAME_MAX).await?;
        let (name, data) = split_command(&frame.body).unwrap_or_default();
        if !frame.command || name != b"READY" {
            let name = String::from_utf8_lossy(name);
            return Err(ZmtpError::NotReady(foreign(&name).into_owned()));
        }
        let found = socket_type(data).unwrap_or_default();
        if !theirs.split(", ").any(|kind| kind.as_bytes() == found) {
            let found = foreign(&String::from_utf8_lossy(found)).into_owned();
            return Err(ZmtpError::SocketType {
                found,
                expected: theirs,
            });
        }
        Ok(connection)
    }

    /// The next frame. Cancellation-safe: read bytes are kept.
    pub(crate) async fn frame(&mut self, max: usize) -> Result<Frame, ZmtpError> {
        loop {
            if let Some(frame) = take_frame(&mut self.buffer, max)? {
                return Ok(frame);
            }
            self.buffer.reserve(4 << 10);
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(ZmtpError::Closed);
            }
        }
    }

    /// The frames of the next message, at most `frames_max`. Commands are answered or skipped. Not
    /// cancellation-safe between frames.
    pub(crate) async fn message(
        &mut self,
        frames_max: usize,
        max: usize,
    ) -> Result<Vec<Bytes>, ZmtpError> {
        let mut frames = Vec::new();
        loop {
            let frame = self.frame(max).await?;
            if frame.command {
                if let Some((b"PING", data)) = split_command(&frame.body) {
                    self.stream.write_all(&pong(data)).await?;
                }
                continue;
            }
            if frames.len() == frames_max {
                return Err(ZmtpError::Frames(frames_max));
            }
            frames.push(frame.body);
            if !frame.more {
                return Ok(frames);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_are_read_back_however_they_are_cut(
            bodies in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..600), any::<bool>()), 1..8),
            cut in 1usize..64,
        ) {
            let mut wire = Vec::new();
            for (body, more) in &bodies {
                put_frame(&mut wire, body, *more);
            }
            let (mut buffer, mut found) = (BytesMut::new(), Vec::new());
            for part in wire.chunks(cut) {
                buffer.extend_from_slice(part);
                while let Some(frame) = take_frame(&mut buffer, 1000).unwrap() {
                    found.push((frame.body.to_vec(), frame.more));
                }
            }
            prop_assert_eq!(found, bodies);
            prop_assert!(buffer.is_empty());
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut buffer = BytesMut::from(&bytes[..]);
            while let Ok(Some(frame)) = take_frame(&mut buffer, SMALL_FRAME_MAX) {
                if let Some((_, data)) = split_command(&frame.body) {
                    let _ = socket_type(data);
                    let _ = pong(data);
                }
            }
            let mut greeting = [0; GREETING_BYTES];
            for (to, from) in greeting.iter_mut().zip(&bytes) {
                *to = *from;
            }
            let _ = check_greeting(&greeting);
        }
    }

    #[test]
    fn greetings_of_others_are_refused_with_the_reason() {
        assert!(check_greeting(&greeting()).is_ok());
        let mut old = greeting();
        old[10] = 1;
        assert!(matches!(check_greeting(&old), Err(ZmtpError::Greeting(_))));
        let mut http = [b' '; GREETING_BYTES];
        http[..14].copy_from_slice(b"GET / HTTP/1.1");
        assert!(matches!(check_greeting(&http), Err(ZmtpError::Greeting(_))));
        let mut curve = greeting();
        curve[12..17].copy_from_slice(b"CURVE");
        let error = check_greeting(&curve).unwrap_err().to_string();
        assert!(error.contains("`CURVE`"), "{error}");
    }

    #[test]
    fn a_frame_that_is_too_long_is_refused_before_it_is_read() {
        let mut wire = Vec::new();
        put_header(&mut wire, 5000, false);
        let error = take_frame(&mut BytesMut::from(&wire[..]), 4096).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a frame has 5000 bytes, but 4096 is the limit"
        );
    }

    #[test]
    fn ready_tells_the_socket_type() {
        let wire = ready("PUB");
        let frame = take_frame(&mut BytesMut::from(&wire[..]), 100)
            .unwrap()
            .unwrap();
        let (name, data) = split_command(&frame.body).unwrap();
        assert_eq!((frame.command, name), (true, &b"READY"[..]));
        assert_eq!(socket_type(data), Some(&b"PUB"[..]));
    }
}
