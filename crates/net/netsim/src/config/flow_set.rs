//! `[[flow_set]]`: many flows by a pattern of pairs, sizes and arrivals.

use slipstream_base::mix;
use slipstream_base::width::{floor_u64, to_u32, to_usize};
use slipstream_config::doc::Table;

use super::flows::{FLOWS_MAX, Reader};
use super::template::{ParsedFlow, Template};
use super::units::seconds;
use crate::scenario::{Demand, Paths};
use crate::topology::Grid;

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

/// Which host sends to which.
struct Pattern {
    pairing: Pairing,
    hosts: u32,
    grid: Option<Grid>,
    /// Of random pairs.
    stream: u64,
    /// By sender, of a permutation.
    partners: Vec<u32>,
    /// Of an incast.
    sink: u32,
}

impl Pattern {
    /// Sender and receiver of flow `i`.
    fn pair(&self, i: u32) -> (u32, u32) {
        let hosts = self.hosts;
        let src = i % hosts;
        match (self.pairing, self.grid) {
            (Pairing::Permutation, _) => (src, self.partners[src as usize]),
            // Senders in order of their numbers, without the sink.
            (Pairing::Incast, _) => {
                let src = i % (hosts - 1);
                (src + u32::from(src >= self.sink), self.sink)
            }
            // Sender by sender, each to all others.
            (Pairing::AllToAll, _) => {
                let (src, to) = (i / (hosts - 1) % hosts, i % (hosts - 1));
                (src, (src + 1 + to) % hosts)
            }
            (Pairing::Random, _) => random_pair(self.stream, u64::from(i), hosts),
            (Pairing::SwitchOffsetHalf, Some(grid)) => {
                let (switch, ordinal) = grid.place(src);
                let partner = (switch + grid.switches / 2) % grid.switches;
                (src, grid.host(partner, ordinal))
            }
            (Pairing::SameSwitchNext, Some(grid)) => {
                let (switch, ordinal) = grid.place(src);
                (src, grid.host(switch, (ordinal + 1) % grid.per_switch))
            }
            // Refused where the set is read.
            (Pairing::SwitchOffsetHalf | Pairing::SameSwitchNext, None) => (src, src),
        }
    }
}

/// Number and times of the flows of a set.
struct Extent {
    /// At most as many.
    count: u32,
    /// As many, unless `span` ends the set.
    known: Option<u32>,
    /// Mean gap between flows, ns.
    gap_ns: Option<f64>,
    span_ns: Option<u64>,
}

impl Reader<'_> {
    pub(super) fn read_set(&self, t: &Table<'_>) -> Vec<ParsedFlow> {
        let first: Option<u64> = t.get("first_flow_id").optional();
        let pairing = t.choice("pairing", PAIRINGS).or(Pairing::Random);
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
        let Some(count) = self.read_count(t, pairing, span_ns) else {
            return Vec::new();
        };
        let template = self.read_template(t);
        let set = self.next_set();
        // With a `span`, flows are counted when they are created.
        let known = (span_ns.is_none() || t.has("flow_count")).then_some(count);
        let stream = mix::draw(self.seed ^ 0x7061_6972, set);
        let Some(pattern) = self.read_pattern(t, pairing, known, stream) else {
            return Vec::new();
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
        let extent = Extent {
            count,
            known,
            gap_ns: arrivals.and_then(Result::ok),
            span_ns,
        };
        let first = self.take_ids(first, u64::from(known.unwrap_or(0)));
        let Some(flows) = self.make_set(t, first, &template, &pattern, &extent) else {
            return Vec::new();
        };
        let last = first + flows.len() as u64;
        self.number_from(last);
        self.read_order(t, first..last);
        flows
    }

    /// `flow_count`, or the number of flows of the pattern, or as many as fit in a span.
    fn read_count(&self, t: &Table<'_>, pairing: Pairing, span_ns: Option<u64>) -> Option<u32> {
        let hosts = u64::from(self.network.topology.host_count());
        let usual = match pairing {
            Pairing::Permutation => Some(hosts),
            Pairing::Incast => Some(hosts.saturating_sub(1)),
            Pairing::AllToAll => Some(hosts * hosts.saturating_sub(1)),
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
            return None;
        }
        Some(to_u32(count))
    }

    /// The pattern, if the network has hosts for it and memory for `known` flows.
    fn read_pattern(
        &self,
        t: &Table<'_>,
        pairing: Pairing,
        known: Option<u32>,
        stream: u64,
    ) -> Option<Pattern> {
        let hosts = self.network.topology.host_count();
        if hosts < 2 {
            t.error(
                "flow_count",
                "the network has fewer than two hosts",
                "add hosts",
            );
            return None;
        }
        if !self.has_room(t, "flow_count", u64::from(known.unwrap_or(0))) {
            return None;
        }
        let grid = self.network.topology.grid();
        let by_switch = matches!(pairing, Pairing::SwitchOffsetHalf | Pairing::SameSwitchNext);
        if by_switch && grid.is_none() {
            t.error(
                "pairing",
                "`pairing` by switch needs the same number of hosts on every switch",
                "use pairing = \"Random\"",
            );
            return None;
        }
        let partners = match pairing {
            Pairing::Permutation => permutation(stream, hosts),
            _ => Vec::new(),
        };
        let sink = t.get::<u32>("sink").optional();
        let sink = sink
            .map_or(Some(0), |sink| self.host(t, "sink", sink))
            .unwrap_or(0);
        Some(Pattern {
            pairing,
            hosts,
            grid,
            stream,
            partners,
            sink,
        })
    }

    /// The flows of a set, if memory has room for them.
    fn make_set(
        &self,
        t: &Table<'_>,
        first: u64,
        template: &Template,
        pattern: &Pattern,
        extent: &Extent,
    ) -> Option<Vec<ParsedFlow>> {
        let paths = Paths::By(template.routing.unwrap_or(self.network.routing));
        let mut flows = Vec::with_capacity(extent.known.unwrap_or(0) as usize);
        let mut start = 0.0;
        for i in 0..extent.count {
            let counted = extent.known.is_some() || !i.is_multiple_of(4096);
            if !counted && !self.has_room(t, "span", 4096) {
                return None;
            }
            let (src, dst) = pattern.pair(i);
            let mut made = template.flow(first + u64::from(i), src, dst, paths.clone());
            let flow = &mut made.flow;
            if let Some(sizes) = &template.sizes {
                let size = sizes.sample(pattern.stream ^ 0x7369_7a65, u64::from(i));
                flow.demand = Demand::Bytes(size);
            }
            if let Some(gap_ns) = extent.gap_ns {
                // A Poisson process: exponential gaps, by inverse transform.
                let u = mix::unit(mix::draw(pattern.stream ^ 0x6761_7073, u64::from(i)));
                start += -libm::log(1.0 - u) * gap_ns;
                if extent.span_ns.is_some_and(|span| start > span as f64) {
                    break;
                }
                flow.start_ns = flow.start_ns.saturating_add(floor_u64(start));
            }
            flows.push(made);
        }
        Some(flows)
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
