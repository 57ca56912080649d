//! A driver with its own record of the parts of requests that each worker holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use slipstream_base::{BlockHash, Prompt, RankId, SimTime, Tail, WorkerId};
use slipstream_config::cluster::{HandOver, RouterConfig, RouterPolicy};
use slipstream_dispatch::{Action, Attempt, Dispatcher, Env, Request, Role, Rules, Via};
use slipstream_router::{Fleet, Router, TargetConfig};

pub(crate) const BLOCK_SIZE: u32 = 16;
/// Latency of an empty message between any two workers, ns.
pub(crate) const LATENCY_NS: u64 = 500;

/// State of a request's part at a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// It was sent, and computes or waits for room.
    Runs,
    /// Its prompt is computed, and its blocks are kept for the transfer.
    Holds,
}

/// The end of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Answered,
    Canceled,
    Rejected,
    Lost { begun: bool },
    Refused,
}

pub(crate) struct Rig {
    pub(crate) now: SimTime,
    pub(crate) dispatch: Dispatcher,
    pub(crate) serve: Arc<Fleet>,
    pub(crate) prefill: Option<Arc<Fleet>>,
    pub(crate) prompts: Vec<Request>,
    /// By request and role: the holder, and the state there.
    pub(crate) held: BTreeMap<(u32, u8), (RankId, Held)>,
    /// Transfers in progress.
    pub(crate) transfers: BTreeMap<u32, Attempt>,
    /// Requests whose first token has arrived.
    pub(crate) begun: Vec<u32>,
    /// Of these, those that the present worker has sent a token of.
    pub(crate) streaming: BTreeSet<u32>,
    pub(crate) ends: BTreeMap<u32, End>,
    /// All actions so far, for tests that read them.
    pub(crate) log: Vec<Action>,
}

/// Tokens of an answer that its client has when its worker is lost.
pub(crate) const ANSWERED: u32 = 7;

/// The requests, and the numbers of those that have begun.
struct Surroundings<'a>(&'a [Request], &'a [u32]);

impl Env for Surroundings<'_> {
    fn request(&self, id: u32) -> Request {
        let answered = if self.1.contains(&id) { ANSWERED } else { 0 };
        Request {
            answered,
            ..self.0[id as usize].clone()
        }
    }

    fn latency_ns(&self, from: WorkerId, to: WorkerId, via: Via) -> u64 {
        assert_ne!(from, to, "a worker needs no network to reach itself");
        match via {
            Via::Direct => LATENCY_NS,
            Via::Frontend => 2 * LATENCY_NS,
        }
    }
}

fn role_number(role: Role) -> u8 {
    match role {
        Role::Both => 0,
        Role::Prefill => 1,
        Role::Decode => 2,
    }
}

fn fleet(workers: std::ops::Range<u32>, config: RouterConfig) -> Arc<Fleet> {
    let targets = workers.map(|worker| TargetConfig {
        rank: rank(worker),
        kv_blocks: 100,
        prefix_caching: true,
    });
    let fleet = Fleet::new(config, BLOCK_SIZE, targets.collect()).unwrap();
    let fleet = Arc::new(fleet);
    for target in fleet.targets() {
        fleet.set_ready(target.rank.worker, true);
    }
    fleet
}

pub(crate) fn rank(worker: u32) -> RankId {
    RankId {
        worker: WorkerId(worker),
        dp_rank: 0,
    }
}

pub(crate) fn prompt(seed: u64, len: u32) -> Prompt {
    let mut parent = BlockHash(seed);
    let blocks = (0..u64::from(len / BLOCK_SIZE)).map(|n| {
        parent = parent.child_of_id(seed, n);
        parent
    });
    Prompt::from_parts(len, BLOCK_SIZE, blocks.collect(), Tail::Opaque { id: seed }).unwrap()
}

