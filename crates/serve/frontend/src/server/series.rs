//! Reads the lines of an OpenMetrics text.

/// Labels of a series, unescaped.
pub(super) type Labels<'a> = Vec<(&'a str, String)>;

/// A line `name{key="value",…} number` of an OpenMetrics text; `None` for comments and other lines.
pub(super) fn series(line: &str) -> Option<(&str, Labels<'_>, f64)> {
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
    Some((name, labels, value))
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
        let (name, labels, value) = series(r#"a_total{x="1,2}\"\\",y="k\nl"} 3.5"#).unwrap();
        assert_eq!((name, value), ("a_total", 3.5));
        assert_eq!(
            labels,
            [("x", "1,2}\"\\".to_owned()), ("y", "k\nl".to_owned())]
        );
        assert_eq!(series("b 4").unwrap().2, 4.0);
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
