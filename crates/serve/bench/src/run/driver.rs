//! One thread of a run: sends requests when they are due, and follows each to its end.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::Value;
use slipstream_base::width::to_usize;
use slipstream_base::{RequestId, SimTime, Stage};
use slipstream_config::workload_file::Workload;
use slipstream_os::process::monotonic_ns;
use slipstream_report::DragRecord;
use slipstream_report::drag::TIERS;
use slipstream_workload::schedule::Shard;
use slipstream_workload::{Request, Schedule};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::{Notify, watch};
use tokio::task::LocalSet;

use crate::alarm::Alarm;
use crate::answer::Answer;
use crate::client::{Failure, Pool};
use crate::http::{Head, Parser};
use crate::run::{BenchError, Shared};
use slipstream_report::{Answered, Failed, Series, Timeline, Totals};

/// Salt of the warm-up's texts: any number but 0, which is the workload itself.
const WARMUP_SALT: u64 = 0x7761_726d;

/// Runs the warm-up and the measured part of one shard.
pub(super) fn run_thread(
    shared: &Arc<Shared>,
    shard: Shard,
    stopper: &Arc<watch::Sender<bool>>,
) -> Result<Totals, BenchError> {
    let config = &shared.config;
    let pool = Rc::new(Pool::new(&config.target, config.connect_timeout));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|source| BenchError::System {
            what: "starting a runtime",
            source,
        });
    let run = |runtime: &Runtime, workload: &Workload, salt, start_ns| {
        let schedule = Schedule::open(workload, salt, shard)?;
        let worker = Worker::new(shared.clone(), pool.clone(), schedule, shard, start_ns);
        run_phase(runtime, &Rc::new(worker), stopper)
    };
    let warmup = match &runtime {
        Ok(runtime) if config.warmup > 0 => {
            let workload = Workload {
                requests: Some(config.warmup),
                duration_s: None,
                ..config.workload.clone()
            };
            run(runtime, &workload, WARMUP_SALT, monotonic_ns())
        }
        _ => Ok(Totals::default()),
    };
    // Every thread reaches the barrier even after an error, or the others would wait.
    let start_ns = shared.start_line();
    let (runtime, warmup) = (runtime?, warmup?);
    let mut totals = run(&runtime, &config.workload, 0, start_ns)?;
    totals.requests.warmup = warmup.requests.sent;
    Ok(totals)
}

/// Runs one worker until its requests have ended.
fn run_phase(
    runtime: &Runtime,
    worker: &Rc<Worker>,
    stopper: &Arc<watch::Sender<bool>>,
) -> Result<Totals, BenchError> {
    let alarm = {
        let _guard = runtime.enter();
        Alarm::new().map_err(|source| BenchError::System {
            what: "making a timer",
            source,
        })?
    };
    let local = LocalSet::new();
    if worker.index == 0 && worker.shared.config.catch_interrupt {
        let stopper = stopper.clone();
        local.spawn_local(async move {
            if tokio::signal::ctrl_c().await.is_ok() {
                stopper.send_replace(true);
            }
        });
    }
    local.block_on(runtime, worker.clone().drive(alarm))?;
    // Requests that an interrupt left in flight are dropped.
    drop(local);
    Ok(worker.to_totals())
}

/// State shared by the requests of one thread.
struct Worker {
    shared: Arc<Shared>,
    pool: Rc<Pool>,
    index: usize,
    start_ns: u64,
    in_flight_max: u64,
    schedule: RefCell<Schedule>,
    totals: RefCell<Totals>,
    /// Answers of open sessions, by turn; the next prompt repeats them.
    answers: RefCell<HashMap<u64, Vec<String>>>,
    /// Wakes the loop when a request ends.
    ended: Notify,
}

/// How a request ended.
enum End {
    Answered(Answered),
    Failed { kind: String, example: String },
}

impl End {
    fn failed(kind: impl Into<String>, example: impl Into<String>) -> End {
        End::Failed {
            kind: kind.into(),
            example: example.into(),
        }
    }
}

/// One attempt of a request: its answer, and how it ended.
struct Attempt {
    end: End,
    answer: Answer,
    head: Head,
}

