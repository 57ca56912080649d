//! Time between stages: each gap of one run next to the same gap of another.

use serde::Serialize;
use slipstream_base::Stage;

use crate::drag::DragRecord;
use crate::latency::{Latency, TOO_FEW, enough_samples};
use crate::table::{Table, grouped, number};

/// Gaps between neighboring stages, and their totals, over the requests of a run.
#[derive(Clone, Debug)]
pub struct StageGaps {
    /// By the stage that ends the gap; the first stage ends none.
    gaps: Vec<Latency>,
    /// From the end of a KV transfer to the step of the first token. It is kept apart from the gap
    /// of prompts that were computed at the worker that answers, which ends at the same stage.
    loaded: Latency,
    ttft: Latency,
    rest: Latency,
    requests: u64,
    failed: u64,
}

impl Default for StageGaps {
    fn default() -> Self {
        StageGaps {
            gaps: vec![Latency::default(); Stage::ALL.len()],
            loaded: Latency::default(),
            ttft: Latency::default(),
            rest: Latency::default(),
            requests: 0,
            failed: 0,
        }
    }
}

/// Name of the gap that ends at a stage.
fn what(stage: Stage) -> &'static str {
    match stage {
        Stage::Due => "",
        Stage::Accept => "client to frontend",
        Stage::Parsed => "read and parse",
        Stage::Tokenized => "tokenize and hash",
        Stage::Routed => "route",
        Stage::Dispatched => "dispatch",
        Stage::WorkerRecv => "frontend to worker",
        Stage::Admitted => "wait for admission",
        Stage::Prefilled => "remote prefill",
        Stage::KvSent => "KV transfer setup",
        Stage::KvReceived => "KV transfer",
        Stage::FirstPassStart => "earlier prefill steps",
        Stage::FirstPassEnd => "step of the first token",
        Stage::FrameRecv => "worker to frontend",
        Stage::Rendered => "render",
        Stage::Written => "write",
        Stage::ClientRecv => "frontend to client",
        Stage::LastClientRecv => "later tokens",
    }
}

impl StageGaps {
    /// Counts a request. A stage that was not recorded ends no gap; its time counts in the next
    /// recorded one.
    pub fn add(&mut self, record: &DragRecord) {
        if record.status != "ok" {
            self.failed += 1;
            return;
        }
        self.requests += 1;
        let mut before = None;
        for (index, stage) in Stage::ALL.into_iter().enumerate() {
            let Some(at) = record.times.at(stage) else {
                continue;
            };
            if let Some((from, before)) = before {
                let gap = match (from, stage) {
                    (Stage::KvReceived, Stage::FirstPassStart) => &mut self.loaded,
                    _ => &mut self.gaps[index],
                };
                gap.record(at.saturating_sub(before));
            }
            before = Some((stage, at));
        }
        let between = |from: Stage, to: Stage| {
            let (from, to) = (record.times.at(from)?, record.times.at(to)?);
            Some(to.saturating_sub(from))
        };
        if let Some(ttft) = between(Stage::Due, Stage::ClientRecv) {
            self.ttft.record(ttft);
        }
        if let Some(rest) = between(Stage::ClientRecv, Stage::LastClientRecv) {
            self.rest.record(rest);
        }
    }

    /// Number of answered requests.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Number of failed requests.
    pub fn failed(&self) -> u64 {
        self.failed
    }
}

/// One gap of two runs. Arrays: the first run, the second.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gap {
    /// Its name.
    pub name: &'static str,
    /// Requests with this gap.
    pub count: [u64; 2],
    /// Median, ms; `None` if too few requests have the gap.
    pub p50_ms: [Option<f64>; 2],
    /// 99th percentile, ms; `None` if too few requests have the gap.
    pub p99_ms: [Option<f64>; 2],
    /// Mean of the first run less that of the second, ms.
    pub mean_difference_ms: f64,
    /// This difference as a share of the first run's mean TTFT (or time after the first token).
    pub share: Option<f64>,
}

impl Gap {
    fn new(name: &'static str, runs: [&Latency; 2], of_ms: f64) -> Gap {
        let quantile = |share: f64| {
            runs.map(|latency| {
                let ns = latency.quantile_ns(share);
                let ns = ns.filter(|_| enough_samples(share, latency.count()));
                ns.map(|ns| ns as f64 / 1e6)
            })
        };
        let mean_difference_ms = mean(runs[0]) - mean(runs[1]);
        Gap {
            name,
            count: runs.map(Latency::count),
            p50_ms: quantile(0.5),
            p99_ms: quantile(0.99),
            mean_difference_ms,
            share: (of_ms > 0.0).then(|| mean_difference_ms / of_ms),
        }
    }
}

fn mean(latency: &Latency) -> f64 {
    latency.percentiles().map_or(0.0, |p| p.mean)
}

/// The gaps that requests of either run have, in order.
pub fn gaps(runs: [&StageGaps; 2]) -> Vec<Gap> {
    let [a, b] = runs;
    let ttft = mean(&a.ttft);
    let mut gaps = Vec::new();
    for (index, stage) in Stage::ALL.into_iter().enumerate() {
        if stage == Stage::FirstPassStart {
            gaps.push(Gap::new(
                "wait for the next step",
                [&a.loaded, &b.loaded],
                ttft,
            ));
        }
        if !matches!(stage, Stage::Due | Stage::LastClientRecv) {
            gaps.push(Gap::new(
                what(stage),
                [&a.gaps[index], &b.gaps[index]],
                ttft,
            ));
        }
    }
    gaps.push(Gap::new("TTFT", [&a.ttft, &b.ttft], ttft));
    let rest = [&a.rest, &b.rest];
    gaps.push(Gap::new(what(Stage::LastClientRecv), rest, mean(&a.rest)));
    gaps.retain(|gap| gap.count != [0, 0]);
    gaps
}

