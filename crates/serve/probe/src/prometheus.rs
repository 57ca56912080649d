//! Prometheus' text format, read sample by sample.
//!
//! Source: "Exposition formats" in Prometheus' documentation, text format 0.0.4, and OpenMetrics
//! 1.0, whose samples have the same form. Lines that are neither a sample nor a comment are counted
//! and skipped, so one bad line of an engine does not hide the others.

use std::borrow::Cow;

/// Samples read from one body at most. An engine under one model name exposes some thousands.
pub const SAMPLES_MAX: usize = 200_000;

/// Labels of one sample at most.
const LABELS_MAX: usize = 256;

/// One sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'t> {
    /// Name of the metric, with its suffix (`_total`, `_bucket`, …).
    pub name: &'t str,
    /// Labels in the order of the text.
    pub labels: Vec<(&'t str, Cow<'t, str>)>,
    /// The value; may be NaN or infinite.
    pub value: f64,
}

impl Sample<'_> {
    /// The value of label `name`.
    pub fn label(&self, name: &str) -> Option<&str> {
        let found = self.labels.iter().find(|(label, _)| *label == name);
        found.map(|(_, value)| value.as_ref())
    }
}

/// The samples of a body.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples<'t> {
    /// In the order of the text.
    pub samples: Vec<Sample<'t>>,
    /// Lines that are no sample.
    pub bad_lines: usize,
    /// Whether samples beyond [`SAMPLES_MAX`] were left unread.
    pub cut: bool,
}

impl<'t> Samples<'t> {
    /// Reads `text`. Never fails: bad lines are counted.
    pub fn parse(text: &'t str) -> Samples<'t> {
        let mut found = Samples::default();
        for line in text.lines() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if found.samples.len() == SAMPLES_MAX {
                found.cut = true;
                break;
            }
            match sample(line) {
                Some(sample) => found.samples.push(sample),
                None => found.bad_lines += 1,
            }
        }
        found
    }

    /// Samples of the metric `name`.
    pub fn of<'s>(&'s self, name: &'s str) -> impl Iterator<Item = &'s Sample<'t>> {
        self.samples
            .iter()
            .filter(move |sample| sample.name == name)
    }

    /// Sum of the finite values of the metric `name`; `None` without a sample.
    pub fn sum(&self, name: &str) -> Option<f64> {
        let values = self.of(name).map(|sample| sample.value);
        values
            .filter(|value| value.is_finite())
            .reduce(|a, b| a + b)
    }
}

/// `name{label="value",…} value [timestamp] [# exemplar]`.
fn sample(line: &str) -> Option<Sample<'_>> {
    let end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(end);
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    if name.is_empty()
        || name.starts_with(|c: char| c.is_ascii_digit())
        || !name.chars().all(is_name)
    {
        return None;
    }
    let rest = rest.trim_start();
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_whitespace().next()?;
    let value = match value {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        "NaN" => f64::NAN,
        value => value.parse().ok()?,
    };
    Some(Sample {
        name,
        labels,
        value,
    })
}

/// Labels with their values.
type Labels<'t> = Vec<(&'t str, Cow<'t, str>)>;

/// The labels up to the closing brace, and what follows it.
fn labels(mut rest: &str) -> Option<(Labels<'_>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start();
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        if labels.len() == LABELS_MAX {
            return None;
        }
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_start().strip_prefix('"')?;
        let end = closing_quote(after)?;
        labels.push((name.trim(), unescape(&after[..end])));
        rest = after[end + 1..].trim_start();
        rest = match rest.strip_prefix(',') {
            Some(rest) => rest,
            None if rest.starts_with('}') => rest,
            None => return None,
        };
    }
}

/// Offset of the quote that ends a label's value.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some(at),
            _ => {}
        }
    }
    None
}

fn unescape(value: &str) -> Cow<'_, str> {
    if !value.contains('\\') {
        return Cow::Borrowed(value);
    }
    let mut out = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            Some(c @ ('\\' | '"')) => out.push(c),
            // Other escapes are not defined; their text is kept.
            Some(c) => out.extend(['\\', c]),
            None => out.push('\\'),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn samples_have_names_labels_and_values() {
        let text = "# HELP vllm:x Text with {braces} 1\n# TYPE vllm:x gauge\n\
                    vllm:x{engine=\"0\",model_name=\"a \\\"b\\\" {c},d=\\\\\"} 2.5 1700000000\n\
                    plain 7\n\
                    h_bucket{le=\"+Inf\"} +Inf\n\
                    spaced { a = \"1\" , } -3e2 # {trace_id=\"t\"} 1\n\
                    n NaN\n";
        let found = Samples::parse(text);
        assert_eq!((found.samples.len(), found.bad_lines), (5, 0));
        assert_eq!(
            found.samples[0].label("model_name"),
            Some("a \"b\" {c},d=\\")
        );
        assert_eq!(found.sum("vllm:x"), Some(2.5));
        assert_eq!(found.sum("plain"), Some(7.0));
        assert_eq!(found.samples[2].value, f64::INFINITY);
        assert_eq!(found.samples[3].label("a"), Some("1"));
        assert_eq!(found.samples[3].value, -300.0);
        // NaN is a sample, but no part of a sum.
        assert_eq!((found.of("n").count(), found.sum("n")), (1, None));
        assert_eq!(found.sum("absent"), None);
    }

    #[test]
    fn bad_lines_are_counted_and_hide_nothing() {
        let text = "<html>\na{b=\"c} 1\na{b=c} 1\na{b=\"c\"x} 1\na\na x\n9a 1\n\na{b=\"c\"} 4";
        let found = Samples::parse(text);
        assert_eq!((found.samples.len(), found.bad_lines), (1, 7));
        assert_eq!(found.sum("a"), Some(4.0));
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "[a-z{}=\",\\\\ \n#0-9.+é-]{0,200}") {
            let found = Samples::parse(&text);
            prop_assert!(found.samples.len() + found.bad_lines <= text.lines().count());
        }

        #[test]
        fn label_values_survive(value in any::<String>()) {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            // `lines` ends a line at a carriage return before a line feed only.
            let text = format!("m{{l=\"{escaped}\"}} 1\n");
            let found = Samples::parse(&text);
            prop_assert_eq!(found.samples[0].label("l"), Some(value.as_str()));
        }
    }
}
