//! Switches, hosts, and the ports that connect them.
//!
//! A regular topology is a few numbers: ports and neighbors are computed, not stored. A fat-tree
//! with k = 96 costs as much to create as one with k = 4.

use slipstream_base::width::{to_u8, to_u32};

use crate::error::Error;
use crate::link::Link;

/// A switch; numbered densely from 0.
pub type Node = u32;
/// A host; numbered densely from 0.
pub type Host = u32;
/// A directed port: the sending end of one direction of a link.
pub type PortId = u32;

/// The tier of a link; rates and delays may differ by tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Host to switch and back.
    Host,
    /// Between edge (leaf) and aggregation (spine) switches, and all links of other topologies.
    Edge,
    /// Between aggregation and core switches; global links of a dragonfly.
    Core,
}

/// The switches and hosts of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Topology {
    /// k-ary fat-tree; `FatTree::new` checks it.
    FatTree(FatTree),
    /// Two layers, every leaf linked to every spine.
    LeafSpine(LeafSpine),
    /// Any other topology: an undirected graph.
    Graph(Graph),
}

/// A k-ary fat-tree (Al-Fares, Loukissas, Vahdat, "A scalable, commodity data center network
/// architecture", SIGCOMM 2008): k pods of k/2 edge and k/2 aggregation switches, k²/4 cores.
///
/// Node numbers: edge switches pod by pod, then aggregation switches, then cores; aggregation
/// switch g of each pod reaches cores g·k/2 to g·k/2 + k/2 − 1. Host numbers: see [`HostOrder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FatTree {
    k: u32,
    hosts_per_edge: u32,
    order: HostOrder,
}

/// Order of host numbers if every edge switch has equally many hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostOrder {
    /// Switch after switch: host = switch · hosts per switch + ordinal.
    #[default]
    BySwitch,
    /// The first host of every switch, then the second of every switch, and so on: host = ordinal ·
    /// switches + switch. This is the order of Days.
    ByOrdinal,
}

/// Hosts as a grid: the same number on each of some switches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Switches with hosts.
    pub switches: u32,
    /// Hosts per switch.
    pub per_switch: u32,
    /// How they are numbered.
    pub order: HostOrder,
}

impl Grid {
    /// Index of `host`'s switch among those with hosts, and its ordinal at that switch.
    pub fn place(self, host: Host) -> (u32, u32) {
        match self.order {
            HostOrder::BySwitch => (host / self.per_switch, host % self.per_switch),
            HostOrder::ByOrdinal => (host % self.switches, host / self.switches),
        }
    }

    /// The host with an ordinal at a switch.
    pub fn host(self, switch: u32, ordinal: u32) -> Host {
        match self.order {
            HostOrder::BySwitch => switch * self.per_switch + ordinal,
            HostOrder::ByOrdinal => ordinal * self.switches + switch,
        }
    }
}

impl FatTree {
    /// # Errors
    /// If `k` is odd, below 2 or above 512, or if there are no hosts.
    pub fn new(k: u32, hosts_per_edge: u32) -> Result<Self, Error> {
        if k < 2 || !k.is_multiple_of(2) || k > 512 {
            return Err(Error::Topology(format!(
                "a fat-tree needs an even k from 2 to 512, not {k}; use {} or {}",
                (k & !1).clamp(2, 512),
                (k.saturating_add(1) & !1).clamp(2, 512)
            )));
        }
        if hosts_per_edge == 0 || hosts_per_edge > 4096 {
            return Err(Error::Topology(format!(
                "hosts_per_edge must be from 1 to 4096, not {hosts_per_edge}"
            )));
        }
        Ok(FatTree {
            k,
            hosts_per_edge,
            order: HostOrder::BySwitch,
        })
    }

    /// The same fat-tree with hosts numbered in another order.
    #[must_use]
    pub fn numbered(self, order: HostOrder) -> Self {
        FatTree { order, ..self }
    }

    fn grid(self) -> Grid {
        Grid {
            switches: self.k * self.half(),
            per_switch: self.hosts_per_edge,
            order: self.order,
        }
    }

    /// Index of a host in the order [`HostOrder::BySwitch`].
    fn slot(self, host: Host) -> u32 {
        let (switch, ordinal) = self.grid().place(host);
        switch * self.hosts_per_edge + ordinal
    }

