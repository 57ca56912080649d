//! Handles a client's request up to the first bytes of an engine's answer.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Response};
use slipstream_base::mix::mix64;
use slipstream_base::width::nanos;
use slipstream_base::{BlockHash, Prompt, WorkerId};
use slipstream_dispatch as dispatch;
use slipstream_planes::clock::monotonic_ns;
use slipstream_recorder::RecordedRequest;

use super::api::Api;
use super::body_fields::{BodyFields, READ_BYTES};
use super::counters::CopyDrop;
use super::exchange::{Exchange, ExchangeParts, StreamPermit};
use super::lax::without_bom;
use super::obtain::{StartedAnswer, obtain};
use super::paths::{GENERATES, counts_only, is_forwarded, may_repeat};
use super::peek::peek;
use super::record::Recording;
use super::relay::Relay;
use super::stored::{self, Named};
use super::stored_answers;
use super::traffic::RequestCopy;
use super::{Upstream, admin, loops, tokens};
use crate::door::body::HttpBody;
use crate::door::connection::{Client, Owner};
use crate::door::helpers::NoResult;
use crate::door::http::{self, RequestHead};
use crate::door::service::{Admission, Service};
use crate::door::shard::Shard;
use crate::door::trace_context::{TRACEPARENT, TRACESTATE, TraceId, fresh_request_id, is_drawn};
use crate::openai::ApiError;
use crate::wire;

/// Choices and tokens of an answer that a request is charged for in advance, at most: more than any engine gives.
const CHOICES_MAX: u32 = 128;
const ANSWER_TOKENS_MAX: u32 = 4 << 20;

const X_REQUEST_ID: &str = "x-request-id";

/// Answers one request.
pub(crate) async fn handle(
    upstream: &Rc<Upstream>,
    owner: &Rc<Owner>,
    request: Request<Incoming>,
    id: &str,
) -> Result<Response<HttpBody>, ApiError> {
    let shard = upstream.shard();
    let service = &shard.service;
    let limits = &service.limits;
    if http::head_bytes(&request) > limits.header_bytes_max as usize {
        return Err(ApiError::head_too_large(limits.header_bytes_max));
    }
    if loops::is_own(request.headers()) {
        return Err(ApiError::forwarding_loop());
    }
    if let Some(response) = open_path(shard, upstream, &request, id) {
        return response;
    }
    if admin::is_admin(request.uri().path()) {
        return admin::handle(shard, owner, &upstream.engines, request).await;
    }
    let authorization = request.headers().get(AUTHORIZATION);
    let admission = service
        .api_keys
        .admit(authorization.map(HeaderValue::as_bytes));
    let key = match admission {
        Admission::Open => None,
        Admission::Key(client) => Some(client),
        // As of a server of modelled engines: it describes the API, and nothing else.
        Admission::Refused if is_description(&request) => None,
        Admission::Refused => return Err(ApiError::unauthorized()),
    };
    let client = Client::new(owner.clone(), key);
    let path = request.uri().path();
    if let Some(response) = models_path(upstream, request.method(), path) {
        return response;
    }
    let method = request.method();
    if !service.origins.is_empty() && *method == Method::OPTIONS {
        // An engine may allow more pages than `live.cors_origins`.
        return Err(ApiError::not_forwarded(method.as_str(), path));
    }
    if matches!(*method, Method::CONNECT | Method::TRACE) {
        return Err(ApiError::method_not_allowed(
            method.as_str(),
            path,
            "GET or POST",
        ));
    }
    // A POST changes the engine.
    if path == "/props" && !matches!(*method, Method::GET | Method::HEAD) {
        return Err(ApiError::method_not_allowed(method.as_str(), path, "GET"));
    }
    if stored::is_disguised(path) || !is_forwarded(path, &upstream.engines.settings.forward) {
        let method = request.method().as_str();
        return Err(ApiError::not_forwarded(method, path));
    }
    let answer = forward(shard, upstream, client, request, id);
    upstream.until_stop(Box::pin(answer)).await
}

fn is_description(request: &Request<Incoming>) -> bool {
    request.uri().path() == "/openapi.json"
        && matches!(*request.method(), Method::GET | Method::HEAD)
}