impl Worker {
    fn new(
        shared: Arc<Shared>,
        pool: Rc<Pool>,
        schedule: Schedule,
        shard: Shard,
        start_ns: u64,
    ) -> Worker {
        let mut totals = Totals::default();
        if shared.config.series {
            totals.series = Some(Box::new(Series::new(start_ns, Vec::new())));
        }
        Worker {
            in_flight_max: shard.part_of(shared.config.in_flight_max).max(1),
            shared,
            pool,
            index: shard.index as usize,
            start_ns,
            schedule: RefCell::new(schedule),
            totals: RefCell::new(totals),
            answers: RefCell::default(),
            ended: Notify::new(),
        }
    }

    fn to_totals(&self) -> Totals {
        let schedule = self.schedule.borrow();
        let mut totals = self.totals.take();
        // Still in flight: cut off by an interrupt.
        totals.requests.abandoned += schedule.abandoned() + schedule.in_flight();
        totals.requests.skipped_lines = schedule.skipped_lines();
        self.shared.progress[self.index].in_flight.store(0, Relaxed);
        totals
    }

    fn now(&self) -> SimTime {
        SimTime(monotonic_ns().saturating_sub(self.start_ns))
    }

    /// Starts requests as they come due, until all have ended or an interrupt arrives.
    async fn drive(self: Rc<Self>, mut alarm: Alarm) -> Result<(), BenchError> {
        let mut stop = self.shared.stop.clone();
        loop {
            if *stop.borrow_and_update() {
                self.schedule.borrow_mut().stop();
                return Ok(());
            }
            let next = self.begin_due()?;
            if self.schedule.borrow().is_over() {
                return Ok(());
            }
            tokio::select! {
                biased;
                () = self.ended.notified() => {}
                _ = stop.changed() => {}
                woken = alarm.wait_until(next.unwrap_or(0)), if next.is_some() => {
                    woken.map_err(|source| BenchError::System { what: "waiting on a timer", source })?;
                }
            }
        }
    }

    /// Starts due requests; returns the time of the next one (ns), if only time must pass.
    fn begin_due(self: &Rc<Self>) -> Result<Option<u64>, BenchError> {
        let mut schedule = self.schedule.borrow_mut();
        let progress = &self.shared.progress[self.index];
        loop {
            let now = self.now();
            if schedule.in_flight() >= self.in_flight_max {
                // The next end of a request wakes the loop.
                return Ok(None);
            }
            let Some(request) = schedule.pop(now)? else {
                let due = schedule.next_due(now)?;
                return Ok(due.map(|due| self.start_ns + due.0));
            };
            progress.in_flight.store(schedule.in_flight(), Relaxed);
            tokio::task::spawn_local(self.clone().see_through(request));
        }
    }

    /// Sends a request, reads its answer, and records the outcome.
    async fn see_through(self: Rc<Self>, request: Request) {
        let mut timeline = Timeline::new(self.start_ns + request.due.0);
        let bytes = {
            let answers = self.answers.borrow();
            let earlier = answers.get(&request.session);
            // Turns of a session are numbered in its low bits; see `Request::id`.
            let text = |id: RequestId| {
                let turn = to_usize(id.0 - (request.session << 12));
                earlier
                    .and_then(|texts| texts.get(turn))
                    .map(String::as_str)
            };
            self.shared.template.render(&request, text)
        };
        let limit = self.shared.config.timeout;
        let tries = Cell::new(0);
        let attempt = tokio::time::timeout(
            limit,
            self.try_until_answered(&request, &bytes, &mut timeline, &tries),
        )
        .await
        .unwrap_or_else(|_| Attempt {
            end: End::failed("timeout", format!("no complete answer within {limit:?}")),
            answer: Answer::new(request.has_next()),
            head: Head::default(),
        });
        self.book(&request, &timeline, attempt, tries.get());
    }

    /// Retries a request while it is answered 429 or 503, up to the configured number of times.
    async fn try_until_answered(
        &self,
        request: &Request,
        bytes: &[u8],
        timeline: &mut Timeline,
        tries: &Cell<u32>,
    ) -> Attempt {
        loop {
            let attempt = self.attempt(request, bytes, timeline, tries).await;
            let busy = matches!(attempt.head.status, 429 | 503);
            if !busy || tries.get() >= self.shared.config.retries {
                return attempt;
            }
            tries.set(tries.get() + 1);
            let wait_s = attempt.head.retry_after_s.unwrap_or(1);
            tokio::time::sleep(Duration::from_secs(u64::from(wait_s))).await;
        }
    }

