//! Charts of a run over time.

use slipstream_base::width;

use crate::html::chart::{Axis, Chart, Line, Shape};
use crate::html::{Page, escape};
use crate::series::{Bin, EngineBin, Series, Sketch};
use crate::table::number;

/// Limit of points of a line over time.
pub(super) const POINTS_MAX: usize = 240;
/// Mean number of requests per point of a percentile over time, at least.
const REQUESTS_A_POINT: u64 = 40;
/// Limit of named events.
const EVENTS_MAX: usize = 40;

/// The unit of a time span, and its length in s.
pub(super) fn unit_of(seconds: f64) -> (&'static str, f64) {
    match seconds {
        s if s >= 4.0 * 3600.0 => ("h", 3600.0),
        s if s >= 600.0 => ("min", 60.0),
        _ => ("s", 1.0),
    }
}

/// Bins merged so that at most `points` are left; and the width of each, s.
pub(super) fn joined(series: &Series, points: usize) -> (Vec<Bin>, f64) {
    let bins = series.bins();
    let group = bins.len().div_ceil(points.max(1)).max(1);
    let wide = bins
        .chunks(group)
        .map(|bins| {
            let mut wide = bins[0].clone();
            bins[1..].iter().for_each(|bin| wide.add(bin));
            wide
        })
        .collect();
    (wide, group as f64 * series.width_ns() as f64 / 1e9)
}

/// Section of the charts over time, with `events` as marks.
pub(super) fn over_time(page: &mut Page, series: &Series, events: &[(f64, String)]) {
    let timeline = Timeline::new(series);
    page.section(
        "Over time",
        &format!(
            "A point covers {} s; a point of a percentile covers enough time for about {REQUESTS_A_POINT} requests or more \
             (of fewer than 100 samples p99 is the largest).",
            number(timeline.width_s)
        ),
    );
    let mut charts = vec![
        timeline.percentiles("TTFT, by when the request was due", "TTFT", |bin| &bin.ttft),
        timeline.percentiles("ITL, by when the token came", "ITL", |bin| &bin.itl),
        timeline.requests(),
        timeline.tokens(),
    ];
    charts.extend(timeline.prefix_hits());
    if series.has_passes() {
        charts.extend([timeline.sequences(), timeline.occupancy(), batch(series)]);
    }
    timeline.mark(page, &mut charts, events);
    page.charts(charts.iter().map(Chart::render));
}

/// A series in as many points as a chart shows.
struct Timeline<'a> {
    series: &'a Series,
    bins: Vec<Bin>,
    /// Of a bin.
    width_s: f64,
    /// Bins with enough requests for percentiles.
    sparse: Vec<Bin>,
    sparse_width_s: f64,
    /// Unit of the axis of time, and its length.
    unit: &'static str,
    unit_s: f64,
}

