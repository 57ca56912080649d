//! Line plots as SVG, by hand: no script, no other file.

use std::fmt::Write as _;

/// A named line.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// A plot of lines.
pub(super) struct Plot<'a> {
    pub(super) title: &'a str,
    pub(super) x: &'a str,
    pub(super) y: &'a str,
    /// Logarithmic x.
    pub(super) log: bool,
    pub(super) lines: Vec<Line>,
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 46.0;
/// Colors that stay apart for most kinds of color blindness (Okabe, Ito 2008).
const COLORS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555",
];
/// Points of a line that are drawn: about one a pixel.
const POINTS_MAX: usize = 700;

/// Text that HTML shows as it is.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// A number with a prefix: 12.5k, 3M.
pub(super) fn short(value: f64) -> String {
    let (scaled, prefix) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{scaled:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}{prefix}")
}

/// The largest round step that divides `span` into at least `least` parts.
fn step(span: f64, least: f64) -> f64 {
    let power = 10f64.powf((span / least).log10().floor());
    let fits = [5.0, 2.0, 1.0]
        .into_iter()
        .find(|m| span / (m * power) >= least);
    fits.unwrap_or(1.0) * power
}

impl Plot<'_> {
    /// The plot as an `<svg>` element; empty if there is nothing to show.
    pub(super) fn svg(&self) -> String {
        let all = || self.lines.iter().flat_map(|l| &l.points);
        let usable = |x: f64| x.is_finite() && (!self.log || x > 0.0);
        let fold = |first: f64, f: fn(f64, f64) -> f64, get: fn(&(f64, f64)) -> f64| {
            all()
                .filter(|p| usable(p.0) && p.1.is_finite())
                .map(get)
                .fold(first, f)
        };
        let (mut x_min, mut x_max) = (
            fold(f64::INFINITY, f64::min, |p| p.0),
            fold(f64::NEG_INFINITY, f64::max, |p| p.0),
        );
        if x_min > x_max {
            return String::new();
        }
        let y_max = fold(0.0, f64::max, |p| p.1);
        let y_max = if y_max > 0.0 { y_max * 1.05 } else { 1.0 };
        if self.log {
            (x_min, x_max) = (x_min.log10().floor(), x_max.log10().ceil());
        }
        if x_max - x_min <= 0.0 {
            x_max = x_min + 1.0;
        }
        let px = |x: f64| {
            let x = if self.log { x.log10() } else { x };
            LEFT + (x - x_min) / (x_max - x_min) * (WIDTH - LEFT - RIGHT)
        };
        let py = |y: f64| HEIGHT - BOTTOM - y / y_max * (HEIGHT - TOP - BOTTOM);
        // Writing to a String cannot fail.
        let mut out = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{0}\">\
             <text x=\"{LEFT}\" y=\"16\" class=\"title\">{0}</text>",
            escape(self.title)
        );
        let grid = step(y_max, 4.0);
        let mut y = 0.0;
        while y <= y_max {
            let at = py(y);
            let _ = write!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" class=\"grid\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" class=\"tick\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0,
                short(y)
            );
            y += grid;
        }
        let ticks: Vec<f64> = if self.log {
            let decades = x_min as i32..=x_max as i32;
            decades.map(|d| 10f64.powi(d)).collect()
        } else {
            let grid = step(x_max - x_min, 4.0);
            let first = (x_min / grid).ceil();
            let count = ((x_max / grid).floor() - first) as usize + 1;
            (0..count).map(|i| (first + i as f64) * grid).collect()
        };
        for x in ticks {
            let at = px(x);
            let _ = write!(
                out,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{0:.1}\" class=\"grid\"/>\
                 <text x=\"{at:.1}\" y=\"{1:.1}\" class=\"tick\" text-anchor=\"middle\">{2}</text>",
                HEIGHT - BOTTOM,
                HEIGHT - BOTTOM + 16.0,
                short(x)
            );
        }
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" class=\"axis\" text-anchor=\"middle\">{}</text>\
             <text transform=\"translate(14 {:.1}) rotate(-90)\" class=\"axis\" \
             text-anchor=\"middle\">{}</text>",
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 8.0,
            escape(self.x),
            (TOP + HEIGHT - BOTTOM) / 2.0,
            escape(self.y)
        );
        let mut legend = WIDTH - RIGHT;
        for (i, line) in self.lines.iter().enumerate().rev() {
            let color = COLORS[i % COLORS.len()];
            let _ = write!(
                out,
                "<text x=\"{legend:.1}\" y=\"30\" class=\"tick\" text-anchor=\"end\" \
                 style=\"fill:{color}\">{}</text>",
                escape(&line.name)
            );
            legend -= 6.2 * line.name.chars().count() as f64 + 16.0;
            let points: Vec<String> = thin(&line.points)
                .filter(|p| usable(p.0) && p.1.is_finite())
                .map(|p| format!("{:.1},{:.1}", px(p.0), py(p.1)))
                .collect();
            let _ = write!(
                out,
                "<polyline points=\"{}\" style=\"stroke:{color}\"/>",
                points.join(" ")
            );
        }
        out.push_str("</svg>\n");
        out
    }
}

/// As many points as can be seen: of each stretch the highest, so that peaks stay.
fn thin(points: &[(f64, f64)]) -> impl Iterator<Item = &(f64, f64)> {
    let stretch = points.len().div_ceil(POINTS_MAX).max(1);
    points
        .chunks(stretch)
        .filter_map(|c| c.iter().max_by(|a, b| a.1.total_cmp(&b.1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_steps_round() {
        for (value, text) in [(0.0, "0"), (12_500.0, "12.5k"), (3e6, "3M"), (0.25, "0.25")] {
            assert_eq!(short(value), text);
        }
        for (span, expected) in [(1.05, 0.2), (10.0, 2.0), (36.0, 5.0), (800.0, 200.0)] {
            assert!((step(span, 4.0) - expected).abs() < 1e-9, "{span}");
        }
    }

    #[test]
    fn peaks_survive_thinning() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|i| (f64::from(i), 1.0)).collect();
        points[54_321].1 = 9.0;
        let kept: Vec<_> = thin(&points).collect();
        assert!(kept.len() <= POINTS_MAX);
        assert!(kept.iter().any(|p| p.1 == 9.0));
    }

    #[test]
    fn an_empty_plot_is_no_plot() {
        let plot = Plot {
            title: "t",
            x: "x",
            y: "y",
            log: true,
            lines: vec![Line {
                name: "n".into(),
                points: vec![(0.0, 1.0)],
            }],
        };
        assert_eq!(plot.svg(), "", "0 has no place on a logarithmic axis");
    }
}
