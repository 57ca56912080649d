//! Notes about settings that are accepted, but make a result meaningless.

use std::fmt::Write as _;

use crate::aqm::Aqm;
use crate::failure::Failure;
use crate::output::time;
use crate::result::{FlowResult, RunResult};
use crate::route::Routing;
use crate::scenario::{Congestion, Flow, Paths, Scenario, Transport};

/// Notes that follow from the scenario alone.
pub(crate) fn on_scenario(scenario: &Scenario) -> Vec<String> {
    let late = |at_ns: u64, what: &str| {
        (at_ns > scenario.duration_ns).then(|| {
            format!(
                "{what} at {} is after the end of the run, `duration` = {}",
                time(at_ns as f64),
                time(scenario.duration_ns as f64)
            )
        })
    };
    let failures = scenario.failures.iter();
    let failures = failures.filter_map(|f: &Failure| late(f.at_ns, "the failure"));
    let samples = scenario
        .sample_ns
        .and_then(|at| late(at, "the first sample"));
    failures
        .chain(samples)
        .chain(ramp_below_a_packet(scenario))
        .chain(crate::transport::ndp::without_trimming(scenario))
        .collect()
}

/// Kmin and Kmax are bytes; numbers of packets would mark nearly everything.
fn ramp_below_a_packet(scenario: &Scenario) -> Option<String> {
    let Aqm::EcnRamp { max_bytes, .. } = scenario.queue.aqm else {
        return None;
    };
    let packet = scenario.flows.iter().map(|f| f.packet_bytes).max()?;
    (max_bytes < u64::from(packet)).then(|| {
        format!(
            "the ramp ends at {max_bytes} bytes, below one packet of {packet}, so every packet of an \
             ECN-capable flow is marked; its thresholds are bytes, not packets"
        )
    })
}

