//! Filters for HTML and addresses, and those that are refused by name.

use minijinja::value::{DynObject, Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::args::Args;
use super::{filters, python, strings};

/// Adds them to `environment`.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter("urlencode", urlencode);
    environment.add_filter("striptags", |value: &Value| striptags(&python::text(value)));
    environment.add_filter("xmlattr", xmlattr);
    environment.add_filter("filesizeformat", filesizeformat);
    environment.add_filter("wordwrap", |_: Value, _: Rest<Value>, _: Kwargs| {
        unsupported("`wordwrap` is not supported")
    });
    environment.add_filter("urlize", |_: Value, _: Rest<Value>, _: Kwargs| {
        unsupported("`urlize` is not supported")
    });
    environment.add_filter("random", |_: Value| {
        unsupported("`random` is not supported: prompts must be repeatable")
    });
}

fn unsupported(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::UnknownFilter, message.to_owned()))
}

fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Percent-encodes `value`; with `form`, for a query.
fn quote(value: &Value, form: bool, out: &mut String) {
    use std::fmt::Write;
    for byte in python::text(value).bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(char::from(byte));
            }
            b'/' if !form => out.push('/'),
            b' ' if form => out.push('+'),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
}

/// A text, or the pairs of a query.
fn urlencode(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    let pairs: Vec<(Value, Value)> = match value.kind() {
        ValueKind::Map => {
            let pairs = value.as_object().and_then(DynObject::try_iter_pairs);
            pairs.into_iter().flatten().collect()
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let pair = |pair: Value| {
                let pair = filters::elements(&pair)?;
                <[Value; 2]>::try_from(pair)
                    .map(|[name, value]| (name, value))
                    .map_err(|_| failed("urlencode(): a list must be one of pairs"))
            };
            value.try_iter()?.map(pair).collect::<Result<_, _>>()?
        }
        _ => {
            quote(value, false, &mut out);
            return Ok(out);
        }
    };
    for (at, (name, value)) in pairs.iter().enumerate() {
        if at > 0 {
            out.push('&');
        }
        quote(name, true, &mut out);
        out.push('=');
        quote(value, true, &mut out);
    }
    Ok(out)
}

/// As `markupsafe`: without comments and tags, spaces joined, entities of five characters read.
fn striptags(text: &str) -> String {
    let mut rest = text.to_owned();
    for (begin, end) in [("<!--", "-->"), ("<", ">")] {
        while let Some(at) = rest.find(begin) {
            let Some(close) = rest[at..].find(end) else {
                break;
            };
            rest.replace_range(at..at + close + end.len(), "");
        }
    }
    let words: Vec<&str> = rest
        .split(python::is_space)
        .filter(|word| !word.is_empty())
        .collect();
    let joined = words.join(" ");
    let entities = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#34;", "\""),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ];
    let mut out = String::with_capacity(joined.len());
    let mut rest = &*joined;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let known = entities.iter().find(|(name, _)| rest.starts_with(name));
        let (len, shown) = known.map_or((1, "&"), |(name, shown)| (name.len(), *shown));
        out.push_str(shown);
        rest = &rest[len..];
    }
    out + rest
}

#[allow(clippy::needless_pass_by_value)] // a filter's signature, as below
fn xmlattr(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "xmlattr")?;
    let space = args.next("autospace").is_none_or(|value| value.is_true());
    args.finish()?;
    let pairs = match value.as_object().filter(|_| value.kind() == ValueKind::Map) {
        Some(map) => map.try_iter_pairs(),
        None => return Err(failed("xmlattr(): the value is not a mapping")),
    };
    let mut out = Vec::new();
    for (name, value) in pairs.into_iter().flatten() {
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let name = python::str(&name);
        if name.contains(|c: char| c.is_whitespace() || matches!(c, '/' | '>' | '=')) {
            return Err(failed(format!("xmlattr(): the name {name:?} is not valid")));
        }
        let value = filters::escape(&python::text(&value));
        out.push(format!("{}=\"{value}\"", filters::escape(&name)));
    }
    let joined = out.join(" ");
    Ok(Value::from(if space && !joined.is_empty() {
        format!(" {joined}")
    } else {
        joined
    }))
}

#[allow(clippy::needless_pass_by_value)]
fn filesizeformat(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    const DECIMAL: [&str; 8] = ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"];
    const BINARY: [&str; 8] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"];
    let mut args = Args::with(&args, kwargs, "filesizeformat")?;
    let binary = args.flag("binary");
    args.finish()?;
    let text = python::text(value);
    let number = strings::strip(&text, None, true, true).parse::<f64>();
    let bytes = match value.kind() {
        ValueKind::Bool => f64::from(u8::from(value.is_true())),
        _ => number.map_err(|_| failed("filesizeformat(): the value is not a number"))?,
    };
    let (base, units) = if binary {
        (1024.0, BINARY)
    } else {
        (1000.0, DECIMAL)
    };
    if bytes == 1.0 {
        return Ok("1 Byte".to_owned());
    }
    if bytes < base {
        return Ok(format!("{} Bytes", bytes.trunc()));
    }
    let mut unit = base;
    for (at, name) in units.iter().enumerate() {
        unit *= base;
        if bytes < unit || at + 1 == units.len() {
            return Ok(format!("{:.1} {name}", base * bytes / unit));
        }
    }
    Ok(format!("{bytes} Bytes"))
}
