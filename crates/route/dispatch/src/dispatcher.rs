//! Inputs, and the rules by which they become actions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use slipstream_base::width::{round_u64, to_u32};
use slipstream_base::{RankId, SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, HandOver};
use slipstream_router::{
    ActiveSequence, RouteError, RouteRequest, Routed, Router, Score, ViewTurn,
};

use crate::Role;
use crate::action::{Action, Attempt};
use crate::env::{Env, Request, Via};
#[cfg(feature = "journal")]
use crate::journal::{Input, Journal, Line};
use crate::life::{Apart, Life, Placed, Stage, State};

/// [`Rules::retries_max`] of workers. One: a request during which two workers failed is likelier to be the
/// cause than to be unlucky twice.
const RETRIES_MAX: usize = 1;

/// Settings of a cluster file for dispatching.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Whether prefill workers push a prompt's keys and values, or decode workers pull them.
    pub transfer: HandOver,
    /// Requests that may wait while every worker is busy, over all dispatchers that share a
    /// [`QueueRoom`].
    pub queue_max: usize,
    /// Interval at which the router refreshes its view of loads, ns; 0: at each decision.
    pub view_interval_ns: u64,
    /// Times that a request without a token is sent to another worker after one failed it.
    pub retries_max: usize,
    /// Times that an answer is continued by another worker after one failed it; 0: never.
    pub resumes_max: usize,
}

impl Rules {
    /// The rules of `cluster`.
    pub fn of_cluster(cluster: &Cluster) -> Rules {
        Rules {
            // An engine's blocks are known once it has computed them: its protocol is a pull.
            transfer: if cluster.has_engines() {
                HandOver::Pull
            } else {
                cluster.kv.hand_over
            },
            queue_max: cluster.router.queue_max as usize,
            view_interval_ns: round_u64(cluster.router.view_interval_ms * 1e6),
            retries_max: if cluster.has_engines() {
                cluster.upstream.retries_max as usize
            } else {
                RETRIES_MAX
            },
            // Their answers are bytes, which the driver continues.
            resumes_max: if cluster.has_engines() {
                0
            } else {
                cluster.router.resumes_max as usize
            },
        }
    }
}

/// Places in the queue that several dispatchers share, as the shards of one frontend do.
#[derive(Clone, Debug, Default)]
pub struct QueueRoom(Arc<AtomicUsize>);

impl QueueRoom {
    /// Takes a place, if fewer than `max` are taken.
    fn take(&self, max: usize) -> bool {
        // Relaxed: a count that guards no other memory.
        let taken = |used: usize| (used < max).then_some(used + 1);
        self.0.fetch_update(Relaxed, Relaxed, taken).is_ok()
    }

