//! Paths, keys and limits: from an HTTP request to a handler and back.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{
    ACCEPT, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_METHOD, AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_ENCODING,
    CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, ORIGIN, RETRY_AFTER, VARY,
};
use hyper::{Method, Request, Response, StatusCode, Version};
use slipstream_base::width::{to_u8, to_usize};
use slipstream_base::{Stage, StageTimes, WorkerId};
use slipstream_planes::clock::monotonic_ns;
use slipstream_router::Fleet;

use crate::door::access::{AnswerEnd, Entry};
use crate::door::budget::{Budget, Charge, ClientUse};
use crate::door::connection::{Client, Connection, Owner};
use crate::door::exposition::Format;
use crate::door::faults::{self, Breaking};
use crate::door::helpers::NoResult;
use crate::door::management::{self, Manage};
use crate::door::metrics::Rejection;
use crate::door::service::{Admission, ApiKeys, Service};
use crate::door::trace_context::{Span, TraceId};
use crate::openai::{
    ApiError, CompletionApi, ModelCard, TokenizeInput, detokenize_json, message_error, model_json,
    models_json, openapi_json, openapi_json_without, parse_detokenize, parse_tokenize,
    tokenize_json, version_json,
};
use crate::server::ui;
use crate::text::{ChatOptions, EncodeCost};
use crate::tokens::duplex;
use crate::tokens::embeddings;
use crate::tokens::generate;
use crate::tokens::messages::{self, MessageBody};
use crate::tokens::reply::{ReplyBody, Whole, WholeBody};
use crate::tokens::responses::{self, ResponseBody};
use crate::tokens::shard::{Plane, Shard};
use crate::upstream::{self, Relay};

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const X_SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");
const X_WORKER: HeaderName = HeaderName::from_static("x-slipstream-worker");
/// `off`: no other worker continues the answer if its own is lost.
const X_RESUME: HeaderName = HeaderName::from_static("x-slipstream-resume");
/// Asks for a trace, and carries it on whole answers.
const X_TRACE: HeaderName = HeaderName::from_static("x-slipstream-trace");

/// A client's request id is repeated in every event of its stream, so it may not be long.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Bodies up to these sizes, bytes, are parsed and tokenized on the shard's thread, in a millisecond at most;
/// longer ones by helper threads. A hand-over costs about 20 µs.
const INLINE_BYTES_LOW: usize = 16 << 10;
const INLINE_BYTES_HIGH: usize = 1 << 10;

/// Pieces in which an answer that is there as a whole is handed to its connection, bytes.
const PIECE_BYTES: usize = 64 << 10;

/// Memory that a byte of a body takes while it is parsed and tokenized, at most, by the cost of tokenizing.
const BODY_FACTOR_LOW: u64 = 32;
const BODY_FACTOR_HIGH: u64 = 512;

/// Body of any answer.
pub(crate) struct HttpBody {
    content: Content,
    /// A fault by rate, if the stream has one.
    breaking: Option<Box<Breaking>>,
    /// The request that it answers, which ends with it.
    owner: Option<Rc<Owner>>,
    /// Memory of a large one.
    #[allow(dead_code)] // given back when dropped
    memory: Option<Charge>,
}

enum Content {
    /// All of it; `None` once it was taken.
    Whole(Option<Bytes>),
    /// A large answer, as it is rendered.
    Slices(Box<WholeBody>),
    /// Events as they come.
    Stream(Box<ReplyBody>),
    /// The same as Anthropic has them.
    Message(Box<MessageBody>),
    /// The same as the Responses API has them.
    Response(Box<ResponseBody>),
    /// As an engine sends it.
    Relay(Rc<RefCell<Relay>>),
}

