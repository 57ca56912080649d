//! Finds an engine that continues a stream.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;
use slipstream_base::WorkerId;
use tokio::time::Instant;

use super::Upstream;
use super::api::{Api, StreamKind};
use super::closing::closing;
use super::converse::Answer;
use super::ends::{Judgment, StreamEnd};
use super::event::EventData;
use super::exchange::Exchange;
use super::failure::Failure;
use super::obtain::{StartedAnswer, obtain};
use super::peek::peek;
use super::resume::{self, Lost, Plan};
use super::rewrite::{Rewriter, Seam, Verdict};
use super::sent::Kept;
use super::sse::{self, Scanner};
use super::stream::{EVENT_BYTES_MAX, SentPart};
use super::turn::Turn;
use crate::door::budget::Charge;
use crate::door::service::Service;
use crate::door::shard::Shard;
use crate::openai::ApiError;
use crate::wire::Decoded;

/// Limit of bytes of a continuation read before the client gets any: they may hold the ids of the whole prompt.
const SEAM_BYTES_MAX: usize = 8 << 20;

/// The rest of an answer whose engine is lost.
pub(super) enum Resumed {
    /// Another engine continues the stream.
    Elsewhere(Box<Continued>),
    /// Another engine gives all of it.
    Anew(Box<StartedAnswer>),
    /// Only these last events were missing.
    Closed(Bytes),
}

/// A stream at another engine.
pub(super) struct Continued {
    pub(super) begun: StartedAnswer,
    pub(super) rewriter: Rewriter,
    /// Tokens of the answer that are in the new prompt, if they are the lost engine's own tokens.
    pub(super) kept: Option<Kept>,
    /// The part before it.
    pub(super) sent: SentPart,
    /// Memory of the answer's first bytes, if they may be many.
    pub(super) charge: Option<Charge>,
}

/// The sent part of a stream whose engine is lost.
pub(super) struct Remains {
    pub(super) kind: StreamKind,
    /// Its engine.
    pub(super) lost: WorkerId,
    pub(super) sent: SentPart,
    pub(super) prompt: Option<Vec<u32>>,
}

impl Remains {
    /// Memory that is held in addition to that of an undisturbed stream, bytes.
    fn copied_bytes(&self) -> u64 {
        self.prompt.as_ref().map_or(0, |ids| 4 * ids.len() as u64)
    }
}

/// Result of planning a continuation.
enum Planned {
    /// The ways to continue, the best first, or why there are none. The sent part is given back.
    Plans(Result<Vec<Plan>, String>, SentPart),
    /// Only these last events are missing.
    Closed(Bytes),
}

/// Continues the stream of `exchange` on another engine.
///
/// # Errors
/// The reason why no engine does.
pub(super) async fn resume(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    exchange: &Exchange,
    remains: Remains,
) -> Result<Resumed, String> {
    let lost = remains.lost;
    let (planned, mut charge) = plan(shard, upstream, exchange, remains).await?;
    let (plans, sent) = match planned {
        Planned::Plans(plans, sent) => (plans?, sent),
        Planned::Closed(last) => return Ok(Resumed::Closed(last)),
    };
    let bodies: usize = plans.iter().map(|plan| plan.body.len()).sum();
    let all = charge.bytes() + bodies as u64;
    charge.grow_to(all).map_err(|error| error.message)?;
    let mut why = String::from("it cannot continue");
    for plan in plans {
        charge.shrink_to(all);
        match attempt(shard, upstream, exchange, lost, plan, &mut charge).await {
            Ok((begun, rewriter, kept)) => {
                charge.shrink_to(begun.answer.first.len() as u64);
                return Ok(Resumed::Elsewhere(Box::new(Continued {
                    begun,
                    rewriter,
                    kept,
                    sent,
                    charge: Some(charge),
                })));
            }
            Err(reason) => why = reason,
        }
    }
    Err(why)
}

/// Requests the answer of `exchange` once more, of which its client has nothing, from another engine than `lost`.
///
/// # Errors
/// The reason why no engine gives it.
pub(super) async fn restart(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    exchange: &Exchange,
    lost: WorkerId,
) -> Result<Resumed, String> {
    let mut next = exchange.continuation(exchange.body.clone(), None, None);
    next.avoid(&upstream.engines, lost);
    let begun = obtain(shard, upstream, &next).await;
    let begun = begun.map_err(|error| error.message)?;
    let head = &begun.answer.head;
    if head.status != StatusCode::OK || !head.is_event_stream() {
        let url = &begun.visit.engine().spec.url;
        return Err(format!("{url} answered {} to its repetition", head.status));
    }
    Ok(Resumed::Anew(Box::new(begun)))
}

/// Plans how the stream continues, and returns the memory that this takes. Waits its turn.
///
/// # Errors
/// There is no memory or no thread for it.
async fn plan(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    exchange: &Exchange,
    remains: Remains,
) -> Result<(Planned, Charge), String> {
    let message = |error: ApiError| error.message;
    let mut charge = exchange.charge_job().map_err(message)?;
    charge.grow_to(remains.copied_bytes()).map_err(message)?;
    let catalog = upstream.engines.catalog();
    let api = exchange.api;
    let by_tokens = exchange.by_tokens;
    let by_params = !upstream.engines.disaggregates();
    let bytes = exchange.body.len() + remains.sent.bytes.len();
    let job = move |_: &Service, body: &[u8]| {
        let Remains { sent, .. } = remains;
        let prompt = remains.prompt.as_ref().map(|ids| ids.len() as u64);
        if let Some(last) = closing(api, body, &sent.bytes, &sent.seams, prompt) {
            return Ok(Planned::Closed(last.into()));
        }
        let model = peek(body).and_then(|seen| seen.model);
        let plans = resume::plans(&Lost {
            kind: remains.kind,
            body,
            sent: &sent.bytes,
            seams: &sent.seams,
            prompt: remains.prompt.as_deref(),
            by_tokens,
            by_params,
            model_len: catalog.model_len(model.as_deref()),
        });
        Ok(Planned::Plans(plans, sent))
    };
    let body = exchange.body.clone();
    let turn = upstream.planning.acquire().await;
    let planned = shard.run_reading(body, bytes, charge, job).await;
    drop(turn);
    planned.map_err(message)
}