    /// One attempt. The server may just have closed a kept connection. That is no failure of the
    /// request, which is sent once more on a new connection.
    async fn attempt(
        &self,
        request: &Request,
        bytes: &[u8],
        timeline: &mut Timeline,
        tries: &Cell<u32>,
    ) -> Attempt {
        let mut answer = Answer::new(request.has_next());
        let mut parser = Parser::default();
        let named = !self.shared.config.slo.classes.is_empty();
        let class = named.then_some(request.class);
        let mut taken = self.pool.take().await;
        loop {
            let (stream, reused) = match taken {
                Ok(taken) => taken,
                Err(failure) => return Attempt::failed(&failure, answer, &parser),
            };
            match self
                .exchange(stream, bytes, class, timeline, &mut parser, &mut answer)
                .await
            {
                Ok(()) => break,
                Err(_) if reused && parser.is_untouched() => {
                    tries.set(tries.get() + 1);
                    taken = self.pool.connect().await.map(|stream| (stream, false));
                }
                Err(failure) => return Attempt::failed(&failure, answer, &parser),
            }
        }
        let head = parser.head().cloned().unwrap_or_default();
        let end = self.judge(request, timeline, &head, &mut answer);
        Attempt { end, answer, head }
    }

    /// Sends `bytes` and reads the answer until it is complete.
    async fn exchange(
        &self,
        mut stream: TcpStream,
        bytes: &[u8],
        class: Option<u32>,
        timeline: &mut Timeline,
        parser: &mut Parser,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        if timeline.sent == 0 {
            timeline.sent = monotonic_ns();
        }
        // A server may refuse a request before it has read it all. Then writing fails, and the
        // answer holds the reason.
        let written = stream.write_all(bytes).await;
        let progress = &self.shared.progress[self.index];
        while !parser.is_complete() {
            let look = |bytes: &[u8]| {
                let now = monotonic_ns();
                if bytes.is_empty() {
                    return parser.on_close();
                }
                let before = answer.events;
                parser.feed(bytes, |head, body| {
                    if head.event_stream {
                        answer.feed_stream(body);
                    } else {
                        answer.feed_body(body);
                    }
                })?;
                let events = answer.events - before;
                if events > 0 {
                    self.totals
                        .borrow_mut()
                        .on_events(timeline, events, now, class);
                    progress.events.fetch_add(events, Relaxed);
                }
                Ok(())
            };
            match self.pool.read(&mut stream, look).await {
                Ok(fed) => fed?,
                Err(read) => return Err(Failure::Io(written.err().unwrap_or(read))),
            }
        }
        if parser.head().is_some_and(|h| h.keep_alive) && written.is_ok() {
            self.pool.give(stream);
        }
        Ok(())
    }

    /// The outcome of a complete answer.
    fn judge(
        &self,
        request: &Request,
        timeline: &mut Timeline,
        head: &Head,
        answer: &mut Answer,
    ) -> End {
        let before = answer.events;
        if head.event_stream {
            answer.end_stream();
        } else {
            answer.end_body(head.status == 200);
        }
        // All tokens of a whole answer came at once, at its end.
        let mut no_gaps = slipstream_report::Latency::default();
        timeline.on_events(answer.events - before, monotonic_ns(), &mut no_gaps);
        let error = answer.error.clone();
        if head.status != 200 {
            let retry = head
                .retry_after_s
                .map_or(String::new(), |s| format!(" (retry after {s} s)"));
            let text = error.unwrap_or_default();
            return End::failed(format!("http {}", head.status), format!("{text}{retry}"));
        }
        if answer.too_long {
            return End::failed("answer too long", "more than 64 MiB in one line or body");
        }
        if let Some(error) = error {
            return End::failed("error in the answer", error);
        }
        if self.shared.template.stream() && !head.event_stream {
            return End::failed("not a stream", "the answer is not text/event-stream");
        }
        if !answer.done {
            return if head.event_stream {
                let seen = answer.events;
                End::failed("no [DONE]", format!("the stream ended after {seen} events"))
            } else {
                End::failed("not an answer", "the body has no `choices`")
            };
        }
        let usage = answer.usage.unwrap_or_default();
        if timeline.first == 0 {
            return End::failed("empty answer", "the answer has no text");
        }
        let said = |said: u32, meant: u64| if said > 0 { u64::from(said) } else { meant };
        End::Answered(Answered {
            timeline: *timeline,
            input_tokens: said(usage.prompt_tokens, u64::from(request.prompt.tokens())),
            output_tokens: said(usage.completion_tokens, answer.events),
            cached_tokens: usage.cached_tokens.map(u64::from),
            events: answer.events,
            streamed: head.event_stream,
            class: request.class,
        })
    }

