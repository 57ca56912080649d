//! Several models in one cluster. Each has routers, a dispatcher and counts of its own, as a server of one model has: what
//! another model's requests do changes none of its decisions.
//!
//! [`Sim`] holds the parts of one model, and exchanges them before it processes an event of another.

use slipstream_base::{BlockHash, SimTime};
use slipstream_config::cluster::Cluster;
use slipstream_dispatch::Dispatcher;
use slipstream_engine::timing::ApiTime;

use crate::outcome::ModelOutcome;
use crate::parts::RoutedNodes;
use crate::sim::Sim;
use crate::tally::Tally;

/// The parts that each model has for itself.
pub(crate) struct ModelParts {
    pub(crate) serve: RoutedNodes,
    pub(crate) prefill: Option<RoutedNodes>,
    pub(crate) dispatch: Dispatcher,
    pub(crate) root: BlockHash,
    pub(crate) context_max: u32,
    pub(crate) api_time: ApiTime,
    pub(crate) tally: Tally,
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
}

impl Sim<'_> {
    /// From now on the run holds the parts of `model`.
    #[inline]
    pub(crate) fn turn_to(&mut self, model: usize) {
        if model != self.models.current {
            self.exchange(model);
        }
    }

    /// As [`turn_to`](Self::turn_to), the model of `node`.
    #[inline]
    pub(crate) fn turn_to_node(&mut self, node: u32) {
        if !self.models.is_one() {
            self.turn_to(self.models.of_node(node));
        }
    }

    /// As [`turn_to`](Self::turn_to), the model of the request in `slot`, if there is one.
    #[inline]
    pub(crate) fn turn_to_slot(&mut self, slot: u32) {
        if !self.models.is_one()
            && let Some(model) = self.flights.model_of(slot)
        {
            self.turn_to(model as usize);
        }
    }

    #[cold]
    fn exchange(&mut self, model: usize) {
        let mut parts = self.models.parts[model]
            .take()
            .expect("only those of the current model are elsewhere");
        std::mem::swap(&mut self.serve, &mut parts.serve);
        std::mem::swap(&mut self.prefill, &mut parts.prefill);
        std::mem::swap(&mut self.dispatch, &mut parts.dispatch);
        std::mem::swap(&mut self.root, &mut parts.root);
        std::mem::swap(&mut self.context_max, &mut parts.context_max);
        std::mem::swap(&mut self.api_time, &mut parts.api_time);
        std::mem::swap(&mut self.tally, &mut parts.tally);
        self.models.parts[self.models.current] = Some(parts);
        self.models.current = model;
    }

    /// When a dispatcher has to look at its queue again.
    pub(crate) fn next_timeout(&self) -> Option<SimTime> {
        let others = self.models.others().map(|parts| &parts.dispatch);
        let all = std::iter::once(&self.dispatch).chain(others);
        all.filter_map(Dispatcher::next_timeout).min()
    }

    /// Requests that wait in the frontend.
    pub(crate) fn queued(&self) -> usize {
        let others = self.models.others().map(|parts| parts.dispatch.queued());
        self.dispatch.queued() + others.sum::<usize>()
    }

    /// Requests that have ended.
    pub(crate) fn ended(&self) -> u64 {
        let others = self.models.others().map(|parts| &parts.tally);
        let all = std::iter::once(&self.tally).chain(others);
        all.map(|tally| tally.totals.requests.sent).sum()
    }

    /// Figures of each model, and their sum, which the run holds from then on. None if there is one model.
    pub(crate) fn add_models(&mut self) -> Vec<ModelOutcome> {
        let mut outcomes = Vec::new();
        if self.models.is_one() {
            return outcomes;
        }
        let mut sum = Tally::default();
        for model in 0..self.models.len() {
            self.turn_to(model);
            let mut totals = self.tally.totals.clone();
            let under_way = self.flights.iter();
            let under_way = under_way.filter(|(_, flight)| flight.request.model as usize == model);
            totals.requests.unfinished = under_way.count() as u64;
            totals.requests.sent += totals.requests.unfinished;
            let mut outcome = ModelOutcome {
                name: self.models.names[model].clone(),
                totals,
                prefix_query_tokens: 0,
                prefix_hit_tokens: 0,
            };
            for (node, &of) in self.nodes.iter().zip(&self.models.of_node) {
                if of as usize == model {
                    let stats = node.engine.stats();
                    outcome.prefix_query_tokens += stats.prefix_query_tokens;
                    outcome.prefix_hit_tokens += stats.prefix_hit_tokens;
                }
            }
            outcomes.push(outcome);
            sum.add(&self.tally);
        }
        sum.ended_at = self.now;
        self.tally = sum;
        outcomes
    }
}
