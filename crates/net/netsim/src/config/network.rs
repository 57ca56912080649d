//! `[topology]`, `[link]`, `[routing]` and `[switch]`.

use slipstream_base::width::{floor_u32, round_u64};
use slipstream_config::doc::{Table, Value};

use super::units::{DELAYS, RATES, WHOLE_NS, read_rate, rounds_to_0, seconds};
use super::{Dialect, dialect, note, ns, pfc, switch};
use crate::Error;
use crate::failure::{Failure, Target};
use crate::link::{Link, Links};
use crate::route::Routing;
use crate::scenario::Queue;
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

impl Layout {
    /// A layout in place of one with an error.
    fn stand_in() -> Layout {
        Layout {
            topology: stand_in(),
            hosts_given: None,
            attachment: false,
            edges: Vec::new(),
            rails: None,
        }
    }
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
    let rule = switch::ThresholdRule {
        dialect,
        only_marks: dialect::is_of_present_days(root),
    };
    let (rate, mut queue) = root.table("switch", |t| switch::read(t, rule, rails_rate, notes));
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
        pfc::read_link(t, &mut queue, notes);
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
    let mut layout = Layout::stand_in();
    let errors = root.error_count();
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
    if hosts.is_empty() && root.error_count() == errors {
        let key = if numbered { "host_nodes" } else { "hosts" };
        root.error(
            key,
            format!("`{key}` is empty, so nothing can send"),
            "list the nodes that are hosts",
        );
    }
    if root.error_count() > errors {
        layout.edges.clear();
        return layout;
    }
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
        let given = t.has("category");
        let category = t.choice("category", CATEGORIES).optional();
        if given && category.is_none() {
            // The other keys depend on it.
            t.skip();
            return Layout::stand_in();
        }
        let category = category.unwrap_or_else(|| {
            t.error(
                "category",
                "`topology.category` is missing",
                "give the network: [topology] category = \"FatTree\", or edges and hosts",
            );
            Category::FatTree
        });
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
