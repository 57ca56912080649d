//! Workers that start and drain by the load: `[autoscale]`.
//!
//! The numbers are those of [`slipstream_autoscale`]. A worker that is wanted takes requests after its pool's
//! `startup_s`, with an empty cache; one that drains is ready again at once. Workers that end are those with the
//! highest numbers: they take no new requests, and stop when they have none.
//!
//! A worker that an `[[event]]` crashes or drains is out: others are started in its place at once, as a Deployment
//! does, and it is the first to stop. If there is no other it stays, so that it is used when its event has ended.

use slipstream_autoscale::{Autoscaler, Decision, Observed};
use slipstream_base::width::to_u32;
use slipstream_base::{Role, SimTime, WorkerId};
use slipstream_config::cluster::Cluster;

use crate::agenda::Agenda;
use crate::event::Event;
use crate::models::ModelParts;
use crate::node::Nodes;
use crate::outcome::{PoolSizeChange, PoolTime, Scaling};
use crate::parts::ns;
use crate::run::Sink;

/// State of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Stopped,
    /// With the number of its start, as a start may be taken back.
    Starting(u32),
    Ready,
    Draining,
}

impl State {
    /// Whether a worker is ready or starts.
    fn runs(self) -> bool {
        matches!(self, State::Ready | State::Starting(_))
    }
}

/// A pool that is scaled.
struct Pool {
    name: String,
    scaler: Autoscaler,
    /// Number of its first worker.
    first: u32,
    states: Vec<State>,
    startup_ns: u64,
    gpus_per_worker: u32,
    slots: u64,
    /// Whether it answers: requests in front of the workers wait for it.
    serves: bool,
    /// Until when `worker_ns` is counted.
    counted: SimTime,
    worker_ns: u128,
    /// Sum of TTFT over the objective, and first tokens, since the last decision.
    ttft: (f64, u64),
    /// Objective of requests without one, ns.
    ttft_ns: Option<u64>,
    /// Requests of the cluster that had arrived at the last decision.
    arrived: u64,
}

/// The pools that are scaled.
#[derive(Default)]
pub(crate) struct Pools {
    pools: Vec<Pool>,
    changes: Vec<PoolSizeChange>,
    starts: u32,
    /// Since when nothing but decisions has been pending, and none has changed anything.
    quiet: Option<SimTime>,
}

impl Pools {
    pub(crate) fn new(cluster: &Cluster) -> Pools {
        let mut pools = Vec::new();
        let mut first = 0;
        for pool in &cluster.pools {
            if let Some(config) = pool.autoscale {
                let scaler = Autoscaler::new(config, SimTime::ZERO);
                let engine = &pool.engine;
                let state = |at| {
                    if at < scaler.wanted() {
                        State::Ready
                    } else {
                        State::Stopped
                    }
                };
                pools.push(Pool {
                    name: pool.name.clone(),
                    first,
                    states: (0..pool.workers).map(state).collect(),
                    startup_ns: ns(engine.startup_s * 1e9),
                    gpus_per_worker: engine.gpus(),
                    slots: u64::from(engine.max_num_seqs) * u64::from(engine.data_parallel_size),
                    serves: pool.role != Role::Prefill,
                    counted: SimTime::ZERO,
                    worker_ns: 0,
                    ttft: (0.0, 0),
                    ttft_ns: config.ttft_s.map(|s| ns(s * 1e9)),
                    arrived: 0,
                    scaler,
                });
            }
            first += pool.workers;
        }
        Pools {
            pools,
            changes: Vec::new(),
            starts: 0,
            quiet: None,
        }
    }

    /// A pool that a function of the program scales.
    pub(crate) fn custom(&self) -> Option<&str> {
        let custom = self.pools.iter().find(|pool| pool.scaler.is_custom());
        custom.map(|pool| &*pool.name)
    }

    /// Whether no pool is scaled.
    pub(crate) fn is_empty(&self) -> bool {
        self.pools.is_empty()
    }

