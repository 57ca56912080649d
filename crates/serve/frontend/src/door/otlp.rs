//! Spans of requests, exported to an OpenTelemetry collector: OTLP over HTTP, as JSON
//! (<https://opentelemetry.io/docs/specs/otlp/#otlphttp>).
//!
//! A request that is sampled has one span. Its shard hands it over at its end, and never waits: a span for which there is
//! no room, or that the collector does not take, is dropped and counted. A thread of its own sends them in batches.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use hyper::Method;
use hyper::header::RETRY_AFTER;
use serde_json::{Value, json};
use slipstream_base::text::foreign;
use slipstream_base::width::nanos;
use slipstream_config::cluster::EngineUrl;
use slipstream_metrics::{Collector, Family};

use crate::door::access::{AnswerEnd, Entry};
use crate::door::outbox::{Handed, Outbox};
use crate::door::trace_context::Span;
use crate::wire::{self, BodyDecoder, Decoded};

/// Spans that may wait to be sent.
const QUEUE: usize = 4096;

/// Spans that are sent at once, and the longest time that one waits for others.
const BATCH: usize = 512;
const BATCH_WAIT: Duration = Duration::from_secs(1);

/// Time for one request to the collector.
const SEND_TIME: Duration = Duration::from_secs(5);

/// Times that a batch is sent, and the longest pause before the next time.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// Answer of a collector that is read, bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// Time at the end for spans that wait to be sent.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct Counts {
    handed: Arc<Handed>,
    exported: AtomicU64,
    /// The collector could not be reached, or answered with an error.
    failed: AtomicU64,
    /// The collector took the batch without them.
    rejected: AtomicU64,
    /// The server ended before they were sent.
    unsent: AtomicU64,
    closing: AtomicBool,
}

impl Counts {
    fn settled(&self) -> u64 {
        [&self.exported, &self.failed, &self.rejected, &self.unsent]
            .iter()
            .map(|count| count.load(Relaxed))
            .sum()
    }
}

/// Sends spans to a collector. Those that wait are sent when it is dropped.
pub struct SpanExporter {
    outbox: Outbox,
    counts: Arc<Counts>,
}

impl fmt::Debug for SpanExporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpanExporter({:?})", self.counts)
    }
}

impl SpanExporter {
    /// Starts the thread that sends spans of `service` to the collector at `url`, such as `http://127.0.0.1:4318`.
    ///
    /// # Errors
    /// The thread cannot be made.
    pub fn start(url: EngineUrl, service: &str) -> io::Result<SpanExporter> {
        let counts: Arc<Counts> = Arc::default();
        let sender = Sender {
            resource: resource(service),
            counts: counts.clone(),
            url,
            failing: false,
        };
        let run = move |receive: &Receiver<_>| sender.run(receive);
        let outbox = Outbox::start("otlp", QUEUE, counts.handed.clone(), run)?;
        Ok(SpanExporter { outbox, counts })
    }

    /// Hands over the span of a request, if there is room.
    pub(crate) fn send(&self, entry: Box<Entry>) {
        self.outbox.send(entry);
    }

    /// Waits for spans, if the process ends without dropping the exporter.
    pub fn flusher(&self) -> SpanFlusher {
        SpanFlusher(self.counts.clone())
    }

    /// Counts of its spans.
    pub fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(self.counts.clone(), Arc::clone, FAMILIES)
    }
}

impl Drop for SpanExporter {
    fn drop(&mut self) {
        self.counts.closing.store(true, Release);
        // A collector may not answer.
        if !self.outbox.close(CLOSE_WAIT) {
            tracing::warn!("not all spans were sent to the collector within {CLOSE_WAIT:?}");
        }
    }
}

/// Waits until spans are sent.
#[derive(Clone, Debug)]
pub struct SpanFlusher(Arc<Counts>);

impl SpanFlusher {
    /// Waits for the spans that were handed over before, `time` at most. Returns whether all are sent or dropped.
    pub fn flush(&self, time: Duration) -> bool {
        let counts = &self.0;
        counts.closing.store(true, Release);
        counts.handed.await_settled(time, || counts.settled())
    }
}

/// The collector's answer to a batch.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// It took the batch without `rejected` spans.
    Taken { rejected: u64, why: String },
    /// It may take it later.
    Later {
        after: Option<Duration>,
        why: String,
    },
    /// It will not take it.
    Never { why: String },
}

/// The thread that sends.
struct Sender {
    url: EngineUrl,
    resource: Value,
    counts: Arc<Counts>,
    /// The last batch was not taken, which was logged.
    failing: bool,
}

