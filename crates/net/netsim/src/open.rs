//! A network that another simulator feeds: messages are sent at any time, over connections that are known before.
//!
//! A connection is a RoCE queue pair from one host to another. Its messages go one after another, as those of a queue
//! pair do; messages of different connections compete for ports. Other flows of the scenario may run by themselves as
//! background traffic. Links fail and are repaired as the scenario states.

use std::collections::VecDeque;

use crate::error::Error;
use crate::link::serialization_ns;
use crate::scenario::{Demand, Scenario, Transport};
use crate::sim::{Execution, Simulation};
use crate::step::Step;

/// The shortest look ahead, ns, and as a part of a packet's time: a message is reported this much late at most.
const LOOK_NS: u64 = 64;
const LOOKS_PER_PACKET: u64 = 64;
/// Flows of the scenario never start by themselves.
const NEVER_NS: u64 = 1 << 62;

/// A message that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// When its last byte came, ns.
    pub at_ns: u64,
    /// The number that it was sent with.
    pub message: u64,
}

struct Connection {
    sender: Step,
    receiver: Step,
    /// Messages with their bytes; the first one is under way.
    queue: VecDeque<(u64, u64)>,
    /// The first one was cancelled: nobody waits for what of it was sent.
    cancelled: bool,
}

/// A network whose traffic is not known in advance. It reads no clock: times never decrease from call to call.
pub struct OpenNetwork {
    simulation: Simulation,
    connections: Vec<Connection>,
    /// Connections with messages.
    busy: Vec<u32>,
    /// Rate of a host's link, bits/s.
    line_bits_per_s: u64,
    /// Payload of the largest packet, bytes.
    packet_bytes: u64,
    now_ns: u64,
    /// Indexes of background flows that have ended since [`take_ended`](OpenNetwork::take_ended).
    ended: Vec<u32>,
}

impl OpenNetwork {
    /// Each flow of `scenario` is a connection; its bytes and its start have no meaning.
    ///
    /// # Errors
    /// If a flow is not a RoCE queue pair, or the scenario cannot run.
    pub fn new(scenario: Scenario) -> Result<OpenNetwork, Error> {
        let connections = scenario.flows.len();
        OpenNetwork::with_background(scenario, connections)
    }

    /// The first `connections` flows of `scenario` are connections, as in [`new`](OpenNetwork::new). The others start at
    /// their own times, over any transport.
    ///
    /// # Errors
    /// As [`new`](OpenNetwork::new).
    pub fn with_background(
        mut scenario: Scenario,
        connections: usize,
    ) -> Result<OpenNetwork, Error> {
        for flow in scenario.flows.iter_mut().take(connections) {
            if !matches!(flow.transport, Transport::Roce(_)) {
                return Err(Error::Flow {
                    flow: flow.id,
                    what: "connections are RoCE queue pairs; give it that transport".into(),
                });
            }
            (flow.demand, flow.start_ns) = (Demand::Bytes(0), NEVER_NS);
        }
        let links = &scenario.links;
        let line_bits_per_s = links.host.unwrap_or(links.edge).bits_per_s;
        let packets = scenario.flows.iter().map(|flow| flow.packet_bytes);
        let packet_bytes = packets.max().unwrap_or(1).into();
        let mut simulation = Simulation::new(scenario, Execution::default())?;
        if simulation.shards.len() != 1 {
            return Err(Error::Value(
                "connections of a network in several parts; describe it as a graph".into(),
            ));
        }
        simulation.shards[0].arrived = Some(Vec::new());
        let ends = simulation.endpoints.iter().take(connections);
        let connections = ends.map(|&(sender, receiver)| Connection {
            sender,
            receiver,
            queue: VecDeque::new(),
            cancelled: false,
        });
        Ok(OpenNetwork {
            connections: connections.collect(),
            simulation,
            busy: Vec::new(),
            line_bits_per_s,
            packet_bytes,
            now_ns: 0,
            ended: Vec::new(),
        })
    }

    /// Indexes, among all flows of the scenario, of background flows whose last byte has arrived since the last call.
    pub fn take_ended(&mut self, out: &mut Vec<u32>) {
        out.append(&mut self.ended);
    }

    /// Packets and other events so far.
    pub fn events(&self) -> u64 {
        self.simulation.events()
    }

    /// Messages that have not arrived.
    pub fn under_way(&self) -> usize {
        let busy = self.busy.iter();
        busy.map(|&at| self.connections[at as usize].queue.len())
            .sum()
    }

