//! The page of one run.

use crate::html::chart::{Axis, Chart, HeatMap, Line, Shape};
use crate::html::{Page, Tile, escape};
use crate::latency::{Latency, P50, P75, P90, P95, P99, Percentiles, TOO_FEW, cell};
use crate::measure::Distributions;
use crate::run::{ClassReport, RunReport};
use crate::series::{Bin, EngineBin, Series, Sketch};
use crate::table::{counted, grouped, number};
use slipstream_base::Slo;
use slipstream_base::width;

/// Limit of points of a line over time.
const POINTS_MAX: usize = 240;
/// Mean number of requests per point of a percentile over time, at least.
const REQUESTS_A_POINT: u64 = 40;
/// Limit of a heat map's rows; further engines share one.
const HEAT_ROWS_MAX: usize = 128;
/// Limit of rows in the table of engines.
const ENGINE_ROWS_MAX: usize = 512;
/// Limit of named events.
const EVENTS_MAX: usize = 40;
/// Limit of points of a distribution.
const CDF_POINTS: usize = 200;

/// Content of a run's page.
#[derive(Clone, Debug)]
pub struct RunPage<'a> {
    /// `Simulated run` or `Live run`.
    pub title: &'a str,
    /// The figures.
    pub report: &'a RunReport,
    /// The latencies behind the percentiles.
    pub distributions: &'a Distributions,
    /// The run over time, if recorded.
    pub series: Option<&'a Series>,
    /// Objectives, drawn as marks.
    pub slo: Option<&'a Slo>,
    /// Events: time in s since the run's start, and name.
    pub events: Vec<(f64, String)>,
    /// Warnings, such as why a run was cut short.
    pub warnings: Vec<String>,
    /// Further facts: name and value.
    pub facts: Vec<(String, String)>,
    /// Texts to include: name and text.
    pub texts: Vec<(String, String)>,
}

