//! A routing decision, from request to accounting.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use slipstream_base::mix::draw;
use slipstream_base::width::{floor_u32, round_u64, to_u32};
use slipstream_base::{Prompt, RankId, SimTime, WorkerId};
use slipstream_config::cluster::RouterPolicy;

use crate::active::ActiveSequence;
use crate::fleet::{CachedBlocks, Fleet, Hits};
use crate::order::LoadOrder;
use crate::policy::{self, Candidates, Rng, RoutePolicy, WorkerView};
use crate::view::{ViewTurn, ViewedLoad, Views};

/// A request as the router sees it.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// The prompt, in blocks of [`Fleet::block_size`] tokens.
    pub prompt: &'a Prompt,
    /// Limit of the answer's tokens. The policies here do not count an answer before it exists
    /// (clients often send a limit far above the actual length); another policy may.
    pub max_tokens: u32,
    /// The client's session; with `router.affinity_ttl_s` its requests stay together.
    pub session: Option<u64>,
    /// The worker that the client named. The policy chooses among its ranks.
    pub direct: Option<WorkerId>,
    /// Workers to choose among, in rising order; `None`: all.
    pub only: Option<&'a [WorkerId]>,
    /// Workers to exclude: those that this request has already failed on.
    pub exclude: &'a [WorkerId],
}

/// The target of a request.
#[must_use]
pub struct Routed {
    /// The rank.
    pub target: RankId,
    /// Leading blocks of the prompt that it is expected to reuse.
    pub hit_blocks: u32,
    /// The sequence's charge; keep it until the sequence ends.
    pub active: ActiveSequence,
}

/// The target of a request, before it is charged.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    /// The rank.
    pub target: RankId,
    /// Its index among the targets of the fleet.
    pub index: u32,
    /// Leading blocks of the prompt that it is expected to reuse.
    pub hit_blocks: u32,
}

impl Chosen {
    /// Charges `prompt`, for which the target was chosen, in `fleet`.
    pub fn charge(&self, fleet: &Arc<Fleet>, prompt: &Prompt) -> ActiveSequence {
        ActiveSequence::charge(fleet, self.index as usize, prompt, self.hit_blocks)
    }
}

/// One candidate of a traced request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The candidate.
    pub rank: RankId,
    /// Cost by the policy, in the policy's own unit (KV-aware: blocks).
    pub cost: f64,
    /// Leading blocks of the prompt that it would have reused.
    pub hit_blocks: u32,
    /// Sequences in flight.
    pub requests: u64,
    /// Prompt tokens still to compute, after reuse.
    pub prefill_tokens: u64,
    /// Distinct blocks of live prompts.
    pub active_blocks: u64,
}

/// Why a request was not routed. The router remains usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// No worker is ready, or the request has failed on all that are. Retrying may help: workers
    /// start and return.
    #[error(
        "no worker is ready to take the request ({ready} ready, {excluded} already tried); retry when one is"
    )]
    NoWorker {
        /// Ranks that are ready.
        ready: usize,
        /// Workers that the request has failed on.
        excluded: usize,
    },
    /// Every ready worker is above `router.busy_kv_share` or `router.busy_prefill_tokens`.
    /// Retrying helps, after `retry_after_s`.
    #[error("all {busy} ready ranks are busy; retry after {retry_after_s} s")]
    Busy {
        /// Ranks that are ready, all of them busy.
        busy: usize,
        /// Estimated wait until one takes requests again, s, 1 to 60.
        retry_after_s: u32,
    },
    /// The client named a worker that does not exist, or that only computes prompts for others. A
    /// retry does not help.
    #[error("there is no worker {worker} that answers requests; workers are w0 to w{last}")]
    UnknownWorker {
        /// The named worker.
        worker: WorkerId,
        /// The last worker.
        last: u32,
    },
    /// The client named a worker that is not ready, or on which the request failed. Retrying may
    /// help.
    #[error("worker {worker} is not ready; retry when it is, or name another")]
    WorkerNotReady {
        /// The named worker.
        worker: WorkerId,
    },
    /// The policy is `direct`, and the client named no worker. A retry does not help.
    #[error(
        "the router's policy is `direct`, so the request must name its worker: send `x-slipstream-worker`"
    )]
    WorkerNotNamed,
    /// The prompt was hashed in blocks of another size. An error of the caller.
    #[error(
        "the prompt comes in blocks of {prompt} tokens, but this fleet's blocks hold {fleet}; hash it with `engine.block_size`"
    )]
    BlockSize {
        /// The prompt's, tokens.
        prompt: u32,
        /// The fleet's, tokens.
        fleet: u32,
    },
}

