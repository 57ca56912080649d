//! Charts as SVG.

use std::fmt::Write as _;

use serde_json::json;

use super::{escape, json};
use crate::table::number;
use slipstream_base::width;

const WIDTH: f64 = 600.0;
const HEIGHT: f64 = 250.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = WIDTH - 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = HEIGHT - 40.0;

/// Colors of the page; further lines share one.
const COLORS: usize = 6;

/// Approximate number of ticks along an axis.
const TICKS: f64 = 6.0;

/// Mapping from values to positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scale {
    /// Linear; the axis begins at 0.
    #[default]
    Linear,
    /// Logarithmic; values of 0 or less are omitted.
    Log,
}

/// An axis.
#[derive(Clone, Debug, Default)]
pub struct Axis {
    /// Name of the quantity.
    pub name: String,
    /// Its unit.
    pub unit: String,
    /// Its scale.
    pub scale: Scale,
    /// Its end, if fixed, as for shares.
    pub max: Option<f64>,
}

impl Axis {
    /// A linear axis.
    pub fn new(name: &str, unit: &str) -> Axis {
        Axis {
            name: name.to_owned(),
            unit: unit.to_owned(),
            ..Axis::default()
        }
    }

    /// The same axis with a logarithmic scale.
    #[must_use]
    pub fn log(mut self) -> Axis {
        self.scale = Scale::Log;
        self
    }

    /// The same axis with a fixed end.
    #[must_use]
    pub fn up_to(mut self, max: f64) -> Axis {
        self.max = Some(max);
        self
    }
}

/// Style of a line's points.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shape {
    /// Joined by lines.
    #[default]
    Line,
    /// Joined by steps: a value holds until the next.
    Steps,
    /// Not joined.
    Points,
    /// Bars from 0, as wide as their distance.
    Bars,
}

/// A series of points.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Its name in the legend.
    pub name: String,
    /// Points by rising x; an absent y interrupts the line. Shape `[n]`.
    pub points: Vec<(f64, Option<f64>)>,
    /// Their style.
    pub shape: Shape,
    /// A name of each point, for the pointer. Shape `[n]`, or empty.
    pub labels: Vec<String>,
    /// A short label of each point, drawn next to it if there is space. Shape `[n]`, or empty.
    pub tags: Vec<String>,
    /// Index of its color; `None`: by its position.
    pub color: Option<usize>,
}

impl Line {
    /// A joined line.
    pub fn new(name: &str, points: impl IntoIterator<Item = (f64, Option<f64>)>) -> Line {
        Line {
            name: name.to_owned(),
            points: points.into_iter().collect(),
            ..Line::default()
        }
    }
}

impl Line {
    fn color(&self, place: usize) -> usize {
        self.color.unwrap_or(place) % COLORS
    }
}

/// A chart.
#[derive(Clone, Debug, Default)]
pub struct Chart {
    /// Its title.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// Its lines.
    pub lines: Vec<Line>,
    /// Marked positions along x, with names.
    pub marks: Vec<(f64, String)>,
}

/// An axis with its ends.
struct Span {
    min: f64,
    max: f64,
    scale: Scale,
}

