//! HTTP/1.1 answers, parsed as they arrive: head, framing, body slices.
//!
//! Written by hand because the load generator must cost far less than the server that it measures:
//! body bytes are read in place, and nothing is allocated per read.

use slipstream_base::width::to_usize;

/// Most bytes of an answer's head.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most header lines of an answer.
const HEADERS_MAX: usize = 100;

/// Why bytes are not an HTTP answer. The connection cannot be used any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HttpError {
    /// The head cannot be parsed.
    #[error("not an HTTP answer: {0}")]
    Head(String),
    /// The head exceeds its limit.
    #[error("the head of the answer is longer than {HEAD_BYTES_MAX} bytes")]
    HeadTooLong,
    /// Chunk framing is broken.
    #[error("broken chunked encoding: {0}")]
    Chunk(&'static str),
    /// The connection was closed within the answer.
    #[error("the connection was closed before the answer was complete")]
    Cut,
}

/// Fields of an answer's head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// Status code.
    pub status: u16,
    /// Whether the body is `text/event-stream`.
    pub event_stream: bool,
    /// Whether the connection may carry another request.
    pub keep_alive: bool,
    /// `Retry-After`, s.
    pub retry_after_s: Option<u32>,
    /// `x-slipstream-trace`.
    pub trace: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Head,
    /// This number of bytes is left.
    Sized(u64),
    /// In the line of a chunk's size.
    ChunkSize {
        size: u64,
        digits: u8,
        extension: bool,
    },
    ChunkData(u64),
    /// Line end after a chunk's data.
    ChunkEnd,
    /// Trailer lines; bytes in the current one.
    Trailer(usize),
    UntilClose,
    Complete,
}

/// Parses one answer.
#[derive(Debug)]
pub struct Parser {
    state: State,
    head_bytes: Vec<u8>,
    head: Head,
}

impl Default for Parser {
    fn default() -> Self {
        Parser {
            state: State::Head,
            head_bytes: Vec::new(),
            head: Head::default(),
        }
    }
}

impl Parser {
    /// The head, once it has arrived.
    pub fn head(&self) -> Option<&Head> {
        (self.state != State::Head).then_some(&self.head)
    }

    /// Whether the answer has arrived in full.
    pub fn is_complete(&self) -> bool {
        self.state == State::Complete
    }

    /// Whether no byte of the answer has arrived.
    pub fn is_untouched(&self) -> bool {
        self.state == State::Head && self.head_bytes.is_empty()
    }

