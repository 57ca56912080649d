//! The event plane: forward-pass metrics and KV deltas from engine threads.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use slipstream_base::kv_event::StoredBlocks;
use slipstream_base::sync::lock;
use slipstream_base::{ForwardPassMetrics, KvDelta};

/// The sink of an engine thread. One per thread, so that it needs no lock.
///
/// Order: records of a rank arrive in the order of its passes, the KV delta of a pass before its
/// metrics. A sink that cannot keep up drops records and counts them. It never waits, because the
/// engine thread would wait with it.
pub trait EventSink: Send {
    /// A rank's cache changed.
    fn on_kv(&mut self, delta: &KvDelta);

    /// Whether the tokens of stored blocks are needed, which costs memory. Called once, at the start.
    fn wants_blocks(&self) -> bool {
        false
    }

    /// Called instead of [`on_kv`](EventSink::on_kv) if a sink of the thread needs tokens:
    /// `blocks` has an entry for each block that `delta` stores.
    fn on_kv_blocks(&mut self, delta: &KvDelta, blocks: &StoredBlocks) {
        let _ = blocks;
        self.on_kv(delta);
    }

    /// The whole contents of a rank's cache, for receivers that missed a delta: `Cleared`, then every
    /// block. It takes no number of its own: `sequence` is that of the next delta.
    fn on_kv_snapshot(&mut self, snapshot: &KvDelta);

    /// A rank ended a pass, or was idle for a second.
    fn on_fpm(&mut self, metrics: &ForwardPassMetrics);

    /// The thread is about to sleep, or has been busy for a while: buffered records should be sent.
    fn flush(&mut self) {}
}

/// A queue of forward-pass metrics inside this process: engine threads add records, one reader takes them.
///
/// A reader that falls behind loses the oldest records. They are counted, and also visible
/// as a gap in a rank's `counter`. The lock is held for the copy of one record, and is contended only
/// with the reader and with threads that share the queue; give each thread its own if that shows.
#[derive(Clone, Debug)]
pub struct FpmQueue {
    shared: Arc<Mutex<FpmRecords>>,
    records_max: usize,
}

#[derive(Debug, Default)]
struct FpmRecords {
    records: VecDeque<ForwardPassMetrics>,
    dropped: u64,
}

impl FpmQueue {
    /// A queue that holds `records_max` records, at least one. A record takes some 150 bytes.
    pub fn new(records_max: usize) -> FpmQueue {
        FpmQueue {
            shared: Arc::default(),
            records_max: records_max.max(1),
        }
    }

    /// Moves all records to the end of `out`.
    pub fn take(&self, out: &mut Vec<ForwardPassMetrics>) {
        out.extend(self.lock().records.drain(..));
    }

    /// Records dropped so far.
    pub fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    fn lock(&self) -> MutexGuard<'_, FpmRecords> {
        // Nothing panics while the lock is held, and records are always whole.
        lock(&self.shared)
    }
}

impl EventSink for FpmQueue {
    fn on_kv(&mut self, _delta: &KvDelta) {}
    fn on_kv_snapshot(&mut self, _snapshot: &KvDelta) {}

    fn on_fpm(&mut self, metrics: &ForwardPassMetrics) {
        let mut shared = self.lock();
        if shared.records.len() == self.records_max {
            shared.records.pop_front();
            shared.dropped += 1;
        }
        shared.records.push_back(metrics.clone());
    }
}

/// Publishes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvents;

impl EventSink for NoEvents {
    fn on_kv(&mut self, _delta: &KvDelta) {}
    fn on_kv_snapshot(&mut self, _snapshot: &KvDelta) {}
    fn on_fpm(&mut self, _metrics: &ForwardPassMetrics) {}
}

impl<S: EventSink + ?Sized> EventSink for Box<S> {
    fn on_kv(&mut self, delta: &KvDelta) {
        (**self).on_kv(delta);
    }

    fn wants_blocks(&self) -> bool {
        (**self).wants_blocks()
    }

    fn on_kv_blocks(&mut self, delta: &KvDelta, blocks: &StoredBlocks) {
        (**self).on_kv_blocks(delta, blocks);
    }

    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        (**self).on_kv_snapshot(snapshot);
    }

    fn on_fpm(&mut self, metrics: &ForwardPassMetrics) {
        (**self).on_fpm(metrics);
    }

    fn flush(&mut self) {
        (**self).flush();
    }
}

/// Publishes to both.
impl<A: EventSink, B: EventSink> EventSink for (A, B) {
    fn on_kv(&mut self, delta: &KvDelta) {
        self.0.on_kv(delta);
        self.1.on_kv(delta);
    }

    fn wants_blocks(&self) -> bool {
        self.0.wants_blocks() || self.1.wants_blocks()
    }

    fn on_kv_blocks(&mut self, delta: &KvDelta, blocks: &StoredBlocks) {
        self.0.on_kv_blocks(delta, blocks);
        self.1.on_kv_blocks(delta, blocks);
    }

    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        self.0.on_kv_snapshot(snapshot);
        self.1.on_kv_snapshot(snapshot);
    }

    fn on_fpm(&mut self, metrics: &ForwardPassMetrics) {
        self.0.on_fpm(metrics);
        self.1.on_fpm(metrics);
    }

    fn flush(&mut self) {
        self.0.flush();
        self.1.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_drops_the_oldest_and_counts() {
        let queue = FpmQueue::new(3);
        let mut sinks = (queue.clone(), NoEvents);
        for counter in 0..5 {
            sinks.on_fpm(&ForwardPassMetrics {
                counter,
                ..ForwardPassMetrics::default()
            });
        }
        let mut taken = Vec::new();
        queue.take(&mut taken);
        let counters: Vec<u64> = taken.iter().map(|fpm| fpm.counter).collect();
        assert_eq!(counters, [2, 3, 4]);
        assert_eq!(queue.dropped(), 2);
        queue.take(&mut taken);
        assert_eq!(taken.len(), 3, "taken records are gone");
    }
}
