//! Paths of a server of modelled workers, and what each of them needs: a key, the body, engines that are awake.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use hyper::{Method, Request, Response};
use slipstream_base::StageTimes;
use slipstream_router::Fleet;

use crate::door::body::HttpBody;
use crate::door::budget::{Budget, ClientUse};
use crate::door::connection::{Client, Owner};
use crate::door::faults::{self, Breaking};
use crate::door::http::{
    Received, check_memory, head_bytes, head_of, json, large_json, media_type, metrics,
    percent_decode, ready, receive,
};
use crate::door::service::{Admission, ApiKeys, Service};
use crate::door::shard::Shard;
use crate::openai::{
    ApiError, CompletionApi, ModelCard, model_json, models_json, openapi_json,
    openapi_json_without, version_json,
};
use crate::server::manage::{self, Manage};
use crate::server::rates;
use crate::tokens::workers::Workers;
use crate::tokens::{duplex, embeddings, generate, messages, responses, tokenize};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

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
    KvEventSources,
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
pub(super) const MESSAGES: &str = "/v1/messages";

/// The most frequent ones first.
static ROUTES: [Route; 25] = [
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
    keyed("/kv_event_sources", READ, Endpoint::KvEventSources),
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

pub(super) async fn route(
    workers: &Rc<Workers>,
    owner: &Rc<Owner>,
    request: Request<Incoming>,
    id: &str,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let shard = &workers.shard;
    let service = &shard.service;
    let limit = service.limits.header_bytes_max;
    if head_bytes(&request) > limit as usize {
        return Err(ApiError::head_too_large(limit));
    }
    let path = request.uri().path();
    if path == "/admin/faults" {
        return Box::pin(rates::admin(shard, owner, request)).await;
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
    let Some(route) = found.filter(|route| is_served(service, route)) else {
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
    let mut response = answer(workers, route, request, client, id, times).await?;
    if let Some(fault) = fault
        && response.body().is_events()
    {
        let breaking = Breaking::new(fault, &service.faults);
        response.body_mut().break_by(breaking);
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
    workers: &Rc<Workers>,
    route: &Route,
    request: Request<Incoming>,
    client: Client,
    id: &str,
    times: StageTimes,
) -> Result<Response<HttpBody>, ApiError> {
    let shard = &workers.shard;
    let service = &shard.service;
    let path = request.uri().path();
    match route.endpoint {
        Endpoint::Chat => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            generate::generate(workers, CompletionApi::Chat, head, body, charge, times).await
        }
        Endpoint::Completion => {
            if media_type(request.headers()) == Some("application/x-ndjson") {
                check_memory(shard)?;
                let (parts, body) = request.into_parts();
                let head = head_of(&parts.headers, id, client)?;
                return Box::pin(duplex::serve(workers, head, body, times)).await;
            }
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            generate::generate(
                workers,
                CompletionApi::Completion,
                head,
                body,
                charge,
                times,
            )
            .await
        }
        Endpoint::Messages => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            Box::pin(messages::create(workers, head, body, charge, times)).await
        }
        Endpoint::CountTokens => {
            let Received { body, charge, .. } = receive(shard, client, request, id).await?;
            Box::pin(messages::count_tokens(workers, body, charge)).await
        }
        Endpoint::Responses => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            Box::pin(responses::create(workers, head, body, charge, times)).await
        }
        Endpoint::Embeddings => {
            let Received { head, body, charge } = receive(shard, client, request, id).await?;
            Box::pin(embeddings::create(workers, head, body, charge, times)).await
        }
        Endpoint::Response => {
            let (method, query) = (request.method(), request.uri().query());
            let rest = &path[route.path.len()..];
            responses::stored(workers, &client, method, rest, query)
        }
        Endpoint::Tokenize => {
            let Received { body, charge, .. } = receive(shard, client, request, id).await?;
            large_json(Box::pin(shard.run(body, charge, tokenize::tokenize)).await?)
        }
        Endpoint::Detokenize => {
            let Received { body, charge, .. } = receive(shard, client, request, id).await?;
            large_json(Box::pin(shard.run(body, charge, tokenize::detokenize)).await?)
        }
        Endpoint::Manage(manage) => {
            let query = request.uri().query().unwrap_or_default().to_owned();
            let body = match manage {
                Manage::LoadAdapter | Manage::UnloadAdapter => {
                    receive(shard, client, request, id).await?.body
                }
                _ => Bytes::new(),
            };
            manage::answer(service, manage, &query, &body)
        }
        Endpoint::Models => Ok(models(service)),
        Endpoint::Model => model(service, &path[route.path.len()..]),
        Endpoint::Health => Ok(health(shard)),
        Endpoint::Ready => Ok(ready(shard, any_ready(&shard.service.fleets.serve))),
        Endpoint::Live => Ok(json(200, b"{\"live\":true}".to_vec())),
        Endpoint::Version => Ok(json(200, version_json().to_vec())),
        Endpoint::OpenApi => Ok(json(200, description(service))),
        Endpoint::KvEventSources => {
            let sources = service.management.kv_event_sources.get();
            Ok(json(200, sources.cloned().unwrap_or_default().into_bytes()))
        }
        Endpoint::Metrics => metrics(shard, request.headers(), id),
    }
}

/// The served model and its adapters.
fn models(service: &Service) -> Response<HttpBody> {
    let adapters = service.management.adapters();
    let base = card(service);
    let of_adapters = adapters.iter().map(|adapter| ModelCard {
        id: &adapter.name,
        root: &adapter.path,
        parent: Some(&service.model),
        ..base
    });
    let aliases = service.management.aliases.iter();
    let of_aliases = aliases.map(|alias| ModelCard { id: alias, ..base });
    let cards: Vec<ModelCard<'_>> = std::iter::once(base)
        .chain(of_aliases)
        .chain(of_adapters)
        .collect();
    json(200, models_json(&cards))
}

/// The model or adapter that the end of a path names.
fn model(service: &Service, name: &str) -> Result<Response<HttpBody>, ApiError> {
    let name = percent_decode(name);
    let adapter = generate::check_model(service, Some(&name))?;
    let base = card(service);
    let shown = match &adapter {
        None => ModelCard { id: &name, ..base },
        Some(adapter) => ModelCard {
            id: &name,
            root: &adapter.path,
            parent: Some(&service.model),
            ..base
        },
    };
    Ok(json(200, model_json(&shown)))
}

/// Whether a route exists on this server.
fn is_served(service: &Service, route: &Route) -> bool {
    let management = &service.management;
    match route.endpoint {
        Endpoint::Manage(_) => management.is_served(),
        Endpoint::KvEventSources => management.kv_event_sources.get().is_some(),
        _ => true,
    }
}

/// The description of the routes that are served.
fn description(service: &Service) -> Vec<u8> {
    let mut absent = ROUTES
        .iter()
        .filter(|route| !is_served(service, route))
        .peekable();
    if absent.peek().is_none() {
        return openapi_json().to_vec();
    }
    openapi_json_without(absent.map(|route| route.path))
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
