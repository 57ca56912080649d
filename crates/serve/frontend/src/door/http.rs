//! Reading requests within the limits, and plain answers.

use std::rc::Rc;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue,
    RETRY_AFTER,
};
use hyper::{Request, Response, StatusCode};
use slipstream_base::WorkerId;
use slipstream_base::width::to_usize;

use crate::door::body::{AnswerBody, HttpBody};
use crate::door::budget::Charge;
use crate::door::connection::Client;
use crate::door::shard::Shard;
use crate::openai::ApiError;
use slipstream_metrics::Format;

pub(crate) const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const X_SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
const X_WORKER: HeaderName = HeaderName::from_static("x-slipstream-worker");
/// `off`: no other worker continues the answer if its own is lost.
const X_RESUME: HeaderName = HeaderName::from_static("x-slipstream-resume");
/// Asks for a trace, and carries it on whole answers.
pub(crate) const X_TRACE: HeaderName = HeaderName::from_static("x-slipstream-trace");

/// A client's request id is repeated in every event of its stream, so it may not be long.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Options in the head of a request.
pub(crate) struct RequestHead {
    /// The client's id for it, if it sent a usable one; else one of ours.
    pub(crate) id: String,
    /// `x-session-id`, hashed.
    pub(crate) session: Option<u64>,
    /// `x-slipstream-worker`.
    pub(crate) worker: Option<WorkerId>,
    /// `x-slipstream-trace: 1`.
    pub(crate) traced: bool,
    /// Not `x-slipstream-resume: off`.
    pub(crate) resumes: bool,
    /// Whose it is.
    pub(crate) client: Client,
}

/// A request that is here as a whole.
pub(crate) struct Received {
    pub(crate) head: RequestHead,
    pub(crate) body: Bytes,
    /// The body's memory.
    pub(crate) charge: Charge,
}

/// The answer of `/ready`; `any_ready`: a worker or an engine is.
pub(crate) fn ready(shard: &Shard, any_ready: bool) -> Response<HttpBody> {
    let reason = match shard.budget.exhausted() {
        _ if shard.draining.get() => Some("draining"),
        _ if !any_ready => Some("no_worker"),
        limit => limit,
    };
    match reason {
        None => json(200, b"{\"ready\":true}".to_vec()),
        Some(reason) => {
            let body = format!("{{\"ready\":false,\"reason\":\"{reason}\"}}");
            json(503, body.into_bytes())
        }
    }
}

/// 503 while the memory for clients is nearly used up.
pub(crate) fn check_memory(shard: &Shard) -> Result<(), ApiError> {
    if shard.budget.memory.is_tight() {
        return Err(ApiError::out_of_memory());
    }
    Ok(())
}

/// Length of a request's head as HTTP/1.1 writes it: of its target and of
/// each header's name and value.
pub(crate) fn head_bytes(request: &Request<Incoming>) -> usize {
    let target = request
        .uri()
        .path_and_query()
        .map_or(0, |t| t.as_str().len());
    let headers = request.headers().iter();
    // ": " and the line's end.
    headers.fold(target, |sum, (name, value)| {
        sum + name.as_str().len() + value.len() + 4
    })
}

/// Reads the rest of a request: what its head says, and its body within the limits.
pub(crate) async fn receive(
    shard: &Rc<Shard>,
    client: Client,
    request: Request<Incoming>,
    id: &str,
) -> Result<Received, ApiError> {
    check_memory(shard)?;
    let mut charge = client.charge(&shard.budget.memory, 0)?;
    let (parts, body) = request.into_parts();
    if let Some(kind) = parts.headers.get(CONTENT_TYPE) {
        let kind = kind.to_str().unwrap_or("(not text)");
        let essence = kind.split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(ApiError::media_type(kind));
        }
    }
    if let Some(coding) = parts.headers.get(CONTENT_ENCODING)
        && coding != "identity"
    {
        let coding = coding.to_str().unwrap_or("(not text)");
        return Err(ApiError::content_coding(coding));
    }
    let head = head_of(&parts.headers, id, client)?;
    let limits = &shard.service.limits;
    let read = read_body(body, limits.body_bytes_max, &mut charge);
    match tokio::time::timeout(limits.read_timeout, read).await {
        Ok(body) => Ok(Received {
            head,
            body: body?,
            charge,
        }),
        Err(_) => Err(ApiError::request_timeout(
            "body",
            limits.read_timeout.as_secs_f64(),
        )),
    }
}

pub(crate) fn head_of(
    headers: &HeaderMap,
    id: &str,
    client: Client,
) -> Result<RequestHead, ApiError> {
    Ok(RequestHead {
        id: id.to_owned(),
        session: headers
            .get(X_SESSION_ID)
            .map(|v| hash_session(v.as_bytes())),
        worker: worker_header(headers)?,
        traced: headers.get(X_TRACE).is_some_and(|v| v == "1"),
        resumes: resume_header(headers)?,
        client,
    })
}

/// The media type of the body, without its parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> Option<&str> {
    let kind = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(kind.split(';').next().unwrap_or_default().trim())
}

