//! Finds an engine that answers a request: attempts, retries, and pairs of engines for disaggregated prefill.

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hyper::StatusCode;
use hyper::header::{HeaderValue, LOCATION, RETRY_AFTER};
use slipstream_base::{Role, WorkerId};
use slipstream_config::cluster::KvProtocol;
use slipstream_dispatch as dispatch;

use super::Upstream;
use super::converse::{Answer, converse, may_keep, read_rest};
use super::counters::PrefillOutcome;
use super::disagg::{self, Change, StageRequest};
use super::engines::Engine;
use super::exchange::Exchange;
use super::failure::Failure;
use super::pair::{PrefillFault, Prefilling};
use super::record::Recording;
use super::reported::Reported;
use super::seat::Seat;
use super::visit::Visit;
use crate::door::shard::Shard;
use crate::openai::ApiError;

/// An answer that has begun.
pub(super) struct StartedAnswer {
    pub(super) seat: Seat,
    pub(super) visit: Visit,
    pub(super) answer: Answer,
}

/// Sends a request to engines, one after the other, until one answers.
///
/// # Errors
/// What the client gets if none does.
pub(super) async fn obtain(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    exchange: &Exchange,
) -> Result<StartedAnswer, ApiError> {
    let mut search = Search {
        shard,
        upstream,
        exchange,
        seat: Seat::submit(upstream, &exchange.request),
        prefers: exchange.prefers,
        refusal: None,
        prefilled: None,
        decided: None,
    };
    loop {
        let Some((worker, role)) = search.next_worker().await? else {
            continue;
        };
        match search.attempt(worker, role).await {
            Attempt::Started(visit, answer) => {
                return Ok(StartedAnswer {
                    seat: search.seat,
                    visit,
                    answer: *answer,
                });
            }
            Attempt::Over(error) => return Err(error),
            Attempt::Next => {}
        }
    }
}

/// Outcome of an attempt at a worker.
enum Attempt {
    /// An engine answers the client.
    Started(Visit, Box<Answer>),
    /// No other engine may get the request.
    Over(ApiError),
    /// The dispatcher chooses again.
    Next,
}

/// The request to a prefill engine that is under way, and that engine's worker.
type PairedPrefill = (WorkerId, Prefilling);

/// Search for an engine that answers a request.
struct Search<'a> {
    shard: &'a Rc<Shard>,
    upstream: &'a Rc<Upstream>,
    exchange: &'a Exchange,
    seat: Seat,
    /// Whether only the engine that the client named is asked; others follow if it is lost.
    prefers: bool,
    /// The last reason why the request has no answer.
    refusal: Option<ApiError>,
    /// The computed prompt, for the next attempt.
    prefilled: Option<PrefillResult>,
    /// A decision of the dispatcher that has not been followed yet.
    decided: Option<(WorkerId, Role)>,
}

