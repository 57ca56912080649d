//! HTTP/1.1 towards an engine, without I/O: heads of requests, heads and bodies of answers.
//!
//! Written by hand so that an answer's bytes are read by the client's task itself and leave in the buffer
//! that they arrived in: a client library has a task per connection and a channel between the two.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hyper::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap,
    HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use hyper::{Method, StatusCode};

/// Limit of the bytes of an answer's head.
pub(crate) const HEAD_BYTES_MAX: usize = 64 << 10;
/// Limit of the header lines of an answer.
const HEADERS_MAX: usize = 128;
/// Limit of the bytes of a chunk's size line, and of a trailer.
const LINE_BYTES_MAX: usize = 8 << 10;

/// Why bytes are not an answer. The connection cannot be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("its answer is not HTTP/1.1: {0}")]
    Head(String),
    #[error("the head of its answer is longer than {HEAD_BYTES_MAX} bytes")]
    HeadTooLong,
    #[error("the length of its answer is ambiguous: {0}")]
    Length(&'static str),
    #[error("broken chunked encoding: {0}")]
    Chunk(&'static str),
}

/// How the end of a body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// This many bytes.
    Sized(u64),
    Chunked,
    UntilClose,
}

/// Head of an answer.
#[derive(Debug)]
pub(crate) struct ResponseHead {
    pub(crate) status: StatusCode,
    /// Without those that concern one connection only.
    pub(crate) headers: HeaderMap,
    pub(crate) framing: Framing,
    /// The connection may carry another request after the body.
    pub(crate) keep_alive: bool,
}

/// Takes the head of an answer to a request of `method` off `buf`; `None`: it is not complete. Interim
/// answers (1xx) are skipped.
pub(crate) fn take_head(
    buf: &mut BytesMut,
    method: &Method,
) -> Result<Option<ResponseHead>, WireError> {
    loop {
        let mut lines = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut parsed = httparse::Response::new(&mut lines);
        let length = match parsed.parse(buf) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if buf.len() > HEAD_BYTES_MAX => {
                return Err(WireError::HeadTooLong);
            }
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err(WireError::HeadTooLong),
            Err(error) => return Err(WireError::Head(error.to_string())),
        };
        if length > HEAD_BYTES_MAX {
            return Err(WireError::HeadTooLong);
        }
        let code = parsed.code.unwrap_or_default();
        let status =
            StatusCode::from_u16(code).map_err(|_| WireError::Head(format!("status {code}")))?;
        if status == StatusCode::SWITCHING_PROTOCOLS {
            return Err(WireError::Head("it switches protocols unasked".into()));
        }
        if status.is_informational() {
            buf.advance(length);
            continue;
        }
        let is_1_1 = parsed.version == Some(1);
        let head = read_head(status, is_1_1, parsed.headers, method)?;
        buf.advance(length);
        return Ok(Some(head));
    }
}

fn read_head(
    status: StatusCode,
    is_1_1: bool,
    lines: &[httparse::Header<'_>],
    method: &Method,
) -> Result<ResponseHead, WireError> {
    let mut headers = HeaderMap::with_capacity(lines.len() + 2);
    for line in lines {
        let name = HeaderName::from_bytes(line.name.as_bytes());
        let value = HeaderValue::from_bytes(line.value);
        let (Ok(name), Ok(value)) = (name, value) else {
            return Err(WireError::Head(format!("header `{}`", line.name)));
        };
        headers.append(name, value);
    }
    let asks = |of: &str| {
        let mut all = headers.get_all(CONNECTION).iter().flat_map(words);
        all.any(|word| word.eq_ignore_ascii_case(of))
    };
    let keep_alive = !asks("close") && (is_1_1 || asks("keep-alive"));
    let bodiless = *method == Method::HEAD
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED;
    // Another coding before it, such as gzip, would reach the client without its name.
    let chunked = {
        let mut codings = headers.get_all(TRANSFER_ENCODING).iter().flat_map(words);
        match (codings.next(), codings.next()) {
            (None, _) => false,
            (Some(coding), None) if coding.eq_ignore_ascii_case("chunked") => true,
            _ => return Err(WireError::Length("transfer-encoding other than chunked")),
        }
    };
    let length = content_length(&headers)?;
    let framing = match (bodiless, chunked, length) {
        (true, _, _) => Framing::Sized(0),
        (_, true, Some(_)) => {
            return Err(WireError::Length("content-length and transfer-encoding"));
        }
        (_, true, None) => Framing::Chunked,
        (_, false, Some(length)) => Framing::Sized(length),
        (_, false, None) => Framing::UntilClose,
    };
    strip_hop_by_hop(&mut headers);
    Ok(ResponseHead {
        status,
        headers,
        framing,
        keep_alive: keep_alive && framing != Framing::UntilClose,
    })
}

impl ResponseHead {
    /// Whether the body is events as text.
    pub(crate) fn is_event_stream(&self) -> bool {
        !self.headers.contains_key(CONTENT_ENCODING)
            && self
                .headers
                .get(CONTENT_TYPE)
                .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
    }
}

fn content_length(headers: &HeaderMap) -> Result<Option<u64>, WireError> {
    let mut found = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        let text = value.to_str().unwrap_or_default();
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let Some(length) = digits.then(|| text.parse::<u64>().ok()).flatten() else {
            return Err(WireError::Length("content-length is not a number"));
        };
        if found.is_some_and(|found| found != length) {
            return Err(WireError::Length("two values of content-length"));
        }
        found = Some(length);
    }
    Ok(found)
}

