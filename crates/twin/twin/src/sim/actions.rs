//! What the dispatcher decides is carried out.

use slipstream_base::{Prompt, RankId, RequestId};
use slipstream_dispatch::{Action, Role};

use super::Sim;
use crate::event::{Event, Step};
use crate::run::{REFUSED, Sink, WORKER_LOST, failure};

impl Sim<'_> {
    /// Carries out the dispatcher's actions. `prompt` is that of the current request, if known.
    pub(super) fn carry_out(&mut self, mut prompt: Option<Prompt>, sink: &mut dyn Sink) {
        while let Some(action) = self.model.dispatch.poll_action() {
            match action {
                Action::Start {
                    id: slot,
                    attempt,
                    role,
                    rank,
                    at,
                } => {
                    let step = Step {
                        slot,
                        attempt,
                        role,
                        node: self.model.node_of(role, rank),
                    };
                    if self.is_second(role) {
                        self.agenda.plan(at, Event::Deliver { step });
                    } else {
                        self.begin_step(step, prompt.take(), sink);
                    }
                }
                Action::Transfer {
                    id: slot,
                    attempt,
                    tokens,
                    at,
                    ..
                } => {
                    let fetch = Event::Fetch {
                        slot,
                        attempt,
                        tokens,
                    };
                    self.agenda.plan(at, fetch);
                }
                Action::CancelTransfer { id } => {
                    let flight = self.flights.get_mut(RequestId(id.into()));
                    if let Some((_, Some(transfer))) = flight.sent.take() {
                        self.wire.cancel(self.agenda.now, transfer);
                    }
                }
                Action::Kill { id, role, rank } => self.kill(RequestId(id.into()), role, rank),
                Action::Receive { id, rank } => self.receive(RequestId(id.into()), rank),
                Action::Release { id, rank } => self.release(RequestId(id.into()), rank),
                Action::Rejected { id, error, failed } => {
                    self.reject(id, &error, u32::from(failed.is_some()), sink);
                }
                Action::Lost {
                    id, worker, failed, ..
                } => {
                    let error = format!("worker {worker} vanished under the request");
                    let failed_over = u32::from(failed.is_some());
                    let lost = self.cause.lost.take();
                    let lost = lost.expect("only a crash loses a request");
                    self.lose(id, lost, failure(WORKER_LOST, &error), failed_over, sink);
                }
                Action::Refused { id, failed, .. } => {
                    self.on_refused(id, u32::from(failed.is_some()), sink);
                }
            }
        }
    }

    /// Takes a request from an engine.
    fn kill(&mut self, id: RequestId, role: Role, rank: RankId) {
        let node = self.model.node_of(role, rank);
        self.leave_plan(node);
        let engine = &mut self.nodes[node].engine;
        if engine.abort(id) || engine.release_held(id) {
            self.nodes.wake(node);
        }
    }

    /// The KV blocks of a prompt are on the engine that answers it.
    fn receive(&mut self, id: RequestId, rank: RankId) {
        let node = self.model.node_of(Role::Decode, rank);
        let took = self.nodes[node].engine.receive(id);
        assert!(took, "it has room for what it asked for");
        self.nodes.wake(node);
    }

    /// The engine that computed a prompt may forget its KV blocks.
    fn release(&mut self, id: RequestId, rank: RankId) {
        let node = self.model.node_of(Role::Prefill, rank);
        let released = self.nodes[node].engine.release_held(id);
        assert!(released, "blocks are held until they have been fetched");
        self.nodes.wake(node);
    }

    /// No engine can take a request.
    fn on_refused(&mut self, id: u32, failed_over: u32, sink: &mut dyn Sink) {
        let error = std::mem::take(&mut self.cause.refusal);
        match self.flights.get(RequestId(id.into())).resuming {
            Some(lost) => self.lose(id, lost, failure(WORKER_LOST, &error), failed_over, sink),
            None => self.refuse_for_good(id, failure(REFUSED, &error), failed_over, sink),
        }
    }
}
