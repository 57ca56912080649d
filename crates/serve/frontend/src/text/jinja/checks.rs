//! Tests (`x is …`) as Jinja2 has them.

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Value};

use super::objects::LongInteger;
use super::python;

/// Adds them to `environment`.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_test("iterable", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Undefined
                | ValueKind::String
                | ValueKind::Seq
                | ValueKind::Iterable
                | ValueKind::Map
        )
    });
    // Values with a length that can be indexed.
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map
        ) || (value.kind() == ValueKind::Iterable && value.len().is_some())
    });
    environment.add_test("callable", |value: &Value| {
        // Undefined values have a method that raises.
        (matches!(value.kind(), ValueKind::Plain | ValueKind::Undefined) && !is_long(value))
            || is_macro(value)
    });
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || is_long(value)
    });
    environment.add_test("integer", |value: &Value| {
        (value.kind() == ValueKind::Number && !python::is_float(value)) || is_long(value)
    });
    environment.add_test("float", python::is_float);
    environment.add_test("odd", |value: &Value| {
        Ok::<_, Error>(remainder(value, 2.0)? == 1.0)
    });
    environment.add_test("even", |value: &Value| {
        Ok::<_, Error>(remainder(value, 2.0)? == 0.0)
    });
    environment.add_test("divisibleby", |value: &Value, by: &Value| {
        let by = number(by)?;
        if by == 0.0 {
            return Err(Error::new(ErrorKind::InvalidOperation, "division by zero"));
        }
        Ok(remainder(value, by)? == 0.0)
    });
    environment.add_test("in", |value: &Value, list: &Value| contains(list, value));
    environment.add_test("lower", |value: &Value| {
        let text = python::str(value);
        text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
    });
    environment.add_test("upper", |value: &Value| {
        let text = python::str(value);
        text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
    });
    for name in ["startingwith", "endingwith", "safe"] {
        environment.remove_test(name);
    }
}

fn is_long(value: &Value) -> bool {
    value.downcast_object_ref::<LongInteger>().is_some()
}

/// Macros are objects with fields in the engine.
fn is_macro(value: &Value) -> bool {
    value.kind() == ValueKind::Map && format!("{value:?}").starts_with("<macro ")
}

fn number(value: &Value) -> Result<f64, Error> {
    match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()),
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a number is needed, not {kind}"),
        )),
    }
}

fn remainder(value: &Value, by: f64) -> Result<f64, Error> {
    Ok(number(value)?.rem_euclid(by.abs()))
}

fn contains(list: &Value, value: &Value) -> Result<bool, Error> {
    match list.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => match (list.as_str(), value.as_str()) {
            (Some(text), Some(part)) => Ok(text.contains(part)),
            _ => Err(Error::new(
                ErrorKind::InvalidOperation,
                "`in` a string needs a string on its left",
            )),
        },
        ValueKind::Map => Ok(list
            .as_object()
            .is_some_and(|map| map.get_value(value).is_some())),
        ValueKind::Seq | ValueKind::Iterable => {
            Ok(list.try_iter()?.any(|element| element == *value))
        }
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a value of type {kind} is not iterable"),
        )),
    }
}
