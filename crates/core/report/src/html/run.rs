//! The page of one run.

use crate::html::chart::{Axis, Chart, HeatMap, Line, Shape};
use crate::html::over_time::{POINTS_MAX, joined, over_time, unit_of};
use crate::html::{Page, Tile, escape};
use crate::latency::{Latency, P50, P75, P90, P95, P99, Percentiles, TOO_FEW, cell};
use crate::measure::Distributions;
use crate::run::{ClassReport, RunReport};
use crate::series::{EngineBin, Series};
use crate::table::{counted, grouped, number};
use slipstream_base::Slo;
use slipstream_base::width;

/// Limit of a heat map's rows; further engines share one.
const HEAT_ROWS_MAX: usize = 128;
/// Limit of rows in the table of engines.
const ENGINE_ROWS_MAX: usize = 512;
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
        let mut tiles = vec![self.answered()];
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
            tiles.push(latency_tile(name, percentiles));
        }
        tiles.extend(self.cluster_tiles());
        tiles
    }

    fn answered(&self) -> Tile {
        let requests = &self.report.requests;
        let failed = if requests.failed + requests.abandoned > 0 {
            format!(
                "; {} failed, {} not finished",
                grouped(requests.failed),
                grouped(requests.abandoned)
            )
        } else {
            String::new()
        };
        Tile::new(
            "Requests answered",
            grouped(requests.succeeded),
            format!(
                "of {} in {} s{failed}",
                grouped(requests.sent),
                number(self.report.duration_s)
            ),
        )
    }

    /// Of engines, transfers, continuations and GPUs, as far as they were measured.
    fn cluster_tiles(&self) -> Vec<Tile> {
        let report = self.report;
        let median = |ms: Option<Percentiles>| ms.map_or_else(|| "–".into(), |p| time(p.p50));
        let hits = report.prefix_hit_share().map(|share| {
            let of = counted(report.tokens.input, "prompt token");
            let blocks = report.engine.and_then(|e| e.prefix_hit_blocks);
            let blocks = blocks.map(|blocks| counted(width::round_u64(blocks), "block"));
            let blocks = blocks.map_or_else(String::new, |blocks| format!("; {blocks}"));
            Tile::new(
                "Prefix hits",
                format!("{} %", number(share * 100.0)),
                format!("of {of}{blocks}"),
            )
        });
        let preemptions = report.engine.and_then(|e| e.preemptions);
        let preemptions = preemptions.map(|preemptions| {
            Tile::new(
                "Preemptions",
                grouped(width::round_u64(preemptions)),
                "sequences computed again".into(),
            )
        });
        let transfers = report.transfers.as_ref().map(|t| {
            Tile::new(
                "KV transferred",
                format!("{} GB", number(t.bytes as f64 / 1e9)),
                format!("{}; {} at p50", counted(t.count, "prompt"), median(t.ms)),
            )
        });
        let resumed = report.resumed.as_ref().map(|r| {
            Tile::new(
                "Resumed answers",
                grouped(r.count),
                format!("pause {} at p50", median(r.ms)),
            )
        });
        let gpus = report
            .gpu
            .as_ref()
            .map(|gpu| Tile::new("GPU-hours", number(gpu.hours), counted(gpu.gpus, "GPU")));
        let all = [hits, preemptions, transfers, resumed, gpus];
        all.into_iter().flatten().collect()
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

fn latency_tile(name: &str, of: Option<Percentiles>) -> Tile {
    let Some(p) = of else {
        return Tile::new(name, "–".to_owned(), String::new());
    };
    let tail = match p.at(P99) {
        Some(p99) => format!("p99 {}", time(p99)),
        None => format!("max {}", time(p.max)),
    };
    Tile::new(name, time(p.p50), format!("p50; {tail}"))
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
