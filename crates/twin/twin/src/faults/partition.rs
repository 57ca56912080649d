//! Some workers and all others, the frontend included, do not reach each other.
//!
//! Messages across wait, as those of a TCP connection do. If the partition is over before the peers' deadline they
//! arrive; else the connections are closed: the frontend continues the requests elsewhere, and the workers end theirs.

use slipstream_base::width::to_u32;
use slipstream_base::{Role, SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, Fault, HandOver};
use slipstream_dispatch::Attempt;

use super::{Faults, Keeps, Sim, Sink};
use crate::event::{Event, Step};

/// A message that waits for the end of a partition.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Held {
    /// A request, before it reaches its node.
    Deliver { step: Step },
    /// Tokens, before they reach the frontend.
    Frame { frame: u32 },
    /// The KV transfer of a prompt.
    Fetch {
        slot: u32,
        attempt: Attempt,
        tokens: u32,
    },
}

/// The partitions of a run, and the messages that wait.
pub(super) struct Partitions {
    /// Active ones: their workers, rising, and the event.
    active: Vec<(Vec<WorkerId>, u32)>,
    held: Vec<Held>,
    /// Events that closed the connections of their workers.
    closed: Vec<(Vec<WorkerId>, u32)>,
    /// By worker: until when its KV events wait; `SimTime::MAX` if they are lost, as the connection will be closed.
    kv: Vec<SimTime>,
}

impl Partitions {
    pub(super) fn new(workers: usize) -> Partitions {
        Partitions {
            active: Vec::new(),
            held: Vec::new(),
            closed: Vec::new(),
            kv: vec![SimTime::ZERO; workers],
        }
    }

    /// Whether the connection of a worker to the frontend is closed.
    pub(super) fn are_closed(&self, worker: WorkerId) -> bool {
        self.closed.iter().any(|(of, _)| of.contains(&worker))
    }

    /// Whether the KV events of a worker are lost.
    pub(super) fn lose_kv(&self, worker: WorkerId) -> bool {
        self.kv[worker.index()] == SimTime::MAX
    }

    /// Until when KV events of a worker wait.
    pub(super) fn held_until(&self, worker: WorkerId) -> SimTime {
        if self.lose_kv(worker) {
            SimTime::ZERO
        } else {
            self.kv[worker.index()]
        }
    }
}

impl Faults {
    /// Whether tokens may reach clients later than their passes end.
    pub(crate) fn delay_output(cluster: &Cluster) -> bool {
        let divides = |fault| matches!(fault, Fault::Partition { .. });
        cluster.events.iter().any(|event| divides(event.fault))
    }

    pub(crate) fn has_partition(&self) -> bool {
        !self.partitions.active.is_empty()
    }

    /// Whether two workers do not reach each other; `None` is the frontend.
    pub(crate) fn divides(&self, a: Option<WorkerId>, b: Option<WorkerId>) -> bool {
        let among = |workers: &[WorkerId], of: Option<WorkerId>| {
            of.is_some_and(|of| workers.binary_search(&of).is_ok())
        };
        let active = self.partitions.active.iter();
        active
            .map(|(workers, _)| workers)
            .any(|workers| among(workers, a) != among(workers, b))
    }

    /// Keeps a message until a partition ends.
    pub(crate) fn hold(&mut self, message: Held) {
        self.partitions.held.push(message);
    }
}

impl Sim<'_> {
    /// Whether a request that is on its way to a node cannot reach it.
    pub(crate) fn is_cut_off(&self, step: Step) -> bool {
        let to = Some(self.nodes[step.node as usize].rank.worker);
        let worker = |rank: Option<slipstream_base::RankId>| rank.map(|rank| rank.worker);
        let faults = &self.faults;
        if !self.is_second(step.role) {
            return faults.divides(None, to);
        }
        match self.cluster.kv.hand_over {
            // The answer of the prefill worker goes to the frontend, which asks the decode worker.
            HandOver::Pull => {
                let from = worker(self.dispatch.prefill_rank(step.slot));
                faults.divides(from, None) || faults.divides(None, to)
            }
            HandOver::Push => {
                debug_assert_eq!(step.role, Role::Prefill);
                faults.divides(worker(self.dispatch.decode_rank(step.slot)), to)
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
        for worker in &workers {
            let known = &mut self.faults.partitions.kv[worker.index()];
            *known = kv.max(*known);
        }
        let partitions = &mut self.faults.partitions;
        partitions.active.push((workers.clone(), index));
        if kv == SimTime::MAX {
            self.plan_event(closes, Event::Sever { event: index });
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
                let from = self.dispatch.prefill_rank(*slot).map(|rank| rank.worker);
                let to = self.dispatch.decode_rank(*slot).map(|rank| rank.worker);
                matches!(flight.sent, Some((_, Some(_))))
                    && from.is_some()
                    && self.faults.divides(from, to)
            })
            .map(|(slot, _)| slot)
            .collect();
        for slot in crossing {
            let flight = self
                .flights
                .get_mut(slipstream_base::RequestId(slot.into()));
            if let (Some((_, Some(transfer))), Some((attempt, tokens))) =
                (flight.sent.take(), flight.fetch)
            {
                self.wire.cancel(self.now, transfer);
                self.faults.hold(Held::Fetch {
                    slot,
                    attempt,
                    tokens,
                });
            }
        }
    }

    /// The peers' deadline is over: the frontend and the workers of a partition close their connections.
    pub(crate) fn sever(&mut self, index: u32, sink: &mut dyn Sink) {
        let partitions = &mut self.faults.partitions;
        let Some((workers, _)) = partitions.active.iter().find(|(_, of)| *of == index) else {
            return;
        };
        let workers = workers.clone();
        partitions.closed.push((workers.clone(), index));
        for worker in workers {
            if !self.faults.down[worker.index()] {
                self.lose_worker(worker, Keeps::Cache, sink);
            }
            self.refresh_worker(worker);
            self.replace_lost(worker);
        }
    }

    /// A partition ends: messages arrive, and workers whose connections were closed connect again.
    pub(super) fn rejoin(&mut self, index: u32, sink: &mut dyn Sink) {
        let partitions = &mut self.faults.partitions;
        partitions.active.retain(|(_, of)| *of != index);
        partitions.closed.retain(|(_, of)| *of != index);
        let workers = &self.cluster.events[index as usize].workers;
        for worker in workers.iter().map(|&worker| WorkerId(worker)) {
            let partitions = &mut self.faults.partitions;
            let others = partitions.active.iter();
            if others.clone().any(|(of, _)| of.contains(&worker)) {
                continue;
            }
            let lost = partitions.lose_kv(worker);
            partitions.kv[worker.index()] = SimTime::ZERO;
            self.refresh_worker(worker);
            self.replace_lost(worker);
            let down = self.faults.down[worker.index()] || self.faults.frontend_is_down();
            for node in 0..to_u32(self.nodes.len()) {
                if lost && !down && self.nodes[node as usize].rank.worker == worker {
                    self.publish_snapshot(node);
                }
            }
        }
        for message in std::mem::take(&mut self.faults.partitions.held) {
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
