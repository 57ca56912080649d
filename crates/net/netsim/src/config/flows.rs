//! `[[flow]]`, `[[flow_set]]`, `[[flow_list]]`, `[[collective]]`, `[[collective_set]]` and
//! `[[compute]]`.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::io::Read as _;
use std::ops::Range;
use std::path::PathBuf;

use slipstream_base::mix;
use slipstream_base::width::{floor_u32, floor_u64, round_u64, to_u8, to_u32, to_usize};
use slipstream_config::doc::{Origin, Table, Value};

use super::flow_list::{self, Row};
use super::network::{Network, ROUTINGS, no_host, seconds};
use super::order::{Item, read_item};
use super::{Dialect, Resources, note, ns};
use crate::queueing::{Discipline, PFC_CLASSES};
use crate::route::Routing;
use crate::scenario::{
    After, Arrivals, Dcqcn, Demand, Dist, Finished, Flow, Ndp, Paths, Queue, Roce, Tcp, Transport,
};
use crate::sizes::Sizes;
use crate::transport::congestion::ALGORITHMS;
use crate::transport::tcp::RTO_NS_MAX;
use crate::transport::{OtherTransport, PROTOCOLS};

/// Dependencies by flow number: (waiting flow, flow that must finish).
type Dependencies = Vec<(u64, u64)>;

/// A flow as read; its class is set after all flows are known.
pub(super) struct ParsedFlow {
    pub(super) flow: Flow,
    /// Priorities of 802.1Q, of its data and of its answers.
    priority: u8,
    answer_priority: u8,
    /// Whether the file gives its class.
    has_class: bool,
}

/// Memory per flow in addition to its own size: endpoints, rows of the path table, packets in
/// flight. Measured over fat-trees; an estimate to refuse runs early.
const FLOW_BYTES: u64 = 1_000;

pub(super) struct Reader<'a> {
    pub(super) network: &'a Network,
    pub(super) dialect: Dialect,
    pub(super) seed: u64,
    duration_s: f64,
    waits: RefCell<Dependencies>,
    sets: Cell<u64>,
    pub(super) collectives: Cell<u32>,
    /// Hosts of a graph by the nodes whose numbers they have.
    by_node: Option<HashMap<u32, u32>>,
    /// Numbers of flows in the file, and the next that may be free.
    given: HashSet<u64>,
    next_id: Cell<u64>,
    /// Flows so far.
    count: Cell<u64>,
    notes: RefCell<BTreeSet<String>>,
    /// Lists of flows, in the order of the file.
    lists: RefCell<Vec<List>>,
    resources: &'a Resources<'a>,
}

