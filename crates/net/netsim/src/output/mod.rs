//! Outputs of a run for people and programs.

mod csv;
mod html;
mod json;
mod perfetto;
mod text;

pub use csv::{write_series_csv, write_sinks_csv, write_sources_csv, write_switches_csv};
pub use html::html;
pub use json::write_json;
pub use perfetto::perfetto;
pub(crate) use text::time;
pub use text::{deadlock_text, text};

use slipstream_base::width::{floor_u64, to_usize};
use slipstream_report::latency::enough_samples;

use crate::config::Config;
use crate::flow::FlowResult;
use crate::result::RunResult;
use crate::scenario::Transport;
use crate::transport;

/// The cost of the run, measured by the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Time of the set-up, wall seconds.
    pub setup_s: f64,
    /// Time of the simulation, wall seconds.
    pub run_s: f64,
    /// CPU seconds of the set-up.
    pub setup_cpu_s: f64,
    /// CPU seconds of the simulation, all threads.
    pub run_cpu_s: f64,
    /// Largest resident set, bytes.
    pub rss_bytes_max: u64,
    /// Threads.
    pub threads: u32,
    /// Shards.
    pub shards: usize,
    /// Windows; 0 in a run of one shard.
    pub windows: u64,
}

/// Completion times of the flows of one size class.
#[derive(Clone, Debug, PartialEq)]
pub struct SizeClass {
    /// Name, such as `10 kB to 100 kB`.
    pub name: &'static str,
    /// Flows in the class.
    pub flows: usize,
    /// Flows that finished.
    pub finished: usize,
    /// Completion time, from the start to the last byte's arrival: mean, p50, p99, max, ns.
    pub fct_ns: [f64; 4],
    /// Completion time over that of the flow alone on its path: mean, p50, p99, max.
    pub slowdown: [f64; 4],
}

impl SizeClass {
    /// Mean, p50, p99 and maximum for tables: `-` if there are no flows, and for a p99 of too few.
    fn four(&self, values: &[f64; 4], show: impl Fn(f64) -> String) -> [String; 4] {
        if self.finished == 0 {
            return std::array::from_fn(|_| "-".to_owned());
        }
        let mut cells = values.map(show);
        if self.omits_p99() {
            "-".clone_into(&mut cells[2]);
        }
        cells
    }

    fn omits_p99(&self) -> bool {
        !enough_samples(0.99, self.finished as u64)
    }
}

/// Goodput, bits/s: bytes received in order, each counted once.
///
/// A flow is active from its start to the arrival of its last byte. An incomplete flow is active to
/// the end of the run, a flow without a size to its last arrival. Flows that never started are not
/// counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goodput {
    /// Flows that were active.
    pub flows: u64,
    /// Per flow, over its active time: arithmetic mean.
    pub flow_mean: f64,
    /// Per flow: median (nearest rank).
    pub flow_p50: f64,
    /// Per flow: minimum.
    pub flow_min: f64,
    /// All bytes over the time in which any flow was active. One flow that ends late makes this
    /// small, even if the others were fast; compare `flow_p50`.
    pub all: f64,
    /// That time, ns: the union of the flows' times.
    pub active_ns: u64,
}

/// Goodput; `None` if no flow was active for a nanosecond.
pub fn goodput(config: &Config, result: &RunResult) -> Option<Goodput> {
    let mut spans: Vec<(u64, u64)> = Vec::new();
    let (mut rates, mut bytes) = (Vec::new(), 0);
    for (f, spec) in result.flows.iter().zip(&config.scenario.flows) {
        if f.packets_sent == 0 {
            continue;
        }
        let end = match f.delivered_ns {
            Some(end) => end,
            None if spec.demand.bytes().is_some() => result.totals.last_event_ns,
            None => f.last_ns,
        };
        if end > f.start_ns {
            spans.push((f.start_ns, end));
            bytes += f.bytes_in_order;
            rates.push(f.bytes_in_order as f64 * 8e9 / (end - f.start_ns) as f64);
        }
    }
    if rates.is_empty() {
        return None;
    }
    spans.sort_unstable();
    let (mut active_ns, mut until) = (0, 0);
    for (start, end) in spans {
        active_ns += end.saturating_sub(start.max(until));
        until = until.max(end);
    }
    let [flow_mean, flow_p50, ..] = four(rates.clone());
    Some(Goodput {
        flows: rates.len() as u64,
        flow_mean,
        flow_p50,
        flow_min: rates.iter().copied().fold(f64::INFINITY, f64::min),
        all: bytes as f64 * 8e9 / active_ns as f64,
        active_ns,
    })
}

/// Upper ends of the size classes, bytes.
const CLASSES: [(&str, u64); 5] = [
    ("to 10 kB", 10_000),
    ("10 kB to 100 kB", 100_000),
    ("100 kB to 1 MB", 1_000_000),
    ("1 MB to 10 MB", 10_000_000),
    ("above 10 MB", u64::MAX),
];

/// Mean, p50, p99 and maximum; zeros if empty. Percentiles are nearest ranks.
fn four(mut values: Vec<f64>) -> [f64; 4] {
    if values.is_empty() {
        return [0.0; 4];
    }
    values.sort_unstable_by(f64::total_cmp);
    let rank = |p: f64| values[to_usize(floor_u64((values.len() as f64 * p).ceil())).max(1) - 1];
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    [mean, rank(0.5), rank(0.99), rank(1.0)]
}

