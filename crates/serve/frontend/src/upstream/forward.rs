//! From a client's request to the first bytes of an engine's answer.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Incoming};
use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue,
    LOCATION, RETRY_AFTER,
};
use hyper::{Method, Request, Response, StatusCode};
use slipstream_base::Prompt;
use slipstream_base::mix::mix64;
use slipstream_base::width::nanos;
use slipstream_base::{BlockHash, Role, WorkerId};
use slipstream_config::cluster::{EngineKind, KvProtocol, Resume};
use slipstream_dispatch as dispatch;
use slipstream_planes::clock::monotonic_ns;
use slipstream_recorder::RecordedRequest;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::connection::{Connection, Failure};
use super::disagg::{self, Change, Meeting, StageRequest};
use super::ends::{self, Api, Reported};
use super::engines::{Engines, Visit};
use super::metrics::PrefillOutcome;
use super::pair::{PrefillFault, PrefillRequest, Prefilling};
use super::peek::{self, Peek, peek};
use super::record::Recording;
use super::relay::{Relay, Turn, is_event_stream};
use super::resume::StreamKind;
use super::seat::Seat;
use super::sse::{self, Scanner};
use super::stored::{self, Named};
use super::traffic::{CopyDrop, RequestCopy};
use super::wire::{self, BodyDecoder, Decoded, Framing, ResponseHead};
use super::{Upstream, engines::Engine, tokens};
use super::{admin, loops};
use crate::budget::Charge;
use crate::connection::{Client, Owner};
use crate::helpers::NoResult;
use crate::http::{self, HttpBody};
use crate::metrics::Rejection;
use crate::openai::ApiError;
use crate::service::{Admission, Service};
use crate::shard::Shard;
use crate::trace_context::{TRACEPARENT, TRACESTATE, TraceId, is_drawn};

/// An answer with a length up to this is sent on once it is whole: until then another engine may be asked.
const WHOLE_BYTES_MAX: u64 = 256 << 10;

/// Choices and tokens of an answer that a request is charged for in advance, at most: more than any engine gives.
const CHOICES_MAX: u32 = 128;
const ANSWER_TOKENS_MAX: u32 = 4 << 20;

/// The request as it is sent to engines.
pub(super) struct Exchange {
    pub(super) method: Method,
    /// Path and query.
    target: String,
    /// Header lines.
    headers: Bytes,
    /// The client's `Authorization`, for engines without a key of their own.
    authorization: Option<Bytes>,
    /// As the client sent it.
    pub(super) body: Bytes,
    /// Routing's view of it.
    pub(super) request: dispatch::Request,
    /// Set if it streams an answer that another engine could continue.
    pub(super) stream: Option<StreamKind>,
    /// The API, which determines how the answer ends, and the number of choices.
    pub(super) api: Api,
    pub(super) choices: u64,
    /// Whether the client named its preferred engine.
    pub(super) prefers: bool,
    /// Whether the request's fields allow its stream to continue, by tokens at least.
    pub(super) resumable: bool,
    /// Whether a continuation may use tokens, not only text.
    pub(super) by_tokens: bool,
    /// Whether the router requests the answer's token ids from vLLM, which the client did not.
    pub(super) wants_tokens: Cell<bool>,
    /// Whether the client's body has that field, to another end.
    names_tokens: bool,
    /// `live.request_timeout_s` ends it at this time, ns.
    pub(super) deadline_ns: Option<u64>,
    /// Whether an engine may get it after another one may have got it.
    repeats: bool,
    /// Whether the client asked for a stream.
    streams: bool,
    /// Its place among the open streams.
    permit: StreamPermit,
    /// The client's request.
    pub(super) owner: Rc<Owner>,
    /// The engine may store its answer, whose id is not known yet, for this one.
    pub(super) stores: Cell<Option<stored::Owner>>,
    /// Its line in the record, if there is one.
    pub(super) recording: Option<RefCell<Recording>>,
}

/// Field of a body that asks vLLM for the tokens of its answer.
const WITH_TOKENS: &[u8] = b"\"return_token_ids\":true,";

impl Exchange {
    /// The request for the rest of an answer whose engine is lost, also if the client named that engine: `body` to `path`
    /// (`None`: its own) at one of the workers `only` (`None`: its own).
    pub(super) fn continued(
        &self,
        body: Vec<u8>,
        path: Option<&str>,
        only: Option<Arc<[WorkerId]>>,
    ) -> Exchange {
        let request = dispatch::Request {
            direct: None,
            only: only.or_else(|| self.request.only.clone()),
            ..self.request.clone()
        };
        Exchange {
            request,
            method: self.method.clone(),
            target: path.map_or_else(|| self.target.clone(), str::to_owned),
            headers: self.headers.clone(),
            authorization: self.authorization.clone(),
            body: body.into(),
            stream: self.stream,
            api: path.map_or(self.api, |path| Api::of(&self.method, path)),
            choices: self.choices,
            prefers: false,
            resumable: self.resumable,
            by_tokens: self.by_tokens,
            wants_tokens: self.wants_tokens.clone(),
            names_tokens: self.names_tokens,
            deadline_ns: self.deadline_ns,
            repeats: self.repeats,
            streams: self.streams,
            permit: StreamPermit::shared(),
            owner: self.owner.clone(),
            stores: Cell::new(None), // such streams do not continue
            recording: None,         // the first one's counts on
        }
    }

