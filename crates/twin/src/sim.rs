//! The run: what happens next, until nothing does.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use std::path::Path;
use std::time::Duration;

use slipstream_base::cluster::{Cluster, HandOver, HostMode};
use slipstream_base::mix::mix64;
use slipstream_base::text::{counted, grouped};
use slipstream_base::workload_file::Workload;
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, Prompt, RankId, RequestId, SimTime,
};
use slipstream_engine::timing::TimingError;
use slipstream_engine::{DecodeRun, EngineError, PassOutput, Reserved, Usage};
use slipstream_report::run::EngineCounts;
use slipstream_report::{Answered, Failed, Latency, Objectives, PassRecord, Timeline, Totals};
use slipstream_router::{FleetError, RouteError, RouteRequest, Router};
use slipstream_workload::schedule::Shard;
use slipstream_workload::{Request, Schedule, SourceError, prompt::answer_name};

use crate::faults::Faults;
use crate::host::{Costs, Host, Ideal};
use crate::lanes;
use crate::node::{Flight, Flights, Hops, Node, Phase, Role};
use crate::parts::{Parts, Side, ns};
use crate::wire::{Frame, Frames, Wire};

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Objectives for goodput.
    pub slo: Objectives,
    /// End the run at this time, though requests are under way.
    pub time_max: SimTime,
    /// Jump over decode passes in which nothing happens. The result is the same without.
    pub jump: bool,
    /// Look at each token, which an objective on the longest gap of a request needs. Slower.
    pub each_token: bool,
    /// Divides the length of passes, and the time that the network takes, above 0: what a live cluster
    /// at this `live.speedup` would do.
    pub speedup: f64,
    /// Requests under way at which a run is given up as unstable: more than any engine that keeps
    /// up would let gather.
    pub in_flight_max: usize,
    /// The same of messages on the network, where `network.messages`.
    pub messages_max: usize,
    /// Threads for engines that have nothing to do with each other, at least 1: those of a router
    /// that looks at no load, under requests of which none waits for another. Other runs take one.
    /// The result is the same for any number.
    pub threads: u32,
    /// One queue for the events of all engines, even if they have nothing to do with each other.
    /// The result is the same, slower.
    pub one_queue: bool,
    /// Feed a block index even where the router can ask the engines what they have cached. The result is
    /// the same, slower.
    pub feed_index: bool,
    /// Times that a client sends a request again that was refused because no worker could take it,
    /// after the time that the refusal names.
    pub retries: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            slo: Objectives::default(),
            time_max: SimTime::MAX,
            jump: true,
            each_token: false,
            speedup: 1.0,
            in_flight_max: 1 << 20,
            messages_max: 1 << 20,
            threads: 1,
            one_queue: false,
            feed_index: false,
            retries: 0,
        }
    }
}

/// Why a run could not be made, or broke off. Mend the cluster or workload file.
#[derive(Debug, thiserror::Error)]
pub enum TwinError {
    /// The router cannot be built.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// An engine cannot be built.
    #[error("[pool.{pool}]: {source}")]
    Engine {
        /// The pool.
        pool: String,
        /// Why not.
        source: EngineError,
    },
    /// Step times cannot be modelled.
    #[error("[pool.{pool}]: {source}")]
    Timing {
        /// The pool.
        pool: String,
        /// Why not.
        source: TimingError,
    },
    /// The workload broke.
    #[error(transparent)]
    Workload(#[from] SourceError),
}

/// A request that has ended, for records.
#[derive(Clone, Copy, Debug)]
pub struct RequestRecord<'a> {
    /// What was asked.
    pub request: &'a Request,
    /// Where its answer was generated, be it in part; `None` if it was refused.
    pub rank: Option<RankId>,
    /// Where its prompt was computed, if that was elsewhere.
    pub prefill_rank: Option<RankId>,
    /// When it passed from hand to hand; all at once where that is not modelled.
    pub hops: Hops,
    /// When it left the waiting queue for the first time.
    pub admitted: SimTime,
    /// When the pass that computed its first token began.
    pub first_pass_start: SimTime,
    /// When its first token came.
    pub first: SimTime,
    /// When its last token came, or when it failed.
    pub last: SimTime,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Of the prompt, found in the KV cache.
    pub cached_tokens: u32,
    /// Tokens of its answer, or as many of them as had come when it failed.
    pub output_tokens: u32,
    /// Times that it was preempted.
    pub preemptions: u32,
    /// Times that it was sent again: by its client, or because its worker vanished.
    pub retries: u32,
    /// Why it failed, if it did.
    pub error: Option<Failure<'a>>,
}

/// Why a request has no answer, or not all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure<'a> {
    /// [`REFUSED`] or [`WORKER_LOST`].
    pub kind: &'static str,
    /// What a client would read.
    pub message: &'a str,
}

/// No worker took the request.
pub const REFUSED: &str = "refused";
/// The worker vanished that computed the request, and it could not be tried elsewhere.
pub const WORKER_LOST: &str = "worker lost";

/// Where a run is, for a progress line.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Simulated time.
    pub now: SimTime,
    /// Requests that have ended.
    pub ended: u64,
    /// Requests under way.
    pub in_flight: usize,
}

