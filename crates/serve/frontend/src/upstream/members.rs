//! Engines that come and go while the server runs.
//!
//! The fleet has a fixed number of workers. An engine takes a free one as its slot, and leaves it once it is
//! drained: when no request is at it, and none is on its way. Until then its slot is not another engine's, so the
//! loads and caches in the fleet are always those of one engine.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use slipstream_base::EngineKind;
use slipstream_base::sync::{lock, unpoisoned};
use slipstream_base::width::{nanos, to_u32};
use slipstream_base::{Role, WorkerId};
use slipstream_config::cluster::EngineUrl;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::tls::{ClientFiles, ClientTls};
use tokio::sync::watch;

use super::engines::{Engine, Engines};
use super::spec::{EngineSpec, PoolSpec};

/// Why an engine was not added or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// It is there already.
    #[error("`{url}` is in the fleet already, as {worker}")]
    Listed {
        /// Its address.
        url: String,
        /// Its slot.
        worker: WorkerId,
    },
    /// All slots are taken. A retry helps once an engine has left.
    #[error(
        "all {slots} slots for engines are taken; remove an engine, or restart with a larger \
         `upstream.engines_max`"
    )]
    Full {
        /// Number of slots.
        slots: usize,
    },
    /// The server started without pools of its role.
    #[error(
        "pool `{pool}` has the role \"prefill\", and the router started without such a pool; restart it"
    )]
    Role {
        /// The pool.
        pool: String,
    },
    /// There is no such pool.
    #[error("there is no pool `{pool}`; there is {known}")]
    Pool {
        /// The name.
        pool: String,
        /// Those that exist.
        known: String,
    },
    /// There are several pools.
    #[error("there are several pools; name one in `pool`: {known}")]
    WhichPool {
        /// Those that exist.
        known: String,
    },
    /// The engine needs TLS, which cannot be used.
    #[error("`{url}` needs TLS: {why}")]
    Tls {
        /// Its address.
        url: String,
        /// The fault.
        why: String,
    },
    /// No engine has this address or number.
    #[error("no engine is `{name}`; `GET /admin/engines` lists them")]
    Unknown {
        /// Address or number.
        name: String,
    },
}

/// An engine, for those who follow it.
#[derive(Clone)]
pub struct Member(Arc<Engine>);

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member({})", self.0.spec.url)
    }
}

impl Member {
    /// No other engine of this process has it, whatever its slot.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// As it is configured.
    pub fn spec(&self) -> &EngineSpec {
        &self.0.spec
    }

    /// Waits until it answers health checks again, after it was down. Each time ends one wait.
    pub async fn came_up(&self) {
        self.0.came_up.notified().await;
    }

    /// Says how its cache is known, in words, for those who list it.
    pub fn set_cache_view(&self, view: impl Into<String>) {
        let slot = self.0.cache_view.lock();
        *unpoisoned(slot) = view.into();
    }
}

