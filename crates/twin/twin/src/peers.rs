//! Blocks that workers fetch from each other (`[engine.peer_tier]`).
//!
//! An engine looks up the blocks of the other ranks of its pool, in an index that their events update, as late as a
//! router's (`router.kv_lag_ms`). After `latency_us` the other worker sends what it still has, from its GPU or its host
//! memory, over the network. The sequence computes the rest.

use std::sync::Arc;

use slipstream_base::KvDelta;
use slipstream_base::width::{to_u32, to_usize};
use slipstream_config::cluster::Cluster;
use slipstream_engine::{KvChanges, PeerLoad};
use slipstream_report::run::EngineCounts;

use crate::event::Event;
use crate::node::Node;
use crate::parts::ns;
use crate::peer_index::{LookUp, PeerIndex};
use crate::sim::Sim;

/// A load under way.
struct Fetch {
    node: u32,
    /// The node's number of losses at its beginning, and the peer's once it sends.
    life: u32,
    peer_life: u32,
    load: PeerLoad,
    /// Blocks that the peer sends.
    sent: u32,
}

/// Counts of a run.
#[derive(Default)]
pub(crate) struct PeerCounts {
    hit_tokens: u64,
    absent_tokens: u64,
    bytes: u64,
}

impl PeerCounts {
    pub(crate) fn report(&self, counts: &mut EngineCounts) {
        counts.peer_hit_tokens = Some(self.hit_tokens as f64);
        counts.peer_absent_tokens = Some(self.absent_tokens as f64);
        counts.peer_bytes = Some(self.bytes as f64);
    }
}

/// Loads of a run in which workers fetch from each other.
pub(crate) struct Peers {
    pub(crate) index: Arc<PeerIndex>,
    /// From a look-up until the peer sends, by node, ns.
    latency_ns: Vec<u64>,
    fetches: Vec<Option<Fetch>>,
    free: Vec<u32>,
    begun: Vec<PeerLoad>,
    pub(crate) counts: PeerCounts,
}

impl Peers {
    /// `None` if no pool has `[engine.peer_tier]`. Sets up the look-up of the engines that do.
    pub(crate) fn new(cluster: &Cluster, nodes: &mut [Node], speedup: f64) -> Option<Peers> {
        cluster.pools.iter().find_map(|p| p.engine.peer_tier)?;
        let blocks = nodes.iter().map(|node| node.engine.stats().total_blocks);
        let on_gpus: usize = blocks.map(|blocks| blocks as usize).sum();
        let pools = cluster.pools.iter();
        let in_host = pools.map(|pool| {
            let ranks = pool.workers * pool.engine.data_parallel_size;
            let tier = pool.engine.host_tier;
            to_usize(tier.map_or(0, |tier| tier.blocks)) * ranks as usize
        });
        let blocks = on_gpus + in_host.sum::<usize>();
        let lag_ns = ns(cluster.router.kv_lag_ms * 1e6);
        let index = Arc::new(PeerIndex::new(nodes, blocks, lag_ns));
        let mut latency_ns = vec![0; nodes.len()];
        let mut first = 0;
        for pool in &cluster.pools {
            let ranks = pool.workers * pool.engine.data_parallel_size;
            if let Some(tier) = pool.engine.peer_tier {
                for node in first..first + ranks {
                    latency_ns[node as usize] = ns(tier.latency_ns as f64 / speedup);
                    let engine = &mut nodes[node as usize].engine;
                    engine.list_kv(KvChanges::All);
                    engine.set_peers(Arc::new(LookUp {
                        index: index.clone(),
                        node,
                        pool: first..first + ranks,
                    }));
                }
            }
            first += ranks;
        }
        Some(Peers {
            index,
            latency_ns,
            fetches: Vec::new(),
            free: Vec::new(),
            begun: Vec::new(),
            counts: PeerCounts::default(),
        })
    }

    fn insert(&mut self, fetch: Fetch) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.fetches[slot as usize] = Some(fetch);
            return slot;
        }
        self.fetches.push(Some(fetch));
        to_u32(self.fetches.len()) - 1
    }

    fn remove(&mut self, slot: u32) -> Fetch {
        self.free.push(slot);
        let fetch = self.fetches[slot as usize].take();
        fetch.expect("a load ends once")
    }
}

