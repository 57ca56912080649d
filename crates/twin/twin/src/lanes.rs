//! A run with independent engines: each advances through time separately.
//!
//! If the router reads no load (round robin, random), and no request waits for the end of another
//! (no later turns, no closed loop), the target of each request is known before any engine runs.
//! Arrivals are routed a *window* ahead. In a window each engine takes its own requests and runs
//! its passes to the window's end, alone. There are two gains: threads can share the engines, and
//! one engine's block pool stays in the processor's cache for many requests in a row.
//!
//! ```text
//!   thread 0   route window k+1 │ engine 2 │ engine 5 │ … ┐
//!   thread 1   engine 0 │ engine 3 │ …                    ├ meet: window k+1 begins
//!   thread 2   engine 1 │ engine 4 │ …                    ┘
//! ```
//!
//! The same holds for a router with a refresh interval (`router.view_interval_ms`): windows are
//! then its intervals, and window k+1 uses the view at the beginning of window k. Cache deltas of
//! engines in window k are applied after window k+1 has been routed. If there was no arrival for
//! more than an interval, window k+1 is routed when all threads have met.
//!
//! Windows are bounded by counts of arrivals or by their times, never by threads or a clock, so a
//! run gives the same figures on any number of threads, and the same as the single queue of
//! [`sim`](crate::sim).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use slipstream_base::text::counted;
use slipstream_base::width::to_u32;
use slipstream_base::{
    BlockHash, EngineRequest, GenerationParams, KvDelta, Prompt, RankId, SimTime, Tail,
};
use slipstream_config::cluster::{RouterConfig, RouterPolicy};
use slipstream_config::workload_file::Workload;
use slipstream_des::{Spin, WindowBarrier};
use slipstream_dispatch::ahead;
use slipstream_engine::{DecodeRun, LowerHits, PassOutput};
use slipstream_router::{Chosen, Fleet, RouteRequest, Router, ViewTurn};
use slipstream_workload::{Request, Schedule, SourceError};

use crate::flight::{Flight, Flights};
use crate::node::{Node, Phase};
use crate::outcome::Outcome;
use crate::requests::{check_length, encoder_inputs, prompt_of, request_seed};
use crate::run::Hops;
use crate::run::{Failure, Options, Progress, REFUSED, RequestRecord, Sink, TwinError};
use crate::tally::Tally;

/// Arrivals per window and engine: enough that loading an engine's block pool into the processor's
/// cache pays off.
const ARRIVALS_PER_LANE: usize = 512;
/// Limit of arrivals per window, about 250 bytes each, two windows at a time.
const ARRIVALS_MAX: usize = 1 << 15;

/// Whether no request's target or time depends on another's; `follow_ups`: some requests follow
/// from answers.
pub(crate) fn are_independent(
    reads_cache: bool,
    router: &RouterConfig,
    workload: &Workload,
    follow_ups: bool,
) -> bool {
    // A refusal has a retry time, which depends on the current loads.
    let refuses = router.busy_kv_share < 1.0 || router.busy_prefill_tokens > 0;
    let ahead = !reads_cache || router.view_interval_ms > 0.0 && !refuses;
    let routes_ahead = ahead && router.policy != RouterPolicy::Direct;
    let open = !matches!(
        workload.arrival,
        slipstream_config::workload_file::Arrival::Closed { .. }
    );
    routes_ahead && open && !follow_ups
}

/// An engine and its requests.
struct Lane {
    node: Node,
    flights: Flights,
    /// When the current pass, or run of jumped passes, ends.
    end: Option<SimTime>,
    /// Arrivals of the window; the buffer is reused.
    arrivals: Vec<Arrival>,
    /// Cache changes that the router does not have yet, with their times.
    late: VecDeque<(SimTime, KvDelta)>,
}

struct Arrival {
    at: SimTime,
    request: Request,
    /// Its charge, if the router reads loads.
    chosen: Option<(Chosen, Prompt)>,
}

