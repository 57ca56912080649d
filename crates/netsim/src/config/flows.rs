//! `[[flow]]`, `[[flow_set]]`, `[[collective]]` and `[[collective_set]]`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::path::Path;

use slipstream_base::doc::{Table, Value};
use slipstream_base::mix;

use super::network::{Network, ROUTINGS, host_of, seconds};
use super::{note, ns};
use crate::collective::{Collective, Kind};
use crate::route::Routing;
use crate::scenario::{
    After, Arrivals, Congestion, CubicParams, Dcqcn, Demand, Dist, Finished, Flow, Ndp, Paths,
    Roce, Tcp, Transport,
};
use crate::sizes::Sizes;

/// A flow that names others to wait for: (waiting flow, flow that must finish).
type Waits = Vec<(u64, u64)>;

pub(super) struct Reader<'a> {
    network: &'a Network,
    seed: u64,
    duration_s: f64,
    waits: RefCell<Waits>,
    sets: Cell<u64>,
    collectives: Cell<u32>,
    load: &'a dyn Fn(&Path) -> Result<String, String>,
}

#[derive(Clone, Copy, PartialEq)]
enum FlowType {
    Tcp,
    Roce,
    Ndp,
    Packets,
}

const FLOW_TYPES: &[(&str, FlowType)] = &[
    ("TCP", FlowType::Tcp),
    ("RoCE", FlowType::Roce),
    ("DCQCN", FlowType::Roce),
    ("NDP", FlowType::Ndp),
    ("PacketDistribution", FlowType::Packets),
];

#[derive(Clone, Copy, PartialEq)]
enum Pairing {
    Random,
    SwitchOffsetHalf,
    SameSwitchNext,
    Permutation,
    Incast,
    AllToAll,
}

const PAIRINGS: &[(&str, Pairing)] = &[
    ("Random", Pairing::Random),
    ("SwitchOffsetHalf", Pairing::SwitchOffsetHalf),
    ("SameSwitchNext", Pairing::SameSwitchNext),
    ("Permutation", Pairing::Permutation),
    ("Incast", Pairing::Incast),
    ("AllToAll", Pairing::AllToAll),
];

const ALGORITHMS: &[(&str, Algorithm)] = &[
    ("TCPReno", Algorithm::Reno),
    ("Reno", Algorithm::Reno),
    ("NewReno", Algorithm::Reno),
    ("TCPCubic", Algorithm::Cubic),
    ("CUBIC", Algorithm::Cubic),
    ("DCTCP", Algorithm::Dctcp),
    ("BBR", Algorithm::Bbr),
    ("TCPBBR", Algorithm::Bbr),
];

#[derive(Clone, Copy, PartialEq)]
enum Algorithm {
    Reno,
    Cubic,
    Dctcp,
    Bbr,
}

const KINDS: &[(&str, Kind)] = &[
    ("Broadcast", Kind::Broadcast),
    ("Gather", Kind::Gather),
    ("AllReduce", Kind::AllReduce),
    ("RingAllReduce", Kind::RingAllReduce),
    ("TreeAllReduce", Kind::TreeAllReduce),
    ("RecursiveDoubling", Kind::RecursiveDoubling),
    ("AllGather", Kind::AllGather),
    ("ReduceScatter", Kind::ReduceScatter),
    ("AllToAll", Kind::AllToAll),
];

/// Flows of a set, at most.
const FLOWS_MAX: u64 = 10_000_000;

/// What all flows of a table have in common.
#[derive(Clone)]
struct Template {
    transport: Transport,
    demand: Demand,
    start_ns: u64,
    routing: Option<Routing>,
    packet_bytes: u32,
    header_bytes: u32,
    ack_bytes: u32,
    class: u8,
    answer_class: u8,
    /// Sizes are drawn for each flow of a set.
    sizes: Option<Sizes>,
}

impl Template {
    fn flow(&self, id: u64, src: u32, dst: u32, paths: Paths) -> Flow {
        Flow {
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
        }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        network: &'a Network,
        seed: u64,
        duration_s: f64,
        load: &'a dyn Fn(&Path) -> Result<String, String>,
    ) -> Self {
        Reader {
            network,
            seed,
            duration_s,
            waits: RefCell::default(),
            sets: Cell::new(0),
            collectives: Cell::new(0),
            load,
        }
    }