    /// The host with that index.
    fn host_at(self, slot: u32) -> Host {
        self.grid()
            .host(slot / self.hosts_per_edge, slot % self.hosts_per_edge)
    }

    fn half(self) -> u32 {
        self.k / 2
    }

    /// Ports owned by one pod: edge up, aggregation up, aggregation down, core down to this pod
    /// (each (k/2)²), then edge down and host up (each k/2 · hosts per edge).
    fn ports_per_pod(self) -> u32 {
        4 * self.half() * self.half() + 2 * self.half() * self.hosts_per_edge
    }

    fn block(self, pod: u32, part: u32, a: u32, b: u32) -> PortId {
        let h = self.half();
        pod * self.ports_per_pod() + part * h * h + a * h + b
    }

    fn host_block(self, host: Host, part: u32) -> PortId {
        let h = self.half();
        let (per_pod, slot) = (h * self.hosts_per_edge, self.slot(host));
        (slot / per_pod) * self.ports_per_pod() + 4 * h * h + part * per_pod + slot % per_pod
    }
}

/// Two layers of switches: leaves 0.., then spines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafSpine {
    leaves: u32,
    spines: u32,
    hosts_per_leaf: u32,
}

impl LeafSpine {
    /// # Errors
    /// If a number is 0 or the fabric is too large to number.
    pub fn new(leaves: u32, spines: u32, hosts_per_leaf: u32) -> Result<Self, Error> {
        for (name, n) in [
            ("leaves", leaves),
            ("spines", spines),
            ("hosts_per_leaf", hosts_per_leaf),
        ] {
            if n == 0 || n > 8192 {
                return Err(Error::Topology(format!(
                    "`{name}` must be from 1 to 8192, not {n}"
                )));
            }
        }
        Ok(LeafSpine {
            leaves,
            spines,
            hosts_per_leaf,
        })
    }

    /// Ports owned by one leaf: up, spine down to this leaf, down to hosts, host up.
    fn ports_per_leaf(self) -> u32 {
        2 * self.spines + 2 * self.hosts_per_leaf
    }
}

/// An undirected graph, its edges in both directions as ports.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// Node n's neighbors are `to[first[n]..first[n + 1]]`, ascending; the index is the port.
    first: Vec<u32>,
    to: Vec<Node>,
    tier: Vec<Tier>,
    /// Host h is attached to switch `hosts[h]`.
    hosts: Vec<Node>,
    /// Whether hosts have numbers of their own. If not, a host has the number of its node.
    numbered: bool,
    /// Index in `own` plus one of each directed edge; empty if all edges have the link of their
    /// tier.
    own_of: Vec<u8>,
    /// Rates and delays of single edges.
    own: Vec<Link>,
}

/// Limit of a graph's edges, and of its hosts: with both, ports have 32-bit numbers.
const EDGES_MAX: u64 = 100_000_000;
const HOSTS_MAX: u64 = 100_000_000;

/// Limit of different rates and delays of edges: with those of the three tiers, as many as a port
/// can represent.
pub const EDGE_LINKS_MAX: usize = 253;

impl Graph {
    /// Creates a graph from its edges; host h is attached to node `hosts[h]`.
    ///
    /// # Errors
    /// If an edge connects a node with itself, occurs twice, or a host's node has no edge; if there
    /// are too many edges or hosts.
    pub fn new(edges: &[(Node, Node, Tier)], hosts: Vec<Node>) -> Result<Self, Error> {
        if edges.len() as u64 > EDGES_MAX || hosts.len() as u64 > HOSTS_MAX {
            return Err(Error::Topology(format!(
                "a graph has at most {EDGES_MAX} edges and {HOSTS_MAX} hosts, not {} and {}",
                edges.len(),
                hosts.len()
            )));
        }
        let nodes = edges
            .iter()
            .map(|e| e.0.max(e.1) + 1)
            .chain(hosts.iter().map(|h| h + 1))
            .max()
            .unwrap_or(0);
        if nodes > 4_000_000 {
            return Err(Error::Topology(format!(
                "node number {} is too large: nodes are numbered densely from 0, at most 4000000",
                nodes - 1
            )));
        }
        let mut directed: Vec<(Node, Node, Tier)> = Vec::with_capacity(edges.len() * 2);
        for &(a, b, tier) in edges {
            if a == b {
                return Err(Error::Topology(format!(
                    "edge [{a}, {b}] connects a node with itself"
                )));
            }
            directed.push((a, b, tier));
            directed.push((b, a, tier));
        }
        directed.sort_unstable_by_key(|e| (e.0, e.1));
        if let Some(twice) = directed
            .windows(2)
            .find(|w| (w[0].0, w[0].1) == (w[1].0, w[1].1))
        {
            return Err(Error::Topology(format!(
                "edge [{}, {}] is listed twice",
                twice[0].0, twice[0].1
            )));
        }
        let mut first = vec![0u32; nodes as usize + 1];
        for &(a, _, _) in &directed {
            first[a as usize + 1] += 1;
        }
        for n in 0..nodes as usize {
            first[n + 1] += first[n];
        }
        for (h, &node) in hosts.iter().enumerate() {
            if first[node as usize] == first[node as usize + 1] && nodes > 1 {
                return Err(Error::Topology(format!(
                    "host {h} is attached to node {node}, which has no edge; add one"
                )));
            }
        }
        Ok(Graph {
            first,
            to: directed.iter().map(|e| e.1).collect(),
            tier: directed.iter().map(|e| e.2).collect(),
            hosts,
            numbered: false,
            own_of: Vec::new(),
            own: Vec::new(),
        })
    }