/// Completion times by size class, of flows with a known size.
pub fn size_classes(config: &Config, result: &RunResult) -> Vec<SizeClass> {
    let scenario = &config.scenario;
    let mut low = 0;
    let mut classes = Vec::new();
    for (name, high) in CLASSES {
        let members: Vec<(usize, &FlowResult)> = result
            .flows
            .iter()
            .enumerate()
            .filter(|(i, _)| {
                let bytes = scenario.flows[*i].demand.bytes();
                bytes.is_some_and(|b| b > low && b <= high)
            })
            .collect();
        low = high;
        if members.is_empty() {
            continue;
        }
        let times: Vec<(f64, f64)> = members
            .iter()
            .filter_map(|(i, f)| {
                let fct = f.delivered_ns? - f.start_ns;
                Some((fct as f64, fct as f64 / result.ideal_ns[*i].max(1) as f64))
            })
            .collect();
        classes.push(SizeClass {
            name,
            flows: members.len(),
            finished: times.len(),
            fct_ns: four(times.iter().map(|t| t.0).collect()),
            slowdown: four(times.iter().map(|t| t.1).collect()),
        });
    }
    classes
}

/// The result of a collective.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveTime {
    /// Its number in the file.
    pub index: u32,
    /// Number of flows.
    pub flows: usize,
    /// Number of hosts.
    pub hosts: usize,
    /// From the first start to the last arrival, ns; `None`: not finished.
    pub time_ns: Option<u64>,
    /// Bytes that its busiest host sent, divided by the time: the load of its link, bits/s.
    pub bus_bits_per_s: Option<f64>,
}

/// Times of the collectives.
pub fn collectives(config: &Config, result: &RunResult) -> Vec<CollectiveTime> {
    use std::collections::BTreeMap;
    let mut members: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, flow) in config.scenario.flows.iter().enumerate() {
        if let Some(c) = flow.collective {
            members.entry(c).or_default().push(i);
        }
    }
    members
        .into_iter()
        .map(|(index, flows)| {
            let mut sent: BTreeMap<u32, u64> = BTreeMap::new();
            let mut hosts = std::collections::BTreeSet::new();
            for &i in &flows {
                let f = &config.scenario.flows[i];
                *sent.entry(f.src).or_default() += f.demand.bytes().unwrap_or(0);
                hosts.extend([f.src, f.dst]);
            }
            let start = flows.iter().map(|&i| result.flows[i].start_ns).min();
            let ends: Option<Vec<u64>> = flows
                .iter()
                .map(|&i| result.flows[i].delivered_ns)
                .collect();
            let time_ns = ends
                .and_then(|ends| ends.into_iter().max())
                .zip(start)
                .map(|(end, start)| end - start);
            let busiest = sent.values().max().copied().unwrap_or(0);
            CollectiveTime {
                index,
                flows: flows.len(),
                hosts: hosts.len(),
                time_ns,
                bus_bits_per_s: time_ns
                    .filter(|&t| t > 0)
                    .map(|t| busiest as f64 * 8e9 / t as f64),
            }
        })
        .collect()
}

/// Notes of the configuration, of flows in this run that sent nothing, with the reason, and of
/// settings that make results meaningless.
pub fn notes(config: &Config, result: &RunResult) -> Vec<String> {
    let mut notes = config.notes.clone();
    let scenario = &config.scenario;
    let idle =
        |i: &usize| !result.flows[*i].started || scenario.flows[*i].demand.bytes() == Some(0);
    let idle: Vec<usize> = (0..result.flows.len()).filter(idle).collect();
    for &i in idle.iter().take(IDLE_NAMED) {
        let (flow, spec) = (&result.flows[i], &scenario.flows[i]);
        let unfinished = spec.after.iter().find(|after| {
            let f = &result.flows[after.flow as usize];
            f.acked_ns.or(f.delivered_ns).is_none()
        });
        let reason = if flow.started {
            "has a size of 0 and sends nothing".into()
        } else if spec.start_ns > scenario.duration_ns {
            format!(
                "never starts: its start at {} is after the end of the run, `duration` = {}",
                text::time(spec.start_ns as f64),
                text::time(scenario.duration_ns as f64)
            )
        } else if let Some(after) = unfinished {
            let other = result.flows[after.flow as usize].id;
            format!("did not start: it waits for flow {other}, which had not finished at the end")
        } else {
            "did not start before the run ended".into()
        };
        notes.push(format!("flow {} {reason}", flow.id));
    }
    if idle.len() > IDLE_NAMED {
        notes.push(format!(
            "{} more flows sent nothing, for similar reasons",
            text::grouped((idle.len() - IDLE_NAMED) as u64)
        ));
    }
    notes.extend(crate::advice::on_result(scenario, result));
    notes
}

/// Idle flows that are listed one by one.
const IDLE_NAMED: usize = 3;

/// Name of a flow's transport.
pub fn transport_name(transport: &Transport) -> &'static str {
    transport::label(transport)
}
