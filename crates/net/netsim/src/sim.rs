//! Execution of a scenario: set-up, the run on one or more threads, and results.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slipstream_base::width::to_u32;
use slipstream_des::{Spin, WindowBarrier};

use crate::deadlock::{self, Deadlock};
use crate::error::Error;
use crate::fabric::{Mail, Tally};
use crate::flow::FlowResult;
use crate::layout::Builder;
use crate::link::serialization_ns;
use crate::net::{Net, Reroute};
use crate::result::{Collected, PortResult, RunResult};
use crate::scenario::Scenario;
use crate::series::Sampler;
use crate::shard::Shard;
use crate::step::{Place, Step};
use crate::transport::{Received, SendCount};

/// Interval of the deadlock search in runs with PFC, ns: long compared with events, short for
/// users.
const DEADLOCK_NS: u64 = 1_000_000;

/// How a run is executed. The result does not depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Execution {
    /// Maximum number of threads; never more than shards.
    pub threads: u32,
    /// Checks of the barrier before a thread parks.
    pub spin: Spin,
    /// Minimum events per window, on average, for which threads pay off; if windows have fewer, one
    /// thread runs them. 0: always `threads` threads.
    pub window_events_min: u64,
    /// Limit of the run's memory, bytes.
    pub memory_bytes_max: u64,
}

/// Windows between two counts of their events, on one thread. Few, as a busy network would run
/// faster on all threads.
const WINDOWS_ALONE: u64 = 16;
/// The same on several threads: starting threads costs about as much as a hundred barriers.
const WINDOWS_TOGETHER: u64 = 1_024;

impl Default for Execution {
    fn default() -> Self {
        Execution {
            threads: 1,
            spin: Spin::default(),
            window_events_min: 0,
            memory_bytes_max: u64::MAX,
        }
    }
}

/// A run that is ready to start.
pub struct Simulation {
    pub(crate) scenario: Scenario,
    pub(crate) net: Net,
    pub(crate) shards: Vec<Shard>,
    /// Sender and receiver of each flow.
    pub(crate) endpoints: Vec<(Step, Step)>,
    /// First data path of each flow.
    pub(crate) rows: Vec<u32>,
    /// Minimum time from an event in one shard to its effect in another, ns.
    pub(crate) lookahead_ns: u64,
    pub(crate) windows: u64,
    /// Whether windows have enough events for threads to pay off.
    pub(crate) crowded: bool,
    /// Maximum number of threads at a time so far.
    pub(crate) threads: u32,
    /// In order of time, and the number already applied.
    pub(crate) reroutes: Vec<Reroute>,
    pub(crate) rerouted: usize,
    pub(crate) sampler: Option<Sampler>,
    pub(crate) deadlock: Option<Deadlock>,
}

impl Simulation {
    /// Lays out ports and paths.
    ///
    /// # Errors
    /// If the scenario cannot run; see [`Error`].
    pub fn new(scenario: Scenario, execution: Execution) -> Result<Self, Error> {
        Builder::new(scenario, execution)?.build()
    }

    /// Number of shards: a property of the scenario, not of the machine.
    pub fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// Events run so far.
    pub fn events(&self) -> u64 {
        self.shards.iter().map(|s| s.events).sum()
    }

    /// Windows run so far; 0 in a run of one shard.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// Maximum number of threads at a time so far.
    pub fn threads(&self) -> u32 {
        self.threads
    }

    /// The scenario.
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Runs to the end of simulated time, or until no events are left. `progress` receives the
    /// simulated time, ns, and the events so far, about every `progress_ns` of simulated time.
    pub fn run(
        &mut self,
        execution: Execution,
        progress_ns: u64,
        progress: &mut (dyn FnMut(u64, u64) + Send),
    ) {
        self.run_while(execution, progress_ns, &mut |now, events| {
            progress(now, events);
            true
        });
    }

