//! Ports with several classes: strict priority, deficit and weighted round robin, weighted fair
//! queueing, virtual clock.
//!
//! Packets may overtake here, so a departure is not known at the arrival. An idle port still costs
//! one event per packet. A busy one has an additional wake-up for each packet that waited.

use crate::queueing::{Discipline, PFC_CLASSES};
use std::collections::VecDeque;

use slipstream_base::mix;
use slipstream_base::width::{floor_u64, to_u32};

use crate::aqm::{Arrival, Verdict};
use crate::buffer::{LASTING, NO_SWITCH, RUN_OUT, quanta_ns};
use crate::event::{CE, ECT, EventKind, NetEvent};
use crate::fabric::{ShardPorts, UNLIMITED};
use crate::net::Net;
use crate::step::{Place, Step};

/// Bytes that a class of weight 1 may send per round of DRR: the largest common packet, so that
/// each class sends in each round (the paper's condition for O(1) work).
const QUANTUM: u64 = 1_500;

/// Finish tags count bytes over weight in units of 2^-16.
const TAG_SHIFT: u32 = 16;

#[derive(Clone, Debug, Default)]
struct Class {
    /// Packet, its index in the path table, arrival time, and tag.
    queue: VecDeque<(NetEvent, u32, u64, u64)>,
    /// Bytes in the queue.
    bytes: u64,
    /// DRR: bytes left in this round; WRR: packets left.
    credit: u64,
    /// WFQ, virtual clock: tag of the last packet.
    tag: u64,
}

/// Limits of a port in addition to packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortLimits {
    /// Bytes that may wait; `u64::MAX`: no limit.
    pub(crate) capacity_bytes: u64,
    /// Index of the shard's memories, or [`NO_SWITCH`].
    pub(crate) memory: u32,
    /// Whether loss injection applies; not at a host's own port.
    pub(crate) lossy: bool,
    /// PFC's priority of each of the first classes.
    pub(crate) priorities: [u8; PFC_CLASSES],
}

/// Each class has the priority of its number.
pub(crate) const OWN_PRIORITIES: [u8; PFC_CLASSES] = [0, 1, 2, 3, 4, 5, 6, 7];

impl Default for PortLimits {
    fn default() -> Self {
        PortLimits {
            capacity_bytes: u64::MAX,
            memory: NO_SWITCH,
            lossy: false,
            priorities: OWN_PRIORITIES,
        }
    }
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
    /// Round robin: the class whose turn it is.
    turn: usize,
    /// WFQ: tag of the packet in service.
    clock: u64,
    waiting: u32,
    /// Waiting bytes, their maximum so far, and their limit (`u64::MAX`: none).
    waiting_bytes: u64,
    pub(crate) waiting_bytes_max: u64,
    capacity_bytes: u64,
    /// Index of the shard's memories; [`NO_SWITCH`]: a host's port.
    memory: u32,
    lossy: bool,
    /// PFC's priority of each of the first classes; later ones have their own number.
    priorities: [u8; PFC_CLASSES],
    /// Bit p: priority p is paused by PFC.
    paused: u8,
    paused_at: [u64; PFC_CLASSES],
    /// When a pause expires; `u64::MAX`: when it is revoked.
    paused_until: [u64; PFC_CLASSES],
    /// Pauses received, and total time paused, ns, summed over classes.
    pub(crate) pauses: u64,
    pub(crate) paused_ns: u64,
    /// Endpoints of a host that wait for their turn at its port.
    turns: VecDeque<Step>,
    /// The one whose turn it is: it has a timer event at this time.
    next_turn: Step,
    average: f32,
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) drops: u64,
    pub(crate) marks: u64,
    pub(crate) wait_ns_max: u64,
}

