//! Sets up a run: shards, ports, paths and endpoints. Validates the scenario.

mod check;
mod endpoints;
mod paths;
mod shards;

use std::collections::{BTreeSet, HashMap};

use slipstream_base::mix;
use slipstream_base::width::to_u32;
use slipstream_des::Wheel;

use check::{check_dependencies, check_values, ndp_packets};
use endpoints::{EndpointMaker, LaidFlow, places};
use paths::{PathStore, disconnected};

use crate::aqm::Aqm;
use crate::buffer::{Ingress, Memory, NO_SWITCH};
use crate::error::Error;
use crate::event::EventKind;
use crate::fabric::{Mail, PortSpec, Rings, ShardPorts, Tally, UNLIMITED};
use crate::failure::{Outages, epochs};
use crate::link::{LinkClass, serialization_ns};
use crate::net::{Net, Reroute, Rows};
use crate::queueing::{self, Discipline, NO_INGRESS, PAUSE_BYTES, Rules};
use crate::retry::{PathVisitor, QueueBounds};
use crate::route::Router;
use crate::sack::SackStore;
use crate::scenario::{Flow, Paths, Scenario, Transport};
use crate::scheduled::{PortLimits, Scheduled};
use crate::series::Sampler;
use crate::shard::Shard;
use crate::sim::{Execution, Simulation};
use crate::step::{INDEX_MAX, Place, Step};
use crate::topology::{End, PortId, Tier, link_class};
use crate::transport::rtt::initial_timeout_ns;
use crate::transport::tcp::{TcpReceiver, TcpSender};
use crate::trim::TrimPort;

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
        let (size_min, size_max) = packet_sizes(&scenario);
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
        let shards = shards::count(&scenario, between);
        let bucket = Bucket {
            hop_min_ns: hop_min.unwrap_or(1),
            between_ns: (shards > 1).then_some(between),
        };
        let shift = bucket.shift(shards::density(&scenario));
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
            .map(|shard| ports_of_shard(&scenario, shard, shards, shift))
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
        let endpoints = self.place_endpoints(&flows)?;
        let PathLayout {
            rows,
            reroutes,
            timeouts,
        } = self.lay_paths(&flows, &endpoints)?;
        let fabrics = std::mem::take(&mut self.fabrics);
        let mut shards: Vec<Shard> = fabrics.into_iter().map(Shard::new).collect();
        let mut maker = EndpointMaker::new(&self.scenario, &self.net, &timeouts);
        for (i, flow) in flows.iter().enumerate() {
            let (sender, receiver) = endpoints[i];
            let [data, ack] = rows[i];
            let laid = LaidFlow {
                index: to_u32(i),
                flow,
                sender,
                receiver,
                data,
                ack,
            };
            maker.add(&mut shards, laid);
            let shard = &mut shards[sender.shard()];
            if flow.after.is_empty() {
                shard
                    .fabric
                    .schedule(flow.start_ns, EventKind::Start, sender.0, 0);
                continue;
            }
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

    /// The steps of each flow's sender and receiver, which are numbered by shard and kind.
    fn place_endpoints(&self, flows: &[Flow]) -> Result<Vec<(Step, Step)>, Error> {
        let mut endpoints = Vec::with_capacity(flows.len());
        let mut counts: HashMap<(u32, u8), usize> = HashMap::new();
        let mut next = |shard, place| {
            let count = counts.entry((shard, place as u8)).or_default();
            *count += 1;
            *count - 1
        };
        for flow in flows {
            let from = self.shard_of_host(flow.src);
            let to = self.shard_of_host(flow.dst);
            let (sends, receives) = places(&flow.transport);
            let (s, r) = (next(from, sends), next(to, receives));
            if s.max(r) >= INDEX_MAX {
                return Err(Error::Value(format!(
                    "more than {INDEX_MAX} flows in one part of the network; use fewer flows"
                )));
            }
            endpoints.push((Step::new(from, sends, s), Step::new(to, receives, r)));
        }
        Ok(endpoints)
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
        self.net.stride = found.longest() + 1;
        self.check_memory(flows, found.rows())?;
        self.net.steps = Vec::with_capacity(found.rows() * self.net.stride);
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
        self.net.back = vec![(0, 0); found.rows()];
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
                let mark = found.rows();
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
                    found.truncate(mark);
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

    /// What a port is to be; creates the memory of its switch.
    fn plan_port(&mut self, port: PortId) -> PortPlan {
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
        PortPlan {
            shard,
            spec,
            scheduled,
            limits,
        }
    }

    /// The step of a port, which is created on first use.
    fn port_step(&mut self, port: PortId) -> Result<Step, Error> {
        if self.port_steps[port as usize] != 0 {
            return Ok(Step(self.port_steps[port as usize] - 1));
        }
        let PortPlan {
            shard,
            spec,
            scheduled,
            limits,
        } = self.plan_port(port);
        let managed = spec.aqm != 0;
        let from_host = !limits.lossy;
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

/// What a port is to be.
struct PortPlan {
    shard: u32,
    spec: PortSpec,
    /// Whether it keeps its packets in a queue, rather than only the times at which they leave.
    scheduled: bool,
    limits: PortLimits,
}

/// The smallest and the largest size of a packet, bytes.
fn packet_sizes(scenario: &Scenario) -> (u32, u32) {
    let largest = |f: &Flow| f.packet_bytes + f.header_bytes;
    let trimmed = scenario.queue.trim.map(|t| t.header_bytes);
    let flows = || scenario.flows.iter();
    let max = flows()
        .map(|f| largest(f).max(f.ack_bytes))
        .max()
        .unwrap_or(0)
        .max(64)
        .max(trimmed.unwrap_or(0));
    let min = flows()
        .map(|f| (f.header_bytes + 1).min(f.ack_bytes))
        .min()
        .unwrap_or(64)
        .min(to_u32(PAUSE_BYTES))
        .min(trimmed.unwrap_or(u32::MAX));
    (min, max)
}

/// What bounds the width of a bucket of the event queue.
struct Bucket {
    /// The shortest usual hop.
    hop_min_ns: u64,
    /// The lookahead between shards, if there are several.
    between_ns: Option<u64>,
}

impl Bucket {
    /// The logarithm of its width in ns. `density`: packet-hops per ns.
    ///
    /// Buckets are narrower than every usual hop (a shorter one costs a heap insertion), but not so
    /// narrow that most are empty; 256 ns was the best of 64 to 512 on E5.
    fn shift(&self, density: f64) -> u32 {
        let wide = if density > 0.05 { 8 } else { 12 };
        let shift = self.hop_min_ns.max(1).ilog2().min(wide);
        // A window is at least one bucket and must not exceed the lookahead.
        match self.between_ns {
            Some(between) => shift.min(between.max(1).ilog2()),
            None => shift,
        }
    }
}

/// The ports of a shard, before there are any.
fn ports_of_shard(scenario: &Scenario, shard: u32, shards: u32, shift: u32) -> ShardPorts {
    ShardPorts {
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
        sacks: SackStore::default(),
        mail: (0..shards).map(|_| Mail::default()).collect(),
        mail_first: u64::MAX,
        tally: Tally::default(),
        seed: mix::draw(scenario.seed, 0x706f_7274),
    }
}

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

/// The paths of each flow, and later changes in order of time.
struct PathLayout {
    rows: Vec<[Rows; 2]>,
    reroutes: Vec<Reroute>,
    /// By flow, ns; see `find_timeouts`.
    timeouts: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use super::*;

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
