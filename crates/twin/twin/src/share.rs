//! GPUs that pools share by turns (`[share.NAME]`): of the models of one set of GPUs one is awake, and the others sleep.
//!
//! Requests for a model that sleeps wait in its engine, which is paused. The rules:
//!
//! - If the model that is awake has no work, it sleeps as soon as a request for another one waits.
//! - Otherwise it goes on for a turn, from the time at which that request came or the model woke, whichever is later. Then it
//!   admits no more, finishes what runs, and sleeps. If other workers of it are awake, they get its requests, and for another
//!   turn at most it admits those that it has.
//! - Then the model wakes whose first request has waited longest.
//!
//! While workers of a model are awake, its requests go to those alone, so that none wakes another one without need. Once
//! sequences have waited at each of them for a turn, they go to any. If all sleep, they go to those that are to wake for
//! others already, or to any.
//!
//! A model that wakes begins a pass at once, and a turn lasts a millisecond or more: each turn computes something, and with
//! *n* models a request waits for at most *n* - 1 turns of others and their last sequences before its model wakes.

use slipstream_base::width::to_u32;
use slipstream_base::{KvDelta, Role, SimTime};
use slipstream_config::cluster::{Cluster, SharingPool};

use crate::agenda::Agenda;
use crate::event::Event;
use crate::models::{ModelParts, Models};
use crate::node::{Node, Nodes, Phase};
use crate::outcome::ShareOutcome;

/// All shared GPUs of a run.
pub(crate) struct Shares {
    groups: Vec<Group>,
    /// Of each node, its group, if it has one.
    of_node: Vec<Option<u32>>,
    /// Nodes about which something has changed at this time.
    noted: Vec<u32>,
    /// By model.
    routes: Vec<Routes>,
    /// Of each node.
    queues: Vec<Queue>,
}

/// The workers of a model that requests go to.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Open {
    #[default]
    All,
    Awake,
    Pending,
}

/// A node as its model's router sees it.
#[derive(Clone, Copy, Default)]
struct Queue {
    /// Whether its model is awake.
    awake: bool,
    /// Whether it sleeps, and is to wake for a request.
    pending: bool,
    /// Since when sequences wait that no pass admitted.
    waits_since: Option<SimTime>,
    /// Whether it counts as free.
    free: bool,
}

/// The workers of a model that requests may go to.
#[derive(Default)]
struct Routes {
    /// Nodes that answer requests.
    nodes: Vec<u32>,
    /// How many of them are awake.
    awake: usize,
    /// How many of these admitted all that waited.
    free: usize,
    /// Time for which sequences wait at each before requests go to others, ns.
    turn_ns: u64,
    /// When that time ends, if it is known.
    opens: Option<SimTime>,
    /// How many of the others are to wake.
    pending: usize,
    open: Open,
    /// Whether other workers are awake, or to wake, since its fleet was told.
    changed: bool,
}

/// One set of GPUs.
struct Group {
    /// The place of its share in the cluster file.
    share: usize,
    members: Vec<Member>,
    turn_ns: u64,
    state: State,
    /// When that began.
    since: SimTime,
    /// When a model whose turn has ended stops to admit those that it has; `None`: it has.
    pauses: Option<SimTime>,
    /// When the turn of the model that is awake is looked at again.
    timer: Option<SimTime>,
    swaps: u64,
    swapping_ns: u64,
}

struct Member {
    node: u32,
    sleep_ns: u64,
    wake_ns: u64,
    /// Since when requests for it wait, while it sleeps.
    waits_since: Option<SimTime>,
    awake_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// This member is awake.
    Awake(usize),
    /// It is, but its turn has ended.
    Ends(usize),
    /// One sleeps, and this one wakes.
    Swaps(usize),
}

/// The state of the awake model.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Sequences run.
    Runs,
    /// Sequences wait that it may admit.
    Waits,
    /// It has no request.
    None,
}

/// The consequence of a change in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing, before anything else changes.
    Rest,
    /// Nothing before this time.
    Look(SimTime),
    /// This member takes no new requests, and admits those that it has until then.
    Leave(usize, SimTime),
    /// This member admits no more.
    Pause(usize),
    /// This member sleeps, and the other one is awake at that time.
    Swap(usize, usize, SimTime),
}