    /// Leaves it to other engines than `worker`, if one of them takes requests: that one has just failed it, and may take
    /// some still.
    pub(super) fn avoid(&mut self, engines: &Engines, worker: WorkerId) {
        let members = engines.each();
        let others = members.iter().filter(|of| {
            let only = self.request.only.as_ref();
            of.spec.worker != worker && only.is_none_or(|only| only.contains(&of.spec.worker))
        });
        let others: Vec<&Arc<Engine>> = others.collect();
        let answers = |of: &&Arc<Engine>| {
            of.takes_requests() && !of.is_mirror() && of.spec.role != Role::Prefill
        };
        if others.iter().any(answers) {
            self.request.only = Some(others.iter().map(|of| of.spec.worker).collect());
        }
    }

    /// Notes something for the record, if there is one.
    pub(super) fn recorded(&self, note: impl FnOnce(&mut Recording)) {
        if let Some(recording) = &self.recording {
            note(&mut recording.borrow_mut());
        }
    }

    /// Charges its body and `sent` bytes of its answer. False if there is no memory for them.
    pub(super) fn keeps(&self, sent: usize) -> bool {
        self.charge_answer(sent).is_ok()
    }

    /// Charges its body and `sent` bytes of its answer.
    ///
    /// # Errors
    /// As [`Charge::grow_to`].
    pub(super) fn charge_answer(&self, sent: usize) -> Result<(), ApiError> {
        self.permit.grow_to(self.body.len() + sent)
    }

    /// Gives back the memory of its answer: nothing of it is kept.
    pub(super) fn keeps_body_only(&self) {
        if let Some(held) = &*self.permit.0.borrow() {
            let body = self.body.len() as u64;
            held.charge.borrow_mut().shrink_to(body);
        }
    }

    /// Gives back its place and its memory. Only its client can end it from here on.
    pub(super) fn release(&self) {
        if let Some(held) = self.permit.0.borrow_mut().take() {
            held.client.answered();
        }
    }

    /// Gives back its place. Returns its memory.
    pub(super) fn into_charge(self) -> Option<Charge> {
        let held = self.permit.0.borrow_mut().take()?;
        let charge = held.charge.borrow_mut().take_all();
        Some(charge)
    }

