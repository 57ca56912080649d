//! What the flows of a table have in common: transport, sizes, packets, classes.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::Read as _;

use slipstream_base::width::{floor_u32, to_u8};
use slipstream_config::doc::{Table, Value};

use super::network::ROUTINGS;
use super::roce::{self, Answers};
use super::units::{read_timeout, seconds};
use super::{Dialect, Resources, ns};
use crate::route::Routing;
use crate::scenario::{Arrivals, Demand, Dist, Flow, Ndp, Paths, Tcp, Transport};
use crate::sizes::Sizes;
use crate::transport::congestion::ALGORITHMS;
use crate::transport::rtt::RTO_NS_MAX;
use crate::transport::{OtherTransport, PROTOCOLS};

/// A flow as read; its class is set after all flows are known.
pub(super) struct ParsedFlow {
    pub(super) flow: Flow,
    /// Priorities of 802.1Q, of its data and of its answers.
    pub(super) priority: u8,
    pub(super) answer_priority: u8,
    /// Whether the file gives its class.
    pub(super) has_class: bool,
}

/// Properties that all flows of a table share.
#[derive(Clone)]
pub(super) struct Template {
    pub(super) transport: Transport,
    pub(super) demand: Demand,
    pub(super) start_ns: u64,
    pub(super) routing: Option<Routing>,
    pub(super) packet_bytes: u32,
    pub(super) header_bytes: u32,
    ack_bytes: u32,
    pub(super) class: u8,
    pub(super) answer_class: u8,
    pub(super) has_class: bool,
    pub(super) priority: u8,
    pub(super) answer_priority: u8,
    /// Sizes of the flows of a set are random.
    pub(super) sizes: Option<Sizes>,
}

impl Template {
    /// The demand of a flow of a collective, which sends `bytes`.
    pub(super) fn demand_of(&self, bytes: u64) -> Demand {
        match self.demand {
            Demand::Paced(arrivals) if arrivals.bytes.is_none() => self.demand,
            // Packets keep their gaps.
            Demand::Paced(arrivals) if self.transport == Transport::Packets => {
                Demand::Paced(Arrivals {
                    bytes: Some(bytes),
                    duration_ns: None,
                    ..arrivals
                })
            }
            _ => Demand::Bytes(bytes),
        }
    }

    pub(super) fn flow(&self, id: u64, src: u32, dst: u32, paths: Paths) -> ParsedFlow {
        #[cfg(test)]
        CREATED.set(CREATED.get() + 1);
        let flow = Flow {
            id,
            src,
            dst,
            start_ns: self.start_ns,
            demand: self.demand,
            transport: self.transport,
            paths,
            packet_bytes: self.packet_bytes,
            header_bytes: self.header_bytes,
            ack_bytes: self.ack_bytes,
            class: self.class,
            answer_class: self.answer_class,
            after: Vec::new(),
            collective: None,
        };
        ParsedFlow {
            flow,
            priority: self.priority,
            answer_priority: self.answer_priority,
            has_class: self.has_class,
        }
    }
}

#[cfg(test)]
thread_local! {
    /// Flows that were created by this thread.
    pub(super) static CREATED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Reads what the flows of a table have in common.
pub(super) struct TemplateReader<'a> {
    dialect: Dialect,
    /// Length of the run, s: that of a flow without size and duration.
    duration_s: f64,
    resources: &'a Resources<'a>,
    notes: RefCell<BTreeSet<String>>,
}

#[derive(Clone, Copy, PartialEq)]
enum FlowType {
    Tcp,
    Roce,
    Ndp,
    Packets,
    /// Index in [`PROTOCOLS`].
    Other(usize),
}

const FLOW_TYPES: &[(&str, FlowType)] = &[
    ("TCP", FlowType::Tcp),
    ("RoCE", FlowType::Roce),
    ("DCQCN", FlowType::Roce),
    ("NDP", FlowType::Ndp),
    ("PacketDistribution", FlowType::Packets),
];

impl<'a> TemplateReader<'a> {
    /// `listed`: the flow list gives the sizes.
    pub(super) fn new(dialect: Dialect, duration_s: f64, resources: &'a Resources<'a>) -> Self {
        TemplateReader {
            dialect,
            duration_s,
            resources,
            notes: RefCell::default(),
        }
    }

    pub(super) fn note(&self, note: String) {
        self.notes.borrow_mut().insert(note);
    }

    pub(super) fn take_notes(&self) -> BTreeSet<String> {
        self.notes.take()
    }

