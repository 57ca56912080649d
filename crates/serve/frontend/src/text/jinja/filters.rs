//! Filters that the engine lacks, or in which it differs from Jinja2.

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::filters as engine;
use minijinja::value::{DynObject, Kwargs, Object, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::args::Args;
use super::objects::{self, Generator, is_generator};
use super::source::{EACH, PERCENT, VARIADIC};
use super::strings::{self, TEXT_MAX};
use super::{format, json, markup, python};

/// Filters of the engine that Jinja2 lacks: a template with one fails on every inference engine, so it fails here too.
const NOT_JINJA: [&str; 5] = ["split", "lines", "bool", "chain", "zip"];

type ByName = fn(&mut State<'_, '_>, Value, Kwargs) -> Result<Value, Error>;

/// Filters whose options the engine accepts by keyword only, with Jinja2's order of the options.
const BY_NAME: [(&str, ByName, &[&str]); 5] = [
    (
        "sort",
        |s, v, k| engine::sort(s, v, k),
        &["reverse", "case_sensitive", "attribute"],
    ),
    (
        "unique",
        |s, v, k| engine::unique(s, v, k),
        &["case_sensitive", "attribute"],
    ),
    (
        "min",
        |s, v, k| engine::min(s, v, k),
        &["case_sensitive", "attribute"],
    ),
    (
        "max",
        // Of equal ones the first, as in Python.
        |s, v, k| {
            let mut elements = elements(&v)?;
            elements.reverse();
            engine::max(s, Value::from(elements), k)
        },
        &["case_sensitive", "attribute"],
    ),
    (
        "dictsort",
        |_, v, k| engine::dictsort(&v, k),
        &["case_sensitive", "by", "reverse"],
    ),
];

/// Returns the options of a call, all by keyword.
fn named(call: &str, names: &[&str], args: &[Value], kwargs: &Kwargs) -> Result<Kwargs, Error> {
    if args.len() > names.len() {
        return Err(failed(format!(
            "{call}() takes at most {} options",
            names.len()
        )));
    }
    let mut all: Vec<(String, Value)> = Vec::new();
    for name in kwargs.args() {
        all.push((name.to_owned(), kwargs.get(name)?));
    }

    all.extend(
        names
            .iter()
            .zip(args)
            .map(|(name, value)| ((*name).to_owned(), value.clone())),
    );
    for (name, value) in &mut all {
        // A place in a list may be one too.
        if name == "attribute" && value.is_integer() {
            *value = Value::from(value.to_string());
        }
    }
    Ok(all.into_iter().collect())
}

/// Adds them to `environment`.
pub(super) fn add(environment: &mut Environment<'static>) {
    for name in NOT_JINJA {
        environment.remove_filter(name);
    }
    environment.add_filter("tojson", json::tojson);
    add_generators(environment);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("list", list);
    environment.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => value.clone(),
        None => Value::from(python::str(value)),
    });
    environment.add_filter("join", join);
    environment.add_filter("title", |value: &Value| title(&python::text(value)));
    environment.add_filter("capitalize", |value: &Value| {
        capitalized(&python::text(value))
    });
    environment.add_filter("upper", |value: &Value| python::text(value).to_uppercase());
    environment.add_filter("lower", |value: &Value| python::text(value).to_lowercase());
    environment.add_filter("trim", trim);
    environment.add_filter("replace", replace);
    environment.add_filter("center", center);
    environment.add_filter("wordcount", word_count);
    environment.add_filter("truncate", truncate);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("round", round);
    environment.add_filter("first", first);
    environment.add_filter("last", last);
    environment.add_filter("items", items);
    environment.add_filter("format", printf);
    environment.add_filter("groupby", groupby);
    environment.add_filter("indent", indent);
    // Attributes alone: a key of an object is none.
    environment.add_filter("attr", |_: &Value, _: &Value| Value::UNDEFINED);
    for (name, filter, parameters) in BY_NAME {
        environment.add_filter(
            name,
            move |state: &mut State<'_, '_>, value: Value, args: Rest<Value>, kwargs: Kwargs| {
                filter(state, value, named(name, parameters, &args, &kwargs)?)
            },
        );
    }
    environment.add_filter("pprint", |value: &Value| python::repr(value));
    environment.add_filter("forceescape", |value: &Value| escape(&python::text(value)));
    for name in ["escape", "e"] {
        environment.add_filter(name, |value: &Value| {
            if value.is_safe() {
                value.clone()
            } else {
                Value::from_safe_string(escape(&python::text(value)))
            }
        });
    }
    markup::add(environment);
    environment.add_filter(EACH, each);
    environment.add_filter(PERCENT, percent);
    environment.add_function(VARIADIC, variadic);
}

