//! The run: processes events until there are none.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io;
use std::path::Path;
use std::time::Duration;

use slipstream_base::mix::mix64;
use slipstream_base::text::counted;
use slipstream_base::width::to_u32;
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, Prompt, RequestId, SimTime, WorkerId,
};
use slipstream_config::cluster::{
    AutoscaleConfig, AutoscalePolicy, Cluster, HandOver, HostMode, PoolConfig, RouterPolicy,
};
use slipstream_config::workload_file::Workload;
use slipstream_dispatch::{self as dispatch, Action, Dispatcher, Env, Role, Via};
use slipstream_engine::timing::ApiTime;
use slipstream_engine::{DecodeRun, LowerHits, PassOutput, Reserved, Usage};
use slipstream_report::PassRecord;
use slipstream_router::{CachedBlocks, Hits, RouteError, ViewTurn};
use slipstream_workload::schedule::{Lag, Shard};
use slipstream_workload::{PromptHasher, Request, Schedule};

use crate::event::{Event, PassEnd, Step};
use crate::faults::{Faults, Held};
use crate::host::{Costs, Host, Ideal};
use crate::lanes;
use crate::lockstep::Lockstep;
use crate::models::{ModelParts, Models};
use crate::node::{Flight, Flights, Node, Phase, Watched};
use crate::outcome::Outcome;
use crate::parts::{Engines, Parts, RoutedNodes, api_time, ns};
use crate::peers::Peers;
use crate::planned::PlannedPasses;
use crate::requests::{check_length, dispatched, encoder_inputs, prompt_of, request_seed, root_of};
use crate::run::{
    Failure, Options, Progress, REFUSED, RequestRecord, Sink, TwinError, WORKER_LOST, failure,
};
use crate::scaling::Pools;
use crate::share::Shares;
use crate::tally::Tally;
use crate::threads::Threads;
use crate::wire::{Frames, Wire};

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
    sim.watches = sink.wants_passes();
    if sim.watches {
        for node in &mut sim.nodes {
            node.watch = Some(Box::default());
        }
    }
    let plain = sim.models.is_one()
        && sim.prefill.is_none()
        && !sim.delays_output
        && cluster.events.is_empty()
        && sim.peers.is_none()
        && sim.lockstep.is_none()
        && sim.scaling.is_empty();
    let follow_ups = sim.schedule.may_follow_up()?;
    let independent = plain
        && lanes::are_independent(sim.serve.reads_cache, &cluster.router, workload, follow_ups);
    // A sink that records passes needs one queue, which keeps them in the order of time.
    if independent && !options.one_queue && !sink.wants_passes() {
        return lanes::run(sim.into_apart(), sink);
    }
    if independent {
        sim.looks_first = true;
        sim.dispatch.router().manual_refresh();
    }
    if plain && options.jump && !sim.watches {
        sim.planned.enable(sim.nodes.len());
    }
    sim.run(sink)
}

/// The dispatcher's view of the cluster.
pub(crate) struct Surroundings<'a> {
    serve: &'a mut RoutedNodes,
    prefill: Option<&'a mut RoutedNodes>,
    nodes: &'a mut [Node],
    planned: &'a mut PlannedPasses,
    tally: &'a mut Tally,
    flights: &'a Flights,
    wire: &'a Wire,
    pins: &'a Pins,
    root: BlockHash,
    /// The side whose router is about to choose.
    choosing: Role,
}

impl Surroundings<'_> {
    fn side(&self, role: Role) -> &RoutedNodes {
        match (role, &self.prefill) {
            (Role::Prefill, Some(side)) => side,
            _ => self.serve,
        }
    }

    fn engines(&self) -> Engines<'_> {
        let side = self.side(self.choosing);
        side.engines(self.nodes)
    }
}

impl CachedBlocks for Surroundings<'_> {
    fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        self.engines().overlap_of(target, blocks)
    }

    fn overlap(&self, blocks: &[BlockHash], out: &mut Hits) {
        self.engines().overlap(blocks, out);
    }
}

impl Env for Surroundings<'_> {
    fn request(&self, id: u32) -> dispatch::Request {
        let flight = self.flights.get(RequestId(id.into()));
        let prompt = prompt_of(&flight.request, self.serve.fleet.block_size(), self.root);
        let direct = self.pins.get(&flight.request.id().0).copied();
        dispatch::Request {
            answered: flight.answered,
            ..dispatched(
                &flight.request,
                prompt.expect("it was routed before"),
                direct,
            )
        }
    }

    fn before_route(&mut self, now: SimTime, role: Role, turn: ViewTurn, prompt: &Prompt) {
        self.choosing = role;
        let (planned, tally) = (&mut *self.planned, &mut *self.tally);
        planned.before_route(now, turn, prompt, self.nodes, self.serve, tally);
        let side = match (role, &mut self.prefill) {
            (Role::Prefill, Some(side)) => side,
            _ => &mut *self.serve,
        };
        side.refresh(now, turn, self.nodes);
    }

    fn caches(&self, role: Role) -> Option<&dyn CachedBlocks> {
        let asks = self.side(role).asks_engines();
        asks.then_some(self as &dyn CachedBlocks)
    }

    fn latency_ns(&self, from: WorkerId, to: WorkerId, via: Via) -> u64 {
        self.wire.latency_ns(from, to, via == Via::Frontend)
    }
}

/// The worker of each request that is not the router's to choose, by number of the request.
pub(crate) type Pins = BTreeMap<u64, WorkerId>;