impl RunPage<'_> {
    /// The page as HTML.
    pub fn render(&self) -> String {
        let report = self.report;
        let mut page = Page::new(
            &if report.label == report.target || report.label == report.workload {
                self.title.to_owned()
            } else {
                format!("{}: {}", self.title, report.label)
            },
            &format!(
                "{} · {} · {} · seed {}",
                report.target, report.model, report.workload, report.seed
            ),
        );
        for warning in &self.warnings {
            page.warning(warning);
        }
        for (kind, error) in &report.errors {
            page.warning(&format!(
                "{} failed ({kind}), for example: {}",
                counted(error.count, "request"),
                error.example
            ));
        }
        page.tiles(&self.tiles());
        self.latencies(&mut page);
        if let Some(series) = self.series.filter(|s| !s.bins().is_empty()) {
            over_time(&mut page, series, &self.events);
            if series.has_passes() {
                engines(&mut page, series);
            }
        }
        page.section("Configuration", "");
        let rows: Vec<_> = self
            .facts
            .iter()
            .map(|(name, value)| (vec![name.clone(), value.clone()], false))
            .collect();
        page.table(&["", ""], 2, &rows);
        for (name, text) in &self.texts {
            page.details(name, text);
        }
        page.details("All figures as JSON", &report.to_json());
        page.finish()
    }

    fn tiles(&self) -> Vec<Tile> {
        let report = self.report;
        let ms = |p: Option<Percentiles>| {
            p.map_or_else(
                || ("–".to_owned(), String::new()),
                |p| {
                    let tail = match p.at(P99) {
                        Some(p99) => format!("p99 {}", time(p99)),
                        None => format!("max {}", time(p.max)),
                    };
                    (time(p.p50), format!("p50; {tail}"))
                },
            )
        };
        let requests = &report.requests;
        let mut tiles = vec![Tile::new(
            "Requests answered",
            grouped(requests.succeeded),
            format!(
                "of {} in {} s{}",
                grouped(requests.sent),
                number(report.duration_s),
                if requests.failed + requests.abandoned > 0 {
                    format!(
                        "; {} failed, {} not finished",
                        grouped(requests.failed),
                        grouped(requests.abandoned)
                    )
                } else {
                    String::new()
                }
            ),
        )];
        if let Some(goodput) = &report.goodput {
            tiles.push(Tile::new(
                "Goodput",
                format!("{}/s", number(goodput.requests_per_s)),
                format!("{} % within {}", number(goodput.share * 100.0), goodput.slo),
            ));
        }
        tiles.push(Tile::new(
            "Throughput",
            format!("{}/s", number(report.throughput.requests_per_s)),
            format!(
                "requests; {} output tokens/s",
                number(report.throughput.output_tokens_per_s)
            ),
        ));
        for (name, percentiles) in [
            ("TTFT", report.latency.ttft_ms),
            ("ITL", report.latency.itl_ms),
            ("E2E", report.latency.e2e_ms),
        ] {
            let (value, beside) = ms(percentiles);
            tiles.push(Tile::new(name, value, beside));
        }
        if let Some(share) = report.prefix_hit_share() {
            tiles.push(Tile::new(
                "Prefix hits",
                format!("{} %", number(share * 100.0)),
                match report.engine.and_then(|e| e.prefix_hit_blocks) {
                    Some(blocks) => format!(
                        "of {}; {}",
                        counted(report.tokens.input, "prompt token"),
                        counted(width::round_u64(blocks), "block")
                    ),
                    None => format!("of {}", counted(report.tokens.input, "prompt token")),
                },
            ));
        }
        if let Some(preemptions) = report.engine.and_then(|e| e.preemptions) {
            tiles.push(Tile::new(
                "Preemptions",
                grouped(width::round_u64(preemptions)),
                "sequences computed again".into(),
            ));
        }
        if let Some(t) = &report.transfers {
            tiles.push(Tile::new(
                "KV transferred",
                format!("{} GB", number(t.bytes as f64 / 1e9)),
                format!(
                    "{}; {} at p50",
                    counted(t.count, "prompt"),
                    t.ms.map_or_else(|| "–".into(), |p| time(p.p50))
                ),
            ));
        }
        if let Some(r) = &report.resumed {
            tiles.push(Tile::new(
                "Resumed answers",
                grouped(r.count),
                format!(
                    "pause {} at p50",
                    r.ms.map_or_else(|| "–".into(), |p| time(p.p50))
                ),
            ));
        }
        if let Some(gpu) = &report.gpu {
            tiles.push(Tile::new(
                "GPU-hours",
                number(gpu.hours),
                counted(gpu.gpus, "GPU"),
            ));
        }
        tiles
    }

    fn latencies(&self, page: &mut Page) {
        page.section(
            "Latency",
            "TTFT: due to first token. ITL: gap between two tokens. TPOT: (E2E − TTFT) / (tokens − 1). \
             E2E: due to last token.",
        );
        let latency = &self.report.latency;
        let rows: Vec<_> = [
            ("TTFT, ms", latency.ttft_ms),
            ("ITL, ms", latency.itl_ms),
            ("TPOT, ms", latency.tpot_ms),
            ("E2E, ms", latency.e2e_ms),
            ("send lag, ms", latency.send_lag_ms),
        ]
        .into_iter()
        .filter_map(|(name, percentiles)| {
            let p = percentiles?;
            let ends = [
                name.to_owned(),
                grouped(p.count),
                number(p.mean),
                number(p.min),
            ];
            let tails = [P50, P75, P90, P95, P99].map(|q| cell(percentiles, q));
            let cells = ends.into_iter().chain(tails).chain([number(p.max)]);
            Some((cells.collect(), false))
        })
        .collect();
        page.table(
            &[
                "", "count", "mean", "min", "p50", "p75", "p90", "p95", "p99", "max",
            ],
            1,
            &rows,
        );
        if !self.report.classes.is_empty() {
            classes(page, "class", self.report.classes.iter());
        }
        if !self.report.models.is_empty() {
            let models = self.report.models.iter().map(|model| &model.requests);
            classes(page, "model", models);
        }
        if !self.report.shares.is_empty() {
            self.shares(page);
        }
        let shown = [
            latency.ttft_ms,
            latency.itl_ms,
            latency.tpot_ms,
            latency.e2e_ms,
        ];
        let classes = self.report.classes.iter();
        let models = self.report.models.iter().map(|model| &model.requests);
        let classes = classes.chain(models);
        let of_classes = classes.flat_map(|c| [c.ttft_ms, c.itl_ms, c.tpot_ms, c.e2e_ms]);
        if shown
            .into_iter()
            .chain(of_classes)
            .flatten()
            .any(|p| p.leaves_out())
        {
            page.raw(&format!("<p class=\"says\">{}</p>", escape(TOO_FEW)));
        }
        let d = self.distributions;
        let slo = |name: &str| {
            let limit = self.slo.and_then(|slo| slo.limit_ns(name));
            limit
                .map(|ns| (ns as f64 / 1e6, "objective".to_owned()))
                .into_iter()
                .collect()
        };
        page.charts(
            [
                ("TTFT", &d.ttft, slo("ttft")),
                ("ITL", &d.itl, Vec::new()),
                ("TPOT", &d.tpot, slo("tpot")),
                ("E2E", &d.e2e, slo("e2e")),
            ]
            .into_iter()
            .filter(|(_, latency, _)| latency.count() > 0)
            .map(|(name, latency, marks)| cdf(name, latency, marks)),
        );
    }

    fn shares(&self, page: &mut Page) {
        let each = self.report.shares.iter();
        let rows = each.flat_map(|share| {
            share.pools.iter().map(move |pool| {
                let cells = vec![
                    share.name.clone(),
                    pool.name.clone(),
                    pool.model.clone(),
                    number(100.0 * pool.awake_share),
                    grouped(share.swaps),
                    number(share.swapping_s),
                    number(100.0 * share.swapping_share),
                ];
                (cells, false)
            })
        });
        let rows: Vec<_> = rows.collect();
        page.table(
            &[
                "share",
                "pool",
                "model",
                "awake, %",
                "swaps of the share",
                "swapping, s",
                "%",
            ],
            3,
            &rows,
        );
    }
}