/// Adds the filters whose result is a generator.
fn add_generators(environment: &mut Environment<'static>) {
    type More = Rest<ValueOrKwargs>;
    type State<'a, 'b, 'c> = &'a mut minijinja::State<'b, 'c>;
    environment.add_filter(
        "map",
        |state: State<'_, '_, '_>, value: Value, more: More| {
            engine::map(state, value, more).map(Generator::of)
        },
    );
    macro_rules! picks {
        ($($name:ident)*) => { $(
            environment.add_filter(
                stringify!($name),
                |state: State<'_, '_, '_>, value: Value, test: Option<Cow<'_, str>>, more: More| {
                    engine::$name(state, value, test, more).map(Generator::of)
                },
            );
        )* };
    }
    picks!(select reject);
    macro_rules! picks_by_attribute {
        ($($name:ident)*) => { $(
            environment.add_filter(
                stringify!($name),
                |state: State<'_, '_, '_>, value: Value, attribute: Cow<'_, str>, test: Option<Cow<'_, str>>, more: More| {
                    engine::$name(state, value, attribute, test, more).map(Generator::of)
                },
            );
        )* };
    }
    picks_by_attribute!(selectattr rejectattr);
    macro_rules! groups {
        ($($name:ident)*) => { $(
            environment.add_filter(
                stringify!($name),
                |state: &minijinja::State<'_, '_>, value: Value, count: usize, fill_with: Option<Value>| {
                    generator(&engine::$name(state, value, count, fill_with)?)
                },
            );
        )* };
    }
    groups!(batch slice);
    environment.add_filter("reverse", |value: &Value| match value.kind() {
        ValueKind::Seq | ValueKind::Map => generator(&engine::reverse(value)?),
        _ => {
            let reversed = engine::reverse(value)?;
            Ok(if is_generator(value) {
                list(&reversed)?
            } else {
                reversed
            })
        }
    });
}

fn generator(value: &Value) -> Result<Value, Error> {
    elements(value).map(Generator::of)
}

fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        kind => value
            .len()
            .ok_or_else(|| failed(format!("a value of type {kind} has no length"))),
    }
}

fn list(value: &Value) -> Result<Value, Error> {
    Ok(Value::from(elements(value)?))
}

/// `value`, if it can be iterated over.
fn each(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        kind @ (ValueKind::None | ValueKind::Bool | ValueKind::Number) => {
            Err(failed(format!("a value of type {kind} is not iterable")))
        }
        // With a length.
        ValueKind::String => list(value),
        _ if is_generator(value) => list(value),
        _ => Ok(value.clone()),
    }
}

/// Returns the elements of `value`.
pub(super) fn elements(value: &Value) -> Result<Vec<Value>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.chars().map(Value::from).collect());
    }
    match value.kind() {
        ValueKind::Undefined => Ok(Vec::new()),
        ValueKind::None => Err(failed("`None` is not iterable")),
        _ => Ok(value.try_iter()?.collect()),
    }
}

#[allow(clippy::needless_pass_by_value)] // a filter's signature, as below
fn join(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let mut args = Args::with(&args, kwargs, "join")?;
    let separator = args
        .next("d")
        .map(|value| python::str(&value))
        .unwrap_or_default();
    let attribute = args.next("attribute").filter(|name| !name.is_none());
    args.finish()?;
    let mut out = String::new();
    for (at, element) in elements(value)?.iter().enumerate() {
        if at > 0 {
            out.push_str(&separator);
        }
        match &attribute {
            None => python::write_str(element, &mut out),
            Some(name) => python::write_str(&attribute_of(element, name)?, &mut out),
        }
    }
    Ok(out)
}

