//! State of the engines, shared by all shards.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use hyper::StatusCode;
use serde_json::json;
use slipstream_base::sync::{lock, unpoisoned};
use slipstream_base::width::nanos;
use slipstream_base::{EngineKind, Role, WorkerId};
use slipstream_config::cluster::{KvProtocol, OutlierConfig, RouterPolicy, UpstreamConfig};
use slipstream_planes::clock::monotonic_ns;
use slipstream_router::Fleets;
use tokio::sync::{Notify, watch};

use super::catalog::{Catalog, Model};
use super::counters::{Counters, TrafficCounts};
use super::failure::Failure;
use super::retired::{Retired, Row};
use super::settings::Settings;
use super::spec::{EngineSpec, PoolSpec};
use super::stored_answers::{StoredAnswers, StoringEngine};
use crate::door::service::ApiKeys;

/// Engines by worker; `None`: a free slot.
pub(super) type Members = Arc<[Option<Arc<Engine>>]>;

/// All engines of a server. Shared by its shards and the threads that check their health and follow their
/// caches. They come and go in slots, one per worker of the fleet.
pub struct Engines {
    /// By worker.
    pub(super) members: RwLock<Members>,
    /// Bumped after each change of `members`: shards renew their copy then.
    pub(super) generation: AtomicU64,
    /// The same, for those who wait for a change.
    pub(super) changes: watch::Sender<u64>,
    pub(super) pools: RwLock<Vec<PoolSpec>>,
    /// The next engine's [`Engine::id`]. Held while an engine is added or removed.
    pub(super) next_id: Mutex<u64>,
    pub(super) added: AtomicU64,
    pub(super) removed: AtomicU64,
    /// Counters of engines that left.
    pub(super) retired: Mutex<Retired>,
    pub(super) settings: Settings,
    pub(super) fleets: Fleets,
    catalog: RwLock<Arc<Catalog>>,
    /// The model that the router can tokenize for; `None`: it compares texts.
    pub(super) tokenized: Option<String>,
    /// It does: some engine's KV events are followed.
    pub(super) tokenizes: AtomicBool,
    /// Whether the router checks keys of its own: clients' keys are then not forwarded.
    pub(super) has_own_keys: bool,
    /// Key of the admin API; none: there is no such API.
    pub(super) admin_key: ApiKeys,
    /// Prompts that were tokenized, and others.
    pub(super) prompts: [AtomicU64; 2],
    /// Answers that engines store.
    pub(super) stored: StoredAnswers,
    /// Some pool has a weight; some pool gets copies.
    pub(super) is_weighted: AtomicBool,
    pub(super) has_mirrors: AtomicBool,
    pub(super) traffic_counts: TrafficCounts,
}

/// Whether an engine takes requests, and why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It has not answered a health check since it was last lost.
    Down,
    /// It takes requests.
    Up,
    /// It failed too often, and takes none until this time (`CLOCK_MONOTONIC`, ns).
    Ejected { until_ns: u64 },
    /// Its time is over: it takes one request.
    HalfOpen,
    /// That request is under way.
    Probing,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            State::Down => "down",
            State::Up => "up",
            State::Ejected { .. } => "ejected",
            State::HalfOpen => "half_open",
            State::Probing => "probing",
        }
    }
}