    /// Processes the next bytes, wherever the network split them. Body bytes go to `body` in order,
    /// with the head. Returns how many bytes belong to this answer.
    ///
    /// # Errors
    /// [`HttpError`]; body bytes before the error were passed on.
    pub fn feed(
        &mut self,
        bytes: &[u8],
        mut body: impl FnMut(&Head, &[u8]),
    ) -> Result<usize, HttpError> {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            match &mut self.state {
                State::Head => at += self.feed_head(rest)?,
                State::Sized(left) => {
                    let take = to_usize((*left).min(rest.len() as u64));
                    *left -= take as u64;
                    let over = *left == 0;
                    body(&self.head, &rest[..take]);
                    at += take;
                    if over {
                        self.state = State::Complete;
                    }
                }
                State::ChunkSize { .. } => {
                    self.feed_chunk_size(rest[0])?;
                    at += 1;
                }
                State::ChunkData(left) => {
                    let take = to_usize((*left).min(rest.len() as u64));
                    *left -= take as u64;
                    let over = *left == 0;
                    body(&self.head, &rest[..take]);
                    at += take;
                    if over {
                        self.state = State::ChunkEnd;
                    }
                }
                State::ChunkEnd => {
                    match rest[0] {
                        b'\r' => {}
                        b'\n' => self.state = NEW_CHUNK,
                        _ => return Err(HttpError::Chunk("data longer than its size")),
                    }
                    at += 1;
                }
                State::Trailer(length) => {
                    match rest[0] {
                        b'\r' => {}
                        b'\n' if *length == 0 => self.state = State::Complete,
                        b'\n' => *length = 0,
                        _ if *length >= HEAD_BYTES_MAX => return Err(HttpError::HeadTooLong),
                        _ => *length += 1,
                    }
                    at += 1;
                }
                State::UntilClose => {
                    body(&self.head, rest);
                    at = bytes.len();
                }
                State::Complete => break,
            }
        }
        Ok(at)
    }

    /// The peer closed the connection.
    ///
    /// # Errors
    /// [`HttpError::Cut`] if the answer was not complete.
    pub fn on_close(&mut self) -> Result<(), HttpError> {
        match self.state {
            State::UntilClose | State::Complete => {
                self.state = State::Complete;
                Ok(())
            }
            _ => Err(HttpError::Cut),
        }
    }

    /// Processes bytes of the head; returns how many belong to it.
    fn feed_head(&mut self, bytes: &[u8]) -> Result<usize, HttpError> {
        let before = self.head_bytes.len();
        self.head_bytes.extend_from_slice(bytes);
        // Search the blank line from its earliest possible start.
        let from = before.saturating_sub(3);
        let end = memchr::memmem::find(&self.head_bytes[from..], b"\r\n\r\n");
        let Some(end) = end.map(|i| from + i + 4) else {
            if self.head_bytes.len() > HEAD_BYTES_MAX {
                return Err(HttpError::HeadTooLong);
            }
            // Refuse bytes that cannot become an answer at once, not after 64 KiB.
            if !b"HTTP/1.".starts_with(&self.head_bytes[..self.head_bytes.len().min(7)]) {
                return Err(HttpError::Head("it does not begin with HTTP/1.".into()));
            }
            return Ok(bytes.len());
        };
        let state = self.parse_head(end)?;
        self.state = state;
        self.head_bytes.clear();
        Ok(end - before)
    }

    fn parse_head(&mut self, end: usize) -> Result<State, HttpError> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut answer = httparse::Response::new(&mut headers);
        answer
            .parse(&self.head_bytes[..end])
            .map_err(|e| HttpError::Head(e.to_string()))?;
        let status = answer.code.unwrap_or(0);
        let mut head = Head {
            status,
            keep_alive: answer.version == Some(1),
            ..Head::default()
        };
        let (mut chunked, mut length) = (false, None);
        for header in answer.headers.iter() {
            let value = std::str::from_utf8(header.value).unwrap_or_default().trim();
            let is = |name: &str| header.name.eq_ignore_ascii_case(name);
            if is("transfer-encoding") {
                chunked = value.to_ascii_lowercase().ends_with("chunked");
            } else if is("content-length") {
                let parsed = value.parse().map_err(|_| {
                    HttpError::Head(format!("content-length {value:?} is not a number"))
                })?;
                length = Some(parsed);
            } else if is("content-type") {
                head.event_stream = value.to_ascii_lowercase().starts_with("text/event-stream");
            } else if is("connection") {
                head.keep_alive &= !value.eq_ignore_ascii_case("close");
            } else if is("retry-after") {
                head.retry_after_s = value.parse().ok();
            } else if is("x-slipstream-trace") {
                head.trace = Some(value.to_owned());
            }
        }
        self.head = head;
        Ok(match (status, chunked, length) {
            // An interim answer: the real one follows.
            (100..=199, ..) => State::Head,
            (204 | 304, ..) => State::Complete,
            (_, true, _) => NEW_CHUNK,
            (_, _, Some(0)) => State::Complete,
            (_, _, Some(length)) => State::Sized(length),
            (_, _, None) => {
                self.head.keep_alive = false;
                State::UntilClose
            }
        })
    }

    fn feed_chunk_size(&mut self, byte: u8) -> Result<(), HttpError> {
        let State::ChunkSize {
            size,
            digits,
            extension,
        } = &mut self.state
        else {
            unreachable!("called in this state only")
        };
        match byte {
            b'\n' if *digits == 0 => return Err(HttpError::Chunk("a chunk without a size")),
            b'\n' if *size == 0 => self.state = State::Trailer(0),
            b'\n' => self.state = State::ChunkData(*size),
            b'\r' | b' ' | b'\t' => {}
            b';' => *extension = true,
            _ if *extension => {}
            _ => {
                let digit = (byte as char).to_digit(16);
                let digit = digit.ok_or(HttpError::Chunk("a size that is not hexadecimal"))?;
                *digits += 1;
                if *digits > 15 {
                    return Err(HttpError::Chunk("a size of more than 15 digits"));
                }
                *size = *size << 4 | u64::from(digit);
            }
        }
        Ok(())
    }
}

