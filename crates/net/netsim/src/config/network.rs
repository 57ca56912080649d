//! `[topology]`, `[link]`, `[routing]` and `[switch]`.

use slipstream_base::width::{floor_u32, floor_u64, round_u64, to_u16, to_u32, to_usize};
use slipstream_config::doc::{Scalar, Table, Value};

use super::{Dialect, dialect, note, ns};
use crate::Error;
use crate::aqm::Aqm;
use crate::failure::{Failure, Target};
use crate::link::{Link, Links};
use crate::queueing::{Discipline, PFC_CLASSES, Pfc, SharedBuffer, Thresholds, Trim};
use crate::route::Routing;
use crate::scenario::Queue;
use crate::scheduled::OWN_PRIORITIES;
use crate::topology::{FatTree, Graph, HostOrder, LeafSpine, Node, Tier, Topology};

/// The network part of a file.
pub(super) struct Network {
    pub(super) topology: Topology,
    pub(super) links: Links,
    pub(super) queue: Queue,
    pub(super) routing: Routing,
    pub(super) spray_paths: u32,
    pub(super) failures: Vec<Failure>,
    pub(super) convergence_ns: u64,
    /// GPUs per server, in a rail fabric.
    pub(super) gpus_per_server: Option<u32>,
    /// Whether `topology` is that of the file. If it has an error, hosts and switches are not checked
    /// against the stand-in.
    pub(super) is_known: bool,
}

/// Contents of `[topology]`, or of `edges` and `hosts`.
struct Layout {
    topology: Topology,
    /// Hosts per edge switch, if the file gives them.
    hosts_given: Option<u32>,
    /// Whether host links were requested (`topology.model_host_attachment`).
    attachment: bool,
    /// Edges with their own rate or delay.
    edges: Vec<OwnEdge>,
    rails: Option<Rails>,
}

/// An edge with its own rate, bits/s, or delay, ns.
struct OwnEdge {
    ends: (Node, Node),
    bits_per_s: Option<u64>,
    delay_ns: Option<u64>,
}