struct Health {
    state: State,
    /// Consecutive failures.
    failures: u32,
    /// Duration of the next ejection.
    ejection: Duration,
    /// The last failure, for messages, and its kind.
    last_failure: Option<(String, &'static str)>,
    /// Whether the engine was removed: its slot may then be another engine's.
    gone: bool,
}

/// An engine.
pub(crate) struct Engine {
    pub(super) spec: EngineSpec,
    /// No other engine of this process has it, whatever its slot.
    pub(super) id: u64,
    /// When its open requests end (`CLOCK_MONOTONIC`, ns), once it takes no more; 0: it takes some.
    pub(super) drain_until_ns: AtomicU64,
    /// Time at which health checks found the engine down (`CLOCK_MONOTONIC`, ns); 0: never.
    pub(super) hung_since_ns: AtomicU64,
    /// It answers again after it was down.
    pub(super) came_up: Notify,
    /// Advice to the engine's operator, although it takes requests.
    hint: Mutex<Option<String>>,
    /// How its cache is known, in words.
    pub(super) cache_view: Mutex<String>,
    /// Its address, for records.
    pub(super) name: Arc<str>,
    /// Value of `Host`.
    pub(super) authority: String,
    /// Value of `Authorization`.
    pub(super) authorization: Option<Vec<u8>>,
    /// As found by asking, if it is not configured.
    kind: AtomicU8,
    health: Mutex<Health>,
    /// `health` is other than up without failures: successes are of interest.
    suspect: AtomicBool,
    /// Asks for a health check at once.
    pub(super) check_now: Notify,
    models: Mutex<Arc<[Model]>>,
    /// Ids of its data-parallel ranks at its bootstrap server ([`KvProtocol::Mooncake`]).
    kv_ids: Mutex<Arc<[String]>>,
    pub(super) counters: Arc<Counters>,
}

impl Engine {
    pub(super) fn new(spec: EngineSpec, id: u64, settings: &Settings) -> Engine {
        Engine {
            id,
            drain_until_ns: AtomicU64::new(0),
            hung_since_ns: AtomicU64::new(0),
            came_up: Notify::new(),
            hint: Mutex::default(),
            cache_view: Mutex::default(),
            name: spec.url.to_string().into(),
            authority: spec.url.authority(),
            authorization: spec
                .api_key
                .as_ref()
                .map(|key| format!("Bearer {key}").into_bytes()),
            kind: AtomicU8::new(spec.kind.code()),
            spec,
            health: Mutex::new(Health {
                state: State::Down,
                failures: 0,
                ejection: settings.ejection,
                last_failure: None,
                gone: false,
            }),
            suspect: AtomicBool::new(true),
            check_now: Notify::new(),
            models: Mutex::new(Arc::new([])),
            kv_ids: Mutex::new(Arc::new([])),
            counters: Arc::default(),
        }
    }

    /// Its counters, for metrics.
    pub(super) fn row(&self) -> Row {
        Row {
            url: self.spec.url.to_string(),
            role: self.spec.role,
            is_mirror: self.is_mirror(),
            counters: self.counters.clone(),
        }
    }

    /// It as the holder of stored answers.
    pub(super) fn storing(&self) -> StoringEngine {
        StoringEngine {
            id: self.id,
            worker: self.spec.worker,
            url: self.name.clone(),
        }
    }

    pub(super) fn kind(&self) -> EngineKind {
        EngineKind::of_code(self.kind.load(Relaxed))
    }

    /// How the keys and values of prompts that it computes get to other engines.
    pub(super) fn kv_protocol(&self) -> KvProtocol {
        self.spec.kv_protocol.0.of_kind(self.kind())
    }

    /// It answers prompts of other engines only: SGLang's in decode mode.
    pub(super) fn needs_prefill(&self) -> bool {
        self.spec.role == Role::Decode && self.kind() == EngineKind::Sglang
    }

    /// Ids of its data-parallel ranks at its bootstrap server, in their order.
    pub(super) fn kv_ids(&self) -> Arc<[String]> {
        let ids = self.kv_ids.lock();
        unpoisoned(ids).clone()
    }

    pub(super) fn set_kv_ids(&self, ids: Vec<String>) {
        let mut known = lock(&self.kv_ids);
        if known[..] != ids[..] {
            *known = ids.into();
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        lock(&self.health)
    }

    pub(super) fn state(&self) -> State {
        self.health().state
    }

    /// Its state as a word.
    pub(super) fn state_name(&self) -> &'static str {
        if self.is_draining() {
            return "draining";
        }
        self.state().name()
    }

    /// Its entry in `GET /health`.
    pub(super) fn describe(&self) -> serde_json::Value {
        let models = self.models();
        let models: Vec<&str> = models.iter().map(|model| &*model.id).collect();
        let [first_byte_ms, between_ms] = self.counters.latencies_ms();
        json!({
            "worker": self.spec.worker.0,
            "url": self.spec.url.to_string(),
            "pool": self.spec.pool,
            "role": self.spec.role.name(),
            "kind": self.kind().name(),
            "state": self.state_name(),
            "in_flight": self.counters.in_flight.load(Relaxed),
            "first_byte_ms": first_byte_ms,
            "between_ms": between_ms,
            "models": models,
            "last_failure": self.last_failure(),
            "mirror": self.is_mirror(),
            "hint": *lock(&self.hint),
            "last_failure_cause": self.health().last_failure.as_ref().map(|of| of.1),
        })
    }

