//! Terms of one engine as a report, and as a section of a cluster file.

use std::fmt::Write as _;

use slipstream_perf::observed::{COUNT, NAMES, Terms};

/// Beyond this standard error a term is not determined.
const SURE: f64 = 0.25;

/// Errors on a part that the fit did not see.
pub struct HeldOut {
    /// The part.
    pub name: String,
    /// Its requests or steps.
    pub count: usize,
    /// By quantity: the median error of each time, and the error of the median time, as shares.
    pub errors: Vec<[f64; 2]>,
}

/// The fit of one engine.
pub struct Fitted {
    /// The terms, ns for each unit of work.
    pub terms: Terms,
    /// Standard error of each term, as a share of it.
    pub errors: Terms,
    /// Quantities of [`HeldOut::errors`].
    pub quantities: &'static [&'static str],
    /// One for each part that was left out.
    pub held_out: Vec<HeldOut>,
    /// The data, in words.
    pub data: String,
    /// Limits that the reader must know.
    pub notes: Vec<String>,
}

impl Fitted {
    /// How sure term `i` is, in words.
    fn sure(&self, i: usize) -> String {
        match (self.terms[i], self.errors[i]) {
            (0.0, 0.0) => "not seen in this data".into(),
            (0.0, _) => "too small for this data".into(),
            (_, error) if error > SURE => format!(
                "± {:.0} %: not determined by this data; its share may be in another term",
                (100.0 * error).min(999.0)
            ),
            (_, error) => format!("± {:.1} %", 100.0 * error),
        }
    }
}

/// The fit as Markdown; `source` names the data.
pub fn report(fitted: &Fitted, source: &str) -> String {
    let mut text = format!("Fitted to {} of {source}.\n\n", fitted.data);
    text.push_str("| term | value | for each | standard error |\n| --- | --- | --- | --- |\n");
    for (i, (name, of)) in NAMES.iter().enumerate().take(COUNT) {
        let _ = writeln!(
            text,
            "| `{name}` | {} | {of} | {} |",
            value(fitted.terms[i]),
            fitted.sure(i)
        );
    }
    text.push_str("\nErrors on parts that were left out, one after the other: median of each request's error, and \
                   error of the median.\n\n| left out | n |");
    for quantity in fitted.quantities {
        let _ = write!(text, " {quantity}, each | median |");
    }
    text.push_str("\n| --- | --- |");
    text.push_str(&" --- | --- |".repeat(fitted.quantities.len()));
    text.push('\n');
    for part in &fitted.held_out {
        let _ = write!(text, "| {} | {} |", part.name, part.count);
        for [each, of_median] in &part.errors {
            let _ = write!(
                text,
                " {:.1} % | {:+.1} % |",
                100.0 * each,
                100.0 * of_median
            );
        }
        text.push('\n');
    }
    for note in &fitted.notes {
        let _ = write!(text, "\nNote: {note}\n");
    }
    text
}

/// The section `[SECTION.timing]` of a cluster file.
pub fn toml(section: &str, fitted: &Fitted) -> String {
    let mut text = format!(
        "[{section}.timing]\n# Fitted by `slipstream calibrate` to {}.\n",
        fitted.data
    );
    for part in &fitted.held_out {
        let _ = write!(text, "# Left out {} ({}):", part.name, part.count);
        for (quantity, [each, _]) in fitted.quantities.iter().zip(&part.errors) {
            let _ = write!(text, " {quantity} off by {:.1} %;", 100.0 * each);
        }
        text.truncate(text.trim_end_matches(';').len());
        text.push('\n');
    }
    text.push_str("kind = \"linear\"\n");
    for (i, (name, _)) in NAMES.iter().enumerate() {
        let _ = writeln!(
            text,
            "{name} = {}  # {}",
            value(fitted.terms[i]),
            fitted.sure(i)
        );
    }
    text
}

/// Five digits, as TOML.
fn value(ns: f64) -> String {
    let digits = if ns >= 1e4 {
        0
    } else if ns >= 1.0 {
        3
    } else {
        6
    };
    if digits == 0 {
        format!("{ns:.1}")
    } else {
        format!("{ns:.digits$}")
    }
}
