//! Metrics of engines for `/metrics`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slipstream_base::Role;
use slipstream_base::sync::lock;
use slipstream_metrics::{Collector, Family, Samples};

use super::counters::{BOUNDS_S, COPY_DROPS, COPY_OUTCOMES, Counters, PREFILL_OUTCOMES};
use super::engines::{Engine, Engines};
use super::retired::Row;
use super::stored_answers::OUTCOMES;

/// A collector of the counters of all `engines`.
pub fn collector(engines: Arc<Engines>) -> Box<dyn Collector> {
    slipstream_metrics::collector(engines, Scrape::of, PAGE)
}

/// The engines at one scrape.
struct Scrape {
    engines: Arc<Engines>,
    /// Engines, and those that left.
    rows: Vec<Row>,
    /// Engines that are there.
    present: Vec<(Row, Arc<Engine>)>,
}

impl Scrape {
    fn of(engines: &Arc<Engines>) -> Scrape {
        let present: Vec<_> = engines
            .each()
            .into_iter()
            .map(|of| (of.row(), of))
            .collect();
        let mut rows = lock(&engines.retired).rows();
        rows.extend(present.iter().map(|(row, _)| row.clone()));
        Scrape {
            engines: engines.clone(),
            rows,
            present,
        }
    }

    fn each(&self, samples: &mut Samples<'_>, of: fn(&Counters) -> &AtomicU64) {
        for row in &self.rows {
            samples.add(&[("engine", &row.url)], of(&row.counters).load(Relaxed));
        }
    }

    fn gauge(&self, samples: &mut Samples<'_>, of: fn(&Engine) -> u64) {
        for (row, engine) in &self.present {
            samples.add(&[("engine", &row.url)], of(engine));
        }
    }
}

/// Adds a sample of each of `counts`, whose label `name` has the value of `labels` at its place.
fn add_labeled(
    samples: &mut Samples<'_>,
    row: Option<&Row>,
    name: &str,
    labels: &[&str],
    counts: &[AtomicU64],
) {
    for (label, count) in labels.iter().zip(counts) {
        let own = (name, *label);
        let count = count.load(Relaxed);
        match row {
            Some(row) => samples.add(&[("engine", &row.url), own], count),
            None => samples.add(&[own], count),
        }
    }
}