    pub(super) fn last_failure(&self) -> Option<String> {
        self.health().last_failure.as_ref().map(|of| of.0.clone())
    }

    /// Sets the advice to the engine's operator, and logs it if it is new.
    pub(super) fn set_hint(&self, hint: Option<String>) {
        let mut known = lock(&self.hint);
        if *known != hint {
            if let Some(hint) = &hint {
                tracing::warn!(engine = %self.spec.url, "{hint}");
            }
            *known = hint;
        }
    }

    /// It takes no new requests, since it is about to be removed.
    pub(super) fn is_draining(&self) -> bool {
        self.drain_until_ns.load(Relaxed) != 0
    }

    /// Its open requests must end.
    pub(super) fn is_cut(&self, now_ns: u64) -> bool {
        let until_ns = self.drain_until_ns.load(Relaxed);
        until_ns != 0 && until_ns <= now_ns
    }

    pub(super) fn takes_requests(&self) -> bool {
        matches!(self.state(), State::Up | State::HalfOpen) && !self.is_draining()
    }

    /// It gets copies of requests, and answers no client.
    pub(super) fn is_mirror(&self) -> bool {
        self.spec.traffic.mirror.is_some()
    }

    pub(super) fn models(&self) -> Arc<[Model]> {
        let models = self.models.lock();
        unpoisoned(models).clone()
    }
}

impl Engines {
    /// The engines `specs`, which have the first workers of `fleets`; the other workers are free for engines that
    /// come later. None takes requests yet.
    ///
    /// # Panics
    /// If the fleets have too few workers.
    pub fn new(specs: Vec<EngineSpec>, config: &UpstreamConfig, fleets: Fleets) -> Engines {
        let settings = Settings::new(config);
        let mut members = vec![None; fleets.workers()];
        let mut pools: Vec<PoolSpec> = Vec::new();
        let mut next_id = 0;
        for spec in specs {
            if pools.iter().all(|pool| pool.name != spec.pool) {
                pools.push(PoolSpec::of(&spec));
            }
            let slot = spec.worker.index();
            members[slot] = Some(Arc::new(Engine::new(spec, next_id, &settings)));
            next_id += 1;
        }
        let engines = Engines {
            members: RwLock::new(members.into()),
            generation: AtomicU64::new(0),
            changes: watch::Sender::new(0),
            pools: RwLock::new(pools),
            next_id: Mutex::new(next_id),
            added: AtomicU64::new(0),
            removed: AtomicU64::new(0),
            retired: Mutex::default(),
            settings,
            fleets,
            catalog: RwLock::default(),
            tokenized: None,
            tokenizes: AtomicBool::new(false),
            has_own_keys: false,
            admin_key: ApiKeys::default(),
            prompts: Default::default(),
            stored: StoredAnswers::default(),
            is_weighted: AtomicBool::new(false),
            has_mirrors: AtomicBool::new(false),
            traffic_counts: TrafficCounts::default(),
        };
        engines.note_traffic();
        engines
    }

    /// The same engines, in a router whose tokenizer is that of `model` and its LoRA adapters. Their prompts
    /// are hashed from `BlockHash::root(model, adapter, salt)` once [`set_tokenizes`](Self::set_tokenizes) says so.
    #[must_use]
    pub fn with_tokens(mut self, model: String) -> Engines {
        self.tokenized = Some(model);
        self
    }

    /// The same engines, in a router that checks keys of its own.
    #[must_use]
    pub fn with_own_keys(mut self) -> Engines {
        self.has_own_keys = true;
        self
    }

    /// The same engines, with `/admin/engines` behind `key`.
    #[must_use]
    pub fn with_admin_key(mut self, key: String) -> Engines {
        self.admin_key = ApiKeys::new([key]);
        self
    }

