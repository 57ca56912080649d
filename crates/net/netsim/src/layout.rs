//! Sets up a run: shards, ports, paths and endpoints. Validates the scenario.

use crate::net::{Net, Rows};
use crate::queueing;
use crate::topology::{End, PortId, Tier, Topology, link_class};
use std::collections::{BTreeSet, HashMap};

use slipstream_base::mix;
use slipstream_base::width::to_u32;
use slipstream_des::Wheel;

use crate::aqm::Aqm;
use crate::buffer::{Ingress, Memory, NO_SWITCH};
use crate::error::Error;
use crate::event::{EventKind, HOPS_MAX, SIZE_MAX};
use crate::fabric::{PortSpec, Rings, ShardPorts, Tally, UNLIMITED};
use crate::failure::{Outages, epochs};
use crate::link::{Link, LinkClass, serialization_ns};
use crate::queueing::{Discipline, NO_INGRESS, PAUSE_BYTES, Rules};
use crate::retry::{PathVisitor, QueueBounds};
use crate::route::{Router, Routing};
use crate::scenario::{Arrivals, Demand, Dist, Finished, Flow, Paths, Scenario, Transport};
use crate::scheduled::{PortLimits, Scheduled};
use crate::series::Sampler;
use crate::shard::Shard;
use crate::sim::{Execution, Simulation};
use crate::step::{INDEX_MAX, Place, SHARDS_MAX, Step};
use crate::transport::congestion::Control;
use crate::transport::ndp::{NdpReceiver, NdpSender, NdpSetup, Pacer};
use crate::transport::raw::{RawReceiver, RawSender};
use crate::transport::roce::{QpReceiver, QpSender, QpSetup};
use crate::transport::tcp::{TcpReceiver, TcpSender, TcpSetup, initial_timeout_ns};
use crate::transport::{EndSetup, Paced};
use crate::trim::TrimPort;

/// Minimum average events per shard and window for which shards pay off; below, one shard's single
/// queue is faster than many nearly empty ones. Chosen by `make bench-net`: f32 has 1 event per
/// window in total, E5 has thousands.
const EVENTS_PER_SHARD_WINDOW: f64 = 16.0;

pub(crate) struct Builder {
    scenario: Scenario,
    execution: Execution,
    shards: u32,
    lookahead_ns: u64,
    net: Net,
    fabrics: Vec<ShardPorts>,
    /// Index of each port plus one; 0: not created yet.
    port_steps: Vec<u32>,
    /// Whether all ports of a switch are in one shard, because switches share memory, pause their
    /// neighbors or return packets.
    whole_switches: bool,
    /// Whether hosts' ports serve their senders in turn.
    host_turns: bool,
    /// Index of a switch's memory in its shard, plus one; 0: not created yet.
    memory_of: Vec<u32>,
    /// Index of the ingress that a port leads to, plus one; 0: not created yet.
    ingress_of: Vec<u32>,
}

impl Builder {
    pub(crate) fn new(scenario: Scenario, execution: Execution) -> Result<Self, Error> {
        check_values(&scenario)?;
        let links = &scenario.links;
        let tiers = [links.host.unwrap_or(links.edge), links.edge, links.core];
        let classes: Vec<LinkClass> = tiers
            .iter()
            .chain(scenario.topology.own_links())
            .map(|l| LinkClass {
                bits_per_s: l.bits_per_s,
                delay_ns: l.delay_ns,
            })
            .collect();
        let largest = |f: &Flow| f.packet_bytes + f.header_bytes;
        let trimmed = scenario.queue.trim.map(|t| t.header_bytes);
        let size_max = scenario
            .flows
            .iter()
            .map(|f| largest(f).max(f.ack_bytes))
            .max()
            .unwrap_or(0)
            .max(64)
            .max(trimmed.unwrap_or(0));
        let size_min = scenario
            .flows
            .iter()
            .map(|f| (f.header_bytes + 1).min(f.ack_bytes))
            .min()
            .unwrap_or(64)
            .min(to_u32(PAUSE_BYTES))
            .min(trimmed.unwrap_or(u32::MAX));
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
        // Buckets narrower than every usual hop (a shorter one costs a heap insertion), but not so
        // narrow that most are empty; 256 ns was the best of 64 to 512 on E5.
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
        let queue = &scenario.queue;
        let whole_switches = queue.shared.is_some()
            || queue.pfc.is_some()
            || queue.trim.is_some_and(|t| t.return_to_sender);
        let mut net = Net::new(1, size_max, classes, discipline);
        net.trim = queue.trim.unwrap_or_default();
        net.rules = rules(&scenario, &net.classes, size_max);
        let roce = |f: &Flow| matches!(f.transport, Transport::Roce(_));
        let host_turns = queue.pfc.is_some() || scenario.flows.iter().any(roce);
        let fabrics = (0..shards)
            .map(|shard| ShardPorts {
                shard: shard as usize,
                wheel: Wheel::new(shift),
                ports: Vec::new(),
                port_rest: Vec::new(),
                kinds: Vec::new(),
                port_ids: Vec::new(),
                scheduled: Vec::new(),
                scheduled_ids: Vec::new(),
                trim_ports: Vec::new(),
                trim_ids: Vec::new(),
                memories: Vec::new(),
                ingresses: Vec::new(),
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
            whole_switches,
            host_turns,
            memory_of: if whole_switches {
                vec![0; scenario.topology.node_count() as usize]
            } else {
                Vec::new()
            },
            ingress_of: if whole_switches {
                vec![0; scenario.topology.port_count() as usize]
            } else {
                Vec::new()
            },
            scenario,
            execution,
            shards,
            lookahead_ns: between,
            net,
            fabrics,
        })
    }