    /// Sets rates and delays of single edges: (node, node, link), each in both directions.
    ///
    /// # Errors
    /// If an edge does not exist, or there are more than [`EDGE_LINKS_MAX`] different links.
    pub fn with_links(mut self, links: &[(Node, Node, Link)]) -> Result<Self, Error> {
        self.own_of = vec![0; self.to.len()];
        for &(a, b, link) in links {
            let at = match self.own.iter().position(|l| *l == link) {
                Some(at) => at,
                None if self.own.len() < EDGE_LINKS_MAX => {
                    self.own.push(link);
                    self.own.len() - 1
                }
                None => {
                    return Err(Error::Topology(format!(
                        "the edges have more than {EDGE_LINKS_MAX} different rates and delays"
                    )));
                }
            };
            for (from, to) in [(a, b), (b, a)] {
                let Ok(place) = self.neighbors(from).binary_search(&to) else {
                    return Err(Error::Topology(format!("there is no edge [{a}, {b}]")));
                };
                self.own_of[self.first[from as usize] as usize + place] = to_u8(at) + 1;
            }
        }
        Ok(self)
    }

    /// The same graph with hosts that have numbers of their own, so that a node may have several.
    #[must_use]
    pub fn with_numbered_hosts(self) -> Self {
        Graph {
            numbered: true,
            ..self
        }
    }

    fn grid(&self) -> Option<Grid> {
        let first = *self.hosts.first()?;
        let hosts = self.hosts.len();
        let run = self.hosts.iter().take_while(|&&n| n == first).count();
        // In ordinal order: the switches of the first ordinal repeat.
        if run == 1
            && let Some(period) = self.hosts[1..].iter().position(|&n| n == first)
        {
            let period = period + 1;
            let repeats = hosts.is_multiple_of(period)
                && self
                    .hosts
                    .chunks(period)
                    .all(|c| c == &self.hosts[..period]);
            return repeats.then_some(Grid {
                switches: to_u32(period),
                per_switch: to_u32(hosts / period),
                order: HostOrder::ByOrdinal,
            });
        }
        let even = hosts.is_multiple_of(run)
            && self.hosts.chunks(run).all(|c| c.iter().all(|&n| n == c[0]));
        even.then_some(Grid {
            switches: to_u32(hosts / run),
            per_switch: to_u32(run),
            order: HostOrder::BySwitch,
        })
    }

    /// An n-ary torus of 1 to 3 dimensions with one host per node. Node x + n·(y + n·z).
    ///
    /// # Errors
    /// If `dim` is not 1, 2 or 3, or `n` is below 2 or too large.
    pub fn torus(dim: u32, n: u32) -> Result<Self, Error> {
        if !(1..=3).contains(&dim) || !(2..=1000).contains(&n) || u64::from(n).pow(dim) > 1_000_000
        {
            return Err(Error::Topology(format!(
                "a torus needs dim from 1 to 3, n of at least 2 and at most 1000000 nodes, \
                 not dim = {dim}, n = {n}"
            )));
        }
        let nodes = n.pow(dim);
        let mut edges = Vec::new();
        for node in 0..nodes {
            for d in 0..dim {
                let stride = n.pow(d);
                let at = node / stride % n;
                let next = node - at * stride + (at + 1) % n * stride;
                // With n = 2 the wrap-around link is the same link.
                if n > 2 || next > node {
                    edges.push((node, next, Tier::Edge));
                }
            }
        }
        Graph::new(&edges, (0..nodes).collect())
    }

