//! A shard as a driver of the [`Dispatcher`]: it passes on what clients and workers do, and carries out
//! what the dispatcher decides.
//!
//! A sequence is named in the dispatcher by the slot of its answer's stream. Messages between two workers
//! of a request travel by way of the shard, which knows both: one entry or control per step, none per
//! token. The shard waits as long as the modelled network takes.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::sync::Arc;

use slipstream_base::{RankId, SimTime, Stage, WorkerId};
use slipstream_dispatch::{Action, Attempt, Dispatcher, Env, Request, Role, Via};
use slipstream_flows::TransferId;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::frame::NO_LIMIT;
use slipstream_planes::ring::SendError;
use slipstream_planes::{Registration, Reserved, StartRequest, StreamAddr, ToWorker};
use slipstream_router::{RouteError, Score};
use tokio::sync::Notify;

use crate::door::alarm::Alarm;
use crate::door::refusals::{loss, rejection};
use crate::openai::ApiError;
use crate::tokens::kv_network::{Arrival, KvNetwork};
use crate::tokens::remote::NotSent;
use crate::tokens::reply::{Reply, StreamRole, StreamSlot};
use crate::tokens::workers::{Transport, Workers};

/// While requests are queued, room that other shards' requests gave back is looked for this often, ns.
const QUEUE_LOOK_NS: u64 = 5_000_000;

/// A shard's dispatcher, and what it takes to carry its actions out.
pub(crate) struct Dispatching {
    dispatcher: RefCell<Dispatcher>,
    /// By number in the dispatcher.
    open: RefCell<Vec<Option<OpenRequest>>>,
    /// Where some workers compute prompts for others.
    network: Option<Arc<KvNetwork>>,
    /// Steps whose time has not come. Those of one time in the order in which they were planned.
    planned: RefCell<BinaryHeap<Reverse<(u64, u64, Step)>>>,
    sequence: Cell<u64>,
    /// Something was planned, sent or queued, or has arrived.
    changed: Arc<Notify>,
    /// The error for the client of the request that is being refused.
    refusal: RefCell<Option<ApiError>>,
    /// Requests in the queue when it was last looked at.
    queued_seen: Cell<usize>,
}

/// A sequence that the dispatcher owns.
struct OpenRequest {
    reply: Rc<Reply>,
    index: u32,
    addr: StreamAddr,
    /// The data to send it: until its first token has come, or until its end if another worker may
    /// continue it.
    start: Option<Box<StartRequest>>,
    resumes: bool,
    session: Option<u64>,
    direct: Option<WorkerId>,
    /// The attempt that the fields below belong to.
    attempt: Option<Attempt>,
    /// Its stream at the worker that computes its prompt for another.
    prefill_stream: Option<Registration<StreamSlot>>,
    /// The worker that generates its answer has it.
    answer_sent: bool,
    transfer: Option<TransferId>,
}

/// A step that waits for its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Start {
        id: u32,
        attempt: Attempt,
        role: Role,
        rank: RankId,
    },
    Transfer {
        id: u32,
        attempt: Attempt,
        tokens: u32,
    },
}

/// The open requests and the network, for the dispatcher to read while it decides.
struct Surroundings<'a> {
    open: &'a RefCell<Vec<Option<OpenRequest>>>,
    network: Option<&'a KvNetwork>,
}

impl Env for Surroundings<'_> {
    fn request(&self, id: u32) -> Request {
        let open = self.open.borrow();
        let job = open[id as usize].as_ref();
        let job = job.expect("a request is kept until it is over");
        let start = job.start.as_ref();
        let start = start.expect("what it takes to send it is kept while it may be sent");
        Request {
            answered: job.reply.state.borrow().answered(job.index),
            ..request(start, job.session, job.direct, job.resumes)
        }
    }

    fn latency_ns(&self, from: WorkerId, to: WorkerId, via: Via) -> u64 {
        let latency = |network: &KvNetwork| network.latency_ns(from, to, via == Via::Frontend);
        self.network.map_or(0, latency)
    }
}

fn request(
    start: &StartRequest,
    session: Option<u64>,
    direct: Option<WorkerId>,
    resumes: bool,
) -> Request {
    Request {
        prompt: start.request.prompt.clone(),
        max_tokens: start.request.params.max_tokens,
        session,
        direct,
        only: None,
        streams_input: start.more,
        whole: false,
        resumes,
        answered: 0,
    }
}

