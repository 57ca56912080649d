//! The thread that checks engines' health, and lists their models.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::header::LOCATION;
use hyper::{Method, StatusCode};
use slipstream_base::EngineKind;
use slipstream_base::Role;
use slipstream_config::cluster::KvProtocol;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::catalog::{Model, parse_models};
use super::connection::Connection;
use super::disagg;
use super::engines::{Engine, Engines, State};
use super::failure::Failure;
use super::loops;
use super::outlier;
use crate::wire::{self, BodyDecoder, Decoded};

/// Limit of an answer to a question of this thread.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Health checks under way. They end when it is dropped.
pub struct HealthChecks {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the health checks of `engines`.
///
/// # Errors
/// The thread or its runtime cannot be made.
pub fn start(engines: Arc<Engines>) -> io::Result<HealthChecks> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (stop, stopped) = watch::channel(false);
    let run = move || {
        runtime.block_on(async move {
            let mut stopped = stopped;
            let mut changes = engines.subscribe();
            let mut tasks = tokio::task::JoinSet::new();
            tasks.spawn(outlier::watch(engines.clone()));
            let mut watched = BTreeMap::new();
            loop {
                let members = engines.each();
                let mut draining = false;
                watched.retain(|id, watching: &mut AbortHandle| {
                    let stays = members.iter().any(|of| of.id == *id);
                    if !stays {
                        watching.abort();
                    }
                    stays
                });
                for engine in members {
                    draining |= engine.is_draining();
                    watched.entry(engine.id).or_insert_with(|| {
                        tasks.spawn(watch_engine(engines.clone(), engine.clone()))
                    });
                }
                tokio::select! {
                    // An error: its other half was dropped.
                    _ = stopped.changed() => return,
                    _ = changes.changed() => {}
                    Some(_) = tasks.join_next() => {} // of an engine that was removed
                    () = tokio::time::sleep(DRAIN_LOOK), if draining => engines.finish_drains(),
                }
            }
        });
    };
    let thread = std::thread::Builder::new()
        .name("engine-health".into())
        .spawn(run)?;
    Ok(HealthChecks {
        stop,
        thread: Some(thread),
    })
}

impl Drop for HealthChecks {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of health checks ended by panic");
        }
    }
}

/// A lost engine is asked again after this at the earliest, however many requests fail there.
const CHECK_PAUSE: Duration = Duration::from_millis(100);

/// A draining engine is looked at in this interval.
const DRAIN_LOOK: Duration = Duration::from_millis(50);

async fn watch_engine(engines: Arc<Engines>, engine: Arc<Engine>) {
    let engine = &*engine;
    let settings = &engines.settings;
    let mut models_due = Instant::now();
    loop {
        let wants_models = engine.state() == State::Down || models_due <= Instant::now();
        let takes_keys = !engines.has_own_keys;
        let check = check(engine, wants_models, takes_keys, settings.connect_timeout);
        let limit = settings.health_timeout;
        let outcome = tokio::time::timeout(limit, check).await;
        let is_silent = outcome.is_err();
        match outcome.unwrap_or(Err(Failure::Health(format!("no answer within {limit:?}")))) {
            Ok(models) => {
                if models.is_some() {
                    models_due = Instant::now() + settings.models_interval;
                }
                engines.on_healthy(engine, models);
            }
            Err(failure) => engines.on_failure(engine, &failure, false),
        }
        tokio::time::sleep(CHECK_PAUSE.min(settings.health_interval)).await;
        if is_silent && engine.state() == State::Up {
            continue; // a hung engine is found sooner
        }
        let pause = settings.health_interval.saturating_sub(CHECK_PAUSE);
        // Whether a request failed or the time has come.
        let _ = tokio::time::timeout(pause, engine.check_now.notified()).await;
    }
}

/// Checks the health of `engine`, and with `wants_models` lists its models. `takes_keys`: clients' keys reach the engine.
async fn check(
    engine: &Engine,
    wants_models: bool,
    takes_keys: bool,
    connect_timeout: Duration,
) -> Result<Option<Vec<Model>>, Failure> {
    let kind = engine.kind();
    let mut by_models = kind == EngineKind::OpenAi;
    if !by_models {
        let (status, _) = ask(engine, "/health", connect_timeout).await?;
        match status {
            status if wants_key(status) => {
                return without_key(engine, "/health", status, takes_keys);
            }
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED
                if engine.spec.kind == EngineKind::Auto =>
            {
                by_models = true;
            }
            status if !status.is_success() => {
                return Err(Failure::Health(format!("/health answers {status}")));
            }
            _ => {}
        }
    }
    if engine.spec.role == Role::Prefill && engine.kv_protocol() == KvProtocol::Mooncake {
        engine.set_kv_ids(bootstrap_ids(engine, connect_timeout).await?);
    }
    if !by_models && !wants_models {
        return Ok(None);
    }
    let (status, body) = ask(engine, "/v1/models", connect_timeout).await?;
    if wants_key(status) {
        return without_key(engine, "/v1/models", status, takes_keys);
    }
    if !status.is_success() {
        return Err(Failure::Health(format!("/v1/models answers {status}")));
    }
    engine.set_hint(None);
    match parse_models(&body) {
        Some(models) if !models.is_empty() => Ok(Some(models)),
        Some(_) => Err(Failure::Health("/v1/models lists no model".into())),
        None => Err(Failure::Health("/v1/models is not OpenAI's list".into())),
    }
}

