//! Ports with several classes: strict priority, deficit and weighted round robin, weighted fair
//! queueing, virtual clock.
//!
//! A later packet may overtake here, so a departure is not known at the arrival. An idle port still
//! costs one event a packet; a busy one wakes up once more for each packet that waited.

use std::collections::VecDeque;

use crate::aqm::{Arrival, Verdict};
use crate::event::{CE, ECT, Event, Kind};
use crate::fabric::{Fabric, UNLIMITED};
use crate::net::{Net, Place, Step};

/// Which class is served next.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Discipline {
    /// One queue; the port costs one event a packet.
    #[default]
    Fifo,
    /// The class with the highest priority that has a packet; by class.
    StrictPriority(Vec<u32>),
    /// Deficit round robin (Shreedhar, Varghese, "Efficient fair queuing using deficit round
    /// robin", IEEE/ACM ToN 1996): a class may send quantum × weight bytes a round.
    Drr(Vec<u32>),
    /// Weighted round robin: as many packets a round as the weight.
    Wrr(Vec<u32>),
    /// Weighted fair queueing by self-clocked finish tags (Golestani, "A self-clocked fair
    /// queueing scheme for broadband applications", INFOCOM 1994).
    Wfq(Vec<u32>),
    /// Virtual clock (Zhang, SIGCOMM 1990): stamps advance by vtick ns a packet.
    VirtualClock(Vec<u64>),
}

impl Discipline {
    /// Classes; flows of a higher class join the last one.
    pub fn classes(&self) -> usize {
        match self {
            Discipline::Fifo => 1,
            Discipline::StrictPriority(v)
            | Discipline::Drr(v)
            | Discipline::Wrr(v)
            | Discipline::Wfq(v) => v.len(),
            Discipline::VirtualClock(v) => v.len(),
        }
    }
}

/// Bytes that a class of weight 1 may send in a round of DRR: the largest common packet, so that
/// each class sends in each round (the paper's condition for O(1) work).
const QUANTUM: u64 = 1_500;

/// Finish tags count bytes over weight in units of 2^-16.
const TAG_SHIFT: u32 = 16;

#[derive(Clone, Debug, Default)]
struct Class {
    /// Packet, its place in the path table, when it came, and its tag.
    queue: VecDeque<(Event, u32, u64, u64)>,
    /// DRR: bytes left in this round; WRR: packets left.
    credit: u64,
    /// WFQ, virtual clock: tag of the last packet.
    tag: u64,
}

/// A port with classes.
#[derive(Clone, Debug)]
pub(crate) struct Scheduled {
    classes: Vec<Class>,
    class: u8,
    delay_ns: u64,
    capacity: u32,
    aqm: u8,
    busy: u64,
    waking: bool,
    /// Round robin: the class that sends.
    turn: usize,
    /// WFQ: tag of the packet in service.
    clock: u64,
    waiting: u32,
    average: f32,
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) drops: u64,
    pub(crate) marks: u64,
    pub(crate) wait_ns_max: u64,
}

impl Scheduled {
    pub(crate) fn new(classes: usize, spec: crate::fabric::PortSpec) -> Self {
        Scheduled {
            classes: vec![Class::default(); classes],
            class: spec.class,
            delay_ns: u64::from(spec.delay_ns),
            capacity: spec.capacity,
            aqm: spec.aqm,
            busy: 0,
            waking: false,
            turn: 0,
            clock: 0,
            waiting: 0,
            average: 0.0,
            packets: 0,
            bytes: 0,
            drops: 0,
            marks: 0,
            wait_ns_max: 0,
        }
    }

    pub(crate) fn link_class(&self) -> u8 {
        self.class
    }

    /// The tag of a packet of `class` that arrives now.
    fn tag(&mut self, discipline: &Discipline, class: usize, now: u64, size: u64) -> u64 {
        let (clock, c) = (self.clock, &mut self.classes[class]);
        match discipline {
            Discipline::Wfq(weights) => {
                // F = max(v, F of the class) + size / weight; v is the tag in service.
                c.tag = c.tag.max(clock) + (size << TAG_SHIFT) / u64::from(weights[class].max(1));
                c.tag
            }
            Discipline::VirtualClock(vticks) => {
                c.tag = c.tag.max(now) + vticks[class];
                c.tag
            }
            _ => 0,
        }
    }