/// Hears of what happens. Every method does nothing unless it is written.
pub trait Sink {
    /// A request ended.
    fn on_request(&mut self, record: &RequestRecord<'_>) {
        let _ = record;
    }

    /// Whether [`on_request`](Self::on_request) is worth calling. Asked once, at the start.
    fn wants_requests(&self) -> bool {
        true
    }

    /// Whether [`on_pass`](Self::on_pass) is to be called. Asked once, at the start.
    fn wants_passes(&self) -> bool {
        false
    }

    /// A pass of an engine. Those of one engine come in order; passes that are jumped over are told
    /// when the first of them begins, before what happens elsewhere meanwhile.
    fn on_pass(&mut self, pass: &PassRecord<'_>) {
        let _ = pass;
    }

    /// Called now and then. False ends the run; what has ended by then counts.
    fn on_progress(&mut self, progress: Progress) -> bool {
        let _ = progress;
        true
    }
}

/// No records.
impl Sink for () {
    fn wants_requests(&self) -> bool {
        false
    }
}

/// What a run gave.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Latencies and counts, as the load generator keeps them.
    pub totals: Totals,
    /// Counters of the engines, summed.
    pub engine: EngineCounts,
    /// Simulated time at the end.
    pub ended_at: SimTime,
    /// Passes that engines ran, those jumped over included.
    pub passes: u64,
    /// Passes that were jumped over.
    pub jumped: u64,
    /// Passes beyond the table of step times, whose lengths were extrapolated.
    pub extrapolated: u64,
    /// Prompts that one worker computed for another.
    pub hand_overs: HandOvers,
    /// Every request's times, place and hits: equal if two runs were.
    pub digest: u64,
    /// Why the run ended before the workload did, if it did.
    pub cut: Option<String>,
}

impl Outcome {
    /// What to say if step times were extrapolated.
    pub fn extrapolation(&self) -> Option<String> {
        (self.extrapolated > 0).then(|| {
            format!(
                "{} of {} ({:.1} %) are outside the table of step times: their lengths were extrapolated from \
                 its nearest rows; add rows for them to `engine.timing.path`",
                grouped(self.extrapolated),
                counted(self.passes, "pass"),
                100.0 * self.extrapolated as f64 / self.passes.max(1) as f64
            )
        })
    }
}

/// Prompts computed by one worker for another.
#[derive(Clone, Debug, Default)]
pub struct HandOvers {
    /// Bytes of keys and values that crossed the network.
    pub bytes: u64,
    /// From the moment at which a prompt's keys and values began to be sent until all had come; as
    /// many as there were.
    pub times: Latency,
}

/// Runs `workload` on `cluster`. `read` reads the files that the cluster names.
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
    sim.watches = sink.wants_passes();
    if sim.watches {
        for node in &mut sim.nodes {
            node.watch = Some(Box::default());
        }
    }
    let plain = sim.prefill.is_none() && !sim.tells_later && cluster.events.is_empty();
    let follow_ups = sim.schedule.may_follow_up()?;
    let independent = plain
        && lanes::are_independent(sim.serve.reads_cache, &cluster.router, workload, follow_ups);
    // Whoever watches passes gets them from one queue, in the order of their time.
    if independent && !options.one_queue && !sink.wants_passes() {
        return lanes::run(sim, sink);
    }
    if independent {
        sim.looks_first = true;
        sim.serve.router.look_by_hand();
    }
    sim.run(sink)
}

/// Calls of [`Sink::on_progress`]: one in so many events.
const PROGRESS_EVENTS: u64 = 1 << 14;

/// A pass ends. At equal times in the order in which the passes began; of the life that its node had.
type PassEnd = Reverse<(SimTime, u64, u32, u32)>;

/// What happens at a time that is known, apart from ends of passes and arrivals. Requests are named
/// by slot and ticket: who is gone by then is not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum What {
    /// A request has been read, or is sent again: its worker is chosen.
    Route { slot: u32, ticket: u64 },
    /// A request is sent to a node.
    Send { slot: u32, ticket: u64, to: To },
    /// A request reaches a node.
    Deliver { slot: u32, ticket: u64, to: To },
    /// Keys and values begin to cross the network.
    Fetch { slot: u32, ticket: u64 },
    /// They have come.
    Received { slot: u32, ticket: u64 },
    /// The tokens of a pass are with their clients.
    Tell { frame: u32 },
    /// An event of the cluster file begins.
    Begin { event: u32 },
    /// It ends.
    End { event: u32 },
    /// The router looks anew, for those who wait in the frontend.
    Look,
    /// A worker has started again, unless it vanished meanwhile.
    Ready { worker: u32, start: u32 },
}

/// One of the two nodes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum To {
    /// That which generates its answer.
    Serve,
    /// That which computes its prompt for the other.
    Prefill,
}

