//! One attempt at one engine: sends the request, and reads the beginning of the answer, which decides on a retry.

use bytes::{Bytes, BytesMut};
use hyper::StatusCode;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderValue};

use super::Upstream;
use super::api::Api;
use super::connection::Connection;
use super::disagg;
use super::ends;
use super::engines::Engine;
use super::exchange::{Exchange, Outgoing};
use super::failure::Failure;
use super::reported::Reported;
use super::sse::{self, Scanner};
use super::turn::Turn;
use super::visit::Visit;
use crate::wire::{self, BodyDecoder, Decoded, Framing, ResponseHead};

/// An answer with a length up to this is sent on once it is whole: until then another engine may be asked.
const WHOLE_BYTES_MAX: u64 = 256 << 10;

/// An answer as far as it was read.
pub(super) struct Answer {
    pub(super) connection: Connection,
    pub(super) head: ResponseHead,
    pub(super) decoder: BodyDecoder,
    pub(super) first: Bytes,
    /// `first` is all of it.
    pub(super) complete: bool,
}

/// Sends a request to an engine, and reads the first bytes of its answer.
pub(super) async fn converse(
    upstream: &Upstream,
    visit: &Visit,
    outgoing: &Outgoing<'_>,
) -> Result<Answer, Failure> {
    let engine = visit.engine();
    // Whether a request on a reused connection that breaks has reached the engine is not known.
    let idle = outgoing.repeats.then(|| upstream.take_idle(engine));
    if let Some(connection) = idle.flatten() {
        match converse_on(connection, engine, outgoing).await {
            // The engine closed an idle connection as the request was sent. A new connection shows whether
            // it is there.
            Err(Failure::Lost(_)) => {}
            outcome => return outcome,
        }
    }
    let limit = upstream.engines.settings.connect_timeout;
    let connection = Connection::open(engine, limit).await?;
    converse_on(connection, engine, outgoing).await
}

async fn converse_on(
    mut connection: Connection,
    engine: &Engine,
    outgoing: &Outgoing<'_>,
) -> Result<Answer, Failure> {
    let body = &outgoing.body;
    let head = wire::write_head(
        outgoing.method,
        [&engine.spec.url.prefix, outgoing.target],
        &engine.authority,
        engine.authorization.as_deref().or(outgoing.authorization),
        &outgoing.headers,
        body[0].len() + body[1].len(),
    );
    let sent = connection.send(head, body).await;
    // An engine may answer before it has read the body, and close: `413`.
    let mut head = match (connection.read_head(outgoing.method).await, sent) {
        (Ok(head), _) => head,
        (Err(_), Err(failure)) | (Err(failure), Ok(())) => return Err(failure),
    };
    if let Some(coding) = coding_of(&head).filter(|_| outgoing.api != Api::Other)
        && head.status.is_success()
    {
        return Err(Failure::Reported(Reported::by_engine(format!(
            "its answer is compressed (`Content-Encoding: {}`), although the request accepts `identity` only: the router \
             must read it; do not compress between router and engine",
            String::from_utf8_lossy(coding.as_bytes())
        ))));
    }
    let first = first_bytes(&mut connection, &mut head, outgoing).await?;
    let FirstBytes {
        decoder,
        bytes: first,
        complete,
    } = first;
    Ok(Answer {
        connection,
        head,
        decoder,
        first,
        complete,
    })
}

/// The coding in which a body must be read, if it is not the body itself.
fn coding_of(head: &ResponseHead) -> Option<&HeaderValue> {
    let coding = head.headers.get(CONTENT_ENCODING)?;
    let is_none = coding.is_empty() || coding.as_bytes().eq_ignore_ascii_case(b"identity");
    (!is_none).then_some(coding)
}

/// The beginning of a body.
struct FirstBytes {
    decoder: BodyDecoder,
    bytes: Bytes,
    /// Whether they are the complete body.
    complete: bool,
}

/// The part of a body that must be judged before the client gets any of it: a short answer completely; of a stream of events
/// the first one, which may be an error of the engine.
struct Beginning {
    bytes: BytesMut,
    /// Whether the answer has a known API and a status of success.
    judges: bool,
    /// Whether the complete body is needed, if it is short.
    wants_all: bool,
    /// Set if the body is events.
    scanner: Option<Scanner>,
    /// End of the events that were searched for content.
    searched: usize,
    /// Whether comments before the answer are for the client.
    streams: bool,
}

impl Beginning {
    fn new(head: &ResponseHead, outgoing: &Outgoing<'_>) -> Beginning {
        let is_known = outgoing.api != Api::Other && coding_of(head).is_none();
        let judges = is_known && head.status.is_success();
        let is_short = match head.framing {
            Framing::Sized(bytes) => bytes <= WHOLE_BYTES_MAX,
            Framing::Chunked | Framing::UntilClose => is_known && !head.is_event_stream(),
        };
        Beginning {
            bytes: BytesMut::new(),
            judges,
            wants_all: is_short || head.status == StatusCode::SERVICE_UNAVAILABLE,
            scanner: (judges && head.is_event_stream()).then(Scanner::default),
            searched: 0,
            streams: outgoing.streams,
        }
    }

