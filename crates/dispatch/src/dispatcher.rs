//! Inputs, and the rules by which they become actions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use slipstream_base::{RankId, SimTime, WorkerId};
use slipstream_config::cluster::{Cluster, HandOver};
use slipstream_router::{RouteError, RouteRequest, Routed, Router, Score, ViewTurn};

use crate::Role;
use crate::action::{Action, Attempt};
use crate::env::{Env, Request, Via};
#[cfg(feature = "journal")]
use crate::journal::{Input, Journal, Line};
use crate::life::{Apart, Life, Placed, Stage, State};

/// Times that a request without a token is sent to another worker after one failed it. Once: a request
/// that ends two workers is likelier to be the cause than to be unlucky twice.
const RETRIES_MAX: usize = 1;

/// What a cluster file says of dispatching.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Who moves a prompt's keys and values between two workers.
    pub transfer: HandOver,
    /// Requests that may wait while every worker is busy, over all dispatchers that share a
    /// [`QueueRoom`].
    pub queue_max: usize,
    /// Time after which the router looks at loads again, ns; 0: at each decision.
    pub view_interval_ns: u64,
}

impl Rules {
    /// Those of `cluster`.
    pub fn of_cluster(cluster: &Cluster) -> Rules {
        Rules {
            transfer: cluster.kv.hand_over,
            queue_max: cluster.router.queue_max as usize,
            view_interval_ns: (cluster.router.view_interval_ms * 1e6).round() as u64,
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

/// Owns every request between acceptance and its last token. No I/O, no clock, no runtime.
///
/// Requests are named by small numbers that the driver chooses and may use again once a request is
/// over. After every input the driver carries out all actions before it passes the next one.
pub struct Dispatcher {
    rules: Rules,
    /// Takes whole requests, and decodes prompts computed elsewhere.
    serve: Router,
    /// Takes prompts, if there are pools for it.
    prefill: Option<Router>,
    lives: Vec<Life>,
    /// Requests that are not over.
    open: usize,
    attempts: u64,
    /// Requests in the queue, in order. Entries of attempts that are over are skipped.
    waiting: VecDeque<(u32, Attempt)>,
    /// Entries of `waiting` whose attempt is current.
    queued: usize,
    /// Of these, requests that any worker may take: what comes after them waits behind them.
    queued_for_any: usize,
    queue_room: QueueRoom,
    /// Since the queue was last looked at, a worker may have become less busy.
    capacity_changed: bool,
    /// The queue is looked at again at this time, though no load is known to have fallen.
    look_at: Option<SimTime>,
    actions: VecDeque<Action>,
    #[cfg(feature = "journal")]
    journal: Option<Journal>,
}

impl Dispatcher {
    /// A dispatcher that chooses with `serve`, and with `prefill` who computes prompts for others.
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

    /// Writes what happens from now on to `journal`.
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

    /// The router of requests.
    pub fn router(&mut self) -> &mut Router {
        &mut self.serve
    }

    /// The router of requests, for a driver that decides ahead of time.
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

    /// Whether `attempt` at request `id` is under way.
    pub fn is_current(&self, id: u32, attempt: Attempt) -> bool {
        self.lives
            .get(id as usize)
            .is_some_and(|life| life.attempt == attempt && !matches!(life.state, State::Free))
    }

    /// Workers that failed request `id` before its first token.
    pub fn failed_on(&self, id: u32) -> &[WorkerId] {
        self.lives
            .get(id as usize)
            .map_or(&[], |life| &life.failed_on)
    }

    /// The rank that generates the answer of request `id`, once it is chosen.
    pub fn decode_rank(&self, id: u32) -> Option<RankId> {
        match &self.lives.get(id as usize)?.state {
            State::Free | State::Routing | State::Waiting => None,
            State::Placed(placed) | State::Streaming(placed) => Some(placed.rank),
            State::Apart(apart) => Some(apart.decode),
        }
    }

    /// The rank that computes the prompt of request `id` for another one, until it has been sent.
    pub fn prefill_rank(&self, id: u32) -> Option<RankId> {
        match &self.lives.get(id as usize)?.state {
            State::Apart(apart) => Some(apart.prefill),
            _ => None,
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

    /// When [`on_timeout`](Self::on_timeout) is to be called, unless an input changes that.
    #[must_use]
    pub fn next_timeout(&self) -> Option<SimTime> {
        self.look_at
    }

    /// The time of [`next_timeout`](Self::next_timeout) has come. Call [`admit`](Self::admit) next.
    pub fn on_timeout(&mut self, now: SimTime) {
        if self.look_at.is_some_and(|at| at <= now) {
            self.look_at = None;
            self.capacity_changed = true;
        }
    }

    /// A request is accepted under the number `id`, which no open request has. `scores` collects all
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
        self.lives[at].named = request.direct.is_some();
        self.begin_attempt(id);
        self.place(now, id, request, env, scores);
    }

    /// Lets queued requests go, in order, as far as there is room. Does nothing unless a load may have
    /// fallen since the last call; drivers call it once they have passed all inputs of a moment.
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
            let request = env.request(id);
            match self.choose(now, id, &request, env, None) {
                Ok(placement) => {
                    self.leave_queue(at);
                    self.start(now, id, placement);
                }
                // The workers that may take it are busy; others may not be.
                Err(RouteError::Busy { .. }) if self.lives[id as usize].is_limited() => at += 1,
                // Those behind it have no better chance.
                Err(RouteError::Busy { .. }) => break,
                Err(error) => {
                    self.leave_queue(at);
                    self.reject(id, error);
                }
            }
        }
        self.plan_look(now);
    }

    /// Readiness, pace or size of the fleet changed: queued requests may find room.
    pub fn on_fleet_changed(&mut self) {
        #[cfg(feature = "journal")]
        if let Some(journal) = &self.journal {
            journal.push(Line::FleetChanged);
        }
        self.capacity_changed = true;
    }

    /// A transport could not hand request `id` to `worker`: it is gone, leaving or too far behind.
    pub fn on_not_taken(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        self.fail_over(now, id, worker, env);
    }

    /// `worker` ended request `id` before its first token, as it shuts down.
    pub fn on_given_up(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        self.fail_over(now, id, worker, env);
    }

    /// Requests with a part at a worker that is `gone`, by number, and that worker. Pass each to
    /// [`on_worker_gone`](Self::on_worker_gone).
    pub fn requests_of(&self, gone: impl Fn(WorkerId) -> bool) -> Vec<(u32, WorkerId)> {
        (0..)
            .zip(&self.lives)
            .filter_map(|(id, life)| Some((id, life.workers().find(|&worker| gone(worker))?)))
            .collect()
    }

    /// `worker` disappeared, and its part of request `id` with it.
    pub fn on_worker_gone(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        self.fail_over(now, id, worker, env);
    }

    /// A worker refused request `id`. With `retry_elsewhere` another worker may take it.
    pub fn on_refused(
        &mut self,
        now: SimTime,
        id: u32,
        worker: WorkerId,
        retry_elsewhere: bool,
        env: &mut dyn Env,
    ) {
        if retry_elsewhere && self.may_retry(id) {
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

    /// The prompt of request `id` was computed at `at`, and its blocks are held. False if it was not
    /// expected.
    pub fn on_prefilled(&mut self, at: SimTime, id: u32, env: &dyn Env) -> bool {
        let transfer = self.rules.transfer;
        let Some((attempt, apart)) = self.apart(id) else {
            return false;
        };
        if apart.stage != Stage::Prefilling {
            return false;
        }
        apart.prefill_active.on_first_token();
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

    /// The decode rank of request `id` made room at `at` for its prompt, of which it has `cached_tokens`.
    /// False if it was not expected.
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

    /// The keys and values of a prompt have arrived. False if the attempt is over.
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
                self.actions
                    .push_back(Action::Release { id, rank: prefill });
                true
            }
            other => {
                life.state = other;
                false
            }
        }
    }

    /// Input of request `id` was sent that cannot be sent again: it is bound to its worker.
    pub fn on_input_sent(&mut self, id: u32) {
        if self.is_open(id) {
            self.lives[id as usize].pinned = true;
        }
    }

    /// The first token of request `id` came. False if none was expected.
    pub fn on_first_token(&mut self, id: u32) -> bool {
        self.capacity_changed = true;
        let Some(life) = self.lives.get_mut(id as usize) else {
            return false;
        };
        match std::mem::replace(&mut life.state, State::Free) {
            State::Placed(mut placed) => {
                placed.active.on_first_token();
                life.state = State::Streaming(placed);
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

    /// The last token of request `id` came. No action follows, unless its worker was not to end it yet.
    pub fn on_ended(&mut self, id: u32) {
        if self.is_open(id) {
            self.capacity_changed = true;
            #[cfg(feature = "journal")]
            self.note(id, Input::Ended);
            if matches!(
                self.lives[id as usize].state,
                State::Waiting | State::Apart(_)
            ) {
                self.leave_workers(id, None);
            }
            self.end(id);
        }
    }

    /// Nobody wants the answer to request `id` any more.
    pub fn cancel(&mut self, id: u32) {
        if self.is_open(id) {
            #[cfg(feature = "journal")]
            self.note(id, Input::Canceled);
            self.leave_workers(id, None);
            self.end(id);
        }
    }

    // ---- Rules ----

    /// A worker failed a request. If no token has come, another one gets it, once.
    fn fail_over(&mut self, now: SimTime, id: u32, worker: WorkerId, env: &mut dyn Env) {
        // A worker that has no part of it reports an attempt that is over.
        if !self.is_open(id) || !self.lives[id as usize].workers().any(|of| of == worker) {
            return;
        }
        #[cfg(feature = "journal")]
        self.note(id, Input::Failed { worker });
        let may_retry = self.may_retry(id);
        let begun = matches!(self.lives[id as usize].state, State::Streaming(_));
        self.leave_workers(id, Some(worker));
        if !may_retry {
            let failed = self.end(id).last().copied();
            self.actions.push_back(Action::Lost {
                id,
                worker,
                failed,
                begun,
            });
            return;
        }
        self.lives[id as usize].failed_on.push(worker);
        self.begin_attempt(id);
        let request = env.request(id);
        self.place(now, id, &request, env, None);
    }

    fn may_retry(&self, id: u32) -> bool {
        let life = &self.lives[id as usize];
        let begun = matches!(life.state, State::Streaming(_));
        !begun && !life.pinned && life.failed_on.len() < RETRIES_MAX
    }

    /// Chooses where a request goes, and sends it there.
    fn place(
        &mut self,
        now: SimTime,
        id: u32,
        request: &Request,
        env: &mut dyn Env,
        scores: Option<&mut Vec<Score>>,
    ) {
        if self.queued_for_any > 0 && !self.lives[id as usize].is_limited() {
            // Those that came before it go first.
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

    /// Chooses the rank that generates the answer, and the one that computes the prompt if that is
    /// another one.
    fn choose(
        &mut self,
        now: SimTime,
        id: u32,
        request: &Request,
        env: &mut dyn Env,
        scores: Option<&mut Vec<Score>>,
    ) -> Result<State, RouteError> {
        let route = request.route(&self.lives[id as usize].failed_on);
        let routed = route_with(&mut self.serve, Role::Both, now, &route, env, scores)?;
        let apart = match &mut self.prefill {
            Some(prefill) if !request.streams_input => {
                let block_size = self.serve.fleet().block_size();
                let uncached = request
                    .prompt
                    .len()
                    .saturating_sub(routed.hit_blocks * block_size);
                // The client names who answers, not who computes the prompt.
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
                // Its rank computes one token of the prompt, which counts for nothing.
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

    /// The request at place `at` of the queue leaves it.
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

    /// Entries of requests that left while they waited are skipped, and dropped once they are most.
    fn tidy_queue(&mut self) {
        if self.waiting.len() > 2 * self.queued + 64 {
            let mut waiting = std::mem::take(&mut self.waiting);
            waiting.retain(|&(id, attempt)| self.waits(id, attempt));
            self.waiting = waiting;
        }
    }

    /// Where the router looks at loads now and then, the queue is looked at again when it has.
    fn plan_look(&mut self, now: SimTime) {
        let interval_ns = self.rules.view_interval_ns;
        if self.queued > 0 && interval_ns > 0 && self.look_at.is_none() {
            self.look_at = Some(now + interval_ns);
        }
    }

    /// Takes a request off the workers and links that it is on, apart from the worker that is `gone`.
    fn leave_workers(&mut self, id: u32, gone: Option<WorkerId>) {
        self.capacity_changed = true;
        let transfer = self.rules.transfer;
        let state = std::mem::replace(&mut self.lives[id as usize].state, State::Free);
        let mut kill = |role, rank: RankId| {
            if gone != Some(rank.worker) {
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

    /// The request is over. Returns the workers that failed it.
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
    /// Whether the decode rank and the prefill rank were sent the request.
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

fn route_with(
    router: &mut Router,
    role: Role,
    now: SimTime,
    route: &RouteRequest<'_>,
    env: &mut dyn Env,
    scores: Option<&mut Vec<Score>>,
) -> Result<Routed, RouteError> {
    let turn: ViewTurn = router.view_turn(now);
    env.before_route(now, role, turn);
    match env.caches(role) {
        None => router.route(now, route, scores),
        Some(caches) => router.route_by(now, route, caches),
    }
}

/// Chooses who computes a prompt of which `uncached` tokens are left to compute where it is decoded.
/// `None` if that is better done there: it is short, or every prefill rank is busy or gone.
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
