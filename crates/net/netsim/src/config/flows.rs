//! `[[flow]]`, `[[flow_set]]`, `[[flow_list]]`, `[[collective]]`, `[[collective_set]]` and
//! `[[compute]]`.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;

use slipstream_base::width::to_u32;
use slipstream_config::doc::{Origin, Table, Value};

use super::flow_list::{self, Row};
use super::network::{Network, no_host};
use super::order::{Item, read_item};
use super::template::{ParsedFlow, Template, TemplateReader};
use super::{Dialect, Resources, note};
use crate::scenario::{After, Arrivals, Demand, Finished, Paths};

/// Dependencies by flow number: (waiting flow, flow that must finish).
type Dependencies = Vec<(u64, u64)>;

/// Memory per flow in addition to its own size: endpoints, rows of the path table, packets in
/// flight. Measured over fat-trees; an estimate to refuse runs early.
const FLOW_BYTES: u64 = 1_000;

pub(super) struct Reader<'a> {
    pub(super) network: &'a Network,
    pub(super) dialect: Dialect,
    templates: TemplateReader<'a>,
    pub(super) seed: u64,
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

/// Maximum number of flows per set.
pub(super) const FLOWS_MAX: u64 = 10_000_000;

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
            templates: TemplateReader::new(dialect, duration_s, resources),
            waits: RefCell::default(),
            sets: Cell::new(0),
            collectives: Cell::new(0),
            by_node,
            given: HashSet::new(),
            next_id: Cell::new(0),
            count: Cell::new(0),
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
        notes.extend(self.templates.take_notes());
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
        if root.error_count() > 0 {
            // As above, of errors elsewhere: a table without its name, say.
            return (flows, origins);
        }
        self.check_numbers(root, &flows);
        self.link_items(root, &items, &mut flows);
        self.link_waits(root, &mut flows);
        notes.extend(self.templates.take_notes());
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

    /// The number of this set among all.
    pub(super) fn next_set(&self) -> u64 {
        self.sets.replace(self.sets.get() + 1)
    }

    /// Sets the next number that may be free.
    pub(super) fn number_from(&self, next: u64) {
        self.next_id.set(next);
    }

    pub(super) fn note(&self, note: String) {
        self.templates.note(note);
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
    pub(super) fn read_order(&self, t: &Table<'_>, ids: Range<u64>) {
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
        let mut template = self.templates.read(t, true);
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

    pub(super) fn read_template(&self, t: &Table<'_>) -> Template {
        self.templates.read(t, false)
    }
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

#[cfg(test)]
mod tests {
    use slipstream_config::doc::Doc;

    use super::*;
    use crate::config::template::CREATED;
    use crate::config::{self, Config};

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