    /// Memory for a job on its body, of its client.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn charge_job(&self) -> Result<Charge, ApiError> {
        let held = self.permit.0.borrow();
        let held = held.as_ref().ok_or_else(ApiError::out_of_memory)?;
        held.client.charge(&held.shard.budget.memory, 0)
    }

    /// It as `engine` gets it.
    fn outgoing(&self, engine: &Engine, stage: &StageRequest) -> Outgoing<'_> {
        Outgoing {
            method: &self.method,
            target: &self.target,
            headers: match stage.role {
                Role::Prefill => disagg::prefill_headers(&self.headers),
                Role::Both | Role::Decode => self.headers.clone(),
            },
            authorization: self.authorization.as_deref(),
            body: self.body_for(engine, stage),
            repeats: self.repeats,
            streams: self.streams,
            api: match stage.role {
                Role::Prefill => Api::Other,
                Role::Both | Role::Decode => self.api,
            },
        }
    }

    fn body_for(&self, engine: &Engine, stage: &StageRequest) -> [Bytes; 2] {
        let wants_tokens = self.wants_tokens.get() && engine.kind() == EngineKind::Vllm;
        let tokens: &'static [u8] = if wants_tokens { WITH_TOKENS } else { b"" };
        let before: Bytes = match &stage.change {
            Change::Body(body) => return [body.clone(), Bytes::new()],
            // The last field of a name wins.
            Change::None | Change::Before(_) if wants_tokens && self.names_tokens => {
                let more: &[u8] = match &stage.change {
                    Change::Before(fields) => fields,
                    _ => b"",
                };
                let end = self.body.iter().rposition(|&b| b == b'}');
                let end = end.unwrap_or(self.body.len());
                let tokens = tokens.strip_suffix(b",").unwrap_or(tokens);
                let last = [b",", more, tokens, b"}"].concat();
                return [self.body.slice(..end), last.into()];
            }
            Change::None => Bytes::from_static(tokens),
            Change::Before(fields) => [tokens, fields].concat().into(),
            Change::After(fields) => {
                let end = self.body.iter().rposition(|&b| b == b'}');
                let end = end.unwrap_or(self.body.len());
                return [self.body.slice(..end), [fields, &b"}"[..]].concat().into()];
            }
        };
        let start = self.body.iter().position(|&b| b == b'{');
        match start {
            Some(start) if !before.is_empty() => [
                [b"{", &*before].concat().into(),
                self.body.slice(start + 1..),
            ],
            _ => [self.body.clone(), Bytes::new()],
        }
    }

    /// The body for the engine that computes its prompt for another one; `None` if there is none. `params` as of
    /// [`disagg::prefill_body`].
    async fn prefill_request(
        &self,
        shard: &Rc<Shard>,
        params: Option<String>,
    ) -> Option<StageRequest> {
        let body = if self.body.len() <= READ_BYTES {
            disagg::prefill_body(&self.body, params.as_deref())
        } else {
            let charge = self.charge_job().ok()?;
            let job =
                move |_: &Service, body: &[u8]| Ok(disagg::prefill_body(body, params.as_deref()));
            let done = shard.run(self.body.clone(), charge, job).await;
            done.ok().and_then(|(body, _)| body)
        };
        body.map(|body| StageRequest {
            role: Role::Prefill,
            change: Change::Body(body.into()),
        })
    }

    /// The requests by which `prefill` and the engine that answers meet.
    ///
    /// # Errors
    /// Why there are none, as a clause.
    async fn meet(
        &self,
        shard: &Rc<Shard>,
        prefill: &Engine,
    ) -> Result<(PrefillRequest, StageRequest), String> {
        let protocol = (prefill.kv_protocol(), prefill.spec.kv_protocol.1);
        let draws = [shard.next_request_number(), shard.next_request_number()];
        let host = &prefill.spec.url.host;
        let meeting = Meeting::new(protocol, host, &prefill.kv_ids(), draws);
        let meeting = meeting.ok_or("its bootstrap server has not answered yet")?;
        let mut headers = self.headers.clone();
        let (for_prefill, change) = match meeting {
            Meeting::Sglang(fields) => {
                let change = Change::After(fields.into());
                let stage = StageRequest {
                    role: Role::Prefill,
                    change: change.clone(),
                };
                (stage, change)
            }
            Meeting::Mooncake {
                fields: [ask, answer],
                rank,
            } => {
                if let Some(rank) = rank {
                    let mut lines = BytesMut::from(&headers[..]);
                    let rank = rank.to_string();
                    wire::write_header(&mut lines, X_DATA_PARALLEL_RANK, rank.as_bytes());
                    headers = lines.freeze();
                }
                let stage = self.prefill_request(shard, Some(ask)).await;
                let stage = stage.ok_or("the request could not be rewritten")?;
                (stage, Change::Before(answer.into()))
            }
        };
        let body = self.body_for(prefill, &for_prefill);
        if matches!(for_prefill.change, Change::Body(_)) && !self.keeps(body[0].len()) {
            return Err("there is no memory for a second body".into());
        }
        let request = PrefillRequest {
            method: self.method.clone(),
            target: self.target.clone(),
            headers,
            authorization: self.authorization.clone(),
            body,
        };
        let stage = StageRequest {
            role: Role::Decode,
            change,
        };
        Ok((request, stage))
    }
}

/// A request as one engine gets it.
pub(super) struct Outgoing<'a> {
    pub(super) method: &'a Method,
    /// Path and query.
    pub(super) target: &'a str,
    /// Header lines.
    pub(super) headers: Bytes,
    /// For an engine without a key of its own.
    pub(super) authorization: Option<&'a [u8]>,
    pub(super) body: [Bytes; 2],
    /// Whether an engine may get it twice.
    pub(super) repeats: bool,
    /// Whether its client wants what keeps its connection open, before the answer.
    pub(super) streams: bool,
    /// By which the end of the answer is known.
    pub(super) api: Api,
}

/// A place among the open streams of the server.
pub(super) struct StreamPermit(RefCell<Option<Held>>);

struct Held {
    shard: Rc<Shard>,
    client: Client,
    /// Memory of its body, and of the sent part of its answer.
    charge: RefCell<Charge>,
}

impl StreamPermit {
    fn take(shard: &Rc<Shard>, client: Client, charge: Charge) -> Result<StreamPermit, ApiError> {
        shard
            .open_streams(&client, 1)
            .inspect_err(|_| shard.metrics.on_rejected(Rejection::StreamsMax))?;
        Ok(StreamPermit(RefCell::new(Some(Held {
            shard: shard.clone(),
            client,
            charge: RefCell::new(charge),
        }))))
    }