impl<'a> Timeline<'a> {
    fn new(series: &'a Series) -> Timeline<'a> {
        let (bins, width_s) = joined(series, POINTS_MAX);
        let requests: u64 = series.bins().iter().map(|bin| bin.due).sum();
        let points = width::to_usize((requests / REQUESTS_A_POINT).clamp(8, POINTS_MAX as u64));
        let (sparse, sparse_width_s) = joined(series, points);
        let (unit, unit_s) = unit_of(length_s(series));
        Timeline {
            series,
            bins,
            width_s,
            sparse,
            sparse_width_s,
            unit,
            unit_s,
        }
    }

    fn at(&self, index: usize, width_s: f64) -> f64 {
        (index as f64 + 0.5) * width_s / self.unit_s
    }

    fn line(&self, name: &str, value: impl Fn(&Bin) -> Option<f64>) -> Line {
        let bins = self.bins.iter().enumerate();
        let points = bins.map(|(index, bin)| (self.at(index, self.width_s), value(bin)));
        Line::new(name, points)
    }

    fn rate(&self, name: &str, count: impl Fn(&Bin) -> u64) -> Line {
        self.line(name, |bin| Some(count(bin) as f64 / self.width_s))
    }

    fn sparse_line(&self, name: &str, value: impl Fn(&Bin) -> Option<f64>) -> Line {
        let bins = self.sparse.iter().enumerate();
        let points = bins.map(|(index, bin)| (self.at(index, self.sparse_width_s), value(bin)));
        Line::new(name, points)
    }

    fn chart(&self, title: &str, y: Axis, lines: Vec<Line>) -> Chart {
        Chart {
            title: title.into(),
            x: Axis::new("time", self.unit),
            y,
            lines,
            ..Chart::default()
        }
    }

    fn percentiles(&self, title: &str, name: &str, of: impl Fn(&Bin) -> &Sketch) -> Chart {
        let line = |label: &str, share: f64| {
            self.sparse_line(label, |bin| Some(of(bin).quantile(share)? / 1e6))
        };
        let lines = vec![line("p50", 0.5), line("p90", 0.9), line("p99", 0.99)];
        self.chart(title, Axis::new(name, "ms").log(), lines)
    }

    fn requests(&self) -> Chart {
        let mut lines = vec![
            self.rate("due", |bin| bin.due),
            self.rate("answered", |bin| bin.ended),
        ];
        if self.bins.iter().any(|bin| bin.failed > 0) {
            lines.push(self.rate("failed", |bin| bin.failed));
        }
        self.chart("Requests", Axis::new("requests", "1/s"), lines)
    }

    fn tokens(&self) -> Chart {
        let mut lines = vec![self.rate("output", |bin| bin.output_tokens)];
        if self.series.has_passes() {
            lines.push(self.rate("prompt, computed", |bin| bin.prefill_tokens));
        }
        self.chart("Tokens", Axis::new("tokens", "1/s"), lines)
    }

    fn prefix_hits(&self) -> Option<Chart> {
        let has_hits = self.bins.iter().any(|bin| bin.cached_tokens > 0);
        let hits = |bin: &Bin| {
            (bin.input_tokens > 0)
                .then(|| 100.0 * bin.cached_tokens as f64 / bin.input_tokens as f64)
        };
        has_hits.then(|| {
            self.chart(
                "Prefix hits, by when the request was due",
                Axis::new("of prompt tokens", "%").up_to(100.0),
                vec![self.sparse_line("hits", hits)],
            )
        })
    }

    /// Sum over the engines of a time in a bin, as a share of the bin.
    fn sum(&self, bin: &Bin, get: fn(&EngineBin) -> f64) -> f64 {
        bin.engines.iter().map(get).sum::<f64>() / (self.width_s * 1e9)
    }

    fn sequences(&self) -> Chart {
        self.chart(
            "Sequences, all engines",
            Axis::new("sequences", ""),
            vec![
                self.line("running", |bin| {
                    Some(self.sum(bin, |e| e.running_ns as f64))
                }),
                self.line("waiting", |bin| {
                    Some(self.sum(bin, |e| e.waiting_ns as f64))
                }),
            ],
        )
    }

    fn occupancy(&self) -> Chart {
        let engines = &self.series.engines;
        let blocks: f64 = engines.iter().map(|e| f64::from(e.blocks)).sum();
        let count = engines.len() as f64;
        self.chart(
            "KV blocks held by sequences, and time in passes",
            Axis::new("of all", "%").up_to(100.0),
            vec![
                self.line("KV blocks", |bin| {
                    Some(100.0 * self.sum(bin, |e| e.block_ns as f64) / blocks.max(1.0))
                }),
                self.line("engines' time", |bin| {
                    Some(100.0 * self.sum(bin, |e| e.busy_ns as f64) / count)
                }),
            ],
        )
    }

    /// Marks events in the charts over time, and lists them above.
    fn mark(&self, page: &mut Page, charts: &mut [Chart], events: &[(f64, String)]) {
        let end = length_s(self.series);
        let events: Vec<_> = events.iter().filter(|(at, _)| *at <= end).collect();
        for chart in charts.iter_mut().filter(|chart| chart.x.name == "time") {
            // Labels would hide the lines; they are listed above the charts.
            chart.marks = events
                .iter()
                .map(|(at, _)| (at / self.unit_s, String::new()))
                .collect();
        }
        if events.is_empty() {
            return;
        }
        let mut names: Vec<_> = events
            .iter()
            .take(EVENTS_MAX)
            .map(|(at, name)| format!("{} {} {name}", number(at / self.unit_s), self.unit))
            .collect();
        if events.len() > EVENTS_MAX {
            names.push(format!("and {} more", events.len() - EVENTS_MAX));
        }
        page.raw(&format!(
            "<p class=\"says\">Dashed lines: {}.</p>",
            escape(&names.join(", "))
        ));
    }
}

fn length_s(series: &Series) -> f64 {
    series.bins().len() as f64 * series.width_ns() as f64 / 1e9
}

/// Distribution of sequences per pass, by the time spent in passes.
fn batch(series: &Series) -> Chart {
    let all: u128 = series.batch_ns.values().sum();
    let most = series.batch_ns.keys().next_back().copied().unwrap_or(1);
    let width = most.div_ceil(48).max(1);
    let bars = (0..=most / width).map(|bar| {
        let (from, to) = (bar * width, (bar + 1) * width);
        let ns: u128 = series.batch_ns.range(from..to).map(|(_, ns)| ns).sum();
        (
            f64::from(from) + f64::from(width - 1) / 2.0,
            Some(100.0 * ns as f64 / all.max(1) as f64),
        )
    });
    Chart {
        title: "Sequences per pass".into(),
        x: Axis::new("sequences per pass", "").up_to(f64::from(most + width)),
        y: Axis::new("share of time in passes", "%"),
        lines: vec![Line {
            shape: Shape::Bars,
            ..Line::new("share", bars)
        }],
        ..Chart::default()
    }
}