    pub(crate) fn build(mut self) -> Result<Simulation, Error> {
        let flows = std::mem::take(&mut self.scenario.flows);
        check_dependencies(&flows)?;
        let mut shards: Vec<Shard> = Vec::new();
        let mut endpoints = Vec::with_capacity(flows.len());
        // Endpoints created so far, by shard and kind.
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
                Transport::Roce(_) => (Place::QpSender, Place::QpReceiver),
                Transport::Ndp(_) => (Place::NdpSender, Place::NdpReceiver),
                Transport::Packets => (Place::RawSender, Place::RawReceiver),
                Transport::Other(_) => (Place::OtherSender, Place::OtherReceiver),
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
        let PathLayout {
            rows,
            reroutes,
            timeouts,
        } = self.lay_paths(&flows, &endpoints)?;
        for fabric in std::mem::take(&mut self.fabrics) {
            shards.push(Shard {
                fabric,
                tcp_senders: Vec::new(),
                tcp_receivers: Vec::new(),
                qp_senders: Vec::new(),
                qp_receivers: Vec::new(),
                ndp_senders: Vec::new(),
                ndp_receivers: Vec::new(),
                pacers: Vec::new(),
                raw_senders: Vec::new(),
                raw_receivers: Vec::new(),
                other_senders: Vec::new(),
                other_receivers: Vec::new(),
                successors: HashMap::new(),
                waiting: HashMap::new(),
                arrived: None,
                now: 0,
                events: 0,
            });
        }
        let mut maker = EndpointMaker {
            scenario: &self.scenario,
            net: &self.net,
            timeouts: &timeouts,
            pacer_of: HashMap::new(),
        };
        for (i, flow) in flows.iter().enumerate() {
            let (sender, receiver) = endpoints[i];
            maker.add(&mut shards, to_u32(i), flow, (sender, receiver), rows[i]);
            let shard = &mut shards[sender.shard()];
            if flow.after.is_empty() {
                shard
                    .fabric
                    .schedule(flow.start_ns, EventKind::Start, sender.0, 0);
            } else {
                shard
                    .waiting
                    .insert(sender.0, (to_u32(flow.after.len()), flow.start_ns));
                for after in &flow.after {
                    let until = after.until.of(&flows[after.flow as usize]);
                    shard
                        .successors
                        .entry((after.flow, until))
                        .or_default()
                        .push((sender, after.delay_ns));
                }
            }
        }
        self.scenario.flows = flows;
        let sampler = self
            .scenario
            .sample_ns
            .map(|interval| Sampler::new(interval, &shards, &self.scenario.topology));
        Ok(Simulation {
            scenario: self.scenario,
            net: self.net,
            shards,
            endpoints,
            rows: rows.iter().map(|pair| pair[0].first).collect(),
            lookahead_ns: self.lookahead_ns,
            windows: 0,
            crowded: false,
            threads: 1,
            reroutes,
            rerouted: 0,
            sampler,
            deadlock: None,
        })
    }

    /// Whether switches count the bytes in their memory.
    fn counts_memory(&self) -> bool {
        self.scenario.queue.shared.is_some() || self.scenario.queue.pfc.is_some()
    }

    fn shard_of_host(&self, host: u32) -> u32 {
        if self.shards == 1 {
            0
        } else {
            self.scenario.topology.part_of_host(host) % self.shards
        }
    }