/// The comma-separated words of a header's value.
fn words(value: &HeaderValue) -> impl DoubleEndedIterator<Item = &str> {
    let text = value.to_str().unwrap_or_default();
    text.split(',').map(str::trim)
}

/// Removes headers that concern one connection only (RFC 9110, section 7.6.1).
fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .flat_map(words)
            .filter_map(|word| HeaderName::from_bytes(word.as_bytes()).ok())
            // Without its length a body would be framed anew.
            .filter(|name| name != CONTENT_LENGTH)
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

static HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Headers of a client's request as they are sent to any engine: without those of its connection, of
/// its framing, `Host` and `Authorization`. They are written once, also for retries.
pub(crate) fn write_headers(headers: &HeaderMap) -> BytesMut {
    let mut out = BytesMut::with_capacity(512);
    let named: Vec<&str> = headers.get_all(CONNECTION).iter().flat_map(words).collect();
    for (name, value) in headers {
        let skipped = HOP_BY_HOP.contains(name)
            || *name == HOST
            || *name == CONTENT_LENGTH
            || *name == EXPECT
            || *name == hyper::header::AUTHORIZATION
            || named
                .iter()
                .any(|word| word.eq_ignore_ascii_case(name.as_str()));
        if !skipped {
            write_header(&mut out, name.as_str(), value.as_bytes());
        }
    }
    out
}

pub(crate) fn write_header(out: &mut BytesMut, name: &str, value: &[u8]) {
    out.reserve(name.len() + value.len() + 4);
    out.put_slice(name.as_bytes());
    out.put_slice(b": ");
    out.put_slice(value);
    out.put_slice(b"\r\n");
}

/// The head of a request: `headers` are lines as of [`write_headers`].
pub(crate) fn write_head(
    method: &Method,
    target: [&str; 2],
    authority: &str,
    authorization: Option<&[u8]>,
    headers: &[u8],
    body: usize,
) -> BytesMut {
    let [prefix, path] = target;
    let mut out = BytesMut::with_capacity(128 + prefix.len() + path.len() + headers.len());
    out.put_slice(method.as_str().as_bytes());
    out.put_slice(b" ");
    out.put_slice(prefix.as_bytes());
    out.put_slice(path.as_bytes());
    out.put_slice(b" HTTP/1.1\r\n");
    write_header(&mut out, "host", authority.as_bytes());
    out.put_slice(headers);
    if let Some(value) = authorization {
        write_header(&mut out, "authorization", value);
    }
    let bodiless = body == 0 && (*method == Method::GET || *method == Method::HEAD);
    if !bodiless {
        write_header(&mut out, "content-length", body.to_string().as_bytes());
    }
    out.put_slice(b"\r\n");
    out
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Sized(u64),
    ChunkSize,
    ChunkData(u64),
    ChunkEnd,
    Trailer,
    UntilClose,
    Complete,
}

/// Takes a body out of its framing.
#[derive(Debug)]
pub(crate) struct BodyDecoder {
    state: State,
}

