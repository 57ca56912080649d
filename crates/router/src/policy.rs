//! The ways to choose a worker.

use std::sync::atomic::Ordering;

use slipstream_base::RankId;
use slipstream_base::cluster::{RouterConfig, RouterPolicy};
use slipstream_base::mix::{below, draw, unit};

use crate::fleet::Fleet;
use crate::router::RouteRequest;

/// A candidate as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerView {
    /// Which rank.
    pub rank: RankId,
    /// Leading blocks of the prompt that it would reuse. 0 unless [`RoutePolicy::reads_overlap`].
    pub hit_blocks: u32,
    /// Sequences in flight.
    pub requests: u64,
    /// Prompt tokens of those still to compute, after reuse.
    pub prefill_tokens: u64,
    /// Prompt tokens of those that decode.
    pub decode_tokens: u64,
    /// Distinct blocks of live prompts.
    pub active_blocks: u64,
}

/// The ranks that a request may go to, sorted by rank. A view is read when asked for: a policy
/// that looks at two candidates touches two cache lines, whatever the size of the fleet.
#[derive(Clone, Copy)]
pub struct Candidates<'a> {
    pub(crate) fleet: &'a Fleet,
    /// Dense target indexes, rising.
    pub(crate) targets: &'a [u32],
    /// Hits by dense target index; empty unless they were asked for.
    pub(crate) hits: &'a [u32],
}

impl Candidates<'_> {
    /// Number of candidates.
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// The candidate at `place`, which is below [`Candidates::len`].
    pub fn view(&self, place: usize) -> WorkerView {
        let target = self.targets[place] as usize;
        let load = &self.fleet.loads[target];
        WorkerView {
            rank: self.fleet.targets()[target].rank,
            hit_blocks: self.hits.get(target).copied().unwrap_or(0),
            requests: load.requests.load(Ordering::Relaxed),
            prefill_tokens: load.prefill_tokens.load(Ordering::Relaxed),
            decode_tokens: load.decode_tokens.load(Ordering::Relaxed),
            active_blocks: load.active_blocks.load(Ordering::Relaxed),
        }
    }

    /// All candidates, by rank.
    pub fn iter(&self) -> impl Iterator<Item = WorkerView> {
        (0..self.len()).map(|place| self.view(place))
    }
}

/// Random numbers for policies: draws of a named stream, the same on every machine.
#[derive(Clone, Debug)]
pub struct Draws {
    seed: u64,
    made: u64,
}

impl Draws {
    /// The stream named `seed`, from its beginning.
    pub fn new(seed: u64) -> Draws {
        Draws { seed, made: 0 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.made += 1;
        draw(self.seed, self.made - 1)
    }

    /// A number in `0..n`; 0 for `n == 0`.
    pub fn below(&mut self, n: usize) -> usize {
        below(self.bits(), n as u64) as usize
    }

    /// A number in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        unit(self.bits())
    }
}

/// Chooses the rank that will serve a request.
///
/// A policy does no I/O and reads no clock: the same candidates, request and draws give the same
/// choice. The router runs it on live workers, the simulator on mock engines.
pub trait RoutePolicy: Send {
    /// Place of the chosen one among `candidates`; `None` only if there are none.
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        request: &RouteRequest<'_>,
        draws: &mut Draws,
    ) -> Option<usize>;

    /// What speaks against a candidate, for traced requests; the unit is the policy's own. 0 where
    /// a policy does not compare.
    fn cost(&self, _view: &WorkerView, _request: &RouteRequest<'_>) -> f64 {
        0.0
    }

    /// Whether `choose` reads [`WorkerView::hit_blocks`], so that the index is walked for all.
    fn reads_overlap(&self) -> bool {
        false
    }
}

/// The policy that `config` names.
pub(crate) fn from_config(config: &RouterConfig) -> Box<dyn RoutePolicy> {
    match config.policy {
        RouterPolicy::RoundRobin => Box::new(RoundRobin),
        RouterPolicy::Random => Box::new(Random),
        RouterPolicy::PowerOfTwo => Box::new(PowerOfTwo),
        RouterPolicy::LeastRequests => Box::new(LeastRequests),
        RouterPolicy::LeastTokens => Box::new(LeastTokens),
        // A named worker leaves its ranks to choose from; that is a matter of cache and load.
        RouterPolicy::Kv | RouterPolicy::Direct => Box::new(KvAware {
            prefill_weight: config.prefill_weight,
            temperature: config.temperature,
            costs: Vec::new(),
        }),
    }
}

/// One after the other, counted over all shards.
#[derive(Debug, Default)]
pub struct RoundRobin;

impl RoutePolicy for RoundRobin {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        _request: &RouteRequest<'_>,
        _draws: &mut Draws,
    ) -> Option<usize> {
        let turn = candidates.fleet.round_robin.fetch_add(1, Ordering::Relaxed);
        (turn as usize).checked_rem(candidates.len())
    }
}

/// Uniformly at random.
#[derive(Debug, Default)]
pub struct Random;

impl RoutePolicy for Random {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        _request: &RouteRequest<'_>,
        draws: &mut Draws,
    ) -> Option<usize> {
        (!candidates.is_empty()).then(|| draws.below(candidates.len()))
    }
}