impl RouteError {
    /// Whether a retry of the same request may succeed.
    pub fn retry_may_help(&self) -> bool {
        match self {
            RouteError::NoWorker { .. }
            | RouteError::Busy { .. }
            | RouteError::WorkerNotReady { .. } => true,
            RouteError::UnknownWorker { .. }
            | RouteError::WorkerNotNamed
            | RouteError::BlockSize { .. } => false,
        }
    }
}

/// Targets from which on an order of loads costs less than a look at each of them.
const ORDERED_MIN: usize = 32;

/// One shard's router: the policy's state, its random numbers, and scratch space.
pub struct Router {
    fleet: Arc<Fleet>,
    policy: Box<dyn RoutePolicy>,
    rng: Rng,
    /// Ready targets, rising, as of `ready_generation`.
    ready: Vec<u32>,
    ready_generation: u64,
    /// The subset of `ready` that the current request may use, if it may not use all.
    open: Vec<u32>,
    narrowed: bool,
    /// Hits of the current request.
    hits: Hits,
    /// Ready targets by their loads, if the router keeps them in order.
    order: Option<LoadOrder>,
    /// Its view of loads; `None` if it reads them for each decision.
    views: Option<Views>,
    drain: DrainRate,
}

impl Router {
    /// Router number `shard` of `fleet`, with the policy of its configuration. Shards draw from
    /// different streams.
    pub fn new(fleet: Arc<Fleet>, shard: u32) -> Router {
        let policy = policy::from_config(fleet.config());
        Router::with_policy(fleet, shard, policy)
    }

    /// Router number `shard` of `fleet`, with a custom policy.
    pub fn with_policy(fleet: Arc<Fleet>, shard: u32, policy: Box<dyn RoutePolicy>) -> Router {
        let config = fleet.config();
        // Busy thresholds read loads, too.
        let reads_loads = policy.reads_loads() || fleet.has_thresholds();
        let views = (config.view_interval_ms > 0.0 && reads_loads)
            .then(|| Views::new(round_u64(config.view_interval_ms * 1e6)));
        Router {
            policy,
            rng: Rng::new(draw(fleet.config().seed, shard.into())),
            ready: Vec::new(),
            ready_generation: 0,
            open: Vec::new(),
            narrowed: false,
            hits: Hits::new(fleet.targets().len()),
            order: None,
            views,
            drain: DrainRate::default(),
            fleet,
        }
    }

    /// From now on keeps targets in the order of their loads: with many of them, a decision looks at few. It is the
    /// same. For one router of a fleet; without effect for others, for small fleets, and for policies that need all
    /// loads, or look at them at intervals.
    pub fn keep_order(&mut self) {
        let few = self.fleet.targets().len() < ORDERED_MIN;
        let load = WorkerView::default();
        let by_load = self.policy.load_key(&load, 1).is_some();
        if few || !by_load || self.views.is_some() || self.fleet.has_thresholds() {
            return;
        }
        if self.fleet.note_changes() {
            self.order = Some(LoadOrder::new(self.fleet.targets().len()));
            self.ready_generation = 0;
        }
    }

    /// The view that decides a request routed at `now`, if `router.view_interval_ms` is set;
    /// otherwise [`ViewTurn::Fresh`].
    pub fn view_turn(&self, now: SimTime) -> ViewTurn {
        let views = self.views.as_ref();
        views.map_or(ViewTurn::Fresh, |views| views.turn(now))
    }

    /// From now on the router refreshes its view only on [`refresh`](Self::refresh): for a driver that
    /// routes ahead of its workers. A [`ViewTurn::Fresh`] still refreshes.
    pub fn manual_refresh(&mut self) {
        if let Some(views) = &mut self.views {
            views.manual = true;
        }
    }

    /// A request arrives at `now`, but is not routed yet: see [`view_turn`](Self::view_turn).
    pub fn advance_view(&mut self, now: SimTime) {
        if let Some(views) = &mut self.views {
            views.advance(now, &self.fleet);
        }
    }