/// Paths that need no key, and that the router answers.
fn open_path(
    shard: &Rc<Shard>,
    upstream: &Upstream,
    request: &Request<Incoming>,
    id: &str,
) -> Option<Result<Response<HttpBody>, ApiError>> {
    if *request.method() != Method::GET && *request.method() != Method::HEAD {
        return None;
    }
    let ready = upstream.engines.answers();
    let status = if ready { 200 } else { 503 };
    Some(Ok(match request.uri().path() {
        "/health" => {
            let word = if ready { "ok" } else { "unavailable" };
            let engines = upstream.engines.describe();
            http::json(
                status,
                format!("{{\"status\":\"{word}\",\"engines\":{engines}}}").into_bytes(),
            )
        }
        "/ready" => http::ready(shard, ready),
        "/live" | "/ping" => http::json(200, b"{\"live\":true}".to_vec()),
        "/version" => http::json(200, crate::openai::version_json().to_vec()),
        "/metrics" => return Some(http::metrics(shard, request.headers(), id)),
        _ => return None,
    }))
}

/// Paths that all engines answer together.
fn models_path(
    upstream: &Upstream,
    method: &Method,
    path: &str,
) -> Option<Result<Response<HttpBody>, ApiError>> {
    if *method != Method::GET && *method != Method::HEAD {
        return None;
    }
    let catalog = upstream.engines.catalog();
    if path == "/v1/models" {
        return Some(Ok(http::json(200, catalog.list())));
    }
    let model = http::percent_decode(path.strip_prefix("/v1/models/")?);
    Some(match catalog.card(&model) {
        Some(card) => Ok(http::json(200, card)),
        None => Err(ApiError::model_not_found(&model, &catalog.names())),
    })
}

async fn forward(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    client: Client,
    request: Request<Incoming>,
    id: &str,
) -> Result<Response<HttpBody>, ApiError> {
    let arrival_ns = monotonic_ns();
    let (mut received, permit) = receive(shard, &client, request, id).await?;
    upstream.earn();
    let seen = if may_be_json(&received.parts.headers, &received.body) {
        let fields = |body: &[u8]| peek(body).map(BodyFields::of);
        read(shard, &client, &received.body, fields).await?
    } else {
        None
    };
    let stores = received.parts.method == Method::POST && received.path() == stored::CREATE;
    if stores {
        stored::check_new(seen.as_ref())?;
        // Some engines name the answer by it.
        received.parts.headers.remove(X_REQUEST_ID);
    }
    // Of a request that the router cannot read only `[DONE]` tells that all choices are there.
    let choices = seen.as_ref().and_then(BodyFields::choices);
    let mut seen = seen.unwrap_or_default();
    client.owner().account().note_model(seen.model.as_deref());
    let session = received.head.session;
    let asker = stored_answers::Owner::of(&shard.service, &client);
    let mut target = choose_target(shard, upstream, &client, &received, &mut seen, asker).await?;
    let request = route_request(shard, upstream, &client, &received, &seen, &target).await?;
    let recording = recording(
        shard,
        client.owner(),
        received.path(),
        &seen,
        &request,
        session,
        arrival_ns,
    );
    let headers = engine_headers(&mut received, stores, !request.whole, id);
    send_copies(shard, upstream, &received, &headers, &seen, &target);
    let only = target.only.take();
    let has_pool = target.pool.is_some();
    let exchange = Exchange::new(ExchangeParts {
        settings: &upstream.engines.settings,
        method: received.parts.method,
        path: received.parts.uri.path(),
        target: received.target,
        headers,
        authorization: target.authorization,
        body: received.body,
        seen: &seen,
        request,
        choices: choices.unwrap_or(u64::MAX),
        prefers: received.head.worker.is_some() && !target.is_named,
        deadline_ns: received.deadline_ns,
        permit,
        owner: client.owner().clone(),
        stores: stores.then_some(asker),
        recording,
    });
    let (exchange, begun) = begin(shard, upstream, exchange, has_pool, only).await?;
    let mut response = Relay::respond(shard, upstream, exchange, begun)?;
    if stores {
        response.headers_mut().remove(X_REQUEST_ID); // the client's own follows
    }
    Ok(response)
}

/// A client's request, with all of its body.
struct Received {
    parts: Parts,
    /// Path and query.
    target: String,
    head: RequestHead,
    body: Bytes,
    /// `live.request_timeout_s` ends it at this time, ns.
    deadline_ns: Option<u64>,
}

