//! A shard's requests of real engines, as a driver of the [`Dispatcher`].
//!
//! Each decision goes to the task that serves the request's client, which carries it out. Engines transfer keys
//! and values among themselves, so that nothing has to be waited for here but room for queued requests.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use slipstream_base::{SimTime, WorkerId};
use slipstream_dispatch::{Action, Dispatcher, Env, Request, Role, Via};
use slipstream_planes::clock::monotonic_ns;
use tokio::sync::Notify;

use super::Upstream;
use super::seat::{Decision, Ticket};
use crate::door::alarm::Alarm;
use crate::door::refusals::{loss, rejection};
use crate::openai::ApiError;

/// While requests are queued, room that other shards' requests gave back is looked for this often, ns.
const QUEUE_LOOK_NS: u64 = 5_000_000;

/// The dispatcher, and the requests that it has not ended.
pub(super) struct Dispatching {
    dispatcher: RefCell<Dispatcher>,
    open: RefCell<OpenRequests>,
    /// Something was queued.
    changed: Notify,
    /// Requests in the queue when it was last looked at.
    queued_seen: Cell<usize>,
}

/// Requests by number in the dispatcher, and where decisions about them go.
#[derive(Default)]
struct OpenRequests(Vec<Option<(Box<Request>, Rc<Ticket>)>>);

impl OpenRequests {
    fn keep(&mut self, id: u32, request: &Request, ticket: Rc<Ticket>) {
        if self.0.len() <= id as usize {
            self.0.resize_with(id as usize + 1, || None);
        }
        self.0[id as usize] = Some((Box::new(request.clone()), ticket));
    }

    fn remove(&mut self, id: u32) {
        if let Some(place) = self.0.get_mut(id as usize) {
            *place = None;
        }
    }

    fn ticket(&self, id: u32) -> Option<Rc<Ticket>> {
        let (_, ticket) = self.0.get(id as usize)?.as_ref()?;
        Some(ticket.clone())
    }
}

/// The open requests, for the dispatcher to read while it decides.
struct Surroundings<'a>(&'a RefCell<OpenRequests>);

impl Env for Surroundings<'_> {
    fn request(&self, id: u32) -> Request {
        let open = self.0.borrow();
        let request = open.0[id as usize].as_ref();
        (*request.expect("a request is kept until it is over").0).clone()
    }

    fn latency_ns(&self, _: WorkerId, _: WorkerId, _: Via) -> u64 {
        0
    }
}

impl Dispatching {
    pub(super) fn new(dispatcher: Dispatcher) -> Dispatching {
        Dispatching {
            dispatcher: RefCell::new(dispatcher),
            open: RefCell::default(),
            changed: Notify::new(),
            queued_seen: Cell::new(0),
        }
    }

    fn surroundings(&self) -> Surroundings<'_> {
        Surroundings(&self.open)
    }

    fn queued(&self) -> usize {
        self.dispatcher.borrow().queued()
    }
}

fn now() -> SimTime {
    SimTime(monotonic_ns())
}

impl Upstream {
    /// Submits a request. Decisions go to `ticket`, the first one perhaps before this returns.
    pub(super) fn submit(&self, id: u32, request: &Request, ticket: Rc<Ticket>) {
        let of = &self.dispatching;
        of.open.borrow_mut().keep(id, request, ticket);
        of.dispatcher
            .borrow_mut()
            .submit(now(), id, request, &mut of.surroundings(), None);
        self.pass_on();
    }

    /// Request `id` did not reach `worker`, or got no byte of an answer there.
    pub(super) fn on_not_taken(&self, id: u32, worker: WorkerId) {
        let of = &self.dispatching;
        of.dispatcher
            .borrow_mut()
            .on_not_taken(now(), id, worker, &mut of.surroundings());
        self.pass_on();
    }

    /// The prompt of request `id` was computed for another worker.
    pub(super) fn on_prefilled(&self, id: u32) {
        let of = &self.dispatching;
        of.dispatcher
            .borrow_mut()
            .on_prefilled(now(), id, &of.surroundings());
        self.pass_on();
    }

    /// The worker that answers request `id`, whose prompt another one computes.
    pub(super) fn decode_worker(&self, id: u32) -> Option<WorkerId> {
        let dispatcher = self.dispatching.dispatcher.borrow();
        dispatcher.prefill_rank(id)?;
        Some(dispatcher.decode_rank(id)?.worker)
    }

    /// The prompt of request `id` does not reach the worker that decodes it.
    pub(super) fn on_prefill_failed(&self, id: u32) {
        let of = &self.dispatching;
        of.dispatcher
            .borrow_mut()
            .on_prefill_failed(now(), id, &mut of.surroundings());
        self.pass_on();
    }

