//! Disaggregated prefill: the part of the engines and the network. The dispatcher decides the order
//! of the steps.

use slipstream_base::width::to_u32;
use slipstream_base::{RankId, RequestId};
use slipstream_dispatch::{Attempt, Role};
use slipstream_engine::Reserved;
use slipstream_report::PassRecord;

use crate::event::Event;
use crate::faults::Held;
use crate::run::Sink;
use crate::sim::Sim;

impl Sim<'_> {
    /// A pass of a prefill node ends.
    pub(crate) fn end_prefill(&mut self, node: u32, sink: &mut dyn Sink) {
        let mut out = self.out.take().unwrap_or_default();
        let n = &mut self.nodes[node as usize];
        let watched = n.finish(&mut out);
        self.tally.passes += 1;
        if let Some(side) = &mut self.prefill {
            side.on_kv(self.now, node, n.life, &out.kv);
        }
        self.publish_host(node);
        let n = &mut self.nodes[node as usize];
        n.record_output(self.now, &out, &mut self.flights, &mut self.tally.totals);
        if let Some(watch) = &n.watch {
            sink.on_pass(&PassRecord {
                engine: node,
                start: out.start,
                end: out.end,
                fpm: &out.fpm,
                tokens: 0, // the answer's first token is computed where it is decoded
                used_blocks: watched.used_blocks,
                preemptions: watched.preempted,
                gaps: &watch.gaps,
                arrived: &out.arrived,
            });
        }
        for first in &out.first {
            let flight = self.flights.get_mut(first.id);
            if !flight.is_resumed() {
                flight.admitted = Some(first.admitted);
                flight.cached_tokens = first.cached_tokens;
                flight.lower = first.lower;
            }
        }
        for done in &out.finished {
            let flight = self.flights.get_mut(done.id);
            flight.prefill = Some(node);
            if !flight.is_resumed() {
                flight.hops.prefilled = Some(self.now);
            }
            let (now, slot) = (self.now, to_u32(done.id.0));
            let (dispatch, env) = self.dispatching();
            let expected = dispatch.on_prefilled(now, slot, &env);
            assert!(expected, "its blocks are held until the transfer ends");
            self.carry_out(None, sink);
        }
        self.out = Some(out);
    }

    /// A node has reserved blocks for a prompt that another node computes.
    pub(crate) fn on_reserved(&mut self, reserved: Reserved, sink: &mut dyn Sink) {
        let (now, slot) = (self.now, to_u32(reserved.id.0));
        let (dispatch, env) = self.dispatching();
        let expected = dispatch.on_reserved(now, slot, reserved.cached_tokens, &env);
        assert!(expected, "it waits for the transfer of its prompt");
        self.carry_out(None, sink);
    }

    /// Starts the KV transfer of a prompt.
    pub(crate) fn fetch(&mut self, slot: u32, attempt: Attempt, tokens: u32) {
        if !self.dispatch.is_current(slot, attempt) {
            return;
        }
        let from = self.dispatch.prefill_rank(slot);
        let to = self.dispatch.decode_rank(slot);
        let (from, to) = from.zip(to).expect("its prompt was not transferred yet");
        if self.faults.divides(Some(from.worker), Some(to.worker)) {
            return self.faults.hold(Held::Fetch {
                slot,
                attempt,
                tokens,
            });
        }
        let received = Event::Received { slot, attempt };
        let (bytes, transfer) =
            self.wire
                .send_kv(self.now, from.worker, to.worker, tokens, received);
        let flight = self.flights.get_mut(RequestId(slot.into()));
        (flight.sent, flight.fetch) = (Some((self.now, transfer)), Some((attempt, tokens)));
        self.tally.kv_transfers.bytes += bytes;
        if transfer.is_none() {
            self.kv_arrived(received);
        }
    }

    /// All bytes of a KV transfer have arrived, which leads to `event` once the thread of its receiver has run.
    pub(crate) fn kv_arrived(&mut self, event: Event) {
        if let Event::Received { slot, .. } = event {
            self.turn_to_slot(slot);
        }
        if let Event::Received { slot, .. } = event
            && let Some(rank) = self.dispatch.decode_rank(slot)
            && self.threads.is_some()
        {
            let node = self.node_of(Role::Decode, rank);
            if let Some(threads) = &mut self.threads {
                return threads.transfer_ended(self.now, node, event);
            }
        }
        self.plan_event(self.now, event);
    }

    /// The KV transfer of a prompt has ended.
    pub(crate) fn received(&mut self, slot: u32, attempt: Attempt, sink: &mut dyn Sink) {
        if !self.dispatch.on_transferred(slot, attempt) {
            return;
        }
        let flight = self.flights.get_mut(RequestId(slot.into()));
        let (began, _) = flight.sent.take().expect("it was sent");
        if !flight.is_resumed() {
            flight.hops.kv = Some((began, self.now));
        }
        self.tally.kv_transfers.times.record(self.now.since(began));
        self.carry_out(None, sink);
    }

    /// The node with `role` for a request.
    pub(crate) fn node_of(&self, role: Role, rank: RankId) -> u32 {
        match (role, &self.prefill) {
            (Role::Prefill, Some(side)) => side.node_of(rank),
            _ => self.serve.node_of(rank),
        }
    }
}
