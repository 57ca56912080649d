//! State that routers share: the load, readiness and cached blocks of every target.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use slipstream_base::sync::lock;
use slipstream_base::width::{to_u16, to_u32};
use slipstream_base::{BlockHash, KvDelta, Prompt, RankId, Role, SimTime, Tail, WorkerId};
use slipstream_config::cluster::{Cluster, PoolConfig, RouterConfig};
use slipstream_kvindex::{Applied, ApproximateIndex, BlockIndex};

use crate::active::ActiveBlocks;
use crate::policy;
use crate::session::SessionTable;
use crate::witness::{Answered, Testimony};

/// One rank that requests can go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetConfig {
    /// The rank.
    pub rank: RankId,
    /// Blocks of its KV cache (`engine.num_gpu_blocks`).
    pub kv_blocks: u32,
    /// Whether it reuses blocks (`engine.enable_prefix_caching`).
    pub prefix_caching: bool,
}

/// Why a fleet could not be built. An error in the configuration; a retry does not help.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FleetError {
    /// There are no targets.
    #[error(
        "no rank takes prompts; add a [pool.NAME] with role \"both\" or \"prefill\" and workers >= 1"
    )]
    Empty,
    /// Prompts are hashed once, in blocks of one size, so all pools need the same.
    #[error(
        "pool `{pool}` has block_size {block_size}, but pool `{other_pool}` has {other}; \
         one router serves one block size: set `engine.block_size` for all pools"
    )]
    BlockSize {
        /// The pool that disagrees.
        pool: String,
        /// Its block size, tokens.
        block_size: u32,
        /// The first pool.
        other_pool: String,
        /// Its block size, tokens.
        other: u32,
    },
    /// A rank was listed twice, or the list is not sorted.
    #[error(
        "{rank} is listed twice or out of order; list ranks by worker, then dp_rank, each once"
    )]
    Order {
        /// The second of the two.
        rank: RankId,
    },
}

/// Load of one target, written by every router. It has a cache line of its own, so that charging
/// one target does not slow reads of its neighbor.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct LoadLine {
    /// Sequences that were routed to the target and have not ended.
    pub(crate) requests: AtomicU64,
    /// Prompt tokens still to compute, after reuse, of sequences without a first token.
    pub(crate) prefill_tokens: AtomicU64,
    /// Prompt tokens of sequences that decode.
    pub(crate) decode_tokens: AtomicU64,
    /// Distinct blocks of live prompts.
    pub(crate) active_blocks: AtomicU64,
    /// Prefill tokens discharged since the start; the rate gives the `Retry-After` estimate.
    pub(crate) prefill_tokens_done: AtomicU64,
    /// Active blocks released since the start; also for `Retry-After`.
    pub(crate) blocks_freed: AtomicU64,
    /// Sequences routed to the target since the start.
    pub(crate) routed: AtomicU64,
}

/// The load of one target at one time, for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The rank.
    pub rank: RankId,
    /// Whether it takes requests.
    pub ready: bool,
    /// Whether the index has all of its blocks; `false` from a gap to the next snapshot.
    pub trusted: bool,
    /// Sequences routed to the target that have not ended.
    pub requests: u64,
    /// Prompt tokens still to compute, after reuse.
    pub prefill_tokens: u64,
    /// Prompt tokens of sequences that decode.
    pub decode_tokens: u64,
    /// Distinct blocks of live prompts.
    pub active_blocks: u64,
    /// Blocks of its KV cache.
    pub kv_blocks: u32,
    /// Blocks that the index counts as cached there.
    pub cached_blocks: u64,
    /// Sequences routed to the target since the start.
    pub routed_total: u64,
}

/// Counters of the fleet since its start, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Deltas skipped because an earlier one was missing and no snapshot had arrived.
    pub kv_gaps_total: u64,
    /// Duplicate deltas.
    pub kv_duplicates_total: u64,
    /// Deltas of a rank that is no target here.
    pub kv_strangers_total: u64,
    /// Blocks that exceeded the index's capacity.
    pub kv_dropped_blocks_total: u64,
    /// Requests refused because every ready target was busy.
    pub busy_total: u64,
    /// Requests sent to their session's target.
    pub affinity_hits_total: u64,
    /// Sessions evicted before their expiry because the table was full.
    pub sessions_dropped_total: u64,
}

/// Counters that every decision may write, on cache lines of their own: decisions read the rest of
/// a fleet and hardly ever write it.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CounterCells {
    /// Position of the round robin.
    pub(crate) turns: AtomicU64,
    pub(crate) kv_gaps: AtomicU64,
    pub(crate) kv_duplicates: AtomicU64,
    pub(crate) kv_strangers: AtomicU64,
    pub(crate) kv_dropped_blocks: AtomicU64,
    pub(crate) busy: AtomicU64,
    pub(crate) affinity_hits: AtomicU64,
}