    /// [`run`](Self::run), until `progress` returns false. Then [`result`](Self::result) is that of the events so far.
    pub fn run_while(
        &mut self,
        execution: Execution,
        progress_ns: u64,
        progress: &mut (dyn FnMut(u64, u64) -> bool + Send),
    ) {
        let end = self.scenario.duration_ns.saturating_add(1);
        let mut report = Report {
            every_ns: progress_ns.max(1),
            next_ns: progress_ns.max(1),
            on_progress: progress,
            stopped: false,
        };
        // Stops are a property of the scenario: they divide the run at the same times on any number
        // of threads.
        let mut stop = 0;
        while self.deadlock.is_none() {
            let Some(next) = self.next_time() else {
                break;
            };
            if let Some(sampler) = &mut self.sampler {
                sampler.skip_to(next, &self.shards);
            }
            // This is the start of the next event's bucket, which may be before the last stop.
            stop = self.next_stop(next.max(stop)).min(end);
            self.run_until(stop, execution, &mut report);
            if report.stopped {
                break;
            }
            self.at_stop(stop);
            if stop == end {
                break;
            }
        }
        // The last, shorter interval.
        let now = self.now();
        if let Some(sampler) = &mut self.sampler
            && sampler.next_ns > now
            && now > sampler.next_ns.saturating_sub(sampler.series.interval_ns)
        {
            sampler.take(now, &self.shards, &self.net);
        }
        // Flows in a deadlock without timers leave no event behind.
        if !report.stopped {
            self.find_deadlock(self.now());
        }
    }

    /// The next time at which the whole network is sampled or changed; `next` is that of the next
    /// event.
    fn next_stop(&self, next: u64) -> u64 {
        let deadlock = if self.scenario.queue.pfc.is_some() {
            (next / DEADLOCK_NS + 1) * DEADLOCK_NS
        } else {
            u64::MAX
        };
        let reroute = self.reroutes.get(self.rerouted);
        let sample = self.sampler.as_ref().map_or(u64::MAX, |s| s.next_ns);
        deadlock
            .min(sample)
            .min(reroute.map_or(u64::MAX, |r| r.at_ns))
    }

    /// Handles a stop: all events before `now` have run.
    fn at_stop(&mut self, now: u64) {
        if now.is_multiple_of(DEADLOCK_NS) {
            self.find_deadlock(now);
        }
        if let Some(sampler) = &mut self.sampler
            && sampler.next_ns <= now
        {
            sampler.take(now, &self.shards, &self.net);
        }
        while let Some(reroute) = self.reroutes.get(self.rerouted)
            && reroute.at_ns <= now
        {
            let reroute = *reroute;
            self.rerouted += 1;
            self.reroute(&reroute);
        }
    }

    /// Runs the events of a network in one part up to `now`, which included, and the changes of paths before them.
    pub(crate) fn run_and_reroute(&mut self, now: u64) {
        while let Some(reroute) = self.reroutes.get(self.rerouted)
            && reroute.at_ns <= now
        {
            let reroute = *reroute;
            self.rerouted += 1;
            self.shards[0].run(&self.net, reroute.at_ns);
            self.reroute(&reroute);
        }
        self.shards[0].run(&self.net, now.saturating_add(1));
    }

    /// Moves a flow to other paths; packets in flight stay on the old ones.
    fn reroute(&mut self, reroute: &Reroute) {
        let (sender, receiver) = self.endpoints[reroute.flow as usize];
        let [data, answers] = reroute.rows;
        self.shards[sender.shard()].sender_mut(sender).reroute(data);
        self.shards[receiver.shard()]
            .receiver_mut(receiver)
            .reroute(answers);
    }

    fn find_deadlock(&mut self, now: u64) {
        // Pauses with a duration end every cycle, at the price of packets.
        let lasting = self.scenario.queue.pfc.is_some_and(|pfc| pfc.is_lasting());
        if lasting && self.deadlock.is_none() {
            self.deadlock = deadlock::find(&self.shards, &self.net, now);
        }
    }

    /// Time of the last event, ns.
    fn now(&self) -> u64 {
        self.shards.iter().map(|s| s.now).max().unwrap_or(0)
    }

    fn next_time(&self) -> Option<u64> {
        self.shards
            .iter()
            .filter_map(|s| s.fabric.wheel.next_bucket_start())
            .min()
    }

