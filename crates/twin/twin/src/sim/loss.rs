//! A worker is lost: its requests, its caches and its connection.

use slipstream_base::{KvDelta, RequestId, WorkerId};
use slipstream_engine::Usage;

use super::Sim;
use crate::event::Event;
use crate::parts::RoutedNodes;
use crate::run::Sink;

/// The state that a lost worker keeps.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// Its process has ended.
    Nothing,
    /// Its connection is closed, and its requests ended with it.
    Cache,
}

impl Sim<'_> {
    /// The router that `node` publishes its KV events to.
    fn side_of_node(&mut self, node: u32) -> &mut RoutedNodes {
        self.model.side_of(self.nodes[node].role)
    }

    /// Plans the requests of routers that noticed a gap in the KV events of a rank.
    pub(super) fn plan_resyncs(&mut self) {
        while let Some((at, node, life)) = self.model.serve.resyncs.pop() {
            self.agenda.plan(at, Event::Resync { node, life });
        }
        while let Some((at, node, life)) = self.model.prefill.as_mut().and_then(|p| p.resyncs.pop())
        {
            self.agenda.plan(at, Event::Resync { node, life });
        }
    }

    /// Publishes the KV events of `node` that wait, and then all that its cache holds.
    pub(super) fn publish_snapshot(&mut self, node: u32) {
        if !self.side_of_node(node).indexes_kv {
            return; // its router asks the engines
        }
        let (now, life) = (self.agenda.now, self.nodes[node].life);
        let mut delta = KvDelta::default();
        if self.nodes[node].engine.take_kv(&mut delta) {
            self.side_of_node(node).on_kv(now, node, life, &delta);
        }
        self.nodes[node].engine.kv_snapshot(&mut delta);
        self.side_of_node(node).on_snapshot(now, node, life, delta);
    }

    /// The part of a request's answer by `target` that has reached its client.
    fn usage_of(&self, id: RequestId, target: u32) -> Usage {
        let node = &self.nodes[target];
        let (tokens, end) = self.wire.frames.under_way(target, node.life, id);
        let known = node.engine.usage_of(id).or(end.map(|done| done.usage));
        // It is on no engine while it, or its prompt, is in transfer.
        let mut usage = known.unwrap_or_else(|| Usage {
            prompt_tokens: self.flights.get(id).request.prompt.tokens(),
            ..Usage::default()
        });
        usage.output_tokens = usage.output_tokens.saturating_sub(tokens);
        usage
    }

    /// Removes a lost worker, with its part of every request.
    pub(super) fn lose_worker(&mut self, worker: WorkerId, keeps: Kept, sink: &mut dyn Sink) {
        if keeps == Kept::Nothing {
            self.faults.lose(worker);
        }
        for side in self.model.sides_mut() {
            match keeps {
                Kept::Nothing => side.on_worker_lost(worker),
                Kept::Cache => side.fleet.on_worker_lost(worker),
            }
        }
        // The clients' part of the answers, before the engines remove them.
        let hit: Vec<(u32, u32, Usage)> = (self.model.dispatch.requests_of(|of| of == worker))
            .into_iter()
            .map(|(slot, _)| {
                let lost = self.arrived_of(slot);
                let (target, usage) = lost.expect("a worker has a part of it");
                (slot, target, usage)
            })
            .collect();
        for &(slot, target, usage) in &hit {
            let flight = self.flights.get_mut(RequestId(slot.into()));
            if usage.output_tokens > 0 && flight.resuming.is_none() {
                flight.last = self.nodes[target].last_token(flight);
                flight.answered = usage.output_tokens;
                flight.resuming = Some((target, usage));
            }
        }
        for node in self.nodes.numbers_of(worker) {
            match keeps {
                Kept::Nothing => self.nodes[node].crash(),
                Kept::Cache => {
                    let engine = &mut self.nodes[node].engine;
                    for &(slot, ..) in &hit {
                        let id = RequestId(slot.into());
                        let _ = engine.abort(id) || engine.release_held(id);
                    }
                    self.disconnect(node);
                }
            }
        }
        for (slot, target, usage) in hit {
            let now = self.agenda.now;
            self.cause.lost = Some((target, usage));
            let (dispatch, mut env) = self.dispatching();
            dispatch.on_worker_gone(now, slot, worker, &mut env);
            self.carry_out(None, sink);
        }
    }

    /// The node that generates the answer of a request, and the part of it that has reached its client; `None` if no
    /// worker has a part of it.
    pub(super) fn arrived_of(&self, slot: u32) -> Option<(u32, Usage)> {
        let flight = self.flights.get(RequestId(slot.into()));
        if flight.resuming.is_some() {
            return flight.resuming; // no worker has added to it
        }
        let rank = self.model.dispatch.decode_rank(slot)?;
        let target = self.model.serve.node_of(rank);
        Some((target, self.usage_of(RequestId(slot.into()), target)))
    }

    /// The connection of `node` to its frontend is closed, and its sequences were removed: the pass under way has
    /// nothing to deliver.
    pub(super) fn disconnect(&mut self, node: u32) {
        let mut out = self.scratch.out.take().unwrap_or_default();
        while self.nodes[node].engine.in_pass() && !self.nodes[node].hangs {
            let n = &mut self.nodes[node];
            n.engine.finish_pass(&mut out);
            let (now, life) = (self.agenda.now, n.life);
            self.side_of_node(node).on_kv(now, node, life, &out.kv);
        }
        self.scratch.out = Some(out);
        self.nodes[node].frames_end = self.agenda.now;
        self.nodes[node].leave_sequences();
        self.nodes.wake(node);
    }
}
