//! Prompts that one worker computes for another.
//!
//! ```text
//!  pull   shard ─START─► prefill worker … COMPUTED ─► shard ─START─► decode worker … RESERVED
//!                                                                                        │
//!                 RELEASE to the one, RECEIVE to the other ◄── keys and values have come ◄┘
//!  push   shard ─START─► decode worker … RESERVED ─► shard ─START─► prefill worker … COMPUTED ─► …
//! ```
//!
//! The order is the twin's (`crates/twin/src/hand_over.rs`), and so are the choice of the prefill
//! worker and the network; a test compares. What workers would say to each other goes by way of the
//! shard, which knows both: one entry or control a step, none a token. The shard waits as long as the
//! modelled network says.
//!
//! A sequence has a [`Remote`] from the moment it is dispatched until its prompt has come. Whatever
//! ends it before that goes through [`Shard::abandon`], so that neither worker keeps blocks for it.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slipstream_base::cluster::{Cluster, HandOver};
use slipstream_base::{RankId, SimTime, Stage, WorkerId};
use slipstream_flows::{Endpoint, Fabric, FabricConfig, Network, TransferId};
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::frame::NO_LIMIT;
use slipstream_planes::{
    FirstPass, Part, Registration, Reserved, StartRequest, StreamAddr, StreamId, ToWorker,
};
use slipstream_router::{ActiveSequence, Routed, Router};
use tokio::sync::Notify;

use crate::alarm::Alarm;
use crate::openai::ApiError;
use crate::reply::{Again, Feed, Leg, Reply};
use crate::shard::{Plane, Shard};

/// The network that keys and values cross, as the cluster file models it. All shards of a frontend
/// share it; each takes what arrives for its own streams.
pub struct KvNetwork {
    order: HandOver,
    /// `None`: all is there at once.
    links: Option<Mutex<Links>>,
    frontend: Endpoint,
    /// By worker that computes them.
    kv_token_bytes: Vec<u64>,
}

struct Links {
    /// In wall-clock time.
    fabric: Fabric,
    /// Of transfers under way: the shard, and what it is for.
    carried: HashMap<TransferId, (u8, Job)>,
    /// By shard: what has come and was not taken.
    come: Vec<Vec<Job>>,
    wakers: Vec<Option<Arc<Notify>>>,
    scratch: Vec<TransferId>,
    /// The latest time that the fabric has seen.
    now: SimTime,
}

/// What is done for one attempt of a stream, so that who is gone by then is not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Job {
    stream: StreamId,
    attempt: u8,
}

