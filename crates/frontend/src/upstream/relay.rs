//! An answer on its way from an engine to a client.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderName};
use hyper::{Response, StatusCode};
use slipstream_planes::clock::monotonic_ns;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Upstream;
use super::connection::{Connection, Failure};
use super::engines::{Engine, Engines, Visit};
use super::forward::{Answer, Begun, Exchange, StreamPermit, ends_events, may_keep, obtain};
use super::record::Recording;
use super::resume::{self, Plan, Rewriter};
use super::seat::Seat;
use super::stored;
use super::wire::{BodyDecoder, Decoded, Framing, ResponseHead};
use crate::access::AnswerEnd;
use crate::http::HttpBody;
use crate::openai::ApiError;
use crate::service::Service;
use crate::shard::Shard;

/// Times that one stream continues on another engine.
const RESUMES_MAX: u32 = 3;

/// An event longer than this is sent on in pieces, and its stream cannot continue elsewhere.
const EVENT_BYTES_MAX: usize = 1 << 20;

/// Body of an answer that an engine sends.
pub(crate) struct Relay {
    shard: Rc<Shard>,
    upstream: Rc<Upstream>,
    exchange: Rc<Exchange>,
    status: StatusCode,
    /// Where it comes from; `None`: it is over, or continues elsewhere.
    flow: Option<Flow>,
    /// Read with the head.
    first: Option<Bytes>,
    /// Set for a stream of events: they are sent on whole.
    events: Option<Events>,
    resuming: Option<Resuming>,
    resumes: u32,
    /// Bytes that follow, if that is known.
    left: Option<u64>,
    idle: Option<Pin<Box<Sleep>>>,
    last_ns: u64,
    /// When its client's connection last asked for more, ns.
    asked_ns: u64,
    /// Set while it waits for an engine, not for its client.
    waiting: Option<Waker>,
    /// Why it ended before its client asked for more.
    cut: Option<ApiError>,
    /// The engine that was lost, while the answer may continue elsewhere.
    loss: Option<Loss>,
    /// It broke off; the client first gets the part before.
    broken: Option<io::Error>,
}

type Resuming = Pin<Box<dyn Future<Output = Result<(Begun, Rewriter), String>>>>;

/// An engine that was lost in mid-answer.
struct Loss {
    engine: Arc<Engine>,
    /// With its URL and the failure.
    text: String,
}

/// An answer at an engine.
struct Flow {
    seat: Seat,
    visit: Visit,
    connection: Connection,
    decoder: BodyDecoder,
    keep_alive: bool,
}

/// A stream of server-sent events.
#[derive(Default)]
struct Events {
    /// The beginning of an event whose end has not come.
    held: BytesMut,
    /// The part that was sent on, as long as another engine could continue it.
    sent: Option<Vec<u8>>,
    /// Why `sent` is not kept.
    not_kept: &'static str,
    /// The last event was sent on.
    done: bool,
    /// The client has the beginning of an event without its end.
    is_partial: bool,
    /// Set once another engine continues it.
    rewriter: Option<Rewriter>,
}