    /// Finds the paths of every flow, creates the ports on them, and fills the path table. Flows
    /// whose paths change after a failure have additional rows, with the times from which they
    /// apply.
    fn lay_paths(
        &mut self,
        flows: &[Flow],
        endpoints: &[(Step, Step)],
    ) -> Result<PathLayout, Error> {
        let topology = self.scenario.topology.clone();
        let host_links = self.scenario.links.host.is_some();
        let none = BTreeSet::new();
        let mut router = Router::new(&topology, &none, host_links);
        let mut found = PathStore::new(flows.len(), self.execution.memory_bytes_max);
        let mut rows = Vec::with_capacity(flows.len());
        for flow in flows {
            let mut pair = [Rows::default(); 2];
            for (direction, rows) in pair.iter_mut().enumerate() {
                *rows = found
                    .find(&self.scenario, &mut router, flow, direction)?
                    .ok_or_else(|| disconnected(flow, &topology))?;
            }
            rows.push(pair);
        }
        let timeouts = self.find_timeouts(flows, &rows, &found);
        let reroutes = self.find_reroutes(flows, &rows, &mut found)?;
        self.net.stride = found.longest + 1;
        self.check_memory(flows, found.ends.len())?;
        self.net.steps = Vec::with_capacity(found.ends.len() * self.net.stride);
        let first = rows.iter().enumerate().map(|(i, pair)| (i, *pair));
        let later = reroutes.iter().map(|r| (r.flow as usize, r.rows));
        let mut steps = Vec::with_capacity(self.net.stride);
        for (i, pair) in first.chain(later) {
            let (sender, receiver) = endpoints[i];
            for (direction, rows) in pair.iter().enumerate() {
                let class = if direction == 0 {
                    flows[i].class
                } else {
                    flows[i].answer_class
                };
                for row in rows.first..rows.first + rows.count {
                    let path = found.path(row);
                    steps.clear();
                    for &port in path {
                        let step = self.port_step(port)?;
                        steps.push(step);
                    }
                    steps.push(if direction == 0 { receiver } else { sender });
                    self.net.row_class.push(class);
                    let made = self.net.add_row(&steps);
                    debug_assert_eq!(made, row);
                    if self.counts_memory() {
                        self.add_ingresses(path, &steps);
                    }
                }
            }
        }
        self.lay_reverse_paths(flows, endpoints, &rows, &reroutes, &found)?;
        self.note_outages()?;
        Ok(PathLayout {
            rows,
            reroutes,
            timeouts,
        })
    }

