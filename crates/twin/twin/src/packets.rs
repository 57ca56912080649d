//! The network between workers packet by packet: `network.mode = "packets"`.
//!
//! A transfer that meets no other one takes a time that follows from its bytes and links. When another one shares a
//! link with it, both are simulated by `slipstream-netsim` from then on, with the bytes that are left. The same holds for
//! one that meets background traffic, or a link that fails.

pub(crate) mod background;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use slipstream_base::width::{floor_u64, round_u64, to_u32};
use slipstream_base::{Role, SimTime};
use slipstream_config::cluster::{Cluster, Fault, NetworkConfig, PoolConfig};
use slipstream_flows::{Endpoint, FabricConfig, Network, TransferId};
use slipstream_netsim::aqm::Aqm;
use slipstream_netsim::failure::{Failure, Target};
use slipstream_netsim::link::{Link, Links};
use slipstream_netsim::open::{Arrived, OpenNetwork};
use slipstream_netsim::queueing::Discipline;
use slipstream_netsim::route::Routing;
use slipstream_netsim::scenario::{Dcqcn, Demand, Flow, Paths, Queue, Roce, Scenario, Transport};
use slipstream_netsim::topology::{Graph, Tier, Topology};

/// Headers of a RoCEv2 packet, bytes: Ethernet 14 and 4 (IEEE 802.3), IPv4 20 (RFC 791), UDP 8 (RFC 768), and BTH 12 and
/// ICRC 4 (InfiniBand Architecture Specification volume 1, annex A17).
pub(crate) const HEADER_BYTES: u32 = 62;
/// An acknowledgment: the same with AETH, 4 bytes (the same specification).
const ACK_BYTES: u32 = HEADER_BYTES + 4;
/// Local ACK timeout: 4.096 us x 2^14 (14 is the default of the `perftest` tools of rdma-core). Packets are lost on links
/// that fail alone; without these it only must be longer than the longest queue.
const RETRY_NS: u64 = 4_096 << 14;
/// Hardly any packet is lost, and rates do not follow acknowledgments: fewer of them change no time, and save events.
const PACKETS_PER_ACK: u32 = 64;
/// The rate for which DCQCN's constants were chosen (Zhu et al., SIGCOMM 2015). Its rates and bytes grow with the rate of
/// an interface here, and its times do not: faster interfaces behave like those of the paper, with more bytes.
const DCQCN_BITS_PER_S: f64 = 40e9;
/// Its marking: Kmin 5 KB, Kmax 200 KB, Pmax 1 %.
const MARKS_MIN_BYTES: f64 = 5e3;
const MARKS_MAX_BYTES: f64 = 200e3;
const MARKS_PROBABILITY: f64 = 0.01;
/// Connections of a network at most: each GPU of a worker has one to a GPU of each other worker.
const CONNECTIONS_MAX: usize = 1 << 16;

/// Why a network cannot be simulated packet by packet.
pub(crate) struct TooLarge(pub(crate) String);

/// A transfer under way.
struct Transfer {
    from: Endpoint,
    to: Endpoint,
    bytes: u64,
    state: State,
}

enum State {
    /// It meets no other transfer since its start.
    Alone { start: SimTime },
    /// Its parts are in the packet network, so many of them.
    Parts(u32),
    /// All of its bytes have arrived.
    Done,
}

/// Workers, one network interface per GPU, under leaf switches under one spine.
pub(crate) struct PacketNetwork {
    /// Rates and leaves, as of the fluid network.
    config: FabricConfig,
    nic_bits_per_s: f64,
    packet_bytes: u64,
    spines: f64,
    /// Network interfaces by endpoint.
    nics: Vec<u32>,
    /// Connections from an endpoint to another, one per pair of interfaces.
    connections: HashMap<(Endpoint, Endpoint), Vec<u32>>,
    connection_count: usize,
    network: OpenNetwork,
    transfers: BTreeMap<TransferId, Transfer>,
    /// Transfers and background flows that use a link: by endpoint out `2e`, in `2e + 1`, then leaves likewise.
    users: Vec<u32>,
    /// The links of each background flow.
    background: Vec<Vec<usize>>,
    background_ended: Vec<u32>,
    /// Links as in `users` that are down from a time until another one.
    outages: Vec<(usize, SimTime, SimTime)>,
    /// Ends of transfers that are alone or take no bytes.
    ends: BinaryHeap<Reverse<(SimTime, TransferId)>>,
    next: u64,
    arrived: Vec<Arrived>,
}