    /// A dragonfly (Kim, Dally, Scott, Abts, ISCA 2008): groups of `a` routers, fully connected,
    /// with `p` hosts and `h` global links per router; a·h + 1 groups, so that each pair of groups
    /// shares one global link. Hosts have numbers of their own, in `order`.
    ///
    /// # Errors
    /// If a number is 0 or there are too many routers, hosts or links.
    pub fn dragonfly(p: u32, a: u32, h: u32, order: HostOrder) -> Result<Self, Error> {
        let groups = u64::from(a) * u64::from(h) + 1;
        let routers = groups.saturating_mul(u64::from(a));
        let hosts = routers.saturating_mul(u64::from(p));
        let links = routers.saturating_mul(u64::from(a) + u64::from(h)) / 2;
        if p == 0 || a == 0 || h == 0 || routers > 1_000_000 {
            return Err(Error::Topology(format!(
                "a dragonfly needs p, a, h of at least 1 and at most 1000000 routers, \
                 not p = {p}, a = {a}, h = {h}"
            )));
        }
        if hosts > HOSTS_MAX || links > EDGES_MAX {
            return Err(Error::Topology(format!(
                "a dragonfly with p = {p}, a = {a}, h = {h} has {hosts} hosts and about {links} \
                 links; at most {HOSTS_MAX} and {EDGES_MAX} are supported"
            )));
        }
        let groups = to_u32(groups);
        let mut edges = Vec::new();
        for g in 0..groups {
            for i in 0..a {
                for j in i + 1..a {
                    edges.push((g * a + i, g * a + j, Tier::Edge));
                }
            }
            // Group g's global port q leads to group (g + q + 1) mod groups, whose reverse port is
            // groups − 2 − q: the palm-tree arrangement.
            for q in 0..a * h {
                let other = (g + q + 1) % groups;
                if g < other {
                    let back = groups - 2 - q;
                    edges.push((g * a + q / h, other * a + back / h, Tier::Core));
                }
            }
        }
        let routers = groups * a;
        let grid = Grid {
            switches: routers,
            per_switch: p,
            order,
        };
        let hosts = (0..routers * p).map(|h| grid.place(h).0).collect();
        Graph::new(&edges, hosts).map(Graph::with_numbered_hosts)
    }

    /// A rail-optimized fabric of one layer of leaf switches, as SimAI's Spectrum-X files describe
    /// it: GPU i is in server i / `per_server` and on rail i mod `per_server`; a segment is
    /// `nics_per_leaf` servers, each (segment, rail) has a leaf, and every leaf is linked to every
    /// spine. Nodes: leaves segment by segment, then spines.
    ///
    /// # Errors
    /// If the GPUs fill several segments, the last one in part, or a number is 0 or too large.
    pub fn rails(
        gpus: u32,
        per_server: u32,
        nics_per_leaf: u32,
        spines: u32,
    ) -> Result<Self, Error> {
        let segment = u64::from(per_server) * u64::from(nics_per_leaf);
        if segment == 0 || spines == 0 || gpus == 0 || gpus > 1_000_000 || spines > 8192 {
            return Err(Error::Topology(format!(
                "a rail fabric needs gpus (at most 1000000), gpus_per_server, nics_per_asw and psws \
                 (at most 8192) of at least 1, not {gpus}, {per_server}, {nics_per_leaf}, {spines}"
            )));
        }
        if u64::from(gpus) > segment && !u64::from(gpus).is_multiple_of(segment) {
            return Err(Error::Topology(format!(
                "{gpus} GPUs are not a whole number of segments of {segment} (gpus_per_server · \
                 nics_per_asw); use a multiple of {segment}, or at most that many"
            )));
        }
        // A fabric below one segment leaves ports of its leaves free.
        let segment = u32::try_from(segment).unwrap_or(u32::MAX);
        let leaves = gpus.div_ceil(segment).saturating_mul(per_server);
        let links = u64::from(leaves) * u64::from(spines);
        if links > EDGES_MAX {
            return Err(Error::Topology(format!(
                "a rail fabric of {leaves} leaves and {spines} spines has {links} links; at most \
                 {EDGES_MAX} are supported: raise nics_per_asw or lower psws"
            )));
        }
        let edges: Vec<_> = (0..leaves)
            .flat_map(|leaf| (0..spines).map(move |s| (leaf, leaves + s, Tier::Edge)))
            .collect();
        let leaf = |gpu: u32| gpu / segment * per_server + gpu % per_server;
        Graph::new(&edges, (0..gpus).map(leaf).collect()).map(Graph::with_numbered_hosts)
    }