impl Received {
    fn path(&self) -> &str {
        self.parts.uri.path()
    }
}

/// Receives a request. Returns it with its place among the open streams.
///
/// # Errors
/// The client, its memory or its body exceeds a limit.
async fn receive(
    shard: &Rc<Shard>,
    client: &Client,
    request: Request<Incoming>,
    id: &str,
) -> Result<(Received, StreamPermit), ApiError> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        client.admit()?;
    }
    http::check_memory(shard)?;
    let mut charge = client.charge(&shard.budget.memory, 0)?;
    let limits = &shard.service.limits;
    let deadline_ns = limits
        .request_timeout
        .map(|limit| monotonic_ns().saturating_add(nanos(limit)));
    let (mut parts, body) = request.into_parts();
    trace(shard, client.owner(), &mut parts.headers);
    let target = parts.uri.path_and_query();
    let target = target.map_or_else(|| "/".to_owned(), |target| target.as_str().to_owned());
    let head = http::head_of(&parts.headers, id, client.clone())?;
    let body = if body.is_end_stream() {
        Bytes::new()
    } else {
        let read = http::read_body(body, limits.body_bytes_max, &mut charge);
        let read = tokio::time::timeout(limits.read_timeout, read).await;
        let late = |_| ApiError::request_timeout("body", limits.read_timeout.as_secs_f64());
        read.map_err(late)??
    };
    let permit = StreamPermit::take(shard, client.clone(), charge)?;
    let received = Received {
        parts,
        target,
        head,
        body,
        deadline_ns,
    };
    Ok((received, permit))
}

/// The engines that may get a request.
struct Target {
    /// The only one, by name or because it stores an answer.
    direct: Option<WorkerId>,
    /// Those of the pool that the request's weight chose.
    pool: Option<Arc<[WorkerId]>>,
    /// Those that serve its model; `None`: all.
    only: Option<Arc<[WorkerId]>>,
    /// Root of the hashes of the model's blocks.
    root: BlockHash,
    /// Whether the request names a stored answer.
    is_named: bool,
    /// The client's `Authorization`, for engines without a key of their own.
    authorization: Option<Bytes>,
    /// A random number per request.
    draw: u64,
}

/// Finds the engines that may get a request of `asker`.
///
/// # Errors
/// No engine serves its model, or it names a stored answer that it may not have.
async fn choose_target(
    shard: &Rc<Shard>,
    upstream: &Upstream,
    client: &Client,
    received: &Received,
    seen: &mut BodyFields,
    asker: stored_answers::Owner,
) -> Result<Target, ApiError> {
    let engines = &upstream.engines;
    let (method, path) = (&received.parts.method, received.path());
    let (only, root) = served(upstream, seen.model.as_deref())?;
    // The router's own keys stay here.
    let authorization = received.parts.headers.get(AUTHORIZATION);
    let authorization = authorization.filter(|_| shard.service.api_keys.is_empty());
    let authorization = authorization.map(|value| Bytes::copy_from_slice(value.as_bytes()));
    let named = Named::of(path, seen.previous_response_id.take());
    let stores = *method == Method::POST && path == stored::CREATE;
    match &named {
        Some(named) => stored::check_owner(&engines.stored, named, asker)?,
        // An engine might list the answers of all keys.
        None if asker != stored_answers::Owner::Open && !stores && stored::is_path(path) => {
            return Err(ApiError::route_not_found(method.as_str(), path));
        }
        None => {}
    }
    let direct = match (received.head.worker, &named) {
        (None, Some(named)) => {
            let asker = stored::Asker {
                client,
                owner: asker,
                is_read: matches!(*method, Method::GET | Method::HEAD),
            };
            let (lookups, keys) = (&upstream.lookups, authorization.clone());
            stored::engine_of(engines, lookups, asker, named, keys, only.as_deref()).await?
        }
        (worker, _) => worker,
    };
    // Requests of a session stay in one pool.
    let draw = shard.next_request_number();
    let pool = match direct {
        None => engines.weighted(only.as_deref(), received.head.session.map_or(draw, mix64)),
        Some(_) => None,
    };
    Ok(Target {
        direct,
        pool,
        only,
        root,
        is_named: named.is_some(),
        authorization,
        draw,
    })
}