impl Content {
    fn poll_frame(
        &mut self,
        owner: Option<&Owner>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self {
            Content::Whole(rest) => {
                let Some(mut bytes) = rest.take() else {
                    return Poll::Ready(None);
                };
                // In pieces, so that a client that reads a long one slowly is seen to read.
                if bytes.len() > PIECE_BYTES {
                    *rest = Some(bytes.split_off(PIECE_BYTES));
                }
                if let Some(owner) = owner {
                    owner.progress();
                }
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Content::Slices(body) => body.poll_frame(cx).map_err(io::Error::other),
            _ => {
                let polled = self.poll_stream(cx);
                if let (Poll::Ready(Some(Ok(_))), Some(owner)) = (&polled, owner) {
                    owner.account().note_piece();
                }
                polled
            }
        }
    }

    fn poll_stream(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self {
            Content::Whole(_) | Content::Slices(_) => unreachable!("it is no stream"),
            Content::Stream(body) => body.poll_frame(cx).map_err(io::Error::other),
            Content::Message(body) => body.poll_frame(cx).map_err(io::Error::other),
            Content::Response(body) => body.poll_frame(cx).map_err(io::Error::other),
            Content::Relay(relay) => Pin::new(&mut *relay.borrow_mut()).poll_frame(cx),
        }
    }
}

impl HttpBody {
    fn new(content: Content) -> HttpBody {
        HttpBody {
            content,
            breaking: None,
            owner: None,
            memory: None,
        }
    }

    /// All of it, and its memory; empty if `None`.
    pub(crate) fn whole(bytes: Option<Bytes>, memory: Option<Charge>) -> HttpBody {
        HttpBody {
            memory,
            ..HttpBody::new(Content::Whole(bytes))
        }
    }

    /// Whether it is sent as events.
    fn is_stream(&self) -> bool {
        matches!(
            self.content,
            Content::Stream(_) | Content::Message(_) | Content::Response(_)
        )
    }

    /// An engine's.
    pub(crate) fn relay(relay: Rc<RefCell<Relay>>) -> HttpBody {
        HttpBody::new(Content::Relay(relay))
    }
}

impl HttpBody {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Some(breaking) = &mut self.breaking {
            std::task::ready!(breaking.poll_ready(cx));
            let piece = std::task::ready!(self.content.poll_frame(self.owner.as_deref(), cx));
            if let Some(Ok(_)) = &piece {
                breaking.pass()?;
            }
            return Poll::Ready(piece);
        }
        self.content.poll_frame(self.owner.as_deref(), cx)
    }
}

impl Body for HttpBody {
    type Data = Bytes;
    /// The rest of an answer will not come.
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        let polled = this.poll_piece(cx);
        if let (Poll::Ready(piece), Some(owner)) = (&polled, &this.owner) {
            match piece {
                Some(Err(_)) => owner.account().note_end(AnswerEnd::Broken),
                None => owner.account().note_end(AnswerEnd::Complete),
                // It may not be polled again.
                Some(Ok(_)) if this.is_end_stream() => {
                    owner.account().note_end(AnswerEnd::Complete);
                }
                Some(Ok(_)) => {}
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(bytes) => bytes.is_none(),
            Content::Slices(_)
            | Content::Stream(_)
            | Content::Message(_)
            | Content::Response(_) => false,
            Content::Relay(relay) => relay.borrow().is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64))
            }
            Content::Slices(_)
            | Content::Stream(_)
            | Content::Message(_)
            | Content::Response(_) => SizeHint::default(),
            Content::Relay(relay) => relay.borrow().size_hint(),
        }
    }
}

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
struct Received {
    head: RequestHead,
    body: Bytes,
    /// The body's memory.
    charge: Charge,
}