/// The one with fewer requests of two drawn at random; ties by tokens, then by rank.
///
/// Source: Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 2001.
#[derive(Debug, Default)]
pub struct PowerOfTwo;

impl RoutePolicy for PowerOfTwo {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        _request: &RouteRequest<'_>,
        draws: &mut Draws,
    ) -> Option<usize> {
        let n = candidates.len();
        if n < 2 {
            return n.checked_sub(1);
        }
        let one = draws.below(n);
        let other = (one + 1 + draws.below(n - 1)) % n;
        let load = |place: usize| {
            let view = candidates.view(place);
            (view.requests, tokens(&view), place)
        };
        Some(load(one).min(load(other)).2)
    }

    fn cost(&self, view: &WorkerView, _request: &RouteRequest<'_>) -> f64 {
        view.requests as f64
    }
}

/// Fewest requests in flight; ties by tokens, then by rank.
#[derive(Debug, Default)]
pub struct LeastRequests;

impl RoutePolicy for LeastRequests {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        _request: &RouteRequest<'_>,
        _draws: &mut Draws,
    ) -> Option<usize> {
        least(candidates, |view| (view.requests, tokens(view)))
    }

    fn cost(&self, view: &WorkerView, _request: &RouteRequest<'_>) -> f64 {
        view.requests as f64
    }
}

/// Fewest tokens to prefill and in decode; ties by requests, then by rank.
#[derive(Debug, Default)]
pub struct LeastTokens;

impl RoutePolicy for LeastTokens {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        _request: &RouteRequest<'_>,
        _draws: &mut Draws,
    ) -> Option<usize> {
        least(candidates, |view| (tokens(view), view.requests))
    }

    fn cost(&self, view: &WorkerView, _request: &RouteRequest<'_>) -> f64 {
        tokens(view) as f64
    }
}

fn tokens(view: &WorkerView) -> u64 {
    view.prefill_tokens + view.decode_tokens
}

/// Ties go to the lowest rank: `min_by_key` keeps the first, and candidates are sorted.
fn least<K: Ord>(candidates: &Candidates<'_>, key: impl Fn(&WorkerView) -> K) -> Option<usize> {
    (0..candidates.len()).min_by_key(|&place| key(&candidates.view(place)))
}

/// Cheapest in blocks: those to prefill, queued there and of this prompt after reuse, times a
/// weight, plus the active ones.
///
/// `cost = prefill_weight · (prefill_tokens + uncached_tokens) / block_size + active_blocks`
///
/// At temperature 0 the cheapest is chosen; ties go to fewer requests, then to the lowest rank.
/// Above 0 the choice is drawn with weights `exp(-c / temperature)`, where `c` is the cost scaled
/// to `0..=1` over the candidates.
#[derive(Debug, Default)]
pub struct KvAware {
    /// Weight of prefill blocks against active blocks.
    pub prefill_weight: f64,
    /// How far the choice spreads beyond the cheapest; 0: not at all.
    pub temperature: f64,
    costs: Vec<f64>,
}

impl RoutePolicy for KvAware {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        request: &RouteRequest<'_>,
        draws: &mut Draws,
    ) -> Option<usize> {
        if self.temperature > 0.0 {
            return self.sample(candidates, request, draws);
        }
        let mut best: Option<(f64, u64, usize)> = None;
        for (place, view) in candidates.iter().enumerate() {
            let cost = self.cost(&view, request);
            let better = best.is_none_or(|(least, requests, _)| {
                cost < least || cost == least && view.requests < requests
            });
            if better {
                best = Some((cost, view.requests, place));
            }
        }
        best.map(|(_, _, place)| place)
    }

    fn cost(&self, view: &WorkerView, request: &RouteRequest<'_>) -> f64 {
        let block_size = u64::from(request.prompt.block_size());
        let hit_tokens = u64::from(view.hit_blocks) * block_size;
        let uncached = u64::from(request.prompt.len()).saturating_sub(hit_tokens);
        let prefill_blocks = (view.prefill_tokens + uncached) as f64 / block_size as f64;
        self.prefill_weight * prefill_blocks + view.active_blocks as f64
    }

    fn reads_overlap(&self) -> bool {
        true
    }
}

impl KvAware {
    fn sample(
        &mut self,
        candidates: &Candidates<'_>,
        request: &RouteRequest<'_>,
        draws: &mut Draws,
    ) -> Option<usize> {
        let mut costs = std::mem::take(&mut self.costs);
        costs.clear();
        costs.extend(candidates.iter().map(|view| self.cost(&view, request)));
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let most = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let scale = if most > least { most - least } else { 1.0 };
        // `libm`, as the system's `exp` may differ from machine to machine in the last bit.
        let mut sum = 0.0;
        for cost in &mut costs {
            sum += libm::exp(-(*cost - least) / scale / self.temperature);
            *cost = sum;
        }
        let aim = draws.unit() * sum;
        let place = costs.partition_point(|&up_to| up_to <= aim);
        let chosen = (!costs.is_empty()).then(|| place.min(costs.len() - 1));
        self.costs = costs;
        chosen
    }
}