/// Links of a rail fabric.
struct Rails {
    gpus_per_server: u32,
    nic_bits_per_s: u64,
    uplink_bits_per_s: u64,
    delay_ns: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Category {
    SpectrumX,
    FatTree,
    LeafSpine,
    Torus,
    Dragonfly,
}

const CATEGORIES: &[(&str, Category)] = &[
    ("FatTree", Category::FatTree),
    ("LeafSpine", Category::LeafSpine),
    ("Torus", Category::Torus),
    ("Dragonfly", Category::Dragonfly),
    ("SpectrumX", Category::SpectrumX),
];

/// Values of `routing`; Days' and ours.
pub(super) const ROUTINGS: &[(&str, Routing)] = &[
    ("ShortestPath", Routing::ShortestPath),
    ("ECMP", Routing::Ecmp),
    ("FatTreeEcmp", Routing::Ecmp),
    ("Spray", Routing::Spray),
    ("SimAiEcmp", Routing::Ecmp),
];

pub(super) fn read(root: &Table<'_>, dialect: Dialect, notes: &mut Vec<String>) -> Network {
    let errors = root.error_count();
    let mut layout = read_topology(root, dialect);
    let is_known = root.error_count() == errors;
    // Days' newer engine always models the links of hosts; its older one does not. They are
    // distinguished by keys that only the newer one has.
    let newer = root.has("link")
        || root.has("routing")
        || layout.rails.is_some()
        || matches!(layout.hosts_given, Some(hosts) if hosts > 1);
    let asked: Option<bool> = root.get("model_host_attachment").optional();
    let host_links = asked.unwrap_or(newer || layout.attachment);
    let rails_rate = layout.rails.as_ref().map(|rails| rails.uplink_bits_per_s);
    let rule = ThresholdRule {
        dialect,
        only_marks: dialect::is_of_present_days(root),
    };
    let (rate, mut queue) = root.table("switch", |t| read_switch(t, rule, rails_rate, notes));
    let links = root.table("link", |t| {
        let mut links = read_links(t, rate, host_links, &layout);
        if let Some(rails) = &layout.rails {
            let link = |bits_per_s| Link {
                bits_per_s,
                delay_ns: rails.delay_ns,
            };
            links = Links {
                host: Some(link(rails.nic_bits_per_s)),
                edge: link(rails.uplink_bits_per_s),
                core: link(rails.uplink_bits_per_s),
            };
        }
        if asked == Some(false) && links.host.is_some() && !t.has("host") {
            links.host = None;
        }
        read_link_pfc(t, &mut queue, notes);
        links
    });
    layout.topology = with_own_links(root, layout.topology, &layout.edges, links.edge);
    let (routing, spray_paths, convergence_ns) = root.table("routing", |t| {
        if t.any("policy", |v| *v == Value::String("SimAiEcmp")) {
            notes.push(
                "`routing.policy` SimAiEcmp: spines are chosen by a different hash than SimAI's"
                    .into(),
            );
        }
        (
            t.choice("policy", ROUTINGS).or(Routing::ShortestPath),
            t.get("spray_paths").within(1..=4096u32).or(64),
            seconds(t, "convergence").unwrap_or(0),
        )
    });
    let failures = root.array("failure", |_, t| {
        read_failure(t, is_known.then_some(&layout.topology))
    });
    Network {
        topology: layout.topology,
        links,
        queue,
        routing,
        spray_paths,
        failures: failures.into_iter().flatten().collect(),
        convergence_ns,
        gpus_per_server: layout
            .rails
            .filter(|_| is_known)
            .map(|rails| rails.gpus_per_server),
        is_known,
    }
}

/// Sets edges' own rates and delays; an edge without one has the common value.
fn with_own_links(
    root: &Table<'_>,
    topology: Topology,
    edges: &[OwnEdge],
    common: Link,
) -> Topology {
    let Topology::Graph(graph) = topology else {
        return topology;
    };
    if edges.is_empty() {
        return Topology::Graph(graph);
    }
    let own: Vec<(Node, Node, Link)> = edges
        .iter()
        .map(|edge| {
            let link = Link {
                bits_per_s: edge.bits_per_s.unwrap_or(common.bits_per_s),
                delay_ns: edge.delay_ns.unwrap_or(common.delay_ns),
            };
            (edge.ends.0, edge.ends.1, link)
        })
        .collect();
    match graph.clone().with_links(&own) {
        Ok(graph) => Topology::Graph(graph),
        Err(error) => {
            note(root, "edges", &error);
            Topology::Graph(graph)
        }
    }
}

fn stand_in() -> Topology {
    Topology::FatTree(FatTree::new(4, 1).expect("4 is even"))
}

/// `edges` and `hosts` or `host_nodes`.
fn read_graph(root: &Table<'_>) -> Layout {
    let mut layout = Layout {
        topology: stand_in(),
        hosts_given: None,
        attachment: false,
        edges: Vec::new(),
        rails: None,
    };
    if root.has("topology") {
        root.error(
            "topology",
            "`topology` and `edges` both define the network",
            "remove one of them",
        );
    }
    let edges: Vec<Vec<f64>> = root.get("edges").or(Vec::new());
    let mut pairs = Vec::with_capacity(edges.len());
    for edge in &edges {
        let node = |n: f64| (n.fract() == 0.0 && (0.0..4e9).contains(&n)).then_some(floor_u32(n));
        let ends = match edge[..] {
            [a, b] | [a, b, _] | [a, b, _, _] => node(a).zip(node(b)),
            _ => None,
        };
        let Some((a, b)) = ends else {
            root.error(
                "edges",
                format!("`edges` has the entry {edge:?}, which does not have two nodes"),
                "write each edge as [node, node], [node, node, bit/s] or [node, node, bit/s, ns]",
            );
            continue;
        };
        pairs.push((a, b, Tier::Edge));
        let (rate, delay) = (edge.get(2), edge.get(3));
        let bad = rate.is_some_and(|r| !RATES.contains(r))
            || delay.is_some_and(|d| !DELAYS.contains(d) || rounds_to_0(*d));
        if bad {
            root.error(
                "edges",
                format!("`edges` has the entry {edge:?}, whose rate or delay is out of range"),
                "give a rate from 1 to 1e15 bit/s and a delay of 0 or 1 to 2e9 ns",
            );
        } else if rate.is_some() {
            layout.edges.push(OwnEdge {
                ends: (a, b),
                bits_per_s: rate.copied().map(round_u64),
                delay_ns: delay.copied().map(round_u64),
            });
        }
    }
    // Hosts have the numbers of their nodes, so a node has one; with `host_nodes` they have their
    // own numbers.
    let numbered = root.has("host_nodes");
    let hosts: Vec<u32> = if numbered {
        root.refuse(
            "hosts",
            "conflicts with `host_nodes`: both define the hosts",
            "keep `hosts` for one host per node, with the node's number, or `host_nodes`",
        );
        root.get("host_nodes").or(vec![0])
    } else {
        root.get("hosts").required(
            "list the nodes that are hosts: hosts = [0, 1]; or the node of each host: host_nodes = \
             [0, 0, 1]",
            vec![0],
        )
    };
    match Graph::new(&pairs, hosts) {
        Ok(graph) if numbered => layout.topology = Topology::Graph(graph.with_numbered_hosts()),
        Ok(graph) => layout.topology = Topology::Graph(graph),
        Err(error) => {
            layout.edges.clear();
            note(root, "edges", &error);
        }
    }
    layout
}

fn read_topology(root: &Table<'_>, dialect: Dialect) -> Layout {
    if root.has("edges") {
        return read_graph(root);
    }
    let order = match dialect {
        Dialect::Days => HostOrder::ByOrdinal,
        Dialect::Slipstream => HostOrder::BySwitch,
    };
    root.table("topology", |t| {
        let category = t.choice("category", CATEGORIES).required(
            "give the network: [topology] category = \"FatTree\", or edges and hosts",
            Category::FatTree,
        );
        let attachment: bool = t.get("model_host_attachment").or(false);
        let mut hosts_given = None;
        let mut rails = None;
        let (key, made) = match category {
            Category::FatTree => t.table("fat_tree", |t| {
                let k: u32 = t
                    .get("k")
                    .required("give an even number of ports, such as 4", 4);
                let over: f64 = t
                    .get("oversubscription")
                    .check(|&o| o > 0.0 && o <= 1000.0, "above 0 and at most 1000")
                    .or(1.0);
                let hosts: Option<u32> = t.get("hosts_per_edge").optional();
                // Oversubscription r: r hosts per uplink of an edge switch.
                let hosts = hosts.or_else(|| {
                    t.has("oversubscription")
                        .then(|| floor_u32((f64::from(k / 2) * over).round()))
                });
                hosts_given = hosts;
                (
                    "fat_tree",
                    FatTree::new(k, hosts.unwrap_or(1))
                        .map(|tree| Topology::FatTree(tree.numbered(order))),
                )
            }),
            Category::LeafSpine => t.table("leaf_spine", |t| {
                let leaves = t.get("leaves").required("give the number of leaves", 2);
                let spines = t.get("spines").required("give the number of spines", 2);
                let hosts = t.get("hosts_per_leaf").or(1);
                hosts_given = Some(hosts);
                (
                    "leaf_spine",
                    LeafSpine::new(leaves, spines, hosts).map(Topology::LeafSpine),
                )
            }),
            Category::Torus => t.table("torus", |t| {
                let dim = t.get("dim").required("give 1, 2 or 3", 1);
                let n = t.get("n").required("give the nodes along one dimension", 4);
                ("torus", Graph::torus(dim, n).map(Topology::Graph))
            }),
            Category::Dragonfly => t.table("dragonfly", |t| {
                let (p, a, h) = read_dragonfly(t);
                let made = Graph::dragonfly(p, a, h, order).map(Topology::Graph);
                ("dragonfly", made)
            }),
            Category::SpectrumX => t.table("spectrum_x", |t| {
                let (made, read) = read_rails(t);
                rails = Some(read);
                ("spectrum_x", made.map(Topology::Graph))
            }),
        };
        let topology = made.unwrap_or_else(|error| {
            note(t, key, &error);
            stand_in()
        });
        Layout {
            topology,
            hosts_given,
            attachment,
            edges: Vec::new(),
            rails,
        }
    })
}

/// Hosts and global links per router, routers per group: (p, a, h), by our keys or those of Days.
fn read_dragonfly(t: &Table<'_>) -> (u32, u32, u32) {
    let days = [
        "hosts_per_router",
        "routers_per_group",
        "global_ports_per_router",
    ];
    if days.iter().any(|key| t.has(key)) {
        for key in ["p", "a", "h"] {
            t.refuse(
                key,
                "conflicts with the keys of Days: both set the size of the dragonfly",
                "keep one of the two",
            );
        }
        return (
            t.get(days[0]).or(1),
            t.get(days[1]).required("give the routers of a group", 2),
            t.get(days[2])
                .required("give the global links of a router", 1),
        );
    }
    (
        t.get("p").or(1),
        t.get("a").required("give the routers of a group", 2),
        t.get("h").or(1),
    )
}

/// `[topology.spectrum_x]`: a rail-optimized fabric, its rates and delays.
fn read_rails(t: &Table<'_>) -> (Result<Graph, Error>, Rails) {
    let number = |key: &str| t.get::<u32>(key).required("give it: Days requires it", 1);
    let (gpus, per_server) = (number("gpus"), number("gpus_per_server"));
    let (nics, spines) = (number("nics_per_asw"), number("psws"));
    let rate = |key: &str| {
        read_rate(t, key).unwrap_or_else(|| {
            if !t.has(key) {
                t.error(
                    key,
                    format!("`{key}` is missing"),
                    "give the rate of these links in bit/s",
                );
            }
            1_000_000_000
        })
    };
    let rails = Rails {
        gpus_per_server: per_server,
        nic_bits_per_s: rate("nic_rate_bps"),
        uplink_bits_per_s: rate("uplink_rate_bps"),
        delay_ns: t.get("link_delay_ns").within(0..=2_000_000_000u64).or(0),
    };
    // NVLink and the type of a GPU apply to collectives within a server, which are refused.
    let _: Option<f64> = t.get("nvlink_rate_bps").optional();
    let _: Option<u64> = t.get("nvlink_delay_ns").optional();
    let _: Option<String> = t.get("gpu_type").optional();
    (Graph::rails(gpus, per_server, nics, spines), rails)
}

/// `[[failure]]`: component, time, and time of repair. `topology` is `None` if it has an error.
fn read_failure(t: &Table<'_>, topology: Option<&Topology>) -> Option<Failure> {
    let link: Option<Vec<u32>> = t.get("link").optional();
    let switch: Option<u32> = t.get("switch").optional();
    let host: Option<u32> = t.get("host").optional();
    let at = t
        .get::<f64>("at")
        .within(0.0..=1e9)
        .check(|&s| s == 0.0 || super::ns(s) > 0, WHOLE_NS);
    let failure = Failure {
        at_ns: ns(at.required("give the time in s: at = 0.001", 0.0)),
        repair_ns: seconds(t, "repair"),
        target: match (link.as_deref(), switch, host) {
            (Some(&[a, b]), None, None) => Target::Link(a, b),
            (None, Some(node), None) => Target::Switch(node),
            (None, None, Some(host)) => match topology.map(|topology| host_of(topology, host)) {
                Some(Ok(host)) => Target::Host(host),
                Some(Err(error)) => {
                    note(t, "host", &error);
                    return None;
                }
                None => return None,
            },
            _ => {
                t.error(
                    "link",
                    "a failure is of one link, one switch, or one host's link",
                    "give link = [switch, switch], switch = n or host = n",
                );
                return None;
            }
        },
    };
    if let Err(error) = failure.ports(topology?) {
        note(t, "at", &error);
        return None;
    }
    Some(failure)
}

/// Rates that can be simulated, bit/s, and delays, ns.
const RATES: std::ops::RangeInclusive<f64> = 1.0..=1e15;
const DELAYS: std::ops::RangeInclusive<f64> = 0.0..=2e9;

/// Times are simulated in whole ns.
pub(super) const WHOLE_NS: &str = "0 or at least 1e-9 s: times are whole ns";

/// Whether a time above 0, in ns, would become 0.
fn rounds_to_0(ns: f64) -> bool {
    ns > 0.0 && round_u64(ns) == 0
}

/// A rate in bit/s, rounded to a whole number.
fn read_rate(t: &Table<'_>, key: &str) -> Option<u64> {
    t.get::<f64>(key)
        .check(|r| RATES.contains(r), "a rate in bit/s from 1 to 1e15")
        .optional()
        .map(round_u64)
}

fn read_links(t: &Table<'_>, rate: u64, host_links: bool, layout: &Layout) -> Links {
    let delay_of = |t: &Table<'_>, key: &str| {
        let delay = t.get::<f64>(key).within(DELAYS);
        let delay = delay.check(
            |&ns| !rounds_to_0(ns),
            "0 or at least 1: it is in ns, not in s",
        );
        delay.optional().map(round_u64)
    };
    let delay = |t: &Table<'_>| delay_of(t, "propagation_ns");
    if layout.rails.is_some() {
        for key in [
            "propagation_ns",
            "propagation_tiers",
            "host",
            "edge",
            "core",
        ] {
            t.refuse(
                key,
                "cannot be combined with a SpectrumX topology, which sets rates and delays itself",
                "use `topology.spectrum_x.link_delay_ns` and its rates",
            );
        }
    }
    let common = Link {
        bits_per_s: rate,
        delay_ns: delay(t).unwrap_or(0),
    };
    let modeled = t.get("host_links").or(host_links);
    let tier = |key: &str| {
        t.table(key, |t| Link {
            bits_per_s: read_rate(t, "rate").unwrap_or(common.bits_per_s),
            delay_ns: delay(t).unwrap_or(common.delay_ns),
        })
    };
    let host = tier("host");
    let (mut host, mut edge, mut core) = (host, tier("edge"), tier("core"));
    if t.has("propagation_tiers") {
        if !matches!(layout.topology, Topology::FatTree(_)) {
            t.error(
                "propagation_tiers",
                "`link.propagation_tiers` is only for fat-trees",
                "give `link.propagation_ns`",
            );
        }
        if t.has("propagation_ns") {
            t.error(
                "propagation_ns",
                "`link.propagation_ns` and `link.propagation_tiers` both give delays",
                "remove one of them",
            );
        }
        t.table("propagation_tiers", |t| {
            for (key, link) in [
                ("host_to_edge_ns", &mut host),
                ("edge_to_aggregation_ns", &mut edge),
                ("aggregation_to_core_ns", &mut core),
            ] {
                link.delay_ns = delay_of(t, key).unwrap_or(link.delay_ns);
            }
        });
    }
    Links {
        host: (modeled || t.has("host")).then_some(host),
        edge,
        core,
    }
}

