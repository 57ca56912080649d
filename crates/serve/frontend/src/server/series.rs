//! Reads the lines of an OpenMetrics text.

/// A line `name{key="value",…} number` of an OpenMetrics text.
#[derive(Debug)]
pub(super) struct Series<'a> {
    pub(super) name: &'a str,
    /// Unescaped.
    labels: Vec<(&'a str, String)>,
    pub(super) value: f64,
}

impl Series<'_> {
    /// The value of label `key`.
    pub(super) fn label(&self, key: &str) -> Option<&str> {
        let (_, value) = self.labels.iter().find(|(name, _)| *name == key)?;
        Some(value)
    }
}

/// The series in `line`; `None` for comments and other lines.
pub(super) fn series(line: &str) -> Option<Series<'_>> {
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.push((key, value));
            rest = after.strip_prefix(',').unwrap_or(after);
        }
        rest = &rest[1..];
    }
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Series {
        name,
        labels,
        value,
    })
}

/// A label's value up to its closing quote, and the rest of the line behind it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_with_its_escapes() {
        let read = series(r#"a_total{x="1,2}\"\\",y="k\nl"} 3.5"#).unwrap();
        assert_eq!((read.name, read.value), ("a_total", 3.5));
        assert_eq!(read.label("x"), Some("1,2}\"\\"));
        assert_eq!(read.label("y"), Some("k\nl"));
        assert_eq!(read.label("z"), None);
        assert_eq!(series("b 4").unwrap().value, 4.0);
        for line in [
            "# HELP a b",
            "",
            "a",
            "a{x=\"1\" 2",
            "a{x=\"1",
            "a{x} 1",
            "a b",
            "a{",
        ] {
            assert!(series(line).is_none(), "{line}");
        }
    }
}
