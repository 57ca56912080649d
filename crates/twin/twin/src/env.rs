//! The dispatcher's view of the cluster: requests, caches and latencies at the time of a decision.

use std::collections::BTreeMap;

use slipstream_base::{BlockHash, Prompt, RequestId, SimTime, WorkerId};
use slipstream_dispatch::{self as dispatch, Env, Role, Via};
use slipstream_router::{CachedBlocks, Hits, ViewTurn};

use crate::flight::Flights;
use crate::node::Node;
use crate::parts::{Engines, RoutedNodes};
use crate::planned::PlannedPasses;
use crate::requests::{dispatch_request, prompt_of};
use crate::tally::Tally;
use crate::wire::Wire;

/// The dispatcher's view of the cluster.
pub(crate) struct DispatchEnv<'a> {
    pub(crate) serve: &'a mut RoutedNodes,
    pub(crate) prefill: Option<&'a mut RoutedNodes>,
    pub(crate) nodes: &'a mut [Node],
    pub(crate) planned: &'a mut PlannedPasses,
    pub(crate) tally: &'a mut Tally,
    pub(crate) flights: &'a Flights,
    pub(crate) wire: &'a Wire,
    pub(crate) pins: &'a Pins,
    pub(crate) root: BlockHash,
    /// The side whose router is about to choose.
    pub(crate) choosing: Role,
}

impl DispatchEnv<'_> {
    fn side(&self, role: Role) -> &RoutedNodes {
        match (role, &self.prefill) {
            (Role::Prefill, Some(side)) => side,
            _ => self.serve,
        }
    }

    fn engines(&self) -> Engines<'_> {
        let side = self.side(self.choosing);
        side.engines(self.nodes)
    }
}

impl CachedBlocks for DispatchEnv<'_> {
    fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        self.engines().overlap_of(target, blocks)
    }

    fn overlap(&self, blocks: &[BlockHash], out: &mut Hits) {
        self.engines().overlap(blocks, out);
    }
}

impl Env for DispatchEnv<'_> {
    fn request(&self, id: u32) -> dispatch::Request {
        let flight = self.flights.get(RequestId(id.into()));
        let prompt = prompt_of(&flight.request, self.serve.fleet.block_size(), self.root);
        let direct = self.pins.get(&flight.request.id().0).copied();
        dispatch::Request {
            answered: flight.answered,
            ..dispatch_request(
                &flight.request,
                prompt.expect("it was routed before"),
                direct,
            )
        }
    }

    fn before_route(&mut self, now: SimTime, role: Role, turn: ViewTurn, prompt: &Prompt) {
        self.choosing = role;
        let (planned, tally) = (&mut *self.planned, &mut *self.tally);
        planned.before_route(now, turn, prompt, self.nodes, self.serve, tally);
        let side = match (role, &mut self.prefill) {
            (Role::Prefill, Some(side)) => side,
            _ => &mut *self.serve,
        };
        side.refresh(now, turn, self.nodes);
    }

    fn caches(&self, role: Role) -> Option<&dyn CachedBlocks> {
        let asks = self.side(role).asks_engines();
        asks.then_some(self as &dyn CachedBlocks)
    }

    fn latency_ns(&self, from: WorkerId, to: WorkerId, via: Via) -> u64 {
        self.wire.latency_ns(from, to, via == Via::Frontend)
    }
}

/// The worker of each request that is not the router's to choose, by number of the request.
pub(crate) type Pins = BTreeMap<u64, WorkerId>;