/// A sequence as it is submitted.
pub(crate) struct Submission {
    pub(crate) start: Box<StartRequest>,
    /// The client's session.
    pub(crate) session: Option<u64>,
    /// The worker that the client named.
    pub(crate) direct: Option<WorkerId>,
    /// Whether another worker may continue its answer.
    pub(crate) resumes: bool,
}

impl Dispatching {
    pub(crate) fn new(shard: u8, dispatcher: Dispatcher, network: Option<Arc<KvNetwork>>) -> Self {
        let changed = Arc::new(Notify::new());
        if let Some(network) = &network {
            network.on_change(shard, changed.clone());
        }
        Dispatching {
            dispatcher: RefCell::new(dispatcher),
            open: RefCell::default(),
            network,
            planned: RefCell::default(),
            sequence: Cell::new(0),
            changed,
            refusal: RefCell::default(),
            queued_seen: Cell::new(0),
        }
    }

    fn surroundings(&self) -> Surroundings<'_> {
        Surroundings {
            open: &self.open,
            network: self.network.as_deref(),
        }
    }

    /// Calls `look` with request `id`, if it is not over.
    fn with_request<R>(&self, id: u32, look: impl FnOnce(&mut OpenRequest) -> R) -> Option<R> {
        let mut open = self.open.borrow_mut();
        open.get_mut(id as usize)?.as_mut().map(look)
    }

    fn take_request(&self, id: u32) -> Option<OpenRequest> {
        self.open.borrow_mut().get_mut(id as usize)?.take()
    }

    fn keep(&self, id: u32, request: OpenRequest) {
        let mut open = self.open.borrow_mut();
        if open.len() <= id as usize {
            open.resize_with(id as usize + 1, || None);
        }
        open[id as usize] = Some(request);
    }

    fn plan(&self, at_ns: u64, step: Step) {
        let sequence = self.sequence.get();
        self.sequence.set(sequence + 1);
        let planned = Reverse((at_ns, sequence, step));
        self.planned.borrow_mut().push(planned);
        self.changed.notify_one();
    }

    /// When the next step is due, ns.
    fn next_due(&self) -> Option<u64> {
        let planned = self.planned.borrow();
        planned.peek().map(|&Reverse((at, ..))| at)
    }

    /// A step that is due at `now`, if one is.
    fn due(&self, now: u64) -> Option<Step> {
        let mut planned = self.planned.borrow_mut();
        let &Reverse((at, _, step)) = planned.peek()?;
        if at > now {
            return None;
        }
        planned.pop();
        Some(step)
    }

    /// The worker that computes the prompt of request `id` for another one.
    pub(crate) fn prefill_rank(&self, id: u32) -> Option<RankId> {
        self.dispatcher.borrow().prefill_rank(id)
    }

    /// Requests that are not over.
    #[cfg(feature = "sim")]
    pub(crate) fn open(&self) -> usize {
        self.dispatcher.borrow().open()
    }

    /// Requests in the queue.
    pub(crate) fn queued(&self) -> usize {
        self.dispatcher.borrow().queued()
    }

    /// The first token of request `id` came.
    pub(crate) fn on_first_token(&self, id: u32) {
        let mut dispatcher = self.dispatcher.borrow_mut();
        if dispatcher.on_first_token(id) && !dispatcher.resumes(id) {
            self.with_request(id, |job| job.start = None);
        }
    }

    /// Whether workers continue answers of others.
    pub(crate) fn keeps_requests(&self) -> bool {
        self.dispatcher.borrow().rules().resumes_max > 0
    }

    /// Whether another worker is to continue request `id` if its own fails it, within the limit.
    pub(crate) fn resumes(&self, id: u32) -> bool {
        self.dispatcher.borrow().resumes(id)
    }

    /// Input of request `id` was sent, which cannot be sent to another worker.
    pub(crate) fn on_input_sent(&self, id: u32) {
        self.dispatcher.borrow_mut().on_input_sent(id);
    }
}

