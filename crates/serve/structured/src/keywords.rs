//! Reading the keywords of a schema, for the check, the maker and the judge alike.

use percent_encoding::percent_decode_str;
use slipstream_base::width::floor_u64;

use crate::{Number, Tree};

/// The types of values.
pub(crate) const TYPES: [&str; 7] = [
    "object", "array", "string", "number", "integer", "boolean", "null",
];

/// Keywords that say something about a schema, and nothing about a value.
pub(crate) const ANNOTATIONS: [&str; 12] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
];

/// Formats whose texts are modelled; others are annotations.
pub(crate) const FORMATS: [&str; 17] = [
    "date-time",
    "date",
    "time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "iri",
    "uri-reference",
    "iri-reference",
    "url",
    "uuid",
    "json-pointer",
];

/// A JSON number as a float.
pub(crate) fn number(number: &Number) -> f64 {
    number.as_f64()
}

/// The types that a schema allows; empty: any.
pub(crate) fn types_of(schema: &Tree) -> Vec<&'static str> {
    let known = |one: &Tree| {
        let name = one.as_text()?;
        TYPES.into_iter().find(|t| *t == name)
    };
    match schema.get("type") {
        Some(Tree::Array(some)) => some.iter().filter_map(known).collect(),
        Some(one) => known(one).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Whether `value` is of the type `name`.
pub(crate) fn is_of(value: &Tree, name: &str) -> bool {
    match (value, name) {
        (Tree::Number(n), "integer") => number(n).fract() == 0.0,
        (value, name) => value.type_name() == name,
    }
}

/// The value of keyword `name`, a whole number from 0.
///
/// # Errors
/// The reason, if it is something else.
pub(crate) fn count(schema: &Tree, name: &str) -> Result<Option<usize>, String> {
    match schema.get(name) {
        None => Ok(None),
        Some(Tree::Number(n)) => match number(n) {
            n if n >= 0.0 && n.fract() == 0.0 => {
                Ok(Some(usize::try_from(floor_u64(n)).unwrap_or(usize::MAX)))
            }
            _ => Err(format!("`{name}` must be a whole number from 0")),
        },
        Some(_) => Err(format!("`{name}` must be a number")),
    }
}

/// The value of keyword `name`, a number.
///
/// # Errors
/// The reason, if it is something else.
pub(crate) fn bound(schema: &Tree, name: &str) -> Result<Option<f64>, String> {
    match schema.get(name) {
        None => Ok(None),
        Some(Tree::Number(n)) => Ok(Some(number(n))),
        Some(_) => Err(format!("`{name}` must be a number")),
    }
}

/// Values in `schema`.
pub(crate) fn weight(schema: &Tree) -> u32 {
    1 + match schema {
        Tree::Array(elements) => elements.iter().map(weight).sum(),
        Tree::Object(members) => members.iter().map(|(_, value)| weight(value)).sum(),
        _ => 0,
    }
}

/// `schema` without the keyword `name`.
pub(crate) fn without(schema: &Tree, name: &str) -> Tree {
    match schema {
        Tree::Object(members) => {
            let rest = members.iter().filter(|(n, _)| n != name);
            Tree::Object(rest.cloned().collect())
        }
        other => other.clone(),
    }
}

/// The part of `root` that the JSON pointer in the fragment `to` points to.
pub(crate) fn target<'a>(root: &'a Tree, to: &str) -> Option<&'a Tree> {
    let pointer = to.strip_prefix('#').unwrap_or(to);
    let mut at = root;
    for part in pointer.split('/').skip(1) {
        let part = percent_decode_str(part).decode_utf8_lossy();
        let part = part.replace("~1", "/").replace("~0", "~");
        at = match at {
            Tree::Array(elements) => part.parse().ok().and_then(|i: usize| elements.get(i)),
            other => other.get(&part),
        }?;
    }
    Some(at)
}