/// Sends the request of `plan` to another engine than `lost`. Returns the begun answer, and how to adapt its events. `charge`
/// grows by what is read of the answer.
///
/// # Errors
/// The reason why this does not continue the stream.
async fn attempt(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    exchange: &Exchange,
    lost: WorkerId,
    plan: Plan,
    charge: &mut Charge,
) -> Result<(StartedAnswer, Rewriter, Option<Kept>), String> {
    let only = plan
        .is_for_vllm
        .then(|| upstream.engines.of_vllm(exchange.request.only.as_deref()));
    let mut next = exchange.continuation(plan.body.into(), plan.path, only);
    next.avoid(&upstream.engines, lost);
    let begun = obtain(shard, upstream, &next).await;
    let mut begun = begun.map_err(|error| error.message)?;
    let engine = begun.visit.engine().clone();
    let (url, head) = (&engine.spec.url, &begun.answer.head);
    if head.status != StatusCode::OK || !head.is_event_stream() {
        return Err(format!(
            "{url} answered {} to its continuation",
            head.status
        ));
    }
    if let Some(seam) = plan.seam {
        let limit = upstream.engines.settings.first_byte_timeout;
        let only = next.request.only.as_deref();
        let idle = upstream.engines.settings.idle_timeout;
        let judged = judge(&mut begun.answer, next.api, seam, idle, charge);
        let judged = upstream.engines.answered(&engine, only, limit, judged);
        match judged.await {
            Ok(None) => {}
            Ok(Some(differs)) => return Err(format!("{url}: {differs}")),
            Err(failure) => {
                begun.visit.on_failure(&failure);
                return Err(format!("{url}: {failure}"));
            }
        }
    }
    Ok((begun, plan.rewriter, plan.kept))
}

/// Reads `answer`, to a request of `api`, up to its first token. Returns the reason if it does not continue the client's
/// part.
///
/// # Errors
/// The engine's failure, also if no part of an answer comes for the time `idle`: comments are none.
///
/// `charge` grows by the bytes read.
async fn judge(
    answer: &mut Answer,
    api: Api,
    mut seam: Seam,
    idle: Duration,
    charge: &mut Charge,
) -> Result<Option<String>, Failure> {
    let mut progress = Instant::now();
    let charged = charge.bytes();
    let mut read = answer.first.to_vec();
    let (mut scanner, mut turn) = (Scanner::default(), Turn::default());
    let mut end = StreamEnd::new(api, 1);
    // The part that the scanner has seen, and that of whole events which are judged.
    let (mut scanned, mut judged) = (0, 0);
    loop {
        if turn.is_over() {
            tokio::task::yield_now().await;
        }
        let whole = scanner.feed(&read[scanned..]);
        if whole > 0 {
            for event in sse::events(&read[judged..scanned + whole]) {
                let text = event.text();
                let data = EventData::read(&text);
                let verdict = seam.judge(&event, data.as_ref());
                if verdict == Verdict::Fits {
                    answer.first = Bytes::from(read);
                    return Ok(None);
                }
                match end.judge(&event, data.as_ref()) {
                    Judgment::Failed(reported) => return Err(Failure::Reported(reported)),
                    Judgment::Continues if event.has_content() => progress = Instant::now(),
                    Judgment::Continues | Judgment::Foreign | Judgment::IsOver => {}
                }
                if let Verdict::Differs(why) = verdict {
                    return Ok(Some(why));
                }
            }
            judged = scanned + whole;
        }
        scanned = read.len();
        if let Err(error) = charge.grow_to(charged + read.len() as u64) {
            return Ok(Some(error.message));
        }
        if read.len() > SEAM_BYTES_MAX || read.len() - judged > EVENT_BYTES_MAX {
            return Ok(Some(
                "its continuation begins with too long an event".into(),
            ));
        }
        match answer.decoder.decode(&mut answer.connection.buf) {
            Ok(Decoded::Data(data)) => {
                turn.on_piece();
                read.extend_from_slice(&data);
                continue;
            }
            Ok(Decoded::End) => return Ok(Some("its continuation has no text".into())),
            Ok(Decoded::NeedMore) => {}
            Err(error) => return Err(Failure::Protocol(error)),
        }
        let left = idle.saturating_sub(progress.elapsed());
        let more = std::future::poll_fn(|cx| answer.connection.poll_fill(cx));
        let more = tokio::time::timeout(left, more).await;
        // Bytes may be there whenever they are asked for.
        let Ok(more) = more.map_err(drop) else {
            return Err(Failure::Stalled(idle));
        };
        if left.is_zero() {
            return Err(Failure::Stalled(idle));
        }
        match more {
            Ok(0) if answer.decoder.ends_at_close() => {
                return Ok(Some("its continuation has no text".into()));
            }
            Ok(0) => return Err(Failure::Lost("closed within its answer".into())),
            Ok(bytes) => turn.on_read(bytes),
            Err(error) => return Err(Failure::Lost(error.to_string())),
        }
    }
}