    /// Whether a worker takes requests, as far as scaling is concerned.
    pub(crate) fn runs(&self, worker: WorkerId) -> bool {
        self.pools.iter().all(|pool| {
            let at = worker.0.checked_sub(pool.first).map(|at| at as usize);
            let state = at.and_then(|at| pool.states.get(at));
            state.is_none_or(|state| *state == State::Ready)
        })
    }

    /// A first token came from `worker`, or from a prompt that it computed, `ttft_ns` after its request, which has an
    /// objective of `limit_ns`.
    pub(crate) fn on_first_token(&mut self, worker: WorkerId, ttft_ns: u64, limit_ns: Option<u64>) {
        for pool in &mut self.pools {
            if pool.index_of(worker).is_some()
                && let Some(limit_ns) = limit_ns.or(pool.ttft_ns)
            {
                pool.ttft.0 += ttft_ns as f64 / limit_ns.max(1) as f64;
                pool.ttft.1 += 1;
            }
        }
    }

    /// Whether no decision from `next` on will change anything. `idle`: nothing but decisions is pending at `now`, so
    /// that all that they observe stays as it is.
    pub(crate) fn is_settled(&mut self, idle: bool, now: SimTime, next: SimTime) -> bool {
        if !idle {
            self.quiet = None;
            return false;
        }
        let since = *self.quiet.get_or_insert(now);
        // Every recommendation in the window was then made by the same observations, and one decision followed.
        let each = self.pools.iter().map(|pool| pool.scaler.settles_ns());
        next.since(since) > each.max().unwrap_or(0)
    }

    /// The result of the run that ends at `now`; `None` if no pool is scaled.
    pub(crate) fn into_outcome(mut self, now: SimTime) -> Option<Scaling> {
        if self.pools.is_empty() {
            return None;
        }
        for pool in &mut self.pools {
            pool.count(now);
        }
        let seconds = |pool: &Pool| pool.worker_ns as f64 / 1e9;
        Some(Scaling {
            gpu_s: self
                .pools
                .iter()
                .map(|pool| seconds(pool) * f64::from(pool.gpus_per_worker))
                .sum(),
            gpus_max: self
                .pools
                .iter()
                .map(|pool| u64::from(pool.gpus_per_worker) * pool.states.len() as u64)
                .sum(),
            pools: self
                .pools
                .iter()
                .map(|pool| {
                    let changes = self.changes.iter().filter(|c| c.pool == pool.name);
                    let wanted = changes.flat_map(|change| [change.before, change.wanted]);
                    let wanted = || wanted.clone().chain([pool.scaler.wanted()]);
                    PoolTime {
                        name: pool.name.clone(),
                        worker_s: seconds(pool),
                        wanted_min: wanted().min().unwrap_or(0),
                        wanted_max: wanted().max().unwrap_or(0),
                    }
                })
                .collect(),
            changes: self.changes,
        })
    }
}

impl Pools {
    /// Plans the first decisions. Returns the workers that are not wanted at the start.
    pub(crate) fn begin(&self, agenda: &mut Agenda) -> Vec<WorkerId> {
        let mut stopped = Vec::new();
        for (at, pool) in (0..).zip(&self.pools) {
            let states = (pool.first..).zip(&pool.states);
            let states = states.filter(|(_, state)| **state == State::Stopped);
            stopped.extend(states.map(|(worker, _)| WorkerId(worker)));
            agenda.plan(pool.scaler.next_decision(), Event::Scale { pool: at });
        }
        stopped
    }

    /// The workers of a pool.
    pub(crate) fn workers(&self, at: usize) -> impl Iterator<Item = WorkerId> + use<> {
        let pool = &self.pools[at];
        (pool.first..pool.first + to_u32(pool.states.len())).map(WorkerId)
    }

    /// The pool of `worker`, if it is scaled.
    pub(crate) fn pool_of(&self, worker: WorkerId) -> Option<usize> {
        let mut pools = self.pools.iter();
        pools.position(|pool| pool.index_of(worker).is_some())
    }