/// A request that has ended, kept until the end of the window.
struct Ended {
    request: Request,
    rank: Option<RankId>,
    admitted: SimTime,
    hops: Hops,
    first_pass_start: SimTime,
    first: SimTime,
    last: SimTime,
    input_tokens: u32,
    cached_tokens: u32,
    lower: LowerHits,
    output_tokens: u32,
    preemptions: u32,
    error: Option<String>,
}

impl Ended {
    fn refused(request: Request, at: SimTime, error: String) -> Ended {
        Ended {
            rank: None,
            admitted: at,
            hops: Hops::at(at),
            first_pass_start: at,
            first: at,
            last: at,
            input_tokens: request.prompt.tokens(),
            cached_tokens: 0,
            lower: LowerHits::default(),
            output_tokens: 0,
            preemptions: 0,
            error: Some(error),
            request,
        }
    }

    fn record(&self) -> RequestRecord<'_> {
        RequestRecord {
            request: &self.request,
            rank: self.rank,
            prefill_rank: None,
            hops: self.hops,
            admitted: self.admitted,
            first_pass_start: self.first_pass_start,
            first: self.first,
            last: self.last,
            input_tokens: self.input_tokens,
            cached_tokens: self.cached_tokens,
            lower: self.lower,
            output_tokens: self.output_tokens,
            preemptions: self.preemptions,
            retries: 0,
            error: self.error.as_deref().map(|message| Failure {
                kind: REFUSED,
                message,
            }),
        }
    }
}

/// State of one thread.
#[derive(Default)]
struct Worker {
    tally: Tally,
    ended: Vec<Ended>,
    out: PassOutput,
    run: DecodeRun,
}

/// State that every lane reads.
struct Rules<'a> {
    options: &'a Options,
    block_size: u32,
    root: BlockHash,
    context_max: u32,
    seed: u64,
    /// Whether the sink records each request.
    records: bool,
    /// The fleet to charge requests and apply cache changes to, if the router reads them.
    fleet: Arc<Fleet>,
    /// Whether cache changes are published.
    publishes_kv: bool,
    /// Their delay, ns.
    lag_ns: u64,
}

impl Lane {
    /// Takes the window's arrivals and runs all events before `until`.
    fn advance(&mut self, until: SimTime, rules: &Rules<'_>, worker: &mut Worker) {
        let mut arrivals = std::mem::take(&mut self.arrivals);
        let mut coming = arrivals.drain(..).peekable();
        loop {
            let due = coming.peek().map(|a| a.at);
            let Some(now) = due.into_iter().chain(self.end).min() else {
                break;
            };
            if now >= until {
                break;
            }
            worker.tally.ended_at = worker.tally.ended_at.max(now);
            if self.end == Some(now) {
                self.end = None;
                if self.node.phase == Phase::Jumped {
                    self.node.phase = Phase::Awake;
                } else {
                    self.end_pass(now, rules, worker);
                }
            }
            while let Some(arrival) = coming.next_if(|a| a.at <= now) {
                if let Err(ended) = self.take(arrival, rules) {
                    worker.ended.push(*ended);
                }
            }
            if self.node.phase == Phase::Awake {
                let next = coming.peek().map_or(until, |a| a.at.min(until));
                self.end = self
                    .jump(now, next, rules, worker)
                    .or_else(|| self.begin(now, rules, worker));
            }
        }
        drop(coming);
        self.arrivals = arrivals;
    }

    fn take(&mut self, arrival: Arrival, rules: &Rules<'_>) -> Result<(), Box<Ended>> {
        let Arrival {
            at,
            request,
            chosen,
        } = arrival;
        let (active, prompt) = match chosen {
            Some((chosen, prompt)) => (Some(chosen.charge(&rules.fleet, &prompt)), Ok(prompt)),
            None => (
                None,
                check_length(&request, rules.context_max)
                    .and_then(|()| prompt_of(&request, rules.block_size, rules.root)),
            ),
        };
        let prompt = match prompt {
            Ok(prompt) => prompt,
            Err(error) => return Err(Box::new(Ended::refused(request, at, error))),
        };
        let (max_tokens, ignore_eos) = (request.output_len, request.ignore_eos);
        let (priority, seed) = (request.priority, request_seed(rules.seed, &request));
        let adapter = request.adapter;
        let encoder_inputs = encoder_inputs(&request);
        let id = self.flights.insert(Flight::new(request, active, at));
        let added = self.node.engine.add(
            at,
            EngineRequest {
                id,
                prompt,
                params: GenerationParams {
                    max_tokens,
                    ignore_eos,
                    adapter,
                    encoder_inputs,
                    ..GenerationParams::default()
                },
                priority,
                seed,
            },
        );
        if let Err(refusal) = added {
            let request = self.flights.remove(id).request;
            return Err(Box::new(Ended::refused(request, at, refusal.to_string())));
        }
        if self.node.phase == Phase::Idle {
            self.node.phase = Phase::Awake;
        }
        Ok(())
    }

