//! Errors for clients whose request no worker takes, or whose worker is gone.

use slipstream_base::WorkerId;
use slipstream_router::RouteError;

use crate::door::metrics::{Rejection, ShardMetrics};
use crate::openai::ApiError;

/// The error for a request that no worker takes.
pub(crate) fn rejection(
    metrics: &ShardMetrics,
    error: &RouteError,
    failed: Option<WorkerId>,
) -> ApiError {
    let retry_after_s = match error {
        RouteError::Busy { retry_after_s, .. } => *retry_after_s,
        _ => 1,
    };
    if !error.retry_may_help() {
        return ApiError::bad_body(error.to_string());
    }
    metrics.on_rejected(match error {
        RouteError::Busy { .. } => Rejection::Busy,
        _ => Rejection::NoWorker,
    });
    let text = match failed {
        None => error.to_string(),
        Some(worker) => format!("worker {worker} does not take the request, and {error}"),
    };
    ApiError::overloaded(text, retry_after_s)
}

/// The error for a request whose worker is gone and that is not retried.
pub(crate) fn loss(
    metrics: &ShardMetrics,
    worker: WorkerId,
    failed: Option<WorkerId>,
    begun: bool,
) -> ApiError {
    match failed {
        Some(first) if !begun => {
            metrics.on_rejected(Rejection::NoWorker);
            let text = format!(
                "workers {first} and {worker} do not take the request at the moment; try again"
            );
            ApiError::overloaded(text, 1)
        }
        _ => ApiError::worker_lost(&worker.to_string()),
    }
}