    /// By flow: the default timeout of a queue pair or an NDP flow, the first timeout of a TCP flow,
    /// ns. Empty if there are no such flows.
    fn find_timeouts(&self, flows: &[Flow], rows: &[[Rows; 2]], found: &PathStore) -> Vec<u64> {
        let from_queues = |flow: &Flow| match flow.transport {
            Transport::Roce(roce) => roce.retry_ns.is_none(),
            Transport::Ndp(ndp) => ndp.retry_ns.is_none(),
            _ => false,
        };
        let is_tcp = |flow: &Flow| matches!(flow.transport, Transport::Tcp(_));
        let by_queues = flows.iter().any(from_queues);
        if !by_queues && !flows.iter().any(is_tcp) {
            return Vec::new();
        }
        let paths = |flow: usize, visit: &mut PathVisitor<'_>| {
            for rows in rows[flow] {
                for row in rows.first..rows.first + rows.count {
                    visit(found.path(row));
                }
            }
        };
        let (classes, size_max) = (&self.net.classes, self.net.sizes as u64 - 1);
        let bounds =
            by_queues.then(|| QueueBounds::new(&self.scenario, classes, size_max, flows, &paths));
        let timeout = |(i, flow): (usize, &Flow)| match (&flow.transport, &bounds) {
            (Transport::Tcp(tcp), _) => tcp.rto_ns_initial.unwrap_or_else(|| {
                initial_timeout_ns(self.handshake_ns(flow, rows[i], found), tcp.rto_ns_min)
            }),
            (Transport::Roce(roce), Some(bounds)) => {
                bounds.queue_pair_ns(flow, roce, &|visit| paths(i, visit))
            }
            (Transport::Ndp(_), Some(bounds)) => bounds.ndp_ns(&|visit| paths(i, visit)),
            _ => 0,
        };
        flows.iter().enumerate().map(timeout).collect()
    }

    /// The time of a packet without data and its answer over a flow's idle first paths, ns: what a
    /// handshake would measure.
    fn handshake_ns(&self, flow: &Flow, rows: [Rows; 2], found: &PathStore) -> u64 {
        let ports = rows.iter().flat_map(|rows| found.path(rows.first));
        let hop = |&port: &PortId| {
            let link = self.net.classes[link_class(&self.scenario.topology, port) as usize];
            link.delay_ns + serialization_ns(u64::from(flow.ack_bytes), link.bits_per_s)
        };
        ports.map(hop).sum()
    }

    /// Adds the reverse path, over the same links, of each path whose data switches may trim.
    fn lay_reverse_paths(
        &mut self,
        flows: &[Flow],
        endpoints: &[(Step, Step)],
        rows: &[[Rows; 2]],
        reroutes: &[Reroute],
        found: &PathStore,
    ) -> Result<(), Error> {
        if !self.net.trim.return_to_sender || self.scenario.queue.trim.is_none() {
            return Ok(());
        }
        let first = rows.iter().enumerate().map(|(i, pair)| (i, pair[0]));
        let later = reroutes.iter().map(|r| (r.flow as usize, r.rows[0]));
        self.net.back = vec![(0, 0); found.ends.len()];
        let mut steps = Vec::with_capacity(self.net.stride);
        for (i, rows) in first.chain(later) {
            if !matches!(flows[i].transport, Transport::Ndp(_)) {
                continue;
            }
            for row in rows.first..rows.first + rows.count {
                let path = found.path(row);
                steps.clear();
                for &port in path.iter().rev() {
                    let opposite = self.scenario.topology.opposite(port);
                    steps.push(self.port_step(opposite)?);
                }
                steps.push(endpoints[i].0);
                self.net.row_class.push(flows[i].answer_class);
                let back = self.net.add_row(&steps);
                self.net.back[row as usize] = (back, to_u32(path.len()));
            }
        }
        Ok(())
    }

    /// The paths that flows take after each failure and repair, if they differ. A flow without a
    /// path keeps its old one, where its packets are lost.
    fn find_reroutes(
        &self,
        flows: &[Flow],
        rows: &[[Rows; 2]],
        found: &mut PathStore,
    ) -> Result<Vec<Reroute>, Error> {
        let scenario = &self.scenario;
        let mut reroutes = Vec::new();
        let mut current = rows.to_vec();
        for (at_ns, down) in epochs(
            &scenario.failures,
            scenario.convergence_ns,
            &scenario.topology,
        )? {
            let host_links = scenario.links.host.is_some();
            let mut router = Router::new(&scenario.topology, &down, host_links);
            for (i, flow) in flows.iter().enumerate() {
                if matches!(flow.paths, Paths::Explicit(_)) {
                    continue;
                }
                let mark = (found.ports.len(), found.ends.len());
                let mut pair = current[i];
                let mut changed = false;
                for (direction, rows) in pair.iter_mut().enumerate() {
                    let Some(new) = found.find(scenario, &mut router, flow, direction)? else {
                        changed = false;
                        break;
                    };
                    changed |= !found.same(*rows, new);
                    *rows = new;
                }
                if changed {
                    current[i] = pair;
                    reroutes.push(Reroute {
                        at_ns,
                        flow: to_u32(i),
                        rows: pair,
                    });
                } else {
                    found.ports.truncate(mark.0);
                    found.ends.truncate(mark.1);
                }
            }
        }
        Ok(reroutes)
    }

    /// Sets the outages of the links in use.
    fn note_outages(&mut self) -> Result<(), Error> {
        let topology = &self.scenario.topology;
        for failure in &self.scenario.failures {
            let span = (failure.at_ns, failure.repair_ns.unwrap_or(u64::MAX));
            for port in failure.ports(topology)? {
                let step = self.port_steps[port as usize];
                if step != 0 {
                    self.net
                        .outages
                        .entry(step - 1)
                        .or_insert_with(|| Outages {
                            class: link_class(topology, port),
                            spans: Vec::new(),
                        })
                        .spans
                        .push(span);
                }
            }
        }
        Ok(())
    }

    fn check_memory(&self, flows: &[Flow], rows: usize) -> Result<(), Error> {
        let table = rows as u64 * self.net.stride as u64 * 4;
        // Each end of an NDP flow has a bit per packet.
        let ndp = flows
            .iter()
            .filter(|flow| matches!(flow.transport, Transport::Ndp(_)));
        let bits = ndp.map(|flow| 2 * ndp_packets(flow).div_ceil(8));
        let bits = bits.fold(0, u64::saturating_add);
        let flows = flows.len();
        let endpoints = flows as u64 * (size_of::<TcpSender>() + size_of::<TcpReceiver>()) as u64;
        // A flow keeps about one window of packets in flight: 64 events, that is 64 kB in 1 kB
        // packets, of 16 bytes each.
        let events = flows as u64 * 64 * 16;
        // Scheduled ports keep a packet's place in the table in 32 bits. Reverse paths double it.
        let places = 2 * rows as u64 * self.net.stride as u64;
        if places > u64::from(u32::MAX) {
            return Err(Error::Value(format!(
                "{rows} paths of up to {} links exceed the 32-bit indexes of the path table; use \
                 fewer flows, or a lower `routing.spray_paths`",
                self.net.stride - 1
            )));
        }
        let need = bits.saturating_add(table + endpoints + events);
        if need > self.execution.memory_bytes_max {
            let what = if bits > table + endpoints + events {
                format!("{flows} flows, with a bit per packet of NDP's")
            } else if table > endpoints + events {
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

    /// The memory of a switch, which is created on first use.
    fn memory(&mut self, shard: u32, node: u32) -> u32 {
        let known = &mut self.memory_of[node as usize];
        if *known == 0 {
            let memories = &mut self.fabrics[shard as usize].memories;
            memories.push(Memory {
                node,
                ..Memory::default()
            });
            *known = to_u32(memories.len());
        }
        *known - 1
    }

    /// Sets the ingress through which a packet comes to each port of a new row.
    fn add_ingresses(&mut self, path: &[PortId], steps: &[Step]) {
        let row_at = self.net.steps.len() - self.net.stride;
        self.net.ingress.resize(self.net.steps.len(), NO_INGRESS);
        for i in 1..path.len() {
            let (upstream, port) = (path[i - 1], path[i]);
            let End::Node(node) = self.scenario.topology.port_ends(port).0 else {
                continue;
            };
            let from = self.scenario.topology.port_ends(upstream).0;
            let spared = self.scenario.queue.pfc.is_some_and(|pfc| !pfc.host_links);
            if spared && matches!(from, End::Host(_)) {
                continue;
            }
            // A link that leads into a switch has a single ingress there.
            if self.ingress_of[upstream as usize] == 0 {
                let shard = to_u32(steps[i].shard());
                let memory = self.memory(shard, node);
                let class = link_class(&self.scenario.topology, upstream);
                let ingresses = &mut self.fabrics[shard as usize].ingresses;
                ingresses.push(Ingress::new(steps[i - 1], memory, class));
                self.ingress_of[upstream as usize] = to_u32(ingresses.len());
            }
            self.net.ingress[row_at + i] = self.ingress_of[upstream as usize] - 1;
        }
    }

    /// The step of a port, which is created on first use.
    fn port_step(&mut self, port: PortId) -> Result<Step, Error> {
        if self.port_steps[port as usize] != 0 {
            return Ok(Step(self.port_steps[port as usize] - 1));
        }
        let topology = self.scenario.topology.clone();
        let shard = match topology.port_ends(port).0 {
            _ if self.shards == 1 => 0,
            End::Node(node) if self.whole_switches => topology.part_of_node(node) % self.shards,
            _ => topology.part_of_port(port) % self.shards,
        };
        let from_host = matches!(topology.port_ends(port).0, End::Host(_));
        let class = link_class(&topology, port);
        // A host's own queue is its memory: no limit, and no drops.
        let managed = !from_host
            && (self.scenario.queue.aqm != Aqm::TailDrop || self.scenario.queue.loss > 0.0);
        let capacity = match self.scenario.queue.capacity_packets {
            0 => UNLIMITED,
            _ if from_host => UNLIMITED,
            packets => packets,
        };
        let spec = PortSpec {
            class,
            delay_ns: to_u32(self.net.classes[class as usize].delay_ns),
            capacity,
            aqm: u8::from(managed),
        };
        // A ring of 32-bit times covers 2^31 ns, so ports with longer queues use the other form
        // too. A ring has up to twice as many slots, and is scanned when it is full.
        let link = self.net.classes[class as usize];
        let packet_ns = serialization_ns(self.net.sizes as u64, link.bits_per_s);
        // On slow links, waits exceed the 32 bits of a ring with any limit.
        let slow = link.bits_per_s < 1_000_000;
        let long =
            slow || capacity != UNLIMITED && (u64::from(capacity) + 2) * packet_ns >= 1 << 30;
        let queue = &self.scenario.queue;
        let exact = queue.discipline != Discipline::Fifo
            || queue.capacity_bytes > 0
            || self.whole_switches
            || long;
        let scheduled = if from_host {
            self.host_turns || slow
        } else {
            exact
        };
        let priorities = queue.priorities;
        let limits = PortLimits {
            lossy: !from_host,
            capacity_bytes: match queue.capacity_bytes {
                0 => u64::MAX,
                _ if from_host => u64::MAX,
                bytes => bytes,
            },
            memory: match topology.port_ends(port).0 {
                End::Node(node) if self.counts_memory() => self.memory(shard, node),
                _ => NO_SWITCH,
            },
            priorities,
        };
        let trim = self.scenario.queue.trim;
        let fabric = &mut self.fabrics[shard as usize];
        let index = if trim.is_some() {
            fabric.trim_ports.len()
        } else if scheduled {
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
        let place = if let Some(rule) = trim {
            fabric.trim_ports.push(TrimPort::new(spec, rule, from_host));
            fabric.trim_ids.push(port);
            Place::Trim
        } else if scheduled {
            let classes = self.scenario.queue.discipline.classes();
            fabric.scheduled.push(Scheduled::new(classes, spec, limits));
            fabric.scheduled_ids.push(port);
            Place::Scheduled
        } else {
            fabric.add_port(port, spec, managed);
            Place::Fifo
        };
        let step = Step::new(shard, place, index);
        self.port_steps[port as usize] = step.0 + 1;
        Ok(step)
    }
}

/// Index of the class of a tier's links.
/// Shared buffers and PFC with the headroom of each class of link.
fn rules(scenario: &Scenario, classes: &[LinkClass], packet_bytes: u32) -> Rules {
    let queue = &scenario.queue;
    let mut headroom = vec![0; classes.len()];
    if let Some(pfc) = queue.pfc {
        for (bytes, link) in headroom.iter_mut().zip(classes) {
            *bytes = pfc.headroom_bytes.unwrap_or_else(|| {
                queueing::headroom_bytes(link.bits_per_s, link.delay_ns, u64::from(packet_bytes))
            });
        }
    }
    Rules {
        shared: queue.shared,
        pfc: queue.pfc,
        headroom,
    }
}

/// Creates the senders and receivers of flows.
struct EndpointMaker<'a> {
    scenario: &'a Scenario,
    net: &'a Net,
    /// By flow, ns; see `find_timeouts`.
    timeouts: &'a [u64],
    /// The pacer of a host's pulls, by host.
    pacer_of: HashMap<u32, usize>,
}

impl EndpointMaker<'_> {
    fn add(
        &mut self,
        shards: &mut [Shard],
        index: u32,
        flow: &Flow,
        (sender, receiver): (Step, Step),
        [data, ack]: [Rows; 2],
    ) {
        let scenario = self.scenario;
        let seed = mix::draw(scenario.seed, flow.id);
        let total = flow.demand.bytes().unwrap_or(u64::MAX);
        match flow.transport {
            Transport::Tcp(tcp) => {
                let app = match flow.demand {
                    Demand::Bytes(_) => None,
                    Demand::Paced(a) => Some(Paced::new(a, seed)),
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
                    rto_initial_ns: self.timeouts[index as usize],
                    sws_avoidance: tcp.sws_avoidance,
                    control: Control::new(&tcp.congestion, seed),
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
            Transport::Roce(mut roce) => {
                if roce.window_bytes > 0 {
                    // The sender stops at its window, so an ACK must come before its end.
                    let packets = roce.window_bytes.div_ceil(u64::from(flow.packet_bytes));
                    let packets = u32::try_from(packets).unwrap_or(u32::MAX);
                    roce.ack_every = roce.ack_every.min(packets);
                }
                let retry_ns = roce
                    .retry_ns
                    .unwrap_or_else(|| self.timeouts[index as usize]);
                let links = &scenario.links;
                let first = links.host.unwrap_or(links.edge);
                shards[sender.shard()]
                    .qp_senders
                    .push(QpSender::new(QpSetup {
                        flow: index,
                        me: sender,
                        row: data.first,
                        rows: data.count,
                        header: flow.header_bytes,
                        mtu: flow.packet_bytes,
                        total,
                        has_port: links.host.is_some(),
                        line_bits_per_s: first.bits_per_s,
                        retry_ns,
                        roce,
                    }));
                shards[receiver.shard()].qp_receivers.push(QpReceiver::new(
                    index,
                    (ack.first, ack.count),
                    flow.header_bytes,
                    flow.ack_bytes,
                    total,
                    roce,
                ));
            }
            Transport::Ndp(ndp) => {
                let setup = NdpSetup {
                    flow: index,
                    me: sender,
                    row: data.first,
                    rows: data.count,
                    seed,
                    header: flow.header_bytes,
                    mtu: flow.packet_bytes,
                    control_bytes: flow.ack_bytes,
                    total,
                    retry_ns: ndp
                        .retry_ns
                        .unwrap_or_else(|| self.timeouts[index as usize]),
                    ndp,
                };
                shards[sender.shard()]
                    .ndp_senders
                    .push(NdpSender::new(setup));
                let setup = NdpSetup {
                    me: receiver,
                    row: ack.first,
                    rows: ack.count,
                    seed: mix::mix64(seed),
                    ..setup
                };
                let pacers = &mut shards[receiver.shard()].pacers;
                let net = self.net;
                let pacer = *self.pacer_of.entry(flow.dst).or_insert_with(|| {
                    let me = Step::new(to_u32(receiver.shard()), Place::Host, pacers.len());
                    let packet = flow.packet_bytes + flow.header_bytes;
                    pacers.push(Pacer::new(me, net.serialization(0, packet)));
                    pacers.len() - 1
                });
                shards[receiver.shard()]
                    .ndp_receivers
                    .push(NdpReceiver::new(setup, to_u32(pacer)));
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
            Transport::Other(other) => {
                let links = &scenario.links;
                let setup = EndSetup {
                    flow: index,
                    me: sender,
                    rows: data,
                    packet_bytes: flow.packet_bytes,
                    header_bytes: flow.header_bytes,
                    answer_bytes: flow.ack_bytes,
                    total,
                    seed,
                    line_bits_per_s: links.host.unwrap_or(links.edge).bits_per_s,
                };
                let made = (other.protocol.sender)(&setup, &other.parameters);
                shards[sender.shard()].other_senders.push(made);
                let setup = EndSetup {
                    me: receiver,
                    rows: ack,
                    ..setup
                };
                let made = (other.protocol.receiver)(&setup, &other.parameters);
                shards[receiver.shard()].other_receivers.push(made);
            }
        }
    }
}

/// A change of a flow's paths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reroute {
    pub(crate) at_ns: u64,
    pub(crate) flow: u32,
    /// Both directions.
    pub(crate) rows: [Rows; 2],
}

/// The paths of each flow, and later changes in order of time.
struct PathLayout {
    rows: Vec<[Rows; 2]>,
    reroutes: Vec<Reroute>,
    /// By flow, ns; see `find_timeouts`.
    timeouts: Vec<u64>,
}

/// Ports of all rows back to back, until the longest path is known.
struct PathStore {
    ports: Vec<PortId>,
    ends: Vec<u32>,
    longest: usize,
    path: Vec<PortId>,
    /// Maximum length of `ports`: 32-bit indexes, and the limit of memory.
    ports_max: usize,
}

impl PathStore {
    fn new(flows: usize, memory_bytes_max: u64) -> Self {
        let room = memory_bytes_max / size_of::<PortId>() as u64;
        PathStore {
            ports_max: usize::try_from(room.min(u64::from(u32::MAX))).unwrap_or(usize::MAX),
            ports: Vec::with_capacity(flows * 12),
            ends: Vec::with_capacity(flows * 2),
            longest: 0,
            path: Vec::new(),
        }
    }

    fn path(&self, row: u32) -> &[PortId] {
        let from = row.checked_sub(1).map_or(0, |r| self.ends[r as usize]);
        &self.ports[from as usize..self.ends[row as usize] as usize]
    }

    fn same(&self, a: Rows, b: Rows) -> bool {
        a.count == b.count && (0..a.count).all(|i| self.path(a.first + i) == self.path(b.first + i))
    }

    /// Finds the paths of a flow in one direction and stores their ports; `None` if there is no
    /// path.
    fn find(
        &mut self,
        scenario: &Scenario,
        router: &mut Router<'_>,
        flow: &Flow,
        direction: usize,
    ) -> Result<Option<Rows>, Error> {
        let (src, dst) = if direction == 0 {
            (flow.src, flow.dst)
        } else {
            (flow.dst, flow.src)
        };
        let mut rows = Rows {
            first: to_u32(self.ends.len()),
            count: 1,
        };
        match &flow.paths {
            Paths::By(routing) => {
                let hash = mix::draw(
                    scenario.seed ^ mix::mix64(flow.id),
                    u64::from(src) << 32 | u64::from(dst),
                );
                let mut index = 0;
                while index < rows.count {
                    let Some(paths) = router.path(src, dst, *routing, hash, index, &mut self.path)
                    else {
                        return Ok(None);
                    };
                    if *routing == Routing::Spray {
                        // Outside of fat-trees the number of branches may differ between paths.
                        rows.count = rows.count.max(paths.min(scenario.spray_paths));
                    }
                    index += 1;
                    self.keep()?;
                }
            }
            Paths::Explicit(nodes) => {
                let nodes = explicit(flow, nodes, direction == 1, &scenario.topology)?;
                router
                    .ports(src, dst, &nodes, &mut self.path)
                    .map_err(|(a, b)| Error::Flow {
                        flow: flow.id,
                        what: format!(
                            "its path goes from node {a} to node {b}, which have no link; \
                             add the edge or correct the path"
                        ),
                    })?;
                self.keep()?;
            }
        }
        if self.path.is_empty() {
            return Err(Error::Flow {
                flow: flow.id,
                what: format!(
                    "hosts {} and {} share a switch and host links are not modeled, so its packets \
                     would cross no link; model host links",
                    scenario.topology.host_number(src),
                    scenario.topology.host_number(dst)
                ),
            });
        }
        if self.longest > HOPS_MAX {
            return Err(Error::Flow {
                flow: flow.id,
                what: format!(
                    "its path has {} links; at most {HOPS_MAX} are supported",
                    self.longest
                ),
            });
        }
        Ok(Some(rows))
    }

    /// Stores the path that was found.
    fn keep(&mut self) -> Result<(), Error> {
        if self.ports.len() + self.path.len() > self.ports_max {
            return Err(Error::Value(format!(
                "the paths of all flows have more than {} links in total, the most that memory and \
                 32-bit indexes allow; use fewer flows, or a lower `routing.spray_paths`",
                self.ports_max
            )));
        }
        self.ports.extend_from_slice(&self.path);
        self.ends.push(to_u32(self.ports.len()));
        self.longest = self.longest.max(self.path.len());
        Ok(())
    }
}

fn disconnected(flow: &Flow, topology: &Topology) -> Error {
    let (src, dst) = (
        topology.host_number(flow.src),
        topology.host_number(flow.dst),
    );
    Error::Flow {
        flow: flow.id,
        what: format!("no path leads from host {src} to host {dst}; add edges between them"),
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
    let own = scenario.topology.own_links().iter();
    for (name, link) in named.into_iter().chain(own.map(|&l| ("edge", Some(l)))) {
        let Some(Link {
            bits_per_s,
            delay_ns,
        }) = link
        else {
            continue;
        };
        if !(1..=1_000_000_000_000_000).contains(&bits_per_s) {
            return Err(Error::Value(format!(
                "a {name} of {bits_per_s} bit/s cannot be simulated; use 1 bit/s to 1 Pb/s"
            )));
        }
        if delay_ns > 2_000_000_000 {
            return Err(Error::Value(format!(
                "a {name} with a delay of {delay_ns} ns is too slow; use at most 2 s"
            )));
        }
    }
    let queue = &scenario.queue;
    let slow = named
        .iter()
        .filter_map(|(_, link)| *link)
        .chain(scenario.topology.own_links().iter().copied())
        .any(|link| link.bits_per_s < 1_000_000);
    if queue.trim.is_some() && slow {
        return Err(Error::Value(
            "trimming ports use 32-bit times, too short for links below 1 Mb/s; use faster \
             links, or another `switch.drop`"
                .into(),
        ));
    }
    if queue.pfc.is_some_and(|pfc| pfc.host_links) && links.host.is_none() {
        return Err(Error::Value(
            "PFC pauses the links of hosts too, but they are not modeled; set `link.host_links = \
             true`"
                .into(),
        ));
    }
    if queue.trim.is_some_and(|t| t.return_to_sender) && links.host.is_none() {
        return Err(Error::Value(
            "headers return to their senders over the links of hosts, but those are not modeled; set \
             `link.host_links = true`"
                .into(),
        ));
    }
    let largest = scenario
        .flows
        .iter()
        .map(|f| u64::from((f.packet_bytes + f.header_bytes).max(f.ack_bytes)))
        .max()
        .unwrap_or(0);
    for (name, bytes) in [
        (
            "capacity_bytes",
            (queue.capacity_bytes > 0).then_some(queue.capacity_bytes),
        ),
        ("shared.bytes", queue.shared.map(|s| s.bytes)),
    ] {
        if let Some(bytes) = bytes
            && bytes < largest
        {
            return Err(Error::Value(format!(
                "`switch.{name}` is {bytes} bytes, less than one packet of {largest}; give at \
                 least that"
            )));
        }
    }
    let hosts = scenario.topology.host_count();
    // A sorted list, as a tree of millions of flows would be slow.
    let mut ids: Vec<u64> = scenario.flows.iter().map(|flow| flow.id).collect();
    ids.sort_unstable();
    let twice: BTreeSet<u64> = ids
        .windows(2)
        .filter(|pair| pair[0] == pair[1])
        .map(|pair| pair[0])
        .collect();
    for flow in &scenario.flows {
        let fault = |what: String| {
            Err(Error::Flow {
                flow: flow.id,
                what,
            })
        };
        if twice.contains(&flow.id) {
            return fault("this number is used twice; give each flow its own number".into());
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
            let host = scenario.topology.host_number(flow.src);
            return fault(format!("host {host} sends to itself; give two hosts"));
        }
        let size = flow.packet_bytes + flow.header_bytes;
        if flow.packet_bytes == 0 || flow.ack_bytes == 0 || size.max(flow.ack_bytes) > SIZE_MAX {
            return fault(format!(
                "packets of {} + {} bytes and ACKs of {} bytes; each must be from 1 to {SIZE_MAX}",
                flow.packet_bytes, flow.header_bytes, flow.ack_bytes
            ));
        }
        if matches!(flow.transport, Transport::Ndp(_)) && ndp_packets(flow) > u64::from(u32::MAX) {
            return fault(format!(
                "its {} bytes are {} packets, but NDP numbers them in 32 bits; use larger packets or \
                 several flows",
                flow.demand.bytes().unwrap_or(0),
                ndp_packets(flow)
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

/// Packets of an NDP flow, without retransmissions.
fn ndp_packets(flow: &Flow) -> u64 {
    let bytes = flow.demand.bytes().unwrap_or(0);
    bytes.div_ceil(u64::from(flow.packet_bytes))
}

/// Flows must not depend on each other in a cycle, nor on flows that do not exist.
fn check_dependencies(flows: &[Flow]) -> Result<(), Error> {
    if flows.iter().all(|f| f.after.is_empty()) {
        return Ok(());
    }
    let mut left: Vec<usize> = flows.iter().map(|f| f.after.len()).collect();
    let mut next: Vec<Vec<u32>> = vec![Vec::new(); flows.len()];
    for (i, flow) in flows.iter().enumerate() {
        for after in &flow.after {
            next[after.flow as usize].push(to_u32(i));
        }
    }
    let mut ready: Vec<u32> = (0..to_u32(flows.len()))
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
    // Walk back along unmet predecessors until a flow repeats, which reveals a cycle.
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

/// Upper estimate of packet-hops per ns while all flows send.
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

/// The number of shards of a run. A property of the scenario, so it is the same on every machine.
fn shard_count(scenario: &Scenario, lookahead_ns: u64) -> u32 {
    let topology = &scenario.topology;
    let parts = topology.parts().min(SHARDS_MAX);
    let crossing = scenario.flows.iter().any(|flow| {
        flow.after.iter().any(|after| {
            // The end of a predecessor must happen in the shard where the flow starts.
            let Some(other) = scenario.flows.get(after.flow as usize) else {
                return true;
            };
            let seen_at = match after.until.of(other) {
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

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use super::*;

    #[test]
    fn paths_beyond_the_limit_are_refused_while_they_are_stored() {
        // Five links.
        let mut store = PathStore::new(0, 20);
        store.path = vec![7, 8];
        assert_eq!(store.keep(), Ok(()));
        assert_eq!(store.keep(), Ok(()));
        let message = store.keep().unwrap_err().to_string();
        assert!(message.contains("more than 5 links"), "{message}");
        assert_eq!((store.path(0), store.path(1)), (&[7, 8][..], &[7, 8][..]));
        // Indexes have 32 bits, however large the memory.
        assert_eq!(PathStore::new(0, u64::MAX).ports_max, u32::MAX as usize);
    }

    #[test]
    fn a_path_table_beyond_32_bits_is_refused() {
        let toml = "edges = [[0, 1]]\nhosts = [0, 1]\n[switch]\nport_rate = 1e9\n[[flow]]\n\
                    graph = [[0, 1]]\ntraffic = { size = 1 }\n";
        let config = crate::config::read(Doc::parse("t.toml", toml.as_bytes())).unwrap();
        let mut builder = Builder::new(config.scenario, Execution::default()).unwrap();
        builder.net.stride = 4;
        assert_eq!(builder.check_memory(&[], (1 << 29) - 1), Ok(()));
        let message = builder.check_memory(&[], 1 << 29).unwrap_err().to_string();
        assert!(
            message.contains("536870912 paths of up to 3 links"),
            "{message}"
        );
    }
}