    /// Records how a request ended, and reports it to the schedule.
    fn book(&self, request: &Request, timeline: &Timeline, attempt: Attempt, tries: u32) {
        let Attempt {
            end,
            mut answer,
            head,
        } = attempt;
        let now = monotonic_ns();
        let mut totals = self.totals.borrow_mut();
        totals.requests.retries += u64::from(tries);
        let mut schedule = self.schedule.borrow_mut();
        let mut answers = self.answers.borrow_mut();
        let progress = &self.shared.progress[self.index];
        match &end {
            End::Answered(answered) => {
                totals.on_answered(answered, &self.shared.config.slo);
                let tokens = saturate(answered.output_tokens);
                if schedule.on_done(request, tokens, SimTime(now.saturating_sub(self.start_ns))) {
                    answers
                        .entry(request.session)
                        .or_default()
                        .push(answer.take_text());
                } else {
                    answers.remove(&request.session);
                }
            }
            End::Failed { kind, example } => {
                let failed = Failed {
                    kind,
                    example,
                    class: request.class,
                };
                totals.on_failed(timeline, &failed, now, &self.shared.config.slo);
                schedule.on_failed(request);
                answers.remove(&request.session);
                progress.failed.fetch_add(1, Relaxed);
            }
        }
        progress.ended.fetch_add(1, Relaxed);
        progress.in_flight.store(schedule.in_flight(), Relaxed);
        if let Some(drag) = &self.shared.drag {
            let record = drag_record(request, timeline, &end, &answer, &head, tries);
            // A full disk ends the records, not the run. Locks in this order everywhere.
            let mut failure = self.shared.drag_failure.lock().expect(super::UNPOISONED);
            if failure.is_none() {
                *failure = drag.lock().expect(super::UNPOISONED).write(&record).err();
            }
        }
        self.ended.notify_one();
    }
}

impl Attempt {
    fn failed(failure: &Failure, answer: Answer, parser: &Parser) -> Attempt {
        Attempt {
            end: End::failed(failure.kind(), failure.to_string()),
            answer,
            head: parser.head().cloned().unwrap_or_default(),
        }
    }
}

/// A number of the server; the maximum if it is more.
fn saturate(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// The row of a request: the client's columns, and the server's if the answer had them.
fn drag_record(
    request: &Request,
    timeline: &Timeline,
    end: &End,
    answer: &Answer,
    head: &Head,
    tries: u32,
) -> DragRecord {
    let mut record = DragRecord {
        id: request.name(),
        retries: Some(tries),
        isl: Some(request.prompt.tokens()),
        ..DragRecord::default()
    };
    let header = head
        .trace
        .as_deref()
        .and_then(|t| serde_json::from_str(t).ok());
    if let Some(trace) = answer.trace.as_ref().or(header.as_ref()) {
        let number = |name: &str| trace.get(name).and_then(Value::as_u64);
        // Stages are in an object of their own, or next to the other fields.
        let stages = trace.get("stages").unwrap_or(trace);
        for stage in Stage::ALL {
            if let Some(ns) = stages.get(stage.name()).and_then(Value::as_u64) {
                record.times.note(stage, ns);
            }
        }
        record.worker = number("worker").and_then(|n| n.try_into().ok());
        record.preemptions = number("preemptions").map(saturate);
        if let Some(retries) = number("retries") {
            record.retries = Some(tries.saturating_add(saturate(retries)));
        }
        // One number is the device tier; an object names tiers.
        let hits = trace.get("hit_blocks");
        record.hit_blocks[0] = hits.and_then(Value::as_u64).map(saturate);
        for (slot, tier) in record.hit_blocks.iter_mut().zip(TIERS) {
            let in_tier = hits.and_then(|h| h.get(tier)).and_then(Value::as_u64);
            *slot = in_tier.map(saturate).or(*slot);
        }
    }
    record.times.note(Stage::Due, timeline.due);
    record.times.note(Stage::ClientRecv, timeline.first);
    record.times.note(Stage::LastClientRecv, timeline.last);
    match end {
        End::Answered(answered) => {
            record.isl = Some(saturate(answered.input_tokens));
            record.osl = Some(saturate(answered.output_tokens));
            "ok".clone_into(&mut record.status);
        }
        End::Failed { kind, .. } => record.status.clone_from(kind),
    }
    record
}