/// Source of the fleet's view of caches.
enum Cached {
    Exact(BlockIndex),
    Approximate(ApproximateIndex),
    /// Not in the fleet: callers pass [`CachedBlocks`], or route without cache state.
    Elsewhere,
}

/// Cached blocks of targets, queried at their source: for a driver that owns the engines, and need
/// not publish every change to a fleet.
pub trait CachedBlocks {
    /// Number of leading `blocks` that a target has cached.
    fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32;

    /// [`CachedBlocks`] of every target, written to `out`, which has no hits.
    fn overlap(&self, blocks: &[BlockHash], out: &mut Hits) {
        for target in 0..out.of_target.len() {
            out.set(target, self.overlap_of(target, blocks));
        }
    }
}

/// Leading blocks of a prompt that each target has cached.
#[derive(Debug)]
pub struct Hits {
    of_target: Box<[u32]>,
    /// Targets with hits, in any order; those of [`Hits::dense`] only after [`Hits::list`].
    found: Vec<u32>,
    /// `of_target` was written as a whole.
    dense: bool,
}

impl Hits {
    pub(crate) fn new(targets: usize) -> Hits {
        Hits {
            of_target: vec![0; targets].into(),
            found: Vec::new(),
            dense: false,
        }
    }

    /// Sets the hits of a target that has none yet.
    pub fn set(&mut self, target: usize, hits: u32) {
        if hits > 0 {
            self.of_target[target] = hits;
            self.found.push(to_u32(target));
        }
    }

    pub(crate) fn of(&self, target: usize) -> u32 {
        self.of_target[target]
    }

    pub(crate) fn found(&self) -> &[u32] {
        &self.found
    }

    /// Removes all hits. Costs the targets that have some.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.dense) {
            self.of_target.fill(0);
        }
        for target in self.found.drain(..) {
            self.of_target[target as usize] = 0;
        }
    }

    /// The hits by target, all of which the caller writes.
    pub(crate) fn dense(&mut self) -> &mut [u32] {
        self.dense = true;
        &mut self.of_target
    }

    /// Lists the targets that have hits, after they were written as a whole.
    pub(crate) fn list(&mut self) {
        let with_hits = (0..).zip(&self.of_target).filter(|&(_, &hits)| hits > 0);
        self.found.clear();
        self.found.extend(with_hits.map(|(target, _)| target));
    }
}

/// The targets of one model, as all routers see them. Shared by `Arc`.
///
/// Targets are dense indexes in the order of `RankId`. Workers start not ready.
#[repr(align(128))] // keeps the `Arc`'s counts, which every request changes, off the lines below
pub struct Fleet {
    config: RouterConfig,
    block_size: u32,
    targets: Box<[TargetConfig]>,
    /// Targets of each worker; empty for a worker that takes no prompts.
    workers: Box<[Range<u32>]>,
    pub(crate) loads: Box<[LoadLine]>,
    pub(crate) active: Box<[Mutex<ActiveBlocks>]>,
    /// One bit per target.
    ready: Box<[AtomicU64]>,
    /// Bumped after each change of `ready`, so that a router rebuilds its list only then.
    ready_generation: AtomicU64,
    /// One bit per target whose load changed, while a router keeps an order of loads.
    changed: Box<[AtomicU64]>,
    keeps_order: AtomicBool,
    cached: Cached,
    /// Routed prompts whose tokens are not known.
    guesses: Option<ApproximateIndex>,
    /// One bit per target: no events tell what it holds, so for prompts of known tokens, too, it is guessed.
    guessed: Box<[AtomicU64]>,
    /// Per target, if the fleet has guesses.
    answered: Box<[Mutex<Answered>]>,
    pub(crate) sessions: Option<SessionTable>,
    pub(crate) counters: CounterCells,
}

impl Fleet {
    /// The ranks of `cluster` that take prompts: those of pools with role both or prefill. Workers
    /// are numbered over all pools in file order.
    ///
    /// # Errors
    /// [`FleetError`] if there are none, or the pools' block sizes differ.
    pub fn from_cluster(cluster: &Cluster) -> Result<Fleet, FleetError> {
        Fleet::of_roles(cluster, &[Role::Both, Role::Prefill])
    }

    /// The ranks of `cluster` in pools with one of `roles`, as workers are numbered over all pools.
    ///
    /// # Errors
    /// As [`from_cluster`](Self::from_cluster).
    pub fn of_roles(cluster: &Cluster, roles: &[Role]) -> Result<Fleet, FleetError> {
        let cached = Fleet::index(&cluster.router);
        Fleet::of_pools(cluster, |pool| roles.contains(&pool.role), cached)
    }