impl PacketNetwork {
    /// The network of `cluster`. It is `speedup` (above 0) times as fast as in the file.
    pub(crate) fn new(
        cluster: &Cluster,
        config: FabricConfig,
        speedup: f64,
        background: Vec<Flow>,
    ) -> Result<PacketNetwork, TooLarge> {
        let network = &cluster.network;
        let mut nics: Vec<u32> = cluster
            .workers()
            .map(|(_, pool)| network.nics(pool.engine.gpus()))
            .collect();
        nics.push(1);
        let leaves = config.leaf.iter().max().map_or(0, |leaf| leaf + 1);
        let nic_bits_per_s = network.nic_bits_per_s * speedup;
        let mut hosts = Vec::new();
        let mut first_nic = Vec::new();
        for (&count, &leaf) in nics.iter().zip(&config.leaf) {
            first_nic.push(to_u32(hosts.len()));
            hosts.extend((0..count).map(|_| leaf));
        }
        // The frontend's own link leads from a switch of its own to its leaf.
        let spines = network.spines;
        *hosts.last_mut().expect("the frontend's") = leaves + spines;
        let graph = graph_of(network, &config, hosts, speedup)?;
        let topology = Topology::Graph(graph.with_numbered_hosts());
        let nic = link(nic_bits_per_s, config.hop_latency_ns);
        let (mut flows, connections) = connections(cluster, &nics, &first_nic, nic_bits_per_s)?;
        let sending = flows.len();
        let own = of_background(&config, &nics, &background);
        flows.extend(
            background
                .into_iter()
                .map(|flow| after_connections(flow, sending, speedup)),
        );
        let (failures, outages) = failures(cluster, &config, (&nics, &first_nic));
        let scenario = Scenario {
            flows,
            failures,
            convergence_ns: round_u64(network.reroute_ms * 1e6),
            ..scenario(cluster.router.seed, topology, nic)
        };
        let open = OpenNetwork::with_background(scenario, sending);
        let open = open.map_err(|error| TooLarge(error.to_string()))?;
        let mut users = vec![0; 2 * (config.leaf.len() + leaves as usize)];
        for &link in own.iter().flatten() {
            users[link] += 1;
        }
        Ok(PacketNetwork {
            users,
            background: own,
            background_ended: Vec::new(),
            outages,
            spines: f64::from(spines),
            config,
            nic_bits_per_s,
            packet_bytes: network.packet_bytes.into(),
            nics,
            connections,
            connection_count: sending,
            network: open,
            transfers: BTreeMap::new(),
            ends: BinaryHeap::new(),
            next: 0,
            arrived: Vec::new(),
        })
    }

    fn leaf(&self, of: Endpoint) -> u32 {
        self.config.leaf[of.0 as usize]
    }

    fn path(&self, from: Endpoint, to: Endpoint) -> ([usize; 4], usize) {
        path(&self.config, from, to)
    }

    /// Whether a link of `path` is down at some time from `now` until `end`.
    fn fails(&self, path: &[usize], now: SimTime, end: SimTime) -> bool {
        let mut outages = self.outages.iter();
        outages.any(|(link, from, until)| path.contains(link) && *from <= end && *until > now)
    }

