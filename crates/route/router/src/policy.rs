//! Routing policies.

use std::sync::atomic::Ordering;

use slipstream_base::RankId;
use slipstream_base::mix::{below, draw, unit};
use slipstream_base::width::to_usize;
use slipstream_config::cluster::{RouterConfig, RouterPolicy};

use crate::fleet::{Fleet, Hits};
use crate::order::{LoadKey, LoadOrder, Ordered};
use crate::router::RouteRequest;
use crate::view::{ViewedLoad, Views};

/// A candidate, as a policy reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerView {
    /// The rank.
    pub rank: RankId,
    /// Leading blocks of the prompt that it would reuse. 0 unless [`RoutePolicy::reads_overlap`].
    pub hit_blocks: u32,
    /// Sequences in flight.
    pub requests: u64,
    /// Prompt tokens still to compute for those, after reuse.
    pub prefill_tokens: u64,
    /// Prompt tokens of those in decode.
    pub decode_tokens: u64,
    /// Distinct blocks of live prompts.
    pub active_blocks: u64,
}

/// The ranks that a request may go to, sorted by rank. A view is read on access: a policy that
/// compares two candidates touches two cache lines, whatever the size of the fleet.
#[derive(Clone, Copy)]
pub struct Candidates<'a> {
    pub(crate) fleet: &'a Fleet,
    /// Dense target indexes, rising.
    pub(crate) targets: &'a [u32],
    /// `None` unless requested.
    pub(crate) hits: Option<&'a Hits>,
    /// The router's view of loads, by dense target index, unless it reads them for each decision.
    pub(crate) views: Option<&'a Views>,
    /// The same targets by their loads, if the router keeps them in order.
    pub(crate) order: Option<&'a LoadOrder>,
}

impl Candidates<'_> {
    /// Number of candidates.
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether there are no candidates.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// The candidate at `place`, which is below [`Candidates::len`].
    pub fn view(&self, place: usize) -> WorkerView {
        let target = self.targets[place] as usize;
        let (rank, hit_blocks) = (
            self.fleet.targets()[target].rank,
            self.hits.map_or(0, |hits| hits.of(target)),
        );
        let load = match self.views {
            Some(views) => views.loads[target],
            None => ViewedLoad::of(self.fleet, target),
        };
        WorkerView {
            rank,
            hit_blocks,
            requests: load.requests,
            prefill_tokens: load.prefill_tokens,
            decode_tokens: load.decode_tokens,
            active_blocks: load.active_blocks,
        }
    }

    /// The place of a target that is a candidate.
    fn place_of(&self, target: u32) -> Option<usize> {
        self.targets.binary_search(&target).ok()
    }

    /// All candidates, by rank.
    pub fn iter(&self) -> impl Iterator<Item = WorkerView> {
        (0..self.len()).map(|place| self.view(place))
    }
}

/// Random numbers for policies: draws of a named stream, the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng {
    seed: u64,
    made: u64,
}

impl Rng {
    /// The stream named `seed`, from its beginning.
    pub fn new(seed: u64) -> Rng {
        Rng { seed, made: 0 }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.made += 1;
        draw(self.seed, self.made - 1)
    }

    /// A number in `0..n`; 0 for `n == 0`.
    pub fn below(&mut self, n: usize) -> usize {
        to_usize(below(self.bits(), n as u64))
    }

    /// A number in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        unit(self.bits())
    }
}

