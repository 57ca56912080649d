//! An answer on its way from an engine to a client.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{CONTENT_LENGTH, HeaderName};
use hyper::{Response, StatusCode};
use slipstream_base::WorkerId;
use slipstream_planes::clock::monotonic_ns;
use tokio::time::{Instant, Sleep, sleep_until};

use super::Upstream;
use super::api::Api;
use super::closing::closing;
use super::connection::Connection;
use super::converse::may_keep;
use super::ends::StreamEnd;
use super::engines::{Engine, Engines};
use super::exchange::Exchange;
use super::failure::Failure;
use super::obtain::StartedAnswer;
use super::record::Recording;
use super::reported::Reported;
use super::resumption::{Continued, Remains, Resumed, restart, resume};
use super::seat::Seat;
use super::stored_answers;
use super::stream::{BodyEnd, EventStream, LongEvent, SentPart};
use super::token_ids::TokenIds;
use super::turn::Turn;
use super::visit::Visit;
use crate::door::access::AnswerEnd;
use crate::door::body::HttpBody;
use crate::door::budget::Charge;
use crate::door::service::Service;
use crate::door::shard::Shard;
use crate::openai::ApiError;
use crate::wire::{BodyDecoder, Decoded, Framing};

/// Times that one stream continues on another engine.
const RESUMES_MAX: u32 = 3;

/// Time limit from the last event of a stream to the end of its body. The client already has the complete answer.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Body of an answer that an engine sends.
pub(crate) struct Relay {
    shard: Rc<Shard>,
    upstream: Rc<Upstream>,
    exchange: Rc<Exchange>,
    status: StatusCode,
    /// Where it comes from; `None`: it is over, or continues elsewhere.
    flow: Option<Flow>,
    /// Bytes read before it, and their charge, if they are many.
    first: Option<(Bytes, Option<Charge>)>,
    /// Set for a stream of events: they are sent on whole.
    events: Option<EventStream>,
    resuming: Option<Resuming>,
    resumes: u32,
    /// Bytes that follow, if that is known.
    left: Option<u64>,
    idle: Option<Pin<Box<Sleep>>>,
    /// When bytes last came, ns.
    read_ns: u64,
    /// When a part of the answer last came, ns. Comments are none.
    last_ns: u64,
    /// When its client's connection last asked for more, ns.
    asked_ns: u64,
    /// Set while it waits for an engine, not for its client.
    waiting: Option<Waker>,
    turn: Turn,
    /// Why it ended before its client asked for more.
    cut: Option<ApiError>,
    /// The engine that was lost, while the answer may continue elsewhere.
    loss: Option<Loss>,
    /// It broke off; the client first gets the part before.
    broken: Option<io::Error>,
}

type Resuming = Pin<Box<dyn Future<Output = Result<Resumed, String>>>>;

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

