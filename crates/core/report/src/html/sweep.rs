//! The page of a sweep: goodput and cost of each configuration.

use crate::html::chart::{Axis, Chart, Line, Shape};
use crate::html::{Page, Tile};
use crate::table::{counted, grouped, number};

/// A configuration.
#[derive(Clone, Debug)]
pub struct SweepPoint {
    /// Its name: the varied keys and their values.
    pub name: String,
    /// The values alone, as the label of its dot.
    pub tag: String,
    /// Requests per second within their objectives.
    pub goodput_per_s: f64,
    /// GPU-hours.
    pub gpu_hours: f64,
    /// On the Pareto front: no other configuration gives more for less, beyond the tolerance.
    pub front: bool,
    /// Cells of its row in the table.
    pub cells: Vec<String>,
    /// TTFT p99 and ITL p99, ms.
    pub p99_ms: [Option<f64>; 2],
}

/// Content of a sweep's page.
#[derive(Clone, Debug)]
pub struct SweepPage<'a> {
    /// Model and workload.
    pub subtitle: &'a str,
    /// The common and the varied settings: name and text.
    pub base: &'a [(String, String)],
    /// The tolerance, in words.
    pub tolerance_is: &'a str,
    /// The objectives, or the criterion without objectives.
    pub goodput_is: &'a str,
    /// Names of the table's columns, the varied keys first.
    pub header: &'a [&'a str],
    /// Number of varied keys.
    pub keys: usize,
    /// The configurations.
    pub points: &'a [SweepPoint],
    /// Warnings.
    pub warnings: Vec<String>,
    /// Texts to include: name and text.
    pub texts: Vec<(String, String)>,
}

/// The color of configurations off the Pareto front: grey.
const OTHERS: usize = 5;
/// Limit of the table's rows; those of the Pareto front are always included.
const ROWS_MAX: usize = 2_000;

impl SweepPage<'_> {
    /// The page as HTML.
    pub fn render(&self) -> String {
        let mut page = Page::new("Sweep", self.subtitle);
        for warning in &self.warnings {
            page.warning(warning);
        }
        let mut front: Vec<&SweepPoint> = self.points.iter().filter(|p| p.front).collect();
        front.sort_by(|a, b| a.gpu_hours.total_cmp(&b.gpu_hours));
        page.tiles(&self.tiles(&front));
        let base: Vec<_> = self
            .base
            .iter()
            .map(|(name, text)| (vec![name.clone(), text.clone()], false))
            .collect();
        page.table(&["", ""], 2, &base);
        page.section(
            "Goodput against GPU-hours",
            &format!(
                "Goodput: requests per second {}. The Pareto front holds the configurations that no other beats in both; {}. \
                 Dots are labelled with {}.",
                self.goodput_is,
                self.tolerance_is,
                self.header[..self.keys].join(", ")
            ),
        );
        page.charts([
            self.pareto(&front).render(),
            self.tail(0, "TTFT, 99th percentile").render(),
            self.tail(1, "ITL, 99th percentile").render(),
        ]);
        self.configurations(&mut page);
        for (name, text) in &self.texts {
            page.details(name, text);
        }
        page.finish()
    }

    /// `front`: by rising GPU-hours.
    fn tiles(&self, front: &[&SweepPoint]) -> [Tile; 3] {
        // Better ones are within the tolerance, and cost more.
        let best = front.last().copied();
        let cheapest = self
            .points
            .iter()
            .filter(|p| p.goodput_per_s > 0.0)
            .max_by(|a, b| per_gpu_hour(a).total_cmp(&per_gpu_hour(b)));
        let tile =
            |name: &str, point: Option<&SweepPoint>, value: &dyn Fn(&SweepPoint) -> String| {
                Tile::new(
                    name,
                    point.map_or_else(|| "–".into(), value),
                    point.map_or_else(String::new, |p| p.name.clone()),
                )
            };
        [
            Tile::new(
                "Configurations",
                grouped(self.points.len() as u64),
                format!("{} on the Pareto front", front.len()),
            ),
            tile("Highest goodput", best, &|p| {
                format!("{}/s", number(p.goodput_per_s))
            }),
            tile("Highest goodput per GPU-hour", cheapest, &|p| {
                format!("{}/s", number(per_gpu_hour(p)))
            }),
        ]
    }

    /// Dots of the configurations on the Pareto front, or of the others, at a height each.
    fn dots(&self, on_front: bool, height: impl Fn(&SweepPoint) -> Option<f64>) -> Line {
        let kept: Vec<_> = self.points.iter().filter(|p| p.front == on_front).collect();
        let name = if on_front {
            "on the Pareto front"
        } else {
            "others"
        };
        Line {
            name: name.into(),
            points: kept.iter().map(|p| (p.gpu_hours, height(p))).collect(),
            labels: kept.iter().map(|p| format!("{}:", p.name)).collect(),
            tags: kept.iter().map(|p| p.tag.clone()).collect(),
            shape: Shape::Points,
            color: Some(if on_front { 0 } else { OTHERS }),
        }
    }

    fn pareto(&self, front: &[&SweepPoint]) -> Chart {
        let goodput = |p: &SweepPoint| Some(p.goodput_per_s);
        let steps = front.iter().map(|p| (p.gpu_hours, goodput(p)));
        Chart {
            title: "Goodput against GPU-hours".into(),
            x: Axis::new("GPU-hours", ""),
            y: Axis::new("goodput", "requests/s"),
            lines: vec![
                self.dots(false, goodput),
                self.dots(true, goodput),
                Line {
                    shape: Shape::Steps,
                    color: Some(0),
                    ..Line::new("the Pareto front", steps)
                },
            ],
            ..Chart::default()
        }
    }

    /// One of the latencies of [`SweepPoint::p99_ms`].
    fn tail(&self, index: usize, title: &str) -> Chart {
        Chart {
            title: title.into(),
            x: Axis::new("GPU-hours", ""),
            y: Axis::new("p99", "ms").log(),
            lines: [false, true]
                .map(|on_front| self.dots(on_front, |p| p.p99_ms[index]))
                .into(),
            ..Chart::default()
        }
    }

    fn configurations(&self, page: &mut Page) {
        page.section("Configurations", "The Pareto front is highlighted. *: on the Pareto front; ~: equal to one on it within the tolerance.");
        let mut left = ROWS_MAX;
        let rows: Vec<_> = self
            .points
            .iter()
            .filter(|p| {
                let shown = p.front || left > 0;
                left -= usize::from(shown && !p.front);
                shown
            })
            .map(|p| (p.cells.clone(), p.front))
            .collect();
        page.table(self.header, self.keys, &rows);
        if rows.len() < self.points.len() {
            page.raw(&format!(
                "<p class=\"says\">{} of {}; `--out FILE` writes all.</p>",
                grouped(rows.len() as u64),
                counted(self.points.len() as u64, "configuration")
            ));
        }
    }
}

fn per_gpu_hour(point: &SweepPoint) -> f64 {
    if point.gpu_hours > 0.0 {
        point.goodput_per_s / point.gpu_hours
    } else {
        0.0
    }
}
