//! The stable output for programs.

use std::io::{self, Write};

use serde_json::{Map, Value, json as object};

use super::{Cost, collectives, goodput, notes, size_classes, transport_name};
use crate::config::Config;
use crate::deadlock::Deadlock;
use crate::flow::FlowResult;
use crate::result::{PortResult, RunResult};
use crate::scenario::Flow;
use crate::series::Series;
use crate::topology::Topology;

/// Writes the run as one line of JSON: `totals`, `goodput`, `size_classes`, `collectives`, `flows`,
/// `ports`, `cost`. Times end in `_ns`; absent values are null. Flows and ports are written one at
/// a time, so that memory does not grow with them; `totals` omits them.
///
/// # Errors
/// If `out` fails.
pub fn write_json(
    out: &mut dyn Write,
    name: &str,
    config: &Config,
    result: &RunResult,
    cost: &Cost,
    totals: bool,
) -> io::Result<()> {
    let mut members = head(name, config, result, cost);
    if !totals {
        members.insert("flows".into(), Value::Null);
        members.insert("ports".into(), Value::Null);
    }
    let mut mark = b"{";
    for (key, value) in &members {
        out.write_all(mark)?;
        mark = b",";
        write!(out, "{}:", Value::from(key.as_str()))?;
        match key.as_str() {
            "flows" => {
                let flows = result.flows.iter().zip(&config.scenario.flows);
                let rows = flows
                    .zip(&result.ideal_ns)
                    .map(|((f, spec), &ideal_ns)| flow(f, spec, ideal_ns));
                write_array(out, rows)?;
            }
            "ports" => write_array(out, result.ports.iter().map(|p| port(config, p)))?,
            _ => serde_json::to_writer(&mut *out, value)?,
        }
    }
    out.write_all(b"}\n")
}

fn write_array(out: &mut dyn Write, rows: impl Iterator<Item = Value>) -> io::Result<()> {
    out.write_all(b"[")?;
    for (i, row) in rows.enumerate() {
        if i > 0 {
            out.write_all(b",")?;
        }
        serde_json::to_writer(&mut *out, &row)?;
    }
    out.write_all(b"]")
}

fn flow(f: &FlowResult, spec: &Flow, ideal_ns: u64) -> Value {
    object!({
        "id": f.id, "src": f.src, "dst": f.dst,
        "transport": transport_name(&spec.transport),
        "start_ns": f.started.then_some(f.start_ns), "delivered_ns": f.delivered_ns, "acked_ns": f.acked_ns,
        "ideal_ns": ideal_ns,
        "bytes": f.bytes, "bytes_acked": f.bytes_acked,
        "packets_sent": f.packets_sent, "bytes_sent": f.bytes_sent,
        "retransmitted": f.retransmitted, "acks": f.acks,
        "fast_retransmits": f.fast_retransmits, "timeouts": f.timeouts,
        "nacks": f.nacks, "notifications": f.notifications,
        "rate_bits_per_s": f.rate_bits_per_s,
        "cwnd": f.cwnd, "ssthresh": f.ssthresh,
        "bytes_in_order": f.bytes_in_order,
        "packets_received": f.packets_received, "bytes_received": f.bytes_received,
        "first_ns": f.first_ns, "last_ns": f.last_ns,
        "one_way_delay_ns_mean": f.one_way_delay_ns_mean,
    })
}

fn port(config: &Config, p: &PortResult) -> Value {
    let (from, to) = config.scenario.topology.port_ends(p.port);
    object!({
        "from": from.to_string(), "to": to.to_string(),
        "packets": p.packets, "bytes": p.bytes, "drops": p.drops, "marks": p.marks,
        "wait_ns_max": p.wait_ns_max, "waiting_bytes_max": p.waiting_bytes_max,
        "pauses": p.pauses, "paused_ns": p.paused_ns,
    })
}

fn deadlock(topology: &Topology, d: &Deadlock) -> Value {
    let cycle: Vec<Value> = d
        .cycle
        .iter()
        .map(|&(port, class)| {
            let (from, to) = topology.port_ends(port);
            object!({"from": from.to_string(), "to": to.to_string(), "class": class})
        })
        .collect();
    object!({"seen_ns": d.seen_ns, "cycle": cycle})
}

