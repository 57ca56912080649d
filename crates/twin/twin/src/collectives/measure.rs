//! The time of one collective between hosts, during transfers: by fluid shares, or packet by packet.

use slipstream_base::width::{to_u32, to_usize};
use slipstream_netsim::link::Links;
use slipstream_netsim::open::OpenNetwork;
use slipstream_netsim::scenario::{Flow, Scenario, Transport};
use slipstream_netsim::topology::{Graph, Tier, Topology};

use super::{Beside, Kind, Measured};
use crate::packets::{link, queue_pair, scenario};

/// Transfers run for this long before a collective begins: DCQCN's rates have settled.
const WARM_UP_NS: u64 = 1_000_000;
/// The rate of transfers alone is taken over this time.
const ALONE_NS: u64 = 500_000;
/// Collectives follow each other for at least this long, alone or during transfers; at least two of them.
const REPEAT_NS: u64 = 20_000;
const REPEAT_BESIDE_NS: u64 = 1_000_000;
/// The simulator's packets take whole ns, which is 1 % more for 4 KiB at 400 Gbit/s. Here everything is slower by this
/// factor, and the result is divided by it.
const SLOWER: u64 = 16;
/// Bytes of a transfer that does not end.
const ENDLESS_BYTES: u64 = 1 << 40;

/// The hosts of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) hosts: u32,
    /// GPUs of each.
    pub(crate) gpus: u32,
    pub(crate) gpus_per_nic: u32,
}

impl Shape {
    fn all(self) -> u32 {
        self.hosts * self.gpus
    }

    fn nic(self, gpu: u32) -> u32 {
        gpu / self.gpus_per_nic
    }

    fn rounds(self, kind: Kind) -> u32 {
        match kind {
            Kind::Ring => 2 * (self.hosts - 1),
            Kind::AllToAll => 1,
        }
    }

    /// Messages between GPUs: from, to.
    fn pairs(self, kind: Kind) -> Vec<(u32, u32)> {
        let all = self.all();
        match kind {
            Kind::Ring => (0..all).map(|gpu| (gpu, (gpu + self.gpus) % all)).collect(),
            Kind::AllToAll => {
                let host = move |gpu: u32| gpu / self.gpus;
                let others = move |from: u32| {
                    let others = (1..all).map(move |offset| (from, (from + offset) % all));
                    others.filter(move |&(from, to)| host(from) != host(to))
                };
                (0..all).flat_map(others).collect()
            }
        }
    }

    /// Messages of a collective.
    pub(crate) fn messages(self, kind: Kind) -> u64 {
        let to = match kind {
            Kind::Ring => self.rounds(kind),
            Kind::AllToAll => self.all() - self.gpus,
        };
        u64::from(self.all()) * u64::from(to)
    }
}

/// The network interfaces of a host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interface {
    pub(crate) bits_per_s: f64,
    pub(crate) delay_ns: u64,
    pub(crate) packet_bytes: u32,
    pub(crate) seed: u64,
}

/// A collective of messages of `bytes` by max-min fair shares: the messages that cross an interface at a time, and the
/// other transfers, have equal ones.
pub(crate) fn fluid(
    kind: Kind,
    shape: Shape,
    of: Interface,
    bytes: f64,
    beside: Beside,
) -> Measured {
    let at_once = match kind {
        Kind::Ring => shape.gpus_per_nic,
        Kind::AllToAll => shape.gpus_per_nic * (shape.all() - shape.gpus),
    };
    let at_once = f64::from(at_once);
    let rounds = f64::from(shape.rounds(kind));
    let alone = rounds * at_once * bytes * 8e9 / of.bits_per_s;
    let most = f64::from(beside.into.max(beside.out));
    let sent = alone * (at_once + most) / at_once;
    // It takes its bytes of an interface, in either direction.
    let stall = |transfers: u32| if transfers > 0 { alone } else { 0.0 };
    Measured {
        ns: sent + rounds * 2.0 * of.delay_ns as f64,
        stalls: [stall(beside.into), stall(beside.out)],
    }
}

/// The same packet by packet. All interfaces are at one switch, as are those that transfers come from or go to.
pub(crate) fn packets(
    kind: Kind,
    shape: Shape,
    of: Interface,
    bytes: u64,
    beside: Beside,
) -> Measured {
    // Rings of different interfaces never meet.
    let shape = match kind {
        Kind::Ring => Shape {
            gpus: shape.gpus_per_nic,
            ..shape
        },
        Kind::AllToAll => shape,
    };
    let pairs = shape.pairs(kind);
    let nics = shape.all().div_ceil(shape.gpus_per_nic);
    let own = pairs
        .iter()
        .map(|&(from, to)| (shape.nic(from), shape.nic(to)));
    let (mut probe, directions) = Probe::new(own.collect(), nics, of, beside);
    let mut alone = [0.0; 2];
    let slower = SLOWER as f64;
    let mut repeat_ns = REPEAT_NS;
    if beside != Beside::default() {
        repeat_ns = REPEAT_BESIDE_NS;
        probe.run(WARM_UP_NS * SLOWER);
        let before = probe.received(&directions);
        let ns = ALONE_NS * SLOWER;
        probe.run(probe.now + ns);
        let after = probe.received(&directions);
        alone = [0, 1].map(|at| (after[at] - before[at]) as f64 / ns as f64);
    }
    let before = probe.received(&directions);
    let (start, mut times) = (probe.now, 0);
    while times < 2 || probe.now - start < repeat_ns * SLOWER {
        probe.collective(&pairs, shape, kind, bytes);
        times += 1;
    }
    let took = (probe.now - start) as f64;
    let after = probe.received(&directions);
    let stall = |at: usize| {
        let rate = (after[at] - before[at]) as f64 / took;
        // Without transfers there is nothing to lose.
        if alone[at] > 0.0 {
            took * (1.0 - rate / alone[at]).max(0.0) / f64::from(times) / slower
        } else {
            0.0
        }
    };
    Measured {
        ns: took / f64::from(times) / slower,
        stalls: [stall(0), stall(1)],
    }
}