    /// Charges `bytes` in all.
    ///
    /// # Errors
    /// As [`Charge::grow_to`].
    fn grow_to(&self, bytes: usize) -> Result<(), ApiError> {
        match &*self.0.borrow() {
            Some(held) => held.charge.borrow_mut().grow_to(bytes as u64),
            None => Ok(()),
        }
    }

    /// For a request that continues one with a place.
    pub(super) fn shared() -> StreamPermit {
        StreamPermit(RefCell::new(None))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shard.on_streams_closed(&self.client, 1);
    }
}

/// Paths that are forwarded in addition to `/v1/`: inference requests. Sources: the API
/// servers of vLLM (`vllm/entrypoints`), SGLang (`http_server.py`) and llama.cpp (`server.cpp`).
static FORWARDED: &[&str] = &[
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/embeddings",
    "/embedding",
    "/invocations",
    "/inference/v1/generate",
    "/generate",
    "/generative_scoring",
    "/encode",
    "/completion",
    "/completions",
    "/chat/completions",
    "/infill",
    "/reranking",
    "/apply-template",
    "/props",
    "/get_model_info",
    "/model_info",
    "/openapi.json",
];

/// Paths under `/v1/` that only compute: a request there that is sent twice leaves an engine as one does. An answer of
/// `/v1/responses` may be stored, but one that never reached its client has an id that nobody knows.
static COMPUTES: &[&str] = &[
    "/v1/completions",
    "/v1/completions/render",
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/moderations",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
];

/// Whether a request may be sent to an engine after another one, or the same, may have received it. Others (files,
/// batches, and paths that no one here knows) would then be done twice.
fn may_repeat(method: &Method, path: &str) -> bool {
    match *method {
        Method::GET | Method::HEAD | Method::OPTIONS => true,
        Method::POST => COMPUTES.contains(&path) || FORWARDED.contains(&path),
        _ => false,
    }
}

/// Paths under `/v1/` that change an engine: they would reach one of several.
static CHANGES: &[&str] = &["/v1/load_lora_adapter", "/v1/unload_lora_adapter"];

fn is_forwarded(path: &str, more: &[String]) -> bool {
    // As the engine's server reads it: `/v1/%6coad_lora_adapter` names that path as well.
    let path = &*http::percent_decode(path);
    let listed = more
        .iter()
        .any(|of| path == of || of.ends_with('/') && path.starts_with(of.as_str()));
    let known = path.starts_with("/v1/") || FORWARDED.contains(&path);
    // A proxy on the way may resolve dots and joins.
    let plain = !path
        .split(['/', '\\'])
        .any(|part| part == ".." || part == ".")
        && !path.contains("//");
    plain && (listed || known && !CHANGES.contains(&path.trim_end_matches('/')))
}

/// Paths whose prompts may be computed by another engine than their answers.
static GENERATES: &[&str] = &["/v1/completions", "/v1/chat/completions"];

const X_REQUEST_ID: &str = "x-request-id";

/// By it vLLM chooses the data-parallel rank of a request.
const X_DATA_PARALLEL_RANK: &str = "x-data-parallel-rank";

