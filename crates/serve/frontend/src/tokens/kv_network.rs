//! The network that the keys and values of prompts cross between workers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use slipstream_base::sync::lock;
use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_dispatch::Attempt;
use slipstream_flows::{Endpoint, Fabric, FabricConfig, Network, TransferId};
use slipstream_planes::clock::monotonic_ns;
use tokio::sync::Notify;

/// The network that keys and values cross, as the cluster file models it. All shards of a frontend
/// share it; each takes what arrives for its own requests.
pub struct KvNetwork {
    /// `None`: everything arrives at once.
    links: Option<Mutex<Links>>,
    frontend: Endpoint,
    /// By worker that computes them.
    kv_token_bytes: Vec<u64>,
}

struct Links {
    /// In wall-clock time.
    fabric: Fabric,
    /// Of transfers under way: the shard, and the request.
    carried: HashMap<TransferId, (u8, Arrival)>,
    /// By shard: arrived transfers that were not taken yet.
    arrived: Vec<Vec<Arrival>>,
    wakers: Vec<Option<Arc<Notify>>>,
    scratch: Vec<TransferId>,
    /// The latest time that the fabric has seen.
    now: SimTime,
}

/// The keys and values of a request, for one attempt at it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) id: u32,
    pub(crate) attempt: Attempt,
}

impl KvNetwork {
    /// The network of `cluster`, at its `live.speedup`, for `shards` shards.
    pub fn new(cluster: &Cluster, shards: usize) -> KvNetwork {
        let speedup = cluster.live.speedup;
        let config = (speedup > 0.0)
            .then(|| FabricConfig::of_cluster(cluster, speedup))
            .flatten();
        KvNetwork {
            links: config.map(|config| {
                Mutex::new(Links {
                    fabric: Fabric::new(config),
                    carried: HashMap::new(),
                    arrived: vec![Vec::new(); shards],
                    wakers: vec![None; shards],
                    scratch: Vec::new(),
                    now: SimTime::ZERO,
                })
            }),
            frontend: Endpoint::of_frontend(cluster),
            kv_token_bytes: cluster.kv_bytes_per_token(),
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Links>> {
        let links = self.links.as_ref()?;
        Some(lock(links))
    }

    /// `waker` is notified when something arrives for `shard`, or a rate has changed.
    pub(crate) fn on_change(&self, shard: u8, waker: Arc<Notify>) {
        if let Some(mut links) = self.lock() {
            links.wakers[usize::from(shard)] = Some(waker);
        }
    }

    /// Time that an empty message takes between two workers, by way of the frontend or not, ns.
    pub(crate) fn latency_ns(&self, from: WorkerId, to: WorkerId, by_frontend: bool) -> u64 {
        let Some(links) = self.lock() else {
            return 0;
        };
        let (from, to) = (Endpoint::of_worker(from), Endpoint::of_worker(to));
        if by_frontend {
            links.fabric.latency_ns(from, self.frontend)
                + links.fabric.latency_ns(self.frontend, to)
        } else {
            links.fabric.latency_ns(from, to)
        }
    }

    /// Bytes of the keys and values of `tokens`, computed by `from`.
    pub(crate) fn bytes(&self, from: WorkerId, tokens: u32) -> u64 {
        let token = self.kv_token_bytes.get(from.index());
        u64::from(tokens) * token.copied().unwrap_or_default()
    }

    /// Begins to send `bytes`; `None` if they arrive at once.
    pub(crate) fn send(
        &self,
        shard: u8,
        arrival: Arrival,
        from: WorkerId,
        to: WorkerId,
        bytes: u64,
    ) -> Option<TransferId> {
        let mut links = self.lock()?;
        let now = links.read_clock();
        let (from, to) = (Endpoint::of_worker(from), Endpoint::of_worker(to));
        let id = links.fabric.send(now, from, to, bytes);
        links.carried.insert(id, (shard, arrival));
        Some(id)
    }

    /// Forgets a transfer. Those that shared its links are faster from now on.
    pub(crate) fn cancel(&self, transfer: TransferId) {
        let Some(mut links) = self.lock() else {
            return;
        };
        let now = links.read_clock();
        if links.carried.remove(&transfer).is_some() {
            links.fabric.cancel(now, transfer);
            links.wake_all();
        }
    }

    /// Moves transfers that arrived for `shard` to the end of `out`. Returns the time of the next one, for
    /// any shard, if nothing changes before.
    pub(crate) fn take(&self, shard: u8, out: &mut Vec<Arrival>) -> Option<u64> {
        let mut guard = self.lock()?;
        let links = &mut *guard;
        let now = links.read_clock();
        let mut scratch = std::mem::take(&mut links.scratch);
        links.fabric.advance(now, &mut scratch);
        let mut others = false;
        for id in scratch.drain(..) {
            if let Some((of, arrival)) = links.carried.remove(&id) {
                links.arrived[usize::from(of)].push(arrival);
                others |= of != shard;
            }
        }
        links.scratch = scratch;
        if others {
            links.wake_all();
        }
        out.append(&mut links.arrived[usize::from(shard)]);
        if links.carried.is_empty() {
            return None;
        }
        links.fabric.next_time().map(|at| at.0)
    }
}

impl Links {
    /// Shards read the clock one after the other under the lock, so that time does not run back.
    fn read_clock(&mut self) -> SimTime {
        self.now = self.now.max(SimTime(monotonic_ns()));
        self.now
    }

    fn wake_all(&self) {
        for waker in self.wakers.iter().flatten() {
            waker.notify_one();
        }
    }
}