    pub(super) fn read(&self, root: &Table<'_>) -> Vec<Flow> {
        let mut flows: Vec<Flow> = root
            .array("flow", |_, t| self.read_flow(t))
            .into_iter()
            .flatten()
            .collect();
        flows.extend(
            root.array("flow_set", |_, t| self.read_set(t))
                .into_iter()
                .flatten(),
        );
        for made in root.array("collective", |_, t| self.read_collective(t)) {
            append(&mut flows, made);
        }
        for made in root.array("collective_set", |_, t| self.read_collective_set(t)) {
            append(&mut flows, made);
        }
        if flows.is_empty() {
            root.mistake(
                "flow",
                "the file describes no traffic",
                "add a [[flow]], [[flow_set]] or [[collective]]",
            );
        }
        self.link_waits(root, &mut flows);
        flows
    }

    /// Turns flow numbers of `starts_after` and `starts_before` into indices.
    fn link_waits(&self, root: &Table<'_>, flows: &mut [Flow]) {
        let waits = self.waits.take();
        if waits.is_empty() {
            return;
        }
        let by_id: HashMap<u64, usize> = flows.iter().enumerate().map(|(i, f)| (f.id, i)).collect();
        for (waiting, first) in waits {
            match (by_id.get(&waiting), by_id.get(&first)) {
                (Some(&i), Some(&flow)) => flows[i].after.push(After {
                    flow: flow as u32,
                    until: Finished::Acknowledged,
                    delay_ns: 0,
                }),
                (a, _) => {
                    let (missing, of) = if a.is_none() {
                        (waiting, first)
                    } else {
                        (first, waiting)
                    };
                    root.mistake(
                        "flow",
                        format!("flow {of} is to start before or after flow {missing}, which does not exist"),
                        "correct the number or add the flow",
                    );
                }
            }
        }
    }

    fn read_flow(&self, t: &Table<'_>) -> Vec<Flow> {
        let id: u64 = t.get("flow_id").required("number the flow: flow_id = 1", 0);
        let template = self.read_template(t);
        for (key, before) in [("starts_before", true), ("starts_after", false)] {
            for other in read_ids(t, key) {
                let wait = if before { (other, id) } else { (id, other) };
                self.waits.borrow_mut().push(wait);
            }
        }
        let path: Option<Vec<u32>> = t.get("path").optional();
        let pairs = self.read_pairs(t, path.as_deref());
        if pairs.is_empty() {
            t.mistake(
                "graph",
                "the flow has no sender and receiver",
                "add graph = [[sender, receiver]]",
            );
        }
        let paths = match path {
            Some(nodes) => Paths::Explicit(nodes),
            None => Paths::By(template.routing.unwrap_or(self.network.routing)),
        };
        pairs
            .into_iter()
            .enumerate()
            .map(|(i, (src, dst))| template.flow(id + i as u64, src, dst, paths.clone()))
            .collect()
    }

    /// Sender and receiver of each flow in `graph`, or the ends of `path`.
    fn read_pairs(&self, t: &Table<'_>, path: Option<&[u32]>) -> Vec<(u32, u32)> {
        let graph: Option<Vec<Vec<u32>>> = t.get("graph").optional();
        let graph = graph.unwrap_or_else(|| match path {
            Some([first, .., last]) => vec![vec![*first, *last]],
            _ => Vec::new(),
        });
        let mut pairs = Vec::new();
        for pair in &graph {
            let [src, dst] = pair[..] else {
                t.mistake(
                    "graph",
                    format!("`graph` has an entry of {} numbers", pair.len()),
                    "write each flow as [sender, receiver]",
                );
                continue;
            };
            if let (Some(src), Some(dst)) = (self.host(t, "graph", src), self.host(t, "graph", dst))
            {
                pairs.push((src, dst));
            }
        }
        pairs
    }

    fn host(&self, t: &Table<'_>, key: &str, number: u32) -> Option<u32> {
        host_of(&self.network.topology, number)
            .map_err(|error| note(t, key, &error))
            .ok()
    }