impl Sender {
    fn run(mut self, receive: &Receiver<Box<Entry>>) {
        let mut spans = Vec::new();
        let mut full_at = Instant::now();
        loop {
            let wait = if spans.is_empty() {
                BATCH_WAIT
            } else {
                full_at.saturating_duration_since(Instant::now())
            };
            let collects = match receive.recv_timeout(wait) {
                Ok(entry) => {
                    if spans.is_empty() {
                        full_at = Instant::now() + BATCH_WAIT;
                    }
                    spans.extend(span_json(&entry));
                    spans.len() < BATCH
                        && !self.counts.closing.load(Acquire)
                        && Instant::now() < full_at
                }
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => {
                    self.export(&spans);
                    return;
                }
            };
            if !collects {
                while spans.len() < BATCH
                    && let Ok(entry) = receive.try_recv()
                {
                    spans.extend(span_json(&entry));
                }
                self.export(&spans);
                spans.clear();
            }
        }
    }

    /// Sends a batch until the collector has taken or refused it, a few times at most.
    fn export(&mut self, spans: &[Value]) {
        let count = spans.len() as u64;
        if count == 0 {
            return;
        }
        let scope = json!({"name": "slipstream", "version": env!("CARGO_PKG_VERSION")});
        let body = json!({"resourceSpans": [{
            "resource": self.resource,
            "scopeSpans": [{"scope": scope, "spans": spans}],
        }]})
        .to_string();
        let mut pause = PAUSE;
        for left in (0..TRIES).rev() {
            let outcome = self.post(body.as_bytes()).unwrap_or_else(|error| {
                let why = error.to_string();
                Outcome::Later { after: None, why }
            });
            let (why, dropped) = match outcome {
                Outcome::Taken { rejected, why } => {
                    let rejected = rejected.min(count);
                    self.counts.exported.fetch_add(count - rejected, Relaxed);
                    if rejected == 0 {
                        if std::mem::take(&mut self.failing) {
                            tracing::info!("spans are exported again");
                        }
                        return;
                    }
                    self.counts.rejected.fetch_add(rejected, Relaxed);
                    (format!("it rejected {rejected} of {count}: {why}"), 0)
                }
                Outcome::Later { after, why } if left > 0 => {
                    let wait = after.unwrap_or(pause).min(PAUSE_MAX);
                    pause *= 2;
                    if self.pause(wait) {
                        continue;
                    }
                    self.counts.unsent.fetch_add(count, Relaxed);
                    (why, 0)
                }
                Outcome::Later { why, .. } | Outcome::Never { why } => (why, count),
            };
            self.counts.failed.fetch_add(dropped, Relaxed);
            if !std::mem::replace(&mut self.failing, true) {
                tracing::warn!(
                    "the collector {} does not take spans ({why}); they are dropped",
                    self.url
                );
            }
            return;
        }
    }

    /// Waits. False: the server ends.
    fn pause(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            if self.counts.closing.load(Acquire) {
                return false;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            // A flush does not wake it.
            std::thread::park_timeout(left.min(Duration::from_millis(100)));
        }
    }

    fn post(&self, body: &[u8]) -> io::Result<Outcome> {
        let end = Instant::now() + SEND_TIME;
        let mut stream = self.connect(end)?;
        let head = wire::write_head(
            &Method::POST,
            [&self.url.prefix, "/v1/traces"],
            &self.url.authority(),
            None,
            b"content-type: application/json\r\nconnection: close\r\n",
            body.len(),
        );
        set_time(&stream, end)?;
        stream.write_all(&head)?;
        stream.write_all(body)?;
        read_answer(&mut stream, end)
    }

    fn connect(&self, end: Instant) -> io::Result<TcpStream> {
        let mut error = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
        for address in (self.url.host.as_str(), self.url.port).to_socket_addrs()? {
            let left = left(end)?;
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Ok(stream),
                Err(failed) => error = failed,
            }
        }
        Err(error)
    }
}

/// The time until `end`.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("it did not answer within {SEND_TIME:?}"),
        ));
    }
    Ok(left)
}

fn set_time(stream: &TcpStream, end: Instant) -> io::Result<()> {
    let left = left(end)?;
    stream.set_read_timeout(Some(left))?;
    stream.set_write_timeout(Some(left))
}