/// Eight numbers, one per priority of 802.1Q.
struct Eight([u64; PFC_CLASSES]);

impl Scalar for Eight {
    const MUST: &'static str = "eight numbers, one for each priority from 0 to 7";
    fn read(value: &Value<'_>) -> Option<Self> {
        Vec::<u64>::read(value)?.try_into().ok().map(Eight)
    }
    fn to_toml(&self) -> String {
        self.0.to_vec().to_toml()
    }
}

/// `link.mode` and `[link.pfc]` of Days.
fn read_link_pfc(t: &Table<'_>, queue: &mut Queue, notes: &mut Vec<String>) {
    let on = t
        .choice("mode", &[("None", false), ("Pfc", true)])
        .or(false);
    if !on {
        t.refuse(
            "pfc",
            "has no effect without mode = \"Pfc\"",
            "add mode = \"Pfc\" to [link], or remove [link.pfc]",
        );
        return;
    }
    if queue.pfc.is_some() {
        t.error(
            "mode",
            "`link.mode` and `switch.pfc` both configure pauses",
            "remove one of them",
        );
    }
    if queue.trim.is_some() {
        t.error(
            "mode",
            "`link.mode` is Pfc, but trimming ports have two queues of their own",
            "choose another `switch.drop`",
        );
    }
    queue.pfc = t.table("pfc", |t| {
        let eight = |key: &str, usual: u64| t.get::<Eight>(key).or(Eight([usual; PFC_CLASSES])).0;
        // The defaults of Days.
        let (xoff, xon) = (eight("xoff", 65_536), eight("xon", 49_152));
        let (capacity, quanta) = (eight("buffer_capacity", 0), eight("pause_quanta", 65_535));
        let host_links: bool = t.get("host_links").or(false);
        for key in ["by_tier", "headroom_by_rate"] {
            t.refuse(
                key,
                "is not supported: thresholds by tier or rate are not modeled",
                "give `xoff`, `xon` and `buffer_capacity` for all switches",
            );
        }
        for key in ["pause_quanta", "refresh_interval", "drain_interval"] {
            if t.has(key) {
                let _: Option<f64> = (key != "pause_quanta")
                    .then(|| t.get(key).optional())
                    .flatten();
                notes.push(format!(
                    "`link.pfc.{key}` has no effect: a pause lasts until it is revoked, as in Days' \
                     newer engine"
                ));
            }
        }
        let mut classes = 0u8;
        let mut thresholds = [Thresholds {
            xoff_bytes: u64::MAX,
            xon_bytes: 0,
            capacity_bytes: u64::MAX,
        }; PFC_CLASSES];
        for p in 0..PFC_CLASSES {
            // 0 disables PFC for a priority.
            if xoff[p] == 0 || quanta[p] == 0 {
                continue;
            }
            let limit = if capacity[p] == 0 { u64::MAX } else { capacity[p] };
            if xon[p] >= xoff[p] || xoff[p] > limit {
                t.error(
                    "xoff",
                    format!(
                        "priority {p} has xon {}, xoff {} and buffer_capacity {}",
                        xon[p], xoff[p], capacity[p]
                    ),
                    "they must rise: xon < xoff <= buffer_capacity (0: no limit)",
                );
            }
            classes |= 1 << p;
            thresholds[p] = Thresholds {
                xoff_bytes: xoff[p],
                xon_bytes: xon[p],
                capacity_bytes: limit,
            };
        }
        (classes != 0).then_some(Pfc {
            xoff_bytes: Some(u64::MAX),
            alpha: 1.0,
            xon_gap_bytes: 0,
            headroom_bytes: Some(0),
            classes,
            quanta: None,
            refresh: 0,
            by_priority: Some(thresholds),
            host_links,
        })
    });
}

