//! The frontend stops, and another one takes its place.
//!
//! Its connections close: clients lose their streams, and workers end the requests that came over them. The next one
//! knows no load, no session and no cached block; each worker sends it a snapshot of its cache when it connects.

use slipstream_base::WorkerId;
use slipstream_base::width::to_u32;

use super::Sim;
use crate::host;
use crate::parts::RoutedNodes;
use crate::run::{FRONTEND_LOST, REFUSED, Sink, failure};

impl Sim<'_> {
    /// The frontend stops.
    pub(super) fn lose_frontend(&mut self, sink: &mut dyn Sink) {
        if !self.faults.stop_frontend() {
            return;
        }
        // The clients' part of the answers, before the engines remove them.
        let here = self.flights.iter().filter(|(_, flight)| !flight.away);
        let open: Vec<_> = here
            .map(|(slot, _)| {
                (
                    slot,
                    self.arrived_of(slot),
                    self.model.dispatch.retries(slot),
                )
            })
            .collect();
        let router = |side: &mut RoutedNodes, cluster| {
            side.restart(cluster);
            side.router()
        };
        let serve = router(&mut self.model.serve, self.cluster);
        let prefill = self
            .model
            .prefill
            .as_mut()
            .map(|side| router(side, self.cluster));
        self.model.dispatch.restart(serve, prefill);
        self.carry_out(None, sink);
        for node in 0..to_u32(self.nodes.len()) {
            self.disconnect(node);
        }
        self.host = host::of_cluster(self.cluster);
        let gone = failure(FRONTEND_LOST, "the frontend vanished under the request");
        for (slot, arrived, retries) in open {
            match arrived {
                Some(lost) => self.lose(slot, lost, gone, retries.into(), sink),
                None => self.refuse_for_good(slot, gone, retries.into(), sink),
            }
        }
    }

    /// A frontend runs again.
    pub(super) fn start_frontend(&mut self) {
        if !self.faults.start_frontend() {
            return;
        }
        for worker in 0..to_u32(self.faults.workers()) {
            self.refresh_worker(WorkerId(worker));
        }
        for node in 0..to_u32(self.nodes.len()) {
            let worker = self.nodes[node].rank.worker;
            let gone = self.faults.is_down(worker);
            if !gone && !self.faults.partitions.lose_kv(worker) {
                self.publish_snapshot(node);
            }
        }
    }

    /// Nobody accepts the connection of a request: its client tries again in a second, or gives up.
    pub(super) fn refuse_at_connect(&mut self, slot: u32, sink: &mut dyn Sink) {
        if !self.client_retries(slot, 1) {
            let retries = self.model.dispatch.retries(slot).into();
            let nobody = failure(REFUSED, "no frontend accepts connections");
            self.refuse_for_good(slot, nobody, retries, sink);
        }
    }
}
