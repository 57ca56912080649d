//! The run: processes events until there are none.
//!
//! This file has the loop over time and the order of what happens at one time. The rest is in its modules: `requests` is
//! the life of a request up to its engine, `actions` what the dispatcher decides, `passes` and `output` what engines
//! compute, `transfers` their KV blocks, `workers` which workers take requests, and `faults`, `loss`, `partition`,
//! `upgrade` and `frontend` what an `[[event]]` does. Features keep their state elsewhere, and know nothing of the run.

mod actions;
mod build;
mod faults;
mod frontend;
mod loss;
mod output;
mod partition;
mod passes;
mod requests;
mod transfers;
mod upgrade;
mod workers;

use std::io;
use std::path::Path;
use std::time::Duration;

use slipstream_base::text::counted;
use slipstream_base::{SimTime, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_dispatch::{Dispatcher, Role};
use slipstream_engine::{DecodeRun, PassOutput, Reserved, Usage};
use slipstream_workload::{PromptHasher, Request, Schedule};

use crate::agenda::Agenda;
use crate::env::{DispatchEnv, Pins};
use crate::event::Event;
use crate::faults::Faults;
use crate::flight::Flights;
use crate::host::{Costs, Host};
use crate::lanes;
use crate::lockstep::Lockstep;
use crate::models::{ModelParts, Models};
use crate::node::Nodes;
use crate::outcome::Outcome;
use crate::peers::Peers;
use crate::planned::PlannedPasses;
use crate::run::{Options, Progress, Sink, TwinError};
use crate::scaling::Pools;
use crate::share::{Shared, Shares};
use crate::threads::Threads;
use crate::wire::{Arrival, Wire};

/// Runs `workload` on `cluster`. `read` reads the files that the cluster refers to.
///
/// # Errors
/// [`TwinError`].
pub fn simulate(
    cluster: &Cluster,
    workload: &Workload,
    options: &Options,
    read: impl Fn(&Path) -> io::Result<Vec<u8>>,
    sink: &mut dyn Sink,
) -> Result<Outcome, TwinError> {
    let mut sim = Sim::new(cluster, workload, options, &read)?;
    if let Some(pool) = sim.scaling.custom()
        && !sink.recommends()
    {
        let pool = pool.to_owned();
        return Err(TwinError::NoFunction { pool });
    }
    sim.rules.watches = sink.wants_passes();
    if sim.rules.watches {
        for node in sim.nodes.iter_mut() {
            node.watch = Some(Box::default());
        }
    }
    let plain = sim.models.is_one()
        && sim.model.prefill.is_none()
        && !sim.rules.delays_output
        && cluster.events.is_empty()
        && sim.peers.is_none()
        && sim.lockstep.is_none()
        && sim.scaling.is_empty();
    let follow_ups = sim.schedule.may_follow_up()?;
    let independent = plain
        && lanes::are_independent(
            sim.model.serve.reads_cache,
            &cluster.router,
            workload,
            follow_ups,
        );
    // A sink that records passes needs one queue, which keeps them in the order of time.
    if independent && !options.one_queue && !sink.wants_passes() {
        return lanes::run(sim.into_apart(), sink);
    }
    if independent {
        sim.rules.looks_first = true;
        sim.model.dispatch.router().manual_refresh();
    }
    if plain && options.jump && !sim.rules.watches {
        sim.planned.enable(sim.nodes.len());
    }
    sim.run(sink)
}

/// A run.
pub(crate) struct Sim<'a> {
    options: &'a Options,
    cluster: &'a Cluster,
    rules: Rules,
    schedule: Schedule,
    agenda: Agenda,
    nodes: Nodes,
    planned: PlannedPasses,
    /// Parts of the current model.
    model: ModelParts,
    models: Models,
    flights: Flights,
    /// Workers of requests that are not the router's to choose.
    pins: Pins,
    wire: Wire,
    /// Loads between workers, if they fetch blocks from each other.
    peers: Option<Peers>,
    /// GPUs that pools share by turns, if there are some.
    shares: Option<Box<Shares>>,
    /// Ranks that begin every step together, if there are some.
    lockstep: Option<Box<Lockstep>>,
    host: Option<(Box<dyn Host>, Costs)>,
    /// The threads of the host, if it has some, instead.
    threads: Option<Box<Threads>>,
    faults: Faults,
    /// Pools with `[autoscale]`.
    scaling: Pools,
    cause: Cause,
    scratch: Scratch,
}

/// What holds during a whole run.
struct Rules {
    /// Whether prompts are computed by other nodes than answers, of any model.
    hands_over: bool,
    /// Whether tokens reach clients later than their passes end.
    delays_output: bool,
    /// Whether the router refreshes its view before all other events at the time of an arrival, as when it routes ahead
    /// (`lanes`).
    looks_first: bool,
    /// Whether the sink records passes.
    watches: bool,
    seed: u64,
}