    /// What a decision about a pool is made by. `out`: which of its workers an `[[event]]` has crashed or drains;
    /// `arrived`: requests of the cluster so far.
    pub(crate) fn observe(
        &self,
        at: usize,
        nodes: &Nodes,
        model: &ModelParts,
        out: &[bool],
        arrived: u64,
    ) -> Observed {
        let pool = &self.pools[at];
        let of_pool = pool.first..pool.first + to_u32(pool.states.len());
        let ready = pool.states.iter().zip(out);
        let ready = ready.filter(|(state, out)| **state == State::Ready && !**out);
        let mut observed = Observed {
            ready: to_u32(ready.count()),
            slots: pool.slots,
            ttft_ratio: (pool.ttft.1 > 0).then(|| pool.ttft.0 / pool.ttft.1 as f64),
            arrivals: arrived - pool.arrived,
            ..Observed::default()
        };
        for node in nodes.iter() {
            if of_pool.contains(&node.rank.worker.0) {
                let stats = node.engine.stats();
                observed.waiting += u64::from(stats.waiting);
                observed.running += u64::from(stats.running);
            }
        }
        // Requests in front of the workers wait for a worker that answers, or computes the prompt first.
        if pool.serves != model.prefill.is_some() {
            observed.waiting += model.dispatch.queued() as u64;
        }
        observed
    }

    /// Decides how many workers of a pool run. Returns that number, and whether it is another one than before.
    pub(crate) fn decide(
        &mut self,
        at: usize,
        now: SimTime,
        observed: Observed,
        arrived: u64,
        sink: &mut dyn Sink,
    ) -> (u32, bool) {
        let pool = &mut self.pools[at];
        pool.count(now);
        pool.ttft = (0.0, 0);
        pool.arrived = arrived;
        let before = pool.scaler.wanted();
        let wanted = if pool.scaler.is_custom() {
            let recommended = sink.recommend(&pool.name, now, &observed, before);
            pool.scaler.decide_by(now, recommended)
        } else {
            pool.scaler.decide(now, &observed)
        };
        sink.on_scale(
            &pool.name,
            &Decision {
                at: now,
                observed,
                before,
                wanted,
            },
        );
        if wanted != before {
            let pool = pool.name.clone();
            self.changes.push(PoolSizeChange {
                at: now,
                pool,
                before,
                wanted,
            });
        }
        (wanted, wanted != before)
    }

    /// Plans the next decision about a pool. `changed`: the last one changed something.
    pub(crate) fn plan_next(&mut self, at: usize, changed: bool, agenda: &mut Agenda) {
        if changed {
            self.quiet = None;
        }
        let next = self.pools[at].scaler.next_decision();
        agenda.plan(next, Event::Scale { pool: to_u32(at) });
    }

    /// A worker has started, unless it was stopped before.
    pub(crate) fn started(&mut self, worker: u32, start: u32) {
        for pool in &mut self.pools {
            let at = worker.checked_sub(pool.first).map(|at| at as usize);
            let state = at.and_then(|at| pool.states.get_mut(at));
            if let Some(state) = state.filter(|state| **state == State::Starting(start)) {
                *state = State::Ready;
            }
        }
    }

    /// The number of workers of a pool that the last decision wanted. Counts the time of its workers up to `now`.
    pub(crate) fn wanted(&mut self, at: usize, now: SimTime) -> u32 {
        self.pools[at].count(now);
        self.pools[at].scaler.wanted()
    }

    /// Starts or drains workers of a pool, so that `wanted` are ready or start, and returns whose state has changed. `out`
    /// as of [`observe`](Self::observe). The time of its workers is counted up to now.
    pub(crate) fn follow(
        &mut self,
        at: usize,
        wanted: u32,
        out: &[bool],
        agenda: &mut Agenda,
    ) -> Vec<WorkerId> {
        let pool = &mut self.pools[at];
        let mut changed: Vec<u32> = Vec::new();
        let started = pool.bring_up(wanted, out, &mut self.starts, &mut changed);
        pool.take_down(wanted, out, &mut changed);
        let ready = agenda.now + pool.startup_ns;
        for (worker, start) in started {
            agenda.plan(ready, Event::Scaled { worker, start });
        }
        changed.into_iter().map(WorkerId).collect()
    }

