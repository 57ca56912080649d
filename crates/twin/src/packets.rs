//! The network between workers packet by packet: `network.mode = "packets"`.
//!
//! A transfer that meets no other one takes a time that follows from its bytes and links. When another one shares a
//! link with it, both are simulated by `slipstream-netsim` from then on, with the bytes that are left.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use slipstream_base::width::{floor_u64, round_u64, to_u32};
use slipstream_base::{Role, SimTime};
use slipstream_config::cluster::{Cluster, NetworkConfig};
use slipstream_flows::{Endpoint, FabricConfig, Network, TransferId};
use slipstream_netsim::aqm::Aqm;
use slipstream_netsim::open::{Arrived, OpenNetwork};
use slipstream_netsim::route::Routing;
use slipstream_netsim::scenario::{
    Dcqcn, Demand, Flow, Link, Links, Paths, Queue, Roce, Scenario, Transport,
};
use slipstream_netsim::scheduled::Discipline;
use slipstream_netsim::topology::{Graph, Tier, Topology};

/// Headers of a RoCEv2 packet, bytes: Ethernet 14 and 4 (IEEE 802.3), IPv4 20 (RFC 791), UDP 8 (RFC 768), and BTH 12 and
/// ICRC 4 (InfiniBand Architecture Specification volume 1, annex A17).
const HEADER_BYTES: u32 = 62;
/// An acknowledgment: the same with AETH, 4 bytes (the same specification).
const ACK_BYTES: u32 = HEADER_BYTES + 4;
/// Local ACK timeout: 4.096 us x 2^14 (14 is the default of the `perftest` tools of rdma-core). Nothing is lost here, so
/// that it only must be longer than the longest queue.
const RETRY_NS: u64 = 4_096 << 14;
/// Nothing is lost, and rates do not follow acknowledgments: fewer of them change no time, and save events.
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
    /// Network interfaces by endpoint.
    nics: Vec<u32>,
    /// Connections from an endpoint to another, one per pair of interfaces.
    connections: HashMap<(Endpoint, Endpoint), Vec<u32>>,
    network: OpenNetwork,
    transfers: BTreeMap<TransferId, Transfer>,
    /// Transfers that use a link: by endpoint out `2e`, in `2e + 1`, then leaves likewise.
    users: Vec<u32>,
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
    ) -> Result<PacketNetwork, TooLarge> {
        let network = &cluster.network;
        let mut nics: Vec<u32> = cluster
            .workers()
            .map(|(_, pool)| pool.engine.gpus())
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
        let (spine, frontend) = (leaves, leaves + 1);
        *hosts.last_mut().expect("the frontend's") = frontend;
        let delay_ns = config.hop_latency_ns;
        let link = |bits_per_s: f64, delay_ns| Link {
            bits_per_s: round_u64(bits_per_s).clamp(1, 1_000_000_000_000_000),
            delay_ns,
        };
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
            edges.push((leaf, spine, Tier::Core));
            rates.push((leaf, spine, link(rate, delay_ns)));
        }
        let nic = link(nic_bits_per_s, delay_ns);
        let times = nic_bits_per_s / DCQCN_BITS_PER_S;
        let (flows, connections) = connections(cluster, &nics, &first_nic, times)?;
        let graph = Graph::new(&edges, hosts).and_then(|graph| graph.with_links(&rates));
        let graph = graph.map_err(|error| TooLarge(error.to_string()))?;
        let scenario = Scenario {
            seed: cluster.router.seed,
            duration_ns: u64::MAX,
            topology: Topology::Graph(graph.with_numbered_hosts()),
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
            flows,
            spray_paths: 1,
            sample_ns: None,
            failures: Vec::new(),
            convergence_ns: 0,
        };
        let open = OpenNetwork::new(scenario).map_err(|error| TooLarge(error.to_string()))?;
        Ok(PacketNetwork {
            users: vec![0; 2 * (config.leaf.len() + leaves as usize)],
            config,
            nic_bits_per_s,
            packet_bytes: network.packet_bytes.into(),
            nics,
            connections,
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

    /// The links that a transfer crosses and that others can fill, as indexes of `users`.
    fn path(&self, from: Endpoint, to: Endpoint) -> ([usize; 4], usize) {
        let (up, down) = (2 * from.0 as usize, 2 * to.0 as usize + 1);
        if self.leaf(from) == self.leaf(to) || self.config.uplink_bits_per_s.is_none() {
            return ([up, down, 0, 0], 2);
        }
        let leaves = 2 * self.config.leaf.len();
        let out = leaves + 2 * self.leaf(from) as usize;
        let into = leaves + 2 * self.leaf(to) as usize + 1;
        ([up, down, out, into], 4)
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
            after.extend(rate.map(|rate| (rate, sending)));
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
        if !meets && let Some(ns) = self.alone_ns(from, to, bytes) {
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

    fn set_share(&mut self, _now: SimTime, _endpoint: Endpoint, share: f64) {
        // The cluster file has no such event with packets.
        debug_assert!(share == 1.0, "links of packets keep their rates");
    }

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

type Connections = HashMap<(Endpoint, Endpoint), Vec<u32>>;

/// The queue pairs: from prefill workers to those that generate, and with `network.messages` between the frontend and
/// each worker.
fn connections(
    cluster: &Cluster,
    nics: &[u32],
    first_nic: &[u32],
    times: f64,
) -> Result<(Vec<Flow>, Connections), TooLarge> {
    let paper = Dcqcn::default();
    let dcqcn = Dcqcn {
        byte_counter: floor_u64(paper.byte_counter as f64 * times),
        additive_bits_per_s: paper.additive_bits_per_s * times,
        hyper_bits_per_s: paper.hyper_bits_per_s * times,
        rate_bits_per_s_min: paper.rate_bits_per_s_min * times,
        ..paper
    };
    let mut flows = Vec::new();
    let mut connections = Connections::new();
    let roles: Vec<Role> = cluster.workers().map(|(_, pool)| pool.role).collect();
    let frontend = roles.len();
    let carries = |from: usize, to: usize| match (roles.get(from), roles.get(to)) {
        (Some(Role::Prefill), Some(role)) => *role != Role::Prefill,
        (None, Some(_)) | (Some(_), None) => cluster.network.messages,
        _ => false,
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
                    dcqcn,
                    &cluster.network,
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

fn queue_pair(id: u64, (src, dst): (u32, u32), dcqcn: Dcqcn, network: &NetworkConfig) -> Flow {
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
        paths: Paths::By(Routing::ShortestPath),
        packet_bytes: network.packet_bytes,
        header_bytes: HEADER_BYTES,
        ack_bytes: ACK_BYTES,
        class: 0,
        answer_class: 0,
        after: Vec::new(),
        collective: None,
    }
}