pub(crate) struct Sim<'a> {
    pub(crate) options: &'a Options,
    pub(crate) cluster: &'a Cluster,
    pub(crate) schedule: Schedule,
    /// Takes whole requests, and answers whose prompts were computed elsewhere.
    pub(crate) serve: RoutedNodes,
    /// Takes prompts, if pools have that role.
    pub(crate) prefill: Option<RoutedNodes>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) flights: Flights,
    /// Owns the requests that are routed or wait for it.
    pub(crate) dispatch: Dispatcher,
    /// Parts of all models but the current one.
    pub(crate) models: Models,
    /// Whether prompts are computed by other nodes than answers, of any model.
    hands_over: bool,
    tickets: u64,
    /// Ends of passes on serving nodes: no other part depends on them, unless requests follow from
    /// ends.
    pub(crate) ends: BinaryHeap<PassEnd>,
    /// Ends of passes on prefill nodes.
    pub(crate) prefill_ends: BinaryHeap<PassEnd>,
    queue: BinaryHeap<Reverse<(SimTime, u64, Event)>>,
    pub(crate) sequence: u64,
    pub(crate) wire: Wire,
    /// Loads between workers, if they fetch blocks from each other.
    pub(crate) peers: Option<Peers>,
    /// GPUs that pools share by turns, if there are some.
    pub(crate) shares: Option<Box<Shares>>,
    /// Ranks that begin every step together, if there are some.
    pub(crate) lockstep: Option<Box<Lockstep>>,
    pub(crate) host: Option<(Box<dyn Host>, Costs)>,
    /// The threads of the host, if it has some, instead.
    pub(crate) threads: Option<Box<Threads>>,
    /// Time from a request's arrival at the servers to the router, in a closed loop. In an open one the
    /// schedule has it.
    pub(crate) api_time: ApiTime,
    /// Whether the router refreshes its view before all other events at the time of an arrival, as
    /// when it routes ahead (`lanes`).
    looks_first: bool,
    /// Whether tokens reach clients later than their passes end.
    delays_output: bool,
    pub(crate) frames: Frames,
    /// More than `in_flight_max` requests arrived at the present time, and almost all were refused: each refusal lets a
    /// closed loop begin the next request at once, so time may never advance.
    refuses_all: bool,
    pub(crate) faults: Faults,
    /// Pools with `[autoscale]`.
    pub(crate) scaling: Pools,
    /// Why an engine refused the current request.
    refusal: String,
    /// For the request whose worker was just lost: the node that answered it, and its tokens so
    /// far.
    pub(crate) lost: Option<(u32, Usage)>,
    /// Requests in flight whose session continues after them.
    continuing: usize,
    /// Whether the sink records passes.
    watches: bool,
    /// Nodes that begin a pass at the current time.
    awake: Vec<u32>,
    planned: PlannedPasses,
    reserved: Vec<Reserved>,
    pub(crate) root: BlockHash,
    /// Makes the prompts of requests that are routed for the first time.
    hasher: PromptHasher,
    /// Tokens of a prompt and its answer at most.
    pub(crate) context_max: u32,
    seed: u64,
    /// Workers of requests that are not the router's to choose.
    pub(crate) pins: Pins,
    /// No request that arrives later is known yet: passes are jumped up to here.
    pub(crate) horizon: SimTime,
    pub(crate) now: SimTime,
    /// Output of a pass, to be used again; none while one is processed.
    pub(crate) out: Option<Box<PassOutput>>,
    run: DecodeRun,
    pub(crate) tally: Tally,
}

