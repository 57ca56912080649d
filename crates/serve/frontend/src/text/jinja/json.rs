//! `tojson` as `transformers` has it: Python's `json.dumps`.

use minijinja::value::{DynObject, Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::args::Args;
use super::{objects, python};

/// Limit of a value's nesting, in place of Python's recursion limit.
const DEPTH_MAX: usize = 900;

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`
#[allow(clippy::needless_pass_by_value)] // a filter's signature
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "tojson")?;
    let ensure_ascii = args.next("ensure_ascii").is_some_and(|flag| flag.is_true());
    let indent = args.next("indent").filter(|indent| !indent.is_none());
    let separators = args.next("separators").filter(|both| !both.is_none());
    let sort_keys = args.next("sort_keys").is_some_and(|flag| flag.is_true());
    args.finish()?;
    let indent = match indent {
        None => None,
        Some(text) if text.kind() == ValueKind::String => Some(python::str(&text)),
        Some(number) => {
            let spaces = number.as_i64().or(match number.kind() {
                ValueKind::Bool => Some(i64::from(number.is_true())),
                _ => None,
            });
            let spaces = spaces.ok_or_else(|| failed("`indent` must be a number or a string"))?;
            Some(" ".repeat(usize::try_from(spaces).unwrap_or(0).min(64)))
        }
    };
    let (item, key) = match separators {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(both) => {
            let both: Vec<Value> = both.try_iter()?.collect();
            match &both[..] {
                [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
                    (python::str(item), python::str(key))
                }
                _ => return Err(failed("`separators` must be two strings")),
            }
        }
    };
    let writer = Writer {
        ensure_ascii,
        indent,
        item,
        key,
        sort_keys,
    };
    let mut out = String::new();
    writer.value(value, 0, &mut out)?;
    Ok(Value::from(out))
}

fn failed(message: impl Into<String>) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("tojson: {}", message.into()),
    )
}

struct Writer {
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Writer {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(failed("the value is nested too deeply"));
        }
        if let Some(integer) = value.downcast_object_ref::<objects::LongInteger>() {
            out.push_str(integer.digits());
            return Ok(());
        }
        if let Some(name) = objects::not_json(value) {
            return Err(failed(format!("a {name} is not JSON")));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(value, out),
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => {
                let pairs = value.as_object().and_then(DynObject::try_iter_pairs);
                let mut pairs: Vec<(Value, Value)> = pairs.into_iter().flatten().collect();
                if self.sort_keys {
                    let text = |value: &Value| value.as_str().is_some();
                    if pairs.iter().any(|pair| text(&pair.0))
                        && !pairs.iter().all(|pair| text(&pair.0))
                    {
                        return Err(failed("keys of different types cannot be sorted"));
                    }
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                out.push('{');
                for (at, (name, value)) in pairs.iter().enumerate() {
                    self.separate(at, depth + 1, out);
                    match name.kind() {
                        ValueKind::String => self.text(name.as_str().unwrap_or_default(), out),
                        ValueKind::None => out.push_str("\"null\""),
                        ValueKind::Bool | ValueKind::Number => {
                            out.push('"');
                            self.value(name, depth + 1, out)?;
                            out.push('"');
                        }
                        _ => return Err(failed("keys must be strings or numbers")),
                    }
                    out.push_str(&self.key);
                    self.value(value, depth + 1, out)?;
                }
                self.close(pairs.is_empty(), depth, out);
                out.push('}');
            }
            ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
                out.push('[');
                let mut empty = true;
                for (at, element) in value.try_iter()?.enumerate() {
                    empty = false;
                    self.separate(at, depth + 1, out);
                    self.value(&element, depth + 1, out)?;
                }
                self.close(empty, depth, out);
                out.push(']');
            }
            ValueKind::Undefined => return Err(failed("the value is undefined")),
            kind => return Err(failed(format!("a value of type {kind} is not JSON"))),
        }
        Ok(())
    }

    /// Appends the separator in front of the element at place `at`.
    fn separate(&self, at: usize, depth: usize, out: &mut String) {
        if at > 0 {
            out.push_str(&self.item);
        }
        self.line(depth, out);
    }

    fn close(&self, empty: bool, depth: usize, out: &mut String) {
        if !empty {
            self.line(depth, out);
        }
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            for _ in 0..depth {
                out.push_str(indent);
            }
        }
    }

    fn text(&self, text: &str, out: &mut String) {
        use std::fmt::Write;
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => {
                    let _ = write!(out, "\\u{:04x}", u32::from(c));
                }
                _ if c > '~' && self.ensure_ascii => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value, out: &mut String) {
    if !python::is_float(value) {
        out.push_str(&value.to_string());
        return;
    }
    let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    out.push_str(&match number {
        _ if number.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        _ => python::float(number),
    });
}