/// Chooses the rank that will serve a request.
///
/// A policy does no I/O and reads no clock: the same candidates, request and draws give the same
/// choice. The router runs it for live workers, the simulator for modelled engines.
pub trait RoutePolicy: Send {
    /// Index of the chosen one among `candidates`; `None` only if there are none.
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        request: &RouteRequest<'_>,
        rng: &mut Rng,
    ) -> Option<usize>;

    /// Cost of a candidate, for traced requests, in the policy's own unit. 0 if a policy does not
    /// compare.
    fn cost(&self, _view: &WorkerView, _request: &RouteRequest<'_>) -> f64 {
        0.0
    }

    /// Whether `choose` reads [`WorkerView::hit_blocks`], so that the index is searched for all
    /// candidates.
    fn reads_overlap(&self) -> bool {
        false
    }

    /// Whether `choose` reads the loads in a [`WorkerView`] (all but its rank and
    /// [`hit_blocks`](WorkerView::hit_blocks)), so that `router.view_interval_ms` applies to it.
    fn reads_loads(&self) -> bool {
        true
    }

    /// For a policy that can choose from an order of loads instead of all candidates: the key of a
    /// load, least first; ties go to fewer requests, then to the lowest rank. [`WorkerView::hit_blocks`]
    /// is 0 here.
    fn load_key(&self, _load: &WorkerView, _block_size: u64) -> Option<LoadKey> {
        None
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
        // A named worker leaves its ranks to choose from, by cache and load.
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
        _rng: &mut Rng,
    ) -> Option<usize> {
        let turn = candidates
            .fleet
            .counters
            .turns
            .fetch_add(1, Ordering::Relaxed);
        turn.checked_rem(candidates.len() as u64).map(to_usize)
    }

    fn reads_loads(&self) -> bool {
        false
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
        rng: &mut Rng,
    ) -> Option<usize> {
        (!candidates.is_empty()).then(|| rng.below(candidates.len()))
    }

    fn reads_loads(&self) -> bool {
        false
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
        rng: &mut Rng,
    ) -> Option<usize> {
        let n = candidates.len();
        if n < 2 {
            return n.checked_sub(1);
        }
        let one = rng.below(n);
        let other = (one + 1 + rng.below(n - 1)) % n;
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
        _rng: &mut Rng,
    ) -> Option<usize> {
        least(candidates, |view| (view.requests, tokens(view)))
    }

    fn load_key(&self, load: &WorkerView, _block_size: u64) -> Option<LoadKey> {
        Some([load.requests, tokens(load), 0])
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
        _rng: &mut Rng,
    ) -> Option<usize> {
        least(candidates, |view| (tokens(view), view.requests))
    }

    fn load_key(&self, load: &WorkerView, _block_size: u64) -> Option<LoadKey> {
        Some([tokens(load), 0, 0])
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
    if let Some(order) = candidates.order {
        return candidates.place_of(order.first()?.target);
    }
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
    /// Spread of the choice beyond the cheapest; 0: none.
    pub temperature: f64,
    costs: Vec<f64>,
}

impl RoutePolicy for KvAware {
    fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        request: &RouteRequest<'_>,
        rng: &mut Rng,
    ) -> Option<usize> {
        if self.temperature > 0.0 {
            return self.sample(candidates, request, rng);
        }
        if let Some(order) = candidates.order {
            return self.first_of(order, candidates, request);
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
        self.cost_of(
            view.prefill_tokens + uncached,
            view.active_blocks,
            block_size,
        )
    }

    fn reads_overlap(&self) -> bool {
        true
    }

    /// The cost of a prompt without tokens, then what it follows from.
    fn load_key(&self, load: &WorkerView, block_size: u64) -> Option<LoadKey> {
        // With a negative weight, costs would not rise with the load.
        if self.temperature > 0.0 || !self.prefill_weight.is_finite() || self.prefill_weight < 0.0 {
            return None;
        }
        let cost = self.cost_of(load.prefill_tokens, load.active_blocks, block_size);
        // The bits of numbers that are not negative are in their order.
        Some([cost.to_bits(), load.prefill_tokens, load.active_blocks])
    }
}

impl KvAware {
    fn cost_of(&self, prefill_tokens: u64, active_blocks: u64, block_size: u64) -> f64 {
        let prefill_blocks = prefill_tokens as f64 / block_size as f64;
        self.prefill_weight * prefill_blocks + active_blocks as f64
    }

