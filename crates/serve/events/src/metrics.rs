//! Metrics of the event plane for `/metrics`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use slipstream_metrics::{Family, Samples};

use crate::publisher::Shared;

/// Counters of an [`EventPlane`](crate::EventPlane).
#[derive(Clone)]
pub struct EventCounts(pub(crate) Arc<Shared>);

impl fmt::Debug for EventCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventCounts({:?})", self.queues())
    }
}

impl EventCounts {
    /// Events added to the queues, and dropped there: of forward-pass metrics, then of KV events.
    pub fn queues(&self) -> [(u64, u64); 2] {
        let mut sums = [(0, 0); 2];
        for queue in &self.0.queues {
            for (sum, lane) in sums.iter_mut().zip([&queue.fpm, &queue.kv]) {
                sum.0 += lane.counters.queued.load(Relaxed);
                sum.1 += lane.counters.dropped.load(Relaxed);
            }
        }
        sums
    }

    /// The bus's counters.
    pub fn bus(&self) -> &crate::bus::BusCounters {
        &self.0.counters
    }

    fn by_kind(&self, samples: &mut Samples<'_>, of: fn((u64, u64)) -> u64) {
        for (kind, queue) in ["fpm", "kv"].into_iter().zip(self.queues()) {
            samples.add(&[("kind", kind)], of(queue));
        }
    }
}

pub(crate) const FAMILIES: &[Family<EventCounts>] = &[
    Family::counter(
        "slipstream_events_queued",
        "Events that engine threads published",
        |of, samples| of.by_kind(samples, |(queued, _)| queued),
    ),
    Family::counter(
        "slipstream_events_dropped",
        "Events dropped, oldest first, because the bus was too slow",
        |of, samples| of.by_kind(samples, |(_, dropped)| dropped),
    ),
    Family::total(
        "slipstream_events_sent_fpm",
        "Forward-pass metrics passed to the bus",
        |of| of.bus().fpm_sent.load(Relaxed),
    ),
    Family::total(
        "slipstream_events_sent_kv",
        "KV batches passed to the bus",
        |of| of.bus().kv_sent.load(Relaxed),
    ),
    Family::total(
        "slipstream_events_sent_bytes",
        "Bytes of forward-pass metrics and KV batches",
        |of| of.bus().bytes_sent.load(Relaxed),
    ),
    Family::total(
        "slipstream_events_subscriber_dropped",
        "Events dropped for subscribers that read too slowly",
        |of| of.bus().subscriber_dropped.load(Relaxed),
    ),
    Family::total(
        "slipstream_events_refused",
        "Events that the bus rejected",
        |of| of.bus().refused.load(Relaxed),
    ),
    Family::total("slipstream_events_disconnects", "Connections lost", |of| {
        of.bus().disconnects.load(Relaxed)
    }),
    Family::total(
        "slipstream_events_bad_peers",
        "Peers disconnected for protocol errors",
        |of| of.bus().bad_peers.load(Relaxed),
    ),
    Family::total(
        "slipstream_events_accept_errors",
        "Connections not accepted",
        |of| of.bus().accept_errors.load(Relaxed),
    ),
    Family::total(
        "slipstream_events_replays",
        "Requests for past KV events",
        |of| of.bus().replays.load(Relaxed),
    ),
    Family::total("slipstream_events_replayed", "Past KV batches sent", |of| {
        of.bus().replayed.load(Relaxed)
    }),
    Family::total(
        "slipstream_events_bad_replays",
        "Malformed requests for past KV events",
        |of| of.bus().bad_replays.load(Relaxed),
    ),
    Family::gauge(
        "slipstream_events_subscribers",
        "Connected subscribers; NATS: whether the server is connected",
        |of, samples| samples.add(&[], of.bus().subscribers.load(Relaxed)),
    ),
];
