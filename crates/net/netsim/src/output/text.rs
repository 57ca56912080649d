//! The text summary of a run.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use slipstream_report::latency::TOO_FEW;
pub(super) use slipstream_report::table::{counted, grouped};

use super::{Cost, SizeClass, collectives, goodput, notes, size_classes, transport_name};
use crate::config::Config;
use crate::deadlock::Deadlock;
use crate::result::{RunResult, Totals};

/// A time in a suitable unit.
pub(crate) fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.2} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.3} ms", ns / 1e6),
        ns => format!("{:.3} s", ns / 1e9),
    }
}

/// A rate in a suitable unit.
pub(super) fn rate(bits_per_s: f64) -> String {
    match bits_per_s {
        r if r < 1e3 => format!("{r:.3} b/s"),
        r if r < 1e6 => format!("{:.3} kb/s", r / 1e3),
        r if r < 1e9 => format!("{:.3} Mb/s", r / 1e6),
        r => format!("{:.3} Gb/s", r / 1e9),
    }
}

/// Lines of a label and a value.
struct Lines(String);

impl Lines {
    fn add(&mut self, label: &str, value: impl std::fmt::Display) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "  {label:<14} {value}");
    }
}

/// The run as text.
pub fn text(name: &str, config: &Config, result: &RunResult, cost: &Cost) -> String {
    let mut lines = Lines(String::new());
    add_question(&mut lines, config, result);
    add_packets(&mut lines, config, result);
    add_times(&mut lines, config, result);
    add_cost(&mut lines, &result.totals, cost);
    lines.add(
        "seed, digest",
        format!("{}, {:016x}", config.scenario.seed, result.digest),
    );
    for note in notes(config, result) {
        lines.add("note", note);
    }
    format!("{name}\n{}", lines.0)
}

/// The network, and the flows over it.
fn add_question(lines: &mut Lines, config: &Config, result: &RunResult) {
    let scenario = &config.scenario;
    let hosts = scenario.topology.host_count();
    let textbook = match scenario.topology.fewer_hosts() {
        Some((few, usual)) => format!(
            " ({few} per edge switch; the textbook has {usual}, {} in all)",
            grouped(u64::from(hosts / few * usual))
        ),
        None => String::new(),
    };
    lines.add(
        "network",
        format!(
            "{}, {}{textbook}, {} in use",
            counted(scenario.topology.node_count().into(), "switch"),
            counted(hosts.into(), "host"),
            counted(result.ports.len() as u64, "port")
        ),
    );
    lines.add(
        "dialect",
        format!("{}: {}", config.dialect.word(), config.dialect_because),
    );
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for flow in &scenario.flows {
        *kinds.entry(transport_name(&flow.transport)).or_default() += 1;
    }
    let kinds: Vec<String> = kinds.iter().map(|(k, n)| format!("{n} {k}")).collect();
    let done = result.flows.iter().filter(|f| f.delivered_ns.is_some());
    let unstarted = match result.flows.iter().filter(|f| !f.started).count() {
        0 => String::new(),
        n => format!(", {} never started", grouped(n as u64)),
    };
    lines.add(
        "flows",
        format!(
            "{}; {} delivered completely{unstarted}",
            kinds.join(", "),
            done.count()
        ),
    );
    lines.add("simulated", time(result.totals.last_event_ns as f64));
}

/// What happened to the packets, and in the switches.
fn add_packets(lines: &mut Lines, config: &Config, result: &RunResult) {
    let t = &result.totals;
    let sum = |f: fn(&crate::flow::FlowResult) -> u64| -> u64 { result.flows.iter().map(f).sum() };
    lines.add(
        "packets",
        format!(
            "{} data ({} retransmitted), {} received",
            grouped(sum(|f| f.packets_sent)),
            grouped(sum(|f| f.retransmitted)),
            counted(sum(|f| f.acks), "acknowledgment")
        ),
    );
    lines.add(
        "lost",
        format!(
            "{} data, {} control; {}, {}",
            grouped(t.data_drops),
            grouped(t.control_drops),
            counted(sum(|f| u64::from(f.fast_retransmits)), "fast retransmit"),
            counted(sum(|f| u64::from(f.timeouts)), "timeout")
        ),
    );
    if t.marks + t.trims + t.pauses > 0 {
        lines.add(
            "signals",
            format!(
                "{}, {}, {}",
                counted(t.marks, "mark"),
                counted(t.trims, "trim"),
                counted(t.pauses, "pause")
            ),
        );
    }
    if !result.memories.is_empty() {
        let most = |f: fn(&crate::result::MemoryResult) -> u64| {
            grouped(result.memories.iter().map(f).max().unwrap_or(0))
        };
        let paused: u64 = result.ports.iter().map(|p| p.paused_ns).sum();
        lines.add(
            "switch memory",
            format!(
                "at most {} bytes of a switch, {} of a headroom; links paused for {} in total",
                most(|m| m.bytes_max),
                most(|m| m.headroom_bytes_max),
                time(paused as f64)
            ),
        );
    }
    if let Some(deadlock) = &result.deadlock {
        lines.add("DEADLOCK", deadlock_text(config, deadlock));
    }
}