    fn read_set(&self, t: &Table<'_>) -> Vec<Flow> {
        let first: u64 = t.get("first_flow_id").or(0);
        let pairing = t.choice("pairing", PAIRINGS).or(Pairing::Random);
        let hosts = self.network.topology.host_count();
        let load: Option<f64> = t
            .get("load")
            .check(|&l| l > 0.0 && l <= 10.0, "above 0 and at most 10")
            .optional();
        let span_ns = seconds(t, "span");
        if t.has("span") && load.is_none() {
            t.mistake(
                "span",
                "`span` needs `load`",
                "give `load`, or remove `span`",
            );
        }
        // As many as the pattern has, if it has a number.
        let usual = match pairing {
            Pairing::Permutation => Some(u64::from(hosts)),
            Pairing::Incast => Some(u64::from(hosts).saturating_sub(1)),
            Pairing::AllToAll => Some(u64::from(hosts) * u64::from(hosts).saturating_sub(1)),
            _ => None,
        };
        let count = t.get::<u64>("flow_count").within(1..=FLOWS_MAX);
        let count = match usual {
            // As many as fit in the span, up to a bound.
            _ if span_ns.is_some() && !t.has("flow_count") => FLOWS_MAX,
            Some(usual) if !t.has("flow_count") => usual,
            _ => count.required("give the number of flows, or `load` and `span`", 1),
        };
        if count > FLOWS_MAX {
            t.mistake(
                "pairing",
                format!("the pattern has {count} flows"),
                format!("use at most {FLOWS_MAX}: fewer hosts, or give `flow_count`"),
            );
            return Vec::new();
        }
        let count = count as u32;
        let template = self.read_template(t);
        let set = self.sets.replace(self.sets.get() + 1);
        if hosts < 2 {
            t.mistake(
                "flow_count",
                "the network has fewer than two hosts",
                "add hosts",
            );
            return Vec::new();
        }
        let paths = Paths::By(template.routing.unwrap_or(self.network.routing));
        let per_edge = self.network.topology.hosts_per_edge();
        let by_switch = matches!(pairing, Pairing::SwitchOffsetHalf | Pairing::SameSwitchNext);
        if by_switch && per_edge.is_none() {
            t.mistake(
                "pairing",
                "`pairing` by switch needs equally many hosts on every switch",
                "use pairing = \"Random\"",
            );
        }
        let per_edge = per_edge.unwrap_or(1);
        let stream = mix::draw(self.seed ^ 0x7061_6972, set);
        let partners = match pairing {
            Pairing::Permutation => permutation(stream, hosts),
            _ => Vec::new(),
        };
        let sink = t.get::<u32>("sink").optional();
        let sink = sink
            .map_or(Some(0), |sink| self.host(t, "sink", sink))
            .unwrap_or(0);
        let pair = |i: u32| {
            let src = i % hosts;
            match pairing {
                Pairing::Permutation => (src, partners[src as usize]),
                // Senders in order of their numbers, the sink left out.
                Pairing::Incast => {
                    let src = i % (hosts - 1);
                    (src + u32::from(src >= sink), sink)
                }
                // Sender after sender, each to all others.
                Pairing::AllToAll => {
                    let (src, to) = (i / (hosts - 1) % hosts, i % (hosts - 1));
                    (src, (src + 1 + to) % hosts)
                }
                Pairing::Random => random_pair(stream, u64::from(i), hosts),
                Pairing::SwitchOffsetHalf => {
                    let switches = hosts / per_edge;
                    let switch = (src / per_edge + switches / 2) % switches;
                    (src, switch * per_edge + src % per_edge)
                }
                Pairing::SameSwitchNext => {
                    let switch = src / per_edge;
                    (src, switch * per_edge + (src % per_edge + 1) % per_edge)
                }
            }
        };
        let arrivals = load.map(|load| self.arrivals(load, pairing == Pairing::Incast, &template));
        if let Some(Err(what)) = &arrivals {
            t.mistake(
                "load",
                what.clone(),
                "give `traffic.size` or `traffic.size_dist`",
            );
            return Vec::new();
        }
        let gap_ns = arrivals.and_then(Result::ok);
        let (mut start, mut flows) = (0.0, Vec::new());
        for i in 0..count {
            let (src, dst) = pair(i);
            let mut flow = template.flow(first + u64::from(i), src, dst, paths.clone());
            if let Some(sizes) = &template.sizes {
                flow.demand = Demand::Bytes(sizes.sample(stream ^ 0x7369_7a65, u64::from(i)));
            }
            if let Some(gap_ns) = gap_ns {
                // A Poisson process: exponential gaps, by inverse transform.
                let u = mix::unit(mix::draw(stream ^ 0x6761_7073, u64::from(i)));
                start += -libm::log(1.0 - u) * gap_ns;
                if span_ns.is_some_and(|span| start > span as f64) {
                    break;
                }
                flow.start_ns = flow.start_ns.saturating_add(start as u64);
            }
            flows.push(flow);
        }
        flows
    }