impl Workers {
    /// Submits sequence `index` of `reply`, whose tokens come by `addr`. `scores` collects all candidates.
    ///
    /// # Errors
    /// Error for the client if no worker takes it.
    pub(crate) fn submit(
        &self,
        reply: &Rc<Reply>,
        index: u32,
        addr: StreamAddr,
        submission: Submission,
        scores: Option<&mut Vec<Score>>,
    ) -> Result<(), ApiError> {
        let Submission {
            start,
            session,
            direct,
            resumes,
        } = submission;
        let of = &self.dispatching;
        let id = addr.stream.slot;
        let request = request(&start, session, direct, resumes);
        reply
            .state
            .borrow_mut()
            .set_credit(index, start.credit_bytes);
        let job = OpenRequest {
            reply: reply.clone(),
            index,
            addr,
            start: Some(start),
            resumes,
            session,
            direct,
            attempt: None,
            prefill_stream: None,
            answer_sent: false,
            transfer: None,
        };
        of.keep(id, job);
        of.dispatcher.borrow_mut().submit(
            SimTime(monotonic_ns()),
            id,
            &request,
            &mut of.surroundings(),
            scores,
        );
        if let Some(error) = self.carry_out(Some(id)) {
            return Err(error);
        }
        Ok(())
    }

    /// The last token of request `id` came.
    pub(crate) fn on_ended(&self, id: u32) {
        self.dispatching.dispatcher.borrow_mut().on_ended(id);
        // A worker that ends it before its time leaves parts elsewhere.
        self.carry_out(None);
        self.dispatching.take_request(id);
    }

    /// The client of request `id` is gone: takes it off its workers.
    pub(crate) fn cancel(&self, id: u32) {
        self.dispatching.dispatcher.borrow_mut().cancel(id);
        self.carry_out(None);
        self.dispatching.take_request(id);
    }

    /// The prompt of request `id` was computed for another worker, at `at_ns` (0: now).
    pub(crate) fn on_prefilled(&self, id: u32, at_ns: u64) {
        let of = &self.dispatching;
        let at = past(at_ns);
        of.dispatcher
            .borrow_mut()
            .on_prefilled(at, id, &of.surroundings());
        self.carry_out(None);
    }

    /// The worker that decodes request `id` made room for its prompt.
    pub(crate) fn on_reserved(&self, id: u32, reserved: &Reserved) {
        let of = &self.dispatching;
        {
            let mut dispatcher = of.dispatcher.borrow_mut();
            if reserved.attempt != dispatcher.retries(id) {
                return; // of an earlier attempt
            }
            let at = past(reserved.at_ns.unwrap_or_default());
            dispatcher.on_reserved(at, id, reserved.cached_tokens, &of.surroundings());
        }
        self.carry_out(None);
    }

    /// `worker` ended request `id` before its time, as it shuts down.
    pub(crate) fn on_given_up(&self, id: u32, worker: WorkerId) {
        let of = &self.dispatching;
        let now = SimTime(monotonic_ns());
        of.dispatcher
            .borrow_mut()
            .on_given_up(now, id, worker, &mut of.surroundings());
        self.carry_out(None);
    }

    /// Whether `attempt` is the one under way at request `id`, as a worker repeats it.
    pub(crate) fn is_attempt(&self, id: u32, attempt: u8) -> bool {
        attempt == self.dispatching.dispatcher.borrow().retries(id)
    }

    /// `worker` refused request `id`; the client gets `error` if no other worker may take it.
    pub(crate) fn on_refused(
        &self,
        id: u32,
        worker: WorkerId,
        retry_elsewhere: bool,
        error: ApiError,
    ) {
        let of = &self.dispatching;
        let now = SimTime(monotonic_ns());
        of.dispatcher.borrow_mut().on_refused(
            now,
            id,
            worker,
            retry_elsewhere,
            &mut of.surroundings(),
        );
        of.refusal.replace(Some(error));
        self.carry_out(None);
        of.refusal.replace(None);
    }

    /// Workers disappeared, and with them their parts of all requests.
    pub(crate) fn on_workers_gone(&self, gone: impl Fn(WorkerId) -> bool) {
        let of = &self.dispatching;
        let hit = of.dispatcher.borrow().requests_of(gone);
        for (id, worker) in hit {
            let now = SimTime(monotonic_ns());
            of.dispatcher
                .borrow_mut()
                .on_worker_gone(now, id, worker, &mut of.surroundings());
            self.carry_out(None);
        }
    }

    /// Lets queued requests go, if there is room.
    pub(crate) fn admit_queued(&self) {
        let of = &self.dispatching;
        if of.queued() > 0 {
            let now = SimTime(monotonic_ns());
            of.dispatcher
                .borrow_mut()
                .admit(now, &mut of.surroundings());
            self.carry_out(None);
        }
    }

