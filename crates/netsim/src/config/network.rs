//! `[topology]`, `[link]`, `[routing]` and `[switch]`.

use slipstream_base::doc::Table;

use super::{note, ns};
use crate::Error;
use crate::aqm::Aqm;
use crate::buffer::{PFC_CLASSES, Pfc, SharedBuffer};
use crate::failure::{Failure, Target};
use crate::route::Routing;
use crate::scenario::{Link, Links, Queue};
use crate::scheduled::Discipline;
use crate::topology::{FatTree, Graph, LeafSpine, Tier, Topology};
use crate::trim::Trim;

/// The network part of a file.
pub(super) struct Network {
    pub(super) topology: Topology,
    pub(super) links: Links,
    pub(super) queue: Queue,
    pub(super) routing: Routing,
    pub(super) spray_paths: u32,
    pub(super) failures: Vec<Failure>,
    pub(super) notice_ns: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Category {
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
];

/// Words of `routing`; Days' and ours.
pub(super) const ROUTINGS: &[(&str, Routing)] = &[
    ("ShortestPath", Routing::ShortestPath),
    ("ECMP", Routing::Ecmp),
    ("FatTreeEcmp", Routing::Ecmp),
    ("Spray", Routing::Spray),
];

pub(super) fn read(root: &Table<'_>) -> Network {
    let topology = read_topology(root);
    // Days' newer engine always models the links of hosts; its older one does not. Keys that only
    // the newer one knows tell them apart.
    let newer =
        root.has("link") || root.has("routing") || matches!(topology.1, Some(hosts) if hosts > 1);
    let (rate, queue) = root.table("switch", read_switch);
    let links = root.table("link", |t| read_links(t, rate, newer || topology.2));
    let (routing, spray_paths, notice_ns) = root.table("routing", |t| {
        (
            t.choice("policy", ROUTINGS).or(Routing::ShortestPath),
            t.get("spray_paths").within(1..=4096u32).or(64),
            seconds(t, "convergence").unwrap_or(0),
        )
    });
    let failures = root.array("failure", |_, t| read_failure(t, &topology.0));
    Network {
        topology: topology.0,
        links,
        queue,
        routing,
        spray_paths,
        failures: failures.into_iter().flatten().collect(),
        notice_ns,
    }
}

/// The topology; hosts per edge switch if that was given; and whether host links were asked for.
fn read_topology(root: &Table<'_>) -> (Topology, Option<u32>, bool) {
    let stand_in = || Topology::FatTree(FatTree::new(4, 1).expect("4 is even"));
    if root.has("edges") {
        if root.has("topology") {
            root.mistake(
                "topology",
                "`topology` and `edges` both say what the network is",
                "remove one of them",
            );
        }
        let edges: Vec<Vec<u32>> = root.get("edges").or(Vec::new());
        let mut pairs = Vec::new();
        for edge in &edges {
            if let [a, b] = edge[..] {
                pairs.push((a, b, Tier::Edge));
            } else {
                root.mistake(
                    "edges",
                    format!("`edges` has an entry of {} numbers", edge.len()),
                    "write each edge as [node, node]",
                );
            }
        }
        let hosts: Vec<u32> = root
            .get("hosts")
            .required("list the nodes that are hosts: hosts = [0, 1]", vec![0]);
        return match Graph::new(&pairs, hosts) {
            Ok(graph) => (Topology::Graph(graph), None, false),
            Err(error) => {
                note(root, "edges", &error);
                (stand_in(), None, false)
            }
        };
    }
    root.table("topology", |t| {
        let category = t.choice("category", CATEGORIES).required(
            "give the network: [topology] category = \"FatTree\", or edges and hosts",
            Category::FatTree,
        );
        let attachment: bool = t.get("model_host_attachment").or(false);
        let mut hosts_given = None;
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
                // Oversubscription r: r hosts for each uplink of an edge switch.
                let hosts = hosts.or_else(|| {
                    t.has("oversubscription")
                        .then(|| (f64::from(k / 2) * over).round() as u32)
                });
                hosts_given = hosts;
                (
                    "fat_tree",
                    FatTree::new(k, hosts.unwrap_or(1)).map(Topology::FatTree),
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
                let p = t.get("p").or(1);
                let a = t.get("a").required("give the routers of a group", 2);
                let h = t.get("h").or(1);
                ("dragonfly", Graph::dragonfly(p, a, h).map(Topology::Graph))
            }),
        };
        match made {
            Ok(topology) => (topology, hosts_given, attachment),
            Err(error) => {
                note(t, key, &error);
                (stand_in(), None, attachment)
            }
        }
    })
}

