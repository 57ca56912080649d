//! Passes KV deltas from engine threads to the router's block index.

use std::collections::BTreeMap;

use slipstream_base::{ForwardPassMetrics, KvDelta, RankId};
use slipstream_planes::EventSink;
use slipstream_router::Fleets;

/// Feeds the fleet's block index from engine threads. `Resync` requests a snapshot of a rank, when a delta is missing.
pub struct FleetSink<Resync> {
    fleets: Fleets,
    resync: Resync,
    gaps: Gaps,
}

impl<Resync> FleetSink<Resync> {
    /// Feeds the index of `fleets`.
    pub fn new(fleets: Fleets, resync: Resync) -> FleetSink<Resync> {
        let gaps = Gaps::default();
        FleetSink {
            fleets,
            resync,
            gaps,
        }
    }
}

impl<Resync: FnMut(RankId) + Send> EventSink for FleetSink<Resync> {
    fn on_kv(&mut self, delta: &KvDelta) {
        if !self.fleets.on_kv(delta).gap {
            return;
        }
        if !self.gaps.skip(delta.rank) {
            return; // logged and requested before
        }
        tracing::warn!(rank = %delta.rank, sequence = delta.sequence, "a KV delta is missing; requested a snapshot");
        (self.resync)(delta.rank);
    }

    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        self.fleets.resync(snapshot);
        if let Some(skipped) = self.gaps.end(snapshot.rank) {
            tracing::warn!(rank = %snapshot.rank, skipped, "KV index resynchronized");
        }
    }

    fn on_fpm(&mut self, _metrics: &ForwardPassMetrics) {}
}

/// Ranks that wait for a snapshot, with the number of deltas skipped so far. Until it arrives every
/// delta looks like a gap, which must be logged once, not thousands of times.
#[derive(Debug, Default)]
struct Gaps(BTreeMap<RankId, u64>);

impl Gaps {
    /// Counts a skipped delta. True for the first, and for every 10,000th in case the request for a
    /// snapshot was lost.
    fn skip(&mut self, rank: RankId) -> bool {
        const ASK_AGAIN: u64 = 10_000;
        let skipped = self.0.entry(rank).or_default();
        *skipped += 1;
        *skipped % ASK_AGAIN == 1
    }

    /// Ends a gap; returns the number of skipped deltas, if there was a gap.
    fn end(&mut self, rank: RankId) -> Option<u64> {
        self.0.remove(&rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_reported_once_and_counted() {
        let (mut gaps, rank) = (Gaps::default(), RankId::default());
        let reported = (0..10_001).filter(|_| gaps.skip(rank)).count();
        assert_eq!(reported, 2, "the first, and again after 10,000");
        assert_eq!(gaps.end(rank), Some(10_001));
        assert_eq!(gaps.end(rank), None);
        assert!(gaps.skip(rank), "a new gap");
    }
}
