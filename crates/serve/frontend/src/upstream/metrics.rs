//! Counters per engine.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use slipstream_base::Role;
use slipstream_base::sync::lock;

use super::counters::{BOUNDS_S, COPY_DROPS, COPY_OUTCOMES, Counters, PREFILL_OUTCOMES};
use super::engines::{Engine, Engines};
use super::retired::Row;
use super::stored_answers::OUTCOMES;

/// Encodes the counters of all engines.
pub struct EngineCollector(
    /// The engines.
    pub Arc<Engines>,
);

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineCollector({} engines)", self.0.count())
    }
}

type Labels<'a> = [(&'static str, &'a str); 1];

fn each(named: &[(String, Arc<Engine>)]) -> impl Iterator<Item = (Labels<'_>, &Engine)> {
    let each = named.iter();
    each.map(|(url, engine)| ([("engine", url.as_str())], &**engine))
}

/// Rows of engines, also of those that left.
fn every(rows: &[Row]) -> impl Iterator<Item = (Labels<'_>, &Row)> {
    rows.iter().map(|row| ([("engine", row.url.as_str())], row))
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        type Of = fn(&Counters) -> &AtomicU64;
        let all = self.0.each().into_iter();
        let urls: Vec<_> = all.map(|of| (of.spec.url.to_string(), of)).collect();
        let mut rows = lock(&self.0.retired).rows();
        rows.extend(urls.iter().map(|(_, engine)| engine.row()));
        for (name, help, count) in [
            (
                "slipstream_engines_added",
                "Engines that joined after the start",
                &self.0.added,
            ),
            (
                "slipstream_engines_removed",
                "Engines that left",
                &self.0.removed,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
        }
        let counters: [(&str, &str, Of); 10] = [
            (
                "slipstream_engine_long_events",
                "Events longer than 1 MiB, which were not read",
                |c| &c.long_events,
            ),
            (
                "slipstream_engine_outliers",
                "Ejections because the engine was worse than its peers",
                |c| &c.outliers,
            ),
            (
                "slipstream_engine_requests",
                "Requests sent to the engine; a retry counts at each engine",
                |c| &c.requests,
            ),
            (
                "slipstream_engine_retries",
                "Requests that were sent to another engine after this one failed them",
                |c| &c.retried,
            ),
            (
                "slipstream_engine_streams_resumed",
                "Streams that continued on another engine after this one was lost",
                |c| &c.resumed,
            ),
            (
                "slipstream_engine_answers_broken",
                "Answers that broke off, and that no other engine continued",
                |c| &c.broken,
            ),
            (
                "slipstream_engine_health_checks",
                "Questions of health checks",
                |c| &c.checks,
            ),
            (
                "slipstream_engine_ejections",
                "Times that the engine got no requests because it failed too many",
                |c| &c.ejections,
            ),
            (
                "slipstream_engine_ejections_suppressed",
                "Failures that did not eject the engine because no other one was left",
                |c| &c.ejections_suppressed,
            ),
            (
                "slipstream_engine_answer_bytes",
                "Bytes of answers' bodies",
                |c| &c.bytes,
            ),
        ];
        for (name, help, of) in counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (labels, engine) in every(&rows) {
                family
                    .encode_family(&labels)?
                    .encode_counter::<NoLabelSet, u64, f64>(
                        &of(&engine.counters).load(Relaxed),
                        None,
                    )?;
            }
        }
        let mut answers = encoder.encode_descriptor(
            "slipstream_engine_answers",
            "Answers by status",
            None,
            MetricType::Counter,
        )?;
        for (labels, engine) in every(&rows) {
            for (class, name) in ["1xx", "2xx", "3xx", "4xx", "5xx"].iter().enumerate() {
                let labels = [labels[0], ("status", *name)];
                let value = engine.counters.answers[class + 1].load(Relaxed);
                answers
                    .encode_family(&labels)?
                    .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
            }
        }
        let mut failures = encoder.encode_descriptor(
            "slipstream_engine_failures",
            "Failures by cause",
            None,
            MetricType::Counter,
        )?;
        for (labels, engine) in every(&rows) {
            let c = &engine.counters;
            for (cause, count) in [
                ("connect", &c.connect),
                ("lost", &c.lost),
                ("timeout", &c.timeout),
                ("tls", &c.tls),
                ("protocol", &c.protocol),
                ("reported", &c.reported),
                ("incomplete", &c.incomplete),
                ("health", &c.health),
            ] {
                let labels = [labels[0], ("cause", cause)];
                failures
                    .encode_family(&labels)?
                    .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
            }
        }
        if self.0.disaggregates() {
            let mut prefills = encoder.encode_descriptor(
                "slipstream_engine_prefills",
                "Prompts that the engine was to compute for another one, by their end",
                None,
                MetricType::Counter,
            )?;
            for (labels, engine) in every(&rows) {
                if engine.role != Role::Prefill {
                    continue;
                }
                for (outcome, count) in PREFILL_OUTCOMES.iter().zip(&engine.counters.prefills) {
                    let labels = [labels[0], ("outcome", *outcome)];
                    prefills
                        .encode_family(&labels)?
                        .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
                }
            }
        }
        if self.0.is_weighted.load(Relaxed) {
            let fallbacks = self.0.traffic_counts.fallbacks.load(Relaxed);
            encoder
                .encode_descriptor(
                    "slipstream_pool_fallbacks",
                    "Requests that the pool of their weight failed, and that were sent to the others",
                    None,
                    MetricType::Counter,
                )?
                .encode_counter::<NoLabelSet, u64, f64>(&fallbacks, None)?;
        }
        if self.0.has_mirrors.load(Relaxed) {
            let mut mirrored = encoder.encode_descriptor(
                "slipstream_engine_mirrored",
                "Copies of requests that the engine got, by their end",
                None,
                MetricType::Counter,
            )?;
            for (labels, engine) in every(&rows).filter(|(_, engine)| engine.is_mirror) {
                for (outcome, count) in COPY_OUTCOMES.iter().zip(&engine.counters.copies) {
                    let labels = [labels[0], ("outcome", *outcome)];
                    mirrored
                        .encode_family(&labels)?
                        .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
                }
            }
            let mut dropped = encoder.encode_descriptor(
                "slipstream_mirror_dropped",
                "Copies of requests that were not sent",
                None,
                MetricType::Counter,
            )?;
            for (reason, count) in COPY_DROPS.iter().zip(&self.0.traffic_counts.dropped) {
                dropped
                    .encode_family(&[("reason", *reason)])?
                    .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
            }
        }
        let mut stored = encoder.encode_descriptor(
            "slipstream_engine_stored_responses",
            "Requests that name a stored response, by how its engine was found",
            None,
            MetricType::Counter,
        )?;
        for (outcome, count) in OUTCOMES.iter().zip(&self.0.stored.outcomes) {
            stored
                .encode_family(&[("engine_was", *outcome)])?
                .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
        }
        if self.0.tokenized.is_some() {
            let mut prompts = encoder.encode_descriptor(
                "slipstream_engine_prompts",
                "Prompts that were compared with the engines' KV events as tokens, and others as text",
                None,
                MetricType::Counter,
            )?;
            for (read_as, count) in ["tokens", "text"].into_iter().zip(&self.0.prompts) {
                prompts
                    .encode_family(&[("as", read_as)])?
                    .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
            }
        }
        let mut in_flight = encoder.encode_descriptor(
            "slipstream_engine_in_flight",
            "Requests at the engine",
            None,
            MetricType::Gauge,
        )?;
        for (labels, engine) in each(&urls) {
            let value = engine.counters.in_flight.load(Relaxed) as f64;
            in_flight.encode_family(&labels)?.encode_gauge(&value)?;
        }
        let mut up = encoder.encode_descriptor(
            "slipstream_engine_up",
            "Whether the engine takes requests",
            None,
            MetricType::Gauge,
        )?;
        for (labels, engine) in each(&urls) {
            let takes = engine.takes_requests();
            let value = f64::from(u8::from(takes));
            up.encode_family(&labels)?.encode_gauge(&value)?;
        }
        let mut first_byte = encoder.encode_descriptor(
            "slipstream_engine_first_byte_seconds",
            "From sending a request to the first byte of its answer",
            None,
            MetricType::Histogram,
        )?;
        for (labels, engine) in every(&rows) {
            let counts = engine
                .counters
                .first_byte
                .each_ref()
                .map(|n| n.load(Relaxed));
            let bounds = BOUNDS_S.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
            let sum = engine.counters.first_byte_ns.load(Relaxed) as f64 / 1e9;
            first_byte
                .encode_family(&labels)?
                .encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)?;
        }
        Ok(())
    }
}