impl Span {
    fn of(axis: &Axis, values: impl Iterator<Item = f64>) -> Span {
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|v| v.is_finite()) {
            if axis.scale == Scale::Linear || value > 0.0 {
                least = least.min(value);
                most = most.max(value);
            }
        }
        if axis.scale == Scale::Log {
            if least > most {
                (least, most) = (1.0, 10.0);
            }
            if least * 1.01 >= most {
                (least, most) = (least / 2.0, most * 2.0);
            }
            return Span {
                min: least,
                max: axis.max.unwrap_or(most),
                scale: Scale::Log,
            };
        }
        let most = if most > 0.0 { most } else { 1.0 };
        Span {
            min: 0.0,
            max: axis.max.unwrap_or(most),
            scale: Scale::Linear,
        }
    }

    /// Margin around the outermost values, so that lines do not run along the frame.
    fn with_room(mut self, fixed: bool) -> Span {
        if !fixed {
            match self.scale {
                Scale::Linear => self.max *= 1.06,
                Scale::Log => {
                    let room = (self.max / self.min).powf(0.04);
                    (self.min, self.max) = (self.min / room, self.max * room);
                }
            }
        }
        self
    }

    /// Position of a value, 0 to 1.
    fn along(&self, value: f64) -> Option<f64> {
        let place = match self.scale {
            Scale::Linear => (value - self.min) / (self.max - self.min),
            Scale::Log if value <= 0.0 => return None,
            Scale::Log => (value / self.min).ln() / (self.max / self.min).ln(),
        };
        place.is_finite().then(|| place.clamp(0.0, 1.0))
    }

    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.max / TICKS);
                let count = width::floor_u64(self.max / step * (1.0 + 1e-9));
                (0..=count).map(|n| n as f64 * step).collect()
            }
            Scale::Log if self.max / self.min < 4.0 => {
                let step = step((self.max - self.min) / TICKS);
                let first = width::floor_u64((self.min / step).ceil());
                let last = width::floor_u64(self.max / step * (1.0 + 1e-9));
                (first..=last).map(|n| n as f64 * step).collect()
            }
            Scale::Log => {
                let decades = (self.max / self.min).log10();
                let steps: &[f64] = match decades {
                    d if d > 4.0 => &[1.0],
                    d if d > 1.5 => &[1.0, 3.0],
                    _ => &[1.0, 1.5, 2.0, 3.0, 5.0, 7.0],
                };
                let first = exponent(self.min.log10().floor());
                let last = exponent(self.max.log10().ceil());
                (first..=last)
                    .flat_map(|power| steps.iter().map(move |s| s * 10f64.powi(power)))
                    .filter(|v| (self.min..=self.max).contains(v))
                    .collect()
            }
        }
    }
}

/// The next of 1, 2, 5, 10, … that is no less than `least`.
fn step(least: f64) -> f64 {
    if !(least.is_finite() && least > 0.0) {
        return 1.0;
    }
    let power = 10f64.powf(least.log10().floor());
    let digit = least / power;
    let nice = [1.0, 2.0, 5.0].into_iter().find(|n| *n >= digit * 0.999);
    nice.unwrap_or(10.0) * power
}