    fn give_back(&self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Owns every request from acceptance to its last token. No I/O, no clock, no runtime.
///
/// The driver identifies requests by small numbers, which it may reuse once a request is
/// over. After every input the driver carries out all actions before it passes the next one.
pub struct Dispatcher {
    rules: Rules,
    /// Router for whole requests, and for decoding prompts that were computed elsewhere.
    serve: Router,
    /// Router for prompts, if there are prefill pools.
    prefill: Option<Router>,
    lives: Vec<Life>,
    /// Requests that are not over.
    open: usize,
    attempts: u64,
    /// Requests in the queue, in order. Entries of attempts that are over are skipped.
    waiting: VecDeque<(u32, Attempt)>,
    /// Entries of `waiting` whose attempt is current.
    queued: usize,
    /// Of these, requests that any worker may take: later requests wait behind them.
    queued_for_any: usize,
    queue_room: QueueRoom,
    /// Whether a worker may have become less busy since the queue was last examined.
    capacity_changed: bool,
    /// Time at which the queue is examined again, though no load is known to have fallen.
    look_at: Option<SimTime>,
    actions: VecDeque<Action>,
    #[cfg(feature = "journal")]
    journal: Option<Journal>,
}

impl Dispatcher {
    /// A dispatcher that routes requests with `serve`, and prompts for other workers with `prefill`.
    pub fn new(rules: Rules, serve: Router, prefill: Option<Router>) -> Dispatcher {
        Dispatcher {
            rules,
            serve,
            prefill,
            lives: Vec::new(),
            open: 0,
            attempts: 0,
            waiting: VecDeque::new(),
            queued: 0,
            queued_for_any: 0,
            queue_room: QueueRoom::default(),
            capacity_changed: false,
            look_at: None,
            actions: VecDeque::new(),
            #[cfg(feature = "journal")]
            journal: None,
        }
    }

    /// Records all later inputs and actions in `journal`.
    #[cfg(feature = "journal")]
    #[must_use]
    pub fn with_journal(mut self, journal: Journal) -> Dispatcher {
        self.journal = Some(journal);
        self
    }

    #[cfg(feature = "journal")]
    fn note(&self, id: u32, input: Input) {
        if let Some(journal) = &self.journal {
            journal.push(Line::Input { id, input });
        }
    }

    /// Shares `room` with other dispatchers.
    #[must_use]
    pub fn with_queue_room(mut self, room: QueueRoom) -> Dispatcher {
        self.queue_room = room;
        self
    }

    /// Its settings.
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// The router of requests.
    pub fn router(&mut self) -> &mut Router {
        &mut self.serve
    }

    /// The router of requests, for a driver that decides in advance.
    pub fn into_router(self) -> Router {
        self.serve
    }

    /// Requests that are not over.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Requests in the queue.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Whether `attempt` at request `id` is in progress.
    pub fn is_current(&self, id: u32, attempt: Attempt) -> bool {
        self.lives.get(id as usize).is_some_and(|life| {
            let same = life.attempt == attempt || slipstream_base::planted!("stale-attempt");
            same && !matches!(life.state, State::Free)
        })
    }

    /// Workers that failed request `id` before its first token; after it, the last one that failed it.
    pub fn failed_on(&self, id: u32) -> &[WorkerId] {
        self.lives
            .get(id as usize)
            .map_or(&[], |life| &life.failed_on)
    }

    /// Times that request `id` was placed anew because a worker failed it.
    pub fn retries(&self, id: u32) -> u8 {
        self.lives.get(id as usize).map_or(0, |life| life.retries)
    }

    /// Times that the answer of request `id` was to be continued by another worker.
    pub fn resumed(&self, id: u32) -> u8 {
        self.lives.get(id as usize).map_or(0, |life| life.resumed)
    }

    /// Whether the answer of request `id` is to be continued by another worker if its own fails it, within the
    /// limit. If so, [`Env::request`] is asked for it until its end.
    pub fn resumes(&self, id: u32) -> bool {
        let life = self.lives.get(id as usize);
        self.rules.resumes_max > 0 && life.is_some_and(|life| life.resumes && !life.pinned)
    }

    /// The rank that generates the answer of request `id`, once it is chosen.
    pub fn decode_rank(&self, id: u32) -> Option<RankId> {
        match &self.lives.get(id as usize)?.state {
            State::Free | State::Routing | State::Waiting => None,
            State::Placed(placed) | State::Streaming(placed) => Some(placed.rank),
            State::Apart(apart) => Some(apart.decode),
        }
    }

    /// The rank that computes the prompt of request `id` for another one, until the prompt has been sent.
    pub fn prefill_rank(&self, id: u32) -> Option<RankId> {
        match &self.lives.get(id as usize)?.state {
            State::Apart(apart) => Some(apart.prefill),
            _ => None,
        }
    }

    /// The charge of the rank that computes the prompt of request `id`, until the answer begins.
    pub fn prompt_charge(&self, id: u32) -> Option<&ActiveSequence> {
        match &self.lives.get(id as usize)?.state {
            State::Placed(placed) => Some(&placed.active),
            State::Apart(apart) => Some(&apart.prefill_active),
            State::Free | State::Routing | State::Waiting | State::Streaming(_) => None,
        }
    }

    /// The next action. Carry all of them out before the next input.
    #[must_use]
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.pop_front();
        #[cfg(feature = "journal")]
        if let (Some(journal), Some(action)) = (&self.journal, action) {
            journal.push(Line::Action(action));
        }
        action
    }

    /// The time at which to call [`on_timeout`](Self::on_timeout), unless an input changes it.
    #[must_use]
    pub fn next_timeout(&self) -> Option<SimTime> {
        self.look_at
    }

    /// Handles the time of [`next_timeout`](Self::next_timeout). Call [`admit`](Self::admit) next.
    pub fn on_timeout(&mut self, now: SimTime) {
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            self.capacity_changed = true;
        }
    }