    /// The choice without looking at all candidates: at those with hits, then at the others from the
    /// least loaded one on, until none behind can cost less.
    fn first_of(
        &self,
        order: &LoadOrder,
        candidates: &Candidates<'_>,
        request: &RouteRequest<'_>,
    ) -> Option<usize> {
        let mut best: Option<(f64, u64, u32)> = None;
        let mut compare = |cost: f64, requests: u64, target: u32| {
            let better = best.is_none_or(|(least, fewest, lowest)| {
                cost < least || cost == least && (requests, target) < (fewest, lowest)
            });
            if better {
                best = Some((cost, requests, target));
            }
            best.map_or(cost, |(least, ..)| least)
        };
        let block_size = u64::from(request.prompt.block_size());
        let len = u64::from(request.prompt.len());
        let hits_of = |target: u32| candidates.hits.map_or(0, |hits| hits.of(target as usize));
        let mut least = f64::INFINITY;
        for &target in candidates.hits.map_or(&[][..], Hits::found) {
            if let Some(Ordered { key, requests, .. }) = order.get(target) {
                let hit_tokens = u64::from(hits_of(target)) * block_size;
                let tokens = key[1] + len.saturating_sub(hit_tokens);
                least = compare(self.cost_of(tokens, key[2], block_size), requests, target);
            }
        }
        // All of one key have one cost. Those of a greater key cost no less than it, up to the
        // rounding of four operations in each of the two costs: well below one part in 2^48.
        const ROUNDED: f64 = 1.0 - 1.0 / (1u64 << 48) as f64;
        let prompt_cost = self.cost_of(len, 0, block_size);
        let mut next = order.first();
        while let Some(at) = next {
            let lowest = (f64::from_bits(at.key[0]) + prompt_cost) * ROUNDED;
            if lowest > least + f64::MIN_POSITIVE {
                break;
            }
            if hits_of(at.target) == 0 {
                let cost = self.cost_of(at.key[1] + len, at.key[2], block_size);
                least = compare(cost, at.requests, at.target);
                next = order.after_key(at.key);
            } else {
                next = order.after(at);
            }
        }
        candidates.place_of(best?.2)
    }

    fn sample(
        &mut self,
        candidates: &Candidates<'_>,
        request: &RouteRequest<'_>,
        rng: &mut Rng,
    ) -> Option<usize> {
        let mut costs = std::mem::take(&mut self.costs);
        costs.clear();
        costs.extend(candidates.iter().map(|view| self.cost(&view, request)));
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let most = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let scale = if most > least { most - least } else { 1.0 };
        // `libm`, because the system's `exp` may differ between machines in the last bit.
        let mut sum = 0.0;
        for cost in &mut costs {
            sum += libm::exp(-(*cost - least) / scale / self.temperature);
            *cost = sum;
        }
        let aim = rng.unit() * sum;
        let place = costs.partition_point(|&up_to| up_to <= aim);
        let chosen = (!costs.is_empty()).then(|| place.min(costs.len() - 1));
        self.costs = costs;
        chosen
    }
}

#[cfg(test)]
mod tests {
    use slipstream_base::{BlockHash, Prompt, Tail};

    use super::*;
    use crate::fleet::tests::fleet;

    /// A worker's load, in the order of [`WorkerView`]'s fields.
    #[derive(Clone, Copy, Default)]
    struct Worker {
        hit_blocks: u32,
        requests: u64,
        prefill_tokens: u64,
        decode_tokens: u64,
        active_blocks: u64,
    }

    const IDLE: Worker = Worker {
        hit_blocks: 0,
        requests: 0,
        prefill_tokens: 0,
        decode_tokens: 0,
        active_blocks: 0,
    };

    fn kv(prefill_weight: f64, temperature: f64) -> KvAware {
        KvAware {
            prefill_weight,
            temperature,
            costs: Vec::new(),
        }
    }