/// The page, in its order.
const PAGE: &[Family<Scrape>] = &[
    Family::total(
        "slipstream_engines_added",
        "Engines that joined after the start",
        |of: &Scrape| of.engines.added.load(Relaxed),
    ),
    Family::total(
        "slipstream_engines_removed",
        "Engines that left",
        |of: &Scrape| of.engines.removed.load(Relaxed),
    ),
    Family::counter(
        "slipstream_engine_long_events",
        "Events longer than 1 MiB, which were not read",
        |of, samples| of.each(samples, |c| &c.long_events),
    ),
    Family::counter(
        "slipstream_engine_outliers",
        "Ejections because the engine was worse than its peers",
        |of, samples| of.each(samples, |c| &c.outliers),
    ),
    Family::counter(
        "slipstream_engine_requests",
        "Requests sent to the engine; a retry counts at each engine",
        |of, samples| of.each(samples, |c| &c.requests),
    ),
    Family::counter(
        "slipstream_engine_prompt_blocks",
        "Full blocks of the prompts of these requests",
        |of, samples| of.each(samples, |c| &c.prompt_blocks),
    ),
    Family::counter(
        "slipstream_engine_prefix_hit_blocks",
        "Leading blocks of these prompts that the router expected in the engine's cache",
        |of, samples| of.each(samples, |c| &c.hit_blocks),
    ),
    Family::counter(
        "slipstream_engine_retries",
        "Requests that were sent to another engine after this one failed them",
        |of, samples| of.each(samples, |c| &c.retried),
    ),
    Family::counter(
        "slipstream_engine_streams_resumed",
        "Streams that continued on another engine after this one was lost",
        |of, samples| of.each(samples, |c| &c.resumed),
    ),
    Family::counter(
        "slipstream_engine_answers_broken",
        "Answers that broke off, and that no other engine continued",
        |of, samples| of.each(samples, |c| &c.broken),
    ),
    Family::counter(
        "slipstream_engine_health_checks",
        "Questions of health checks",
        |of, samples| of.each(samples, |c| &c.checks),
    ),
    Family::counter(
        "slipstream_engine_ejections",
        "Times that the engine got no requests because it failed too many",
        |of, samples| of.each(samples, |c| &c.ejections),
    ),
    Family::counter(
        "slipstream_engine_ejections_suppressed",
        "Failures that did not eject the engine because no other one was left",
        |of, samples| of.each(samples, |c| &c.ejections_suppressed),
    ),
    Family::counter(
        "slipstream_engine_answer_bytes",
        "Bytes of answers' bodies",
        |of, samples| of.each(samples, |c| &c.bytes),
    ),
    Family::counter(
        "slipstream_engine_answers",
        "Answers by status",
        |of, samples| {
            const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];
            for row in &of.rows {
                let counts = &row.counters.answers[1..];
                add_labeled(samples, Some(row), "status", &CLASSES, counts);
            }
        },
    ),
    Family::counter(
        "slipstream_engine_failures",
        "Failures by cause",
        |of, samples| {
            for row in &of.rows {
                for (cause, count) in row.counters.failures() {
                    let labels = [("engine", row.url.as_str()), ("cause", cause)];
                    samples.add(&labels, count.load(Relaxed));
                }
            }
        },
    ),
    Family::counter(
        "slipstream_engine_prefills",
        "Prompts that the engine was to compute for another one, by their end",
        |of: &Scrape, samples| {
            for row in of.rows.iter().filter(|row| row.role == Role::Prefill) {
                let counts = &row.counters.prefills;
                add_labeled(samples, Some(row), "outcome", &PREFILL_OUTCOMES, counts);
            }
        },
    )
    .only_if(|of| of.engines.disaggregates()),
    Family::total(
        "slipstream_pool_fallbacks",
        "Requests that the pool of their weight failed, and that were sent to the others",
        |of: &Scrape| of.engines.traffic_counts.fallbacks.load(Relaxed),
    )
    .only_if(|of| of.engines.is_weighted.load(Relaxed)),
    Family::counter(
        "slipstream_engine_mirrored",
        "Copies of requests that the engine got, by their end",
        |of: &Scrape, samples| {
            for row in of.rows.iter().filter(|row| row.is_mirror) {
                let counts = &row.counters.copies;
                add_labeled(samples, Some(row), "outcome", &COPY_OUTCOMES, counts);
            }
        },
    )
    .only_if(|of| of.engines.has_mirrors.load(Relaxed)),
    Family::counter(
        "slipstream_mirror_dropped",
        "Copies of requests that were not sent",
        |of: &Scrape, samples| {
            let counts = &of.engines.traffic_counts.dropped;
            add_labeled(samples, None, "reason", &COPY_DROPS, counts);
        },
    )
    .only_if(|of| of.engines.has_mirrors.load(Relaxed)),
    Family::counter(
        "slipstream_engine_stored_responses",
        "Requests that name a stored response, by how its engine was found",
        |of, samples| {
            let counts = &of.engines.stored.outcomes;
            add_labeled(samples, None, "engine_was", &OUTCOMES, counts);
        },
    ),
    Family::counter(
        "slipstream_engine_prompts",
        "Prompts that were compared with the engines' KV events as tokens, and others as text",
        |of: &Scrape, samples| {
            add_labeled(
                samples,
                None,
                "as",
                &["tokens", "text"],
                &of.engines.prompts,
            );
        },
    )
    .only_if(|of| of.engines.tokenized.is_some()),
    Family::gauge(
        "slipstream_engine_in_flight",
        "Requests at the engine",
        |of, samples| of.gauge(samples, |engine| engine.counters.in_flight.load(Relaxed)),
    ),
    Family::gauge(
        "slipstream_engine_up",
        "Whether the engine takes requests",
        |of, samples| of.gauge(samples, |engine| engine.takes_requests().into()),
    ),
    Family::gauge(
        "slipstream_engine_expected",
        "Whether the engine is to take clients' requests: it is no mirror, and is not drained",
        |of, samples| {
            of.gauge(samples, |engine| {
                (!engine.is_mirror() && !engine.is_draining()).into()
            });
        },
    ),
    Family::histogram(
        "slipstream_engine_first_byte_seconds",
        "From sending a request to the first byte of its answer",
        |of, samples| {
            for row in &of.rows {
                let counters = &row.counters;
                let counts = counters.first_byte.iter().map(|count| count.load(Relaxed));
                let bounds = BOUNDS_S.iter().copied().chain([f64::INFINITY]);
                let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
                let sum_s = counters.first_byte_ns.load(Relaxed) as f64 / 1e9;
                samples.add_histogram(&[("engine", &row.url)], sum_s, &buckets);
            }
        },
    ),
];