/// The attribute `path` of `value`, such as `function.name`.
fn attribute_of(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else {
        return value.get_item(path);
    };
    path.split('.')
        .try_fold(value.clone(), |value, part| match part.parse::<i64>() {
            Ok(at) => value.get_item(&Value::from(at)),
            Err(_) => value.get_attr(part),
        })
}

/// The first character in upper case, the others in lower case.
pub(super) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let mut out = chars.next().map(strings::title_case).unwrap_or_default();
    out.push_str(&chars.as_str().to_lowercase());
    out
}

/// Words begin after spaces, hyphens and opening brackets.
fn title(text: &str) -> String {
    let ends = |c: char| c == '-' || python::is_space(c) || matches!(c, '(' | '{' | '[' | '<');
    text.split_inclusive(ends).map(capitalized).collect()
}

fn trim(value: &Value, chars: Option<Value>) -> Value {
    let chars = chars
        .filter(|chars| !chars.is_none())
        .map(|chars| python::str(&chars));
    let text = python::text(value);
    let kept = strings::strip(&text, chars.as_deref(), true, true);
    if kept.len() == text.len() && value.as_str().is_some() {
        return value.clone();
    }
    Value::from(kept)
}

#[allow(clippy::needless_pass_by_value)]
fn replace(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let mut args = Args::with(&args, kwargs, "replace")?;
    let (old, new) = (args.need("old")?, args.need("new")?);
    let count = args.optional_whole("count")?.unwrap_or(-1);
    args.finish()?;
    strings::replace(
        &python::text(value),
        &python::text(&old),
        &python::text(&new),
        count,
    )
}

#[allow(clippy::needless_pass_by_value)]
fn center(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let mut args = Args::with(&args, kwargs, "center")?;
    let width = args.optional_whole("width")?.unwrap_or(80);
    args.finish()?;
    strings::pad(&python::text(value), width, " ", "center")
}

fn word_count(value: &Value) -> usize {
    let word = |c: char| c == '_' || c.is_alphanumeric();
    let text = python::text(value);
    text.split(|c| !word(c))
        .filter(|word| !word.is_empty())
        .count()
}

#[allow(clippy::needless_pass_by_value)]
fn truncate(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "truncate")?;
    let length = args.optional_whole("length")?.unwrap_or(255);
    let kill_words = args.flag("killwords");
    let end = args.optional_text("end")?.unwrap_or_else(|| "...".into());
    let leeway = args.optional_whole("leeway")?.unwrap_or(5);
    args.finish()?;
    let size = |number: i64| usize::try_from(number).unwrap_or(0);
    // A value that is short enough stays as it is.
    if self::length(value)? <= size(length.saturating_add(leeway)) {
        return Ok(value.clone());
    }
    let text: Vec<char> = python::str(value).chars().collect();
    let Some(keep) = size(length).checked_sub(end.chars().count()) else {
        return Err(failed(
            "truncate(): `length` must not be below the length of `end`",
        ));
    };
    let mut kept: String = text[..keep].iter().collect();
    if !kill_words && let Some(at) = kept.rfind(' ') {
        kept.truncate(at);
    }
    Ok(Value::from(kept + &end))
}

#[allow(clippy::needless_pass_by_value)]
fn default(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "default")?;
    let other = args
        .next("default_value")
        .unwrap_or_else(|| Value::from(""));
    let falsy = args.flag("boolean");
    args.finish()?;
    let missing = value.is_undefined() || (falsy && !value.is_true());
    Ok(if missing { other } else { value.clone() })
}

fn undefined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() {
        return Err(Error::new(
            ErrorKind::UndefinedError,
            "the value is undefined",
        ));
    }
    Ok(())
}