    /// Runs every event before `until`.
    fn run_until(&mut self, until: u64, execution: Execution, report: &mut Report) {
        if self.shards.len() == 1 {
            let shard = &mut self.shards[0];
            while let Some(next) = shard.fabric.wheel.next_bucket_start()
                && next < until
            {
                let stop = report.next_ns.max(next + 1).min(until);
                shard.run(&self.net, stop);
                report.at(stop, shard.events);
                // The rest of the last bucket is after `until`.
                if stop == until || report.stopped {
                    break;
                }
            }
        } else if execution.threads <= 1 {
            self.run_windows(until, u64::MAX, report);
        } else if execution.window_events_min == 0 {
            self.run_threads(until, u64::MAX, execution, report);
        } else {
            self.run_adaptive(until, execution, report);
        }
    }

    /// Uses several threads if windows have enough events, else one. It changes only between
    /// windows, whose limits do not depend on it, so the result is the same.
    fn run_adaptive(&mut self, until: u64, execution: Execution, report: &mut Report) {
        let mut more = true;
        while more {
            let (windows, events) = (self.windows, self.events());
            more = if self.crowded {
                self.run_threads(until, WINDOWS_TOGETHER, execution, report)
            } else {
                self.run_windows(until, WINDOWS_ALONE, report)
            };
            let (windows, events) = (self.windows - windows, self.events() - events);
            if let Some(held) = events.checked_div(windows) {
                self.crowded = held >= execution.window_events_min;
            }
        }
    }

    /// Runs on one thread, shard by shard in each window, so that a shard's data stays in the
    /// cache. Ends after `windows_max` windows; returns whether there are more before `until`.
    fn run_windows(&mut self, until: u64, windows_max: u64, report: &mut Report) -> bool {
        let shards = self.shards.len();
        let width = self.shards[0].fabric.wheel.bucket_ns();
        let mut next = self.next_time().unwrap_or(u64::MAX);
        let last = self.windows.saturating_add(windows_max);
        while next < until {
            if self.windows == last {
                return true;
            }
            let end = window_end(next, self.lookahead_ns, width).min(until);
            next = u64::MAX;
            for shard in &mut self.shards {
                shard.run(&self.net, end);
                next = next.min(shard.next_time());
            }
            for from in 0..shards {
                if self.shards[from].fabric.mail_first == u64::MAX {
                    continue;
                }
                self.shards[from].fabric.mail_first = u64::MAX;
                for to in 0..shards {
                    if !self.shards[from].fabric.mail[to].is_empty() {
                        let mut mail = std::mem::take(&mut self.shards[from].fabric.mail[to]);
                        self.shards[to].fabric.receive(&mut mail);
                        self.shards[from].fabric.mail[to] = mail;
                    }
                }
            }
            self.windows += 1;
            if end >= report.next_ns {
                report.at(end, self.events());
            }
            if end == until || report.stopped {
                break;
            }
        }
        false
    }

