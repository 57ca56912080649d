//! State of partitions: some workers and all others, the frontend included, do not reach each other.
//!
//! Messages across wait, as those of a TCP connection do. If the partition is over before the peers' deadline they
//! arrive; else the connections are closed: the frontend continues the requests elsewhere, and the workers end theirs.

use slipstream_base::{SimTime, WorkerId};
use slipstream_dispatch::Attempt;

use crate::event::Step;

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
pub(crate) struct Partitions {
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
    pub(crate) fn are_closed(&self, worker: WorkerId) -> bool {
        self.closed.iter().any(|(of, _)| of.contains(&worker))
    }

    /// Whether the KV events of a worker are lost.
    pub(crate) fn lose_kv(&self, worker: WorkerId) -> bool {
        self.kv[worker.index()] == SimTime::MAX
    }

    /// Until when KV events of a worker wait.
    pub(crate) fn held_until(&self, worker: WorkerId) -> SimTime {
        if self.lose_kv(worker) {
            SimTime::ZERO
        } else {
            self.kv[worker.index()]
        }
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Whether two workers do not reach each other; `None` is the frontend.
    pub(crate) fn divide(&self, a: Option<WorkerId>, b: Option<WorkerId>) -> bool {
        let among = |workers: &[WorkerId], of: Option<WorkerId>| {
            of.is_some_and(|of| workers.binary_search(&of).is_ok())
        };
        let mut active = self.active.iter().map(|(workers, _)| workers);
        active.any(|workers| among(workers, a) != among(workers, b))
    }

    /// Keeps a message until a partition ends.
    pub(crate) fn hold(&mut self, message: Held) {
        self.held.push(message);
    }

    /// The partition of `event` begins. The KV events of its workers wait until `kv`.
    pub(crate) fn begin(&mut self, event: u32, workers: &[WorkerId], kv: SimTime) {
        for worker in workers {
            let known = &mut self.kv[worker.index()];
            *known = kv.max(*known);
        }
        self.active.push((workers.to_vec(), event));
    }

    /// The connections that the partition of `event` divides are closed. Returns its workers, if it is active.
    pub(crate) fn close(&mut self, event: u32) -> Option<Vec<WorkerId>> {
        let (workers, _) = self.active.iter().find(|(_, of)| *of == event)?;
        let workers = workers.clone();
        self.closed.push((workers.clone(), event));
        Some(workers)
    }

    /// The partition of `event` ends.
    pub(crate) fn end(&mut self, event: u32) {
        self.active.retain(|(_, of)| *of != event);
        self.closed.retain(|(_, of)| *of != event);
    }

    /// Whether a partition has `worker`.
    pub(crate) fn have(&self, worker: WorkerId) -> bool {
        self.active.iter().any(|(of, _)| of.contains(&worker))
    }

    /// A worker connects again. Returns whether its KV events were lost.
    pub(crate) fn reconnect(&mut self, worker: WorkerId) -> bool {
        let lost = self.lose_kv(worker);
        self.kv[worker.index()] = SimTime::ZERO;
        lost
    }

    /// Takes the messages that wait.
    pub(crate) fn take_held(&mut self) -> Vec<Held> {
        std::mem::take(&mut self.held)
    }
}