fn read_answer(stream: &mut TcpStream, end: Instant) -> io::Result<Outcome> {
    let invalid = |error: wire::WireError| io::Error::new(io::ErrorKind::InvalidData, error);
    let mut buf = BytesMut::new();
    let fill = |stream: &mut TcpStream, buf: &mut BytesMut| -> io::Result<usize> {
        set_time(stream, end)?;
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece)?;
        buf.extend_from_slice(&piece[..read]);
        Ok(read)
    };
    let head = loop {
        if let Some(head) = wire::take_head(&mut buf, &Method::POST).map_err(invalid)? {
            break head;
        }
        if fill(stream, &mut buf)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    };
    let mut decoder = BodyDecoder::new(head.framing);
    let mut body = Vec::new();
    // Of a broken or endless answer its status counts.
    while body.len() < ANSWER_BYTES_MAX {
        match decoder.decode(&mut buf) {
            Ok(Decoded::Data(data)) => body.extend_from_slice(&data),
            Ok(Decoded::End) | Err(_) => break,
            Ok(Decoded::NeedMore) => {
                if !matches!(fill(stream, &mut buf), Ok(1..)) {
                    break;
                }
            }
        }
    }
    let after = head.headers.get(RETRY_AFTER);
    let after = after.and_then(|value| value.to_str().ok()?.parse().ok());
    Ok(judge(
        head.status.as_u16(),
        after.map(Duration::from_secs),
        &body,
    ))
}

/// The outcome of a batch, from the answer to it. Statuses that may be retried are those of the specification.
fn judge(status: u16, after: Option<Duration>, body: &[u8]) -> Outcome {
    let text = || -> String {
        let text = String::from_utf8_lossy(body);
        let text: String = text.chars().take(200).collect();
        foreign(&text).into_owned()
    };
    match status {
        200..=299 => {
            let answer: Value = serde_json::from_slice(body).unwrap_or_default();
            let partial = &answer["partialSuccess"];
            let rejected = &partial["rejectedSpans"];
            // 64-bit numbers are strings in this JSON; some collectors write numbers.
            let rejected = rejected
                .as_u64()
                .or_else(|| rejected.as_str()?.parse().ok());
            let why = partial["errorMessage"].as_str().unwrap_or_default();
            Outcome::Taken {
                rejected: rejected.unwrap_or(0),
                why: why.chars().take(200).collect(),
            }
        }
        429 | 502..=504 => Outcome::Later {
            after,
            why: format!("status {status}: {}", text()),
        },
        _ => Outcome::Never {
            why: format!("status {status}: {}", text()),
        },
    }
}

fn text(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

/// 64-bit numbers are strings in OTLP's JSON.
fn number(key: &str, value: u64) -> Value {
    json!({"key": key, "value": {"intValue": value.to_string()}})
}

fn resource(service: &str) -> Value {
    let instance = crate::door::trace_context::fresh_request_id();
    json!({"attributes": [
        text("service.name", service),
        text("service.version", env!("CARGO_PKG_VERSION")),
        text("service.instance.id", &instance),
    ]})
}

/// Known paths, so that there are few names of spans.
const ROUTES: &[&str] = &[
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/generate",
];

fn route(path: &str) -> Option<&str> {
    match path {
        _ if path.starts_with("/v1/responses/") => Some("/v1/responses/{id}"),
        _ if path.starts_with("/v1/models/") => Some("/v1/models/{model}"),
        _ => ROUTES.iter().find(|&&route| route == path).copied(),
    }
}

/// The span of a request; `None`: it has none. Names of attributes are those of the semantic conventions where they have
/// one (<https://opentelemetry.io/docs/specs/semconv/>).
fn span_json(entry: &Entry) -> Option<Value> {
    let Span { trace, id, parent } = entry.span.as_ref()?;
    let method = match &*entry.method {
        known @ ("GET" | "HEAD" | "POST" | "PUT" | "DELETE" | "PATCH" | "OPTIONS") => known,
        _ => "_OTHER",
    };
    let route = route(&entry.path);
    // A wall clock that is set between begin and end moves both.
    let unix_ns = |at: u64| {
        let ended = nanos(entry.unix);
        ended.saturating_sub(entry.ended_ns.saturating_sub(at))
    };
    let mut attributes = vec![
        text("http.request.method", method),
        text("url.path", &entry.path),
        text("slipstream.request_id", &entry.request_id),
        number(
            "slipstream.attempts",
            u64::from(1 + entry.retries + entry.resumes),
        ),
        number("slipstream.resumes", entry.resumes.into()),
        text("slipstream.end", entry.end.name()),
    ];
    attributes.extend(route.map(|route| text("http.route", route)));
    if entry.status > 0 {
        attributes.push(number("http.response.status_code", entry.status.into()));
    }
    let texts = [
        ("gen_ai.request.model", &entry.model),
        ("slipstream.engine", &entry.engine),
    ];
    attributes.extend(
        texts
            .iter()
            .filter_map(|(key, value)| Some(text(key, value.as_deref()?))),
    );
    let numbers = [
        ("gen_ai.usage.input_tokens", entry.prompt_tokens),
        ("gen_ai.usage.output_tokens", entry.completion_tokens),
    ];
    attributes.extend(
        numbers
            .iter()
            .filter_map(|(key, value)| Some(number(key, (*value)?))),
    );
    let is_error = entry.status >= 500 || entry.end == AnswerEnd::Broken;
    if is_error {
        let kind = match entry.end {
            AnswerEnd::Broken => "broken".to_owned(),
            _ => entry.status.to_string(),
        };
        attributes.push(text("error.type", &kind));
    }
    let mut span = json!({
        "traceId": trace.as_str(),
        "spanId": id,
        "name": route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}")),
        "kind": 2, // of a server
        "startTimeUnixNano": unix_ns(entry.begun_ns).to_string(),
        "endTimeUnixNano": unix_ns(entry.ended_ns).to_string(),
        "attributes": attributes,
        // Sampled; and whether its parent is another process's.
        "flags": 0x101 | if parent.is_some() { 0x200 } else { 0 },
        "status": if is_error { json!({"code": 2}) } else { json!({}) },
    });
    if let Some(parent) = parent {
        span["parentSpanId"] = json!(parent);
    }
    if entry.first_ns > 0 {
        span["events"] = json!([{
            "name": "first_token",
            "timeUnixNano": unix_ns(entry.first_ns).to_string(),
        }]);
    }
    Some(span)
}