impl Group {
    /// The next step of the rules. `work`: of the member that is awake; `others`: whether its model has other workers that
    /// are awake.
    fn decide(&self, now: SimTime, work: Work, others: bool) -> Step {
        let (State::Awake(own) | State::Ends(own)) = self.state else {
            return Step::Rest;
        };
        let waiting = self.members.iter().enumerate().filter(|&(at, _)| at != own);
        let waiting = waiting.filter_map(|(at, member)| Some((member.waits_since?, at)));
        let Some((since, next)) = waiting.min() else {
            return Step::Rest;
        };
        let ends = matches!(self.state, State::Ends(_));
        let paused = ends && self.pauses.is_none();
        if work == Work::None || paused && work != Work::Runs {
            let swapped = self.members[own].sleep_ns + self.members[next].wake_ns;
            return Step::Swap(own, next, now + swapped);
        }
        if paused {
            return Step::Rest;
        }
        let turn_ends = since.max(self.since) + self.turn_ns;
        let ends_at = self.pauses.unwrap_or(turn_ends);
        if now < ends_at {
            Step::Look(ends_at)
        } else if others && !ends {
            Step::Leave(own, now + self.turn_ns)
        } else {
            Step::Pause(own)
        }
    }

    /// Whether this member is awake, or will be next.
    fn is_awake(&self, at: usize) -> bool {
        match self.state {
            State::Awake(own) | State::Swaps(own) => own == at,
            State::Ends(_) => false,
        }
    }

    /// Its state begins now.
    fn enter(&mut self, now: SimTime, state: State) {
        let spent = now.since(self.since);
        match self.state {
            State::Awake(own) | State::Ends(own) => self.members[own].awake_ns += spent,
            State::Swaps(_) => self.swapping_ns += spent,
        }
        // A model that ends its turn is still awake.
        (self.state, self.since) = (state, now);
    }
}

impl Shares {
    /// The shared GPUs of `cluster`, whose engines are `nodes`; `None` if it has none.
    pub(crate) fn new(cluster: &Cluster, nodes: &mut [Node], speedup: f64) -> Option<Box<Shares>> {
        if cluster.shares.is_empty() {
            return None;
        }
        let ns = |ns: u64| crate::parts::ns(ns as f64 / speedup);
        // Pools of a share have one rank per worker.
        let first = |at: usize| -> u32 {
            let before = cluster.pools[..at].iter();
            before
                .map(|pool| pool.workers * pool.engine.data_parallel_size)
                .sum()
        };
        let mut shares = Shares {
            groups: Vec::new(),
            of_node: vec![None; nodes.len()],
            noted: (0..to_u32(nodes.len())).collect(),
            routes: cluster
                .models()
                .iter()
                .map(|model| Routes {
                    turn_ns: ns(turn_of(cluster, &model.name)),
                    ..Routes::default()
                })
                .collect(),
            queues: vec![Queue::default(); nodes.len()],
        };
        for (share, config) in cluster.shares.iter().enumerate() {
            let workers = config.pools.iter().map(|of| cluster.pools[of.pool].workers);
            for worker in 0..workers.max().unwrap_or(0) {
                let having = config.pools.iter();
                let having = having.filter(|of| cluster.pools[of.pool].workers > worker);
                let member = |of: &SharingPool| Member {
                    node: first(of.pool) + worker,
                    sleep_ns: ns(of.sleep_ns),
                    wake_ns: ns(of.wake_ns),
                    waits_since: None,
                    awake_ns: 0,
                };
                let group = Group {
                    share,
                    members: having.map(member).collect(),
                    turn_ns: ns(config.turn_ns).max(1),
                    state: State::Awake(0),
                    since: SimTime::ZERO,
                    pauses: None,
                    timer: None,
                    swaps: 0,
                    swapping_ns: 0,
                };
                for (at, member) in group.members.iter().enumerate() {
                    shares.of_node[member.node as usize] = Some(to_u32(shares.groups.len()));
                    nodes[member.node as usize].engine.set_paused(at > 0);
                }
                shares.groups.push(group);
            }
        }
        Some(Box::new(shares))
    }

    /// Something about `node` may have changed.
    pub(crate) fn note(&mut self, node: u32) {
        if self.noted.last() != Some(&node) {
            self.noted.push(node);
        }
    }

    /// A pass of `node` has begun, or it is idle; `waiting` sequences were not admitted.
    pub(crate) fn began(&mut self, now: SimTime, node: u32, waiting: u32) {
        let queue = &mut self.queues[node as usize];
        if waiting == 0 {
            queue.waits_since = None;
        } else if queue.awake {
            queue.waits_since.get_or_insert(now);
        }
        self.note(node);
    }