/// A tick's label: `0`, `0.25`, `40`, `1.5k`, `3M`.
pub fn tick(value: f64) -> String {
    let size = value.abs();
    let trim = |text: String| {
        if text.contains('.') {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    };
    if size >= 1e9 {
        format!("{}G", trim(format!("{:.2}", value / 1e9)))
    } else if size >= 1e6 {
        format!("{}M", trim(format!("{:.2}", value / 1e6)))
    } else if size >= 1e3 {
        format!("{}k", trim(format!("{:.2}", value / 1e3)))
    } else if size >= 100.0 || size == 0.0 {
        format!("{value:.0}")
    } else if size >= 1.0 {
        trim(format!("{value:.2}"))
    } else if size >= 1e-4 {
        trim(format!("{value:.5}"))
    } else {
        format!("{value:.0e}")
    }
}

impl Chart {
    /// The chart as a `<figure>`.
    pub fn render(&self) -> String {
        let xs = self.lines.iter().flat_map(|l| l.points.iter().map(|p| p.0));
        let marks = self.marks.iter().map(|m| m.0);
        // Lines may end at the frame; half a dot would be lost there.
        let dots = self.lines.iter().any(|l| l.shape == Shape::Points);
        let x = Span::of(&self.x, xs.chain(marks));
        let x = x.with_room(self.x.max.is_some() || !dots);
        let ys = self
            .lines
            .iter()
            .flat_map(|l| l.points.iter().filter_map(|p| p.1));
        let y = Span::of(&self.y, ys).with_room(self.y.max.is_some());
        let px = |value: f64| x.along(value).map(|at| LEFT + at * (RIGHT - LEFT));
        let py = |value: f64| y.along(value).map(|at| BOTTOM - at * (BOTTOM - TOP));

        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">",
            escape(&self.title)
        );
        let mut put = |text: std::fmt::Arguments<'_>| {
            svg.write_fmt(text).expect("a String takes every write");
        };
        for value in y.ticks() {
            if let Some(at) = py(value) {
                put(format_args!(
                    "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                     <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                    LEFT - 7.0,
                    at + 4.0,
                    tick(value)
                ));
            }
        }
        for value in x.ticks() {
            if let Some(at) = px(value) {
                put(format_args!(
                    "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{BOTTOM}\" y2=\"{:.1}\"/>\
                     <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    BOTTOM + 4.0,
                    BOTTOM + 17.0,
                    tick(value)
                ));
            }
        }
        put(format_args!(
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{BOTTOM}\" y2=\"{BOTTOM}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"across\" transform=\"translate(13 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, RIGHT),
            HEIGHT - 5.0,
            escape(&labeled(&self.x)),
            f64::midpoint(TOP, BOTTOM),
            escape(&labeled(&self.y)),
        ));
        for (value, name) in &self.marks {
            if let Some(at) = px(*value) {
                let (anchor, shift) = if at > f64::midpoint(LEFT, RIGHT) {
                    ("end", -5.0)
                } else {
                    ("start", 5.0)
                };
                put(format_args!(
                    "<line class=\"mark\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{BOTTOM}\"/>\
                     <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                    at + shift,
                    BOTTOM - 6.0,
                    escape(name)
                ));
            }
        }
        for (index, line) in self.lines.iter().enumerate() {
            write!(svg, "<g data-line=\"{index}\">").expect("a String takes every write");
            draw(&mut svg, line, line.color(index), px, py);
            svg.push_str("</g>");
        }
        self.tag(&mut svg, px, py);
        svg.push_str("</svg>");
        format!(
            "<figure class=\"chart\"><figcaption>{}<span class=\"across\">{}</span></figcaption>{}{svg}\
             <script type=\"application/json\">{}</script></figure>",
            escape(&self.title),
            escape(&labeled(&self.y)),
            self.legend(),
            json(&self.data(&x, &y))
        )
    }

    /// Writes the points' labels next to them, those of the last line first. A label without space
    /// is omitted; the pointer still shows it.
    fn tag(
        &self,
        svg: &mut String,
        px: impl Fn(f64) -> Option<f64>,
        py: impl Fn(f64) -> Option<f64>,
    ) {
        let place = |&(x, y): &(f64, Option<f64>)| px(x).zip(y.and_then(&py));
        let dots = self.lines.iter().filter(|l| l.shape == Shape::Points);
        let mut taken: Vec<Area> = dots
            .flat_map(|line| line.points.iter().filter_map(place))
            .map(|(x, y)| Area {
                left: x - 4.0,
                right: x + 4.0,
                top: y - 4.0,
                bottom: y + 4.0,
            })
            .collect();
        for (index, line) in self.lines.iter().enumerate().rev() {
            for (point, tag) in line.points.iter().zip(&line.tags) {
                let Some((x, y)) = place(point).filter(|_| !tag.is_empty()) else {
                    continue;
                };
                let next_to = |&(right, up): &(bool, f64)| Area::next_to(x, y + up, right, tag);
                let Some((side, room)) = TAG_PLACES
                    .iter()
                    .map(|side| (side, next_to(side)))
                    .find(|(_, room)| room.is_inside() && !taken.iter().any(|t| t.meets(room)))
                else {
                    continue;
                };
                let (anchor, at) = if side.0 {
                    ("start", room.left)
                } else {
                    ("end", room.right)
                };
                write!(
                    svg,
                    "<text class=\"tag\" data-line=\"{index}\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                    room.bottom - 2.5,
                    escape(tag)
                )
                .expect("a String takes every write");
                taken.push(room);
            }
        }
    }

    fn legend(&self) -> String {
        let mut html = String::from("<div class=\"legend\">");
        if self.lines.len() > 1 {
            for (index, line) in self.lines.iter().enumerate() {
                write!(
                    html,
                    "<span data-line=\"{index}\"><i class=\"f{}\"></i>{}</span>",
                    line.color(index),
                    escape(&line.name)
                )
                .expect("a String takes every write");
            }
        }
        html + "</div>"
    }

    /// Data for the script that shows the value under the pointer.
    fn data(&self, x: &Span, y: &Span) -> serde_json::Value {
        let axis = |axis: &Axis, span: &Span| {
            json!({
                "name": axis.name, "unit": axis.unit, "log": span.scale == Scale::Log,
                "min": span.min, "max": span.max,
            })
        };
        let lines: Vec<_> = self
            .lines
            .iter()
            .enumerate()
            .map(|(index, line)| {
                let points: Vec<_> = line
                    .points
                    .iter()
                    .enumerate()
                    .filter_map(|(at, point)| {
                        let (px, py) = (four_digits(point.0), four_digits(point.1?));
                        Some(match line.labels.get(at) {
                            Some(label) => json!([px, py, label]),
                            None => json!([px, py]),
                        })
                    })
                    .collect();
                json!({"name": line.name, "color": line.color(index), "points": points})
            })
            .collect();
        let both = self.lines.iter().any(|line| line.shape == Shape::Points);
        json!({
            "width": WIDTH, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM,
            "x": axis(&self.x, x), "y": axis(&self.y, y), "lines": lines, "both": both,
        })
    }
}