/// The source of the flows of a list, for errors about one of them.
#[derive(Default)]
struct List {
    file: PathBuf,
    /// Index of its first flow among all.
    first: usize,
    /// By flow: its line.
    lines: Vec<u32>,
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

/// Maximum number of flows per set.
const FLOWS_MAX: u64 = 10_000_000;

/// Properties that all flows of a table share.
#[derive(Clone)]
pub(super) struct Template {
    pub(super) transport: Transport,
    pub(super) demand: Demand,
    start_ns: u64,
    pub(super) routing: Option<Routing>,
    packet_bytes: u32,
    header_bytes: u32,
    ack_bytes: u32,
    class: u8,
    answer_class: u8,
    has_class: bool,
    priority: u8,
    answer_priority: u8,
    /// Sizes of the flows of a set are random.
    sizes: Option<Sizes>,
}

impl Template {
    pub(super) fn flow(&self, id: u64, src: u32, dst: u32, paths: Paths) -> ParsedFlow {
        #[cfg(test)]
        tests::CREATED.set(tests::CREATED.get() + 1);
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

impl<'a> Reader<'a> {
    pub(super) fn new(
        network: &'a Network,
        dialect: Dialect,
        seed: u64,
        duration_s: f64,
        resources: &'a Resources<'a>,
    ) -> Self {
        let topology = &network.topology;
        let by_node = topology.names_hosts_by_node().then(|| {
            // The first of several hosts on a node has the node's number.
            let hosts = (0..topology.host_count()).rev();
            hosts.map(|h| (topology.attachment(h), h)).collect()
        });
        Reader {
            network,
            dialect,
            seed,
            duration_s,
            waits: RefCell::default(),
            sets: Cell::new(0),
            collectives: Cell::new(0),
            by_node,
            given: HashSet::new(),
            next_id: Cell::new(0),
            count: Cell::new(0),
            notes: RefCell::default(),
            lists: RefCell::default(),
            resources,
        }
    }

    /// Returns the flows, and by table of them the index of its first flow and its position.
    pub(super) fn read(
        mut self,
        root: &Table<'_>,
        notes: &mut Vec<String>,
    ) -> (Vec<ParsedFlow>, Vec<(usize, Origin)>) {
        let given = RefCell::new(HashSet::new());
        root.any("flow.flow_id", |value| {
            if let Value::Integer(id) = value {
                // A negative number is an error where the flow is read.
                given.borrow_mut().extend(u64::try_from(*id));
            }
            false
        });
        self.given = given.into_inner();
        let before = root.error_count();
        let (mut flows, mut items, mut origins) = (Vec::new(), Vec::new(), Vec::new());
        let mut keep = |flows: &mut Vec<ParsedFlow>, made: (Item, Vec<ParsedFlow>)| {
            let (mut item, made) = made;
            let from = flows.len();
            origins.push((from, item.origin.clone()));
            append(flows, made);
            item.flows = from..flows.len();
            items.push(item);
        };
        for made in root.array("flow", |_, t| (read_item(t), self.read_flow(t))) {
            keep(&mut flows, made);
        }
        for made in root.array("flow_set", |_, t| (read_item(t), self.read_set(t))) {
            keep(&mut flows, made);
        }
        let listed = root.array("flow_list", |_, t| (read_item(t), self.read_list(t)));
        for (i, made) in listed.into_iter().enumerate() {
            self.lists.borrow_mut()[i].first = flows.len();
            keep(&mut flows, made);
        }
        for made in root.array("collective", |_, t| (read_item(t), self.read_collective(t))) {
            keep(&mut flows, made);
        }
        for made in root.array("collective_set", |_, t| {
            (read_item(t), self.read_collective_set(t))
        }) {
            keep(&mut flows, made);
        }
        for made in root.array("compute", |_, t| (self.read_compute(t), Vec::new())) {
            keep(&mut flows, made);
        }
        notes.extend(self.notes.take());
        if root.error_count() > before {
            // Flows are missing, so dependencies on them would be reported as errors too.
            return (flows, origins);
        }
        // A trace of training is refused by name; see the caller.
        if flows.is_empty() && !root.has("workload") {
            root.error(
                "flow",
                "the file describes no traffic",
                "add a [[flow]], [[flow_set]], [[flow_list]] or [[collective]]",
            );
        }
        self.check_numbers(root, &flows);
        self.link_items(root, &items, &mut flows);
        self.link_waits(root, &mut flows);
        notes.extend(self.notes.take());
        (flows, origins)
    }

    /// Reports flow numbers that a list repeats, with the lines of both flows. (Repeated numbers in
    /// tables are detected at set-up.)
    fn check_numbers(&self, root: &Table<'_>, flows: &[ParsedFlow]) {
        let lists = self.lists.borrow();
        let rising = flows.windows(2).all(|w| w[0].flow.id < w[1].flow.id);
        if lists.is_empty() || rising {
            return;
        }
        let mut order: Vec<u32> = (0..to_u32(flows.len())).collect();
        order.sort_unstable_by_key(|&i| (flows[i as usize].flow.id, i));
        let place = |i: u32| {
            let list = lists.iter().find_map(|list| {
                let line = list.lines.get((i as usize).checked_sub(list.first)?)?;
                Some(format!("{}:{line}", list.file.display()))
            });
            list.ok_or("a flow of a table")
        };
        let twice = order
            .windows(2)
            .filter(|pair| flows[pair[0] as usize].flow.id == flows[pair[1] as usize].flow.id)
            .map(|pair| (pair[1], place(pair[0]), place(pair[1])))
            .filter(|(_, first, second)| first.is_ok() || second.is_ok());
        for (i, first, second) in twice.take(flow_list::PROBLEMS_MAX) {
            let id = flows[i as usize].flow.id;
            let text = |place: Result<String, &str>| place.unwrap_or_else(str::to_owned);
            root.error(
                "flow_list",
                format!(
                    "{}: the flow number {id} is also that of {}",
                    text(second),
                    text(first)
                ),
                "give each flow its own number, or omit the numbers",
            );
        }
    }

    /// Resolves flow numbers of `starts_after` and `starts_before` to indexes.
    fn link_waits(&self, root: &Table<'_>, flows: &mut [ParsedFlow]) {
        let waits = self.waits.take();
        if waits.is_empty() {
            return;
        }
        let by_id: HashMap<u64, usize> = flows
            .iter()
            .enumerate()
            .map(|(i, made)| (made.flow.id, i))
            .collect();
        for (waiting, first) in waits {
            match (by_id.get(&waiting), by_id.get(&first)) {
                (Some(&i), Some(&flow)) => flows[i].flow.after.push(After {
                    flow: to_u32(flow),
                    until: Finished::Acknowledged,
                    delay_ns: 0,
                }),
                (a, _) => {
                    let (missing, of) = if a.is_none() {
                        (waiting, first)
                    } else {
                        (first, waiting)
                    };
                    root.error(
                        "flow",
                        format!("flow {of} is to start before or after flow {missing}, which does not exist"),
                        "correct the number or add the flow",
                    );
                }
            }
        }
    }

    pub(super) fn note(&self, note: String) {
        self.notes.borrow_mut().insert(note);
    }

    /// Numbers for `count` flows, from `first`, or else from the next free one.
    pub(super) fn take_ids(&self, first: Option<u64>, count: u64) -> u64 {
        let first = first.unwrap_or_else(|| {
            let mut next = self.next_id.get();
            // Numbers in the file stay reserved; they are few.
            if count == 1 {
                while self.given.contains(&next) {
                    next += 1;
                }
            } else if let Some(last) = self.given.iter().max() {
                next = next.max(last + 1);
            }
            next
        });
        self.next_id.set(first.saturating_add(count));
        first
    }

    /// Whether `count` more flows can be simulated; if not, reports why, before they are created.
    pub(super) fn has_room(&self, t: &Table<'_>, key: &str, count: u64) -> bool {
        let total = self.count.get() + count;
        let need = total.saturating_mul(FLOW_BYTES + size_of::<ParsedFlow>() as u64);
        let have = self.resources.memory_bytes_max;
        // The limit of the partitions' indexes, one partition per shard.
        let parts = self.network.topology.parts().min(crate::step::SHARDS_MAX);
        let most = crate::step::INDEX_MAX as u64 * u64::from(parts);
        if need > have {
            t.error(
                key,
                format!(
                    "{total} flows need about {} MiB, more than the {} MiB at hand",
                    need >> 20,
                    have >> 20
                ),
                "use fewer flows, or a machine with more memory",
            );
            return false;
        }
        if total > most.min(FLOWS_MAX) {
            t.error(
                key,
                format!("{total} flows exceed the limit of this network"),
                format!("use at most {}", most.min(FLOWS_MAX)),
            );
            return false;
        }
        self.count.set(total);
        true
    }

    fn read_flow(&self, t: &Table<'_>) -> Vec<ParsedFlow> {
        let id: Option<u64> = t.get("flow_id").optional();
        let template = self.read_template(t);
        let path: Option<Vec<u32>> = t.get("path").optional();
        let errors = t.error_count();
        let pairs = self.read_pairs(t, path.as_deref());
        if pairs.is_empty() && t.error_count() == errors && !(path.is_none() && t.has("path")) {
            t.error(
                "graph",
                "the flow has no sender and receiver",
                "add graph = [[sender, receiver]]",
            );
        }
        if !self.has_room(t, "graph", pairs.len() as u64) {
            return Vec::new();
        }
        let id = self.take_ids(id, pairs.len() as u64);
        self.read_order(t, id..id + 1);
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

    /// `starts_before` and `starts_after`, which apply to each of the flows `ids`.
    fn read_order(&self, t: &Table<'_>, ids: Range<u64>) {
        for (key, before) in [("starts_before", true), ("starts_after", false)] {
            for other in read_ids(t, key) {
                for id in ids.clone() {
                    let wait = if before { (other, id) } else { (id, other) };
                    self.waits.borrow_mut().push(wait);
                }
            }
        }
    }

    /// `[[flow_list]]`: flows from a file, one per line.
    fn read_list(&self, t: &Table<'_>) -> Vec<ParsedFlow> {
        let mut list = List::default();
        let made = self.read_list_into(t, &mut list);
        self.lists.borrow_mut().push(list);
        made
    }

    fn read_list_into(&self, t: &Table<'_>, list: &mut List) -> Vec<ParsedFlow> {
        let path = t
            .path("file")
            .required("give the file: file = \"flows.csv\"", "".into());
        let mut template = self.read_template_of(t, true);
        let mut made: Vec<ParsedFlow> = Vec::new();
        if path.as_os_str().is_empty() {
            return made;
        }
        let paths = Paths::By(template.routing.unwrap_or(self.network.routing));
        let (start_ns, class, answer_class) =
            (template.start_ns, template.class, template.answer_class);
        let (has_class, priority) = (template.has_class, template.priority);
        let mut full = false;
        let mut take = |row: Row, line: u64| -> Result<(), String> {
            let name = |key: &str, number: u32| {
                self.find_host(number)
                    .ok_or_else(|| format!("`{key}`: {}", no_host(&self.network.topology, number)))
            };
            let (src, dst) = (name("src", row.src)?, name("dst", row.dst)?);
            if src == dst {
                return Err(format!("host {} sends to itself", row.src));
            }
            if made.len().is_multiple_of(4096) && !self.has_room(t, "file", 4096) {
                full = true;
                return Err("too many flows".into());
            }
            template.demand = match template.demand {
                // Packets keep their gaps.
                Demand::Paced(arrivals) => Demand::Paced(Arrivals {
                    bytes: Some(row.bytes),
                    duration_ns: None,
                    ..arrivals
                }),
                Demand::Bytes(_) => Demand::Bytes(row.bytes),
            };
            template.start_ns = start_ns.saturating_add(row.start_ns);
            template.class = row.class.unwrap_or(class);
            template.answer_class = row.class.unwrap_or(answer_class);
            template.has_class = has_class || row.class.is_some();
            template.priority = row.priority.unwrap_or(priority);
            template.answer_priority = template.priority;
            let id = self.take_ids(row.id, 1);
            made.push(template.flow(id, src, dst, paths.clone()));
            list.lines.push(u32::try_from(line).unwrap_or(u32::MAX));
            Ok(())
        };
        let outcome = (self.resources.open)(&path)
            .map_err(|what| vec![format!("{}: {what}", path.display())])
            .and_then(|file| flow_list::read(&path, file, &mut take));
        if let Err(problems) = outcome
            && !full
        {
            for problem in problems {
                t.error("file", problem, "see `[[flow_list]]` in docs/netsim.md");
            }
        }
        list.file = path;
        made
    }

    /// Sender and receiver of each flow in `graph`, or the ends of `path`.
    pub(super) fn read_pairs(&self, t: &Table<'_>, path: Option<&[u32]>) -> Vec<(u32, u32)> {
        let graph: Option<Vec<Vec<u32>>> = t.get("graph").optional();
        let graph = graph.unwrap_or_else(|| match path {
            Some([first, .., last]) => vec![vec![*first, *last]],
            _ => Vec::new(),
        });
        let mut pairs = Vec::new();
        for pair in &graph {
            let [src, dst] = pair[..] else {
                t.error(
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

    fn find_host(&self, number: u32) -> Option<u32> {
        if !self.network.is_known {
            return Some(number);
        }
        match &self.by_node {
            Some(by_node) => by_node.get(&number).copied(),
            None => self.network.topology.host_named(number),
        }
    }

    pub(super) fn host(&self, t: &Table<'_>, key: &str, number: u32) -> Option<u32> {
        let found = self.find_host(number);
        if found.is_none() {
            note(t, key, &no_host(&self.network.topology, number));
        }
        found
    }

    fn read_set(&self, t: &Table<'_>) -> Vec<ParsedFlow> {
        let first: Option<u64> = t.get("first_flow_id").optional();
        let pairing = t.choice("pairing", PAIRINGS).or(Pairing::Random);
        let hosts = self.network.topology.host_count();
        let load: Option<f64> = t
            .get("load")
            .check(|&l| l > 0.0 && l <= 10.0, "above 0 and at most 10")
            .optional();
        let span_ns = seconds(t, "span");
        if t.has("span") && load.is_none() {
            t.error(
                "span",
                "`span` needs `load`",
                "give `load`, or remove `span`",
            );
        }
        // The number of flows of the pattern, if it has one.
        let usual = match pairing {
            Pairing::Permutation => Some(u64::from(hosts)),
            Pairing::Incast => Some(u64::from(hosts).saturating_sub(1)),
            Pairing::AllToAll => Some(u64::from(hosts) * u64::from(hosts).saturating_sub(1)),
            _ => None,
        };
        let count = t.get::<u64>("flow_count").within(1..=FLOWS_MAX);
        let count = match usual {
            // As many as fit in the span, up to a limit.
            _ if span_ns.is_some() && !t.has("flow_count") => FLOWS_MAX,
            Some(usual) if !t.has("flow_count") => usual,
            _ => count.required("give the number of flows, or `load` and `span`", 1),
        };
        if count > FLOWS_MAX {
            t.error(
                "pairing",
                format!("the pattern has {count} flows"),
                format!("use at most {FLOWS_MAX}: fewer hosts, or give `flow_count`"),
            );
            return Vec::new();
        }
        let count = to_u32(count);
        let template = self.read_template(t);
        let set = self.sets.replace(self.sets.get() + 1);
        if hosts < 2 {
            t.error(
                "flow_count",
                "the network has fewer than two hosts",
                "add hosts",
            );
            return Vec::new();
        }
        // With a `span`, flows are counted when they are created.
        let known = if span_ns.is_some() && !t.has("flow_count") {
            0
        } else {
            u64::from(count)
        };
        if !self.has_room(t, "flow_count", known) {
            return Vec::new();
        }
        let paths = Paths::By(template.routing.unwrap_or(self.network.routing));
        let grid = self.network.topology.grid();
        let by_switch = matches!(pairing, Pairing::SwitchOffsetHalf | Pairing::SameSwitchNext);
        if by_switch && grid.is_none() {
            t.error(
                "pairing",
                "`pairing` by switch needs the same number of hosts on every switch",
                "use pairing = \"Random\"",
            );
            return Vec::new();
        }
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
            match (pairing, grid) {
                (Pairing::Permutation, _) => (src, partners[src as usize]),
                // Senders in order of their numbers, without the sink.
                (Pairing::Incast, _) => {
                    let src = i % (hosts - 1);
                    (src + u32::from(src >= sink), sink)
                }
                // Sender by sender, each to all others.
                (Pairing::AllToAll, _) => {
                    let (src, to) = (i / (hosts - 1) % hosts, i % (hosts - 1));
                    (src, (src + 1 + to) % hosts)
                }
                (Pairing::Random, _) => random_pair(stream, u64::from(i), hosts),
                (Pairing::SwitchOffsetHalf, Some(grid)) => {
                    let (switch, ordinal) = grid.place(src);
                    let partner = (switch + grid.switches / 2) % grid.switches;
                    (src, grid.host(partner, ordinal))
                }
                (Pairing::SameSwitchNext, Some(grid)) => {
                    let (switch, ordinal) = grid.place(src);
                    (src, grid.host(switch, (ordinal + 1) % grid.per_switch))
                }
                // Refused above.
                (Pairing::SwitchOffsetHalf | Pairing::SameSwitchNext, None) => (src, src),
            }
        };
        let arrivals = load.map(|load| self.arrivals(load, pairing == Pairing::Incast, &template));
        if let Some(Err(what)) = &arrivals {
            t.error(
                "load",
                what.clone(),
                "give `traffic.size` or `traffic.size_dist`",
            );
            return Vec::new();
        }
        let gap_ns = arrivals.and_then(Result::ok);
        let first = self.take_ids(first, known);
        let (mut start, mut flows) = (0.0, Vec::with_capacity(to_usize(known)));
        for i in 0..count {
            if known == 0 && i.is_multiple_of(4096) && !self.has_room(t, "span", 4096) {
                return Vec::new();
            }
            let (src, dst) = pair(i);
            let mut made = template.flow(first + u64::from(i), src, dst, paths.clone());
            let flow = &mut made.flow;
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
                flow.start_ns = flow.start_ns.saturating_add(floor_u64(start));
            }
            flows.push(made);
        }
        let last = first + flows.len() as u64;
        self.next_id.set(last);
        self.read_order(t, first..last);
        flows
    }

    /// Mean gap between flows, ns, that loads hosts' links (for an incast, the sink's link) to a
    /// share of their rate.
    fn arrivals(&self, load: f64, one_link: bool, template: &Template) -> Result<f64, String> {
        let mean = match (&template.sizes, template.demand) {
            (Some(sizes), _) => sizes.mean(),
            (None, Demand::Bytes(bytes)) => bytes as f64,
            (None, Demand::Paced(arrivals)) => match arrivals.bytes {
                Some(bytes) => bytes as f64,
                None => return Err("`load` needs flows of a known size".into()),
            },
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

    pub(super) fn read_template(&self, t: &Table<'_>) -> Template {
        self.read_template_of(t, false)
    }

    /// `listed`: the flow list gives the sizes.
    fn read_template_of(&self, t: &Table<'_>, listed: bool) -> Template {
        let others = PROTOCOLS.iter().enumerate();
        let others = others.map(|(i, protocol)| (protocol.word, FlowType::Other(i)));
        let words: Vec<(&str, FlowType)> = FLOW_TYPES.iter().copied().chain(others).collect();
        let kind = t.choice("flow_type", &words).or(FlowType::Tcp);
        let routing = read_routing(t);
        let header_bytes = t.get("header_bytes").within(0..=9_000u32).or(0);
        let mut ack_bytes = t.get("ack_bytes").within(1..=9_000u32).or(40);
        let priority = to_u8(t.get("priority").within(0..=7u32).or(0));
        let has_class = t.has("class") || t.has("answer_class");
        let class = to_u8(t.get("class").within(0..=255u32).or(0));
        let answer_class = t.get("answer_class").within(0..=255u32);
        let answer_class = to_u8(answer_class.or(u32::from(class)));
        let mut answer_priority = priority;
        let duration_s = self.duration_s;
        // NDP sprays by default.
        let routing = match kind {
            FlowType::Ndp => routing.or(Some(Routing::Spray)),
            FlowType::Other(i) if PROTOCOLS[i].sprays => routing.or(Some(Routing::Spray)),
            _ => routing,
        };
        t.table("traffic", |t| {
            let start_ns = seconds(t, "initial_delay").unwrap_or(0);
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
            let duration_ns = seconds(t, "duration");
            let gap = read_dist(t, "arr_dist");
            let size = read_dist(t, "pkt_size_dist");
            // A segment is as long as the largest packet.
            let packet_bytes = match size {
                Some(Dist::Constant(b)) => b,
                Some(Dist::Uniform { high, .. } | Dist::DiscreteUniform { high, .. }) => high,
                Some(Dist::Exp { .. }) | None => 1460.0,
            };
            if !(1.0..=60_000.0).contains(&packet_bytes) {
                t.error(
                    "pkt_size_dist",
                    format!("`pkt_size_dist` has packets of up to {packet_bytes} bytes"),
                    "use 1 to 60000 bytes",
                );
            }
            let transport = match kind {
                FlowType::Tcp => {
                    Transport::Tcp(t.table("tcp", |t| self.read_tcp(t)))
                }
                FlowType::Roce => {
                    let (roce, answers) = self.read_queue_pair(t);
                    answer_priority = answers.priority.unwrap_or(priority);
                    ack_bytes = answers.bytes.unwrap_or(ack_bytes);
                    Transport::Roce(roce)
                }
                FlowType::Ndp => Transport::Ndp(t.table("ndp", read_ndp)),
                FlowType::Packets => Transport::Packets,
                FlowType::Other(i) => Transport::Other(OtherTransport {
                    protocol: PROTOCOLS[i],
                    parameters: (PROTOCOLS[i].read)(t),
                }),
            };
            if !matches!(kind, FlowType::Tcp | FlowType::Packets) && bytes.is_none() {
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
                if gap.is_none() && !t.has("arr_dist") {
                    t.error(
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
                packet_bytes: floor_u32(packet_bytes),
                header_bytes,
                ack_bytes,
                class,
                answer_class,
                has_class,
                priority,
                answer_priority,
                sizes,
            }
        })
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
        }
    }

    /// `roce`, and `dcqcn` of Days: a queue pair and its answers.
    fn read_queue_pair(&self, t: &Table<'_>) -> (Roce, Answers) {
        let (mut roce, mut answers) = t.table("roce", |t| {
            let mut roce = read_roce(t);
            let answers = self.read_days_roce(t, &mut roce);
            (roce, answers)
        });
        if t.has("dcqcn") {
            if t.any("roce.dcqcn", |_| true) {
                t.error(
                    "dcqcn",
                    "`traffic.dcqcn` and `traffic.roce.dcqcn` both give constants",
                    "remove one of them",
                );
            }
            let cnp;
            (roce.dcqcn, cnp) = t.table("dcqcn", |t| self.read_days_dcqcn(t));
            answers.priority = answers.priority.or(cnp);
        }
        (roce, answers)
    }

    /// Keys of `[traffic.roce]` that Days has.
    fn read_days_roce(&self, t: &Table<'_>, roce: &mut Roce) -> Answers {
        if let Some(timeout) = t
            .get::<u64>("retransmit_timeout_ns")
            .within(0..=NEVER_NS)
            .optional()
        {
            // 0: only a NACK triggers retransmission.
            roce.retry_ns = Some(if timeout == 0 {
                NEVER_NS
            } else {
                timeout.max(1_000)
            });
        }
        let window: Option<u64> = t.get("window_bytes").within(0..=1u64 << 40).optional();
        roce.window_bytes = window.unwrap_or(roce.window_bytes);
        if t.get("variable_window").or(false) {
            t.refuse(
                "variable_window",
                "is not modeled: a window that shrinks with the rate",
                "write variable_window = false, or leave it out",
            );
        }
        if let Some(packets) = t.get("ack_every_packets").within(1..=1_000u32).optional() {
            t.refuse(
                "ack_every",
                "conflicts with `ack_every_packets` of Days: both set the packets per ACK",
                "keep one of the two",
            );
            roce.ack_every = packets;
        }
        if !t.get("duplicate_ack").or(true) {
            t.refuse(
                "duplicate_ack",
                "is not modeled: a packet that arrives again is always answered at once, as the ACK \
                 of the first one may be lost",
                "write duplicate_ack = true, or leave it out",
            );
        }
        if t.has("nack_interval_ns") {
            let _: Option<u64> = t.get("nack_interval_ns").optional();
            self.note(
                "`traffic.roce.nack_interval_ns` has no effect: a gap causes one NACK".into(),
            );
        }
        Answers {
            priority: t
                .get::<u32>("feedback_priority")
                .within(0..=7u32)
                .optional()
                .map(to_u8),
            bytes: t.get("ack_size_bytes").within(1..=9_000u32).optional(),
        }
    }

    /// `[traffic.dcqcn]` of Days, and the priority of notifications.
    fn read_days_dcqcn(&self, t: &Table<'_>) -> (Option<Dcqcn>, Option<u8>) {
        let usual = Dcqcn::default();
        let gbit = |key: &str| {
            t.get::<f64>(key)
                .check(|&g| g > 0.0 && g <= 1e6, "above 0 and at most 1e6 Gb/s")
                .optional()
                .map(|g| g * 1e9)
        };
        let (first, min, max) = (
            gbit("rate_gbps"),
            gbit("min_rate_gbps"),
            gbit("max_rate_gbps"),
        );
        let least = min.unwrap_or(usual.rate_bits_per_s_min);
        if [first, max].into_iter().flatten().any(|rate| rate < least)
            || first.zip(max).is_some_and(|(first, max)| first > max)
        {
            t.error(
                "rate_gbps",
                "the rates of `traffic.dcqcn` do not rise",
                "give min_rate_gbps <= rate_gbps <= max_rate_gbps",
            );
        }
        let time = |key: &str, usual: u64| {
            t.get::<f64>(key)
                .within(0.0..=1e18)
                .optional()
                .map_or(usual, |time| round_u64(time).max(1_000))
        };
        let cut: f64 = t.get("mi_factor").or(0.5);
        if cut != 0.5 {
            t.refuse(
                "mi_factor",
                "is not modeled: a notification cuts the rate by half of alpha",
                "write mi_factor = 0.5",
            );
        }
        for key in ["alpha_resume_interval_ns", "rate_decrease_interval_ns"] {
            t.refuse(
                key,
                "is not modeled: in Mellanox's form alpha and the rate change at the ends of such \
                 intervals, here with each notification (Zhu et al. 2015)",
                "leave it out, and give `alpha_timer_ns` and `cnp_interval_ns`",
            );
        }
        if !t.get("clamp_target_rate").or(true) {
            t.refuse(
                "clamp_target_rate",
                "is not modeled: each notification sets the target rate to the current rate",
                "write clamp_target_rate = true, or leave it out",
            );
        }
        for key in ["pacing_interval_ns", "rtt_ns"] {
            if t.has(key) {
                let _: Option<f64> = t.get(key).optional();
                self.note(format!(
                    "`traffic.dcqcn.{key}` has no effect: packets are paced at the rate itself"
                ));
            }
        }
        let dcqcn = Dcqcn {
            gain: t.get("g").within(1e-9..=1.0).or(usual.gain),
            timer_ns: time("rp_timer_ns", usual.timer_ns),
            alpha_timer_ns: time("alpha_timer_ns", usual.alpha_timer_ns),
            byte_counter: t
                .get("increase_byte_threshold")
                .within(1_000..=1u64 << 40)
                .or(usual.byte_counter),
            fast_steps: t
                .get("fast_recovery_times")
                .within(1..=1_000u32)
                .or(usual.fast_steps),
            additive_bits_per_s: gbit("ai_rate_gbps").unwrap_or(usual.additive_bits_per_s),
            hyper_bits_per_s: gbit("hai_rate_gbps").unwrap_or(usual.hyper_bits_per_s),
            cnp_interval_ns: time("cnp_interval_ns", usual.cnp_interval_ns),
            rate_bits_per_s_min: min.unwrap_or(usual.rate_bits_per_s_min),
            rate_bits_per_s_max: max,
            rate_bits_per_s_first: first,
        };
        let priority = t.get::<u32>("cnp_priority").within(0..=7u32).optional();
        (Some(dcqcn), priority.map(to_u8))
    }
}

/// Priority and size of a queue pair's answers, if the file gives them.
struct Answers {
    priority: Option<u8>,
    bytes: Option<u32>,
}

/// A timeout beyond the end of any run.
const NEVER_NS: u64 = 1_000_000_000_000_000_000;

/// Sets the classes of flows: those of the file, or as in Days.
///
/// Days schedules a flow in class `id mod classes`, and pauses it by its 802.1Q priority. Here one
/// class serves both, and a table maps classes to priorities.
pub(super) fn settle_classes(
    root: &Table<'_>,
    dialect: Dialect,
    mut made: Vec<ParsedFlow>,
    queue: &mut Queue,
    notes: &mut Vec<String>,
) -> Vec<Flow> {
    let classes = queue.discipline.classes() as u64;
    let fifo = queue.discipline == Discipline::Fifo;
    if dialect == Dialect::Days && !fifo {
        for made in made.iter_mut().filter(|made| !made.has_class) {
            let class = to_u8(made.flow.id % classes);
            (made.flow.class, made.flow.answer_class) = (class, class);
        }
    }
    let by_priority = queue.pfc.is_some_and(|pfc| pfc.by_priority.is_some());
    if !by_priority {
        if made.iter().any(|made| made.priority > 0) {
            notes.push("`priority` has no effect without link.mode = \"Pfc\"".into());
        }
        return made.into_iter().map(|made| made.flow).collect();
    }
    let used: BTreeSet<u8> = made
        .iter()
        .flat_map(|made| [made.priority, made.answer_priority])
        .collect();
    if fifo && used.len() > 1 {
        // Order of arrival, but each priority can be paused separately.
        queue.discipline = Discipline::PriorityFifo(to_u8(PFC_CLASSES));
        for made in &mut made {
            made.flow.class = made.priority;
            made.flow.answer_class = made.answer_priority;
        }
        return made.into_iter().map(|made| made.flow).collect();
    }
    let mut of_class: [Option<u8>; 256] = [None; 256];
    for made in &made {
        let last = to_u8(classes.saturating_sub(1));
        for (class, priority) in [
            (made.flow.class, made.priority),
            (made.flow.answer_class, made.answer_priority),
        ] {
            let known = of_class[usize::from(class.min(last))].get_or_insert(priority);
            if *known != priority {
                root.error(
                    "switch",
                    format!(
                        "class {class} of the discipline has flows of priorities {known} and \
                         {priority}, which PFC must pause separately"
                    ),
                    "give the flows of a class one priority, or write discipline = \"FIFO\"",
                );
                return Vec::new();
            }
        }
    }
    if of_class[PFC_CLASSES..].iter().any(Option::is_some) {
        root.error(
            "switch",
            "PFC has 8 classes, and the file uses more",
            "use at most 8 classes with link.mode = \"Pfc\"",
        );
    }
    for (class, priority) in queue.priorities.iter_mut().zip(of_class) {
        *class = priority.unwrap_or(*class);
    }
    made.into_iter().map(|made| made.flow).collect()
}

/// Appends flows whose dependencies are indexes into `made`.
pub(super) fn append(flows: &mut Vec<ParsedFlow>, mut made: Vec<ParsedFlow>) {
    if flows.is_empty() {
        *flows = made;
        return;
    }
    let offset = to_u32(flows.len());
    for made in &mut made {
        for after in &mut made.flow.after {
            after.flow += offset;
        }
    }
    flows.append(&mut made);
}

/// Two different hosts, at random by index.
fn random_pair(stream: u64, index: u64, hosts: u32) -> (u32, u32) {
    let src = to_u32(mix::below(mix::draw(stream, 2 * index), u64::from(hosts)));
    let others = u64::from(hosts) - 1;
    let step = to_u32(mix::below(mix::draw(stream, 2 * index + 1), others));
    (src, (src + 1 + step) % hosts)
}

/// A random cycle through all hosts (Sattolo 1986): each sends to one other host.
fn permutation(stream: u64, hosts: u32) -> Vec<u32> {
    let mut to: Vec<u32> = (0..hosts).collect();
    for i in (1..hosts as usize).rev() {
        let j = to_usize(mix::below(mix::draw(stream, i as u64), i as u64));
        to.swap(i, j);
    }
    to
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
    let least = 1_000;
    let timeout = |key: &str| {
        t.get::<f64>(key)
            .check(
                |&s| (0.0..=RTO_NS_MAX as f64 / 1e9).contains(&s),
                "from 0 to 60 s",
            )
            .optional()
            .map(|s| ns(s).max(least))
    };
    let min = timeout("rto_min").unwrap_or(1_000_000_000);
    let initial = timeout("rto_initial");
    if let Some(initial) = initial.filter(|&initial| initial < min) {
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

/// One flow number or a list of them.
fn read_ids(t: &Table<'_>, key: &str) -> Vec<u64> {
    struct Ids(Vec<u64>);
    impl slipstream_config::doc::Scalar for Ids {
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

fn read_roce(t: &Table<'_>) -> Roce {
    let dcqcn = if t.holds_table("dcqcn") || !t.has("dcqcn") {
        Some(t.table("dcqcn", read_dcqcn))
    } else {
        t.get("dcqcn").or(true).then(Dcqcn::default)
    };
    Roce {
        dcqcn,
        window_bytes: t.get("window").within(0..=1u64 << 40).or(0),
        retry_ns: seconds(t, "rto").map(|ns| ns.max(1_000)),
        ack_every: t.get("ack_every").within(1..=1_000u32).or(1),
    }
}

fn read_dcqcn(t: &Table<'_>) -> Dcqcn {
    let usual = Dcqcn::default();
    let time = |key: &str, usual: u64| {
        let time = t.get::<f64>(key).within(1e-6..=1e9).optional();
        time.map_or(usual, ns)
    };
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
        ..usual
    }
}

fn read_ndp(t: &Table<'_>) -> Ndp {
    let usual = Ndp::default();
    Ndp {
        window_packets: t
            .get("window")
            .within(1..=100_000u32)
            .or(usual.window_packets),
        retry_ns: seconds(t, "rto").map(|ns| ns.max(1_000)),
    }
}

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use super::*;
    use crate::config::{self, Config};

    thread_local! {
        /// Flows that were created by this thread.
        pub(super) static CREATED: Cell<u64> = const { Cell::new(0) };
    }

    /// Reads `traffic` on a fat-tree with `k` pods of k²/4 hosts: the result, and how many flows were
    /// created for it.
    fn read(k: u32, traffic: &str, memory_bytes_max: u64) -> (Result<Config, String>, u64) {
        let toml = format!(
            "duration = 1.0\n[topology]\ncategory = \"FatTree\"\n[topology.fat_tree]\nk = {k}\n\
             hosts_per_edge = {}\n[switch]\nport_rate = 1e9\n{traffic}",
            k / 2
        );
        let resources = Resources {
            open: &|_| Err("no files".into()),
            memory_bytes_max,
        };
        let before = CREATED.get();
        let config = config::read_with(Doc::parse("t.toml", toml.as_bytes()), &resources);
        (config.map_err(|e| e.to_string()), CREATED.get() - before)
    }

    fn set(count: u64) -> String {
        format!("[[flow_set]]\nflow_count = {count}\ntraffic = {{ size = 1 }}\n")
    }

    #[test]
    fn as_many_flows_are_read_as_memory_has_room_for() {
        let each = FLOW_BYTES + size_of::<ParsedFlow>() as u64;
        // The same with fewer: as many as fit, and not one more.
        let (config, created) = read(4, &set(2_000), 2_000 * each);
        assert_eq!(
            (config.unwrap().scenario.flows.len(), created),
            (2_000, 2_000)
        );
        let (refused, created) = read(4, &set(2_000), 2_000 * each - 1);
        assert!(refused.unwrap_err().contains("2000 flows need about"));
        assert_eq!(created, 0);
        // In total, however they are divided into tables.
        let (refused, created) = read(4, &(set(1_500) + &set(501)), 2_000 * each);
        assert!(refused.unwrap_err().contains("2001 flows need about"));
        assert_eq!(created, 1_500);
    }

    #[test]
    fn ten_million_flows_that_do_not_fit_are_refused_before_one_is_created() {
        let collective = |kind: &str| {
            format!(
                "[[collective]]\ncollective_type = \"{kind}\"\nsources = {:?}\n\
                 traffic = {{ size = 1_000_000 }}\n",
                (0..1_024).collect::<Vec<u32>>()
            )
        };
        for (traffic, k, memory, part) in [
            // A pod numbers 2^20.
            (set(10_000_000), 2, u64::MAX, "use at most 2097152"),
            (set(10_000_001), 16, u64::MAX, "10000000"),
            (set(10_000_000), 16, 1 << 30, "10000000 flows need about"),
            (
                set(10_000_000) + &set(1),
                16,
                1 << 30,
                "10000000 flows need",
            ),
            (
                "[[flow_set]]\npairing = \"AllToAll\"\ntraffic = { size = 1 }\n".into(),
                32,
                u64::MAX,
                "the pattern has 67100672 flows",
            ),
            (
                collective("AllToAll"),
                16,
                1 << 30,
                "1047552 flows need about",
            ),
            (
                collective("RingAllReduce"),
                16,
                1 << 30,
                "2095104 flows need",
            ),
        ] {
            let (refused, created) = read(k, &traffic, memory);
            let message = refused.expect_err(part);
            assert!(message.contains(part), "{message}");
            // A set of one flow has room, after a refused one or with a count that is an error.
            assert!(created <= 1, "{part}: {created} flows were created");
        }
    }
}
