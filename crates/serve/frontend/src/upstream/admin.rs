//! `/admin/engines`: adds, removes and lists engines, by the admin key.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, HeaderValue};
use hyper::{Method, Request, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use slipstream_base::EngineKind;
use slipstream_base::sync::unpoisoned;
use slipstream_config::cluster::EngineUrl;
use slipstream_planes::clock::monotonic_ns;

use super::engines::{Engine, Engines, State};
use super::members::MemberError;
use crate::door::body::HttpBody;
use crate::door::connection::{Client, Owner};
use crate::door::http;
use crate::door::service::Admission;
use crate::door::shard::Shard;
use crate::openai::ApiError;

/// Body of a request at most, bytes.
const BODY_BYTES_MAX: u64 = 64 << 10;

/// Longest drain, s.
const DRAIN_S_MAX: f64 = 86_400.0;

/// Whether `path` is one of these, which are never forwarded.
pub(super) fn is_admin(path: &str) -> bool {
    let path = &*http::percent_decode(path);
    path == "/admin" || path.starts_with("/admin/")
}

fn error(status: u16, code: &'static str, message: impl Into<String>) -> ApiError {
    ApiError {
        status,
        kind: "invalid_request_error",
        code: Some(code),
        param: None,
        message: message.into(),
        retry_after_s: None,
    }
}

fn refusal(why: &MemberError) -> ApiError {
    let (status, code) = match why {
        MemberError::Listed { .. } => (409, "engine_listed"),
        MemberError::Full { .. } => (409, "engines_max"),
        MemberError::Role { .. } | MemberError::Pool { .. } | MemberError::WhichPool { .. } => {
            (400, "pool")
        }
        MemberError::Tls { .. } => (400, "tls"),
        MemberError::Unknown { .. } => (404, "engine_unknown"),
    };
    error(status, code, why.to_string())
}

/// Answers a request to an admin path.
pub(super) async fn handle(
    shard: &Rc<Shard>,
    owner: &Rc<Owner>,
    engines: &Arc<Engines>,
    request: Request<Incoming>,
) -> Result<Response<HttpBody>, ApiError> {
    let (method, path) = (request.method().as_str(), request.uri().path());
    if engines.admin_key.is_empty() {
        // Without a key for it there is no such API.
        return Err(ApiError::not_forwarded(method, path));
    }
    let authorization = request.headers().get(AUTHORIZATION);
    let admission = engines
        .admin_key
        .admit(authorization.map(HeaderValue::as_bytes));
    let Admission::Key(key) = admission else {
        return Err(ApiError::unauthorized());
    };
    if path != "/admin/engines" {
        let text = format!("there is no {path}; the admin API is /admin/engines");
        return Err(error(404, "unknown_url", text));
    }
    match *request.method() {
        Method::GET | Method::HEAD => Ok(http::json(200, list(engines).to_string().into_bytes())),
        Method::POST => {
            let body = read(shard, &Client::new(owner.clone(), Some(key)), request).await?;
            add(engines, &body)
        }
        Method::DELETE => {
            let query = request.uri().query().map(str::to_owned);
            let body = match query {
                Some(query) => from_query(&query)?,
                None => read(shard, &Client::new(owner.clone(), Some(key)), request).await?,
            };
            remove(engines, &body)
        }
        _ => Err(ApiError::method_not_allowed(
            method,
            path,
            "GET, POST or DELETE",
        )),
    }
}

async fn read(
    shard: &Rc<Shard>,
    client: &Client,
    request: Request<Incoming>,
) -> Result<Bytes, ApiError> {
    http::read_admin_body(shard, client, request.into_body(), BODY_BYTES_MAX).await
}

/// The members of a query as a body.
fn from_query(query: &str) -> Result<Bytes, ApiError> {
    let mut body = serde_json::Map::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = http::percent_decode(value);
        let value = match name {
            "drain_s" => {
                // JSON has no NaN and no infinity.
                let seconds = value.parse().ok().filter(|s: &f64| s.is_finite());
                let wrong = || ApiError::invalid(name, "`drain_s` is not a number of seconds");
                json!(seconds.ok_or_else(wrong)?)
            }
            _ => Value::from(value),
        };
        if body.insert(name.to_owned(), value).is_some() {
            let text = format!("`{name}` is there twice; remove one engine per request");
            return Err(ApiError::invalid(name, text));
        }
    }
    Ok(Value::from(body).to_string().into())
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8], example: &str) -> Result<T, ApiError> {
    serde_json::from_slice(body)
        .map_err(|why| ApiError::bad_body(format!("{why}; send JSON such as {example}")))
}

fn url_of(text: &str) -> Result<EngineUrl, ApiError> {
    let wrong = |why| ApiError::invalid("url", format!("`url` {why}"));
    EngineUrl::parse_engine(text).map_err(wrong)
}