/// The request as the dispatcher gets it. Charges its tokens to the client's key.
///
/// # Errors
/// 429: the key has no tokens left. 503: too many long bodies wait to be read.
async fn route_request(
    shard: &Rc<Shard>,
    upstream: &Upstream,
    client: &Client,
    received: &Received,
    seen: &BodyFields,
    target: &Target,
) -> Result<dispatch::Request, ApiError> {
    let (path, body, root) = (received.path(), &received.body, target.root);
    let block_size = shard.service.block_size;
    let tokens = tokenize_prompt(shard, upstream, client, path, body, seen).await;
    let blocks = match tokens {
        None if seen.has_prompt => {
            let blocks = move |body: &[u8]| peek(body)?.text_blocks(block_size, root);
            read(shard, client, body, blocks).await?
        }
        tokens => tokens,
    };
    let apart = upstream.engines.disaggregates()
        && received.parts.method == Method::POST
        && GENERATES.contains(&path)
        && seen.has_prompt
        && (!seen.whole || upstream.engines.needs_prefill());
    let request = dispatch::Request {
        prompt: blocks.unwrap_or_else(|| no_prompt(block_size)),
        max_tokens: seen.max_tokens.unwrap_or(0),
        session: received.head.session,
        direct: target.direct,
        only: target.pool.clone().or_else(|| target.only.clone()),
        streams_input: false,
        whole: !apart,
        resumes: false,
        answered: 0,
    };
    // Without a limit by the client only produced tokens count, once they are known.
    let most = |asked: Option<u32>, limit: u32| u64::from(asked.unwrap_or(0).min(limit));
    let answer = most(seen.n.or(Some(1)), CHOICES_MAX) * most(seen.max_tokens, ANSWER_TOKENS_MAX);
    if !counts_only(path) {
        client.charge_tokens(u64::from(request.prompt.len()) + answer)?;
    }
    Ok(request)
}

/// The header lines that engines get. `stores`: the answer may be stored. `apart`: two engines get the request.
fn engine_headers(received: &mut Received, stores: bool, apart: bool, id: &str) -> Bytes {
    let parts = &mut received.parts;
    if Api::of(&parts.method, parts.uri.path()) != Api::Other {
        // A compressed answer cannot be judged or continued. Without the header any coding would be allowed (RFC 9110).
        let identity = HeaderValue::from_static("identity");
        parts.headers.insert(ACCEPT_ENCODING, identity);
    }
    let mut headers = wire::write_headers(&parts.headers);
    if stores {
        let id = fresh_request_id();
        wire::write_header(&mut headers, X_REQUEST_ID, id.as_bytes());
    } else if apart && !parts.headers.contains_key(X_REQUEST_ID) {
        // Both engines log the request by one name.
        wire::write_header(&mut headers, X_REQUEST_ID, id.as_bytes());
    }
    headers.extend_from_slice(loops::line());
    headers.freeze()
}

/// Sends copies of a request to mirrors.
fn send_copies(
    shard: &Shard,
    upstream: &Rc<Upstream>,
    received: &Received,
    headers: &Bytes,
    seen: &BodyFields,
    target: &Target,
) {
    let engines = &upstream.engines;
    let (method, path) = (&received.parts.method, received.path());
    let changes = !matches!(*method, Method::GET | Method::HEAD);
    // A copy of any other request would have its effects twice, as that of a file.
    let computes = changes && may_repeat(method, path) && !counts_only(path);
    if !engines.has_mirrors.load(Relaxed) || !computes || target.is_named {
        return;
    }
    for engine in engines.mirrors(seen.model.as_deref(), target.draw) {
        let (copies, bytes) = (&engines.traffic_counts.held, received.body.len() as u64);
        let Some(charge) = shard.budget.memory.charge_copy(copies, bytes) else {
            engines.traffic_counts.drop_copy(CopyDrop::Memory);
            continue;
        };
        let copy = RequestCopy {
            method: method.clone(),
            target: received.target.clone(),
            headers: headers.clone(),
            authorization: target.authorization.clone(),
            body: received.body.clone(),
            charge,
        };
        upstream.send_copy(engine, copy);
    }
}