impl Relay {
    /// The response whose answer has `begun`.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(super) fn respond(
        shard: &Rc<Shard>,
        upstream: &Rc<Upstream>,
        exchange: Exchange,
        begun: Begun,
    ) -> Result<Response<HttpBody>, ApiError> {
        let Begun {
            seat,
            visit,
            answer,
        } = begun;
        let Answer {
            connection,
            head,
            decoder,
            first,
            complete,
        } = answer;
        let is_events = is_event_stream(&head);
        let mut head = head;
        let mut response = Response::new(HttpBody::whole(None, None));
        *response.status_mut() = head.status;
        let mut left = match head.framing {
            Framing::Sized(bytes) => Some(bytes),
            _ => None,
        };
        if complete {
            visit
                .engine()
                .counters
                .bytes
                .fetch_add(first.len() as u64, Relaxed);
            learn(
                &upstream.engines,
                &exchange,
                visit.engine(),
                head.status,
                is_events,
                &first,
            );
            note(&exchange, head.status, is_events, &first);
            exchange.recorded(Recording::on_complete);
            if may_keep(&exchange, &head) {
                upstream.keep(visit.engine(), connection);
            }
            seat.ended();
            if !exchange.keeps(first.len()) {
                return Err(ApiError::out_of_memory());
            }
            if !first.is_empty() {
                *response.body_mut() = HttpBody::whole(Some(first), exchange.into_charge());
            }
        } else {
            let events = is_events.then(|| Events {
                sent: exchange.stream.map(|_| Vec::new()),
                not_kept: "requests of this kind do not continue",
                ..Events::default()
            });
            if is_events {
                // It may continue on another engine, with another length.
                head.headers.remove(CONTENT_LENGTH);
                left = None;
            }
            let now = monotonic_ns();
            let keep_alive = may_keep(&exchange, &head);
            let relay = Relay {
                shard: shard.clone(),
                upstream: upstream.clone(),
                exchange: Rc::new(exchange),
                status: head.status,
                flow: Some(Flow {
                    seat,
                    visit,
                    connection,
                    decoder,
                    keep_alive,
                }),
                first: Some(first),
                events,
                resuming: None,
                resumes: 0,
                left,
                idle: None,
                last_ns: now,
                asked_ns: now,
                waiting: None,
                cut: None,
                loss: None,
                broken: None,
            };
            let relay = Rc::new(RefCell::new(relay));
            upstream.look_after(&relay);
            *response.body_mut() = HttpBody::relay(relay);
        }
        if !shard.service.origins.is_empty() {
            // The router says which pages may use the API; engines often allow all.
            let allowed: Vec<HeaderName> = head
                .headers
                .keys()
                .filter(|name| name.as_str().starts_with("access-control-"))
                .cloned()
                .collect();
            for name in allowed {
                head.headers.remove(name);
            }
        }
        *response.headers_mut() = head.headers;
        Ok(response)
    }

    /// The next piece of the body, as the engine sent it. `None`: it is complete.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Ok(Some(first)));
        }
        let flow = self.flow.as_mut().expect("the answer is not over");
        loop {
            match flow.decoder.decode(&mut flow.connection.buf) {
                Ok(Decoded::Data(data)) => {
                    self.last_ns = monotonic_ns();
                    return Poll::Ready(Ok(Some(data)));
                }
                Ok(Decoded::End) => return Poll::Ready(Ok(None)),
                Ok(Decoded::NeedMore) => {}
                Err(error) => return Poll::Ready(Err(Failure::Protocol(error))),
            }
            match flow.connection.poll_fill(cx) {
                Poll::Ready(Ok(0)) if flow.decoder.ends_at_close() => {
                    let is_cut = self.exchange.stream.is_some()
                        && self.events.as_ref().is_some_and(|events| !events.done);
                    return Poll::Ready(if is_cut {
                        Err(Failure::Lost("closed before `[DONE]`".into()))
                    } else {
                        Ok(None)
                    });
                }
                Poll::Ready(Ok(0)) => {
                    return Poll::Ready(Err(Failure::Lost("closed within its answer".into())));
                }
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Err(Failure::Lost(error.to_string())));
                }
                Poll::Pending => break,
            }
        }
        let number = flow.seat.number();
        self.upstream.watch_stop(number, cx.waker());
        self.poll_idle(cx).map(Err)
    }

    /// Ready if the engine has sent nothing for too long.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<Failure> {
        let limit = self.upstream.engines.settings.idle_timeout;
        let left =
            |deadline_ns: u64| Duration::from_nanos(deadline_ns.saturating_sub(monotonic_ns()));
        let wait = self
            .exchange
            .deadline_ns
            .map_or(limit, |at| left(at).min(limit));
        let timer = self
            .idle
            .get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + wait)));
        loop {
            ready!(timer.as_mut().poll(cx));
            if self
                .exchange
                .deadline_ns
                .is_some_and(|at| left(at).is_zero())
            {
                cx.waker().wake_by_ref(); // `poll_frame` ends it
                return Poll::Pending;
            }
            // The timer is not moved at each piece: it is looked at when it is due.
            let quiet = Duration::from_nanos(monotonic_ns().saturating_sub(self.last_ns));
            if quiet >= limit {
                return Poll::Ready(Failure::Stalled(limit));
            }
            let rest = limit.saturating_sub(quiet);
            let wait = self
                .exchange
                .deadline_ns
                .map_or(rest, |at| left(at).min(rest));
            let next = Instant::now() + wait;
            timer.as_mut().reset(next);
        }
    }

    /// The part of `data` for the client now. Empty: nothing yet.
    fn pass(&mut self, data: Bytes) -> Bytes {
        if let Some(flow) = &self.flow {
            let bytes = &flow.visit.engine().counters.bytes;
            bytes.fetch_add(data.len() as u64, Relaxed);
            flow.visit.on_piece(self.last_ns);
        }
        let max = self.upstream.engines.settings.resume_bytes_max;
        let Some(events) = &mut self.events else {
            if let Some(flow) = &self.flow {
                let (engines, engine) = (&self.upstream.engines, flow.visit.engine());
                learn(engines, &self.exchange, engine, self.status, false, &data);
            }
            note(&self.exchange, self.status, false, &data);
            return data;
        };
        let was_kept = events.sent.is_some();
        let passed = events.pass(data, max);
        if let Some(flow) = &self.flow {
            let (engines, engine) = (&self.upstream.engines, flow.visit.engine());
            learn(engines, &self.exchange, engine, self.status, true, &passed);
        }
        note(&self.exchange, self.status, true, &passed);
        if let Some(sent) = &events.sent
            && !self.exchange.keeps(sent.len())
        {
            events.forget("the memory for clients is used up (`live.memory_max`)");
        }
        if was_kept && events.sent.is_none() {
            self.exchange.keeps_body_only();
        }
        passed
    }

    /// The answer is complete: its connection may carry another. Returns the part that was held back.
    fn finish(&mut self) -> Option<Bytes> {
        if let Some(flow) = self.flow.take() {
            if flow.keep_alive {
                self.upstream.keep(flow.visit.engine(), flow.connection);
            }
            flow.seat.ended();
            self.exchange.recorded(Recording::on_complete);
        }
        let held = self.events.as_mut().map(|events| events.held.split());
        held.filter(|held| !held.is_empty()).map(BytesMut::freeze)
    }

    /// The engine is lost in mid-answer. The answer continues elsewhere if it can.
    ///
    /// # Errors
    /// Why not.
    fn lose(&mut self, failure: &Failure) -> Result<(), String> {
        let flow = self.flow.take().expect("the answer is not over");
        let Flow {
            seat,
            mut visit,
            connection,
            ..
        } = flow;
        visit.on_failure(failure);
        drop((connection, seat));
        let engine = visit.engine().clone();
        let url = engine.spec.url.to_string();
        tracing::info!(engine = %url, %failure, "an answer broke off");
        let begun = self.begin_resume();
        self.loss = Some(Loss {
            engine,
            text: format!("{url}: {failure}"),
        });
        begun.map_err(|why| self.lost_for_good(&why))
    }

    /// The answer of a lost engine does not continue. Returns the error for the client.
    fn lost_for_good(&mut self, why: &str) -> String {
        let Some(Loss { engine, text }) = self.loss.take() else {
            return why.to_owned();
        };
        let counters = &engine.counters;
        counters.broken.fetch_add(1, Relaxed);
        format!("{text}; {why}")
    }

    /// Its engine leaves the fleet: it continues on another one, or ends.
    fn move_on(&mut self) {
        if let Err(why) = self.lose(&Failure::Removed) {
            self.cut = Some(ApiError::stream_lost(&why));
        }
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    fn begin_resume(&mut self) -> Result<(), String> {
        let kind = self.exchange.stream;
        let (Some(events), Some(kind)) = (&mut self.events, kind) else {
            return Err("only streams of completions and chats continue on another engine".into());
        };
        events.held.clear(); // the client has not seen it
        let Some(sent) = &events.sent else {
            return Err(events.not_kept.into());
        };
        if self.resumes >= RESUMES_MAX {
            return Err(format!("it continued {RESUMES_MAX} times already"));
        }
        if self.upstream.stopping.get() {
            return Err("the server is stopping".into());
        }
        // Not from the budget of retries: all streams of a lost engine continue, each a few times at most.
        self.resumes += 1;
        self.shard.metrics.retries.add(1);
        let (shard, upstream) = (self.shard.clone(), self.upstream.clone());
        let (exchange, sent) = (self.exchange.clone(), sent.clone());
        self.resuming = Some(Box::pin(async move {
            let charge = exchange.charge_job().map_err(|error| error.message)?;
            let job = move |_: &Service, body: &[u8]| Ok(resume::plan(kind, body, &sent));
            let planned = shard.run(exchange.body.clone(), charge, job).await;
            let (plan, _charge) = planned.map_err(|error| error.message)?;
            let Plan { body, rewriter } = plan?;
            let exchange = exchange.with_body(body, StreamPermit::shared());
            let begun = obtain(&shard, &upstream, &exchange).await;
            let begun = begun.map_err(|error| error.message)?;
            let status = begun.answer.head.status;
            if status != StatusCode::OK || !is_event_stream(&begun.answer.head) {
                let url = &begun.visit.engine().spec.url;
                return Err(format!("{url} answered {status} to its continuation"));
            }
            Ok((begun, rewriter))
        }));
        Ok(())
    }

    /// Another engine continues the answer.
    fn on_resumed(&mut self, begun: Begun, rewriter: Rewriter) {
        let Begun {
            seat,
            visit,
            answer,
        } = begun;
        if let Some(loss) = self.loss.take() {
            let counters = &loss.engine.counters;
            counters.resumed.fetch_add(1, Relaxed);
        }
        self.exchange.owner.account().note_resume();
        self.exchange.recorded(Recording::on_moved);
        self.flow = Some(Flow {
            seat,
            visit,
            connection: answer.connection,
            decoder: answer.decoder,
            keep_alive: answer.head.keep_alive,
        });
        self.first = Some(answer.first);
        self.last_ns = monotonic_ns();
        if let Some(events) = &mut self.events {
            events.rewriter = Some(rewriter);
        }
    }

    /// The last piece of a body that breaks off.
    fn break_off(
        &mut self,
        cx: &mut Context<'_>,
        error: &ApiError,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.flow = None;
        self.resuming = None;
        self.shard.metrics.streams_lost.add(1);
        let owner = self.exchange.owner.clone();
        owner.account().note_end(AnswerEnd::Broken);
        let Some(events) = &self.events else {
            // The client sees that it is not complete. An error ends its connection at once, so the part that came
            // before is written first: hyper does so when the body has nothing.
            self.broken = Some(io::Error::other(error.message.clone()));
            cx.waker().wake_by_ref();
            return Poll::Pending;
        };
        let mut event = Vec::new();
        if events.is_partial {
            event.extend_from_slice(b"\n\n");
        }
        event.extend_from_slice(b"data: ");
        event.extend_from_slice(&error.body());
        event.extend_from_slice(b"\n\ndata: [DONE]\n\n");
        Poll::Ready(Some(Ok(Frame::data(event.into()))))
    }

    fn is_over(&self) -> bool {
        self.flow.is_none() && self.resuming.is_none() && self.broken.is_none()
    }

    /// Ends it if it is overdue, also while its client's connection asks for nothing: of an HTTP/2 stream with
    /// a shut window no more is asked.
    pub(super) fn check(&mut self, now_ns: u64) {
        if self.is_over() {
            return;
        }
        if let Some(flow) = &self.flow
            && flow.visit.engine().is_cut(now_ns)
        {
            self.move_on();
            return;
        }
        let limits = &self.shard.service.limits;
        let unread = Duration::from_nanos(now_ns.saturating_sub(self.asked_ns));
        let error = if self.exchange.deadline_ns.is_some_and(|at| now_ns >= at) {
            self.shard.metrics.streams_cut_deadline.add(1);
            ApiError::deadline(limits.request_timeout.unwrap_or_default().as_secs_f64())
        } else if self.waiting.is_none() && unread >= limits.write_timeout {
            self.shard.metrics.streams_cut_slow.add(1);
            ApiError::overloaded(
                format!(
                    "the client read nothing for {} s (`live.write_timeout_s`)",
                    limits.write_timeout.as_secs_f64()
                ),
                1,
            )
        } else {
            return;
        };
        self.flow = None;
        self.resuming = None;
        self.broken = None;
        if let Some(events) = &mut self.events {
            events.sent = None;
        }
        self.exchange.release();
        self.cut = Some(error);
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }
}