/// `[[failure]]`: what, when, and when it is repaired.
fn read_failure(t: &Table<'_>, topology: &Topology) -> Option<Failure> {
    let link: Option<Vec<u32>> = t.get("link").optional();
    let switch: Option<u32> = t.get("switch").optional();
    let host: Option<u32> = t.get("host").optional();
    let at = t.get::<f64>("at").within(0.0..=1e9);
    let failure = Failure {
        at_ns: ns(at.required("say when, in s: at = 0.001", 0.0)),
        repair_ns: seconds(t, "repair"),
        target: match (link.as_deref(), switch, host) {
            (Some(&[a, b]), None, None) => Target::Link(a, b),
            (None, Some(node), None) => Target::Switch(node),
            (None, None, Some(host)) => match host_of(topology, host) {
                Ok(host) => Target::Host(host),
                Err(error) => {
                    note(t, "host", &error);
                    return None;
                }
            },
            _ => {
                t.mistake(
                    "link",
                    "a failure is of one link, one switch, or one host's link",
                    "give link = [switch, switch], switch = n or host = n",
                );
                return None;
            }
        },
    };
    if let Err(error) = failure.ports(topology) {
        note(t, "at", &error);
        return None;
    }
    Some(failure)
}

/// A rate in bit/s: at least 1 Mb/s, and a whole number after rounding.
fn read_rate(t: &Table<'_>, key: &str) -> Option<u64> {
    t.get::<f64>(key)
        .check(
            |&r| (1e6..=1e15).contains(&r),
            "a rate in bit/s from 1e6 to 1e15",
        )
        .optional()
        .map(|r| r.round() as u64)
}

fn read_links(t: &Table<'_>, rate: u64, host_links: bool) -> Links {
    let delay = |t: &Table<'_>| {
        t.get::<f64>("propagation_ns")
            .within(0.0..=2e9)
            .optional()
            .map(|d| d.round() as u64)
    };
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
    Links {
        host: (modeled || t.has("host")).then_some(host),
        edge: tier("edge"),
        core: tier("core"),
    }
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

fn read_switch(t: &Table<'_>) -> (u64, Queue) {
    let rate = read_rate(t, "port_rate").unwrap_or_else(|| {
        if !t.has("port_rate") {
            t.mistake(
                "port_rate",
                "`switch.port_rate` is missing",
                "give the rate of a port in bit/s, such as port_rate = 1e10",
            );
        }
        1_000_000_000
    });
    let capacity = t.get("capacity").within(0..=1_000_000u32).or(0);
    let discipline = read_discipline(t);
    let drop = t.choice("drop", DROPS).or(Drop::Tail);
    let trim = (drop == Drop::Trim).then(|| t.table("trim", read_trim));
    let aqm = match drop {
        Drop::Tail | Drop::Trim => Aqm::TailDrop,
        Drop::Red => read_red(t, false),
        Drop::RedEcn => read_red(t, true),
        Drop::Threshold => Aqm::EcnThreshold {
            packets: t.get("ecn_threshold").required(
                "give the packets above which arrivals are marked, such as ecn_threshold = 65",
                65,
            ),
        },
        Drop::Ramp => t.table("ecn_ramp", |t| Aqm::EcnRamp {
            min_bytes: t.get("kmin").required("give Kmin in bytes", 5_000),
            max_bytes: t.get("kmax").required("give Kmax in bytes", 200_000),
            probability: t.get("pmax").within(0.0..=1.0).or(0.01),
        }),
    };
    if matches!(aqm, Aqm::Red { .. }) && capacity == 0 {
        t.mistake(
            "drop",
            "`switch.drop` is RED, whose thresholds are shares of the capacity, but that is 0",
            "give `switch.capacity` in packets",
        );
    }
    let loss = t.get("loss").within(0.0..=1.0).or(0.0);
    let capacity_bytes = t.get("capacity_bytes").within(0..=1u64 << 40).or(0);
    let shared = t.has("shared").then(|| t.table("shared", read_shared));
    let pfc = t
        .has("pfc")
        .then(|| t.table("pfc", |t| read_pfc(t, shared.is_some())));
    if trim.is_some() && (shared.is_some() || pfc.is_some() || discipline != Discipline::Fifo) {
        t.mistake(
            "drop",
            "ports that trim have two queues of their own, so `discipline`, `shared` and `pfc` have \
             no place",
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
        },
    )
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
        t.mistake(
            "xoff",
            "`switch.pfc` has neither a threshold nor a shared buffer to derive one from",
            "give `xoff` in bytes, or `switch.shared`",
        );
    }
    let classes: Vec<u32> = t.get("classes").or((0..PFC_CLASSES as u32).collect());
    if classes.is_empty() || classes.iter().any(|&c| c as usize >= PFC_CLASSES) {
        t.mistake(
            "classes",
            "PFC tells apart the classes 0 to 7",
            "list those that are lossless, such as classes = [0]",
        );
    }
    let quanta: Option<u32> = t.get("quanta").within(1..=0xffff).optional();
    let quanta = quanta.map(|q| q as u16);
    if quanta.is_none() && t.has("refresh") {
        t.mistake(
            "refresh",
            "`switch.pfc.refresh` is given, but a pause without `quanta` lasts until it is taken back",
            "give `quanta` too, such as quanta = 65535, or remove `refresh`",
        );
    }
    Pfc {
        quanta,
        // Twice as often as needed, so that a frame that is late does no harm.
        refresh: t
            .get("refresh")
            .within(0..=0xffff)
            .or(quanta.map_or(0, |q| u32::from(q).div_ceil(2))) as u16,
        xoff_bytes,
        alpha: t.get("alpha").within(1e-3..=1e3).or(1.0),
        xon_gap_bytes: t.get("xon_gap").within(0..=1u64 << 40).or(0),
        headroom_bytes: t.get("headroom").within(0..=1u64 << 40).optional(),
        classes: classes
            .iter()
            .filter(|&&c| (c as usize) < PFC_CLASSES)
            .fold(0, |mask, c| mask | 1 << c),
    }
}