/// Answers one request.
pub(crate) async fn handle(
    shard: &Rc<Shard>,
    owner: &Rc<Owner>,
    request: Request<Incoming>,
    id: &str,
) -> Result<Response<HttpBody>, ApiError> {
    let upstream = shard
        .upstream()
        .expect("it is called for engines only")
        .clone();
    let service = &shard.service;
    let limits = &service.limits;
    if http::head_bytes(&request) > limits.header_bytes_max as usize {
        return Err(ApiError::head_too_large(limits.header_bytes_max));
    }
    if loops::is_own(request.headers()) {
        return Err(ApiError::forwarding_loop());
    }
    if let Some(response) = open_path(shard, &upstream, &request, id) {
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
    if let Some(response) = models_path(&upstream, request.method(), path) {
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
    let answer = forward(shard, &upstream, client, request, id);
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
    upstream.earn();

    let seen = if may_be_json(&parts.headers, &body) {
        read(shard, &client, &body, |body| peek(body).map(Read::of)).await?
    } else {
        None
    };
    let stores = parts.method == Method::POST && parts.uri.path() == stored::CREATE;
    if stores {
        stored::check_new(seen.as_ref())?;
        // Some engines name the answer by it.
        parts.headers.remove(X_REQUEST_ID);
    }
    // Of a request that the router cannot read only `[DONE]` tells that all choices are there.
    let choices = seen
        .as_ref()
        .filter(|seen| !seen.has_odd_n)
        .map_or(u64::MAX, |seen| {
            u64::from(seen.n.unwrap_or(1).max(1)) * u64::from(seen.prompts)
        });
    let mut seen = seen.unwrap_or_default();
    client.owner().account().note_model(seen.model.as_deref());
    let has_mirrors = upstream.engines.has_mirrors.load(Relaxed);
    let model = has_mirrors.then(|| seen.model.clone()).flatten();
    let (only, root) = served(upstream, seen.model.as_deref())?;
    // The router's own keys stay here.
    let authorization = parts.headers.get(AUTHORIZATION);
    let authorization = authorization.filter(|_| shard.service.api_keys.is_empty());
    let authorization = authorization.map(|value| Bytes::copy_from_slice(value.as_bytes()));
    let named = Named::of(parts.uri.path(), seen.previous_response_id.take());
    let asker = stored::Owner::of(&shard.service, &client);
    match &named {
        Some(named) => stored::check_owner(&upstream.engines.stored, named, asker)?,
        // An engine might list the answers of all keys.
        None if asker != stored::Owner::Open && !stores && stored::is_path(parts.uri.path()) => {
            let (method, path) = (parts.method.as_str(), parts.uri.path());
            return Err(ApiError::route_not_found(method, path));
        }
        None => {}
    }
    let direct = match (head.worker, &named) {
        (None, Some(named)) => {
            let (engines, lookups) = (&upstream.engines, &upstream.lookups);
            let is_read = matches!(parts.method, Method::GET | Method::HEAD);
            let only = only.as_deref();
            let keys = authorization.clone();
            let asker = stored::Asker {
                client: &client,
                owner: asker,
                is_read,
            };
            stored::engine_of(engines, lookups, asker, named, keys, only).await?
        }
        (worker, _) => worker,
    };
    let session = head.session;
    // Requests of a session stay in one pool.
    let draw = shard.next_request_number();
    let engines = &upstream.engines;
    let pool = match direct {
        None => engines.weighted(only.as_deref(), session.map_or(draw, mix64)),
        Some(_) => None,
    };
    let block_size = shard.service.block_size;
    let tokens = tokenized(shard, upstream, &client, parts.uri.path(), &body, &seen).await;
    let blocks = match tokens {
        None if seen.has_prompt => {
            let blocks = move |body: &[u8]| peek(body)?.text_blocks(block_size, root);
            read(shard, &client, &body, blocks).await?
        }
        tokens => tokens,
    };
    let apart = upstream.engines.disaggregates()
        && parts.method == Method::POST
        && GENERATES.contains(&parts.uri.path())
        && seen.has_prompt
        && (!seen.whole || upstream.engines.needs_prefill());
    let request = dispatch::Request {
        prompt: blocks.unwrap_or_else(|| no_prompt(block_size)),
        max_tokens: seen.max_tokens.unwrap_or(0),
        session: head.session,
        direct,
        only: pool.clone().or_else(|| only.clone()),
        streams_input: false,
        whole: !apart,
        resumes: false,
        answered: 0,
    };
    // Without a limit by the client only produced tokens count, once they are known.
    let most = |asked: Option<u32>, limit: u32| u64::from(asked.unwrap_or(0).min(limit));
    let answer = most(seen.n.or(Some(1)), CHOICES_MAX) * most(seen.max_tokens, ANSWER_TOKENS_MAX);
    if !counts_only(parts.uri.path()) {
        client.charge_tokens(u64::from(request.prompt.len()) + answer)?;
    }
    let settings = &upstream.engines.settings;
    let stream = stream_kind(parts.uri.path(), &seen, settings.resume);
    let api = Api::of(&parts.method, parts.uri.path());
    let repeats = may_repeat(&parts.method, parts.uri.path());
    let is_exact = settings.resume == Resume::Tokens;
    let resumable =
        stream.is_some() && !seen.whole && !seen.hinders && (is_exact || !seen.has_tools);
    // Placeholders of images are not a prompt.
    let by_tokens = resumable && is_exact && !seen.has_media;
    let recording = recording(
        shard,
        client.owner(),
        parts.uri.path(),
        &seen,
        &request,
        session,
        arrival_ns,
    );
    if api != Api::Other {
        parts.headers.remove(ACCEPT_ENCODING); // a compressed answer cannot be judged or continued
    }
    let mut headers = wire::write_headers(&parts.headers);
    if stores {
        let id = stored::fresh_request_id();
        wire::write_header(&mut headers, X_REQUEST_ID, id.as_bytes());
    } else if apart && !parts.headers.contains_key(X_REQUEST_ID) {
        // Both engines log the request by one name.
        wire::write_header(&mut headers, X_REQUEST_ID, id.as_bytes());
    }
    headers.extend_from_slice(loops::line());
    let headers = headers.freeze();
    let changes = !matches!(parts.method, Method::GET | Method::HEAD);
    // A copy of any other request would have its effects twice, as that of a file.
    if has_mirrors && changes && repeats && named.is_none() && !counts_only(parts.uri.path()) {
        for engine in engines.mirrors(model.as_deref(), draw) {
            let (copies, bytes) = (&engines.traffic_counts.held, body.len() as u64);
            let Some(charge) = shard.budget.memory.charge_copy(copies, bytes) else {
                engines.traffic_counts.drop_copy(CopyDrop::Memory);
                continue;
            };
            let copy = RequestCopy {
                method: parts.method.clone(),
                target: target.clone(),
                headers: headers.clone(),
                authorization: authorization.clone(),
                body: body.clone(),
                charge,
            };
            upstream.send_copy(engine, copy);
        }
    }
    let mut exchange = Exchange {
        method: parts.method,
        target,
        headers,
        authorization,
        prefers: head.worker.is_some() && named.is_none(),
        resumable,
        by_tokens,
        wants_tokens: Cell::new(
            by_tokens && seen.return_token_ids != Some(true) && body.len() <= IDS_BODY_BYTES_MAX,
        ),
        names_tokens: seen.return_token_ids.is_some(),
        body: body.clone(),
        request,
        stream,
        api,
        choices,
        deadline_ns,
        repeats,
        streams: seen.stream,
        permit,
        owner: client.owner().clone(),
        stores: Cell::new(stores.then_some(asker)),
        recording,
    };
    let begun = async {
        match obtain(shard, upstream, &exchange).await {
            // Another pool may take it.
            Err(error)
                if pool.is_some()
                    && (error.status == 503 || error.status == 502 && exchange.repeats) =>
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
                ApiError::deadline(limits.request_timeout.unwrap_or_default().as_secs_f64())
            })??
        }
    };
    let mut response = Relay::respond(shard, upstream, exchange, begun)?;
    if stores {
        response.headers_mut().remove(X_REQUEST_ID); // the client's own follows
    }
    Ok(response)
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

/// Largest body for which token ids are requested: the first event has the ids of the prompt, some 1.6 bytes per byte of
/// text.
const IDS_BODY_BYTES_MAX: usize = 512 << 10;

/// A body up to this is read on the shard's thread, some 0.3 ms of work; a longer one by a helper thread.
const READ_BYTES: usize = 64 << 10;

/// The read part of a body.
#[derive(Debug, Default)]
#[allow(clippy::struct_excessive_bools)] // each is a field of the body
pub(super) struct Read {
    model: Option<String>,
    stream: bool,
    return_token_ids: Option<bool>,
    max_tokens: Option<u32>,
    n: Option<u32>,
    has_odd_n: bool,
    priority: Option<i32>,
    previous_response_id: Option<String>,
    pub(super) has_two_previous: bool,
    pub(super) chooses_id: bool,
    has_prompt: bool,
    /// Prompts of a completion.
    prompts: u32,
    /// As of [`Peek`].
    hinders: bool,
    has_tools: bool,
    has_media: bool,
    /// One engine must compute prompt and answer.
    whole: bool,
}

impl Read {
    fn of(seen: Peek<'_>) -> Read {
        Read {
            stream: seen.stream,
            return_token_ids: seen.return_token_ids,
            max_tokens: seen.max_tokens,
            n: seen.n,
            has_odd_n: seen.has_odd_n,
            priority: seen.priority,
            previous_response_id: seen.previous_response_id.clone(),
            has_two_previous: seen.has_two_previous,
            chooses_id: seen.chooses_id,
            has_prompt: seen.has_prompt(),
            prompts: seen.prompts(),
            hinders: seen.hinders,
            has_tools: seen.has_tools,
            has_media: seen.has_media,
            whole: seen.stays_whole(),
            model: seen.model,
        }
    }
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
/// Whether requests to `path` count tokens, and compute none.
fn counts_only(path: &str) -> bool {
    const PATHS: [&str; 3] = ["/tokenize", "/detokenize", "/v1/messages/count_tokens"];
    PATHS.contains(&path)
}

fn recording(
    shard: &Shard,
    owner: &Rc<Owner>,
    path: &str,
    seen: &Read,
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
async fn tokenized(
    shard: &Rc<Shard>,
    upstream: &Upstream,
    client: &Client,
    path: &str,
    body: &Bytes,
    seen: &Read,
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
    if peek::without_bom(body).trim_ascii_start().starts_with(b"{") {
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

fn stream_kind(path: &str, seen: &Read, resume: Resume) -> Option<StreamKind> {
    if !seen.stream || resume == Resume::Off {
        return None;
    }
    match path {
        "/v1/completions" => Some(StreamKind::Completion),
        "/v1/chat/completions" => Some(StreamKind::Chat),
        _ => None,
    }
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

/// An answer that has begun.
pub(super) struct Begun {
    pub(super) seat: Seat,
    pub(super) visit: Visit,
    pub(super) answer: Answer,
}

/// An answer as far as it was read.
pub(super) struct Answer {
    pub(super) connection: Connection,
    pub(super) head: ResponseHead,
    pub(super) decoder: BodyDecoder,
    pub(super) first: Bytes,
    /// `first` is all of it.
    pub(super) complete: bool,
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

/// The body of `answer`; `None` if it is too long.
pub(super) async fn read_rest(answer: &mut Answer) -> Result<Option<Bytes>, Failure> {
    if answer.complete {
        return Ok(Some(answer.first.clone()));
    }
    let mut body = BytesMut::from(&answer.first[..]);
    let mut turn = Turn::default();
    loop {
        if turn.is_over() {
            tokio::task::yield_now().await;
        }
        match answer.decoder.decode(&mut answer.connection.buf) {
            Ok(Decoded::Data(data)) if body.len() + data.len() > disagg::ANSWER_BYTES_MAX => {
                return Ok(None);
            }
            Ok(Decoded::Data(data)) => {
                turn.on_piece();
                body.extend_from_slice(&data);
                continue;
            }
            Ok(Decoded::End) => {
                answer.complete = true;
                return Ok(Some(body.freeze()));
            }
            Ok(Decoded::NeedMore) => {}
            Err(error) => return Err(Failure::Protocol(error)),
        }
        match std::future::poll_fn(|cx| answer.connection.poll_fill(cx)).await {
            Ok(0) if answer.decoder.ends_at_close() => return Ok(Some(body.freeze())),
            Ok(0) => return Err(Failure::Lost("closed within its answer".into())),
            Ok(read) => turn.on_read(read),
            Err(error) => return Err(Failure::Lost(error.to_string())),
        }
    }
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

/// Whether the connection may carry another request after this answer. An engine that refuses a request may
/// not have read its body, and would read it as the next request.
pub(super) fn may_keep(exchange: &Exchange, head: &ResponseHead) -> bool {
    head.keep_alive && (head.status.as_u16() < 400 || exchange.body.is_empty())
}

/// Sends a request to an engine, and reads the first bytes of its answer.
pub(super) async fn converse(
    upstream: &Upstream,
    visit: &Visit,
    outgoing: &Outgoing<'_>,
) -> Result<Answer, Failure> {
    let engine = visit.engine();
    // Whether a request on a reused connection that breaks has reached the engine is not known.
    let idle = outgoing.repeats.then(|| upstream.take_idle(engine));
    if let Some(connection) = idle.flatten() {
        match converse_on(connection, engine, outgoing).await {
            // The engine closed an idle connection as the request was sent. A new connection shows whether
            // it is there.
            Err(Failure::Lost(_)) => {}
            outcome => return outcome,
        }
    }
    let limit = upstream.engines.settings.connect_timeout;
    let connection = Connection::open(engine, limit).await?;
    converse_on(connection, engine, outgoing).await
}

async fn converse_on(
    mut connection: Connection,
    engine: &Engine,
    outgoing: &Outgoing<'_>,
) -> Result<Answer, Failure> {
    let body = &outgoing.body;
    let head = wire::write_head(
        outgoing.method,
        [&engine.spec.url.prefix, outgoing.target],
        &engine.authority,
        engine.authorization.as_deref().or(outgoing.authorization),
        &outgoing.headers,
        body[0].len() + body[1].len(),
    );
    let sent = connection.send(head, body).await;
    // An engine may answer before it has read the body, and close: `413`.
    let mut head = match (connection.read_head(outgoing.method).await, sent) {
        (Ok(head), _) => head,
        (Err(_), Err(failure)) | (Err(failure), Ok(())) => return Err(failure),
    };
    let first = first_bytes(&mut connection, &mut head, outgoing).await?;
    let FirstBytes {
        decoder,
        bytes: first,
        complete,
    } = first;
    Ok(Answer {
        connection,
        head,
        decoder,
        first,
        complete,
    })
}

/// The beginning of a body.
struct FirstBytes {
    decoder: BodyDecoder,
    bytes: Bytes,
    /// Whether they are the complete body.
    complete: bool,
}

/// Reads the part of a body that must be judged before the client gets any of it: a short answer completely; of a stream
/// of events the first one, which may be an error of the engine.
async fn first_bytes(
    connection: &mut Connection,
    head: &mut ResponseHead,
    outgoing: &Outgoing<'_>,
) -> Result<FirstBytes, Failure> {
    let api = outgoing.api;
    let mut decoder = BodyDecoder::new(head.framing);
    let is_known = api != Api::Other && !head.headers.contains_key(CONTENT_ENCODING);
    let judges = is_known && head.status == StatusCode::OK;
    let is_short = match head.framing {
        Framing::Sized(bytes) => bytes <= WHOLE_BYTES_MAX,
        Framing::Chunked | Framing::UntilClose => is_known && !is_event_stream(head),
    };
    let mut wants_all = is_short || head.status == StatusCode::SERVICE_UNAVAILABLE;
    let mut scanner = (judges && is_event_stream(head)).then(Scanner::default);
    let mut first = BytesMut::new();
    // End of the events that were searched for content.
    let mut searched = 0;
    let mut turn = Turn::default();
    let complete = loop {
        if turn.is_over() {
            tokio::task::yield_now().await;
        }
        match decoder.decode(&mut connection.buf) {
            Ok(Decoded::Data(data)) => {
                turn.on_piece();
                if first.is_empty() && judges && scanner.is_none() && sse::begins(&data) {
                    // Clients go by the type, which some engines do not set.
                    head.headers.insert(CONTENT_TYPE, EVENT_STREAM.clone());
                    scanner = Some(Scanner::default());
                    wants_all &= matches!(head.framing, Framing::Sized(_));
                }
                let before = first.len();
                first.extend_from_slice(&data);
                let is_begun = match &mut scanner {
                    Some(scanner) => {
                        let whole = if scanner.takes_whole(&data) {
                            data.len()
                        } else {
                            scanner.feed(&data)
                        };
                        let end = before + whole;
                        let is_begun = whole > 0
                            && (outgoing.streams || sse::have_content(&first[searched..end]));
                        searched = if whole > 0 { end } else { searched };
                        is_begun
                    }
                    None => true,
                };
                if (wants_all || !is_begun) && first.len() as u64 <= WHOLE_BYTES_MAX {
                    continue;
                }
                // A short answer in one piece often has its end in the same read.
                break false;
            }
            Ok(Decoded::End) => break true,
            Ok(Decoded::NeedMore) => {}
            Err(error) => return Err(Failure::Protocol(error)),
        }
        match std::future::poll_fn(|cx| connection.poll_fill(cx)).await {
            Ok(0) if decoder.ends_at_close() => break true,
            Ok(0) => return Err(Failure::Lost("closed within its answer".into())),
            Ok(read) => turn.on_read(read),
            Err(error) => return Err(Failure::Lost(error.to_string())),
        }
    };
    let bytes = first.freeze();
    if scanner.is_some() && complete && bytes.trim_ascii_start().starts_with(b"{") {
        head.headers.insert(CONTENT_TYPE, JSON.clone());
        scanner = None;
    }
    if scanner.is_some() {
        if let Some(reported) = ends::first_error(api, &bytes, complete) {
            return Err(Failure::Reported(reported));
        }
        if complete && sse::events(&bytes).next().is_none() {
            return Err(Failure::Incomplete("its stream ended without an event"));
        }
    } else if judges && complete {
        let kind = head.headers.get(CONTENT_TYPE);
        let kind = kind.map_or(&b""[..], HeaderValue::as_bytes);
        ends::check_whole(api, kind, &bytes).map_err(Failure::Reported)?;
    }
    Ok(FirstBytes {
        decoder,
        bytes,
        // Whether a stream is complete is for the relay to say.
        complete: complete && scanner.is_none(),
    })
}

static EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
static JSON: HeaderValue = HeaderValue::from_static("application/json");

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

    #[test]
    fn only_requests_that_compute_are_repeated() {
        for path in [
            "/v1/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/rerank",
            "/tokenize",
        ] {
            assert!(may_repeat(&Method::POST, path), "{path}");
            assert!(!may_repeat(&Method::DELETE, path), "{path}");
        }
        for path in [
            "/v1/files",
            "/v1/batches",
            "/v1/fine_tuning/jobs",
            "/v1/responses/resp_1/cancel",
            "/v1/unheard_of",
            "/custom",
        ] {
            assert!(may_repeat(&Method::GET, path), "{path}");
            for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
                assert!(!may_repeat(&method, path), "{method} {path}");
            }
        }
    }

    #[test]
    fn paths_that_change_engines_are_not_forwarded() {
        let more = vec!["/custom".to_owned(), "/tools/".to_owned()];
        for path in [
            "/v1/completions",
            "/v1/audio/transcriptions",
            "/v2/rerank",
            "/tokenize",
            "/custom",
            "/tools/a/b",
        ] {
            assert!(is_forwarded(path, &more), "{path}");
        }
        for path in [
            "/v1/load_lora_adapter",
            "/sleep",
            "/reset_prefix_cache",
            "/v2/repository/models/m/unload",
            "/v2/logging",
            "/v2/systemsharedmemory/register",
            "/shutdown",
            "/custom/x",
            "/v1/../sleep",
            "/v1/%2e%2E/sleep",
            "/v1/%6coad_lora_adapter",
            "/v1/load_lora_adapter/",
            "/v1//x",
            "/",
        ] {
            assert!(!is_forwarded(path, &more), "{path}");
        }
    }
}
