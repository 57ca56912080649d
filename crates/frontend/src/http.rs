//! Paths, keys and limits: from an HTTP request to a handler and back.

use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName,
    HeaderValue, RETRY_AFTER,
};
use hyper::{Method, Request, Response, StatusCode};
use slipstream_base::{Stage, StageTimes, WorkerId};
use slipstream_planes::clock::monotonic_ns;
use slipstream_router::Fleet;

use crate::generate;
use crate::metrics::Rejection;
use crate::openai::{
    ApiError, Kind, ModelCard, TokenizeInput, detokenize_json, model_json, models_json,
    openapi_json, parse_detokenize, parse_tokenize, tokenize_json, version_json,
};
use crate::reply::ReplyBody;
use crate::service::Service;
use crate::shard::Shard;
use crate::talk;
use crate::text::ChatOptions;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const X_SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
const X_WORKER: HeaderName = HeaderName::from_static("x-slipstream-worker");
/// Asks for a trace, and carries it on whole answers.
const X_TRACE: HeaderName = HeaderName::from_static("x-slipstream-trace");

/// A client's request id is repeated in every event of its stream, so it may not be long.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Body of any answer.
pub(crate) enum HttpBody {
    /// All of it; `None` once it was taken.
    Whole(Option<Bytes>),
    /// Events as they come.
    Stream(ReplyBody),
}

impl Body for HttpBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            HttpBody::Whole(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            HttpBody::Stream(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, HttpBody::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            HttpBody::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            HttpBody::Stream(_) => SizeHint::default(),
        }
    }
}

/// What the head of a request says about how to serve it.
pub(crate) struct RequestHead {
    /// The client's id for it, if it sent a usable one; else one of ours.
    pub(crate) id: String,
    /// `x-session-id`, hashed.
    pub(crate) session: Option<u64>,
    /// `x-slipstream-worker`.
    pub(crate) worker: Option<WorkerId>,
    /// `x-slipstream-trace: 1`.
    pub(crate) traced: bool,
}

/// Answers one request. Every failure becomes an answer.
pub(crate) async fn handle(
    shard: Rc<Shard>,
    request: Request<Incoming>,
) -> Result<Response<HttpBody>, Infallible> {
    let mut times = StageTimes::default();
    times.note(Stage::Accept, monotonic_ns());
    shard.metrics.requests.add(1);
    let id = request_id(&shard, request.headers());
    let mut response = match route(&shard, request, &id, times).await {
        Ok(response) => response,
        Err(error) => {
            let why = match error.status {
                401 => Some(Rejection::Unauthorized),
                400..=499 => Some(Rejection::Invalid),
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
            error_response(&error)
        }
    };
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(X_REQUEST_ID, id);
    }
    Ok(response)
}

/// What a path answers.
#[derive(Clone, Copy)]
enum Endpoint {
    Chat,
    Completion,
    Tokenize,
    Detokenize,
    Models,
    Model,
    Health,
    Ready,
    Live,
    Version,
    OpenApi,
    Metrics,
}

/// A path of the API.
struct Route {
    /// As it is sent; one that ends with `/` begins the paths that it stands for.
    path: &'static str,
    methods: &'static [Method],
    /// Needs no API key.
    open: bool,
    endpoint: Endpoint,
}

const POST: &[Method] = &[Method::POST];
const READ: &[Method] = &[Method::GET, Method::HEAD];

/// The most frequent ones first.
static ROUTES: [Route; 13] = [
    keyed("/v1/chat/completions", POST, Endpoint::Chat),
    keyed("/v1/completions", POST, Endpoint::Completion),
    keyed("/tokenize", POST, Endpoint::Tokenize),
    keyed("/detokenize", POST, Endpoint::Detokenize),
    keyed("/v1/models", READ, Endpoint::Models),
    keyed("/v1/models/", READ, Endpoint::Model),
    open("/metrics", Endpoint::Metrics),
    open("/health", Endpoint::Health),
    open("/ready", Endpoint::Ready),
    open("/live", Endpoint::Live),
    open("/ping", Endpoint::Live),
    open("/version", Endpoint::Version),
    open("/openapi.json", Endpoint::OpenApi),
];

const fn keyed(path: &'static str, methods: &'static [Method], endpoint: Endpoint) -> Route {
    Route {
        path,
        methods,
        open: false,
        endpoint,
    }
}

const fn open(path: &'static str, endpoint: Endpoint) -> Route {
    Route {
        path,
        methods: READ,
        open: true,
        endpoint,
    }
}

fn find_route(path: &str) -> Option<&'static Route> {
    ROUTES.iter().find(|route| {
        path == route.path || route.path.ends_with('/') && path.starts_with(route.path)
    })
}