    /// `listed`: the flow list gives the sizes.
    pub(super) fn read(&self, t: &Table<'_>, listed: bool) -> Template {
        let others = PROTOCOLS.iter().enumerate();
        let others = others.map(|(i, protocol)| (protocol.word, FlowType::Other(i)));
        let words: Vec<(&str, FlowType)> = FLOW_TYPES.iter().copied().chain(others).collect();
        let chosen = t.choice("flow_type", &words).optional();
        let is_known = chosen.is_some() || !t.has("flow_type");
        let kind = chosen.unwrap_or(FlowType::Tcp);
        let routing = read_routing(t);
        let header_bytes = t.get("header_bytes").within(0..=9_000u32).or(0);
        let ack_bytes = t.get("ack_bytes").within(1..=9_000u32).or(40);
        let priority = to_u8(t.get("priority").within(0..=7u32).or(0));
        let has_class = t.has("class") || t.has("answer_class");
        let class = to_u8(t.get("class").within(0..=255u32).or(0));
        let answer_class = t.get("answer_class").within(0..=255u32);
        let answer_class = to_u8(answer_class.or(u32::from(class)));
        // NDP sprays by default.
        let sprays = match kind {
            FlowType::Ndp => true,
            FlowType::Other(i) => PROTOCOLS[i].sprays,
            _ => false,
        };
        let routing = routing.or(sprays.then_some(Routing::Spray));
        t.table("traffic", |t| {
            if !is_known {
                // The other keys depend on the type.
                t.skip();
            }
            let start_ns = seconds(t, "initial_delay").unwrap_or(0);
            let extent = self.read_extent(t, listed);
            let packets = read_packets(t);
            let (transport, answers) = self.read_transport(t, kind);
            if is_known {
                refuse_misplaced(t, kind, &extent);
            }
            let demand = self.demand(t, kind, &extent, &packets);
            Template {
                transport,
                demand,
                start_ns,
                routing,
                packet_bytes: floor_u32(packets.bytes_max),
                header_bytes,
                ack_bytes: answers.bytes.unwrap_or(ack_bytes),
                class,
                answer_class,
                has_class,
                priority,
                answer_priority: answers.priority.unwrap_or(priority),
                sizes: extent.sizes,
            }
        })
    }

    /// The end of a flow: its size, or its duration.
    fn read_extent(&self, t: &Table<'_>, listed: bool) -> Extent {
        let sizes = self.read_sizes(t);
        let size: Option<u64> = t.get("size").optional();
        if sizes.is_some() && size.is_some() {
            t.error(
                "size",
                "`size` and a distribution of sizes both set the size of a flow",
                "remove one of them",
            );
        }
        if listed {
            for key in ["size", "duration"] {
                t.refuse(key, "comes from the list of flows", "remove it");
            }
        }
        // A placeholder until each flow has its own size.
        let drawn = t.has("size_dist") || t.has("size_csv");
        let bytes = size.or((listed || drawn || t.has("size")).then_some(1));
        if t.has("size") || drawn {
            t.refuse(
                "duration",
                "conflicts with the size of the flow: each of them ends it",
                "keep one of the two",
            );
        }
        Extent {
            bytes,
            duration_ns: seconds(t, "duration"),
            sizes,
        }
    }

    fn read_transport(&self, t: &Table<'_>, kind: FlowType) -> (Transport, Answers) {
        let transport = match kind {
            FlowType::Tcp => Transport::Tcp(t.table("tcp", |t| self.read_tcp(t))),
            FlowType::Roce => {
                let (roce, answers) = roce::read_queue_pair(t, &|note| self.note(note));
                return (Transport::Roce(roce), answers);
            }
            FlowType::Ndp => Transport::Ndp(t.table("ndp", read_ndp)),
            FlowType::Packets => Transport::Packets,
            FlowType::Other(i) => Transport::Other(OtherTransport {
                protocol: PROTOCOLS[i],
                parameters: (PROTOCOLS[i].read)(t),
            }),
        };
        (transport, Answers::default())
    }

    fn demand(&self, t: &Table<'_>, kind: FlowType, extent: &Extent, packets: &Packets) -> Demand {
        let bytes = extent.bytes;
        let paced = kind == FlowType::Packets || kind == FlowType::Tcp && bytes.is_none();
        if !paced {
            return Demand::Bytes(bytes.unwrap_or(0));
        }
        if packets.gap_s.is_none() && !t.has("arr_dist") {
            t.error(
                "arr_dist",
                "a flow bounded by time needs `arr_dist`, the gaps between its packets in s",
                "give `arr_dist`, or `size` in bytes",
            );
        }
        let duration_ns = extent.duration_ns;
        Demand::Paced(Arrivals {
            size: packets.size.unwrap_or(Dist::Constant(packets.bytes_max)),
            gap_s: packets.gap_s.unwrap_or(Dist::Constant(0.0)),
            duration_ns: if bytes.is_some() {
                duration_ns
            } else {
                Some(duration_ns.unwrap_or(ns(self.duration_s)))
            },
            bytes,
        })
    }