    /// Mean gap between flows, ns, that loads hosts' links (an incast: the sink's link) to a share
    /// of their rate.
    fn arrivals(&self, load: f64, one_link: bool, template: &Template) -> Result<f64, String> {
        let mean = match (&template.sizes, template.demand) {
            (Some(sizes), _) => sizes.mean(),
            (None, Demand::Bytes(bytes)) => bytes as f64,
            (None, Demand::Paced(_)) => {
                return Err("`load` needs flows of a known size".into());
            }
        };
        let headers = 1.0 + f64::from(template.header_bytes) / f64::from(template.packet_bytes);
        let links = &self.network.links;
        let rate = links.host.unwrap_or(links.edge).bits_per_s as f64;
        let senders = if one_link {
            1
        } else {
            self.network.topology.host_count()
        };
        Ok(mean * headers * 8e9 / (load * rate * f64::from(senders)))
    }

    /// `size_dist`: a name, or points [bytes, cumulative probability]; `size_csv`: a file of them.
    fn read_sizes(&self, t: &Table<'_>) -> Option<Sizes> {
        if t.has("size_csv") {
            let path = t.path("size_csv").optional()?;
            let text = (self.load)(&path);
            return match text.and_then(|text| Sizes::from_csv(&text)) {
                Ok(sizes) => Some(sizes),
                Err(what) => {
                    let file = path.display();
                    t.mistake("size_csv", format!("{file}: {what}"), "see docs/netsim.md");
                    None
                }
            };
        }
        if !t.has("size_dist") {
            return None;
        }
        struct Given(Result<Sizes, String>);
        impl slipstream_base::doc::Scalar for Given {
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
                t.mistake("size_dist", what, "list rising points up to 1");
                None
            }
        }
    }

    fn read_template(&self, t: &Table<'_>) -> Template {
        let kind = t.choice("flow_type", FLOW_TYPES).or(FlowType::Tcp);
        let routing = read_routing(t);
        let header_bytes = t.get("header_bytes").within(0..=9_000u32).or(0);
        let ack_bytes = t.get("ack_bytes").within(1..=9_000u32).or(40);
        let class = t.get("class").within(0..=255u32).or(0) as u8;
        let answer_class = t
            .get("answer_class")
            .within(0..=255u32)
            .or(u32::from(class)) as u8;
        let duration_s = self.duration_s;
        // NDP sprays unless told otherwise.
        let routing = match kind {
            FlowType::Ndp => routing.or(Some(Routing::Spray)),
            _ => routing,
        };
        t.table("traffic", |t| {
            let start_ns = seconds(t, "initial_delay").unwrap_or(0);
            let sizes = self.read_sizes(t);
            let size: Option<u64> = t.get("size").optional();
            if sizes.is_some() && size.is_some() {
                t.mistake(
                    "size",
                    "`size` and a distribution of sizes both say how much a flow sends",
                    "remove one of them",
                );
            }
            // A stand-in until each flow draws its own.
            let bytes = size.or(sizes.is_some().then_some(1));
            let duration_ns = seconds(t, "duration");
            let gap = read_dist(t, "arr_dist");
            let size = read_dist(t, "pkt_size_dist");
            // A segment is as long as a packet may be.
            let packet_bytes = match size {
                Some(Dist::Constant(b)) => b,
                Some(Dist::Uniform { high, .. } | Dist::DiscreteUniform { high, .. }) => high,
                Some(Dist::Exp { .. }) | None => 1460.0,
            };
            if !(1.0..=60_000.0).contains(&packet_bytes) {
                t.mistake(
                    "pkt_size_dist",
                    format!("packets of up to {packet_bytes} bytes"),
                    "use 1 to 60000 bytes",
                );
            }
            let transport = match kind {
                FlowType::Tcp => Transport::Tcp(t.table("tcp", read_tcp)),
                FlowType::Roce => Transport::Roce(t.table("roce", read_roce)),
                FlowType::Ndp => Transport::Ndp(t.table("ndp", read_ndp)),
                FlowType::Packets => Transport::Packets,
            };
            if matches!(kind, FlowType::Roce | FlowType::Ndp) && bytes.is_none() {
                t.mistake(
                    "size",
                    "RoCE and NDP flows are messages of a known size",
                    "give `size` in bytes",
                );
            }
            let paced =
                kind == FlowType::Packets || kind == FlowType::Tcp && bytes.is_none();
            let demand = if paced {
                let arrivals = Arrivals {
                    size: size.unwrap_or(Dist::Constant(packet_bytes)),
                    gap_s: gap.unwrap_or(Dist::Constant(0.0)),
                    duration_ns: if bytes.is_some() {
                        duration_ns
                    } else {
                        Some(duration_ns.unwrap_or(ns(duration_s)))
                    },
                    bytes,
                };
                if gap.is_none() {
                    t.mistake(
                        "arr_dist",
                        "a flow bounded by time needs `arr_dist`, the gaps between its packets in s",
                        "give `arr_dist`, or `size` in bytes",
                    );
                }
                Demand::Paced(arrivals)
            } else {
                Demand::Bytes(bytes.unwrap_or(0))
            };
            Template {
                transport,
                demand,
                start_ns,
                routing,
                packet_bytes: packet_bytes as u32,
                header_bytes,
                ack_bytes,
                class,
                answer_class,
                sizes,
            }
        })
    }

    fn read_collective(&self, t: &Table<'_>) -> Vec<Flow> {
        let first: u64 = t.get("first_flow_id").or(0);
        let kind = t
            .choice("collective_type", KINDS)
            .required("name the collective", Kind::RingAllReduce);
        let template = self.read_template(t);
        let _: Option<u32> = t.get("flow_count").optional();
        let paths: Vec<Vec<u32>> = t.get("paths").or(Vec::new());
        let sources: Vec<u32> = t.get("sources").or(Vec::new());
        let sinks: Vec<u32> = t.get("sinks").or(Vec::new());
        let compute_ns = t.get::<f64>("compute_s").within(0.0..=1e6).or(0.0);
        let skew = t.get::<f64>("skew").within(0.0..=10.0).or(0.0);
        let pairs = if t.has("graph") {
            self.read_pairs(t, None)
        } else {
            Vec::new()
        };
        self.expand(
            t,
            first,
            kind,
            &template,
            &pairs,
            &paths,
            &sources,
            &sinks,
            ns(compute_ns),
            skew,
        )
    }

    fn read_collective_set(&self, t: &Table<'_>) -> Vec<Flow> {
        let mut first: u64 = t.get("first_flow_id").or(0);
        let kind = t
            .choice("collective_type", KINDS)
            .required("name the collective", Kind::RingAllReduce);
        let template = self.read_template(t);
        let count: usize = t.get::<u32>("collective_count").or(1) as usize;
        let _: Option<u32> = t.get("flow_count").optional();
        let compute_ns = t.get::<f64>("compute_s").within(0.0..=1e6).or(0.0);
        let skew = t.get::<f64>("skew").within(0.0..=10.0).or(0.0);
        let paths: Vec<Vec<Vec<u32>>> = t.get("paths").or(Vec::new());
        let sources: Vec<Vec<u32>> = t.get("sources").or(Vec::new());
        let sinks: Vec<Vec<u32>> = t.get("sinks").or(Vec::new());
        let graphs: Vec<Vec<Vec<u32>>> = t.get("graph").or(Vec::new());
        let mut flows = Vec::new();
        for i in 0..count {
            let mut pairs = Vec::new();
            for pair in graphs.get(i).map_or(&[][..], Vec::as_slice) {
                if let [a, b] = pair[..]
                    && let (Some(a), Some(b)) = (self.host(t, "graph", a), self.host(t, "graph", b))
                {
                    pairs.push((a, b));
                }
            }
            let none = Vec::new();
            let none_paths = Vec::new();
            let made = self.expand(
                t,
                first,
                kind,
                &template,
                &pairs,
                paths.get(i).unwrap_or(&none_paths),
                sources.get(i).unwrap_or(&none),
                sinks.get(i).unwrap_or(&none),
                ns(compute_ns),
                skew,
            );
            first += made.len() as u64;
            append(&mut flows, made);
        }
        flows
    }

    #[expect(clippy::too_many_arguments, reason = "the keys of one table")]
    fn expand(
        &self,
        t: &Table<'_>,
        first: u64,
        kind: Kind,
        template: &Template,
        pairs: &[(u32, u32)],
        paths: &[Vec<u32>],
        sources: &[u32],
        sinks: &[u32],
        compute_ns: u64,
        skew: f64,
    ) -> Vec<Flow> {
        let list = |key: &str, numbers: &[u32]| -> Vec<u32> {
            numbers
                .iter()
                .filter_map(|&n| self.host(t, key, n))
                .collect()
        };
        let (mut sources, mut sinks) = (list("sources", sources), list("sinks", sinks));
        let mut explicit = HashMap::new();
        for path in paths {
            let [a, .., b] = path[..] else {
                t.mistake(
                    "paths",
                    "`paths` has a path of fewer than two nodes",
                    "list its nodes",
                );
                continue;
            };
            if let (Some(src), Some(dst)) = (self.host(t, "paths", a), self.host(t, "paths", b)) {
                explicit.insert((src, dst), path.clone());
                if !t.has("sources") {
                    push_new(&mut sources, src);
                }
                if !t.has("sinks") {
                    push_new(&mut sinks, dst);
                }
            }
        }
        for &(a, b) in pairs {
            push_new(&mut sources, a);
            push_new(&mut sinks, b);
        }
        let Some(bytes) = template.demand.bytes() else {
            t.mistake(
                "traffic",
                "a collective needs `traffic.size`, its bytes a host",
                "give `size` in bytes",
            );
            return Vec::new();
        };
        let collective = Collective {
            kind,
            sources,
            sinks,
            bytes,
            compute_ns,
            skew,
            seed: mix::draw(self.seed ^ 0x636f_6c6c, first),
        };
        let steps = match collective.steps() {
            Ok(steps) => steps,
            Err(what) => {
                t.mistake(
                    "collective_type",
                    what,
                    "list the hosts in `sources` and `sinks`",
                );
                return Vec::new();
            }
        };
        let number = self.collectives.replace(self.collectives.get() + 1);
        let routing = Paths::By(template.routing.unwrap_or(self.network.routing));
        steps
            .into_iter()
            .enumerate()
            .map(|(i, step)| {
                let paths = explicit
                    .get(&(step.src, step.dst))
                    .map_or_else(|| routing.clone(), |p| Paths::Explicit(p.clone()));
                let mut flow = template.flow(first + i as u64, step.src, step.dst, paths);
                flow.demand = Demand::Bytes(step.bytes);
                flow.after = step
                    .after
                    .iter()
                    .map(|&flow| After {
                        flow,
                        until: Finished::Delivered,
                        delay_ns: compute_ns,
                    })
                    .collect();
                flow.collective = Some(number);
                flow
            })
            .collect()
    }
}

