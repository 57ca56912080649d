//! The event plane: forward-pass metrics and KV deltas on their way from engine threads.

use slipstream_base::{ForwardPassMetrics, KvDelta};

/// Where an engine thread publishes. One a thread, so that it needs no lock of its own.
///
/// Order: records of a rank come in the order of its passes, the KV delta of a pass before its
/// metrics. A sink that cannot keep up drops and counts; it never waits, as the engine thread
/// would wait with it.
pub trait EventSink: Send {
    /// A rank's cache changed.
    fn on_kv(&mut self, delta: &KvDelta);

    /// Everything that a rank's cache holds, for whoever missed a delta: `Cleared`, then every
    /// block. It takes no number of its own: `sequence` is that of the next delta.
    fn on_kv_snapshot(&mut self, snapshot: &KvDelta);

    /// A rank ended a pass, or was idle for a second.
    fn on_fpm(&mut self, metrics: &ForwardPassMetrics);

    /// The thread is about to sleep, or has been busy for a while: what was gathered should leave.
    fn flush(&mut self) {}
}

/// Publishes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvents;

impl EventSink for NoEvents {
    fn on_kv(&mut self, _delta: &KvDelta) {}
    fn on_kv_snapshot(&mut self, _snapshot: &KvDelta) {}
    fn on_fpm(&mut self, _metrics: &ForwardPassMetrics) {}
}

/// Publishes to both.
impl<A: EventSink, B: EventSink> EventSink for (A, B) {
    fn on_kv(&mut self, delta: &KvDelta) {
        self.0.on_kv(delta);
        self.1.on_kv(delta);
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