    /// Accepts a request under the number `id`, which no open request has. `scores` collects all
    /// candidates.
    pub fn submit(
        &mut self,
        now: SimTime,
        id: u32,
        request: &Request,
        env: &mut dyn Env,
        scores: Option<&mut Vec<Score>>,
    ) {
        let at = id as usize;
        if at >= self.lives.len() {
            self.lives.resize_with(at + 1, || Life::FREE);
        }
        assert!(
            matches!(self.lives[at].state, State::Free),
            "a number names one open request"
        );
        self.open += 1;
        #[cfg(feature = "journal")]
        self.note(
            id,
            Input::Submitted {
                prompt_tokens: request.prompt.len(),
                max_tokens: request.max_tokens,
            },
        );
        self.lives[at].named = request.direct.is_some() || request.only.is_some();
        self.lives[at].resumes = request.resumes && !request.streams_input;
        self.begin_attempt(id);
        self.place(now, id, request, env, scores);
    }

    /// Dispatches queued requests, in order, as far as there is room. Does nothing unless a load may have
    /// fallen since the last call. Drivers call it after all inputs of a moment.
    pub fn admit(&mut self, now: SimTime, env: &mut dyn Env) {
        if !std::mem::take(&mut self.capacity_changed) || self.queued == 0 {
            return;
        }
        let mut at = 0;
        while let Some(&(id, attempt)) = self.waiting.get(at) {
            if !self.waits(id, attempt) {
                self.waiting.remove(at);
                continue;
            }
            let request = env.request(id).rest(attempt.0);
            match self.choose(now, id, &request, env, None) {
                Ok(placement) => {
                    self.leave_queue(at);
                    self.start(now, id, placement);
                }
                // The workers that may take it are busy; other workers may have room.
                Err(RouteError::Busy { .. }) if self.lives[id as usize].is_limited() => at += 1,
                // Requests behind it have no better chance.
                Err(RouteError::Busy { .. }) => break,
                Err(error) => {
                    self.leave_queue(at);
                    self.reject(id, error);
                }
            }
        }
        self.plan_look(now);
    }

    /// Reports a change of the fleet's readiness, pace or size: queued requests may find room.
    pub fn on_fleet_changed(&mut self) {
        #[cfg(feature = "journal")]
        if let Some(journal) = &self.journal {
            journal.push(Line::FleetChanged);
        }
        self.capacity_changed = true;
    }

    /// Reports that a transport could not submit request `id` to `worker`: it is gone, draining or too slow.
    pub fn on_not_taken(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        self.fail_over(now, id, worker, env);
    }

    /// Reports that `worker` ended request `id` before its last token, because it shuts down.
    pub fn on_given_up(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        self.fail_over(now, id, worker, env);
    }

    /// Requests with a part at a worker that is `gone`, each with its number and that worker. Pass each to
    /// [`on_worker_gone`](Self::on_worker_gone).
    pub fn requests_of(&self, gone: impl Fn(WorkerId) -> bool) -> Vec<(u32, WorkerId)> {
        (0..)
            .zip(&self.lives)
            .filter_map(|(id, life)| Some((id, life.workers().find(|&worker| gone(worker))?)))
            .collect()
    }

    /// Reports that `worker` disappeared, and with it its part of request `id`.
    pub fn on_worker_gone(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        self.fail_over(now, id, worker, env);
    }

    /// Forgets all requests, as a frontend that stops and is replaced by one with these routers. Its workers end
    /// their parts, as they do when a connection closes; the requests themselves get no action.
    pub fn restart(&mut self, serve: Router, prefill: Option<Router>) {
        for id in 0..to_u32(self.lives.len()) {
            if self.is_open(id) {
                #[cfg(feature = "journal")]
                self.note(id, Input::Canceled);
                self.leave_workers(id, None);
                self.end(id);
            }
        }
        (self.serve, self.prefill) = (serve, prefill);
        self.waiting.clear();
        self.look_at = None;
        self.capacity_changed = false;
    }

    /// Reports that a worker refused request `id`. With `retry_elsewhere` another worker may take it.
    pub fn on_refused(
        &mut self,
        now: SimTime,
        id: u32,
        worker: WorkerId,
        retry_elsewhere: bool,
        env: &mut dyn Env,
    ) {
        if retry_elsewhere && self.may_place_anew(id) {
            return self.fail_over(now, id, worker, env);
        }
        if self.is_open(id) {
            #[cfg(feature = "journal")]
            self.note(id, Input::Refused { worker });
            self.leave_workers(id, Some(worker));
            let failed = self.end(id).last().copied();
            self.actions
                .push_back(Action::Refused { id, worker, failed });
        }
    }

