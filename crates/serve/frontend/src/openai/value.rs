//! A JSON value that borrows its strings, so that checks of our own can say which field is wrong.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use slipstream_base::width::{floor_u64, to_u32};
use slipstream_structured::{Number, Tree};

use super::literals::Quoted;

/// All whole numbers below 2^53 are exact as real ones.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// A parsed JSON value. Strings without escapes point into the body.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json<'a> {
    Null,
    Bool(bool),
    /// A whole number from 0.
    Unsigned(u64),
    /// A whole number below 0.
    Negative(i64),
    Real(f64),
    /// A whole number of more than 64 bits, or one that JSON cannot write.
    Long(Box<Number>),
    Text(Cow<'a, str>),
    /// An array of numbers that fit into 32 bits, at 4 bytes each: prompts as token ids. Not empty.
    Tokens(Vec<u32>),
    Array(Vec<Json<'a>>),
    Object(Vec<(Cow<'a, str>, Json<'a>)>),
}

impl<'a> Json<'a> {
    /// Its type, for messages: `a string`.
    pub(super) fn what(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "a boolean",
            Json::Unsigned(_) | Json::Negative(_) | Json::Real(_) | Json::Long(_) => "a number",
            Json::Text(_) => "a string",
            Json::Tokens(_) | Json::Array(_) => "an array",
            Json::Object(_) => "an object",
        }
    }

    pub(super) fn is_text(&self) -> bool {
        matches!(self, Json::Text(_))
    }

    /// Whether it is a number.
    pub(super) fn is_number(&self) -> bool {
        matches!(
            self,
            Json::Unsigned(_) | Json::Negative(_) | Json::Real(_) | Json::Long(_)
        )
    }

    /// The whole number that vLLM reads from `self`, if it reads one: `2.0`, `"2"`, `" 2.00 "` and `true` are numbers
    /// too. Source: pydantic's conversion table, lax mode.
    pub(super) fn as_whole(&self) -> Cow<'_, Json<'a>> {
        let whole = match self {
            Json::Real(n) if n.fract() == 0.0 && n.abs() < WHOLE_MAX => {
                let size = floor_u64(n.abs());
                match i64::try_from(size) {
                    Ok(size @ 1..) if *n < 0.0 => Json::Negative(-size),
                    _ => Json::Unsigned(size),
                }
            }
            Json::Bool(b) => Json::Unsigned(u64::from(*b)),
            Json::Text(text) => match whole_of_text(text) {
                Some(number) => number,
                None => return Cow::Borrowed(self),
            },
            _ => return Cow::Borrowed(self),
        };
        Cow::Owned(whole)
    }

    /// The real number that vLLM reads from `self`; as [`as_whole`](Self::as_whole).
    pub(super) fn as_real(&self) -> Option<f64> {
        match self {
            Json::Unsigned(n) => Some(*n as f64),
            Json::Negative(n) => Some(*n as f64),
            Json::Real(n) => Some(*n),
            Json::Long(n) => Some(n.as_f64()),
            Json::Bool(b) => Some(f64::from(u8::from(*b))),
            Json::Text(text) => real_of_text(text.trim()),
            _ => None,
        }
    }

    /// The truth value that vLLM reads from `self`; as [`as_whole`](Self::as_whole).
    pub(super) fn as_bool(&self) -> Option<bool> {
        match self {
            Json::Bool(b) => Some(*b),
            Json::Text(text) => {
                let is = |word: &&str| text.eq_ignore_ascii_case(word);
                if ["1", "on", "t", "true", "y", "yes"].iter().any(is) {
                    Some(true)
                } else {
                    let no = ["0", "off", "f", "false", "n", "no"].iter().any(is);
                    no.then_some(false)
                }
            }
            number => match number.as_real()? {
                0.0 => Some(false),
                1.0 => Some(true),
                _ => None,
            },
        }
    }

    /// The value with its small arrays spelled out.
    pub(super) fn into_elements(self) -> Result<Vec<Json<'a>>, Json<'a>> {
        match self {
            Json::Array(elements) => Ok(elements),
            Json::Tokens(tokens) => Ok(tokens
                .into_iter()
                .map(|token| Json::Unsigned(u64::from(token)))
                .collect()),
            other => Err(other),
        }
    }

    /// The value of member `name`, if this is an object that has one; the last one wins.
    pub(super) fn member(&self, name: &str) -> Option<&Json<'a>> {
        match self {
            Json::Object(members) => members.iter().rev().find(|(n, _)| n == name).map(|m| &m.1),
            _ => None,
        }
    }

    /// The same with members in order, for schemas and tools. The last member of a name counts.
    pub(super) fn into_tree(self) -> Tree {
        match self {
            Json::Null => Tree::Null,
            Json::Bool(b) => Tree::Bool(b),
            Json::Unsigned(n) => Tree::Number(n.into()),
            Json::Negative(n) => Tree::Number(n.into()),
            Json::Real(n) => Tree::Number(n.into()),
            Json::Long(n) => Tree::Number(*n),
            Json::Text(text) => Tree::Text(text.into_owned()),
            Json::Tokens(numbers) => {
                let number = |n: u32| Tree::Number(n.into());
                Tree::Array(numbers.into_iter().map(number).collect())
            }
            Json::Array(elements) => {
                Tree::Array(elements.into_iter().map(Json::into_tree).collect())
            }
            Json::Object(members) => {
                let mut last: HashMap<Cow<'_, str>, usize> = HashMap::new();
                let mut whole: Vec<(String, Tree)> = Vec::with_capacity(members.len());
                for (name, value) in members {
                    let value = value.into_tree();
                    match last.entry(name.clone()) {
                        Entry::Occupied(known) => whole[*known.get()].1 = value,
                        Entry::Vacant(free) => {
                            free.insert(whole.len());
                            whole.push((name.into_owned(), value));
                        }
                    }
                }
                Tree::Object(whole)
            }
        }
    }

    /// Parses `text`, which may have `values` values at most.
    pub(super) fn parse(text: &'a str, values: u32) -> Result<Json<'a>, serde_json::Error> {
        let bounds = Bounds::new(values);
        match Json::of_text(text, &bounds) {
            Ok(value) if !bounds.loses.get() => Ok(value),
            Err(error) if !is_too_large(&error) => Err(error),
            Ok(_) | Err(_) => Json::parse_quoted(&Quoted::new(text, false), values),
        }
    }

    /// Parses `text` as Python's `json` does: with `NaN`, `Infinity`, and floats that are too large.
    pub(super) fn parse_python(text: &'a str, values: u32) -> Result<Json<'a>, serde_json::Error> {
        let bounds = Bounds::new(values);
        match Json::of_text(text, &bounds) {
            Ok(value) if !bounds.loses.get() => Ok(value),
            _ => Json::parse_quoted(&Quoted::new(text, true), values),
        }
    }

    fn parse_quoted(quoted: &Quoted, values: u32) -> Result<Json<'a>, serde_json::Error> {
        let bounds = Bounds::quoted(values, quoted);
        Json::of_text(&quoted.text, &bounds).map(Json::owned)
    }

    fn of_text(text: &'a str, bounds: &Bounds<'_>) -> Result<Json<'a>, serde_json::Error> {
        let mut json = serde_json::Deserializer::from_str(text);
        let value = JsonSeed { bounds }.deserialize(&mut json)?;
        json.end()?;
        Ok(value)
    }

    /// The same with strings that it owns.
    pub(super) fn owned<'b>(self) -> Json<'b> {
        let own = |text: Cow<'_, str>| Cow::Owned(text.into_owned());
        match self {
            Json::Null => Json::Null,
            Json::Bool(b) => Json::Bool(b),
            Json::Unsigned(n) => Json::Unsigned(n),
            Json::Negative(n) => Json::Negative(n),
            Json::Real(n) => Json::Real(n),
            Json::Long(n) => Json::Long(n),
            Json::Text(text) => Json::Text(own(text)),
            Json::Tokens(tokens) => Json::Tokens(tokens),
            Json::Array(elements) => Json::Array(elements.into_iter().map(Json::owned).collect()),
            Json::Object(members) => {
                let members = members.into_iter();
                Json::Object(
                    members
                        .map(|(name, value)| (own(name), value.owned()))
                        .collect(),
                )
            }
        }
    }

    /// The same as a value of `serde_json`.
    pub(super) fn into_owned(self) -> serde_json::Value {
        use serde_json::Value;
        match self {
            Json::Null => Value::Null,
            Json::Bool(b) => Value::Bool(b),
            Json::Unsigned(n) => n.into(),
            Json::Negative(n) => n.into(),
            Json::Real(n) => n.into(),
            Json::Long(n) => n.as_f64().into(),
            Json::Text(text) => Value::String(text.into_owned()),
            Json::Tokens(tokens) => tokens.into(),
            Json::Array(elements) => elements.into_iter().map(Json::into_owned).collect(),
            Json::Object(members) => Value::Object(
                members
                    .into_iter()
                    .map(|(name, value)| (name.into_owned(), value.into_owned()))
                    .collect(),
            ),
        }
    }
}