/// A step of [`BodyDecoder::decode`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decoded {
    /// Bytes of the body; not empty.
    Data(Bytes),
    /// More has to be read.
    NeedMore,
    /// The body is complete.
    End,
}

impl BodyDecoder {
    pub(crate) fn new(framing: Framing) -> BodyDecoder {
        BodyDecoder {
            state: match framing {
                Framing::Sized(0) => State::Complete,
                Framing::Sized(bytes) => State::Sized(bytes),
                Framing::Chunked => State::ChunkSize,
                Framing::UntilClose => State::UntilClose,
            },
        }
    }

    /// Whether a closed connection is the end of the body.
    pub(crate) fn ends_at_close(&self) -> bool {
        self.state == State::UntilClose
    }

    /// Takes the next piece of the body off `buf`.
    pub(crate) fn decode(&mut self, buf: &mut BytesMut) -> Result<Decoded, WireError> {
        loop {
            match self.state {
                State::Complete => return Ok(Decoded::End),
                _ if buf.is_empty() => return Ok(Decoded::NeedMore),
                State::UntilClose => return Ok(Decoded::Data(buf.split().freeze())),
                State::Sized(left) => {
                    let (data, left) = take(buf, left);
                    self.state = match left {
                        0 => State::Complete,
                        left => State::Sized(left),
                    };
                    return Ok(Decoded::Data(data));
                }
                State::ChunkData(left) => {
                    let (data, left) = take(buf, left);
                    self.state = match left {
                        0 => State::ChunkEnd,
                        left => State::ChunkData(left),
                    };
                    return Ok(Decoded::Data(data));
                }
                State::ChunkEnd => {
                    if buf.len() < 2 {
                        return Ok(Decoded::NeedMore);
                    }
                    if &buf[..2] != b"\r\n" {
                        return Err(WireError::Chunk("data longer than its size"));
                    }
                    buf.advance(2);
                    self.state = State::ChunkSize;
                }
                State::ChunkSize => {
                    let Some(line) = take_line(buf)? else {
                        return Ok(Decoded::NeedMore);
                    };
                    self.state = match chunk_size(&line)? {
                        0 => State::Trailer,
                        size => State::ChunkData(size),
                    };
                }
                State::Trailer => {
                    let Some(line) = take_line(buf)? else {
                        return Ok(Decoded::NeedMore);
                    };
                    if line.is_empty() {
                        self.state = State::Complete;
                    }
                }
            }
        }
    }
}

fn take(buf: &mut BytesMut, left: u64) -> (Bytes, u64) {
    let length = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
    (buf.split_to(length).freeze(), left - length as u64)
}

/// Takes a line off `buf`, without its end; `None`: it is not complete.
fn take_line(buf: &mut BytesMut) -> Result<Option<BytesMut>, WireError> {
    let Some(end) = memchr::memchr(b'\n', buf) else {
        return match buf.len() {
            length if length > LINE_BYTES_MAX => Err(WireError::Chunk("a line without end")),
            _ => Ok(None),
        };
    };
    if end > LINE_BYTES_MAX {
        return Err(WireError::Chunk("a line without end"));
    }
    let mut line = buf.split_to(end + 1);
    line.truncate(end);
    if line.last() != Some(&b'\r') {
        return Err(WireError::Chunk("a line ends without a carriage return"));
    }
    line.truncate(end - 1);
    Ok(Some(line))
}

