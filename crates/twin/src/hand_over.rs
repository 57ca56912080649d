//! Prompts that one worker computes for another.
//!
//! ```text
//!  pull   frontend ─► prefill engine … computed, blocks held ─► frontend ─► decode engine … has room
//!                        ▲                                                        │
//!                        └──────────── asks, gets keys and values ◄───────────────┘  then lets go
//!  push   frontend ─► decode engine … has room ─► prefill engine … computed ─► sends them, lets go
//! ```

use slipstream_base::cluster::HandOver;
use slipstream_base::{RankId, RequestId, SimTime};
use slipstream_engine::Reserved;
use slipstream_report::PassRecord;
use slipstream_router::RouteRequest;

use crate::node::{Flight, Node, Remote};
use crate::parts::Side;
use crate::sim::{Sim, Sink, To, What};

impl Side {
    /// The node of a rank that this side's router chose.
    pub(crate) fn node_of(&self, rank: RankId) -> u32 {
        let target = self.fleet.target_of(rank);
        self.nodes[target.expect("the router chose one of its targets")]
    }

    /// Finds a node that computes a prompt of which `uncached` tokens are left to compute where it is
    /// decoded. `None` if that is better done there: it is short, or everybody here is busy or gone.
    pub(crate) fn take_prompt(
        &mut self,
        now: SimTime,
        route: &RouteRequest<'_>,
        uncached: u32,
        nodes: &[Node],
    ) -> Option<Remote> {
        if !self.router.takes_prompt(uncached) {
            return None;
        }
        let routed = self.route(now, route, nodes).ok()?;
        if !self.router.computes_soon(&routed) {
            return None;
        }
        Some(Remote {
            node: self.node_of(routed.target),
            active: routed.active,
            cached_tokens: 0,
            computed: false,
            sent: None,
        })
    }
}

impl Flight {
    pub(crate) fn node(&self, to: To) -> u32 {
        match (to, &self.remote) {
            (To::Prefill, Some(remote)) => remote.node,
            _ => self.target,
        }
    }
}

impl Sim<'_> {
    /// A pass of a node that computes prompts for others ends.
    pub(crate) fn end_prefill(&mut self, node: u32, sink: &mut dyn Sink) {
        let mut out = std::mem::take(&mut self.out);
        let n = &mut self.nodes[node as usize];
        n.finish(&mut out);
        self.tally.passes += 1;
        if let Some(side) = &mut self.prefill {
            side.on_kv(self.now, node, n.life, &out.kv);
        }
        n.tell(self.now, &out, &mut self.flights, &mut self.tally.totals);
        if let Some(watch) = &n.watch {
            sink.on_pass(&PassRecord {
                engine: node,
                start: out.start,
                end: out.end,
                fpm: &out.fpm,
                tokens: 0, // the answer's first token is computed where it is decoded
                used_blocks: watch.used_blocks,
                preemptions: watch.preempted,
                gaps: &watch.gaps,
                arrived: &out.arrived,
            });
        }
        for first in &out.first {
            let flight = self.flights.get_mut(first.id);
            flight.admitted.get_or_insert(first.admitted);
            flight.cached_tokens = first.cached_tokens;
        }
        for done in &out.finished {
            self.on_computed(done.id, node);
        }
        self.out = out;
    }

    /// A prompt has been computed; its blocks are held.
    fn on_computed(&mut self, id: RequestId, node: u32) {
        let flight = self.flights.get_mut(id);
        let (slot, ticket) = (id.0 as u32, flight.ticket);
        flight.prefill = Some(node);
        flight.hops.prefilled = Some(self.now);
        let remote = flight.remote.as_mut();
        let remote = remote.expect("its blocks are held until they have come");
        remote.computed = true;
        remote.active.on_first_token();
        let rank = |node: u32| self.nodes[node as usize].rank;
        match self.cluster.kv.hand_over {
            HandOver::Pull => {
                let (from, to) = (rank(node).worker, rank(flight.target).worker);
                let at = self.now + self.wire.latency_ns(from, to, true);
                let to = To::Serve;
                self.later(at, What::Deliver { slot, ticket, to });
            }
            HandOver::Push => self.later(self.now, What::Fetch { slot, ticket }),
        }
    }

    /// A node has room for a prompt that is, or will be, computed elsewhere.
    pub(crate) fn on_reserved(&mut self, node: u32, reserved: Reserved) {
        let flight = self.flights.get_mut(reserved.id);
        let (slot, ticket) = (reserved.id.0 as u32, flight.ticket);
        let remote = flight.remote.as_mut();
        let remote = remote.expect("it waits for its prompt to come");
        remote.cached_tokens = reserved.cached_tokens;
        let worker = |node: u32| self.nodes[node as usize].rank.worker;
        let latency_ns = self
            .wire
            .latency_ns(worker(node), worker(remote.node), false);
        let to = To::Prefill;
        let what = match self.cluster.kv.hand_over {
            HandOver::Pull => What::Fetch { slot, ticket },
            HandOver::Push => What::Deliver { slot, ticket, to },
        };
        self.later(self.now + latency_ns, what);
    }

    /// A prompt's keys and values begin to cross the network.
    pub(crate) fn fetch(&mut self, slot: u32, ticket: u64) {
        let Some(flight) = self.flights.find(slot, ticket) else {
            return;
        };
        let tokens = flight.request.prompt.tokens();
        let remote = flight.remote.as_mut();
        let remote = remote.expect("its prompt has not come yet");
        let worker = |node: u32| self.nodes[node as usize].rank.worker;
        let received = What::Received { slot, ticket };
        let (bytes, transfer) = self.wire.send_kv(
            self.now,
            worker(remote.node),
            worker(flight.target),
            tokens - remote.cached_tokens,
            received,
        );
        remote.sent = Some((self.now, transfer));
        self.tally.hand_overs.bytes += bytes;
        if transfer.is_none() {
            self.later(self.now, received);
        }
    }

    /// A prompt's keys and values have come.
    pub(crate) fn received(&mut self, slot: u32, ticket: u64) {
        let Some(flight) = self.flights.find(slot, ticket) else {
            return;
        };
        let remote = flight.remote.take();
        let Remote {
            node, active, sent, ..
        } = *remote.expect("it comes once");
        let target = flight.target;
        drop(active);
        let (began, _) = sent.expect("it was sent");
        flight.hops.kv = Some((began, self.now));
        self.tally.hand_overs.times.record(self.now.since(began));
        let id = RequestId(slot.into());
        let took = self.nodes[target as usize].engine.receive(id);
        assert!(took, "it has room for what it asked for");
        self.wake(target);
        let let_go = self.nodes[node as usize].engine.release_held(id);
        assert!(let_go, "blocks are held until they have been fetched");
        self.wake(node);
    }
}