fn push_new(list: &mut Vec<u32>, item: u32) {
    if !list.contains(&item) {
        list.push(item);
    }
}

/// Appends flows whose dependencies count from their own first.
fn append(flows: &mut Vec<Flow>, mut made: Vec<Flow>) {
    let offset = flows.len() as u32;
    for flow in &mut made {
        for after in &mut flow.after {
            after.flow += offset;
        }
    }
    flows.append(&mut made);
}

/// Two different hosts, drawn by number.
fn random_pair(stream: u64, index: u64, hosts: u32) -> (u32, u32) {
    let src = mix::below(mix::draw(stream, 2 * index), u64::from(hosts)) as u32;
    let step = mix::below(mix::draw(stream, 2 * index + 1), u64::from(hosts) - 1) as u32;
    (src, (src + 1 + step) % hosts)
}

/// A random cycle through all hosts (Sattolo 1986): everybody sends to one other, nobody to itself.
fn permutation(stream: u64, hosts: u32) -> Vec<u32> {
    let mut to: Vec<u32> = (0..hosts).collect();
    for i in (1..hosts as usize).rev() {
        let j = mix::below(mix::draw(stream, i as u64), i as u64) as usize;
        to.swap(i, j);
    }
    to
}

/// `PathFromConfig` means that `path` or `paths` says it.
fn read_routing(t: &Table<'_>) -> Option<Routing> {
    let mut words: Vec<(&str, Option<Routing>)> =
        ROUTINGS.iter().map(|&(w, r)| (w, Some(r))).collect();
    words.push(("PathFromConfig", None));
    let routing = t.choice("routing", &words).optional().flatten();
    if t.has("routing") && routing.is_none() && !t.has("path") && !t.has("paths") {
        t.mistake(
            "routing",
            "`routing` is PathFromConfig, but there is no path",
            "add path = [node, …]",
        );
    }
    routing
}