    /// Reports that the prompt of request `id` was computed at `at`, and its blocks are held. Returns false
    /// if this was not expected.
    pub fn on_prefilled(&mut self, at: SimTime, id: u32, env: &dyn Env) -> bool {
        let transfer = self.rules.transfer;
        let Some((attempt, apart)) = self.apart(id) else {
            return false;
        };
        if apart.stage != Stage::Prefilling {
            return false;
        }
        apart.prefill_active.on_first_token();
        apart.prefill_active.on_computed();
        let action = match transfer {
            HandOver::Pull => {
                apart.stage = Stage::Reserving;
                let (from, to) = (apart.prefill.worker, apart.decode.worker);
                Action::Start {
                    id,
                    attempt,
                    role: Role::Decode,
                    rank: apart.decode,
                    at: at + env.latency_ns(from, to, Via::Frontend),
                }
            }
            HandOver::Push => {
                apart.stage = Stage::Transferring;
                apart.transfer(id, attempt, at)
            }
        };
        #[cfg(feature = "journal")]
        self.note(id, Input::Prefilled);
        self.actions.push_back(action);
        true
    }

    /// Reports that the decode rank of request `id` reserved blocks at `at` for its prompt, of which
    /// `cached_tokens` are cached. Returns false if this was not expected.
    pub fn on_reserved(&mut self, at: SimTime, id: u32, cached_tokens: u32, env: &dyn Env) -> bool {
        let transfer = self.rules.transfer;
        let Some((attempt, apart)) = self.apart(id) else {
            return false;
        };
        if apart.stage != Stage::Reserving {
            return false;
        }
        apart.cached_tokens = cached_tokens.min(apart.prompt_tokens);
        let at = at + env.latency_ns(apart.decode.worker, apart.prefill.worker, Via::Direct);
        let action = match transfer {
            HandOver::Pull => {
                apart.stage = Stage::Transferring;
                apart.transfer(id, attempt, at)
            }
            HandOver::Push => {
                apart.stage = Stage::Prefilling;
                Action::Start {
                    id,
                    attempt,
                    role: Role::Prefill,
                    rank: apart.prefill,
                    at,
                }
            }
        };
        #[cfg(feature = "journal")]
        self.note(id, Input::Reserved { cached_tokens });
        self.actions.push_back(action);
        true
    }

    /// Reports that the keys and values of a prompt have arrived. Returns false if the attempt is over.
    pub fn on_transferred(&mut self, id: u32, attempt: Attempt) -> bool {
        if !self.is_current(id, attempt) {
            return false;
        }
        let life = &mut self.lives[id as usize];
        match std::mem::replace(&mut life.state, State::Free) {
            State::Apart(apart) if apart.stage == Stage::Transferring => {
                let apart = *apart;
                let (decode, prefill) = (apart.decode, apart.prefill);
                life.state = State::Placed(Placed {
                    rank: decode,
                    role: Role::Decode,
                    active: apart.decode_active,
                });
                drop(apart.prefill_active);
                #[cfg(feature = "journal")]
                self.note(id, Input::Transferred);
                self.actions.push_back(Action::Receive { id, rank: decode });
                if !slipstream_base::planted!("lost-release") {
                    self.actions
                        .push_back(Action::Release { id, rank: prefill });
                }
                true
            }
            other => {
                life.state = other;
                false
            }
        }
    }

    /// Reports that the prompt of request `id` does not reach its decode rank: the prefill rank failed it, or its
    /// keys and values cannot be used. One worker computes and answers it from now on, perhaps the same decode
    /// rank. This does not count as a retry. Returns false if the request is not at two workers.
    pub fn on_prefill_failed(&mut self, now: SimTime, id: u32, env: &mut dyn Env) -> bool {
        if self.apart(id).is_none() {
            return false;
        }
        #[cfg(feature = "journal")]
        self.note(id, Input::PrefillFailed);
        self.leave_workers(id, None);
        let life = &mut self.lives[id as usize];
        life.whole = true;
        life.retries = life.retries.wrapping_add(1); // late messages of this attempt are recognized by it
        self.begin_attempt(id);
        let attempt = self.lives[id as usize].attempt;
        let request = env.request(id);
        self.place(now, id, &request.rest(attempt.0), env, None);
        true
    }