pub(crate) struct Sim<'a> {
    pub(crate) options: &'a Options,
    pub(crate) cluster: &'a Cluster,
    pub(crate) schedule: Schedule,
    /// Takes whole requests, and answers to prompts computed elsewhere.
    pub(crate) serve: Side,
    /// Takes prompts, if there are pools for it.
    pub(crate) prefill: Option<Side>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) flights: Flights,
    tickets: u64,
    /// Ends of passes on nodes that serve: nobody else hears of them, unless requests follow on ends.
    ends: BinaryHeap<PassEnd>,
    /// Ends of passes on nodes that compute prompts for others.
    prefill_ends: BinaryHeap<PassEnd>,
    queue: BinaryHeap<Reverse<(SimTime, u64, What)>>,
    sequence: u64,
    pub(crate) wire: Wire,
    pub(crate) host: Option<(Box<dyn Host>, Costs)>,
    /// The router looks at loads before anything else happens at the time of an arrival, as where it
    /// routes ahead (`lanes`).
    looks_first: bool,
    /// Tokens reach clients later than their passes end.
    tells_later: bool,
    pub(crate) frames: Frames,
    /// So many requests came and went at one time that time will not go on.
    refuses_all: bool,
    pub(crate) faults: Faults,
    /// Slots and tickets of requests that wait in the frontend, as every worker was busy.
    waiting: VecDeque<(u32, u64)>,
    /// Since the last look at them, a worker may have come to be less busy.
    pub(crate) loads_fell: bool,
    /// [`What::Look`] is in the queue.
    look_planned: bool,
    /// Requests under way whose session goes on after them.
    continuing: usize,
    /// The sink wants to know of passes.
    watches: bool,
    /// Nodes that begin a pass at the present moment.
    awake: Vec<u32>,
    reserved: Vec<Reserved>,
    root: BlockHash,
    seed: u64,
    pub(crate) now: SimTime,
    pub(crate) out: PassOutput,
    run: DecodeRun,
    pub(crate) tally: Tally,
}

/// What engines that have nothing to do with each other are run from.
pub(crate) struct Apart<'a> {
    pub(crate) options: &'a Options,
    pub(crate) schedule: Schedule,
    pub(crate) router: Router,
    pub(crate) nodes: Vec<Node>,
    pub(crate) root: BlockHash,
    pub(crate) seed: u64,
    /// From a change of a cache until the router may hear of it, ns.
    pub(crate) lag_ns: u64,
}

