//! Measurements of a run in progress: histograms and counts, one set per thread, added up at the
//! end.

use std::collections::BTreeMap;

use crate::latency::Latency;
use crate::run::{ErrorCount, Goodput, Latencies, RequestCounts, Throughput, TokenCounts};

use crate::objectives::Objectives;
use crate::overload::{Backlog, Overload};
use crate::run::ClassReport;
use crate::series::{Ended, Series};
use slipstream_base::slo::Shown;
use slipstream_base::width;

/// Times of one request as its answer arrives, ns of `CLOCK_MONOTONIC`.
///
/// Tokens that arrive in one read share its time: the gaps between them are 0, as the reading
/// program measures them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// When it was due.
    pub due: u64,
    /// When it was written to the socket; 0: not yet.
    pub sent: u64,
    /// When the first text arrived; 0: not yet.
    pub first: u64,
    /// When the last text arrived; 0: not yet.
    pub last: u64,
    /// Longest gap between two events with text.
    pub gap_max: u64,
}

impl Timeline {
    /// A request that was due at `due`.
    pub fn new(due: u64) -> Timeline {
        Timeline {
            due,
            sent: 0,
            first: 0,
            last: 0,
            gap_max: 0,
        }
    }

    /// Counts `events` events with text, read together at `now`; gaps are added to `itl`.
    pub fn on_events(&mut self, events: u64, now: u64, itl: &mut Latency) {
        if events == 0 {
            return;
        }
        let together = if self.first == 0 {
            self.first = now;
            events - 1
        } else {
            let gap = now.saturating_sub(self.last);
            self.gap_max = self.gap_max.max(gap);
            itl.record(gap);
            events - 1
        };
        itl.record_n(0, together);
        self.last = now;
    }

    /// Latencies of the request, with `output_tokens` in `events` events.
    pub fn shown(&self, output_tokens: u64, events: u64) -> Shown {
        let after_first = self.last.saturating_sub(self.first);
        let over = |count: u64| {
            after_first
                .checked_div(count.saturating_sub(1))
                .unwrap_or(0)
        };
        Shown {
            ttft: self.first.saturating_sub(self.due),
            itl: over(events),
            itl_max: self.gap_max,
            tpot: over(output_tokens),
            e2e: self.last.saturating_sub(self.due),
        }
    }
}

/// An answered request.
#[derive(Clone, Copy, Debug)]
pub struct Answered {
    /// Its times.
    pub timeline: Timeline,
    /// Prompt tokens, by the server's count or the workload's.
    pub input_tokens: u64,
    /// Answer tokens, by the server's count or one per event.
    pub output_tokens: u64,
    /// Prompt tokens found cached, if the server reports them.
    pub cached_tokens: Option<u64>,
    /// Events with text.
    pub events: u64,
    /// Whether tokens arrived one by one, so that gaps and TPOT are meaningful.
    pub streamed: bool,
    /// Its class, as an index into those of the workload.
    pub class: u32,
}

/// A request that failed.
#[derive(Clone, Copy, Debug)]
pub struct Failed<'a> {
    /// Its category.
    pub kind: &'a str,
    /// Its message.
    pub example: &'a str,
    /// Its class, as an index into those of the workload.
    pub class: u32,
}

/// The latencies of a run, as histograms.
#[derive(Clone, Debug, Default)]
pub struct Distributions {
    /// From due time to first token.
    pub ttft: Latency,
    /// Gaps between tokens.
    pub itl: Latency,
    /// (E2E − TTFT) / (OSL − 1).
    pub tpot: Latency,
    /// From due time to last token.
    pub e2e: Latency,
}

/// Totals over requests.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Gaps between tokens, recorded while answers arrive.
    pub itl: Latency,
    ttft: Latency,
    tpot: Latency,
    e2e: Latency,
    send_lag: Latency,
    /// Requests counted.
    pub requests: RequestCounts,
    /// Failures by category.
    pub errors: BTreeMap<String, ErrorCount>,
    tokens: TokenCounts,
    met: u64,
    first_due: Option<u64>,
    last_end: u64,
    /// By class, if the objectives name any.
    classes: Vec<ClassTotals>,
    backlog: Backlog,
    /// The run over time, if recorded.
    pub series: Option<Box<Series>>,
}