/// Obtains the beginning of an answer until the request's deadline. `has_pool`: its engines are those of one
/// pool, and `only` get the request if they fail it.
///
/// # Errors
/// What the client gets if no engine answers.
async fn begin(
    shard: &Rc<Shard>,
    upstream: &Rc<Upstream>,
    mut exchange: Exchange,
    has_pool: bool,
    only: Option<Arc<[WorkerId]>>,
) -> Result<(Exchange, StartedAnswer), ApiError> {
    let deadline_ns = exchange.deadline_ns;
    let begun = async {
        match obtain(shard, upstream, &exchange).await {
            Err(error)
                if has_pool && (error.status == 503 || error.status == 502 && exchange.repeats) =>
            {
                upstream
                    .engines
                    .traffic_counts
                    .fallbacks
                    .fetch_add(1, Relaxed);
                exchange.request.only = only;
                obtain(shard, upstream, &exchange).await
            }
            begun => begun,
        }
    };
    let begun = match deadline_ns {
        None => begun.await?,
        Some(deadline_ns) => {
            let left = Duration::from_nanos(deadline_ns.saturating_sub(monotonic_ns()));
            tokio::time::timeout(left, begun).await.map_err(|_| {
                shard.metrics.streams_cut_deadline.add(1);
                let limit = shard.service.limits.request_timeout;
                ApiError::deadline(limit.unwrap_or_default().as_secs_f64())
            })??
        }
    };
    Ok((exchange, begun))
}

/// Makes the request's span the parent of those of engines, if it has one; otherwise gives a request without a usable
/// trace one of its own, if traces are of interest.
fn trace(shard: &Shard, owner: &Owner, headers: &mut HeaderMap) {
    let service = &shard.service;
    let span = owner
        .account()
        .span()
        .map(|of| (of.header(), of.parent.is_none()));
    if let Some((header, is_root)) = span {
        if let Ok(value) = HeaderValue::from_str(&header) {
            if is_root {
                headers.remove(TRACESTATE);
            }
            headers.insert(TRACEPARENT, value);
        }
        return;
    }
    if service.access.is_none() && service.trace_sample == 0.0 || TraceId::of(headers).is_some() {
        return;
    }
    let draw = || shard.next_request_number();
    let id = TraceId::drawn([draw(), draw()]);
    // If spans are exported, that was drawn before.
    let sampled = service.spans.is_none() && is_drawn(service.trace_sample, draw());
    let header = id.header(draw(), sampled);
    if let Ok(value) = HeaderValue::from_str(&header) {
        headers.remove(TRACESTATE); // of another trace, or of none
        headers.insert(TRACEPARENT, value);
    }
    owner.account().note_trace(&id);
}

/// Result of `job` on `body`, on a thread where it holds no other client up.
///
/// # Errors
/// 503: too many long bodies wait for that.
async fn read<T: Send + 'static>(
    shard: &Shard,
    client: &Client,
    body: &Bytes,
    job: impl FnOnce(&[u8]) -> T + Send + 'static,
) -> Result<T, ApiError> {
    if body.len() <= READ_BYTES {
        return Ok(job(body));
    }
    // A token per four bytes, of four bytes, and a hash for each block of them.
    let bytes = 2 * body.len() as u64;
    let charge = client.charge(&shard.budget.memory, bytes)?;
    let long = body.clone();
    let done = shard.helpers.run(body.len(), move || job(&long)).await;
    drop(charge);
    done.map_err(|why| match why {
        NoResult::Busy => {
            ApiError::overloaded("too many long bodies wait to be read; try again later", 1)
        }
        NoResult::Failed => ApiError::internal("with a long body"),
    })
}

/// The line that a request for generated text will have in the record, if there is one.
fn recording(
    shard: &Shard,
    owner: &Rc<Owner>,
    path: &str,
    seen: &BodyFields,
    request: &dispatch::Request,
    session: Option<u64>,
    arrival_ns: u64,
) -> Option<RefCell<Recording>> {
    let generates = matches!(path, "/v1/completions" | "/v1/chat/completions");
    let recorder = shard.service.recorder.clone().filter(|_| generates);
    let wants_counts = !counts_only(path) && owner.account().wants_counts();
    let account = wants_counts.then(|| owner.clone());
    let choices = seen.n.unwrap_or(1);
    let shadow = shard.service.shadow.as_ref();
    let shadow = shadow.filter(|_| generates && choices == 1);
    let shadow = shadow.and_then(|shadow| shadow.begin(arrival_ns));
    if recorder.is_none() && account.is_none() && shadow.is_none() {
        return None;
    }
    let known = RecordedRequest {
        arrival_ns,
        input_tokens: request.prompt.len(),
        blocks: request.prompt.shared_blocks(),
        session,
        priority: seen.priority.unwrap_or_default(),
        ..RecordedRequest::default()
    };
    Some(RefCell::new(Recording::new(
        recorder, account, shadow, known, choices,
    )))
}

