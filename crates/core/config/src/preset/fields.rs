//! Objects of a model's files that remember which of their keys were read.
//!
//! An unread key may be the one that makes a model ten times as large. Every unread key that may affect size, compute or
//! cache is therefore an error; [`keys`] knows those that cannot.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use slipstream_base::width::to_u32;

use super::error::ShapeError;
use super::keys::{self, Bearing};

pub(super) type Object = Map<String, Value>;

/// Keys that were read, by path, and defaults that stood in for absent ones.
#[derive(Debug, Default)]
pub(super) struct Log {
    read: RefCell<BTreeSet<String>>,
    defaults: RefCell<Vec<String>>,
    ignored: RefCell<Vec<String>>,
}

impl Log {
    /// Whether the key of this path was read.
    pub(super) fn has(&self, path: &str) -> bool {
        self.read.borrow().contains(path)
    }

    /// Sentences for the user: class defaults that were applied, and keys that were ignored.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let defaults = self.defaults.borrow();
        if !defaults.is_empty() {
            notes.push(format!(
                "keys that the file lacks have the defaults of its class: {}",
                defaults.join(", ")
            ));
        }
        let ignored = self.ignored.borrow();
        if !ignored.is_empty() {
            notes.push(format!("not read: {}", ignored.join(", ")));
        }
        notes
    }
}

/// An object of a file. Every look-up is recorded in the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a> {
    object: &'a Object,
    /// `text_config.`, or nothing.
    prefix: &'a str,
    log: &'a Log,
}

impl<'a> Fields<'a> {
    pub(super) fn new(object: &'a Object, prefix: &'a str, log: &'a Log) -> Fields<'a> {
        Fields {
            object,
            prefix,
            log,
        }
    }

    /// The key as it is named in errors: with the objects around it.
    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The value of `key`; `None` if it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.mark(key);
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// The value of `key`, which does not count as read.
    pub(super) fn peek(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key)
    }