impl Scheduled {
    pub(crate) fn new(classes: usize, spec: crate::fabric::PortSpec, limits: PortLimits) -> Self {
        Scheduled {
            priorities: limits.priorities,
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
            waiting_bytes: 0,
            waiting_bytes_max: 0,
            capacity_bytes: limits.capacity_bytes,
            memory: limits.memory,
            lossy: limits.lossy,
            paused: 0,
            paused_at: [0; PFC_CLASSES],
            paused_until: [0; PFC_CLASSES],
            pauses: 0,
            paused_ns: 0,
            turns: VecDeque::new(),
            next_turn: Step::NONE,
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

    /// When the packet in service will have left.
    pub(crate) fn busy(&self) -> u64 {
        self.busy
    }

    /// Packets that wait.
    pub(crate) fn waiting(&self) -> u32 {
        self.waiting
    }

    /// Bytes that wait.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes
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
            Discipline::VirtualClockBits(vticks) => {
                let ns = floor_u64(vticks[class] * 8e9 * size as f64);
                c.tag = c.tag.max(now).saturating_add(ns);
                c.tag
            }
            // Increases with every packet that is accepted.
            Discipline::PriorityFifo(_) => self.packets + u64::from(self.waiting),
            _ => 0,
        }
    }

    /// PFC's priority and index in the path table of each packet that waits.
    pub(crate) fn waiting_rows(&self) -> impl Iterator<Item = (usize, u32)> {
        let classes = self.classes.iter().enumerate();
        classes.flat_map(|(class, c)| {
            let priority = self.priority(class);
            c.queue.iter().map(move |packet| (priority, packet.1))
        })
    }

    /// PFC's priority of packets of `class`.
    #[inline]
    fn priority(&self, class: usize) -> usize {
        self.priorities
            .get(class)
            .map_or(class, |&priority| usize::from(priority))
    }

    #[inline]
    fn is_paused(&self, class: usize) -> bool {
        self.paused != 0 && {
            let priority = self.priority(class);
            priority < PFC_CLASSES && self.paused >> priority & 1 == 1
        }
    }

    /// Whether a class has a packet and may send.
    fn can_serve(&self) -> bool {
        if self.paused == 0 {
            return self.waiting > 0;
        }
        (0..self.classes.len()).any(|i| !self.classes[i].queue.is_empty() && !self.is_paused(i))
    }

    /// The class to serve next; at least one has a packet and is not paused.
    fn choose(&mut self, discipline: &Discipline) -> usize {
        match discipline {
            Discipline::Fifo => 0,
            Discipline::StrictPriority(priorities) => (0..self.classes.len())
                .filter(|&i| !self.classes[i].queue.is_empty() && !self.is_paused(i))
                .max_by_key(|&i| (priorities[i], std::cmp::Reverse(i)))
                .unwrap_or(0),
            Discipline::Wfq(_)
            | Discipline::VirtualClock(_)
            | Discipline::VirtualClockBits(_)
            | Discipline::PriorityFifo(_) => (0..self.classes.len())
                .filter(|&i| !self.is_paused(i))
                .filter_map(|i| self.classes[i].queue.front().map(|p| (p.3, i)))
                .min()
                .map_or(0, |(_, i)| i),
            Discipline::Drr(weights) => loop {
                let paused = self.is_paused(self.turn);
                let c = &mut self.classes[self.turn];
                match c.queue.front() {
                    Some((event, ..)) if !paused && c.credit >= u64::from(event.size()) => {
                        c.credit -= u64::from(event.size());
                        break self.turn;
                    }
                    // An empty class saves no credit.
                    None => c.credit = 0,
                    Some(_) => {}
                }
                self.turn = (self.turn + 1) % self.classes.len();
                // A paused class saves no credit while the others are served.
                if !self.is_paused(self.turn) {
                    let quantum = QUANTUM * u64::from(weights[self.turn].max(1));
                    self.classes[self.turn].credit += quantum;
                }
            },
            Discipline::Wrr(weights) => loop {
                let paused = self.is_paused(self.turn);
                let c = &mut self.classes[self.turn];
                if !paused && c.credit > 0 && !c.queue.is_empty() {
                    c.credit -= 1;
                    break self.turn;
                }
                self.turn = (self.turn + 1) % self.classes.len();
                self.classes[self.turn].credit = u64::from(weights[self.turn].max(1));
            },
        }
    }
}