/// Possible positions of a label: whether to the right of its point, and how far its middle is
/// below the point's. Below a point comes first, because steps continue to its right.
const TAG_PLACES: [(bool, f64); 6] = [
    (true, 10.0),
    (true, -10.0),
    (false, 10.0),
    (false, -10.0),
    (true, 0.0),
    (false, 0.0),
];

/// Width of a letter in a point's name and height of its line, about, in the drawing's units.
const TAG_LETTER: f64 = 6.1;
const TAG_HEIGHT: f64 = 13.0;

/// Area that a dot or a label covers.
struct Area {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Area {
    fn next_to(x: f64, y: f64, right: bool, text: &str) -> Area {
        let wide = TAG_LETTER * text.chars().count() as f64;
        let left = if right { x + 6.0 } else { x - 6.0 - wide };
        Area {
            left,
            right: left + wide,
            top: y - TAG_HEIGHT / 2.0,
            bottom: y + TAG_HEIGHT / 2.0,
        }
    }

    fn is_inside(&self) -> bool {
        self.left >= LEFT && self.right <= WIDTH && self.top >= 0.0 && self.bottom <= BOTTOM
    }

    fn meets(&self, other: &Area) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }
}

fn labeled(axis: &Axis) -> String {
    let mut text = axis.name.clone();
    if !axis.unit.is_empty() {
        text = format!("{text}, {}", axis.unit);
    }
    match axis.scale {
        Scale::Linear => text,
        Scale::Log => text + " (log scale)",
    }
}

/// A whole power of ten: that of any float is between -324 and 308.
#[expect(
    clippy::cast_possible_truncation,
    reason = "its range, and `as` saturates for floats"
)]
fn exponent(power: f64) -> i32 {
    power as i32
}

/// Rounded, so that the page stays small.
fn four_digits(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - exponent(value.abs().log10().floor()));
    (value * scale).round() / scale
}

fn draw(
    svg: &mut String,
    line: &Line,
    color: usize,
    px: impl Fn(f64) -> Option<f64>,
    py: impl Fn(f64) -> Option<f64>,
) {
    let places: Vec<Option<(f64, f64)>> = line
        .points
        .iter()
        .map(|&(x, y)| px(x).zip(y.and_then(&py)))
        .collect();
    let mut put = |text: std::fmt::Arguments<'_>| {
        svg.write_fmt(text).expect("a String takes every write");
    };
    match line.shape {
        Shape::Points => {
            for (x, y) in places.into_iter().flatten() {
                put(format_args!(
                    "<circle class=\"f{color}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/>"
                ));
            }
        }
        Shape::Bars => {
            let gap = line
                .points
                .windows(2)
                .filter_map(|pair| Some(px(pair[1].0)? - px(pair[0].0)?))
                .fold(RIGHT - LEFT, f64::min);
            let width = (gap - 1.0).clamp(1.0, 40.0);
            for (x, y) in places.into_iter().flatten() {
                put(format_args!(
                    "<rect class=\"f{color}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\"/>",
                    x - width / 2.0,
                    BOTTOM - y
                ));
            }
        }
        Shape::Line | Shape::Steps => {
            let mut path = String::new();
            let mut before: Option<(f64, f64)> = None;
            for (at, place) in places.iter().enumerate() {
                let Some((x, y)) = *place else {
                    before = None;
                    continue;
                };
                let alone = before.is_none() && places.get(at + 1).copied().flatten().is_none();
                if alone {
                    put(format_args!(
                        "<circle class=\"f{color}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2\"/>"
                    ));
                }
                match before {
                    None => write!(path, "M{x:.1} {y:.1}"),
                    Some((_, last)) if line.shape == Shape::Steps => {
                        write!(path, "L{x:.1} {last:.1}L{x:.1} {y:.1}")
                    }
                    Some(_) => write!(path, "L{x:.1} {y:.1}"),
                }
                .expect("a String takes every write");
                before = Some((x, y));
            }
            if !path.is_empty() {
                put(format_args!("<path class=\"l s{color}\" d=\"{path}\"/>"));
            }
        }
    }
}

