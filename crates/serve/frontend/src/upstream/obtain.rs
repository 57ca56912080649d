//! Finds an engine that answers a request: attempts, retries, and the two engines of a prompt computed elsewhere.

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
use super::connection::Failure;
use super::converse::{Answer, converse, may_keep, read_rest};
use super::disagg::{self, Change, StageRequest};
use super::ends::Reported;
use super::engines::{Engine, Visit};
use super::exchange::Exchange;
use super::metrics::PrefillOutcome;
use super::pair::{PrefillFault, Prefilling};
use super::record::Recording;
use super::seat::Seat;
use crate::openai::ApiError;
use crate::shard::Shard;

/// An answer that has begun.
pub(super) struct Begun {
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
) -> Result<Begun, ApiError> {
    let mut seat = Seat::submit(shard, upstream, &exchange.request);
    // A named engine is tried first, and others if it is lost.
    let mut prefers = exchange.prefers;
    let mut refusal: Option<Refusal> = None;
    let mut prefilled: Option<Prefilled> = None;
    let mut decided = None;
    loop {
        let placed = match decided.take() {
            Some(placed) => Ok(placed),
            None => seat.placed().await,
        };
        let (mut worker, mut role) = match placed {
            Ok(placed) => placed,
            Err(error) => {
                let is_there = |worker: &WorkerId| {
                    let engine = upstream.engine(*worker);
                    engine.is_some_and(|engine| !engine.is_mirror())
                };
                let preferred = exchange.request.direct.filter(|_| prefers);
                let others = preferred.filter(is_there).and_then(|worker| {
                    let only = exchange.request.only.as_deref();
                    let is_lost = matches!(error.status, 502 | 503);
                    upstream.engines.besides(worker, only).filter(|_| is_lost)
                });
                let Some(others) = others else {
                    return Err(refusal.map_or(error, |refusal| refusal.error));
                };
                prefers = false;
                let request = dispatch::Request {
                    direct: None,
                    only: Some(others),
                    ..exchange.request.clone()
                };
                seat = Seat::submit(shard, upstream, &request);
                refusal.get_or_insert(Refusal { error });
                continue;
            }
        };
        let mut engine = match (upstream.engine(worker), role) {
            (Some(engine), _) => engine,
            // Removed since it was chosen.
            (None, Role::Prefill) => {
                seat.prefill_failed();
                continue;
            }
            (None, _) => {
                seat.failed_by(worker);
                continue;
            }
        };
        let mut prefilling = None;
        if role == Role::Prefill && engine.kv_protocol() != KvProtocol::Params {
            match begin_pair(shard, upstream, exchange, &seat, &engine).await {
                Ok((task, answering, stage)) => {
                    let prefill = std::mem::replace(&mut engine, answering);
                    prefilled = Some(Prefilled {
                        engine: prefill,
                        stage,
                    });
                    prefilling = Some((worker, task));
                    (worker, role) = (engine.spec.worker, Role::Decode);
                }
                Err(why) => {
                    log_prefill(shard, &engine, &why);
                    engine.counters.on_prefill(PrefillOutcome::Failed);
                    if needs_prefill(upstream, &seat) {
                        seat.failed_by(worker);
                    } else {
                        seat.prefill_failed();
                    }
                    continue;
                }
            }
        }
        if role == Role::Prefill {
            match prefill(shard, upstream, exchange, &engine).await {
                Ok(stage) => {
                    prefilled = Some(Prefilled { engine, stage });
                    seat.prefilled();
                }
                Err(why) => {
                    log_prefill(shard, &engine, &why);
                    engine.counters.on_prefill(PrefillOutcome::Failed);
                    seat.prefill_failed();
                }
            }
            continue;
        }
        if role == Role::Both && engine.needs_prefill() && !exchange.request.whole {
            let text = format!(
                "no prefill engine takes the request, and engine {} answers computed prompts only; try again",
                engine.spec.url
            );
            let error = ApiError::overloaded(text, 1);
            return Err(refusal.map_or(error, |refusal| refusal.error));
        }
        let prefilled = prefilled.take().filter(|_| role == Role::Decode);
        let stage = match &prefilled {
            Some(Prefilled {
                stage: Some(stage), ..
            }) => stage.clone(),
            _ => StageRequest::default(),
        };
        let count = |outcome| {
            let known = prefilled.as_ref().filter(|of| of.stage.is_some());
            if let Some(Prefilled { engine, .. }) = known {
                engine.counters.on_prefill(outcome);
            }
        };
        let engine = &engine;
        let mut visit = Visit::begin(&upstream.engines, engine.clone());
        let limit = upstream.engines.settings.first_byte_timeout;
        let outgoing = exchange.outgoing(engine, &stage);
        let attempt = converse(upstream, &visit, &outgoing);
        // A request that is not repeated waits also for a hung engine.
        let only = if exchange.repeats {
            exchange.request.only.as_deref()
        } else {
            Some(&[][..])
        };
        let attempt = upstream.engines.answered(engine, only, limit, attempt);
        let outcome = match prefilling.as_mut() {
            None => attempt.await,
            Some((prefill_worker, task)) => {
                let outcome = both(&seat, task, attempt).await;
                exchange.keeps_body_only();
                match outcome {
                    Ok(outcome) => {
                        let now = seat.placed().await?;
                        if now != (worker, role) {
                            // The fleet has changed.
                            decided = Some(now);
                            continue;
                        }
                        outcome
                    }
                    Err(fault) => {
                        let prefill = prefilled.as_ref().expect("it computes the prompt");
                        log_prefill(shard, &prefill.engine, &fault.why);
                        count(PrefillOutcome::Failed);
                        drop(visit);
                        if !engine.needs_prefill() {
                            seat.prefill_failed();
                            continue;
                        }
                        let (error, is_final) = refused_prefill(&prefill.engine, fault);
                        if is_final || !upstream.spend() {
                            return Err(error);
                        }
                        prefill.engine.counters.retried.fetch_add(1, Relaxed);
                        shard.metrics.retries.add(1);
                        exchange.recorded(Recording::on_moved);
                        exchange.owner.account().note_retry();
                        refusal = Some(Refusal { error });
                        seat.failed_by(*prefill_worker);
                        continue;
                    }
                }
            }
        };
        match outcome {
            Ok(answer) => {
                let status = answer.head.status;
                visit.on_first_byte(status, answer.complete);
                if is_redirect(status) {
                    if let Some(silent) = shard.log_allowed() {
                        let to = answer.head.headers.get(LOCATION);
                        let to = String::from_utf8_lossy(to.map_or(b"", HeaderValue::as_bytes));
                        let engine = &engine.spec.url;
                        tracing::warn!(%engine, silent, "{} is redirected ({status}) to {to:?}", exchange.target);
                    }
                    count(PrefillOutcome::DecodeFailed);
                    let url = engine.spec.url.to_string();
                    return Err(ApiError::engine_redirects(&url, status.as_u16()));
                }
                let is_decode = role == Role::Decode;
                let fails = status.is_client_error() || status.is_server_error();
                count(if fails {
                    PrefillOutcome::DecodeFailed
                } else {
                    PrefillOutcome::Transferred
                });
                let is_busy = status == StatusCode::SERVICE_UNAVAILABLE;
                if is_decode && fails && !is_busy && !engine.needs_prefill() {
                    // Perhaps for the fields that the client did not send.
                    if let Some(silent) = shard.log_allowed() {
                        tracing::warn!(
                            engine = %engine.spec.url,
                            silent,
                            "the decode engine answered {status} to the parameters of a prefill engine, so one engine \
                             computes prompt and answer"
                        );
                    }
                    drop((answer, visit));
                    seat.prefill_failed();
                    continue;
                }
                // An engine of SGLang answers 500 if its prompt did not arrive.
                let is_lost = is_decode && engine.needs_prefill() && status.is_server_error();
                let repeats = exchange.repeats && answer.complete;
                if (is_busy || is_lost) && repeats && upstream.spend() {
                    // It is busy or stops; its words reach the client if no other engine takes it.
                    refusal = Some(Refusal::of_answer(engine, &answer));
                    engine.counters.retried.fetch_add(1, Relaxed);
                    shard.metrics.retries.add(1);
                    exchange.recorded(Recording::on_moved);
                    exchange.owner.account().note_retry();
                    drop((answer, visit));
                    seat.failed_by(worker);
                    continue;
                }
                seat.begun();
                if let Some((_, task)) = prefilling {
                    seat.keep_prefill(task);
                }
                exchange.recorded(|recording| recording.on_begun(worker, &engine.name));
                // A refused continuation does not change whose tokens the client has.
                exchange
                    .owner
                    .account()
                    .note_engine(&engine.spec.url, status.is_success());
                return Ok(Begun {
                    seat,
                    visit,
                    answer,
                });
            }
            Err(failure) => {
                visit.on_failure(&failure);
                count(PrefillOutcome::DecodeFailed);
                let error = failed(engine, &failure);
                // It may be computing the request still, or again.
                let final_failure = matches!(failure, Failure::FirstByteTimeout(_))
                    || !exchange.repeats && !failure.is_before_request();
                // All requests of a hung engine move, as its streams do.
                let is_free = failure == Failure::Hung;
                if final_failure || !is_free && !upstream.spend() {
                    shard.metrics.streams_lost.add(1);
                    return Err(error);
                }
                tracing::debug!(engine = %engine.spec.url, %failure, "asking another engine");
                engine.counters.retried.fetch_add(1, Relaxed);
                shard.metrics.retries.add(1);
                exchange.recorded(Recording::on_moved);
                exchange.owner.account().note_retry();
                refusal = Some(Refusal { error });
                drop(visit);
                seat.failed_by(worker);
            }
        }
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
async fn both<T>(
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
struct Prefilled {
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
    if !exchange.keeps(outgoing.body[0].len()) {
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
        Some(fields) if !exchange.keeps(fields.len()) => {
            return Err("there is no memory for its parameters".into());
        }
        Some(_) => {}
    }
    Ok(fields.map(|fields| StageRequest {
        role: Role::Decode,
        change: Change::Before(fields),
    }))
}

/// The last reason why a request has no answer.
struct Refusal {
    error: ApiError,
}

impl Refusal {
    fn of_answer(engine: &Engine, answer: &Answer) -> Refusal {
        let seconds = answer.head.headers.get(RETRY_AFTER);
        let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
        let text = String::from_utf8_lossy(&answer.first);
        let text: String = text.chars().take(500).collect();
        let text = format!("engine {} answered 503: {text}", engine.spec.url);
        Refusal {
            error: ApiError::overloaded(text, seconds.unwrap_or(1)),
        }
    }
}

/// The error for a client whose request `engine` failed.
fn failed(engine: &Engine, failure: &Failure) -> ApiError {
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