fn chunk_size(line: &[u8]) -> Result<u64, WireError> {
    let digits = line.split(|&b| b == b';').next().unwrap_or_default();
    let digits = digits.trim_ascii_end();
    if digits.is_empty() || digits.len() > 15 {
        return Err(WireError::Chunk("the size is not a number"));
    }
    digits.iter().try_fold(0, |size, &digit| {
        let value = (digit as char).to_digit(16);
        let value = value.ok_or(WireError::Chunk("the size is not a number"))?;
        Ok(size << 4 | u64::from(value))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head(text: &str) -> Result<Option<ResponseHead>, WireError> {
        take_head(&mut BytesMut::from(text), &Method::POST)
    }

    /// Decodes `bytes`, which arrive in pieces of at most `piece`. The body, whether it is complete, and
    /// the rest.
    fn decode(
        framing: Framing,
        bytes: &[u8],
        piece: usize,
    ) -> Result<(Vec<u8>, bool, Vec<u8>), WireError> {
        let mut decoder = BodyDecoder::new(framing);
        let (mut buf, mut body) = (BytesMut::new(), Vec::new());
        for piece in bytes.chunks(piece) {
            buf.extend_from_slice(piece);
            while let Decoded::Data(data) = decoder.decode(&mut buf)? {
                body.extend_from_slice(&data);
            }
        }
        let complete = decoder.decode(&mut buf)? == Decoded::End;
        Ok((body, complete, buf.to_vec()))
    }

    #[test]
    fn heads_say_how_long_the_body_is() {
        let of = |text: &str| head(text).unwrap().unwrap();
        let sized = of("HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n");
        assert_eq!(
            (sized.framing, sized.keep_alive),
            (Framing::Sized(12), true)
        );
        let chunked = of("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nX-A: b\r\n\r\n");
        assert_eq!(chunked.framing, Framing::Chunked);
        assert_eq!(chunked.headers.len(), 1, "{:?}", chunked.headers);
        let closed = of("HTTP/1.0 200 OK\r\n\r\n");
        assert_eq!(
            (closed.framing, closed.keep_alive),
            (Framing::UntilClose, false)
        );
        let interim = of(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\nConnection: close, x-b\r\nx-b: 1\r\n\r\n",
        );
        assert_eq!(
            (interim.framing, interim.keep_alive),
            (Framing::Sized(0), false)
        );
        assert!(interim.headers.is_empty(), "{:?}", interim.headers);
        assert!(head("HTTP/1.1 200 OK\r\ncontent-le").unwrap().is_none());
    }

    #[test]
    fn garbage_and_ambiguity_are_refused() {
        for text in [
            "SSH-2.0-OpenSSH_9\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            "HTTP/1.1 999 What\r\ntransfer-encoding: chunked, gzip\r\n\r\n",
        ] {
            assert!(head(text).is_err(), "{text}");
        }
        let long = format!("HTTP/1.1 200 OK\r\nx: {}", "a".repeat(HEAD_BYTES_MAX));
        assert_eq!(head(&long).unwrap_err(), WireError::HeadTooLong);
        for chunks in [
            "x\r\n",
            "\r\n",
            "ffffffffffffffff\r\n",
            "1\r\nabc",
            "1\nab\r\n",
        ] {
            let outcome = decode(Framing::Chunked, chunks.as_bytes(), 100);
            assert!(outcome.is_err(), "{chunks:?}");
        }
    }

    #[test]
    fn requests_carry_no_headers_of_the_clients_connection() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "front"),
            ("connection", "x-private, keep-alive"),
            ("x-private", "1"),
            ("te", "trailers"),
            ("content-length", "5"),
            ("expect", "100-continue"),
            ("authorization", "Bearer client"),
            ("content-type", "application/json"),
            ("x-request-id", "7"),
        ] {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            );
        }
        let lines = write_headers(&headers);
        let head = write_head(
            &Method::POST,
            ["/v", "/v1/completions?a=b"],
            "gpu:1",
            Some(b"Bearer engine"),
            &lines,
            7,
        );
        assert_eq!(
            std::str::from_utf8(&head).unwrap(),
            "POST /v/v1/completions?a=b HTTP/1.1\r\nhost: gpu:1\r\ncontent-type: application/json\r\n\
             x-request-id: 7\r\nauthorization: Bearer engine\r\ncontent-length: 7\r\n\r\n"
        );
    }

    proptest! {
        #[test]
        fn chunks_are_joined_however_they_arrive(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..50), 0..8),
            at in 1usize..40,
        ) {
            let mut wire = Vec::new();
            for piece in &pieces {
                wire.extend_from_slice(format!("{:X};ext=1\r\n", piece.len()).as_bytes());
                wire.extend_from_slice(piece);
                wire.extend_from_slice(b"\r\n");
            }
            wire.extend_from_slice(b"0\r\nTrailer: x\r\n\r\nHTTP");
            let (body, complete, left) = decode(Framing::Chunked, &wire, at).unwrap();
            prop_assert_eq!(body, pieces.concat());
            prop_assert!(complete);
            prop_assert_eq!(&left[..], b"HTTP");
            let cut = wire.len() - 5;
            let (_, complete, _) = decode(Framing::Chunked, &wire[..cut], at).unwrap();
            prop_assert!(!complete, "an answer that breaks off is not complete");
        }
    }
}