    /// Whether the file has `key`, be it null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.mark(key);
        self.object.contains_key(key)
    }

    /// Whether `key` has a value other than null, false and 0.
    pub(super) fn set(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| !is_nothing(value))
    }

    /// Records `keys` as read: something else was read that decides for them.
    pub(super) fn mark_all(&self, keys: &[&str]) {
        for key in keys {
            self.mark(key);
        }
    }

    fn mark(&self, key: &str) {
        if self.object.contains_key(key) {
            self.log.read.borrow_mut().insert(self.path(key));
        }
    }

    /// Records that `value` stands in for the absent `key`.
    pub(super) fn assume<T: ToString>(&self, key: &str, value: T) -> T {
        let text = format!("`{}` {}", self.path(key), value.to_string());
        self.log.defaults.borrow_mut().push(text);
        value
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(self.range(key, value, "a text")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(value) => Err(self.range(key, value, "true or false")),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(value) => Err(self.range(key, value, "a list")),
        }
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<&'a Object>, ShapeError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(value) => Err(self.range(key, value, "an object")),
        }
    }

    /// A size, from 1.
    pub(super) fn number(&self, key: &str) -> Result<u32, ShapeError> {
        self.optional(key)?.ok_or_else(|| self.missing(key))
    }

    /// A size, from 1; `None` if it is absent or null.
    pub(super) fn optional(&self, key: &str) -> Result<Option<u32>, ShapeError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match integer(value) {
            Some(n) if (1..=SIZE_MAX).contains(&n) => Ok(Some(to_u32(n))),
            _ => Err(self.range(key, value, "an integer from 1 to 2,097,152")),
        }
    }

    /// A count, from 0; `None` if it is absent or null.
    pub(super) fn count(&self, key: &str) -> Result<Option<u32>, ShapeError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match integer(value) {
            Some(n) if n <= SIZE_MAX => Ok(Some(to_u32(n))),
            _ => Err(self.range(key, value, "an integer from 0 to 2,097,152")),
        }
    }

    /// A number of tokens of context.
    pub(super) fn positions(&self, key: &str) -> Result<Option<u32>, ShapeError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match integer(value).and_then(|n| u32::try_from(n).ok()) {
            Some(n) if n > 0 => Ok(Some(n)),
            _ => Err(self.range(key, value, "an integer from 1 to 4,294,967,295")),
        }
    }

    /// A count that some files state for each layer: a number, or a list of equal ones.
    pub(super) fn alike(&self, key: &str, layers: u32) -> Result<Option<u32>, ShapeError> {
        let Some(Value::Array(items)) = self.get(key) else {
            return self.count(key);
        };
        let first = items.first().and_then(integer).filter(|n| *n <= SIZE_MAX);
        match first {
            Some(n)
                if items.len() as u64 == u64::from(layers)
                    && items.iter().all(|item| integer(item) == Some(n)) =>
            {
                Ok(Some(to_u32(n)))
            }
            _ => Err(ShapeError::Unsupported {
                field: self.path(key).into(),
                what: "a list that is not the same number for each layer".into(),
            }),
        }
    }

    /// The count under one of `keys`, which are names for the same thing.
    ///
    /// # Errors
    /// If two of them disagree.
    pub(super) fn any_of(&self, keys: &[&str], layers: u32) -> Result<Option<u32>, ShapeError> {
        let mut found: Option<(&str, u32)> = None;
        for key in keys {
            let Some(value) = self.alike(key, layers)? else {
                continue;
            };
            match found {
                Some((first, of_first)) if of_first != value => {
                    return Err(ShapeError::Unsupported {
                        field: self.path(key).into(),
                        what: format!("{value}, where `{}` is {of_first},", self.path(first))
                            .into(),
                    });
                }
                Some(_) => {}
                None => found = Some((key, value)),
            }
        }
        Ok(found.map(|(_, value)| value))
    }

    pub(super) fn missing(&self, key: &str) -> ShapeError {
        ShapeError::Missing(self.path(key).into())
    }

    /// As [`missing`](Self::missing), for a value that has several names.
    pub(super) fn missing_any(&self, keys: &[&str]) -> ShapeError {
        let names: Vec<String> = keys.iter().map(|key| self.path(key)).collect();
        ShapeError::Missing(names.join("` or `").into())
    }

    pub(super) fn range(&self, key: &str, found: &Value, must: &'static str) -> ShapeError {
        ShapeError::Range {
            field: self.path(key).into(),
            found: shown(found),
            must,
        }
    }

    pub(super) fn unsupported(&self, key: &str, what: impl Into<String>) -> ShapeError {
        ShapeError::Unsupported {
            field: self.path(key).into(),
            what: what.into().into(),
        }
    }

    /// Refuses unread keys that may matter. `twin`: an object whose keys may be repeated here; `media`: keys
    /// about encoders are expected.
    pub(super) fn close(
        &self,
        of: &str,
        twin: Option<&Object>,
        media: bool,
    ) -> Result<(), ShapeError> {
        let read = self.log.read.borrow();
        let mut material = Vec::new();
        for (key, value) in self.object {
            let path = self.path(key);
            let same = twin.and_then(|twin| twin.get(key)) == Some(value);
            if read.contains(&path) || same || media && keys::is_media(key) {
                continue;
            }
            match keys::bearing(key, value) {
                Bearing::None => {}
                Bearing::Unlikely => self
                    .log
                    .ignored
                    .borrow_mut()
                    .push(format!("`{}`", cleaned(&path))),
                Bearing::Possible => {
                    material.push(format!("`{}` = {}", cleaned(&path), shown(value)));
                }
            }
        }
        if material.is_empty() {
            return Ok(());
        }
        let more = material.len().saturating_sub(NAMED_MAX);
        material.truncate(NAMED_MAX);
        let mut keys = material.join(", ");
        if more > 0 {
            keys = format!("{keys} and {more} more");
        }
        Err(ShapeError::Unread {
            keys,
            of: of.to_owned(),
        })
    }
}

/// Keys that count layers of multi-token prediction, which are left out, and describe them.
pub(super) const MTP: &[&str] = &[
    "num_nextn_predict_layers",
    "num_mtp_modules",
    "num_mtp_layers",
    "_num_mtp_layers",
    "mtp_share_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
    "use_mtp",
    "mtp_transformer_layers",
    "mtp_use_dedicated_embeddings",
    "multi_token_prediction",
];

/// Far above any model, and small enough that products of three stay below 2^64.
const SIZE_MAX: u64 = 1 << 21;
/// Keys that an error names.
const NAMED_MAX: usize = 6;

/// A whole number, also if it is written as a real one (`8.0`), as Python writes some.
pub(super) fn integer(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let real = value.as_f64()?;
        let whole = real.fract() == 0.0 && (0.0..=1e15).contains(&real);
        whole.then(|| slipstream_base::width::floor_u64(real))
    })
}

/// A value as errors show it: cut, and without control characters.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    let short: String = text.chars().filter(|c| !c.is_control()).take(40).collect();
    if short.len() < text.len() {
        short + "…"
    } else {
        short
    }
}

pub(super) fn cleaned(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Null, false, 0, or nothing but those: a feature that is off.
pub(super) fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || text.eq_ignore_ascii_case("none"),
        Value::Array(items) => items.iter().all(is_nothing),
        Value::Object(entries) => entries.values().all(is_nothing),
    }
}