impl Sim<'_> {
    /// Publishes the changes of the host memory of `node`, which ended a pass.
    pub(crate) fn publish_host(&mut self, node: u32) {
        let Some(peers) = &mut self.peers else {
            return;
        };
        let mut delta = KvDelta::default();
        let n = &mut self.nodes[node as usize];
        n.engine.take_host_changes(&mut delta.ops);
        if delta.ops.is_empty() {
            return;
        }
        delta.sequence = peers.index.next_of_host(node);
        peers.index.insert(self.now, node, &delta);
    }

    /// Plans the loads that a pass of `node` began.
    pub(crate) fn begin_peer_loads(&mut self, node: u32) {
        let Some(peers) = &mut self.peers else {
            return;
        };
        let life = self.nodes[node as usize].life;
        let engine = &mut self.nodes[node as usize].engine;
        engine.take_peer_loads(&mut peers.begun);
        let to = self.nodes[node as usize].rank.worker;
        for load in std::mem::take(&mut peers.begun) {
            let Some(peers) = &mut self.peers else {
                return;
            };
            // The decision, and the request to the other worker.
            let from = self.nodes[load.peer as usize].rank.worker;
            let asks_ns = peers.latency_ns[node as usize] + self.wire.latency_ns(to, from, false);
            let at = self.now + asks_ns;
            let fetch = peers.insert(Fetch {
                node,
                life,
                peer_life: 0,
                load,
                sent: 0,
            });
            self.plan_event(at, Event::PeerSend { fetch });
        }
    }

    /// A worker has the request for blocks of another one, and sends those that it still has.
    pub(crate) fn peer_sends(&mut self, slot: u32) {
        let Some(fetch) = self
            .peers
            .as_mut()
            .and_then(|p| p.fetches[slot as usize].as_mut())
        else {
            return;
        };
        let receiver = &self.nodes[fetch.node as usize];
        if receiver.life != fetch.life {
            self.peers.as_mut().map(|peers| peers.remove(slot));
            return;
        }
        let to = receiver.rank.worker;
        let peer = &mut self.nodes[fetch.load.peer as usize];
        let from = peer.rank.worker;
        fetch.peer_life = peer.life;
        if !self.faults.divides(Some(from), Some(to)) {
            fetch.sent = peer.engine.sends(&fetch.load.blocks, fetch.load.have);
        }
        let sent = fetch.sent;
        let received = Event::PeerReceived { fetch: slot };
        let tokens = sent * self.serve.fleet.block_size();
        let on_the_way = if sent > 0 {
            let (bytes, transfer) = self.wire.send_kv(self.now, from, to, tokens, received);
            if let Some(peers) = &mut self.peers {
                peers.counts.bytes += bytes;
            }
            transfer.is_some()
        } else {
            false
        };
        if !on_the_way {
            self.plan_event(self.now, received);
        }
    }

    /// The blocks of a load have come, or none will.
    pub(crate) fn peer_received(&mut self, slot: u32) {
        let Some(peers) = &mut self.peers else {
            return;
        };
        let not_before = peers.fetches[slot as usize]
            .as_ref()
            .map(|fetch| fetch.load.not_before);
        if let Some(at) = not_before.filter(|&at| at > self.now) {
            // Its own blocks are still being loaded.
            return self.plan_event(at, Event::PeerReceived { fetch: slot });
        }
        let fetch = peers.remove(slot);
        if self.nodes[fetch.node as usize].life != fetch.life {
            return;
        }
        // A worker that was lost sends no more.
        let whole = self.nodes[fetch.load.peer as usize].life == fetch.peer_life;
        let blocks = if whole { fetch.sent } else { 0 };
        let wanted = to_u32(fetch.load.blocks.len()) - fetch.load.have;
        let size = u64::from(self.serve.fleet.block_size());
        let engine = &mut self.nodes[fetch.node as usize].engine;
        if engine.receive_from_peer(fetch.load.load, blocks) {
            peers.counts.hit_tokens += u64::from(blocks) * size;
            peers.counts.absent_tokens += u64::from(wanted - blocks) * size;
            self.wake(fetch.node);
        }
    }
}