impl Rig {
    /// `serve` workers that answer, followed by `prefill` workers that compute prompts for others.
    pub(crate) fn new(
        transfer: HandOver,
        serve: u32,
        prefill: u32,
        set: impl Fn(&mut RouterConfig),
    ) -> Rig {
        let mut config = RouterConfig {
            policy: RouterPolicy::LeastRequests,
            remote_prefill_tokens_min: 64,
            ..RouterConfig::default()
        };
        set(&mut config);
        let serve_fleet = fleet(0..serve, config.clone());
        let prefill_fleet = (prefill > 0).then(|| fleet(serve..serve + prefill, config.clone()));
        let rules = Rules {
            transfer,
            queue_max: config.queue_max as usize,
            view_interval_ns: (config.view_interval_ms * 1e6) as u64,
            retries_max: 1,
            resumes_max: config.resumes_max as usize,
        };
        Rig {
            now: SimTime(0),
            dispatch: Dispatcher::new(
                rules,
                Router::new(serve_fleet.clone(), 0),
                prefill_fleet
                    .as_ref()
                    .map(|fleet| Router::new(fleet.clone(), 0)),
            ),
            serve: serve_fleet,
            prefill: prefill_fleet,
            prompts: Vec::new(),
            held: BTreeMap::new(),
            transfers: BTreeMap::new(),
            begun: Vec::new(),
            streaming: BTreeSet::new(),
            ends: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    /// Submits a request with a prompt of `len` tokens. Returns its number.
    pub(crate) fn submit(&mut self, len: u32) -> u32 {
        self.submit_to(len, None)
    }

    /// As [`submit`](Self::submit), for the worker that the client names.
    pub(crate) fn submit_to(&mut self, len: u32, direct: Option<WorkerId>) -> u32 {
        self.submit_with(len, |request| request.direct = direct)
    }

    /// As [`submit`](Self::submit), changed by `set`.
    pub(crate) fn submit_with(&mut self, len: u32, set: impl FnOnce(&mut Request)) -> u32 {
        let id = self.prompts.len() as u32;
        let mut request = Request {
            prompt: prompt(u64::from(id % 5), len),
            max_tokens: 10,
            session: None,
            direct: None,
            only: None,
            streams_input: false,
            whole: false,
            resumes: true,
            answered: 0,
        };
        set(&mut request);
        self.prompts.push(request);
        let request = self.prompts[id as usize].clone();
        let mut env = Surroundings(&self.prompts, &self.begun);
        self.dispatch.submit(self.now, id, &request, &mut env, None);
        self.settle();
        id
    }

    /// Carries out the dispatcher's actions, and dispatches queued requests.
    pub(crate) fn settle(&mut self) {
        self.carry_out();
        let mut env = Surroundings(&self.prompts, &self.begun);
        self.dispatch.admit(self.now, &mut env);
        self.carry_out();
        let open = self.prompts.len() - self.ends.len();
        assert_eq!(
            self.dispatch.open(),
            open,
            "open requests are those without an end"
        );
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.dispatch.poll_action() {
            self.log.push(action);
            let id = action.id();
            assert!(
                !self.ends.contains_key(&id),
                "nothing follows an end: {action:?}"
            );
            match action {
                Action::Start {
                    role,
                    rank,
                    attempt,
                    ..
                } => {
                    assert!(self.dispatch.is_current(id, attempt));
                    let before = self
                        .held
                        .insert((id, role_number(role)), (rank, Held::Runs));
                    assert_eq!(before, None, "one worker plays a role at a time");
                    assert!(self.is_ready(rank), "starts go to workers that are ready");
                    self.streaming.remove(&id);
                }
                Action::Kill { role, rank, .. } => self.forget(id, role, rank),
                Action::Transfer {
                    attempt,
                    from,
                    to,
                    tokens,
                    ..
                } => {
                    let answered = if self.begun.contains(&id) {
                        ANSWERED
                    } else {
                        0
                    };
                    assert!(tokens <= self.prompts[id as usize].prompt.len() + answered);
                    let (holder, held) = self.held[&(id, 1)];
                    assert_eq!((holder.worker, held), (from, Held::Holds));
                    assert_eq!(self.held[&(id, 2)].0.worker, to);
                    assert_eq!(self.transfers.insert(id, attempt), None);
                }
                Action::CancelTransfer { .. } => {
                    assert!(self.transfers.remove(&id).is_some(), "it was under way");
                }
                Action::Receive { rank, .. } => assert_eq!(self.held[&(id, 2)].0, rank),
                Action::Release { rank, .. } => self.forget(id, Role::Prefill, rank),
                Action::Rejected { .. } => self.end(id, End::Rejected),
                Action::Lost { begun, .. } => {
                    assert_eq!(begun, self.begun.contains(&id));
                    self.end(id, End::Lost { begun });
                }
                Action::Refused { .. } => self.end(id, End::Refused),
            }
        }
    }

    fn is_ready(&self, rank: RankId) -> bool {
        [Some(&self.serve), self.prefill.as_ref()]
            .into_iter()
            .flatten()
            .filter_map(|fleet| Some(fleet.is_ready(fleet.target_of(rank)?)))
            .all(|ready| ready)
    }

    fn forget(&mut self, id: u32, role: Role, rank: RankId) {
        let held = self.held.remove(&(id, role_number(role)));
        assert_eq!(held.map(|(rank, _)| rank), Some(rank), "it was there");
    }

    /// A request is over: no worker and no link may still have a part of it.
    fn end(&mut self, id: u32, end: End) {
        let left: Vec<_> = self.held.keys().filter(|(of, _)| *of == id).collect();
        assert!(
            left.is_empty(),
            "request {id} ended as {end:?}, and is still at {left:?}"
        );
        assert!(!self.transfers.contains_key(&id));
        assert_eq!(self.ends.insert(id, end), None, "a request ends once");
    }

    /// Another frontend takes the place of this one.
    pub(crate) fn restart_frontend(&mut self) {
        let router = |fleet: &Arc<Fleet>| Router::new(fleet.clone(), 0);
        self.dispatch
            .restart(router(&self.serve), self.prefill.as_ref().map(router));
        self.carry_out();
        for id in 0..self.prompts.len() as u32 {
            if !self.ends.contains_key(&id) {
                self.end(id, End::Canceled);
            }
        }
        self.settle();
    }

    /// Delivers the next event that request `id` waits for.
    pub(crate) fn progress(&mut self, id: u32) {
        let held = |rig: &Rig, role| rig.held.get(&(id, role)).copied();
        let env = Surroundings(&self.prompts, &self.begun);
        if let Some(attempt) = self.transfers.remove(&id) {
            assert!(self.dispatch.on_transferred(id, attempt));
            assert!(
                !self.dispatch.on_transferred(id, attempt),
                "it arrives once"
            );
        } else if held(self, 1).is_some() {
            // Pull: the prompt, then the reservation. Push: the reservation precedes the prompt.
            if held(self, 1).unwrap().1 == Held::Runs {
                self.held.get_mut(&(id, 1)).unwrap().1 = Held::Holds;
                assert!(self.dispatch.on_prefilled(self.now, id, &env));
                assert!(
                    !self.dispatch.on_prefilled(self.now, id, &env),
                    "it is computed once"
                );
            } else {
                assert!(self.dispatch.on_reserved(self.now, id, 16, &env));
            }
        } else if let Some((rank, _)) = held(self, 0).or(held(self, 2)) {
            let disaggregated = self.dispatch.prefill_rank(id).is_some();
            if disaggregated {
                assert!(self.dispatch.on_reserved(self.now, id, 16, &env));
            } else if self.streaming.contains(&id) {
                let role = if held(self, 0).is_some() {
                    Role::Both
                } else {
                    Role::Decode
                };
                self.dispatch.on_ended(id);
                self.forget(id, role, rank);
                self.end(id, End::Answered);
            } else {
                self.begun.push(id);
                self.streaming.insert(id);
                assert!(self.dispatch.on_first_token(id));
            }
        }
        self.settle();
    }

    /// A worker that holds a part of request `id`, if there is one.
    pub(crate) fn holder(&self, id: u32, which: usize) -> Option<RankId> {
        let of = |role| self.held.get(&(id, role)).map(|&(rank, _)| rank);
        let holders: Vec<RankId> = [of(0), of(1), of(2)].into_iter().flatten().collect();
        (!holders.is_empty()).then(|| holders[which % holders.len()])
    }

    /// Removes every part of request `id` from `worker`.
    fn drop_part(&mut self, id: u32, worker: WorkerId) {
        self.held
            .retain(|(of, _), (rank, _)| *of != id || rank.worker != worker);
    }

    /// The holder refuses the request, or gives it up.
    pub(crate) fn fail_part(&mut self, id: u32, which: usize, how: u8) {
        if how == 4 {
            return self.fail_prefill(id);
        }
        let Some(rank) = self.holder(id, which) else {
            return;
        };
        let begun = self.streaming.contains(&id);
        self.drop_part(id, rank.worker);
        let mut env = Surroundings(&self.prompts, &self.begun);
        let (now, worker) = (self.now, rank.worker);
        match how {
            // Refusals arrive before the worker has computed a token.
            0 if !begun => self.dispatch.on_refused(now, id, worker, true, &mut env),
            1 if !begun => self.dispatch.on_refused(now, id, worker, false, &mut env),
            2 if !begun => self.dispatch.on_not_taken(now, id, worker, &mut env),
            _ => self.dispatch.on_given_up(now, id, worker, &mut env),
        }
        self.settle();
    }

    /// The prompt of request `id` does not reach the decode rank. No effect unless two workers share it.
    pub(crate) fn fail_prefill(&mut self, id: u32) {
        let apart = self.dispatch.prefill_rank(id).is_some();
        let mut env = Surroundings(&self.prompts, &self.begun);
        let taken = self.dispatch.on_prefill_failed(self.now, id, &mut env);
        assert_eq!(taken, apart);
        self.settle();
        assert_eq!(
            self.dispatch.prefill_rank(id),
            None,
            "one worker computes it from now on"
        );
    }

    /// `worker` reports that it ended request `id` before its time.
    pub(crate) fn give_up(&mut self, id: u32, worker: WorkerId) {
        let mut env = Surroundings(&self.prompts, &self.begun);
        self.dispatch.on_given_up(self.now, id, worker, &mut env);
        self.settle();
    }

    /// The worker disappears, with all its parts of requests.
    pub(crate) fn crash(&mut self, worker: WorkerId) {
        for fleet in [Some(&self.serve), self.prefill.as_ref()]
            .into_iter()
            .flatten()
        {
            fleet.on_worker_lost(worker);
        }
        let expected: Vec<u32> = {
            let mut ids: Vec<u32> = self
                .held
                .iter()
                .filter(|(_, (rank, _))| rank.worker == worker)
                .map(|((id, _), _)| *id)
                .collect();
            ids.dedup();
            ids
        };
        self.held.retain(|_, (rank, _)| rank.worker != worker);
        let affected = self.dispatch.requests_of(|of| of == worker);
        for &id in &expected {
            assert!(
                affected.contains(&(id, worker)),
                "a part of request {id} was at {worker}"
            );
        }
        for (id, _) in affected {
            let mut env = Surroundings(&self.prompts, &self.begun);
            self.dispatch.on_worker_gone(self.now, id, worker, &mut env);
            self.carry_out();
        }
        self.settle();
    }

    /// The worker is ready again.
    pub(crate) fn restart(&mut self, worker: WorkerId) {
        for fleet in [Some(&self.serve), self.prefill.as_ref()]
            .into_iter()
            .flatten()
        {
            fleet.set_ready(worker, true);
        }
        self.dispatch.on_fleet_changed();
        self.settle();
    }

    pub(crate) fn cancel(&mut self, id: u32) {
        if self.ends.contains_key(&id) {
            return;
        }
        self.dispatch.cancel(id);
        self.carry_out();
        self.end(id, End::Canceled);
        self.settle();
    }

    pub(crate) fn wait(&mut self, ns: u64) {
        self.now += ns;
        if self
            .dispatch
            .next_timeout()
            .is_some_and(|at| at <= self.now)
        {
            self.dispatch.on_timeout(self.now);
        }
        self.settle();
    }

    /// Charges of the router that have not been released.
    pub(crate) fn charged(&self) -> u64 {
        [Some(&self.serve), self.prefill.as_ref()]
            .into_iter()
            .flatten()
            .flat_map(|fleet| fleet.loads())
            .map(|l| l.requests + l.prefill_tokens + l.decode_tokens + l.active_blocks)
            .sum()
    }

    /// Numbers of the open requests.
    pub(crate) fn open(&self) -> Vec<u32> {
        (0..self.prompts.len() as u32)
            .filter(|id| !self.ends.contains_key(id))
            .collect()
    }
}
