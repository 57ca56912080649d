//! Refuses scenarios that cannot be simulated.

use std::collections::BTreeSet;

use slipstream_base::width::to_u32;

use crate::error::Error;
use crate::event::SIZE_MAX;
use crate::link::Link;
use crate::scenario::{Demand, Flow, Scenario, Transport};
use crate::topology::Topology;

/// Refuses values that the simulator cannot represent.
pub(super) fn check_values(scenario: &Scenario) -> Result<(), Error> {
    check_links(scenario)?;
    check_queue(scenario)?;
    // A sorted list, as a tree of millions of flows would be slow.
    let mut ids: Vec<u64> = scenario.flows.iter().map(|flow| flow.id).collect();
    ids.sort_unstable();
    let twice: BTreeSet<u64> = ids
        .windows(2)
        .filter(|pair| pair[0] == pair[1])
        .map(|pair| pair[0])
        .collect();
    for flow in &scenario.flows {
        check_flow(flow, &scenario.topology, &twice).map_err(|what| Error::Flow {
            flow: flow.id,
            what,
        })?;
    }
    Ok(())
}

fn check_links(scenario: &Scenario) -> Result<(), Error> {
    let links = &scenario.links;
    let named = [
        ("host link", links.host),
        ("link", Some(links.edge)),
        ("core link", Some(links.core)),
    ];
    let own = scenario.topology.own_links().iter();
    for (name, link) in named.into_iter().chain(own.map(|&l| ("edge", Some(l)))) {
        let Some(Link {
            bits_per_s,
            delay_ns,
        }) = link
        else {
            continue;
        };
        if !(1..=1_000_000_000_000_000).contains(&bits_per_s) {
            return Err(Error::Value(format!(
                "a {name} of {bits_per_s} bit/s cannot be simulated; use 1 bit/s to 1 Pb/s"
            )));
        }
        if delay_ns > 2_000_000_000 {
            return Err(Error::Value(format!(
                "a {name} with a delay of {delay_ns} ns is too slow; use at most 2 s"
            )));
        }
    }
    let slow = named
        .iter()
        .filter_map(|(_, link)| *link)
        .chain(scenario.topology.own_links().iter().copied())
        .any(|link| link.bits_per_s < 1_000_000);
    if scenario.queue.trim.is_some() && slow {
        return Err(Error::Value(
            "trimming ports use 32-bit times, too short for links below 1 Mb/s; use faster \
             links, or another `switch.drop`"
                .into(),
        ));
    }
    Ok(())
}

fn check_queue(scenario: &Scenario) -> Result<(), Error> {
    let (queue, links) = (&scenario.queue, &scenario.links);
    if queue.pfc.is_some_and(|pfc| pfc.host_links) && links.host.is_none() {
        return Err(Error::Value(
            "PFC pauses the links of hosts too, but they are not modeled; set `link.host_links = \
             true`"
                .into(),
        ));
    }
    if queue.trim.is_some_and(|t| t.return_to_sender) && links.host.is_none() {
        return Err(Error::Value(
            "headers return to their senders over the links of hosts, but those are not modeled; set \
             `link.host_links = true`"
                .into(),
        ));
    }
    let largest = scenario
        .flows
        .iter()
        .map(|f| u64::from((f.packet_bytes + f.header_bytes).max(f.ack_bytes)))
        .max()
        .unwrap_or(0);
    for (name, bytes) in [
        (
            "capacity_bytes",
            (queue.capacity_bytes > 0).then_some(queue.capacity_bytes),
        ),
        ("shared.bytes", queue.shared.map(|s| s.bytes)),
    ] {
        if let Some(bytes) = bytes
            && bytes < largest
        {
            return Err(Error::Value(format!(
                "`switch.{name}` is {bytes} bytes, less than one packet of {largest}; give at \
                 least that"
            )));
        }
    }
    Ok(())
}

/// `twice`: numbers that several flows have.
fn check_flow(flow: &Flow, topology: &Topology, twice: &BTreeSet<u64>) -> Result<(), String> {
    if twice.contains(&flow.id) {
        return Err("this number is used twice; give each flow its own number".into());
    }
    let hosts = topology.host_count();
    for (name, host) in [("source", flow.src), ("destination", flow.dst)] {
        if host >= hosts {
            return Err(format!(
                "its {name} is host {host}, but hosts are 0 to {}",
                hosts.saturating_sub(1)
            ));
        }
    }
    if flow.src == flow.dst {
        let host = topology.host_number(flow.src);
        return Err(format!("host {host} sends to itself; give two hosts"));
    }
    let size = flow.packet_bytes + flow.header_bytes;
    if flow.packet_bytes == 0 || flow.ack_bytes == 0 || size.max(flow.ack_bytes) > SIZE_MAX {
        return Err(format!(
            "packets of {} + {} bytes and ACKs of {} bytes; each must be from 1 to {SIZE_MAX}",
            flow.packet_bytes, flow.header_bytes, flow.ack_bytes
        ));
    }
    if matches!(flow.transport, Transport::Ndp(_)) && ndp_packets(flow) > u64::from(u32::MAX) {
        return Err(format!(
            "its {} bytes are {} packets, but NDP numbers them in 32 bits; use larger packets or \
             several flows",
            flow.demand.bytes().unwrap_or(0),
            ndp_packets(flow)
        ));
    }
    if let Demand::Paced(a) = flow.demand
        && a.duration_ns.is_none()
        && a.bytes.is_none()
    {
        return Err("it has neither a size nor a duration; give one".into());
    }
    Ok(())
}

/// Packets of an NDP flow, without retransmissions.
pub(super) fn ndp_packets(flow: &Flow) -> u64 {
    let bytes = flow.demand.bytes().unwrap_or(0);
    bytes.div_ceil(u64::from(flow.packet_bytes))
}

/// Flows must not depend on each other in a cycle, nor on flows that do not exist.
pub(super) fn check_dependencies(flows: &[Flow]) -> Result<(), Error> {
    if flows.iter().all(|f| f.after.is_empty()) {
        return Ok(());
    }
    let mut left: Vec<usize> = flows.iter().map(|f| f.after.len()).collect();
    let mut next: Vec<Vec<u32>> = vec![Vec::new(); flows.len()];
    for (i, flow) in flows.iter().enumerate() {
        for after in &flow.after {
            next[after.flow as usize].push(to_u32(i));
        }
    }
    let mut ready: Vec<u32> = (0..to_u32(flows.len()))
        .filter(|&i| left[i as usize] == 0)
        .collect();
    let mut seen = 0;
    while let Some(i) = ready.pop() {
        seen += 1;
        for &n in &next[i as usize] {
            left[n as usize] -= 1;
            if left[n as usize] == 0 {
                ready.push(n);
            }
        }
    }
    if seen == flows.len() {
        return Ok(());
    }
    // Walk back along unmet predecessors until a flow repeats, which reveals a cycle.
    let mut at = (0..flows.len()).find(|&i| left[i] > 0).unwrap_or(0);
    let mut walk = vec![at];
    loop {
        let unmet = flows[at].after.iter().find(|a| left[a.flow as usize] > 0);
        at = unmet.map_or(at, |a| a.flow as usize);
        if let Some(from) = walk.iter().position(|&w| w == at) {
            let names: Vec<String> = walk[from..]
                .iter()
                .chain([&at])
                .map(|&i| flows[i].id.to_string())
                .collect();
            return Err(Error::Cycle(names.join(" waits for ")));
        }
        walk.push(at);
    }
}