/// Rates and completion times of flows and collectives.
fn add_times(lines: &mut Lines, config: &Config, result: &RunResult) {
    if let Some(g) = goodput(config, result) {
        lines.add(
            "goodput",
            format!(
                "per flow: mean {}, p50 {}, min {}; total: {} over the {} with an active flow",
                rate(g.flow_mean),
                rate(g.flow_p50),
                rate(g.flow_min),
                rate(g.all),
                time(g.active_ns as f64)
            ),
        );
    }
    let classes = size_classes(config, result);
    for class in &classes {
        let [fct_mean, fct_p50, fct_p99, fct_max] = class.four(&class.fct_ns, time);
        let [slow_mean, _, slow_p99, _] = class.four(&class.slowdown, |s| format!("{s:.2}"));
        lines.add(
            class.name,
            format!(
                "{} of {}; completion mean {fct_mean}, p50 {fct_p50}, p99 {fct_p99}, max {fct_max}; \
                 slowdown mean {slow_mean}, p99 {slow_p99}",
                class.finished,
                counted(class.flows as u64, "flow"),
            ),
        );
    }
    if classes.iter().any(SizeClass::omits_p99) {
        lines.add("", TOO_FEW);
    }
    for c in collectives(config, result) {
        let of = format!(
            "#{}: {}, {}",
            c.index,
            counted(c.hosts as u64, "host"),
            counted(c.flows as u64, "flow")
        );
        let outcome = match (c.time_ns, c.bus_bits_per_s) {
            (Some(ns), Some(bus)) => {
                format!("{}; busiest host sent at {}", time(ns as f64), rate(bus))
            }
            _ => "not finished".to_owned(),
        };
        lines.add("collective", format!("{of}, {outcome}"));
    }
}

/// What the run cost on this machine.
fn add_cost(lines: &mut Lines, totals: &Totals, cost: &Cost) {
    lines.add(
        "events",
        format!(
            "{} ({}), {:.1} ns of CPU each; {}, {}, {}",
            grouped(totals.events),
            counted(totals.packet_hops, "packet-hop"),
            cost.run_cpu_s * 1e9 / totals.events.max(1) as f64,
            counted(cost.shards as u64, "shard"),
            counted(cost.threads.into(), "thread"),
            counted(cost.windows, "window")
        ),
    );
    lines.add(
        "took",
        format!(
            "set-up {:.4} s ({:.4} s CPU), simulation {:.4} s ({:.4} s CPU), {} MiB",
            cost.setup_s,
            cost.setup_cpu_s,
            cost.run_s,
            cost.run_cpu_s,
            cost.rss_bytes_max >> 20
        ),
    );
}

/// The cycle of a PFC deadlock, and the remedy.
pub fn deadlock_text(config: &Config, deadlock: &Deadlock) -> String {
    let topology = &config.scenario.topology;
    let links: Vec<String> = deadlock
        .cycle
        .iter()
        .map(|&(port, class)| {
            let (from, to) = topology.port_ends(port);
            format!(
                "{} to {} (class {class})",
                topology.name(from),
                topology.name(to)
            )
        })
        .collect();
    format!(
        "detected at {}: these links pause each other forever: {}; use paths without such a cycle, or \
         raise `switch.pfc.xoff`",
        time(deadlock.seen_ns as f64),
        links.join(", ")
    )
}
