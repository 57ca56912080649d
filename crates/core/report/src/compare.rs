//! Two or more runs next to each other, with each one's ratio to the first.

use crate::latency::{P50, P99, Percentiles, Quantile};
use crate::run::RunReport;
use crate::table::{Table, Tone, grouped, number};
use slipstream_base::text::foreign;
use slipstream_base::width;

/// Whether a larger or a smaller figure is better.
#[derive(Clone, Copy)]
enum Good {
    Less,
    More,
}

type Figure = (&'static str, Good, fn(&RunReport) -> Option<f64>);

fn percentile(p: Option<Percentiles>, quantile: Quantile) -> Option<f64> {
    p.and_then(|p| p.at(quantile))
}

/// The rows, in reading order.
const FIGURES: &[Figure] = &[
    ("TTFT p50, ms", Good::Less, |r| {
        percentile(r.latency.ttft_ms, P50)
    }),
    ("TTFT p99, ms", Good::Less, |r| {
        percentile(r.latency.ttft_ms, P99)
    }),
    ("ITL p50, ms", Good::Less, |r| {
        percentile(r.latency.itl_ms, P50)
    }),
    ("ITL p99, ms", Good::Less, |r| {
        percentile(r.latency.itl_ms, P99)
    }),
    ("TPOT p50, ms", Good::Less, |r| {
        percentile(r.latency.tpot_ms, P50)
    }),
    ("E2E p50, ms", Good::Less, |r| {
        percentile(r.latency.e2e_ms, P50)
    }),
    ("E2E p99, ms", Good::Less, |r| {
        percentile(r.latency.e2e_ms, P99)
    }),
    ("requests/s", Good::More, |r| {
        Some(r.throughput.requests_per_s)
    }),
    ("output tokens/s", Good::More, |r| {
        Some(r.throughput.output_tokens_per_s)
    }),
    ("goodput, requests/s", Good::More, |r| {
        r.goodput.as_ref().map(|g| g.requests_per_s)
    }),
    ("prefix hits, % of input", Good::More, |r| {
        r.prefix_hit_share().map(|s| s * 100.0)
    }),
    ("preemptions", Good::Less, |r| {
        r.engine.and_then(|e| e.preemptions)
    }),
    ("requests failed", Good::Less, |r| {
        Some(r.requests.failed as f64)
    }),
    ("duration, s", Good::Less, |r| Some(r.duration_s)),
    ("server CPU, µs per token", Good::Less, |r| {
        r.server.map(|s| s.cpu_us_per_token)
    }),
    ("server CPU, µs per request", Good::Less, |r| {
        r.server.map(|s| s.cpu_us_per_request)
    }),
];

/// Rows that are whole numbers.
const COUNTS: [&str; 2] = ["preemptions", "requests failed"];

/// A change below this share is not colored: the histograms' own precision is 0.1 %, and runs on a
/// shared machine differ by more.
const NOTABLE: f64 = 0.02;

/// Meaning of the column next to each further run.
#[derive(Clone, Copy)]
enum Column {
    /// Its figure over that of the first run.
    Ratio,
    /// How many times better its figure is than that of the first run: above 1 is better in all rows.
    Gain,
}

/// A table with a column per run. Ratios are to the first run; `color` as in [`Table::render`].
///
/// Rows that no run measured are omitted.
pub fn render(runs: &[RunReport], color: bool) -> String {
    table(runs, color, Column::Ratio)
}

/// As [`render`], but with how many times better than in the first run each figure is: 2 for half the
/// latency and for twice the throughput.
pub fn render_gains(runs: &[RunReport], color: bool) -> String {
    table(runs, color, Column::Gain)
}

fn table(runs: &[RunReport], color: bool, column: Column) -> String {
    let Some(first) = runs.first() else {
        return String::new();
    };
    let mut header = vec![String::new(), foreign(&first.label).into_owned()];
    for run in &runs[1..] {
        header.push(foreign(&run.label).into_owned());
        header.push(match column {
            Column::Ratio => "ratio".to_owned(),
            Column::Gain => "better by".to_owned(),
        });
    }
    let mut table = Table::new(header);
    for (name, good, figure) in FIGURES {
        let values: Vec<Option<f64>> = runs.iter().map(figure).collect();
        if values.iter().all(Option::is_none) {
            continue;
        }
        let shown = |value: Option<f64>| match value {
            None => "-".to_owned(),
            Some(count) if COUNTS.contains(name) => grouped(width::round_u64(count)),
            Some(value) => number(value),
        };
        let mut row = vec![
            ((*name).to_owned(), Tone::Plain),
            (shown(values[0]), Tone::Plain),
        ];
        for &value in &values[1..] {
            row.push((shown(value), Tone::Plain));
            let (from, to) = match (column, good) {
                (Column::Gain, Good::Less) => (value, values[0]),
                (Column::Gain, Good::More) | (Column::Ratio, _) => (values[0], value),
            };
            // A gain above 1 is good, whatever the figure.
            let good = match column {
                Column::Ratio => *good,
                Column::Gain => Good::More,
            };
            row.push(ratio(good, from, to));
        }
        table.toned_row(row);
    }
    table.render(color)
}

fn ratio(good: Good, first: Option<f64>, value: Option<f64>) -> (String, Tone) {
    match (first, value) {
        (Some(first), Some(value)) if first == value && first != 0.0 => {
            ("1.00×".to_owned(), Tone::Plain)
        }
        (Some(first), Some(value)) if first != 0.0 => {
            let ratio = value / first;
            let tone = match good {
                _ if (ratio - 1.0).abs() < NOTABLE => Tone::Plain,
                Good::Less if ratio < 1.0 => Tone::Better,
                Good::More if ratio > 1.0 => Tone::Better,
                Good::Less | Good::More => Tone::Worse,
            };
            (format!("{}×", number(ratio)), tone)
        }
        _ => ("-".to_owned(), Tone::Plain),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_runs_side_by_side() {
        let kv = crate::run::tests::sample();
        let mut round_robin = kv.clone();
        round_robin.label = "round robin".into();
        round_robin.throughput.output_tokens_per_s /= 2.0;
        round_robin.latency.ttft_ms.as_mut().unwrap().p50 *= 4.0;
        round_robin.tokens.cached = Some(128_000);
        round_robin.goodput = None;
        insta::assert_snapshot!(render(&[kv, round_robin], false));
    }

    #[test]
    fn gains_point_one_way() {
        let slow = crate::run::tests::sample();
        let mut fast = slow.clone();
        fast.label = "fast".into();
        fast.latency.ttft_ms.as_mut().unwrap().p50 /= 4.0;
        fast.throughput.output_tokens_per_s *= 2.0;
        let text = render_gains(&[slow, fast], false);
        let gain = |row: &str| {
            let line = text.lines().find(|line| line.starts_with(row)).unwrap();
            line.split_whitespace().last().unwrap().to_owned()
        };
        assert_eq!(gain("TTFT p50"), "4.00×", "{text}");
        assert_eq!(gain("output tokens/s"), "2.00×", "{text}");
    }

    #[test]
    fn tones_follow_what_is_good() {
        assert_eq!(ratio(Good::Less, Some(2.0), Some(1.0)).1, Tone::Better);
        assert_eq!(ratio(Good::More, Some(2.0), Some(1.0)).1, Tone::Worse);
        assert_eq!(ratio(Good::More, Some(2.0), Some(2.01)).1, Tone::Plain);
        assert_eq!(ratio(Good::Less, Some(0.0), Some(2.0)).0, "-");
        assert_eq!(ratio(Good::Less, Some(0.0), Some(0.0)).0, "-");
    }
}
