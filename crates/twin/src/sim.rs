//! The run: what happens next, until nothing does.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use slipstream_base::cluster::Cluster;
use slipstream_base::mix::mix64;
use slipstream_base::workload_file::Workload;
use slipstream_base::{BlockHash, EngineRequest, GenerationParams, RankId, SimTime, WorkerId};
use slipstream_engine::timing::{StepLoad, StepTime, TimingError};
use slipstream_engine::{DecodeRun, Engine, EngineError, OutputModel, PassOutput};
use slipstream_report::run::EngineCounts;
use slipstream_report::{Answered, Failed, Objectives, PassRecord, Timeline, Totals};
use slipstream_router::{Fleet, FleetError, RouteError, RouteRequest, Router};
use slipstream_workload::schedule::Shard;
use slipstream_workload::{Request, Schedule, SourceError, prompt::answer_name};

use crate::lanes;
use crate::node::{Flight, Flights, Node, Phase};

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
    /// Divides the length of passes, above 0: what a live cluster at this `live.speedup` would do.
    pub speedup: f64,
    /// Requests under way at which a run is given up as unstable: more than any engine that keeps
    /// up would let gather.
    pub in_flight_max: usize,
    /// Threads for engines that have nothing to do with each other, at least 1: those of a router
    /// that looks at no load, under requests of which none waits for another. Other runs take one.
    /// The result is the same for any number.
    pub threads: u32,
    /// One queue for the events of all engines, even if they have nothing to do with each other.
    /// The result is the same, slower.
    pub one_queue: bool,
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
            threads: 1,
            one_queue: false,
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
    /// Where it ran; `None` if it was refused.
    pub rank: Option<RankId>,
    /// When it left the waiting queue for the first time.
    pub admitted: SimTime,
    /// When the pass that computed its first token began.
    pub first_pass_start: SimTime,
    /// When its first token came.
    pub first: SimTime,
    /// When its last token came, or when it was refused.
    pub last: SimTime,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Of the prompt, found in the KV cache.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Times that it was preempted.
    pub preemptions: u32,
    /// Why it was refused, if it was.
    pub error: Option<&'a str>,
}

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
    /// Every request's times, place and hits: equal if two runs were.
    pub digest: u64,
    /// Why the run ended before the workload did, if it did.
    pub cut: Option<String>,
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
    let policy = cluster.router.policy;
    // Whoever watches passes gets them from one queue, in the order of their time.
    let apart = !options.one_queue && !sink.wants_passes();
    if apart && lanes::are_independent(sim.reads_cache, policy, workload) {
        lanes::run(sim, sink)
    } else {
        sim.run(sink)
    }
}

/// Calls of [`Sink::on_progress`]: one in so many events.
const PROGRESS_EVENTS: u64 = 1 << 14;

/// A pass ends. At equal times in the order in which the passes began.
type PassEnd = Reverse<(SimTime, u64, u32)>;

pub(crate) struct Sim<'a> {
    options: &'a Options,
    schedule: Schedule,
    router: Router,
    fleet: Arc<Fleet>,
    nodes: Vec<Node>,
    /// By target of the fleet: its node. They are the same list.
    ranks: Vec<RankId>,
    flights: Flights,
    ends: BinaryHeap<PassEnd>,
    sequence: u64,
    /// Requests under way whose session goes on after them.
    continuing: usize,
    /// The router looks at what is cached.
    reads_cache: bool,
    /// The sink wants to know of passes.
    watches: bool,
    /// Nodes that begin a pass at the present moment.
    awake: Vec<u32>,
    root: BlockHash,
    seed: u64,
    now: SimTime,
    out: PassOutput,
    run: DecodeRun,
    tally: Tally,
}

/// What engines that have nothing to do with each other are run from.
pub(crate) struct Parts<'a> {
    pub(crate) options: &'a Options,
    pub(crate) schedule: Schedule,
    pub(crate) router: Router,
    pub(crate) nodes: Vec<Node>,
    pub(crate) ranks: Vec<RankId>,
    pub(crate) root: BlockHash,
    pub(crate) seed: u64,
}

