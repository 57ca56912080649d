//! `[[collective]]` and `[[collective_set]]`.

use std::collections::{HashMap, HashSet};

use slipstream_base::mix;
use slipstream_config::doc::Table;

use super::flows::{Reader, append};
use super::template::{ParsedFlow, Template};
use super::{Dialect, ns};
use crate::collective::{Collective, CollectiveKind, Step};
use crate::scenario::{After, Finished, Paths};

/// `None`: independent flows, one per source and sink.
const KINDS: &[(&str, Option<CollectiveKind>)] = &[
    ("SendRecv", None),
    ("Broadcast", Some(CollectiveKind::Broadcast)),
    ("Gather", Some(CollectiveKind::Gather)),
    ("AllReduce", Some(CollectiveKind::AllReduce)),
    ("RingAllReduce", Some(CollectiveKind::RingAllReduce)),
    ("TreeAllReduce", Some(CollectiveKind::TreeAllReduce)),
    ("RecursiveDoubling", Some(CollectiveKind::RecursiveDoubling)),
    ("AllGather", Some(CollectiveKind::AllGather)),
    ("ReduceScatter", Some(CollectiveKind::ReduceScatter)),
    ("AllToAll", Some(CollectiveKind::AllToAll)),
];

impl Reader<'_> {
    pub(super) fn read_collective(&self, t: &Table<'_>) -> Vec<ParsedFlow> {
        let errors = t.error_count();
        let first: Option<u64> = t.get("first_flow_id").optional();
        let shape = self.read_shape(t);
        let paths: Vec<Vec<u32>> = t.get("paths").or(Vec::new());
        let sources: Vec<u32> = t.get("sources").or(Vec::new());
        let sinks: Vec<u32> = t.get("sinks").or(Vec::new());
        let pairs = if t.has("graph") {
            self.read_pairs(t, None)
        } else {
            Vec::new()
        };
        let members = self.read_members(t, &pairs, &paths, &sources, &sinks);
        if t.error_count() > errors {
            // Hosts may be missing.
            return Vec::new();
        }
        self.expand(t, first, &shape, &members)
    }

    pub(super) fn read_collective_set(&self, t: &Table<'_>) -> Vec<ParsedFlow> {
        let mut first: Option<u64> = t.get("first_flow_id").optional();
        let shape = self.read_shape(t);
        let count: usize = t.get("collective_count").within(1..=65_536u32).or(1) as usize;
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
            let members = self.read_members(
                t,
                &pairs,
                paths.get(i).map_or(&[][..], Vec::as_slice),
                sources.get(i).map_or(&[][..], Vec::as_slice),
                sinks.get(i).map_or(&[][..], Vec::as_slice),
            );
            let made = self.expand(t, first, &shape, &members);
            if let Some(first) = &mut first {
                *first += made.len() as u64;
            }
            append(&mut flows, made);
        }
        flows
    }

    fn read_shape(&self, t: &Table<'_>) -> Shape {
        let kind = t
            .choice("collective_type", KINDS)
            .required("name the collective", Some(CollectiveKind::RingAllReduce));
        if kind.is_none() && self.dialect == Dialect::Slipstream {
            t.error(
                "collective_type",
                "SendRecv is a collective of Days",
                "write [[flow]] instead, or dialect = \"days\"",
            );
        }
        Shape {
            kind,
            template: self.read_template(t),
            count: t.get("flow_count").optional(),
            compute_ns: ns(t
                .get::<f64>("compute_s")
                .within(0.0..=1e6)
                .check(|&s| s == 0.0 || ns(s) > 0, super::units::WHOLE_NS)
                .or(0.0)),
            skew: t.get::<f64>("skew").within(0.0..=10.0).or(0.0),
        }
    }

    /// The hosts of a collective, from any of the keys that list them.
    fn read_members(
        &self,
        t: &Table<'_>,
        pairs: &[(u32, u32)],
        paths: &[Vec<u32>],
        sources: &[u32],
        sinks: &[u32],
    ) -> Members {
        let list = |key: &str, numbers: &[u32]| -> Vec<u32> {
            numbers
                .iter()
                .filter_map(|&n| self.host(t, key, n))
                .collect()
        };
        let mut members = Members {
            sources: list("sources", sources),
            sinks: list("sinks", sinks),
            pairs: pairs.to_vec(),
            explicit: HashMap::new(),
        };
        for path in paths {
            let [a, .., b] = path[..] else {
                t.error(
                    "paths",
                    "`paths` has a path of fewer than two nodes",
                    "list its nodes",
                );
                continue;
            };
            if let (Some(src), Some(dst)) = (self.host(t, "paths", a), self.host(t, "paths", b)) {
                members.explicit.insert((src, dst), path.clone());
                members.pairs.push((src, dst));
            }
        }
        members
    }

    /// Whether a step stays in one server, which is reported.
    fn refuse_nvlink(&self, t: &Table<'_>, steps: &[Step]) -> bool {
        let Some(per_server) = self.network.gpus_per_server else {
            return false;
        };
        let inside = |s: &&Step| s.src / per_server == s.dst / per_server;
        let Some(step) = steps.iter().find(inside) else {
            return false;
        };
        t.error(
            "collective_type",
            format!(
                "GPUs {} and {} are in one server, where Days uses NVLink, which is not modeled",
                step.src, step.dst
            ),
            "use GPUs of different servers in the collective",
        );
        true
    }

    /// The flows of a collective.
    fn expand(
        &self,
        t: &Table<'_>,
        first: Option<u64>,
        shape: &Shape,
        members: &Members,
    ) -> Vec<ParsedFlow> {
        let Shape {
            template,
            compute_ns,
            ..
        } = shape;
        let number = self.collectives.replace(self.collectives.get() + 1);
        let fans = matches!(
            shape.kind,
            None | Some(
                CollectiveKind::Broadcast | CollectiveKind::Gather | CollectiveKind::AllReduce
            )
        );
        let bytes = match template.demand.bytes() {
            Some(bytes) => bytes,
            // Each flow sends for the same duration; no data is forwarded.
            None if fans => 0,
            None => {
                t.error(
                    "traffic",
                    "a collective whose hosts forward data needs `traffic.size`, its bytes per \
                     host",
                    "give `size` in bytes in place of `duration`",
                );
                return Vec::new();
            }
        };
        // Random numbers depend on the collective's number, or its index among those without one.
        let place = if number == 0 {
            0
        } else {
            1 << 32 | u64::from(number)
        };
        let key = first.unwrap_or(place);
        let steps = match (shape.kind, self.dialect) {
            (Some(kind), Dialect::Slipstream) => {
                self.our_steps(t, kind, bytes, shape, members, key)
            }
            (Some(kind), Dialect::Days) if !fans => {
                let members = self.ring_of_days(t, shape, members.clone());
                self.our_steps(t, kind, bytes, shape, &members, key)
            }
            _ => {
                let steps = self.fan_of_days(t, bytes, shape, members, number);
                if !self.has_room(t, "collective_type", steps.len() as u64) {
                    return Vec::new();
                }
                steps
            }
        };
        if self.refuse_nvlink(t, &steps) {
            return Vec::new();
        }
        let routing = Paths::By(template.routing.unwrap_or(self.network.routing));
        let first = self.take_ids(first, steps.len() as u64);
        steps
            .into_iter()
            .enumerate()
            .map(|(i, step)| {
                let paths = members
                    .explicit
                    .get(&(step.src, step.dst))
                    .map_or_else(|| routing.clone(), |p| Paths::Explicit(p.clone()));
                let mut made = template.flow(first + i as u64, step.src, step.dst, paths);
                made.flow.demand = template.demand_of(step.bytes);
                made.flow.after = step
                    .after
                    .iter()
                    .map(|&flow| After {
                        flow,
                        until: Finished::Delivered,
                        delay_ns: *compute_ns,
                    })
                    .collect();
                made.flow.collective = Some(number);
                made
            })
            .collect()
    }

    /// Flows of a collective in our dialect: `sources` and `sinks` are two sets of hosts.
    fn our_steps(
        &self,
        t: &Table<'_>,
        kind: CollectiveKind,
        bytes: u64,
        shape: &Shape,
        members: &Members,
        key: u64,
    ) -> Vec<Step> {
        let (mut sources, mut sinks) = (members.sources.clone(), members.sinks.clone());
        for &(a, b) in &members.pairs {
            if !t.has("sources") || t.has("graph") {
                push_new(&mut sources, a);
            }
            if !t.has("sinks") || t.has("graph") {
                push_new(&mut sinks, b);
            }
        }
        let collective = Collective {
            kind,
            sources,
            sinks,
            // A flow that is bounded by time has no size; its steps are created with a nominal one.
            bytes: bytes.max(1),
            compute_ns: shape.compute_ns,
            skew: shape.skew,
            seed: mix::draw(self.seed ^ 0x636f_6c6c, key),
        };
        if !self.has_room(t, "collective_type", collective.flow_count()) {
            return Vec::new();
        }
        collective.steps().unwrap_or_else(|what| {
            let key = if t.has("sources") {
                "sources"
            } else {
                "collective_type"
            };
            t.error(key, what, "list the hosts in `sources` and `sinks`");
            Vec::new()
        })
    }

    /// Hosts of a ring in Days: `sources` in order, or every host.
    fn ring_of_days(&self, t: &Table<'_>, shape: &Shape, mut members: Members) -> Members {
        let pairs = Self::pairs_of_days(t, &members);
        if pairs.is_empty() {
            members.sources = (0..self.network.topology.host_count()).collect();
            if shape
                .count
                .is_some_and(|n| n as usize != members.sources.len())
            {
                t.error(
                    "flow_count",
                    format!(
                        "`flow_count` is not the number of hosts, {}",
                        members.sources.len()
                    ),
                    "list the hosts in `sources` and `sinks`",
                );
            }
        } else {
            let n = pairs.len();
            if (0..n).any(|i| pairs[i].1 != pairs[(i + 1) % n].0) {
                t.error(
                    "sinks",
                    "the flows do not form a ring: each host must send to the next one of `sources`",
                    "write sinks[i] = sources[i + 1], and the first after the last",
                );
            }
            members.sources = pairs.iter().map(|p| p.0).collect();
        }
        members.sinks.clear();
        members.pairs.clear();
        members
    }

    /// Sender and receiver of each flow of a collective in Days: `sources` and `sinks` pairwise.
    fn pairs_of_days(t: &Table<'_>, members: &Members) -> Vec<(u32, u32)> {
        let (sources, sinks) = (&members.sources, &members.sinks);
        match (sources.len(), sinks.len()) {
            (0, 0) => members.pairs.clone(),
            (a, b) if a == b => sources.iter().copied().zip(sinks.iter().copied()).collect(),
            // Its first versions used one source for all sinks, or one sink for all sources.
            (1, _) => sinks.iter().map(|&sink| (sources[0], sink)).collect(),
            (_, 1) => sources.iter().map(|&source| (source, sinks[0])).collect(),
            (a, b) => {
                t.error(
                    "sources",
                    format!("`sources` has {a} hosts and `sinks` {b}"),
                    "give each flow its source and its sink",
                );
                Vec::new()
            }
        }
    }

    /// Flows of a broadcast, gather, all-reduce (a fan-in in Days) or of independent sends.
    fn fan_of_days(
        &self,
        t: &Table<'_>,
        bytes: u64,
        shape: &Shape,
        members: &Members,
        number: u32,
    ) -> Vec<Step> {
        let mut pairs = Self::pairs_of_days(t, members);
        let hosts = self.network.topology.host_count();
        if pairs.is_empty() && members.sources.is_empty() && members.sinks.is_empty() {
            let count = shape.count.unwrap_or(0);
            if count == 0 || count >= hosts || shape.kind.is_none() {
                t.error(
                    "flow_count",
                    "the collective has no hosts",
                    "list `sources` and `sinks`, or give `flow_count` below the number of hosts",
                );
                return Vec::new();
            }
            // One host and `flow_count` others, at random.
            let stream = mix::draw(self.seed ^ 0x6661_6e73, number.into());
            let mut order: Vec<u32> = (0..hosts).collect();
            order.sort_by_key(|&h| mix::draw(stream, h.into()));
            let one = order[0];
            let others = order[1..=count as usize].iter();
            pairs = match shape.kind {
                Some(CollectiveKind::Broadcast) => others.map(|&other| (one, other)).collect(),
                _ => others.map(|&other| (other, one)).collect(),
            };
        }
        if shape.count.is_some_and(|n| n as usize != pairs.len()) {
            t.error(
                "flow_count",
                format!("`flow_count` is not the number of flows, {}", pairs.len()),
                "correct it, or `sources` and `sinks`",
            );
        }
        let one = |side: fn(&(u32, u32)) -> u32| {
            pairs.iter().map(side).collect::<HashSet<_>>().len() <= 1
        };
        let fits = match shape.kind {
            Some(CollectiveKind::Broadcast) => one(|p| p.0),
            Some(CollectiveKind::Gather | CollectiveKind::AllReduce) => one(|p| p.1),
            _ => true,
        };
        if !fits {
            t.error(
                "collective_type",
                "a broadcast has one source, a gather and an all-reduce one sink",
                "split it into several collectives",
            );
        }
        pairs
            .into_iter()
            .filter(|(src, dst)| src != dst)
            .map(|(src, dst)| Step {
                src,
                dst,
                bytes,
                after: Vec::new(),
            })
            .collect()
    }
}

/// A collective without its hosts.
struct Shape {
    /// `None`: independent sends.
    kind: Option<CollectiveKind>,
    template: Template,
    /// `flow_count`.
    count: Option<u32>,
    compute_ns: u64,
    skew: f64,
}

/// Hosts of a collective.
#[derive(Clone)]
struct Members {
    sources: Vec<u32>,
    sinks: Vec<u32>,
    /// From `graph` and `paths`.
    pairs: Vec<(u32, u32)>,
    /// Paths given by the file.
    explicit: HashMap<(u32, u32), Vec<u32>>,
}

fn push_new(list: &mut Vec<u32>, item: u32) {
    if !list.contains(&item) {
        list.push(item);
    }
}