/// A heat map: one row per engine, one column per interval.
#[derive(Clone, Debug, Default)]
pub struct HeatMap {
    /// Its title.
    pub title: String,
    /// Unit of its values.
    pub unit: String,
    /// Names of its rows.
    pub rows: Vec<String>,
    /// Values, row by row. Shape `[rows][columns]`, every row as long as the first.
    pub values: Vec<Vec<f64>>,
    /// The value of the strongest color.
    pub max: f64,
    /// Length of a column, in `time`.
    pub step: f64,
    /// Unit of time.
    pub time: String,
}

impl HeatMap {
    /// The map as a `<figure>`.
    pub fn render(&self) -> String {
        let columns = self.values.first().map_or(0, Vec::len);
        let max = if self.max > 0.0 { self.max } else { 1.0 };
        let mut levels = String::with_capacity(2 * columns * self.rows.len());
        for value in self.values.iter().flatten() {
            let level = width::round_u64((value / max * 255.0).clamp(0.0, 255.0));
            write!(levels, "{level:02x}").expect("a String takes every write");
        }
        let rows = self.rows.len().max(1) as f64;
        let height = (rows * 20.0).clamp(20.0, 420.0);
        // As many labels as fit.
        let every = width::to_usize(width::floor_u64((12.0 / (height / rows)).ceil().max(1.0)));
        let mut names = String::new();
        for (index, name) in self.rows.iter().enumerate().step_by(every) {
            let top = (index as f64 + 0.5) / rows * height;
            write!(
                names,
                "<span style=\"top:{top:.1}px\">{}</span>",
                escape(name)
            )
            .expect("a String takes every write");
        }
        let widest = self
            .rows
            .iter()
            .map(|r| r.chars().count())
            .max()
            .unwrap_or(0);
        let data = json!({
            "rows": self.rows, "columns": columns, "levels": levels, "max": max,
            "unit": self.unit, "step": self.step, "time": self.time,
        });
        format!(
            "<figure class=\"heat\"><figcaption>{}</figcaption>\
             <div class=\"legend\"><span>0<i class=\"scale\"></i>{} {}</span></div>\
             <div class=\"plot\"><div class=\"names\" style=\"width:{widest}ch;height:{height:.0}px\">{names}</div>\
             <canvas style=\"height:{height:.0}px\" role=\"img\" aria-label=\"{}\"></canvas>\
             <div class=\"times\"><span>0</span><span>{} {}</span></div></div>\
             <noscript>Heat maps are drawn by a script.</noscript>\
             <script type=\"application/json\">{}</script></figure>",
            escape(&self.title),
            number(max),
            escape(&self.unit),
            escape(&self.title),
            tick(four_digits(self.step * columns as f64)),
            escape(&self.time),
            json(&data)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within() {
        let span = Span {
            min: 0.0,
            max: 87.0,
            scale: Scale::Linear,
        };
        assert_eq!(span.ticks(), [0.0, 20.0, 40.0, 60.0, 80.0]);
        let span = Span {
            min: 0.7,
            max: 2_000.0,
            scale: Scale::Log,
        };
        assert_eq!(
            span.ticks().iter().map(|v| tick(*v)).collect::<Vec<_>>(),
            ["1", "3", "10", "30", "100", "300", "1k"]
        );
        let span = Span {
            min: 13.7,
            max: 22.0,
            scale: Scale::Log,
        };
        assert_eq!(span.ticks(), [14.0, 16.0, 18.0, 20.0, 22.0]);
        assert_eq!(
            [0.25, 0.0, 40.0, 1_500.0, 20_000.0, 2.5e6].map(tick),
            ["0.25", "0", "40", "1.5k", "20k", "2.5M"]
        );
    }

    /// Coordinates of the path's points, from the drawing itself.
    fn path(chart: &Chart) -> Vec<(f64, f64)> {
        let html = chart.render();
        let from = html.find(" d=\"").expect("a path") + 4;
        let path = &html[from..from + html[from..].find('"').unwrap()];
        path.split(['M', 'L'])
            .filter(|point| !point.is_empty())
            .map(|point| {
                let (x, y) = point.split_once(' ').unwrap();
                (x.parse().unwrap(), y.parse().unwrap())
            })
            .collect()
    }

    #[test]
    fn points_stand_where_their_values_say() {
        let chart = Chart {
            x: Axis::new("time", "s"),
            y: Axis::new("share", "%").up_to(100.0),
            lines: vec![Line::new("a", [(0.0, Some(0.0)), (10.0, Some(50.0))])],
            ..Chart::default()
        };
        assert_eq!(
            path(&chart),
            [(LEFT, BOTTOM), (RIGHT, f64::midpoint(TOP, BOTTOM))]
        );
        let log = Chart {
            x: Axis::new("latency", "ms").log(),
            y: Axis::new("share", "%").up_to(100.0),
            lines: vec![Line::new(
                "a",
                [(1.0, Some(0.0)), (10.0, Some(0.0)), (100.0, Some(0.0))],
            )],
            ..Chart::default()
        };
        assert_eq!(path(&log)[1].0, f64::midpoint(LEFT, RIGHT));
    }

    #[test]
    fn an_axis_says_that_it_is_logarithmic() {
        let mut chart = Chart {
            x: Axis::new("time", "s"),
            y: Axis::new("TTFT", "ms").log(),
            ..Chart::default()
        };
        assert!(chart.render().contains(">TTFT, ms (log scale)<"));
        assert!(chart.render().contains(">time, s<"));
        chart.x = Axis::new("completion time", "µs").log();
        assert!(chart.render().contains(">completion time, µs (log scale)<"));
    }

    #[test]
    fn names_stand_beside_their_points_and_never_over_each_other() {
        let dots = |tags: &[&str], points: &[(f64, f64)]| Line {
            points: points.iter().map(|p| (p.0, Some(p.1))).collect(),
            tags: tags.iter().map(|&tag| tag.to_owned()).collect(),
            shape: Shape::Points,
            ..Line::default()
        };
        let chart = Chart {
            x: Axis::new("x", "").up_to(10.0),
            y: Axis::new("y", "").up_to(10.0),
            lines: vec![
                // Ten points in one place, and one apart in the upper right corner.
                dots(&["others"; 10], &[(5.0, 5.0); 10]),
                dots(&["2, kv", "<8>"], &[(5.0, 5.0), (10.0, 10.0)]),
            ],
            ..Chart::default()
        };
        let html = chart.render();
        let tags: Vec<&str> = html.split("class=\"tag\"").skip(1).collect();
        assert!(tags[0].contains(">2, kv<") && tags[1].contains(">&lt;8&gt;<"));
        assert!(tags[1].contains("text-anchor=\"end\""), "{}", tags[1]);
        // Four of the ten have room around their common point, as the last line's took a place.
        assert_eq!(tags.len(), 2 + 3, "{html}");
        let y = |tag: &str| {
            tag.split("y=\"")
                .nth(1)
                .unwrap()
                .split('"')
                .next()
                .unwrap()
                .to_owned()
        };
        let x = |tag: &str| {
            tag.split("x=\"")
                .nth(1)
                .unwrap()
                .split('"')
                .next()
                .unwrap()
                .to_owned()
        };
        let places: std::collections::BTreeSet<_> = tags.iter().map(|t| (x(t), y(t))).collect();
        assert_eq!(places.len(), tags.len());
    }

    #[test]
    fn nothing_to_show_is_an_empty_chart() {
        for scale in [Scale::Linear, Scale::Log] {
            let mut chart = Chart {
                lines: vec![Line::new("a", [(0.0, None)])],
                ..Chart::default()
            };
            chart.x.scale = scale;
            let html = chart.render();
            assert!(!html.contains("NaN") && !html.contains("inf"), "{html}");
        }
    }

    #[test]
    fn names_cannot_break_out() {
        let chart = Chart {
            title: "</script><script>alert(1)</script>".into(),
            lines: vec![Line::new("<b>", [(1.0, Some(1.0))]), Line::default()],
            ..Chart::default()
        };
        let html = chart.render();
        assert!(
            !html.contains("<script>alert") && !html.contains("<b>"),
            "{html}"
        );
    }
}
