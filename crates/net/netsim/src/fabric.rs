//! Ports, and the movement of packets through them.
//!
//! A FIFO port costs one event per packet. As packets cannot overtake in a FIFO, the departure is
//! known at the arrival: `max(now, busy) + serialization`. The next event is the arrival at the
//! next port. Whether the queue has room follows from the service starts of waiting packets: a
//! small ring per port, read only when the port is busy.

use slipstream_base::mix;
use slipstream_base::width::{low_u32, to_u32};
use slipstream_des::Wheel;

use crate::aqm::{Aqm, Verdict};
use crate::buffer::{Ingress, Memory};
use crate::event::{CE, ECT, EventKind, NetEvent};
use crate::net::Net;
use crate::sack::{SackOption, SackStore};
use crate::scheduled::Scheduled;
use crate::step::{Place, Step};
use crate::topology::PortId;
use crate::trim::TrimPort;

/// No limit on waiting packets.
pub(crate) const UNLIMITED: u32 = u32::MAX;

/// `Port::flags`: arrivals take the slow path (queue management, loss injection, byte limit).
const MANAGED: u8 = 1;
/// `Port::flags`: the length of the queue is not tracked, as it is not used.
const UNTRACKED: u8 = 2;

/// Service starts that a port stores inline; more go to a ring.
const INLINE: u32 = 6;
/// With a ring, `Port::starts` holds its offset and its head instead.
const RING: usize = 0;
const HEAD: usize = 1;

/// A FIFO port: all fields that a packet changes, in one cache line.
#[repr(C, align(64))]
#[derive(Clone, Debug, Default)]
pub(crate) struct Port {
    /// When the last accepted packet will have left, ns.
    pub(crate) busy: u64,
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
    /// Longest wait accepted, ns.
    pub(crate) wait_ns_max: u32,
    delay_ns: u32,
    class: u8,
    /// Index of the shard's `kinds`.
    kind: u8,
    /// log2 of the ring's slots; 0: no ring.
    ring_log: u8,
    flags: u8,
    /// Packets that wait, and those whose service has started since the last trim.
    len: u32,
    /// Their service starts in order, or the offset of the ring and its head.
    starts: [u32; INLINE as usize],
}

/// Fields that only drops and marks change.
#[derive(Clone, Debug, Default)]
pub(crate) struct PortRest {
    pub(crate) drops: u32,
    pub(crate) marks: u32,
    /// RED's average queue, packets.
    average: f32,
}

/// Properties of a port when it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortSpec {
    pub(crate) class: u8,
    pub(crate) delay_ns: u32,
    /// Packets that may wait, without the one in service.
    pub(crate) capacity: u32,
    /// Index of the shard's `aqms`.
    pub(crate) aqm: u8,
}

/// Storage of the ports' rings: blocks of powers of two, reused by size.
#[derive(Default)]
pub(crate) struct Rings {
    slots: Vec<u32>,
    free: Vec<Vec<u32>>,
}

/// log2 of the smallest ring.
const RING_LOG_MIN: u8 = 4;

impl Rings {
    /// Removes the packets whose service has started by `now`.
    #[inline]
    fn trim(&self, port: &mut Port, now: u64) {
        // Times wrap at 32 bits, so their difference decides. It is valid up to 2^31 ns.
        let started = |start: u32| start.wrapping_sub(low_u32(now)).cast_signed() <= 0;
        if port.ring_log == 0 {
            let len = port.len as usize;
            let gone = port.starts[..len].iter().take_while(|s| started(**s));
            let gone = gone.count();
            port.starts.copy_within(gone..len, 0);
            port.len -= to_u32(gone);
            return;
        }
        let mask = (1u32 << port.ring_log) - 1;
        while port.len > 0 {
            if !started(self.slots[(port.starts[RING] + (port.starts[HEAD] & mask)) as usize]) {
                break;
            }
            port.starts[HEAD] = port.starts[HEAD].wrapping_add(1);
            port.len -= 1;
        }
    }

    #[inline]
    fn push(&mut self, port: &mut Port, now: u64, start: u64) {
        if port.len == port.room() {
            self.make_room(port, now);
        }
        if port.ring_log == 0 {
            port.starts[port.len as usize] = low_u32(start);
        } else {
            let mask = (1u32 << port.ring_log) - 1;
            let at = port.starts[HEAD].wrapping_add(port.len) & mask;
            self.slots[(port.starts[RING] + at) as usize] = low_u32(start);
        }
        port.len += 1;
    }

    #[inline(never)]
    fn make_room(&mut self, port: &mut Port, now: u64) {
        self.trim(port, now);
        if port.len == port.room() {
            self.grow(port);
        } else if port.ring_log > 0 && port.len <= INLINE / 2 {
            // Only at half of `INLINE`, so that a queue of about that length does not alternate.
            self.leave_ring(port);
        }
    }

