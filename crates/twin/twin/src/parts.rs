//! Builds the parts of a cluster file: engines, their routers, and the network between.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::path::Path;
use std::sync::Arc;

use slipstream_base::mix::{draw, mix64, unit};
use slipstream_base::width::{round_u64, to_u16, to_u32};
use slipstream_base::{BlockHash, KvDelta, KvOp, RankId, Role, SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, PoolConfig};
use slipstream_engine::timing::{ApiTime, StepTime};
use slipstream_engine::{DecodeRun, Engine, KvChanges, OutputModel};
use slipstream_router::{CachedBlocks, Fleet, Hits, Router, ViewTurn};

use crate::collectives::{self, OverNetwork, StepTraffic, Templates};
use crate::effect::Effect;
use crate::node::Node;
use crate::pace::{Pace, ScaledStepTime};
use crate::peer_index::PeerIndex;
use crate::run::{Options, TwinError};

/// The nodes that a router chooses among, and the delay of their KV events.
pub(crate) struct RoutedNodes {
    pub(crate) fleet: Arc<Fleet>,
    /// The node of each target.
    pub(crate) nodes: Vec<u32>,
    /// Whether the router reads cache state.
    pub(crate) reads_cache: bool,
    /// Whether the router reads an index that KV deltas update, with a delay. Otherwise, a router that
    /// reads cache state queries the engines, whose published state is the same.
    pub(crate) indexes_kv: bool,
    /// If engines are queried: those that have the first block of a prompt.
    first_blocks: FirstBlockIndex,
    /// Model and roles of its targets.
    model: String,
    roles: Box<[Role]>,
    /// Cache changes that have not reached the router, by their arrival time.
    late: BTreeMap<(SimTime, u64), Late>,
    /// Faults of KV events by node; empty if no event of the cluster file has such an effect.
    kv_faults: Vec<KvFault>,
    /// Gaps that the router notices: when, and the node in which life.
    pub(crate) resyncs: Vec<(SimTime, u32, u32)>,
    seed: u64,
    pub(crate) lag_ns: u64,
    /// Whether changes reach the router with a delay.
    is_late: bool,
    /// Whether the router refreshes its view at intervals.
    views: bool,
    /// The time of its last refresh.
    looked: SimTime,
    sequence: u64,
    /// The index of workers that fetch from each other; it gets the same changes.
    pub(crate) peers: Option<Arc<PeerIndex>>,
}

/// The engines of a router, in the state at the end of their last passes.
pub(crate) struct Engines<'a> {
    nodes: &'a [Node],
    of_target: &'a [u32],
    first_blocks: &'a FirstBlockIndex,
}

impl CachedBlocks for Engines<'_> {
    fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        let node = self.of_target[target] as usize;
        self.nodes[node].engine.published_prefix(blocks)
    }

    fn overlap(&self, blocks: &[BlockHash], out: &mut Hits) {
        let Some(&first) = blocks.first() else {
            return;
        };
        self.first_blocks.owners(first, |target| {
            out.set(target, self.overlap_of(target, blocks));
        });
    }
}

/// Owners of first blocks of prompts: only these need to be queried for more blocks.
struct FirstBlockIndex {
    /// Words of 64 targets.
    words: usize,
    /// The owner of each cached first block; from `SHARED` on, the index into `owners` of one that had several.
    blocks: HashMap<BlockHash, u32, BuildHasherDefault<BlockHasher>>,
    owners: Vec<u64>,
    spare: Vec<u32>,
}

/// Hashes of blocks are mixed already, and no client chooses those of a simulation.
#[derive(Default)]
struct BlockHasher(u64);

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix64(self.0 ^ u64::from(byte));
        }
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// Prompts that no other begins like have one owner: a set of a thousand would be many times their entry's size.
const SHARED: u32 = 1 << 31;