#[derive(Clone, Copy, PartialEq)]
enum Drop {
    Tail,
    Red,
    RedEcn,
    Threshold,
    Ramp,
    Trim,
}

const DROPS: &[(&str, Drop)] = &[
    ("TailDrop", Drop::Tail),
    ("RED", Drop::Red),
    ("RED_ECN", Drop::RedEcn),
    ("ECN", Drop::Threshold),
    ("ECN_THRESHOLD", Drop::Threshold),
    ("ECNThreshold", Drop::Threshold),
    ("ECN_RAMP", Drop::Ramp),
    ("EcnRamp", Drop::Ramp),
    ("Trim", Drop::Trim),
];

/// Which rule of the two dialects, or of Days' two engines, applies to `ecn_threshold`.
#[derive(Clone, Copy)]
struct ThresholdRule {
    dialect: Dialect,
    /// Packets that cannot be marked pass, as in Days' newer engine.
    only_marks: bool,
}

fn read_switch(
    t: &Table<'_>,
    rule: ThresholdRule,
    rails_rate: Option<u64>,
    notes: &mut Vec<String>,
) -> (u64, Queue) {
    if t.has("run_batch_size") {
        let _: Option<f64> = t.get("run_batch_size").optional();
        notes.push(
            "`switch.run_batch_size` does not change results: it steers the execution of Days"
                .into(),
        );
    }
    if rails_rate.is_some() {
        t.refuse(
            "port_rate",
            "cannot be combined with a SpectrumX topology",
            "use its nic_rate_bps and uplink_rate_bps",
        );
    }
    let given = rails_rate.or_else(|| read_rate(t, "port_rate"));
    let rate = given.unwrap_or_else(|| {
        if !t.has("port_rate") {
            t.error(
                "port_rate",
                "`switch.port_rate` is missing",
                "give the rate of a port in bit/s, such as port_rate = 1e10",
            );
        }
        1_000_000_000
    });
    let dialect = rule.dialect;
    let capacity = t.get("capacity").within(0..=1_000_000u32).or(0);
    let discipline = read_discipline(t, dialect, notes);
    let drop = t.choice("drop", DROPS).or(Drop::Tail);
    let ramp = read_days_ramp(t, drop);
    let trim = (drop == Drop::Trim).then(|| t.table("trim", read_trim));
    let aqm = match drop {
        Drop::Tail | Drop::Trim => Aqm::TailDrop,
        Drop::Red => read_red(t, false, dialect),
        Drop::RedEcn => read_red(t, true, dialect),
        Drop::Threshold => read_ecn_threshold(t, rule, capacity),
        Drop::Ramp => t.table("ecn_ramp", read_ramp),
    };
    let kinds: [(&str, &[Drop]); 4] = [
        ("red", &[Drop::Red, Drop::RedEcn]),
        ("ecn_threshold", &[Drop::Threshold]),
        ("ecn_ramp", &[Drop::Ramp]),
        ("trim", &[Drop::Trim]),
    ];
    for (key, kinds) in kinds {
        if t.has(key) && !kinds.contains(&drop) {
            notes.push(format!("`switch.{key}` has no effect with this `drop`"));
        }
    }
    if matches!(aqm, Aqm::Red { .. }) && capacity == 0 {
        t.error(
            "drop",
            "`switch.drop` is RED, whose thresholds are shares of the capacity, but that is 0",
            "give `switch.capacity` in packets",
        );
    }
    let loss = t.get("loss").within(0.0..=1.0).or(0.0);
    let capacity_bytes = t.get("capacity_bytes").within(0..=1u64 << 40).or(0);
    let (aqm, capacity, capacity_bytes) = match ramp {
        // A queue with a ramp is limited only in bytes.
        Some((ramp, bytes)) => (ramp, 0, bytes),
        None => (aqm, capacity, capacity_bytes),
    };
    let shared = t.has("shared").then(|| t.table("shared", read_shared));
    let pfc = t
        .has("pfc")
        .then(|| t.table("pfc", |t| read_pfc(t, shared.is_some())));
    if trim.is_some() && (shared.is_some() || pfc.is_some() || discipline != Discipline::Fifo) {
        t.error(
            "drop",
            "trimming ports have two queues of their own, so `discipline`, `shared` and `pfc` \
             cannot be used",
            "remove those keys, or choose another `drop`",
        );
    }
    (
        rate,
        Queue {
            capacity_packets: capacity,
            capacity_bytes,
            discipline,
            aqm,
            loss,
            shared,
            pfc,
            trim,
            priorities: OWN_PRIORITIES,
        },
    )
}