    fn grow(&mut self, port: &mut Port) {
        let old_log = port.ring_log;
        let log = (old_log + 1).max(RING_LOG_MIN);
        if self.free.len() <= log as usize {
            self.free.resize(log as usize + 1, Vec::new());
        }
        let ring = self.free[log as usize].pop().unwrap_or_else(|| {
            let ring = to_u32(self.slots.len());
            self.slots.resize(self.slots.len() + (1 << log), 0);
            ring
        });
        if old_log == 0 {
            let from = ring as usize;
            self.slots[from..from + INLINE as usize].copy_from_slice(&port.starts);
        } else {
            let mask = (1u32 << old_log) - 1;
            for i in 0..port.len {
                let from = port.starts[RING] + (port.starts[HEAD].wrapping_add(i) & mask);
                self.slots[(ring + i) as usize] = self.slots[from as usize];
            }
            self.free[old_log as usize].push(port.starts[RING]);
        }
        port.ring_log = log;
        (port.starts[RING], port.starts[HEAD]) = (ring, 0);
    }

    /// Moves the remaining starts from the ring back into the port.
    fn leave_ring(&mut self, port: &mut Port) {
        let [ring, head, ..] = port.starts;
        let mask = (1u32 << port.ring_log) - 1;
        for i in 0..port.len {
            port.starts[i as usize] = self.slots[(ring + (head.wrapping_add(i) & mask)) as usize];
        }
        self.free[port.ring_log as usize].push(ring);
        port.ring_log = 0;
    }
}

impl Port {
    pub(crate) fn new(kind: u8, spec: PortSpec, managed: bool) -> Port {
        let untracked = spec.capacity == UNLIMITED && !managed;
        Port {
            delay_ns: spec.delay_ns,
            class: spec.class,
            kind,
            flags: if managed { MANAGED } else { 0 } | if untracked { UNTRACKED } else { 0 },
            ..Port::default()
        }
    }

    pub(crate) fn class(&self) -> u8 {
        self.class
    }

    /// Capacity for service starts.
    #[inline]
    fn room(&self) -> u32 {
        if self.ring_log == 0 {
            INLINE
        } else {
            1 << self.ring_log
        }
    }
}

/// Counts of the packets in a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Packets submitted to a first port.
    pub(crate) sent: u64,
    /// Packets that reached their endpoint.
    pub(crate) delivered: u64,
    /// Packets that went through a port.
    pub(crate) hops: u64,
    pub(crate) data_drops: u64,
    /// Drops of ACKs and other control packets.
    pub(crate) control_drops: u64,
    /// Drops among these by loss injection or failed links.
    pub(crate) fault_drops: u64,
    pub(crate) marks: u64,
    pub(crate) trims: u64,
    pub(crate) pauses: u64,
    pub(crate) pause_refreshes: u64,
    pub(crate) returns: u64,
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
        self.pause_refreshes += other.pause_refreshes;
        self.returns += other.returns;
    }
}

/// Events for another shard, with their times, and the options of the ACKs among them in the same order.
#[derive(Debug, Default)]
pub(crate) struct Mail {
    events: Vec<(u64, NetEvent)>,
    options: Vec<SackOption>,
}

impl Mail {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }
}

/// The ports of a shard, its event queue and its outgoing mail.
pub(crate) struct ShardPorts {
    pub(crate) shard: usize,
    pub(crate) wheel: Wheel<NetEvent>,
    pub(crate) ports: Vec<Port>,
    pub(crate) port_rest: Vec<PortRest>,
    /// The distinct kinds of ports, which are few.
    pub(crate) kinds: Vec<PortSpec>,
    pub(crate) port_ids: Vec<PortId>,
    pub(crate) scheduled: Vec<Scheduled>,
    pub(crate) scheduled_ids: Vec<PortId>,
    pub(crate) trim_ports: Vec<TrimPort>,
    pub(crate) trim_ids: Vec<PortId>,
    /// Switch memories and incoming links; empty without shared buffers and PFC.
    pub(crate) memories: Vec<Memory>,
    pub(crate) ingresses: Vec<Ingress>,
    pub(crate) rings: Rings,
    /// Entry 0 is tail drop.
    pub(crate) aqms: Vec<Aqm>,
    /// Probability that a packet is lost on its way into a port.
    pub(crate) loss: f64,
    /// Options of ACKs that are in this shard.
    pub(crate) sacks: SackStore,
    /// Events for other shards, by shard.
    pub(crate) mail: Vec<Mail>,
    pub(crate) mail_first: u64,
    pub(crate) tally: Tally,
    pub(crate) seed: u64,
}