    /// Bytes that have arrived in order over a connection so far.
    pub fn received(&self, connection: u32) -> u64 {
        let receiver = self.connections[connection as usize].receiver;
        self.simulation.shards[0].qp_receivers[receiver.index()].next
    }

    /// Sends `bytes`, more than 0, over a connection, behind its other messages. Call [`run`](Self::run) to `now_ns` first.
    pub fn send(&mut self, now_ns: u64, connection: u32, message: u64, bytes: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let of = &mut self.connections[connection as usize];
        of.queue.push_back((message, bytes.max(1)));
        if of.queue.len() == 1 {
            self.busy.push(connection);
            self.begin(connection);
        }
    }

    /// Takes a message back. What of it is on its way is delivered, and not reported.
    pub fn cancel(&mut self, connection: u32, message: u64) {
        let of = &mut self.connections[connection as usize];
        let Some(at) = of.queue.iter().position(|(other, _)| *other == message) else {
            return;
        };
        if at > 0 {
            of.queue.remove(at);
            return;
        }
        of.cancelled = true;
        let shard = &mut self.simulation.shards[0];
        let sent = shard.qp_senders[of.sender.index()].stop();
        if shard.qp_receivers[of.receiver.index()].stop_at(sent) {
            self.end(connection);
        }
    }

    /// The first message of a connection begins.
    fn begin(&mut self, connection: u32) {
        let Simulation { shards, net, .. } = &mut self.simulation;
        let of = &self.connections[connection as usize];
        let shard = &mut shards[0];
        let bytes = of.queue.front().expect("it has a message").1;
        shard.qp_receivers[of.receiver.index()].extend(bytes);
        let sender = &mut shard.qp_senders[of.sender.index()];
        sender.extend(self.now_ns, bytes, &mut shard.fabric, net);
    }

    /// The first message of a connection has ended: the next one begins.
    fn end(&mut self, connection: u32) -> Option<u64> {
        let of = &mut self.connections[connection as usize];
        let (message, _) = of.queue.pop_front()?;
        let cancelled = std::mem::take(&mut of.cancelled);
        if of.queue.is_empty() {
            self.busy.retain(|&other| other != connection);
        } else {
            self.begin(connection);
        }
        (!cancelled).then_some(message)
    }

    /// Runs all events up to `now_ns`, which included, and appends messages that have arrived.
    pub fn run(&mut self, now_ns: u64, out: &mut Vec<Arrived>) {
        while !self.busy.is_empty() {
            // In steps, so that messages begin when those before them end.
            let until = self.next_ns().unwrap_or(now_ns).min(now_ns);
            self.run_to(until, out);
            if until == now_ns {
                break;
            }
        }
        // Answers, timers and background traffic, or later packets would find ports out of order.
        self.run_to(now_ns, out);
    }

    /// Runs all events up to `until`, which included. No message begins in between.
    fn run_to(&mut self, until: u64, out: &mut Vec<Arrived>) {
        self.simulation.run_and_reroute(until);
        self.now_ns = self.now_ns.max(until);
        let arrived = self.simulation.shards[0].arrived.take();
        let mut arrived = arrived.unwrap_or_default();
        for (at_ns, flow) in arrived.drain(..) {
            if flow as usize >= self.connections.len() {
                self.ended.push(flow);
            } else if let Some(message) = self.end(flow) {
                out.push(Arrived { at_ns, message });
            }
        }
        self.simulation.shards[0].arrived = Some(arrived);
    }

    /// A time before which no message arrives; `None` if none is under way.
    pub fn next_ns(&self) -> Option<u64> {
        let left = |&at: &u32| {
            let receiver = self.connections[at as usize].receiver;
            self.simulation.shards[0].qp_receivers[receiver.index()].left()
        };
        let least = self.busy.iter().map(left).min()?;
        let ns = |bytes: u64| serialization_ns(bytes, self.line_bits_per_s);
        // The last link is no faster than a host's, and has a part of one packet already.
        let ahead = ns(least.saturating_sub(self.packet_bytes)).saturating_sub(1);
        let look = LOOK_NS.max(ns(self.packet_bytes) / LOOKS_PER_PACKET);
        // Nor does anything happen before the next event, such as that of a sender at a low rate.
        let wheel = &self.simulation.shards[0].fabric.wheel;
        let event = wheel.next_bucket_start().unwrap_or(NEVER_NS);
        Some((self.now_ns + ahead.max(look)).max(event))
    }
}