/// Totals over the requests of a class.
#[derive(Clone, Debug, Default)]
struct ClassTotals {
    ttft: Latency,
    itl: Latency,
    tpot: Latency,
    e2e: Latency,
    succeeded: u64,
    failed: u64,
    input_tokens: u64,
    output_tokens: u64,
    met: u64,
}

impl ClassTotals {
    fn add(&mut self, other: &ClassTotals) {
        self.ttft.add(&other.ttft);
        self.itl.add(&other.itl);
        self.tpot.add(&other.tpot);
        self.e2e.add(&other.e2e);
        self.succeeded += other.succeeded;
        self.failed += other.failed;
        self.input_tokens += other.input_tokens;
        self.output_tokens += other.output_tokens;
        self.met += other.met;
    }
}

impl Totals {
    /// Counts a request that was answered.
    pub fn on_answered(&mut self, answered: &Answered, objectives: &Objectives) {
        let t = &answered.timeline;
        self.on_ended(t, t.last);
        self.requests.succeeded += 1;
        let shown = t.shown(answered.output_tokens, answered.events);
        self.ttft.record(shown.ttft);
        self.e2e.record(shown.e2e);
        self.backlog.on_answered(t.due, shown.ttft, shown.e2e);
        let has_tpot = answered.streamed && answered.output_tokens > 1;
        if has_tpot {
            self.tpot.record(shown.tpot);
        }
        self.tokens.input += answered.input_tokens;
        self.tokens.output += answered.output_tokens;
        self.tokens.events += answered.events;
        if let Some(cached) = answered.cached_tokens {
            *self.tokens.cached.get_or_insert(0) += cached;
        }
        let met = u64::from(objectives.are_met(answered.class, &shown));
        self.met += met;
        if !objectives.classes.is_empty() {
            let class = self.class(answered.class);
            class.ttft.record(shown.ttft);
            class.e2e.record(shown.e2e);
            if has_tpot {
                class.tpot.record(shown.tpot);
            }
            class.succeeded += 1;
            class.input_tokens += answered.input_tokens;
            class.output_tokens += answered.output_tokens;
            class.met += met;
        }
        if let Some(series) = &mut self.series {
            series.on_request(&Ended {
                due: t.due,
                first: t.first,
                last: t.last,
                input_tokens: answered.input_tokens,
                cached_tokens: answered.cached_tokens.unwrap_or(0),
                output_tokens: answered.output_tokens,
                ok: true,
            });
        }
    }

    fn class(&mut self, class: u32) -> &mut ClassTotals {
        let at = class as usize;
        if at >= self.classes.len() {
            self.classes.resize_with(at + 1, ClassTotals::default);
        }
        &mut self.classes[at]
    }

    /// Adds `count` gaps of `ns` between tokens of a class that the objectives name.
    /// [`itl`](Self::itl) counts them separately.
    pub fn on_class_gaps(&mut self, class: u32, ns: u64, count: u64) {
        self.class(class).itl.record_n(ns, count);
    }

    /// The same for gaps of several lengths, `count` of each.
    pub fn on_class_gaps_each(
        &mut self,
        class: u32,
        gaps_ns: impl IntoIterator<Item = u64>,
        count: u64,
    ) {
        self.class(class).itl.record_each(gaps_ns, count);
    }