    pub(crate) fn into_outcomes(mut self, cluster: &Cluster, now: SimTime) -> Vec<ShareOutcome> {
        let outcome = |share: &slipstream_config::cluster::ShareConfig| ShareOutcome {
            name: share.name.clone(),
            workers: 0,
            swaps: 0,
            swapping_ns: 0,
            pools: (share.pools.iter())
                .map(|of| (cluster.pools[of.pool].name.clone(), 0))
                .collect(),
        };
        let mut outcomes: Vec<ShareOutcome> = cluster.shares.iter().map(outcome).collect();
        for group in &mut self.groups {
            group.enter(now, group.state);
            let outcome = &mut outcomes[group.share];
            outcome.workers += 1;
            outcome.swaps += group.swaps;
            outcome.swapping_ns += group.swapping_ns;
            // A pool with fewer workers is missing from the last sets.
            let config = &cluster.shares[group.share];
            let worker = outcome.workers - 1;
            let having = (0..config.pools.len())
                .filter(|&at| cluster.pools[config.pools[at].pool].workers > worker);
            for (at, member) in having.zip(&group.members) {
                outcome.pools[at].1 += member.awake_ns;
            }
        }
        outcomes
    }
}

/// The longest turn of the shares that have `model`, ns.
fn turn_of(cluster: &Cluster, model: &str) -> u64 {
    let has = |of: &SharingPool| cluster.pools[of.pool].model.name == model;
    let shares = cluster.shares.iter();
    let of_model = shares.filter(|share| share.pools.iter().any(has));
    of_model.map(|share| share.turn_ns).max().unwrap_or(0)
}

/// The queues of `nodes`.
fn queues_of<'q>(nodes: &'q [u32], queues: &'q [Queue]) -> impl Iterator<Item = &'q Queue> {
    nodes.iter().map(|&node| &queues[node as usize])
}

impl Shares {
    /// Decides about the shared GPUs at which something has changed at this time.
    pub(crate) fn settle(&mut self, run: &mut Shared<'_>) {
        let noted = std::mem::take(&mut self.noted);
        if self.routes[0].nodes.is_empty() {
            for (node, n) in (0..).zip(run.nodes.iter()) {
                if n.role != Role::Prefill {
                    self.routes[run.models.of_node(node)].nodes.push(node);
                }
            }
        }
        for &node in &noted {
            if let Some(group) = self.of_node[node as usize] {
                let of = &mut self.groups[group as usize];
                run.settle(of, group, &self.routes);
                for (at, member) in of.members.iter().enumerate() {
                    let is = (of.is_awake(at), member.waits_since.is_some());
                    run.count_awake(&mut self.routes, &mut self.queues, member.node, is);
                }
            } else {
                run.count_awake(&mut self.routes, &mut self.queues, node, (true, false));
            }
        }
        for (model, routes) in self.routes.iter_mut().enumerate() {
            run.open_routes(model, routes, &self.queues);
        }
        self.noted = noted;
        self.noted.clear();
    }

    /// A model is awake.
    pub(crate) fn swapped(&mut self, number: u32, now: SimTime, nodes: &mut Nodes) {
        let group = &mut self.groups[number as usize];
        if let State::Swaps(next) = group.state {
            group.enter(now, State::Awake(next));
            let member = &mut group.members[next];
            member.waits_since = None;
            let node = member.node;
            nodes[node].engine.set_paused(false);
            nodes.wake(node);
            self.note(node);
        }
    }

    /// The turn of the model that is awake may have ended.
    pub(crate) fn turn_ended(&mut self, number: u32) {
        self.note(self.groups[number as usize].members[0].node);
    }
}

/// The parts of a run that shared GPUs read and change.
pub(crate) struct Shared<'a> {
    pub(crate) agenda: &'a mut Agenda,
    pub(crate) nodes: &'a mut Nodes,
    pub(crate) model: &'a mut ModelParts,
    pub(crate) models: &'a mut Models,
}