const FAMILIES: &[Family<Arc<Counts>>] = &[
    Family::total(
        "slipstream_trace_spans_exported",
        "Spans that the collector took",
        |of| of.exported.load(Relaxed),
    ),
    Family::counter(
        "slipstream_trace_spans_dropped",
        "Spans that were dropped",
        |of, samples| {
            samples.add(&[("reason", "queue")], of.handed.crowded());
            samples.add(&[("reason", "send")], of.failed.load(Relaxed));
            samples.add(&[("reason", "rejected")], of.rejected.load(Relaxed));
            samples.add(&[("reason", "shutdown")], of.unsent.load(Relaxed));
        },
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        Entry {
            method: "POST".into(),
            path: "/v1/completions".into(),
            status: 200,
            begun_ns: 1_000,
            first_ns: 3_000,
            ended_ns: 11_000,
            retries: 1,
            resumes: 2,
            unix: Duration::from_micros(1_700_000_000_000_010),
            end: AnswerEnd::Complete,
            span: Some(Span::example()),
            ..Entry::default()
        }
    }

    #[test]
    fn a_span_has_the_times_and_attempts_of_its_request() {
        let span = span_json(&entry()).unwrap();
        assert_eq!(span["startTimeUnixNano"], "1700000000000000000");
        assert_eq!(span["endTimeUnixNano"], "1700000000000010000");
        assert_eq!(span["events"][0]["timeUnixNano"], "1700000000000002000");
        assert_eq!(span["name"], "POST /v1/completions");
        assert_eq!(span["parentSpanId"], "00f067aa0ba902b7");
        let attributes = span["attributes"].as_array().unwrap();
        let attempts = attributes
            .iter()
            .find(|of| of["key"] == "slipstream.attempts");
        assert_eq!(attempts.unwrap()["value"]["intValue"], "4");
        assert_eq!(span["status"], json!({}));
        let broken = span_json(&Entry {
            end: AnswerEnd::Broken,
            ..entry()
        })
        .unwrap();
        assert_eq!(broken["status"]["code"], 2);
        assert!(
            span_json(&Entry {
                span: None,
                ..entry()
            })
            .is_none()
        );
        // Clients choose paths and methods, and would choose the names of spans by them.
        let odd = Entry {
            path: "/v1/x".into(),
            method: "BREW".into(),
            ..entry()
        };
        assert_eq!(span_json(&odd).unwrap()["name"], "_OTHER");
    }

    #[test]
    fn answers_of_collectors_are_read_as_specified() {
        let taken = |rejected, why: &str| Outcome::Taken {
            rejected,
            why: why.into(),
        };
        assert_eq!(judge(200, None, b"{}"), taken(0, ""));
        assert_eq!(judge(200, None, b""), taken(0, ""));
        let partial = br#"{"partialSuccess":{"rejectedSpans":"3","errorMessage":"old"}}"#;
        assert_eq!(judge(200, None, partial), taken(3, "old"));
        let as_number = br#"{"partialSuccess":{"rejectedSpans":3}}"#;
        assert_eq!(judge(200, None, as_number), taken(3, ""));
        for status in [429, 502, 503, 504] {
            let after = Some(Duration::from_secs(7));
            let outcome = judge(status, after, b"");
            assert!(
                matches!(outcome, Outcome::Later { after: of, .. } if of == after),
                "{status}"
            );
        }
        for status in [400, 401, 404, 413, 500, 501] {
            assert!(
                matches!(judge(status, None, b"no"), Outcome::Never { .. }),
                "{status}"
            );
        }
    }
}