    /// The time of a transfer that meets no other; `None` if it queues all the same, as one of its links is narrower
    /// than those before it.
    fn alone_ns(&self, from: Endpoint, to: Endpoint, bytes: u64) -> Option<u64> {
        let connections = &self.connections[&(from, to)];
        let parts = connections.len() as u64;
        let sending = u64::from(self.nics[from.0 as usize]).min(parts);
        let part = bytes.div_ceil(parts);
        let packets = part.div_ceil(self.packet_bytes);
        let last = part - (packets - 1) * self.packet_bytes;
        let wire = part + packets * u64::from(HEADER_BYTES);
        let ns = |bytes: u64, rate: f64| bytes as f64 * 8e9 / rate;
        let sent = ns(wire * (parts / sending), self.nic_bits_per_s);
        // A packet that is stored and forwarded: the last one waits behind a full one.
        let stored = (if packets > 1 { self.packet_bytes } else { last }) + u64::from(HEADER_BYTES);
        let frontend = Endpoint(to_u32(self.config.leaf.len()) - 1);
        let of_frontend = self.config.endpoint_bits_per_s[frontend.0 as usize];
        // The links behind the first one, each with the interfaces that share it.
        let mut after = vec![(
            self.nic_bits_per_s,
            parts / u64::from(self.nics[to.0 as usize]).min(parts),
        )];
        if from == frontend || to == frontend {
            after.push((of_frontend, 1));
        }
        if self.leaf(from) != self.leaf(to) {
            let rate = self.config.uplink_bits_per_s;
            after.extend(rate.map(|rate| (rate / self.spines, sending)));
        }
        let narrow = |&(rate, share): &(f64, u64)| rate < self.nic_bits_per_s * share as f64;
        let shared = |&(_, share): &(f64, u64)| share > 1;
        if after
            .iter()
            .any(|link| narrow(link) && (packets > 1 || shared(link)))
        {
            return None;
        }
        let stored: f64 = after.iter().map(|(rate, _)| ns(stored, *rate)).sum();
        Some(floor_u64((sent + stored).ceil()) + self.latency_ns(from, to))
    }

    /// Moves a transfer into the packet network, with the bytes that are left at `now`.
    fn simulate(&mut self, now: SimTime, id: TransferId) {
        let transfer = self.transfers.get_mut(&id).expect("it is under way");
        let State::Alone { start } = transfer.state else {
            return;
        };
        let connections = &self.connections[&(transfer.from, transfer.to)];
        let parts = connections.len() as u64;
        let sending = u64::from(self.nics[transfer.from.0 as usize]).min(parts);
        let rate = self.nic_bits_per_s * sending as f64;
        let packet = self.packet_bytes as f64;
        let share = packet / (packet + f64::from(HEADER_BYTES));
        let sent = now.since(start) as f64 * rate * share / 8e9;
        // At least its last packets: they have not arrived.
        let left = transfer.bytes.saturating_sub(floor_u64(sent)).max(parts);
        let part = left.div_ceil(parts);
        transfer.state = State::Parts(to_u32(parts));
        for &connection in connections {
            self.network.send(now.0, connection, id.0, part);
        }
    }

    /// Runs the packet network to `now`.
    fn run(&mut self, now: SimTime) {
        let mut arrived = std::mem::take(&mut self.arrived);
        self.network.run(now.0, &mut arrived);
        let mut ended = std::mem::take(&mut self.background_ended);
        self.network.take_ended(&mut ended);
        let first = self.connection_count;
        for flow in ended.drain(..) {
            for &link in &self.background[flow as usize - first] {
                self.users[link] -= 1;
            }
        }
        self.background_ended = ended;
        for part in arrived.drain(..) {
            let id = TransferId(part.message);
            let Some(transfer) = self.transfers.get_mut(&id) else {
                continue; // it was cancelled
            };
            if let State::Parts(left) = &mut transfer.state {
                *left -= 1;
                if *left == 0 {
                    transfer.state = State::Done;
                    self.ends.push(Reverse((SimTime(part.at_ns), id)));
                }
            }
        }
        self.arrived = arrived;
    }

    /// Removes a transfer from the links that it crosses.
    fn leave(&mut self, from: Endpoint, to: Endpoint) {
        let (path, hops) = self.path(from, to);
        for &link in &path[..hops] {
            self.users[link] -= 1;
        }
    }
}

