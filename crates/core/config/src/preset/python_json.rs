//! JSON as Python writes it: with `NaN`, `Infinity` and `-Infinity`, which are not JSON.

use serde_json::Value;

/// Parses `text`. Numbers that JSON lacks become strings, so that a size with such a value is refused.
///
/// # Errors
/// If it is not JSON otherwise.
pub(super) fn parse(text: &[u8]) -> Result<Value, serde_json::Error> {
    match serde_json::from_slice(text) {
        Ok(value) => Ok(value),
        // Only where it failed: most files have none of these.
        Err(error) => serde_json::from_slice(&quoted(text)).map_err(|_| error),
    }
}

/// `text` with quotes around the three names, outside of strings.
fn quoted(text: &[u8]) -> Vec<u8> {
    const NAMES: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let mut out = Vec::with_capacity(text.len() + 16);
    let mut in_string = false;
    let mut at = 0;
    while at < text.len() {
        let name = NAMES
            .iter()
            .find(|name| !in_string && text[at..].starts_with(name));
        if let Some(name) = name {
            out.push(b'"');
            out.extend_from_slice(name);
            out.push(b'"');
            at += name.len();
            continue;
        }
        let byte = text[at];
        out.push(byte);
        at += 1;
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string && at < text.len() => {
                out.push(text[at]);
                at += 1;
            }
            _ => {}
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_of_python_are_texts() {
        let text = br#"{"a": [0.0, Infinity], "b": -Infinity, "c": NaN, "d": "NaN \" Infinity", "e\\": NaN}"#;
        let expected = json!({
            "a": [0.0, "Infinity"], "b": "-Infinity", "c": "NaN", "d": "NaN \" Infinity", "e\\": "NaN"
        });
        assert_eq!(parse(text).unwrap(), expected);
        for wrong in [
            &b"{\"a\": NaNo}"[..],
            b"{\"a\": infinity}",
            b"{\"a\": \"",
            b"\"\\",
            b"--Infinity",
            b"{NaN",
        ] {
            assert!(parse(wrong).is_err());
        }
    }
}