fn wants_key(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// Handles `status`, with which `engine` refuses `path` for want of a key. The engine is healthy, and takes requests if
/// clients' keys reach it.
///
/// # Errors
/// The engine would refuse every request.
fn without_key(
    engine: &Engine,
    path: &str,
    status: StatusCode,
    takes_keys: bool,
) -> Result<Option<Vec<Model>>, Failure> {
    let why = format!("{path} answers {status}");
    if engine.authorization.is_some() {
        return Err(Failure::Health(format!(
            "{why}: the engine refuses the key of `api_key_file`"
        )));
    }
    if !takes_keys {
        return Err(Failure::Health(format!(
            "{why}: the engine wants a key, and clients' keys stay here (`live.api_keys_file`); set `api_key_file` of its pool"
        )));
    }
    engine.set_hint(Some(format!(
        "{why}: the engine wants a key, so it gets those of clients, and its models are not known; \
         set `api_key_file` of its pool"
    )));
    Ok(None)
}

/// Ids of the data-parallel ranks of `engine`, as its bootstrap server lists them. Another run of the engine has
/// others.
async fn bootstrap_ids(engine: &Engine, connect_timeout: Duration) -> Result<Vec<String>, Failure> {
    let port = engine.spec.kv_protocol.1;
    let outcome = async {
        let connection = Connection::open_bootstrap(engine, connect_timeout).await?;
        let authority = disagg::bootstrap_authority(&engine.spec.url.host, port);
        let head = wire::write_head(
            &Method::GET,
            ["", "/query"],
            &authority,
            None,
            b"connection: close\r\n",
            0,
        );
        ask_on(connection, head, "/query").await
    };
    let fault = |why: String| Failure::Health(format!("its bootstrap server (port {port}): {why}"));
    let (status, body) = outcome.await.map_err(|failure| match failure {
        Failure::Health(why) => fault(why),
        other => fault(other.to_string()),
    })?;
    if !status.is_success() {
        return Err(fault(format!("/query answers {status}")));
    }
    disagg::bootstrap_ids(&body).map_err(fault)
}

/// `GET path`, on a connection of its own: a health check shows that the engine still accepts.
async fn ask(
    engine: &Engine,
    path: &str,
    connect_timeout: Duration,
) -> Result<(StatusCode, Bytes), Failure> {
    engine.counters.checks.fetch_add(1, Relaxed);
    let connection = Connection::open(engine, connect_timeout)
        .await
        .map_err(health)?;
    let head = wire::write_head(
        &Method::GET,
        [&engine.spec.url.prefix, path],
        &engine.authority,
        engine.authorization.as_deref(),
        &[b"connection: close\r\n", loops::line()].concat(),
        0,
    );
    ask_on(connection, head, path).await
}

fn health(failure: Failure) -> Failure {
    match failure {
        typed @ (Failure::Refused(_) | Failure::Tls { .. }) => typed,
        other => Failure::Health(other.to_string()),
    }
}

async fn ask_on(
    mut connection: Connection,
    head: BytesMut,
    path: &str,
) -> Result<(StatusCode, Bytes), Failure> {
    let none = [Bytes::new(), Bytes::new()];
    connection.send(head, &none).await.map_err(health)?;
    let head = connection.read_head(&Method::GET).await.map_err(health)?;
    let mut decoder = BodyDecoder::new(head.framing);
    let mut body = BytesMut::new();
    if head.status.is_redirection() {
        let to = head.headers.get(LOCATION);
        let to = to.map_or_else(String::new, |to| {
            format!(", to {}", String::from_utf8_lossy(to.as_bytes()))
        });
        return Err(Failure::Health(format!(
            "{path} is redirected ({}{to}); give the engine's own address",
            head.status
        )));
    }
    loop {
        match decoder.decode(&mut connection.buf) {
            Ok(Decoded::Data(data)) if body.len() + data.len() <= ANSWER_BYTES_MAX => {
                body.extend_from_slice(&data);
                continue;
            }
            Ok(Decoded::Data(_)) => {
                return Err(Failure::Health(format!("{path} answers too much")));
            }
            Ok(Decoded::End) if head.status == StatusCode::LOOP_DETECTED => {
                let text = "this address is the router itself, or an engine that forwards to it; remove it";
                return Err(Failure::Health(text.into()));
            }
            Ok(Decoded::End) => return Ok((head.status, body.freeze())),
            Ok(Decoded::NeedMore) => {}
            Err(error) => return Err(health(Failure::Protocol(error))),
        }
        match std::future::poll_fn(|cx| connection.poll_fill(cx)).await {
            Ok(0) if decoder.ends_at_close() => return Ok((head.status, body.freeze())),
            Ok(0) => return Err(Failure::Health(format!("{path} broke off"))),
            Ok(_) => {}
            Err(error) => return Err(Failure::Health(error.to_string())),
        }
    }
}
