//! Counters per engine.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hyper::StatusCode;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use slipstream_base::Role;
use slipstream_base::sync::lock;

use super::connection::Failure;
use super::engines::{Engine, Engines};
use super::retired::Row;
use super::stored::OUTCOMES;
use super::traffic::{COPY_DROPS, COPY_OUTCOMES};

/// Upper bounds of the time to the first byte, s.
const BOUNDS_S: [f64; 16] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 300.0,
];

/// How the prefill of a prompt for another engine ended.
#[derive(Clone, Copy, Debug)]
pub(super) enum PrefillOutcome {
    /// Another engine answers with what it computed.
    Transferred,
    /// It kept nothing: the decode engine computes the prompt.
    NoParams,
    /// It failed: one engine computes the prompt and answers.
    Failed,
    /// The decode engine did not answer the request that named what it computed.
    DecodeFailed,
}

/// Labels of [`PrefillOutcome`].
const PREFILL_OUTCOMES: [&str; 4] = ["transferred", "no_params", "failed", "decode_failed"];

/// Counters of an engine, by all shards.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Attempts: a retry counts at each engine.
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
    /// Answers by hundreds of the status.
    answers: [AtomicU64; 6],
    connect: AtomicU64,
    tls: AtomicU64,
    lost: AtomicU64,
    timeout: AtomicU64,
    protocol: AtomicU64,
    reported: AtomicU64,
    incomplete: AtomicU64,
    health: AtomicU64,
    /// Requests that another engine was asked after this one failed them.
    pub(super) retried: AtomicU64,
    /// Streams that another engine continued.
    pub(super) resumed: AtomicU64,
    /// Answers that broke off.
    pub(super) broken: AtomicU64,
    /// Questions of the health thread.
    pub(super) checks: AtomicU64,
    /// Prompts that it was to compute for other engines, by [`PREFILL_OUTCOMES`].
    pub(super) prefills: [AtomicU64; PREFILL_OUTCOMES.len()],
    /// Copies of requests, by [`COPY_OUTCOMES`].
    pub(super) copies: [AtomicU64; COPY_OUTCOMES.len()],
    pub(super) ejections: AtomicU64,
    pub(super) ejections_suppressed: AtomicU64,
    /// Events that were too long to be read.
    pub(super) long_events: AtomicU64,
    /// Of bodies of answers.
    pub(super) bytes: AtomicU64,
    first_byte: [AtomicU64; BOUNDS_S.len() + 1],
    first_byte_ns: AtomicU64,
    /// Number of pieces of answers after the first, and the time from the first to the last piece.
    pieces: AtomicU64,
    stream_ns: AtomicU64,
    /// Ejections because the engine was worse than its peers.
    pub(super) outliers: AtomicU64,
    pub(super) recent: Recent,
}

/// Counts of an engine, or their growth over an interval.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) answers: u64,
    /// Failures; failures with a status are among the answers too.
    pub(super) failures: u64,
    pub(super) first_byte_ns: u64,
    pub(super) pieces: u64,
    pub(super) stream_ns: u64,
}

impl Totals {
    pub(super) fn since(&self, before: &Totals) -> Totals {
        Totals {
            answers: self.answers.saturating_sub(before.answers),
            failures: self.failures.saturating_sub(before.failures),
            first_byte_ns: self.first_byte_ns.saturating_sub(before.first_byte_ns),
            pieces: self.pieces.saturating_sub(before.pieces),
            stream_ns: self.stream_ns.saturating_sub(before.stream_ns),
        }
    }

    /// Requests that were answered or failed.
    pub(super) fn ended(&self) -> u64 {
        self.answers.saturating_add(self.failures)
    }

    /// Mean time to the first byte.
    pub(super) fn first_byte_s(&self) -> Option<f64> {
        (self.answers > 0).then(|| self.first_byte_ns as f64 / 1e9 / self.answers as f64)
    }

    /// Mean time between two pieces of an answer.
    pub(super) fn between_s(&self) -> Option<f64> {
        (self.pieces > 0).then(|| self.stream_ns as f64 / 1e9 / self.pieces as f64)
    }
}

/// Latencies of the last interval with any, ns; 0: none yet.
#[derive(Debug, Default)]
pub(super) struct Recent {
    first_byte_ns: AtomicU64,
    between_ns: AtomicU64,
}

impl Recent {
    pub(super) fn note(&self, counts: &Totals) {
        let set = |of: &AtomicU64, seconds: Option<f64>| {
            if let Some(seconds) = seconds {
                of.store(
                    slipstream_base::SimTime::from_secs_f64(seconds).0.max(1),
                    Relaxed,
                );
            }
        };
        set(&self.first_byte_ns, counts.first_byte_s());
        set(&self.between_ns, counts.between_s());
    }
}

impl Counters {
    /// All counters that only grow.
    fn each(&self) -> impl Iterator<Item = &AtomicU64> {
        // Without `..`: the compiler names a new counter that is missing here.
        let Counters {
            requests,
            in_flight: _,
            answers,
            connect,
            tls,
            lost,
            timeout,
            protocol,
            reported,
            incomplete,
            health,
            retried,
            resumed,
            broken,
            checks,
            prefills,
            copies,
            ejections,
            ejections_suppressed,
            long_events,
            bytes,
            first_byte,
            first_byte_ns,
            pieces,
            stream_ns,
            outliers,
            recent: _,
        } = self;
        let single = [
            requests,
            connect,
            tls,
            lost,
            timeout,
            protocol,
            reported,
            incomplete,
            health,
            retried,
            resumed,
            broken,
            checks,
            ejections,
            ejections_suppressed,
            long_events,
            bytes,
            first_byte_ns,
            pieces,
            stream_ns,
            outliers,
        ];
        let lists = answers.iter().chain(prefills).chain(copies);
        single.into_iter().chain(lists).chain(first_byte)
    }