    /// Counts `events` events with text of one request, read together at `now`. `class`: its class,
    /// if the objectives name any.
    pub fn on_events(
        &mut self,
        timeline: &mut Timeline,
        events: u64,
        now: u64,
        class: Option<u32>,
    ) {
        let before = (timeline.first > 0).then_some(timeline.last);
        timeline.on_events(events, now, &mut self.itl);
        if let (Some(class), 1..) = (class, events) {
            if let Some(before) = before {
                self.on_class_gaps(class, now.saturating_sub(before), 1);
            }
            self.on_class_gaps(class, 0, events - 1);
        }
        if let (Some(series), 1..) = (&mut self.series, events) {
            if let Some(before) = before {
                series.on_gaps(now, now.saturating_sub(before), 1);
            }
            series.on_gaps(now, 0, events - 1);
        }
    }

    /// Counts a request that failed at `now`.
    pub fn on_failed(
        &mut self,
        timeline: &Timeline,
        failed: &Failed<'_>,
        now: u64,
        objectives: &Objectives,
    ) {
        self.on_ended(timeline, now);
        self.requests.failed += 1;
        self.count_error(failed.kind, 1, failed.example);
        if !objectives.classes.is_empty() {
            self.class(failed.class).failed += 1;
        }
        if let Some(series) = &mut self.series {
            series.on_request(&Ended {
                due: timeline.due,
                first: now,
                last: now,
                input_tokens: 0,
                cached_tokens: 0,
                output_tokens: 0,
                ok: false,
            });
        }
    }

    fn count_error(&mut self, kind: &str, count: u64, example: &str) {
        if let Some(error) = self.errors.get_mut(kind) {
            error.count += count;
        } else {
            let example = example.to_owned();
            self.errors
                .insert(kind.to_owned(), ErrorCount { count, example });
        }
    }

    fn on_ended(&mut self, timeline: &Timeline, end: u64) {
        self.requests.sent += 1;
        if timeline.sent > 0 {
            self.send_lag
                .record(timeline.sent.saturating_sub(timeline.due));
        }
        let first = self.first_due.map_or(timeline.due, |f| f.min(timeline.due));
        self.first_due = Some(first);
        self.last_end = self.last_end.max(end);
    }

    /// Adds all of `other`.
    pub fn add(&mut self, other: &Totals) {
        for (mine, theirs) in [
            (&mut self.itl, &other.itl),
            (&mut self.ttft, &other.ttft),
            (&mut self.tpot, &other.tpot),
            (&mut self.e2e, &other.e2e),
            (&mut self.send_lag, &other.send_lag),
        ] {
            mine.add(theirs);
        }
        let (mine, theirs) = (&mut self.requests, &other.requests);
        mine.sent += theirs.sent;
        mine.succeeded += theirs.succeeded;
        mine.failed += theirs.failed;
        mine.warmup += theirs.warmup;
        mine.abandoned += theirs.abandoned;
        mine.unfinished += theirs.unfinished;
        // Every thread reads the whole trace and finds the same bad lines.
        mine.skipped_lines = mine.skipped_lines.max(theirs.skipped_lines);
        mine.retries += theirs.retries;
        for (kind, error) in &other.errors {
            self.count_error(kind, error.count, &error.example);
        }
        self.tokens.input += other.tokens.input;
        self.tokens.output += other.tokens.output;
        self.tokens.events += other.tokens.events;
        if let Some(cached) = other.tokens.cached {
            *self.tokens.cached.get_or_insert(0) += cached;
        }
        self.met += other.met;
        self.backlog.add(&other.backlog);
        self.first_due = match (self.first_due, other.first_due) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.last_end = self.last_end.max(other.last_end);
        for (index, class) in other.classes.iter().enumerate() {
            self.class(width::to_u32(index)).add(class);
        }
        match (&mut self.series, &other.series) {
            (Some(mine), Some(theirs)) => mine.add(theirs),
            (mine @ None, Some(theirs)) => *mine = Some(theirs.clone()),
            (_, None) => {}
        }
    }

    /// From the first due time to the last end, s.
    pub fn duration_s(&self) -> f64 {
        let from = self.first_due.unwrap_or(self.last_end);
        self.last_end.saturating_sub(from) as f64 / 1e9
    }

    /// Counts of tokens.
    pub fn tokens(&self) -> TokenCounts {
        self.tokens
    }