/// Switches, hosts and links: each leaf has a link to each spine, and the frontend's switch one to its leaf.
fn graph_of(
    network: &NetworkConfig,
    config: &FabricConfig,
    hosts: Vec<u32>,
    speedup: f64,
) -> Result<Graph, TooLarge> {
    let leaves = config.leaf.iter().max().map_or(0, |leaf| leaf + 1);
    let spines = network.spines;
    let frontend = leaves + spines;
    let nic_bits_per_s = network.nic_bits_per_s * speedup;
    let delay_ns = config.hop_latency_ns;
    let its_leaf = *config.leaf.last().expect("the frontend's");
    let mut edges = vec![(its_leaf, frontend, Tier::Edge)];
    let mut rates = vec![(
        its_leaf,
        frontend,
        link(network.frontend_bits_per_s * speedup, 0),
    )];
    for leaf in 0..leaves {
        // Without a limit an uplink carries all that its leaf sends.
        let own = config.endpoint_bits_per_s.iter().zip(&config.leaf);
        let all: f64 = own
            .filter(|(_, of)| **of == leaf)
            .map(|(rate, _)| rate)
            .sum();
        let rate = config.uplink_bits_per_s.unwrap_or(all.max(nic_bits_per_s));
        for spine in leaves..leaves + spines {
            edges.push((leaf, spine, Tier::Core));
            rates.push((leaf, spine, link(rate / f64::from(spines), delay_ns)));
        }
    }
    let graph = Graph::new(&edges, hosts).and_then(|graph| graph.with_links(&rates));
    graph.map_err(|error| TooLarge(error.to_string()))
}

impl Network for PacketNetwork {
    fn send(&mut self, now: SimTime, from: Endpoint, to: Endpoint, bytes: u64) -> TransferId {
        self.run(now);
        let id = TransferId(self.next);
        self.next += 1;
        let transfer = Transfer {
            from,
            to,
            bytes,
            state: State::Alone { start: now },
        };
        self.transfers.insert(id, transfer);
        let (path, hops) = self.path(from, to);
        let path = &path[..hops];
        let meets = path.iter().any(|&link| self.users[link] > 0);
        for &link in path {
            self.users[link] += 1;
        }
        if from == to || bytes == 0 {
            let at = now + self.latency_ns(from, to);
            self.ends.push(Reverse((at, id)));
            self.transfers.get_mut(&id).expect("it is new").state = State::Done;
            return id;
        }
        if !meets
            && let Some(ns) = self.alone_ns(from, to, bytes)
            && !self.fails(path, now, now + ns)
        {
            self.ends.push(Reverse((now + ns, id)));
            return id;
        }
        let shares = |other: &Transfer| {
            let (links, hops) = self.path(other.from, other.to);
            links[..hops].iter().any(|link| path.contains(link))
        };
        let meeting = self.transfers.iter().filter(|(_, other)| shares(other));
        let meeting: Vec<TransferId> = meeting.map(|(id, _)| *id).collect();
        for id in meeting {
            self.simulate(now, id);
        }
        id
    }

    fn cancel(&mut self, now: SimTime, transfer: TransferId) -> bool {
        self.run(now);
        let Some(Transfer {
            from, to, state, ..
        }) = self.transfers.remove(&transfer)
        else {
            return false;
        };
        if let State::Parts(_) = state {
            for &connection in &self.connections[&(from, to)] {
                self.network.cancel(connection, transfer.0);
            }
        }
        self.leave(from, to);
        true
    }

    // Outages are known from the start, and links of packets keep their rates.

    fn set_share(&mut self, _now: SimTime, _endpoint: Endpoint, _share: f64) {}

    fn set_uplink_share(&mut self, _now: SimTime, _leaf: u32, _share: f64) {}

    fn next_time(&mut self) -> Option<SimTime> {
        while let Some(Reverse((_, id))) = self.ends.peek() {
            match self.transfers.get(id) {
                Some(transfer) if !matches!(transfer.state, State::Parts(_)) => break,
                _ => self.ends.pop(), // it was cancelled, or meets another one
            };
        }
        let end = self.ends.peek().map(|Reverse((at, _))| *at);
        let part = self.network.next_ns().map(SimTime);
        end.into_iter().chain(part).min()
    }

    fn advance(&mut self, now: SimTime, out: &mut Vec<TransferId>) {
        self.run(now);
        while let Some(&Reverse((at, id))) = self.ends.peek()
            && at <= now
        {
            self.ends.pop();
            let ended = self.transfers.get(&id);
            if ended.is_some_and(|transfer| !matches!(transfer.state, State::Parts(_))) {
                let Transfer { from, to, .. } = self.transfers.remove(&id).expect("it is there");
                self.leave(from, to);
                out.push(id);
            }
        }
    }