    /// Runs on several threads: each takes its own shards first, then those that no thread has
    /// started.
    ///
    /// Windows and the order in which mail is read are those of [`Simulation::run_windows`], so the
    /// result is the same. Ends after `windows_max` windows; returns whether there are more before
    /// `until`.
    fn run_threads(
        &mut self,
        until: u64,
        windows_max: u64,
        execution: Execution,
        report: &mut Report,
    ) -> bool {
        let first = self.next_time().unwrap_or(u64::MAX);
        if first >= until {
            return false;
        }
        let count = self.shards.len();
        let threads = (execution.threads as usize).min(count);
        self.threads = self.threads.max(to_u32(threads));
        let events = self.events();
        let shared = RunThreads {
            net: &self.net,
            width: self.shards[0].fabric.wheel.bucket_ns(),
            lookahead_ns: self.lookahead_ns,
            until,
            windows_max,
            more: AtomicBool::new(false),
            threads,
            words: count.div_ceil(64),
            shards: std::mem::take(&mut self.shards)
                .into_iter()
                .map(Mutex::new)
                .collect(),
            boxes: [0, 1].map(|_| (0..count * count).map(|_| Mutex::default()).collect()),
            pending: [0, 1].map(|_| {
                (0..count * count.div_ceil(64))
                    .map(|_| AtomicU64::new(0))
                    .collect()
            }),
            claims: (0..count).map(|_| AtomicU64::new(0)).collect(),
            earliest: (0..threads).map(|_| AtomicU64::new(u64::MAX)).collect(),
            events: AtomicU64::new(events),
            end: AtomicU64::new(0),
            windows: AtomicU64::new(0),
            barrier: WindowBarrier::new(to_u32(threads), execution.spin),
        };
        shared
            .end
            .store(shared.window_end(first), Ordering::Relaxed);
        let report = Mutex::new(report);
        #[expect(
            clippy::disallowed_methods,
            reason = "threads of one run, without a clock"
        )]
        std::thread::scope(|scope| {
            for thread in 1..threads {
                let (shared, report) = (&shared, &report);
                scope.spawn(move || shared.work(thread, report));
            }
            shared.work(0, &report);
        });
        self.windows += shared.windows.into_inner();
        self.shards = shared
            .shards
            .into_iter()
            .map(|s| s.into_inner().expect("no thread panicked"))
            .collect();
        // Mail of the last window: its readers have not run again.
        for boxes in &shared.boxes {
            for from in 0..count {
                for to in 0..count {
                    let mut mail = boxes[from * count + to].lock().expect("no thread panicked");
                    self.shards[to].fabric.receive(&mut mail);
                }
            }
        }
        shared.more.into_inner()
    }

    /// The result so far.
    ///
    /// # Panics
    /// If a conservation law does not hold ([`RunResult::broken_law`]): a bug of this crate.
    pub fn result(&self) -> RunResult {
        let mut tally = Tally::default();
        for shard in &self.shards {
            tally.add(&shard.fabric.tally);
        }
        let flows: Vec<FlowResult> = (0..self.scenario.flows.len())
            .map(|i| self.flow_result(i))
            .collect();
        let mut ports: Vec<PortResult> = self
            .shards
            .iter()
            .flat_map(|s| s.fabric.port_results())
            .collect();
        ports.sort_unstable_by_key(|p| p.port);
        let mut memories: Vec<_> = self
            .shards
            .iter()
            .flat_map(|s| s.fabric.memory_results())
            .collect();
        memories.sort_unstable_by_key(|m| m.node);
        let (ideal_ns, path_ns) = (0..self.scenario.flows.len())
            .map(|i| self.ideal(i))
            .unzip();
        let result = RunResult::new(Collected {
            tally,
            events: self.events(),
            last_event_ns: self.now(),
            flows,
            ports,
            memories,
            deadlock: self.deadlock.clone(),
            series: self.sampler.as_ref().map(|s| s.series.clone()),
            ideal_ns,
            path_ns,
        });
        // Contradictory results must not leave this crate.
        if let Some(law) = result.broken_law() {
            panic!("a conservation law does not hold: {law}");
        }
        if self.next_time().is_none() {
            let held = self.shards.iter().map(|s| s.fabric.packets_waiting());
            let held: u64 = held.sum();
            assert_eq!(
                result.in_flight(),
                held,
                "packets that are neither in an event, queued, delivered nor dropped"
            );
        }
        result
    }

    /// The completion time of a flow alone on its path at line rate, and the time of one full
    /// packet.
    ///
    /// The flow has full packets and a shorter last one, each stored and forwarded. The last packet
    /// waits behind the others up to one of the links, the bottleneck, and crosses that and all
    /// later ones in its own time. The maximum over all links is the result.
    fn ideal(&self, index: usize) -> (u64, u64) {
        let flow = &self.scenario.flows[index];
        let bytes = flow.demand.bytes().unwrap_or(0);
        let (full, header) = (u64::from(flow.packet_bytes), u64::from(flow.header_bytes));
        let packets = bytes.div_ceil(full.max(1)).max(1);
        let last_size = bytes.max(1) - (packets - 1) * full + header;
        let row = self.rows[index] as usize * self.net.stride;
        let (mut delay, mut packet, mut slowest, mut ideal) = (0, 0, 0, 0u64);
        for step in &self.net.steps[row..row + self.net.stride] {
            let Some(class) = self.class_of(*step) else {
                break;
            };
            let link = self.net.classes[class as usize];
            let full = serialization_ns(full + header, link.bits_per_s);
            let last = serialization_ns(last_size, link.bits_per_s);
            delay += link.delay_ns;
            packet += full;
            slowest = full.max(slowest);
            let behind = match packets {
                1 => 0,
                _ => (packets - 2).saturating_mul(slowest).saturating_add(packet),
            };
            ideal = ideal.max(behind).saturating_add(last);
        }
        (ideal.saturating_add(delay), packet + delay)
    }

    #[cfg(test)]
    pub(crate) fn first_tcp_flow(
        &self,
    ) -> (
        &crate::transport::tcp::TcpSender,
        &crate::transport::tcp::TcpReceiver,
    ) {
        let shard = &self.shards[0];
        (&shard.tcp_senders[0], &shard.tcp_receivers[0])
    }

    fn class_of(&self, step: Step) -> Option<u8> {
        match step.place() {
            Place::Fifo => Some(self.shards[step.shard()].fabric.ports[step.index()].class()),
            Place::Scheduled => {
                Some(self.shards[step.shard()].fabric.scheduled[step.index()].link_class())
            }
            Place::Trim => Some(self.shards[step.shard()].fabric.trim_ports[step.index()].class()),
            _ => None,
        }
    }

    fn flow_result(&self, index: usize) -> FlowResult {
        let spec = &self.scenario.flows[index];
        let (sender, receiver) = self.endpoints[index];
        let mut result = FlowResult {
            id: spec.id,
            src: spec.src,
            dst: spec.dst,
            ..FlowResult::default()
        };
        let waiting = self.shards[sender.shard()].waiting.get(&sender.0);
        let from = self.shards[sender.shard()].sender(sender);
        let to = self.shards[receiver.shard()].receiver(receiver);
        from.report(&mut result);
        result.bytes_in_order = to.in_order();
        report_counts(&mut result, from.count(), to.received());
        // At time 0, flows without dependencies start, and those whose predecessors end at once.
        result.started =
            result.start_ns > 0 || waiting.map_or(spec.start_ns == 0, |&waiting| waiting == (0, 0));
        result
    }
}