/// A table of `rows`; `what` they are.
fn classes<'r>(page: &mut Page, what: &str, rows: impl Iterator<Item = &'r ClassReport>) {
    let rows: Vec<_> = rows
        .map(|class| {
            let goodput = class.goodput.as_ref();
            let cells = vec![
                class.name.clone(),
                goodput.map_or_else(|| "–".into(), |g| g.slo.clone()),
                grouped(class.sent),
                goodput.map_or_else(|| "–".into(), |g| number(g.requests_per_s)),
                goodput.map_or_else(|| "–".into(), |g| number(g.share * 100.0)),
                cell(class.ttft_ms, P50),
                cell(class.ttft_ms, P99),
                cell(class.itl_ms, P50),
                cell(class.itl_ms, P99),
                cell(class.tpot_ms, P50),
                cell(class.tpot_ms, P99),
                cell(class.e2e_ms, P50),
                cell(class.e2e_ms, P99),
            ];
            (cells, false)
        })
        .collect();
    page.table(
        &[
            what,
            "objectives",
            "requests",
            "goodput/s",
            "within, %",
            "TTFT p50, ms",
            "p99",
            "ITL p50, ms",
            "p99",
            "TPOT p50, ms",
            "p99",
            "E2E p50, ms",
            "p99",
        ],
        2,
        &rows,
    );
}