    /// Reads the current loads, for the decisions of the next interval; no effect if this interval
    /// already has a view.
    pub fn refresh(&mut self) {
        if let Some(views) = &mut self.views {
            views.refresh(&self.fleet);
        }
    }

    /// The fleet that it routes to.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// Chooses a rank for `request` and charges it. With `scores`, all candidates are appended
    /// there, by rank. That is for traced requests, because it walks the index and all loads under
    /// every policy.
    ///
    /// # Errors
    /// [`RouteError`]; nothing is charged then.
    pub fn route(
        &mut self,
        now: SimTime,
        request: &RouteRequest<'_>,
        scores: Option<&mut Vec<Score>>,
    ) -> Result<Routed, RouteError> {
        #[expect(clippy::disallowed_methods, reason = "its own")]
        let chosen = self.choose(now, request, scores)?;
        Ok(self.charge(chosen, request))
    }

    /// [`route`](Self::route), but with hits from `cached` instead of the fleet's index.
    ///
    /// # Errors
    /// [`RouteError`]; nothing is charged then.
    pub fn route_by(
        &mut self,
        now: SimTime,
        request: &RouteRequest<'_>,
        cached: &dyn CachedBlocks,
    ) -> Result<Routed, RouteError> {
        let chosen = self.decide(now, request, Some(cached), None)?;
        Ok(self.charge(chosen, request))
    }

    fn charge(&self, chosen: Chosen, request: &RouteRequest<'_>) -> Routed {
        Routed {
            target: chosen.target,
            hit_blocks: chosen.hit_blocks,
            active: chosen.charge(&self.fleet, request.prompt),
        }
    }

    /// Whether a prompt with `uncached` tokens left to compute at its decode worker may be computed
    /// elsewhere: whether to query a prefill fleet.
    pub fn takes_prompt(&self, uncached: u32) -> bool {
        uncached >= self.fleet.config().remote_prefill_tokens_min
    }

    /// Whether the rank that a prompt was just routed to has a short enough prefill queue.
    pub fn computes_soon(&self, routed: &Routed) -> bool {
        let Some(target) = self.fleet.target_of(routed.target) else {
            return false;
        };
        let before = self.fleet.prefill_tokens(target) - routed.active.prefill_tokens();
        let queue_max = self.fleet.config().remote_prefill_queue_max;
        queue_max == 0 || before <= queue_max
    }

    /// [`route`](Self::route) without the charge: for a driver that routes ahead of time, and
    /// charges when that time comes.
    ///
    /// # Errors
    /// [`RouteError`].
    pub fn choose(
        &mut self,
        now: SimTime,
        request: &RouteRequest<'_>,
        scores: Option<&mut Vec<Score>>,
    ) -> Result<Chosen, RouteError> {
        self.decide(now, request, None, scores)
    }

