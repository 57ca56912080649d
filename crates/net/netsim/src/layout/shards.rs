//! The number of shards of a run.

use crate::scenario::{Demand, Finished, Scenario};
use crate::step::SHARDS_MAX;

/// Minimum average events per shard and window for which shards pay off; below, one shard's single
/// queue is faster than many nearly empty ones. Chosen by `scripts/run.sh bench-net`: f32 has 1 event per
/// window in total, E5 has thousands.
const EVENTS_PER_SHARD_WINDOW: f64 = 16.0;

/// Upper estimate of packet-hops per ns while all flows send.
pub(super) fn density(scenario: &Scenario) -> f64 {
    let rate = scenario
        .links
        .host
        .unwrap_or(scenario.links.edge)
        .bits_per_s as f64;
    let per_s: f64 = scenario
        .flows
        .iter()
        .map(|f| {
            let line = rate / (8.0 * f64::from(f.packet_bytes));
            match f.demand {
                Demand::Bytes(_) => line,
                Demand::Paced(a) => line.min(1.0 / a.gap_s.mean().max(1e-9)),
            }
        })
        .sum();
    // Data and ACK over about five links.
    per_s * 10.0 / 1e9
}

/// The number of shards of a run. A property of the scenario, so it is the same on every machine.
pub(super) fn count(scenario: &Scenario, lookahead_ns: u64) -> u32 {
    let topology = &scenario.topology;
    let parts = topology.parts().min(SHARDS_MAX);
    let crossing = scenario.flows.iter().any(|flow| {
        flow.after.iter().any(|after| {
            // The end of a predecessor must happen in the shard where the flow starts.
            let Some(other) = scenario.flows.get(after.flow as usize) else {
                return true;
            };
            let seen_at = match after.until.of(other) {
                Finished::Delivered => other.dst,
                Finished::Acknowledged => other.src,
            };
            topology.part_of_host(seen_at) != topology.part_of_host(flow.src)
        })
    });
    let events = density(scenario) * lookahead_ns as f64;
    if crossing || events < EVENTS_PER_SHARD_WINDOW * f64::from(parts) {
        1
    } else {
        parts
    }
}