    /// Places that `policy` chooses, `times` in a row, for a prompt of `isl` tokens in blocks of 16.
    fn choices(
        mut policy: impl RoutePolicy,
        isl: u32,
        workers: &[Worker],
        times: usize,
    ) -> Vec<usize> {
        let fleet = fleet(workers.len() as u32, RouterConfig::default());
        for (load, worker) in fleet.loads.iter().zip(workers) {
            load.requests.store(worker.requests, Ordering::Relaxed);
            load.prefill_tokens
                .store(worker.prefill_tokens, Ordering::Relaxed);
            load.decode_tokens
                .store(worker.decode_tokens, Ordering::Relaxed);
            load.active_blocks
                .store(worker.active_blocks, Ordering::Relaxed);
        }
        let blocks = (0..isl / 16).map(|n| BlockHash(n.into())).collect();
        let prompt = Prompt::from_parts(isl, 16, blocks, Tail::Opaque { id: 0 }).unwrap();
        let request = RouteRequest {
            prompt: &prompt,
            max_tokens: 16,
            session: None,
            direct: None,
            only: None,
            exclude: &[],
        };
        let targets: Vec<u32> = (0..workers.len() as u32).collect();
        let mut hits = Hits::new(workers.len());
        for (target, worker) in workers.iter().enumerate() {
            hits.set(target, worker.hit_blocks);
        }
        let candidates = Candidates {
            fleet: &fleet,
            targets: &targets,
            hits: Some(&hits),
            views: None,
            order: None,
        };
        let mut rng = Rng::new(7);
        (0..times)
            .map(|_| policy.choose(&candidates, &request, &mut rng).unwrap())
            .collect()
    }

    fn check_choice(policy: impl RoutePolicy, isl: u32, workers: &[Worker], chosen: usize) {
        assert_eq!(choices(policy, isl, workers, 1), [chosen]);
    }

    #[test]
    fn kv_weighs_hits_against_load() {
        let cached = Worker {
            hit_blocks: 90,
            active_blocks: 20,
            ..IDLE
        };
        // 100 blocks: 10 left and 20 active are 30; idle is 100.
        check_choice(kv(1.0, 0.0), 1_600, &[IDLE, cached], 1);
        // At a tenth of the weight: 1 + 20 against 10.
        check_choice(kv(0.1, 0.0), 1_600, &[cached, IDLE], 1);
        // Prompt tokens queued there count like those of this prompt: 10 + 100 + 20 against 100.
        let queued = Worker {
            prefill_tokens: 1_600,
            ..cached
        };
        check_choice(kv(1.0, 0.0), 1_600, &[queued, IDLE], 1);
    }

    #[test]
    fn kv_ties_go_to_fewer_requests_then_to_the_lowest_rank() {
        let busy = Worker {
            requests: 3,
            ..IDLE
        };
        let busier = Worker {
            requests: 4,
            ..IDLE
        };
        check_choice(kv(1.0, 0.0), 100, &[busier, busy, busy], 1);
        check_choice(kv(1.0, 0.0), 100, &[IDLE, IDLE], 0);
    }

    #[test]
    fn temperature_spreads_by_softmax_of_scaled_costs() {
        let half = Worker {
            active_blocks: 50,
            ..IDLE
        };
        let full = Worker {
            active_blocks: 100,
            ..IDLE
        };
        // Scaled costs 0, 1/2, 1 at temperature 1/2: weights 1, e^-1, e^-2.
        let weights = [1.0, (-1.0f64).exp(), (-2.0f64).exp()];
        let sum: f64 = weights.iter().sum();
        const TIMES: usize = 40_000;
        let chosen = choices(kv(1.0, 0.5), 16, &[IDLE, half, full], TIMES);
        for (place, weight) in weights.iter().enumerate() {
            let share = chosen.iter().filter(|&&c| c == place).count() as f64 / TIMES as f64;
            let expected = weight / sum;
            // Five standard deviations of a binomial share.
            let tolerance = 5.0 * (expected * (1.0 - expected) / TIMES as f64).sqrt();
            assert!(
                (share - expected).abs() < tolerance,
                "place {place}: {share} against {expected}"
            );
        }
        // Near 0 it is the cheapest, and equal costs are drawn evenly.
        assert!(
            choices(kv(1.0, 1e-6), 16, &[full, IDLE], 100)
                .iter()
                .all(|&c| c == 1)
        );
        let even = choices(kv(1.0, 1.0), 16, &[IDLE, IDLE], TIMES);
        let first = even.iter().filter(|&&c| c == 0).count() as f64 / TIMES as f64;
        assert!((first - 0.5).abs() < 0.0125, "{first}"); // five standard deviations
    }