    fn decide(
        &mut self,
        now: SimTime,
        request: &RouteRequest<'_>,
        cached: Option<&dyn CachedBlocks>,
        scores: Option<&mut Vec<Score>>,
    ) -> Result<Chosen, RouteError> {
        let fleet = Arc::clone(&self.fleet);
        if request.prompt.block_size() != fleet.block_size() {
            return Err(RouteError::BlockSize {
                prompt: request.prompt.block_size(),
                fleet: fleet.block_size(),
            });
        }
        self.drain.observe(now);
        if let Some(views) = &mut self.views {
            views.advance(now, &fleet);
        }
        self.refresh_ready();
        self.find_open(now, request)?;

        let blocks = reusable_blocks(request.prompt);
        let reads_overlap = self.policy.reads_overlap() || scores.is_some();
        let affine = self.session_target(now, request);
        let walked = reads_overlap && (affine.is_none() || scores.is_some());
        match cached {
            _ if !walked => {}
            None => {
                self.hits.clear();
                fleet.overlap(now, request.prompt, blocks, self.hits.dense());
                if self.order.is_some() {
                    self.hits.list();
                }
            }
            Some(cached) => {
                self.hits.clear();
                cached.overlap(blocks, &mut self.hits);
            }
        }
        let candidates = Candidates {
            fleet: &fleet,
            // Not by `open()`, which would borrow the policy too.
            targets: if self.narrowed {
                &self.open
            } else {
                &self.ready
            },
            hits: walked.then_some(&self.hits),
            views: self.views.as_ref(),
            order: self.order.as_ref().filter(|_| !self.narrowed),
        };
        if let Some(scores) = scores {
            scores.extend(candidates.iter().map(|view| Score {
                rank: view.rank,
                cost: self.policy.cost(&view, request),
                hit_blocks: view.hit_blocks,
                requests: view.requests,
                prefill_tokens: view.prefill_tokens,
                active_blocks: view.active_blocks,
            }));
        }
        let target = if let Some(target) = affine {
            target
        } else {
            let place = self
                .policy
                .choose(&candidates, request, &mut self.rng)
                .filter(|&place| place < candidates.len())
                .expect("a policy chooses among one or more candidates");
            candidates.targets[place]
        } as usize;

        let hit_blocks = if walked {
            self.hits.of(target)
        } else if let Some(cached) = cached {
            cached.overlap_of(target, blocks)
        } else {
            fleet.overlap_of(now, target, request.prompt, blocks)
        };
        fleet.on_routed(now, target, request.prompt);
        if let Some(views) = &mut self.views {
            views.on_routed(target, request.prompt, hit_blocks);
        }
        if let (Some(sessions), Some(session)) = (&fleet.sessions, request.session) {
            sessions.on_routed(now, session, to_u32(target));
        }
        Ok(Chosen {
            target: fleet.targets()[target].rank,
            index: to_u32(target),
            hit_blocks,
        })
    }

    /// The targets that the current request may go to.
    fn open(&self) -> &[u32] {
        if self.narrowed {
            &self.open
        } else {
            &self.ready
        }
    }

    /// Rebuilds the list of ready targets if readiness changed; puts those whose loads changed in order.
    fn refresh_ready(&mut self) {
        let generation = self.fleet.ready_generation();
        if generation != self.ready_generation {
            self.ready_generation = generation;
            self.ready.clear();
            let targets = 0..self.fleet.targets().len();
            self.ready.extend(
                targets
                    .filter(|&target| self.fleet.is_ready(target))
                    .map(|target| to_u32(target)),
            );
            if let Some(order) = &mut self.order {
                order.rebuild(&self.fleet, &*self.policy, &self.ready);
            }
        } else if let Some(order) = &mut self.order {
            order.refresh(&self.fleet, &*self.policy);
        }
    }

    /// Finds the targets that `request` may go to ([`Router::open`]): at least one.
    fn find_open(&mut self, now: SimTime, request: &RouteRequest<'_>) -> Result<(), RouteError> {
        let fleet = &self.fleet;
        let named = match request.direct {
            Some(worker) => {
                let range = fleet.targets_of(worker);
                if range.is_empty() {
                    let last = fleet.targets()[fleet.targets().len() - 1].rank.worker.0;
                    return Err(RouteError::UnknownWorker { worker, last });
                }
                range
            }
            None if fleet.config().policy == RouterPolicy::Direct => {
                return Err(RouteError::WorkerNotNamed);
            }
            None => 0..u32::MAX,
        };
        let excluded = |target: u32| {
            let worker = fleet.targets()[target as usize].rank.worker;
            request.exclude.contains(&worker)
                || request
                    .only
                    .is_some_and(|only| only.binary_search(&worker).is_err())
        };
        self.narrowed = request.direct.is_some()
            || !request.exclude.is_empty()
            || request.only.is_some()
            || fleet.has_thresholds();
        if self.narrowed {
            self.open.clear();
            let usable = self
                .ready
                .iter()
                .filter(|&&target| named.contains(&target) && !excluded(target));
            self.open.extend(usable);
        }
        if self.open().is_empty() {
            return Err(match request.direct {
                Some(worker) => RouteError::WorkerNotReady { worker },
                None => RouteError::NoWorker {
                    ready: self.ready.len(),
                    excluded: request.exclude.len(),
                },
            });
        }
        if fleet.has_thresholds() {
            let before = self.open.len();
            let retry_after_s = {
                let busy = |&t: &u32| is_busy(fleet, self.views.as_ref(), t as usize);
                let all_busy = self.open.iter().all(busy);
                all_busy.then(|| self.drain.retry_after_s(now, fleet, &self.open))
            };
            if let Some(retry_after_s) = retry_after_s {
                return Err(RouteError::Busy {
                    busy: before,
                    retry_after_s,
                });
            }
            let views = self.views.as_ref();
            self.open
                .retain(|&target| !is_busy(fleet, views, target as usize));
        }
        Ok(())
    }