/// Answers one request. Every failure becomes an answer.
pub(crate) async fn handle(
    shard: Rc<Shard>,
    connection: Rc<Connection>,
    request: Request<Incoming>,
) -> Result<Response<HttpBody>, Infallible> {
    let mut times = StageTimes::default();
    let now = monotonic_ns();
    times.note(Stage::Accept, now);
    shard.metrics.requests.add(1);
    let owner = connection.begin(now);
    let id = request_id(&shard, request.headers());
    let span = begin_span(&shard, &request);
    if shard.service.access.is_some() || span.is_some() {
        let trace_id = match &span {
            Some(span) => Some(span.trace.clone()),
            None => TraceId::of(request.headers()),
        };
        let entry = Entry {
            request_id: id.clone(),
            method: request.method().as_str().to_owned(),
            path: request.uri().path().to_owned(),
            begun_ns: now,
            trace_id: trace_id.map(|id| id.as_str().to_owned()),
            span,
            ..Entry::default()
        };
        owner.account().open_line(&shard.service, entry);
    }
    let origin = allowed_origin(&shard.service, request.headers());
    let is_head = *request.method() == Method::HEAD;
    let is_http1 = request.version() <= Version::HTTP_11;
    let is_http11 = request.version() == Version::HTTP_11;
    let is_message = request.uri().path().starts_with(MESSAGES);
    let routed = if origin.is_some() && is_preflight(&request) {
        Ok(preflight())
    } else if let Some(answer) = ui::answer(&shard, &request, &id) {
        answer
    } else if let Plane::Engines(_) = &shard.plane {
        Box::pin(upstream::handle(&shard, &owner, request, &id)).await
    } else {
        route(&shard, &owner, request, &id, times).await
    };
    let mut response = match routed {
        Ok(response) => response,
        Err(error) => {
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
            match &shard.plane {
                Plane::Engines(_) => error_response(&error),
                _ if is_message => with_retry(&error, message_error(&error)),
                _ => error_response(&error),
            }
        }
    };
    // An engine's own id stays.
    if !response.headers().contains_key(X_REQUEST_ID)
        && let Ok(id) = HeaderValue::from_str(&id)
    {
        response.headers_mut().insert(X_REQUEST_ID, id);
    }
    if !shard.service.origins.is_empty() {
        // Caches must not give one page's answer to another.
        let headers = response.headers_mut();
        headers.append(VARY, HeaderValue::from_static("origin"));
        if let Some(origin) = origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(
                ACCESS_CONTROL_EXPOSE_HEADERS,
                HeaderValue::from_static("x-request-id, x-slipstream-trace, retry-after"),
            );
        }
    }
    if is_http1 && shard.draining.get() {
        let headers = response.headers_mut();
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    owner.account().note_status(response.status().as_u16());
    let body = response.body_mut();
    if matches!(body.content, Content::Whole(_)) {
        owner.answered();
    }
    if is_head || body.is_end_stream() {
        owner.account().note_end(AnswerEnd::Complete); // no body is asked for
    }
    // Chunks, with nothing between the events and the socket.
    if let Content::Stream(stream) = &body.content
        && is_http11
        && body.breaking.is_none()
        && shard.service.direct_writes
    {
        stream.allow_direct();
    }
    body.owner = Some(owner);
    Ok(response)
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
    if UNTRACED.contains(&path) || matches!(path, "/ui" | "/ui.json") {
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

fn status_only(status: StatusCode) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::new(Content::Whole(None)));
    *response.status_mut() = status;
    response
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

/// Handler of a path.
#[derive(Clone, Copy)]
enum Endpoint {
    Chat,
    Completion,
    Messages,
    CountTokens,
    Responses,
    Response,
    Embeddings,
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
    Manage(Manage),
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
const STORED: &[Method] = &[Method::GET, Method::HEAD, Method::POST, Method::DELETE];
const READ: &[Method] = &[Method::GET, Method::HEAD];

/// Where Anthropic's API begins, which has errors of its own shape.
const MESSAGES: &str = "/v1/messages";

/// The most frequent ones first.
static ROUTES: [Route; 24] = [
    keyed("/v1/chat/completions", POST, Endpoint::Chat),
    keyed("/v1/completions", POST, Endpoint::Completion),
    keyed(MESSAGES, POST, Endpoint::Messages),
    keyed("/v1/messages/count_tokens", POST, Endpoint::CountTokens),
    keyed("/v1/responses", POST, Endpoint::Responses),
    keyed("/v1/responses/", STORED, Endpoint::Response),
    keyed("/v1/embeddings", POST, Endpoint::Embeddings),
    keyed("/tokenize", POST, Endpoint::Tokenize),
    keyed("/detokenize", POST, Endpoint::Detokenize),
    keyed("/v1/models", READ, Endpoint::Models),
    keyed("/v1/models/", READ, Endpoint::Model),
    keyed(
        "/v1/load_lora_adapter",
        POST,
        Endpoint::Manage(Manage::LoadAdapter),
    ),
    keyed(
        "/v1/unload_lora_adapter",
        POST,
        Endpoint::Manage(Manage::UnloadAdapter),
    ),
    keyed(
        "/reset_prefix_cache",
        POST,
        Endpoint::Manage(Manage::ResetPrefixCache),
    ),
    keyed("/sleep", POST, Endpoint::Manage(Manage::Sleep)),
    keyed("/wake_up", POST, Endpoint::Manage(Manage::WakeUp)),
    keyed("/is_sleeping", READ, Endpoint::Manage(Manage::IsSleeping)),
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
    owner: &Rc<Owner>,
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
    if path == "/admin/faults" {
        return Box::pin(faults::admin(shard, owner, request)).await;
    }
    let found = find_route(path);
    let headers = request.headers();
    let authorization = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
    // Clients of Anthropic's API send the key by a header of its own.
    let bearer = match (authorization, headers.get(X_API_KEY)) {
        (None, Some(key)) => Some([b"Bearer ", key.as_bytes()].concat()),
        _ => None,
    };
    let authorization = authorization.or(bearer.as_deref());
    // Also unknown paths: without a key nothing is learned of them.
    let key: Option<Arc<ClientUse>> = match found {
        Some(route) if route.open => None,
        _ => match keys_of(service, found).admit(authorization) {
            Admission::Open => None,
            Admission::Key(client) => Some(client),
            Admission::Refused => return Err(ApiError::unauthorized()),
        },
    };
    let client = Client::new(owner.clone(), key);
    let is_served = |route: &&Route| match route.endpoint {
        Endpoint::Manage(_) => service.management.is_served(),
        _ => true,
    };
    let Some(route) = found.filter(is_served) else {
        let method = request.method().as_str();
        return Err(ApiError::route_not_found(method, path));
    };
    allow(&request, route.methods)?;
    if !route.open {
        owner.account().note_model(Some(&service.model));
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            client.admit()?;
        }
    }
    let fault = match route.endpoint {
        Endpoint::Chat
        | Endpoint::Completion
        | Endpoint::Messages
        | Endpoint::Responses
        | Endpoint::Embeddings => service.faults.draw(),
        _ => None,
    };
    if let Some(error) = fault.and_then(faults::error) {
        fault.inspect(|&fault| service.faults.count(fault));
        return Err(error);
    }
    if matches!(
        route.endpoint,
        Endpoint::Chat
            | Endpoint::Completion
            | Endpoint::Messages
            | Endpoint::Responses
            | Endpoint::Embeddings
    ) && service.management.is_sleeping()
    {
        Box::pin(until_awake(shard, &client)).await?;
    }
    let mut response = answer(shard, route, request, client, id, times).await?;
    if let Some(fault) = fault
        && response.body().is_stream()
    {
        let breaking = Breaking::new(fault, &service.faults);
        response.body_mut().breaking = breaking.map(Box::new);
    }
    Ok(response)
}

/// The keys that open a route.
fn keys_of<'s>(service: &'s Service, route: Option<&Route>) -> &'s ApiKeys {
    match route {
        Some(Route {
            endpoint: Endpoint::Manage(_),
            ..
        }) if !service.admin_key.is_empty() => &service.admin_key,
        _ => &service.api_keys,
    }
}

