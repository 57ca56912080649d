//! Numbers of a JSON text that the parser cannot keep: integers of more than 64 bits, `-0`, and the literals that
//! only Python's `json` has.

/// A JSON text in which such numbers stand in quotes.
pub(super) struct Quoted {
    pub(super) text: String,
    /// Where the quoted numbers begin in `text`, behind the quote, ascending.
    places: Vec<usize>,
}

impl Quoted {
    /// Quotes integers of more than 64 bits and `-0` in `json`. With `python`, also `NaN`, `Infinity`, `-Infinity`, and
    /// floats that are too large.
    pub(super) fn new(json: &str, python: bool) -> Quoted {
        let bytes = json.as_bytes();
        let mut quoted = Quoted {
            text: String::with_capacity(json.len() + 64),
            places: Vec::new(),
        };
        let (mut at, mut copied) = (0, 0);
        while at < bytes.len() {
            if bytes[at] == b'"' {
                at = text_end(bytes, at);
                continue;
            }
            let part = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'+' | b'.');
            let len = bytes[at..].iter().take_while(|b| part(b)).count();
            if len == 0 {
                at += 1;
                continue;
            }
            if let Some(kept) = kept(&json[at..at + len], python) {
                quoted.text.push_str(&json[copied..at]);
                quoted.text.push('"');
                quoted.places.push(quoted.text.len());
                quoted.text.push_str(kept);
                quoted.text.push('"');
                copied = at + len;
            }
            at += len;
        }
        quoted.text.push_str(&json[copied..]);
        quoted
    }

    /// Whether `text`, a part of the JSON text, is a quoted number.
    pub(super) fn is_number(&self, text: &str) -> bool {
        let place = (text.as_ptr() as usize).wrapping_sub(self.text.as_ptr() as usize);
        self.places.binary_search(&place).is_ok()
    }
}

/// The place behind the string that begins at `at`.
fn text_end(bytes: &[u8], at: usize) -> usize {
    let mut at = at + 1;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The literal that `word` becomes in quotes; `None` if it stays as it is.
fn kept(word: &str, python: bool) -> Option<&str> {
    let digits = word.strip_prefix('-').unwrap_or(word);
    let first = *digits.as_bytes().first()?;
    if !first.is_ascii_digit() {
        let named = matches!(word, "NaN" | "Infinity" | "-Infinity");
        return (python && named).then_some(word);
    }
    if digits.bytes().all(|b| b.is_ascii_digit()) {
        let valid = digits.len() == 1 || first != b'0';
        let short = word != "-0" && (word.parse::<u64>().is_ok() || word.parse::<i64>().is_ok());
        return (valid && !short).then_some(word);
    }
    let float = |b: u8| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-');
    let infinite =
        python && digits.bytes().all(float) && word.parse::<f64>().is_ok_and(f64::is_infinite);
    // Its syntax is checked with a value that fits.
    let checked = infinite && {
        let mantissa = word.split(['e', 'E']).next().unwrap_or_default();
        serde_json::from_str::<f64>(&format!("{mantissa}e-99999")).is_ok()
    };
    checked.then_some(if word.starts_with('-') {
        "-Infinity"
    } else {
        "Infinity"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_outside_of_texts_are_quoted() {
        let quoted = |json: &str, python| Quoted::new(json, python).text;
        for (json, expected) in [
            (
                r#"{"a": 98765432109876543210, "b": [-0, 1, -0.0]}"#,
                r#"{"a": "98765432109876543210", "b": ["-0", 1, -0.0]}"#,
            ),
            (
                r#"["\"98765432109876543210", -9223372036854775809]"#,
                r#"["\"98765432109876543210", "-9223372036854775809"]"#,
            ),
            (
                "[18446744073709551615, -9223372036854775808]",
                "[18446744073709551615, -9223372036854775808]",
            ),
            (
                "[1e400, 00000000000000000000001, 12345678901234567890123x]",
                "[1e400, 00000000000000000000001, 12345678901234567890123x]",
            ),
            ("\"open 98765432109876543210", "\"open 98765432109876543210"),
            ("\"\\", "\"\\"),
        ] {
            assert_eq!(quoted(json, false), expected);
        }
        assert_eq!(
            quoted(
                "[NaN, -Infinity, 1e400, -1.5E+999, 1e5, 1.e400, true]",
                true
            ),
            r#"["NaN", "-Infinity", "Infinity", "-Infinity", 1e5, 1.e400, true]"#
        );
        let quoted = Quoted::new(r#"["18446744073709551616", 18446744073709551616]"#, false);
        let texts: Vec<&str> = serde_json::from_str(&quoted.text).unwrap();
        assert!(!quoted.is_number(texts[0]) && quoted.is_number(texts[1]));
    }
}