    /// `size_dist`: a name, or points [bytes, cumulative probability]; `size_csv`: a file of them.
    fn read_sizes(&self, t: &Table<'_>) -> Option<Sizes> {
        if t.has("size_csv") {
            let path = t.path("size_csv").optional()?;
            let text = (self.resources.open)(&path).and_then(|file| {
                let mut text = String::new();
                // A distribution has a few hundred points at most.
                file.take(1 << 20)
                    .read_to_string(&mut text)
                    .map_err(|error| error.to_string())?;
                Ok(text)
            });
            return match text.and_then(|text| Sizes::from_csv(&text)) {
                Ok(sizes) => Some(sizes),
                Err(what) => {
                    let file = path.display();
                    t.error("size_csv", format!("{file}: {what}"), "see docs/netsim.md");
                    None
                }
            };
        }
        if !t.has("size_dist") {
            return None;
        }
        struct Given(Result<Sizes, String>);
        impl slipstream_config::doc::Scalar for Given {
            const MUST: &'static str = "\"WebSearch\", \"Hadoop\", or points [bytes, probability]";
            fn read(value: &Value<'_>) -> Option<Self> {
                if let Some(name) = String::read(value) {
                    return Sizes::named(&name).map(|s| Given(Ok(s)));
                }
                let points: Option<Vec<(f64, f64)>> = Vec::<Vec<f64>>::read(value)?
                    .into_iter()
                    .map(|p| (p.len() == 2).then(|| (p[0], p[1])))
                    .collect();
                Some(Given(Sizes::new(&points?)))
            }
            fn to_toml(&self) -> String {
                self.0.as_ref().map_or(String::new(), Sizes::to_toml)
            }
        }
        match t.get::<Given>("size_dist").optional()?.0 {
            Ok(sizes) => Some(sizes),
            Err(what) => {
                t.error("size_dist", what, "list rising points up to 1");
                None
            }
        }
    }

    fn read_tcp(&self, t: &Table<'_>) -> Tcp {
        let words: Vec<(&str, usize)> = ALGORITHMS
            .iter()
            .enumerate()
            .flat_map(|(i, algorithm)| algorithm.words.iter().map(move |word| (*word, i)))
            .collect();
        let chosen = t.choice("cc_algorithm", &words).or(0);
        for (i, other) in ALGORITHMS.iter().enumerate() {
            for key in other.keys.iter().filter(|key| i != chosen && t.has(key)) {
                self.note(format!(
                    "`traffic.tcp.{key}` has no effect on {}: it belongs to {}",
                    ALGORITHMS[chosen].words[0], other.words[0]
                ));
            }
        }
        let algorithm = ALGORITHMS[chosen];
        let (rto_ns_min, rto_ns_initial) = read_timeouts(t);
        // Days has neither.
        let sack = t.get("sack").or(self.dialect == Dialect::Slipstream);
        let rack = t.get("rack").or(sack);
        if rack && !sack {
            t.error(
                "rack",
                "`rack` needs `sack`, which is false",
                "set sack = true, or remove `rack`",
            );
        }
        let short = algorithm.short_segments_in_days && self.dialect == Dialect::Days;
        Tcp {
            congestion: (algorithm.read)(t),
            initial_window: t
                .get("initial_window")
                .within(1..=10_000u32)
                .or(algorithm.initial_window),
            ssthresh: t.get("ssthresh").within(1..=1u64 << 40).or(65_535),
            rto_ns_min,
            rto_ns_initial,
            ecn: t.get("ecn").or(algorithm.ecn),
            sws_avoidance: t.get("sws_avoidance").or(!short),
            sack,
            rack,
        }
    }
}

/// Reports keys that this type of flow cannot have, or lacks.
fn refuse_misplaced(t: &Table<'_>, kind: FlowType, extent: &Extent) {
    if !matches!(kind, FlowType::Tcp | FlowType::Packets) && extent.bytes.is_none() {
        t.error(
            "size",
            "flows of this type are messages of a known size",
            "give `size` in bytes",
        );
    }
    if kind != FlowType::Roce {
        t.refuse(
            "dcqcn",
            "has no effect on this type of flow",
            "write flow_type = \"DCQCN\" or \"RoCE\", or remove it",
        );
    }
}

/// What ends a flow.
struct Extent {
    bytes: Option<u64>,
    duration_ns: Option<u64>,
    /// The size of each flow is drawn from these.
    sizes: Option<Sizes>,
}

/// Sizes of packets, bytes, and the gaps between them.
struct Packets {
    size: Option<Dist>,
    gap_s: Option<Dist>,
    /// A segment is as long as the largest packet.
    bytes_max: f64,
}