/// Notes that follow from a run.
pub(crate) fn on_result(scenario: &Scenario, result: &RunResult) -> Vec<String> {
    [
        sprayed(scenario, result),
        unmarked(scenario, result),
        narrow_windows(scenario, result),
        cut_off(scenario, result),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn pairs<'a>(
    scenario: &'a Scenario,
    result: &'a RunResult,
) -> impl Iterator<Item = (&'a Flow, &'a FlowResult)> {
    scenario.flows.iter().zip(&result.flows)
}

/// Go-back-N and the counting of duplicate ACKs treat reordered packets as lost.
fn sprayed(scenario: &Scenario, result: &RunResult) -> Option<String> {
    let (mut flows, mut sent, mut again, mut pairs_too) = (0u64, 0, 0, false);
    for (spec, flow) in pairs(scenario, result) {
        let in_order = matches!(spec.transport, Transport::Roce(_) | Transport::Tcp(_));
        if in_order && matches!(spec.paths, Paths::By(Routing::Spray)) && flow.retransmitted > 0 {
            flows += 1;
            sent += flow.packets_sent;
            again += flow.retransmitted;
            pairs_too |= matches!(spec.transport, Transport::Roce(_));
        }
    }
    (again > result.totals.data_drops && again * 10 > sent).then(|| {
        format!(
            "{flows} sprayed flows sent {:.0} % of their packets again, most of which were not lost but \
             had overtaken each other; {}",
            again as f64 * 100.0 / sent as f64,
            if pairs_too {
                "go-back-N needs packets in order: use routing = \"ECMP\", or NDP"
            } else {
                "TCP needs packets in order: use routing = \"ECMP\", or NDP"
            }
        )
    })
}

/// Congestion controls that need marks, in a congested network without marks.
fn unmarked(scenario: &Scenario, result: &RunResult) -> Option<String> {
    let queue = &scenario.queue;
    let marks = match queue.aqm {
        Aqm::TailDrop => false,
        Aqm::Red { ecn, .. } => ecn,
        Aqm::EcnThreshold { packets } => {
            queue.capacity_packets == 0 || packets < queue.capacity_packets
        }
        Aqm::EcnLimit { .. } | Aqm::EcnRamp { .. } => true,
    };
    let t = &result.totals;
    if marks || t.data_drops + t.control_drops + t.trims <= t.fault_drops && t.pauses == 0 {
        return None;
    }
    let count = |of: fn(&Transport) -> bool| {
        let flows = scenario.flows.iter();
        flows.filter(|flow| of(&flow.transport)).count()
    };
    let dcqcn = count(|t| matches!(t, Transport::Roce(roce) if roce.dcqcn.is_some()));
    let dctcp = count(
        |t| matches!(t, Transport::Tcp(tcp) if matches!(tcp.congestion, Congestion::Dctcp { .. })),
    );
    let (flows, name) = if dcqcn > 0 {
        (dcqcn, "DCQCN")
    } else {
        (dctcp, "DCTCP")
    };
    (flows > 0).then(|| {
        format!(
            "{flows} flows of {name} cross ports that never mark, so only losses and pauses slow them \
             down; set `switch.drop` to \"ECN_RAMP\" or \"ECN_THRESHOLD\", below the capacity of a queue"
        )
    })
}

/// NDP windows that end before the first ACK returns.
fn narrow_windows(scenario: &Scenario, result: &RunResult) -> Option<String> {
    let rate = scenario
        .links
        .host
        .unwrap_or(scenario.links.edge)
        .bits_per_s;
    let (mut flows, mut window, mut product) = (0, 0, 0);
    for (i, flow) in scenario.flows.iter().enumerate() {
        let Transport::Ndp(ndp) = flow.transport else {
            continue;
        };
        let packet = u64::from(flow.packet_bytes + flow.header_bytes);
        // At least the time that an answer needs: links delay both alike.
        let round_trip_ns = 2 * u128::from(result.path_ns[i]);
        let in_flight = round_trip_ns * u128::from(rate) / 8_000_000_000 / u128::from(packet);
        let packets = flow.demand.bytes().unwrap_or(0) / u64::from(flow.packet_bytes);
        if u128::from(ndp.window_packets) * 10 < in_flight * 9
            && packets > 2 * u64::from(ndp.window_packets)
        {
            flows += 1;
            window = ndp.window_packets;
            product = product.max(in_flight);
        }
    }
    (flows > 0).then(|| {
        format!(
            "{flows} NDP flows have a window of {window} packets, but their paths hold up to {product}, \
             so they cannot fill a link; raise `traffic.ndp.window`"
        )
    })
}

/// Flows of a known size that the end of the run cut off, and how many of them wait for a timer.
fn cut_off(scenario: &Scenario, result: &RunResult) -> Option<String> {
    if result.deadlock.is_some() {
        return None;
    }
    let end_ns = scenario.duration_ns;
    let (mut cut, mut waiting, mut first) = (0usize, 0, u64::MAX);
    let (mut sized, mut names) = (0, Vec::new());
    for (i, (spec, flow)) in pairs(scenario, result).enumerate() {
        if spec.demand.bytes().is_none() || !flow.started {
            continue;
        }
        sized += 1;
        if flow.delivered_ns.is_some() {
            continue;
        }
        cut += 1;
        if names.len() < 3 {
            names.push(flow.id.to_string());
        }
        // Nothing has arrived for many round trips, so nothing is under way.
        let quiet_ns = end_ns.saturating_sub(flow.last_ns.max(flow.start_ns));
        let silent = quiet_ns > (20 * result.path_ns[i]).max(1_000_000);
        if let Some(timer_ns) = flow.timer_ns.filter(|&at| at > end_ns && silent) {
            waiting += 1;
            first = first.min(timer_ns);
        }
    }
    if cut == 0 {
        return None;
    }
    let more = if cut > names.len() { ", …" } else { "" };
    let mut text = format!(
        "{cut} of {sized} flows ({}{more}) had not finished at the end of the run, `duration` = {}",
        names.join(", "),
        time(end_ns as f64)
    );
    if waiting > 0 {
        let _ = write!(
            text,
            "; {waiting} of them wait for a retransmission timer beyond it, the first at {}: raise \
             `duration`, or lower `rto_min` (TCP) or `rto`",
            time(first as f64)
        );
    }
    Some(text)
}