    fn jump(
        &mut self,
        now: SimTime,
        until: SimTime,
        rules: &Rules<'_>,
        worker: &mut Worker,
    ) -> Option<SimTime> {
        if !rules.options.jump || until <= now {
            return None;
        }
        let end = self
            .node
            .jump(now, until, &mut worker.run, &mut worker.tally.totals)?;
        let passes = worker.run.ends.len() as u64;
        worker.tally.passes += passes;
        worker.tally.jumped += passes;
        if rules.publishes_kv && !worker.run.kv_ops.is_empty() {
            let mut sequence = worker.run.kv_sequence;
            for (pass, &at) in worker.run.ends.iter().enumerate() {
                let ops = worker.run.kv_of(pass);
                if !ops.is_empty() {
                    let delta = KvDelta {
                        rank: self.node.rank,
                        sequence,
                        ops: ops.to_vec(),
                    };
                    self.late.push_back((at, delta));
                    sequence += 1;
                }
            }
        }
        Some(end)
    }

    fn begin(&mut self, now: SimTime, rules: &Rules<'_>, worker: &mut Worker) -> Option<SimTime> {
        let end = self.node.begin(now);
        // An idle engine has published all changes.
        if end.is_none() && self.node.engine.take_kv(&mut worker.out.kv) {
            self.on_kv(now, &worker.out.kv, rules);
        }
        end
    }

    /// Records a cache change at `at`.
    fn on_kv(&mut self, at: SimTime, delta: &KvDelta, rules: &Rules<'_>) {
        if rules.publishes_kv && !delta.ops.is_empty() {
            self.late.push_back((at, delta.clone()));
        }
    }

    /// Applies the changes that reach the router before `limit`.
    fn apply_kv(&mut self, limit: SimTime, rules: &Rules<'_>) {
        while let Some((at, delta)) = self.late.front()
            && *at + rules.lag_ns < limit
        {
            rules.fleet.on_kv(delta);
            self.late.pop_front();
        }
    }

    fn end_pass(&mut self, now: SimTime, rules: &Rules<'_>, worker: &mut Worker) {
        let Worker {
            tally, ended, out, ..
        } = worker;
        self.node.finish(out);
        if rules.publishes_kv && !out.kv.ops.is_empty() {
            self.late.push_back((now, out.kv.clone()));
        }
        self.node
            .record_output(now, out, &mut self.flights, &mut tally.totals);
        tally.passes += 1;
        for first in &out.first {
            self.flights.get_mut(first.id).on_first(first, now, now);
        }
        for done in &out.finished {
            let flight = self.flights.remove(done.id);
            let record = flight.record(self.node.rank, None, 0, &done.usage, now);
            tally.note(&record, flight.gap_max, &rules.options.slo);
            if rules.records {
                ended.push(Ended {
                    rank: record.rank,
                    admitted: record.admitted,
                    hops: record.hops,
                    first_pass_start: record.first_pass_start,
                    first: record.first,
                    last: record.last,
                    input_tokens: record.input_tokens,
                    cached_tokens: record.cached_tokens,
                    lower: record.lower,
                    output_tokens: record.output_tokens,
                    preemptions: record.preemptions,
                    error: None,
                    request: flight.request,
                });
            }
        }
    }
}

/// Routes arrivals, one window at a time.
struct Arrivals {
    schedule: Schedule,
    router: Router,
    /// Placeholder for every prompt, if the router reads no load and so no prompt.
    any_prompt: Option<Prompt>,
    root: BlockHash,
    context_max: u32,
    now: SimTime,
    time_max: SimTime,
    window_max: usize,
    in_flight_max: usize,
    /// Requests that could not be routed.
    refused: Vec<Ended>,
}

