//! A report that is one file: tables and plots, no script, nothing loaded from elsewhere.

use std::fmt::Write as _;

use super::plot::{Line, Plot, escape, short};
use super::text::{deadlock_text, grouped, time};
use super::{Cost, collectives, size_classes, transport_name};
use crate::config::Config;
use crate::result::RunResult;

/// Ports in the table of the busiest.
const PORTS_SHOWN: usize = 20;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1340px;margin:2rem auto;\
padding:0 1rem;color:#1c2733;background:#fff}h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;\
margin:2rem 0 .5rem}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));\
gap:1rem}svg{width:100%;height:auto;border:1px solid #dde3ea;border-radius:6px;background:#fff}\
polyline{fill:none;stroke-width:1.8}.grid{stroke:#e6eaef}.title{font-weight:600;font-size:14px}\
.tick{font-size:11px;fill:#4a5764}.axis{font-size:12px;fill:#1c2733}table{border-collapse:collapse}\
td,th{padding:.15rem .8rem .15rem 0;text-align:right;font-variant-numeric:tabular-nums;\
border-bottom:1px solid #eef1f4}th{font-weight:600}td:first-child,th:first-child{text-align:left}\
.bad{background:#fde8e4;border-left:4px solid #d55e00;padding:.5rem 1rem}.sub{color:#4a5764}";

/// The run as an HTML page.
pub fn html(name: &str, config: &Config, result: &RunResult, cost: &Cost) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title>\
         <style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n",
        escape(name)
    );
    head(&mut out, config, result, cost);
    let mut plots = vec![completion(config, result)];
    plots.extend(series(result));
    let plots: String = plots.iter().map(Plot::svg).collect::<Vec<_>>().concat();
    if !plots.is_empty() {
        let _ = write!(out, "<h2>Plots</h2><div class=\"plots\">\n{plots}</div>\n");
    }
    if result.series.is_none() {
        out.push_str(
            "<p class=\"sub\">For queues and links over time set <code>report_interval</code> in \
             the file, in s.</p>\n",
        );
    }
    classes(&mut out, config, result);
    ports(&mut out, config, result);
    for note in &config.notes {
        let _ = writeln!(out, "<p class=\"sub\">{}</p>", escape(note));
    }
    out.push_str("</body></html>\n");
    out
}

fn table(out: &mut String, head: &[&str], rows: &[Vec<String>]) {
    let cells = |tag: &str, cells: &[String]| -> String {
        let cells = cells
            .iter()
            .map(|c| format!("<{tag}>{}</{tag}>", escape(c)));
        cells.collect::<Vec<_>>().concat()
    };
    let head: Vec<String> = head.iter().map(|&h| h.to_owned()).collect();
    let _ = write!(out, "<table><tr>{}</tr>", cells("th", &head));
    for row in rows {
        let _ = write!(out, "<tr>{}</tr>", cells("td", row));
    }
    out.push_str("</table>\n");
}

fn head(out: &mut String, config: &Config, result: &RunResult, cost: &Cost) {
    let (t, scenario) = (&result.totals, &config.scenario);
    let _ = writeln!(
        out,
        "<p class=\"sub\">{} switches, {} hosts; simulated {}; seed {}, digest {:016x}; {} events in \
         {:.3} s of CPU</p>",
        grouped(u64::from(scenario.topology.node_count())),
        grouped(u64::from(scenario.topology.host_count())),
        time(t.last_event_ns as f64),
        scenario.seed,
        result.digest,
        grouped(t.events),
        cost.run_cpu_s
    );
    if let Some(deadlock) = &result.deadlock {
        let text = deadlock_text(config, deadlock);
        let _ = writeln!(out, "<p class=\"bad\">PFC deadlock: {}</p>", escape(&text));
    }
    let sum =
        |f: fn(&crate::result::FlowResult) -> u64| -> u64 { result.flows.iter().map(f).sum() };
    let done = result.flows.iter().filter(|f| f.delivered_ns.is_some());
    let rows = [
        ("flows", result.flows.len() as u64),
        ("delivered in full", done.count() as u64),
        ("data packets", sum(|f| f.packets_sent)),
        ("sent again", sum(|f| f.retransmitted)),
        ("data drops", t.data_drops),
        ("control drops", t.control_drops),
        ("drops by faults", t.fault_drops),
        ("marks", t.marks),
        ("trims", t.trims),
        ("PFC pauses", t.pauses),
        ("timeouts", sum(|f| u64::from(f.timeouts))),
    ];
    let rows = rows.map(|(name, n)| vec![name.to_owned(), grouped(n)]);
    table(out, &["", ""], &rows);
}

fn completion<'a>(config: &Config, result: &RunResult) -> Plot<'a> {
    let mut by_kind: std::collections::BTreeMap<&str, Vec<f64>> = std::collections::BTreeMap::new();
    for (f, spec) in result.flows.iter().zip(&config.scenario.flows) {
        if let Some(end) = f.delivered_ns {
            let fct_us = (end - f.start_ns) as f64 / 1e3;
            let times = by_kind.entry(transport_name(&spec.transport)).or_default();
            times.push(fct_us);
        }
    }
    Plot {
        title: "Completion times",
        x: "completion time, us",
        y: "share of flows",
        log: true,
        lines: by_kind
            .into_iter()
            .map(|(name, mut times)| {
                times.sort_unstable_by(f64::total_cmp);
                let n = times.len() as f64;
                let points = times.iter().enumerate();
                Line {
                    name: name.to_owned(),
                    points: points.map(|(i, &t)| (t, (i + 1) as f64 / n)).collect(),
                }
            })
            .collect(),
    }
}

fn series<'a>(result: &RunResult) -> Vec<Plot<'a>> {
    let Some(series) = &result.series else {
        return Vec::new();
    };
    let tiers = ["hosts' links", "switch links", "core links"];
    let lines = |value: &dyn Fn(&crate::series::TierSample) -> f64| -> Vec<Line> {
        (0..3)
            .filter(|&i| series.tiers.iter().any(|t| t[i].ports > 0))
            .map(|i| {
                let points = series.times_ns.iter().zip(&series.tiers);
                Line {
                    name: tiers[i].to_owned(),
                    points: points
                        .map(|(&t, s)| (t as f64 / 1e3, value(&s[i])))
                        .collect(),
                }
            })
            .collect()
    };
    let plot = |title, y, lines| Plot {
        title,
        x: "simulated time, us",
        y,
        log: false,
        lines,
    };
    vec![
        plot(
            "Utilization, mean of the ports in use",
            "share",
            lines(&|s| s.utilization_mean),
        ),
        plot(
            "Utilization of the busiest port",
            "share",
            lines(&|s| f64::from(s.utilization_max)),
        ),
        plot(
            "Longest queue",
            "bytes",
            lines(&|s| s.backlog_bytes_max as f64),
        ),
        plot("Drops an interval", "packets", lines(&|s| s.drops as f64)),
        plot(
            "Marks and trims an interval",
            "packets",
            lines(&|s| s.marks as f64),
        ),
    ]
}

fn classes(out: &mut String, config: &Config, result: &RunResult) {
    let rows: Vec<Vec<String>> = size_classes(config, result)
        .iter()
        .map(|c| {
            let mut row = vec![
                c.name.to_owned(),
                grouped(c.flows as u64),
                grouped(c.finished as u64),
            ];
            row.extend(c.fct_ns.iter().map(|&ns| time(ns)));
            row.extend(c.slowdown.iter().map(|s| format!("{s:.2}")));
            row
        })
        .collect();
    if !rows.is_empty() {
        out.push_str("<h2>Completion time and slowdown by size</h2>\n");
        let head = [
            "size",
            "flows",
            "finished",
            "mean",
            "p50",
            "p99",
            "max",
            "slowdown mean",
            "p50",
            "p99",
            "max",
        ];
        table(out, &head, &rows);
    }
    let rows: Vec<Vec<String>> = collectives(config, result)
        .iter()
        .map(|c| {
            let bus = c.bus_bits_per_s.map(|b| format!("{}b/s", short(b)));
            vec![
                format!("#{}", c.index),
                c.hosts.to_string(),
                c.flows.to_string(),
                c.time_ns
                    .map_or("not finished".into(), |ns| time(ns as f64)),
                bus.unwrap_or_default(),
            ]
        })
        .collect();
    if !rows.is_empty() {
        out.push_str("<h2>Collectives</h2>\n");
        table(out, &["", "hosts", "flows", "time", "busiest host"], &rows);
    }
}

fn ports(out: &mut String, config: &Config, result: &RunResult) {
    let mut busiest: Vec<&crate::result::PortResult> = result.ports.iter().collect();
    busiest.sort_by_key(|p| (std::cmp::Reverse(p.bytes), p.port));
    let rows: Vec<Vec<String>> = busiest
        .iter()
        .take(PORTS_SHOWN)
        .map(|p| {
            let (from, to) = config.scenario.topology.port_ends(p.port);
            vec![
                format!("{from} to {to}"),
                grouped(p.packets),
                grouped(p.bytes),
                grouped(p.drops),
                grouped(p.marks),
                time(p.wait_ns_max as f64),
                grouped(p.pauses),
                time(p.paused_ns as f64),
            ]
        })
        .collect();
    let _ = writeln!(
        out,
        "<h2>Busiest {} of {} ports</h2>",
        rows.len(),
        grouped(result.ports.len() as u64)
    );
    let head = [
        "port",
        "packets",
        "bytes",
        "drops",
        "marks",
        "longest wait",
        "pauses",
        "paused",
    ];
    table(out, &head, &rows);
    if !result.memories.is_empty() {
        let rows: Vec<Vec<String>> = result
            .memories
            .iter()
            .map(|m| {
                let mut row = vec![format!("n{}", m.node)];
                let numbers = [m.bytes_max, m.headroom_bytes_max, m.drops, m.pauses];
                row.extend(numbers.map(grouped));
                row
            })
            .collect();
        out.push_str("<h2>Switch memory</h2>\n");
        let head = [
            "switch",
            "most bytes",
            "most in a headroom",
            "drops",
            "pauses sent",
        ];
        table(out, &head, &rows);
    }
}
