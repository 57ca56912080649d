//! A run as a trace for Perfetto (<https://ui.perfetto.dev>) and Chrome: one process per host with
//! a track for each flow that it sends, one for collectives, and counters of the tiers.
//!
//! Format: the JSON array form of "Trace Event Format", Google, 2016.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::{Value, json as object};

use super::{collectives, transport_name};
use crate::config::Config;
use crate::result::RunResult;
use crate::series::{Series, TierSample};

/// Process numbers of rows other than hosts; viewers hide number 0.
const NETWORK: u32 = 1;
const COLLECTIVES: u32 = 2;
const HOSTS: u32 = 3;

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// The run as trace events.
pub fn perfetto(config: &Config, result: &RunResult) -> String {
    let mut out = String::from("[\n");
    let mut add = |event: Value| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{event},");
    };
    add(process(NETWORK, "network"));
    add_flows(config, result, &mut add);
    add_collectives(config, result, &mut add);
    if let Some(series) = &result.series {
        add_series(series, &mut add);
    }
    // No comma after the last.
    out.truncate(out.trim_end().trim_end_matches(',').len());
    out.push_str("\n]\n");
    out
}

/// The name of a process of the trace.
fn process(pid: u32, name: &str) -> Value {
    object!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
}

fn add_flows(config: &Config, result: &RunResult, add: &mut impl FnMut(Value)) {
    let mut named = BTreeSet::new();
    for (f, spec) in result.flows.iter().zip(&config.scenario.flows) {
        let end = f
            .acked_ns
            .or(f.delivered_ns)
            .unwrap_or(result.totals.last_event_ns);
        if !f.started || end < f.start_ns {
            continue;
        }
        if named.insert(f.src) {
            add(process(HOSTS + f.src, &format!("host {}", f.src)));
        }
        let word = transport_name(&spec.transport);
        add(object!({
            "ph": "X", "name": format!("{word} {} to host {}", f.id, f.dst), "cat": "flow",
            "pid": HOSTS + f.src, "tid": f.id, "ts": us(f.start_ns), "dur": us(end - f.start_ns),
            "args": {
                "bytes": f.bytes, "delivered_ns": f.delivered_ns, "packets": f.packets_sent,
                "again": f.retransmitted, "timeouts": f.timeouts,
            },
        }));
    }
}

fn add_collectives(config: &Config, result: &RunResult, add: &mut impl FnMut(Value)) {
    let mut any = false;
    for c in collectives(config, result) {
        let flows = config.scenario.flows.iter().zip(&result.flows);
        let start = flows
            .filter(|(spec, _)| spec.collective == Some(c.index))
            .map(|(_, f)| f.start_ns)
            .min();
        if let (Some(start), Some(time)) = (start, c.time_ns) {
            any = true;
            add(object!({
                "ph": "X", "name": format!("collective {}", c.index), "cat": "collective",
                "pid": COLLECTIVES, "tid": c.index, "ts": us(start), "dur": us(time),
                "args": {"hosts": c.hosts, "flows": c.flows, "bus_bits_per_s": c.bus_bits_per_s},
            }));
        }
    }
    if any {
        add(process(COLLECTIVES, "collectives"));
    }
}

/// Counters of each tier of ports.
fn add_series(series: &Series, add: &mut impl FnMut(Value)) {
    let tiers = ["hosts", "switches", "cores"];
    for (&now, sample) in series.times_ns.iter().zip(&series.tiers) {
        let used = |value: fn(&TierSample) -> f64| {
            let mut args = serde_json::Map::new();
            for (i, tier) in tiers
                .iter()
                .enumerate()
                .filter(|(i, _)| sample[*i].ports > 0)
            {
                args.insert((*tier).to_owned(), object!(value(&sample[i])));
            }
            args
        };
        // A sample covers the interval that ends with it.
        let from = now.saturating_sub(series.interval_ns);
        for (name, args) in [
            ("utilization", used(|s| s.utilization_mean)),
            ("longest queue, bytes", used(|s| s.backlog_bytes_max as f64)),
            ("drops", used(|s| s.drops as f64)),
            ("marks", used(|s| s.marks as f64)),
        ] {
            add(object!({
                "ph": "C", "name": name, "pid": NETWORK, "ts": us(from), "args": args,
            }));
        }
    }
}