    /// The answer to request `id` has begun: its worker has its prompt, if another one computed it.
    pub(super) fn on_begun(&self, id: u32) {
        let of = &self.dispatching;
        let reserved = of
            .dispatcher
            .borrow_mut()
            .on_reserved(now(), id, 0, &of.surroundings());
        if reserved {
            self.pass_on();
        }
        of.dispatcher.borrow_mut().on_first_token(id);
    }

    /// The answer to request `id` is complete.
    pub(super) fn on_ended(&self, id: u32) {
        self.dispatching.dispatcher.borrow_mut().on_ended(id);
        self.pass_on();
        self.dispatching.open.borrow_mut().remove(id);
    }

    /// The client of request `id` is gone.
    pub(super) fn cancel(&self, id: u32) {
        self.dispatching.dispatcher.borrow_mut().cancel(id);
        self.pass_on();
        self.dispatching.open.borrow_mut().remove(id);
    }

    /// Lets queued requests go once there is room, for as long as the shard runs.
    pub(crate) async fn carry(self: Rc<Upstream>) {
        let mut alarm = Alarm::new();
        loop {
            let next = self.look_at_queue();
            tokio::select! {
                biased;
                () = self.dispatching.changed.notified() => {}
                () = alarm.wait_until(next) => {}
            }
        }
    }

    /// Looks for room for queued requests. Returns when to look again, ns.
    fn look_at_queue(&self) -> Option<u64> {
        let of = &self.dispatching;
        if of.queued() == 0 {
            return None;
        }
        let now = now();
        {
            let mut dispatcher = of.dispatcher.borrow_mut();
            dispatcher.on_timeout(now);
            // Other shards' requests may have ended.
            dispatcher.on_fleet_changed();
        }
        if of.queued() > 0 {
            of.dispatcher
                .borrow_mut()
                .admit(now, &mut of.surroundings());
            self.pass_on();
        }
        (of.queued() > 0).then_some(now.0 + QUEUE_LOOK_NS)
    }

    /// Passes what the dispatcher has decided to the clients' tasks.
    fn pass_on(&self) {
        let of = &self.dispatching;
        loop {
            // A borrow of its own: actions lead to further inputs.
            let action = of.dispatcher.borrow_mut().poll_action();
            let Some(action) = action else {
                break;
            };
            let ticket = of.open.borrow().ticket(action.id());
            if let Some(ticket) = ticket {
                self.deliver(&ticket, action);
            }
        }
        let queued = of.queued();
        self.shard().metrics.requests_queued.set(queued as u64);
        // A retry may queue a request as well: `carry` looks for room from then on.
        if queued > of.queued_seen.replace(queued) {
            of.changed.notify_one();
        }
    }

    /// Passes a decision about a request to its client's task.
    fn deliver(&self, ticket: &Ticket, action: Action) {
        let metrics = &self.shard().metrics;
        let id = action.id();
        let decision = match action {
            Action::Start { rank, role, .. } => {
                metrics
                    .plane
                    .prompts_apart
                    .add(u64::from(role == Role::Prefill));
                self.count_expected_hits(id, rank.worker, role);
                Decision::Start(rank.worker, role)
            }
            // It is over when the answer begins.
            Action::Transfer { attempt, .. } => {
                let mut dispatcher = self.dispatching.dispatcher.borrow_mut();
                dispatcher.on_transferred(id, attempt);
                return;
            }
            Action::Rejected { error, failed, .. } => {
                Decision::Over(rejection(metrics, &error, failed))
            }
            Action::Lost { worker, failed, .. } => {
                Decision::Over(loss(metrics, worker, failed, false))
            }
            Action::Refused { .. } => Decision::Over(ApiError::overloaded(
                "no engine takes the request; try again",
                1,
            )),
            // Its task drops the connection; it is at one engine at a time.
            Action::Kill { .. }
            | Action::CancelTransfer { .. }
            | Action::Receive { .. }
            | Action::Release { .. } => return,
        };
        if matches!(decision, Decision::Over(_)) {
            self.dispatching.open.borrow_mut().remove(id);
        }
        ticket.set(decision);
    }

    /// Counts how much of the prompt of request `id` the router expects `worker`, which computes it, to have cached.
    fn count_expected_hits(&self, id: u32, worker: WorkerId, role: Role) {
        if role == Role::Decode {
            return; // another engine computes the prompt
        }
        let dispatcher = self.dispatching.dispatcher.borrow();
        if let Some(charge) = dispatcher.prompt_charge(id)
            && let Some(engine) = self.engine(worker)
        {
            let counters = &engine.counters;
            counters
                .prompt_blocks
                .fetch_add(charge.prompt_blocks(), Relaxed);
            counters.hit_blocks.fetch_add(charge.hit_blocks(), Relaxed);
        }
    }
}