    /// Reports that input of request `id` was sent that cannot be sent again: it is bound to its worker.
    pub fn on_input_sent(&mut self, id: u32) {
        if self.is_open(id) {
            self.lives[id as usize].pinned = true;
        }
    }

    /// Reports the first token of request `id`. Returns false if none was expected.
    pub fn on_first_token(&mut self, id: u32) -> bool {
        self.capacity_changed = true;
        let Some(life) = self.lives.get_mut(id as usize) else {
            return false;
        };
        match std::mem::replace(&mut life.state, State::Free) {
            State::Placed(mut placed) => {
                placed.active.on_first_token();
                life.state = State::Streaming(placed);
                life.begun = true;
                #[cfg(feature = "journal")]
                self.note(id, Input::FirstToken);
                true
            }
            other => {
                life.state = other;
                false
            }
        }
    }

    /// Reports the last token of request `id`. No action follows, unless the request was queued or at two
    /// workers, where no end was expected.
    pub fn on_ended(&mut self, id: u32) {
        if self.is_open(id) {
            self.capacity_changed = true;
            #[cfg(feature = "journal")]
            self.note(id, Input::Ended);
            match &self.lives[id as usize].state {
                State::Waiting | State::Apart(_) => self.leave_workers(id, None),
                State::Streaming(placed) => placed.active.on_computed(),
                _ => {}
            }
            self.end(id);
        }
    }

    /// Cancels request `id`, because its client no longer waits for the answer.
    pub fn cancel(&mut self, id: u32) {
        if self.is_open(id) {
            #[cfg(feature = "journal")]
            self.note(id, Input::Canceled);
            self.leave_workers(id, None);
            self.end(id);
        }
    }

    // ---- Rules ----

    /// Handles a worker's failure. A request without a token is retried on another worker, and an answer that
    /// has begun is continued by one, within their limits.
    fn fail_over(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        // A worker without a part of the request reports an attempt that is over.
        if !self.is_open(id) || !self.lives[id as usize].workers().any(|of| of == worker) {
            return;
        }
        #[cfg(feature = "journal")]
        self.note(id, Input::Failed { worker });
        let again = self.may_place_anew(id);
        let begun = self.lives[id as usize].begun;
        self.leave_workers(id, Some(worker));
        if !again {
            let failed = self.end(id).last().copied();
            self.actions.push_back(Action::Lost {
                id,
                worker,
                failed,
                begun,
            });
            return;
        }
        let life = &mut self.lives[id as usize];
        if begun {
            // Earlier ones may be back, and the only ones left; `resumes_max` bounds the attempts.
            life.failed_on.clear();
        }
        life.failed_on.push(worker);
        // Both are bounded by their limits in `Rules`; numbers of attempts may repeat after 256.
        life.retries = life.retries.wrapping_add(1);
        life.resumed = life.resumed.wrapping_add(u8::from(begun));
        self.begin_attempt(id);
        let attempt = self.lives[id as usize].attempt;
        let request = env.request(id);
        #[cfg(feature = "journal")]
        if begun {
            let answered = request.answered;
            self.note(id, Input::Resumed { answered });
        }
        self.place(now, id, &request.rest(attempt.0), env, None);
    }

    fn may_place_anew(&self, id: u32) -> bool {
        let life = &self.lives[id as usize];
        if life.begun {
            return self.resumes(id) && usize::from(life.resumed) < self.rules.resumes_max;
        }
        if slipstream_base::planted!("lost-retry") {
            return false;
        }
        !life.pinned && life.failed_on.len() < self.rules.retries_max
    }

    /// Chooses a rank for a request, and starts it there.
    fn place(
        &mut self,
        now: SimTime,
        id: u32,
        request: &Request,
        env: &mut dyn Env,
        scores: Option<&mut Vec<Score>>,
    ) {
        if self.queued_for_any > 0 && !self.lives[id as usize].is_limited() {
            // Requests queued before it go first.
            let busy = self.serve.fleet().targets().len();
            let error = RouteError::Busy {
                busy,
                retry_after_s: 1,
            };
            return self.queue_or_reject(now, id, error);
        }
        match self.choose(now, id, request, env, scores) {
            Ok(placement) => self.start(now, id, placement),
            Err(error) => self.queue_or_reject(now, id, error),
        }
    }