#[cfg(test)]
mod tests {
    use slipstream_base::width::to_u32;

    use super::*;
    use crate::aqm::Aqm;
    use crate::failure::{Failure, Target};
    use crate::link::{Link, Links};
    use crate::queueing::Discipline;
    use crate::route::Routing;
    use crate::scenario::{Flow, Paths, Queue, Roce};
    use crate::topology::{Graph, Tier, Topology};

    const MTU: u64 = 4_000;

    /// Two leaves of two hosts at 8 Gbit/s (1 byte/ns) and a spine, 100 ns per link, no headers; connections from
    /// host 0 and from host 2 to each other host.
    fn network() -> OpenNetwork {
        OpenNetwork::new(scenario(1)).unwrap()
    }

    /// The same with `spines`, nodes 2 and following.
    fn scenario(spines: u32) -> Scenario {
        let spines = 2..2 + spines;
        let edges = spines.flat_map(|spine| [(0, spine, Tier::Edge), (1, spine, Tier::Edge)]);
        let edges: Vec<_> = edges.collect();
        let topology = Graph::new(&edges, vec![0, 0, 1, 1]).unwrap();
        let link = Link {
            bits_per_s: 8_000_000_000,
            delay_ns: 100,
        };
        let pairs = [(0, 1), (0, 2), (0, 3), (2, 1), (2, 0), (2, 3)];
        let flow = |(id, (src, dst)): (u64, (u32, u32))| Flow {
            id,
            src,
            dst,
            start_ns: 0,
            demand: Demand::Bytes(1),
            transport: Transport::Roce(Roce {
                dcqcn: None,
                retry_ns: Some(1_000_000_000),
                ..Roce::default()
            }),
            paths: Paths::By(Routing::Ecmp),
            packet_bytes: 4_000,
            header_bytes: 0,
            ack_bytes: 64,
            class: 0,
            answer_class: 0,
            after: Vec::new(),
            collective: None,
        };
        Scenario {
            seed: 1,
            duration_ns: u64::MAX,
            topology: Topology::Graph(topology.with_numbered_hosts()),
            links: Links {
                host: Some(link),
                edge: link,
                core: link,
            },
            queue: Queue {
                capacity_packets: 0,
                capacity_bytes: 0,
                discipline: Discipline::Fifo,
                aqm: Aqm::TailDrop,
                loss: 0.0,
                shared: None,
                pfc: None,
                trim: None,
                priorities: [0, 1, 2, 3, 4, 5, 6, 7],
            },
            flows: (1..).zip(pairs).map(flow).collect(),
            spray_paths: 1,
            sample_ns: None,
            failures: Vec::new(),
            convergence_ns: 0,
        }
    }