async fn route(
    shard: &Rc<Shard>,
    request: Request<Incoming>,
    id: &str,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let service = &shard.service;
    let limit = service.limits.header_bytes_max;
    if head_bytes(&request) > limit as usize {
        return Err(ApiError::head_too_large(limit));
    }
    let path = request.uri().path();
    let found = find_route(path);
    let authorization = request
        .headers()
        .get(AUTHORIZATION)
        .map(HeaderValue::as_bytes);
    // Also unknown paths: without a key nothing is learned of them.
    if !found.is_some_and(|route| route.open) && !service.api_keys.admit(authorization) {
        return Err(ApiError::unauthorized());
    }
    let Some(route) = found else {
        let method = request.method().as_str();
        return Err(ApiError::route_not_found(method, path));
    };
    allow(&request, route.methods)?;
    match route.endpoint {
        Endpoint::Chat => {
            let (head, body) = receive(shard, request, id).await?;
            generate::generate(shard, Kind::Chat, head, &body, times).await
        }
        Endpoint::Completion => {
            if media_type(request.headers()) == Some("application/x-ndjson") {
                let (parts, body) = request.into_parts();
                return talk::talk(shard, head_of(&parts.headers, id)?, body, times).await;
            }
            let (head, body) = receive(shard, request, id).await?;
            generate::generate(shard, Kind::Completion, head, &body, times).await
        }
        Endpoint::Tokenize => {
            let (_, body) = receive(shard, request, id).await?;
            tokenize(shard, &body)
        }
        Endpoint::Detokenize => {
            let (_, body) = receive(shard, request, id).await?;
            detokenize(shard, &body)
        }
        Endpoint::Models => Ok(json(200, models_json(&[card(service)]))),
        Endpoint::Model => {
            let model = percent_decode(&path[route.path.len()..]);
            generate::check_model(service, Some(&model))?;
            Ok(json(200, model_json(&card(service))))
        }
        Endpoint::Health => Ok(health(shard)),
        Endpoint::Ready => Ok(ready(service)),
        Endpoint::Live => Ok(json(200, b"{\"live\":true}".to_vec())),
        Endpoint::Version => Ok(json(200, version_json().to_vec())),
        Endpoint::OpenApi => Ok(json(200, openapi_json().to_vec())),
        Endpoint::Metrics => metrics(shard, id),
    }
}

fn card(service: &Service) -> ModelCard<'_> {
    ModelCard {
        id: &service.model,
        created: service.created,
        max_model_len: service.max_model_len,
    }
}

fn ready(service: &Service) -> Response<HttpBody> {
    let ready = any_ready(&service.fleets.serve);
    let status = if ready { 200 } else { 503 };
    json(status, format!("{{\"ready\":{ready}}}").into_bytes())
}

fn detokenize(shard: &Rc<Shard>, body: &[u8]) -> Result<Response<HttpBody>, ApiError> {
    let service = &shard.service;
    let parsed = parse_detokenize(body)?;
    generate::check_model(service, parsed.model.as_deref())?;
    generate::check_tokens(service, "tokens", &parsed.tokens)?;
    let text = service.text.decode(&parsed.tokens);
    Ok(json(200, detokenize_json(&text)))
}

/// Length of a request's head as HTTP/1.1 writes it, as far as can be told: of its target and of
/// each header's name and value.
fn head_bytes(request: &Request<Incoming>) -> usize {
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

fn allow(request: &Request<Incoming>, methods: &[Method]) -> Result<(), ApiError> {
    if methods.contains(request.method()) {
        return Ok(());
    }
    let allowed: Vec<&str> = methods.iter().map(Method::as_str).collect();
    let path = request.uri().path();
    Err(ApiError::method_not_allowed(
        request.method().as_str(),
        path,
        &allowed.join(", "),
    ))
}

/// Reads the rest of a request: what its head says, and its body within the limits.
async fn receive(
    shard: &Rc<Shard>,
    request: Request<Incoming>,
    id: &str,
) -> Result<(RequestHead, Bytes), ApiError> {
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
    let head = head_of(&parts.headers, id)?;
    let limits = &shard.service.limits;
    let read = read_body(body, limits.body_bytes_max);
    match tokio::time::timeout(limits.read_timeout, read).await {
        Ok(body) => Ok((head, body?)),
        Err(_) => Err(ApiError::request_timeout(
            "body",
            limits.read_timeout.as_secs_f64(),
        )),
    }
}

fn head_of(headers: &HeaderMap, id: &str) -> Result<RequestHead, ApiError> {
    Ok(RequestHead {
        id: id.to_owned(),
        session: headers
            .get(X_SESSION_ID)
            .map(|v| hash_session(v.as_bytes())),
        worker: worker_header(headers)?,
        traced: headers.get(X_TRACE).is_some_and(|v| v == "1"),
    })
}

/// The media type of the body, without its parameters.
fn media_type(headers: &HeaderMap) -> Option<&str> {
    let kind = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(kind.split(';').next().unwrap_or_default().trim())
}

async fn read_body(mut body: Incoming, bytes_max: u64) -> Result<Bytes, ApiError> {
    if body.size_hint().lower() > bytes_max {
        return Err(ApiError::body_too_large(bytes_max));
    }
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
        if (so_far + data.len()) as u64 > bytes_max {
            return Err(ApiError::body_too_large(bytes_max));
        }
        match &first {
            None => first = Some(data), // most bodies are one piece, and are not copied
            Some(head) => {
                if rest.is_empty() {
                    rest.reserve(body.size_hint().lower() as usize + data.len() + head.len());
                }
                rest.extend_from_slice(&data);
            }
        }
    }
    let first = first.unwrap_or_default();
    if rest.is_empty() {
        return Ok(first);
    }
    let mut whole = BytesMut::with_capacity(first.len() + rest.len());
    whole.extend_from_slice(&first);
    whole.extend_from_slice(&rest);
    Ok(whole.freeze())
}