    fn neighbors(&self, node: Node) -> &[Node] {
        match (
            self.first.get(node as usize),
            self.first.get(node as usize + 1),
        ) {
            (Some(&a), Some(&b)) => &self.to[a as usize..b as usize],
            _ => &[],
        }
    }
}

/// A port's two ends, for reports and failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A switch.
    Node(Node),
    /// A host.
    Host(Host),
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Node(n) => write!(f, "n{n}"),
            End::Host(h) => write!(f, "h{h}"),
        }
    }
}

impl Topology {
    /// Name of a switch or host for people: its tier, and its number there. In files and other outputs, switches have
    /// the numbers of [`Node`].
    pub fn name(&self, end: End) -> String {
        let End::Node(node) = end else {
            return end.to_string();
        };
        match self {
            Topology::FatTree(t) => {
                let (half, per_tier) = (t.half(), t.k * t.half());
                let of_pod = |n: u32| format!("{}.{}", n / half, n % half);
                match node / per_tier {
                    0 => format!("edge{}", of_pod(node)),
                    1 => format!("agg{}", of_pod(node - per_tier)),
                    _ => format!("core{}", node - 2 * per_tier),
                }
            }
            Topology::LeafSpine(t) if node < t.leaves => format!("leaf{node}"),
            Topology::LeafSpine(t) => format!("spine{}", node - t.leaves),
            Topology::Graph(_) => end.to_string(),
        }
    }

    /// Hosts per edge switch of a fat-tree that has fewer than the textbook's k/2: those, and k/2.
    pub(crate) fn fewer_hosts(&self) -> Option<(u32, u32)> {
        match self {
            Topology::FatTree(t) if t.hosts_per_edge < t.half() => {
                Some((t.hosts_per_edge, t.half()))
            }
            _ => None,
        }
    }

    /// Switches.
    pub fn node_count(&self) -> u32 {
        match self {
            Topology::FatTree(t) => t.k * t.k + t.k * t.k / 4,
            Topology::LeafSpine(t) => t.leaves + t.spines,
            Topology::Graph(g) => to_u32(g.first.len()) - 1,
        }
    }

    /// Hosts.
    pub fn host_count(&self) -> u32 {
        match self {
            Topology::FatTree(t) => t.k * t.half() * t.hosts_per_edge,
            Topology::LeafSpine(t) => t.leaves * t.hosts_per_leaf,
            Topology::Graph(g) => to_u32(g.hosts.len()),
        }
    }

    /// Directed ports, host links included.
    pub fn port_count(&self) -> u32 {
        match self {
            Topology::FatTree(t) => t.k * t.ports_per_pod(),
            Topology::LeafSpine(t) => t.leaves * t.ports_per_leaf(),
            Topology::Graph(g) => to_u32(g.to.len() + 2 * g.hosts.len()),
        }
    }

    /// The hosts by switch, for `pairing`. `None` for a graph with different numbers of hosts per
    /// switch.
    pub fn grid(&self) -> Option<Grid> {
        match self {
            Topology::FatTree(t) => Some(t.grid()),
            Topology::LeafSpine(t) => Some(Grid {
                switches: t.leaves,
                per_switch: t.hosts_per_leaf,
                order: HostOrder::BySwitch,
            }),
            Topology::Graph(g) => g.grid(),
        }
    }

    /// The switch that `host` is attached to.
    pub fn attachment(&self, host: Host) -> Node {
        match self {
            Topology::FatTree(t) => t.grid().place(host).0,
            Topology::LeafSpine(t) => host / t.hosts_per_leaf,
            Topology::Graph(g) => g.hosts[host as usize],
        }
    }