impl FirstBlockIndex {
    fn new(targets: usize) -> FirstBlockIndex {
        FirstBlockIndex {
            words: targets.div_ceil(64),
            blocks: HashMap::default(),
            owners: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Calls `each` with the owners of `block`, by rank.
    fn owners(&self, block: BlockHash, mut each: impl FnMut(usize)) {
        let Some(&owner) = self.blocks.get(&block) else {
            return;
        };
        let Some(at) = owner.checked_sub(SHARED) else {
            return each(owner as usize);
        };
        let owners = &self.owners[at as usize * self.words..][..self.words];
        for (word, &owners) in (0..).zip(owners) {
            let mut owners = owners;
            while owners != 0 {
                each(word * 64 + owners.trailing_zeros() as usize);
                owners &= owners - 1;
            }
        }
    }

    /// `ops` contain first blocks only.
    fn on_kv(&mut self, target: usize, ops: &[KvOp]) {
        for op in ops {
            match *op {
                KvOp::Stored { hash, .. } => self.add(to_u32(target), hash),
                KvOp::Removed { hash } => self.remove(to_u32(target), hash),
                KvOp::Cleared => self.clear(target),
            }
        }
    }

    fn add(&mut self, target: u32, hash: BlockHash) {
        let owner = self.blocks.entry(hash).or_insert(target);
        if *owner == target {
            return;
        }
        if *owner < SHARED {
            let at = self.spare.pop().unwrap_or_else(|| {
                let at = self.owners.len() / self.words;
                self.owners.resize(self.owners.len() + self.words, 0);
                to_u32(at)
            });
            let first = *owner as usize;
            self.owners[at as usize * self.words + first / 64] |= 1 << (first % 64);
            *owner = SHARED + at;
        }
        let at = (*owner - SHARED) as usize;
        self.owners[at * self.words + target as usize / 64] |= 1 << (target % 64);
    }

    fn remove(&mut self, target: u32, hash: BlockHash) {
        let Some(&owner) = self.blocks.get(&hash) else {
            return;
        };
        let Some(at) = owner.checked_sub(SHARED) else {
            if owner == target {
                self.blocks.remove(&hash);
            }
            return;
        };
        let owners = &mut self.owners[at as usize * self.words..][..self.words];
        owners[target as usize / 64] &= !(1 << (target % 64));
        if owners.iter().all(|&word| word == 0) {
            self.blocks.remove(&hash);
            self.spare.push(at);
        }
    }

    /// `target` lost its cache.
    fn clear(&mut self, target: usize) {
        let held: Vec<BlockHash> = self.blocks.keys().copied().collect();
        for hash in held {
            self.remove(to_u32(target), hash);
        }
    }
}

struct Late {
    delta: KvDelta,
    node: u32,
    life: u32,
    /// Whether it replaces all that the router has of the rank.
    snapshot: bool,
}

/// Current faults of a node's KV events.
#[derive(Clone, Copy, Default)]
pub(crate) struct KvFault {
    /// Share that is lost; 1: nothing reaches the router.
    pub(crate) share: f64,
    /// Additional delay, ns.
    pub(crate) delay_ns: u64,
    /// Events arrive no earlier than this.
    pub(crate) not_before: SimTime,
    /// The node's life in which an event was lost, unless the router knows.
    missing: Option<u32>,
    /// Arrival of the last one: they stay in order.
    last: SimTime,
}

impl RoutedNodes {
    fn new(
        cluster: &Cluster,
        model: &str,
        roles: &[Role],
        options: &Options,
    ) -> Result<RoutedNodes, TwinError> {
        let config = &cluster.router;
        let reads_cache = Fleet::would_read_cache(config);
        // An engine's own cache is no copy that can be out of date.
        let faulty = cluster.events.iter().any(|e| Effect::hits_kv(e.fault));
        let is_late = config.kv_lag_ms > 0.0 || config.view_interval_ms > 0.0 || faulty;
        let indexes_kv = reads_cache && config.kv_events && (is_late || options.feed_index);
        let fleet = RoutedNodes::build_fleet(cluster, model, roles, indexes_kv)?;
        let first_blocks = FirstBlockIndex::new(fleet.targets().len());
        let kv_faults = if indexes_kv && faulty {
            let nodes = |pool: &PoolConfig| pool.workers * pool.engine.data_parallel_size;
            let nodes: u32 = cluster.pools.iter().map(nodes).sum();
            vec![KvFault::default(); nodes as usize]
        } else {
            Vec::new()
        };
        Ok(RoutedNodes {
            reads_cache,
            indexes_kv,
            fleet,
            model: model.to_owned(),
            roles: roles.into(),
            nodes: Vec::new(),
            first_blocks,
            late: BTreeMap::new(),
            kv_faults,
            resyncs: Vec::new(),
            seed: mix64(config.seed ^ 0x006b_765f_6c6f_7373),
            lag_ns: ns(cluster.router.kv_lag_ms * 1e6),
            views: cluster.router.view_interval_ms > 0.0,
            looked: SimTime::ZERO,
            is_late,
            sequence: 0,
            peers: None,
        })
    }

    fn build_fleet(
        cluster: &Cluster,
        model: &str,
        roles: &[Role],
        indexes_kv: bool,
    ) -> Result<Arc<Fleet>, TwinError> {
        let fleet = if indexes_kv || !cluster.router.kv_events {
            Fleet::of_model(cluster, model, roles)?
        } else {
            Fleet::of_model_unindexed(cluster, model, roles)?
        };
        Ok(Arc::new(fleet))
    }

    /// The only router of these nodes.
    pub(crate) fn router(&self) -> Router {
        let mut router = Router::new(self.fleet.clone(), 0);
        router.keep_order();
        router
    }

    /// Forgets loads, sessions and cached blocks: a new frontend. No worker is ready.
    pub(crate) fn restart(&mut self, cluster: &Cluster) {
        let fleet = RoutedNodes::build_fleet(cluster, &self.model, &self.roles, self.indexes_kv);
        self.fleet = fleet.expect("it was built before");
        self.fleet.promise_single_writer();
        self.late.clear();
        self.resyncs.clear();
        for fault in &mut self.kv_faults {
            fault.missing = None;
        }
    }

    /// Changes the faults of a node's KV events.
    pub(crate) fn set_kv_fault(&mut self, node: u32, change: impl FnOnce(&mut KvFault)) {
        if let Some(fault) = self.kv_faults.get_mut(node as usize) {
            change(fault);
        }
    }

    /// The rank of `node` publishes all that its cache holds.
    pub(crate) fn on_snapshot(&mut self, at: SimTime, node: u32, life: u32, snapshot: KvDelta) {
        let mut arrives = at + self.lag_ns;
        if let Some(fault) = self.kv_faults.get_mut(node as usize) {
            arrives = (arrives + fault.delay_ns).max(fault.last);
            (fault.last, fault.missing) = (arrives, None);
        }
        if !self.is_late {
            self.fleet.resync(&snapshot);
            return;
        }
        let late = Late {
            delta: snapshot,
            node,
            life,
            snapshot: true,
        };
        self.late.insert((arrives, self.sequence), late);
        self.sequence += 1;
    }

    /// The cache of `node` changed at `at`, and the index is not read before `at`.
    pub(crate) fn on_kv(&mut self, at: SimTime, node: u32, life: u32, delta: &KvDelta) {
        if delta.ops.is_empty() {
            return;
        }
        if let Some(peers) = &self.peers {
            peers.on_kv(at, node, delta);
        }
        if !self.indexes_kv {
            if let Some(target) = self.fleet.target_of(delta.rank) {
                self.first_blocks.on_kv(target, &delta.ops);
            }
            return;
        }
        if !self.is_late {
            self.fleet.on_kv(delta);
            return;
        }
        let mut arrives = at + self.lag_ns;
        if let Some(fault) = self.kv_faults.get_mut(node as usize) {
            let draw = draw(self.seed ^ u64::from(node) << 32, delta.sequence);
            if fault.share > 0.0 && unit(draw) < fault.share {
                fault.missing = Some(life);
                return;
            }
            arrives = (arrives + fault.delay_ns)
                .max(fault.not_before)
                .max(fault.last);
            fault.last = arrives;
            if fault.missing.take() == Some(life) {
                self.resyncs.push((arrives, node, life));
            }
        }
        let late = Late {
            delta: delta.clone(),
            node,
            life,
            snapshot: false,
        };
        self.late.insert((arrives, self.sequence), late);
        self.sequence += 1;
    }

    /// `node` ran decode passes. The index has not been read since the first of them ended.
    pub(crate) fn on_run(&mut self, index: u32, node: &Node, run: &DecodeRun, kv: &mut KvDelta) {
        if run.kv_ops.is_empty() {
            return;
        }
        // Numbers are those of single deltas, so the next one is in order.
        let mut sequence = run.kv_sequence;
        for (pass, &at) in run.ends.iter().enumerate() {
            let ops = run.kv_of(pass);
            if ops.is_empty() {
                continue;
            }
            (kv.rank, kv.sequence) = (node.rank, sequence);
            kv.ops.clear();
            kv.ops.extend_from_slice(ops);
            self.on_kv(at, index, node.life, kv);
            sequence += 1;
        }
    }

    /// Targets that may have `block`, the first one of a prompt, if its router queries engines.
    pub(crate) fn owners(&self, block: BlockHash, out: &mut Vec<usize>) {
        self.first_blocks.owners(block, |target| out.push(target));
    }

    /// Whether a choice by the view that `turn` names reads no KV event that came since the last one.
    pub(crate) fn keeps_view(&self, turn: ViewTurn) -> bool {
        self.is_late && self.views && turn == ViewTurn::Same
    }

    /// Whether its router queries engines for their caches instead of the index.
    pub(crate) fn asks_engines(&self) -> bool {
        !self.indexes_kv && self.reads_cache && self.fleet.config().kv_events
    }

    /// The caches of `nodes`, for a router that queries them.
    pub(crate) fn engines<'a>(&'a self, nodes: &'a [Node]) -> Engines<'a> {
        Engines {
            nodes,
            of_target: &self.nodes,
            first_blocks: &self.first_blocks,
        }
    }

    /// The node of a rank that this side's router chose.
    pub(crate) fn node_of(&self, rank: RankId) -> u32 {
        let target = self.fleet.target_of(rank);
        self.nodes[target.expect("the router chose one of its targets")]
    }

    /// The kind of cache changes that its engines list.
    fn lists(&self) -> KvChanges {
        match (
            self.indexes_kv,
            self.reads_cache && self.fleet.config().kv_events,
        ) {
            (true, _) => KvChanges::All,
            (false, true) => KvChanges::FirstBlocks,
            (false, false) => KvChanges::None,
        }
    }

    /// A worker was lost with its caches.
    pub(crate) fn on_worker_lost(&mut self, worker: WorkerId) {
        self.fleet.on_worker_lost(worker);
        for (target, config) in self.fleet.targets().iter().enumerate() {
            if config.rank.worker == worker {
                self.first_blocks.clear(target);
                if let Some(peers) = &self.peers {
                    peers.forget(self.nodes[target]);
                }
            }
        }
    }

    /// Prepares a choice at `now`, by the view that `turn` names: applies the KV events that have
    /// reached the router by then, or by its last refresh.
    pub(crate) fn refresh(&mut self, now: SimTime, turn: ViewTurn, nodes: &[Node]) {
        if !self.is_late {
            return;
        }
        if !self.views {
            return self.apply_before(now + 1, nodes);
        }
        match turn {
            ViewTurn::Same => {}
            ViewTurn::Next => {
                self.apply_before(self.looked, nodes);
                self.looked = now;
            }
            ViewTurn::Fresh => {
                self.apply_before(now, nodes);
                self.looked = now;
            }
        }
    }

    fn apply_before(&mut self, limit: SimTime, nodes: &[Node]) {
        while let Some(entry) = self.late.first_entry()
            && entry.key().0 < limit
        {
            let late = entry.remove();
            // Pending events of a lost worker are discarded.
            if nodes[late.node as usize].life != late.life {
                continue;
            }
            if late.snapshot {
                self.fleet.resync(&late.delta);
            } else {
                self.fleet.on_kv(&late.delta);
            }
        }
    }
}

/// The nodes of a model.
pub(crate) struct Sides {
    /// Take whole requests, and answers whose prompts were computed elsewhere.
    pub(crate) serve: RoutedNodes,
    /// Take prompts, if pools have that role.
    pub(crate) prefill: Option<RoutedNodes>,
}

impl Sides {
    fn new(cluster: &Cluster, model: &str, options: &Options) -> Result<Sides, TwinError> {
        let new = |roles: &[Role]| RoutedNodes::new(cluster, model, roles, options);
        let apart = cluster.pools_of(model).any(|p| p.role == Role::Prefill);
        Ok(Sides {
            serve: new(&[Role::Both, Role::Decode])?,
            prefill: if apart {
                Some(new(&[Role::Prefill])?)
            } else {
                None
            },
        })
    }
}

/// All state except requests and time.
pub(crate) struct Parts {
    /// By model.
    pub(crate) models: Vec<Sides>,
    pub(crate) nodes: Vec<Node>,
    /// By node, with its worker: what it and the network exchange, if its worker is on several hosts.
    pub(crate) traffic: Vec<(WorkerId, Option<Arc<StepTraffic>>)>,
}

impl Parts {
    pub(crate) fn new(
        cluster: &Cluster,
        options: &Options,
        delays_output: bool,
        read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Parts, TwinError> {
        let names = cluster.models();
        let sides = names
            .iter()
            .map(|model| Sides::new(cluster, &model.name, options));
        let mut models = sides.collect::<Result<Vec<Sides>, TwinError>>()?;
        // Passes whose tokens are still in transit may overlap with later ones.
        let each_token = options.each_token || delays_output;
        let classes = options.slo.classes.len();
        let mut nodes = Vec::new();
        // Engines of a pool are equal: their step times are built once.
        let mut built: Option<(&str, Box<dyn StepTime>)> = None;
        let templates = |pool| Templates::new(cluster, pool, options.speedup).map(Arc::new);
        let templates: Vec<Option<Arc<Templates>>> = cluster.pools.iter().map(templates).collect();
        let mut traffic = Vec::new();
        for (worker, pool) in cluster.workers() {
            let model = names.iter().position(|of| of.name == pool.model.name);
            let sides = &mut models[model.expect("a pool's model is one of the cluster's")];
            for dp_rank in 0..pool.engine.data_parallel_size {
                let rank = RankId {
                    worker,
                    dp_rank: to_u16(dp_rank),
                };
                let copy = built.as_ref().filter(|(of, _)| *of == pool.name);
                let copy = copy.and_then(|(_, timing)| timing.copy());
                let timing = if let Some(timing) = copy {
                    timing
                } else {
                    let timing = timing_of(pool, read)?;
                    built = timing.copy().map(|copy| (&*pool.name, copy));
                    timing
                };
                let at = cluster.pools.iter().position(|of| of.name == pool.name);
                let (timing, of_node) = match at.and_then(|at| templates[at].clone()) {
                    Some(templates) => over_network(timing, templates),
                    None => (timing, None),
                };
                traffic.push((worker, of_node));
                let (mut engine, pace) = engine(cluster, pool, rank, options, timing)?;
                let side = match (pool.role, &mut sides.prefill) {
                    (Role::Prefill, Some(side)) => side,
                    _ => &mut sides.serve,
                };
                engine.list_kv(side.lists());
                side.nodes.push(to_u32(nodes.len()));
                side.fleet.set_ready(worker, true);
                nodes.push(Node::new(
                    engine, rank, pool.role, pace, each_token, classes,
                ));
            }
        }
        Ok(Parts {
            models,
            nodes,
            traffic,
        })
    }
}

/// Step times of an engine on several hosts.
fn over_network(
    timing: Box<dyn StepTime>,
    templates: Arc<Templates>,
) -> (Box<dyn StepTime>, Option<Arc<StepTraffic>>) {
    let (timing, traffic) = OverNetwork::new(timing, templates);
    (Box::new(timing), Some(traffic))
}

fn timing_of(
    pool: &PoolConfig,
    read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> Result<Box<dyn StepTime>, TwinError> {
    let shape = &pool.model.shape;
    let timing = slipstream_engine::timing::build(&pool.engine, shape, |path| read(path));
    timing.map_err(|source| TwinError::Timing {
        pool: pool.name.clone(),
        source,
    })
}

/// Time from the arrival of a request for `model` at the servers until the router sees it: the longest of the
/// pools that take requests.
pub(crate) fn api_time(
    cluster: &Cluster,
    model: &str,
    options: &Options,
    read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
) -> Result<ApiTime, TwinError> {
    let mut longest = ApiTime::default();
    for pool in cluster.pools_of(model) {
        let shape = &pool.model.shape;
        let found = slipstream_engine::timing::api_time(&pool.engine, shape, |path| read(path));
        let found = found.map_err(|source| TwinError::Timing {
            pool: pool.name.clone(),
            source,
        })?;
        longest.request_ns = longest.request_ns.max(found.request_ns / options.speedup);
        longest.prompt_token_ns = longest
            .prompt_token_ns
            .max(found.prompt_token_ns / options.speedup);
    }
    Ok(longest)
}

fn engine(
    cluster: &Cluster,
    pool: &PoolConfig,
    rank: RankId,
    options: &Options,
    timing: Box<dyn StepTime>,
) -> Result<(Engine, Option<Arc<Pace>>), TwinError> {
    let slows = cluster
        .events
        .iter()
        .any(|e| e.workers.contains(&rank.worker.0) && Effect::of(e.fault).pace.is_some());
    let (timing, pace): (Box<dyn StepTime>, _) = if slows || options.speedup != 1.0 {
        let pace = Arc::new(Pace::new(1.0));
        let paced = ScaledStepTime {
            timing,
            speedup: options.speedup,
            pace: pace.clone(),
        };
        (Box::new(paced), Some(pace))
    } else {
        (timing, None)
    };
    // The text of answers is not needed: blocks are identified by names.
    let output = OutputModel {
        vocab: [0].into(),
        first_vocab: None,
        eos: 1,
        lengths: pool.engine.output_len.clone(),
    };
    let config = collectives::stages_on_hosts(cluster, pool);
    let engine =
        Engine::new(rank, &config, timing, output).map_err(|source| TwinError::Engine {
            pool: pool.name.clone(),
            source,
        })?;
    Ok((engine, pace))
}

pub(crate) fn ns(ns: f64) -> u64 {
    round_u64(ns)
}
