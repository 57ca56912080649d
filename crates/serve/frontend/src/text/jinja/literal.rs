//! String literals with escapes, which Python reads differently from the engine.

use std::fmt::Write;

/// Writes `literal`, a string with its quotes as Jinja2 reads it, for the engine.
///
/// Jinja2 decodes `literal.encode("ascii", "backslashreplace")` with Python's `unicode-escape`.
///
/// # Errors
/// The reason, if Python refuses the literal or a character is named.
pub(super) fn rewritten(literal: &str) -> Result<String, String> {
    let mark = literal.chars().next().unwrap_or('\'');
    let inner = literal.get(1..literal.len() - 1).unwrap_or_default();
    let mut out = String::with_capacity(literal.len());
    out.push(mark);
    for part in decoded(inner)? {
        match part {
            Part::Char(c) if c == '\\' || c == mark => {
                out.push('\\');
                out.push(c);
            }
            Part::Char(c) => out.push(c),
            // Half of a pair: the engine joins it, or refuses it.
            Part::Half(code) => {
                let _ = write!(out, "\\u{code:04x}");
            }
        }
    }
    out.push(mark);
    Ok(out)
}

enum Part {
    Char(char),
    Half(u32),
}

fn decoded(inner: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut chars = inner.chars().peekable();
    let part = |code: u32| match char::from_u32(code) {
        Some(c) => Ok(Part::Char(c)),
        None if code < 0x1_0000 => Ok(Part::Half(code)),
        None => Err(format!("`\\U{code:08x}` is not a character")),
    };
    while let Some(c) = chars.next() {
        if c != '\\' {
            parts.push(Part::Char(c));
            continue;
        }
        let Some(escape) = chars.next() else {
            return Err("a string ends with a backslash".to_owned());
        };
        let plain = match escape {
            '\n' => continue,
            '\\' | '\'' | '"' => escape,
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            '0'..='7' => {
                let mut code = escape.to_digit(8).unwrap_or(0);
                for _ in 0..2 {
                    let Some(digit) = chars.peek().and_then(|c| c.to_digit(8)) else {
                        break;
                    };
                    code = code * 8 + digit;
                    chars.next();
                }
                parts.push(part(code)?);
                continue;
            }
            'x' | 'u' | 'U' => {
                let len = match escape {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let digits: String = chars.by_ref().take(len).collect();
                let hex = digits.len() == len && digits.bytes().all(|b| b.is_ascii_hexdigit());
                let code = u32::from_str_radix(&digits, 16).ok().filter(|_| hex);
                let wrong = || format!("`\\{escape}` needs {len} hexadecimal digits");
                parts.push(part(code.ok_or_else(wrong)?)?);
                continue;
            }
            'N' => {
                return Err(
                    "characters by name (`\\N{…}`) are not supported; write the character"
                        .to_owned(),
                );
            }
            other => {
                parts.push(Part::Char('\\'));
                let code = u32::from(other);
                let ascii = match code {
                    ..=0x7f => String::from(other),
                    0x80..=0xff => format!("x{code:02x}"),
                    0x100..=0xffff => format!("u{code:04x}"),
                    _ => format!("U{code:08x}"),
                };
                parts.extend(ascii.chars().map(Part::Char));
                continue;
            }
        };
        parts.push(Part::Char(plain));
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_pythons() {
        for (literal, expected) in [
            (r"'<\/tool>'", r"'<\\/tool>'"),
            (r"'\U0001F600\a\v\101\400\x41\d'", "'😀\u{7}\u{b}AĀA\\\\d'"),
            ("'a\\\nb'", "'ab'"),
            (r#"'\"\'\\'"#, r#"'"\'\\'"#),
            (r"'\é\漢'", r"'\\xe9\\u6f22'"),
            (r"'\ud83d\ude00'", r"'\ud83d\ude00'"),
        ] {
            assert_eq!(rewritten(literal).unwrap(), expected);
        }
        for wrong in [
            r"'\x4'",
            r"'\u12'",
            r"'\U00110000'",
            r"'\N{BULLET}'",
            r"'\xg0'",
        ] {
            assert!(rewritten(wrong).is_err(), "{wrong}");
        }
    }
}