    /// The neighbors of a switch among switches, ascending.
    pub fn neighbors(&self, node: Node, out: &mut Vec<Node>) {
        out.clear();
        match self {
            Topology::FatTree(t) => {
                let (h, edges) = (t.half(), t.k * t.half());
                if node < edges {
                    out.extend((0..h).map(|g| edges + node / h * h + g));
                } else if node < 2 * edges {
                    let (pod, g) = ((node - edges) / h, (node - edges) % h);
                    out.extend((0..h).map(|e| pod * h + e));
                    out.extend((0..h).map(|j| 2 * edges + g * h + j));
                } else if node < self.node_count() {
                    let g = (node - 2 * edges) / h;
                    out.extend((0..t.k).map(|pod| edges + pod * h + g));
                }
            }
            Topology::LeafSpine(t) => {
                if node < t.leaves {
                    out.extend(t.leaves..t.leaves + t.spines);
                } else if node < t.leaves + t.spines {
                    out.extend(0..t.leaves);
                }
            }
            Topology::Graph(g) => out.extend_from_slice(g.neighbors(node)),
        }
    }

    /// The port of switch `from` that leads to switch `to`; `None` if they are not linked.
    pub fn port_between(&self, from: Node, to: Node) -> Option<PortId> {
        match self {
            Topology::FatTree(t) => {
                let (h, edges) = (t.half(), t.k * t.half());
                let layer = |n: Node| (n >= edges) as u32 + (n >= 2 * edges) as u32;
                if from >= self.node_count() || to >= self.node_count() {
                    return None;
                }
                match (layer(from), layer(to)) {
                    (0, 1) => {
                        let (pod, g) = ((to - edges) / h, (to - edges) % h);
                        (from / h == pod).then(|| t.block(pod, 0, from % h, g))
                    }
                    (1, 2) => {
                        let (pod, g) = ((from - edges) / h, (from - edges) % h);
                        let core = to - 2 * edges;
                        (core / h == g).then(|| t.block(pod, 1, g, core % h))
                    }
                    (1, 0) => {
                        let (pod, g) = ((from - edges) / h, (from - edges) % h);
                        (to / h == pod).then(|| t.block(pod, 2, g, to % h))
                    }
                    (2, 1) => {
                        let (pod, g) = ((to - edges) / h, (to - edges) % h);
                        let core = from - 2 * edges;
                        (core / h == g).then(|| t.block(pod, 3, g, core % h))
                    }
                    _ => None,
                }
            }
            Topology::LeafSpine(t) => {
                if from < t.leaves && (t.leaves..t.leaves + t.spines).contains(&to) {
                    Some(from * t.ports_per_leaf() + to - t.leaves)
                } else if to < t.leaves && (t.leaves..t.leaves + t.spines).contains(&from) {
                    Some(to * t.ports_per_leaf() + t.spines + from - t.leaves)
                } else {
                    None
                }
            }
            Topology::Graph(g) => {
                let at = g.neighbors(from).binary_search(&to).ok()?;
                Some(g.first[from as usize] + to_u32(at))
            }
        }
    }

    /// The port from `host` to its switch.
    pub fn host_up(&self, host: Host) -> PortId {
        match self {
            Topology::FatTree(t) => t.host_block(host, 1),
            Topology::LeafSpine(t) => {
                let (leaf, slot) = (host / t.hosts_per_leaf, host % t.hosts_per_leaf);
                leaf * t.ports_per_leaf() + 2 * t.spines + t.hosts_per_leaf + slot
            }
            Topology::Graph(g) => to_u32(g.to.len() + 2 * host as usize),
        }
    }

    /// The port from `host`'s switch to it.
    pub fn host_down(&self, host: Host) -> PortId {
        match self {
            Topology::FatTree(t) => t.host_block(host, 0),
            Topology::LeafSpine(t) => {
                let (leaf, slot) = (host / t.hosts_per_leaf, host % t.hosts_per_leaf);
                leaf * t.ports_per_leaf() + 2 * t.spines + slot
            }
            Topology::Graph(g) => to_u32(g.to.len() + 2 * host as usize + 1),
        }
    }

    /// The port at the other end of a port's link.
    ///
    /// # Panics
    /// If the port does not exist.
    pub fn opposite(&self, port: PortId) -> PortId {
        match self.port_ends(port) {
            (End::Host(host), _) => self.host_down(host),
            (_, End::Host(host)) => self.host_up(host),
            (End::Node(a), End::Node(b)) => {
                self.port_between(b, a).expect("links are bidirectional")
            }
        }
    }