    /// Arrivals until nothing is under way, by `next_ns` alone.
    fn arrivals(network: &mut OpenNetwork) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        while let Some(at) = network.next_ns() {
            network.run(at, &mut all);
        }
        assert_eq!(network.under_way(), 0);
        all.iter().map(|a| (a.at_ns, a.message)).collect()
    }

    #[test]
    fn a_message_takes_its_bytes_and_its_last_packet_on_each_further_link() {
        let mut network = network();
        network.send(1_000, 0, 7, 10 * MTU);
        assert_eq!(arrivals(&mut network), [(1_000 + 11 * MTU + 200, 7)]);
        // Much later, to the other leaf, with a shorter last packet.
        let at = 100_000_000_000;
        network.run(at, &mut Vec::new());
        network.send(at, 2, 8, 10 * MTU + 50);
        let last = at + 10 * MTU + 4 * 50 + 400;
        // Short packets overtake nothing: it waits behind the full one before it on each link.
        let behind = at + 10 * MTU + 3 * MTU + 50 + 400;
        let found = arrivals(&mut network);
        assert_eq!(found, [(behind.max(last), 8)]);
    }

    #[test]
    fn messages_of_a_connection_are_in_order_and_others_compete() {
        let mut network = network();
        network.send(0, 0, 1, 10 * MTU);
        network.send(0, 0, 2, 10 * MTU);
        let found = arrivals(&mut network);
        let first = 11 * MTU + 200;
        assert_eq!(found[0], (first, 1));
        assert_eq!(found[1].1, 2);
        assert!((first + 11 * MTU..=first + 11 * MTU + 400).contains(&found[1].0));
        // Two senders, one receiver: each has half.
        let now = 1_000_000;
        network.run(now, &mut Vec::new());
        network.send(now, 0, 3, 10 * MTU);
        network.send(now, 3, 4, 10 * MTU);
        for (at, _) in arrivals(&mut network) {
            let took = at - now;
            assert!((17 * MTU..=24 * MTU).contains(&took), "{took}");
        }
    }

    #[test]
    fn connections_of_a_host_take_turns() {
        let mut network = network();
        // All are paced by the same link: their timers expire at the same times.
        network.send(0, 0, 1, 100 * MTU);
        network.send(5 * MTU, 1, 2, 10 * MTU);
        network.send(5 * MTU, 2, 3, 10 * MTU);
        let found = arrivals(&mut network);
        let (last, first) = (found[2], found[0]);
        assert_eq!(last.1, 1);
        assert!(first.0 < 50 * MTU && last.0 > 120 * MTU, "{found:?}");
        // One that is cancelled when it waits for its turn leaves it to the next one.
        let at = network.now_ns;
        network.send(at, 0, 4, 100 * MTU);
        network.send(at, 1, 5, 10 * MTU);
        network.send(at, 2, 6, 10 * MTU);
        network.run(at + 5 * MTU, &mut Vec::new());
        network.cancel(1, 5);
        assert_eq!(arrivals(&mut network).len(), 2);
    }

    #[test]
    fn a_cancelled_message_stops_and_the_next_one_goes() {
        let mut network = network();
        network.send(0, 0, 1, 1_000 * MTU);
        network.send(0, 0, 2, MTU);
        network.send(0, 0, 3, MTU);
        let mut out = Vec::new();
        network.run(10 * MTU, &mut out);
        network.cancel(0, 1);
        network.cancel(0, 3);
        let found = arrivals(&mut network);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].1, 2);
        assert!(found[0].0 < 20 * MTU, "{found:?}");
        // Before it begins, and when all of it has been sent.
        network.send(network.now_ns, 0, 4, MTU);
        network.cancel(0, 4);
        assert_eq!(arrivals(&mut network), []);
    }

    /// The time of a message of 1,000 packets between leaves whose link to `spine` fails after 100.
    fn over_failure(spines: u32, spine: u32, repair_ns: Option<u64>) -> u64 {
        let mut scenario = scenario(spines);
        let target = Target::Link(0, spine);
        scenario.failures.push(Failure {
            target,
            at_ns: 100 * MTU,
            repair_ns,
        });
        let mut network = OpenNetwork::new(scenario).unwrap();
        network.send(0, 1, 7, 1_000 * MTU);
        arrivals(&mut network)[0].0
    }

    #[test]
    fn a_message_takes_another_path_or_waits_for_the_repair() {
        let whole = 1_003 * MTU + 400;
        // Of two spines it uses one. Packets on the way are lost, and sent again from the first gap on.
        let mut times = [2, 3].map(|spine| over_failure(2, spine, None));
        times.sort_unstable();
        assert_eq!(times[0], whole);
        assert!(
            (whole + MTU..whole + 10 * MTU).contains(&times[1]),
            "{times:?}"
        );
        // A single one: the timer expires again and again until the link is repaired.
        let repair = 2_500_000_000;
        let late = over_failure(1, 2, Some(repair));
        let retry = 1_000_000_000;
        assert!((repair..repair + retry + whole).contains(&late), "{late}");
    }

    #[test]
    fn background_flows_run_by_themselves_and_share_ports() {
        let mut scenario = scenario(1);
        let connections = scenario.flows.len();
        let beside = Flow {
            id: 100,
            src: 2,
            dst: 1,
            start_ns: 1_000_000,
            demand: Demand::Bytes(100 * MTU),
            ..scenario.flows[0].clone()
        };
        scenario.flows.push(beside);
        let mut network = OpenNetwork::with_background(scenario, connections).unwrap();
        // Before it, beside it, and behind it.
        let mut ended = Vec::new();
        for (at, least, most) in [(0, 11, 12), (1_000_000, 17, 24), (10_000_000, 11, 12)] {
            network.run(at, &mut Vec::new());
            network.send(at, 0, 1, 10 * MTU);
            let took = arrivals(&mut network)[0].0 - at;
            assert!((least * MTU..=most * MTU).contains(&took), "{at}: {took}");
            network.take_ended(&mut ended);
            assert_eq!(ended.len(), usize::from(at == 10_000_000), "{at}");
        }
        assert_eq!(ended, [to_u32(connections)]);
    }
}