fn read_packets(t: &Table<'_>) -> Packets {
    let gap_s = read_dist(t, "arr_dist");
    let size = read_dist(t, "pkt_size_dist");
    let bytes_max = match size {
        Some(Dist::Constant(b)) => b,
        Some(Dist::Uniform { high, .. } | Dist::DiscreteUniform { high, .. }) => high,
        Some(Dist::Exp { .. }) | None => 1460.0,
    };
    if !(1.0..=60_000.0).contains(&bytes_max) {
        t.error(
            "pkt_size_dist",
            format!("`pkt_size_dist` has packets of up to {bytes_max} bytes"),
            "use 1 to 60000 bytes",
        );
    }
    Packets {
        size,
        gap_s,
        bytes_max,
    }
}

/// `PathFromConfig`: the path is in `path` or `paths`.
fn read_routing(t: &Table<'_>) -> Option<Routing> {
    let mut words: Vec<(&str, Option<Routing>)> =
        ROUTINGS.iter().map(|&(w, r)| (w, Some(r))).collect();
    words.push(("PathFromConfig", None));
    let routing = t.choice("routing", &words).optional().flatten();
    if t.has("routing") && routing.is_none() && !t.has("path") && !t.has("paths") {
        t.error(
            "routing",
            "`routing` is PathFromConfig, but there is no path",
            "add path = [node, …]",
        );
    }
    routing
}

/// `rto_min` and `rto_initial` of TCP, ns.
fn read_timeouts(t: &Table<'_>) -> (u64, Option<u64>) {
    let timeout = |key: &str, least: f64, must: &str| {
        t.get::<f64>(key)
            .check(|s| (least..=RTO_NS_MAX as f64 / 1e9).contains(s), must)
            .optional()
            .map(ns)
    };
    let before = t.error_count();
    // Measured timeouts exceed the round trip by 1 ms or more, so 0 means no limit.
    let min = timeout("rto_min", 0.0, "from 0 to 60 s").unwrap_or(1_000_000_000);
    let initial = timeout("rto_initial", 1e-6, "from 1e-6 to 60 s");
    let errors = t.error_count() > before;
    if let Some(initial) = initial.filter(|&initial| initial < min && !errors) {
        t.error(
            "rto_initial",
            format!(
                "`rto_initial` is {} s, below `rto_min`, which is {} s",
                initial as f64 / 1e9,
                min as f64 / 1e9
            ),
            "lower `rto_min` as well, or leave `rto_initial` out",
        );
    }
    (min, initial)
}

/// A distribution: a table with `type`, or a plain number.
fn read_dist(t: &Table<'_>, key: &str) -> Option<Dist> {
    #[derive(Clone, Copy, PartialEq)]
    enum Type {
        Constant,
        Uniform,
        Discrete,
        Exp,
    }
    const TYPES: &[(&str, Type)] = &[
        ("Constant", Type::Constant),
        ("Uniform", Type::Uniform),
        ("DiscreteUniform", Type::Discrete),
        ("Exp", Type::Exp),
    ];
    if !t.has(key) {
        return None;
    }
    if !t.holds_table(key) {
        return t
            .get::<f64>(key)
            .check(|&v| v >= 0.0, "not negative")
            .optional()
            .map(Dist::Constant);
    }
    Some(t.table(key, |t| {
        let kind = t
            .choice("type", TYPES)
            .required("give the distribution: type = \"Uniform\"", Type::Constant);
        let number = |name: &str| {
            t.get::<f64>(name)
                .check(|&v| v >= 0.0, "not negative")
                .required("give it", 1.0)
        };
        match kind {
            Type::Constant => Dist::Constant(number("value")),
            Type::Exp => Dist::Exp {
                lambda: t
                    .get::<f64>("lambda")
                    .check(|&l| l > 0.0, "above 0")
                    .required("give the rate", 1.0),
            },
            Type::Uniform | Type::Discrete => {
                let (low, high) = (number("low"), number("high"));
                if low > high {
                    t.error(
                        "low",
                        format!("`low` ({low}) is above `high` ({high})"),
                        "swap them",
                    );
                }
                if low == high {
                    Dist::Constant(low)
                } else if kind == Type::Uniform {
                    Dist::Uniform { low, high }
                } else {
                    Dist::DiscreteUniform { low, high }
                }
            }
        }
    }))
}

fn read_ndp(t: &Table<'_>) -> Ndp {
    let usual = Ndp::default();
    Ndp {
        window_packets: t
            .get("window")
            .within(1..=100_000u32)
            .or(usual.window_packets),
        retry_ns: read_timeout(t, "rto"),
    }
}
