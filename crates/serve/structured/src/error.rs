//! Why a schema, or the JSON that it demands, is refused.

use std::fmt;

/// Why no text can be made: where in the schema, and what stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormError {
    /// Path within the schema, with points; empty for its root.
    pub at: String,
    /// The error there, as a sentence.
    pub message: String,
}

impl FormError {
    /// The error `message` at `path`.
    pub(crate) fn at(path: &[String], message: impl Into<String>) -> FormError {
        FormError {
            at: path.join("."),
            message: message.into(),
        }
    }
}

impl fmt::Display for FormError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