impl ShardPorts {
    /// Submits a packet to its first port.
    #[inline]
    pub(crate) fn emit(&mut self, net: &Net, now: u64, event: NetEvent) {
        self.tally.sent += 1;
        let at = event.what as usize * net.stride;
        self.enter(net, now, event, at);
    }

    /// Submits a packet to the port at `steps[at]`.
    #[inline]
    pub(crate) fn enter(&mut self, net: &Net, now: u64, event: NetEvent, at: usize) {
        match net.steps[at].place() {
            Place::Fifo => self.enter_fifo(net, now, event, at),
            Place::Scheduled => self.enter_scheduled(net, now, event, at),
            Place::Trim => self.enter_trim(net, now, event, at),
            // A path without ports has hosts on one switch whose links are not modeled. The builder
            // refuses such flows.
            place => unreachable!("a path begins with a port, not {place:?}"),
        }
    }

    #[inline]
    pub(crate) fn enter_fifo(&mut self, net: &Net, now: u64, mut event: NetEvent, at: usize) {
        let index = net.steps[at].index();
        let port = &mut self.ports[index];
        let mut start = now;
        if port.flags & !UNTRACKED != 0 {
            if !self.manage(index, net, now, &mut event) {
                return;
            }
            start = start.max(self.ports[index].busy);
        } else if port.busy > now {
            start = port.busy;
            if port.flags & UNTRACKED == 0 {
                let capacity = self.kinds[port.kind as usize].capacity;
                if port.len >= capacity {
                    // Trimmed only when the count decides about a drop.
                    self.rings.trim(port, now);
                    if port.len >= capacity {
                        self.port_rest[index].drops += 1;
                        self.count_drop(event);
                        return;
                    }
                }
                self.rings.push(port, now, start);
            }
        } else {
            // No packet waits. Starts that are kept for longer than 2^31 ns would appear to be in
            // the future.
            port.len = 0;
        }
        let port = &mut self.ports[index];
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

    /// Creates a FIFO port and returns its index.
    pub(crate) fn add_port(&mut self, id: PortId, spec: PortSpec, managed: bool) -> usize {
        let kind = self.kinds.iter().position(|k| *k == spec);
        let kind = kind.unwrap_or_else(|| {
            self.kinds.push(spec);
            self.kinds.len() - 1
        });
        // Kinds differ by tier and by whether the port is a host's, so they are few.
        let kind = u8::try_from(kind).expect("fewer than 256 kinds of ports");
        self.ports.push(Port::new(kind, spec, managed));
        self.port_rest.push(PortRest::default());
        self.port_ids.push(id);
        self.ports.len() - 1
    }

    /// Schedules the arrival at the step after `at`.
    #[inline]
    pub(crate) fn send_on(&mut self, net: &Net, arrival: u64, mut event: NetEvent, at: usize) {
        event.t = low_u32(arrival);
        event.next_hop();
        let next = net.steps[at + 1].shard();
        if next == self.shard {
            self.wheel.push(arrival, event);
        } else {
            self.post(next, arrival, event);
        }
    }

    /// Admission at a port with queue management, loss injection or a byte limit.
    fn manage(&mut self, index: usize, net: &Net, now: u64, event: &mut NetEvent) -> bool {
        let (port, rest) = (&mut self.ports[index], &mut self.port_rest[index]);
        let kind = self.kinds[port.kind as usize];
        if self.loss > 0.0 {
            let key = self.seed ^ mix::mix64(u64::from(self.port_ids[index]));
            let arrivals = port.packets + u64::from(rest.drops);
            if mix::unit(mix::draw(key, arrivals)) < self.loss {
                rest.drops += 1;
                self.tally.fault_drops += 1;
                self.count_drop(*event);
                return false;
            }
        }
        if port.busy > now {
            self.rings.trim(port, now);
        } else {
            port.len = 0;
        }
        let idle_ns = now.saturating_sub(port.busy);
        let waiting = port.len;
        let rate = net.classes[port.class as usize].bits_per_s;
        let backlog_ns = port.busy.saturating_sub(now);
        let aqm = &self.aqms[kind.aqm as usize];
        // Only the ramp counts bytes; the other rules need no 128-bit division per packet.
        let backlog = match aqm {
            Aqm::EcnRamp { .. } => {
                let bytes = u128::from(backlog_ns) * u128::from(rate) / 8_000_000_000;
                u64::try_from(bytes).unwrap_or(u64::MAX)
            }
            _ => 0,
        };
        let number = port.packets + u64::from(rest.drops);
        let draw = mix::draw(self.seed ^ u64::from(self.port_ids[index]), number);
        let arrival = crate::aqm::Arrival {
            waiting,
            backlog_bytes: backlog,
            size: event.size(),
            idle_ns,
            capacity: kind.capacity,
            packet_ns: net.serialization(u16::from(port.class), event.size()),
            draw,
        };
        let busy = port.busy > now;
        let full = busy && waiting >= kind.capacity;
        match aqm.on_arrival(arrival, &mut rest.average, event.has(ECT)) {
            _ if full => {
                rest.drops += 1;
                self.count_drop(*event);
                return false;
            }
            Verdict::Drop => {
                rest.drops += 1;
                self.count_drop(*event);
                return false;
            }
            Verdict::Mark => {
                event.meta |= CE;
                rest.marks += 1;
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

    pub(crate) fn count_drop(&mut self, event: NetEvent) {
        if event.kind() == EventKind::Data {
            self.tally.data_drops += 1;
        } else {
            self.tally.control_drops += 1;
            if event.is_sack() {
                self.sacks.take(event.seq);
            }
        }
    }

    /// Schedules an event of this shard.
    pub(crate) fn schedule(&mut self, time: u64, kind: EventKind, what: u32, seq: u32) {
        self.wheel
            .push(time, NetEvent::local(kind, time, what, seq));
    }

    /// Schedules a non-packet event at `to`, possibly in another shard. In that case `time` is at
    /// least one link delay ahead.
    pub(crate) fn deliver_local(&mut self, to: Step, time: u64, event: NetEvent) {
        if to.shard() == self.shard {
            self.wheel.push(time, event);
        } else {
            self.post(to.shard(), time, event);
        }
    }

    /// Mails an event, with its option, to another shard.
    #[inline]
    fn post(&mut self, to: usize, time: u64, event: NetEvent) {
        let mail = &mut self.mail[to];
        if event.is_sack() {
            mail.options.push(self.sacks.take(event.seq));
        }
        mail.events.push((time, event));
        self.mail_first = self.mail_first.min(time);
    }

    /// Packets in queues that are not events. (Those in FIFO ports are the events of their
    /// arrivals.)
    pub(crate) fn packets_waiting(&self) -> u64 {
        let scheduled = self.scheduled.iter().map(|p| u64::from(p.waiting()));
        let trimmed = self.trim_ports.iter().map(|p| p.waiting() as u64);
        scheduled.chain(trimmed).sum()
    }

    /// Takes mail that was written before the current window.
    pub(crate) fn receive(&mut self, mail: &mut Mail) {
        if mail.options.is_empty() {
            for (time, event) in mail.events.drain(..) {
                self.wheel.push(time, event);
            }
            return;
        }
        let mut options = mail.options.drain(..);
        for (time, mut event) in mail.events.drain(..) {
            if event.is_sack() {
                let option = options.next().expect("an option for each such event");
                event.seq = self.sacks.put(option);
            }
            self.wheel.push(time, event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port whose packets start service every `gap` ns and arrive at `times`: checks its count of
    /// waiting packets.
    fn check_waiting(gap: u64, times: &[u64]) {
        let (mut rings, mut port) = (Rings::default(), Port::default());
        let mut starts: Vec<u64> = Vec::new();
        for &now in times {
            starts.retain(|&start| start > now);
            if port.busy > now {
                let start = port.busy;
                rings.push(&mut port, now, start);
                starts.push(start);
            } else {
                port.len = 0;
            }
            port.busy = port.busy.max(now) + gap;
            let mut seen = port.clone();
            rings.trim(&mut seen, now);
            assert_eq!(seen.len as usize, starts.len(), "at {now} ns");
        }
    }

    #[test]
    fn the_count_of_waiting_packets_holds_through_bursts_and_lulls() {
        // Bursts of 1 to 100 packets, so that rings are allocated, grow and are freed; then the
        // same with times that wrap 32 bits.
        let mut times = Vec::new();
        for start in [0, (1u64 << 32) - 9_000] {
            let mut now = start;
            for burst in [1, 6, 7, 8, 100, 3, 40, 2, 2, 17, 1] {
                for _ in 0..burst {
                    now += 1;
                    times.push(now);
                }
                // Few packets that keep a short queue, then a pause that empties it.
                for _ in 0..40 {
                    now += 10;
                    times.push(now);
                }
                now += 2_000;
            }
        }
        check_waiting(10, &times);
        check_waiting(11, &times);
        check_waiting(1, &times);
    }

    #[test]
    fn rings_are_freed() {
        let (mut rings, mut port) = (Rings::default(), Port::default());
        for i in 0..20 {
            rings.push(&mut port, 0, 10 + i);
        }
        assert_eq!((port.ring_log, port.len), (5, 20));
        for i in 0..13 {
            rings.push(&mut port, 1_000, 100 + i);
        }
        // The ring held only packets that had left: the next few are stored in the port.
        assert_eq!((port.ring_log, port.len), (0, 1));
        assert_eq!(rings.free[5].len(), 1);
        assert_eq!(size_of::<Port>(), 64);
    }
}