    /// Chooses the rank that generates the answer, and the one that computes the prompt if it is
    /// another one.
    fn choose(
        &mut self,
        now: SimTime,
        id: u32,
        request: &Request,
        env: &mut dyn Env,
        scores: Option<&mut Vec<Score>>,
    ) -> Result<State, RouteError> {
        let is_whole = self.lives[id as usize].whole;
        let route = request.route(&self.lives[id as usize].failed_on);
        let routed = route_with(&mut self.serve, Role::Both, now, &route, env, scores)?;
        let apart = match &mut self.prefill {
            Some(prefill) if !(request.streams_input || request.whole || is_whole) => {
                let block_size = self.serve.fleet().block_size();
                let uncached = request
                    .prompt
                    .len()
                    .saturating_sub(routed.hit_blocks * block_size);
                // The client names the worker that answers, not the one that computes the prompt.
                let route = RouteRequest {
                    direct: None,
                    ..route
                };
                route_prefill(prefill, now, &route, uncached, env)
            }
            _ => None,
        };
        let Routed {
            target, mut active, ..
        } = routed;
        Ok(match apart {
            None => State::Placed(Placed {
                rank: target,
                role: Role::Both,
                active,
            }),
            Some(prefill) => {
                // The decode rank computes one token of the prompt, which is not charged.
                active.on_first_token();
                State::Apart(Box::new(Apart {
                    decode: target,
                    decode_active: active,
                    prefill: prefill.target,
                    prefill_active: prefill.active,
                    prompt_tokens: request.prompt.len(),
                    cached_tokens: 0,
                    stage: match self.rules.transfer {
                        HandOver::Pull => Stage::Prefilling,
                        HandOver::Push => Stage::Reserving,
                    },
                }))
            }
        })
    }

    fn start(&mut self, now: SimTime, id: u32, placement: State) {
        let life = &mut self.lives[id as usize];
        let (role, rank) = match &placement {
            State::Apart(apart) => match apart.stage {
                Stage::Prefilling => (Role::Prefill, apart.prefill),
                _ => (Role::Decode, apart.decode),
            },
            State::Placed(placed) => (placed.role, placed.rank),
            _ => unreachable!("choose() places a request"),
        };
        life.state = placement;
        self.actions.push_back(Action::Start {
            id,
            attempt: life.attempt,
            role,
            rank,
            at: now,
        });
    }

    fn queue_or_reject(&mut self, now: SimTime, id: u32, error: RouteError) {
        if matches!(error, RouteError::Busy { .. }) && self.queue_room.take(self.rules.queue_max) {
            let life = &mut self.lives[id as usize];
            life.state = State::Waiting;
            self.waiting.push_back((id, life.attempt));
            self.queued += 1;
            self.queued_for_any += usize::from(!life.is_limited());
            self.plan_look(now);
        } else {
            self.reject(id, error);
        }
    }

    fn reject(&mut self, id: u32, error: RouteError) {
        if matches!(error, RouteError::Busy { .. }) {
            self.serve.fleet().on_busy_refusal();
        }
        let failed = self.end(id).last().copied();
        self.actions
            .push_back(Action::Rejected { id, error, failed });
    }

    /// Removes the request at index `at` from the queue.
    fn leave_queue(&mut self, at: usize) {
        if let Some((id, _)) = self.waiting.remove(at) {
            self.give_place_back(id);
        }
    }

    fn give_place_back(&mut self, id: u32) {
        self.queued -= 1;
        self.queued_for_any -= usize::from(!self.lives[id as usize].is_limited());
        self.queue_room.give_back();
    }

    fn waits(&self, id: u32, attempt: Attempt) -> bool {
        let life = &self.lives[id as usize];
        life.attempt == attempt && matches!(life.state, State::Waiting)
    }

    /// Entries of requests that left the queue early are skipped, and removed once they are the majority.
    fn tidy_queue(&mut self) {
        if self.waiting.len() > 2 * self.queued + 64 {
            let mut waiting = std::mem::take(&mut self.waiting);
            waiting.retain(|&(id, attempt)| self.waits(id, attempt));
            self.waiting = waiting;
        }
    }

