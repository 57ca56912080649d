//! Ports and what moves packets through them.
//!
//! A FIFO port costs one event a packet. Nothing overtakes in a FIFO, so the departure is known at
//! the arrival, `max(now, busy) + serialization`, and the next event is the arrival at the next
//! port. Whether the queue has room is answered by the service starts of those that wait: a small
//! ring a port, looked at only when the port is busy.

use slipstream_base::mix;
use slipstream_des::Wheel;

use crate::aqm::{Aqm, Verdict};
use crate::buffer::{Ingress, Memory};
use crate::event::{CE, ECT, Event, Kind};
use crate::net::{Net, Place, Step};
use crate::scheduled::Scheduled;
use crate::topology::PortId;
use crate::trim::TrimPort;

/// No limit on waiting packets.
pub(crate) const UNLIMITED: u32 = u32::MAX;

/// `Port::flags`: the link is down.
const DOWN: u8 = 1;
/// `Port::flags`: every arrival takes the long way (queue management, loss injection, byte limit).
const MANAGED: u8 = 2;
/// `Port::flags`: the length of the queue is not tracked, for nobody asks.
const UNTRACKED: u8 = 4;

/// A FIFO port: one cache line.
#[repr(C, align(64))]
#[derive(Clone, Debug, Default)]
pub(crate) struct Port {
    /// When the last accepted packet will have left, ns.
    pub(crate) busy: u64,
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
    delay_ns: u32,
    class: u8,
    /// log2 of the ring's slots; 0: no ring yet.
    ring_log: u8,
    flags: u8,
    /// Index of the shard's `aqms`.
    aqm: u8,
    /// Packets that may wait, the one in service not counted.
    capacity: u32,
    /// Ring of service starts of waiting packets: `rings[ring..]`.
    ring: u32,
    head: u32,
    len: u32,
    pub(crate) drops: u32,
    pub(crate) marks: u32,
    /// Longest wait accepted, ns.
    pub(crate) wait_ns_max: u32,
    /// RED's average queue, packets.
    average: f32,
}

/// How a port is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortSpec {
    pub(crate) class: u8,
    pub(crate) delay_ns: u32,
    pub(crate) capacity: u32,
    pub(crate) aqm: u8,
}

impl Port {
    pub(crate) fn new(spec: PortSpec, managed: bool) -> Port {
        let untracked = spec.capacity == UNLIMITED && !managed;
        Port {
            delay_ns: spec.delay_ns,
            class: spec.class,
            capacity: spec.capacity,
            aqm: spec.aqm,
            flags: if managed { MANAGED } else { 0 } | if untracked { UNTRACKED } else { 0 },
            ..Port::default()
        }
    }

    pub(crate) fn class(&self) -> u8 {
        self.class
    }
}

/// Storage of the ports' rings: blocks of powers of two, reused by size.
#[derive(Default)]
pub(crate) struct Rings {
    slots: Vec<u32>,
    free: Vec<Vec<u32>>,
}

impl Rings {
    /// Forgets the packets whose service has started by `now`.
    #[inline]
    fn trim(&self, port: &mut Port, now: u64) {
        let mask = (1u32 << port.ring_log) - 1;
        while port.len > 0 {
            let start = self.slots[(port.ring + (port.head & mask)) as usize];
            if (start.wrapping_sub(now as u32) as i32) > 0 {
                break;
            }
            port.head = port.head.wrapping_add(1);
            port.len -= 1;
        }
    }

    #[inline]
    fn push(&mut self, port: &mut Port, now: u64, start: u64) {
        if port.len == (1 << port.ring_log) & !1 {
            self.trim(port, now);
            if port.len == (1 << port.ring_log) & !1 {
                self.grow(port);
            }
        }
        let mask = (1u32 << port.ring_log) - 1;
        let at = port.head.wrapping_add(port.len) & mask;
        self.slots[(port.ring + at) as usize] = start as u32;
        port.len += 1;
    }

