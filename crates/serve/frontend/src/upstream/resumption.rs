//! Finds an engine that continues a stream.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;
use slipstream_base::WorkerId;
use tokio::time::Instant;

use super::Upstream;
use super::closing::closing;
use super::connection::Failure;
use super::converse::Answer;
use super::ends::{Api, Judgment, StreamEnd};
use super::event::EventData;
use super::exchange::Exchange;
use super::obtain::{Begun, obtain};
use super::peek::peek;
use super::relay::{Turn, is_event_stream};
use super::resume::{self, Lost, StreamKind};
use super::rewrite::{Rewriter, Seam, Verdict};
use super::sent::Kept;
use super::sse::{self, Scanner};
use super::stream::EVENT_BYTES_MAX;
use super::wire::Decoded;
use crate::service::Service;
use crate::shard::Shard;

/// Limit of bytes of a continuation read before the client gets any: they may hold the ids of the whole prompt.
const SEAM_BYTES_MAX: usize = 8 << 20;

/// The rest of an answer whose engine is lost.
pub(super) enum Resumed {
    /// Another engine continues the stream.
    Elsewhere(Box<Continued>),
    /// Only these last events were missing.
    Closed(Bytes),
}

/// A stream at another engine.
pub(super) struct Continued {
    pub(super) begun: Begun,
    pub(super) rewriter: Rewriter,
    /// Tokens of the answer that are in the new prompt, if they are the lost engine's own tokens.
    pub(super) kept: Option<Kept>,
}

/// The sent part of a stream whose engine is lost.
pub(super) struct Remains {
    pub(super) kind: StreamKind,
    /// Its engine.
    pub(super) lost: WorkerId,
    /// As in [`Lost`].
    pub(super) sent: Vec<u8>,
    pub(super) seams: Vec<(usize, Option<Kept>)>,
    pub(super) prompt: Option<Vec<u32>>,
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
    let charge = exchange.charge_job().map_err(|error| error.message)?;
    let catalog = upstream.engines.catalog();
    let (api, lost) = (exchange.api, remains.lost);
    let by_tokens = exchange.by_tokens;
    let by_params = !upstream.engines.disaggregates();
    let bytes = exchange.body.len() + remains.sent.len();
    let job = move |_: &Service, body: &[u8]| {
        let prompt = remains.prompt.as_ref().map(|ids| ids.len() as u64);
        if let Some(last) = closing(api, body, &remains.sent, &remains.seams, prompt) {
            return Ok(Err(last));
        }
        let model = peek(body).and_then(|seen| seen.model);
        Ok(Ok(resume::plans(&Lost {
            kind: remains.kind,
            body,
            sent: &remains.sent,
            seams: &remains.seams,
            prompt: remains.prompt.as_deref(),
            by_tokens,
            by_params,
            model_len: catalog.model_len(model.as_deref()),
        })))
    };
    let body = exchange.body.clone();
    let turn = upstream.planning.acquire().await;
    let planned = shard.run_reading(body, bytes, charge, job).await;
    drop(turn);
    let (planned, _charge) = planned.map_err(|error| error.message)?;
    let plans = match planned {
        Ok(plans) => plans,
        Err(last) => return Ok(Resumed::Closed(last.into())),
    };
    let mut why = String::from("it cannot continue");
    for plan in plans? {
        let only = plan
            .is_for_vllm
            .then(|| upstream.engines.of_vllm(exchange.request.only.as_deref()));
        let mut next = exchange.continued(plan.body, plan.path, only);
        next.avoid(&upstream.engines, lost);
        let mut begun = match obtain(shard, upstream, &next).await {
            Ok(begun) => begun,
            Err(error) => {
                why = error.message;
                continue;
            }
        };
        let engine = begun.visit.engine().clone();
        let (url, head) = (&engine.spec.url, &begun.answer.head);
        if head.status != StatusCode::OK || !is_event_stream(head) {
            why = format!("{url} answered {} to its continuation", head.status);
            continue;
        }
        if let Some(seam) = plan.seam {
            let limit = upstream.engines.settings.first_byte_timeout;
            let only = next.request.only.as_deref();
            let idle = upstream.engines.settings.idle_timeout;
            let judged = judge(&mut begun.answer, next.api, seam, idle);
            let judged = upstream
                .engines
                .answered(&engine, only, limit, judged)
                .await;
            match judged {
                Ok(None) => {}
                Ok(Some(differs)) => {
                    why = format!("{url}: {differs}");
                    continue;
                }
                Err(failure) => {
                    begun.visit.on_failure(&failure);
                    why = format!("{url}: {failure}");
                    continue;
                }
            }
        }
        return Ok(Resumed::Elsewhere(Box::new(Continued {
            begun,
            rewriter: plan.rewriter,
            kept: plan.kept,
        })));
    }
    Err(why)
}

/// Reads `answer`, to a request of `api`, up to its first token. Returns the reason if it does not continue the client's
/// part.
///
/// # Errors
/// The engine's failure, also if no part of an answer comes for the time `idle`: comments are none.
async fn judge(
    answer: &mut Answer,
    api: Api,
    mut seam: Seam,
    idle: Duration,
) -> Result<Option<String>, Failure> {
    let mut progress = Instant::now();
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
                if event.has_content() {
                    progress = Instant::now();
                }
                let data = EventData::read(&event.data);
                let verdict = seam.judge(&event, data.as_ref());
                if verdict == Verdict::Fits {
                    answer.first = Bytes::from(read);
                    return Ok(None);
                }
                if let Judgment::Failed(reported) = end.judge(&event, data.as_ref()) {
                    return Err(Failure::Reported(reported));
                }
                if let Verdict::Differs(why) = verdict {
                    return Ok(Some(why));
                }
            }
            judged = scanned + whole;
        }
        scanned = read.len();
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