impl Search<'_> {
    /// The worker that gets the request next, and the part that it computes; `None` if the request was submitted again.
    ///
    /// # Errors
    /// What the client gets: no worker takes it.
    async fn next_worker(&mut self) -> Result<Option<(WorkerId, Role)>, ApiError> {
        if let Some(placed) = self.decided.take() {
            return Ok(Some(placed));
        }
        let error = match self.seat.placed().await {
            Ok(placed) => return Ok(Some(placed)),
            Err(error) => error,
        };
        let Some(others) = self.besides_preferred(&error) else {
            return Err(self.refusal.take().unwrap_or(error));
        };
        self.prefers = false;
        let request = dispatch::Request {
            direct: None,
            only: Some(others),
            ..self.exchange.request.clone()
        };
        self.seat = Seat::submit(self.upstream, &request);
        self.refusal.get_or_insert(error);
        Ok(None)
    }

    /// The other engines, if the one that the client named is lost by `error`.
    fn besides_preferred(&self, error: &ApiError) -> Option<Arc<[WorkerId]>> {
        let preferred = self.exchange.request.direct.filter(|_| self.prefers)?;
        let engine = self.upstream.engine(preferred);
        let is_there = engine.is_some_and(|engine| !engine.is_mirror());
        let is_lost = matches!(error.status, 502 | 503);
        let only = self.exchange.request.only.as_deref();
        let others = self.upstream.engines.besides(preferred, only);
        others.filter(|_| is_there && is_lost)
    }

    /// Sends the request, or the part `role` of it, to `worker`.
    async fn attempt(&mut self, worker: WorkerId, role: Role) -> Attempt {
        let Some(engine) = self.upstream.engine(worker) else {
            // Removed since it was chosen.
            match role {
                Role::Prefill => self.seat.prefill_failed(),
                Role::Both | Role::Decode => self.seat.failed_by(worker),
            }
            return Attempt::Next;
        };
        if role == Role::Prefill {
            return if engine.kv_protocol() == KvProtocol::Params {
                self.compute_prompt(engine).await
            } else {
                self.request_pair(worker, engine).await
            };
        }
        if role == Role::Both && engine.needs_prefill() && !self.exchange.request.whole {
            let text = format!(
                "no prefill engine takes the request, and engine {} answers computed prompts only; try again",
                engine.spec.url
            );
            let error = ApiError::overloaded(text, 1);
            return Attempt::Over(self.refusal.take().unwrap_or(error));
        }
        let prefilled = self.prefilled.take().filter(|_| role == Role::Decode);
        self.request_answer(engine, role, prefilled, None).await
    }

    /// Lets `engine` compute the prompt; the answer is requested from another one afterwards.
    async fn compute_prompt(&mut self, engine: Arc<Engine>) -> Attempt {
        match prefill(self.shard, self.upstream, self.exchange, &engine).await {
            Ok(stage) => {
                self.prefilled = Some(PrefillResult { engine, stage });
                self.seat.prefilled();
            }
            Err(why) => {
                note_failed_prefill(self.shard, &engine, &why);
                self.seat.prefill_failed();
            }
        }
        Attempt::Next
    }

    /// Asks `engine` for the prompt and another one for the answer at once.
    async fn request_pair(&mut self, worker: WorkerId, engine: Arc<Engine>) -> Attempt {
        let (shard, upstream, exchange) = (self.shard, self.upstream, self.exchange);
        match begin_pair(shard, upstream, exchange, &self.seat, &engine).await {
            Ok((task, answering, stage)) => {
                let prefilled = PrefillResult { engine, stage };
                let pair = Some((worker, task));
                self.request_answer(answering, Role::Decode, Some(prefilled), pair)
                    .await
            }
            Err(why) => {
                note_failed_prefill(shard, &engine, &why);
                if needs_prefill(upstream, &self.seat) {
                    self.seat.failed_by(worker);
                } else {
                    self.seat.prefill_failed();
                }
                Attempt::Next
            }
        }
    }

    /// Requests the answer from `engine`. `prefilled`: its computed prompt. `pair`: the engine that computes it meanwhile.
    async fn request_answer(
        &mut self,
        engine: Arc<Engine>,
        role: Role,
        prefilled: Option<PrefillResult>,
        mut pair: Option<PairedPrefill>,
    ) -> Attempt {
        let (upstream, exchange) = (self.upstream, self.exchange);
        let stage = prefilled.as_ref().and_then(|of| of.stage.clone());
        let mut visit = Visit::begin(&upstream.engines, engine.clone());
        let limit = upstream.engines.settings.first_byte_timeout;
        let outgoing = exchange.outgoing(&engine, &stage.unwrap_or_default());
        let attempt = converse(upstream, &visit, &outgoing);
        // A request that is not repeated waits also for a hung engine.
        let only = if exchange.repeats {
            exchange.request.only.as_deref()
        } else {
            Some(&[][..])
        };
        let attempt = upstream.engines.answered(&engine, only, limit, attempt);
        let outcome = match &mut pair {
            None => attempt.await,
            Some((prefill_worker, task)) => {
                let outcome = join_pair(&self.seat, task, attempt).await;
                exchange.keeps_body_only();
                match outcome {
                    Ok(outcome) => match self.seat.placed().await {
                        Ok(now) if now == (engine.spec.worker, role) => outcome,
                        Ok(now) => {
                            // The fleet has changed.
                            self.decided = Some(now);
                            return Attempt::Next;
                        }
                        Err(error) => return Attempt::Over(error),
                    },
                    Err(fault) => {
                        drop(visit);
                        let prefill = prefilled.as_ref().expect("it computes the prompt");
                        return self.on_prefill_fault(&engine, prefill, *prefill_worker, fault);
                    }
                }
            }
        };
        drop(outgoing);
        match outcome {
            Ok(answer) => {
                visit.on_first_byte(answer.head.status, answer.complete);
                self.on_answer(role, prefilled.as_ref(), pair, visit, answer)
            }
            Err(failure) => {
                visit.on_failure(&failure);
                note_prefill(prefilled.as_ref(), PrefillOutcome::DecodeFailed);
                self.on_failure(visit, &failure)
            }
        }
    }

    /// The prefill engine failed before `engine`, which was asked at the same time, answered.
    fn on_prefill_fault(
        &mut self,
        engine: &Engine,
        prefilled: &PrefillResult,
        prefill_worker: WorkerId,
        fault: PrefillFault,
    ) -> Attempt {
        log_prefill(self.shard, &prefilled.engine, &fault.why);
        note_prefill(Some(prefilled), PrefillOutcome::Failed);
        if !engine.needs_prefill() {
            self.seat.prefill_failed();
            return Attempt::Next;
        }
        let (error, is_final) = refused_prefill(&prefilled.engine, fault);
        if is_final || !self.upstream.spend() {
            return Attempt::Over(error);
        }
        self.note_retry(&prefilled.engine, error);
        self.seat.failed_by(prefill_worker);
        Attempt::Next
    }

    /// The engine of `visit` answered.
    fn on_answer(
        &mut self,
        role: Role,
        prefilled: Option<&PrefillResult>,
        pair: Option<PairedPrefill>,
        visit: Visit,
        answer: Answer,
    ) -> Attempt {
        let (engine, status) = (visit.engine().clone(), answer.head.status);
        if is_redirect(status) {
            log_redirect(self.shard, &engine, &self.exchange.target, &answer);
            note_prefill(prefilled, PrefillOutcome::DecodeFailed);
            let url = engine.spec.url.to_string();
            return Attempt::Over(ApiError::engine_redirects(&url, status.as_u16()));
        }
        let is_decode = role == Role::Decode;
        let fails = status.is_client_error() || status.is_server_error();
        note_prefill(
            prefilled,
            if fails {
                PrefillOutcome::DecodeFailed
            } else {
                PrefillOutcome::Transferred
            },
        );
        let is_busy = status == StatusCode::SERVICE_UNAVAILABLE;
        if is_decode && fails && !is_busy && !engine.needs_prefill() {
            // Perhaps for the fields that the client did not send.
            if let Some(silent) = self.shard.log_allowed() {
                tracing::warn!(
                    engine = %engine.spec.url,
                    silent,
                    "the decode engine answered {status} to the parameters of a prefill engine, so one engine \
                     computes prompt and answer"
                );
            }
            drop((answer, visit));
            self.seat.prefill_failed();
            return Attempt::Next;
        }
        // An engine of SGLang answers 500 if its prompt did not arrive.
        let is_lost = is_decode && engine.needs_prefill() && status.is_server_error();
        let repeats = self.exchange.repeats && answer.complete;
        if (is_busy || is_lost) && repeats && self.upstream.spend() {
            // It is busy or stops; its words reach the client if no other engine takes it.
            self.note_retry(&engine, refusal(&engine, &answer));
            drop((answer, visit));
            self.seat.failed_by(engine.spec.worker);
            return Attempt::Next;
        }
        self.seat.begun();
        if let Some((_, task)) = pair {
            self.seat.keep_prefill(task);
        }
        let worker = engine.spec.worker;
        self.exchange
            .update_recording(|recording| recording.on_begun(worker, &engine.name));
        // A refused continuation does not change whose tokens the client has.
        self.exchange
            .owner
            .account()
            .note_engine(&engine.spec.url, status.is_success());
        Attempt::Started(visit, Box::new(answer))
    }

    /// The engine of `visit` failed the request.
    fn on_failure(&mut self, visit: Visit, failure: &Failure) -> Attempt {
        let engine = visit.engine().clone();
        let error = failure_error(&engine, failure);
        // It may be computing the request still, or again.
        let is_final = matches!(failure, Failure::FirstByteTimeout(_))
            || !self.exchange.repeats && !failure.is_before_request();
        // All requests of a hung engine move, as its streams do.
        let is_free = *failure == Failure::Hung;
        if is_final || !is_free && !self.upstream.spend() {
            self.shard.metrics.streams_lost.add(1);
            return Attempt::Over(error);
        }
        tracing::debug!(engine = %engine.spec.url, %failure, "asking another engine");
        self.note_retry(&engine, error);
        drop(visit);
        self.seat.failed_by(engine.spec.worker);
        Attempt::Next
    }

    /// Another engine gets the request, as `engine` did not answer it; the client gets `error` if none does.
    fn note_retry(&mut self, engine: &Engine, error: ApiError) {
        engine.counters.retried.fetch_add(1, Relaxed);
        self.shard.metrics.retries.add(1);
        self.exchange.update_recording(Recording::on_moved);
        self.exchange.owner.account().note_retry();
        self.refusal = Some(error);
    }
}