/// Whether the parser met a number beyond its floats, which may be an integer of many digits.
pub(super) fn is_too_large(error: &serde_json::Error) -> bool {
    error.is_syntax() && error.to_string().starts_with("number out of range")
}

/// Digits of an integer at most. Source: `sys.get_int_max_str_digits` of Python, whose `json` reads bodies in vLLM.
const DIGITS_MAX: usize = 4300;

/// The members of the JSON object `text`, in order. `None` if it is another value.
pub(crate) fn members(text: &str) -> Option<Vec<(String, Tree)>> {
    match Json::parse(text, VALUES_MAX).ok()?.into_tree() {
        Tree::Object(members) => Some(members),
        _ => None,
    }
}

/// A value of `serde_json` that is no array or object; [`Json::Null`] for these.
fn scalar(value: &serde_json::Value) -> Json<'_> {
    use serde_json::Value;
    match value {
        Value::Bool(b) => Json::Bool(*b),
        Value::String(text) => Json::Text(Cow::Borrowed(text)),
        Value::Number(n) => match (n.as_u64(), n.as_i64()) {
            (Some(n), _) => Json::Unsigned(n),
            (None, Some(n)) => Json::Negative(n),
            (None, None) => n.as_f64().map_or(Json::Null, Json::Real),
        },
        Value::Null | Value::Array(_) | Value::Object(_) => Json::Null,
    }
}

