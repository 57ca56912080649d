//! The default timeouts of queue pairs and of NDP: longer than the round trip of a packet and its
//! answer without loss.
//!
//! InfiniBand leaves the timeout to the fabric's administrator. It has to exceed the packet's
//! lifetime in both directions and the responder's delay (InfiniBand Architecture Specification
//! volume 1, section 9.7.6.1.3: Local ACK Timeout, 4.096 us times a power of two). A shorter
//! timeout retransmits packets that are not lost.

use slipstream_base::width::{floor_u64, to_u32};

use crate::link::{LinkClass, serialization_ns};
use crate::queueing::Discipline;
use crate::scenario::{Flow, Ndp, Roce, Scenario, Transport};
use crate::topology::{End, PortId, link_class};

/// InfiniBand's unit, ns, and the largest exponent of its five bits.
const UNIT_NS: u64 = 4_096;
const EXPONENT_MAX: u32 = 31;

/// Receives a path.
pub(crate) type PathVisitor<'a> = dyn FnMut(&[PortId]) + 'a;

/// Bytes that may be queued before a packet, by port and by group of flows that share ports.
pub(crate) struct QueueBounds<'a> {
    scenario: &'a Scenario,
    /// Largest packet on the wire, bytes.
    size_max: u64,
    /// By tier: hosts' links, edge, core.
    classes: &'a [LinkClass],
    /// By port.
    uses: Vec<PortUse>,
    /// With PFC: union-find over ports that a flow connects.
    parent: Vec<PortId>,
    /// With PFC, by root of a group: the total bytes of its flows, and the slowest link.
    groups: Vec<(u64, u64)>,
}

/// The flows over a port.
#[derive(Clone, Copy, Debug, Default)]
struct PortUse {
    flows: u64,
    /// The flow that was counted last, plus one: each flow counts once, over all its paths.
    last: u32,
    /// Data of all of them with headers, and their answers, bytes.
    bytes: u64,
    /// Maximum packets per answer.
    ack_every: u64,
    /// A flow that submits packets without waiting for the host's port.
    pushes: bool,
}