/// A time span whose arrivals are known.
#[derive(Clone, Copy)]
struct Window {
    /// Its end, exclusive.
    until: SimTime,
    /// Whether nothing arrives after it, or the run's time limit is reached.
    last: bool,
}

impl Arrivals {
    /// Puts the arrivals of the next window into `inboxes`. Returns `None`, without changes, if the
    /// router must refresh its view first and it is not `current`.
    fn fill(
        &mut self,
        inboxes: &[Mutex<Vec<Arrival>>],
        current: bool,
    ) -> Result<Option<Window>, SourceError> {
        if !current
            && self.any_prompt.is_none()
            && let Some(due) = self.schedule.next_due(self.now)?
            && self.router.view_turn(due) == ViewTurn::Fresh
        {
            return Ok(None);
        }
        self.fill_now(inboxes).map(Some)
    }

    fn fill_now(&mut self, inboxes: &[Mutex<Vec<Arrival>>]) -> Result<Window, SourceError> {
        let end = self.time_max + 1;
        let (mut count, mut until) = (0, None);
        loop {
            let Some(due) = self.schedule.next_due(self.now)? else {
                return Ok(Window {
                    until: end,
                    last: true,
                });
            };
            if due >= end {
                return Ok(Window {
                    until: end,
                    last: true,
                });
            }
            let is_over = match self.any_prompt {
                Some(_) => count >= self.window_max,
                None => self.router.view_turn(due) != ViewTurn::Same,
            };
            // Arrivals at one time stay together.
            if is_over && until.is_some_and(|last| due > last) {
                return Ok(Window {
                    until: due,
                    last: false,
                });
            }
            self.now = self.now.max(due);
            until = Some(self.now);
            while let Some(request) = self.schedule.pop(self.now)? {
                // A turn that follows from this one would be late by up to a window.
                assert!(
                    !request.has_next(),
                    "are_independent() lets in no later turns"
                );
                count += 1;
                self.route(request, inboxes);
                // All requests of an endless workload may be due at one time: the run is aborted
                // once the lanes have counted these.
                if count > self.in_flight_max {
                    return Ok(Window {
                        until: self.now + 1,
                        last: false,
                    });
                }
            }
        }
    }

    fn route(&mut self, request: Request, inboxes: &[Mutex<Vec<Arrival>>]) {
        let block_size = self.router.fleet().block_size();
        let prompt = match self.any_prompt {
            Some(_) => None,
            None => match check_length(&request, self.context_max)
                .and_then(|()| prompt_of(&request, block_size, self.root))
            {
                Ok(prompt) => Some(prompt),
                Err(error) => {
                    self.refused.push(Ended::refused(request, self.now, error));
                    return;
                }
            },
        };
        let route = RouteRequest {
            prompt: prompt
                .as_ref()
                .or(self.any_prompt.as_ref())
                .expect("one of the two"),
            max_tokens: request.output_len,
            session: Some(request.session),
            direct: None,
            only: None,
            exclude: &[],
        };
        match ahead::choose(&mut self.router, self.now, &route) {
            Ok(chosen) => {
                lock(&inboxes[chosen.index as usize]).push(Arrival {
                    at: self.now,
                    request,
                    chosen: prompt.map(|prompt| (chosen, prompt)),
                });
            }
            Err(error) => {
                let refused = Ended::refused(request, self.now, error.to_string());
                self.refused.push(refused);
            }
        }
    }
}

/// State shared by the threads of a run.
struct Shared<'a> {
    rules: Rules<'a>,
    lanes: Vec<Mutex<Lane>>,
    arrivals: Mutex<Arrivals>,
    /// Arrivals of the current window and of the next one, in turn.
    inboxes: [Vec<Mutex<Vec<Arrival>>>; 2],
    barrier: WindowBarrier,
    /// The next piece of work in this window: routing, then groups of lanes.
    next: AtomicUsize,
    /// Lanes per piece.
    piece: usize,
    /// Whether the next window has been routed, as far as possible.
    routed: AtomicBool,
    /// The next piece of cache changes to apply.
    next_applied: AtomicUsize,
    control: Mutex<Control>,
    in_flight: AtomicUsize,
    answered: AtomicU64,
    stop: AtomicBool,
    windows: AtomicU64,
    /// Ended requests of the current window and of the previous one, in turn: a thread may be in
    /// the next window before those of the last one were recorded.
    ended: [Mutex<Vec<Ended>>; 2],
}