    /// Whether prompts are compared as tokens: the fleet gets some engine's KV events.
    pub fn set_tokenizes(&self, tokenizes: bool) {
        self.tokenizes.store(tokenizes, Relaxed);
    }

    /// The engines, by worker.
    pub(super) fn members(&self) -> Members {
        let members = self.members.read();
        unpoisoned(members).clone()
    }

    /// The engines.
    pub(super) fn each(&self) -> Vec<Arc<Engine>> {
        self.members().iter().flatten().cloned().collect()
    }

    pub(super) fn catalog(&self) -> Arc<Catalog> {
        let catalog = self.catalog.read();
        unpoisoned(catalog).clone()
    }

    /// Engines that take requests.
    pub fn ready(&self) -> usize {
        let members = self.members();
        let takes = |engine: &&Arc<Engine>| engine.takes_requests();
        members.iter().flatten().filter(takes).count()
    }

    /// Whether an engine takes requests that generates answers, with another one for its prompts if it needs one.
    pub(super) fn answers(&self) -> bool {
        let members = self.members();
        let ready = || members.iter().flatten().filter(|of| of.takes_requests());
        let prefills = || ready().any(|of| of.spec.role == Role::Prefill);
        let serves = |of: &Arc<Engine>| {
            of.spec.role != Role::Prefill && !of.is_mirror() && (!of.needs_prefill() || prefills())
        };
        ready().any(serves)
    }

    /// Whether some engines compute prompts for others.
    pub(super) fn disaggregates(&self) -> bool {
        self.fleets.prefill.is_some()
    }

    /// Whether some engines cannot answer a prompt that they would have to compute.
    pub(super) fn needs_prefill(&self) -> bool {
        self.members().iter().flatten().any(|of| of.needs_prefill())
    }

    /// Returns the workers of `only` that run vLLM.
    pub(super) fn of_vllm(&self, only: Option<&[WorkerId]>) -> Arc<[WorkerId]> {
        let members = self.members();
        let each = members.iter().flatten();
        let of_it = each.filter(|of| of.kind() == EngineKind::Vllm);
        let workers = of_it.map(|of| of.spec.worker);
        workers
            .filter(|worker| only.is_none_or(|only| only.contains(worker)))
            .collect()
    }

    /// Returns the workers of `only` except `worker`; `None` if there are none, or if clients must name their engine.
    pub(super) fn besides(
        &self,
        worker: WorkerId,
        only: Option<&[WorkerId]>,
    ) -> Option<Arc<[WorkerId]>> {
        let members = self.members();
        let each = members.iter().flatten().map(|of| of.spec.worker);
        let others: Arc<[WorkerId]> = each
            .filter(|of| *of != worker && only.is_none_or(|only| only.contains(of)))
            .collect();
        let names = self.fleets.serve.config().policy == RouterPolicy::Direct;
        (!names && !others.is_empty()).then_some(others)
    }

    /// Number of engines.
    pub fn count(&self) -> usize {
        self.members().iter().flatten().count()
    }

    /// Whether each engine has answered its first health check, or failed it.
    pub fn all_asked(&self) -> bool {
        let asked =
            |engine: &Arc<Engine>| engine.state() != State::Down || engine.last_failure().is_some();
        self.members().iter().flatten().all(asked)
    }

    /// The last failure of engines that are down, for messages at start.
    pub fn unreachable(&self) -> Vec<String> {
        let mut down = self.each();
        down.retain(|engine| engine.state() == State::Down);
        let said = down.iter().map(|engine| match engine.last_failure() {
            Some(why) => format!("{}: {why}", engine.spec.url),
            None => format!("{}: no answer yet", engine.spec.url),
        });
        said.collect()
    }