    /// The two ends of a port, its sender first.
    pub fn port_ends(&self, port: PortId) -> (End, End) {
        match self {
            Topology::FatTree(t) => {
                let (h, edges) = (t.half(), t.k * t.half());
                let (pod, local) = (port / t.ports_per_pod(), port % t.ports_per_pod());
                let (part, a, b) = (local / (h * h), local % (h * h) / h, local % h);
                let (edge, agg) = (
                    |e| End::Node(pod * h + e),
                    |g| End::Node(edges + pod * h + g),
                );
                let core = |g, j| End::Node(2 * edges + g * h + j);
                match part {
                    0 => (edge(a), agg(b)),
                    1 => (agg(a), core(a, b)),
                    2 => (agg(a), edge(b)),
                    3 => (core(a, b), agg(a)),
                    _ => {
                        let per_pod = h * t.hosts_per_edge;
                        let rest = local - 4 * h * h;
                        let slot = pod * per_pod + rest % per_pod;
                        let (host, switch) = (t.host_at(slot), End::Node(slot / t.hosts_per_edge));
                        if rest < per_pod {
                            (switch, End::Host(host))
                        } else {
                            (End::Host(host), switch)
                        }
                    }
                }
            }
            Topology::LeafSpine(t) => {
                let (leaf, local) = (port / t.ports_per_leaf(), port % t.ports_per_leaf());
                let host = |slot| End::Host(leaf * t.hosts_per_leaf + slot);
                if local < t.spines {
                    (End::Node(leaf), End::Node(t.leaves + local))
                } else if local < 2 * t.spines {
                    (End::Node(t.leaves + local - t.spines), End::Node(leaf))
                } else if local < 2 * t.spines + t.hosts_per_leaf {
                    (End::Node(leaf), host(local - 2 * t.spines))
                } else {
                    let slot = local - 2 * t.spines - t.hosts_per_leaf;
                    (host(slot), End::Node(leaf))
                }
            }
            Topology::Graph(g) => {
                if let Some(rest) = (port as usize).checked_sub(g.to.len()) {
                    let host = to_u32(rest / 2);
                    let (h, n) = (End::Host(host), End::Node(g.hosts[host as usize]));
                    if rest % 2 == 0 { (h, n) } else { (n, h) }
                } else {
                    let from = to_u32(g.first.partition_point(|&f| f <= port)) - 1;
                    (End::Node(from), End::Node(g.to[port as usize]))
                }
            }
        }
    }

    /// The tier of a port's link.
    pub fn tier(&self, port: PortId) -> Tier {
        match self {
            Topology::FatTree(t) => {
                let h = t.half();
                match port % t.ports_per_pod() / (h * h) {
                    0 | 2 => Tier::Edge,
                    1 | 3 => Tier::Core,
                    _ => Tier::Host,
                }
            }
            Topology::LeafSpine(t) => {
                if port % t.ports_per_leaf() < 2 * t.spines {
                    Tier::Edge
                } else {
                    Tier::Host
                }
            }
            Topology::Graph(g) => g.tier.get(port as usize).copied().unwrap_or(Tier::Host),
        }
    }

    /// Rates and delays of single edges, if there are any.
    pub fn own_links(&self) -> &[Link] {
        match self {
            Topology::Graph(g) => &g.own,
            _ => &[],
        }
    }

    /// Index in [`Topology::own_links`] of a port's link; `None` if it has the link of its tier.
    pub fn own_link(&self, port: PortId) -> Option<u8> {
        match self {
            Topology::Graph(g) => g.own_of.get(port as usize)?.checked_sub(1),
            _ => None,
        }
    }

    /// Whether hosts have the numbers of their nodes.
    pub fn names_hosts_by_node(&self) -> bool {
        matches!(self, Topology::Graph(g) if !g.numbered)
    }

    /// The host with `number` in a file; `None` if there is none.
    pub fn host_named(&self, number: u32) -> Option<Host> {
        match self {
            // A linear search: such graphs are small.
            Topology::Graph(g) if !g.numbered => {
                g.hosts.iter().position(|&node| node == number).map(to_u32)
            }
            _ => (number < self.host_count()).then_some(number),
        }
    }

    /// The number of a host in a file: the inverse of [`Topology::host_named`].
    pub fn host_number(&self, host: Host) -> u32 {
        match self {
            Topology::Graph(g) if !g.numbered => g.hosts[host as usize],
            _ => host,
        }
    }