    /// [`of_roles`](Self::of_roles) of the pools that serve `model`.
    ///
    /// # Errors
    /// As [`of_roles`](Self::of_roles).
    pub fn of_model(cluster: &Cluster, model: &str, roles: &[Role]) -> Result<Fleet, FleetError> {
        let takes = |pool: &PoolConfig| roles.contains(&pool.role) && pool.model.name == model;
        Fleet::of_pools(cluster, takes, Fleet::index(&cluster.router))
    }

    /// [`of_model`](Self::of_model) without a block index, for a driver whose routers use
    /// [`CachedBlocks`] or read no cache state. Deltas are ignored.
    ///
    /// # Errors
    /// As [`of_roles`](Self::of_roles).
    pub fn of_model_unindexed(
        cluster: &Cluster,
        model: &str,
        roles: &[Role],
    ) -> Result<Fleet, FleetError> {
        let takes = |pool: &PoolConfig| roles.contains(&pool.role) && pool.model.name == model;
        Fleet::of_pools(cluster, takes, |_| Cached::Elsewhere)
    }

    fn of_pools(
        cluster: &Cluster,
        takes: impl Fn(&PoolConfig) -> bool,
        cached: impl FnOnce(&[TargetConfig]) -> Cached,
    ) -> Result<Fleet, FleetError> {
        let mut targets = Vec::new();
        let mut first: Option<(&str, u32)> = None;
        let mut worker = 0;
        for pool in &cluster.pools {
            let block_size = pool.engine.block_size;
            let (other_pool, other) = *first.get_or_insert((&pool.name, block_size));
            if block_size != other {
                return Err(FleetError::BlockSize {
                    pool: pool.name.clone(),
                    block_size,
                    other_pool: other_pool.into(),
                    other,
                });
            }
            for id in worker..worker + pool.workers {
                if !takes(pool) {
                    continue;
                }
                for dp_rank in 0..pool.engine.data_parallel_size {
                    targets.push(TargetConfig {
                        rank: RankId {
                            worker: WorkerId(id),
                            dp_rank: to_u16(dp_rank),
                        },
                        kv_blocks: pool.engine.num_gpu_blocks,
                        prefix_caching: pool.engine.enable_prefix_caching,
                    });
                }
            }
            worker += pool.workers;
        }
        let block_size = first.map_or(1, |(_, block_size)| block_size);
        Fleet::with(cluster.router.clone(), block_size, targets, cached)
    }

    /// A fleet of `targets`, sorted by rank, whose prompts come in blocks of `block_size` tokens.
    ///
    /// # Errors
    /// [`FleetError::Empty`], [`FleetError::Order`].
    pub fn new(
        config: RouterConfig,
        block_size: u32,
        targets: Vec<TargetConfig>,
    ) -> Result<Fleet, FleetError> {
        let cached = Fleet::index(&config);
        Fleet::with(config, block_size, targets, cached)
    }

    /// Builds the index for a configuration.
    fn index(config: &RouterConfig) -> impl FnOnce(&[TargetConfig]) -> Cached + use<> {
        let (kv_events, ttl_s) = (config.kv_events, config.approximate_ttl_s);
        move |targets| {
            if kv_events {
                let capacity = targets.iter().map(|t| t.kv_blocks as usize).sum();
                Cached::Exact(BlockIndex::new(targets.len(), capacity))
            } else {
                // A target without prefix caching never has a hit, so it gets no entries.
                let kv_blocks: Vec<u32> = targets
                    .iter()
                    .map(|t| if t.prefix_caching { t.kv_blocks } else { 0 })
                    .collect();
                let ttl_ns = SimTime::from_secs_f64(ttl_s).0;
                Cached::Approximate(ApproximateIndex::new(&kv_blocks, ttl_ns))
            }
        }
    }