    /// Rates over the duration.
    pub fn throughput(&self) -> Throughput {
        Throughput {
            requests_per_s: self.per_s(self.requests.succeeded),
            input_tokens_per_s: self.per_s(self.tokens.input),
            output_tokens_per_s: self.per_s(self.tokens.output),
        }
    }

    /// Percentiles.
    pub fn latencies(&self) -> Latencies {
        Latencies {
            ttft_ms: self.ttft.percentiles(),
            itl_ms: self.itl.percentiles(),
            tpot_ms: self.tpot.percentiles(),
            e2e_ms: self.e2e.percentiles(),
            send_lag_ms: self.send_lag.percentiles(),
        }
    }

    /// The latencies behind the percentiles.
    pub fn distributions(&self) -> Distributions {
        Distributions {
            ttft: self.ttft.clone(),
            itl: self.itl.clone(),
            tpot: self.tpot.clone(),
            e2e: self.e2e.clone(),
        }
    }

    /// Whether requests came faster than they were answered, until they stopped. Means nothing for closed loops.
    pub fn overload(&self) -> Option<Overload> {
        self.backlog.overload()
    }

    /// Requests that met their objectives; `None` if there are no objectives.
    pub fn goodput(&self, objectives: &Objectives) -> Option<Goodput> {
        objectives.are_stated().then(|| Goodput {
            slo: objectives.to_string(),
            met: self.met,
            share: self.met as f64 / self.requests.sent.max(1) as f64,
            requests_per_s: self.per_s(self.met),
        })
    }

    /// Requests per second that met all of their objectives; without objectives, answered requests
    /// per second.
    pub fn goodput_per_s(&self) -> f64 {
        self.per_s(self.met)
    }

    /// Each class that the objectives name.
    pub fn class_reports(&self, objectives: &Objectives) -> Vec<ClassReport> {
        let named = objectives.classes.iter().enumerate();
        named
            .map(|(index, (name, _))| {
                let none = ClassTotals::default();
                let class = self.classes.get(index).unwrap_or(&none);
                let sent = class.succeeded + class.failed;
                ClassReport {
                    name: name.clone(),
                    sent,
                    succeeded: class.succeeded,
                    failed: class.failed,
                    input_tokens: class.input_tokens,
                    output_tokens: class.output_tokens,
                    ttft_ms: class.ttft.percentiles(),
                    itl_ms: class.itl.percentiles(),
                    tpot_ms: class.tpot.percentiles(),
                    e2e_ms: class.e2e.percentiles(),
                    goodput: objectives
                        .of_class(width::to_u32(index))
                        .map(|slo| Goodput {
                            slo: slo.to_string(),
                            met: class.met,
                            share: class.met as f64 / sent.max(1) as f64,
                            requests_per_s: self.per_s(class.met),
                        }),
                }
            })
            .collect()
    }

    /// The requests of `part`, which are some of these.
    pub fn part_report(&self, name: &str, part: &Totals, objectives: &Objectives) -> ClassReport {
        let latency = part.latencies();
        let goodput = part.goodput(objectives);
        ClassReport {
            name: name.to_owned(),
            sent: part.requests.sent,
            succeeded: part.requests.succeeded,
            failed: part.requests.failed,
            input_tokens: part.tokens.input,
            output_tokens: part.tokens.output,
            ttft_ms: latency.ttft_ms,
            itl_ms: latency.itl_ms,
            tpot_ms: latency.tpot_ms,
            e2e_ms: latency.e2e_ms,
            goodput: goodput.map(|goodput| Goodput {
                requests_per_s: self.per_s(goodput.met),
                ..goodput
            }),
        }
    }