impl ShardPorts {
    /// A packet arrives at the scheduled port at `steps[at]`.
    pub(crate) fn enter_scheduled(&mut self, net: &Net, now: u64, mut event: NetEvent, at: usize) {
        let step = net.steps[at];
        if self.loss > 0.0 && self.is_lost_at(step, event) {
            return;
        }
        let port = &mut self.scheduled[step.index()];
        let last = port.classes.len() - 1;
        let class = (net.row_class[event.what as usize] as usize).min(last);
        let idle = port.busy <= now && port.waiting == 0 && !port.is_paused(class);
        let size = event.size();
        let arrival = Arrival {
            waiting: port.waiting,
            backlog_bytes: port.waiting_bytes,
            size,
            idle_ns: if idle { now - port.busy } else { 0 },
            capacity: port.capacity,
            packet_ns: net.serialization(u16::from(port.class), size),
            draw: mix::draw(
                self.seed ^ u64::from(self.scheduled_ids[step.index()]),
                port.packets + port.drops + u64::from(port.waiting),
            ),
        };
        let aqm = &self.aqms[port.aqm as usize];
        let verdict = aqm.on_arrival(arrival, &mut port.average, event.has(ECT));
        let full = !idle
            && (port.capacity != UNLIMITED && port.waiting >= port.capacity
                || port.waiting_bytes.saturating_add(u64::from(size)) > port.capacity_bytes);
        let room = (port.memory, net.ingress_at(at));
        let (queued, priority) = (port.classes[class].bytes, port.priority(class));
        if full
            || verdict == Verdict::Drop
            || !idle && !self.admit(net, now, room, priority, (u64::from(size), queued))
        {
            self.scheduled[step.index()].drops += 1;
            self.count_drop(event);
            return;
        }
        let port = &mut self.scheduled[step.index()];
        if verdict == Verdict::Mark {
            event.meta |= CE;
            port.marks += 1;
            self.tally.marks += 1;
        }
        let tag = port.tag(&net.discipline, class, now, u64::from(size));
        let queue = &mut port.classes[class];
        queue.queue.push_back((event, to_u32(at), now, tag));
        queue.bytes += u64::from(size);
        port.waiting += 1;
        port.waiting_bytes += u64::from(size);
        if idle {
            self.serve(net, now, step, true);
        } else {
            port.waiting_bytes_max = port.waiting_bytes_max.max(port.waiting_bytes);
            self.wake(now, step);
        }
    }

    /// Loss injection.
    #[cold]
    fn is_lost_at(&mut self, step: Step, event: NetEvent) -> bool {
        let port = &mut self.scheduled[step.index()];
        let key = self.seed ^ mix::mix64(u64::from(self.scheduled_ids[step.index()]));
        let arrivals = port.packets + port.drops + u64::from(port.waiting);
        if !port.lossy || mix::unit(mix::draw(key, arrivals)) >= self.loss {
            return false;
        }
        port.drops += 1;
        self.tally.fault_drops += 1;
        self.count_drop(event);
        true
    }

    /// Schedules a wake-up for a port that has a packet to serve.
    fn wake(&mut self, now: u64, step: Step) {
        let port = &mut self.scheduled[step.index()];
        if !port.waking && port.can_serve() {
            port.waking = true;
            let at = port.busy.max(now);
            self.schedule(at, EventKind::Wake, step.0, 0);
        }
    }

