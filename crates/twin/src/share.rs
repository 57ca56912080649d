//! GPUs that pools share by turns (`[share.NAME]`): of the models of one set of GPUs one is awake, and the others sleep.
//!
//! Requests for a model that sleeps wait in its engine, which is paused. The rules:
//!
//! - If the model that is awake has no work, it sleeps as soon as a request for another one waits.
//! - Otherwise it goes on for a turn, from the time at which that request came or the model woke, whichever is later. Then it
//!   admits no more, finishes what runs, and sleeps.
//! - Then the model wakes whose first request has waited longest.
//!
//! A model that wakes begins a pass at once, and a turn lasts a millisecond or more: each turn computes something, and with
//! *n* models a request waits for at most *n* - 1 turns of others and their last sequences before its model wakes.

use slipstream_base::SimTime;
use slipstream_base::width::to_u32;
use slipstream_config::cluster::{Cluster, SharingPool};

use crate::node::{Node, Phase};
use crate::sim::{Event, Sim};

/// All shared GPUs of a run.
pub(crate) struct Shares {
    groups: Vec<Group>,
    /// Of each node, its group, if it has one.
    of_node: Vec<Option<u32>>,
    /// Groups in which something has changed at this time.
    changed: Vec<u32>,
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
    /// It is, but admits no more.
    Ends(usize),
    /// One sleeps, and this one wakes.
    Swaps(usize),
}

/// What the awake model does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    /// Sequences run.
    Runs,
    /// Sequences wait that it may admit.
    Waits,
    /// It has no request.
    None,
}

/// What follows from a change in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing, before anything else changes.
    Rest,
    /// Nothing before this time.
    Look(SimTime),
    /// This member admits no more.
    Pause(usize),
    /// This member sleeps, and the other one is awake at that time.
    Swap(usize, usize, SimTime),
}

impl Group {
    /// The next step of the rules. `work`: of the member that is awake.
    fn decide(&self, now: SimTime, work: Work) -> Step {
        let (State::Awake(own) | State::Ends(own)) = self.state else {
            return Step::Rest;
        };
        let waiting = self.members.iter().enumerate().filter(|&(at, _)| at != own);
        let waiting = waiting.filter_map(|(at, member)| Some((member.waits_since?, at)));
        let Some((since, next)) = waiting.min() else {
            return Step::Rest;
        };
        let ends = matches!(self.state, State::Ends(_));
        if work == Work::None || ends && work != Work::Runs {
            let swapped = self.members[own].sleep_ns + self.members[next].wake_ns;
            return Step::Swap(own, next, now + swapped);
        }
        let turn_ends = since.max(self.since) + self.turn_ns;
        match ends {
            true => Step::Rest,
            false if now < turn_ends => Step::Look(turn_ends),
            false => Step::Pause(own),
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

/// GPUs that pools shared by turns.
#[derive(Clone, Debug)]
pub struct ShareOutcome {
    /// The NAME of `[share.NAME]`.
    pub name: String,
    /// Sets of GPUs: workers of its largest pool.
    pub workers: u32,
    /// Times that a model fell asleep for another one.
    pub swaps: u64,
    /// Time that swaps took, over all workers, ns.
    pub swapping_ns: u64,
    /// Its pools, in the order of the file, with the time that their models were awake, over all workers, ns.
    pub pools: Vec<(String, u64)>,
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
            changed: Vec::new(),
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
        if let Some(group) = self.of_node[node as usize]
            && !self.changed.contains(&group)
        {
            self.changed.push(group);
        }
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

impl Sim<'_> {
    /// Decides about the shared GPUs at which something has changed at this time.
    pub(crate) fn settle_shares(&mut self) {
        let Some(mut shares) = self.shares.take() else {
            return;
        };
        while let Some(group) = shares.changed.pop() {
            self.settle(&mut shares.groups[group as usize], group);
        }
        self.shares = Some(shares);
    }

    fn settle(&mut self, group: &mut Group, number: u32) {
        let now = self.now;
        if let State::Awake(own) | State::Ends(own) = group.state {
            for (at, member) in group.members.iter_mut().enumerate() {
                let sleeps = at != own;
                let node = &self.nodes[member.node as usize];
                if sleeps && member.waits_since.is_none() && !node.engine.is_idle() {
                    member.waits_since = Some(now);
                }
            }
            let node = &self.nodes[group.members[own].node as usize];
            let work = match node.phase {
                Phase::Idle if node.engine.is_idle() => Work::None,
                Phase::Idle => Work::Waits,
                _ => Work::Runs,
            };
            match group.decide(now, work) {
                Step::Rest => {}
                Step::Look(at) => {
                    if group.timer.is_none_or(|timer| timer != at) {
                        group.timer = Some(at);
                        self.plan_event(at, Event::Turn { group: number });
                    }
                }
                Step::Pause(own) => {
                    let node = group.members[own].node;
                    self.nodes[node as usize].engine.set_paused(true);
                    let since = group.since;
                    group.state = State::Ends(own);
                    debug_assert_eq!(group.since, since, "it is awake until it sleeps");
                    if self.nodes[node as usize].phase == Phase::Idle {
                        self.settle(group, number);
                    }
                }
                Step::Swap(own, next, at) => self.swap(group, number, (own, next, at)),
            }
        }
    }

    /// Puts a member to sleep, and wakes another one, which is awake at `at`.
    fn swap(&mut self, group: &mut Group, number: u32, (own, next, at): (usize, usize, SimTime)) {
        let (now, node) = (self.now, group.members[own].node);
        let engine = &mut self.nodes[node as usize].engine;
        engine.set_paused(true);
        let reset = engine.reset_prefix_cache();
        assert!(reset, "no sequence of a model that sleeps has blocks");
        if !engine.is_idle() {
            group.members[own].waits_since = Some(now);
        }
        self.turn_to_node(node);
        self.publish_idle(node);
        group.enter(now, State::Swaps(next));
        group.swaps += 1;
        self.plan_event(at, Event::Swapped { group: number });
    }

    /// A model is awake.
    pub(crate) fn swapped(&mut self, number: u32) {
        let Some(mut shares) = self.shares.take() else {
            return;
        };
        let group = &mut shares.groups[number as usize];
        if let State::Swaps(next) = group.state {
            group.enter(self.now, State::Awake(next));
            let member = &mut group.members[next];
            member.waits_since = None;
            let node = member.node;
            self.nodes[node as usize].engine.set_paused(false);
            self.wake(node);
            shares.note(node);
        }
        self.shares = Some(shares);
    }

    /// The turn of the model that is awake may have ended.
    pub(crate) fn turn_ended(&mut self, number: u32) {
        if let Some(shares) = &mut self.shares {
            let node = shares.groups[number as usize].members[0].node;
            shares.note(node);
        }
    }
}
