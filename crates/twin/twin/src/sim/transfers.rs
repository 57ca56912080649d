//! Disaggregated prefill: the part of the engines and the network. The dispatcher decides the order
//! of the steps.

use slipstream_base::RequestId;
use slipstream_base::width::to_u32;
use slipstream_dispatch::{Attempt, Role};
use slipstream_engine::Reserved;
use slipstream_report::PassRecord;

use super::Sim;
use crate::event::Event;
use crate::faults::Held;
use crate::run::Sink;
use crate::wire::Arrival;

impl Sim<'_> {
    /// Processes what has arrived over the network by now.
    pub(super) fn take_from_wire(&mut self) {
        if self.wire.is_idle() {
            return;
        }
        let mut arrived = std::mem::take(&mut self.scratch.arrived);
        self.wire.take_arrived(self.agenda.now, &mut arrived);
        for arrival in arrived.drain(..) {
            match arrival {
                Arrival::Kv(event) => self.kv_arrived(event),
                Arrival::Request(event) => self.agenda.plan(self.agenda.now, event),
                Arrival::Frame(frame) => self.frame_received(frame),
            }
        }
        self.scratch.arrived = arrived;
    }

    /// A pass of a prefill node ends.
    pub(super) fn end_prefill(&mut self, node: u32, sink: &mut dyn Sink) {
        let mut out = self.scratch.out.take().unwrap_or_default();
        let n = &mut self.nodes[node];
        let watched = n.finish(&mut out);
        self.model.tally.passes += 1;
        if let Some(side) = &mut self.model.prefill {
            side.on_kv(self.agenda.now, node, n.life, &out.kv);
        }
        if let Some(peers) = &mut self.peers {
            peers.publish_host(self.agenda.now, node, n);
        }
        let n = &mut self.nodes[node];
        n.record_output(
            self.agenda.now,
            &out,
            &mut self.flights,
            &mut self.model.tally.totals,
        );
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
                flight.hops.prefilled = Some(self.agenda.now);
            }
            let (now, slot) = (self.agenda.now, to_u32(done.id.0));
            let (dispatch, env) = self.dispatching();
            let expected = dispatch.on_prefilled(now, slot, &env);
            assert!(expected, "its blocks are held until the transfer ends");
            self.carry_out(None, sink);
        }
        self.scratch.out = Some(out);
    }

    /// A node has reserved blocks for a prompt that another node computes.
    pub(super) fn on_reserved(&mut self, reserved: Reserved, sink: &mut dyn Sink) {
        let (now, slot) = (self.agenda.now, to_u32(reserved.id.0));
        let (dispatch, env) = self.dispatching();
        let expected = dispatch.on_reserved(now, slot, reserved.cached_tokens, &env);
        assert!(expected, "it waits for the transfer of its prompt");
        self.carry_out(None, sink);
    }

    /// Starts the KV transfer of a prompt.
    pub(super) fn fetch(&mut self, slot: u32, attempt: Attempt, tokens: u32) {
        if !self.model.dispatch.is_current(slot, attempt) {
            return;
        }
        let from = self.model.dispatch.prefill_rank(slot);
        let to = self.model.dispatch.decode_rank(slot);
        let (from, to) = from.zip(to).expect("its prompt was not transferred yet");
        if self
            .faults
            .partitions
            .divide(Some(from.worker), Some(to.worker))
        {
            return self.faults.partitions.hold(Held::Fetch {
                slot,
                attempt,
                tokens,
            });
        }
        let received = Event::Received { slot, attempt };
        let (bytes, transfer) =
            self.wire
                .send_kv(self.agenda.now, from.worker, to.worker, tokens, received);
        let flight = self.flights.get_mut(RequestId(slot.into()));
        (flight.sent, flight.fetch) = (Some((self.agenda.now, transfer)), Some((attempt, tokens)));
        self.model.tally.kv_transfers.bytes += bytes;
        if transfer.is_none() {
            self.kv_arrived(received);
        }
    }

    /// All bytes of a KV transfer have arrived, which leads to `event` once the thread of its receiver has run.
    pub(super) fn kv_arrived(&mut self, event: Event) {
        if let Event::Received { slot, .. } = event {
            self.turn_to_slot(slot);
        }
        if let Event::Received { slot, .. } = event
            && let Some(rank) = self.model.dispatch.decode_rank(slot)
            && self.threads.is_some()
        {
            let node = self.model.node_of(Role::Decode, rank);
            if let Some(threads) = &mut self.threads {
                return threads.transfer_ended(self.agenda.now, node, event);
            }
        }
        self.agenda.plan(self.agenda.now, event);
    }

    /// The KV transfer of a prompt has ended.
    pub(super) fn received(&mut self, slot: u32, attempt: Attempt, sink: &mut dyn Sink) {
        if !self.model.dispatch.on_transferred(slot, attempt) {
            return;
        }
        let flight = self.flights.get_mut(RequestId(slot.into()));
        let (began, _) = flight.sent.take().expect("it was sent");
        if !flight.is_resumed() {
            flight.hops.kv = Some((began, self.agenda.now));
        }
        self.model
            .tally
            .kv_transfers
            .times
            .record(self.agenda.now.since(began));
        self.carry_out(None, sink);
    }
}
