//! Members of a body: read one by one, with errors that name them.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use slipstream_base::TokenId;
use slipstream_base::width::to_u32;
use slipstream_structured::Tree;

use super::ApiError;
use super::literals::Quoted;
use super::value::{Bounds, Json, JsonSeed, KeySeed, VALUES_MAX, is_too_large};

/// Reads `body` as a JSON object and gives `take` each member whose name is `known`; the others
/// are skipped without being built.
pub(super) fn read_members<'a>(
    body: &'a [u8],
    known: impl Fn(&str) -> bool,
    mut take: impl FnMut(&str, Json<'a>) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    struct Members<'c, K, T> {
        bounds: &'c Bounds<'c>,
        known: &'c K,
        take: T,
    }
    impl<'de, K, T> Visitor<'de> for Members<'_, K, T>
    where
        K: Fn(&str) -> bool,
        T: FnMut(Cow<'de, str>, Json<'de>),
    {
        type Value = ();
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a JSON object")
        }
        fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
            while let Some(name) = map.next_key_seed(KeySeed)? {
                if (self.known)(&name) {
                    let value = map.next_value_seed(JsonSeed {
                        bounds: self.bounds,
                    })?;
                    (self.take)(name, value);
                } else {
                    map.next_value::<IgnoredAny>()?;
                }
            }
            Ok(())
        }
    }
    impl<'de, K, T> DeserializeSeed<'de> for Members<'_, K, T>
    where
        K: Fn(&str) -> bool,
        T: FnMut(Cow<'de, str>, Json<'de>),
    {
        type Value = ();
        fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
            from.deserialize_map(self)
        }
    }

    // As Python's parser: some editors and clients begin UTF-8 with it.
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let body = std::str::from_utf8(body).map_err(|error| {
        ApiError::bad_body(format!(
            "the body is not UTF-8: byte {} cannot stand there; JSON is sent as UTF-8",
            error.valid_up_to()
        ))
    })?;
    fn all<'a, K: Fn(&str) -> bool>(
        body: &'a str,
        bounds: &Bounds<'_>,
        known: &K,
    ) -> Result<Vec<(Cow<'a, str>, Json<'a>)>, serde_json::Error> {
        let mut all = Vec::new();
        let mut json = serde_json::Deserializer::from_str(body);
        let members = Members {
            bounds,
            known,
            take: |name, value| all.push((name, value)),
        };
        members.deserialize(&mut json)?;
        json.end()?;
        Ok(all)
    }
    let bad_body = |error: serde_json::Error| {
        ApiError::bad_body(if error.is_data() {
            format!("the body is not a request: {error}")
        } else {
            format!("the body is not valid JSON: {error}")
        })
    };
    // So that a broken body and a wrong field differ: the JSON is read to its end first.
    let bounds = Bounds::new(VALUES_MAX);
    match all(body, &bounds, &known) {
        Ok(members) if !bounds.loses.get() => {
            return members
                .into_iter()
                .try_for_each(|(name, value)| take(&name, value));
        }
        Err(error) if !is_too_large(&error) => return Err(bad_body(error)),
        Ok(_) | Err(_) => {}
    }
    let quoted = Quoted::new(body, false);
    let members =
        all(&quoted.text, &Bounds::quoted(VALUES_MAX, &quoted), &known).map_err(bad_body)?;
    members
        .into_iter()
        .try_for_each(|(name, value)| take(&name, value.owned()))
}

/// An object of these members.
pub(super) fn object<const N: usize>(members: [(&str, Tree); N]) -> Tree {
    let members = members.into_iter();
    Tree::Object(members.map(|(name, value)| (name.into(), value)).collect())
}

/// The error for a member that is not there.
pub(super) fn missing(name: &str) -> ApiError {
    ApiError::invalid(name, format!("`{name}` is missing; it is required"))
}

/// The text of a member that must have some.
pub(super) fn text_member<'a>(path: &str, value: Option<&'a Tree>) -> Result<&'a str, ApiError> {
    match value {
        Some(Tree::Text(text)) if !text.is_empty() => Ok(text),
        None | Some(Tree::Null | Tree::Text(_)) => Err(missing(path)),
        Some(_) => Err(ApiError::invalid(
            path,
            format!("`{path}` must be a string"),
        )),
    }
}

/// The error for a member of another type than `wanted`.
pub(super) fn wrong_type(path: &str, wanted: &str, value: &Json<'_>) -> ApiError {
    ApiError::invalid(
        path,
        format!("`{path}` must be {wanted}, not {}", value.what()),
    )
}

/// A truth value.
pub(super) fn boolean(path: &str, value: &Json<'_>) -> Result<bool, ApiError> {
    value
        .as_bool()
        .ok_or_else(|| wrong_type(path, "true or false", value))
}

/// A string.
pub(super) fn text<'a>(path: &str, value: Json<'a>) -> Result<Cow<'a, str>, ApiError> {
    match value {
        Json::Text(text) => Ok(text),
        other => Err(wrong_type(path, "a string", &other)),
    }
}

/// A whole number from `min` to `max`.
pub(super) fn whole(path: &str, value: &Json<'_>, min: u32, max: u32) -> Result<u32, ApiError> {
    let outside = |shown: &dyn fmt::Display| {
        ApiError::invalid(
            path,
            format!("`{path}` is {shown}; it must be from {min} to {max}"),
        )
    };
    match &*value.as_whole() {
        Json::Unsigned(n) if (u64::from(min)..=u64::from(max)).contains(n) => Ok(to_u32(*n)),
        Json::Unsigned(n) => Err(outside(n)),
        Json::Negative(n) => Err(outside(n)),
        Json::Long(n) => Err(outside(n)),
        Json::Real(n) => Err(ApiError::invalid(
            path,
            format!("`{path}` is {n}; it must be a whole number from {min} to {max}"),
        )),
        other => Err(wrong_type(path, "a whole number", other)),
    }
}

/// A number that `holds`, which is in `range`.
pub(super) fn real(
    path: &str,
    value: &Json<'_>,
    holds: fn(f64) -> bool,
    range: &str,
) -> Result<f64, ApiError> {
    let Some(number) = value.as_real() else {
        return Err(wrong_type(path, "a number", value));
    };
    if holds(number) {
        Ok(number)
    } else {
        Err(ApiError::invalid(
            path,
            format!("`{path}` is {number}; it must be {range}"),
        ))
    }
}

/// An array of token ids.
pub(super) fn tokens(path: &str, value: Json<'_>) -> Result<Vec<TokenId>, ApiError> {
    match value {
        Json::Tokens(tokens) => Ok(tokens),
        // `Json::Tokens` unless some are written as real numbers, are no token ids, or there are none.
        Json::Array(elements) => (elements.iter().enumerate())
            .map(|(at, element)| whole(&format!("{path}.{at}"), element, 0, u32::MAX))
            .collect(),
        other => Err(wrong_type(path, "an array of token ids", &other)),
    }
}