    /// Adds the next bytes. Returns whether more are needed.
    fn add(&mut self, data: &[u8], head: &mut ResponseHead) -> bool {
        let is_first = self.bytes.is_empty();
        if is_first && self.judges && self.scanner.is_none() && sse::begins(data) {
            // Clients go by the type, which some engines do not set.
            head.headers.insert(CONTENT_TYPE, EVENT_STREAM.clone());
            self.scanner = Some(Scanner::default());
            self.wants_all &= matches!(head.framing, Framing::Sized(_));
        }
        let before = self.bytes.len();
        self.bytes.extend_from_slice(data);
        let is_begun = match &mut self.scanner {
            Some(scanner) => {
                let whole = if scanner.takes_whole(data) {
                    data.len()
                } else {
                    scanner.feed(data)
                };
                let end = before + whole;
                let has_content = || sse::have_content(&self.bytes[self.searched..end]);
                let is_begun = whole > 0 && (self.streams || has_content());
                self.searched = if whole > 0 { end } else { self.searched };
                is_begun
            }
            None => true,
        };
        (self.wants_all || !is_begun) && self.bytes.len() as u64 <= WHOLE_BYTES_MAX
    }

    /// Judges the bytes read. `complete`: they are the complete body.
    ///
    /// # Errors
    /// The engine's failure, in spite of the status.
    fn judge(
        self,
        api: Api,
        head: &mut ResponseHead,
        decoder: BodyDecoder,
        complete: bool,
    ) -> Result<FirstBytes, Failure> {
        let bytes = self.bytes.freeze();
        let is_json = complete && bytes.trim_ascii_start().starts_with(b"{");
        let mut is_events = self.scanner.is_some();
        if is_events && is_json {
            head.headers.insert(CONTENT_TYPE, JSON.clone());
            is_events = false;
        }
        if is_events {
            ends::check_beginning(api, &bytes, complete)?;
        } else if self.judges && complete {
            ends::check_whole(api, &bytes).map_err(Failure::Reported)?;
        }
        Ok(FirstBytes {
            decoder,
            bytes,
            // Whether a stream is complete is for the relay to say.
            complete: complete && !is_events,
        })
    }
}

/// Reads the [`Beginning`] of a body.
async fn first_bytes(
    connection: &mut Connection,
    head: &mut ResponseHead,
    outgoing: &Outgoing<'_>,
) -> Result<FirstBytes, Failure> {
    let mut decoder = BodyDecoder::new(head.framing);
    let mut beginning = Beginning::new(head, outgoing);
    let mut turn = Turn::default();
    let complete = loop {
        if turn.is_over() {
            tokio::task::yield_now().await;
        }
        match decoder.decode(&mut connection.buf) {
            Ok(Decoded::Data(data)) => {
                turn.on_piece();
                if beginning.add(&data, head) {
                    continue;
                }
                // A short answer in one piece often has its end in the same read.
                break false;
            }
            Ok(Decoded::End) => break true,
            Ok(Decoded::NeedMore) => {}
            Err(error) => return Err(Failure::Protocol(error)),
        }
        match std::future::poll_fn(|cx| connection.poll_fill(cx)).await {
            Ok(0) if decoder.ends_at_close() => break true,
            Ok(0) => return Err(Failure::Lost("closed within its answer".into())),
            Ok(read) => turn.on_read(read),
            Err(error) => return Err(Failure::Lost(error.to_string())),
        }
    };
    beginning.judge(outgoing.api, head, decoder, complete)
}

static EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
static JSON: HeaderValue = HeaderValue::from_static("application/json");

/// The body of `answer`; `None` if it is too long.
pub(super) async fn read_rest(answer: &mut Answer) -> Result<Option<Bytes>, Failure> {
    if answer.complete {
        return Ok(Some(answer.first.clone()));
    }
    let mut body = BytesMut::from(&answer.first[..]);
    let mut turn = Turn::default();
    loop {
        if turn.is_over() {
            tokio::task::yield_now().await;
        }
        match answer.decoder.decode(&mut answer.connection.buf) {
            Ok(Decoded::Data(data)) if body.len() + data.len() > disagg::ANSWER_BYTES_MAX => {
                return Ok(None);
            }
            Ok(Decoded::Data(data)) => {
                turn.on_piece();
                body.extend_from_slice(&data);
                continue;
            }
            Ok(Decoded::End) => {
                answer.complete = true;
                return Ok(Some(body.freeze()));
            }
            Ok(Decoded::NeedMore) => {}
            Err(error) => return Err(Failure::Protocol(error)),
        }
        match std::future::poll_fn(|cx| answer.connection.poll_fill(cx)).await {
            Ok(0) if answer.decoder.ends_at_close() => return Ok(Some(body.freeze())),
            Ok(0) => return Err(Failure::Lost("closed within its answer".into())),
            Ok(read) => turn.on_read(read),
            Err(error) => return Err(Failure::Lost(error.to_string())),
        }
    }
}

/// Whether the connection may carry another request after this answer. An engine that refuses a request may
/// not have read its body, and would read it as the next request.
pub(super) fn may_keep(exchange: &Exchange, head: &ResponseHead) -> bool {
    head.keep_alive && (head.status.as_u16() < 400 || exchange.body.is_empty())
}
