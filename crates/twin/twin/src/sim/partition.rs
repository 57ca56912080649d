//! A partition begins, closes connections, and ends.

use slipstream_base::{RankId, RequestId, Role, SimTime, WorkerId};
use slipstream_config::cluster::HandOver;

use super::Sim;
use super::loss::Kept;
use crate::event::{Event, Step};
use crate::faults::Held;
use crate::run::Sink;

impl Sim<'_> {
    /// Whether a request that is on its way to a node cannot reach it.
    pub(super) fn is_cut_off(&self, step: Step) -> bool {
        let to = Some(self.nodes[step.node].rank.worker);
        let worker = |rank: Option<RankId>| rank.map(|rank| rank.worker);
        let partitions = &self.faults.partitions;
        if !self.is_second(step.role) {
            return partitions.divide(None, to);
        }
        match self.cluster.kv.hand_over {
            // The answer of the prefill worker goes to the frontend, which asks the decode worker.
            HandOver::Pull => {
                let from = worker(self.model.dispatch.prefill_rank(step.slot));
                partitions.divide(from, None) || partitions.divide(None, to)
            }
            HandOver::Push => {
                debug_assert_eq!(step.role, Role::Prefill);
                partitions.divide(worker(self.model.dispatch.decode_rank(step.slot)), to)
            }
        }
    }

    /// A partition begins.
    pub(super) fn divide(&mut self, index: u32, peer_deadline_s: f64) {
        let event = &self.cluster.events[index as usize];
        let workers: Vec<WorkerId> = event.workers.iter().map(|&w| WorkerId(w)).collect();
        let closes = SimTime::from_secs_f64(event.at_s + peer_deadline_s);
        let ends = event.until_s.map(SimTime::from_secs_f64);
        let kv = match ends {
            Some(ends) if ends <= closes => ends,
            _ => SimTime::MAX,
        };
        self.faults.partitions.begin(index, &workers, kv);
        if kv == SimTime::MAX {
            self.agenda.plan(closes, Event::Sever { event: index });
        }
        self.stop_transfers();
        for worker in workers {
            self.refresh_worker(worker);
        }
    }

    /// KV transfers that a partition interrupts start again at its end.
    fn stop_transfers(&mut self) {
        let crossing: Vec<u32> = (self.flights.iter())
            .filter(|(slot, flight)| {
                let from = self
                    .model
                    .dispatch
                    .prefill_rank(*slot)
                    .map(|rank| rank.worker);
                let to = self
                    .model
                    .dispatch
                    .decode_rank(*slot)
                    .map(|rank| rank.worker);
                matches!(flight.sent, Some((_, Some(_))))
                    && from.is_some()
                    && self.faults.partitions.divide(from, to)
            })
            .map(|(slot, _)| slot)
            .collect();
        for slot in crossing {
            let flight = self.flights.get_mut(RequestId(slot.into()));
            if let (Some((_, Some(transfer))), Some((attempt, tokens))) =
                (flight.sent.take(), flight.fetch)
            {
                self.wire.cancel(self.agenda.now, transfer);
                self.faults.partitions.hold(Held::Fetch {
                    slot,
                    attempt,
                    tokens,
                });
            }
        }
    }

    /// The peers' deadline is over: the frontend and the workers of a partition close their connections.
    pub(super) fn sever(&mut self, index: u32, sink: &mut dyn Sink) {
        for worker in self.faults.partitions.close(index).unwrap_or_default() {
            if !self.faults.is_down(worker) {
                self.lose_worker(worker, Kept::Cache, sink);
            }
            self.refresh_worker(worker);
            self.replace_lost(worker);
        }
    }

    /// A partition ends: messages arrive, and workers whose connections were closed connect again.
    pub(super) fn rejoin(&mut self, index: u32, sink: &mut dyn Sink) {
        self.faults.partitions.end(index);
        let cluster = self.cluster;
        let workers = &cluster.events[index as usize].workers;
        for worker in workers.iter().map(|&worker| WorkerId(worker)) {
            if self.faults.partitions.have(worker) {
                continue;
            }
            let lost = self.faults.partitions.reconnect(worker);
            self.refresh_worker(worker);
            self.replace_lost(worker);
            let down = self.faults.is_down(worker) || self.faults.frontend_is_down();
            if lost && !down {
                for node in self.nodes.numbers_of(worker) {
                    self.publish_snapshot(node);
                }
            }
        }
        for message in self.faults.partitions.take_held() {
            match message {
                Held::Deliver { step } => self.deliver(step, None, sink),
                Held::Frame { frame } => self.frame_received(frame),
                Held::Fetch {
                    slot,
                    attempt,
                    tokens,
                } => self.fetch(slot, attempt, tokens),
            }
        }
    }
}