impl<'a> Sim<'a> {
    pub(crate) fn into_apart(self) -> Apart<'a> {
        Apart {
            options: self.options,
            schedule: self.schedule,
            router: self.serve.router,
            nodes: self.nodes,
            root: self.root,
            seed: self.seed,
            lag_ns: self.serve.lag_ns,
        }
    }

    fn new(
        cluster: &'a Cluster,
        workload: &Workload,
        options: &'a Options,
        read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Sim<'a>, TwinError> {
        let host: Option<(Box<dyn Host>, Costs)> = match cluster.host.mode {
            HostMode::None => None,
            HostMode::Ideal => Some((
                Box::new(Ideal::new(cluster.host.cpus)),
                Costs::new(&cluster.host),
            )),
        };
        let wire = Wire::new(cluster, options.speedup);
        let tells_later = host.is_some() || wire.carries_messages();
        let parts = Parts::new(cluster, options, tells_later, read)?;
        let mut sim = Sim {
            options,
            cluster,
            waiting: VecDeque::new(),
            loads_fell: false,
            look_planned: false,
            continuing: 0,
            watches: false,
            schedule: Schedule::open(workload, 0, Shard::WHOLE)?,
            serve: parts.serve,
            prefill: parts.prefill,
            nodes: parts.nodes,
            flights: Flights::default(),
            tickets: 0,
            ends: BinaryHeap::new(),
            prefill_ends: BinaryHeap::new(),
            queue: BinaryHeap::new(),
            sequence: 0,
            wire,
            host,
            looks_first: false,
            tells_later,
            frames: Frames::default(),
            refuses_all: false,
            faults: Faults::new(cluster),
            awake: Vec::new(),
            reserved: Vec::new(),
            root: BlockHash::root(&cluster.model.name, "", ""),
            seed: mix64(workload.seed ^ cluster.router.seed),
            now: SimTime::ZERO,
            out: PassOutput::default(),
            run: DecodeRun::default(),
            tally: Tally::default(),
        };
        for (index, event) in (0u32..).zip(&cluster.events) {
            let at = SimTime::from_secs_f64(event.at_s);
            sim.later(at, What::Begin { event: index });
        }
        Ok(sim)
    }

    /// `what` happens at `at`.
    pub(crate) fn later(&mut self, at: SimTime, what: What) {
        self.queue.push(Reverse((at, self.sequence, what)));
        self.sequence += 1;
    }

    fn run(mut self, sink: &mut dyn Sink) -> Result<Outcome, TwinError> {
        for side in [Some(&self.serve), self.prefill.as_ref()]
            .into_iter()
            .flatten()
        {
            side.fleet.promise_single_writer();
        }
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
            self.now = next;
            if self.looks_first && self.schedule.next_due(next)? == Some(next) {
                self.serve.hear(next, &self.nodes);
                self.serve.router.advance_view(next);
                self.serve.router.see();
            }
            self.end_passes(sink);
            self.happen(sink);
            self.admit_waiting(sink);
            self.take_arrivals(sink)?;
            self.begin_passes(sink)?;
            if self.refuses_all {
                cut = Some(format!(
                    "stuck: more than {} came at {}, were refused, and each let the next one begin; let them \
                     wait (`router.queue_max`), raise the busy thresholds of `[router]`, or send them again \
                     later (`--retries`)",
                    counted(self.options.in_flight_max as u64, "request"),
                    self.now
                ));
                break;
            }
            if self.flights.len() > self.options.in_flight_max {
                cut = Some(format!(
                    "unstable: {} under way at {}, and more come than are answered",
                    counted(self.flights.len() as u64, "request"),
                    self.now
                ));
                break;
            }
            if self.wire.messages_under_way() > self.options.messages_max {
                cut = Some(format!(
                    "unstable: {} under way on the network at {}, and more are sent than it carries; raise \
                     `network.nic_bits_per_s` or `network.frontend_bits_per_s`, send fewer requests, or \
                     leave messages out (`network.messages = false`)",
                    counted(self.wire.messages_under_way() as u64, "message"),
                    self.now
                ));
                break;
            }
            events += 1;
            if events.is_multiple_of(PROGRESS_EVENTS) && !sink.on_progress(self.progress()) {
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

    fn progress(&self) -> Progress {
        Progress {
            now: self.now,
            ended: self.tally.totals.requests.sent,
            in_flight: self.flights.len(),
        }
    }

    /// When something happens next; `None` if nothing ever will, or nobody would notice.
    fn next_time(&mut self) -> Result<Option<SimTime>, TwinError> {
        let due = self.schedule.next_due(self.now)?;
        let end = self.ends.peek().map(|Reverse((end, ..))| *end);
        let next = due.into_iter().chain(end).min();
        if self.is_plain() {
            return Ok(next);
        }
        if due.is_none() && self.flights.len() == 0 {
            return Ok(None);
        }
        Ok(next.into_iter().chain(self.next_other()).min())
    }

    /// Nothing but arrivals and ends of passes can happen.
    fn is_plain(&self) -> bool {
        self.queue.is_empty() && self.prefill_ends.is_empty() && self.wire.is_idle()
    }

    /// When the next thing happens that is neither an arrival nor the end of a pass of a node that
    /// serves.
    fn next_other(&mut self) -> Option<SimTime> {
        let end = self.prefill_ends.peek().map(|Reverse((end, ..))| *end);
        let other = self.queue.peek().map(|Reverse((at, ..))| *at);
        end.into_iter()
            .chain(other)
            .chain(self.wire.next_time())
            .min()
    }

    /// Ends the passes that end now.
    fn end_passes(&mut self, sink: &mut dyn Sink) {
        while let Some(&Reverse((end, _, node, life))) = self.ends.peek()
            && end <= self.now
        {
            self.ends.pop();
            if self.nodes[node as usize].life != life {
                continue; // it vanished meanwhile
            }
            if self.nodes[node as usize].phase == Phase::Jumped {
                self.nodes[node as usize].phase = Phase::Awake;
            } else {
                self.end_pass(node, sink);
            }
            self.awake.push(node);
        }
        while let Some(&Reverse((end, _, node, life))) = self.prefill_ends.peek()
            && end <= self.now
        {
            self.prefill_ends.pop();
            if self.nodes[node as usize].life == life {
                self.end_prefill(node, sink);
                self.awake.push(node);
            }
        }
    }

    fn end_pass(&mut self, node: u32, sink: &mut dyn Sink) {
        let mut out = std::mem::take(&mut self.out);
        let n = &mut self.nodes[node as usize];
        n.finish(&mut out);
        self.tally.passes += 1;
        self.serve.on_kv(self.now, node, n.life, &out.kv);
        if self.tells_later {
            for first in &out.first {
                self.flights.get_mut(first.id).begun = true;
            }
            self.send_frame(node, out);
            return;
        }
        self.tell(node, &out, sink);
        self.out = out;
    }

    /// What a pass gave reaches the clients.
    fn tell(&mut self, node: u32, out: &PassOutput, sink: &mut dyn Sink) {
        let now = self.now;
        let n = &mut self.nodes[node as usize];
        n.tell(now, out, &mut self.flights, &mut self.tally.totals);
        if let Some(watch) = &n.watch {
            sink.on_pass(&PassRecord {
                engine: node,
                start: out.start,
                end: out.end,
                fpm: &out.fpm,
                tokens: out.token_count,
                used_blocks: watch.used_blocks,
                preemptions: watch.preempted,
                gaps: &watch.gaps,
                arrived: &out.arrived,
            });
        }
        self.loads_fell |= !out.first.is_empty() || !out.finished.is_empty();
        for first in &out.first {
            let flight = self.flights.get_mut(first.id);
            flight.begun = true;
            flight.on_first(first, out.end, now);
        }
        for done in &out.finished {
            let flight = self.flights.remove(done.id);
            self.continuing -= usize::from(flight.request.has_next());
            let rank = self.nodes[flight.target as usize].rank;
            let prefill_rank = flight.prefill.map(|node| self.nodes[node as usize].rank);
            let record = flight.record(rank, prefill_rank, &done.usage, now);
            let slo = &self.options.slo;
            self.tally.note(&record, flight.gap_max, slo);
            sink.on_request(&record);
            self.schedule
                .on_done(&flight.request, done.usage.output_tokens, now);
        }
    }

    /// Does what is due now, in the order in which it was planned.
    fn happen(&mut self, sink: &mut dyn Sink) {
        loop {
            self.take_from_wire();
            let Some(&Reverse((at, _, what))) = self.queue.peek() else {
                break;
            };
            if at > self.now {
                break;
            }
            self.queue.pop();
            match what {
                What::Route { slot, ticket } => {
                    if self.flights.find(slot, ticket).is_some() {
                        self.route(slot, sink);
                    }
                }
                What::Send { slot, ticket, to } => self.send(slot, ticket, to),
                What::Deliver { slot, ticket, to } => {
                    if self.flights.find(slot, ticket).is_some() {
                        self.deliver(slot, to, None, sink);
                    }
                }
                What::Fetch { slot, ticket } => self.fetch(slot, ticket),
                What::Received { slot, ticket } => self.received(slot, ticket),
                What::Tell { frame } => {
                    if let Some(Frame { node, life, out }) = self.frames.take(frame) {
                        // What was on its way from a worker that vanished never comes.
                        if self.nodes[node as usize].life == life {
                            self.tell(node, &out, sink);
                        }
                        self.out = out; // its memory
                    }
                }
                What::Look => {
                    self.loads_fell = true;
                    self.look_planned = false;
                }
                What::Begin { event } => self.begin_event(event, sink),
                What::End { event } => self.end_event(event),
                What::Ready { worker, start } => self.worker_ready(worker, start),
            }
        }
    }

    /// Takes what is due now.
    fn take_arrivals(&mut self, sink: &mut dyn Sink) -> Result<(), TwinError> {
        // A workload without end may have all of its requests due at one time.
        // So may a closed loop whose requests are refused: each lets the next begin, at that time.
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
        self.continuing += usize::from(request.has_next());
        let mut flight = Flight::new(request, None, 0, self.now);
        flight.ticket = self.tickets;
        self.tickets += 1;
        let ticket = flight.ticket;
        if let Some((host, costs)) = &mut self.host {
            let (ns, after_parsing, after_tokenizing) = costs.request(isl);
            let done = host.run(self.now, ns);
            flight.hops.parsed = SimTime(done.0 - after_parsing);
            flight.hops.tokenized = SimTime(done.0 - after_tokenizing);
            let slot = self.flights.insert(flight).0 as u32;
            self.later(done, What::Route { slot, ticket });
        } else {
            let slot = self.flights.insert(flight).0 as u32;
            self.route(slot, sink);
        }
    }

    /// Lets requests that wait in the frontend go where there is room now, in their order.
    fn admit_waiting(&mut self, sink: &mut dyn Sink) {
        if !std::mem::take(&mut self.loads_fell) {
            return;
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        while let Some((slot, ticket)) = waiting.pop_front() {
            if self.flights.find(slot, ticket).is_none() {
                continue;
            }
            self.route(slot, sink);
            // Nothing waited, so it waits again: nobody behind it has a better chance.
            if let Some(again) = self.waiting.pop_front() {
                waiting.push_front(again);
                break;
            }
        }
        self.waiting = waiting;
        self.plan_look();
    }

    /// By what the router saw last all are busy: those who wait try again when it has seen more.
    fn plan_look(&mut self) {
        let interval_ns = ns(self.cluster.router.view_interval_ms * 1e6);
        if !self.waiting.is_empty() && interval_ns > 0 && !self.look_planned {
            self.look_planned = true;
            self.later(self.now + interval_ns, What::Look);
        }
    }

    /// Chooses where a request goes, and sends it there.
    pub(crate) fn route(&mut self, slot: u32, sink: &mut dyn Sink) {
        if !self.waiting.is_empty() {
            // Whoever came before it goes first.
            let busy = self.serve.fleet.targets().len();
            let error = RouteError::Busy {
                busy,
                retry_after_s: 1,
            };
            return self.refuse(slot, &error, sink);
        }
        let flight = self.flights.get_mut(RequestId(slot.into()));
        let block_size = self.serve.fleet.block_size();
        let prompt = match prompt_of(&flight.request, block_size, self.root) {
            Ok(prompt) => prompt,
            Err(error) => return self.refuse_for_good(slot, &error, sink),
        };
        let route = RouteRequest {
            prompt: &prompt,
            max_tokens: flight.request.output_len,
            session: Some(flight.request.session),
            direct: None,
            exclude: &flight.lost_on,
        };
        let routed = match self.serve.route(self.now, &route, &self.nodes) {
            Ok(routed) => routed,
            Err(error) => return self.refuse(slot, &error, sink),
        };
        let target = self.serve.node_of(routed.target);
        let mut active = routed.active;
        let mut to = To::Serve;
        if let Some(prefill) = &mut self.prefill {
            let uncached = prompt.len() - routed.hit_blocks * block_size;
            if let Some(remote) = prefill.take_prompt(self.now, &route, uncached, &self.nodes) {
                // Nothing is left to compute where it is decoded, but for one token.
                active.on_first_token();
                flight.remote = Some(Box::new(remote));
                if self.cluster.kv.hand_over == HandOver::Pull {
                    to = To::Prefill;
                }
            }
        }
        flight.active = Some(active);
        flight.target = target;
        flight.hops.routed = self.now;
        let ticket = flight.ticket;
        if let Some((host, costs)) = &mut self.host {
            let done = host.run(self.now, costs.dispatch());
            self.later(done, What::Send { slot, ticket, to });
        } else if self.wire.carries_messages() {
            self.send(slot, ticket, to);
        } else {
            self.deliver(slot, to, Some(prompt), sink);
        }
    }

    /// Hands a request to the network.
    fn send(&mut self, slot: u32, ticket: u64, to: To) {
        let Some(flight) = self.flights.find(slot, ticket) else {
            return;
        };
        if flight.hops.dispatched < flight.hops.routed {
            flight.hops.dispatched = self.now;
        }
        let deliver = What::Deliver { slot, ticket, to };
        if self.wire.carries_messages() {
            let node = flight.node(to);
            let worker = self.nodes[node as usize].rank.worker;
            let tokens = flight.request.prompt.tokens();
            self.wire.send_request(self.now, worker, tokens, deliver);
        } else {
            self.later(self.now, deliver);
        }
    }

    /// A request reaches an engine.
    fn deliver(&mut self, slot: u32, to: To, prompt: Option<Prompt>, sink: &mut dyn Sink) {
        let id = RequestId(slot.into());
        let prompt = if let Some(prompt) = prompt {
            prompt
        } else {
            let block_size = self.serve.fleet.block_size();
            match prompt_of(&self.flights.get_mut(id).request, block_size, self.root) {
                Ok(prompt) => prompt,
                Err(error) => return self.refuse_for_good(slot, &error, sink),
            }
        };
        let flight = self.flights.get_mut(id);
        let (node, remote) = (flight.node(to), flight.remote.is_some());
        let request = &flight.request;
        let engine_request = EngineRequest {
            id,
            prompt,
            params: GenerationParams {
                max_tokens: request.output_len,
                ignore_eos: request.ignore_eos,
                ..GenerationParams::default()
            },
            priority: request.priority,
            seed: request_seed(self.seed, request),
        };
        // The first of two workers; both may get it at the time at which it was routed.
        let first = match self.cluster.kv.hand_over {
            HandOver::Pull => To::Prefill,
            HandOver::Push => To::Serve,
        };
        if !remote || to == first {
            flight.hops.dispatched = flight.hops.dispatched.max(flight.hops.routed);
            flight.hops.received = self.now;
        }
        let engine = &mut self.nodes[node as usize].engine;
        let added = match (to, remote) {
            (To::Prefill, _) => engine.add_prompt(self.now, engine_request),
            (To::Serve, true) => engine.add_answer(self.now, engine_request),
            (To::Serve, false) => engine.add(self.now, engine_request),
        };
        match added {
            Ok(()) => self.wake(node),
            Err(refusal) => self.refuse_for_good(slot, &refusal.to_string(), sink),
        }
    }

    /// An engine has something to do, or room for what waits.
    pub(crate) fn wake(&mut self, node: u32) {
        let n = &mut self.nodes[node as usize];
        if n.phase == Phase::Idle && !n.engine.is_idle() {
            n.phase = Phase::Awake;
            self.awake.push(node);
        }
    }

    /// No worker takes a request: its client tries again later, or gives up.
    fn refuse(&mut self, slot: u32, error: &RouteError, sink: &mut dyn Sink) {
        let flight = self.flights.get_mut(RequestId(slot.into()));
        let queue_max = self.cluster.router.queue_max as usize;
        if matches!(error, RouteError::Busy { .. }) && self.waiting.len() < queue_max {
            self.waiting.push_back((slot, flight.ticket));
            self.plan_look();
        } else if error.retry_may_help() && flight.retries < self.options.retries {
            flight.retries += 1;
            flight.lost_on.clear();
            // As the frontend answers: with a time where the router names one, else a second.
            let wait_s = match error {
                RouteError::Busy { retry_after_s, .. } => *retry_after_s,
                _ => 1,
            };
            let ticket = flight.ticket;
            self.tally.totals.requests.retries += 1;
            let at = self.now + u64::from(wait_s) * 1_000_000_000;
            self.later(at, What::Route { slot, ticket });
        } else {
            self.refuse_for_good(slot, &error.to_string(), sink);
        }
    }

    /// A request ends before any worker has taken it.
    fn refuse_for_good(&mut self, slot: u32, message: &str, sink: &mut dyn Sink) {
        self.detach(slot);
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
            output_tokens: 0,
            preemptions: 0,
            retries: flight.retries + flight.lost_on.len() as u32,
            error: Some(Failure {
                kind: REFUSED,
                message,
            }),
        };
        self.note_failed(&record, sink);
    }

    /// A request ends because its worker vanished; `usage` is what had come of it by then.
    pub(crate) fn lose(&mut self, slot: u32, usage: &Usage, message: &str, sink: &mut dyn Sink) {
        let prefill = self.flights.get_mut(RequestId(slot.into())).prefill;
        self.detach(slot);
        let mut flight = self.flights.remove(RequestId(slot.into()));
        flight.prefill = prefill;
        let rank = self.nodes[flight.target as usize].rank;
        let prefill_rank = prefill.map(|node| self.nodes[node as usize].rank);
        let record = RequestRecord {
            error: Some(Failure {
                kind: WORKER_LOST,
                message,
            }),
            ..flight.record(rank, prefill_rank, usage, self.now)
        };
        self.note_failed(&record, sink);
    }

    fn note_failed(&mut self, record: &RequestRecord<'_>, sink: &mut dyn Sink) {
        self.continuing -= usize::from(record.request.has_next());
        self.tally.note(record, 0, &self.options.slo);
        sink.on_request(record);
        self.schedule.on_failed(record.request);
    }

    /// Takes a request off every engine and link that it is on.
    pub(crate) fn detach(&mut self, slot: u32) {
        self.loads_fell = true;
        let id = RequestId(slot.into());
        let flight = self.flights.get_mut(id);
        let routed = flight.active.take().is_some();
        let target = flight.target;
        let remote = flight.remote.take();
        flight.prefill = None;
        flight.ticket = self.tickets;
        self.tickets += 1;
        if !routed {
            return;
        }
        if self.nodes[target as usize].engine.abort(id) {
            self.wake(target);
        }
        if let Some(remote) = remote {
            if let Some((_, Some(transfer))) = remote.sent {
                self.wire.cancel(self.now, transfer);
            }
            let engine = &mut self.nodes[remote.node as usize].engine;
            if engine.abort(id) || engine.release_held(id) {
                self.wake(remote.node);
            }
        }
    }

    /// Begins a pass on each engine whose last one has ended, or that got something to do.
    fn begin_passes(&mut self, sink: &mut dyn Sink) -> Result<(), TwinError> {
        let mut awake = std::mem::take(&mut self.awake);
        if self.prefill.is_some() {
            // First those whose ends others may not jump over.
            awake.sort_by_key(|&node| self.nodes[node as usize].role == Role::Serve);
        }
        let mut until = None;
        let mut left = awake.len();
        for node in awake.drain(..) {
            if self.nodes[node as usize].phase != Phase::Awake {
                continue; // it vanished at this very moment
            }
            if self.nodes[node as usize].role == Role::Prefill {
                left -= 1;
                if let Some(end) = self.begin(node) {
                    let life = self.nodes[node as usize].life;
                    self.prefill_ends
                        .push(Reverse((end, self.sequence, node, life)));
                    self.sequence += 1;
                }
                continue;
            }
            let until = match until {
                Some(until) => until,
                None => *until.insert(self.jump_until(left)?),
            };
            let end = self.jump(node, until, sink).or_else(|| self.begin(node));
            if let Some(end) = end {
                let life = self.nodes[node as usize].life;
                self.ends.push(Reverse((end, self.sequence, node, life)));
                self.sequence += 1;
            }
        }
        self.awake = awake;
        Ok(())
    }

    fn begin(&mut self, node: u32) -> Option<SimTime> {
        let end = self.nodes[node as usize].begin(self.now);
        self.publish_idle(node);
        if self.prefill.is_some() {
            let mut reserved = std::mem::take(&mut self.reserved);
            self.nodes[node as usize]
                .engine
                .take_reserved(&mut reserved);
            for reserved in reserved.drain(..) {
                self.on_reserved(node, reserved);
            }
            self.reserved = reserved;
        }
        end
    }

    /// How far the `awake` engines that begin a pass now may jump: a request must find the engine
    /// that it goes to, and the router's index, as they would be.
    fn jump_until(&mut self, awake: usize) -> Result<SimTime, TwinError> {
        if !self.options.jump || self.tells_later || awake == 0 {
            return Ok(SimTime::ZERO);
        }
        let mut until = SimTime::MAX;
        if !self.is_plain() {
            until = self.next_other().unwrap_or(SimTime::MAX);
        }
        if self.prefill.is_some()
            && let Some(Reverse((end, ..))) = self.ends.peek()
        {
            // Whose pass ends may then have room for a prompt, and so wake who computes one for us.
            until = until.min(*end);
        }
        // Requests come at times that are known, unless one that ends brings the next, or makes room.
        let known = self.continuing == 0 && !self.schedule.is_closed();
        if known && self.waiting.is_empty() {
            if self.prefill.is_some() && awake > 1 {
                // One may make room for a prompt, and so wake who computes the next one.
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

    /// Jumps over passes that end before `until`; gives the end of the last.
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
        if !self.run.kv_ops.is_empty() {
            // Deltas of all the passes now: nobody reads the index before the last of them has
            // ended. Numbers are those of single deltas, so the next one is in order.
            let mut sequence = self.run.kv_sequence;
            let n = &self.nodes[node as usize];
            for (pass, &at) in self.run.ends.iter().enumerate() {
                let ops = self.run.kv_of(pass);
                if ops.is_empty() {
                    continue;
                }
                self.out.kv.rank = n.rank;
                self.out.kv.sequence = sequence;
                self.out.kv.ops.clear();
                self.out.kv.ops.extend_from_slice(ops);
                self.serve.on_kv(at, node, n.life, &self.out.kv);
                sequence += 1;
            }
        }
        if self.watches {
            self.tell_jump(node, sink);
        }
        Some(end)
    }

    /// Tells of the passes that were just jumped over.
    fn tell_jump(&mut self, node: u32, sink: &mut dyn Sink) {
        let (run, sequences) = (&self.run, self.run.sequences());
        let mut start = run.start;
        for (pass, (&end, &used_blocks)) in run.ends.iter().zip(&run.used_blocks).enumerate() {
            run.fpm_of(pass, &mut self.out.fpm);
            sink.on_pass(&PassRecord {
                engine: node,
                start,
                end,
                fpm: &self.out.fpm,
                tokens: sequences,
                used_blocks,
                preemptions: 0,
                gaps: &[(end.since(start), sequences)],
                // It would end before anything arrives.
                arrived: &[],
            });
            start = end;
        }
    }

    /// What left the cache when no pass began: an engine that fell idle has told everything.
    fn publish_idle(&mut self, node: u32) {
        let n = &mut self.nodes[node as usize];
        if n.phase == Phase::Idle && n.engine.take_kv(&mut self.out.kv) {
            let side = match (n.role, &mut self.prefill) {
                (Role::Prefill, Some(side)) => side,
                _ => &mut self.serve,
            };
            side.on_kv(self.now, node, n.life, &self.out.kv);
        }
    }

    fn finish(mut self, cut: Option<String>) -> Outcome {
        self.tally.ended_at = self.now;
        let under_way = self.flights.len() as u64;
        let nodes = self.nodes.into_iter();
        self.tally
            .into_outcome(nodes, under_way, &self.schedule, cut)
    }
}

/// The prompt of a request in blocks; its answer is named after it, so that a later turn finds it.
pub(crate) fn prompt_of(
    request: &Request,
    block_size: u32,
    root: BlockHash,
) -> Result<Prompt, String> {
    let name = answer_name(request.id());
    let prompt = request.prompt.to_blocks(block_size, root, name);
    prompt.map_err(|error| error.to_string())
}

/// Decides what the answer to `request` is, in a run with this `seed`.
pub(crate) fn request_seed(seed: u64, request: &Request) -> u64 {
    mix64(seed ^ request.id().0)
}

/// What is counted of a run. Sums, so that parts of a run can be counted apart.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) totals: Totals,
    pub(crate) passes: u64,
    pub(crate) jumped: u64,
    pub(crate) hand_overs: HandOvers,
    digest: u64,
    pub(crate) ended_at: SimTime,
}

impl Tally {
    /// Counts a request that was answered, or failed.
    pub(crate) fn note(&mut self, record: &RequestRecord<'_>, gap_max: u64, slo: &Objectives) {
        let mut timeline = Timeline::new(record.request.due.0);
        (timeline.first, timeline.last) = (record.first.0, record.last.0);
        timeline.gap_max = gap_max;
        let worker = record
            .rank
            .map_or(u64::MAX, |rank| u64::from(rank.worker.0));
        let mut hash = 0;
        for word in [
            record.request.id().0,
            record.first.0,
            record.last.0,
            worker,
            u64::from(record.cached_tokens) << 32 | u64::from(record.output_tokens),
        ] {
            hash = mix64(hash ^ word);
        }
        // A sum, so that it does not matter in which order requests ended at one time.
        self.digest = self.digest.wrapping_add(hash);
        let class = record.request.class;
        match record.error {
            Some(Failure { kind, message }) => {
                let failed = Failed {
                    kind,
                    example: message,
                    class,
                };
                self.totals
                    .on_failed(&timeline, &failed, record.last.0, slo);
            }
            None => self.totals.on_answered(
                &Answered {
                    timeline,
                    input_tokens: record.input_tokens.into(),
                    output_tokens: record.output_tokens.into(),
                    cached_tokens: Some(record.cached_tokens.into()),
                    events: record.output_tokens.into(),
                    streamed: true,
                    class,
                },
                slo,
            ),
        }
    }

    pub(crate) fn add(&mut self, other: &Tally) {
        self.totals.add(&other.totals);
        self.passes += other.passes;
        self.jumped += other.jumped;
        self.hand_overs.bytes += other.hand_overs.bytes;
        self.hand_overs.times.add(&other.hand_overs.times);
        self.digest = self.digest.wrapping_add(other.digest);
        self.ended_at = self.ended_at.max(other.ended_at);
    }

    pub(crate) fn into_outcome(
        mut self,
        nodes: impl Iterator<Item = Node>,
        under_way: u64,
        schedule: &Schedule,
        cut: Option<String>,
    ) -> Outcome {
        let (mut preemptions, mut query_tokens, mut hit_tokens) = (0, 0, 0);
        let mut extrapolated = 0;
        for node in nodes {
            let stats = node.engine.stats();
            extrapolated += stats.extrapolated_passes;
            preemptions += stats.preemptions;
            query_tokens += stats.prefix_query_tokens;
            hit_tokens += stats.prefix_hit_tokens;
        }
        self.totals.requests.abandoned = schedule.abandoned();
        self.totals.requests.unfinished = under_way;
        self.totals.requests.sent += under_way;
        self.totals.requests.skipped_lines = schedule.skipped_lines();
        Outcome {
            totals: self.totals,
            engine: EngineCounts {
                preemptions: Some(preemptions as f64),
                prefix_query_tokens: Some(query_tokens as f64),
                prefix_hit_tokens: Some(hit_tokens as f64),
                prefix_hit_blocks: None,
            },
            ended_at: self.ended_at,
            passes: self.passes,
            jumped: self.jumped,
            extrapolated,
            hand_overs: self.hand_overs,
            digest: self.digest,
            cut,
        }
    }
}
