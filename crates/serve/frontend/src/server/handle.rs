//! From a request of HTTP to an answer: ids, origins of pages, errors, the account.

use std::convert::Infallible;
use std::rc::Rc;

use hyper::body::{Body, Incoming};
use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD,
    CONNECTION, HeaderMap, HeaderValue, ORIGIN, VARY,
};
use hyper::{Method, Request, Response, StatusCode, Version};
use slipstream_base::{Stage, StageTimes};
use slipstream_planes::clock::monotonic_ns;

use crate::door::access::{AnswerEnd, Entry};
use crate::door::body::HttpBody;
use crate::door::connection::Connection;
use crate::door::http::{X_REQUEST_ID, error_response, request_id, status_only, with_retry};
use crate::door::metrics::Rejection;
use crate::door::service::Service;
use crate::door::shard::Shard;
use crate::door::trace_context::{Span, TraceId};
use crate::openai::{ApiError, message_error};
use crate::server::plane::Plane;
use crate::server::routes::{MESSAGES, route};
use crate::server::ui;
use crate::upstream;

/// Answers one request. Every failure becomes an answer.
pub(crate) async fn handle(
    plane: Plane,
    connection: Rc<Connection>,
    request: Request<Incoming>,
) -> Result<Response<HttpBody>, Infallible> {
    let shard = plane.shard();
    let mut times = StageTimes::default();
    let now = monotonic_ns();
    times.note(Stage::Accept, now);
    shard.metrics.requests.add(1);
    let owner = connection.begin(now);
    let id = request_id(shard, request.headers());
    let span = begin_span(shard, &request);
    if shard.service.access.is_some() || span.is_some() {
        let entry = entry_of(&request, &id, now, span);
        owner.account().open_line(&shard.service, entry);
    }
    let origin = allowed_origin(&shard.service, request.headers());
    let is_head = *request.method() == Method::HEAD;
    let is_http1 = request.version() <= Version::HTTP_11;
    let is_http11 = request.version() == Version::HTTP_11;
    let is_message = request.uri().path().starts_with(MESSAGES);
    let routed = if origin.is_some() && is_preflight(&request) {
        Ok(preflight())
    } else if let Some(answer) = ui::answer(&plane, &request, &id) {
        answer
    } else {
        match &plane {
            Plane::Engines(upstream) => {
                Box::pin(upstream::handle(upstream, &owner, request, &id)).await
            }
            Plane::Workers(workers) => route(workers, &owner, request, &id, times).await,
        }
    };
    let mut response = routed.unwrap_or_else(|error| error_answer(&plane, &error, &id, is_message));
    // An engine's own id stays.
    if !response.headers().contains_key(X_REQUEST_ID)
        && let Ok(id) = HeaderValue::from_str(&id)
    {
        response.headers_mut().insert(X_REQUEST_ID, id);
    }
    if !shard.service.origins.is_empty() {
        name_origin(response.headers_mut(), origin);
    }
    if is_http1 && shard.draining.get() {
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    owner.account().note_status(response.status().as_u16());
    let body = response.body_mut();
    if body.is_whole() {
        owner.answered();
    }
    if is_head || body.is_end_stream() {
        owner.account().note_end(AnswerEnd::Complete); // no body is asked for
    }
    // Chunks, with nothing between the events and the socket.
    if is_http11 && shard.service.direct_writes {
        body.allow_direct();
    }
    body.belongs_to(owner);
    Ok(response)
}

/// What the access log and the span say of a request from the start.
fn entry_of(request: &Request<Incoming>, id: &str, now: u64, span: Option<Span>) -> Entry {
    let trace_id = match &span {
        Some(span) => Some(span.trace.clone()),
        None => TraceId::of(request.headers()),
    };
    Entry {
        request_id: id.to_owned(),
        method: request.method().as_str().to_owned(),
        path: request.uri().path().to_owned(),
        begun_ns: now,
        trace_id: trace_id.map(|id| id.as_str().to_owned()),
        span,
        ..Entry::default()
    }
}

/// The answer that an error is, which is counted and logged. Anthropic's API has errors of its own shape.
fn error_answer(plane: &Plane, error: &ApiError, id: &str, is_message: bool) -> Response<HttpBody> {
    let shard = plane.shard();
    let why = match error.status {
        401 => Some(Rejection::Unauthorized),
        _ if error.is_about_memory() => Some(Rejection::Memory),
        400..=499 if error.status != 429 => Some(Rejection::Invalid),
        _ => None, // counted where it arose
    };
    if let Some(why) = why {
        shard.metrics.on_rejected(why);
    }
    // A server that refuses everything would fill a disk: once a second, with a count.
    if error.status >= 500
        && let Some(suppressed) = shard.log_allowed()
    {
        let more = match suppressed {
            0 => String::new(),
            n => format!(" ({n} more such answers since the last such line)"),
        };
        tracing::warn!(request = %id, status = error.status, "{}{more}", error.message);
    }
    match plane {
        Plane::Workers(_) if is_message => with_retry(error, message_error(error)),
        _ => error_response(error),
    }
}

/// Names the page that may read an answer, if one may.
fn name_origin(headers: &mut HeaderMap, origin: Option<HeaderValue>) {
    // Caches must not give one page's answer to another.
    headers.append(VARY, HeaderValue::from_static("origin"));
    if let Some(origin) = origin {
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(
            ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static("x-request-id, x-slipstream-trace, retry-after"),
        );
    }
}

/// The span of a request, if spans are exported and its trace is sampled.
fn begin_span(shard: &Shard, request: &Request<Incoming>) -> Option<Span> {
    /// Paths that are asked for all the time, and compute nothing.
    const UNTRACED: [&str; 6] = [
        "/metrics", "/health", "/ready", "/live", "/ping", "/version",
    ];
    let service = &shard.service;
    service.spans.as_ref()?;
    let path = request.uri().path();
    if UNTRACED.contains(&path) || ui::answers(path) {
        return None;
    }
    let draw = || shard.next_request_number();
    Span::begin(request.headers(), service.trace_sample, draw)
}

/// The origin of the page that sent the request, if `live.cors_origins` names it.
fn allowed_origin(service: &Service, headers: &HeaderMap) -> Option<HeaderValue> {
    if service.origins.is_empty() {
        return None;
    }
    let origin = headers.get(ORIGIN)?;
    service
        .origins
        .admit(origin.as_bytes())
        .then(|| origin.clone())
}

/// Whether a browser asks what a page may send. It sends no API key with that.
fn is_preflight(request: &Request<Incoming>) -> bool {
    request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key(ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight() -> Response<HttpBody> {
    let mut response = status_only(StatusCode::NO_CONTENT);
    let headers = response.headers_mut();
    for (name, value) in [
        (ACCESS_CONTROL_ALLOW_METHODS, "GET, HEAD, POST, DELETE"),
        (
            ACCESS_CONTROL_ALLOW_HEADERS,
            "authorization, content-type, x-request-id, x-session-id, x-slipstream-worker, \
             x-slipstream-trace, x-slipstream-resume",
        ),
        (ACCESS_CONTROL_MAX_AGE, "7200"), // the most that Chromium keeps
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size<F: Future>(_: impl FnOnce() -> F) -> usize {
        size_of::<F>()
    }

    /// It is held, and copied once, per request: with 17 KiB of it requests took a fifth more CPU.
    #[test]
    #[allow(unreachable_code, clippy::diverging_sub_expression)]
    fn the_future_of_a_request_is_small() {
        let bytes = size(|| handle(todo!(), todo!(), todo!()));
        assert!(bytes <= 6 << 10, "{bytes} bytes");
    }
}