impl<'a> QueueBounds<'a> {
    /// `paths` visits the paths of a flow, in both directions.
    pub(crate) fn new(
        scenario: &'a Scenario,
        classes: &'a [LinkClass],
        size_max: u64,
        flows: &[Flow],
        paths: &dyn Fn(usize, &mut PathVisitor<'_>),
    ) -> Self {
        let ports = scenario.topology.port_count();
        let mut bounds = QueueBounds {
            scenario,
            size_max,
            classes,
            uses: vec![PortUse::default(); ports as usize],
            parent: Vec::new(),
            groups: Vec::new(),
        };
        for (i, flow) in flows.iter().enumerate() {
            let bytes = wire_bytes(flow);
            paths(i, &mut |path| {
                for &port in path {
                    bounds.uses[port as usize].add(to_u32(i) + 1, flow, bytes);
                }
            });
        }
        if scenario.queue.pfc.is_some() {
            bounds.group(flows, paths);
        }
        bounds
    }

    /// Finds the groups of flows that share ports, directly or through others.
    fn group(&mut self, flows: &[Flow], paths: &dyn Fn(usize, &mut PathVisitor<'_>)) {
        let ports = self.scenario.topology.port_count();
        self.parent = (0..ports).collect();
        self.groups = vec![(0, u64::MAX); ports as usize];
        for i in 0..flows.len() {
            let mut first = None;
            paths(i, &mut |path| {
                for &port in path {
                    self.join(*first.get_or_insert(port), port);
                }
            });
        }
        for port in 0..ports {
            self.parent[port as usize] = self.root(port);
        }
        for (i, flow) in flows.iter().enumerate() {
            let bytes = wire_bytes(flow);
            let mut counted = false;
            paths(i, &mut |path| {
                for &port in path {
                    let root = self.root(port) as usize;
                    let rate = self.class(port).bits_per_s;
                    let group = &mut self.groups[root];
                    if !counted {
                        group.0 = group.0.saturating_add(bytes);
                        counted = true;
                    }
                    group.1 = group.1.min(rate);
                }
            });
        }
    }

    /// The timeout of a queue pair over `paths`, both directions, ns.
    pub(crate) fn queue_pair_ns(
        &self,
        flow: &Flow,
        roce: &Roce,
        paths: &dyn Fn(&mut PathVisitor<'_>),
    ) -> u64 {
        // Time until the receiver answers, at the sender's lowest rate.
        let wire = u64::from(flow.packet_bytes + flow.header_bytes);
        let first = self.classes[usize::from(self.scenario.links.host.is_none())];
        let rate = roce
            .dcqcn
            .map_or(first.bits_per_s, |d| floor_u64(d.rate_bits_per_s_min));
        let burst = wire.saturating_mul(u64::from(roce.ack_every));
        let answer = drain_ns(burst, rate.max(1));
        round_up(self.round_trip_ns(paths).saturating_add(answer))
    }

    /// The timeout of an NDP flow over `paths`, ns.
    pub(crate) fn ndp_ns(&self, paths: &dyn Fn(&mut PathVisitor<'_>)) -> u64 {
        // The receiver's host pulls one packet of each flow in turn, at the rate of its link.
        let mut turn = 0;
        paths(&mut |path| {
            for &port in path {
                let packets = self.uses[port as usize].flows.saturating_mul(self.size_max);
                turn = turn.max(drain_ns(packets, self.class(port).bits_per_s));
            }
        });
        self.round_trip_ns(paths)
            .saturating_add(turn)
            .max(Ndp::RETRY_NS_MIN)
    }

    /// The maximum time of a packet and its answer over `paths`, ns.
    fn round_trip_ns(&self, paths: &dyn Fn(&mut PathVisitor<'_>)) -> u64 {
        // A packet takes one of several paths, and any may be the slowest.
        let mut slowest = 0u64;
        let mut group = None;
        paths(&mut |path| {
            let time = path.iter().map(|&p| self.hop_ns(p));
            slowest = slowest.max(time.fold(0, u64::saturating_add));
            group = group.or(path.first().copied());
        });
        let mut time = slowest.saturating_mul(2);
        if let Some(port) = group
            && self.scenario.queue.pfc.is_some()
        {
            // A pause propagates back through the network. So a packet may wait for any packet that
            // shares a link with it, directly or through others. All their bytes drain at least at
            // the rate of the slowest link.
            let (bytes, rate) = self.groups[self.root(port) as usize];
            time = time.saturating_add(drain_ns(bytes, rate).saturating_mul(2));
        }
        time
    }

    /// Serialization, propagation, and the packets that may be queued before one at a port.
    fn hop_ns(&self, port: PortId) -> u64 {
        let link = self.class(port);
        let own = serialization_ns(self.size_max, link.bits_per_s) + link.delay_ns;
        // The packet in service.
        let wait = self.size_max.saturating_add(self.waiting_bytes(port));
        own.saturating_add(drain_ns(wait, link.bits_per_s))
    }

    /// Bytes that may wait at a port whose link is not paused.
    fn waiting_bytes(&self, port: PortId) -> u64 {
        let of = self.uses[port as usize];
        let queue = &self.scenario.queue;
        if matches!(self.scenario.topology.port_ends(port).0, End::Host(_)) {
            // Queue pairs submit one packet each in turn; other flows submit all their data.
            let turns = of.flows.saturating_mul(of.ack_every.max(1));
            return if of.pushes {
                of.bytes
            } else {
                of.bytes.min(turns.saturating_mul(self.size_max))
            };
        }
        if queue.discipline != Discipline::Fifo || queue.pfc.is_some() {
            // A class may wait for all others. With PFC the group's bytes are counted instead.
            return if queue.pfc.is_some() { 0 } else { of.bytes };
        }
        let mut limit = of.bytes;
        if let Some(trim) = queue.trim {
            let headers = u64::from(trim.header_packets) * u64::from(trim.header_bytes);
            limit = limit.min(u64::from(trim.data_packets) * self.size_max + headers);
        }
        if queue.capacity_packets > 0 {
            limit = limit.min(u64::from(queue.capacity_packets).saturating_mul(self.size_max));
        }
        if queue.capacity_bytes > 0 {
            limit = limit.min(queue.capacity_bytes);
        }
        queue.shared.map_or(limit, |shared| limit.min(shared.bytes))
    }

    fn class(&self, port: PortId) -> LinkClass {
        self.classes[link_class(&self.scenario.topology, port) as usize]
    }

    fn root(&self, mut port: PortId) -> PortId {
        while self.parent[port as usize] != port {
            port = self.parent[port as usize];
        }
        port
    }

    fn join(&mut self, a: PortId, b: PortId) {
        let (from, to) = (self.root(a), self.root(b));
        self.parent[from as usize] = to;
        // Path compression.
        self.parent[a as usize] = to;
        self.parent[b as usize] = to;
    }
}

impl PortUse {
    fn add(&mut self, number: u32, flow: &Flow, bytes: u64) {
        if self.last == number {
            return;
        }
        self.last = number;
        self.flows += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        match flow.transport {
            Transport::Roce(roce) => self.ack_every = self.ack_every.max(roce.ack_every.into()),
            _ => self.pushes = true,
        }
    }
}

/// Data of a flow with headers, and one answer per packet; `u64::MAX` if its size is unknown.
fn wire_bytes(flow: &Flow) -> u64 {
    let Some(bytes) = flow.demand.bytes() else {
        return u64::MAX;
    };
    let packets = bytes.div_ceil(u64::from(flow.packet_bytes.max(1)));
    let each = u64::from(flow.header_bytes) + u64::from(flow.ack_bytes);
    bytes.saturating_add(packets.saturating_mul(each))
}

/// Time of `bytes` on a link, at most 2^63 ns.
fn drain_ns(bytes: u64, bits_per_s: u64) -> u64 {
    let ns = u128::from(bytes) * 8_000_000_000 / u128::from(bits_per_s) + 1;
    u64::try_from(ns).unwrap_or(u64::MAX).min(1 << 63)
}

/// Rounds up to InfiniBand's next timeout.
fn round_up(ns: u64) -> u64 {
    let exponent = ns.div_ceil(UNIT_NS).max(2).next_power_of_two().ilog2();
    UNIT_NS << exponent.min(EXPONENT_MAX)
}