/// Counts the end of a prompt's transfer, if there was something to transfer.
fn note_prefill(prefilled: Option<&PrefillResult>, outcome: PrefillOutcome) {
    if let Some(PrefillResult { engine, .. }) = prefilled.filter(|of| of.stage.is_some()) {
        engine.counters.on_prefill(outcome);
    }
}

/// Counts and logs a prompt that `engine` did not compute.
fn note_failed_prefill(shard: &Shard, engine: &Engine, why: &str) {
    log_prefill(shard, engine, why);
    engine.counters.on_prefill(PrefillOutcome::Failed);
}

fn log_redirect(shard: &Shard, engine: &Engine, target: &str, answer: &Answer) {
    if let Some(silent) = shard.log_allowed() {
        let to = answer.head.headers.get(LOCATION);
        let to = String::from_utf8_lossy(to.map_or(b"", HeaderValue::as_bytes));
        let (engine, status) = (&engine.spec.url, answer.head.status);
        tracing::warn!(%engine, silent, "{target} is redirected ({status}) to {to:?}");
    }
}

/// Asks `prefill` for a prompt. Returns that request, and the engine that is to be asked for the answer at once, with
/// its request.
///
/// # Errors
/// Why it was not asked, as a clause.
async fn begin_pair(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    exchange: &Exchange,
    seat: &Seat,
    prefill: &Arc<Engine>,
) -> Result<(Prefilling, Arc<Engine>, Option<StageRequest>), String> {
    let (request, stage) = exchange.meet(shard, prefill).await?;
    let answers = seat.decode_worker().and_then(|of| upstream.engine(of));
    let answers = answers.ok_or("the decode engine left the fleet")?;
    let task = Prefilling::start(upstream, prefill, request);
    Ok((task, answers, Some(stage)))
}