    /// If the router refreshes its view of loads at intervals, plans to examine the queue after a refresh.
    fn plan_look(&mut self, now: SimTime) {
        let interval_ns = self.rules.view_interval_ns;
        if self.queued > 0 && interval_ns > 0 && self.look_at.is_none() {
            self.look_at = Some(now + interval_ns);
        }
    }

    /// Removes a request from its workers and links, except from the worker that is `gone`.
    fn leave_workers(&mut self, id: u32, gone: Option<WorkerId>) {
        self.capacity_changed = true;
        let transfer = self.rules.transfer;
        let state = std::mem::replace(&mut self.lives[id as usize].state, State::Free);
        let mut kill = |role, rank: RankId| {
            if gone != Some(rank.worker) && !slipstream_base::planted!("lost-kill") {
                self.actions.push_back(Action::Kill { id, role, rank });
            }
        };
        match state {
            State::Free | State::Routing => {}
            State::Waiting => {
                self.give_place_back(id);
                self.tidy_queue();
            }
            State::Placed(placed) | State::Streaming(placed) => kill(placed.role, placed.rank),
            State::Apart(apart) => {
                let (decodes, prefills) = apart.started(transfer);
                if decodes {
                    kill(Role::Decode, apart.decode);
                }
                if apart.stage == Stage::Transferring {
                    self.actions.push_back(Action::CancelTransfer { id });
                }
                if prefills && gone != Some(apart.prefill.worker) {
                    self.actions.push_back(Action::Kill {
                        id,
                        role: Role::Prefill,
                        rank: apart.prefill,
                    });
                }
            }
        }
    }

    /// Ends the request. Returns the workers that failed it.
    fn end(&mut self, id: u32) -> Vec<WorkerId> {
        self.open -= 1;
        std::mem::replace(&mut self.lives[id as usize], Life::FREE).failed_on
    }

    fn begin_attempt(&mut self, id: u32) {
        let life = &mut self.lives[id as usize];
        life.attempt = Attempt(self.attempts);
        life.state = State::Routing;
        self.attempts += 1;
    }

    fn is_open(&self, id: u32) -> bool {
        self.lives
            .get(id as usize)
            .is_some_and(|life| !matches!(life.state, State::Free))
    }

    fn apart(&mut self, id: u32) -> Option<(Attempt, &mut Apart)> {
        let life = self.lives.get_mut(id as usize)?;
        match &mut life.state {
            State::Apart(apart) => Some((life.attempt, apart)),
            _ => None,
        }
    }
}

impl Apart {
    /// Whether the request was sent to the decode rank and to the prefill rank.
    fn started(&self, transfer: HandOver) -> (bool, bool) {
        match (transfer, self.stage) {
            (HandOver::Pull, Stage::Prefilling) => (false, true),
            (HandOver::Push, Stage::Reserving) => (true, false),
            _ => (true, true),
        }
    }

    fn transfer(&self, id: u32, attempt: Attempt, at: SimTime) -> Action {
        Action::Transfer {
            id,
            attempt,
            from: self.prefill.worker,
            to: self.decode.worker,
            tokens: self.prompt_tokens - self.cached_tokens,
            at,
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "only this crate decides (clippy.toml)"
)]
fn route_with(
    router: &mut Router,
    role: Role,
    now: SimTime,
    route: &RouteRequest<'_>,
    env: &mut dyn Env,
    scores: Option<&mut Vec<Score>>,
) -> Result<Routed, RouteError> {
    let turn: ViewTurn = router.view_turn(now);
    env.before_route(now, role, turn, route.prompt);
    match env.caches(role) {
        None => router.route(now, route, scores),
        Some(caches) => router.route_by(now, route, caches),
    }
}

/// Chooses the rank that computes a prompt of which `uncached` tokens are not cached at its decode rank.
/// `None` if the decode rank should compute it: it is short, or every prefill rank is busy or gone.
fn route_prefill(
    router: &mut Router,
    now: SimTime,
    route: &RouteRequest<'_>,
    uncached: u32,
    env: &mut dyn Env,
) -> Option<Routed> {
    if !router.takes_prompt(uncached) {
        return None;
    }
    let routed = route_with(router, Role::Prefill, now, route, env, None).ok()?;
    router.computes_soon(&routed).then_some(routed)
}