/// One flow number or a list of them.
fn read_ids(t: &Table<'_>, key: &str) -> Vec<u64> {
    struct Ids(Vec<u64>);
    impl slipstream_base::doc::Scalar for Ids {
        const MUST: &'static str = "a flow number or a list of them";
        fn read(value: &Value<'_>) -> Option<Self> {
            u64::read(value)
                .map(|id| vec![id])
                .or_else(|| Vec::<u64>::read(value))
                .map(Ids)
        }
        fn to_toml(&self) -> String {
            self.0.to_toml()
        }
    }
    t.get::<Ids>(key)
        .optional()
        .map_or_else(Vec::new, |ids| ids.0)
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
            .required("name the distribution: type = \"Uniform\"", Type::Constant);
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
                    t.mistake(
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

fn read_tcp(t: &Table<'_>) -> Tcp {
    let algorithm = t.choice("cc_algorithm", ALGORITHMS).or(Algorithm::Reno);
    let cubic = t.table("cubic", |t| CubicParams {
        beta: t.get("beta").within(0.01..=0.99).or(0.7),
        c: t.get("c").within(1e-6..=1e6).or(0.4),
        fast_convergence: t.get("fast_convergence").or(true),
    });
    let (congestion, window) = match algorithm {
        Algorithm::Reno => (Congestion::NewReno, 2),
        // Days starts CUBIC with one segment.
        Algorithm::Cubic => (Congestion::Cubic(cubic), 1),
        Algorithm::Bbr => (Congestion::Bbr, 10),
        Algorithm::Dctcp => (
            Congestion::Dctcp {
                gain: t.get("gain").within(1e-6..=1.0).or(1.0 / 16.0),
            },
            10,
        ),
    };
    Tcp {
        congestion,
        initial_window: t.get("initial_window").within(1..=10_000u32).or(window),
        ssthresh: t.get("ssthresh").within(1..=1u64 << 40).or(65_535),
        rto_ns_min: seconds(t, "rto_min").unwrap_or(1_000_000_000).max(1_000),
        ecn: t.get("ecn").or(algorithm == Algorithm::Dctcp),
    }
}

fn read_roce(t: &Table<'_>) -> Roce {
    let usual = Roce::default();
    let dcqcn = if t.holds_table("dcqcn") || !t.has("dcqcn") {
        Some(t.table("dcqcn", read_dcqcn))
    } else {
        t.get("dcqcn").or(true).then(Dcqcn::default)
    };
    Roce {
        dcqcn,
        window_bytes: t.get("window").within(0..=1u64 << 40).or(0),
        retry_ns: seconds(t, "rto").unwrap_or(usual.retry_ns).max(1_000),
        ack_every: t.get("ack_every").within(1..=1_000u32).or(1),
    }
}

fn read_dcqcn(t: &Table<'_>) -> Dcqcn {
    let usual = Dcqcn::default();
    let time = |key: &str, usual: u64| seconds(t, key).unwrap_or(usual).max(1_000);
    let rate = |key: &str, usual: f64| t.get::<f64>(key).within(1e3..=1e15).or(usual);
    Dcqcn {
        gain: t.get("gain").within(1e-6..=1.0).or(usual.gain),
        timer_ns: time("timer", usual.timer_ns),
        alpha_timer_ns: time("alpha_timer", usual.alpha_timer_ns),
        byte_counter: t
            .get("byte_counter")
            .within(1_000..=1u64 << 40)
            .or(usual.byte_counter),
        fast_steps: t
            .get("fast_steps")
            .within(1..=1_000u32)
            .or(usual.fast_steps),
        additive_bits_per_s: rate("rate_ai", usual.additive_bits_per_s),
        hyper_bits_per_s: rate("rate_hai", usual.hyper_bits_per_s),
        cnp_interval_ns: time("cnp_interval", usual.cnp_interval_ns),
        rate_bits_per_s_min: rate("rate_min", usual.rate_bits_per_s_min),
    }
}

fn read_ndp(t: &Table<'_>) -> Ndp {
    let usual = Ndp::default();
    Ndp {
        window_packets: t
            .get("window")
            .within(1..=100_000u32)
            .or(usual.window_packets),
        retry_ns: seconds(t, "rto").unwrap_or(usual.retry_ns).max(1_000),
    }
}
