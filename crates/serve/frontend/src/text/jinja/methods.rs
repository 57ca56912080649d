//! Methods of Python's values, which templates call: those of dicts and lists, and slices.
//!
//! Methods that change their object are absent: `transformers` forbids them to templates.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::args::Args;
use super::source::SLICE;
use super::{filters, objects, python, strings};

/// Calls `method` of `value`.
pub(super) fn call(
    _: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if method == SLICE {
        // A generator has none, which Jinja2 takes for an undefined value.
        return if objects::is_generator(value) {
            Ok(Value::UNDEFINED)
        } else {
            slice(value, args)
        };
    }
    match value.kind() {
        ValueKind::String => strings::call(value.as_str().unwrap_or_default(), method, args),
        ValueKind::Map => map(value, method, args),
        ValueKind::Seq | ValueKind::Iterable => sequence(value, method, args),
        ValueKind::Number if python::is_float(value) && method == "is_integer" => {
            Args::new(args, method)?.finish()?;
            let number = f64::try_from(value.clone())?;
            Ok(Value::from(number.is_finite() && number.fract() == 0.0))
        }
        ValueKind::Number if !python::is_float(value) && method == "bit_length" => {
            Args::new(args, method)?.finish()?;
            let number = i128::try_from(value.clone())?.unsigned_abs();
            Ok(Value::from(128 - number.leading_zeros()))
        }
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

pub(super) fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// `value[start:stop:step]`
fn slice(value: &Value, args: &[Value]) -> Result<Value, Error> {
    if !matches!(
        value.kind(),
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable
    ) {
        return Err(failed(format!(
            "a value of type {} has no slices",
            value.kind()
        )));
    }
    let mut args = Args::new(args, "a slice")?;
    let (start, stop) = (args.optional_whole("start")?, args.optional_whole("stop")?);
    let step = args.optional_whole("step")?.unwrap_or(1);
    args.finish()?;
    if step == 0 {
        return Err(failed("the step of a slice is 0"));
    }
    let elements = filters::elements(value)?;
    let len = i64::try_from(elements.len()).unwrap_or(i64::MAX);
    // Bounds as CPython's `PySlice_AdjustIndices` has them.
    let (low, high) = if step < 0 { (-1, len - 1) } else { (0, len) };
    let bound = |place: Option<i64>, default: i64| match place {
        None => default,
        Some(place) if place < 0 => place.saturating_add(len).max(low),
        Some(place) => place.min(high),
    };
    let (first, end) = if step < 0 { (high, low) } else { (low, high) };
    let (mut at, stop) = (bound(start, first), bound(stop, end));
    if let Some(range) = value.downcast_object_ref::<objects::Numbers>() {
        return Ok(Value::from_object(range.slice(at, stop, step)?));
    }
    let mut kept = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        kept.extend(
            usize::try_from(at)
                .ok()
                .and_then(|at| elements.get(at))
                .cloned(),
        );
        at = at.saturating_add(step);
    }
    Ok(match value.kind() {
        ValueKind::String => Value::from(kept.iter().filter_map(Value::as_str).collect::<String>()),
        _ if value.is_tuple() => Value::from(Tuple::new(kept)),
        _ => Value::from(kept),
    })
}

fn map(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let object = value.as_object().ok_or(ErrorKind::UnknownMethod)?.clone();
    let mut args = Args::new(args, method)?;
    let pairs =
        |object: &minijinja::value::DynObject| object.try_iter_pairs().into_iter().flatten();
    match method {
        "get" => {
            let key = args.need("key")?;
            let default = args.next("default").unwrap_or(Value::from(()));
            args.finish()?;
            Ok(object.get_value(&key).unwrap_or(default))
        }
        "keys" => {
            args.finish()?;
            Ok(pairs(&object).map(|(key, _)| key).collect())
        }
        "values" => {
            args.finish()?;
            Ok(pairs(&object).map(|(_, value)| value).collect())
        }
        "items" => {
            args.finish()?;
            Ok(pairs(&object)
                .map(|(key, value)| Value::from(Tuple::from([key, value])))
                .collect())
        }
        "copy" => {
            args.finish()?;
            Ok(value.clone())
        }
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

fn sequence(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let mut args = Args::new(args, method)?;
    match method {
        "count" => {
            let wanted = args.need("value")?;
            args.finish()?;
            let same = value.try_iter()?.filter(|element| *element == wanted);
            Ok(Value::from(same.count()))
        }
        "index" => {
            let wanted = args.need("value")?;
            let len = value.len().unwrap_or(0);
            let (start, end) = bounds(&mut args, len)?;
            args.finish()?;
            let found = value
                .try_iter()?
                .enumerate()
                .take(end)
                .skip(start)
                .find(|(_, element)| *element == wanted);
            let missing = || failed(format!("{} is not in the list", python::repr(&wanted)));
            found.map(|(at, _)| Value::from(at)).ok_or_else(missing)
        }
        "copy" if !value.is_tuple() => {
            args.finish()?;
            Ok(value.clone())
        }
        _ => Err(ErrorKind::UnknownMethod.into()),
    }
}

/// The optional arguments `start` and `end` of a search in something of length `len`.
pub(super) fn bounds(args: &mut Args<'_>, len: usize) -> Result<(usize, usize), Error> {
    let place = |place: Option<i64>, default: usize| match place {
        None => default,
        Some(place) if place < 0 => {
            usize::try_from(i64::try_from(len).unwrap_or(i64::MAX).saturating_add(place))
                .unwrap_or(0)
        }
        Some(place) => usize::try_from(place).unwrap_or(usize::MAX),
    };
    let start = place(args.optional_whole("start")?, 0);
    let end = place(args.optional_whole("end")?, len).min(len);
    Ok((start, end))
}