    #[cold]
    fn grow(&mut self, port: &mut Port) {
        let old_log = port.ring_log;
        let log = if old_log == 0 { 4 } else { old_log + 1 };
        if self.free.len() <= log as usize {
            self.free.resize(log as usize + 1, Vec::new());
        }
        let ring = self.free[log as usize].pop().unwrap_or_else(|| {
            let ring = self.slots.len() as u32;
            self.slots.resize(self.slots.len() + (1 << log), 0);
            ring
        });
        if old_log > 0 {
            let mask = (1u32 << old_log) - 1;
            for i in 0..port.len {
                let from = port.ring + (port.head.wrapping_add(i) & mask);
                self.slots[(ring + i) as usize] = self.slots[from as usize];
            }
            self.free[old_log as usize].push(port.ring);
        }
        (port.ring, port.ring_log, port.head) = (ring, log, 0);
    }
}

/// What became of the packets that a shard saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Packets handed to a first port.
    pub(crate) sent: u64,
    /// Packets that reached their endpoint.
    pub(crate) delivered: u64,
    /// Packets that went through a port.
    pub(crate) hops: u64,
    pub(crate) data_drops: u64,
    /// Drops of ACKs and other control packets.
    pub(crate) control_drops: u64,
    /// Those of the above that loss injection or a link that is down took.
    pub(crate) fault_drops: u64,
    pub(crate) marks: u64,
    pub(crate) trims: u64,
    pub(crate) pauses: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Tally) {
        self.sent += other.sent;
        self.delivered += other.delivered;
        self.hops += other.hops;
        self.data_drops += other.data_drops;
        self.control_drops += other.control_drops;
        self.fault_drops += other.fault_drops;
        self.marks += other.marks;
        self.trims += other.trims;
        self.pauses += other.pauses;
    }
}

/// The ports of a shard, its event queue and its outgoing mail.
pub(crate) struct Fabric {
    pub(crate) shard: usize,
    pub(crate) wheel: Wheel<Event>,
    pub(crate) ports: Vec<Port>,
    pub(crate) port_ids: Vec<PortId>,
    pub(crate) scheduled: Vec<Scheduled>,
    pub(crate) scheduled_ids: Vec<PortId>,
    pub(crate) trim_ports: Vec<TrimPort>,
    pub(crate) trim_ids: Vec<PortId>,
    /// Switch memories and incoming links; empty without shared buffers and PFC.
    pub(crate) memories: Vec<Memory>,
    pub(crate) ingresses: Vec<Ingress>,
    pub(crate) rings: Rings,
    /// Entry 0 is taildrop.
    pub(crate) aqms: Vec<Aqm>,
    /// Probability that a packet is lost on its way into a port.
    pub(crate) loss: f64,
    /// Events for other shards, by shard.
    pub(crate) mail: Vec<Vec<(u64, Event)>>,
    pub(crate) mail_first: u64,
    pub(crate) tally: Tally,
    pub(crate) seed: u64,
}

impl Fabric {
    /// A packet enters its first port.
    #[inline]
    pub(crate) fn emit(&mut self, net: &Net, now: u64, event: Event) {
        self.tally.sent += 1;
        let at = event.what as usize * net.stride;
        self.enter(net, now, event, at);
    }

    /// A packet enters the port at `steps[at]`.
    #[inline]
    pub(crate) fn enter(&mut self, net: &Net, now: u64, event: Event, at: usize) {
        match net.steps[at].place() {
            Place::Fifo => self.enter_fifo(net, now, event, at),
            Place::Scheduled => self.enter_scheduled(net, now, event, at),
            Place::Trim => self.enter_trim(net, now, event, at),
            // A path without ports: hosts on one switch whose links are not modeled. The builder
            // refuses such flows.
            place => unreachable!("a path begins with a port, not {place:?}"),
        }
    }

    #[inline]
    pub(crate) fn enter_fifo(&mut self, net: &Net, now: u64, mut event: Event, at: usize) {
        let step = net.steps[at];
        let port = &mut self.ports[step.index()];
        let mut start = now;
        if port.flags & !UNTRACKED != 0 {
            if !self.manage(step.index(), net, now, &mut event) {
                return;
            }
            start = start.max(self.ports[step.index()].busy);
        } else if port.busy > now {
            start = port.busy;
            if port.flags & UNTRACKED == 0 {
                if port.len >= port.capacity {
                    self.rings.trim(port, now);
                    if port.len >= port.capacity {
                        port.drops += 1;
                        self.count_drop(event);
                        return;
                    }
                }
                self.rings.push(port, now, start);
            }
        }
        let port = &mut self.ports[step.index()];
        let size = event.size();
        let departure = start + net.serialization(u16::from(port.class), size);
        port.busy = departure;
        port.bytes += u64::from(size);
        port.packets += 1;
        port.wait_ns_max = port
            .wait_ns_max
            .max(u32::try_from(start - now).unwrap_or(u32::MAX));
        self.tally.hops += 1;
        let arrival = departure + u64::from(port.delay_ns);
        self.send_on(net, arrival, event, at);
    }

