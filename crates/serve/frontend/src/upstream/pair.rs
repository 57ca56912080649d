//! The request to a prefill engine while the decode engine has its own: the protocols that ask both at once.
//!
//! ```text
//!   obtain ─► Prefilling::start ─ task ─► prefill engine     drained; its end, or its failure
//!          └► converse ─────────────────► decode engine      the answer
//! ```
//!
//! The task belongs to the client's request: it is aborted, and its connection closed, as soon as the request ends or
//! is tried elsewhere.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::StatusCode;

use super::Upstream;
use super::api::Api;
use super::converse::{converse, read_rest};
use super::disagg;
use super::engines::Engine;
use super::exchange::{Outgoing, PrefillRequest};
use super::failure::Failure;
use super::visit::Visit;

/// Why a prefill engine did not compute a prompt.
#[derive(Debug)]
pub(super) struct PrefillFault {
    /// As a clause.
    pub(super) why: String,
    /// It refused the request: its status, and the beginning of its answer.
    pub(super) refusal: Option<(StatusCode, String)>,
}

/// A prompt that an engine computes. Dropped, the request to the engine ends.
#[derive(Debug)]
pub(super) struct Prefilling {
    task: tokio::task::JoinHandle<Result<(), PrefillFault>>,
}

impl Prefilling {
    /// Sends `request` to `engine`.
    pub(super) fn start(
        upstream: &Rc<Upstream>,
        engine: &Arc<Engine>,
        request: PrefillRequest,
    ) -> Prefilling {
        let (upstream, engine) = (upstream.clone(), engine.clone());
        let task = tokio::task::spawn_local(async move {
            let outcome = send(&upstream, &engine, &request).await;
            if let Err(fault) = &outcome {
                tracing::debug!(engine = %engine.spec.url, "a prompt was not computed: {}", fault.why);
            }
            outcome
        });
        Prefilling { task }
    }
}

impl Drop for Prefilling {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Future for Prefilling {
    type Output = Result<(), PrefillFault>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.task).poll(cx).map(|outcome| {
            outcome.unwrap_or_else(|error| {
                Err(PrefillFault {
                    why: format!("its task ended: {error}"),
                    refusal: None,
                })
            })
        })
    }
}

async fn send(
    upstream: &Rc<Upstream>,
    engine: &Arc<Engine>,
    request: &PrefillRequest,
) -> Result<(), PrefillFault> {
    let mut visit = Visit::begin(&upstream.engines, engine.clone());
    let limit = upstream.engines.settings.first_byte_timeout;
    let outgoing = Outgoing {
        method: &request.method,
        target: &request.target,
        headers: disagg::prefill_headers(&request.headers),
        authorization: request.authorization.as_deref(),
        body: request.body.clone(),
        repeats: true,
        streams: false,
        api: Api::Other,
    };
    let whole = async {
        let mut answer = converse(upstream, &visit, &outgoing).await?;
        let body = read_rest(&mut answer).await?;
        Ok((answer, body))
    };
    let outcome = tokio::time::timeout(limit, whole).await;
    let outcome = outcome.unwrap_or(Err(Failure::FirstByteTimeout(limit)));
    let (answer, body) = outcome.map_err(|failure| {
        visit.on_failure(&failure);
        PrefillFault {
            why: failure.to_string(),
            refusal: None,
        }
    })?;
    let status = answer.head.status;
    visit.on_first_byte(status, true);
    if status.is_success() {
        if answer.complete && answer.head.keep_alive {
            upstream.keep(engine, answer.connection);
        }
        return Ok(());
    }
    let text = body.as_deref().map(String::from_utf8_lossy);
    let text: String = text
        .iter()
        .flat_map(|text| text.chars())
        .take(500)
        .collect();
    Err(PrefillFault {
        why: format!(
            "the prefill engine answered {status}; was it started as one? Its answer: {text:?}"
        ),
        refusal: Some((status, text)),
    })
}