/// Reads the body of an administrator's request, of `bytes_max` bytes at most.
pub(crate) async fn read_admin_body(
    shard: &Shard,
    client: &Client,
    body: Incoming,
    bytes_max: u64,
) -> Result<Bytes, ApiError> {
    let mut charge = client.charge(&shard.budget.memory, 0)?;
    let limit = shard.service.limits.read_timeout;
    let read = tokio::time::timeout(limit, read_body(body, bytes_max, &mut charge)).await;
    let read = read.map_err(|_| ApiError::request_timeout("body", limit.as_secs_f64()))?;
    read.map_err(|error| match error.status {
        413 => ApiError::admin_body_too_large(bytes_max),
        _ => error,
    })
}

/// Reads a body, and charges its bytes as they come.
pub(crate) async fn read_body(
    mut body: Incoming,
    bytes_max: u64,
    charge: &mut Charge,
) -> Result<Bytes, ApiError> {
    if body.size_hint().lower() > bytes_max {
        return Err(ApiError::body_too_large(bytes_max));
    }
    charge.check_growth_to(body.size_hint().lower())?;
    let mut first: Option<Bytes> = None;
    let mut rest = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::bad_body(format!("the body broke off: {error}; send it whole"))
        })?;
        let Ok(data) = frame.into_data() else {
            continue;
        };
        let so_far = first.as_ref().map_or(0, Bytes::len) + rest.len();
        let len = (so_far + data.len()) as u64;
        if len > bytes_max {
            return Err(ApiError::body_too_large(bytes_max));
        }
        charge.grow_to(len)?;
        if so_far == 0 {
            first = Some(data); // most bodies are one piece, and are not copied
            continue;
        }
        if let Some(first) = first.take() {
            rest.reserve(to_usize(body.size_hint().lower()) + data.len() + first.len());
            rest.extend_from_slice(&first);
        }
        rest.extend_from_slice(&data);
    }
    Ok(first.unwrap_or_else(|| rest.freeze()))
}

pub(crate) fn request_id(shard: &Shard, headers: &HeaderMap) -> String {
    let usable = |id: &&str| {
        !id.is_empty()
            && id.len() <= REQUEST_ID_BYTES_MAX
            && id
                .bytes()
                .all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\')
    };
    match headers
        .get(X_REQUEST_ID)
        .and_then(|id| id.to_str().ok())
        .filter(usable)
    {
        Some(id) => id.to_owned(),
        None => format!("{:016x}", shard.next_request_number()),
    }
}

/// A path's text: clients write `meta/llama` as `meta%2Fllama`. Bytes that are no escape stay.
pub(crate) fn percent_decode(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

fn hash_session(id: &[u8]) -> u64 {
    // Any good hash does; FNV-1a is short (Fowler, Noll, Vo; draft-eastlake-fnv).
    id.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn resume_header(headers: &HeaderMap) -> Result<bool, ApiError> {
    match headers.get(X_RESUME).map(HeaderValue::as_bytes) {
        None | Some(b"on") => Ok(true),
        Some(b"off") => Ok(false),
        Some(_) => Err(ApiError::bad_body(
            "header `x-slipstream-resume` must be `on` or `off`",
        )),
    }
}

fn worker_header(headers: &HeaderMap) -> Result<Option<WorkerId>, ApiError> {
    let Some(value) = headers.get(X_WORKER) else {
        return Ok(None);
    };
    let number = value
        .to_str()
        .ok()
        .map(str::trim)
        .and_then(|text| text.strip_prefix('w').unwrap_or(text).parse().ok());
    match number {
        Some(worker) => Ok(Some(WorkerId(worker))),
        None => Err(ApiError::bad_body(
            "header `x-slipstream-worker` must name a worker, such as `w3` or `3`; `GET /health` lists them",
        )),
    }
}

/// The page of metrics, in the format that `headers` prefer.
pub(crate) fn metrics(
    shard: &Shard,
    headers: &HeaderMap,
    id: &str,
) -> Result<Response<HttpBody>, ApiError> {
    let accept: Vec<_> = headers.get_all(ACCEPT).iter().collect();
    let accept: Vec<_> = accept
        .iter()
        .filter_map(|value| value.to_str().ok())
        .collect();
    let format = Format::accepted(Some(&accept.join(",")));
    let page = format.page(&shard.registry).map_err(|error| {
        tracing::error!(%error, "metrics could not be encoded");
        ApiError::internal(id)
    })?;
    let mut response = json(200, page.into_bytes());
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static(format.content_type()),
    );
    Ok(response)
}

/// A JSON answer.
pub(crate) fn json(status: u16, body: Vec<u8>) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::whole(Some(body.into()), None));
    *response.status_mut() = StatusCode::from_u16(status).expect("our statuses are valid");
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// An answer without a body.
pub(crate) fn status_only(status: StatusCode) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::whole(None, None));
    *response.status_mut() = status;
    response
}

/// A JSON answer that may be large.
pub(crate) fn large_json(
    (body, mut charge): (Vec<u8>, Charge),
) -> Result<Response<HttpBody>, ApiError> {
    charge.grow_to(body.len() as u64)?;
    charge.shrink_to(body.len() as u64);
    Ok(json(200, Vec::new()).map(|_| HttpBody::whole(Some(body.into()), Some(charge))))
}

pub(crate) fn error_response(error: &ApiError) -> Response<HttpBody> {
    with_retry(error, error.body())
}

pub(crate) fn with_retry(error: &ApiError, body: Vec<u8>) -> Response<HttpBody> {
    let mut response = json(error.status, body);
    if let Some(seconds) = error.retry_after_s {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// A stream of events.
pub(crate) fn events(body: impl AnswerBody + 'static) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::events(body));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