impl Engines {
    /// Changes with each change of the members.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Acquire)
    }

    /// Signals changes of the members, also of those before the call.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        let mut changes = self.changes.subscribe();
        changes.mark_changed();
        changes
    }

    /// The engines, by worker.
    pub fn list(&self) -> Vec<Member> {
        self.each().into_iter().map(Member).collect()
    }

    /// Pools that engines may join from now on. Those in the fleet keep their pool's kind and key.
    pub fn set_pools(&self, pools: Vec<PoolSpec>) {
        let known = self.pools.write();
        *unpoisoned(known) = pools;
        self.note_traffic();
    }

    /// The pools have changed: whether some have shares is known without a look at them.
    pub(super) fn note_traffic(&self) {
        let pools = unpoisoned(self.pools.read());
        let weighted = pools.iter().any(|of| of.traffic.weight.is_some());
        let mirrors = pools.iter().any(|of| of.traffic.mirror.is_some());
        self.is_weighted.store(weighted, Relaxed);
        self.has_mirrors.store(mirrors, Relaxed);
    }

    /// Adds the engine at `url` to `pool`, which may be `None` if there is one. It takes requests once it
    /// answers health checks. A draining engine takes requests again.
    ///
    /// # Errors
    /// [`MemberError`].
    pub fn add(
        &self,
        url: &EngineUrl,
        pool: Option<&str>,
        kind: Option<EngineKind>,
        api_key: Option<String>,
    ) -> Result<WorkerId, MemberError> {
        let pool = self.pool(pool)?;
        let mut next_id = lock(&self.next_id);
        let members = self.members();
        if let Some(known) = members.iter().flatten().find(|of| of.spec.url == *url) {
            let worker = known.spec.worker;
            if !known.is_draining() {
                let url = url.to_string();
                return Err(MemberError::Listed { url, worker });
            }
            self.set_drain(known, 0);
            tracing::info!(engine = %url, "engine stays in the fleet");
            return Ok(worker);
        }
        let is_prefill = pool.role == Role::Prefill;
        let is_of_role =
            |slot: &usize| self.fleets.is_prefill(WorkerId(to_u32(*slot))) == is_prefill;
        let slots = (0..members.len()).filter(is_of_role).count();
        let mut free = (0..members.len()).filter(|&slot| members[slot].is_none());
        let slot = free.find(is_of_role).ok_or(if slots == 0 {
            MemberError::Role {
                pool: pool.name.clone(),
            }
        } else {
            MemberError::Full { slots }
        })?;
        let tls = match pool.tls {
            None if url.tls => {
                let tls = ClientTls::load(&ClientFiles::default());
                Some(tls.map_err(|error| MemberError::Tls {
                    url: url.to_string(),
                    why: error.to_string(),
                })?)
            }
            tls => tls,
        };
        let spec = EngineSpec {
            tls,
            worker: WorkerId(to_u32(slot)),
            pool: pool.name,
            url: url.clone(),
            kind: kind.unwrap_or(pool.kind),
            api_key: api_key.or(pool.api_key),
            role: pool.role,
            kv_protocol: pool.kv_protocol,
            traffic: pool.traffic,
        };
        let worker = spec.worker;
        let mut engine = Engine::new(spec, *next_id, &self.settings);
        if let Some(counters) = lock(&self.retired).revive(&engine.row()) {
            engine.counters = counters;
        }
        *next_id += 1;
        self.replace(slot, Some(Arc::new(engine)));
        self.added.fetch_add(1, Relaxed);
        tracing::info!(engine = %url, "engine added as {worker}");
        Ok(worker)
    }

    fn pool(&self, name: Option<&str>) -> Result<PoolSpec, MemberError> {
        let pools = unpoisoned(self.pools.read());
        let known = || {
            let names: Vec<String> = pools.iter().map(|of| format!("`{}`", of.name)).collect();
            names.join(", ")
        };
        match (name, &pools[..]) {
            (None, [pool]) => Ok(pool.clone()),
            (None, _) => Err(MemberError::WhichPool { known: known() }),
            (Some(name), _) => {
                let found = pools.iter().find(|of| of.name == name).cloned();
                found.ok_or_else(|| MemberError::Pool {
                    pool: name.to_owned(),
                    known: known(),
                })
            }
        }
    }

    /// The engine at `url` takes no new requests from now on, and leaves once its open ones have ended. Those
    /// that have not after `limit` (`None`: `upstream.drain_timeout_s`) continue on other engines.
    ///
    /// # Errors
    /// [`MemberError::Unknown`].
    pub fn drain(&self, url: &EngineUrl, limit: Option<Duration>) -> Result<(), MemberError> {
        let members = self.members();
        let found = members.iter().flatten().find(|of| of.spec.url == *url);
        let engine = found.ok_or_else(|| MemberError::Unknown {
            name: url.to_string(),
        })?;
        self.drain_engine(engine, limit);
        Ok(())
    }

    pub(super) fn drain_engine(&self, engine: &Engine, limit: Option<Duration>) {
        let limit = limit.unwrap_or(self.settings.drain_timeout);
        let until_ns = monotonic_ns().saturating_add(nanos(limit));
        let _one = lock(&self.next_id);
        self.set_drain(engine, until_ns.max(1));
        tracing::info!(engine = %engine.spec.url, "engine drains for up to {limit:?}");
        self.changes.send_modify(|changes| *changes += 1); // a task must see it out
    }

    /// Removes draining engines without requests.
    pub(super) fn finish_drains(&self) {
        let _one = lock(&self.next_id);
        let members = self.members();
        let mut loads = None;
        for engine in members.iter().flatten().filter(|of| of.is_draining()) {
            let worker = engine.spec.worker;
            let loads = loads.get_or_insert_with(|| {
                let each = self.fleets.each().flat_map(|fleet| fleet.loads());
                each.collect::<Vec<slipstream_router::Load>>()
            });
            // Those that were sent, and those that are on their way to it.
            let busy =
                |load: &slipstream_router::Load| load.rank.worker == worker && load.requests > 0;
            if engine.counters.in_flight.load(Relaxed) > 0 || loads.iter().any(busy) {
                continue;
            }
            self.release(engine);
            lock(&self.retired).retire(engine.row());
            self.replace(worker.index(), None);
            self.list_models();
            self.removed.fetch_add(1, Relaxed);
            tracing::info!(engine = %engine.spec.url, "engine removed");
        }
    }

    fn replace(&self, slot: usize, engine: Option<Arc<Engine>>) {
        let members = self.members.write();
        let mut members = unpoisoned(members);
        let mut list = members.to_vec();
        list[slot] = engine;
        *members = list.into();
        drop(members);
        self.generation.fetch_add(1, Release);
        self.changes.send_modify(|changes| *changes += 1);
    }
}