impl KvNetwork {
    /// The network of `cluster`, at its `live.speedup`, for `shards` shards.
    pub fn new(cluster: &Cluster, shards: usize) -> KvNetwork {
        let speedup = cluster.live.speedup;
        let config = (speedup > 0.0)
            .then(|| FabricConfig::of_cluster(cluster, speedup))
            .flatten();
        KvNetwork {
            order: cluster.kv.hand_over,
            links: config.map(|config| {
                Mutex::new(Links {
                    fabric: Fabric::new(config),
                    carried: HashMap::new(),
                    come: vec![Vec::new(); shards],
                    wakers: vec![None; shards],
                    scratch: Vec::new(),
                    now: SimTime::ZERO,
                })
            }),
            frontend: Endpoint::of_frontend(cluster),
            kv_token_bytes: cluster.kv_bytes_per_token(),
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, Links>> {
        let links = self.links.as_ref()?;
        Some(links.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What a message of no bytes takes between two workers, by way of the frontend or not, ns.
    fn latency_ns(&self, from: WorkerId, to: WorkerId, by_frontend: bool) -> u64 {
        let Some(links) = self.lock() else {
            return 0;
        };
        let (from, to) = (Endpoint::of_worker(from), Endpoint::of_worker(to));
        if by_frontend {
            links.fabric.latency_ns(from, self.frontend)
                + links.fabric.latency_ns(self.frontend, to)
        } else {
            links.fabric.latency_ns(from, to)
        }
    }

    /// Bytes of the keys and values of `tokens`, computed by `from`.
    fn bytes(&self, from: WorkerId, tokens: u32) -> u64 {
        let token = self.kv_token_bytes.get(from.index());
        u64::from(tokens) * token.copied().unwrap_or_default()
    }

    /// Begins to send `bytes`; `None` if they are there at once.
    fn send(
        &self,
        shard: u8,
        job: Job,
        from: WorkerId,
        to: WorkerId,
        bytes: u64,
    ) -> Option<TransferId> {
        let mut links = self.lock()?;
        let now = links.read_clock();
        let (from, to) = (Endpoint::of_worker(from), Endpoint::of_worker(to));
        let id = links.fabric.send(now, from, to, bytes);
        links.carried.insert(id, (shard, job));
        Some(id)
    }

    /// Forgets a transfer. Those that shared its links are faster from now on.
    fn cancel(&self, transfer: TransferId) {
        let Some(mut links) = self.lock() else {
            return;
        };
        let now = links.read_clock();
        if links.carried.remove(&transfer).is_some() {
            links.fabric.cancel(now, transfer);
            links.wake_all();
        }
    }

    /// Moves what has come for `shard` to the end of `out`. Returns when something comes next, for
    /// whomever, if nothing changes before.
    fn take(&self, shard: u8, out: &mut Vec<Job>) -> Option<u64> {
        let mut guard = self.lock()?;
        let links = &mut *guard;
        let now = links.read_clock();
        let mut scratch = std::mem::take(&mut links.scratch);
        links.fabric.advance(now, &mut scratch);
        let mut others = false;
        for id in scratch.drain(..) {
            if let Some((of, job)) = links.carried.remove(&id) {
                links.come[usize::from(of)].push(job);
                others |= of != shard;
            }
        }
        links.scratch = scratch;
        if others {
            links.wake_all();
        }
        out.append(&mut links.come[usize::from(shard)]);
        if links.carried.is_empty() {
            return None;
        }
        links.fabric.next_time().map(|at| at.0)
    }
}

impl Links {
    /// Shards read the clock one after the other under the lock, so that time does not run back.
    fn read_clock(&mut self) -> SimTime {
        self.now = self.now.max(SimTime(monotonic_ns()));
        self.now
    }

    fn wake_all(&self) {
        for waker in self.wakers.iter().flatten() {
            waker.notify_one();
        }
    }
}

/// What a shard needs where some workers compute prompts for others.
pub struct HandOvers {
    /// Its own front of the router to those workers.
    pub router: Router,
    /// What lies between workers.
    pub network: Arc<KvNetwork>,
}

/// [`HandOvers`] at work.
pub(crate) struct Carrier {
    pub(crate) router: RefCell<Router>,
    network: Arc<KvNetwork>,
    /// What is to be done when its time has come.
    planned: RefCell<BinaryHeap<Planned>>,
    /// Steps planned so far: at equal times they are done in this order.
    sequence: Cell<u64>,
    /// Something was planned or sent, or came.
    changed: Arc<Notify>,
}

/// A step at a time, ns; those of one time in the order in which they were planned.
type Planned = Reverse<(u64, u64, Step, Job)>;

/// The next step of a hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// The request goes to the worker that computes its prompt.
    Prompt,
    /// The request goes to the worker that generates its answer.
    Answer,
    /// Keys and values begin to cross the network.
    Fetch,
}

/// A prompt that another worker computes, until it has come.
pub(crate) struct Remote {
    /// Told apart from earlier tries of the stream.
    attempt: u8,
    /// Who computes it.
    rank: RankId,
    /// Its router's charge.
    active: ActiveSequence,
    /// Its stream there, once it was sent.
    stream: Option<Registration<Feed>>,
    /// The decode worker has the request.
    answer_sent: bool,
    /// The decode worker has made room.
    reserved: bool,
    /// The prompt is computed.
    computed: bool,
    /// Tokens that the decode worker has, and that need not come.
    cached_tokens: u32,
    transfer: Option<TransferId>,
    /// The request itself.
    again: Again,
}

impl Remote {
    /// Who computes the prompt.
    pub(crate) fn rank(&self) -> RankId {
        self.rank
    }

    /// What it takes to try elsewhere, if it was not tried elsewhere before.
    pub(crate) fn into_again(self) -> Option<Again> {
        (self.attempt == 0).then_some(self.again)
    }
}

impl Carrier {
    pub(crate) fn new(shard: u8, of: HandOvers) -> Carrier {
        let changed = Arc::new(Notify::new());
        if let Some(mut links) = of.network.lock() {
            links.wakers[usize::from(shard)] = Some(changed.clone());
        }
        Carrier {
            router: RefCell::new(of.router),
            network: of.network,
            planned: RefCell::default(),
            sequence: Cell::new(0),
            changed,
        }
    }

    fn plan(&self, at_ns: u64, step: Step, job: Job) {
        let sequence = self.sequence.get();
        self.sequence.set(sequence + 1);
        let planned = Reverse((at_ns, sequence, step, job));
        self.planned.borrow_mut().push(planned);
        self.changed.notify_one();
    }

    /// When the next step is due, ns.
    fn next_due(&self) -> Option<u64> {
        let planned = self.planned.borrow();
        planned.peek().map(|&Reverse((at, ..))| at)
    }

    /// What is planned for `now` or before, if anything is.
    fn due(&self, now: u64) -> Option<(Step, Job)> {
        let mut planned = self.planned.borrow_mut();
        let &Reverse((at, _, step, job)) = planned.peek()?;
        if at > now {
            return None;
        }
        planned.pop();
        Some((step, job))
    }
}

impl Shard {
    /// Does what the network and its latencies have delayed, for as long as the shard runs.
    pub(crate) async fn carry(self: Rc<Shard>) {
        let Some(carrier) = &self.carrier else {
            return;
        };
        let mut alarm = Alarm::new();
        let mut come = Vec::new();
        loop {
            while let Some((step, job)) = carrier.due(monotonic_ns()) {
                self.take_step(step, job);
            }
            let next_come = carrier.network.take(self.index, &mut come);
            for job in come.drain(..) {
                self.on_received(job);
            }
            let next = next_come.into_iter().chain(carrier.next_due()).min();
            tokio::select! {
                () = carrier.changed.notified() => {}
                () = alarm.wait_until(next) => {}
            }
        }
    }

    /// Hands sequence `index` of `reply` to two workers: the one that computes its prompt is
    /// `prompt`, and `again` names the other.
    ///
    /// # Errors
    /// What to tell the client if nobody takes it.
    pub(crate) fn launch_apart(
        &self,
        reply: &Rc<Reply>,
        index: u32,
        again: Again,
        prompt: Routed,
        attempt: u8,
    ) -> Result<(), ApiError> {
        let Some(carrier) = &self.carrier else {
            unreachable!("who routes prompts has a router for them");
        };
        let order = carrier.network.order;
        reply.state.borrow_mut().set_remote(
            index,
            Remote {
                attempt,
                rank: prompt.target,
                active: prompt.active,
                stream: None,
                answer_sent: false,
                reserved: false,
                computed: false,
                cached_tokens: 0,
                transfer: None,
                again,
            },
        );
        self.metrics.prompts_apart.add(1);
        let sent = match order {
            HandOver::Pull => self.send_prompt(reply, index),
            HandOver::Push => self.send_answer(reply, index),
        };
        match sent {
            Ok(()) => Ok(()),
            Err(not_taken) => self.try_elsewhere(reply, index, not_taken),
        }
    }

    /// Sends the request to the worker that computes its prompt.
    fn send_prompt(&self, reply: &Rc<Reply>, index: u32) -> Result<(), NotTaken> {
        let feed = Feed {
            reply: reply.clone(),
            sequence: index,
            leg: Leg::Prompt,
        };
        let Ok(registration) = self.table.register(feed) else {
            return Err(NotTaken::Full);
        };
        let addr = registration.addr();
        let mut state = reply.state.borrow_mut();
        let Some(remote) = state.remote(index) else {
            return Ok(());
        };
        let rank = remote.rank;
        let start = StartRequest {
            addr,
            rank,
            dispatched_ns: monotonic_ns(),
            credit_bytes: NO_LIMIT,
            part: Part::Prompt,
            ..remote.again.start.as_ref().clone()
        };
        remote.stream = Some(registration);
        drop(state);
        match self.hand_over(Box::new(start)) {
            Ok(_) => Ok(()),
            Err(_) => Err(NotTaken::By(rank.worker)),
        }
    }

    /// Sends the request to the worker that generates its answer.
    fn send_answer(&self, reply: &Rc<Reply>, index: u32) -> Result<(), NotTaken> {
        let mut state = reply.state.borrow_mut();
        let Some(remote) = state.remote(index) else {
            return Ok(());
        };
        let attempt = remote.attempt;
        let mut start = remote.again.start.as_ref().clone();
        start.part = Part::Answer { attempt };
        start.dispatched_ns = monotonic_ns();
        remote.answer_sent = true;
        let worker = start.rank.worker;
        drop(state);
        match self.hand_over(Box::new(start)) {
            Ok(_) => Ok(()),
            Err(_) => Err(NotTaken::By(worker)),
        }
    }

    /// A worker did not take its part, or is gone: the whole request goes elsewhere, once.
    fn try_elsewhere(
        &self,
        reply: &Rc<Reply>,
        index: u32,
        not_taken: NotTaken,
    ) -> Result<(), ApiError> {
        let again = self.abandon(reply, index).and_then(Remote::into_again);
        match (not_taken, again) {
            (NotTaken::By(worker), Some(again)) => self.relaunch(reply, index, again, worker),
            (NotTaken::By(worker), None) => Err(ApiError::overloaded(
                format!("worker {worker} does not take the request at the moment; try again"),
                1,
            )),
            (NotTaken::Full, _) => Err(ApiError::overloaded(
                "no stream is left for the prompt's worker (`live.streams_max`); try again later",
                1,
            )),
        }
    }

    /// Takes the part of a sequence that is elsewhere off every worker and link that it is on;
    /// `None` if it has none, or none any more.
    pub(crate) fn abandon(&self, reply: &Rc<Reply>, index: u32) -> Option<Remote> {
        let mut state = reply.state.borrow_mut();
        let remote = state.take_remote(index)?;
        let answers = state.target(index);
        drop(state);
        Some(self.let_go(remote, answers))
    }

    /// As [`abandon`](Self::abandon), of what was taken; `answers` is to generate the answer.
    pub(crate) fn let_go(&self, mut remote: Remote, answers: RankId) -> Remote {
        if let (Some(transfer), Some(carrier)) = (remote.transfer.take(), &self.carrier) {
            carrier.network.cancel(transfer);
        }
        if let Some(stream) = remote.stream.take() {
            let (rank, addr) = (remote.rank, stream.addr());
            self.send_control(ToWorker::Kill { rank, addr });
        }
        if remote.answer_sent {
            let (rank, addr) = (answers, remote.again.start.addr);
            self.send_control(ToWorker::Kill { rank, addr });
        }
        remote
    }

    /// Carries `step` out `latency_ns` after `since_ns` (0: that is not known, and may as well be now),
    /// or now if that is past.
    fn later(&self, since_ns: u64, latency_ns: u64, step: Step, job: Job) {
        let Some(carrier) = &self.carrier else {
            return;
        };
        // No worker tells of what is yet to happen.
        let now = monotonic_ns();
        let since_ns = if since_ns == 0 {
            now
        } else {
            since_ns.min(now)
        };
        let at_ns = since_ns + latency_ns;
        if at_ns > now {
            carrier.plan(at_ns, step, job);
        } else {
            self.take_step(step, job);
        }
    }

    /// The reply and sequence of a job, unless it is over, or another attempt.
    fn find(&self, job: Job) -> Option<(Rc<Reply>, u32)> {
        let found = |feed: &mut Feed| (feed.reply.clone(), feed.sequence);
        if !self.table.contains(job.stream) {
            return None; // its client is gone, which is not worth counting as stale
        }
        let (reply, index) = self.table.with(job.stream, found)?;
        let mut state = reply.state.borrow_mut();
        let same = state
            .remote(index)
            .is_some_and(|remote| remote.attempt == job.attempt);
        drop(state);
        same.then_some((reply, index))
    }

    fn take_step(&self, step: Step, job: Job) {
        let Some((reply, index)) = self.find(job) else {
            return;
        };
        let sent = match step {
            Step::Prompt => self.send_prompt(&reply, index),
            Step::Answer => self.send_answer(&reply, index),
            Step::Fetch => {
                self.fetch(&reply, index, job);
                return;
            }
        };
        if let Err(not_taken) = sent
            && let Err(error) = self.try_elsewhere(&reply, index, not_taken)
        {
            self.metrics.streams_lost.add(1);
            reply.state.borrow_mut().on_refused(index, &error);
        }
    }

    /// A prompt is computed, and its blocks are held.
    pub(crate) fn on_computed(&self, reply: &Rc<Reply>, index: u32, pass: FirstPass) {
        let Some(carrier) = &self.carrier else {
            return;
        };
        let mut state = reply.state.borrow_mut();
        let answers = state.target(index).worker;
        let Some(remote) = state.remote(index) else {
            return;
        };
        if std::mem::replace(&mut remote.computed, true) {
            return;
        }
        remote.active.on_first_token();
        let (from, job) = (remote.rank.worker, remote.job());
        state.on_prompt_computed(index, pass);
        drop(state);
        match carrier.network.order {
            HandOver::Pull => {
                let latency_ns = carrier.network.latency_ns(from, answers, true);
                self.later(pass.end_ns, latency_ns, Step::Answer, job);
            }
            HandOver::Push => self.later(pass.end_ns, 0, Step::Fetch, job),
        }
    }

    /// The decode worker has room for the prompt.
    pub(crate) fn on_reserved(&self, reply: &Rc<Reply>, index: u32, reserved: &Reserved) {
        let Some(carrier) = &self.carrier else {
            return;
        };
        let mut state = reply.state.borrow_mut();
        let answers = state.target(index).worker;
        let Some(remote) = state.remote(index) else {
            return;
        };
        let known = !remote.answer_sent || remote.reserved;
        if remote.attempt != reserved.attempt || known {
            return; // of an earlier attempt, or from somebody who is confused
        }
        remote.reserved = true;
        // A worker that claims to have more than there is gets what there is.
        let tokens = remote.again.start.request.prompt.len();
        remote.cached_tokens = reserved.cached_tokens.min(tokens);
        let (to, job) = (remote.rank.worker, remote.job());
        if let Some(ns) = reserved.worker_recv_ns {
            state.times.note(Stage::WorkerRecv, ns);
        }
        drop(state);
        let latency_ns = carrier.network.latency_ns(answers, to, false);
        let step = match carrier.network.order {
            HandOver::Pull => Step::Fetch,
            HandOver::Push => Step::Prompt,
        };
        self.later(reserved.at_ns.unwrap_or_default(), latency_ns, step, job);
    }

    /// A prompt's keys and values begin to cross the network.
    fn fetch(&self, reply: &Rc<Reply>, index: u32, job: Job) {
        let Some(carrier) = &self.carrier else {
            return;
        };
        let mut state = reply.state.borrow_mut();
        let to = state.target(index).worker;
        state.times.note(Stage::KvSent, monotonic_ns());
        let Some(remote) = state.remote(index) else {
            return;
        };
        let from = remote.rank.worker;
        let tokens = remote.again.start.request.prompt.len() - remote.cached_tokens;
        let bytes = carrier.network.bytes(from, tokens);
        self.metrics.kv_bytes.add(bytes);
        remote.transfer = carrier.network.send(self.index, job, from, to, bytes);
        let there = remote.transfer.is_none();
        drop(state);
        if there {
            self.on_received(job);
        } else {
            carrier.changed.notify_one();
        }
    }

    /// A prompt's keys and values have come.
    fn on_received(&self, job: Job) {
        let Some((reply, index)) = self.find(job) else {
            return;
        };
        let mut state = reply.state.borrow_mut();
        state.times.note(Stage::KvReceived, monotonic_ns());
        let answers = state.target(index);
        let Some(mut remote) = state.take_remote(index) else {
            return;
        };
        drop(state);
        let addr = remote.again.start.addr;
        self.send_control(ToWorker::Receive {
            rank: answers,
            addr,
        });
        if let Some(stream) = remote.stream.take() {
            let (rank, addr) = (remote.rank, stream.addr());
            self.send_control(ToWorker::Release { rank, addr });
        }
        // As with a whole request: until a token has come, a worker process that vanishes is
        // replaced by another.
        if matches!(self.plane, Plane::Sockets(_))
            && let Some(again) = remote.into_again()
        {
            reply.state.borrow_mut().keep(index, again);
        }
    }

    /// A worker of the two has given its part, `stream`, up.
    pub(crate) fn on_part_lost(&self, reply: &Rc<Reply>, index: u32, stream: StreamAddr) {
        let mut state = reply.state.borrow_mut();
        let answers = state.target(index).worker;
        let Some(remote) = state.remote(index) else {
            return;
        };
        let prompt = remote.stream.as_ref().map(Registration::addr);
        let worker = if prompt == Some(stream) {
            remote.rank.worker
        } else if remote.answer_sent && remote.again.start.addr == stream {
            answers
        } else {
            return; // of an earlier attempt
        };
        drop(state);
        if let Err(error) = self.try_elsewhere(reply, index, NotTaken::By(worker)) {
            self.metrics.streams_lost.add(1);
            reply.state.borrow_mut().on_refused(index, &error);
        }
    }
}

impl Remote {
    fn job(&self) -> Job {
        Job {
            stream: self.again.start.addr.stream,
            attempt: self.attempt,
        }
    }
}

/// Why a part of a request was not handed over.
enum NotTaken {
    /// This worker is gone, leaving, or too far behind.
    By(WorkerId),
    /// No stream is left.
    Full,
}