/// Whether the engine that is to answer cannot compute the prompt.
fn needs_prefill(upstream: &Upstream, seat: &Seat) -> bool {
    let answers = seat.decode_worker().and_then(|of| upstream.engine(of));
    answers.is_some_and(|engine| engine.needs_prefill())
}

/// Waits for the first bytes of the answer that a decode engine gives (`attempt`), while a prefill engine computes the
/// prompt (`task`). The dispatcher has a decision for `seat` then.
///
/// # Errors
/// The prefill engine failed before that.
async fn join_pair<T>(
    seat: &Seat,
    task: &mut Prefilling,
    attempt: impl Future<Output = T>,
) -> Result<T, PrefillFault> {
    let mut attempt = std::pin::pin!(attempt);
    tokio::select! {
        biased;
        outcome = &mut attempt => {
            seat.prefilled();
            return Ok(outcome);
        }
        computed = task => computed?,
    }
    seat.prefilled();
    Ok(attempt.await)
}

fn log_prefill(shard: &Shard, engine: &Engine, why: &str) {
    if let Some(silent) = shard.log_allowed() {
        tracing::warn!(
            engine = %engine.spec.url,
            silent,
            "a prompt was not transferred: {why}"
        );
    }
}

/// The error for a client whose prompt `engine` did not compute, and whether another engine would answer the same.
fn refused_prefill(engine: &Engine, fault: PrefillFault) -> (ApiError, bool) {
    let url = &engine.spec.url;
    match fault.refusal {
        Some((status, text)) if status.is_client_error() => {
            let error = ApiError::refused_by_engine(status.as_u16(), &url.to_string(), &text);
            (error, true)
        }
        _ => (ApiError::engine_failed(&url.to_string(), &fault.why), false),
    }
}