    /// Stops workers of a pool that drain and have no request left. They lose their caches.
    pub(crate) fn stop_drained(
        &mut self,
        at: usize,
        now: SimTime,
        nodes: &mut Nodes,
        model: &mut ModelParts,
    ) {
        let pool = &mut self.pools[at];
        let states = (pool.first..).zip(&pool.states);
        let drained: Vec<WorkerId> = states
            .filter(|(_, state)| **state == State::Draining)
            .map(|(worker, _)| WorkerId(worker))
            .filter(|&worker| {
                let own = |w: WorkerId| w == worker;
                model.dispatch.requests_of(own).is_empty() && nodes.are_idle(worker)
            })
            .collect();
        for worker in drained {
            pool.count(now);
            pool.states[(worker.0 - pool.first) as usize] = State::Stopped;
            for side in model.sides_mut() {
                side.on_worker_lost(worker);
            }
            for node in nodes.iter_mut().filter(|n| n.rank.worker == worker) {
                node.crash();
            }
        }
    }
}

impl Pool {
    /// Counts the time of workers up to `now`. Called before each change of a state.
    fn count(&mut self, now: SimTime) {
        let exist = self.states.iter().filter(|s| **s != State::Stopped).count();
        self.worker_ns += now.since(self.counted) as u128 * exist as u128;
        self.counted = now;
    }

    /// The index of a worker in this pool, if it is one of it.
    fn index_of(&self, worker: WorkerId) -> Option<usize> {
        let at = worker.0.checked_sub(self.first)? as usize;
        (at < self.states.len()).then_some(at)
    }

    /// Lets workers that drain or are stopped run, until `wanted` are ready or start. Returns those that start, with the
    /// numbers of their starts.
    fn bring_up(
        &mut self,
        wanted: u32,
        out: &[bool],
        starts: &mut u32,
        changed: &mut Vec<u32>,
    ) -> Vec<(u32, u32)> {
        let mut started = Vec::new();
        let mut have = self.running(out);
        // Draining workers have their caches: they come back first.
        for wanted_state in [State::Draining, State::Stopped] {
            for ((worker, state), &out) in (self.first..).zip(&mut self.states).zip(out) {
                if have < wanted && *state == wanted_state && !out {
                    have += 1;
                    changed.push(worker);
                    *state = if wanted_state == State::Draining || self.startup_ns == 0 {
                        State::Ready
                    } else {
                        *starts += 1;
                        started.push((worker, *starts));
                        State::Starting(*starts)
                    };
                }
            }
        }
        started
    }

    /// Drains or stops workers, until no more than `wanted` are ready or start.
    fn take_down(&mut self, wanted: u32, out: &[bool], changed: &mut Vec<u32>) {
        let mut have = self.running(out);
        let mut stop = |worker: u32, state: &mut State| {
            changed.push(worker);
            *state = match state {
                State::Starting(_) => State::Stopped,
                _ => State::Draining,
            };
        };
        // Workers that are out are the first to stop, except as many as nothing could replace.
        let mut missing = wanted.saturating_sub(have);
        for ((worker, state), &out) in (self.first..).zip(&mut self.states).zip(out) {
            if out && state.runs() {
                if missing == 0 {
                    stop(worker, state);
                }
                missing = missing.saturating_sub(1);
            }
        }
        // Then those that have not started yet.
        for starting in [true, false] {
            let end = self.first + to_u32(self.states.len());
            let each = (self.first..end).zip(&mut self.states).zip(out);
            for ((worker, state), &out) in each.rev() {
                let is_starting = matches!(state, State::Starting(_));
                if have > wanted && state.runs() && !out && is_starting == starting {
                    have -= 1;
                    stop(worker, state);
                }
            }
        }
    }

    /// Workers that are ready or start, except those that are `out`.
    fn running(&self, out: &[bool]) -> u32 {
        let each = self.states.iter().zip(out);
        to_u32(each.filter(|(state, out)| state.runs() && !**out).count())
    }
}
