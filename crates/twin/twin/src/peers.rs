//! Blocks that workers fetch from each other (`[engine.peer_tier]`).
//!
//! An engine looks up the blocks of the other ranks of its pool, in an index that their events update, as late as a
//! router's (`router.kv_lag_ms`). After `latency_us` the other worker sends what it still has, from its GPU or its host
//! memory, over the network. The sequence computes the rest.

use std::sync::Arc;

use slipstream_base::width::{to_u32, to_usize};
use slipstream_base::{KvDelta, SimTime};
use slipstream_config::cluster::Cluster;
use slipstream_engine::{KvChanges, PeerLoad};
use slipstream_report::run::EngineCounts;

use crate::agenda::Agenda;
use crate::event::Event;
use crate::faults::Partitions;
use crate::node::{Node, Nodes};
use crate::parts::ns;
use crate::peer_index::{PeerIndex, RankLookup};
use crate::wire::Wire;

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
                    engine.set_peers(Arc::new(RankLookup {
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

    /// Publishes the changes of the host memory of `node`, which ended a pass.
    pub(crate) fn publish_host(&mut self, now: SimTime, node: u32, n: &mut Node) {
        let mut delta = KvDelta::default();
        n.engine.take_host_changes(&mut delta.ops);
        if delta.ops.is_empty() {
            return;
        }
        delta.sequence = self.index.next_of_host(node);
        self.index.insert(now, node, &delta);
    }

    /// Plans the loads that a pass of `node` began.
    pub(crate) fn begin_loads(
        &mut self,
        node: u32,
        nodes: &mut Nodes,
        wire: &Wire,
        agenda: &mut Agenda,
    ) {
        let n = &mut nodes[node];
        let (life, to) = (n.life, n.rank.worker);
        n.engine.take_peer_loads(&mut self.begun);
        for load in std::mem::take(&mut self.begun) {
            // The decision, and the request to the other worker.
            let from = nodes[load.peer].rank.worker;
            let asks_ns = self.latency_ns[node as usize] + wire.latency_ns(to, from, false);
            let at = agenda.now + asks_ns;
            let fetch = self.insert(Fetch {
                node,
                life,
                peer_life: 0,
                load,
                sent: 0,
            });
            agenda.plan(at, Event::PeerSend { fetch });
        }
    }

    /// A worker has the request for blocks of another one, and sends those that it still has.
    pub(crate) fn send(
        &mut self,
        slot: u32,
        nodes: &mut Nodes,
        (wire, partitions): (&mut Wire, &Partitions),
        block_size: u32,
        agenda: &mut Agenda,
    ) {
        let Some(fetch) = &mut self.fetches[slot as usize] else {
            return;
        };
        let receiver = &nodes[fetch.node];
        if receiver.life != fetch.life {
            self.remove(slot);
            return;
        }
        let to = receiver.rank.worker;
        let peer = &mut nodes[fetch.load.peer];
        let from = peer.rank.worker;
        fetch.peer_life = peer.life;
        if !partitions.divide(Some(from), Some(to)) {
            fetch.sent = peer.engine.sends(&fetch.load.blocks, fetch.load.have);
        }
        let sent = fetch.sent;
        let received = Event::PeerReceived { fetch: slot };
        let on_the_way = if sent > 0 {
            let (bytes, transfer) = wire.send_kv(agenda.now, from, to, sent * block_size, received);
            self.counts.bytes += bytes;
            transfer.is_some()
        } else {
            false
        };
        if !on_the_way {
            agenda.plan(agenda.now, received);
        }
    }

    /// The blocks of a load have come, or none will. Returns the node that may have work now.
    pub(crate) fn receive(
        &mut self,
        slot: u32,
        nodes: &mut Nodes,
        block_size: u32,
        agenda: &mut Agenda,
    ) -> Option<u32> {
        let not_before = self.fetches[slot as usize]
            .as_ref()
            .map(|fetch| fetch.load.not_before);
        if let Some(at) = not_before.filter(|&at| at > agenda.now) {
            // Its own blocks are still being loaded.
            agenda.plan(at, Event::PeerReceived { fetch: slot });
            return None;
        }
        let fetch = self.remove(slot);
        if nodes[fetch.node].life != fetch.life {
            return None;
        }
        // A worker that was lost sends no more.
        let is_complete = nodes[fetch.load.peer].life == fetch.peer_life;
        let blocks = if is_complete { fetch.sent } else { 0 };
        let wanted = to_u32(fetch.load.blocks.len()) - fetch.load.have;
        let size = u64::from(block_size);
        let engine = &mut nodes[fetch.node].engine;
        if !engine.receive_from_peer(fetch.load.load, blocks) {
            return None;
        }
        self.counts.hit_tokens += u64::from(blocks) * size;
        self.counts.absent_tokens += u64::from(wanted - blocks) * size;
        Some(fetch.node)
    }
}
