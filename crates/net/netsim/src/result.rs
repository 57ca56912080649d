//! Results of a run.

use crate::flow::FlowResult;
use slipstream_base::mix;

use crate::deadlock::Deadlock;
use crate::fabric::{ShardPorts, Tally};
use crate::series::Series;
use crate::topology::{Node, PortId};

/// Result of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortResult {
    /// The port.
    pub port: PortId,
    /// Packets accepted.
    pub packets: u64,
    /// Bytes accepted.
    pub bytes: u64,
    /// Packets dropped.
    pub drops: u64,
    /// Packets marked; at a trimming port, packets trimmed.
    pub marks: u64,
    /// Longest wait of an accepted packet, ns.
    pub wait_ns_max: u64,
    /// Maximum of waiting bytes; 0 for plain FIFO ports, which do not count bytes.
    pub waiting_bytes_max: u64,
    /// PFC pauses that the port obeyed.
    pub pauses: u64,
    /// Total time paused, ns, summed over classes.
    pub paused_ns: u64,
}

/// Memory use of a switch with shared memory or PFC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryResult {
    /// The switch.
    pub node: Node,
    /// Maximum of waiting bytes, without headroom.
    pub bytes_max: u64,
    /// Maximum of bytes in the headroom of one link and class.
    pub headroom_bytes_max: u64,
    /// Packets dropped because the memory was full.
    pub drops: u64,
    /// Pauses sent.
    pub pauses: u64,
}

/// Totals of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Events run.
    pub events: u64,
    /// Packets that went through a port.
    pub packet_hops: u64,
    /// Packets submitted to a first port.
    pub sent: u64,
    /// Packets that reached their endpoint.
    pub delivered: u64,
    /// Data packets dropped.
    pub data_drops: u64,
    /// ACKs and other control packets dropped.
    pub control_drops: u64,
    /// Drops among both by injected loss or failed links.
    pub fault_drops: u64,
    /// Packets marked.
    pub marks: u64,
    /// Packets trimmed to their header.
    pub trims: u64,
    /// Headers returned to their senders.
    pub returns: u64,
    /// PFC pauses.
    pub pauses: u64,
    /// Frames that refreshed a pause.
    pub pause_refreshes: u64,
    /// Time of the last event, ns.
    pub last_event_ns: u64,
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunResult {
    /// Totals.
    pub totals: Totals,
    /// By flow, in the scenario's order.
    pub flows: Vec<FlowResult>,
    /// By port, of those that were used.
    pub ports: Vec<PortResult>,
    /// By switch, if memory is shared or links are paused.
    pub memories: Vec<MemoryResult>,
    /// A cycle of links that PFC paused forever; the run ended there.
    pub deadlock: Option<Deadlock>,
    /// Samples over time, if requested.
    pub series: Option<Series>,
    /// By flow: its completion time alone on its path at line rate, ns.
    pub ideal_ns: Vec<u64>,
    /// By flow: the time of a full packet over its idle path, ns.
    pub path_ns: Vec<u64>,
    /// A fingerprint of all of the above: equal runs have equal digests, on any number of threads.
    pub digest: u64,
}

/// Results of all components of a run, before totals.
pub(crate) struct Collected {
    pub(crate) tally: Tally,
    pub(crate) events: u64,
    pub(crate) last_event_ns: u64,
    pub(crate) flows: Vec<FlowResult>,
    pub(crate) ports: Vec<PortResult>,
    pub(crate) memories: Vec<MemoryResult>,
    pub(crate) deadlock: Option<Deadlock>,
    pub(crate) series: Option<Series>,
    pub(crate) ideal_ns: Vec<u64>,
    pub(crate) path_ns: Vec<u64>,
}

impl RunResult {
    pub(crate) fn new(c: Collected) -> Self {
        let Collected {
            tally,
            flows,
            ports,
            memories,
            ..
        } = c;
        let totals = Totals {
            events: c.events,
            packet_hops: tally.hops,
            sent: tally.sent,
            delivered: tally.delivered,
            data_drops: tally.data_drops,
            control_drops: tally.control_drops,
            fault_drops: tally.fault_drops,
            marks: tally.marks,
            trims: tally.trims,
            pauses: tally.pauses,
            pause_refreshes: tally.pause_refreshes,
            returns: tally.returns,
            last_event_ns: c.last_event_ns,
        };
        let digest = digest(&totals, &flows, &ports, &memories);
        RunResult {
            totals,
            flows,
            ports,
            memories,
            deadlock: c.deadlock,
            series: c.series,
            ideal_ns: c.ideal_ns,
            path_ns: c.path_ns,
            digest,
        }
    }

    /// Packets still in flight: sent, neither delivered nor dropped.
    pub fn in_flight(&self) -> u64 {
        let t = &self.totals;
        t.sent - t.delivered - t.data_drops - t.control_drops
    }