    #[test]
    fn round_robin_takes_turns() {
        assert_eq!(
            choices(RoundRobin, 16, &[IDLE; 3], 7),
            [0, 1, 2, 0, 1, 2, 0]
        );
    }

    #[test]
    fn random_is_even() {
        const TIMES: usize = 40_000;
        let chosen = choices(Random, 16, &[IDLE; 4], TIMES);
        for place in 0..4 {
            let count = chosen.iter().filter(|&&c| c == place).count() as f64;
            let five_sigma = 5.0 * (TIMES as f64 * 0.25 * 0.75).sqrt();
            assert!((count - TIMES as f64 / 4.0).abs() < five_sigma, "{count}");
        }
    }

    #[test]
    fn power_of_two_takes_the_lighter_of_two_different_ones() {
        let requests = |requests| Worker { requests, ..IDLE };
        let workers = [requests(5), requests(1), requests(9), requests(3)];
        const TIMES: usize = 24_000;
        let chosen = choices(PowerOfTwo, 16, &workers, TIMES);
        // Of six pairs, the lightest wins three, the next two, the next one, the heaviest none.
        for (place, wins) in [(0, 1), (1, 3), (2, 0), (3, 2)] {
            let expected = f64::from(wins) / 6.0;
            let share = chosen.iter().filter(|&&c| c == place).count() as f64 / TIMES as f64;
            let tolerance = 5.0 * (expected * (1.0 - expected) / TIMES as f64).sqrt();
            assert!((share - expected).abs() <= tolerance, "{place}: {share}");
        }
        check_choice(PowerOfTwo, 16, &[requests(5)], 0);
    }

    #[test]
    fn least_requests_and_least_tokens_differ() {
        let many_short = Worker {
            requests: 9,
            prefill_tokens: 50,
            decode_tokens: 50,
            ..IDLE
        };
        let one_long = Worker {
            requests: 1,
            prefill_tokens: 30_000,
            ..IDLE
        };
        check_choice(LeastRequests, 16, &[many_short, one_long], 1);
        check_choice(LeastTokens, 16, &[one_long, many_short], 1);
        // Ties: tokens, then requests, then the lowest rank.
        let short = Worker {
            requests: 1,
            decode_tokens: 10,
            ..IDLE
        };
        check_choice(LeastRequests, 16, &[one_long, short, short], 1);
        let crowd = Worker {
            requests: 2,
            decode_tokens: 10,
            ..IDLE
        };
        check_choice(LeastTokens, 16, &[crowd, short, short], 1);
    }

    #[test]
    fn no_candidate_no_choice() {
        let fleet = fleet(1, RouterConfig::default());
        let none = Candidates {
            fleet: &fleet,
            targets: &[],
            hits: None,
            views: None,
            order: None,
        };
        let prompt = Prompt::from_tokens(&[1], 16, BlockHash(0)).unwrap();
        let request = RouteRequest {
            prompt: &prompt,
            max_tokens: 1,
            session: None,
            direct: None,
            only: None,
            exclude: &[],
        };
        for temperature in [0.0, 1.0] {
            let mut policies: Vec<Box<dyn RoutePolicy>> = vec![
                Box::new(RoundRobin),
                Box::new(Random),
                Box::new(PowerOfTwo),
                Box::new(LeastRequests),
                Box::new(LeastTokens),
                Box::new(kv(1.0, temperature)),
            ];
            for policy in &mut policies {
                assert_eq!(policy.choose(&none, &request, &mut Rng::new(0)), None);
            }
        }
    }
}
