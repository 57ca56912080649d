//! From a scenario to shards, through the run, to results.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use slipstream_base::mix;
use slipstream_des::{Spin, Wheel, WindowBarrier};

use crate::aqm::Aqm;
use crate::error::Error;
use crate::event::{Event, HOPS_MAX, Kind, SIZE_MAX};
use crate::fabric::{Fabric, Port, PortSpec, Rings, Tally, UNLIMITED};
use crate::net::{INDEX_MAX, LinkClass, Net, Place, SHARDS_MAX, Step, serialization_ns};
use crate::result::{FlowResult, PortResult, RunResult};
use crate::route::{Router, Routing};
use crate::scenario::{
    Arrivals, Congestion, Demand, Dist, Finished, Flow, Link, Paths, Scenario, Transport,
};
use crate::scheduled::{Discipline, Scheduled};
use crate::shard::Shard;
use crate::topology::{PortId, Tier};
use crate::transport::Paced;
use crate::transport::control::{Control, Cubic, Dctcp, NewReno};
use crate::transport::raw::{RawReceiver, RawSender};
use crate::transport::tcp::{TcpReceiver, TcpSender, TcpSetup};

/// Events that a window must hold per shard on average before shards pay; below, one shard's
/// single queue is faster than many nearly empty ones. Chosen by `make bench-net`: f32 has 1 event
/// a window in all, E5 has thousands.
const EVENTS_PER_SHARD_WINDOW: f64 = 16.0;

/// How a run is executed; none of it changes the result.
#[derive(Clone, Copy, Debug)]
pub struct Execution {
    /// Threads; more than the run has shards are not started.
    pub threads: u32,
    /// Looks at the barrier before a thread parks.
    pub spin: Spin,
    /// Memory that the run may use, bytes.
    pub memory_bytes_max: u64,
}

impl Default for Execution {
    fn default() -> Self {
        Execution {
            threads: 1,
            spin: Spin::default(),
            memory_bytes_max: u64::MAX,
        }
    }
}

/// A run that is ready to start.
pub struct Simulation {
    scenario: Scenario,
    net: Net,
    shards: Vec<Shard>,
    /// Sender and receiver of each flow.
    endpoints: Vec<(Step, Step)>,
    /// First data path of each flow.
    rows: Vec<u32>,
    /// Least time that an event in one shard takes to cause one in another, ns.
    lookahead_ns: u64,
    windows: u64,
}

impl Simulation {
    /// Lays out ports and paths.
    ///
    /// # Errors
    /// If the scenario cannot run; see [`Error`].
    pub fn new(scenario: Scenario, execution: Execution) -> Result<Self, Error> {
        Builder::new(scenario, execution)?.build()
    }

    /// Shards that the run is split into: a property of the scenario, not of the machine.
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