    fn set(&self, engine: &Engine, health: &mut Health, state: State) {
        if health.state != state {
            let (from, to) = (health.state.name(), state.name());
            let why = health.last_failure.as_ref();
            let why = why.map_or("", |(text, _)| text);
            match state {
                State::Down | State::Ejected { .. } => {
                    tracing::warn!(engine = %engine.spec.url, "engine {from} -> {to}: {why}");
                }
                _ => tracing::info!(engine = %engine.spec.url, "engine {from} -> {to}"),
            }
        }
        health.state = state;
        if state != State::Down {
            engine.hung_since_ns.store(0, Relaxed);
        }
        let takes = matches!(state, State::Up | State::HalfOpen) && !engine.is_draining();
        let takes = takes && !engine.is_mirror();
        if !health.gone {
            self.fleets.set_ready(engine.spec.worker, takes);
        }
        engine
            .suspect
            .store(state != State::Up || health.failures > 0, Relaxed);
    }

    /// A request is about to be sent to `engine`. True if it decides whether the engine takes more.
    pub(super) fn on_start(&self, engine: &Engine) -> bool {
        if !engine.suspect.load(Relaxed) {
            return false;
        }
        let mut health = engine.health();
        if health.state != State::HalfOpen {
            return false;
        }
        self.set(engine, &mut health, State::Probing);
        true
    }

    /// `engine` answered: a whole answer or a stream has ended well, or the first byte of a probe has arrived.
    pub(super) fn on_success(&self, engine: &Engine, is_probe: bool) {
        if !engine.suspect.load(Relaxed) {
            return;
        }
        let mut health = engine.health();
        match health.state {
            State::Up => {
                health.failures = 0;
                self.set(engine, &mut health, State::Up);
            }
            State::Probing if is_probe => {
                health.failures = 0;
                health.ejection = self.settings.ejection;
                self.set(engine, &mut health, State::Up);
            }
            // A request sent before the failure proves nothing about the engine now.
            _ => {}
        }
    }

    /// The request that probed `engine` ended without a verdict.
    pub(super) fn on_probe_dropped(&self, engine: &Engine) {
        let mut health = engine.health();
        if health.state == State::Probing {
            self.set(engine, &mut health, State::HalfOpen);
        }
    }

    /// A request or a health check has failed at `engine`.
    pub(super) fn on_failure(&self, engine: &Engine, failure: &Failure, is_probe: bool) {
        engine.counters.on_failure(failure);
        if matches!(failure, Failure::Removed | Failure::LongEvent) {
            return;
        }
        let mut health = engine.health();
        health.failures = health.failures.saturating_add(1);
        let text = failure.to_string();
        let (cause, is_new) = (failure.cause(), health.last_failure.as_ref());
        let is_new = is_new.is_none_or(|(_, known)| *known != cause);
        if health.state == State::Down && failure.is_tls() && is_new {
            // It never was up, so no change of its state is logged.
            tracing::warn!(engine = %engine.spec.url, cause, "no requests go to the engine: {text}");
        }
        health.last_failure = Some((text, cause));
        engine.suspect.store(true, Relaxed);
        match health.state {
            State::Down => {}
            _ if failure.is_refused() => {
                // No process listens: its cache is gone as well.
                self.set(engine, &mut health, State::Down);
                if !health.gone {
                    self.fleets.on_worker_lost(engine.spec.worker);
                }
            }
            // The same for every connection.
            _ if failure.is_tls() => self.set(engine, &mut health, State::Down),
            State::Probing if is_probe => self.eject(engine, &mut health),
            State::Up if health.failures >= self.settings.failures_max => {
                if failure.is_health() {
                    self.set(engine, &mut health, State::Down);
                    engine.hung_since_ns.store(monotonic_ns(), Relaxed);
                } else if self.ready_besides(engine) {
                    self.eject(engine, &mut health);
                } else {
                    engine.counters.ejections_suppressed.fetch_add(1, Relaxed);
                }
            }
            _ => {}
        }
    }

    fn eject(&self, engine: &Engine, health: &mut Health) {
        engine.counters.ejections.fetch_add(1, Relaxed);
        let until_ns = monotonic_ns() + nanos(health.ejection);
        health.ejection = (health.ejection * 2).min(self.settings.ejection_max);
        self.set(engine, health, State::Ejected { until_ns });
    }

    /// Settings of outlier detection, and the base and the maximum of the ejection time.
    pub(super) fn outlier_settings(&self) -> (OutlierConfig, Duration, Duration) {
        let settings = &self.settings;
        (settings.outlier, settings.ejection, settings.ejection_max)
    }