/// Waits while the engines sleep: as an open stream of the client, and within the time of a request.
async fn until_awake(shard: &Shard, client: &Client) -> Result<(), ApiError> {
    struct Waits<'w>(&'w Budget, &'w ClientUse);
    impl Drop for Waits<'_> {
        fn drop(&mut self) {
            self.0.close_streams(self.1, 1);
        }
    }
    let service = &shard.service;
    if !service.management.is_sleeping() {
        return Ok(());
    }
    shard.budget.open_streams(client.counts(), 1)?;
    let _waits = Waits(&shard.budget, client.counts());
    let awake = service.management.awake(|| shard.draining.get());
    match service.limits.request_timeout {
        Some(limit) => tokio::time::timeout(limit, awake)
            .await
            .map_err(|_| ApiError::deadline(limit.as_secs_f64()))?,
        None => awake.await,
    }
    if shard.draining.get() && service.management.is_sleeping() {
        return Err(ApiError::stopping());
    }
    Ok(())
}

/// Answers a request that has passed.
async fn answer(
    shard: &Rc<Shard>,
    route: &Route,
    request: Request<Incoming>,
    client: Client,
    id: &str,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let service = &shard.service;
    let path = request.uri().path();
    match route.endpoint {
        Endpoint::Chat => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            generate::generate(shard, CompletionApi::Chat, head, body, charge, times).await
        }
        Endpoint::Completion => {
            if media_type(request.headers()) == Some("application/x-ndjson") {
                check_memory(shard)?;
                let (parts, body) = request.into_parts();
                let head = head_of(&parts.headers, id, client)?;
                return Box::pin(duplex::serve(shard, head, body, times)).await;
            }
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            generate::generate(shard, CompletionApi::Completion, head, body, charge, times).await
        }
        Endpoint::Messages => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            Box::pin(messages::create(shard, head, body, charge, times)).await
        }
        Endpoint::CountTokens => {
            let Received { body, charge, .. } = receive(shard, client, request, id).await?;
            Box::pin(messages::count_tokens(shard, body, charge)).await
        }
        Endpoint::Responses => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            Box::pin(responses::create(shard, head, body, charge, times)).await
        }
        Endpoint::Embeddings => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            Box::pin(embeddings::create(shard, head, body, charge, times)).await
        }
        Endpoint::Response => {
            let (method, query) = (request.method(), request.uri().query());
            let rest = &path[route.path.len()..];
            responses::stored(shard, &client, method, rest, query)
        }
        Endpoint::Tokenize => {
            let Received { body, charge, .. } = receive(shard, client, request, id).await?;
            large_json(Box::pin(shard.run(body, charge, tokenize)).await?)
        }
        Endpoint::Detokenize => {
            let Received { body, charge, .. } = receive(shard, client, request, id).await?;
            large_json(Box::pin(shard.run(body, charge, detokenize)).await?)
        }
        Endpoint::Manage(manage) => {
            let query = request.uri().query().unwrap_or_default().to_owned();
            let body = match manage {
                Manage::LoadAdapter | Manage::UnloadAdapter => {
                    receive(shard, client, request, id).await?.body
                }
                _ => Bytes::new(),
            };
            management::answer(service, manage, &query, &body)
        }
        Endpoint::Models => {
            let adapters = service.management.adapters();
            let base = card(service);
            let of_adapters = adapters.iter().map(|adapter| ModelCard {
                id: &adapter.name,
                root: &adapter.path,
                parent: Some(&service.model),
                ..base
            });
            let cards: Vec<ModelCard<'_>> = std::iter::once(base).chain(of_adapters).collect();
            Ok(json(200, models_json(&cards)))
        }
        Endpoint::Model => {
            let model = percent_decode(&path[route.path.len()..]);
            let adapter = generate::check_model(service, Some(&model))?;
            let base = card(service);
            let shown = match &adapter {
                None => base,
                Some(adapter) => ModelCard {
                    id: &model,
                    root: &adapter.path,
                    parent: Some(&service.model),
                    ..base
                },
            };
            Ok(json(200, model_json(&shown)))
        }
        Endpoint::Health => Ok(health(shard)),
        Endpoint::Ready => Ok(ready(shard, any_ready(&shard.service.fleets.serve))),
        Endpoint::Live => Ok(json(200, b"{\"live\":true}".to_vec())),
        Endpoint::Version => Ok(json(200, version_json().to_vec())),
        Endpoint::OpenApi if service.management.is_served() => {
            Ok(json(200, openapi_json().to_vec()))
        }
        Endpoint::OpenApi => {
            let managed = ROUTES
                .iter()
                .filter(|route| matches!(route.endpoint, Endpoint::Manage(_)))
                .map(|route| route.path);
            Ok(json(200, openapi_json_without(managed)))
        }
        Endpoint::Metrics => metrics(shard, request.headers(), id),
    }
}