/// Why the current request ends or moves.
#[derive(Default)]
struct Cause {
    /// Why an engine refused it.
    refusal: String,
    /// If its worker was just lost: the node that answered it, and its tokens so far.
    lost: Option<(u32, Usage)>,
}

/// Memory to be used again.
#[derive(Default)]
struct Scratch {
    /// Output of a pass; none while one is processed.
    out: Option<Box<PassOutput>>,
    run: DecodeRun,
    reserved: Vec<Reserved>,
    arrived: Vec<Arrival>,
    /// Makes the prompts of requests that are routed for the first time.
    hasher: PromptHasher,
}

impl<'a> Sim<'a> {
    fn into_apart(self) -> lanes::Apart<'a> {
        lanes::Apart {
            options: self.options,
            schedule: self.schedule,
            router: self.model.dispatch.into_router(),
            nodes: self.nodes.into_list(),
            root: self.model.root,
            context_max: self.model.context_max,
            seed: self.rules.seed,
            lag_ns: self.model.serve.lag_ns,
        }
    }

    /// Adds a request that `worker` computes.
    pub(crate) fn push(&mut self, request: Request, worker: WorkerId) {
        self.pins.insert(request.id().0, worker);
        self.schedule.push(request);
    }

    /// Requests with a worker of their own that have not ended.
    pub(crate) fn pinned(&self) -> usize {
        self.pins.len()
    }

    /// No request that arrives before `to` will be added.
    pub(crate) fn set_horizon(&mut self, to: SimTime) {
        self.agenda.horizon = to;
    }

    fn run(mut self, sink: &mut dyn Sink) -> Result<Outcome, TwinError> {
        self.promise_single_writer();
        let mut cut = None;
        let mut events = 0u64;
        while let Some(next) = self.next_time()? {
            if next > self.options.time_max {
                self.agenda.now = self.options.time_max;
                cut = Some(format!(
                    "simulated time reached its limit of {:?} with {} under way",
                    Duration::from_nanos(self.agenda.now.0),
                    counted(self.flights.len() as u64, "request")
                ));
                break;
            }
            if !self.scaling.is_empty() && self.only_decides(next)? {
                break;
            }
            cut = self.step(next, sink)?;
            if cut.is_some() {
                break;
            }
            events += 1;
            if events.is_multiple_of(self.options.progress_events.max(1))
                && !sink.on_progress(self.progress())
            {
                cut = Some(format!("interrupted at {}", self.agenda.now));
                break;
            }
        }
        if cut.is_none() && self.flights.len() > 0 {
            cut = Some(format!(
                "stuck: {} under way at {}, and nothing will ever end them",
                counted(self.flights.len() as u64, "request"),
                self.agenda.now
            ));
        }
        sink.on_progress(self.progress());
        Ok(self.finish(cut))
    }

    /// Nothing but this run writes the fleets.
    pub(crate) fn promise_single_writer(&self) {
        for parts in self.models.others().chain([&self.model]) {
            for side in parts.sides() {
                side.fleet.promise_single_writer();
            }
        }
    }

    /// Processes the events of `now`, the next time with any. Returns why the run cannot continue, if so.
    pub(crate) fn step(
        &mut self,
        now: SimTime,
        sink: &mut dyn Sink,
    ) -> Result<Option<String>, TwinError> {
        self.agenda.now = now;
        if self.rules.looks_first && self.schedule.next_due(now)? == Some(now) {
            let router = self.model.dispatch.router();
            let (nodes, tally) = (&mut *self.nodes, &mut self.model.tally);
            self.planned
                .run_all(now, nodes, &mut self.model.serve, tally);
            self.model
                .serve
                .refresh(now, router.view_turn(now), &self.nodes);
            router.advance_view(now);
            router.refresh();
        }
        self.end_passes(sink);
        self.run_due_events(sink);
        self.admit_waiting(sink);
        let refuses_all = self.take_arrivals(sink)?;
        if !self.faults.upgrades.is_empty() {
            self.continue_upgrades(sink);
        }
        self.begin_passes(sink)?;
        self.settle_shares();
        self.plan_resyncs();
        Ok(self.limit_reached(refuses_all))
    }

    /// Why the run cannot continue, if a limit of its options is reached. `refuses_all`: more requests than may be in
    /// flight arrived at the present time, and almost all were refused.
    fn limit_reached(&self, refuses_all: bool) -> Option<String> {
        if refuses_all {
            return Some(format!(
                "stuck: more than {} came at {}, were refused, and each let the next one begin; let them \
                 wait (`router.queue_max`), raise the busy thresholds of `[router]`, or send them again \
                 later (`--retries`)",
                counted(self.options.in_flight_max as u64, "request"),
                self.agenda.now
            ));
        }
        if self.flights.len() > self.options.in_flight_max {
            return Some(format!(
                "unstable: {} under way at {}, and more come than are answered",
                counted(self.flights.len() as u64, "request"),
                self.agenda.now
            ));
        }
        if self.wire.messages_under_way() > self.options.messages_max {
            return Some(format!(
                "unstable: {} under way on the network at {}, and more are sent than it carries; raise \
                 `network.nic_bits_per_s` or `network.frontend_bits_per_s`, send fewer requests, or \
                 leave messages out (`network.messages = false`)",
                counted(self.wire.messages_under_way() as u64, "message"),
                self.agenda.now
            ));
        }
        None
    }

    fn progress(&self) -> Progress {
        Progress {
            now: self.agenda.now,
            ended: self.models.ended(&self.model),
            in_flight: self.flights.len(),
        }
    }

    /// Time of the next event; `None` if there is none, or none with an effect.
    pub(crate) fn next_time(&mut self) -> Result<Option<SimTime>, TwinError> {
        let due = self.schedule.next_due(self.agenda.now)?;
        let end = self.next_end();
        let next = due.into_iter().chain(end).min();
        if self.lockstep.is_some() && due.is_none() && self.flights.len() == 0 {
            return Ok(None); // dummy batches alone
        }
        if self.is_plain() {
            return Ok(next);
        }
        if due.is_none() && self.flights.len() == 0 {
            return Ok(None);
        }
        let next = next.into_iter().chain(self.next_other()).min();
        let Some(threads) = &mut self.threads else {
            return Ok(next);
        };
        let limit = next.map_or(self.agenda.horizon, |next| next.min(self.agenda.horizon));
        Ok(threads.next_time(limit)?.or(next))
    }

    /// When the next pass of a serving node ends, or the next plan.
    fn next_end(&mut self) -> Option<SimTime> {
        let planned = &self.planned;
        self.agenda
            .next_end(|node, entry| planned.is_stale(node, entry))
    }

    /// Whether only arrivals and ends of passes can happen.
    fn is_plain(&self) -> bool {
        self.agenda.has_ends_only()
            && self.wire.is_idle()
            && self.threads_are_idle()
            && self.next_timeout().is_none()
    }

    fn threads_are_idle(&self) -> bool {
        let threads = self.threads.as_ref();
        threads.is_none_or(|threads| threads.is_idle())
    }

    fn next_timeout(&self) -> Option<SimTime> {
        self.models.next_timeout(&self.model)
    }

    /// Time of the next event except arrivals and ends of passes of serving nodes.
    fn next_other(&mut self) -> Option<SimTime> {
        let next = self.agenda.next_other().into_iter();
        next.chain(self.wire.next_time())
            .chain(self.next_timeout())
            .min()
    }

    /// Whether nothing but decisions about the number of workers will happen from `next` on, and none will change
    /// anything. Not within a step.
    fn only_decides(&mut self, next: SimTime) -> Result<bool, TwinError> {
        let idle = self.schedule.next_due(self.agenda.now)?.is_none()
            && self.wire.next_time().is_none()
            && self.threads_are_idle()
            && self.model.dispatch.next_timeout().is_none()
            && (self.agenda).has_only(|event| matches!(event, Event::Scale { .. }));
        Ok(self.scaling.is_settled(idle, self.agenda.now, next))
    }

    /// Processes the planned events that are due now, in the order of planning.
    fn run_due_events(&mut self, sink: &mut dyn Sink) {
        loop {
            self.take_from_wire();
            if let Some(threads) = &mut self.threads {
                threads.take_ended(&mut self.agenda, &mut self.flights);
            }
            let Some(event) = self.agenda.take_event() else {
                break;
            };
            self.process(event, sink);
        }
        for model in 0..self.models.len() {
            self.turn_to(model);
            self.model.dispatch.on_timeout(self.agenda.now);
        }
    }

    fn process(&mut self, event: Event, sink: &mut dyn Sink) {
        match event {
            Event::Route { slot, ticket } => {
                if self.flights.find(slot, ticket).is_some() {
                    self.turn_to_slot(slot);
                    self.route(slot, sink);
                }
            }
            Event::Send { step } => {
                self.turn_to_node(step.node);
                self.send(step);
            }
            Event::Deliver { step } => {
                self.turn_to_node(step.node);
                self.deliver(step, None, sink);
            }
            Event::Fetch {
                slot,
                attempt,
                tokens,
            } => {
                self.turn_to_slot(slot);
                self.fetch(slot, attempt, tokens);
            }
            Event::Received { slot, attempt } => {
                self.turn_to_slot(slot);
                self.received(slot, attempt, sink);
            }
            Event::Output { frame } => self.deliver_frame(frame, sink),
            Event::Scheduled { node } => {
                if let Some(threads) = &mut self.threads
                    && threads.scheduled(node)
                {
                    self.nodes.note_awake(node);
                }
            }
            Event::PeerSend { .. } | Event::PeerReceived { .. } => self.process_of_peers(event),
            Event::Swapped { .. } | Event::Turn { .. } => self.process_of_shares(event),
            Event::Scale { pool } => self.scale(pool as usize, sink),
            Event::Scaled { worker, start } => self.scaled_up(worker, start),
            Event::Begin { event } => self.begin_event(event, sink),
            Event::End { event } => self.end_event(event, sink),
            Event::Ready { worker, start } => self.worker_ready(worker, start),
            Event::Detect { event, start } => self.gpu_detected(event, start, sink),
            Event::Drained {
                event,
                worker,
                start,
            } => self.drain_expired(event, worker, start, sink),
            Event::Sever { event } => self.sever(event, sink),
            Event::Resync { node, life } => {
                if self.nodes[node].life == life {
                    self.publish_snapshot(node);
                }
            }
        }
    }

    /// An event of workers that fetch blocks from each other.
    fn process_of_peers(&mut self, event: Event) {
        let Some(peers) = &mut self.peers else {
            return;
        };
        let block_size = self.model.serve.fleet.block_size();
        let (nodes, agenda) = (&mut self.nodes, &mut self.agenda);
        match event {
            Event::PeerSend { fetch } => {
                let network = (&mut self.wire, &self.faults.partitions);
                peers.send(fetch, nodes, network, block_size, agenda);
            }
            Event::PeerReceived { fetch } => {
                if let Some(node) = peers.receive(fetch, nodes, block_size, agenda) {
                    nodes.wake(node);
                }
            }
            _ => {}
        }
    }

    /// An event of pools that share GPUs.
    fn process_of_shares(&mut self, event: Event) {
        let Some(shares) = &mut self.shares else {
            return;
        };
        match event {
            Event::Swapped { group } => shares.swapped(group, self.agenda.now, &mut self.nodes),
            Event::Turn { group } => shares.turn_ended(group),
            _ => {}
        }
    }

    /// Decides about the shared GPUs at which something has changed at this time.
    fn settle_shares(&mut self) {
        if let Some(shares) = &mut self.shares {
            shares.settle(&mut Shared {
                agenda: &mut self.agenda,
                nodes: &mut self.nodes,
                model: &mut self.model,
                models: &mut self.models,
            });
        }
    }

    /// The dispatcher, and its view of the cluster.
    fn dispatching(&mut self) -> (&mut Dispatcher, DispatchEnv<'_>) {
        let env = DispatchEnv {
            serve: &mut self.model.serve,
            prefill: self.model.prefill.as_mut(),
            nodes: &mut self.nodes,
            planned: &mut self.planned,
            tally: &mut self.model.tally,
            flights: &self.flights,
            wire: &self.wire,
            pins: &self.pins,
            root: self.model.root,
            choosing: Role::Both,
        };
        (&mut self.model.dispatch, env)
    }

    /// From now on the run holds the parts of `model`.
    #[inline]
    fn turn_to(&mut self, model: usize) {
        self.models.turn_to(&mut self.model, model);
    }

    /// As [`turn_to`](Self::turn_to), the model of `node`.
    #[inline]
    fn turn_to_node(&mut self, node: u32) {
        self.models.turn_to_node(&mut self.model, node);
    }

    /// As [`turn_to`](Self::turn_to), the model of the request in `slot`, if there is one.
    #[inline]
    fn turn_to_slot(&mut self, slot: u32) {
        if !self.models.is_one()
            && let Some(model) = self.flights.model_of(slot)
        {
            self.turn_to(model as usize);
        }
    }

    fn finish(mut self, cut: Option<String>) -> Outcome {
        let (nodes, tally) = (&mut *self.nodes, &mut self.model.tally);
        let serve = &mut self.model.serve;
        self.planned.run_all(self.agenda.now, nodes, serve, tally);
        let (flights, now) = (&self.flights, self.agenda.now);
        let models = (self.models).add_up(&mut self.model, flights, &self.nodes, now);
        self.model.tally.ended_at = now;
        let under_way = self.flights.len() as u64;
        let nodes = self.nodes.into_list().into_iter();
        let scaling = self.scaling.into_outcome(now);
        let peers = self.peers.map(|peers| peers.counts);
        let cluster = self.cluster;
        let shares = self.shares.map(|shares| shares.into_outcomes(cluster, now));
        let outcome = self
            .model
            .tally
            .into_outcome(nodes, under_way, &self.schedule, cut);
        let mut outcome = Outcome {
            models,
            shares: shares.unwrap_or_default(),
            scaling,
            ..outcome
        };
        if let Some(peers) = peers {
            peers.report(&mut outcome.engine);
        }
        outcome
    }
}