    /// Adds the counts of `other`, which must no longer change.
    pub(super) fn add(&self, other: &Counters) {
        for (to, from) in self.each().zip(other.each()) {
            to.fetch_add(from.load(Relaxed), Relaxed);
        }
    }

    pub(super) fn on_prefill(&self, outcome: PrefillOutcome) {
        self.prefills[outcome as usize].fetch_add(1, Relaxed);
    }

    pub(super) fn on_failure(&self, failure: &Failure) {
        let counter = match failure {
            Failure::Refused(_) | Failure::ConnectTimeout(_) => &self.connect,
            Failure::Tls { .. } => &self.tls,
            Failure::Lost(_) => &self.lost,
            Failure::FirstByteTimeout(_) | Failure::Stalled(_) => &self.timeout,
            Failure::Protocol(_) => &self.protocol,
            Failure::Reported(_) => &self.reported,
            Failure::Incomplete(_) => &self.incomplete,
            Failure::Hung | Failure::Health(_) => &self.health,
            // Counted as an answer, as removed, and as a long event.
            Failure::Status(_) | Failure::Removed | Failure::LongEvent => return,
        };
        counter.fetch_add(1, Relaxed);
    }

    pub(super) fn totals(&self) -> Totals {
        let failures = [
            &self.connect,
            &self.tls,
            &self.lost,
            &self.timeout,
            &self.protocol,
            &self.reported,
            &self.incomplete,
        ];
        let failed: u64 = failures.iter().map(|of| of.load(Relaxed)).sum();
        let errors = self.answers[5].load(Relaxed);
        let answers: u64 = self.answers.iter().map(|of| of.load(Relaxed)).sum();
        Totals {
            answers: answers - errors.min(answers),
            failures: failed + errors,
            first_byte_ns: self.first_byte_ns.load(Relaxed),
            pieces: self.pieces.load(Relaxed),
            stream_ns: self.stream_ns.load(Relaxed),
        }
    }

    /// Mean times to the first byte and between two pieces of an answer, ms: of the last interval, or of
    /// all before the first one ends.
    pub(super) fn latencies_ms(&self) -> [Option<f64>; 2] {
        let totals = self.totals();
        let recent = |of: &AtomicU64, all: Option<f64>| match of.load(Relaxed) {
            0 => all.map(|seconds| seconds * 1e3),
            ns => Some(ns as f64 / 1e6),
        };
        [
            recent(&self.recent.first_byte_ns, totals.first_byte_s()),
            recent(&self.recent.between_ns, totals.between_s()),
        ]
    }

    /// Records an answer that has ended, whose `pieces` after the first one took `took_ns`.
    pub(super) fn on_stream(&self, pieces: u64, took_ns: u64) {
        self.pieces.fetch_add(pieces, Relaxed);
        self.stream_ns.fetch_add(took_ns, Relaxed);
    }

    /// The first byte of an answer came `took_ns` after the request was sent.
    pub(super) fn on_answer(&self, status: StatusCode, took_ns: u64) {
        let class = (status.as_u16() / 100).min(5);
        self.answers[class as usize].fetch_add(1, Relaxed);
        let took_s = took_ns as f64 / 1e9;
        let bucket = BOUNDS_S.partition_point(|&bound| bound < took_s);
        self.first_byte[bucket].fetch_add(1, Relaxed);
        self.first_byte_ns.fetch_add(took_ns, Relaxed);
    }
}

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
        rows.extend(urls.iter().map(|(_, engine)| Row::of(engine)));
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::ends::Reported;
    use super::*;

    /// Failures of requests, each of a kind with a counter of its own.
    fn failures() -> Vec<Failure> {
        vec![
            Failure::Refused("refused".into()),
            Failure::Lost("reset".into()),
            Failure::Stalled(Duration::from_secs(1)),
            Failure::Reported(Reported {
                is_clients: false,
                is_busy: false,
                text: "died".into(),
            }),
            Failure::Incomplete("cut off"),
        ]
    }

    #[test]
    fn sums_have_every_counter() {
        let (sum, other) = (Counters::default(), Counters::default());
        for failure in failures() {
            other.on_failure(&failure);
        }
        other.on_answer(StatusCode::OK, 7);
        other.on_stream(3, 9);
        for of in [&other.outliers, &other.bytes, &other.checks] {
            of.fetch_add(5, Relaxed);
        }
        sum.add(&other);
        sum.add(&other);
        let of = |counters: &Counters| counters.each().map(|of| of.load(Relaxed)).sum::<u64>();
        assert!(of(&other) > 0);
        assert_eq!(of(&sum), 2 * of(&other));
        for (name, count, wanted) in [
            ("reported", &sum.reported, 2),
            ("incomplete", &sum.incomplete, 2),
            ("outliers", &sum.outliers, 10),
            ("pieces", &sum.pieces, 6),
            ("stream_ns", &sum.stream_ns, 18),
            ("lost", &sum.lost, 2),
        ] {
            assert_eq!(count.load(Relaxed), wanted, "{name}");
        }
    }

    /// Outliers are found by them.
    #[test]
    fn every_failed_request_is_among_the_totals() {
        for failure in failures() {
            let counters = Counters::default();
            counters.on_failure(&failure);
            assert_eq!(counters.totals().failures, 1, "{failure}");
        }
        let counters = Counters::default();
        counters.on_failure(&Failure::Health("no answer".into()));
        assert_eq!(counters.totals().failures, 0, "no request");
    }
}