/// `ecn_ramp`: a probability that rises with the waiting bytes.
fn read_ramp(t: &Table<'_>) -> Aqm {
    let min_bytes: u64 = t.get("kmin").required("give Kmin in bytes", 5_000);
    let max_bytes: u64 = t.get("kmax").required("give Kmax in bytes", 200_000);
    if min_bytes > max_bytes {
        t.error(
            "kmin",
            format!("`kmin` ({min_bytes} bytes) is above `kmax` ({max_bytes} bytes)"),
            "swap them",
        );
    }
    Aqm::EcnRamp {
        min_bytes,
        max_bytes,
        probability: t.get("pmax").within(0.0..=1.0).or(0.01),
    }
}

/// `ecn_threshold`: a share of the capacity (Days), or packets (ours).
fn read_ecn_threshold(t: &Table<'_>, rule: ThresholdRule, capacity: u32) -> Aqm {
    let dialect = rule.dialect;
    let value: Option<f64> = t
        .get("ecn_threshold")
        .check(
            |&v: &f64| v > 0.0 && (v <= 1.0 || v.fract() == 0.0 && v <= 1e6),
            "a share of the capacity, above 0 and at most 1, or a whole number of packets",
        )
        .optional();
    // 1 is the entire capacity in Days, and one packet here.
    let share = match (dialect, value) {
        (Dialect::Days, None) => Some(0.8),
        (Dialect::Days, Some(v)) if v <= 1.0 => Some(v),
        (Dialect::Slipstream, Some(v)) if v < 1.0 => Some(v),
        _ => None,
    };
    if let Some(share) = share {
        if capacity == 0 {
            t.error(
                "ecn_threshold",
                "`switch.ecn_threshold` is a share of the capacity, but that is 0",
                "give `switch.capacity` in packets",
            );
        }
        let packets = floor_u32(share * f64::from(capacity));
        return if rule.only_marks {
            // The packet that would be number `packets` + 1 to wait is the first with a mark.
            Aqm::EcnThreshold {
                packets: packets.saturating_sub(1),
            }
        } else {
            Aqm::EcnLimit { packets }
        };
    }
    if value.is_none() && !t.has("ecn_threshold") {
        t.error(
            "ecn_threshold",
            "`switch.ecn_threshold` is missing",
            "give the packets above which arrivals are marked, such as ecn_threshold = 65",
        );
    }
    Aqm::EcnThreshold {
        packets: floor_u32(value.unwrap_or(65.0)),
    }
}