#[allow(clippy::needless_pass_by_value)]
fn int(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "int")?;
    let default = args.next("default").unwrap_or_else(|| Value::from(0));
    let base = args.optional_whole("base")?.unwrap_or(10);
    args.finish()?;
    undefined(value)?;
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(i64::from(value.is_true())),
        ValueKind::Number if python::is_float(value) => {
            let number = f64::try_from(value.clone())?;
            if number.is_infinite() {
                return Err(failed("int(): infinity is not a whole number"));
            }
            whole(number).unwrap_or(default)
        }
        ValueKind::Number => value.clone(),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let radix = u32::try_from(base)
                .ok()
                .filter(|base| matches!(base, 0 | 2..=36));
            radix
                .and_then(|radix| parse_whole(text, radix))
                .or_else(|| parse_float(text).and_then(whole))
                .unwrap_or(default)
        }
        _ => default,
    })
}

/// The whole part, if there is one.
fn whole(number: f64) -> Option<Value> {
    #[allow(clippy::cast_possible_truncation)] // checked before
    (number.abs() < 1e38).then(|| Value::from(number.trunc() as i128))
}

/// Python's `int(text, base)`
fn parse_whole(text: &str, radix: u32) -> Option<Value> {
    let text = strings::strip(text, None, true, true);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let prefix = [("0x", 16), ("0o", 8), ("0b", 2)]
        .into_iter()
        .find(|(prefix, _)| lower.starts_with(prefix));
    let (mut digits, radix) = match prefix {
        Some((prefix, of)) if radix == of || radix == 0 => {
            let rest = &lower[prefix.len()..];
            (rest.strip_prefix('_').unwrap_or(rest), of)
        }
        _ => (&*lower, if radix == 0 { 10 } else { radix }),
    };
    let plain: String;
    if digits.contains('_') {
        if digits.starts_with('_') || digits.ends_with('_') || digits.contains("__") {
            return None;
        }
        plain = digits.replace('_', "");
        digits = &plain;
    }
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let number = i128::from_str_radix(digits, radix).ok()?;
    Some(Value::from(if negative { -number } else { number }))
}

/// Python's `float(text)`
fn parse_float(text: &str) -> Option<f64> {
    let text = strings::strip(text, None, true, true);
    let plain;
    let text = if text.contains('_') {
        let bytes = text.as_bytes();
        let between = |at: usize| {
            let digit = |at: Option<usize>| {
                at.and_then(|at| bytes.get(at))
                    .is_some_and(u8::is_ascii_digit)
            };
            digit(at.checked_sub(1)) && digit(Some(at + 1))
        };
        if (0..bytes.len()).any(|at| bytes[at] == b'_' && !between(at)) {
            return None;
        }
        plain = text.replace('_', "");
        &plain
    } else {
        text
    };
    text.parse().ok()
}

#[allow(clippy::needless_pass_by_value)]
fn float(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "float")?;
    let default = args.next("default").unwrap_or_else(|| Value::from(0.0));
    args.finish()?;
    undefined(value)?;
    Ok(match value.kind() {
        ValueKind::Bool => Value::from(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => Value::from(f64::try_from(value.clone())?),
        ValueKind::String => {
            parse_float(value.as_str().unwrap_or_default()).map_or(default, Value::from)
        }
        _ => default,
    })
}

#[allow(clippy::needless_pass_by_value)]
fn round(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let mut args = Args::with(&args, kwargs, "round")?;
    let precision = args.optional_whole("precision")?.unwrap_or(0);
    let method = args
        .optional_text("method")?
        .unwrap_or_else(|| "common".into());
    args.finish()?;
    undefined(value)?;
    if !matches!(value.kind(), ValueKind::Number | ValueKind::Bool) {
        return Err(failed(format!(
            "round(): a number is needed, not {}",
            value.kind()
        )));
    }
    let precision = i32::try_from(precision.clamp(-400, 400)).unwrap_or(0);
    let is_float = python::is_float(value);
    let number = match value.kind() {
        ValueKind::Bool => f64::from(u8::from(value.is_true())),
        _ => f64::try_from(value.clone())?,
    };
    let scale = 10f64.powi(precision);
    match &*method {
        "common" if !is_float && precision >= 0 => Ok(match value.kind() {
            ValueKind::Bool => Value::from(i64::from(value.is_true())),
            _ => value.clone(),
        }),
        "common" if !is_float => {
            let number = i128::try_from(value.clone()).unwrap_or(0);
            let Some(step) = 10i128.checked_pow(precision.unsigned_abs()) else {
                return Ok(Value::from(0));
            };
            // Half goes to the even one.
            let (down, rest) = (number.div_euclid(step), number.rem_euclid(step));
            let up = rest * 2 > step || (rest * 2 == step && down % 2 != 0);
            Ok(Value::from((down + i128::from(up)) * step))
        }
        "common" if !number.is_finite() => Ok(Value::from(number)),
        "common" if precision >= 0 => {
            let places = usize::try_from(precision).unwrap_or(0);
            // Correctly rounded from the exact value, half to even, as Python does it.
            Ok(Value::from(
                format!("{number:.places$}").parse().unwrap_or(number),
            ))
        }
        "common" => {
            let step = 10f64.powi(-precision);
            Ok(Value::from((number / step).round_ties_even() * step))
        }
        // Python's are whole numbers, which have no -0.
        "ceil" => Ok(Value::from(((number * scale).ceil() + 0.0) / scale)),
        "floor" => Ok(Value::from(((number * scale).floor() + 0.0) / scale)),
        _ => Err(failed("round(): `method` must be common, ceil or floor")),
    }
}