const NEW_CHUNK: State = State::ChunkSize {
    size: 0,
    digits: 0,
    extension: false,
};

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `bytes` in pieces of `step` and returns the body, the bytes taken, and the parser.
    fn check(bytes: &[u8], step: usize) -> Result<(Vec<u8>, usize, Parser), HttpError> {
        let (mut parser, mut out, mut taken) = (Parser::default(), Vec::new(), 0);
        for piece in bytes.chunks(step) {
            let used = parser.feed(piece, |_, body| out.extend_from_slice(body))?;
            taken += used;
            if used < piece.len() {
                break;
            }
        }
        Ok((out, taken, parser))
    }

    const CHUNKED: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\
        Content-Type: text/event-stream; charset=utf-8\r\n\r\n5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nA: b\r\n\r\n";

    #[test]
    fn chunked_body_wherever_it_is_cut() {
        for step in 1..=CHUNKED.len() {
            let (body, taken, parser) = check(CHUNKED, step).unwrap();
            assert_eq!(body, b"hello world");
            assert_eq!(taken, CHUNKED.len());
            assert!(parser.is_complete() && parser.head().unwrap().event_stream);
            assert!(parser.head().unwrap().keep_alive);
        }
    }

    #[test]
    fn what_follows_a_sized_body_is_left() {
        let bytes = b"HTTP/1.1 503 No\r\ncontent-length: 3\r\nRetry-After: 7\r\nConnection: close\r\n\r\nabcNEXT";
        for step in 1..=bytes.len() {
            let (body, taken, parser) = check(bytes, step).unwrap();
            assert_eq!((&body[..], taken), (&b"abc"[..], bytes.len() - 4));
            let head = parser.head().unwrap();
            assert_eq!(
                (head.status, head.retry_after_s, head.keep_alive),
                (503, Some(7), false)
            );
        }
    }

    #[test]
    fn an_interim_answer_is_passed_over() {
        let bytes = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx";
        let (body, _, parser) = check(bytes, 5).unwrap();
        assert_eq!((&body[..], parser.head().unwrap().status), (&b"x"[..], 200));
    }

    #[test]
    fn a_body_without_length_ends_with_the_connection() {
        let (body, _, mut parser) = check(b"HTTP/1.0 200 OK\r\n\r\nabc", 4).unwrap();
        assert_eq!(body, b"abc");
        assert!(!parser.is_complete());
        assert_eq!(parser.on_close(), Ok(()));
        assert!(parser.is_complete() && !parser.head().unwrap().keep_alive);
    }

    #[test]
    fn a_close_within_the_answer_is_an_error() {
        for cut in 1..CHUNKED.len() - 1 {
            let (_, _, mut parser) = check(&CHUNKED[..cut], 7).unwrap();
            assert_eq!(parser.on_close(), Err(HttpError::Cut), "cut at {cut}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let chunked = |body: &str| {
            format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{body}").into_bytes()
        };
        for bytes in [
            b"SSH-2.0-OpenSSH\r\n".to_vec(),
            b"HTTP/1.1 abc\r\n\r\n".to_vec(),
            b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n".to_vec(),
            chunked("zz\r\n"),
            chunked("\r\n"),
            chunked("2\r\nabc"),
            chunked("11111111111111111\r\n"),
            [
                b"HTTP/1.1 200 OK\r\nx: ".to_vec(),
                vec![b'a'; HEAD_BYTES_MAX],
            ]
            .concat(),
        ] {
            assert!(
                check(&bytes, 16).is_err(),
                "{}",
                String::from_utf8_lossy(&bytes[..40.min(bytes.len())])
            );
        }
    }
}
