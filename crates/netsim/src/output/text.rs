//! The table that people read.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Cost, collectives, size_classes, transport_name};
use crate::config::Config;
use crate::deadlock::Deadlock;
use crate::result::RunResult;

/// A time in the unit that suits it.
pub(super) fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.2} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.3} ms", ns / 1e6),
        ns => format!("{:.3} s", ns / 1e9),
    }
}

/// `12345678` as `12,345,678`.
pub(super) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// The run as text.
pub fn text(name: &str, config: &Config, result: &RunResult, cost: &Cost) -> String {
    let mut out = String::new();
    let t = &result.totals;
    let scenario = &config.scenario;
    // Writing to a String cannot fail.
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "  {label:<14} {value}");
    };
    line(
        "network",
        format!(
            "{} switches, {} hosts, {} ports in use",
            grouped(u64::from(scenario.topology.node_count())),
            grouped(u64::from(scenario.topology.host_count())),
            grouped(result.ports.len() as u64)
        ),
    );
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for flow in &scenario.flows {
        *kinds.entry(transport_name(&flow.transport)).or_default() += 1;
    }
    let kinds: Vec<String> = kinds.iter().map(|(k, n)| format!("{n} {k}")).collect();
    let done = result.flows.iter().filter(|f| f.delivered_ns.is_some());
    line(
        "flows",
        format!("{}; {} delivered in full", kinds.join(", "), done.count()),
    );
    line("simulated", time(t.last_event_ns as f64));
    let sum =
        |f: fn(&crate::result::FlowResult) -> u64| -> u64 { result.flows.iter().map(f).sum() };
    line(
        "packets",
        format!(
            "{} data ({} again), {} acknowledgments received",
            grouped(sum(|f| f.packets_sent)),
            grouped(sum(|f| f.retransmitted)),
            grouped(sum(|f| f.acks))
        ),
    );
    line(
        "lost",
        format!(
            "{} data, {} control; {} fast retransmits, {} timeouts",
            grouped(t.data_drops),
            grouped(t.control_drops),
            grouped(sum(|f| u64::from(f.fast_retransmits))),
            grouped(sum(|f| u64::from(f.timeouts)))
        ),
    );
    if t.marks + t.trims + t.pauses > 0 {
        line(
            "signals",
            format!(
                "{} marks, {} trims, {} pauses",
                grouped(t.marks),
                grouped(t.trims),
                grouped(t.pauses)
            ),
        );
    }
    if !result.memories.is_empty() {
        let most = |f: fn(&crate::result::MemoryResult) -> u64| {
            grouped(result.memories.iter().map(f).max().unwrap_or(0))
        };
        let paused: u64 = result.ports.iter().map(|p| p.paused_ns).sum();
        line(
            "switch memory",
            format!(
                "at most {} bytes of a switch, {} of a headroom; links paused for {} in all",
                most(|m| m.bytes_max),
                most(|m| m.headroom_bytes_max),
                time(paused as f64)
            ),
        );
    }
    if let Some(deadlock) = &result.deadlock {
        line("DEADLOCK", deadlock_text(config, deadlock));
    }
    let goodput: f64 = {
        let bytes: u64 = result.flows.iter().map(|f| f.bytes_in_order).sum();
        let last = result.flows.iter().map(|f| f.last_ns).max().unwrap_or(0);
        bytes as f64 * 8.0 / last.max(1) as f64
    };
    line("goodput", format!("{goodput:.3} Gb/s over all flows"));
    for class in size_classes(config, result) {
        line(
            class.name,
            format!(
                "{} of {} flows; completion mean {}, p50 {}, p99 {}, max {}; slowdown mean {:.2}, p99 {:.2}",
                class.finished,
                class.flows,
                time(class.fct_ns[0]),
                time(class.fct_ns[1]),
                time(class.fct_ns[2]),
                time(class.fct_ns[3]),
                class.slowdown[0],
                class.slowdown[2]
            ),
        );
    }
    for c in collectives(config, result) {
        line(
            "collective",
            match (c.time_ns, c.bus_bits_per_s) {
                (Some(ns), Some(bus)) => format!(
                    "#{}: {} hosts, {} flows, {}; busiest host sent at {:.3} Gb/s",
                    c.index,
                    c.hosts,
                    c.flows,
                    time(ns as f64),
                    bus / 1e9
                ),
                _ => format!(
                    "#{}: {} hosts, {} flows, not finished",
                    c.index, c.hosts, c.flows
                ),
            },
        );
    }
    line(
        "events",
        format!(
            "{} ({} packet-hops), {:.1} ns of CPU each; {} shards, {} threads, {} windows",
            grouped(t.events),
            grouped(t.packet_hops),
            cost.run_cpu_s * 1e9 / t.events.max(1) as f64,
            cost.shards,
            cost.threads,
            grouped(cost.windows)
        ),
    );
    line(
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
    line(
        "seed, digest",
        format!("{}, {:016x}", scenario.seed, result.digest),
    );
    for note in &config.notes {
        line("note", note.clone());
    }
    format!("{name}\n{out}")
}

/// The circle of a PFC deadlock, and what helps.
pub fn deadlock_text(config: &Config, deadlock: &Deadlock) -> String {
    let topology = &config.scenario.topology;
    let links: Vec<String> = deadlock
        .cycle
        .iter()
        .map(|&(port, class)| {
            let (from, to) = topology.port_ends(port);
            format!("{from} to {to} (class {class})")
        })
        .collect();
    format!(
        "seen at {}: these links pause each other for good: {}; take paths without such a circle, or \
         raise `switch.pfc.xoff`",
        time(deadlock.seen_ns as f64),
        links.join(", ")
    )
}