    /// Pauses or resumes a class of a port.
    pub(crate) fn on_pause(&mut self, net: &Net, now: u64, event: NetEvent) {
        let step = Step(event.what);
        let port = &mut self.scheduled[step.index()];
        let class = event.size() as usize & (PFC_CLASSES - 1);
        let bit = 1 << class;
        // A later frame has extended the pause.
        let pause = match event.seq {
            0 => false,
            RUN_OUT if port.paused_until[class] != now => return,
            RUN_OUT => false,
            _ => true,
        };
        if pause {
            if port.paused & bit == 0 {
                port.paused |= bit;
                port.paused_at[class] = now;
                port.pauses += 1;
            }
            port.paused_until[class] = u64::MAX;
            if event.seq < LASTING {
                let rate = net.classes[port.class as usize].bits_per_s;
                let end = now + quanta_ns(event.seq, rate).max(1);
                port.paused_until[class] = end;
                let mut event = NetEvent::local(EventKind::Pause, end, step.0, RUN_OUT);
                event.meta |= to_u32(class);
                self.wheel.push(end, event);
            }
        } else if port.paused & bit != 0 {
            port.paused &= !bit;
            port.paused_ns += now - port.paused_at[class];
            self.wake(now, step);
        }
    }

    /// Whether `sender` may submit a packet to its host's port now; if not, it gets a timer event
    /// when its turn comes. The port queues only one packet behind the one in service. So packets
    /// that a pause or a full link delays stay with the senders.
    pub(crate) fn take_turn(&mut self, port: Step, sender: Step) -> bool {
        if port.place() != Place::Scheduled {
            return true;
        }
        let port = &mut self.scheduled[port.index()];
        if port.memory == NO_SWITCH {
            // Others whose timers expire at the same time do not overtake the one that has waited.
            let is_of_other = port.next_turn != Step::NONE && port.next_turn != sender;
            if port.waiting > 0 && port.next_turn == sender {
                // An answer of its host came first. It is next when that is served.
                port.next_turn = Step::NONE;
                port.turns.push_front(sender);
                return false;
            }
            if port.waiting > 0 || is_of_other {
                port.turns.push_back(sender);
                return false;
            }
            port.next_turn = Step::NONE;
        }
        true
    }

    /// `sender` sends nothing now: if it has the turn, the next one gets it.
    pub(crate) fn pass_turn(&mut self, now: u64, port: Step, sender: Step) {
        if port.place() != Place::Scheduled {
            return;
        }
        let port = &mut self.scheduled[port.index()];
        if port.next_turn == sender {
            port.next_turn = port.turns.pop_front().unwrap_or(Step::NONE);
            if port.next_turn != Step::NONE {
                let next = port.next_turn;
                self.schedule(now, EventKind::Timer, next.0, 0);
            }
        }
    }

    /// Serves the next packet of a free port, and schedules a wake-up if more wait. `straight`: the
    /// packet never waited, so it holds no memory.
    pub(crate) fn serve(&mut self, net: &Net, now: u64, step: Step, straight: bool) {
        debug_assert_eq!(step.place(), Place::Scheduled);
        let port = &mut self.scheduled[step.index()];
        port.waking = false;
        if !port.can_serve() {
            return;
        }
        let class = port.choose(&net.discipline);
        let queue = &mut port.classes[class];
        let Some((event, at, came, tag)) = queue.queue.pop_front() else {
            unreachable!("a class with a packet was chosen");
        };
        let size = event.size();
        queue.bytes -= u64::from(size);
        port.waiting -= 1;
        port.waiting_bytes -= u64::from(size);
        port.clock = tag;
        port.busy = now + net.serialization(u16::from(port.class), size);
        port.packets += 1;
        port.bytes += u64::from(size);
        port.wait_ns_max = port.wait_ns_max.max(now - came);
        let arrival = port.busy + port.delay_ns;
        let (memory, priority) = (port.memory, port.priority(class));
        let turn = if port.waiting == 0 {
            port.turns.pop_front()
        } else {
            None
        };
        port.next_turn = turn.unwrap_or(Step::NONE);
        self.tally.hops += 1;
        self.send_on(net, arrival, event, at as usize);
        self.wake(now, step);
        if !straight {
            let room = (memory, net.ingress_at(at as usize));
            self.release(net, now, room, priority, u64::from(size));
        }
        if let Some(sender) = turn {
            self.schedule(now, EventKind::Timer, sender.0, 0);
        }
    }
}