/// Work of an engine for another one.
struct PrefillResult {
    engine: Arc<Engine>,
    /// The request to the decode engine; `None`: there is nothing to transfer.
    stage: Option<StageRequest>,
}

/// Lets `engine` compute the prompt for another one. Returns the request to that one; `None` if there is nothing to
/// transfer.
///
/// # Errors
/// Why it did not, as a clause: one engine has to compute prompt and answer.
async fn prefill(
    shard: &Rc<Shard>,
    upstream: &Upstream,
    exchange: &Exchange,
    engine: &Arc<Engine>,
) -> Result<Option<StageRequest>, String> {
    let stage = exchange.prefill_request(shard, None).await;
    let stage = stage.ok_or("the request could not be rewritten")?;
    let outgoing = exchange.outgoing(engine, &stage);
    if !exchange.keep_sent(outgoing.body[0].len()) {
        return Err("there is no memory for a second body".into());
    }
    let mut visit = Visit::begin(&upstream.engines, engine.clone());
    let limit = upstream.engines.settings.first_byte_timeout;
    let whole = async {
        let mut answer = converse(upstream, &visit, &outgoing).await?;
        let body = read_rest(&mut answer).await?;
        Ok((answer, body))
    };
    let only = exchange.request.only.as_deref();
    let outcome = upstream.engines.answered(engine, only, limit, whole).await;
    drop((outgoing, stage));
    exchange.keeps_body_only();
    let (answer, body) = outcome.map_err(|failure| {
        visit.on_failure(&failure);
        failure.to_string()
    })?;
    let status = answer.head.status;
    visit.on_first_byte(status, true);
    if answer.complete && may_keep(exchange, &answer.head) {
        upstream.keep(engine, answer.connection);
    }
    if !status.is_success() {
        let text = body.as_deref().map(String::from_utf8_lossy);
        let text: String = text
            .iter()
            .flat_map(|text| text.chars())
            .take(200)
            .collect();
        return Err(format!(
            "the prefill engine answered {status}; does it have a KV connector? Its answer: {text:?}"
        ));
    }
    let body = body.ok_or("the answer of the prefill engine is too long")?;
    let fields = disagg::decode_fields(&body)?;
    match &fields {
        None => engine.counters.on_prefill(PrefillOutcome::NoParams),
        Some(fields) if !exchange.keep_sent(fields.len()) => {
            return Err("there is no memory for its parameters".into());
        }
        Some(_) => {}
    }
    Ok(fields.map(|fields| StageRequest {
        role: Role::Decode,
        change: Change::Before(fields),
    }))
}

/// The error for a client whose request `engine` refused by `answer`, as it is busy.
fn refusal(engine: &Engine, answer: &Answer) -> ApiError {
    let seconds = answer.head.headers.get(RETRY_AFTER);
    let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
    let text = String::from_utf8_lossy(&answer.first);
    let text: String = text.chars().take(500).collect();
    let text = format!("engine {} answered 503: {text}", engine.spec.url);
    ApiError::overloaded(text, seconds.unwrap_or(1))
}

/// The error for a client whose request `engine` failed.
fn failure_error(engine: &Engine, failure: &Failure) -> ApiError {
    let url = &engine.spec.url;
    match failure {
        Failure::FirstByteTimeout(limit) => {
            ApiError::engine_timeout(&url.to_string(), limit.as_secs_f64())
        }
        Failure::Refused(_)
        | Failure::ConnectTimeout(_)
        | Failure::Tls { .. }
        | Failure::Reported(Reported { is_busy: true, .. }) => {
            ApiError::overloaded(format!("engine {url}: {failure}; try again"), 1)
        }
        _ => ApiError::engine_failed(&url.to_string(), &failure.to_string()),
    }
}

/// Whether an answer redirects its client, past the router's keys and limits.
fn is_redirect(status: StatusCode) -> bool {
    status.is_redirection() && status != StatusCode::NOT_MODIFIED
}