    fn latency_ns(&self, from: Endpoint, to: Endpoint) -> u64 {
        let links = match (from == to, self.leaf(from) == self.leaf(to)) {
            (true, _) => 0,
            (false, true) => 2,
            (false, false) => 4,
        };
        links * self.config.hop_latency_ns
    }

    fn under_way(&self) -> usize {
        self.transfers.len()
    }
}

/// The links from one endpoint to another that others can fill, as indexes of [`PacketNetwork::users`].
fn path(config: &FabricConfig, from: Endpoint, to: Endpoint) -> ([usize; 4], usize) {
    let leaf = |of: Endpoint| config.leaf[of.0 as usize] as usize;
    let (up, down) = (2 * from.0 as usize, 2 * to.0 as usize + 1);
    if leaf(from) == leaf(to) || config.uplink_bits_per_s.is_none() {
        return ([up, down, 0, 0], 2);
    }
    let leaves = 2 * config.leaf.len();
    let (out, into) = (leaves + 2 * leaf(from), leaves + 2 * leaf(to) + 1);
    ([up, down, out, into], 4)
}

/// The links of each background flow.
fn of_background(config: &FabricConfig, nics: &[u32], flows: &[Flow]) -> Vec<Vec<usize>> {
    let owners = (0..).zip(nics);
    let owners = owners.flat_map(|(of, &count)| (0..count).map(move |_| Endpoint(of)));
    let owners: Vec<Endpoint> = owners.collect();
    let links = |flow: &Flow| {
        let owner = |nic: u32| owners[nic as usize];
        let (links, hops) = path(config, owner(flow.src), owner(flow.dst));
        links[..hops].to_vec()
    };
    flows.iter().map(links).collect()
}

/// A background flow behind `connections` others.
fn after_connections(mut flow: Flow, connections: usize, speedup: f64) -> Flow {
    flow.id += connections as u64;
    flow.start_ns = round_u64(flow.start_ns as f64 / speedup);
    for after in &mut flow.after {
        after.flow += to_u32(connections);
    }
    flow
}

pub(crate) fn link(bits_per_s: f64, delay_ns: u64) -> Link {
    Link {
        bits_per_s: round_u64(bits_per_s).clamp(1, 1_000_000_000_000_000),
        delay_ns,
    }
}

/// Links that are down for a time, as in [`PacketNetwork::users`].
type Outages = Vec<(usize, SimTime, SimTime)>;

/// The failures of the cluster file, for the simulator and by link.
fn failures(
    cluster: &Cluster,
    config: &FabricConfig,
    (nics, first_nic): (&[u32], &[u32]),
) -> (Vec<Failure>, Outages) {
    let leaves = config.leaf.iter().max().map_or(0, |leaf| leaf + 1);
    let (mut failures, mut outages) = (Vec::new(), Vec::new());
    for event in &cluster.events {
        let at = SimTime::from_secs_f64(event.at_s);
        let until = event.until_s.map(SimTime::from_secs_f64);
        let mut fail = |target| {
            failures.push(Failure {
                target,
                at_ns: at.0,
                repair_ns: until.map(|until| until.0),
            });
        };
        let first_link = match event.fault {
            Fault::Link { share: 0.0 } => {
                let of = event.workers[0] as usize;
                for nic in first_nic[of]..first_nic[of] + nics[of] {
                    fail(Target::Host(nic));
                }
                2 * of
            }
            Fault::Uplink { leaf, spine } => {
                fail(Target::Link(leaf, leaves + spine));
                2 * (config.leaf.len() + leaf as usize)
            }
            _ => continue,
        };
        for link in [first_link, first_link + 1] {
            outages.push((link, at, until.unwrap_or(SimTime::MAX)));
        }
    }
    (failures, outages)
}