/// `ecn = { kmin_bytes, kmax_bytes, pmax }` and `ecn_capacity_bytes` of Days: a ramp, and the
/// capacity of its queues.
fn read_days_ramp(t: &Table<'_>, drop: Drop) -> Option<(Aqm, u64)> {
    t.refuse(
        "ecn_by_rate",
        "is not supported: one marking rule applies to all ports",
        "give `ecn` with the row of the links that matter",
    );
    let bytes: Option<u64> = t
        .get("ecn_capacity_bytes")
        .within(1..=1u64 << 40)
        .optional();
    if !t.has("ecn") {
        if bytes.is_some() && !t.has("ecn_by_rate") {
            t.error(
                "ecn_capacity_bytes",
                "`switch.ecn_capacity_bytes` limits queues with a ramp, which is missing",
                "add ecn = { kmin_bytes, kmax_bytes, pmax }, or use `capacity_bytes`",
            );
        }
        return None;
    }
    if drop != Drop::Tail {
        t.error(
            "ecn",
            "`switch.ecn` and `switch.drop` both mark packets",
            "write drop = \"TailDrop\", or remove `ecn`",
        );
    }
    if bytes.is_none() && !t.has("ecn_capacity_bytes") {
        t.error(
            "ecn",
            "`switch.ecn` needs `ecn_capacity_bytes`",
            "give the bytes at which such a queue drops",
        );
    }
    let bytes = bytes.unwrap_or(1 << 20);
    let aqm = t.table("ecn", |t| {
        let min = t.get("kmin_bytes").required("give Kmin in bytes", 1u64);
        let max = t.get("kmax_bytes").required("give Kmax in bytes", 2u64);
        let probability = t
            .get("pmax")
            .check(|&p: &f64| p > 0.0 && p <= 1.0, "above 0 and at most 1")
            .required("give the probability at Kmax", 1.0);
        if min == 0 || min > max || max > bytes {
            t.error(
                "kmin_bytes",
                format!("kmin_bytes is {min}, kmax_bytes {max} and ecn_capacity_bytes {bytes}"),
                "they must rise, from at least 1",
            );
        }
        // Days marks all packets at Kmax and above, our ramp only above its end, so the end is one
        // byte lower.
        Aqm::EcnRamp {
            min_bytes: min.max(1) - 1,
            max_bytes: max.max(1) - 1,
            probability,
        }
    });
    Some((aqm, bytes))
}

