//! Plain text tables for people: columns padded to width, numbers to the right.

use slipstream_base::width;
use std::fmt::Write as _;

pub use slipstream_base::text::{counted, grouped};

/// Emphasis of a cell, if the output allows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// No emphasis.
    #[default]
    Plain,
    /// Better than the reference.
    Better,
    /// Worse than the reference.
    Worse,
}

/// A table: a header, rows of cells, the first column left-aligned and the rest right-aligned.
#[derive(Clone, Debug, Default)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<(String, Tone)>>,
}

impl Table {
    /// A table with these column names.
    pub fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Table {
        Table {
            header: header.into_iter().map(Into::into).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; missing cells are empty, and cells beyond the header are dropped.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.toned_row(cells.into_iter().map(|c| (c.into(), Tone::Plain)));
    }

    /// Adds a row whose cells carry a tone.
    pub fn toned_row(&mut self, cells: impl IntoIterator<Item = (String, Tone)>) {
        let mut row: Vec<_> = cells.into_iter().take(self.header.len()).collect();
        row.resize(self.header.len(), (String::new(), Tone::Plain));
        self.rows.push(row);
    }

    /// The table as text, one line per row, each ended by a newline. `color`: write ANSI colors for
    /// tones; see [`color_wanted`].
    pub fn render(&self, color: bool) -> String {
        let width = |text: &str| text.chars().count();
        let widths: Vec<usize> = (0..self.header.len())
            .map(|c| {
                self.rows
                    .iter()
                    .map(|row| width(&row[c].0))
                    .chain([width(&self.header[c])])
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut out = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = (&str, Tone)>| {
            let mut text = String::new();
            for (c, (cell, tone)) in cells.enumerate() {
                let pad = " ".repeat(widths[c] - width(cell));
                let (on, off) = match tone {
                    Tone::Better if color => ("\x1b[32m", "\x1b[0m"),
                    Tone::Worse if color => ("\x1b[31m", "\x1b[0m"),
                    _ => ("", ""),
                };
                let gap = if c == 0 { "" } else { "  " };
                if c == 0 {
                    write!(text, "{gap}{on}{cell}{off}{pad}").expect("a String takes every write");
                } else {
                    write!(text, "{gap}{pad}{on}{cell}{off}").expect("a String takes every write");
                }
            }
            out.push_str(text.trim_end());
            out.push('\n');
        };
        line(&mut self.header.iter().map(|h| (h.as_str(), Tone::Plain)));
        let rules: Vec<String> = widths.iter().map(|w| "─".repeat(*w)).collect();
        line(&mut rules.iter().map(|r| (r.as_str(), Tone::Plain)));
        for row in &self.rows {
            line(&mut row.iter().map(|(text, tone)| (text.as_str(), *tone)));
        }
        out
    }
}

/// Whether to color: the output is a terminal, and `NO_COLOR` is unset or empty
/// (<https://no-color.org>). The caller reads both.
pub fn color_wanted(is_terminal: bool, no_color: Option<&std::ffi::OsStr>) -> bool {
    is_terminal && no_color.is_none_or(std::ffi::OsStr::is_empty)
}

/// A number with about three significant digits and thousands separated: `0.0123`, `4.56`,
/// `789`, `12,345`.
pub fn number(value: f64) -> String {
    let magnitude = value.abs();
    if !value.is_finite() {
        "-".to_owned()
    } else if magnitude >= 100.0 {
        let sign = if value < 0.0 { "-" } else { "" };
        format!("{sign}{}", grouped(width::round_u64(magnitude)))
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else if magnitude >= 1.0 {
        format!("{value:.2}")
    } else if magnitude >= 0.1 || magnitude == 0.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.4}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_colors_do_not_count() {
        let mut table = Table::new(["metric", "a", "b"]);
        table.toned_row([
            ("ttft".to_owned(), Tone::Plain),
            ("1.0".to_owned(), Tone::Better),
            ("10".to_owned(), Tone::Plain),
        ]);
        table.row(["a long name", "2"]);
        assert_eq!(
            table.render(false),
            "metric         a   b\n───────────  ───  ──\nttft         1.0  10\na long name    2\n"
        );
        assert_eq!(
            table
                .render(true)
                .replace("\x1b[32m", "")
                .replace("\x1b[0m", ""),
            table.render(false)
        );
    }

    #[test]
    fn color_needs_a_terminal_and_no_veto() {
        assert!(color_wanted(true, None));
        assert!(color_wanted(true, Some("".as_ref())));
        assert!(!color_wanted(true, Some("1".as_ref())));
        assert!(!color_wanted(false, None));
    }

    #[test]
    fn numbers_keep_about_three_digits() {
        let shown = [
            0.0,
            0.01234,
            0.5,
            4.564,
            45.64,
            456.4,
            1_234_567.0,
            -1_234.0,
            f64::NAN,
        ];
        assert_eq!(
            shown.map(number),
            [
                "0.000",
                "0.0123",
                "0.500",
                "4.56",
                "45.6",
                "456",
                "1,234,567",
                "-1,234",
                "-"
            ]
        );
    }
}