fn series(s: &Series) -> Value {
    let tier = |i: usize| -> Vec<Value> {
        s.tiers
            .iter()
            .map(|t| {
                object!({
                    "backlog_bytes_max": t[i].backlog_bytes_max,
                    "backlog_bytes": t[i].backlog_bytes,
                    "utilization_mean": t[i].utilization_mean,
                    "utilization_max": t[i].utilization_max,
                    "drops": t[i].drops, "marks": t[i].marks,
                })
            })
            .collect()
    };
    object!({
        "interval_ns": s.interval_ns, "times_ns": s.times_ns,
        "ports_kept_for_samples": s.kept(),
        "hosts": tier(0), "switches": tier(1), "cores": tier(2),
    })
}

/// All members but flows and ports.
fn head(name: &str, config: &Config, result: &RunResult, cost: &Cost) -> Map<String, Value> {
    let t = &result.totals;
    let scenario = &config.scenario;
    let classes: Vec<Value> = size_classes(config, result)
        .iter()
        .map(|c| {
            object!({
                "name": c.name, "flows": c.flows, "finished": c.finished,
                "fct_ns": {"mean": c.fct_ns[0], "p50": c.fct_ns[1], "p99": c.fct_ns[2], "max": c.fct_ns[3]},
                "slowdown": {"mean": c.slowdown[0], "p50": c.slowdown[1], "p99": c.slowdown[2], "max": c.slowdown[3]},
            })
        })
        .collect();
    let collectives: Vec<Value> = collectives(config, result)
        .iter()
        .map(|c| {
            object!({
                "index": c.index, "flows": c.flows, "hosts": c.hosts,
                "time_ns": c.time_ns, "bus_bits_per_s": c.bus_bits_per_s,
            })
        })
        .collect();
    let goodput = goodput(config, result).map(|g| {
        object!({
            "flows": g.flows, "flow_bits_per_s_mean": g.flow_mean, "flow_bits_per_s_p50": g.flow_p50,
            "flow_bits_per_s_min": g.flow_min, "bits_per_s": g.all, "active_ns": g.active_ns,
        })
    });
    let switches: Vec<Value> = result
        .memories
        .iter()
        .map(|m| {
            object!({
                "switch": m.node, "bytes_max": m.bytes_max,
                "headroom_bytes_max": m.headroom_bytes_max, "drops": m.drops, "pauses": m.pauses,
            })
        })
        .collect();
    let head = object!({
        "name": name,
        "dialect": config.dialect.word(),
        "seed": scenario.seed,
        "digest": format!("{:016x}", result.digest),
        "totals": {
            "flows_not_started": result.flows.iter().filter(|f| !f.started).count(),
            "events": t.events, "packet_hops": t.packet_hops, "sent": t.sent,
            "delivered": t.delivered, "in_flight": result.in_flight(),
            "data_drops": t.data_drops, "control_drops": t.control_drops,
            "fault_drops": t.fault_drops,
            "marks": t.marks, "trims": t.trims, "returns": t.returns, "pauses": t.pauses,
            "pause_refreshes": t.pause_refreshes,
            "last_event_ns": t.last_event_ns,
        },
        "goodput": goodput,
        "size_classes": classes,
        "collectives": collectives,
        "switches": switches,
        "deadlock": result.deadlock.as_ref().map(|d| deadlock(&scenario.topology, d)),
        "series": result.series.as_ref().map(series),
        "notes": notes(config, result),
        "cost": {
            "setup_s": cost.setup_s, "setup_cpu_s": cost.setup_cpu_s,
            "run_s": cost.run_s, "run_cpu_s": cost.run_cpu_s,
            "rss_bytes_max": cost.rss_bytes_max, "threads": cost.threads,
            "shards": cost.shards, "windows": cost.windows,
        },
    });
    match head {
        Value::Object(members) => members,
        _ => unreachable!("an object was written above"),
    }
}
