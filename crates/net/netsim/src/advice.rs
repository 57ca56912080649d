//! Notes about settings that are accepted, but make a result meaningless.

use std::fmt::Write as _;

use crate::aqm::Aqm;
use crate::failure::Failure;
use crate::flow::FlowResult;
use crate::output::time;
use crate::result::RunResult;
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
        .chain(marks_beyond_the_queue(scenario))
        .chain(pause_beyond_the_queue(scenario))
        .chain(long_timers(scenario))
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

/// Bytes that the queue of a port holds; `None` if that is not set.
fn queue_bytes(scenario: &Scenario) -> Option<u64> {
    let queue = &scenario.queue;
    let flows = scenario.flows.iter();
    let packet = flows
        .map(|f| u64::from(f.packet_bytes + f.header_bytes))
        .max()?;
    let of_packets =
        (queue.capacity_packets > 0).then(|| packet * u64::from(queue.capacity_packets));
    let of_bytes = (queue.capacity_bytes > 0).then_some(queue.capacity_bytes);
    let least = [of_packets, of_bytes].into_iter().flatten().min();
    least.filter(|_| queue.trim.is_none())
}

/// A queue that is full before it marks.
fn marks_beyond_the_queue(scenario: &Scenario) -> Option<String> {
    let holds = queue_bytes(scenario)?;
    let packets = scenario.queue.capacity_packets;
    match scenario.queue.aqm {
        Aqm::EcnRamp { min_bytes, .. } if min_bytes >= holds => Some(format!(
            "the ramp begins at {min_bytes} bytes, but a queue holds {holds}, so no packet is ever marked; lower \
             `kmin` of `switch.ecn_ramp`, in bytes, or raise `switch.capacity`"
        )),
        Aqm::EcnThreshold { packets: mark } | Aqm::EcnLimit { packets: mark }
            if packets > 0 && mark >= packets =>
        {
            Some(format!(
                "packets are marked when more than {mark} wait, but a queue holds {packets}, so none is ever marked; \
                 lower the threshold, in packets, or raise the capacity"
            ))
        }
        _ => None,
    }
}

/// Pauses that would be sent after the queue is full.
fn pause_beyond_the_queue(scenario: &Scenario) -> Option<String> {
    let holds = queue_bytes(scenario)?;
    let queue = &scenario.queue;
    let pfc = queue.pfc.as_ref()?;
    let xoff = match &pfc.by_priority {
        None => pfc.xoff_bytes?,
        // The lowest threshold of a priority that a flow has.
        Some(thresholds) => {
            let last = queue.discipline.classes() - 1;
            let flows = scenario.flows.iter();
            let classes = flows.map(|flow| usize::from(flow.class).min(last));
            let priorities = classes.filter_map(|class| queue.priorities.get(class));
            let paused = priorities.filter(|&priority| pfc.classes >> priority & 1 == 1);
            let xoff = paused.map(|&priority| thresholds[usize::from(priority)].xoff_bytes);
            xoff.min()?
        }
    };
    (queue.shared.is_none() && xoff >= holds).then(|| {
        format!(
            "a link is paused at {xoff} waiting bytes, but a queue holds {holds}, so lossless classes lose packets \
             before any pause; lower `xoff`, in bytes, or raise `switch.capacity`"
        )
    })
}

/// Timers of DCQCN in another unit than the file's, whose published values are tens of µs.
fn long_timers(scenario: &Scenario) -> Option<String> {
    const LONGEST_NS: u64 = 1_000_000_000;
    let timers = scenario
        .flows
        .iter()
        .filter_map(|flow| match &flow.transport {
            Transport::Roce(roce) => roce.dcqcn.as_ref(),
            _ => None,
        });
    let usual = crate::transport::dcqcn::Dcqcn::default();
    let long = |ns: u64, usual: u64| ns != usual && ns >= scenario.duration_ns.min(LONGEST_NS);
    let (mut flows, mut names) = (0, std::collections::BTreeMap::new());
    for timer in timers {
        let before = names.len();
        let mut any = before > 0;
        for (name, ns, usual) in [
            ("increase", timer.timer_ns, usual.timer_ns),
            ("alpha", timer.alpha_timer_ns, usual.alpha_timer_ns),
            ("notification", timer.cnp_interval_ns, usual.cnp_interval_ns),
        ] {
            if long(ns, usual) {
                names.insert(name, ns);
                any = true;
            }
        }
        flows += usize::from(any);
    }
    if names.is_empty() {
        return None;
    }
    let named: Vec<String> = names
        .iter()
        .map(|(name, ns)| format!("the {name} timer of {}", time(*ns as f64)))
        .collect();
    Some(format!(
        "{flows} flows of DCQCN have {}, in a run of {}; published values are about 50 us, and times are in s (in ns in \
         Days' files)",
        named.join(" and "),
        time(scenario.duration_ns as f64)
    ))
}

/// Packets of lossless classes that were dropped because a queue was full.
fn lossy_pfc(scenario: &Scenario, result: &RunResult) -> Option<String> {
    let pfc = scenario.queue.pfc.as_ref()?;
    let last = scenario.queue.discipline.classes() - 1;
    let lossless = |class: u8| {
        if pfc.by_priority.is_some() {
            // A flow beyond the last class is in it, and a table maps classes to priorities.
            let class = usize::from(class).min(last);
            let priority = scenario.queue.priorities.get(class);
            return priority.is_some_and(|priority| pfc.classes >> priority & 1 == 1);
        }
        class < 8 && pfc.classes >> class & 1 == 1
    };
    let t = &result.totals;
    let drops = (t.data_drops + t.control_drops).saturating_sub(t.fault_drops);
    let (mut all, mut again) = (true, 0);
    for (spec, flow) in pairs(scenario, result) {
        all &= lossless(spec.class);
        if lossless(spec.class) {
            again += flow.retransmitted;
        }
    }
    if drops == 0 || !all && again == 0 {
        return None;
    }
    let what = if all {
        format!("{drops} packets of lossless classes were dropped")
    } else {
        format!(
            "flows of lossless classes sent {again} packets again, and {drops} of all were dropped"
        )
    };
    Some(format!(
        "{what} although PFC is on: a queue filled before its inputs were paused. `xoff` times the inputs, and the \
         bytes under way, must fit the capacity of a queue: lower `xoff`, or raise `switch.capacity`"
    ))
}

/// Notes that follow from a run.
pub(crate) fn on_result(scenario: &Scenario, result: &RunResult) -> Vec<String> {
    [
        sprayed(scenario, result),
        unmarked(scenario, result),
        lossy_pfc(scenario, result),
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