/// Body of `POST`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Add {
    url: String,
    pool: Option<String>,
    kind: Option<String>,
    api_key: Option<String>,
}

fn add(engines: &Engines, body: &[u8]) -> Result<Response<HttpBody>, ApiError> {
    let asked: Add = parse(body, "{\"url\": \"http://gpu3:8000\"}")?;
    let url = url_of(&asked.url)?;
    let kind = asked.kind.as_deref().map(|word| {
        EngineKind::of_name(word).ok_or_else(|| {
            let text = format!("there is no kind `{word}`; use {}", EngineKind::names());
            ApiError::invalid("kind", text)
        })
    });
    let printable = |key: &String| !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic());
    if asked.api_key.as_ref().is_some_and(|key| !printable(key)) {
        let text = "`api_key` is empty, or has other than printable ASCII without spaces";
        return Err(ApiError::invalid("api_key", text));
    }
    let pool = asked.pool.as_deref();
    let added = engines.add(&url, pool, kind.transpose()?, asked.api_key);
    let worker = added.map_err(|why| refusal(&why))?;
    let members = engines.members();
    let engine = members.get(worker.index()).and_then(Option::as_ref);
    let body = engine.map_or(Value::Null, |engine| entry(engine, monotonic_ns()));
    Ok(http::json(201, body.to_string().into_bytes()))
}

/// Body of `DELETE`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Remove {
    url: Option<String>,
    worker: Option<WorkerName>,
    drain_s: Option<f64>,
}

/// A worker as in lists (`0`), or as in logs and metrics (`w0`).
#[derive(Deserialize)]
#[serde(untagged)]
enum WorkerName {
    Number(u32),
    Text(String),
}

impl WorkerName {
    fn into_text(self) -> String {
        match self {
            WorkerName::Number(number) => format!("w{number}"),
            WorkerName::Text(text) if text.starts_with('w') => text,
            WorkerName::Text(number) => format!("w{number}"),
        }
    }
}

fn remove(engines: &Engines, body: &[u8]) -> Result<Response<HttpBody>, ApiError> {
    const EXAMPLE: &str = "{\"url\": \"http://gpu3:8000\", \"drain_s\": 60}";
    let asked: Remove = parse(body, EXAMPLE)?;
    let limit = match asked.drain_s {
        Some(s) if !(0.0..=DRAIN_S_MAX).contains(&s) => {
            let text = format!("`drain_s` is {s}; send 0 to {DRAIN_S_MAX} seconds");
            return Err(ApiError::invalid("drain_s", text));
        }
        s => s.map(Duration::from_secs_f64),
    };
    let members = engines.members();
    let worker = asked.worker.map(WorkerName::into_text);
    let is_it: Box<dyn Fn(&Engine) -> bool> = match (&asked.url, &worker) {
        (Some(url), None) => {
            let url = url_of(url)?;
            Box::new(move |of| of.spec.url == url)
        }
        (None, Some(worker)) => {
            let worker = worker.clone();
            Box::new(move |of| of.spec.worker.to_string() == worker)
        }
        _ => {
            let text = format!("name the engine by `url` or by `worker`: {EXAMPLE}");
            return Err(ApiError::bad_body(text));
        }
    };
    let engine = members.iter().flatten().find(|of| is_it(of));
    let Some(engine) = engine else {
        let name = asked.url.or(worker).unwrap_or_default();
        return Err(refusal(&MemberError::Unknown { name }));
    };
    engines.drain_engine(engine, limit);
    let body = entry(engine, monotonic_ns()).to_string();
    Ok(http::json(202, body.into_bytes()))
}

fn list(engines: &Engines) -> Value {
    let members = engines.members();
    let now_ns = monotonic_ns();
    let all: Vec<Value> = members
        .iter()
        .flatten()
        .map(|of| entry(of, now_ns))
        .collect();
    let free = members.len() - all.len();
    json!({ "engines": all, "slots_free": free })
}

fn entry(engine: &Engine, now_ns: u64) -> Value {
    let seconds = |until_ns: u64| until_ns.saturating_sub(now_ns) as f64 / 1e9;
    let mut entry = engine.describe();
    let view = engine.cache_view.lock();
    let view = unpoisoned(view).clone();
    entry["cache"] = if view.is_empty() {
        "text of the prompts sent there".into()
    } else {
        view.into()
    };
    if let State::Ejected { until_ns } = engine.state() {
        entry["ejected_for_s"] = seconds(until_ns).into();
    }
    let until_ns = engine
        .drain_until_ns
        .load(std::sync::atomic::Ordering::Relaxed);
    if until_ns != 0 {
        entry["drains_for_s"] = seconds(until_ns).into();
    }
    entry
}
