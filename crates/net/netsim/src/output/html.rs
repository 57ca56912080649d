//! A report in one file: tables and plots, without external resources.

use slipstream_report::html::chart::{Axis, Chart, Line};
use slipstream_report::html::{Page, Tile, escape};
use slipstream_report::latency::TOO_FEW;

use super::text::deadlock_text;
use super::text::{counted, grouped, rate, time};
use super::{Cost, SizeClass, collectives, goodput, notes, size_classes, transport_name};
use crate::config::Config;
use crate::flow::FlowResult;
use crate::result::RunResult;
use crate::topology::End;

/// Rows in the table of the busiest ports.
const PORTS_SHOWN: usize = 20;

/// Points drawn per line: about one per pixel.
const POINTS_MAX: usize = 700;

/// The run as an HTML page.
pub fn html(name: &str, config: &Config, result: &RunResult, cost: &Cost) -> String {
    let (t, scenario) = (&result.totals, &config.scenario);
    let mut page = Page::new(
        name,
        &format!(
            "{}, {}; simulated {}; seed {}, digest {:016x}; {} in {:.3} s of CPU",
            counted(scenario.topology.node_count().into(), "switch"),
            counted(scenario.topology.host_count().into(), "host"),
            time(t.last_event_ns as f64),
            scenario.seed,
            result.digest,
            counted(t.events, "event"),
            cost.run_cpu_s
        ),
    );
    if let Some(deadlock) = &result.deadlock {
        page.warning(&format!(
            "PFC deadlock: {}",
            deadlock_text(config, deadlock)
        ));
    }
    page.tiles(&tiles(config, result));
    let charts: Vec<Chart> = std::iter::once(completion(config, result))
        .chain(series(result))
        .filter(|chart| chart.lines.iter().any(|line| !line.points.is_empty()))
        .collect();
    if !charts.is_empty() {
        page.section("Plots", "");
        page.charts(charts.iter().map(Chart::render));
    }
    if result.series.is_none() {
        page.raw(
            "<p class=\"says\">For queues and links over time set <code>report_interval</code> in \
             the file, in s.</p>",
        );
    }
    classes(&mut page, config, result);
    ports(&mut page, config, result);
    for note in &notes(config, result) {
        page.raw(&format!("<p class=\"says\">{}</p>", escape(note)));
    }
    page.finish()
}

fn table(page: &mut Page, head: &[&str], rows: Vec<Vec<String>>) {
    let rows: Vec<_> = rows.into_iter().map(|row| (row, false)).collect();
    page.table(head, 1, &rows);
}

fn tiles(config: &Config, result: &RunResult) -> Vec<Tile> {
    let t = &result.totals;
    let sum = |f: fn(&FlowResult) -> u64| -> u64 { result.flows.iter().map(f).sum() };
    let done = result.flows.iter().filter(|f| f.delivered_ns.is_some());
    let done = done.count() as u64;
    let mut tiles = vec![Tile::new(
        "Flows delivered completely",
        grouped(done),
        format!("of {}", grouped(result.flows.len() as u64)),
    )];
    if let Some(g) = goodput(config, result) {
        tiles.push(Tile::new(
            "Goodput per flow",
            rate(g.flow_p50),
            format!(
                "p50; mean {}, least {}",
                rate(g.flow_mean),
                rate(g.flow_min)
            ),
        ));
        tiles.push(Tile::new(
            "Total goodput",
            rate(g.all),
            format!("over the {} with an active flow", time(g.active_ns as f64)),
        ));
    }
    let plain = |name: &str, value: u64, detail: String| Tile::new(name, grouped(value), detail);
    tiles.push(plain(
        "Data packets",
        sum(|f| f.packets_sent),
        format!("{} retransmitted", grouped(sum(|f| f.retransmitted))),
    ));
    tiles.push(plain(
        "Drops",
        t.data_drops + t.control_drops,
        format!(
            "{} data, {} control; {} by faults",
            grouped(t.data_drops),
            grouped(t.control_drops),
            grouped(t.fault_drops)
        ),
    ));
    tiles.push(plain(
        "Timeouts",
        sum(|f| u64::from(f.timeouts)),
        counted(sum(|f| u64::from(f.fast_retransmits)), "fast retransmit"),
    ));
    if t.marks + t.trims + t.pauses > 0 {
        tiles.push(plain(
            "Marks",
            t.marks,
            format!(
                "{}, {}",
                counted(t.trims, "trim"),
                counted(t.pauses, "PFC pause")
            ),
        ));
    }
    tiles
}

/// Reduces the points to as many as are visible: the maximum of each stretch, so that peaks stay.
fn thin(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, Option<f64>)> {
    let stretch = points.len().div_ceil(POINTS_MAX).max(1);
    points
        .chunks(stretch)
        .filter_map(|c| c.iter().max_by(|a, b| a.1.total_cmp(&b.1)))
        .map(|&(x, y)| (x, Some(y)))
}

/// The unit for simulated times up to `most_ns`, and its length in ns.
fn unit_of(most_ns: u64) -> (&'static str, f64) {
    match most_ns {
        0..=9_999_999 => ("us", 1e3),
        10_000_000..=9_999_999_999 => ("ms", 1e6),
        _ => ("s", 1e9),
    }
}