/// Copies the counters that every transport has at both ends of a flow.
fn report_counts(result: &mut FlowResult, sent: &SendCount, got: &Received) {
    result.packets_sent = sent.packets;
    result.bytes_sent = sent.bytes;
    result.retransmitted = sent.retransmitted;
    result.acks = sent.acks;
    result.fast_retransmits = sent.fast_retransmits;
    result.timeouts = sent.timeouts;
    result.delivered_ns = (got.done_at != 0).then_some(got.done_at);
    result.packets_received = got.packets;
    result.bytes_received = got.bytes;
    result.first_ns = got.first;
    result.last_ns = got.last;
    if got.packets > 0 && got.packets == sent.packets {
        let sum = got.time_sum.wrapping_sub(sent.time_sum);
        result.one_way_delay_ns_mean = Some(sum as f64 / got.packets as f64);
    }
}

/// The callback for progress, and its next time.
struct Report<'a> {
    every_ns: u64,
    next_ns: u64,
    on_progress: &'a mut (dyn FnMut(u64, u64) -> bool + Send),
    /// Whether the callback has ended the run.
    stopped: bool,
}

impl Report<'_> {
    fn at(&mut self, now: u64, events: u64) {
        if now >= self.next_ns {
            self.stopped |= !(self.on_progress)(now, events);
            self.next_ns = now.saturating_add(self.every_ns);
        }
    }
}

/// State that the threads of a run share.
struct RunThreads<'a> {
    net: &'a Net,
    width: u64,
    lookahead_ns: u64,
    until: u64,
    /// Maximum number of windows, and whether there would have been more.
    windows_max: u64,
    more: AtomicBool,
    threads: usize,
    /// 64-bit words in a set of shards.
    words: usize,
    shards: Vec<Mutex<Shard>>,
    /// Mail from shard a to shard b at `a * shards + b`, by parity of the window that wrote it.
    boxes: [Vec<Mutex<Mail>>; 2],
    /// By parity and reader: the set of shards that wrote to it.
    pending: [Vec<AtomicU64>; 2],
    /// The last window in which a thread took the shard.
    claims: Vec<AtomicU64>,
    /// By thread: the earliest event left in its shards, and its earliest mail.
    earliest: Vec<AtomicU64>,
    events: AtomicU64,
    /// End of the window; 0: no further window.
    end: AtomicU64,
    windows: AtomicU64,
    barrier: WindowBarrier,
}