fn first(value: &Value) -> Result<Value, Error> {
    if is_generator(value) {
        return Ok(value.try_iter()?.next().unwrap_or_default());
    }
    Ok(elements(value)?.into_iter().next().unwrap_or_default())
}

fn last(value: &Value) -> Result<Value, Error> {
    if is_generator(value) {
        return Err(failed(
            "last(): a generator cannot be reversed; use `list` before",
        ));
    }
    Ok(elements(value)?.pop().unwrap_or_default())
}

fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    if value.kind() != ValueKind::Map {
        return Err(failed("items(): the value is not a mapping"));
    }
    let pairs = value.as_object().and_then(DynObject::try_iter_pairs);
    let pair = |(key, value)| Value::from(Tuple::from([key, value]));
    Ok(Generator::of(
        pairs.into_iter().flatten().map(pair).collect(),
    ))
}

#[allow(clippy::needless_pass_by_value)]
fn printf(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let names: Vec<&str> = kwargs.args().collect();
    let operand = match (args.is_empty(), names.is_empty()) {
        (false, false) => {
            return Err(failed(
                "format() takes values by place or by name, not both",
            ));
        }
        (_, true) => Value::from(Tuple::new(args.to_vec())),
        (true, false) => {
            let pair = |name| Ok((name, kwargs.get::<Value>(name)?));
            Value::from_pairs(
                names
                    .into_iter()
                    .map(pair)
                    .collect::<Result<Vec<_>, Error>>()?,
            )
        }
    };
    format::percent(&python::text(value), &operand)
}

/// `value % operand`
#[allow(clippy::needless_pass_by_value)]
fn percent(value: &Value, operand: Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => format::percent(text, &operand).map(Value::from),
        None => modulo(value, &operand),
    }
}

/// Python's `%` of numbers: the rest has the sign of `by`.
fn modulo(value: &Value, by: &Value) -> Result<Value, Error> {
    let number = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(Value::from(i64::from(value.is_true()))),
        ValueKind::Number => Some(value.clone()),
        _ => None,
    };
    let (Some(value), Some(by)) = (number(value), number(by)) else {
        let (one, other) = (value.kind(), by.kind());
        return Err(failed(format!("`%` of {one} and {other}")));
    };
    let zero = || failed("division by zero");
    if let (false, false) = (python::is_float(&value), python::is_float(&by)) {
        let long = |_| failed("`%` of an integer of more than 128 bits");
        let value = i128::try_from(value).map_err(long)?;
        let by = i128::try_from(by).map_err(long)?;
        if by == 0 {
            return Err(zero());
        }
        let rest = value.wrapping_rem(by);
        let is_other_side = rest != 0 && (rest < 0) != (by < 0);
        return Ok(Value::from(if is_other_side { rest + by } else { rest }));
    }
    let (value, by) = (f64::try_from(value)?, f64::try_from(by)?);
    if by == 0.0 {
        return Err(zero());
    }
    let rest = value % by;
    Ok(Value::from(if rest == 0.0 {
        0f64.copysign(by)
    } else if (rest < 0.0) != (by < 0.0) {
        rest + by
    } else {
        rest
    }))
}