    /// The scenario.
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Runs to the end of simulated time, or until nothing is left to do. `progress` hears the
    /// simulated time, ns, and the events so far, about every `progress_ns` of simulated time.
    pub fn run(
        &mut self,
        execution: Execution,
        progress_ns: u64,
        progress: &mut (dyn FnMut(u64, u64) + Send),
    ) {
        let end = self.scenario.duration_ns.saturating_add(1);
        let mut report = Report {
            every_ns: progress_ns.max(1),
            next_ns: progress_ns.max(1),
            hear: progress,
        };
        self.run_until(end, execution, &mut report);
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
                // What is left of the last bucket lies beyond `until`.
                if stop == until {
                    break;
                }
            }
        } else if execution.threads <= 1 {
            self.run_windows(until, report);
        } else {
            self.run_threads(until, execution, report);
        }
    }

    /// One thread, shard after shard in each window: what a shard touches stays in the cache.
    fn run_windows(&mut self, until: u64, report: &mut Report) {
        let shards = self.shards.len();
        let width = self.shards[0].fabric.wheel.bucket_ns();
        let mut next = self.next_time().unwrap_or(u64::MAX);
        while next < until {
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
            if end == until {
                break;
            }
        }
    }

    /// Several threads: each takes its own shards first, then whatever nobody has begun.
    ///
    /// Windows and the order in which mail is read are those of [`Simulation::run_windows`], so
    /// the result is the same.
    fn run_threads(&mut self, until: u64, execution: Execution, report: &mut Report) {
        let first = self.next_time().unwrap_or(u64::MAX);
        if first >= until {
            return;
        }
        let count = self.shards.len();
        let threads = (execution.threads as usize).min(count);
        let crew = Crew {
            net: &self.net,
            width: self.shards[0].fabric.wheel.bucket_ns(),
            lookahead_ns: self.lookahead_ns,
            until,
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
            events: AtomicU64::new(0),
            end: AtomicU64::new(0),
            windows: AtomicU64::new(0),
            barrier: WindowBarrier::new(threads as u32, execution.spin),
        };
        crew.end.store(crew.window_end(first), Ordering::Relaxed);
        let report = Mutex::new(report);
        std::thread::scope(|scope| {
            for thread in 1..threads {
                let (crew, report) = (&crew, &report);
                scope.spawn(move || crew.work(thread, report));
            }
            crew.work(0, &report);
        });
        self.windows += crew.windows.into_inner();
        self.shards = crew
            .shards
            .into_iter()
            .map(|s| s.into_inner().expect("no thread panicked"))
            .collect();
        // Mail of the last window: its readers have not run again.
        for boxes in &crew.boxes {
            for from in 0..count {
                for to in 0..count {
                    let mut mail = boxes[from * count + to].lock().expect("no thread panicked");
                    self.shards[to].fabric.receive(&mut mail);
                }
            }
        }
    }

    /// What came of it.
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
        RunResult::new(
            tally,
            self.events(),
            self.shards.iter().map(|s| s.now).max().unwrap_or(0),
            flows,
            ports,
            (0..self.scenario.flows.len())
                .map(|i| self.ideal(i))
                .unzip(),
        )
    }

    /// Time of a flow alone on its path with its data sent at line rate, and of one full packet.
    fn ideal(&self, index: usize) -> (u64, u64) {
        let flow = &self.scenario.flows[index];
        let bytes = flow.demand.bytes().unwrap_or(0);
        let (full, header) = (u64::from(flow.packet_bytes), u64::from(flow.header_bytes));
        let first_size = full.min(bytes.max(1)) + header;
        let row = self.rows[index] as usize * self.net.stride;
        let (mut first, mut packet, mut slowest) = (0, 0, 0);
        for step in &self.net.steps[row..row + self.net.stride] {
            let Some(class) = self.class_of(*step) else {
                break;
            };
            let link = self.net.classes[class as usize];
            first += serialization_ns(first_size, link.bits_per_s) + link.delay_ns;
            packet += serialization_ns(full + header, link.bits_per_s) + link.delay_ns;
            // The packets after the first follow at the pace of the slowest link.
            let packets = bytes.div_ceil(full.max(1)).max(1);
            let rest = (bytes + packets * header).saturating_sub(first_size);
            slowest = slowest.max(serialization_ns(rest, link.bits_per_s));
        }
        (first + slowest, packet)
    }

    fn class_of(&self, step: Step) -> Option<u8> {
        match step.place() {
            Place::Fifo => Some(self.shards[step.shard()].fabric.ports[step.index()].class()),
            Place::Scheduled => {
                Some(self.shards[step.shard()].fabric.scheduled[step.index()].link_class())
            }
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
        match sender.place() {
            Place::TcpSender => {
                let s = &self.shards[sender.shard()].tcp_senders[sender.index()];
                let r = &self.shards[receiver.shard()].tcp_receivers[receiver.index()];
                result.start_ns = s.start;
                result.acked_ns = s.is_done().then_some(s.end);
                result.delivered_ns = (r.done_at != 0).then_some(r.done_at);
                result.bytes = s.offered();
                result.bytes_acked = s.acked();
                result.packets_sent = s.count.packets;
                result.bytes_sent = s.count.bytes;
                result.retransmitted = s.count.retransmitted;
                result.acks = s.count.acks;
                result.fast_retransmits = s.count.fast_retransmits;
                result.timeouts = s.count.timeouts;
                result.cwnd = s.w.cwnd;
                result.ssthresh = s.w.ssthresh;
                result.packets_received = r.packets;
                result.bytes_received = r.bytes;
                result.bytes_in_order = r.in_order();
                result.first_ns = r.first;
                result.last_ns = r.last;
                if r.packets > 0 && r.packets == s.count.packets {
                    let sum = r.time_sum.wrapping_sub(s.count.time_sum);
                    result.one_way_delay_ns_mean = Some(sum as f64 / r.packets as f64);
                }
            }
            Place::RawSender => {
                let s = &self.shards[sender.shard()].raw_senders[sender.index()];
                let r = &self.shards[receiver.shard()].raw_receivers[receiver.index()];
                result.start_ns = s.start;
                result.delivered_ns = (r.done_at != 0).then_some(r.done_at);
                result.bytes = s.count.bytes;
                result.packets_sent = s.count.packets;
                result.bytes_sent = s.count.bytes;
                result.packets_received = r.packets;
                result.bytes_received = r.bytes;
                result.bytes_in_order = r.bytes;
                result.first_ns = r.first;
                result.last_ns = r.last;
                if r.packets > 0 && r.packets == s.count.packets {
                    let sum = r.time_sum.wrapping_sub(s.count.time_sum);
                    result.one_way_delay_ns_mean = Some(sum as f64 / r.packets as f64);
                }
            }
            place => unreachable!("{place:?} sends no flow"),
        }
        result
    }
}