/// The whole number that vLLM reads from `value`, as [`Json::as_whole`].
pub(crate) fn lax_whole(value: &serde_json::Value) -> Option<serde_json::Value> {
    let whole = scalar(value).as_whole().into_owned();
    matches!(whole, Json::Unsigned(_) | Json::Negative(_)).then(|| whole.into_owned())
}

/// The real number that vLLM reads from `value`, as [`Json::as_real`].
pub(crate) fn lax_real(value: &serde_json::Value) -> Option<f64> {
    scalar(value).as_real()
}

/// The truth value that vLLM reads from `value`, as [`Json::as_bool`].
pub(crate) fn lax_truth(value: &serde_json::Value) -> Option<bool> {
    scalar(value).as_bool()
}

/// The whole number in a text: a sign, digits, and zeros behind a point.
fn whole_of_text<'a>(text: &str) -> Option<Json<'a>> {
    let text = text.trim();
    let digits = match text.split_once('.') {
        Some((digits, zeros)) if !zeros.is_empty() && zeros.bytes().all(|b| b == b'0') => digits,
        Some(_) => return None,
        None => text,
    };
    let digits = without_underscores(digits)?;
    match digits.parse::<u64>() {
        Ok(n) => Some(Json::Unsigned(n)),
        Err(_) => match digits.parse::<i64>().ok()? {
            0 => Some(Json::Unsigned(0)), // `-0`
            n => Some(Json::Negative(n)),
        },
    }
}

/// The real number in a text. Single underscores may stand anywhere but at its ends, as pydantic reads them.
fn real_of_text(text: &str) -> Option<f64> {
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    text.replace('_', "").parse().ok()
}

/// `text` without single underscores between digits, as Python writes long numbers; `None` if others are in it.
fn without_underscores(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('_') {
        return Some(text.into());
    }
    let digit = |part: &str, last: bool| {
        let byte = if last {
            part.bytes().last()
        } else {
            part.bytes().next()
        };
        byte.is_some_and(|b| b.is_ascii_digit())
    };
    let parts: Vec<&str> = text.split('_').collect();
    let between = parts
        .windows(2)
        .all(|pair| digit(pair[0], true) && digit(pair[1], false));
    between.then(|| parts.concat().into())
}

/// Values a body may have besides token ids: a value takes 32 bytes where its text may take 2, and
/// a body of 8 MiB must not become one of 128.
pub(super) const VALUES_MAX: u32 = 1 << 18;

