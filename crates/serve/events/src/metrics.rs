//! Metrics of the event plane for `/metrics`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::publisher::Shared;

/// Encodes the counters of an [`EventPlane`](crate::EventPlane).
pub struct EventsCollector(pub(crate) Arc<Shared>);

impl fmt::Debug for EventsCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventsCollector")
    }
}

impl EventsCollector {
    /// Events added to the queues, and dropped there: of forward-pass metrics, then of KV events.
    pub fn queues(&self) -> [(u64, u64); 2] {
        let mut sums = [(0, 0); 2];
        for queue in &self.0.queues {
            for (sum, lane) in sums.iter_mut().zip([&queue.fpm, &queue.kv]) {
                sum.0 += lane.counters.queued.load(Ordering::Relaxed);
                sum.1 += lane.counters.dropped.load(Ordering::Relaxed);
            }
        }
        sums
    }

    /// The bus's counters.
    pub fn bus(&self) -> &crate::bus::BusCounters {
        &self.0.counters
    }
}

impl Collector for EventsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let [fpm, kv] = self.queues();
        let by_kind = [
            (
                "slipstream_events_queued",
                "Events that engine threads published",
                fpm.0,
                kv.0,
            ),
            (
                "slipstream_events_dropped",
                "Events dropped, oldest first, because the bus was too slow",
                fpm.1,
                kv.1,
            ),
        ];
        for (name, help, fpm, kv) in by_kind {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (kind, value) in [("fpm", fpm), ("kv", kv)] {
                family
                    .encode_family(&[("kind", kind)])?
                    .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
            }
        }
        let bus = self.bus();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = [
            (
                "slipstream_events_sent_fpm",
                "Forward-pass metrics passed to the bus",
                &bus.fpm_sent,
            ),
            (
                "slipstream_events_sent_kv",
                "KV batches passed to the bus",
                &bus.kv_sent,
            ),
            (
                "slipstream_events_sent_bytes",
                "Bytes of forward-pass metrics and KV batches",
                &bus.bytes_sent,
            ),
            (
                "slipstream_events_subscriber_dropped",
                "Events dropped for subscribers that read too slowly",
                &bus.subscriber_dropped,
            ),
            (
                "slipstream_events_refused",
                "Events that the bus rejected",
                &bus.refused,
            ),
            (
                "slipstream_events_disconnects",
                "Connections lost",
                &bus.disconnects,
            ),
            (
                "slipstream_events_bad_peers",
                "Peers disconnected for protocol errors",
                &bus.bad_peers,
            ),
            (
                "slipstream_events_accept_errors",
                "Connections not accepted",
                &bus.accept_errors,
            ),
            (
                "slipstream_events_replays",
                "Requests for past KV events",
                &bus.replays,
            ),
            (
                "slipstream_events_replayed",
                "Past KV batches sent",
                &bus.replayed,
            ),
            (
                "slipstream_events_bad_replays",
                "Malformed requests for past KV events",
                &bus.bad_replays,
            ),
        ];
        for (name, help, counter) in counters {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, u64, f64>(&load(counter), None)?;
        }
        encoder
            .encode_descriptor(
                "slipstream_events_subscribers",
                "Connected subscribers; NATS: whether the server is connected",
                None,
                MetricType::Gauge,
            )?
            .encode_gauge(&(load(&bus.subscribers) as f64))
    }
}