fn read_trim(t: &Table<'_>) -> Trim {
    let usual = Trim::default();
    Trim {
        data_packets: t
            .get("data")
            .within(1..=1_000_000u32)
            .or(usual.data_packets),
        header_packets: t
            .get("headers")
            .within(1..=1_000_000u32)
            .or(usual.header_packets),
        header_bytes: t
            .get("header_bytes")
            .within(1..=9_000u32)
            .or(usual.header_bytes),
        headers_per_data: t
            .get("headers_per_data")
            .within(1..=1_000_000u32)
            .or(usual.headers_per_data),
        return_to_sender: t.get("return_to_sender").or(usual.return_to_sender),
    }
}

fn read_shared(t: &Table<'_>) -> SharedBuffer {
    SharedBuffer {
        bytes: t
            .get("bytes")
            .within(1_000..=1u64 << 40)
            .required("give the memory of a switch in bytes", 1 << 24),
        alpha: t.get("alpha").within(1e-3..=1e3).or(1.0),
    }
}

fn read_pfc(t: &Table<'_>, shared: bool) -> Pfc {
    let xoff_bytes: Option<u64> = t.get("xoff").within(0..=1u64 << 40).optional();
    if xoff_bytes.is_none() && !shared {
        t.error(
            "xoff",
            "`switch.pfc` has neither a threshold nor a shared buffer to derive one from",
            "give `xoff` in bytes, or `switch.shared`",
        );
    }
    let classes: Vec<u32> = t.get("classes").or((0..to_u32(PFC_CLASSES)).collect());
    if classes.is_empty() || classes.iter().any(|&c| c as usize >= PFC_CLASSES) {
        t.error(
            "classes",
            "PFC has the classes 0 to 7",
            "list those that are lossless, such as classes = [0]",
        );
    }
    let quanta: Option<u32> = t.get("quanta").within(1..=0xffff).optional();
    let quanta = quanta.map(to_u16);
    if quanta.is_none() && t.has("refresh") {
        t.error(
            "refresh",
            "`switch.pfc.refresh` is given, but a pause without `quanta` lasts until it is revoked",
            "give `quanta` too, such as quanta = 65535, or remove `refresh`",
        );
    }
    Pfc {
        quanta,
        // Twice as often as needed, so that one late frame is harmless.
        refresh: t
            .get("refresh")
            .within(0..=0xffff)
            .or(quanta.map_or(0, |q| q.div_ceil(2))),
        xoff_bytes,
        alpha: t.get("alpha").within(1e-3..=1e3).or(1.0),
        xon_gap_bytes: t
            .get("xon_gap")
            .within(0..=xoff_bytes.unwrap_or(1 << 40))
            .or(0),
        headroom_bytes: t.get("headroom").within(0..=1u64 << 40).optional(),
        classes: classes
            .iter()
            .filter(|&&c| (c as usize) < PFC_CLASSES)
            .fold(0, |mask, c| mask | 1 << c),
        by_priority: None,
        host_links: true,
    }
}

/// Numbers by class: a list of them, or pairs [class, number].
struct ByClass(Vec<f64>);

impl Scalar for ByClass {
    const MUST: &'static str =
        "a number for each class, or pairs [class, number] with each class once";
    fn read(value: &Value<'_>) -> Option<Self> {
        if let Some(list) = Vec::<f64>::read(value) {
            return Some(ByClass(list));
        }
        let pairs = Vec::<Vec<f64>>::read(value)?;
        let mut values = vec![None; pairs.len()];
        for pair in &pairs {
            let [class, number] = pair[..] else {
                return None;
            };
            if class.fract() != 0.0 || class < 0.0 {
                return None;
            }
            // A class outside of the list, or a repeated one, leaves another entry empty.
            *values.get_mut(to_usize(floor_u64(class)))? = Some(number);
        }
        values.into_iter().collect::<Option<_>>().map(ByClass)
    }
    fn to_toml(&self) -> String {
        self.0.to_toml()
    }
}