/// A queue pair of a network that is slower by [`SLOWER`].
fn slow_down(flow: &mut Flow) {
    let Transport::Roce(roce) = &mut flow.transport else {
        return;
    };
    roce.retry_ns = roce.retry_ns.map(|ns| ns * SLOWER);
    if let Some(dcqcn) = &mut roce.dcqcn {
        let slower = SLOWER as f64;
        dcqcn.additive_bits_per_s /= slower;
        dcqcn.hyper_bits_per_s /= slower;
        dcqcn.rate_bits_per_s_min /= slower;
        dcqcn.timer_ns *= SLOWER;
        dcqcn.alpha_timer_ns *= SLOWER;
        dcqcn.cnp_interval_ns *= SLOWER;
    }
}

struct Probe {
    network: OpenNetwork,
    now: u64,
    arrived: Vec<slipstream_netsim::open::Arrived>,
}

impl Probe {
    /// A network with a connection between the interfaces of each of `ends`, of `nics` in all, and with transfers that do
    /// not end beside them: their connections by direction.
    fn new(
        mut ends: Vec<(u32, u32)>,
        nics: u32,
        of: Interface,
        beside: Beside,
    ) -> (Probe, [Vec<u32>; 2]) {
        let pair = |id: usize, ends| {
            let mut flow = queue_pair(id as u64, ends, of.bits_per_s, of.packet_bytes);
            slow_down(&mut flow);
            flow
        };
        let mut hosts = nics;
        let mut directions = [Vec::new(), Vec::new()];
        for nic in 0..nics {
            for (at, count) in [beside.into, beside.out].into_iter().enumerate() {
                for _ in 0..count {
                    directions[at].push(to_u32(ends.len()));
                    ends.push(if at == 0 { (hosts, nic) } else { (nic, hosts) });
                    hosts += 1;
                }
            }
        }
        let flows = ends.iter().enumerate().map(|(id, &ends)| pair(id, ends));
        let graph = Graph::new(&[(0, 1, Tier::Core)], vec![0; hosts as usize]);
        let graph = graph.expect("a switch with some thousand hosts at most");
        let topology = Topology::Graph(graph.with_numbered_hosts());
        let slower = SLOWER as f64;
        let port = link(of.bits_per_s / slower, of.delay_ns * SLOWER);
        let scenario = Scenario {
            flows: flows.collect(),
            links: Links {
                host: Some(port),
                edge: port,
                core: port,
            },
            ..scenario(of.seed, topology, link(of.bits_per_s, of.delay_ns))
        };
        let mut probe = Probe {
            network: OpenNetwork::new(scenario).expect("queue pairs at one switch"),
            now: 0,
            arrived: Vec::new(),
        };
        for &connection in directions.iter().flatten() {
            let message = u64::MAX - u64::from(connection);
            probe.network.send(0, connection, message, ENDLESS_BYTES);
        }
        (probe, directions)
    }

    fn run(&mut self, until: u64) {
        self.network.run(until, &mut self.arrived);
        self.arrived.clear();
        self.now = until;
    }

    /// Bytes of the transfers in each direction so far.
    fn received(&self, directions: &[Vec<u32>; 2]) -> [u64; 2] {
        [0, 1].map(|at| {
            let each = directions[at].iter().map(|&of| self.network.received(of));
            each.sum()
        })
    }

    /// Runs one collective. A message of a later round is sent when that of the round before it has come.
    fn collective(&mut self, pairs: &[(u32, u32)], shape: Shape, kind: Kind, bytes: u64) {
        let rounds = shape.rounds(kind);
        let mut left = pairs.len() * rounds as usize;
        for connection in 0..to_u32(pairs.len()) {
            self.network
                .send(self.now, connection, connection.into(), bytes);
        }
        let each = pairs.len() as u64;
        let mut arrived = std::mem::take(&mut self.arrived);
        while left > 0 {
            let Some(next) = self.network.next_ns() else {
                break;
            };
            self.network.run(next, &mut arrived);
            self.now = next;
            for message in arrived.drain(..) {
                left -= 1;
                let (round, of) = (message.message / each, message.message % each);
                if round + 1 < u64::from(rounds) {
                    // In a ring, connection `n` starts at GPU `n`.
                    let (_, to) = pairs[to_usize(of)];
                    let following = (round + 1) * each + u64::from(to);
                    self.network.send(self.now, to, following, bytes);
                }
            }
        }
        self.arrived = arrived;
    }
}