    /// The class to serve next; at least one has a packet.
    fn choose(&mut self, discipline: &Discipline) -> usize {
        let busy = |classes: &[Class], i: usize| !classes[i].queue.is_empty();
        match discipline {
            Discipline::Fifo => 0,
            Discipline::StrictPriority(priorities) => (0..self.classes.len())
                .filter(|&i| busy(&self.classes, i))
                .max_by_key(|&i| (priorities[i], std::cmp::Reverse(i)))
                .unwrap_or(0),
            Discipline::Wfq(_) | Discipline::VirtualClock(_) => (0..self.classes.len())
                .filter_map(|i| self.classes[i].queue.front().map(|p| (p.3, i)))
                .min()
                .map_or(0, |(_, i)| i),
            Discipline::Drr(weights) => loop {
                let c = &mut self.classes[self.turn];
                match c.queue.front() {
                    Some((event, ..)) if c.credit >= u64::from(event.size()) => {
                        c.credit -= u64::from(event.size());
                        break self.turn;
                    }
                    // An empty class keeps nothing for later.
                    None => c.credit = 0,
                    Some(_) => {}
                }
                self.turn = (self.turn + 1) % self.classes.len();
                let next = &mut self.classes[self.turn];
                next.credit += QUANTUM * u64::from(weights[self.turn].max(1));
            },
            Discipline::Wrr(weights) => loop {
                let c = &mut self.classes[self.turn];
                if c.credit > 0 && !c.queue.is_empty() {
                    c.credit -= 1;
                    break self.turn;
                }
                self.turn = (self.turn + 1) % self.classes.len();
                self.classes[self.turn].credit = u64::from(weights[self.turn].max(1));
            },
        }
    }
}

impl Fabric {
    /// A packet arrives at the scheduled port at `steps[at]`.
    pub(crate) fn enter_scheduled(&mut self, net: &Net, now: u64, mut event: Event, at: usize) {
        let step = net.steps[at];
        let port = &mut self.scheduled[step.index()];
        let last = port.classes.len() - 1;
        let class = (net.row_class[event.what as usize] as usize).min(last);
        let idle = port.busy <= now && port.waiting == 0;
        let size = event.size();
        let arrival = Arrival {
            waiting: port.waiting,
            backlog_bytes: port
                .classes
                .iter()
                .flat_map(|c| &c.queue)
                .map(|p| u64::from(p.0.size()))
                .sum(),
            size,
            idle_ns: if idle { now - port.busy } else { 0 },
            capacity: port.capacity,
            packet_ns: net.serialization(u16::from(port.class), size),
            draw: slipstream_base::mix::draw(
                self.seed ^ u64::from(self.scheduled_ids[step.index()]),
                port.packets + port.drops + u64::from(port.waiting),
            ),
        };
        let aqm = &self.aqms[port.aqm as usize];
        let verdict = aqm.on_arrival(arrival, &mut port.average, event.has(ECT));
        let full = !idle && port.capacity != UNLIMITED && port.waiting >= port.capacity;
        if full || verdict == Verdict::Drop {
            port.drops += 1;
            self.count_drop(event);
            return;
        }
        if verdict == Verdict::Mark {
            event.meta |= CE;
            port.marks += 1;
            self.tally.marks += 1;
        }
        let tag = port.tag(&net.discipline, class, now, u64::from(size));
        port.classes[class]
            .queue
            .push_back((event, at as u32, now, tag));
        port.waiting += 1;
        if idle {
            self.serve(net, now, step);
        } else if !port.waking {
            port.waking = true;
            let busy = port.busy;
            self.schedule(busy, Kind::Wake, step.0, 0);
        }
    }

    /// The port is free: serves the next packet, and wakes again if more wait.
    pub(crate) fn serve(&mut self, net: &Net, now: u64, step: Step) {
        debug_assert_eq!(step.place(), Place::Scheduled);
        let port = &mut self.scheduled[step.index()];
        port.waking = false;
        if port.waiting == 0 {
            return;
        }
        let class = port.choose(&net.discipline);
        let Some((event, at, came, tag)) = port.classes[class].queue.pop_front() else {
            unreachable!("a class with a packet was chosen");
        };
        port.waiting -= 1;
        port.clock = tag;
        let size = event.size();
        port.busy = now + net.serialization(u16::from(port.class), size);
        port.packets += 1;
        port.bytes += u64::from(size);
        port.wait_ns_max = port.wait_ns_max.max(now - came);
        let (busy, more) = (port.busy, port.waiting > 0);
        let arrival = busy + port.delay_ns;
        port.waking = more;
        self.tally.hops += 1;
        self.send_on(net, arrival, event, at as usize);
        if more {
            self.schedule(busy, Kind::Wake, step.0, 0);
        }
    }
}