/// `discipline`, with `weights`, `priorities` or `vticks`.
fn read_discipline(t: &Table<'_>, dialect: Dialect, notes: &mut Vec<String>) -> Discipline {
    const WORDS: &[(&str, u8)] = &[
        ("FIFO", 0),
        ("SP", 1),
        ("DRR", 2),
        ("WRR", 3),
        ("WFQ", 4),
        ("VC", 5),
        ("VirtualClock", 5),
    ];
    let kind = t.choice("discipline", WORDS).or(0);
    let used = match kind {
        1 => "priorities",
        2..=4 => "weights",
        5 => "vticks",
        _ => "",
    };
    // Days' files contain keys of other disciplines.
    for key in ["weights", "priorities", "vticks"] {
        if key != used && t.has(key) {
            let _: Option<ByClass> = t.get(key).optional();
            notes.push(format!("`switch.{key}` has no effect with this discipline"));
        }
    }
    let by_class = |key: &str, usual: Vec<f64>, fits: &dyn Fn(f64) -> bool, must: &str| {
        let values = t
            .get::<ByClass>(key)
            .check(
                |list| !list.0.is_empty() && list.0.len() <= 256 && list.0.iter().all(|&v| fits(v)),
                must,
            )
            .optional();
        match values {
            Some(values) => values.0,
            // Days has defaults for these keys; our dialect requires them.
            None if t.has(key) || dialect == Dialect::Days => usual,
            None => {
                t.error(
                    key,
                    format!("`switch.{key}` is missing"),
                    format!("give each class its number, such as {key} = [1, 2]"),
                );
                usual
            }
        }
    };
    let whole = |v: f64| v.fract() == 0.0 && (0.0..=4_294_967_295.0).contains(&v);
    let weights = || -> Vec<u32> {
        t.get::<Vec<u32>>("weights")
            .check(
                |w| {
                    !w.is_empty()
                        && w.len() <= 256
                        && w.iter().all(|&w| (1..=1_000_000).contains(&w))
                },
                "1 to 256 weights from 1 to 1000000",
            )
            .required(
                "list a weight for each class, such as weights = [1, 2]",
                vec![1],
            )
    };
    match kind {
        1 => {
            let must = "1 to 256 whole numbers, the larger first";
            let list = by_class("priorities", vec![1.0], &whole, must);
            Discipline::StrictPriority(list.into_iter().map(floor_u32).collect())
        }
        2 => Discipline::Drr(weights()),
        3 => Discipline::Wrr(weights()),
        4 => Discipline::Wfq(weights()),
        5 if dialect == Dialect::Days => {
            let must = "1 to 256 numbers of s per bit, above 0";
            let fits = |v: f64| v > 0.0 && v <= 1e6;
            Discipline::VirtualClockBits(by_class("vticks", vec![1.0], &fits, must))
        }
        5 => {
            let must = "1 to 256 whole numbers of ns per packet";
            let list = by_class("vticks", vec![1.0], &whole, must);
            Discipline::VirtualClock(list.into_iter().map(floor_u64).collect())
        }
        _ => Discipline::Fifo,
    }
}

/// Days' constants: 70 % and 90 % of the capacity, probability 0.8, weight 2^-9.
fn read_red(t: &Table<'_>, ecn: bool, dialect: Dialect) -> Aqm {
    t.table("red", |t| {
        let min = t.get("min").within(0.0..=1.0).or(0.7);
        let max = t.get("max").within(0.0..=1.0).or(0.9);
        if min >= max {
            t.error(
                "min",
                format!("`min` ({min}) is not below `max` ({max})"),
                "swap them",
            );
        }
        Aqm::Red {
            min,
            max,
            probability: t.get("probability").within(0.0..=1.0).or(0.8),
            weight: t.get("weight").within(1e-9..=1.0).or(1.0 / 512.0),
            ecn,
            ecn_above: dialect == Dialect::Days,
        }
    })
}

/// Reads a duration in s as ns.
pub(super) fn seconds(t: &Table<'_>, key: &str) -> Option<u64> {
    t.get::<f64>(key)
        .check(|&s| (0.0..1e9).contains(&s), "from 0 to 1e9 s")
        .check(|&s| s == 0.0 || super::ns(s) > 0, WHOLE_NS)
        .optional()
        .map(ns)
}

/// The host with a number in a file, or an error.
pub(super) fn host_of(topology: &Topology, number: u32) -> Result<u32, Error> {
    topology
        .host_named(number)
        .ok_or_else(|| no_host(topology, number))
}

/// The error for a host number that does not exist.
pub(super) fn no_host(topology: &Topology, number: u32) -> Error {
    Error::Topology(if topology.names_hosts_by_node() {
        format!("node {number} is not in `hosts`")
    } else {
        format!(
            "host {number} does not exist; hosts are 0 to {}",
            topology.host_count() - 1
        )
    })
}