/// Groups with their real keys, each a pair that is written as Python's tuples.
#[allow(clippy::needless_pass_by_value)]
fn groupby(value: Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let names = ["attribute", "default", "case_sensitive"];
    let groups = engine::groupby(value, None, named("groupby", &names, &args, &kwargs)?)?;
    let pair = |group: Value| {
        let elements = list(&group.get_item(&Value::from(1))?)?;
        Ok(objects::group(group.get_item(&Value::from(0))?, elements))
    };
    groups.try_iter()?.map(pair).collect()
}

#[allow(clippy::needless_pass_by_value)]
fn indent(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let mut args = Args::with(&args, kwargs, "indent")?;
    let width = args.next("width").unwrap_or_else(|| Value::from(4));
    let first = args.flag("first");
    let blank = args.flag("blank");
    args.finish()?;
    let space = match (width.as_str(), width.as_i64()) {
        (Some(text), _) => text.to_owned(),
        (None, Some(width)) => " ".repeat(usize::try_from(width).unwrap_or(0).min(1 << 16)),
        _ => return Err(failed("indent(): `width` must be a number or a string")),
    };
    // As in Jinja2, a line end at the very end stays.
    let text = python::str(value) + "\n";
    if space.len().saturating_mul(text.matches('\n').count()) > TEXT_MAX {
        return Err(failed("the text becomes too long"));
    }
    let mut out = String::new();
    let body = if blank {
        text.strip_suffix('\n')
            .unwrap_or(&text)
            .replace('\n', &format!("\n{space}"))
    } else {
        let mut body = String::new();
        for (at, line) in strings::lines(&text, false).into_iter().enumerate() {
            if at > 0 {
                body.push('\n');
                if !line.is_empty() {
                    body.push_str(&space);
                }
            }
            body.push_str(line);
        }
        body
    };
    if first {
        out.push_str(&space);
    }
    out.push_str(&body);
    Ok(out)
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('>', "&gt;")
        .replace('<', "&lt;")
        .replace('\'', "&#39;")
        .replace('"', "&#34;")
}

/// A macro that takes any arguments: `varargs` gets extra positional arguments, `kwargs` extra keyword arguments.
#[derive(Debug)]
struct Variadic {
    inner: Value,
    parameters: Vec<String>,
    varargs: bool,
    kwargs: bool,
    caller: bool,
}

fn variadic(
    inner: Value,
    parameters: Vec<String>,
    varargs: bool,
    kwargs: bool,
    caller: bool,
) -> Value {
    Value::from_object(Variadic {
        inner,
        parameters,
        varargs,
        kwargs,
        caller,
    })
}

impl Object for Variadic {
    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (places, named) = match args.split_last() {
            Some((last, places)) if last.is_kwargs() => (places, Some(last)),
            _ => (args, None),
        };
        let own = self.parameters.len();
        let (known, more) = places.split_at(own.min(places.len()));
        if !more.is_empty() && !self.varargs {
            return Err(failed(format!("the macro takes at most {own} arguments")));
        }
        let (mut given, mut rest) = (Vec::new(), Vec::new());
        let pairs = named
            .and_then(|named| named.as_object())
            .and_then(DynObject::try_iter_pairs);
        for (name, value) in pairs.into_iter().flatten() {
            let name = python::str(&name);
            if self.parameters.contains(&name) || (name == "caller" && self.caller) {
                given.push((name, value));
            } else if self.kwargs {
                rest.push((name, value));
            } else {
                return Err(failed(format!("the macro has no parameter `{name}`")));
            }
        }
        for (name, value) in [
            ("varargs", Value::from(Tuple::from(more))),
            ("kwargs", Value::from_pairs(rest)),
        ] {
            if !self.parameters.iter().any(|parameter| parameter == name) {
                given.push((name.to_owned(), value));
            }
        }
        let mut args = known.to_vec();
        args.push(Value::from(given.into_iter().collect::<Kwargs>()));
        self.inner.call(state, &args)
    }
}
