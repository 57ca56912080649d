//! Several models in one cluster. Each has routers, a dispatcher and counts of its own, as a server of one model has: what
//! another model's requests do changes none of its decisions.
//!
//! The run holds the parts of one model, the current one, and exchanges them before it processes an event of another.

use slipstream_base::{BlockHash, KvDelta, RankId, SimTime};
use slipstream_config::cluster::Cluster;
use slipstream_dispatch::{Dispatcher, Role};
use slipstream_engine::timing::ApiTime;

use crate::flight::Flights;
use crate::node::{Node, Nodes, Phase};
use crate::outcome::ModelOutcome;
use crate::parts::RoutedNodes;
use crate::tally::Tally;

/// The parts that each model has for itself.
pub(crate) struct ModelParts {
    /// Takes whole requests, and answers whose prompts were computed elsewhere.
    pub(crate) serve: RoutedNodes,
    /// Takes prompts, if pools have that role.
    pub(crate) prefill: Option<RoutedNodes>,
    /// Owns the requests that are routed or wait for it.
    pub(crate) dispatch: Dispatcher,
    pub(crate) root: BlockHash,
    /// Tokens of a prompt and its answer at most.
    pub(crate) context_max: u32,
    /// Time from a request's arrival at the servers to the router, in a closed loop. In an open one the schedule has it.
    pub(crate) api_time: ApiTime,
    pub(crate) tally: Tally,
}

impl ModelParts {
    /// Its routers' nodes.
    pub(crate) fn sides(&self) -> impl Iterator<Item = &RoutedNodes> {
        [Some(&self.serve), self.prefill.as_ref()]
            .into_iter()
            .flatten()
    }

    pub(crate) fn sides_mut(&mut self) -> impl Iterator<Item = &mut RoutedNodes> {
        [Some(&mut self.serve), self.prefill.as_mut()]
            .into_iter()
            .flatten()
    }

    /// The router that nodes of `role` publish their KV events to.
    pub(crate) fn side_of(&mut self, role: Role) -> &mut RoutedNodes {
        match (role, &mut self.prefill) {
            (Role::Prefill, Some(side)) => side,
            _ => &mut self.serve,
        }
    }

    /// The node with `role` for a request.
    pub(crate) fn node_of(&self, role: Role, rank: RankId) -> u32 {
        match (role, &self.prefill) {
            (Role::Prefill, Some(side)) => side.node_of(rank),
            _ => self.serve.node_of(rank),
        }
    }

    /// Publishes blocks that left the cache of `number` without a pass: an idle engine has published all changes. `kv` is
    /// memory.
    pub(crate) fn publish_idle(
        &mut self,
        now: SimTime,
        number: u32,
        n: &mut Node,
        kv: &mut KvDelta,
    ) {
        if n.phase == Phase::Idle && n.engine.take_kv(kv) {
            self.side_of(n.role).on_kv(now, number, n.life, kv);
        }
    }
}

/// The models of a run.
#[derive(Default)]
pub(crate) struct Models {
    /// Their names; empty if there is one.
    names: Vec<String>,
    /// The one whose parts the run holds.
    current: usize,
    /// Parts of the others, by model.
    parts: Vec<Option<Box<ModelParts>>>,
    /// Of each node.
    of_node: Vec<u32>,
}

impl Models {
    /// The models of `cluster`, whose parts are `all`. The run has those of the first.
    pub(crate) fn new(cluster: &Cluster, mut all: Vec<ModelParts>) -> (Models, ModelParts) {
        let first = all.remove(0);
        if all.is_empty() {
            return (Models::default(), first);
        }
        let models = cluster.models();
        let place = |name: &str| (0..).zip(&models).find(|(_, model)| model.name == name);
        let of_node = cluster.workers().flat_map(|(_, pool)| {
            let (at, _) = place(&pool.model.name).expect("a pool's model is one of the cluster's");
            (0..pool.engine.data_parallel_size).map(move |_| at)
        });
        let parts = std::iter::once(None).chain(all.into_iter().map(|parts| Some(Box::new(parts))));
        let models = Models {
            current: 0,
            of_node: of_node.collect(),
            parts: parts.collect(),
            names: models.iter().map(|model| model.name.clone()).collect(),
        };
        (models, first)
    }