/// `discipline`, with `weights`, or `priorities` and `vticks` as pairs (class, value).
fn read_discipline(t: &Table<'_>) -> Discipline {
    const WORDS: &[(&str, u8)] = &[
        ("FIFO", 0),
        ("SP", 1),
        ("DRR", 2),
        ("WRR", 3),
        ("WFQ", 4),
        ("VC", 5),
    ];
    let pairs = |key: &str| -> Vec<u64> {
        let pairs: Vec<Vec<u64>> = t.get(key).required("list pairs [class, value]", Vec::new());
        let mut values = vec![0; pairs.len()];
        for pair in &pairs {
            match pair[..] {
                [class, value] if (class as usize) < values.len() => {
                    values[class as usize] = value;
                }
                _ => t.mistake(
                    key,
                    format!(
                        "`{key}` must list each class from 0 to {} once",
                        values.len() - 1
                    ),
                    "write pairs [class, value]",
                ),
            }
        }
        if values.is_empty() {
            values.push(0);
        }
        values
    };
    let weights = || -> Vec<u32> {
        let weights: Vec<u32> = t
            .get::<Vec<u32>>("weights")
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
            );
        weights
    };
    match t.choice("discipline", WORDS).or(0) {
        1 => Discipline::StrictPriority(pairs("priorities").iter().map(|&p| p as u32).collect()),
        2 => Discipline::Drr(weights()),
        3 => Discipline::Wrr(weights()),
        4 => Discipline::Wfq(weights()),
        5 => Discipline::VirtualClock(pairs("vticks")),
        _ => {
            // Days' FIFO files may carry the others' keys.
            let _: Option<Vec<u32>> = t.get("weights").optional();
            Discipline::Fifo
        }
    }
}

/// Days' constants: 70 % and 90 % of the capacity, probability 0.8, weight 2^-9.
fn read_red(t: &Table<'_>, ecn: bool) -> Aqm {
    t.table("red", |t| {
        let min = t.get("min").within(0.0..=1.0).or(0.7);
        let max = t.get("max").within(0.0..=1.0).or(0.9);
        if min >= max {
            t.mistake(
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
        }
    })
}

/// Kept with the other readers of durations.
pub(super) fn seconds(t: &Table<'_>, key: &str) -> Option<u64> {
    t.get::<f64>(key)
        .check(|&s| (0.0..1e9).contains(&s), "from 0 to 1e9 s")
        .optional()
        .map(ns)
}

/// `Error` for a host that a file names and that is none.
pub(super) fn host_of(topology: &Topology, number: u32) -> Result<u32, Error> {
    match topology {
        // In a graph, hosts are named by the node that they hang on.
        Topology::Graph(_) => (0..topology.host_count())
            .find(|&h| topology.attachment(h) == number)
            .ok_or_else(|| Error::Topology(format!("node {number} is not in `hosts`"))),
        _ if number < topology.host_count() => Ok(number),
        _ => Err(Error::Topology(format!(
            "host {number} does not exist; hosts are 0 to {}",
            topology.host_count() - 1
        ))),
    }
}