/// A network without traffic, whose interfaces and ports are `nic` unless `topology` has others.
pub(crate) fn scenario(seed: u64, topology: Topology, nic: Link) -> Scenario {
    let times = nic.bits_per_s as f64 / DCQCN_BITS_PER_S;
    Scenario {
        seed,
        duration_ns: u64::MAX,
        topology,
        links: Links {
            host: Some(nic),
            edge: nic,
            core: nic,
        },
        queue: Queue {
            capacity_packets: 0,
            capacity_bytes: 0,
            discipline: Discipline::Fifo,
            aqm: Aqm::EcnRamp {
                min_bytes: floor_u64(MARKS_MIN_BYTES * times),
                max_bytes: floor_u64(MARKS_MAX_BYTES * times),
                probability: MARKS_PROBABILITY,
            },
            loss: 0.0,
            shared: None,
            pfc: None,
            trim: None,
            priorities: [0, 1, 2, 3, 4, 5, 6, 7],
        },
        flows: Vec::new(),
        spray_paths: 64,
        sample_ns: None,
        failures: Vec::new(),
        convergence_ns: 0,
    }
}

type Connections = HashMap<(Endpoint, Endpoint), Vec<u32>>;

/// The queue pairs: from prefill workers to those that generate, between workers of a pool that fetch blocks from each
/// other, and with `network.messages` between the frontend and each worker.
fn connections(
    cluster: &Cluster,
    nics: &[u32],
    first_nic: &[u32],
    nic_bits_per_s: f64,
) -> Result<(Vec<Flow>, Connections), TooLarge> {
    let mut flows = Vec::new();
    let mut connections = Connections::new();
    let pools: Vec<&PoolConfig> = cluster.workers().map(|(_, pool)| pool).collect();
    let frontend = pools.len();
    let carries = |from: usize, to: usize| match (pools.get(from), pools.get(to)) {
        (Some(of), Some(other)) if of.name == other.name => {
            from != to && of.engine.peer_tier.is_some()
        }
        (Some(of), Some(other)) => of.role == Role::Prefill && other.role != Role::Prefill,
        (None, Some(_)) | (Some(_), None) => cluster.network.messages,
        (None, None) => false,
    };
    for from in 0..=frontend {
        for to in 0..=frontend {
            if !carries(from, to) {
                continue;
            }
            let ends_at_frontend = from == frontend || to == frontend;
            let parts = if ends_at_frontend {
                1
            } else {
                nics[from].max(nics[to])
            };
            let made = (0..parts).map(|part| {
                let nic = |of: usize| first_nic[of] + part * nics[of].min(parts) / parts;
                flows.push(queue_pair(
                    flows.len() as u64,
                    (nic(from), nic(to)),
                    nic_bits_per_s,
                    cluster.network.packet_bytes,
                ));
                to_u32(flows.len()) - 1
            });
            let made: Vec<u32> = made.collect();
            connections.insert((Endpoint(to_u32(from)), Endpoint(to_u32(to))), made);
        }
        if flows.len() > CONNECTIONS_MAX {
            return Err(TooLarge(format!(
                "the GPUs of its workers need more than {CONNECTIONS_MAX} connections"
            )));
        }
    }
    Ok((flows, connections))
}

/// A queue pair between two interfaces.
pub(crate) fn queue_pair(
    id: u64,
    (src, dst): (u32, u32),
    nic_bits_per_s: f64,
    packet_bytes: u32,
) -> Flow {
    let paper = Dcqcn::default();
    let times = nic_bits_per_s / DCQCN_BITS_PER_S;
    let dcqcn = Dcqcn {
        byte_counter: floor_u64(paper.byte_counter as f64 * times),
        additive_bits_per_s: paper.additive_bits_per_s * times,
        hyper_bits_per_s: paper.hyper_bits_per_s * times,
        rate_bits_per_s_min: paper.rate_bits_per_s_min * times,
        ..paper
    };
    Flow {
        id,
        src,
        dst,
        start_ns: 0,
        demand: Demand::Bytes(0),
        transport: Transport::Roce(Roce {
            dcqcn: Some(dcqcn),
            retry_ns: Some(RETRY_NS),
            ack_every: PACKETS_PER_ACK,
            ..Roce::default()
        }),
        paths: Paths::By(Routing::Ecmp),
        packet_bytes,
        header_bytes: HEADER_BYTES,
        ack_bytes: ACK_BYTES,
        class: 0,
        answer_class: 0,
        after: Vec::new(),
        collective: None,
    }
}