/// Remembers the engine of an answer that it may store, by the beginning of the answer.
fn learn(
    engines: &Engines,
    exchange: &Exchange,
    engine: &Engine,
    status: StatusCode,
    is_events: bool,
    piece: &[u8],
) {
    let Some(owner) = exchange.stores.get().filter(|_| !piece.is_empty()) else {
        return;
    };
    // The first event has the id, as has the beginning of an object. Comments may precede that event.
    let is_begun = !is_events || memchr::memmem::find(piece, b"data:").is_some();
    exchange.stores.set((!is_begun).then_some(owner));
    if status.is_success()
        && let Some(id) = stored::id_of(piece, is_events)
    {
        engines.stored.remember(&id, engine, owner);
    }
}

/// Counts a piece of an answer, whole events of a stream, for the record.
fn note(exchange: &Exchange, status: StatusCode, is_events: bool, piece: &[u8]) {
    let Some(recording) = exchange.recording.as_ref().filter(|_| status.is_success()) else {
        return;
    };
    let mut recording = recording.borrow_mut();
    if is_events {
        recording.on_events(piece);
    } else {
        recording.on_piece(piece);
    }
}

/// Whether the body is events as text.
pub(super) fn is_event_stream(head: &ResponseHead) -> bool {
    !head.headers.contains_key(CONTENT_ENCODING)
        && head
            .headers
            .get(CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

impl Events {
    fn pass(&mut self, data: Bytes, sent_max: usize) -> Bytes {
        let whole = if self.held.is_empty() && data.ends_with(b"\n\n") {
            self.is_partial = false;
            data // nearly always
        } else {
            self.held.extend_from_slice(&data);
            match last_event_end(&self.held) {
                Some(end) => {
                    self.is_partial = false;
                    self.held.split_to(end).freeze()
                }
                None if self.held.len() <= EVENT_BYTES_MAX => return Bytes::new(),
                None => {
                    self.forget("an event was too long");
                    self.is_partial = true;
                    self.held.split().freeze()
                }
            }
        };
        let whole = match &mut self.rewriter {
            None => whole,
            Some(rewriter) => rewriter.rewrite(&whole).into(),
        };
        self.done |= ends_events(&whole);
        if let Some(sent) = &mut self.sent {
            if sent.len() + whole.len() > sent_max {
                self.forget("the answer is longer than `upstream.resume_bytes_max`");
            } else {
                sent.extend_from_slice(&whole);
            }
        }
        whole
    }

    fn forget(&mut self, why: &'static str) {
        self.sent = None;
        self.not_kept = why;
    }
}

/// Where the last whole event of `bytes` ends.
fn last_event_end(bytes: &[u8]) -> Option<usize> {
    let line_feeds = memchr::memmem::rfind(bytes, b"\n\n").map(|at| at + 2);
    let crlf = memchr::memmem::rfind(bytes, b"\r\n\r\n").map(|at| at + 4);
    line_feeds.max(crlf)
}

impl Body for Relay {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        let polled = this.poll_next(cx);
        this.asked_ns = this.last_ns;
        match &this.waiting {
            Some(known) if polled.is_pending() && known.will_wake(cx.waker()) => {}
            _ => this.waiting = polled.is_pending().then(|| cx.waker().clone()),
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.is_over() && self.cut.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.left {
            Some(left) if self.events.is_none() => SizeHint::with_exact(left),
            _ => SizeHint::default(),
        }
    }
}

impl Relay {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self;
        loop {
            if let Some(error) = this.cut.take() {
                return this.break_off(cx, &error);
            }
            if let Some(error) = this.broken.take() {
                return Poll::Ready(Some(Err(error)));
            }
            if this.is_over() {
                return Poll::Ready(None);
            }
            if this.upstream.stopping.get() {
                return this.break_off(cx, &ApiError::stopping());
            }
            if let Some(deadline_ns) = this.exchange.deadline_ns
                && monotonic_ns() >= deadline_ns
            {
                this.check(monotonic_ns());
                continue;
            }
            if let Some(resuming) = &mut this.resuming {
                match ready!(resuming.as_mut().poll(cx)) {
                    Ok((begun, rewriter)) => {
                        this.resuming = None;
                        this.on_resumed(begun, rewriter);
                    }
                    Err(why) => {
                        let why = this.lost_for_good(&why);
                        return this.break_off(cx, &ApiError::stream_lost(&why));
                    }
                }
            }
            match ready!(this.poll_piece(cx)) {
                Ok(Some(data)) => {
                    let data = this.pass(data);
                    if !data.is_empty() {
                        this.left = this.left.map(|left| left.saturating_sub(data.len() as u64));
                        if this.left == Some(0) {
                            this.finish(); // no more of it is asked for
                        }
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                }
                Ok(None) => {
                    let held = this.finish();
                    return Poll::Ready(held.map(|held| Ok(Frame::data(held))));
                }
                // All of it has come, but not the end of its framing.
                Err(_) if this.events.as_ref().is_some_and(|events| events.done) => {
                    if let Some(flow) = this.flow.take() {
                        this.exchange.recorded(Recording::on_complete);
                        flow.seat.ended();
                    }
                    return Poll::Ready(None);
                }
                Err(failure) => {
                    if let Err(why) = this.lose(&failure) {
                        return this.break_off(cx, &ApiError::stream_lost(&why));
                    }
                }
            }
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if self.flow.is_some() || self.resuming.is_some() {
            self.shard.metrics.disconnects.add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn events_are_passed_on_whole_and_unchanged(
            events in prop::collection::vec("[a-z :]{0,30}", 1..10),
            crlf in any::<bool>(),
            at in 1usize..20,
        ) {
            let line = if crlf { "\r\n" } else { "\n" };
            let written: Vec<String> = events
                .iter()
                .map(|event| format!("data: {event}{line}{line}"))
                .collect();
            let stream = written.concat();
            let mut passed = Vec::new();
            let mut relay = Events { sent: Some(Vec::new()), ..Events::default() };
            for piece in stream.as_bytes().chunks(at) {
                let out = relay.pass(Bytes::copy_from_slice(piece), 1 << 20);
                prop_assert!(out.is_empty() || out.ends_with(line.repeat(2).as_bytes()));
                passed.extend_from_slice(&out);
            }
            prop_assert_eq!(&passed, stream.as_bytes());
            prop_assert_eq!(relay.sent.unwrap(), passed);
            prop_assert!(relay.held.is_empty());
        }
    }

    #[test]
    fn a_long_event_is_passed_on_in_pieces() {
        let mut events = Events {
            sent: Some(Vec::new()),
            ..Events::default()
        };
        let out = events.pass(Bytes::from(vec![b'a'; EVENT_BYTES_MAX + 1]), usize::MAX);
        assert_eq!(out.len(), EVENT_BYTES_MAX + 1);
        assert!(events.sent.is_none() && !events.not_kept.is_empty());
        let mut events = Events {
            sent: Some(Vec::new()),
            ..Events::default()
        };
        assert_eq!(events.pass(Bytes::from_static(b"data: 1\n\n"), 8).len(), 9);
        assert!(events.sent.is_none());
    }
}
