//! Days' three tables, with its columns. Each is written row by row.
//!
//! All functions fail if writing fails.

use std::io::{self, Write};

use crate::config::Config;
use crate::result::RunResult;

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// One row per flow: counts of its sender.
///
/// # Errors
/// If `out` fails.
pub fn write_sources_csv(out: &mut dyn Write, result: &RunResult) -> io::Result<()> {
    let head = "id,flow_id,start_time,end_time,sent_packets,packet_sizes,ack_bytes";
    writeln!(out, "{head}")?;
    for (i, f) in result.flows.iter().enumerate() {
        writeln!(
            out,
            "{i},{},{},{},{},{},{}",
            f.id,
            seconds(f.start_ns),
            seconds(f.acked_ns.or(f.delivered_ns).unwrap_or(f.last_ns)),
            f.packets_sent,
            f.bytes_sent,
            f.bytes_acked
        )?;
    }
    Ok(())
}

/// One row per flow: counts of its receiver. Delays in seconds; empty where packets were lost.
///
/// # Errors
/// If `out` fails.
pub fn write_sinks_csv(out: &mut dyn Write, config: &Config, result: &RunResult) -> io::Result<()> {
    let head = "id,flow_id,start_time,end_time,received_packets,received_sizes,\
                queueing_delay_mean,one_way_delay_mean";
    writeln!(out, "{head}")?;
    for (i, f) in result.flows.iter().enumerate() {
        let delay = f.one_way_delay_ns_mean;
        let ideal = result.path_ns.get(i).copied().unwrap_or(0) as f64;
        let show = |ns: Option<f64>| ns.map_or(String::new(), |ns| format!("{}", ns / 1e9));
        writeln!(
            out,
            "{i},{},{},{},{},{},{},{}",
            config.scenario.flows[i].id,
            seconds(f.first_ns),
            seconds(f.last_ns),
            f.packets_received,
            f.bytes_received,
            show(delay.map(|d| (d - ideal).max(0.0))),
            show(delay)
        )?;
    }
    Ok(())
}

/// One row per port in use.
///
/// # Errors
/// If `out` fails.
pub fn write_switches_csv(
    out: &mut dyn Write,
    config: &Config,
    result: &RunResult,
) -> io::Result<()> {
    let head = "from,to,packets,bytes,drops,marks,wait_max,waiting_bytes_max,pauses,paused";
    writeln!(out, "{head}")?;
    for p in &result.ports {
        let (from, to) = config.scenario.topology.port_ends(p.port);
        writeln!(
            out,
            "{from},{to},{},{},{},{},{},{},{},{}",
            p.packets,
            p.bytes,
            p.drops,
            p.marks,
            seconds(p.wait_ns_max),
            p.waiting_bytes_max,
            p.pauses,
            seconds(p.paused_ns)
        )?;
    }
    Ok(())
}

/// One row per sample and port: the backlog at that time, and counters of the interval that ends
/// there. Ports without traffic in an interval have no row. Without samples nothing is written.
///
/// # Errors
/// If `out` fails.
pub fn write_series_csv(
    out: &mut dyn Write,
    config: &Config,
    result: &RunResult,
) -> io::Result<()> {
    let Some(series) = &result.series else {
        return Ok(());
    };
    writeln!(out, "time,from,to,backlog_bytes,utilization,drops,marks")?;
    for (i, &time) in series.times_ns.iter().enumerate() {
        for (sample, &port) in series.at(i).iter().zip(&series.ports) {
            if *sample == crate::series::PortSample::default() {
                continue;
            }
            let (from, to) = config.scenario.topology.port_ends(port);
            writeln!(
                out,
                "{},{from},{to},{},{},{},{}",
                seconds(time),
                sample.backlog_bytes,
                sample.utilization,
                sample.drops,
                sample.marks
            )?;
        }
    }
    Ok(())
}