/// The prompt as engines will tokenize it; `None` if that is not certain, or there is no room for the work now.
async fn tokenize_prompt(
    shard: &Rc<Shard>,
    upstream: &Upstream,
    client: &Client,
    path: &str,
    body: &Bytes,
    seen: &BodyFields,
) -> Option<Prompt> {
    let engines = &upstream.engines;
    let base = engines.tokenized.as_ref()?;
    let base = base.clone();
    let catalog = engines.catalog();
    let lora = catalog
        .adapter(&base, seen.model.as_deref())
        .filter(|_| engines.tokenizes.load(Relaxed));
    let prompt = match lora {
        Some(lora) if seen.has_prompt => {
            let (lora, path) = (lora.to_owned(), path.to_owned());
            let job = move |service: &Service, body: &[u8]| {
                let size = service.block_size;
                let prompt = tokens::prompt(&service.text, &path, body, &base, &lora, size);
                Ok(prompt)
            };
            let charge = client.charge(&shard.budget.memory, 0).ok()?;
            let done = shard.run(body.clone(), charge, job).await;
            done.ok().and_then(|(prompt, _)| prompt)
        }
        _ => None,
    };
    engines.prompts[usize::from(prompt.is_none())].fetch_add(1, Relaxed);
    prompt
}

/// Whether an engine may read the body as JSON. Some do whatever type the client names, so a body that begins as
/// an object is read regardless of it: otherwise clients could choose not to be charged in advance.
fn may_be_json(headers: &HeaderMap, body: &[u8]) -> bool {
    if without_bom(body).trim_ascii_start().starts_with(b"{") {
        return true;
    }
    let Some(kind) = headers.get(CONTENT_TYPE) else {
        return true;
    };
    let essence = kind.as_bytes().split(|&b| b == b';').next();
    essence.is_some_and(|essence| {
        let essence = essence.trim_ascii();
        essence.eq_ignore_ascii_case(b"application/json") || essence.ends_with(b"+json")
    })
}

/// The engines that serve `model`, and the root of its blocks' hashes.
#[allow(clippy::type_complexity)]
fn served(
    upstream: &Upstream,
    model: Option<&str>,
) -> Result<(Option<Arc<[WorkerId]>>, BlockHash), ApiError> {
    let catalog = upstream.engines.catalog();
    match model {
        // Before the first engine answered, no model is unknown.
        Some(model) if !catalog.is_empty() => match catalog.get(model) {
            Some(served) => Ok((served.only.clone(), served.root)),
            None => Err(ApiError::model_not_found(model, &catalog.names())),
        },
        _ => Ok((None, BlockHash::default())),
    }
}

/// Stands for a prompt that is not in the body, or has no text: a token, which fills no block.
fn no_prompt(block_size: u32) -> Prompt {
    Prompt::from_tokens(&[0], block_size, BlockHash::default())
        .expect("one token, in blocks of one or more")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_read_whatever_type_they_are_announced_as() {
        let json = |kind: Option<&'static str>, body: &str| {
            let mut headers = HeaderMap::new();
            if let Some(kind) = kind {
                headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
            }
            may_be_json(&headers, body.as_bytes())
        };
        let object = "\u{feff} \n{\"prompt\":\"a\",\"max_tokens\":9}";
        for kind in [
            None,
            Some("text/plain"),
            Some("application/x-www-form-urlencoded"),
        ] {
            assert!(json(kind, object), "{kind:?}");
        }
        assert_eq!(peek(object.as_bytes()).unwrap().max_tokens, Some(9));
        assert!(json(Some("Application/JSON ; charset=utf-8"), "[]"));
        assert!(json(Some("application/vnd.x+json"), "[]"));
        assert!(!json(Some("multipart/form-data; boundary=b"), "--b\r\n{}"));
        assert!(!json(Some("application/octet-stream"), ""));
    }
}