fn card(service: &Service) -> ModelCard<'_> {
    ModelCard {
        id: &service.model,
        root: &service.model,
        parent: None,
        created: service.created,
        max_model_len: service.max_model_len,
    }
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

impl Shard {
    /// Runs `job` on a body: here if that is short work, else on a helper thread, while the shard serves
    /// others. The charge covers what the job takes, and returns with its result.
    ///
    /// # Errors
    /// The job's; 503 without memory or with too many waiting jobs.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        body: Bytes,
        charge: Charge,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        let bytes = body.len();
        self.run_sized(body, bytes, charge, job).await
    }

    /// As [`run`](Self::run), for a job that handles so many `bytes`, at least those of the body.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(crate) async fn run_sized<T: Send + 'static>(
        &self,
        body: Bytes,
        bytes: usize,
        charge: Charge,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        let cost = |service: &Service, body: &[u8]| service.text.cost(body);
        self.run_at_cost(body, bytes, charge, cost, job).await
    }

    /// As [`run_sized`](Self::run_sized), for a job that tokenizes nothing.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(crate) async fn run_reading<T: Send + 'static>(
        &self,
        body: Bytes,
        bytes: usize,
        charge: Charge,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        self.run_at_cost(body, bytes, charge, |_, _| EncodeCost::Low, job)
            .await
    }

    async fn run_at_cost<T: Send + 'static>(
        &self,
        body: Bytes,
        bytes: usize,
        mut charge: Charge,
        cost: impl Fn(&Service, &[u8]) -> EncodeCost + Send + 'static,
        job: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<(T, Charge), ApiError> {
        let service = &self.service;
        let is_short = bytes <= INLINE_BYTES_HIGH
            || bytes <= INLINE_BYTES_LOW && cost(service, &body) == EncodeCost::Low;
        if is_short {
            return Ok((job(service, &body)?, charge));
        }
        let service = service.clone();
        let on_helper = move || {
            let factor = match cost(&service, &body) {
                EncodeCost::Low => BODY_FACTOR_LOW,
                EncodeCost::High => BODY_FACTOR_HIGH,
            };
            let kept = charge.bytes();
            charge.grow_to(kept + factor * bytes as u64)?;
            let done = job(&service, &body)?;
            charge.shrink_to(kept);
            Ok((done, charge))
        };
        match self.helpers.run(bytes, on_helper).await {
            Ok(done) => done,
            Err(NoResult::Busy) => Err(ApiError::overloaded(
                "too many long prompts wait to be tokenized; try again later",
                1,
            )),
            Err(NoResult::Failed) => Err(ApiError::internal("with a long prompt")),
        }
    }
}