struct Control {
    window: Window,
    following: Option<Result<Option<Window>, SourceError>>,
    cut: Option<String>,
    error: Option<SourceError>,
    over: bool,
}

impl Control {
    /// The first window is `window`.
    fn new(window: Window) -> Control {
        Control {
            window,
            following: None,
            cut: None,
            error: None,
            over: false,
        }
    }
}

impl Shared<'_> {
    /// Work of one window, shared between the threads.
    fn work(&self, worker: &mut Worker) {
        let window = lock(&self.control).window;
        let parity = (self.windows.load(Ordering::Acquire) % 2) as usize;
        let (mut in_flight, sent) = (0usize, worker.tally.totals.requests.sent);
        loop {
            let piece = self.next.fetch_add(1, Ordering::AcqRel);
            if piece == 0 {
                if !window.last {
                    let filled = lock(&self.arrivals).fill(&self.inboxes[1 - parity], false);
                    lock(&self.control).following = Some(filled);
                }
                self.routed.store(true, Ordering::Release);
                continue;
            }
            let lanes = self.lanes_of(piece - 1);
            if lanes.is_empty() {
                break;
            }
            for index in lanes {
                let mut lane = lock(&self.lanes[index]);
                std::mem::swap(&mut lane.arrivals, &mut lock(&self.inboxes[parity][index]));
                let before = lane.flights.len();
                lane.advance(window.until, &self.rules, worker);
                // A difference below 0 wraps, and so does the sum.
                in_flight = in_flight.wrapping_add(lane.flights.len().wrapping_sub(before));
            }
        }
        self.in_flight.fetch_add(in_flight, Ordering::AcqRel);
        let answered = worker.tally.totals.requests.sent - sent;
        self.answered.fetch_add(answered, Ordering::AcqRel);
        if self.rules.publishes_kv {
            self.apply_kv_of_lanes(window);
        }
        if !worker.ended.is_empty() {
            lock(&self.ended[parity]).append(&mut worker.ended);
        }
    }

    fn lanes_of(&self, piece: usize) -> std::ops::Range<usize> {
        let begin = self.lanes.len().min(piece * self.piece);
        begin..self.lanes.len().min(begin + self.piece)
    }

    /// Applies the cache changes that reach the router in `window`, shared between the threads. It
    /// starts when the next window has been routed, which uses the earlier state.
    fn apply_kv_of_lanes(&self, window: Window) {
        while !self.routed.load(Ordering::Acquire) {
            std::thread::yield_now(); // some microseconds at most
        }
        loop {
            let lanes = self.lanes_of(self.next_applied.fetch_add(1, Ordering::AcqRel));
            if lanes.is_empty() {
                break;
            }
            for index in lanes {
                // A thread that still advances it holds its lock.
                lock(&self.lanes[index]).apply_kv(window.until, &self.rules);
            }
        }
    }

    /// All threads have met: the next window begins, or the run ends.
    fn turn(&self) {
        let mut control = lock(&self.control);
        let in_flight = self.in_flight.load(Ordering::Acquire);
        let until = control.window.until;
        let options = self.rules.options;
        if control.window.last {
            control.over = true;
        } else if in_flight > options.in_flight_max {
            control.cut = Some(format!(
                "unstable: {} under way at {until}, and more come than are answered",
                counted(in_flight as u64, "request")
            ));
        } else if self.stop.load(Ordering::Acquire) {
            control.cut = Some(format!("interrupted at {until}"));
        } else {
            let following = control.following.take();
            let mut arrivals = lock(&self.arrivals);
            let filled = match following.expect("somebody routed the next window") {
                Ok(Some(window)) => {
                    // All engines have reached its start.
                    arrivals.router.refresh();
                    Ok(window)
                }
                Ok(None) => {
                    let next = 1 - (self.windows.load(Ordering::Acquire) % 2) as usize;
                    arrivals.fill_now(&self.inboxes[next])
                }
                Err(error) => Err(error),
            };
            match filled {
                Ok(window) => control.window = window,
                Err(error) => control.error = Some(error),
            }
        }
        control.over |= control.cut.is_some() || control.error.is_some();
        self.windows.fetch_add(1, Ordering::AcqRel);
        self.routed.store(false, Ordering::Release);
        self.next_applied.store(0, Ordering::Release);
        self.next.store(0, Ordering::Release);
    }

    fn is_over(&self) -> bool {
        lock(&self.control).over
    }

    /// Records the requests that ended in window number `window`, in the order of their ends.
    fn report(&self, window: u64, tally: &mut Tally, sink: &mut dyn Sink) {
        let mut ended = std::mem::take(&mut *lock(&self.ended[(window % 2) as usize]));
        ended.sort_unstable_by_key(|e| (e.last, e.request.id()));
        for e in &ended {
            let record = e.record();
            if e.error.is_some() {
                tally.note(&record, 0, &self.rules.options.slo);
            }
            if self.rules.records {
                sink.on_request(&record);
            }
        }
        let progress = Progress {
            now: lock(&self.control)
                .window
                .until
                .min(self.rules.options.time_max),
            ended: self.answered.load(Ordering::Acquire) + tally.totals.requests.sent,
            in_flight: self.in_flight.load(Ordering::Acquire),
        };
        if !sink.on_progress(progress) {
            self.stop.store(true, Ordering::Release);
        }
    }
}