    /// Schedules the arrival at the step after `at`.
    #[inline]
    pub(crate) fn send_on(&mut self, net: &Net, arrival: u64, mut event: Event, at: usize) {
        event.t = arrival as u32;
        event.next_hop();
        let next = net.steps[at + 1].shard();
        if next == self.shard {
            self.wheel.push(arrival, event);
        } else {
            self.mail[next].push((arrival, event));
            self.mail_first = self.mail_first.min(arrival);
        }
    }

    /// Admission at a port that is not plain: down, lossy, managed or limited in bytes.
    fn manage(&mut self, index: usize, net: &Net, now: u64, event: &mut Event) -> bool {
        let port = &mut self.ports[index];
        if port.flags & DOWN != 0 {
            port.drops += 1;
            self.tally.fault_drops += 1;
            self.count_drop(*event);
            return false;
        }
        if self.loss > 0.0 {
            let key = self.seed ^ mix::mix64(u64::from(self.port_ids[index]));
            let arrivals = port.packets + u64::from(port.drops);
            if mix::unit(mix::draw(key, arrivals)) < self.loss {
                port.drops += 1;
                self.tally.fault_drops += 1;
                self.count_drop(*event);
                return false;
            }
        }
        self.rings.trim(port, now);
        let idle_ns = now.saturating_sub(port.busy);
        let waiting = port.len;
        let rate = net.classes[port.class as usize].bits_per_s;
        let backlog_ns = port.busy.saturating_sub(now);
        let aqm = &self.aqms[port.aqm as usize];
        // Only the ramp counts bytes; the wide division is not for every packet of the others.
        let backlog = match aqm {
            Aqm::EcnRamp { .. } => {
                (u128::from(backlog_ns) * u128::from(rate) / 8_000_000_000) as u64
            }
            _ => 0,
        };
        let number = port.packets + u64::from(port.drops);
        let draw = mix::draw(self.seed ^ u64::from(self.port_ids[index]), number);
        let arrival = crate::aqm::Arrival {
            waiting,
            backlog_bytes: backlog,
            size: event.size(),
            idle_ns,
            capacity: port.capacity,
            packet_ns: net.serialization(u16::from(port.class), event.size()),
            draw,
        };
        let busy = port.busy > now;
        let full = busy && waiting >= port.capacity;
        match aqm.on_arrival(arrival, &mut port.average, event.has(ECT)) {
            _ if full => {
                port.drops += 1;
                self.count_drop(*event);
                return false;
            }
            Verdict::Drop => {
                port.drops += 1;
                self.count_drop(*event);
                return false;
            }
            Verdict::Mark => {
                event.meta |= CE;
                port.marks += 1;
                self.tally.marks += 1;
            }
            Verdict::Pass => {}
        }
        if busy {
            let start = port.busy;
            self.rings.push(port, now, start);
        }
        true
    }

    pub(crate) fn count_drop(&mut self, event: Event) {
        if event.kind() == Kind::Data {
            self.tally.data_drops += 1;
        } else {
            self.tally.control_drops += 1;
        }
    }

    /// Schedules an event of this shard.
    pub(crate) fn schedule(&mut self, time: u64, kind: Kind, what: u32, seq: u32) {
        self.wheel.push(time, Event::local(kind, time, what, seq));
    }

    /// Schedules an event that is no packet at `to`, which may lie in another shard; `time` is at
    /// least a link's delay ahead then.
    pub(crate) fn deliver_local(&mut self, to: Step, time: u64, event: Event) {
        if to.shard() == self.shard {
            self.wheel.push(time, event);
        } else {
            self.mail[to.shard()].push((time, event));
            self.mail_first = self.mail_first.min(time);
        }
    }

    /// Takes mail that was written before the window that starts now.
    pub(crate) fn receive(&mut self, mail: &mut Vec<(u64, Event)>) {
        for (time, event) in mail.drain(..) {
            self.wheel.push(time, event);
        }
    }
}