impl<'a> Sim<'a> {
    pub(crate) fn into_parts(self) -> Parts<'a> {
        Parts {
            options: self.options,
            schedule: self.schedule,
            router: self.router,
            nodes: self.nodes,
            ranks: self.ranks,
            root: self.root,
            seed: self.seed,
        }
    }

    fn new(
        cluster: &Cluster,
        workload: &Workload,
        options: &'a Options,
        read: &impl Fn(&Path) -> io::Result<Vec<u8>>,
    ) -> Result<Sim<'a>, TwinError> {
        let fleet = Arc::new(Fleet::from_cluster(cluster)?);
        let mut nodes = Vec::new();
        let mut ranks = Vec::new();
        let mut worker = 0;
        for pool in &cluster.pools {
            for _ in 0..pool.workers {
                for dp_rank in 0..pool.engine.data_parallel_size {
                    let rank = RankId {
                        worker: WorkerId(worker),
                        dp_rank: dp_rank as u16,
                    };
                    let timing = slipstream_engine::timing::build(
                        &pool.engine,
                        &cluster.model.shape,
                        |path| read(path),
                    )
                    .map_err(|source| TwinError::Timing {
                        pool: pool.name.clone(),
                        source,
                    })?;
                    let timing: Box<dyn StepTime> = if options.speedup == 1.0 {
                        timing
                    } else {
                        Box::new(Faster {
                            timing,
                            speedup: options.speedup,
                        })
                    };
                    // What answers say is nobody's business here: blocks are named, not spelled.
                    let output = OutputModel {
                        vocab: [0].into(),
                        first_vocab: None,
                        eos: 1,
                        lengths: pool.engine.output_len.clone(),
                    };
                    let engine =
                        Engine::new(rank, &pool.engine, timing, output).map_err(|source| {
                            TwinError::Engine {
                                pool: pool.name.clone(),
                                source,
                            }
                        })?;
                    nodes.push(Node::new(engine, options.each_token));
                    ranks.push(rank);
                }
                fleet.set_ready(WorkerId(worker), true);
                worker += 1;
            }
        }
        Ok(Sim {
            options,
            continuing: 0,
            reads_cache: fleet.reads_cache(),
            watches: false,
            schedule: Schedule::open(workload, 0, Shard::WHOLE)?,
            router: Router::new(fleet.clone(), 0),
            fleet,
            nodes,
            ranks,
            flights: Flights::default(),
            ends: BinaryHeap::new(),
            sequence: 0,
            awake: Vec::new(),
            root: BlockHash::root(&cluster.model.name, "", ""),
            seed: mix64(workload.seed ^ cluster.router.seed),
            now: SimTime::ZERO,
            out: PassOutput::default(),
            run: DecodeRun::default(),
            tally: Tally::default(),
        })
    }

    fn run(mut self, sink: &mut dyn Sink) -> Result<Outcome, TwinError> {
        let mut cut = None;
        let mut events = 0u64;
        while let Some(next) = self.next_time()? {
            if next > self.options.time_max {
                self.now = self.options.time_max;
                cut = Some(format!(
                    "simulated time reached its limit of {} with {} requests under way",
                    self.now,
                    self.flights.len()
                ));
                break;
            }
            self.now = next;
            self.end_passes(sink);
            self.take_arrivals(sink)?;
            self.begin_passes(sink)?;
            if self.flights.len() > self.options.in_flight_max {
                cut = Some(format!(
                    "unstable: {} requests are under way at {}, and more come than are answered",
                    self.flights.len(),
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

    /// When something happens next; `None` if nothing ever will.
    fn next_time(&mut self) -> Result<Option<SimTime>, TwinError> {
        let due = self.schedule.next_due(self.now)?;
        let end = self.ends.peek().map(|Reverse((end, ..))| *end);
        Ok(due.into_iter().chain(end).min())
    }

    /// Ends the passes that end now.
    fn end_passes(&mut self, sink: &mut dyn Sink) {
        while let Some(&Reverse((end, _, node))) = self.ends.peek()
            && end <= self.now
        {
            self.ends.pop();
            if self.nodes[node as usize].phase == Phase::Jumped {
                self.nodes[node as usize].phase = Phase::Awake;
            } else {
                self.end_pass(node, sink);
            }
            self.awake.push(node);
        }
    }

    fn end_pass(&mut self, node: u32, sink: &mut dyn Sink) {
        let now = self.now;
        let mut out = std::mem::take(&mut self.out);
        self.nodes[node as usize].finish(
            now,
            &mut out,
            &mut self.flights,
            &mut self.tally.totals.itl,
        );
        self.tally.passes += 1;
        if let Some(watch) = &self.nodes[node as usize].watch {
            sink.on_pass(&PassRecord {
                engine: node,
                start: out.start,
                end: out.end,
                fpm: &out.fpm,
                tokens: out.token_count,
                used_blocks: watch.used_blocks,
                preemptions: watch.preempted,
                gaps: &watch.gaps,
            });
        }
        for first in &out.first {
            self.flights.get_mut(first.id).on_first(first, now);
        }
        if self.reads_cache && !out.kv.ops.is_empty() {
            self.fleet.on_kv(&out.kv);
        }
        for done in &out.finished {
            let flight = self.flights.remove(done.id);
            self.continuing -= usize::from(flight.request.has_next());
            let rank = self.ranks[flight.target as usize];
            let record = flight.record(rank, &done.usage, now);
            let slo = &self.options.slo;
            self.tally.note(&record, flight.gap_max, slo);
            sink.on_request(&record);
            self.schedule
                .on_done(&flight.request, done.usage.output_tokens, now);
        }
        self.out = out;
    }

    /// Routes what is due now.
    fn take_arrivals(&mut self, sink: &mut dyn Sink) -> Result<(), TwinError> {
        while let Some(request) = self.schedule.pop(self.now)? {
            if let Err((request, error)) = self.take(request) {
                let record = RequestRecord {
                    request: &request,
                    rank: None,
                    admitted: self.now,
                    first_pass_start: self.now,
                    first: self.now,
                    last: self.now,
                    input_tokens: request.prompt.tokens(),
                    cached_tokens: 0,
                    output_tokens: 0,
                    preemptions: 0,
                    error: Some(&error),
                };
                self.tally.note(&record, 0, &self.options.slo);
                sink.on_request(&record);
                self.schedule.on_failed(&request);
            }
        }
        Ok(())
    }

    /// Routes a request and adds it to its engine, or gives it back with why not.
    fn take(&mut self, request: Request) -> Result<(), (Request, String)> {
        let id = answer_name(request.id());
        let block_size = self.fleet.block_size();
        let prompt = match request.prompt.to_blocks(block_size, self.root, id) {
            Ok(prompt) => prompt,
            Err(error) => return Err((request, error.to_string())),
        };
        let route = RouteRequest {
            prompt: &prompt,
            max_tokens: request.output_len,
            session: Some(request.session),
            direct: None,
            exclude: &[],
        };
        let routed = match self.router.route(self.now, &route, None) {
            Ok(routed) => routed,
            Err(error) => return Err((request, route_error(&error))),
        };
        let target = self
            .fleet
            .target_of(routed.target)
            .expect("the router chose one of its targets");
        let engine_request = EngineRequest {
            id: slipstream_base::RequestId::default(), // its slot, below
            prompt,
            params: GenerationParams {
                max_tokens: request.output_len,
                ignore_eos: request.ignore_eos,
                ..GenerationParams::default()
            },
            priority: request.priority,
            seed: request_seed(self.seed, &request),
        };
        let flight = Flight::new(request, Some(routed.active), target as u32, self.now);
        let id = self.flights.insert(flight);
        let node = &mut self.nodes[target];
        let added = node.engine.add(
            self.now,
            EngineRequest {
                id,
                ..engine_request
            },
        );
        if let Err(refusal) = added {
            return Err((self.flights.remove(id).request, refusal.to_string()));
        }
        self.continuing += usize::from(self.flights.get_mut(id).request.has_next());
        if node.phase == Phase::Idle {
            node.phase = Phase::Awake;
            self.awake.push(target as u32);
        }
        Ok(())
    }

    /// Begins a pass on each engine whose last one has ended, or that got something to do.
    fn begin_passes(&mut self, sink: &mut dyn Sink) -> Result<(), TwinError> {
        let mut awake = std::mem::take(&mut self.awake);
        let until = self.jump_until(awake.len())?;
        for node in awake.drain(..) {
            let end = self.jump(node, until, sink).or_else(|| {
                let end = self.nodes[node as usize].begin(self.now);
                self.publish_idle(node);
                end
            });
            if let Some(end) = end {
                self.ends.push(Reverse((end, self.sequence, node)));
                self.sequence += 1;
            }
        }
        self.awake = awake;
        Ok(())
    }

    /// How far the `awake` engines that begin a pass now may jump: a request must find the engine
    /// that it goes to, and the router's index, as they would be.
    fn jump_until(&mut self, awake: usize) -> Result<SimTime, TwinError> {
        if !self.options.jump || awake == 0 {
            return Ok(SimTime::ZERO);
        }
        // Requests come at times that are known, unless one that ends brings the next.
        if self.continuing == 0 && !self.schedule.is_closed() {
            return Ok(self.schedule.next_due(self.now)?.unwrap_or(SimTime::MAX));
        }
        if awake > 1 {
            return Ok(SimTime::ZERO);
        }
        Ok(self.next_time()?.unwrap_or(SimTime::MAX))
    }

    /// The cache of an engine changed.
    fn on_kv(&mut self) {
        if self.reads_cache {
            self.fleet.on_kv(&self.out.kv);
        }
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
            &mut self.tally.totals.itl,
        )?;
        let passes = self.run.ends.len() as u64;
        self.tally.passes += passes;
        self.tally.jumped += passes;
        if self.reads_cache && !self.run.kv_ops.is_empty() {
            // Deltas of all the passes now: nobody reads the index before the last of them has
            // ended. Numbers are those of single deltas, so the next one is in order.
            let mut sequence = self.run.kv_sequence;
            for pass in 0..self.run.ends.len() {
                let ops = self.run.kv_of(pass);
                if ops.is_empty() {
                    continue;
                }
                self.out.kv.rank = self.ranks[node as usize];
                self.out.kv.sequence = sequence;
                self.out.kv.ops.clear();
                self.out.kv.ops.extend_from_slice(ops);
                self.on_kv();
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
            });
            start = end;
        }
    }

    /// What left the cache when no pass began: an engine that fell idle has told everything.
    fn publish_idle(&mut self, node: u32) {
        let node = &mut self.nodes[node as usize];
        if node.phase == Phase::Idle && node.engine.take_kv(&mut self.out.kv) {
            self.on_kv();
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
    digest: u64,
    pub(crate) ended_at: SimTime,
}

impl Tally {
    /// Counts a request that has ended.
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
            Some(error) => {
                let failed = Failed {
                    kind: "refused",
                    example: error,
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
        for node in nodes {
            let stats = node.engine.stats();
            preemptions += stats.preemptions;
            query_tokens += stats.prefix_query_tokens;
            hit_tokens += stats.prefix_hit_tokens;
        }
        self.totals.requests.abandoned = schedule.abandoned() + under_way;
        self.totals.requests.skipped_lines = schedule.skipped_lines();
        Outcome {
            totals: self.totals,
            engine: EngineCounts {
                preemptions: Some(preemptions as f64),
                prefix_query_tokens: Some(query_tokens as f64),
                prefix_hit_tokens: Some(hit_tokens as f64),
            },
            ended_at: self.ended_at,
            passes: self.passes,
            jumped: self.jumped,
            digest: self.digest,
            cut,
        }
    }
}

/// Passes that take less than they would.
struct Faster {
    timing: Box<dyn StepTime>,
    speedup: f64,
}

impl StepTime for Faster {
    fn step_ns(&mut self, load: &StepLoad) -> u64 {
        (self.timing.step_ns(load) as f64 / self.speedup).round() as u64
    }
}

fn route_error(error: &RouteError) -> String {
    error.to_string()
}