/// Who hears of progress, and when next.
struct Report<'a> {
    every_ns: u64,
    next_ns: u64,
    hear: &'a mut (dyn FnMut(u64, u64) + Send),
}

impl Report<'_> {
    fn at(&mut self, now: u64, events: u64) {
        if now >= self.next_ns {
            (self.hear)(now, events);
            self.next_ns = now.saturating_add(self.every_ns);
        }
    }
}

/// A box of mail: events with their times.
type MailBox = Mutex<Vec<(u64, Event)>>;

/// What the threads of a run share.
struct Crew<'a> {
    net: &'a Net,
    width: u64,
    lookahead_ns: u64,
    until: u64,
    threads: usize,
    /// 64-bit words in a set of shards.
    words: usize,
    shards: Vec<Mutex<Shard>>,
    /// Mail from shard a to shard b at `a * shards + b`, by parity of the window that wrote it.
    boxes: [Vec<MailBox>; 2],
    /// By parity and reader: the set of shards that wrote to it.
    pending: [Vec<AtomicU64>; 2],
    /// The last window in which somebody took the shard.
    claims: Vec<AtomicU64>,
    /// By thread: the earliest event left in its shards, and its earliest mail.
    earliest: Vec<AtomicU64>,
    events: AtomicU64,
    /// End of the window; 0: no further window.
    end: AtomicU64,
    windows: AtomicU64,
    barrier: WindowBarrier,
}