    fn with(
        config: RouterConfig,
        block_size: u32,
        targets: Vec<TargetConfig>,
        cached: impl FnOnce(&[TargetConfig]) -> Cached,
    ) -> Result<Fleet, FleetError> {
        let last = targets.last().ok_or(FleetError::Empty)?;
        if let Some(pair) = targets.windows(2).find(|pair| pair[0].rank >= pair[1].rank) {
            return Err(FleetError::Order { rank: pair[1].rank });
        }
        let mut workers = vec![0..0; last.rank.worker.index() + 1];
        for (target, config) in (0u32..).zip(&targets) {
            let range = &mut workers[config.rank.worker.index()];
            if range.end == 0 {
                range.start = target; // the worker's first rank
            }
            range.end = target + 1;
        }
        let cached = cached(&targets);
        let sessions = (config.affinity_ttl_s > 0.0)
            .then(|| SessionTable::new(SimTime::from_secs_f64(config.affinity_ttl_s).0));
        Ok(Fleet {
            config,
            block_size: block_size.max(1),
            workers: workers.into(),
            loads: targets.iter().map(|_| LoadLine::default()).collect(),
            active: targets.iter().map(|_| Mutex::default()).collect(),
            ready: (0..targets.len().div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            ready_generation: AtomicU64::new(1),
            changed: (0..targets.len().div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            keeps_order: AtomicBool::new(false),
            targets: targets.into(),
            cached,
            guesses: None,
            guessed: Box::new([]),
            answered: Box::new([]),
            sessions,
            counters: CounterCells::default(),
        })
    }

    /// The same fleet, in which a prompt whose tokens are not known ([`Tail::Opaque`]) is compared with those
    /// that were routed, as without KV events: its blocks are not those of any event. So are all prompts at
    /// workers without events ([`Fleet::set_guessed`]).
    #[must_use]
    pub fn with_guesses(mut self) -> Fleet {
        let kv_blocks: Vec<u32> = self.targets.iter().map(|t| t.kv_blocks).collect();
        let ttl_ns = SimTime::from_secs_f64(self.config.approximate_ttl_s).0;
        self.guesses = Some(ApproximateIndex::new(&kv_blocks, ttl_ns));
        let words = self.targets.len().div_ceil(64);
        self.guessed = (0..words).map(|_| AtomicU64::new(0)).collect();
        self.answered = self.targets.iter().map(|_| Mutex::default()).collect();
        self
    }

    /// Sets whether no events tell what `worker` holds. Without effect unless the fleet was made
    /// [`with_guesses`](Self::with_guesses).
    pub fn set_guessed(&self, worker: WorkerId, guessed: bool) {
        for target in self.targets_of(worker) {
            let bit = 1 << (target % 64);
            let Some(word) = self.guessed.get(target as usize / 64) else {
                return;
            };
            if guessed {
                word.fetch_or(bit, Ordering::Release);
            } else {
                word.fetch_and(!bit, Ordering::Release);
            }
        }
    }

    /// `target` has computed a prompt of known tokens, which has these full blocks.
    pub(crate) fn on_answered(&self, target: usize, blocks: &Arc<[BlockHash]>) {
        if let (Some(answered), Cached::Exact(index)) = (self.answered.get(target), &self.cached) {
            lock(answered).push(blocks, self.block_size, |hash| index.holds(target, hash));
        }
    }

    /// Whether KV events named the blocks of prompts that `worker` answered in the interval before the last call.
    /// `engine_block_size`: tokens per block of the engine. Nothing unless the fleet was made
    /// [`with_guesses`](Self::with_guesses) and has KV events.
    pub fn testimony(&self, worker: WorkerId, engine_block_size: u32) -> Testimony {
        let mut sum = Testimony::default();
        let Cached::Exact(index) = &self.cached else {
            return sum;
        };
        for target in self.targets_of(worker) {
            let Some(answered) = self.answered.get(target as usize) else {
                continue;
            };
            let holds = |hash| index.holds(target as usize, hash);
            let of = lock(answered).testify(self.block_size, engine_block_size, holds);
            sum.found += of.found;
            sum.missing += of.missing;
        }
        sum
    }

    /// The guesses, if they stand for what `target` holds.
    fn guesses_at(&self, target: usize) -> Option<&ApproximateIndex> {
        let word = self.guessed.get(target / 64)?.load(Ordering::Acquire);
        self.guesses
            .as_ref()
            .filter(|_| word >> (target % 64) & 1 == 1)
    }

    /// `worker` keeps no block that is known: its event stream restarts at sequence 0.
    pub fn forget_cache(&self, worker: WorkerId) {
        for target in self.targets_of(worker) {
            if let Some(guesses) = &self.guesses {
                guesses.forget(target as usize);
            }
            if let Some(answered) = self.answered.get(target as usize) {
                lock(answered).clear();
            }
            match &self.cached {
                Cached::Exact(index) => index.forget(target as usize),
                Cached::Approximate(index) => index.forget(target as usize),
                Cached::Elsewhere => {}
            }
        }
    }

    fn guesses_of(&self, prompt: &Prompt) -> Option<&ApproximateIndex> {
        let known = matches!(prompt.tail(), Tail::Tokens(_));
        self.guesses.as_ref().filter(|_| !known)
    }

    /// `[router]` of the cluster file.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Tokens per block of every prompt that is routed here.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// The ranks, by dense target index.
    pub fn targets(&self) -> &[TargetConfig] {
        &self.targets
    }

    /// The dense index of `rank`; `None` if it takes no prompts.
    pub fn target_of(&self, rank: RankId) -> Option<usize> {
        let range = self.workers.get(rank.worker.index())?;
        // Ranks of a worker are sorted, and nearly always 0, 1, 2, …
        let targets = &self.targets[range.start as usize..range.end as usize];
        targets
            .binary_search_by_key(&rank, |target| target.rank)
            .ok()
            .map(|at| range.start as usize + at)
    }

    /// The targets of `worker`; empty if it is unknown or takes no prompts.
    pub(crate) fn targets_of(&self, worker: WorkerId) -> Range<u32> {
        self.workers.get(worker.index()).cloned().unwrap_or(0..0)
    }

    /// Sets whether `worker` takes requests from now on. Its sequences are not touched.
    pub fn set_ready(&self, worker: WorkerId, ready: bool) {
        for target in self.targets_of(worker) {
            let bit = 1 << (target % 64);
            let word = &self.ready[target as usize / 64];
            if ready {
                word.fetch_or(bit, Ordering::Release);
            } else {
                word.fetch_and(!bit, Ordering::Release);
            }
        }
        self.ready_generation.fetch_add(1, Ordering::Release);
    }

    /// `worker` disappeared with its cache: it takes no requests until [`Fleet::set_ready`], and
    /// its event stream restarts at sequence 0.
    pub fn on_worker_lost(&self, worker: WorkerId) {
        self.set_ready(worker, false);
        self.forget_cache(worker);
    }

    /// Whether any decision of the configured policy reads cache state, or loads that follow from
    /// it. If not, a simulation need not publish it.
    pub fn reads_cache(&self) -> bool {
        Fleet::would_read_cache(&self.config)
    }

    /// [`reads_cache`](Self::reads_cache) for a fleet with this configuration.
    pub fn would_read_cache(config: &RouterConfig) -> bool {
        let policy = policy::from_config(config);
        policy.reads_loads() || policy.reads_overlap() || has_thresholds(config)
    }

    /// Promises that from now on only one thread feeds the index
    /// ([`BlockIndex::promise_single_writer`]).
    pub fn promise_single_writer(&self) {
        if let Cached::Exact(index) = &self.cached {
            index.promise_single_writer();
        }
    }

    /// A request was refused because every ready target was busy. The caller counts it, because a
    /// waiting request is routed several times.
    pub fn on_busy_refusal(&self) {
        self.counters.busy.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether `target` takes requests.
    pub fn is_ready(&self, target: usize) -> bool {
        self.ready[target / 64].load(Ordering::Acquire) >> (target % 64) & 1 == 1
    }

    /// Changes whenever readiness changes.
    pub(crate) fn ready_generation(&self) -> u64 {
        self.ready_generation.load(Ordering::Acquire)
    }

    /// From now on notes whose loads change. False if it does already: one router reads the notes.
    pub(crate) fn note_changes(&self) -> bool {
        !self.keeps_order.swap(true, Ordering::Relaxed)
    }

    /// The load of `target` has changed.
    #[inline]
    pub(crate) fn on_load(&self, target: usize) {
        if self.keeps_order.load(Ordering::Relaxed) {
            // Release: the reader of the bit reads the new load.
            self.changed[target / 64].fetch_or(1 << (target % 64), Ordering::Release);
        }
    }

    /// Calls `each` with the targets whose loads changed since the last call.
    pub(crate) fn take_changed(&self, mut each: impl FnMut(usize)) {
        for (word, cell) in self.changed.iter().enumerate() {
            if cell.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = cell.swap(0, Ordering::Acquire);
            while bits != 0 {
                each(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// Applies a change of a rank's cache. If the result has `gap`, request a snapshot from that
    /// rank's engine (`Cleared`, then every block held), and pass it to [`Fleet::resync`]. Until
    /// then the rank counts as holding nothing, and each of its deltas returns `gap`.
    ///
    /// Ignored if the index is approximate. A rank that is no target is counted and ignored.
    pub fn on_kv(&self, delta: &KvDelta) -> Applied {
        self.feed(delta, BlockIndex::apply)
    }

    /// Prefetches the data that `delta` will change, before [`Fleet::on_kv`]. Batches of small
    /// deltas are applied faster this way.
    pub fn expect_kv(&self, delta: &KvDelta) {
        if let Cached::Exact(index) = &self.cached {
            index.touch(&delta.ops);
        }
    }

    /// Replaces the state of a rank by `snapshot`, whatever its sequence, which is that of the
    /// rank's next delta (a snapshot takes no number).
    pub fn resync(&self, snapshot: &KvDelta) -> Applied {
        self.feed(snapshot, BlockIndex::resync)
    }

    fn feed(
        &self,
        delta: &KvDelta,
        apply: impl FnOnce(&BlockIndex, usize, &KvDelta) -> Applied,
    ) -> Applied {
        let Cached::Exact(index) = &self.cached else {
            return Applied::default();
        };
        let Some(target) = self.target_of(delta.rank) else {
            self.counters.kv_strangers.fetch_add(1, Ordering::Relaxed);
            return Applied::default();
        };
        let applied = apply(index, target, delta);
        let count = |cell: &AtomicU64, n: u64| {
            if n > 0 {
                cell.fetch_add(n, Ordering::Relaxed);
            }
        };
        count(&self.counters.kv_gaps, applied.gap.into());
        count(&self.counters.kv_duplicates, applied.duplicate.into());
        count(&self.counters.kv_dropped_blocks, applied.dropped.into());
        applied
    }

    /// For each target, the leading `blocks` of `prompt` that are cached there. Shape of `out`: `[targets]`.
    pub(crate) fn overlap(
        &self,
        now: SimTime,
        prompt: &Prompt,
        blocks: &[BlockHash],
        out: &mut [u32],
    ) {
        if let Some(guesses) = self.guesses_of(prompt) {
            return guesses.overlap(now, blocks, out);
        }
        match &self.cached {
            Cached::Exact(index) => {
                index.overlap(blocks, out);
                if self
                    .guessed
                    .iter()
                    .all(|word| word.load(Ordering::Relaxed) == 0)
                {
                    return; // nearly always: events tell of all, or the prompt has no tokens
                }
                for (target, hit) in out.iter_mut().enumerate() {
                    if self.is_ready(target)
                        && let Some(guesses) = self.guesses_at(target)
                    {
                        *hit = guesses.overlap_of(now, target, blocks);
                    }
                }
            }
            Cached::Approximate(index) => index.overlap(now, blocks, out),
            Cached::Elsewhere => out.fill(0),
        }
    }

    /// The leading `blocks` of `prompt` that are cached at `target`.
    pub(crate) fn overlap_of(
        &self,
        now: SimTime,
        target: usize,
        prompt: &Prompt,
        blocks: &[BlockHash],
    ) -> u32 {
        if let Some(guesses) = self.guesses_of(prompt) {
            return guesses.overlap_of(now, target, blocks);
        }
        if let Some(guesses) = self.guesses_at(target) {
            return guesses.overlap_of(now, target, blocks);
        }
        match &self.cached {
            Cached::Exact(index) => index.overlap_of(target, blocks),
            Cached::Approximate(index) => index.overlap_of(now, target, blocks),
            Cached::Elsewhere => 0,
        }
    }

    /// Records that `prompt` goes to `target`: an index without events counts its blocks as cached from
    /// now on.
    pub(crate) fn on_routed(&self, now: SimTime, target: usize, prompt: &Prompt) {
        let approximate = match &self.cached {
            Cached::Approximate(index) => Some(index),
            Cached::Exact(_) | Cached::Elsewhere => {
                self.guesses_of(prompt).or_else(|| self.guesses_at(target))
            }
        };
        if let Some(index) = approximate {
            index.on_routed(now, target, prompt.blocks());
        }
    }

    /// Whether `target`, with this number of active blocks and tokens to prefill, is above a
    /// threshold.
    pub(crate) fn is_busy(&self, target: usize, active_blocks: u64, prefill_tokens: u64) -> bool {
        let prefill_max = self.config.busy_prefill_tokens;
        self.blocks_max(target)
            .is_some_and(|max| active_blocks as f64 > max)
            || prefill_max > 0 && prefill_tokens > prefill_max
    }

    /// Active blocks above which `target` is busy; `None` if it never is.
    pub(crate) fn blocks_max(&self, target: usize) -> Option<f64> {
        let share = self.config.busy_kv_share;
        (share < 1.0).then(|| share * f64::from(self.targets[target].kv_blocks))
    }

    /// Whether any busy threshold is set.
    pub(crate) fn has_thresholds(&self) -> bool {
        has_thresholds(&self.config)
    }

    /// Prompt tokens that `target` still has to compute, after reuse.
    pub fn prefill_tokens(&self, target: usize) -> u64 {
        self.loads[target].prefill_tokens.load(Ordering::Relaxed)
    }

    /// The load of every target, by dense index. Each number is correct by itself; they are not
    /// read at one instant.
    pub fn loads(&self) -> Vec<Load> {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        self.targets
            .iter()
            .zip(&self.loads)
            .enumerate()
            .map(|(target, (config, load))| Load {
                rank: config.rank,
                ready: self.is_ready(target),
                trusted: match &self.cached {
                    Cached::Exact(index) => index.is_trusted(target),
                    Cached::Approximate(_) | Cached::Elsewhere => true,
                },
                requests: read(&load.requests),
                prefill_tokens: read(&load.prefill_tokens),
                decode_tokens: read(&load.decode_tokens),
                active_blocks: read(&load.active_blocks),
                kv_blocks: config.kv_blocks,
                cached_blocks: match &self.cached {
                    Cached::Exact(index) => index.held(target),
                    Cached::Approximate(index) => index.held(target),
                    Cached::Elsewhere => 0,
                },
                routed_total: read(&load.routed),
            })
            .collect()
    }

    /// Counters since the start.
    pub fn counters(&self) -> Counters {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let cells = &self.counters;
        Counters {
            kv_gaps_total: read(&cells.kv_gaps),
            kv_duplicates_total: read(&cells.kv_duplicates),
            kv_strangers_total: read(&cells.kv_strangers),
            kv_dropped_blocks_total: match &self.cached {
                Cached::Exact(_) => read(&cells.kv_dropped_blocks),
                Cached::Approximate(index) => index.dropped_total(),
                Cached::Elsewhere => 0,
            },
            busy_total: read(&cells.busy),
            affinity_hits_total: read(&cells.affinity_hits),
            sessions_dropped_total: self.sessions.as_ref().map_or(0, SessionTable::dropped),
        }
    }
}

fn has_thresholds(config: &RouterConfig) -> bool {
    config.busy_kv_share < 1.0 || config.busy_prefill_tokens > 0
}

#[cfg(test)]
pub(crate) mod tests {
    use slipstream_base::KvOp;
    use slipstream_config::cluster::{EngineConfig, ModelConfig, PoolConfig};

    use super::*;

    /// `workers` of one rank each, all ready, with 1,000 blocks of 16 tokens.
    pub(crate) fn fleet(workers: u32, config: RouterConfig) -> Fleet {
        let targets = (0..workers)
            .map(|worker| TargetConfig {
                rank: RankId {
                    worker: WorkerId(worker),
                    dp_rank: 0,
                },
                kv_blocks: 1_000,
                prefix_caching: true,
            })
            .collect();
        let fleet = Fleet::new(config, 16, targets).unwrap();
        (0..workers).for_each(|worker| fleet.set_ready(WorkerId(worker), true));
        fleet
    }

    fn pool(name: &str, role: Role, workers: u32, ranks: u32, block_size: u32) -> PoolConfig {
        PoolConfig {
            name: name.into(),
            role,
            workers,
            engines: None,
            model: ModelConfig::default(),
            autoscale: None,
            engine: EngineConfig {
                block_size,
                data_parallel_size: ranks,
                ..EngineConfig::default()
            },
        }
    }

    fn rank(worker: u32, dp_rank: u16) -> RankId {
        RankId {
            worker: WorkerId(worker),
            dp_rank,
        }
    }

    #[test]
    fn targets_are_the_ranks_that_take_prompts() {
        let cluster = Cluster {
            pools: vec![
                pool("a", Role::Both, 2, 2, 16),
                pool("d", Role::Decode, 3, 1, 16),
                pool("p", Role::Prefill, 1, 1, 16),
            ],
            ..Cluster::default()
        };
        let fleet = Fleet::from_cluster(&cluster).unwrap();
        let ranks: Vec<RankId> = fleet.targets().iter().map(|t| t.rank).collect();
        assert_eq!(
            ranks,
            [rank(0, 0), rank(0, 1), rank(1, 0), rank(1, 1), rank(5, 0)]
        );
        for (target, &rank) in ranks.iter().enumerate() {
            assert_eq!(fleet.target_of(rank), Some(target));
        }
        for stranger in [rank(0, 2), rank(2, 0), rank(6, 0)] {
            assert_eq!(fleet.target_of(stranger), None);
        }
    }

    #[test]
    fn mistakes_in_pools_are_told() {
        let none = Cluster {
            pools: Vec::new(),
            ..Cluster::default()
        };
        assert_eq!(Fleet::from_cluster(&none).err(), Some(FleetError::Empty));
        let two_sizes = Cluster {
            pools: vec![
                pool("a", Role::Both, 1, 1, 16),
                pool("b", Role::Both, 1, 1, 32),
            ],
            ..Cluster::default()
        };
        let message = Fleet::from_cluster(&two_sizes).err().unwrap().to_string();
        assert!(
            message.contains("`b` has block_size 32") && message.contains("`a` has 16"),
            "{message}"
        );
        let target = TargetConfig {
            rank: rank(1, 0),
            kv_blocks: 1,
            prefix_caching: true,
        };
        let twice = Fleet::new(RouterConfig::default(), 16, vec![target, target]);
        assert_eq!(twice.err(), Some(FleetError::Order { rank: rank(1, 0) }));
    }

    /// A prompt of 4 blocks whose tokens are known or not.
    fn prompt(known: bool) -> Prompt {
        let tokens: Vec<u32> = (0..64).collect();
        let root = BlockHash::root("m", "", "");
        if known {
            return Prompt::from_tokens(&tokens, 16, root).unwrap();
        }
        let blocks = root.chain(&tokens, 16);
        Prompt::from_parts(64, 16, blocks.into(), Tail::Opaque { id: 0 }).unwrap()
    }

    #[test]
    fn guesses_count_for_prompts_without_tokens_alone() {
        let hits = |fleet: &Fleet, prompt: &Prompt| {
            let mut hits = [9; 2];
            fleet.overlap(SimTime(1), prompt, prompt.blocks(), &mut hits);
            let each =
                [0, 1].map(|target| fleet.overlap_of(SimTime(1), target, prompt, prompt.blocks()));
            assert_eq!(hits, each);
            hits
        };
        let (known, unknown) = (prompt(true), prompt(false));
        let exact = fleet(2, RouterConfig::default());
        exact.on_routed(SimTime(0), 1, &unknown);
        assert_eq!(hits(&exact, &unknown), [0, 0]);
        let both = fleet(2, RouterConfig::default()).with_guesses();
        both.on_routed(SimTime(0), 0, &known);
        both.on_routed(SimTime(0), 1, &unknown);
        assert_eq!(
            (hits(&both, &known), hits(&both, &unknown)),
            ([0, 0], [0, 4])
        );
        both.on_worker_lost(WorkerId(1));
        assert_eq!(hits(&both, &unknown), [0, 0]);
    }

    #[test]
    fn engines_without_events_are_guessed_beside_those_with_them() {
        let fleet = fleet(3, RouterConfig::default()).with_guesses();
        for worker in [1, 2] {
            fleet.set_guessed(WorkerId(worker), true);
        }
        let known = prompt(true);
        let root = BlockHash::root("m", "", "");
        let stored = |held: usize| {
            let parents = [&[root], known.blocks()].concat();
            let pairs = known.blocks()[..held].iter().zip(parents);
            let op = |(&hash, parent)| KvOp::Stored { hash, parent };
            pairs.map(op).collect()
        };
        fleet.on_kv(&KvDelta {
            rank: rank(0, 0),
            sequence: 0,
            ops: stored(2),
        });
        fleet.on_routed(SimTime(0), 0, &known);
        fleet.on_routed(SimTime(0), 1, &known);
        let hits = || {
            let mut hits = [9; 3];
            fleet.overlap(SimTime(1), &known, known.blocks(), &mut hits);
            let each = [0, 1, 2].map(|at| fleet.overlap_of(SimTime(1), at, &known, known.blocks()));
            assert_eq!(hits, each);
            hits
        };
        assert_eq!(
            hits(),
            [2, 4, 0],
            "events for the first, what was routed for the others"
        );
        // Its events come: they count, and it holds nothing of it.
        fleet.set_guessed(WorkerId(1), false);
        assert_eq!(hits(), [2, 0, 0]);
        fleet.set_guessed(WorkerId(1), true);
        fleet.forget_cache(WorkerId(1));
        assert_eq!(hits(), [2, 0, 0]);
        assert!(fleet.is_ready(1), "its readiness is another matter");
    }

    #[test]
    fn gaps_duplicates_and_strangers_are_counted() {
        let fleet = fleet(1, RouterConfig::default());
        let delta = |rank, sequence| KvDelta {
            rank,
            sequence,
            ops: vec![KvOp::Removed { hash: BlockHash(1) }],
        };
        assert!(!fleet.on_kv(&delta(rank(0, 0), 0)).gap);
        assert!(fleet.on_kv(&delta(rank(0, 0), 0)).duplicate);
        assert!(fleet.on_kv(&delta(rank(0, 0), 2)).gap);
        assert!(!fleet.loads()[0].trusted);
        assert_eq!(fleet.on_kv(&delta(rank(9, 0), 0)), Applied::default());
        let snapshot = KvDelta {
            ops: vec![KvOp::Cleared],
            ..delta(rank(0, 0), 3)
        };
        fleet.resync(&snapshot);
        assert!(fleet.loads()[0].trusted);
        let counters = fleet.counters();
        assert_eq!(
            (
                counters.kv_gaps_total,
                counters.kv_duplicates_total,
                counters.kv_strangers_total
            ),
            (1, 1, 1)
        );
    }
}