    /// Ejects `engine` for `duration`, because it is worse than its peers in the way that `why` states.
    pub(super) fn eject_outlier(&self, engine: &Engine, duration: Duration, why: String) {
        let mut health = engine.health();
        if health.state != State::Up || !self.ready_besides(engine) {
            return; // it failed, or they did
        }
        engine.counters.ejections.fetch_add(1, Relaxed);
        health.last_failure = Some((why, "outlier"));
        let until_ns = monotonic_ns() + nanos(duration);
        self.set(engine, &mut health, State::Ejected { until_ns });
    }

    /// Whether another engine takes requests: the last one is not ejected for its answers, since a request
    /// that makes every engine fail would then end the service. Without prefill engines it does not end.
    fn ready_besides(&self, engine: &Engine) -> bool {
        let fleet = &self.fleets.serve;
        fleet
            .targets()
            .iter()
            .enumerate()
            .any(|(at, target)| target.rank.worker != engine.spec.worker && fleet.is_ready(at))
    }

    /// A health check of `engine` succeeded; `models` were listed with it, if it was time to.
    pub(super) fn on_healthy(&self, engine: &Engine, models: Option<Vec<Model>>) {
        if let Some(models) = models {
            self.set_models(engine, models);
        }
        let mut health = engine.health();
        match health.state {
            State::Down => {
                health.failures = 0;
                health.ejection = self.settings.ejection;
                health.last_failure = None;
                self.set(engine, &mut health, State::Up);
                engine.came_up.notify_one();
            }
            State::Ejected { until_ns } if until_ns <= monotonic_ns() => {
                self.set(engine, &mut health, State::HalfOpen);
            }
            _ => {}
        }
    }

    fn set_models(&self, engine: &Engine, models: Vec<Model>) {
        if engine.spec.kind == EngineKind::Auto {
            let mut owners = models
                .iter()
                .map(|model| EngineKind::of_owner(&model.owner));
            // Slipstream is asked as any other server.
            let owner =
                owners.find_map(|owner| owner.filter(|kind| *kind != EngineKind::Slipstream));
            let kind = owner.unwrap_or(EngineKind::OpenAi);
            engine.kind.store(kind.code(), Relaxed);
        }
        {
            let mut known = lock(&engine.models);
            if **known == *models {
                return;
            }
            *known = models.into();
        }
        self.list_models();
    }

    /// Merges the models of all engines.
    pub(super) fn list_models(&self) {
        let members = self.members();
        let all = members.iter().flatten().filter(|of| !of.is_mirror());
        let catalog = Catalog::new(all.map(|of| (of.spec.worker, of.models())));
        let slot = self.catalog.write();
        *unpoisoned(slot) = Arc::new(catalog);
    }

    /// Begins or ends a drain of `engine`.
    pub(super) fn set_drain(&self, engine: &Engine, until_ns: u64) {
        let mut health = engine.health();
        engine.drain_until_ns.store(until_ns, Relaxed);
        let state = health.state;
        self.set(engine, &mut health, state);
    }

    /// `engine` leaves its slot: nothing that is learned of it concerns the fleet any more.
    pub(super) fn release(&self, engine: &Engine) {
        let mut health = engine.health();
        health.gone = true;
        self.fleets.on_worker_lost(engine.spec.worker);
    }

    /// Whether an answer of `status` speaks against its engine.
    pub(super) fn is_failure(status: StatusCode) -> bool {
        status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED
    }

