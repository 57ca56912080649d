//! KV deltas from engine threads into the router's block index.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use slipstream_base::{ForwardPassMetrics, KvDelta, RankId};
use slipstream_planes::EventSink;
use slipstream_router::Fleets;
use slipstream_worker::Resyncs;

/// Feeds the fleet's block index from engine threads.
pub(crate) struct FleetSink {
    fleets: Fleets,
    /// Set once the workers run; asked for a snapshot when a delta is missing.
    resyncs: Arc<OnceLock<Resyncs>>,
    gaps: Gaps,
}

impl FleetSink {
    pub(crate) fn new(fleets: Fleets, resyncs: Arc<OnceLock<Resyncs>>) -> FleetSink {
        let gaps = Gaps::default();
        FleetSink {
            fleets,
            resyncs,
            gaps,
        }
    }
}

impl EventSink for FleetSink {
    fn on_kv(&mut self, delta: &KvDelta) {
        if !self.fleets.on_kv(delta).gap {
            return;
        }
        if !self.gaps.skip(delta.rank) {
            return; // said and asked for before
        }
        tracing::warn!(rank = %delta.rank, sequence = delta.sequence, "a KV delta is missing; a snapshot was asked for");
        if let Some(resyncs) = self.resyncs.get() {
            resyncs.resync(delta.rank);
        }
    }

    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        self.fleets.resync(snapshot);
        if let Some(skipped) = self.gaps.mend(snapshot.rank) {
            tracing::warn!(rank = %snapshot.rank, skipped, "the KV index is whole again after a gap");
        }
    }

    fn on_fpm(&mut self, _metrics: &ForwardPassMetrics) {}
}

/// Ranks that wait for a snapshot, and how many deltas each has skipped meanwhile: until it comes
/// every delta looks like a gap, which is one line to say and not thousands.
#[derive(Debug, Default)]
struct Gaps(BTreeMap<RankId, u64>);

impl Gaps {
    /// Counts a skipped delta. True for the first, and for every 10,000th in case the request for
    /// a snapshot was lost.
    fn skip(&mut self, rank: RankId) -> bool {
        const ASK_AGAIN: u64 = 10_000;
        let skipped = self.0.entry(rank).or_default();
        *skipped += 1;
        *skipped % ASK_AGAIN == 1
    }

    /// Ends a gap; how many deltas it skipped, if there was one.
    fn mend(&mut self, rank: RankId) -> Option<u64> {
        self.0.remove(&rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_told_once_and_counted() {
        let (mut gaps, rank) = (Gaps::default(), RankId::default());
        let told = (0..10_001).filter(|_| gaps.skip(rank)).count();
        assert_eq!(told, 2, "the first, and again after 10,000");
        assert_eq!(gaps.mend(rank), Some(10_001));
        assert_eq!(gaps.mend(rank), None);
        assert!(gaps.skip(rank), "a new gap");
    }
}