    /// Partitions of the network that are connected only by links with a delay: pods, or leaves. 1
    /// if there is no such partition.
    pub fn parts(&self) -> u32 {
        match self {
            Topology::FatTree(t) => t.k,
            Topology::LeafSpine(t) => t.leaves,
            Topology::Graph(_) => 1,
        }
    }

    /// The partition that owns a port. A port of a core (spine) belongs to the partition it leads
    /// to, so a packet changes partitions once, on the link up to the core.
    pub fn part_of_port(&self, port: PortId) -> u32 {
        match self {
            Topology::FatTree(t) => port / t.ports_per_pod(),
            Topology::LeafSpine(t) => port / t.ports_per_leaf(),
            Topology::Graph(_) => 0,
        }
    }

    /// A partition for each switch, so that all ports of a switch are in one: its pod or leaf;
    /// cores and spines are assigned round-robin.
    pub fn part_of_node(&self, node: Node) -> u32 {
        match self {
            Topology::FatTree(t) => {
                let edges = t.k * t.half();
                if node < 2 * edges {
                    node % edges / t.half()
                } else {
                    (node - 2 * edges) % t.k
                }
            }
            Topology::LeafSpine(t) => {
                if node < t.leaves {
                    node
                } else {
                    (node - t.leaves) % t.leaves
                }
            }
            Topology::Graph(_) => 0,
        }
    }

    /// The partition that owns a host.
    pub fn part_of_host(&self, host: Host) -> u32 {
        match self {
            Topology::FatTree(t) => t.grid().place(host).0 / t.half(),
            Topology::LeafSpine(t) => host / t.hosts_per_leaf,
            Topology::Graph(_) => 0,
        }
    }

    /// The tier of the links that connect partitions.
    pub fn tier_between_parts(&self) -> Tier {
        match self {
            Topology::FatTree(_) => Tier::Core,
            Topology::LeafSpine(_) | Topology::Graph(_) => Tier::Edge,
        }
    }

    /// The shortest path between two switches by arithmetic, if the topology allows it: appends the
    /// switches after `from`, up to `to`. `pick(n)` chooses among n equal paths.
    pub(crate) fn fast_path(
        &self,
        from: Node,
        to: Node,
        pick: &mut dyn FnMut(u32) -> u32,
        out: &mut Vec<Node>,
    ) -> bool {
        match self {
            Topology::FatTree(t) => {
                let (h, edges) = (t.half(), t.k * t.half());
                if from >= edges || to >= edges {
                    return false;
                }
                if from != to {
                    let g = pick(h);
                    out.push(edges + from / h * h + g);
                    if from / h != to / h {
                        out.push(2 * edges + g * h + pick(h));
                        out.push(edges + to / h * h + g);
                    }
                    out.push(to);
                }
                true
            }
            Topology::LeafSpine(t) => {
                if from >= t.leaves || to >= t.leaves {
                    return false;
                }
                if from != to {
                    out.push(t.leaves + pick(t.spines));
                    out.push(to);
                }
                true
            }
            Topology::Graph(_) => false,
        }
    }
}

fn tier_class(tier: Tier) -> u8 {
    match tier {
        Tier::Host => 0,
        Tier::Edge => 1,
        Tier::Core => 2,
    }
}

/// Index of the class of a port's link.
pub(crate) fn link_class(topology: &Topology, port: PortId) -> u8 {
    topology
        .own_link(port)
        .map_or_else(|| tier_class(topology.tier(port)), |own| 3 + own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_the_tier() {
        let names = |topology: &Topology| {
            let nodes = 0..topology.node_count();
            let names: Vec<String> = nodes.map(|node| topology.name(End::Node(node))).collect();
            names.join(" ")
        };
        let tree = Topology::FatTree(FatTree::new(4, 1).expect("even"));
        assert_eq!(
            names(&tree),
            "edge0.0 edge0.1 edge1.0 edge1.1 edge2.0 edge2.1 edge3.0 edge3.1 agg0.0 agg0.1 agg1.0 agg1.1 agg2.0 \
             agg2.1 agg3.0 agg3.1 core0 core1 core2 core3"
        );
        let leaves = Topology::LeafSpine(LeafSpine::new(2, 2, 3).expect("valid"));
        assert_eq!(names(&leaves), "leaf0 leaf1 spine0 spine1");
        assert_eq!(leaves.name(End::Host(5)), "h5");
        assert_eq!(
            (tree.fewer_hosts(), leaves.fewer_hosts()),
            (Some((1, 2)), None)
        );
    }
}