    /// For `GET /health`.
    pub(super) fn describe(&self) -> String {
        let all: Vec<_> = self.each().iter().map(|of| of.describe()).collect();
        serde_json::Value::from(all).to_string()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use slipstream_base::RankId;
    use slipstream_config::cluster::{BOOTSTRAP_PORT, EngineUrl, PoolTraffic, RouterConfig};
    use slipstream_router::{Fleet, TargetConfig};

    use super::super::visit::Visit;
    use super::*;

    pub(crate) fn engines(count: u32, config: &UpstreamConfig) -> Arc<Engines> {
        let targets = (0..count).map(|worker| TargetConfig {
            rank: RankId {
                worker: WorkerId(worker),
                dp_rank: 0,
            },
            kv_blocks: 100,
            prefix_caching: true,
        });
        let fleet = Fleet::new(RouterConfig::default(), 16, targets.collect()).unwrap();
        let specs = (0..count).map(|worker| EngineSpec {
            worker: WorkerId(worker),
            pool: "main".into(),
            url: EngineUrl::parse(&format!("http://127.0.0.1:{}", 1000 + worker)).unwrap(),
            kind: EngineKind::Auto,
            api_key: None,
            role: Role::Both,
            kv_protocol: (KvProtocol::Auto, BOOTSTRAP_PORT),
            tls: None,
            traffic: PoolTraffic::default(),
        });
        let engines = Engines::new(specs.collect(), config, Fleets::from(fleet));
        for engine in engines.each() {
            engines.on_healthy(&engine, None);
        }
        Arc::new(engines)
    }

    pub(crate) fn at(engines: &Engines, slot: usize) -> Arc<Engine> {
        engines.members()[slot].clone().unwrap()
    }

    fn lost() -> Failure {
        Failure::Lost("reset".into())
    }

    #[test]
    fn failures_in_a_row_eject_and_one_request_probes() {
        let config = UpstreamConfig {
            failures_max: 2,
            ejection_s: 0.001,
            ..UpstreamConfig::default()
        };
        let engines = engines(2, &config);
        let engine = &at(&engines, 0);
        let fail = || Visit::begin(&engines, at(&engines, 0)).on_failure(&lost());
        fail();
        // A success in between: not in a row.
        Visit::begin(&engines, at(&engines, 0)).on_first_byte(StatusCode::OK, true);
        fail();
        assert_eq!(engine.state(), State::Up);
        fail();
        let State::Ejected { until_ns } = engine.state() else {
            panic!("{:?}", engine.state());
        };
        assert!(!engines.fleets.serve.is_ready(0) && engines.fleets.serve.is_ready(1));
        while monotonic_ns() < until_ns {
            std::hint::spin_loop();
        }
        engines.on_healthy(engine, None);
        assert_eq!(engine.state(), State::HalfOpen);
        assert!(engines.fleets.serve.is_ready(0));
        // The probe takes the place; its client leaves without a verdict, so the next one probes.
        drop(Visit::begin(&engines, at(&engines, 0)));
        assert_eq!(engine.state(), State::HalfOpen);
        let mut probe = Visit::begin(&engines, at(&engines, 0));
        assert!(!engines.fleets.serve.is_ready(0), "one request at a time");
        probe.on_first_byte(StatusCode::INTERNAL_SERVER_ERROR, true);
        assert!(matches!(engine.state(), State::Ejected { .. }));
        assert_eq!(engine.counters.ejections.load(Relaxed), 2);
        drop(probe);
        engine.health().state = State::HalfOpen;
        Visit::begin(&engines, at(&engines, 0)).on_first_byte(StatusCode::BAD_REQUEST, true);
        assert_eq!(engine.state(), State::Up, "a client's mistake is an answer");
        assert_eq!(engine.counters.in_flight.load(Relaxed), 0);
    }

    #[test]
    fn a_refused_connection_counts_at_once_and_a_last_engine_is_not_ejected() {
        let engines = engines(2, &UpstreamConfig::default());
        Visit::begin(&engines, at(&engines, 1)).on_failure(&Failure::Refused("refused".into()));
        assert_eq!(at(&engines, 1).state(), State::Down);
        for _ in 0..10 {
            Visit::begin(&engines, at(&engines, 0))
                .on_first_byte(StatusCode::INTERNAL_SERVER_ERROR, true);
        }
        assert_eq!(at(&engines, 0).state(), State::Up);
        assert!(at(&engines, 0).counters.ejections_suppressed.load(Relaxed) > 0);
        engines.on_healthy(&at(&engines, 1), None);
        assert_eq!(engines.ready(), 2);
        Visit::begin(&engines, at(&engines, 0)).on_failure(&lost());
        assert!(matches!(at(&engines, 0).state(), State::Ejected { .. }));
    }
}