fn completion(config: &Config, result: &RunResult) -> Chart {
    let mut by_kind: std::collections::BTreeMap<&str, Vec<f64>> = std::collections::BTreeMap::new();
    for (f, spec) in result.flows.iter().zip(&config.scenario.flows) {
        if let Some(end) = f.delivered_ns {
            let fct_us = (end - f.start_ns) as f64 / 1e3;
            let times = by_kind.entry(transport_name(&spec.transport)).or_default();
            times.push(fct_us);
        }
    }
    Chart {
        title: "Completion times: share of flows that took no longer".into(),
        x: Axis::new("completion time", "us").log(),
        y: Axis::new("share", "%").up_to(100.0),
        lines: by_kind
            .into_iter()
            .map(|(name, mut times)| {
                times.sort_unstable_by(f64::total_cmp);
                let n = times.len() as f64;
                let steps = times.iter().enumerate();
                let points: Vec<_> = steps
                    .map(|(i, &t)| (t, 100.0 * (i + 1) as f64 / n))
                    .collect();
                Line::new(name, thin(&points))
            })
            .collect(),
        ..Chart::default()
    }
}

fn series(result: &RunResult) -> Vec<Chart> {
    let Some(series) = &result.series else {
        return Vec::new();
    };
    let (unit, unit_ns) = unit_of(series.times_ns.last().copied().unwrap_or(0));
    let tiers = ["hosts' links", "switch links", "core links"];
    let lines = |value: &dyn Fn(&crate::series::TierSample) -> f64| -> Vec<Line> {
        (0..3)
            .filter(|&i| series.tiers.iter().any(|t| t[i].ports > 0))
            .map(|i| {
                let samples = series.times_ns.iter().zip(&series.tiers);
                let points: Vec<_> = samples
                    .map(|(&t, s)| (t as f64 / unit_ns, value(&s[i])))
                    .collect();
                Line {
                    color: Some(i),
                    ..Line::new(tiers[i], thin(&points))
                }
            })
            .collect()
    };
    let chart = |title: &str, y: Axis, lines| Chart {
        title: title.into(),
        x: Axis::new("simulated time", unit),
        y,
        lines,
        ..Chart::default()
    };
    let share = || Axis::new("utilization", "%").up_to(100.0);
    vec![
        chart(
            "Utilization, mean of the ports in use",
            share(),
            lines(&|s| 100.0 * s.utilization_mean),
        ),
        chart(
            "Utilization of the busiest port",
            share(),
            lines(&|s| 100.0 * f64::from(s.utilization_max)),
        ),
        chart(
            "Longest queue",
            Axis::new("waiting", "bytes"),
            lines(&|s| s.backlog_bytes_max as f64),
        ),
        chart(
            "Drops per interval",
            Axis::new("drops", "packets"),
            lines(&|s| s.drops as f64),
        ),
        chart(
            "Marks and trims per interval",
            Axis::new("marks and trims", "packets"),
            lines(&|s| s.marks as f64),
        ),
    ]
}

fn classes(page: &mut Page, config: &Config, result: &RunResult) {
    let classes = size_classes(config, result);
    let rows: Vec<Vec<String>> = classes
        .iter()
        .map(|c| {
            let mut row = vec![
                c.name.to_owned(),
                grouped(c.flows as u64),
                grouped(c.finished as u64),
            ];
            row.extend(c.four(&c.fct_ns, time));
            row.extend(c.four(&c.slowdown, |s| format!("{s:.2}")));
            row
        })
        .collect();
    if !rows.is_empty() {
        page.section("Completion time and slowdown by size", "");
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
        table(page, &head, rows);
        if classes.iter().any(SizeClass::omits_p99) {
            page.raw(&format!("<p class=\"says\">{}</p>", escape(TOO_FEW)));
        }
    }
    let rows: Vec<Vec<String>> = collectives(config, result)
        .iter()
        .map(|c| {
            let bus = c.bus_bits_per_s.map(rate);
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
        page.section("Collectives", "");
        let head = ["", "hosts", "flows", "time", "busiest host"];
        table(page, &head, rows);
    }
}

fn ports(page: &mut Page, config: &Config, result: &RunResult) {
    let mut busiest: Vec<&crate::result::PortResult> = result.ports.iter().collect();
    busiest.sort_by_key(|p| (std::cmp::Reverse(p.bytes), p.port));
    let rows: Vec<Vec<String>> = busiest
        .iter()
        .take(PORTS_SHOWN)
        .map(|p| {
            let topology = &config.scenario.topology;
            let (from, to) = topology.port_ends(p.port);
            vec![
                format!("{} to {}", topology.name(from), topology.name(to)),
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
    let title = format!(
        "Busiest {} of {}",
        rows.len(),
        counted(result.ports.len() as u64, "port")
    );
    page.section(&title, "");
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
    table(page, &head, rows);
    if !result.memories.is_empty() {
        let rows: Vec<Vec<String>> = result
            .memories
            .iter()
            .map(|m| {
                let mut row = vec![config.scenario.topology.name(End::Node(m.node))];
                let numbers = [m.bytes_max, m.headroom_bytes_max, m.drops, m.pauses];
                row.extend(numbers.map(grouped));
                row
            })
            .collect();
        page.section("Switch memory", "");
        let head = [
            "switch",
            "most bytes",
            "most bytes in a headroom",
            "drops",
            "pauses sent",
        ];
        table(page, &head, rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_survive_thinning() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|i| (f64::from(i), 1.0)).collect();
        points[54_321].1 = 9.0;
        let kept: Vec<_> = thin(&points).collect();
        assert!(kept.len() <= POINTS_MAX);
        assert!(kept.iter().any(|p| p.1 == Some(9.0)));
    }
}