/// The parts of a run with independent engines.
pub(crate) struct Apart<'a> {
    pub(crate) options: &'a Options,
    pub(crate) schedule: Schedule,
    pub(crate) router: Router,
    pub(crate) nodes: Vec<Node>,
    pub(crate) root: BlockHash,
    /// Tokens of a prompt and its answer at most.
    pub(crate) context_max: u32,
    pub(crate) seed: u64,
    /// Delay from a cache change to the router, ns.
    pub(crate) lag_ns: u64,
}

/// Runs `parts`, whose requests [are independent](are_independent), on `options.threads` threads.
pub(crate) fn run(parts: Apart<'_>, sink: &mut dyn Sink) -> Result<Outcome, TwinError> {
    let threads = parts.options.threads.clamp(1, to_u32(parts.nodes.len()));
    let shared = Shared::new(parts, threads, sink.wants_requests())?;
    let mut tally = Tally::default();
    let others = shared.run_on(threads, &mut tally, sink);
    let mut refused = std::mem::take(&mut lock(&shared.arrivals).refused);
    lock(&shared.ended[0]).append(&mut refused);
    shared.report(0, &mut tally, sink);
    for other in &others {
        tally.add(other);
    }
    shared.into_outcome(tally)
}

impl<'a> Shared<'a> {
    /// The state of a run on `threads` threads, whose first window is routed.
    fn new(parts: Apart<'a>, threads: u32, records: bool) -> Result<Shared<'a>, TwinError> {
        let options = parts.options;
        let lane = |node| {
            Mutex::new(Lane {
                node,
                flights: Flights::default(),
                end: None,
                arrivals: Vec::new(),
                late: VecDeque::new(),
            })
        };
        let lanes: Vec<_> = parts.nodes.into_iter().map(lane).collect();
        let inboxes = || lanes.iter().map(|_| Mutex::default()).collect::<Vec<_>>();
        let inboxes = [inboxes(), inboxes()];
        let fleet = Arc::clone(parts.router.fleet());
        let block_size = fleet.block_size();
        let views = fleet.reads_cache();
        let mut router = parts.router;
        router.manual_refresh();
        let mut arrivals = Arrivals {
            schedule: parts.schedule,
            any_prompt: (!views).then(|| one_token(block_size)),
            root: parts.root,
            context_max: parts.context_max,
            router,
            now: SimTime::ZERO,
            // One less than the end of time, so that a window can end after it.
            time_max: options.time_max.min(SimTime(u64::MAX - 1)),
            window_max: (ARRIVALS_PER_LANE * lanes.len())
                .min(ARRIVALS_MAX)
                .min(usize::try_from(options.progress_events).unwrap_or(ARRIVALS_MAX))
                .max(1),
            in_flight_max: options.in_flight_max,
            refused: Vec::new(),
        };
        let window = arrivals.fill_now(&inboxes[0])?;
        Ok(Shared {
            rules: Rules {
                options,
                block_size,
                root: parts.root,
                context_max: parts.context_max,
                seed: parts.seed,
                records,
                publishes_kv: views && fleet.config().kv_events,
                lag_ns: parts.lag_ns,
                fleet,
            },
            // Short windows: few pieces, so that the overhead per piece stays small.
            piece: if views {
                lanes.len().div_ceil(threads as usize * 4)
            } else {
                1
            },
            lanes,
            arrivals: Mutex::new(arrivals),
            inboxes,
            barrier: WindowBarrier::new(threads, Spin::default()),
            next: AtomicUsize::new(0),
            routed: AtomicBool::new(false),
            next_applied: AtomicUsize::new(0),
            control: Mutex::new(Control::new(window)),
            in_flight: AtomicUsize::new(0),
            answered: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            windows: AtomicU64::new(0),
            ended: Default::default(),
        })
    }

    /// Runs all windows on `threads` threads, this one included, and records their requests in `tally`. Returns the tallies
    /// of the threads.
    fn run_on(&self, threads: u32, tally: &mut Tally, sink: &mut dyn Sink) -> Vec<Tally> {
        #[expect(
            clippy::disallowed_methods,
            reason = "threads of one run, without a clock"
        )]
        std::thread::scope(|scope| {
            let spawned: Vec<_> = (1..threads)
                .map(|_| {
                    scope.spawn(|| {
                        let _guard = PanicEndsAll;
                        let mut worker = Worker::default();
                        while !self.is_over() {
                            self.work(&mut worker);
                            self.barrier.meet(|| self.turn());
                        }
                        worker.tally
                    })
                })
                .collect();
            let _guard = PanicEndsAll;
            let mut worker = Worker::default();
            let mut window = 0;
            while !self.is_over() {
                self.work(&mut worker);
                self.barrier.meet(|| self.turn());
                self.report(window, tally, sink);
                window += 1;
            }
            let joined = spawned.into_iter().map(|thread| {
                let tally = thread.join();
                tally.unwrap_or_else(|p| std::panic::resume_unwind(p))
            });
            joined.chain([worker.tally]).collect()
        })
    }

    fn into_outcome(self, mut tally: Tally) -> Result<Outcome, TwinError> {
        let options = self.rules.options;
        let mut arrivals = into_inner(self.arrivals);
        let control = into_inner(self.control);
        if let Some(error) = control.error {
            return Err(error.into());
        }
        let mut cut = control.cut;
        let under_way = self.in_flight.into_inner();
        if control.window.last {
            let more = arrivals.schedule.next_due(arrivals.now)?.is_some();
            if under_way > 0 || more {
                tally.ended_at = options.time_max;
                cut = Some(format!(
                    "simulated time reached its limit of {:?} with {} under way",
                    Duration::from_nanos(options.time_max.0),
                    counted(under_way as u64, "request")
                ));
            }
        } else {
            tally.ended_at = control.window.until;
        }
        let nodes = self.lanes.into_iter().map(|lane| into_inner(lane).node);
        Ok(tally.into_outcome(nodes, under_way as u64, &arrivals.schedule, cut))
    }
}

/// If a thread panicked, the others would wait at the barrier forever.
struct PanicEndsAll;

impl Drop for PanicEndsAll {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort(); // the panic message has the cause
        }
    }
}

fn one_token(block_size: u32) -> Prompt {
    let full = u32::from(block_size == 1) as usize;
    let blocks = vec![BlockHash::default(); full].into();
    Prompt::from_parts(1, block_size, blocks, Tail::Opaque { id: 0 })
        .expect("a prompt of one token in blocks of at least one")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn into_inner<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}