/// A table with a row per gap: count, p50 and p99 in both runs, the difference of the means, and
/// its share of the first run's mean TTFT (or of the time after the first token).
pub fn render(names: [&str; 2], runs: [&StageGaps; 2]) -> String {
    let mut table = Table::new([
        "ms".to_owned(),
        "count".to_owned(),
        format!("{} p50", names[0]),
        "p99".to_owned(),
        format!("{} p50", names[1]),
        "p99".to_owned(),
        "mean difference".to_owned(),
        "share".to_owned(),
    ]);
    let cell = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), number);
    for gap in gaps(runs) {
        let share = gap
            .share
            .map(|share| format!("{} %", number(100.0 * share)));
        table.row([
            gap.name.to_owned(),
            grouped(gap.count[0].max(gap.count[1])),
            cell(gap.p50_ms[0]),
            cell(gap.p99_ms[0]),
            cell(gap.p50_ms[1]),
            cell(gap.p99_ms[1]),
            number(gap.mean_difference_ms),
            share.unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    let text = table.render(false);
    if runs.iter().any(|run| !enough_samples(0.99, run.requests)) {
        return format!("{text}{TOO_FEW}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn record(times: &[(Stage, u64)]) -> DragRecord {
        let mut record = DragRecord {
            status: "ok".into(),
            ..DragRecord::default()
        };
        for &(stage, ms) in times {
            record.times.note(stage, ms * MS);
        }
        record
    }

    #[test]
    fn each_gap_is_named_and_they_add_up() {
        let (mut live, mut twin) = (StageGaps::default(), StageGaps::default());
        let live_times = [
            (Stage::Due, 10),
            (Stage::Accept, 13),
            (Stage::WorkerRecv, 14),
            (Stage::FirstPassEnd, 24),
            (Stage::ClientRecv, 30),
            (Stage::LastClientRecv, 130),
        ];
        let twin_times = [
            (Stage::Due, 10),
            (Stage::Accept, 10),
            (Stage::WorkerRecv, 10),
            (Stage::FirstPassEnd, 20),
            (Stage::ClientRecv, 20),
            (Stage::LastClientRecv, 118),
        ];
        for _ in 0..100 {
            live.add(&record(&live_times));
            twin.add(&record(&twin_times));
        }
        let text = render(["live", "twin"], [&live, &twin]);
        let row = |name: &str| {
            let line = text
                .lines()
                .find(|line| line.starts_with(name))
                .unwrap_or_else(|| panic!("{name} in\n{text}"));
            line[name.len()..]
                .split_ascii_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            row("client to frontend"),
            "100 3.00 3.00 0.000 0.000 3.00 15.0 %"
        );
        // Parse, tokenize, route and dispatch are one gap here.
        assert_eq!(
            row("frontend to worker"),
            "100 1.00 1.00 0.000 0.000 1.00 5.00 %"
        );
        assert_eq!(
            row("step of the first token"),
            "100 10.0 10.0 10.0 10.0 0.000 0.000 %"
        );
        assert_eq!(row("TTFT"), "100 20.0 20.0 10.0 10.0 10.0 50.0 %");
        assert_eq!(row("later tokens"), "100 100 100 98.0 98.0 2.00 2.00 %");
        assert!(!text.contains("tokenize"), "{text}");
        assert!(!text.contains("too few"), "{text}");
    }

    #[test]
    fn a_p99_of_few_requests_is_left_out() {
        let mut run = StageGaps::default();
        for _ in 0..99 {
            run.add(&record(&[(Stage::Due, 1), (Stage::ClientRecv, 8)]));
        }
        let text = render(["a", "b"], [&run, &run]);
        let ttft = text.lines().find(|line| line.starts_with("TTFT")).unwrap();
        let cells: Vec<&str> = ttft.split_ascii_whitespace().collect();
        assert_eq!(cells[1..6], ["99", "7.00", "-", "7.00", "-"]);
        assert!(text.ends_with(&format!("{TOO_FEW}\n")), "{text}");
    }

    #[test]
    fn remote_prefill_has_its_own_rows() {
        let mut run = StageGaps::default();
        run.add(&record(&[
            (Stage::Admitted, 10),
            (Stage::Prefilled, 60),
            (Stage::KvSent, 61),
            (Stage::KvReceived, 64),
            (Stage::FirstPassStart, 70),
        ]));
        run.add(&record(&[
            (Stage::Admitted, 10),
            (Stage::FirstPassStart, 30),
        ]));
        let text = render(["a", "b"], [&run, &run]);
        for (name, ms) in [
            ("remote prefill", "50.0"),
            ("KV transfer setup", "1.00"),
            ("KV transfer", "3.00"),
            ("wait for the next step", "6.00"),
            ("earlier prefill steps", "20.0"),
        ] {
            let row = (text.lines()).find(|line| line.starts_with(&format!("{name}  ")));
            let row = row.unwrap_or_else(|| panic!("{name} in\n{text}"));
            let mut cells = row[name.len()..].split_ascii_whitespace();
            assert_eq!((cells.next(), cells.next()), (Some("1"), Some(ms)), "{row}");
        }
    }

    #[test]
    fn failed_requests_are_counted_apart() {
        let mut run = StageGaps::default();
        let mut failed = record(&[(Stage::Due, 1), (Stage::Accept, 2)]);
        failed.status = "http 503".into();
        run.add(&failed);
        assert_eq!((run.requests(), run.failed()), (0, 1));
        assert!(!render(["a", "b"], [&run, &run]).contains("client"));
    }
}