/// Bounds of a parse, and what it found.
pub(super) struct Bounds<'c> {
    /// Values that may still be made.
    left: Cell<u32>,
    /// Whether a number lost digits or a type, and has to be parsed from quotes.
    pub(super) loses: Cell<bool>,
    quoted: Option<&'c Quoted>,
}

impl<'c> Bounds<'c> {
    pub(super) fn new(values: u32) -> Bounds<'c> {
        Bounds {
            left: Cell::new(values),
            loses: Cell::new(false),
            quoted: None,
        }
    }

    pub(super) fn quoted(values: u32, quoted: &'c Quoted) -> Bounds<'c> {
        Bounds {
            quoted: Some(quoted),
            ..Bounds::new(values)
        }
    }
}

/// Parses a [`Json`], counting what it makes.
#[derive(Clone, Copy)]
pub(super) struct JsonSeed<'c> {
    pub(super) bounds: &'c Bounds<'c>,
}

impl JsonSeed<'_> {
    fn count<E: serde::de::Error>(self) -> Result<(), E> {
        let left = self.bounds.left.get();
        if left == 0 {
            return Err(E::custom(format_args!(
                "the body has more than {VALUES_MAX} values"
            )));
        }
        self.bounds.left.set(left - 1);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for JsonSeed<'_> {
    type Value = Json<'de>;
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Json<'de>, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for JsonSeed<'_> {
    type Value = Json<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_unit<E>(self) -> Result<Json<'de>, E> {
        Ok(Json::Null)
    }
    fn visit_bool<E>(self, value: bool) -> Result<Json<'de>, E> {
        Ok(Json::Bool(value))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Json<'de>, E> {
        Ok(Json::Unsigned(value))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Json<'de>, E> {
        Ok(u64::try_from(value).map_or(Json::Negative(value), Json::Unsigned))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Json<'de>, E> {
        // Perhaps a whole number: below this, the parser keeps them.
        const KEPT: f64 = 9_223_372_036_854_775_808.0;
        if value.abs() >= KEPT || (value == 0.0 && value.is_sign_negative()) {
            self.bounds.loses.set(true);
        }
        Ok(Json::Real(value))
    }
    fn visit_borrowed_str<E: serde::de::Error>(self, value: &'de str) -> Result<Json<'de>, E> {
        if let Some(quoted) = self.bounds.quoted
            && quoted.is_number(value)
            && let Some(number) = Number::of_literal(value)
        {
            if value.trim_start_matches('-').len() > DIGITS_MAX {
                return Err(E::custom(format_args!(
                    "an integer has more than {DIGITS_MAX} digits"
                )));
            }
            return Ok(match (number.as_u64(), number.as_i64()) {
                (Some(n), _) => Json::Unsigned(n),
                (None, Some(n)) => Json::Negative(n),
                (None, None) => Json::Long(Box::new(number)),
            });
        }
        Ok(Json::Text(Cow::Borrowed(value)))
    }
    fn visit_str<E>(self, value: &str) -> Result<Json<'de>, E> {
        Ok(Json::Text(Cow::Owned(value.into())))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json<'de>, A::Error> {
        let mut tokens = Vec::new();
        let mut elements = Vec::new();
        while let Some(element) = seq.next_element_seed(self)? {
            match element {
                Json::Unsigned(n) if elements.is_empty() && u32::try_from(n).is_ok() => {
                    tokens.push(to_u32(n));
                }
                other => {
                    // Not token ids after all: the numbers so far move over.
                    for token in std::mem::take(&mut tokens) {
                        self.count()?;
                        elements.push(Json::Unsigned(u64::from(token)));
                    }
                    self.count()?;
                    elements.push(other);
                }
            }
        }
        Ok(if tokens.is_empty() {
            Json::Array(elements)
        } else {
            Json::Tokens(tokens)
        })
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json<'de>, A::Error> {
        let mut members = Vec::new();
        while let Some(name) = map.next_key_seed(KeySeed)? {
            self.count()?;
            members.push((name, map.next_value_seed(self)?));
        }
        Ok(Json::Object(members))
    }
}

/// Parses a member's name, borrowed where it has no escapes.
pub(super) struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Cow<'de, str>, D::Error> {
        from.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = Cow<'de, str>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member's name")
    }
    fn visit_borrowed_str<E>(self, value: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(value))
    }
    fn visit_str<E>(self, value: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(value.into()))
    }
}