fn detokenize(service: &Service, body: &[u8]) -> Result<Vec<u8>, ApiError> {
    let parsed = parse_detokenize(body)?;
    generate::check_model(service, parsed.model.as_deref())?;
    generate::check_tokens(service, "tokens", &parsed.tokens)?;
    let text = service.text.decode(&parsed.tokens);
    Ok(detokenize_json(&text))
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
fn media_type(headers: &HeaderMap) -> Option<&str> {
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

/// A path's text: clients write `meta/llama` as `meta%2Fllama`. Bytes that are no escape stay.
pub(crate) fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let hex = |at: usize| (*tail.get(at)? as char).to_digit(16);
        if let (b'%', Some(high), Some(low)) = (first, hex(0), hex(1)) {
            bytes.push(to_u8(high * 16 + low));
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

fn tokenize(service: &Service, body: &[u8]) -> Result<Vec<u8>, ApiError> {
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
            continue_final_message,
            tools,
            template_kwargs,
            template,
        } => {
            // As in vLLM unless it was started to trust them.
            if template.is_some() {
                return Err(ApiError::unsupported(
                    "chat_template",
                    "`chat_template` is not taken from requests: the template of the model's tokenizer is used; \
                     leave it out, or try a template with `slipstream tokenizer render`",
                ));
            }
            let with_images = generate::show_images(service, messages, usize::MAX)?;
            let options = ChatOptions {
                add_generation_prompt: *add_generation_prompt,
                continue_final_message: *continue_final_message,
                tools,
                template_kwargs,
                now_unix_s: generate::now_unix_s(),
            };
            service
                .text
                .encode_chat(
                    with_images.as_deref().unwrap_or(messages),
                    &options,
                    &mut tokens,
                )
                .map_err(|error| ApiError::invalid("messages", error.to_string()))?;
        }
    }
    let strings: Option<Vec<String>> = parsed.return_token_strs.then(|| {
        let names = tokens.iter().map(|&token| service.text.token_name(token));
        names.collect()
    });
    Ok(tokenize_json(
        &tokens,
        service.max_model_len,
        strings.as_deref(),
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
    let mut response = Response::new(HttpBody::new(Content::Whole(Some(body.into()))));
    *response.status_mut() = StatusCode::from_u16(status).expect("our statuses are valid");
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A JSON answer that may be large.
fn large_json((body, mut charge): (Vec<u8>, Charge)) -> Result<Response<HttpBody>, ApiError> {
    charge.grow_to(body.len() as u64)?;
    charge.shrink_to(body.len() as u64);
    let mut response = json(200, body);
    response.body_mut().memory = Some(charge);
    Ok(response)
}

/// An answer with vectors, and the trace of their prompts.
pub(crate) fn embeddings(
    body: Vec<u8>,
    charge: Charge,
    trace: Option<&str>,
) -> Result<Response<HttpBody>, ApiError> {
    let mut response = large_json((body, charge))?;
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(trace).ok()) {
        response.headers_mut().insert(X_TRACE, trace);
    }
    Ok(response)
}

/// A whole answer, with its trace.
pub(crate) fn whole(answer: Whole, trace: Option<&str>) -> Response<HttpBody> {
    let mut response = match answer {
        Whole::Bytes(bytes) => json(200, bytes),
        Whole::Slices(body) => {
            let mut response = json(200, Vec::new());
            response.body_mut().content = Content::Slices(Box::new(body));
            response
        }
    };
    if let Some(trace) = trace.and_then(|trace| HeaderValue::from_str(trace).ok()) {
        response.headers_mut().insert(X_TRACE, trace);
    }
    response
}

/// A stream of events.
pub(crate) fn events(body: ReplyBody) -> Response<HttpBody> {
    event_stream(Content::Stream(Box::new(body)))
}

/// The events of a response.
pub(crate) fn response_events(body: ResponseBody) -> Response<HttpBody> {
    event_stream(Content::Response(Box::new(body)))
}

/// The events of a message.
pub(crate) fn message_events(body: MessageBody) -> Response<HttpBody> {
    event_stream(Content::Message(Box::new(body)))
}

fn event_stream(content: Content) -> Response<HttpBody> {
    let mut response = Response::new(HttpBody::new(content));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn error_response(error: &ApiError) -> Response<HttpBody> {
    with_retry(error, error.body())
}

fn with_retry(error: &ApiError, body: Vec<u8>) -> Response<HttpBody> {
    let mut response = json(error.status, body);
    if let Some(seconds) = error.retry_after_s {
        response
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from(seconds));
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