    /// The first conservation law that the results violate; `None` if all hold.
    ///
    /// Totals, flows and ports are counted in different places, so the laws reveal a packet or byte
    /// that one of them misses.
    pub fn broken_law(&self) -> Option<String> {
        let t = &self.totals;
        let drops = t.data_drops + t.control_drops;
        let sum = |of: fn(&FlowResult) -> u64| self.flows.iter().map(of).sum::<u64>();
        let (sent, received) = (sum(|f| f.packets_sent), sum(|f| f.packets_received));
        let hops: u64 = self.ports.iter().map(|p| p.packets).sum();
        let port_drops: u64 = self.ports.iter().map(|p| p.drops).sum();
        let law = |holds: bool, what: &str| (!holds).then(|| what.to_owned());
        law(
            t.sent >= t.delivered + drops,
            "more packets were delivered and dropped than sent",
        )
        .or_else(|| {
            law(
                t.sent >= sent,
                "flows sent more packets than the network received",
            )
        })
        .or_else(|| {
            law(
                sent >= received + t.data_drops,
                "more data packets arrived and were dropped than flows sent",
            )
        })
        .or_else(|| {
            // A trimmed packet is answered, but does not count as received.
            let settled = t.trims == 0 && t.sent == t.delivered + drops;
            law(
                !settled || sent == received + t.data_drops,
                "a data packet neither arrived nor was dropped",
            )
        })
        .or_else(|| {
            law(
                hops == t.packet_hops,
                "ports carried other packets than were counted",
            )
        })
        .or_else(|| {
            // Failed links lose packets outside of ports.
            let at_ports = drops.saturating_sub(t.fault_drops)..=drops;
            law(
                at_ports.contains(&port_drops),
                "ports dropped other packets than were counted",
            )
        })
        .or_else(|| self.flows.iter().find_map(FlowResult::broken_law))
    }
}

fn digest(
    totals: &Totals,
    flows: &[FlowResult],
    ports: &[PortResult],
    memories: &[MemoryResult],
) -> u64 {
    let mut state = 0u64;
    let mut add = |x: u64| state = mix::mix64(state.rotate_left(5) ^ x);
    add_totals(totals, &mut add);
    for flow in flows {
        add_flow(flow, &mut add);
    }
    for p in ports {
        for x in [
            u64::from(p.port),
            p.packets,
            p.bytes,
            p.drops,
            p.marks,
            p.wait_ns_max,
        ] {
            add(x);
        }
        add_set([p.waiting_bytes_max, p.pauses, p.paused_ns], &mut add);
    }
    for m in memories {
        for x in [
            u64::from(m.node),
            m.bytes_max,
            m.headroom_bytes_max,
            m.drops,
            m.pauses,
        ] {
            add(x);
        }
    }
    state
}

/// Adds the values that are not zero: digests of runs without them stay the same.
fn add_set<const N: usize>(values: [u64; N], add: &mut impl FnMut(u64)) {
    values.into_iter().filter(|&x| x != 0).for_each(add);
}

fn add_totals(totals: &Totals, add: &mut impl FnMut(u64)) {
    for x in [
        totals.events,
        totals.packet_hops,
        totals.sent,
        totals.delivered,
        totals.data_drops,
        totals.control_drops,
        totals.marks,
        totals.trims,
        totals.pauses,
        totals.last_event_ns,
    ] {
        add(x);
    }
    add_set([totals.pause_refreshes, totals.returns], add);
}

fn add_flow(f: &FlowResult, add: &mut impl FnMut(u64)) {
    for x in [
        f.id,
        f.start_ns,
        f.delivered_ns.unwrap_or(u64::MAX),
        f.acked_ns.unwrap_or(u64::MAX),
        f.bytes_acked,
        f.packets_sent,
        f.bytes_sent,
        f.retransmitted,
        f.acks,
        u64::from(f.fast_retransmits),
        u64::from(f.timeouts),
        f.cwnd,
        f.ssthresh,
        f.packets_received,
        f.last_ns,
    ] {
        add(x);
    }
    let rate = f.rate_bits_per_s.map_or(0, f64::to_bits);
    add_set([f.nacks, f.notifications, rate], add);
}

impl ShardPorts {
    pub(crate) fn port_results(&self) -> Vec<PortResult> {
        self.ports
            .iter()
            .zip(&self.port_rest)
            .zip(&self.port_ids)
            .map(|((p, rest), &port)| PortResult {
                port,
                packets: p.packets,
                bytes: p.bytes,
                drops: u64::from(rest.drops),
                marks: u64::from(rest.marks),
                wait_ns_max: u64::from(p.wait_ns_max),
                waiting_bytes_max: 0,
                pauses: 0,
                paused_ns: 0,
            })
            .chain(
                self.scheduled
                    .iter()
                    .zip(&self.scheduled_ids)
                    .map(|(p, &port)| PortResult {
                        port,
                        packets: p.packets,
                        bytes: p.bytes,
                        drops: p.drops,
                        marks: p.marks,
                        wait_ns_max: p.wait_ns_max,
                        waiting_bytes_max: p.waiting_bytes_max,
                        pauses: p.pauses,
                        paused_ns: p.paused_ns,
                    }),
            )
            .chain(
                self.trim_ports
                    .iter()
                    .zip(&self.trim_ids)
                    .map(|(p, &port)| PortResult {
                        port,
                        packets: p.packets,
                        bytes: p.bytes,
                        drops: u64::from(p.drops),
                        marks: u64::from(p.trims),
                        wait_ns_max: u64::from(p.wait_ns_max),
                        waiting_bytes_max: p.waiting_bytes_max,
                        pauses: 0,
                        paused_ns: 0,
                    }),
            )
            .collect()
    }

    /// In order of creation; the caller sorts by switch.
    pub(crate) fn memory_results(&self) -> Vec<MemoryResult> {
        let mut results: Vec<MemoryResult> = self
            .memories
            .iter()
            .map(|m| MemoryResult {
                node: m.node,
                bytes_max: m.used_max,
                headroom_bytes_max: 0,
                drops: m.drops,
                pauses: 0,
            })
            .collect();
        for ingress in &self.ingresses {
            let of = &mut results[ingress.memory()];
            of.headroom_bytes_max = of.headroom_bytes_max.max(ingress.over_max);
            of.pauses += ingress.pauses;
        }
        results
    }
}