impl Relay {
    /// The response whose answer has begun.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(super) fn respond(
        shard: &Rc<Shard>,
        upstream: &Rc<Upstream>,
        exchange: Exchange,
        mut started: StartedAnswer,
    ) -> Result<Response<HttpBody>, ApiError> {
        let is_events = started.answer.head.is_event_stream();
        let mut headers = std::mem::take(&mut started.answer.head.headers);
        let status = started.answer.head.status;
        let body = if started.answer.complete {
            Relay::end_at_once(upstream, exchange, started, is_events)?
        } else {
            if is_events {
                // It may continue on another engine, with another length.
                headers.remove(CONTENT_LENGTH);
            }
            let relay = Relay::new(shard, upstream, exchange, started, is_events);
            let relay = Rc::new(RefCell::new(relay));
            upstream.look_after(&relay);
            HttpBody::relay(relay)
        };
        if !shard.service.origins.is_empty() {
            // The router says which pages may use the API; engines often allow all.
            let allowed: Vec<HeaderName> = headers
                .keys()
                .filter(|name| name.as_str().starts_with("access-control-"))
                .cloned()
                .collect();
            for name in allowed {
                headers.remove(name);
            }
        }
        let mut response = Response::new(body);
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Ok(response)
    }

    /// The body of an answer that is complete already.
    ///
    /// # Errors
    /// There is no memory for it.
    fn end_at_once(
        upstream: &Upstream,
        exchange: Exchange,
        started: StartedAnswer,
        is_events: bool,
    ) -> Result<HttpBody, ApiError> {
        let StartedAnswer {
            seat,
            visit,
            answer,
        } = started;
        let (engine, head, bytes) = (visit.engine(), &answer.head, answer.first);
        let counted = bytes.len() as u64;
        engine.counters.bytes.fetch_add(counted, Relaxed);
        let (engines, status) = (&upstream.engines, head.status);
        learn(engines, &exchange, engine, status, is_events, &bytes);
        note(&exchange, status, is_events, &bytes);
        exchange.update_recording(Recording::on_complete);
        if may_keep(&exchange, head) {
            upstream.keep(engine, answer.connection);
        }
        seat.ended();
        exchange.charge_answer(bytes.len())?;
        if bytes.is_empty() {
            return Ok(HttpBody::whole(None, None));
        }
        Ok(HttpBody::whole(Some(bytes), exchange.into_charge()))
    }

    fn new(
        shard: &Rc<Shard>,
        upstream: &Rc<Upstream>,
        exchange: Exchange,
        started: StartedAnswer,
        is_events: bool,
    ) -> Relay {
        let StartedAnswer {
            seat,
            visit,
            answer,
        } = started;
        let events = is_events.then(|| {
            let end = StreamEnd::new(exchange.api, exchange.choices);
            let hides = exchange.stream.filter(|_| exchange.wants_tokens.get());
            EventStream::new(end, exchange.stream.is_some(), hides.map(TokenIds::new))
        });
        let left = match answer.head.framing {
            Framing::Sized(bytes) if !is_events => Some(bytes),
            _ => None,
        };
        let now = monotonic_ns();
        Relay {
            shard: shard.clone(),
            upstream: upstream.clone(),
            status: answer.head.status,
            flow: Some(Flow {
                seat,
                visit,
                connection: answer.connection,
                decoder: answer.decoder,
                keep_alive: may_keep(&exchange, &answer.head),
            }),
            exchange: Rc::new(exchange),
            first: Some((answer.first, None)),
            events,
            resuming: None,
            resumes: 0,
            left,
            idle: None,
            read_ns: now,
            last_ns: now,
            asked_ns: now,
            waiting: None,
            turn: Turn::default(),
            cut: None,
            loss: None,
            broken: None,
        }
    }

    /// The next piece of the body, as the engine sent it. `None`: it is complete.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Failure>> {
        if let Some((first, _charge)) = self.first.take() {
            return Poll::Ready(Ok(Some(first)));
        }
        let flow = self.flow.as_mut().expect("the answer is not over");
        loop {
            if self.turn.is_over() {
                // Bytes that keep coming are no answer for that.
                let limit = self.upstream.engines.settings.idle_timeout;
                if Duration::from_nanos(self.read_ns.saturating_sub(self.last_ns)) >= limit {
                    return Poll::Ready(Err(Failure::Stalled(limit)));
                }
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            match flow.decoder.decode(&mut flow.connection.buf) {
                Ok(Decoded::Data(data)) => {
                    self.turn.on_piece();
                    self.read_ns = monotonic_ns();
                    return Poll::Ready(Ok(Some(data)));
                }
                Ok(Decoded::End) => return Poll::Ready(Ok(None)),
                Ok(Decoded::NeedMore) => {}
                Err(error) => return Poll::Ready(Err(Failure::Protocol(error))),
            }
            match flow.connection.poll_fill(cx) {
                Poll::Ready(Ok(0)) if flow.decoder.ends_at_close() => return Poll::Ready(Ok(None)),
                Poll::Ready(Ok(0)) => {
                    return Poll::Ready(Err(Failure::Lost("closed within its answer".into())));
                }
                Poll::Ready(Ok(read)) => self.turn.on_read(read),
                Poll::Ready(Err(error)) => {
                    return Poll::Ready(Err(Failure::Lost(error.to_string())));
                }
                Poll::Pending => break,
            }
        }
        self.turn = Turn::default(); // others have theirs
        self.poll_idle(cx).map(Err)
    }

    /// Ready if the engine has sent no part of the answer for too long.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<Failure> {
        let limit = self.upstream.engines.settings.idle_timeout;
        let is_over = self.events.as_ref().is_some_and(|of| of.end().is_over());
        let limit = if is_over {
            limit.min(END_TIMEOUT)
        } else {
            limit
        };
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
        }
        let max = self.upstream.engines.settings.resume_bytes_max;
        let Some(events) = &mut self.events else {
            // White space keeps the connection of some gateways open. In other APIs it may be data.
            if self.exchange.api == Api::Other || !data.trim_ascii().is_empty() {
                self.on_progress();
            }
            if let Some(flow) = &self.flow {
                let (engines, engine) = (&self.upstream.engines, flow.visit.engine());
                learn(engines, &self.exchange, engine, self.status, false, &data);
            }
            note(&self.exchange, self.status, false, &data);
            return data;
        };
        let was_kept = events.kept_bytes().is_some();
        let was_over = events.end().is_over();
        let passed = events.pass(data, max);
        let has_progress = events.has_progress();
        if events.end().is_over() && !was_over {
            self.idle = None; // another limit holds from here on
        }
        if has_progress {
            self.last_ns = self.read_ns;
            if let Some(flow) = &self.flow {
                flow.visit.on_piece(self.read_ns);
            }
        }
        if let Some(flow) = &self.flow {
            let (engines, engine) = (&self.upstream.engines, flow.visit.engine());
            learn(engines, &self.exchange, engine, self.status, true, &passed);
        }
        note(&self.exchange, self.status, true, &passed);
        if let Some(bytes) = events.kept_bytes()
            && !self.exchange.keep_sent(bytes)
        {
            events.forget("the memory for clients is used up (`live.memory_max`)");
        }
        if was_kept && events.kept_bytes().is_none() {
            self.exchange.keeps_body_only();
        }
        passed
    }

    /// A part of the answer came.
    fn on_progress(&mut self) {
        self.last_ns = self.read_ns;
        if let Some(flow) = &self.flow {
            flow.visit.on_piece(self.read_ns);
        }
    }

    /// The answer is complete: its connection may carry another.
    fn finish(&mut self) {
        if self.events.as_ref().is_some_and(|of| of.end().is_refused()) {
            let owner = self.exchange.owner.clone();
            owner.account().note_end(AnswerEnd::Refused);
        }
        if let Some(flow) = self.flow.take() {
            flow.visit.on_end();
            if flow.keep_alive {
                self.upstream.keep(flow.visit.engine(), flow.connection);
            }
            flow.seat.ended();
            self.exchange.update_recording(Recording::on_complete);
        }
    }

    /// The engine has ended its body. Returns the next piece for the client, and `None` at the end of the answer or if
    /// another engine continues it.
    ///
    /// # Errors
    /// The answer is not complete.
    fn on_body_end(&mut self) -> Result<Option<Bytes>, Failure> {
        let max = self.upstream.engines.settings.resume_bytes_max;
        let Some(events) = &mut self.events else {
            self.finish();
            return Ok(None);
        };
        match events.on_end(max) {
            BodyEnd::Piece(piece) => {
                note(&self.exchange, self.status, true, &piece);
                Ok(Some(piece))
            }
            BodyEnd::Complete => {
                self.finish();
                Ok(None)
            }
            BodyEnd::Finished => {
                self.close();
                Ok(None)
            }
            BodyEnd::Incomplete(why) => Err(Failure::Incomplete(why)),
        }
    }

    /// The engine is lost.
    ///
    /// # Errors
    /// The answer does not continue.
    fn on_lost(&mut self, failure: &Failure) -> Result<(), String> {
        match self.events.as_ref().map(EventStream::on_loss) {
            // All of it has come, but not the end of its framing.
            Some(BodyEnd::Complete) => self.end_without_engine(),
            Some(BodyEnd::Finished) => {
                if let Some(flow) = &mut self.flow {
                    flow.visit.on_failure(failure);
                    flow.keep_alive = false;
                }
                self.close();
            }
            _ => self.lose(failure)?,
        }
        Ok(())
    }

    /// The answer is complete except for its last events.
    fn close(&mut self) {
        let Some(events) = &mut self.events else {
            return;
        };
        let last = Bytes::from_static(events.end().last_event());
        let sent = events.take_sent();
        let prompt = events.prompt().map(|ids| ids.len() as u64);
        self.finish();
        let (shard, exchange) = (self.shard.clone(), self.exchange.clone());
        let upstream = self.upstream.clone();
        let api = exchange.api;
        let Some(SentPart { bytes: sent, seams }) = sent else {
            self.resuming = Some(Box::pin(async move { Ok(Resumed::Closed(last)) }));
            return;
        };
        self.resuming = Some(Box::pin(async move {
            // The answer is complete: without room for more it ends as it would without the usage.
            let Ok(charge) = exchange.charge_job() else {
                return Ok(Resumed::Closed(last));
            };
            let bytes = exchange.body.len() + sent.len();
            let job = move |_: &Service, body: &[u8]| Ok(closing(api, body, &sent, &seams, prompt));
            let body = exchange.body.clone();
            let turn = upstream.planning.acquire().await;
            let closed = shard.run_reading(body, bytes, charge, job).await;
            drop(turn);
            let closed = closed.ok().and_then(|(closed, _charge)| closed);
            Ok(Resumed::Closed(closed.map_or(last, Bytes::from)))
        }));
    }

    /// The engine reported an error within the stream.
    ///
    /// # Errors
    /// Why the stream does not continue elsewhere.
    fn on_reported(&mut self, reported: Reported) -> Result<(), String> {
        let is_relayed = self
            .events
            .as_ref()
            .is_some_and(|of| of.end().relays(&reported));
        let failure = Failure::Reported(reported);
        if !is_relayed {
            return self.lose(&failure);
        }
        // Its client gets the error as it is written, and what follows.
        if let Some(flow) = &mut self.flow {
            flow.visit.on_failure(&failure);
            flow.keep_alive = false;
            flow.visit.engine().counters.broken.fetch_add(1, Relaxed);
            let engine = &flow.visit.engine().spec.url;
            tracing::info!(%engine, %failure, "an answer broke off");
        }
        self.shard.metrics.streams_lost.add(1);
        let owner = self.exchange.owner.clone();
        owner.account().note_end(AnswerEnd::Broken);
        Ok(())
    }

    /// An event is too long to be read.
    ///
    /// # Errors
    /// Why the stream does not continue without it.
    fn on_long_event(&mut self, long: LongEvent) -> Result<(), String> {
        if let Some(flow) = &self.flow {
            let counters = &flow.visit.engine().counters;
            counters.long_events.fetch_add(1, Relaxed);
        }
        if long == LongEvent::Relay || self.flow.is_none() {
            return Ok(());
        }
        // The ids of a long prompt fill such an event: the same answer, without ids.
        self.exchange.wants_tokens.set(false);
        self.lose(&Failure::LongEvent)
    }

    /// The engine is lost in mid-answer. The answer continues elsewhere if it can.
    ///
    /// # Errors
    /// Why not.
    fn lose(&mut self, failure: &Failure) -> Result<(), String> {
        // An error that it reported, and that is not passed on yet, is of the same loss.
        self.take_reported();
        let Some(flow) = self.flow.take() else {
            return Ok(());
        };
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
        let begun = self.begin_resume(engine.spec.worker);
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

    /// Its engine leaves the fleet or hangs: it continues on another one, or ends.
    fn move_on(&mut self, failure: &Failure) {
        if let Err(why) = self.on_lost(failure) {
            self.cut = Some(ApiError::stream_lost(&why));
        }
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    /// Another engine than `lost` is to continue the answer.
    fn begin_resume(&mut self, lost: WorkerId) -> Result<(), String> {
        if self.resumes >= RESUMES_MAX {
            return Err(format!("it continued {RESUMES_MAX} times already"));
        }
        if self.upstream.stopping.get() {
            return Err("the server is stopping".into());
        }
        let kind = self.exchange.stream;
        let (Some(events), Some(kind)) = (&mut self.events, kind) else {
            return self.begin_restart(lost);
        };
        let sent = events.take_for_continuation()?;
        let prompt = events.prompt().map(<[u32]>::to_vec);
        // Not from the budget of retries: all streams of a lost engine continue, each a few times at most.
        self.resumes += 1;
        self.shard.metrics.retries.add(1);
        let (shard, upstream) = (self.shard.clone(), self.upstream.clone());
        let remains = Remains {
            kind,
            lost,
            sent,
            prompt,
        };
        let exchange = self.exchange.clone();
        let resuming = async move { resume(&shard, &upstream, &exchange, remains).await };
        self.resuming = Some(Box::pin(resuming));
        Ok(())
    }

    /// Another engine than `lost` is to give the answer, of which the client has nothing yet.
    fn begin_restart(&mut self, lost: WorkerId) -> Result<(), String> {
        let may_restart = self.events.as_ref().is_some_and(EventStream::may_restart);
        if !may_restart || !self.exchange.repeats {
            return Err("only streams of completions and chats continue on another engine".into());
        }
        if !self.upstream.spend() {
            return Err("the budget of retries is used up".into());
        }
        self.resumes += 1;
        self.shard.metrics.retries.add(1);
        let (shard, upstream) = (self.shard.clone(), self.upstream.clone());
        let exchange = self.exchange.clone();
        let restarting = async move { restart(&shard, &upstream, &exchange, lost).await };
        self.resuming = Some(Box::pin(restarting));
        Ok(())
    }

    /// Another engine gives the answer from its beginning.
    fn on_restarted(&mut self, started: StartedAnswer) {
        if let Some(loss) = self.loss.take() {
            loss.engine.counters.retried.fetch_add(1, Relaxed);
        }
        self.exchange.owner.account().note_retry();
        if let Some(events) = &mut self.events {
            events.restart();
        }
        self.flow_from(started, None);
    }

    /// The answer comes from another engine. `charge`: the memory of its first bytes, if they may be many.
    fn flow_from(&mut self, started: StartedAnswer, charge: Option<Charge>) {
        let StartedAnswer {
            seat,
            visit,
            answer,
        } = started;
        self.exchange.update_recording(Recording::on_moved);
        self.flow = Some(Flow {
            seat,
            visit,
            connection: answer.connection,
            decoder: answer.decoder,
            keep_alive: answer.head.keep_alive,
        });
        self.first = Some((answer.first, charge));
        self.read_ns = monotonic_ns();
        self.last_ns = self.read_ns;
    }

    /// Another engine continues the answer.
    fn on_resumed(&mut self, continued: Continued) {
        let Continued {
            begun,
            rewriter,
            kept,
            sent,
            charge,
        } = continued;
        if let Some(loss) = self.loss.take() {
            let counters = &loss.engine.counters;
            counters.resumed.fetch_add(1, Relaxed);
        }
        self.exchange.owner.account().note_resume();
        self.flow_from(begun, charge);
        if let Some(events) = &mut self.events {
            events.continue_with(rewriter, kept, sent);
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
        if events.is_within_event() {
            event.extend_from_slice(b"\n\n");
        }
        let api = self.exchange.api;
        event.extend_from_slice(&api.error_event(&error.message, &error.body()));
        Poll::Ready(Some(Ok(Frame::data(event.into()))))
    }

    /// The server stops, and it ends. False if it is over already.
    pub(super) fn stop(&mut self) -> bool {
        let is_open = !self.is_over();
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
        is_open
    }

    fn is_over(&self) -> bool {
        self.flow.is_none() && self.resuming.is_none() && self.broken.is_none()
    }

    /// Whether the stream waits for a hung engine while another one could continue it.
    fn is_at_hung_engine(&self, now_ns: u64) -> bool {
        let (Some(flow), Some(_)) = (&self.flow, &self.waiting) else {
            return false;
        };
        let (engines, engine) = (&self.upstream.engines, flow.visit.engine());
        let continues = self.exchange.resumable
            && self
                .events
                .as_ref()
                .is_some_and(|of| of.kept_bytes().is_some());
        engine.is_hung(self.last_ns, now_ns, engines.settings.health_timeout)
            && continues
            && engines.others_take(engine, self.exchange.request.only.as_deref())
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
            self.move_on(&Failure::Removed);
            return;
        }
        if self.is_at_hung_engine(now_ns) {
            self.move_on(&Failure::Hung);
            return;
        }
        let limits = &self.shard.service.limits;
        let unread = Duration::from_nanos(now_ns.saturating_sub(self.asked_ns));
        let is_late = self.exchange.deadline_ns.is_some_and(|at| now_ns >= at);
        let is_slow = self.waiting.is_none() && unread >= limits.write_timeout;
        if (is_late || is_slow) && self.is_answered() {
            // What is left is the end of its framing.
            self.end_without_engine();
            if let Some(waker) = self.waiting.take() {
                waker.wake();
            }
            return;
        }
        let error = if is_late {
            self.shard.metrics.streams_cut_deadline.add(1);
            ApiError::deadline(limits.request_timeout.unwrap_or_default().as_secs_f64())
        } else if is_slow {
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
            events.forget("it ended");
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
        && let Some(id) = stored_answers::id_of(piece, is_events)
    {
        engines.stored.remember(&id, engine.storing(), owner);
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

impl Body for Relay {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        let polled = this.poll_next(cx);
        this.asked_ns = this.read_ns;
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

/// What a body's poll returns.
type Polled = Poll<Option<Result<Frame<Bytes>, io::Error>>>;

impl Relay {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            if let ControlFlow::Break(polled) = self.settle(cx) {
                return polled;
            }
            if let ControlFlow::Break(polled) = ready!(self.poll_resuming(cx)) {
                return polled;
            }
            let outcome = match ready!(self.poll_piece(cx)) {
                // The engine sent more after its last event.
                Ok(Some(_)) if self.is_over_for_client() => {
                    self.end_without_engine();
                    return Poll::Ready(None);
                }
                Ok(Some(data)) => {
                    let data = self.pass(data);
                    if !data.is_empty() {
                        self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
                        if self.left == Some(0) {
                            self.finish(); // no more of it is asked for
                        }
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                    Ok(())
                }
                Ok(None) => match self.on_body_end() {
                    Ok(Some(piece)) if !piece.is_empty() => {
                        return Poll::Ready(Some(Ok(Frame::data(piece))));
                    }
                    Ok(_) => Ok(()),
                    Err(failure) => self.lose(&failure),
                },
                Err(failure) => self.on_lost(&failure),
            };
            if let Err(why) = outcome {
                return self.break_off(cx, &ApiError::stream_lost(&why));
            }
        }
    }

    /// Ends it if it must end now, for any reason but those of its engine.
    fn settle(&mut self, cx: &mut Context<'_>) -> ControlFlow<Polled> {
        loop {
            if let Some(why) = self.events.as_mut().and_then(EventStream::refusal_reason) {
                self.cut = Some(ApiError::stream_lost(why));
            }
            if let Some(error) = self.cut.take() {
                return ControlFlow::Break(self.break_off(cx, &error));
            }
            if let Some(long) = self.events.as_mut().and_then(EventStream::take_long)
                && let Err(why) = self.on_long_event(long)
            {
                let error = ApiError::stream_lost(&why);
                return ControlFlow::Break(self.break_off(cx, &error));
            }
            if let Some(error) = self.broken.take() {
                return ControlFlow::Break(Poll::Ready(Some(Err(error))));
            }
            if let Some(reported) = self.take_reported() {
                if let Err(why) = self.on_reported(reported) {
                    let error = ApiError::stream_lost(&why);
                    return ControlFlow::Break(self.break_off(cx, &error));
                }
                continue;
            }
            if self.is_over() {
                return ControlFlow::Break(Poll::Ready(None));
            }
            if self.upstream.stopping.get() {
                if self.is_answered() {
                    self.end_without_engine();
                    return ControlFlow::Break(Poll::Ready(None));
                }
                return ControlFlow::Break(self.break_off(cx, &ApiError::stopping()));
            }
            if let Some(deadline_ns) = self.exchange.deadline_ns
                && monotonic_ns() >= deadline_ns
            {
                self.check(monotonic_ns());
                continue;
            }
            return ControlFlow::Continue(());
        }
    }

    /// Waits for another engine if its own was lost.
    fn poll_resuming(&mut self, cx: &mut Context<'_>) -> Poll<ControlFlow<Polled>> {
        let Some(resuming) = &mut self.resuming else {
            return Poll::Ready(ControlFlow::Continue(()));
        };
        Poll::Ready(match ready!(resuming.as_mut().poll(cx)) {
            Ok(Resumed::Elsewhere(continued)) => {
                self.resuming = None;
                self.on_resumed(*continued);
                ControlFlow::Continue(())
            }
            Ok(Resumed::Anew(started)) => {
                self.resuming = None;
                self.on_restarted(*started);
                ControlFlow::Continue(())
            }
            Ok(Resumed::Closed(last)) => {
                self.resuming = None;
                self.loss = None;
                note(&self.exchange, self.status, true, &last);
                self.exchange.update_recording(Recording::on_complete);
                let piece = (!last.is_empty()).then_some(Ok(Frame::data(last)));
                ControlFlow::Break(Poll::Ready(piece))
            }
            Err(why) => {
                let why = self.lost_for_good(&why);
                ControlFlow::Break(self.break_off(cx, &ApiError::stream_lost(&why)))
            }
        })
    }

    /// Takes the error that the engine reported after the events already passed on.
    fn take_reported(&mut self) -> Option<Reported> {
        self.events.as_mut()?.take_reported()
    }

    /// The client has the last event of a stream.
    fn is_over_for_client(&self) -> bool {
        let events = self.events.as_ref();
        events.is_some_and(|of| of.end().is_over() && of.end().api().has_choices())
    }

    /// The client has all of the answer, as events.
    fn is_answered(&self) -> bool {
        let end = self.events.as_ref().map(EventStream::on_loss);
        matches!(end, Some(BodyEnd::Complete))
    }

    /// The answer is complete, but its connection is of no further use.
    fn end_without_engine(&mut self) {
        if let Some(flow) = &mut self.flow {
            flow.keep_alive = false;
        }
        self.finish();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if self.flow.is_some() || self.resuming.is_some() {
            self.shard.metrics.disconnects.add(1);
        }
    }
}