    /// Does what the network, its latencies and the queue have delayed, for as long as the shard runs.
    pub(crate) async fn carry(self: Rc<Workers>) {
        let of = &self.dispatching;
        let mut alarm = Alarm::new();
        let mut arrived = Vec::new();
        loop {
            while let Some(step) = of.due(monotonic_ns()) {
                self.take_step(step);
                self.carry_out(None);
            }
            let mut next_arrival = None;
            if let Some(network) = &of.network {
                next_arrival = network.take(self.shard.index, &mut arrived);
                for arrival in arrived.drain(..) {
                    self.on_transferred(arrival);
                    self.carry_out(None);
                }
            }
            let queue = self.look_at_queue();
            let next = next_arrival
                .into_iter()
                .chain(of.next_due())
                .chain(queue)
                .min();
            tokio::select! {
                biased;
                () = of.changed.notified() => {}
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
        let now = monotonic_ns();
        {
            let mut dispatcher = of.dispatcher.borrow_mut();
            dispatcher.on_timeout(SimTime(now));
            // Other shards' requests may have ended.
            dispatcher.on_fleet_changed();
        }
        self.admit_queued();
        (of.queued() > 0).then_some(now + QUEUE_LOOK_NS)
    }

    /// Carries out what the dispatcher has decided. Returns the error of request `submitted` if it is over
    /// already: its client has no answer yet, so that the error becomes the answer.
    fn carry_out(&self, submitted: Option<u32>) -> Option<ApiError> {
        let mut answer = None;
        loop {
            // A borrow of its own: actions lead to further inputs.
            let action = self.dispatching.dispatcher.borrow_mut().poll_action();
            let Some(action) = action else {
                let queued = self.dispatching.queued();
                self.shard.metrics.requests_queued.set(queued as u64);
                // A retry may queue a request as well: `carry` looks for room from then on.
                if queued > self.dispatching.queued_seen.replace(queued) {
                    self.dispatching.changed.notify_one();
                }
                return answer;
            };
            let id = action.id();
            match action {
                Action::Start {
                    attempt,
                    role,
                    rank,
                    at,
                    ..
                } => {
                    self.begin_attempt(id, attempt);
                    let step = Step::Start {
                        id,
                        attempt,
                        role,
                        rank,
                    };
                    self.step_at(at, step);
                }
                Action::Kill { role, rank, .. } => self.kill_part(id, role, rank),
                Action::Transfer {
                    attempt,
                    tokens,
                    at,
                    ..
                } => {
                    let step = Step::Transfer {
                        id,
                        attempt,
                        tokens,
                    };
                    self.step_at(at, step);
                }
                Action::CancelTransfer { .. } => {
                    let transfer = self.dispatching.with_request(id, |job| job.transfer.take());
                    if let (Some(Some(transfer)), Some(network)) =
                        (transfer, &self.dispatching.network)
                    {
                        network.cancel(transfer);
                    }
                }
                Action::Receive { rank, .. } => {
                    if let Some(addr) = self.dispatching.with_request(id, |job| job.addr) {
                        self.send_control(ToWorker::Receive { rank, addr });
                    }
                }
                Action::Release { rank, .. } => {
                    let stream = self
                        .dispatching
                        .with_request(id, |job| job.prefill_stream.take());
                    if let Some(stream) = stream.flatten() {
                        let addr = stream.addr();
                        self.send_control(ToWorker::Release { rank, addr });
                    }
                }
                Action::Rejected { error, failed, .. } => {
                    let error = match failed {
                        Some(worker) if self.has_begun(id) => lost_without(worker, &error),
                        _ => rejection(&self.shard.metrics, &error, failed),
                    };
                    let lost = failed.is_some() && submitted != Some(id);
                    self.shard.metrics.streams_lost.add(u64::from(lost));
                    answer = answer.or(self.end_with(id, error, submitted));
                }
                Action::Lost {
                    worker,
                    failed,
                    begun,
                    ..
                } => {
                    let error = loss(&self.shard.metrics, worker, failed, begun);
                    self.shard
                        .metrics
                        .streams_lost
                        .add(u64::from(submitted != Some(id)));
                    answer = answer.or(self.end_with(id, error, submitted));
                }
                Action::Refused { .. } => {
                    let error = self.dispatching.refusal.take();
                    let error = error.unwrap_or_else(|| {
                        ApiError::overloaded("no worker takes the request; try again", 1)
                    });
                    answer = answer.or(self.end_with(id, error, submitted));
                }
            }
        }
    }

    /// A request is over. Its reply takes the error, unless it was just `submitted`: then it is returned.
    fn end_with(&self, id: u32, error: ApiError, submitted: Option<u32>) -> Option<ApiError> {
        if self.has_begun(id) {
            self.shard.metrics.streams_not_resumed.add(1);
        }
        let job = self.dispatching.take_request(id);
        if submitted == Some(id) {
            return Some(error);
        }
        if let Some(job) = job {
            job.reply.state.borrow_mut().on_refused(job.index, &error);
        }
        None
    }

    /// Whether a token of request `id` has come.
    fn has_begun(&self, id: u32) -> bool {
        let begun = |job: &mut OpenRequest| job.reply.state.borrow().has_begun(job.index);
        self.dispatching.with_request(id, begun) == Some(true)
    }

    /// The first action of an attempt: what belonged to the one before is gone.
    fn begin_attempt(&self, id: u32, attempt: Attempt) {
        let dispatcher = self.dispatching.dispatcher.borrow();
        let Some(decode) = dispatcher.decode_rank(id) else {
            return;
        };
        let disaggregated = dispatcher.prefill_rank(id).is_some();
        let resumed = dispatcher.resumed(id) > 0;
        let retried = !resumed && dispatcher.retries(id) > 0;
        drop(dispatcher);
        self.dispatching.with_request(id, |job| {
            if job.attempt == Some(attempt) {
                return;
            }
            job.attempt = Some(attempt);
            job.prefill_stream = None;
            job.answer_sent = false;
            job.transfer = None;
            self.shard.metrics.retries.add(u64::from(retried));
            self.shard.metrics.streams_resumed.add(u64::from(resumed));
            self.shard
                .metrics
                .plane
                .prompts_apart
                .add(u64::from(disaggregated));
            let mut state = job.reply.state.borrow_mut();
            state.retries += u32::from(retried);
            if resumed {
                state.resume(job.index);
                if let Some(addr) = job.reply.renew_stream(job.index) {
                    job.addr = addr;
                }
            }
            state.times.note(Stage::Routed, monotonic_ns());
            state.move_to(job.index, decode);
        });
    }

    /// Takes a step at `at`, or at once if that is past.
    fn step_at(&self, at: SimTime, step: Step) {
        if at.0 > monotonic_ns() {
            self.dispatching.plan(at.0, step);
        } else {
            self.take_step(step);
        }
    }

    fn take_step(&self, step: Step) {
        match step {
            Step::Start {
                id,
                attempt,
                role,
                rank,
            } => self.send_start(id, attempt, role, rank),
            Step::Transfer {
                id,
                attempt,
                tokens,
            } => self.begin_transfer(id, attempt, tokens),
        }
    }

    /// Sends a request to a worker.
    fn send_start(&self, id: u32, attempt: Attempt, role: Role, rank: RankId) {
        let of = &self.dispatching;
        if !of.dispatcher.borrow().is_current(id, attempt) {
            return;
        }
        let attempts_before = of.dispatcher.borrow().retries(id);
        // A reply that failed wants no more tokens; its handle is not dropped yet.
        if of.with_request(id, |job| job.reply.state.borrow().is_complete()) == Some(true) {
            of.dispatcher.borrow_mut().cancel(id);
            return;
        }
        let start = of.with_request(id, |job| {
            let mut start = job.start.clone()?;
            start.rank = rank;
            start.dispatched_ns = monotonic_ns();
            start.attempt = attempts_before;
            let mut state = job.reply.state.borrow_mut();
            start.addr = job.addr;
            start.request.params.answered = state.answered(job.index);
            start.credit_bytes = state.start_credit(job.index);
            if state.times.at(Stage::Dispatched).is_none() {
                let routed = state.times.at(Stage::Routed).unwrap_or(start.dispatched_ns);
                let took = start.dispatched_ns.saturating_sub(routed);
                self.shard.metrics.latency.pre_send.observe(took);
                state.times.note(Stage::Dispatched, start.dispatched_ns);
            }
            drop(state);
            start.role = role;
            match role {
                Role::Both | Role::Decode => job.answer_sent = true,
                Role::Prefill => {
                    let feed = StreamSlot {
                        reply: job.reply.clone(),
                        sequence: job.index,
                        role: StreamRole::Prefill { id },
                    };
                    let stream = self.table.register(feed).ok()?;
                    start.addr = stream.addr();
                    start.credit_bytes = NO_LIMIT;
                    job.prefill_stream = Some(stream);
                }
            }
            Some(start)
        });
        let Some(Some(start)) = start else {
            let error = "no stream is left for the worker that computes the prompt \
                         (`live.streams_max`); try again later";
            of.refusal.replace(Some(ApiError::overloaded(error, 1)));
            let now = SimTime(monotonic_ns());
            let mut dispatcher = of.dispatcher.borrow_mut();
            dispatcher.on_refused(now, id, rank.worker, false, &mut of.surroundings());
            return;
        };
        if self.transport_start(start).is_err() {
            of.with_request(id, |job| match role {
                Role::Prefill => job.prefill_stream = None,
                _ => job.answer_sent = false,
            });
            let now = SimTime(monotonic_ns());
            of.dispatcher
                .borrow_mut()
                .on_not_taken(now, id, rank.worker, &mut of.surroundings());
        }
    }

    /// Takes a request off a worker that was sent it.
    fn kill_part(&self, id: u32, role: Role, rank: RankId) {
        let addr = self.dispatching.with_request(id, |job| match role {
            Role::Prefill => job.prefill_stream.take().map(|stream| stream.addr()),
            Role::Both | Role::Decode => {
                let sent = std::mem::take(&mut job.answer_sent);
                sent.then_some(job.addr)
            }
        });
        if let Some(Some(addr)) = addr {
            self.send_control(ToWorker::Kill { rank, addr });
        }
    }

    /// A prompt's keys and values begin to cross the network.
    fn begin_transfer(&self, id: u32, attempt: Attempt, tokens: u32) {
        let of = &self.dispatching;
        let dispatcher = of.dispatcher.borrow();
        let (Some(network), Some(from), Some(to), true) = (
            &of.network,
            dispatcher.prefill_rank(id),
            dispatcher.decode_rank(id),
            dispatcher.is_current(id, attempt),
        ) else {
            return;
        };
        drop(dispatcher);
        let bytes = network.bytes(from.worker, tokens);
        self.shard.metrics.plane.kv_bytes.add(bytes);
        let arrival = Arrival { id, attempt };
        let transfer = network.send(self.shard.index, arrival, from.worker, to.worker, bytes);
        of.with_request(id, |job| {
            job.transfer = transfer;
            let mut state = job.reply.state.borrow_mut();
            state.times.note(Stage::KvSent, monotonic_ns());
        });
        match transfer {
            None => self.on_transferred(arrival),
            Some(_) => of.changed.notify_one(),
        }
    }

    /// A prompt's keys and values have arrived.
    fn on_transferred(&self, arrival: Arrival) {
        let Arrival { id, attempt } = arrival;
        let of = &self.dispatching;
        if !of.dispatcher.borrow_mut().on_transferred(id, attempt) {
            return;
        }
        of.with_request(id, |job| {
            job.transfer = None;
            let mut state = job.reply.state.borrow_mut();
            state.times.note(Stage::KvReceived, monotonic_ns());
        });
    }

    /// Hands a start to the transport. It comes back if it was not taken.
    fn transport_start(&self, start: Box<StartRequest>) -> Result<(), Box<StartRequest>> {
        match &self.transport {
            Transport::Rings(port) => match port.send_soon(ToWorker::Start(start)) {
                Ok(()) => Ok(()),
                Err(
                    SendError::Full(ToWorker::Start(start))
                    | SendError::Closed(ToWorker::Start(start)),
                ) => Err(start),
                Err(_) => unreachable!("the entry is the one that was sent"),
            },
            Transport::Sockets(remote) => {
                remote.start(&start, &self.shard.metrics).map_err(|why| {
                    if why == NotSent::Tombstone {
                        self.shard.metrics.plane.late_starts.add(1);
                    }
                    start
                })
            }
        }
    }
}

/// The error for an answer whose `worker` is gone and that no other one takes.
fn lost_without(worker: WorkerId, error: &RouteError) -> ApiError {
    ApiError {
        message: format!(
            "worker {worker} went away before the answer was complete, and no other continues it: {error}; try \
             again"
        ),
        ..ApiError::worker_lost(&worker.to_string())
    }
}

/// A time that a worker reported; it reports nothing from the future. 0: it did not say.
fn past(at_ns: u64) -> SimTime {
    let now = monotonic_ns();
    SimTime(match at_ns {
        0 => now,
        at => at.min(now),
    })
}
