//! Values as Python writes them: `str()` and `repr()`.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::Value;
use minijinja::value::{DynObject, ValueKind};

use super::objects;

/// Limit of nested lists and objects; deeper ones are written as `...`, as Python writes a list inside itself.
const DEPTH_MAX: usize = 128;

/// `str(value)`; nothing for an undefined one, as Jinja2 prints it.
pub(super) fn str(value: &Value) -> String {
    let mut out = String::new();
    write_str(value, &mut out);
    out
}

/// `str(value)`, borrowed if it is a string.
pub(super) fn text(value: &Value) -> Cow<'_, str> {
    value
        .as_str()
        .map_or_else(|| Cow::Owned(str(value)), Cow::Borrowed)
}

/// Appends `str(value)`.
pub(super) fn write_str(value: &Value, out: &mut String) {
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => {}
        None => write_repr(value, out, 0),
    }
}

/// `repr(value)`
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(value, &mut out, 0);
    out
}

/// Whether `value` is a Python `float`.
pub(super) fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

fn write_repr(value: &Value, out: &mut String, depth: usize) {
    if depth > DEPTH_MAX {
        out.push_str("...");
        return;
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if is_float(value) => {
            out.push_str(&float(f64::try_from(value.clone()).unwrap_or(f64::NAN)));
        }
        ValueKind::Map => {
            let pairs = value.as_object().and_then(DynObject::try_iter_pairs);
            out.push('{');
            for (at, (key, value)) in pairs.into_iter().flatten().enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                write_repr(&key, out, depth + 1);
                out.push_str(": ");
                write_repr(&value, out, depth + 1);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable
            if value.len().is_some() && !objects::is_range(value) =>
        {
            let tuple = value.is_tuple() || objects::is_group(value);
            out.push(if tuple { '(' } else { '[' });
            let mut count = 0;
            for element in value.try_iter().into_iter().flatten() {
                if count > 0 {
                    out.push_str(", ");
                }
                write_repr(&element, out, depth + 1);
                count += 1;
            }
            if tuple && count == 1 {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// `repr` of a float: the shortest digits that name it, with an exponent where it is large or small.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').expect("it was written with one");
    let exponent: i32 = exponent.parse().expect("it was written as a number");
    if (-4..16).contains(&exponent) {
        let plain = format!("{number}");
        return if plain.contains('.') {
            plain
        } else {
            plain + ".0"
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Appends `text` in quotes.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if c == mark => {
                out.push('\\');
                out.push(c);
            }
            _ if is_printable(c) => out.push(c),
            _ => {
                let code = u32::from(c);
                let _ = match code {
                    ..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(mark);
}

/// `str.isprintable` of one character.
pub(super) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return matches!(c, ' '..='~');
    }
    // Rust's `Debug` has the same table. Behind a letter it does not escape combining characters.
    let mut text = String::from("a");
    text.push(c);
    !format!("{text:?}").contains("\\u")
}

/// `str.isspace` of one character.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}
