//! The page of a plan: the answer, the configurations that come after it, and what it depends on.

use crate::html::chart::{Axis, Chart, Line, Shape};
use crate::html::{Page, Tile};

/// The answer to one load.
#[derive(Clone, Debug, Default)]
pub struct PlanAnswer {
    /// Its heading, such as the factor on the load.
    pub heading: String,
    /// The answer in one line of the field's terms.
    pub claim: String,
    /// The answer in sentences for everyone.
    pub lead: String,
    /// Figures.
    pub tiles: Vec<Tile>,
    /// Names of the table's columns.
    pub header: Vec<&'static str>,
    /// The answer's row first, then the others'.
    pub rows: Vec<Vec<String>>,
    /// Cost and p99 of TTFT, ms, of each row, with its name.
    pub costs: Vec<(String, f64, Option<f64>)>,
    /// Names of the columns of the sensitivity.
    pub knob_header: Vec<String>,
    /// Rows of the sensitivity; a marked one changes the choice.
    pub knobs: Vec<(Vec<String>, bool)>,
    /// Workers of the answer.
    pub workers: u32,
    /// Workers and share of requests within their objectives, of the answer's configuration at other
    /// sizes.
    pub by_workers: Vec<(u32, f64)>,
    /// Factor on the load and that share.
    pub by_load: Vec<(f64, f64)>,
    /// Share of requests that must meet their objectives.
    pub target: f64,
    /// Notes under the tables.
    pub notes: Vec<String>,
}

/// Content of a plan's page.
#[derive(Clone, Debug, Default)]
pub struct PlanPage {
    /// Model, workload and objectives.
    pub subtitle: String,
    /// Unit of costs.
    pub cost_unit: String,
    /// Loads without an answer, and other warnings.
    pub warnings: Vec<String>,
    /// The answers.
    pub answers: Vec<PlanAnswer>,
    /// Texts to include: name and text.
    pub texts: Vec<(String, String)>,
}

/// Columns of text in the table of configurations.
const TEXTS: usize = 2;
/// The same in the table of the sensitivity.
const KNOB_TEXTS: usize = 3;

impl PlanPage {
    /// The page as HTML.
    pub fn render(&self) -> String {
        let mut page = Page::new("Plan", &self.subtitle);
        for warning in &self.warnings {
            page.warning(warning);
        }
        for answer in &self.answers {
            answer.render(&mut page, &self.cost_unit);
        }
        for (name, text) in &self.texts {
            page.details(name, text);
        }
        page.finish()
    }
}

impl PlanAnswer {
    /// The shapes by cost and latency.
    fn shapes(&self, cost_unit: &str) -> Chart {
        let points = |rows: &[(String, f64, Option<f64>)], name: &str, color| Line {
            name: name.into(),
            points: rows.iter().map(|row| (row.1, row.2)).collect(),
            labels: rows.iter().map(|row| format!("{}:", row.0)).collect(),
            tags: rows.iter().map(|row| row.0.clone()).collect(),
            shape: Shape::Points,
            color: Some(color),
        };
        Chart {
            title: "Each shape at its smallest size that attains".into(),
            x: Axis::new("cost", cost_unit),
            y: Axis::new("TTFT p99", "ms"),
            lines: vec![
                points(&self.costs[..1], "the answer", 0),
                points(&self.costs[1..], "others", 5),
            ],
            ..Chart::default()
        }
    }

    /// Shares of requests that miss an objective. Shares near 100 % differ in their distance from it. `points`: at least one.
    fn misses(&self, title: &str, x: Axis, points: &[(f64, f64)], mark: (f64, String)) -> String {
        let missed = |share: f64| Some(100.0 * (1.0 - share)).filter(|missed| *missed > 0.0);
        let (first, last) = (points[0].0, points[points.len() - 1].0);
        let allowed = missed(self.target);
        Chart {
            title: title.into(),
            x,
            y: Axis::new("requests", "%").log(),
            lines: vec![
                Line::new("missed", points.iter().map(|p| (p.0, missed(p.1)))),
                Line {
                    color: Some(1),
                    ..Line::new("allowed", [(first, allowed), (last, allowed)])
                },
            ],
            marks: vec![mark],
        }
        .render()
    }

    fn render(&self, page: &mut Page, cost_unit: &str) {
        page.section(&self.heading, &self.claim);
        page.lead(&self.lead);
        page.tiles(&self.tiles);
        let rows: Vec<_> = self
            .rows
            .iter()
            .enumerate()
            .map(|(at, cells)| (cells.clone(), at == 0))
            .collect();
        page.table(&self.header, TEXTS, &rows);
        for note in &self.notes {
            page.raw(&format!("<p class=\"says\">{}</p>", super::escape(note)));
        }
        let mut charts = Vec::new();
        if self.costs.len() > 1 {
            charts.push(self.shapes(cost_unit).render());
        }
        if self.by_workers.len() > 1 && self.by_workers.iter().any(|p| p.1 < 1.0) {
            let points: Vec<_> = self
                .by_workers
                .iter()
                .map(|&(workers, share)| (f64::from(workers), share))
                .collect();
            charts.push(self.misses(
                "Requests that miss an objective, by number of workers",
                Axis::new("workers", ""),
                &points,
                (f64::from(self.workers), "the answer".into()),
            ));
        }
        if self.by_load.len() > 1 && self.by_load.iter().any(|p| p.1 < 1.0) {
            let mut points: Vec<(f64, f64)> = self
                .by_load
                .iter()
                .map(|&(load, share)| (100.0 * (load - 1.0), share))
                .collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            charts.push(self.misses(
                "Requests that miss an objective, by load",
                Axis::new("load above the stated one", "%"),
                &points,
                (0.0, String::new()),
            ));
        }
        page.charts(charts);
        if !self.knobs.is_empty() {
            page.section(
                "What the choice depends on",
                "One condition is changed at a time. Sizes are workers; the cheaper configuration is the choice. \
                 Highlighted: the choice changes.",
            );
            let header: Vec<&str> = self.knob_header.iter().map(String::as_str).collect();
            page.table(&header, KNOB_TEXTS, &self.knobs);
        }
    }
}