    /// Whether there is one.
    pub(crate) fn is_one(&self) -> bool {
        self.names.is_empty()
    }

    /// Number of models.
    pub(crate) fn len(&self) -> usize {
        self.names.len().max(1)
    }

    /// Parts of all models but the current one.
    pub(crate) fn others(&self) -> impl Iterator<Item = &ModelParts> {
        self.parts.iter().flatten().map(|parts| &**parts)
    }

    /// The model of a node.
    pub(crate) fn of_node(&self, node: u32) -> usize {
        self.of_node.get(node as usize).map_or(0, |&at| at as usize)
    }

    /// From now on the run holds the parts of `model` in `held`.
    #[inline]
    pub(crate) fn turn_to(&mut self, held: &mut ModelParts, model: usize) {
        if model != self.current {
            self.exchange(held, model);
        }
    }

    /// As [`turn_to`](Self::turn_to), the model of `node`.
    #[inline]
    pub(crate) fn turn_to_node(&mut self, held: &mut ModelParts, node: u32) {
        if !self.is_one() {
            self.turn_to(held, self.of_node(node));
        }
    }

    #[cold]
    fn exchange(&mut self, held: &mut ModelParts, model: usize) {
        let mut parts = self.parts[model]
            .take()
            .expect("only those of the current model are elsewhere");
        std::mem::swap(held, &mut *parts);
        self.parts[self.current] = Some(parts);
        self.current = model;
    }

    /// When a dispatcher has to check its queue again. `held` are the parts of the current model.
    pub(crate) fn next_timeout(&self, held: &ModelParts) -> Option<SimTime> {
        let others = self.others().map(|parts| &parts.dispatch);
        let all = std::iter::once(&held.dispatch).chain(others);
        all.filter_map(Dispatcher::next_timeout).min()
    }

    /// Requests that wait in the frontend.
    pub(crate) fn queued(&self, held: &ModelParts) -> usize {
        let others = self.others().map(|parts| parts.dispatch.queued());
        held.dispatch.queued() + others.sum::<usize>()
    }

    /// Requests that have ended.
    pub(crate) fn ended(&self, held: &ModelParts) -> u64 {
        let others = self.others().map(|parts| &parts.tally);
        let all = std::iter::once(&held.tally).chain(others);
        all.map(|tally| tally.totals.requests.sent).sum()
    }

    /// Figures of each model, and their sum, which `held` has from then on. None if there is one model.
    pub(crate) fn add_up(
        &mut self,
        held: &mut ModelParts,
        flights: &Flights,
        nodes: &Nodes,
        now: SimTime,
    ) -> Vec<ModelOutcome> {
        let mut outcomes = Vec::new();
        if self.is_one() {
            return outcomes;
        }
        let mut sum = Tally::default();
        for model in 0..self.len() {
            self.turn_to(held, model);
            let mut totals = held.tally.totals.clone();
            let under_way = flights.iter();
            let under_way = under_way.filter(|(_, flight)| flight.request.model as usize == model);
            totals.requests.unfinished = under_way.count() as u64;
            totals.requests.sent += totals.requests.unfinished;
            let mut outcome = ModelOutcome {
                name: self.names[model].clone(),
                totals,
                prefix_query_tokens: 0,
                prefix_hit_tokens: 0,
            };
            for (node, &of) in nodes.iter().zip(&self.of_node) {
                if of as usize == model {
                    let stats = node.engine.stats();
                    outcome.prefix_query_tokens += stats.prefix_query_tokens;
                    outcome.prefix_hit_tokens += stats.prefix_hit_tokens;
                }
            }
            outcomes.push(outcome);
            sum.add(&held.tally);
        }
        sum.ended_at = now;
        held.tally = sum;
        outcomes
    }
}
