//! Counters of an engine, and of requests that are shared among engines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hyper::StatusCode;

use super::failure::Failure;
use crate::door::budget::ClientUse;

/// Upper bounds of the time to the first byte, s.
pub(super) const BOUNDS_S: [f64; 16] = [
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
pub(super) const PREFILL_OUTCOMES: [&str; 4] =
    ["transferred", "no_params", "failed", "decode_failed"];

/// Counters of an engine, by all shards.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Attempts: a retry counts at each engine.
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
    /// Full blocks of prompts that it was to compute, and leading ones that the router expected in its cache.
    pub(super) prompt_blocks: AtomicU64,
    pub(super) hit_blocks: AtomicU64,
    /// Answers by hundreds of the status.
    pub(super) answers: [AtomicU64; 6],
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
    pub(super) first_byte: [AtomicU64; BOUNDS_S.len() + 1],
    pub(super) first_byte_ns: AtomicU64,
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
            prompt_blocks,
            hit_blocks,
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
            prompt_blocks,
            hit_blocks,
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

    /// Failures, each with its cause.
    pub(super) fn failures(&self) -> [(&'static str, &AtomicU64); 8] {
        [
            ("connect", &self.connect),
            ("lost", &self.lost),
            ("timeout", &self.timeout),
            ("tls", &self.tls),
            ("protocol", &self.protocol),
            ("reported", &self.reported),
            ("incomplete", &self.incomplete),
            ("health", &self.health),
        ]
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
        let of_requests = self.failures().into_iter();
        let of_requests = of_requests.filter(|(cause, _)| *cause != "health");
        let failed: u64 = of_requests.map(|(_, count)| count.load(Relaxed)).sum();
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

/// How a copy ended.
pub(super) const COPY_OUTCOMES: [&str; 3] = ["answered", "error_status", "failed"];

/// Why a copy was not sent.
pub(super) const COPY_DROPS: [&str; 3] = ["no_engine", "limit", "memory"];

/// A reason of [`COPY_DROPS`].
#[derive(Clone, Copy)]
pub(super) enum CopyDrop {
    NoEngine,
    Limit,
    Memory,
}

/// Counters of shares.
#[derive(Debug, Default)]
pub(super) struct TrafficCounts {
    pub(super) dropped: [AtomicU64; COPY_DROPS.len()],
    /// Requests whose pool failed them before a byte, and that were sent to the others.
    pub(super) fallbacks: AtomicU64,
    /// Memory of copies. Clients are not charged for it.
    pub(super) held: Arc<ClientUse>,
}

impl TrafficCounts {
    pub(super) fn drop_copy(&self, why: CopyDrop) {
        self.dropped[why as usize].fetch_add(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::reported::Reported;
    use super::*;

    /// Failures of requests, each of a kind with a counter of its own.
    fn failures() -> Vec<Failure> {
        vec![
            Failure::Refused("refused".into()),
            Failure::Lost("reset".into()),
            Failure::Stalled(Duration::from_secs(1)),
            Failure::Reported(Reported::by_engine("died")),
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