#[cfg(test)]
mod tests {
    use slipstream_config::cluster::UpstreamConfig;
    use slipstream_config::cluster::{BOOTSTRAP_PORT, KvProtocol, PoolTraffic};

    use super::super::engines::tests::{at, engines};
    use super::super::visit::Visit;
    use super::*;

    fn url(port: u16) -> EngineUrl {
        EngineUrl::parse(&format!("http://127.0.0.1:{port}")).unwrap()
    }

    #[test]
    fn an_engine_leaves_its_slot_when_its_requests_have_ended() {
        let engines = engines(2, &UpstreamConfig::default());
        let old = at(&engines, 1);
        assert_eq!(
            engines.add(&url(1001), None, None, None),
            Err(MemberError::Listed {
                url: "http://127.0.0.1:1001".into(),
                worker: WorkerId(1)
            })
        );
        assert_eq!(
            engines.add(&url(7), None, None, None),
            Err(MemberError::Full { slots: 2 })
        );
        let visit = Visit::begin(&engines, old.clone());
        engines.drain(&url(1001), None).unwrap();
        assert!(!engines.fleets.serve.is_ready(1) && engines.ready() == 1);
        engines.finish_drains();
        assert_eq!(engines.count(), 2, "a request is at it");
        // It is wanted again after all.
        assert_eq!(engines.add(&url(1001), None, None, None), Ok(WorkerId(1)));
        assert!(engines.fleets.serve.is_ready(1));
        engines.drain(&url(1001), Some(Duration::ZERO)).unwrap();
        assert!(old.is_cut(monotonic_ns()));
        drop(visit);
        engines.finish_drains();
        assert_eq!(engines.count(), 1);
        assert!(engines.drain(&url(1001), None).is_err());

        assert_eq!(
            engines.add(&url(7), Some("main"), None, None),
            Ok(WorkerId(1))
        );
        let new = at(&engines, 1);
        assert!(
            new.id != old.id && !engines.fleets.serve.is_ready(1),
            "not asked yet"
        );
        engines.on_healthy(&new, None);
        assert!(engines.fleets.serve.is_ready(1));
        // Late news of the engine that had the slot do not concern it.
        let refused = super::super::failure::Failure::Refused("refused".into());
        engines.on_failure(&old, &refused, false);
        assert!(engines.fleets.serve.is_ready(1));
    }

    #[test]
    fn counters_of_engines_that_left_never_go_back() {
        let engines = engines(1, &UpstreamConfig::default());
        let sum = || {
            let mut rows = lock(&engines.retired).rows();
            rows.extend(engines.each().iter().map(|of| of.row()));
            let urls: std::collections::BTreeSet<_> =
                rows.iter().map(|of| of.url.clone()).collect();
            assert_eq!(urls.len(), rows.len(), "an engine is listed once");
            let resumed = rows.iter().map(|of| of.counters.resumed.load(Relaxed));
            (resumed.sum::<u64>(), rows.len())
        };
        engines.drain(&url(1000), None).unwrap();
        engines.finish_drains();
        // Some come again, and many do not.
        for turn in 0..300_u16 {
            let port = if turn % 3 == 0 { 7 } else { 2000 + turn };
            engines.add(&url(port), None, None, None).unwrap();
            at(&engines, 0).counters.resumed.fetch_add(1, Relaxed);
            assert_eq!(sum().0, u64::from(turn) + 1);
            engines.drain(&url(port), None).unwrap();
            engines.finish_drains();
            assert_eq!(sum().0, u64::from(turn) + 1);
        }
        assert!(sum().1 <= 66, "{:?}", sum());
        engines.add(&url(7), None, None, None).unwrap();
        assert_eq!(at(&engines, 0).counters.resumed.load(Relaxed), 100);
    }

    #[test]
    fn a_pool_must_exist_and_be_named_among_several() {
        let engines = engines(1, &UpstreamConfig::default());
        let refused = |pool| {
            engines
                .add(&url(7), pool, None, None)
                .unwrap_err()
                .to_string()
        };
        assert!(refused(Some("other")).contains("there is `main`"));
        let spec = |name: &str| PoolSpec {
            name: name.into(),
            kind: EngineKind::Auto,
            api_key: None,
            role: Role::Both,
            kv_protocol: (KvProtocol::Auto, BOOTSTRAP_PORT),
            tls: None,
            traffic: PoolTraffic::default(),
        };
        engines.set_pools(vec![spec("a"), spec("b")]);
        assert!(refused(None).contains("`a`, `b`"));
    }
}