impl<'a> Sim<'a> {
    fn into_apart(self) -> lanes::Apart<'a> {
        lanes::Apart {
            options: self.options,
            schedule: self.schedule,
            router: self.dispatch.into_router(),
            nodes: self.nodes,
            root: self.root,
            context_max: self.context_max,
            seed: self.seed,
            lag_ns: self.serve.lag_ns,
        }
    }

    pub(crate) fn new(
        cluster: &'a Cluster,
        workload: &Workload,
        options: &'a Options,
        read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Sim<'a>, TwinError> {
        if cluster.router.policy == RouterPolicy::Direct {
            return Err(TwinError::Direct);
        }
        let by_slo =
            |of: &AutoscaleConfig| of.policy == AutoscalePolicy::Slo && of.ttft_s.is_none();
        let scaled = |pool: &&PoolConfig| pool.autoscale.as_ref().is_some_and(by_slo);
        if let Some(pool) = cluster.pools.iter().find(scaled)
            && !options.slo.any_limits("ttft")
        {
            let pool = pool.name.clone();
            return Err(TwinError::NoObjective { pool });
        }
        let host = host(cluster);
        let mut wire = Wire::new(cluster, options.speedup, read)?;
        let has_host = cluster.host.mode != HostMode::None;
        let delays_output = has_host || wire.carries_messages() || Faults::delay_output(cluster);
        let mut parts = Parts::new(cluster, options, delays_output, read)?;
        let traffic = std::mem::take(&mut parts.traffic);
        if cluster.hands_over() || cluster.pools.iter().any(|p| p.engine.peer_tier.is_some()) {
            wire.set_traffic(traffic);
        }
        let peers = Peers::new(cluster, &mut parts.nodes, options.speedup);
        let shares = Shares::new(cluster, &mut parts.nodes, options.speedup);
        let index = peers.as_ref().map(|peers| peers.index.clone());
        let threads = Threads::new(cluster, parts.nodes.len(), workload.seed)?;
        let mut workload = Cow::Borrowed(workload);
        let models = cluster.models();
        if models.len() > 1 || !workload.models().is_empty() {
            let served = models.iter().map(|model| model.name.clone());
            workload.to_mut().served_models = served.collect();
        }
        // A modelled frontend has costs of its own.
        let api_times = models.iter().map(|model| {
            if options.api_time && !has_host {
                api_time(cluster, &model.name, options, read)
            } else {
                Ok(ApiTime::default())
            }
        });
        let api_times = api_times.collect::<Result<Vec<ApiTime>, TwinError>>()?;
        let lag = |of: &ApiTime| Lag {
            request_ns: ns(of.request_ns),
            prompt_token_ns: of.prompt_token_ns,
        };
        let lags: Vec<Lag> = api_times.iter().map(lag).collect();
        let schedule = Schedule::open(&workload, 0, Shard::WHOLE)?.with_lags(&lags);
        let each = models.iter().zip(parts.models).zip(api_times);
        let of_model = each.map(|((model, mut sides), api_time)| {
            if let Some(side) = &mut sides.prefill {
                side.peers.clone_from(&index);
            }
            sides.serve.peers.clone_from(&index);
            let dispatch = Dispatcher::new(
                dispatch::Rules::of_cluster(cluster),
                sides.serve.router(),
                sides.prefill.as_ref().map(RoutedNodes::router),
            );
            #[cfg(feature = "journal")]
            let dispatch = match &options.journal {
                Some(journal) => dispatch.with_journal(journal.clone()),
                None => dispatch,
            };
            ModelParts {
                serve: sides.serve,
                prefill: sides.prefill,
                dispatch,
                root: BlockHash::root(&model.name, "", ""),
                context_max: cluster.context_max_of(&model.name),
                api_time: if schedule.is_closed() {
                    api_time
                } else {
                    ApiTime::default()
                },
                tally: Tally::default(),
            }
        });
        let (models, first) = Models::new(cluster, of_model.collect());
        let mut sim = Sim {
            options,
            cluster,
            refusal: String::new(),
            lost: None,
            continuing: 0,
            watches: false,
            api_time: first.api_time,
            schedule,
            serve: first.serve,
            prefill: first.prefill,
            nodes: parts.nodes,
            flights: Flights::default(),
            dispatch: first.dispatch,
            models,
            hands_over: cluster.hands_over(),
            tickets: 0,
            ends: BinaryHeap::new(),
            prefill_ends: BinaryHeap::new(),
            queue: BinaryHeap::new(),
            sequence: 0,
            wire,
            peers,
            shares,
            lockstep: Lockstep::new(cluster),
            host,
            threads,
            looks_first: false,
            delays_output,
            frames: Frames::default(),
            refuses_all: false,
            faults: Faults::new(cluster),
            scaling: Pools::new(cluster),
            awake: Vec::new(),
            planned: PlannedPasses::default(),
            reserved: Vec::new(),
            root: first.root,
            hasher: PromptHasher::default(),
            context_max: first.context_max,
            seed: mix64(workload.seed ^ cluster.router.seed),
            pins: Pins::new(),
            horizon: SimTime::MAX,
            now: SimTime::ZERO,
            out: None,
            run: DecodeRun::default(),
            tally: first.tally,
        };
        for (index, event) in (0u32..).zip(&cluster.events) {
            let at = SimTime::from_secs_f64(event.at_s);
            sim.plan_event(at, Event::Begin { event: index });
        }
        sim.begin_scaling();
        sim.settle_shares();
        Ok(sim)
    }

    /// Requests that have arrived.
    pub(crate) fn arrived(&self) -> u64 {
        self.tickets
    }

    /// Plans `event` for `at`.
    pub(crate) fn plan_event(&mut self, at: SimTime, event: Event) {
        self.queue.push(Reverse((at, self.sequence, event)));
        self.sequence += 1;
    }

    fn run(mut self, sink: &mut dyn Sink) -> Result<Outcome, TwinError> {
        self.promise_single_writer();
        let mut cut = None;
        let mut events = 0u64;
        while let Some(next) = self.next_time()? {
            if next > self.options.time_max {
                self.now = self.options.time_max;
                cut = Some(format!(
                    "simulated time reached its limit of {:?} with {} under way",
                    Duration::from_nanos(self.now.0),
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
                cut = Some(format!("interrupted at {}", self.now));
                break;
            }
        }
        if cut.is_none() && self.flights.len() > 0 {
            cut = Some(format!(
                "stuck: {} under way at {}, and nothing will ever end them",
                counted(self.flights.len() as u64, "request"),
                self.now
            ));
        }
        sink.on_progress(self.progress());
        Ok(self.finish(cut))
    }

    /// Nothing but this run writes the fleets.
    pub(crate) fn promise_single_writer(&self) {
        let others = self.models.others();
        let others = others.flat_map(|parts| [Some(&parts.serve), parts.prefill.as_ref()]);
        let sides = [Some(&self.serve), self.prefill.as_ref()].into_iter();
        for side in sides.chain(others).flatten() {
            side.fleet.promise_single_writer();
        }
    }

    /// Processes the events of `now`, the next time with any. Returns why the run cannot continue, if so.
    pub(crate) fn step(
        &mut self,
        now: SimTime,
        sink: &mut dyn Sink,
    ) -> Result<Option<String>, TwinError> {
        self.now = now;
        if self.looks_first && self.schedule.next_due(now)? == Some(now) {
            let router = self.dispatch.router();
            let (nodes, tally) = (&mut self.nodes, &mut self.tally);
            self.planned.run_all(now, nodes, &mut self.serve, tally);
            self.serve.refresh(now, router.view_turn(now), &self.nodes);
            router.advance_view(now);
            router.refresh();
        }
        self.end_passes(sink);
        self.run_due_events(sink);
        self.admit_waiting(sink);
        self.take_arrivals(sink)?;
        if self.faults.is_upgrading() {
            self.continue_upgrades(sink);
        }
        self.begin_passes(sink)?;
        self.settle_shares();
        self.plan_resyncs();
        if self.refuses_all {
            return Ok(Some(format!(
                "stuck: more than {} came at {}, were refused, and each let the next one begin; let them \
                 wait (`router.queue_max`), raise the busy thresholds of `[router]`, or send them again \
                 later (`--retries`)",
                counted(self.options.in_flight_max as u64, "request"),
                self.now
            )));
        }
        if self.flights.len() > self.options.in_flight_max {
            return Ok(Some(format!(
                "unstable: {} under way at {}, and more come than are answered",
                counted(self.flights.len() as u64, "request"),
                self.now
            )));
        }
        if self.wire.messages_under_way() > self.options.messages_max {
            return Ok(Some(format!(
                "unstable: {} under way on the network at {}, and more are sent than it carries; raise \
                 `network.nic_bits_per_s` or `network.frontend_bits_per_s`, send fewer requests, or \
                 leave messages out (`network.messages = false`)",
                counted(self.wire.messages_under_way() as u64, "message"),
                self.now
            )));
        }
        Ok(None)
    }

    fn progress(&self) -> Progress {
        Progress {
            now: self.now,
            ended: self.ended(),
            in_flight: self.flights.len(),
        }
    }

    /// Time of the next event; `None` if there is none, or none with an effect.
    pub(crate) fn next_time(&mut self) -> Result<Option<SimTime>, TwinError> {
        let due = self.schedule.next_due(self.now)?;
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
        let limit = next.map_or(self.horizon, |next| next.min(self.horizon));
        Ok(threads.next_time(limit)?.or(next))
    }

    /// When the next pass of a serving node ends, or the next plan.
    fn next_end(&mut self) -> Option<SimTime> {
        while let Some(&Reverse((end, entry, node, _))) = self.ends.peek() {
            if !self.planned.is_stale(node, entry) {
                return Some(end);
            }
            self.ends.pop();
        }
        None
    }

    /// Whether only arrivals and ends of passes can happen.
    fn is_plain(&self) -> bool {
        self.queue.is_empty()
            && self.prefill_ends.is_empty()
            && self.wire.is_idle()
            && self
                .threads
                .as_ref()
                .is_none_or(|threads| threads.is_idle())
            && self.next_timeout().is_none()
    }

    /// Time of the next event except arrivals and ends of passes of serving nodes.
    fn next_other(&mut self) -> Option<SimTime> {
        let end = self.prefill_ends.peek().map(|Reverse((end, ..))| *end);
        let other = self.queue.peek().map(|Reverse((at, ..))| *at);
        end.into_iter()
            .chain(other)
            .chain(self.wire.next_time())
            .chain(self.next_timeout())
            .min()
    }

    /// Whether nothing but decisions about the number of workers will happen from `next` on, and none will change
    /// anything. Not within a step.
    fn only_decides(&mut self, next: SimTime) -> Result<bool, TwinError> {
        let idle = self.schedule.next_due(self.now)?.is_none()
            && self.ends.is_empty()
            && self.prefill_ends.is_empty()
            && self.wire.next_time().is_none()
            && self
                .threads
                .as_ref()
                .is_none_or(|threads| threads.is_idle())
            && self.dispatch.next_timeout().is_none()
            && self
                .queue
                .iter()
                .all(|Reverse((_, _, event))| matches!(event, Event::Scale { .. }));
        Ok(self.scaling.is_settled(idle, self.now, next))
    }

    /// Ends the passes that end now.
    fn end_passes(&mut self, sink: &mut dyn Sink) {
        while let Some(&Reverse((end, entry, node, life))) = self.ends.peek()
            && end <= self.now
        {
            self.ends.pop();
            if self.planned.is_stale(node, entry) {
                continue;
            }
            let n = &mut self.nodes[node as usize];
            if n.life != life || n.hangs {
                continue; // its worker was lost, or hangs
            }
            self.turn_to_node(node);
            let n = &mut self.nodes[node as usize];
            match n.phase {
                Phase::Jumped => n.phase = Phase::Awake,
                Phase::Planned => self.end_plan(node),
                _ => self.end_pass(node, sink),
            }
            self.awake.push(node);
        }
        while let Some(&Reverse((end, _, node, life))) = self.prefill_ends.peek()
            && end <= self.now
        {
            self.prefill_ends.pop();
            let n = &self.nodes[node as usize];
            if n.life == life && !n.hangs {
                self.turn_to_node(node);
                self.end_prefill(node, sink);
                self.awake.push(node);
            }
        }
    }

    /// Ends the plan of a node, whose last pass ends now.
    fn end_plan(&mut self, node: u32) {
        let (nodes, tally) = (&mut self.nodes, &mut self.tally);
        let serve = &mut self.serve;
        self.planned.run(self.now, node, nodes, serve, tally);
        let n = &mut self.nodes[node as usize];
        n.engine.end_plan();
        n.phase = Phase::Awake;
    }

    /// Ends the plan of a node, if it has one, before anything is done to its engine.
    fn leave_plan(&mut self, node: u32) {
        if self.nodes[node as usize].phase != Phase::Planned {
            return;
        }
        let (nodes, tally) = (&mut self.nodes, &mut self.tally);
        let serve = &mut self.serve;
        self.planned.run(self.now, node, nodes, serve, tally);
        let n = &mut self.nodes[node as usize];
        let at = n.engine.end_plan();
        if at == self.now {
            n.phase = Phase::Awake;
            self.awake.push(node);
        } else if let Some(end) = n.begin(at) {
            assert!(end > self.now, "a pass has the length that was planned");
            self.push_end(node, end);
        }
    }

    fn push_end(&mut self, node: u32, end: SimTime) {
        let life = self.nodes[node as usize].life;
        self.ends.push(Reverse((end, self.sequence, node, life)));
        self.planned.set_entry(node, self.sequence);
        self.sequence += 1;
    }

    fn end_pass(&mut self, node: u32, sink: &mut dyn Sink) {
        let mut out = self.out.take().unwrap_or_default();
        let n = &mut self.nodes[node as usize];
        let watched = n.finish(&mut out);
        self.tally.passes += 1;
        self.serve.on_kv(self.now, node, n.life, &out.kv);
        self.publish_host(node);
        if self.delays_output {
            self.send_frame(node, out, watched);
            return;
        }
        self.deliver_output(node, &out, watched, sink);
        self.out = Some(out);
    }

    /// Delivers the output of a pass to the clients.
    fn deliver_output(
        &mut self,
        node: u32,
        out: &PassOutput,
        watched: Watched,
        sink: &mut dyn Sink,
    ) {
        let now = self.now;
        // Before `record_output`, which may move the time of a request's last token to now.
        for first in &out.first {
            let flight = self.flights.get_mut(first.id);
            if flight.is_resumed() {
                let tokens = flight.request.prompt.tokens() + flight.answered;
                self.tally.resumes.tokens += u64::from(tokens);
                self.tally.resumes.times.record(now.since(flight.last));
            }
        }
        let n = &mut self.nodes[node as usize];
        n.record_output(now, out, &mut self.flights, &mut self.tally.totals);
        if let Some(watch) = &n.watch {
            sink.on_pass(&PassRecord {
                engine: node,
                start: out.start,
                end: out.end,
                fpm: &out.fpm,
                tokens: out.token_count,
                used_blocks: watched.used_blocks,
                preemptions: watched.preempted,
                gaps: &watch.gaps,
                arrived: &out.arrived,
            });
        }
        for first in &out.first {
            let flight = self.flights.get_mut(first.id);
            flight.on_first(first, out.end, now);
            if !self.scaling.is_empty() {
                let slo = self.options.slo.of_class(flight.request.class);
                let limit = slo.and_then(|slo| slo.limit_ns("ttft"));
                let ttft = now.since(flight.request.due);
                // Both pools that had a part of it can be what made it late.
                for node in [Some(node), flight.prefill].into_iter().flatten() {
                    let worker = self.nodes[node as usize].rank.worker;
                    self.scaling.on_first_token(worker, ttft, limit);
                }
            }
            self.dispatch.on_first_token(to_u32(first.id.0));
        }
        for done in &out.finished {
            let flight = self.flights.remove(done.id);
            self.continuing -= usize::from(flight.request.has_next());
            let slot = to_u32(done.id.0);
            let failed_over = u32::from(self.dispatch.retries(slot));
            self.dispatch.on_ended(slot);
            let rank = self.nodes[node as usize].rank;
            let prefill_rank = flight.prefill.map(|node| self.nodes[node as usize].rank);
            let record = flight.record(rank, prefill_rank, failed_over, &done.usage, now);
            let slo = &self.options.slo;
            self.tally.note(&record, flight.gap_max, slo);
            sink.on_request(&record);
            self.schedule
                .on_done(&flight.request, done.usage.output_tokens, now);
            if !self.pins.is_empty() {
                self.pins.remove(&flight.request.id().0);
            }
        }
    }

    /// Processes the planned events that are due now, in the order of planning.
    fn run_due_events(&mut self, sink: &mut dyn Sink) {
        loop {
            self.take_from_wire();
            self.take_from_threads();
            let Some(&Reverse((at, _, event))) = self.queue.peek() else {
                break;
            };
            if at > self.now {
                break;
            }
            self.queue.pop();
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
                Event::PeerSend { fetch } => self.peer_sends(fetch),
                Event::PeerReceived { fetch } => self.peer_received(fetch),
                Event::Output { frame } => {
                    if let Some(frame) = self.frames.take(frame) {
                        // Messages in transit from a lost worker never arrive.
                        if self.nodes[frame.node as usize].life == frame.life {
                            self.turn_to_node(frame.node);
                            self.deliver_output(frame.node, &frame.out, frame.watched, sink);
                        }
                        self.out = Some(frame.out); // reuse its memory
                    }
                }
                Event::Scheduled { node } => {
                    if let Some(threads) = &mut self.threads
                        && threads.scheduled(node)
                    {
                        self.awake.push(node);
                    }
                }
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
                    if self.nodes[node as usize].life == life {
                        self.publish_snapshot(node);
                    }
                }
                Event::Swapped { group } => self.swapped(group),
                Event::Turn { group } => self.turn_ended(group),
                Event::Scale { pool } => self.scale(pool, sink),
                Event::Scaled { worker, start } => self.scaled_up(worker, start),
            }
        }
        for model in 0..self.models.len() {
            self.turn_to(model);
            self.dispatch.on_timeout(self.now);
        }
    }

    /// Takes the requests that are due now.
    fn take_arrivals(&mut self, sink: &mut dyn Sink) -> Result<(), TwinError> {
        // All requests of an endless workload may be due at one time. So may those of a closed loop
        // if they are refused: each lets the next begin, at that time.
        let most = self.options.in_flight_max;
        let mut came = 0;
        while self.flights.len() <= most
            && came <= most
            && let Some(request) = self.schedule.pop(self.now)?
        {
            came += 1;
            self.arrive(request, sink);
        }
        self.refuses_all = came > most && self.flights.len() <= most;
        Ok(())
    }

    fn arrive(&mut self, request: Request, sink: &mut dyn Sink) {
        let isl = request.prompt.tokens();
        self.turn_to(request.model as usize);
        self.continuing += usize::from(request.has_next());
        let mut flight = Flight::new(request, None, self.now);
        flight.ticket = self.tickets;
        self.tickets += 1;
        let ticket = flight.ticket;
        if self.faults.frontend_is_down() {
            let slot = to_u32(self.flights.insert(flight).0);
            self.route(slot, sink);
        } else if let Some((host, costs)) = &mut self.host {
            let (ns, after_parsing, after_tokenizing) = costs.request(isl);
            let done = host.run(self.now, ns);
            flight.hops.parsed = SimTime(done.0 - after_parsing);
            flight.hops.tokenized = SimTime(done.0 - after_tokenizing);
            let slot = to_u32(self.flights.insert(flight).0);
            self.plan_event(done, Event::Route { slot, ticket });
        } else if let Some(threads) = &mut self.threads {
            let slot = to_u32(self.flights.insert(flight).0);
            threads.read(self.now, slot, ticket, isl);
        } else {
            let slot = to_u32(self.flights.insert(flight).0);
            let api_ns = self.api_time.ns(isl);
            if api_ns > 0 {
                self.plan_event(self.now + api_ns, Event::Route { slot, ticket });
            } else {
                self.route(slot, sink);
            }
        }
    }

    /// Releases requests that wait in the frontend, in order, as far as workers have capacity.
    fn admit_waiting(&mut self, sink: &mut dyn Sink) {
        let now = self.now;
        for model in 0..self.models.len() {
            self.turn_to(model);
            let (dispatch, mut env) = self.dispatching();
            dispatch.admit(now, &mut env);
            self.carry_out(None, sink);
        }
    }

    /// The dispatcher, and its query interface.
    pub(crate) fn dispatching(&mut self) -> (&mut Dispatcher, Surroundings<'_>) {
        let surroundings = Surroundings {
            serve: &mut self.serve,
            prefill: self.prefill.as_mut(),
            nodes: &mut self.nodes,
            planned: &mut self.planned,
            tally: &mut self.tally,
            flights: &self.flights,
            wire: &self.wire,
            pins: &self.pins,
            root: self.root,
            choosing: Role::Both,
        };
        (&mut self.dispatch, surroundings)
    }

    /// Submits a request to the dispatcher.
    pub(crate) fn route(&mut self, slot: u32, sink: &mut dyn Sink) {
        let flight = self.flights.get_mut(RequestId(slot.into()));
        flight.away = false;
        if self.faults.frontend_is_down() {
            return self.refuse_at_connect(slot, sink);
        }
        let block_size = self.serve.fleet.block_size();
        let prompt = check_length(&flight.request, self.context_max).and_then(|()| {
            let request = &flight.request;
            let prompt = self
                .hasher
                .prompt(request, block_size, root_of(request, self.root));
            prompt.map_err(|error| error.to_string())
        });
        let prompt = match prompt {
            Ok(prompt) => prompt,
            Err(error) => {
                return self.refuse_for_good(slot, failure(REFUSED, &error), 0, sink);
            }
        };
        let direct = self.pins.get(&flight.request.id().0).copied();
        let request = dispatched(&flight.request, prompt, direct);
        let now = self.now;
        let (dispatch, mut env) = self.dispatching();
        dispatch.submit(now, slot, &request, &mut env, None);
        self.carry_out(Some(request.prompt), sink);
    }

    /// Carries out the dispatcher's actions. `prompt` is that of the current request, if known.
    pub(crate) fn carry_out(&mut self, mut prompt: Option<Prompt>, sink: &mut dyn Sink) {
        while let Some(action) = self.dispatch.poll_action() {
            match action {
                Action::Start {
                    id: slot,
                    attempt,
                    role,
                    rank,
                    at,
                } => {
                    let step = Step {
                        slot,
                        attempt,
                        role,
                        node: self.node_of(role, rank),
                    };
                    if self.is_second(role) {
                        self.plan_event(at, Event::Deliver { step });
                    } else {
                        self.begin_step(step, prompt.take(), sink);
                    }
                }
                Action::Kill { id, role, rank } => {
                    let node = self.node_of(role, rank);
                    self.leave_plan(node);
                    let engine = &mut self.nodes[node as usize].engine;
                    let id = RequestId(id.into());
                    if engine.abort(id) || engine.release_held(id) {
                        self.wake(node);
                    }
                }
                Action::Transfer {
                    id: slot,
                    attempt,
                    tokens,
                    at,
                    ..
                } => {
                    let fetch = Event::Fetch {
                        slot,
                        attempt,
                        tokens,
                    };
                    self.plan_event(at, fetch);
                }
                Action::CancelTransfer { id } => {
                    let flight = self.flights.get_mut(RequestId(id.into()));
                    if let Some((_, Some(transfer))) = flight.sent.take() {
                        self.wire.cancel(self.now, transfer);
                    }
                }
                Action::Receive { id, rank } => {
                    let node = self.node_of(Role::Decode, rank);
                    let engine = &mut self.nodes[node as usize].engine;
                    let took = engine.receive(RequestId(id.into()));
                    assert!(took, "it has room for what it asked for");
                    self.wake(node);
                }
                Action::Release { id, rank } => {
                    let node = self.node_of(Role::Prefill, rank);
                    let engine = &mut self.nodes[node as usize].engine;
                    let released = engine.release_held(RequestId(id.into()));
                    assert!(released, "blocks are held until they have been fetched");
                    self.wake(node);
                }
                Action::Rejected { id, error, failed } => {
                    self.reject(id, &error, u32::from(failed.is_some()), sink);
                }
                Action::Lost {
                    id, worker, failed, ..
                } => {
                    let error = format!("worker {worker} vanished under the request");
                    let failed_over = u32::from(failed.is_some());
                    let lost = self.lost.take();
                    let lost = lost.expect("only a crash loses a request");
                    self.lose(id, lost, failure(WORKER_LOST, &error), failed_over, sink);
                }
                Action::Refused { id, failed, .. } => {
                    let error = std::mem::take(&mut self.refusal);
                    let failed_over = u32::from(failed.is_some());
                    match self.flights.get(RequestId(id.into())).resuming {
                        Some(lost) => {
                            self.lose(id, lost, failure(WORKER_LOST, &error), failed_over, sink);
                        }
                        None => {
                            self.refuse_for_good(id, failure(REFUSED, &error), failed_over, sink);
                        }
                    }
                }
            }
        }
    }

    /// Whether a node with `role` is the second of a request's two. A request is sent from the
    /// frontend to the first one, and from there to the second.
    pub(crate) fn is_second(&self, role: Role) -> bool {
        match self.cluster.kv.hand_over {
            HandOver::Pull => role == Role::Decode,
            HandOver::Push => role == Role::Prefill,
        }
    }

    /// Sends a request to its first node.
    fn begin_step(&mut self, step: Step, prompt: Option<Prompt>, sink: &mut dyn Sink) {
        let flight = self.flights.get_mut(RequestId(step.slot.into()));
        if !flight.is_resumed() {
            flight.hops.routed = self.now;
            // Those of an attempt that failed.
            (flight.hops.prefilled, flight.hops.kv) = (None, None);
        }
        (flight.prefill, flight.sent) = (None, None);
        if let Some((host, costs)) = &mut self.host {
            let done = host.run(self.now, costs.dispatch());
            self.plan_event(done, Event::Send { step });
        } else if let Some(threads) = &mut self.threads {
            threads.dispatch(self.now, step.slot, Event::Send { step });
        } else if self.wire.carries_messages() {
            self.send(step);
        } else {
            self.deliver(step, prompt, sink);
        }
    }

    /// Passes a request to the network.
    fn send(&mut self, step: Step) {
        if !self.dispatch.is_current(step.slot, step.attempt) {
            return;
        }
        let flight = self.flights.get_mut(RequestId(step.slot.into()));
        if flight.hops.dispatched < flight.hops.routed {
            flight.hops.dispatched = self.now;
        }
        let deliver = Event::Deliver { step };
        if self.wire.carries_messages() {
            let worker = self.nodes[step.node as usize].rank.worker;
            let tokens = flight.request.prompt.tokens();
            self.wire.send_request(self.now, worker, tokens, deliver);
        } else {
            self.plan_event(self.now, deliver);
        }
    }

    /// A request reaches an engine.
    pub(crate) fn deliver(&mut self, step: Step, prompt: Option<Prompt>, sink: &mut dyn Sink) {
        if !self.dispatch.is_current(step.slot, step.attempt) {
            return;
        }
        let id = RequestId(step.slot.into());
        let second = self.is_second(step.role);
        if self.faults.has_partition() && self.is_cut_off(step) {
            return self.faults.hold(Held::Deliver { step });
        }
        self.leave_plan(step.node);
        self.nodes[step.node as usize].on_request();
        let block_size = self.serve.fleet.block_size();
        let flight = self.flights.get_mut(id);
        let request = &flight.request;
        let prompt = prompt.map_or_else(|| prompt_of(request, block_size, self.root), Ok);
        let engine_request = EngineRequest {
            id,
            prompt: prompt.expect("it was routed by its prompt"),
            params: GenerationParams {
                max_tokens: request.output_len,
                ignore_eos: request.ignore_eos,
                answered: flight.answered,
                adapter: request.adapter,
                encoder_inputs: encoder_inputs(request),
                ..GenerationParams::default()
            },
            priority: request.priority,
            seed: request_seed(self.seed, request),
        };
        if !second && !flight.is_resumed() {
            flight.hops.dispatched = flight.hops.dispatched.max(flight.hops.routed);
            flight.hops.received = self.now;
        }
        let engine = &mut self.nodes[step.node as usize].engine;
        let added = match step.role {
            Role::Prefill => engine.add_prompt(self.now, engine_request),
            Role::Decode => engine.add_answer(self.now, engine_request),
            Role::Both => engine.add(self.now, engine_request),
        };
        if let Some(shares) = &mut self.shares {
            shares.note(step.node);
        }
        match added {
            Ok(()) => self.wake(step.node),
            Err(refusal) => {
                self.refusal = refusal.to_string();
                let worker = self.nodes[step.node as usize].rank.worker;
                let now = self.now;
                let (dispatch, mut env) = self.dispatching();
                // A request that does not fit one engine fits none.
                dispatch.on_refused(now, step.slot, worker, false, &mut env);
                self.carry_out(None, sink);
            }
        }
    }

    /// Wakes an engine that has work, or capacity for waiting requests.
    pub(crate) fn wake(&mut self, node: u32) {
        let n = &mut self.nodes[node as usize];
        if n.phase == Phase::Idle && !n.engine.is_idle() {
            n.phase = Phase::Awake;
            self.awake.push(node);
        }
    }

    /// No worker takes a request: its client retries later, or gives up.
    fn reject(&mut self, slot: u32, error: &RouteError, failed_over: u32, sink: &mut dyn Sink) {
        let flight = self.flights.get_mut(RequestId(slot.into()));
        if let Some(lost) = flight.resuming {
            let message = format!("the worker vanished under the answer, and {error}");
            return self.lose(
                slot,
                lost,
                failure(WORKER_LOST, &message),
                failed_over,
                sink,
            );
        }
        // As the frontend answers: with the router's retry time, otherwise a second.
        let wait_s = match error {
            RouteError::Busy { retry_after_s, .. } => *retry_after_s,
            _ => 1,
        };
        if !error.retry_may_help() || !self.client_retries(slot, wait_s) {
            let message = error.to_string();
            self.refuse_for_good(slot, failure(REFUSED, &message), failed_over, sink);
        }
    }

    /// The client of a refused request tries again in `wait_s`, if it has tries left.
    pub(crate) fn client_retries(&mut self, slot: u32, wait_s: u32) -> bool {
        let flight = self.flights.get_mut(RequestId(slot.into()));
        if flight.retries >= self.options.retries {
            return false;
        }
        flight.retries += 1;
        flight.away = true;
        let ticket = flight.ticket;
        self.tally.totals.requests.retries += 1;
        let at = self.now + u64::from(wait_s) * 1_000_000_000;
        self.plan_event(at, Event::Route { slot, ticket });
        true
    }

    /// Ends a request that no worker has taken.
    pub(crate) fn refuse_for_good(
        &mut self,
        slot: u32,
        failure: Failure<'_>,
        failed_over: u32,
        sink: &mut dyn Sink,
    ) {
        let flight = self.flights.remove(RequestId(slot.into()));
        let record = RequestRecord {
            request: &flight.request,
            rank: None,
            prefill_rank: None,
            hops: flight.hops,
            admitted: self.now,
            first_pass_start: self.now,
            first: self.now,
            last: self.now,
            input_tokens: flight.request.prompt.tokens(),
            cached_tokens: 0,
            lower: LowerHits::default(),
            output_tokens: 0,
            preemptions: 0,
            retries: flight.retries + failed_over,
            error: Some(failure),
        };
        self.note_failed(&record, sink);
    }

    /// Ends a request that was lost; `usage` of it had arrived by then from node `target`.
    pub(crate) fn lose(
        &mut self,
        slot: u32,
        (target, usage): (u32, Usage),
        failure: Failure<'_>,
        failed_over: u32,
        sink: &mut dyn Sink,
    ) {
        let flight = self.flights.remove(RequestId(slot.into()));
        let rank = self.nodes[target as usize].rank;
        let prefill_rank = flight.prefill.map(|node| self.nodes[node as usize].rank);
        let failed_over = failed_over.max(flight.resumed);
        let record = RequestRecord {
            error: Some(failure),
            ..flight.record(rank, prefill_rank, failed_over, &usage, self.now)
        };
        self.note_failed(&record, sink);
    }

    fn note_failed(&mut self, record: &RequestRecord<'_>, sink: &mut dyn Sink) {
        self.continuing -= usize::from(record.request.has_next());
        self.tally.note(record, 0, &self.options.slo);
        sink.on_request(record);
        self.schedule.on_failed(record.request);
        self.pins.remove(&record.request.id().0);
    }

    /// Begins a pass on each engine whose last one has ended, or that got work.
    fn begin_passes(&mut self, sink: &mut dyn Sink) -> Result<(), TwinError> {
        let mut awake = std::mem::take(&mut self.awake);
        if self.hands_over {
            // First those whose ends limit the jumps of others.
            awake.sort_by_key(|&node| self.nodes[node as usize].role != Role::Prefill);
        }
        let mut until = None;
        let mut left = awake.len();
        for node in awake.drain(..) {
            if self.nodes[node as usize].phase != Phase::Awake {
                continue; // its worker was lost at this time
            }
            if let Some(threads) = &mut self.threads
                && !threads.may_begin(self.now, node)
            {
                continue; // until its thread has scheduled the pass
            }
            self.turn_to_node(node);
            if let Some(lockstep) = &self.lockstep
                && let Some(group) = lockstep.group_of(node)
            {
                self.begin_together(group, sink);
                continue;
            }
            if self.nodes[node as usize].role == Role::Prefill {
                left -= 1;
                if let Some(end) = self.begin(node, sink) {
                    let life = self.nodes[node as usize].life;
                    self.prefill_ends
                        .push(Reverse((end, self.sequence, node, life)));
                    self.sequence += 1;
                }
                continue;
            }
            let n = &mut self.nodes[node as usize];
            let mut end = self.planned.plan(n, self.now);
            if end.is_none() && !(self.planned.is_enabled() && n.engine.may_plan()) {
                let until = match until {
                    Some(until) => until,
                    None => *until.insert(self.jump_until(left)?),
                };
                end = self.jump(node, until, sink);
            }
            let end = end.or_else(|| self.begin(node, sink));
            if let Some(end) = end {
                self.push_end(node, end);
            }
        }
        self.awake = awake;
        Ok(())
    }

    fn begin(&mut self, node: u32, sink: &mut dyn Sink) -> Option<SimTime> {
        self.wire
            .before_step(node, self.nodes[node as usize].rank.worker);
        let end = self.nodes[node as usize].begin(self.now);
        if let Some(end) = end {
            self.wire.step_began(node, self.now, end);
        }
        if let Some(threads) = &mut self.threads {
            let ahead = end.is_some() && self.nodes[node as usize].engine.schedules_ahead();
            threads.began(self.now, node, ahead);
        }
        self.began(node, sink);
        end
    }

    /// A node has begun a pass, or is idle.
    pub(crate) fn began(&mut self, node: u32, sink: &mut dyn Sink) {
        self.publish_idle(node);
        self.note_queue(node);
        self.begin_peer_loads(node);
        if self.prefill.is_some() {
            let mut reserved = std::mem::take(&mut self.reserved);
            self.nodes[node as usize]
                .engine
                .take_reserved(&mut reserved);
            for reserved in reserved.drain(..) {
                self.on_reserved(reserved, sink);
            }
            self.reserved = reserved;
        }
    }

    /// Limit of jumps for the `awake` engines that begin a pass now: a request must find the state
    /// of its target engine, and of the router's index, at its time.
    fn jump_until(&mut self, awake: usize) -> Result<SimTime, TwinError> {
        let single = self.delays_output
            || self.faults.need_single_passes
            || self.peers.is_some()
            || self.wire.slows_steps();
        if !self.options.jump || single || awake == 0 {
            return Ok(SimTime::ZERO);
        }
        let mut until = self.horizon;
        if !self.is_plain() {
            until = self.next_other().map_or(until, |next| next.min(until));
        }
        if self.hands_over
            && let Some(Reverse((end, ..))) = self.ends.peek()
        {
            // The end of a pass may free blocks for a prompt, and so wake its prefill node.
            until = until.min(*end);
        }
        // Requests arrive at known times, unless one that ends causes the next, or frees capacity.
        let known = self.continuing == 0 && !self.schedule.is_closed();
        if known && self.queued() == 0 {
            if self.hands_over && awake > 1 {
                // One may free blocks for a prompt, and so wake the node that computes the next
                // one.
                return Ok(SimTime::ZERO);
            }
            let due = self.schedule.next_due(self.now)?;
            return Ok(due.map_or(until, |due| due.min(until)));
        }
        if awake > 1 {
            return Ok(SimTime::ZERO);
        }
        Ok(self.next_time()?.map_or(until, |next| next.min(until)))
    }

    /// Jumps over passes that end before `until`; returns the end of the last.
    fn jump(&mut self, node: u32, until: SimTime, sink: &mut dyn Sink) -> Option<SimTime> {
        if until <= self.now {
            return None;
        }
        let until = until.min(self.options.time_max);
        let end = self.nodes[node as usize].jump(
            self.now,
            until,
            &mut self.run,
            &mut self.tally.totals,
        )?;
        let passes = self.run.ends.len() as u64;
        self.tally.passes += passes;
        self.tally.jumped += passes;
        let n = &self.nodes[node as usize];
        let kv = &mut self.out.get_or_insert_default().kv;
        self.serve.on_run(node, n, &self.run, kv);
        self.note_queue(node);
        if self.watches {
            self.report_jump(node, sink);
        }
        Some(end)
    }

    /// Passes of a node have begun, or it is idle: who waits there decides whether its model's requests wake others.
    fn note_queue(&mut self, node: u32) {
        if let Some(shares) = &mut self.shares {
            let waiting = self.nodes[node as usize].engine.stats().waiting;
            shares.began(self.now, node, waiting);
        }
    }

    /// Reports the passes that were just jumped over.
    fn report_jump(&mut self, node: u32, sink: &mut dyn Sink) {
        let (run, sequences) = (&self.run, self.run.sequences());
        let fpm = &mut self.out.get_or_insert_default().fpm;
        let mut start = run.start;
        for (pass, (&end, &used_blocks)) in run.ends.iter().zip(&run.used_blocks).enumerate() {
            run.fpm_of(pass, fpm);
            sink.on_pass(&PassRecord {
                engine: node,
                start,
                end,
                fpm,
                tokens: run.tokens(),
                used_blocks,
                preemptions: 0,
                gaps: &[(end.since(start), sequences)],
                // It would end before the next arrival.
                arrived: &[],
            });
            start = end;
        }
    }

    /// Blocks that left the cache without a pass: an idle engine has published all changes.
    pub(crate) fn publish_idle(&mut self, node: u32) {
        let n = &mut self.nodes[node as usize];
        if n.phase != Phase::Idle {
            return;
        }
        let kv = &mut self.out.get_or_insert_default().kv;
        if n.engine.take_kv(kv) {
            let side = match (n.role, &mut self.prefill) {
                (Role::Prefill, Some(side)) => side,
                _ => &mut self.serve,
            };
            side.on_kv(self.now, node, n.life, kv);
        }
    }

    fn finish(mut self, cut: Option<String>) -> Outcome {
        let (nodes, tally) = (&mut self.nodes, &mut self.tally);
        let serve = &mut self.serve;
        self.planned.run_all(self.now, nodes, serve, tally);
        let models = self.add_models();
        self.tally.ended_at = self.now;
        let under_way = self.flights.len() as u64;
        let nodes = self.nodes.into_iter();
        let scaling = self.scaling.into_outcome(self.now);
        let peers = self.peers.map(|peers| peers.counts);
        let (cluster, now) = (self.cluster, self.now);
        let shares = self.shares.map(|shares| shares.into_outcomes(cluster, now));
        let outcome = self
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

/// The frontend's processors, if they are modelled.
pub(crate) fn host(cluster: &Cluster) -> Option<(Box<dyn Host>, Costs)> {
    match cluster.host.mode {
        HostMode::None | HostMode::Threads => None,
        HostMode::Ideal => Some((
            Box::new(Ideal::new(cluster.host.cpus)),
            Costs::new(&cluster.host),
        )),
    }
}