    fn per_s(&self, count: u64) -> f64 {
        let duration = self.duration_s();
        if duration > 0.0 {
            count as f64 / duration
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(due: u64, events: &[(u64, u64)]) -> (Answered, Latency) {
        let mut itl = Latency::default();
        let mut timeline = Timeline::new(due);
        timeline.sent = due + 1;
        for &(count, at) in events {
            timeline.on_events(count, at, &mut itl);
        }
        let tokens = events.iter().map(|e| e.0).sum();
        let answered = Answered {
            timeline,
            input_tokens: 10,
            output_tokens: tokens,
            cached_tokens: Some(4),
            events: tokens,
            streamed: true,
            class: 0,
        };
        (answered, itl)
    }

    const MS: u64 = 1_000_000;

    #[test]
    fn tokens_of_one_read_share_its_time() {
        let (a, itl) = answered(0, &[(1, 100 * MS), (3, 130 * MS), (1, 140 * MS)]);
        assert_eq!(itl.count(), 4); // 30, 0, 0, 10
        assert_eq!(itl.quantile_ns(0.5), Some(0));
        let shown = a.timeline.shown(5, 5);
        assert_eq!(
            (shown.ttft, shown.tpot, shown.itl_max, shown.e2e),
            (100 * MS, 10 * MS, 30 * MS, 140 * MS)
        );
    }

    #[test]
    fn two_threads_add_up() {
        let slo = Objectives::from("ttft=100ms".parse::<slipstream_base::Slo>().unwrap());
        let (mut a, mut b) = (Totals::default(), Totals::default());
        a.on_answered(&answered(0, &[(1, 50 * MS), (1, 100 * MS)]).0, &slo);
        b.on_answered(&answered(0, &[(1, 500 * MS)]).0, &slo);
        let failed = Failed {
            kind: "http 503",
            example: "busy",
            class: 0,
        };
        b.on_failed(&Timeline::new(5), &failed, 1_000 * MS, &slo);
        a.add(&b);
        assert_eq!(
            (a.requests.sent, a.requests.succeeded, a.requests.failed),
            (3, 2, 1)
        );
        assert_eq!(a.duration_s(), 1.0);
        assert_eq!(a.throughput().requests_per_s, 2.0);
        assert_eq!(a.tokens().cached, Some(8));
        assert_eq!(
            (a.goodput(&slo).unwrap().met, a.errors["http 503"].count),
            (1, 1)
        );
        // One token has no gap, so one TPOT only.
        assert_eq!(a.latencies().tpot_ms.unwrap().count, 1);
        assert!(a.class_reports(&slo).is_empty());
    }

    #[test]
    fn each_class_is_held_to_its_own_objectives() {
        let slo = |text: &str| text.parse::<slipstream_base::Slo>().unwrap();
        let objectives = Objectives {
            all: Some(slo("ttft=60ms")),
            classes: vec![
                ("chat".into(), None),
                ("batch".into(), Some(slo("e2e=10s"))),
                ("none came".into(), None),
            ],
        };
        let (mut a, mut b) = (Totals::default(), Totals::default());
        for (class, first) in [(0, 50), (0, 70), (1, 9_000)] {
            let totals = if class == 0 { &mut a } else { &mut b };
            let (mut answered, _) = answered(0, &[(1, first * MS)]);
            answered.class = class;
            totals.on_answered(&answered, &objectives);
        }
        let failed = Failed {
            kind: "timeout",
            example: "",
            class: 1,
        };
        b.on_failed(&Timeline::new(0), &failed, 10_000 * MS, &objectives);
        a.add(&b);
        assert_eq!(a.goodput(&objectives).unwrap().met, 2);
        assert_eq!(a.goodput_per_s(), 0.2);
        let reports = a.class_reports(&objectives);
        let seen: Vec<_> = reports
            .iter()
            .map(|r| {
                (
                    r.sent,
                    r.failed,
                    r.goodput.as_ref().map(|g| (g.met, g.share)),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                (2, 0, Some((1, 0.5))),
                (2, 1, Some((1, 0.5))),
                (0, 0, Some((0, 0.0)))
            ]
        );
        assert_eq!(reports[1].ttft_ms.unwrap().p50, 9_000.0);
        assert_eq!(objectives.to_string(), "batch: e2e=10s; ttft=60ms");
    }
}