fn request_id(shard: &Shard, headers: &HeaderMap) -> String {
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

/// A path's text: clients write `meta/llama` as `meta%2Fllama`. What is no escape stays as it is.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let hex = |at: usize| (*tail.get(at)? as char).to_digit(16);
        if let (b'%', Some(high), Some(low)) = (first, hex(0), hex(1)) {
            bytes.push((high * 16 + low) as u8);
            rest = &tail[2..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn hash_session(id: &[u8]) -> u64 {
    // Any good hash does; FNV-1a is short (Fowler, Noll, Vo; draft-eastlake-fnv).
    id.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
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

fn tokenize(shard: &Rc<Shard>, body: &[u8]) -> Result<Response<HttpBody>, ApiError> {
    let service = &shard.service;
    let parsed = parse_tokenize(body)?;
    generate::check_model(service, parsed.model.as_deref())?;
    let mut tokens = Vec::new();
    match &parsed.input {
        TokenizeInput::Prompt(prompt) => {
            service
                .text
                .encode(prompt, parsed.add_special_tokens, &mut tokens);
        }
        TokenizeInput::Chat {
            messages,
            add_generation_prompt,
        } => {
            let options = ChatOptions {
                add_generation_prompt: *add_generation_prompt,
                template_kwargs: &[],
                now_unix_s: generate::now_unix_s(),
            };
            service
                .text
                .encode_chat(messages, &options, &mut tokens)
                .map_err(|error| ApiError::invalid("messages", error.to_string()))?;
        }
    }
    let strings: Option<Vec<String>> = parsed.return_token_strs.then(|| {
        let bytes = tokens.iter().map(|&token| service.text.token_bytes(token));
        bytes
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
            .collect()
    });
    Ok(json(
        200,
        tokenize_json(&tokens, service.max_model_len, strings.as_deref()),
    ))
}

fn any_ready(fleet: &Fleet) -> bool {
    (0..fleet.targets().len()).any(|target| fleet.is_ready(target))
}

fn health(shard: &Shard) -> Response<HttpBody> {
    use std::fmt::Write;
    let fleets = &shard.service.fleets;
    let ready = any_ready(&fleets.serve);
    let status = if ready { "ok" } else { "unavailable" };
    let mut body = format!("{{\"status\":\"{status}\",\"ranks\":[");
    let mut loads: Vec<_> = fleets.each().flat_map(|fleet| fleet.loads()).collect();
    loads.sort_unstable_by_key(|load| load.rank);
    for (at, load) in loads.iter().enumerate() {
        let comma = if at == 0 { "" } else { "," };
        let _ = write!(
            body,
            "{comma}{{\"worker\":{},\"dp_rank\":{},\"ready\":{},\"requests\":{},\"active_blocks\":{},\
             \"kv_blocks\":{}}}",
            load.rank.worker.0,
            load.rank.dp_rank,
            load.ready,
            load.requests,
            load.active_blocks,
            load.kv_blocks
        );
    }
    body.push_str("]}");
    json(if ready { 200 } else { 503 }, body.into_bytes())
}

fn metrics(shard: &Shard, id: &str) -> Result<Response<HttpBody>, ApiError> {
    let mut text = String::with_capacity(32 << 10);
    prometheus_client::encoding::text::encode(&mut text, &shard.registry).map_err(|error| {
        tracing::error!(%error, "metrics could not be encoded");
        ApiError::internal(id)
    })?;
    let mut response = json(200, text.into_bytes());
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"),
    );
    Ok(response)
}

/// A JSON answer.
pub(crate) fn json(status: u16, body: Vec<u8>) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::Whole(Some(body.into())));
    *response.status_mut() = StatusCode::from_u16(status).expect("our statuses are valid");
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A whole answer, with its trace.
pub(crate) fn whole(body: Vec<u8>, trace: Option<&str>) -> Response<HttpBody> {
    let mut response = json(200, body);
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(trace).ok()) {
        response.headers_mut().insert(X_TRACE, trace);
    }
    response
}

/// A stream of events.
pub(crate) fn events(body: ReplyBody) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::Stream(body));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn error_response(error: &ApiError) -> Response<HttpBody> {
    let mut response = json(error.status, error.body());
    if let Some(seconds) = error.retry_after_s {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}