impl RunThreads<'_> {
    fn window_end(&self, from: u64) -> u64 {
        window_end(from, self.lookahead_ns, self.width).min(self.until)
    }

    fn work(&self, thread: usize, report: &Mutex<&mut Report>) {
        let count = self.shards.len();
        let own = thread * count / self.threads;
        let mut window = 0;
        loop {
            let end = self.end.load(Ordering::Acquire);
            if end == 0 {
                break;
            }
            window += 1;
            let (mut next, mut events) = (u64::MAX, 0);
            // Own shards first, as they are in this core's cache. Then those of the others, as a
            // thread may have lost its core.
            for i in 0..count {
                let at = (own + i) % count;
                if self.claim(at, window) {
                    let mut shard = self.shards[at].lock().expect("no thread panicked");
                    let before = shard.events;
                    next = next.min(self.run_shard(&mut shard, at, window, end));
                    events += shard.events - before;
                }
            }
            self.earliest[thread].store(next, Ordering::Release);
            self.events.fetch_add(events, Ordering::Relaxed);
            self.barrier.meet(|| {
                // Runs on the last thread to arrive, while the others wait.
                let next = self.earliest.iter().map(|e| e.load(Ordering::Acquire));
                let next = next.min().unwrap_or(u64::MAX);
                let mut report = report.lock().expect("no thread panicked");
                report.at(end, self.events.load(Ordering::Relaxed));
                let more = next < self.until && end < self.until && !report.stopped;
                let windows = self.windows.fetch_add(1, Ordering::Relaxed) + 1;
                let continues = more && windows < self.windows_max;
                self.more.store(more, Ordering::Relaxed);
                self.end.store(
                    if continues { self.window_end(next) } else { 0 },
                    Ordering::Release,
                );
            });
        }
    }

    fn claim(&self, shard: usize, window: u64) -> bool {
        let claim = &self.claims[shard];
        // A plain load first, as most claims of other threads' shards fail.
        claim.load(Ordering::Relaxed) == window - 1
            && claim
                .compare_exchange(window - 1, window, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    /// Reads the last window's mail, runs the shard, and sends its mail. Returns its earliest
    /// pending time.
    fn run_shard(&self, shard: &mut Shard, at: usize, window: u64, end: u64) -> u64 {
        let count = self.shards.len();
        let now = (window & 1) as usize;
        for word in 0..self.words {
            let mut from = self.pending[1 - now][at * self.words + word].swap(0, Ordering::AcqRel);
            while from != 0 {
                let sender = word * 64 + from.trailing_zeros() as usize;
                from &= from - 1;
                let mut mail = self.boxes[1 - now][sender * count + at]
                    .lock()
                    .expect("no thread panicked");
                shard.fabric.receive(&mut mail);
            }
        }
        shard.run(self.net, end);
        let next = shard.next_time();
        if shard.fabric.mail_first != u64::MAX {
            shard.fabric.mail_first = u64::MAX;
            for to in 0..count {
                if !shard.fabric.mail[to].is_empty() {
                    let mut mail = self.boxes[now][at * count + to]
                        .lock()
                        .expect("no thread panicked");
                    std::mem::swap(&mut *mail, &mut shard.fabric.mail[to]);
                    self.pending[now][to * self.words + at / 64]
                        .fetch_or(1 << (at % 64), Ordering::AcqRel);
                }
            }
        }
        next
    }
}

/// The end of a window that begins in the bucket of `from`. Windows are whole buckets, so that mail
/// never arrives for a bucket that has partly run.
fn window_end(from: u64, lookahead: u64, width: u64) -> u64 {
    let from = from / width * width;
    from.saturating_add((lookahead / width * width).max(width))
}