impl Crew<'_> {
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
            // Own shards first: they are in this core's cache. Then the others', for a thread may
            // have lost its core.
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
                let next = self.earliest.iter().map(|e| e.load(Ordering::Acquire));
                let next = next.min().unwrap_or(u64::MAX);
                let more = next < self.until && end < self.until;
                self.end.store(
                    if more { self.window_end(next) } else { 0 },
                    Ordering::Release,
                );
                self.windows.fetch_add(1, Ordering::Relaxed);
                report
                    .lock()
                    .expect("no thread panicked")
                    .at(end, self.events.load(Ordering::Relaxed));
            });
        }
    }

    fn claim(&self, shard: usize, window: u64) -> bool {
        let claim = &self.claims[shard];
        claim.load(Ordering::Relaxed) == window - 1
            && claim
                .compare_exchange(window - 1, window, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    /// Reads the last window's mail, runs the shard, and sends what it wrote. Returns the earliest
    /// time that it knows of.
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

/// The end of a window that begins in the bucket of `from`: whole buckets, so that no bucket is
/// half run when mail for it arrives.
fn window_end(from: u64, lookahead: u64, width: u64) -> u64 {
    let from = from / width * width;
    from.saturating_add((lookahead / width * width).max(width))
}

struct Builder {
    scenario: Scenario,
    execution: Execution,
    shards: u32,
    lookahead_ns: u64,
    net: Net,
    fabrics: Vec<Fabric>,
    /// Place of each port plus one; 0: not made yet.
    port_steps: Vec<u32>,
}

impl Builder {
    fn new(scenario: Scenario, execution: Execution) -> Result<Self, Error> {
        check_values(&scenario)?;
        let links = &scenario.links;
        let classes: Vec<LinkClass> = [links.host.unwrap_or(links.edge), links.edge, links.core]
            .iter()
            .map(|l| LinkClass {
                bits_per_s: l.bits_per_s,
                delay_ns: l.delay_ns,
            })
            .collect();
        let largest = |f: &Flow| f.packet_bytes + f.header_bytes;
        let size_max = scenario
            .flows
            .iter()
            .map(|f| largest(f).max(f.ack_bytes))
            .max()
            .unwrap_or(0)
            .max(64);
        let size_min = scenario
            .flows
            .iter()
            .map(|f| (f.header_bytes + 1).min(f.ack_bytes))
            .min()
            .unwrap_or(64);
        let ack_min = scenario.flows.iter().map(|f| f.ack_bytes).min();
        let hop = |l: &LinkClass, bytes: u32| {
            l.delay_ns + serialization_ns(u64::from(bytes), l.bits_per_s)
        };
        let used = usize::from(links.host.is_none());
        let usual = ack_min.unwrap_or(64);
        let hop_min = classes[used..].iter().map(|l| hop(l, usual)).min();
        let between = match scenario.topology.tier_between_parts() {
            Tier::Core => hop(&classes[2], size_min),
            Tier::Edge | Tier::Host => hop(&classes[1], size_min),
        };
        let shards = shard_count(&scenario, between);
        // Buckets narrower than every usual hop (an odd shorter one costs a heap insertion), but
        // not so narrow that most are empty; 256 ns was the best of 64 to 512 on E5.
        let wide = if scenario_density(&scenario) > 0.05 {
            8
        } else {
            12
        };
        let mut shift = hop_min.unwrap_or(1).max(1).ilog2().min(wide);
        if shards > 1 {
            // A window is at least one bucket and must not exceed the lookahead.
            shift = shift.min(between.max(1).ilog2());
        }
        let discipline = scenario.queue.discipline.clone();
        let net = Net::new(1, size_max, classes, discipline);
        let fabrics = (0..shards)
            .map(|shard| Fabric {
                shard: shard as usize,
                wheel: Wheel::new(shift),
                ports: Vec::new(),
                port_ids: Vec::new(),
                scheduled: Vec::new(),
                scheduled_ids: Vec::new(),
                rings: Rings::default(),
                aqms: vec![Aqm::TailDrop, scenario.queue.aqm],
                loss: scenario.queue.loss,
                mail: vec![Vec::new(); shards as usize],
                mail_first: u64::MAX,
                tally: Tally::default(),
                seed: mix::draw(scenario.seed, 0x706f_7274),
            })
            .collect();
        Ok(Builder {
            port_steps: vec![0; scenario.topology.port_count() as usize],
            scenario,
            execution,
            shards,
            lookahead_ns: between,
            net,
            fabrics,
        })
    }

    fn build(mut self) -> Result<Simulation, Error> {
        let flows = std::mem::take(&mut self.scenario.flows);
        check_dependencies(&flows)?;
        let mut shards: Vec<Shard> = Vec::new();
        let mut endpoints = Vec::with_capacity(flows.len());
        // Endpoints made so far, by shard and sort.
        let mut counts: HashMap<(u32, u8), usize> = HashMap::new();
        let next = |counts: &mut HashMap<_, usize>, shard, place| {
            let count = counts.entry((shard, place as u8)).or_default();
            *count += 1;
            *count - 1
        };
        for flow in &flows {
            let from = self.shard_of_host(flow.src);
            let to = self.shard_of_host(flow.dst);
            let (sends, receives) = match flow.transport {
                Transport::Tcp(_) => (Place::TcpSender, Place::TcpReceiver),
                Transport::Packets => (Place::RawSender, Place::RawReceiver),
            };
            let (s, r) = (
                next(&mut counts, from, sends),
                next(&mut counts, to, receives),
            );
            if s.max(r) >= INDEX_MAX {
                return Err(Error::Value(format!(
                    "more than {INDEX_MAX} flows in one part of the network; use fewer flows"
                )));
            }
            endpoints.push((Step::new(from, sends, s), Step::new(to, receives, r)));
        }
        let rows = self.lay_paths(&flows, &endpoints)?;
        for fabric in std::mem::take(&mut self.fabrics) {
            shards.push(Shard {
                fabric,
                tcp_senders: Vec::new(),
                tcp_receivers: Vec::new(),
                raw_senders: Vec::new(),
                raw_receivers: Vec::new(),
                successors: HashMap::new(),
                waiting: HashMap::new(),
                now: 0,
                events: 0,
            });
        }
        for (i, flow) in flows.iter().enumerate() {
            let (sender, receiver) = endpoints[i];
            let [data, ack] = rows[i];
            add_endpoints(
                &mut shards,
                &self.scenario,
                i as u32,
                flow,
                (sender, receiver),
                data,
                ack,
            );
            let shard = &mut shards[sender.shard()];
            if flow.after.is_empty() {
                shard
                    .fabric
                    .schedule(flow.start_ns, Kind::Start, sender.0, 0);
            } else {
                shard
                    .waiting
                    .insert(sender.0, (flow.after.len() as u32, flow.start_ns));
                for after in &flow.after {
                    shard
                        .successors
                        .entry((after.flow, after.until))
                        .or_default()
                        .push((sender, after.delay_ns));
                }
            }
        }
        self.scenario.flows = flows;
        Ok(Simulation {
            scenario: self.scenario,
            net: self.net,
            shards,
            endpoints,
            rows: rows.iter().map(|pair| pair[0].first).collect(),
            lookahead_ns: self.lookahead_ns,
            windows: 0,
        })
    }

    fn shard_of_host(&self, host: u32) -> u32 {
        if self.shards == 1 {
            0
        } else {
            self.scenario.topology.part_of_host(host) % self.shards
        }
    }

    /// Finds the paths of every flow, makes the ports on them, and fills the path table.
    fn lay_paths(
        &mut self,
        flows: &[Flow],
        endpoints: &[(Step, Step)],
    ) -> Result<Vec<[Rows; 2]>, Error> {
        let topology = self.scenario.topology.clone();
        let none = BTreeSet::new();
        let mut router = Router::new(&topology, &none, self.scenario.links.host.is_some());
        // Ports of all rows, one after the other, until the longest path is known.
        let mut ports: Vec<PortId> = Vec::with_capacity(flows.len() * 12);
        let mut ends: Vec<u32> = Vec::with_capacity(flows.len() * 2);
        let mut path = Vec::new();
        let mut rows = Vec::with_capacity(flows.len());
        let mut longest = 0;
        for flow in flows {
            let mut pair = [Rows::default(); 2];
            for (direction, rows) in pair.iter_mut().enumerate() {
                let (src, dst) = if direction == 0 {
                    (flow.src, flow.dst)
                } else {
                    (flow.dst, flow.src)
                };
                rows.first = ends.len() as u32;
                match &flow.paths {
                    Paths::By(routing) => {
                        let hash = mix::draw(
                            self.scenario.seed ^ mix::mix64(flow.id),
                            u64::from(src) << 32 | u64::from(dst),
                        );
                        rows.count = match routing {
                            Routing::Spray => self.scenario.spray_paths,
                            _ => 1,
                        };
                        for index in 0..rows.count {
                            router
                                .path(src, dst, *routing, hash, index, &mut path)
                                .ok_or_else(|| disconnected(flow))?;
                            ports.extend_from_slice(&path);
                            ends.push(ports.len() as u32);
                            longest = longest.max(path.len());
                        }
                    }
                    Paths::Explicit(nodes) => {
                        rows.count = 1;
                        let nodes = explicit(flow, nodes, direction == 1, &topology)?;
                        router
                            .ports(src, dst, &nodes, &mut path)
                            .map_err(|(a, b)| Error::Flow {
                                flow: flow.id,
                                what: format!(
                                    "its path goes from node {a} to node {b}, which no link joins; \
                                     add the edge or correct the path"
                                ),
                            })?;
                        ports.extend_from_slice(&path);
                        ends.push(ports.len() as u32);
                        longest = longest.max(path.len());
                    }
                }
                if path.is_empty() {
                    return Err(Error::Flow {
                        flow: flow.id,
                        what: format!(
                            "hosts {src} and {dst} share a switch and host links are not modeled, \
                             so its packets would cross no link; model host links"
                        ),
                    });
                }
                if longest > HOPS_MAX {
                    return Err(Error::Flow {
                        flow: flow.id,
                        what: format!(
                            "its path has {longest} links; at most {HOPS_MAX} are supported"
                        ),
                    });
                }
            }
            rows.push(pair);
        }
        self.net.stride = longest + 1;
        self.check_memory(flows.len(), ends.len())?;
        self.net.steps = Vec::with_capacity(ends.len() * self.net.stride);
        let mut steps = Vec::with_capacity(self.net.stride);
        let mut from = 0usize;
        for ((pair, &(sender, receiver)), flow) in rows.iter().zip(endpoints).zip(flows) {
            let class = flow.class;
            for (direction, rows) in pair.iter().enumerate() {
                for row in rows.first..rows.first + rows.count {
                    let to = ends[row as usize] as usize;
                    steps.clear();
                    for &port in &ports[from..to] {
                        let step = self.port_step(port)?;
                        steps.push(step);
                    }
                    steps.push(if direction == 0 { receiver } else { sender });
                    from = to;
                    self.net.row_class.push(class);
                    let made = self.net.add_row(&steps);
                    debug_assert_eq!(made, row);
                }
            }
        }
        Ok(rows)
    }

    fn check_memory(&self, flows: usize, rows: usize) -> Result<(), Error> {
        let table = rows as u64 * self.net.stride as u64 * 4;
        let endpoints = flows as u64 * (size_of::<TcpSender>() + size_of::<TcpReceiver>()) as u64;
        // A flow keeps about a window of packets in flight: 64 kB of 1 kB packets of 16 bytes.
        let events = flows as u64 * 64 * 16;
        let need = table + endpoints + events;
        if need > self.execution.memory_bytes_max {
            let what = if table > endpoints + events {
                format!("{rows} paths of up to {} links", self.net.stride - 1)
            } else {
                format!("{flows} flows")
            };
            return Err(Error::Memory {
                need_mib: need >> 20,
                have_mib: self.execution.memory_bytes_max >> 20,
                what,
            });
        }
        Ok(())
    }

    /// The place of a port, which is made when first asked for.
    fn port_step(&mut self, port: PortId) -> Result<Step, Error> {
        if self.port_steps[port as usize] != 0 {
            return Ok(Step(self.port_steps[port as usize] - 1));
        }
        let topology = &self.scenario.topology;
        let shard = if self.shards == 1 {
            0
        } else {
            topology.part_of_port(port) % self.shards
        };
        let from_host = matches!(topology.port_ends(port).0, crate::topology::End::Host(_));
        let class = match topology.tier(port) {
            Tier::Host => 0,
            Tier::Edge => 1,
            Tier::Core => 2,
        };
        // A host's own queue is its memory: no limit, nothing that drops.
        let managed = !from_host
            && (self.scenario.queue.aqm != Aqm::TailDrop || self.scenario.queue.loss > 0.0);
        let capacity = match self.scenario.queue.capacity_packets {
            0 => UNLIMITED,
            _ if from_host => UNLIMITED,
            packets => packets,
        };
        let spec = PortSpec {
            class,
            delay_ns: self.net.classes[class as usize].delay_ns as u32,
            capacity,
            aqm: u8::from(managed),
        };
        // Queues longer than the 2^31 ns that a ring of 32-bit times can tell apart take the other
        // form too.
        let link = self.net.classes[class as usize];
        let packet_ns = serialization_ns(self.net.sizes as u64, link.bits_per_s);
        let long = capacity != UNLIMITED && (u64::from(capacity) + 2) * packet_ns >= 1 << 31;
        let scheduled = !from_host && (self.scenario.queue.discipline != Discipline::Fifo || long);
        let fabric = &mut self.fabrics[shard as usize];
        let index = if scheduled {
            fabric.scheduled.len()
        } else {
            fabric.ports.len()
        };
        if index >= INDEX_MAX {
            return Err(Error::Value(format!(
                "more than {INDEX_MAX} ports are used in one part of the network; \
                 use a smaller topology or fewer flows"
            )));
        }
        let place = if scheduled {
            let classes = self.scenario.queue.discipline.classes();
            fabric.scheduled.push(Scheduled::new(classes, spec));
            fabric.scheduled_ids.push(port);
            Place::Scheduled
        } else {
            fabric.ports.push(Port::new(spec, managed));
            fabric.port_ids.push(port);
            Place::Fifo
        };
        let step = Step::new(shard, place, index);
        self.port_steps[port as usize] = step.0 + 1;
        Ok(step)
    }
}

/// Makes a flow's sender and receiver.
fn add_endpoints(
    shards: &mut [Shard],
    scenario: &Scenario,
    index: u32,
    flow: &Flow,
    (sender, receiver): (Step, Step),
    data: Rows,
    ack: Rows,
) {
    let seed = mix::draw(scenario.seed, flow.id);
    let total = flow.demand.bytes().unwrap_or(u64::MAX);
    match flow.transport {
        Transport::Tcp(tcp) => {
            let app = match flow.demand {
                Demand::Bytes(_) => None,
                Demand::Paced(a) => Some(Paced::new(a, seed)),
            };
            let control = match tcp.congestion {
                Congestion::NewReno => Control::NewReno(NewReno::default()),
                Congestion::Cubic(params) => Control::Cubic(Box::new(Cubic::new(params))),
                Congestion::Dctcp { gain } => Control::Dctcp(Box::new(Dctcp::new(gain))),
            };
            let setup = TcpSetup {
                flow: index,
                me: sender,
                row: data.first,
                rows: data.count,
                mss: flow.packet_bytes,
                header: flow.header_bytes,
                ecn: tcp.ecn,
                initial_window: tcp.initial_window,
                ssthresh: tcp.ssthresh,
                rto_min_ns: tcp.rto_ns_min,
                control,
                bytes: flow.demand.bytes(),
                app,
            };
            shards[sender.shard()]
                .tcp_senders
                .push(TcpSender::new(setup));
            shards[receiver.shard()]
                .tcp_receivers
                .push(TcpReceiver::new(
                    index,
                    ack.first,
                    ack.count,
                    flow.header_bytes,
                    flow.ack_bytes,
                    total,
                ));
        }
        Transport::Packets => {
            let arrivals = match flow.demand {
                Demand::Paced(a) => a,
                Demand::Bytes(bytes) => Arrivals {
                    size: Dist::Constant(bytes as f64),
                    gap_s: Dist::Constant(0.0),
                    duration_ns: None,
                    bytes: Some(bytes),
                },
            };
            shards[sender.shard()].raw_senders.push(RawSender::new(
                index,
                sender,
                (data.first, data.count),
                flow.header_bytes,
                flow.packet_bytes,
                Paced::new(arrivals, seed),
            ));
            shards[receiver.shard()]
                .raw_receivers
                .push(RawReceiver::new(index, flow.header_bytes, total));
        }
    }
}

/// The rows of a flow in one direction.
#[derive(Clone, Copy, Debug, Default)]
struct Rows {
    first: u32,
    count: u32,
}

fn disconnected(flow: &Flow) -> Error {
    Error::Flow {
        flow: flow.id,
        what: format!(
            "no path leads from host {} to host {}; add edges that join them",
            flow.src, flow.dst
        ),
    }
}

fn explicit(
    flow: &Flow,
    nodes: &[u32],
    back: bool,
    topology: &crate::topology::Topology,
) -> Result<Vec<u32>, Error> {
    let (from, to) = (topology.attachment(flow.src), topology.attachment(flow.dst));
    if nodes.first() != Some(&from) || nodes.last() != Some(&to) {
        return Err(Error::Flow {
            flow: flow.id,
            what: format!(
                "its path must begin at node {from} and end at node {to}, where its hosts are"
            ),
        });
    }
    let mut nodes = nodes.to_vec();
    if back {
        nodes.reverse();
    }
    Ok(nodes)
}

fn check_values(scenario: &Scenario) -> Result<(), Error> {
    let links = &scenario.links;
    let named = [
        ("host link", links.host),
        ("link", Some(links.edge)),
        ("core link", Some(links.core)),
    ];
    for (name, link) in named {
        let Some(Link {
            bits_per_s,
            delay_ns,
        }) = link
        else {
            continue;
        };
        if !(1_000_000..=1_000_000_000_000_000).contains(&bits_per_s) {
            return Err(Error::Value(format!(
                "a {name} of {bits_per_s} bit/s cannot be simulated; use 1 Mb/s to 1 Pb/s"
            )));
        }
        if delay_ns > 2_000_000_000 {
            return Err(Error::Value(format!(
                "a {name} with a delay of {delay_ns} ns is too slow; use at most 2 s"
            )));
        }
    }
    let hosts = scenario.topology.host_count();
    let mut ids = BTreeSet::new();
    for flow in &scenario.flows {
        let fault = |what: String| {
            Err(Error::Flow {
                flow: flow.id,
                what,
            })
        };
        if !ids.insert(flow.id) {
            return fault("this number is used twice; number flows apart".into());
        }
        for (name, host) in [("source", flow.src), ("destination", flow.dst)] {
            if host >= hosts {
                return fault(format!(
                    "its {name} is host {host}, but hosts are 0 to {}",
                    hosts.saturating_sub(1)
                ));
            }
        }
        if flow.src == flow.dst {
            return fault(format!("host {} sends to itself; give two hosts", flow.src));
        }
        let size = flow.packet_bytes + flow.header_bytes;
        if flow.packet_bytes == 0 || flow.ack_bytes == 0 || size.max(flow.ack_bytes) > SIZE_MAX {
            return fault(format!(
                "packets of {} + {} bytes and ACKs of {} bytes; each must be from 1 to {SIZE_MAX}",
                flow.packet_bytes, flow.header_bytes, flow.ack_bytes
            ));
        }
        if let Demand::Paced(a) = flow.demand
            && a.duration_ns.is_none()
            && a.bytes.is_none()
        {
            return fault("it has neither a size nor a duration; give one".into());
        }
    }
    Ok(())
}

/// Flows must not wait for each other in a circle, nor for flows that do not exist.
fn check_dependencies(flows: &[Flow]) -> Result<(), Error> {
    if flows.iter().all(|f| f.after.is_empty()) {
        return Ok(());
    }
    let mut left: Vec<usize> = flows.iter().map(|f| f.after.len()).collect();
    let mut next: Vec<Vec<u32>> = vec![Vec::new(); flows.len()];
    for (i, flow) in flows.iter().enumerate() {
        for after in &flow.after {
            next[after.flow as usize].push(i as u32);
        }
    }
    let mut ready: Vec<u32> = (0..flows.len() as u32)
        .filter(|&i| left[i as usize] == 0)
        .collect();
    let mut seen = 0;
    while let Some(i) = ready.pop() {
        seen += 1;
        for &n in &next[i as usize] {
            left[n as usize] -= 1;
            if left[n as usize] == 0 {
                ready.push(n);
            }
        }
    }
    if seen == flows.len() {
        return Ok(());
    }
    // Walk back along unmet predecessors until a flow repeats: that is a circle.
    let mut at = (0..flows.len()).find(|&i| left[i] > 0).unwrap_or(0);
    let mut walk = vec![at];
    loop {
        let unmet = flows[at].after.iter().find(|a| left[a.flow as usize] > 0);
        at = unmet.map_or(at, |a| a.flow as usize);
        if let Some(from) = walk.iter().position(|&w| w == at) {
            let names: Vec<String> = walk[from..]
                .iter()
                .chain([&at])
                .map(|&i| flows[i].id.to_string())
                .collect();
            return Err(Error::Cycle(names.join(" waits for ")));
        }
        walk.push(at);
    }
}

/// Upper estimate of packet-hops per ns while everything sends.
fn scenario_density(scenario: &Scenario) -> f64 {
    let rate = scenario
        .links
        .host
        .unwrap_or(scenario.links.edge)
        .bits_per_s as f64;
    let per_s: f64 = scenario
        .flows
        .iter()
        .map(|f| {
            let line = rate / (8.0 * f64::from(f.packet_bytes));
            match f.demand {
                Demand::Bytes(_) => line,
                Demand::Paced(a) => line.min(1.0 / a.gap_s.mean().max(1e-9)),
            }
        })
        .sum();
    // Data and ACK over about five links.
    per_s * 10.0 / 1e9
}

/// How many shards a run has. A property of the scenario alone: the same on every machine.
fn shard_count(scenario: &Scenario, lookahead_ns: u64) -> u32 {
    let topology = &scenario.topology;
    let parts = topology.parts().min(SHARDS_MAX);
    let crossing = scenario.flows.iter().any(|flow| {
        flow.after.iter().any(|after| {
            // What a flow waits for must be seen where the flow starts.
            let Some(other) = scenario.flows.get(after.flow as usize) else {
                return true;
            };
            let seen_at = match after.until {
                Finished::Delivered => other.dst,
                Finished::Acknowledged => other.src,
            };
            topology.part_of_host(seen_at) != topology.part_of_host(flow.src)
        })
    });
    let events = scenario_density(scenario) * lookahead_ns as f64;
    if crossing || events < EVENTS_PER_SHARD_WINDOW * f64::from(parts) {
        1
    } else {
        parts
    }
}