/// A time given in ms, in the most readable unit.
fn time(ms: f64) -> String {
    if ms >= 10_000.0 {
        format!("{} s", number(ms / 1e3))
    } else {
        format!("{} ms", number(ms))
    }
}

/// Chart of a distribution: the share that took no longer, with marks on the axis of time, in ms.
pub fn cdf(name: &str, latency: &Latency, marks: Vec<(f64, String)>) -> String {
    let points = latency.cdf(CDF_POINTS);
    Chart {
        title: format!("{name}: share that took no longer"),
        x: Axis::new(name, "ms").log(),
        y: Axis::new("share", "%").up_to(100.0),
        lines: vec![Line {
            shape: Shape::Steps,
            ..Line::new(
                "share",
                points
                    .into_iter()
                    .map(|(ns, share)| (ns as f64 / 1e6, Some(share * 100.0))),
            )
        }],
        marks,
    }
    .render()
}

/// The unit of a time span, and its length in s.
fn unit_of(seconds: f64) -> (&'static str, f64) {
    match seconds {
        s if s >= 4.0 * 3600.0 => ("h", 3600.0),
        s if s >= 600.0 => ("min", 60.0),
        _ => ("s", 1.0),
    }
}

/// Bins merged so that at most `points` are left; and the width of each, s.
fn joined(series: &Series, points: usize) -> (Vec<Bin>, f64) {
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

fn over_time(page: &mut Page, series: &Series, events: &[(f64, String)]) {
    let (bins, width) = joined(series, POINTS_MAX);
    let (unit, unit_s) = unit_of(series.bins().len() as f64 * series.width_ns() as f64 / 1e9);
    let time = || Axis::new("time", unit);
    let at = |index: usize, width: f64| (index as f64 + 0.5) * width / unit_s;
    let line = |name: &str, value: &dyn Fn(&Bin) -> Option<f64>| {
        Line::new(
            name,
            bins.iter()
                .enumerate()
                .map(|(index, bin)| (at(index, width), value(bin))),
        )
    };
    page.section(
        "Over time",
        &format!(
            "A point covers {} s; a point of a percentile covers enough time for about {REQUESTS_A_POINT} requests or more \
             (of fewer than 100 samples p99 is the largest).",
            number(width)
        ),
    );
    let requests: u64 = series.bins().iter().map(|bin| bin.due).sum();
    let points = width::to_usize((requests / REQUESTS_A_POINT).clamp(8, POINTS_MAX as u64));
    let (sparse, sparse_width) = joined(series, points);
    let percentiles = |title: &str, name: &str, of: &dyn Fn(&Bin) -> &Sketch| {
        let line = |label: &str, share: f64| {
            let values = sparse.iter().map(|bin| of(bin).quantile(share));
            Line::new(
                label,
                values
                    .enumerate()
                    .map(|(index, ns)| (at(index, sparse_width), ns.map(|ns| ns / 1e6))),
            )
        };
        Chart {
            title: title.into(),
            x: time(),
            y: Axis::new(name, "ms").log(),
            lines: vec![line("p50", 0.5), line("p90", 0.9), line("p99", 0.99)],
            ..Chart::default()
        }
    };
    let per_s = |count: u64| Some(count as f64 / width);
    let mut charts = vec![
        percentiles("TTFT, by when the request was due", "TTFT", &|bin| {
            &bin.ttft
        }),
        percentiles("ITL, by when the token came", "ITL", &|bin| &bin.itl),
        Chart {
            title: "Requests".into(),
            x: time(),
            y: Axis::new("requests", "1/s"),
            lines: vec![
                line("due", &|bin| per_s(bin.due)),
                line("answered", &|bin| per_s(bin.ended)),
            ],
            ..Chart::default()
        },
    ];
    if bins.iter().any(|bin| bin.failed > 0) {
        charts[2]
            .lines
            .push(line("failed", &|bin| per_s(bin.failed)));
    }
    let mut tokens = vec![line("output", &|bin| per_s(bin.output_tokens))];
    if series.has_passes() {
        tokens.push(line("prompt, computed", &|bin| per_s(bin.prefill_tokens)));
    }
    charts.push(Chart {
        title: "Tokens".into(),
        x: time(),
        y: Axis::new("tokens", "1/s"),
        lines: tokens,
        ..Chart::default()
    });
    if bins.iter().any(|bin| bin.cached_tokens > 0) {
        let hits = |bin: &Bin| {
            (bin.input_tokens > 0)
                .then(|| 100.0 * bin.cached_tokens as f64 / bin.input_tokens as f64)
        };
        charts.push(Chart {
            title: "Prefix hits, by when the request was due".into(),
            x: time(),
            y: Axis::new("of prompt tokens", "%").up_to(100.0),
            lines: vec![Line::new(
                "hits",
                sparse
                    .iter()
                    .enumerate()
                    .map(|(index, bin)| (at(index, sparse_width), hits(bin))),
            )],
            ..Chart::default()
        });
    }
    if series.has_passes() {
        let width_ns = width * 1e9;
        let sum = |bin: &Bin, get: fn(&EngineBin) -> f64| {
            Some(bin.engines.iter().map(get).sum::<f64>() / width_ns)
        };
        let blocks: f64 = series.engines.iter().map(|e| f64::from(e.blocks)).sum();
        let count = series.engines.len() as f64;
        charts.push(Chart {
            title: "Sequences, all engines".into(),
            x: time(),
            y: Axis::new("sequences", ""),
            lines: vec![
                line("running", &|bin| sum(bin, |e| e.running_ns as f64)),
                line("waiting", &|bin| sum(bin, |e| e.waiting_ns as f64)),
            ],
            ..Chart::default()
        });
        charts.push(Chart {
            title: "KV blocks held by sequences, and time in passes".into(),
            x: time(),
            y: Axis::new("of all", "%").up_to(100.0),
            lines: vec![
                line("KV blocks", &|bin| {
                    Some(100.0 * sum(bin, |e| e.block_ns as f64)? / blocks.max(1.0))
                }),
                line("engines' time", &|bin| {
                    Some(100.0 * sum(bin, |e| e.busy_ns as f64)? / count)
                }),
            ],
            ..Chart::default()
        });
        charts.push(batch(series));
    }
    let end = series.bins().len() as f64 * series.width_ns() as f64 / 1e9;
    let events: Vec<_> = events.iter().filter(|(at, _)| *at <= end).collect();
    for chart in charts.iter_mut().filter(|chart| chart.x.name == "time") {
        // Labels would hide the lines; they are listed above the charts.
        chart.marks = events
            .iter()
            .map(|(at, _)| (at / unit_s, String::new()))
            .collect();
    }
    if !events.is_empty() {
        let mut names: Vec<_> = events
            .iter()
            .take(EVENTS_MAX)
            .map(|(at, name)| format!("{} {unit} {name}", number(at / unit_s)))
            .collect();
        if events.len() > EVENTS_MAX {
            names.push(format!("and {} more", events.len() - EVENTS_MAX));
        }
        page.raw(&format!(
            "<p class=\"says\">Dashed lines: {}.</p>",
            escape(&names.join(", "))
        ));
    }
    page.charts(charts.iter().map(Chart::render));
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

fn engines(page: &mut Page, series: &Series) {
    page.section(
        "Engines",
        "One row per engine, from the run's start to its end. KV blocks are those held by sequences; cached blocks without a sequence count as free.",
    );
    page.charts(heat_maps(series).iter().map(HeatMap::render));
    let duration: u128 = series.bins().len() as u128 * u128::from(series.width_ns());
    let rows: Vec<_> = series
        .engines
        .iter()
        .zip(&series.totals)
        .take(ENGINE_ROWS_MAX)
        .map(|(engine, t)| {
            let busy = t.busy_ns as f64;
            let share = |part: f64, of: f64| {
                if of > 0.0 {
                    number(part / of)
                } else {
                    "–".to_owned()
                }
            };
            let cells = vec![
                engine.name.clone(),
                engine.pool.clone(),
                grouped(t.passes),
                number(100.0 * busy / duration.max(1) as f64),
                share(t.running_ns as f64, busy),
                grouped(t.waiting_max.into()),
                share(
                    100.0 * t.block_ns as f64,
                    duration as f64 * f64::from(engine.blocks),
                ),
                grouped(t.prefill_tokens),
                grouped(t.output_tokens),
                grouped(t.preemptions),
            ];
            (cells, false)
        })
        .collect();
    page.table(
        &[
            "engine",
            "pool",
            "passes",
            "busy, %",
            "sequences per pass",
            "max waiting",
            "KV held, %",
            "prompt tokens computed",
            "output tokens",
            "preemptions",
        ],
        2,
        &rows,
    );
    if series.engines.len() > ENGINE_ROWS_MAX {
        page.raw(&format!(
            "<p class=\"says\">{ENGINE_ROWS_MAX} of {}.</p>",
            counted(series.engines.len() as u64, "engine")
        ));
    }
}

/// Engines over time: utilization, KV occupancy, queue length.
fn heat_maps(series: &Series) -> Vec<HeatMap> {
    let (bins, width) = joined(series, POINTS_MAX);
    let (unit, unit_s) = unit_of(series.bins().len() as f64 * series.width_ns() as f64 / 1e9);
    let count = series.engines.len();
    let group = count.div_ceil(HEAT_ROWS_MAX).max(1);
    let rows: Vec<String> = (0..count)
        .step_by(group)
        .map(|first| {
            let last = (first + group).min(count) - 1;
            let name = |at: usize| &series.engines[at].name;
            if first == last {
                name(first).clone()
            } else {
                format!("{}–{}", name(first), name(last))
            }
        })
        .collect();
    let values = |get: &dyn Fn(usize, &EngineBin) -> f64| -> Vec<Vec<f64>> {
        (0..count)
            .step_by(group)
            .map(|first| {
                let members = first..(first + group).min(count);
                bins.iter()
                    .map(|bin| {
                        let sum: f64 = members
                            .clone()
                            .filter_map(|at| Some(get(at, bin.engines.get(at)?)))
                            .sum();
                        sum / members.len() as f64
                    })
                    .collect()
            })
            .collect()
    };
    let width_ns = width * 1e9;
    let map = |title: &str, unit_of_value: &str, max: Option<f64>, values: Vec<Vec<f64>>| {
        let most = values.iter().flatten().copied().fold(0.0, f64::max);
        HeatMap {
            title: title.into(),
            unit: unit_of_value.into(),
            rows: rows.clone(),
            // A scale of less than one sequence would exaggerate.
            max: max.unwrap_or(if unit_of_value == "sequences" {
                most.max(1.0)
            } else {
                most
            }),
            values,
            step: width / unit_s,
            time: unit.into(),
        }
    };
    let mut maps = vec![
        map(
            "Time in passes",
            "%",
            Some(100.0),
            values(&|_, e| 100.0 * e.busy_ns as f64 / width_ns),
        ),
        map(
            "Running sequences",
            "sequences",
            None,
            values(&|_, e| e.running_ns as f64 / width_ns),
        ),
        map(
            "KV blocks held",
            "%",
            None,
            values(&|at, e| {
                let blocks = f64::from(series.engines[at].blocks).max(1.0);
                100.0 * e.block_ns as f64 / width_ns / blocks
            }),
        ),
    ];
    let waiting = values(&|_, e| e.waiting_ns as f64 / width_ns);
    if waiting.iter().flatten().any(|v| *v > 0.0) {
        maps.push(map("Waiting sequences", "sequences", None, waiting));
    }
    maps
}