impl Shared<'_> {
    /// Counts `node` among those of its model that are awake, and those that are free.
    fn count_awake(
        &self,
        routes: &mut [Routes],
        queues: &mut [Queue],
        node: u32,
        (is_awake, is_pending): (bool, bool),
    ) {
        let n = &self.nodes[node];
        if n.role == Role::Prefill {
            return;
        }
        let queue = &mut queues[node as usize];
        let before = std::mem::replace(
            queue,
            Queue {
                awake: is_awake,
                pending: is_pending && !is_awake,
                free: is_awake && queue.waits_since.is_none(),
                // Those that wait while it sleeps wait for it to wake.
                waits_since: queue.waits_since.filter(|_| is_awake),
            },
        );
        let routes = &mut routes[self.models.of_node(node)];
        routes.changed |= (before.awake, before.pending) != (queue.awake, queue.pending);
        routes.pending = routes.pending + usize::from(queue.pending) - usize::from(before.pending);
        routes.awake = routes.awake + usize::from(is_awake) - usize::from(before.awake);
        routes.free = routes.free + usize::from(queue.free) - usize::from(before.free);
    }

    /// Tells the fleet of a model which of its workers take requests, if others do than before.
    fn open_routes(&mut self, model: usize, routes: &mut Routes, queues: &[Queue]) {
        let opens = if routes.free > 0 {
            SimTime::MAX
        } else {
            let waits = queues_of(&routes.nodes, queues).filter(|queue| queue.awake);
            let since = waits.filter_map(|queue| queue.waits_since).max();
            since.map_or(SimTime::ZERO, |since| since + routes.turn_ns)
        };
        let open = match routes.awake {
            0 if routes.pending > 0 => Open::Pending,
            1.. if self.agenda.now < opens => Open::Awake,
            _ => Open::All,
        };
        if open == Open::Awake && opens < SimTime::MAX && routes.opens != Some(opens) {
            routes.opens = Some(opens);
            // Of any group: the routes of all models are looked at whenever something is noted.
            self.agenda.plan(opens, Event::Turn { group: 0 });
        }
        if open == routes.open && (open == Open::All || !routes.changed) {
            routes.changed = false;
            return;
        }
        (routes.open, routes.changed) = (open, false);
        self.models.turn_to(self.model, model);
        for &node in &routes.nodes {
            let worker = self.nodes[node].rank.worker;
            let ready = match open {
                Open::All => true,
                Open::Awake => queues[node as usize].awake,
                Open::Pending => queues[node as usize].pending,
            };
            self.model.serve.fleet.set_ready(worker, ready);
        }
        self.model.dispatch.on_fleet_changed();
    }

    fn settle(&mut self, group: &mut Group, number: u32, routes: &[Routes]) {
        let now = self.agenda.now;
        if let State::Awake(own) | State::Ends(own) = group.state {
            for (at, member) in group.members.iter_mut().enumerate() {
                let sleeps = at != own;
                let node = &self.nodes[member.node];
                if sleeps && member.waits_since.is_none() && !node.engine.is_idle() {
                    member.waits_since = Some(now);
                }
            }
            let node = &self.nodes[group.members[own].node];
            let work = match node.phase {
                Phase::Idle if node.engine.is_idle() => Work::None,
                Phase::Idle => Work::Waits,
                _ => Work::Runs,
            };
            let model = self.models.of_node(group.members[own].node);
            // It counts itself until its turn has ended.
            let itself = usize::from(matches!(group.state, State::Awake(_)));
            let others = routes[model].awake > itself;
            match group.decide(now, work, others) {
                Step::Rest => {}
                Step::Leave(own, at) => {
                    group.state = State::Ends(own);
                    group.pauses = Some(at);
                    self.agenda.plan(at, Event::Turn { group: number });
                }
                Step::Look(at) => {
                    if group.timer.is_none_or(|timer| timer != at) {
                        group.timer = Some(at);
                        self.agenda.plan(at, Event::Turn { group: number });
                    }
                }
                Step::Pause(own) => {
                    let node = group.members[own].node;
                    self.nodes[node].engine.set_paused(true);
                    group.state = State::Ends(own);
                    group.pauses = None;
                    if self.nodes[node].phase == Phase::Idle {
                        self.settle(group, number, routes);
                    }
                }
                Step::Swap(own, next, at) => self.swap(group, number, (own, next, at)),
            }
        }
    }

    /// Puts a member to sleep, and wakes another one, which is awake at `at`.
    fn swap(&mut self, group: &mut Group, number: u32, (own, next, at): (usize, usize, SimTime)) {
        let (now, node) = (self.agenda.now, group.members[own].node);
        let engine = &mut self.nodes[node].engine;
        engine.set_paused(true);
        let reset = engine.reset_prefix_cache();
        assert!(reset, "no sequence of a model that sleeps has blocks");
        if !engine.is_idle() {
            group.members[own].waits_since = Some(now);
        }
        self.models.turn_to_node(self.model, node);
        let n = &mut self.nodes[node];
        self.model
            .publish_idle(now, node, n, &mut KvDelta::default());
        group.enter(now, State::Swaps(next));
        group.pauses = None;
        group.swaps += 1;
        self.agenda.plan(at, Event::Swapped { group: number });
    }
}