    /// The target of the request's session, if the request may use it.
    fn session_target(&self, now: SimTime, request: &RouteRequest<'_>) -> Option<u32> {
        let sessions = self.fleet.sessions.as_ref()?;
        let target = sessions.target(now, request.session?)?;
        self.open().binary_search(&target).ok()?;
        self.fleet
            .counters
            .affinity_hits
            .fetch_add(1, Ordering::Relaxed);
        Some(target)
    }
}

/// Whether `target` is above a busy threshold, by the router's view.
fn is_busy(fleet: &Fleet, views: Option<&Views>, target: usize) -> bool {
    let load = match views {
        Some(views) => views.loads[target],
        None => ViewedLoad::of(fleet, target),
    };
    fleet.is_busy(target, load.active_blocks, load.prefill_tokens)
}

/// Reusable blocks of a prompt: an engine computes at least the last token.
fn reusable_blocks(prompt: &Prompt) -> &[slipstream_base::BlockHash] {
    let reusable = (prompt.len() - 1) / prompt.block_size();
    &prompt.blocks()[..reusable as usize]
}

/// Throughput of the fleet, for `Retry-After`.
#[derive(Clone, Copy, Debug, Default)]
struct DrainRate {
    /// When `mark` was read; `None` before the first request.
    since: Option<SimTime>,
    mark: Drained,
}

/// Totals of the fleet since its start.
#[derive(Clone, Copy, Debug, Default)]
struct Drained {
    prefill_tokens: u64,
    blocks: u64,
}

impl DrainRate {
    /// Shortest span of a rate, s.
    const SPAN_MIN_S: f64 = 1.0;
    /// Longest `Retry-After`, s: the estimate is not reliable beyond.
    const RETRY_AFTER_MAX_S: f64 = 60.0;

    fn observe(&mut self, now: SimTime) {
        self.since.get_or_insert(now);
    }

    /// Seconds until the one of `busy` that is nearest to its thresholds falls below them, at the
    /// mean rate per target since the mark; 1 s if no rate is known.
    fn retry_after_s(&mut self, now: SimTime, fleet: &Fleet, busy: &[u32]) -> u32 {
        let mut drained = Drained::default();
        for load in &fleet.loads {
            drained.prefill_tokens += load.prefill_tokens_done.load(Ordering::Relaxed);
            drained.blocks += load.blocks_freed.load(Ordering::Relaxed);
        }
        let span_s = now.since(self.since.unwrap_or(now)) as f64 / 1e9;
        let per_target_s = span_s * fleet.targets().len() as f64;
        let rate = |now: u64, then: u64| (now - then) as f64 / per_target_s;
        let prefill_rate = rate(drained.prefill_tokens, self.mark.prefill_tokens);
        let block_rate = rate(drained.blocks, self.mark.blocks);
        if span_s >= Self::SPAN_MIN_S {
            self.since = Some(now);
            self.mark = drained;
        }
        let wait_s = busy
            .iter()
            .map(|&target| {
                let load = &fleet.loads[target as usize];
                let over = |value: u64, max: f64, rate: f64| {
                    let excess = (value as f64 - max).max(0.0);
                    if excess == 0.0 { 0.0 } else { excess / rate }
                };
                let blocks = load.active_blocks.load(Ordering::Relaxed);
                let prefill = load.prefill_tokens.load(Ordering::Relaxed);
                let prefill_max = match fleet.config().busy_prefill_tokens {
                    0 => f64::INFINITY,
                    max => max as f64,
                };
                let blocks_max = fleet.blocks_max(target as usize).unwrap_or(f64::INFINITY);
                over(blocks, blocks_max, block_rate).max(over(prefill, prefill_max, prefill_rate))
            })
            .fold(f64::INFINITY, f64::min);
        if wait_s.is_finite() {
            floor_u32(wait_s.ceil().clamp(1.0, Self::RETRY_AFTER_MAX_S))
        } else {
            1
        }
    }
}
